"""
Triton kernels of the state-space scan (eq. mamba-scan-background) over long sequences, forward and backward.

  scan_forward     cuts sequences into rows, carries the states from row to row, and scans all rows at once;
                   scan_backward its gradients, rows_backward those of the rows, each on its own
  ssd_scan         replaces ops.ssd_scan

fast/mixer.py uses the same kernels inside a whole Mamba mixer, fast/scan_block.py some of them for one block.

Without a GPU, Triton's interpreter tests them:    python -m pytest tests/kernels/test_kernels.py -k scan
Time them on one, in a mixer:                      python -m tools.compare_ops --only=mixer
"""
from typing import Optional, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

import fast.block_ops as block_ops
import ops
from fast.triton_tools import LOG2E, add_pairs, dot, operator, rowwise, statewise, strides

PASS = 1024  # pass_kernel: elements of a state per program, of the e = p n elements that a state has


def fits(p, n):
    """Whether the kernels take head dimension p and state size n."""
    return p in (16, 32, 64) and n in (16, 32, 64, 128, 256)


def scan_row(s, states_every):
    """
    The length of a row for s tokens whose states are wanted every states_every positions (None: s). It is the largest
    divisor of that which is at most block_ops.SCAN_ROW, so every state that is wanted is at a row boundary. If that is
    below 16, a row reaches from one wanted state to the next.
    """
    whole = states_every or s
    assert s % whole == 0, f"{s} positions are not a multiple of states_every = {states_every}"
    row = block_ops.largest_divisor(whole, block_ops.SCAN_ROW)
    return row if row >= 16 else whole


# ----------------------------------------------------------------------------------------------
# The scan. There are r rows of l tokens, with h heads of size p and states of size n. Every row is a scan of its own:
#
#     s_i = exp(dt_i A) s_{i-1} + dt_i x_i (outer) B_i          y_i = s_i C_i + D x_i
#
# A kernel takes chunks of q tokens. Inside a chunk the scan is attention with a causal matrix of decays; from chunk to
# chunk it hands on a state. S is the state before a chunk, S' the state after it, and a_i = sum_{j<=i} dt_j A and
# L_ij = e^{a_i - a_j} count from the start of the chunk:
#
#     y_i = sum_{j<=i} L_ij (C_i.B_j) dt_j x_j + e^{a_i} C_i S + D x_i
#     S' = e^{a_q} S + sum_j e^{a_q - a_j} dt_j B_j (outer) x_j
#
# Exponents are differences that are never positive (but for log dt), so nothing overflows. Sums are fp32; products take
# their operands in the dtype of x. Kernels keep a state transposed, (n, p), so that C S and B^T x need no transpose.
#
# Names in the kernels:
#
#     sxr, sxl, sxh    strides of x between rows, positions and heads: s, the tensor, the axis. Tensors are x, d (dt, or
#                      its gradient), B, C, z, y (in the backward dy), s (states), dx, dB and dC. Axes are r, l, h,
#                      w (ways) and b (sequences). A last axis without a stride is contiguous, and so is a tensor
#                      without strides.
#     rows             rows per sequence, which tells where the initial state of a row lies: see `state_view`
#     ways, way        scan directions: block_kernel (scan_block.py) runs the forward and the reverse scan at once
#     xq, bq, dtq      a chunk of x (q, p), of B (q, n), of dt (q,); xk, bk, dtk: the same in a loop over chunks k
#     kn, kp           0..n-1 and 0..p-1
#     chunk            a chunk's number among the all_chunks chunks of all rows; c is its number in its row
#     a, total         a_i and a_q, but in units of log 2: the decay is exp2(a)

