"""Questions, figures and tables of eval.py. What cannot be evaluated is refused in a sentence, and what was evaluated
before a crash is kept."""
import hashlib
import json
import math
import os
import re
import types

import numpy as np
import pytest
import torch

import eval as evaluation
from checkpoint import save_checkpoint
from configurator import UserError, configure
from conftest import QUESTION, all_models, eval_record, make_model, module_of, script, write_rows
from data import TASKS, TokenData, encode_choices, get_tokenizer, load_questions, noise_generators, task_paths
from nelbo import masked_cross_entropy, sequence_nelbo
from test_eval import sums_of
from tools import prepare

BYTES = get_tokenizer("bytes")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, corpus):
    """Checkpoints of a block model and a full-sequence model of bytes. Both know nothing."""
    paths = []
    for name in ("mamba_h", "attention"):
        model = make_model(name, torch.float32, vocab_size=258)
        torch.nn.init.zeros_(model.head.weight)         # all tokens are equally probable
        paths.append(str(tmp_path_factory.mktemp("out") / "ckpt.pt"))
        save_checkpoint(paths[-1], model, step=0, tokenizer="bytes", settings=dict(learning_rate=4e-3, data=corpus))
    return paths


# ----------------------------------------------------------------------------------------------
# Figures and tables

def test_winogrande_scores_the_suffix_that_its_contexts_share(tmp_path):
    row = dict(contexts=["so Ann", "so Bob"], choices=[" won it."] * 2, gold=1)
    (found,) = load_questions(write_rows(tmp_path / "winogrande.jsonl", [row]), BYTES, 64)
    assert [(bytes(c), bytes(a)) for c, a in found["pairs"]] == [(b"so Ann", b" won it."), (b"so Bob", b" won it.")]
    assert found["gold"] == 1


def test_context_and_choice_are_encoded_as_one_string_and_cut_on_the_left():
    pairs, _ = encode_choices(BYTES, ["ab ", "ab "], [" c", " de"], 99)
    assert [(bytes(c), bytes(a)) for c, a in pairs] == [(b"ab", b"  c"), (b"ab", b"  de")]
    row = ["0123456789"] * 2, [" a", " bcd"]
    pairs, cut = encode_choices(BYTES, *row, 7)
    assert [bytes(c) for c, _ in pairs] == [b"789"] * 2 and cut == 7
    assert [bytes(a) for _, a in pairs] == [b" a", b" bcd"]
    assert encode_choices(BYTES, *row, 2)[0][1] == ([], list(b" bcd"))         # answers stay whole
    with pytest.raises(ValueError, match="no tokens"):
        encode_choices(BYTES, ["a"], [""], 9)


@all_models
def test_stratified_noise_levels_stay_in_their_strata(name):
    model, x = make_model(name), torch.zeros(3, 32, dtype=torch.long)
    whole, _ = model.draw_noise(x, noise_generators(5, range(3)))
    sums = sums_of(model, x, seed=5, mc=4, stratified=True)
    for j in range(4):
        t, _ = model.draw_noise(x, noise_generators(5, range(3)), stratum=(j, 4))
        torch.testing.assert_close(t - 1e-3, (whole - 1e-3 + j * (1 - 1e-3)) / 4)
        t, is_masked = model.draw_noise(x, noise_generators(5, [j << 32 | i for i in range(3)]), (j, 4))
        np.testing.assert_allclose(sums[:, j], sequence_nelbo(model, x, is_masked, t))


def test_logits_and_log_sum_exp_are_fp32_whatever_the_model_runs_in():
    model = make_model("mamba_h", torch.float32)
    hidden = torch.randn(40, 16, generator=torch.Generator().manual_seed(8)).bfloat16()
    target = torch.arange(40) % 22
    exact = (hidden.double() @ model.head.weight[:-1].double().T).log_softmax(-1)
    with torch.autocast("cpu", torch.bfloat16):
        nats, hits = masked_cross_entropy(model, hidden, target, max_logits=100)
    torch.testing.assert_close(nats, -exact[torch.arange(40), target].detach(), rtol=1e-5, atol=1e-5)
    assert torch.equal(hits, exact.argmax(-1) == target) and hits.any() and not hits.all()


