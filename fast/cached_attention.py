"""
Triton kernel: attention of one active block to a long cache and to itself. It replaces ops.cached_attention and
block_ops.cached_attention_pairs. Inference only.

The block has l tokens, of which m are queries (all, or some). Each query sees all n cached tokens and the whole block.
 1. Split keys. One head has few query tiles (a tile is M queries by N keys), too few to fill a GPU. So the keys are
    cut into `num_splits` shares. Each program attends to one share and writes its output and log-sum-exp. A second
    kernel combines them.
 2. The length is read on the device. Grid and memory depend on shapes only; each program reads lengths[b] and computes
    its share from it. So one CUDA graph serves every length, and no share is larger than another.
 3. The main loop has no mask: it reads only full tiles of the cache. The partial last tile is handled after the loop.
    Softmax statistics are fp32, in base 2.

    python -m pytest tests/kernels/test_kernels.py -k attention
"""
import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fast.triton_tools import LOG2E, dot, strides


@triton.jit
def load_rows(ptr, stride: tl.constexpr, left, d: tl.constexpr, D: tl.constexpr, R: tl.constexpr, mask: tl.constexpr):
    """Loads R rows of d values as an (R, D) tile. With `mask`, rows from `left` on are zero: past its length a
    cache may hold NaN, and p @ v would spread it even where p is 0. The tests are on constexprs, so
    with d = 64 full tiles are loaded without a mask."""
    r, c = tl.arange(0, R)[:, None], tl.arange(0, D)[None, :]
    if mask or d < D:
        return tl.load(ptr + r * stride + c, mask=(r < left) & (c < d), other=0.0)
    else:
        return tl.load(ptr + r * stride + c)


@triton.jit
def attend_tile(q, k, v, acc, m, z, scale, left, N: tl.constexpr, mask: tl.constexpr):
    """One tile of flash attention: updates the running row maximum m and row sum z of scores * scale (base 2), and the
    sum of values acc. The scale is applied after the product: q stays exact, and a fused multiply-add does it at no
    cost."""
    s = dot(q, k.T)
    if mask:
        s = tl.where(tl.arange(0, N)[None, :] < left, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * scale)
    p = tl.exp2(s * scale - m_new[:, None])
    alpha = tl.exp2(m - m_new)  # rescales earlier sums to the new maximum
    z = z * alpha + tl.sum(p, 1)
    return dot(p.to(v.dtype), v, acc * alpha[:, None]), m_new, z


@triton.jit
def shares(n_ptr, b, cap, num_splits, l: tl.constexpr, N: tl.constexpr, least: tl.constexpr):
    """Splits the key tiles of batch row b (first the prefix, then the block) into shares of one size, at least
    `least` tiles; the last may be smaller. -> prefix length, prefix tiles, all tiles, tiles in a share"""
    n = tl.minimum(tl.load(n_ptr + b), cap)
    cached = tl.cdiv(n, N)
    total = cached + tl.cdiv(l, N)
    return n, cached, total, tl.maximum(tl.cdiv(total, num_splits), least)


