"""Generation: the cached engine against the oracle without a cache, decoders, prompts, limits."""
import io
import os
import subprocess
import sys
import time

import pytest
import torch

import decoders
import ops
import sample
from checkpoint import fingerprint, load_prefix, read_prefix, save_checkpoint, save_prefix
from configurator import ConfigError, UserError
from conftest import ARCHITECTURES, BLOCK_MODELS, ENGINES, generate_by, make_model, make_sampler, prompts_of
from data import DataError, get_tokenizer
from decoders import ORDERS, ActiveBlock, Sampler, cut
from model import BlockDiffusionLM, ModelError, config_from_file, take
from sample import generate, generate_naive, open_engine

ROOT = os.path.join(os.path.dirname(__file__), "..")


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("time_conditioning", [False, True])
def test_cached_generation_equals_generation_without_a_cache_token_for_token(name, order, time_conditioning):
    model = make_model(name, torch.float32, time_conditioning=time_conditioning)
    prompts = torch.stack(prompts_of(11, 11))           # ends inside a block
    out = generate(model, list(prompts), 18, make_sampler(model, 2, order=order, threshold=0.5))
    naive = generate_naive(model, prompts, 18, make_sampler(model, 2, order=order, threshold=0.5))
    assert torch.equal(torch.stack(out.tokens), naive)


@pytest.mark.parametrize("name", BLOCK_MODELS)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("order", ORDERS)
def test_rows_with_prompts_of_different_lengths_come_out_as_they_would_alone(name, engine, order):
    """A finished row draws nothing while it waits for another."""
    model, how = make_model(name), dict(order=order, threshold=0.3)
    # Without prefix and known token all masks look alike to attention: by probability, rounding would decide.
    prompts = prompts_of(3, 11, 1 if order in ("confidence", "threshold") else 0, 24, 8)
    together = generate_by(engine, model, prompts, 13, make_sampler(model, 5, **how))
    for i, prompt in enumerate(prompts):
        alone = generate(model, [prompt], 13, make_sampler(model, 1, seed=5 + i, **how))
        assert torch.equal(together.tokens[i], alone.tokens[0])
        assert torch.equal(together.tokens[i][:len(prompt)], prompt)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("order", ORDERS)
