"""
Evaluates checkpoints: NELBO perplexity, bits per byte and masked-token accuracy (eq. nelbo-ppl-background), each with
its standard error, and question sets through lm-evaluation-harness.

    python eval.py                                                      # out/ckpt.pt, on its validation text
    python eval.py --checkpoint out/a,out/b --data data/c4,data/paloma  # one line for each pair; JSON comes last
    python eval.py --checkpoint out/a --tasks hellaswag,piqa            # pip install lm_eval==0.4.13
    python eval.py --tasks mine --include_path FOLDER                   # task files of your own: docs/data.md

The paper scores answers by pseudo-likelihood, without formula or prompts. Here an answer's score is its pseudo-log-
likelihood: the sum of log p(token) over its tokens. Each is masked alone; the model sees the others, the context, and
nothing after the answer. A block model sees the answer's earlier blocks clean and its later blocks not at all.
"""
import functools
import hashlib
import itertools
import json
import math
import os
import sys

import numpy as np
import torch

from checkpoint import open_checkpoint
from configurator import UserError, check, check_out, configure, need, script, settings_of, write_file
from data import TokenData, batches, bits_per_byte
from model import Cache, cast_for_inference
from nelbo import masked_cross_entropy, nelbo_sums
from parallel import Parallel, hardware, pick_dtype, progress, select_kernels

# ----------------------------------------------------------------------------------------------
# Settings
checkpoint = ["out"]                    # files, folders or hf://owner/name, separated by commas
# text
data = []                               # prepared folders; []: that of the training, but none if there are tasks
sequences = 256                         # how many sequences, spread evenly over the validation split; 0: all
seq_len = 0                             # tokens of a sequence; 0: as in training, 8192 in the paper
mc = 1                                  # noise (Monte Carlo) samples per sequence
stratified = False                      # sample j draws t from the j-th of mc equal parts of its range
# question sets
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

CHANCE = "Chance: hellaswag, arc_easy, arc_challenge 0.25; piqa, winogrande, boolq 0.5; the mean of all six 0.375."


# ----------------------------------------------------------------------------------------------
# Small pieces

def ratio(numerator, denominator):
    """sum(numerator) / sum(denominator) of arrays (n,), and its standard error over the n entries by the delta method.
    The value is nan if the denominators sum to 0, the error is nan if n is 1."""
    n, total = len(numerator), denominator.sum()
    value = numerator.sum() / total if total else math.nan
    squares = np.square(numerator - value * denominator).sum()
    return value, math.sqrt(n / (n - 1) * squares) / total if n > 1 and total else math.nan


def gather(parallel, array):
    """Joins the ranks' parts of an array: each rank's array is zero where another rank did the work, so their sum has
    everything. All ranks get it. A collective: every rank must call it. Raises UserError unless all values are
    finite."""
    array = np.array(parallel.sum(array.ravel().tolist())).reshape(array.shape)
    if not np.isfinite(array).all():
        raise UserError("the likelihoods are not finite: this checkpoint's training failed; use an earlier one")
    return array


# ----------------------------------------------------------------------------------------------
# Text

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
    var = sums[..., 0].var(1, ddof=1).sum() / mc if mc > 1 else math.nan       # variance of nats.sum() from noise alone
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
# Answers. A pair is (context, answer), two lists of tokens.

