"""Small models in fp64 for the tests; equalities are checked to rounding, not to taste."""
import os
import sys

# Idle OpenMP threads sleep: spinning, they take the cores from whatever else the machine runs.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))
torch.set_num_threads(2)

from decoders import Sampler  # noqa: E402
from model import BlockDiffusionLM, ModelConfig  # noqa: E402
from parallel import has_fast  # noqa: E402
from sample import generate, open_engine  # noqa: E402

# The four architectures, small: (attn_every, block_len) for 32-token sequences.
ARCHITECTURES = {"attention": (1, 32), "diffumamba_h": (2, 32), "bdlm_attention": (1, 8), "mamba_h": (2, 8)}
BLOCK_MODELS = ["bdlm_attention", "mamba_h"]
NO_FAST = "needs the folder fast/"
ENGINES = ["simple", pytest.param("fused", marks=pytest.mark.skipif(not has_fast(), reason=NO_FAST))]


def need_fast():
    """Skips a module whose subject is in fast/, where that folder has been removed."""
    if not has_fast():
        pytest.skip(NO_FAST, allow_module_level=True)


def make_model(name, dtype=torch.float64, seed=0, **changes):
    """A random model with every parameter perturbed, so that no zero initialisation hides a path."""
    attn_every, block_len = ARCHITECTURES[name]
    settings = dict(vocab_size=23, seq_len=32, block_len=block_len, attn_every=attn_every, n_layer=4,
                    n_head=2, d_model=16, d_state=8, mamba_head_dim=8, chunk_len=4)
    torch.manual_seed(seed)
    model = BlockDiffusionLM(ModelConfig(**{**settings, **changes})).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model


def make_batch(model, batch=3, seq_len=32, seed=1):
    """Clean tokens, noised tokens and noise levels: (b, s), (b, s), (b, k)."""
    g = torch.Generator().manual_seed(seed)
    x0 = torch.randint(0, model.config.mask_id, (batch, seq_len), generator=g)
    t, is_masked = model.draw_noise(x0, g)
    return x0, x0.masked_fill(is_masked, model.config.mask_id), t.double()


def make_sampler(model, rows=1, seed=5, **changes):
    seeds = [seed + i for i in range(rows)]
    return Sampler(seeds, mask_id=model.config.mask_id, **{"tokens_per_step": 3, **changes})


def prompts_of(*lengths, seed=2):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 22, (n,), generator=g) for n in lengths]


def generate_by(engine, model, *request, **rest):
    """sample.generate by an engine, in the dtype of the model's weights."""
    model, new_decoder = open_engine(engine, model, model.embed.weight.dtype)
    return generate(model, *request, new_decoder=new_decoder, **rest)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
