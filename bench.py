"""
The paper's throughput tables and figure, re-measured (tab:training-throughput-8k,
tab:inference-throughput), and each heavy operation beside a library and beside its own limit.

    python bench.py train         # 350M, 8192 tokens; or torchrun --nproc_per_node=8 bench.py train
    python bench.py sample        # 700M, batch 1, p = 16; some rows: --lengths=[1024,65536]
    python bench.py ops           # some operations: --only=['scan']
    python bench.py plot FILE...  # figures in assets/ from what --out=FILE wrote

Compilation, capture and warm-up are apart from the measurement; every run prints hardware, clocks,
versions and the kernels chosen, and ends in one JSON line. On a CPU: the same, small.
"""
from configurator import ConfigError, check, configure, script, tqdm  # first: see quiet_interrupt
import contextlib
import json
import statistics
import sys
import time

import numpy as np
import torch

import paper
from data import noise_generators
from decoders import Sampler
from files import check_file, write_file
from model import BlockDiffusionLM, config_from_file, train_flops
from parallel import (Parallel, ShardedAdamW, ampere, compile_layers, described, hardware, matmul_ceiling,
                      pick_dtype, select_kernels)
from sample import open_engine

# -- settings --
only = []                               # config files or operations, e.g. ['mamba_h_350m']; []: all
lengths = []                            # generated lengths; []: the paper's
batch = [1]                             # rows generated side by side; batch x length is at most the longest length
whole = [256, 1024, 8192, 32768, 65536] # lengths that block models generate from start to end
tokens_per_step = 16                    # p, tokens revealed per step
micro_batch_size = 8                    # training sequences on a device
seq_len = 0                             # tokens of a training sequence; 0: the config's
warmup = 5                              # iterations that are not counted
iterations = 15                         # iterations that are
out = ""                                # a file that gets the JSON as well
figures = "assets"                      # where `plot` puts its pictures
device = "auto"                         # auto, cpu, cuda or mps
kernels = "auto"                        # auto; torch: the plain operations; mamba_ssm: those of that package
compile = True                          # torch.compile the layers; on CUDA only
dist_timeout = 300                      # seconds until a collective without an answer ends the job

# -- measuring --
def synchronize(dev):
    if dev.type == "cuda":
        torch.cuda.synchronize()


def measure(step, dev, in_a_row=1):
    """Median seconds of `iterations` calls after `warmup`, their spread (max - min) / median, and
    seconds of the first call, which compiles and stands alone. Later times are means of so many
    calls in a row."""
    times = []
    for calls in [1] + [in_a_row] * (warmup + iterations):
        synchronize(dev)
        start = time.perf_counter()
        for _ in range(calls):
            step()
        synchronize(dev)
        times.append((time.perf_counter() - start) / calls)
    counted = times[1 + warmup:]
    median = statistics.median(counted)
    return median, (max(counted) - min(counted)) / median, times[0]


def measured_ceilings(dev):
    """What "limit" means here: TFLOP/s of a product of two square matrices of random numbers (bf16
    on a GPU), and TB/s, read and written, of a copy."""
    def rate(work, f):
        return work / measure(f, dev, in_a_row=10)[0]
    on_gpu, a = dev.type == "cuda", torch.randn(512, 512, device=dev)
    source, target = torch.zeros(2, 2 ** (28 if on_gpu else 22), device=dev)
    flops = matmul_ceiling(dev) if ampere(dev) else rate(2 * 512 ** 3, lambda: a @ a)
    nbytes = rate(2 * source.nbytes, lambda: target.copy_(source))
    return dict(matmul_tflops=flops / 1e12, copy_tb_s=nbytes / 1e12)


def limit_ms(flops, nbytes, ceilings):
    """Milliseconds that the FLOPs alone or the bytes alone would take, whichever is longer."""
    return 1e-9 * max(flops / ceilings["matmul_tflops"], nbytes / ceilings["copy_tb_s"])


def release():
    """Frees what the last row compiled and held, and counts the peak of memory anew."""
    torch.compiler.reset()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


@contextlib.contextmanager
def noting(row, everything=False):
    """A lack of memory inside becomes the row's error, and so does `everything` else if wanted."""
    try:
        yield
    except Exception as error:
        full = isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()
        if not full and not everything:
            raise
        row["error"] = "does not fit in memory" if full else (
            f"failed: {type(error).__name__}: {str(error)[:80]!r}")


