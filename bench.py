"""
The paper's throughput tables and figure, re-measured: tab:training-throughput-8k, tab:inference-throughput.

    python bench.py train            # also: torchrun --nproc_per_node=8 bench.py train
    python bench.py sample --lengths=[1024,65536]

Compilation, graph capture and warm-up are reported apart from the measurement; every run prints the
hardware, the versions and the kernels chosen, and ends in one JSON line.
"""
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time

import torch

import ops
from configurator import ConfigError, configure
from model import BlockDiffusionLM, ModelError, config_from_file
from sample import BlockDecoder, Sampler, prepare_for_inference
from train import Parallel, ShardedAdamW, train_flops

# ---------------------------------------------------------------------------------------------
# Settings
only = []                               # names of config files to run, e.g. ['mamba_h_350m']; []: all
lengths = []                            # of the sampling ladder; []: the paper's
whole = [1024, 32768]                   # block models: lengths that are generated from start to end
tokens_per_step = 16                    # p
micro_batch_size = 8                    # training sequences on a device
seq_len = 8192
warmup = 5                              # iterations before, and in, the measurement
iterations = 15
out = ""                                # also write the JSON here
device = "auto"
kernels = "auto"                        # auto, or torch to force the plain twins
compile = True
dist_timeout = 300
# ---------------------------------------------------------------------------------------------

FOUR = ["attention", "diffumamba_h", "bdlm_attention", "mamba_h"]
PAPER_TRAIN = dict(zip(FOUR, [229_957, 223_825, 151_976, 166_849]))    # 8 x A100, tokens/s


def config_path(name):
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "config", f"{name}.py")


def synchronize(dev):
    if dev.type == "cuda":
        torch.cuda.synchronize()


def measure(step, dev):
    """Seconds of each of `iterations` calls after `warmup` calls, and of the first call (compilation)."""
    times = []
    for i in range(1 + warmup + iterations):
        synchronize(dev)
        start = time.perf_counter()
        step()
        synchronize(dev)
        times.append(time.perf_counter() - start)
    return times[1 + warmup:], times[0]


def matmul_ceiling(dev, n=8192):
    """FLOP/s of a bf16 product of two n x n matrices of random numbers: what "peak" means here."""
    if dev.type != "cuda":
        n = 1024
    a, b = (torch.randn(n, n, device=dev, dtype=torch.bfloat16 if dev.type == "cuda" else None)
            for _ in range(2))
    for _ in range(3):
        a @ b
    synchronize(dev)
    start = time.perf_counter()
    for _ in range(10):
        a @ b
    synchronize(dev)
    return 10 * 2 * n ** 3 / (time.perf_counter() - start)


def hardware(dev):
    """What a figure needs beside it: device, driver, clocks, versions."""
    record = dict(torch=str(torch.__version__), python=platform.python_version(), device=str(dev))
    if dev.type == "cuda":
        query = "name,driver_version,clocks.sm,clocks.mem,temperature.gpu"
        with contextlib.suppress(OSError):
            line = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
                                  capture_output=True, text=True).stdout.splitlines()
            record.update(zip(query.split(","), line[0].split(", ")) if line else {})
        with contextlib.suppress(ImportError):
            import triton
            record["triton"] = triton.__version__
    else:
        record["name"] = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    return record


def bench_train(parallel):
    """Training throughput at 350M: synthetic batches, forward, backward, optimizer."""
    dev, rows = parallel.device, []
    ceiling = matmul_ceiling(dev)
    for name in only or [f"{kind}_350m" for kind in FOUR]:
        config = config_from_file(config_path(name))
        if seq_len != config.seq_len:
            config.block_len = seq_len if config.full_sequence else config.block_len
            config.seq_len = seq_len
        try:
            rows.append(train_row(name, config, parallel, ceiling))
        except torch.OutOfMemoryError:
            rows.append(dict(config=name, error="does not fit in memory"))
        torch.compiler.reset()
        if dev.type == "cuda":
            torch.cuda.empty_cache()
        if parallel.rank == 0:
            print(format_train(rows[-1]), flush=True)
    return dict(matmul_tflops=ceiling / 1e12, rows=rows)


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
        norm = optimizer.reduce()
        optimizer.step(1e-4, (1.0 / (norm + 1e-6)).clamp(max=1.0))

    seconds, first = measure(step, dev)
    median = statistics.median(seconds)
    tokens = micro_batch_size * config.seq_len * parallel.world
    flops = train_flops(config, config.seq_len) * micro_batch_size
    return dict(config=name, tok_per_s=tokens / median, ms=1000 * median,
                spread=(max(seconds) - min(seconds)) / median, mfu=flops / median / ceiling,
                compile_s=first, gpus=parallel.world, batch=micro_batch_size * parallel.world,
                peak_gib=torch.cuda.max_memory_allocated() / 2 ** 30 if dev.type == "cuda" else 0)


