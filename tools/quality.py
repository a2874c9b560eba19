"""
Text quality against generation speed, for the decoders of block models. Every model continues the same held-out prompts
with every decoder. Another block model, the judge, scores all continuations, and the real ones for comparison.

    python -m tools.quality --checkpoints=out/a,out/b --judge=out/c --data=data/web
    python -m tools.quality --draw=FILE.json            # only the table and the picture

The judge's bits per byte are an upper bound (its NELBO). They are low for good text, and for repetitive text too: read
them beside the entropy and the share of repeated 4-grams, and compare with the real continuations. No figure here tells
whether a text is true, or coherent beyond the judge's context.
"""
import json
import math

import numpy as np
import torch

import eval as evaluation
import sample
from configurator import UserError, check, check_names, configure, script, tqdm
from data import TokenData, noise_seeds, token_bytes
from decoders import Sampler
from files import check_file, load_json, misfit, read_record, write_file
from model import cast_for_inference
from paper import MODELS
from parallel import Parallel, hardware, pick_dtype, select_kernels

# ----------------------------------------------------------------------------------------------
# Settings
checkpoints = []                        # block models to compare: files, folders or hf://owner/name
judge = ""                              # the block model that scores; best one trained with another seed
data = ""                               # a prepared folder; prompts come from its validation split
decoders = ["random:1", "random:4", "random:16", "random:64",      # name:tokens_per_step, or threshold:threshold
            "confidence:4", "confidence:16", "threshold:0.9", "threshold:0.7", "first_hitting"]
n_prompts = 64                          # spread evenly over the validation text
prompt_len = 256                        # tokens of a prompt
length = 512                            # tokens of a continuation
batch_size = 64                         # prompts continued at the same time
mc = 8                                  # noise samples per text, for the judge
seed = 1337                             # of all draws
out = "out/quality.json"                # the results; the picture gets the same name with .png
draw = ""                               # a results file: only print and draw it
device = "auto"                         # auto, cpu or cuda
dtype = "auto"                          # auto: bfloat16 if the GPU has it, else float32

NUMBER = (int, float)
FIGURES = {"model": str, "decoder": str, "bpb": NUMBER, "bpb_se": NUMBER, "entropy": NUMBER, "repeated": NUMBER}
RESULTS = {"rows": lambda rows: rows and not misfit(rows[:1], [FIGURES]) and not misfit(       # the form of the JSON
               rows[1:], [{**FIGURES, "tok_per_s": lambda x: isinstance(x, NUMBER) and x > 0}]),
           "settings": {"batch_size": int, "prompts": int}}
COLUMNS = dict(model="", decoder="", tok_per_s=",.0f", passes=".1f", bpb=".3f", bpb_se=".3f", entropy=".3f",
               repeated=".4f")


def make_sampler(decoder, rows, mask_id):
    """The Sampler of a decoder such as "random:16". rows: row numbers, which determine the seeds."""
    name, _, value = decoder.partition(":")
    try:
        how = dict(threshold=float(value)) if name == "threshold" else dict(tokens_per_step=int(value or 16))
        return Sampler(noise_seeds(seed, rows), name, mask_id=mask_id, **how)
    except ValueError as error:
        raise UserError(f"decoder '{decoder}': {error}; write name:number, as in random:16") from None


def repeated(tokens):
    """The share of 4-grams that occurred before in the same text."""
    grams = [tuple(tokens[i:i + 4]) for i in range(len(tokens) - 3)]
    return 1 - len(set(grams)) / len(grams)


def entropy(tokens):
    """The entropy of a text's token frequencies, in nats."""
    frequency = np.unique(tokens, return_counts=True)[1] / len(tokens)
    return float(-(frequency * np.log(frequency)).sum())


def figures(texts, windows, judge_model, sizes, parallel):
    """Bits per byte, entropy and repetition of texts (n, length), which continue the prompts at the start of windows
    (n, prompt_len + length)."""
    pairs = [[pair] for pair in zip(windows[:, :prompt_len].tolist(), texts.tolist())]
    nats = evaluation.score_answers(judge_model, pairs, parallel, "nelbo", seed, mc,
                                    8 * judge_model.config.seq_len, "judge")[:, 0]
    bpb, bpb_se = evaluation.ratio(nats / math.log(2), sizes[texts].sum(1).astype(float))
    return dict(bpb=bpb, bpb_se=bpb_se, repeated=float(np.mean([repeated(text) for text in texts.tolist()])),
                entropy=float(np.mean([entropy(text) for text in texts])))


