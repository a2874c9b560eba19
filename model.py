"""
Block-diffusion language models. A text is written block by block, from left to right, and a block by denoising: at
first all its tokens are masks, and each step makes some of them known. Two settings choose one of four architectures:
attn_every (1: attention only, 6: a Mamba-2 hybrid) and block_len (seq_len: the whole sequence is one block).

  x0, xt, t       clean tokens; the same with some of them masked; the noise level: the probability of a mask
  clean, noisy    the two streams of training. noisy: all blocks, each as it sees itself, with masks. clean: all blocks
                  but the last, each as later blocks see it. Only masked tokens are scored
  Cache           what later blocks need of finished ones: keys and values of attention, states of Mamba-2
  extend          finished tokens go through a layer, read the cache and are added to it. `prefill` does that in all
                  layers; `commit` is `prefill` of one block
  denoise         a noisy block goes through a layer and reads the cache; it writes nothing. `denoise_hidden` does that
                  in all layers
  fwd, rev        the two scans of a Mamba layer, left to right and right to left; their outputs are summed
  conv, ssm       where a scan continues: the last inputs of its convolution, and its recurrent state

In shapes: b sequences of s tokens, n_blocks = s / l blocks of l tokens, d width, vocab size of the vocabulary, h heads
(n_head in attention and d_inner / p in Mamba-2, which differ), e the width of an attention head, p that of a Mamba
head, n the size of a Mamba state, c channels and w width of its convolution, r rows of a scan, m any number of tokens
or rows. In the layers u is a mixer's input and y its output; q, k, v are queries, keys and values; `stream` is the
residual stream. Equation labels are those of the source of "Training Hybrid Block Diffusion Language Models with
Partial Bidirectionality".

    python paper.py                                   parameter counts of every config
    python -m pytest tests/test_model.py              its tests
"""
import dataclasses
import functools
import math
from collections import namedtuple

import torch
import torch.nn as nn
import torch.nn.functional as F

import ops
from configurator import UserError


@dataclasses.dataclass
class ModelConfig:
    vocab_size: int = 50258             # the last id is the mask token
    seq_len: int = 8192                 # tokens of a training sequence
    block_len: int = 256                # tokens of a diffusion block (nanoGPT's block_size is seq_len). If it equals
                                        # seq_len, the model is full-sequence, and its cache stays empty
    attn_every: int = 6                 # layer i attends if i % attn_every == 0, else it is Mamba-2; 1: attention only
    n_layer: int = 12
    n_head: int = 8                     # attention heads
    d_model: int = 448
    d_state: int = 64                   # Mamba-2 state size
    mamba_head_dim: int = 64
    mamba_expand: int = 2
    conv_width: int = 4
    chunk_len: int = 128                # positions per matrix product of the scan
    time_conditioning: bool = False     # True: noisy tokens are modulated by their t. No file of config/ does that
    reverse_scan: bool = True           # False, an ablation: Mamba layers scan forward alone. The reverse mixers stay,
                                        # unused: 13 % of the parameters of mamba_h_87m
    detach_prefix: bool = False         # True, an ablation: block losses do not train the prefix
    rope_theta: float = 10_000.0
    rope_capacity: int = 262_144        # most positions; a longer request is refused

    def __post_init__(self):
        """Raises UserError for a shape that cannot work."""
        for name, value in vars(self).items():
            # Numbers alone: other fields are switches or, in a fork, texts. NaN is refused, too. If 0 is a value of a
            # field of your own, such as a dropout, leave that field out here.
            if type(value) in (int, float) and not 0 < value < math.inf:
                raise UserError(f"{name} must be above 0 and finite, but is {value}")
        if self.seq_len % self.block_len:
            raise UserError(f"seq_len is {self.seq_len}, but must be a multiple of block_len = {self.block_len}")
        if self.d_model % (2 * self.n_head):            # rotation pairs the two halves of a head
            raise UserError(f"d_model is {self.d_model}, but must be a multiple of 2 * n_head = {2 * self.n_head}")
        if self.hybrid and self.d_inner % self.mamba_head_dim:
            raise UserError(f"mamba_expand * d_model is {self.d_inner}, but must be a multiple of mamba_head_dim = "
                            f"{self.mamba_head_dim}")

    @property
    def hybrid(self):
        return self.attn_every > 1

    @property
    def full_sequence(self):
        return self.block_len == self.seq_len

    @property
    def d_inner(self):
        return self.mamba_expand * self.d_model

    @property
    def mask_id(self):
        return self.vocab_size - 1

    def block_of(self, total):
        """The length of a diffusion block in `total` tokens: a full-sequence model takes them all as one block."""
        return total if self.full_sequence else self.block_len

    def split_blocks(self, s):
        """(n_blocks, l): s tokens are n_blocks diffusion blocks of l tokens. Raises UserError unless they are whole
        blocks."""
        l = self.block_of(s)
        if s == 0 or s % l:
            raise UserError(f"{s} tokens are not whole blocks of block_len {self.block_len}; choose a multiple of it")
        return s // l, l