def run_all(parallel, names, make_rows, describe, rows_each=1):
    """Runs make_rows(name, ceilings), a generator of about rows_each rows, for each name and prints
    each row. What does not fit in memory is a row that says so, and the run goes on."""
    rows, ceilings = [], measured_ceilings(parallel.device)
    def rows_of(name):
        lost = dict(config=name)
        with noting(lost):
            yield from make_rows(name, ceilings)
        if "error" in lost:
            yield lost
    with tqdm(total=len(names), disable=parallel.rank > 0, leave=False,
              bar_format="{percentage:3.0f}% |{bar:20}| {elapsed}, ETA {remaining}") as bar:
        for i, name in enumerate(names, 1):
            torch.manual_seed(0)
            release()
            for row in rows_of(name):
                rows.append(row)
                bar.clear()
                if parallel.rank == 0:
                    print(describe(row), flush=True)
                bar.update(min(1 / rows_each, i - bar.n))
            bar.update(i - bar.n)
    return dict(**ceilings, rows=rows)


def models(size, dev):
    """Config files to run: the setting, or all four of a size; on a CPU the laptop's."""
    return only or ([f"{kind}_{size}" for kind in paper.MODELS] if dev.type == "cuda" else ["laptop"])


# -- train --
def bench_train(parallel):
    """Training throughput at 350M: synthetic batches, forward, backward, optimizer."""
    def make_rows(name, ceilings):
        yield train_row(name, training_config(name), parallel, 1e12 * ceilings["matmul_tflops"])
    names = models("350m", parallel.device)
    for name in names:
        training_config(name)                           # so that a bad one costs no measurement
    return run_all(parallel, names, make_rows, format_train)


def training_config(name):
    """The named configuration, for sequences of the setting seq_len."""
    config = config_from_file(name)
    return config.for_length(seq_len) if seq_len else config


def train_row(name, config, parallel, ceiling):
    dev, on_gpu = parallel.device, parallel.device.type == "cuda"
    model = BlockDiffusionLM(config).to(dev)
    optimizer = ShardedAdamW(model, 1e-3, (0.9, 0.95), 0.1, parallel.rank, parallel.world)
    if compile and ampere(dev):
        compile_layers(model)
    x0 = torch.randint(0, config.mask_id, (micro_batch_size, config.seq_len), device=dev)
    generators = noise_generators(parallel.rank, range(micro_batch_size))
    def step():
        optimizer.zero_grad()
        with torch.autocast(dev.type, torch.bfloat16, enabled=ampere(dev)):
            loss = model(x0, generators) / parallel.world
        loss.backward()
        optimizer.clip_and_step(1e-4)
    median, spread, first = measure(step, dev)
    return dict(config=name, tok_per_s=x0.numel() * parallel.world / median, ms=1000 * median,
                spread=spread, compile_s=first,
                mfu=train_flops(config, config.seq_len) * micro_batch_size / median / ceiling,
                gpus=parallel.world, batch=micro_batch_size * parallel.world,
                peak_gib=torch.cuda.max_memory_allocated() / 2 ** 30)


def format_train(r):
    if "error" in r:
        return f"{r['config']:<22}{r['error']}"
    theirs = paper.TRAIN.get(r["config"].removesuffix("_350m"), 0) / 8
    beside = f"{r['tok_per_s'] / r['gpus'] / theirs:.2f}x the paper's A100" if theirs else ""
    return (f"{r['config']:<22}{r['tok_per_s']:>10,.0f} tok/s {r['ms']:>8.1f} ms "
            f"+-{50 * r['spread']:.1f}% {100 * r['mfu']:>5.1f}% of matmul ceiling "
            f"{r['peak_gib']:>6.1f} GiB  compile {r['compile_s']:.0f} s   {beside}")


