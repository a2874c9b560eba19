"""Evaluation: likelihoods known exactly, the same number for every batch size and rank count, question sets."""
import itertools
import json
import math
import types

import numpy as np
import pytest
import torch

from conftest import (ARCHITECTURES, BLOCK_LENGTHS, QUESTION, all_models, block_models, both_times, eval_record,
                      make_model, start_ranks, write_rows)
from data import noise_generators
from eval import nelbo_figures, ratio, score_answers, task_figures
from nelbo import nelbo_sums, sequence_nelbo


def one_rank(rank=0, world=1):
    """Stands for Parallel: one rank that never communicates, so its sums are its own share."""
    return types.SimpleNamespace(rank=rank, world=world, device=torch.device("cpu"), sum=lambda x: x)


def sums_of(model, x, seed=0, mc=1, stratified=False, batch_size=500, rank=0, world=1):
    return nelbo_sums(model, x, one_rank(rank, world), torch.no_grad, seed, mc, stratified, batch_size)


def figures_of(model, x, **settings):
    size = np.full(len(x), x.size(1))
    return nelbo_figures(sums_of(model, x, **settings), size, size)


def scores_of(model, questions, rule="pll", seed=0, mc=1, budget=4096, rank=0, world=1):
    return score_answers(model, questions, one_rank(rank, world), rule, seed, mc, budget)


def mask_weights(m):
    """All masks of m tokens but the empty one, (2^m - 1, m), and the weight of each: the mean of
    (1/t) t^|mask| (1 - t)^(m - |mask|) over t ~ U(1e-3, 1). The quadrature is exact for polynomials."""
    at, w = np.polynomial.legendre.leggauss(16)
    t = 1e-3 + (1 - 1e-3) * (at[:, None] + 1) / 2
    masks = np.array(list(itertools.product([False, True], repeat=m)))[1:]
    n = masks.sum(1)
    return torch.from_numpy(masks), torch.from_numpy((w[:, None] / 2 * t ** (n - 1) * (1 - t) ** (m - n)).sum(0))


@torch.no_grad()
def exact_bound(model, x, known=0):
    """The NELBO in nats of x[known:] given x[:known], for x (s,): every mask is enumerated. With blocks of one token
    this is the chain rule."""
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


# ----------------------------------------------------------------------------------------------
# Exact likelihoods

@block_models
def test_at_block_length_1_the_nelbo_at_t_1_is_the_exact_autoregressive_likelihood(name):
    model = make_model(name, vocab_size=4, seq_len=3, block_len=1)
    x = torch.tensor(list(itertools.product(range(3), repeat=3)))              # all 27 sequences
    nats = sequence_nelbo(model, x, torch.ones_like(x, dtype=torch.bool), torch.ones(27, 3))[:, 0]
    np.testing.assert_allclose(nats, [exact_bound(model, row) for row in x])
    assert float(torch.exp(-nats).sum()) == pytest.approx(1)
    assert nats.std() > 0.1, "the sequences must have different likelihoods"


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
        assert f["nelbo_se"] < 0.1 * exact, "the error must be small, or the line above proves nothing"
        assert f["bpb"] == pytest.approx(f["nelbo"] / math.log(2)) and f["ppl"] == math.exp(f["nelbo"])


# ----------------------------------------------------------------------------------------------
# Noise, errors

@all_models
def test_the_number_does_not_depend_on_batch_size_rank_count_or_later_samples(name):
    model = make_model(name)
    x = torch.randint(0, 22, (6, 32), generator=torch.Generator().manual_seed(2))
    whole = sums_of(model, x, mc=2)
    np.testing.assert_allclose(sums_of(model, x, mc=2, batch_size=1), whole)
    shares = [sums_of(model, x, mc=2, batch_size=2, rank=r, world=3) for r in range(3)]
    np.testing.assert_allclose(sum(shares), whole)
    assert not any((shares[0] * shares[1]).ravel())     # no two ranks have a sequence in common
    np.testing.assert_allclose(sums_of(model, x[:4]), whole[:4, :1])         # fewer sequences, fewer noise samples
    assert abs(sums_of(model, x, seed=1) - whole[:, :1])[..., 0].min() > 0   # another seed is other noise
    assert abs(whole[:, 0] - whole[:, 1])[..., 0].min() > 0                    # and so is another sample


