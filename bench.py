"""
The paper's throughput tables and figure, re-measured (tab:training-throughput-8k,
tab:inference-throughput), and each heavy operation beside a library and beside its own limit.

    python bench.py train         # 350M, 8192 tokens; or torchrun --nproc_per_node=8 bench.py train
    python bench.py sample        # 700M, batch 1, p = 16; some rows: --lengths=[1024,65536]
    python bench.py ops           # some operations: --only=['scan']
    python bench.py plot FILE...  # figures in assets/ from what --out=FILE wrote

Compilation, capture and warm-up are reported apart from the measurement; every run prints hardware,
versions and the kernels chosen, and ends in one JSON line. On a CPU: the same, small.
"""
import contextlib
import copy
import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import unittest.mock

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import ops
from configurator import ConfigError, configure
from model import BlockDiffusionLM, ModelError, config_from_file
from sample import BlockDecoder, Sampler, prepare_for_inference
from train import Parallel, ShardedAdamW, train_flops

# -- settings --
only = []                               # config files or operations, e.g. ['mamba_h_350m']; []: all
lengths = []                            # of the sampling ladder; []: the paper's
whole = [1024, 32768]                   # block models: lengths that are generated from start to end
tokens_per_step = 16                    # p
micro_batch_size = 8                    # training sequences on a device
seq_len = 0                             # tokens of a training sequence; 0: the config's
warmup = 5                              # iterations before, and in, the measurement
iterations = 15
out = ""                                # also write the JSON here
figures = "assets"                      # where `plot` puts its pictures
device = "auto"
kernels = "auto"                        # auto, or torch to force the plain twins
compile = True
dist_timeout = 300

# -- measuring --
MODELS = {                              # name and colour in every figure
    "attention": ("full-sequence attention", "#7f7f7f"),
    "diffumamba_h": ("full-sequence DiffuMamba-H", "#e08214"),
    "bdlm_attention": ("BDLM attention", "#2c7fb8"), "mamba_h": ("BDLM Mamba-H", "#b2182b")}
PAPER_TRAIN = dict(zip(MODELS, [229_957, 223_825, 151_976, 166_849]))  # 8 x A100, tokens/s
LADDER = {2 ** i: f"{2 ** i // 1000}K" if i > 9 else str(2 ** i) for i in range(8, 18)}
LADDER |= {200_000: "", 262_144: "262K"}                # lengths, and their names on an axis
PAPER_SAMPLE = {kind: dict(zip(LADDER, speeds)) for kind, speeds in zip(MODELS, [  # 1 x A100
    [1035, 915, 1421, 1062, 761, 351, 122, 36], [470, 541, 498, 461, 387, 429, 240, 101, 35],
    [1935, 1887, 1955, 1927, 1728, 1663, 1331, 508, 263, 142, 91, 74],
    [1146, 1167, 1082, 1158, 1019, 1281, 1234, 941, 694, 450, 364, 278]])}


def synchronize(dev):
    if dev.type == "cuda":
        torch.cuda.synchronize()


def measure(step, dev):
    """Median seconds of `iterations` calls after `warmup`, their spread (max - min) / median, and
    seconds of the first call, which compiles."""
    times = []
    for _ in range(1 + warmup + iterations):
        synchronize(dev)
        start = time.perf_counter()
        step()
        synchronize(dev)
        times.append(time.perf_counter() - start)
    counted = times[1 + warmup:]
    median = statistics.median(counted)
    return median, (max(counted) - min(counted)) / median, times[0]


def measured_ceilings(dev):
    """What "limit" means here: TFLOP/s of a product of two square matrices of random numbers (bf16
    on a GPU), and TB/s, read and written, of a copy."""
    n, size = (8192, 2 ** 28) if dev.type == "cuda" else (512, 2 ** 22)
    a, b = torch.randn(2, n, n, device=dev).to(fast_dtype(dev))
    source, target = torch.zeros(2, size, device=dev)

    def rate(work, f):
        return 10 * work / measure(lambda: [f() for _ in range(10)], dev)[0] / 1e12
    return dict(matmul_tflops=rate(2 * n ** 3, lambda: a @ b),
                copy_tb_s=rate(2 * source.nbytes, lambda: target.copy_(source)))


