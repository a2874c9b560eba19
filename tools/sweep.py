"""
Trains and evaluates many runs on the GPUs of one machine and compares them in a table and a picture. For example: the
paper's grid of four models and five learning rates (tab:validation-87m-full), or the models and ablations on a laptop.

    python -m tools.sweep config/sweep/87m.py           # the paper's grid: 100B tokens
    python -m tools.sweep config/sweep/laptop.py        # an hour and a half on two cores
    python -m tools.sweep --draw=FILE.json,FILE2.json   # only tables and picture of finished sweeps; the files after
                                                        # the first are repetitions, drawn thin and hollow

Each run is one process of `train.py`, followed by one of `eval.py`. After an interrupt or a failure, start the same
command again: finished runs are not repeated, and unfinished ones continue from their checkpoints.
"""
import contextlib
import ctypes
import functools
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import numpy as np
import torch

import eval as evaluation
import train
from configurator import UserError, check, check_names, configure, script, settings_of, tqdm
from data import TokenData, prepare_stdlib
from eval import print_table
from files import check_file, check_picture, load_json, locked, misfit, read_record, write_file
from paper import MODELS, kind_of
from parallel import ROOT, hardware, pick_device

# ----------------------------------------------------------------------------------------------
# Settings
out_dir = "out/sweep"
runs = []                               # each is a config file of train.py and settings: "FILE a=1 b=2"
train_settings = ""                     # of train.py, for all runs: "data=data/mine seed=1"; a run's own settings win
gpus_per_run = 1                        # GPUs of one run (on a CPU: processes)
runs_per_gpu = 1                        # runs that share a GPU, for small models
eval_settings = "mc=8"                  # settings of eval.py
figure = ""                             # draw the curves in this file; empty: out_dir/sweep.png
table = ""                              # write the table to this JSON file; empty: out_dir/sweep.json
draw = []                               # only print and draw these JSON files, which a sweep wrote
# ----------------------------------------------------------------------------------------------

PRCTL, PR_SET_PDEATHSIG = getattr(ctypes.CDLL(None), "prctl", None), 1     # Linux: ends a child when its parent dies
NUMBER = (int, float, type(None))
# What the JSON files must hold, see files.misfit. First, of eval.py's results on a text, the fields that are used here.
TEXT_RESULT = {"ppl": (int, float), **dict.fromkeys(
    "nelbo nelbo_se nelbo_se_noise ppl_se bpb acc acc_se tokens samples".split(), NUMBER)}
FIGURES = {**TEXT_RESULT, "nats": [(int, float)]}
REPORT = {"results": [{"parameters": int, "text": lambda texts: texts and not misfit(texts, {"*": FIGURES})}]}
ROW = {"name": str, "base": str, "points": [{"step": int, "val": (int, float), "train": NUMBER}], "?error": str,
       "?eval": TEXT_RESULT, "?nats": [(int, float)], "?text": (str, type(None)), "tokens": int, "steps": int,
       **dict.fromkeys(("?learning_rate", "?tok_per_s", "?parameters", "?val_loss"), NUMBER)}
RESULTS = {"runs": lambda rows: rows and not misfit(rows, [ROW])}           # the form of the JSON table
EVALUATION = 100                        # in the progress bar an evaluation counts as this many steps
MAY_DIFFER = {"out_dir", "resume", "micro_batch_size", "log_interval", "device", "kernels", "compile",
              "dist_timeout"}           # settings of train.py that may differ when a run continues
COLUMNS = {"parameters": ("parameters", ","), "rate": ("learning_rate", "g"), "tokens": ("tokens", ","),
           "train": ("train_loss", ".4f"), "val": ("val_loss", ".4f"), "NELBO": ("nelbo", ".4f"),
           "+-text": ("nelbo_se", ".4f"), "+-noise": ("nelbo_se_noise", ".4f"), "PPL": ("ppl", ".2f"),
           "bits/B": ("bpb", ".4f"), "acc %": ("acc", ".2f")}


