"""
A Mamba-2 mixer between its input projection and its output as one operator with one backward: the
fast twin of mamba_mixer in ops.py for training.

Left to autograd, the same lines keep the convolved x, B and C and the gated and normed y of every
mixer, and join the gradients of z, x, B, C and dt by copies. Here the backward makes the first two
again from the projection and from y (a convolution and a norm, both cheap), and all gradients are
written into one buffer, that of the projection: less memory and fewer passes over it.
"""
from typing import Optional, Tuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

import kernels
import kernels_conv
from kernels import operator

EPS = 1e-5                              # of the norm; as in ops.gated_norm
TOKENS = 16                             # that a program of the norm's backward walks over


@triton.jit
def gate(y, z, row, k, ok, szt, d: tl.constexpr, eps):
    """One token: y, z, silu(z), its sigmoid, and the normed g = y silu(z) with 1 / its rms."""
    yk = tl.load(y + row * d + k, mask=ok, other=0.0).to(tl.float32)
    zk = tl.load(z + row * szt + k, mask=ok, other=0.0).to(tl.float32)
    sig = tl.sigmoid(zk)
    g = yk * zk * sig
    rstd = tl.rsqrt(tl.sum(g * g) / d + eps)
    return yk, zk, sig, g * rstd, rstd


@triton.jit
def gated_norm_kernel(y, z, weight, out, szt, eps, d: tl.constexpr, P: tl.constexpr):
    row, k = tl.program_id(0).to(tl.int64), tl.arange(0, P)
    _, _, _, g, _ = gate(y, z, row, k, k < d, szt, d, eps)
    w = tl.load(weight + k, mask=k < d, other=0.0).to(tl.float32)
    tl.store(out + row * d + k, (g * w).to(out.dtype.element_ty), mask=k < d)


@triton.jit
def gated_norm_backward_kernel(dout, y, z, weight, out, dy, dz, dweight, tokens, szt, sdzt, eps,
                               d: tl.constexpr, P: tl.constexpr, T: tl.constexpr):
    """`out` is made again for the product that follows it. `dweight` (programs, d) gets shares."""
    k = tl.arange(0, P)
    w = tl.load(weight + k, mask=k < d, other=0.0).to(tl.float32)
    dw = tl.zeros((P,), tl.float32)
    for i in range(T):
        row = tl.program_id(0).to(tl.int64) * T + i
        ok = (k < d) & (row < tokens)
        yk, zk, sig, g, rstd = gate(y, z, row, k, ok, szt, d, eps)
        do = tl.load(dout + row * d + k, mask=ok, other=0.0).to(tl.float32)
        tl.store(out + row * d + k, (g * w).to(out.dtype.element_ty), mask=ok)
        dw += do * g
        dg = rstd * (do * w - g * (tl.sum(do * w * g) / d))
        tl.store(dy + row * d + k, (dg * zk * sig).to(dy.dtype.element_ty), mask=ok)
        dzk = dg * yk * sig * (1 + zk * (1 - sig))
        tl.store(dz + row * sdzt + k, dzk.to(dz.dtype.element_ty), mask=ok)
    tl.store(dweight + tl.program_id(0).to(tl.int64) * d + k, dw, mask=k < d)


def gated_norm(y, z, weight):
    """y (r, s, d) contiguous, z (r, s, d) of a contiguous projection -> (r, s, d)"""
    out, d = torch.empty_like(y), y.shape[-1]
    gated_norm_kernel[y.numel() // d,](y, z, weight, out, z.stride(1), EPS, d=d,
                                       P=triton.next_power_of_2(d), num_warps=4)
    return out


def gated_norm_backward(dout, y, z, weight, dz):
    """Writes into dz. -> the forward's result, dy, dweight"""
    d = y.shape[-1]
    tokens = y.numel() // d
    out, dy, programs = torch.empty_like(y), torch.empty_like(y), triton.cdiv(tokens, TOKENS)
    dweight = y.new_empty(programs, d, dtype=torch.float32)
    gated_norm_backward_kernel[programs,](
        dout, y, z, weight, out, dy, dz, dweight, tokens, z.stride(1), dz.stride(1), EPS, d=d,
        P=triton.next_power_of_2(d), T=TOKENS, num_warps=4)
    return out, dy, dweight.sum(0)


# ----------------------------------------------------------------------------------------------
# The operator

def parts(proj, widths):
    """z, xBC and dt of a projection."""
    return proj[..., :sum(widths)].split(widths, -1)


