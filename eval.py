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
import dataclasses
import json
import math
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import ops
import sample
from bench import hardware
from configurator import ConfigError, configure
from data import DataError, TokenData, get_tokenizer, sha256
from model import PAPER_PARAMS, ModelError, load_model
from prepare import TASKS, need
from train import Parallel, bits_per_byte, noise_generators

# ---------------------------------------------------------------------------------------------
# Settings
checkpoint = ["out/ckpt.pt"]            # files or folders of train.py, separated by commas
# perplexity
data = []                               # prepared folders; []: the checkpoint's, unless --mcqa
sequences = 256                         # the first of the val split, as many as there are
seq_len = 0                             # tokens of a sequence; 0: as in training, 8192 in the paper
mc = 1                                  # noise samples per sequence, and per answer with nelbo
stratified = False                      # sample j of mc draws t from the j-th of mc equal parts
# question sets
mcqa = ""                               # a folder made by python data.py mcqa
tasks = []                              # some of its tasks; []: all
score = "pll"                           # pll or nelbo (t always stratified)
limit = 0                               # only the first questions of a task; 0: all
# generated text
generate = 0                            # continuations to sample
prompt_len = 32                         # tokens of validation text that each one continues
length = 256                            # tokens of each one
tokens_per_step = 0                     # revealed per denoising step; 0: a sixteenth of a block
judge = ""                              # a second checkpoint that scores them
# system
batch_size = 8                          # sequences, or as many tokens of questions, at a time
seed = 1337
out = ""                                # also write the JSON here
device = "auto"
dtype = "auto"                          # auto: bfloat16 on CUDA, float32 elsewhere; logits are fp32
kernels = "auto"                        # auto, or torch to force the plain twins
dist_timeout = 300
# ---------------------------------------------------------------------------------------------

# tab:validation-87m-best, accuracies from -87m-full, and tab:validation-350m: learning rate, then
# perplexity, bits per byte and masked-token accuracy on C4 and on Paloma's C4, and MCQA.
PAPER = {
    "attention_87m": (8e-3, 87.64, 1.41, 12.04, 83.25, 1.39, 12.43, 35.03),
    "diffumamba_h_87m": (4e-3, 83.73, 1.39, 12.08, 80.42, 1.38, 12.50, 37.32),
    "bdlm_attention_87m": (4e-3, 76.46, 1.37, 11.29, 70.81, 1.34, 11.43, 36.31),
    "mamba_h_87m": (8e-3, 61.59, 1.30, 11.92, 58.48, 1.28, 11.99, 35.58),
    "bdlm_attention_350m": (1.23e-3, 36.97, 1.14, None, 36.14, 1.13, None, 41.28),
    "mamba_h_350m": (2.65e-3, 38.24, 1.15, None, 36.81, 1.13, None, 43.29),
}


# -- small pieces -----------------------------------------------------------------------------

def ratio(numerator, denominator):
    """Sum over sum of two arrays (n,), and its standard error over the n (nan if there is one)."""
    n, total = len(numerator), denominator.sum()
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


def progress(parallel, what, total, unit):
    """A bar with ETA on the first rank's stderr."""
    return need("tqdm").tqdm(desc=what, total=total, unit=unit, file=sys.stderr, leave=False,
                             unit_scale=True, disable=parallel.rank > 0)


