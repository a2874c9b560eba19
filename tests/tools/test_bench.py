"""The benchmark commands at a size that a CPU runs in seconds, and the figures."""
import json

import pytest

import bench
from conftest import ROOT, module_of, script
from checkpoint import config_from_file
from paper import MODELS
from tools import profile_step, throughput

QUICK = ["--device=cpu", "--warmup=0", "--iterations=1"]


def run(capsys, *words, **constants):
    """Runs bench.py's main. Returns what it printed for a person, a list of lines, and its JSON."""
    module = module_of("bench")
    vars(module).update(constants)
    module.main([*words, *QUICK])
    *lines, last = capsys.readouterr().out.splitlines()
    return lines, json.loads(last)


def test_train_ends_in_one_json_line_and_writes_the_same(capsys, tmp_path):
    out = tmp_path / "t.json"
    lines, result = run(capsys, "train", "--only=config/laptop.py", "--micro_batch_size=1", f"--out={out}")
    row, = result["rows"]
    assert result["bench"] == "train" and result["hardware"]["name"] and result["kernels"] == "kernels: plain"
    assert row["config"] == "laptop" and row["tok_per_s"] == pytest.approx(256 / row["ms"] * 1000)
    assert json.loads(out.read_text()) == result
    assert lines[-1].split()[:4] == ["laptop", "256", "1", f"{row['tok_per_s']:,.0f}"]


def test_generation_is_timed_as_a_whole_up_to_8k_and_by_blocks_beyond(capsys):
    _, result = run(capsys, "sample", "--only=laptop", "--lengths=32,48", "--batch=1,3", WHOLE=32, PREFIXES=(0, 16))
    rows = result["rows"]
    assert [(r["length"], r["batch"], r["how"]) for r in rows] == [
        (32, 1, "whole"), (48, 1, "blocks"), (32, 3, "whole"), (48, 3, "blocks")]
    assert all(r["tok_per_s"] > 0 and r["engine"] == "simple" for r in rows)
    assert rows[3]["cache_bytes"] == 3 * rows[1]["cache_bytes"]


def test_the_sum_over_blocks_interpolates_between_the_timed_prefixes(monkeypatch):
    """A block takes as many seconds as there are tokens before it."""
    model = bench.BlockDiffusionLM(config_from_file("laptop"))
    cache = model.new_cache(1, 64, 16)
    engine = bench.open_engine("simple", model)[1](model, cache, bench.Sampler([0], "random", mask_id=257), 16)
    timed = lambda block, *rest, in_a_row: (float(block.args[0]), 0.1, 0.0)
    monkeypatch.setattr(bench, "measure", timed)
    assert bench.blocks_seconds(engine, 5) == (0 + 16 + 32 + 48 + 64, 0.1)


def test_a_full_sequence_model_is_timed_by_the_step(capsys, tmp_path):
    (tmp_path / "full.py").write_text((ROOT / "config" / "laptop.py").read_text() + "\nblock_len = seq_len\n")
    _, result = run(capsys, "sample", f"--only={tmp_path / 'full.py'}", "--lengths=40")
    assert result["rows"][0]["how"] == "step x length / p" and result["rows"][0]["tok_per_s"] > 0


def test_ops_sets_each_operation_beside_a_library_and_its_limit():
    status, printed, error = script("tools/compare_ops.py", *QUICK)
    assert status == 0, error
    rows = json.loads(printed.splitlines()[-1])["rows"]
    assert len({r["op"] for r in rows}) == len(rows) == 10
    for r in rows:
        assert r["ms"] > 0 and r["limit_ms"] > 0 and r["of_limit"] > 0, r
        assert any("ms" in other for other in r["others"].values()), r


def test_plot_draws_a_figure_and_the_newest_row_wins(tmp_path):
    """900 tokens/s are not by the paper's protocol."""
    rows = [dict(config=f"{kind}_700m", length=n, tok_per_s=100.0) for kind in MODELS for n in (256, 512)]
    new = [dict(rows[-1], tok_per_s=300.0), dict(rows[-1], tok_per_s=900.0, tokens_per_step=64)]
    files = [tmp_path / "new.json", tmp_path / "old.json"]
    for path, when, found in zip(files, "21", (new, rows)):
        path.write_text(json.dumps(dict(bench="sample", when=when, rows=found, hardware=dict(name="a", torch="2.0"))))
    speed, machines = throughput.read(files)
    assert speed["mamba_h"] == {256: 100, 512: 300} and machines == "a, torch 2.0"
    assert script("tools/throughput.py", files[0], f"--figures={tmp_path}/new", *files[1:])[0] == 0
    assert (tmp_path / "new" / "throughput.png").exists()


def test_idle_times_are_the_gaps_of_all_streams_with_what_the_host_did_in_them():
    kernels = [(10, 20, "a"), (15, 40, "b"), (18, 30, "c"), (60, 70, "d")]
    found = profile_step.idle_times(kernels, [(0, 100, "step"), (41, 59, "sync"), (0, 5, "zero")], wall_ms=0.05)
    assert [(gap["before"], gap["after"], gap["ms"], gap["host"]) for gap in found.pop("gaps")] == [
        ("d", "the end", 0.03, [("step", 0.03)]), ("b", "d", 0.02, [("step", 0.02), ("sync", 0.018)]),
        ("the start", "a", 0.01, [("step", 0.01), ("zero", 0.005)])]
    assert found == pytest.approx(dict(profiled_ms=0.1, idle=0.6, idle_without_profiler=0.2))


def test_the_tools_profile_without_options_and_say_what_they_are():
    status, printed, _ = script("tools/profile_step.py", "--micro_batch_size=1")
    assert status == 0 and printed.startswith("laptop on cpu | kernels: plain\nlaptop: ")
    assert "products " in printed and "aten::mm" in printed and len(printed.splitlines()) == 22
    status, printed, _ = script("bench.py")
    assert status == 0 and "python bench.py sample" in printed