def format_train(r):
    if "error" in r:
        return f"{r['config']:<22} {r['error']}"
    paper = PAPER_TRAIN.get(r["config"].rsplit("_", 1)[0], 0) / 8
    return (f"{r['config']:<22}{r['tok_per_s']:>10,.0f} tok/s {r['ms']:>8.1f} ms +-{50 * r['spread']:.1f}% "
            f"{100 * r['mfu']:>5.1f}% of matmul ceiling {r['peak_gib']:>6.1f} GiB  compile {r['compile_s']:.0f} s"
            f"   {r['tok_per_s'] / r['gpus'] / paper if paper else 0:.2f}x the paper's A100")


# ---------------------------------------------------------------------------------------------

LADDER = [256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 200_000, 262_144]
PAPER_SAMPLE = {                        # tab:inference-throughput, 1 x A100, tokens/s
    "attention": [1035, 915, 1421, 1062, 761, 351, 122, 36],
    "diffumamba_h": [470, 541, 498, 461, 387, 429, 240, 101, 35],
    "bdlm_attention": [1935, 1887, 1955, 1927, 1728, 1663, 1331, 508, 263, 142, 91, 74],
    "mamba_h": [1146, 1167, 1082, 1158, 1019, 1281, 1234, 941, 694, 450, 364, 278]}
PREFIXES = [0, 1024, 4096, 16384, 65536, 131072, 261_888]


def bench_sample(parallel):
    """Generation throughput at 700M, random weights, batch 1, p tokens a step: the paper's protocol."""
    dev, rows = parallel.device, []
    for name in only or [f"{kind}_700m" for kind in reversed(FOUR)]:
        config = config_from_file(config_path(name))
        torch.manual_seed(0)
        with torch.device(dev):
            model = BlockDiffusionLM(config)
        torch.nn.init.normal_(model.head.weight, std=0.02)
        prepare_for_inference(model, torch.bfloat16 if dev.type == "cuda" else torch.float32)
        if compile and dev.type == "cuda":
            model.compile_layers("denoise", "commit_and_denoise")
        measure_rows = full_sequence_rows if config.full_sequence else block_rows
        for row in measure_rows(name, model, dev):
            rows.append(row)
            print(format_sample(row), flush=True)
        del model
        torch.compiler.reset()
        if dev.type == "cuda":
            torch.cuda.empty_cache()
    return dict(rows=rows)


def new_sampler(dev, mask_id):
    return Sampler([torch.Generator(dev).manual_seed(0)], tokens_per_step=tokens_per_step, mask_id=mask_id)


