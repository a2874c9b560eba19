"""
Devices and processes: chooses the device and the implementation of the operations, compiles layers, starts the process
group, divides the batch over processes, and shards AdamW over them.

    python train.py                                                     # one process
    torchrun --nproc_per_node=8 train.py config/mamba_h_87m.py          # one process for each GPU

One process runs the same code with world = 1, and communicates nothing.
"""
import contextlib
import datetime
import os
import platform
import subprocess
import sys
import zlib

import torch
import torch.distributed as dist
# Must be imported before the process group exists: else gloo's threads outlive it.
import torch.distributed.nn
from tqdm import tqdm

import ops
from configurator import ROOT, UserError, check


# ----------------------------------------------------------------------------------------------
# The device, and what runs on it

def pick_device(name):
    """The name of the device to use. "auto" is cuda if there is one, else cpu; never mps, which has no fp64 for
    sampling. cuda:1 becomes the current GPU. Raises UserError for a device that this machine lacks."""
    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    mps = ["mps"] if torch.backends.mps.is_available() else []
    check(dict(device=name), choices=dict(device=["auto", "cpu", *(["cuda", *gpus] if gpus else []), *mps]))
    if name == "auto":
        return "cuda" if gpus else "cpu"
    if name in gpus:
        torch.cuda.set_device(name)                     # Triton and CUDA graphs run on the current device
    return name


def ampere_or_later(device):
    """Whether a device is a GPU of compute capability 8.0 (Ampere) or above. bf16 and fast/ need that."""
    return torch.device(device).type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def one_thread_if_small(flops):
    """Keeps CPU work on one thread if a pass has few floating-point operations, unless OMP_NUM_THREADS says otherwise.
    More threads hardly speed it up, and they spin while they wait: beside a busy program that takes ten times as
    long."""
    if flops < 5e9 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def pick_dtype(setting, device):
    """The torch dtype of a setting. "auto" is bfloat16 on a GPU that has it, else float32. Raises UserError for another
    setting."""
    check(dict(dtype=setting), choices=dict(dtype=("auto", "float32", "bfloat16")))
    if setting == "auto":
        return torch.bfloat16 if ampere_or_later(device) else torch.float32
    return getattr(torch, setting)


def has_fast():
    """Whether the folder fast/ exists. This looks for the file, since `import fast` may also fail for other reasons."""
    return (ROOT / "fast" / "__init__.py").is_file()


def select_kernels(setting, device, training=True):
    """
    Selects which implementation of the operations in ops.py runs on a device, by filling the table ops.FAST. Returns
    a line that says which. setting:

      auto        the kernels of fast/ on a GPU of compute capability 8.0 or above, else the plain operations
      torch       the plain operations
      mamba_ssm   those of the packages mamba-ssm and causal-conv1d, and plain ones for the rest

    training: False if the caller only generates. Then the kernels that only training and evaluation use are not loaded.
    Raises UserError for another setting, or if mamba_ssm cannot run.
    """
    check(dict(kernels=setting), choices=dict(kernels=("auto", "torch", "mamba_ssm")))
    ops.FAST.clear()
    if setting == "torch" or (setting == "auto" and torch.device(device).type != "cuda"):
        return "kernels: plain"
    if not (ampere_or_later(device) and has_fast()):
        needs = "a GPU of compute capability 8.0 or more, and the folder fast/"
        if setting == "mamba_ssm":
            raise UserError(f"kernels=mamba_ssm needs {needs}; this is {device}; use --kernels=auto")
        return f"kernels: plain (the Triton kernels need {needs})"

    if setting == "mamba_ssm":
        from fast import mamba_ssm
        return mamba_ssm.select()
    import fast
    return fast.select(device, training)


def compile_layers(model):
    """Compiles the parts of a training step with torch.compile: the two_stream of each layer, and model.final. Does
    nothing if Triton cannot be imported, because torch.compile generates Triton kernels. Returns a line about it."""
    try:                                                # what torch.compile imports; a broken Triton fails in many ways
        import torch._inductor.runtime.triton_compat, triton                    # noqa: E401, F401
    except Exception as error:
        return f"nothing is compiled, which is slow: torch cannot use Triton ({error!r}); see `pip check`"
    # Each kind of layer is compiled for each batch size, with and without autograd. The default limit is 8.
    torch._dynamo.config.recompile_limit = 64
    # The backward pass recomputes pointwise results (GELU, norms), which saves much memory and costs little time.
    from torch._functorch import config as partitioner
    partitioner.ban_recompute_materialized_backward = False
    partitioner.ban_recompute_used_far_apart = False
    for layer in model.layers:
        layer.two_stream = torch.compile(layer.two_stream, dynamic=False)
    model.final = torch.compile(model.final, dynamic=False)
    return "the first step compiles the layers, which takes a minute or two"


def hardware(dev):
    """What a measurement was made with: a dict of device, versions and revision of this code."""
    cpu = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    name = torch.cuda.get_device_name(dev) if dev.type == "cuda" else cpu
    record = dict(name=name, torch=str(torch.__version__), python=platform.python_version(), device=str(dev))
    # --git-dir: if this folder is a plain copy inside another repository, git must not describe that one.
    git = ["git", f"--git-dir={ROOT / '.git'}", f"--work-tree={ROOT}", "describe", "--always", "--dirty"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):          # no git, or no repository
        record["revision"] = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    return record


