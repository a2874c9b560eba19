"""
Triton kernels: the small ones of a denoising step. Inference only.

  add_norm        replaces block_ops.add_norm: an addition to the residual stream and the norm after it, in one pass
  rotate_block    replaces block_ops.rotate_block: rotates one block's queries and keys. When a finished block is
                  committed, the same kernel writes its keys and values into the cache
  uniform         replaces ops.uniform by one kernel. In PyTorch, Philox's ten rounds are more than a hundred kernels.
  gumbel_argmax   replaces ops.gumbel_argmax. The noise is computed in registers, so memory traffic is one read of the
                  logits. Noise is fp32, with full relative precision even in its tail, where it is large.
  unmask_and_advance    replaces that of block_ops.py: writes drawn tokens over masks and looks up the next positions

Without a GPU, Triton's interpreter tests them:

    python -m pytest tests/kernels/test_kernels.py -k "residual or rotates or uniform or gumbel or unmask"
"""
import torch
import triton
import triton.language as tl

from fast.triton_tools import add_pairs, rowwise, strides
from ops import EPS

FEW = 1024  # add_norm: up to this many tokens a program has more warps: it ends sooner, and there is room for all
SHARE, TILE = 512, 256  # gumbel_argmax: pairs of logits per program, and per iteration of its loop


# ----------------------------------------------------------------------------------------------
# The residual stream. The addition may come as partial products (see fast/inference.py), which are summed here. Of a
# Mamba layer, the first half of them are of the forward direction. Each still lacks the RMS norm of its direction, which
# is one factor per token and is applied here too. With 256 tokens most of the time goes to reductions over a token's
# channels, so two sums share one reduction.

@triton.jit
def add_norm_kernel(h, parts, power, bias, weight, shift, out, normed, tokens, eps, d: tl.constexpr,
                    P: tl.constexpr, heads: tl.constexpr, D: tl.constexpr, H: tl.constexpr):
    """One token. d channels are padded to D and heads to H, both powers of two."""
    token, k = tl.program_id(0).to(tl.int64), tl.arange(0, D)
    ok = k < d
    w = tl.load(weight + k, mask=ok, other=0.0).to(tl.float32)
    b = 0.0 if shift is None else tl.load(shift + k, mask=ok, other=0.0).to(tl.float32)
    x = tl.load(h + token * d + k, mask=ok, other=0.0).to(tl.float32)
    if bias is not None:
        x += tl.load(bias + k, mask=ok, other=0.0).to(tl.float32)
    if power is not None:
        head = tl.arange(0, H)
        at = power + token * 2 * heads + head
        forward, reverse = tl.load(at, mask=head < heads, other=0.0), tl.load(at + heads, mask=head < heads, other=0.0)
        forward, reverse = tl.reduce((forward, reverse), 0, add_pairs)
    for i in tl.static_range(P):
        u = tl.load(parts + (token + i * tokens) * d + k, mask=ok, other=0.0).to(tl.float32)
        if power is not None:
            u *= tl.rsqrt((forward if 2 * i < P else reverse) / heads + eps)
        x += u
    tl.store(out + token * d + k, x.to(out.dtype.element_ty), mask=ok)
    total, squares = tl.reduce((x, x * x), 0, add_pairs)
    mean = total / d  # E[x^2] - mean^2 is precise enough in fp32 unless the variance is below 1e-6 mean^2
    y = (x - mean) * tl.rsqrt(tl.maximum(squares / d - mean * mean, 0.0) + eps) * w + b
    tl.store(normed + token * d + k, y.to(normed.dtype.element_ty), mask=ok)


def add_norm(h, parts, power, bias, weight, shift):
    """As block_ops.add_norm, for contiguous tensors."""
    P, heads = 0 if parts is None else len(parts), 1 if power is None else power.shape[-1]
    assert all(u is None or u.is_contiguous() for u in (h, parts, power, bias, weight, shift))
    assert (not P or parts.shape[1:] == h.shape) and (power is None or power.shape[-2] == 2 and P % 2 == 0)
    out, normed, d = torch.empty_like(h), torch.empty_like(h), h.shape[-1]
    tokens = h.numel() // d
    add_norm_kernel[tokens,](h, parts, power, bias, weight, shift, out, normed, tokens, EPS, d, P, heads,
        triton.next_power_of_2(d), triton.next_power_of_2(heads), num_warps=8 if tokens <= FEW else 4)
    return out, normed


# ----------------------------------------------------------------------------------------------
# The rotary rotation

