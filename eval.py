"""
Evaluates all four models by one protocol: NELBO perplexity, bits per byte and masked-token accuracy
(eq. nelbo-ppl-background) and six question sets, with standard errors. tools/quality.py scores generated text.

    python eval.py                          # out/ckpt.pt, on validation text of the data it was trained on
    python eval.py --checkpoint out/mamba_h_87m --data data/c4,data/paloma --mcqa data/mcqa

The paper scores by pseudo-likelihood, without formula or prompts. Here the choice with the highest score wins:
  pll      pseudo-log-likelihood: the sum of log p(token) over the answer's tokens. Each is masked alone; the model sees
           the others.
  nelbo    minus the NELBO of the answer, given the context
A full-sequence model sees one window that ends with the answer. A block model reads the whole blocks of the context
once, into its cache. The first active block holds the rest of the context and the start of the answer. If the answer
takes several blocks, each sees the earlier ones clean and the later ones not at all. Positions after the answer stay
masked, because nothing is known of them.
"""
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import time
from pathlib import Path

import numpy as np
import torch

import ops
import paper
import sample
from configurator import UserError, check, check_names, configure, script
from data import TokenData, batches, bits_per_byte, load_questions, noise_generators, sha256, task_paths
from files import check_file, write_file
from model import cast_for_inference
from nelbo import masked_cross_entropy, nelbo_sums, progress
from parallel import Parallel, hardware, pick_dtype, select_kernels

# ----------------------------------------------------------------------------------------------
# Settings
checkpoint = ["out/ckpt.pt"]            # files, folders or hf://owner/name, separated by commas
# perplexity
data = []                               # prepared folders; []: that of the training, but none if mcqa is set
sequences = 256                         # how many sequences, spread evenly over the validation split; 0: all
seq_len = 0                             # tokens of a sequence; 0: as in training, 8192 in the paper
mc = 1                                  # noise (Monte Carlo) samples per sequence; with score=nelbo also per answer,
                                        # at least 8
stratified = False                      # sample j draws t from the j-th of mc equal parts of its range
# question sets
mcqa = ""                               # a folder made by python data.py mcqa
tasks = []                              # some of its tasks; []: all
score = "pll"                           # pll or nelbo, see above; nelbo always stratifies t
limit = 0                               # questions per task, chosen at random by seed; 0: all
# system
batch_size = 8                          # sequences at a time; questions: batch_size * the model's seq_len tokens
seed = 1337                             # of all noise
out = ""                                # also write the JSON to this file
device = "auto"                         # auto, cpu, cuda or mps
dtype = "auto"                          # auto: bfloat16 if the GPU has it, else float32; logits are fp32
kernels = "auto"                        # auto; torch: the plain operations; mamba_ssm: those of that package
# ----------------------------------------------------------------------------------------------

TABLES = {                              # part of a result: the columns of its table, each as figure:decimals
    "text": "ppl:2 bpb:4 acc:2 nelbo:4 nelbo_se_noise:4 bytes_per_token:3 tokens tok_per_s:0",
    "mcqa": "acc:2 acc_per_token:2 chance:2 majority:2 uniform:2 questions tokens cut tok_per_s:0",
}


# ----------------------------------------------------------------------------------------------
# Small pieces

def ratio(numerator, denominator=1.0):
    """sum(numerator) / sum(denominator) of arrays (n,), and its standard error over the n entries by the delta method.
    The default denominator gives the mean and its standard error. The value is nan if the denominators sum to 0, the
    error is nan if n is 1."""
    n, denominator = len(numerator), denominator * np.ones(len(numerator))
    total = denominator.sum()
    value = numerator.sum() / total if total else math.nan
    squares = np.square(numerator - value * denominator).sum()
    return value, math.sqrt(n / (n - 1) * squares) / total if n > 1 and total else math.nan


def gather(parallel, array):
    """Joins the ranks' parts of an array: each rank's array is zero where another rank did the work, so their sum has
    everything. All ranks get it. A collective: every rank must call it. Raises UserError unless all values are
    finite."""
    array = np.array(parallel.sum(array.ravel().tolist())).reshape(array.shape)
    if not np.isfinite(array).all():
        raise UserError("the likelihoods are not finite: this checkpoint's training failed; use "
                        "an earlier one")
    return array


