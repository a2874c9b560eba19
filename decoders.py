"""
Which masked tokens a denoising step reveals. All engines (sample.py, fast/) share these rules. First a rule chooses p =
`tokens_per_step` positions, or a number that depends on the logits; then a token is drawn at each of them and stays.

  random         the next p positions of a random permutation. p = 1, with a model that takes no t, draws exactly from
                 the distribution whose -log the loss bounds: one token after the other, in a uniformly random order.
  strided        the next position, from left to right, in each of p equal parts of the block. So the tokens of a step
                 lie far apart and depend little on each other. p = 1 is from left to right.
  confidence     the p positions of which the model is surest: whose most probable token is most probable
  threshold      all positions whose most probable token has at least the probability `threshold`
  entropy_bound  takes positions from the surest on, and stops once the entropies of those taken sum to more than
                 `entropy_bound` nats (arXiv 2505.24857). The sum without the last one bounds what the tokens of a step
                 tell about each other.
  first_hitting  random with p = 1, for models with time_conditioning. Each step draws t from the exact distribution of
                 the time at which the next token is unmasked, where other decoders estimate t by the masked fraction.
                 (In a block that begins with known tokens t starts at that fraction.) Models without
                 time_conditioning ignore t, so for them it is the same as random with p = 1.

Where to reveal is decided by the unmodified probabilities; temperature, top_k and top_p change only what is drawn. A
choice by the probability of the drawn token would reject unlikely draws, so samples would be sharper than the model and
repeat themselves.

`ActiveBlock` is a block while it gets unmasked. `generate_naive`, at the end, is its plainest use; sample.py has a
cache. In shapes, b is the rows of a batch, l the tokens of a block, m those of a step, v the vocabulary with the mask.

    python -m pytest tests/test_decoders.py
"""
import dataclasses
import math

import torch

import ops
from configurator import UserError, check

DECODERS = ("random", "strided", "confidence", "threshold", "entropy_bound", "first_hitting")
IN_ORDER = ("random", "strided", "first_hitting")       # their order of positions is known when a block starts
DRAWN_ORDER = ("random", "first_hitting")               # they draw their positions
VARIABLE_COUNT = ("threshold", "entropy_bound")         # how many tokens these reveal in a step depends on the logits
MAX_LOGITS = 2 ** 24                    # the most logits of one row that a choice by certainty holds at a time

PERMUTATION, TIME = -1, -2              # purposes of ops.uniform


@dataclasses.dataclass
class Sampler:
    """
    How tokens are drawn, and which ones a step reveals. `seeds` has one int64 for each row of the batch. All draws of a
    row are functions of its seed: a row with the same seed and prompt has the same random numbers in any batch and any
    call, and the same tokens unless rounding of the logits changes a draw.
    """
    seeds: list
    decoder: str
    tokens_per_step: int = 1
    threshold: float = 0.9
    entropy_bound: float = 0.5
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    mask_id: int = dataclasses.field(kw_only=True)      # the model's

    def __post_init__(self):
        """Raises UserError for the first value that is out of bounds."""
        check(vars(self), least=dict(tokens_per_step=1, threshold=0, entropy_bound=0, temperature=0, top_k=0),
              most=dict(threshold=1, top_p=1), above=dict(top_p=0), choices=dict(decoder=DECODERS))
        self.tokens_per_step = 1 if self.decoder == "first_hitting" else self.tokens_per_step

    def certainty(self, logits):
        """How sure the model is of each position: the probability of the most probable token there, or minus the
        entropy in nats for entropy_bound. logits (b, m, v - 1) -> (b, m) in fp32 or better. A new decoder that goes by
        it also needs a branch in ActiveBlock.positions."""
        p = logits.softmax(-1, dtype=ops.at_least_fp32(logits.dtype))
        return torch.xlogy(p, p).sum(-1) if self.decoder == "entropy_bound" else p.amax(-1)

    def pick(self, logits, positions, seed, step, begin):
        """Draws a token for each of the positions (b, m) of the block. logits (b, m, v - 1) -> tokens (b, m). The mask
        has no logit, so it is never drawn. seed, step and begin, each (b,): see ops.gumbel_argmax."""
        if self.temperature < 1e-300:                   # 0, or too small to divide by
            return logits.argmax(-1)
        if self.temperature != 1:
            logits = logits.double() / self.temperature
        return ops.gumbel_argmax(cut(logits, self.top_k, self.top_p), positions, seed, step, begin)


def sampler_of(decoder, **settings):
    """The Sampler of a decoder and its number: random:4 reveals 4 tokens a step, threshold:0.9 has that threshold.
    settings: the other fields. Raises UserError."""
    name, _, number = str(decoder).partition(":")
    try:
        # threshold and entropy_bound are also the names of their fields.
        how = {name: float(number)} if name in VARIABLE_COUNT else dict(tokens_per_step=int(number or 1))
        if (sampler := Sampler(decoder=name, **how, **settings)).tokens_per_step != how.get("tokens_per_step", 1):
            raise ValueError(f"its only number is {sampler.tokens_per_step}")
        return sampler
    except ValueError as error:                         # of int and float, or a UserError
        raise UserError(f"decoder '{decoder}': {error}; write name:number, as in random:4") from None


