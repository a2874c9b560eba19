"""
Triton kernel: the rotary rotation of one block's queries and keys. When a finished block is committed, the same kernel
writes its keys and values into the cache. It replaces plain.rotate_block. Inference only.

Without a GPU, Triton's interpreter tests it:    python -m pytest tests/kernels/test_kernels.py -k rotates
"""
import triton
import triton.language as tl

from fast.triton_tools import strides


@triton.jit
def rotate_kernel(qkv, table, lengths, out, k_cache, v_cache, sines, sr, sl, scb, sch, cap, heads, half,
                  H: tl.constexpr, E: tl.constexpr):
    """All heads of one token, queries and then keys, at position lengths + token. Channel i of the first half of a head
    is paired with channel i of the second half. The number of heads is padded to H and half a head to E, both powers of
    two. The rows that come first have a cache."""
    token, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    head, i, place = tl.arange(0, H)[:, None], tl.arange(0, E)[None, :], tl.load(lengths + row) + token
    ok, at = (head < 2 * heads) & (i < half), head * 2 * half + i
    c = tl.load(table + place * half + i, mask=i < half, other=0.0)
    s = tl.load(table + sines + place * half + i, mask=i < half, other=0.0)
    qkv += row * sr + token * sl + at
    x1, x2 = tl.load(qkv, mask=ok, other=0.0), tl.load(qkv + half, mask=ok, other=0.0)
    y1, y2 = x1 * c - x2 * s, x2 * c + x1 * s
    out += (row * tl.num_programs(0) + token) * heads * 4 * half + at
    tl.store(out, y1, mask=ok)
    tl.store(out + half, y2, mask=ok)
    if k_cache is not None:
        ok &= (head >= heads) & (place < cap) & (2 * row < tl.num_programs(1))
        qkv, to = qkv + heads * 2 * half, row * scb + (head - heads) * sch + place * 2 * half + i
        tl.store(k_cache + to, y1, mask=ok)
        tl.store(k_cache + to + half, y2, mask=ok)
        tl.store(v_cache + to, tl.load(qkv, mask=ok, other=0.0), mask=ok)
        tl.store(v_cache + to + half, tl.load(qkv + half, mask=ok, other=0.0), mask=ok)


def rotate_block(qkv, table, lengths, k_cache=None, v_cache=None):
    """As plain.rotate_block."""
    r, l, _, h, e = qkv.shape
    assert qkv.stride()[2:] == (h * e, e, 1), "heads must be adjacent"
    assert all(u is None or u.stride()[-2:] == (u.shape[-1], 1) for u in (table, k_cache, v_cache)), (
        "the last two dimensions must be contiguous")
    out = qkv.new_empty(r, l, 2, h, e)
    rotate_kernel[l, r](
        qkv, table, lengths, out, k_cache, v_cache, table.stride(0), *strides(qkv, 2), *strides(k_cache, 2),
        0 if k_cache is None else k_cache.shape[2], h, e // 2, H=triton.next_power_of_2(2 * h),
        E=triton.next_power_of_2(e // 2))
    return out.unbind(2)
