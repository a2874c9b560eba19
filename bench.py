"""
Measures the throughput of training and generation, as the paper does (tab:training-throughput-8k,
tab:inference-throughput), and compares each heavy operation with a library and with the limit of the hardware.

    python bench.py train         # 350M, 8192 tokens; or torchrun --nproc_per_node=8 bench.py train
    python bench.py sample        # 700M, batch 1, p = 16; some rows: --lengths=1024,65536
    python bench.py ops           # some operations: --only=scan,mixer
    python bench.py plot FILE...  # figures in assets/ from files that --out=FILE wrote

Compilation, capture and warm-up are not part of the measured time. Every run prints hardware, clocks, versions and
the selected kernels, and ends with one JSON line. On a CPU it measures small models.
"""
import contextlib
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

import paper
from configurator import UserError, check, check_names, configure, script, tqdm
from data import noise_generators
from decoders import Sampler
from files import check_file, write_file
from model import BlockDiffusionLM, config_from_file, train_flops
from parallel import (Parallel, ShardedAdamW, ampere_or_later, compile_layers, hardware, matmul_ceiling,
                      pick_dtype, select_kernels)
from sample import now, open_engine
from tools.compare_ops import COMPARISONS
from tools.throughput import plot        # imports matplotlib only when it is called

# ----------------------------------------------------------------------------------------------
# Settings
only = []                               # config files or operations, e.g. mamba_h_350m,attention_350m; []: all
lengths = []                            # generated lengths; []: the paper's
batch = [1]                             # batch sizes of `sample`
whole = [256, 1024, 8192, 32768, 65536]  # lengths timed as a whole; others are integrated over blocks
tokens_per_step = 16                    # p, tokens revealed per step
micro_batch_size = 8                    # training sequences per device
seq_len = 0                             # tokens of a training sequence; 0: as in the config file
warmup = 5                              # iterations before the measured ones, after the very first one
iterations = 15                         # measured iterations
out = ""                                # also write the JSON to this file
figures = "assets"                      # the folder in which `plot` writes its pictures
device = "auto"                         # auto, cpu, cuda or mps (not for `sample`)
kernels = "auto"                        # auto; torch: the plain operations; mamba_ssm: those of that package
compile = True                          # torch.compile the layers; on Ampere GPUs and later only

# ----------------------------------------------------------------------------------------------
# Measuring
def measure(step, dev, in_a_row=1):
    """Times step(). Returns the median seconds of `iterations` measurements, their spread (max - min) / median, and the
    seconds of the very first call, which may compile. Each measurement, except that first call, is the mean of
    `in_a_row` calls without a synchronisation between them."""
    times = []
    for calls in [1] + [in_a_row] * (warmup + iterations):
        start = now(dev)
        for _ in range(calls):
            step()
        times.append((now(dev) - start) / calls)
    counted = times[1 + warmup:]
    median = statistics.median(counted)
    return median, (max(counted) - min(counted)) / median, times[0]


def measured_ceilings(dev):
    """The limits of the hardware, measured: TFLOP/s of a product of two square matrices of random numbers (bf16 if the
    GPU has it), and TB/s of a copy, bytes read plus bytes written."""
    def rate(work, f):
        return work / measure(f, dev, in_a_row=10)[0]
    on_gpu, a = dev.type == "cuda", torch.randn(512, 512, device=dev)
    source, target = torch.zeros(2, 2 ** (28 if on_gpu else 22), device=dev)
    flops = matmul_ceiling(dev) if ampere_or_later(dev) else rate(2 * 512 ** 3, lambda: a @ a)
    bandwidth = rate(2 * source.nbytes, lambda: target.copy_(source))
    return dict(matmul_tflops=flops / 1e12, copy_tb_s=bandwidth / 1e12)


def limit_ms(flops, nbytes, ceilings):
    """The least milliseconds for these FLOPs and bytes at the measured ceilings: the longer of the two times."""
    tera = 1e12
    return 1000 * max(flops / (tera * ceilings["matmul_tflops"]), nbytes / (tera * ceilings["copy_tb_s"]))


