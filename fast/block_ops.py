"""
Operations that only the fast engines use, written plainly as in ops.py: both directions of a Mamba layer at once, a
finished block and the active block in one pass, sums of partial products, the end of a step. On a GPU ops.FAST
replaces them; the fused engine runs them as written on a CPU and with --kernels=torch.

    python -m pytest tests/kernels/test_engines.py
"""
import torch
import torch.nn.functional as F

import ops
from model import rotate
from ops import EPS, at_least_fp32, replaceable

SCAN_ROW = 512                          # longest row of the scan, if the block has a divisor from 16 to this


def largest_divisor(whole, most):
    """The largest divisor of `whole` that is at most `most`."""
    return max(i for i in range(1, min(most, whole) + 1) if whole % i == 0)


@replaceable
def scan_block(x, dt, dt_bias, A, B, C, D, ssm, z, chunk_len=128, commit=False):
    """
    The forward and the reverse scan of a block in each of r rows. Index 0 of the axis of size 2 holds the inputs and
    parameters of the forward scan, which starts from the cached states ssm (r, h, p, n). Index 1 holds those of the
    reverse scan, which runs from the last token to the first and starts from zeros.

    commit: the first half of the rows are finished blocks, the second half the active blocks after them; ssm has r / 2
    states. Finished blocks are scanned forward alone, with zeros for the reverse scan. Their last states replace ssm,
    and from these the active blocks start.

    x, z (r, s, 2, h, p); dt (r, s, 2, h), before dt_bias (2, h) and softplus; A, D (2, h); B, C (r, s, 2, n).
    Returns y * SiLU(z) (r, s, 2, h, p), and power (r, s, 2, h), its mean square over p in fp32 or better, from which
    `join_parts` computes the RMS norm. Tokens stay in their order.
    """
    dt = F.softplus(dt.to(dt_bias.dtype) + dt_bias)

    def scan(way, rows, state):
        xi, dti, Bi, Ci = (u[rows, :, way].flip(1) if way else u[rows, :, way] for u in (x, dt, B, C))
        return ops.ssd_scan(xi, dti, A[way], Bi, Ci, D[way], state, None, chunk_len)
    y, active = torch.zeros_like(x), slice(len(ssm) if commit else 0, None)
    if commit:
        y[:len(ssm), :, 0], states = scan(0, slice(len(ssm)), ssm)
        ssm.copy_(states[:, -1])
    y[active, :, 0] = scan(0, active, ssm)[0]
    y[active, :, 1] = scan(1, active, None)[0].flip(1)
    y = y * F.silu(z)
    return y, y.to(at_least_fp32(y.dtype)).square().mean(-1)


@replaceable
def causal_conv_both(u, weight, bias, initial):
    """
    The forward and the reverse convolution of a block, each over its own c channels: the forward one starts from the
    columns initial (b, w-1, c), the reverse one runs from the last position to the first and starts from zeros.

    u (b, s, 2, c); weight (2, c, w); bias (2, c). Returns (b, s, 2, c).
    """
    (fwd, rev), zeros = u.unbind(2), torch.zeros_like(initial)
    rev = ops.causal_conv(rev.flip(1), weight[1], bias[1], zeros).flip(1)
    return torch.stack([ops.causal_conv(fwd, weight[0], bias[0], initial), rev], 2)


@replaceable
def cached_attention_pairs(q, k, v, k_cache, v_cache, lengths, block_len):
    """`ops.cached_attention` of b or 2 b rows, one block each, to b caches: row i reads cache i mod b."""
    k_cache, v_cache = (cache.repeat(len(q) // len(cache), 1, 1, 1) for cache in (k_cache, v_cache))
    return ops.cached_attention(q, k, v, k_cache, v_cache, lengths, block_len)


@replaceable
def rotate_block(qkv, table, lengths, k_cache=None, v_cache=None):
    """
    Rotates the queries and keys of one block in each of r rows, qkv (r, l, 3, h, e), for the positions from lengths (r,)
    on. table: cos and sin of all positions, (2, positions, e / 2). With caches, each (r / 2, h, max_len, e), the first
    half of the rows are finished blocks: their keys and values are appended to the caches. Returns q and k, each
    (r, l, h, e).
    """
    at = lengths[:, None] + torch.arange(qkv.size(1), device=qkv.device)       # (r, l)
    q, k = (rotate(x, *table[:, at][:, :, :, None]) for x in qkv[:, :, :2].unbind(2))
    if k_cache is not None:
        rows = torch.arange(len(k_cache), device=qkv.device)[:, None]
        k_cache[rows, :, at[:len(rows)]] = k[:len(rows)]                       # (r / 2, l, h, e) on both sides
        v_cache[rows, :, at[:len(rows)]] = qkv[:len(rows), :, 2]
    return q, k


@replaceable
def unmask_and_advance(xt, positions, drawn, mask_id, permutation, step):
    """
    decoders.ActiveBlock.write, and then its next_in_order. Writes drawn (b, p) at `positions` (b, p) of the block
    xt (b, l), where it holds mask_id. step (b,) grows by p, and `positions` becomes the p entries of permutation (b, l)
    from there on, counted modulo l. All in place.
    """
    p, current = positions.size(1), xt.gather(1, positions)                    # (b, p)
    xt.scatter_(1, positions, torch.where(current == mask_id, drawn, current))
    step += p
    entries = step[:, None] + torch.arange(p, device=positions.device)         # (b, p)
    positions.copy_(permutation.gather(1, entries % permutation.size(1)))


def join_parts(parts, power=None):
    """
    Sums partial products (P, b, s, d) -> (b, s, d). power (b, s, ways, h): the parts are of so many inputs, as many of
    each. A part still lacks the RMS norm of its input, whose mean square is the mean of power over the heads h.
    """
    dtype = parts.dtype
    if power is not None:
        scale = torch.rsqrt(power.mean(-1) + EPS).movedim(-1, 0)[..., None]    # (ways, b, s, 1)
        parts = parts * scale.repeat_interleave(len(parts) // len(scale), 0)
    return parts.sum(0).to(dtype)


@replaceable
def add_norm(h, parts, power, bias, weight, shift):
    """
    A residual addition and the LayerNorm after it. h (b, s, d); parts and power as in `join_parts`; bias (d,) is added
    as well; weight and shift (d,) belong to the norm. parts, power, bias and shift may be None. Returns the sum and
    its norm, both (b, s, d).
    """
    if parts is not None:
        h = h + join_parts(parts, power)
    if bias is not None:
        h = h + bias
    return h, F.layer_norm(h, weight.shape, weight, shift, EPS)