def limit_ms(flops, nbytes, ceilings):
    """Milliseconds that the FLOPs alone or the bytes alone would take, whichever is longer."""
    return 1e-9 * max(flops / ceilings["matmul_tflops"], nbytes / ceilings["copy_tb_s"])


def hardware(dev):
    """What a figure needs beside it: device, driver, clocks, versions."""
    record = dict(torch=str(torch.__version__), python=platform.python_version(), device=str(dev))
    if dev.type != "cuda":
        name = platform.processor() or platform.machine()
        return record | dict(name=f"{name}, {torch.get_num_threads()} threads")
    query = "name,driver_version,clocks.sm,clocks.mem,temperature.gpu"
    with contextlib.suppress(OSError):
        line = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
                              capture_output=True, text=True).stdout.splitlines()
        record.update(zip(query.split(","), line[0].split(", ")) if line else {})
    with contextlib.suppress(ImportError):
        import triton
        record["triton"] = triton.__version__
    return record


def fast_dtype(dev):
    return torch.bfloat16 if dev.type == "cuda" else torch.float32


def named_config(name):
    folder = os.path.dirname(os.path.abspath(__file__))
    return config_from_file(os.path.join(folder, "config", f"{name}.py"))


def release(dev):
    """Frees what the last row compiled and held."""
    torch.compiler.reset()
    if dev.type == "cuda":
        torch.cuda.empty_cache()


def run_all(parallel, names, make_rows, describe):
    """Runs make_rows(name, ceilings), a generator of rows, for each name and prints each row. What
    does not fit in memory is a row that says so, and the run goes on."""
    dev, ceilings = parallel.device, measured_ceilings(parallel.device)
    rows, say = [], print if parallel.rank == 0 else (lambda *_, **__: None)
    for name in names:
        torch.manual_seed(0)
        release(dev)
        try:
            for row in make_rows(name, ceilings):
                rows.append(row)
                say(describe(row), flush=True)
        except torch.OutOfMemoryError:
            rows.append(dict(name=name, config=name, error="does not fit in memory"))
            say(f"{name:<22} does not fit in memory", flush=True)
    return dict(**ceilings, rows=rows)


def models(size, dev):
    """Config files to run: the setting, or all four of a size; on a CPU the laptop's."""
    return only or ([f"{kind}_{size}" for kind in MODELS] if dev.type == "cuda" else ["laptop"])


# -- train --

def bench_train(parallel):
    """Training throughput at 350M: synthetic batches, forward, backward, optimizer."""
    def make_rows(name, ceilings):
        config = named_config(name)
        if seq_len:
            config.block_len = seq_len if config.full_sequence else config.block_len
            config.seq_len = seq_len
        yield train_row(name, config, parallel, 1e12 * ceilings["matmul_tflops"])
    return run_all(parallel, models("350m", parallel.device), make_rows, format_train)


def update(optimizer):
    """Everything between the gradients and the next parameters."""
    norm = optimizer.reduce()
    optimizer.step(1e-4, (1.0 / (norm + 1e-6)).clamp(max=1.0))


def train_row(name, config, parallel, ceiling):
    dev = parallel.device
    if dev.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    model = BlockDiffusionLM(config).to(dev)
    optimizer = ShardedAdamW(model, 1e-3, (0.9, 0.95), 0.1, parallel.rank, parallel.world)
    if compile and dev.type == "cuda":
        model.compile_layers()
    x0 = torch.randint(0, config.mask_id, (micro_batch_size, config.seq_len), device=dev)
    generator = torch.Generator(dev).manual_seed(parallel.rank)

    def step():
        optimizer.zero_grad()
        with torch.autocast(dev.type, torch.bfloat16, enabled=dev.type == "cuda"):
            loss = model(x0, generator) / parallel.world
        loss.backward()
        update(optimizer)

    median, spread, first = measure(step, dev)
    tokens = micro_batch_size * config.seq_len * parallel.world
    flops = train_flops(config, config.seq_len) * micro_batch_size
    return dict(config=name, tok_per_s=tokens / median, ms=1000 * median, spread=spread,
                mfu=flops / median / ceiling, compile_s=first, gpus=parallel.world,
                batch=micro_batch_size * parallel.world,
                peak_gib=torch.cuda.max_memory_allocated() / 2 ** 30 if dev.type == "cuda" else 0)


