"""tools/quality.py: decoders of block models side by side, scored by a judge."""
import itertools
import json

import numpy as np
import pytest
import torch

from checkpoint import save_checkpoint
from configurator import UserError
from conftest import ROOT, make_model
from tools import quality


@pytest.fixture
def models(corpus, tmp_path, monkeypatch):
    """A folder of two block models, a judge and a full-sequence model of bytes. The settings compare the first two."""
    for name, kind in (("a", "mamba_h"), ("b", "bdlm_attention"), ("judge", "mamba_h"), ("full", "attention")):
        model = make_model(kind, torch.float32, seed=ord(name[0]), vocab_size=258)
        save_checkpoint(str(tmp_path / name / "ckpt.pt"), model, step=0, tokenizer="bytes", settings={})
    settings = dict(checkpoints=[str(tmp_path / "a"), str(tmp_path / "b")], judge=str(tmp_path / "judge"), n_prompts=5,
                    data=corpus, prompt_len=12, length=20, mc=2, device="cpu", decoders=["random:2", "threshold:0.5"],
                    out=str(tmp_path / "quality.json"))
    for name, value in settings.items():
        monkeypatch.setattr(quality, name, value)
    return tmp_path


def test_every_model_and_decoder_is_a_row_beside_the_real_text(corpus, models, capsys, monkeypatch):
    quality.main()
    real, *rows = json.loads((models / "quality.json").read_text())["rows"]
    assert [(row["model"], row["decoder"]) for row in rows] == list(itertools.product(
        ("mamba_h", "bdlm_attention"), ("random:2", "threshold:0.5")))
    # 12 known tokens, 20 new ones, blocks of 8: 4 + 8 + 8 masks in 2 + 4 + 4 steps, and two commits.
    assert rows[0]["passes"] == pytest.approx((2 + 4 + 4 + 2) / 3) and rows[0]["tok_per_s"] > 0
    assert real["bpb"] > 0 and real["bpb_se"] > 0 and 0 < real["entropy"] < np.log(20)
    (models / "committed.json").write_text((ROOT / "assets" / "blocks.json").read_text())
    for name in ("quality", "committed"):
        monkeypatch.setattr(quality, "draw", str(models / f"{name}.json"))
        quality.main()
        assert "real text" in capsys.readouterr().out and (models / f"{name}.png").exists()


def test_the_judge_scores_what_follows_the_prompt(models, monkeypatch):
    """With blocks of one token and the prompt's last block whole, the mean over noise is the exact likelihood."""
    monkeypatch.setattr(quality, "mc", 400)
    model = make_model("mamba_h", block_len=1, vocab_size=4)
    x = torch.randint(0, 3, (1, 16), generator=torch.Generator().manual_seed(1))
    log_p = model.all_block_logits(x, torch.full_like(x, 3), torch.ones(1, 16))[0].log_softmax(-1)
    exact = -log_p.gather(1, x[0, :, None])[12:].sum().item()
    assert quality.answer_nelbo(model, x)[0] == pytest.approx(exact, rel=0.1)


def test_repeated_counts_4_grams_seen_before():
    assert quality.repeated([1, 2, 3, 4, 5, 6]) == 0 and quality.repeated([1, 2, 1, 2, 1, 2, 1]) == 0.5


@pytest.mark.parametrize("change, message", [
    (dict(checkpoints=["full"]), "full must be a block model"), (dict(judge="full"), "full must be a block model"),
    (dict(checkpoints=[]), "there is nothing to compare"), (dict(n_prompts=10 ** 6), "lower n_prompts"),
    (dict(out="quality.png"), "out must be a .json file"), (dict(length=21), "not whole blocks"),
    (dict(decoders=["random:x"]), "write name:number"), (dict(decoders=["worst"]), "decoder must be one of")])
def test_what_cannot_be_compared_is_a_sentence(models, monkeypatch, change, message):
    monkeypatch.chdir(models)
    for name, value in change.items():
        monkeypatch.setattr(quality, name, value)
    with pytest.raises(UserError, match=message):
        quality.main()
