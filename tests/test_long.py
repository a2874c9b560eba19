"""Long prefixes: the result does not depend on the chunks in which 131,072 tokens are read."""
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
