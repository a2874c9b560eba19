"""
Trains and evaluates many runs on the GPUs of one machine and compares them in a table and a picture. For example: the
paper's grid of four models and five learning rates (tab:validation-87m-full), or the models and ablations on a laptop.

    python -m tools.sweep config/sweep/87m.py           # the paper's grid: 100B tokens
    python -m tools.sweep config/sweep/laptop.py        # an hour and a half on two cores
    python -m tools.sweep --draw=FILE.json,FILE2.json   # only table and picture of a finished sweep; runs of the other
                                                        # files are drawn beside those of the same name

Each run is one process of `train.py`, followed by one of `eval.py`. After an interrupt or a failure, start the same
command again: finished runs are not repeated, and unfinished ones continue from their checkpoints. A run's folder is
named by its settings, so a run with other settings is another run.
"""
import contextlib
import hashlib
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

import eval as evaluation
import train
from checkpoint import check_out, lock, write_file
from configurator import UserError, check, configure, script, settings_of, tqdm
from data import TokenData, prepare_stdlib
from paper import MODELS, kind_of
from parallel import ROOT, hardware, pick_device
from tools.loss import read_log

# ----------------------------------------------------------------------------------------------
# Settings
out_dir = "out/sweep"
runs = []                               # each is a config file of train.py and settings: "FILE a=1 b=2"
train_settings = ""                     # of train.py, for all runs: "data=data/mine seed=1"; a run's own settings win
runs_per_gpu = 1                        # runs that share a GPU, for small models
eval_settings = "mc=8"                  # settings of eval.py
figure = ""                             # draw the curves in this file; empty: beside the JSON, out_dir/sweep.json
draw = []                               # only print and draw these JSON files, which a sweep wrote
# ----------------------------------------------------------------------------------------------

NOT_THE_RUN = {"out_dir", "resume", "micro_batch_size", "log_interval", "device", "kernels", "compile",
               "dist_timeout"}          # settings of train.py that may differ when a run continues
COLUMNS = {"run": ("name", ""), "parameters": ("parameters", ","), "rate": ("learning_rate", "g"),
           "tokens": ("tokens", ","), "train": ("train_loss", ".4f"), "val": ("val_loss", ".4f"),
           "NELBO": ("nelbo", ".4f"), "+-text": ("nelbo_se", ".4f"), "+-noise": ("nelbo_se_noise", ".4f"),
           "PPL": ("ppl", ".2f"), "bits/B": ("bpb", ".4f"), "acc %": ("acc", ".2f"), "best": ("best", "")}
DIFFERENCES = {"run": ("better", ""), "next": ("worse", ""), "difference": ("difference", "+.4f"),
               "+-text": ("se_text", ".4f"), "+-seeds": ("se_seeds", ".4f"), "seeds": ("seeds", "d")}


# ----------------------------------------------------------------------------------------------
# A run

class Run:
    """One training run: a config file, settings, and an output folder. Settings of the run itself override those of
    all runs."""

    def __init__(self, line):
        self.error = ""
        self.file, *own = words_of(line) or [""]
        file = os.path.splitext(os.path.basename(self.file))[0]
        self.name = " ".join([file, *own])
        words = {word.partition("=")[0]: f"--{word}" for word in [*words_of(train_settings), *own]}
        self.words = [self.file, *words.values()]
        self.settings = s = configure(settings_of(vars(train)), self.words, f"run {line!r}")
        self.eval_words = [f"--data={s['data']}", f"--device={s['device']}",
                           *(f"--{word}" for word in words_of(eval_settings))]
        # Runs are compared by `base`: their config file and, if its name does not say it, their model.
        model = kind_of(s["attn_every"] > 1, s["block_len"] == s["seq_len"])
        self.base = file if model_in(file) == model else f"{file} {model}"
        own = json.dumps({k: v for k, v in s.items() if k not in NOT_THE_RUN})
        digest = hashlib.sha256(own.encode()).hexdigest()[:8]
        self.folder = os.path.join(out_dir, re.sub(r"[^\w.+-]", "-", f"{self.name.replace(' ', '+')}-{digest}"))

    def path(self, name):
        return os.path.join(self.folder, name)

    def log(self):
        """The rows of log.jsonl so far, see `read_log`."""
        return read_log(self.path("log.jsonl")) if os.path.exists(self.path("log.jsonl")) else []

    def trained(self):
        """Whether the training has ended: its last checkpoint is saved before the last validation is logged."""
        return any("val_loss" in row and row["step"] >= self.settings["max_iters"] for row in self.log())

    def report(self):
        """eval.py's result, if it was made with the present eval_settings; else None."""
        wanted = configure(settings_of(vars(evaluation)), self.eval_words, "eval_settings")
        with contextlib.suppress(OSError, json.JSONDecodeError), open(self.path("eval.json")) as f:
            record = json.load(f)
            if all(record["settings"].get(k) == v for k, v in wanted.items() if k not in ("checkpoint", "out")):
                return record["results"][0]

    def command(self, job):
        """The command that runs `job`: "train" (continues from a checkpoint if there is one) or "eval"."""
        if job == "eval":
            return [sys.executable, str(ROOT / "eval.py"), *self.eval_words, f"--checkpoint={self.path('ckpt.pt')}",
                    f"--out={self.path('eval.json')}"]
        resume = ["--resume"] if os.path.exists(self.path("ckpt.pt")) else []
        return [sys.executable, str(ROOT / "train.py"), *self.words, f"--out_dir={self.folder}", *resume]

    def why(self, job, status):
        """An error message for a failed process: its own error message, or else the last line that it printed."""
        lines = Path(self.path(f"{job}.txt")).read_text(errors="replace").split("\n")
        said = [line for line in lines if line.startswith(f"{job}.py: ")] or ["", *filter(str.strip, lines)]
        return f"{self.name}: {job}.py ended with status {status}: {said[-1]} ({self.path(job)}.txt)"


