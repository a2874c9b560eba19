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
from tqdm import tqdm

from configurator import UserError, check, configure, script, write_file
from data import TokenData, batches, token_bytes
from decoders import AS_SURE, Sampler
from eval import ratio
from nelbo import noise_generators, noise_seeds, sequence_nelbo
from paper import MODELS, kind_of
from parallel import hardware, pick_device, pick_dtype, select_kernels
from checkpoint import open_checkpoint
from sample import generate, open_engine
from tools import picture, print_table

# ----------------------------------------------------------------------------------------------
# Settings
checkpoints = []                        # block models to compare: files, folders or hf://owner/name
judge = ""                              # the block model that scores; best one trained with another seed
data = ""                               # a prepared folder; prompts come from its validation split
decoders = ["random:1", "random:4", "random:16", "random:64",      # name:tokens_per_step, or threshold:threshold
            "confidence:4", "confidence:16", "threshold:0.9", "threshold:0.7", "first_hitting"]
n_prompts = 64                          # spread evenly over the validation text, continued at the same time
prompt_len = 256                        # tokens of a prompt
length = 512                            # tokens of a continuation; whole blocks of the judge with the prompt
mc = 8                                  # noise samples per text, for the judge
seed = 1337                             # of all draws
out = "out/quality.json"                # the results; the picture gets the same name with .png
draw = ""                               # a results file: only print and draw it
device = "auto"                         # auto, cpu or cuda
# ----------------------------------------------------------------------------------------------

COLUMNS = {"model": ("model", ""), "block_len": ("block_len", ""), "decoder": ("decoder", ""),
           "tokens/s": ("tok_per_s", ",.0f"), "passes": ("passes", ".1f"), "bits/byte": ("bpb", ".3f"),
           "+-": ("bpb_se", ".3f"), "entropy": ("entropy", ".3f"), "repeated": ("repeated", ".4f")}


def make_sampler(decoder, mask_id):
    """The Sampler of a decoder such as "random:16". The number of a row determines its seed."""
    name, _, value = decoder.partition(":")
    try:
        how = {name: float(value)} if name in AS_SURE else dict(tokens_per_step=int(value or 16))
        return Sampler(noise_seeds(seed, range(n_prompts)), name, mask_id=mask_id, **how)
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


def answer_nelbo(model, windows):
    """The NELBO in nats of the tokens after the prompt, given the prompt, of windows (n, prompt_len + length): float64
    (n,). The prompt is never masked. Noise levels are stratified over the samples."""
    nats, use_bf16 = np.zeros(len(windows)), pick_dtype("auto", model.embed.weight.device) == torch.bfloat16
    for rows in batches(range(len(windows)), 8):
        x0 = windows[list(rows)].to(model.embed.weight.device)
        for j in range(mc):
            t, is_masked = model.draw_noise(x0, noise_generators(seed, [j * 2 ** 32 + row for row in rows]), (j, mc))
            is_masked[:, :prompt_len] = False
            with torch.autocast(x0.device.type, torch.bfloat16, enabled=use_bf16):
                nats[rows] += sequence_nelbo(model, x0, is_masked, t)[:, 0].numpy() / mc
    return nats


def figures(texts, windows, model, sizes):
    """Bits per byte under the judge, entropy and repetition of texts (n, length), which continue the prompts at the
    start of windows (n, prompt_len + length). sizes: the bytes of each token."""
    nats = answer_nelbo(model, torch.cat([windows[:, :prompt_len], texts], 1))
    bpb, bpb_se = ratio(nats / math.log(2), sizes[texts.numpy()].sum(1))
    return dict(bpb=bpb, bpb_se=bpb_se, repeated=float(np.mean([repeated(text) for text in texts.tolist()])),
                entropy=float(np.mean([entropy(text) for text in texts.numpy()])))