class Run:
    """
    One training run: a config file, settings, and an output folder. Settings of the run itself override those of all
    runs. The folder's run.json holds the settings, "trained": true after a successful training, and "evaluated": the
    eval_settings of a successful evaluation.
    """

    def __init__(self, line):
        self.error = ""
        self.file, *own = words_of(line) or [""]
        file = os.path.splitext(os.path.basename(self.file))[0]
        self.name = " ".join([file, *own])
        self.folder = os.path.join(out_dir, re.sub(r"[^\w.+-]", "-", self.name.replace(" ", "+")))
        words = {word.partition("=")[0]: word for word in [*words_of(train_settings), *own]}
        self.words = [self.file, *(f"--{word}" for word in words.values())]
        self.settings = s = configure(settings_of(vars(train)), self.words, f"run {line!r}")
        # Runs are compared by `base`: their config file and, if its name does not say it, their model.
        model = kind_of(s["attn_every"] > 1, s["block_len"] == s["seq_len"])
        self.base = file if model_in(file) == model else f"{file} {model}"

    def path(self, name):
        return os.path.join(self.folder, name)

    @property
    def state(self):
        state = read_json_or_none(self.path("run.json"))
        return state if isinstance(state, dict) else {}

    def remember(self, **news):
        write_json(self.path("run.json"), {**self.state, **news})

    def claim(self):
        """Writes the settings to run.json. Raises UserError if the folder holds a run with other settings."""
        mine = {k: v for k, v in self.settings.items() if k not in MAY_DIFFER}
        held = self.state.get("settings", mine)
        changed = [k for k in mine if k in held and held[k] != mine[k]]    # a setting may be newer than the run
        if changed:
            raise UserError(f"{self.folder} holds a run with another {', '.join(changed)}; use the same "
                            f"settings, or another out_dir")
        self.remember(settings=mine)

    def rows(self):
        """The rows of log.jsonl so far."""
        with contextlib.suppress(FileNotFoundError):
            return list(train.log_rows(self.path("log.jsonl")).values())
        return []

    @property
    def steps(self):
        """The step of the last complete line of log.jsonl; 0 if there is none. Reads the end of the file alone, as it
        is asked for several times a second."""
        with contextlib.suppress(OSError, LookupError, ValueError, TypeError), open(self.path("log.jsonl"), "rb") as f:
            f.seek(max(os.path.getsize(f.name) - 4096, 0))
            return json.loads(f.read().split(b"\n")[-2])["step"]
        return 0

    @property
    def points(self):
        """The validation loss, and the training loss last logged, at each validation."""
        rows = self.rows()
        return [dict(step=v["step"], val=v["val_loss"], train=loss_before(rows, v["step"]))
                for v in rows if v.get("val_loss")]

    @property
    def report(self):
        """The parameter count and the results on the first text, from eval.py's JSON. None if the file is missing or
        unreadable, or was made with other eval_settings."""
        record = read_json_or_none(self.path("eval.json"))
        if self.state.get("evaluated") == eval_settings and not misfit(record, REPORT) and record["results"]:
            result = record["results"][0]
            figures = next(iter(result["text"].values()))
            return dict(parameters=result["parameters"], nats=figures["nats"], text=figures.get("sha256"),
                        eval={k: figures[k] for k in TEXT_RESULT})

    def command(self, job):
        """The command that runs `job`: "train" (continues from a checkpoint if there is one) or "eval"."""
        if job == "eval":
            return [sys.executable, str(ROOT / "eval.py"), f"--checkpoint={self.path('ckpt.pt')}",
                    f"--data={self.settings['data']}", f"--device={self.settings['device']}",
                    f"--out={self.path('eval.json')}", *(f"--{w}" for w in words_of(eval_settings))]
        torchrun = ["-m", "torch.distributed.run", f"--nproc_per_node={gpus_per_run}", "--standalone"]
        resume = ["--resume"] if os.path.exists(self.path("ckpt.pt")) else []
        return [sys.executable, *(torchrun if gpus_per_run > 1 else []), str(ROOT / "train.py"), *self.words,
                f"--out_dir={self.folder}", *resume]

    def why(self, job, status):
        """An error message for a failed process: its own error message, or else the last line that it printed. If one
        of several ranks has failed, the others say that it is gone: the cause is what it said itself."""
        with open(self.path(f"{job}.txt"), errors="replace") as f:
            lines = [line.strip() for line in f if line.strip()] or ["it printed nothing"]
        said = [line for line in lines if line.startswith(f"{job}.py: ")] or lines
        causes = [line for line in said if "another process of this run is gone" not in line] or said
        return f"{self.name}: {job}.py ended with status {status}: {causes[-1]} ({f.name})"


def model_in(base):
    """The key of MODELS that the last word of a base contains. The longest: diffumamba_h contains mamba_h. Else ""."""
    return max((model for model in MODELS if model in base.rpartition(" ")[2]), key=len, default="")


def words_of(text):
    """The words of a setting; quotes protect spaces, as in a shell."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"{text!r} cannot be split into words: {error}") from None


def read_json_or_none(path):
    """The content of a JSON file; None if it is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, RecursionError), open(path) as f:
        return json.load(f)


