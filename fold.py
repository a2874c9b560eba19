"""
Weights and products rearranged for generation: savings that training cannot have, equal up to rounding.
After `prepare_for_inference` the constant modulation of models without timestep conditioning is part of
norms and projections, the two directions of a Mamba layer (eq. partial-reverse) are one mixer of double
width, products of few rows have forms that a GPU is faster at, and what a layer adds to the residual
stream waits for the norm that reads it next.

A file of its own, because nobody needs it to understand how text is generated.

    python -m pytest tests/test_sample.py -k fused      prepared weights give the same tokens
    python bench.py sample                              what they save
"""
import torch
import torch.nn.functional as F

import ops
from model import Attention, BiMamba, Layer, modulate, take

FEW_ROWS = 512                          # an active block and the one that is committed with its first step


def linear_in_parts(x, weight, ways=1):
    """x W^T in one or two parts that add up to it, in two if ways, the inputs that x joins, is 2: x (..., k),
    weight (d, k) -> (P, ..., d). A product with few rows and a long sum leaves most of a GPU idle (256 x
    4352 x 1088 takes an H200 11 us where its limit is 4, in two parts 8); adding the parts joins the
    addition after it."""
    rows, k = x.numel() // x.size(-1), x.size(-1)
    cut = ops.KERNELS["linear"] == "few_rows" and rows <= FEW_ROWS and k % 16 == 0
    parts = 2 if cut else ways
    if parts == 1:
        return F.linear(x, weight)[None]
    y = torch.bmm(x.reshape(rows, parts, k // parts).transpose(0, 1),
                  weight.view(-1, parts, k // parts).permute(1, 2, 0))         # (P, rows, d)
    return y.view(parts, *x.shape[:-1], -1)


class Replacement(torch.nn.Module):
    """Stands in for a Linear, with its weights."""

    def __init__(self, linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias


class LinearInParts(Replacement):
    """A Linear whose sum is cut, see above; its result is parts that lack the bias."""

    def forward(self, x):
        return linear_in_parts(x, self.weight)


@torch.library.custom_op("nanobdlm::linear_gelu", mutates_args=())
def linear_gelu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """gelu(x W^T + b), the tanh form, with cuBLASLt doing the GELU: a pass less over the result."""
    if not x.is_cuda:                                   # where the call below takes the other form
        return F.gelu(F.linear(x, weight, bias), approximate="tanh")
    y = torch._addmm_activation(bias, x.reshape(-1, x.size(-1)), weight.t(), use_gelu=True)
    return y.view(*x.shape[:-1], -1)


linear_gelu.register_fake(lambda x, weight, bias: x.new_empty(*x.shape[:-1], len(weight)))


class LinearGelu(Replacement):
    """A Linear and the tanh GELU after it, in one product."""

    def forward(self, x):
        if ops.KERNELS["linear"] == "few_rows":
            return linear_gelu(x, self.weight, self.bias)
        return F.gelu(F.linear(x, self.weight, self.bias), approximate="tanh")


class MergedMamba:
    """
    Both directions of a BiMamba as one mixer of double width: one projection in, one convolution, one
    scan, one projection out. Direction is an axis of two after the tokens, which stay in their order:
    nothing is flipped or copied. The norm before the projection out divides a token by one number, which
    the sum after it does as well, and its weight is part of the projection.
    """

    @torch.no_grad()
    def __init__(self, mixer, dtype):
        pair, f = (mixer.fwd, mixer.rev), mixer.fwd
        self.heads, self.d_inner, self.d_state, self.chunk_len = f.heads, f.d_inner, f.d_state, f.chunk_len
        self.inner = f.in_proj.out_features             # widths of z, x, B and C
        rows = [m.in_proj.weight for m in pair] + [m.dt_proj.weight for m in pair]
        rows.append(rows[0].new_zeros(-2 * (self.inner + f.heads) % 64, rows[0].size(1)))
        self.w_in = torch.cat(rows).to(dtype)
        self.w_out = torch.cat([m.out_proj.weight * m.norm_weight for m in pair], 1).to(dtype)
        self.conv_weight = torch.stack([m.conv_weight for m in pair]).to(dtype)  # (2, c, w)
        self.conv_bias = torch.stack([m.conv_bias for m in pair]).to(dtype)
        exact = ops.at_least_fp32(dtype)
        self.dt_bias = torch.stack([m.dt_bias for m in pair]).to(exact)        # (2, h)
        self.A = torch.stack([-torch.exp(m.A_log.to(exact)) for m in pair])    # (2, h)
        self.D = torch.stack([m.D for m in pair]).to(exact)

    def denoise(self, u, state, lengths, rope, at=None):
        """As of BiMamba, still in parts: see ops.join_parts."""
        return self.merge(*self.scan(u, *state), at)

    def commit_and_denoise(self, u, state, lengths, rope, need_clean=True, at=None):
        """As of BiMamba, still in parts."""
        y, power = self.scan(u, *state, commit=True)
        if not need_clean:
            y, power = y[len(u) // 2:], power[len(u) // 2:]
        return self.merge(y, power, at)

    def merge(self, y, power, at):
        return linear_in_parts(take(y, at).flatten(2), self.w_out, ways=2), take(power, at)

    def scan(self, u, conv, ssm, commit=False):
        """All but the last product: y (b, l, 2, h, p), and its power as ops.ssd_scan_both returns it."""
        h, di, n, inner = self.heads, self.d_inner, self.d_state, self.inner
        proj = F.linear(u, self.w_in)
        z, xBC = proj[..., :2 * inner].unflatten(-1, (2, inner)).split([di, inner - di], -1)
        dt = proj[..., 2 * inner:2 * (inner + h)].unflatten(-1, (2, h))        # (b, l, 2, h)
        columns = conv                                  # before the first token of each row
        if commit:
            end = ops.conv_boundaries(xBC[:len(u) // 2, :, 0], conv, None)[:, -1]
            columns = torch.cat([conv, end])
            conv.copy_(end)
        xBC = ops.causal_conv_both(xBC, self.conv_weight, self.conv_bias, columns)
        x, B, C = xBC.split([di, n, n], -1)                                    # (b, l, 2, .)
        x, z = x.unflatten(-1, (h, -1)), z.unflatten(-1, (h, -1))
        inputs = x, dt, self.dt_bias, self.A, B, C, self.D, ssm, z, self.chunk_len
        if commit:
            y, power, end = ops.ssd_scan_pairs(*inputs)
            ssm.copy_(end)
        else:
            y, power = ops.ssd_scan_both(*inputs)
        return y, power


class InferenceLayer(torch.nn.Module):
    """
    A layer with products and mixers in these forms. Additions to the residual stream wait for the norm
    that reads it, a pass less over it: between layers it is (h, parts, bias), which ops.add_norm sums.
    """
    modulation, modulation_of_both = Layer.modulation, Layer.modulation_of_both

    def __init__(self, layer, dtype):
        super().__init__()                              # the same names for the same weights
        self.hybrid, self.adaln = layer.hybrid, layer.adaln
        self.norm1, self.norm2, self.mixer = layer.norm1, layer.norm2, layer.mixer
        self.mlp = torch.nn.Sequential(
            LinearGelu(layer.mlp[0]), torch.nn.Identity(), LinearInParts(layer.mlp[2]))
        self.in_parts, self.merged = isinstance(self.mixer, Attention), None
        if self.in_parts:
            self.mixer.out_proj = LinearInParts(self.mixer.out_proj)
        if isinstance(self.mixer, BiMamba):
            self.mixer.fwd.joined = self.mixer.fwd.join_projections().to(dtype)
            self.merged = MergedMamba(self.mixer, dtype) if self.mixer.reverse_scan else None

    def enter(self, stream, mod):
        h, parts, bias = stream if isinstance(stream, tuple) else (stream, None, None)
        h, u = ops.add_norm(h, parts, None, bias, self.norm1.weight, self.norm1.bias)
        return h, modulate(u, mod[0], mod[1])

    def leave(self, h, parts, power, mod):
        if mod[2] is not None:
            parts, power = (mod[2] * ops.join_parts(parts, power))[None], None
        h, u = ops.add_norm(h, parts, power, None, self.norm2.weight, self.norm2.bias)
        parts, bias = self.mlp(modulate(u, mod[3], mod[4])), self.mlp[2].bias
        if mod[5] is not None:
            parts, bias = (mod[5] * (ops.join_parts(parts) + bias))[None], None
        return h, parts, bias

    def mix(self, path, u, state, *where):
        """The mixer's path of that name -> parts and power, see ops.join_parts. The merged mixer has no
        `extend`, and does not cut rows."""
        if self.merged is not None and path != "extend" and u.size(1) <= ops.SCAN_ROW:
            return getattr(self.merged, path)(u, state, *where)
        y = getattr(self.mixer, path)(u, state, *where)
        return y if self.in_parts or y is None else y[None], None

    def extend(self, stream, c, state, lengths, rope, block_len, need_clean=True):
        mod = self.modulation(c)
        h, u = self.enter(stream, mod)
        y = self.mix("extend", u, state, lengths, rope, block_len, need_clean)
        return self.leave(h, *y, mod) if need_clean else None

    def denoise(self, stream, c, state, lengths, rope, at=None):
        mod = self.modulation(c)
        h, u = self.enter(stream, mod)
        return self.leave(take(h, at), *self.mix("denoise", u, state, lengths, rope, at), mod)

    def commit_and_denoise(self, stream, c_clean, c_noisy, state, lengths, rope, need_clean=True, at=None):
        mod = self.modulation_of_both(c_clean, c_noisy)
        h, u = self.enter(stream, mod)
        y = self.mix("commit_and_denoise", u, state, lengths, rope, need_clean, at)
        if not need_clean:
            h, mod = take(h[len(h) // 2:], at), self.modulation(c_noisy)
        return self.leave(h, *y, mod)


def final_after(norm, adaln):
    """BlockDiffusionLM.final after the last InferenceLayer."""
    def final(stream, c):
        h, parts, bias = stream
        u = ops.add_norm(h, parts, None, bias, norm.weight, norm.bias)[1]
        return u if c is None else modulate(u, *adaln(c).chunk(2, -1))
    return final


@torch.no_grad()
def fold_norm(norm, shift, scale):
    """Makes a LayerNorm include the modulation x * (1 + scale) + shift of what it returns."""
    if shift is not None:
        bias = shift if norm.bias is None else norm.bias * (1 + scale) + shift
        norm.weight.mul_(1 + scale)
        norm.bias = torch.nn.Parameter(bias.clone())


@torch.no_grad()
def fold_layer(layer, c):
    """Folds the modulation by a constant c into a layer's norms and the projections that are gated."""
    shift, scale, gate, shift2, scale2, gate2 = (
        None if p is None else p.flatten() for p in layer.modulation(c))
    fold_norm(layer.norm1, shift, scale)
    fold_norm(layer.norm2, shift2, scale2)
    if gate is not None:
        layer.mixer.out_proj.weight.mul_(gate[:, None])
        layer.mlp[2].weight.mul_(gate2[:, None])
        layer.mlp[2].bias.mul_(gate2)


@torch.no_grad()
def prepare_for_inference(model, dtype):
    """
    After this a model generates and does nothing else. Without timestep conditioning, the constant
    modulation goes into norms and projections; layers become InferenceLayers; the head gets an aligned
    width; weights become dtype, but for A, dt and D. Returns the model.
    """
    if not model.config.time_conditioning:
        c = model.condition(None)
        for layer in model.layers:
            fold_layer(layer, c)
        fold_norm(model.norm, *(p.flatten() for p in model.adaln(c).chunk(2, -1)))
        model.folded = True
    model.layers = torch.nn.ModuleList(InferenceLayer(layer, dtype) for layer in model.layers)
    model.final = final_after(model.norm, model.adaln)
    pad = (0, 0, 0, -model.config.vocab_size % 64)
    model.head.weight = torch.nn.Parameter(F.pad(model.head.weight, pad))
    for name, p in model.named_parameters():
        if not name.endswith(("A_log", "dt_bias", ".D")):
            p.data = p.data.to(dtype)
    return model.eval()
