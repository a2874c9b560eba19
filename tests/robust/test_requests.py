"""Requests to sample.py: bad ones are refused before any work, and so are saved prompts of other weights. What goes to
stdout, and what a terminal shows."""
import os
import signal
from types import SimpleNamespace

import pytest
import torch

import decoders
import ops
import sample
from checkpoint import config_from_file, find_checkpoint, fingerprint, load_prompt, save_checkpoint, save_prompt
from configurator import UserError
from conftest import ENGINES, ROOT, generate_by, make_model, make_sampler, prompts_of, script
from data import get_tokenizer
from decoders import Sampler
from model import BlockDiffusionLM
from sample import generate, read


@pytest.fixture(scope="module")
def laptop(tmp_path_factory):
    """A checkpoint of a model of random weights, in blocks of 16, that writes printable letters."""
    path, model = str(tmp_path_factory.mktemp("laptop") / "ckpt.pt"), BlockDiffusionLM(config_from_file("laptop"))
    torch.nn.init.normal_(model.head.weight[32:127])
    save_checkpoint(path, model, tokenizer="bytes", step=0)
    return path


@pytest.mark.parametrize("name, lengths, length, suffix, seeds, message", [
    ("mamba_h", [4], 262_144, [], 1, "make 262152 tokens in whole blocks, .* rotary capacity"),
    ("mamba_h", [7, 16], 262_128, [], 2, "make 262152 tokens in whole blocks"),     # the first row needs a block more
    ("mamba_h", [17], 6, [1, 2], 1, "a gap must fit one block: length and suffix are 8 tokens, .* has room for 7"),
    ("attention", [3, 4], 8, [], 2, "takes prompts of one length at a time")])
def test_bad_requests_are_refused_before_any_work(monkeypatch, name, lengths, length, suffix, seeds, message):
    monkeypatch.setattr(BlockDiffusionLM, "new_cache", lambda *_: pytest.fail("the work began"))
    model = make_model(name, torch.float32)
    sample.plan(model.config, prompts_of(8), 262_136)   # the longest that is served
    with pytest.raises(UserError, match=message):
        generate(model, prompts_of(*lengths), length, make_sampler(model, seeds), suffix=suffix)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("decoder", ["confidence", "threshold", "entropy_bound"])
def test_logits_of_all_positions_are_made_for_a_few_at_a_time(monkeypatch, decoder, engine):
    model, seen, token_logits = make_model("mamba_h", torch.float32), [], BlockDiffusionLM.token_logits
    monkeypatch.setattr(BlockDiffusionLM, "token_logits", lambda self, hidden: (
        seen.append(hidden.size(1)) or token_logits(self, hidden)))
    tokens = []
    for few, rows in ((10 ** 9, 1), (3 * 24, 1), (3 * 24, 2)):
        monkeypatch.setattr(decoders, "MAX_LOGITS", few)
        seen.clear()
        sampler = make_sampler(model, rows, decoder=decoder, threshold=1.0, entropy_bound=0.0)
        tokens.append(generate_by(engine, model, prompts_of(*rows * [11]), 13, sampler).tokens[0])
        assert max(seen) == (8 if few > 1000 else 3)
    assert all(torch.equal(t, tokens[0]) for t in tokens)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_row_ends_at_its_first_end_of_text(engine):
    """Every token of a block serves as the end once. Some occur several times in a block."""
    model, prompts = make_model("mamba_h", torch.float32), prompts_of(4, 13)
    free = generate_by(engine, model, prompts, 24, make_sampler(model, 2)).tokens
    for stop in set(free[0][8:16].tolist()):
        out = generate_by(engine, model, prompts, 24, make_sampler(model, 2), stop_token=stop).tokens
        for row, whole, prompt in zip(out, free, prompts):
            hits = (whole[len(prompt):] == stop).nonzero()
            end = len(prompt) + int(hits[0]) + 1 if len(hits) else len(whole)
            assert torch.equal(row, whole[:end])


# ----------------------------------------------------------------------------------------------
# Saved prompts

