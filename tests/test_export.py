"""An export is the checkpoint, bit for bit."""
import os
from pathlib import Path

import pytest
import torch

import sample
from checkpoint import EXPORT, WEIGHTS, export, find_checkpoint, load_model
from conftest import exported, make_sampler, prompts_of
from model import cast_for_inference

st = pytest.importorskip("safetensors.torch", reason="needs safetensors, see requirements.txt")


def test_an_export_comes_back_bit_for_bit_and_generates_the_same_tokens(saved):
    folder, tokens = exported(saved), []
    assert sorted(os.listdir(folder)) == sorted(EXPORT)
    for path in (saved[0], folder, os.path.join(folder, WEIGHTS)):
        model, tokenizer, file, record = sample.open_checkpoint(path, "cpu")
        assert model.config == saved[1].config and record["step"] == 7 and tokenizer.name == "bytes"
        assert file == (os.path.join(saved[0], "ckpt.pt") if path == saved[0] else os.path.join(folder, WEIGHTS))
        for (name, a), (_, b) in zip(saved[1].state_dict().items(), model.state_dict().items(), strict=True):
            assert b.dtype == torch.float32 and torch.equal(a.view(torch.int32), b.view(torch.int32)), name
        tokens.append(sample.generate(model, prompts_of(5), 20, make_sampler(model)).tokens[0].tolist())
    assert tokens[0] == tokens[1] == tokens[2]
    names = st.load_file(os.path.join(folder, WEIGHTS))
    assert names.keys() == saved[1].state_dict().keys()
    again = os.path.join(folder, "again")
    export(folder, again)                               # of an export, too
    assert Path(again, WEIGHTS).read_bytes() == Path(folder, WEIGHTS).read_bytes()


def test_bfloat16_rounds_all_but_the_decays_and_comes_back_in_fp32(saved):
    folder = exported(saved, dtype="bfloat16")
    held = st.load_file(os.path.join(folder, WEIGHTS))
    again, record = load_model(find_checkpoint(folder))
    rounded = cast_for_inference(saved[1], torch.bfloat16).state_dict()
    exact = {name for name, x in held.items() if x.dtype == torch.float32}
    assert {name.rsplit(".", 1)[-1] for name in exact} == {"A_log", "dt_bias", "D"} and record["dtype"] == "bfloat16"
    for name, x in again.state_dict().items():
        assert held[name].dtype == rounded[name].dtype and torch.equal(held[name], rounded[name])
        assert x.dtype == torch.float32 and torch.equal(x, held[name].float())
