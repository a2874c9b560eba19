"""
The backend --kernels=mamba_ssm: the scan of mamba-ssm and the convolution of causal-conv1d. All other operations stay
plain. It is slower than the kernels of this folder and serves as an independent check. `auto` never chooses it.

    pip install setuptools wheel einops
    MAMBA_FORCE_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE pip install --no-deps --no-build-isolation mamba-ssm==2.3.2.post1
    python train.py config/mamba_h_87m.py --kernels=mamba_ssm
    python -m pytest tests/kernels/test_mamba_ssm.py
"""
import functools
import importlib
import importlib.util
import sys
import types

import torch

import ops
from configurator import UserError
from fast import block_ops

CHUNK = 256                             # the longest chunk


def select():
    """Fills ops.FAST. Returns one line that names the kernels in use. Raises UserError without mamba-ssm."""
    try:
        library()
    except Exception as error:                          # built for another torch or Triton it fails in many ways
        raise UserError(f"kernels=mamba_ssm needs the package mamba-ssm ({type(error).__name__}: {error}); "
                        f"MAMBA_FORCE_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE pip install --no-deps "
                        f"--no-build-isolation mamba-ssm==2.3.2.post1 einops") from None
    ops.FAST["ssd_scan"] = ssd_scan
    try:
        from causal_conv1d import causal_conv1d_fn      # noqa: F401
    except Exception as error:
        return f"kernels: mamba-ssm; the rest plain (no causal-conv1d: {type(error).__name__}: {error})"
    ops.FAST["causal_conv"] = causal_conv
    return "kernels: mamba-ssm, causal-conv1d; the rest plain"


@functools.lru_cache(maxsize=1)
def library():
    """Three Triton functions of mamba-ssm. The package's __init__ imports a CUDA extension that they do not need. If
    the extension was not built, an empty module replaces the __init__."""
    try:
        scan = importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
    except Exception:
        spec = importlib.util.find_spec("mamba_ssm")
        if spec is None:
            raise
        sys.modules["mamba_ssm"] = types.ModuleType("mamba_ssm")
        sys.modules["mamba_ssm"].__path__ = spec.submodule_search_locations
        scan = importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
    return scan.chunk_state, scan.state_passing, scan.mamba_chunk_scan_combined


@torch.compiler.disable
def ssd_scan(x, dt, A, B, C, D, initial_state=None, states_every=None, chunk_len=128, want_states=True):
    """
    As ops.ssd_scan. The plain function runs if chunks, heads or states are too small for the package's kernels.

    mamba_chunk_scan_combined stores the states between chunks in the dtype of C, perhaps 16 bits. So chunk_state and
    state_passing compute these states in fp32 first; then every chunk is scanned as a row of its own from its state.
    """
    (b, s, h, p), n = x.shape, B.size(-1)
    l = block_ops.largest_divisor(states_every or s, CHUNK)  # chunks end where a state is wanted
    if l % 16 or p % 16 or n % 16 or x.dtype == torch.float64:
        return ops.ssd_scan.plain(x, dt, A, B, C, D, initial_state, states_every, chunk_len, want_states)
    chunk_state, state_passing, chunk_scan = library()
    B, C, states = B[:, :, None], C[:, :, None], None   # one group: (b, s, 1, n)
    start = x.new_zeros(b, h, p, n, dtype=torch.float32) if initial_state is None else initial_state.float()
    if want_states or s > l:
        steps = dt.float().unflatten(1, (-1, l)).permute(0, 3, 1, 2).contiguous()              # (b, h, c, l)
        log_decay = (steps * A.float()[:, None, None]).cumsum(-1)                              # (b, h, c, l)
        local = chunk_state(B, x, steps, log_decay)                                            # (b, c, h, p, n)
        states, final = state_passing(local.flatten(3), log_decay[..., -1].contiguous(), start.flatten(2))
        states = torch.cat([states, final[:, None]], 1).unflatten(-1, (p, n))                  # (b, c + 1, h, p, n)
        start = states[:, :-1].flatten(0, 1)
    x, dt, B, C = (v.unflatten(1, (-1, l)).flatten(0, 1) for v in (x, dt, B, C))               # (b c, l, ...)
    y = chunk_scan(x, dt.float(), A.float(), B, C, l, D=D.float(), initial_states=start)
    every = (states_every or s) // l                    # one state in that many is returned
    return y.view(b, s, h, p), states[:, ::every] if want_states else None


@torch.compiler.disable
def causal_conv(u, weight, bias, initial):
    """As ops.causal_conv. The plain function runs for sizes that the package does not support."""
    from causal_conv1d import causal_conv1d_fn
    if u.size(-1) % 8 or weight.size(1) > 4:
        return ops.causal_conv.plain(u, weight, bias, initial)
    u, initial = u.contiguous(), initial.to(u.dtype).contiguous()
    return causal_conv1d_fn(u.transpose(1, 2), weight.to(u.dtype), bias.to(u.dtype),
                            initial_states=initial.transpose(1, 2), activation="silu").transpose(1, 2)
