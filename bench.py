"""
The paper's throughput tables and figure, re-measured (tab:training-throughput-8k,
tab:inference-throughput), and each heavy operation beside a library and beside its own limit.

    python bench.py train            # 350M, 8192 tokens; also torchrun --nproc_per_node=8 bench.py train
    python bench.py sample           # 700M, batch 1, p = 16; some rows: --lengths=[1024,65536]
    python bench.py ops              # some operations: --only=['scan']
    python bench.py plot FILE...     # figures in assets/ from what --out=FILE wrote

Compilation, graph capture and warm-up are reported apart from the measurement; every run prints the
hardware, the versions and the kernels chosen, and ends in one JSON line. On a CPU: the same, small.
"""
import contextlib
import copy
import datetime
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
from sample import BlockDecoder, Sampler
from train import Parallel, ShardedAdamW, train_flops

# ---------------------------------------------------------------------------------------------
# Settings
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
# ---------------------------------------------------------------------------------------------

FOUR = ["attention", "diffumamba_h", "bdlm_attention", "mamba_h"]
PAPER_TRAIN = dict(zip(FOUR, [229_957, 223_825, 151_976, 166_849]))    # 8 x A100, tokens/s
LADDER = [256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 200_000, 262_144]
PAPER_SAMPLE = {kind: dict(zip(LADDER, speeds)) for kind, speeds in {  # 1 x A100, tokens/s
    "attention": [1035, 915, 1421, 1062, 761, 351, 122, 36],
    "diffumamba_h": [470, 541, 498, 461, 387, 429, 240, 101, 35],
    "bdlm_attention": [1935, 1887, 1955, 1927, 1728, 1663, 1331, 508, 263, 142, 91, 74],
    "mamba_h": [1146, 1167, 1082, 1158, 1019, 1281, 1234, 941, 694, 450, 364, 278]}.items()}
PREFIXES = [0, 1024, 4096, 16384, 65536, 131072]        # where a block is timed; and at the longest


def synchronize(dev):
    if dev.type == "cuda":
        torch.cuda.synchronize()


def measure(step, dev):
    """Median seconds of `iterations` calls after `warmup` calls, their spread ((max - min) / median),
    and the seconds of the first call, which compiles."""
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
    """What "limit" means here: TFLOP/s of a product of two square matrices of random numbers (bf16 on
    a GPU), and TB/s, read and written, of a copy."""
    n, size, dtype = (8192, 2 ** 30, torch.bfloat16) if dev.type == "cuda" else (1024, 2 ** 24, None)
    a, b = torch.randn(2, n, n, device=dev).to(dtype or torch.float32)
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


def release(dev):
    """Frees what the last row compiled and held."""
    torch.compiler.reset()
    if dev.type == "cuda":
        torch.cuda.empty_cache()


def named_config(name):
    folder = os.path.dirname(os.path.abspath(__file__))
    return config_from_file(os.path.join(folder, "config", f"{name}.py"))


# ---------------------------------------------------------------------------------------------
# train

def bench_train(parallel):
    """Training throughput at 350M: synthetic batches, forward, backward, optimizer."""
    dev, rows, ceilings = parallel.device, [], measured_ceilings(parallel.device)
    models = [f"{kind}_350m" for kind in FOUR] if dev.type == "cuda" else ["laptop"]
    for name in only or models:
        config = named_config(name)
        if seq_len:
            config.block_len = seq_len if config.full_sequence else config.block_len
            config.seq_len = seq_len
        try:
            rows.append(train_row(name, config, parallel, 1e12 * ceilings["matmul_tflops"]))
        except torch.OutOfMemoryError:
            rows.append(dict(config=name, gpus=parallel.world, error="does not fit in memory"))
        release(dev)
        if parallel.rank == 0:
            print(format_train(rows[-1]), flush=True)
    return dict(**ceilings, rows=rows)


def update(optimizer):
    """Everything between the gradients and the next parameters."""
    norm = optimizer.reduce()
    optimizer.step(1e-4, (1.0 / (norm + 1e-6)).clamp(max=1.0))


