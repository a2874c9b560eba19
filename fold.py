"""
Weights and products rearranged for generation: savings that training cannot have, equal up to rounding.
After `prepare_for_inference` the constant modulation of models without timestep conditioning is part of
norms and projections, the two directions of a Mamba layer (eq. partial-reverse) are one mixer of double
width, and products of few rows have forms that a GPU is faster at.

A file of its own, because nobody needs it to understand how text is generated.

    python -m pytest tests/test_sample.py -k fused      prepared weights give the same tokens
    python bench.py sample                              what they save
"""
import torch
import torch.nn.functional as F

import ops
from model import BiMamba

FEW_ROWS = 512                          # an active block and the one that is committed with its first step


def linear_in_halves(x, weight):
    """F.linear without a bias. A product with few rows and a long sum leaves most of a GPU idle (256 x
    4352 x 1088 takes an H200 10 us where its limit is 4), so the sum is cut in two; the addition of the
    halves joins the additions that follow."""
    rows, k = x.numel() // x.size(-1), x.size(-1)
    halves = torch.bmm(x.reshape(rows, 2, k // 2).transpose(0, 1),
                       weight.view(-1, 2, k // 2).permute(1, 2, 0))            # (2, rows, out)
    return halves.sum(0).view(*x.shape[:-1], -1)


def linear(x, weight, bias=None):
    """F.linear, in halves where that is faster."""
    k = x.size(-1)
    if ops.KERNELS["linear"] == "torch" or x.numel() > FEW_ROWS * k or k % 2:
        return F.linear(x, weight, bias)
    y = linear_in_halves(x, weight)
    return y if bias is None else y + bias


class Replacement(torch.nn.Module):
    """Stands in for a Linear, with its weights."""

    def __init__(self, linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias


class LinearInHalves(Replacement):
    """A Linear whose sum is cut, see above."""

    def forward(self, x):
        return linear(x, self.weight, self.bias)


@torch.library.custom_op("nanobdlm::linear_gelu", mutates_args=())
def linear_gelu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """gelu(x W^T + b), the tanh form, with cuBLASLt doing the GELU: a pass less over the result."""
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
    scan, one projection out, whose product does the sum. Direction is an axis of two after the tokens,
    which stay in their order: nothing is flipped or copied.
    """

    @torch.no_grad()
    def __init__(self, mixer, dtype):
        pair, f = (mixer.fwd, mixer.rev), mixer.fwd
        self.heads, self.d_inner, self.d_state, self.chunk_len = f.heads, f.d_inner, f.d_state, f.chunk_len
        self.inner = f.in_proj.out_features             # widths of z, x, B and C
        rows = [m.in_proj.weight for m in pair] + [m.dt_proj.weight for m in pair]
        rows.append(rows[0].new_zeros(-2 * (self.inner + f.heads) % 64, rows[0].size(1)))
        self.w_in = torch.cat(rows).to(dtype)
        self.w_out = torch.cat([m.out_proj.weight for m in pair], 1).to(dtype)
        self.conv_weight = torch.stack([m.conv_weight for m in pair]).to(dtype)  # (2, c, w)
        self.conv_bias = torch.stack([m.conv_bias for m in pair]).to(dtype)
        self.norm = torch.stack([m.norm_weight for m in pair]).to(dtype)       # (2, di)
        exact = ops.at_least_fp32(dtype)
        self.dt_bias = torch.stack([m.dt_bias for m in pair]).to(exact)        # (2, h)
        self.A = torch.stack([-torch.exp(m.A_log.to(exact)) for m in pair])    # (2, h)
        self.D = torch.stack([m.D for m in pair]).to(exact)

    def __call__(self, u, conv, ssm):
        """BiMamba.scan_both(u, conv, ssm); u (b, l, d)."""
        h, di, n, inner = self.heads, self.d_inner, self.d_state, self.inner
        proj = F.linear(u, self.w_in)
        z, xBC = proj[..., :2 * inner].unflatten(-1, (2, inner)).split([di, inner - di], -1)
        dt = proj[..., 2 * inner:2 * (inner + h)].unflatten(-1, (2, h))        # (b, l, 2, h)
        xBC = ops.causal_conv_both(xBC, self.conv_weight, self.conv_bias, conv)
        x, B, C = xBC.split([di, n, n], -1)                                    # (b, l, 2, .)
        y = ops.ssd_scan_both(x.unflatten(-1, (h, -1)), dt, self.dt_bias, self.A, B, C, self.D, ssm,
                              self.chunk_len)
        return linear(ops.gated_norm(y.flatten(3), z, self.norm).flatten(2), self.w_out)


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
    After this a model can be neither trained nor saved. Without timestep conditioning, the constant
    modulation goes into norms and projections; the two Mamba directions become one mixer; projections
    and head get aligned widths, long sums are cut; weights become dtype, but for A, dt and D. Returns the model.
    """
    if not model.config.time_conditioning:
        c = model.condition(None)
        for layer in model.layers:
            fold_layer(layer, c)
        fold_norm(model.norm, *(p.flatten() for p in model.adaln(c).chunk(2, -1)))
        model.folded = True
    for layer in model.layers:
        if isinstance(layer.mixer, BiMamba):
            if layer.mixer.reverse_scan:
                layer.mixer.merged = MergedMamba(layer.mixer, dtype)
            layer.mixer.fwd.joined = layer.mixer.fwd.join_projections().to(dtype)
        else:
            layer.mixer.out_proj = LinearInHalves(layer.mixer.out_proj)
        layer.mlp = torch.nn.Sequential(                # with the same names for the same weights
            LinearGelu(layer.mlp[0]), torch.nn.Identity(), LinearInHalves(layer.mlp[2]))
    pad = (0, 0, 0, -model.config.vocab_size % 64)
    model.head.weight = torch.nn.Parameter(F.pad(model.head.weight, pad))
    for name, p in model.named_parameters():
        if not name.endswith(("A_log", "dt_bias", ".D")):
            p.data = p.data.to(dtype)
    return model.eval()
