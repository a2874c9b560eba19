"""
Triton kernel: an addition to the residual stream and the norm after it, in one pass. It replaces plain.add_norm.
Inference only.

The addition may come as partial products (see fast/inference.py), which are summed here. Of a Mamba layer, the first
half of them are of the forward direction. Each still lacks the RMS norm of its direction, which is one factor per token
and is applied here too.
With 256 tokens most of the time goes to reductions over a token's channels, so two sums share one reduction.

Without a GPU, Triton's interpreter tests it:    python -m pytest tests/kernels/test_kernels.py -k residual
"""
import torch
import triton
import triton.language as tl

from fast.triton_tools import add_pairs
from ops import EPS

FEW = 1024  # up to this many tokens a program has more warps: it ends sooner, and there is room for all


@triton.jit
def sums(x, y):
    """The sums of x and of y, in one reduction."""
    return tl.reduce((x, y), 0, add_pairs)


@triton.jit
def add_norm_kernel(h, parts, power, bias, weight, shift, out, normed, tokens, eps,
                    d: tl.constexpr, P: tl.constexpr, heads: tl.constexpr, D: tl.constexpr,
                    H: tl.constexpr):
    """One token. d channels are padded to D and heads to H, both powers of two."""
    token, k = tl.program_id(0).to(tl.int64), tl.arange(0, D)
    ok = k < d
    w = tl.load(weight + k, mask=ok, other=0.0).to(tl.float32)
    b = 0.0 if shift is None else tl.load(shift + k, mask=ok, other=0.0).to(tl.float32)
    x = tl.load(h + token * d + k, mask=ok, other=0.0).to(tl.float32)
    if bias is not None:
        x += tl.load(bias + k, mask=ok, other=0.0).to(tl.float32)
    if power is not None:
        head = tl.arange(0, H)
        at = power + token * 2 * heads + head
        forward, reverse = sums(tl.load(at, mask=head < heads, other=0.0),
                                tl.load(at + heads, mask=head < heads, other=0.0))
    for i in tl.static_range(P):
        u = tl.load(parts + (token + i * tokens) * d + k, mask=ok, other=0.0).to(tl.float32)
        if power is not None:
            u *= tl.rsqrt((forward if 2 * i < P else reverse) / heads + eps)
        x += u
    tl.store(out + token * d + k, x.to(out.dtype.element_ty), mask=ok)
    total, squares = sums(x, x * x)
    mean = total / d  # E[x^2] - mean^2 is precise enough in fp32 unless the variance is below 1e-6 mean^2
    y = (x - mean) * tl.rsqrt(tl.maximum(squares / d - mean * mean, 0.0) + eps) * w + b
    tl.store(normed + token * d + k, y.to(normed.dtype.element_ty), mask=ok)


def add_norm(h, parts, power, bias, weight, shift):
    """As plain.add_norm, for contiguous tensors."""
    P, heads = 0 if parts is None else len(parts), 1 if power is None else power.shape[-1]
    tensors = (h, parts, power, bias, weight, shift)
    assert all(u is None or u.is_contiguous() for u in tensors), "tensors must be contiguous"
    assert (not P or parts.shape[1:] == h.shape) and (power is None or power.shape[-2] == 2 and P % 2 == 0), (
        "each part must have the shape of h, and with power there must be as many parts for each direction")
    out, normed, d = torch.empty_like(h), torch.empty_like(h), h.shape[-1]
    tokens = h.numel() // d
    add_norm_kernel[tokens,](
        h, parts, power, bias, weight, shift, out, normed, tokens, EPS, d=d,
        P=P, heads=heads, D=triton.next_power_of_2(d), H=triton.next_power_of_2(heads),
        num_warps=8 if tokens <= FEW else 4)
    return out, normed