@triton.jit
def attend_kernel(q_ptr, kc_ptr, vc_ptr, n_ptr, ko_ptr, vo_ptr, o_ptr, lse_ptr, qb, qh, cb, ch, kb, kh, vb, vh, cap,
                  scale, num_splits, ql: tl.constexpr, cl: tl.constexpr, kl: tl.constexpr, vl: tl.constexpr, align:
                  tl.constexpr, h: tl.constexpr, m: tl.constexpr, l: tl.constexpr, d: tl.constexpr, D: tl.constexpr,
                  caches: tl.constexpr, M: tl.constexpr, N: tl.constexpr, least: tl.constexpr, stages: tl.constexpr):
    """
    One program: a tile of queries of one (row, head), and one share of its keys. Tensors: q; kc and vc, the caches; ko
    and vo, the block's own keys and values; n, the lengths; o and lse, the share's result. Strides qb, ch, kl, ...: the
    first letter is the tensor (q, c a cache, k and v the block's own), the second the axis (b rows, h heads, l
    positions).
    """
    # The query tile is the fastest grid axis: programs that read the same keys run together and share L2.
    i, bh, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, head = (bh // h).to(tl.int64), (bh % h).to(tl.int64)  # 64 bits: b * h * cap * d is large
    n, cached, total, share = shares(n_ptr, b, cap, num_splits, l, N, least)
    lo, hi = split * share, tl.minimum(split * share + share, total)
    if lo >= hi:
        return

    # Every row starts at a multiple of `align` values. With this hint Triton uses wide loads for any d.
    q_ptr += tl.multiple_of(b * qb + head * qh, align)
    kc_ptr += tl.multiple_of(b % caches * cb + head * ch, align)
    vc_ptr += tl.multiple_of(b % caches * cb + head * ch, align)
    ko_ptr += tl.multiple_of(b * kb + head * kh, align)
    vo_ptr += tl.multiple_of(b * vb + head * vh, align)
    q = load_rows(q_ptr + i * M * ql, ql, m - i * M, d, D, M, m % M > 0)
    acc, z = tl.zeros([M, D], tl.float32), tl.zeros([M], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    step = tl.full([], N * cl, tl.int64)  # from one tile of the cache to the next

    # 1. Full tiles of the cache.
    for t in tl.range(lo, tl.minimum(n // N, hi), num_stages=stages):
        k = load_rows(kc_ptr + t * step, cl, N, d, D, N, False)
        v = load_rows(vc_ptr + t * step, cl, N, d, D, N, False)
        acc, top, z = attend_tile(q, k, v, acc, top, z, scale, N, N, False)

    # 2. The partial last tile of the cache, if there is one and it is in this share.
    t = n // N
    if (lo <= t) & (t < tl.minimum(hi, cached)):
        k = load_rows(kc_ptr + t * step, cl, n - t * N, d, D, N, True)
        v = load_rows(vc_ptr + t * step, cl, n - t * N, d, D, N, True)
        acc, top, z = attend_tile(q, k, v, acc, top, z, scale, n - t * N, N, True)

    # 3. The block itself.
    for t in tl.range(tl.maximum(lo - cached, 0), hi - cached, num_stages=2):
        k = load_rows(ko_ptr + t * N * kl, kl, l - t * N, d, D, N, l % N > 0)
        v = load_rows(vo_ptr + t * N * vl, vl, l - t * N, d, D, N, l % N > 0)
        acc, top, z = attend_tile(q, k, v, acc, top, z, scale, l - t * N, N, l % N > 0)

    r, c = i * M + tl.arange(0, M), tl.arange(0, D)
    # o is (split, b, m, h, d), lse (split, b, m, h).
    row = ((split * (tl.num_programs(1) // h) + b) * m + r) * h + head
    o = acc * (1 / z)[:, None]
    tl.store(o_ptr + row[:, None] * d + c[None, :], o.to(o_ptr.dtype.element_ty),
             mask=(r < m)[:, None] & (c < d)[None, :])
    tl.store(lse_ptr + row, top + tl.log2(z), mask=r < m)


@triton.jit
def combine_kernel(part_ptr, lse_ptr, o_ptr, n_ptr, cap, num_splits, h: tl.constexpr, m: tl.constexpr, l: tl.constexpr,
                   d: tl.constexpr, D: tl.constexpr, S: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
                   least: tl.constexpr):
    """Mean of the splits' outputs, weighted by 2^lse, for R of the (b, m, h) rows. Each thread adds up its own values: S
    splits at a time, whose loads do not wait for each other."""
    b = tl.program_id(1).to(tl.int64)
    _, _, total, share = shares(n_ptr, b, cap, num_splits, l, N, least)
    r, c = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, D)
    top, z, o = tl.full([R], float("-inf"), tl.float32), tl.zeros([R], tl.float32), tl.zeros([R, D], tl.float32)
    live = tl.cdiv(total, share)  # the other splits had no keys and wrote nothing
    for first in range(0, live, S):
        new = top
        for s in tl.static_range(S):
            row = ((first + s) * tl.num_programs(1) + b) * (m * h) + r
            new = tl.maximum(new, tl.load(lse_ptr + row, mask=(r < m * h) & (first + s < live), other=float("-inf")))
        o, z = o * tl.exp2(top - new)[:, None], z * tl.exp2(top - new)
        for s in tl.static_range(S):
            row = ((first + s) * tl.num_programs(1) + b) * (m * h) + r
            on = (r < m * h) & (first + s < live)
            w = tl.exp2(tl.load(lse_ptr + row, mask=on, other=float("-inf")) - new)
            o += tl.load(part_ptr + row[:, None] * d + c, mask=on[:, None] & (c < d), other=0.0) * w[:, None]
            z += w
        top = new
    tl.store(o_ptr + (b * m * h + r)[:, None] * d + c, (o / z[:, None]).to(o_ptr.dtype.element_ty),
             mask=(r < m * h)[:, None] & (c < d))


# Up to this many keys small query tiles are fast, and one share is enough.
FEW_KEYS = 1024


def block_attention(q, k_cache, v_cache, lengths, k_own, v_own, num_splits=0):
    """softmax(q [k_cache[:n], k_own]^T / sqrt(d)) [v_cache[:n], v_own] with n = lengths[b]. q (b, m, h, d); k_own
    and v_own (b, l, h, d); k_cache and v_cache (c, h, cap, d), row i reads cache i mod c; lengths (b,) int64.
    The last dimension of each is contiguous. -> (b, m, h, d). No gradients."""
    (b, m, h, d), l, (c, _, cap, _) = q.shape, k_own.shape[1], k_cache.shape
    assert k_cache.shape == v_cache.shape == (c, h, cap, d) and k_cache.stride() == v_cache.stride() and b % c == 0
    assert all(x.stride(-1) == 1 and x.dtype == q.dtype for x in (q, k_cache, v_cache, k_own, v_own))
    # The kernel computes offsets into caches in 64 bits, offsets inside one row's block in 32.
    assert max(m, l) * max(x.stride(1) for x in (q, k_own, v_own)) < 2 ** 31
    D, few = max(16, triton.next_power_of_2(d)), cap + l <= FEW_KEYS
    # The fastest of those tried on an H200. With few keys, small query tiles without splits are.
    M, N, warps, stages, least = 64 if few else 128, 64, 4, 3, 16 if few else 2
    if q.dtype == torch.float32:                # for tests: exact fp32 products, in smaller tiles
        M, N, stages = 64, 32, 2
    M = min(M, max(16, triton.next_power_of_2(m)))
    warps = min(warps, M // 16)
    # The keys are cut into as many shares as programs run at once (8 warps per multiprocessor), but at most 32, and not
    # so many that a share has fewer than `least` tiles. A commit runs two rows against each cache: with a long one,
    # twice as many programs as run at once are two fuller waves.
    sms = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 132
    slots = sms * (8 // warps) // ((b if cap <= 8192 else c) * h * triton.cdiv(m, M))
    num_splits = num_splits or min(max(slots, 1), 32, triton.cdiv(triton.cdiv(cap, N) + triton.cdiv(l, N), least))
    align = math.gcd(16, *(s for x in (q, k_cache, k_own, v_own) for s in strides(x, 3)))
    out, lse = q.new_empty(q.shape), q.new_empty(num_splits, b, m, h, dtype=torch.float32)
    part = out if num_splits == 1 else q.new_empty(num_splits, b, m, h, d, dtype=torch.float32)
    attend_kernel[triton.cdiv(m, M), b * h, num_splits](
        q, k_cache, v_cache, lengths, k_own, v_own, part, lse, q.stride(0), q.stride(2), *strides(k_cache, 2),
        k_own.stride(0), k_own.stride(2), v_own.stride(0), v_own.stride(2), cap, d ** -0.5 * LOG2E.value,
        num_splits, ql=q.stride(1), cl=k_cache.stride(2), kl=k_own.stride(1), vl=v_own.stride(1), align=align, h=h,
        m=m, l=l, d=d, D=D, caches=c, M=M, N=N, least=least, stages=stages, num_warps=warps)
    if num_splits > 1:
        combine_kernel[triton.cdiv(m * h, 8), b](part, lse, out, lengths, cap, num_splits, h, m, l, d, D,
                                                 min(num_splits, 16), 8, N, least)
    return out


def cached_attention(q, k, v, k_cache, v_cache, lengths, block_len):
    """
    Replaces ops.cached_attention and block_ops.cached_attention_pairs. There may be fewer caches c than rows; row i
    reads cache i mod c. With a single block, q may hold only some of its queries.

    The kernel takes one block at a time. If there are several blocks, each but the last is first written to the cache,
    so that the next one sees it. The caller will write the same values to the same place. This needs a cache per row.
    """
    if k_cache.shape[2] == 0 and k.shape[2] == block_len:
        return F.scaled_dot_product_attention(q, k, v)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (b, m, h, e)
    outs = []
    for i in range(0, k.shape[1], block_len):
        if i:
            rows = torch.arange(len(q), device=q.device)[:, None]
            at = lengths[:, None] + torch.arange(i - block_len, i, device=q.device)
            k_cache[rows, :, at], v_cache[rows, :, at] = k[:, i - block_len:i], v[:, i - block_len:i]
        own, held = slice(i, i + block_len), lengths + i if i else lengths  # lengths + 0 would launch a kernel
        queries = q[:, own] if k.shape[1] > block_len else q
        outs.append(block_attention(queries, k_cache, v_cache, held, k[:, own], v[:, own]))
    return (outs[0] if len(outs) == 1 else torch.cat(outs, 1)).transpose(1, 2)
