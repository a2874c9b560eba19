"""
The heavy operations of a block-diffusion Mamba-2 / attention hybrid, written plainly.

  ssd_scan              the selective state-space scan (eq. mamba-scan-background), chunked
  ssd_scan_ref          the same as a literal loop over positions: the definition
  causal_conv           the short convolution before the scan, from a carried state
  gated_norm            the norm after it
  two_stream_attention  attention of the clean and the noisy stream in training; its rule is two_stream_rule
  cached_attention      attention of new blocks to a key/value cache and to themselves
  linear_cross_entropy  head and loss of the masked positions
  uniform               random numbers that are a function of a seed and counters
  gumbel_argmax         a draw from a softmax

Everything here is a function of tensors. There are no parameters and no configuration, and no other file of this
repository is imported. Shapes use the letters of model.py; b is any number of rows.

    python -m pytest tests/test_ops.py                its tests
    python -m tools.compare_ops                       time it beside libraries
"""
import functools
import math
from unittest import mock

import torch
import torch.nn.functional as F

EPS = 1e-5                              # of every norm, as in torch.nn.LayerNorm


# ----------------------------------------------------------------------------------------------
# The one table of faster implementations. On a CPU it is empty, so the functions of this file run. On a GPU
# parallel.select_kernels lets fast/ fill it. `rm -rf fast` leaves everything working, slower.

FAST = {}                               # name of an operation -> a faster function of the same signature


def replaceable(op):
    """A decorator: calls of the operation go to FAST[its qualified name] if there is one, such as "ssd_scan" or, for a
    method, "Mamba2.forward". `op.plain` is the decorated function itself. A fast function calls it for arguments that
    it does not support. FAST is looked up at each call; torch.compile does so once, when it traces the call."""
    name = op.__qualname__

    @functools.wraps(op)
    def run(*args, **kwargs):
        return FAST.get(name, op)(*args, **kwargs)
    run.plain = op
    return run


def plain():
    """A context in which FAST is empty, so that every operation runs as written here. For tests and comparisons.
    `op.plain` replaces one operation only: other operations that it calls are still looked up in FAST."""
    return mock.patch.dict(FAST, clear=True)            # afterwards FAST is as it was before


def at_least_fp32(dtype):
    """The dtype of states, decays and statistics: fp64 for fp64, else fp32."""
    return torch.promote_types(dtype, torch.float32)


# ----------------------------------------------------------------------------------------------
# The state-space scan.  s_i = exp(dt_i A) s_{i-1} + dt_i x_i B_i^T,   y_i = s_i C_i + D x_i

def ssd_scan_ref(x, dt, A, B, C, D, initial_state=None, states_every=None):
    """
    The scan as a loop over positions: the definition, against which every other version is tested.

    x (b, s, h, p); dt (b, s, h) step sizes > 0; A (h,) < 0; B, C (b, s, n) shared by all heads; D (h,); initial_state
    (b, h, p, n) or None for zeros. Returns y (b, s, h, p) in x.dtype, and states (b, n_states, h, p, n) in fp32 or
    better, n_states = s / states_every + 1: the initial one, and one after every states_every positions (None: after
    all s).
    """
    s, dtype = x.size(1), at_least_fp32(x.dtype)
    xs, dt, Bs, Cs = (u.to(dtype) for u in (x, dt, B, C))
    A, D = A.to(dtype), D.to(dtype)
    state = _initial(initial_state, x, B, dtype)
    states, ys = [state], []
    for i in range(s):
        decay = torch.exp(dt[:, i] * A)                                        # (b, h)
        update = (dt[:, i, :, None] * xs[:, i])[..., None] * Bs[:, i, None, None, :]            # (b, h, p, n)
        state = decay[..., None, None] * state + update                        # (b, h, p, n)
        ys.append((state * Cs[:, i, None, None, :]).sum(-1) + D[..., None] * xs[:, i])          # (b, h, p)
        if (i + 1) % (states_every or s) == 0:
            states.append(state)
    return torch.stack(ys, 1).to(x.dtype), torch.stack(states, 1)


