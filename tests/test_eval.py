"""Evaluation: likelihoods known exactly, invariance to batches and ranks, question sets, bad input."""
import importlib.util
import itertools
import json
import math
import os
import types

import numpy as np
import pytest
import torch

import eval as evaluation
from conftest import ARCHITECTURES, BLOCK_MODELS, make_model
from configurator import ConfigError, configure
from data import DataError, get_tokenizer, prepare_stdlib
from eval import (PAPER, answer_parts, credit, encode_choices, load_questions, nelbo_counts, nelbo_figures,
                  ratio, score_answers, sequence_nelbo, task_figures, text_figures)
from model import PAPER_PARAMS, BlockDiffusionLM, ModelConfig, ModelError, config_from_file, save_checkpoint
from train import noise_generators

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), ".."))
all_models = pytest.mark.parametrize("name", ARCHITECTURES)
block_models = pytest.mark.parametrize("name", BLOCK_MODELS)


def ranks(rank=0, world=1):
    """One rank of several that never meet: its sums are its own share."""
    return types.SimpleNamespace(rank=rank, world=world, device=torch.device("cpu"), sum=lambda x: x)


def counts_of(model, x, seed=0, mc=1, stratified=False, batch_size=500, rank=0, world=1):
    return nelbo_counts(model, x, ranks(rank, world), torch.no_grad, seed, mc, stratified, batch_size)


def figures_of(model, x, **settings):
    size = np.full(len(x), x.size(1))
    return nelbo_figures(counts_of(model, x, **settings), size, size)


def scores_of(model, questions, rule="pll", seed=0, mc=1, budget=4096, rank=0, world=1):
    return score_answers(model, questions, ranks(rank, world), rule, seed, mc, budget)


@torch.no_grad()
def chain_rule(model, x, known=0):
    """-log p (b,) of tokens `known`.. of x under a model of block length 1, a token at a time."""
    cache, nll = model.new_cache(len(x), x.size(1)), 0
    for i in range(x.size(1)):
        mask = torch.full((len(x), 1), model.config.mask_id)
        logits = model.denoise(mask, cache, torch.ones(len(x)))[:, 0]
        nll = nll - logits.log_softmax(-1).gather(1, x[:, i:i + 1])[:, 0] * (i >= known)
        model.commit(x[:, i:i + 1], cache)
    return nll


def mask_weights(m):
    """All masks (2^m - 1, m) of m tokens but the empty one, and for each the mean of
    (1/t) t^|mask| (1 - t)^(m - |mask|) over t ~ U(1e-3, 1), by quadrature exact for polynomials."""
    at, w = np.polynomial.legendre.leggauss(16)
    t = 1e-3 + (1 - 1e-3) * (at[:, None] + 1) / 2
    masks = np.array(list(itertools.product([False, True], repeat=m)))[1:]
    n = masks.sum(1)
    return torch.from_numpy(masks), torch.from_numpy((w[:, None] / 2 * t ** (n - 1) * (1 - t) ** (m - n)).sum(0))


