"""What a denoising step reveals, and the distribution of what is drawn there."""
from types import SimpleNamespace

import pytest
import torch

import sample
from conftest import price_of, small_model
from decoders import ActiveBlock, Sampler, cut, sampler_of, select


@pytest.mark.parametrize("how, wanted", [
    (dict(), [0.5, 0.3, 0.15, 0.05]), (dict(temperature=0.5), [0.685, 0.247, 0.062, 0.007]),
    (dict(temperature=0), [1, 0, 0, 0]),
    (dict(top_k=2), [0.625, 0.375, 0, 0]), (dict(top_k=3, top_p=0.8), [0.625, 0.375, 0, 0]),
    # top_p: the fewest tokens that reach this mass, and at least one
    (dict(top_p=0.1), [1, 0, 0, 0]), (dict(top_p=0.8), [0.625, 0.375, 0, 0]),
    (dict(top_p=0.81), [0.526, 0.316, 0.158, 0])])
def test_sampling_draws_from_the_models_distribution(how, wanted):
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05])).expand(1, 20_000, 4)
    zero = torch.zeros(1, dtype=torch.long)
    drawn = Sampler([1], "random", mask_id=9, **how).pick(logits, torch.arange(20_000)[None], zero + 1, zero, zero)
    assert (torch.bincount(drawn[0], minlength=4) / 20_000 - torch.tensor(wanted)).abs().max() < 0.02
    assert (cut(torch.zeros(4), 0, 0.5) == 0).sum() == 2      # two of four equal tokens reach a half


def unmask_all(xt, logits_of, sampler):
    """x0 of the block xt (b, l) by a toy denoiser, logits_of(xt, t) -> (b, l, v - 1)."""
    block = ActiveBlock(*xt.shape, sampler, xt.device)
    block.start(xt, 0)
    for _ in block.steps(int((xt == sampler.mask_id).sum(1).max())):
        one_step(block, logits_of(block.xt, block.noise_level()))
    return block.xt


def one_step(block, logits):
    """A denoising step of a model that gives these logits (b, l, v - 1)."""
    positions = block.positions(SimpleNamespace(token_logits=lambda logits: logits), logits)
    block.reveal(positions, select(logits, positions))


def test_one_token_at_a_time_in_random_order_is_exact_ancestral_sampling():
    """A toy denoiser knows the joint distribution of two bits, which agree with probability 0.9. One token a step
    reproduces it. Two a step are drawn independently, so they agree half of the time."""
    given = torch.tensor([[0.9, 0.1], [0.1, 0.9], [0.5, 0.5]])     # p of a bit, if the other one is 0, 1 or masked

    def agreement(decoder, p):
        sampler = Sampler(list(range(4000)), decoder, p, mask_id=2)
        x = unmask_all(torch.full((4000, 2), 2), lambda xt, t: given[xt.flip(1)].log(), sampler)
        return float((x[:, 0] == x[:, 1]).float().mean())
    assert abs(agreement("random", 1) - 0.9) < 0.03
    assert abs(agreement("first_hitting", 1) - 0.9) < 0.03
    assert abs(agreement("random", 2) - 0.5) < 0.03


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
    for uniform in ((first / (2 / 3)) ** 2, second / first):           # these powers of ratios are uniform on (0, 1)
        found = uniform.sort().values - (torch.arange(n) + 0.5) / n
        assert found.abs().max() < 2 / n ** 0.5         # Kolmogorov-Smirnov: beyond it once in 1,500 times


@pytest.mark.parametrize("xt, p, steps", [
    ("________", 2, "04 15 26 37"), ("________", 1, "0 1 2 3 4 5 6 7"), ("________", 8, "01234567"),
    ("________", 3, "036 147 25"),                      # parts of 3, 3 and 2
    ("xxx_____", 2, "36 47 5"), ("x__xx_x_", 2, "15 27"), ("xxxx_xxx", 4, "4")])       # known tokens take no steps
