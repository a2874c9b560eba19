"""
Training throughput with three ways to shard AdamW, the measurement behind train.ShardedAdamW:

    torchrun --nproc_per_node=2 assets/sharding.py --out=assets/sharding.json

ours: train.ShardedAdamW. zero: DistributedDataParallel and ZeroRedundancyOptimizer. fsdp: fully_shard
with reshard_after_forward=False. The same model, batch, compiled layers and bf16 autocast each time.
"""
import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
import ops  # noqa: E402
from bench import hardware, named_config  # noqa: E402
from configurator import configure  # noqa: E402
from model import BlockDiffusionLM  # noqa: E402
from train import Parallel, ShardedAdamW  # noqa: E402

config = "mamba_h_350m"
micro_batch_size = 8
iterations = 10
out = ""


def ours(model, parallel):
    optimizer = ShardedAdamW(model, 1e-4, (0.9, 0.95), 0.1, parallel.rank, parallel.world)

    def update():
        norm = optimizer.reduce()
        optimizer.step(1e-4, (1 / (norm + 1e-6)).clamp(max=1.0))
        optimizer.zero_grad()
    return model, update


def library(wrap, make):
    def build(model, parallel):
        wrapped = wrap(model)
        optimizer = make(model)

        def update():
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return wrapped, update
    return build


def zero(model):
    from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4, betas=(0.9, 0.95),
                                   weight_decay=0.1, fused=True)


def ddp(model):
    return torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def fsdp(model):
    from torch.distributed.fsdp import fully_shard
    return fully_shard(model, reshard_after_forward=False)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def main():
    parallel = Parallel("cuda", 300)
    ops.select_kernels("auto", parallel.device)
    c, rows = named_config(config), []
    x0 = torch.randint(0, c.mask_id, (micro_batch_size, c.seq_len), device=parallel.device)
    for name, build in dict(ours=ours, zero=library(ddp, zero), fsdp=library(fsdp, adamw)).items():
        torch.manual_seed(0)
        torch.compiler.reset()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        model = BlockDiffusionLM(c).to(parallel.device)
        model.compile_layers()
        generator = torch.Generator(parallel.device).manual_seed(parallel.rank)
        try:
            wrapped, update = build(model, parallel)
            times = []
            for _ in range(4 + iterations):
                torch.cuda.synchronize()
                dist.barrier()
                start = time.perf_counter()
                with torch.autocast("cuda", torch.bfloat16):
                    loss = wrapped(x0, generator) / (parallel.world if name == "ours" else 1)
                loss.backward()
                update()
                torch.cuda.synchronize()
                times.append(time.perf_counter() - start)
            seconds = statistics.median(times[4:])
            rows.append(dict(sharding=name, gpus=parallel.world, ms=1000 * seconds,
                             tok_per_s=x0.numel() * parallel.world / seconds,
                             peak_gib=torch.cuda.max_memory_allocated() / 2 ** 30))
        except Exception as error:                      # one that cannot run is a row that says so
            rows.append(dict(sharding=name, error=f"{type(error).__name__}: {str(error)[:200]}"))
        if parallel.rank == 0:
            print(rows[-1], flush=True)
        del model
        wrapped = update = None
    if parallel.rank == 0 and out:
        with open(out, "w") as f:
            json.dump(dict(config=config, rows=rows, hardware=hardware(parallel.device)), f, indent=1)
    parallel.close()


if __name__ == "__main__":
    configure(globals())
    main()