def test_the_script_saves_a_prompt_and_goes_on_from_it_later(laptop, tmp_path):
    start = ["sample.py", f"--checkpoint={laptop}", "--device=cpu", "--length=20"]
    prompt = "a prompt of some characters, not whole blocks"
    status, _, error = script(*start, f"--prompt={prompt}", f"--save_cache={tmp_path}/a.cache")
    assert status == 0, error
    for more in ("", " and more"):
        status, printed, _ = script(*start, f"--load_cache={tmp_path}/a.cache", f"--prompt={more}")
        assert status == 0 and printed == script(*start, f"--prompt={prompt}{more}")[1]


def test_a_saved_prompt_of_other_weights_is_refused(tmp_path):
    path, model, prompt = str(tmp_path / "a.cache"), make_model("mamba_h", torch.float32), prompts_of(19)[0]
    mark = fingerprint(model, torch.float32)
    save_prompt(path, prompt, read(model, [prompt[:16]], model.new_cache(1, 16)), mark)
    other = make_model("mamba_h", torch.float32)
    other.layers[1].mixer.fwd.D.data[0] += 1e-6         # a single value of the smallest parameter
    turned = make_model("mamba_h", torch.float32, rope_theta=1e5)
    for others, dtype in ((model, torch.bfloat16), (other, torch.float32), (turned, torch.float32)):
        with pytest.raises(UserError, match="saved by another model or in another dtype"):
            load_prompt(path, others.config, fingerprint(others, dtype))
    with pytest.raises(AssertionError, match="shorter than its cache"):
        generate(model, [prompt[:9]], 8, make_sampler(model), prompt_cache=load_prompt(path, model.config, mark)[1])


# ----------------------------------------------------------------------------------------------
# The script

def run(monkeypatch, checkpoint, **settings):
    """The script in this process."""
    usual = dict(checkpoint=checkpoint, device="cpu", length=20, tokens_per_step=8)
    for name, value in (usual | settings).items():
        monkeypatch.setattr(sample, name, value)
    sample.main()


def test_a_device_without_fp64_is_refused_and_the_plain_engine_runs_a_mixer_that_fast_does_not_know(monkeypatch):
    def model_on(device):
        weight = SimpleNamespace(device=torch.device(device))
        return SimpleNamespace(embed=SimpleNamespace(weight=weight), layers=[SimpleNamespace(mixer="another")])
    monkeypatch.setitem(ops.FAST, "cached_attention", None)
    monkeypatch.setattr(sample, "cast_for_inference", lambda model, dtype: model)
    assert sample.open_engine("auto", model_on("cuda"))[1] is sample.SimpleEngine
    for engine, device, message in (("auto", "mps", "draws need fp64"), ("fused", "cuda", "needs fast/ and a mixer")):
        with pytest.raises(UserError, match=message):
            sample.open_engine(engine, model_on(device))


