"""
Triton kernels that draw the tokens of a denoising step from its logits.

  uniform         replaces ops.uniform by one kernel. In PyTorch, Philox's ten rounds are more than a hundred kernels.
  gumbel_argmax   replaces ops.gumbel_argmax. The noise is computed in registers, so memory traffic is one read of the
                  logits. Noise is fp32, with full relative precision even in its tail, where it is large.
  unmask_and_advance    replaces that of decoders: writes drawn tokens over masks and looks up the next positions

Without a GPU, Triton's interpreter tests them:

    python -m pytest tests/kernels/test_kernels.py -k "uniform or gumbel or unmask"
"""
import torch
import triton
import triton.language as tl

from fast.triton_tools import rowwise

SHARE, TILE = 512, 256  # pairs of logits per program, and per iteration of its loop


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
def unmask_kernel(xt, positions, drawn, permutation, n_revealed, mask, l, p, P: tl.constexpr):
    """Writes the p drawn tokens of one row over masks. n_revealed grows by p, and `positions` gets the next ones."""
    row, j = tl.program_id(0).to(tl.int64), tl.arange(0, P)
    ok = j < p
    ptr = xt + row * l + tl.load(positions + row * p + j, mask=ok, other=0)
    held = tl.load(ptr, mask=ok, other=0)
    tl.store(ptr, tl.load(drawn + row * p + j, mask=ok, other=0), mask=ok & (held == mask))
    revealed = tl.load(n_revealed + row) + p
    after = tl.load(permutation + row * l + (revealed + j) % l, mask=ok, other=0)
    tl.debug_barrier()  # all threads have read `positions` and n_revealed before they are overwritten
    tl.store(positions + row * p + j, after, mask=ok)
    tl.store(n_revealed + row, revealed)


def uniform(n, stream, seed, step, begin):
    """As ops.uniform."""
    out, N = torch.empty(len(seed), n, dtype=torch.float64, device=seed.device), 256
    uniform_kernel[len(seed), triton.cdiv(n, N)](out, stream, seed, step, begin, n, N=N)
    return out


def gumbel_argmax(logits, positions, seed, step, begin):
    """As ops.gumbel_argmax: logits (b, m, v), positions (b, m), the others (b,)"""
    m, v = logits.shape[1:]
    half, rows = triton.cdiv(v, 2), rowwise(logits).reshape(-1, v)
    value = rows.new_empty(len(rows), triton.cdiv(half, SHARE), dtype=torch.float64)
    index = torch.empty_like(value, dtype=torch.long)
    gumbel_argmax_kernel[value.shape](
        rows, positions.contiguous(), seed, step, begin, value, index, m, v, half, rows.stride(0),
        SHARE=SHARE, TILE=TILE, num_warps=4)
    out = torch.empty_like(positions)
    best_kernel[out.numel(),](value, index, out, value.shape[1], v, S=triton.next_power_of_2(value.shape[1]))
    return out


def unmask_and_advance(xt, positions, drawn, mask_id, permutation, n_revealed):
    """As decoders.unmask_and_advance: xt (b, l), positions and drawn (b, p), permutation (b, l), n_revealed (b,), all
    int64 and contiguous. Writes into xt, positions and n_revealed."""
    tensors, p = (xt, positions, drawn, permutation, n_revealed), positions.shape[1]
    assert all(u.is_contiguous() for u in tensors) and drawn.shape == positions.shape
    unmask_kernel[len(xt),](
        *tensors, mask_id, xt.shape[1], p, P=triton.next_power_of_2(p))
