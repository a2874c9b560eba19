"""
The heavy operations of a block-diffusion Mamba-2 / attention hybrid, each with a plain twin.

  ssd_scan              the selective state-space scan (paper, eq. mamba-scan-background), chunked
  ssd_scan_ref          the same as a literal loop over positions: the definition
  causal_conv           the short convolution before the scan, with carried state
  mamba_mixer           both of them, the gated norm and the output projection: a Mamba-2 mixer
  two_stream_attention  clean and noisy streams of the all-block objective, one mask function
  cached_attention      one chunk against a key/value cache and itself
  add_norm              what a layer adds to the residual stream, and the norm that reads it
  linear_cross_entropy  head and loss over masked positions, never holding (b, s, v) logits
  uniform               random numbers that are a function of a seed and counters
  gumbel_argmax         a draw from a softmax
  unmask                what is drawn becomes known

Everything here is a function of tensors; no parameters, no configuration, none of our other files.
See it work:    python -m pytest tests/test_ops.py
Time it:        python bench.py ops
"""
import functools

import torch
import torch.nn.functional as F

KERNELS = {"scan": "torch", "mixer": "torch", "two_stream": "sdpa", "cached": "sdpa", "cross_entropy": "torch",
           "linear": "torch", "residual": "torch", "draw": "torch"}    # linear: see fold.py
EPS = 1e-5                              # of every norm, as in torch.nn.LayerNorm


def at_least_fp32(dtype):
    """The dtype for states, decays and statistics: fp64 stays, everything smaller becomes fp32."""
    return torch.promote_types(dtype, torch.float32)


# ----------------------------------------------------------------------------------------------
# The state-space scan.  s_i = exp(dt_i A) s_{i-1} + dt_i x_i B_i^T,   y_i = s_i C_i + D x_i

def ssd_scan_ref(x, dt, A, B, C, D, initial_state=None, block_len=None):
    """
    The scan as a loop over positions. Slow, obvious, and what every other version is tested against.

    x (b, s, h, p); dt (b, s, h) step sizes > 0; A (h,) < 0; B, C (b, s, n) shared by all heads; D (h,);
    initial_state (b, h, p, n) or None for zeros; block_len divides s, or None for one block.
    Returns y (b, s, h, p) in x.dtype and states (b, k + 1, h, p, n): the state before each of the
    k = s / block_len blocks, then the final one.
    """
    b, s, h, p = x.shape
    dtype = at_least_fp32(x.dtype)
    xs, dt, Bs, Cs = (v.to(dtype) for v in (x, dt, B, C))
    A, D = A.to(dtype), D.to(dtype)
    state = _initial(initial_state, x, B, dtype)
    states, ys = [state], []
    for i in range(s):
        decay = torch.exp(dt[:, i] * A)                                        # (b, h)
        update = (dt[:, i, :, None] * xs[:, i])[..., None] * Bs[:, i, None, None, :]
        state = decay[..., None, None] * state + update                        # (b, h, p, n)
        ys.append((state * Cs[:, i, None, None, :]).sum(-1) + D[..., None] * xs[:, i])
        if (i + 1) % (block_len or s) == 0:
            states.append(state)
    return torch.stack(ys, 1).to(x.dtype), torch.stack(states, 1)


