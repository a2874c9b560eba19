"""
The NELBO of text (eq. nelbo-ppl-background). train.py's validation and eval.py's perplexity call the same function,
nelbo_sums. With the same seed, sequences, number of samples and `stratified` they draw the same noise, and give the
same number up to rounding.

    python eval.py                                              # out/ckpt.pt on its validation text
    python -m pytest tests/test_eval.py                         # its tests
"""
import numpy as np
import torch
import torch.nn.functional as F

import ops
from configurator import UserError
from data import batches, permutation
from parallel import progress

NATS, MASKED, HITS = range(3)           # the three sums of a sequence, see sequence_nelbo


# Each sequence has its own noise seed, a function of (seed, number of the sequence). So its noise does not depend on
# the batch that it is in, on the number of processes, or on where a run was resumed.

def noise_seeds(seed, numbers):
    """The noise seeds, a list of 63-bit ints. numbers: one for each sequence, such as row + 2**32 * sample."""
    return [int(np.random.SeedSequence([seed, int(i)]).generate_state(1, np.uint64)[0]) % 2 ** 63 for i in numbers]


def noise_generators(seed, numbers):
    """A list with one CPU generator for each sequence, seeded by noise_seeds."""
    return [torch.Generator().manual_seed(s) for s in noise_seeds(seed, numbers)]


def training_noise(x0, n_blocks, seed, step, rows, batch_size, stratified):
    """
    Arguments of draw_noise for `rows` of the batch_size rows of a training step, as a dict. They are a function of
    (seed, step, row). x0: the sequences (m, s) of these rows, of n_blocks blocks each. A row is one sequence; in the
    first short_iters steps of train.py it is cut into several, which draw one after the other from the row's generator.
    stratified: with n blocks in the whole step, the range of t is cut into n equal parts, and each block draws its t
    from a part of its own, in a random order.
    """
    per_row = len(x0) // len(rows)                      # sequences of a row
    generators = noise_generators(seed, [step * batch_size + row for row in rows])
    noise = dict(generator=[g for g in generators for _ in range(per_row)])
    if stratified:
        n = batch_size * per_row * n_blocks
        order = torch.from_numpy(permutation(seed, step, n)).view(batch_size, -1)        # permutation number `step`
        noise["stratum"] = (order[list(rows)].view(-1, n_blocks).to(x0.device), n)     # (i of each block, parts)
    return noise


def masked_cross_entropy(model, hidden, target, max_logits=2 ** 25):
    """
    Scores targets (m,) for hidden states (m, d). Returns -log p(target) in nats, (m,) fp64, and whether target is the
    most likely token, (m,) bool, both on the CPU. The mask token has probability 0 (the substitution parameterisation).
    Logits and log-sum-exp are fp32, or fp64 if `hidden` is, even under autocast. At most max_logits logits exist
    at a time. The training loss is of another function, ops.linear_cross_entropy, which gives only a weighted sum, with
    gradients, and may compute logits in bf16.
    """
    head = model.head.weight[:-1].to(ops.at_least_fp32(hidden.dtype))          # (v - 1, d): without the mask token
    nll, hit, most = [], [], max(1, max_logits // len(head))
    with torch.autocast(hidden.device.type, enabled=False):
        for h, y in zip(hidden.split(most), target.split(most)):
            logits = h.to(head.dtype) @ head.T                                 # (most, v - 1)
            nll.append(F.cross_entropy(logits, y, reduction="none"))
            hit.append(logits.argmax(-1) == y)
    return torch.cat(nll).cpu().double(), torch.cat(hit).cpu()                 # `cpu` before `double`: MPS has no fp64


@torch.no_grad()
def sequence_nelbo(model, x0, is_masked, t):
    """
    Scores sequences x0 (b, s) for given noise: is_masked (b, s), t (b, n_blocks). Returns (b, 3) fp64 on the CPU: for
    each sequence NATS, the NELBO of all its tokens (weight 1/t, eq. bdlm-masked-objective); MASKED, how many are
    masked; and HITS, for how many of these the true token is the model's most likely one.
    """
    hidden = model.all_block_hidden(x0, x0.masked_fill(is_masked, model.config.mask_id), t)     # (b, s, d)
    nll, hit = masked_cross_entropy(model, hidden[is_masked], x0[is_masked])   # (m,) each: all masked tokens
    is_masked, t = is_masked.cpu(), t.cpu().double()
    weight = (1 / t).repeat_interleave(x0.size(1) // t.size(1), 1)             # (b, s)
    parts = nll.new_zeros(*x0.shape, 3)                                        # (b, s, 3): 0 at tokens without a mask
    parts[is_masked] = torch.stack([nll * weight[is_masked], torch.ones_like(nll), hit.double()], 1)
    return parts.sum(1)                                                        # (b, 3)


def nelbo_sums(model, x, parallel, autocast, seed, mc, stratified=False, batch_size=8, terse=False):
    """
    sequence_nelbo of every sequence of x (n, s), for mc noise samples: float64 (n, mc, 3). Only this rank's sequences
    are filled in, the others stay zero, so the caller sums over ranks. Noise is a function of (seed, sequence, sample).

    autocast: a function that returns the context in which the model runs. stratified: the t of sample j comes from the
    j-th of mc equal parts of its range. terse: see `progress`.
    """
    sums = np.zeros((len(x), mc, 3))
    mine = [*range(parallel.rank, len(x), parallel.world)]
    with progress(parallel, "perplexity", len(mine) * mc * x.size(1), "tok", terse=terse) as bar:
        for rows in batches(mine, batch_size):
            x0 = x[rows].to(parallel.device)
            for j in range(mc):
                # The generator of sample j of sequence `row` depends on neither mc nor the number of sequences.
                generators = noise_generators(seed, [j * 2**32 + row for row in rows])
                t, is_masked = model.draw_noise(x0, generators, (j, mc) if stratified else (0, 1))
                with autocast():
                    sums[rows, j] = sequence_nelbo(model, x0, is_masked, t)
                bar.update(x0.numel())
    return sums


def sum_over_ranks(parallel, array):
    """Joins the ranks' parts of an array: each rank's array is zero where another rank did the work, so their sum has
    everything. All ranks get it. A collective: every rank must call it. Raises UserError unless all values are
    finite."""
    array = np.array(parallel.sum(array.ravel().tolist())).reshape(array.shape)
    if not np.isfinite(array).all():
        raise UserError("not finite: training failed; use an earlier checkpoint, or train again at a lower rate")
    return array
