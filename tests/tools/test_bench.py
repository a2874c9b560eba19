"""The benchmark commands at a size that a CPU runs in seconds, and the figures."""
import json
import shutil

import pytest
import torch

import bench
import paper
from configurator import UserError, settings_of
from conftest import ROOT, script
from model import BlockDiffusionLM, config_from_file
from paper import MODELS
from tools import throughput

QUICK = ["--device=cpu", "--warmup=0", "--iterations=1", "--micro_batch_size=1"]


@pytest.fixture(autouse=True)
def _settings_put_back():
    before = settings_of(vars(bench))
    yield
    vars(bench).update(before)


def last_line(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_train_ends_in_one_json_line_and_writes_the_same(capsys, tmp_path):
    bench.main(["train", "--only=config/laptop.py", f"--out={tmp_path / 'train.json'}", *QUICK])
    result = last_line(capsys)
    row, = result["rows"]
    assert result["hardware"].keys() == result["after"].keys() and result["kernels"] == "kernels: plain"
    assert result["bench"] == "train" and result["hardware"]["name"] and result["matmul_tflops"] > 0
    assert row["config"] == "laptop" and row["tok_per_s"] > 0 and 0 < row["mfu"]
    assert json.loads((tmp_path / "train.json").read_text()) == result
    ours = (ROOT / ".git").exists()                     # and not a repository around it
    assert ("revision" in result["hardware"]) == (ours and shutil.which("git") is not None)


def test_a_step_of_a_generation_that_ends_inside_a_block_takes_as_long_as_any(monkeypatch):
    """A block of 16 tokens takes four steps and 0.1 s, also if only some of its tokens are asked for, and if the last
    of the four reveals one token of at most five."""
    model = BlockDiffusionLM(config_from_file("laptop"))
    for p, length, blocks in (4, 16, 1), (4, 4, 1), (4, 40, 3), (5, 16, 1), (5, 40, 3):
        monkeypatch.setattr(bench, "tokens_per_step", p)
        row = dict(length=length, batch=1, tok_per_s=length / (0.1 * blocks))
        found = bench.limit_of_step(row, model, dict(matmul_tflops=1.0, copy_tb_s=1.0))
        assert found["ms_per_step"] == pytest.approx(25), (p, length)


def test_sample_reports_whole_and_integrated_rows_beside_their_limit(capsys):
    bench.main(["sample", "--only=laptop", "--lengths=[32,64]", "--whole=[32]", *QUICK])
    rows = last_line(capsys)["rows"]
    assert [(r["length"], r["how"]) for r in rows] == [(32, "whole"), (64, "integrated")]
    assert all(r["tok_per_s"] > 0 and r["limit_ms"] > 0 for r in rows) and rows[0]["integrated"] > 0
    assert all(r["engine"] == "simple" for r in rows)
    bench.main(["sample", "--only=laptop", "--lengths=[32]", "--tokens_per_step=64", *QUICK])
    row, = last_line(capsys)["rows"]
    assert row["ms_per_step"] == pytest.approx(1000 * 16 / row["tok_per_s"]), "a step reveals at most a block of 16"


def test_sample_measures_several_rows_at_once(capsys):
    bench.main(["sample", "--only=laptop", "--lengths=[48]", "--whole=[48]", "--batch=[1,3]", *QUICK])
    one, three = last_line(capsys)["rows"]
    assert (one["batch"], three["batch"]) == (1, 3) and three["cache_bytes"] == 3 * one["cache_bytes"]
    assert three["tok_per_s"] == pytest.approx(3 * 16 / three["ms_per_step"] * 1000)
    config = config_from_file("laptop")
    (flops, nbytes), (flops3, nbytes3) = (bench.step_work(config, b, 16, 48, 4, 4) for b in (1, 3))
    cache = bench.step_work(config, 1, 16, 48, 4, 4)[1] - bench.step_work(config, 0, 16, 48, 4, 4)[1]
    assert flops3 == 3 * flops and nbytes3 == nbytes + 2 * cache        # weights are read once


def test_only_the_protocol_of_the_paper_is_compared_with_its_figures(capsys, monkeypatch):
    monkeypatch.setitem(paper.SAMPLE, "laptop", {32: 10})
    for p, theirs in ((16, 10), (8, None)):
        bench.main(["sample", "--only=laptop", "--lengths=32", f"--tokens_per_step={p}", *QUICK])
        row, = last_line(capsys)["rows"]
        assert row["paper"] == theirs and row["tokens_per_step"] == p
    row = dict(config="mamba_h_350m", tok_per_s=1e5, gpus=1, ms=1, spread=0, mfu=0.5, peak_gib=1, compile_s=1)
    assert "the paper's A100" in bench.format_train(dict(row, seq_len=8192))
    assert "the paper's A100" not in bench.format_train(dict(row, seq_len=1024))


def test_a_configuration_that_does_not_fit_says_so_and_the_run_goes_on(capsys, monkeypatch):
    row = bench.train_row

    def train_row(name, *rest):
        if name == "mamba_h_700m":
            raise RuntimeError("CUDA error: out of memory")
        return row(name, *rest)
    monkeypatch.setattr(bench, "train_row", train_row)
    bench.main(["train", "--only=mamba_h_700m,laptop", *QUICK])
    rows = last_line(capsys)["rows"]
    assert rows[0] == dict(config="mamba_h_700m", error="does not fit in memory") and rows[1]["tok_per_s"] > 0
    config = config_from_file("laptop")
    config.block_len = config.seq_len                   # full-sequence: each length stands alone
    monkeypatch.setattr(bench, "config_from_file", lambda name: config)
    start_engine = bench.start_engine

    def fails(model, new_engine, cache, l):
        if l == 64:
            raise torch.OutOfMemoryError("no room")
        return start_engine(model, new_engine, cache, l)
    monkeypatch.setattr(bench, "start_engine", fails)
    bench.main(["sample", "--lengths=[64,128]", *QUICK])
    rows = last_line(capsys)["rows"]
    assert "memory" in rows[0]["error"] and rows[0]["length"] == 64 and rows[1]["tok_per_s"] > 0
    bench.main(["sample", "--lengths=[]", "--batch=[8]", *QUICK])
    assert "give --lengths" in last_line(capsys)["rows"][0]["error"]


def test_the_limit_of_a_step_counts_every_weight_of_the_generation_pass_once():
    c = config_from_file("bdlm_attention_350m")
    flops, nbytes = bench.step_work(c, 1, c.block_len, 0, 16, 2)
    weights = c.n_layer * 12 * c.d_model ** 2
    head = c.vocab_size * c.d_model
    assert nbytes == 2 * (weights + head)
    l, d, p = c.block_len, c.d_model, 16
    steps = 1 + p / l                                   # passes over a block: each step, and one commit in l / p steps
    layer = steps * (2 * l * 12 * d * d + 4 * l * l * d)
    last = steps * 2 * l * 2 * d * d + 2 * p * 10 * d * d + 4 * p * l * d      # keys and values of all, the rest of p
    assert flops == pytest.approx((c.n_layer - 1) * layer + last + 2 * p * head)
    longer = bench.step_work(c, 1, c.block_len, 1000, 16, 2)[1]
    assert longer - nbytes == 2 * 2 * c.n_layer * 1000 * c.d_model      # keys and values


def test_ops_sets_each_operation_beside_a_library_and_its_limit(capsys):
    bench.main(["ops", *QUICK])
    rows = last_line(capsys)["rows"]
    assert len({r["op"] for r in rows}) == len(rows) == 13
    for r in rows:
        assert r["ms"] > 0 and r["limit_ms"] > 0 and r["of_limit"] > 0, r
        assert any("ratio" in other for other in r["others"].values()), r


def test_plot_draws_three_figures_and_the_newest_row_wins(tmp_path, monkeypatch):
    about = dict(hardware=dict(name="a GPU", torch="2.0"))
    old = dict(bench="sample", when="2026-01-02", **about, rows=[
        dict(config=f"{kind}_700m", length=n, tok_per_s=100.0)
        for kind in MODELS for n in (256, 512)])
    new = dict(old, when="2026-01-03", rows=[
        dict(config="mamba_h_700m", length=512, tok_per_s=300.0),
        dict(config="mamba_h_700m", length=512, tok_per_s=900.0, tokens_per_step=64)])        # not the paper's protocol
    train = dict(bench="train", **about, rows=[
        dict(config="mamba_h_350m", gpus=1, tok_per_s=1e5),
        dict(config="attention_350m", gpus=8, error="no")])
    files = []
    for i, r in enumerate((new, old, train)):
        files.append(str(tmp_path / f"{i}.json"))
        with open(files[-1], "w") as f:
            json.dump(r, f)
    drawn = {}
    draw = throughput.draw_curves
    monkeypatch.setattr(throughput, "draw_curves", lambda folder, name, *rest: (
        drawn.update({name: rest[-2]}), draw(folder, name, *rest)))
    bench.main(["plot", files[0], "--figures", str(tmp_path), *files[1:]])
    assert drawn["throughput.png"]["mamba_h"] == {256: 100, 512: 300}
    assert drawn["speedup.png"]["diffumamba_h"] == {256: 1, 512: 3}
    for name in ("throughput.png", "speedup.png", "training.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name, argv, message", [
    ("bench.py", "trian", "train"), ("bench.py", "train --iterations=0", "iterations must be at least 1, but is 0"),
    ("bench.py", "train --seq_len=-16", "seq_len must be at least 0"),
    ("bench.py", "train --only=laptop --seq_len=100", "whole blocks of block_len 16"),
    ("bench.py", "train --only=laptop,nope", "config file nope does not exist; config/ has attention_350m, "),
    ("bench.py", "train --only=laptop --out={tmp}/file/x.json", "cannot be written; name another file"),
    ("bench.py", "sample --lengths=0", "lengths must be whole numbers above 0, but are [0]"),
    ("bench.py", "sample --batch=[]", "batch must be whole numbers above 0, but are []"),
    ("bench.py", "train --only=5", "only must be names with commas between them, but is [5]"),
    ("bench.py", "sample --only=laptop --lengths=300000",
     "lengths must be at most 262144, the rotary capacity of laptop"),
    ("bench.py", "ops --only=adamw,nope", "only must be one of scan, "),
    ("bench.py", "plot", "name what to draw"),
    ("bench.py", "plot {tmp}/binary.json", "binary.json is not a file that bench.py wrote with --out"),
    ("bench.py", "plot {tmp}/rows.json", "rows.json is not a file that bench.py wrote with --out"),
    ("bench.py", "plot assets/train.json --figures={tmp}/file", "file: File exists; choose another path"),
    ("tools/profile_step.py", "--config=laptop", "did you mean configs?"),
    ("tools/profile_step.py", "--out={tmp}", "cannot be written; name another file"),
    ("tools/two_streams.py", "--out={tmp}/notes.svg", "notes.svg, which holds something else"),
    ("tools/two_streams.py", "--out={tmp}/x.foo", "out must end in .png, .pdf or .svg, but is ")])
def test_bad_input_is_one_sentence_before_any_measurement(tmp_path, monkeypatch, name, argv, message):
    monkeypatch.chdir(ROOT)
    (tmp_path / "file").write_text("")
    (tmp_path / "notes.svg").write_text("notes, not a picture")
    (tmp_path / "binary.json").write_bytes(bytes(range(256)))
    (tmp_path / "rows.json").write_text(json.dumps(
        dict(bench="train", hardware=dict(name="a GPU", torch="2.0"), rows=[5])))
    status, printed, error = script(name, *argv.format(tmp=tmp_path).split())
    assert status == 1 and error.startswith(name.removeprefix("tools/")) and message in error and "\n" not in error
    assert "tok/s" not in printed and " ms" not in printed


def test_the_tools_draw_and_profile_without_options_and_say_what_they_are(tmp_path):
    status, printed, _ = script("tools/profile_step.py", "--micro_batch_size=1", f"--out={tmp_path / 'p.json'}")
    assert status == 0 and printed.startswith("laptop on cpu | kernels: ")
    assert json.loads((tmp_path / "p.json").read_text())["models"]["laptop"]["ms"] > 0
    assert script("tools/two_streams.py", f"--out={tmp_path / 'x.png'}")[0] == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    status, printed, _ = script("tools/two_streams.py", "--help")
    assert status == 0 and "who sees whom in training" in printed
    status, printed, _ = script("bench.py")
    assert all(f"bench.py {word}" in printed for word in ("train", "sample", "ops", "plot"))


def test_a_measurement_is_printed_though_it_cannot_be_written(monkeypatch, capsys, tmp_path):
    out = tmp_path / "x.json"
    monkeypatch.setattr(bench, "bench_train", lambda parallel: (out.mkdir(), dict(rows=[1]))[1])
    with pytest.raises(UserError, match="x.json cannot be written .*; copy the results from the screen"):
        bench.main(["train", "--device=cpu", f"--out={out}"])
    assert last_line(capsys)["rows"] == [1]
