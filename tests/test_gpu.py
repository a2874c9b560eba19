"""What only a GPU can show: every fast path against its plain twin. Skipped where there is none.

    python -m pytest tests/test_gpu.py -s       # prints the errors measured
"""
import copy

import pytest
import torch

import ops
from conftest import ARCHITECTURES
from model import BlockDiffusionLM, ModelConfig
from sample import prepare_for_inference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def gpu_model(name, **changes):
    """Small, but with the tile sizes of the real models: blocks of 256, state 128, head dimension 64."""
    attn_every, block_len = ARCHITECTURES[name]
    torch.manual_seed(0)
    settings = dict(vocab_size=1000, seq_len=1024, block_len=1024 if block_len == 32 else 256, attn_every=attn_every,
                    n_layer=4, n_head=4, d_model=256, d_state=128)
    model = BlockDiffusionLM(ModelConfig(**{**settings, **changes}))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.02 * torch.randn_like(p))
    return model


@pytest.fixture(autouse=True)
def _restore_kernels():
    before = dict(ops.KERNELS)
    yield
    ops.KERNELS.update(before)
    torch.compiler.reset()


def relative(a, b):
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_fast_paths_equal_the_plain_twins_in_value_and_gradient(name):
    model = gpu_model(name)
    x0 = torch.randint(0, 999, (2, 1024))
    t, is_masked = model.draw_noise(x0, torch.Generator().manual_seed(1))
    exact = copy.deepcopy(model).double()
    loss = exact.loss(x0, is_masked, t.double())
    loss.backward()
    model = model.cuda()
    ops.select_kernels("auto", "cuda")
    for dtype, compiled, limit in ((torch.float32, False, 2e-5), (torch.bfloat16, True, 3e-2)):
        if compiled:
            model.compile_layers()
        model.zero_grad()
        with torch.autocast("cuda", dtype, enabled=dtype == torch.bfloat16):
            fast = model.loss(x0.cuda(), is_masked.cuda(), t.cuda())
        fast.backward()
        errors = {n: relative(p.grad, q.grad) for (n, p), q in zip(model.named_parameters(), exact.parameters())
                  if q.grad is not None and q.grad.norm() > 0}
        flat = [torch.cat([p.grad.flatten().double().cpu() for p in m.parameters() if p.grad is not None])
                for m in (model, exact)]
        whole, (worst, error) = relative(*flat), max(errors.items(), key=lambda e: e[1])
        print(f"\n{name} {dtype}: loss {abs(float(fast) - float(loss)):.1e}, all gradients {whole:.1e}, "
              f"worst {error:.1e} {worst}", end="")
        assert abs(float(fast) - float(loss)) < limit * float(loss) and whole < limit and error < 8 * limit


@pytest.mark.parametrize("name", ["bdlm_attention", "mamba_h"])
def test_cached_logits_equal_all_block_logits_on_the_gpu(name):
    ops.select_kernels("auto", "cuda")
    x0 = torch.randint(0, 999, (2, 1024), device="cuda")
    t, is_masked = gpu_model(name).draw_noise(x0)
    xt = x0.masked_fill(is_masked, 999)
    for dtype, limit in ((torch.float32, 2e-5), (torch.bfloat16, 2e-2)):
        model = gpu_model(name).cuda().to(dtype)
        with torch.no_grad():
            logits = model.all_block_logits(x0, xt, t)
        cache = model.new_cache(2, 1024)
        worst = 0
        for i in range(4):
            block = slice(256 * i, 256 * i + 256)
            if i == 2:                                  # the last two blocks with prepared weights
                prepare_for_inference(model, dtype)
            out = model.denoise(xt[:, block], cache, t[:, i])
            worst = max(worst, relative(out[..., :-1], logits[:, block, :-1]))
            model.commit(x0[:, block], cache)
        print(f"\n{name} {dtype}: {worst:.1e}", end="")
        assert worst < limit


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_twenty_training_steps_give_the_losses_of_the_plain_path_on_the_cpu(name):
    from train import ShardedAdamW
    losses = []
    for device, kernels in (("cuda", "auto"), ("cpu", "torch")):
        model = gpu_model(name, seq_len=512, block_len=512 if ARCHITECTURES[name][1] == 32 else 256,
                          n_layer=2).to(device)
        ops.select_kernels(kernels, device)
        if device == "cuda":
            model.compile_layers()
        optimizer = ShardedAdamW(model, 1e-3, (0.9, 0.95), 0.1)
        data = torch.randint(0, 999, (2, 512), generator=torch.Generator().manual_seed(5)).to(device)
        row = []
        for step in range(20):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=device == "cuda"):
                loss = model(data, [torch.Generator().manual_seed(100 * step + i) for i in range(2)])
            loss.backward()
            optimizer.step(1e-3, min(1.0, 1.0 / float(optimizer.reduce())))
            row.append(float(loss.detach()))
        losses.append(row)
    worst = max(abs(a - b) / b for a, b in zip(*losses))
    print(f"\n{name}: worst relative difference of 20 losses {worst:.1e}, last {losses[0][-1]:.4f}", end="")
    assert worst < 1e-2 and len(set(losses[0])) == 20
