"""
Attention in training. It replaces ops.two_stream_masks and ops.two_stream_attention, which belong together.

Both are FlexAttention, which skips the tiles of a mask that nobody sees. It runs the kernels of FlashAttention-4 where
that package is installed, on Hopper and later in 16 bits, and its own Triton kernels elsewhere.

    python bench.py ops --only=['attention']                       time it beside libraries
    python -m pytest tests/kernels/test_kernels.py -k two_stream    values and gradients
"""
import functools
import importlib.metadata
import warnings

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import ops

TILE = 128                              # where a block is whole tiles, every tile is wholly visible or not at all
FLASH = dict(BACKEND="FLASH")
# Head dimensions 52 and 56 get tiles of 64 queries by default, which take a quarter longer.
TRITON = dict(fwd_BLOCK_M=128, fwd_BLOCK_N=64)
flex = torch.compile(flex_attention, dynamic=False)
warnings.filterwarnings("ignore", message=".*aux_data.*")       # of FlashAttention-4's first use


def has_flash():
    """Whether flash-attn-4 is installed. The module tells less: flash-attn 2 brings an old flash_attn.cute, too."""
    try:
        return bool(importlib.metadata.version("flash-attn-4"))
    except importlib.metadata.PackageNotFoundError:
        return False


def hopper(device):
    """Whether a device is a GPU for which FlashAttention-4 has a backward: Hopper or later."""
    return torch.device(device).type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def two_stream_masks(s, block_len, device):
    """As ops.two_stream_masks where blocks are not whole tiles. Else a block mask for the queries of both streams, one
    for noisy queries alone, (None, None) for a single block, and whether FlashAttention-4 may run."""
    if block_len % TILE:
        return ops.two_stream_masks.plain(s, block_len, device)
    masks = (None, None) if s == block_len else block_masks(s, block_len, device)
    return *masks, has_flash() and hopper(device)


@functools.lru_cache(maxsize=8)
def block_masks(s, block_len, device):
    """The masks are made from tile indices: no mask over (2 s)^2 positions ever exists."""
    n_clean = s - block_len
    tiles = torch.arange((n_clean + s) // TILE, device=device) * TILE

    def block_mask(first):                              # of the queries from `first` on
        seen = ops.two_stream_mask(tiles[first // TILE:, None], tiles, block_len, n_clean)
        count = seen.sum(1, dtype=torch.int32)[None, None]                     # (1, 1, query tiles)
        index = seen.int().argsort(dim=1, descending=True, stable=True).int()[None, None]

        def mask_mod(b, h, q, kv):
            return ops.two_stream_mask(q + first, kv, block_len, n_clean)
        return BlockMask.from_kv_blocks(torch.zeros_like(count), index, count, index, TILE, mask_mod,
                                        seq_lengths=(n_clean + s - first, n_clean + s))
    return block_mask(0), block_mask(n_clean)


def two_stream_attention(clean, noisy, masks):
    """As ops.two_stream_attention, which serves masks that are tensors, and a single block without FlashAttention-4."""
    (q_clean, k_clean, v_clean), (q, k, v), (mask, noisy_mask, *flash) = clean, noisy, masks
    flash = flash == [True] and q.element_size() == 2
    if isinstance(mask, torch.Tensor) or (mask is None and not flash):
        return ops.two_stream_attention.plain(clean, noisy, (mask, noisy_mask))
    if mask is None:                                    # one block: every token sees every token
        return q_clean, attend(q, k, v, None, flash)
    k, v = torch.cat([k_clean, k], 2), torch.cat([v_clean, v], 2)              # (b, h, n_clean + s, e)
    if q_clean is None:
        return None, attend(q, k, v, noisy_mask, flash)
    y = attend(torch.cat([q_clean, q], 2), k, v, mask, flash)
    return y.split([q_clean.size(2), q.size(2)], 2)


def attend(q, k, v, mask, flash):
    """FlexAttention of q to k and v, each (b, h, ., e), under a block mask or None for none."""
    e = q.size(-1)
    if flash and e % 8:                                 # 52: FlashAttention-4 takes multiples of 8
        q, k, v = (F.pad(x, (0, -e % 8)) for x in (q, k, v))
    return flex(q, k, v, block_mask=mask, scale=e ** -0.5, kernel_options=FLASH if flash else TRITON)[..., :e]
