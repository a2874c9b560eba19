"""
What a denoising step reveals: the rules by which masked tokens of a block become known, shared by the plain engine
in sample.py and the fast one in fast/decoder.py.

  random         the next p positions of a random order; p = 1 is exact ancestral sampling
  confidence     the p positions whose drawn token is most probable
  threshold      all positions whose drawn token has at least this probability, and always the most probable one
  first_hitting  one random position, at the time at which the reverse process first unmasks one

A new decoder goes into `ActiveBlock.reveal`.

    python -m pytest tests/test_sample.py -k "distribution or ancestral or first_hitting"
"""
import dataclasses

import torch

import ops
from configurator import ConfigError, check

ORDERS = ("random", "confidence", "threshold", "first_hitting")
LOGITS = 2 ** 24                        # logits of a row that exist at a time, where all positions need them
ORDER, TIME = -1, -2                    # stream ids of ops.uniform; token draws use ids >= 0


def check_decoder(settings):
    """Raises ConfigError for the first of a Sampler's settings, a dict, that makes no sense."""
    check(settings, least=dict(tokens_per_step=1, threshold=0, temperature=0, top_k=0),
          most=dict(threshold=1, top_p=1), above=dict(top_p=0), choices=dict(order=ORDERS))


@dataclasses.dataclass
class Sampler:
    """
    How masked tokens become text. `seeds`: an int64 for each row. A draw is a function of its row's seed, of
    position and step (see ops.uniform), so rows, or calls, with the same seed and prompt come out alike.
    """
    seeds: list
    order: str = "random"
    tokens_per_step: int = 16
    threshold: float = 0.9
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    mask_id: int = None

    def __post_init__(self):
        check_decoder(vars(self))
        if not self.seeds:
            raise ConfigError("there are no seeds; give one for each row")
        for seed in self.seeds:
            if not isinstance(seed, int) or not -2 ** 63 <= seed < 2 ** 63:
                raise ConfigError(f"a seed must be a whole number of at most 63 bits, but one is {seed}")
        if self.order == "first_hitting":
            self.tokens_per_step = 1

    def pick(self, logits, at, *key):
        """Draws tokens (b, m) from logits (b, m, v - 1) of the positions at (b, m), after temperature and cuts.
        key: seed, step and begin of ops.gumbel_argmax."""
        if self.temperature == 0:
            return logits.argmax(-1)
        if self.temperature != 1:
            logits = logits.double() / self.temperature
        return ops.gumbel_argmax(cut(logits, self.top_k, self.top_p), at, *key)