# Launch settings of each kernel: q, warps, pipeline stages. One warpgroup (4 warps) multiplies 64 rows on Hopper, so
# q = 64 wastes nothing. A larger q does more work inside chunks and needs more registers than there are.
TUNE = {
    "forward": dict(q=64, num_warps=4, num_stages=1),
    "block": dict(q=64, num_warps=4, num_stages=2),
    "blocks": dict(q=64, num_warps=4, num_stages=1, maxnreg=168),  # several rows: three programs share a multiprocessor
    "walk": dict(q=64, num_warps=4, num_stages=3),
    "after": dict(q=64, num_warps=8, num_stages=3),
    "before": dict(q=64, num_warps=4, num_stages=3),
}
def settings(kernel, x, l=64):
    """The launch settings of a kernel for x (..., p) in rows of l tokens: TUNE, with exceptions for head dimensions,
    dtypes and GPUs. A tile is not longer than a row, but has at least the 16 positions that tensor cores want."""
    how = TUNE[kernel] | dict(q=min(TUNE[kernel]["q"], max(16, triton.next_power_of_2(l))))
    # On an H200 with Triton 3.6, y was wrong with q = 64 at head dimensions 16 and 32.
    if kernel in ("forward", "block", "blocks") and x.shape[-1] != 64:
        how = how | dict(q=min(how["q"], 32))
    if not x.is_cuda:
        return how
    if x.dtype == torch.float32:  # exact fp32 products keep their operands in registers
        return dict(q=16, num_warps=8, num_stages=1, maxnreg=255)
    if torch.cuda.get_device_capability(x.device)[0] < 9:  # without maxnreg, ptxas spills all registers to memory
        return how | dict(q=min(how["q"], 32), num_stages=1 if kernel == "after" else 2, maxnreg=255)
    return how


@triton.jit
def place(c, l, q: tl.constexpr):
    """Where chunk c of a row of l tokens lies. -> its first position (64-bit, since offsets are), the steps 0..q-1 from
    there, and which of them are inside the row. Steps past the end load zeros: dt = 0 and x = 0 leave the state as it
    is."""
    first, steps = tl.cast(c * q, tl.int64), tl.arange(0, q)
    return first, steps, c * q + steps < l


@triton.jit
def load2(ptr, first, step, ok, stride, cols):
    """Loads columns `cols` of positions first + step of a matrix whose last axis is contiguous, and zeros where not ok.
    stride: between positions. -> (q, number of cols)"""
    at = step[:, None] * stride + cols[None, :]
    return tl.load(ptr + first * stride + at, mask=ok[:, None], other=0.0)


@triton.jit
def store2(ptr, step, ok, stride, cols, values):
    """Stores what `load2` would load; ptr is already at the first position."""
    at = step[:, None] * stride + cols[None, :]
    tl.store(ptr + at, values.to(ptr.dtype.element_ty), mask=ok[:, None])


@triton.jit
def softplus(u):
    """log(1 + e^u) = max(u, 0) + log(1 + z) with z = e^-|u|, precise also where z is tiny. 1 + z rounds to `one`; the
    factor z / (one - 1) makes up for the rounding."""
    z = tl.exp2(-tl.abs(u) * LOG2E)
    one = 1 + z
    return tl.maximum(u, 0.0) + tl.where(one == 1, z, tl.log(one) * (z / (one - 1)))


@triton.jit
def load_step_sizes(steps, chunk, all_chunks, head, h, q: tl.constexpr):
    """Loads the step sizes of a chunk and one head from the buffer of `StepSizes.of`. -> dt_i (q,), then a_i (q,) and
    its total a_q, in units of log 2."""
    at = (chunk * h + head) * q
    a = steps + tl.cast(all_chunks, tl.int64) * h * q + at
    i = tl.arange(0, q)
    return tl.load(steps + at + i), tl.load(a + i), tl.load(a + q - 1)