def test_a_gap_is_filled_between_a_prompt_and_a_suffix_that_stay(name, engine, order):
    """Within the block for block models, anywhere for full-sequence ones, with the plain engine's tokens."""
    model = make_model(name, torch.float32)
    prompts, suffix = prompts_of(17, 17), torch.tensor([3, 1, 4])
    length = 9 if model.config.full_sequence else 2
    out, plain = (generate_by(by, model, prompts, length, make_sampler(model, 2, order=order, threshold=0.3),
                              suffix=suffix).tokens for by in (engine, "simple"))
    for row, same, prompt in zip(out, plain, prompts):
        assert torch.equal(row[:17], prompt) and torch.equal(row[17 + length:], suffix) and torch.equal(row, same)
        assert (row != model.config.mask_id).all()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_gap_is_filled_by_what_the_model_says_between_both_sides(name):
    """One step that reveals everything, at temperature 0: the most likely token given prompt and suffix."""
    model, (prompt,), suffix = make_model(name), prompts_of(18), torch.tensor([3, 1])
    c, mask = model.config, model.config.mask_id
    out = generate(model, [prompt], 2, make_sampler(model, 1, tokens_per_step=32, temperature=0.0), suffix=suffix)
    whole = torch.cat([prompt, torch.tensor([mask, mask]), suffix])
    l = len(whole) if c.full_sequence else c.block_len
    whole = torch.nn.functional.pad(whole, (0, -len(whole) % l), value=mask)[None]
    with torch.no_grad():
        logits = model.all_block_logits(whole.masked_fill(whole == mask, 0), whole, torch.zeros(1, whole.size(1) // l))
    assert torch.equal(out.tokens[0][18:20], logits[0, 18:20].argmax(-1))


def test_a_suffix_that_does_not_fit_the_block_is_a_sentence():
    model = make_model("mamba_h")
    with pytest.raises(ModelError, match="block of 8 tokens in which the prompt ends, which has room for 7; "
                                         "length and suffix are 8 tokens"):
        generate(model, prompts_of(17), 6, make_sampler(model, 1), suffix=[1, 2])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("order", ["confidence", "threshold"])
def test_logits_of_all_positions_are_made_for_a_few_at_a_time(monkeypatch, order, engine):
    model, seen, pick = make_model("mamba_h", torch.float32), [], Sampler.pick
    monkeypatch.setattr(Sampler, "pick", lambda self, logits, *rest: (
        seen.append(logits.size(1)) or pick(self, logits, *rest)))
    tokens = []
    for few, rows in ((10 ** 9, 1), (3 * 24, 1), (3 * 24, 2)):
        monkeypatch.setattr(decoders, "LOGITS", few)
        seen.clear()
        sampler = make_sampler(model, rows, order=order, threshold=0.3)
        tokens.append(generate_by(engine, model, prompts_of(*rows * [11]), 13, sampler).tokens[0])
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


@pytest.mark.parametrize("engine", ENGINES)
def test_forward_passes_are_counted_and_each_step_can_be_watched(engine):
    model, pairs, sure = make_model("mamba_h", torch.float32), dict(tokens_per_step=2), dict(order="threshold", threshold=0.0)
    def passes(prompt_length, length, **how):
        left = []
        out = generate_by(engine, model, prompts_of(prompt_length), length, make_sampler(model, **how),
                          on_step=lambda xt: left.append(int((xt == model.config.mask_id).sum())))
        assert left.count(0) == -(-(prompt_length % 8 + length) // 8) and left[-1] == 0
        return out.forward_passes, left
    commits = dict(simple=1, fused=0)[engine]           # a fused commit is one pass with the step after it
    assert passes(0, 24, **pairs)[0] == 3 * 4 + 2 * commits     # 8 / 2 steps a block; no commit after the last
    assert passes(5, 11, **pairs) == (2 + 4 + commits, [1, 0, 6, 4, 2, 0])     # 3 unknown tokens, then 8
    assert passes(0, 24, **sure)[0] == 3 * 1 + 2 * commits


@pytest.mark.parametrize("engine", ENGINES)
def test_a_row_ends_at_its_first_end_of_text(engine):
    model = make_model("mamba_h", torch.float32)
    prompts = prompts_of(4, 13)
    free = generate_by(engine, model, prompts, 24, make_sampler(model, 2))
    stop = int(free.tokens[0][10])
    out = generate_by(engine, model, prompts, 24, make_sampler(model, 2), stop_token=stop)
    for row, whole, prompt in zip(out.tokens, free.tokens, prompts):
        hits = (whole[len(prompt):] == stop).nonzero()
        end = len(prompt) + int(hits[0]) + 1 if len(hits) else len(whole)
        assert torch.equal(row, whole[:end])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", BLOCK_MODELS)
@pytest.mark.parametrize("prompt_length, more", [(19, 0), (16, 0), (5, 0), (19, 8), (0, 11)])
def test_going_on_from_a_saved_prompt_equals_going_on_from_the_prompt_token_for_token(name, prompt_length, more,
                                                                                      engine, tmp_path, monkeypatch):
    """A prompt that the plain engine read serves every engine."""
    model, path = make_model(name, torch.float32), str(tmp_path / "cache")
    prompt, = prompts_of(prompt_length + more)
    want = generate(model, [prompt] * 2, 21, make_sampler(model, 2)).tokens
    mark = fingerprint(model, torch.float32)
    save_prefix(path, read_prefix(model, prompt[:prompt_length]), mark)
    prefix = load_prefix(path, model.config, mark)
    assert torch.equal(prefix.tokens, prompt[:prompt_length])
    prefill, read = BlockDiffusionLM.prefill, []
    monkeypatch.setattr(BlockDiffusionLM, "prefill", lambda model, x0, cache, **how: (
        read.append(x0.size(1)), prefill(model, x0, cache, **how)))
    out = generate_by(engine, model, [prompt[prompt_length:]] * 2, 21, make_sampler(model, 2), prefix=prefix)
    assert all(torch.equal(a, b) for a, b in zip(out.tokens, want))
    assert read[0] == (prompt_length + more) // 8 * 8 - prompt_length // 8 * 8          # what came after, once
    again = read_prefix(model, prompt[prompt_length:], prefix)
    alone = generate_by(engine, model, [prompt[:0]], 21, make_sampler(model), prefix=again)
    assert torch.equal(alone.tokens[0], want[0])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_engine_runs_in_the_dtype_that_it_is_asked_for(engine, dtype):
    model = make_model("mamba_h", torch.float32)
    opened, _ = open_engine(engine, model, dtype)
    assert opened.embed.weight.dtype == dtype and (opened is model) == (engine == "simple")
    assert opened.new_cache(1, 8).layers[0][0].dtype == dtype


def test_prompts_of_one_length_are_read_together_and_equal_ones_once(monkeypatch):
    model, read = make_model("mamba_h"), []
    prefill = model.prefill
    a, b, c, d = prompts_of(19, 19, 9, 19)
    prompts = [a, c, b, a, d, c, a]
    alone = [generate(model, [p], 9, make_sampler(model, 1, seed=5 + i)).tokens[0] for i, p in enumerate(prompts)]
    model.prefill = lambda x0, cache, **how: (read.append(tuple(x0.shape)), prefill(x0, cache, **how))
    for together, shapes in ((4096, [(3, 16), (1, 8)]), (32, [(2, 16), (1, 16), (1, 8)])):
        monkeypatch.setattr(sample, "READ_TOGETHER", together)
        read.clear()
        rows = generate(model, prompts, 9, make_sampler(model, 7)).tokens
        assert read[:len(shapes)] == shapes and all(map(torch.equal, rows, alone))


def test_thousands_of_prompts_are_read_in_a_second():
    model, n = make_model("mamba_h", torch.float32, n_layer=2), 4000
    prompts = list(torch.randint(0, 22, (n, 20), generator=torch.Generator().manual_seed(0)))
    cache, started = model.new_cache(n, 16), time.perf_counter()
    sample.read_prompts(model, cache, prompts, [16] * n, None)
    assert time.perf_counter() - started < 3            # one by one, each beside all others: 9 s


def test_a_saved_prompt_of_other_weights_and_damaged_files_are_refused_in_a_sentence(tmp_path):
    path, prompt = str(tmp_path / "cache"), prompts_of(19)[0]
    model = make_model("mamba_h", torch.float32)
    mark = fingerprint(model, torch.float32)
    def load(other, dtype=torch.float32):
        return load_prefix(path, other.config, fingerprint(other, dtype))
    with pytest.raises(ModelError, match="no saved cache"):
        load(model)
    save_prefix(path, read_prefix(model, prompt), mark)
    load(make_model("mamba_h", torch.float32))
    with pytest.raises(ModelError, match="other weights"):
        load(model, torch.bfloat16)
    for changes in (dict(seed=1), dict(rope_theta=1e5)):
        with pytest.raises(ModelError, match="other weights"):
            load(make_model("mamba_h", torch.float32, **changes))
    other = make_model("mamba_h", torch.float32)
    other.layers[1].mixer.fwd.D.data[0] += 1e-6         # a single value of the smallest parameter
    with pytest.raises(ModelError, match="other weights"):
        load(other)
    whole = open(path, "rb").read()
    for damaged in (whole[:len(whole) // 2], whole[:-1], b"", b"not a cache"):
        open(path, "wb").write(damaged)
        with pytest.raises(UserError, match="not a whole saved cache"):
            load(model)
    save_checkpoint(path, make_model("mamba_h"))
    with pytest.raises(UserError, match="not a whole saved cache"):
        load(model)
    torch.save(dict(format="nanobdlm-prefix-1", fingerprint=mark, tokens=prompt, layers=[]), path)
    with pytest.raises(ModelError, match="saved by another version"):
        load(model)
    full = make_model("diffumamba_h", torch.float32)
    for refuse in (lambda: load(full), lambda: read_prefix(full, prompt)):
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


def unmask_all(xt, logits_of, sampler):
    """x0 of the block xt (b, l) by a toy denoiser, logits_of(xt, t) -> (b, l, v - 1)."""
    block = ActiveBlock(*xt.shape, sampler, xt.device, time_conditioning=True)
    block.start(xt, torch.tensor(0))
    for _ in block.steps((xt == sampler.mask_id).sum(1).tolist()):
        logits = logits_of(block.xt, block.noise_level())
        block.reveal(lambda at: take(logits, at))
    return block.xt


def test_one_token_at_a_time_in_random_order_is_exact_ancestral_sampling():
    """A toy denoiser that knows the joint distribution of two bits: p = 1 reproduces it, p = 2 draws
    the bits independently and cannot."""
    joint = torch.tensor([[0.45, 0.05], [0.05, 0.45]])
    def logits_fn(xt, t):
        out = torch.empty(len(xt), 2, 2)
        for i in range(2):
            other = xt[:, 1 - i]
            p = joint if i == 0 else joint.T            # (this bit, the other bit)
            out[:, i] = torch.where((other == 2)[:, None], p.sum(1), p.T[other.clamp(max=1)]).log()
            out[:, i] -= out[:, i].logsumexp(-1, keepdim=True)
        return out
    n = 4000
    def agreement(**changes):
        x = unmask_all(torch.full((n, 2), 2), logits_fn, Sampler(list(range(n)), mask_id=2, **changes))
        return float((x[:, 0] == x[:, 1]).float().mean())
    assert abs(agreement(tokens_per_step=1) - 0.9) < 0.03
    assert abs(agreement(order="first_hitting") - 0.9) < 0.03
    assert abs(agreement(tokens_per_step=2) - 0.5) < 0.03


def test_first_hitting_visits_the_times_at_which_the_reverse_process_unmasks_tokens():
    """Of l masked tokens at time t, the first is unmasked at the largest of l uniforms on (0, t)."""
    n, times = 4000, []
    def logits_fn(xt, t):
        times.append(t)
        return torch.zeros(n, 3, 2)
    xt = torch.full((n, 3), 2)
    xt[:, 0] = 1                                        # one of three is known: the block starts at t = 2/3
    unmask_all(xt, logits_fn, Sampler(list(range(n)), "first_hitting", mask_id=2))
    first, second = times
    assert abs(float(first.mean()) - 2 / 3 * 2 / 3) < 0.01 and abs(float(second.mean()) - 2 / 3 / 3) < 0.01
    assert (second < first).all() and (first < 2 / 3).all()


@pytest.mark.parametrize("engine", ENGINES)
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
    out = generate_by(engine, model, prompts_of(8, 8), 24, make_sampler(model, 2, order=order, threshold=0.6))
    assert len(asked) == len(set(asked)) >= 2 * 24
    assert {key[-1] for key in asked} == {8, 16, 24} and out.forward_passes >= 3


def test_bad_requests_are_refused_before_any_work():
    model = make_model("mamba_h", torch.float32)
    with pytest.raises(ModelError, match="rotary capacity"):
        generate(model, prompts_of(4), 262_144, make_sampler(model))
    with pytest.raises(ModelError, match="262152 tokens in whole blocks"):     # the first row needs a block more
        generate(model, prompts_of(7, 16), 262_128, make_sampler(model, 2))
    with pytest.raises(ModelError, match="at least 1"):
        generate(model, prompts_of(4), 0, make_sampler(model))
    for name, value in dict(order="sideways", top_p=0.0, threshold=1.5, temperature=-1.0, top_k=-1).items():
        with pytest.raises(ConfigError, match=f"^{name} must be .*, but is '?{value}'?$"):
            make_sampler(model, **{name: value})
    with pytest.raises(ConfigError, match="no seeds"):
        Sampler([], mask_id=22)
    for seed in (2 ** 63, 1.5, torch.Generator()):
        with pytest.raises(ConfigError, match="a seed must be a whole number of at most 63 bits, but one is"):
            Sampler([0, seed], mask_id=22)
    with pytest.raises(ConfigError, match="has 2 seeds; give it 1"):
        generate(model, prompts_of(4), 8, make_sampler(model, 2))


# -- the script --

def run(monkeypatch, **settings):
    """The script in this process, of a small untrained model."""
    settings = {**dict(init="random", model_config="laptop", device="cpu", length=20, tokens_per_step=8), **settings}
    for name, value in settings.items():
        monkeypatch.setattr(sample, name, value)
    sample.main()


@pytest.mark.parametrize("settings, message", [
    (dict(length=0), "length must be at least 1, but is 0"), (dict(num_samples=0), "num_samples must be at least 1, but is 0"), (dict(seed=10 ** 23), "seed must be below"),
    (dict(order="rnd"), "order must be one of .*, but is 'rnd'"), (dict(dtype="fp16"), "dtype must be one of .*, but is 'fp16'"), (dict(engine="x"), "engine must be one of"),
    (dict(threshold=-1.0), "threshold must be at least 0, but is -1.0"), (dict(threshold=5.0), "threshold must be at most 1, but is 5.0"),
    (dict(tokens_per_step=-1), "tokens_per_step must be at least 1, but is -1"), (dict(prompt="hi", prompt_file="f"), "leave one out"),
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
