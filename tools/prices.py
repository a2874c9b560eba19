"""
Prints and draws what `python eval.py --decoders` found: bits per byte against tokens a step.

    python eval.py --decoders=random:1,random:4,strided:1,strided:4 --out=out/prices.json
    python -m tools.prices --files=out/prices.json      # one or more; writes out/prices.png
    python -m tools.prices --files=assets/frontier.json --rules=strided --out=assets/frontier.png
"""
import math

from configurator import UserError, check, script
from data import read_json
from tools import picture, print_table

# ----------------------------------------------------------------------------------------------
# Settings
files = []                              # of eval.py
rules = []                              # draw only these, such as strided; []: all
out = "out/prices.png"                  # the picture
# ----------------------------------------------------------------------------------------------

COLUMNS = {"text": ("text", ""), "model": ("model", ""), "block_len": ("block_len", ""), "decoder": ("decoder", ""),
           "passes": ("passes", ".1f"), "bits/byte": ("bpb", ".3f"), "+-": ("bpb_se", ".3f"),
           "difference": ("more", "+.3f"), "+- ": ("more_se", ".3f")}


def main():
    check(globals(), endings=dict(out=".png"))
    rows = []
    for path in files:
        for result in read_json(path).get("results", []):              # none in the JSON of another tool
            for folder, text in result["text"].items():
                about = dict(file=path, text=folder, model=result["checkpoint"], block_len=text.get("block_len"))
                rows += [dict(about, decoder=name, **found) for name, found in text.get("decoders", {}).items()]
    empty = sorted({*files} - {row["file"] for row in rows})
    if empty or not files:
        raise UserError(f"nothing to draw in --files={','.join(empty)}; name a file that eval.py --decoders wrote")
    print_table(rows, COLUMNS)

    lines, texts = {}, {row["text"] for row in rows}
    for row in rows:
        rule = row["decoder"].partition(":")[0]
        parts = [row["file"]] * (len(files) > 1) + [row["text"]] * (len(texts) > 1)
        parts += [row["model"]] + [rule] * ([rule] != rules)
        if not rules or rule in rules:
            lines.setdefault(", ".join(parts), []).append(row)
    if not lines:
        raise UserError(f"--files has no decoder of --rules={','.join(rules)}")
    title = ", decoder ".join([", ".join(sorted(t.removeprefix("data/") for t in texts)), *rules]) + " (± standard error)"
    with picture(out, title=title, ylabel="bits per byte", xlabel="tokens a step") as ax:
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter("{x:g}")
        for label, line in lines.items():
            x, y, error = zip(*((r["block_len"] / r["passes"], r["bpb"], r["bpb_se"] or math.nan) for r in line))
            ax.errorbar(x, y, error, fmt="o-", ms=3, capsize=2, label=label)


if __name__ == "__main__":
    with script("prices.py", globals()):
        main()
