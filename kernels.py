"""
Triton kernels, each the fast twin of a plain function in ops.py, which decides when they run.

  ssd_rows, ssd_row_states   the scan over many short rows, forward and backward (twin: ssd_scan)
  block_attention            one block against a long cache and itself (twin: cached_attention)

A module of its own, because nobody needs it to read or to run the model: Triton comes with torch's
CUDA build, and without it ops.py never imports this file. Tested without a GPU by Triton's
interpreter: TRITON_INTERPRET=1 python -m pytest tests/test_kernels.py
"""
import math
from typing import Optional, Tuple

import torch
import triton
import triton.language as tl

# ----------------------------------------------------------------------------------------------
# The scan. Every row r is a scan of its own over l tokens, with h heads of size p and a state of n per head:
#
#     s_i = exp(dt_i A) s_{i-1} + dt_i x_i (outer) B_i          y_i = s_i C_i + D x_i
#
# It walks chunks of q tokens. Inside a chunk it is a masked attention matrix, between chunks a state is handed on:
#
#     y_i = sum_{j<=i} L_ij (C_i.B_j) dt_j x_j + e^{a_i} C_i S + D x_i        a = cumsum(dt A),  L_ij = e^{a_i - a_j}
#     S' = e^{a_q} S + sum_j e^{a_q - a_j} dt_j B_j (outer) x_j
#
# Exponents are differences that are never positive (but for log dt), so nothing overflows. Sums are fp32; products
# take their operands in the dtype of x. Kernels keep a state transposed, (n, p): C S and B^T x need no transpose.

LOG2E = tl.constexpr(1.4426950408889634)  # exp(u) = exp2(u log2 e); the GPU has exp2 in hardware

# Launch settings per kernel: q tokens a chunk, warps, pipeline stages. One warpgroup (4 warps) multiplies 64 rows on
# Hopper, so q = 64 wastes nothing; a larger q does more work inside chunks and needs more registers than there are.
TUNE = {
    "forward": dict(q=64, num_warps=4, num_stages=2),
    "walk": dict(q=64, num_warps=4, num_stages=3),
    "backward": dict(q=64, num_warps=8, num_stages=2),
    "states_backward": dict(q=64, num_warps=8, num_stages=2),
}
FILL, SPREAD = 1024, 128  # programs wanted: the backward splits heads, the forward splits columns, to get there


def settings(kernel, x):
    if not x.is_cuda:
        return TUNE[kernel]
    if x.dtype == torch.float32:  # exact fp32 products use no tensor cores and hold their operands in registers
        return dict(q=16, num_warps=8, num_stages=1, maxnreg=255)
    if torch.cuda.get_device_capability(x.device)[0] < 9:  # A100; without maxnreg ptxas gives up and spills everything
        return TUNE[kernel] | dict(q=32, num_stages=1 if kernel == "backward" else 2, maxnreg=255)
    return TUNE[kernel]


@triton.jit
def dot(a, b, acc=None):
    return tl.dot(a, b, acc, input_precision="ieee")  # 'ieee': fp32 operands stay fp32 and are not cut to tf32


@triton.jit
def place(c, l, q: tl.constexpr):
    """Chunk c -> its first position in the row (64-bit, as offsets are), the steps from there, and which of them
    exist. Steps past the row's end load zeros: with dt = 0 and x = 0 any state stays as it is."""
    first, steps = tl.cast(c * q, tl.int64), tl.arange(0, q)
    return first, steps, c * q + steps < l


@triton.jit
def load2(ptr, first, step, ok, stride, cols):
    """Rows of a matrix whose last dimension is contiguous. -> (q, cols)"""
    return tl.load(ptr + first * stride + (step[:, None] * stride + cols[None, :]), mask=ok[:, None], other=0.0)


@triton.jit
def load_dt(dt, first, step, ok, stride, a_head):
    """-> dt_i, a_i = sum_{j<=i} dt_j A and its total over the chunk, these two in units of log 2."""
    dtq = tl.load(dt + first * stride + step * stride, mask=ok, other=0.0)
    log_decay = dtq * (a_head * LOG2E)
    return dtq, tl.cumsum(log_decay), tl.sum(log_decay)