@triton.jit
def steps_kernel(dt, A, bias, steps, l, h, sdr, sdl, sdh, q: tl.constexpr, H: tl.constexpr):
    """Fills the buffer of `StepSizes.of`. One program: one chunk of all h heads, padded to H, a power of two."""
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
def first_state(s0, row, head, rows, ssb, ssr, ssh, kn, kp, n: tl.constexpr):
    """The state from which a row starts, transposed to (n, p). Zeros if s0 is None. rows and the strides: see
    `state_view`."""
    if s0 is not None:
        return tl.load(s0 + row // rows * ssb + row % rows * ssr + head * ssh + kp[None, :] * n + kn[:, None])
    else:
        return tl.zeros((kn.shape[0], kp.shape[0]), tl.float32)


@triton.jit
def tile_scores(cq, bk, a, key, d_head, apart, q: tl.constexpr):
    """L_ij (C_i.B_j) dt_j of a tile of q queries i and a tile of q keys j that starts `apart` tokens earlier, and D
    where i = j. a is a_i, key is log2 dt_j - a_j, and both count from the same token. -> (q, q)"""
    i, j = tl.arange(0, q)[:, None] + apart, tl.arange(0, q)[None, :]
    log_L = tl.where(i >= j, a[:, None] + key[None, :], float("-inf"))
    return dot(cq, tl.trans(bk)) * tl.exp2(log_L) + tl.where(i == j, d_head, 0.0)


@triton.jit
def forward_kernel(x, steps, B, C, D, s0, y, l, h, sxr, sxl, sxh, sBr, sBl, sCr, sCl, rows, ssb, ssr, ssh,
                   n: tl.constexpr, p: tl.constexpr, q: tl.constexpr):
    """
    The forward pass of the scan. One program has one (row, head) and walks the row chunk by chunk, with the state in
    registers. Neighbouring programs are heads of one row, so they find their shared B and C in the L2 cache. y is
    contiguous.
    """
    row, head = (tl.program_id(0) // h).to(tl.int64), tl.program_id(0) % h
    kn, kp, chunks = tl.arange(0, n), tl.arange(0, p), tl.cdiv(l, q)
    x, B, C, y = x + row * sxr + head * sxh, B + row * sBr, C + row * sCr, y + (row * l * h + head) * p
    all_chunks, d_head = tl.num_programs(0) // h * chunks, tl.load(D + head)
    s = first_state(s0, row, head, rows, ssb, ssr, ssh, kn, kp, n)
    for c in range(chunks):
        first, step, ok = place(c, l, q)
        xq, bq = load2(x, first, step, ok, sxl, kp), load2(B, first, step, ok, sBl, kn)
        cq = load2(C, first, step, ok, sCl, kn)
        dtq, a, total = load_step_sizes(steps, row * chunks + c, all_chunks, head, h, q)
        yq = dot(cq, s.to(cq.dtype)) * tl.exp2(a)[:, None]
        yq = dot(tile_scores(cq, bq, a, tl.log2(dtq) - a, d_head, 0, q).to(xq.dtype), xq, yq)
        store2(y + first * h * p, step, ok, h * p, kp, yq)
        x_end = (xq * (dtq * tl.exp2(total - a))[:, None]).to(xq.dtype)
        s = dot(tl.trans(bq), x_end, s * tl.exp2(total))


@triton.jit
def walk_kernel(x, steps, B, s0, states, final, l, h, sxr, sxl, sxh, sBr, sBl, rows, ssb, ssr, ssh, n: tl.constexpr,
                p: tl.constexpr, q: tl.constexpr, ADJOINT: tl.constexpr):
    """
    The states without y. One program: one (row, head). `states` (r, chunks, h, n, p) gets the state before each chunk,
    `final` (r, h, p, n) the state at the end; each may be None.

    ADJOINT computes gradients of states instead, by the transposed recurrence from the last chunk to the first. x is
    dy, B is C, and s0 is the gradient of the state at the end. With G the gradient of the state after a chunk, and G'
    that of the state before it,
        G' = e^{a_q} G + sum_i e^{a_i} C_i (outer) dy_i
    `states` gets G of each chunk, `final` the gradient of the initial state.
    """
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


# The backward. For each chunk walk_kernel gives the state S before it and the gradient G of the state after it. With
# V_ij = L_ij (C_i.B_j) (dy_i.x_j):
#
#     u_j  = sum_i L_ij (C_i.B_j) dy_i + e^{a_q - a_j} B_j G          the gradient of dt_j x_j
#     dx_j = dt_j u_j + D dy_j
#     dB_j = sum_i (sum_heads L_ij dt_j dy_i.x_j) C_i + sum_heads e^{a_q - a_j} dt_j G x_j
#     dC_i = sum_j (sum_heads L_ij dt_j dy_i.x_j) B_j + sum_heads e^{a_i} S dy_i
#
# The loss depends on dt_i A through a_k, for all k >= i, as a_k = sum_{i<=k} dt_i A. Where does a_k stand in y and S'?
#
#     rows_k = sum_{j<=k} V_kj dt_j + dy_k.(e^{a_k} C_k S)             as e^{+a_k}, in y_k
#     cols_k = sum_{i>=k} V_ik dt_k + dt_k x_k.(e^{a_q - a_k} B_k G)   as e^{-a_k}, in y_i and in S'
#     ends   = sum_j dt_j x_j.(e^{a_q - a_j} B_j G) + e^{a_q} <G, S>   as e^{+a_q}, in S'
#
# The derivative of e^{+a} is itself, that of e^{-a} minus itself. So the gradient of a_k is rows_k - cols_k, and a_q
# also gets `ends`. The gradient of dt_i A is the sum of these over k >= i:
#
#     dlog_i = sum_{k>=i} (rows_k - cols_k) + ends
#
# Three kernels compute this in turn. One kernel would need more registers than there are:
#
#     after_kernel     what comes from inside the chunk and from G, the gradient of the state after it: dx, dB
#     before_kernel    what comes from S, the state before the chunk: dC
#     decays_kernel    ddt, dA, dD and dbias, from sums that the other two have stored
#
# A program of the first two has one (row, chunk) and loops over the heads: dB and dC sum over heads, and this needs no
# atomics. after_kernel stores the sum over heads of L_ij dt_j dy_i.x_j in `kvs`, and before_kernel reads it. The (q, q)
# matrices have j down and i across. So no result of a product is transposed in registers (which Triton 3.6 gets wrong
# on Hopper).

@triton.jit
def after_kernel(x, steps, B, C, D, dy, G, dx, sums, kvs, dB, l, h, sxr, sxl, sxh, sBr, sBl, sCr, sCl, syr, syl,
                 syh, sdxr, sdxl, sdxh, sdBr, sdBl, n: tl.constexpr, p: tl.constexpr, q: tl.constexpr):
    """
    dx and dB of one chunk. `sums` (5, r chunks, h, q) gets four of the five values of each position that decays_kernel
    needs (before_kernel adds sums[4]):
        sums[0]    at j: sum_i V_ij dt_j
        sums[1]    at i: sum_j V_ij dt_j
        sums[2]    at j: dt_j x_j.(e^{a_q - a_j} B_j G)
        sums[3]    at i: dy_i.x_i
    """
    row, c = (tl.program_id(0) // tl.cdiv(l, q)).to(tl.int64), tl.program_id(0) % tl.cdiv(l, q)
    kn, kp = tl.arange(0, n), tl.arange(0, p)
    first, step, ok = place(c, l, q)
    B, C = B + row * sBr, C + row * sCr
    bq = load2(B, first, step, ok, sBl, kn)
    cb = tl.zeros((q, q), tl.float32)  # (j, i): B_j.C_i, the same for all heads
    part: tl.constexpr = 32 if n > 32 else n
    # A loop, because Triton with 8 warps computes a product twice if its result goes straight into another product.
    for k in range(0, n, part):
        k32 = k + tl.arange(0, part)
        b32, c32 = load2(B, first, step, ok, sBl, k32), load2(C, first, step, ok, sCl, k32)
        cb = dot(b32, tl.trans(c32), cb)
    kv, db = tl.zeros((q, q), tl.float32), tl.zeros((q, n), tl.float32)
    chunk, all_chunks = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    size, i = tl.cast(all_chunks, tl.int64) * h * q, tl.arange(0, q)
    for head in range(h):
        xq = load2(x + row * sxr + head * sxh, first, step, ok, sxl, kp)
        dyq = load2(dy + row * syr + head * syh, first, step, ok, syl, kp)
        state = (chunk * h + head) * n * p + (kn[:, None] * p + kp[None, :])
        g = tl.load(G + state)  # (n, p)
        dtq, a, total = load_step_sizes(steps, chunk, all_chunks, head, h, q)
        d_head = tl.load(D + head)  # loaded early, so that its use below need not wait
        left = dtq * tl.exp2(total - a)  # dt_j e^{a_q - a_j}
        x32, out = xq.to(tl.float32), sums + (chunk * h + head) * q + i
        db = dot((x32 * left[:, None]).to(xq.dtype), tl.trans(g), db)
        # gb has a minus here and is subtracted below. If it was added, the compiler would merge it into the product
        # there, and compute this one twice, see cb.
        gb = dot(bq, g) * -left[:, None]  # (q, p)
        xgb, skip = tl.reduce((-x32 * gb, x32 * dyq.to(tl.float32)), 1, add_pairs)
        tl.store(out + 2 * size, xgb)
        tl.store(out + 3 * size, skip)
        # The mask compares positions, so adding `head` to both changes nothing. But the mask now depends on the loop,
        # and the compiler does not keep it in registers from head to head.
        j = head + i
        log_L = a[None, :] - (a - tl.log2(dtq))[:, None]
        L = tl.exp2(tl.where(j[:, None] <= j[None, :], log_L, float("-inf")))  # (j, i): L_ij dt_j
        u = dot((cb * L).to(xq.dtype), dyq) - gb  # (q, p): dt_j u_j
        store2(dx + row * sdxr + first * sdxl + head * sdxh, step, ok, sdxl, kp, u + dyq.to(tl.float32) * d_head)
        L *= dot(xq, tl.trans(dyq))  # now L_ij dt_j dy_i.x_j
        kv += L
        L *= cb  # now V_ij dt_j
        tl.store(out, tl.sum(L, 1))
        tl.store(out + size, tl.sum(L, 0))
    kv = kv.to(bq.dtype)
    tl.store(kvs + chunk * q * q + i[:, None] * q + i[None, :], kv)
    db = dot(kv, load2(C, first, step, ok, sCl, kn), db)
    store2(dB + row * sdBr + first * sdBl, step, ok, sdBl, kn, db)


@triton.jit
def before_kernel(steps, B, C, dy, S, G, reads, tail, kvs, dC, l, h, sBr, sBl, sCr, sCl, syr, syl, syh, sdCr, sdCl,
                  n: tl.constexpr, p: tl.constexpr, q: tl.constexpr):
    """
    dC of one chunk, and for decays_kernel:
        reads (r chunks, h, q), which is sums[4]    at i: dy_i.(e^{a_i} C_i S)
        tail (r chunks, h)                          e^{a_q} <G, S>
    """
    row, c = (tl.program_id(0) // tl.cdiv(l, q)).to(tl.int64), tl.program_id(0) % tl.cdiv(l, q)
    kn, kp, i = tl.arange(0, n), tl.arange(0, p), tl.arange(0, q)
    first, step, ok = place(c, l, q)
    cq = load2(C + row * sCr, first, step, ok, sCl, kn)
    chunk, all_chunks = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    dc = tl.zeros((q, n), tl.float32)
    for head in range(h):
        dyq = load2(dy + row * syr + head * syh, first, step, ok, syl, kp)
        state = (chunk * h + head) * n * p + (kn[:, None] * p + kp[None, :])
        s, g = tl.load(S + state), tl.load(G + state)  # (n, p)
        gs = tl.sum(g.to(tl.float32) * s.to(tl.float32))
        _, a, total = load_step_sizes(steps, chunk, all_chunks, head, h, q)
        dyw = dyq * tl.exp2(a)[:, None]
        dc = dot(dyw.to(dyq.dtype), tl.trans(s), dc)
        tl.store(reads + (chunk * h + head) * q + i, tl.sum(dot(cq, s) * dyw, 1))
        tl.store(tail + chunk * h + head, gs * tl.exp2(total))
    kv = tl.load(kvs + chunk * q * q + i[:, None] + i[None, :] * q)  # transposed: i down, j across
    dc = dot(kv, load2(B + row * sBr, first, step, ok, sBl, kn), dc)
    store2(dC + row * sdCr + first * sdCl, step, ok, sdCl, kn, dc)


@triton.jit
def decays_kernel(sums, tail, steps, A, ddt, dA, dD, dbias, l, h, sdr, sdl, sdh, q: tl.constexpr, H: tl.constexpr):
    """
    ddt of one chunk, the gradient of the argument of softplus, and the chunk's parts of dA, dD and dbias, each
    (r chunks, h).

    dlog, rows, cols and `ends` are derived above. rows is sums[1] + sums[4], cols is sums[0] + sums[2], and ends is
    tail plus the sum of sums[2] over the chunk. In dlog_i, a term V_kj dt_j with k >= j >= i stands in rows_k and in
    cols_j and cancels. So sums[0] and sums[1] must be sums of the same rounded matrix, or it would cancel in part only.
    """
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
    rows = tl.load(sums + size + at, mask=mask, other=0.0) + tl.load(sums + 4 * size + at, mask=mask, other=0.0)
    dlog = tl.cumsum(rows - cols, 1, reverse=True) + ends[:, None]
    dtq = tl.load(steps + at, mask=mask, other=0.0)
    # Through dt_j x_j, dt_j gets the gradient cols_j / dt_j; through a_j, dlog_j A. Where softplus underflows to
    # dt = 0, its derivative is 0 too.
    direct = tl.where(dtq > 0, cols / dtq, 0.0)
    tl.store(dA + chunk * h + head, tl.sum(dlog * dtq, 1), mask=head < h)
    skip = tl.load(sums + 3 * size + at, mask=mask, other=0.0)
    tl.store(dD + chunk * h + head, tl.sum(skip, 1), mask=head < h)
    grad = direct + dlog * a_head[:, None]
    # The derivative of softplus is 1 - e^-dt; for small dt by its series, as 1 - 1 would cancel.
    series = dtq * (1 - dtq * (1 / 2 - dtq * (1 / 6 - dtq / 24)))
    grad = tl.where(mask, grad * tl.where(dtq < 0.03, series, 1 - tl.exp2(-dtq * LOG2E)), 0.0)
    tl.store(dbias + chunk * h + head, tl.sum(grad, 1), mask=head < h)
    out = ddt + row * sdr + first * sdl + step[None, :] * sdl + head[:, None] * sdh
    tl.store(out, grad.to(ddt.dtype.element_ty), mask=mask)


def state_view(s0):
    """How a kernel finds the initial state of each of r rows. s0 is (r, h, p, n); or (b, r / b, h, p, n) for the rows
    of b sequences, which may be a slice of a larger tensor and is not copied; or None. -> rows, ssb, ssr, ssh: rows per
    sequence, and the strides between sequences, rows of a sequence and heads"""
    if s0 is None:
        return 1, 0, 0, 0
    s0 = s0 if s0.dim() == 5 else s0[:, None]
    return s0.shape[1], *s0.stride()[:3]


class StepSizes:
    """The step sizes dt (r, l, h), of any strides, and their decays with A (h,). Kernels that read them from memory
    share one buffer for each chunk length. If `bias` (h,) is given, dt is the value before bias and softplus."""

    def __init__(self, dt, A, bias=None):
        self.dt, self.A, self.bias, self.made = dt, A, bias, {}

    def of(self, q):
        """A buffer (2, r chunks, h, q) fp32. Index 0 is dt, with zeros past the end of a row. Index 1 is a_i, the sum
        of dt_j A over j <= i in the chunk, in units of log 2. The q values of a chunk and head are contiguous."""
        if q not in self.made:
            r, l, h = self.dt.shape
            chunks = r * triton.cdiv(l, q)
            self.made[q] = self.A.new_empty(2, chunks, h, q)
            steps_kernel[chunks,](self.dt, self.A, self.bias, self.made[q], l, h, *self.dt.stride(), q=q,
                                  H=triton.next_power_of_2(h))
        return self.made[q]

    def log_decays(self, x):
        """The log decay over each whole row of the sequences x (b, s, h, p). -> (b, rows of a sequence, h). It uses the
        chunk length of walk_kernel, whose buffer is made anyway."""
        a = self.of(settings("walk", x, self.dt.shape[1])["q"])[1, :, :, -1]  # (r chunks, h): a_q of every chunk
        return (a.unflatten(0, (len(self.dt), -1)).sum(1) / LOG2E.value).view(len(x), -1, x.shape[2])  # natural units


def walk(x, steps, B, s0=None, states=None, final=None, q=None, adjoint=False):
    """Runs walk_kernel, see its docstring, for x (r, l, h, p) and B (r, l, n). q: the chunk length, if `states` must be
    those of another kernel's chunks."""
    (r, l, h, p), how = x.shape, settings("walk", x, x.shape[1]) | (dict(q=q) if q else {})
    walk_kernel[r * h,](x, steps.of(how["q"]), B, s0, states, final, l, h, *strides(x, 3), *strides(B, 2),
                        *state_view(s0), n=B.shape[-1], p=p, ADJOINT=adjoint, **how)


def rows_backward(dx, ddt, dB, dC, ds0, dy, x, steps, B, C, D, s0, dfinal=None):
    """Gradients of r rows: x (r, l, h, p); steps: StepSizes with a bias; B, C (r, l, n); D (h,); s0 and dfinal, the
    gradient of the last states, in a form of `state_view`. Writes into dx, ddt, dB and dC, and into ds0 unless that is
    None. Of dx, dB and dC the last axis must be contiguous; ddt may have any strides. -> dA, dD, dbias"""
    (r, l, h, p), n, q = x.shape, B.shape[-1], settings("after", x, x.shape[1])["q"]
    chunks = triton.cdiv(l, q)
    S = x.new_empty(r, chunks, h, n, p)  # the state before each chunk, in the dtype of x
    G = torch.empty_like(S)  # the gradient of the state after each chunk
    walk(x, steps, B, s0, S, q=q)
    walk(dy, steps, C, dfinal, G, ds0, q, adjoint=True)
    dA, dD, dbias, tail = D.new_empty(4, r * chunks, h)
    sums, kvs = D.new_empty(5, r * chunks, h, q), x.new_empty(r * chunks, q, q)
    after_kernel[r * chunks,](x, steps.of(q), B, C, D, dy, G, dx, sums, kvs, dB, l, h, *strides(x, 3), *strides(B, 2),
        *strides(C, 2), *strides(dy, 3), *strides(dx, 3), *strides(dB, 2), n=n, p=p, **settings("after", x, l))
    before_kernel[r * chunks,](steps.of(q), B, C, dy, S, G, sums[4], tail, kvs, dC, l, h, *strides(B, 2),
                               *strides(C, 2), *strides(dy, 3), *strides(dC, 2), n=n, p=p, **settings("before", x, l))
    decays_kernel[r * chunks,](
        sums, tail, steps.of(q), steps.A, ddt, dA, dD, dbias, l, h, *ddt.stride(), q=q, H=triton.next_power_of_2(h))
    return dA.sum(0), dD.sum(0), dbias.sum(0)


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
def pass_kernel(local, log_decay, first, dstates, states, c, h, e, E: tl.constexpr, BACK: tl.constexpr):
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
# The scan of whole sequences

def in_rows(row, *tensors):
    """(b, s, ...) -> (b s / row, row, ...) of each tensor. Without a copy if positions are evenly spaced."""
    return tuple(v.unflatten(1, (-1, row)).flatten(0, 1) for v in tensors)


def scan_forward(x, steps, B, C, D, s0, row, want_states):
    """steps: the StepSizes of all rows. s0: None for zeros. -> y (b, s, h, p), and the states before every row and at the
    end (b, s / row + 1, h, p, n); an empty tensor if they are not wanted and there is one row"""
    ((b, s, h, p), n), (xs, Bs, Cs) = (x.shape, B.shape[-1]), in_rows(row, x, B, C)
    states, start, y, how = x.new_empty(0, dtype=torch.float32), s0, x.new_empty(x.shape), settings("forward", xs, row)
    if want_states or row < s:
        local = x.new_empty(b, s // row, h, p, n, dtype=torch.float32)
        walk(xs, steps, Bs, final=local)
        states = pass_states(local, steps.log_decays(x), s0)
        start = states[:, :-1]
    forward_kernel[len(xs) * h,](xs, steps.of(how["q"]), Bs, Cs, D, start, y, row, h, *strides(xs, 3), *strides(Bs, 2),
                                 *strides(Cs, 2), *state_view(start), n=n, p=p, **how)
    return y, states


def scan_backward(dx, ddt, dB, dC, dy, dstates, x, steps, B, C, D, s0, states, row):
    """The backward of `scan_forward`. Writes into dx, ddt, dB and dC, whose positions must be evenly spaced. dy and
    dstates are the gradients of its two results; dstates may be None. -> the gradient of s0 (None if there are no
    states and no s0), dA, dD, and that of the bias of steps"""
    if not states.numel():
        ds0 = None if s0 is None else s0.new_empty(s0.shape)
        return ds0, *rows_backward(dx, ddt, dB, dC, ds0, dy, x, steps, B, C, D, s0)
    xs, Bs, Cs, dys = in_rows(row, x, B, C, dy)
    grads = (v.view(-1, row, *v.shape[2:]) for v in (dx, ddt, dB, dC))  # view never copies: writes arrive
    local = states.new_empty(states[:, 1:].shape)
    walk(dys, steps, Cs, final=local, adjoint=True)
    G = pass_states(local, steps.log_decays(x), None, dstates, back=True)
    del local
    return G[:, 0], *rows_backward(*grads, None, dys, xs, steps, Bs, Cs, D, states[:, :-1], G[:, 1:])


def fake_outputs(x, dt, A, B, C, D, s0, row, want_states):
    (b, s, h, p), n = x.shape, B.shape[-1]
    states = (b, s // row + 1, h, p, n) if want_states or row < s else (0,)
    return x.new_empty(x.shape), x.new_empty(states, dtype=torch.float32)


@operator(fake_outputs)
def ssd_scan_forward(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor,
                     s0: Optional[Tensor], row: int, want_states: bool) -> Tuple[Tensor, Tensor]:
    return scan_forward(x, StepSizes(*in_rows(row, dt), A), B, C, D, s0, row, want_states)


def ssd_scan(x, dt, A, B, C, D, initial_state=None, states_every=None, chunk_len=128, want_states=True):
    """As ops.ssd_scan. The kernels choose their own chunks and ignore chunk_len. With want_states=False the returned
    states may be None. The plain function runs if gradients are enabled (training has fast/mixer.py), and for head and
    state sizes that the kernels do not support."""
    if torch.is_grad_enabled() or not fits(x.shape[-1], B.shape[-1]):
        return ops.ssd_scan.plain(x, dt, A, B, C, D, initial_state, states_every, chunk_len, want_states)
    s, row = x.shape[1], scan_row(x.shape[1], states_every)
    start = None if initial_state is None else statewise(initial_state.float())
    y, states = ssd_scan_forward(rowwise(x), dt, A.float(), rowwise(B), rowwise(C), D.float(), start, row, want_states)
    return y, states[:, ::(states_every or s) // row] if want_states else None