# -- sample --
@torch.no_grad()
def bench_sample(parallel):
    """Generation at 700M, random weights, p tokens a step; with batch 1 the paper's protocol."""
    dev, on_gpu = parallel.device, parallel.device.type == "cuda"
    def make_rows(name, ceilings):
        config = config_from_file(name)
        most = (65536 if config.full_sequence else config.rope_capacity) if on_gpu else 1024
        with torch.device(dev):
            model = BlockDiffusionLM(config)
        torch.nn.init.normal_(model.head.weight, std=0.02)
        engine = open_engine("auto", model, pick_dtype("auto", dev), compile and on_gpu)
        model = engine[0]                               # the one from which it was prepared is freed
        for b in batch:
            ladder = lengths or [n for n in paper.LADDER if b * n <= most]
            rows, parts = full_sequence_rows, [ladder]
            if not config.full_sequence:                # SHORT_CACHE of fast/cached_attention.py parts them
                rows, parts = block_rows, [[n for n in ladder if n <= 8192], [n for n in ladder if n > 8192]]
            for row in (row for part in parts if part for row in rows(*engine, b, part)):
                theirs = paper.SAMPLE.get(name.removesuffix("_700m"), {}).get(row["length"]) if b == 1 else None
                row |= dict(config=name, batch=b)
                yield dict(row, **limit_of_step(row, model, ceilings), paper=theirs)
    names, longest = models("700m", dev)[::-1], max(lengths, default=0)
    for name in names:
        if longest > (most := config_from_file(name).rope_capacity):
            raise ConfigError(f"lengths go up to {longest}; {name} makes at most {most} tokens")
    return run_all(parallel, names, make_rows, format_sample, len(lengths or paper.LADDER))


def open_decoder(model, new_decoder, cache, l):
    """A decoder of the active block of l tokens, and what a row says of it: its engine, and the seconds that
    compiling and capturing took."""
    dev, started = cache.lengths.device, time.perf_counter()
    sampler = Sampler(list(range(len(cache.lengths))), tokens_per_step=tokens_per_step, mask_id=model.config.mask_id)
    decoder = new_decoder(model, cache, sampler, l)
    synchronize(dev)
    return decoder, dict(engine=decoder.engine, capture_s=time.perf_counter() - started)