def format_train(r):
    paper = PAPER_TRAIN.get(r["config"].removesuffix("_350m"), 0) / 8
    beside = f"{r['tok_per_s'] / r['gpus'] / paper:.2f}x the paper's A100" if paper else ""
    return (f"{r['config']:<22}{r['tok_per_s']:>10,.0f} tok/s {r['ms']:>8.1f} ms "
            f"+-{50 * r['spread']:.1f}% {100 * r['mfu']:>5.1f}% of matmul ceiling "
            f"{r['peak_gib']:>6.1f} GiB  compile {r['compile_s']:.0f} s   {beside}")


# -- sample --

@torch.no_grad()
def bench_sample(parallel):
    """Generation at 700M, random weights, batch 1, p tokens a step: the paper's protocol."""
    dev, on_gpu = parallel.device, parallel.device.type == "cuda"

    def make_rows(name, ceilings):
        config = named_config(name)
        most = (65536 if config.full_sequence else config.rope_capacity) if on_gpu else 1024
        with torch.device(dev):
            model = BlockDiffusionLM(config)
        torch.nn.init.normal_(model.head.weight, std=0.02)
        prepare_for_inference(model, fast_dtype(dev))
        if compile and on_gpu:
            model.compile_layers("denoise", "commit_and_denoise")
        rows = full_sequence_rows if config.full_sequence else block_rows
        for row in rows(model, dev, lengths or [n for n in LADDER if n <= most]):
            paper = PAPER_SAMPLE.get(name.removesuffix("_700m"), {}).get(row["length"])
            yield dict(config=name, **row, **limit_of_step(row, model, ceilings), paper=paper)
    return run_all(parallel, models("700m", dev)[::-1], make_rows, format_sample)


def new_sampler(dev, mask_id):
    generators = [torch.Generator(dev).manual_seed(0)]
    return Sampler(generators, tokens_per_step=tokens_per_step, mask_id=mask_id)


