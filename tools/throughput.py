"""
Draws the throughput figures from the JSON files that bench.py wrote. `python bench.py plot` calls `plot`.

    python bench.py plot FILE... --figures=FOLDER
"""
import contextlib
import os

from configurator import UserError
from files import load_json, read_record
from paper import LADDER, MODELS, SAMPLE, TRAIN

SPEED = {"config": str, "tok_per_s": (int, float)}
RESULTS = {"?when": str, "bench": str, "hardware": {"name": str, "torch": str}, "rows": [
    ({"error": str}, {"op": str}, {**SPEED, "length": int}, {**SPEED, "gpus": range(1, 2 ** 20)})]}


def plot(files, figures):
    """Draws the results in the files. If several have the same (config, length) or (config, GPUs), the newest wins."""
    results, found = [], dict(sample={}, train={})
    if not files:
        raise UserError("name what to draw, files that bench.py wrote with --out=FILE: python bench.py plot FILE...")
    for path in files:
        r = read_record(path, load_json, RESULTS, "a file that bench.py wrote with --out", "name another")
        about = f"{r['hardware']['name']}, torch {r['hardware']['torch']}"
        results.append((r.get("when", ""), r["bench"], about, r["rows"]))
    for _, what, about, rows in sorted(results, key=lambda r: r[0]):    # by time; of equal times in the given order
        for r in rows:
            kind, _, size = r.get("config", "").rpartition("_")
            # Only the paper's protocol is drawn. These fields may be missing; then the file follows it.
            if what == "sample" and (r.get("batch", 1), r.get("tokens_per_step", 16)) != (1, 16) or (
                    r.get("seq_len", 8192) != 8192):
                continue
            if kind in MODELS and size == dict(sample="700m", train="350m").get(what):
                found[what][kind, r.get("length", r.get("gpus"))] = dict(about=about, **r)
    sample, train = ({place: r for place, r in found[what].items() if "error" not in r}
                     for what in ("sample", "train"))
    if not sample and not train:
        raise UserError("the files hold no results of the 350M models (training) or 700M models (generation); make "
                        "some: python bench.py train --out=FILE")
    about = " and ".join(sorted({r["about"] for r in (sample | train).values()}))
    if sample:
        ours = {kind: {n: r["tok_per_s"] for (k, n), r in sample.items() if k == kind}
                for kind in MODELS}
        note = f"Lines: ours, {about}. Hollow: the paper, A100-80GB. Random weights, batch 1, bf16."
        draw_curves(figures, "throughput.png", "Generation, 700M parameters, 16 tokens a step", "tokens/s",
                    note, "", ours, SAMPLE)
        draw_curves(figures, "speedup.png", "Speed of BDLM Mamba-H over two others, 700M parameters",
                    "ratio of tokens/s", note, "over ", ratios(ours), ratios(SAMPLE))
    if train:
        draw_training(figures, {place: r["tok_per_s"] / r["gpus"] / 1000 for place, r in train.items()},
                      f"Filled: ours, {about}. Hollow: the paper, 8 x A100-80GB. bf16.")


def ratios(speed):
    return {kind: {n: v / speed[kind][n] for n, v in speed["mamba_h"].items() if n in speed[kind]}
            for kind in ("diffumamba_h", "bdlm_attention")}


@contextlib.contextmanager
def figure(figures, name, title, ylabel, note):
    from matplotlib.figure import Figure
    fig = Figure(figsize=(8, 4.8))
    ax = fig.subplots()
    ax.set_title(title, loc="left", fontsize=11)
    ax.set_ylabel(ylabel)
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_axisbelow(True)
    ax.grid(axis="y", color="0.92")
    fig.text(0.01, 0.012, note, fontsize=7, color="0.35")
    yield ax
    os.makedirs(figures, exist_ok=True)
    fig.tight_layout(rect=(0, 0.045, 1, 1))
    fig.savefig(os.path.join(figures, name), dpi=150)
    print(f"wrote {os.path.join(figures, name)}")


def draw_curves(figures, name, title, ylabel, note, prefix, ours, paper):
    """Draws the curves ours, {kind: {length: value}}, with `paper` as hollow markers. A thin line joins the end of each
    curve to its name at the right. Names that would overlap are moved up."""
    ends, right = [], max(LADDER) * 1.25
    with figure(figures, name, title, ylabel, note) as ax:
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", base=2 if prefix else 10)
        ax.set_xticks(*zip(*((n, label) for n, label in LADDER.items() if label)))
        ax.set_xlabel("tokens generated")
        ax.yaxis.set_major_formatter(lambda v, _: f"{v:,g}x" if prefix else f"{v:,g}")
        for kind in ours:
            ax.plot(*zip(*paper[kind].items()), "o", mfc="white", ms=5, color=MODELS[kind][1])
            if ours[kind]:
                ax.plot(*zip(*sorted(ours[kind].items())), ".-", color=MODELS[kind][1], zorder=3)
            ends.append((*max((ours[kind] or paper[kind]).items())[::-1], kind))
        bottom, top = ax.get_ylim()
        at = bottom
        for y, x, kind in sorted(ends):
            label, color = MODELS[kind]
            at = max(y, at * (top / bottom) ** 0.045)
            ax.plot([x, right], [y, at], ":", lw=0.8, color=color, zorder=1, clip_on=False)
            ax.text(right * 1.05, at, prefix + label, color=color, va="center", fontsize=9)
        ax.set_xlim(min(LADDER) / 1.3, right)


def draw_training(figures, ours, note):
    """Draws bars of thousand tokens/s per GPU from {(kind, GPUs): value}, beside the paper's."""
    counts = [*sorted({gpus for _, gpus in ours}), 0]   # 0: the paper
    speeds = ours | {(kind, 0): speed / 8000 for kind, speed in TRAIN.items()}
    order, width = list(MODELS), 0.8 / len(counts)
    with figure(figures, "training.png", "Training, 350M parameters, 8192 tokens a sequence",
                "thousand tokens/s per GPU", note) as ax:
        for (kind, gpus), speed in speeds.items():
            at = order.index(kind) + (counts.index(gpus) - (len(counts) - 1) / 2) * width
            bar = ax.bar(at, speed, 0.92 * width, color=MODELS[kind][1] if gpus else "white",
                         ec=MODELS[kind][1], alpha=0.7 if gpus > 1 else 1)
            what = f"{gpus} GPU{'s' * (gpus > 1)}" if gpus else "paper"
            ax.bar_label(bar, [f"{speed:.0f}\n{what}"], padding=2, fontsize=8)
        names = [name.replace("full-sequence ", "full-sequence\n") for name, _ in MODELS.values()]
        ax.set_xticks(range(len(names)), names)
        ax.margins(y=0.15)
