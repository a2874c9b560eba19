"""
Everything that is kept on disk: checkpoints (weights, configuration, optimizer, step and versions in one file), and
prompts as a model has read them. The formats are known here and nowhere else. Reading never runs code; writing never
leaves half a file.

    python -m pytest tests/test_model.py -k checkpoint        what is claimed here, shown
    python -m pytest tests/test_sample.py -k saved            going on from a saved prompt equals the prompt itself
"""
import dataclasses
import hashlib
import os
import platform
import zipfile

import torch

from model import BlockDiffusionLM, Cache, ModelConfig, ModelError


def save_checkpoint(path, model, **extra):
    """Writes weights, configuration, versions and `extra`, tensors and plain values, to path."""
    save_atomically(path, dict(
        format="nanobdlm-1", config=dataclasses.asdict(model.config), model=model.state_dict(),
        versions=dict(torch=str(torch.__version__), python=platform.python_version()), **extra))


def save_atomically(path, record):
    """torch.save and a rename: a crash or a full disk leaves an older file as it was. ModelError."""
    temporary = f"{path}.tmp"
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(temporary, "wb") as f:
            torch.save(record, f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        if os.path.exists(temporary):
            os.remove(temporary)
        if isinstance(error, (OSError, RuntimeError)):      # torch reports a short write as Runtime
            raise ModelError(f"could not save {path} ({error}); an older file of that name is untouched; "
                             f"free some space or choose another path, and try again") from error
        raise


def load_checkpoint(path, *parts):
    """Reads a checkpoint as plain data on the CPU (never running code). Raises ModelError if it cannot, or
    if one of `parts`, such as optimizer, is missing."""
    if not os.path.isfile(path):
        raise ModelError(f"there is no checkpoint at {path}; make one with python train.py")
    try:
        with zipfile.ZipFile(path) as parts_of_file:            # torch.load does not look at checksums
            if damaged := parts_of_file.testzip():
                raise ValueError(damaged)
        record = torch.load(path, map_location="cpu", weights_only=True)
        for part in ("config", "model", *parts):
            record[part]
        if record["format"] != "nanobdlm-1":
            raise KeyError(record["format"])
    except Exception as error:
        raise ModelError(f"{path} is not a whole nanoBDLM checkpoint (truncated, damaged or another format: "
                         f"{type(error).__name__} {error}); train again or use another file") from error
    return record


def load_model(path, device="cpu"):
    """Returns (model in evaluation mode on device, checkpoint record)."""
    record = load_checkpoint(path)
    try:
        model = BlockDiffusionLM(ModelConfig(**record["config"])).to(device)
        model.load_state_dict(record["model"])
    except (TypeError, RuntimeError) as error:
        raise ModelError(f"{path} holds weights of another configuration: "
                         f"{str(error).splitlines()[0]}") from error
    return model.eval(), record


# ----------------------------------------------------------------------------------------------
# A prompt that is read once and continued many times: a Prefix is its tokens and the cache that they leave. A saved
# one is valid only for the same weights, configuration and dtype.

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


def need_cache(config):
    """Raises ModelError for a model that keeps no cache."""
    if config.full_sequence:
        raise ModelError("a full-sequence model has no prefix cache: give it the prompt itself")


def read_prefix(model, tokens, before=None, on_chunk=None):
    """The Prefix of tokens (m,), after those of the Prefix `before` if there is one. on_chunk(n) is
    called whenever n more have been read. Raises ModelError where the model has no cache."""
    need_cache(model.config)
    tokens = tokens.cpu() if before is None else torch.cat([before.tokens, tokens.cpu()])
    l = model.config.block_len
    cache = model.new_cache(1, len(tokens) // l * l)
    if before is not None:
        copy_row(before.cache, cache)
    held = int(cache.lengths)
    model.prefill(tokens[None, held:cache.max_len].to(cache.lengths.device), cache, on_chunk=on_chunk)
    return Prefix(tokens, cache)


def fingerprint(model, dtype):
    """sha256 of the configuration, of the dtype that generation runs in, and of every weight. Taken before weights are
    cast or prepared for generation, so it is the same for every engine."""
    digest = hashlib.sha256(f"{model.config!r} {dtype}".encode())
    for name, p in model.named_parameters():
        digest.update(f"{name} {p.dtype} {tuple(p.shape)}".encode())
        digest.update(p.detach().contiguous().view(torch.uint8).cpu().numpy())
    return digest.hexdigest()


def save_prefix(path, prefix, mark):
    """Writes a Prefix, atomically; mark: the `fingerprint` of its model. Raises ModelError where that fails."""
    layers = [tuple(part.cpu() for part in state) for state in prefix.cache.layers]
    save_atomically(path, dict(format="nanobdlm-prefix-2", fingerprint=mark, tokens=prefix.tokens, layers=layers))


def load_prefix(path, config, mark):
    """Reads a Prefix as plain data, left on disk until it is copied. Raises ModelError if it is no whole file of this
    kind, or was made by other weights, another configuration or another dtype."""
    need_cache(config)
    if not os.path.isfile(path):
        raise ModelError(f"there is no saved cache at {path}; make one with --save_cache={path}")
    try:
        record = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not record["format"].startswith("nanobdlm-prefix-"):
            raise KeyError(record["format"])
    except Exception as error:
        raise ModelError(f"{path} is not a whole saved cache (truncated or another format: "
                         f"{type(error).__name__}); make it again with --save_cache") from error
    if record["format"] != "nanobdlm-prefix-2":
        raise ModelError(f"{path} was saved by another version, with another kind of fingerprint; make it again with "
                         f"--save_cache")
    if record["fingerprint"] != mark:
        raise ModelError(f"{path} was saved with other weights, another configuration or another dtype; make it again "
                         f"with --save_cache")
    held = len(record["tokens"]) // config.block_len * config.block_len
    return Prefix(record["tokens"], Cache(record["layers"], torch.tensor([held]), held))
