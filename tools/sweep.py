"""
Trains and evaluates several runs on the GPUs of one machine and compares them in tables and a picture. For example: the
paper's four models on the same text, or its grid of four models and five learning rates (tab:validation-87m-full).

    python -m tools.sweep config/sweep/web_87m.py       # four models, two seeds, 262M tokens
    python -m tools.sweep config/sweep/laptop.py        # 50 minutes on two cores
    python -m tools.sweep --draw=out/sweep/sweep.json   # only tables and picture, from what a sweep wrote

Each run is one process of `train.py`, followed by one of `eval.py`. Each GPU has one run at a time, so two GPUs train
two models side by side. After an interrupt or a failure, start the same command again: a run is trained if its log has
max_iters, and evaluated if its eval.json has these settings; an unfinished one continues from its checkpoint. A run's
folder is named by its settings, so a run with other settings is another run.

out_dir/sweep.json holds the NELBO of every window of every text: from it any difference can be paired again.
"""
import hashlib
import itertools
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

import eval as evaluation
import train
from configurator import UserError, check, configure, lock, script, settings_of, write_file
from data import TokenData, read_json
from paper import MODELS, RESULTS, kind_of
from parallel import ROOT, hardware, pick_device
from tools import picture, print_table
from tools.loss import read_log

# ----------------------------------------------------------------------------------------------
# Settings
out_dir = "out/sweep"
runs = []                               # each is a config file of train.py and settings: "FILE a=1 b=2"
train_settings = ""                     # of train.py, for all runs: "data=data/mine seed=1"; a run's own settings win
eval_settings = "mc=8"                  # of eval.py: "data=a,b" names the texts; by default a run's own validation text
runs_per_gpu = 1                        # runs that share a GPU, for small models; without a GPU: runs at a time
plateau = 0.0                           # nats per token; a run has left it when 50 steps have a lower mean loss
draw = ""                               # only show and draw this JSON file, which a sweep wrote
# ----------------------------------------------------------------------------------------------

PAPER_TOKENS = {"87m": 5e9, "350m": 17.65e9}            # after which the paper's models have the perplexity of RESULTS
RUN = {"run": ("name", ""), "parameters": ("parameters", ","), "rate": ("learning_rate", "g"),
       "tokens": ("tokens", ","), "tokens/s": ("tok_per_s", ","), "left plateau at step": ("left_plateau", ","),
       "train": ("train_loss", ".4f"), "val": ("val_loss", ".4f"), "best": ("best", "")}
TEXT = {"run": ("name", ""), "NELBO": ("nelbo", ".4f"), "+-text": ("nelbo_se", ".4f"),
        "+-noise": ("nelbo_se_noise", ".4f"), "PPL": ("ppl", ".2f"), "+-": ("ppl_se", ".2f"), "bits/B": ("bpb", ".4f"),
        "acc %": ("acc", ".2f")}
DIFFERENCES = {"better": ("better", ""), "worse": ("worse", ""), "by": ("difference", ".4f"), "+-": ("se", ".4f")}


# ----------------------------------------------------------------------------------------------
# A run

class Run:
    """One training run: a config file, settings, and an output folder. Settings of the run itself override those of
    all runs."""

    def __init__(self, line):
        self.error = ""
        file, *own = line.split() or [""]
        stem = os.path.splitext(os.path.basename(file))[0]
        self.name = " ".join([stem, *own])
        self.words = [file, *(f"--{word}" for word in [*train_settings.split(), *own])]
        self.settings = s = settings_of(vars(train))
        configure(s, self.words, f"run {line!r}")
        # Runs are compared by `base`: their config file and, if its name does not say it, their model.
        model = kind_of(s["attn_every"] > 1, s["block_len"] == s["seq_len"])
        self.base = stem if model_in(stem) == model else f"{stem} {model}"
        made_by = json.dumps({k: v for k, v in s.items() if k != "micro_batch_size"})
        digest = hashlib.sha256(made_by.encode()).hexdigest()[:8]
        self.folder = Path(out_dir, re.sub(r"[^\w.+-]", "-", f"{self.name.replace(' ', '+')}-{digest}"))
        self.eval_words = [f"--data={s['data']}", f"--device={s['device']}",
                           *(f"--{word}" for word in eval_settings.split()),
                           f"--checkpoint={self.folder / 'ckpt.pt'}", f"--out={self.folder / 'eval.json'}"]
        self.eval_settings = settings_of(vars(evaluation))
        configure(self.eval_settings, self.eval_words, "eval_settings")
        if self.eval_settings["decoders"]:
            raise UserError("eval_settings: a sweep compares the NELBO of texts; leave decoders out")

    def log(self):
        """The rows of log.jsonl so far, see `read_log`."""
        path = self.folder / "log.jsonl"
        return read_log(path) if path.exists() else []

    def trained(self):
        """Whether the training has ended: its last checkpoint is saved before the last validation is logged."""
        return any("val_loss" in row and row["step"] >= self.settings["max_iters"] for row in self.log())

    def report(self):
        """eval.py's result, if it was made with the present eval_settings; else None."""
        path = self.folder / "eval.json"
        record = json.loads(path.read_text()) if path.exists() else dict(settings=None)
        return record["results"][0] if record["settings"] == self.eval_settings else None

    def start(self, place, threads):
        """Starts the next process of this run, train.py or eval.py, on a place. train.py continues from a checkpoint if
        there is one. The process prints to the file `printed`, <job>.txt in the run's folder. It has a session of its
        own, so that Ctrl-C reaches only sweep.py, which then stops it."""
        self.job, words = "eval", self.eval_words
        os.makedirs(self.folder, exist_ok=True)
        if not self.trained():
            self.job, words = "train", [*self.words, f"--out_dir={self.folder}"]
            if (self.folder / "ckpt.pt").exists():
                words.append("--resume")
            else:                                       # it may have ended before its first checkpoint: begin again
                (self.folder / "log.jsonl").unlink(missing_ok=True)
        environment = dict(os.environ, OMP_NUM_THREADS=str(threads), PYTHONUNBUFFERED="1", CUDA_VISIBLE_DEVICES=place)
        self.printed = self.folder / f"{self.job}.txt"
        print(f"{self.job}.py: {self.name}, prints to {self.printed}", flush=True)
        with open(self.printed, "w") as log:
            return subprocess.Popen([sys.executable, str(ROOT / f"{self.job}.py"), *words], stdout=log, stderr=log,
                                    env=environment, start_new_session=True)

    def why(self, status):
        """An error message for a process that failed: the last line that it printed."""
        said = ["", *filter(str.strip, self.printed.read_text(errors="replace").splitlines())]
        return f"{self.name}: {self.job}.py ended with status {status}: {said[-1]} ({self.printed})"