@torch.no_grad()
def exact_bound(model, x, known=0):
    """The NELBO in nats of tokens `known`.. of x (s,) given those before, every mask enumerated."""
    c, total = model.config, 0.0
    l = len(x) if c.full_sequence else c.block_len
    for start in range(known // l * l, len(x), l):
        free = torch.arange(max(known, start) - start, min(len(x) - start, l))
        masks, weight = mask_weights(len(free))
        target = x[start + free].expand(masks.shape)                           # (masks, m)
        xt = torch.full((len(masks), l), c.mask_id)
        xt[:, :len(x) - start] = x[start:start + l]
        xt[:, free] = target.masked_fill(masks, c.mask_id)
        cache = model.new_cache(len(masks), start, l)
        model.prefill(x[:start].expand(len(masks), -1), cache)
        log_p = model.denoise(xt, cache, (xt == c.mask_id).double().mean(1))[:, free].log_softmax(-1)
        ce = -log_p.gather(2, target[..., None])[..., 0]
        total += float((weight * (ce * masks).sum(1)).sum())
    return total


# -- exact likelihoods ---------------------------------------------------------------------------

@block_models
def test_with_block_length_1_the_nelbo_at_t_1_is_the_exact_autoregressive_likelihood(name):
    model = make_model(name, vocab_size=4, seq_len=4, block_len=1)
    x = torch.tensor(list(itertools.product(range(3), repeat=4)))              # all 81 sequences
    nats = sequence_nelbo(model, x, torch.ones_like(x, dtype=torch.bool), torch.ones(81, 4))[:, 0]
    torch.testing.assert_close(nats, chain_rule(model, x))
    assert float(torch.exp(-nats).sum()) == pytest.approx(1)
    assert nats.std() > 0.1, "the model must tell the sequences apart"


@block_models
def test_with_block_length_1_both_scores_of_an_answer_are_its_exact_likelihood(name):
    model = make_model(name, seq_len=8, block_len=1)
    x = torch.randint(0, 22, (2, 6), generator=torch.Generator().manual_seed(0))
    questions = [[(row[:4], row[4:])] for row in x.tolist()]
    exact = chain_rule(model, x, known=4).numpy()
    np.testing.assert_allclose(scores_of(model, questions)[:, 0], exact)
    nats = scores_of(model, questions * 100, "nelbo", mc=4).reshape(100, 2)
    assert (abs(nats.mean(0) - exact) < 3 * nats.std(0, ddof=1) / 10).all()


@all_models
def test_the_estimate_agrees_with_the_exact_bound_within_three_standard_errors(name):
    """Eight tokens in blocks of 4, or in one of 8: every mask enumerated, t integrated."""
    block_len = 8 if ARCHITECTURES[name][1] == 32 else 4
    model = make_model(name, seq_len=8, block_len=block_len)
    x = torch.randint(0, 22, (8,), generator=torch.Generator().manual_seed(1))
    exact = exact_bound(model, x) / 8
    for settings in (dict(mc=1), dict(mc=4, stratified=True)):
        f = figures_of(model, x.repeat(600 // settings["mc"], 1), **settings)
        assert abs(f["nelbo"] - exact) < 3 * f["nelbo_se"]
        assert f["nelbo_se"] < 0.1 * exact, "or the line above would prove nothing"


class ToyModel:
    """The exact denoiser of a known distribution over three tokens; its hidden states are logits."""

    def __init__(self, joint):
        self.joint = joint                                                     # (3, 3, 3)
        self.config = types.SimpleNamespace(mask_id=3)
        self.head = types.SimpleNamespace(weight=torch.eye(4, dtype=torch.float64))

    def block_len_for(self, s):
        return s

    def all_block_hidden(self, x0, xt, t):
        out = torch.full((len(xt), 3, 4), -1e9, dtype=torch.float64)
        for row, logits in zip(xt.tolist(), out):
            seen = self.joint[tuple(slice(None) if v == 3 else slice(v, v + 1) for v in row)]
            for i in range(3):
                p = seen.sum([j for j in range(3) if j != i]).log()
                logits[i, :3] = p if row[i] == 3 else 0
        return out


def test_the_bound_of_the_exact_denoiser_is_the_entropy_of_its_distribution():
    joint = torch.rand(3, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 3
    joint /= joint.sum()
    draws = torch.multinomial(joint.flatten(), 1500, True, generator=torch.Generator().manual_seed(1))
    x = torch.stack([draws // 9, draws // 3 % 3, draws % 3], 1)
    exact = -joint[x[:, 0], x[:, 1], x[:, 2]].log().sum() / x.numel()          # nats per token
    f = figures_of(ToyModel(joint), x, mc=2, stratified=True)
    assert abs(f["nelbo"] - exact) < 3 * f["nelbo_se_noise"] < 0.1
    best = joint.sum((1, 2)).max()                                             # a sane range for accuracy
    assert 100 / 3 < f["acc"] < 100 and best < 1


# -- noise, errors -------------------------------------------------------------------------------

@all_models
def test_the_number_does_not_depend_on_batch_size_rank_count_or_later_samples(name):
    model = make_model(name)
    x = torch.randint(0, 22, (6, 32), generator=torch.Generator().manual_seed(2))
    whole = counts_of(model, x, mc=2)
    np.testing.assert_allclose(counts_of(model, x, mc=2, batch_size=1), whole)
    shares = [counts_of(model, x, mc=2, batch_size=2, rank=r, world=3) for r in range(3)]
    np.testing.assert_allclose(sum(shares), whole)
    assert not any((shares[0] * shares[1]).ravel())
    np.testing.assert_allclose(counts_of(model, x[:4]), whole[:4, :1])
    assert abs(counts_of(model, x, seed=1) - whole[:, :1])[..., 0].min() > 0
    assert abs(whole[:, 0] - whole[:, 1])[..., 0].min() > 0


@all_models
def test_evaluation_draws_the_noise_that_training_draws_and_stratified_t_stay_in_their_strata(name):
    model = make_model(name)
    x = torch.zeros(3, 32, dtype=torch.long)
    for ours, theirs in zip(evaluation.draw_noise(model, x, noise_generators(5, range(3))),
                            model.draw_noise(x, noise_generators(5, range(3)))):
        assert torch.equal(ours, theirs)
    for j in range(4):
        t, _ = evaluation.draw_noise(model, x, noise_generators(5, range(3)), j, 4)
        low = (t - 1e-3) / (1 - 1e-3)
        assert (low >= j / 4 - 1e-6).all() and (low <= (j + 1) / 4).all()


def test_other_seeds_differ_by_about_the_stated_noise_error():
    model = make_model("bdlm_attention")
    x = torch.randint(0, 22, (8, 32), generator=torch.Generator().manual_seed(3))
    runs = [figures_of(model, x, seed=seed, mc=2) for seed in range(16)]
    spread = np.std([f["nelbo"] for f in runs], ddof=1)
    assert 0.5 < spread / np.mean([f["nelbo_se_noise"] for f in runs]) < 2
    assert all(f["nelbo_se"] > 0 and f["acc_se"] > 0 and f["bpb_se"] > 0 for f in runs)


def test_a_ratio_and_its_standard_error():
    value, se = ratio(np.array([1., 2., 3., 6.]), np.ones(4))
    assert value == 3 and se == pytest.approx(np.std([1, 2, 3, 6], ddof=1) / 2)
    value, se = ratio(np.array([2., 4., 6.]), np.array([1., 2., 3.]))          # no spread in the ratio
    assert value == 2 and se == 0
    assert math.isnan(ratio(np.array([1.]), np.array([2.]))[1])


def test_a_uniform_predictor_scores_the_logarithm_of_the_vocabulary():
    model = make_model("mamba_h")
    torch.nn.init.zeros_(model.head.weight)
    x = torch.randint(0, 22, (200, 32), generator=torch.Generator().manual_seed(4))
    f = figures_of(model, x)
    assert abs(f["nelbo"] - math.log(22)) < 3 * f["nelbo_se"] < 0.3
    assert f["bpb"] == pytest.approx(f["nelbo"] / math.log(2)) and f["ppl"] == math.exp(f["nelbo"])
    torch.nn.init.constant_(model.head.weight, math.nan)
    with pytest.raises(ModelError, match="training failed"):
        evaluation.gather(ranks(), counts_of(model, x[:2]))


# -- answers -------------------------------------------------------------------------------------

def make_questions(seed=6):
    """Contexts of 0 to 27 tokens before answers of 1 to 13: inside a block and over three."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(0, 22, (n,), generator=g).tolist()
    return [[(context, draw(m)) for m in lengths] for context, lengths in (
        (draw(0), (1, 3)), (draw(3), (4, 4, 5)), (draw(8), (1, 1)), (draw(19), (1, 7, 13)), (draw(27), (2, 5)))]


@torch.no_grad()
def pll_without_cache(model, context, answer):
    """The definition: for each answer token, all text up to its block's end in all_block_logits."""
    c, n, whole, total = model.config, len(context), [*context, *answer], 0.0
    l = len(whole) if c.full_sequence else c.block_len
    for i in range(n, len(whole)):
        end = i // l * l + l
        x = torch.tensor([(whole + [c.mask_id] * l)[:end]])
        x[0, i] = c.mask_id
        t = (x.view(-1, l) == c.mask_id).double().mean(1)[None]
        total -= float(model.all_block_logits(x, x, t)[0, i].log_softmax(-1)[whole[i]])
    return total


@all_models
@pytest.mark.parametrize("time_conditioning", [False, True])
def test_scoring_from_the_cache_equals_scoring_without_it(name, time_conditioning):
    model = make_model(name, time_conditioning=time_conditioning)
    questions = make_questions()
    nll = scores_of(model, questions)
    for row, choices in zip(nll, questions):
        exact = [pll_without_cache(model, *choice) for choice in choices]
        np.testing.assert_allclose(row[:len(choices)], exact, rtol=1e-9)
        assert not row[len(choices):].any()


@all_models
@pytest.mark.parametrize("rule", ["pll", "nelbo"])
def test_scores_do_not_depend_on_batches_or_ranks_and_equal_choices_get_equal_noise(name, rule):
    model, questions = make_model(name), make_questions()
    questions[0] = [questions[0][1]] * 2
    whole = scores_of(model, questions, rule, mc=3)
    np.testing.assert_allclose(scores_of(model, questions, rule, mc=3, budget=1), whole)
    np.testing.assert_allclose(sum(scores_of(model, questions, rule, mc=3, rank=r, world=2) for r in (0, 1)),
                               whole)
    assert whole[0, 0] == pytest.approx(whole[0, 1]) and whole[0, 0] != 0


@all_models
def test_the_nelbo_of_an_answer_agrees_with_its_exact_bound(name):
    """An answer of 4 tokens, two of them in a second block of 8."""
    model = make_model(name)
    x = torch.randint(0, 22, (18,), generator=torch.Generator().manual_seed(7))
    question = [(x[:14].tolist(), x[14:].tolist())]
    nats = scores_of(model, [question] * 300, "nelbo", mc=2)[:, 0]
    value, se = ratio(nats, np.ones(300))
    assert abs(value - exact_bound(model, x, known=14)) < 3 * se < 0.15 * value


@block_models
def test_a_context_is_read_once_for_all_choices_of_a_question(name, monkeypatch):
    model, read = make_model(name), []
    prefill = model.prefill
    monkeypatch.setattr(model, "prefill", lambda x, cache: (read.append(x.numel()), prefill(x, cache)))
    context = list(range(19))
    scores_of(model, [[(context, [1, 2, 3]), (context, [4]), (context, [5, 6])]], budget=24)
    assert sum(read) == 16                              # two whole blocks of 8; the rest is active


@all_models
def test_parts_cover_an_answer_once_and_only_whole_blocks_are_prefix(name):
    config = make_model(name).config
    for context, answer in itertools.chain(*make_questions()):
        parts = answer_parts(config, (0, 0), context, answer)
        seen = [token for part in parts for token in part.tokens[part.first:]]
        assert seen == answer
        for part in parts:
            assert part.at == len(part.prefix) + part.first - len(context)
            assert len(part.prefix) % config.block_len == 0 and len(part.tokens) - part.first > 0
            assert config.full_sequence == (len(part.tokens) == len(context) + len(answer)) or not part.prefix


# -- question sets -------------------------------------------------------------------------------

BYTES = get_tokenizer("bytes")


def make_rows(contexts, choices, gold):
    return [dict(task="arc_easy", id=str(i), context=c, choices=[" " + x for x in xs], gold=g)
            for i, (c, xs, g) in enumerate(zip(contexts, choices, gold))]


def write_rows(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_accuracy_its_normalisation_ties_and_baselines(tmp_path):
    rows = make_rows(["q"] * 4, [["aa", "bbbb"], ["aa", "bb", "cc"], ["a", "b"], ["a", "b"]], [1, 0, 1, 1])
    rows = load_questions(write_rows(tmp_path / "arc_easy.jsonl", rows), BYTES, 99)
    nll = np.array([[2., 3., 0], [1., 2., 3.], [1., 1., 0], [5., 4., 0]])
    f = task_figures(rows, nll)
    assert f["acc"] == 100 * (0 + 1 + 0.5 + 1) / 4
    assert f["acc_norm"] == 100 * (1 + 1 + 0.5 + 1) / 4  # 3 nats over 4 characters beat 2 over 2
    assert task_figures(rows, nll, normalise=False)["acc_norm"] == f["acc"]
    assert f["chance"] == pytest.approx(100 * (0.5 + 1 / 3 + 0.5 + 0.5) / 4)
    assert f["majority"] == 75
    assert f["uniform"] == pytest.approx(100 * (0 + 1 / 3 + 0.5 + 0.5) / 4)
    assert f["acc_se"] == pytest.approx(100 * np.std([0, 1, 0.5, 1], ddof=1) / 2)
    assert credit(np.array([[1., 1, -np.inf]]), np.array([0]))[0] == 0.5


def test_a_uniform_model_scores_chance_within_its_error(tmp_path):
    """Questions of 2 to 5 choices of one length: nothing but the gold answer can be right."""
    g = np.random.default_rng(0)
    counts = g.integers(2, 6, 200)
    rows = make_rows(["q"] * 200, [[f"{g.integers(10, 99)}" for _ in range(n)] for n in counts],
                     [int(g.integers(n)) for n in counts])
    rows = load_questions(write_rows(tmp_path / "arc_easy.jsonl", rows), BYTES, 64)
    model = make_model("mamba_h", torch.float32, vocab_size=258)
    exactly = task_figures(rows, scores_of(uniform(model), [row["pairs"] for row in rows]))
    assert exactly["acc"] == pytest.approx(exactly["uniform"]) == pytest.approx(exactly["chance"])
    random = make_model("mamba_h", torch.float32, vocab_size=258)
    f = task_figures(rows, scores_of(random, [row["pairs"] for row in rows]))
    assert 0 < abs(f["acc"] - f["chance"]) < 3 * f["acc_se"] < 12


def uniform(model):
    torch.nn.init.zeros_(model.head.weight)
    return model


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


GOOD = dict(task="piqa", id="1", context="a", choices=[" b", " c"], gold=0)


@pytest.mark.parametrize("rows, message", [
    ([], "no questions"),
    ([GOOD, "{"], ":2: Expecting property name"),
    ([GOOD, dict(GOOD, gold=None)], ":2: no gold answer"),
    ([dict(GOOD, gold=2)], "no gold answer"),
    ([dict(GOOD, gold=True)], "no gold answer"),
    ([dict(GOOD, choices=[" b", "  "])], ":1: not a prepared question with two answers"),
    ([dict(GOOD, choices=[" b"])], "not a prepared question"),
    ([dict(GOOD, contexts=["a"])], "not a prepared question"),
    (["[1]"], "not a prepared question"), ([dict(text="x")], "not a prepared question")])
def test_bad_questions_are_refused_with_their_line(tmp_path, rows, message):
    with pytest.raises(DataError, match=message):
        load_questions(write_rows(tmp_path / "piqa.jsonl", rows), BYTES, 99)


def test_missing_and_misnamed_question_sets_are_refused(tmp_path):
    with pytest.raises(DataError, match="holds no question set: run python data.py mcqa"):
        evaluation.task_paths(tmp_path / "nowhere", [])
    write_rows(tmp_path / "piqa.jsonl", [GOOD])
    assert list(evaluation.task_paths(tmp_path, [])) == ["piqa"]
    with pytest.raises(DataError, match="holds no boolq: run"):
        evaluation.task_paths(tmp_path, ["boolq"])
    with pytest.raises(DataError, match="quiz is no task"):
        evaluation.task_paths(tmp_path, ["quiz"])
    write_rows(tmp_path / "piqa_2.jsonl", [GOOD])
    with pytest.raises(DataError, match="piqa_2 is no task"):
        evaluation.task_paths(tmp_path, [])


def test_figures_of_a_text():
    f = text_figures([1, 2, 1, 2])
    assert f["entropy"] == pytest.approx(math.log(2)) and f["repetition"] == 0.5
    assert (f["distinct_1"], f["distinct_2"], f["distinct_3"]) == (0.5, pytest.approx(2 / 3), 1)
    assert text_figures(list(range(17)) + [0, 1])["repetition"] == 0           # 17 tokens back


# -- the script ----------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    root = tmp_path_factory.mktemp("source")
    for i in range(60):
        (root / f"module_{i}.py").write_text(f"def f{i}(x):\n    return x + {i}\n" * (20 + i % 7))
    out = tmp_path_factory.mktemp("data") / "c4"
    prepare_stdlib(str(out), root=str(root))
    return str(out)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, corpus):
    """Untrained checkpoints of a block model and a full-sequence model on bytes."""
    paths = []
    for name in ("mamba_h", "attention"):
        attn_every, block_len = ARCHITECTURES[name]
        model = BlockDiffusionLM(ModelConfig(
            vocab_size=258, seq_len=32, block_len=block_len, attn_every=attn_every, n_layer=2, n_head=2,
            d_model=32, d_state=8, mamba_head_dim=16, chunk_len=4))
        paths.append(str(tmp_path_factory.mktemp("out") / "ckpt.pt"))
        save_checkpoint(paths[-1], model, step=0, tokenizer="bytes",
                        settings=dict(learning_rate=4e-3, data=corpus))
    return paths


def run(*argv):
    """eval.py's main in this process, with its own globals."""
    spec = importlib.util.spec_from_file_location("eval_under_test", os.path.join(ROOT, "eval.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    configure(vars(module), ["--device=cpu", *argv])
    module.main()


def test_everything_of_two_checkpoints_comes_as_tables_and_one_json_line(corpus, checkpoints, tmp_path, capsys):
    write_rows(tmp_path / "boolq.jsonl", [dict(GOOD, gold=i % 2) for i in range(8)])
    run(f"--checkpoint={checkpoints[0]},{os.path.dirname(checkpoints[1])}", f"--data={corpus}",
        f"--mcqa={tmp_path}", "--generate=3", "--prompt_len=9", "--length=20", f"--judge={checkpoints[1]}",
        "--mc=2", f"--out={tmp_path / 'eval.json'}", "--sequences=40")
    lines = capsys.readouterr().out.strip().splitlines()
    record = json.loads(lines[-1])
    assert record == json.loads((tmp_path / "eval.json").read_text())
    assert record["protocol"]["seed"] == 1337 and record["protocol"]["samples"] == 2
    assert record["hardware"]["torch"] and all(len(r["sha256"]) == 64 for r in record["results"])
    for r, kind in zip(record["results"], ("mamba_h", "attention")):
        text, made = r["text"][corpus], r["generate"]
        assert r["model"] == kind and text["sequences"] == 40 and text["tokens"] == 40 * 32
        assert 0 < text["bytes"] <= text["tokens"] and text["documents"] >= 1
        assert abs(text["nelbo"] - math.log(257)) < 4 * text["nelbo_se"]
        assert r["mcqa"]["macro"]["acc"] == r["mcqa"]["boolq"]["chance"] == 50
        assert made["generated"]["texts"] == made["validation"]["texts"] == 3
        assert made["generated"]["distinct_2"] > made["validation"]["distinct_2"]
        assert made["generated"]["nelbo"] > 0 and made["validation"]["nelbo_se"] > 0
    head = next(line for line in lines if line.startswith("model "))
    assert "c4 PPL" in head and head.count("paper") == 1 + 3 + 1


def test_what_is_not_asked_for_is_not_done(checkpoints, tmp_path, capsys):
    run(f"--checkpoint={checkpoints[0]}", "--sequences=2")
    result = json.loads(capsys.readouterr().out.splitlines()[-1])["results"][0]
    assert len(result["text"]) == 1 and "mcqa" not in result and "generate" not in result
    write_rows(tmp_path / "piqa.jsonl", [GOOD, GOOD])
    run(f"--checkpoint={checkpoints[0]}", f"--mcqa={tmp_path}", "--limit=1", "--score=nelbo")
    result = json.loads(capsys.readouterr().out.splitlines()[-1])["results"][0]
    assert not result["text"] and result["mcqa"]["piqa"]["questions"] == 1
    assert result["mcqa"]["piqa"]["acc_se"] is None     # of one question there is no error to state


def test_settings_and_checkpoints_that_cannot_work_are_refused(corpus, checkpoints, tmp_path):
    for argv, error, message in (
            (["--score=best"], ConfigError, "one of pll, nelbo"), (["--mc=0"], ConfigError, "mc is 0"),
            ([f"--checkpoint={tmp_path}"], ModelError, "no checkpoint"),
            ([f"--checkpoint={checkpoints[0]}", "--seq_len=33"], ModelError, "not whole blocks"),
            ([f"--checkpoint={checkpoints[0]}", f"--mcqa={tmp_path}"], DataError, "no question set")):
        with pytest.raises(error, match=message):
            run(*argv)
    model = BlockDiffusionLM(ModelConfig(vocab_size=300, seq_len=32, block_len=8, n_layer=1, n_head=2,
                                         d_model=32, d_state=8, mamba_head_dim=16))
    other = str(tmp_path / "other.pt")
    save_checkpoint(other, model, tokenizer="bytes")
    with pytest.raises(ModelError, match="300 token ids, not those of its tokenizer, bytes"):
        run(f"--checkpoint={other}")
    meta = json.loads(open(os.path.join(corpus, "meta.json")).read())
    folder = tmp_path / "gpt2"
    folder.mkdir()
    (folder / "meta.json").write_text(json.dumps(dict(meta, tokenizer="gpt2")))
    with pytest.raises(DataError, match="holds gpt2 tokens, not bytes tokens"):
        run(f"--checkpoint={checkpoints[0]}", f"--data={folder}")


@pytest.mark.parametrize("name", PAPER)
def test_a_model_is_recognised_as_the_papers_by_its_shape(name):
    assert name in PAPER_PARAMS and len(PAPER[name]) == 8
    with torch.device("meta"):
        model = BlockDiffusionLM(config_from_file(os.path.join(ROOT, "config", f"{name}.py")))
    assert evaluation.paper_name(model) == name
