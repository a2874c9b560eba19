"""The fast engines on a CPU, where plain twins of their kernels run: prepared weights, the fused commit, and what
happens without CUDA graphs."""
import copy
import functools
import os
import subprocess
import sys

import pytest
import torch

from conftest import (ARCHITECTURES, ENGINES, all_models, both_times, generate_by, make_batch, make_model,
                      make_sampler, need_fast, prompts_of)

need_fast()

import ops  # noqa: E402
from configurator import UserError  # noqa: E402
from decoders import select  # noqa: E402
from fast import block_ops, engine as fast_engine, inference  # noqa: E402
from fast.inference import inference_model  # noqa: E402
from parallel import ROOT  # noqa: E402
from sample import generate, open_engine  # noqa: E402


def test_a_triton_that_lacks_a_part_is_named_and_plain_operations_run(tmp_path):
    """In a process of its own: this one may have imported Triton."""
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("")
    code = "import fast, ops, parallel; print(fast.select('cuda'), ops.FAST); print(parallel.compile_layers(None))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT,
                         env={**os.environ, "PYTHONPATH": str(tmp_path)})
    kernels, layers = run.stdout.splitlines()
    assert kernels == "kernels: plain (no Triton: ModuleNotFoundError: No module named 'triton.language') {}"
    assert layers.startswith("nothing is compiled, which is slow: torch cannot use Triton (") and "`pip check`" in layers


def test_without_cuda_graphs_the_same_steps_run_and_the_reason_is_printed_once(monkeypatch, capsys):
    model = make_model("mamba_h", torch.float32)
    prepared = inference_model(model, torch.float32)

    def run(engine):
        return generate(prepared, prompts_of(3, 12), 16, make_sampler(model, 2),
                        new_engine=functools.partial(fast_engine.new_engine, engine)).tokens
    want = generate_by("simple", model, prompts_of(3, 12), 16, make_sampler(model, 2)).tokens
    with pytest.raises(UserError, match="engine=graphs needs the Triton kernels: use --kernels=auto"):
        run("graphs")

    def broken(engine):
        engine.cache.lengths += 8
        raise RuntimeError("operation not permitted\nwhen stream is capturing")
    monkeypatch.setattr(fast_engine.FastEngine, "capture", broken)
    monkeypatch.setitem(ops.FAST, "cached_attention", ops.cached_attention.plain)
    fast_engine.say_once.cache_clear()
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(run("auto"), want))
    reason = "no CUDA graphs: one could not be recorded: operation not permitted"
    assert capsys.readouterr().err == f"{reason}\n"
    with pytest.raises(UserError, match=reason):
        run("graphs")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_engine_runs_in_the_dtype_that_it_is_asked_for(engine, dtype):
    model = make_model("mamba_h", torch.float32)
    opened, _ = open_engine(engine, model, dtype)
    assert opened.embed.weight.dtype == dtype and (opened is model) == (engine == "simple")
    assert opened.new_cache(1, 8).layers[0][0].dtype == dtype


def test_a_finished_block_is_in_the_cache_when_it_is_flushed():
    """The fast engine's cache is a block behind. `begin` counts that block, and a flush brings the cache up."""
    model, blocks = make_model("mamba_h", torch.float32), torch.randint(0, 22, (3, 2, 8))
    want = model.new_cache(2, 24)
    model.prefill(torch.cat(list(blocks), 1), want)
    prepared = inference_model(model, torch.float32)
    fast = fast_engine.new_engine("fused", prepared, prepared.new_cache(2, 24), make_sampler(model, 2), 8)
    for i, x0 in enumerate(blocks):                     # the second and third are committed without a step between
        fast.commit(x0)
        assert fast.begin.tolist() == [8 * i + 8] * 2 and fast.cache.lengths.tolist() == [8 * i] * 2
    fast.flush()
    fast.flush()
    assert fast.begin.tolist() == fast.cache.lengths.tolist() == [24, 24] and fast.passes == 3
    torch.testing.assert_close(fast.cache.layers, want.layers)
    with pytest.raises(AssertionError, match="make the engine before it is filled"):
        fast_engine.new_engine("fused", prepared, fast.cache, make_sampler(model, 2), 8)


@all_models
def test_the_model_that_was_prepared_for_the_fused_engine_stays_valid(name):
    model = make_model(name)
    x0, xt, t = make_batch(model)
    logits, before = model.logits(model.all_block_hidden(x0, xt, t)), copy.deepcopy(model.state_dict())
    generate_by("fused", model, prompts_of(3, 3), 13, make_sampler(model, 2))
    assert torch.equal(model.logits(model.all_block_hidden(x0, xt, t)), logits)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_an_engine_that_cannot_run_and_what_a_prepared_model_cannot_do_is_refused_in_a_sentence():
    model = make_model("mamba_h")
    for engine, message in (("graphs", "engine=graphs a GPU"), ("sideways", "must be one of")):
        with pytest.raises(UserError, match=message):
            open_engine(engine, model)
    (x0, xt, t), model = make_batch(model), inference_model(model, torch.float32)
    with pytest.raises(UserError, match="prepared for generation; train and score with"):
        model.logits(model.all_block_hidden(x0, xt, t))
    with pytest.raises(AssertionError, match="a block of another length"):
        model.logits(model.denoise_hidden(xt[:, :4], model.new_cache(3, 8), t[:, 0]))


@pytest.mark.parametrize("name, longest, changes", [
    *((name, 512, dict(n_layer=n)) for name in ARCHITECTURES for n in (3, 4)),
    ("mamba_h", 512, dict(reverse_scan=False)), ("mamba_h", 512, dict(conv_width=1)), ("mamba_h", 4, {})])
@pytest.mark.parametrize("cut_on", [(), ("cpu",)])
@both_times
def test_weights_prepared_for_inference_compute_the_same_function(monkeypatch, name, longest, changes, cut_on,
                                                                  time_conditioning):
    """Modulation is folded, products are whole or cut, and the directions of Mamba layers are merged, but not if there
    is one direction only, or a block is several rows of the scan. Denoising, committing and both at once, at all
    positions or at some. A hybrid of 3 layers ends in attention, one of 4 in Mamba."""
    monkeypatch.setattr(block_ops, "SCAN_ROW", longest)
    monkeypatch.setattr(inference, "CUT_ON", cut_on)
    monkeypatch.setattr(inference, "LONG_SUM", 64)
    model = make_model(name, time_conditioning=time_conditioning, **changes)
    x0, xt, t = make_batch(model)
    logits = model.logits(model.all_block_hidden(x0, xt, t))
    model = inference_model(model, torch.float64)
    l, cache, at = model.config.block_len, model.new_cache(3, 32), torch.tensor([[6, 0, 1], [2, 2, 7], [5, 3, 4]])
    torch.testing.assert_close(model.logits(model.denoise_hidden(xt[:, :l], cache, t[:, 0])), logits[:, :l])
    some = model.denoise_hidden(xt[:, :l], cache, t[:, 0], at)
    torch.testing.assert_close(model.logits(some), select(logits[:, :l], at))
    for i in range(1, 32 // l):
        before, block = slice(i * l - l, i * l), slice(i * l, i * l + l)
        hidden = model.commit_and_denoise_hidden(x0[:, before], xt[:, block], cache, t[:, i], at if i % 2 else None)
        torch.testing.assert_close(model.logits(hidden), select(logits[:, block], at) if i % 2 else logits[:, block])
        torch.testing.assert_close(model.logits(model.denoise_hidden(xt[:, block], cache, t[:, i])), logits[:, block])