@triton.jit
def rotate_kernel(qkv, table, lengths, out, k_cache, v_cache, sines, sr, sl, scb, sch, cap, heads, half,
                  H: tl.constexpr, E: tl.constexpr):
    """All heads of one token, queries and then keys, at position lengths + token. Channel i of the first half of a head
    is paired with channel i of the second half. The number of heads is padded to H and half a head to E, both powers of
    two. The first half of the rows have a cache, of cap positions; k_cache None: no row has. Strides: sr and sl of qkv
    between rows and positions, scb and sch of a cache between rows and heads. sines: where the sines begin in table."""
    token, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    head, i, place = tl.arange(0, H)[:, None], tl.arange(0, E)[None, :], tl.load(lengths + row) + token
    ok, at = (head < 2 * heads) & (i < half), head * 2 * half + i      # heads 0..heads-1 are queries, the next ones keys
    c = tl.load(table + place * half + i, mask=i < half, other=0.0)
    s = tl.load(table + sines + place * half + i, mask=i < half, other=0.0)
    qkv += row * sr + token * sl + at
    x1, x2 = tl.load(qkv, mask=ok, other=0.0), tl.load(qkv + half, mask=ok, other=0.0)
    y1, y2 = x1 * c - x2 * s, x2 * c + x1 * s
    out += (row * tl.num_programs(0) + token) * heads * 4 * half + at
    tl.store(out, y1, mask=ok)
    tl.store(out + half, y2, mask=ok)
    if k_cache is not None:
        ok &= (head >= heads) & (place < cap) & (2 * row < tl.num_programs(1))
        qkv, to = qkv + heads * 2 * half, row * scb + (head - heads) * sch + place * 2 * half + i
        tl.store(k_cache + to, y1, mask=ok)
        tl.store(k_cache + to + half, y2, mask=ok)
        tl.store(v_cache + to, tl.load(qkv, mask=ok, other=0.0), mask=ok)
        tl.store(v_cache + to + half, tl.load(qkv + half, mask=ok, other=0.0), mask=ok)


def rotate_block(qkv, table, lengths, k_cache=None, v_cache=None):
    """As block_ops.rotate_block."""
    r, l, _, h, e = qkv.shape
    assert qkv.stride()[2:] == (h * e, e, 1)            # heads side by side
    assert all(u is None or u.stride()[-2:] == (u.shape[-1], 1) for u in (table, k_cache, v_cache))
    out = qkv.new_empty(r, l, 2, h, e)
    rotate_kernel[l, r](
        qkv, table, lengths, out, k_cache, v_cache, table.stride(0), *strides(qkv, 2), *strides(k_cache, 2),
        0 if k_cache is None else k_cache.shape[2], h, e // 2, H=triton.next_power_of_2(2 * h),
        E=triton.next_power_of_2(e // 2))
    return out.unbind(2)


# ----------------------------------------------------------------------------------------------
# Draws

@triton.jit
def uniform_kernel(out, stream, seed, step, begin, n, N: tl.constexpr):
    """N of the n variates of one row."""
    row, k = tl.program_id(0).to(tl.int64), tl.program_id(1) * N + tl.arange(0, N)
    high, low, _, _ = tl.philox(tl.load(seed + row), tl.zeros_like(k) + stream, k,
                                tl.load(step + row).to(tl.int32), tl.load(begin + row).to(tl.int32))
    bits = (high.to(tl.uint64) << 20) | (low >> 12).to(tl.uint64)
    tl.store(out + row * n + k, (bits.to(tl.int64).to(tl.float64) + 0.5) * 2.0 ** -52, mask=k < n)


@triton.jit
def gumbel(high, low):
    """-log(-log(1 - u)) in fp32, for u with 52 random bits. The noise is large where u is small. There fp32 holds u
    exactly enough, and a series keeps the digits of log(1 - u). 1 - u is at least 2^-25, so noise is at least -2.85;
    one draw in 3e7 meets that limit."""
    u = high.to(tl.float32) * 2.0 ** -32 + ((low >> 12).to(tl.float32) + 0.5) * 2.0 ** -52
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6 + u * (1 / 7 + u / 8)))))))
    return -tl.log(tl.where(u < 0.125, series, -tl.log(tl.maximum(1 - u, 2.0 ** -25))))


@triton.jit
def update_best(best, token, logits, k, v, high, low):
    """Adds noise to the logits of tokens k and updates each lane's maximum `best` and its token."""
    x = tl.load(logits + k, mask=k < v, other=float("-inf")).to(tl.float64) + gumbel(high, low).to(tl.float64)
    return tl.maximum(x, best), tl.where(x > best, k, token)


