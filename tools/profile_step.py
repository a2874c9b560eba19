"""
Profiles one training step or one denoising step: the time of its kernels, by kind and by name, beside the time that it
takes without the profiler.

    python -m tools.profile_step --configs=mamba_h_350m,bdlm_attention_350m     # training steps
    python -m tools.profile_step --sampling=true --configs=mamba_h_700m         # denoising steps
"""
import json
from collections import Counter

import torch
from torch.profiler import ProfilerActivity, profile

from bench import engine_builder, measure, training_step
from configurator import check, script, write_file
from checkpoint import config_from_file
from parallel import hardware, pick_device, select_kernels

configs = []                            # names of files in config/; []: mamba_h_350m on a GPU, laptop on a CPU
sampling = False                        # True: profile a denoising step with an empty prefix; False: a training step
batch = 1                               # with sampling: samples side by side
micro_batch_size = 8                    # sequences of a training step
top = 20                                # kernels to print by name
out = ""                                # also write the profile to this JSON file

# Parts of the names of kernels; those with aten:: are operators, on a CPU.
KINDS = {"attention": ("flash", "flex", "attend", "combine_k", "cudnn"),
         "products": ("nvjet", "gemm", "splitK", "cutlass", "aten::mm", "aten::addmm", "aten::bmm"),
         "scan": ("steps_kernel", "forward_kernel", "block_kernel", "after_kernel", "before_kernel", "decays_kernel",
                  "walk_kernel", "pass_kernel"),
         "convolution": ("conv_",), "norms": ("gated_norm", "add_norm"), "pointwise": ("triton_",)}


def kind_of(name):
    return next((kind for kind, words in KINDS.items() if any(w in name for w in words)), "other")


def denoising_step(config, dev):
    """A function that makes one denoising step of a new model, whose cache has room for eight blocks."""
    return engine_builder(config, dev, batch, min(9 * config.block_len, config.seq_len))().step


def kernels_of(step, dev):
    """(name, calls, milliseconds) of each kernel that step() launches, or operator on a CPU; the slowest first."""
    on_gpu = dev.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as record:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    kernels = [(e.key[:100], e.count, (e.self_device_time_total if on_gpu else e.self_cpu_time_total) / 1e3)
               for e in record.key_averages()]
    return sorted((k for k in kernels if k[2]), key=lambda k: -k[2])


def main():
    check(globals(), least=dict(micro_batch_size=1, batch=1, top=0), endings=dict(out=".json"))
    dev, found = torch.device(pick_device("auto")), {}
    names = configs or ["mamba_h_350m" if dev.type == "cuda" else "laptop"]
    print(f"{', '.join(names)} on {dev} | {select_kernels('auto', dev)}", flush=True)
    for name in names:
        config, kinds = config_from_file(name), Counter()
        with torch.set_grad_enabled(not sampling):
            step = denoising_step(config, dev) if sampling else training_step(config, micro_batch_size, dev)
            wall, _, _ = measure(step, dev, n_warmup=2, n_timed=1)          # compiles first
            kernels = kernels_of(step, dev)
        for key, _, ms in kernels:
            kinds[kind_of(key)] += ms
        total = kinds.total()
        shares = ", ".join(f"{kind} {ms / total:.0%}" for kind, ms in kinds.most_common())
        print(f"{name}: {1000 * wall:.2f} ms, {total:.2f} of them in {sum(k[1] for k in kernels)} kernels; {shares}")
        for key, calls, ms in kernels[:top]:
            print(f"  {ms:9.3f} ms {calls:6d}  {key}")
        found[name] = dict(wall_ms=1000 * wall, ms=total, kinds=kinds, kernels=kernels)
        write_file(out, json.dumps(dict(sampling=sampling, hardware=hardware(dev), models=found), indent=1))


if __name__ == "__main__":
    with script("profile_step.py", globals()):
        main()
