"""The model: cache, streams, scans and loss. Each test proves a sentence of the README; equalities are in fp64."""
import dataclasses
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import ops
from bench import train_flops
from conftest import (ARCHITECTURES, BLOCK_MODELS, all_models, block_models, both_times, make_batch, make_model,
                      relative_error)
from model import BlockDiffusionLM, ModelConfig


@pytest.mark.parametrize("name, block_len", [*((name, ARCHITECTURES[name][1]) for name in ARCHITECTURES),
                                             *((name, 1) for name in BLOCK_MODELS)])
@both_times
def test_cached_logits_equal_all_block_logits_for_every_block(name, block_len, time_conditioning):
    """So a block depends on its own noisy tokens and on earlier clean ones alone: the cached model gets no others. A block
    model with blocks of one token is autoregressive."""
    model = make_model(name, block_len=block_len, time_conditioning=time_conditioning)
    x0, xt, t = make_batch(model)
    logits = model.logits(model.all_block_hidden(x0, xt, t))
    cache = model.new_cache(3, 32)
    for i in range(32 // block_len):
        block = slice(i * block_len, (i + 1) * block_len)
        torch.testing.assert_close(model.logits(model.denoise_hidden(xt[:, block], cache, t[:, i])), logits[:, block])
        if (i + 1) * block_len < 32:
            model.commit(x0[:, block], cache)


@block_models
def test_the_cache_is_bit_identical_for_every_t(name):
    """A cache is made block by block. Whatever t the blocks are denoised at before and after they are committed, it is
    the same, and it is that of one pass over the prefix."""
    model = make_model(name, time_conditioning=True)
    x0, xt, _ = make_batch(model)
    whole, caches, logits = model.new_cache(3, 24), [], []
    model.prefill(x0[:, :24], whole)
    for level in (0.001, 0.5, 1.0):
        cache, t = model.new_cache(3, 24), torch.full((3,), level)
        for i in range(3):
            model.denoise_hidden(xt[:, 8 * i:8 * i + 8], cache, t)
            model.commit(x0[:, 8 * i:8 * i + 8], cache)
        logits.append(model.logits(model.denoise_hidden(xt[:, 24:], cache, t)))
        caches.append(cache.layers)
        torch.testing.assert_close(caches[-1], caches[0], rtol=0, atol=0)
        torch.testing.assert_close(caches[-1], whole.layers)
    assert not torch.equal(logits[0], logits[1]), "t must reach the active block"


@block_models
def test_block_losses_reach_every_earlier_clean_token_unless_the_prefix_is_detached(name):
    """In the hybrid, attention layers are silenced: the gradients go through Mamba states alone."""
    logits = {}
    for detach in (False, True):
        model = make_model(name, detach_prefix=detach)
        for layer in model.layers[::2] if model.config.hybrid else ():
            layer.mixer.out_proj.weight.data.zero_()
        x0, xt, t = make_batch(model, batch=1)
        inputs, embed = [], model.embed.forward
        model.embed.forward = lambda tokens: inputs.append(embed(tokens).detach().requires_grad_()) or inputs[-1]
        logits[detach] = model.logits(model.all_block_hidden(x0, xt, t))[..., :-1]
        clean = inputs[0]                               # (1, 24, d): blocks 0..2
        for k, block in enumerate(logits[detach].split(8, 1)):
            grad, = torch.autograd.grad(block.logsumexp(-1).sum(), clean, retain_graph=True, materialize_grads=True)
            assert (grad[0] != 0).any(-1).tolist() == [i < 8 * k and not detach for i in range(24)]
    assert torch.equal(*logits.values()), "a detached prefix changes gradients alone"


@pytest.mark.parametrize("scan, moved", [("fwd", [5, 6, 7]), ("rev", [0, 1, 2, 3, 4, 5])])
def test_a_token_reaches_later_outputs_by_the_forward_scan_and_earlier_ones_by_the_reverse_scan(scan, moved):
    """Token 5 of 8 changes while one scan runs alone."""
    mixer = make_model("mamba_h", reverse_scan=scan == "rev").layers[1].mixer
    if scan == "rev":
        mixer.fwd.out_proj.weight.data.zero_()
    u = torch.randn(2, 8, 16, dtype=torch.float64)
    changed = u.clone()
    changed[:, 5] += 1
    different = (mixer.scan_both(u) != mixer.scan_both(changed)).any(-1).any(0)        # (8,)
    assert different.nonzero().flatten().tolist() == moved


@pytest.mark.parametrize("first", [0, 262_135])
def test_attention_scores_are_those_of_complex_numbers_turned_by_their_distance(first):
    """Re(q conj(k) e^(i (m - n) f)), summed over channels, at the start and the end of the rotary capacity."""
    model, e, theta = make_model("attention"), 8, 10_000.0
    attention, rope = model.layers[0].mixer, model.rope(262_144)[:, first:first + 9]
    u = torch.randn(1, 1, 16, dtype=torch.float64).expand(2, 9, 16)            # nine times the same token
    q, k, _ = attention.project(u, rope)                                       # (b, h, 9, e)
    q0, k0, _ = attention.qkv(u[:, :1]).unflatten(-1, (3, 2, e)).transpose(1, 3).unbind(2)     # (b, h, 1, e) each
    pair = torch.complex(*q0.chunk(2, -1)) * torch.complex(*k0.chunk(2, -1)).conj()            # (b, h, 1, e / 2)
    distance = torch.arange(9.)[:, None] - torch.arange(9.)                    # m - n
    turn = torch.exp(1j * distance[..., None] * theta ** (-torch.arange(0, e, 2).double() / e))    # (9, 9, e / 2)
    torch.testing.assert_close(q @ k.mT, (pair[:, :, None] * turn).real.sum(-1), rtol=0, atol=1e-9)


def test_an_untrained_model_is_as_the_docstring_says():
    model = BlockDiffusionLM(ModelConfig(vocab_size=23, seq_len=32, block_len=8, attn_every=2, n_layer=8, n_head=2,
                                         d_model=64, d_state=8, mamba_head_dim=2), init_std=0.1, embed_std=1.0)
    x0, xt, t = make_batch(model)
    is_masked, std = xt == model.config.mask_id, {name: float(p.detach().std()) for name, p in model.named_parameters()}
    weight = (1 / t).repeat_interleave(8, 1)[is_masked].sum() / x0.numel()
    assert model.loss(x0, is_masked, t).item() == pytest.approx(float(weight) * math.log(22), rel=1e-5)
    assert std["embed.weight"] == pytest.approx(1, rel=0.1)
    assert std["layers.0.mixer.qkv.weight"] == pytest.approx(0.1, rel=0.1)
    for name in ("layers.0.mixer.out_proj", "layers.1.mixer.fwd.out_proj", "layers.1.mlp.2"):
        assert std[f"{name}.weight"] == pytest.approx(0.1 / 4, rel=0.1)        # sqrt(2 * 8) = 4
    mambas = [mamba for layer in model.layers[1::2] for mamba in (layer.mixer.fwd, layer.mixer.rev)]
    A, dt, D, *convolution = (torch.cat([getattr(mamba, name).detach().flatten() for mamba in mambas])
                              for name in ("A_log", "dt_bias", "D", "conv_weight", "conv_bias"))
    for values, *ends in ((A.exp(), 1, 16), (torch.nn.functional.softplus(dt), 1e-3, 0.1), (D, 1, 1),
                          *((values, -0.5, 0.5) for values in convolution)):
        assert [float(values.min()), float(values.max())] == pytest.approx(ends, rel=0.04)


@all_models
@both_times
def test_all_block_loss_is_the_sum_of_per_block_losses_with_the_same_gradients(name, time_conditioning):
    model = make_model(name, time_conditioning=time_conditioning)
    x0, xt, t = make_batch(model, batch=2)
    is_masked, l, total = xt == model.config.mask_id, model.config.block_len, 0
    for k in range(32 // l):                            # only block k has masks, after its clean prefix
        stop = (k + 1) * l
        only = is_masked[:, :stop].clone()
        only[:, :stop - l] = False
        total = total + model.loss(x0[:, :stop], only, t[:, :k + 1]) * stop / 32
    whole = model.loss(x0, is_masked, t)
    torch.testing.assert_close(total, whole)
    torch.testing.assert_close(*(torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)
                                 for loss in (total, whole)))


@pytest.mark.parametrize("name", ["attention", "diffumamba_h"])
def test_a_full_sequence_model_is_a_block_model_with_one_block(name):
    full = make_model(name)
    block = BlockDiffusionLM(dataclasses.replace(full.config, seq_len=64, block_len=32)).double()
    block.load_state_dict(full.state_dict())
    x0, xt, t = make_batch(full)
    one, other = (model.logits(model.all_block_hidden(x0, xt, t)) for model in (block, full))
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("attn_every, block_len, reverse_scan", [
    (1, 256, True), (1, 64, True), (3, 256, True), (3, 64, True), (3, 64, False)])
def test_train_flops_are_those_that_torch_counts(attn_every, block_len, reverse_scan):
    """With every token masked. Torch counts no attention on a CPU: its visible pairs are counted by the rule here."""
    c = ModelConfig(vocab_size=500, seq_len=256, block_len=block_len, attn_every=attn_every, n_layer=4, n_head=4,
                    d_model=256, chunk_len=64, reverse_scan=reverse_scan)
    model, x0 = BlockDiffusionLM(c), torch.zeros(1, 256, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model.loss(x0, x0 == 0, torch.ones(1, 256 // block_len)).backward()
    n_clean = 256 - block_len
    at = torch.arange(n_clean + 256)
    seen = ops.two_stream_rule(at[:, None], at, block_len, n_clean)
    pairs = sum(int(seen[n_clean if i == 3 else 0:].sum()) for i in range(0, 4, attn_every))   # last layer: noisy alone
    assert train_flops(c, 256, masked=1.0) == pytest.approx(counter.get_total_flops() + 3 * 4 * pairs * 256, rel=0.02)


@block_models
def test_a_cache_grows_with_its_length_in_attention_layers_alone(name):
    """Attention layers add keys and values. The state of a Mamba layer is constant, its scan's part in fp32."""
    model = make_model(name, torch.bfloat16)
    c, short, long = model.config, model.new_cache(2, 32), model.new_cache(2, 64)
    states = [state for i, state in enumerate(long.layers) if i % c.attn_every]
    assert len(states) == (2 if c.hybrid else 0)
    assert long.nbytes - short.nbytes == 2 * 32 * 2 * c.d_model * 2 * (4 - len(states))  # rows, tokens, k and v, bytes
    if name == "mamba_h":
        assert all(ssm.dtype == torch.float32 and conv.dtype == torch.bfloat16 for conv, ssm in states)


def test_mamba_layers_read_131072_tokens_alike_in_chunks_of_any_size():
    """Chunks in fp32 against one pass in fp64. The attention layers are removed, because their work is quadratic."""
    model = make_model("mamba_h", torch.float32, n_layer=2, d_model=8, d_state=4, mamba_head_dim=4, seq_len=2048,
                       block_len=256, chunk_len=64)
    model.layers, logits = model.layers[1:], []
    tokens = torch.randint(0, 22, (1, 131_072 + 256), generator=torch.Generator().manual_seed(3))
    for dtype, chunk in ((torch.float32, 2816), (torch.float64, 131_072)):
        cache = model.to(dtype).new_cache(1, 131_072)
        model.prefill(tokens[:, :131_072], cache, chunk)
        logits.append(model.logits(model.denoise_hidden(tokens[:, 131_072:], cache, torch.ones(1)))[..., :-1])
    assert relative_error(*logits) < 1e-5
