"""
Compares each heavy operation with the libraries that a user would otherwise pick, at the sizes of 350M training or of
700M generation, and with the limit of the hardware: the time of its products at the measured speed of a large product,
or of its bytes at that of a copy, whichever is longer. The settings are those of bench.py; `only` names operations.

    python -m tools.compare_ops                         all operations
    python -m tools.compare_ops --only=mixer,adamw      some of them

Each generator below makes the tensors of one operation and yields its comparisons, the last arguments of `op_row`. On a
CPU the tensors are small.
"""
import dataclasses
import functools

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

import bench
import ops
from configurator import check, configure, script
from model import BlockDiffusionLM, cast_for_inference
from checkpoint import config_from_file
from parallel import Parallel, ShardedAdamW, hardware, pick_dtype, select_kernels


# ----------------------------------------------------------------------------------------------
# Pieces

def tensors(x):
    return [v for v in (x if isinstance(x, (tuple, list)) else [x]) if torch.is_tensor(v)]


def with_backward(f, inputs, weights=()):
    """A function that runs f and computes the gradients of all its tensor inputs and of these weights."""
    inputs = [x.detach().clone().requires_grad_() if torch.is_tensor(x) else x for x in inputs]
    d_outputs = []
    def step():
        outputs = tensors(f(*inputs))
        if not d_outputs:
            d_outputs.extend(torch.randn_like(o) for o in outputs)
        torch.autograd.grad(outputs, [*tensors(inputs), *weights], d_outputs)
    return step


def both_passes(name, ours, others, flops, weights=()):
    """
    Comparisons of the forward pass, and of forward and backward. ours: (function, inputs). others: {name: (function,
    inputs)}. weights: further inputs, which the functions know. The bytes counted: forward reads inputs and writes
    outputs; backward reads inputs and the gradients of outputs, and writes the gradients of inputs. Backward counts
    twice the FLOPs of forward; recomputation is not counted.
    """
    def forward(f, inputs):
        return torch.no_grad()(lambda: f(*inputs))
    read, written = (sum(v.nbytes for v in tensors(x)) for x in ([*ours[1], *weights], forward(*ours)()))
    yield (f"{name}, forward", forward(*ours), {k: forward(*pair) for k, pair in others.items()}, flops, read + written)
    both = functools.partial(with_backward, weights=weights)
    yield (f"{name}, forward + backward", both(*ours), {k: both(*pair) for k, pair in others.items()}, 3 * flops,
           3 * read + 2 * written)


# ----------------------------------------------------------------------------------------------
# The operations. factory: device and dtype of the tensors. big: full size, on a GPU; else small tensors for a test.
# compiled: apply torch.compile to plain functions that gain from it. A function imports its library when it is called:
# so a row says which one is missing.

