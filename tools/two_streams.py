"""
Draws assets/two_streams.png: who sees whom in training. Left: attention, drawn from ops.two_stream_rule. Right: which
boundary state each noisy block starts from in Mamba layers.

    python -m tools.two_streams
    python -m tools.two_streams --out=mine.png
"""
import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import ops
from checkpoint import check_out
from configurator import configure, script

out = "assets/two_streams.png"          # the picture

CLEAN, NOISY, GREY = "#4477aa", "#ee7733", "#999999"
K, L = 4, 4                             # blocks of a sequence, tokens of a block


def draw_mask(ax):
    n_clean = (K - 1) * L
    at = torch.arange(n_clean + K * L)
    sees = ops.two_stream_rule(at[:, None], at, L, n_clean).int() * (1 + (at >= n_clean).int())       # 1 clean, 2 noisy
    ax.pcolormesh(sees.numpy(), cmap=ListedColormap(["white", CLEAN, NOISY]), edgecolors="white", lw=0.3)
    lines = range(0, len(at) + 1, L)
    ax.hlines(lines, 0, len(at), color="0.8", lw=0.6)
    ax.vlines(lines, 0, len(at), color="0.8", lw=0.6)
    names = [f"clean {i}" for i in range(1, K)] + [f"noisy {i}" for i in range(1, K + 1)]
    ticks = [L * i + L / 2 for i in range(len(names))]
    ax.set(xlim=(0, len(at)), ylim=(len(at), 0), aspect="equal", xlabel="keys", ylabel="queries")
    ax.set_xticks(ticks, names, rotation=45, ha="right", fontsize=8)
    ax.set_yticks(ticks, names, fontsize=8)
    ax.tick_params(length=0)
    ax.set_title("attention layers", fontsize=11)


def draw_states(ax):
    def box(x, y, text, color):
        ax.add_patch(Rectangle((x, y), 1.5, 0.8, fc=color, ec="none", alpha=0.85))
        ax.text(x + 0.75, y + 0.4, text, ha="center", va="center", color="white", fontsize=9)

    def arrow(start, end, color):
        ax.annotate("", end, start, arrowprops=dict(arrowstyle="-|>", color=color, lw=1.3))

    for i in range(K):
        x = 2.5 * i
        if i < K - 1:
            box(x, 3, f"clean {i + 1}", CLEAN)
            arrow((x + 1.5, 3.4), (x + (2.5 if i < K - 2 else 2.3), 3.4), CLEAN)
            ax.text(x + 2.0, 3.55, f"$s_{i + 1}$", ha="center", fontsize=9, color=CLEAN)
            arrow((x + 2.0, 3.35), (x + 2.5, 1.35), CLEAN)
        box(x, 0.8, f"noisy {i + 1}", NOISY)
        arrow((x + 1.45, 0.5), (x + 0.05, 0.5), NOISY)
        arrow((x + 0.05, 1.8), (x + 1.45, 1.8), NOISY)
        ax.text(x + 0.75, 0.15, "reverse, from zeros", ha="center", fontsize=7, color=GREY)
        ax.text(x + 0.75, 1.92, "forward", ha="center", fontsize=7, color=GREY)
    ax.text(0, 4.35, "one clean scan makes every boundary state ...", fontsize=9, color=CLEAN)
    ax.text(0, -0.45, "... from which all noisy blocks run as one batch", fontsize=9, color=NOISY)
    ax.set(xlim=(-0.3, 9.4), ylim=(-0.8, 4.8))
    ax.set_title("Mamba-2 layers", fontsize=11)
    ax.axis("off")


def main():
    check_out("out", out, ".png", ".pdf", ".svg")
    fig = Figure(figsize=(11, 4.4), layout="tight")
    left, right = fig.subplots(1, 2, width_ratios=[1, 1.35])
    draw_mask(left)
    draw_states(right)
    fig.savefig(out, dpi=130)


if __name__ == "__main__":
    with script("two_streams.py"):
        configure(globals())
        main()