@all_models
def test_the_evaluated_number_is_the_training_objective_for_the_same_noise(name):
    model = make_model(name)
    x = torch.randint(0, 22, (3, 32), generator=torch.Generator().manual_seed(5))
    loss = model(x, noise_generators(5, range(3))).detach()                    # nats per token
    assert sums_of(model, x, seed=5)[..., 0].sum() / x.numel() == pytest.approx(float(loss))


def test_other_seeds_differ_by_about_the_stated_noise_error():
    model = make_model("bdlm_attention")
    x = torch.randint(0, 22, (8, 32), generator=torch.Generator().manual_seed(3))
    runs = [figures_of(model, x, seed=seed, mc=2) for seed in range(16)]
    spread = np.std([f["nelbo"] for f in runs], ddof=1)
    assert 0.5 < spread / np.mean([f["nelbo_se_noise"] for f in runs]) < 2
    assert all(f["nelbo_se"] > 0 and f["acc_se"] > 0 and f["bpb_se"] > 0 for f in runs)


def test_a_ratio_of_sums_comes_with_its_standard_error():
    value, se = ratio(np.array([1., 2., 3., 6.]), np.ones(4))
    assert value == 3 and se == pytest.approx(np.std([1, 2, 3, 6], ddof=1) / 2)
    assert ratio(np.array([2., 4., 6.]), np.array([1., 2., 3.])) == (2, 0)     # no spread in the ratio


# ----------------------------------------------------------------------------------------------
# Answers

