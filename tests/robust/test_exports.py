"""An export is the checkpoint, bit for bit. Exports that are foreign, damaged or incomplete, a hub that has nothing,
and mistakes in the command: one sentence each."""
import json
import os
import random
import sys
import types
from pathlib import Path

import pytest
import torch

import eval as evaluation
import sample
from checkpoint import CARD, CONFIG, EXPORT, WEIGHTS, export, find_checkpoint, load_model, main, save_checkpoint
from configurator import UserError
from conftest import TINY, make_sampler, prompts_of, run_train, script
from model import cast_for_inference

st = pytest.importorskip("safetensors.torch", reason="needs safetensors, see requirements.txt")


def exported(saved, **how):
    """The folder of an export, beside the checkpoint's."""
    folder = os.path.join(os.path.dirname(saved[0]), "export")
    export(saved[0], folder, **how)
    return folder


# ----------------------------------------------------------------------------------------------
# Exports that are whole

def test_a_checkpoint_and_its_export_come_back_bit_for_bit_and_generate_the_same_tokens(saved):
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
    export(folder, again)                               # an export of an export is the same
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


def test_the_printed_command_reads_the_export_even_beside_a_checkpoint(saved):
    status, printed, error = script("checkpoint.py", "export", saved[0], f"--to={saved[0]}")
    assert status == 0 and printed.endswith(f" python sample.py --checkpoint={saved[0]}/{WEIGHTS}\n"), error


def test_eval_knows_of_an_export_what_it_knows_of_a_checkpoint(saved):
    theirs, ours = (evaluation.open_checkpoint(path, "cpu")[2] for path in (saved[0], exported(saved)))
    assert ours.pop("checkpoint") != theirs.pop("checkpoint") and ours.pop("sha256") != theirs.pop("sha256")
    assert ours == theirs and ours["lr"] == 1e-3


def test_a_folder_with_a_checkpoint_and_an_export_is_read_as_the_checkpoint(saved):
    export(saved[0], saved[0])
    assert find_checkpoint(saved[0]) == os.path.join(saved[0], "ckpt.pt")


def test_the_command_exports_and_its_folder_samples(saved, tmp_path):
    folder = f"{tmp_path}/new/folder"
    status, printed, error = script("checkpoint.py", "export", saved[0], f"--to={folder}", "--dtype=bfloat16")
    assert status == 0 and "new/folder" in printed, error
    status, printed, error = script("sample.py", f"--checkpoint={folder}", "--length=8", "--prompt=ab", "--device=cpu")
    assert status == 0 and printed.startswith("ab"), error
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
    with pytest.raises(UserError, match="there is no checkpoint at .*model.safetensors"):
        sample.open_checkpoint("hf://owner/name", "cpu")


# ----------------------------------------------------------------------------------------------
# What is refused

@pytest.mark.parametrize("words, message", [
    ("", "write python checkpoint.py export out/ --to=folder, not nothing"),
    ("import x", "--to=folder, not import x"),
    ("export", "not export$"),
    ("export --to=x", "not export --to=x"),
    ("export {out}", "to is empty"),
    ("export {out} --too=x", "did you mean to"),
    ("export {out} --to=x --dtype=int8", "dtype must be one of float32, bfloat16"),
    ("export {out}/nowhere --to={out}/x", "there is no checkpoint at .*nowhere; make one"),
    ("export {out} --to={out}/ckpt.pt", "cannot be written"),
    ("export {out} more --to=x", "config file more does not exist")])
def test_a_mistake_in_the_command_is_one_sentence(saved, words, message):
    with pytest.raises(UserError, match=message) as raised:
        main(words.format(out=saved[0]).split())
    assert "\n" not in str(raised.value) and os.listdir(saved[0]) == ["ckpt.pt"]