@dataclasses.dataclass
class Cache:
    """
    What the model keeps of a clean prefix. Allocated once and written in place. `layers` has one entry for each layer:
      attention   (keys, values), each (b, h, max_len, e); keys are rotated
      Mamba-2     (conv (b, w - 1, c), ssm (b, h, p, n)), of constant size; h is that of Mamba-2
    Nothing in it depends on t or on a noisy token. So each finished block is added once.
    """
    layers: list
    lengths: torch.Tensor               # (b,) int64, on the device: tokens that each row holds. Rows may differ; of
                                        # row i only the first lengths[i] keys and values mean anything, and its
                                        # Mamba states are those after exactly that many tokens.
    max_len: int
    rope: torch.Tensor | None = None    # (2, positions, e / 2): cos and sin of all positions, see `rope_table`

    @property
    def nbytes(self):
        return sum(part.numel() * part.element_size() for state in self.layers for part in state)

    def clear(self):
        """Empties the cache in place, by zeros."""
        for part in (self.lengths, *(part for state in self.layers for part in state)):
            part.zero_()

    def __getitem__(self, rows):
        """A cache of some rows. rows is a slice, and the memory is then shared, or a list of indices."""
        layers = [tuple(part[rows] for part in state) for state in self.layers]
        return Cache(layers, self.lengths[rows], self.max_len, self.rope)

    def rope_after(self, count):
        """Rotary tables (cos, sin), each (b, 1, count, e / 2), of the `count` positions after each row's tokens. There
        is no check that the table has them, because it would make the host wait for the device."""
        positions = self.lengths[:, None] + torch.arange(count, device=self.lengths.device)    # (b, count)
        return self.rope[:, positions][:, :, None].unbind()                    # (b, 1, count, e / 2) each


# ----------------------------------------------------------------------------------------------
# Small pieces

@functools.lru_cache(maxsize=1)
def rope_table(length, dim, theta, device, dtype):
    """cos and sin of position * frequency, (2, length, dim / 2). Angles are fp64: positions reach 262,144, where an
    fp32 product would be off by hundredths of a radian."""
    frequency = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)             # (dim / 2,)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency     # (length, dim / 2)
    return torch.stack([angle.cos(), angle.sin()]).to(device, dtype)


def rotate(qk, cos, sin):
    """Rotates queries or keys (..., s, e) by tables that broadcast to (..., s, e / 2). Channel i of the first half of a
    head is paired with channel i of the second half."""
    first, second = qk.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(qk.dtype)


def modulate(normed, shift, scale):
    """Adaptive LayerNorm's modulation of a normalised stream. shift None: no modulation."""
    return normed if shift is None else normed * (1 + scale) + shift


def gated(stream, y, gate):
    """stream + gate * y, in the dtype of the residual stream. gate None: stream + y."""
    return (stream + (y if gate is None else gate * y)).to(stream.dtype)


class TimestepEmbedding(nn.Module):
    """t (m,) in [0, 1] -> (m, 1, d): a sinusoid of 256 features, then a two-layer MLP."""

    def __init__(self, d):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(256, d), nn.SiLU(), nn.Linear(d, d))

    def forward(self, t):
        weight = self.mlp[0].weight
        dtype = ops.at_least_fp32(weight.dtype)
        frequency = torch.exp(-math.log(10_000) * torch.arange(128, dtype=dtype, device=weight.device) / 128)
        angle = 1000 * t.to(dtype)[:, None] * frequency                        # (m, 128)
        return self.mlp(torch.cat([angle.cos(), angle.sin()], -1).to(weight.dtype))[:, None]    # (m, 1, d)


# ----------------------------------------------------------------------------------------------
# Mixers. Both kinds have the same three paths, so a layer need not know which one it holds:
#   two_stream   training: all clean and all noisy tokens at once
#   extend       generation: finished blocks, which update the mixer's part of the cache
#   denoise      generation: one active block, which reads the cache and writes nothing
# Training and generation compute the same function. That is what makes the cache exact.
#
# Both kinds take the same arguments. A Mamba mixer uses no positions, masks, lengths or block_len: a scan knows the
# order of its tokens, and its state stands for the prefix.
#   u, clean, noisy   the input of the mixer, normalised and modulated
#   rope              cos and sin of the positions of u, (b, 1, m, e / 2) each: rows may be at different positions
#   rope_all          cos and sin of positions 0..s-1, (s, e / 2) each: in training all rows begin at position 0
#   masks             those of ops.two_stream_masks, made once for all layers
#   last              whether this is the last layer, whose clean output nothing reads: a mixer may return anything for
#                     it, which Layer drops. To leave it out saves 1 to 2 % of a step: ignore `last` at first reading
#   state             the mixer's part of the cache, see Cache.layers
#   lengths           (b,) the tokens that each row of the cache holds
#   block_len         of the blocks in u, for the block-causal mask of extend

