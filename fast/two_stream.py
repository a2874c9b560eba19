"""
Attention of both streams of the all-block objective. It replaces ops.two_stream_masks and
ops.two_stream_attention, which belong together.

The first part is FlexAttention, which compiles the mask of ops.two_stream_mask, for any GPU that Triton knows. The
rest of the file are kernels by hand for 16 bits on Hopper, where they are faster.

Without a GPU, Triton's interpreter tests the latter:    python -m pytest tests/kernels/test_kernels.py -k two_stream
Time it on one:                                          python bench.py ops --only=['two_stream']
"""
import functools
from typing import Tuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import ops
from fast.triton_tools import LOG2E, dot, like, operator, rowwise, strides

FLEX_TILE = 128  # where a block is whole tiles, every tile is wholly visible or not at all
# Head dimensions 52 and 56 get tiles of 64 queries by default, which take a quarter longer.
FLEX_OPTIONS = dict(fwd_BLOCK_M=128, fwd_BLOCK_N=64)


# ----------------------------------------------------------------------------------------------
# FlexAttention, and the choice between it and the kernels below

def hopper(device):
    """Whether the kernels by hand run on this GPU: they need cuDNN's causal attention, which was measured to be faster
    than FlexAttention on Hopper."""
    return (torch.device(device).type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
            and torch.backends.cudnn.is_available())


def two_stream_masks(s, block_len, device):
    """As ops.two_stream_masks, which serves blocks that are not whole tiles. For others: two block masks, and whether
    the kernels by hand may run instead of FlexAttention."""
    if s == block_len or block_len % FLEX_TILE:
        return ops.two_stream_masks.plain(s, block_len, device)
    return *block_masks(s, block_len, device), hopper(device)


@functools.lru_cache(maxsize=8)
def block_masks(s, block_len, device):
    """The masks are made from tile indices: no mask over (2 s)^2 positions ever exists."""
    n_clean = s - block_len
    tiles = torch.arange((n_clean + s) // FLEX_TILE, device=device) * FLEX_TILE
    seen = ops.two_stream_mask(tiles[:, None], tiles, block_len, n_clean)

    def block_mask(seen, offset, q_len, kv_len):
        count = seen.sum(1, dtype=torch.int32)[None, None]
        index = seen.int().argsort(dim=1, descending=True, stable=True).int()[None, None]

        def mask_mod(b, h, q, kv):
            return ops.two_stream_mask(q + offset, kv, block_len, n_clean)
        return BlockMask.from_kv_blocks(torch.zeros_like(count), index, count, index, FLEX_TILE, mask_mod,
                                        seq_lengths=(q_len, kv_len))
    c = n_clean // FLEX_TILE
    return (block_mask(seen[:c, :c].contiguous(), 0, n_clean, n_clean),
            block_mask(seen[c:].contiguous(), n_clean, s, n_clean + s))


def two_stream_attention(clean, noisy, masks):
    """As ops.two_stream_attention, which serves masks that are tensors or None."""
    if masks[0] is None or isinstance(masks[0], Tensor):
        return ops.two_stream_attention.plain(clean, noisy, masks)
    (q_clean, k_clean, v_clean), (q, k, v), (clean_mask, noisy_mask, by_hand) = clean, noisy, masks
    k, v = torch.cat([k_clean, k], 2), torch.cat([v_clean, v], 2)  # (b, h, n_clean + s, e)
    if by_hand and q.element_size() == 2 and q.shape[3] <= 128:
        return two_stream_by_hand(q_clean, q, k, v)
    flex = compiled_flex()
    y_clean = None
    if q_clean is not None:
        y_clean = flex(q_clean, k_clean, v_clean, block_mask=clean_mask, kernel_options=FLEX_OPTIONS)
    return y_clean, flex(q, k, v, block_mask=noisy_mask, kernel_options=FLEX_OPTIONS)


@functools.lru_cache(maxsize=1)
def compiled_flex():
    return torch.compile(flex_attention, dynamic=False)


# ----------------------------------------------------------------------------------------------
# Kernels by hand, for 16 bits on Hopper.
#
# A library's causal kernel is faster than one with a mask of any shape, and this mask is nearly
# causal. With blocks of l tokens, clean token i of block B sees
#
#     clean tokens 0..i                      the causal part
#     the later clean tokens of block B      a triangle
#
# and noisy token i + l, which sees clean blocks 0..B too and its own noisy block, sees
#
#     clean tokens 0..i, the same triangle   the same two parts, one block further on
#     noisy block B + 1                      a square
#
# cuDNN does the causal part; the kernels here add triangles and squares. Forward, they continue the
# online softmax where cuDNN has left it: its output and log-sum-exp are a running mean and its
# weight. Backward, the gradient of a score depends on the other scores through the final output and
# log-sum-exp alone, so each part is given these and computes its share.

TILE = 64  # queries and keys of a tile; a block is whole tiles


# The causal part

def causal_forward(q, k, v, scale):
    """q, k, v (b, h, n, e) -> output like q, log-sum-exp (b, h, n, 1) fp32"""
    return torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, True, False, scale=scale)[:2]


