"""
Evaluates checkpoints: NELBO perplexity, bits per byte and masked-token accuracy (eq. nelbo-ppl-background), each with
its standard error. Question sets are in questions.py.

    python eval.py                                                      # out/ckpt.pt or, without it, the model that ships
    python eval.py --checkpoint out/a,out/b --data data/c4,data/paloma  # one line for each pair; JSON comes last
    python eval.py --checkpoint out/a --tasks hellaswag,piqa            # pip install lm_eval==0.4.13

train.py's validation takes fewer sequences and more noise: `--sequences=64 --mc=2` gives its last number.
"""
import functools
import hashlib
import json
import math
import os
import sys
from pathlib import Path

import numpy as np
import torch

from checkpoint import open_checkpoint
from configurator import ROOT, check, configure, script, settings_of, write_file
from data import TokenData, bits_per_byte, prepare_stdlib
from model import cast_for_inference
from nelbo import NATS, gather, nelbo_sums
from parallel import Parallel, hardware, pick_dtype, select_kernels
from questions import evaluate_tasks

# ----------------------------------------------------------------------------------------------
# Settings
checkpoint = ["auto"]                   # files, folders (out_dir) or hf://owner/name, with commas between; see sample.py
# text
data = []                               # prepared folders (dataset, in nanoGPT); []: that of the training, none for tasks
sequences = 256                         # how many sequences, spread evenly over the validation split; 0: all
seq_len = 0                             # tokens of a sequence; 0: as in training, 8192 in the paper
mc = 1                                  # noise (Monte Carlo) samples per sequence
stratified = False                      # sample j draws t from the j-th of mc equal parts of its range
# question sets, see questions.py
tasks = []                              # of lm-evaluation-harness, such as hellaswag,piqa
include_path = ""                       # a folder with task files of your own
limit = 0                               # questions per task, the first ones; 0: all
# system
batch_size = 8                          # sequences at a time; questions: batch_size * the model's seq_len tokens
seed = 1337                             # of all noise
out = ""                                # also write the JSON to this file
device = "auto"                         # auto, cpu, cuda or mps
dtype = "auto"                          # auto: bfloat16 if the GPU has it, else float32; logits are fp32
kernels = "auto"                        # auto; torch: the plain operations; mamba_ssm: those of that package
# ----------------------------------------------------------------------------------------------


def ratio(numerator, denominator):
    """sum(numerator) / sum(denominator) of arrays (n,), and its standard error over the n entries by the delta method.
    The value is nan if the denominators sum to 0, the error is nan if n is 1."""
    n, total = len(numerator), denominator.sum()
    value = numerator.sum() / total if total else math.nan
    squares = np.square(numerator - value * denominator).sum()
    return value, math.sqrt(n / (n - 1) * squares) / total if n > 1 and total else math.nan


def nelbo_figures(sums, tokens, n_bytes):
    """
    The figures of a text, a dict, from sums (n, mc, 3) of nelbo.nelbo_sums and the sequences' numbers of tokens and
    of bytes, each (n,).

    `nats` is the NELBO of every sequence, for paired comparisons; `nelbo` is in nats per token. `nelbo_se` is its
    standard error from text and noise, `nelbo_se_noise` that from noise alone. The latter needs mc >= 2. With
    stratified noise it is an upper bound, because the strata differ.
    """
    nats, masked, right = sums.mean(1).T                                       # (n,) each, means over noise samples
    nelbo, se = ratio(nats, tokens)
    acc, acc_se = ratio(right, masked)
    n, mc, _ = sums.shape
    var = sums[..., NATS].var(1, ddof=1).sum() / mc if mc > 1 else math.nan    # variance of nats.sum() from noise alone
    ppl = math.exp(min(nelbo, 700))                     # beyond 709, exp overflows
    return dict(nats=nats.round(3).tolist(), nelbo=nelbo, nelbo_se=se, nelbo_se_noise=math.sqrt(var) / tokens.sum(),
                ppl=ppl, ppl_se=ppl * se, acc=100 * acc, acc_se=100 * acc_se,
                bpb=bits_per_byte(nelbo, tokens.sum(), n_bytes.sum()),
                bpb_se=ratio(nats, n_bytes)[1] / math.log(2), sequences=n, samples=mc, tokens=int(tokens.sum()),
                bytes=int(n_bytes.sum()))


