"""Generation: the cached engine against the oracle without a cache, decoders, prompts, limits."""
import contextlib
import io
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import fold
import ops
import sample
from conftest import ARCHITECTURES, BLOCK_MODELS, make_model
from model import BlockDiffusionLM, ModelError, config_from_file
from checkpoint import save_checkpoint
from configurator import ConfigError
from data import DataError, get_tokenizer
from sample import (Sampler, cut, decode_block, generate, load_prefix, prepare_for_inference, read_prefix,
                    save_prefix)

ROOT = os.path.join(os.path.dirname(__file__), "..")

ORDERS = ["random", "confidence", "threshold", "first_hitting"]


def make_sampler(model, rows=1, seed=5, **changes):
    seeds = [seed + i for i in range(rows)]
    return Sampler(seeds, mask_id=model.config.mask_id, **{"tokens_per_step": 3, **changes})


def decode_with(sampler):
    return lambda xt, logits_fn, begin: decode_block(xt, logits_fn, sampler, begin=begin)


def prompts_of(*lengths, seed=2):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 22, (n,), generator=g) for n in lengths]


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("time_conditioning", [False, True])
def test_cached_generation_equals_generation_without_a_cache_token_for_token(name, order, time_conditioning):
    model = make_model(name, torch.float32, time_conditioning=time_conditioning)
    prompts = torch.stack(prompts_of(11, 11))           # ends inside a block
    out = generate(model, list(prompts), 18, make_sampler(model, 2, order=order, threshold=0.5))
    sampler = make_sampler(model, 2, order=order, threshold=0.5)
    naive = model.generate_naive(prompts, 18, decode_with(sampler))
    assert torch.equal(torch.stack(out.tokens), naive)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("time_conditioning", [False, True])
@pytest.mark.parametrize("prompt_length, how", [
    (11, dict(tokens_per_step=2)), (0, dict(tokens_per_step=8, top_k=5)),
    (11, dict(tokens_per_step=3, top_p=0.8)), (11, dict(order="confidence", temperature=0.0)),
    (8, dict(order="confidence", tokens_per_step=5)), (11, dict(order="threshold", threshold=0.3)),
    (3, dict(order="first_hitting", temperature=2.0))])
def test_the_fused_engine_equals_generation_without_a_cache_token_for_token(monkeypatch, name, time_conditioning,
                                                                            prompt_length, how):
    """Commit and first step in one pass, the head on p positions, folded and merged weights."""
    model = make_model(name, torch.float32, time_conditioning=time_conditioning)
    prompts = torch.stack(prompts_of(prompt_length, prompt_length))
    length = 32 - prompt_length if model.config.full_sequence else 13
    sampler = make_sampler(model, 2, **how)
    naive = model.generate_naive(prompts, length, decode_with(sampler))
    prepare_for_inference(model, torch.float32)
    for linear in ("torch", "few_rows"):                # whole products, and cut ones
        monkeypatch.setitem(ops.KERNELS, "linear", linear)
        out = generate(model, list(prompts), length, make_sampler(model, 2, **how), engine="fused")
        assert torch.equal(torch.stack(out.tokens), naive)


@pytest.mark.parametrize("name", BLOCK_MODELS)
@pytest.mark.parametrize("engine, order", [("simple", "random"), *(("fused", order) for order in ORDERS)])
def test_rows_with_prompts_of_different_lengths_come_out_as_they_would_alone(name, engine, order):
    """A finished row draws nothing while it waits for another."""
    model, how = make_model(name), dict(order=order, threshold=0.3)
    prompts = prompts_of(3, 11, 0, 24, 8)
    together = generate(model, prompts, 13, make_sampler(model, 5, **how), engine=engine)
    for i, prompt in enumerate(prompts):
        alone = generate(model, [prompt], 13, make_sampler(model, 1, seed=5 + i, **how), engine="simple")
        assert torch.equal(together.tokens[i], alone.tokens[0])
        assert torch.equal(together.tokens[i][:len(prompt)], prompt)