def masked_rows(model, texts, rows, budget):
    """
    Runs texts (lists of tokens) with some tokens masked. rows: [(index of a text, positions to mask, ascending)].
    Yields batches of about `budget` tokens. A batch has (index of the text, positions, their hidden states (m, d)) for
    each row. A row runs only the block of its first position: positions in later blocks are neither seen nor returned.

    The blocks before it are clean and go into the cache. What follows the text in its block stays masked, because
    nothing is known of it. A full-sequence model has one block, which is the whole text.
    """
    c = model.config

    def block_of(row):
        """(begin, length) of the block of the row's first masked position."""
        l = c.block_of(len(texts[row[0]]))
        return row[1][0] // l * l, l
    for (begin, l), group in itertools.groupby(sorted(rows, key=block_of), block_of):
        for part in batches(list(group), budget // (begin + l)):
            x = torch.full((len(part), begin + l), c.mask_id)
            masked = [[i for i in positions if i < begin + l] for _, positions in part]
            for row, (n, _), positions in zip(x, part, masked):
                row[:len(texts[n])] = torch.tensor(texts[n][:begin + l])
                row[positions] = c.mask_id
            prefix, xt = x.to(model.embed.weight.device).split([begin, l], 1)
            # Rows of one text have the same prefix, which is read once. first[j] is a row of the j-th different text in
            # `part`, and owner[i] is the j of row i.
            _, first, owner = np.unique([n for n, _ in part], return_index=True, return_inverse=True)
            cache = model.new_cache(len(first), begin, l)
            model.prefill(prefix[first], cache)
            cache = Cache([tuple(held[owner] for held in state) for state in cache.layers], cache.lengths[owner], begin)
            # The noise level is the masked fraction, as in sampling. Only timestep conditioning uses it.
            hidden = model.denoise_hidden(xt, cache, (xt == c.mask_id).float().mean(1))        # (rows, l, d)
            yield [(n, at, h[torch.tensor(at) - begin]) for (n, _), at, h in zip(part, masked, hidden)]


@torch.no_grad()
def score_pairs(model, pairs, budget, parallel):
    """
    Scores pairs. Returns float64 (2, n): the pseudo-log-likelihood of each answer in nats, see this file's docstring,
    and whether the answer is greedy, 0 or 1. A collective; the ranks share the work.

    An answer is greedy if decoding gives exactly it: its positions are decoded from the context, block by block, at
    temperature 0, the most confident token first, one a step. What follows the answer in its block is not decoded.
    """
    texts, device = [[*context, *answer] for context, answer in pairs], model.embed.weight.device
    score, greedy = np.zeros((2, len(pairs)))
    mine = range(parallel.rank, len(pairs), parallel.world)
    answers = {n: list(range(len(pairs[n][0]), len(texts[n]))) for n in mine}  # {index of a pair: positions}
    rows = [(n, [i]) for n, positions in answers.items() for i in positions]
    with progress(parallel, "answers", len(rows), "token") as bar:
        for batch in masked_rows(model, texts, rows, budget):
            target = torch.tensor([texts[n][i] for n, (i,), _ in batch], device=device)
            nats, _ = masked_cross_entropy(model, torch.cat([h for *_, h in batch]), target)   # (rows,)
            np.subtract.at(score, [n for n, *_ in batch], nats.numpy())
            bar.update(len(batch))
    # Decoding of an answer stops at the first token that differs. So whatever was decoded before equals the answer's
    # own tokens, and masked_rows can take it from `texts`. From here on `answers` holds the positions still masked.
    while answers:
        for batch in masked_rows(model, texts, list(answers.items()), budget):
            for n, positions, h in batch:
                confidence, token = model.logits(h).softmax(-1).max(-1)        # (positions,) each
                best = int(confidence.argmax())
                answers[n].remove(positions[best])
                greedy[n] = token[best] == texts[n][positions[best]]
                if not (greedy[n] and answers[n]):
                    del answers[n]
    return gather(parallel, np.stack([score, greedy]))


# ----------------------------------------------------------------------------------------------
# Question sets

def encode_question(tokenizer, texts, max_len):
    """
    Encodes the texts [(context, answer)] of one question. Returns their pairs, and the number of tokens that were cut.

    Context and answer are encoded as one string, because BPE may merge across the boundary. The tokens are split
    where the context would end if it was encoded alone, without trailing spaces: these belong to the answer. The
    same number of tokens is cut from the left of each context, so that the longest context and answer fit max_len.
    Raises UserError for an answer without a token.
    """
    pairs = []
    for context, answer in texts:
        n = len(tokenizer.encode_ordinary(context.rstrip(" ")))
        whole = tokenizer.encode_ordinary(context + answer)
        if len(whole) <= n:
            raise UserError(f"the answer {answer!r} after {context[-20:]!r} has no token of its own; correct the task")
        pairs.append((whole[:n], whole[n:]))
    room = max(0, max_len - max(len(answer) for _, answer in pairs))
    cut = max(0, max(len(context) for context, _ in pairs) - room)
    return [(context[cut:], answer) for context, answer in pairs], cut


def answer_requests(model, tokenizer, requests, parallel):
    """Answers the harness's requests for the likelihood of an answer: [(score in nats, whether it is greedy)]. The
    requests of a question are consecutive. A collective."""
    s, questions = model.config.seq_len, itertools.groupby(requests, lambda r: (r.task_name, r.doc_id))
    encoded = [encode_question(tokenizer, [r.args for r in question], s) for _, question in questions]
    print(f"{sum(cut > 0 for _, cut in encoded)} of {len(encoded)} questions were cut on the left, to fit {s} tokens")
    pairs = [pair for pairs, _ in encoded for pair in pairs]
    score, greedy = score_pairs(model, pairs, batch_size * s, parallel)
    return [*zip(score.tolist(), (greedy == 1).tolist())]


def evaluate_tasks(model, tokenizer, parallel):
    """Prints the table of lm-evaluation-harness for the setting `tasks`, and returns its figures, {task: {metric:
    value}}. A collective: the harness runs on every rank, and asks all of them the same."""
    lm_eval, api, manager, utils = (need(f"lm_eval{part}", "--tasks", "lm_eval==0.4.13")
                                    for part in ("", ".api.model", ".tasks", ".utils"))

    class Adapter(api.LM):
        """A model as the harness sees it."""

        def loglikelihood(self, requests):
            return answer_requests(model, tokenizer, requests, parallel)

        def loglikelihood_rolling(self, requests):
            raise UserError("a task asks for the likelihood of whole texts; use --data, which gives a bound on it")

        def generate_until(self, requests):
            raise UserError("a task asks for generated text, but eval.py only scores given answers; leave it out")

    known = manager.TaskManager(include_path=include_path or None)
    if unknown := [name for name in tasks if not known.match_tasks([name])]:
        raise UserError(f"the harness has no task '{unknown[0]}'; python -m lm_eval ls tasks lists those that it has")
    found = lm_eval.simple_evaluate(Adapter(), tasks=tasks, task_manager=known, limit=limit or None)
    if found:                                           # None where LOCAL_RANK is not 0
        print(utils.make_table(found), CHANCE, sep="\n")
    return found and found["results"]


# ----------------------------------------------------------------------------------------------
# The script

def evaluate(path, parallel, use_bf16):
    """Evaluates one checkpoint on all that the settings ask for. Returns a dict. A collective."""
    autocast = functools.partial(torch.autocast, parallel.device.type, torch.bfloat16, enabled=use_bf16)
    model, tokenizer, path, record = open_checkpoint(path, parallel.device)
    trained, step = record.get("settings", {}), record.get("step")
    print(f"{path}: {model.n_params:,} parameters, step {step}, {tokenizer.name} tokens", flush=True)
    default = [] if tasks else trained.get("data", "data/stdlib").split(",")
    texts = {folder: evaluate_text(model, tokenizer, folder, parallel, autocast) for folder in data or default}
    # Text has run like train.py's validation: fp32 weights under autocast. Questions run like sample.py: weights are
    # cast, and the cache has their dtype.
    cast_for_inference(model, torch.bfloat16 if use_bf16 else torch.float32)
    answers = evaluate_tasks(model, tokenizer, parallel) if tasks else {}
    return dict(checkpoint=path, parameters=model.n_params, step=step, trained=trained, text=texts, tasks=answers)


def main():
    check(globals(), least=dict(sequences=0, mc=1, batch_size=1, seq_len=0, limit=0, seed=0),
          choices=dict(dtype=("auto", "float32", "bfloat16")))
    check_out("out", out, ".json")
    parallel, results = Parallel(device), []
    if parallel.rank > 0:
        sys.stdout = open(os.devnull, "w")              # rank 0 prints for all
    dev, weight_dtype = parallel.device, pick_dtype(dtype, parallel.device)
    machine = dict(hardware(dev), ranks=parallel.world, dtype=str(weight_dtype), kernels=select_kernels(kernels, dev))
    print(", ".join(f"{key} {value}" for key, value in machine.items()), flush=True)
    for path in checkpoint or ["out"]:
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
