"""Evaluation: likelihoods known exactly, the same number for every batch size and rank count, scores of answers."""
import itertools
import json
import math
import types

import numpy as np
import pytest
import torch

from conftest import (ARCHITECTURES, BLOCK_MODELS, all_models, block_models, both_times, eval_record, make_model,
                      start_ranks)
from nelbo import noise_generators
from decoders import Sampler
from eval import nelbo_figures, ratio
from nelbo import nelbo_sums, sequence_nelbo
from questions import score_pairs
from sample import generate


def one_rank(rank=0, world=1):
    """Stands for Parallel: one rank that never communicates, so its sums are its own share."""
    return types.SimpleNamespace(rank=rank, world=world, device=torch.device("cpu"), sum=lambda x: x)


def sums_of(model, x, seed=0, mc=1, stratified=False, batch_size=500, rank=0, world=1):
    return nelbo_sums(model, x, one_rank(rank, world), torch.no_grad, seed, mc, stratified, batch_size)


def figures_of(model, x, **settings):
    size = np.full(len(x), x.size(1))
    return nelbo_figures(sums_of(model, x, **settings), size, size)


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

def make_pairs(seed=6):
    """Contexts of 0 to 27 tokens before answers of 1 to 13 tokens, which lie in one to three blocks of 8."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(0, 22, (n,), generator=g).tolist()
    return [(draw(n), draw(m)) for n, m in ((0, 3), (3, 4), (3, 5), (8, 1), (19, 7), (19, 13), (27, 5))]


@torch.no_grad()
def log_p(model, tokens, masked):
    """log p (positions, v) at the masked positions of one block, from the model without a cache: the text goes up to
    the end of that block, and what follows the tokens there is masked."""
    c = model.config
    l = len(tokens) if c.full_sequence else c.block_len
    x = torch.tensor([(tokens + [c.mask_id] * l)[:masked[0] // l * l + l]])
    x[0, masked] = c.mask_id
    t = (x.view(-1, l) == c.mask_id).float().mean(1)[None]
    return model.all_block_logits(x, x, t)[0, masked].log_softmax(-1)


def decoded(model, context, m):
    """The definition of greedy decoding: m tokens after the context, block by block, the most confident token first."""
    c, tokens = model.config, [*context, *[0] * m]
    l = len(tokens) if c.full_sequence else c.block_len
    masked = list(range(len(context), len(tokens)))
    while masked:
        here = [i for i in masked if i // l == masked[0] // l]
        value, token = log_p(model, tokens, here).max(-1)
        best = int(value.argmax())
        tokens[here[best]] = int(token[best])
        masked.remove(here[best])
    return tokens[len(context):]


@all_models
@both_times
def test_a_score_is_the_sum_of_the_log_p_of_tokens_masked_alone(name, time_conditioning):
    model, pairs = make_model(name, time_conditioning=time_conditioning), make_pairs()
    exact = [sum(float(log_p(model, [*context, *answer], [len(context) + i])[0, token])
                 for i, token in enumerate(answer)) for context, answer in pairs]
    whole = score_pairs(model, pairs, 4096, one_rank())
    np.testing.assert_allclose(whole[0], exact, rtol=1e-6)
    np.testing.assert_allclose(score_pairs(model, pairs[2:5], 1, one_rank()), whole[:, 2:5])
    np.testing.assert_allclose(sum(score_pairs(model, pairs, 50, one_rank(r, 2)) for r in (0, 1)), whole)


@block_models
def test_with_blocks_of_one_token_a_score_is_the_exact_likelihood(name):
    model = make_model(name, block_len=1)
    x = torch.randint(0, 22, (18,), generator=torch.Generator().manual_seed(7))
    score, _ = score_pairs(model, [(x[:14].tolist(), x[14:].tolist())], 4096, one_rank())
    assert -score == pytest.approx(exact_bound(model, x, known=14))


@all_models
@both_times
def test_an_answer_is_greedy_if_and_only_if_decoding_gives_it(name, time_conditioning):
    model = make_model(name, time_conditioning=time_conditioning)
    # Without a context, all positions of an attention model are equally confident up to rounding.
    pairs = [(context, decoded(model, context, len(answer))) for context, answer in make_pairs() if context]
    changed = [(context, [*answer[:i], (answer[i] + 1) % 22, *answer[i + 1:]])
               for context, answer in pairs for i in range(len(answer))]
    greedy = score_pairs(model, pairs + changed, 4096, one_rank())[1]
    assert greedy.tolist() == [1.0] * len(pairs) + [0.0] * len(changed)


@all_models
def test_what_sample_py_decodes_at_temperature_0_is_greedy(name):
    """Where the answer ends with a block. Elsewhere sample.py also decodes what follows it in its block."""
    model = make_model(name)
    for n, m in ((3, 5), (3, 13), (8, 8)) if name in BLOCK_MODELS else ((3, 4), (8, 6)):
        context = torch.arange(n)
        sampler = Sampler([0], "confidence", 1, temperature=0, mask_id=model.config.mask_id)
        answer = generate(model, [context], m, sampler).tokens[0][n:]
        assert score_pairs(model, [(context.tolist(), answer.tolist())], 4096, one_rank())[1] == 1


# ----------------------------------------------------------------------------------------------
# The script

def test_batch_1_batch_8_and_two_processes_give_the_same_figures_to_1e_5(corpus, saved, tmp_path):
    argv = [f"--checkpoint={saved[0]}", f"--data={corpus}", "--sequences=20"]
    processes = start_ranks(tmp_path, 2, "eval.py", "--device=cpu", *argv)
    records = [eval_record(*argv, f"--batch_size={size}") for size in (1, 8)]
    for status, _, error in [process.end() for process in processes]:
        assert status == 0, error
    records.append(json.loads(processes[0].printed()[0].splitlines()[-1]))
    assert not processes[1].printed()[0], "rank 0 prints for all"
    assert [record["hardware"]["ranks"] for record in records] == [1, 1, 2]
    first, *others = ({name: x for name, x in record["results"][0]["text"][corpus].items() if isinstance(x, float)}
                      for record in records)
    assert len(first) > 7 and all(other == pytest.approx(first, rel=1e-5) for other in others)
