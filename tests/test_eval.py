"""Evaluation: likelihoods known exactly, the same number for every batch size and rank count, scores of answers."""
import itertools
import json
import math
import types

import numpy as np
import pytest
import torch

import ops
from conftest import (BLOCK_MODELS, ROOT, all_models, block_models, both_times, eval_record, make_model, price_of,
                      small_model, start_ranks)
from decoders import Sampler, generate_naive
from eval import nelbo_figures, ratio
from model import ModelConfig
from nelbo import NATS, nelbo_sums, noise_generators, sequence_nelbo
from tools.questions import score_pairs


def one_rank(rank=0, world=1):
    """Stands for Parallel: one rank that never communicates, so its sums are its own share."""
    return types.SimpleNamespace(rank=rank, world=world, device=torch.device("cpu"), sum=lambda x: x)


def sums_of(model, x, seed=0, mc=1, stratified=False, batch_size=500, rank=0, world=1):
    return nelbo_sums(model, x, one_rank(rank, world), torch.no_grad, seed, mc, stratified, batch_size)


def license_text():
    """1,024 bytes of text: (2, 512)."""
    return torch.tensor(list((ROOT / "LICENSE").read_bytes()[:1024])).view(2, 512)


# ----------------------------------------------------------------------------------------------
# Exact likelihoods

@block_models
def test_at_block_length_1_every_token_is_masked_and_the_nelbo_is_the_exact_autoregressive_likelihood(name):
    model = make_model(name, vocab_size=4, seq_len=3, block_len=1)
    x = torch.cartesian_prod(*[torch.arange(3)] * 3)                           # all 27 sequences
    t, is_masked = model.draw_noise(x, stratum=(1, 2), t_range=(0.3, 0.7))
    assert is_masked.all() and (t == 1).all()
    with pytest.raises(ValueError):                     # one generator for 27 rows
        model.draw_noise(x, [torch.Generator()])
    nats = sequence_nelbo(model, x, is_masked, t)[:, NATS]
    np.testing.assert_allclose(nats, price_of(model, x, "strided:1")[0])
    assert float(torch.exp(-nats).sum()) == pytest.approx(1) and nats.std() > 0.1


@all_models
@torch.no_grad()
def test_the_price_of_random_is_the_mean_over_orders_and_the_mean_of_the_nelbo_over_noise(name, monkeypatch):
    """Two blocks of 4 tokens, or one. A block depends on its own order, mask and t alone: all may have the same."""
    k = 2 if name in BLOCK_MODELS else 1
    model = make_model(name, seq_len=4 * k, block_len=4)
    x0 = torch.randint(0, 22, (4 * k,), generator=torch.Generator().manual_seed(1)).repeat(24, 1)
    orders, want = torch.tensor(list(itertools.permutations(range(4)))), {}    # (24, 4)
    monkeypatch.setattr(ops, "uniform", lambda l, *_: orders.argsort(1).double().repeat_interleave(k, 0))
    for p in (1, 2, 3, 4):
        want[p], xt = 0, torch.full((24, k, 4), model.config.mask_id)
        for i in range(0, 4, p):
            at = orders[:, None, i:i + p].expand(-1, k, -1)                    # (24, k, p), revealed in this step
            log_p = model.logits(model.all_block_hidden(x0, xt.view(24, -1), torch.zeros(24, k))).log_softmax(-1)
            want[p] -= float(log_p.gather(2, x0[..., None]).view(24, k, 4).gather(2, at).sum()) / 24
            xt = xt.scatter(2, at, x0.view(24, k, 4).gather(2, at))
        nats, passes = price_of(model, x0, f"random:{p}")
        assert float(nats.mean()) == pytest.approx(want[p], abs=1e-10) and (passes == math.ceil(4 / p)).all()
    torch.testing.assert_close(price_of(model, x0, "first_hitting"), price_of(model, x0, "random:1"))
    masks, mean = torch.cartesian_prod(*[torch.tensor([False, True])] * 4), 0                  # (16, 4)
    for at, weight in zip(*np.polynomial.legendre.leggauss(4)):                # exact for the polynomials in t here
        t = (1 + at) / 2
        levels = torch.full((16, k), t, dtype=torch.float64)
        nats = sequence_nelbo(model, x0[:16], masks.repeat(1, k), levels)[:, NATS]
        mean += weight / 2 * float((t * masks.double() + (1 - t) * ~masks).prod(1) @ nats)
    assert mean == pytest.approx(want[1])