def test_the_paper_is_beside_a_checkpoint_of_its_shape(capsys):
    text = dict(c4=dict(ppl=60.0, ppl_se=1.0, bpb=1.2, acc=12.0))
    results = [dict(model=name, lr=8e-3, text=text) for name in ("mamba_h_87m", "mamba_h")]
    evaluation.print_paper_table(results)
    head, first, second = capsys.readouterr().out.strip().splitlines()[1:]
    assert first.split() == "mamba_h_87m 0.008 0.008 60.00 +- 1.00 61.59 1.20 1.3 12.00 11.92".split()
    assert second.split() == "mamba_h 0.008 - 60.00 +- 1.00 - 1.20 - 12.00 -".split()
    evaluation.print_paper_table([dict(results[0], checkpoint=path) for path in ("out/a", "out/b")])      # two of one
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[-2:]] == ["out/a", "out/b"]


def test_everything_of_two_checkpoints_comes_as_tables_and_one_json_line(corpus, checkpoints, tmp_path):
    for task in TASKS:
        choices = [" a", " b", " c", " d"][:2 if task in ("piqa", "boolq", "winogrande") else 4]
        write_rows(tmp_path / f"{task}.jsonl",
                   [dict(QUESTION, task=task, choices=choices, gold=i % 2) for i in range(8)])
    status, printed, bars = script(
        "eval.py", f"--checkpoint={checkpoints[0]},{os.path.dirname(checkpoints[1])}", f"--data={corpus}",
        f"--mcqa={tmp_path}", "--mc=2", "--stratified", f"--out={tmp_path / 'eval.json'}", "--sequences=20",
        "--device=cpu")
    assert status == 0
    for bar in ("perplexity", "winogrande"):
        assert re.search(rf"{bar}: +\d+%.*\[\d\d:\d\d<", bars), "no bar with an ETA"
    lines = printed.strip().splitlines()
    record = json.loads(lines[-1])
    assert record == json.loads((tmp_path / "eval.json").read_text())
    wanted = dict(seed=1337, samples=2, stratified=True, score="pll", dtype="float32", logits="float32")
    assert wanted.items() <= record["protocol"].items() and record["ranks"] == 1
    assert {"torch", "python", "name", "device"} <= set(record["hardware"])
    for r, kind, path in zip(record["results"], ("mamba_h", "attention"), checkpoints):
        text = r["text"][corpus]
        assert r["sha256"] == hashlib.sha256(open(path, "rb").read()).hexdigest()
        assert r["model"] == kind and r["tokenizer"] == "bytes"
        assert text["sequences"] == 20 and text["tokens"] == 20 * 32
        assert 0 < text["bytes"] <= text["tokens"] and text["tok_per_s"] > 0
        assert text["sha256"] == hashlib.sha256(TokenData(corpus, "val").sequences(32, 20).numpy()).hexdigest()
        assert abs(text["nelbo"] - math.log(257)) < 3 * text["nelbo_se"]
        assert {f"{key}_se" for key in ("nelbo", "ppl", "bpb", "acc")} <= set(text)
        assert set(r["mcqa"]) == {*TASKS, "macro"} and r["mcqa"]["boolq"]["majority"] == 50
        assert r["mcqa"]["macro"]["acc"] == r["mcqa"]["macro"]["chance"] == 37.5    # the head is zero
    head, ours, _ = lines[-4:-1]
    assert "c4 PPL" in head and "MCQA" in head and len(head) == len(ours)