def continued(engine, decoder, windows):
    """Continues all prompts with one decoder. Returns texts (n, length), and a dict of tokens/s and forward passes per
    block. The engines on a GPU commit a block in the same pass as the next step; the simple one in a pass of its
    own."""
    model, new_engine = engine
    for _ in range(1 if pick_device(device) == "cpu" else 2):      # on a GPU the first run compiles; the second counts
        sampler = make_sampler(decoder, model.config.mask_id)
        done = generate(model, list(windows[:, :prompt_len]), length, sampler, new_engine)
    l = model.config.block_len
    passes = done.forward_passes / -(-(prompt_len % l + length) // l)
    return torch.stack(done.tokens)[:, prompt_len:], dict(tok_per_s=n_prompts * length / done.seconds, passes=passes)


def compare():
    """Runs all models with all decoders. Returns what main writes as JSON."""
    dev = torch.device(pick_device(device))
    line, half = select_kernels("auto", dev), pick_dtype("auto", dev)
    judge_model, tokenizer, _, record = open_checkpoint(judge, dev)
    val = TokenData(data or record["settings"]["data"], "val", tokenizer.name)
    windows = val.sequences(prompt_len + length, n_prompts)                    # (n, prompt_len + length)
    if len(windows) < n_prompts:
        raise UserError(f"the validation text has only {len(windows)} pieces of {prompt_len + length} tokens; lower "
                        f"n_prompts")
    opened = [(path, *open_checkpoint(path, dev)) for path in checkpoints]
    for path, model, theirs, *_ in [*opened, (judge, judge_model, tokenizer)]:
        if model.config.full_sequence or theirs.name != tokenizer.name:
            raise UserError(f"{path} must be a block model of {tokenizer.name} tokens, as the judge is; name another")
    sizes = token_bytes(tokenizer.name)
    real = figures(windows[:, prompt_len:], windows, judge_model, sizes)
    rows = [dict(model="real text", block_len="", decoder="", **real)]
    for path, model, *_ in opened:
        c, engine = model.config, open_engine("auto", model, half)
        for decoder in tqdm(decoders, path):
            texts, speed = continued(engine, decoder, windows)
            rows.append(dict(model=kind_of(c.hybrid, c.full_sequence), block_len=c.block_len, checkpoint=path,
                             decoder=decoder, **speed, **figures(texts, windows, judge_model, sizes),
                             sample=tokenizer.decode(texts[0].tolist())))
    return dict(rows=rows, judge=judge, kernels=line, hardware=hardware(dev), settings=dict(
        prompts=n_prompts, prompt_len=prompt_len, length=length, batch_size=n_prompts, mc=mc, seed=seed))


def draw_points(record, ax):
    """Bits per byte under the judge against tokens/s; the dashed line is the real text."""
    real, *rows = record["rows"]
    for i, (model, block_len) in enumerate(dict.fromkeys((row["model"], row["block_len"]) for row in rows)):
        (label, colour), style = MODELS[model], ("o-", "s--", "D:", "^-.")[i % 4]
        mine = [row for row in rows if (row["model"], row["block_len"]) == (model, block_len)]
        x, y, se = zip(*((row["tok_per_s"], row["bpb"], row["bpb_se"]) for row in mine))
        ax.errorbar(x, y, yerr=se, fmt=style, ms=4, lw=0.8, capsize=2, color=colour,
                    label=f"{label}, blocks of {block_len}")
        for row in mine:
            ax.annotate(row["decoder"], (row["tok_per_s"], row["bpb"]), (-6, 3) if i % 2 else (6, -3), fontsize=7,
                        textcoords="offset points", color=colour, ha="right" if i % 2 else "left",
                        va="bottom" if i % 2 else "top")
    ax.axhline(real["bpb"], color="0.5", ls="--", lw=1, label="real text")
    ax.margins(0.15, 0.1)


def main():
    check(globals(), least=dict(n_prompts=2, prompt_len=1, length=8, mc=1, seed=0), endings=dict(out=".json", draw=".json"))
    if draw:
        with open(draw) as f:
            record = json.load(f)
    elif not (checkpoints and judge):
        raise UserError("there is nothing to compare; give --checkpoints=out/a,out/b and --judge=out/c")
    else:
        record = compare()
        write_file(out, json.dumps(record, indent=1))
    print_table(record["rows"], COLUMNS)
    with picture((draw or out).removesuffix("json") + "png", xscale="log", ylabel="bits per byte under the judge",
                 xlabel=f"tokens/s, {record['settings']['prompts']} rows in a batch") as ax:
        draw_points(record, ax)


if __name__ == "__main__":
    with script("quality.py"):
        configure(globals())
        main()