# ----------------------------------------------------------------------------------------------
# Noise, errors

def test_noise_levels_are_uniform_on_their_stratum_and_independent_and_the_masked_share_is_t():
    model, n = make_model("bdlm_attention"), 5000
    for j, parts in ((0, 1), (0, 4), (3, 4)):
        t, is_masked = model.draw_noise(torch.zeros(n, 32), torch.Generator().manual_seed(j), (j, parts))  # t (n, 4)
        u = (t - 1e-3) / (1 - 1e-3) * parts - j
        assert -1e-4 < u.min() < 1e-3 and 1 - 1e-3 < u.max() < 1 + 1e-4 and abs(u.mean() - 0.5) < 0.01
        assert np.abs(np.corrcoef(u.T) - np.eye(4)).max() < 0.06               # of two blocks
        excess = is_masked.view(n, 4, 8).double().mean(2) - t
        assert abs(excess[u < 0.5].mean()) < 0.005 and abs(excess[u > 0.5].mean()) < 0.005
    drawn, seeds, draw = [], [], model.draw_noise
    model.draw_noise = lambda x0, generators, stratum: (drawn.append(stratum) or seeds.extend(
        g.initial_seed() for g in generators) or draw(x0, generators, stratum))
    for stratified in (False, True):
        sums_of(model, torch.zeros(2, 32, dtype=torch.long), mc=3, stratified=stratified)
    assert drawn == [(0, 1)] * 3 + [(0, 3), (1, 3), (2, 3)]
    assert len(set(seeds)) == 2 * 3 and seeds[:6] == seeds[6:] and max(seeds) > 2 ** 60         # 2 sequences, 3 samples


@all_models
def test_the_number_does_not_depend_on_batch_size_rank_count_or_later_samples(name):
    model = make_model(name)
    x = torch.randint(0, 22, (6, 32), generator=torch.Generator().manual_seed(2))
    whole = sums_of(model, x, mc=2)
    np.testing.assert_allclose(sums_of(model, x, mc=2, batch_size=1), whole)
    shares = [sums_of(model, x, mc=2, batch_size=2, rank=r, world=3) for r in range(3)]
    np.testing.assert_allclose(sum(shares), whole)
    np.testing.assert_allclose(sums_of(model, x[:4]), whole[:4, :1])         # fewer sequences, fewer noise samples
    assert abs(sums_of(model, x, seed=1) - whole[:, :1])[..., 0].min() > 0   # another seed is other noise
    assert abs(whole[:, 0] - whole[:, 1])[..., 0].min() > 0                    # and so is another sample


@all_models
def test_the_evaluated_number_is_the_training_objective_for_the_same_noise(name):
    model = make_model(name)
    x = torch.randint(0, 22, (3, 32), generator=torch.Generator().manual_seed(5))
    loss = model(x, noise_generators(5, range(3))).detach()                    # nats per token
    assert sums_of(model, x, seed=5)[..., 0].sum() / x.numel() == pytest.approx(float(loss))


@pytest.mark.parametrize("name, nelbo", [("mamba_h", 5.53277), ("bdlm_attention", 5.46943)])
def test_a_model_of_a_seed_that_takes_t_has_the_nelbo_that_is_written_down_here(name, nelbo):
    model = make_model(name, time_conditioning=True, vocab_size=258)
    assert sums_of(model, license_text())[..., NATS].sum() / 1024 == pytest.approx(nelbo, abs=1e-4)


def test_every_figure_of_a_text_by_hand():
    """Three sequences of 8 tokens and 6, 12 and 6 bytes, two noise samples each of (nats, masked, right)."""
    sums = np.array([[[400, 5, 1], [600, 3, 1]], [[700, 4, 2], [900, 4, 2]], [[900, 2, 1], [1300, 2, 3]]], float)
    f = nelbo_figures(sums, np.array([8, 8, 8]), np.array([6, 12, 6]))
    # Means of nats 500, 800, 1100; of masked 4, 4, 2; of right 1, 2, 2. Their sums are 2400, 10 and 5.
    assert f == pytest.approx(dict(
        nats=[500, 800, 1100], nelbo=100, nelbo_se=100 * math.sqrt(3 / 2 * (9 + 0 + 9)) / 24,       # 500 - 800, 0, 300
        nelbo_se_noise=100 * math.sqrt((2 + 2 + 8) / 2) / 24, ppl=math.exp(100),
        ppl_se=math.exp(100) * 100 * math.sqrt(27) / 24, acc=50,
        acc_se=100 * math.sqrt(3 / 2 * (1 + 0 + 1)) / 10,                                   # 1 - 2, 2 - 2, 2 - 1
        bpb=100 / math.log(2), bpb_se=100 * math.sqrt(3 / 2 * (1 + 16 + 25)) / 24 / math.log(2),    # 500 - 600, ...
        sequences=3, samples=2, tokens=24, bytes=24))


