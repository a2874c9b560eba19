"""An export is the checkpoint, bit for bit. Foreign folders, and a hub that has nothing, end in one sentence each.
(Damaged files: test_faults.py. Mistakes in the command: test_mistakes.py.)"""
import json
import sys
import types
import zipfile
from pathlib import Path

import pytest
import torch

from checkpoint import CARD, CONFIG, WEIGHTS, find_checkpoint, load_checkpoint, load_model
from configurator import UserError
from conftest import script
from model import cast_for_inference
from tools.export import export

st = pytest.importorskip("safetensors.torch", reason="needs safetensors, see requirements.txt")


@pytest.fixture
def exported(saved, tmp_path):
    """The folder of an export of the checkpoint `saved`."""
    export(saved[0], str(tmp_path / "export"))
    return tmp_path / "export"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_is_the_checkpoint_bit_for_bit_or_rounded_except_the_decays(saved, tmp_path, dtype):
    """It is read back in fp32. An export of an export is the same."""
    export(saved[0], str(tmp_path / "first"), dtype)
    export(str(tmp_path / "first"), str(tmp_path / "second"), dtype)
    (again, record), weights = load_model(find_checkpoint(str(tmp_path / "second"))), {
        name: x.clone() for name, x in cast_for_inference(saved[1], getattr(torch, dtype)).state_dict().items()}
    assert again.config == saved[1].config and (record["step"], record["tokenizer"]) == (7, "bytes")
    assert record["settings"] == dict(data="data/x", learning_rate=1e-3)       # no other setting of the training
    assert {name.split(".")[-1] for name, x in weights.items() if x.dtype == torch.float32} >= {"A_log", "D", "dt_bias"}
    held = st.load_file(tmp_path / "second" / WEIGHTS)
    for (name, want), x in zip(weights.items(), again.state_dict().values(), strict=True):
        assert held[name].dtype == want.dtype and torch.equal(held[name], want) and torch.equal(x, want.float()), name


def test_the_command_exports_even_beside_the_checkpoint_and_says_what_the_model_is(saved):
    status, printed, error = script("checkpoint.py", "export", saved[0], f"--to={saved[0]}", "--dtype=bfloat16")
    assert status == 0 and printed.endswith(f" python sample.py --checkpoint={saved[0]}/{WEIGHTS}\n"), error
    assert find_checkpoint(saved[0]) == f"{saved[0]}/ckpt.pt"
    card = Path(saved[0], CARD).read_text()
    assert card.startswith("---\nlibrary_name: nanobdlm\n") and "{" not in card
    for word in (f"{saved[1].n_params:,} parameters", "block diffusion", "Attention and BiMamba layers",
                 "blocks of 8 tokens", "tokenizer bytes", "step 7", "python sample.py --checkpoint="):
        assert word in card


def test_a_foreign_folder_is_refused_and_its_code_is_not_run(exported):
    (exported / "evil.py").write_text("raise SystemExit")
    later = (exported / CONFIG).read_text().replace("nanobdlm-1", "nanobdlm-2")
    foreign = '{"auto_map": {"AutoModel": "evil.Model"}}'
    refused = [(text, "are no whole export") for text in (foreign, "[]", later[:-9])]
    for config, message in (*refused, (later, "nanobdlm-2")):
        (exported / CONFIG).write_text(config)
        with pytest.raises(UserError, match=message):
            load_checkpoint(find_checkpoint(str(exported)))


def test_a_file_takes_no_more_memory_than_it_has_bytes(exported, saved):
    """Not even one that is refused: a small file may be compressed, or name a large model."""
    with zipfile.ZipFile(f"{saved[0]}/ckpt.pt", "a") as parts:
        parts.writestr("zeros", bytes(10 ** 6), zipfile.ZIP_DEFLATED)
    with pytest.raises(UserError, match="ckpt.pt .*a part is compressed or has another checksum"):
        load_checkpoint(f"{saved[0]}/ckpt.pt")
    config = json.loads((exported / CONFIG).read_text())
    for name, value in dict(d_model=10 ** 6, n_layer=10 ** 9, d_state=10 ** 9, vocab_size=10 ** 9).items():
        (exported / CONFIG).write_text(json.dumps(dict(config, config=config["config"] | {name: value})))
        with pytest.raises(UserError, match="is damaged, or of a fork: its weights are not those"):
            load_model(str(exported / WEIGHTS))


def test_a_model_of_the_hub_is_an_export_that_is_fetched_first(exported, monkeypatch):
    asked = []

    def snapshot_download(name, revision, allow_patterns):
        asked.append((name, revision, sorted(allow_patterns)))
        if name == "owner/none":
            raise ConnectionError("reset\nby peer")
        return str(exported)
    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download))
    for path in ("hf://owner/my.name-1", "hf://owner/my.name-1@refs/pr/1"):
        assert find_checkpoint(path) == str(exported / WEIGHTS)
    assert asked == [("owner/my.name-1", revision, sorted([WEIGHTS, CONFIG, CARD])) for revision in (None, "refs/pr/1")]
    with pytest.raises(UserError, match=r"hf://owner/none cannot be downloaded \(ConnectionError\): check the name"):
        find_checkpoint("hf://owner/none")
    monkeypatch.setitem(sys.modules, "huggingface_hub", types.ModuleType("huggingface_hub"))   # of another version
    with pytest.raises(ImportError, match="cannot import name 'snapshot_download'"):           # see configurator.script
        find_checkpoint("hf://owner/none")