# ----------------------------------------------------------------------------------------------
# Processes

def collective(op, *args):
    """Calls an operation of the process group, unless this process runs alone."""
    if dist.is_initialized():
        op(*args)


class Parallel:
    """The rank, the world size and the device of this process, read from the environment variables that torchrun sets.
    With more than one process it starts the process group, and only rank 0 still prints to stdout. timeout: seconds
    after which a collective that another rank has not joined raises an error. Raises UserError for a device that this
    machine lacks, or if the processes do not find each other."""

    def __init__(self, device, timeout=300):
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        self.rank = int(os.environ.get("RANK", 0)) if self.world > 1 else 0
        self.device = torch.device(pick_device(device))
        # The number of this process's GPU: from torchrun or, without it, from a device such as cuda:1.
        local_rank = int(os.environ.get("LOCAL_RANK", self.device.index or 0))
        if self.device.type == "cuda":
            if local_rank >= (count := torch.cuda.device_count()):
                raise UserError(f"this machine has {count} GPUs; start torchrun with --nproc_per_node={count}")
            self.device = torch.device(pick_device(f"cuda:{local_rank}"))      # from now on the current one
        if self.rank > 0:
            sys.stdout = open(os.devnull, "w")
        if self.world > 1:
            self.meet(local_rank, datetime.timedelta(seconds=timeout))

    def meet(self, local_rank, timeout):
        """Starts the process group, for which this process waits until all others have come."""
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        if local_rank == 0:
            print(f"waiting for all {self.world} processes at {address}", file=sys.stderr, flush=True)
        try:
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo", timeout=timeout)
        except (RuntimeError, ValueError) as error:     # ValueError: one of the variables is missing
            why = str(error).partition("\n")[0]
            raise UserError(f"the {self.world} processes do not meet at {address} ({why}); start all of them with "
                            f"torchrun --nproc_per_node=N, or unset WORLD_SIZE to run one alone") from error

    def sum(self, values):
        """The sums of a list of numbers over all ranks, in fp64. A collective: every rank must call it."""
        x = torch.tensor(values, dtype=torch.float64, device=self.device if self.world > 1 else "cpu")
        collective(dist.all_reduce, x)
        return x.tolist()

    def agreed(self, value):
        """Returns a value that all ranks have, once all have come here. Raises UserError if theirs differ. A
        collective: every rank must call it."""
        own = zlib.crc32(repr(value).encode())
        if self.sum([own]) != [own * self.world]:
            raise UserError("the processes differ in settings, text or checkpoint; give all the same command and files")
        return value

    def close(self):
        """Ends the process group, after all ranks have come here: if one ended early, collectives of the others would
        fail."""
        self.sum([0])
        collective(dist.destroy_process_group)


def progress(parallel, what, total, unit, terse=False):
    """A progress bar with ETA on rank 0's stderr. If stderr is no terminal, it is updated only every 30 seconds. terse:
    the bar appears only on a terminal, and only for work that takes more than three seconds."""
    terminal = hasattr(sys.stderr, "isatty") and sys.stderr.isatty()
    return tqdm(desc=what, total=total, unit=unit, file=sys.stderr, leave=False, unit_scale=True, delay=3 * terse,
                mininterval=0.2 if terminal else 30, disable=parallel.rank > 0 or (terse and not terminal))


@contextlib.contextmanager
def end_if_a_rank_is_lost(name):
    """A context for the body of the script `name`, around `script`. Ends this process with one sentence and status 1 if
    a collective failed because another process has ended or does not answer."""
    try:
        yield
    except RuntimeError as error:
        words = ("peer", "timed out", "timeout", "connection", "socket", "nccl")
        if not (dist.is_initialized() and any(word in str(error).lower() for word in words)):
            raise
        print(f"{name}: another process of this run is gone or silent, or the network between them fails "
              f"({' '.join(str(error).split())}); start again, a training with --resume", file=sys.stderr, flush=True)
        os._exit(1)                     # a normal exit would wait for collectives that never end


def micro_batches_of(rank, world, batch_size, micro_batch_size):
    """The rows of the global batch that a rank runs: a list with one range of rows for each micro-batch. Raises
    UserError if world does not divide batch_size, or micro_batch_size, unless it is larger, a rank's rows."""
    if batch_size % world:
        raise UserError(f"batch_size must be a multiple of the {world} processes, but is {batch_size}; "
                        f"use --batch_size={max(round(batch_size / world), 1) * world}")
    own = batch_size // world
    micro = min(micro_batch_size or own, own)
    if own % micro:
        raise UserError(f"micro_batch_size must divide the {own} sequences that each process has per step, but is "
                        f"{micro}; use --micro_batch_size={max(n for n in range(1, micro) if own % n == 0)}")
    return [range(i, i + micro) for i in range(rank * own, (rank + 1) * own, micro)]


