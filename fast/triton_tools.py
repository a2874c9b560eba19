"""
Shared by the Triton files of this folder: registering functions as PyTorch operators, memory layouts, a product.

Without a GPU, Triton's interpreter tests all kernels:    python -m pytest tests/kernels/test_kernels.py
"""
from concurrent.futures import ThreadPoolExecutor

import torch
import triton
import triton.language as tl
from triton import AsyncCompileMode, JITFunction

LOG2E = tl.constexpr(1.4426950408889634)  # exp(u) = exp2(u log2 e); the GPU has exp2 in hardware


def compile_first(run):
    """Compiles all kernels that run() launches, many at a time. None of them runs, so what run() computes is garbage."""
    launch = JITFunction.run

    def compile_only(kernel, *args, grid, warmup, **options):
        launch(kernel, *args, grid=grid, warmup=True, **options)
    JITFunction.run = compile_only
    try:
        with ThreadPoolExecutor() as pool, AsyncCompileMode(pool):
            run()
    finally:
        JITFunction.run = launch


@triton.jit
def dot(a, b, acc=None):
    return tl.dot(a, b, acc, input_precision="ieee")  # fp32 operands are not rounded to tf32


@triton.jit
def sigmoid(u):
    """1 / (1 + e^-u) as a square of an inverse square root, which the GPU has in hardware; a division takes longer."""
    root = tl.rsqrt(1 + tl.exp2(-u * LOG2E))
    return root * root


@triton.jit
def add_pairs(a, b, c, d):
    """Adds (a, b) and (c, d): for two sums by one tl.reduce."""
    return a + c, b + d


def operator(fake):
    """Registers a function as the PyTorch operator nanobdlm::<its name>, which torch.compile does not look into.
    `fake` gets the same arguments and returns uninitialised tensors of the result's shapes. torch.library.custom_op
    does the same, but its first call imports torch.compile, which takes seconds."""
    def register(function):
        name = "nanobdlm::" + function.__name__
        torch.library.define(name, torch.library.infer_schema(function, mutates_args=()))
        torch.library.impl(name, ("cpu", "cuda"), function)
        torch.library.register_fake(name, fake)
        return getattr(torch.ops.nanobdlm, function.__name__).default
    return register


def like(*tensors):
    """An uninitialised tensor for each gradient; for None an empty tensor, as operators cannot return None."""
    return tuple(tensors[0].new_empty(0) if u is None else u.new_empty(u.shape) for u in tensors)


def rowwise(u):
    """u, copied if its last dimension is not contiguous. The kernels accept any strides of the others."""
    return u if u.stride(-1) == 1 else u.contiguous()


def statewise(s0):
    """States, copied if their last two dimensions are not contiguous. The kernels accept any strides of the others."""
    return s0 if s0 is None or s0.stride()[-2:] == (s0.shape[-1], 1) else s0.contiguous()


def strides(u, dims):
    return u.stride()[:dims] if u is not None else (0,) * dims
