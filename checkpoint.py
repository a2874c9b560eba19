"""
Everything that is kept on disk: checkpoints (weights, configuration, optimizer, step and versions in one file), exports
(a folder with the weights alone, for others), and prompts as a model has read them. The formats are known here and
nowhere else. Reading never runs code; writing never leaves half a file.

    python checkpoint.py export out/ --to=folder              model.safetensors, config.json and a model card
    python -m pytest tests/test_model.py -k checkpoint        what is claimed here, shown
    python -m pytest tests/test_sample.py -k saved            going on from a saved prompt equals the prompt itself
"""
from configurator import ConfigError, check, configure, script  # first: see quiet_interrupt
import contextlib
import dataclasses
import hashlib
import importlib
import inspect
import json
import os
import platform
import re
import sys
import zipfile

import torch

from data import sha256
from files import read_record, write_file
from model import BlockDiffusionLM, Cache, ModelConfig, ModelError, cast_for_inference

FIELDS = {field.name: field.type for field in dataclasses.fields(ModelConfig)}
VERSIONS = dict(torch=str(torch.__version__), python=platform.python_version())
WEIGHTS, CONFIG, CARD = EXPORT = ("model.safetensors", "config.json", "README.md")      # the files of an export


def is_tensor(x):
    """True for real numbers of 16 bits or more."""
    return isinstance(x, torch.Tensor) and x.layout == torch.strided and x.is_floating_point() and x.itemsize > 1


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
        format="nanobdlm-1", config=dataclasses.asdict(model.config), model=model.state_dict(), versions=VERSIONS, **extra))


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


def read_checkpoint(path, parts):
    """The record of a checkpoint or of an export, with all of `parts`. Raises UserError for any other file."""
    form = {key.removeprefix("?") if key[1:] in parts else key: part for key, part in CHECKPOINT.items()}
    load, advice, exported = read_tensors, "train again or use another file", path.endswith(".safetensors")
    if not os.path.isfile(path):
        if "optimizer" in parts and os.path.isfile(os.path.join(os.path.dirname(path), WEIGHTS)):
            raise ModelError(f"{path} is missing, and the {WEIGHTS} beside it is an export, without the optimizer that "
                             f"training goes on with; name the folder that was trained in")
        how = "python checkpoint.py export" if exported else "python train.py"
        raise ModelError(f"there is no checkpoint at {path}; make one with {how}")
    if exported:
        load, advice = read_export, f"an export is {WEIGHTS} with its {CONFIG}: make it or fetch it again"
        need("safetensors.torch", path)
        form |= dict(dtype=re.compile("float32|bfloat16"), sha256=lambda digest: digest == sha256(path))
    return read_record(path, load, form, "a whole nanoBDLM checkpoint", advice)


def load_checkpoint(path, *parts):
    """Reads a checkpoint or an export as plain data on the CPU and checks that its weights, and its optimizer's
    moments, fit its configuration. Raises UserError if not, or if one of `parts`, such as optimizer, is missing."""
    path = os.fspath(path)
    record = read_checkpoint(path, parts)
    config, tables, like = ModelConfig(**record["config"]), [record["model"]], None
    if config.n_layer <= len(tables[0]):                # else building it might take for ever
        with torch.device("meta"), contextlib.suppress(TypeError, RuntimeError):    # sizes beyond 64 bits
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


def load_model(path, device="cpu", *parts):
    """Returns (model in evaluation mode on device, checkpoint record with all of `parts`)."""
    record = load_checkpoint(path, *parts)
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


# ----------------------------------------------------------------------------------------------
# An export: the weights under their names in the state dict, and a config.json that has the form of a checkpoint

def need(package, path):
    """Imports a package that not every checkpoint needs, or raises ModelError with the command that installs it."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ModelError(f"{path} needs {package}: pip install {package.partition('.')[0]}") from None


def download(path):
    """The folder of hf://owner/name or hf://owner/name@revision in the cache of huggingface_hub. Raises ModelError."""
    found = re.fullmatch(r"hf://([\w.-]+/[\w.-]+)(?:@(.+))?", path)
    if not found:
        raise ModelError(f"{path} names no model of the hub; write hf://owner/name or hf://owner/name@revision")
    hub = need("huggingface_hub", path)
    try:
        return hub.snapshot_download(found[1], revision=found[2], allow_patterns=list(EXPORT))
    except Exception as error:                          # the hub's, the network's and the disk's errors
        raise ModelError(f"{path} cannot be fetched from the hub ({type(error).__name__}): check the name and the "
                         f"network, and run hf auth login for a private model") from None


