"""
Evaluates all four models by one protocol: NELBO perplexity, bits per byte and masked-token accuracy
(eq. nelbo-ppl-background), six question sets, generated text; each figure with its standard error.

    python eval.py                                              # out/ckpt.pt on the text it knows
    python eval.py --checkpoint out/mamba_h_87m --data data/c4,data/paloma --mcqa data/mcqa

The paper names neither prompts nor a scoring rule. Ours: a choice scores the sum over its tokens of
log p(token), that token alone masked, context and the rest of the answer given (pll), or minus the
NELBO of the answer (nelbo). A full-sequence model's window ends with the answer. A block model
reads whole blocks of context once, into its cache; the answer starts in the block in which the
context ends, and a block's positions after the answer stay masked: nothing is known of them. If an
answer takes several blocks, each sees the earlier ones clean and nothing of the later ones.
"""
from configurator import ConfigError, check, configure, script  # first: see quiet_interrupt
import dataclasses
import functools
import itertools
import json
import math
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch

import paper
import sample
from data import (TokenData, batches, bits_per_byte, load_questions, noise_generators, noise_seeds, sha256,
                  task_paths)
from decoders import Sampler
from files import check_file, write_file
from model import ModelError, cast_for_inference
from nelbo import masked_cross_entropy, nelbo_counts, progress
from parallel import Parallel, hardware, pick_dtype, select_kernels

# ---------------------------------------------------------------------------------------------
# Settings
checkpoint = ["out/ckpt.pt"]            # files, folders or hf://owner/name, separated by commas
# perplexity
data = []                               # prepared folders; []: the checkpoint's, unless --mcqa
sequences = 256                         # sequences of the validation split, the first ones
seq_len = 0                             # tokens of a sequence; 0: as in training, 8192 in the paper
mc = 1                                  # noise samples per sequence, and per answer with nelbo
stratified = False                      # sample j of mc draws t from the j-th of mc equal parts
# question sets
mcqa = ""                               # a folder made by python data.py mcqa
tasks = []                              # some of its tasks; []: all
score = "pll"                           # pll or nelbo (t always stratified)
limit = 0                               # questions of a task, drawn by seed; 0: all
# generated text
generate = 0                            # continuations to sample
prompt_len = 32                         # tokens of validation text that each one continues
length = 256                            # tokens of each one
tokens_per_step = 0                     # revealed per denoising step; 0: a sixteenth of a block
judge = ""                              # a second checkpoint that scores them
# system
batch_size = 8                          # sequences, or as many tokens of questions, at a time
seed = 1337                             # of all noise
out = ""                                # a file that gets the JSON as well
device = "auto"                         # auto, cpu, cuda or mps
dtype = "auto"                          # auto: bfloat16 on CUDA, float32 elsewhere; logits are fp32
kernels = "auto"                        # auto; torch: the plain operations; mamba_ssm: those of that package
dist_timeout = 300                      # seconds until a collective without an answer ends the job
# ---------------------------------------------------------------------------------------------

TABLES = {                              # parts of a result, and the columns of their tables
    "text": "ppl:2 bpb:4 acc:2 nelbo:4 nelbo_se_noise:4 bytes_per_token:3 documents tokens "
            "tok_per_s:0",
    "mcqa": "acc:2 acc_per_token:2 chance:2 majority:2 uniform:2 questions tokens cut tok_per_s:0",
    "generate": "texts entropy:3 distinct_1:3 distinct_2:3 distinct_3:3 repetition:3 nelbo:3 "
                "tok_per_s:0",
}


# -- small pieces -----------------------------------------------------------------------------

def ratio(numerator, denominator=1.0):
    """Sum over sum of arrays (n,), and its standard error over the n (nan if there is one). With
    the default denominator it is the mean and the standard error of the mean."""
    n, denominator = len(numerator), denominator * np.ones(len(numerator))
    total = denominator.sum()
    value = numerator.sum() / total if total else math.nan
    rest = np.square(numerator - value * denominator).sum()
    return value, math.sqrt(n / (n - 1) * rest) / total if n > 1 and total else math.nan