def release():
    """Frees the compiled code and the memory of the last measurement, and resets the peak memory."""
    torch.compiler.reset()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


@contextlib.contextmanager
def recording_errors(row, any_error=False):
    """A context that swallows an out-of-memory error and writes it into row["error"]; with `any_error`, every other
    error too."""
    try:
        yield
    except Exception as error:
        out_of_memory = isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()
        if not out_of_memory and not any_error:
            raise
        row["error"] = "does not fit in memory" if out_of_memory else (
            f"failed: {type(error).__name__}: {str(error)[:80]!r}")


def run_all(parallel, names, make_rows, format_row):
    """Runs make_rows(name, ceilings), a generator of rows, for each name, and prints each as format_row(row). If a
    model does not fit in memory, its row says so and the run continues. Returns a dict of the ceilings and all rows."""
    rows, ceilings = [], measured_ceilings(parallel.device)
    def rows_of(name):
        failed = dict(config=Path(name).stem)
        with recording_errors(failed):
            yield from make_rows(name, ceilings)
        if "error" in failed:
            yield failed
    for name in tqdm(names, disable=parallel.rank > 0, leave=False):
        torch.manual_seed(0)
        release()
        for row in rows_of(name):
            rows.append(row)
            if parallel.rank == 0:
                tqdm.write(format_row(row))
    return dict(**ceilings, rows=rows)


def models(size, dev):
    """The config files to run: `only`, or by default the four models of this size; on a CPU config/laptop.py."""
    return only or ([f"{kind}_{size}" for kind in paper.MODELS] if dev.type == "cuda" else ["laptop"])


# ----------------------------------------------------------------------------------------------
# bench.py train
def bench_train(parallel):
    """Training throughput at 350M: synthetic batches, forward, backward, optimizer."""
    def make_rows(name, ceilings):
        yield train_row(name, training_config(name), parallel, 1e12 * ceilings["matmul_tflops"])
    names = models("350m", parallel.device)
    for name in names:
        training_config(name)                           # raises for a bad config before anything is measured
    return run_all(parallel, names, make_rows, format_train)


def training_config(name):
    """The named configuration, for sequences of the setting seq_len."""
    config = config_from_file(name)
    return config.for_length(seq_len) if seq_len else config


def training_step(config, batch, dev, rank=0, world=1):
    """A new model, compiled if `compile` says so. Returns a function that makes one training step of it, with
    `batch` synthetic sequences on each of `world` devices."""
    model = BlockDiffusionLM(config).to(dev)
    optimizer = ShardedAdamW(model, (0.9, 0.95), 0.1, rank, world)
    if compile and ampere_or_later(dev):
        compile_layers(model)
    x0 = torch.randint(0, config.mask_id, (batch, config.seq_len), device=dev)
    generators = noise_generators(rank, range(batch))
    def step():
        optimizer.zero_grad()
        with torch.autocast(dev.type, torch.bfloat16, enabled=ampere_or_later(dev)):
            loss = model(x0, generators) / world
        loss.backward()
        norm = optimizer.reduce_gradients()
        optimizer.step(1e-4, (1 / (norm + 1e-6)).clamp(max=1))      # clipped at norm 1
    return step


def train_row(name, config, parallel, ceiling):
    """Measures the training of one model. ceiling: FLOP/s of a matrix product."""
    step = training_step(config, micro_batch_size, parallel.device, parallel.rank, parallel.world)
    median, spread, first = measure(step, parallel.device)
    n_tokens = micro_batch_size * config.seq_len * parallel.world
    return dict(config=Path(name).stem, tok_per_s=n_tokens / median, ms=1000 * median, spread=spread, compile_s=first,
                mfu=train_flops(config, config.seq_len) * micro_batch_size / median / ceiling,
                gpus=parallel.world, seq_len=config.seq_len, batch=micro_batch_size * parallel.world,
                peak_gib=torch.cuda.max_memory_allocated() / 2 ** 30)