def scan_inputs(xBC, dt, dt_bias, h, n):
    """x (r, s, h, p), dt (r, s, h) fp32, B and C (r, s, n)"""
    x, B, C = xBC.split([xBC.shape[-1] - 2 * n, n, n], -1)
    return x.unflatten(-1, (h, -1)), F.softplus(dt.float() + dt_bias), B, C


def in_rows(row, *tensors):
    """(b, s, ...) -> (b * s / row, row, ...)"""
    return tuple(v.unflatten(1, (-1, row)).flatten(0, 1) for v in tensors)


def sizes(proj, conv_weight, A, norm_weight, row):
    """widths of z, xBC and dt; heads, state size; whether the scan goes over several rows"""
    di, c, h = norm_weight.numel(), conv_weight.shape[0], A.numel()
    return (di, c, h), h, (c - di) // 2, proj.shape[1] > row


def fake_outputs(proj, conv_weight, conv_bias, dt_bias, A, D, norm_weight, out_weight, conv, ssm, row,
                 block_len):
    (di, c, _), h, n, several = sizes(proj, conv_weight, A, norm_weight, row)
    b, s, _ = proj.shape
    states = (b, s // row + 1, h, di // h, n) if several or block_len else (0,)
    convs = (b, s // block_len + 1, conv_weight.shape[1] - 1, c) if block_len else (0,)
    return (proj.new_empty(b, s, out_weight.shape[0]), proj.new_empty(b, s, di),
            proj.new_empty(states, dtype=torch.float32), proj.new_empty(convs))


@operator(fake_outputs)
def mixer_forward(proj: Tensor, conv_weight: Tensor, conv_bias: Tensor, dt_bias: Tensor, A: Tensor,
                  D: Tensor, norm_weight: Tensor, out_weight: Tensor, conv: Optional[Tensor],
                  ssm: Optional[Tensor], row: int, block_len: int) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> the output (b, s, d); for the backward y (b, s, h p); the states before and after every row
    (b, s / row + 1, h, p, n), empty where a single row needs none; the convolution states at block
    boundaries (b, s / block_len + 1, w - 1, c). block_len = 0: nobody wants the states."""
    widths, h, n, several = sizes(proj, conv_weight, A, norm_weight, row)
    z, xBC, dt = parts(proj, widths)
    convs = boundary_columns(xBC, conv_weight, conv, block_len)
    xBC = kernels_conv.causal_conv_forward(xBC, conv_weight, conv_bias, conv)
    x, dt, B, C = scan_inputs(xBC, dt, dt_bias, h, n)
    states = proj.new_empty(0, dtype=torch.float32)
    if several or block_len:
        start = kernels.room_for_final(x, B).zero_() if ssm is None else ssm.float()
        states = row_states(x, dt, A, B, start, row)
        ssm = states[:, :-1].flatten(0, 1)
    y = kernels.ssd_rows_forward(*in_rows(row, x, dt), A, *in_rows(row, B, C), D, ssm, False)[0]
    y = y.reshape(z.shape)
    out = gated_norm(y, z, norm_weight) @ out_weight.T
    return out, y, states, convs


def boundary_columns(xBC, conv_weight, conv, block_len):
    """ops.conv_boundaries"""
    if not block_len:
        return xBC.new_empty(0)
    w1 = conv_weight.shape[1] - 1
    ends = xBC.unflatten(1, (-1, block_len))[:, :, block_len - w1:]            # (b, k, w - 1, c)
    first = xBC.new_zeros(len(xBC), 1, w1, xBC.shape[-1]) if conv is None else conv[:, None]
    return torch.cat([first, ends], 1)


def row_states(x, dt, A, B, start, row):
    xs, dts, Bs = in_rows(row, x, dt, B)
    local = kernels.ssd_row_states_forward(xs, dts, A, Bs).unflatten(0, (len(x), -1))
    return kernels.pass_states(local, (dt * A).unflatten(1, (-1, row)).sum(2), start)


@operator(lambda dout, dstates, dconvs, y, states, *inputs: kernels.like(*inputs[:10]))
def mixer_backward(dout: Tensor, dstates: Optional[Tensor], dconvs: Optional[Tensor], y: Tensor, states: Tensor, proj: Tensor,
                   conv_weight: Tensor, conv_bias: Tensor, dt_bias: Tensor, A: Tensor, D: Tensor,
                   norm_weight: Tensor, out_weight: Tensor, conv: Optional[Tensor],
                   ssm: Optional[Tensor], row: int, block_len: int) -> Tuple[
                       Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    widths, h, n, several = sizes(proj, conv_weight, A, norm_weight, row)
    z, xBC, dt_raw = parts(proj, widths)
    dproj = torch.empty_like(proj)
    dproj[..., sum(widths):] = 0
    dz, dxBC, ddt_raw = parts(dproj, widths)

    # The output projection and the gated norm.
    dout = dout.reshape(-1, dout.shape[-1])
    dgated = (dout @ out_weight).view(y.shape)
    gated, dy, dnorm = gated_norm_backward(dgated, y, z, norm_weight, dz)
    dout_weight = dout.T @ gated.flatten(0, 1)
    del gated, dgated

    # The scan.
    convolved = kernels_conv.causal_conv_forward(xBC, conv_weight, conv_bias, conv)
    x, dt, B, C = scan_inputs(convolved, dt_raw, dt_bias, h, n)
    start = states[:, :-1].flatten(0, 1) if states.numel() else ssm
    xs, dts, Bs, Cs = in_rows(row, x, dt, B, C)
    dx, ddt, dA, dB, dC, dD, dstart = kernels.ssd_rows_backward(
        dy.view_as(x).unflatten(1, (-1, row)).flatten(0, 1), xs, dts, A, Bs, Cs, D, start)
    dssm = dstart if ssm is not None else proj.new_empty(0)
    if states.numel():                                  # and back over the states of the rows
        total = torch.zeros_like(states) if dstates is None else dstates.clone()
        total[:, :-1] += dstart.view_as(total[:, :-1])
        log_decay = (dt * A).unflatten(1, (-1, row)).sum(2)
        dlocal, dlog, dinitial = kernels.pass_states_backward(total, states, log_decay)
        dx2, ddt2, dA2, dB2 = kernels.ssd_row_states_backward(dlocal.flatten(0, 1), xs, dts, A, Bs)
        dlog = dlog.flatten(0, 1)[:, None]                                     # (rows, 1, h)
        dx, ddt, dB = dx.add_(dx2), ddt + ddt2 + dlog * A, dB + dB2
        dA = dA + dA2 + (dts * dlog).sum((0, 1))
        dssm = dinitial.to(ssm.dtype) if ssm is not None else dssm
    ddt = ddt.view(dt.shape) * torch.sigmoid(dt_raw.float() + dt_bias)
    ddt_raw.copy_(ddt)

    # The convolution.
    du = torch.cat([v.reshape(*proj.shape[:2], -1) for v in (dx, dB, dC)], -1)
    dw, db, dconv = kernels_conv.conv_backward_into(dxBC, du, xBC, conv_weight, conv_bias, conv)
    if dconvs is not None:
        dxBC.unflatten(1, (-1, block_len))[:, :, block_len - dconvs.shape[2]:] += dconvs[:, 1:]
        if conv is not None:
            dconv += dconvs[:, 0]
    return dproj, dw, db, ddt.sum((0, 1)), dA, dD, dnorm.to(norm_weight.dtype), dout_weight, dconv, dssm


def save(ctx, inputs, output):
    *tensors, ctx.row, ctx.block_len = inputs
    ctx.save_for_backward(output[1], output[2], *tensors)


def backward(ctx, dout, _, dstates, dconvs):
    y, states, *tensors = ctx.saved_tensors
    boundaries = (dstates, dconvs) if ctx.block_len else (None, None)
    grads = mixer_backward(dout, *boundaries, y, states, *tensors, ctx.row, ctx.block_len)
    return *(None if u is None else g for u, g in zip(tensors, grads)), None, None


mixer_forward.register_autograd(backward, setup_context=save)


def mamba_mixer(proj, conv_weight, conv_bias, dt_bias, A, D, norm_weight, out_weight, conv, ssm, row,
                block_len=0):
    """
    ops.mamba_mixer, with gradients for everything; the scan goes over rows of `row` positions, which
    divides the block. -> the output (b, s, d), and with block_len the convolution states (b, k + 1,
    w - 1, c) and the scan states (b, k + 1, h, p, n) before every block and at the end; else None.
    """
    conv = None if conv is None else kernels.rowwise(conv.to(proj.dtype))
    out, _, states, convs = mixer_forward(
        proj.contiguous(), conv_weight.contiguous(), conv_bias, dt_bias.float(), A.float(), D.float(),
        norm_weight, out_weight.to(proj.dtype), conv, ssm, row, block_len)
    return (out, convs, states[:, ::block_len // row]) if block_len else (out, None, None)