@replaceable
def ssd_scan(x, dt, A, B, C, D, initial_state=None, states_every=None, chunk_len=128, want_states=True):
    """
    The same function as `ssd_scan_ref`, as matrix products over chunks of at most chunk_len positions (state-space
    duality, Dao & Gu 2024). Differentiable in every tensor argument. With want_states=False the states are None, and
    the state after the last chunk is not computed.
    """
    b, s, h, p = x.shape
    stretch = states_every or s
    assert s % stretch == 0, f"{s} positions are not a multiple of states_every = {states_every}"
    # Between two returned states there is a stretch of positions. Each is cut into the fewest chunks of at most
    # chunk_len positions, so a stretch of 256 is two chunks of 128, and one of 200 two of 100. If that leaves a rest,
    # the last chunk of a stretch is filled up with positions that leave the state as it is, because their dt is 0:
    # with chunk_len = 4, a stretch of 7 is two chunks of 4, fill 1. Usually fill is 0.
    chunk = math.ceil(stretch / math.ceil(stretch / chunk_len))
    fill = -stretch % chunk
    dtype = at_least_fp32(x.dtype)

    def in_chunks(u):
        """u (b, s, ...) -> (b, n_chunks, chunk, features)."""
        u = u.flatten(2).unflatten(1, (-1, stretch))                           # (b, n_stretches, stretch, features)
        return F.pad(u, (0, 0, 0, fill)).flatten(1, 2).unflatten(1, (-1, chunk))       # (b, n_chunks, chunk, features)

    with torch.autocast(x.device.type, enabled=False):
        xs, dt, B, C = (u.to(dtype) for u in (x, dt, B, C))
        A, D = A.to(dtype), D.to(dtype)
        B, C = in_chunks(B), in_chunks(C)                                      # (b, n_chunks, chunk, n) each
        xd = in_chunks(xs * dt[..., None]).unflatten(-1, (h, p)).transpose(2, 3)       # dt_i x_i
        a = in_chunks(dt * A).transpose(2, 3)           # log of the decay at i
        n_chunks = a.size(1)                            # xd (b, n_chunks, h, chunk, p); a (b, n_chunks, h, chunk)

        # 1. Inside a chunk: y_i = sum_{j<=i} exp(a_{j+1} + .. + a_i) (C_i . B_j) dt_j x_j. This is causal attention
        # with a decay in place of the softmax.
        decay = torch.exp(segsum(a))                                           # (b, n_chunks, h, chunk, chunk)
        scores = C @ B.transpose(2, 3)                  # (b, n_chunks, chunk, chunk), the same for all heads
        y = (scores[:, :, None] * decay) @ xd                                  # (b, n_chunks, h, chunk, p)

        # 2. The state at the end of each chunk, as if the chunk started from zeros. The last chunk's is not needed if
        # no states are wanted: then there are m = n_chunks - 1 of them.
        m = n_chunks if want_states else n_chunks - 1
        initial = _initial(initial_state, x, B, dtype)                         # (b, h, p, n)
        states = initial[:, None]                       # all that a single chunk needs
        if m:
            to_end = decay[:, :m, :, -1, :, None]       # (b, m, h, chunk, 1), the last row: from j to the chunk's end
            local = (xd[:, :m] * to_end).transpose(3, 4) @ B[:, :m, None]      # (b, m, h, p, n)

            # 3. The true state before every chunk, and after the last one if it is wanted.
            states = pass_states(local, a[:, :m].sum(-1), initial)             # (b, m + 1, h, p, n)

        # 4. The part of y that comes from the state s_0 before the chunk: exp(a_1 + .. + a_i) s_0 C_i.
        from_start = torch.exp(a.cumsum(-1))[..., None]                        # (b, n_chunks, h, chunk, 1)
        y = y + from_start * (C[:, :, None] @ states[:, :n_chunks].transpose(3, 4))    # (b, n_chunks, h, chunk, p)

        # Back to positions, without the fill.
        y = y.transpose(2, 3).reshape(b, -1, stretch + fill, h, p)[:, :, :stretch].flatten(1, 2)   # (b, s, h, p)
        y = (y + D[..., None] * xs).to(x.dtype)
        # A stretch is (stretch + fill) / chunk chunks. So one state in that many is returned.
        return y, states[:, ::(stretch + fill) // chunk] if want_states else None


def pass_states(local, log_decay, initial):
    """
    Carries states over chunks: out[0] = initial, out[i + 1] = exp(log_decay[i]) out[i] + local[i]. local (b, n_chunks,
    h, p, n); log_decay (b, n_chunks, h) <= 0; initial (b, h, p, n). Returns (b, n_chunks + 1, h, p, n).
    """
    # One product in place of a loop: out[i] is the sum over j <= i of sources[j], decayed over chunks j..i-1. With 3
    # chunks and d = log_decay, out[2] = e^(d0 + d1) initial + e^d1 local[0] + local[1], so row 2 of the matrix `decay`
    # is e^(d0 + d1), e^d1, 1, 0. segsum sums over j+1..i; the zero in front of d makes that chunks j..i-1.
    sources = torch.cat([initial[:, None], local], 1).permute(0, 2, 1, 3, 4)   # (b, h, n_chunks + 1, p, n)
    decay = torch.exp(segsum(F.pad(log_decay.transpose(1, 2), (1, 0))))        # (b, h, n_chunks + 1, n_chunks + 1)
    return (decay @ sources.flatten(3)).view_as(sources).permute(0, 2, 1, 3, 4)            # (b, n_chunks + 1, h, p, n)


def segsum(a):
    """
    (..., m) -> (..., m, m): entry [i, j] is the sum of a over j+1..i, and -inf above the diagonal. Every column is a
    cumulative sum of its own, because the difference of two cumulative sums would lose precision.
    """
    m = a.size(-1)
    below = torch.ones(m, m, dtype=torch.bool, device=a.device).tril(-1)       # (m, m): i > j
    sums = a[..., None].expand(*a.shape, m).masked_fill(~below, 0).cumsum(-2)  # column j sums a_{j+1}, a_{j+2}, ...
    return sums.masked_fill(below.T, float("-inf"))                            # below.T: i < j


def _initial(state, x, B, dtype):
    """The initial state (b, h, p, n) of a scan in `dtype`, zeros if state is None."""
    b, _, h, p = x.shape
    return x.new_zeros(b, h, p, B.size(-1), dtype=dtype) if state is None else state.to(dtype)


# ----------------------------------------------------------------------------------------------
# The convolution before the scan and the norm after it

@replaceable
def causal_conv(u, weight, bias, initial):
    """
    Depthwise causal convolution, then SiLU. A column is the c channels of one position; position i sees columns
    i-w+1..i.

    u (b, s, c); weight (c, w); bias (c,); initial (b, w-1, c): the columns before the first one of u. Returns
    (b, s, c). The state to carry on, which is not returned, is the last w-1 columns of [initial; u].
    """
    s = u.size(1)
    columns = torch.cat([initial.to(u.dtype), u], 1)                           # (b, w - 1 + s, c)
    out = bias
    for i in range(weight.size(1)):
        out = out + columns[:, i:i + s] * weight[:, i]
    return F.silu(out).to(u.dtype)


def conv_boundaries(u, initial, states_every):
    """
    The convolution states of u (b, s, c), given the one before it, initial (b, w-1, c). A state is the last w-1 columns
    before a boundary; boundaries are states_every columns apart (None: s). Returns (b, n_states, w-1, c), as
    `ssd_scan` counts them.
    """
    w1 = initial.size(1)                                                       # w - 1
    # With `initial` in front, the w - 1 columns before boundary i begin at column i * states_every.
    columns = torch.cat([initial.to(u.dtype), u], 1)                           # (b, w - 1 + s, c)
    return columns.unfold(1, w1, states_every or u.size(1)).transpose(2, 3)    # unfold: (b, n_states, c, w - 1)


@replaceable
def gated_norm(y, z, weight):
    """RMS norm of y * SiLU(z), with statistics in fp32 or better. y and z (b, s, d), weight (d,). Returns (b, s, d)."""
    y = (y * F.silu(z)).to(at_least_fp32(y.dtype))
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS)
    return (y * weight).to(z.dtype)


