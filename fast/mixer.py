"""
A Mamba-2 mixer, from the result of its input projection to its output, as one operator with one backward. It replaces
model.Mamba2.forward in training. In generation, its gated-norm kernel replaces ops.gated_norm.

Autograd would store the convolved x, B, C and the normed y of every mixer, and copy the gradients of z, x, B, C and dt
into one tensor. This backward recomputes the convolution and the norm, both cheap, and writes each gradient directly to
its place in one buffer. That needs less memory and fewer passes over it.

Without a GPU, Triton's interpreter tests it:    python -m pytest tests/kernels/test_kernels.py -k mixer
Time it on one:                                  python -m tools.compare_ops --only=mixer
"""
from typing import Optional, Tuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

import fast.scan as scan
import ops
from fast.conv import causal_conv_forward, conv_backward_into
from fast.scan import in_rows, scan_backward, scan_forward
from fast.triton_tools import like, operator, rowwise, sigmoid, statewise
from model import Mamba2
from ops import EPS

TOKENS = 32  # tokens per program in the norm's backward, which sums the weight's gradient over them


# ----------------------------------------------------------------------------------------------
# The gated norm: out = weight g / rms(g) with g = y silu(z). y, dy and out are contiguous. z and dz
# are column ranges of wider tensors: szt and sdzt are their strides between tokens. A program loads
# a whole token: d channels, padded to P, a power of two.


@triton.jit
def gate(y, z, k, ok, d: tl.constexpr, eps):
    """Loads one token. -> y, z, sigmoid(z), g / rms(g), 1 / rms(g)"""
    yk = tl.load(y + k, mask=ok, other=0.0).to(tl.float32)
    zk = tl.load(z + k, mask=ok, other=0.0).to(tl.float32)
    sig = sigmoid(zk)
    g = yk * zk * sig
    rstd = tl.rsqrt(tl.sum(g * g) / d + eps)
    return yk, zk, sig, g * rstd, rstd


@triton.jit
def gated_norm_kernel(y, z, weight, out, szt, eps, d: tl.constexpr, P: tl.constexpr):
    token, k = tl.program_id(0).to(tl.int64), tl.arange(0, P)
    _, _, _, g, _ = gate(y + token * d, z + token * szt, k, k < d, d, eps)
    w = tl.load(weight + k, mask=k < d, other=0.0).to(tl.float32)
    tl.store(out + token * d + k, (g * w).to(out.dtype.element_ty), mask=k < d)


@triton.jit
def gated_norm_backward_kernel(dout, y, z, weight, out, dy, dz, dweight, tokens, szt, sdzt, eps,
                               d: tl.constexpr, P: tl.constexpr, T: tl.constexpr):
    """Gradients of T tokens. `out` is recomputed, because the gradient of out_weight needs it. `dweight`
    (programs, d) gets this program's part."""
    k = tl.arange(0, P)
    w = tl.load(weight + k, mask=k < d, other=0.0).to(tl.float32)
    dw = tl.zeros((P,), tl.float32)
    for i in tl.range(T, num_stages=3):  # loads run two tokens ahead
        row = tl.program_id(0).to(tl.int64) * T + i
        ok = (k < d) & (row < tokens)
        do = tl.load(dout + row * d + k, mask=ok, other=0.0).to(tl.float32)
        yk, zk, sig, g, rstd = gate(y + row * d, z + row * szt, k, ok, d, eps)
        tl.store(out + row * d + k, (g * w).to(out.dtype.element_ty), mask=ok)
        dw += do * g
        dg = rstd * (do * w - g * (tl.sum(do * w * g) / d))
        tl.store(dy + row * d + k, (dg * zk * sig).to(dy.dtype.element_ty), mask=ok)
        dzk = dg * yk * sig * (1 + zk * (1 - sig))
        tl.store(dz + row * sdzt + k, dzk.to(dz.dtype.element_ty), mask=ok)
    tl.store(dweight + tl.program_id(0).to(tl.int64) * d + k, dw, mask=k < d)


@operator(lambda y, z, weight: torch.empty_like(y))
def gated_norm_forward(y: Tensor, z: Tensor, weight: Tensor) -> Tensor:
    """y (b, s, d) contiguous, z (b, s, d) a column range of a contiguous tensor, weight (d,) -> (b, s, d). No
    gradients."""
    assert z.stride(-1) == 1 and (len(z) == 1 or z.stride(0) == z.shape[1] * z.stride(1)), "z is not contiguous"
    out, d = torch.empty_like(y), y.shape[-1]
    gated_norm_kernel[y.numel() // d,](
        y, z, weight, out, z.stride(1), EPS, d=d, P=triton.next_power_of_2(d), num_warps=4)
    return out


