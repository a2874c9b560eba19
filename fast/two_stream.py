"""
Attention in training, by FlexAttention. It replaces ops.two_stream_masks and ops.two_stream_attention as a pair.

FlexAttention skips the tiles that the mask hides. With 16-bit inputs on a Hopper GPU, and blocks of whole tiles, it
runs the kernels of FlashAttention-4, if that package is installed. Otherwise it runs its own Triton kernels.

    python -m tools.compare_ops --only=attention                time it beside libraries
    python -m pytest tests/kernels/test_kernels.py -k "attention or tiles"         values and gradients
"""
import functools
import importlib.metadata
import warnings

import torch
import torch._inductor.runtime.triton_compat                    # fails where torch.compile could not use Triton
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.torch_version import TorchVersion

import ops

TILE = 128                              # if TILE divides block_len, each tile is wholly visible or wholly hidden
FLASH = dict(BACKEND="FLASH")
# Earlier versions now and then return wrong gradients under a mask (flash-attention's pull request 2756).
LEAST_FLASH = "4.0.0b36"
# By default, head dimensions 52 and 56 would get tiles of 64 queries, which take a quarter longer.
TRITON = dict(fwd_BLOCK_M=128, fwd_BLOCK_N=64)
flex = torch.compile(flex_attention, dynamic=False)
warnings.filterwarnings("ignore", message=".*aux_data.*")       # FlashAttention-4 warns when first used


@functools.lru_cache(maxsize=1)
def no_flash():
    """Why flash-attn-4 cannot run, or "" if it can. Imports what FlexAttention does, as a package or cutlass may lack a
    part. The version is asked first: flash-attn 2 has a flash_attn.cute too."""
    try:
        version = importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        return "faster"                                 # completes "flex (faster: pip install ...)"
    if TorchVersion(version) < LEAST_FLASH:             # parses any version
        return f"flash-attn-4 {version} is too old"
    try:
        for name in ("flash_attn.cute.interface", "cutlass.cute.runtime", "cutlass._mlir.dialects.math"):
            importlib.import_module(name)
    except Exception as error:                          # a broken package fails in many ways
        return f"flash-attn-4 cannot be imported, {type(error).__name__}: {error}".partition("\n")[0]
    return ""


def hopper(device):
    """Whether a device is a Hopper GPU. Before Hopper, FlashAttention-4 has no backward. After it, it wants other tiles
    (10.0) or has no backward under a mask (12.0)."""
    return torch.device(device).type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def two_stream_masks(s, block_len, device):
    """Returns (mask of all queries, mask of noisy queries, whether FlashAttention-4 may run). The masks are BlockMasks,
    or None for a single block."""
    masks = (None, None) if s == block_len else block_masks(s, block_len, device)
    return *masks, block_len % TILE == 0 and hopper(device) and not no_flash()


@functools.lru_cache(maxsize=8)
def block_masks(s, block_len, device):
    """BlockMasks of all queries and of noisy queries. If TILE divides block_len, they are built from tile indices: no
    mask of (2 s)^2 positions exists. Else some tiles are partly visible, and FlexAttention asks the rule for each
    position of these."""
    n_clean = s - block_len
    tiles = torch.arange((n_clean + s) // TILE, device=device) * TILE

    def block_mask(first):                              # for the queries from position `first` on
        def mask_mod(b, h, q, kv):
            return ops.two_stream_rule(q + first, kv, block_len, n_clean)
        lengths = n_clean + s - first, n_clean + s
        if block_len % TILE:
            return create_block_mask(mask_mod, None, None, *lengths, device=device)
        seen = ops.two_stream_rule(tiles[first // TILE:, None], tiles, block_len, n_clean)
        count = seen.sum(1, dtype=torch.int32)[None, None]                     # (1, 1, query tiles)
        index = seen.int().argsort(dim=1, descending=True, stable=True).int()[None, None]
        return BlockMask.from_kv_blocks(torch.zeros_like(count), index, count, index, TILE, mask_mod,
                                        seq_lengths=lengths)
    return block_mask(0), block_mask(n_clean)


def two_stream_attention(clean, noisy, masks):
    """As ops.two_stream_attention, with the masks of `two_stream_masks` above. The plain function runs if the masks are
    tensors, and for a single block without FlashAttention-4."""
    # Plain masks are a pair, so `flash` is []; those of `two_stream_masks` above are a triple.
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
    """FlexAttention of q to k and v, each (b, h, ., e). mask: a BlockMask, or None to see everything."""
    e = q.size(-1)
    if flash and e % 8:                                 # FlashAttention-4 takes multiples of 8; 52 is padded to 56
        q, k, v = (F.pad(x, (0, -e % 8)) for x in (q, k, v))
    return flex(q, k, v, block_mask=mask, scale=e ** -0.5, kernel_options=FLASH if flash else TRITON)[..., :e]
