"""
Triton kernels of the state-space scan (eq. mamba-scan-background), forward and backward.

  ssd_rows         the scan over many short rows, with its backward: what noisy blocks need
  ssd_scan_both    both directions over one block, for generation (plain twin in fast/plain.py)
  ssd_scan_pairs   a block to be committed and the active block after it (plain twin there too)

The scan of a long sequence consists of such rows; fast/states.py carries the states over them and replaces
ops.ssd_scan. fast/mixer.py uses the same kernels inside a whole Mamba mixer.

Without a GPU, Triton's interpreter tests them:    python -m pytest tests/kernels/test_kernels.py -k scan
Time them on one:                                  python bench.py ops --only=['scan']
"""
from typing import Optional, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

import fast.plain as plain
import ops
from fast.triton_tools import LOG2E, differentiable, dot, like, operator, rowwise, statewise, strides


def fits(p, n):
    """Whether the kernels take head dimension p and state size n."""
    return p in (16, 32, 64) and n in (16, 32, 64, 128, 256)


def scan_row(s, block_len):
    """
    The length of a row for s tokens in blocks of block_len (None: one block of all tokens). It is the largest
    divisor of the block that is at most plain.SCAN_ROW, so that every block boundary is a row boundary; where that is
    below 16, the row is the whole block.
    """
    whole = block_len or s
    assert s % whole == 0, f"{s} positions are not whole blocks of {block_len}"
    row = ops.largest_divisor(whole, plain.SCAN_ROW)
    return row if row >= 16 else whole


# ----------------------------------------------------------------------------------------------
# The scan. Every row r is a scan of its own over l tokens, with h heads of size p, a state of n:
#
#     s_i = exp(dt_i A) s_{i-1} + dt_i x_i (outer) B_i          y_i = s_i C_i + D x_i
#
# It walks chunks of q tokens. Inside a chunk it is a masked attention matrix, between chunks a
# state is handed on; with a = cumsum(dt A) and L_ij = e^{a_i - a_j}:
#
#     y_i = sum_{j<=i} L_ij (C_i.B_j) dt_j x_j + e^{a_i} C_i S + D x_i
#     S' = e^{a_q} S + sum_j e^{a_q - a_j} dt_j B_j (outer) x_j
#
# Exponents are differences that are never positive (but for log dt), so nothing overflows. Sums
# are fp32; products take their operands in the dtype of x. Kernels keep a state transposed, (n, p):
# C S and B^T x need no transpose.

# Launch settings per kernel: q tokens a chunk, warps, pipeline stages. One warpgroup (4 warps)
# multiplies 64 rows on Hopper, so q = 64 wastes nothing; a larger q does more work inside chunks
# and needs more registers than there are.
TUNE = {
    "forward": dict(q=64, num_warps=4, num_stages=2),
    "tiles": dict(q=64, num_warps=4, num_stages=1),
    "walk": dict(q=64, num_warps=4, num_stages=3),
    "after": dict(q=64, num_warps=8, num_stages=3),
    "before": dict(q=64, num_warps=4, num_stages=3),
}
FEW, SHORT = 288, 1024  # tiles_kernel runs up to this rows x heads, and this row length


def settings(kernel, x):
    how = TUNE[kernel]
    if kernel == "forward" and x.shape[1] > 256:  # few long rows: 602 against 678 us on an H200
        how = how | dict(num_stages=1)
    # Measured on an H200 with Triton 3.6: y is wrong with q = 64 at head dimensions 16 and 32.
    if kernel == "forward" and x.shape[3] != 64:
        how = how | dict(q=32)
    if not x.is_cuda:
        return how
    if x.dtype == torch.float32:  # exact fp32 products hold their operands in registers
        return dict(q=16, num_warps=8, num_stages=1, maxnreg=255)
    if torch.cuda.get_device_capability(x.device)[0] < 9:  # without maxnreg ptxas spills everything
        return how | dict(q=32, num_stages=1 if kernel == "after" else 2, maxnreg=255)
    return how


@triton.jit
def place(c, l, q: tl.constexpr):
    """Chunk c -> its first position in the row (64-bit, as offsets are), the steps from there, and
    which of them exist. Steps past the row's end load zeros: with dt = 0 and x = 0 any state stays
    as it is."""
    first, steps = tl.cast(c * q, tl.int64), tl.arange(0, q)
    return first, steps, c * q + steps < l


@triton.jit
def load2(ptr, first, step, ok, stride, cols):
    """Rows of a matrix whose last dimension is contiguous. -> (q, cols)"""
    at = step[:, None] * stride + cols[None, :]
    return tl.load(ptr + first * stride + at, mask=ok[:, None], other=0.0)


