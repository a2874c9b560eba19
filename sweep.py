"""
Trains many runs on the GPUs of one machine and puts them side by side: the paper's grid of four models
and five learning rates (tab:validation-87m-full), or the four models and ablations on a small text.

    python sweep.py config/sweep/87m.py             # the paper's grid: days on eight GPUs
    python sweep.py config/sweep/novels.py          # minutes; needs data/novels, see README

Each run is `train.py` in a process of its own, then `eval.py`. Start the same command again after an
interrupt: what is done is not done again, and what was begun goes on from its checkpoint.
"""
import json
import math
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time

import torch
from tqdm import tqdm

from configurator import ConfigError, configure, read_file, settings_of
from data import DataError, TokenData

# ---------------------------------------------------------------------------------------------
# Settings
out_dir = "out/sweep"
runs = []                               # each a config file of train.py, then settings: "FILE a=1 b=2"
learning_rates = []                     # tried with every config file; []: the one that it names
pick_iters = 0                          # steps of a run that picks a learning rate; 0: whole runs, and
                                        # the table has them all
settings = ""                           # more settings for every run, as in "data=data/mine seed=1"
gpus_per_run = 1                        # GPUs that one run is spread over
runs_per_gpu = 1                        # runs that share a GPU, for small models
eval_settings = "mc=8"                  # of eval.py
figure = ""                             # where to draw the curves; empty: out_dir/sweep.png
table = ""                              # where to write the table as JSON; empty: out_dir/sweep.json
# ---------------------------------------------------------------------------------------------


class Run:
    """One training run: a config file, settings on top of it, and the folder that it writes."""

    def __init__(self, line, extra=(), name=""):
        self.file, *words = line.split()
        self.words = [*words, *shlex.split(settings), *extra]
        stem = os.path.splitext(os.path.basename(self.file))[0]
        self.base, self.name = stem, name or " ".join([stem, *words])
        self.folder = os.path.join(out_dir, self.name.replace(" ", "+").replace("=", "-"))
        defaults = train_defaults()
        self.settings = {**defaults, **read_file(self.file, defaults)}
        for word in self.words:
            key, _, text = word.partition("=")
            configure(scope := {key: self.settings.get(key)} if key in defaults else {}, [f"--{word}"])
            self.settings.update(scope)

    def rows(self):
        """What log.jsonl holds so far."""
        path = os.path.join(self.folder, "log.jsonl")
        if not os.path.exists(path):
            return []
        with open(path) as f:
            return [json.loads(line) for line in f if line.endswith("\n")]

    @property
    def steps(self):
        return max((r["step"] for r in self.rows()), default=0)

    @property
    def val_loss(self):
        """The validation loss of the last step, or None while the run is not done."""
        last = self.settings["max_iters"]
        return next((r["val_loss"] for r in self.rows() if r["step"] == last and "val_loss" in r), None)

    def command(self, gpus):
        python = [sys.executable]
        if gpus > 1:
            python += ["-m", "torch.distributed.run", f"--nproc_per_node={gpus}", "--standalone"]
        resume = ["--resume"] if os.path.exists(os.path.join(self.folder, "ckpt.pt")) else []
        return [*python, here("train.py"), self.file, *(f"--{w}" for w in self.words),
                f"--out_dir={self.folder}", *resume]

    @property
    def report(self):
        return os.path.join(self.folder, "eval.json")

    def eval_command(self):
        return [sys.executable, here("eval.py"), f"--checkpoint={self.folder}/ckpt.pt",
                f"--data={self.settings['data']}", f"--out={self.report}",
                *(f"--{w}" for w in shlex.split(eval_settings))]


def here(name):
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), name)


def train_defaults():
    import train
    return settings_of({k: v for k, v in vars(train).items() if not k.startswith("__")})


# ---------------------------------------------------------------------------------------------
# Running

def places():
    """What a run is given: GPUs by name, each as often as runs may share it; without GPUs, the CPU."""
    count = torch.cuda.device_count()
    if not count:
        return [[]]
    if count < gpus_per_run:
        raise ConfigError(f"a run needs {gpus_per_run} GPUs and this machine has {count}; lower gpus_per_run")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[:count]
    names = visible if len(visible) == count and all(visible) else [str(i) for i in range(count)]
    return [names[i:i + gpus_per_run] for i in range(0, count - gpus_per_run + 1, gpus_per_run)] * runs_per_gpu


