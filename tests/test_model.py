"""What the README says of the model, each sentence as a test. fp64 wherever it is an equality."""
import dataclasses
import os

import numpy as np
import pytest
import torch

import paper
from checkpoint import load_model, save_checkpoint
from configurator import UserError
from conftest import ARCHITECTURES, BLOCK_MODELS, ROOT, make_batch, make_model
from model import BlockDiffusionLM, ModelConfig, config_from_file

PARAMETERS = {
    "attention_87m": 89_172_160, "bdlm_attention_87m": 89_172_160,
    "diffumamba_h_87m": 96_977_416, "mamba_h_87m": 96_977_416,
    "attention_350m": 353_026_688, "bdlm_attention_350m": 353_026_688,
    "diffumamba_h_350m": 399_527_000, "mamba_h_350m": 350_974_180}

both_times = pytest.mark.parametrize("time_conditioning", [False, True])
all_models = pytest.mark.parametrize("name", ARCHITECTURES)
block_models = pytest.mark.parametrize("name", BLOCK_MODELS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_counts_are_the_papers_to_the_unit(name):
    with torch.device("meta"):
        n_params = BlockDiffusionLM(config_from_file(name)).n_params
    assert n_params == PARAMETERS[name]
    assert f"{n_params / 1e6:.2f}" == f"{paper.PARAMS[name]:.2f}"


def test_every_config_file_describes_a_model():
    files = list(ROOT.glob("config/*.py"))
    assert len(files) >= 13 and all(isinstance(config_from_file(path), ModelConfig) for path in files)


@all_models
@both_times
def test_cached_logits_equal_all_block_logits_for_every_block(name, time_conditioning):
    model = make_model(name, time_conditioning=time_conditioning)
    x0, xt, t = make_batch(model)
    l = model.config.block_len
    logits = model.all_block_logits(x0, xt, t)
    cache = model.new_cache(3, 32)
    for i in range(32 // l):
        block = slice(i * l, i * l + l)
        torch.testing.assert_close(model.denoise(xt[:, block], cache, t[:, i]), logits[:, block])
        if i + 1 < 32 // l:
            model.commit(x0[:, block], cache)


@block_models
@pytest.mark.parametrize("chunk_tokens", [8, 16, 4096])
def test_a_prefix_read_in_chunks_leaves_the_same_cache(name, chunk_tokens):
    model = make_model(name)
    x0, xt, t = make_batch(model)
    cache = model.new_cache(3, 32)
    read = []
    model.prefill(x0[:, :24], cache, chunk_tokens, read.append)
    assert sum(read) == 24 and len(read) == (1 if chunk_tokens == 4096 else 3)
    torch.testing.assert_close(model.denoise(xt[:, 24:], cache, t[:, 3]),
                               model.all_block_logits(x0, xt, t)[:, 24:])


def contents(cache, length):
    """Copies of all that a cache holds of its first `length` tokens."""
    return [part[:, :, :length].clone() if part.size(2) == cache.max_len else part.clone()
            for state in cache.layers for part in state]


@block_models
def test_the_cache_is_bit_identical_for_every_t(name):
    """With timestep conditioning on, denoising at any t leaves the cache as it was, and block by block
    the caches come out equal whatever t the blocks between were denoised at."""
    model = make_model(name, time_conditioning=True)
    x0, xt, _ = make_batch(model)
    whole = model.new_cache(3, 32)
    model.prefill(x0[:, :24], whole)
    caches = []
    for level in (0.001, 0.5, 1.0):
        cache = model.new_cache(3, 32)
        for i in range(3):
            model.denoise(xt[:, 8 * i:8 * i + 8], cache, torch.full((3,), level))
            model.commit(x0[:, 8 * i:8 * i + 8], cache)
        before = contents(cache, 24)
        a = model.denoise(xt[:, 24:], cache, torch.full((3,), level))
        b = model.denoise(xt[:, 24:], cache, torch.full((3,), 0.7))
        assert not torch.equal(a, b), "t must reach the active block"
        caches.append(contents(cache, 24))
        for p, q, r, one_pass in zip(before, caches[-1], caches[0], contents(whole, 24)):
            assert torch.equal(p, q) and torch.equal(q, r)
            torch.testing.assert_close(q, one_pass)


@block_models
def test_a_noisy_or_future_token_changes_no_other_block_and_no_cache(name):
    model = make_model(name)
    x0, xt, t = make_batch(model, batch=1)
    logits = model.all_block_logits(x0, xt, t)
    for j in range(4):
        block = slice(8 * j, 8 * j + 8)
        changed = xt.clone()
        changed[:, 8 * j + 3] = (changed[:, 8 * j + 3] + 1) % model.config.vocab_size
        other = model.all_block_logits(x0, changed, t)
        same = [torch.equal(other[:, 8 * i:8 * i + 8], logits[:, 8 * i:8 * i + 8]) for i in range(4)]
        assert same == [i != j for i in range(4)], "a noisy token is seen by its own block alone"
        future = x0.clone()
        future[:, block] = (future[:, block] + 1) % model.config.mask_id
        other = model.all_block_logits(future, xt, t)
        same = [torch.equal(other[:, 8 * i:8 * i + 8], logits[:, 8 * i:8 * i + 8]) for i in range(4)]
        assert same == [i <= j for i in range(4)], "a clean token is seen by later blocks alone"


def test_block_losses_reach_every_earlier_clean_token_through_mamba_states_alone():
    model = make_model("mamba_h")
    for layer in model.layers[::2]:
        layer.mixer.out_proj.weight.data.zero_()        # cut every attention layer
    x0, xt, t = make_batch(model, batch=1)
    inputs = []
    embed = model.embed.forward
    model.embed.forward = lambda tokens: inputs.append(embed(tokens).detach().requires_grad_()) or inputs[-1]
    logits = model.all_block_logits(x0, xt, t)[..., :-1]
    clean = inputs[0]                                   # (1, 24, d): blocks 0..2
    for k in range(4):
        loss = logits[:, 8 * k:8 * k + 8].logsumexp(-1).sum()
        grad, = torch.autograd.grad(loss, clean, retain_graph=True, allow_unused=True)
        reached = grad[0].abs().sum(-1) > 0
        assert reached[:8 * k].all() and not reached[8 * k:].any()


@pytest.mark.parametrize("name", ["bdlm_attention", "mamba_h"])
def test_a_detached_prefix_changes_gradients_but_not_the_loss(name):
    """The ablation: no loss reaches an earlier block's clean tokens, which the objective itself trains."""
    losses, through_prefix = [], []
    for detach in (False, True):
        model = make_model(name, detach_prefix=detach)
        x0 = torch.randint(0, 21, (1, 32))
        x0[0, 0] = 21                                   # a token that appears in the first block alone
        xt = torch.full_like(x0, model.config.mask_id)
        hidden = model.all_block_hidden(x0, xt, torch.full((1, 4), 0.5, dtype=torch.float64))
        loss = hidden[:, 8:].square().mean()
        loss.backward()
        losses.append(loss.item())
        through_prefix.append(float(model.embed.weight.grad[21].norm()))
    assert losses[0] == losses[1] and through_prefix[0] > 0 and through_prefix[1] == 0


@pytest.mark.parametrize("silent, unmoved", [("rev", slice(0, 5)), ("fwd", slice(6, 8))])
def test_the_forward_scan_reads_what_came_before_and_the_reverse_scan_what_comes_after(silent, unmoved):
    """Token 5 of 8 moves, with the other direction cut out."""
    mixer = make_model("mamba_h").layers[1].mixer
    getattr(mixer, silent).out_proj.weight.data.zero_()
    u = torch.randn(2, 8, 16, dtype=torch.float64)
    changed = u.clone()
    changed[:, 5] += 1
    moved = (mixer.scan_both(u) != mixer.scan_both(changed)).any(-1).any(0)
    assert moved.tolist() == [i not in range(8)[unmoved] for i in range(8)]


def test_without_its_reverse_scan_a_mamba_layer_is_its_forward_scan():
    mixer, u = make_model("mamba_h", reverse_scan=False).layers[1].mixer, torch.randn(2, 8, 16, dtype=torch.float64)
    assert torch.equal(mixer.scan_both(u), mixer.fwd(u)[0])


@all_models
@both_times
def test_all_block_loss_is_the_sum_of_per_block_losses_with_the_same_gradients(name, time_conditioning):
    model = make_model(name, time_conditioning=time_conditioning)
    x0, xt, t = make_batch(model, batch=2)
    is_masked = xt == model.config.mask_id
    l = model.config.block_len
    whole = model.loss(x0, is_masked, t)
    grads = torch.autograd.grad(whole, list(model.parameters()), allow_unused=True)
    total = 0
    for k in range(32 // l):                            # block k alone, after its clean prefix
        stop = 8 * k + l
        only = is_masked[:, :stop].clone()
        only[:, :stop - l] = False
        total = total + model.loss(x0[:, :stop], only, t[:, :k + 1]) * stop / 32
    torch.testing.assert_close(total, whole)
    for a, b in zip(torch.autograd.grad(total, list(model.parameters()), allow_unused=True), grads):
        a, b = (torch.zeros(()) if g is None or not g.any() else g for g in (a, b))
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("attn_every", [1, 2])
def test_a_full_sequence_model_is_a_block_model_with_one_block(attn_every):
    full = make_model("attention" if attn_every == 1 else "diffumamba_h")
    block = BlockDiffusionLM(dataclasses.replace(full.config, seq_len=64, block_len=32)).double()
    block.load_state_dict(full.state_dict())
    x0, xt, t = make_batch(full)
    assert block.config.full_sequence is False and full.config.full_sequence is True
    torch.testing.assert_close(block.all_block_logits(x0, xt, t), full.all_block_logits(x0, xt, t))


@block_models
def test_block_length_one_is_an_autoregressive_model(name):
    model = make_model(name, block_len=1)
    x0, xt, t = make_batch(model, batch=2)
    masked = torch.full_like(x0, model.config.mask_id)
    logits = model.all_block_logits(x0, masked, torch.ones(2, 32))
    cache = model.new_cache(2, 32)
    for i in range(32):
        torch.testing.assert_close(model.denoise(masked[:, :1], cache, torch.ones(2)), logits[:, i:i + 1])
        model.commit(x0[:, i:i + 1], cache)


def test_the_mask_token_has_probability_zero():
    model = make_model("mamba_h")
    assert (model.all_block_logits(*make_batch(model))[..., -1] == float("-inf")).all()


def test_weight_decay_falls_on_matrices_only():
    model = make_model("mamba_h")
    decay, rest = model.param_groups(0.1)
    names = {id(p): n for n, p in model.named_parameters()}
    assert {names[id(p)].rsplit(".", 1)[-1] for p in rest["params"]} <= {
        "bias", "weight", "norm_weight", "conv_bias", "A_log", "dt_bias", "D"}
    assert all("norm" in names[id(p)] for p in rest["params"] if names[id(p)].endswith("weight"))
    assert len(decay["params"]) + len(rest["params"]) == len(names) and rest["weight_decay"] == 0


def test_timesteps_have_the_precision_of_the_model():
    embedding = make_model("mamba_h", time_conditioning=True).time
    inside, t = [], torch.tensor([0.123456789012345], dtype=torch.float64)
    embedding.mlp.register_forward_hook(lambda module, inputs, output: inside.append(inputs[0]))
    embedding(t)
    freq = 10_000.0 ** (-np.arange(128) / 128)
    np.testing.assert_allclose(inside[0][0, :128].numpy(), np.cos(1000 * float(t) * freq), atol=1e-12)


# -- files --

def test_a_checkpoint_comes_back_as_it_was(tmp_path):
    model, path = make_model("mamba_h", torch.float32), str(tmp_path / "ckpt.pt")
    save_checkpoint(path, model, step=3, tokenizer="bytes")
    again, record = load_model(path)
    assert record["step"] == 3 and again.config == model.config
    for name, weight in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name


class Planted:
    """What a pickle would run when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_damaged_or_foreign_checkpoint_is_refused_and_reading_never_runs_code(tmp_path):
    path, ran = str(tmp_path / "ckpt.pt"), tmp_path / "ran"
    save_checkpoint(path, make_model("mamba_h"))
    whole = open(path, "rb").read()
    for damaged in (whole[:len(whole) // 2], b"", b"not a checkpoint"):
        open(path, "wb").write(damaged)
        with pytest.raises(UserError, match="not a whole nanoBDLM checkpoint"):
            load_model(path)
    for foreign in ({"a": 1}, {"model": Planted(str(ran))}):
        torch.save(foreign, path)
        with pytest.raises(UserError, match="not a whole nanoBDLM checkpoint"):
            load_model(path)
    assert not ran.exists()


def test_a_failed_save_leaves_the_checkpoint_before_it(tmp_path, monkeypatch):
    model, path = make_model("mamba_h"), str(tmp_path / "ckpt.pt")
    save_checkpoint(path, model, step=1)
    def full_disk(record, f):
        f.write(b"half a checkpoint")
        raise OSError(28, "No space left on device")
    for failure in (full_disk, lambda record, f: (_ for _ in ()).throw(KeyboardInterrupt())):
        monkeypatch.setattr(torch, "save", failure)
        with pytest.raises((UserError, KeyboardInterrupt)):
            save_checkpoint(path, model, step=2)
        assert load_model(path)[1]["step"] == 1
        assert os.listdir(tmp_path) == ["ckpt.pt"]


@block_models
def test_a_cache_grows_with_its_length_in_attention_layers_alone(name):
    """By their keys and values; Mamba layers keep a constant state, the scan's part of it in fp32."""
    c = make_model(name).config
    model = make_model(name, torch.bfloat16)
    short, long = model.new_cache(2, 32), model.new_cache(2, 64)
    attention = sum(i % c.attn_every == 0 for i in range(c.n_layer))
    assert long.nbytes - short.nbytes == 2 * 32 * 2 * c.d_model * 2 * attention    # rows, tokens, k and v, bytes
    states = [state for i, state in enumerate(long.layers) if i % c.attn_every]
    assert all(ssm.dtype == torch.float32 and conv.dtype == torch.bfloat16 for conv, ssm in states)
    assert len(states) == c.n_layer - attention
