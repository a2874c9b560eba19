"""
Loads the three things that a model leaves on disk, and saves two of them:

  checkpoint     one file: weights, configuration, optimizer state, step; train.py resumes from it
  export         a folder with the weights alone, as safetensors, to publish a model; tools/export.py writes it
  saved prompt   a file with a prompt and the cache after reading it, so that it is read only once

Reading never runs code from the file. Writing never leaves half a file. Which function opens what:

  open_checkpoint        find_checkpoint, load_model and the tokenizer: what sample.py and eval.py call
    find_checkpoint      turns a folder, hf://owner/name or auto into the path of a file
    load_model           load_checkpoint, then a model with these weights
      load_checkpoint    the checked record, from read_tensors (.pt) or read_export (.safetensors)

train.py has a model of its own already: it takes the record of load_checkpoint, and copies the weights (load_weights).

    python checkpoint.py export out/ --to=folder              model.safetensors, config.json and a model card
    python -m pytest tests/robust                             tests with damaged files and full disks
    python -m pytest tests/test_sample.py -k saved            a saved prompt continues as the prompt itself does
"""
import dataclasses
import difflib
import hashlib
import os
import zipfile
from pathlib import Path

import torch

from configurator import ROOT, UserError, fit, run_config, write_file
from data import VOCABULARY, get_tokenizer, read_json
from model import BlockDiffusionLM, Cache, ModelConfig

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"         # the files of an export


def read_tensors(path, what="checkpoint", advice="make one with python train.py", mmap=False):
    """Reads what torch.save wrote, to the CPU. weights_only: an untrusted file cannot run code. Raises UserError, which
    says that no `what` can be read and ends in `advice`, if the file is missing, damaged or of another format."""
    try:
        with zipfile.ZipFile(path) as parts:
            # torch.save compresses nothing; a small file that does could fill the memory. Nor does torch.load verify
            # checksums.
            if any(part.compress_type for part in parts.infolist()) or parts.testzip():
                raise ValueError("a part is compressed or has another checksum")
        return dict(torch.load(path, map_location="cpu", weights_only=True, mmap=mmap))
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
    finite; whether they fit the configuration is checked by load_model. needed: the optional keys that it must have,
    such as "optimizer". Raises UserError for a checkpoint that is damaged or of a fork, and for one without a key."""
    record = read_export(path) if Path(path).suffix == ".safetensors" else read_tensors(path)
    if missing := {"format", "config", "model", *needed}.difference(record):
        raise UserError(f"{path} has no {min(missing)}: it is no whole checkpoint of train.py, such as --resume needs")
    if record["format"] != "nanobdlm-1":
        raise UserError(f"{path} has the format {record['format']}, which this revision does not read")
    if unknown := record["config"].keys() - ModelConfig.__dataclass_fields__.keys():
        raise UserError(f"{path} has the setting {min(unknown)}, which this revision does not know; use the revision "
                        f"or the fork that made it")
    if not all(x.isfinite().all() for x in record["model"].values()):
        raise UserError(f"{path} holds weights that are not finite; use an earlier checkpoint")
    return record


def load_model(path, device="cpu", needed=()):
    """Loads a checkpoint or an export. Returns the model, in evaluation mode on `device`, and the record. needed: see
    load_checkpoint."""
    record = load_checkpoint(path, *needed)
    shapes, config = {k: x.shape for k, x in record["model"].items()}, ModelConfig(**record["config"])
    # A foreign file may ask for a billion layers, or for very wide ones. So shapes are compared without memory first.
    with torch.device("meta"):
        model = BlockDiffusionLM(dataclasses.replace(config, n_layer=min(config.n_layer, len(shapes))))
    if {k: x.shape for k, x in model.state_dict().items()} != shapes:
        raise UserError(f"{path} is damaged, or of a fork: its weights are not those of a model of its configuration")
    # `assign`: to draw random weights first would take as long as to read the file.
    model.load_state_dict({k: x.to(device, torch.float32) for k, x in record["model"].items()}, assign=True)
    return model.eval(), record


def find_checkpoint(path):
    """
    The path of the weights file. `path` may be

      a file of weights
      a folder            its ckpt.pt or, if it has none, its export; a relative folder is looked for here, then in the
                          repository
      hf://owner/name     an export on the Hugging Face hub, or with @revision at its end one of its revisions, which is
                          downloaded unless it is in the hub's cache
      auto                out, if it holds one of these, else assets/storyteller, which ships
    """
    if path.startswith("hf://"):
        from huggingface_hub import snapshot_download
        name, _, revision = path.removeprefix("hf://").partition("@")
        try:
            path = snapshot_download(name, revision=revision or None, allow_patterns=[WEIGHTS, CONFIG, CARD])
        except Exception as error:                      # hub, network and disk raise many types of errors
            raise UserError(f"{path} cannot be downloaded ({type(error).__name__}): check the name, which is "
                            f"hf://owner/name, and the network; a private model needs hf auth login") from error
    folders = ["out", ROOT / "assets" / "storyteller"] if path == "auto" else [path, ROOT / path]
    files = [os.path.join(folder, name) for folder in folders for name in ("ckpt.pt", WEIGHTS)]
    # The first one that exists. If none does, load_checkpoint will refuse `path` as it stands.
    return next((str(file) for file in (*folders, *files) if os.path.isfile(file)), path)


def read_export(path):
    """Reads an export into the form of a checkpoint: the tensors at `path`, and the other entries from the config.json
    in the same folder. Neither format can hold code. Raises UserError if the two do not belong together: config.json
    has the sha256 of the weights."""
    from safetensors.torch import load
    weights, record = Path(path).read_bytes(), read_json(Path(path).with_name(CONFIG))
    if record.get("sha256") != hashlib.sha256(weights).hexdigest():
        raise UserError(f"{path} and the {CONFIG} beside it are no whole export; export or download both again")
    return dict(record, model=load(weights))


def open_checkpoint(path, device):
    """Loads a checkpoint. path: see find_checkpoint. Returns the model, its tokenizer, the path of the file and the
    checkpoint's record."""
    path = find_checkpoint(path)
    model, record = load_model(path, device)
    name, size = record.get("tokenizer"), model.config.vocab_size
    if VOCABULARY.get(name) != size:
        raise UserError(f"{path} has {size} token ids, not those of its tokenizer, {name}; choose from {VOCABULARY}")
    return model, get_tokenizer(name), path, record


