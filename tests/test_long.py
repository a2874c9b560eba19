"""Long prefixes: 131,072 tokens read in different chunks."""
import pytest
import torch

from conftest import make_model

LONG = 131_072


def error(got, want):
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm())


def test_mamba_layers_read_131072_tokens_alike_in_chunks_of_any_size():
    """In fp32, against one pass over all of it in fp64. Attention is left out: without its quadratic work
    every token is really read."""
    model = make_model("mamba_h", torch.float32, n_layer=2, d_model=8, d_state=4, mamba_head_dim=4, seq_len=2048,
                       block_len=256, chunk_len=64)
    model.layers, logits = model.layers[1:], []
    tokens = torch.randint(0, 22, (1, LONG + 256), generator=torch.Generator().manual_seed(3))
    for dtype, chunk in ((torch.float32, 768), (torch.float64, LONG)):
        cache = model.to(dtype).new_cache(1, LONG)
        model.prefill(tokens[:, :LONG], cache, chunk)
        assert int(cache.lengths) == LONG
        logits.append(model.denoise(tokens[:, LONG:], cache, torch.ones(1))[..., :-1])
    assert error(*logits) < 1e-5


@pytest.mark.parametrize("name, n_layer", [("bdlm_attention", 1), ("mamba_h", 2)])
def test_the_last_of_131072_tokens_are_read_alike_in_chunks_of_any_size(name, n_layer):
    """All but the last 1024 are a stand-in, random keys, values and states: attention at this length
    takes a minute a chunk size on two cores. tests/kernels/test_gpu.py reads all of them."""
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
    caches[0].lengths.fill_(LONG - 256)                 # the prefix is seen: a block less is another answer
    assert error(model.denoise(tokens[:, 1024:], caches[0], torch.ones(1))[..., :-1], logits[1]) > 1e-5


def test_no_call_takes_more_tokens_than_a_chunk_whatever_the_number_of_rows():
    model, sizes = make_model("mamba_h", torch.float32), []
    tokens, caches = torch.randint(0, 22, (6, 64)), [model.new_cache(6, 64) for _ in range(2)]
    model.embed.register_forward_pre_hook(lambda module, inputs: sizes.append(inputs[0].numel()))
    model.prefill(tokens, caches[0], chunk_tokens=100)
    assert max(sizes) == 6 * 16 <= 100 and sum(sizes) == 6 * 64
    model.prefill(tokens, caches[1])
    torch.testing.assert_close(caches[0].layers, caches[1].layers, atol=1e-5, rtol=1e-5)