def format_train(r):
    if "error" in r:
        return f"{r['config']:<22}{r['error']}"
    paper_speed = paper.TRAIN.get(r["config"].removesuffix("_350m"), 0) / 8        # of one of its eight GPUs
    paper_speed *= r["seq_len"] == 8192                 # there is none for other sequences
    ratio = f"{r['tok_per_s'] / r['gpus'] / paper_speed:.2f}x the paper's A100" if paper_speed else ""
    return (f"{r['config']:<22}{r['tok_per_s']:>10,.0f} tok/s {r['ms']:>8.1f} ms "
            f"+-{50 * r['spread']:.1f}% {100 * r['mfu']:>5.1f}% of matmul ceiling "
            f"{r['peak_gib']:>6.1f} GiB  compile {r['compile_s']:.0f} s   {ratio}")


# ----------------------------------------------------------------------------------------------
# bench.py sample
@torch.no_grad()
def bench_sample(parallel):
    """Generation speed at 700M, with random weights and p tokens per step. Batch 1 is the paper's protocol."""
    dev, on_gpu = parallel.device, parallel.device.type == "cuda"
    def make_rows(name, ceilings):
        config, bare = config_from_file(name), Path(name).stem
        most = (65536 if config.full_sequence else config.rope_capacity) if on_gpu else 1024
        with torch.device(dev):
            model = BlockDiffusionLM(config)
        torch.nn.init.normal_(model.head.weight, std=0.02)
        engine = open_engine("auto", model, pick_dtype("auto", dev))
        model = engine[0]                               # now the only reference: the original weights are freed
        for b in batch:
            ladder = lengths or [n for n in paper.LADDER if b * n <= most]
            measure_rows, parts = full_sequence_rows, [ladder]
            # fast/cached_attention.py divides its work in another way if a cache is longer than SHORT_CACHE, so short
            # lengths are measured with a short cache.
            if not config.full_sequence:
                measure_rows, parts = block_rows, [[n for n in ladder if n <= 8192], [n for n in ladder if n > 8192]]
            if not ladder:
                yield dict(config=bare, batch=b, error=f"{b} rows of the shortest length are too many; give --lengths")
            for part in filter(None, parts):
                for row in measure_rows(*engine, b, part):
                    theirs = paper.SAMPLE.get(bare.removesuffix("_700m"), {}).get(row["length"])
                    theirs = theirs if (b, tokens_per_step) == (1, 16) else None
                    row |= dict(config=bare, batch=b, tokens_per_step=tokens_per_step)
                    yield dict(row, **limit_of_step(row, model, ceilings), paper=theirs)
    names, longest = models("700m", dev), max(lengths, default=0)
    for name in names:
        if longest > (most := config_from_file(name).rope_capacity):
            raise UserError(f"lengths must be at most {most}, the rotary capacity of {name}, but one is {longest}")
    return run_all(parallel, names, make_rows, format_sample)


def start_engine(model, new_engine, cache, l):
    """An engine for blocks of l tokens, and fields for its row: the engine, and the seconds to compile and capture."""
    dev, started = cache.lengths.device, time.perf_counter()
    sampler = Sampler(list(range(len(cache.lengths))), tokens_per_step=tokens_per_step, mask_id=model.config.mask_id)
    engine = new_engine(model, cache, sampler, l)
    return engine, dict(engine=engine.name, capture_s=now(dev) - started)


