"""
Draws the throughput figure from the JSON files that bench.py wrote with --out.

    python -m tools.throughput FILE... --figures=FOLDER
    python -m tools.throughput assets/sample_*.json                         # that of docs/results.md
"""
import sys
from pathlib import Path

from configurator import UserError, configure, script
from data import read_json
from paper import LADDER, MODELS, SAMPLE
from tools import picture

figures = "assets"                      # the folder for throughput.png

# Only the paper's protocol is drawn. A row may lack these fields; then it follows the protocol.
PROTOCOL = dict(batch=1, decoder="random", tokens_per_step=16)


def read(files):
    """What bench.py's files hold of the paper's 700M models: {kind: {length: tokens/s}}, and what they were measured
    on. If several files have the same row, the newest counts."""
    speed, machines = {kind: {} for kind in MODELS}, set()
    for record in sorted(map(read_json, files), key=lambda r: r.get("when", "")):
        for row in record.get("rows", []):
            kind, _, size = row.get("config", "").rpartition("_")
            usual = all(row.get(field, value) == value for field, value in PROTOCOL.items())
            if record.get("bench") == "sample" and kind in MODELS and size == "700m" and usual and "error" not in row:
                speed[kind][row["length"]] = row["tok_per_s"]
                machines.add(f"{record['hardware']['name']}, torch {record['hardware']['torch']}")
    if not machines:
        raise UserError("the files hold no generation by the 700M models; make some: python bench.py sample --out=FILE")
    return speed, " and ".join(sorted(machines))


def curves(ax, ours, paper):
    """Draws the curves ours, {kind: {length: value}}, with `paper` as hollow markers. A thin line joins the end of each
    curve to its name at the right. Names that would overlap are moved up."""
    ends, right = [], max(LADDER) * 1.25
    ax.grid(axis="y", color="0.92")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(*zip(*((n, label) for n, label in LADDER.items() if label)))
    ax.yaxis.set_major_formatter(lambda v, _: f"{v:,g}")
    for kind, values in ours.items():
        ax.plot(*zip(*paper[kind].items()), "o", mfc="white", ms=5, color=MODELS[kind][1])
        if values:
            ax.plot(*zip(*sorted(values.items())), ".-", color=MODELS[kind][1], zorder=3)
        length, speed = max((values or paper[kind]).items())           # of the right end
        ends.append((speed, length, kind))
    bottom, top = ax.get_ylim()
    at = bottom
    for y, x, kind in sorted(ends):                     # from the lowest curve up
        label, colour = MODELS[kind]
        at = max(y, at * (top / bottom) ** 0.045)
        ax.plot([x, right], [y, at], ":", lw=0.8, color=colour, zorder=1, clip_on=False)
        ax.text(right * 1.05, at, label, color=colour, va="center", fontsize=9)
    ax.set_xlim(min(LADDER) / 1.3, right)


def main():
    files = [word for word in sys.argv[1:] if word.endswith(".json")]
    configure(globals(), [word for word in sys.argv[1:] if word not in files])
    if not files:
        raise UserError("name what to draw, files that bench.py wrote: python -m tools.throughput FILE...")
    speed, machines = read(files)
    note = (f"tokens generated; random weights, batch 1, bf16\nlines: ours, {machines}; full-sequence models, and all "
            "beyond 8K: estimated\nhollow: the paper, A100-80GB")
    with picture(f"{figures}/throughput.png", ylabel="tokens/s", xlabel=note,
                 title="Generation, 700M parameters, 16 tokens a step") as ax:
        curves(ax, speed, SAMPLE)


if __name__ == "__main__":
    with script("throughput.py"):
        main()