class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        d = config.d_model
        self.n_head, self.detach_prefix = config.n_head, config.detach_prefix
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.out_proj = nn.Linear(d, d, bias=False)

    def project(self, u, rope):
        """u (b, s, d) -> q, k, v, each (b, h, s, e) with e = d / h; q and k are rotated by
        rope = (cos, sin), each of a shape that broadcasts to (b, h, s, e / 2)."""
        q, k, v = self.qkv(u).unflatten(-1, (3, self.n_head, -1)).permute(2, 0, 3, 1, 4)       # (b, h, s, e) each
        return rotate(q, *rope), rotate(k, *rope), v

    def merge(self, y):
        """y (b, h, s, e) -> (b, s, d)."""
        return self.out_proj(y.transpose(1, 2).flatten(2))

    def two_stream(self, clean, noisy, rope_all, masks, last):
        """clean (b, s - l, d), noisy (b * n_blocks, l, d) -> the same shapes. The last layer returns None for clean."""
        b, n_clean, _ = clean.shape
        cos, sin = rope_all                                                    # (s, e / 2) each
        # A clean token and its noisy copy have the same position, hence the same rotation.
        q_clean, k_clean, v_clean = self.project(clean, (cos[:n_clean], sin[:n_clean]))
        if self.detach_prefix:                          # the ablation: no gradient through keys and values
            k_clean, v_clean = k_clean.detach(), v_clean.detach()

        # (b * n_blocks, l, d) -> (b, s, d): the noisy blocks follow each other, and the mask keeps them apart.
        q, k, v = self.project(noisy.unflatten(0, (b, -1)).flatten(1, 2), rope_all)    # (b, h, s, e) each
        y_clean, y = ops.two_stream_attention((None if last else q_clean, k_clean, v_clean), (q, k, v), masks)
        y_clean = None if last else self.merge(y_clean)                        # (b, s - l, d)
        return y_clean, self.merge(y).view_as(noisy)                           # (b * n_blocks, l, d)

    def extend(self, u, state, lengths, rope, block_len):
        """Finished blocks u (b, m, d) -> (b, m, d): attends to the cache and, block-causally, to u. Then it appends the
        keys and values of u to the cache."""
        q, k, v = self.project(u, rope)                                        # (b, h, m, e) each
        y = ops.cached_attention(q, k, v, *state, lengths, block_len)          # (b, h, m, e)

        # Each row has its own length, and its new tokens come after that.
        rows = torch.arange(len(k), device=k.device)[:, None]                  # (b, 1)
        positions = lengths[:, None] + torch.arange(k.size(2), device=k.device)        # (b, m)
        for cached, new in zip(state, (k, v)):          # cached (b, h, max_len, e), new (b, h, m, e)
            # A slice between two index tensors: the indexed axes (b, m) come first, so both sides are (b, m, h, e).
            cached[rows, :, positions] = new.transpose(1, 2).to(cached.dtype)
        return self.merge(y)                                                   # (b, m, d)

    def denoise(self, u, state, lengths, rope):
        """One noisy block u (b, l, d) -> (b, l, d): attends to the cached prefix and to itself. Writes nothing."""
        q, k, v = self.project(u, rope)                                        # (b, h, l, e) each
        # Every query sees the whole prefix and the whole block. There is no causal mask inside a block: a
        # masked token may look at what was revealed to its right.
        return self.merge(ops.cached_attention(q, k, v, *state, lengths, u.size(1)))           # (b, l, d)


