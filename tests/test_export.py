"""Weights in and out: an export is the checkpoint, bit for bit; what is no whole export is one sentence."""
import json
import os
import sys
import types
from pathlib import Path

import pytest
import torch

import eval as evaluation
import sample
from checkpoint import CARD, CONFIG, EXPORT, WEIGHTS, export, find_checkpoint, load_model, save_checkpoint
from conftest import exported, make_sampler, prompts_of, script
from model import ModelError, cast_for_inference

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


def test_config_and_card_say_what_the_model_is_and_no_more(saved):
    folder = exported(saved)
    config = json.loads(Path(folder, CONFIG).read_text())
    assert config["format"] == "nanobdlm-1" and config["config"] == vars(saved[1].config)
    assert config["tokenizer"] == "bytes" and config["step"] == 7 and config["dtype"] == "float32"
    assert config["settings"] == dict(data="data/x", learning_rate=1e-3)      # no other setting of the training
    card = Path(folder, CARD).read_text()
    assert card.startswith("---\nlibrary_name: nanobdlm\npipeline_tag: text-generation\n")
    for word in (f"{saved[1].n_params:,} parameters", "block diffusion", "Mamba-2 and attention", "blocks of 8 tokens",
                 "tokenizer bytes", "step 7", "python sample.py --checkpoint="):
        assert word in card


def test_eval_knows_of_an_export_what_it_knows_of_a_checkpoint(saved):
    theirs, ours = (evaluation.open_checkpoint(path, "cpu")[2] for path in (saved[0], exported(saved)))
    assert ours.pop("checkpoint") != theirs.pop("checkpoint") and ours.pop("sha256") != theirs.pop("sha256")
    assert ours == theirs and ours["lr"] == 1e-3


def test_a_folder_with_a_checkpoint_keeps_meaning_it(saved):
    export(saved[0], saved[0])
    assert find_checkpoint(saved[0]) == os.path.join(saved[0], "ckpt.pt")


def test_the_command_exports_and_its_folder_samples(saved, tmp_path):
    folder = f"{tmp_path}/new/folder"
    status, printed, error = script("checkpoint.py", "export", saved[0], f"--to={folder}", "--dtype=bfloat16")
    assert status == 0 and "new/folder" in printed, error
    status, printed, error = script("sample.py", f"--checkpoint={folder}", "--length=8", "--prompt=ab", "--device=cpu")
    assert status == 0 and printed.startswith("ab"), error
    status, _, error = script("checkpoint.py", "export", saved[0], f"--to={folder}")
    assert status == 1 and "\n" not in error and "holds model.safetensors already" in error
    status, printed, _ = script("checkpoint.py", "export", "--help")
    assert status == 0 and "--dtype = 'float32'" in printed and "model card" in printed


def test_a_model_of_the_hub_is_an_export_that_is_fetched_first(saved, monkeypatch):
    folder, asked = exported(saved), []

    def snapshot_download(repo, revision, allow_patterns):
        asked.append((repo, revision, sorted(allow_patterns)))
        return folder
    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download))
    for path in ("hf://owner/my.name-1", "hf://owner/my.name-1@refs/pr/1"):
        assert sample.open_checkpoint(path, "cpu")[0].config == saved[1].config
    assert asked == [("owner/my.name-1", revision, sorted(EXPORT)) for revision in (None, "refs/pr/1")]
    save_checkpoint(f"{folder}/ckpt.pt", saved[1])      # of the hub nothing but an export is read
    assert find_checkpoint("hf://owner/name") == f"{folder}/{WEIGHTS}"
    for name in EXPORT:
        os.remove(f"{folder}/{name}")
    with pytest.raises(ModelError, match="there is no checkpoint at .*model.safetensors"):
        sample.open_checkpoint("hf://owner/name", "cpu")
