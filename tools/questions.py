"""
Question sets through lm-evaluation-harness. `python eval.py --tasks` is the command; this file has no settings.

    python eval.py --checkpoint out/a --tasks hellaswag,piqa            # pip install lm_eval==0.4.13
    python eval.py --tasks mine --include_path FOLDER                   # task files of your own: docs/data.md

The paper scores answers by pseudo-likelihood, without formula or prompts. Here an answer's score is its pseudo-log-
likelihood: the sum of log p(token) over its tokens. Each is masked alone; the model sees the others, the context, and
nothing after the answer. A block model sees the answer's earlier blocks clean and its later blocks not at all.

A pair is (context, answer), two lists of tokens. Its text is both, one after the other. `texts` is the list of these,
and `number` an index into it.
"""
import itertools

import numpy as np
import torch

from configurator import UserError
from data import batches
from nelbo import masked_cross_entropy, sum_over_ranks
from parallel import progress

CHANCE = "Chance: hellaswag, arc_easy, arc_challenge 0.25; piqa, winogrande, boolq 0.5; the mean of all six 0.375."


# ----------------------------------------------------------------------------------------------
# Scores of answers

def row_batches(config, texts, rows, budget):
    """
    Sorts rows into batches of about `budget` tokens. A row (number, positions) is texts[number] with masks at these
    positions, which ascend. Yields (begin, l, rows): these run the block of l tokens that begins at `begin`, which is
    the block of each row's first position: in blocks of 6 the row (number, [10, 13]) runs the block that begins at 6. A
    full-sequence model has one block, which is the whole text.
    """
    def place_of(row):
        number, positions = row
        l = config.block_of(len(texts[number]))
        return positions[0] // l * l, l

    for (begin, l), group in itertools.groupby(sorted(rows, key=place_of), place_of):
        for part in batches(list(group), budget // (begin + l)):
            yield begin, l, part


def masked_hidden(model, texts, begin, l, rows):
    """
    Runs one batch of row_batches. Returns a list with (number, those positions of the text that lie in the block, their
    hidden states (m, d)) for each row. One row, in blocks of 6: a text of context c and answer a, masked at position M.

        c c c c c c  c c c c a a  a M a a . .
        the clean prefix          the noisy block: "." follows the text, is not known, and so is masked, too

    Positions to mask in later blocks are neither seen nor returned.
    """
    mask_id, device = model.config.mask_id, model.embed.weight.device
    masked = [[i for i in positions if i < begin + l] for _, positions in rows]
    xt = torch.full((len(rows), l), mask_id)
    for row, (number, _), at in zip(xt, rows, masked):
        known = torch.tensor(texts[number][begin:begin + l])
        row[:len(known)] = known
        row[torch.tensor(at) - begin] = mask_id
    xt = xt.to(device)                                                         # (rows, l)

    # Rows of one text have the same prefix, which is read once. different[owner[i]] is the number of row i.
    different, owner = np.unique([number for number, _ in rows], return_inverse=True)
    cache = model.new_cache(len(different), begin, l)
    model.prefill(torch.tensor([texts[i][:begin] for i in different], dtype=torch.long, device=device), cache)

    # The noise level is the masked fraction, as in sampling. Only timestep conditioning uses it.
    hidden = model.denoise_hidden(xt, cache[owner], (xt == mask_id).float().mean(1))           # (rows, l, d)
    return [(number, at, h[torch.tensor(at) - begin]) for (number, _), at, h in zip(rows, masked, hidden)]


@torch.no_grad()
def score_pairs(model, pairs, budget, parallel):
    """
    Scores pairs, about `budget` tokens at a time. Returns float64 (2, n): the pseudo-log-likelihood of each answer in
    nats, and whether the answer is greedy, 0 or 1. A collective; the ranks share the work.

    An answer is greedy if decoding gives exactly it: its positions are decoded from the context, block by block, at
    temperature 0, the most confident token first, one a step. What follows the answer in its block is not decoded.
    """
    texts, device = [[*context, *answer] for context, answer in pairs], model.embed.weight.device
    mine = range(parallel.rank, len(pairs), parallel.world)
    positions = {number: range(len(pairs[number][0]), len(texts[number])) for number in mine}  # of each answer
    score, greedy = np.zeros((2, len(pairs)))           # (n,) each; zero where another rank works

    rows = [(number, [i]) for number in mine for i in positions[number]]       # each token masked alone
    with progress(parallel, "answers", len(rows), "token") as bar:
        for batch in row_batches(model.config, texts, rows, budget):
            found = masked_hidden(model, texts, *batch)
            target = torch.tensor([texts[number][i] for number, (i,), _ in found], device=device)
            nats, _ = masked_cross_entropy(model, torch.cat([h for *_, h in found]), target)   # (rows,)
            # -= would count a repeated number only once.
            np.subtract.at(score, [number for number, *_ in found], nats.numpy())
            bar.update(len(found))

    # Decoding of an answer stops at the first token that differs. So whatever was decoded before equals the answer's
    # own tokens, and a row can take it from `texts`.
    left = {number: list(positions[number]) for number in mine}                # the positions that are still masked
    while left:
        for batch in row_batches(model.config, texts, left.items(), budget):   # an item (number, positions) is a row
            for number, at, h in masked_hidden(model, texts, *batch):
                confidence, token = model.logits(h).softmax(-1).max(-1)        # (m,) each
                best = int(confidence.argmax())
                greedy[number] = token[best] == texts[number][at[best]]
                left[number].remove(at[best])
        left = {number: masked for number, masked in left.items() if masked and greedy[number]}
    return sum_over_ranks(parallel, np.stack([score, greedy]))


# ----------------------------------------------------------------------------------------------
# Questions

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


def answer_requests(model, tokenizer, requests, parallel, batch_size):
    """Answers the harness's requests for the likelihood of an answer: [(score in nats, whether it is greedy)]. The
    requests of a question are consecutive. A collective."""
    s, questions = model.config.seq_len, itertools.groupby(requests, lambda r: (r.task_name, r.doc_id))
    encoded = [encode_question(tokenizer, [r.args for r in question], s) for _, question in questions]
    print(f"{sum(cut > 0 for _, cut in encoded)} of {len(encoded)} questions were cut on the left, to fit {s} tokens")
    pairs = [pair for pairs, _ in encoded for pair in pairs]
    score, greedy = score_pairs(model, pairs, batch_size * s, parallel)
    return [*zip(score.tolist(), (greedy == 1).tolist())]


def evaluate_tasks(model, tokenizer, parallel, tasks, include_path, limit, batch_size):
    """Prints the harness's table of these tasks, and returns its figures, {task: {metric: value}}. The arguments are
    settings of eval.py. A collective: the harness runs on every rank, and asks all of them the same."""
    from lm_eval import simple_evaluate, utils          # first: its ImportError names lm_eval itself
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

    class Adapter(LM):
        """A model as the harness sees it."""

        def loglikelihood(self, requests):
            return answer_requests(model, tokenizer, requests, parallel, batch_size)

        def loglikelihood_rolling(self, requests):
            raise UserError("a task asks for the likelihood of whole texts; use --data, which gives a bound on it")

        def generate_until(self, requests):
            raise UserError("a task asks for generated text, but eval.py only scores given answers; leave it out")

    known = TaskManager(include_path=include_path or None)
    if unknown := [name for name in tasks if not known.match_tasks([name])]:
        raise UserError(f"the harness has no task '{unknown[0]}'; python -m lm_eval ls tasks lists those that it has")
    found = simple_evaluate(Adapter(), tasks=tasks, task_manager=known, limit=limit or None)
    if found:                                           # None where LOCAL_RANK is not 0
        print(utils.make_table(found), CHANCE, sep="\n")
    return found and found["results"]
