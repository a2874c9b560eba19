"""tools/unmasking.py: the animation shows what was generated, and when."""
import xml.dom.minidom

import pytest
import torch

from checkpoint import save_checkpoint
from conftest import make_model
from tools import unmasking


@pytest.mark.parametrize("name", ["mamba_h", "attention"])
def test_every_new_token_appears_once_and_at_the_step_that_revealed_it(tmp_path, monkeypatch, name):
    model = make_model(name, torch.float32, vocab_size=258)
    save_checkpoint(str(tmp_path / "ckpt.pt"), model, step=0, tokenizer="bytes", settings={})
    for key, value in dict(checkpoint=str(tmp_path), prompt="def f(x, y):\n", length=27, tokens_per_step=2, columns=20,
                           out=str(tmp_path / "a.svg"), device="cpu").items():
        monkeypatch.setattr(unmasking, key, value)
    unmasking.main()
    found = unmasking.record()
    assert len(found["tokens"]) == len(found["steps"]) == 27
    counts = [found["steps"].count(step) for step in range(max(found["steps"]) + 1)]
    assert all(1 <= count <= 2 for count in counts)
    if not model.config.full_sequence:                  # 13 known bytes: 3 masks, then blocks of 8
        assert counts == [2, 1] + 3 * [2, 2, 2, 2] and sorted(found["steps"][:3]) == [0, 0, 1]
    picture = xml.dom.minidom.parse(str(tmp_path / "a.svg"))
    texts = picture.getElementsByTagName("text")
    drawn = "".join(t.firstChild.data for t in texts if t.getAttribute("class").startswith("t "))
    visible = b"".join(found["tokens"]).decode(errors="replace").replace("\n", "").replace("\t", "")
    assert drawn.replace(" ", "") == "".join(c if c.isprintable() else "\ufffd" for c in visible).replace(" ", "")
    assert all(float(t.getAttribute("x")) + float(t.getAttribute("textLength")) < 12 + 21 * 7.8 for t in texts)


def test_a_letter_of_several_bytes_appears_whole_with_its_last_byte():
    tokens = [bytes([byte]) for byte in "aжё".encode()] + ["ж".encode()[:1]]
    assert [*unmasking.characters(tokens, [3, 2, 0, 1, 4, 5])] == [("a", 3), ("ж", 2), ("ё", 4), ("\ufffd", 5)]