def model_in(base):
    """The key of MODELS that the last word of a base contains. The longest: diffumamba_h contains mamba_h. Else ""."""
    return max((model for model in MODELS if model in base.rpartition(" ")[2]), key=len, default="")


def words_of(text):
    """The words of a setting; quotes protect spaces, as in a shell."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"{text!r} cannot be split into words: {error}") from None


# ----------------------------------------------------------------------------------------------
# Running

def places():
    """The places for runs: names of GPUs, each runs_per_gpu times. Without GPUs the name is empty, for the CPU."""
    count = torch.cuda.device_count()
    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return (names.split(",")[:count] or [""]) * runs_per_gpu


def start(run, job, place, threads):
    """Starts a process of a run on a place. It prints to <job>.txt in the run's folder. It has a session of its own,
    so that Ctrl-C reaches only sweep.py, which then stops it."""
    os.makedirs(run.folder, exist_ok=True)
    if job == "train" and not os.path.exists(run.path("ckpt.pt")):
        with contextlib.suppress(FileNotFoundError):        # the log of a run that ended before its first checkpoint
            os.replace(run.path("log.jsonl"), run.path("log.jsonl.old"))
    environment = dict(os.environ, OMP_NUM_THREADS=str(threads), PYTHONUNBUFFERED="1")
    if place:
        environment["CUDA_VISIBLE_DEVICES"] = place
    with open(run.path(f"{job}.txt"), "w") as log:
        return subprocess.Popen(run.command(job), stdout=log, stderr=log, env=environment, start_new_session=True)


def run_all(jobs, bar):
    """
    Does the jobs, [(run, "train" or "eval")], in parallel on all places, and evaluates each run right after its
    training. If a run fails, the reason goes into its `error`, and the others continue. After an interrupt it stops all
    processes and waits for them: train.py saves a checkpoint.
    """
    waiting, running, free = list(jobs), {}, places()
    threads = max(1, (os.cpu_count() or 1) // len(free))
    try:
        while waiting or running:
            while waiting and free:
                (run, job), place = waiting.pop(0), free.pop(0)
                running[start(run, job, place, threads)] = run, job, place
            time.sleep(0.2)
            for process in [p for p in running if p.poll() is not None]:
                run, job, place = running.pop(process)
                free.append(place)
                bar.update()
                if process.returncode:
                    run.error = run.why(job, process.returncode)
                elif job == "train":
                    waiting.insert(0, (run, "eval"))    # its evaluation comes before the next training
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()


def train_and_evaluate():
    """Does all runs. Returns the content of the JSON table."""
    every = [Run(line) for line in runs]
    if not every:
        raise UserError("there are no runs; name a file that lists some, such as config/sweep/laptop.py")
    for run in every:
        run.report()                                    # refuses wrong eval_settings
        for folder in run.settings["data"].split(","):
            if folder == "data/stdlib":
                prepare_stdlib()                        # once here; else all runs would prepare it at the same time
            TokenData(folder, "val", run.settings["tokenizer"])
    os.makedirs(out_dir, exist_ok=True)
    with lock(os.path.join(out_dir, ".lock"), f"another sweep is running in {out_dir}; choose another out_dir"):
        todo = {run.folder: run for run in every if not run.report()}.values()
        jobs = [(run, "eval" if run.trained() else "train") for run in todo]
        with tqdm(desc="trainings and evaluations", total=sum(1 + (job == "train") for _, job in jobs)) as bar:
            run_all(jobs, bar)
    rows = [summarise(run) for run in every]
    return dict(runs=rows, differences=differences(rows), gpus=torch.cuda.device_count(),
                hardware=hardware(torch.device(pick_device("auto"))))


# ----------------------------------------------------------------------------------------------
# Reporting

def summarise(run):
    """One row of the table: eval.py's results on the first text, and the training and validation losses. A run that
    failed has the losses logged so far and an `error`."""
    s, log, result, train_loss, points = run.settings, run.log(), run.report(), None, []
    for row in log:                                     # sorted by step, the training loss before the validation loss
        train_loss = row.get("loss", train_loss)
        if "val_loss" in row:
            points.append(dict(step=row["step"], val=row["val_loss"], train=train_loss))
    speed = sorted(row["tok_per_s"] for row in log if "tok_per_s" in row)
    row = dict(name=run.name, base=run.base, learning_rate=s["learning_rate"], steps=s["max_iters"],
               tokens=s["max_iters"] * s["batch_size"] * s["seq_len"], points=points,
               tok_per_s=speed[len(speed) // 2] if speed else None, val_loss=points[-1]["val"] if points else None)
    if not result:
        return row | dict(error=run.error or f"{run.name} was not evaluated")
    figures = next(iter(result["text"].values()))
    return row | dict(parameters=result["parameters"], nats=figures.pop("nats"), text=figures["sha256"], eval=figures)


def best_of(results):
    """The best row of each base, {base: row}: lowest NELBO first, then rows without a NELBO by validation loss."""
    def score(row):
        nelbo = row.get("eval", {}).get("nelbo")
        return (0, nelbo) if nelbo is not None else (1, row["val_loss"] or math.inf)
    return {row["base"]: row for row in sorted(results, key=score, reverse=True)}          # the last of a base stays


def print_table(rows, columns):
    """Prints rows (dicts) in aligned columns, {header: (key, format)}: the first to the left, the others to the right.
    A column without a value is left out."""
    columns = [[header, *("-" if row.get(key) is None else format(row[key], form) for row in rows)]
               for header, (key, form) in columns.items() if any(row.get(key) is not None for row in rows)]
    widths = [max(map(len, column)) for column in columns]
    for first, *others in zip(*columns):
        print("  ".join([first.ljust(widths[0]), *(text.rjust(width) for text, width in zip(others, widths[1:]))]))


def show(results):
    """The table of all runs; * marks the best row of each base."""
    best, rows = best_of(results), []
    for r in results:
        train_loss = r["points"][-1]["train"] if r["points"] else None
        mark = "*" if best[r["base"]] is r and "error" not in r else ""
        rows.append({**r.get("eval", {}), **r, "train_loss": train_loss, "best": mark})
    print_table(rows, COLUMNS)


def without_seed(name):
    """The name of a run without the setting seed=."""
    return " ".join(word for word in name.split() if not word.startswith("seed="))


def differences(results):
    """
    Ranks the runs by NELBO and compares each with the next worse one: [dict], in nats per token. Runs that differ only
    in their seed are averaged. The standard error over text is that of paired differences, so models that were not
    evaluated on the same sequences are not compared. The standard error over seeds needs at least two seeds of each.
    """
    groups, texts = {}, {}
    for r in results:
        if r.get("nats") and r.get("eval"):
            tokens = r["eval"]["tokens"] / len(r["nats"])       # of a sequence
            groups.setdefault(without_seed(r["name"]), []).append(np.array(r["nats"]) / tokens)
            texts.setdefault(without_seed(r["name"]), set()).add((len(r["nats"]), r.get("text")))
    order = sorted(groups, key=lambda name: np.mean(groups[name]))
    rows = []
    for better, worse in zip(order, order[1:]):
        if len(texts[better] | texts[worse]) == 1:
            a, b = np.array(groups[better]), np.array(groups[worse])           # (seeds, sequences)
            paired = b.mean(0) - a.mean(0)
            seeds = math.sqrt(sum(x.mean(1).var(ddof=1) / len(x) for x in (a, b))) if min(len(a), len(b)) > 1 else None
            rows.append(dict(better=better, worse=worse, difference=paired.mean(), seeds=min(len(a), len(b)),
                             se_text=paired.std(ddof=1) / math.sqrt(len(paired)) if len(paired) > 1 else None,
                             se_seeds=seeds))
    return rows


def curves(ax, groups, looks):
    """Draws the validation loss (solid) of every run of the groups over its tokens, and the training loss (dotted) of
    the first."""
    for runs in groups:
        name, colour = looks[runs[0]["base"]]
        for i, r in enumerate(runs):
            tokens = [p["step"] * r["tokens"] / r["steps"] / 1e6 for p in r["points"]]
            ax.plot(tokens, [p["val"] for p in r["points"]], color=colour, lw=0.8 if i else 1.8,
                    label=None if i else name)
            if not i:
                ax.plot(tokens, [p["train"] for p in r["points"]], color=colour, lw=0.8, ls=":")
    ax.set_title("validation (solid), training (dotted); thick: first seed", fontsize=10)
    ax.set(xlabel="million tokens", ylabel="NELBO, nats per token")
    ax.legend(frameon=False, fontsize=8)


def perplexities(ax, evaluated, looks):
    """Draws the perplexity of every run of the groups `evaluated`, {name: runs}, with its standard error."""
    for i, runs in enumerate(reversed(evaluated.values())):
        for j, r in enumerate(r for r in runs if r.get("eval")):
            ax.errorbar(r["eval"]["ppl"], i, xerr=r["eval"]["ppl_se"], fmt="o", color=looks[r["base"]][1], ms=5,
                        capsize=3, mfc="none" if j else None)
    ax.set_yticks(range(len(evaluated)), [*reversed(evaluated)])
    ax.set(xlabel="validation perplexity ± standard error; filled: first seed")
    ax.grid(axis="x", color="0.9")


def looks_of(results):
    """{base: (name, colour)}: those of the paper's model where only one base is that model."""
    kinds = {r["base"]: model_in(r["base"]) for r in results}
    looks = {}
    for i, (base, kind) in enumerate(kinds.items()):
        name, colour = MODELS.get(kind, (base, f"C{i}"))
        looks[base] = (name if list(kinds.values()).count(kind) == 1 else base, colour)
    return looks