@pytest.mark.parametrize("order", ["confidence", "threshold"])
def test_logits_of_all_positions_are_made_for_a_few_at_a_time(monkeypatch, order):
    model, seen, pick = make_model("mamba_h", torch.float32), [], Sampler.pick
    monkeypatch.setattr(Sampler, "pick", lambda self, logits, *rest: (
        seen.append(logits.size(1)) or pick(self, logits, *rest)))
    tokens = []
    for few, rows, engine in ((10 ** 9, 1, "fused"), (3 * 24, 1, "fused"), (3 * 24, 1, "simple"), (3 * 24, 2, "fused")):
        monkeypatch.setattr(sample, "LOGITS", few)
        seen.clear()
        sampler = make_sampler(model, rows, order=order, threshold=0.3)
        tokens.append(generate(model, prompts_of(*rows * [11]), 13, sampler, engine=engine).tokens[0])
        assert set(seen) == ({8} if few > 1000 else {3, 2})
    assert all(torch.equal(t, tokens[0]) for t in tokens)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("prompt_length, length", [(0, 1), (7, 1), (8, 1), (5, 20), (16, 16)])
def test_any_length_is_generated_with_no_mask_left_and_none_emitted(name, prompt_length, length):
    model = make_model(name, torch.float32)
    prompts = prompts_of(prompt_length, prompt_length)
    for order in ORDERS:
        out = generate(model, prompts, length, make_sampler(model, 2, order=order, temperature=3.0))
        for row, prompt in zip(out.tokens, prompts):
            assert len(row) == prompt_length + length and (row != model.config.mask_id).all()
            assert torch.equal(row[:prompt_length], prompt)


def test_forward_passes_are_counted_and_each_step_can_be_watched():
    model = make_model("mamba_h", torch.float32)
    def passes(prompt_length, length, engine="simple", **how):
        left = []
        out = generate(model, prompts_of(prompt_length), length, make_sampler(model, **how), engine=engine,
                       on_step=lambda xt: left.append(int((xt == model.config.mask_id).sum())))
        assert left.count(0) == -(-(prompt_length % 8 + length) // 8) and left[-1] == 0
        return out.forward_passes, left
    pairs, sure = dict(tokens_per_step=2), dict(order="threshold", threshold=0.0)
    assert passes(0, 24, **pairs)[0] == 3 * 4 + 2       # 8 / 2 steps a block; no commit after the last
    assert passes(5, 11, **pairs)[0] == 2 + 4 + 1       # 3 unknown tokens, then 8
    assert passes(0, 24, **sure)[0] == 3 * 1 + 2
    assert passes(0, 24, "fused", **pairs)[0] == 3 * 4  # a commit is one pass with the step after it
    assert passes(5, 11, "fused", **pairs)[0] == 2 + 4
    assert passes(0, 24, "fused", **sure)[0] == 3
    assert passes(5, 11, "fused", **pairs)[1] == passes(5, 11, **pairs)[1] == [1, 0, 6, 4, 2, 0]


@pytest.mark.parametrize("engine", ["simple", "fused"])
def test_a_row_ends_at_its_first_end_of_text(engine):
    model = make_model("mamba_h", torch.float32)
    prompts = prompts_of(4, 13)
    free = generate(model, prompts, 24, make_sampler(model, 2), engine=engine)
    stop = int(free.tokens[0][10])
    out = generate(model, prompts, 24, make_sampler(model, 2), stop_token=stop, engine=engine)
    for row, whole, prompt in zip(out.tokens, free.tokens, prompts):
        hits = (whole[len(prompt):] == stop).nonzero()
        end = len(prompt) + int(hits[0]) + 1 if len(hits) else len(whole)
        assert torch.equal(row, whole[:end])


def test_where_graphs_cannot_be_had_the_same_steps_run_without_them_and_say_so_once(monkeypatch, capsys):
    model = make_model("mamba_h", torch.float32)
    def run(engine="auto"):
        return generate(model, prompts_of(3, 12), 16, make_sampler(model, 2), engine=engine).tokens
    want = run()
    for engine, message in (("graphs", "the model is on the CPU"), ("sideways", "it is one of")):
        with pytest.raises(ConfigError, match=message):
            run(engine)
    def broken(decoder):
        decoder.cache.lengths += 8
        raise RuntimeError("operation not permitted\nwhen stream is capturing")
    monkeypatch.setattr(sample.BlockDecoder, "capture", broken)
    monkeypatch.setattr(sample, "why_no_graphs", lambda *_: "")
    monkeypatch.setattr(torch.nn.Parameter, "is_cuda", True)
    sample.say_once.cache_clear()
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(run(), want))
    assert capsys.readouterr().err == "no CUDA graphs: one could not be recorded: operation not permitted\n"
    with pytest.raises(ConfigError, match="not permitted$"):
        run("graphs")


