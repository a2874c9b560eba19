"""
Triton kernels for what follows the logits of a decoding step, twins of the functions of ops.py.

  gumbel_argmax   the largest of logits plus Gumbel noise. Both are read once, where the same lines in
                  PyTorch pass over them five times, in fp64.
  unmask          writes drawn tokens where masks are: one kernel for four.

Without a GPU, Triton's interpreter tests them:    python -m pytest tests/test_kernels.py -k "gumbel or unmask"
"""
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import operator, rowwise

SHARE, TILE = 1024, 512  # logits of one program, and of one turn of its loop


@triton.jit
def gumbel_argmax_kernel(logits, noise, value, index, v, stride,
                         SHARE: tl.constexpr, TILE: tl.constexpr):
    """The best of SHARE logits of one row, and where it is."""
    row, share = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best = tl.full((TILE,), float("-inf"), tl.float64)
    at = tl.zeros((TILE,), tl.int32) + share * SHARE
    for i in range(share * SHARE, tl.minimum(share * SHARE + SHARE, v), TILE):
        k = i + tl.arange(0, TILE)
        x = tl.load(logits + row * stride + k, mask=k < v, other=float("-inf")).to(tl.float64)
        x -= tl.log(tl.load(noise + row * v + k, mask=k < v, other=1.0))
        at, best = tl.where(x > best, k, at), tl.maximum(x, best)
    top, out = tl.max(best, 0), row * tl.num_programs(1) + share
    tl.store(value + out, top)
    tl.store(index + out, tl.min(tl.where(best == top, at, v - 1), 0).to(tl.int64))


@triton.jit
def best_kernel(value, index, out, shares, v, S: tl.constexpr):
    """Where the best of all shares of a row is."""
    row, k = tl.program_id(0), tl.arange(0, S)
    best = tl.load(value + row * shares + k, mask=k < shares, other=float("-inf"))
    at = tl.load(index + row * shares + k, mask=k < shares, other=0)
    tl.store(out + row, tl.min(tl.where(best == tl.max(best, 0), at, v - 1), 0))


@triton.jit
def unmask_kernel(xt, at, drawn, mask, l, p, P: tl.constexpr):
    """One row's p tokens."""
    row, j = tl.program_id(0).to(tl.int64), tl.arange(0, P)
    ptr = xt + row * l + tl.load(at + row * p + j, mask=j < p, other=0)
    held = tl.load(ptr, mask=j < p, other=0)
    tl.store(ptr, tl.load(drawn + row * p + j, mask=j < p, other=0), mask=(j < p) & (held == mask))


@operator(lambda logits, exponential: exponential.new_empty(exponential.shape[:-1], dtype=torch.long))
def gumbel_argmax(logits: Tensor, exponential: Tensor) -> Tensor:
    """logits (..., v), exponential (..., v) fp64 -> (...) int64"""
    v, noise = logits.shape[-1], exponential.contiguous()
    rows = rowwise(logits).reshape(-1, v)
    value = noise.new_empty(len(rows), triton.cdiv(v, SHARE))
    index = torch.empty_like(value, dtype=torch.long)
    gumbel_argmax_kernel[value.shape](
        rows, noise, value, index, v, rows.stride(0), SHARE=SHARE, TILE=TILE, num_warps=4)
    out = index.new_empty(logits.shape[:-1])
    best_kernel[out.numel(),](value, index, out, value.shape[1], v, S=triton.next_power_of_2(value.shape[1]))
    return out


def unmask(xt, at, drawn, mask_id):
    """xt (b, l), at and drawn (b, p), all int64; writes into xt"""
    assert xt.is_contiguous() and drawn.shape == at.shape
    p = at.shape[1]
    unmask_kernel[len(xt),](
        xt, at.contiguous(), drawn.contiguous(), mask_id, xt.shape[1], p, P=triton.next_power_of_2(p))