def write_json(path, value):
    write_file(path, json.dumps(value, indent=1), "choose another out_dir")


def loss_before(rows, step):
    """The last training loss logged at or before a step."""
    return next((r["loss"] for r in reversed(rows) if r.get("loss") and r["step"] <= step), None)


# ----------------------------------------------------------------------------------------------
# Running

def places():
    """The places for runs: lists of GPU names, each list repeated runs_per_gpu times. Without GPUs: empty lists, for
    the CPU."""
    count = torch.cuda.device_count()
    if not count:
        return [[]] * runs_per_gpu
    if count < gpus_per_run:
        raise UserError(f"a run needs {gpus_per_run} GPUs and this machine has {count}; lower gpus_per_run")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[:count]
    names = visible if len(visible) == count and all(visible) else [str(i) for i in range(count)]
    groups = zip(*(names[i::gpus_per_run] for i in range(gpus_per_run)))
    return [list(group) for group in groups] * runs_per_gpu


def start(run, job, place, threads):
    """Starts a process of a run on a place. It prints to <job>.txt in the run's folder. It has a session of its own,
    so that Ctrl-C reaches only sweep.py, which then stops it. If sweep.py is killed, the process gets SIGTERM, on
    which train.py saves a checkpoint."""
    if job == "train" and not os.path.exists(run.path("ckpt.pt")):
        with contextlib.suppress(FileNotFoundError):        # the log of a run that ended before its first checkpoint
            os.replace(run.path("log.jsonl"), run.path("log.jsonl.old"))
    environment = dict(os.environ, OMP_NUM_THREADS=str(threads), PYTHONUNBUFFERED="1")
    if place:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(place)
    with open(run.path(f"{job}.txt"), "w") as log:
        return subprocess.Popen(run.command(job), stdout=log, stderr=log, env=environment, start_new_session=True,
                                close_fds=False,            # so that it holds the lock of out_dir as well
                                preexec_fn=PRCTL and functools.partial(PRCTL, PR_SET_PDEATHSIG, signal.SIGTERM))


