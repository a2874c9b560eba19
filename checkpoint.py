"""
Checkpoints: weights, configuration, optimizer, step and versions in one file. The format is known here
and nowhere else. Reading never runs code; writing never leaves half a file.

    python -m pytest tests/test_model.py -k checkpoint        what is claimed here, shown
"""
import dataclasses
import os
import platform
import zipfile

import torch

from model import BlockDiffusionLM, ModelConfig, ModelError


def save_checkpoint(path, model, **extra):
    """Writes weights, configuration, versions and `extra`, tensors and plain values, to path."""
    state = {k.replace("_orig_mod.", ""): v for k, v in model.state_dict().items()}
    save_atomically(path, dict(
        format="nanobdlm-1", config=dataclasses.asdict(model.config), model=state,
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