# The names in torch 2.13, or else those in torch 2.11.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ShardedAdamW:
    """
    AdamW whose moments and update are sharded over ranks. Every rank holds all weights and gradients in fp32, so the
    memory is that of ZeRO stage 1. Gradients are reduce-scattered and weights all-gathered once a step.

    There are two groups of parameters, with and without weight decay. The parameters of a group are views of one flat
    buffer, and their gradients are views of another; zeros at the end make their length a multiple of the world size.
    Each rank owns an equal slice of each buffer, its shard, which is a view of it. A step is

      1. reduce-scatter    each rank gets the sum over ranks of the gradients of its shard
      2. AdamW             torch's own, on the shard alone, so a rank stores moments of its shard only
      3. all-gather        every rank gets all updated parameters

    With one process the shard is the whole buffer, and nothing is communicated. state_dict is a dict by parameter name,
    so a checkpoint resumes on any number of ranks.
    """

    def __init__(self, model, betas, weight_decay, rank=0, world=1):
        self.rank, self.flats, groups = rank, [], []
        names = {p: name for name, p in model.named_parameters()}
        for group in model.param_groups(weight_decay):
            # The buffers, and this rank's slice of them.
            params = group["params"]
            sizes = [p.numel() for p in params]
            sizes.append(-sum(sizes) % world)                       # zeros that fill up to a multiple of world
            flat = torch.cat([*(p.detach().flatten() for p in params), params[0].new_zeros(sizes[-1])])     # (n,)
            grad = torch.zeros_like(flat)                           # (n,)
            collective(dist.broadcast, flat, 0)                     # all ranks start from the weights of rank 0
            own = slice(rank * len(flat) // world, (rank + 1) * len(flat) // world)
            shard = flat[own]                                       # (n / world,)
            shard.grad = grad[own]

            # From here on all are views of the buffers: never set p.grad to None, nor p.data to another tensor. The
            # last part of the buffers, the zeros, belongs to no parameter: zip leaves it out.
            for p, p_data, p_grad in zip(params, flat.split(sizes), grad.split(sizes)):
                p.data, p.grad = p_data.view_as(p), p_grad.view_as(p)
            self.flats.append(dict(flat=flat, grad=grad, shard=shard, own=own, sizes=sizes,
                                   shapes={names[p]: p.shape for p in params}))
            # The shard is no Parameter: AdamW asks only for a tensor with a .grad.
            groups.append(dict(params=[shard], weight_decay=group["weight_decay"]))
        self.adamw = torch.optim.AdamW(groups, betas=betas, eps=1e-8, fused=True)      # `step` sets lr

    def reduce_gradients(self):
        """Gives each rank the sum over ranks of the gradients of its shard: not the mean, because the loss was divided
        by the size of the global batch. Returns the norm of all gradients, a tensor. Afterwards p.grad is this sum only
        within the rank's shard."""
        for f in self.flats:                                        # in place: the output is a part of the input
            collective(reduce_scatter, f["shard"].grad, f["grad"])
        square = sum(f["shard"].grad.square().sum() for f in self.flats)
        collective(dist.all_reduce, square)                         # shards do not overlap, so their squares add up
        return square.sqrt()

    def step(self, lr, scale):
        """Updates the shard by its gradients times scale (a tensor or a number), then gathers all parameters."""
        for f, group in zip(self.flats, self.adamw.param_groups):
            f["shard"].grad.mul_(scale)
            group["lr"] = lr
        self.adamw.step()
        for f in self.flats:
            collective(all_gather, f["flat"], f["shard"])

    def zero_grad(self):
        """Zeroes the gradients in place: they stay views of the buffer."""
        for f in self.flats:
            f["grad"].zero_()

    def state_dict(self):
        """The moments of all parameters, {name: {"exp_avg", "exp_avg_sq"}}, and "step", on the CPU of rank 0; None on
        other ranks. A collective: every rank must call it."""
        out = {}
        for f in self.flats:
            state = self.adamw.state.get(f["shard"], {})            # empty before the first step
            for key in ("exp_avg", "exp_avg_sq"):
                full = torch.empty_like(f["flat"])                  # (n,)
                full[f["own"]] = state.get(key, 0)
                collective(all_gather, full, full[f["own"]])
                if self.rank == 0:
                    for (name, shape), part in zip(f["shapes"].items(), full.cpu().split(f["sizes"])):
                        out.setdefault(name, {})[key] = part.view(shape).clone()
            out["step"] = int(state.get("step", 0))
        return out if self.rank == 0 else None

    def load_state_dict(self, saved):
        """Copies the saved moments of this rank's shard. They may have been saved by another number of ranks."""
        for f in self.flats:
            state = dict(step=torch.tensor(float(saved["step"]), device=f["shard"].device))
            for key in ("exp_avg", "exp_avg_sq"):
                parts = [saved[name][key].view(shape).flatten() for name, shape in f["shapes"].items()]
                full = torch.cat([*parts, torch.zeros(f["sizes"][-1])])        # (n,)
                state[key] = full[f["own"]].to(f["shard"], copy=True)
            self.adamw.state[f["shard"]] = state