def ssd_scan(x, dt, A, B, C, D, initial_state=None, block_len=None, chunk_len=128, want_states=True):
    """
    The same function as `ssd_scan_ref`, as matrix products over chunks of at most chunk_len
    positions (state-space duality, Dao & Gu 2024). Differentiable in every tensor argument. Where
    nobody reads the states, want_states=False lets the fast path skip them and return None.
    """
    if KERNELS["scan"] == "triton" and _fits_triton(x.size(-1), B.size(-1)):
        return _ssd_scan_triton(x, dt, A, B, C, D, initial_state, block_len, want_states)
    b, s, h, p = x.shape
    assert s % (block_len or s or 1) == 0, f"{s} positions are not whole blocks of {block_len}"
    l = _chunk_len(block_len, chunk_len) if block_len else max(1, min(chunk_len, s))
    dtype = at_least_fp32(x.dtype)
    with torch.autocast(x.device.type, enabled=False):
        xs, dt, B, C = (v.to(dtype) for v in (x, dt, B, C))
        A, D = A.to(dtype), D.to(dtype)
        tail = -s % l                                # dt = 0 leaves the state as it is
        xd, Bc, Cc, a = (F.pad(v.flatten(2), (0, 0, 0, tail)).unflatten(1, (-1, l))
                         for v in (xs * dt[..., None], B, C, dt * A))         # (b, c, l, .)
        xd = xd.unflatten(-1, (h, p)).permute(0, 1, 3, 2, 4)                   # (b, c, h, l, p)
        a = a.transpose(2, 3)                                                  # (b, c, h, l)

        # 1. Inside a chunk: attention-like, with the decay between two positions as the mask.
        decay = torch.exp(segsum(a))                                           # (b, c, h, l, l)
        scores = Cc @ Bc.transpose(2, 3)                                       # (b, c, l, l)
        y = (scores[:, :, None] * decay) @ xd                                  # (b, c, h, l, p)

        # 2. What each chunk alone leaves behind at its end.
        to_end = decay[..., -1, :, None]                                       # (b, c, h, l, 1)
        local = (xd * to_end).transpose(3, 4) @ Bc[:, :, None]                 # (b, c, h, p, n)

        # 3. The state before every chunk, from the chunk totals.
        states = pass_states(local, a.sum(-1), _initial(initial_state, x, B, dtype))

        # 4. What that state contributes to the positions of its chunk.
        from_start = torch.exp(a.cumsum(-1))[..., None]                        # (b, c, h, l, 1)
        y = y + from_start * (Cc[:, :, None] @ states[:, :-1].transpose(3, 4))
        y = y.permute(0, 1, 3, 2, 4).reshape(b, -1, h, p)[:, :s] + D[..., None] * xs
        every = block_len // l if block_len else states.size(1) - 1
        return y.to(x.dtype), states[:, ::every]


SCAN_ROW = 512                          # most positions of a row of the Triton kernels


def scan_row(s, block_len):
    """The row of s tokens: the largest part of a block (of all tokens without blocks) that is no
    longer than SCAN_ROW, so that block boundaries are row boundaries; all of it if that is tiny."""
    whole = block_len or s
    assert s % whole == 0, f"{s} positions are not whole blocks of {block_len}"
    row = _chunk_len(whole, SCAN_ROW)
    return row if row >= 16 else whole


def _fits_triton(p, n):
    """Whether the kernels take head dimension p and state size n."""
    return p in (16, 32, 64) and n in (16, 32, 64, 128, 256)


