"""
Saves and loads the three things that a model leaves on disk. Only this file knows their formats:

  checkpoint   one file: weights, configuration, optimizer state, step, versions; train.py resumes from it
  export       a folder with the weights alone, as safetensors, to publish a model
  Prefix       a file with a prompt and the cache after reading it, so that it is read only once

Reading never runs code from the file. Writing never leaves half a file.

    python checkpoint.py export out/ --to=folder              model.safetensors, config.json and a model card
    python -m pytest -k checkpoint                            tests of checkpoints
    python -m pytest tests/test_sample.py -k saved            a saved prompt continues as the prompt itself does
"""
import contextlib
import dataclasses
import hashlib
import inspect
import json
import os
import platform
import re
import sys
import zipfile

import torch

from configurator import UserError, check, configure, script
from data import sha256
from files import need, read_record, write_file
from model import BlockDiffusionLM, Cache, ModelConfig, cast_for_inference

VERSIONS = dict(torch=str(torch.__version__), python=platform.python_version())         # TorchVersion is no plain str
WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
EXPORT = [WEIGHTS, CONFIG, CARD]                        # the files of an export


def is_tensor(x):
    """Whether x is a dense tensor of floats of 16 bits or more, as all weights, moments and states are."""
    return isinstance(x, torch.Tensor) and x.layout == torch.strided and x.is_floating_point() and x.itemsize > 1


# The forms of a checkpoint and of a saved prefix, in the notation of files.misfit. Keys with "?" may be missing:
# sampling and evaluation need the weights only, train.py needs the other entries to resume.
CHECKPOINT = {
    "format": re.compile("nanobdlm-1"), "model": {"*": is_tensor},
    "config": lambda config: isinstance(config, dict) and all(
        type(value) is ModelConfig.__annotations__.get(name) for name, value in config.items()),
    "?tokenizer": str, "?settings": {"?data": str, "?learning_rate": (int, float)}, "?step": range(2 ** 62),
    "?optimizer": {"step": range(2 ** 62), "*": {"exp_avg": is_tensor, "exp_avg_sq": is_tensor}},
    "?losses": [float], "?skipped": range(2 ** 62), "?text": (str, type(None))}
PREFIX = {
    "format": re.compile("nanobdlm-prefix-2"), "fingerprint": str,
    "tokens": lambda x: isinstance(x, torch.Tensor) and x.dtype == torch.int64 and x.dim() == 1,
    "layers": [lambda state: isinstance(state, tuple) and len(state) == 2 and all(map(is_tensor, state))]}


def save_checkpoint(path, model, **extra):
    """Writes weights, configuration and versions to path. extra: more entries, of tensors and plain values."""
    save(path, dict(format="nanobdlm-1", config=dataclasses.asdict(model.config), model=model.state_dict(),
                    versions=VERSIONS, **extra))


def save(path, record):
    """torch.save, but the file is whole when it appears. Raises UserError if it cannot be written."""
    write_file(path, lambda f: torch.save(record, f), "choose another path; an older file of that name is untouched")


def read_tensors(path, mmap=False):
    """Reads what torch.save wrote, to the CPU. weights_only: an untrusted file cannot run code."""
    with zipfile.ZipFile(path) as parts:                # torch.load does not verify checksums
        if damaged := parts.testzip():
            raise ValueError(f"checksum of {damaged}")
    return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)


def shapes(table):
    """{name: shape} of {name: tensor}."""
    return {name: tuple(x.shape) for name, x in table.items()}


