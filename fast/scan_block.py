"""
Triton kernel of the scan of one block, both directions at once, for generation. It replaces block_ops.scan_block. The
scan and the names in its kernels are explained in fast/scan.py, which scans long sequences.

Without a GPU, Triton's interpreter tests it:    python -m pytest tests/kernels/test_kernels.py -k "ways or pairs"
Time it on one, in whole models:                 python bench.py sample
"""
import torch
import triton
import triton.language as tl

import fast.block_ops as block_ops
from fast.scan import StepSizes, first_state, fits, load2, place, settings, softplus, store2, tile_scores, walk
from fast.triton_tools import LOG2E, dot, rowwise, sigmoid, statewise, strides


@triton.jit
def column(u, k):
    """Column k of u (q, T). Registers have no index, so it is a sum over a mask."""
    return tl.sum(tl.where(tl.arange(0, u.shape[1])[None, :] == k, u, 0.0), 1)


@triton.jit
def block_kernel(x, dt, bias, A, B, C, D, s0, z, y, power, l, h, sxr, sxl, sxw, sxh, sdr, sdl, sdw, sdh, szr, szl,
                 szw, szh, ssr, ssh, finished, n: tl.constexpr, p: tl.constexpr, q: tl.constexpr, T: tl.constexpr):
    """
    The scan of one block in each row, for generation: y silu(z), and in `power` its mean square over p, from which the
    RMS norm after the scan is computed. dt is the value before bias and softplus. Way 0 is the forward scan, from s0.
    Way 1 is the reverse scan: from zeros, from the last token of the row to the first. Its pointers start at the last
    token, and its strides between positions are negative. The first `finished` rows have zeros in its place. x, B and C
    have the same strides; y and power are contiguous.

    One program has one of at most T tiles of q tokens of a (row, way, head). It waits for no other program, because it
    attends to all tokens of the row up to its tile, with L_ij dt_j in place of a softmax. a_i and L_ij count from the
    start of the row here:
        y_i = sum_{j<=i} L_ij (C_i.B_j) dt_j x_j + e^{a_i} C_i s0 + D x_i
    """
    head, way = tl.program_id(0) % h, tl.program_id(0) // h % 2
    row = (tl.program_id(0) // (2 * h)).to(tl.int64)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # late tiles have most to do, so they start first
    kn, kp = tl.arange(0, n), tl.arange(0, p)
    end, sign = tl.cast(way, tl.int64) * (l - 1), 1 - 2 * way
    at, out = row * sxr + way * sxw + end * sxl, ((row * l + end) * 2 + way) * h + head
    x, B, C, y, power = x + at + head * sxh, B + at, C + at, y + out * p, power + out
    dt += row * sdr + way * sdw + end * sdl + head * sdh
    z += row * szr + way * szw + end * szl + head * szh
    sxl, sdl, szl, syl = sxl * sign, sdl * sign, szl * sign, 2 * h * sign
    first, step, ok = place(tile, l, q)
    if way * finished > row:
        tl.store(power + (first + step) * syl, tl.zeros((q,), tl.float32), mask=ok)
        store2(y + first * (syl * p), step, ok, syl * p, kp, tl.zeros((q, p), tl.float32))
        return
    cq = load2(C, first, step, ok, sxl, kn)
    zq = load2(z, first, step, ok, szl, kp).to(tl.float32)  # loaded early, so that its use below need not wait

    # The step sizes of the whole row: position i of tile t at (i, t). `a` counts from the start of each tile.
    t = tl.arange(0, T)
    at = tl.arange(0, q)[:, None] + q * t[None, :]
    dts = tl.load(dt + at * sdl, mask=at < l, other=0.0).to(tl.float32)
    dts = tl.where(at < l, softplus(dts + tl.load(bias + way * h + head)), 0.0)
    log_decay = dts * (tl.load(A + way * h + head) * LOG2E)
    a, totals, d_head = tl.cumsum(log_decay, 0), tl.sum(log_decay, 0), tl.load(D + way * h + head)
    keys, a_tile, yq = tl.log2(dts) - a, column(a, tile), tl.zeros((q, p), tl.float32)
    for k in range(tile + 1):
        first_k, step_k, ok_k = place(k, l, q)
        xk = load2(x, first_k, step_k, ok_k, sxl, kp)
        bk = load2(B, first_k, step_k, ok_k, sxl, kn)
        # The exponent of L_ij is a_i + gap - a_j, with the gap from the start of tile k to that of this tile. So for
        # tokens close to each other it is a difference of small numbers.
        gap = tl.sum(tl.where((t >= k) & (t < tile), totals, 0.0))
        scores = tile_scores(cq, bk, a_tile + gap, column(keys, k), d_head, (tile - k) * q, q)
        yq = dot(scores.to(xk.dtype), xk, yq)
    if way == 0:
        s = first_state(s0, row, head, 1, ssr, 0, ssh, kn, kp, n)
        yq += dot(cq, s.to(cq.dtype)) * tl.exp2(a_tile + tl.sum(tl.where(t < tile, totals, 0.0)))[:, None]
    yq *= zq * sigmoid(zq)
    tl.store(power + (first + step) * syl, tl.sum(yq * yq, 1) / p, mask=ok)
    store2(y + first * (syl * p), step, ok, syl * p, kp, yq)


def scan_block(x, dt, dt_bias, A, B, C, D, ssm, z, chunk_len=128, commit=False):
    """As block_ops.scan_block, without gradients. chunk_len is ignored. The plain function runs for sizes that the
    kernels do not support."""
    if not fits(x.shape[-1], B.shape[-1]):
        return block_ops.scan_block.plain(x, dt, dt_bias, A, B, C, D, ssm, z, chunk_len, commit)
    (x, B, C, z), s0, finished = map(rowwise, (x, B, C, z)), statewise(ssm), 0
    if commit:
        finished, s0 = len(ssm), torch.cat([ssm, ssm])  # the second half gets the states after the finished blocks
        done = slice(finished)
        walk(x[done, :, 0], StepSizes(dt[done, :, 0], A[0], dt_bias[0]), B[done, :, 0], s0[done], final=s0[finished:])
        ssm.copy_(s0[finished:])
    (r, l, ways, h, p), how = x.shape, settings("block" if len(x) == 1 else "blocks", x)
    assert x.stride()[:3] == B.stride()[:3] == C.stride()[:3], "x, B and C must be columns of one tensor"
    y, power = x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)
    tiles = triton.cdiv(l, how["q"])
    T = max(triton.next_power_of_2(tiles), 2)           # Triton 3.6 cannot compile T = 1
    block_kernel[r * ways * h, tiles](
        x, dt, dt_bias, A, B, C, D, s0, z, y, power, l, h, *strides(x, 4), *strides(dt, 4), *strides(z, 4),
        *strides(s0, 2), finished, n=B.shape[-1], p=p, T=T, **how)
    return y, power