def _ssd_scan_triton(x, dt, A, B, C, D, initial_state, block_len, want_states):
    """`ssd_scan` by kernels over short rows: what each row leaves behind, the states carried over rows,
    then all rows at once, each from its own state."""
    import kernels
    import kernels_states
    b, s, h, p = x.shape
    row = scan_row(s, block_len)
    A, D = A.float(), D.float()
    if row == s and not want_states:
        return kernels.ssd_rows(x, dt, A, B, C, D, initial_state), None
    if row == s and not torch.is_grad_enabled():        # one row: the kernel's own last state is final
        start = _initial(initial_state, x, B, torch.float32)
        y, final = kernels.ssd_rows(x, dt, A, B, C, D, start, return_final=True)
        return y, torch.stack([start, final], 1)
    start = None if initial_state is None else initial_state.float()
    y, states = kernels_states.ssd_scan(x, dt, A, B, C, D, start, row)
    return y, states[:, ::block_len // row if block_len else s // row]


def ssd_scan_both(x, dt, dt_bias, A, B, C, D, initial_state, z, chunk_len=128):
    """
    Two scans over the same tokens, each with inputs and parameters of its own: the first forward from
    initial_state (b, h, p, n), the second from the last token back to the first, from zeros.

    x, z (b, s, 2, h, p); dt (b, s, 2, h), before dt_bias (2, h) and softplus; A, D (2, h); B, C
    (b, s, 2, n). Returns y * SiLU(z) (b, s, 2, h, p), tokens in their order, and its mean square over
    p (b, s, 2, h), fp32 or better: all that the norm after it needs to know.
    """
    if KERNELS["scan"] == "triton" and _fits_triton(x.size(-1), B.size(-1)):
        import kernels
        return kernels.ssd_both(x, dt, dt_bias, A, B, C, D, initial_state, z)
    dt = F.softplus(dt.to(dt_bias.dtype) + dt_bias)

    def scan(i, state, turn=lambda u: u):
        xi, dti, Bi, Ci = (turn(u[:, :, i]) for u in (x, dt, B, C))
        return turn(ssd_scan(xi, dti, A[i], Bi, Ci, D[i], state, None, chunk_len)[0])
    y = torch.stack([scan(0, initial_state), scan(1, None, lambda u: u.flip(1))], 2) * F.silu(z)
    return y, y.to(at_least_fp32(y.dtype)).square().mean(-1)


def ssd_scan_pairs(x, dt, dt_bias, A, B, C, D, initial_state, z, chunk_len=128):
    """
    Blocks to be committed and the active blocks after them: rows (2 b, ...). The first b are scanned
    forward alone, from initial_state (b, h, p, n), the others as in `ssd_scan_both` from where the first
    end. Arguments and results as there, where the first b rows have zeros for their second scan, and
    the states (b, h, p, n) at the end of the first b.
    """
    if KERNELS["scan"] == "triton" and _fits_triton(x.size(-1), B.size(-1)):
        import kernels
        return kernels.ssd_pairs(x, dt, dt_bias, A, B, C, D, initial_state, z)
    b = len(x) // 2
    steps = F.softplus(dt[:b, :, 0].to(dt_bias.dtype) + dt_bias[0])
    y, states = ssd_scan(x[:b, :, 0], steps, A[0], B[:b, :, 0], C[:b, :, 0], D[0], initial_state, None, chunk_len)
    y = y * F.silu(z[:b, :, 0])
    y = torch.stack([y, torch.zeros_like(y)], 2)
    active, power = ssd_scan_both(x[b:], dt[b:], dt_bias, A, B[b:], C[b:], D, states[:, -1], z[b:], chunk_len)
    return (torch.cat([y, active]), torch.cat([y.to(power.dtype).square().mean(-1), power]), states[:, -1])


def pass_states(local, log_decay, initial):
    """
    Carries states over chunks: out[0] = initial, out[i + 1] = exp(log_decay[i]) out[i] + local[i].
    local (b, c, h, p, n); log_decay (b, c, h) <= 0; initial (b, h, p, n). Returns (b, c + 1, h, p, n).
    """
    b, c, h, p, n = local.shape
    sources = torch.cat([initial[:, None], local], 1).permute(0, 2, 1, 3, 4)   # (b, h, c+1, p, n)
    decay = torch.exp(segsum(F.pad(log_decay.transpose(1, 2), (1, 0))))        # (b, h, c+1, c+1)
    return (decay @ sources.flatten(3)).unflatten(3, (p, n)).permute(0, 2, 1, 3, 4)


def segsum(a):
    """
    (..., l) -> (..., l, l): entry [i, j] is the sum of a over j+1..i, and -inf above the diagonal.
    Summed under a mask: the difference of two cumulative sums would cancel over long sequences.
    """
    l = a.size(-1)
    below = torch.ones(l, l, dtype=torch.bool, device=a.device).tril(-1)
    sums = a[..., None].expand(*a.shape, l).masked_fill(~below, 0).cumsum(-2)
    return sums.masked_fill(below.T, float("-inf"))


def _chunk_len(block_len, chunk_len):
    """The largest chunk <= chunk_len that divides the block, so that boundaries are chunk ends."""
    return max(i for i in range(1, min(chunk_len, block_len) + 1) if block_len % i == 0)


def _initial(state, x, B, dtype):
    b, _, h, p = x.shape
    return x.new_zeros(b, h, p, B.size(-1), dtype=dtype) if state is None else state.to(dtype)


# ----------------------------------------------------------------------------------------------
# The causal convolution over x, B and C

def causal_conv(u, weight, bias, initial):
    """
    Depthwise causal convolution then SiLU: position i sees columns i-w+1..i.

    u (b, s, c); weight (c, w); bias (c,); initial (b, w-1, c): the columns before the first.
    Returns (b, s, c). The state to carry on is the last w-1 columns of [initial; u].
    """
    if KERNELS["scan"] == "triton":
        import kernels_conv
        return kernels_conv.causal_conv(u, weight, bias, initial)
    s = u.size(1)
    columns = torch.cat([initial.to(u.dtype), u], 1)
    out = bias
    for i in range(weight.size(1)):
        out = out + columns[:, i:i + s] * weight[:, i]
    return F.silu(out).to(u.dtype)


def causal_conv_both(u, weight, bias, initial):
    """
    Two convolutions over the same positions, each of channels of its own: the first from initial
    (b, w-1, c) forward, the second from the last position back to the first, from zeros.

    u (b, s, 2, c); weight (2, c, w); bias (2, c). Returns (b, s, 2, c).
    """
    if KERNELS["scan"] == "triton":
        import kernels_conv
        return kernels_conv.causal_conv_both(u, weight, bias, initial)
    (fwd, rev), zeros = u.unbind(2), torch.zeros_like(initial)
    rev = causal_conv(rev.flip(1), weight[1], bias[1], zeros).flip(1)
    return torch.stack([causal_conv(fwd, weight[0], bias[0], initial), rev], 2)


def conv_boundaries(u, initial, block_len):
    """
    Convolution states at every block boundary of u (b, s, c), given initial (b, w-1, c).
    Returns (b, s / block_len + 1, w-1, c): before each block, then after the last.
    """
    w1, l = initial.size(1), block_len or max(u.size(1), 1)
    if l < w1:                                          # a state spans several blocks
        return torch.cat([initial.to(u.dtype), u], 1).unfold(1, w1, l).transpose(2, 3)
    ends = u.unflatten(1, (-1, l))[:, :, l - w1:]                              # (b, k, w1, c)
    return torch.cat([initial.to(u.dtype)[:, None], ends], 1)


# ----------------------------------------------------------------------------------------------
# The mixer around convolution and scan

def gated_norm(y, z, weight):
    """RMS norm of y * SiLU(z), statistics in fp32. y and z (b, s, d), weight (d,)."""
    if KERNELS["mixer"] == "fused" and not torch.is_grad_enabled():
        import kernels_mixer
        return kernels_mixer.gated_norm(y.contiguous(), z, weight)
    y = (y * F.silu(z)).to(at_least_fp32(y.dtype))
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS)
    return (y * weight).to(z.dtype)