@triton.jit
def forward_kernel(x, dt, A, B, C, D, s0, y, final, l, h, sxr, sxl, sxh, sdr, sdl, sdh, sBr, sBl, sCr, sCl, ssr, ssh, sar,
                   n: tl.constexpr, p: tl.constexpr, cols: tl.constexpr, q: tl.constexpr):
    """One (row, head) and `cols` of its p columns, which never meet: walk the chunks, the state in registers."""
    row, head = (tl.program_id(0) // h).to(tl.int64), tl.program_id(0) % h  # neighbours share B and C through L2
    kn, kp = tl.arange(0, n), tl.program_id(1) * cols + tl.arange(0, cols)
    x, dt, B, C = x + row * sxr + head * sxh, dt + row * sdr + head * sdh, B + row * sBr, C + row * sCr
    a_head, d_head = tl.load(A + row * sar + head), tl.load(D + row * sar + head)
    if s0 is not None:
        s = tl.load(s0 + row * ssr + head * ssh + kp[None, :] * n + kn[:, None])  # (n, cols) of a stored (p, n)
    else:
        s = tl.zeros((n, cols), tl.float32)
    for c in range(tl.cdiv(l, q)):
        first, step, ok = place(c, l, q)
        xq = load2(x, first, step, ok, sxl, kp)
        bq, cq = load2(B, first, step, ok, sBl, kn), load2(C, first, step, ok, sCl, kn)
        dtq, a, total = load_dt(dt, first, step, ok, sdl, a_head)
        i = c * q + tl.arange(0, q)
        # L_ij dt_j, with dt as an exponent (so that dt need not be loaded anew in the layout of its columns); the skip
        # D is the diagonal of the same matrix.
        log_L = tl.where(i[:, None] >= i[None, :], a[:, None] - a[None, :], float("-inf"))
        Ldt = tl.exp2(log_L + tl.log2(dtq)[None, :])
        scores = dot(cq, tl.trans(bq)) * Ldt + tl.where(i[:, None] == i[None, :], d_head, 0.0)  # (q, q)
        yq = dot(cq, s.to(cq.dtype)) * tl.exp2(a)[:, None]
        yq = dot(scores.to(xq.dtype), xq, yq)
        tl.store(y + ((row * l + first) * h + head) * p + (step[:, None] * (h * p) + kp[None, :]),
                 yq.to(y.dtype.element_ty), mask=ok[:, None])
        x_end = (xq * (dtq * tl.exp2(total - a))[:, None]).to(xq.dtype)  # what the chunk's end still sees of x
        s = dot(tl.trans(bq), x_end, s * tl.exp2(total))
    if final is not None:
        tl.store(final + (row * h + head) * p * n + kp[None, :] * n + kn[:, None], s)


@triton.jit
def walk_kernel(x, dt, A, B, s0, states, final, l, h, sxr, sxl, sxh, sdr, sdl, sdh, sBr, sBl, ssr, ssh,
                n: tl.constexpr, p: tl.constexpr, q: tl.constexpr, ADJOINT: tl.constexpr):
    """The state alone, one (row, head) a program. `states` (r, chunks, h, n, p) gets it before each chunk, `final`
    (r, h, p, n) at the end. ADJOINT runs the transposed recurrence over (dy, C) from the last chunk to the first:
        G' = e^{a_q} G + sum_i e^{a_i} C_i (outer) dy_i,    G the gradient of the state a chunk ends in."""
    row, head = (tl.program_id(0) // h).to(tl.int64), tl.program_id(0) % h
    kn, kp = tl.arange(0, n), tl.arange(0, p)
    x, dt, B = x + row * sxr + head * sxh, dt + row * sdr + head * sdh, B + row * sBr
    a_head, chunks = tl.load(A + head), tl.cdiv(l, q)
    if s0 is not None:
        s = tl.load(s0 + row * ssr + head * ssh + kp[None, :] * n + kn[:, None])
    else:
        s = tl.zeros((n, p), tl.float32)
    for k in range(chunks):
        c = chunks - 1 - k if ADJOINT else k
        if states is not None:
            tl.store(states + ((row * chunks + c) * h + head) * n * p + kn[:, None] * p + kp[None, :],
                     s.to(states.dtype.element_ty))
        first, step, ok = place(c, l, q)
        xq, bq = load2(x, first, step, ok, sxl, kp), load2(B, first, step, ok, sBl, kn)
        dtq, a, total = load_dt(dt, first, step, ok, sdl, a_head)
        weight = tl.exp2(a) if ADJOINT else dtq * tl.exp2(total - a)
        s = dot(tl.trans(bq), (xq * weight[:, None]).to(xq.dtype), s * tl.exp2(total))
    if final is not None:
        tl.store(final + (row * h + head) * p * n + kp[None, :] * n + kn[:, None], s)


@triton.jit
def backward_kernel(x, dt, A, B, C, D, dy, S, G, dx, ddt, dA, dB, dC, dD, l, h, heads,
                    sxr, sxl, sxh, sdr, sdl, sdh, sBr, sBl, sCr, sCl, syr, syl, syh,
                    n: tl.constexpr, p: tl.constexpr, q: tl.constexpr):
    """One (row, chunk) and a group of heads, so that dB and dC, which sum over heads, need no atomics. Given S before
    and G after the chunk, with V_ij = L_ij (C_i.B_j) (dy_i.x_j):
        u_j  = sum_i L_ij (C_i.B_j) dy_i + e^{a_q - a_j} G B_j            the gradient of dt_j x_j
        dB_j = sum_i (sum_heads L_ij dt_j dy_i.x_j) C_i + sum_heads e^{a_q - a_j} dt_j G x_j        and dC_i alike
        dloss/d(dt_i A) = sum_{j<i<=k} V_kj dt_j + sum_{k>=i} dy_k.(e^{a_k} C_k S)
                          + sum_{j<i} dt_j x_j.(e^{a_q - a_j} G B_j) + e^{a_q} <G, S>
    The (q, q) matrices are built transposed, j down and i across: each product then takes its operands as they are,
    and no product's result is transposed in registers (which Triton 3.6 gets wrong on Hopper)."""
    row, c = (tl.program_id(0) // tl.cdiv(l, q)).to(tl.int64), tl.program_id(0) % tl.cdiv(l, q)
    kn, kp = tl.arange(0, n), tl.arange(0, p)
    first, step, ok = place(c, l, q)
    B, C = B + row * sBr, C + row * sCr
    bq, cq = load2(B, first, step, ok, sBl, kn), load2(C, first, step, ok, sCl, kn)
    cb = tl.zeros((q, q), tl.float32)  # (j, i): B_j.C_i, the same for all heads
    for k in range(0, n, 32):  # a loop, as a product that feeds a product is otherwise computed twice by 8 warps
        k32 = k + tl.arange(0, 32)
        cb = dot(load2(B, first, step, ok, sBl, k32), tl.trans(load2(C, first, step, ok, sCl, k32)), cb)
    kv = tl.zeros((q, q), tl.float32)  # (j, i): sum over heads of L_ij dt_j dy_i.x_j
    db, dct = tl.zeros((q, n), tl.float32), tl.zeros((n, q), tl.float32)
    for head in range(tl.program_id(1) * heads, min((tl.program_id(1) + 1) * heads, h)):
        xq = load2(x + row * sxr + head * sxh, first, step, ok, sxl, kp)
        dyq = load2(dy + row * syr + head * syh, first, step, ok, syl, kp)
        state = ((row * tl.cdiv(l, q) + c) * h + head) * n * p
        s = tl.load(S + state + (kn[:, None] * p + kp[None, :]))  # (n, p)
        g = tl.load(G + state + (kn[:, None] * p + kp[None, :]))
        gs = tl.sum(g.to(tl.float32) * s.to(tl.float32))  # here, while few registers are taken
        a_head = tl.load(A + head)
        dtq, a, total = load_dt(dt + row * sdr + head * sdh, first, step, ok, sdl, a_head)
        from_start, to_end = tl.exp2(a), tl.exp2(total - a)
        x32, dy32 = xq.to(tl.float32), dyq.to(tl.float32)
        # Inside the chunk. Only differences of i count; adding `head` keeps the mask out of the registers.
        i = head + tl.arange(0, q)
        L = tl.exp2(tl.where(i[:, None] <= i[None, :], a[None, :] - a[:, None], float("-inf")))
        xy = dot(xq, tl.trans(dyq))  # (j, i)
        tl.store(dD + tl.program_id(0) * h + head, tl.sum(tl.where(i[:, None] == i[None, :], xy, 0.0)))
        Lxy = L * xy
        kv += Lxy * dtq[:, None]
        v = Lxy * cb
        v_rows, v_cols = tl.sum(v * dtq[:, None], 0), tl.sum(v, 1)
        # Through the state after the chunk. (Minus a minus: a plus would be merged into the product, see cb.)
        gb = dot(bq, g) * -to_end[:, None]  # (q, p)
        xgb = -tl.sum(x32 * gb, 1)
        u = dot((cb * L).to(xq.dtype), dyq) - gb
        db = dot((x32 * (dtq * to_end)[:, None]).to(xq.dtype), tl.trans(g), db)
        out = (row * l + first) * h + head
        dxq = u * dtq[:, None] + dy32 * tl.load(D + head)
        tl.store(dx + out * p + (step[:, None] * (h * p) + kp[None, :]), dxq.to(dx.dtype.element_ty), mask=ok[:, None])
        # Through the state before it.
        sdyc = tl.sum(dot(cq, s) * dy32, 1) * from_start
        dct = dot(s, tl.trans((dy32 * from_start[:, None]).to(xq.dtype)), dct)
        # The decays. Rows minus columns of V, summed from i on, leave the pairs j < i <= k: both must come from one V.
        later = tl.cumsum(v_rows + sdyc - dtq * (v_cols + xgb), reverse=True)
        dlog = later + tl.sum(dtq * xgb) + gs * tl.exp2(total)  # all of x.GB counts, less what `later` takes off
        tl.store(ddt + out + step * h, v_cols + xgb + dlog * a_head, mask=ok)
        tl.store(dA + tl.program_id(0) * h + head, tl.sum(dlog * dtq))
    kv = kv.to(bq.dtype)
    db += dot(kv, cq)
    dct += dot(tl.trans(bq), kv)
    group = tl.program_id(1) * (tl.num_programs(0) // tl.cdiv(l, q)).to(tl.int64)  # groups are summed by the caller
    out = ((group + row) * l + first) * n
    tl.store(dB + out + step[:, None] * n + kn[None, :], db.to(dB.dtype.element_ty), mask=ok[:, None])
    tl.store(dC + out + step[None, :] * n + kn[:, None], dct.to(dC.dtype.element_ty), mask=ok[None, :])


@triton.jit
def states_backward_kernel(x, dt, A, B, ds, dx, xgb, dB, l, h, heads, sxr, sxl, sxh, sdr, sdl, sdh, sBr, sBl,
                           n: tl.constexpr, p: tl.constexpr, q: tl.constexpr):
    """Backward of the state a row ends in: the G of `backward_kernel` is `ds` for the whole row. `xgb` (r, l, h) gets
    x_j.(e^{a_l - a_j} G B_j), of which the caller makes ddt and dA."""
    row, c = (tl.program_id(0) // tl.cdiv(l, q)).to(tl.int64), tl.program_id(0) % tl.cdiv(l, q)
    kn, kp = tl.arange(0, n), tl.arange(0, p)
    first, step, ok = place(c, l, q)
    bq = load2(B + row * sBr, first, step, ok, sBl, kn)
    db = tl.zeros((q, n), tl.float32)
    for head in range(tl.program_id(1) * heads, min((tl.program_id(1) + 1) * heads, h)):
        xq = load2(x + row * sxr + head * sxh, first, step, ok, sxl, kp)
        g = tl.load(ds + (row * h + head) * p * n + kp[:, None] * n + kn[None, :]).to(xq.dtype)  # (p, n)
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
        tl.store(dx + out * p + (step[:, None] * (h * p) + kp[None, :]), (gb * dtq[:, None]).to(dx.dtype.element_ty),
                 mask=ok[:, None])
        tl.store(xgb + out + step * h, tl.sum(xq.to(tl.float32) * gb, 1), mask=ok)
    group = tl.program_id(1) * (tl.num_programs(0) // tl.cdiv(l, q)).to(tl.int64)
    out = ((group + row) * l + first) * n
    tl.store(dB + out + step[:, None] * n + kn[None, :], db.to(dB.dtype.element_ty), mask=ok[:, None])



def last_dim_contiguous(u):
    return u if u.stride(-1) == 1 else u.contiguous()


def head_groups(r, l, h, q):
    """Rows and chunks too few to fill the GPU: cut the heads in groups too. -> programs, groups, heads per group"""
    programs = r * triton.cdiv(l, q)
    heads = triton.cdiv(h, min(h, max(1, FILL // programs)))
    return programs, triton.cdiv(h, heads), heads


def group_sums(groups, like):
    """Room for a gradient that each group of heads adds to; one group writes it in its final dtype."""
    return like.new_empty(groups, *like.shape, dtype=like.dtype if groups == 1 else torch.float32)


def summed(parts, like):
    return parts[0] if parts.shape[0] == 1 else parts.sum(0).to(like.dtype)


def walk(x, dt, A, B, s0=None, states=None, final=None, q=None, adjoint=False):
    """`states` are wanted at the chunks of the backward kernel, hence q."""
    r, l, h, p = x.shape
    how = settings("walk", x) | (dict(q=q) if q else {})
    walk_kernel[(r * h,)](x, dt, A, B, s0, states, final, l, h, *x.stride()[:3], *dt.stride(), *B.stride()[:2],
                          *(s0.stride()[:2] if s0 is not None else (0, 0)), n=B.shape[-1], p=p, ADJOINT=adjoint, **how)


# The kernels are registered as PyTorch operators: torch.compile then takes each for one opaque node of its graph.


@torch.library.custom_op("nanobdlm::ssd_rows", mutates_args=())
def rows_op(x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, D: torch.Tensor,
            s0: Optional[torch.Tensor], return_final: bool) -> Tuple[torch.Tensor, torch.Tensor]:
    (r, l, h, p), n = x.shape, B.shape[-1]
    y = x.new_empty(x.shape)
    final = x.new_empty((r, h, p, n) if return_final else (0,), dtype=torch.float32)
    cols = p
    while cols > 16 and r * h * (p // cols) < SPREAD:
        cols //= 2
    forward_kernel[(r * h, p // cols)](
        x, dt, A, B, C, D, s0, y, final if return_final else None, l, h, *x.stride()[:3], *dt.stride(),
        *B.stride()[:2], *C.stride()[:2], *(s0.stride()[:2] if s0 is not None else (0, 0)),
        A.stride(0) if A.dim() == 2 else 0, n=n, p=p, cols=cols,
        **settings("forward", x))
    return y, final


@rows_op.register_fake
def _(x, dt, A, B, C, D, s0, return_final):
    r, l, h, p = x.shape
    final = (r, h, p, B.shape[-1]) if return_final else (0,)
    return x.new_empty(x.shape), x.new_empty(final, dtype=torch.float32)


@torch.library.custom_op("nanobdlm::ssd_rows_backward", mutates_args=())
def rows_backward_op(
        dy: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor,
        D: torch.Tensor, s0: Optional[torch.Tensor]) -> Tuple[
            torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    (r, l, h, p), n, q = x.shape, B.shape[-1], settings("backward", x)["q"]
    dy = last_dim_contiguous(dy)
    S = x.new_empty(r, triton.cdiv(l, q), h, n, p)  # the state before each chunk, in the dtype of its products
    G = torch.empty_like(S)  # the gradient of the state after it
    ds0 = x.new_empty((r, h, p, n) if s0 is not None else (0,), dtype=torch.float32)
    walk(x, dt, A, B, s0, states=S, q=q)
    walk(dy, dt, A, C, None, G, ds0 if s0 is not None else None, q, adjoint=True)
    programs, groups, heads = head_groups(r, l, h, q)
    dx, ddt = x.new_empty(x.shape), dt.new_empty(dt.shape)
    dA, dD = dt.new_empty(programs, h), dt.new_empty(programs, h)
    dB, dC = group_sums(groups, B), group_sums(groups, C)
    backward_kernel[(programs, groups)](
        x, dt, A, B, C, D, dy, S, G, dx, ddt, dA, dB, dC, dD, l, h, heads, *x.stride()[:3], *dt.stride(),
        *B.stride()[:2], *C.stride()[:2], *dy.stride()[:3], n=n, p=p, **settings("backward", x))
    return dx, ddt, dA.sum(0), summed(dB, B), summed(dC, C), dD.sum(0), ds0


@rows_backward_op.register_fake
def _(dy, x, dt, A, B, C, D, s0):
    ds0 = (*x.shape[:1], *x.shape[2:], B.shape[-1]) if s0 is not None else (0,)
    return (*(u.new_empty(u.shape) for u in (x, dt, A, B, C, D)), x.new_empty(ds0, dtype=torch.float32))


def rows_save(ctx, inputs, output):
    *tensors, _ = inputs
    ctx.save_for_backward(*tensors)


def rows_backward(ctx, dy, dfinal):
    *grads, ds0 = rows_backward_op(dy, *ctx.saved_tensors)
    return *grads, ds0 if ctx.saved_tensors[-1] is not None else None, None


rows_op.register_autograd(rows_backward, setup_context=rows_save)


@torch.library.custom_op("nanobdlm::ssd_row_states", mutates_args=())
def row_states_op(x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    r, l, h, p = x.shape
    final = x.new_empty(r, h, p, B.shape[-1], dtype=torch.float32)
    walk(x, dt, A, B, final=final)
    return final


@row_states_op.register_fake
def _(x, dt, A, B):
    return x.new_empty(x.shape[0], *x.shape[2:], B.shape[-1], dtype=torch.float32)


@torch.library.custom_op("nanobdlm::ssd_row_states_backward", mutates_args=())
def row_states_backward_op(
        ds: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor) -> Tuple[
            torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    (r, l, h, p), n = x.shape, B.shape[-1]
    programs, groups, heads = head_groups(r, l, h, settings("states_backward", x)["q"])
    dx, xgb, dB = x.new_empty(x.shape), dt.new_empty(dt.shape), group_sums(groups, B)
    states_backward_kernel[(programs, groups)](
        x, dt, A, B, ds.contiguous(), dx, xgb, dB, l, h, heads, *x.stride()[:3], *dt.stride(), *B.stride()[:2], n=n,
        p=p, **settings("states_backward", x))
    dlog = (dt * xgb).cumsum(1) - dt * xgb  # dt_i A decays what the tokens before i leave in the state
    return dx, xgb + A * dlog, (dt * dlog).sum((0, 1)), summed(dB, B)


@row_states_backward_op.register_fake
def _(ds, x, dt, A, B):
    return tuple(u.new_empty(u.shape) for u in (x, dt, A, B))


row_states_op.register_autograd(lambda ctx, ds: row_states_backward_op(ds, *ctx.saved_tensors),
                                setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


def ssd_rows(x, dt, A, B, C, D, s0=None, return_final=False):
    """x (r, l, h, p), dt (r, l, h) fp32 and positive, A (h) fp32 and negative, B and C (r, l, n), D (h) fp32,
    s0 (r, h, p, n) fp32 or None: zeros. A and D may also be (r, h), without gradients: rows with parameters of
    their own. -> y (r, l, h, p) in the dtype of x; with return_final also the last state (r, h, p, n) fp32, which
    carries no gradient."""
    x, B, C = last_dim_contiguous(x), last_dim_contiguous(B), last_dim_contiguous(C)
    if s0 is not None and s0.stride()[2:] != (s0.shape[3], 1):
        s0 = s0.contiguous()
    y, final = rows_op(x, dt, A, B, C, D, s0, return_final)
    return (y, final.detach()) if return_final else y


def ssd_row_states(x, dt, A, B):
    """-> (r, h, p, n) fp32: the state each row ends in, scanned forward from zero. Shapes as in `ssd_rows`."""
    return row_states_op(last_dim_contiguous(x), dt, A, last_dim_contiguous(B))


# ----------------------------------------------------------------------------------------------
# Attention of one active block to a long cache: the inner loop of block-diffusion decoding.
#
# The l tokens of the block see all n prefix tokens and, both ways, each other: a plain l x (n + l) rectangle.
#  1. Split keys. One head has only l / M query tiles, too few to fill a GPU, so the keys are cut in `num_splits` shares
#     too. A program attends to its own share and leaves (o, log-sum-exp); a second small kernel averages them.
#  2. The length lives on the device. Grid and memory depend only on shapes, and each program reads lengths[b] and works
#     out its share. So one CUDA graph serves all lengths, shares are always even, programs without one leave.
#  3. The hot loop has no mask. Only full tiles of the cache go through it; the ragged tail is one separate tile.
#
# Tiles: M queries by N keys. Statistics are fp32 and in base 2, because exp2 is the instruction that the GPU has.

@triton.jit
def rows(ptr, stride: tl.constexpr, left, d: tl.constexpr, D: tl.constexpr, R: tl.constexpr, mask: tl.constexpr):
    """Load R rows of d values as an (R, D) tile. With `mask`, rows from `left` on read as zero: a cache holds anything
    past its length, NaN too, and 0 * NaN would come through p @ v. Tests on constexprs vanish: d = 64 has no mask."""
    r, c = tl.arange(0, R)[:, None], tl.arange(0, D)[None, :]
    if mask or d < D:
        return tl.load(ptr + r * stride + c, mask=(r < left) & (c < d), other=0.0)
    else:
        return tl.load(ptr + r * stride + c)

@triton.jit
def online_softmax(s, m, z, scale, left, N: tl.constexpr, mask: tl.constexpr):
    """Fold the scores s of one tile into the running row maximum m and row sum z (both of s * scale, base 2).
    Scaling after the product keeps q exact and costs nothing: s * scale - m is one fused multiply-add."""
    if mask:
        s = tl.where(tl.arange(0, N)[None, :] < left, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * scale)
    p = tl.exp2(s * scale - m_new[:, None])
    alpha = tl.exp2(m - m_new)  # what everything summed so far is worth under the new maximum
    return p, m_new, z * alpha + tl.sum(p, 1), alpha

@triton.jit
def tile(q, k, v, acc, m, z, scale, left, N: tl.constexpr, mask: tl.constexpr):
    """One whole step of flash attention: scores, softmax, values."""
    s = tl.dot(q, k.T, input_precision="ieee")
    p, m, z, alpha = online_softmax(s, m, z, scale, left, N, mask)
    return tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee"), m, z

@triton.jit
def shares(n_ptr, b, cap, num_splits, l: tl.constexpr, N: tl.constexpr, least: tl.constexpr):
    """Key tiles of batch row b: those of the prefix, then those of the block itself, cut in even shares. A share has
    at least `least` tiles, so a short prefix is not spread (and then combined) over programs with nothing to do."""
    n = tl.minimum(tl.load(n_ptr + b), cap)
    cached = tl.cdiv(n, N)
    total = cached + tl.cdiv(l, N)
    return n, cached, total, tl.maximum(tl.cdiv(total, num_splits), least)

@triton.jit
def attend_kernel(q_ptr, kc_ptr, vc_ptr, n_ptr, ko_ptr, vo_ptr, o_ptr, lse_ptr,
                  qb, qh, cb, ch, kb, kh, vb, vh, cap, scale, num_splits,
                  ql: tl.constexpr, cl: tl.constexpr, kl: tl.constexpr, vl: tl.constexpr, align: tl.constexpr,
                  h: tl.constexpr, l: tl.constexpr, d: tl.constexpr, D: tl.constexpr,
                  M: tl.constexpr, N: tl.constexpr, least: tl.constexpr, stages: tl.constexpr):
    # query tiles run fastest: the programs that read the same keys start together and share them in L2
    i, bh, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, head = (bh // h).to(tl.int64), (bh % h).to(tl.int64)  # 64 bits: b * h * cap * d passes 2^31
    n, cached, total, share = shares(n_ptr, b, cap, num_splits, l, N, least)
    lo, hi = split * share, tl.minimum(split * share + share, total)
    if lo >= hi:
        return

    # every row starts at a multiple of `align` values; being told so, the compiler can use wide loads for any d
    q_ptr += tl.multiple_of(b * qb + head * qh, align)
    kc_ptr += tl.multiple_of(b * cb + head * ch, align)
    vc_ptr += tl.multiple_of(b * cb + head * ch, align)
    ko_ptr += tl.multiple_of(b * kb + head * kh, align)
    vo_ptr += tl.multiple_of(b * vb + head * vh, align)
    q = rows(q_ptr + i * M * ql, ql, l - i * M, d, D, M, l % M > 0)
    acc, m, z = tl.zeros([M, D], tl.float32), tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    step = tl.full([], N * cl, tl.int64)  # from one tile of the cache to the next

    # 1. full tiles of the cache
    for t in tl.range(lo, tl.minimum(n // N, hi), num_stages=stages):
        k = rows(kc_ptr + t * step, cl, N, d, D, N, False)
        v = rows(vc_ptr + t * step, cl, N, d, D, N, False)
        acc, m, z = tile(q, k, v, acc, m, z, scale, N, N, False)

    # 2. the tail of the cache, when the prefix is no multiple of N and the tail is in this share
    t = n // N
    if (lo <= t) & (t < tl.minimum(hi, cached)):
        k = rows(kc_ptr + t * step, cl, n - t * N, d, D, N, True)
        v = rows(vc_ptr + t * step, cl, n - t * N, d, D, N, True)
        acc, m, z = tile(q, k, v, acc, m, z, scale, n - t * N, N, True)

    # 3. the block itself
    for t in tl.range(tl.maximum(lo - cached, 0), hi - cached, num_stages=2):
        k = rows(ko_ptr + t * N * kl, kl, l - t * N, d, D, N, l % N > 0)
        v = rows(vo_ptr + t * N * vl, vl, l - t * N, d, D, N, l % N > 0)
        acc, m, z = tile(q, k, v, acc, m, z, scale, l - t * N, N, l % N > 0)

    r, c = i * M + tl.arange(0, M), tl.arange(0, D)
    row = ((split * (tl.num_programs(1) // h) + b) * l + r) * h + head  # o is (split, b, l, h, d), lse (split, b, l, h)
    o = acc * (1 / z)[:, None]
    tl.store(o_ptr + row[:, None] * d + c[None, :], o.to(o_ptr.dtype.element_ty), mask=(r < l)[:, None] & (c < d)[None, :])
    tl.store(lse_ptr + row, m + tl.log2(z), mask=r < l)

@triton.jit
def combine_kernel(part_ptr, lse_ptr, o_ptr, n_ptr, cap, num_splits, h: tl.constexpr, l: tl.constexpr, d: tl.constexpr,
                   D: tl.constexpr, S: tl.constexpr, R: tl.constexpr, N: tl.constexpr, least: tl.constexpr):
    """Mean of the splits' results, weighted by 2^lse: R rows (of b, l, h) by all splits in one go, one wait for memory."""
    b = tl.program_id(1).to(tl.int64)
    _, _, total, share = shares(n_ptr, b, cap, num_splits, l, N, least)
    s, r, c = tl.arange(0, S)[:, None], tl.program_id(0) * R + tl.arange(0, R)[None, :], tl.arange(0, D)
    live = (s < tl.cdiv(total, share)) & (r < l * h)  # the other splits had no keys and wrote nothing
    row = (s * tl.num_programs(1) + b) * (l * h) + r
    lse = tl.load(lse_ptr + row, mask=live, other=float("-inf"))
    part = tl.load(part_ptr + row[:, :, None] * d + c, mask=live[:, :, None] & (c < d), other=0.0)
    w = tl.exp2(lse - tl.max(lse, 0)[None, :])
    o = tl.sum(part * (w / tl.sum(w, 0)[None, :])[:, :, None], 0)
    r = tl.program_id(0) * R + tl.arange(0, R)[:, None]
    tl.store(o_ptr + (b * l * h + r) * d + c, o.to(o_ptr.dtype.element_ty), mask=(r < l * h) & (c < d))

def block_attention_splits(b, l, h, cap, device, M=128, N=64, warps=4, least=4):
    """As many shares as there are programs that run at once (8 warps per multiprocessor), with enough to do."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
    slots = sms * (8 // warps) // (b * h * triton.cdiv(l, M))
    return min(max(slots, 1), 32, triton.cdiv(triton.cdiv(cap, N) + triton.cdiv(l, N), least))


@torch.library.custom_op("nanobdlm::block_attention", mutates_args=())
def block_attention(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, lengths: torch.Tensor,
                    k_own: torch.Tensor, v_own: torch.Tensor, num_splits: int = 0) -> torch.Tensor:
    """softmax(q [k_cache[:n], k_own]^T / sqrt(d)) [v_cache[:n], v_own] with n = lengths[b]; inference only.
    q, k_own, v_own (b, l, h, d), any strides but the last; caches (b, h, cap, d); lengths (b,) int64 -> (b, l, h, d)"""
    (b, l, h, d), cap = q.shape, k_cache.shape[2]
    assert k_cache.shape == v_cache.shape == (b, h, cap, d) and k_cache.stride() == v_cache.stride()
    assert all(x.stride(-1) == 1 and x.dtype == q.dtype for x in (q, k_cache, v_cache, k_own, v_own))
    D, least = max(16, triton.next_power_of_2(d)), 4
    M, N, warps, stages = 128, 64, 4, 3                 # swept on an H200: 440 TFLOP/s at 262,144 keys
    if q.dtype == torch.float32:                        # exact fp32 products use the ordinary cores: for tests
        M, N, stages = 64, 32, 2
    M = min(M, max(16, triton.next_power_of_2(l)))
    warps = min(warps, M // 16)
    num_splits = num_splits or block_attention_splits(b, l, h, cap, q.device, M, N, warps, least)
    align = math.gcd(16, *(s for x in (q, k_cache, k_own, v_own) for s in x.stride()[:3]))
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    part = out if num_splits == 1 else q.new_empty(num_splits, b, l, h, d, dtype=torch.float32)
    lse = q.new_empty(num_splits, b, l, h, dtype=torch.float32)
    attend_kernel[triton.cdiv(l, M), b * h, num_splits](
        q, k_cache, v_cache, lengths, k_own, v_own, part, lse,
        q.stride(0), q.stride(2), *k_cache.stride()[:2], k_own.stride(0), k_own.stride(2), v_own.stride(0),
        v_own.stride(2), cap, d ** -0.5 * 1.4426950408889634, num_splits,      # log2(e): softmax in base 2
        ql=q.stride(1), cl=k_cache.stride(2), kl=k_own.stride(1), vl=v_own.stride(1), align=align,
        h=h, l=l, d=d, D=D, M=M, N=N, least=least, stages=stages, num_warps=warps)
    if num_splits > 1:
        S = triton.next_power_of_2(num_splits)
        R = max(1, 64 // S)
        combine_kernel[triton.cdiv(l * h, R), b](part, lse, out, lengths, cap, num_splits, h, l, d, D, S, R, N, least)
    return out


@block_attention.register_fake
def _(q, k_cache, v_cache, lengths, k_own, v_own, num_splits=0):
    return torch.empty_like(q, memory_format=torch.contiguous_format)