# ----------------------------------------------------------------------------------------------
# Attention

def two_stream_rule(q, kv, block_len, n_clean):
    """
    The visibility rule of the all-block objective. A clean token of block i sees clean blocks 0..i. A noisy token of
    block i sees clean blocks 0..i-1 and its own noisy block. Clean tokens see each other because later blocks read
    their keys and values, which should depend on more than one token. A block is cached when it is finished, so its
    clean tokens may all see each other. `cached_attention` follows the same rule.

    q, kv: integer tensors that broadcast, indices into [n_clean clean tokens; noisy tokens]. Returns a boolean tensor,
    true where query q sees key kv.
    """
    q_noisy, kv_noisy = q >= n_clean, kv >= n_clean
    q_block = torch.where(q_noisy, q - n_clean, q) // block_len
    kv_block = torch.where(kv_noisy, kv - n_clean, kv) // block_len
    sees_clean = torch.where(q_noisy, kv_block < q_block, kv_block <= q_block)
    return torch.where(kv_noisy, q_noisy & (q_block == kv_block), sees_clean)


@replaceable
@functools.lru_cache(maxsize=1)
def two_stream_masks(s, block_len, device):
    """
    The masks of `two_stream_attention` for s tokens in blocks of block_len, by the rule above. Returns boolean masks,
    true where a query sees a key: (n_clean, n_clean) of clean queries and clean keys, and (s, n_clean + s) of noisy
    queries and [clean; noisy] keys; n_clean is s - block_len. Returns (None, None) for a single block: there are no
    clean tokens, and every noisy token sees every other.

    Called outside of the layers, because a compiled layer would make them again; lru_cache keeps the last ones.
    fast/ has masks of another form for its `two_stream_attention`, so it replaces both functions together.
    """
    n_clean = s - block_len
    if n_clean == 0:
        return None, None
    at = torch.arange(n_clean + s, device=device)
    mask = two_stream_rule(at[:, None], at, block_len, n_clean)
    return mask[:n_clean, :n_clean], mask[n_clean:]