def mamba_mixer(proj, conv_weight, conv_bias, dt_bias, A, D, norm_weight, out_weight, conv=None, ssm=None,
                block_len=None, chunk_len=128, want_states=True):
    """
    A Mamba-2 mixer (Dao & Gu 2024) from its input projection to its output.

    proj (r, s, .): z (h p), x (h p), B and C (n each) and dt (h) side by side; anything after them is
    ignored. conv_weight (h p + 2 n, w); conv_bias; dt_bias, A < 0 and D (h,); norm_weight (h p,);
    out_weight (d, h p); boundary states conv (r, w-1, c) and ssm (r, h, p, n), None for zeros.
    Returns y (r, s, d), and the conv and ssm states before every block and at the end: (r, k + 1, w-1,
    c), (r, k + 1, h, p, n) with k = s / block_len, or 1; None where want_states is False.
    """
    di, h, s = norm_weight.numel(), A.numel(), proj.size(1)
    n = (conv_weight.size(0) - di) // 2
    row = scan_row(s, block_len)
    wanted = want_states and (block_len or s)
    if (KERNELS["mixer"] == "fused" and torch.is_grad_enabled() and _fits_triton(di // h, n)
            and row >= conv_weight.size(1)):
        import kernels_mixer
        return kernels_mixer.mamba_mixer(proj, conv_weight, conv_bias, dt_bias, A, D, norm_weight,
                                         out_weight, conv, ssm, row, wanted or 0)
    z, xBC, dt, _ = proj.split([di, di + 2 * n, h, proj.size(-1) - 2 * (di + n) - h], -1)
    if conv is None:
        conv = xBC.new_zeros(len(proj), conv_weight.size(1) - 1, xBC.size(-1))
    convs = conv_boundaries(xBC, conv, block_len) if want_states else None
    xBC = causal_conv(xBC, conv_weight, conv_bias, conv)
    x, B, C = xBC.split([di, n, n], -1)
    dt = F.softplus(dt.to(A.dtype) + dt_bias)                                  # (r, s, h)
    y, ssms = ssd_scan(x.unflatten(-1, (h, -1)), dt, A, B, C, D, ssm, block_len, chunk_len, want_states)
    y = F.linear(gated_norm(y.flatten(2), z, norm_weight), out_weight)
    return (y, convs, ssms) if want_states else (y, None, None)


def join_parts(parts, power=None):
    """
    The sum of a product's parts (P, b, s, d) -> (b, s, d). With power (b, s, P, h), the mean squares of
    heads: each part still lacks the RMS norm of its input.
    """
    dtype = parts.dtype
    if power is not None:
        parts = parts * torch.rsqrt(power.mean(-1) + EPS).movedim(-1, 0)[..., None]
    return parts.sum(0).to(dtype)


def add_norm(h, parts, power, bias, weight, shift):
    """
    A residual addition and the LayerNorm after it. h (b, s, d); parts, None for nothing to add, and
    power as in `join_parts`; bias (d,) is added too, or None; weight, shift (d,) of the norm, shift
    may be None. Returns the sum and its norm, both (b, s, d).
    """
    if KERNELS["residual"] == "triton":
        import kernels_residual
        return kernels_residual.add_norm(h, parts, power, bias, weight, shift)
    if parts is not None:
        h = h + join_parts(parts, power)
    if bias is not None:
        h = h + bias
    return h, F.layer_norm(h, weight.shape, weight, shift, EPS)


# ----------------------------------------------------------------------------------------------
# Attention

def two_stream_mask(q, kv, block_len, n_clean):
    """
    The visibility rule of the all-block objective. kernels_two_stream.py is tested against it.

    q, kv: integer positions (broadcastable) in [n_clean clean tokens; noisy tokens]. A clean token of
    block i sees clean blocks 0..i; a noisy token of block i sees clean blocks 0..i-1 and its own
    noisy block. Returns a boolean tensor, true where the query sees the key.
    """
    q_noisy, kv_noisy = q >= n_clean, kv >= n_clean
    q_block = torch.where(q_noisy, q - n_clean, q) // block_len
    kv_block = torch.where(kv_noisy, kv - n_clean, kv) // block_len
    sees_clean = torch.where(q_noisy, kv_block < q_block, kv_block <= q_block)
    return torch.where(kv_noisy, q_noisy & (q_block == kv_block), sees_clean)


def two_stream_masks(s, block_len, device):
    """
    The rule above for s tokens in blocks of block_len, in the form that attention takes: a pair for
    clean queries (over clean keys) and for noisy queries (over clean then noisy keys). None with a
    single block, where a noisy token sees everything.
    """
    n_clean = s - block_len
    if n_clean == 0:
        return None, None
    if KERNELS["two_stream"] != "sdpa" and block_len % FLEX_TILE == 0:
        return _flex_masks(s, block_len, device)
    at = torch.arange(n_clean + s, device=device)
    mask = two_stream_mask(at[:, None], at, block_len, n_clean)
    return mask[:n_clean, :n_clean], mask[n_clean:]


def two_stream_attention(clean, noisy, masks):
    """
    Attention of both streams. clean = (q, k, v), each (b, h, s - block_len, e): every clean block but
    the last, which nobody sees; q may be None where the clean output is not needed. noisy = (q, k, v),
    each (b, h, s, e). Returns (clean output or None, noisy output) in the shapes of the queries.
    """
    (q_clean, k_clean, v_clean), (q, k, v) = clean, noisy
    if masks[0] is None:
        return q_clean, F.scaled_dot_product_attention(q, k, v)
    k, v = torch.cat([k_clean, k], 2), torch.cat([v_clean, v], 2)
    fits = not isinstance(masks[0], torch.Tensor) and q.element_size() == 2 and q.size(3) <= 128
    if KERNELS["two_stream"] == "cudnn" and fits:
        return _two_stream_cudnn(q_clean, q, k, v)
    out_clean = None if q_clean is None else _masked_attention(q_clean, k_clean, v_clean, masks[0])
    return out_clean, _masked_attention(q, k, v, masks[1])


def _masked_attention(q, k, v, mask):
    if isinstance(mask, torch.Tensor):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return _compiled_flex()(q, k, v, block_mask=mask, kernel_options=FLEX_OPTIONS)


def _two_stream_cudnn(q_clean, q, k, v):
    """two_stream_attention for 16 bits on Hopper. q_clean (b, h, n, e) or None, q (b, h, s, e); k and v
    (b, h, n + s, e), clean tokens first."""
    import kernels_two_stream
    n_clean, e = k.size(2) - q.size(2), q.size(3)
    q = q if q_clean is None else torch.cat([q_clean, q], 2)
    wide = max(16, 1 << (e - 1).bit_length())           # 52 or 56 columns are slower than 64
    if wide > e:
        q, k, v = (F.pad(u, (0, wide - e)) for u in (q, k, v))
    y = kernels_two_stream.two_stream(q, k, v, k.size(2) - 2 * n_clean, e ** -0.5)[..., :e]
    return (None, y) if q_clean is None else (y[:, :, :n_clean], y[:, :, n_clean:])


FLEX_TILE = 128                         # every tile of a block is wholly visible or not at all
# Head dimensions 52 and 56 get tiles of 64 queries by default, which take a quarter longer.
FLEX_OPTIONS = dict(fwd_BLOCK_M=128, fwd_BLOCK_N=64)


@functools.lru_cache(maxsize=8)
def _flex_masks(s, block_len, device):
    """Block masks straight from tile indices: no (2 s)^2 mask is ever made."""
    from torch.nn.attention.flex_attention import BlockMask
    n_clean = s - block_len
    tiles = torch.arange((n_clean + s) // FLEX_TILE, device=device) * FLEX_TILE
    seen = two_stream_mask(tiles[:, None], tiles, block_len, n_clean)

    def block_mask(seen, offset, q_len, kv_len):
        count = seen.sum(1, dtype=torch.int32)[None, None]
        index = seen.int().argsort(dim=1, descending=True, stable=True).int()[None, None]

        def mask_mod(b, h, q, kv):
            return two_stream_mask(q + offset, kv, block_len, n_clean)
        return BlockMask.from_kv_blocks(torch.zeros_like(count), index, count, index, FLEX_TILE, mask_mod,
                                        seq_lengths=(q_len, kv_len))
    c = n_clean // FLEX_TILE
    return (block_mask(seen[:c, :c].contiguous(), 0, n_clean, n_clean),
            block_mask(seen[c:].contiguous(), n_clean, s, n_clean + s))


@functools.lru_cache(maxsize=1)
def _compiled_flex():
    from torch.nn.attention.flex_attention import flex_attention
    return torch.compile(flex_attention, dynamic=False)


def cached_attention(q, k, v, k_cache, v_cache, lengths, block_len):
    """
    Attention of new tokens to a cache and to themselves, block-causally.

    q, k, v (b, h, m, e): m new tokens in whole blocks of block_len; a token sees the cache, the new
    blocks before its own, and its own block both ways. Of a single block q may hold any tokens, in any
    number: all see the same. k_cache, v_cache (c, h, max_len, e): row i sees the first lengths[i]
    positions of cache i mod c; nothing after them need hold anything. lengths (b,) int64. Returns the
    shape of q.
    """
    if k_cache.size(2) == 0 and k.size(2) == block_len:
        return F.scaled_dot_product_attention(q, k, v)
    if KERNELS["cached"] == "triton":
        return _cached_attention_triton(q, k, v, k_cache, v_cache, lengths, block_len)
    lengths = lengths.tolist()
    m, longest = k.size(2), max(lengths)
    block = torch.arange(m, device=q.device) // block_len
    seeing = block if q.size(2) == m else block[:1].expand(q.size(2))
    k_cache, v_cache = (cache[None, :, :, :longest].expand(len(q) // len(cache), -1, -1, -1, -1).flatten(0, 1)
                        for cache in (k_cache, v_cache))
    keys, values = torch.cat([k_cache, k], 2), torch.cat([v_cache, v], 2)
    if m <= block_len and min(lengths) == longest:       # every key is visible
        return F.scaled_dot_product_attention(q, keys, values)
    at = torch.arange(longest, device=q.device)
    mask = seeing[:, None] >= torch.cat([at.new_zeros(longest) - 1, block])    # (m, longest + m)
    if min(lengths) < longest:
        held = at < torch.tensor(lengths, device=q.device)[:, None]            # (b, longest)
        held = F.pad(held, (0, m), value=True)[:, None, None]
        mask = mask & held
        values = values.masked_fill(~held.transpose(2, 3), 0)                  # 0 * garbage is NaN
        keys = keys.masked_fill(~held.transpose(2, 3), 0)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)


def _cached_attention_triton(q, k, v, k_cache, v_cache, lengths, block_len):
    """The kernel takes one block at a time. Of several, all but the last are appended to the cache
    here, which is where they are going anyway: then every row has a cache of its own."""
    from kernels_attention import block_attention
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))                           # (b, m, h, e)
    outs, rows = [], torch.arange(len(q), device=q.device)[:, None]
    for i in range(0, k.size(1), block_len):
        if i:
            at = lengths[:, None] + torch.arange(i - block_len, i, device=q.device)
            k_cache[rows, :, at], v_cache[rows, :, at] = k[:, i - block_len:i], v[:, i - block_len:i]
        own, held = slice(i, i + block_len), lengths + i if i else lengths     # adding 0 would be a kernel
        mine = q[:, own] if k.size(1) > block_len else q
        outs.append(block_attention(mine, k_cache, v_cache, held, k[:, own], v[:, own]))
    return (outs[0] if len(outs) == 1 else torch.cat(outs, 1)).transpose(1, 2)


