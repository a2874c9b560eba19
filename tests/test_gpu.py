"""What only a GPU can show: every fast path against its plain twin. Skipped where there is none.

    python -m pytest tests/test_gpu.py -s       # prints the errors measured
"""
import copy

import pytest
import torch

import block_graph
import ops
import sample
from conftest import ARCHITECTURES
from model import BlockDiffusionLM, ModelConfig
from sample import Sampler, generate, load_prefix, prepare_for_inference, read_prefix, save_prefix, say_once

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


@pytest.mark.parametrize("name, time", [*((name, False) for name in ARCHITECTURES), ("mamba_h", True),
                                        ("bdlm_attention", True)])
def test_fast_paths_equal_the_plain_twins_in_value_and_gradient(name, time):
    model = gpu_model(name, time_conditioning=time)
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
        fast = fast.detach()
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
        cache.clear()
        model.prefill(x0[:, :512], cache)               # the last one again, in one pass with a commit
        out = model.logits(model.commit_and_denoise_hidden(x0[:, 512:768], xt[:, 768:], cache, t[:, 3]))
        worst = max(worst, relative(out[..., :-1], logits[:, 768:, :-1]))
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


def continue_prompts(model, lengths, engine, length=150, order="random", prefix=None, **rest):
    """Generation with block length 64 and draws that depend on the row alone."""
    sampler = Sampler(list(range(len(lengths))), order, tokens_per_step=12, threshold=0.0015, mask_id=999)
    text = torch.randint(0, 999, (512,), generator=torch.Generator().manual_seed(3))
    prompts = [text[i:i + n] for i, n in enumerate(lengths)]
    return generate(model, prompts, length, sampler, engine=engine, prefix=prefix, **rest)


@pytest.mark.parametrize("name", ["bdlm_attention", "mamba_h"])
@pytest.mark.parametrize("order", ["random", "confidence", "threshold", "first_hitting"])
def test_cuda_graphs_give_the_tokens_of_the_plain_loop_in_every_decoder(monkeypatch, name, order):
    """Prompts of different lengths, rows that finish at different steps, an end-of-text, a watcher; where
    all positions need logits, these are made for 20 at a time."""
    ops.select_kernels("auto", "cuda")
    monkeypatch.setattr(sample, "LOGITS", 20_000)
    model = prepare_for_inference(gpu_model(name, block_len=64).cuda(), torch.float32)
    lengths = (5, 70, 128, 200)
    say_once.cache_clear()
    plain = continue_prompts(model, lengths, "simple", order=order)
    stop, steps = int(plain.tokens[1][100]), []
    for engine in ("fused", "graphs", "auto"):
        out = continue_prompts(model, lengths, engine, order=order)
        assert all(torch.equal(a, b) for a, b in zip(out.tokens, plain.tokens)), engine
        cut = continue_prompts(model, lengths, engine, order=order, stop_token=stop,
                               on_step=lambda xt: steps.append(int((xt == 999).sum())))
        assert len(cut.tokens[1]) <= 101
        assert all(torch.equal(a, b[:len(a)]) for a, b in zip(cut.tokens, plain.tokens)), engine
        assert len(steps) == cut.forward_passes and steps[-1] == 0
        steps.clear()
    assert say_once.cache_info().currsize == 0          # auto took the graphs


@pytest.mark.parametrize("order", sample.ORDERS)
def test_the_host_never_waits_inside_a_block(monkeypatch, order):
    ops.select_kernels("auto", "cuda")
    model = prepare_for_inference(gpu_model("mamba_h", block_len=64).cuda(), torch.float32)
    masks = torch.full((2, 64), 999, device="cuda")
    def make(engine):
        sampler = Sampler([0, 1], order, 12, threshold=0.0015, mask_id=999)
        return sample.make_decoder(engine, model, model.new_cache(2, 64), sampler, 64)
    decoder, plain = make("graphs"), make("fused")
    launched, launch = [], block_graph.BlockGraph.launch
    monkeypatch.setattr(block_graph.BlockGraph, "launch", lambda graph: launched.append(graph) or launch(graph))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for commit in (False, True):
            x0 = decoder.decode(masks, commit, 64)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (x0 != 999).all() and decoder.cache.lengths.tolist() == [64, 64]
    assert launched == [decoder.blocks[False], decoder.blocks[True]]
    plain.decode(masks, False, 64)
    assert torch.equal(plain.decode(masks, True, 64), x0) and decoder.passes == plain.passes
    if order == "threshold":
        assert 2 < decoder.passes < 128
    else:
        assert decoder.passes == 2 * (64 if order == "first_hitting" else 6)


