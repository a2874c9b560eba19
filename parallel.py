"""
One process or many, and the device under each: the process group, which rows of the batch a process runs,
AdamW sharded over processes, which implementation of the operations runs, and compiled layers.

    python train.py                                                     # one process
    torchrun --nproc_per_node=8 train.py config/mamba_h_87m.py          # one process for each GPU

One process is the case of world = 1: the same code, and nothing is communicated.
"""
import contextlib
import datetime
import importlib
import importlib.util
import os
import pathlib
import platform
import subprocess

import torch
import torch.distributed as dist

import ops
from configurator import ConfigError, check

ROOT = pathlib.Path(__file__).resolve().parent
KERNELS = ("auto", "torch", "mamba_ssm")

# torch 2.13 renamed these two; 2.11 has only the old names.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


# ---------------------------------------------------------------------------------------------
# The device, and what runs on it

def pick_device(name):
    """"auto" -> cuda or cpu. Not mps, which lacks the fp64 that sampling wants; it must be asked for.
    Raises ConfigError for a device that this machine lacks."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    here = dict(cpu=True, cuda=torch.cuda.is_available(), mps=torch.backends.mps.is_available())
    if not here.get(name.partition(":")[0], False):
        raise ConfigError(f"this machine has no device '{name}'; use --device=auto")
    return name


def ampere(device):
    """Whether a device is a GPU of compute capability 8.0 (Ampere) or more: bf16 and the kernels of fast/ need it."""
    return torch.device(device).type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def pick_dtype(setting, device):
    """"auto" -> torch.bfloat16 where the GPU has it, torch.float32 elsewhere; otherwise the dtype of that name."""
    return getattr(torch, setting) if setting != "auto" else torch.bfloat16 if ampere(device) else torch.float32


def has_fast():
    """Whether the folder fast/ is here. Looks for its file: an ImportError could also be a mistake inside fast/."""
    return (ROOT / "fast" / "__init__.py").is_file()


def select_kernels(setting, device, training=True):
    """
    Decides which implementation of the operations runs on a device, and returns a line that says which. setting:
    "auto" takes the fastest ones, those of fast/ on a GPU; "torch" takes the plain ones; "mamba_ssm" takes those of
    the packages mamba-ssm and causal-conv1d, and plain ones for the rest. training: whether the caller trains or
    evaluates; generation alone starts sooner without. Raises ConfigError for another setting, and
    for mamba_ssm where it cannot run.
    """
    check(dict(kernels=setting), choices=dict(kernels=KERNELS))
    ops.FAST.clear()
    if setting == "mamba_ssm":
        if not (ampere(device) and has_fast()):
            raise ConfigError(f"kernels=mamba_ssm needs a GPU of compute capability 8.0 or more, and the folder fast/; "
                              f"this is {device}. Use --kernels=auto")
        from fast import mamba_ssm
        try:
            return mamba_ssm.select()
        except ImportError as error:
            raise ConfigError(f"kernels=mamba_ssm needs the package mamba-ssm ({error}); MAMBA_FORCE_BUILD=TRUE "
                              f"MAMBA_SKIP_CUDA_BUILD=TRUE pip install --no-deps --no-build-isolation "
                              f"mamba-ssm==2.3.2.post1 einops") from None
    if torch.device(device).type != "cuda":
        return "kernels: plain"
    if setting == "torch":
        return "kernels: plain (kernels=torch)"
    if not ampere(device):
        return (f"kernels: plain ({torch.cuda.get_device_name(device)} has compute capability "
                f"{'.'.join(map(str, torch.cuda.get_device_capability(device)))}; bf16 and fast/ need 8.0)")
    if not has_fast():
        return "kernels: plain (there is no folder fast)"
    import fast
    return fast.select(device, training)


def compile_layers(model):
    """torch.compile of what a training step runs: every layer's two_stream, and model.final. Does nothing without
    Triton, in which torch.compile writes its kernels. The backward makes pointwise results (GELU, norms)
    again: a third less memory for at most 2 % of the time."""
    if importlib.util.find_spec("triton") is None:
        return
    torch._dynamo.config.recompile_limit = 64           # kinds of layers, batch sizes, with and without autograd
    from torch._functorch import config as partitioner
    partitioner.ban_recompute_materialized_backward = False
    partitioner.ban_recompute_used_far_apart = False
    for layer in model.layers:
        layer.two_stream = torch.compile(layer.two_stream, dynamic=False)
    model.final = torch.compile(model.final, dynamic=False)


def matmul_ceiling(dev, n=8192):
    """Measured FLOP/s of a product of two n x n bf16 matrices of random numbers on this GPU: what a
    model FLOPs utilisation (MFU) is a fraction of."""
    a, b = torch.randn(2, n, n, device=dev).bfloat16()
    times = []
    for _ in range(8):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(5):
            a @ b
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 5e3)
    return 2 * n ** 3 / sorted(times[3:])[2]


def hardware(dev):
    """What a figure needs beside it: device, driver, clocks, versions, the revision of this code."""
    cpu = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    record = dict(name=cpu, torch=torch.__version__, python=platform.python_version(), device=dev)
    git = ["git", f"--git-dir={ROOT / '.git'}", f"--work-tree={ROOT}", "describe", "--always", "--dirty"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        record["revision"] = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    if dev.type == "cuda":
        gpu = torch.cuda.get_device_properties(dev)
        keys = "driver_version,clocks.sm,clocks.mem,temperature.gpu"
        smi = ["nvidia-smi", f"--id=GPU-{gpu.uuid}", f"--query-gpu={keys}", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            found = subprocess.run(smi, capture_output=True, text=True, check=True).stdout
            record.update(zip(keys.split(","), found.strip().split(", ")))
        with contextlib.suppress(ImportError):
            record["triton"] = importlib.import_module("triton").__version__
        record["name"] = gpu.name
    return {k: str(v) for k, v in record.items()}


def described(record):
    """hardware() in one line, the name first."""
    rest = [f"{key} {value}" for key, value in record.items() if key != "name"]
    return ", ".join([str(record.get("name", "unknown device")), *rest])


# ---------------------------------------------------------------------------------------------
# Processes

class Parallel:
    """Rank, world size and device of this process; starts and ends the process group. timeout: seconds until a
    collective without an answer ends the job. Raises ConfigError for a device that this machine lacks."""

    def __init__(self, device, timeout):
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.device = torch.device(pick_device(device))
        if self.device.type == "cuda":
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", self.device.index or 0)))
            torch.cuda.set_device(self.device)
        if self.world > 1:
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout))

    def sum(self, values):
        """Sums a list of numbers over ranks, in fp64."""
        x = torch.tensor(values, dtype=torch.float64, device=self.device if self.world > 1 else "cpu")
        if self.world > 1:
            dist.all_reduce(x)
        return x.tolist()

    def close(self):
        """Ends the group when every rank is done with it: one that leaves early breaks the others."""
        if self.world > 1:
            dist.barrier()
            dist.destroy_process_group()


def lost_rank(error):
    """Whether an error of a collective says that another process is gone or silent."""
    words = ("peer", "timed out", "timeout", "connection", "socket", "nccl")
    return dist.is_initialized() and any(word in str(error).lower() for word in words)


def share_of_batch(batch_size, micro_batch_size, rank, world):
    """The rows of the global batch that this rank runs, as micro-batches: a list of ranges. Raises ConfigError if the
    batch does not divide over ranks, or a rank's share into micro-batches."""
    if batch_size % world:
        raise ConfigError(f"batch_size {batch_size} does not divide over {world} processes; "
                          f"choose a multiple of {world}")
    share = batch_size // world
    micro = min(micro_batch_size or share, share)
    if share % micro:
        raise ConfigError(f"each process has {share} sequences per step, which micro_batch_size "
                          f"{micro} does not divide")
    return [range(i, i + micro) for i in range(rank * share, (rank + 1) * share, micro)]


