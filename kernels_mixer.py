"""
A Mamba-2 mixer between its input projection and its output as one operator with one backward: the
fast twin of mamba_mixer in ops.py for training.

Left to autograd, the same lines keep the convolved x, B and C and the gated and normed y of every
mixer, and join the gradients of z, x, B, C and dt by copies. Here the backward makes the first two
again from the projection and from y (a convolution and a norm, both cheap), and every gradient is
written where it belongs in one buffer: less memory and fewer passes over it.

Without a GPU, Triton's interpreter tests it:    python -m pytest tests/test_kernels.py -k mixer
Time whole models of it on one:                  python bench.py train --only=['mamba_h_350m']
"""
from typing import Optional, Tuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

import kernels
import kernels_conv
import kernels_states
import ops
from kernels import operator

EPS = 1e-5  # of the norm, as in ops.gated_norm
TOKENS = 16  # that a program of the norm's backward walks over, summing the gradient of the weight


# ----------------------------------------------------------------------------------------------
# The gated norm: out = weight g / rms(g) with g = y silu(z). y and what is made of it are
# contiguous, z and dz are columns of wider tensors: szt and sdzt are their steps between tokens. A
# program loads a whole token, d channels padded to the power of two P.


@triton.jit
def gate(y, z, row, k, ok, szt, d: tl.constexpr, eps):
    """One token: y, z, the sigmoid of z, g / rms(g) and 1 / rms(g)."""
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
    """T tokens. `out`, which nobody kept, is made again for the gradient of the product after it;
    `dweight` (programs, d) gets this program's share."""
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
    """y (b, s, d) contiguous, z (b, s, d) columns of a contiguous tensor -> (b, s, d)"""
    out, d = torch.empty_like(y), y.shape[-1]
    gated_norm_kernel[y.numel() // d,](y, z, weight, out, z.stride(1), EPS, d=d,
                                       P=triton.next_power_of_2(d), num_warps=4)
    return out


def gated_norm_backward(dout, y, z, weight, dz):
    """dout as y; writes into dz, which is as z. -> the forward's result, dy, dweight in fp32"""
    d = y.shape[-1]
    tokens = y.numel() // d
    out, dy, programs = torch.empty_like(y), torch.empty_like(y), triton.cdiv(tokens, TOKENS)
    dweight = y.new_empty(programs, d, dtype=torch.float32)
    gated_norm_backward_kernel[programs,](
        dout, y, z, weight, out, dy, dz, dweight, tokens, z.stride(1), dz.stride(1), EPS, d=d,
        P=triton.next_power_of_2(d), T=TOKENS, num_warps=4)
    return out, dy, dweight.sum(0)


# ----------------------------------------------------------------------------------------------
# The operator. A sequence of s tokens is s / row rows: the scan runs over all rows at once, each
# from the state that the rows before it leave (see _ssd_scan_triton in ops.py).

def sizes(proj, conv_weight, A, norm_weight, row):
    """-> the widths of z, xBC and dt; heads; state size; whether a sequence is several rows"""
    di, c, h = norm_weight.numel(), conv_weight.shape[0], A.numel()
    return (di, c, h), h, (c - di) // 2, proj.shape[1] > row


def parts(proj, widths):
    """-> z, xBC and dt of a projection; what comes after them is padding"""
    return proj[..., :sum(widths)].split(widths, -1)


def split_xBC(xBC, h, n):
    """-> x (b, s, h, p), B and C (b, s, n), all of them views"""
    x, B, C = xBC.split([xBC.shape[-1] - 2 * n, n, n], -1)
    return x.unflatten(-1, (h, -1)), B, C


def step_sizes(dt, dt_bias):
    return F.softplus(dt.float() + dt_bias)


def in_rows(row, *tensors):
    """(b, s, ...) -> (b s / row, row, ...), views of tensors whose positions are evenly spaced"""
    return tuple(v.unflatten(1, (-1, row)).flatten(0, 1) for v in tensors)


def row_log_decays(dt, A, row):
    """-> (b, s / row, h)"""
    return (dt * A).unflatten(1, (-1, row)).sum(2)