def test_the_text_of_the_training_is_scored_unless_question_sets_are_asked_for(checkpoints, tmp_path):
    result = eval_record(f"--checkpoint={checkpoints[0]}", "--sequences=2")["results"][0]
    assert len(result["text"]) == 1 and "mcqa" not in result
    write_rows(tmp_path / "piqa.jsonl", [QUESTION, QUESTION])
    result = eval_record(f"--checkpoint={checkpoints[0]}", f"--mcqa={tmp_path}", "--limit=1",
                         "--score=nelbo", "--mc=8")["results"][0]
    assert not result["text"] and result["mcqa"]["piqa"]["questions"] == 1
    assert result["mcqa"]["piqa"]["acc_se"] is None     # of one question there is no error to state


# ----------------------------------------------------------------------------------------------
# Questions and settings that cannot work

@pytest.mark.parametrize("rows, message", [
    ([], "no questions"),
    ([QUESTION, "{"], ":2: Expecting property name"),
    ([QUESTION, dict(QUESTION, gold=None)], ":2: no gold answer"),
    ([dict(QUESTION, gold=2)], "no gold answer"),
    ([dict(QUESTION, gold=True)], "no gold answer"),
    ([QUESTION, dict(QUESTION, choices=[" b", "  "])], ":2: the answer '  ' has no tokens"),
    (["caf\udce9"], ":1: 'utf-8' codec can't decode"),
    (["[" * 100_000], "piqa.jsonl:1: "),                # nested too deep for the reader
    *(([row], "not a prepared question") for row in (
        "[1]", dict(text="x"), dict(QUESTION, choices=[1, 2]), dict(QUESTION, choices=[" b"]),
        dict(QUESTION, contexts=["a"])))])
def test_bad_questions_are_refused_with_their_line(tmp_path, rows, message):
    with pytest.raises(UserError, match=message):
        load_questions(write_rows(tmp_path / "piqa.jsonl", rows), BYTES, 99)


def test_missing_and_misnamed_question_sets_are_refused(tmp_path):
    with pytest.raises(UserError, match="holds no question set: run python data.py mcqa"):
        task_paths(tmp_path / "nowhere", [])
    write_rows(tmp_path / "piqa.jsonl", [QUESTION])
    assert list(task_paths(tmp_path, [])) == ["piqa"]
    with pytest.raises(UserError, match="holds no boolq: run"):
        task_paths(tmp_path, ["boolq"])
    with pytest.raises(UserError, match="quiz is no task"):
        task_paths(tmp_path, ["quiz"])
    write_rows(tmp_path / "piqa_2.jsonl", [QUESTION])
    with pytest.raises(UserError, match="piqa_2 is no task"):
        task_paths(tmp_path, [])


@pytest.mark.parametrize("argv, message", [
    ("--checkpoint={good} --seq_len=33", "whole blocks of block_len 8"),
    ("--checkpoint={good} --seq_len=270336", "rotary capacity of 262144"),
    ("--checkpoint={good},{tmp}/nowhere --out={tmp}/lost.json", "there is no checkpoint at"),
    ("--checkpoint={good},", "names with commas between them"),
    ("--checkpoint=1", "write ./5 for a file named 5"),
    ("--checkpoint=[]", "name a file with --checkpoint"),
    ("--data=5", "data must be names with commas between them, but is [5]"),
    ("--tasks=piqa", "add --mcqa=FOLDER"),
    ("--seed=-5", "seed must be at least 0, but is -5"),
    ("--checkpoint={good} --data={corpus},{tmp}/nowhere", "holds no prepared data: run python data.py"),
    ("--checkpoint={good} --out={tmp}", "which cannot be written; name another file"),
    ("--score=best", "one of pll, nelbo"),
    ("--mcqa={tmp} --score=nelbo", "mc must be at least 8 with score=nelbo, but is 1"),
    ("--mc=0", "mc must be at least 1, but is 0"),
    ("--sequence=3", "did you mean sequences")])
