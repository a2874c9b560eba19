"""Compiles every Triton kernel for an A100, an RTX 4090 and an H100 or H200 on a machine without a GPU. Triton's
compiler may refuse what its interpreter (test_kernels.py) accepts. Needs Triton, and half a minute for each GPU."""
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@pytest.mark.parametrize("capability", [80, 89, 90], ids=["A100", "RTX 4090", "H100"])
def test_all_kernels_compile_without_a_gpu(capability):
    """In a process of its own: conftest.py may have chosen the interpreter in this one."""
    if not os.path.exists(os.path.join(ROOT, "fast", "__init__.py")):
        pytest.skip("needs the folder fast/, which holds the kernels")
    pytest.importorskip("triton", reason="needs Triton: pip install triton==3.6.0")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, __file__, str(capability)], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "all kernels compiled" in run.stdout


def launch_by_compiling(capability, compiled):
    """From now on kernel[grid](...) compiles the kernel for this capability and does not run it. compiled: a set, to
    which the kernel's name is added."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction
    dtypes = {"bfloat16": "bf16", "float32": "fp32", "float64": "fp64", "int32": "i32", "int64": "i64"}

    def divisible(value):
        return isinstance(value, int) and value % 16 == 0 or hasattr(value, "dtype")

    def type_of(value):
        if hasattr(value, "dtype"):
            return "*" + dtypes[str(value.dtype).split(".")[1]]
        return "fp32" if isinstance(value, float) else "i32" if abs(value) < 2 ** 31 else "i64"

    def run(kernel, *args, grid, warmup, **options):
        values = dict(zip(kernel.arg_names, args))
        values |= {name: options.pop(name) for name in kernel.arg_names if name in options}
        fixed = {p.name for p in kernel.params if p.is_constexpr or values[p.name] is None}
        places = {name: (i,) for i, name in enumerate(kernel.arg_names)}
        source = triton.compiler.ASTSource(
            fn=kernel, signature={k: "constexpr" if k in fixed else type_of(v) for k, v in values.items()},
            constexprs={places[k]: v for k, v in values.items() if k in fixed},
            attrs={places[k]: [["tt.divisibility", 16]] for k, v in values.items() if k not in fixed and divisible(v)})
        triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        compiled.add(kernel.__name__)
    JITFunction.run = run


def plain_operators():
    """Leaves our operators as plain functions: on fake tensors, PyTorch would call their fake twins instead."""
    import torch

    from fast import triton_tools
    triton_tools.operator = lambda fake: lambda function: function
    torch.library.register_autograd = lambda *args, **how: None


def call_everything():
    """Calls each kernel in the sizes of the 350M and 700M models, on tensors without data. Returns all their names."""
    import torch

    from fast import cached_attention, conv, mixer, scan, scan_block, step
    bf16, fp32 = torch.bfloat16, torch.float32
    chosen = scan.settings                               # which look at the GPU
    scan.settings = scan_block.settings = lambda kernel, x, l=64: chosen(
        kernel, SimpleNamespace(is_cuda=True, device=None, dtype=x.dtype, shape=x.shape), l)

    def of(*shape, dtype=bf16):
        return torch.empty(*shape, dtype=dtype)
    h, p, n, d = 26, 64, 128, 832
    c, vector = h * p + 2 * n, of(h, dtype=fp32)
    for r, s in ((256, 16), (64, 256), (1, 256), (4, 512)):  # noisy blocks, a block of generation, long rows
        x, B, C = of(r, s, c).split([h * p, n, n], -1)
        inputs = x.unflatten(-1, (h, p)), of(r, s, h, dtype=fp32), vector, B, C, vector, of(r, h, p, n, dtype=fp32)
        scan.ssd_scan_forward(*inputs, s, False)
    scan.ssd_scan_forward(*inputs, 256, True)
    for r, s, commit in ((1, 256, False), (1, 1, False), (2, 256, True), (8, 256, False)):
        x, B, C = of(r, s, 2, c).split([h * p, n, n], -1)
        x, ssm = x.unflatten(-1, (h, p)), of(r // 2 if commit else r, h, p, n, dtype=fp32)
        both = of(2, h, dtype=fp32)
        scan_block.scan_block(x, of(r, s, 2, h), both, both, B, C, both, ssm, x, commit=commit)
    conv.causal_conv_forward(of(1, 256, 2, c), of(2, c, 4), of(2, c), of(1, 3, c))
    mixed = (of(2, 2048, 2 * h * p + 2 * n + 64), of(c, 4), of(c), vector, vector, vector, of(h * p), of(d, h * p),
             None, None, 256, 256)
    out, y, ends, convs = mixer.mixer_forward(*mixed)
    mixer.mixer_backward(out, ends, convs, y, ends, *mixed)
    for e in (52, 64):                                   # head dimensions
        qkv, held, caches = of(1, 256, 3, 17, e), of(1, dtype=torch.long), of(2, 1, 17, 8192, e)
        q, k, v = qkv.unbind(2)
        step.rotate_block(qkv, of(2, 9000, e // 2, dtype=fp32), held)
        step.rotate_block(torch.cat([qkv, qkv]), of(2, 9000, e // 2, dtype=fp32), torch.cat([held, held]), *caches)
        for m in (256, 16):                              # queries: all, and those of the last layer
            cached_attention.block_attention(q[:, :m], *caches, held, k, v)
    token = of(1088)
    step.add_norm(of(1, 256, 1088), of(2, 1, 256, 1088), of(1, 256, 2, h, dtype=fp32), token, token, token)
    count, xt = of(1, dtype=torch.long), of(1, 256, dtype=torch.long)
    for logits in (of(1, 16, 50304)[..., :50257], of(1, 16, 50257, dtype=torch.float64)):
        drawn = step.gumbel_argmax(logits, xt[:, :16], count, count, count)
    step.uniform(256, -1, count, count, count)
    step.unmask_and_advance(xt, drawn, drawn, 50257, xt, count)
    modules = (cached_attention, conv, mixer, scan, scan_block, step)
    return {name for module in modules for name in vars(module) if name.endswith("_kernel")}


def main(capability):
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    sys.path.insert(0, ROOT)
    compiled = set()
    launch_by_compiling(capability, compiled)
    plain_operators()
    torch.cuda.get_device_capability = lambda device: divmod(capability, 10)
    with FakeTensorMode():
        missing = call_everything() - compiled
    assert not missing, f"never launched: {missing}"
    print(f"all kernels compiled: {len(compiled)}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
