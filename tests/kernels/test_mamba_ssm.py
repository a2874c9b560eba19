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
from fast import mamba_ssm  # noqa: E402
from parallel import select_kernels  # noqa: E402

with_package = pytest.mark.skipif(not torch.cuda.is_available() or importlib.util.find_spec("mamba_ssm") is None,
                                  reason="needs a CUDA GPU and mamba-ssm")


@pytest.fixture(autouse=True)
def _restore_kernels():
    yield
    ops.FAST.clear()


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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=with_package)])
def test_the_convolution_is_given_what_the_package_documents(monkeypatch, device):
    """x (b, c, s) and initial_states (b, c, w - 1), both with channels side by side. On a CPU the package is a stand-in
    in plain torch."""
    def causal_conv1d_fn(x, weight, bias, initial_states, activation):
        assert x.stride(1) == initial_states.stride(1) == 1 and activation == "silu"
        columns = torch.cat([initial_states, x], 2)
        return F.silu(F.conv1d(columns, weight[:, None], bias, groups=len(weight)))
    if device == "cpu":
        monkeypatch.setitem(sys.modules, "causal_conv1d", types.SimpleNamespace(causal_conv1d_fn=causal_conv1d_fn))
    pytest.importorskip("causal_conv1d")
    for width in (16, 12):                               # 12 is no multiple of 8: the plain convolution
        shapes = (2, 9, width), (width, 4), (width,), (2, 3, width)            # u, weight, bias, initial
        dtype, limit = (torch.float64, 1e-12) if device == "cpu" else (torch.float32, 1e-5)
        inputs = [torch.randn(shape, dtype=dtype, device=device) for shape in shapes]
        assert error(mamba_ssm.causal_conv(*inputs), ops.causal_conv.plain(*inputs)) < limit


@with_package
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("s, states_every, given, want_states", [
    (1024, 256, True, True), (1024, None, False, True), (256, None, True, False), (1024, None, False, False),
    (192, 96, True, True)])
def test_scan_states_and_gradients_equal_the_plain_scan(monkeypatch, s, states_every, given, want_states, dtype, limit):
    import triton
    monkeypatch.setattr(triton.knobs.language, "fp32_default", "ieee")         # the default of its kernels is tf32
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