def test_bad_input_is_one_sentence_and_a_non_zero_exit(corpus, checkpoints, tmp_path, argv, message):
    argv = argv.format(good=checkpoints[0], corpus=corpus, tmp=tmp_path).split()
    status, printed, error = script("eval.py", *argv, "--device=cpu")
    assert status == 1 and error.startswith("eval.py: ") and message in error and "\n" not in error
    assert '"eval"' not in printed and "ppl" not in printed                     # it was found before any work


def test_what_was_evaluated_before_a_crash_is_printed_and_written(checkpoints, tmp_path, capsys):
    module = module_of("eval")
    evaluate = module.evaluate

    def crash_on_the_second(path, *rest):
        if path == checkpoints[1]:
            raise KeyboardInterrupt
        return evaluate(path, *rest)
    module.evaluate = crash_on_the_second
    with pytest.raises(KeyboardInterrupt):
        configure(vars(module), [f"--checkpoint={','.join(checkpoints)}", "--sequences=2", "--device=cpu",
                                 f"--out={tmp_path / 'new' / 'eval.json'}"])
        module.main()
    record = json.loads((tmp_path / "new" / "eval.json").read_text())
    assert [r["checkpoint"] for r in record["results"]] == checkpoints[:1]
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == record


def test_likelihoods_that_are_not_finite_are_refused():
    with pytest.raises(UserError, match="training failed"):
        evaluation.gather(types.SimpleNamespace(sum=lambda x: x), np.array([1.0, math.nan]))


def test_all_question_sets_that_can_be_made_are_made_from_the_split_that_is_asked_for(tmp_path):
    rows = dict(piqa=dict(goal="g", sol1="a", sol2="b", label=0), boolq=dict(passage="p", question="q", answer=True),
                arc_challenge=dict(id="1", question="q", answerKey="A",
                                   choices=dict(text=["a", "b"], label=["A", "B"])))
    for task, row in rows.items():
        (tmp_path / "in" / task).mkdir(parents=True)
        (tmp_path / "in" / task / "validation.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match="no test split of arc_challenge: name another with --split "
                                        r"\(it holds validation.jsonl\); the other tasks are made"):
        prepare.prepare_mcqa(tmp_path / "out", local=tmp_path / "in")
    assert sorted(os.listdir(tmp_path / "out")) == ["boolq.jsonl", "meta.json", "piqa.jsonl"]
    status, printed, _ = script("data.py", "mcqa", "--local", tmp_path / "in", "--out", tmp_path / "out", "--split",
                                "validation")
    assert status == 0 and "arc_challenge: 1 questions from allenai/ai2_arc (validation)" in printed
    with pytest.raises(UserError, match="no train split of arc_challenge"):
        prepare.prepare_mcqa(tmp_path / "none", tasks=["arc_challenge"], local=tmp_path / "in", split="train")
    assert not (tmp_path / "none").exists()
    hub = tmp_path / "hub" / "allenai" / "ai2_arc" / "ARC-Challenge" / "test-00000.jsonl"       # the layout of the hub
    hub.parent.mkdir(parents=True)
    hub.write_text(json.dumps(rows["arc_challenge"]) + "\n")
    assert list(prepare.prepare_mcqa(tmp_path / "b", ["arc_challenge"], tmp_path / "hub")["tasks"]) == ["arc_challenge"]


def test_a_limit_draws_questions_by_seed_from_the_whole_task(tmp_path):
    rows = [dict(context=str(i), choices=[" a", " b"], gold=0) for i in range(100)]
    write_rows(tmp_path / "piqa.jsonl", rows)

    def drawn(seed, limit=10):
        questions = load_questions(tmp_path / "piqa.jsonl", BYTES, 99, limit, seed)
        return [int(bytes(q["pairs"][0][0])) for q in questions]
    assert drawn(1) == drawn(1) != drawn(2) and len(set(drawn(1))) == 10 and max(drawn(1)) > 50
    assert drawn(1, 0) == drawn(1, 1000) == list(range(100))