def test_without_a_loop_on_the_device_the_host_asks_and_says_why(monkeypatch, capsys):
    ops.select_kernels("auto", "cuda")
    model = prepare_for_inference(gpu_model("mamba_h", block_len=64).cuda(), torch.float32)
    say_once.cache_clear()
    looped = continue_prompts(model, (5, 70), "graphs", order="threshold")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(block_graph, "WHILE", 77)       # which no driver knows
    asked = continue_prompts(model, (5, 70), "graphs", order="threshold")
    assert all(torch.equal(a, b) for a, b in zip(looped.tokens, asked.tokens))
    assert looped.forward_passes == asked.forward_passes
    assert "steps are launched one by one" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["bdlm_attention", "mamba_h"])
@pytest.mark.parametrize("order", ["random", "confidence"])
@pytest.mark.parametrize("time", [False, True])
def test_prepared_weights_in_graphs_give_the_tokens_of_the_model_without_a_cache(name, order, time):
    """In fp32: folded and merged weights, cut products and kernels against the training model's own. Where
    two probabilities differ by less than rounding the confident order may turn; with this text none do."""
    model = gpu_model(name, block_len=64, seq_len=512, time_conditioning=time).cuda()
    prompts = torch.randint(0, 999, (2, 70), generator=torch.Generator().manual_seed(1)).cuda()

    sampler = Sampler([0, 1], order, 12, mask_id=999)
    want = model.generate_naive(prompts, 130, lambda xt, logits_fn, begin: sample.decode_block(
        xt, logits_fn, sampler, begin=begin))
    ops.select_kernels("auto", "cuda")
    model = prepare_for_inference(model, torch.float32)
    for compiled in (False, True):
        if compiled:
            model.compile_layers("denoise", "commit_and_denoise")
        out = generate(model, list(prompts), 130, sampler, engine="graphs")
        assert torch.equal(torch.stack(out.tokens), want)


def test_without_what_graphs_need_generation_goes_on_and_says_why(capsys):
    model = prepare_for_inference(gpu_model("mamba_h", block_len=64).cuda(), torch.float32)
    ops.select_kernels("torch", "cuda")
    say_once.cache_clear()
    plain, out = (continue_prompts(model, (5, 70), engine) for engine in ("simple", "auto"))
    assert all(torch.equal(a, b) for a, b in zip(out.tokens, plain.tokens))
    err = capsys.readouterr().err
    assert err.count("no CUDA graphs") == 1 and "Triton kernels" in err


def test_a_step_that_cannot_be_recorded_runs_without_a_graph(capsys, monkeypatch):
    ops.select_kernels("auto", "cuda")
    model = prepare_for_inference(gpu_model("mamba_h", block_len=64).cuda(), torch.float32)
    plain, pick = continue_prompts(model, (5, 70), "simple"), Sampler.pick
    monkeypatch.setattr(Sampler, "pick", lambda self, logits, *rest: (
        pick(self, logits + 0 * float(logits[0, 0, 0]), *rest)))
    say_once.cache_clear()
    out = continue_prompts(model, (5, 70), "auto")      # float() waits for the device
    assert all(torch.equal(a, b) for a, b in zip(out.tokens, plain.tokens))
    assert "no CUDA graphs: one could not be recorded" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_going_on_from_a_saved_prompt_equals_going_on_from_the_prompt_on_the_gpu(dtype, tmp_path):
    ops.select_kernels("auto", "cuda")
    model = prepare_for_inference(gpu_model("mamba_h", block_len=64).cuda(), dtype)
    want = continue_prompts(model, (200,), "graphs")
    save_prefix(str(tmp_path / "cache"), model, read_prefix(model, want.tokens[0][:200].cpu()))
    prefix = load_prefix(str(tmp_path / "cache"), model)
    assert torch.equal(continue_prompts(model, (0,), "graphs", prefix=prefix).tokens[0], want.tokens[0])


@pytest.mark.parametrize("name", ["bdlm_attention", "mamba_h"])
def test_fast_paths_equal_the_plain_twins_after_131072_tokens(name):
    """Logits of the next block, against plain twins in fp32 with the same (for bf16: rounded) weights."""
    tokens = torch.randint(0, 999, (1, 131_072 + 256), device="cuda")
    for dtype, limit in ((torch.float32, 1e-4), (torch.bfloat16, 4e-2)):
        logits = []
        for kernels, precision in (("torch", torch.float32), ("auto", dtype)):
            ops.select_kernels(kernels, "cuda")
            model = gpu_model(name, n_layer=3).to(dtype).to(precision).cuda()
            cache = model.new_cache(1, 131_072)
            model.prefill(tokens[:, :-256], cache)
            logits.append(model.denoise(tokens[:, -256:], cache, torch.ones(1, device="cuda"))[..., :-1])
        error = relative(logits[1], logits[0])
        print(f"\n{name} {dtype}: {error:.1e}", end="")
        assert error < limit