def test_all_settings_reach_the_generation_and_watch_prints_a_line_for_each_step(laptop, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(sample, "generate", lambda *args, **how: asked.append((*args, how)) or generate(
        *args, **how)._replace(seconds=2.0, cache_bytes=3 * 2 ** 20))
    run(monkeypatch, laptop, prompt="def ", suffix="()", length=9, num_samples=2, seed=7, temperature=2.0, top_k=9,
        top_p=0.8, decoder="confidence", tokens_per_step=3, stop_at_eot=True, watch=True)
    _, prompts, length, sampler, how = asked[0]
    assert [bytes(p.tolist()) for p in prompts] == [b"def "] * 2 and bytes(how["suffix"]) == b"()"
    assert (length, how["stop_token"]) == (9, 256)
    assert sampler == Sampler([7, 8], "confidence", 3, temperature=2.0, top_k=9, top_p=0.8, mask_id=257)
    printed, shown = capsys.readouterr()
    # Without prompt and suffix.
    assert shown.endswith("\n18 tokens in 2.00 s: 9.0 tokens/s, 4 forward passes, cache 3.00 MiB\n")
    lines = [line for line in shown.splitlines() if line.startswith("def ")]
    assert [line.count("\u2591") for line in lines] == [7, 4, 1, 0] and len(lines[0]) == 16
    first, second = printed.split("\n--- sample 2 ---\n")
    assert first.startswith("def ") and second.startswith("def ") and first[:13] != second[:13]


def test_letters_of_several_bytes_are_shown_when_all_their_bytes_are_known():
    """Masks beside a letter's first byte do not hide its neighbours."""
    tokens = [*"жд".encode(), 257, *"ё".encode(), 257, 257, *"ж".encode()[:1]]
    assert sample.line_of(get_tokenizer("bytes"), tokens, 257) == "жд░ё░░░"


def test_a_full_sequence_model_takes_32_steps_also_after_a_long_prompt(monkeypatch, tmp_path, capsys):
    save_checkpoint(tmp_path / "full.pt", make_model("attention", torch.float32, vocab_size=258), tokenizer="bytes")
    run(monkeypatch, str(tmp_path / "full.pt"), prompt="x" * 200, length=64, tokens_per_step=0)
    assert " 32 forward passes" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------
# What is printed

@pytest.mark.parametrize("watch", [False, True])
def test_an_error_loses_nothing_of_any_row(laptop, monkeypatch, capsys, watch):
    """Not even the bytes of a character that is not whole."""
    def interrupted(*args, on_block, **how):
        for row, tokens in ((0, b"ab"), (1, b"xy\xc3"), (0, b"c\xc3"), (1, b"\xa9\xc3")):
            on_block(row, [*tokens])
        raise torch.OutOfMemoryError
    monkeypatch.setattr(sample, "generate", interrupted)
    with pytest.raises(torch.OutOfMemoryError):
        run(monkeypatch, laptop, prompt="def ", num_samples=2, watch=watch)
    assert capsys.readouterr().out == "def abc\ufffd\n\n--- sample 2 ---\ndef xy\u00e9\ufffd\n"


@pytest.mark.parametrize("number, said", [(signal.SIGINT, "sample.py: stopped\n"), (signal.SIGTERM, "")])
def test_a_signal_ends_the_script_with_what_it_has_and_status_128_plus_its_number(laptop, monkeypatch, number, said):
    """Ctrl-C sends SIGINT, `kill` and `timeout` SIGTERM."""
    def interrupted(model, x0, cache):                  # before the second block
        os.kill(os.getpid(), number)
    monkeypatch.setattr(BlockDiffusionLM, "commit", interrupted)
    how = "sample.py", f"--checkpoint={laptop}", "--device=cpu", "--prompt=a", "--num_samples=2"
    status, printed, error = script(*how, "--length=99")
    assert status == 128 + number and error.endswith(said) and "tokens/s" not in error
    assert printed == script(*how, "--length=15")[1]    # the first block


def test_a_special_token_in_a_prompt_and_equal_samples_are_said(laptop, monkeypatch, capsys):
    run(monkeypatch, laptop, prompt="a<|endoftext|>b", num_samples=2, temperature=0.0, decoder="confidence")
    printed, said = capsys.readouterr()
    assert said.startswith("<|endoftext|> in the prompt or suffix is read as text")
    first, second = printed.split("--- sample 2 ---")
    assert first.strip() == second.strip() != "a<|endoftext|>b"
    assert "all samples are equal: with temperature=0, decoder=confidence draws nothing" in said


def test_the_default_is_a_run_in_out_or_else_the_model_that_ships_in_any_folder(saved, tmp_path, monkeypatch):
    shipped = str(ROOT / "assets" / "storyteller" / "model.safetensors")
    (tmp_path / "elsewhere" / "out").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert find_checkpoint("auto") == find_checkpoint("assets/storyteller") == shipped
    monkeypatch.chdir(tmp_path)
    status, printed, error = script("sample.py", "--device=cpu", "--length=9")
    assert status == 0 and len(printed.encode()) > 9 and error.startswith("out/ckpt.pt: "), error
    os.rename("out/ckpt.pt", "out/best.pt")
    assert find_checkpoint("out/best.pt") == "out/best.pt" and find_checkpoint("auto") == shipped