def block_rows(name, model, dev):
    """
    Rows of a block model. The time of one block (commit of the last one included) is measured at
    several prefix lengths; a generation of L tokens is the sum over its blocks, interpolated between
    them. `whole` lengths are generated from an empty prefix to the end instead.
    """
    c, kind = model.config, name.rsplit("_", 1)[0]
    ladder = lengths or LADDER
    capacity = min(max(ladder), c.rope_capacity) - c.block_len
    cache = model.new_cache(1, max(capacity, c.block_len), c.block_len)
    started = time.perf_counter()
    decoder = BlockDecoder(model, cache, new_sampler(dev, c.mask_id), c.block_len, dev.type == "cuda")
    synchronize(dev)
    capture_s = time.perf_counter() - started
    for state in cache.layers:                          # a prefix of random contents, not of zeros
        for part in state:
            part.normal_()
    masks = torch.full((1, c.block_len), c.mask_id, device=dev)
    at, seconds, spread = [], [], []
    for prefix in [p for p in PREFIXES if p <= capacity]:
        def block():
            cache.lengths.fill_(max(prefix - c.block_len, 0))       # the commit brings it to prefix
            decoder.decode(masks, prefix > 0, c.block_len)
        times, _ = measure(block, dev)
        at.append(prefix)
        seconds.append(statistics.median(times))
        spread.append((max(times) - min(times)) / seconds[-1])
    for length in ladder:
        starts = torch.arange(0, length, c.block_len, dtype=torch.float64)
        total = float(interpolate(starts, at, seconds).sum())
        row = dict(config=name, length=length, tok_per_s=length / total, how="integrated",
                   cache_bytes=cache.nbytes, capture_s=capture_s, spread=max(spread),
                   ms_per_step=1000 * seconds[-1] * tokens_per_step / c.block_len, prefixes=at,
                   block_ms=[1000 * s for s in seconds], paper=paper_sample(kind, length))
        if length in whole:
            cache.clear()
            synchronize(dev)
            begin = time.perf_counter()
            for i in range(-(-length // c.block_len)):
                decoder.decode(masks, i > 0, c.block_len)
            synchronize(dev)
            row.update(integrated=row["tok_per_s"], tok_per_s=length / (time.perf_counter() - begin), how="whole")
        yield row


def interpolate(x, at, values):
    """Piecewise linear through (at, values)."""
    at, values = (torch.tensor(v, dtype=torch.float64) for v in (at, values))
    if len(at) == 1:
        return values.expand(len(x))
    i = torch.searchsorted(at, x, right=True).clamp(1, len(at) - 1)
    return values[i - 1] + (x - at[i - 1]) * (values[i] - values[i - 1]) / (at[i] - at[i - 1])


def full_sequence_rows(name, model, dev):
    """Rows of a full-sequence model: L / p steps over the window of L tokens, each the same work, so a
    generation is that number times the step measured."""
    c, kind = model.config, name.rsplit("_", 1)[0]
    for length in [n for n in lengths or LADDER if n <= 65536]:
        row = dict(config=name, length=length, how="step x L / p", paper=paper_sample(kind, length))
        try:
            started = time.perf_counter()
            cache = model.new_cache(1, 0, length)
            decoder = BlockDecoder(model, cache, new_sampler(dev, c.mask_id), length, dev.type == "cuda")
            synchronize(dev)
            row["capture_s"] = time.perf_counter() - started
            def step():
                decoder.done.zero_()
                decoder.graphs[False].replay() if decoder.graphs else decoder.step(False)
            times, _ = measure(step, dev)
            median = statistics.median(times)
            row.update(tok_per_s=tokens_per_step / median, ms_per_step=1000 * median,
                       spread=(max(times) - min(times)) / median)
            del decoder
        except torch.OutOfMemoryError:
            row["error"] = "does not fit in memory"
        yield row


def paper_sample(kind, length):
    known = dict(zip(LADDER, PAPER_SAMPLE.get(kind, [])))
    return known.get(length)


def format_sample(r):
    if "error" in r:
        return f"{r['config']:<20}{r['length']:>8} {r['error']}"
    paper = f"{r['tok_per_s'] / r['paper']:.1f}x the paper's A100 ({r['paper']:,})" if r["paper"] else ""
    also = f" integrated {r['integrated']:,.0f}" if "integrated" in r else ""
    return (f"{r['config']:<20}{r['length']:>8}{r['tok_per_s']:>10,.0f} tok/s  {r['how']}{also}  "
            f"{r['ms_per_step']:.2f} ms a step +-{50 * r['spread']:.1f}%  {paper}")


def main(what):
    parallel = Parallel(device, dist_timeout)
    line = ops.select_kernels(kernels, parallel.device)
    before = hardware(parallel.device)
    if parallel.rank == 0:
        print(f"{parallel.world} x {before.get('name')} | torch {before['torch']} | {line}", flush=True)
    result = {"train": bench_train, "sample": bench_sample}[what](parallel)
    result.update(bench=what, hardware=before, after=hardware(parallel.device), kernels=line)
    if parallel.rank == 0:
        print(json.dumps(result))
        if out:
            with open(out, "w") as f:
                json.dump(result, f, indent=1)
    parallel.close()


if __name__ == "__main__":
    try:
        what = sys.argv.pop(1) if len(sys.argv) > 1 else ""
        if what not in ("train", "sample"):
            raise ConfigError("say what to measure: train or sample")
        configure(globals())
        main(what)
    except (ConfigError, ModelError, ops.KernelError) as error:
        sys.exit(f"bench.py: {error}")
