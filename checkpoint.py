"""
Saves and loads the three things that a model leaves on disk. Only this file knows their formats:

  checkpoint     one file: weights, configuration, optimizer state, step; train.py resumes from it
  export         a folder with the weights alone, as safetensors, to publish a model; tools/export.py writes it
  saved prompt   a file with a prompt and the cache after reading it, so that it is read only once

Reading never runs code from the file. Writing never leaves half a file.

    python checkpoint.py export out/ --to=folder              model.safetensors, config.json and a model card
    python -m pytest tests/robust                             tests with damaged files and full disks
    python -m pytest tests/test_sample.py -k saved            a saved prompt continues as the prompt itself does
"""
import dataclasses
import fcntl
import hashlib
import importlib
import json
import os
import zipfile
from pathlib import Path

import torch

from configurator import UserError
from model import BlockDiffusionLM, Cache, ModelConfig

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"         # the files of an export


# ----------------------------------------------------------------------------------------------
# Files and packages

def need(package, what, pip=""):
    """Imports an optional package. Raises UserError with the command that installs it. For the message: `what` needs
    the package; `pip` is its name for pip, if that is not the first part of `package`."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise UserError(f"{what} needs {package}: pip install {pip or package.partition('.')[0]}") from None


def check_out(name, path, *endings):
    """Checks the path of an output: it must have one of these endings, so it cannot replace a checkpoint or a text.
    name: the setting that holds the path; an empty path means no output. Raises UserError."""
    if path and not path.endswith(endings):
        raise UserError(f"{name} must end in {' or '.join(endings)}, but is {path}")


def write_file(path, content):
    """
    Writes a file whole or not at all: it writes to path + ".tmp" and renames that file. So after a crash or on a full
    disk an older file is unchanged. content: text, or a function that writes to an open binary file. An empty path
    writes nothing. Two processes must not write the same path at a time, see `lock`. Raises UserError if the file
    cannot be written, and OSError if its folder cannot be made.
    """
    if not path:
        return
    write = content if callable(content) else lambda f: f.write(content.encode())
    temporary = Path(f"{path}.tmp")
    temporary.parent.mkdir(parents=True, exist_ok=True)
    try:
        temporary.unlink(missing_ok=True)               # what a run that was killed has left
        with open(temporary, "xb") as f:                # "x" follows no link that somebody else put there
            write(f)
            f.flush()
            os.fsync(f.fileno())
        temporary.replace(path)
    except (OSError, RuntimeError) as error:
        # torch.save raises a RuntimeError; behind it is the OSError of a full disk.
        why = error.__context__ if isinstance(error.__context__, OSError) else error
        raise UserError(f"{path} cannot be written ({why}); make room there, or choose another path") from error
    finally:
        temporary.unlink(missing_ok=True)               # half a file, after an error


def lock(path, refusal):
    """Opens the file `path`, which is made if it is missing, and locks it until it is closed or the process ends. Keep
    the file that this returns: Python closes a file that nothing refers to. Raises UserError(refusal) if another
    process has locked it."""
    file = open(path, "a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if isinstance(error, BlockingIOError):          # else a file system without locks: train on
            raise UserError(refusal) from None
    return file


def read_tensors(path, what="checkpoint", advice="make one with python train.py", mmap=False):
    """Reads what torch.save wrote, to the CPU. weights_only: an untrusted file cannot run code. Raises UserError, which
    says that no `what` can be read and ends in `advice`, if the file is missing, damaged or of another format."""
    try:
        with zipfile.ZipFile(path) as parts:            # torch.load does not verify checksums
            if damaged := parts.testzip():
                raise ValueError(f"checksum of {damaged}")
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:                          # damaged bytes can raise any type of error
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise UserError(f"no {what} can be read from {path} ({why}); {advice}") from error


# ----------------------------------------------------------------------------------------------
# Checkpoints

def save_checkpoint(path, model, **extra):
    """Writes weights and configuration to path. extra: more entries, of tensors and plain values. Raises UserError if
    the file cannot be written."""
    record = dict(format="nanobdlm-1", config=dataclasses.asdict(model.config), model=model.state_dict(), **extra)
    write_file(path, lambda f: torch.save(record, f))


def load_checkpoint(path, *needed):
    """Reads a checkpoint or an export as plain data on the CPU: {"format", "config", "model", ...}. Its weights are
    finite; whether they fit the configuration is checked by the model's load_state_dict. needed: the optional keys that
    it must have, such as "optimizer". Raises UserError for a checkpoint that is damaged, and for a file without one of
    these keys."""
    record = read_export(path) if Path(path).suffix == ".safetensors" else read_tensors(path)
    if missing := {"format", "config", "model", *needed}.difference(record):
        raise UserError(f"{path} has no {min(missing)}: it is no whole checkpoint of train.py, such as --resume needs")
    if record["format"] != "nanobdlm-1":
        raise UserError(f"{path} has the format {record['format']}, which this revision does not read")
    if not all(x.isfinite().all() for x in record["model"].values()):
        raise UserError(f"{path} holds weights that are not finite; use an earlier checkpoint")
    return record


def load_model(path, device="cpu", needed=()):
    """Loads a checkpoint or an export. Returns the model, in evaluation mode on `device`, and the record. needed: see
    load_checkpoint."""
    record = load_checkpoint(path, *needed)
    config = ModelConfig(**record["config"])
    if config.n_layer > len(record["model"]):           # a damaged file may ask for a billion layers
        raise UserError(f"{path} is damaged: {config.n_layer} layers, but {len(record['model'])} tensors")
    model = BlockDiffusionLM(config).to(device)
    model.load_state_dict(record["model"])
    return model.eval(), record


def find_checkpoint(path):
    """The path of the weights file. `path` may be that file itself; a folder, which stands for its ckpt.pt or, if it
    has none, for its export; or hf://owner/name or hf://owner/name@revision, an export on the Hugging Face hub, which
    is downloaded unless it is in the hub's cache. Raises UserError."""
    if path.startswith("hf://"):
        name, _, revision = path.removeprefix("hf://").partition("@")
        hub = need("huggingface_hub", path)
        try:
            path = hub.snapshot_download(name, revision=revision or None, allow_patterns=[WEIGHTS, CONFIG, CARD])
        except Exception as error:                      # hub, network and disk raise many types of errors
            raise UserError(f"{path} cannot be downloaded ({type(error).__name__}): check the name, which is "
                            f"hf://owner/name, and the network; a private model needs hf auth login") from error
    if not os.path.isdir(path):
        return path
    has_checkpoint, has_export = (os.path.isfile(os.path.join(path, name)) for name in ("ckpt.pt", WEIGHTS))
    return os.path.join(path, WEIGHTS if has_export and not has_checkpoint else "ckpt.pt")


