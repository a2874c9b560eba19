"""
Triton kernel: the rotary rotation of one block's queries and keys, in one pass. It replaces plain.rotate_both.
Inference only.

Without a GPU, Triton's interpreter tests it:    python -m pytest tests/kernels/test_kernels.py -k rotates
"""
import triton
import triton.language as tl


@triton.jit
def rotate_kernel(qk, cos, sin, out, stride, heads, half, H: tl.constexpr, E: tl.constexpr):
    """All heads of one token. Channel i of the first half of a head is paired with channel i of the second half. The
    number of heads is padded to H and half a head to E, both powers of two."""
    token, i = tl.program_id(0).to(tl.int64), tl.arange(0, E)[None, :]
    head = tl.arange(0, H)[:, None]
    ok, at = (head < heads) & (i < half), head * 2 * half + i
    c = tl.load(cos + token * half + i, mask=i < half, other=0.0)
    s = tl.load(sin + token * half + i, mask=i < half, other=0.0)
    x1 = tl.load(qk + token * stride + at, mask=ok, other=0.0)
    x2 = tl.load(qk + token * stride + at + half, mask=ok, other=0.0)
    out += token * heads * 2 * half + at
    tl.store(out, x1 * c - x2 * s, mask=ok)
    tl.store(out + half, x2 * c + x1 * s, mask=ok)


def rotate_both(qk, cos, sin):
    """As plain.rotate_both. qk holds the first two thirds of each row of a contiguous tensor (b, l, 3, h, e)."""
    b, l, _, h, e = qk.shape
    assert qk.stride()[2:] == (h * e, e, 1) and (b == 1 or qk.stride(0) == l * qk.stride(1)), "heads must be adjacent"
    assert cos.is_contiguous() and sin.is_contiguous(), "tables must be contiguous"
    out = qk.new_empty(qk.shape)
    rotate_kernel[b * l,](qk, cos, sin, out, qk.stride(1), 2 * h, e // 2, H=triton.next_power_of_2(2 * h),
                          E=triton.next_power_of_2(e // 2))
    return out.permute(2, 0, 3, 1, 4)
