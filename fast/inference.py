"""
`inference_model` prepares a model for generation. Its results equal the plain model's up to rounding.
  1. Without timestep conditioning, modulation is constant: it is folded into norms and projections.
  2. Both directions of a Mamba layer (eq. partial-reverse) run as one mixer of double width.
  3. Matrix products with few rows are split; the MLP's first product also applies the GELU.
  4. Additions to the residual stream are fused with the norm that follows them.
  5. A finished block is committed in the same forward pass as the first step of the next block.
  6. The last layer's output projection and MLP compute only the positions that the step may reveal.

    python -m pytest tests/kernels/test_engines.py      prepared weights give the same tokens
    python bench.py sample                              generation speed
"""
import copy

import torch
import torch.nn.functional as F

import ops
from configurator import UserError
from fast import block_ops              # replaceable operations: on a GPU these calls run Triton kernels
from model import Attention, BlockDiffusionLM, Layer, Modulation, cast_for_inference, modulate

FEW_ROWS = 512                          # rows of two blocks of 256: a finished one and the active one
LONG_SUM = 4096                         # a product with few rows and so long a sum is split into four
CUT_ON = ("cuda",)                      # devices on which products with few rows are split


def linear_in_parts(x, weight, ways=1):
    """Returns P partial products (P, ..., d) that sum to x W^T. x (..., k), weight (d, k). On a GPU, a product with
    few rows is split along k into two or four, which occupies more of the GPU; the residual addition sums them at
    little cost. ways=2: x is two inputs side by side, which still need different norms, so their products stay
    separate: the halves of k, and of the P parts, are the two inputs."""
    rows, k = x.numel() // x.size(-1), x.size(-1)
    cut = x.device.type in CUT_ON and rows <= FEW_ROWS and k % 32 == 0
    parts = (4 if k >= LONG_SUM else 2) if cut else ways
    if parts == 1:
        return F.linear(x, weight)[None]
    y = torch.bmm(x.reshape(rows, parts, k // parts).transpose(0, 1),
                  weight.view(-1, parts, k // parts).permute(1, 2, 0))         # (P, rows, d)
    return y.view(parts, *x.shape[:-1], -1)


def select_at(x, at):
    """As decoders.select, x (b, l, ...) -> (b, m, ...), by a gather, which is one short kernel. at None: all of x."""
    if at is None:
        return x
    rows = x.flatten(2)                                                        # (b, l, values of a position)
    return rows.gather(1, at[..., None].expand(-1, -1, rows.size(2))).unflatten(2, x.shape[2:])


def linear_gelu(x, weight, bias):
    """gelu(x W^T + b), the tanh form. On a GPU cuBLASLt applies the GELU inside the product."""
    if not x.is_cuda:                                   # on a CPU the call below computes the erf form
        return F.gelu(F.linear(x, weight, bias), approximate="tanh")
    y = torch._addmm_activation(bias, x.reshape(-1, x.size(-1)), weight.t(), use_gelu=True)
    return y.view(*x.shape[:-1], -1)


# ----------------------------------------------------------------------------------------------
# Mixers. They return (parts, power) in place of their output, which is summed later, by the next block_ops.add_norm:
#
#     attention     output = sum_i parts_i                   power is None
#     Mamba         output = sum_i parts_i / rms_i           rms_i^2 = mean over the heads of power, plus EPS
#
# parts (P, b, m, d) are partial products of the output projection. A token's RMS norm divides it by one number, so this
# can follow the projection. power (b, m, 2, h) holds mean squares of the heads, of the forward direction (for the first
# half of the parts) and the reverse one (for the second half). block_ops.join_parts is this sum.
# at (b, m): the positions to compute, given in the last layer alone; None: all of them.

class InferenceAttention:
    """Generation with a model.Attention."""

    def __init__(self, mixer):
        self.mixer = mixer

    def step(self, u, state, lengths, rope, at, commit, last):
        """As InferenceLayer.step. The keys and values of finished blocks are appended to the cache first, so that the
        active blocks see them there."""
        qkv = self.mixer.qkv(u).unflatten(-1, (3, self.mixer.n_head, -1))      # (b, l, 3, h, e)
        q, k = block_ops.rotate_block(qkv, rope, lengths, *(state if commit else ()))
        v = qkv[:, :, 2]                                                       # (b, l, h, e) each
        if commit and last:
            q, k, v, lengths = (x[len(u) // 2:] for x in (q, k, v, lengths))
        q, k, v = (x.transpose(1, 2) for x in (select_at(q, at), k, v))        # (b, h, m or l, e) each
        y = block_ops.cached_attention_pairs(q, k, v, *state, lengths, u.size(1))  # (b, h, m, e)
        return linear_in_parts(y.transpose(1, 2).flatten(2), self.mixer.out_proj.weight), None


class InferenceMamba:
    """
    Both directions of a BiMamba as one mixer of double width: one input projection, one convolution, one scan, one
    output projection. The direction is an axis of size 2 after the tokens; the reverse direction reads the tokens from
    the end, so nothing is flipped or copied. The gated norm divides a token by one number, so the division can follow
    the output projection (block_ops.join_parts does it); the norm's weight is folded into that projection.
    """

    @torch.no_grad()
    def __init__(self, mixer, dtype):
        self.mixer, pair, fwd = mixer, (mixer.fwd, mixer.rev), mixer.fwd
        if not mixer.reverse_scan:                      # one direction only: see `step`
            return
        self.inner = inner = fwd.in_proj.out_features - fwd.heads      # width of z, x, B and C together
        # In this order: z, x, B, C of fwd; those of rev; dt of fwd; dt of rev; zeros up to a multiple of 64.
        weights = [m.in_proj.weight[:inner] for m in pair] + [m.in_proj.weight[inner:] for m in pair]
        weights.append(weights[0].new_zeros(-2 * (inner + fwd.heads) % 64, weights[0].size(1)))
        self.w_in = torch.cat(weights).to(dtype)
        self.w_out = torch.cat([m.out_proj.weight * m.norm_weight for m in pair], 1).to(dtype)
        self.conv_weight = torch.stack([m.conv_weight for m in pair]).to(dtype)  # (2, c, w)
        self.conv_bias = torch.stack([m.conv_bias for m in pair]).to(dtype)
        exact = ops.at_least_fp32(dtype)
        self.dt_bias = torch.stack([m.dt_bias for m in pair]).to(exact)        # (2, h)
        self.A = torch.stack([-torch.exp(m.A_log.to(exact)) for m in pair])    # (2, h)
        self.D = torch.stack([m.D for m in pair]).to(exact)

    def step(self, u, state, lengths, rope, at, commit, last):
        """As InferenceLayer.step. The cached states move to the end of the finished blocks. The merged mixer needs both
        directions, and a block that one kernel can scan and that is not shorter than the convolution's state."""
        b = len(u) // 2 if commit else 0                # finished blocks
        if self.mixer.reverse_scan and state[0].size(1) <= u.size(1) <= block_ops.SCAN_ROW:
            y, power = (x[b if last else 0:] for x in self.scan(u, *state, commit))
            return linear_in_parts(select_at(y, at).flatten(2), self.w_out, ways=2), select_at(power, at)
        # A Mamba mixer takes neither lengths nor rope.
        clean = [self.mixer.extend(u[:b], state, None, None, u.size(1))] if commit else []
        noisy = select_at(self.mixer.denoise(u[b:], state, None, None), at)
        return (noisy if last else torch.cat([*clean, noisy]))[None], None

    def scan(self, u, conv, ssm, commit):
        """Everything before the output projection: y (b, l, 2, h, p) and power, as block_ops.scan_block returns them.
        commit: u holds finished and active blocks, and the cached states conv and ssm are updated."""
        fwd, inner = self.mixer.fwd, self.inner
        h, di, n = fwd.heads, fwd.d_inner, fwd.d_state
        proj = F.linear(u, self.w_in)                                          # (b, l, 2 inner + 2 h + padding)
        # z (b, l, 2, d_inner) and xBC (b, l, 2, c) with c = d_inner + 2 n
        z, xBC = proj[..., :2 * inner].unflatten(-1, (2, inner)).split([di, inner - di], -1)
        dt = proj[..., 2 * inner:2 * (inner + h)].unflatten(-1, (2, h))        # (b, l, 2, h)
        columns = conv                                  # (b, w - 1, c): what the convolution sees before each row
        if commit:
            # Of the finished blocks, the last w - 1 columns of the forward direction: (b / 2, w - 1, c).
            end = xBC[:len(u) // 2, xBC.size(1) - conv.size(1):, 0]
            columns = torch.cat([conv, end])
            conv.copy_(end)
        xBC = block_ops.causal_conv_both(xBC, self.conv_weight, self.conv_bias, columns)
        x, B, C = xBC.split([di, n, n], -1)                                    # (b, l, 2, .)
        x, z = x.unflatten(-1, (h, -1)), z.unflatten(-1, (h, -1))
        return block_ops.scan_block(x, dt, self.dt_bias, self.A, B, C, self.D, ssm, z, fwd.chunk_len, commit)


# ----------------------------------------------------------------------------------------------
# Layers and the model

class InferenceLayer(Layer):
    """
    A layer with the mixers and products above. Between layers the residual stream is a tuple (h, parts, bias): h, and
    what is still to be added to it. The next norm makes the addition (block_ops.add_norm), which saves a pass over
    memory. Prompts are read by the plain layer's `extend`.
    """

    def __init__(self, layer, dtype):
        torch.nn.Module.__init__(self)                  # not Layer.__init__: the weights are those of `layer`
        self.adaln, self.mlp = layer.adaln, layer.mlp
        self.norm1, self.norm2, self.mixer = layer.norm1, layer.norm2, layer.mixer
        attends = isinstance(layer.mixer, Attention)
        self.fused = InferenceAttention(layer.mixer) if attends else InferenceMamba(layer.mixer, dtype)

    def add(self, h, parts, power, mod):
        """Adds the mixer's (parts, power) to h and runs the MLP. The MLP's result is left pending."""
        if mod.gate is not None:
            parts, power = (mod.gate * block_ops.join_parts(parts, power))[None], None
        h, u = block_ops.add_norm(h, parts, power, None, self.norm2.weight, self.norm2.bias)
        up, down = self.mlp[0], self.mlp[2]
        u = linear_gelu(modulate(u, mod.mlp_shift, mod.mlp_scale), up.weight, up.bias)
        parts, bias = linear_in_parts(u, down.weight), down.bias
        if mod.mlp_gate is not None:
            parts, bias = (mod.mlp_gate * (block_ops.join_parts(parts) + bias))[None], None
        return h, parts, bias

    def step(self, residual, cond, state, lengths, rope, at, commit, last):
        """
        `denoise` of b active blocks (b, l, d); with `commit`, `extend` of b finished blocks and then `denoise` in one
        pass, so that weights are read once. Then rows (2 b, l, d) are the finished blocks and the active blocks that
        follow them. lengths: the tokens before each row of u. rope: the whole table (2, positions, e / 2), not that of
        u's positions as in `denoise`. cond: of the active blocks. In the last layer (`last`) the result has only the
        active blocks and, with at (b, m), only these positions.
        """
        mod = self.modulation_of_both(cond) if commit else self.modulation(cond)
        h, parts, bias = residual
        h, u = block_ops.add_norm(h, parts, None, bias, self.norm1.weight, self.norm1.bias)    # u (b or 2 b, l, d)
        u = modulate(u, mod.shift, mod.scale)
        parts, power = self.fused.step(u, state, lengths, rope, at, commit, last)
        if commit and last:
            h, mod = h[len(h) // 2:], self.modulation(cond)
        return self.add(select_at(h, at), parts, power, mod)

    def modulation_of_both(self, cond_noisy):
        """Modulation of m clean rows followed by m noisy rows, for cond_noisy (m, 1, d) or None (folded)."""
        mod = self.modulation(cond_noisy)
        identity = [0, 0, 1, 0, 0, 1]                   # of clean rows: shift 0, scale 0, gate 1, of mixer and MLP
        return Modulation(*(p if p is None else torch.cat([torch.full_like(p, v), p]) for p, v in zip(mod, identity)))


class InferenceModel(BlockDiffusionLM):
    """A BlockDiffusionLM for generation only; `inference_model` makes it."""

    def __init__(self, model, dtype):
        torch.nn.Module.__init__(self)
        self.config, self.folded = model.config, not model.config.time_conditioning
        self.embed, self.time, self.norm, self.adaln, self.head = (
            copy.deepcopy(part) for part in (model.embed, model.time, model.norm, model.adaln, model.head))
        layers, cond = copy.deepcopy(model.layers), model.condition(None) if self.folded else None
        if self.folded:
            for layer in layers:
                fold_layer(layer, cond)
            fold_norm(self.norm, *(p.flatten() for p in self.adaln(cond).chunk(2, -1)))
        self.layers = torch.nn.ModuleList(InferenceLayer(layer, dtype) for layer in layers)
        # The vocabulary is padded to a multiple of 64: an odd number of columns would need slow, unaligned kernels.
        self.head.weight = torch.nn.Parameter(F.pad(self.head.weight, (0, 0, 0, -self.config.vocab_size % 64)))

    def condition(self, t):
        return None if self.folded else super().condition(t)

    def final(self, residual, cond):
        """Adds what the last layer left pending, then the final norm and modulation."""
        h, parts, bias = residual
        u = block_ops.add_norm(h, parts, None, bias, self.norm.weight, self.norm.bias)[1]
        return u if cond is None else modulate(u, *self.adaln(cond).chunk(2, -1))

    def run_layers(self, tokens, t, cache, lengths, at, commit):
        """Hidden states of the active blocks; see InferenceLayer.step. Only the last layer can leave positions out: the
        others need every token for keys and states."""
        residual, cond = (self.embed(tokens), None, None), self.condition(t)
        for i, (layer, state) in enumerate(zip(self.layers, cache.layers), 1):
            last = i == len(self.layers)
            residual = layer.step(residual, cond, state, lengths, cache.rope, at if last else None, commit, last)
        return self.final(residual, cond)

    @torch.no_grad()
    def denoise_hidden(self, xt, cache, t, at=None):
        """Hidden states (b, l, d) of the active block; with at (b, m), only those of these positions (b, m, d)."""
        assert xt.size(1) == self.config.block_of(xt.size(1)), "a block of another length"
        return self.run_layers(xt, t, cache, cache.lengths, at, commit=False)

    @torch.no_grad()
    def commit_and_denoise_hidden(self, x0_block, xt, cache, t, at=None):
        """`commit(x0_block, cache)` and then `denoise_hidden(xt, cache, t, at)` in one pass. The caller must make
        sure that the cache has room: a check would wait for the device."""
        lengths = torch.cat([cache.lengths, cache.lengths + xt.size(1)])
        hidden = self.run_layers(torch.cat([x0_block, xt]), t, cache, lengths, at, commit=True)
        cache.lengths += xt.size(1)
        return hidden

    def all_block_hidden(self, x0, xt, t):
        raise UserError("this model was prepared for generation; train and score with the original model instead")


@torch.no_grad()
def fold_norm(norm, shift, scale):
    """Folds the modulation x * (1 + scale) + shift of a LayerNorm's output into its weight and bias."""
    if shift is not None:
        bias = shift if norm.bias is None else norm.bias * (1 + scale) + shift
        norm.weight.mul_(1 + scale)
        norm.bias = torch.nn.Parameter(bias.clone())


@torch.no_grad()
def fold_layer(layer, cond):
    """Folds a constant conditioning cond into a layer: shifts and scales into norms, gates into projections."""
    shift, scale, gate, shift2, scale2, gate2 = (None if p is None else p.flatten() for p in layer.modulation(cond))
    fold_norm(layer.norm1, shift, scale)
    fold_norm(layer.norm2, shift2, scale2)
    if gate is not None:
        layer.mixer.out_proj.weight.mul_(gate[:, None])
        layer.mlp[2].weight.mul_(gate2[:, None])
        layer.mlp[2].bias.mul_(gate2)


@torch.no_grad()
def inference_model(model, dtype):
    """Returns an InferenceModel with the weights of a BlockDiffusionLM, cast to dtype. prefill, commit and denoise
    compute the same functions up to rounding. The given model is not changed."""
    return cast_for_inference(InferenceModel(model, dtype), dtype)
