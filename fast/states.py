"""
Triton kernels of the scan over long sequences. They replace ops.ssd_scan.

  ssd_scan         the replacement: cuts a sequence into rows and scans all rows at once
  pass_states      carries states forward over the rows of a sequence, or their gradients backward

fast/scan.py scans inside a row.

Without a GPU, Triton's interpreter tests them:    python -m pytest tests/kernels/test_kernels.py -k state
Time them on one, as a part of the scan:           python bench.py ops --only=scan
"""
from typing import Optional, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

import fast.scan as scan
import ops
from fast.triton_tools import LOG2E, like, operator, rowwise, statewise

PASS = 1024  # pass_kernel: elements of a state per program, of the e = p n elements that a state has


# ----------------------------------------------------------------------------------------------
# Carries states over the c rows of a sequence, S forward or their gradients G back. Each value is read once and written
# once.
#
#     S_0 = initial           S_{i+1} = e^{log_decay_i} S_i + local_i
#     G_c = dstates_c         G_i     = e^{log_decay_i} G_{i+1} + local_i + dstates_i
#
# Forward, local_i is the last state of row i if the row starts from zeros. Back, dstates is the gradient of the
# returned states, and local_i is the gradient of the state at the start of row i that comes from the outputs of row i.

@triton.jit
def pass_kernel(local, log_decay, first, dstates, states, c, h, e, E: tl.constexpr,
                BACK: tl.constexpr):
    """The recurrence above: writes S or, with BACK, G into `states`. One program: E elements of the states of one
    (sequence, head); elements are independent of each other. `first` is `initial`; first and dstates may be None."""
    b, head = (tl.program_id(0) // h).to(tl.int64), tl.program_id(0) % h
    k = tl.program_id(1) * E + tl.arange(0, E)
    states, at = states + b * (c + 1) * h * e + k, head * e
    if dstates is not None:
        dstates += b * (c + 1) * h * e + k
    s = tl.zeros((E,), tl.float32)
    if first is not None:
        s += tl.load(first + (b * h + head) * e + k, mask=k < e)
    for j in range(c + 1):
        i = tl.cast(c - j if BACK else j, tl.int64)  # state i; for j > 0 from the state before, across one row
        if j > 0:
            row = (b * c + (i if BACK else i - 1)) * h + head
            s *= tl.exp2(tl.load(log_decay + row) * LOG2E)
            s += tl.load(local + row * e + k, mask=k < e)
        if dstates is not None:
            s += tl.load(dstates + at + i * h * e, mask=k < e)
        tl.store(states + at + i * h * e, s, mask=k < e)


def pass_states(local, log_decay, first=None, dstates=None, back=False):
    """The recurrence above, forward or `back`. local (b, c, h, p, n), log_decay (b, c, h), first (b, h, p, n),
    dstates (b, c + 1, h, p, n); the last two may be None for zeros. All fp32. -> (b, c + 1, h, p, n)"""
    b, c, h, p, n = local.shape
    states = local.new_empty(b, c + 1, h, p, n)
    local, log_decay, first, dstates = (
        None if v is None else v.contiguous() for v in (local, log_decay, first, dstates))
    pass_kernel[b * h, triton.cdiv(p * n, PASS)](
        local, log_decay, first, dstates, states, c, h, p * n, E=PASS, BACK=back)
    return states


# ----------------------------------------------------------------------------------------------
# The scan

def in_rows(row, *tensors):
    """(b, s, ...) -> (b s / row, row, ...) of each tensor. Without a copy if positions are evenly spaced."""
    return tuple(v.unflatten(1, (-1, row)).flatten(0, 1) for v in tensors)


def row_states(x, steps, B, s0, row):
    """-> the states before every row and at the end (b, s / row + 1, h, p, n), starting from s0, or from zeros if it
    is None. steps: the scan.StepSizes of all rows"""
    (b, s, h, p), n = x.shape, B.shape[-1]
    local = x.new_empty(b, s // row, h, p, n, dtype=torch.float32)
    scan.walk(*in_rows(row, x), steps, *in_rows(row, B), final=local)
    return pass_states(local, steps.log_decays(x), s0)


def scan_forward(x, steps, B, C, D, s0, row, want_states):
    """-> y (b, s, h, p), and the states that `row_states` gives; an empty tensor if they are not wanted and there is one
    row"""
    states, start = x.new_empty(0, dtype=torch.float32), s0
    if want_states or row < x.shape[1]:
        states = row_states(x, steps, B, s0, row)
        start = states[:, :-1]
    return scan.rows_forward(*in_rows(row, x), steps, *in_rows(row, B, C), D, start).view(x.shape), states


def scan_backward(dx, ddt, dB, dC, dy, dstates, x, steps, B, C, D, s0, states, row):
    """The backward of `scan_forward`. Writes into dx, ddt, dB and dC, whose positions must be evenly spaced. dy and
    dstates are the gradients of its two results; dstates may be None. -> the gradient of s0 (None if there are no
    states and no s0), dA, dD, and that of dt_bias if steps has one"""
    if not states.numel():
        ds0 = None if s0 is None else s0.new_empty(s0.shape)
        return ds0, *scan.rows_backward(dx, ddt, dB, dC, ds0, dy, x, steps, B, C, D, s0)
    xs, Bs, Cs, dys = in_rows(row, x, B, C, dy)
    grads = (v.view(-1, row, *v.shape[2:]) for v in (dx, ddt, dB, dC))  # view never copies: writes arrive
    local = states.new_empty(states[:, 1:].shape)
    scan.walk(dys, steps, Cs, final=local, adjoint=True)
    G = pass_states(local, steps.log_decays(x), None, dstates, back=True)
    del local
    return G[:, 0], *scan.rows_backward(
        *grads, None, dys, xs, steps, Bs, Cs, D, states[:, :-1], G[:, 1:])


def fake_outputs(x, dt, A, B, C, D, s0, row, want_states):
    (b, s, h, p), n = x.shape, B.shape[-1]
    states = (b, s // row + 1, h, p, n) if want_states or row < s else (0,)
    return x.new_empty(x.shape), x.new_empty(states, dtype=torch.float32)


@operator(fake_outputs)
def ssd_scan_forward(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor,
                     s0: Optional[Tensor], row: int, want_states: bool) -> Tuple[Tensor, Tensor]:
    return scan_forward(x, scan.StepSizes(*in_rows(row, dt), A), B, C, D, s0, row, want_states)


@operator(lambda dy, dstates, states, *inputs: like(*inputs[:7]))
def ssd_scan_backward(
        dy: Tensor, dstates: Tensor, states: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor,
        C: Tensor, D: Tensor, s0: Optional[Tensor], row: int) -> Tuple[
            Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dx, ddt, dB, dC = like(x, dt, B, C)
    steps = scan.StepSizes(*in_rows(row, dt), A)
    ds0, dA, dD = scan_backward(
        dx, ddt, dB, dC, rowwise(dy), dstates, x, steps, B, C, D, s0, states, row)
    return dx, ddt, dA, dB, dC, dD, x.new_empty(0) if s0 is None else ds0.clone()


def save(ctx, inputs, output):
    *tensors, ctx.row, _ = inputs
    ctx.save_for_backward(output[1], *tensors)


def backward(ctx, dy, dstates):
    grads = ssd_scan_backward(dy, dstates, *ctx.saved_tensors, ctx.row)
    return *(None if u is None else g for u, g in zip(ctx.saved_tensors[1:], grads)), None, None


torch.library.register_autograd(ssd_scan_forward, backward, setup_context=save)


def ssd_scan(x, dt, A, B, C, D, initial_state=None, block_len=None, chunk_len=128, want_states=True):
    """As ops.ssd_scan. The kernels choose their own chunks and ignore chunk_len. With want_states=False the returned
    states may be None. The plain function runs for head and state sizes that the kernels do not support."""
    if not scan.fits(x.shape[-1], B.shape[-1]):
        return ops.ssd_scan.plain(x, dt, A, B, C, D, initial_state, block_len, chunk_len, want_states)
    s, row = x.shape[1], scan.scan_row(x.shape[1], block_len)
    start = None if initial_state is None else statewise(initial_state.float())
    y, states = ssd_scan_forward(rowwise(x), dt, A.float(), rowwise(B), rowwise(C), D.float(), start, row, want_states)
    return y, states[:, ::(block_len or s) // row] if want_states else None  # one state for each block boundary