def run_all(todo, bar, done):
    """
    Trains the runs, in parallel on all places, and evaluates each right after its training. done() is the position of
    the progress bar. If a run fails, the reason goes into its `error`, and the others continue. After an interrupt it
    stops all processes and waits for them: train.py saves a checkpoint.
    """
    waiting, running, free = list(todo), {}, places()
    threads = max(1, (os.cpu_count() or 1) // (len(free) * gpus_per_run))
    try:
        while waiting or running:
            while waiting and free:
                run, place = waiting.pop(0), free.pop(0)
                job = "eval" if run.state.get("trained") else "train"
                running[start(run, job, place, threads)] = run, job, place
            time.sleep(0.2)
            for process in [p for p in running if p.poll() is not None]:
                run, job, place = running.pop(process)
                free.append(place)
                if process.returncode:
                    run.error = run.why(job, process.returncode)
                elif job == "train":
                    run.remember(trained=True)
                    waiting.insert(0, run)              # its evaluation comes before the next training
                else:
                    run.remember(evaluated=eval_settings)
            bar.update(done() - bar.n)
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()


# ----------------------------------------------------------------------------------------------
# Reporting

def summarise(run):
    """One row of the table: eval.py's results, and the training and validation losses. A run that failed has the losses
    logged so far and an `error`."""
    s, points = run.settings, run.points
    speed = sorted(r["tok_per_s"] for r in run.rows() if "tok_per_s" in r)
    row = dict(name=run.name, base=run.base, learning_rate=s["learning_rate"], steps=s["max_iters"],
               tokens=s["max_iters"] * s["batch_size"] * s["seq_len"],
               tok_per_s=speed[len(speed) // 2] if speed else None, points=points,
               val_loss=points[-1]["val"] if points else None)
    missing = f"{run.name}: {run.path('eval.json')} is missing or cannot be read"
    return row | (run.report or dict(error=run.error or missing))


def score(row):
    """The sort key for the best row: lowest NELBO first, then rows without a NELBO by validation loss."""
    nelbo, val = row.get("eval", {}).get("nelbo"), row.get("val_loss")
    return (0, nelbo) if nelbo is not None else (1, math.inf if val is None else val)


def best_of(results):
    """The best row of each base, {base: row}."""
    return {r["base"]: min((other for other in results if other["base"] == r["base"]), key=score)
            for r in results}


def show(results):
    """The table; * marks the best row of each base."""
    best, columns = best_of(results), []
    for header, (key, form) in COLUMNS.items():
        flat = [{**r.get("eval", {}), **r, "train_loss": r["points"][-1]["train"] if r["points"] else None}
                for r in results]
        columns.append((header, [None if r.get(key) is None else format(r[key], form) for r in flat]))
    marks = ["*" if best[r["base"]] is r and "error" not in r else "" for r in results]
    print_table([("run", [r["name"] for r in results]), *columns, ("best", marks)])


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


def show_differences(rows):
    """Prints the table of `differences`."""
    if rows:
        print("\nNELBO difference of each run to the next worse one, paired by sequence")
        print_table([(name, [None if r[key] is None else format(r[key], form) for r in rows]) for name, key, form in (
            ("run", "better", ""), ("next", "worse", ""), ("difference", "difference", "+.4f"),
            ("+-text", "se_text", ".4f"), ("+-seeds", "se_seeds", ".4f"), ("seeds", "seeds", "d"))])


def curves(ax, groups, looks, x_of, names):
    """Draws the validation loss (solid) of every run of the groups, and the training loss (dotted) of the first, over
    x_of(run, step). names: whether to write each group's name at the end of its first curve."""
    ends = []
    for runs in groups:
        name, colour = looks[runs[0]["base"]]
        for i, r in enumerate(runs):
            x, val = [x_of(r, p["step"]) for p in r["points"]], [p["val"] for p in r["points"]]
            ax.plot(x, val, color=colour, lw=0.8 if i else 1.8)
            if not i:
                ax.plot(x, [p["train"] for p in r["points"]], color=colour, lw=0.8, ls=":")
                ends += [(val[-1], x[-1], name, colour)] if x else []
    bottom, top = ax.get_ylim()
    at = -math.inf
    for val, x, name, colour in sorted(ends) if names else []:      # moved up where they would overlap
        at = max(val, at + 0.05 * (top - bottom))
        ax.annotate(name, (x, at), (6, 0), textcoords="offset points", color=colour, va="center")


def picture(results, path, repetitions=()):
    """
    Draws losses over tokens and over time. Each base shows its best run among those with the fewest settings, and that
    run's other seeds. Below, the perplexity of evaluated runs, ± its standard error. The first seed is drawn thick and
    filled; other seeds, and the runs of `repetitions` (results of other sweeps), thin and hollow.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    every, groups = [*results, *(r for rows in repetitions for r in rows)], {}
    kinds = {r["base"]: model_in(r["base"]) for r in every}
    looks = {base: MODELS[kind] if list(kinds.values()).count(kind) == 1 and kind else (
        base, MODELS[kind][1] if kind else f"C{i}") for i, (base, kind) in enumerate(kinds.items())}
    for r in every:
        groups.setdefault(without_seed(r["name"]), []).append(r)
    n_settings = lambda r: len(without_seed(r["name"]).split())
    fewest = [r for r in every if n_settings(r) == min(n_settings(o) for o in every if o["base"] == r["base"])]
    main_groups = {base: groups[without_seed(r["name"])] for base, r in best_of(fewest).items()}
    axes = {"million tokens": lambda r, step: step * r["tokens"] / r["steps"] / 1e6}
    if all(r.get("tok_per_s") for r in every):
        axes["minutes of training"] = lambda r, step: step * r["tokens"] / r["steps"] / r["tok_per_s"] / 60
    evaluated = {name: runs for name, runs in groups.items() if any(r.get("eval") for r in runs)}
    heights = [4.4, 0.8 + 0.25 * len(evaluated)] if evaluated else [4.4]                   # inches
    fig = Figure(figsize=(5.5 * len(axes), sum(heights)), layout="constrained")
    top, *rest = fig.subfigures(len(heights), height_ratios=heights, squeeze=False).flat
    top.suptitle("validation (solid), training (dotted); thick: first seed", fontsize=10)
    for i, (ax, (label, x_of)) in enumerate(zip(top.subplots(1, len(axes), squeeze=False).flat, axes.items())):
        curves(ax, main_groups.values(), looks, x_of, names=i == 0)
        ax.set(xlabel=label, ylabel="NELBO, nats per token")
        ax.spines[["top", "right"]].set_visible(False)
    if evaluated:
        ax = rest[0].subplots()
        for i, runs in enumerate(reversed(evaluated.values())):
            for j, r in enumerate(r for r in runs if r.get("eval")):
                ax.errorbar(r["eval"]["ppl"], i, xerr=r["eval"]["ppl_se"], fmt="o", color=looks[r["base"]][1], ms=5,
                            capsize=3, mfc="none" if j else None)
        ax.set_yticks(range(len(evaluated)), [*reversed(evaluated)])
        ax.set(xscale="log", xlabel="validation perplexity ± standard error; filled: first seed")
        ax.xaxis.set_minor_locator(LogLocator(subs=(1.5, 2, 3, 5, 7)))
        ax.xaxis.set_major_formatter("{x:.0f}")
        ax.xaxis.set_minor_formatter("{x:.0f}")
        ax.grid(axis="x", which="both", color="0.9")
        ax.spines[["top", "right"]].set_visible(False)
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    fig.savefig(path, dpi=130)


def settings_of_eval():
    """The settings of eval.py with eval_settings."""
    return configure(settings_of(vars(evaluation)), [f"--{word}" for word in words_of(eval_settings)], "eval_settings")


def check_settings():
    """Raises UserError for wrong settings before any run starts."""
    check(globals(), least=dict(gpus_per_run=1, runs_per_gpu=1))
    check_names(globals(), "runs", "draw")
    if own := {word.partition("=")[0] for word in words_of(eval_settings)} & {"checkpoint", "out"}:
        raise UserError(f"eval_settings: every run has its own {own.pop()}; leave this setting out")
    settings_of_eval()
    configure(settings_of(vars(train)), [f"--{word}" for word in words_of(train_settings)], "train_settings")
    check_file("table", table, rb'\{\s*"runs"')
    check_picture("figure", figure)


def train_and_evaluate():
    """Does all runs. Returns the content of the JSON table."""
    every = [Run(line) for line in runs]
    folders = [run.folder for run in every]
    if not folders:
        raise UserError("there are no runs; name a file that lists some, such as config/sweep/laptop.py")
    if twice := {folder for folder in folders if folders.count(folder) > 1}:
        raise UserError(f"two runs would write {twice.pop()}; give them different settings")
    scored = settings_of_eval()
    for run in every:
        s = run.settings
        if s["data"] == "data/stdlib":
            prepare_stdlib()                            # once here; else all runs would prepare it at the same time
        TokenData(s["data"], "train", s["tokenizer"])
        for folder in scored["data"] or [s["data"]]:
            TokenData(folder, "val", s["tokenizer"]).n_windows(scored["seq_len"] or s["seq_len"])
    with locked(out_dir, "choose another out_dir"):
        for run in every:
            run.claim()
        todo = [run for run in every if not run.report]
        done = lambda: sum(run.steps for run in every) + EVALUATION * sum(bool(run.report) for run in every)
        total = sum(run.settings["max_iters"] + EVALUATION for run in every)
        if todo:
            with tqdm(desc="training and evaluation", total=total, initial=done(), unit="step", unit_scale=True,
                      smoothing=0) as bar:
                run_all(todo, bar, done)
    rows = [summarise(run) for run in every]
    return dict(runs=rows, differences=differences(rows), gpus=torch.cuda.device_count(),
                hardware=hardware(torch.device(pick_device("auto"))))


def main():
    check_settings()
    if draw:
        paths, records = draw, [
            read_record(path, load_json, RESULTS, "a file that sweep.py wrote", "name another") for path in draw]
    else:
        record = train_and_evaluate()
        paths, records = [table or os.path.join(out_dir, "sweep.json")], [record]
        write_json(paths[0], record)
    path, (results, *repetitions) = paths[0], [record["runs"] for record in records]
    png = figure or f"{os.path.splitext(path)[0]}.png"
    check_picture("figure", png, paths)
    for rows in (results, *repetitions):
        show(rows)
    show_differences(differences(results))
    picture(results, png, repetitions)
    print(f"wrote {png}" if draw else f"wrote {path} and {png}")
    errors = [r["error"] for r in results if "error" in r]
    if errors and not draw:
        print(*errors, sep="\n", file=sys.stderr)
        sys.exit("sweep.py: some runs failed; fix the cause and start the same command again: finished runs are kept")


if __name__ == "__main__":
    with script("sweep.py"):
        for _number in (signal.SIGTERM, signal.SIGHUP):         # as Ctrl-C; nohup ignores SIGHUP
            if signal.getsignal(_number) != signal.SIG_IGN:
                signal.signal(_number, signal.default_int_handler)
        try:
            configure(globals())
            main()
        except KeyboardInterrupt:
            print("sweep.py: start the same command again to continue", file=sys.stderr)
            raise