def train_row(name, config, parallel, ceiling):
    dev = parallel.device
    torch.manual_seed(0)
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
    if "error" in r:
        return f"{r['config']:<22} {r['error']}"
    paper = PAPER_TRAIN.get(r["config"].removesuffix("_350m"), 0) / 8
    beside = f"{r['tok_per_s'] / r['gpus'] / paper:.2f}x the paper's A100" if paper else ""
    return (f"{r['config']:<22}{r['tok_per_s']:>10,.0f} tok/s {r['ms']:>8.1f} ms "
            f"+-{50 * r['spread']:.1f}% {100 * r['mfu']:>5.1f}% of matmul ceiling "
            f"{r['peak_gib']:>6.1f} GiB  compile {r['compile_s']:.0f} s   {beside}")


# ---------------------------------------------------------------------------------------------
# sample

@torch.no_grad()
def bench_sample(parallel):
    """Generation throughput at 700M, random weights, batch 1, p tokens a step: the paper's protocol."""
    dev, rows, ceilings = parallel.device, [], measured_ceilings(parallel.device)
    on_gpu = dev.type == "cuda"
    for name in only or ([f"{kind}_700m" for kind in reversed(FOUR)] if on_gpu else ["laptop"]):
        config = named_config(name)
        most = 65536 if config.full_sequence else config.rope_capacity
        ladder = [n for n in lengths or (LADDER if on_gpu else LADDER[:3]) if n <= most]
        torch.manual_seed(0)
        with torch.device(dev):
            model = BlockDiffusionLM(config)
        torch.nn.init.normal_(model.head.weight, std=0.02)
        model.prepare_for_inference(torch.bfloat16 if on_gpu else torch.float32)
        if compile and on_gpu:
            model.compile_layers("denoise", "commit_and_denoise")
        try:
            for row in (full_sequence_rows if config.full_sequence else block_rows)(model, dev, ladder):
                paper = PAPER_SAMPLE.get(name.removesuffix("_700m"), {}).get(row["length"])
                rows.append(dict(config=name, **row, paper=paper))
                add_limit(rows[-1], model, ceilings)
                print(format_sample(rows[-1]), flush=True)
        except torch.OutOfMemoryError:                  # the cache of a block model
            rows.append(dict(config=name, length=max(ladder), error="does not fit in memory"))
            print(format_sample(rows[-1]), flush=True)
        del model
        release(dev)
    return dict(**ceilings, rows=rows)


def new_sampler(dev, mask_id):
    generators = [torch.Generator(dev).manual_seed(0)]
    return Sampler(generators, tokens_per_step=tokens_per_step, mask_id=mask_id)


def block_rows(model, dev, ladder):
    """
    Rows of a block model. The time of one block (commit of the last one included) is measured at
    several prefix lengths; a generation of L tokens is the sum over its blocks, interpolated between
    them. `whole` lengths are generated from an empty prefix to the end instead.
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
    at, seconds, spread = sorted({capacity, *(p for p in PREFIXES if p < capacity)}), [], []
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
    """Rows of a full-sequence model: L / p steps over the window of L tokens, each the same work, so a
    generation is that number times the step measured."""
    c = model.config
    for length in ladder:
        row = dict(length=length, how="step x L / p")
        try:
            started = time.perf_counter()
            cache, sampler = model.new_cache(1, 0, length), new_sampler(dev, c.mask_id)
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
    (FLOPs, bytes) of one denoising step of l tokens after a prefix, at `width` bytes a value: products
    with every weight, attention's area, the scan's chunked products, the head on p tokens; weights
    and cache read once, activations not counted. A block model commits a block every l / p steps, in
    the same pass: that share of a clean pass (one Mamba direction of two) is in the FLOPs.
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


def add_limit(row, model, ceilings):
    """Milliseconds of a step, averaged over the row's generation, and its limit at the mean prefix:
    both grow linearly with the prefix."""
    if "error" not in row:
        c, width = model.config, model.head.weight.element_size()
        l, prefix = (row["length"], 0) if c.full_sequence else (c.block_len, row["length"] / 2)
        limit = limit_ms(*step_work(c, l, prefix, tokens_per_step, width), ceilings)
        ms = 1000 * tokens_per_step / row["tok_per_s"]
        row.update(ms_per_step=ms, limit_ms=limit, of_limit=limit / ms)


def format_sample(r):
    if "error" in r:
        return f"{r['config']:<20}{r['length']:>8} {r['error']}"
    paper = f"{r['tok_per_s'] / r['paper']:.1f}x the paper's A100 ({r['paper']:,})" if r["paper"] else ""
    also = f" ({r['integrated']:,.0f} integrated)" if "integrated" in r else ""
    return (f"{r['config']:<20}{r['length']:>8}{r['tok_per_s']:>10,.0f} tok/s  {r['how']}{also}  "
            f"{r['ms_per_step']:.2f} ms a step +-{50 * r['spread']:.1f}%, "
            f"{100 * r['of_limit']:.0f}% of its limit  {paper}")


# ---------------------------------------------------------------------------------------------
# ops. Each generator below makes its tensors and yields rows of `op_row`.

def bench_ops(parallel):
    """Each heavy operation beside the library a user would otherwise pick and beside its limit."""
    dev, rows, ceilings = parallel.device, [], measured_ceilings(parallel.device)
    if unknown := set(only) - set(OPERATIONS):
        raise ConfigError(f"there is no operation {unknown.pop()!r}; choose from {', '.join(OPERATIONS)}")
    for name in only or OPERATIONS:
        torch.manual_seed(0)
        try:
            for row in OPERATIONS[name](dev, dev.type == "cuda"):
                row["limit_ms"] = limit_ms(row["flops"], row["bytes"], ceilings)
                row["of_limit"] = row["limit_ms"] / row.get("ms", float("inf"))
                rows.append(row)
                print(format_op(row), flush=True)
        except torch.OutOfMemoryError:                  # of the inputs
            rows.append(dict(op=name, error="does not fit in memory", others={}))
            print(format_op(rows[-1]), flush=True)
        release(dev)
    return dict(**ceilings, rows=rows)


def op_row(dev, name, ours, others, flops, nbytes, count=1, graph=True):
    """One operation at one size. others: by name, what a user would otherwise pick, or the reason why
    it is absent. A call does `count` operations of `flops` and `nbytes` each."""
    row = dict(op=name, flops=flops, bytes=nbytes, **timed(ours, dev, count, graph))
    row["others"] = {k: timed(f, dev, count, graph) for k, f in others.items()}
    for other in row["others"].values():
        if "ms" in row and "ms" in other:
            other["ratio"] = other["ms"] / row["ms"]
    return row


def timed(f, dev, count, graph):
    """Milliseconds of one operation, and the memory that it needs beyond its inputs. As a CUDA graph
    the host's time does not count."""
    if isinstance(f, str):
        return dict(error=f)
    on_gpu = dev.type == "cuda"
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
        run = None
        release(dev)