def config_from_file(path):
    """The ModelConfig of a config file, given by its path or its name in config/. Its training settings are ignored.
    Its vocabulary is that of its tokenizer. Raises UserError for a file that cannot be read, a misspelt name, or a
    shape that cannot work."""
    defaults = vars(ModelConfig())
    settings = run_config(path, defaults)
    for name in settings.keys() - defaults.keys():      # a setting of train.py, unless it nearly is one of the model
        if near := difflib.get_close_matches(name, defaults, 1, cutoff=0.85):
            raise UserError(f"{path}: there is no setting '{name}'; did you mean {near[0]}?")
    if not settings.keys() & defaults.keys():
        raise UserError(f"{path} sets nothing of a model; name a config file of train.py")
    if (tokenizer := str(settings.get("tokenizer"))) in VOCABULARY:
        settings["vocab_size"] = VOCABULARY[tokenizer]
    return ModelConfig(**{k: fit(k, v, defaults[k], path) for k, v in settings.items() if k in defaults})


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
    record = read_tensors(path, "saved prompt", "make one with --save_cache", mmap=True)
    if record.get("fingerprint") != made_by:
        raise UserError(f"{path} was saved by another model or in another dtype; make it again with --save_cache")
    held = len(record["tokens"]) // config.block_len * config.block_len
    # No rope: the cache is only copied from, by copy_row.
    return record["tokens"], Cache(record["layers"], torch.tensor([held]), held)


def copy_row(source, target):
    """Copies a cache of one row into another, whose max_len may be larger."""
    for a, b in zip(sum(source.layers, ()), sum(target.layers, ())):           # all tensors of every layer
        # Keys and values fill the first positions of a longer row. Boundary states have equal shapes.
        b[tuple(slice(n) for n in a.shape)].copy_(a)
    target.lengths.copy_(source.lengths)


if __name__ == "__main__":
    from tools.export import main
    main()