@replaceable
def two_stream_attention(clean, noisy, masks):
    """
    Attention of both streams. clean = (q, k, v), each (b, h, s - block_len, e): all clean blocks but the last one,
    which no block sees. Its q is None if the clean output is unused. noisy = (q, k, v), each (b, h, s, e). masks: of
    `two_stream_masks`. Returns the outputs of the clean stream, or None, and of the noisy stream, in the shapes of the
    queries.
    """
    (q_clean, k_clean, v_clean), (q, k, v) = clean, noisy
    if masks[0] is None:                                # a single block: q_clean is None or empty, as is its output
        return q_clean, F.scaled_dot_product_attention(q, k, v)
    y_clean = None
    if q_clean is not None:
        y_clean = F.scaled_dot_product_attention(q_clean, k_clean, v_clean, attn_mask=masks[0])
    k, v = torch.cat([k_clean, k], 2), torch.cat([v_clean, v], 2)              # (b, h, n_clean + s, e)
    return y_clean, F.scaled_dot_product_attention(q, k, v, attn_mask=masks[1])


@replaceable
def cached_attention(q, k, v, k_cache, v_cache, lengths, block_len):
    """
    Attention of new tokens to a cache and to themselves, block-causally: a token sees the cache, the new blocks before
    its own, and all of its own block.

    q, k, v (b, h, m, e): m new tokens in whole blocks of block_len. If they are a single block, q may be only some of
    its queries (fast/ needs no more in the last layer): all see the same keys. k_cache, v_cache (b, h, max_len, e);
    lengths (b,) int64: row i sees the first lengths[i] positions of the cache. The rest may hold anything finite: it
    gets weight 0, but 0 times NaN is NaN. Returns the shape of q.
    """
    m = k.size(2)
    # `int` waits for the GPU. A full-sequence model, whose cache has max_len 0, need not wait.
    longest = int(lengths.max()) if k_cache.size(2) else 0
    held = torch.arange(longest, device=q.device) < lengths[:, None]           # (b, longest): which cached keys count
    block = torch.arange(m, device=q.device) // block_len                      # (m,), of the new keys
    q_block = block if m > block_len else block[:1]                            # (m,), or (1,): a single block
    own = q_block[:, None] >= block                                            # (m or 1, m): which new keys are seen
    mask = torch.cat([held[:, None, None].expand(-1, -1, len(own), -1), own.expand(len(held), 1, -1, -1)], -1)

    keys = torch.cat([k_cache[:, :, :longest], k], 2)                          # (b, h, longest + m, e)
    values = torch.cat([v_cache[:, :, :longest], v], 2)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)