def find_checkpoint(path):
    """The file that `path` names. A folder stands for its ckpt.pt or, where there is none, for its export; hf:// stands
    for an export on the Hugging Face hub, see `download`. Raises ModelError."""
    folder = download(path) if path.startswith("hf://") else path
    if not os.path.isdir(folder):
        return folder
    held = [name for name in ("ckpt.pt", WEIGHTS, CONFIG) if os.path.isfile(os.path.join(folder, name))]
    exported = folder != path or held and held[0] != "ckpt.pt"
    return os.path.join(folder, WEIGHTS if exported else "ckpt.pt")


def read_export(path):
    """The record of an export: the tensors at `path` and the config.json beside them. Neither can hold code."""
    with open(os.path.join(os.path.dirname(path), CONFIG), encoding="utf-8") as f:
        return dict(json.load(f), model=need("safetensors.torch", path).load_file(path))


def export(checkpoint, to, dtype="float32"):
    """
    Writes the weights of a checkpoint as model.safetensors, with config.json and a model card, into a folder `to` that
    has no such files yet. Every script takes that folder as --checkpoint. Raises UserError.

        python checkpoint.py export out/ --to=folder
        python checkpoint.py export out/ckpt.pt --to=folder --dtype=bfloat16

    float32 keeps every bit. bfloat16 halves the size; A, dt and D of Mamba-2 stay in float32.
    """
    if held := [name for name in EXPORT if os.path.lexists(os.path.join(to, name))]:
        raise ConfigError(f"{to} holds {held[0]} already, which would be lost; name another folder with --to")
    save = need("safetensors.torch", to).save
    model, record = load_model(find_checkpoint(checkpoint), "cpu", "tokenizer", "step")
    settings = {k: v for k, v in record.get("settings", {}).items() if k in ("data", "learning_rate")}
    weights = save(cast_for_inference(model, getattr(torch, dtype)).state_dict(), metadata=dict(format="pt"))
    config = dict(format="nanobdlm-1", config=dataclasses.asdict(model.config), dtype=dtype, step=record["step"],
                  tokenizer=record["tokenizer"], settings=settings, versions=VERSIONS,
                  sha256=hashlib.sha256(weights).hexdigest())
    contents = lambda f: f.write(weights), json.dumps(config, indent=2) + "\n", model_card(model, config)
    for name, content in zip(EXPORT, contents):         # the weights first: they are what may not fit
        write_file(os.path.join(to, name), content, "name another folder with --to")


def model_card(model, config):
    c = model.config
    return f"""---
library_name: nanobdlm
pipeline_tag: text-generation
# license: name yours here
---
A {"full-sequence" if c.full_sequence else "block"} diffusion language model of \
{"Mamba-2 and attention" if c.hybrid else "attention"} layers, trained with nanoBDLM.

- {model.n_params:,} parameters, weights in {config["dtype"]}
- blocks of {c.block_len} tokens, sequences of {c.seq_len} tokens
- tokenizer {config["tokenizer"]}, training step {config["step"]:,}

To sample from it, run this in a copy of nanoBDLM. FOLDER is this folder, or hf://owner/name on the Hugging Face hub.

    python sample.py --checkpoint=FOLDER --prompt="Once"
"""


def main(words):
    """`python checkpoint.py` with these words. Raises UserError."""
    settings, helped = dict(__doc__=inspect.getdoc(export), to="", dtype="float32"), {"-h", "--help"} & set(words)
    if not helped and (words[:1] != ["export"] or words[1:2] == [] or words[1].startswith("-")):
        raise ConfigError(f"write python checkpoint.py export out/ --to=folder, not {' '.join(words) or 'nothing'}")
    configure(settings, words if helped else words[2:])
    check(settings, choices=dict(dtype=("float32", "bfloat16")))
    if not settings["to"]:
        raise ConfigError("to is empty; name a new folder, as in --to=folder")
    export(words[1], settings["to"], settings["dtype"])
    print(f"{settings['to']} holds {', '.join(EXPORT)}; python sample.py --checkpoint={settings['to']}")


if __name__ == "__main__":
    with script("checkpoint.py"):
        main(sys.argv[1:])
