"""What only a GPU can show: every fast path against its plain twin. Skipped where there is no GPU.

    python -m pytest tests/kernels/test_gpu.py -s       # prints the errors measured
"""
import copy

import pytest
import torch

from conftest import ARCHITECTURES, make_model, need_fast, relative_error as relative

need_fast()

import decoders  # noqa: E402
import fast.two_stream as two_stream  # noqa: E402
import ops  # noqa: E402
from decoders import DECODERS, VARIABLE_COUNT, Sampler  # noqa: E402
from fast.engine import say_once  # noqa: E402
from fast.inference import inference_model  # noqa: E402
from model import cast_for_inference  # noqa: E402
from parallel import compile_layers, select_kernels  # noqa: E402
from sample import generate, open_engine  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def gpu_model(name, **changes):
    """Small, but with the tile sizes of the real models: blocks of 256, state 128, head dimension 64."""
    settings = dict(vocab_size=1000, seq_len=1024, block_len=1024 if ARCHITECTURES[name][1] == 32 else 256, n_head=4,
                    d_model=256, d_state=128, mamba_head_dim=64, chunk_len=128)
    return make_model(name, torch.float32, noise=0.02, **{**settings, **changes})


@pytest.fixture(autouse=True)
def _restore_kernels():
    yield
    ops.FAST.clear()
    torch.compiler.reset()


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
    select_kernels("auto", "cuda")
    for dtype, compiled, limit in ((torch.float32, False, 2e-5), (torch.bfloat16, True, 3e-2)):
        if compiled:
            compile_layers(model)
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


@pytest.mark.parametrize("e", [52, 56, 64])
@pytest.mark.parametrize("l, blocks, last", [(256, 3, False), (256, 3, True), (256, 1, False), (256, 32, False),
                                             (256, 32, True), (16, 64, False), (16, 61, True)])
@pytest.mark.parametrize("flash", [True, False], ids=["flash-attn-4", "triton"])
def test_attention_in_training_equals_the_masked_one(monkeypatch, flash, l, blocks, last, e):
    """Values and gradients in bf16, from and to the layouts of model.Attention."""
    if flash and l % two_stream.TILE:
        pytest.skip("flash-attn-4 runs for blocks of whole tiles")
    if flash and not (two_stream.hopper("cuda") and not two_stream.no_flash()):
        pytest.skip("needs flash-attn-4 on Hopper: pip install -r requirements-gpu.txt")
    monkeypatch.setattr(two_stream, "no_flash", lambda: "" if flash else "faster")
    b, h = (2, 3) if l * blocks < 8192 else (1, 1)             # 8192 tokens, as the 87M models train on
    s = blocks * l
    torch.manual_seed(0)
    clean, noisy = ([torch.randn(b, n, h, e, device="cuda").bfloat16() for _ in range(3)] for n in (s - l, s))

    def run(attention, masks, dtype):
        inputs = [x.to(dtype).requires_grad_() for x in clean + noisy]
        q, *rest = (x.transpose(1, 2) for x in inputs)
        y_clean, y = attention((None if last else q, *rest[:2]), rest[2:], masks)
        assert (y_clean is None) == last
        out = [y] if last or blocks == 1 else [y_clean, y]
        g = torch.Generator("cuda").manual_seed(1)
        # A single block has no clean tokens, and the last layer no clean queries: these inputs get no gradient.
        used = inputs[3 if blocks == 1 else int(last):]
        return out + list(torch.autograd.grad(out, used, [
            torch.randn(o.shape, generator=g, device="cuda").to(dtype) for o in out]))
    device = torch.device("cuda", 0)
    got = run(two_stream.two_stream_attention, two_stream.two_stream_masks(s, l, device), torch.bfloat16)
    want = run(ops.two_stream_attention.plain, ops.two_stream_masks.plain(s, l, device), torch.float64)
    worst = max(relative(a, b) for a, b in zip(got, want))
    print(f"\n{'flash-attn-4' if flash else 'triton'}, {blocks} blocks, e = {e}: {worst:.1e}", end="")
    assert worst < 1e-2


