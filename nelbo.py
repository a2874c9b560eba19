"""
The NELBO of text (eq. nelbo-ppl-background), by one function with one noise: train.py's validation and eval.py's
perplexity are the same number.

    python eval.py                                              # out/ckpt.pt on the text it knows
    python -m pytest tests/test_eval.py                         # what is claimed here, shown
"""
import sys

import numpy as np
import torch
import torch.nn.functional as F

import ops
from configurator import tqdm
from data import batches, noise_generators


def progress(parallel, what, total, unit, terse=False):
    """A progress bar with ETA on rank 0's stderr. In a file it moves every 30 seconds. terse: only on a terminal, and
    only after three seconds."""
    terminal = sys.stderr.isatty()
    return tqdm(desc=what, total=total, unit=unit, file=sys.stderr, leave=False, unit_scale=True,
                mininterval=0.2 if terminal else 30, delay=3 if terse else 0,
                disable=parallel.rank > 0 or terse and not terminal)


def masked_cross_entropy(model, hidden, target, tile_elements=2 ** 25):
    """
    -log p(target) under the substitution parameterisation, and whether target is the most likely
    token: hidden (m, d), target (m,) -> (m,) fp64, (m,) bool, both on the CPU. Logits and log-sum-exp are
    fp32 (fp64 stays) whatever the model runs in, and at most tile_elements logits exist at a time.
    """
    dtype = ops.at_least_fp32(hidden.dtype)
    head = model.head.weight[:-1].to(dtype)             # without the mask token
    nll, hit = [], []
    with torch.autocast(hidden.device.type, enabled=False):
        for h, y in zip(*(v.split(max(1, tile_elements // len(head))) for v in (hidden, target))):
            logits = h.to(dtype) @ head.T
            nll.append(F.cross_entropy(logits, y, reduction="none"))
            hit.append(logits.argmax(-1) == y)
    return torch.cat(nll).cpu().double(), torch.cat(hit).cpu()                 # MPS has no fp64


@torch.no_grad()
def sequence_nelbo(model, x0, is_masked, t):
    """
    x0, is_masked (b, s), t (b, k) -> (b, 3) fp64: the NELBO of each sequence in nats for this noise
    (weight 1/t, eq. bdlm-masked-objective), its masked tokens, and those that the model has right.
    """
    hidden = model.all_block_hidden(x0, x0.masked_fill(is_masked, model.config.mask_id), t)
    nll, hit = masked_cross_entropy(model, hidden[is_masked], x0[is_masked])
    is_masked, t = is_masked.cpu(), t.cpu().double()
    weight = (1 / t).repeat_interleave(x0.size(1) // t.size(1), 1)             # (b, s)
    parts = torch.stack([nll * weight[is_masked], torch.ones_like(nll), hit.double()], 1)
    return parts.new_zeros(len(x0), 3).index_add(0, is_masked.nonzero()[:, 0], parts)


def nelbo_counts(model, x, parallel, autocast, seed, mc, stratified=False, batch_size=8, stop=None):
    """
    sequence_nelbo of every sequence of x (n, s), for mc noise samples: float64 (n, mc, 3), zero for the sequences of
    other ranks. Noise is a function of (seed, sequence, sample) alone. stratified: the t of sample j comes from the
    j-th of mc equal parts of its range. stop: the list of signals that train.py has received. With one process, a
    signal ends the work, and None is returned; with more, all ranks must go on to the end together.
    """
    counts = np.zeros((len(x), mc, 3))
    mine = range(parallel.rank, len(x), parallel.world)
    with progress(parallel, "perplexity", len(mine) * mc * x.size(1), "tok", terse=stop is not None) as bar:
        for rows in batches(mine, batch_size):
            if stop and parallel.world == 1:
                return None
            x0 = x[list(rows)].to(parallel.device)
            for j in range(mc):
                generators = noise_generators(seed, [j << 32 | row for row in rows])
                t, is_masked = model.draw_noise(x0, generators, (j, mc) if stratified else (0, 1))
                with autocast():
                    counts[rows, j] = sequence_nelbo(model, x0, is_masked, t)
                bar.update(x0.numel())
    return counts