def block_rows(model, new_decoder, b, ladder):
    """Results of a block model with b rows, in one cache of the capacity that the longest needs. The time of one block
    (commit of the last one included) is measured at several prefix lengths; a generation is the sum over
    its blocks, interpolated between them.
    `whole` lengths are generated from an empty prefix to the end too, short ones several times."""
    l, dev = model.config.block_len, model.embed.weight.device
    capacity = (-(-max(ladder) // l) - 1) * l           # the last block is never committed
    cache = model.new_cache(b, max(capacity, l), l)
    decoder, about = open_decoder(model, new_decoder, cache, l)
    fill(cache, model)
    mask_id, found = model.config.mask_id, []
    masks, x0 = torch.full((b, l), mask_id, device=dev), torch.randint(0, mask_id, (b, l), device=dev)
    usual = (0, l, 1024, 4096, 16384, 32768, 65536, 131072)        # the first block has nothing to commit
    at = sorted({capacity, *(prefix for prefix in usual if prefix < capacity)})
    for prefix in at:
        def block():
            cache.lengths.fill_(max(prefix - l, 0))     # the commit brings it to prefix
            if prefix:
                decoder.commit(x0)
            decoder.decode(masks, [l])
        found.append(measure(block, dev, in_a_row=4))   # as in a generation, where none is waited for
    seconds, spread, first = zip(*found)
    about["capture_s"] += max(0, sum(first) - sum(seconds))         # steps that are not graphs compile there
    for length in ladder:
        every_block = np.interp(range(0, length, l), at, seconds)
        row = dict(length=length, tok_per_s=b * length / float(every_block.sum()),
                   how="integrated", spread=max(spread), cache_bytes=cache.nbytes,
                   prefixes=at, block_ms=[1000 * s for s in seconds], **about)
        if length in whole:
            whole_s = statistics.median(generation_s(decoder, cache, masks, -(-length // l))
                                        for _ in range(max(1, 8192 // length)))
            row.update(integrated=row["tok_per_s"], how="whole", tok_per_s=b * length / whole_s)
        yield row


def generation_s(decoder, cache, masks, n_blocks):
    """Seconds of a generation of so many blocks after an empty prefix."""
    cache.clear()
    synchronize(masks.device)
    started = time.perf_counter()
    for i in range(n_blocks):
        if i:
            decoder.commit(x0)
        x0 = decoder.decode(masks, [masks.size(1)])
    synchronize(masks.device)
    return time.perf_counter() - started


def fill(cache, model):
    """Fills a cache with what the model makes of random tokens, keys and values repeated: how fast a GPU
    multiplies depends on the numbers."""
    c = model.config
    n = min(max(8192 // c.block_len, 1) * c.block_len, cache.max_len)
    model.prefill(torch.randint(0, c.mask_id, (len(cache.lengths), n), device=cache.lengths.device), cache)
    for state in cache.layers[::c.attn_every]:          # (keys, values) of the attention layers
        for part in state:
            for i in range(n, cache.max_len, n):
                part[:, :, i:i + n] = part[:, :, :min(n, cache.max_len - i)]


def full_sequence_rows(model, new_decoder, b, ladder):
    """Results of a full-sequence model with b rows: L / p steps over a window of L tokens, each the same work."""
    for length in ladder:
        row = dict(length=length, how="step x L / p")
        release()                                       # dynamo compiles a function for few lengths only
        with noting(row):
            decoder, about = open_decoder(model, new_decoder, model.new_cache(b, 0, length), length)
            def step():
                decoder.block.rewind()
                decoder.step()
            median, row["spread"], first = measure(step, model.embed.weight.device)
            about["capture_s"] += max(0, first - median)
            row.update(about, tok_per_s=b * tokens_per_step / median)
        decoder = None                                  # frees its memory before the next
        yield row


def step_work(c, b, l, prefix, p, width):
    """(FLOPs, bytes) of one denoising step of b rows of l tokens after a prefix, at `width` bytes a value: products with every weight, attention's area, the scan's chunked products; the head, and what comes after
    the last layer's scan or keys, on p tokens; weights and cache read once, activations not counted. A
    block model commits a block every l / p steps, in the same pass: that share of a clean pass
    (one Mamba direction, nothing after the last layer's states) is in the FLOPs."""
    d, n, di, chunk = c.d_model, c.d_state, c.d_inner, min(c.chunk_len, l)
    commit = 0 if c.full_sequence else p / l
    flops, values = 2 * p * d * c.vocab_size, d * c.vocab_size
    for i in range(c.n_layer):
        last, share = i == c.n_layer - 1, 0.5 if i % c.attn_every else 1
        enter = l + share * commit * l                  # tokens of a step and its share of a commit
        leave, through_mlp = (p, p) if last else (enter, l + commit * l)
        if i % c.attn_every == 0:
            before, after, read = 2 * d * d, 2 * d * d, 2 * prefix * d         # keys and values; the others
            flops += 4 * leave * (prefix + l) * d
        else:
            before, after, read = 2 * d * (2 * di + 2 * n + di // c.mamba_head_dim), 2 * di * d, n * di
            flops += 2 * enter * (2 * chunk * n + 2 * chunk * di + 4 * n * di)
        flops += 2 * (enter * before + leave * after + through_mlp * 8 * d * d)
        values += before + after + 8 * d * d + b * read
    return b * flops, width * values


def limit_of_step(row, model, ceilings):
    """Milliseconds of a step, averaged over the row's generation, and its limit at the mean prefix:
    both grow linearly with the prefix."""
    if "error" in row:
        return {}
    c, p, width = model.config, tokens_per_step, model.head.weight.element_size()
    l, prefix = (row["length"], 0) if c.full_sequence else (c.block_len, row["length"] / 2)
    limit = limit_ms(*step_work(c, row["batch"], l, prefix, p, width), ceilings)
    ms = 1000 * row["batch"] * p / row["tok_per_s"]
    return dict(ms_per_step=ms, limit_ms=limit, of_limit=limit / ms)


def format_sample(r):
    rows = f"{r['batch']} x " if r.get("batch", 1) > 1 else ""
    name = f"{r['config']:<20}{rows + str(r.get('length', '')):>11}"
    if "error" in r:
        return f"{name} {r['error']}"
    beside = r["paper"] and f"{r['tok_per_s'] / r['paper']:.1f}x the paper's A100 ({r['paper']:,})"
    also = f" ({r['integrated']:,.0f} integrated)" if "integrated" in r else ""
    return (f"{name}{r['tok_per_s']:>10,.0f} tok/s  {r['how']}{also}  {r['ms_per_step']:.2f} ms "
            f"a step +-{50 * r['spread']:.1f}%, {100 * r['of_limit']:.0f}% of its limit, "
            f"{r['engine']}, compile and capture {r['capture_s']:.1f} s  {beside or ''}")


# -- ops --
def bench_ops(parallel, operations):
    """Each heavy operation beside the library a user would otherwise pick and beside its limit. operations: those of
    tools/operations.py, {name: a generator of comparisons}."""
    dev = parallel.device
    for name in only:
        check(dict(only=name), choices=dict(only=[*operations]))
    on_gpu = dev.type == "cuda"
    def make_rows(name, ceilings):
        kind = dict(device=dev, dtype=pick_dtype("auto", dev))
        for comparison in operations[name](kind, on_gpu, on_gpu and compile):
            row = op_row(dev, **comparison)
            row["limit_ms"] = limit_ms(row["flops"], row["bytes"], ceilings)
            row["of_limit"] = row["limit_ms"] / row.get("ms", float("inf"))
            yield row
    return run_all(parallel, only or operations, make_rows, format_op, 3)


def op_row(dev, op, ours, others, flops, nbytes, count=1, graph=True):
    """A row of one comparison of tools/operations.py: what is timed, and the fields as there."""
    row = dict(op=op, flops=flops, bytes=nbytes, **timed(ours, dev, count, graph), others={})
    for name, f in others.items():
        other = row["others"][name] = timed(f, dev, count, graph)
        if "ms" in row and "ms" in other:
            other["ratio"] = other["ms"] / row["ms"]
    return row


def timed(f, dev, count, graph):
    """Milliseconds of one operation (as a CUDA graph: without the host's), and its own memory."""
    if isinstance(f, str):
        return dict(error=f)
    release()
    row = {}
    with noting(row, everything=True):
        before, started = torch.cuda.memory_allocated(), time.perf_counter()
        run = captured(f) if dev.type == "cuda" and graph else f
        capture_s = time.perf_counter() - started
        median, spread, first = measure(run, dev)
        row.update(ms=1000 * median / count, spread=spread, compile_s=capture_s + first,
                   extra_gib=(torch.cuda.max_memory_allocated() - before) / 2 ** 30)
    return row


def captured(step):
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):                       # compiles and tunes
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    # A recording that fails leaves its own stream behind as the current one, hence the first.
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
    """Raises, before anything is measured, for settings that cannot work."""
    check(globals(), least=dict(iterations=1, warmup=0, micro_batch_size=1, tokens_per_step=1,
                                seq_len=0, dist_timeout=1))
    for name in ("lengths", "whole", "batch"):
        if not all(type(n) is int and n > 0 for n in globals()[name]):
            raise ConfigError(f"{name} must be whole numbers above 0, but is {globals()[name]}; write them as "
                              f"[1024,65536]")
    check_file("out", out)


def main(words, operations=None, plot=None):
    """Runs a subcommand. operations and plot: what `ops` and `plot` hand over to, see tools/."""
    benches = dict(train=bench_train, sample=bench_sample, ops=lambda parallel: bench_ops(parallel, operations))
    what, words, files = (words or ["--help"])[0], words[1:], []
    if what in ("-h", "--help"):
        configure(globals(), ["--help"])                # and exits
    if what not in (*benches, "plot"):
        raise ConfigError(f"there is no subcommand {what!r}, only {', '.join(benches)} and plot")
    if what == "plot":                                  # files stand anywhere but behind `--name`
        files = [word for before, word in zip(["", *words], words) if not word.startswith("--")
                 and (not before.startswith("--") or "=" in before)]
    configure(globals(), [word for word in words if word not in files])
    if what == "plot":
        return plot(files, figures)
    check_settings()
    parallel = Parallel(device, dist_timeout)
    line = select_kernels(kernels, parallel.device, training=what != "sample")
    before, when = hardware(parallel.device), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    if parallel.rank == 0:
        print(f"{parallel.world} x {described(before)} | {line}", flush=True)
    result = dict(bench=what, when=when, **benches[what](parallel), hardware=before,
                  after=hardware(parallel.device), kernels=line)
    if parallel.rank == 0:
        print(f"after: {described(result['after'])}")
        print(json.dumps(result), flush=True)           # first, as writing may still fail
        write_file(out, json.dumps(result, indent=1))
    parallel.close()


if __name__ == "__main__":
    # argv is cleared because torch.compile pastes it, unquoted, into the code it writes.
    _words, sys.argv[1:] = sys.argv[1:], []
    with script("bench.py"):
        from tools.operations import OPERATIONS
        from tools.throughput import plot               # matplotlib is imported when it draws
        main(_words, OPERATIONS, plot)