@pytest.mark.parametrize("last", [False, True])
def test_gradients_of_attention_at_the_size_of_training_are_the_same_in_every_launch(last):
    """Against FlexAttention's Triton kernels, in tiles of 64 tokens: a race spoils a tile in some launches."""
    device = torch.device("cuda", 0)
    if not (two_stream.hopper(device) and not two_stream.no_flash()):
        pytest.skip("needs flash-attn-4 on Hopper: pip install -r requirements-gpu.txt")
    b, h, s, l, e = 8, 8, 8192, 256, 56                        # a micro-batch of the 87M models
    torch.manual_seed(0)
    inputs = [torch.randn(b, n, h, e, device=device).bfloat16().transpose(1, 2).requires_grad_()
              for n in 3 * [s - l] + 3 * [s]][last:]
    junk, masks = torch.randn(4096, 4096, device=device).bfloat16(), two_stream.two_stream_masks(s, l, device)
    clean, noisy = ([None] * last + inputs[:3 - last]), inputs[3 - last:]

    def run(flash):
        out = two_stream.two_stream_attention(clean, noisy, (*masks[:2], flash))[last:]
        return [x.detach().float() for x in (*out, *torch.autograd.grad(out, inputs, [o.detach() for o in out]))]

    def norm_of_tiles(x):
        return x.unflatten(2, (-1, 64)).norm(dim=(3, 4))                                    # (b, h, s / 64)
    want, worst = run(False), torch.zeros((), device=device)
    for i in range(200):
        for _ in range(i % 4):                                 # varies what runs just before
            junk @ junk
        for x, w in zip(run(True), want):
            worst = torch.maximum(worst, (norm_of_tiles(x - w) / norm_of_tiles(w)).max())
    print(f"\nworst tile of 200 launches: {worst.item():.1e}", end="")
    assert worst < 0.03


def continue_prompts(model, lengths, engine, length=150, decoder="random", **rest):
    """Generation with block length 64 and draws that depend on the row alone. engine: a name, or what open_engine
    returned."""
    model, new_engine = open_engine(engine, model) if isinstance(engine, str) else engine
    # Random weights are nearly as sure of all positions, and rounding would order them. Here all are within the bounds.
    sampler = Sampler(list(range(len(lengths))), decoder, 12, threshold=0.0015, entropy_bound=1e3, mask_id=999)
    text = torch.randint(0, 999, (512,), generator=torch.Generator().manual_seed(3))
    prompts = [text[i:i + n] for i, n in enumerate(lengths)]
    return generate(model, prompts, length, sampler, new_engine, **rest)


@pytest.mark.parametrize("name", ["bdlm_attention", "mamba_h"])
@pytest.mark.parametrize("decoder", DECODERS)
def test_cuda_graphs_give_the_tokens_of_the_plain_loop_in_every_decoder(monkeypatch, name, decoder):
    """Prompts of different lengths, rows that end at different steps, an end-of-text, a watcher. `confidence` has the
    logits of 20 positions at a time."""
    select_kernels("auto", "cuda")
    monkeypatch.setattr(decoders, "MAX_LOGITS", 64_000 if decoder in VARIABLE_COUNT else 20_000)   # of 64 or 20 positions
    model = gpu_model(name, block_len=64).cuda()
    lengths = (5, 70, 128, 200)
    say_once.cache_clear()
    plain = continue_prompts(model, lengths, "simple", decoder=decoder)
    stop, steps = int(plain.tokens[1][100]), []
    for engine in ("fused", "graphs", "auto"):
        out = continue_prompts(model, lengths, engine, decoder=decoder)
        assert all(torch.equal(a, b) for a, b in zip(out.tokens, plain.tokens)), engine
        cut = continue_prompts(model, lengths, engine, decoder=decoder, stop_token=stop,
                               on_step=lambda xt: steps.append(int((xt == 999).sum())))
        assert len(cut.tokens[1]) <= 101
        assert all(torch.equal(a, b[:len(a)]) for a, b in zip(cut.tokens, plain.tokens)), engine
        assert len(steps) == cut.forward_passes and steps[-1] == 0
        steps.clear()
    assert say_once.cache_info().currsize == 0          # auto took the graphs