# ----------------------------------------------------------------------------------------------
# Perplexity

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
                bpb_se=ratio(nats, n_bytes)[1] / math.log(2), sequences=n, samples=mc,
                tokens=int(tokens.sum()), bytes=int(n_bytes.sum()),
                bytes_per_token=n_bytes.sum() / tokens.sum())


def evaluate_text(model, tokenizer, folder, parallel, autocast):
    """NELBO, perplexity, bits per byte and masked-token accuracy on the validation split of a prepared folder, a
    dict. A collective."""
    text = TokenData(folder, "val", tokenizer.name)
    s = seq_len or model.config.seq_len
    x, started = text.sequences(s, sequences), time.time()
    sums = nelbo_sums(model, x, parallel, autocast, seed, mc, stratified, batch_size)
    sums, n_bytes = gather(parallel, sums), text.sequence_bytes(s, sequences).numpy()
    seconds = time.time() - started
    figures = nelbo_figures(sums, np.full(len(x), s), n_bytes)
    return dict(figures, seq_len=s, sha256=hashlib.sha256(x.numpy()).hexdigest(), seconds=seconds,
                tok_per_s=x.numel() * mc / seconds)


# ----------------------------------------------------------------------------------------------
# Answers
# A question is a list with one (context, answer) for each choice. Both are lists of tokens. The cost of a choice is
# minus its score. It is a weighted sum of -log p of masked tokens, computed in three steps:
#   question_rows    makes the Rows of a question: active blocks in which some tokens of an answer are masked
#   prefill_batches  batches Rows of one shape, and reads the prefixes before their blocks into a cache
#   score_rows       runs a batch, and adds the -log p of its masked tokens to the costs

@dataclasses.dataclass
class Row:
    """One active block, in which some tokens of an answer are masked. These are scored."""
    choice: tuple                       # (index of the question, index of the choice)
    prefix: tuple                       # the clean tokens before the block, in whole blocks
    xt: np.ndarray                      # (l,) the block, with masks at the scored positions and after the answer
    at: list                            # the scored positions in the block
    target: list                        # the true tokens there
    weight: float                       # the factor of their -log p in the cost


def maskings(indices, noise):
    """
    Which tokens of an answer are masked and scored together: a list of ([their indices in the answer], weight).
    indices: the range of indices in the answer that lie in one block.

    noise None (pll): each token alone, with weight 1. Otherwise (nelbo) noise (mc, 2, m) is uniform on [0, 1), and m is
    at least the length of the answer. Sample j takes a t for the block from the j-th of mc strata, masks each token
    with probability t, and has weight 1 / (t mc). A sample that masks nothing adds nothing, and is left out.
    """
    if noise is None:
        return [([index], 1.0) for index in indices]
    mc = len(noise)
    # t comes from the noise of the first answer token in this block, so each block has a t of its own.
    levels = 1e-3 + (1 - 1e-3) * (np.arange(mc) + noise[:, 0, indices.start]) / mc       # (mc,)
    is_masked = noise[:, 1, indices.start:indices.stop] < levels[:, None]      # (mc, len(indices))
    return [([indices[i] for i in mask.nonzero()[0]], 1 / (t * mc))
            for mask, t in zip(is_masked, levels) if mask.any()]