def continued(engine, decoder, windows):
    """Continues all prompts with one decoder. Returns texts (n, length), tokens/s of a whole batch, and forward passes
    per block. The engines on a GPU commit a block in the same pass as the next step; the simple one in a pass of its
    own."""
    model, new_engine = engine
    texts, seconds, passes = [], 0.0, []
    for rows in evaluation.batches(range(len(windows)), batch_size):
        starts = list(windows[list(rows), :prompt_len])
        # The first batch runs twice: the first run compiles and records graphs, and only the second one is timed.
        for _ in range(1 if texts else 2):
            sampler = make_sampler(decoder, rows, model.config.mask_id)
            done = sample.generate(model, starts, length, sampler, new_engine)
        texts.append(torch.stack(done.tokens)[:, prompt_len:].cpu())
        seconds += done.seconds
        l = model.config.block_len
        passes.append(done.forward_passes / (-(-(prompt_len % l + length) // l)))
    return torch.cat(texts).numpy(), len(windows) * length / seconds, float(np.mean(passes))


def compare():
    """Runs all models with all decoders. Returns what main writes as JSON."""
    parallel = Parallel(device)
    dev, rows = parallel.device, []
    line, half = select_kernels("auto", dev), pick_dtype(dtype, parallel.device)
    judge_model, tokenizer, about_judge = evaluation.open_checkpoint(judge, dev)
    judge_model, sizes = cast_for_inference(judge_model, half), token_bytes(tokenizer.name)
    val = TokenData(data or about_judge["data"], "val", tokenizer.name)
    windows = val.sequences(prompt_len + length, n_prompts)
    if len(windows) < n_prompts:
        raise UserError(f"the validation text has {len(windows)} pieces of {prompt_len + length} tokens, n_prompts "
                        f"is {n_prompts}; lower n_prompts")
    opened = [(path, *evaluation.open_checkpoint(path, dev)) for path in checkpoints]
    for path, model, theirs, _ in [*opened, (judge, judge_model, tokenizer, None)]:
        if model.config.full_sequence:
            raise UserError(f"{path} must be a block model, but is a full-sequence model; name another")
        if theirs.name != tokenizer.name:
            raise UserError(f"{path} has {theirs.name} tokens and the judge {tokenizer.name} tokens; name another")
    kinds = [about["model"] for *_, about in opened]
    for decoder in decoders:                            # a wrong name fails here, before any work
        make_sampler(decoder, [0], 0)
    rows.append(dict(model="real text", decoder="", **figures(
        windows[:, prompt_len:].numpy(), windows, judge_model, sizes, parallel)))
    with tqdm(total=len(opened) * len(decoders), desc="decoders") as bar:
        for path, model, _, about in opened:
            engine = sample.open_engine("auto", model, half)
            name = about["model"] if kinds.count(about["model"]) == 1 else path     # two of a kind: by their paths
            for decoder in decoders:
                texts, speed, passes = continued(engine, decoder, windows)
                rows.append(dict(model=name, checkpoint=about["checkpoint"], decoder=decoder, tok_per_s=speed,
                                 passes=passes, **figures(texts, windows, judge_model, sizes, parallel),
                                 sample=tokenizer.decode(texts[0].tolist())))
                bar.update(1)
    return dict(rows=rows, judge=about_judge, kernels=line, hardware=hardware(dev), settings=dict(
        prompts=n_prompts, prompt_len=prompt_len, length=length, batch_size=batch_size, mc=mc, seed=seed))


def show(rows):
    evaluation.print_table([(name, [format(row[name], form) if row.get(name) is not None else "" for row in rows])
                            for name, form in COLUMNS.items()])


def picture(record, path):
    """Bits per byte under the judge against tokens/s; the dashed line is the real text."""
    from matplotlib.figure import Figure
    fig = Figure(figsize=(7.5, 4.6))
    ax = fig.subplots()
    real, *rows = record["rows"]
    for i, name in enumerate(dict.fromkeys(row["model"] for row in rows)):
        mine = [row for row in rows if row["model"] == name]
        label, colour = MODELS.get(max((k for k in MODELS if name.startswith(k)), key=len, default=""), (name, f"C{i}"))
        ax.errorbar([row["tok_per_s"] for row in mine], [row["bpb"] for row in mine],
                    yerr=[row["bpb_se"] for row in mine], fmt="o", ms=4, capsize=2, color=colour, label=label)
        places = []                                     # points that coincide share a label
        for row in mine:
            near = [same for same in places if abs(same[0]["bpb"] - row["bpb"]) < row["bpb_se"]
                    and abs(math.log10(same[0]["tok_per_s"] / row["tok_per_s"])) < 0.05]
            if near:
                near[0].append(row)
            else:
                places.append([row])
        for same in places:                             # above and right, or below and left, of the error bar
            side = -1 if i % 2 else 1
            ax.annotate("\n".join(row["decoder"] for row in same),
                        (same[0]["tok_per_s"], same[0]["bpb"] + side * same[0]["bpb_se"]), (-4 * side, 3 * side),
                        textcoords="offset points", fontsize=7, color=colour, ha="right" if i % 2 else "left",
                        va="top" if i % 2 else "bottom", bbox=dict(fc="white", ec="none", pad=0.5), zorder=3)
    ax.axhline(real["bpb"], color="0.5", ls="--", lw=1)
    ax.annotate("real text", (0.01, real["bpb"]), (0, 3), xycoords=("axes fraction", "data"),
                textcoords="offset points", color="0.4", fontsize=8)
    ax.set_xscale("log")
    ax.margins(0.15, 0.1)
    ax.set(xlabel=f"tokens/s, {min(record['settings'][key] for key in ('batch_size', 'prompts'))} rows in a batch",
           ylabel="bits per byte under the judge")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=8)
    fig.tight_layout()
    fig.savefig(path, dpi=130)


def main():
    check(globals(), least=dict(n_prompts=2, prompt_len=1, length=8, batch_size=1, mc=1, seed=0),
          choices=dict(dtype=("auto", "float32", "bfloat16")))
    check_names(globals(), "checkpoints", "decoders")
    if not (draw or out):
        raise UserError("out is empty; name a file, such as --out=out/quality.json")
    png = f"{(draw or out).removesuffix('.json')}.png"
    check_file("out", png, rb"\x89PNG", [draw])
    if draw:
        record = read_record(draw, load_json, RESULTS, "a file that quality.py wrote", "name another")
    elif not (checkpoints and decoders and judge):
        raise UserError("there is nothing to compare; give --checkpoints=out/a,out/b and --judge=out/c")
    else:
        check_file("out", out)
        record = compare()
        write_file(out, json.dumps(record, indent=1))
    show(record["rows"])
    picture(record, png)
    print(f"wrote {png}")


if __name__ == "__main__":
    with script("quality.py"):
        configure(globals())
        main()