class Mamba2(nn.Module):
    """One direction of a Mamba-2 mixer (Dao & Gu 2024), with explicit boundary states."""

    def __init__(self, config):
        super().__init__()
        d, di, n = config.d_model, config.d_inner, config.d_state
        self.heads, self.d_inner, self.d_state = di // config.mamba_head_dim, di, n
        self.chunk_len = config.chunk_len
        self.in_proj = nn.Linear(d, 2 * di + 2 * n + self.heads, bias=False)   # z, x, B, C, dt
        self.conv_weight = nn.Parameter(torch.empty(di + 2 * n, config.conv_width))
        self.conv_bias = nn.Parameter(torch.empty(di + 2 * n))
        self.A_log = nn.Parameter(torch.empty(self.heads))
        self.dt_bias = nn.Parameter(torch.empty(self.heads))
        self.D = nn.Parameter(torch.ones(self.heads))
        self.norm_weight = nn.Parameter(torch.ones(di))
        self.out_proj = nn.Linear(di, d, bias=False)

    @ops.replaceable                                    # fast/ may run another function instead, see ops.FAST
    def project(self, u):
        """u (r, s, d) -> z, xBC and dt side by side, (r, s, 2 d_inner + 2 n + h). A method of its own only so that
        fast/ can pad the weight to a multiple of 64 rows."""
        return self.in_proj(u)

    @ops.replaceable
    def forward(self, u, conv=None, ssm=None, states_every=None, want_states=True):
        """
        Scans r rows of s tokens, each from a boundary state, or from zeros where it is None.

          u      (r, s, d)
          conv   (r, w - 1, c)    the convolution's input at the w - 1 positions before. w: conv_width, c: d_inner + 2 n
          ssm    (r, h, p, n)     the state of the scan

        Returns y (r, s, d) and n_states = s / states_every + 1 boundary states: the first one, and one after every
        states_every positions (None: after all s). They are convs (r, n_states, w - 1, c) and ssms (r, n_states, h, p,
        n). want_states False: the caller does not use the states, and they may be None.
        """
        di, n = self.d_inner, self.d_state

        # 1. Project: the gate z; x, B and C, which the convolution mixes; the step sizes dt.
        z, xBC, dt = self.project(u).split([di, di + 2 * n, self.heads], -1)   # xBC (r, s, c), dt (r, s, h)

        # 2. Convolve. Where a scan starts again, the convolution needs its last w - 1 inputs: convs are these windows
        # of xBC, one at each boundary.
        if conv is None:
            conv = xBC.new_zeros(len(u), self.conv_weight.size(1) - 1, xBC.size(-1))
        convs = ops.conv_boundaries(xBC, conv, states_every) if want_states else None
        x, B, C = ops.causal_conv(xBC, self.conv_weight, self.conv_bias, conv).split([di, n, n], -1)
        # x (r, s, d_inner); B, C (r, s, n)

        # 3. Scan: s_i = exp(dt_i A) s_{i-1} + dt_i x_i B_i^T,  y_i = s_i C_i + D x_i. In each head the state s_i is a
        # (p, n) matrix. Read it as linear attention, with the query C_i, the key B_j and the value x_j: s_i is the sum
        # of value key^T over all j <= i. dt_j is the weight of token j in it, and exp(dt_i A) < 1, as A < 0 < dt, lets
        # what came before i decay.
        dtype = ops.at_least_fp32(u.dtype)
        dt = F.softplus(dt.to(dtype) + self.dt_bias.to(dtype))                 # (r, s, h)
        A = -torch.exp(self.A_log.to(dtype))                                   # (h,)
        y, ssms = ops.ssd_scan(x.unflatten(-1, (self.heads, -1)), dt, A, B, C, self.D, initial_state=ssm,
                               states_every=states_every, chunk_len=self.chunk_len, want_states=want_states)
        # y (r, s, h, p); ssms (r, n_states, h, p, n)

        # 4. Gate, normalise, project back.
        y = ops.gated_norm(y.flatten(2), z, self.norm_weight)                  # (r, s, d_inner)
        return self.out_proj(y), convs, ssms


class BiMamba(nn.Module):
    """Two Mamba-2 mixers with weights of their own. Clean tokens use `fwd` alone, so its states can be a cache."""

    def __init__(self, config):
        super().__init__()
        self.fwd, self.rev = Mamba2(config), Mamba2(config)
        self.reverse_scan, self.detach_prefix = config.reverse_scan, config.detach_prefix

    def scan_both(self, u, conv=None, ssm=None):
        """Eq. partial-reverse. Noisy blocks u (r, l, d) -> (r, l, d): a forward scan from their boundary states (None:
        zeros), plus a reverse scan from zeros. The reverse scan never leaves its block, so no cached state needs it."""
        y = self.fwd(u, conv, ssm, want_states=False)[0]                       # forward: i sees the prefix and 0..i
        if self.reverse_scan:                           # its convolution, too, starts from zeros at the block's end
            y = y + self.rev(u.flip(1), want_states=False)[0].flip(1)          # reverse: i sees i..l-1 of its block
        return y                                                               # (r, l, d)

    def two_stream(self, clean, noisy, rope_all, masks, last):
        """clean (b, s - l, d), noisy (b * n_blocks, l, d) -> the same shapes. The last layer returns its clean output
        too: `fwd` computes it together with the states."""
        if clean.size(1) == 0:                          # a single block: there is no prefix
            return clean, self.scan_both(noisy)

        # One clean scan leaves a state at every bar (eq. boundary-state); bar 0 is zeros. With 4 blocks:
        #
        #   clean:   | b0 | b1 | b2 |          noisy:   b0 starts from bar 0, b1 from bar 1,
        #   bar:     0    1    2    3                   b2 from bar 2, b3 from bar 3
        #
        # So n_states is n_blocks: convs (b, n_blocks, w - 1, c) and ssms (b, n_blocks, h, p, n).
        # Clean tokens have no reverse scan: one over the whole prefix would read later blocks, and could not be
        # cached. One inside each clean block could be cached, but the paper caches the forward scan alone.
        y, convs, ssms = self.fwd(clean, states_every=noisy.size(1))
        if self.detach_prefix:
            convs, ssms = convs.detach(), ssms.detach()

        # All noisy blocks run as one batch of b * n_blocks rows, each from its own state. Without detach_prefix, a
        # block's loss trains the prefix that it starts from (eq. prefix-cache-gradient).
        return y, self.scan_both(noisy, convs.flatten(0, 1), ssms.flatten(0, 1))

    def extend(self, u, state, lengths, rope, block_len):
        """Finished blocks u (b, m, d) -> (b, m, d): continues the forward scan; its last state replaces the cached
        one."""
        # No states_every: only the state after the last token is needed.
        y, convs, ssms = self.fwd(u, *state)                                   # (b, 2, w - 1, c), (b, 2, h, p, n)
        for cached, states in zip(state, (convs, ssms)):
            cached.copy_(states[:, -1])
        return y

    def denoise(self, u, state, lengths, rope):
        """One noisy block u (b, l, d) -> (b, l, d): both directions, from the cached state. Writes nothing."""
        return self.scan_both(u, *state)