def causal_backward(dout, q, k, v, out, lse, scale):
    """-> dq, dk, dv of these keys; out and lse are those of all keys that the queries see"""
    n, seed = q.shape[2], torch.zeros((), dtype=torch.int64, device=q.device)  # of no dropout
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse, seed, seed, None, None, None, n, n, 0.0, True, scale=scale)


# Triangles and squares. Keys are n clean tokens, then s noisy ones; queries are nq clean tokens
# (all n, or none where nobody needs their outputs), then the s noisy ones. A program has T queries
# or T keys of one head. Exponents are in base 2, `scale` includes log2 e; e is padded to E.

@triton.jit
def load_rows(ptr, first, sl, T: tl.constexpr, e: tl.constexpr, E: tl.constexpr):
    """T rows of e values, from row `first` on. -> (T, E)"""
    c = tl.arange(0, E)
    at = (first + tl.arange(0, T))[:, None] * sl + c[None, :]
    return tl.load(ptr + at, mask=(c < e)[None, :], other=0.0)


@triton.jit
def store_rows(ptr, first, sl, values, T: tl.constexpr, e: tl.constexpr, E: tl.constexpr):
    c = tl.arange(0, E)
    at = (first + tl.arange(0, T))[:, None] * sl + c[None, :]
    tl.store(ptr + at, values.to(ptr.dtype.element_ty), mask=(c < e)[None, :])