# ----------------------------------------------------------------------------------------------
# Head and loss

@replaceable
def linear_cross_entropy(hidden, head, target, weight):
    """
    The sum of weight * cross-entropy, a scalar, under the substitution parameterisation: the last row of the head is
    the mask token's, whose logit is minus infinity. hidden (m, d); head (vocab, d); target, weight (m,). All m * vocab
    logits exist at once; fast/ needs only a part of them at a time.
    """
    logits = (hidden @ head[:-1].T).to(at_least_fp32(hidden.dtype))            # (m, vocab - 1)
    return (weight * F.cross_entropy(logits, target, reduction="none")).sum()


# ----------------------------------------------------------------------------------------------
# Draws. A random number is a pure function of a seed and four counters. A generator would have a state, and then the
# tokens of a row would depend on the rows beside it and on the order in which an engine draws. Without one, every
# batch, engine and device has the same numbers. (Gumbel noise that fast/ makes of them is rounded differently.)
#
# the counters of  uniform         purpose, below 0            index of the variate      step   begin
#                  gumbel_argmax   pair of tokens, from 0 on   position in the block     step   begin
#
# The first counter keeps the two apart: they never share a number. Seed: of the row. step: differs between the steps of
# a block. begin: the position at which the block begins.

def philox(seed, *counters):
    """Philox4x32-10 (Salmon et al. 2011): a seed and four counters, int64 tensors that broadcast -> four tensors of
    random 32-bit words, in int64. Only the low 32 bits of each counter are used."""
    low = 0xFFFFFFFF                                    # a mask of the low 32 bits
    a, b, c, d = (n & low for n in counters)
    k0, k1 = seed & low, (seed >> 32) & low
    for _ in range(10):
        x, y = a * 0xD2511F53, c * 0xCD9E8D57           # wraps like uint64; `& low` drops the sign bits of >>
        a, b, c, d = ((y >> 32) & low) ^ (b ^ k0), y & low, ((x >> 32) & low) ^ (d ^ k1), x & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return a, b, c, d


def _uniforms(seed, *counters):
    """Two uniform variates on (0, 1), never 0 or 1, for each seed and set of counters: fp64 with 52 random bits."""
    a, b, c, d = philox(seed, *counters)
    return tuple(((high << 20 | low >> 12).double() + 0.5) * 2.0 ** -52 for high, low in ((a, b), (c, d)))


@replaceable
def uniform(n, purpose, seed, step, begin):
    """Returns n uniform variates on (0, 1) for each row, (b, n) fp64. purpose: an int below 0. seed, step, begin (b,)
    int64."""
    which = torch.arange(n, device=seed.device)
    return _uniforms(seed[:, None], torch.full_like(which, purpose), which, step[:, None], begin[:, None])[0]


@replaceable
def gumbel_argmax(logits, positions, seed, step, begin):
    """
    Draws tokens (b, m) int64 from softmax(logits) by the Gumbel-max trick: the argmax of logits plus Gumbel noise is
    such a draw, and minus the log of an exponential variate is Gumbel noise. logits (b, m, vocab) are those at these
    positions (b, m) of a block; seed, step and begin as for `uniform`. The uniform variates have 52 bits. With 24 the
    tail of large noise would be cut off, and samples would be too sharp (arXiv 2409.02908).
    """
    vocab, drawn = logits.size(-1), []
    seed, step, begin = (key[:, None, None] for key in (seed, step, begin))    # (b, 1, 1) each
    # _uniforms returns two variates, so pair i serves two tokens: i and i + ceil(vocab / 2). per_tile positions at a
    # time, so that their noise fits into a CPU's cache.
    pairs, per_tile = torch.arange(-(-vocab // 2), device=logits.device), max(1, 2 ** 17 // vocab)
    for x, position in zip(logits.split(per_tile, 1), positions[..., None].split(per_tile, 1)):
        u = torch.cat(_uniforms(seed, pairs, position, step, begin), -1)[..., :vocab]          # (b, per_tile, vocab)
        drawn.append((x.double() - (-torch.log1p(-u)).log()).argmax(-1))       # -log1p(-u) is exponential
    return torch.cat(drawn, 1)