# AdaLN's modulation of one layer. Each is (m, 1, d), or None where nothing is modulated:
#   shift, scale, gate                of the mixer's input and output. A hybrid layer has shift and scale alone
#   mlp_shift, mlp_scale, mlp_gate    of the MLP's
Modulation = namedtuple("Modulation", "shift scale gate mlp_shift mlp_scale mlp_gate", defaults=[None] * 6)


class Layer(nn.Module):
    """
    Norm, mixer, norm, MLP, around a residual stream. Attention-only models have DDiT layers, as in SEDD and MDLM:
    AdaLN shifts, scales and gates both halves. Hybrid layers are modulated at the mixer's input alone, without gates.

    On a GPU, generation computes this class, its mixers and `final` again, in fast/inference.py. After a change here
    make the same change there, or sample with --engine=simple; tests/kernels/test_engines.py compares the two.
    """

    def __init__(self, config, index):
        super().__init__()
        d = config.d_model
        # The paper does not give biases and AdaLN sizes. These reproduce its parameter counts.
        self.norm1 = nn.LayerNorm(d, bias=config.hybrid)
        self.norm2 = nn.LayerNorm(d, bias=config.hybrid)
        self.mixer = Attention(config) if index % config.attn_every == 0 else BiMamba(config)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(approximate="tanh"), nn.Linear(4 * d, d))
        self.adaln = nn.Linear(d, 2 * d if config.hybrid else 6 * d)

    def modulation(self, cond):
        """Conditioning cond (m, 1, d) -> Modulation. None: nothing is modulated."""
        # (m, 1, d) each; hybrids have two.
        return Modulation() if cond is None else Modulation(*self.adaln(cond).split(cond.size(-1), -1))

    def mixer_input(self, stream, mod):
        """The normalised and modulated residual stream."""
        return modulate(self.norm1(stream), mod.shift, mod.scale)

    def after_mixer(self, stream, y, mod):
        """The residual stream after the mixer's output y is added, and then the MLP's."""
        stream = gated(stream, y, mod.gate)
        y = self.mlp(modulate(self.norm2(stream), mod.mlp_shift, mod.mlp_scale))
        return gated(stream, y, mod.mlp_gate)

    def two_stream(self, clean, noisy, cond_clean, cond_noisy, rope_all, masks, last):
        """Both streams, clean (b, s - l, d) and noisy (b * n_blocks, l, d) -> the same shapes. The last layer returns
        None for clean."""
        mod_clean, mod_noisy = self.modulation(cond_clean), self.modulation(cond_noisy)
        y_clean, y_noisy = self.mixer.two_stream(
            self.mixer_input(clean, mod_clean), self.mixer_input(noisy, mod_noisy), rope_all, masks, last)
        clean = None if last else self.after_mixer(clean, y_clean, mod_clean)
        return clean, self.after_mixer(noisy, y_noisy, mod_noisy)

    def extend(self, stream, cond, state, lengths, rope, block_len):
        """Finished blocks (b, m, d) -> (b, m, d). Adds them to `state`, the layer's part of the cache."""
        mod = self.modulation(cond)
        y = self.mixer.extend(self.mixer_input(stream, mod), state, lengths, rope, block_len)
        return self.after_mixer(stream, y, mod)

    def denoise(self, stream, cond, state, lengths, rope):
        """One noisy block (b, l, d) -> (b, l, d). Reads `state` and writes nothing."""
        mod = self.modulation(cond)
        y = self.mixer.denoise(self.mixer_input(stream, mod), state, lengths, rope)
        return self.after_mixer(stream, y, mod)


