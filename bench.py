"""
Measures the throughput of training and generation, as the paper does (tab:training-throughput-8k,
tab:inference-throughput), with random weights.

    python bench.py train         # 350M, 8192 tokens; or torchrun --nproc_per_node=8 bench.py train
    python bench.py sample        # 700M, batch 1, p = 16; some rows: --lengths=1024,65536

`python -m tools.throughput` draws what --out=FILE wrote; `python -m tools.compare_ops` measures single operations.
Compilation, capture and warm-up are not part of the measured time. Every run prints hardware, versions and the selected
kernels, and ends with one JSON line. On a CPU it measures a small model. Speed is measured in one way for each kind:

  training                 whole steps: forward, backward, optimizer
  generation, block model  up to 8K tokens whole generations; beyond, the sum of block times, interpolated over prefixes
  full-sequence model      one step times length / p, since all steps run over the same window
"""
import functools
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch

import paper
from checkpoint import config_from_file
from configurator import UserError, check, configure, script, write_file
from decoders import Sampler
from model import BlockDiffusionLM, ModelConfig
from nelbo import noise_generators
from parallel import (Parallel, ShardedAdamW, ampere_or_later, compile_layers, end_if_a_rank_is_lost, hardware,
                      pick_dtype, select_kernels)
from sample import now, open_engine

# ----------------------------------------------------------------------------------------------
# Settings
only = []                               # config files, such as mamba_h_350m,attention_350m; []: the paper's four
lengths = []                            # generated lengths; []: the paper's
batch = [1]                             # batch sizes of `sample`
tokens_per_step = 16                    # p, tokens revealed per step
decoder = "random"                      # random, strided or confidence: which tokens a step reveals
micro_batch_size = 8                    # training sequences per device
warmup = 5                              # iterations before the measured ones, after the very first one
iterations = 15                         # measured iterations
out = ""                                # also write the JSON to this file
device = "auto"                         # auto, cpu, cuda or mps (not for `sample`)
kernels = "auto"                        # auto; torch: the plain operations; mamba_ssm: those of that package
compile = True                          # torch.compile the layers; on Ampere GPUs and later only
# ----------------------------------------------------------------------------------------------

WHOLE = 8192                            # longer generations are summed over their blocks
PREFIXES = (0, 1024, 4096, 16384, 32768, 65536, 131072)         # where a block is timed for that


# ----------------------------------------------------------------------------------------------
# Measuring

def measure(step, dev, n_warmup, n_timed, in_a_row=1):
    """Times step(): first one call, which may compile, then n_warmup + n_timed measurements, of which the last n_timed
    count. Each is the mean of `in_a_row` calls without a synchronisation between them. Returns the median seconds of
    those that count, their spread (max - min) / median, and the seconds of the first call."""
    times = []
    for calls in [1] + [in_a_row] * (n_warmup + n_timed):
        start = now(dev)
        for _ in range(calls):
            step()
        times.append((now(dev) - start) / calls)
    counted = times[1 + n_warmup:]
    median = float(np.median(counted))
    return median, (max(counted) - min(counted)) / median, times[0]


def matmul_ceiling(dev, n=8192, dtype=torch.bfloat16):
    """Measured FLOP/s of products of two n x n matrices of random numbers. A model FLOPs utilisation (MFU) is a
    fraction of this number."""
    a, b = torch.randn(2, n, n, device=dev, dtype=dtype)
    return 2 * n ** 3 / measure(lambda: a @ b, dev, 3, 5, in_a_row=5)[0]


