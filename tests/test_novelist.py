"""The model in assets/novelist: what random weights cannot show."""
import json

import pytest
import torch

from conftest import ENGINES, ROOT, generate_by, make_sampler
from nelbo import noise_generators
from decoders import generate_naive
from nelbo import sequence_nelbo
from checkpoint import open_checkpoint

pytest.importorskip("safetensors", reason="needs safetensors, see requirements.txt")
FOLDER = ROOT / "assets" / "novelist"


@pytest.fixture(scope="module")
def novelist():
    """The model, and a function that makes tokens of a text."""
    model, tokenizer, *_ = open_checkpoint(str(FOLDER), "cpu")
    return model, lambda text: torch.tensor(tokenizer.encode_ordinary(text))


def test_the_card_names_the_model_that_is_there(novelist):
    model, _ = novelist
    card, config = (FOLDER / "README.md").read_text(), json.loads((FOLDER / "config.json").read_text())
    assert f"{model.n_params:,} parameters" in card and f"{config['step']:,} steps" in card
    assert (FOLDER / "model.safetensors").stat().st_size < 12e6


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("decoder", ["random", "confidence"])
def test_a_sample_begins_with_its_prompt_and_equals_generation_without_a_cache(novelist, engine, decoder):
    model, encode = novelist
    prompt = encode("The old house was silent, and ")
    sampler = make_sampler(model, decoder=decoder, tokens_per_step=4)
    want = generate_naive(model, prompt[None], 40, sampler)[0]
    found = generate_by(engine, model, [prompt], 40, sampler).tokens[0]
    assert torch.equal(found, want) and torch.equal(found[:len(prompt)], prompt) and len(found) == len(prompt) + 40


def test_more_tokens_a_step_give_text_of_more_bits_per_byte(novelist):
    """The model judges its own samples: 8 of 48 bytes each, one noise for both."""
    model, encode = novelist
    prompt, bits = encode("The old house was silent, and he"), []
    assert len(prompt) == 32
    for tokens_per_step in (1, 16):
        sampler = make_sampler(model, 8, tokens_per_step=tokens_per_step)
        x0 = torch.stack(generate_by("simple", model, [prompt] * 8, 48, sampler).tokens)
        t, is_masked = model.draw_noise(x0, noise_generators(1, range(8)))
        is_masked[:, :32] = False
        bits.append(sequence_nelbo(model, x0, is_masked, t)[:, 0].sum() / (8 * 48 * 0.6931))
    assert bits[0] < 3 < 3.5 < bits[1], bits
