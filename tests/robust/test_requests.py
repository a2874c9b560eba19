"""Requests to sample.py: bad ones are refused before any work, and so are saved prompts of other weights. What a
terminal shows."""
import io
import os
import re
import runpy
import sys
import time
from types import SimpleNamespace

import pytest
import torch

import decoders
import sample
from checkpoint import fingerprint, load_prefix, read_prefix, save_checkpoint, save_prefix
from configurator import UserError
from conftest import ENGINES, ROOT, generate_by, make_model, make_sampler, prompts_of, script
from data import get_tokenizer
from decoders import Sampler
from model import BlockDiffusionLM
from sample import generate


def test_bad_requests_are_refused_before_any_work():
    model = make_model("mamba_h", torch.float32)
    with pytest.raises(UserError, match="rotary capacity"):
        generate(model, prompts_of(4), 262_144, make_sampler(model))
    with pytest.raises(UserError, match="262152 tokens in whole blocks"):     # the first row needs a block more
        generate(model, prompts_of(7, 16), 262_128, make_sampler(model, 2))
    with pytest.raises(UserError, match="at least 1"):
        generate(model, prompts_of(4), 0, make_sampler(model))
    for name, value in (("decoder", "sideways"), ("top_p", 0.0), ("threshold", 1.5), ("threshold", -1.0),
                        ("temperature", -1.0), ("top_k", -1)):
        with pytest.raises(UserError, match=f"^{name} must be .*, but is '?{value}'?$"):
            make_sampler(model, **{name: value})
    with pytest.raises(UserError, match="no seeds"):
        Sampler([], mask_id=22)
    for seed in (2 ** 63, 1.5, torch.Generator()):
        with pytest.raises(UserError, match="a seed must be a whole number that fits into int64, but one is"):
            Sampler([0, seed], mask_id=22)
    with pytest.raises(UserError, match="has 2 seeds; give it 1"):
        generate(model, prompts_of(4), 8, make_sampler(model, 2))
    with pytest.raises(UserError, match="which has room for 7; length and suffix are 8 tokens"):
        generate(model, prompts_of(17), 6, make_sampler(model), suffix=[1, 2])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("decoder", ["confidence", "threshold"])
def test_logits_of_all_positions_are_made_for_a_few_at_a_time(monkeypatch, decoder, engine):
    model, seen, pick = make_model("mamba_h", torch.float32), [], Sampler.pick
    monkeypatch.setattr(Sampler, "pick", lambda self, logits, *rest: (
        seen.append(logits.size(1)) or pick(self, logits, *rest)))
    tokens = []
    for few, rows in ((10 ** 9, 1), (3 * 24, 1), (3 * 24, 2)):
        monkeypatch.setattr(decoders, "MAX_LOGITS", few)
        seen.clear()
        sampler = make_sampler(model, rows, decoder=decoder, threshold=0.3)
        tokens.append(generate_by(engine, model, prompts_of(*rows * [11]), 13, sampler).tokens[0])
        assert set(seen) == ({8} if few > 1000 else {3, 2})
    assert all(torch.equal(t, tokens[0]) for t in tokens)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_row_ends_at_its_first_end_of_text(engine):
    """Every generated token serves as the end once. Some occur several times in a block."""
    model, prompts = make_model("mamba_h", torch.float32), prompts_of(4, 13)
    free = generate_by(engine, model, prompts, 24, make_sampler(model, 2)).tokens
    for stop in set(free[0][4:].tolist()):
        out = generate_by(engine, model, prompts, 24, make_sampler(model, 2), stop_token=stop).tokens
        for row, whole, prompt in zip(out, free, prompts):
            hits = (whole[len(prompt):] == stop).nonzero()
            end = len(prompt) + int(hits[0]) + 1 if len(hits) else len(whole)
            assert torch.equal(row, whole[:end])


def test_equal_prompts_are_read_once():
    model, read = make_model("mamba_h"), []
    prefill = model.prefill
    a, b, c = prompts_of(19, 19, 9)
    prompts = [a, c, b, a, c]
    alone = [generate(model, [p], 9, make_sampler(model, 1, seed=5 + i)).tokens[0] for i, p in enumerate(prompts)]
    model.prefill = lambda x0, cache, **how: (read.append(tuple(x0.shape)), prefill(x0, cache, **how))
    rows = generate(model, prompts, 9, make_sampler(model, 5)).tokens
    assert read[:3] == [(1, 16), (1, 8), (1, 16)] and all(map(torch.equal, rows, alone))


