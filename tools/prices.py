"""
Prints and draws what `python eval.py --decoders` found: bits per byte against passes per block, or against tokens per
pass where block lengths differ.

    python eval.py --decoders=random:1,random:4,strided:1,strided:4 --out=out/prices.json
    python -m tools.prices --files=out/prices.json      # one or more; writes out/prices.png
"""
import json

from configurator import UserError, check, script
from tools import picture, print_table

# ----------------------------------------------------------------------------------------------
# Settings
files = []                              # of eval.py
out = "out/prices.png"                  # the picture
# ----------------------------------------------------------------------------------------------

COLUMNS = {"text": ("text", ""), "model": ("model", ""), "block_len": ("block_len", ""), "decoder": ("decoder", ""),
           "passes": ("passes", ".1f"), "bits/byte": ("bpb", ".3f"), "+-": ("bpb_se", ".3f"),
           "difference": ("more", "+.3f"), "+- ": ("more_se", ".3f")}


def main():
    check(globals(), endings=dict(out=".png"))
    rows = []
    for path in files:
        with open(path) as f:
            for result in json.load(f)["results"]:
                for folder, text in result["text"].items():
                    about = dict(text=folder, model=result["checkpoint"], block_len=text.get("block_len"))
                    rows += [dict(about, decoder=name, **found) for name, found in text.get("decoders", {}).items()]
    if not rows:
        raise UserError("nothing to draw; give --files=FILE.json, as eval.py --decoders --out=FILE.json writes it")
    print_table(rows, COLUMNS)

    lines = {}
    for row in rows:
        lines.setdefault((row["text"], row["model"], row["decoder"].partition(":")[0]), []).append(row)
    one_length = len({row["block_len"] for row in rows}) == 1
    with picture(out, ylabel="bits per byte", xlabel="passes per block" if one_length else "tokens per pass") as ax:
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter("{x:g}")
        for (folder, model, rule), line in lines.items():
            x = [row["passes"] if one_length else row["block_len"] / row["passes"] for row in line]
            ax.errorbar(x, [row["bpb"] for row in line], [row["bpb_se"] for row in line], fmt="o-", ms=3, capsize=2,
                        label=f"{folder}, {model}, {rule}")


if __name__ == "__main__":
    with script("prices.py", globals()):
        main()
