"""eval.py's text and question sets: what is printed, what the harness gets, and what is refused in a sentence."""
import hashlib
import json
import os
import types

import numpy as np
import pytest
import torch

from checkpoint import open_checkpoint, save_checkpoint
from configurator import UserError
from conftest import eval_record, make_model, module_of, script, with_harness
from data import TokenData, get_tokenizer
from nelbo import masked_cross_entropy, sum_over_ranks
from parallel import Parallel
from test_eval import decoded, one_rank, sums_of
from tools.loss import read_log
from tools.questions import encode_question, score_pairs

BYTES = get_tokenizer("bytes")
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")         # read when lm_eval is imported
TASK = dict(dataset_path="json", validation_split="validation", target_delimiter="", doc_to_text="{{context}}",
            metric_list=[dict(metric="acc", aggregation="mean", higher_is_better=True)])
CHOICES = dict(output_type="multiple_choice", doc_to_choice="{{choices}}", doc_to_target="{{label}}")
LAMBADA = dict(output_type="loglikelihood", doc_to_target="{{target}}")


@pytest.fixture
def task(tmp_path, monkeypatch):
    """A function that writes a task file and its rows, and returns the flag that says where it is."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def write(name, kind, rows):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        where = dict(task=name, dataset_kwargs=dict(data_files=dict(validation=str(path))))
        (tmp_path / f"{name}.yaml").write_text(json.dumps(TASK | where | kind))          # JSON is YAML
        return f"--include_path={tmp_path}"
    return write


# ----------------------------------------------------------------------------------------------
# Text

def test_logits_and_log_sum_exp_are_fp32_whatever_the_model_runs_in():
    model = make_model("mamba_h", torch.float32)
    hidden = torch.randn(40, 16, generator=torch.Generator().manual_seed(8)).bfloat16()
    target = torch.arange(40) % 22
    exact = (hidden.double() @ model.head.weight[:-1].double().T).log_softmax(-1)
    with torch.autocast("cpu", torch.bfloat16):
        nats, hits = masked_cross_entropy(model, hidden, target, max_logits=100)
    torch.testing.assert_close(nats, -exact[torch.arange(40), target].detach(), rtol=1e-5, atol=1e-5)
    assert torch.equal(hits, exact.argmax(-1) == target) and hits.any() and not hits.all()


def test_each_checkpoint_and_text_is_a_line_and_everything_one_line_of_json(corpus, checkpoints, tmp_path):
    out = tmp_path / "new" / "eval.json"
    names = f"{checkpoints[0]},{os.path.dirname(checkpoints[1])}"
    status, printed, _ = script("eval.py", f"--checkpoint={names}", f"--data={corpus}", "--mc=2", "--stratified",
                                f"--out={out}", "--sequences=20", "--seed=5", "--device=cpu")
    assert status == 0
    *lines, last = printed.splitlines()
    record = json.loads(last)
    assert record == json.loads(out.read_text()) and record["settings"]["mc"] == 2
    found, x = [r["text"][corpus] for r in record["results"]], TokenData(corpus, "val").sequences(32, 20)
    for r, text, path, line in zip(record["results"], found, checkpoints, [line for line in lines if corpus in line]):
        assert r["checkpoint"] == path and r["trained"]["learning_rate"] == 4e-3
        assert f"perplexity {text['ppl']:.2f} +- {text['ppl_se']:.2f}" in line
        sums = sums_of(open_checkpoint(path, "cpu")[0], x, seed=5, mc=2, stratified=True)
        assert text["nats"] == pytest.approx(sums[..., 0].mean(1), abs=1e-3)
        assert text["sha256"] == hashlib.sha256(x.numpy()).hexdigest()
        assert len(text["nats"]) == 20 and text["tokens"] == 20 * 32 >= text["bytes"] > 0
    one = eval_record(f"--checkpoint={checkpoints[0]}", "--sequences=1", "--seq_len=16")["results"][0]["text"]
    # By default the text is that of the training. There is no error of one sequence.
    assert [one[corpus][name] for name in ("samples", "tokens", "nelbo_se")] == [1, 16, None]


def test_by_default_256_sequences_are_scored_or_4096_tokens_of_decoders(corpus, monkeypatch):
    module, model = module_of("eval"), make_model("mamba_h")                   # its sequences have 32 tokens
    monkeypatch.setattr(module, "TokenData", lambda folder, split, name: TokenData(folder, "train", name))
    for decoders, n in (([], 256), (["random"], 128)):
        module.decoders = decoders
        assert len(module.windows_of(model, BYTES, corpus)[0]) == n


def test_the_validation_of_a_run_is_the_evaluation_of_as_many_sequences_and_samples(trained):
    text, = eval_record(f"--checkpoint={trained}", "--sequences=4", "--mc=2")["results"][0]["text"].values()
    assert text["nelbo"] == pytest.approx(read_log(f"{trained}/log.jsonl")[-1]["val_loss"], abs=1e-5)
    assert text["nelbo"] == pytest.approx(2.72390, abs=1e-4), "weight decay changes it by 0.0015"


# ----------------------------------------------------------------------------------------------
# Question sets

def test_context_and_answer_are_encoded_as_one_string_and_cut_on_the_left():
    encode = lambda *texts, size=99: encode_question(BYTES, texts, size)
    pairs, _ = encode(("ab ", " c"), ("ab ", " "), ("so Ann", " won."))
    assert [(bytes(c), bytes(a)) for c, a in pairs] == [(b"ab", b"  c"), (b"ab", b"  "), (b"so Ann", b" won.")]
    row = [("0123456789", " a"), ("0123456789", " bcd")]
    pairs, cut = encode(*row, size=7)
    assert [(bytes(c), bytes(a)) for c, a in pairs] == [(b"789", b" a"), (b"789", b" bcd")] and cut == 7
    assert encode(*row, size=2)[0][1] == ([], list(b" bcd"))        # answers stay whole
    with pytest.raises(UserError, match="the answer '' after 'a' has no token of its own"):
        encode(("a", ""))


@with_harness
@pytest.mark.parametrize("which", [0, 1])
def test_the_harness_gets_the_scores_and_decodings_of_the_definition(checkpoints, task, which):
    """Of three choices the likeliest; and answers that are the model's own decodings, or differ from them in a byte."""
    model = open_checkpoint(checkpoints[which], "cpu")[0]
    printable = torch.tensor([chr(i).isascii() and chr(i).isprintable() for i in range(258)])
    model.head.weight.data[~printable] = 0              # its most probable byte is then printable
    save_checkpoint(checkpoints[which], model, step=0, tokenizer="bytes", settings={})
    rows, right, own = [], 0, []
    for n in range(1, 40, 2):
        rows.append(dict(context="x" * n, choices=[" b" * (n % 3 + 1), " cd", " "], label=n % 3))
        pairs, _ = encode_question(BYTES, [("x" * n, choice) for choice in rows[-1]["choices"]], 32)
        right += score_pairs(model, pairs, 999, one_rank())[0].argmax() == n % 3
        target = bytes(decoded(model, list(f"def f{n}(x".encode()), 1 + n % 5)).decode()
        own.append(dict(context=f"def f{n}(x", target=target))
    changed = [dict(row, target=chr(ord(row["target"][0]) ^ 1) + row["target"][1:]) for row in own]
    flags = [f"--checkpoint={checkpoints[which]}", task("made_up", CHOICES, rows), task("own", LAMBADA, own),
             task("changed", LAMBADA, changed), "--tasks=made_up,own,changed"]
    status, printed, error = script("eval.py", "--device=cpu", *flags)
    assert status == 0, error
    assert "6 of 60 questions were cut on the left, to fit 32 tokens" in printed and "Chance: hellaswag" in printed
    found = json.loads(printed.splitlines()[-1])["results"][0]["tasks"]
    assert [found[name]["acc,none"] for name in ("made_up", "own", "changed")] == [right / 20, 1, 0]


# ----------------------------------------------------------------------------------------------
# What is refused

@with_harness
@pytest.mark.parametrize("kind, message", [
    (dict(output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="a"), "likelihood of whole texts"),
    (dict(output_type="generate_until", doc_to_target="a"), "only scores given answers")])
def test_what_the_adapter_cannot_do_is_a_sentence(checkpoints, task, kind, message):
    where = task("other", kind, [dict(context="some text")])
    status, _, error = script("eval.py", "--device=cpu", f"--checkpoint={checkpoints[0]}", where, "--tasks=other")
    assert status == 1 and message in error.splitlines()[-1]


def test_likelihoods_are_added_in_fp64_and_refused_if_they_are_not_finite():
    assert sum_over_ranks(Parallel("cpu"), np.array([2.0 ** 24 + 1])) == 2 ** 24 + 1
    with pytest.raises(UserError, match="training failed"):
        sum_over_ranks(types.SimpleNamespace(sum=lambda x: x), np.array([1.0, np.nan]))