def test_no_call_takes_more_tokens_than_a_chunk_whatever_the_number_of_rows():
    model, sizes = make_model("mamba_h", torch.float32), []
    tokens, caches = torch.randint(0, 22, (6, 64)), [model.new_cache(6, 64) for _ in range(2)]
    model.embed.register_forward_pre_hook(lambda module, inputs: sizes.append(inputs[0].numel()))
    model.prefill(tokens, caches[0], chunk_tokens=100)
    assert max(sizes) == 6 * 16 <= 100 and sum(sizes) == 6 * 64
    model.prefill(tokens, caches[1])
    torch.testing.assert_close(caches[0].layers, caches[1].layers, atol=1e-5, rtol=1e-5)


# ----------------------------------------------------------------------------------------------
# Saved prompts

def test_the_script_saves_a_prompt_and_goes_on_from_it_later(tmp_path):
    start = ["sample.py", "--init=random", "--model_config=laptop", "--device=cpu", "--length=20"]
    prompt = "a prompt of some characters, not whole blocks"
    status, first, error = script(*start, f"--prompt={prompt}", f"--save_cache={tmp_path}/cache")
    assert status == 0 and first.startswith(prompt), error
    assert script(*start, f"--load_cache={tmp_path}/cache")[:2] == (0, first)


@pytest.fixture
def cached(tmp_path):
    """The path of a saved prompt, the model that read it, and the model's fingerprint."""
    path, model = str(tmp_path / "cache"), make_model("mamba_h", torch.float32)
    mark = fingerprint(model, torch.float32)
    save_prefix(path, read_prefix(model, prompts_of(19)[0]), mark)
    return path, model, mark


def test_a_saved_prompt_of_other_weights_is_refused(cached):
    path, model, _ = cached

    def load(other, dtype=torch.float32):
        return load_prefix(path, other.config, fingerprint(other, dtype))
    load(make_model("mamba_h", torch.float32))
    other = make_model("mamba_h", torch.float32)
    other.layers[1].mixer.fwd.D.data[0] += 1e-6         # a single value of the smallest parameter
    for others, dtype in ((model, torch.bfloat16), (other, torch.float32),
                          *((make_model("mamba_h", torch.float32, **changes), torch.float32)
                            for changes in (dict(seed=1), dict(rope_theta=1e5)))):
        with pytest.raises(UserError, match="other weights"):
            load(others, dtype)
    full = make_model("diffumamba_h", torch.float32)
    for refuse in (lambda: load(full), lambda: read_prefix(full, prompts_of(19)[0])):
        with pytest.raises(UserError, match="no prefix cache"):
            refuse()
    os.remove(path)
    with pytest.raises(UserError, match="no saved cache"):
        load(model)