def gated_norm(y, z, weight):
    """As ops.gated_norm. The plain function runs if gradients are enabled. z is a column range of a contiguous
    tensor."""
    if torch.is_grad_enabled():
        return ops.gated_norm.plain(y, z, weight)
    return gated_norm_forward(y.contiguous(), z, weight)


def gated_norm_backward(dout, y, z, weight, dz):
    """dout has the layout of y, dz that of z. Writes into dz. -> the forward's result, dy, dweight (fp32)"""
    d, tokens = y.shape[-1], y.shape[:-1].numel()
    out, dy, programs = torch.empty_like(y), torch.empty_like(y), triton.cdiv(tokens, TOKENS)
    dweight = y.new_empty(programs, d, dtype=torch.float32)
    gated_norm_backward_kernel[programs,](dout, y, z, weight, out, dy, dz, dweight, tokens, z.stride(1), dz.stride(1),
                                          EPS, d=d, P=triton.next_power_of_2(d), T=TOKENS, num_warps=4)
    return out, dy, dweight.sum(0)


# ----------------------------------------------------------------------------------------------
# The operator. A sequence of s tokens is cut into s / row rows. The scan runs over all rows at once,
# each from the state at the end of the row before it (see fast/scan.py).

def split_proj(proj, norm_weight, conv_weight, A):
    """-> z (b, s, d_inner), xBC (b, s, c), dt (b, s, h) and the padding of a projection"""
    widths = [len(norm_weight), len(conv_weight), len(A)]
    return proj.split([*widths, proj.shape[-1] - sum(widths)], -1)


def split_xBC(xBC, d_inner, h):
    """-> x (b, s, h, p), B and C (b, s, n), all views of xBC"""
    n = (xBC.shape[-1] - d_inner) // 2
    x, B, C = xBC.split([d_inner, n, n], -1)
    return x.unflatten(-1, (h, -1)), B, C


def boundary_columns(xBC, conv_weight, conv, states_every):
    """-> the convolution states every states_every positions; an empty tensor if that is 0"""
    if not states_every:
        return xBC.new_empty(0)
    if conv is None:
        conv = xBC.new_zeros(len(xBC), conv_weight.shape[1] - 1, xBC.shape[-1])
    # As ops.conv_boundaries, without a copy of xBC. Boundaries are at least the length of a state apart here.
    ends = xBC.unflatten(1, (-1, states_every))[:, :, states_every - conv.shape[1]:]  # (b, k, w - 1, c)
    return torch.cat([conv[:, None], ends], 1)


