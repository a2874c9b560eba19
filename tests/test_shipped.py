"""The models that ship, in assets/: what they compute and write, and what random weights cannot show."""
import json

import pytest
import torch

from checkpoint import open_checkpoint
from conftest import ENGINES, ROOT, generate_by, make_sampler, price_of
from decoders import generate_naive
from nelbo import NATS
from test_eval import license_text, sums_of

STORY = b"""Once upon a time there was a small dog named Rex. Rex liked to dig in the garden. One day he found an old key.
"What does it open?" asked his friend, a bird. They tried the shed, and inside stood a red boat. "Now we can go to the
lake!" said Rex. They were very happy."""
# Of each model: the NELBO of the license in nats per byte; 40 bytes after the prompt, by seed 5 and `random`; a text of
# its kind, and its bits per byte with four bytes a step.
PROMPT = "The old house was silent, and "
SHIPPED = {
    "novelist": (2.01729, "Cdentndon Creedhlye handed, in tetches m", license_text(), [2.6909, 3.0356, 3.2161]),
    "storyteller": (3.12688, "to Jenry. Mia hed his mind and would nev", torch.tensor([[*STORY]]), [1.3393, 1.3789, 2.2284])}


@pytest.fixture(scope="module", params=SHIPPED)
def shipped(request):
    """The name of a model that ships, the model and its tokenizer."""
    return request.param, *open_checkpoint(str(ROOT / "assets" / request.param), "cpu")[:2]


def test_the_card_names_the_model_that_is_there(shipped):
    folder, model = ROOT / "assets" / shipped[0], shipped[1]
    card, config = (folder / "README.md").read_text(), json.loads((folder / "config.json").read_text())
    assert f"{model.n_params:,} parameters" in card and f"{config['step']:,} steps" in card
    assert (folder / "model.safetensors").stat().st_size < 12e6


def test_every_model_that_ships_gives_a_known_text_the_nelbo_that_is_written_down_here(shipped):
    name, model, _ = shipped
    assert set(SHIPPED) == {path.parent.name for path in ROOT.glob("assets/*/model.safetensors")}
    assert sums_of(model, license_text())[..., NATS].sum() / 1024 == pytest.approx(SHIPPED[name][0], abs=1e-4)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("decoder", ["random", "confidence"])
def test_a_sample_begins_with_its_prompt_and_equals_generation_without_a_cache(shipped, engine, decoder):
    name, model, tokenizer = shipped
    prompt = torch.tensor(tokenizer.encode_ordinary(PROMPT))
    sampler = make_sampler(model, decoder=decoder, tokens_per_step=4)
    want = generate_naive(model, prompt[None], 40, sampler)[0]
    found = generate_by(engine, model, [prompt], 40, sampler).tokens[0]
    assert torch.equal(found, want) and torch.equal(found[:len(prompt)], prompt) and len(found) == len(prompt) + 40
    assert decoder != "random" or tokenizer.decode(found[len(prompt):].tolist()) == SHIPPED[name][1]


def test_on_real_text_strided_costs_less_than_random_and_confidence(shipped):
    text, want = SHIPPED[shipped[0]][2][:, :256], SHIPPED[shipped[0]][3]
    bits = [float(price_of(shipped[1], text, f"{rule}:4")[0].sum()) / text.numel() / 0.6931
            for rule in ("strided", "random", "confidence")]
    assert bits == pytest.approx(want, abs=1e-3) and bits[0] == min(bits)