def row_states(x, dt, A, B, ssm, row):
    """-> the states before every row and at the end (b, s / row + 1, h, p, n), from ssm or zeros"""
    start = kernels.room_for_final(x, B).zero_() if ssm is None else ssm.float()
    local = kernels_states.ssd_row_states_forward(*in_rows(row, x, dt), A, *in_rows(row, B))
    local = local.unflatten(0, (len(x), -1))  # (b, s / row, h, p, n)
    return kernels_states.pass_states(local, row_log_decays(dt, A, row), start)


def boundary_columns(xBC, conv_weight, conv, block_len):
    """-> the convolution states at block boundaries, or nothing without block_len"""
    if not block_len:
        return xBC.new_empty(0)
    if conv is None:
        conv = xBC.new_zeros(len(xBC), conv_weight.shape[1] - 1, xBC.shape[-1])
    return ops.conv_boundaries(xBC, conv, block_len)


def fake_outputs(proj, conv_weight, conv_bias, dt_bias, A, D, norm_weight, out_weight, conv, ssm,
                 row, block_len):
    (di, c, _), h, n, several = sizes(proj, conv_weight, A, norm_weight, row)
    b, s, _ = proj.shape
    states = (b, s // row + 1, h, di // h, n) if several or block_len else (0,)
    convs = (b, s // block_len + 1, conv_weight.shape[1] - 1, c) if block_len else (0,)
    return (proj.new_empty(b, s, out_weight.shape[0]), proj.new_empty(b, s, di),
            proj.new_empty(states, dtype=torch.float32), proj.new_empty(convs))


@operator(fake_outputs)
def mixer_forward(
        proj: Tensor, conv_weight: Tensor, conv_bias: Tensor, dt_bias: Tensor, A: Tensor, D: Tensor,
        norm_weight: Tensor, out_weight: Tensor, conv: Optional[Tensor], ssm: Optional[Tensor],
        row: int, block_len: int) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> the output (b, s, d); for the backward y (b, s, h p); the states before every row and at
    the end (b, s / row + 1, h, p, n), empty where a single row needs none; the convolution states
    at block boundaries (b, s / block_len + 1, w - 1, c). block_len = 0: nobody wants the states."""
    widths, h, n, several = sizes(proj, conv_weight, A, norm_weight, row)
    z, xBC, dt = parts(proj, widths)
    convs = boundary_columns(xBC, conv_weight, conv, block_len)
    x, B, C = split_xBC(kernels_conv.causal_conv_forward(xBC, conv_weight, conv_bias, conv), h, n)
    dt = step_sizes(dt, dt_bias)  # (b, s, h)
    states, start = proj.new_empty(0, dtype=torch.float32), ssm
    if several or block_len:
        states = row_states(x, dt, A, B, ssm, row)
        start = states[:, :-1]
    y, _ = kernels.ssd_rows_forward(*in_rows(row, x, dt), A, *in_rows(row, B, C), D, start, False)
    y = y.view(z.shape)
    return gated_norm(y, z, norm_weight) @ out_weight.T, y, states, convs


def scan_backward(dxBC, dy, xBC, dt, A, D, states, dstates, ssm, row):
    """xBC is convolved. Writes into dxBC. -> ddt (b, s, h), dA, dD, and dssm if there is ssm"""
    h, n = dt.shape[-1], (xBC.shape[-1] - dy.shape[-1]) // 2
    x, B, C, dt_rows, dy = in_rows(row, *split_xBC(xBC, h, n), dt, dy.unflatten(-1, (h, -1)))
    dx, dB, dC = in_rows(row, *split_xBC(dxBC, h, n))
    start = states[:, :-1] if states.numel() else ssm
    ddt, dA, dD, dstart = kernels.ssd_rows_backward_into(
        dx, dB, dC, dy, x, dt_rows, A, B, C, D, start)
    if states.numel():  # rows left something behind, from which x, B and dt get a second part
        total = torch.zeros_like(states) if dstates is None else dstates.clone()
        total[:, :-1] += dstart
        dlocal, dlog, dstart = kernels_states.pass_states_backward(
            total, states, row_log_decays(dt, A, row))
        dx2, ddt2, dA2, dB2 = kernels_states.ssd_row_states_backward(
            dlocal.flatten(0, 1), x, dt_rows, A, B)
        dlog = dlog.flatten(0, 1)[:, None]  # (rows, 1, h)
        dx += dx2
        dB += dB2
        ddt = ddt + ddt2 + dlog * A
        dA = dA + dA2 + (dt_rows * dlog).sum((0, 1))
    return ddt.view(dt.shape), dA, dD, dstart


@operator(lambda dout, dstates, dconvs, y, states, *inputs: kernels.like(*inputs[:10]))
def mixer_backward(
        dout: Tensor, dstates: Optional[Tensor], dconvs: Optional[Tensor], y: Tensor,
        states: Tensor, proj: Tensor, conv_weight: Tensor, conv_bias: Tensor, dt_bias: Tensor,
        A: Tensor, D: Tensor, norm_weight: Tensor, out_weight: Tensor, conv: Optional[Tensor],
        ssm: Optional[Tensor], row: int, block_len: int) -> Tuple[
            Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    widths, h, _, _ = sizes(proj, conv_weight, A, norm_weight, row)
    z, xBC, dt_raw = parts(proj, widths)
    dproj = torch.empty_like(proj)
    dproj[..., sum(widths):] = 0
    dz, dxBC, ddt_raw = parts(dproj, widths)

    # The output projection and the gated norm.
    dout = dout.flatten(0, 1)
    gated, dy, dnorm = gated_norm_backward((dout @ out_weight).view(y.shape), y, z, norm_weight, dz)
    dout_weight = dout.T @ gated.flatten(0, 1)
    del gated

    # The scan. The gradients of x, B and C lie side by side, as the convolution takes them.
    convolved = kernels_conv.causal_conv_forward(xBC, conv_weight, conv_bias, conv)
    dconvolved = torch.empty_like(convolved)
    ddt, dA, dD, dssm = scan_backward(dconvolved, dy, convolved, step_sizes(dt_raw, dt_bias), A, D,
                                      states, dstates, ssm, row)
    dssm = proj.new_empty(0) if ssm is None else dssm.to(ssm.dtype)
    ddt = ddt * torch.sigmoid(dt_raw.float() + dt_bias)
    ddt_raw.copy_(ddt)

    # The convolution.
    dw, db, dconv = kernels_conv.conv_backward_into(
        dxBC, dconvolved, xBC, conv_weight, conv_bias, conv)
    if dconvs is not None:
        w1 = dconvs.shape[2]
        dxBC.unflatten(1, (-1, block_len))[:, :, block_len - w1:] += dconvs[:, 1:]
        if conv is not None:
            dconv += dconvs[:, 0]
    return (dproj, dw, db, ddt.sum((0, 1)), dA, dD, dnorm.to(norm_weight.dtype), dout_weight, dconv,
            dssm)


def save(ctx, inputs, output):
    *tensors, ctx.row, ctx.block_len = inputs
    ctx.save_for_backward(output[1], output[2], *tensors)


def backward(ctx, dout, _, dstates, dconvs):
    y, states, *tensors = ctx.saved_tensors
    boundaries = (dstates, dconvs) if ctx.block_len else (None, None)
    grads = mixer_backward(dout, *boundaries, y, states, *tensors, ctx.row, ctx.block_len)
    return *(None if u is None else g for u, g in zip(tensors, grads)), None, None


mixer_forward.register_autograd(backward, setup_context=save)


def mamba_mixer(proj, conv_weight, conv_bias, dt_bias, A, D, norm_weight, out_weight, conv, ssm,
                row, block_len=0):
    """
    ops.mamba_mixer, with gradients for everything; the scan goes over rows of `row` >= w - 1
    positions, which divides the block. -> the output (b, s, d), and with block_len the convolution
    states (b, k + 1, w - 1, c) and the scan states (b, k + 1, h, p, n) before every block and at
    the end; else None.
    """
    conv = None if conv is None else kernels.rowwise(conv.to(proj.dtype))
    out, _, states, convs = mixer_forward(
        proj.contiguous(), conv_weight.contiguous(), conv_bias, dt_bias.float(), A.float(),
        D.float(), norm_weight, out_weight.to(proj.dtype), conv, kernels.statewise(ssm), row,
        block_len)
    return (out, convs, states[:, ::block_len // row]) if block_len else (out, None, None)
