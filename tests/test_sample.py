"""Generation: the cached engine against the oracle without a cache, decoders, prompts, limits."""
import pytest
import torch

from conftest import ARCHITECTURES, BLOCK_MODELS, make_model
from model import ModelError
from configurator import ConfigError
from sample import Sampler, cut, decode_block, generate, prepare_for_inference

ORDERS = ["random", "confidence", "threshold", "first_hitting"]


def make_sampler(model, rows=1, seed=5, **changes):
    generators = [torch.Generator().manual_seed(seed + i) for i in range(rows)]
    return Sampler(generators, mask_id=model.config.mask_id, **{"tokens_per_step": 3, **changes})


def prompts_of(*lengths, seed=2):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 22, (n,), generator=g) for n in lengths]


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("time_conditioning", [False, True])
def test_cached_generation_equals_generation_without_a_cache_token_for_token(name, order, time_conditioning):
    model = make_model(name, torch.float32, time_conditioning=time_conditioning)
    prompts = torch.stack(prompts_of(11, 11))           # ends inside a block
    out = generate(model, list(prompts), 18, make_sampler(model, 2, order=order, threshold=0.5))
    sampler = make_sampler(model, 2, order=order, threshold=0.5)
    naive = model.generate_naive(prompts, 18, lambda xt, logits_fn: decode_block(xt, logits_fn, sampler))
    assert torch.equal(torch.stack(out.tokens), naive)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("time_conditioning", [False, True])
@pytest.mark.parametrize("prompt_length, p", [(11, 2), (16, 4), (0, 8)])
def test_the_fused_engine_equals_generation_without_a_cache_token_for_token(name, time_conditioning, prompt_length, p):
    """Commit and first step in one pass, the head on p positions, folded and merged weights."""
    model = make_model(name, torch.float32, time_conditioning=time_conditioning)
    prompts = torch.stack(prompts_of(prompt_length, prompt_length))
    length = 32 - prompt_length if model.config.full_sequence else 21
    sampler = make_sampler(model, 2, tokens_per_step=p)
    naive = model.generate_naive(prompts, length, lambda xt, logits_fn: decode_block(xt, logits_fn, sampler))
    prepare_for_inference(model, torch.float32)
    out = generate(model, list(prompts), length, make_sampler(model, 2, tokens_per_step=p), engine="fused")
    assert torch.equal(torch.stack(out.tokens), naive)


@pytest.mark.parametrize("name", BLOCK_MODELS)
def test_rows_with_prompts_of_different_lengths_come_out_as_they_would_alone(name):
    model = make_model(name)
    prompts = prompts_of(3, 11, 0, 24, 8)
    together = generate(model, prompts, 13, make_sampler(model, 5))
    for i, prompt in enumerate(prompts):
        alone = generate(model, [prompt], 13, make_sampler(model, 1, seed=5 + i))
        assert torch.equal(together.tokens[i], alone.tokens[0])
        assert torch.equal(together.tokens[i][:len(prompt)], prompt)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("prompt_length, length", [(0, 1), (7, 1), (8, 1), (5, 20), (16, 16)])
def test_any_length_is_generated_with_no_mask_left_and_none_emitted(name, prompt_length, length):
    model = make_model(name, torch.float32)
    prompts = prompts_of(prompt_length, prompt_length)
    for order in ORDERS:
        out = generate(model, prompts, length, make_sampler(model, 2, order=order, temperature=3.0))
        for row, prompt in zip(out.tokens, prompts):
            assert len(row) == prompt_length + length and (row != model.config.mask_id).all()
            assert torch.equal(row[:prompt_length], prompt)


def test_forward_passes_are_counted():
    model = make_model("mamba_h", torch.float32)
    out = generate(model, prompts_of(0), 24, make_sampler(model, tokens_per_step=2))
    assert out.forward_passes == 3 * 4 + 2              # 8 / 2 steps a block; no commit after the last
    out = generate(model, prompts_of(5), 11, make_sampler(model, tokens_per_step=2))
    assert out.forward_passes == 2 + 4 + 1              # 3 unknown tokens, then 8
    out = generate(model, prompts_of(0), 24, make_sampler(model, order="threshold", threshold=0.0))
    assert out.forward_passes == 3 * 1 + 2