def captured(step):
    """`step` as one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):                       # compiles and tunes
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def format_op(r):
    beside = [f"{o['ratio']:.2f}x {name} ({o['ms']:.3f} ms, {o['extra_gib']:.1f} GiB)" if "ratio" in o
              else f"{name} {o.get('error', 'alone')}" for name, o in r["others"].items()]
    ours = r.get("error") or (
        f"{r['ms']:.3f} ms +-{50 * r['spread']:.1f}%, {r['extra_gib']:.1f} GiB, "
        f"{100 * r['of_limit']:.0f}% of its limit of {r['limit_ms']:.3f} ms")
    return f"{r['op']:<41} {'; '.join(beside)} | {ours}"


def tensors(x):
    return [v for v in (x if isinstance(x, (tuple, list)) else [x]) if torch.is_tensor(v)]


def with_backward(f, inputs):
    """A function that runs f and the gradients of all its floating-point inputs."""
    inputs = [x.detach().clone().requires_grad_() if torch.is_tensor(x) else x for x in inputs]
    wanted, d_outputs = tensors(inputs), []

    def step():
        outputs = tensors(f(*inputs))
        d_outputs[:] = d_outputs or [torch.randn_like(o) for o in outputs]
        torch.autograd.grad(outputs, wanted, d_outputs)
    return step


def both_passes(dev, name, ours, others, flops):
    """Rows of the forward pass, and of forward and backward. ours and others: (function, inputs).
    Forward reads inputs and writes outputs; backward reads both kinds and writes gradients of inputs.
    In FLOPs backward is twice the forward, nothing recomputed."""
    def forward(f, inputs):
        return torch.no_grad()(lambda: f(*inputs))
    read, written = (sum(v.nbytes for v in tensors(x)) for x in (ours[1], forward(*ours)()))
    for what, wrap, work in ((", forward", forward, (flops, read + written)),
                             (", forward + backward", with_backward, (3 * flops, 3 * read + 2 * written))):
        yield op_row(dev, name + what, wrap(*ours),
                     {k: v if isinstance(v, str) else wrap(*v) for k, v in others.items()}, *work)


def library(load):
    """What load() imports, or in words why it cannot."""
    try:
        return load()
    except Exception as error:                          # a build for another torch fails in many ways
        missing = isinstance(error, ImportError)
        return "not installed" if missing else f"broken: {type(error).__name__}"


def scan_rows(dev, big):
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
    mamba_ssm, dtype = library(load), torch.bfloat16 if big else torch.float32
    for form, rows, m in (("clean stream", b, s - l), ("noisy rows", b * s // l, l)):
        x, B, C = (torch.randn(rows, m, *w, device=dev, dtype=dtype) for w in ((h, p), (n,), (n,)))
        dt = 0.1 * torch.rand(rows, m, h, device=dev) + 0.001
        A, D = -1 - 15 * torch.rand(h, device=dev), torch.ones(h, device=dev)
        state = None if m > l else torch.randn(rows, h, p, n, device=dev)
        inputs = (x, dt, A, B, C, D, state, l if m > l else None, 128, m > l)
        flops = rows * m * (2 * 64 * n + 2 * 64 * h * p + 4 * n * h * p)       # products of 64 tokens
        yield from both_passes(dev, f"scan, {form}", (scan, inputs), {
            "mamba-ssm": mamba_ssm if isinstance(mamba_ssm, str) else (mamba_ssm, inputs),
            "torch.compile of plain torch" if big else "plain torch": (plain, inputs)}, flops)


def sdpa(dev, **options):
    """Scaled dot product attention by name: both fast backends on a GPU, torch's choice elsewhere."""
    def by(backend):
        def attend(q, k, v):
            with sdpa_kernel(backend) if backend else contextlib.nullcontext():
                return F.scaled_dot_product_attention(q, k, v, **options)
        return attend
    flash, cudnn = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
    both = {"SDPA flash": by(flash), "SDPA cuDNN": by(cudnn)}
    return both if dev.type == "cuda" else {"SDPA": by(None)}