def make_questions(seed=6):
    """Contexts of 0 to 27 tokens before answers of 1 to 13 tokens, which lie in one to three blocks of 8."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(0, 22, (n,), generator=g).tolist()
    return [[(context, draw(m)) for m in lengths] for context, lengths in (
        (draw(0), (1, 3)), (draw(3), (4, 4, 5)), (draw(8), (1, 1)), (draw(19), (1, 7, 13)), (draw(27), (2, 5)))]


@torch.no_grad()
def pll_without_cache(model, context, answer):
    """The definition: each answer token is masked alone, in the text up to the end of its block."""
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
@both_times
def test_scoring_from_the_cache_equals_scoring_without_it(name, time_conditioning):
    model = make_model(name, time_conditioning=time_conditioning)
    questions = make_questions()
    cost = scores_of(model, questions)
    for row, choices in zip(cost, questions):
        exact = [pll_without_cache(model, *choice) for choice in choices]
        np.testing.assert_allclose(row[:len(choices)], exact, rtol=1e-9)
        assert not row[len(choices):].any()


@all_models
@pytest.mark.parametrize("rule", ["pll", "nelbo"])
def test_scores_do_not_depend_on_batches_or_ranks_and_equal_choices_get_equal_noise(name, rule):
    model, questions = make_model(name), make_questions()
    questions[0] = [questions[0][1]] * 2
    whole = scores_of(model, questions, rule, mc=3)     # question 0 has two equal choices
    np.testing.assert_allclose(scores_of(model, questions, rule, mc=3, budget=1), whole)
    np.testing.assert_allclose(sum(scores_of(model, questions, rule, mc=3, rank=r, world=2) for r in (0, 1)),
                               whole)
    assert whole[0, 0] == pytest.approx(whole[0, 1]) and whole[0, 0] != 0


@pytest.mark.parametrize("name, block_len", BLOCK_LENGTHS)
def test_the_nelbo_of_an_answer_agrees_with_its_exact_bound(name, block_len):
    """An answer of 4 tokens, two of them in a second block of 8. With blocks of one token both scores are exact."""
    model = make_model(name, block_len=block_len)
    x = torch.randint(0, 22, (18,), generator=torch.Generator().manual_seed(7))
    question, exact = [(x[:14].tolist(), x[14:].tolist())], exact_bound(model, x, known=14)
    nats = scores_of(model, [question] * 300, "nelbo", mc=2)[:, 0]
    value, se = ratio(nats, np.ones(300))
    assert abs(value - exact) < 3 * se < 0.15 * value
    if block_len == 1:
        assert scores_of(model, [question]) == pytest.approx(exact)


# ----------------------------------------------------------------------------------------------
# Question sets

def make_question(lengths, gold):
    """A question whose choices are random tokens, of these lengths."""
    return dict(pairs=[([7], torch.randint(0, 22, (n,)).tolist()) for n in lengths], cut=0, gold=gold)


def test_accuracies_and_baselines_of_questions_with_a_tie():
    questions = [make_question(*q) for q in (((2, 4), 1), ((3, 3, 3), 0), ((2, 2), 1), ((2, 2), 1))]
    cost = np.array([[2., 3., 0], [1., 2., 3.], [1., 1 + 1e-9, 0], [4.0004, 4., 0]])     # only the third ties
    f = task_figures(questions, cost)
    assert f["acc"] == 100 * (0 + 1 + 0.5 + 1) / 4
    assert f["acc_per_token"] == 100 * (1 + 1 + 0.5 + 1) / 4                   # 3 nats / 4 beat 2 / 2
    assert f["chance"] == pytest.approx(100 * (0.5 + 1 / 3 + 0.5 + 0.5) / 4)
    assert f["majority"] == 75
    assert f["uniform"] == pytest.approx(100 * (0 + 1 / 3 + 0.5 + 0.5) / 4)
    assert f["acc_se"] == pytest.approx(100 * np.std([0, 1, 0.5, 1], ddof=1) / 2)


def test_a_uniform_model_scores_chance_per_token_and_its_baseline_in_sums():
    """Questions of 2 to 5 choices. Their lengths are 2 to 7 tokens, then 2, where the baseline is chance as well."""
    g, model = np.random.default_rng(0), make_model("mamba_h", torch.float32)
    torch.nn.init.zeros_(model.head.weight)
    for longest in (7, 2):
        questions = [make_question(g.integers(2, longest + 1, n), g.integers(n)) for n in g.integers(2, 6, 200)]
        f = task_figures(questions, scores_of(model, [q["pairs"] for q in questions]))
        assert f["acc_per_token"] == pytest.approx(f["chance"])
        assert f["acc"] == pytest.approx(f["uniform"])
    assert f["acc"] == pytest.approx(f["chance"])


# ----------------------------------------------------------------------------------------------
# The script

def test_batch_1_batch_8_and_two_processes_give_the_same_figures_to_1e_5(corpus, saved, tmp_path):
    write_rows(tmp_path / "piqa.jsonl", [dict(QUESTION, context="x" * n, choices=[" b" * (n % 3 + 1), " cd"])
                                         for n in range(1, 20)])
    argv = [f"--checkpoint={saved[0]}", f"--data={corpus}", f"--mcqa={tmp_path}", "--sequences=20"]
    processes = start_ranks(tmp_path, 2, "eval.py", "--device=cpu", *argv)
    records = [eval_record(*argv, f"--batch_size={size}") for size in (1, 8)]
    for status, _, error in [process.end() for process in processes]:
        assert status == 0, error
    records.append(json.loads(processes[0].printed()[0].splitlines()[-1]))
    assert [record["ranks"] for record in records] == [1, 1, 2]
    for parts in zip(*((r["text"][corpus], r["mcqa"]["piqa"]) for record in records for r in record["results"])):
        first, *others = ({name: x for name, x in figures.items() if isinstance(x, float) and name not in (
            "seconds", "tok_per_s")} for figures in parts)
        assert len(first) > 7 and all(other == pytest.approx(first, rel=1e-5) for other in others)
    assert 0 < records[0]["results"][0]["mcqa"]["piqa"]["acc"] < 100, "a constant answer would be the same everywhere"