def model_in(base):
    """The key of MODELS that the last word of a base contains. The longest: diffumamba_h contains mamba_h. Else ""."""
    return max((model for model in MODELS if model in base.rpartition(" ")[2]), key=len, default="")


# ----------------------------------------------------------------------------------------------
# Running

def places():
    """The places for runs: names of GPUs, each runs_per_gpu times. Without GPUs the name is empty, for the CPU."""
    count = torch.cuda.device_count()
    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return (names.split(",")[:count] or [""]) * runs_per_gpu


def run_all(waiting):
    """
    Trains and evaluates the runs of a list, in parallel on all places, and evaluates each run right after its training.
    If a run fails, the reason goes into its `error`, and the others continue. After an interrupt it stops all processes
    and waits for them: train.py saves a checkpoint.
    """
    running, free = {}, places()
    threads = max(1, (os.cpu_count() or 1) // len(free))
    try:
        while waiting or running:
            while waiting and free:
                run, place = waiting.pop(0), free.pop(0)
                running[run.start(place, threads)] = run, place
            time.sleep(0.2)
            for process in [p for p in running if p.poll() is not None]:
                run, place = running.pop(process)
                free.append(place)
                if process.returncode:
                    run.error = run.why(process.returncode)
                elif run.job == "train":
                    waiting.insert(0, run)              # its evaluation comes before the next training
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()


def train_and_evaluate():
    """Does all runs that are not done. Returns the content of sweep.json."""
    every = [Run(line) for line in runs]
    if not every:
        raise UserError("there are no runs; name a file that lists some, such as config/sweep/laptop.py")
    for folder in {folder for run in every for folder in run.eval_settings["data"]} - {"data/stdlib"}:
        TokenData(folder, "val")                        # now, not after hours of training; train.py makes data/stdlib
    os.makedirs(out_dir, exist_ok=True)
    with lock(os.path.join(out_dir, ".lock"), f"another sweep is running in {out_dir}; choose another out_dir"):
        run_all([*{run.folder: run for run in every if not run.report()}.values()])
    rows = [summarise(run) for run in every]
    return dict(runs=rows, differences=differences(rows), gpus=torch.cuda.device_count(),
                hardware=hardware(torch.device(pick_device("auto"))))


# ----------------------------------------------------------------------------------------------
# Reporting

def left_plateau(log):
    """The first step at which the mean training loss of the last 50 steps was below `plateau`; None if none was."""
    losses = [(row["step"], row["loss"]) for row in log if row.get("loss")]
    for end, (step, _) in enumerate(losses, 1):
        recent = [loss for at, loss in losses[max(0, end - 50):end] if at > step - 50]
        if step >= 50 and statistics.mean(recent) < plateau:
            return step


def summarise(run):
    """One row of the tables: what the training logged, and eval.py's figures of each text. A run that failed has what
    was logged so far and an `error`."""
    s, log, result = run.settings, run.log(), run.report()
    points = [dict(step=row["step"], val=row["val_loss"]) for row in log if "val_loss" in row]
    losses, speeds = ([row[key] for row in log if key in row] for key in ("loss", "tok_per_s"))
    row = dict(name=run.name, base=run.base, learning_rate=s["learning_rate"], steps=s["max_iters"], points=points,
               tokens=s["max_iters"] * s["batch_size"] * s["seq_len"], left_plateau=left_plateau(log),
               tok_per_s=statistics.median_low(speeds) if speeds else None, train_loss=losses[-1] if losses else None,
               val_loss=points[-1]["val"] if points else None)
    if not result:
        return row | dict(error=run.error or f"{run.name} was not evaluated")
    nelbo = next(iter(result["text"].values()))["nelbo"]
    return row | dict(parameters=result["parameters"], nelbo=nelbo, texts=result["text"])


def best_of(results):
    """The best row of each base, {base: row}: that of the lowest NELBO on the first text. Rows without one come last,
    in the order of their validation loss."""
    def score(row):
        return "nelbo" not in row, row.get("nelbo") or row["val_loss"] or math.inf
    return {row["base"]: row for row in sorted(results, key=score, reverse=True)}          # the last of a base stays


def by_text(results):
    """{text: the figures of every row that was evaluated on it, each a dict with the row's name and base}."""
    found = {}
    for row in results:
        for text, figures in row.get("texts", {}).items():
            found.setdefault(text, []).append(dict(figures, name=row["name"], base=row["base"]))
    return found


def differences(results):
    """
    The differences in NELBO between the best runs of all bases, on each text: [dict], in nats per token. The standard
    error is that of differences paired by window, so only runs that were evaluated on the same windows are compared.
    """
    rows = []
    for text, found in by_text(best_of(results).values()).items():
        for a, b in itertools.combinations(sorted(found, key=lambda figures: figures["nelbo"]), 2):
            if a["sha256"] == b["sha256"]:
                paired = (np.array(b["nats"]) - a["nats"]) / a["seq_len"]      # (windows,)
                se = paired.std(ddof=1) / math.sqrt(len(paired)) if len(paired) > 1 else None
                rows.append(dict(text=text, better=a["base"], worse=b["base"], difference=paired.mean(), se=se))
    return rows


def show(results):
    """Prints a table of all runs, in which * marks the best one of each base, and for each text its figures and the
    differences."""
    best = [id(row) for row in best_of(results).values()]
    print_table([dict(row, best="*" if id(row) in best else "") for row in results], RUN)
    for text, found in by_text(results).items():
        print(f"\n{text}, {len(found[0]['nats'])} windows")
        print_table(found, TEXT)
        if len({figures["sha256"] for figures in found}) > 1:
            print("these runs were not evaluated on the same windows: do not compare their figures")
        print("difference in NELBO, paired by window")
        print_table([row for row in differences(results) if row["text"] == text], DIFFERENCES)


def draw_losses(results, ax):
    """Draws the validation losses over tokens. Thick: the best run of each base; thin: its other runs. A dot is the
    NELBO of the first text, from eval.py. Hollow: the perplexities of the paper's models."""
    best = [id(row) for row in best_of(results).values()]
    for row in results:
        base, is_best, (name, colour) = row["base"], id(row) in best, MODELS[model_in(row["base"])]
        tokens = [point["step"] * row["tokens"] / row["steps"] for point in row["points"]]
        ax.plot(tokens, [point["val"] for point in row["points"]], color=colour, lw=1.8 if is_best else 0.6,
                label=name if is_best else None)
        for figures in [*row.get("texts", {}).values()][:1]:
            ax.errorbar(row["tokens"], figures["nelbo"], figures["nelbo_se"], fmt=".", color=colour)
        if is_best and base in RESULTS:
            ax.plot(PAPER_TOKENS[base.rpartition("_")[2]], math.log(RESULTS[base]["c4"][0]), "o", mfc="white", ms=7,
                    color=colour)
    if any(row["base"] in RESULTS for row in results):
        ax.plot([], [], "o", mfc="white", color="0.4", label="the paper, on C4")


# ----------------------------------------------------------------------------------------------
# The script

def main():
    check(globals(), least=dict(runs_per_gpu=1))
    path = draw or os.path.join(out_dir, "sweep.json")
    if not draw:
        write_file(path, json.dumps(train_and_evaluate(), indent=1))
    results = read_json(path).get("runs")
    if not results:
        raise UserError(f"{path} has no runs; name the JSON file of a sweep")
    show(results)
    with picture(path.removesuffix("json") + "png", xscale="log", xlabel="training tokens",
                 ylabel="NELBO, nats per token",
                 title="validation; curves: during training; dots: eval.py, with their standard error") as ax:
        draw_losses(results, ax)
    errors = [row["error"] for row in results if "error" in row]
    if errors and not draw:
        raise UserError("\n".join(["some runs failed:", *errors, "correct the cause and start the same command again"]))


if __name__ == "__main__":
    with script("sweep.py", globals()):
        for _number in (signal.SIGTERM, signal.SIGHUP):         # as Ctrl-C; nohup ignores SIGHUP
            if signal.getsignal(_number) != signal.SIG_IGN:
                signal.signal(_number, signal.default_int_handler)
        main()
