"""
Triton kernel: the largest of logits plus Gumbel noise, the fast twin of gumbel_argmax in ops.py. It reads
both once, where the same lines in PyTorch pass over them five times, in fp64.

Without a GPU, Triton's interpreter tests it:    python -m pytest tests/test_kernels.py -k gumbel
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


@operator(lambda logits, exponential: exponential.new_empty(exponential.shape[:-1], dtype=torch.long))
def gumbel_argmax(logits: Tensor, exponential: Tensor) -> Tensor:
    """logits (..., v), exponential (..., v) fp64 -> (...) int64"""
    v, noise = logits.shape[-1], exponential.contiguous()
    rows = rowwise(logits).reshape(-1, v)
    value = noise.new_empty(len(rows), triton.cdiv(v, SHARE))
    index = torch.empty_like(value, dtype=torch.long)
    gumbel_argmax_kernel[value.shape](
        rows, noise, value, index, v, rows.stride(0), SHARE=SHARE, TILE=TILE, num_warps=4)
    return index.gather(1, value.argmax(1, keepdim=True)).view(logits.shape[:-1])
