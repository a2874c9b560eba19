"""
Which masked tokens a denoising step reveals. The plain engine in sample.py and the fast one in fast/engine.py share
these rules. A step draws a token for masked positions and writes some of the drawn tokens into the block:

  random         at the next p positions of a random permutation. p = 1 is exact ancestral sampling if the model takes
                 no t: then only the order of unmasking matters, and it is uniform.
  confidence     at the p positions whose drawn tokens are most probable
  threshold      at every position whose drawn token is at least `threshold` probable, and at the most probable one
  first_hitting  random with p = 1, and t follows the exact distribution of unmasking times. In a block that begins
                 with known tokens, t starts at the masked fraction.

p is `tokens_per_step`. `generate_naive`, at the end, shows them at work in the fewest lines: it is generation without a
cache. To add a decoder, see "Another decoder" in docs/forking.md.

    python -m pytest tests/test_sample.py -k "distribution or ancestral or first_hitting"
"""
import dataclasses
import math

import torch

import ops
from configurator import UserError, check

DECODERS = ("random", "confidence", "threshold", "first_hitting")
IN_ORDER = ("random", "first_hitting")  # these reveal positions in the order of a random permutation
MAX_LOGITS = 2 ** 24                    # the most logits of one row that exist at a time

# ops.uniform numbers its random numbers by stream. Token draws (ops.gumbel_argmax) use streams >= 0.
PERMUTATION_STREAM, TIME_STREAM = -1, -2


def check_decoder(settings):
    """Raises UserError for the first value in `settings`, a dict of a Sampler's fields, that is out of bounds."""
    check(settings, least=dict(tokens_per_step=1, threshold=0, temperature=0, top_k=0),
          most=dict(threshold=1, top_p=1), above=dict(top_p=0), choices=dict(decoder=DECODERS))


def usual_tokens_per_step(config, length):
    """The tokens to reveal per step by default: then a block, or a full-sequence model's request of `length` tokens,
    takes 16 steps or fewer. config: the model's."""
    return math.ceil(config.block_of(length) / 16)


@dataclasses.dataclass
class Sampler:
    """
    How tokens are drawn, and which ones a step reveals. `seeds` has one int64 for each row of the batch. All draws of a
    row are functions of its seed: a row with the same seed and prompt has the same random numbers in any batch and any
    call, and the same tokens unless rounding of the logits changes a draw.
    """
    seeds: list
    decoder: str = "random"
    tokens_per_step: int = 16
    threshold: float = 0.9
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    mask_id: int = dataclasses.field(kw_only=True)      # the model's

    def __post_init__(self):
        check_decoder(vars(self))
        if self.decoder == "first_hitting":
            self.tokens_per_step = 1

    def pick(self, logits, positions, seed, step, begin):
        """Draws a token for each of the positions (b, m) of the block. logits (b, m, v - 1) -> tokens (b, m). seed,
        step and begin, each (b,): see ops.gumbel_argmax."""
        if self.temperature == 0:
            return logits.argmax(-1)
        if self.temperature != 1:
            logits = logits.double() / self.temperature
        return ops.gumbel_argmax(cut(logits, self.top_k, self.top_p), positions, seed, step, begin)