def test_strided_goes_from_left_to_right_in_equal_parts_of_what_is_masked(xt, p, steps):
    xt = torch.tensor([[2 * (c == "_") for c in xt]])
    block, seen = ActiveBlock(1, 8, Sampler([0], "strided", p, mask_id=2), "cpu"), []
    block.start(xt, 0)
    for _ in block.steps(int((xt == 2).sum())):
        before, at = block.xt.clone(), block.next_in_order()
        assert block.noise_level()[0] == (before == 2).double().mean()
        block.write(at, torch.ones_like(at))
        seen.append("".join(map(str, (block.xt != before)[0].nonzero().flatten().tolist())))
    assert " ".join(seen) == steps and (block.xt != 2).all()


@pytest.mark.parametrize("decoder, number, wanted", [
    ("confidence", 2, "-x-x"), ("confidence", 3, "-xxx"), ("threshold", 0.8, "-x-x"), ("threshold", 0.0, "xxxx"),
    ("threshold", 1.0, "-x--"), ("threshold", 0.5, "xxxx"),     # as probable as the threshold is enough
    # The entropies are 0.693, 0, 0.611 and 0.199 nats. The largest of a step is not counted.
    ("entropy_bound", 0.0, "-x-x"), ("entropy_bound", 0.19, "-x-x"), ("entropy_bound", 0.2, "-xxx"),
    ("entropy_bound", 0.8, "-xxx"), ("entropy_bound", 0.82, "xxxx")])
def test_the_surest_positions_are_revealed_as_many_as_the_decoder_says(decoder, number, wanted):
    """Temperature and top_k do not count, and a second row, which is finished, stays as it is."""
    p = torch.tensor([[0.5, 1, 0.7, 0.95]])          # the likeliest token's, at each position
    logits = torch.stack([p, 1 - p], -1).log().expand(2, 4, 2)
    how = dict(tokens_per_step=number) if decoder == "confidence" else {decoder: number}
    block = ActiveBlock(2, 4, Sampler([0, 0], decoder, temperature=0.01, top_k=1, mask_id=2, **how), "cpu")
    block.start(torch.tensor([[2] * 4, [1] * 4]), 0)
    one_step(block, logits)
    assert "".join("-x"[token != 2] for token in block.xt[0].tolist()) == wanted and (block.xt[1] == 1).all()


# ----------------------------------------------------------------------------------------------
# A small model whose texts can be enumerated

@pytest.mark.parametrize("decoder", ["strided:2", "confidence:3", "threshold:0.55", "entropy_bound:1"])
def test_texts_are_as_frequent_as_the_decoder_makes_them_probable(monkeypatch, decoder):
    """Pearson's statistic of 80,000 texts: with 255 degrees of freedom, beyond 370 once in 300,000 times. The total
    variation between two of these decoders is at least 0.14."""
    n, model = 80_000, small_model()
    p = (-price_of(model, torch.cartesian_prod(*[torch.arange(2)] * 8), decoder)[0]).exp()     # (256,)
    sampler = sampler_of(decoder, seeds=list(range(n)), mask_id=2)
    monkeypatch.setattr(sample, "read", lambda *_: None)    # no row has a prompt; asking takes half of the time
    found = torch.stack(sample.generate(model, [torch.tensor([], dtype=torch.long)] * n, 8, sampler).tokens)
    count = torch.bincount((found * 2 ** torch.arange(7, -1, -1)).sum(1), minlength=256)
    assert ((count - n * p) ** 2 / (n * p)).sum() < 370 and (n * p).min() > 5


def test_threshold_1_and_entropy_bound_0_reveal_one_token_a_step_the_surest():
    """As `confidence` does. Of two tokens, the likelier one is the more probable, the smaller the entropy is."""
    def texts(decoder, **how):
        return sample.generate(small_model(), [torch.tensor([0, 1, 1])] * 9, 17,
                               Sampler(list(range(9)), decoder, mask_id=2, **how)).tokens
    want = texts("confidence")
    assert len({tuple(text.tolist()) for text in want}) > 1
    for found in texts("threshold", threshold=1.0), texts("entropy_bound", entropy_bound=0.0):
        assert all(map(torch.equal, found, want))