class ShardedAdamW:
    """
    AdamW with fp32 master weights, moments and update sharded over ranks (ZeRO stage 2).

    Parameters live in two flat buffers (with and without weight decay), and so do their gradients; a step is one
    reduce-scatter of gradients, torch's own AdamW on this rank's slice, and one all-gather of parameters. On one
    process the slice is everything and nothing is communicated. The state is a dict by parameter name, so a
    checkpoint resumes on any number of ranks. `python -m tools.sharding` sets this beside torch's own.
    """

    def __init__(self, model, lr, betas, weight_decay, rank=0, world=1):
        self.rank, self.world, self.flats = rank, world, []
        names = {p: name for name, p in model.named_parameters()}
        for group in model.param_groups(weight_decay):
            sizes = [p.numel() for p in group["params"]]
            padded = -(-sum(sizes) // world) * world    # every rank has an equal slice
            first = group["params"][0]
            flat, grad = first.new_zeros(padded), first.new_zeros(padded)
            places, at = {}, 0
            for p, size in zip(group["params"], sizes):
                flat[at:at + size] = p.detach().flatten()
                # From here on both are views of the buffers: never set p.grad to None, nor p.data to another tensor.
                p.data, p.grad = flat[at:at + size].view_as(p), grad[at:at + size].view_as(p)
                places[names[p]] = (at, p.shape)
                at += size
            part = slice(rank * padded // world, (rank + 1) * padded // world)
            shard = flat[part].clone() if world > 1 else flat
            self.flats.append(dict(flat=flat, grad=grad, shard=shard, places=places, part=part,
                                   weight_decay=group["weight_decay"]))
            if world > 1:
                dist.broadcast(flat, 0)                 # all ranks start from the first one's weights
                shard.copy_(flat[part])
        self.adamw = torch.optim.AdamW(
            [dict(params=[f["shard"]], weight_decay=f["weight_decay"]) for f in self.flats],
            lr=lr, betas=betas, eps=1e-8, fused=True)

    def reduce(self):
        """Sums gradients over ranks, each rank keeping its slice: the loss was divided by the whole batch already.
        Returns the global norm, a tensor; slices do not overlap, so their squares add up."""
        square = 0
        for f in self.flats:
            if self.world == 1:
                f["shard"].grad = f["grad"]
            else:
                f["shard"].grad = torch.empty_like(f["shard"])
                reduce_scatter(f["shard"].grad, f["grad"])
            square = square + f["shard"].grad.square().sum()
        if self.world > 1:
            dist.all_reduce(square)
        return square.sqrt()

    def step(self, lr, scale):
        """Updates with the reduced gradients times scale (a tensor or a number), then gathers parameters."""
        for f, group in zip(self.flats, self.adamw.param_groups):
            f["shard"].grad.mul_(scale)
            group["lr"] = lr
        self.adamw.step()
        if self.world > 1:
            for f in self.flats:
                all_gather(f["flat"], f["shard"])

    def clip_and_step(self, lr, max_norm=1.0):
        """Everything between the gradients and the next parameters; the host never waits for the device."""
        norm = self.reduce()
        self.step(lr, (max_norm / (norm + 1e-6)).clamp(max=1.0))

    def zero_grad(self):
        for f in self.flats:
            f["grad"].zero_()

    def state_dict(self):
        """The whole state by parameter name, on the CPU of rank 0 (None elsewhere). Collective."""
        out = {}
        for f in self.flats:
            state = self.adamw.state.get(f["shard"], {})
            for key in ("exp_avg", "exp_avg_sq"):
                shard = state.get(key, torch.zeros_like(f["shard"]))
                full = torch.empty_like(f["flat"]) if self.world > 1 else shard
                if self.world > 1:
                    all_gather(full, shard)
                if self.rank == 0:
                    full = full.cpu()
                    for name, (at, shape) in f["places"].items():
                        part = full[at:at + shape.numel()].view(shape)
                        out.setdefault(name, {})[key] = part.clone()
            out["step"] = int(state.get("step", 0))
        return out if self.rank == 0 else None

    def load_state_dict(self, saved):
        """Call it after model.load_state_dict: copies this rank's slice of the parameters and of the saved moments,
        which any number of ranks may have written."""
        for f in self.flats:
            f["shard"].copy_(f["flat"][f["part"]])
            state = dict(step=torch.tensor(float(saved["step"]), device=f["shard"].device))
            for key in ("exp_avg", "exp_avg_sq"):
                full = torch.zeros_like(f["flat"])
                for name, (at, shape) in f["places"].items():
                    full[at:at + shape.numel()] = saved[name][key].flatten()
                state[key] = full[f["part"]].clone()
            self.adamw.state[f["shard"]] = state