def cut(logits, top_k, top_p):
    """Sets all but the top_k tokens, and all past the one that crosses mass top_p, to -inf."""
    if top_k:
        kth = logits.topk(min(top_k, logits.size(-1)), -1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if top_p < 1:
        ordered, index = logits.double().sort(-1, descending=True)
        p = ordered.softmax(-1)
        before = p.cumsum(-1) - p                       # mass ahead of a token: 0 for the first
        drop = torch.zeros_like(before, dtype=torch.bool).scatter(-1, index, before >= top_p)
        logits = logits.masked_fill(drop, float("-inf"))
    return logits


class ActiveBlock:
    """
    The block being unmasked and how far it has come. A step is `noise_level`, then a forward pass, then `reveal`.
    These keep shapes fixed, write in place and never wait for the device, so one step can be a CUDA graph.
    """

    def __init__(self, b, l, sampler, device, timed):
        """b rows of l tokens; timed: whether the model is conditioned on t."""
        self.sampler, self.p, self.timed = sampler, min(sampler.tokens_per_step, l), timed
        self.xt = torch.full((b, l), sampler.mask_id, device=device)           # known tokens, or the mask
        self.t = torch.ones(b, dtype=torch.float64, device=device)
        # A permutation of the l positions, and padding, so that the next p can always be read. The padding repeats
        # the first position, which is known by then, and known positions are skipped.
        self.order = torch.arange(l + -l % self.p + self.p, device=device).repeat(b, 1) % l
        self.at = self.order[:, :self.p].clone()        # (b, p) what the next step reveals
        # step (b,): entries of `order` that are used up. begin (b,): tokens before the block. A draw is a function of
        # seed, position, step and begin.
        self.step, self.begin = torch.zeros(2, b, dtype=torch.long, device=device)
        self.key = torch.tensor(sampler.seeds, device=device), self.step, self.begin

    def start(self, xt, begin):
        """Takes on xt (b, l), known tokens or the mask, which `begin` (b,) tokens precede."""
        l, masked = xt.size(1), xt == self.sampler.mask_id
        self.xt.copy_(xt)
        self.begin.copy_(begin)
        self.step.zero_()
        self.t.copy_(masked.double().mean(1))
        if self.sampler.order in ("random", "first_hitting"):
            ranks = ops.uniform(l, ORDER, *self.key)                           # (b, l)
            self.order[:, :l] = ranks.masked_fill(~masked, 2).argsort(1)       # ranks are below 1: known tokens last
            self.order[:, l:] = self.order[:, :1]
            self.at.copy_(self.order[:, :self.p])

    def steps(self, counts):
        """Yields before every step that the block needs. counts: masked tokens of each row at the start. Only
        order=threshold has to ask the device, before each step, whether a mask is left."""
        if self.sampler.order == "threshold":
            while (self.xt == self.sampler.mask_id).any():
                yield
        else:
            yield from range(-(-max(counts) // self.p))

    def rewind(self):
        """Back to the first step of the order."""
        self.step.zero_()
        self.at.copy_(self.order[:, :self.p])

    def noise_level(self):
        """t (b,) fp64 of the step that begins: the masked fraction of each row, which is what t means on average;
        first_hitting draws it. None if the model takes no t."""
        if not self.timed:
            return None
        masked = self.xt == self.sampler.mask_id
        if self.sampler.order == "first_hitting":       # the largest of m uniforms on (0, t) is t u^(1/m)
            u = ops.uniform(1, TIME, *self.key)[:, 0]
            self.t *= u ** (1 / masked.sum(1).clamp(min=1))
        else:
            self.t.copy_(masked.double().mean(1))
        return self.t.clone()

    def positions(self):
        """(b, p) the positions that this step reveals, if they are known before the forward pass: only these need
        logits. None if all positions compete."""
        return self.at if self.sampler.order in ("random", "first_hitting") else None

    def reveal(self, logits_of):
        """Makes some tokens known. logits_of(at (b, m)) -> logits (b, m, v - 1), without the mask's, of these
        positions of the block."""
        sampler, at = self.sampler, self.positions()
        if at is not None:
            drawn = sampler.pick(logits_of(at), at, *self.key)
            unmask(self.xt, at, drawn, sampler.mask_id, self.order, self.step)
        else:
            masked = self.xt == sampler.mask_id
            drawn, chosen = self.surest(logits_of, masked)
            torch.where(chosen & masked, drawn, self.xt, out=self.xt)
            self.step += self.p                         # by p however many were revealed: no two steps draw alike

    def surest(self, logits_of, masked):
        """Draws a token for every position. Returns drawn and chosen, both (b, l): chosen marks the positions to
        reveal. Logits are made for a few positions at a time, since a window may have 65,536."""
        sampler, drawn, sure = self.sampler, [], []
        positions = torch.arange(masked.size(1), device=masked.device).expand_as(masked)
        for at in positions.split(max(1, LOGITS // (sampler.mask_id + 1)), 1):
            logits = logits_of(at)                                             # (b, m, v - 1)
            drawn.append(sampler.pick(logits, at, *self.key))
            p = logits.softmax(-1, dtype=ops.at_least_fp32(logits.dtype))
            sure.append(p.gather(2, drawn[-1][..., None])[..., 0])
        drawn, sure = (x[0] if len(x) == 1 else torch.cat(x, 1) for x in (drawn, sure))
        sure = torch.where(masked, sure, -1)            # known positions never win
        if sampler.order == "threshold":
            return drawn, (sure >= sampler.threshold) | (positions == sure.argmax(1, keepdim=True))
        return drawn, torch.zeros_like(masked).scatter_(1, sure.topk(self.p, 1).indices, True)


@ops.replaceable
def unmask(xt, at, drawn, mask_id, order, step):
    """
    Writes drawn (b, p) at the positions at (b, p) of xt (b, l) that hold mask_id, and moves on: step (b,) grows by
    p, and `at` becomes the next positions of order (b, n). In place. A position that stands twice in `at` must be
    known already.
    """
    held = xt.gather(1, at)
    xt.scatter_(1, at, torch.where(held == mask_id, drawn, held))
    step += at.size(1)
    at.copy_(order.gather(1, step[:, None] + torch.arange(at.size(1), device=at.device)))