def test_a_row_ends_at_its_first_end_of_text():
    model = make_model("mamba_h", torch.float32)
    free = generate(model, prompts_of(4, 4), 24, make_sampler(model, 2))
    stop = int(free.tokens[0][10])
    out = generate(model, prompts_of(4, 4), 24, make_sampler(model, 2), stop_token=stop)
    for row, whole in zip(out.tokens, free.tokens):
        hits = (whole[4:] == stop).nonzero()
        end = 4 + int(hits[0]) + 1 if len(hits) else len(whole)
        assert torch.equal(row, whole[:end])


def test_sampling_draws_from_the_models_distribution():
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05])).expand(1, 20_000, 4)
    def frequencies(**changes):
        drawn = Sampler([torch.Generator().manual_seed(1)], mask_id=9, **changes).pick(logits)
        return torch.bincount(drawn[0], minlength=4) / 20_000
    def close(a, b):
        assert (a - torch.tensor(b)).abs().max() < 0.02, a
    close(frequencies(), [0.5, 0.3, 0.15, 0.05])
    close(frequencies(temperature=0.5), [0.685, 0.247, 0.062, 0.007])
    close(frequencies(top_k=2), [0.625, 0.375, 0, 0])
    close(frequencies(top_p=0.8), [0.625, 0.375, 0, 0])
    close(frequencies(top_p=0.81), [0.526, 0.316, 0.158, 0])
    close(frequencies(temperature=0), [1, 0, 0, 0])


def test_top_p_keeps_the_token_that_crosses():
    logits = torch.log(torch.tensor([0.4, 0.35, 0.25]))
    assert (cut(logits, 0, 0.5) > float("-inf")).tolist() == [True, True, False]
    assert (cut(logits, 0, 0.1) > float("-inf")).tolist() == [True, False, False]


def test_one_token_at_a_time_in_random_order_is_exact_ancestral_sampling():
    """A toy denoiser that knows the joint distribution of two bits: p = 1 reproduces it, p = 2 draws
    the bits independently and cannot."""
    joint = torch.tensor([[0.45, 0.05], [0.05, 0.45]])
    def logits_fn(xt, t):
        out = torch.full((len(xt), 2, 3), float("-inf"))
        for i in range(2):
            other = xt[:, 1 - i]
            p = joint if i == 0 else joint.T            # (this bit, the other bit)
            out[:, i, :2] = torch.where((other == 2)[:, None], p.sum(1), p.T[other.clamp(max=1)]).log()
            out[:, i, :2] -= out[:, i, :2].logsumexp(-1, keepdim=True)
        return out
    n = 4000
    def agreement(**changes):
        generators = [torch.Generator().manual_seed(i) for i in range(n)]
        x = decode_block(torch.full((n, 2), 2), logits_fn, Sampler(generators, mask_id=2, **changes))
        return float((x[:, 0] == x[:, 1]).float().mean())
    assert abs(agreement(tokens_per_step=1) - 0.9) < 0.03
    assert abs(agreement(order="first_hitting") - 0.9) < 0.03
    assert abs(agreement(tokens_per_step=2) - 0.5) < 0.03


def test_bad_requests_are_refused_before_any_work():
    model = make_model("mamba_h", torch.float32)
    with pytest.raises(ModelError, match="rotary capacity"):
        generate(model, prompts_of(4), 262_144, make_sampler(model))
    with pytest.raises(ModelError, match="at least 1"):
        generate(model, prompts_of(4), 0, make_sampler(model))
    with pytest.raises(ConfigError, match="not one of"):
        make_sampler(model, order="sideways")
    with pytest.raises(ConfigError, match="top_p"):
        make_sampler(model, top_p=0.0)