@triton.jit
def gumbel_argmax_kernel(logits, at, seed, step, begin, value, index, m, v, half, stride,
                         SHARE: tl.constexpr, TILE: tl.constexpr):
    """The largest logit plus noise among SHARE pairs of tokens at one position, and its token. A pair is tokens k
    and k + half, because one Philox call gives the noise of two tokens."""
    row, share = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, logits = row // m, logits + row * stride
    key, position = tl.load(seed + b), tl.load(at + row).to(tl.int32)
    now, where = tl.load(step + b).to(tl.int32), tl.load(begin + b).to(tl.int32)
    best = tl.full((TILE,), float("-inf"), tl.float64)
    token = tl.zeros((TILE,), tl.int32)
    for i in range(share * SHARE, tl.minimum(share * SHARE + SHARE, half), TILE):
        k = i + tl.arange(0, TILE)
        r0, r1, r2, r3 = tl.philox(key, k, position, now, where)
        best, token = update_best(best, token, logits, k, half, r0, r1)
        best, token = update_best(best, token, logits, k + half, v, r2, r3)
    top, out = tl.max(best, 0), row * tl.num_programs(1) + share
    tl.store(value + out, top)
    tl.store(index + out, tl.min(tl.where(best == top, token, v - 1), 0).to(tl.int64))


@triton.jit
def best_kernel(value, index, out, shares, v, S: tl.constexpr):
    """The token of the largest value among all shares of a row."""
    row, k = tl.program_id(0), tl.arange(0, S)
    best = tl.load(value + row * shares + k, mask=k < shares, other=float("-inf"))
    at = tl.load(index + row * shares + k, mask=k < shares, other=0)
    tl.store(out + row, tl.min(tl.where(best == tl.max(best, 0), at, v - 1), 0))


@triton.jit
def unmask_kernel(xt, positions, drawn, permutation, step, mask, l, p, P: tl.constexpr):
    """Writes the p drawn tokens of one row over masks. step grows by p, and `positions` gets the next ones."""
    row, j = tl.program_id(0).to(tl.int64), tl.arange(0, P)
    ok = j < p
    ptr = xt + row * l + tl.load(positions + row * p + j, mask=ok, other=0)
    held = tl.load(ptr, mask=ok, other=0)
    tl.store(ptr, tl.load(drawn + row * p + j, mask=ok, other=0), mask=ok & (held == mask))
    begin = tl.load(step + row) + p                     # of the next step, in `permutation`
    after = tl.load(permutation + row * l + (begin + j) % l, mask=ok, other=0)
    tl.debug_barrier()  # all threads have read `positions` and step before they are overwritten
    tl.store(positions + row * p + j, after, mask=ok)
    tl.store(step + row, begin)


def uniform(n, purpose, seed, step, begin):
    """As ops.uniform."""
    out, N = torch.empty(len(seed), n, dtype=torch.float64, device=seed.device), 256
    uniform_kernel[len(seed), triton.cdiv(n, N)](out, purpose, seed, step, begin, n, N=N)
    return out


def gumbel_argmax(logits, positions, seed, step, begin):
    """As ops.gumbel_argmax: logits (b, m, v), positions (b, m), the others (b,)"""
    m, v = logits.shape[1:]
    half, rows = triton.cdiv(v, 2), rowwise(logits).reshape(-1, v)
    value = rows.new_empty(len(rows), triton.cdiv(half, SHARE), dtype=torch.float64)
    index = torch.empty_like(value, dtype=torch.long)
    gumbel_argmax_kernel[value.shape](rows, positions.contiguous(), seed, step, begin, value, index, m, v, half,
                                      rows.stride(0), SHARE=SHARE, TILE=TILE, num_warps=4)
    out = torch.empty_like(positions)
    best_kernel[out.numel(),](value, index, out, value.shape[1], v, S=triton.next_power_of_2(value.shape[1]))
    return out


def unmask_and_advance(xt, positions, drawn, mask_id, permutation, step):
    """As block_ops.unmask_and_advance: xt (b, l), positions and drawn (b, p), permutation (b, l), step (b,), all int64
    and contiguous. Writes into xt, positions and step."""
    tensors, p = (xt, positions, drawn, permutation, step), positions.shape[1]
    assert all(u.is_contiguous() for u in tensors) and drawn.shape == positions.shape
    unmask_kernel[len(xt),](*tensors, mask_id, xt.shape[1], p, P=triton.next_power_of_2(p))
