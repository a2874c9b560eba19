"""tools/harness.py: our models in lm-evaluation-harness give the answers that they give in eval.py."""
import json
import types
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("lm_eval", reason="needs lm_eval: pip install lm_eval==0.4.13")

import eval as evaluation  # noqa: E402
from checkpoint import save_checkpoint  # noqa: E402
from configurator import UserError  # noqa: E402
from conftest import BLOCK_MODELS, make_model  # noqa: E402
from data import load_questions  # noqa: E402
from parallel import Parallel  # noqa: E402
from tools import harness  # noqa: E402

TASK = """
task: made_up
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {path}}}}}
output_type: multiple_choice
validation_split: validation
doc_to_text: "{{{{context}}}}"
doc_to_target: gold
doc_to_choice: "{{{{choices}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


@pytest.fixture(params=[*BLOCK_MODELS, "diffumamba_h"])
def folder(request, tmp_path, monkeypatch):
    """A checkpoint of a random model of bytes, a prepared question set, and a task file for the same questions."""
    model = make_model(request.param, torch.float32, vocab_size=258, seq_len=64, block_len=64 if "diff" in
                       request.param else 8)
    save_checkpoint(tmp_path / "ckpt.pt", model, step=0, tokenizer="bytes", settings={})
    rows = [dict(task="made_up", id=str(i), context=f"Question: {'what? ' * (i % 13)}\nAnswer:", gold=i % 2,
                 choices=[f" {'yes ' * (i % 3 + 1)}", f" no{i}"]) for i in range(20)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "made_up.jsonl").write_text(text)
    (tmp_path / "made_up.yaml").write_text(TASK.format(path=tmp_path / "made_up.jsonl"))
    for name, value in dict(checkpoint=str(tmp_path), tasks=["made_up"], include_path=str(tmp_path), limit=0,
                            device="cpu", out=str(tmp_path / "out.json")).items():
        monkeypatch.setattr(harness, name, value)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.parametrize("score", ["pll", "nelbo"])
def test_answers_in_the_harness_are_those_of_eval(folder, monkeypatch, score):
    monkeypatch.setattr(harness, "score", score)
    harness.main()
    answers = json.loads((folder / "out.json").read_text())["answers"]["made_up"]
    model, tokenizer, _ = evaluation.open_checkpoint(str(folder), "cpu")
    questions = load_questions(Path(folder / "made_up.jsonl"), tokenizer, 64)
    cost = evaluation.score_answers(model, [q["pairs"] for q in questions], Parallel("cpu", 60), score,
                                   harness.seed, harness.mc, 8 * 64)
    assert len(answers) == 20
    for answer in answers:
        costs, gold = cost[answer["question"]], questions[answer["question"]]["gold"]
        np.testing.assert_allclose(answer["log_p"], -costs, rtol=1e-5)
        assert answer["acc"] == float(costs.argmin() == gold)


def wanted(task="made_up", context="def f", **settings):
    """A request for text."""
    return types.SimpleNamespace(task_name=task, args=(context, dict(until=[], max_gen_toks=24) | settings))


def test_text_ends_before_the_string_that_the_task_asks_for(folder):
    model = harness.NanoBDLM(str(folder))

    def generate(until):
        return model.generate_until([wanted(until=until)])[0]
    whole = generate([])
    stop = whole[len(whole) // 2]
    assert generate([stop]) == generate(stop) == generate(["", stop]) == whole.partition(stop)[0]


def test_generated_text_obeys_the_settings_of_its_task_and_not_the_tasks_beside_it(folder):
    model, sampled = harness.NanoBDLM(str(folder)), dict(do_sample=True, temperature=1.0)
    greedy, free, one = model.generate_until([wanted("greedy"), wanted("free", **sampled),
                                              wanted("one", top_k=1, **sampled)])
    assert greedy == one != free == model.generate_until([wanted("free", temperature=1.0)])[0]
    first, second = model.generate_until([wanted("free", **sampled)] * 2)
    assert first == free != second
    assert len(model.generate_until([wanted(max_gen_toks=None, max_new_tokens=3)])[0]) <= 3
    for settings, message in ((dict(num_beams=2), "sets num_beams, which is no setting here"),
                              (dict(max_gen_toks=300_000), "asks for 300000 new tokens, but prompt and answer")):
        with pytest.raises(UserError, match=message):
            model.generate_until([wanted(**settings)])


def test_a_context_that_is_too_long_loses_its_beginning(folder, monkeypatch):
    model, seen = harness.NanoBDLM(str(folder)), []
    generate = harness.sample.generate
    monkeypatch.setattr(harness.sample, "generate", lambda *a, **b: seen.append(a[1][0]) or generate(*a, **b))
    model.generate_until([wanted(context="0123456789" * 10, max_gen_toks=60)])
    text = model.text.decode(seen[0].tolist())
    assert text == ("6789" if model.model.config.full_sequence else "0123456789" * 10)


def test_answers_of_a_task_do_not_depend_on_the_tasks_beside_it(folder, monkeypatch):
    monkeypatch.setattr(harness, "score", "nelbo")
    model = harness.NanoBDLM(str(folder))
    one, two = ([types.SimpleNamespace(task_name=task, doc_id=i, args=(f"{task} {i}:", answer)) for i in range(2)
                 for answer in (" yes", " no")] for task in ("one", "two"))
    assert model.loglikelihood(one + two) == model.loglikelihood(one) + model.loglikelihood(two)


def test_generated_text_does_not_contain_the_end_of_text(folder, monkeypatch):
    model = harness.NanoBDLM(str(folder))
    tokens = [*model.text.encode_ordinary("def f = 1"), model.text.eot_token]
    done = types.SimpleNamespace(tokens=[torch.tensor(tokens)])
    monkeypatch.setattr(harness.sample, "generate", lambda *_, **__: done)
    assert model.generate_until([wanted()]) == [" = 1"]


def test_what_the_harness_cannot_do_is_a_sentence(folder, monkeypatch):
    with pytest.raises(UserError, match="python eval.py has the NELBO"):
        harness.NanoBDLM(str(folder)).loglikelihood_rolling([])
    monkeypatch.setattr(harness, "tasks", ["no_such_task"])
    with pytest.raises(UserError, match="the harness has no task 'no_such_task'"):
        harness.main()
