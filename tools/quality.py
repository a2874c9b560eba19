"""
What likelihood does not see in samples, beside real text, and the speed of generation. Every model continues the same
held-out prompts with every decoder at several temperatures.

    python -m tools.quality --checkpoints=out/a,out/b --data=data/web

Low temperatures repeat, high ones write noise: so compare lines over temperatures with the point of the real
continuations. `python eval.py --decoders` gives the likelihood. Neither tells whether a text is true.
"""
import itertools
import json

import numpy as np
import torch
from tqdm import tqdm

from checkpoint import open_checkpoint
from configurator import UserError, check, script, settings_of, write_file
from data import TokenData
from decoders import sampler_of
from nelbo import noise_seeds
from parallel import hardware, pick_device, pick_dtype, select_kernels
from sample import generate, open_engine
from tools import picture, print_table

# ----------------------------------------------------------------------------------------------
# Settings
checkpoints = []                        # models to compare: files, folders or hf://owner/name
data = ""                               # a prepared folder; prompts come from its validation split
decoders = ["random:1", "random:4", "strided:1", "strided:4", "confidence:4", "threshold:0.9"]     # see eval.py
temperatures = [0.6, 0.8, 1.0]
n_prompts = 64                          # spread evenly over the validation text, continued at the same time
prompt_len = 256                        # tokens of a prompt
length = 512                            # tokens of a continuation
seed = 1337                             # of all draws
out = "out/quality.json"                # the results; the picture gets the same name with .png
device = "auto"                         # auto, cpu or cuda
# ----------------------------------------------------------------------------------------------

COLUMNS = {"model": ("model", ""), "block_len": ("block_len", ""), "decoder": ("decoder", ""),
           "temperature": ("temperature", ""), "tokens/s": ("tok_per_s", ",.0f"),
           "tokens/pass": ("tok_per_pass", ".2f"), "entropy": ("entropy", ".3f"),
           "repeated": ("repeated", ".4f"), "UTF-8": ("utf8", ".4f")}


def repeated(tokens):
    """The share of 4-grams that occurred before in the same text."""
    grams = [tuple(tokens[i:i + 4]) for i in range(len(tokens) - 3)]
    return 1 - len(set(grams)) / len(grams)


def entropy(tokens):
    """The entropy of a text's token frequencies, in nats."""
    frequency = np.unique(tokens, return_counts=True)[1] / len(tokens)
    return float(-(frequency * np.log(frequency)).sum())


def utf8(text):
    """The share of bytes that belong to whole characters."""
    return len(text.decode(errors="ignore").encode()) / len(text)


def figures(texts, tokenizer):
    """The means of the three over texts (n, length)."""
    found = [(entropy(text), repeated(text), utf8(tokenizer.decode_bytes(text))) for text in texts.tolist()]
    return dict(zip(("entropy", "repeated", "utf8"), np.mean(found, 0).tolist()))


def continued(engine, prompts, decoder, temperature):
    """Continues all prompts (n, prompt_len). Returns texts (n, length), and a dict of tokens/s of all rows and tokens
    per forward pass of each row. The engines on a GPU commit a block in the same pass as the next step; the simple one
    in a pass of its own."""
    model, new_engine = engine
    sampler = sampler_of(decoder, seeds=noise_seeds(seed, range(len(prompts))), mask_id=model.config.mask_id,
                         temperature=temperature)
    for _ in range(1 if pick_device(device) == "cpu" else 2):      # on a GPU the first run compiles; the second counts
        done = generate(model, list(prompts), length, sampler, new_engine)
    return torch.stack(done.tokens)[:, prompt_len:], dict(tok_per_s=len(prompts) * length / done.seconds,
                                                          tok_per_pass=length / done.forward_passes)


def compare():
    """Runs all models with all decoders. Returns what main writes as JSON. Raises UserError if none is given."""
    if not (checkpoints and data):
        raise UserError("there is nothing to compare; give --checkpoints=out/a,out/b and --data=data/mine")
    dev, rows = torch.device(pick_device(device)), []
    line, half = select_kernels("auto", dev), pick_dtype("auto", dev)
    for path in checkpoints:
        model, tokenizer, *_ = open_checkpoint(path, dev)
        windows = TokenData(data, "val", tokenizer.name).sequences(prompt_len + length, n_prompts)
        prompts, real = windows.split([prompt_len, length], 1)                 # (n, prompt_len), (n, length)
        about, engine = dict(model=path, block_len=model.config.block_len), open_engine("auto", model, half)
        rows.append(dict(about, decoder="real text", **figures(real, tokenizer)))
        for decoder, temperature in tqdm([*itertools.product(decoders, temperatures)], path):
            texts, speed = continued(engine, prompts, decoder, temperature)
            rows.append(dict(about, decoder=decoder, temperature=temperature, **speed, **figures(texts, tokenizer),
                             sample=tokenizer.decode(texts[0].tolist())))
    return dict(rows=rows, kernels=line, hardware=hardware(dev), settings=settings_of(globals()))


def main():
    check(globals(), least=dict(n_prompts=1, prompt_len=1, length=8, seed=0), endings=dict(out=".json"))
    record = compare()
    write_file(out, json.dumps(record, indent=1))
    print_table(record["rows"], COLUMNS)
    # A line over temperatures for each model and decoder; a cross is real text.
    with picture(out and out.removesuffix("json") + "png", xlabel="entropy, nats", ylabel="repeated 4-grams") as ax:
        for (model, decoder), points in itertools.groupby(record["rows"], lambda row: (row["model"], row["decoder"])):
            x, y = zip(*((row["entropy"], row["repeated"]) for row in points))
            ax.plot(x, y, "kx" if decoder == "real text" else ".-", label=f"{model}, {decoder}")


if __name__ == "__main__":
    with script("quality.py", globals()):
        main()
