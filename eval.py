"""
Evaluates checkpoints: NELBO perplexity, bits per byte and masked-token accuracy (eq. nelbo-ppl-background), each with
its standard error; and the price of decoders on real text. Question sets are in tools/questions.py.

    python eval.py                                                      # out/ckpt.pt, else the model that ships
    python eval.py --checkpoint out/a,out/b --data data/c4,data/paloma  # one line for each pair; JSON comes last
    python eval.py --decoders=random:1,random:4,strided:4,threshold:0.9 # bits per byte and passes per block of each
    python eval.py --checkpoint out/a --tasks hellaswag,piqa            # pip install lm_eval==0.4.13

train.py's validation takes other sequences and noise: its eval_sequences, eval_samples and seed, as --sequences, --mc
and --seed, give its last number, if it has one folder of data.
"""
import functools
import hashlib
import json
import math
import os
from pathlib import Path

import numpy as np
import torch

from checkpoint import open_checkpoint
from configurator import ROOT, check, script, settings_of, write_file
from data import TokenData, batches, bits_per_byte, prepare_stdlib
from decoders import DRAWN_ORDER, ActiveBlock, sampler_of
from model import cast_for_inference
from nelbo import NATS, masked_cross_entropy, nelbo_sums, noise_seeds, sum_over_ranks
from parallel import Parallel, end_if_a_rank_is_lost, hardware, pick_dtype, progress, select_kernels

# ----------------------------------------------------------------------------------------------
# Settings
checkpoint = ["auto"]                   # files, folders (out_dir) or hf://owner/name, with commas; see sample.py
# text
data = []                               # prepared folders (dataset in nanoGPT); []: that of training, none for tasks
sequences = -1                          # how many, spread evenly; 0: all; -1: 256, or for decoders 4,096 tokens
seq_len = 0                             # tokens of a sequence; 0: as in training, 8192 in the paper
mc = 1                                  # noise (Monte Carlo) samples per sequence
stratified = False                      # sample j draws t from the j-th of mc equal parts of its range
decoders = []                           # the price of these in place of perplexity, such as random:4,threshold:0.9
# question sets, see tools/questions.py
tasks = []                              # of lm-evaluation-harness, such as hellaswag,piqa
include_path = ""                       # a folder with task files of your own
limit = 0                               # questions per task, the first ones; 0: all
# system
batch_size = 8                          # sequences at a time; questions: batch_size * the model's seq_len tokens
seed = 1337                             # of all noise
out = ""                                # also write the JSON to this file
device = "auto"                         # auto, cpu, cuda or mps (not for decoders)
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
    nats, masked, hits = sums.mean(1).T                                        # (n,) each, means over noise samples
    nelbo, se = ratio(nats, tokens)
    acc, acc_se = ratio(hits, masked)
    n, mc, _ = sums.shape
    # The variance of nats.sum() from noise alone: that of a mean over mc samples, added up over the sequences.
    var = sums[..., NATS].var(1, ddof=1).sum() / mc if mc > 1 else math.nan
    ppl = math.exp(min(nelbo, 700))                     # beyond 709, exp overflows
    return dict(nats=nats.round(3).tolist(), nelbo=nelbo, nelbo_se=se, nelbo_se_noise=math.sqrt(var) / tokens.sum(),
                ppl=ppl, ppl_se=ppl * se, acc=100 * acc, acc_se=100 * acc_se, sequences=n, samples=mc,
                bpb=bits_per_byte(nelbo, tokens.sum(), n_bytes.sum()), bpb_se=ratio(nats, n_bytes)[1] / math.log(2),
                tokens=int(tokens.sum()), bytes=int(n_bytes.sum()))