def masked_cross_entropy(model, hidden, target, tile_elements=2 ** 25):
    """
    -log p(target) under the substitution parameterisation, and whether target is the most likely
    token: hidden (m, d), target (m,) -> (m,) fp64, (m,) bool. Logits and log-sum-exp are fp32 (fp64
    stays) whatever the model runs in, and at most tile_elements logits exist at a time.
    """
    dtype = ops.at_least_fp32(hidden.dtype)
    head = model.head.weight[:-1].to(dtype)             # without the mask token
    nll, hit = [], []
    with torch.autocast(hidden.device.type, enabled=False):
        for h, y in zip(*(v.split(max(1, tile_elements // len(head))) for v in (hidden, target))):
            logits = h.to(dtype) @ head.T
            nll.append(F.cross_entropy(logits, y, reduction="none").double())
            hit.append(logits.argmax(-1) == y)
    return torch.cat(nll), torch.cat(hit)


# -- perplexity -------------------------------------------------------------------------------

def draw_noise(model, x0, generators, j=0, n=1):
    """
    model.draw_noise's t (b, k) and is_masked (b, s), from one generator per sequence; with n > 1,
    t comes from the j-th of n equal parts of its range.
    """
    b, s = x0.shape
    k = s // model.block_len_for(s)
    u = torch.stack([torch.rand(k + s, generator=g) for g in generators]).to(x0.device)
    t = 1e-3 + (1 - 1e-3) * (j + u[:, :k]) / n
    return t, u[:, k:] < t.repeat_interleave(s // k, 1)


@torch.no_grad()
def sequence_nelbo(model, x0, is_masked, t):
    """
    x0, is_masked (b, s), t (b, k) -> (b, 3) fp64: the NELBO of each sequence in nats for this noise
    (weight 1/t, eq. bdlm-masked-objective), its masked tokens, and those that the model has right.
    """
    hidden = model.all_block_hidden(x0, x0.masked_fill(is_masked, model.config.mask_id), t)
    nll, hit = masked_cross_entropy(model, hidden[is_masked], x0[is_masked])
    weight = (1 / t.double()).repeat_interleave(x0.size(1) // t.size(1), 1)    # (b, s)
    row = is_masked.nonzero()[:, 0]
    parts = torch.stack([nll * weight[is_masked], torch.ones_like(nll), hit.double()], 1)
    return parts.new_zeros(len(x0), 3).index_add(0, row, parts)


def nelbo_counts(model, x, parallel, autocast, seed, mc, stratified=False, batch_size=8):
    """
    sequence_nelbo of x (n, s) for mc noise samples: float64 (n, mc, 3), zero for the sequences of
    other ranks. Noise is a function of (seed, sequence, sample) and of nothing else.
    """
    counts = np.zeros((len(x), mc, 3))
    mine = range(parallel.rank, len(x), parallel.world)
    with progress(parallel, "perplexity", len(mine) * mc * x.size(1), "tok") as bar:
        for i in range(0, len(mine), batch_size):
            rows = list(mine[i:i + batch_size])
            x0 = x[rows].to(parallel.device)
            for j in range(mc):
                generators = noise_generators(seed, [j << 32 | row for row in rows])
                t, is_masked = draw_noise(model, x0, generators, *(j, mc) if stratified else ())
                with autocast():
                    counts[rows, j] = sequence_nelbo(model, x0, is_masked, t).cpu()
                bar.update(x0.numel())
    return counts


def nelbo_figures(counts, tokens, n_bytes):
    """
    counts (n, mc, 3) as above, tokens and n_bytes (n,) of the sequences -> a dict. `nelbo_se` holds
    text and noise. `nelbo_se_noise`, known from mc = 2 on, is what another seed would change; with
    stratified noise it is a bound, as the strata differ.
    """
    nats, masked, hits = counts.mean(1).T
    nelbo, se = ratio(nats, tokens)
    acc, acc_se = ratio(hits, masked)
    n, mc, _ = counts.shape
    noise = counts[..., 0].var(1, ddof=1).sum() / mc if mc > 1 else math.nan
    ppl = math.exp(min(nelbo, 700))
    return dict(nelbo=nelbo, nelbo_se=se, nelbo_se_noise=math.sqrt(noise) / tokens.sum(),
                ppl=ppl, ppl_se=ppl * se, acc=100 * acc, acc_se=100 * acc_se,
                bpb=bits_per_byte(nelbo, tokens.sum(), n_bytes.sum()),
                bpb_se=ratio(nats, n_bytes)[1] / math.log(2), sequences=n, samples=mc,
                tokens=int(tokens.sum()), bytes=int(n_bytes.sum()),
                bytes_per_token=n_bytes.sum() / tokens.sum())


def evaluate_text(model, tokenizer, folder, parallel, autocast):
    """NELBO, perplexity, bits per byte and masked-token accuracy on a prepared folder: a dict."""
    text = TokenData(folder, "val", tokenizer.name)
    s = seq_len or model.config.seq_len
    model.block_len_for(s)
    x, started = text.sequences(s, sequences), time.time()
    counts = nelbo_counts(model, x, parallel, autocast, seed, mc, stratified, batch_size)
    counts, n_bytes = gather(parallel, counts), text.sequence_bytes(s, sequences).numpy()
    seconds = time.time() - started
    figures = nelbo_figures(counts, np.full(len(x), s), n_bytes)
    ends = x == tokenizer.eot_token
    return dict(figures, seq_len=s, documents=int(ends.sum()) + int(not ends[-1, -1]),
                seconds=seconds, tok_per_s=x.numel() * mc / seconds)


# -- answers ----------------------------------------------------------------------------------
# A question is (context, answers): tokens, and for each choice its (context, answer).

@dataclasses.dataclass
class Part:
    """The part of an answer that lies in one active block."""
    owner: tuple                        # (question, choice)
    prefix: tuple                       # clean tokens before the block: whole blocks
    tokens: list                        # of the block, up to the answer's end; after it come masks
    first: int                          # the first of them that belongs to the answer
    at: int                             # its place in the answer, another for every block


def answer_parts(config, owner, context, answer):
    """The parts of one answer, in order: one per block, or one in all for a full-sequence model."""
    n, whole = len(context), [*context, *answer]
    l = len(whole) if config.full_sequence else config.block_len
    return [Part(owner, tuple(whole[:start]), whole[start:start + l], max(n - start, 0),
                 max(start - n, 0)) for start in range(n // l * l, len(whole), l)]


def maskings(part, noise):
    """
    [(offsets that are masked and scored, weight of their sum)]. noise None (pll): each answer token
    alone. Else noise (mc, 2, m) uniform, for answers of at most m tokens: sample j masks an answer
    token with probability t, weighted 1/t; t is drawn per block, stratified over the samples.
    """
    offsets = range(part.first, len(part.tokens))
    if noise is None:
        return [([i], 1.0) for i in offsets]
    mc = len(noise)
    levels = 1e-3 + (1 - 1e-3) * (np.arange(mc) + noise[:, 0, part.at]) / mc
    drawn = noise[:, 1, part.at:part.at + len(offsets)] < levels[:, None]
    return [([part.first + i for i in row.nonzero()[0]], 1 / (t * mc))
            for row, t in zip(drawn, levels) if row.any()]


@torch.no_grad()
def score_rows(model, cache, rows, length, nll):
    """
    Adds weight * -log p of the masked answer tokens of every row to nll[question, choice]. rows:
    [(row of the cache, part, offsets, weight)], all with active blocks of `length` tokens. A model
    with timestep conditioning is told the block's masked fraction, as in sampling.
    """
    mask_id, dev = model.config.mask_id, cache.lengths.device
    xt, hits = np.full((len(rows), length), mask_id), []
    for i, (_, part, offsets, weight) in enumerate(rows):
        xt[i, :len(part.tokens)] = part.tokens
        xt[i, offsets] = mask_id
        hits += [(i, j, part.tokens[j], part.owner, weight) for j in offsets]
    row, at, target, owners, weights = zip(*hits)
    index = torch.tensor([r[0] for r in rows], device=dev)
    mine = dataclasses.replace(cache, lengths=cache.lengths[index], layers=[
        tuple(part[index] for part in state) for state in cache.layers])
    xt = torch.from_numpy(xt).to(dev)
    hidden = model.denoise_hidden(xt, mine, (xt == mask_id).float().mean(1))   # (rows, length, d)
    hidden, target = hidden[list(row), list(at)], torch.tensor(target, device=dev)
    scored = masked_cross_entropy(model, hidden, target)[0].cpu().numpy()
    np.add.at(nll, tuple(np.array(owners).T), scored * np.array(weights))


def score_answers(model, questions, parallel, rule, seed, mc, budget, what="answers"):
    """
    -log p of every choice, or its bound: float64 (questions, most choices) in nats, on all ranks.

    questions: [[(context, answer), one per choice]], lists of tokens. rule "pll" or "nelbo"; noise
    is a function of (seed, question), the same for all its choices. A distinct prefix is read once.
    """
    nll = np.zeros((len(questions), max(map(len, questions))))
    by_size = sorted(range(len(questions)), key=lambda q: sum(map(len, questions[q][0])))
    mine = by_size[parallel.rank::parallel.world]
    with progress(parallel, what, len(mine), "question") as bar:
        for i in range(0, len(mine), 256):              # bounds what is prepared at a time
            groups, some = {}, mine[i:i + 256]
            for q in some:
                add_question(groups, model.config, q, questions[q], rule, seed, mc)
            total = sum(len(rows) for group in groups.values() for rows in group.values())
            for (prefix_len, length), prefixes in sorted(groups.items()):
                at_a_time = max(1, budget // (prefix_len + length))
                for cache, rows in prefilled(model, prefixes, prefix_len, length, at_a_time):
                    score_rows(model, cache, rows, length, nll)
                    bar.update(min(len(rows) * len(some) / total, len(mine) - bar.n))
    return gather(parallel, nll)


def add_question(groups, config, q, choices, rule, seed, mc):
    """Sorts one question's maskings into groups {(prefix length, block length): {prefix: rows}}."""
    noise = None
    if rule == "nelbo":
        generator, = noise_generators(seed, [q])
        longest = max(len(answer) for _, answer in choices)
        noise = torch.rand(mc, 2, longest, generator=generator).double().numpy()
    for c, (context, answer) in enumerate(choices):
        for part in answer_parts(config, (q, c), context, answer):
            length = len(part.tokens) if config.full_sequence else config.block_len
            rows = groups.setdefault((len(part.prefix), length), {}).setdefault(part.prefix, [])
            rows += [(part, *masking) for masking in maskings(part, noise)]


def prefilled(model, prefixes, prefix_len, length, at_a_time):
    """
    Yields (cache, rows), at_a_time rows of each. The prefixes {tokens: [(part, offsets, weight)]}
    are all prefix_len long, and each is read once. A row now begins with its place in the cache.
    """
    keys, dev = list(prefixes), model.embed.weight.device
    for i in range(0, len(keys), at_a_time):
        batch = keys[i:i + at_a_time]
        cache = model.new_cache(len(batch), prefix_len, length)
        model.prefill(torch.tensor(batch, dtype=torch.long, device=dev), cache)
        rows = [(place, *row) for place, key in enumerate(batch) for row in prefixes[key]]
        for j in range(0, len(rows), at_a_time):
            yield cache, rows[j:j + at_a_time]


# -- question sets ----------------------------------------------------------------------------

def check_question(row):
    """(contexts, choices, gold) of a row of a prepared question set. Raises ValueError."""
    try:
        choices, gold = row["choices"], row.get("gold")
        contexts = row.get("contexts") or [row["context"]] * len(choices)
        if len(contexts) != len(choices) or len(choices) < 2 or "" in map(str.strip, choices):
            raise TypeError
        "".join(contexts)                               # they are text
    except (KeyError, TypeError, AttributeError):
        raise ValueError("not a prepared question with two answers or more: run python data.py "
                         "mcqa") from None
    if type(gold) is not int or not 0 <= gold < len(choices):
        raise ValueError(f"no gold answer: give it as \"gold\", 0 to {len(choices) - 1}")
    return contexts, choices, gold


def encode_choices(tokenizer, contexts, choices, max_len):
    """
    ([(context, answer), one per choice], tokens cut). Context and choice are encoded as one string,
    which is split where the context alone ends; a context's trailing spaces belong to the choice.
    Contexts are cut on the left, all alike, so that the longest choice fits max_len.
    """
    pairs = []
    for context, choice in zip(contexts, choices):
        n = len(tokenizer.encode_ordinary(context.rstrip(" ")))
        whole = tokenizer.encode_ordinary(context + choice)
        if len(whole) <= n:
            raise ValueError(f"the answer {choice!r} has no tokens: mend or remove the row")
        pairs.append((whole[:n], whole[n:]))
    room = max(0, max_len - max(len(answer) for _, answer in pairs))
    cut = max(0, max(len(context) for context, _ in pairs) - room)
    return [(context[cut:], answer) for context, answer in pairs], cut


def load_questions(path, tokenizer, max_len, limit=0):
    """The questions of a prepared <task>.jsonl. Raises DataError with the line of a bad one."""
    questions = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        try:
            if line.strip() and not 0 < limit <= len(questions):
                contexts, choices, gold = check_question(json.loads(line))
                pairs, cut = encode_choices(tokenizer, contexts, choices, max_len)
                questions.append(dict(pairs=pairs, cut=cut, choices=choices, gold=gold))
        except ValueError as error:                     # JSON's too
            raise DataError(f"{path}:{number}: {error}") from None
    if not questions:
        raise DataError(f"{path} holds no questions: run python data.py mcqa again")
    return questions


def credit(scores, gold):
    """Scores (n, c), -inf for choices that a question lacks, gold (n,) -> (n,): 1 if the gold score
    is the best, 1/m if it is one of m equally good ones."""
    best = scores == scores.max(1, keepdims=True)
    return best[np.arange(len(gold)), gold] / best.sum(1)


def task_figures(questions, nll, normalise=True):
    """
    A task's figures from nll (n, c), in percent, with standard errors over questions. acc_norm
    divides by a choice's characters if `normalise`. Baselines: chance; majority, always the same
    choice; uniform, a model to which all tokens are equally likely: the fewest tokens win.
    """
    gold, n = np.array([q["gold"] for q in questions]), len(questions)
    exists, chars, tokens = np.zeros_like(nll, dtype=bool), np.ones_like(nll), np.zeros_like(nll)
    for i, q in enumerate(questions):
        count = len(q["choices"])
        exists[i, :count], tokens[i, :count] = True, [len(answer) for _, answer in q["pairs"]]
        if normalise:
            chars[i, :count] = [len(choice.removeprefix(" ")) for choice in q["choices"]]
    figures = dict(questions=n, tokens=int(tokens.sum()), cut=sum(q["cut"] > 0 for q in questions))
    for name, cost in (("acc", nll), ("acc_norm", nll / chars), ("uniform", tokens)):
        right = credit(np.where(exists, -cost, -np.inf), gold)
        figures[name], figures[f"{name}_se"] = (100 * x for x in ratio(right, np.ones(n)))
    return dict(figures, chance=float(100 * (1 / exists.sum(1)).mean()),
                majority=float(100 * np.bincount(gold).max() / n))


def task_paths(folder, wanted):
    """{task: path} of a folder of question sets. Raises DataError for a missing or misnamed one."""
    found = {path.stem: path for path in Path(folder).glob("*.jsonl")}
    for name in [*wanted, *found]:
        if name not in TASKS:
            raise DataError(f"{name} is no task: the files of {folder} and --tasks are named "
                            f"after {', '.join(TASKS)}")
    missing = [name for name in wanted or found or ["question set"] if name not in found]
    if missing:
        raise DataError(f"{folder} holds no {missing[0]}: run python data.py mcqa --out {folder}")
    return {name: found[name] for name in TASKS if name in (wanted or found)}


def evaluate_questions(model, tokenizer, parallel):
    """Every task of the folder `mcqa`, and the macro-average: {task: figures}."""
    results, budget = {}, batch_size * model.config.seq_len
    for name, path in task_paths(mcqa, tasks).items():
        started = time.time()
        questions = load_questions(path, tokenizer, model.config.seq_len, limit)
        nll = score_answers(model, [q["pairs"] for q in questions], parallel, score, seed, mc,
                            budget, name)
        # As in lm-evaluation-harness, yes and no, and one shared suffix, are not normalised.
        r = task_figures(questions, nll, name not in ("boolq", "winogrande"))
        seconds = time.time() - started
        r.update(sha256=sha256(path), seconds=seconds, tok_per_s=r["tokens"] / seconds)
        results[name] = r
    of = lambda key: np.array([r[key] for r in results.values()])
    macro = dict(questions=int(of("questions").sum()))
    for key in ("acc", "acc_norm", "uniform"):
        macro[f"{key}_se"] = float(np.sqrt(np.square(of(f"{key}_se")).sum()) / len(results))
    for key in ("acc", "acc_norm", "chance", "majority", "uniform"):
        macro[key] = float(of(key).mean())
    return dict(results, macro=macro)


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


def continuations(model, prompts, parallel):
    """A continuation by `length` tokens of each prompt (n, m): int64 (n, length), on all ranks."""
    n, m = prompts.shape
    c, made = model.config, np.zeros((n, length))
    block = m + length if c.full_sequence else c.block_len
    mine = range(parallel.rank, n, parallel.world)
    with progress(parallel, "generation", len(mine) * length, "tok") as bar:
        for i in range(0, len(mine), batch_size):
            rows = list(mine[i:i + batch_size])
            sampler = sample.Sampler(noise_generators(seed, rows), mask_id=c.mask_id,
                                     tokens_per_step=tokens_per_step or max(block // 16, 1))
            done = sample.generate(model, list(prompts[rows]), length, sampler)
            made[rows] = torch.stack(done.tokens)[:, m:].cpu()
            bar.update(len(rows) * length)
    return gather(parallel, made).astype(np.int64)


def evaluate_generation(model, tokenizer, folder, parallel, half):
    """
    Continuations of validation text beside that text's own: {"generated", "validation": figures}.
    With a judge, also both's NELBO under it given the prompt, in nats per token. Standard errors
    are over texts.
    """
    windows = TokenData(folder, "val", tokenizer.name).sequences(prompt_len + length, generate)
    prompts, real = windows[:, :prompt_len], windows[:, prompt_len:].tolist()
    other = None
    if judge:
        other, theirs, _ = open_checkpoint(judge, parallel.device)
        other = other.to(torch.bfloat16) if half else other
        if theirs.name != tokenizer.name:
            raise ConfigError(f"the judge reads {theirs.name} tokens and the model writes "
                              f"{tokenizer.name} tokens; choose a judge with the same tokenizer")
    results, started = {}, time.time()
    made = continuations(model, prompts, parallel).tolist()
    seconds = time.time() - started
    for name, texts in dict(generated=made, validation=real).items():
        figures = [text_figures(text) for text in texts]
        if other:
            pairs, budget = zip(prompts.tolist(), texts), batch_size * other.config.seq_len
            nats = score_answers(other, [[pair] for pair in pairs], parallel, "nelbo", seed, mc,
                                 budget, "judge")[:, 0]
            figures = [dict(f, nelbo=n / length) for f, n in zip(figures, nats)]
        results[name] = dict(texts=len(texts))
        for key in figures[0]:
            value, se = ratio(np.array([f[key] for f in figures]), np.ones(len(texts)))
            results[name].update({key: value, f"{key}_se": se})
    results["generated"].update(seconds=seconds, tok_per_s=len(made) * length / seconds)
    return results


# -- the script -------------------------------------------------------------------------------

def paper_name(model):
    """The name of the config that the model has the shape of, or just its kind."""
    c = model.config
    kind = ("diffumamba_h" if c.full_sequence else "mamba_h") if c.hybrid else \
        ("attention" if c.full_sequence else "bdlm_attention")
    same = [name for name, millions in PAPER_PARAMS.items() if name.rsplit("_", 1)[0] == kind
            and f"{model.n_params / 1e6:.2f}" == f"{millions:.2f}"]
    return same[0] if same else kind


def open_checkpoint(path, dev):
    """(model, tokenizer, what is known of it) of a checkpoint file or a folder with a ckpt.pt."""
    path = os.path.join(path, "ckpt.pt") if os.path.isdir(path) else path
    model, record = load_model(path, dev)
    name, settings = record.get("tokenizer"), record.get("settings", {})
    if name is None or get_tokenizer(name).n_vocab != model.config.vocab_size:
        raise ModelError(f"{path} has {model.config.vocab_size} token ids, not those of its "
                         f"tokenizer, {name}; use a checkpoint made by train.py")
    return model, get_tokenizer(name), dict(
        checkpoint=path, model=paper_name(model), parameters=model.n_params, tokenizer=name,
        step=record.get("step"), lr=settings.get("learning_rate"), data=settings.get("data"))


def evaluate(path, parallel, half):
    """All that the settings ask for of one checkpoint, printed as tables: a dict."""
    def autocast():
        return torch.autocast(parallel.device.type, torch.bfloat16, enabled=half)
    model, tokenizer, result = open_checkpoint(path, parallel.device)
    folders = data or [result["data"] or "data/stdlib"]
    result["text"] = {}
    if parallel.rank == 0:
        result["sha256"] = sha256(result["checkpoint"])
        print(f"\n{result['checkpoint']}: {result['model']}, {model.n_params:,} parameters, step "
              f"{result['step']}, {tokenizer.name} tokens, sha256 {result['sha256'][:12]}")
    for folder in folders if data or not mcqa else []:
        result["text"][folder] = evaluate_text(model, tokenizer, folder, parallel, autocast)
    # The cache has the dtype of the weights, so what goes through it runs with weights in bf16, as
    # sample.py does; perplexity is measured like train.py's, with fp32 weights under autocast.
    model = model.to(torch.bfloat16) if half else model
    if mcqa:
        result["mcqa"] = evaluate_questions(model, tokenizer, parallel)
    if generate:
        result["generate"] = evaluate_generation(model, tokenizer, folders[0], parallel, half)
    if parallel.rank == 0:
        show("text", result["text"], "ppl:2 bpb:4 acc:2 nelbo:4 nelbo_se_noise:4 bytes_per_token:3 "
             "documents tokens tok_per_s:0")
        show("task", result.get("mcqa", {}), "acc:2 acc_norm:2 chance:2 majority:2 uniform:2 "
             "questions tokens cut tok_per_s:0")
        show("generation", result.get("generate", {}), "texts entropy:3 distinct_1:3 distinct_2:3 "
             "distinct_3:3 repetition:3 nelbo:3 tok_per_s:0")
    return result


def cell(figures, key, digits="2"):
    """A figure, with its standard error where it has one, as text; None if it is not there."""
    value, se = figures.get(key), figures.get(f"{key}_se", math.nan)
    if value is None or isinstance(value, int):
        return value and f"{value:,}"
    return f"{value:,.{digits}f}" + (f" +- {se:.{digits}f}" if se == se else "")


def show(what, results, columns):
    """Prints {name: figures} as a table. columns: "key:digits ..."; those without a figure are left
    out. +- is one standard error over sequences, questions or texts."""
    table = {key: [cell(r, key, digits) for r in results.values()]
             for key, _, digits in (column.partition(":") for column in columns.split())}
    table = {what: list(results)} | {key: cells for key, cells in table.items() if any(cells)}
    print_table(list(table), zip(*table.values()))


def print_table(header, rows):
    """Prints rows of text under a header: the first column to the left, the others to the right."""
    rows = [["-" if text is None else str(text) for text in row] for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*rows)]
    for first, *others in rows if len(rows) > 1 else []:
        others = [text.rjust(width) for text, width in zip(others, widths[1:])]
        print("  ".join([first.ljust(widths[0]), *others]))


def print_paper_table(results):
    """Several checkpoints in the layout of tab:validation-87m-full, the paper's figures beside."""
    folders = list(dict.fromkeys(name for r in results for name in r["text"]))
    header, rows = ["model", "LR", "paper"], []
    for name in folders:
        header += [f"{Path(name).name} PPL", "paper", "BPB", "paper", "acc", "paper"]
    for r in results:
        lr, *theirs = PAPER.get(r["model"], [None] * 8)
        rows.append([r["model"], r["lr"], lr])
        for name in folders:
            at = dict(c4=0, paloma=3).get(Path(name).name)
            for i, key in enumerate(("ppl", "bpb", "acc")):
                rows[-1] += [cell(r["text"].get(name, {}), key)]
                rows[-1] += [None if at is None else theirs[at + i]]
        rows[-1] += [cell(r["mcqa"]["macro"], "acc"), theirs[6]] if mcqa else []
    print("\nbeside the paper's best model of each kind")
    print_table(header + ["MCQA", "paper"] * bool(mcqa), rows)


def check_settings():
    """Raises ConfigError for settings that cannot work."""
    for name in ("sequences", "mc", "batch_size", "prompt_len", "length"):
        if globals()[name] < 1:
            raise ConfigError(f"{name} is {globals()[name]}; it is at least 1")
    for name, choices in (("score", ("pll", "nelbo")), ("dtype", ("auto", "float32", "bfloat16"))):
        if globals()[name] not in choices:
            raise ConfigError(f"{name} is '{globals()[name]}'; it is one of {', '.join(choices)}")
    if not checkpoint:
        raise ConfigError("there is nothing to evaluate; name a file with --checkpoint=PATH")


def main():
    check_settings()
    parallel = Parallel(device, dist_timeout)
    half = dtype == "bfloat16" or (dtype == "auto" and parallel.device.type == "cuda")
    line, machine = ops.select_kernels(kernels, parallel.device), hardware(parallel.device)
    if parallel.rank == 0:
        print(f"{parallel.world} x {machine.get('name')} {'bf16' if half else 'fp32'} | torch "
              f"{machine['torch']} | {line} | seed {seed}, {mc} noise samples"
              f"{', stratified' if stratified else ''}", flush=True)
    results = [evaluate(path, parallel, half) for path in checkpoint]
    if parallel.rank == 0:
        if len(results) > 1:
            print_paper_table(results)
        protocol = dict(noise="t ~ U(1e-3, 1) per block, weight 1/t, per (seed, sequence, sample)",
                        samples=mc, stratified=stratified, seed=seed, score=score, limit=limit,
                        templates="lm-evaluation-harness 4e7e0d47", batch_size=batch_size,
                        dtype="bfloat16" if half else "float32", logits="float32")
        record = dict(eval="nanobdlm-1", protocol=protocol, ranks=parallel.world, kernels=line,
                      hardware=machine, results=results)
        text = json.dumps(record).replace(": NaN", ": null")        # JSON knows no NaN
        print(text)
        if out:
            Path(out).write_text(text + "\n")
    parallel.close()


if __name__ == "__main__":
    try:
        configure(globals())
        main()
    except (ConfigError, DataError, ModelError, ops.KernelError) as error:
        sys.exit(f"eval.py: {error}")
