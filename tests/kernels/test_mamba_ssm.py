"""--kernels=mamba_ssm: the scan of mamba-ssm and the convolution of causal-conv1d against the plain twins. They are
independent implementations. Most tests need a GPU and mamba-ssm (docs/kernels.md says how to install it)."""
import importlib.util
import sys
import types

import pytest
import torch
import torch.nn.functional as F

from conftest import need_fast, relative_error as error

need_fast()

import ops  # noqa: E402
import parallel  # noqa: E402
from configurator import UserError  # noqa: E402
from decoders import Sampler  # noqa: E402
from fast import mamba_ssm  # noqa: E402
from model import BlockDiffusionLM, ModelConfig  # noqa: E402
from parallel import select_kernels  # noqa: E402
from sample import SimpleEngine, generate, open_engine  # noqa: E402

with_package = pytest.mark.skipif(not torch.cuda.is_available() or importlib.util.find_spec("mamba_ssm") is None,
                                  reason="needs a CUDA GPU and mamba-ssm")


@pytest.fixture(autouse=True)
def _restore_kernels():
    yield
    ops.FAST.clear()


@pytest.fixture
def exact(monkeypatch):
    """fp32 products in fp32: the package's kernels take Triton's default, tf32."""
    import triton
    monkeypatch.setattr(triton.knobs.language, "fp32_default", "ieee")


def test_it_asks_for_a_gpu_and_for_the_package(monkeypatch):
    with pytest.raises(UserError, match="kernels=mamba_ssm needs a GPU .* this is cpu"):
        select_kernels("mamba_ssm", "cpu")
    monkeypatch.setattr(parallel, "ampere_or_later", lambda device: True)
    monkeypatch.setitem(sys.modules, "mamba_ssm", None)  # `import mamba_ssm` fails
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    mamba_ssm.library.cache_clear()
    with pytest.raises(UserError, match="needs the package mamba-ssm .*pip install --no-deps"):
        select_kernels("mamba_ssm", "cuda")
    package = types.ModuleType("ssd_combined")           # of another version
    monkeypatch.setitem(sys.modules, "mamba_ssm.ops.triton.ssd_combined", package)
    with pytest.raises(UserError, match="AttributeError: module 'ssd_combined' has no attribute"):
        select_kernels("mamba_ssm", "cuda")
    assert ops.FAST == {}
    package.chunk_state = package.state_passing = package.mamba_chunk_scan_combined = None
    monkeypatch.setitem(sys.modules, "causal_conv1d", types.ModuleType("causal_conv1d"))       # of another version
    line = select_kernels("mamba_ssm", "cuda")
    assert "mamba-ssm; the rest plain (no causal-conv1d: ImportError: cannot import" in line and [*ops.FAST] == ["ssd_scan"]
    mamba_ssm.library.cache_clear()


def test_the_convolution_is_given_what_the_package_documents(monkeypatch):
    """x (b, c, s) and initial_states (b, c, w - 1), both with channels side by side; the package in plain torch."""
    def causal_conv1d_fn(x, weight, bias, initial_states, activation):
        assert x.stride(1) == initial_states.stride(1) == 1 and activation == "silu"
        columns = torch.cat([initial_states, x], 2)
        return F.silu(F.conv1d(columns, weight[:, None], bias, groups=len(weight)))
    monkeypatch.setitem(sys.modules, "causal_conv1d", types.SimpleNamespace(causal_conv1d_fn=causal_conv1d_fn))
    for width in (16, 12):                               # 12 is no multiple of 8: the plain convolution
        u, initial = torch.randn(2, 9, width, dtype=torch.float64), torch.randn(2, 3, width, dtype=torch.float64)
        weight, bias = torch.randn(width, 4, dtype=torch.float64), torch.randn(width, dtype=torch.float64)
        got = mamba_ssm.causal_conv(u, weight, bias, initial)
        assert torch.allclose(got, ops.causal_conv.plain(u, weight, bias, initial), atol=1e-12)


@with_package
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("s, states_every, given, want_states", [
    (1024, 256, True, True), (1024, None, False, True), (256, None, True, False), (1024, None, False, False),
    (192, 96, True, True)])
def test_scan_states_and_gradients_equal_the_plain_scan(exact, s, states_every, given, want_states, dtype, limit):
    b, h, p, n = 2, 3, 64, 64
    torch.manual_seed(0)
    inputs = dict(x=torch.randn(b, s, h, p).to(dtype), dt=0.1 * torch.rand(b, s, h), A=-1 - 15 * torch.rand(h),
                  B=torch.randn(b, s, n).to(dtype), C=torch.randn(b, s, n).to(dtype), D=torch.randn(h))
    if given:
        inputs["initial_state"] = torch.randn(b, h, p, n)

    def run(scan, inputs):
        inputs = {k: v.cuda().requires_grad_() for k, v in inputs.items()}
        y, states = scan(**inputs, states_every=states_every, want_states=want_states)
        outputs = [y, states] if want_states else [y]
        g = torch.Generator("cuda").manual_seed(1)
        seeds = [torch.randn(o.shape, generator=g, device="cuda").to(o.dtype) for o in outputs]
        return outputs + list(torch.autograd.grad(outputs, inputs.values(), seeds))
    select_kernels("mamba_ssm", "cuda")
    got = run(ops.ssd_scan, inputs)
    if want_states:
        assert got[1].dtype == torch.float32
    for ours, plain in zip(got, run(ops.ssd_scan.plain, {k: v.double() for k, v in inputs.items()})):
        assert error(ours, plain) < limit


@with_package
def test_a_whole_generation_equals_the_plain_one(exact):
    config = ModelConfig(vocab_size=1000, seq_len=512, block_len=128, attn_every=2, n_layer=4, n_head=4, d_model=128,
                         d_state=64)
    torch.manual_seed(0)
    model = BlockDiffusionLM(config).cuda()
    torch.nn.init.normal_(model.head.weight, std=0.1)
    prompts, found = [torch.arange(300), torch.arange(7)], []
    for kernels in ("mamba_ssm", "torch"):
        line = select_kernels(kernels, "cuda")
        opened, new_engine = open_engine("auto", model)
        assert new_engine is SimpleEngine and ("mamba-ssm" in line) == (kernels == "mamba_ssm")
        sampler = Sampler([0, 1], "random", 8, mask_id=999)
        found.append(generate(opened, prompts, 400, sampler, new_engine).tokens)
    assert all(torch.equal(a, b) for a, b in zip(*found))