@triton.jit
def store2(ptr, step, ok, stride, cols, values):
    at = step[:, None] * stride + cols[None, :]
    tl.store(ptr + at, values.to(ptr.dtype.element_ty), mask=ok[:, None])


@triton.jit
def softplus(u):
    """log(1 + e^u), exact far below zero too: what 1 + z loses of z, the quotient gives back."""
    z = tl.exp2(-tl.abs(u) * LOG2E)
    one = 1 + z
    return tl.maximum(u, 0.0) + tl.where(one == 1, z, tl.log(one) * (z / (one - 1)))


@triton.jit
def load_dt(dt, first, step, ok, stride, a_head, bias):
    """-> dt_i, a_i = sum_{j<=i} dt_j A and its total over the chunk, in units of log 2. With a
    bias that is not None dt_i is softplus(what is stored + bias)."""
    dtq = tl.load(dt + first * stride + step * stride, mask=ok, other=0.0).to(tl.float32)
    if bias is not None:
        dtq = tl.where(ok, softplus(dtq + bias), 0.0)
    log_decay = dtq * (a_head * LOG2E)
    return dtq, tl.cumsum(log_decay), tl.sum(log_decay)


@triton.jit
def load_step_sizes(steps, chunk, all_chunks, head, h, q: tl.constexpr):
    """dt_i, a_i and its total, of one of all_chunks, as `StepSizes` has laid them out."""
    at = (chunk * h + head) * q
    a = steps + tl.cast(all_chunks, tl.int64) * h * q + at
    i = tl.arange(0, q)
    return tl.load(steps + at + i), tl.load(a + i), tl.load(a + q - 1)