def read_checkpoint(path, needed):
    """Reads the record of a checkpoint or of an export. needed: keys that it must have, although CHECKPOINT allows them
    to be missing. Raises UserError for any other file."""
    form = CHECKPOINT | {key: CHECKPOINT[f"?{key}"] for key in needed}         # a needed key may not be missing
    exported = path.endswith(".safetensors")
    if not os.path.isfile(path):
        if "optimizer" in needed and os.path.isfile(os.path.join(os.path.dirname(path), WEIGHTS)):
            raise UserError(f"{path} is missing, and the {WEIGHTS} beside it is an export, without the optimizer "
                            f"state that --resume needs; name the folder in which the model was trained")
        how = "python checkpoint.py export" if exported else "python train.py"
        raise UserError(f"there is no checkpoint at {path}; make one with {how}")
    load, advice = read_tensors, "train again or use another file"
    if exported:
        load, advice = read_export, f"an export is {WEIGHTS} with its {CONFIG}: export or download it again"
        need("safetensors.torch", path)                 # here, as read_record takes any error for a damaged file
        # config.json holds the sha256 of the weights, so it is noticed if the two files come from different exports.
        form |= dict(dtype=re.compile("float32|bfloat16"), sha256=lambda digest: digest == sha256(path))
    return read_record(path, load, form, "a whole nanoBDLM checkpoint", advice)


def load_checkpoint(path, *needed):
    """Reads a checkpoint or an export as plain data on the CPU. Checks that its weights are finite, and that weights
    and optimizer moments have the shapes of its configuration. needed: the optional keys that it must have, such as
    "optimizer". Raises UserError for a file that is damaged or lacks one of these keys."""
    path = os.fspath(path)
    record = read_checkpoint(path, needed)
    config, weights, expected = ModelConfig(**record["config"]), record["model"], None
    # A damaged configuration may have any sizes. The meta device allocates no memory, but each layer takes time: a
    # model with more layers than weights cannot fit and is not made. Sizes beyond 64 bits raise an error. In both
    # cases `expected` stays None, which no table of shapes equals.
    if config.n_layer <= len(weights):
        with torch.device("meta"), contextlib.suppress(TypeError, RuntimeError):
            expected = shapes(BlockDiffusionLM(config).state_dict())
    tables = [weights]
    if "optimizer" in needed:
        moments = {name: part for name, part in record["optimizer"].items() if name != "step"}
        tables += [{name: part[key] for name, part in moments.items()} for key in ("exp_avg", "exp_avg_sq")]
    if any(shapes(table) != expected for table in tables):
        raise UserError(f"{path} holds weights that do not fit its configuration; train again or use another file")
    if not all(x.isfinite().all() for x in weights.values()):
        raise UserError(f"{path} holds weights that are not finite, because its training failed; use an earlier "
                        f"checkpoint, or train again with a lower learning_rate")
    return record


def load_model(path, device="cpu", *, needed=()):
    """Loads a checkpoint or an export. Returns the model, in evaluation mode on `device`, and the record. needed: see
    load_checkpoint."""
    record = load_checkpoint(path, *needed)
    model = BlockDiffusionLM(ModelConfig(**record["config"])).to(device)
    model.load_state_dict(record["model"])
    return model.eval(), record


# ----------------------------------------------------------------------------------------------
# A Prefix is a prompt that a model has read: read once, continued many times. A saved one is valid only for the same
# weights, configuration and dtype, because the cache holds what these computed.

@dataclasses.dataclass
class Prefix:
    """A prompt and its cache. The cache holds whole blocks only. The tokens after the last whole block are not in it:
    they become the known part of the first block that is generated."""
    tokens: torch.Tensor                # (m,) int64, the whole prompt
    cache: Cache                        # of one row; max_len is the length of the prompt's whole blocks


def copy_row(source, target):
    """Copies a cache of one row into another, whose max_len may be larger."""
    for source_state, target_state in zip(source.layers, target.layers):
        for a, b in zip(source_state, target_state):
            # Keys and values fill the first positions of a longer row. Boundary states have equal shapes.
            b[tuple(slice(n) for n in a.shape)].copy_(a)
    target.lengths.copy_(source.lengths)


def need_cache(config):
    """Raises UserError for a full-sequence model, which has no cache."""
    if config.full_sequence:
        raise UserError("a full-sequence model has no prefix cache: give it the prompt itself")