def mixer_rows(factory, big, compiled):
    """The two Mamba mixers of a layer in training, on both streams. mamba-ssm: its scan in the plain mixer, with the
    convolution of causal-conv1d if that is installed."""
    b, s, l = (8, 8192, 256) if big else (1, 256, 64)
    config = dataclasses.replace(config_from_file("mamba_h_350m" if big else "laptop"), n_layer=2, vocab_size=64)
    model = cast_for_inference(BlockDiffusionLM(config), factory["dtype"]).to(factory["device"])
    mixer = model.layers[1].mixer
    run = torch.compile(mixer.two_stream, dynamic=False) if compiled else mixer.two_stream
    def plain(*inputs):
        with ops.plain():
            return run(*inputs)
    def with_mamba_ssm(*inputs):
        from fast import mamba_ssm
        mamba_ssm.library()                             # without the package its ImportError, which `timed` tells
        with ops.plain():
            mamba_ssm.select()
            return run(*inputs)
    d, n, di = config.d_model, config.d_state, config.d_inner
    clean, noisy = torch.randn(b, s - l, d, **factory), torch.randn(b * s // l, l, d, **factory)
    inputs = clean, noisy, None, None, False            # no positions, no masks; not the last layer
    products = mixer.fwd.in_proj.weight.numel() + mixer.fwd.out_proj.weight.numel()
    # Noisy tokens are scanned in both directions, in chunks of 64.
    flops = 2 * b * (3 * s - l) * (products + 64 * n + 64 * di + 2 * n * di)
    others = {"mamba-ssm": (with_mamba_ssm, inputs), "plain torch" + ", compiled" * compiled: (plain, inputs)}
    yield from both_passes("mixers of both streams", (run, inputs), others, flops, [*mixer.parameters()])


def sdpa(big, **options):
    """{name: scaled dot product attention}: the two fast backends on a GPU, any available backend elsewhere."""
    def attend(backend, q, k, v):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, **options)
    kinds = {"SDPA": [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]} if not big else {
        "SDPA flash": SDPBackend.FLASH_ATTENTION, "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION}
    return {name: functools.partial(attend, backend) for name, backend in kinds.items()}


def flash_attention_4(*qkv, mask=None, **options):
    """flash-attn-4 called directly, with a BlockMask or without one."""
    from flash_attn.cute import flash_attn_func
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch as Blocks
    if mask is not None:
        options["block_sparse_tensors"] = Blocks(mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks,
                                                 mask.full_kv_indices, block_size=mask.BLOCK_SIZE)
        options["block_sparse_tensors_bwd"] = Blocks(mask.q_num_blocks, mask.q_indices, mask.full_q_num_blocks,
                                                     mask.full_q_indices, block_size=mask.BLOCK_SIZE)
    return flash_attn_func(*(x.transpose(1, 2) for x in qkv), **options)[0].transpose(1, 2)


def attention_rows(factory, big, compiled):
    """Attention of training. Two-stream attention computes s^2 query-key pairs per sequence. Two causal sequences of s
    tokens have as many pairs: libraries without block masks are timed on those. A full-sequence model, which is one
    block, also has s^2 pairs."""
    b, h, s, e, l = (8, 14, 8192, 64, 256) if big else (1, 2, 256, 16, 64)
    streams = [torch.randn(b, h, m, e, **factory) for m in 3 * [s - l] + 3 * [s]]
    causal, work = torch.randn(3, 2 * b, h, s, e, **factory).unbind(), 4 * b * h * e * s * s
    joined = [torch.cat(pair, 2) for pair in zip(streams[:3], streams[3:])]
    for name, length, inputs in (("two-stream attention", l, streams), ("dense attention", s, streams[3:])):
        masks = ops.two_stream_masks(s, length, factory["device"])
        def ours(*qkv):
            return ops.two_stream_attention(qkv[:3] if length < s else (qkv[0][:, :, :0],) * 3, qkv[-3:], masks)
        if length == s:
            others = {k: (f, inputs) for k, f in sdpa(big).items()} | {"FA4": (flash_attention_4, inputs)}
        else:
            others = {f"{k}, causal": (f, causal) for k, f in sdpa(big, is_causal=True).items()}
            others["FA4, causal"] = functools.partial(flash_attention_4, causal=True), causal
            if big:
                others["FA4, sparse"] = functools.partial(flash_attention_4, mask=masks[0]), joined
                others["FlexAttention, Triton"] = (
                    functools.partial(torch.compile(flex_attention, dynamic=False), block_mask=masks[0]), joined)
        yield from both_passes(name, (ours, inputs), others, work)


def block_attention_rows(factory, big, compiled):
    """One block against a cache. Libraries get the cache and the block's keys already concatenated. If the cache is
    short, a call goes over many of them, as over the layers of a model, so that they do not stay in the GPU's L2."""
    h, e, l = (18, 64, 256) if big else (2, 16, 32)
    q, k, v = torch.randn(3, 1, h, l, e, **factory).unbind()
    for n in [0, 1024, 16384, 65536, 262_144] if big else [0, 256]:
        nbytes = 2 * q.nbytes + 2 * (n + l) * h * e * q.element_size()
        count = max(1, min(32, 2 ** 28 // nbytes)) if big else 2
        held = torch.full((1,), n, device=factory["device"])
        caches = torch.randn(count, 2, 1, h, max(n, l), e, **factory)
        joined = [[torch.cat([c[i, :, :, :n], x], 2) for i, x in enumerate((k, v))] for c in caches]
        def over_all(attend, pairs):
            return torch.no_grad()(lambda: [attend(q, *pair) for pair in pairs])
        def ours(q, keys, values):
            return ops.cached_attention(q, k, v, keys, values, held, l)
        yield (f"block attention, {n:,} keys", over_all(ours, caches),
               {name: over_all(f, joined) for name, f in sdpa(big).items()}, 4 * l * (n + l) * h * e, nbytes, count)


def cross_entropy_rows(factory, big, compiled):
    """Head and loss. Liger's loss has no token weights, so it does less work."""
    m, d, v = (32768, 896, 50258) if big else (128, 32, 500)
    hidden, head = torch.randn(m, d, **factory), 0.02 * torch.randn(v, d, **factory)
    target = torch.randint(0, v - 1, (m,), device=factory["device"])
    weight = torch.rand(m, device=factory["device"]) + 1
    def with_gradients(f):
        return with_backward(lambda x, w: f(x, w, target, weight), (hidden, head))
    def liger(x, w, target, weight):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
        return LigerFusedLinearCrossEntropyLoss(reduction="sum")(w[:-1], x, target)
    yield ("linear cross-entropy, forward + backward", with_gradients(ops.linear_cross_entropy), {
        "F.cross_entropy on all logits": with_gradients(ops.linear_cross_entropy.plain),
        "Liger": with_gradients(liger)}, 6 * m * d * (v - 1), 3 * (hidden.nbytes + head.nbytes), 1, False)


def adamw_rows(factory, big, compiled):
    """One AdamW step in fp32, with the gradient norm and clipping. Bytes counted: gradients are read twice; parameters
    and both moments are read and written."""
    config = config_from_file("mamba_h_350m" if big else "laptop")
    model, other = (BlockDiffusionLM(config).to(factory["device"]) for _ in range(2))
    ours = ShardedAdamW(model, (0.9, 0.95), 0.1)
    theirs = torch.optim.AdamW(other.param_groups(0.1), lr=1e-4, betas=(0.9, 0.95), fused=True)
    for p, q in zip(model.parameters(), other.parameters()):
        q.grad = p.grad.normal_().clone()
    def our_step():                                     # both with gradients clipped to a norm of 1
        ours.step(1e-4, (1 / (ours.reduce_gradients() + 1e-6)).clamp(max=1))
    def their_step():
        torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        theirs.step()
    yield "AdamW step", our_step, {"torch AdamW(fused=True)": their_step}, 0, 8 * 4 * model.n_params, 1, False


COMPARISONS = dict(mixer=mixer_rows, attention=attention_rows, cross_entropy=cross_entropy_rows,
                   block_attention=block_attention_rows, adamw=adamw_rows)


# ----------------------------------------------------------------------------------------------
# Measuring

def measured_ceilings(dev):
    """The limits of the hardware, measured: FLOP/s of a product of two square matrices of random numbers (bf16 if the
    GPU has it), and bytes/s of a copy, read plus written."""
    on_gpu = dev.type == "cuda"
    source, target = torch.zeros(2, 2 ** (28 if on_gpu else 22), device=dev)
    seconds, _, _ = bench.measure(lambda: target.copy_(source), dev, bench.warmup, bench.iterations, in_a_row=10)
    return bench.matmul_ceiling(dev, 8192 if on_gpu else 512, pick_dtype("auto", dev)), 2 * source.nbytes / seconds


def op_row(dev, ceilings, op, ours, others, flops, nbytes, count=1, graph=True):
    """The row of one comparison. ours: our function. others: {name: a library's function}. A call runs the
    operation `count` times, with `flops` and `nbytes` each. graph: time it as a CUDA graph, which excludes the host's
    time. of_limit: the share of the hardware's limit that we reach."""
    row = dict(op=op, flops=flops, bytes=nbytes, **timed(ours, dev, count, graph))
    row["limit_ms"] = 1000 * max(flops / ceilings[0], nbytes / ceilings[1])
    row["of_limit"] = row["limit_ms"] / row.get("ms", torch.inf)
    return row | dict(others={name: timed(f, dev, count, graph) for name, f in others.items()})


def timed(f, dev, count, graph):
    """Fields for a row: the milliseconds of f, which runs an operation `count` times, and their spread. As a CUDA
    graph, the time excludes that of the host. If f cannot run, its `error` says why."""
    bench.release()
    try:
        run = captured(f) if dev.type == "cuda" and graph else f
        median, spread, _ = bench.measure(run, dev, bench.warmup, bench.iterations)
    except ImportError:
        return dict(error="not installed")
    except Exception as error:                          # a library may fail in any way: the row says so
        return dict(error=f"failed: {type(error).__name__}: {str(error)[:80]!r}")
    return dict(ms=1000 * median / count, spread=spread)


def captured(step):
    """Records step() as a CUDA graph and returns the function that replays it."""
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):                       # compiles and tunes
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    # A recording that fails leaves its own stream as the current one; the outer context restores ours.
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
        step()
    return graph.replay


def show(row):
    """Prints a row: ours with its limit, then the others."""
    ours = row.get("error") or f"{row['ms']:.3f} ms +-{50 * row['spread']:.1f} %, {row['of_limit']:.0%} of its limit"
    print(f"{row['op']:<41} {ours}", flush=True)
    for name, other in row["others"].items():
        theirs = other.get("error") or f"{other['ms']:.3f} ms, {other['ms'] / row.get('ms', torch.inf):.2f}x ours"
        print(f"{'':<15}{name:<26} {theirs}", flush=True)


def main():
    # Our settings are those of bench.py, in bench.py itself: there its `measure` and the generators above read them.
    vars(bench).update(configure(dict(vars(bench), __doc__=__doc__)))
    check(vars(bench), least=dict(iterations=1, warmup=0), endings=dict(out=".json"))
    for name in bench.only:
        check(dict(only=name), choices=dict(only=[*COMPARISONS]))
    dev, rows = Parallel(bench.device).device, []
    line, factory = select_kernels(bench.kernels, dev), dict(device=dev, dtype=pick_dtype("auto", dev))
    on_gpu, ceilings = dev.type == "cuda", measured_ceilings(dev)
    print(f"{hardware(dev)['name']} | {line} | a large product {ceilings[0] / 1e12:.1f} TFLOP/s, a copy "
          f"{ceilings[1] / 1e12:.2f} TB/s", flush=True)
    for name in bench.only or COMPARISONS:
        torch.manual_seed(0)
        for comparison in COMPARISONS[name](factory, on_gpu, on_gpu and bench.compile):
            rows.append(op_row(dev, ceilings, *comparison))
            show(rows[-1])
    bench.write_record(bench.out, "ops", rows, matmul_tflops=ceilings[0] / 1e12, copy_tb_s=ceilings[1] / 1e12,
                       hardware=hardware(dev), kernels=line)


if __name__ == "__main__":
    with script("compare_ops.py"):
        main()