def gather(parallel, array):
    """The sum over ranks of arrays that are zero where another rank did the work. Collective."""
    array = np.array(parallel.sum(array.ravel().tolist())).reshape(array.shape)
    if not np.isfinite(array).all():
        raise ModelError("the likelihoods are not finite: this checkpoint's training failed; use "
                         "an earlier one")
    return array


# -- perplexity -------------------------------------------------------------------------------

def nelbo_figures(counts, tokens, n_bytes):
    """
    counts (n, mc, 3) of nelbo.nelbo_counts, tokens and n_bytes (n,) of the sequences -> a dict. `nats` is the NELBO of
    every sequence, for paired comparisons. `nelbo_se` is the standard error from text and noise, `nelbo_se_noise` that
    from noise alone; it needs mc >= 2, and with stratified noise it is an upper bound, because the strata differ.
    """
    nats, masked, hits = counts.mean(1).T
    nelbo, se = ratio(nats, tokens)
    acc, acc_se = ratio(hits, masked)
    n, mc, _ = counts.shape
    noise = counts[..., 0].var(1, ddof=1).sum() / mc if mc > 1 else math.nan
    ppl = math.exp(min(nelbo, 700))
    return dict(nats=nats.round(3).tolist(), nelbo=nelbo, nelbo_se=se, nelbo_se_noise=math.sqrt(noise) / tokens.sum(),
                ppl=ppl, ppl_se=ppl * se, acc=100 * acc, acc_se=100 * acc_se,
                bpb=bits_per_byte(nelbo, tokens.sum(), n_bytes.sum()),
                bpb_se=ratio(nats, n_bytes)[1] / math.log(2), sequences=n, samples=mc,
                tokens=int(tokens.sum()), bytes=int(n_bytes.sum()),
                bytes_per_token=n_bytes.sum() / tokens.sum())


def evaluate_text(model, tokenizer, folder, parallel, autocast):
    """NELBO, perplexity, bits per byte and masked-token accuracy on a prepared folder: a dict."""
    text = TokenData(folder, "val", tokenizer.name)
    s = seq_len or model.config.seq_len
    x, started = text.sequences(s, sequences), time.time()
    counts = nelbo_counts(model, x, parallel, autocast, seed, mc, stratified, batch_size)
    counts, n_bytes = gather(parallel, counts), text.sequence_bytes(s, sequences).numpy()
    seconds = time.time() - started
    figures = nelbo_figures(counts, np.full(len(x), s), n_bytes)
    ends = x == tokenizer.eot_token
    return dict(figures, seq_len=s, documents=int(ends.sum()) + int(not ends[-1, -1]),
                seconds=seconds, tok_per_s=x.numel() * mc / seconds)


# -- answers ----------------------------------------------------------------------------------
# A question is a list of (context, answer), one for each choice, both lists of tokens.

@dataclasses.dataclass
class Row:
    """An active block with some tokens of an answer masked, which are scored."""
    choice: tuple                       # (question, choice)
    prefix: tuple                       # clean tokens before the block: whole blocks
    xt: np.ndarray                      # (l,) masks at the scored places and past the answer
    at: list                            # the scored places
    target: list                        # the tokens there
    weight: float                       # of their -log p in the score


def maskings(places, noise):
    """
    [(places that are masked and scored, weight)] for a range of places in an answer that share a
    block. noise None (pll): each alone. Else noise (mc, 2, m) uniform, for answers of at most m
    tokens: sample j masks a place with probability t and weight 1/t, t from the j-th stratum.
    """
    if noise is None:
        return [([place], 1.0) for place in places]
    mc = len(noise)
    levels = 1e-3 + (1 - 1e-3) * (np.arange(mc) + noise[:, 0, places.start]) / mc
    drawn = noise[:, 1, places.start:places.stop] < levels[:, None]            # (mc, places)
    return [([places[i] for i in row.nonzero()[0]], 1 / (t * mc))
            for row, t in zip(drawn, levels) if row.any()]


