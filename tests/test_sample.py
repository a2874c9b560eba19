"""Cached generation against the definition without a cache; gaps, saved prompts, random numbers."""
import pytest
import torch

import ops
from checkpoint import fingerprint, load_prompt, save_prompt
from conftest import ENGINES, all_models, block_models, generate_by, make_model, make_sampler, prompts_of
from decoders import DECODERS, IN_ORDER, generate_naive
from model import BlockDiffusionLM
from sample import generate, read


# How the tokens of a decoder are drawn; of the others as they are.
DRAWS = dict(random=dict(top_k=5), strided=dict(top_p=0.8), confidence=dict(temperature=0.0),
             first_hitting=dict(temperature=2.0))


@all_models
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("prompt_length, length, time_conditioning", [
    (11, 18, True), (7, 1, False), (8, 1, True), (16, 16, False)])
def test_cached_generation_equals_generation_without_a_cache_token_for_token(name, engine, decoder, prompt_length, length,
                                                                             time_conditioning):
    """Prompt and text end inside a block or at its end. The prompt stays, and no mask is left."""
    model = make_model(name, torch.float32, time_conditioning=time_conditioning)
    prompts = torch.stack(prompts_of(prompt_length, prompt_length))
    sampler = make_sampler(model, 2, decoder=decoder, threshold=0.4, entropy_bound=5.0, **DRAWS.get(decoder, {}))
    out = generate_by(engine, model, list(prompts), length, sampler)
    naive = generate_naive(model, prompts, length, sampler)
    assert torch.equal(torch.stack(out.tokens), naive) and naive.shape == (2, prompt_length + length)
    assert torch.equal(naive[:, :prompt_length], prompts) and (naive != model.config.mask_id).all()


@block_models
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("decoder", DECODERS)
def test_rows_with_prompts_of_different_lengths_come_out_as_they_would_alone(name, engine, decoder):
    """A row that has ended does not change while the others go on. Two rows have the same prompt."""
    model, how = make_model(name), dict(decoder=decoder, threshold=0.3)
    # Without any known token, attention gives all masks the same probabilities: rounding would choose between them.
    prompts = prompts_of(3, 11, 0 if decoder in IN_ORDER else 1, 24)
    prompts.insert(2, prompts[0])
    together = generate_by(engine, model, prompts, 13, make_sampler(model, 5, **how))
    for i, prompt in enumerate(prompts):
        alone = generate(model, [prompt], 13, make_sampler(model, 1, seed=5 + i, **how))
        assert torch.equal(together.tokens[i], alone.tokens[0])


@all_models
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("decoder", DECODERS)
def test_a_gap_is_filled_between_a_prompt_and_a_suffix_that_stay(name, engine, decoder):
    """In a block model the gap ends in its block, in a full-sequence model anywhere. All engines draw the same."""
    model = make_model(name, torch.float32)
    prompts, suffix = prompts_of(17, 17), torch.tensor([3, 1, 4])
    length = 9 if model.config.full_sequence else 2
    by_engine = [generate_by(kind, model, prompts, length, make_sampler(model, 2, decoder=decoder, threshold=0.3),
                             suffix=suffix).tokens for kind in {"simple", engine}]
    for prompt, *rows in zip(prompts, *by_engine):
        for row in rows:
            assert torch.equal(row[:17], prompt) and torch.equal(row[17 + length:], suffix)
            assert torch.equal(row, rows[0]) and (row != model.config.mask_id).all()


@all_models
def test_a_gap_is_filled_by_what_the_model_says_between_both_sides(name):
    """One step reveals everything at temperature 0: the most probable tokens, given prompt and suffix. A stop token of
    the suffix stops nothing."""
    model, (prompt,), suffix = make_model(name), prompts_of(18), torch.tensor([3, 1])
    c, mask = model.config, model.config.mask_id
    out = generate(model, [prompt], 2, make_sampler(model, tokens_per_step=32, temperature=0.0), stop_token=3,
                   suffix=suffix)
    whole = torch.cat([prompt, torch.tensor([mask, mask]), suffix])
    l = len(whole) if c.full_sequence else c.block_len
    whole = torch.nn.functional.pad(whole, (0, -len(whole) % l), value=mask)[None]
    with torch.no_grad():
        clean, t = whole.masked_fill(whole == mask, 0), torch.zeros(1, whole.size(1) // l)
        logits = model.logits(model.all_block_hidden(clean, whole, t))
    assert torch.equal(out.tokens[0][18:], torch.cat([logits[0, 18:20].argmax(-1), suffix]))
    assert out.cache_bytes == model.new_cache(1, 0 if c.full_sequence else 16).nbytes          # whole blocks of the prompt


@pytest.mark.parametrize("engine", ENGINES)
@block_models
@pytest.mark.parametrize("prompt_length, more", [(19, 0), (16, 0), (19, 8), (0, 11)])
def test_going_on_from_a_saved_prompt_equals_going_on_from_the_prompt_token_for_token(name, prompt_length, more,
                                                                                      engine, tmp_path, monkeypatch):
    """The plain engine reads and saves a prompt, and each engine goes on from it. more: prompt tokens after it."""
    model, path = make_model(name, torch.float32), str(tmp_path / "prompt.cache")
    prompt, = prompts_of(prompt_length + more)
    want = generate(model, [prompt] * 2, 21, make_sampler(model, 2)).tokens
    held, in_blocks, mark = prompt_length // 8 * 8, len(prompt) // 8 * 8, fingerprint(model, torch.float32)
    save_prompt(path, prompt[:prompt_length], read(model, [prompt[:held]], model.new_cache(1, held)), mark)
    tokens, cache = load_prompt(path, model.config, mark)
    assert torch.equal(tokens, prompt[:prompt_length])
    prefill, sizes = BlockDiffusionLM.prefill, []
    monkeypatch.setattr(BlockDiffusionLM, "prefill", lambda model, x0, cache, **how: (
        sizes.append(x0.numel()), prefill(model, x0, cache, **how)))
    out = generate_by(engine, model, [prompt] * 2, 21, make_sampler(model, 2), prompt_cache=cache)
    assert all(torch.equal(a, b) for a, b in zip(out.tokens, want))
    # What comes after it is read once for both rows; they are committed together, 16 tokens at a time.
    assert [n for n in sizes if 0 < n < 16] == ([in_blocks - held] if in_blocks > held else [])
    longer = read(model, [prompt[:in_blocks]], model.new_cache(1, in_blocks), cache)
    alone = generate_by(engine, model, [prompt], 21, make_sampler(model), prompt_cache=longer)
    assert torch.equal(alone.tokens[0], want[0])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("decoder", DECODERS)
def test_no_two_draws_share_their_random_numbers(monkeypatch, engine, decoder):
    """A draw is a function of seed, stream, index, step and the begin of its block: two rows, three blocks."""
    model, philox, asked = make_model("mamba_h", torch.float32, time_conditioning=True), ops.philox, []

    def recorded(*key):
        # In one call, a position that a row repeats is the same draw.
        asked.extend(set(zip(*(part.flatten().tolist() for part in torch.broadcast_tensors(*key)))))
        return philox(*key)
    monkeypatch.setattr(ops, "philox", recorded)
    out = generate_by(engine, model, prompts_of(8, 8), 24, make_sampler(model, 2, decoder=decoder, threshold=0.6))
    assert len(asked) == len(set(asked)) >= 2 * 24
    assert {key[-1] for key in asked} == {8, 16, 24} and out.forward_passes >= 3
