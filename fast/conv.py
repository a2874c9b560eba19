"""
Triton kernels of the short causal convolution and its SiLU, with a carried state of w - 1 columns.

  causal_conv_forward, conv_backward_into    the convolution and its backward, one kernel each, for fast/mixer.py
  causal_conv        replaces ops.causal_conv without gradients
  causal_conv_both   replaces block_ops.causal_conv_both: two directions at once, for generation

The convolution is bound by memory, so it is not fused with the scan, which is bound by registers and products.

Without a GPU, Triton's interpreter tests them:    python -m pytest tests/kernels/test_kernels.py -k conv
Time them on one, in whole models:                 python bench.py train --only=mamba_h_350m
"""
from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

import ops
from fast.triton_tools import like, operator, rowwise, sigmoid, strides

# For each channel, out_i = silu(a_i) with a_i = bias + sum_j weight_j u_{i-w+1+j}; `initial` holds
# the w - 1 columns before u_0. Memory bounds the kernels, so a program reads each value once: it
# walks along the positions (the backward from the end) and keeps the last w values in registers.
# Offsets within a row are 32-bit numbers.

# (groups of w positions in a piece, pieces in a program, warps), the fastest on an H200. The forward's
# fastest grid axis is the channels, so programs that run together read neighbouring memory. Pieces / R
# is a grid axis of at most 65,535, which allows 33 million positions.
FORWARD, FORWARD_FEW, BACKWARD = (8, 4, 4), (2, 2, 1), (32, 8, 4)
FEW = 2048  # up to this many positions do not fill a GPU; the shortest pieces are then the fastest


def check_row(u):
    assert u.shape[1] * u.stride(1) < 2 ** 31, "a row is too long for the convolution kernels: its offsets have 32 bits"


@triton.jit
def columns(u, initial, at, kc, ok, s, sul, sil, W: tl.constexpr):
    """Loads u at positions `at`, channels kc: an (at, kc) tile. Positions past s are zeros; those before 0 come
    from `initial`, or are zeros without it."""
    if initial is not None:
        u = tl.where(at >= 0, u + at * sul, initial + (at + W - 1) * sil)
    else:
        u, ok = u + at * sul, ok & (at >= 0)[:, None]
    return tl.load(u[:, None] + kc[None, :], mask=ok & (at < s)[:, None], other=0.0)


@triton.jit
def conv_weights(weight, bias, kc, c, W: tl.constexpr):
    w = ()
    for j in tl.static_range(W):
        w += (tl.load(weight + kc * W + j, mask=kc < c, other=0.0).to(tl.float32)[None, :],)
    return w, tl.load(bias + kc, mask=kc < c, other=0.0).to(tl.float32)[None, :]


@triton.jit
def weighted(w, values, W: tl.constexpr):
    out = w[0] * values[0]
    for j in tl.static_range(1, W):
        out += w[j] * values[j]
    return out