def cut(logits, top_k, top_p):
    """Sets logits (..., v) to -inf outside the top_k tokens, and outside the fewest tokens that reach mass top_p."""
    if top_k:
        kth = logits.topk(min(top_k, logits.size(-1)), -1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if top_p < 1:
        descending, index = logits.double().sort(-1, descending=True)
        probability = descending.softmax(-1)
        # A token is dropped if the more probable ones reach top_p without it. The first token has none before it, so
        # it always stays. `scatter` puts each answer back at its token's place.
        mass_before = probability.cumsum(-1) - probability
        drop = torch.zeros_like(mass_before, dtype=torch.bool).scatter(-1, index, mass_before >= top_p)
        logits = logits.masked_fill(drop, float("-inf"))
    return logits


class ActiveBlock:
    """
    The block that is being unmasked. One denoising step is

      1. `next_noise_level()`   the t on which the model is conditioned
      2. a forward pass         of the model over `xt`; this is the engine's part
      3. `reveal(logits_of)`    draws tokens and writes some of them into `xt`

    Known tokens never change. Prompt and suffix must come out as they went in, and the model was trained on blocks
    whose unmasked tokens are the true ones: it cannot revise a token (the carry-over of masked diffusion).

    Every draw is a function of (seed, position, step, begin) and nothing else. A generator would have a state, and
    then a row's tokens would depend on the rows beside it and on the order in which an engine draws. Without a state,
    all engines use the same random numbers, and tests compare their tokens.

    Tensors keep their shapes and are written in place, and no method but `steps` waits for the device: so an engine
    can record one step as a CUDA graph and replay it.
    """

    def __init__(self, b, l, sampler, device, time_conditioning):
        """A block of l tokens for each of b rows. time_conditioning: whether the model takes t."""
        self.sampler, self.time_conditioning = sampler, time_conditioning
        self.tokens_per_step = p = min(sampler.tokens_per_step, l)
        self.xt = torch.full((b, l), sampler.mask_id, device=device)           # known tokens, or the mask
        self.t = torch.ones(b, dtype=torch.float64, device=device)

        # `permutation` (b, l) lists the positions in the order in which they are revealed. Each step reads the next p
        # entries. After the last one it begins again: these positions are known by then, so nothing happens there.
        self.permutation = torch.arange(l, device=device).repeat(b, 1)
        self.next_positions = self.permutation[:, :p].clone()                  # (b, p), where the next step reveals

        # A draw is a function of its position in the block and of `key`, each entry (b,):
        #   seed          of the row
        #   n_revealed    entries of `permutation` that were read so far. It grows by p with each step, so draws are
        #                 numbered by it.
        #   begin         tokens of the row before this block. Without it, all blocks would get the same random numbers.
        # `start` and `reveal` write n_revealed and begin in place, so `key` always holds the current ones.
        self.n_revealed, self.begin = torch.zeros(2, b, dtype=torch.long, device=device)
        self.key = (torch.tensor(sampler.seeds, device=device), self.n_revealed, self.begin)

    def start(self, xt, begin):
        """Takes the next block: xt (b, l) holds known tokens or the mask; begin (b,) tokens come before it."""
        l, is_masked = xt.size(1), xt == self.sampler.mask_id
        self.xt.copy_(xt)
        self.begin.copy_(begin)
        self.n_revealed.zero_()
        self.t.copy_(is_masked.double().mean(1))        # first_hitting's clock starts here
        if self.sampler.decoder in IN_ORDER:
            rank = ops.uniform(l, PERMUTATION_STREAM, *self.key)               # (b, l), in (0, 1)
            # Known positions get rank 2 and come last, so each step meets masked positions until the row has none.
            self.permutation.copy_(rank.masked_fill(~is_masked, 2).argsort(1))
            self.next_positions.copy_(self.permutation[:, :self.tokens_per_step])

    def steps(self, n_masked):
        """
        Yields once for each step that the block needs. n_masked: masked tokens of each row at the start, as ints on
        the host. They say how many steps there will be, without waiting for the device. Only decoder=threshold reveals
        a number of tokens that depends on the logits, so it asks the device before each step if a mask is left.

        A row that has no masks left takes part in the remaining steps of the batch and does not change.
        """
        if self.sampler.decoder == "threshold":
            while (self.xt == self.sampler.mask_id).any():
                yield
        else:
            yield from range(math.ceil(max(n_masked) / self.tokens_per_step))

    def rewind(self):
        """Goes back to the first positions; xt and t stay. For recording or timing a step many times."""
        self.n_revealed.zero_()
        self.next_positions.copy_(self.permutation[:, :self.tokens_per_step])

    def next_noise_level(self):
        """t (b,) fp64 for this step, or None if the model takes no t. Call it once for each step: first_hitting draws
        the time of the next unmasking here."""
        if not self.time_conditioning:
            return None
        is_masked = self.xt == self.sampler.mask_id
        if self.sampler.decoder == "first_hitting":
            # Time runs from t down to 0. Each of the m masked tokens is unmasked at a time that is uniform on (0, t),
            # so the first of them at the largest of m such times. That is distributed as t u^(1/m), with u uniform.
            u = ops.uniform(1, TIME_STREAM, *self.key)[:, 0]                   # (b,)
            self.t *= u ** (1 / is_masked.sum(1).clamp(min=1))
            return self.t.clone()
        # In training a token is masked with probability t, so the masked fraction is an estimate of t.
        return is_masked.double().mean(1)

    def positions(self):
        """The positions (b, p) that this step reveals, where the decoder fixes them before the forward pass: the head
        then runs on these alone. None where the logits of all positions decide."""
        return self.next_positions if self.sampler.decoder in IN_ORDER else None

    def reveal(self, logits_of):
        """Makes some tokens of xt known. logits_of(positions (b, m)) -> logits (b, m, v - 1) at these positions of the
        block. The mask has no logit, so it is never drawn."""
        sampler, positions = self.sampler, self.positions()
        if positions is not None:
            drawn = sampler.pick(logits_of(positions), positions, *self.key)   # (b, p)
            # `positions` is self.next_positions itself, so this call also moves next_positions on, in place.
            unmask_and_advance(self.xt, positions, drawn, sampler.mask_id, self.permutation, self.n_revealed)
        else:
            is_masked = self.xt == sampler.mask_id
            drawn, is_chosen = self.draw_and_choose(logits_of, is_masked)      # (b, l) each
            torch.where(is_chosen & is_masked, drawn, self.xt, out=self.xt)
            # threshold may reveal more or fewer than p. Only the draws read n_revealed here, and they need no more
            # than another number for each step.
            self.n_revealed += self.tokens_per_step

    def draw_and_choose(self, logits_of, is_masked):
        """Draws a token for every position, and chooses which to reveal by the probability of the drawn token. Returns
        drawn and is_chosen, both (b, l)."""
        sampler, drawn, confidence = self.sampler, [], []
        all_positions = torch.arange(is_masked.size(1), device=is_masked.device).expand_as(is_masked)   # (b, l)
        # A full-sequence window may have 65,536 positions: all its logits at once would not fit in memory.
        for positions in all_positions.split(max(1, MAX_LOGITS // (sampler.mask_id + 1)), 1):
            logits = logits_of(positions)                                      # (b, m, v - 1)
            tokens = sampler.pick(logits, positions, *self.key)                # (b, m)
            # The model's own probability: temperature, top_k and top_p shape the draw, not the confidence.
            probability = logits.softmax(-1, dtype=ops.at_least_fp32(logits.dtype))
            drawn.append(tokens)
            confidence.append(probability.gather(2, tokens[..., None])[..., 0])        # (b, m)
        drawn, confidence = torch.cat(drawn, 1), torch.cat(confidence, 1)      # (b, l) each
        confidence = confidence.where(is_masked, -1)    # below every probability: masked positions come first
        if sampler.decoder == "threshold":
            # The masked position with the most probable token is always revealed: else a step might reveal nothing, and
            # the block would never end.
            is_best = all_positions == confidence.argmax(1, keepdim=True)
            return drawn, (confidence >= sampler.threshold) | is_best
        best = confidence.topk(self.tokens_per_step, 1).indices                # (b, p)
        return drawn, torch.zeros_like(is_masked).scatter_(1, best, True)


def select(x, positions):
    """x (b, l, ...) at these positions of each row (b, m) -> (b, m, ...); all of x if positions is None. A denoising
    step selects the positions that it may reveal: only they need logits."""
    return x if positions is None else x[torch.arange(len(x), device=x.device)[:, None], positions]


@ops.replaceable
def unmask_and_advance(xt, positions, drawn, mask_id, permutation, n_revealed):
    """
    Two things, in one kernel on a GPU; all in place.
      unmask     writes drawn (b, p) at `positions` (b, p) of the block xt (b, l), where xt holds mask_id
      advance    n_revealed (b,) grows by p, and `positions` becomes the p entries of permutation (b, l) from there
                 on, counted modulo l
    """
    p, current = positions.size(1), xt.gather(1, positions)                    # (b, p)
    xt.scatter_(1, positions, torch.where(current == mask_id, drawn, current))
    n_revealed += p
    entries = n_revealed[:, None] + torch.arange(p, device=positions.device)   # (b, p)
    positions.copy_(permutation.gather(1, entries % permutation.size(1)))


@torch.no_grad()
def generate_naive(model, prompt, length, sampler):
    """
    Generation without a cache: every denoising step runs all blocks through the training path. Slow, obvious, and the
    definition: `sample.generate` must return the same tokens, and the tests check that it does. prompt (b, m) ->
    (b, m + length).
    """
    config, tokens, total = model.config, prompt, prompt.size(1) + length
    l = config.block_of(total)
    while tokens.size(1) < total:
        begin = tokens.size(1) // l * l
        finished, known = tokens[:, :begin], tokens[:, begin:]
        xt = tokens.new_full((len(tokens), l), config.mask_id)                 # (b, l)
        xt[:, :known.size(1)] = known
        block = ActiveBlock(len(tokens), l, sampler, tokens.device, time_conditioning=True)    # t is needed below
        block.start(xt, torch.tensor(begin))
        for _ in block.steps([l - known.size(1)]):
            # x is both x0 and xt: finished blocks have no noise, and the clean stream stops before the last block,
            # so it never reads the masks there.
            x, t = torch.cat([finished, block.xt], 1), block.next_noise_level()            # (b, begin + l), (b,)
            hidden = model.all_block_hidden(x, x, t[:, None].expand(-1, x.size(1) // l))       # (b, begin + l, d)
            block.reveal(lambda positions: model.token_logits(select(hidden[:, begin:], positions)))
        tokens = torch.cat([finished, block.xt], 1)
    return tokens[:, :total]
