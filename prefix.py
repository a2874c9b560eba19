"""
A prompt that is read once and continued many times: what a model leaves behind of it, in memory and
as a file. Such a file holds tensors and is of use to the same weights alone.

    python sample.py --prompt_file=book.txt --save_cache=book
    python sample.py --load_cache=book --prompt " Then"
    python -m pytest tests/test_sample.py -k saved              going on from it equals the prompt itself
"""
import dataclasses
import hashlib
import os

import torch

from checkpoint import save_atomically
from model import Cache, ModelError


@dataclasses.dataclass
class Prefix:
    """A prompt as a model has read it. The tokens behind the last whole block are not in the cache:
    they are the known part of the first block that is generated."""
    tokens: torch.Tensor                # (m,) int64, all of the prompt
    cache: Cache                        # of one row, exactly as long as the prompt's whole blocks


def copy_row(source, target):
    """Makes the empty one-row cache `target` hold what the shorter or equal `source` holds."""
    for theirs, mine in zip(source.layers, target.layers):
        for a, b in zip(theirs, mine):
            b[tuple(slice(n) for n in a.shape)].copy_(a)
    target.lengths.copy_(source.lengths)


def need_cache(model):
    """Raises ModelError for a model that keeps no cache."""
    if model.config.full_sequence:
        raise ModelError("a full-sequence model has no prefix cache: give it the prompt itself")


def read_prefix(model, tokens, before=None, on_chunk=None):
    """The Prefix of tokens (m,), after those of the Prefix `before` if there is one. on_chunk(n) is
    called whenever n more have been read. Raises ModelError where the model has no cache."""
    need_cache(model)
    tokens = tokens.cpu() if before is None else torch.cat([before.tokens, tokens.cpu()])
    l = model.config.block_len
    cache = model.new_cache(1, len(tokens) // l * l)
    if before is not None:
        copy_row(before.cache, cache)
    held = int(cache.lengths)
    model.prefill(tokens[None, held:cache.max_len].to(cache.lengths.device), cache, on_chunk=on_chunk)
    return Prefix(tokens, cache)


def fingerprint(model):
    """sha256 of the configuration and of every weight as it is now, with its name and dtype. Weights
    that were prepared on another kind of device differ in their last bits, and so do these."""
    digest = hashlib.sha256(repr(model.config).encode())
    for name, p in model.named_parameters():
        digest.update(f"{name} {p.dtype} {tuple(p.shape)}".encode())
        digest.update(p.detach().contiguous().view(torch.uint8).cpu().numpy())
    return digest.hexdigest()


def save_prefix(path, model, prefix):
    """Writes a Prefix, atomically. Raises ModelError where that fails, or the model has no cache."""
    need_cache(model)
    layers = [tuple(part.cpu() for part in state) for state in prefix.cache.layers]
    save_atomically(path, dict(format="nanobdlm-prefix-1", fingerprint=fingerprint(model),
                               tokens=prefix.tokens, layers=layers))


def load_prefix(path, model):
    """Reads a Prefix as plain data, left on disk until it is copied. Raises ModelError if it is no
    whole file of this kind, or was made by other weights, another configuration or another dtype."""
    need_cache(model)
    if not os.path.isfile(path):
        raise ModelError(f"there is no saved cache at {path}; make one with --save_cache={path}")
    try:
        record = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if record["format"] != "nanobdlm-prefix-1":
            raise KeyError(record["format"])
    except Exception as error:
        raise ModelError(f"{path} is not a whole saved cache (truncated or another format: "
                         f"{type(error).__name__}); make it again with --save_cache") from error
    if record["fingerprint"] != fingerprint(model):
        raise ModelError(f"{path} was saved with other weights, another configuration, dtype or kind "
                         f"of device; make it again with --save_cache")
    held = len(record["tokens"]) // model.config.block_len * model.config.block_len
    return Prefix(record["tokens"], Cache(record["layers"], torch.tensor([held]), held))
