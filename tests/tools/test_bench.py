"""The benchmark commands at a size that a CPU runs in seconds, and the figures."""
import json

import pytest

import bench
from configurator import settings_of
from conftest import ROOT, script
from checkpoint import config_from_file
from paper import MODELS
from tools import throughput

QUICK = ["--device=cpu", "--warmup=0", "--iterations=1"]


@pytest.fixture(autouse=True)
def _settings_put_back():
    before = settings_of(vars(bench))
    yield
    vars(bench).update(before)


def run(capsys, *words):
    """Runs bench.py's main. Returns what it printed for a person, a list of lines, and its JSON."""
    bench.main([*words, *QUICK])
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


def test_generation_is_timed_as_a_whole_up_to_8k_and_by_blocks_beyond(capsys, monkeypatch):
    monkeypatch.setattr(bench, "WHOLE", 32)
    monkeypatch.setattr(bench, "PREFIXES", (0, 16))
    lines, result = run(capsys, "sample", "--only=laptop", "--lengths=[32,48]", "--batch=[1,3]")
    rows = result["rows"]
    assert [(r["length"], r["batch"], r["how"]) for r in rows] == [
        (32, 1, "whole"), (48, 1, "blocks"), (32, 3, "whole"), (48, 3, "blocks")]
    assert all(r["tok_per_s"] > 0 and r["engine"] == "simple" for r in rows)
    assert rows[3]["cache_bytes"] == 3 * rows[1]["cache_bytes"]


def test_the_sum_over_blocks_interpolates_between_the_timed_prefixes(monkeypatch):
    """A block takes as many seconds as there are tokens before it."""
    model = bench.BlockDiffusionLM(config_from_file("laptop"))
    cache = model.new_cache(1, 64, 16)
    engine = bench.open_engine("simple", model)[1](model, cache, bench.Sampler([0], mask_id=257), 16)
    timed = lambda block, *rest, in_a_row: (float(block.args[0]), 0.1, 0.0)
    monkeypatch.setattr(bench, "measure", timed)
    assert bench.blocks_seconds(engine, model, 5) == (0 + 16 + 32 + 48 + 64, 0.1)


def test_a_full_sequence_model_is_timed_by_the_step(capsys, tmp_path):
    (tmp_path / "full.py").write_text((ROOT / "config" / "laptop.py").read_text() + "\nblock_len = seq_len\n")
    _, result = run(capsys, "sample", f"--only={tmp_path / 'full.py'}", "--lengths=[40]")
    assert result["rows"][0]["how"] == "step x length / p" and result["rows"][0]["tok_per_s"] > 0


def test_ops_sets_each_operation_beside_a_library_and_its_limit():
    status, printed, error = script("tools/compare_ops.py", *QUICK)
    assert status == 0, error
    rows = json.loads(printed.splitlines()[-1])["rows"]
    assert len({r["op"] for r in rows}) == len(rows) == 12
    for r in rows:
        assert r["ms"] > 0 and r["limit_ms"] > 0 and r["of_limit"] > 0, r
        assert any("ms" in other for other in r["others"].values()), r


def test_plot_draws_a_figure_and_the_newest_row_wins(tmp_path):
    """900 tokens/s are not by the paper's protocol, and training is no generation."""
    rows = [dict(config=f"{kind}_700m", length=n, tok_per_s=100.0) for kind in MODELS for n in (256, 512)]
    new = [dict(rows[-1], tok_per_s=300.0), dict(rows[-1], tok_per_s=900.0, tokens_per_step=64)]
    train = [dict(config="mamba_h_350m", gpus=1, tok_per_s=1e5)]
    files = [tmp_path / f"{i}.json" for i in range(3)]
    for path, bench_, when, found in zip(files, ("sample", "sample", "train"), "213", (new, rows, train)):
        path.write_text(json.dumps(dict(bench=bench_, when=when, rows=found, hardware=dict(name="a GPU", torch="2.0"))))
    sample, machines = throughput.read(files)
    speed = {kind: {n: r["tok_per_s"] for (k, n), r in sample.items() if k == kind} for kind in MODELS}
    assert speed["mamba_h"] == {256: 100, 512: 300} and machines == "a GPU, torch 2.0"
    assert script("tools/throughput.py", files[0], f"--figures={tmp_path}", *files[1:])[0] == 0
    assert (tmp_path / "throughput.png").exists()


@pytest.mark.parametrize("name, argv, message", [
    ("bench.py", "trian", "subcommand must be one of train, sample, but is 'trian'"),
    ("bench.py", "train --iterations=0", "iterations must be at least 1, but is 0"),
    ("bench.py", "train --only=laptop --seq_len=100", "whole blocks of block_len 16"),
    ("bench.py", "train --only=laptop,nope", "config file nope cannot be run (FileNotFoundError"),
    ("bench.py", "train --out=x.pt", "out must be a .json file"),
    ("bench.py", "sample --lengths=0", "whole numbers from 1 to 262144, not 0"),
    ("bench.py", "sample --batch=many", "whole numbers from 1 to 262144, not 'many'"),
    ("tools/compare_ops.py", "--only=adamw,nope", "only must be one of mixer, "),
    ("tools/throughput.py", "", "name what to draw"),
    ("tools/throughput.py", "assets/ops.json", "the files hold no generation"),
    ("tools/profile_step.py", "--config=laptop", "did you mean configs?")])
def test_bad_input_is_one_sentence_before_any_measurement(monkeypatch, name, argv, message):
    monkeypatch.chdir(ROOT)
    status, printed, error = script(name, *argv.split())
    assert status == 1 and error.startswith(name.removeprefix("tools/")) and message in error and "\n" not in error
    assert " %" not in printed and " ms" not in printed, "it has measured something"


def test_the_tools_profile_without_options_and_say_what_they_are(tmp_path):
    status, printed, _ = script("tools/profile_step.py", "--micro_batch_size=1", f"--out={tmp_path / 'p.json'}")
    assert status == 0 and printed.startswith("laptop on cpu | kernels: ")
    assert json.loads((tmp_path / "p.json").read_text())["models"]["laptop"]["ms"] > 0
    status, printed, _ = script("tools/profile_step.py", "--help")
    assert status == 0 and "Profiles one training step or one denoising step" in printed
    status, printed, _ = script("bench.py")
    assert all(f"bench.py {word}" in printed for word in ("train", "sample"))