def fake_outputs(proj, conv_weight, conv_bias, dt_bias, A, D, norm_weight, out_weight, conv, ssm, row, states_every):
    (b, s, _), c, di, h = proj.shape, len(conv_weight), len(norm_weight), len(A)
    states = (b, s // row + 1, h, di // h, (c - di) // 2) if row < s or states_every else (0,)
    convs = (b, s // states_every + 1, conv_weight.shape[1] - 1, c) if states_every else (0,)
    return (proj.new_empty(b, s, out_weight.shape[0]), proj.new_empty(b, s, di),
            proj.new_empty(states, dtype=torch.float32), proj.new_empty(convs))


@operator(fake_outputs)
def mixer_forward(
        proj: Tensor, conv_weight: Tensor, conv_bias: Tensor, dt_bias: Tensor, A: Tensor, D: Tensor,
        norm_weight: Tensor, out_weight: Tensor, conv: Optional[Tensor], ssm: Optional[Tensor], row: int,
        states_every: int) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns four tensors:
    the output (b, s, d);
    y (b, s, h p), kept for the backward;
    the states before every row and at the end (b, s / row + 1, h, p, n), empty for one row if states_every is 0;
    the convolution states (b, s / states_every + 1, w - 1, c), empty if states_every is 0.
    states_every = 0 means that the caller does not need the states."""
    z, xBC, dt, _ = split_proj(proj, norm_weight, conv_weight, A)
    convs = boundary_columns(xBC, conv_weight, conv, states_every)
    x, B, C = split_xBC(causal_conv_forward(xBC, conv_weight, conv_bias, conv), len(norm_weight), len(A))
    steps = scan.StepSizes(*in_rows(row, dt), A, dt_bias)
    y, states = scan_forward(x, steps, B, C, D, ssm, row, states_every > 0)
    y = y.view(z.shape)
    return gated_norm_forward(y, z, norm_weight) @ out_weight.T, y, states, convs


# A gradient for each of the ten tensors among mixer_forward's inputs, so not for row and states_every.
@operator(lambda dout, dstates, dconvs, y, states, *inputs: like(*inputs[:10]))
def mixer_backward(
        dout: Tensor, dstates: Optional[Tensor], dconvs: Optional[Tensor], y: Tensor, states: Tensor, proj: Tensor,
        conv_weight: Tensor, conv_bias: Tensor, dt_bias: Tensor, A: Tensor, D: Tensor, norm_weight: Tensor,
        out_weight: Tensor, conv: Optional[Tensor], ssm: Optional[Tensor], row: int,
        states_every: int) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    z, xBC, dt, _ = split_proj(proj, norm_weight, conv_weight, A)
    dproj = torch.empty_like(proj)
    dz, dxBC, ddt, padding = split_proj(dproj, norm_weight, conv_weight, A)
    padding.zero_()

    # The output projection and the gated norm.
    dout = dout.flatten(0, 1)
    gated, dy, dnorm = gated_norm_backward((dout @ out_weight).view(y.shape), y, z, norm_weight, dz)
    dout_weight = dout.T @ gated.flatten(0, 1)
    del gated

    # The scan. It writes the gradients of x, B and C side by side, as the convolution's backward reads them.
    convolved = causal_conv_forward(xBC, conv_weight, conv_bias, conv)
    dconvolved = torch.empty_like(convolved)
    steps = scan.StepSizes(*in_rows(row, dt), A, dt_bias)
    (dx, dB, dC), (x, B, C) = (split_xBC(v, len(norm_weight), len(A)) for v in (dconvolved, convolved))
    dssm, dA, dD, ddt_bias = scan_backward(
        dx, ddt, dB, dC, dy.unflatten(-1, (len(A), -1)), dstates, x, steps, B, C, D, ssm, states, row)
    dssm = proj.new_empty(0) if ssm is None else dssm.contiguous()

    # The convolution.
    dw, db, dconv = conv_backward_into(dxBC, dconvolved, xBC, conv_weight, conv_bias, conv)
    if dconvs is not None:
        dxBC.unflatten(1, (-1, states_every))[:, :, states_every - dconvs.shape[2]:] += dconvs[:, 1:]
        if conv is not None:
            dconv += dconvs[:, 0]
    return dproj, dw, db, ddt_bias, dA, dD, dnorm.to(norm_weight.dtype), dout_weight, dconv, dssm


def save(ctx, inputs, output):
    *tensors, ctx.row, ctx.states_every = inputs
    ctx.save_for_backward(output[1], output[2], *tensors)


def backward(ctx, dout, _, dstates, dconvs):
    """From the gradients of mixer_forward's four outputs those of its twelve inputs. `_` is that of y: it is an output
    only so that it can be saved for this backward, so it has no gradient."""
    y, states, *tensors = ctx.saved_tensors
    boundaries = (dstates, dconvs) if ctx.states_every else (None, None)
    grads = mixer_backward(dout, *boundaries, y, states, *tensors, ctx.row, ctx.states_every)
    return *(None if u is None else g for u, g in zip(tensors, grads)), None, None


torch.library.register_autograd(mixer_forward, backward, setup_context=save)


def padded_projection(mixer):
    """The weight of in_proj with rows of zeros, (2 d_inner + 2 n + h + padding, d): tensor cores are fastest if its
    height is a multiple of 64."""
    return F.pad(mixer.in_proj.weight, (0, 0, 0, -mixer.in_proj.out_features % 64))


def mamba2_project(mixer, u):
    """As model.Mamba2.project, with a padded weight."""
    return F.linear(u, padded_projection(mixer))[..., :mixer.in_proj.out_features]


def mamba2_forward(mixer, u, conv=None, ssm=None, states_every=None, want_states=True):
    """As model.Mamba2.forward. The plain function runs if gradients are off or a size does not fit the kernels."""
    p, s, width = mixer.d_inner // mixer.heads, u.shape[1], mixer.conv_weight.shape[1]
    row = scan.scan_row(s, states_every)
    if not (torch.is_grad_enabled() and scan.fits(p, mixer.d_state) and row >= width):
        return Mamba2.forward.plain(mixer, u, conv, ssm, states_every, want_states)
    proj = F.linear(u, padded_projection(mixer))
    conv = None if conv is None else rowwise(conv.to(proj.dtype))
    every = (states_every or s) if want_states else 0
    y, _, states, convs = mixer_forward(
        proj.contiguous(), mixer.conv_weight.contiguous(), mixer.conv_bias, mixer.dt_bias.float(),
        -torch.exp(mixer.A_log.float()), mixer.D.float(), mixer.norm_weight, mixer.out_proj.weight.to(proj.dtype), conv,
        statewise(ssm), row, every)
    return (y, convs, states[:, ::every // row]) if want_states else (y, None, None)
