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
import re
import zipfile

import torch

from files import read_record, write_file
from model import BlockDiffusionLM, Cache, ModelConfig, ModelError

FIELDS = {field.name: field.type for field in dataclasses.fields(ModelConfig)}


def is_tensor(x):
    return isinstance(x, torch.Tensor) and x.layout == torch.strided and x.is_floating_point()


CHECKPOINT = {                          # the form of a checkpoint; what has a "?" is for train.py to resume from
    "format": re.compile("nanobdlm-1"), "model": {"*": is_tensor},
    "config": lambda config: isinstance(config, dict) and all(type(v) is FIELDS.get(k) for k, v in config.items()),
    "?tokenizer": str, "?settings": {"?data": str, "?learning_rate": (int, float)}, "?step": range(2 ** 62),
    "?optimizer": {"step": range(2 ** 62), "*": {"exp_avg": is_tensor, "exp_avg_sq": is_tensor}},
    "?losses": [float], "?skipped": range(2 ** 62),
}
PREFIX = {                              # the form of a saved prompt
    "format": re.compile(r"nanobdlm-prefix-\d+"), "fingerprint": str,
    "tokens": lambda x: isinstance(x, torch.Tensor) and x.dtype == torch.int64 and x.dim() == 1,
    "layers": [lambda state: isinstance(state, tuple) and len(state) == 2 and all(map(is_tensor, state))],
}


def save_checkpoint(path, model, **extra):
    """Writes weights, configuration, versions and `extra`, tensors and plain values, to path."""
    save(path, dict(
        format="nanobdlm-1", config=dataclasses.asdict(model.config), model=model.state_dict(),
        versions=dict(torch=str(torch.__version__), python=platform.python_version()), **extra))


def save(path, record):
    """torch.save, whole or not at all. Raises UserError."""
    write_file(path, lambda f: torch.save(record, f),
               "choose another path; an older file of that name is untouched")


def read_tensors(path, mmap=False):
    """What torch.save wrote, on the CPU. Plain data alone: reading never runs code."""
    with zipfile.ZipFile(path) as parts:                # torch.load does not look at checksums
        if damaged := parts.testzip():
            raise ValueError(f"checksum of {damaged}")
    return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)


def shapes(table):
    return {name: tuple(x.shape) for name, x in table.items()}


def load_checkpoint(path, *parts):
    """Reads a checkpoint as plain data on the CPU and checks that its weights, and its optimizer's moments, fit its
    configuration. Raises UserError if they do not, or if one of `parts`, such as optimizer, is missing."""
    if not os.path.isfile(path):
        raise ModelError(f"there is no checkpoint at {path}; make one with python train.py")
    form = {key.removeprefix("?") if key[1:] in parts else key: part for key, part in CHECKPOINT.items()}
    record = read_record(path, read_tensors, form, "a whole nanoBDLM checkpoint", "train again or use another file")
    config, tables, like = ModelConfig(**record["config"]), [record["model"]], {}
    if config.n_layer <= len(tables[0]):                # else building it might take for ever
        with torch.device("meta"):
            like = shapes(BlockDiffusionLM(config).state_dict())
    if "optimizer" in parts:
        moments = {name: part for name, part in record["optimizer"].items() if name != "step"}
        tables += [{name: part[key] for name, part in moments.items()} for key in ("exp_avg", "exp_avg_sq")]
    if any(shapes(table) != like for table in tables):
        raise ModelError(f"{path} holds weights of another configuration than its own; train again or use another file")
    if not all(x.isfinite().all() for x in tables[0].values()):
        raise ModelError(f"{path} holds weights that are not finite, of a training that failed; use an earlier one, or "
                         f"train again with a lower learning_rate")
    return record


def load_model(path, device="cpu"):
    """Returns (model in evaluation mode on device, checkpoint record)."""
    record = load_checkpoint(path)
    model = BlockDiffusionLM(ModelConfig(**record["config"])).to(device)
    model.load_state_dict(record["model"])
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


def copy_rows(source, target, rows):
    """Makes the empty rows `rows` of the cache `target` hold what the shorter or equal one-row cache `source` holds."""
    for i in rows:
        for theirs, mine in zip(source.layers, target.layers):
            for a, b in zip(theirs, mine):
                b[i:i + 1][tuple(slice(n) for n in a.shape)].copy_(a)
        target.lengths[i:i + 1].copy_(source.lengths)


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
        copy_rows(before.cache, cache, [0])
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
    """Writes a Prefix, whole or not at all; mark: the `fingerprint` of its model. Raises UserError where that fails."""
    layers = [tuple(part.cpu() for part in state) for state in prefix.cache.layers]
    save(path, dict(format="nanobdlm-prefix-2", fingerprint=mark, tokens=prefix.tokens, layers=layers))


def load_prefix(path, config, mark):
    """Reads a Prefix as plain data, left on disk until it is copied. Raises UserError if it is no whole file of this
    kind, or was made by other weights, another configuration or another dtype."""
    need_cache(config)
    if not os.path.isfile(path):
        raise ModelError(f"there is no saved cache at {path}; make one with --save_cache={path}")
    record = read_record(path, lambda path: read_tensors(path, mmap=True), PREFIX, "a whole saved cache",
                         "make it again with --save_cache")
    tokens, layers = record["tokens"], record["layers"]
    held = len(tokens) // config.block_len * config.block_len
    with torch.device("meta"):
        like = BlockDiffusionLM(config).new_cache(1, held)
    for wrong, how in (
            (record["format"] != "nanobdlm-prefix-2", "by another version, with another kind of fingerprint"),
            (record["fingerprint"] != mark, "with other weights, another configuration or another dtype"),
            ([[x.shape for x in state] for state in layers] != [[x.shape for x in state] for state in like.layers]
             or not all(x.isfinite().all() for state in layers for x in state)
             or ((tokens < 0) | (tokens >= config.mask_id)).any(), "damaged: its tokens and its cache do not fit")):
        if wrong:
            raise ModelError(f"{path} was saved {how}; make it again with --save_cache")
    return Prefix(tokens, Cache(layers, torch.tensor([held]), held))
