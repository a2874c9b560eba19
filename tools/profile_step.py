"""
Profiles one training step or one denoising step: the time of its kernels, by kind and of the slowest by name, beside
the time that it takes without the profiler. On a GPU also the time in which no kernel runs, with its longest gaps and
what the host did in them. The profiler slows the host, so the idle share of the profiled step is an upper bound. The
better estimate compares the time in which kernels ran with the time that the step takes without the profiler.

    python -m tools.profile_step --configs=mamba_h_350m,bdlm_attention_350m     # training steps
    python -m tools.profile_step --sampling=true --configs=mamba_h_700m         # denoising steps
"""
from collections import Counter

import torch
from torch.autograd import DeviceType
from torch.profiler import profile

from bench import engine_builder, measure, now, training_step
from configurator import check, script
from checkpoint import config_from_file
from parallel import pick_device, select_kernels

configs = []                            # names of files in config/; []: mamba_h_350m on a GPU, laptop on a CPU
sampling = False                        # True: profile a denoising step with an empty prefix; False: a training step
micro_batch_size = 8                    # sequences of a training step

# Parts of the names of kernels; those with aten:: are operators, on a CPU.
KINDS = {"attention": ("flash", "flex", "attend", "combine_k", "cudnn"),
         "products": ("nvjet", "gemm", "splitK", "cutlass", "aten::mm", "aten::addmm", "aten::bmm"),
         "scan": ("steps_kernel", "forward_kernel", "block_kernel", "after_kernel", "before_kernel", "decays_kernel",
                  "walk_kernel", "pass_kernel"),
         "convolution": ("conv_",), "norms": ("gated_norm", "add_norm"), "pointwise": ("triton_",)}


def kind_of(name):
    return next((kind for kind, words in KINDS.items() if any(w in name for w in words)), "other")


def denoising_step(config, dev):
    """A function that makes one denoising step of one sample by a new model, whose cache has room for eight blocks."""
    return engine_builder(config, dev, 1, min(9 * config.block_len, config.seq_len))().step


def profiled(step, dev):
    """Profiles step(). Returns [(name, calls, milliseconds)] of its kernels and copies, or of operators on a CPU, the
    slowest first; and two lists of (start, end, name) in microseconds, of each of them and of all that the host did."""
    on_gpu = dev.type == "cuda"
    for _ in range(2):                                  # the first profile of a process starts the profiler
        with profile() as record:
            step()
            now(dev)                                    # waits for the device

    def runs(event):
        # Annotations of the host are repeated among a GPU's events, where they span kernels.
        return event.device_type == (DeviceType.CUDA if on_gpu else DeviceType.CPU) and not event.is_user_annotation

    def spans(chosen):
        return [(e.time_range.start, e.time_range.end, e.name) for e in record.events() if chosen(e)]

    kernels = [(e.key[:100], e.count, (e.self_device_time_total if on_gpu else e.self_cpu_time_total) / 1e3)
               for e in record.key_averages() if runs(e)]
    slowest = sorted((k for k in kernels if k[2]), key=lambda k: -k[2])
    return slowest, spans(runs), spans(lambda event: event.device_type == DeviceType.CPU)


def idle_times(kernels, host, wall_ms, most=10):
    """
    The times in which no kernel runs, a dict. kernels (of all streams) and host: see `profiled`. wall_ms: the time of
    the same step without the profiler.
      profiled_ms   from the first event to the last
      idle          the share of it in which no kernel runs; idle_without_profiler: the share of wall_ms, if kernels run
                    for as long without the profiler
      gaps          the longest: their length, the kernels before and after, and (name, overlap in milliseconds) of the
                    host's events that overlap it most, the outermost of equals first
    """
    first, last = min(start for start, *_ in kernels + host), max(end for _, end, _ in kernels + host)
    gaps, at, before = [], first, "the start"
    for start, end, name in [*sorted(kernels), (last, last, "the end")]:
        if start > at:
            gaps.append((start - at, at, start, before, name))
        if end > at:                                    # else a kernel of another stream ends later
            at, before = end, name

    span, told = last - first, []
    busy = span - sum(length for length, *_ in gaps)
    for length, begin, end, before, after in sorted(gaps, reverse=True)[:most]:
        did = sorted(((min(e[1], end) - max(e[0], begin), e[1] - e[0], e[2]) for e in host), reverse=True)[:5]
        told.append(dict(ms=length / 1e3, before=before, after=after,
                         host=[(name, overlap / 1e3) for overlap, _, name in did if overlap > 0]))
    return dict(profiled_ms=span / 1e3, idle=1 - busy / span, idle_without_profiler=1 - busy / 1e3 / wall_ms, gaps=told)


def main():
    check(globals(), least=dict(micro_batch_size=1))
    dev = torch.device(pick_device("auto"))
    names = configs or ["mamba_h_350m" if dev.type == "cuda" else "laptop"]
    print(f"{', '.join(names)} on {dev} | {select_kernels('auto', dev)}", flush=True)
    for name in names:
        config, kinds = config_from_file(name), Counter()
        with torch.set_grad_enabled(not sampling):
            step = denoising_step(config, dev) if sampling else training_step(config, micro_batch_size, dev)
            wall, _, _ = measure(step, dev, n_warmup=2, n_timed=5)          # compiles first
            kernels, *spans = profiled(step, dev)
        for key, _, ms in kernels:
            kinds[kind_of(key)] += ms
        total = kinds.total()
        shares = ", ".join(f"{kind} {ms / total:.0%}" for kind, ms in kinds.most_common())
        print(f"{name}: {1000 * wall:.2f} ms, {total:.2f} of them in {sum(k[1] for k in kernels)} kernels; {shares}")
        for key, calls, ms in kernels[:20]:
            print(f"  {ms:9.3f} ms {calls:6d}  {key}")
        if dev.type == "cuda":
            idle = idle_times(*spans, 1000 * wall)
            print(f"no kernel runs in {idle['idle']:.1%} of {idle['profiled_ms']:.2f} ms with the profiler, in about "
                  f"{idle['idle_without_profiler']:.1%} of the time without it; the longest gaps:")
            for gap in idle["gaps"]:
                host = ", ".join(f"{event[:50]} {ms:.3f}" for event, ms in gap["host"])
                print(f"  {gap['ms']:9.3f} ms after {gap['before'][:60]}, before {gap['after'][:60]}; host: {host}")


if __name__ == "__main__":
    with script("profile_step.py", globals()):
        main()