def answer_rows(config, choice, context, answer, noise):
    """Yields the Rows of one answer, block by block. A full-sequence model has one block: context and answer.
    choice: see Row. noise: see `maskings`."""
    n, tokens = len(context), [*context, *answer]
    l = len(tokens) if config.full_sequence else config.block_len
    for start in range(n // l * l, len(tokens), l):     # from the block in which the context ends
        prefix, known = tuple(tokens[:start]), min(l, len(tokens) - start)
        block = np.full(l, config.mask_id)
        block[:known] = tokens[start:start + known]
        # Token i of the answer is at position n + i - start of the block.
        for scored, weight in maskings(range(max(start - n, 0), start - n + known), noise):
            at, xt = [n + i - start for i in scored], block.copy()
            xt[at] = config.mask_id
            yield Row(choice, prefix, xt, at, block[at].tolist(), weight)


def question_rows(config, q, choices, rule, seed, mc):
    """Yields the Rows of all choices of question q. With the rule nelbo all choices share one noise, so that noise
    contributes less to the difference between them."""
    noise = None
    if rule == "nelbo":
        generator, = noise_generators(seed, [q])
        longest = max(len(answer) for _, answer in choices)
        noise = torch.rand(mc, 2, longest, generator=generator).double().numpy()
    for c, (context, answer) in enumerate(choices):
        yield from answer_rows(config, (q, c), context, answer, noise)


def prefill_batches(model, rows, budget):
    """Yields all Rows in batches for `score_rows`: (cache, [(index of the cache row that holds its prefix, Row)]). The
    Rows of a batch have prefixes of one length and blocks of one length, about `budget` tokens in all. A prefix that
    several Rows share is read once."""
    shape = lambda row: (len(row.prefix), len(row.xt))
    for (prefix_len, l), group in itertools.groupby(sorted(rows, key=shape), shape):
        rows_after, at_a_time = {}, budget // (prefix_len + l)                 # rows_after: {prefix: its Rows}
        for row in group:
            rows_after.setdefault(row.prefix, []).append(row)
        for prefixes in batches(list(rows_after), at_a_time):
            cache = model.new_cache(len(prefixes), prefix_len, l)
            model.prefill(torch.tensor(prefixes, device=cache.lengths.device).long(), cache)
            placed = [(i, row) for i, prefix in enumerate(prefixes) for row in rows_after[prefix]]
            for batch in batches(placed, at_a_time):
                yield cache, batch


@torch.no_grad()
def score_rows(model, cache, rows, cost):
    """Runs one batch of `prefill_batches`, and adds the weighted -log p of its scored tokens to cost[question, choice].
    The noise level t of a block is its masked fraction, as in sampling; only timestep conditioning uses it."""
    dev, mask_id = cache.lengths.device, model.config.mask_id
    index = torch.tensor([i for i, _ in rows], device=dev)                     # (rows,)
    gathered = dataclasses.replace(cache, lengths=cache.lengths[index], layers=[        # one row for each Row
        tuple(part[index] for part in state) for state in cache.layers])
    xt = torch.from_numpy(np.stack([row.xt for _, row in rows])).to(dev)       # (rows, l)
    t = (xt == mask_id).to(ops.at_least_fp32(model.embed.weight.dtype)).mean(1)            # (rows,)
    hidden = model.denoise_hidden(xt, gathered, t)                             # (rows, l, d)
    counts = [len(row.at) for _, row in rows]                                  # scored tokens of each row
    owner = [i for i, n in enumerate(counts) for _ in range(n)]                # the row of each scored token
    at, target = [x for _, row in rows for x in row.at], [x for _, row in rows for x in row.target]
    nats, _ = masked_cross_entropy(model, hidden[owner, at], torch.tensor(target, device=dev))     # (scored tokens,)
    for (_, row), part in zip(rows, nats.split(counts)):
        cost[row.choice] += row.weight * part.sum().item()


def score_answers(model, questions, parallel, rule, seed, mc, budget, what="answers"):
    """
    The cost of every choice in nats: -log p(answer given context), by the rule "pll" or "nelbo" of this file's
    docstring. Returns float64 (n questions, most choices of a question), 0 where a question has fewer choices, on all
    ranks: a collective. Noise is a function of (seed, question). About `budget` tokens run at a time.
    """
    cost = np.zeros((len(questions), max(map(len, questions))))
    # Questions of similar length run together, and every rank gets some of each length.
    by_size = sorted(range(len(questions)), key=lambda q: sum(map(len, questions[q][0])))
    mine = by_size[parallel.rank::parallel.world]
    with progress(parallel, what, len(mine), "question") as bar:
        for part in batches(mine, 256):                 # so that the Rows of all questions never exist at once
            rows = [row for q in part
                    for row in question_rows(model.config, q, questions[q], rule, seed, mc)]
            for cache, batch in prefill_batches(model, rows, budget):
                score_rows(model, cache, batch, cost)
                bar.update(min(len(batch) * len(part) / len(rows), len(mine) - bar.n))
    return gather(parallel, cost)


# ----------------------------------------------------------------------------------------------
# Question sets

def credit(cost, exists, gold):
    """The probability (n,) that the right choice is picked, if the lowest cost wins and ties are broken at random: 1/m
    if m choices tie for the lowest cost and the right one is among them, else 0. Costs that differ by rounding tie.
    cost (n, c); exists (n, c) bool: which choices a question has; gold (n,): the index of the right choice."""
    cost = np.where(exists, cost, np.inf)
    best = cost.min(1, keepdims=True)
    cheapest = cost <= best + 1e-6 * np.abs(best)
    return cheapest[np.arange(len(gold)), gold] / cheapest.sum(1)


def task_figures(questions, cost):
    """
    The figures of a task, a dict. questions: the n questions that data.load_questions returns. cost (n, c): see
    `score_answers`. Accuracies are in percent, with standard errors over questions:

      acc             of the lowest cost
      acc_per_token   of the lowest cost per token
      chance          of a random choice
      majority        of always choosing the index that is right most often
      uniform         acc of a model to which all tokens are equally likely

    The uniform model prefers the answer with the fewest tokens, so compare acc with `uniform`. Per token all its costs
    are equal, so compare acc_per_token with `chance`. `cut` counts questions whose context was shortened.
    """
    gold, tokens = np.array([q["gold"] for q in questions]), np.zeros_like(cost)
    for row, q in zip(tokens, questions):
        row[:len(q["pairs"])] = [len(answer) for _, answer in q["pairs"]]
    exists = tokens > 0                                 # (n, c); every answer has at least one token
    figures = dict(questions=len(gold), tokens=int(tokens.sum()),
                   cut=sum(q["cut"] > 0 for q in questions),
                   chance=float(100 * (1 / exists.sum(1)).mean()),
                   majority=float(100 * np.bincount(gold).max() / len(gold)))
    costs = dict(acc=cost, acc_per_token=cost / np.maximum(tokens, 1), uniform=tokens)
    for name, compared in costs.items():
        right = credit(compared, exists, gold)
        figures[name], figures[f"{name}_se"] = (float(100 * x) for x in ratio(right))
    return figures


def macro_average(tasks):
    """The mean over tasks of every accuracy, with standard errors that treat the tasks as independent."""
    macro = dict(questions=sum(r["questions"] for r in tasks))
    for key in ("acc", "acc_per_token", "uniform", "chance", "majority"):
        macro[key] = float(np.mean([r[key] for r in tasks]))
    for key in ("acc_se", "acc_per_token_se", "uniform_se"):
        macro[key] = math.hypot(*(r[key] for r in tasks)) / len(tasks)
    return macro


def evaluate_questions(model, tokenizer, parallel):
    """The figures of every task in the folder `mcqa`, and their mean over tasks as "macro": {task: figures}. A
    collective."""
    results = {}
    for name, path in task_paths(mcqa, tasks).items():
        started = time.time()
        questions = load_questions(path, tokenizer, model.config.seq_len, limit, seed)
        cost = score_answers(model, [q["pairs"] for q in questions], parallel, score, seed, mc,
                             batch_size * model.config.seq_len, name)
        figures, seconds = task_figures(questions, cost), time.time() - started
        results[name] = dict(figures, sha256=sha256(path), seconds=seconds,
                             tok_per_s=figures["tokens"] / seconds)
    return dict(results, macro=macro_average(list(results.values())))


# ----------------------------------------------------------------------------------------------
# The script

def paper_name(model):
    """The name of the paper's config of the same kind and number of parameters, such as mamba_h_87m; without one, the
    kind alone, such as mamba_h."""
    kind = paper.kind_of(model.config.hybrid, model.config.full_sequence)
    same = [name for name, millions in paper.PARAMS.items() if name.rsplit("_", 1)[0] == kind
            and round(model.n_params / 1e6, 2) == millions]
    return same[0] if same else kind


def open_checkpoint(path, dev):
    """Loads a checkpoint. path: see checkpoint.find_checkpoint. Returns the model, its tokenizer, and a dict that
    describes the checkpoint in the result."""
    model, tokenizer, path, record = sample.open_checkpoint(path, dev)
    settings = record.get("settings", {})
    return model, tokenizer, dict(
        checkpoint=path, sha256=sha256(path), model=paper_name(model), parameters=model.n_params,
        tokenizer=tokenizer.name, step=record.get("step"), lr=settings.get("learning_rate"),
        data=settings.get("data"))


def open_with_texts(path, dev):
    """Opens a checkpoint, and lists the folders of text on which it is scored. Returns the model, its tokenizer, the
    folders, and the dict of `open_checkpoint`. Raises UserError for a text that the model cannot score."""
    model, tokenizer, known = open_checkpoint(path, dev)
    folders = data or ([] if mcqa else [known["data"] or "data/stdlib"])
    for folder in folders:                              # both calls are here for the errors that they raise
        s = seq_len or model.config.seq_len
        model.config.for_length(s)
        TokenData(folder, "val", tokenizer.name).n_windows(s)
    return model, tokenizer, folders, known


def evaluate(path, parallel, use_bf16):
    """Runs everything that the settings ask for on one checkpoint. Returns a dict. A collective."""
    autocast = functools.partial(torch.autocast, parallel.device.type, torch.bfloat16, enabled=use_bf16)
    model, tokenizer, folders, result = open_with_texts(path, parallel.device)
    if parallel.rank == 0:
        print(f"\n{result['checkpoint']}: {result['model']}, {model.n_params:,} parameters, step "
              f"{result['step']}, {tokenizer.name} tokens, sha256 {result['sha256'][:12]}")
    result["text"] = {folder: evaluate_text(model, tokenizer, folder, parallel, autocast) for folder in folders}
    if mcqa:
        # Perplexity has run like train.py's validation: fp32 weights under autocast. Questions run like sample.py:
        # weights are cast, and the cache has their dtype.
        cast_for_inference(model, torch.bfloat16 if use_bf16 else torch.float32)
        result["mcqa"] = evaluate_questions(model, tokenizer, parallel)
    return result


def cell(figures, key, digits=2):
    """figures[key] as text, with its standard error if there is one. None if the figure is missing or nan."""
    value, se = figures.get(key, math.nan), figures.get(f"{key}_se", math.nan)
    if isinstance(value, int):
        return f"{value:,}"
    error = "" if math.isnan(se) else f" +- {se:.{digits}f}"
    return None if math.isnan(value) else f"{value:,.{digits}f}{error}"


def print_table(columns):
    """Prints columns, [(header, cells)], aligned: the first to the left, the others to the right. A column whose cells
    are all empty is left out."""
    columns = [[header, *cells] for header, cells in columns if any(cells)]
    columns = [["-" if text is None else str(text) for text in column] for column in columns]
    widths = [max(map(len, column)) for column in columns]
    for first, *others in zip(*columns):
        others = [text.rjust(width) for text, width in zip(others, widths[1:])]
        print("  ".join([first.ljust(widths[0]), *others]))


def print_result(result):
    """Prints the figures of one checkpoint, one table for each part of TABLES. +- is one standard error over sequences
    or questions."""
    for part, columns in TABLES.items():
        rows = result.get(part, {})
        keys = [column.partition(":")[::2] for column in columns.split()]
        print_table([(part, list(rows)), *(
            (key, [cell(r, key, digits) for r in rows.values()]) for key, digits in keys)])


def print_paper_table(results):
    """Prints all checkpoints in one table, in the layout of tab:validation-87m-full, with the paper's figures beside
    ours. Checkpoints of the same model go by their paths."""
    kinds = [r["model"] for r in results]
    theirs = [paper.RESULTS.get(r["model"], {}) for r in results]
    columns = [("model", [r["model"] if kinds.count(r["model"]) == 1 else r["checkpoint"] for r in results]),
               ("LR", [r["lr"] for r in results]), ("paper", [p.get("lr") for p in theirs])]
    for folder in dict.fromkeys(folder for r in results for folder in r["text"]):
        name, ours = Path(folder).name, [r["text"].get(folder, {}) for r in results]
        for i, (key, label) in enumerate(dict(ppl="PPL", bpb="BPB", acc="acc").items()):
            columns.append((f"{name} {label}", [cell(r, key) for r in ours]))
            if name in ("c4", "paloma"):
                columns.append(("paper", [p[name][i] if p else None for p in theirs]))
    if mcqa:
        columns.append(("MCQA", [cell(r["mcqa"]["macro"], "acc") for r in results]))
        columns.append(("paper", [p.get("mcqa") for p in theirs]))
    print("\nside by side; paper: its best model of that shape")
    print_table(columns)


def check_settings():
    """Raises UserError, before any work, for settings that cannot work."""
    check(globals(), least=dict(sequences=0, mc=1, batch_size=1, seq_len=0, limit=0, seed=0),
          choices=dict(score=("pll", "nelbo"), dtype=("auto", "float32", "bfloat16")))
    check_names(globals(), "checkpoint", "data", "tasks")
    if not checkpoint:
        raise UserError("there is nothing to evaluate; name a file with --checkpoint=PATH")
    if mcqa and score == "nelbo" and mc < 8:
        raise UserError(f"mc must be at least 8 with score=nelbo, but is {mc}: a short answer that no sample masks costs "
                        f"nothing; add --mc=8")
    if tasks and not mcqa:
        raise UserError("tasks are files of a question set; add --mcqa=FOLDER")
    check_file("out", out, rb'\{"eval"')
    if mcqa:
        task_paths(mcqa, tasks)


def as_json(results, dtype, **machine):
    """The results, with the protocol and `machine` (what they were measured on), as one line of JSON."""
    protocol = dict(noise="t ~ U(1e-3, 1) per block, weight 1/t, per (seed, sequence, sample)",
                    samples=mc, stratified=stratified, seed=seed,
                    score="nelbo, stratified" if score == "nelbo" else score, limit=limit,
                    templates="lm-evaluation-harness 4e7e0d47", batch_size=batch_size, dtype=dtype,
                    logits="float32")
    record = dict(eval="nanobdlm-1", protocol=protocol, **machine, results=results)
    return json.dumps(record).replace(": NaN", ": null")            # JSON knows no NaN


def main():
    check_settings()
    parallel, results = Parallel(device), []
    use_bf16 = pick_dtype(dtype, parallel.device) == torch.bfloat16
    kernels_line, machine = select_kernels(kernels, parallel.device), hardware(parallel.device)
    if parallel.rank == 0:
        print(f"{parallel.world} x {machine['name']} {'bf16' if use_bf16 else 'fp32'} | torch "
              f"{machine['torch']} | {kernels_line} | seed {seed}, {mc} noise samples"
              f"{', stratified' if stratified else ''}", flush=True)
    for path in checkpoint[1:]:                         # now, so that a wrong path is not found hours later
        open_with_texts(path, "cpu")

    def record():
        """The JSON of the checkpoints evaluated so far."""
        return as_json(results, "bfloat16" if use_bf16 else "float32", ranks=parallel.world, kernels=kernels_line,
                       hardware=machine)
    try:
        for path in checkpoint:
            results.append(evaluate(path, parallel, use_bf16))
            if parallel.rank == 0:
                print_result(results[-1])
                write_file(out, record() + "\n")        # after each checkpoint, so that a crash loses only one
    finally:
        if parallel.rank == 0 and results:
            if len(results) > 1:
                print_paper_table(results)
            print(record(), flush=True)
    parallel.close()


if __name__ == "__main__":
    with script("eval.py"):
        configure(globals())
        main()
