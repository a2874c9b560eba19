"""The benchmark commands at a size that a CPU runs in seconds, and the figures."""
import json
import os
import pathlib
import runpy
import shutil
import subprocess
import sys
import types

import pytest
import torch

import bench
import operations
from configurator import ConfigError, settings_of
from model import BlockDiffusionLM, ModelConfig

TINY = ["--device=cpu", "--warmup=0", "--iterations=1", "--micro_batch_size=1"]


@pytest.fixture(autouse=True)
def _one_thread_and_settings_put_back():
    before, threads = settings_of(vars(bench)), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    vars(bench).update(before)
    torch.set_num_threads(threads)


def last_line(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_train_ends_in_one_json_line_and_writes_the_same(capsys, tmp_path):
    bench.main(["train", "--only=laptop", f"--out={tmp_path / 'train.json'}", *TINY])
    result = last_line(capsys)
    row, = result["rows"]
    assert result["hardware"].keys() == result["after"].keys() and "kernels: scan" in result["kernels"]
    assert result["bench"] == "train" and result["hardware"]["name"] and result["matmul_tflops"] > 0
    assert row["config"] == "laptop" and row["tok_per_s"] > 0 and 0 < row["mfu"]
    assert json.loads((tmp_path / "train.json").read_text()) == result
    ours = (pathlib.Path(bench.__file__).parent / ".git").exists()         # and not a repository around it
    assert ("revision" in result["hardware"]) == (ours and shutil.which("git") is not None)


def test_block_models_are_measured_beyond_the_cache_of_short_generations(capsys, monkeypatch):
    monkeypatch.setattr(bench, "block_rows", lambda model, dev, ladder: (
        dict(length=n, tok_per_s=1.0, how=str(ladder), spread=0.0, engine="eager", capture_s=0.0) for n in ladder))
    bench.main(["sample", "--only=mamba_h_87m", "--lengths=[256,8192,16384]", *TINY])
    assert [(r["length"], r["how"]) for r in last_line(capsys)["rows"]] == [
        (256, "[256, 8192]"), (8192, "[256, 8192]"), (16384, "[16384]")]


def test_sample_reports_whole_and_integrated_rows_beside_their_limit(capsys):
    bench.main(["sample", "--only=laptop", "--lengths=[64,128]", "--whole=[64]", *TINY])
    rows = last_line(capsys)["rows"]
    assert [(r["length"], r["how"]) for r in rows] == [(64, "whole"), (128, "integrated")]
    assert all(r["tok_per_s"] > 0 and r["limit_ms"] > 0 for r in rows) and rows[0]["integrated"] > 0
    assert all(r["of_limit"] == pytest.approx(r["limit_ms"] / r["ms_per_step"]) for r in rows)
    assert all(r["engine"] == "eager" and r["capture_s"] >= 0 for r in rows)


def test_a_sampling_row_says_whether_its_steps_were_graphs(capsys, monkeypatch):
    make = bench.make_decoder
    def recorded(*args):                                # as after a recording that succeeded
        decoder = make(*args)
        decoder.graphs = {c: types.SimpleNamespace(replay=lambda c=c: decoder.denoise(c)) for c in (False, True)}
        return decoder
    monkeypatch.setattr(bench, "make_decoder", recorded)
    bench.main(["sample", "--only=laptop", "--lengths=[64]", *TINY])
    out = capsys.readouterr().out
    assert json.loads(out.splitlines()[-1])["rows"][0]["engine"] == "graphs" and "compile and capture" in out


def test_a_configuration_that_does_not_fit_says_so_and_the_run_goes_on(capsys, monkeypatch):
    row = bench.train_row
    def train_row(name, *rest):
        if name == "mamba_h_700m":
            raise RuntimeError("CUDA error: out of memory")
        return row(name, *rest)
    monkeypatch.setattr(bench, "train_row", train_row)
    bench.main(["train", "--only=mamba_h_700m,laptop", *TINY])
    rows = last_line(capsys)["rows"]
    assert rows[0] == dict(config="mamba_h_700m", error="does not fit in memory") and rows[1]["tok_per_s"] > 0
    config = bench.named_config("laptop")
    config.block_len = config.seq_len                   # full-sequence: each length stands alone
    monkeypatch.setattr(bench, "named_config", lambda name: config)
    make = bench.make_decoder
    def fails(wanted, model, cache, sampler, l):
        if l == 64:
            raise torch.OutOfMemoryError("no room")
        return make(wanted, model, cache, sampler, l)
    monkeypatch.setattr(bench, "make_decoder", fails)
    bench.main(["sample", "--lengths=[64,128]", *TINY])
    rows = last_line(capsys)["rows"]
    assert "memory" in rows[0]["error"] and rows[0]["length"] == 64 and rows[1]["tok_per_s"] > 0


def test_the_limit_of_a_step_counts_every_weight_of_the_generation_pass_once():
    c = bench.named_config("bdlm_attention_350m")
    flops, nbytes = bench.step_work(c, c.block_len, 0, 16, 2)
    weights = c.n_layer * 12 * c.d_model ** 2
    head = c.vocab_size * c.d_model
    assert nbytes == 2 * (weights + head)
    l, d, p = c.block_len, c.d_model, 16
    steps = 1 + p / l                                   # one commit in so many steps
    layer = steps * (2 * l * 12 * d * d + 4 * l * l * d)
    last = steps * 2 * l * 2 * d * d + 2 * p * 10 * d * d + 4 * p * l * d      # p tokens but for keys and values
    assert flops == pytest.approx((c.n_layer - 1) * layer + last + 2 * p * head)
    longer = bench.step_work(c, c.block_len, 1000, 16, 2)[1]
    assert longer - nbytes == 2 * 2 * c.n_layer * 1000 * c.d_model      # keys and values


def test_ops_sets_each_operation_beside_a_library_and_its_limit(capsys):
    bench.main(["ops", *TINY])
    rows = last_line(capsys)["rows"]
    assert len({r["op"] for r in rows}) == len(rows) == 11
    for r in rows:
        assert r["ms"] > 0 and r["limit_ms"] > 0 and r["of_limit"] > 0, r
        assert any("ratio" in other for other in r["others"].values()), r


def test_an_operation_that_fails_is_a_line_and_the_run_goes_on(capsys, monkeypatch):
    def fails(kind, big, compiled):
        def f():
            raise torch.OutOfMemoryError("no room")
        yield operations.compared("one that fails", f, {"other": lambda: None, "absent": "why"}, 1, 1)
        raise torch.OutOfMemoryError("no room for inputs")
    monkeypatch.setitem(operations.OPERATIONS, "fails", fails)
    bench.main(["ops", "--only=fails,adamw", *TINY])
    rows = last_line(capsys)["rows"]
    assert [r.get("op", r.get("config")) for r in rows] == ["one that fails", "fails", "AdamW step"]
    assert "memory" in rows[0]["error"] and rows[0]["others"]["absent"] == {"error": "why"}


def test_plot_draws_three_figures_and_the_newest_row_wins(tmp_path, monkeypatch):
    about = dict(hardware=dict(name="a GPU", torch="2.0"))
    old = dict(bench="sample", when="2026-01-02", **about, rows=[
        dict(config=f"{kind}_700m", length=n, tok_per_s=100.0)
        for kind in bench.MODELS for n in (256, 512)])
    new = dict(old, when="2026-01-03", rows=[
        dict(config="mamba_h_700m", length=512, tok_per_s=300.0)])
    train = dict(bench="train", **about, rows=[
        dict(config="mamba_h_350m", gpus=1, tok_per_s=1e5),
        dict(config="attention_350m", gpus=8, error="no")])
    files = []
    for i, r in enumerate((new, old, train)):
        files.append(str(tmp_path / f"{i}.json"))
        with open(files[-1], "w") as f:
            json.dump(r, f)
    drawn = {}
    from assets import throughput
    draw = throughput.draw_curves
    monkeypatch.setattr(throughput, "draw_curves", lambda folder, name, *rest: (
        drawn.update({name: rest[-2]}), draw(folder, name, *rest)))
    bench.main(["plot", files[0], "--figures", str(tmp_path), *files[1:]])
    assert drawn["throughput.png"]["mamba_h"] == {256: 100, 512: 300}
    assert drawn["speedup.png"]["diffumamba_h"] == {256: 1, 512: 3}
    for name in ("throughput.png", "speedup.png", "training.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_plot_names_a_file_that_is_not_ours(tmp_path):
    (tmp_path / "x.json").write_text("[1]")
    with pytest.raises(ConfigError, match="x.json"):
        bench.main(["plot", str(tmp_path / "x.json")])


def run_script(monkeypatch, script, *argv):
    """A script in this process, as by python script argv..."""
    path = os.path.join(os.path.dirname(bench.__file__), script)
    monkeypatch.setattr(sys, "argv", [path, *argv])
    monkeypatch.setattr(sys, "path", list(sys.path))
    return runpy.run_path(path, run_name="__main__")


@pytest.mark.parametrize("script, argv, message", [
    ("bench.py", "train --iterations=0", "iterations is 0; it is at least 1"),
    ("bench.py", "train --warmup=-1", "warmup is -1; it is at least 0"),
    ("bench.py", "train --micro_batch_size=0", "micro_batch_size is 0"),
    ("bench.py", "train --seq_len=-16", "seq_len is -16"),
    ("bench.py", "train --only=laptop --seq_len=100", "choose a multiple, such as"),
    ("bench.py", "train --only=laptop --seq_len=270336", "takes at most 262144"),
    ("bench.py", "train --only=laptop,nope", "config/ has no 'nope'; it has attention_350m, "),
    ("bench.py", "train --only=laptop --out={tmp}", "cannot be written; name another file"),
    ("bench.py", "train --only=laptop --out={tmp}/file/x.json", "cannot be written; name another file"),
    ("bench.py", "sample --lengths=0", "lengths is [0]; it is whole numbers above 0"),
    ("bench.py", "sample --lengths=64,-64", "it is whole numbers above 0"),
    ("bench.py", "sample --lengths=abc", "it is whole numbers above 0"),
    ("bench.py", "sample --whole=abc", "whole is ['abc']"),
    ("bench.py", "sample --only=laptop --lengths=300000", "laptop makes at most 262144 tokens"),
    ("bench.py", "ops --only=adamw,nope", "only is 'nope'; it is one of scan, "),
    ("bench.py", "plot", "name what to draw"),
    ("bench.py", "plot {tmp}/binary", "binary cannot be drawn (UnicodeDecodeError); name files"),
    ("bench.py", "plot {tmp}/rows.json", "rows.json cannot be drawn (TypeError)"),
    ("bench.py", "plot assets/train.json --figures={tmp}/file", "file: File exists; choose another path"),
    ("assets/profile_step.py", "--config=laptop", "did you mean configs?"),
    ("assets/profile_step.py", "--configs=laptop,nope", "config/ has no 'nope'"),
    ("assets/profile_step.py", "--micro_batch_size=0", "micro_batch_size is 0"),
    ("assets/profile_step.py", "--out={tmp}", "cannot be written; name another file"),
    ("assets/sharding.py", "--iterations=0", "iterations is 0"),
    ("assets/sharding.py", "--only=ours,theirs", "only is 'theirs'; it is one of ours, zero, fsdp"),
    ("assets/sharding.py", "", "one process shards nothing"),
    ("assets/throughput.py", "", "python bench.py plot FILE..."),
    ("assets/two_streams.py", "--foo=1", "there is no setting 'foo'"),
    ("assets/two_streams.py", "--out={tmp}/x.foo", "Format 'foo' is not supported")])
def test_bad_input_is_one_sentence_before_any_measurement(tmp_path, monkeypatch, capsys, script, argv, message):
    monkeypatch.chdir(os.path.dirname(bench.__file__))
    (tmp_path / "file").write_text("")
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    (tmp_path / "rows.json").write_text(json.dumps(
        dict(bench="train", hardware=dict(name="a GPU", torch="2.0"), rows=[5])))
    with pytest.raises(SystemExit) as ended:
        run_script(monkeypatch, script, *argv.format(tmp=tmp_path).split())
    error = ended.value.code                            # text: printed, and the status is 1
    assert error.startswith(os.path.basename(script)) and message in error and "\n" not in error
    printed = capsys.readouterr().out
    assert "tok/s" not in printed and " ms" not in printed


@pytest.mark.parametrize("script, argv", [("bench.py", ["train"]), ("assets/profile_step.py", []),
                                          ("assets/sharding.py", []), ("assets/two_streams.py", [])])
def test_ctrl_c_is_one_line(monkeypatch, capsys, script, argv):
    def stop(*_, **__):
        raise KeyboardInterrupt
    monkeypatch.setattr("train.pick_device", stop)
    monkeypatch.setattr("matplotlib.pyplot.subplots", stop)
    with pytest.raises(SystemExit) as ended:
        run_script(monkeypatch, script, *argv)
    assert ended.value.code == 130 and capsys.readouterr().err.endswith(": stopped\n")


def test_a_measurement_is_printed_though_it_cannot_be_written(monkeypatch, capsys):
    monkeypatch.setitem(bench.BENCHES, "train", lambda parallel: dict(rows=[1]))
    monkeypatch.setattr(bench.pathlib.Path, "write_text", lambda *_: open("/dev/null/x"))
    with pytest.raises(ConfigError, match="x.json cannot be written .*; the results are on the screen"):
        bench.main(["train", "--device=cpu", "--out=x.json"])
    assert last_line(capsys)["rows"] == [1]
    monkeypatch.setattr(bench.os, "access", lambda *_: False)                  # a folder of another user
    with pytest.raises(ConfigError, match="out is x.json, which cannot be written"):
        bench.main(["train", "--device=cpu", "--out=x.json"])


def test_without_options_a_cpu_profiles_the_laptop_model(monkeypatch, capsys, tmp_path):
    run_script(monkeypatch, "assets/profile_step.py", "--micro_batch_size=1", f"--out={tmp_path / 'p.json'}")
    assert capsys.readouterr().out.startswith("laptop on cpu | kernels: ")
    assert json.loads((tmp_path / "p.json").read_text())["models"]["laptop"]["ms"] > 0


def test_two_streams_draws_where_it_is_told_and_explains_itself(monkeypatch, capsys, tmp_path):
    run_script(monkeypatch, "assets/two_streams.py", f"--out={tmp_path / 'x.png'}")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit) as ended:
        run_script(monkeypatch, "assets/two_streams.py", "--help")
    assert ended.value.code == 0 and "who sees whom in training" in capsys.readouterr().out


def test_an_unknown_subcommand_is_one_sentence_and_none_lists_them(capsys):
    script = os.path.join(os.path.dirname(bench.__file__), "bench.py")
    done = subprocess.run([sys.executable, script, "trian"], capture_output=True, text=True)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and "train" in done.stderr
    with pytest.raises(SystemExit):
        bench.main([])
    listed = capsys.readouterr().out
    assert all(f"bench.py {word}" in listed for word in ("train", "sample", "ops", "plot"))


def test_what_a_prefix_holds_is_made_by_the_model_and_repeated():
    torch.manual_seed(0)
    model = BlockDiffusionLM(ModelConfig(vocab_size=30, seq_len=9216, block_len=3072, n_layer=2, attn_every=2, n_head=2,
                                         d_model=16, d_state=16, mamba_head_dim=16)).eval()
    cache = model.new_cache(1, 9216)
    bench.fill(cache, model)                            # 6144 tokens, and half of them again
    (keys, _), (_, ssm) = cache.layers
    assert keys.ne(0).any(-1).all() and torch.equal(keys[:, :, 6144:], keys[:, :, :3072]) and ssm.ne(0).any()
