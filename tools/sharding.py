"""
Compares the training throughput of parallel.ShardedAdamW with that of two ways to shard AdamW in torch:

    torchrun --nproc_per_node=2 -m tools.sharding --out=assets/sharding.json

  ours   parallel.ShardedAdamW
  zero   DistributedDataParallel and ZeroRedundancyOptimizer: stage 1; its state is tied to the number of ranks
  fsdp   fully_shard of the whole model as one group, with reshard_after_forward=False

All three use the same model, batch, compiled layers and bf16 autocast. The losses after three steps are compared, which
checks that all three train alike. Without GPUs it runs config/laptop.py in fp32 over gloo.
"""
from configurator import ConfigError, check, configure, script  # first: see quiet_interrupt
import gc
import json
import math
import statistics
import sys

import torch
import torch.distributed as dist

from bench import release
from files import check_file, write_file
from model import BlockDiffusionLM, config_from_file
from parallel import Parallel, ShardedAdamW, ampere_or_later, compile_layers, hardware, select_kernels
from sample import now

config = ""                             # name of a file in config/; empty: mamba_h_350m on a GPU, laptop on a CPU
micro_batch_size = 8                    # sequences per device
iterations = 10                         # measured steps
only = []                               # some of ours, zero and fsdp; []: all three
device = "auto"
out = ""                                # also write the results to this JSON file

LR, BETAS, DECAY = 1e-3, (0.9, 0.95), 0.1


def ours(model, parallel):
    """Returns (the module to call, a function that makes the update). Gradients are summed over ranks, so `measure`
    divides each rank's loss by the number of ranks."""
    optimizer = ShardedAdamW(model, LR, BETAS, DECAY, parallel.rank, parallel.world)

    def update():
        optimizer.clip_and_step(LR)
        optimizer.zero_grad()
    return model, update


def library(wrap, optimizer_of):
    """Makes a function like `ours` from torch's wrapper and optimizer. They average gradients over ranks."""
    def build(model, parallel):
        wrapped = wrap(model)
        optimizer = optimizer_of(model.param_groups(DECAY))

        def update():
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return wrapped, update
    return build


def zero(groups):
    from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=LR, betas=BETAS, fused=True)


def adamw(groups):
    return torch.optim.AdamW(groups, lr=LR, betas=BETAS, fused=True)


def ddp(model):
    return torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def fsdp(model):
    from torch.distributed.fsdp import fully_shard
    return fully_shard(model, reshard_after_forward=False)


def measure(name, build, c, parallel):
    """One row of results: the median time of a step, and the losses of the first four steps, averaged over ranks."""
    dev = parallel.device
    gc.collect()                                        # the previous wrapped model is in a reference cycle
    release()
    torch.manual_seed(0)
    model = BlockDiffusionLM(c).to(dev)
    if ampere_or_later(dev):
        compile_layers(model)
    generator = torch.Generator(dev).manual_seed(1 + parallel.rank)
    x0 = torch.randint(0, c.mask_id, (micro_batch_size, c.seq_len), device=dev, generator=generator)
    wrapped, update = build(model, parallel)
    times, losses = [], []
    for _ in range(4 + iterations):
        now(dev)                                        # waits for the last step
        dist.barrier()
        start = now(dev)
        with torch.autocast(dev.type, torch.bfloat16, enabled=ampere_or_later(dev)):
            loss = wrapped(x0, generator)
        (loss / (parallel.world if name == "ours" else 1)).backward()
        update()
        times.append(now(dev) - start)
        losses.append(loss.detach())
    losses = [loss / parallel.world for loss in parallel.sum([float(loss) for loss in losses[:4]])]
    seconds = statistics.median(times[4:])
    return dict(sharding=name, gpus=parallel.world, ms=1000 * seconds, losses=losses,
                tok_per_s=x0.numel() * parallel.world / seconds,
                peak_gib=torch.cuda.max_memory_allocated() / 2 ** 30)


def main():
    kinds = dict(ours=ours, zero=library(ddp, zero), fsdp=library(fsdp, adamw))
    check(globals(), least=dict(micro_batch_size=1, iterations=1))
    for kind in only:
        check(dict(only=kind), choices=dict(only=[*kinds]))
    check_file("out", out)
    parallel = Parallel(device, 300)
    if parallel.world == 1:
        raise ConfigError("one process shards nothing; start two: torchrun --nproc_per_node=2 -m tools.sharding")
    on_gpu, rows = parallel.device.type == "cuda", []
    kernels = select_kernels("auto", parallel.device)
    name = config or ("mamba_h_350m" if on_gpu else "laptop")
    c = config_from_file(name)
    say = print if parallel.rank == 0 else (lambda *_, **__: None)
    say(f"{name}, {parallel.world} x {micro_batch_size} sequences | {kernels}", flush=True)
    for kind, build in ((k, kinds[k]) for k in only or kinds):
        try:
            rows.append(measure(kind, build, c, parallel))
        except Exception as error:                      # report the failure as a row and go on
            rows.append(dict(sharding=kind, error=f"{type(error).__name__}: {str(error)[:200]}"))
        say(rows[-1], flush=True)
    after = {r["sharding"]: r["losses"][3] for r in rows if "losses" in r}
    same = all(math.isclose(loss, next(iter(after.values())), rel_tol=5e-3 if on_gpu else 1e-5)
               for loss in after.values())
    if len(after) > 1:
        say(f"loss after three steps: {after}, {'the same' if same else 'NOT the same'} up to rounding")
    record = dict(config=name, same_loss=same, rows=rows, hardware=hardware(parallel.device))
    if parallel.rank == 0:
        write_file(out, json.dumps(record, indent=1))
    parallel.close()
    if not same or len(after) < len(rows):
        sys.exit(1)


if __name__ == "__main__":
    with script("sharding.py"):
        configure(globals())
        main()
