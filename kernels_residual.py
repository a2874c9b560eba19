"""
Triton kernel: what a layer adds to the residual stream, and the norm that reads the stream next, in one
pass: the fast twin of add_norm in ops.py. Inference only.

A product with few rows and a long sum comes in parts (see fold.py), and those of a Mamba layer still
lack the RMS norm of their way: sums over what is read here anyway.

Without a GPU, Triton's interpreter tests it:    python -m pytest tests/test_kernels.py -k residual
"""
from typing import Optional, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import operator
from ops import EPS


@triton.jit
def add_norm_kernel(h, parts, power, bias, weight, shift, out, normed, tokens, eps,
                    d: tl.constexpr, P: tl.constexpr, ways: tl.constexpr, heads: tl.constexpr,
                    D: tl.constexpr, H: tl.constexpr):
    """One token; its d channels are padded to D, its heads to H, powers of two."""
    token, k = tl.program_id(0).to(tl.int64), tl.arange(0, D)
    ok = k < d
    x = tl.load(h + token * d + k, mask=ok, other=0.0).to(tl.float32)
    if bias is not None:
        x += tl.load(bias + k, mask=ok, other=0.0).to(tl.float32)
    for way in tl.static_range(ways):
        part = tl.zeros((D,), tl.float32)
        for i in tl.static_range(P // ways):
            at = ((way * (P // ways) + i) * tokens + token) * d + k
            part += tl.load(parts + at, mask=ok, other=0.0).to(tl.float32)
        if power is not None:
            head = tl.arange(0, H)
            at = power + (token * ways + way) * heads + head
            total = tl.sum(tl.load(at, mask=head < heads, other=0.0))
            part *= tl.rsqrt(total / heads + eps)
        x += part
    tl.store(out + token * d + k, x.to(out.dtype.element_ty), mask=ok)
    x = tl.where(ok, x - tl.sum(x) / d, 0.0)
    x *= tl.rsqrt(tl.sum(x * x) / d + eps)
    y = x * tl.load(weight + k, mask=ok, other=0.0).to(tl.float32)
    if shift is not None:
        y += tl.load(shift + k, mask=ok, other=0.0).to(tl.float32)
    tl.store(normed + token * d + k, y.to(normed.dtype.element_ty), mask=ok)


@operator(lambda h, *_: (h.new_empty(h.shape), h.new_empty(h.shape)))
def add_norm(h: Tensor, parts: Optional[Tensor], power: Optional[Tensor], bias: Optional[Tensor],
             weight: Tensor, shift: Optional[Tensor]) -> Tuple[Tensor, Tensor]:
    """As ops.add_norm. h (b, s, d), parts (P, b, s, d) and power (b, s, ways, heads) contiguous."""
    assert all(u is None or u.is_contiguous() for u in (h, parts, power))
    out, normed, d = torch.empty_like(h), torch.empty_like(h), h.shape[-1]
    ways, heads = (1, 1) if power is None else power.shape[-2:]
    tokens = h.numel() // d
    add_norm_kernel[tokens,](
        h, parts, power, bias, weight, shift, out, normed, tokens, EPS, d=d,
        P=0 if parts is None else len(parts), ways=ways, heads=heads, D=triton.next_power_of_2(d),
        H=triton.next_power_of_2(heads), num_warps=8)
    return out, normed