def evaluate_text(model, tokenizer, folder, parallel, autocast):
    """NELBO, perplexity, bits per byte and masked-token accuracy on the validation split of a prepared folder, a
    dict. Prints the main ones. A collective."""
    text, s = TokenData(folder, "val", tokenizer.name), seq_len or model.config.seq_len
    x = text.sequences(s, sequences)                                           # (n, s)
    sums = gather(parallel, nelbo_sums(model, x, parallel, autocast, seed, mc, stratified, batch_size))
    r = nelbo_figures(sums, np.full(len(x), s), text.sequence_bytes(s, sequences).numpy())
    print(f"{folder}: perplexity {r['ppl']:.2f} +- {r['ppl_se']:.2f}, {r['bpb']:.4f} +- {r['bpb_se']:.4f} bits a byte, "
          f"accuracy {r['acc']:.2f} +- {r['acc_se']:.2f} %, NELBO {r['nelbo']:.4f} +- {r['nelbo_se']:.4f}", flush=True)
    return dict(r, seq_len=s, sha256=hashlib.sha256(x.numpy()).hexdigest())


# ----------------------------------------------------------------------------------------------
# The script

def evaluate(path, parallel, use_bf16):
    """Evaluates one checkpoint on all that the settings ask for. Returns a dict. A collective."""
    autocast = functools.partial(torch.autocast, parallel.device.type, torch.bfloat16, enabled=use_bf16)
    model, tokenizer, path, record = open_checkpoint(path, parallel.device)
    trained, step = record.get("settings", {}), record.get("step")
    print(f"{path}: {model.n_params:,} parameters, step {step}, {tokenizer.name} tokens", flush=True)
    folders = data or ([] if tasks else trained.get("data", "data/stdlib").split(","))
    if not data and ROOT / "assets" in Path(path).parents and not all(map(os.path.exists, folders)):
        print(f"{folders[0]}, the text of its training, is not here: this is of Python's own source, data/stdlib")
        folders = ["data/stdlib"]
        if parallel.rank == 0:
            prepare_stdlib()
        parallel.barrier()
    texts = {folder: evaluate_text(model, tokenizer, folder, parallel, autocast) for folder in folders}
    # Text has run like train.py's validation: fp32 weights under autocast. Questions run like sample.py: weights are
    # cast, and the cache has their dtype.
    cast_for_inference(model, torch.bfloat16 if use_bf16 else torch.float32)
    answers = evaluate_tasks(model, tokenizer, parallel, tasks, include_path, limit, batch_size) if tasks else {}
    return dict(checkpoint=path, parameters=model.n_params, step=step, trained=trained, text=texts, tasks=answers)


def main():
    check(globals(), least=dict(sequences=0, mc=1, batch_size=1, seq_len=0, limit=0, seed=0),
          choices=dict(dtype=("auto", "float32", "bfloat16")), endings=dict(out=".json"))
    parallel, results = Parallel(device), []
    if parallel.rank > 0:
        sys.stdout = open(os.devnull, "w")              # rank 0 prints for all
    dev, weight_dtype = parallel.device, pick_dtype(dtype, parallel.device)
    machine = dict(hardware(dev), ranks=parallel.world, dtype=str(weight_dtype), kernels=select_kernels(kernels, dev))
    print(", ".join(f"{key} {value}" for key, value in machine.items()), flush=True)
    for path in map(str, checkpoint):
        results.append(evaluate(path, parallel, weight_dtype == torch.bfloat16))
        record = json.dumps(dict(settings=settings_of(globals()), hardware=machine, results=results), default=str)
        record = record.replace(": NaN", ": null")      # JSON knows no NaN
        # After each checkpoint: an error in the next one loses nothing. Rank 0 writes for all.
        write_file("" if parallel.rank else out, record + "\n")
    print(record)
    parallel.close()


if __name__ == "__main__":
    with script("eval.py"):
        configure(globals())
        main()
