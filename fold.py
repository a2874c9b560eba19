"""
Weights rewritten for generation: exact savings that training cannot have. After `prepare_for_inference`
the constant modulation of models without timestep conditioning is part of norms and projections, and
the two directions of a Mamba layer (eq. partial-reverse) are one mixer of double width.

A file of its own, because nobody needs it to understand how text is generated.

    python -m pytest tests/test_sample.py -k fused      prepared weights give the same tokens
    python bench.py sample                              what they save
"""
import torch
import torch.nn.functional as F

import ops
from model import BiMamba


class MergedMamba:
    """
    Both directions of a BiMamba as one mixer of double width: one projection in, one convolution, one
    scan, one projection out, whose product does the sum. Direction is a leading axis of two.
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
        self.conv_weight = torch.cat([m.conv_weight for m in pair]).to(dtype)  # (2 c, w)
        self.conv_bias = torch.cat([m.conv_bias for m in pair]).to(dtype)
        self.norm = torch.stack([m.norm_weight for m in pair])[:, None, None].to(dtype)
        exact = ops.at_least_fp32(dtype)
        self.dt_bias = torch.stack([m.dt_bias for m in pair])[:, None, None].to(exact)
        self.A = torch.stack([-torch.exp(m.A_log.to(exact)) for m in pair])    # (2, h)
        self.D = torch.stack([m.D for m in pair]).to(exact)

    def __call__(self, u, conv, ssm):
        """BiMamba.scan_both(u, conv, ssm); u (b, l, d)."""
        (b, l, _), h, di, n, inner = u.shape, self.heads, self.d_inner, self.d_state, self.inner
        proj = F.linear(u, self.w_in)
        fwd, rev, dt = proj[..., :inner], proj[..., inner:2 * inner], proj[..., 2 * inner:]
        rev = rev.flip(1)
        z = torch.stack([fwd[..., :di], rev[..., :di]])                        # (2, b, l, di)
        dt = torch.stack([dt[..., :h], dt[..., h:2 * h].flip(1)])              # (2, b, l, h)
        start = torch.cat([conv, torch.zeros_like(conv)], -1).to(u.dtype)
        xBC = torch.cat([fwd[..., di:], rev[..., di:]], -1)                    # (b, l, 2 c)
        xBC = ops.causal_conv(xBC, self.conv_weight, self.conv_bias, start)
        xBC = xBC.unflatten(-1, (2, -1)).permute(2, 0, 1, 3).flatten(0, 1)     # (2 b, l, c)
        x, B, C = xBC.split([di, n, n], -1)
        dt = F.softplus(dt.to(self.dt_bias.dtype) + self.dt_bias).flatten(0, 1)
        ssm = torch.cat([ssm, torch.zeros_like(ssm)])
        A, D = (v[:, None].expand(2, b, h).reshape(2 * b, h) for v in (self.A, self.D))
        y, _ = ops.ssd_scan(x.unflatten(-1, (h, -1)), dt, A, B, C, D, ssm, want_states=False,
                            chunk_len=self.chunk_len)
        y = ops.gated_norm(y.reshape(2, b, l, di), z, self.norm)
        return F.linear(torch.cat([y[0], y[1].flip(1)], -1), self.w_out)


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
    and head get aligned widths; weights become dtype, but for A, dt and D. Returns the model.
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
    pad = (0, 0, 0, -model.config.vocab_size % 64)
    model.head.weight = torch.nn.Parameter(F.pad(model.head.weight, pad))
    for name, p in model.named_parameters():
        if not name.endswith(("A_log", "dt_bias", ".D")):
            p.data = p.data.to(dtype)
    return model.eval()