def release():
    """Frees compiled code and memory that nothing holds any longer, and resets the peak memory."""
    torch.compiler.reset()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def train_flops(config, s, masked=0.5):
    """
    Floating-point operations of one training sequence of s tokens, forward and backward: matrix products of both
    streams (2 per weight and token, times 3), attention's visible area, the scan's chunked products, and the head on
    the share `masked` of positions. Recomputation is not counted.
    """
    d, v, n, di = config.d_model, config.vocab_size, config.d_state, config.d_inner
    n_blocks, l = config.split_blocks(s)
    n_clean = s - l
    total = s * masked * 2 * d * v
    for i in range(config.n_layer):
        clean_out = 0 if i == config.n_layer - 1 else n_clean   # clean tokens that go past the mixer
        total += (s + clean_out) * 2 * 8 * d * d            # the MLP
        if i % config.attn_every == 0:
            area = l * l * n_blocks * (n_blocks + 1) // 2   # noisy: earlier clean blocks and its own
            area += l * l * n_blocks * (n_blocks - 1) // 2 if clean_out else 0
            total += (s + clean_out) * 2 * 4 * d * d            # qkv and the output projection
            total += (n_clean - clean_out) * 2 * 2 * d * d      # the last layer's clean tokens: only keys and values
            total += 4 * area * d                               # scores, weighted values
        else:
            q = min(config.chunk_len, l)
            project = 2 * d * (2 * di + 2 * n + di // config.mamba_head_dim) + 2 * di * d
            scan = 2 * q * n + 2 * q * di + 4 * n * di      # scores, times x, state in and out
            directions = 2 if config.reverse_scan else 1    # of noisy tokens; clean ones are scanned forward
            total += (directions * s + n_clean) * (project + scan)
    return 3 * total


def models(size, dev):
    """(name, ModelConfig) of each config to measure: the setting `only`, or by default the four models of this size;
    on a CPU config/laptop.py."""
    names = only or ([f"{kind}_{size}" for kind in paper.MODELS] if dev.type == "cuda" else ["laptop"])
    return [(Path(name).stem, config_from_file(name)) for name in map(str, names)]


# ----------------------------------------------------------------------------------------------
# bench.py train

def bench_train(parallel):
    """Yields for each model of 350M what is known of a row, and the function that measures the rest."""
    dev, world = parallel.device, parallel.world
    ceiling = matmul_ceiling(dev) if ampere_or_later(dev) else None            # None: no MFU
    for name, config in models("350m", dev):
        row = dict(config=name, length=config.seq_len, gpus=world, batch=micro_batch_size * world)
        if config.seq_len == 8192:                      # the paper's only length; its figures are of eight GPUs
            row["paper"] = paper.TRAIN.get(name.removesuffix("_350m"), 0) / 8 * world
        yield row, functools.partial(time_training, config, parallel, ceiling)


def time_training(config, parallel, ceiling):
    """Fields for a row: synthetic batches, forward, backward, optimizer."""
    step = training_step(config, micro_batch_size, parallel.device, parallel.rank, parallel.world)
    seconds, spread, first = measure(step, parallel.device, warmup, iterations)
    speed = micro_batch_size / seconds                  # sequences a second on each device
    return dict(spread=spread, compile_s=first, tok_per_s=speed * parallel.world * config.seq_len, ms=1000 * seconds,
                peak_gib=torch.cuda.max_memory_allocated() / 2 ** 30,
                mfu=ceiling and train_flops(config, config.seq_len) * speed / ceiling)


def training_step(config, at_a_time, dev, rank=0, world=1):
    """A new model, compiled if `compile` says so. Returns a function that makes one training step of it, with
    `at_a_time` synthetic sequences on each of `world` devices."""
    model = BlockDiffusionLM(config).to(dev)
    optimizer = ShardedAdamW(model, (0.9, 0.95), 0.1, rank, world)
    if compile and ampere_or_later(dev):
        compile_layers(model)
    x0 = torch.randint(0, config.mask_id, (at_a_time, config.seq_len), device=dev)
    generators = noise_generators(rank, range(at_a_time))
    def step():
        optimizer.zero_grad()
        with torch.autocast(dev.type, torch.bfloat16, enabled=ampere_or_later(dev)):
            loss = model(x0, generators) / world
        loss.backward()
        norm = optimizer.reduce_gradients()
        optimizer.step(1e-4, (1 / (norm + 1e-6)).clamp(max=1))      # clipped at norm 1
    return step


# ----------------------------------------------------------------------------------------------
# bench.py sample

def bench_sample(parallel):
    """Yields for each model of 700M and length what is known of a row, and the function that measures the rest. Batch 1
    is the paper's protocol."""
    dev, on_gpu = parallel.device, parallel.device.type == "cuda"
    for name, config in models("700m", dev):
        most = (65536 if config.full_sequence else config.rope_capacity) if on_gpu else 1024       # of b * length
        for b in batch:
            for length in lengths or [n for n in paper.LADDER if b * n <= most]:
                row = dict(config=name, length=length, batch=b, decoder=decoder, tokens_per_step=tokens_per_step)
                if (b, decoder, tokens_per_step) == (1, "random", 16):      # the paper's protocol
                    row["paper"] = paper.SAMPLE.get(name.removesuffix("_700m"), {}).get(length)
                yield row, functools.partial(time_generation, config, dev, b, length)


@torch.no_grad()
def time_generation(config, dev, b, length):
    """Fields for a row: b generations of `length` tokens side by side by a new model. capture_s: seconds to build the
    engine, which may record CUDA graphs."""
    build = engine_builder(config, dev, b, length)
    started = time.perf_counter()
    engine = build()
    n_blocks = -(-length // engine.block.xt.size(1))    # rounded up
    row = dict(engine=engine.name, cache_bytes=engine.cache.nbytes, capture_s=now(dev) - started)
    if config.full_sequence:                            # all steps run over the same window
        how, (seconds, spread, _) = "step x length / p", measure(engine.step, dev, warmup, iterations)
        seconds *= -(-length // tokens_per_step)
    elif length <= WHOLE:
        how, (seconds, spread) = "whole", whole_seconds(engine, n_blocks)
    else:
        how, (seconds, spread) = "blocks", blocks_seconds(engine, n_blocks)
    return dict(row, tok_per_s=b * length / seconds, spread=spread, how=how)


def engine_builder(config, dev, b, length):
    """Makes a model of random weights. Returns a function that builds an engine for b generations of `length` tokens
    by it."""
    with torch.device(dev):
        model = BlockDiffusionLM(config)
    torch.nn.init.normal_(model.head.weight, std=0.02)  # at 0 all tokens are equally likely
    model, new_engine = open_engine("auto", model, pick_dtype("auto", dev))    # frees the original weights
    l = config.block_of(length)
    # Room for all blocks but the last, which is never committed. At least for one: blocks_seconds times a block with
    # the commit of the block before it, also if a generation has only one block.
    cache = model.new_cache(b, 0 if config.full_sequence else max(-(-length // l) - 1, 1) * l, l)
    sampler = Sampler(list(range(b)), decoder, tokens_per_step, mask_id=config.mask_id)
    return functools.partial(new_engine, model, cache, sampler, l)


def whole_seconds(engine, n_blocks):
    """(seconds, spread) of a generation of n_blocks blocks from an empty cache."""
    masks = torch.full_like(engine.block.xt, engine.block.sampler.mask_id)     # (b, l)

    def generation():
        engine.cache.clear()
        x0 = engine.decode(masks, masks.size(1))
        for _ in range(n_blocks - 1):
            engine.commit(x0)
            x0 = engine.decode(masks, masks.size(1))
    return measure(generation, masks.device, warmup, iterations)[:2]


def blocks_seconds(engine, n_blocks):
    """(seconds, spread) of a generation of n_blocks blocks. One block, with the commit of the block before it, is timed
    after several prefixes; the time of a generation is the sum over its blocks, interpolated between these."""
    model, cache, masks = engine.model, engine.cache, torch.full_like(engine.block.xt, engine.block.sampler.mask_id)
    l, x0 = masks.size(1), torch.randint_like(masks, model.config.mask_id)
    # Random tokens, not zeros: the speed of a GPU depends on the numbers that it multiplies.
    model.prefill(torch.randint(model.config.mask_id, (len(masks), cache.max_len), device=masks.device), cache)
    # l: from there on a block has a commit before it.
    prefixes = sorted({l, cache.max_len, *(n for n in PREFIXES if n < cache.max_len)})

    def block(prefix):
        # Attention now reads only the keys of so many positions. The states of Mamba layers stay those of a longer
        # prefix, which changes no time. FastEngine commits a block in the first step of the next one, so after `decode`
        # none is pending.
        cache.lengths.fill_(max(prefix - l, 0))         # the commit makes it `prefix`
        if prefix:                                      # the first block of a generation has nothing to commit
            engine.commit(x0)
        engine.decode(masks, l)
    # A generation does not synchronise between its blocks either.
    timed = [measure(functools.partial(block, n), masks.device, warmup, iterations, in_a_row=4) for n in prefixes]
    every_block = np.interp(range(0, n_blocks * l, l), prefixes, [seconds for seconds, *_ in timed])
    return float(every_block.sum()), max(spread for _, spread, _ in timed)


# ----------------------------------------------------------------------------------------------
# The script

# What `show` adds of a row, if it has that.
MORE = dict(how="{}", engine="{}", ms="{:.1f} ms", mfu="{:.0%} of a matrix product's speed", peak_gib="{:.1f} GiB")


def show(row):
    """Prints a row under the columns of `main`: half the spread as a percentage; the paper's figure where there is
    one."""
    what = f"{row['config']:<22}{row['length']:>8}{row['batch']:>6}"
    if "error" in row:
        return print(what, row["error"], flush=True)
    theirs = f"{row['paper']:,.0f}" if row.get("paper") else "-"
    more = ", ".join(form.format(row[key]) for key, form in MORE.items() if row.get(key))
    print(f"{what}{row['tok_per_s']:>12,.0f}{50 * row['spread']:>7.1f} %{theirs:>12}  {more}", flush=True)


def main(words):
    """Runs the subcommand words[0], train or sample, with the settings that follow."""
    what, *words = words or ["--help"]
    benches = dict(train=bench_train, sample=bench_sample)
    configure(globals(), [what] if what.startswith("-") else words)           # a flag in place of a subcommand: --help
    check(globals() | dict(subcommand=what), least=dict(iterations=1, warmup=0, micro_batch_size=1, tokens_per_step=1),
          endings=dict(out=".json"), choices=dict(subcommand=benches, decoder=("random", "strided", "confidence")))
    for n in (*lengths, *batch):
        if type(n) is not int or not 0 < n <= ModelConfig.rope_capacity:
            raise UserError(f"lengths and batch are whole numbers from 1 to {ModelConfig.rope_capacity}, not {n!r}")

    parallel, rows = Parallel(device), []
    machine, line = hardware(parallel.device), select_kernels(kernels, parallel.device, training=what == "train")
    print(f"{parallel.world} x {', '.join(f'{k} {v}' for k, v in machine.items())}, {line}")
    print(f"{'config':<22}{'length':>8}{'batch':>6}{'tokens/s':>12}{'+-':>9}{'paper, A100':>12}", flush=True)
    for row, measured in benches[what](parallel):
        release()                                       # what the measurement before has left
        try:
            row.update(measured())
        except RuntimeError as error:
            if "out of memory" not in str(error).lower():
                raise
            row["error"] = "does not fit in memory"
        rows.append(row)
        show(row)

    write_record("" if parallel.rank else out, what, rows, hardware=machine, kernels=line)
    parallel.close()


def write_record(path, what, rows, **about):
    """Prints a benchmark's JSON line and writes it to the file `path`."""
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    record = json.dumps(dict(bench=what, when=when, rows=rows, **about))
    print(record, flush=True)                           # before write_file, which may fail
    write_file(path, record + "\n")


if __name__ == "__main__":
    with end_if_a_rank_is_lost("bench.py"), script("bench.py"):
        main([sys.argv.pop(1) for _ in sys.argv[1:]])   # as in `configure`: a quote in argv would break torch.compile
