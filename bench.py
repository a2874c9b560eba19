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
from train import Parallel, ShardedAdamW, train_flops

# ---------------------------------------------------------------------------------------------
# Settings
only = []                               # names of config files to run, e.g. ['mamba_h_350m']; []: all
lengths = []                            # of the sampling ladder; []: the paper's
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


def main(what):
    parallel = Parallel(device, dist_timeout)
    line = ops.select_kernels(kernels, parallel.device)
    before = hardware(parallel.device)
    if parallel.rank == 0:
        print(f"{parallel.world} x {before.get('name')} | torch {before['torch']} | {line}", flush=True)
    result = {"train": bench_train}[what](parallel)
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
        if what not in ("train",):
            raise ConfigError("say what to measure: train")
        configure(globals())
        main(what)
    except (ConfigError, ModelError) as error:
        sys.exit(f"bench.py: {error}")
