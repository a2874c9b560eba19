"""
Plain twins of the operations that only the fast engines use: both directions of a Mamba layer at once, a finished block
and the active block in one pass, sums of partial products. There is no Triton here: the fused engine runs these
functions on a CPU and with --kernels=torch.

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
def ssd_scan_both(x, dt, dt_bias, A, B, C, D, initial_state, z, chunk_len=128):
    """
    The forward and the reverse scan of a block. Index 0 of the axis of size 2 holds the inputs and parameters of the
    forward scan, which starts from initial_state (b, h, p, n). Index 1 holds those of the reverse scan, which runs
    from the last token to the first and starts from zeros.

    x, z (b, s, 2, h, p); dt (b, s, 2, h), before dt_bias (2, h) and softplus; A, D (2, h); B, C (b, s, 2, n).
    Returns y * SiLU(z) (b, s, 2, h, p), and power (b, s, 2, h), its mean square over p in fp32 or better, from which
    `join_parts` computes the RMS norm. Tokens stay in their order.
    """
    dt = F.softplus(dt.to(dt_bias.dtype) + dt_bias)

    def scan(i, state, turn=lambda u: u):
        xi, dti, Bi, Ci = (turn(u[:, :, i]) for u in (x, dt, B, C))
        return turn(ops.ssd_scan(xi, dti, A[i], Bi, Ci, D[i], state, None, chunk_len)[0])
    y = torch.stack([scan(0, initial_state), scan(1, None, lambda u: u.flip(1))], 2) * F.silu(z)
    return y, y.to(at_least_fp32(y.dtype)).square().mean(-1)


@replaceable
def ssd_scan_pairs(x, dt, dt_bias, A, B, C, D, initial_state, z, chunk_len=128):
    """
    The scans of b finished blocks and of the b active blocks after them, as rows (2 b, ...). Finished blocks are only
    scanned forward, from initial_state (b, h, p, n). Active blocks are scanned as in `ssd_scan_both`, from the states
    at the end of the finished blocks.

    Arguments are those of `ssd_scan_both`. Returns its two results, with zeros for the reverse scan of finished blocks,
    and the states (b, h, p, n) at the end of the finished blocks.
    """
    b = len(x) // 2
    steps = F.softplus(dt[:b, :, 0].to(dt_bias.dtype) + dt_bias[0])
    y, states = ops.ssd_scan(x[:b, :, 0], steps, A[0], B[:b, :, 0], C[:b, :, 0], D[0], initial_state, None, chunk_len)
    y = y * F.silu(z[:b, :, 0])
    y = torch.stack([y, torch.zeros_like(y)], 2)
    active, power = ssd_scan_both(x[b:], dt[b:], dt_bias, A, B[b:], C[b:], D, states[:, -1], z[b:], chunk_len)
    return (torch.cat([y, active]), torch.cat([y.to(power.dtype).square().mean(-1), power]), states[:, -1])


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
def rotate_both(qk, cos, sin):
    """Rotates queries and keys together: qk (b, l, 2, h, e) -> (2, b, h, l, e), with tables (b, 1, l, e / 2)."""
    return rotate(qk.permute(2, 0, 3, 1, 4), cos, sin)


def join_parts(parts, power=None):
    """
    Sums partial products (P, b, s, d) -> (b, s, d). power (b, s, P, h): each part still lacks the RMS norm of its
    input, whose mean square is the mean of power over the heads h.
    """
    dtype = parts.dtype
    if power is not None:
        parts = parts * torch.rsqrt(power.mean(-1) + EPS).movedim(-1, 0)[..., None]
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