def picture(results, path):
    """
    Draws losses over tokens. Each base shows its best run among those with the fewest settings, and the runs of the
    same name but another seed, or of another file. Below, the perplexity of evaluated runs, ± its standard error. The
    first run of a name is drawn thick and filled, the others thin and hollow.
    """
    from matplotlib.figure import Figure
    looks, groups, n_settings = looks_of(results), {}, lambda r: len(without_seed(r["name"]).split())
    for r in results:
        groups.setdefault(without_seed(r["name"]), []).append(r)
    fewest = [r for r in results if n_settings(r) == min(n_settings(o) for o in results if o["base"] == r["base"])]
    evaluated = {name: runs for name, runs in groups.items() if any(r.get("eval") for r in runs)}
    heights = [4.4, 0.8 + 0.25 * len(evaluated)] if evaluated else [4.4]                   # inches
    fig = Figure(figsize=(8, sum(heights)), layout="constrained")
    panels = fig.subfigures(len(heights), height_ratios=heights, squeeze=False).flat
    top, *below = (panel.subplots() for panel in panels)
    curves(top, [groups[without_seed(r["name"])] for r in best_of(fewest).values()], looks)
    for ax in below:
        perplexities(ax, evaluated, looks)
    for ax in fig.axes:
        ax.spines[["top", "right"]].set_visible(False)
    fig.savefig(path, dpi=130)