def run_commands(jobs, name):
    """
    Runs jobs, (Run, command of the GPUs it gets), as places become free. Their output goes to
    <folder>/<name>.txt. Returns the names of those that failed. On an interrupt the processes get
    SIGTERM, on which train.py saves.
    """
    waiting, processes, failed, stopped = queue.Queue(), {}, [], threading.Event()
    for job in jobs:
        waiting.put(job)

    def work(place):
        while not stopped.is_set():
            try:
                run, command = waiting.get_nowait()
            except queue.Empty:
                return
            os.makedirs(run.folder, exist_ok=True)
            environment = dict(CUDA_VISIBLE_DEVICES=",".join(place)) if place else {}
            environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // len(threads)))
            with open(os.path.join(run.folder, f"{name}.txt"), "a") as log:
                process = subprocess.Popen(command(max(len(place), 1)), stdout=log, stderr=log,
                                           env={**os.environ, **environment})
                processes[run.name] = process
                if process.wait() and not stopped.is_set():
                    failed.append(run.name)

    threads = [threading.Thread(target=work, args=(place,), daemon=True) for place in places()]
    for thread in threads:
        thread.start()
    try:
        watch(threads, [run for run, _ in jobs], name)
    except KeyboardInterrupt:
        stopped.set()
        for process in processes.values():
            process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(60)
        raise
    return failed


def watch(threads, watched, name):
    """A bar over all steps of all runs (or over runs, when they evaluate), until the threads end."""
    steps = name == "train"
    total = sum(run.settings["max_iters"] for run in watched) if steps else len(watched)

    def done():
        return sum(run.steps if steps else os.path.exists(run.report) for run in watched)
    with tqdm(desc=f"{len(watched)} runs, {name}", total=total, initial=done(), file=sys.stderr,
              unit="step" if steps else "run", unit_scale=steps) as bar:
        while any(thread.is_alive() for thread in threads):
            threads[0].join(1) if threads[0].is_alive() else time.sleep(0.5)
            bar.update(done() - bar.n)


def train_all(todo):
    """Trains what is not done. Raises ConfigError, with the log's last line, if a run failed."""
    left = [run for run in todo if run.val_loss is None]
    failed = run_commands([(run, run.command) for run in left], "train") if left else []
    complain(failed, todo, "train")


def evaluate_all(todo):
    left = [run for run in todo if not os.path.exists(run.report)]
    failed = run_commands([(run, lambda gpus, run=run: run.eval_command()) for run in left], "eval") if left else []
    complain(failed, todo, "eval")


def complain(failed, todo, name):
    for run in todo:
        if run.name in failed:
            path = os.path.join(run.folder, f"{name}.txt")
            with open(path) as f:
                last = (f.read().strip().splitlines() or ["it said nothing"])[-1]
            raise ConfigError(f"{name}.py failed for {', '.join(failed)}: {last} (see {path}); mend that and "
                              f"start again: finished runs are kept")


def pick(lines):
    """
    The runs of the table. With learning rates, every config file is tried with each: the runs
    themselves (pick_iters = 0), or short ones whose best rate then goes to all runs of that file.
    Returns (runs, {config: {rate: validation loss}}).
    """
    if not learning_rates:
        return [Run(line) for line in lines], {}
    files = list(dict.fromkeys(line.split()[0] for line in lines))
    short = [f"max_iters={pick_iters}", f"eval_interval={pick_iters}"] if pick_iters else []
    tries = {file: {lr: Run(file, [f"learning_rate={lr:g}", *short], f"{stem(file)} lr={lr:g}")
                    for lr in learning_rates} for file in files}
    train_all([run for by_rate in tries.values() for run in by_rate.values()])
    losses = {file: {lr: run.val_loss for lr, run in by_rate.items()} for file, by_rate in tries.items()}
    picked = {stem(file): {f"{lr:g}": loss for lr, loss in by_rate.items()} for file, by_rate in losses.items()}
    if not pick_iters:
        return [run for by_rate in tries.values() for run in by_rate.values()], picked
    best = {file: min(by_rate, key=by_rate.get) for file, by_rate in losses.items()}
    return [Run(line, [f"learning_rate={best[line.split()[0]]:g}"]) for line in lines], picked


def stem(file):
    return os.path.splitext(os.path.basename(file))[0]


# ---------------------------------------------------------------------------------------------
# Reporting