def read_export(path):
    """Reads an export into the form of a checkpoint: the tensors at `path`, and the other entries from the config.json
    in the same folder. Neither format can hold code. Raises UserError if the two do not belong together: config.json
    has the sha256 of the weights."""
    weights = Path(path).read_bytes()
    record = json.loads(Path(path).with_name(CONFIG).read_text(encoding="utf-8"))
    if record.get("sha256") != hashlib.sha256(weights).hexdigest():
        raise UserError(f"{path} and the {CONFIG} beside it are no whole export; export or download both again")
    return dict(record, model=need("safetensors.torch", path).load(weights))


# ----------------------------------------------------------------------------------------------
# Saved prompts: a prompt and its cache. One is valid only for the same weights, configuration and dtype, because the
# cache holds what these computed.

def fingerprint(model, dtype):
    """sha256 of the configuration, the dtype of generation and every weight. Call it before open_engine, which casts
    or rearranges the weights: then all engines have the same fingerprint and can share a saved cache. Raises
    UserError if the model has no cache."""
    if model.config.full_sequence:
        raise UserError("a full-sequence model has no cache to save or load: give it the prompt itself")
    digest = hashlib.sha256(f"{model.config!r} {dtype}".encode())
    for p in model.parameters():
        digest.update(p.detach().contiguous().view(torch.uint8).cpu().numpy())
    return digest.hexdigest()


def save_prompt(path, tokens, cache, made_by):
    """Writes a prompt, tokens (m,) int64, and the cache of one row that holds its whole blocks. The tokens after the
    last whole block are in no cache: they become the known part of the first block that is generated. made_by: the
    `fingerprint` of its model. Raises UserError if the file cannot be written."""
    layers = [tuple(part.cpu() for part in state) for state in cache.layers]
    record = dict(fingerprint=made_by, tokens=tokens.cpu(), layers=layers)
    write_file(path, lambda f: torch.save(record, f))


def load_prompt(path, config, made_by):
    """Reads what save_prompt wrote. Returns the tokens (m,) and their Cache, whose tensors are memory-mapped. config,
    made_by: of the model that will continue it. Raises UserError for a damaged file, or if other weights, another
    configuration or another dtype made it."""
    record = read_tensors(path, "saved prompt", f"make one with --save_cache={path}", mmap=True)
    if record.get("fingerprint") != made_by:
        raise UserError(f"{path} was saved by another model or in another dtype; make it again with --save_cache")
    if not all(part.isfinite().all() for state in record["layers"] for part in state):
        raise UserError(f"{path} is damaged: its cache is not finite; make it again with --save_cache")
    held = len(record["tokens"]) // config.block_len * config.block_len
    return record["tokens"], Cache(record["layers"], torch.tensor([held]), held)


def copy_row(source, target):
    """Copies a cache of one row into another, whose max_len may be larger."""
    for a, b in zip(sum(source.layers, ()), sum(target.layers, ())):           # both tensors of every layer
        # Keys and values fill the first positions of a longer row. Boundary states have equal shapes.
        b[tuple(slice(n) for n in a.shape)].copy_(a)
    target.lengths.copy_(source.lengths)


if __name__ == "__main__":
    from tools.export import main
    main()