# ----------------------------------------------------------------------------------------------
# Head and loss

def linear_cross_entropy_ref(hidden, head, target, weight):
    """
    Sum of weight * cross-entropy of the substitution parameterisation: the last row of the head is
    the mask token's, whose logit is minus infinity. hidden (m, d); head (v, d); target, weight (m,).
    """
    logits = (hidden @ head[:-1].T).to(at_least_fp32(hidden.dtype))            # (m, v - 1)
    return (weight * F.cross_entropy(logits, target, reduction="none")).sum()


def linear_cross_entropy(hidden, head, target, weight, chunk_elements=2 ** 27):
    """`linear_cross_entropy_ref`, tiled: at most chunk_elements logits exist at a time."""
    return _LinearCrossEntropy.apply(hidden, head, target, weight, chunk_elements)


def _cross_entropy_tile(logits, target, weight, n_classes):
    """Cross-entropy (m,) over the first n_classes logits, and the gradient of weight * cross-entropy
    in all of them; the statistics are fp32 or better, the gradient is in the logits' dtype."""
    column = torch.arange(logits.size(1), device=logits.device)
    x = logits.to(at_least_fp32(logits.dtype)).masked_fill(column >= n_classes, float("-inf"))
    lse = x.logsumexp(-1)
    ce = lse - x.gather(1, target[:, None])[:, 0]
    hit = (column == target[:, None]).to(x.dtype)
    return ce, ((torch.exp(x - lse[:, None]) - hit) * weight[:, None]).to(logits.dtype)