def answer_rows(config, choice, context, answer, noise):
    """The rows of one answer: block by block, or the whole window of a full-sequence model."""
    n, whole = len(context), [*context, *answer]
    l = len(whole) if config.full_sequence else config.block_len
    for start in range(n // l * l, len(whole), l):
        prefix, length = tuple(whole[:start]), min(l, len(whole) - start)
        block = np.full(l, config.mask_id)
        block[:length] = whole[start:start + length]
        for scored, weight in maskings(range(max(start - n, 0), start - n + length), noise):
            at, xt = [n + place - start for place in scored], block.copy()
            xt[at] = config.mask_id
            yield Row(choice, prefix, xt, at, block[at].tolist(), weight)


def question_rows(config, q, choices, rule, seed, mc):
    """The rows of question q, the noise of nelbo being the same for all its choices."""
    noise = None
    if rule == "nelbo":
        generator, = noise_generators(seed, [q])
        longest = max(len(answer) for _, answer in choices)
        noise = torch.rand(mc, 2, longest, generator=generator).double().numpy()
    for c, (context, answer) in enumerate(choices):
        yield from answer_rows(config, (q, c), context, answer, noise)


def prefilled(model, rows, budget):
    """Yields (cache, [(row of the cache, Row)]) for all rows: batches of one shape and of about
    `budget` tokens, behind caches into which every distinct prefix is read once."""
    shape = lambda row: (len(row.prefix), len(row.xt))
    for (prefix_len, l), group in itertools.groupby(sorted(rows, key=shape), shape):
        behind, at_a_time = {}, budget // (prefix_len + l)
        for row in group:
            behind.setdefault(row.prefix, []).append(row)
        for prefixes in batches(list(behind), at_a_time):
            cache = model.new_cache(len(prefixes), prefix_len, l)
            model.prefill(torch.tensor(prefixes, device=cache.lengths.device).long(), cache)
            placed = [(i, row) for i, prefix in enumerate(prefixes) for row in behind[prefix]]
            for batch in batches(placed, at_a_time):
                yield cache, batch


@torch.no_grad()
def score_rows(model, cache, rows, nll):
    """
    Adds the weighted -log p of [(row of the cache, Row)], of one shape, to nll[question, choice]. A
    model with timestep conditioning is told the block's masked fraction, as in sampling.
    """
    dev, mask_id = cache.lengths.device, model.config.mask_id
    index = torch.tensor([i for i, _ in rows], device=dev)
    mine = dataclasses.replace(cache, lengths=cache.lengths[index], layers=[
        tuple(part[index] for part in state) for state in cache.layers])
    xt = torch.from_numpy(np.stack([row.xt for _, row in rows])).to(dev)       # (rows, l)
    hidden = model.denoise_hidden(xt, mine, (xt == mask_id).double().mean(1))  # (rows, l, d)
    i, at, target, choice, weight = zip(*(
        (i, *scored, row.choice, row.weight) for i, (_, row) in enumerate(rows)
        for scored in zip(row.at, row.target)))
    nats, _ = masked_cross_entropy(model, hidden[list(i), list(at)],
                                   torch.tensor(target, device=dev))
    np.add.at(nll, tuple(zip(*choice)), nats.cpu().numpy() * weight)


def score_answers(model, questions, parallel, rule, seed, mc, budget, what="answers"):
    """
    -log p of every choice, or its bound: float64 (questions, most choices) in nats, on all ranks.
    rule "pll" or "nelbo"; noise is a function of (seed, question). About `budget` tokens at a time.
    """
    nll = np.zeros((len(questions), max(map(len, questions))))
    by_size = sorted(range(len(questions)), key=lambda q: sum(map(len, questions[q][0])))
    mine = by_size[parallel.rank::parallel.world]
    with progress(parallel, what, len(mine), "question") as bar:
        for some in batches(mine, 256):                 # bounds what is prepared at a time
            rows = [row for q in some
                    for row in question_rows(model.config, q, questions[q], rule, seed, mc)]
            for cache, batch in prefilled(model, rows, budget):
                score_rows(model, cache, batch, nll)
                bar.update(min(len(batch) * len(some) / len(rows), len(mine) - bar.n))
    return gather(parallel, nll)


# -- question sets ----------------------------------------------------------------------------

def credit(cost, exists, gold):
    """cost (n, c) of the choices that exist, gold (n,) -> (n,): the chance that the gold choice is
    picked, 1/m where m choices are cheapest alike, up to rounding."""
    cost = np.where(exists, cost, np.inf)
    best = cost.min(1, keepdims=True)
    cheapest = cost <= best + 1e-6 * np.abs(best)
    return cheapest[np.arange(len(gold)), gold] / cheapest.sum(1)


def task_figures(questions, nll):
    """
    A task's figures from nll (n, c), in percent, with standard errors over questions. Baselines:
    chance; majority, always the same choice; uniform, the acc of a model to which all tokens are
    equally likely. Its sums prefer the fewest tokens, so acc is to be read against `uniform`; per
    token it ties everywhere, so acc_per_token is to be read against `chance`.
    """
    gold, tokens = np.array([q["gold"] for q in questions]), np.zeros_like(nll)
    for row, q in zip(tokens, questions):
        row[:len(q["pairs"])] = [len(answer) for _, answer in q["pairs"]]
    exists = tokens > 0
    figures = dict(questions=len(gold), tokens=int(tokens.sum()),
                   cut=sum(q["cut"] > 0 for q in questions),
                   chance=float(100 * (1 / exists.sum(1)).mean()),
                   majority=float(100 * np.bincount(gold).max() / len(gold)))
    costs = dict(acc=nll, acc_per_token=nll / np.maximum(tokens, 1), uniform=tokens)
    for name, cost in costs.items():
        right = credit(cost, exists, gold)
        figures[name], figures[f"{name}_se"] = (float(100 * x) for x in ratio(right))
    return figures


def macro_average(tasks):
    """The mean over tasks of every figure in percent, with the standard error that theirs make."""
    macro = dict(questions=sum(r["questions"] for r in tasks))
    for key in ("acc", "acc_per_token", "uniform", "chance", "majority"):
        macro[key] = float(np.mean([r[key] for r in tasks]))
    for key in ("acc_se", "acc_per_token_se", "uniform_se"):
        macro[key] = math.hypot(*(r[key] for r in tasks)) / len(tasks)
    return macro


def evaluate_questions(model, tokenizer, parallel):
    """Every task of the folder `mcqa`, and the macro-average: {task: figures}."""
    results = {}
    for name, path in task_paths(mcqa, tasks).items():
        started = time.time()
        questions = load_questions(path, tokenizer, model.config.seq_len, limit, seed)
        nll = score_answers(model, [q["pairs"] for q in questions], parallel, score, seed, mc,
                            batch_size * model.config.seq_len, name)
        figures, seconds = task_figures(questions, nll), time.time() - started
        results[name] = dict(figures, sha256=sha256(path), seconds=seconds,
                             tok_per_s=figures["tokens"] / seconds)
    return dict(results, macro=macro_average(list(results.values())))


# -- generated text ---------------------------------------------------------------------------

def text_figures(tokens):
    """
    One text, a list of tokens -> dict: entropy of its unigrams in nats; distinct_n, the share of
    different ones among its n-grams; repetition, the share of tokens among the 16 before them.
    """
    frequency = np.unique(tokens, return_counts=True)[1] / len(tokens)
    figures = dict(entropy=float(-(frequency * np.log(frequency)).sum()))
    for n in (1, 2, 3):
        grams = [tuple(tokens[i:i + n]) for i in range(len(tokens) - n + 1)]
        figures[f"distinct_{n}"] = len(set(grams)) / max(1, len(grams))
    again = [token in tokens[max(0, i - 16):i] for i, token in enumerate(tokens)]
    return dict(figures, repetition=sum(again) / len(tokens))


def continuations(engine, prompts, parallel):
    """A continuation by `length` tokens of each prompt (n, m): int64 (n, length), on all ranks. engine: what
    sample.open_engine returned."""
    (n, m), (model, new_decoder) = prompts.shape, engine
    c, made = model.config, np.zeros((n, length))
    block = m + length if c.full_sequence else c.block_len
    mine = range(parallel.rank, n, parallel.world)
    with progress(parallel, "generation", len(mine) * length, "tok") as bar:
        for rows in batches(mine, batch_size):
            sampler = Sampler(noise_seeds(seed, rows), mask_id=c.mask_id,
                              tokens_per_step=tokens_per_step or max(block // 16, 1))
            done = sample.generate(model, list(prompts[list(rows)]), length, sampler, new_decoder)
            made[rows] = torch.stack(done.tokens)[:, m:].cpu()
            bar.update(len(rows) * length)
    return gather(parallel, made).astype(np.int64)


def evaluate_generation(engine, tokenizer, folder, parallel, judge_model):
    """
    Continuations of validation text beside that text's own: {"generated", "validation": figures}.
    With a judge, also both's NELBO under it given the prompt, in nats per token. Standard errors
    are over texts.
    """
    windows = TokenData(folder, "val", tokenizer.name).sequences(prompt_len + length, generate)
    prompts, results, started = windows[:, :prompt_len], {}, time.time()
    made = continuations(engine, prompts, parallel).tolist()
    seconds = time.time() - started
    for name, texts in dict(generated=made, validation=windows[:, prompt_len:].tolist()).items():
        figures = [text_figures(text) for text in texts]
        if judge_model:
            questions = [[pair] for pair in zip(prompts.tolist(), texts)]
            nats = score_answers(judge_model, questions, parallel, "nelbo", seed, mc,
                                 batch_size * judge_model.config.seq_len, "judge")[:, 0]
            figures = [dict(f, nelbo=n / length) for f, n in zip(figures, nats)]
        results[name] = dict(texts=len(texts))
        for key in figures[0]:
            value, se = ratio(np.array([f[key] for f in figures]))
            results[name].update({key: value, f"{key}_se": se})
    results["generated"].update(seconds=seconds, tok_per_s=len(made) * length / seconds)
    return results


# -- the script -------------------------------------------------------------------------------

def paper_name(model):
    """The name of the config that the model has the shape of, or just its kind."""
    c = model.config
    kind = ("diffumamba_h" if c.full_sequence else "mamba_h") if c.hybrid else \
        ("attention" if c.full_sequence else "bdlm_attention")
    same = [name for name, millions in paper.PARAMS.items() if name.rsplit("_", 1)[0] == kind
            and f"{model.n_params / 1e6:.2f}" == f"{millions:.2f}"]
    return same[0] if same else kind


def open_checkpoint(path, dev):
    """(model, tokenizer, what is known of it) of what checkpoint.find_checkpoint takes."""
    model, tokenizer, path, record = sample.open_checkpoint(path, dev)
    settings = record.get("settings", {})
    return model, tokenizer, dict(
        checkpoint=path, sha256=sha256(path), model=paper_name(model), parameters=model.n_params,
        tokenizer=tokenizer.name, step=record.get("step"), lr=settings.get("learning_rate"),
        data=settings.get("data"))


def open_judge(tokenizer, dev, dtype):
    """(model, what is known of it) of the setting `judge`; (None, None) without one."""
    if not judge:
        return None, None
    model, theirs, known = open_checkpoint(judge, dev)
    if theirs.name != tokenizer.name:
        raise ModelError(f"the judge reads {theirs.name} tokens and the model writes "
                         f"{tokenizer.name} tokens; choose a judge with the same tokenizer")
    return cast_for_inference(model, dtype), known


def open_all(path, dev, dtype):
    """
    (model, judge or None, tokenizer, folders of text, what is known of it all) for a checkpoint.
    Raises ConfigError, DataError or ModelError if these cannot do all that the settings ask for.
    """
    model, tokenizer, known = open_checkpoint(path, dev)
    judge_model, known["judge"] = open_judge(tokenizer, dev, dtype)
    folders, s = data or [known["data"] or "data/stdlib"], seq_len or model.config.seq_len
    for folder in folders if data or not mcqa else []:
        model.config.for_length(s)
        TokenData(folder, "val", tokenizer.name).n_windows(s)
    for writer in filter(None, (model, judge_model)) if generate else ():
        sample.plan(writer.config, [range(prompt_len)], length)
        if (n := TokenData(folders[0], "val", tokenizer.name).n_tokens) < prompt_len + length:
            raise ConfigError(f"prompt_len + length is {prompt_len + length} and {folders[0]} has only {n} "
                              f"validation tokens; choose a smaller length")
    return model, judge_model, tokenizer, folders, known


def evaluate(path, parallel, half):
    """All that the settings ask for of one checkpoint: a dict."""
    autocast = functools.partial(torch.autocast, parallel.device.type, torch.bfloat16, enabled=half)
    weights = torch.bfloat16 if half else torch.float32
    model, judge_model, tokenizer, folders, result = open_all(path, parallel.device, weights)
    if parallel.rank == 0:
        print(f"\n{result['checkpoint']}: {result['model']}, {model.n_params:,} parameters, step "
              f"{result['step']}, {tokenizer.name} tokens, sha256 {result['sha256'][:12]}")
    result["text"] = {folder: evaluate_text(model, tokenizer, folder, parallel, autocast)
                      for folder in folders if data or not mcqa}
    # The cache has the dtype of the weights, so what goes through it runs with weights in bf16, as
    # sample.py does; perplexity is measured like train.py's, with fp32 weights under autocast.
    # A fast engine prepares its own weights from those in fp32, so it is opened before the cast.
    engine = sample.open_engine("auto", model, weights) if generate else None
    cast_for_inference(model, weights)
    if mcqa:
        result["mcqa"] = evaluate_questions(model, tokenizer, parallel)
    if generate:
        result["generate"] = evaluate_generation(engine, tokenizer, folders[0], parallel, judge_model)
    return result


def cell(figures, key, digits=2):
    """A figure, with its standard error where it has one, as text; None if it is not there."""
    value, se = figures.get(key, math.nan), figures.get(f"{key}_se", math.nan)
    if isinstance(value, int):
        return f"{value:,}"
    error = "" if math.isnan(se) else f" +- {se:.{digits}f}"
    return None if math.isnan(value) else f"{value:,.{digits}f}{error}"


def print_table(columns):
    """Prints [(header, cells)] aligned, the first column to the left; those without a cell are left
    out. +- is one standard error over sequences, questions or texts."""
    columns = [[header, *cells] for header, cells in columns if any(cells)]
    columns = [["-" if text is None else str(text) for text in column] for column in columns]
    widths = [max(map(len, column)) for column in columns]
    for first, *others in zip(*columns):
        others = [text.rjust(width) for text, width in zip(others, widths[1:])]
        print("  ".join([first.ljust(widths[0]), *others]))


def print_result(result):
    """One checkpoint's figures as tables."""
    for part, columns in TABLES.items():
        rows = result.get(part, {})
        keys = [column.partition(":")[::2] for column in columns.split()]
        print_table([(part, list(rows)), *(
            (key, [cell(r, key, digits) for r in rows.values()]) for key, digits in keys)])


def print_paper_table(results):
    """Several checkpoints in the layout of tab:validation-87m-full, the paper's figures beside."""
    theirs = [paper.RESULTS.get(r["model"], [None] * 8) for r in results]
    columns = [("model", [r["model"] for r in results]), ("LR", [r["lr"] for r in results]),
               ("paper", [p[0] for p in theirs])]
    for folder in dict.fromkeys(folder for r in results for folder in r["text"]):
        name, ours = Path(folder).name, [r["text"].get(folder, {}) for r in results]
        first = dict(c4=1, paloma=4).get(name)
        for i, (key, label) in enumerate(dict(ppl="PPL", bpb="BPB", acc="acc").items()):
            columns.append((f"{name} {label}", [cell(r, key) for r in ours]))
            if first:
                columns.append(("paper", [p[first + i] for p in theirs]))
    if mcqa:
        columns.append(("MCQA", [cell(r["mcqa"]["macro"], "acc") for r in results]))
        columns.append(("paper", [p[7] for p in theirs]))
    print("\nside by side; paper: its best model of that shape")
    print_table(columns)


def check_settings():
    """Raises ConfigError or DataError, before any work, for settings that cannot work."""
    check(globals(), least=dict(sequences=1, mc=1, batch_size=1, prompt_len=1, length=1, seq_len=0,
                                limit=0, generate=0, tokens_per_step=0, seed=0, dist_timeout=1),
          choices=dict(score=("pll", "nelbo"), dtype=("auto", "float32", "bfloat16")))
    for name in ("checkpoint", "data", "tasks"):
        if not all(isinstance(word, str) and word for word in globals()[name]):
            raise ConfigError(f"{name} must be names with commas between them, but is {globals()[name]}, "
                              f"and one that is a number is written as ./5")
    if not checkpoint:
        raise ConfigError("there is nothing to evaluate; name a file with --checkpoint=PATH")
    if judge and not generate:
        raise ConfigError("a judge scores generated text; add --generate=N")
    if tasks and not mcqa:
        raise ConfigError("tasks are files of a question set; add --mcqa=FOLDER")
    check_file("out", out, rb'\{"eval"')
    if mcqa:
        task_paths(mcqa, tasks)


def as_json(results, dtype, **machine):
    """Everything as one line of JSON."""
    protocol = dict(noise="t ~ U(1e-3, 1) per block, weight 1/t, per (seed, sequence, sample)",
                    samples=mc, stratified=stratified, seed=seed, score=score, limit=limit,
                    templates="lm-evaluation-harness 4e7e0d47", batch_size=batch_size, dtype=dtype,
                    logits="float32")
    record = dict(eval="nanobdlm-1", protocol=protocol, **machine, results=results)
    return json.dumps(record).replace(": NaN", ": null")            # JSON knows no NaN


def main():
    check_settings()
    parallel, results = Parallel(device, dist_timeout), []
    half = pick_dtype(dtype, parallel.device) == torch.bfloat16
    line, machine = select_kernels(kernels, parallel.device), hardware(parallel.device)
    if parallel.rank == 0:
        print(f"{parallel.world} x {machine.get('name')} {'bf16' if half else 'fp32'} | torch "
              f"{machine['torch']} | {line} | seed {seed}, {mc} noise samples"
              f"{', stratified' if stratified else ''}", flush=True)
    for path in checkpoint[1:]:         # a mistake in the last is not to be found hours later
        open_all(path, "cpu", torch.float32)
    record = functools.partial(as_json, results, "bfloat16" if half else "float32",
                               ranks=parallel.world, kernels=line, hardware=machine)
    try:
        for path in checkpoint:
            results.append(evaluate(path, parallel, half))
            if parallel.rank == 0:
                print_result(results[-1])
                write_file(out, record() + "\n")        # each time: a crash keeps what is done
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
