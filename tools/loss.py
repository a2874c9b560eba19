"""
Reads and draws the log of a training, out_dir/log.jsonl.

    python -m tools.loss out                                # writes out/loss.png, also while the run goes on
"""
import contextlib
import json
import sys
from pathlib import Path

from configurator import script
from tools import picture


def read_log(path):
    """The rows of a log.jsonl, in the order of their steps; of a step, training comes before validation. A run that
    resumes logs the steps after its checkpoint again: the last line of a step counts. A line that was cut off, by a
    full disk or a kill, is left out."""
    rows = {}
    for line in Path(path).read_text(errors="replace").split("\n"):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            row = json.loads(line)
            rows[row["step"], "val_loss" in row] = row
    return [rows[key] for key in sorted(rows)]


def draw(folder):
    """Draws training and validation loss (nats per token) from folder/log.jsonl to folder/loss.png."""
    rows = read_log(Path(folder, "log.jsonl"))
    train = [(row["step"], row["loss"]) for row in rows if row.get("loss")]    # a loss that was not finite is None
    val = [(row["step"], row["val_loss"]) for row in rows if row.get("val_loss")]
    with picture(f"{folder}/loss.png", title=folder, xlabel="step", ylabel="NELBO, nats per token") as ax:
        ax.plot(*zip(*train), color="0.6", lw=1, label="training, mean since the last point")
        ax.plot(*zip(*val), color="tab:blue", marker="o", ms=4, label="validation")


if __name__ == "__main__":
    with script("tools/loss.py"):
        draw(*sys.argv[1:2] or ["out"])
