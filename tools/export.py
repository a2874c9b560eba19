"""
Publishes a model: the weights of a checkpoint as model.safetensors, with a config.json and a model card. sample.py and
eval.py accept the folder as --checkpoint, train.py as --init_from; or hf://owner/name, if it is on the hub.

    python checkpoint.py export out/ --to=folder
    python checkpoint.py export out/ckpt.pt --to=folder --dtype=bfloat16

float32 keeps every bit. bfloat16 halves the size; A_log, dt_bias and D of Mamba-2 stay in float32. A folder that holds
such files already is refused.
"""
import dataclasses
import hashlib
import json
import os
import shlex
import sys
from pathlib import Path

import torch

from checkpoint import CARD, CONFIG, WEIGHTS, find_checkpoint, load_model
from configurator import UserError, check, configure, script, write_file
from model import cast_for_inference

# Settings
to = ""                                 # a new folder
dtype = "float32"                       # or bfloat16: half the size


def export(checkpoint, to, dtype="float32"):
    """Writes the weights of a checkpoint, or of another export, into the folder `to`. dtype: "float32" or "bfloat16".
    Raises UserError, also if the folder has such files already."""
    from safetensors.torch import save
    if held := [name for name in (WEIGHTS, CONFIG, CARD) if os.path.lexists(os.path.join(to, name))]:
        raise UserError(f"{to} holds {held[0]} already, which would be lost; name another folder with --to")
    model, record = load_model(find_checkpoint(checkpoint), needed=("tokenizer", "step"))
    cast_for_inference(model, getattr(torch, dtype))
    weights = save(model.state_dict(), metadata=dict(format="pt"))                    # the bytes of the file
    settings = {k: v for k, v in record.get("settings", {}).items() if k in ("data", "learning_rate")}
    config = dict(format="nanobdlm-1", config=dataclasses.asdict(model.config), dtype=dtype, step=record["step"],
                  tokenizer=record["tokenizer"], settings=settings, sha256=hashlib.sha256(weights).hexdigest())
    card = Path(__file__).with_name("model_card.md").read_text(encoding="utf-8").format(
        kind="full-sequence" if model.config.full_sequence else "block",
        layers=" and ".join(dict.fromkeys(type(layer.mixer).__name__ for layer in model.layers)),
        n_params=model.n_params, **config, **config["config"])
    # The weights come first: if the disk is too small, nothing is left behind.
    write_file(os.path.join(to, WEIGHTS), lambda f: f.write(weights))
    write_file(os.path.join(to, CONFIG), json.dumps(config, indent=2) + "\n")
    write_file(os.path.join(to, CARD), card)


def main():
    """The command `python checkpoint.py export CHECKPOINT --to=FOLDER`."""
    with script("checkpoint.py"):
        words = ["export", "--help"] if {"-h", "--help"} & {*sys.argv} else sys.argv[1:]
        if words[:1] != ["export"] or len(words) < 2:
            raise UserError(f"write python checkpoint.py export out/ --to=folder, not {' '.join(words) or 'nothing'}")
        if not words[1].startswith("-"):
            words[1] = f"--checkpoint={words[1]}"
        settings = dict(globals(), checkpoint="out")    # `export` has an argument of that name
        configure(settings, words[1:])
        check(settings, choices=dict(dtype=("float32", "bfloat16")))
        if not settings["to"]:
            raise UserError("to is empty; name a new folder, as in --to=folder")
        export(settings["checkpoint"], settings["to"], settings["dtype"])
        print(f"exported; try python sample.py --checkpoint={shlex.quote(os.path.join(settings['to'], WEIGHTS))}")


if __name__ == "__main__":
    main()
