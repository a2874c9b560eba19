"""The fast engines on a CPU, where plain twins of their kernels run: prepared weights, the fused commit, and what
happens without CUDA graphs."""
import functools
import subprocess
import sys

import pytest
import torch

from conftest import (ARCHITECTURES, ENGINES, ROOT, all_models, block_models, both_times, generate_by, make_batch,
                      make_model, make_sampler, need_fast, prompts_of)

need_fast()

import ops  # noqa: E402
from configurator import UserError  # noqa: E402
from decoders import generate_naive  # noqa: E402
from fast import engine as fast_engine, inference, plain  # noqa: E402
from fast.inference import inference_model  # noqa: E402
from sample import generate, open_engine  # noqa: E402
from test_ops import scan_inputs  # noqa: E402


@all_models
@pytest.mark.parametrize("time_conditioning, prompt_length, how", [
    (False, 11, dict(tokens_per_step=2)), (True, 0, dict(tokens_per_step=8, top_k=5)),
    (False, 11, dict(tokens_per_step=3, top_p=0.8)), (True, 11, dict(decoder="confidence", temperature=0.0)),
    (False, 8, dict(decoder="confidence", tokens_per_step=5)), (True, 11, dict(decoder="threshold", threshold=0.3)),
    (False, 3, dict(decoder="first_hitting", temperature=2.0)), (True, 3, dict(decoder="first_hitting"))])
def test_the_fused_engine_equals_generation_without_a_cache_token_for_token(monkeypatch, name, time_conditioning,
                                                                            prompt_length, how):
    """Commit and first step in one pass, the head on p positions, folded and merged weights."""
    model = make_model(name, torch.float32, time_conditioning=time_conditioning)
    prompts = torch.stack(prompts_of(prompt_length, prompt_length))
    length = 32 - prompt_length if model.config.full_sequence else 13
    naive = generate_naive(model, prompts, length, make_sampler(model, 2, **how))
    for cut_on in ((), ("cpu",)):                       # whole products, and cut ones
        monkeypatch.setattr(inference, "CUT_ON", cut_on)
        out = generate_by("fused", model, list(prompts), length, make_sampler(model, 2, **how))
        assert torch.equal(torch.stack(out.tokens), naive)


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
    model = make_model("mamba_h", torch.float32)
    blocks = torch.randint(0, 22, (3, 2, 8))
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
    for mine, theirs in zip(fast.cache.layers, want.layers):
        for a, b in zip(mine, theirs):
            torch.testing.assert_close(a, b)


@all_models
def test_the_model_that_was_prepared_stays_valid(name):
    model = make_model(name)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    x0, xt, t = make_batch(model)
    logits = model.all_block_logits(x0, xt, t)
    generate_by("fused", model, prompts_of(3, 3), 13, make_sampler(model, 2))
    assert torch.equal(model.all_block_logits(x0, xt, t), logits)
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[k], before[k]) for k in after)


def test_an_engine_that_cannot_run_and_what_a_prepared_model_cannot_do_is_refused_in_a_sentence():
    model = make_model("mamba_h")
    for engine, message in (("graphs", "the model is on the CPU"), ("sideways", "must be one of")):
        with pytest.raises(UserError, match=message):
            open_engine(engine, model)
    (x0, xt, t), model = make_batch(model), inference_model(model, torch.float32)
    with pytest.raises(UserError, match="prepared for generation; train and score with"):
        model.all_block_logits(x0, xt, t)
    with pytest.raises(UserError, match="must have block_len = 8 tokens, as in training, but has 4"):
        model.denoise(xt[:, :4], model.new_cache(3, 8), t[:, 0])


@pytest.mark.parametrize("k, parts", [(10, 1), (48, 2)])
def test_a_product_in_parts_is_the_product(monkeypatch, k, parts):
    monkeypatch.setattr(inference, "CUT_ON", ("cpu",))
    x, weight = torch.randn(2, 3, k, dtype=torch.float64), torch.randn(7, k, dtype=torch.float64)
    cut = inference.linear_in_parts(x, weight)
    assert cut.shape == (parts, 2, 3, 7)
    torch.testing.assert_close(plain.join_parts(cut), x @ weight.T)
    assert len(inference.linear_in_parts(torch.randn(513, k).double(), weight)) == 1    # many rows


def test_rms_norms_can_be_applied_after_the_product():
    """As in a merged Mamba layer: the product of each direction is scaled by the RMS of its input afterwards."""
    y, weight = torch.randn(2, 5, 2, 3, 16).double(), torch.randn(7, 96).double()
    normed = y.flatten(3) * torch.rsqrt(y.flatten(3).square().mean(-1, keepdim=True) + ops.EPS)
    parts = inference.linear_in_parts(y.flatten(2), weight, ways=2)
    assert len(parts) == 2
    torch.testing.assert_close(plain.join_parts(parts, y.square().mean(-1)), normed.flatten(2) @ weight.T)


@pytest.mark.parametrize("name, reverse_scan, longest", [
    *((name, True, 512) for name in ARCHITECTURES), ("mamba_h", False, 512), ("mamba_h", True, 4)])