def test_an_export_replaces_nothing_and_a_full_disk_leaves_nothing(saved, tmp_path, monkeypatch):
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(UserError, match="holds README.md already, which would be lost"):
        export(saved[0], str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["README.md", "out"]

    def full(file):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr("files.os.fsync", full)
    with pytest.raises(UserError, match="make room and try again"):
        export(saved[0], str(tmp_path / "full"))
    assert os.listdir(tmp_path / "full") == []


def edit_config(folder, **changes):
    path = Path(folder, CONFIG)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(folder, edit):
    """Changes the weights and the checksum with them."""
    path = os.path.join(folder, WEIGHTS)
    tensors = dict(st.load_file(path))
    edit(tensors)
    st.save_file(tensors, path + "2")
    os.replace(path + "2", path)
    edit_config(folder, sha256=evaluation.sha256(path))


def edit_model(folder, **changes):
    edit_config(folder, config={**json.loads(Path(folder, CONFIG).read_text())["config"], **changes})


LLAMA = dict(architectures=["LlamaForCausalLM"], auto_map={"AutoModel": "evil.Model"}, model_type="llama",
             torch_dtype="bfloat16")
WRONG = "weights that do not fit its configuration"


@pytest.mark.parametrize("damage, message", [
    (lambda f: os.remove(f"{f}/{WEIGHTS}"), "there is no checkpoint at .*model.safetensors; make one"),
    (lambda f: os.remove(f"{f}/{CONFIG}"), "No such file .* with its config.json"),
    (lambda f: Path(f, CONFIG).write_text(json.dumps(LLAMA)), "record has no format"),
    (lambda f: edit_config(f, format="nanobdlm-2"), "record.format is 'nanobdlm-2'"),
    (lambda f: Path(f, CONFIG).write_text("[" * 10 ** 5), "not a whole nanoBDLM checkpoint"),
    (lambda f: edit_config(f, sha256="0" * 64), "record.sha256 is '000"),
    (lambda f: edit_config(f, dtype="int4"), "record.dtype is 'int4'"),
    (lambda f: edit_config(f, tokenizer="gpt2"), "not those of its tokenizer, gpt2"),
    (lambda f: edit_config(f, step=-1), "record.step is -1"), (lambda f: edit_model(f, width=3), "record.config is"),
    (lambda f: edit_model(f, d_model=0), "d_model must be above 0"),
    (lambda f: edit_model(f, d_model=2 * 10 ** 30), WRONG),
    (lambda f: edit_model(f, n_layer=10 ** 9), WRONG),
    (lambda f: edit_weights(f, lambda w: w.popitem()), WRONG),
    (lambda f: edit_weights(f, lambda w: w.update(more=torch.zeros(2))), WRONG),
    (lambda f: edit_weights(f, lambda w: w.update({"head.weight": torch.zeros(2, 2)})), WRONG),
    (lambda f: edit_weights(f, lambda w: w.update({k: v.to(torch.float8_e5m2) for k, v in w.items()})),
     "record.model."),
    (lambda f: edit_weights(f, lambda w: w.update({k: v.long() for k, v in w.items()})), "record.model."),
    (lambda f: torch.save({}, f"{f}/{WEIGHTS}"), "SafetensorError")])
def test_a_foreign_damaged_or_incomplete_folder_is_one_sentence(saved, damage, message):
    folder = exported(saved)
    damage(folder)
    with pytest.raises(UserError, match=message) as raised:
        sample.open_checkpoint(folder, "cpu")
    assert "\n" not in str(raised.value)


def test_a_flipped_bit_or_a_cut_of_the_weights_is_found(saved):
    path = Path(exported(saved), WEIGHTS)
    whole, rng = path.read_bytes(), random.Random(1)
    for at in [0, 7, 8, 9, len(whole) - 1, *(rng.randrange(len(whole)) for _ in range(40))]:
        changed = bytearray(whole)
        changed[at] ^= 1 << rng.randrange(8)
        for damaged in (changed, whole[:at]):
            path.write_bytes(damaged)
            with pytest.raises(UserError, match="not a whole nanoBDLM checkpoint"):
                load_model(str(path))


def test_training_does_not_resume_from_an_export(corpus, saved):
    with pytest.raises(UserError, match="is an export, without the optimizer"):
        run_train(TINY + [f"--data={corpus}", f"--out_dir={exported(saved)}", "--resume"])


def test_nothing_in_a_folder_is_executed(saved, tmp_path):
    """Neither a pickle under the weights' name nor Python files that a config.json names."""
    class Planted:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)
    folder = exported(saved)
    Path(folder, "evil.py").write_text(f"import os; os.mkdir({str(tmp_path / 'ran')!r})")
    edit_config(folder, auto_map={"AutoModel": "evil.Model"})
    sample.open_checkpoint(folder, "cpu")
    torch.save(dict(head=Planted()), f"{folder}/{WEIGHTS}")
    edit_config(folder, sha256=evaluation.sha256(f"{folder}/{WEIGHTS}"))
    with pytest.raises(UserError, match="not a whole nanoBDLM checkpoint"):
        sample.open_checkpoint(folder, "cpu")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("path, hub, message", [
    ("hf://owner/name", None, "hf://owner/name needs huggingface_hub: pip install huggingface_hub$"),
    ("hf://owner/name", ConnectionError("reset\nby peer"),
     "cannot be downloaded from the hub .ConnectionError.: check the name"),
    ("hf://../..", ValueError("no"), "cannot be downloaded"),
    *((path, None, "is not the name of a model; write hf://owner/name") for path in (
        "hf://name", "hf://a/b/c", "hf://a/b@"))])
def test_a_model_of_the_hub_that_cannot_be_had_is_one_sentence(path, hub, message, monkeypatch):
    def snapshot_download(*request, **how):
        raise hub
    module = types.SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub and module)
    with pytest.raises(UserError, match=message) as raised:
        sample.open_checkpoint(path, "cpu")
    assert "\n" not in str(raised.value)
    if hub is None and "needs" in message:
        monkeypatch.setitem(sys.modules, "safetensors.torch", None)
        with pytest.raises(UserError, match="needs safetensors.torch: pip install safetensors$"):
            export("out", "folder")
