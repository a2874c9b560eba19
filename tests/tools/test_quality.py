"""tools/quality.py: decoders of block models side by side, scored by a judge."""
import json
import types

import numpy as np
import pytest
import torch

import eval as evaluation
from checkpoint import save_checkpoint
from configurator import UserError
from conftest import ROOT, make_model
from data import TokenData
from parallel import Parallel
from tools import quality


@pytest.fixture
def models(corpus, tmp_path, monkeypatch):
    """A folder of two block models, a judge and a full-sequence model of bytes. The settings compare the first two."""
    for name, kind in (("a", "mamba_h"), ("b", "bdlm_attention"), ("judge", "mamba_h"), ("full", "attention")):
        (tmp_path / name).mkdir()
        model = make_model(kind, torch.float32, seed=ord(name[0]), vocab_size=258)
        save_checkpoint(tmp_path / name / "ckpt.pt", model, step=0, tokenizer="bytes", settings={})
    settings = dict(checkpoints=[str(tmp_path / "a"), str(tmp_path / "b")], judge=str(tmp_path / "judge"), n_prompts=5,
                    data=corpus, prompt_len=12, length=20, batch_size=3, mc=2, device="cpu",
                    decoders=["random:2", "threshold:0.5"], out=str(tmp_path / "quality.json"))
    for name, value in settings.items():
        monkeypatch.setattr(quality, name, value)
    return tmp_path


def test_every_model_and_decoder_is_a_row_beside_the_real_text(corpus, models, capsys, monkeypatch):
    quality.main()
    real, *rows = json.loads((models / "quality.json").read_text())["rows"]
    assert [(row["model"], row["decoder"]) for row in rows] == [
        (name, how) for name in ("mamba_h", "bdlm_attention") for how in ("random:2", "threshold:0.5")]
    assert (models / "quality.png").read_bytes().startswith(b"\x89PNG")
    # 12 known tokens, 20 new ones, blocks of 8: 4 + 8 + 8 masks in 2 + 4 + 4 steps, and two commits.
    assert rows[0]["passes"] == pytest.approx((2 + 4 + 4 + 2) / 3) and rows[0]["tok_per_s"] > 0
    windows = TokenData(corpus, "val", "bytes").sequences(32, 5)
    judge = evaluation.open_checkpoint(str(models / "judge"), "cpu")[0]
    nats = evaluation.score_answers(judge, [[pair] for pair in zip(windows[:, :12].tolist(), windows[:, 12:].tolist())],
                                    Parallel("cpu", 60), "nelbo", quality.seed, 2, 256)
    assert real["bpb"] == pytest.approx(nats.sum() / np.log(2) / (5 * 20), rel=1e-5)
    monkeypatch.setattr(quality, "draw", str(models / "quality.json"))
    quality.main()
    assert capsys.readouterr().out.count("real text") == 2


def test_two_models_of_a_kind_are_named_by_their_paths(models, monkeypatch):
    paths = [str(models / "a"), str(models / "judge")]
    monkeypatch.setattr(quality, "checkpoints", paths)
    monkeypatch.setattr(quality, "decoders", ["random:8"])
    quality.main()
    assert [row["model"] for row in json.loads((models / "quality.json").read_text())["rows"][1:]] == paths


def test_repeated_counts_4_grams_seen_before():
    assert quality.repeated([1, 2, 3, 4, 5, 6]) == 0 and quality.repeated([1, 2, 1, 2, 1, 2, 1]) == 0.5


@pytest.mark.parametrize("change, message", [
    (dict(checkpoints=["full"]), "must be a block model"), (dict(judge="full"), "full must be a block model"),
    (dict(checkpoints=[]), "there is nothing to compare"),
    (dict(out=""), "out is empty"), (dict(n_prompts=10 ** 6), "lower n_prompts"),
    (dict(decoders=["random:x"]), "write name:number"),
    (dict(draw=str(ROOT / "assets" / "web.json")), "web.json is not a file that quality.py wrote.*has no rows"),
    (dict(decoders=["worst"]), "decoder must be one of")])
def test_what_cannot_be_compared_is_a_sentence(models, monkeypatch, change, message):
    monkeypatch.chdir(models)
    for name, value in change.items():
        monkeypatch.setattr(quality, name, value)
    with pytest.raises(UserError, match=message):
        quality.main()


def test_a_model_of_other_tokens_than_the_judge_is_named(models, monkeypatch):
    opened, gpt2 = evaluation.open_checkpoint, types.SimpleNamespace(name="gpt2")
    monkeypatch.setattr(evaluation, "open_checkpoint", lambda path, dev: [
        gpt2 if path.endswith("/b") and i == 1 else part for i, part in enumerate(opened(path, dev))])
    with pytest.raises(UserError, match="b has gpt2 tokens and the judge bytes tokens; name another"):
        quality.main()
