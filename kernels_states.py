"""
Triton kernels of the states that pass between the rows of a sequence.

  ssd_row_states   the state that each row alone leaves behind (a part of ssd_scan in ops.py)
  pass_states      these states carried over the rows (twin in ops.py: pass_states)

A module of its own, beside the scan: a row's outputs come from kernels.py, given the state that it
starts from, and with a single row nothing here runs.

Without a GPU, Triton's interpreter tests it:    python -m pytest tests/test_kernels.py -k state
Time it on one, as a part of the scan:           python bench.py ops --only=['scan']
"""
from typing import Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import (LOG2E, differentiable, dot, like, load2, operator, place, room_for_final,
                     rowwise, settings, store2, strides, walk)

FILL = 1024  # programs wanted of the scan's backward; to get there, heads split
PASS = 1024  # elements of a state, e = p n of them, per program that carries states


# ----------------------------------------------------------------------------------------------
# What a row leaves behind: the scan without its outputs, as kernels.py walks it.

@triton.jit
def states_backward_kernel(x, dt, A, B, ds, dx, xgb, dB, l, h, heads,
                           sxr, sxl, sxh, sdr, sdl, sdh, sBr, sBl,
                           n: tl.constexpr, p: tl.constexpr, q: tl.constexpr):
    """dx and dB of one (row, chunk) and some heads, G being the gradient `ds` of the row's end:
        d(dt_j x_j) = e^{a_l - a_j} G B_j        dB_j = sum_heads e^{a_l - a_j} dt_j G x_j
    `xgb` (r, l, h) gets x_j.d(dt_j x_j), of which the caller makes ddt and dA."""
    row, c = (tl.program_id(0) // tl.cdiv(l, q)).to(tl.int64), tl.program_id(0) % tl.cdiv(l, q)
    kn, kp = tl.arange(0, n), tl.arange(0, p)
    first, step, ok = place(c, l, q)
    bq = load2(B + row * sBr, first, step, ok, sBl, kn)
    db = tl.zeros((q, n), tl.float32)
    for head in range(tl.program_id(1) * heads, min((tl.program_id(1) + 1) * heads, h)):
        xq = load2(x + row * sxr + head * sxh, first, step, ok, sxl, kp)
        g = tl.load(ds + (row * h + head) * p * n + kp[:, None] * n + kn[None, :]).to(xq.dtype)
        dt_head = dt + row * sdr + head * sdh
        dtq = tl.load(dt_head + first * sdl + step * sdl, mask=ok, other=0.0)
        left = tl.zeros((q,), tl.float32)  # the row's remaining chunks
        for k in range(c + 1, tl.cdiv(l, q)):
            first_k, step_k, ok_k = place(k, l, q)
            left += tl.load(dt_head + first_k * sdl + step_k * sdl, mask=ok_k, other=0.0)
        a_head = tl.load(A + head) * LOG2E
        to_end = tl.exp2((tl.sum(dtq + left) - tl.cumsum(dtq)) * a_head)
        gb = dot(bq, tl.trans(g)) * to_end[:, None]  # (q, p)
        db += dot(xq, g) * (dtq * to_end)[:, None]
        out = (row * l + first) * h + head
        store2(dx + out * p, step, ok, h * p, kp, gb * dtq[:, None])
        tl.store(xgb + out + step * h, tl.sum(xq.to(tl.float32) * gb, 1), mask=ok)
    r = (tl.num_programs(0) // tl.cdiv(l, q)).to(tl.int64)
    store2(dB + ((tl.program_id(1) * r + row) * l + first) * n, step, ok, n, kn, db)


def head_groups(r, l, h, q):
    """Rows and chunks too few to fill the GPU: cut the heads in groups too.
    -> programs, groups, heads per group"""
    programs = r * triton.cdiv(l, q)
    heads = triton.cdiv(h, min(h, max(1, FILL // programs)))
    return programs, triton.cdiv(h, heads), heads


def group_sums(groups, like):
    """Room for a gradient that each group of heads adds to; a single one writes its final dtype."""
    return like.new_empty(groups, *like.shape, dtype=like.dtype if groups == 1 else torch.float32)


def summed(parts, like):
    return parts[0] if len(parts) == 1 else parts.sum(0).to(like.dtype)


@operator(lambda x, dt, A, B: room_for_final(x, B))
def ssd_row_states_forward(x: Tensor, dt: Tensor, A: Tensor, B: Tensor) -> Tensor:
    final = room_for_final(x, B)
    walk(x, dt, A, B, final=final)
    return final


@operator(lambda ds, *inputs: like(*inputs))
def ssd_row_states_backward(ds: Tensor, x: Tensor, dt: Tensor, A: Tensor,
                            B: Tensor) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    (r, l, h, p), (dx, xgb) = x.shape, like(x, dt)
    programs, groups, heads = head_groups(r, l, h, settings("states_backward", x)["q"])
    dB = group_sums(groups, B)
    states_backward_kernel[(programs, groups)](
        x, dt, A, B, ds.contiguous(), dx, xgb, dB, l, h, heads, *strides(x, 3), *strides(dt, 3),
        *strides(B, 2), n=B.shape[-1], p=p, **settings("states_backward", x))
    dlog = (dt * xgb).cumsum(1) - dt * xgb  # dt_i A decays what the tokens before i left
    return dx, xgb + A * dlog, (dt * dlog).sum((0, 1)), summed(dB, B)


differentiable(ssd_row_states_forward, ssd_row_states_backward)


def ssd_row_states(x, dt, A, B):
    """-> (r, h, p, n) fp32: the state each row ends in, from zeros. Shapes as in `ssd_rows`."""
    return ssd_row_states_forward(rowwise(x), dt, A, rowwise(B))


# ----------------------------------------------------------------------------------------------
# States over rows: out_0 = initial, out_{i+1} = e^{log_decay_i} out_i + local_i. Everything is read
# once and written once, and only the states themselves are kept for the backward.

@triton.jit
def pass_kernel(local, log_decay, initial, states, c, h, e, E: tl.constexpr):
    """One (batch, head) and E elements of its state, which never meet."""
    b, head = (tl.program_id(0) // h).to(tl.int64), tl.program_id(0) % h
    k = tl.program_id(1) * E + tl.arange(0, E)
    s = tl.load(initial + (b * h + head) * e + k, mask=k < e)
    tl.store(states + (b * (c + 1) * h + head) * e + k, s, mask=k < e)
    for i in range(c):
        at = (b * c + i) * h + head
        decay = tl.exp2(tl.load(log_decay + at) * LOG2E)
        s = s * decay + tl.load(local + at * e + k, mask=k < e)
        tl.store(states + (at + (b + 1) * h) * e + k, s, mask=k < e)


@triton.jit
def pass_backward_kernel(dstates, states, log_decay, dlocal, ddecay, dinitial, c, h, e,
                         E: tl.constexpr):
    """The adjoint loop: dlocal_i = G, then G' = e^{log_decay_i} G + dstates_i. `ddecay` (programs
    per state, b, c, h) gets this program's share of <e^{log_decay_i} G, states_i>."""
    b, head = (tl.program_id(0) // h).to(tl.int64), tl.program_id(0) % h
    k = tl.program_id(1) * E + tl.arange(0, E)
    g = tl.load(dstates + ((b * (c + 1) + c) * h + head) * e + k, mask=k < e, other=0.0)
    ddecay += tl.program_id(1) * (tl.num_programs(0) * c).to(tl.int64)
    for j in range(c):
        at = (b * c + c - 1 - j) * h + head
        tl.store(dlocal + at * e + k, g, mask=k < e)
        s = tl.load(states + (at + b * h) * e + k, mask=k < e, other=0.0)
        ds = tl.load(dstates + (at + b * h) * e + k, mask=k < e, other=0.0)
        g *= tl.exp2(tl.load(log_decay + at) * LOG2E)
        tl.store(ddecay + at, tl.sum(g * s))
        g += ds
    tl.store(dinitial + (b * h + head) * e + k, g, mask=k < e)


def room_for_states(local):
    b, c, *state = local.shape
    return local.new_empty(b, c + 1, *state)


@operator(lambda local, log_decay, initial: room_for_states(local))
def pass_states(local: Tensor, log_decay: Tensor, initial: Tensor) -> Tensor:
    """local (b, c, h, p, n), log_decay (b, c, h), initial (b, h, p, n), all fp32
    -> (b, c + 1, h, p, n) fp32. Differentiable in all three."""
    (b, c, h, p, n), states = local.shape, room_for_states(local)
    pass_kernel[b * h, triton.cdiv(p * n, PASS)](
        local.contiguous(), log_decay.contiguous(), initial.contiguous(), states, c, h, p * n,
        E=PASS)
    return states


@operator(lambda dstates, states, log_decay: like(states[:, 1:], log_decay, states[:, 0]))
def pass_states_backward(dstates: Tensor, states: Tensor,
                         log_decay: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
    (b, c, h), (p, n) = log_decay.shape, states.shape[3:]
    (dlocal, dinitial), programs = like(states[:, 1:], states[:, 0]), triton.cdiv(p * n, PASS)
    ddecay = states.new_empty(programs, b, c, h)
    pass_backward_kernel[b * h, programs](
        dstates.contiguous(), states, log_decay.contiguous(), dlocal, ddecay, dinitial, c, h, p * n,
        E=PASS)
    return dlocal, ddecay.sum(0), dinitial


pass_states.register_autograd(
    lambda ctx, dstates: pass_states_backward(dstates, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output, inputs[1]))