def summarise(run):
    """One row of the table: what eval.py found, and training and validation loss on the way."""
    with open(run.report) as f:
        report = json.load(f)
    found, rows = report_figures(report), run.rows()
    points = [dict(step=v["step"], val=v["val_loss"], train=mean_before(rows, v["step"]))
              for v in rows if "val_loss" in v]
    s = run.settings
    tokens = s["max_iters"] * s["batch_size"] * s["seq_len"]
    speed = sorted(r["tok_per_s"] for r in rows if "tok_per_s" in r)
    return dict(name=run.name, base=run.base, learning_rate=s["learning_rate"], steps=s["max_iters"],
                tokens=tokens, tok_per_s=speed[len(speed) // 2] if speed else None, points=points, **found)


def report_figures(report):
    """The figures of the first text that eval.py measured, from the JSON that it wrote."""
    model = report["results"][0]
    figures = next(iter(model["text"].values()))
    keys = ("nelbo", "nelbo_se", "nelbo_se_noise", "ppl", "ppl_se", "bpb", "acc", "acc_se", "tokens", "samples")
    return dict(parameters=model["parameters"], eval={k: figures[k] for k in keys})


def mean_before(rows, step):
    """The training loss that was logged last at or before a step."""
    return next((r["loss"] for r in reversed(rows) if r.get("loss") and r["step"] <= step), None)


def show(results):
    """The table; * marks the best row of each config file."""
    best = {}
    for r in results:
        best[r["base"]] = min(best.get(r["base"], math.inf), r["eval"]["nelbo"])
    width = max(len(r["name"]) for r in results)
    print(f"{'run':<{width}} {'parameters':>11} {'rate':>8} {'tokens':>12} {'train':>7} {'NELBO':>7} {'+-text':>7} "
          f"{'+-noise':>7} {'PPL':>8} {'bits/B':>7} {'acc %':>6}")
    for r in results:
        e = r["eval"]
        mark = "*" if e["nelbo"] == best[r["base"]] else " "
        train = r["points"][-1]["train"] if r["points"] else math.nan
        print(f"{r['name']:<{width}} {r['parameters']:>11,} {r['learning_rate']:>8.1e} {r['tokens']:>12,} "
              f"{train:>7.4f} {e['nelbo']:>7.4f} {e['nelbo_se']:>7.4f} {e['nelbo_se_noise']:>7.4f} "
              f"{e['ppl']:>8.2f} {e['bpb']:>7.4f} {e['acc']:>6.2f}{mark}")


def draw(results, path):
    """Left: validation loss (and, thin, training loss) of each config's plain run against the step.
    Right: perplexity of every run with its standard error from noise."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from bench import MODELS
    def kind(r):
        return max((k for k in MODELS if r["base"].endswith(k)), key=len, default="")
    fig, (left, right) = plt.subplots(1, 2, figsize=(12, 4.6), width_ratios=[1.15, 1])
    for r in results:
        name, colour = MODELS.get(kind(r), (r["base"], "black"))
        if len(r["name"].split()) > 1:
            continue
        steps = [p["step"] for p in r["points"]]
        left.plot(steps, [p["train"] for p in r["points"]], color=colour, lw=0.8, ls=":")
        left.plot(steps, [p["val"] for p in r["points"]], color=colour, lw=1.8, label=name)
    left.set(xlabel="step", ylabel="NELBO, nats per token", title="validation (solid) and training (dotted)")
    left.legend(frameon=False)
    for i, r in enumerate(reversed(results)):
        ppl, noise = r["eval"]["ppl"], r["eval"]["ppl"] * r["eval"]["nelbo_se_noise"]
        right.errorbar(ppl, i, xerr=noise, fmt="o", color=MODELS.get(kind(r), ("", "black"))[1], ms=5, capsize=3)
    right.set_yticks(range(len(results)), [r["name"] for r in reversed(results)], fontsize=8)
    right.set(xlabel="validation perplexity, bars: error of the noise")
    right.grid(axis="x", color="0.9")
    for ax in (left, right):
        ax.spines[["top", "right"]].set_visible(False)
    fig.tight_layout()
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    fig.savefig(path, dpi=130)
    plt.close(fig)


def main():
    from bench import hardware
    if not runs:
        raise ConfigError("there are no runs; give a list of them, such as config/sweep/novels.py")
    started = time.time()
    for line in runs:
        TokenData(Run(line).settings["data"], "train", Run(line).settings["tokenizer"])
    chosen, picked = pick(runs)
    train_all(chosen)
    evaluate_all(chosen)
    results = [summarise(run) for run in chosen]
    show(results)
    path = table or os.path.join(out_dir, "sweep.json")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with open(path, "w") as f:
        json.dump(dict(runs=results, rates=picked, seconds=round(time.time() - started), gpus=torch.cuda.device_count(),
                       hardware=hardware(device)), f, indent=1)
    png = figure or os.path.join(out_dir, "sweep.png")
    draw(results, png)
    print(f"wrote {path} and {png}")


if __name__ == "__main__":
    try:
        configure(globals())
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        main()
    except KeyboardInterrupt:
        sys.exit("sweep.py: stopped; start the same command again to go on")
    except (ConfigError, DataError) as error:
        sys.exit(f"sweep.py: {error}")