# ----------------------------------------------------------------------------------------------
# The script

def main():
    check(globals(), least=dict(runs_per_gpu=1))
    check_out("figure", figure, ".png", ".pdf", ".svg")
    path = draw[0] if draw else os.path.join(out_dir, "sweep.json")
    records = [json.loads(Path(file).read_text()) for file in draw]
    if not draw:
        records = [train_and_evaluate()]
        write_file(path, json.dumps(records[0], indent=1))
    results, png = records[0]["runs"], figure or f"{os.path.splitext(path)[0]}.png"
    show(results)
    if rows := differences(results):
        print("\nNELBO difference of each run to the next worse one, paired by sequence")
        print_table(rows, DIFFERENCES)
    picture([r for record in records for r in record["runs"]], png)
    print(f"wrote {png}" if draw else f"wrote {path} and {png}")
    errors = [r["error"] for r in results if "error" in r]
    if errors and not draw:
        print(*errors, sep="\n", file=sys.stderr)
        raise UserError("some runs failed; fix the cause and start the same command again: finished runs are kept")


if __name__ == "__main__":
    with script("sweep.py"):
        for _number in (signal.SIGTERM, signal.SIGHUP):         # as Ctrl-C; nohup ignores SIGHUP
            if signal.getsignal(_number) != signal.SIG_IGN:
                signal.signal(_number, signal.default_int_handler)
        configure(globals())
        main()
