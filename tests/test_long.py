"""Long prefixes: the result does not depend on the chunks in which 131,072 tokens are read."""
import pytest
import torch

from conftest import make_model, relative_error as error

LONG = 131_072


def test_mamba_layers_read_131072_tokens_alike_in_chunks_of_any_size():
    """Chunks in fp32 against one pass in fp64. The attention layers are removed, because their work is quadratic."""
    model = make_model("mamba_h", torch.float32, n_layer=2, d_model=8, d_state=4, mamba_head_dim=4, seq_len=2048,
                       block_len=256, chunk_len=64)
    model.layers, logits = model.layers[1:], []
    tokens = torch.randint(0, 22, (1, LONG + 256), generator=torch.Generator().manual_seed(3))
    for dtype, chunk in ((torch.float32, 2816), (torch.float64, LONG)):
        cache = model.to(dtype).new_cache(1, LONG)
        model.prefill(tokens[:, :LONG], cache, chunk)
        assert int(cache.lengths) == LONG
        logits.append(model.denoise(tokens[:, LONG:], cache, torch.ones(1))[..., :-1])
    assert error(*logits) < 1e-5


@pytest.mark.parametrize("name, n_layer", [("bdlm_attention", 1), ("mamba_h", 2)])
def test_the_last_of_131072_tokens_are_read_alike_in_chunks_of_any_size(name, n_layer):
    """Random keys, values and states stand for all but the last 1024 tokens: to read them would take a minute for each
    chunk size. tests/kernels/test_gpu.py reads all of them."""
    model = make_model(name, torch.float32, n_layer=n_layer, n_head=1, d_model=8, seq_len=2048, block_len=256)
    tokens = torch.randint(0, 22, (1, 1280), generator=torch.Generator().manual_seed(3))
    caches = [model.new_cache(1, LONG) for _ in range(2)]
    for a, b in zip(*(cache.layers for cache in caches)):
        for part, same in zip(a, b):
            same.copy_(part.normal_())
    logits = []
    for cache, chunk in zip(caches, (256, 1024)):
        cache.lengths.fill_(LONG - 1024)
        model.prefill(tokens[:, :1024], cache, chunk)
        logits.append(model.denoise(tokens[:, 1024:], cache, torch.ones(1))[..., :-1])
    assert error(*logits) < 1e-5
    caches[0].lengths.fill_(LONG - 256)                 # without the last block of the prefix the result differs
    assert error(model.denoise(tokens[:, 1024:], caches[0], torch.ones(1))[..., :-1], logits[1]) > 1e-5