def windows_of(model, tokenizer, folder):
    """The sequences (n, s) that the settings ask for of a prepared folder, their bytes (n,), and a dict that
    identifies them (length, sha256)."""
    text, s = TokenData(folder, "val", tokenizer.name), seq_len or model.config.seq_len
    count = sequences if sequences >= 0 else (max(2, 4096 // s) if decoders else 256)      # 2: for a standard error
    x = text.sequences(s, count)
    return x, text.sequence_bytes(s, count).numpy(), dict(seq_len=s, sha256=hashlib.sha256(x.numpy()).hexdigest())


def evaluate_text(model, tokenizer, folder, parallel, autocast):
    """NELBO, perplexity, bits per byte and masked-token accuracy on the validation split of a prepared folder, a
    dict. Prints the main ones. A collective."""
    x, n_bytes, about = windows_of(model, tokenizer, folder)
    sums = sum_over_ranks(parallel, nelbo_sums(model, x, parallel, autocast, seed, mc, stratified, batch_size))
    r = nelbo_figures(sums, np.full(len(x), x.size(1)), n_bytes)
    print(f"{folder}: perplexity {r['ppl']:.2f} +- {r['ppl_se']:.2f}, {r['bpb']:.4f} +- {r['bpb_se']:.4f} bits a byte, "
          f"accuracy {r['acc']:.2f} +- {r['acc_se']:.2f} %, NELBO {r['nelbo']:.4f} +- {r['nelbo_se']:.4f}", flush=True)
    return r | about


# ----------------------------------------------------------------------------------------------
# The price of a decoder: -log p of real text, where p is the distribution of what it writes at temperature 1

@torch.no_grad()
def price(model, x0, sampler, bar):
    """
    The price of sequences x0 (b, s) in nats and the passes that a block takes: (2, b) fp64. All blocks of a sequence
    advance together, each after its clean prefix. A step writes the true tokens where the decoder reveals. sampler: of
    b * n_blocks rows, one for each block.

    Where a step's positions follow from the known tokens, p of the text is exact: the product of p over all steps.
    `random` and `first_hitting` draw the positions. Then the price is a bound, the mean of -log p over the orders.
    A step that reveals n of m masked tokens costs the -log p of these n. They are a uniform choice, so the mean of that
    is n / m times the -log p of all m, which is added in its place: the same mean with less noise. With one token a
    step this is the NELBO, a mean over the same orders (see BlockDiffusionLM.loss), if the model takes no t.
    """
    (b, s), (n_blocks, l) = x0.shape, model.config.split_blocks(x0.size(1))
    truth = x0.reshape(b * n_blocks, l)
    block = ActiveBlock(b * n_blocks, l, sampler, x0.device)
    block.start(torch.full_like(truth, sampler.mask_id), torch.arange(0, s, l).repeat(b))
    nats, passes = torch.zeros(2, b * n_blocks, dtype=torch.float64)
    for _ in block.steps(l):
        is_masked = block.xt == sampler.mask_id                                # (b * n_blocks, l)
        t = block.noise_level().view(b, n_blocks)
        hidden = model.all_block_hidden(x0, block.xt.view(b, s), t).view(*truth.shape, -1)     # (b * n_blocks, l, d)
        positions = block.positions(model, hidden)                             # (b * n_blocks, m)
        block.write(positions, truth.gather(1, positions))

        revealed = is_masked & (block.xt != sampler.mask_id)                   # (b * n_blocks, l)
        scored = is_masked if sampler.decoder in DRAWN_ORDER else revealed
        nll, _ = masked_cross_entropy(model, hidden[scored], truth[scored])    # of all scored tokens
        # share: n / m for drawn orders, 1 otherwise.
        row, share = scored.nonzero()[:, 0].cpu(), revealed.sum(1).cpu() / scored.sum(1).cpu().double()
        nats.index_add_(0, row, nll * share[row])
        passes += is_masked.any(1).cpu()                # a block that is finished needs no more
        bar.update(b)
    return torch.stack([nats.view(b, -1).sum(1), passes.view(b, -1).mean(1)])


def price_decoders(model, tokenizer, folder, parallel, autocast):
    """The price of text of a prepared folder for each of the setting `decoders`, a dict. Prints it. A collective."""
    (x, n_bytes, about), mask_id = windows_of(model, tokenizer, folder), model.config.mask_id
    n_blocks, l = model.config.split_blocks(x.size(1))
    # Made here, a wrong name is refused before any work. For each batch they are made again, with its seeds.
    samplers = [sampler_of(decoder, seeds=[], mask_id=mask_id) for decoder in decoders]
    found = np.zeros((len(decoders), 2, len(x)))                               # nats, and passes a block
    mine = [*range(parallel.rank, len(x), parallel.world)]
    most = sum(math.ceil(l / sampler.tokens_per_step) for sampler in samplers)             # passes
    with progress(parallel, "decoders", len(mine) * most, "pass") as bar, autocast():
        for rows in batches(mine, batch_size):
            x0, seeds = x[rows].to(parallel.device), np.repeat(noise_seeds(seed, rows), n_blocks)
            for i, decoder in enumerate(decoders):
                found[i][:, rows] = price(model, x0, sampler_of(decoder, seeds=seeds, mask_id=mask_id), bar)

    nats, passes = sum_over_ranks(parallel, found).swapaxes(0, 1)              # (decoders, n) each
    prices = {}
    for decoder, own, n_passes in zip(decoders, nats, passes.mean(1)):         # own (n,): nats of each sequence
        bpb, bpb_se = ratio(own / math.log(2), n_bytes)
        # `more` than the first decoder: differences within sequences have a smaller standard error.
        more, more_se = ratio((own - nats[0]) / math.log(2), n_bytes)
        print(f"{folder}: {decoder} {bpb:.3f} +- {bpb_se:.3f} bits a byte, {n_passes:.1f} passes a block, {more:+.3f} "
              f"+- {more_se:.3f} against {decoders[0]}", flush=True)
        prices[decoder] = dict(bpb=bpb, bpb_se=bpb_se, passes=n_passes, more=more, more_se=more_se,
                               nats=own.round(3).tolist())
    return dict(about, decoders=prices, block_len=l, bytes=n_bytes.tolist())


# ----------------------------------------------------------------------------------------------
# The script

def folders_for(path, trained, parallel):
    """
    The prepared folders on which the checkpoint at `path` is evaluated. trained: the settings of its training.
      --data is given        those
      only --tasks is given  none
      neither                those of its training. But if the checkpoint ships with the repository (in assets/) and
                             they are not all here, data/stdlib, Python's own source, which is prepared if need be
    A collective.
    """
    folders = data or ([] if tasks else trained.get("data", "data/stdlib").split(","))
    if data or ROOT / "assets" not in Path(path).resolve().parents or all(map(os.path.exists, folders)):
        return folders
    print(f"{', '.join(folders)}, the text of its training, is not here: this is of Python's own source, data/stdlib")
    if parallel.rank == 0:
        prepare_stdlib()
    return [parallel.agreed("data/stdlib")]             # once it is there


def evaluate(path, parallel, use_bf16, evaluate_tasks):
    """Evaluates one checkpoint on all that the settings ask for. Returns a dict. evaluate_tasks is the function of
    tools/questions.py. A collective."""
    autocast = functools.partial(torch.autocast, parallel.device.type, torch.bfloat16, enabled=use_bf16)
    model, tokenizer, path, record = open_checkpoint(path, parallel.device)
    trained, step = record.get("settings", {}), record.get("step")
    print(f"{path}: {model.n_params:,} parameters, step {step}, {tokenizer.name} tokens", flush=True)
    folders, measure = folders_for(path, trained, parallel), (price_decoders if decoders else evaluate_text)
    texts = {folder: measure(model, tokenizer, folder, parallel, autocast) for folder in folders}
    # Text has run like train.py's validation: fp32 weights under autocast. Questions run like sample.py: weights are
    # cast, and the cache has their dtype.
    cast_for_inference(model, torch.bfloat16 if use_bf16 else torch.float32)
    answers = evaluate_tasks(model, tokenizer, parallel, tasks, include_path, limit, batch_size) if tasks else {}
    return dict(checkpoint=path, parameters=model.n_params, step=step, trained=trained, text=texts, tasks=answers)


def main(evaluate_tasks):
    check(globals() | dict(checkpoints=len(checkpoint)), endings=dict(out=".json"),
          least=dict(checkpoints=1, sequences=-1, mc=1, batch_size=1, seq_len=0, limit=0, seed=0))
    parallel, results = Parallel(device, timeout=3600), []                     # a rank may have far less work
    dev, weight_dtype = parallel.device, pick_dtype(dtype, parallel.device)
    machine = dict(hardware(dev), ranks=parallel.world, dtype=str(weight_dtype), kernels=select_kernels(kernels, dev))
    print(", ".join(f"{key} {value}" for key, value in machine.items()), flush=True)
    for path in map(str, checkpoint):
        results.append(evaluate(path, parallel, weight_dtype == torch.bfloat16, evaluate_tasks))
        record = json.dumps(dict(settings=settings_of(globals()), hardware=machine, results=results), default=str)
        record = record.replace(": NaN", ": null")      # JSON knows no NaN
        # After each checkpoint: an error in the next one loses nothing. Rank 0 writes for all.
        write_file("" if parallel.rank else out, record + "\n")
    print(record)
    parallel.close()


if __name__ == "__main__":
    from tools.questions import evaluate_tasks
    with end_if_a_rank_is_lost("eval.py"), script("eval.py", globals()):
        main(evaluate_tasks)