@functools.lru_cache(maxsize=1)
def _compiled_cross_entropy_tile():
    return torch.compile(_cross_entropy_tile, dynamic=True)


class _LinearCrossEntropy(torch.autograd.Function):
    """The gradient is made beside the loss, tile by tile: three products in all, nothing redone."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(ctx, hidden, head, target, weight, chunk_elements):
        v, ctx.head_dtype, dtype = len(head), head.dtype, at_least_fp32(hidden.dtype)
        fast = KERNELS["cross_entropy"] == "compiled" and hidden.is_cuda
        tile_loss = _compiled_cross_entropy_tile() if fast else _cross_entropy_tile
        # An odd number of columns would send all three products to slow, unaligned kernels.
        head = F.pad(head.to(hidden.dtype), (0, 0, 0, -v % 64)) if hidden.is_cuda else head
        loss = hidden.new_zeros((), dtype=dtype)
        wanted = any(ctx.needs_input_grad[:2])
        d_hidden = torch.zeros_like(hidden) if wanted else None
        d_head = torch.zeros_like(head, dtype=dtype) if wanted else None
        tile = max(1, chunk_elements // v)
        for i in range(0, hidden.size(0), tile):
            h, y, w = hidden[i:i + tile], target[i:i + tile], weight[i:i + tile]
            ce, d_logits = tile_loss(h @ head.T, y, w, v - 1)
            loss += (w * ce).sum()
            if wanted:
                d_hidden[i:i + tile] = d_logits @ head
                d_head += d_logits.T @ h
        ctx.save_for_backward(d_hidden, d_head[:v] if wanted else None)
        return loss

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, grad):
        d_hidden, d_head = ctx.saved_tensors
        return (grad * d_hidden).to(d_hidden.dtype), (grad * d_head).to(ctx.head_dtype), None, None, None


# ----------------------------------------------------------------------------------------------
# Draws. They have no generator whose state moves on: a random number is a function of its row's seed and of
# what it is for. So it does not depend on the rows beside it, the engine or the device, and a CUDA graph, or a
# loop on the device, draws without a word from the host.

def philox(seed, *counters):
    """Four random words of a seed and four counters, int64 tensors that broadcast; of counters the lower 32
    bits count, and words have as many: Philox4x32-10 (Salmon et al. 2011)."""
    low = 0xFFFFFFFF
    a, b, c, d = (n & low for n in counters)
    k0, k1 = seed & low, (seed >> 32) & low
    for _ in range(10):
        x, y = a * 0xD2511F53, c * 0xCD9E8D57           # int64 wraps as uint64 would; >> copies the sign
        a, b, c, d = ((y >> 32) & low) ^ (b ^ k0), y & low, ((x >> 32) & low) ^ (d ^ k1), x & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return a, b, c, d


def _uniforms(seed, *counters):
    """Two variates on (0, 1) of each, fp64 with 52 random bits: never 0 or 1."""
    a, b, c, d = philox(seed, *counters)
    return tuple(((high << 20 | low >> 12).double() + 0.5) * 2.0 ** -52 for high, low in ((a, b), (c, d)))


def uniform(n, purpose, seed, step, begin):
    """n variates on (0, 1) for each row, (b, n) fp64. purpose: a number below 0, for tokens have those above;
    seed (b,) of rows; step (b,) of a block and begin (b,), where the block begins; all int64."""
    if KERNELS["draw"] == "triton":
        import kernels_draw
        return kernels_draw.uniform(n, purpose, seed, step, begin)
    which = torch.arange(n, device=seed.device)
    return _uniforms(seed[:, None], torch.full_like(which, purpose), which, step[:, None], begin[:, None])[0]


def gumbel_argmax(logits, at, seed, step, begin):
    """
    Draws from softmax(logits): minus the log of an exponential variate is a Gumbel one, and the largest
    of logits and Gumbel noise is such a draw. logits (b, m, v) of the positions at (b, m) of a block; seed,
    step and begin as for `uniform`. From uniform variates of 24 bits the tail of large noise would be cut off
    and samples too sharp (arXiv 2409.02908): these have 52. Returns (b, m) int64.
    """
    if KERNELS["draw"] == "triton":
        import kernels_draw
        return kernels_draw.gumbel_argmax(logits, at, seed, step, begin)
    v, drawn = logits.size(-1), []
    seed, step, begin = (x[:, None, None] for x in (seed, step, begin))
    pairs, few = torch.arange(-(-v // 2), device=logits.device), max(1, 2 ** 17 // v)   # few stay in a CPU's cache
    for x, position in zip(logits.split(few, 1), at[..., None].split(few, 1)):
        u = torch.cat(_uniforms(seed, pairs, position, step, begin), -1)[..., :v]
        drawn.append((x.double() - (-torch.log1p(-u)).log()).argmax(-1))
    return torch.cat(drawn, 1)


def unmask(xt, at, drawn, mask_id, order, step):
    """Writes drawn (b, p) at the positions at (b, p) of xt (b, l) that hold mask_id (a position that comes twice
    must not), then turns to the next ones: step (b,) is p more and `at` what comes then in order (b, n). In
    place."""
    if KERNELS["draw"] == "triton":
        import kernels_draw
        return kernels_draw.unmask(xt, at, drawn, mask_id, order, step)
    held = xt.gather(1, at)
    xt.scatter_(1, at, torch.where(held == mask_id, drawn, held))
    step += at.size(1)
    at.copy_(order.gather(1, step[:, None] + torch.arange(at.size(1), device=at.device)))


# ----------------------------------------------------------------------------------------------
# Dispatch: which implementation of each operation runs

class KernelError(ValueError):
    """A choice of kernels that does not exist; the message says which do."""


def select_kernels(setting, device):
    """
    Chooses the implementations for a device and returns one line that names them. setting: "auto", or
    "torch" to force the plain twins. The choice holds for the process.
    """
    if setting not in ("auto", "torch"):
        raise KernelError(f"kernels is '{setting}'; it is auto or torch")
    on_gpu = setting == "auto" and torch.device(device).type == "cuda"
    fast, why = on_gpu, ""
    if on_gpu:
        try:
            import kernels_attention                    # noqa: F401
            import kernels_draw                         # noqa: F401
            import kernels_mixer                        # noqa: F401, and with it the others
            import kernels_residual                     # noqa: F401
            import kernels_two_stream                   # noqa: F401
        except Exception as error:                      # a broken Triton fails in many ways
            fast, why = False, f" (no Triton: {type(error).__name__}: {error})"
    # cuDNN's causal attention is much faster than flex on Hopper, where it was measured.
    hopper = fast and torch.cuda.get_device_capability(device)[0] == 9 and torch.backends.cudnn.is_available()
    KERNELS.update(scan="triton" if fast else "torch", mixer="fused" if fast else "torch",
                   two_stream="cudnn" if hopper else "flex" if fast else "sdpa",
                   cached="triton" if fast else "sdpa", cross_entropy="compiled" if fast else "torch",
                   linear="few_rows" if fast else "torch", residual="triton" if fast else "torch",
                   draw="triton" if fast else "torch")
    return "kernels: " + ", ".join(f"{name} {choice}" for name, choice in KERNELS.items()) + why