def block_rows(model, new_engine, b, ladder):
    """
    Yields a row for each length of a block model with batch b. All share one cache, as large as the longest needs.

    The time of one block, with the commit of the block before it, is measured at several prefix lengths. The time of a
    generation is the sum over its blocks, whose times are interpolated between these prefix lengths.
    Lengths in `whole` are also generated from start to end, and then that is the speed of the row.
    """
    l, dev = model.config.block_len, model.embed.weight.device
    capacity = (-(-max(ladder) // l) - 1) * l           # the last block is never committed
    cache = model.new_cache(b, max(capacity, l), l)
    engine, about = start_engine(model, new_engine, cache, l)
    fill(cache, model)
    mask_id, found = model.config.mask_id, []
    masks, x0 = torch.full((b, l), mask_id, device=dev), torch.randint(0, mask_id, (b, l), device=dev)
    candidates = (0, l, 1024, 4096, 16384, 32768, 65536, 131072)
    prefixes = sorted({capacity, *(prefix for prefix in candidates if prefix < capacity)})
    for prefix in prefixes:
        def block():
            cache.lengths.fill_(max(prefix - l, 0))     # the commit makes it `prefix`
            if prefix:                                  # the first block of a generation has nothing to commit
                engine.commit(x0)
            engine.decode(masks, [l])
        found.append(measure(block, dev, in_a_row=4))   # a generation does not synchronise between its blocks either
    seconds, spread, first = zip(*found)
    about["capture_s"] += max(0, sum(first) - sum(seconds))         # without graphs, the first calls compile
    for length in ladder:
        every_block = np.interp(range(0, length, l), prefixes, seconds)
        row = dict(length=length, tok_per_s=b * length / float(every_block.sum()),
                   how="integrated", spread=max(spread), cache_bytes=cache.nbytes,
                   prefixes=prefixes, block_ms=[1000 * s for s in seconds], **about)
        if length in whole:
            whole_s = statistics.median(generation_s(engine, cache, masks, -(-length // l))
                                        for _ in range(min(8, max(1, 8192 // length))))
            row.update(integrated=row["tok_per_s"], how="whole", tok_per_s=b * length / whole_s)
        yield row


def generation_s(engine, cache, masks, n_blocks):
    """Seconds to generate n_blocks blocks from an empty cache."""
    cache.clear()
    started = now(masks.device)
    x0 = engine.decode(masks, [masks.size(1)])
    for _ in range(n_blocks - 1):
        engine.commit(x0)
        x0 = engine.decode(masks, [masks.size(1)])
    return now(masks.device) - started


def fill(cache, model):
    """Fills a cache with the keys, values and states of random tokens. Zeros would not do: the speed of a GPU depends
    on the numbers that it multiplies. The model reads at most 8192 tokens; their keys and values are repeated."""
    c = model.config
    n = min(max(8192 // c.block_len, 1) * c.block_len, cache.max_len)
    model.prefill(torch.randint(0, c.mask_id, (len(cache.lengths), n), device=cache.lengths.device), cache)
    for state in cache.layers[::c.attn_every]:          # (keys, values) of the attention layers
        for part in state:
            for i in range(n, cache.max_len, n):
                part[:, :, i:i + n] = part[:, :, :min(n, cache.max_len - i)]


def full_sequence_rows(model, new_engine, b, ladder):
    """Yields a row for each length L of a full-sequence model with batch b. All L / p steps run over the same window of
    L tokens and do the same work, so one step is measured."""
    for length in ladder:
        row = dict(length=length, how="step x L / p")
        release()                                       # the last window's memory
        with recording_errors(row):
            engine, about = start_engine(model, new_engine, model.new_cache(b, 0, length), length)
            def step():
                engine.block.rewind()
                engine.step()
            median, row["spread"], first = measure(step, model.embed.weight.device)
            about["capture_s"] += max(0, first - median)
            row.update(about, tok_per_s=b * length / (-(-length // engine.block.tokens_per_step) * median))
        engine = None                                   # frees its memory before the next
        yield row


def step_work(c, b, l, prefix, p, width):
    """
    (FLOPs, bytes) of one denoising step of b rows of l tokens after a prefix, with `width` bytes per value.

    FLOPs: products with all weights, attention scores and values, the chunked products of the scan. The head, and all
    that follows the keys or the scan of the last layer, work on p tokens only. A block model commits a block every
    l / p steps: p / l of a commit is included (one Mamba direction, nothing after the states of the last layer).
    Bytes: weights and cache, read once. Activations are not counted.
    """
    d, n, di, chunk = c.d_model, c.d_state, c.d_inner, min(c.chunk_len, l)
    commit = 0 if c.full_sequence else p / l
    flops, values = 2 * p * d * c.vocab_size, d * c.vocab_size                 # the head
    for i in range(c.n_layer):
        # A commit runs one of the two directions of a Mamba layer, so its tokens count half there.
        last, share = i == c.n_layer - 1, 0.5 if i % c.attn_every else 1
        enter = l + share * commit * l                  # tokens that enter the layer: the step's, and part of a commit
        leave, through_mlp = (p, p) if last else (enter, l + commit * l)
        if i % c.attn_every == 0:
            # Weights of keys and values; weights of queries and output; values read from the cache.
            weights_before, weights_after, cached = 2 * d * d, 2 * d * d, 2 * prefix * d
            flops += 4 * leave * (prefix + l) * d
        else:
            # Both directions: weights before the scan; weights after it. Values of the cached state.
            weights_before = 2 * d * (2 * di + 2 * n + di // c.mamba_head_dim)
            weights_after, cached = 2 * di * d, n * di
            flops += 2 * enter * (2 * chunk * n + 2 * chunk * di + 4 * n * di)
        flops += 2 * (enter * weights_before + leave * weights_after + through_mlp * 8 * d * d)
        values += weights_before + weights_after + 8 * d * d + b * cached
    return b * flops, width * values


def limit_of_step(row, model, ceilings):
    """Fields for a row: the mean milliseconds of a step in its generation, and the limit of a step at the mean prefix
    length. The two are comparable because both grow linearly with the prefix. The last block runs whole."""
    if "error" in row:
        return {}
    c, width = model.config, model.head.weight.element_size()
    l, blocks = (row["length"], 1) if c.full_sequence else (c.block_len, -(-row["length"] // c.block_len))
    p = min(tokens_per_step, l)
    steps = blocks * -(-l // p)
    limit = limit_ms(*step_work(c, row["batch"], l, (blocks - 1) * l / 2, p, width), ceilings)
    ms = 1000 * row["batch"] * row["length"] / row["tok_per_s"] / steps
    return dict(ms_per_step=ms, limit_ms=limit, of_limit=limit / ms)


def format_sample(r):
    rows = f"{r['batch']} x " if r.get("batch", 1) > 1 else ""
    name = f"{r['config']:<20}{rows + str(r.get('length', '')):>11}"
    if "error" in r:
        return f"{name} {r['error']}"
    ratio = r["paper"] and f"{r['tok_per_s'] / r['paper']:.1f}x the paper's A100 ({r['paper']:,})"
    also = f" ({r['integrated']:,.0f} integrated)" if "integrated" in r else ""
    what = "a step" if r["how"] == "step x L / p" else "blocks"        # what the spread is of
    return (f"{name}{r['tok_per_s']:>10,.0f} tok/s  {r['how']}{also}  {r['ms_per_step']:.2f} ms "
            f"a step, {what} +-{50 * r['spread']:.1f}%, {100 * r['of_limit']:.0f}% of its limit, "
            f"{r['engine']}, compile and capture {r['capture_s']:.1f} s  {ratio or ''}")


# ----------------------------------------------------------------------------------------------
# bench.py ops
def bench_ops(parallel):
    """Compares each heavy operation of tools/compare_ops.py with a library for it and with its limit."""
    dev = parallel.device
    for name in only:
        check(dict(only=name), choices=dict(only=[*COMPARISONS]))
    on_gpu = dev.type == "cuda"
    def make_rows(name, ceilings):
        factory = dict(device=dev, dtype=pick_dtype("auto", dev))
        for comparison in COMPARISONS[name](factory, on_gpu, on_gpu and compile):
            row = op_row(dev, **comparison)
            row["limit_ms"] = limit_ms(row["flops"], row["bytes"], ceilings)
            row["of_limit"] = row["limit_ms"] / row.get("ms", float("inf"))
            yield row
    return run_all(parallel, only or COMPARISONS, make_rows, format_op)


def op_row(dev, op, ours, others, flops, nbytes, count=1, graph=True):
    """The row of one comparison. The arguments are the fields of a comparison in tools/compare_ops.py."""
    row = dict(op=op, flops=flops, bytes=nbytes, **timed(ours, dev, count, graph), others={})
    for name, f in others.items():
        other = row["others"][name] = timed(f, dev, count, graph)
        if "ms" in row and "ms" in other:
            other["ratio"] = other["ms"] / row["ms"]
    return row


def timed(f, dev, count, graph):
    """Fields for a row: the milliseconds of f, which runs an operation `count` times, and the memory that it needs on
    top. As a CUDA graph, the time excludes that of the host. If f is text, it says why it cannot run."""
    if isinstance(f, str):
        return dict(error=f)
    release()
    row = {}
    with recording_errors(row, any_error=True):
        before, started = torch.cuda.memory_allocated(), time.perf_counter()
        run = captured(f) if dev.type == "cuda" and graph else f
        capture_s = time.perf_counter() - started
        median, spread, first = measure(run, dev)
        row.update(ms=1000 * median / count, spread=spread, compile_s=capture_s + first,
                   extra_gib=(torch.cuda.max_memory_allocated() - before) / 2 ** 30)
    return row


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


def format_op(r):
    beside = "; ".join(
        f"{o['ratio']:.2f}x {name} ({o['ms']:.3f} ms, {o['extra_gib']:.1f} GiB)" if "ratio" in o
        else f"{name} {o.get('error', 'alone')}" for name, o in r.get("others", {}).items())
    ours = r.get("error") or (
        f"{r['ms']:.3f} ms +-{50 * r['spread']:.1f}%, {r['extra_gib']:.1f} GiB, "
        f"{100 * r['of_limit']:.0f}% of its limit of {r['limit_ms']:.3f} ms")
    return f"{r.get('op', r.get('config')):<41} {beside} | {ours}"


def check_settings():
    """Checks the settings before anything is measured. Raises UserError."""
    check(globals(), least=dict(iterations=1, warmup=0, micro_batch_size=1, tokens_per_step=1, seq_len=0))
    check_names(globals(), "only")
    for name in ("lengths", "whole", "batch"):
        if not all(type(n) is int and n > 0 for n in globals()[name]) or name == "batch" and not batch:
            raise UserError(f"{name} must be whole numbers above 0, but are {globals()[name]}; write them as "
                            f"1024,65536")
    if out and not out.endswith(".json"):
        raise UserError(f"out must end in .json, but is {out}")
    check_file("out", out)


def describe(record):
    """A record of `hardware` in one line, the name first."""
    return ", ".join([record["name"], *(f"{key} {value}" for key, value in record.items() if key != "name")])


def main(words):
    """Runs the subcommand words[0] with the settings that follow."""
    benches = dict(train=bench_train, sample=bench_sample, ops=bench_ops)
    what, words, files = (words or ["--help"])[0], words[1:], []
    if what in ("-h", "--help"):
        configure(globals(), ["--help"])                # and exits
    if what not in (*benches, "plot"):
        raise UserError(f"there is no subcommand {what!r}, only {', '.join(benches)} and plot")
    if what == "plot":
        files = [word for word in words if word.endswith(".json") and not word.startswith("--")]
    configure(globals(), [word for word in words if word not in files])
    if what == "plot":
        return plot(files, figures)
    check_settings()
    parallel = Parallel(device)
    line = select_kernels(kernels, parallel.device, training=what != "sample")
    before, when = hardware(parallel.device), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    if parallel.rank == 0:
        print(f"{parallel.world} x {describe(before)} | {line}", flush=True)
    result = dict(bench=what, when=when, **benches[what](parallel), hardware=before,
                  after=hardware(parallel.device), kernels=line)
    if parallel.rank == 0:
        print(f"after: {describe(result['after'])}")
        print(json.dumps(result), flush=True)           # before write_file, which may fail
        write_file(out, json.dumps(result, indent=1))
    parallel.close()


if __name__ == "__main__":
    _words, sys.argv[1:] = sys.argv[1:], []             # as in `configure`: a quote in argv would break torch.compile
    with script("bench.py"):
        main(_words)