def test_a_damaged_prompt_cache_is_refused(cached):
    path, model, mark = cached
    whole = open(path, "rb").read()
    flipped = bytearray(whole)
    flipped[whole.index(b"data/0") + 200] ^= 1          # in the tensors' part of the file
    save_checkpoint(path, model)
    checkpoint = open(path, "rb").read()
    for content in (whole[:len(whole) // 2], whole[:-1], flipped, checkpoint, b"", b"not a cache"):
        open(path, "wb").write(content)
        with pytest.raises(UserError, match="not a whole saved cache"):
            load_prefix(path, model.config, mark)


@pytest.mark.parametrize("edit", [
    lambda r: r.update(layers=[]), lambda r: r.pop("layers"), lambda r: r.pop("fingerprint"),
    lambda r: r.update(tokens=torch.cat([r["tokens"]] * 9)), lambda r: r["tokens"].fill_(22),
    lambda r: r["tokens"].neg_(), lambda r: r.update(layers=r["layers"][::-1]),
    lambda r: r["layers"][1][1].fill_(float("nan")), lambda r: r.update(layers=[(x, 3) for x, _ in r["layers"]]),
    lambda r: r.update(format="nanobdlm-prefix-1")])
def test_a_prompt_cache_of_another_form_is_refused(cached, edit):
    path, model, mark = cached
    record = torch.load(path)
    edit(record)
    torch.save(record, path)
    with pytest.raises(UserError, match="make it again with --save_cache"):
        load_prefix(path, model.config, mark)


# ----------------------------------------------------------------------------------------------
# The script

def run(monkeypatch, **settings):
    """The script in this process, of a small untrained model."""
    settings = {**dict(init="random", model_config="laptop", device="cpu", length=20, tokens_per_step=8), **settings}
    for name, value in settings.items():
        monkeypatch.setattr(sample, name, value)
    sample.main()


def refused(monkeypatch, folder, settings, message):
    """Runs the script with settings that cannot work. It raises an error and changes no file."""
    files = dict(file=b"as it was", latin=b"caf\xe9", **{"full.py": (
        b"vocab_size, seq_len, block_len, n_layer, n_head, d_model, attn_every = 258, 64, 64, 1, 2, 32, 1")})
    for name, content in files.items():
        (folder / name).write_bytes(content)
    settings = {k: v.format(here=folder) if isinstance(v, str) else v for k, v in settings.items()}
    with pytest.raises((UserError, OSError), match=message):
        run(monkeypatch, **settings)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files


def test_all_settings_reach_the_generation_and_watch_prints_a_line_for_each_step(monkeypatch, capsys):
    asked, generate = [], sample.generate
    monkeypatch.setattr(sample, "generate", lambda *args: asked.append(args) or generate(*args))
    run(monkeypatch, prompt="def ", suffix="()", length=9, num_samples=2, seed=7, temperature=0.5, top_k=9, top_p=0.8,
        decoder="confidence", tokens_per_step=3, stop_at_eot=True, watch=True)
    _, prompts, length, sampler, _, stop_token, *_, suffix = asked[0]
    assert [bytes(p.tolist()) for p in prompts] == [b"def "] * 2 and bytes(suffix.tolist()) == b"()"
    assert (length, stop_token) == (9, 256)
    assert sampler == Sampler([7, 8], "confidence", 3, temperature=0.5, top_k=9, top_p=0.8, mask_id=257)
    printed, shown = capsys.readouterr()
    assert [line.count("\u2591") for line in shown.splitlines() if line.startswith("def ")] == [6, 3, 0, 0]
    first, second = printed.split("\n--- sample 2 ---\n")
    assert first.startswith("def ") and second.startswith("def ") and first[:13] != second[:13]


def test_a_full_sequence_model_takes_16_steps_also_after_a_long_prompt(monkeypatch, tmp_path, capsys):
    settings = "vocab_size, seq_len, block_len, n_layer, n_head, d_model = 258, 64, 64, 2, 2, 32"
    (tmp_path / "full.py").write_text(settings)
    run(monkeypatch, model_config=str(tmp_path / "full.py"), prompt="x" * 200, length=32, tokens_per_step=0)
    assert " 16 forward passes" in capsys.readouterr().err


def test_tokens_are_counted_without_prompt_and_suffix_also_if_a_row_ends_early(monkeypatch, capsys):
    generate = sample.generate

    def ends_early(*args):                              # the second row has its end-of-text after two new tokens
        out = generate(*args)
        out.tokens[1] = out.tokens[1][:len("def ") + 2]
        return out
    monkeypatch.setattr(sample, "generate", ends_early)
    run(monkeypatch, prompt="def ", suffix="():", length=6, num_samples=2, stop_at_eot=True)
    assert "\n8 tokens in " in capsys.readouterr().err


def test_a_device_without_fp64_is_refused():
    model = SimpleNamespace(embed=SimpleNamespace(weight=SimpleNamespace(device=torch.device("mps"))))
    with pytest.raises(UserError, match="cannot sample, because draws need fp64"):
        sample.open_engine("auto", model)


@pytest.mark.parametrize("settings, message", [
    (dict(init=""), "give both or none"), (dict(model_config=""), "give both or none"),
    (dict(length=0), "length must be at least 1, but is 0"), (dict(seed=10 ** 23), "seed must be below"),
    (dict(num_samples=0), "num_samples must be at least 1, but is 0"),
    (dict(dtype="fp16"), "dtype must be one of .*, but is 'fp16'"), (dict(engine="x"), "engine must be one of"),
    (dict(tokens_per_step=-1), "tokens_per_step must be at least 0, but is -1"),
    (dict(prompt="hi", prompt_file="f"), "leave one out"),
    (dict(save_cache="{here}"), "cannot be written"), (dict(save_cache="{here}/file/cache"), "cannot be written"),
    (dict(prompt_file="{here}/nope"), "nope"), (dict(prompt_file="{here}/latin"), "latin is not UTF-8")])
def test_settings_are_checked_before_a_model_is_loaded(monkeypatch, tmp_path, settings, message):
    monkeypatch.setattr(sample, "open_model", lambda *_: pytest.fail("a model was loaded"))
    refused(monkeypatch, tmp_path, settings, message)


@pytest.mark.parametrize("settings, message", [
    (dict(prompt="a" * 300_000), "rotary capacity"), (dict(engine="graphs", save_cache="{here}/cache"), "CPU"),
    (dict(model_config="{here}/full.py", save_cache="{here}/cache"), "no prefix cache")])
def test_requests_are_checked_before_a_prompt_is_read_or_shown(monkeypatch, tmp_path, capsys, settings, message):
    monkeypatch.setattr(BlockDiffusionLM, "prefill", lambda *_, **__: pytest.fail("the prompt was read"))
    refused(monkeypatch, tmp_path, {"prompt": "a prompt of some length", **settings}, message)
    assert capsys.readouterr().out == ""


# ----------------------------------------------------------------------------------------------
# The terminal

class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_reading_a_long_prompt_shows_a_bar(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sample, "BAR_DELAY", 0)
    monkeypatch.setattr(sys, "stderr", Terminal())
    run(monkeypatch, prompt="a" * 4500, save_cache=str(tmp_path / "cache"))
    seen = sys.stderr.getvalue()
    assert "reading the prompt" in seen and "4.10k/4.50k [00:" in seen
    assert capsys.readouterr().out.startswith("a" * 4500)


def test_the_printed_times_include_reading_a_prompt_that_is_saved(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sample, "save_prefix", lambda *_: time.sleep(0.4))
    run(monkeypatch, prompt="a" * 40, save_cache=str(tmp_path / "cache"))
    assert float(re.search(r"reading the prompt (\S+) s", capsys.readouterr().err)[1]) >= 0.4


@pytest.mark.parametrize("stop", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_an_interrupt_or_an_error_loses_nothing_of_any_row(monkeypatch, capsys, stop):
    """Not even the bytes of a character that is not whole."""
    def interrupted(*args):
        on_block = args[6]
        for row, tokens in ((0, b"ab"), (1, b"xy\xc3"), (0, b"c\xc3"), (1, b"\xa9\xc3")):
            on_block(row, [*tokens])
        raise stop
    monkeypatch.setattr(sample, "generate", interrupted)
    with pytest.raises(stop):
        run(monkeypatch, prompt="def ", num_samples=2)
    assert capsys.readouterr().out == "def abc\ufffd\n\n--- sample 2 ---\ndef xy\u00e9\ufffd\n"


@pytest.mark.parametrize("term, watching, drawings", [("xterm", False, 1), ("xterm", True, 2), ("dumb", False, 0)])
def test_what_is_drawn_under_the_text_leaves_the_text_alone(monkeypatch, capsys, term, watching, drawings):
    """The cursor goes down, and back to where it was, and nothing is erased at or before that place. A dumb terminal
    gets no escape codes."""
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(sys, "stderr", Terminal())
    printer = sample.Printer(get_tokenizer("bytes"), "", 0, 0, 8, 257, watch=watching)
    printer.last_shown = float("inf")                   # as if it had shown something just now
    printer.step(torch.tensor([[97, 257]]))
    printer.block(0, [97, 98])
    printer.clear()
    drawn = sys.stderr.getvalue()
    assert drawn.count("\x1b7\x1b[B\r\x1b[J") == drawn.count("\x1b8") == drawings
    assert ("a\u2591" in drawn) == watching and ("| 2/8 [" in drawn) == ("\x1b" in drawn) == (term == "xterm")
    assert drawn.endswith("\x1b8\x1b[J" * (term == "xterm")) and capsys.readouterr().out == "ab"


def test_watch_shows_the_first_row_up_to_its_end(capsys):
    block, eot = torch.tensor([[97, 98, 99, 100]]), 256
    def shown():
        printer.step(block)
        return capsys.readouterr().err
    printer = sample.Printer(get_tokenizer("bytes"), "", 0, 1, 5, 257, n_rows=2, stop_token=eot, watch=True)
    assert shown() == "abcd\n"                          # one known token, three of five new ones
    printer.block(0, [98, 99, 100])
    assert shown() == "ab\n"                            # the other two: the block reaches further than the request
    printer.block(0, [97, eot])
    assert shown() == ""                                # the row has ended, the other one has not


def test_what_a_terminal_cannot_show_is_replaced(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    monkeypatch.setattr(sys, "argv", ["sample.py", "--init=random", "--model_config=laptop", "--device=cpu",
                                      "--length=20", "--num_samples=2", "--tokens_per_step=8"])
    runpy.run_path(str(ROOT / "sample.py"), run_name="__main__")
    sys.stdout.flush()
    printed = sys.stdout.buffer.getvalue()
    assert b"--- sample 2 ---\n" in printed and b"<|endoftext|>" not in printed
    assert b"?" in printed                              # an untrained model writes what ASCII lacks