# ----------------------------------------------------------------------------------------------
# The price of a decoder

@pytest.mark.parametrize("decoder, fewest", [
    ("strided", 4), ("strided:2", 2), ("strided:3", 2), ("confidence:1", 4), ("confidence:3", 2), ("threshold:1", 4),
    ("threshold:0.55", 2.5), ("entropy_bound:0", 4), ("entropy_bound:1", 2)])
def test_the_probabilities_of_all_texts_sum_to_1_if_positions_are_not_drawn(decoder, fewest):
    nats, passes = price_of(small_model().double(), torch.cartesian_prod(*[torch.arange(2)] * 8), decoder)   # (256,)
    assert float((-nats).exp().sum()) == pytest.approx(1, abs=1e-10) and nats.std() > 0.1 and passes.min() == fewest


def test_pairs_leave_a_markov_chain_that_the_model_knows_the_more_the_more_tokens_a_step():
    move = torch.tensor([[0.8, 0.1, 0.1], [0.1, 0.7, 0.2], [0.3, 0.1, 0.6]], dtype=torch.float64)
    texts = torch.cartesian_prod(*[torch.arange(3)] * 4)                       # (81, 4)
    chain = move.matrix_power(99)[0, texts[:, 0]] * move[texts[:, :-1], texts[:, 1:]].prod(1)

    def posterior(x0, xt, t):
        """log p (b, 4, 3) of each token, given the known ones, up to a constant."""
        fits = ((xt[:, None] == texts) | (xt[:, None] == 3)).all(2) * chain    # (b, 81)
        return (fits @ torch.eye(3).double()[texts].flatten(1)).view(-1, 4, 3).clamp(min=1e-300).log()

    model = types.SimpleNamespace(config=ModelConfig(vocab_size=4, seq_len=4, block_len=4), all_block_hidden=posterior,
                                  token_logits=lambda x: x, head=types.SimpleNamespace(weight=torch.eye(4, 3)))

    def distance(texts, weight):
        """Total variation from the chain's pairs, the mean over three places."""
        return sum(float((p - q).abs().sum()) for p, q in zip(pairs(texts, weight), true)) / 6

    pairs = lambda texts, weight: [torch.bincount(3 * a + b, weight, 9) for a, b in zip(texts.T, texts.T[1:])]
    true, n, last = pairs(texts, chain), 20_000, -1
    for p in (1, 2, 4):
        exact = distance(texts, (-price_of(model, texts, f"strided:{p}")[0]).exp())
        sampler = Sampler(list(range(n)), "strided", p, mask_id=3)
        found = generate_naive(model, torch.zeros(n, 0, dtype=torch.long), 4, sampler)
        assert distance(found, torch.full((n,), 1 / n).double()) == pytest.approx(exact, abs=0.01)
        assert exact > last + 0.05 if p > 1 else exact < 1e-10
        last = exact


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
    return model.logits(model.all_block_hidden(x, x, t))[0, masked].log_softmax(-1)


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


def test_decoders_have_a_price_that_does_not_depend_on_the_batch(corpus, saved):
    names = "random:2,strided:2,threshold:0.1"
    first, other = (eval_record(f"--checkpoint={saved[0]}", f"--data={corpus}", "--sequences=6", f"--decoders={names}",
                                f"--batch_size={size}")["results"][0]["text"][corpus] for size in (1, 4))
    assert list(first["decoders"]) == names.split(",") and first["block_len"] == 8
    assert first["decoders"]["strided:2"]["passes"] == 4 and first["decoders"]["random:2"]["more"] == 0
    n_bytes, base = np.array(first["bytes"]), first["decoders"]["random:2"]["nats"]
    for name, r in first["decoders"].items():
        np.testing.assert_allclose(r["nats"], other["decoders"][name]["nats"], rtol=1e-5)
        assert r["bpb"] == pytest.approx(sum(r["nats"]) / sum(n_bytes) / math.log(2), rel=1e-5)
        more = ratio(np.subtract(r["nats"], base) / math.log(2), n_bytes)      # paired: window by window
        assert (r["more"], r["more_se"]) == pytest.approx(more, abs=1e-4)