# ----------------------------------------------------------------------------------------------
# The model

class BlockDiffusionLM(nn.Module):
    """
    One of the four models. forward(x0) is the training loss; new_cache, prefill (or commit) and denoise_hidden are for
    generation.

    Initialisation
      embedding                        N(0, embed_std)
      projections, MLP                 N(0, init_std), biases 0
      projections into the residual    hybrids: N(0, init_std / sqrt(2 n_layer)); DDiT: N(0, init_std), as gates
                                       start at 0
      AdaLN, head                      0: the untrained loss is ln(vocabulary - 1) on average
      norms, Mamba's D                 1
      Mamba's A, dt                    -A uniform in [1, 16]; dt log-uniform in [1e-3, 0.1] through the
                                       inverse softplus
      convolution                      uniform in +-1/sqrt(conv_width), weight and bias
    """

    def __init__(self, config, init_std=0.02, embed_std=0.02):
        super().__init__()
        self.config = config
        d = config.d_model
        # As nn.Embedding(vocab_size, d), but without its draw on "meta" (load_model, paper.py: shapes without memory),
        # where that would import sympy, for seconds. Elsewhere the draw stays: without it a seed gives other weights.
        weight = torch.empty(config.vocab_size, d)
        self.embed = nn.Embedding.from_pretrained(weight if weight.is_meta else weight.normal_(), freeze=False)
        self.time = TimestepEmbedding(d)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.n_layer))
        self.norm = nn.LayerNorm(d, bias=False)
        self.adaln = nn.Linear(d, 2 * d)
        self.head = nn.Linear(d, config.vocab_size, bias=False)
        if not self.embed.weight.is_meta:               # else there are only shapes
            self.init_weights(init_std, embed_std)

    @torch.no_grad()
    def init_weights(self, init_std, embed_std):
        residual = init_std / math.sqrt(2 * self.config.n_layer) if self.config.hybrid else init_std
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                # Not time.mlp.2, which writes into no residual stream.
                into_residual = name.endswith(("out_proj", "mlp.2")) and name.startswith("layers")
                std = embed_std if name == "embed" else residual if into_residual else init_std
                nn.init.normal_(module.weight, std=std)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)

            # With AdaLN at zero, gated layers are the identity. With the head at zero, all tokens are equally likely.
            if name.endswith("adaln") or name == "head":
                nn.init.zeros_(module.weight)

            if isinstance(module, Mamba2):
                bound = self.config.conv_width ** -0.5
                nn.init.uniform_(module.conv_weight, -bound, bound)
                nn.init.uniform_(module.conv_bias, -bound, bound)
                module.A_log.uniform_(1, 16).log_()
                dt = module.dt_bias.uniform_(math.log(1e-3), math.log(0.1)).exp()
                module.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))        # softplus of this is dt

    @property
    def n_params(self):
        return sum(p.numel() for p in self.parameters())

    def param_groups(self, weight_decay):
        """AdamW groups: decay for matrices, none for norms, biases, A_log, dt_bias and D."""
        decay = [p for p in self.parameters() if p.dim() >= 2]
        rest = [p for p in self.parameters() if p.dim() < 2]
        return [dict(params=decay, weight_decay=weight_decay), dict(params=rest, weight_decay=0.0)]

    # -- pieces shared by training and generation --

    def rope(self, length):
        """cos and sin of positions 0..length-1, (2, length, e / 2). Raises UserError beyond the rotary capacity."""
        config, weight = self.config, self.embed.weight
        if length > config.rope_capacity:
            raise UserError(f"{length} tokens are beyond the rotary capacity of {config.rope_capacity}; ask for fewer")
        # At least seq_len positions, so that short requests share one table.
        return rope_table(max(length, config.seq_len), config.d_model // config.n_head, config.rope_theta,
                          weight.device, ops.at_least_fp32(weight.dtype))[:, :length]

    def condition(self, t):
        """Conditioning of noisy tokens (m, 1, d) from t (m,). Models without timestep conditioning ignore t and embed
        0, which gives one learned constant (1, 1, d)."""
        t = t if self.config.time_conditioning else torch.zeros(1, device=self.embed.weight.device)
        return F.silu(self.time(t))

    def condition_clean(self):
        """Conditioning of clean tokens. It never contains t, or the cache would depend on t (eq. timestep-cache-bad).
        In models with timestep conditioning clean tokens are not modulated at all (eq. cacheable-adaln); in the others
        they get the same constant as noisy ones."""
        return None if self.config.time_conditioning else self.condition(None)

    def final(self, stream, cond):
        """Last norm and modulation of noisy tokens: hidden states, ready for the head."""
        return modulate(self.norm(stream), *self.adaln(cond).chunk(2, -1))

    def token_logits(self, hidden):
        """(..., d) -> (..., vocab - 1): logits of all tokens but the mask, which is the last id. Text never contains
        it, so its probability is known to be 0 (the substitution parameterisation)."""
        return F.linear(hidden, self.head.weight)[..., :self.config.mask_id]

    def logits(self, hidden):
        """(..., d) -> (..., vocab) in fp32 or better; the mask's is -inf."""
        out = self.token_logits(hidden)
        return F.pad(out.to(ops.at_least_fp32(out.dtype)), (0, 1), value=float("-inf"))

    # -- training: every block at once --

    def all_block_hidden(self, x0, xt, t):
        """Hidden states (b, s, d) of every noisy block given its clean prefix. x0, xt (b, s); t (b, n_blocks)."""
        b, s = x0.shape
        _, l = self.config.split_blocks(s)

        # Under autocast the residual stream has autocast's dtype: it is most of what training stores, and bf16 halves
        # that.
        device = x0.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.embed.weight.dtype

        # Two streams: every block is there noisy, as it sees itself, and, except the last, clean, as later blocks see
        # it. The rows of `noisy` are the blocks of the first sequence, then those of the second, ...
        clean = self.embed(x0[:, :s - l]).to(dtype)                            # (b, s - l, d)
        noisy = self.embed(xt).view(-1, l, self.config.d_model).to(dtype)      # (b * n_blocks, l, d)

        cond_clean = self.condition_clean()                                    # (1, 1, d) or None
        cond_noisy = self.condition(t.reshape(-1))                             # (b * n_blocks or 1, 1, d)
        rope_all, masks = self.rope(s).unbind(), ops.two_stream_masks(s, l, x0.device)
        for i, layer in enumerate(self.layers):
            last = i + 1 == len(self.layers)
            clean, noisy = layer.two_stream(clean, noisy, cond_clean, cond_noisy, rope_all, masks, last)
        return self.final(noisy, cond_noisy).view(b, s, -1)

    def draw_noise(self, x0, generator=None, stratum=(0, 1), t_range=(1e-3, 1)):
        """
        Noise levels t (b, n_blocks), uniform on t_range (1 in blocks of one token), and is_masked (b, s): a token is
        masked with probability t of its block. generator: None, one of a CPU, or a list with one for each sequence;
        then a sequence's noise is the same in every batch. stratum (i, parts): t = least + (most - least) * (i + u) /
        parts with u uniform on [0, 1). So i = 0..parts-1 names one of `parts` equal parts of the range; i is an int or
        (b, n_blocks). (0, 1) is the whole range, (2, 4) its third quarter. Training and evaluation with --stratified
        give each block or sample a part of its own: then the mean over these varies less.
        """
        (b, s), (i, parts) = x0.shape, stratum
        n_blocks, l = self.config.split_blocks(s)
        # A block of one token is masked with probability t and then weighted by 1 / t: the mean is the same for every
        # t. With t = 1 there is no noise: each token is predicted from its clean prefix, as in GPT, -log p exactly.
        least, most = t_range if l > 1 else (1, 1)      # least > 0: the weight is 1 / t
        generators = generator if isinstance(generator, (list, tuple)) else [generator] * b
        uniform = torch.stack([torch.rand(n_blocks + s, generator=g) for _, g in zip(x0, generators, strict=True)])
        level, token = uniform.to(x0.device).split([n_blocks, s], 1)           # each in [0, 1)
        t = least + (most - least) * (i + level) / parts                       # (b, n_blocks)
        return t, token < t.repeat_interleave(l, 1)                            # (b, s)

    def forward(self, x0, generator=None, **noise):
        """
        The training loss: the NELBO of x0 (b, s) int64 in nats per token, with one noise sample per block. It is eq.
        prefix-cache with the weight of eq. bdlm-masked-objective, which is 1 / t for the paper's alpha_t = 1 - t: see
        `loss`. noise: see draw_noise. The mean over noise bounds -log p if t is uniform on (0, 1). The default range
        leaves out t < 1e-3, where 1 / t varies most: usually the mean gets a little larger, but it is no proven bound.
        """
        t, is_masked = self.draw_noise(x0, generator, **noise)
        return self.loss(x0, is_masked, t)

    def loss(self, x0, is_masked, t):
        """The loss for given noise: is_masked (b, s), t (b, n_blocks)."""
        # Only masked tokens are scored, so only they need the head. `nonzero` makes the host wait for the GPU. The wait
        # is short here, before the layers, and afterwards the host can queue forward and backward ahead of the GPU.
        masked = is_masked.flatten().nonzero().squeeze(1)                      # (m,) indices into the b * s tokens
        xt = x0.masked_fill(is_masked, self.config.mask_id)
        # Why 1 / t: let t fall from 1 to 0, and reveal each token when t passes a uniform number of its own. At t it is
        # still masked with probability t, which the weight cancels. So in the mean over noise each token is scored
        # once, at a moment that is uniform in t, given the tokens revealed before. By the chain rule this is the mean
        # of -log p(the block in one order) over all orders. p(block) is the mean of these p, and -log of a mean is at
        # most the mean of -log: a bound. A schedule t = m(u), with u uniform, needs the weight m'(u) / m(u).
        weight = (1 / t).flatten()[masked // (x0.numel() // t.numel())]        # (m,): token i is in block i // l
        hidden = self.all_block_hidden(x0, xt, t).flatten(0, 1).index_select(0, masked)        # (m, d)
        target = x0.flatten().index_select(0, masked)                          # (m,)
        # Divided by all b * s tokens, not by the number of masked ones: so a batch's loss is the mean of its parts'.
        return ops.linear_cross_entropy(hidden, self.head.weight, target, weight) / x0.numel()

    # -- generation: a cache of finished blocks and one active block --

    def new_cache(self, batch, max_len, block_len=None):
        """An empty cache for `batch` rows of at most max_len finished tokens each. An active block of block_len tokens
        (default: the model's) may follow them. Raises UserError if the two are beyond the rotary capacity."""
        config, weight, rope = self.config, self.embed.weight, self.rope(max_len + (block_len or self.config.block_len))
        kv = (batch, config.n_head, max_len, config.d_model // config.n_head)
        conv = (batch, config.conv_width - 1, config.d_inner + 2 * config.d_state)
        ssm = (batch, config.d_inner // config.mamba_head_dim, config.mamba_head_dim, config.d_state)
        # A scan starts from zeros. Keys and values beyond `lengths` never count, but must be finite.
        layers = []
        for layer in self.layers:
            if isinstance(layer.mixer, Attention):
                layers.append((weight.new_zeros(kv), weight.new_zeros(kv)))
            else:
                layers.append((weight.new_zeros(conv), weight.new_zeros(ssm, dtype=ops.at_least_fp32(weight.dtype))))
        return Cache(layers, torch.zeros(batch, dtype=torch.long, device=weight.device), max_len, rope)

    @torch.no_grad()
    def prefill(self, x0, cache, chunk_tokens=4096, progress=iter):
        """Appends finished blocks x0 (b, m) to the cache; m is a multiple of the block length. About chunk_tokens
        tokens of all rows together go through the model at a time, because kernels fail at tensors of 2^31 elements.
        The cache does not depend on it, up to rounding: a chunk is whole blocks, and tokens see no later block.
        progress wraps the list of chunks, such as tqdm.
        Raises UserError for a full-sequence model, for parts of blocks, and if the cache is too small."""
        if x0.size(1) == 0:
            return
        if self.config.full_sequence:
            raise UserError("a full-sequence model has no prefix cache: put the prompt in its window")
        _, l = self.config.split_blocks(x0.size(1))
        held = int(cache.lengths.max())
        if held + x0.size(1) > cache.max_len:
            raise UserError(f"the cache holds {held} of at most {cache.max_len} tokens and cannot take {x0.size(1)} "
                            f"more; make it with a larger max_len")
        chunk = max(chunk_tokens // (l * len(x0)), 1) * l
        cond = self.condition_clean()
        for tokens in progress(x0.split(chunk, 1)):     # (b, up to chunk) each
            stream, rope = self.embed(tokens), cache.rope_after(tokens.size(1))
            for layer, state in zip(self.layers, cache.layers):
                stream = layer.extend(stream, cond, state, cache.lengths, rope, l)
            cache.lengths += tokens.size(1)             # after all layers: each has appended behind the old length

    def commit(self, x0_block, cache):
        """Appends one finished block (b, l) to the cache: the clean pass of eq. bdlm-kv-cache."""
        self.prefill(x0_block, cache)

    @torch.no_grad()
    def denoise_hidden(self, xt, cache, t):
        """Hidden states (b, l, d) of the active block xt (b, l), given the cache, at noise level t (b,). A model
        without timestep conditioning ignores t, which may then be None."""
        assert self.config.full_sequence or xt.size(1) == self.config.block_len, "a block of another length"
        stream, cond, rope = self.embed(xt), self.condition(t), cache.rope_after(xt.size(1))
        for layer, state in zip(self.layers, cache.layers):
            stream = layer.denoise(stream, cond, state, cache.lengths, rope)
        return self.final(stream, cond)


def cast_for_inference(model, dtype):
    """Casts the weights of a model in place, sets evaluation mode, and returns the model. A_log, dt_bias and D stay
    in fp32 or better: errors of a decay grow over thousands of positions."""
    for name, p in model.named_parameters():
        exact = name.endswith(("A_log", "dt_bias", ".D"))
        p.data = p.data.to(ops.at_least_fp32(dtype) if exact else dtype)
    return model.eval()
