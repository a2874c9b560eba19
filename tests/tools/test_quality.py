"""tools/quality.py: samples beside real text. tools/prices.py: what eval.py --decoders found."""
import json

import pytest

from conftest import eval_record, script
from tools import quality


def test_every_model_decoder_and_temperature_is_a_row_beside_real_text(corpus, checkpoints, tmp_path):
    _, table, _ = script("tools/quality.py", f"--checkpoints={','.join(checkpoints)}", f"--data={corpus}", "--n_prompts=5",
                         "--prompt_len=12", "--length=20", "--decoders=random:2,threshold:0.5", "--temperatures=0.5,1",
                         "--device=cpu", f"--out={tmp_path}/quality.json")
    real, *rows = json.loads((tmp_path / "quality.json").read_text())["rows"][:5]
    assert [(row["decoder"], row["temperature"]) for row in rows] == [
        ("random:2", 0.5), ("random:2", 1.0), ("threshold:0.5", 0.5), ("threshold:0.5", 1.0)]
    # 12 known tokens, 20 new ones, blocks of 8: 4 + 8 + 8 masks in 2 + 4 + 4 steps, and two commits.
    assert rows[0]["tok_per_pass"] == pytest.approx(20 / (2 + 4 + 4 + 2)) and rows[0]["tok_per_s"] > 0
    assert real["utf8"] == 1 and rows[1]["utf8"] < 0.9 and 1 < real["entropy"] < 3
    assert table.count("real text") == 2 and (tmp_path / "quality.png").exists()


def test_repeated_counts_4_grams_seen_before_and_utf8_bytes_of_whole_characters():
    assert quality.repeated([1, 2, 3, 4, 5, 6]) == 0 and quality.repeated([1, 2, 1, 2, 1, 2, 1]) == 0.5
    assert quality.utf8("añ".encode()) == 1 and quality.utf8("añ".encode()[:-1]) == 0.5


def test_the_prices_of_decoders_are_a_table_and_a_picture(corpus, checkpoints, tmp_path):
    eval_record(f"--checkpoint={','.join(checkpoints)}", f"--data={corpus}", "--decoders=random:4,strided:4",
                "--sequences=4", f"--out={tmp_path}/prices.json")
    table = script("tools/prices.py", f"--files={tmp_path}/prices.json", f"--out={tmp_path}/prices.png")[1]
    assert table.count("strided:4") == 2 and (tmp_path / "prices.png").exists()