@pytest.mark.parametrize("decoder", DECODERS)
def test_the_host_never_waits_inside_a_block(decoder):
    """Except where the logits say how many tokens a step reveals: it asks before every step whether a mask is left."""
    select_kernels("auto", "cuda")
    model, masks = gpu_model("mamba_h", block_len=64).cuda(), torch.full((2, 64), 999, device="cuda")
    prepared, new_engine = open_engine("graphs", model)
    sampler = Sampler([0, 1], decoder, 12, threshold=0.0015, entropy_bound=1e3, mask_id=999)
    blocks = new_engine(prepared, prepared.new_cache(2, 64), sampler, 64)
    torch.cuda.set_sync_debug_mode("default" if decoder in VARIABLE_COUNT else "error")
    try:
        blocks.commit(blocks.decode(masks, 64))
        x0 = blocks.decode(masks, 64)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (x0 != 999).all() and blocks.cache.lengths.tolist() == [64, 64] and blocks.name == "graphs"
    if decoder in VARIABLE_COUNT:
        assert 2 <= blocks.passes < 128
    else:
        assert blocks.passes == 2 * (64 if decoder == "first_hitting" else 6)


def test_a_step_that_cannot_be_recorded_runs_without_a_graph(capsys, monkeypatch):
    select_kernels("auto", "cuda")
    model = gpu_model("mamba_h", block_len=64).cuda()
    plain, pick = continue_prompts(model, (5, 70), "simple"), Sampler.pick
    monkeypatch.setattr(Sampler, "pick", lambda self, logits, *rest: (
        pick(self, logits + 0 * float(logits[0, 0, 0]), *rest)))
    say_once.cache_clear()
    out = continue_prompts(model, (5, 70), "auto")      # float() waits for the device
    assert all(torch.equal(a, b) for a, b in zip(out.tokens, plain.tokens))
    assert "no CUDA graphs: one could not be recorded" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["bdlm_attention", "mamba_h"])
def test_fast_paths_equal_the_plain_twins_after_131072_tokens(name):
    """Logits of the next block, against plain twins in fp32 with the same (for bf16: rounded) weights; with prepared
    weights those of the block after it, in one pass with a commit."""
    # Drawn on the CPU: a recording that failed, as in a test above, leaves the GPU's generator unusable
    # (github.com/pytorch/pytorch/issues/171263).
    tokens, t = torch.randint(0, 999, (1, 131_072 + 512)).cuda(), torch.ones(1, device="cuda")
    prefix, block, after = tokens.split([131_072, 256, 256], 1)
    for dtype, limit in ((torch.float32, 1e-4), (torch.bfloat16, 4e-2)):
        logits = []
        for kernels in ("torch", "auto"):
            select_kernels(kernels, "cuda")
            model = cast_for_inference(gpu_model(name, n_layer=3), dtype).cuda()
            prepared = inference_model(model, dtype)
            model = model.float() if kernels == "torch" else model
            cache = model.new_cache(1, 131_072 + 256)
            model.prefill(prefix, cache, 1024 if kernels == "torch" else 4096)                # plain masks are large
            logits.append([model.logits(model.denoise_hidden(block, cache, t))[..., :-1]])
            if kernels == "torch":
                model.commit(block, cache)
                logits[0].append(model.logits(model.denoise_hidden(after, cache, t))[..., :-1])
            else:
                hidden = prepared.commit_and_denoise_hidden(block, after, cache, t)
                logits[1].append(prepared.logits(hidden)[..., :-1])
        errors = [relative(got, want) for got, want in zip(logits[1], logits[0])]
        print(f"\n{name} {dtype}: {errors[0]:.1e}, {errors[1]:.1e}", end="")
        assert max(errors) < limit