@triton.jit
def seen_by(first, n, nq, l):
    """Where T queries are and what they see: whether they are noisy, the first key of their square
    (if noisy), the clean token of the causal part that is level with them, and the end of their
    triangle. The first noisy block sees no clean token: its last two are equal and negative, so that
    loops over clean keys are empty."""
    noisy = first >= nq
    i = tl.where(noisy, first - nq, first)
    square = n + i // l * l
    level = tl.where(noisy, i - l, i)
    return noisy, square, level, tl.where(level < 0, level, level // l * l + l)


@triton.jit
def absorb(q, k, v, acc, m, z, scale, seen):
    """One step of flash attention: the sum acc with its maximum m and weight z, over a tile more."""
    s = tl.where(seen, dot(q, tl.trans(k)) * scale, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    p, alpha = tl.exp2(s - m_new[:, None]), tl.exp2(m - m_new)
    return dot(p.to(v.dtype), v, acc * alpha[:, None]), m_new, z * alpha + tl.sum(p, 1)


@triton.jit
def output_kernel(q, k, v, clean, clean_lse, noisy, noisy_lse, out, lse, n, nq, tokens, scale, l, h,
                  sqb, sqh, sql, skb, skh, skl, spb, sph, spl, sob, soh, sol,
                  T: tl.constexpr, e: tl.constexpr, E: tl.constexpr):
    """Goes on from cuDNN's results for clean and noisy queries. -> out, lse of all keys"""
    row, t, first = tl.program_id(1).to(tl.int64), tl.arange(0, T), tl.program_id(0) * T
    b, head = row // h, row % h
    is_noisy, square, level, end = seen_by(first, n, nq, l)
    q, k, v = q + b * sqb + head * sqh, k + b * skb + head * skh, v + b * skb + head * skh
    qt, acc = load_rows(q, first, sql, T, e, E), tl.zeros((T, E), tl.float32)
    m, z = tl.full((T,), float("-inf"), tl.float32), tl.zeros((T,), tl.float32)
    if level >= 0:
        part = tl.where(is_noisy, noisy, clean) + b * spb + head * sph
        acc += load_rows(part, level, spl, T, e, E)
        m = tl.load(tl.where(is_noisy, noisy_lse, clean_lse) + row * n + level + t) * LOG2E
        z += 1
    for j in range(square, tl.where(is_noisy, square + l, square), T):
        kt, vt = load_rows(k, j, skl, T, e, E), load_rows(v, j, skl, T, e, E)
        acc, m, z = absorb(qt, kt, vt, acc, m, z, scale, True)
    for j in range(level, end, T):
        kt, vt = load_rows(k, j, skl, T, e, E), load_rows(v, j, skl, T, e, E)
        later = (t[None, :] > t[:, None]) | (j > level)
        acc, m, z = absorb(qt, kt, vt, acc, m, z, scale, later)
    store_rows(out + b * sob + head * soh, first, sol, acc / z[:, None], T, e, E)
    tl.store(lse + row * tokens + first + t, (m + tl.log2(z)) / LOG2E)


@triton.jit
def query_gradient(q, do, k, v, lse, delta, scale, seen, acc):
    p = tl.exp2(tl.where(seen, dot(q, tl.trans(k)) * scale - lse[:, None], float("-inf")))
    ds = p * (dot(do, tl.trans(v)) - delta[:, None])
    return dot(ds.to(k.dtype), k, acc)


@triton.jit
def queries_kernel(q, k, v, out, dout, lse, clean, noisy, delta, dq, n, nq, tokens, scale, l, h,
                   sqb, sqh, sql, skb, skh, skl, sob, soh, sol, sdb, sdh, sdl, spb, sph, spl,
                   sgb, sgh, sgl, T: tl.constexpr, e: tl.constexpr, E: tl.constexpr):
    """dq, with cuDNN's shares for clean and noisy queries; `delta` = <out, dout>."""
    row, t, first = tl.program_id(1).to(tl.int64), tl.arange(0, T), tl.program_id(0) * T
    b, head = row // h, row % h
    is_noisy, square, level, end = seen_by(first, n, nq, l)
    q, k, v = q + b * sqb + head * sqh, k + b * skb + head * skh, v + b * skb + head * skh
    qt, acc = load_rows(q, first, sql, T, e, E), tl.zeros((T, E), tl.float32)
    do = load_rows(dout + b * sdb + head * sdh, first, sdl, T, e, E)
    o = load_rows(out + b * sob + head * soh, first, sol, T, e, E)
    d, at = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1), row * tokens + first + t
    tl.store(delta + at, d)
    z = tl.load(lse + at) * LOG2E
    for j in range(square, tl.where(is_noisy, square + l, square), T):
        kt, vt = load_rows(k, j, skl, T, e, E), load_rows(v, j, skl, T, e, E)
        acc = query_gradient(qt, do, kt, vt, z, d, scale, True, acc)
    for j in range(level, end, T):
        kt, vt = load_rows(k, j, skl, T, e, E), load_rows(v, j, skl, T, e, E)
        later = (t[None, :] > t[:, None]) | (j > level)
        acc = query_gradient(qt, do, kt, vt, z, d, scale, later, acc)
    acc *= scale / LOG2E
    if level >= 0:
        part = tl.where(is_noisy, noisy, clean) + b * spb + head * sph
        acc += load_rows(part, level, spl, T, e, E)
    store_rows(dq + b * sgb + head * sgh, first, sgl, acc, T, e, E)


@triton.jit
def key_gradients(q, do, k, v, lse, delta, scale, seen, dk, dv):
    """Tiles of scores have the queries across, so that no product's result is transposed."""
    p = tl.exp2(tl.where(seen, dot(k, tl.trans(q)) * scale - lse[None, :], float("-inf")))
    ds = p * (dot(v, tl.trans(do)) - delta[None, :])
    return dot(ds.to(q.dtype), q, dk), dot(p.to(do.dtype), do, dv)


@triton.jit
def keys_kernel(q, k, v, dout, lse, delta, dk_clean, dv_clean, dk_noisy, dv_noisy, dk, dv,
                n, nq, tokens, scale, l, h, sqb, sqh, sql, skb, skh, skl, sdb, sdh, sdl,
                spb, sph, spl, sgb, sgh, sgl, T: tl.constexpr, e: tl.constexpr, E: tl.constexpr):
    """dk and dv: of a clean key from the queries level with earlier tokens of its block, with
    cuDNN's shares from clean and noisy queries; of a noisy key from its block."""
    row, t, first = tl.program_id(1).to(tl.int64), tl.arange(0, T), tl.program_id(0) * T
    b, head = row // h, row % h
    q, dout, at = q + b * sqb + head * sqh, dout + b * sdb + head * sdh, row * tokens + t
    here = b * skb + head * skh
    kt, vt = load_rows(k + here, first, skl, T, e, E), load_rows(v + here, first, skl, T, e, E)
    dkt, dvt = tl.zeros((T, E), tl.float32), tl.zeros((T, E), tl.float32)
    if first >= n:
        start = nq + (first - n) // l * l
        for i in range(start, start + l, T):
            qt, do = load_rows(q, i, sql, T, e, E), load_rows(dout, i, sdl, T, e, E)
            z, d = tl.load(lse + at + i) * LOG2E, tl.load(delta + at + i)
            dkt, dvt = key_gradients(qt, do, kt, vt, z, d, scale, True, dkt, dvt)
        dkt *= scale / LOG2E
    else:
        for stream in range(tl.where(nq > 0, 0, 1), 2):
            shift = stream * (nq + l)  # from a clean token to the query level with it
            for i in range(first // l * l, first + T, T):
                qt = load_rows(q, i + shift, sql, T, e, E)
                do = load_rows(dout, i + shift, sdl, T, e, E)
                z, d = tl.load(lse + at + i + shift) * LOG2E, tl.load(delta + at + i + shift)
                earlier = (t[None, :] < t[:, None]) | (i < first)
                dkt, dvt = key_gradients(qt, do, kt, vt, z, d, scale, earlier, dkt, dvt)
        part = b * spb + head * sph
        dkt = dkt * (scale / LOG2E) + load_rows(dk_noisy + part, first, spl, T, e, E)
        dvt += load_rows(dv_noisy + part, first, spl, T, e, E)
        if nq > 0:
            dkt += load_rows(dk_clean + part, first, spl, T, e, E)
            dvt += load_rows(dv_clean + part, first, spl, T, e, E)
    there = b * sgb + head * sgh
    store_rows(dk + there, first, sgl, dkt, T, e, E)
    store_rows(dv + there, first, sgl, dvt, T, e, E)


# The operator

def sizes(q, k, block_len, scale):
    """-> clean tokens n, clean queries nq, and what all kernels take"""
    h, tokens = q.shape[1:3]
    n = (k.shape[2] - block_len) // 2  # k holds n clean and n + block_len noisy tokens
    nq = tokens - n - block_len
    assert n % block_len == block_len % TILE == 0 and nq in (0, n), (
        "blocks are whole tiles; queries are of both streams or of the noisy one")
    assert max(u.stride(2) for u in (q, k)) * k.shape[2] < 2 ** 31, (
        "a head has too many tokens: offsets within it have 32 bits")
    return n, nq, (n, nq, tokens, scale * LOG2E.value, block_len, h)


def launch(q):
    return dict(T=TILE, e=q.shape[3], E=triton.next_power_of_2(q.shape[3]), num_warps=4)


def causal_parts(n, nq, block_len, *tensors):
    """Slices of the queries that have a causal part, (clean, noisy), of each tensor."""
    noisy = slice(nq + block_len, None)
    return [[u[:, :, at] for u in tensors] for at in ((slice(n), noisy) if nq else (noisy,))]


def alike(*tensors):
    """Tensors of one shape in one layout, for kernels that are told its strides once."""
    same = all(u.stride() == tensors[0].stride() for u in tensors)
    return tensors if same else tuple(u.contiguous() for u in tensors)


@operator(lambda q, k, v, block_len, scale: (
    token_major(q), q.new_empty(q.shape[:3], dtype=torch.float32)))
def two_stream_forward(q: Tensor, k: Tensor, v: Tensor, block_len: int,
                       scale: float) -> Tuple[Tensor, Tensor]:
    n, nq, common = sizes(q, k, block_len, scale)
    k, v = alike(k, v)
    found = [causal_forward(qi, k[:, :, :n], v[:, :, :n], scale)
             for qi, in causal_parts(n, nq, block_len, q)]
    (clean, noisy), lses = alike(found[0][0], found[-1][0]), [f[1].contiguous() for f in found]
    out, lse = token_major(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    output_kernel[q.shape[2] // TILE, len(q) * q.shape[1]](
        q, k, v, clean, lses[0], noisy, lses[-1], out, lse, *common, *strides(q, 3), *strides(k, 3),
        *strides(noisy, 3), *strides(out, 3), **launch(q))
    return out, lse


def token_major(q):
    """Room for an output (b, h, m, e) that lies in memory as (b, m, h, e): what comes next joins
    the heads of a token."""
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3]).transpose(1, 2)


@operator(lambda dout, out, lse, q, k, v, *_: like(q, k, v))
def two_stream_backward(dout: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor,
                        block_len: int, scale: float) -> Tuple[Tensor, Tensor, Tensor]:
    n, nq, common = sizes(q, k, block_len, scale)
    (k, v), (dq, dk, dv) = alike(k, v), like(q, k, v)
    # PyTorch (2.11) looks a plan for cuDNN's backward up by the layout of q, k and v alone and then
    # reads dout in the layout that the plan was made for: so it has but one.
    dout = dout.contiguous()
    found = [causal_backward(di, qi, k[:, :, :n], v[:, :, :n], oi, zi.contiguous()[..., None], scale)
             for di, qi, oi, zi in causal_parts(n, nq, block_len, dout, q, out, lse)]
    clean, noisy = alike(found[0][0], found[-1][0])
    parts = alike(*found[0][1:], *found[-1][1:])
    delta, rows = torch.empty_like(lse), len(q) * q.shape[1]
    queries_kernel[q.shape[2] // TILE, rows](
        q, k, v, out, dout, lse, clean, noisy, delta, dq, *common, *strides(q, 3), *strides(k, 3),
        *strides(out, 3), *strides(dout, 3), *strides(noisy, 3), *strides(dq, 3),
        **launch(q))
    keys_kernel[k.shape[2] // TILE, rows](
        q, k, v, dout, lse, delta, *parts, dk, dv, *common, *strides(q, 3), *strides(k, 3),
        *strides(dout, 3), *strides(parts[0], 3), *strides(dk, 3), **launch(q))
    return dq, dk, dv


def save(ctx, inputs, output):
    *tensors, ctx.block_len, ctx.scale = inputs
    ctx.save_for_backward(*output, *tensors)


def backward(ctx, dout, _):
    return *two_stream_backward(dout, *ctx.saved_tensors, ctx.block_len, ctx.scale), None, None


two_stream_forward.register_autograd(backward, setup_context=save)


def two_stream(q, k, v, block_len, scale):
    """k and v (b, h, n + s, e): n = s - block_len clean tokens and s noisy ones; q alike, or the
    noisy ones alone; e a multiple of 8. -> like q. Differentiable in all three."""
    return two_stream_forward(rowwise(q), rowwise(k), rowwise(v), block_len, scale)[0]


def two_stream_by_hand(q_clean, q, k, v):
    """`two_stream` for any head dimension, streams apart. q_clean (b, h, n, e) or None, q (b, h, s, e); k and v
    (b, h, n + s, e), clean tokens first. -> outputs like q_clean and q"""
    n_clean, e = k.shape[2] - q.shape[2], q.shape[3]
    q = q if q_clean is None else torch.cat([q_clean, q], 2)
    wide = max(16, 1 << (e - 1).bit_length())  # 52 or 56 columns are slower than 64
    if wide > e:
        q, k, v = (F.pad(u, (0, wide - e)) for u in (q, k, v))
    y = two_stream(q, k, v, k.shape[2] - 2 * n_clean, e ** -0.5)[..., :e]
    return (None, y) if q_clean is None else (y[:, :, :n_clean], y[:, :, n_clean:])