def read_prefix(model, tokens, before=None, on_chunk=None):
    """Reads tokens (m,) and returns their Prefix. before: a Prefix to continue; its tokens come first, and those in its
    cache are not read again. on_chunk(n) is called when n more tokens have been read. Raises UserError if the model
    has no cache."""
    need_cache(model.config)
    tokens = tokens.cpu() if before is None else torch.cat([before.tokens, tokens.cpu()])
    l = model.config.block_len
    cache = model.new_cache(1, len(tokens) // l * l)
    if before is not None:
        copy_row(before.cache, cache)
    held = int(cache.lengths)                           # tokens that the cache holds already
    model.prefill(tokens[None, held:cache.max_len].to(cache.lengths.device), cache, on_chunk=on_chunk)
    return Prefix(tokens, cache)


def fingerprint(model, dtype):
    """sha256 of the configuration, the dtype of generation and every weight. Call it before open_engine, which casts
    or rearranges the weights: then all engines have the same fingerprint and can share a saved cache. Raises
    UserError if the model has no cache."""
    need_cache(model.config)
    digest = hashlib.sha256(f"{model.config!r} {dtype}".encode())
    for name, p in model.named_parameters():
        digest.update(f"{name} {p.dtype} {tuple(p.shape)}".encode())
        digest.update(p.detach().contiguous().view(torch.uint8).cpu().numpy())
    return digest.hexdigest()


def save_prefix(path, prefix, made_by):
    """Writes a Prefix to a file. made_by: the `fingerprint` of its model. Raises UserError if it cannot be written."""
    layers = [tuple(part.cpu() for part in state) for state in prefix.cache.layers]
    save(path, dict(format="nanobdlm-prefix-2", fingerprint=made_by, tokens=prefix.tokens, layers=layers))


def load_prefix(path, config, made_by):
    """Reads a Prefix that save_prefix wrote. Its tensors are memory-mapped. made_by: the `fingerprint` of the model
    that will continue it. Raises UserError for a damaged file, or if other weights, another configuration or another
    dtype made it."""
    if not os.path.isfile(path):
        raise UserError(f"there is no saved cache at {path}; make one with --save_cache={path}")
    record = read_record(path, lambda path: read_tensors(path, mmap=True), PREFIX, "a whole saved cache",
                         "make it again with --save_cache")
    tokens, layers = record["tokens"], record["layers"]
    held = len(tokens) // config.block_len * config.block_len
    with torch.device("meta"):
        expected = BlockDiffusionLM(config).new_cache(1, held).layers
    if record["fingerprint"] != made_by:
        raise UserError(f"{path} was saved with other weights, another configuration or another dtype; make it again "
                        f"with --save_cache")
    if ([[x.shape for x in state] for state in layers] != [[x.shape for x in state] for state in expected]
            or not all(x.isfinite().all() for state in layers for x in state)
            or ((tokens < 0) | (tokens >= config.mask_id)).any()):
        raise UserError(f"{path} is damaged: its tokens and its cache do not fit; make it again with --save_cache")
    return Prefix(tokens, Cache(layers, torch.tensor([held]), held))


# ----------------------------------------------------------------------------------------------
# An export: the state dict as safetensors, and a config.json with the other entries of a checkpoint

def download(path):
    """Downloads hf://owner/name or hf://owner/name@revision, unless it is in the cache of huggingface_hub. Returns the
    folder. Raises UserError."""
    found = re.fullmatch(r"hf://([\w.-]+/[\w.-]+)(?:@(.+))?", path)
    if not found:
        raise UserError(f"{path} is not the name of a model; write hf://owner/name or hf://owner/name@revision")
    hub = need("huggingface_hub", path)
    try:
        return hub.snapshot_download(found[1], revision=found[2], allow_patterns=EXPORT)
    except Exception as error:                          # hub, network and disk raise many types of errors
        raise UserError(f"{path} cannot be downloaded from the hub ({type(error).__name__}): check the name and the "
                        f"network, and run hf auth login for a private model") from None


def find_checkpoint(path):
    """The path of the weights file. `path` may be that file itself; a folder, which stands for its ckpt.pt or, if it
    has none, for its export; or hf://owner/name, an export on the Hugging Face hub. Raises UserError."""
    if path.startswith("hf://"):
        return os.path.join(download(path), WEIGHTS)
    if not os.path.isdir(path):
        return path
    holds = {name: os.path.isfile(os.path.join(path, name)) for name in ("ckpt.pt", WEIGHTS, CONFIG)}
    is_export = not holds["ckpt.pt"] and (holds[WEIGHTS] or holds[CONFIG])
    return os.path.join(path, WEIGHTS if is_export else "ckpt.pt")


def read_export(path):
    """Reads an export into the form of a checkpoint: the tensors at `path`, and the other entries from the config.json
    in the same folder. Neither format can hold code."""
    with open(os.path.join(os.path.dirname(path), CONFIG), encoding="utf-8") as f:
        return dict(json.load(f), model=need("safetensors.torch", path).load_file(path))


def export(checkpoint, to, dtype="float32"):
    """
    Writes the weights of a checkpoint as model.safetensors, with config.json and a model card, into the folder `to`.
    eval.py and sample.py accept this folder as --checkpoint, train.py as --init_from. Raises UserError, also if the
    folder has such files already.

        python checkpoint.py export out/ --to=folder
        python checkpoint.py export out/ckpt.pt --to=folder --dtype=bfloat16

    float32 keeps every bit. bfloat16 halves the size; A_log, dt_bias and D of Mamba-2 stay in float32.
    """
    if held := [name for name in EXPORT if os.path.lexists(os.path.join(to, name))]:
        raise UserError(f"{to} holds {held[0]} already, which would be lost; name another folder with --to")
    safetensors = need("safetensors.torch", to)
    model, record = load_model(find_checkpoint(checkpoint), needed=("tokenizer", "step"))
    settings = {k: v for k, v in record.get("settings", {}).items() if k in ("data", "learning_rate")}
    weights = cast_for_inference(model, getattr(torch, dtype)).state_dict()
    weights = safetensors.save(weights, metadata=dict(format="pt"))                         # the bytes of the file
    config = dict(format="nanobdlm-1", config=dataclasses.asdict(model.config), dtype=dtype, step=record["step"],
                  tokenizer=record["tokenizer"], settings=settings, versions=VERSIONS,
                  sha256=hashlib.sha256(weights).hexdigest())
    advice = "name another folder with --to"
    # The weights come first: if the disk is too small, nothing is left behind.
    write_file(os.path.join(to, WEIGHTS), lambda f: f.write(weights), advice)
    write_file(os.path.join(to, CONFIG), json.dumps(config, indent=2) + "\n", advice)
    write_file(os.path.join(to, CARD), model_card(model, config), advice)


def model_card(model, config):
    """The README.md of an export: what the model is and how to sample from it. config: the content of config.json."""
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
    """Runs `python checkpoint.py` with these words of the command line. Raises UserError."""
    settings = dict(__doc__=inspect.getdoc(export), to="", dtype="float32")
    helped = {"-h", "--help"} & set(words)
    if not helped and (words[:1] != ["export"] or len(words) < 2 or words[1].startswith("-")):
        raise UserError(f"write python checkpoint.py export out/ --to=folder, not {' '.join(words) or 'nothing'}")
    configure(settings, words if helped else words[2:])
    check(settings, choices=dict(dtype=("float32", "bfloat16")))
    if not settings["to"]:
        raise UserError("to is empty; name a new folder, as in --to=folder")
    export(words[1], settings["to"], settings["dtype"])
    print(f"{settings['to']} holds {', '.join(EXPORT)}; python sample.py --checkpoint={settings['to']}/{WEIGHTS}")


if __name__ == "__main__":
    with script("checkpoint.py"):
        main(sys.argv[1:])