@triton.jit
def conv_kernel(u, weight, bias, initial, out, rows, s, c, sur, sul, suw, sir, sil,
                W: tl.constexpr, T: tl.constexpr, R: tl.constexpr, K: tl.constexpr):
    """R pieces of T positions by K channels of one direction (`way`). Way 0 walks from a row's start to its end,
    way 1 from the end to the start, beginning with zeros."""
    piece = tl.program_id(1) * R + tl.arange(0, R)
    row, start = (piece // tl.cdiv(s, T)).to(tl.int64), piece % tl.cdiv(s, T) * T
    kc, way, ways = tl.program_id(0) * K + tl.arange(0, K), tl.program_id(2), tl.num_programs(2)
    end, sign = tl.cast(way, tl.int64) * (s - 1), 1 - 2 * way
    ok = (row < rows)[:, None] & (kc < c)[None, :]
    w, b = conv_weights(weight + way * c * W, bias + way * c, kc, c, W)
    u, sul = u + row * sur + way * suw + end * sul, sul * sign
    if initial is not None:
        initial += row * sir
    us = (tl.zeros((R, K), tl.float32),)  # the last W values of u; these zeros are dropped unread
    for j in tl.static_range(1, W):
        i = start - W + j
        stored = ok & ((i >= 0) | (way == 0))[:, None]
        us += (columns(u, initial, i, kc, stored, s, sul, sil, W).to(tl.float32),)
    out += ((row * s + end) * ways + way) * c
    for t in range(0, T, W):
        new = ()  # issue the loads of W positions together
        for j in tl.static_range(W):
            new += (columns(u, None, start + t + j, kc, ok, s, sul, 0, W),)
        for j in tl.static_range(W):
            i = start + t + j
            us = us[1:] + (new[j].to(tl.float32),)
            a = b + weighted(w, us, W)
            tl.store((out + i * (sign * ways * c))[:, None] + kc[None, :],
                     (a * sigmoid(a)).to(out.dtype.element_ty), mask=ok & (i < s)[:, None])


@triton.jit
def conv_back_step(u, dout, us, das, w, b, W: tl.constexpr):
    """Moves one position to the left, to i: `us` becomes u at i-w+1..i, and `das` becomes da at i+w-1..i."""
    us = (u.to(tl.float32),) + us[:W - 1]
    a = b + weighted(w, us, W)
    sig = sigmoid(a)
    return us, das[1:] + (dout.to(tl.float32) * (sig * (1 + a * (1 - sig))),)


@triton.jit
def conv_backward_kernel(u, weight, bias, initial, dout, du, dparams, dinitial, rows, s, c, sur, sul, sir, sil, sor,
                         sol, sdr, sdl, W: tl.constexpr, T: tl.constexpr, R: tl.constexpr, K: tl.constexpr):
    """R pieces of T positions by K channels, each from end to start, with da_i = dout_i silu'(a_i):
        du_i = sum_j weight_j da_{i+w-1-j}        dweight_j = sum_i da_i u_{i-w+1+j}
    It starts with the w - 1 positions after the piece, for their da only. `dparams` (programs, w + 1, c) gets this
    program's part of dweight and, in its last row, of dbias."""
    piece = tl.program_id(0) * R + tl.arange(0, R)
    row, end = (piece // tl.cdiv(s, T)).to(tl.int64), (piece % tl.cdiv(s, T) + 1) * T
    kc = tl.program_id(1) * K + tl.arange(0, K)
    ok = (row < rows)[:, None] & (kc < c)[None, :]
    w, b = conv_weights(weight, bias, kc, c, W)
    u, dout, du = u + row * sur, dout + row * sor, du + row * sdr
    if initial is not None:
        initial += row * sir
    zero = tl.zeros((R, K), tl.float32)
    us, das, dw, db = (), (), (), zero
    for j in tl.static_range(W):  # the last of `us` is dropped unread
        uj = columns(u, initial, end + j, kc, ok, s, sul, sil, W)
        us, das, dw = us + (uj.to(tl.float32),), das + (zero,), dw + (zero,)
    for j in tl.static_range(1, W):
        i = end + W - 1 - j
        uj = columns(u, initial, i - W + 1, kc, ok, s, sul, sil, W)
        us, das = conv_back_step(uj, columns(dout, None, i, kc, ok, s, sol, 0, W), us, das, w, b, W)
    for t in tl.range(0, T, W, num_stages=3):
        new, douts = (), ()  # issue the loads of W positions together
        for j in tl.static_range(W):
            i = end - 1 - t - j
            new += (columns(u, initial, i - W + 1, kc, ok, s, sul, sil, W),)
            douts += (columns(dout, None, i, kc, ok, s, sol, 0, W),)
        for j in tl.static_range(W):
            i = end - 1 - t - j
            us, das = conv_back_step(new[j], douts[j], us, das, w, b, W)
            tl.store((du + i * sdl)[:, None] + kc[None, :],
                     weighted(w, das, W).to(du.dtype.element_ty), mask=ok & (i < s)[:, None])
            sums = ()
            for k in tl.static_range(W):
                sums += (dw[k] + us[k] * das[W - 1],)
            dw, db = sums, db + das[W - 1]
    if initial is not None:  # a row's first piece goes on into `initial`, where da is zero
        for j in tl.static_range(1, W):
            das = das[1:] + (zero,)
            at = (dinitial + (row * (W - 1) + W - 1 - j) * c)[:, None] + kc[None, :]
            tl.store(at, weighted(w, das, W).to(du.dtype.element_ty), mask=ok & (end == T)[:, None])
    dparams += tl.program_id(0).to(tl.int64) * (W + 1) * c + kc
    for k in tl.static_range(W):
        tl.store(dparams + k * c, tl.sum(dw[k], 0), mask=kc < c)
    tl.store(dparams + W * c, tl.sum(db, 0), mask=kc < c)


@operator(lambda u, weight, bias, initial: u.new_empty(u.shape))
def causal_conv_forward(u: Tensor, weight: Tensor, bias: Tensor, initial: Optional[Tensor]) -> Tensor:
    r, s, ways, c = u.shape if u.dim() == 4 else (*u.shape[:2], 1, u.shape[2])
    out, W, K = u.new_empty(u.shape), weight.shape[-1], 64
    check_row(u)
    steps, R, warps = FORWARD if r * s * ways > FEW else FORWARD_FEW
    T, pieces = steps * W, r * triton.cdiv(s, steps * W)
    conv_kernel[triton.cdiv(c, K), triton.cdiv(pieces, R), ways](
        u, weight, bias, initial, out, r, s, c, *strides(u, 3), *strides(initial, 2), W, T, R, K, num_warps=warps)
    return out


def conv_backward_into(du, dout, u, weight, bias, initial):
    """Writes the gradient of u into du. Of both, and of dout, the last dimension is contiguous. -> dweight, dbias,
    dinitial"""
    (r, s, c), (dweight, dbias, dinitial) = u.shape, like(weight, bias, initial)
    (steps, R, warps), W, K = BACKWARD, weight.shape[1], 64
    for v in (u, dout, du):
        check_row(v)
    programs = triton.cdiv(r * triton.cdiv(s, steps * W), R)
    dparams = u.new_empty(programs, W + 1, c, dtype=torch.float32)
    conv_backward_kernel[programs, triton.cdiv(c, K)](
        u, weight, bias, initial, dout, du, dparams, dinitial, r, s, c, *strides(u, 2), *strides(initial, 2),
        *strides(dout, 2), *strides(du, 2), W=W, T=steps * W, R=R, K=K, num_warps=warps)
    dparams = dparams.sum(0)
    return dweight.copy_(dparams[:W].T), dbias.copy_(dparams[W]), dinitial


def causal_conv(u, weight, bias, initial):
    """As ops.causal_conv. The plain function runs if gradients are enabled: training has fast/mixer.py."""
    if torch.is_grad_enabled():
        return ops.causal_conv.plain(u, weight, bias, initial)
    return causal_conv_both(u, weight, bias, initial)


def causal_conv_both(u, weight, bias, initial):
    """As block_ops.causal_conv_both: direction 0 runs forward from initial (r, w - 1, c), direction 1 backward from
    zeros. u (r, s, 2, c), weight (2, c, w), bias (2, c) -> (r, s, 2, c). Or direction 0 alone, without the axis of 2.
    Sums are fp32. No gradients."""
    return causal_conv_forward(rowwise(u), weight.contiguous(), bias.contiguous(), rowwise(initial.to(u.dtype)))