@triton.jit
def steps_kernel(dt, A, bias, steps, l, h, sdr, sdl, sdh, q: tl.constexpr, H: tl.constexpr):
    """One chunk of all heads; see `StepSizes`."""
    chunk, all_chunks = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    row, c = chunk // tl.cdiv(l, q), chunk % tl.cdiv(l, q)
    head = tl.arange(0, H)
    first, step, ok = place(c, l, q)
    at, mask = step[:, None] * sdl + head[None, :] * sdh, ok[:, None] & (head < h)[None, :]
    dtq = tl.load(dt + row * sdr + first * sdl + at, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        dtq = tl.where(mask, softplus(dtq + tl.load(bias + head, mask=head < h, other=0.0)[None, :]), 0.0)
    a_head = tl.load(A + head, mask=head < h, other=0.0)
    out = steps + (chunk * h + head)[None, :] * q + step[:, None]
    tl.store(out, dtq, mask=(head < h)[None, :])
    tl.store(out + all_chunks * h * q, tl.cumsum(dtq * (a_head * LOG2E)[None, :], 0), mask=(head < h)[None, :])


@triton.jit
def first_state(s0, row, head, rows, ssb, ssr, ssh, kn, kp, n: tl.constexpr, stored=True):
    """The (p, n) state a row starts from, see `state_view`, or zeros. -> (kn, kp)"""
    if s0 is not None:
        at = s0 + row // rows * ssb + row % rows * ssr + head * ssh + kp[None, :] * n + kn[:, None]
        return tl.load(at, mask=stored, other=0.0)
    else:
        return tl.zeros((kn.shape[0], kp.shape[0]), tl.float32)


@triton.jit
def forward_kernel(x, steps, B, C, D, s0, y, final, l, h,
                   sxr, sxl, sxh, sBr, sBl, sCr, sCl, rows, ssb, ssr, ssh,
                   n: tl.constexpr, p: tl.constexpr, q: tl.constexpr):
    """One (row, head): walk the chunks, the state in registers. Programs that share B and C are
    neighbours, and find them in L2."""
    row, head = (tl.program_id(0) // h).to(tl.int64), tl.program_id(0) % h
    chunks, kn, kp = tl.cdiv(l, q), tl.arange(0, n), tl.arange(0, p)
    x, B, C = x + row * sxr + head * sxh, B + row * sBr, C + row * sCr
    d_head, all_chunks = tl.load(D + head), tl.num_programs(0) // h * chunks
    s = first_state(s0, row, head, rows, ssb, ssr, ssh, kn, kp, n)
    for c in range(chunks):
        first, step, ok = place(c, l, q)
        xq = load2(x, first, step, ok, sxl, kp)
        bq, cq = load2(B, first, step, ok, sBl, kn), load2(C, first, step, ok, sCl, kn)
        dtq, a, total = load_step_sizes(steps, row * chunks + c, all_chunks, head, h, q)
        i = c * q + tl.arange(0, q)
        # L_ij dt_j, with dt as an exponent (so that dt need not be loaded anew in the layout of
        # its columns); the skip D is the diagonal of the same matrix.
        log_L = tl.where(i[:, None] >= i[None, :], a[:, None] - a[None, :], float("-inf"))
        Ldt = tl.exp2(log_L + tl.log2(dtq)[None, :])
        skip = tl.where(i[:, None] == i[None, :], d_head, 0.0)
        scores = dot(cq, tl.trans(bq)) * Ldt + skip  # (q, q)
        yq = dot(cq, s.to(cq.dtype)) * tl.exp2(a)[:, None]
        yq = dot(scores.to(xq.dtype), xq, yq)
        store2(y + ((row * l + first) * h + head) * p, step, ok, h * p, kp, yq)
        x_end = (xq * (dtq * tl.exp2(total - a))[:, None]).to(xq.dtype)  # what is left at the end
        s = dot(tl.trans(bq), x_end, s * tl.exp2(total))
    if final is not None:
        tl.store(final + (row * h + head) * p * n + kp[None, :] * n + kn[:, None], s)


@triton.jit
def tiles_kernel(x, dt, bias, A, B, C, D, s0, z, y, power, final, l, h,
                 sxr, sxl, sxw, sxh, sdr, sdl, sdw, sdh, sBr, sBl, sBw, sCr, sCl, sCw,
                 rows, ssb, ssr, ssh, szr, szl, szw, szh,
                 n: tl.constexpr, p: tl.constexpr, q: tl.constexpr, ways: tl.constexpr, rest: tl.constexpr):
    """The same y where there are few rows: a program for each tile of q tokens too, none of which
    waits for another. It is attention over the row up to the tile, with L_ij dt_j for a softmax:
        y_i = sum_{j<=i} L_ij (C_i.B_j) dt_j x_j + e^{a_i} C_i s0 + D x_i
    Of two ways, the second runs from the row's last token to the first, from zeros: its pointers
    start at the end and its steps are negative; or it is at `rest` and its y is zeros. `final`, if
    wanted, has a program of its own. With z y is gated, y silu(z), and `power` (r, l, ways, h) gets its
    mean square."""
    head, way = tl.program_id(0) % h, tl.program_id(0) // h % ways
    row = (tl.program_id(0) // (h * ways)).to(tl.int64)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # those with most to do start first
    kn, kp = tl.arange(0, n), tl.arange(0, p)
    end, sign = tl.cast(way, tl.int64) * (l - 1), 1 - 2 * way
    x += row * sxr + way * sxw + end * sxl + head * sxh
    dt += row * sdr + way * sdw + end * sdl + head * sdh
    B += row * sBr + way * sBw + end * sBl
    C += row * sCr + way * sCw + end * sCl
    sxl, sdl, sBl, sCl = sxl * sign, sdl * sign, sBl * sign, sCl * sign
    first, step, ok = place(tile, l, q)
    out = ((row * l + end + sign * first) * ways + way) * h + head
    if rest:
        if way == 1:
            store2(y + out * p, step, ok, sign * ways * h * p, kp, tl.zeros((q, p), tl.float32))
            tl.store(power + out + step * (sign * ways * h), tl.zeros((q,), tl.float32), mask=ok)
            return
    a_head, d_head = tl.load(A + way * h + head), tl.load(D + way * h + head)
    bias_head = tl.load(bias + way * h + head) if bias is not None else None
    if tile * q < l:
        cq = load2(C, first, step, ok, sCl, kn)
        if z is not None:
            zq = load2(z + row * szr + way * szw + end * szl + head * szh, first, step, ok, szl * sign, kp)
        # Decays count from the start of the tile, and its keys come first: between tokens that are
        # near, an exponent is then a difference of small numbers.
        _, a, _ = load_dt(dt, first, step, ok, sdl, a_head, bias_head)
        i, before, yq = tl.arange(0, q), 0.0, tl.zeros((q, p), tl.float32)
        for k in range(tile + 1):
            first_k, step_k, ok_k = place(tile - k, l, q)
            xk = load2(x, first_k, step_k, ok_k, sxl, kp)
            bk = load2(B, first_k, step_k, ok_k, sBl, kn)
            dtk, ak, total = load_dt(dt, first_k, step_k, ok_k, sdl, a_head, bias_head)
            before += tl.where(k > 0, total, 0.0)
            log_L = a[:, None] + (before - ak + tl.log2(dtk))[None, :]
            log_L = tl.where(i[:, None] + k * q >= i[None, :], log_L, float("-inf"))
            skip = tl.where(i[:, None] + k * q == i[None, :], d_head, 0.0)  # D, on the diagonal
            scores = dot(cq, tl.trans(bk)) * tl.exp2(log_L) + skip
            yq = dot(scores.to(xk.dtype), xk, yq)
        s = first_state(s0, row, head, rows, ssb, ssr, ssh, kn, kp, n, way == 0)
        yq += dot(cq, s.to(cq.dtype)) * tl.exp2(a + before)[:, None]
        if z is not None:
            yq *= zq.to(tl.float32) * tl.sigmoid(zq.to(tl.float32))
            tl.store(power + out + step * (sign * ways * h), tl.sum(yq * yq, 1) / p, mask=ok)
        store2(y + out * p, step, ok, sign * ways * h * p, kp, yq)
    elif final is not None:
        s = first_state(s0, row, head, rows, ssb, ssr, ssh, kn, kp, n, way == 0)
        for k in range(tl.cdiv(l, q)):
            first_k, step_k, ok_k = place(k, l, q)
            xk = load2(x, first_k, step_k, ok_k, sxl, kp)
            bk = load2(B, first_k, step_k, ok_k, sBl, kn)
            dtk, ak, total = load_dt(dt, first_k, step_k, ok_k, sdl, a_head, bias_head)
            x_end = (xk * (dtk * tl.exp2(total - ak))[:, None]).to(xk.dtype)
            s = dot(tl.trans(bk), x_end, s * tl.exp2(total))
        last = (row * (1 if rest else ways) + way) * h + head
        tl.store(final + last * p * n + kp[None, :] * n + kn[:, None], s)


@triton.jit
def walk_kernel(x, steps, B, s0, states, final, l, h,
                sxr, sxl, sxh, sBr, sBl, rows, ssb, ssr, ssh,
                n: tl.constexpr, p: tl.constexpr, q: tl.constexpr, ADJOINT: tl.constexpr):
    """The state alone, one (row, head) a program. `states` (r, chunks, h, n, p) gets it before each
    chunk, `final` (r, h, p, n) at the end. ADJOINT runs the transposed recurrence over (dy, C) from
    the last chunk to the first, G being the gradient of the state a chunk ends in:
        G' = e^{a_q} G + sum_i e^{a_i} C_i (outer) dy_i"""
    row, head = (tl.program_id(0) // h).to(tl.int64), tl.program_id(0) % h
    kn, kp = tl.arange(0, n), tl.arange(0, p)
    x, B, chunks = x + row * sxr + head * sxh, B + row * sBr, tl.cdiv(l, q)
    all_chunks = tl.num_programs(0) // h * chunks
    s = first_state(s0, row, head, rows, ssb, ssr, ssh, kn, kp, n)
    for k in range(chunks):
        c = chunks - 1 - k if ADJOINT else k
        if states is not None:
            at = states + ((row * chunks + c) * h + head) * n * p
            tl.store(at + kn[:, None] * p + kp[None, :], s.to(states.dtype.element_ty))
        first, step, ok = place(c, l, q)
        xq, bq = load2(x, first, step, ok, sxl, kp), load2(B, first, step, ok, sBl, kn)
        dtq, a, total = load_step_sizes(steps, row * chunks + c, all_chunks, head, h, q)
        weight = tl.exp2(a) if ADJOINT else dtq * tl.exp2(total - a)
        s = dot(tl.trans(bq), (xq * weight[:, None]).to(xq.dtype), s * tl.exp2(total))
    if final is not None:
        tl.store(final + (row * h + head) * p * n + kp[None, :] * n + kn[:, None], s)


# The backward, given for each chunk the state S before it and the gradient G of the state after it,
# with V_ij = L_ij (C_i.B_j) (dy_i.x_j):
#
#     u_j  = sum_i L_ij (C_i.B_j) dy_i + e^{a_q - a_j} G B_j          the gradient of dt_j x_j
#     dB_j = sum_i (sum_heads L_ij dt_j dy_i.x_j) C_i + sum_heads e^{a_q - a_j} dt_j G x_j
#     dC_i = sum_j (sum_heads L_ij dt_j dy_i.x_j) B_j + sum_heads e^{a_i} S dy_i
#     dloss/d(dt_i A) = sum_{j<i<=k} V_kj dt_j + sum_{k>=i} dy_k.(e^{a_k} C_k S)
#                       + sum_{j<i} dt_j x_j.(e^{a_q - a_j} G B_j) + e^{a_q} <G, S>
#
# A program has one (row, chunk) and walks the heads, so that dB and dC, which sum over them, need
# no atomics. What comes from inside the chunk and from G, and what comes from S, are two kernels:
# one has not registers enough for both. `kvs` hands the sum over heads of L_ij dt_j dy_i.x_j on.
# The (q, q) matrices are built transposed, j down and i across: each product then takes its
# operands as they are, and no product's result is transposed in registers (which Triton 3.6 gets
# wrong on Hopper).

@triton.jit
def add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def after_kernel(x, steps, B, C, D, dy, G, dx, sums, kvs, dB, l, h,
                 sxr, sxl, sxh, sBr, sBl, sCr, sCl, syr, syl, syh, sdxr, sdxl, sdxh, sdBr, sdBl,
                 n: tl.constexpr, p: tl.constexpr, q: tl.constexpr):
    """dx and dB. The first four of `sums` (5, r chunks, h, q) get what decays_kernel needs of every
    position: the sums of V's columns and rows, x.GB and dy.x."""
    row, c = (tl.program_id(0) // tl.cdiv(l, q)).to(tl.int64), tl.program_id(0) % tl.cdiv(l, q)
    kn, kp = tl.arange(0, n), tl.arange(0, p)
    first, step, ok = place(c, l, q)
    B, C = B + row * sBr, C + row * sCr
    bq = load2(B, first, step, ok, sBl, kn)
    cb = tl.zeros((q, q), tl.float32)  # (j, i): B_j.C_i, the same for all heads
    part: tl.constexpr = 32 if n > 32 else n
    for k in range(0, n, part):  # a loop, else 8 warps make a product that feeds a product twice
        k32 = k + tl.arange(0, part)
        b32, c32 = load2(B, first, step, ok, sBl, k32), load2(C, first, step, ok, sCl, k32)
        cb = dot(b32, tl.trans(c32), cb)
    kv, db = tl.zeros((q, q), tl.float32), tl.zeros((q, n), tl.float32)
    chunk, all_chunks = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    size, i = tl.cast(all_chunks, tl.int64) * h * q, tl.arange(0, q)
    for head in range(h):
        xq = load2(x + row * sxr + head * sxh, first, step, ok, sxl, kp)
        dyq = load2(dy + row * syr + head * syh, first, step, ok, syl, kp)
        state = ((row * tl.cdiv(l, q) + c) * h + head) * n * p + (kn[:, None] * p + kp[None, :])
        g = tl.load(G + state)  # (n, p)
        dtq, a, total = load_step_sizes(steps, chunk, all_chunks, head, h, q)
        d_head = tl.load(D + head)  # here, lest it be waited for below
        left = dtq * tl.exp2(total - a)
        x32, out = xq.to(tl.float32), sums + (chunk * h + head) * q + i
        db = dot((x32 * left[:, None]).to(xq.dtype), tl.trans(g), db)
        # Minus a minus: a plus would be merged into the product that follows, see cb.
        gb = dot(bq, g) * -left[:, None]  # (q, p)
        xgb, skip = tl.reduce((-x32 * gb, x32 * dyq.to(tl.float32)), 1, add_pairs)
        tl.store(out + 2 * size, xgb)
        tl.store(out + 3 * size, skip)
        # Only differences of j count; adding `head` keeps the mask out of the registers.
        j = head + i
        log_L = a[None, :] - (a - tl.log2(dtq))[:, None]
        L = tl.exp2(tl.where(j[:, None] <= j[None, :], log_L, float("-inf")))  # (j, i), with dt_j
        u = dot((cb * L).to(xq.dtype), dyq) - gb
        store2(dx + row * sdxr + first * sdxl + head * sdxh, step, ok, sdxl, kp,
               u + dyq.to(tl.float32) * d_head)
        L *= dot(xq, tl.trans(dyq))
        kv += L
        L *= cb
        tl.store(out, tl.sum(L, 1))
        tl.store(out + size, tl.sum(L, 0))
    kv = kv.to(bq.dtype)
    tl.store(kvs + chunk * q * q + i[:, None] * q + i[None, :], kv)
    db = dot(kv, load2(C, first, step, ok, sCl, kn), db)
    store2(dB + row * sdBr + first * sdBl, step, ok, sdBl, kn, db)


@triton.jit
def before_kernel(steps, B, C, dy, S, G, reads, tail, kvs, dC, l, h,
                  sBr, sBl, sCr, sCl, syr, syl, syh, sdCr, sdCl,
                  n: tl.constexpr, p: tl.constexpr, q: tl.constexpr):
    """dC, `reads` (r chunks, h, q; the fifth of `sums`) dy_i.(e^{a_i} C_i S) and `tail` (r chunks, h)
    e^{a_q} <G, S>."""
    row, c = (tl.program_id(0) // tl.cdiv(l, q)).to(tl.int64), tl.program_id(0) % tl.cdiv(l, q)
    kn, kp, i = tl.arange(0, n), tl.arange(0, p), tl.arange(0, q)
    first, step, ok = place(c, l, q)
    cq = load2(C + row * sCr, first, step, ok, sCl, kn)
    chunk, all_chunks = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    dc = tl.zeros((q, n), tl.float32)
    for head in range(h):
        dyq = load2(dy + row * syr + head * syh, first, step, ok, syl, kp)
        state = ((row * tl.cdiv(l, q) + c) * h + head) * n * p + (kn[:, None] * p + kp[None, :])
        s, g = tl.load(S + state), tl.load(G + state)  # (n, p)
        gs = tl.sum(g.to(tl.float32) * s.to(tl.float32))
        _, a, total = load_step_sizes(steps, chunk, all_chunks, head, h, q)
        dyw = dyq * tl.exp2(a)[:, None]
        dc = dot(dyw.to(dyq.dtype), tl.trans(s), dc)
        tl.store(reads + (chunk * h + head) * q + i, tl.sum(dot(cq, s) * dyw, 1))
        tl.store(tail + chunk * h + head, gs * tl.exp2(total))
    kv = tl.load(kvs + chunk * q * q + i[:, None] + i[None, :] * q)
    dc = dot(kv, load2(B + row * sBr, first, step, ok, sBl, kn), dc)
    store2(dC + row * sdCr + first * sdCl, step, ok, sdCl, kn, dc)


@triton.jit
def decays_kernel(sums, tail, steps, A, ddt, dA, dD, dbias, l, h, sdr, sdl, sdh,
                  q: tl.constexpr, H: tl.constexpr):
    """ddt, dA and dD of one chunk; with `dbias` that too, and ddt is the gradient of what softplus took.
    Rows minus columns summed from i on leave the pairs j < i <= k of V (both must come from one V) and
    take x.GB of j >= i off its sum over all j, which `ends` holds."""
    chunk, all_chunks = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    row, c = chunk // tl.cdiv(l, q), chunk % tl.cdiv(l, q)
    head = tl.arange(0, H)
    first, step, ok = place(c, l, q)
    mask, size = ok[None, :] & (head < h)[:, None], tl.cast(all_chunks, tl.int64) * h * q
    at = (chunk * h + head[:, None]) * q + step[None, :]
    a_head = tl.load(A + head, mask=head < h, other=0.0)
    xgb = tl.load(sums + 2 * size + at, mask=mask, other=0.0)
    ends = tl.load(tail + chunk * h + head, mask=head < h, other=0.0) + tl.sum(xgb, 1)
    cols = xgb + tl.load(sums + at, mask=mask, other=0.0)
    rows = tl.load(sums + size + at, mask=mask, other=0.0)
    rows += tl.load(sums + 4 * size + at, mask=mask, other=0.0)
    dlog = tl.cumsum(rows - cols, 1, reverse=True) + ends[:, None]
    dtq = tl.load(steps + at, mask=mask, other=0.0)
    # The gradient of dt_j but for that of a_j. dt is 0 only where softplus, and its slope, underflow.
    direct = tl.where(dtq > 0, cols / dtq, 0.0)
    tl.store(dA + chunk * h + head, tl.sum(dlog * dtq, 1), mask=head < h)
    skip = tl.load(sums + 3 * size + at, mask=mask, other=0.0)
    tl.store(dD + chunk * h + head, tl.sum(skip, 1), mask=head < h)
    grad = direct + dlog * a_head[:, None]
    if dbias is not None:  # softplus' is 1 - e^-dt, by its series where that would cancel
        series = dtq * (1 - dtq * (1 / 2 - dtq * (1 / 6 - dtq / 24)))
        grad = tl.where(mask, grad * tl.where(dtq < 0.03, series, 1 - tl.exp2(-dtq * LOG2E)), 0.0)
        tl.store(dbias + chunk * h + head, tl.sum(grad, 1), mask=head < h)
    out = ddt + row * sdr + first * sdl + step[None, :] * sdl + head[:, None] * sdh
    tl.store(out, grad.to(ddt.dtype.element_ty), mask=mask)


def state_view(s0):
    """Where the r states s0 lie: one after another (r, h, p, n), or for the rows of b sequences the
    slice (b, r / b, h, p, n) of all their states, uncopied. -> r / b; strides of b, r / b and h"""
    if s0 is None:
        return 1, 0, 0, 0
    s0 = s0 if s0.dim() == 5 else s0[:, None]
    return s0.shape[1], *s0.stride()[:3]


class StepSizes:
    """Step sizes of rows, dt (r, l, h) of any strides, and the decays that they make with A (h): what
    several kernels need, made once. With `bias` (h) dt is what comes before bias and softplus."""

    def __init__(self, dt, A, bias=None):
        self.dt, self.A, self.bias, self.made = dt, A, bias, {}

    def of(self, q):
        """(2, r chunks, h, q) fp32: dt of every chunk, zeros past a row's end, and its sums a_i =
        sum_{j<=i} dt_j A in units of log 2. A kernel finds each chunk of a head in one piece."""
        if q not in self.made:
            (r, l, h), chunks = self.dt.shape, self.dt.shape[0] * triton.cdiv(self.dt.shape[1], q)
            self.made[q] = self.A.new_empty(2, chunks, h, q)
            steps_kernel[chunks,](self.dt, self.A, self.bias, self.made[q], l, h, *self.dt.stride(), q=q,
                                  H=triton.next_power_of_2(h))
        return self.made[q]

    def log_decays(self, x):
        """Of whole rows, by sequence: (b, rows, h), from the chunks of `walk`. x (b, s, h, p)"""
        a = self.of(settings("walk", x)["q"])[1, :, :, -1]
        a = a.unflatten(0, (len(self.dt), -1)).sum(1) / LOG2E.value
        return a.view(len(x), -1, x.shape[2])


def walk(x, steps, B, s0=None, states=None, final=None, q=None, adjoint=False):
    """`states` are wanted at the chunks of the backward kernel, hence q."""
    (r, l, h, p), how = x.shape, settings("walk", x) | (dict(q=q) if q else {})
    walk_kernel[(r * h,)](
        x, steps.of(how["q"]), B, s0, states, final, l, h, *strides(x, 3), *strides(B, 2),
        *state_view(s0), n=B.shape[-1], p=p, ADJOINT=adjoint, **how)


def tiles(x, dt, bias, A, B, C, D, s0, y, z=None, power=None, final=None, rest=False):
    """Shapes as in `plain.ssd_scan_both`, for any number of ways. With `rest` the second way is not computed: its y
    and power are zeros."""
    (r, l, ways, h, p), how = x.shape, settings("tiles", x)
    tiles_kernel[(r * ways * h, triton.cdiv(l, how["q"]) + (final is not None))](
        x, dt, bias, A, B, C, D, s0, z, y, power, final, l, h, *strides(x, 4), *strides(dt, 4),
        *strides(B, 3), *strides(C, 3), *state_view(s0), *strides(z, 4), n=B.shape[-1], p=p,
        ways=ways, rest=rest, **how)


def room_for_final(x, B, wanted=True):
    r, l, h, p = x.shape
    return x.new_empty((r, h, p, B.shape[-1]) if wanted else (0,), dtype=torch.float32)


def rows_forward(x, steps, B, C, D, s0, return_final=False):
    """`ssd_rows` without its gradients; steps: StepSizes"""
    r, l, h, p = x.shape
    y, final = x.new_empty(x.shape), room_for_final(x, B, return_final)
    if r * h <= FEW and l <= SHORT:
        tiles(*(u[:, :, None] for u in (x, steps.dt)), steps.bias, steps.A, B[:, :, None], C[:, :, None],
              D, s0, y, final=final if return_final else None)
        return y, final
    how = settings("forward", x)
    forward_kernel[(r * h,)](
        x, steps.of(how["q"]), B, C, D, s0, y, final if return_final else None, l, h,
        *strides(x, 3), *strides(B, 2), *strides(C, 2), *state_view(s0), n=B.shape[-1], p=p, **how)
    return y, final


def rows_backward(dx, ddt, dB, dC, ds0, dy, x, steps, B, C, D, s0, dfinal=None):
    """Writes into dx, ddt, dB and dC, of any strides but the last (ddt: any), and into ds0 unless that
    is None; dfinal, the gradient of the states that rows end in, is as s0. -> dA, dD and, where steps
    have a bias, its gradient"""
    (r, l, h, p), n, q = x.shape, B.shape[-1], settings("after", x)["q"]
    dy, chunks = rowwise(dy), triton.cdiv(l, q)
    S = x.new_empty(r, chunks, h, n, p)  # the state before each chunk, as dtype of x
    G = torch.empty_like(S)  # the gradient of the state after it
    walk(x, steps, B, s0, S, q=q)
    walk(dy, steps, C, dfinal, G, ds0, q, adjoint=True)
    dA, dD, dbias, tail = D.new_empty(4, r * chunks, h)
    sums, kvs = D.new_empty(5, r * chunks, h, q), x.new_empty(r * chunks, q, q)
    after_kernel[r * chunks,](
        x, steps.of(q), B, C, D, dy, G, dx, sums, kvs, dB, l, h, *strides(x, 3), *strides(B, 2),
        *strides(C, 2), *strides(dy, 3), *strides(dx, 3), *strides(dB, 2), n=n, p=p,
        **settings("after", x))
    before_kernel[r * chunks,](
        steps.of(q), B, C, dy, S, G, sums[4], tail, kvs, dC, l, h, *strides(B, 2), *strides(C, 2),
        *strides(dy, 3), *strides(dC, 2), n=n, p=p, **settings("before", x))
    decays_kernel[r * chunks,](
        sums, tail, steps.of(q), steps.A, ddt, dA, dD, None if steps.bias is None else dbias, l, h,
        *ddt.stride(), q=q, H=triton.next_power_of_2(h))
    return tuple(u.sum(0) for u in ((dA, dD) if steps.bias is None else (dA, dD, dbias)))


@operator(lambda x, dt, A, B, C, D, s0, final: (x.new_empty(x.shape), room_for_final(x, B, final)))
def ssd_rows_forward(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor,
                     s0: Optional[Tensor], return_final: bool) -> Tuple[Tensor, Tensor]:
    return rows_forward(x, StepSizes(dt, A), B, C, D, s0, return_final)


@operator(lambda dy, *inputs: like(*inputs))
def ssd_rows_backward(
        dy: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor,
        s0: Optional[Tensor]) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dx, ddt, dB, dC, ds0 = like(x, dt, B, C, s0)
    dA, dD = rows_backward(
        dx, ddt, dB, dC, None if s0 is None else ds0, dy, x, StepSizes(dt, A), B, C, D, s0)
    return dx, ddt, dA, dB, dC, dD, ds0


def room_for_power(x):
    return x.new_empty(x.shape[:-1], dtype=torch.float32)


@operator(lambda x, *inputs: (x.new_empty(x.shape), room_for_power(x)))
def ssd_both_forward(x: Tensor, dt: Tensor, bias: Tensor, A: Tensor, B: Tensor, C: Tensor,
                     D: Tensor, s0: Tensor, z: Tensor) -> Tuple[Tensor, Tensor]:
    y, power = x.new_empty(x.shape), room_for_power(x)
    tiles(x, dt, bias, A, B, C, D, s0, y, z, power)
    return y, power


def room_for_pairs(x, B):
    r, _, _, h, p = x.shape
    return (x.new_empty(x.shape), room_for_power(x),
            x.new_empty((r // 2, h, p, B.shape[-1]), dtype=torch.float32))


@operator(lambda x, dt, bias, A, B, *inputs: room_for_pairs(x, B))
def ssd_pairs_forward(x: Tensor, dt: Tensor, bias: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor,
                      s0: Tensor, z: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
    (y, power, final), b = room_for_pairs(x, B), len(x) // 2
    tiles(x[:b], dt[:b], bias, A, B[:b], C[:b], D, s0, y[:b], z[:b], power[:b], final, rest=True)
    tiles(x[b:], dt[b:], bias, A, B[b:], C[b:], D, final, y[b:], z[b:], power[b:])
    return y, power, final


differentiable(ssd_rows_forward, ssd_rows_backward)


def ssd_rows(x, dt, A, B, C, D, s0=None, return_final=False):
    """x (r, l, h, p), dt (r, l, h) fp32 and positive, A (h) fp32 and negative, B and C (r, l, n),
    D (h) fp32, s0 fp32 as in `state_view` or None: zeros. -> y (r, l, h, p) in the dtype of x;
    with return_final also the last state (r, h, p, n) fp32, which carries no gradient."""
    y, final = ssd_rows_forward(rowwise(x), dt, A, rowwise(B), rowwise(C), D, statewise(s0),
                                return_final)
    return (y, final.detach()) if return_final else y


def ssd_scan_both(x, dt, dt_bias, A, B, C, D, initial_state, z, chunk_len=128):
    """As plain.ssd_scan_both, in one kernel; chunk_len is ignored. Its work grows as the square of the number of
    tokens. No gradients."""
    if not fits(x.shape[-1], B.shape[-1]):
        return plain.ssd_scan_both.plain(x, dt, dt_bias, A, B, C, D, initial_state, z, chunk_len)
    return ssd_both_forward(rowwise(x), dt, dt_bias, A, rowwise(B), rowwise(C), D, statewise(initial_state),
                            rowwise(z))


def ssd_scan_pairs(x, dt, dt_bias, A, B, C, D, initial_state, z, chunk_len=128):
    """As plain.ssd_scan_pairs, in two kernels; chunk_len is ignored. No gradients."""
    if not fits(x.shape[-1], B.shape[-1]):
        return plain.ssd_scan_pairs.plain(x, dt, dt_bias, A, B, C, D, initial_state, z, chunk_len)
    return ssd_pairs_forward(rowwise(x), dt, dt_bias, A, rowwise(B), rowwise(C), D, statewise(initial_state),
                             rowwise(z))