def cut(logits, top_k, top_p):
    """Sets logits (..., v - 1) to -inf outside the top_k tokens, and outside the fewest ones that reach mass top_p."""
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


def strided_rank(is_masked, p):
    """
    The rank (b, l) of each masked position in the order of `strided`; known positions get any rank. The n masked tokens
    of a row are cut into p parts, as equal as can be, and each step reveals the next one of each part. So they take
    ceil(n / p) steps, whatever is known around them. For example, a block of 8 with a prompt of 3 tokens has n = 5.
    With p = 2 the steps reveal positions 3 and 6, 4 and 7, 5:

        position          0  1  2  3  4  5  6  7
        i, masked number  .  .  .  0  1  2  3  4
        part              .  .  .  0  0  0  1  1
        step              .  .  .  0  1  2  0  1
        rank              .  .  .  0  2  4  1  3
    """
    n = is_masked.sum(1, keepdim=True).clamp(min=1)                            # (b, 1)
    i = is_masked.cumsum(1) - 1                                                # (b, l), as all that follow
    part = i * p // n
    step = i - (part * n + p - 1) // p                  # part j begins at i = ceil(j n / p)
    return (step * p + part).double()                   # not int64: `start` writes inf into it


class ActiveBlock:
    """
    The block that is being unmasked. One denoising step is

      1. `noise_level()`                the t on which the model is conditioned
      2. a forward pass                 of the model over `xt`; this is the engine's part
      3. `positions(model, hidden)`     where this step reveals tokens
      4. `reveal(positions, logits)`    draws tokens there and writes them into `xt`

    Known tokens never change. Prompt and suffix must come out as they went in, and the model was trained on blocks
    whose unmasked tokens are the true ones: it cannot revise a token (the carry-over of masked diffusion).

    Every draw is a function of (seed, position, step, begin) and nothing else. A generator would have a state, and
    then a row's tokens would depend on the rows beside it and on the order in which an engine draws. Without a state,
    all engines use the same random numbers, and tests compare their tokens.

    Tensors keep their shapes and are written in place, and no method but `steps` waits for the device: so an engine
    can record one step as a CUDA graph and replay it.
    """

    def __init__(self, b, l, sampler, device):
        """A block of l tokens for each of b rows."""
        # p, at most l. Use this one: the sampler's may exceed l.
        self.sampler, self.tokens_per_step = sampler, min(sampler.tokens_per_step, l)
        self.xt = torch.full((b, l), sampler.mask_id, device=device)           # known tokens, or the mask
        self.permutation = torch.arange(l, device=device).repeat(b, 1)         # the order of revealing, see `start`
        self.t = torch.ones(b, dtype=torch.float64, device=device)             # the clock of first_hitting

        # A draw is a function of its position in the block and of `key`, each entry (b,):
        #   seed     of the row
        #   step     a number of the step. It grows by p, so that it also says where the step begins in `permutation`.
        #            (For VARIABLE_COUNT any growth above 0 would do.)
        #   begin    tokens of the row before this block. Without it, all blocks would get the same random numbers.
        self.step, self.begin = torch.zeros(2, b, dtype=torch.long, device=device)
        self.key = (torch.tensor(sampler.seeds, device=device), self.step, self.begin)

    def start(self, xt, begin):
        """Takes the next block: xt (b, l) holds known tokens or the mask; begin (an int or (b,)) tokens come before."""
        is_masked = xt == self.sampler.mask_id
        self.xt.copy_(xt)
        self.begin.copy_(torch.as_tensor(begin))
        self.step.zero_()
        self.t.copy_(is_masked.double().mean(1))
        if self.sampler.decoder in IN_ORDER:
            rank = (strided_rank(is_masked, self.tokens_per_step) if self.sampler.decoder == "strided" else
                    ops.uniform(xt.size(1), PERMUTATION, *self.key))   # (b, l)
            # Known positions come last, so each step meets masked positions until the row has none.
            self.permutation.copy_(rank.masked_fill(~is_masked, math.inf).argsort(1))

    def steps(self, n_masked):
        """
        Yields once for each step that the block needs. n_masked: the most masked tokens of a row at the start, an int
        on the host. It says how many steps there will be, without waiting for the device. Only where the number of
        tokens of a step depends on the logits, the device is asked before each step if a mask is left.

        A row that has no masks left takes part in the remaining steps of the batch and does not change.
        """
        if self.sampler.decoder in VARIABLE_COUNT:
            while (self.xt == self.sampler.mask_id).any():
                yield
        else:
            yield from range(math.ceil(n_masked / self.tokens_per_step))

    def noise_level(self):
        """t (b,) fp64 for this step. Call it once for each step: first_hitting draws the time of the next unmasking
        here. A model without timestep conditioning needs no t."""
        is_masked = self.xt == self.sampler.mask_id
        if self.sampler.decoder == "first_hitting":
            # Time runs from t down to 0. Each of the m masked tokens is unmasked at a time that is uniform on (0, t),
            # so the first of them at the largest of m such times. That is distributed as t u^(1/m), with u uniform.
            u = ops.uniform(1, TIME, *self.key)[:, 0]                          # (b,)
            self.t *= u ** (1 / is_masked.sum(1).clamp(min=1))
            return self.t.clone()
        # In training a token is masked with probability t, so the masked fraction is an estimate of t.
        return is_masked.double().mean(1)

    def next_in_order(self):
        """The positions (b, p) that this step reveals, if they are known before the forward pass; else None."""
        if self.sampler.decoder not in IN_ORDER:
            return None
        # The last step may go beyond the end of the permutation. It continues at its beginning, with positions that are
        # known by then: nothing happens there.
        entries = self.step[:, None] + torch.arange(self.tokens_per_step, device=self.step.device)     # (b, p)
        return self.permutation.gather(1, entries % self.permutation.size(1))

    def positions(self, model, hidden):
        """
        The positions (b, m) that this step reveals, given hidden states (b, l, d) of the block; those among them that
        are known stay as they are. m is fixed, for CUDA graphs: in a row that reveals fewer, spare entries repeat the
        surest position. Nothing is drawn.
        """
        if (positions := self.next_in_order()) is not None:
            return positions
        # The window of a full-sequence model may have 65,536 positions: their logits at once would not fit in memory.
        room = max(1, MAX_LOGITS // (self.sampler.mask_id + 1))                # positions whose logits fit
        certainty = torch.cat([self.sampler.certainty(model.token_logits(x)) for x in hidden.split(room, 1)], 1)
        certainty, order = certainty.where(self.xt == self.sampler.mask_id, -math.inf).sort(1, descending=True)
        if self.sampler.decoder == "confidence":
            return order[:, :self.tokens_per_step]
        if self.sampler.decoder == "threshold":
            is_chosen = certainty >= self.sampler.threshold
        elif self.sampler.decoder == "entropy_bound":
            before = torch.nn.functional.pad((-certainty).cumsum(1)[:, :-1], (1, 0))   # (b, l): sums of entropies
            is_chosen = before <= self.sampler.entropy_bound
        # The surest position is always revealed: else a step might reveal nothing, and the block would never end. It
        # also stands where a row reveals no more. At most `room` positions: their logits are made at once for `reveal`.
        return order.where(is_chosen, order[:, :1])[:, :room]

    def reveal(self, positions, logits):
        """Draws tokens at `positions` (b, m) from logits (b, m, v - 1) and makes them known."""
        self.write(positions, self.sampler.pick(logits, positions, *self.key))

    def write(self, positions, tokens):
        """Ends a step: writes tokens (b, m) at `positions` (b, m) of xt, where it holds the mask."""
        # A position may come several times. Its entries carry the same token: a draw is a function of the position and
        # its logits.
        current = self.xt.gather(1, positions)                                 # (b, m)
        self.xt.scatter_(1, positions, torch.where(current == self.sampler.mask_id, tokens, current))
        self.step += self.tokens_per_step


def select(x, positions):
    """x (b, l, ...) at these positions of each row (b, m) -> (b, m, ...). A step makes logits only where it needs
    them: they are v wide."""
    return x[torch.arange(len(x), device=x.device)[:, None], positions]


@torch.no_grad()
def generate_naive(model, prompt, length, sampler):
    """
    Generation without a cache: every denoising step runs all blocks through the training path. It is slow and the
    definition: `sample.generate` must return the same tokens, and the tests check that it does. prompt (b, m) ->
    (b, m + length).
    """
    tokens, total = prompt, prompt.size(1) + length
    l = model.config.block_of(total)
    while tokens.size(1) < total:
        begin = tokens.size(1) // l * l
        finished, known = tokens[:, :begin], tokens[:, begin:]
        xt = torch.nn.functional.pad(known, (0, l - known.size(1)), value=sampler.mask_id)     # (b, l)

        block = ActiveBlock(len(tokens), l, sampler, tokens.device)
        block.start(xt, begin)
        for _ in block.steps(l - known.size(1)):
            # x is both x0 and xt: finished blocks have no noise, and the clean stream stops before the last block,
            # so it never reads the masks there.
            x, t = torch.cat([finished, block.xt], 1), block.noise_level()     # (b, begin + l), (b,)
            hidden = model.all_block_hidden(x, x, t[:, None].expand(-1, x.size(1) // l))[:, begin:]    # (b, l, d)
            positions = block.positions(model, hidden)                         # (b, m)
            block.reveal(positions, model.token_logits(select(hidden, positions)))
        tokens = torch.cat([finished, block.xt], 1)
    return tokens[:, :total]