@both_times
def test_weights_prepared_for_inference_compute_the_same_function(monkeypatch, name, reverse_scan, longest,
                                                                  time_conditioning):
    """Modulation is folded and the directions of Mamba layers are merged, but not if there is one direction only, or a
    block is several rows of the scan. Denoising, committing and both at once."""
    monkeypatch.setattr(plain, "SCAN_ROW", longest)
    model = make_model(name, time_conditioning=time_conditioning, reverse_scan=reverse_scan)
    x0, xt, t = make_batch(model)
    logits = model.all_block_logits(x0, xt, t)
    model = inference_model(model, torch.float64)
    l, cache = model.config.block_len, model.new_cache(3, 32)
    torch.testing.assert_close(model.denoise(xt[:, :l], cache, t[:, 0]), logits[:, :l])
    for i in range(1, 32 // l):
        before, block = slice(i * l - l, i * l), slice(i * l, i * l + l)
        hidden = model.commit_and_denoise_hidden(x0[:, before], xt[:, block], cache, t[:, i])
        torch.testing.assert_close(model.logits(hidden), logits[:, block])
        torch.testing.assert_close(model.denoise(xt[:, block], cache, t[:, i]), logits[:, block])


@pytest.mark.parametrize("n_layer", [1, 2, 3])          # the last is attention, Mamba, attention
@block_models
@both_times
def test_positions_that_nobody_asks_for_may_be_left_out_of_the_last_layer(name, n_layer, time_conditioning):
    """Rows of different lengths; positions may come twice. What a commit leaves in the cache is the same."""
    model = make_model(name, attn_every=1 if name == "bdlm_attention" else 2, n_layer=n_layer,
                       time_conditioning=time_conditioning)
    x0, xt, t = make_batch(model)
    model = inference_model(model, torch.float64)
    caches, at = [model.new_cache(3, 24) for _ in range(2)], torch.tensor([[6, 0, 1], [2, 2, 7], [5, 3, 4]])
    for cache in caches:
        for i, n in enumerate((0, 16, 8)):
            model.prefill(x0[i:i + 1, :n], cache.rows(i, i + 1))

    def check(some, every):
        assert some.shape == (3, 3, model.config.d_model)
        torch.testing.assert_close(some, torch.stack([h[p] for h, p in zip(every, at)]))
    first, second = xt[:, :8], xt[:, 8:16]
    check(model.denoise_hidden(first, caches[0], t[:, 0], at), model.denoise_hidden(first, caches[0], t[:, 0]))
    check(model.commit_and_denoise_hidden(x0[:, 24:], second, caches[0], t[:, 1], at),
          model.commit_and_denoise_hidden(x0[:, 24:], second, caches[1], t[:, 1]))
    for a, b in zip(*(cache.layers for cache in caches)):
        for i, n in enumerate(caches[0].lengths.tolist()):
            for part, other in zip(a, b):
                keys = part.size(2) == 24               # a cache of attention: past the length it may hold anything
                torch.testing.assert_close(*((u[i, :, :n] if keys else u[i]) for u in (part, other)))


def test_both_ways_are_a_scan_and_a_scan_of_the_reversed_tokens():
    fwd, rev = scan_inputs(24), scan_inputs(24)
    rev["initial_state"], bias = None, torch.randn(2, fwd["D"].numel()).double()
    x, raw, B, C = (torch.stack([v[k] for v in (fwd, rev)], 2) for k in ("x", "dt", "B", "C"))
    A, D = (torch.stack([v[k] for v in (fwd, rev)]) for k in ("A", "D"))
    z = torch.randn_like(x)
    y, power = plain.ssd_scan_both(x, raw, bias, A, B, C, D, fwd["initial_state"], z, chunk_len=8)
    torch.testing.assert_close(power, y.square().mean(-1))
    y = y / torch.nn.functional.silu(z)
    for i, way in enumerate((fwd, rev)):
        way["dt"] = torch.nn.functional.softplus(way["dt"] + bias[i])
    want = ops.ssd_scan_ref(**fwd)[0]
    torch.testing.assert_close(y[:, :, 0], want)
    rev = {k: v.flip(1) if k in ("x", "dt", "B", "C") else v for k, v in rev.items()}
    torch.testing.assert_close(y[:, :, 1], ops.ssd_scan_ref(**rev)[0].flip(1))


def test_the_second_of_a_pair_of_blocks_starts_where_the_first_ends():
    b, h, p, n = 2, 3, 4, 5
    x, z, dt, B, C = (torch.randn(2 * b, 12, 2, *shape).double() for shape in ((h, p), (h, p), (h,), (n,), (n,)))
    bias, A, D = torch.randn(2, h).double(), -torch.rand(2, h).double(), torch.randn(2, h).double()
    start = torch.randn(b, h, p, n).double()
    y, power, states = plain.ssd_scan_pairs(x, dt, bias, A, B, C, D, start, z, chunk_len=8)
    steps = torch.nn.functional.softplus(dt[:b, :, 0] + bias[0])
    want, ends = ops.ssd_scan_ref(x[:b, :, 0], steps, A[0], B[:b, :, 0], C[:b, :, 0], D[0], start)
    torch.testing.assert_close(states, ends[:, -1])
    torch.testing.assert_close(y[:b, :, 0], want * torch.nn.functional.silu(z[:b, :, 0]))
    active, _ = plain.ssd_scan_both(x[b:], dt[b:], bias, A, B[b:], C[b:], D, states, z[b:])
    torch.testing.assert_close(y[b:], active)
    assert not y[:b, :, 1].any()
    torch.testing.assert_close(power, y.square().mean(-1))


def test_generation_starts_without_torch_compile():
    """To import torch.compile takes seconds, and to compile tens of seconds."""
    code = ("import sys; import sample; from configurator import configure; "
            "configure(vars(sample), ['--init=random', '--model_config=laptop', '--length=20', '--engine=fused', "
            "'--device=cpu']); sample.main(); sys.exit('torch._dynamo' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