def block_rows(model, dev, ladder):
    """
    Rows of a block model. The time of one block (commit of the last one included) is measured at
    several prefix lengths; a generation is the sum over its blocks, interpolated between them.
    `whole` lengths are generated from an empty prefix to the end instead.
    """
    c = model.config
    l = c.block_len
    capacity = (-(-max(ladder) // l) - 1) * l           # the last block is never committed
    cache = model.new_cache(1, max(capacity, l), l)
    started = time.perf_counter()
    decoder = BlockDecoder(model, cache, new_sampler(dev, c.mask_id), l, dev.type == "cuda")
    synchronize(dev)
    capture_s = time.perf_counter() - started
    for state in cache.layers:                          # a prefix of random contents, not of zeros
        for part in state:
            part.normal_()
    masks = torch.full((1, l), c.mask_id, device=dev)
    usual, seconds, spread = (0, 1024, 4096, 16384, 65536, 131072), [], []
    at = sorted({capacity, *(prefix for prefix in usual if prefix < capacity)})
    for prefix in at:
        def block():
            cache.lengths.fill_(max(prefix - l, 0))     # the commit brings it to prefix
            decoder.decode(masks, prefix > 0, l)
        median, variation, _ = measure(block, dev)
        seconds.append(median)
        spread.append(variation)
    for length in ladder:
        starts = torch.arange(0, length, l, dtype=torch.float64)
        row = dict(length=length, tok_per_s=length / float(interpolate(starts, at, seconds).sum()),
                   how="integrated", spread=max(spread), cache_bytes=cache.nbytes,
                   capture_s=capture_s, prefixes=at, block_ms=[1000 * s for s in seconds])
        if length in whole:
            cache.clear()
            synchronize(dev)
            begin = time.perf_counter()
            for i in range(-(-length // l)):
                decoder.decode(masks, i > 0, l)
            synchronize(dev)
            row.update(integrated=row["tok_per_s"], how="whole",
                       tok_per_s=length / (time.perf_counter() - begin))
        yield row


def interpolate(x, at, values):
    """Piecewise linear through (at, values), and straight on outside."""
    at, values = (torch.tensor(v, dtype=torch.float64) for v in (at, values))
    if len(at) == 1:
        return values.expand(len(x))
    i = torch.searchsorted(at, x, right=True).clamp(1, len(at) - 1)
    return values[i - 1] + (x - at[i - 1]) * (values[i] - values[i - 1]) / (at[i] - at[i - 1])


def full_sequence_rows(model, dev, ladder):
    """Rows of a full-sequence model: L / p steps over a window of L tokens, each the same work."""
    for length in ladder:
        row = dict(length=length, how="step x L / p")
        try:
            started, mask_id = time.perf_counter(), model.config.mask_id
            cache, sampler = model.new_cache(1, 0, length), new_sampler(dev, mask_id)
            decoder = BlockDecoder(model, cache, sampler, length, dev.type == "cuda")
            synchronize(dev)
            row["capture_s"] = time.perf_counter() - started

            def step():
                decoder.done.zero_()
                decoder.graphs[False].replay() if decoder.graphs else decoder.step(False)
            median, row["spread"], _ = measure(step, dev)
            row["tok_per_s"] = tokens_per_step / median
            del decoder
        except torch.OutOfMemoryError:
            row["error"] = "does not fit in memory"
        yield row


def step_work(c, l, prefix, p, width):
    """
    (FLOPs, bytes) of one denoising step of l tokens after a prefix, at `width` bytes a value:
    products with every weight, attention's area, the scan's chunked products, the head on p tokens;
    weights and cache read once, activations not counted. A block model commits a block every l / p
    steps, in the same pass: that share of a clean pass (one Mamba direction) is in the FLOPs.
    """
    d, n, di, chunk = c.d_model, c.d_state, c.d_inner, min(c.chunk_len, l)
    commit = 0 if c.full_sequence else p / l
    flops, values = 2 * p * d * c.vocab_size, d * c.vocab_size
    for i in range(c.n_layer):
        if i % c.attn_every == 0:
            weights, other, read, share = 4 * d * d, 4 * l * (prefix + l) * d, 2 * prefix * d, 1
        else:
            weights = 2 * (d * (2 * di + 2 * n + di // c.mamba_head_dim) + di * d)
            other = 2 * l * (2 * chunk * n + 2 * chunk * di + 4 * n * di)
            read, share = n * di, 0.5
        mixer, mlp = 2 * l * weights + other, 2 * l * 8 * d * d
        flops += (1 + share * commit) * mixer + (1 + commit) * mlp
        values += weights + 8 * d * d + read
    return flops, width * values


def limit_of_step(row, model, ceilings):
    """Milliseconds of a step, averaged over the row's generation, and its limit at the mean prefix:
    both grow linearly with the prefix."""
    if "error" in row:
        return {}
    c, width = model.config, model.head.weight.element_size()
    l, prefix = (row["length"], 0) if c.full_sequence else (c.block_len, row["length"] / 2)
    limit = limit_ms(*step_work(c, l, prefix, tokens_per_step, width), ceilings)
    ms = 1000 * tokens_per_step / row["tok_per_s"]
    return dict(ms_per_step=ms, limit_ms=limit, of_limit=limit / ms)


def format_sample(r):
    name = f"{r['config']:<20}{r['length']:>8}"
    if "error" in r:
        return f"{name} {r['error']}"
    paper, how = r["paper"] or 0, r["how"]
    paper = f"{r['tok_per_s'] / paper:.1f}x the paper's A100 ({paper:,})" if paper else ""
    also = f" ({r['integrated']:,.0f} integrated)" if "integrated" in r else ""
    return (f"{name}{r['tok_per_s']:>10,.0f} tok/s  {how}{also}  {r['ms_per_step']:.2f} ms a step "
            f"+-{50 * r['spread']:.1f}%, {100 * r['of_limit']:.0f}% of its limit  {paper}")


# -- ops: each generator below makes its tensors and yields rows of `op_row` --

def bench_ops(parallel):
    """Each heavy operation beside the library a user would otherwise pick and beside its limit."""
    if unknown := set(only) - set(OPERATIONS):
        raise ConfigError(f"there is no operation {unknown.pop()!r}, only {', '.join(OPERATIONS)}")
    dev = parallel.device

    def make_rows(name, ceilings):
        kind = dict(device=dev, dtype=fast_dtype(dev))
        for row in OPERATIONS[name](dev, dev.type == "cuda", kind):
            row["limit_ms"] = limit_ms(row["flops"], row["bytes"], ceilings)
            row["of_limit"] = row["limit_ms"] / row.get("ms", float("inf"))
            yield row
    return run_all(parallel, only or OPERATIONS, make_rows, format_op)


def op_row(dev, name, ours, others, flops, nbytes, count=1, graph=True):
    """One operation at one size. others: by name, what a user would otherwise pick, or the reason
    why it is absent. A call does `count` operations of `flops` and `nbytes` each."""
    row = dict(op=name, flops=flops, bytes=nbytes, **timed(ours, dev, count, graph), others={})
    for name, f in others.items():
        other = row["others"][name] = timed(f, dev, count, graph)
        if "ms" in row and "ms" in other:
            other["ratio"] = other["ms"] / row["ms"]
    return row


def timed(f, dev, count, graph):
    """Milliseconds of one operation (as a CUDA graph: without the host's), and its own memory."""
    if isinstance(f, str):
        return dict(error=f)
    on_gpu, run = dev.type == "cuda", None
    try:
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        before, started = torch.cuda.memory_allocated() if on_gpu else 0, time.perf_counter()
        run = captured(f) if on_gpu and graph else f
        capture_s = time.perf_counter() - started
        median, spread, first = measure(run, dev)
        peak = torch.cuda.max_memory_allocated() - before if on_gpu else 0
        return dict(ms=1000 * median / count, spread=spread, compile_s=capture_s + first,
                    extra_gib=peak / 2 ** 30)
    except torch.OutOfMemoryError:
        return dict(error="does not fit in memory")
    except Exception as error:                          # what fails is a line of the table
        return dict(error=f"failed: {type(error).__name__}: {str(error)[:80]!r}")
    finally:
        del run
        release(dev)


def captured(step):
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):                       # compiles and tunes
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def format_op(r):
    beside = "; ".join(
        f"{o['ratio']:.2f}x {name} ({o['ms']:.3f} ms, {o['extra_gib']:.1f} GiB)" if "ratio" in o
        else f"{name} {o.get('error', 'alone')}" for name, o in r["others"].items())
    ours = r.get("error") or (
        f"{r['ms']:.3f} ms +-{50 * r['spread']:.1f}%, {r['extra_gib']:.1f} GiB, "
        f"{100 * r['of_limit']:.0f}% of its limit of {r['limit_ms']:.3f} ms")
    return f"{r['op']:<41} {beside} | {ours}"


def tensors(x):
    return [v for v in (x if isinstance(x, (tuple, list)) else [x]) if torch.is_tensor(v)]


def with_backward(f, inputs):
    """A function that runs f and the gradients of all its tensor inputs."""
    inputs = [x.detach().clone().requires_grad_() if torch.is_tensor(x) else x for x in inputs]
    d_outputs = []

    def step():
        outputs = tensors(f(*inputs))
        d_outputs[:] = d_outputs or [torch.randn_like(o) for o in outputs]
        torch.autograd.grad(outputs, tensors(inputs), d_outputs)
    return step


def both_passes(dev, name, ours, others, flops):
    """Rows of the forward pass, and of forward and backward. ours and others: (function, inputs).
    Forward reads inputs and writes outputs; backward reads both and writes gradients of inputs. In
    FLOPs backward is twice the forward, nothing recomputed."""
    def forward(f, inputs):
        return torch.no_grad()(lambda: f(*inputs))
    read, written = (sum(v.nbytes for v in tensors(x)) for x in (ours[1], forward(*ours)()))
    for what, wrap, work in (
            ("forward", forward, (flops, read + written)),
            ("forward + backward", with_backward, (3 * flops, 3 * read + 2 * written))):
        rivals = {k: v if isinstance(v, str) else wrap(*v) for k, v in others.items()}
        yield op_row(dev, f"{name}, {what}", wrap(*ours), rivals, *work)


def library(load):
    """What load() returns, or why it cannot: a build for another torch fails in many ways."""
    try:
        return load()
    except Exception as error:
        return "not installed" if isinstance(error, ImportError) else f"broken: {error!r:.60}"


def scan_rows(dev, big, kind):
    """The forms of training: one clean scan that hands out a state per block, and one row per noisy
    block from its state. mamba-ssm returns the last state alone, so its clean scan does less."""
    def load():
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
        return lambda x, dt, A, B, C, D, state, *_: mamba_chunk_scan_combined(
            x, dt, A, B[:, :, None], C[:, :, None], 256, D=D, initial_states=state)
    b, s, h, p, n, l = (8, 8192, 26, 64, 128, 256) if big else (1, 256, 2, 16, 16, 64)
    scan = torch.compile(ops.ssd_scan, dynamic=False) if big and compile else ops.ssd_scan

    def plain(*inputs):
        with unittest.mock.patch.dict(ops.KERNELS, scan="torch"):
            return scan(*inputs)
    mamba_ssm = library(load)
    for form, rows, m in (("clean stream", b, s - l), ("noisy rows", b * s // l, l)):
        x, B, C = (torch.randn(rows, m, *w, **kind) for w in ((h, p), (n,), (n,)))
        dt = 0.1 * torch.rand(rows, m, h, device=dev) + 0.001
        A, D = -1 - 15 * torch.rand(h, device=dev), torch.ones(h, device=dev)
        state = None if m > l else torch.randn(rows, h, p, n, device=dev)
        inputs = (x, dt, A, B, C, D, state, l if m > l else None, 128, m > l)
        flops = rows * m * (2 * 64 * n + 2 * 64 * h * p + 4 * n * h * p)       # chunks of 64
        yield from both_passes(dev, f"scan, {form}", (scan, inputs), {
            "mamba-ssm": mamba_ssm if isinstance(mamba_ssm, str) else (mamba_ssm, inputs),
            "torch.compile of plain" if big else "plain torch": (plain, inputs)}, flops)


def sdpa(dev, **options):
    """Scaled dot product attention: both fast backends on a GPU, torch's choice elsewhere."""
    def by(backend):
        def attend(q, k, v):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, **options)
        return attend
    if dev.type != "cuda":
        return {"SDPA": functools.partial(F.scaled_dot_product_attention, **options)}
    flash, cudnn = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
    return {"SDPA flash": by(flash), "SDPA cuDNN": by(cudnn)}


def two_stream_rows(dev, big, kind):
    """Both streams see s^2 pairs a sequence. So do two sequences of s tokens under a causal mask,
    which is what the library gets."""
    b, h, s, e, l = (8, 14, 8192, 64, 256) if big else (1, 2, 256, 16, 64)
    streams = [torch.randn(b, h, m, e, **kind) for m in 3 * [s - l] + 3 * [s]]
    causal = torch.randn(3, 2 * b, h, s, e, **kind).unbind()
    masks, work = ops.two_stream_masks(s, l, dev), 4 * b * h * e * s * s

    def ours(*qkv):
        return ops.two_stream_attention(qkv[:3], qkv[3:], masks)
    others = {f"{k}, causal": (f, causal) for k, f in sdpa(dev, is_causal=True).items()}
    yield from both_passes(dev, "two-stream attention", (ours, streams), others, work)


def block_attention_rows(dev, big, kind):
    """One block against a cache; the library is given keys that are already joined. Short caches
    are many, as the layers of a model are, so that they do not stay in the GPU's L2."""
    h, e, l = (18, 64, 256) if big else (2, 16, 32)
    q, k, v = torch.randn(3, 1, h, l, e, **kind).unbind()
    for n in [0, 1024, 16384, 65536, 262_144] if big else [0, 256]:
        nbytes = 2 * q.nbytes + 2 * (n + l) * h * e * q.element_size()
        count = max(1, min(32, 2 ** 28 // nbytes)) if big else 2
        held = torch.full((1,), n, device=dev)
        caches = torch.randn(count, 2, 1, h, max(n, l), e, **kind)
        joined = [[torch.cat([c[i, :, :, :n], x], 2) for i, x in enumerate((k, v))] for c in caches]

        def over_all(attend, pairs):
            return torch.no_grad()(lambda: [attend(q, *pair) for pair in pairs])

        def ours(q, keys, values):
            return ops.cached_attention(q, k, v, keys, values, held, l)
        yield op_row(dev, f"block attention, {n:,} keys", over_all(ours, caches),
                     {name: over_all(f, joined) for name, f in sdpa(dev).items()},
                     4 * l * (n + l) * h * e, nbytes, count)


def cross_entropy_rows(dev, big, kind):
    """Head and loss. Liger's has no weights of tokens, so it does less."""
    def load():
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
        fused = LigerFusedLinearCrossEntropyLoss(reduction="sum")
        return with_backward(lambda x, w: fused(w[:-1], x, target), (hidden, head))
    m, d, v = (32768, 896, 50258) if big else (128, 32, 500)
    hidden, head = torch.randn(m, d, **kind), 0.02 * torch.randn(v, d, **kind)
    target, weight = torch.randint(0, v - 1, (m,), device=dev), torch.rand(m, device=dev) + 1

    def of(f):
        return with_backward(lambda x, w: f(x, w, target, weight), (hidden, head))
    yield op_row(dev, "linear cross-entropy, forward + backward", of(ops.linear_cross_entropy), {
        "F.cross_entropy on all logits": of(ops.linear_cross_entropy_ref), "Liger": library(load)},
        6 * m * d * (v - 1), 3 * (hidden.nbytes + head.nbytes), graph=False)


def adamw_rows(dev, big, kind):
    """One step in fp32, gradient norm and clipping included: gradients are read twice, parameters
    and both moments are read and written."""
    with torch.device(dev):
        model = BlockDiffusionLM(named_config("mamba_h_350m" if big else "laptop"))
    other = copy.deepcopy(model)
    ours = ShardedAdamW(model, 1e-4, (0.9, 0.95), 0.1)
    theirs = torch.optim.AdamW(other.param_groups(0.1), lr=1e-4, betas=(0.9, 0.95), fused=True)
    for p, q in zip(model.parameters(), other.parameters()):
        q.grad = p.grad.normal_().clone()

    def step():
        torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        theirs.step()
    yield op_row(dev, "AdamW step", lambda: update(ours), {"torch AdamW(fused=True)": step},
                 0, 8 * 4 * model.n_params, graph=False)


OPERATIONS = dict(scan=scan_rows, two_stream=two_stream_rows, cross_entropy=cross_entropy_rows,
                  block_attention=block_attention_rows, adamw=adamw_rows)


BENCHES = dict(train=bench_train, sample=bench_sample, ops=bench_ops)


def main(words):
    what, words, files = (words or ["--help"])[0], words[1:], []
    if what in ("-h", "--help"):
        configure(globals(), ["--help"])                # and exits
    if what not in (*BENCHES, "plot"):
        raise ConfigError(f"there is no subcommand {what!r}, only {', '.join(BENCHES)} and plot")
    while what == "plot" and words and not words[0].startswith("--"):
        files.append(words.pop(0))
    configure(globals(), words)
    if what == "plot":
        from assets.throughput import plot              # needs matplotlib, which measuring does not
        return plot(files, figures)
    parallel = Parallel(device, dist_timeout)
    line = ops.select_kernels(kernels, parallel.device)
    before, when = hardware(parallel.device), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    if parallel.rank == 0:
        print(f"{parallel.world} x {before.get('name')} | torch {before['torch']} | {line}")
    result = dict(bench=what, when=when, **BENCHES[what](parallel), hardware=before,
                  after=hardware(parallel.device), kernels=line)
    if parallel.rank == 0:
        if out:
            with open(out, "w") as f:
                json.dump(result, f, indent=1)
        print(json.dumps(result))
    parallel.close()


if __name__ == "__main__":
    # argv is cleared because torch.compile pastes it, unquoted, into the code it writes.
    _words, sys.argv[1:] = sys.argv[1:], []
    try:
        main(_words)
    except (ConfigError, ModelError, ops.KernelError) as error:
        sys.exit(f"bench.py: {error}")