@pytest.mark.parametrize("name", BLOCK_MODELS)
@pytest.mark.parametrize("prompt_length, more", [(19, 0), (16, 0), (5, 0), (19, 8), (0, 11)])
def test_going_on_from_a_saved_prompt_equals_going_on_from_the_prompt_token_for_token(name, prompt_length, more,
                                                                                      tmp_path):
    model, path = prepare_for_inference(make_model(name, torch.float32), torch.float32), str(tmp_path / "cache")
    prompt, = prompts_of(prompt_length + more)
    want = generate(model, [prompt] * 2, 21, make_sampler(model, 2)).tokens
    save_prefix(path, model, read_prefix(model, prompt[:prompt_length]))
    prefix = load_prefix(path, model)
    assert torch.equal(prefix.tokens, prompt[:prompt_length])
    prefill, read = model.prefill, []
    model.prefill = lambda x0, cache, **how: (read.append(x0.size(1)), prefill(x0, cache, **how))
    for engine in ("simple", "fused"):
        out = generate(model, [prompt[prompt_length:]] * 2, 21, make_sampler(model, 2), prefix=prefix, engine=engine)
        assert all(torch.equal(a, b) for a, b in zip(out.tokens, want))
    assert read[:2] == [(prompt_length + more) // 8 * 8 - prompt_length // 8 * 8, 0]    # what came after, once
    again = read_prefix(model, prompt[prompt_length:], prefix)
    alone = generate(model, [prompt[:0]], 21, make_sampler(model), prefix=again)
    assert torch.equal(alone.tokens[0], want[0])


@pytest.mark.parametrize("k, parts", [(10, 1), (48, 2)])
def test_a_product_in_parts_is_the_product(monkeypatch, k, parts):
    monkeypatch.setitem(ops.KERNELS, "linear", "few_rows")
    x, weight = torch.randn(2, 3, k, dtype=torch.float64), torch.randn(7, k, dtype=torch.float64)
    cut = fold.linear_in_parts(x, weight)
    assert cut.shape == (parts, 2, 3, 7)
    torch.testing.assert_close(ops.join_parts(cut), x @ weight.T)
    assert len(fold.linear_in_parts(torch.randn(513, k).double(), weight)) == 1    # many rows


def test_norms_before_a_product_may_come_after_it():
    """What a Mamba layer adds: each way's RMS norm and product, from parts of the product without norm."""
    y, weight = torch.randn(2, 5, 2, 3, 16).double(), torch.randn(7, 96).double()
    normed = y.flatten(3) * torch.rsqrt(y.flatten(3).square().mean(-1, keepdim=True) + ops.EPS)
    parts = fold.linear_in_parts(y.flatten(2), weight, ways=2)
    assert len(parts) == 2
    torch.testing.assert_close(ops.join_parts(parts, y.square().mean(-1)), normed.flatten(2) @ weight.T)


def test_equal_prompts_are_read_once():
    model, read = make_model("mamba_h", torch.float32), []
    prefill = model.prefill
    model.prefill = lambda x0, cache, **how: (read.append(x0.size(1)), prefill(x0, cache, **how))
    a, b = prompts_of(19, 19)
    generate(model, [a, b, a, a], 1, make_sampler(model, 4))
    assert read == [16, 16, 0, 0]


def test_a_saved_prompt_of_other_weights_and_damaged_files_are_refused_in_a_sentence(tmp_path):
    path, prompt = str(tmp_path / "cache"), prompts_of(19)[0]
    def fresh(dtype=torch.float32, **changes):
        return prepare_for_inference(make_model("mamba_h", torch.float32, **changes), dtype)
    with pytest.raises(ModelError, match="no saved cache"):
        load_prefix(path, fresh())
    save_prefix(path, fresh(), read_prefix(fresh(), prompt))
    load_prefix(path, fresh())
    for other in (fresh(seed=1), fresh(torch.bfloat16), fresh(rope_theta=1e5)):
        with pytest.raises(ModelError, match="other weights"):
            load_prefix(path, other)
    other = fresh()
    other.layers[1].mixer.fwd.D.data[0] += 1e-6         # a single value of the smallest parameter
    with pytest.raises(ModelError, match="other weights"):
        load_prefix(path, other)
    whole = open(path, "rb").read()
    for damaged in (whole[:len(whole) // 2], whole[:-1], b"", b"not a cache"):
        open(path, "wb").write(damaged)
        with pytest.raises(ModelError, match="not a whole saved cache"):
            load_prefix(path, fresh())
    save_checkpoint(path, make_model("mamba_h"))
    with pytest.raises(ModelError, match="not a whole saved cache"):
        load_prefix(path, fresh())
    full = make_model("diffumamba_h", torch.float32)
    for refuse in (lambda: load_prefix(path, full), lambda: save_prefix(path, full, None)):
        with pytest.raises(ModelError, match="no prefix cache"):
            refuse()


def test_the_script_saves_a_prompt_and_goes_on_from_it_later(tmp_path):
    cache, cut_off = str(tmp_path / "cache"), str(tmp_path / "cut_off")
    def start(*flags):
        return subprocess.Popen(
            [sys.executable, "sample.py", "--init=random", "--model_config=config/laptop.py", "--device=cpu",
             "--length=20", *flags], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    def finish(process):
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err
    code, first, err = finish(start("--prompt=a prompt of thirty-seven characters", f"--save_cache={cache}"))
    assert code == 0 and first.startswith("a prompt of thirty-seven characters"), err
    whole = open(cache, "rb").read()
    open(cut_off, "wb").write(whole[:len(whole) // 2])
    later, damaged = start(f"--load_cache={cache}"), start(f"--load_cache={cut_off}")
    assert finish(later)[:2] == (0, first)
    code, out, err = finish(damaged)
    assert code not in (0, None) and out == "" and "Traceback" not in err
    assert err.splitlines()[-1].startswith(f"sample.py: {cut_off} is not a whole saved cache")


def test_sampling_draws_from_the_models_distribution():
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05])).expand(1, 20_000, 4)
    def frequencies(**changes):
        nought = torch.zeros(1, dtype=torch.long)
        drawn = Sampler([1], mask_id=9, **changes).pick(logits, torch.arange(20_000)[None], nought + 1, nought, nought)
        return torch.bincount(drawn[0], minlength=4) / 20_000
    def close(a, b):
        assert (a - torch.tensor(b)).abs().max() < 0.02, a
    close(frequencies(), [0.5, 0.3, 0.15, 0.05])
    close(frequencies(temperature=0.5), [0.685, 0.247, 0.062, 0.007])
    close(frequencies(top_k=2), [0.625, 0.375, 0, 0])
    close(frequencies(top_p=0.8), [0.625, 0.375, 0, 0])
    close(frequencies(top_p=0.81), [0.526, 0.316, 0.158, 0])
    close(frequencies(temperature=0), [1, 0, 0, 0])


def test_top_p_keeps_the_token_that_crosses():
    logits = torch.log(torch.tensor([0.4, 0.35, 0.25]))
    assert (cut(logits, 0, 0.5) > float("-inf")).tolist() == [True, True, False]
    assert (cut(logits, 0, 0.1) > float("-inf")).tolist() == [True, False, False]


def test_one_token_at_a_time_in_random_order_is_exact_ancestral_sampling():
    """A toy denoiser that knows the joint distribution of two bits: p = 1 reproduces it, p = 2 draws
    the bits independently and cannot."""
    joint = torch.tensor([[0.45, 0.05], [0.05, 0.45]])
    def logits_fn(xt, t):
        out = torch.full((len(xt), 2, 3), float("-inf"))
        for i in range(2):
            other = xt[:, 1 - i]
            p = joint if i == 0 else joint.T            # (this bit, the other bit)
            out[:, i, :2] = torch.where((other == 2)[:, None], p.sum(1), p.T[other.clamp(max=1)]).log()
            out[:, i, :2] -= out[:, i, :2].logsumexp(-1, keepdim=True)
        return out
    n = 4000
    def agreement(**changes):
        x = decode_block(torch.full((n, 2), 2), logits_fn, Sampler(list(range(n)), mask_id=2, **changes))
        return float((x[:, 0] == x[:, 1]).float().mean())
    assert abs(agreement(tokens_per_step=1) - 0.9) < 0.03
    assert abs(agreement(order="first_hitting") - 0.9) < 0.03
    assert abs(agreement(tokens_per_step=2) - 0.5) < 0.03


def test_first_hitting_visits_the_times_at_which_the_reverse_process_unmasks_tokens():
    """Of l masked tokens at time t, the first is unmasked at the largest of l uniforms on (0, t)."""
    n, times = 4000, []
    def logits_fn(xt, t):
        times.append(t)
        return torch.tensor([0.0, 0.0, float("-inf")]).expand(n, 3, 3)
    xt = torch.full((n, 3), 2)
    xt[:, 0] = 1                                        # one of three is known: the block starts at t = 2/3
    decode_block(xt, logits_fn, Sampler(list(range(n)), "first_hitting", mask_id=2))
    first, second = times
    assert abs(float(first.mean()) - 2 / 3 * 2 / 3) < 0.01 and abs(float(second.mean()) - 2 / 3 / 3) < 0.01
    assert (second < first).all() and (first < 2 / 3).all()


@pytest.mark.parametrize("engine", ["simple", "fused"])
@pytest.mark.parametrize("order", ORDERS)
def test_no_two_draws_share_their_random_numbers(monkeypatch, engine, order):
    """Of three blocks of two rows: what a draw is for, its step, where its block begins, its row's seed."""
    model, asked = make_model("mamba_h", torch.float32, time_conditioning=True), []
    uniform, draw = ops.uniform, ops.gumbel_argmax

    def asking_uniform(n, purpose, seed, step, begin):
        asked.extend((purpose, i, *key) for key in zip(*map(torch.Tensor.tolist, (seed, step, begin))) for i in range(n))
        return uniform(n, purpose, seed, step, begin)

    def asking_draw(logits, at, seed, step, begin):
        keys = zip(*map(torch.Tensor.tolist, (seed, step, begin)))
        asked.extend(("token", i, *key) for row, key in zip(at.tolist(), keys) for i in row)
        return draw(logits, at, seed, step, begin)
    monkeypatch.setattr(ops, "uniform", asking_uniform)
    monkeypatch.setattr(ops, "gumbel_argmax", asking_draw)
    out = generate(model, prompts_of(8, 8), 24, make_sampler(model, 2, order=order, threshold=0.6), engine=engine)
    assert len(asked) == len(set(asked)) >= 2 * 24
    assert {key[-1] for key in asked} == {8, 16, 24} and out.forward_passes >= 3


def test_a_block_whose_steps_cannot_be_joined_is_launched_step_by_step(monkeypatch, capsys):
    """Nothing is left of a first graph where the second fails."""
    model, made = make_model("mamba_h", torch.float32), []
    def join_one(first, step, times, check):
        made.append(times)
        if len(made) == 2:
            raise RuntimeError("no memory")
    class Recorded:
        def __init__(self, f, *args):
            self.replay = lambda: f(*args)
    monkeypatch.setattr(sample, "record", Recorded)
    monkeypatch.setattr(sample, "BlockGraph", join_one)
    monkeypatch.setattr(sample, "why_no_graphs", lambda *_: "")
    monkeypatch.setattr(torch.nn.Parameter, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: SimpleNamespace(wait_stream=lambda _: None))
    sample.say_once.cache_clear()
    want = generate(model, prompts_of(3), 16, make_sampler(model), engine="fused")
    out = generate(model, prompts_of(3), 16, make_sampler(model), engine="graphs")
    assert torch.equal(out.tokens[0], want.tokens[0]) and out.forward_passes == want.forward_passes
    assert made == [2, 2] and capsys.readouterr().err == "steps are launched one by one: no memory\n"


def test_bad_requests_are_refused_before_any_work():
    model = make_model("mamba_h", torch.float32)
    with pytest.raises(ModelError, match="rotary capacity"):
        generate(model, prompts_of(4), 262_144, make_sampler(model))
    with pytest.raises(ModelError, match="262152 tokens in whole blocks"):     # the first row needs a block more
        generate(model, prompts_of(7, 16), 262_128, make_sampler(model, 2))
    with pytest.raises(ModelError, match="at least 1"):
        generate(model, prompts_of(4), 0, make_sampler(model))
    for name, value in dict(order="sideways", top_p=0.0, threshold=1.5, temperature=-1.0, top_k=-1).items():
        with pytest.raises(ConfigError, match=f"^{name} is '?{value}'?; it is "):
            make_sampler(model, **{name: value})
    with pytest.raises(ConfigError, match="no seeds"):
        Sampler([], mask_id=22)
    for seed in (2 ** 63, 1.5, torch.Generator()):
        with pytest.raises(ConfigError, match="a seed is .*; it is a whole number"):
            Sampler([0, seed], mask_id=22)
    with pytest.raises(ConfigError, match="has 2 seeds; give it 1"):
        generate(model, prompts_of(4), 8, make_sampler(model, 2))


# -- the script --

def run(monkeypatch, **settings):
    """The script in this process, of a small untrained model."""
    settings = {**dict(init="random", model_config="laptop", device="cpu", length=20, tokens_per_step=8), **settings}
    for name, value in settings.items():
        monkeypatch.setattr(sample, name, value)
    monkeypatch.setattr(ops, "KERNELS", dict(ops.KERNELS))
    sample.main()


@pytest.mark.parametrize("settings, message", [
    (dict(length=0), "length is 0; "), (dict(num_samples=0), "num_samples is 0; "), (dict(seed=10 ** 23), "seed is 1"),
    (dict(order="rnd"), "order is 'rnd'; "), (dict(dtype="fp16"), "dtype is 'fp16'; "), (dict(engine="x"), "engine is"),
    (dict(threshold=-1.0), "threshold is -1.0; "), (dict(threshold=5.0), "threshold is 5.0; it is at most 1"),
    (dict(tokens_per_step=-1), "tokens_per_step is -1; "), (dict(prompt="hi", prompt_file="f"), "leave one out"),
    (dict(save_cache="{here}"), "cannot be written"), (dict(save_cache="{here}/file/cache"), "cannot be written"),
    (dict(prompt_file="{here}/nope"), "nope"), (dict(prompt_file="{here}/latin"), "latin is not UTF-8")])
def test_settings_are_checked_before_a_model_is_loaded(monkeypatch, tmp_path, settings, message):
    (tmp_path / "file").write_text("as it was")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    monkeypatch.setattr(sample, "open_model", lambda *_: pytest.fail("a model was loaded"))
    settings = {k: v.format(here=tmp_path) if isinstance(v, str) else v for k, v in settings.items()}
    with pytest.raises((ConfigError, ModelError, DataError, OSError), match=message):
        run(monkeypatch, **settings)
    assert sorted(os.listdir(tmp_path)) == ["file", "latin"] and (tmp_path / "file").read_text() == "as it was"


@pytest.mark.parametrize("settings, message", [
    (dict(prompt="a" * 300_000), "rotary capacity"), (dict(engine="graphs", save_cache="{here}/cache"), "CPU"),
    (dict(model_config="{here}/full.py", save_cache="{here}/cache"), "no prefix cache")])
def test_requests_are_checked_before_a_prompt_is_read_or_shown(monkeypatch, tmp_path, capsys, settings, message):
    (tmp_path / "full.py").write_text(FULL)
    monkeypatch.setattr(BlockDiffusionLM, "prefill", lambda *_, **__: pytest.fail("the prompt was read"))
    settings = {k: v.format(here=tmp_path) if isinstance(v, str) else v for k, v in settings.items()}
    with pytest.raises((ConfigError, ModelError), match=message):
        run(monkeypatch, **{**dict(prompt="a prompt of some length"), **settings})
    assert capsys.readouterr().out == "" and os.listdir(tmp_path) == ["full.py"]


FULL = "vocab_size, seq_len, block_len, n_layer, n_head, d_model, attn_every = 258, 64, 64, 1, 2, 32, 1"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("save", [False, True])
def test_reading_a_long_prompt_shows_a_bar_and_can_be_stopped(monkeypatch, tmp_path, capsys, save):
    monkeypatch.setattr(sample, "BAR_DELAY", 0)
    settings = dict(prompt="a" * 9000, save_cache=str(tmp_path / "cache") if save else "")
    monkeypatch.setattr(sys, "stderr", Terminal())
    run(monkeypatch, **settings)
    seen = sys.stderr.getvalue()
    assert "reading the prompt" in seen and "8.19k/8.99k [00:" in seen
    assert capsys.readouterr().out.startswith("a" * 9000)
    def stop(*_, **__):
        raise KeyboardInterrupt
    monkeypatch.setattr(BlockDiffusionLM, "prefill", stop)
    with pytest.raises(SystemExit, match="130"):
        run(monkeypatch, **settings)
    assert sys.stderr.getvalue().endswith("stopped after 0 tokens\n")


def test_what_has_been_read_of_prompts_is_told_without_what_is_copied():
    model, read = make_model("mamba_h", torch.float32), []
    prompt, = prompts_of(27)
    prefix = read_prefix(model, prompt[:11], on_chunk=read.append)
    generate(model, [prompt[11:]] * 2, 1, make_sampler(model, 2), prefix=prefix, on_read=read.append)
    assert read == [8, 16]


def test_one_long_block_shows_its_progress_by_steps(monkeypatch, tmp_path):
    (tmp_path / "full.py").write_text(FULL)
    ticks = iter(range(10 ** 6))
    monkeypatch.setattr(sample.time, "time", lambda: next(ticks))
    monkeypatch.setattr(sys, "stderr", Terminal())
    run(monkeypatch, model_config=str(tmp_path / "full.py"), prompt="four", tokens_per_step=5)
    seen = sys.stderr.getvalue()
    assert all(f"[{n}/20 tokens, " in seen for n in (5, 10, 15, 20)) and "ETA" in seen


@pytest.mark.parametrize("watching", [False, True])
def test_what_is_drawn_under_the_text_on_a_terminal_leaves_the_text_alone(monkeypatch, capsys, watching):
    """The cursor goes down, and back to where it was, and nothing is erased at or before that place."""
    monkeypatch.setattr(sample, "watch", watching)
    monkeypatch.setattr(sys, "stderr", Terminal())
    printer = sample.Printer(get_tokenizer("bytes"), "", 0, 0, 8, 257)
    printer.step(torch.tensor([[97, 257]]))
    printer.block(0, torch.tensor([97, 98]))
    printer.clear()
    drawn = sys.stderr.getvalue()
    assert drawn.count("\x1b7\x1b[B\r\x1b[J") == drawn.count("\x1b8") == 1 + watching
    assert ("a\u2591" in drawn) == watching and "[2/8 tokens" in drawn
    assert drawn.endswith("\x1b8\x1b[J") and capsys.readouterr().out == "ab"


def test_a_folder_with_a_checkpoint_is_a_checkpoint(monkeypatch, tmp_path, capsys):
    save_checkpoint(str(tmp_path / "ckpt.pt"), BlockDiffusionLM(config_from_file("laptop")), tokenizer="bytes",
                    step=0, settings={})
    run(monkeypatch, init="", checkpoint=str(tmp_path), prompt="some")
    assert capsys.readouterr().out.startswith("some")
    with pytest.raises(ModelError, match="no checkpoint at .*/empty/ckpt.pt; make one"):
        (tmp_path / "empty").mkdir()
        run(monkeypatch, init="", checkpoint=str(tmp_path / "empty"))


def test_all_samples_begin_alike_on_any_terminal():
    process = subprocess.run(
        [sys.executable, "sample.py", "--init=random", "--model_config=laptop", "--device=cpu", "--length=20",
         "--num_samples=2", "--tokens_per_step=8"], cwd=ROOT, capture_output=True, timeout=60,
        env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert process.returncode == 0, process.stderr
    assert b"--- sample 2 ---\n" in process.stdout and b"<|endoftext|>" not in process.stdout
    assert b"?" in process.stdout                       # an untrained model writes what ASCII lacks
