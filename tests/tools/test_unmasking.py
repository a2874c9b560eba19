"""tools/unmasking.py: the animation shows what was generated, and when."""
import xml.dom.minidom

import pytest
import torch

from checkpoint import save_checkpoint
from conftest import make_model
from tools import unmasking


@pytest.mark.parametrize("name", ["mamba_h", "attention"])
def test_every_new_byte_is_a_box_of_one_size_until_the_step_that_revealed_it(tmp_path, monkeypatch, name):
    model = make_model(name, torch.float32, vocab_size=258)
    save_checkpoint(str(tmp_path / "ckpt.pt"), model, step=0, tokenizer="bytes", settings={})
    for key, value in dict(checkpoint=str(tmp_path), prompt="def f(x, y):\n", length=27, columns=20, device="cpu",
                           decoders=["random:1", "strided:2"], out=str(tmp_path / "a.svg")).items():
        monkeypatch.setattr(unmasking, key, value)
    found = []
    monkeypatch.setattr(unmasking, "svg", lambda panels, svg=unmasking.svg: found.extend(panels) or svg(panels))
    unmasking.main()
    one, two = found
    assert one["shown"][:13] == two["shown"][:13] == 13 * [0] and len(one["data"]) == len(two["data"]) == 40
    if not model.config.full_sequence:                  # 13 known bytes: 3 masks, then blocks of 8
        assert sorted(one["shown"][13:]) == [*range(1, 28)]
        assert sorted(two["shown"][13:]) == [1, 1, 2, *(n for n in range(3, 15) for _ in "ab")]
        assert two["blocks"][:2] == [(8, 16, 0, 2), (16, 24, 2, 6)] and (one["steps"], two["steps"]) == (27, 14)
    picture = xml.dom.minidom.parse(str(tmp_path / "a.svg"))
    boxes = [box for box in picture.getElementsByTagName("rect") if box.getAttribute("class").startswith("box")]
    assert [box.getAttribute("class") for box in boxes] == [f"box h{n}" for n in one["shown"][13:] + two["shown"][13:]]
    assert len({(box.getAttribute("width"), box.getAttribute("height")) for box in boxes}) == 1
    drawn = [t for t in picture.getElementsByTagName("text") if t.getAttribute("class").startswith("t ")]
    assert "".join(t.firstChild.data for t in drawn[:11]) == "deff(x,y):\u21b5"


def test_a_letter_of_several_bytes_is_one_letter_over_its_bytes():
    data = "aжё".encode() + "ж".encode()[:1]
    assert [*unmasking.letters(data)] == [(0, 1, "a"), (1, 3, "ж"), (3, 5, "ё"), (5, 6, "\ufffd")]