def two_stream_rows(dev, big):
    """Both streams see s^2 pairs a sequence. So do two sequences of s tokens under a causal mask, which
    is what the library gets."""
    b, h, s, e, l = (8, 14, 8192, 64, 256) if big else (1, 2, 256, 16, 64)
    kind = dict(device=dev, dtype=torch.bfloat16 if big else torch.float32)
    streams = [torch.randn(b, h, m, e, **kind) for m in 3 * [s - l] + 3 * [s]]
    causal, masks = torch.randn(3, 2 * b, h, s, e, **kind).unbind(), ops.two_stream_masks(s, l, dev)

    def ours(*qkv):
        return ops.two_stream_attention(qkv[:3], qkv[3:], masks)
    others = {f"{k}, causal": (f, causal) for k, f in sdpa(dev, is_causal=True).items()}
    yield from both_passes(dev, "two-stream attention", (ours, streams), others, 4 * b * h * e * s * s)


def block_attention_rows(dev, big):
    """One block against a cache; the library is given keys that are already joined. Short caches are
    many, as the layers of a model are, so that they do not stay in the GPU's L2."""
    h, e, l = (18, 64, 256) if big else (2, 16, 32)
    kind = dict(device=dev, dtype=torch.bfloat16 if big else torch.float32)
    q, k, v = torch.randn(3, 1, h, l, e, **kind).unbind()
    for n in [0, 1024, 16384, 65536, 262_144] if big else [0, 256]:
        nbytes = 2 * q.nbytes + 2 * (n + l) * h * e * q.element_size()
        count = max(1, min(32, 2 ** 28 // nbytes)) if big else 2
        lengths = torch.full((1,), n, device=dev)
        caches = torch.randn(count, 2, 1, h, max(n, l), e, **kind)
        joined = [[torch.cat([old[:, :, :n], new], 2) for old, new in zip(c, (k, v))] for c in caches]

        def over_all(attend, pairs):
            return torch.no_grad()(lambda: [attend(q, *pair) for pair in pairs])

        def ours(q, keys, values):
            return ops.cached_attention(q, k, v, keys, values, lengths, l)
        yield op_row(dev, f"block attention, {n:,} keys", over_all(ours, caches),
                     {name: over_all(f, joined) for name, f in sdpa(dev).items()},
                     4 * l * (n + l) * h * e, nbytes, count)


def cross_entropy_rows(dev, big):
    """Head and loss. Liger's has no weights of tokens, so it does less."""
    def load():
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
        fused = LigerFusedLinearCrossEntropyLoss(reduction="sum")
        return with_backward(lambda x, w: fused(w[:-1], x, target), (hidden, head))
    m, d, v = (32768, 896, 50258) if big else (128, 32, 500)
    hidden, head = (0.02 * torch.randn(r, d, device=dev).to(torch.bfloat16 if big else torch.float32)
                    for r in (m, v))
    target, weight = torch.randint(0, v - 1, (m,), device=dev), torch.rand(m, device=dev) + 1

    def of(f):
        return with_backward(lambda x, w: f(x, w, target, weight), (hidden, head))
    yield op_row(dev, "linear cross-entropy, forward + backward", of(ops.linear_cross_entropy), {
        "F.cross_entropy on all logits": of(ops.linear_cross_entropy_ref), "Liger": library(load)},
        6 * m * d * (v - 1), 3 * (hidden.nbytes + head.nbytes), graph=False)


def adamw_rows(dev, big):
    """One step in fp32, gradient norm and clipping included: gradients are read twice, parameters and
    both moments are read and written."""
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


OPERATIONS = dict(scan=scan_rows, two_stream=two_stream_rows, block_attention=block_attention_rows,
                  cross_entropy=cross_entropy_rows, adamw=adamw_rows)


# ---------------------------------------------------------------------------------------------
# plot

COLORS = dict(zip(FOUR, ["#7f7f7f", "#e08214", "#2c7fb8", "#b2182b"]))
NAMES = dict(zip(FOUR, ["full-sequence attention", "full-sequence DiffuMamba-H", "BDLM attention",
                        "BDLM Mamba-H"]))


def plot(files):
    """Draws what the files hold; the newest row of a (config, length) or (config, GPUs) wins."""
    import matplotlib
    matplotlib.use("Agg")
    results = []
    for path in files:
        try:
            with open(path) as f:
                results.append(json.load(f))
            results[-1]["bench"], results[-1]["rows"], results[-1]["hardware"]["name"]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{path} is no file that bench.py wrote with --out: {error!r}")
    newest = {}
    for r in sorted(results, key=lambda r: r.get("when", "")):          # stable: then as given
        for row in r["rows"]:
            of = (r["bench"], row.get("config"), row.get("length", row.get("gpus")))
            newest[of] = dict(row, name=r["hardware"]["name"], torch=r["hardware"]["torch"])
    rows = {what: [row for of, row in newest.items() if of[0] == what and "error" not in row]
            for what in ("sample", "train")}
    ours = {kind: {r["length"]: r["tok_per_s"] for r in rows["sample"] if r["config"] == f"{kind}_700m"}
            for kind in FOUR}
    os.makedirs(figures, exist_ok=True)
    drawn = []
    if any(ours.values()):
        drawn += [plot_throughput(ours, caption(rows["sample"])), plot_speedup(ours, caption(rows["sample"]))]
    if any(r["config"].endswith("_350m") for r in rows["train"]):
        drawn.append(plot_training(rows["train"], caption(rows["train"])))
    print("wrote " + ", ".join(drawn) if drawn else "nothing to draw: no rows of the 700M or 350M models")


def caption(rows):
    return " and ".join(sorted({f"{r['name']}, torch {r['torch'].split('+')[0]}" for r in rows}))


def figure(title, ylabel, note, lengths=True):
    import matplotlib.pyplot as plt
    fig, ax = plt.subplots(figsize=(8, 4.8))
    ax.set_title(title, loc="left", fontsize=11)
    ax.set_ylabel(ylabel)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color="0.92")
    fig.text(0.01, 0.012, note, fontsize=7, color="0.35", va="bottom")
    if lengths:
        ticks = [n for n in LADDER if n & (n - 1) == 0]
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xlabel("tokens generated")
        ax.set_xticks(ticks, [f"{n // 1000}K" if n > 1000 else str(n) for n in ticks])
    return fig, ax


def curve(ax, points, color, marker_only=False):
    x, y = zip(*sorted(points.items()))
    ax.plot(x, y, "o", color=color, ms=5, **dict(mfc="white", zorder=2) if marker_only else
            dict(ls="-", ms=3.5, zorder=3))


def label_ends(ax, ends, gap=1.32):
    """Names at the ends of curves, (x, y, text, color) each, moved apart where they share an end."""
    last = {}
    for x, y, text, color in sorted(ends, key=lambda end: end[1]):
        at = last[x] = max(y, last.get(x, 0) * gap)
        ax.annotate(text, (x, at), xytext=(8, 0), textcoords="offset points", color=color, va="center",
                    fontsize=9)


def save(fig, name):
    path = os.path.join(figures, name)
    fig.tight_layout(rect=(0, 0.045, 1, 1))
    fig.savefig(path, dpi=150)
    return path


def plot_throughput(ours, hardware_name):
    fig, ax = figure("Generation, 700M parameters, random weights, batch 1, 16 tokens a step", "tokens/s",
                     f"lines: ours, {hardware_name}; hollow markers: the paper, 1 x A100-80GB. bf16.")
    ends = []
    for kind in FOUR:
        curve(ax, PAPER_SAMPLE[kind], COLORS[kind], marker_only=True)
        if ours[kind]:
            curve(ax, ours[kind], COLORS[kind])
        x, y = max((ours[kind] or PAPER_SAMPLE[kind]).items())
        ends.append((x, y, NAMES[kind], COLORS[kind]))
    label_ends(ax, ends)
    return save(fig, "throughput.png")


def plot_speedup(ours, hardware_name):
    fig, ax = figure("How many times as fast BDLM Mamba-H generates", "ratio of tokens/s",
                     f"lines: ours, {hardware_name}; hollow markers: the paper, 1 x A100-80GB. 700M, bf16.")
    ends = []
    for kind in ("diffumamba_h", "bdlm_attention"):
        for source in (PAPER_SAMPLE, ours):
            ratio = {n: v / source[kind][n] for n, v in source["mamba_h"].items() if n in source[kind]}
            if ratio:
                curve(ax, ratio, COLORS[kind], marker_only=source is PAPER_SAMPLE)
                end = (*max(ratio.items()), f"over {NAMES[kind]}", COLORS[kind])
        ends.append(end)
    ax.axhline(1, color="0.6", lw=0.8)
    ax.yaxis.set_major_formatter(lambda v, _: f"{v:g}x")
    label_ends(ax, ends)
    return save(fig, "speedup.png")


def plot_training(rows, hardware_name):
    fig, ax = figure("Training, 350M parameters, 8192 tokens a sequence", "thousand tokens/s per GPU",
                     f"filled: ours, {hardware_name}; hollow: the paper, 8 x A100-80GB. bf16.", lengths=False)
    counts = sorted({r["gpus"] for r in rows})
    speeds = {(r["config"].removesuffix("_350m"), r["gpus"]): r["tok_per_s"] / r["gpus"] for r in rows}
    speeds |= {(kind, 0): speed / 8 for kind, speed in PAPER_TRAIN.items()}
    width = 0.8 / (len(counts) + 1)
    for i, kind in enumerate(FOUR):
        for j, gpus in enumerate([*counts, 0]):
            speed = speeds.get((kind, gpus), 0) / 1000
            bar = ax.bar(i + (j - len(counts) / 2) * width, speed, 0.92 * width, edgecolor=COLORS[kind],
                         color=COLORS[kind] if gpus else "white", alpha=1 if gpus < 2 else 0.7)
            text = f"{speed:.0f}\n{f'{gpus} GPU' + 's' * (gpus > 1) if gpus else 'paper'}"
            ax.bar_label(bar, [text if speed else ""], padding=2, fontsize=8)
    ax.set_xticks(range(len(FOUR)), [NAMES[kind].replace("full-sequence ", "full-sequence\n") for kind in FOUR])
    ax.margins(y=0.15)
    return save(fig, "training.png")


# ---------------------------------------------------------------------------------------------

BENCHES = dict(train=bench_train, sample=bench_sample, ops=bench_ops)


def main(words):
    what, words = (words or [""])[0], words[1:]
    if what in ("", "-h", "--help"):
        return configure(globals(), ["--help"])
    if what not in (*BENCHES, "plot"):
        raise ConfigError(f"there is no subcommand {what!r}; choose from {', '.join(BENCHES)}, plot")
    files = []
    while what == "plot" and words and not words[0].startswith("--"):
        files.append(words.pop(0))
    configure(globals(), words)
    if what == "plot":
        return plot(files)
    parallel = Parallel(device, dist_timeout)
    line = ops.select_kernels(kernels, parallel.device)
    before, when = hardware(parallel.device), datetime.datetime.now(datetime.timezone.utc).isoformat()
    if parallel.rank == 0:
        print(f"{parallel.world} x {before.get('name')} | torch {before['torch']} | {line}", flush=True)
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
    given, sys.argv[1:] = sys.argv[1:], []
    try:
        main(given)
    except (ConfigError, ModelError) as error:
        sys.exit(f"bench.py: {error}")
