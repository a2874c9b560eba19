"""tools/sweep.py compares runs, survives failures and interrupts, and draws. Tiny models on a tiny corpus."""
import contextlib
import glob
import io
import json
import os
import signal
import sys
import threading
import time
import types
from pathlib import Path
from unittest.mock import Mock

import pytest

from configurator import UserError, configure, settings_of
from conftest import ROOT, TINY, Child, as_config, read_log, signals_put_back
from files import locked
from tools import sweep


class Process(Child):
    """Stands for subprocess.Popen in sweep.py. It forks a process that has imported torch, which is faster."""

    def __init__(self, command, stdout, **how):
        self.start((os.path.relpath(command[1], ROOT), *command[2:]), {}, [stdout.name] * 2)

    def poll(self):
        self.returncode = self.process.exitcode
        return self.returncode

    def terminate(self):
        self.process.terminate()

    def wait(self):
        self.process.join()


@pytest.fixture(autouse=True)
def _settings_put_back():
    before = settings_of(vars(sweep))
    yield
    vars(sweep).update(before)


@pytest.fixture(scope="module")
def config(corpus, tmp_path_factory):
    """TINY as a config file."""
    path = tmp_path_factory.mktemp("config") / "tiny_mamba_h.py"
    path.write_text(as_config(TINY) + f"data = {corpus!r}\n")
    return str(path)


def run(*argv):
    configure(vars(sweep), list(argv))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "subprocess", types.SimpleNamespace(Popen=Process))
        sweep.main()


def grid(config, out, *more):
    """A sweep of three runs: two learning rates, and one that fails."""
    run(f"--runs=['{config} learning_rate=1e-5', '{config} learning_rate=3e-2', '{config} block_len=7']",
        "--runs_per_gpu=2", f"--out_dir={out}", "--eval_settings=mc=2 sequences=4", *more)


@pytest.fixture(scope="module")
def swept(config, tmp_path_factory):
    """Such a sweep: its folder, what it printed to stderr (errors) and to stdout (table), and how it ended."""
    out, before = str(tmp_path_factory.mktemp("sweep") / "out"), settings_of(vars(sweep))
    errors, table = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(table):
        with pytest.raises(SystemExit) as stopped:
            grid(config, out)
    vars(sweep).update(before)
    return types.SimpleNamespace(folder=out, errors=errors.getvalue(), table=table.getvalue(), end=str(stopped.value))


def test_the_run_with_the_lowest_nelbo_is_best(swept):
    slow, row, _ = json.load(open(f"{swept.folder}/sweep.json"))["runs"]
    assert (slow["learning_rate"], row["learning_rate"]) == (1e-5, 0.03)
    assert row["eval"]["nelbo"] < slow["eval"]["nelbo"] and sweep.best_of([slow, row])["tiny_mamba_h"] is row
    log = read_log(f"{swept.folder}/tiny_mamba_h+learning_rate-3e-2")
    assert row["val_loss"] == row["points"][-1]["val"] == log[-1]["val_loss"]
    assert [p["step"] for p in row["points"]] == [2, 4] and row["tokens"] == 4 * 4 * 32
    assert row["eval"]["samples"] == 2 and row["eval"]["nelbo"] > 0 and "error" not in row


def test_a_failing_run_is_a_row_with_its_last_words_and_the_others_are_kept(swept):
    failed = json.load(open(f"{swept.folder}/sweep.json"))["runs"][2]
    assert "whole blocks of block_len 7" in failed["error"] and failed["error"] in swept.errors
    assert "fix the cause and start" in swept.end
    _, kept, lost = [line.split() for line in swept.table.splitlines() if line.startswith("tiny_mamba_h ")][:3]
    assert kept[-1] == "*" and "-" not in kept and lost[1] == "block_len=7" and lost.count("-") == 9
    assert os.path.getsize(f"{swept.folder}/sweep.png") > 5000


def test_what_is_done_is_not_done_again_and_other_settings_are_refused(swept, config):
    made = [f for name in ("ckpt.pt", "eval.json") for f in glob.glob(f"{swept.folder}/*/{name}")]
    times = [os.stat(f).st_mtime_ns for f in made]
    assert len(made) == 4                               # two runs and their evaluations
    with pytest.raises(SystemExit):
        grid(config, swept.folder)
    assert [os.stat(f).st_mtime_ns for f in made] == times
    with pytest.raises(UserError, match="another seed"):
        grid(config, swept.folder, "--train_settings=seed=2")
    with pytest.raises(UserError, match="another .*seed"):                  # even if every run has ended
        run(f"--runs=['{config} learning_rate=1e-5']", f"--out_dir={swept.folder}", "--train_settings=seed=2",
            "--eval_settings=mc=2 sequences=4")


@pytest.mark.parametrize("argv, message", [
    (["--runs=['']"], "must be names"),
    (["--runs=['a \"b']"], "cannot be split"),
    (["--runs_per_gpu=0"], "at least 1"),
    (["--eval_settings=mcc=1"], "^eval_settings: there is no setting 'mcc'"),
    (["--train_settings=sed=1"], "^train_settings: there is no setting 'sed'; did you mean seed"),
    (["--runs=laptop sed=1"], "^run 'laptop sed=1': there is no setting 'sed'; did you mean seed"),
    (["--eval_settings=out=e.json"], "eval_settings: every run has its own out; leave this setting out"),
    (["--runs=['{config}']", "--eval_settings=data=nowhere"], "nowhere holds no prepared data"),
    (["--table=/dev/null/t.json"], "cannot be written"),
    (["--figure=/x/../"], "must end in .png"),
    (["--figure=/dev/null/x.png"], "cannot be written")])
def test_what_cannot_work_is_refused_before_any_run(config, tmp_path, argv, message):
    with pytest.raises(UserError, match=message):
        run(f"--out_dir={tmp_path}/out", *(word.format(config=config) for word in argv))
    assert not (tmp_path / "out").exists()


def test_an_evaluation_with_other_settings_does_not_count(swept, config):
    configure(vars(sweep), [f"--out_dir={swept.folder}", "--eval_settings=mc=2 sequences=4"])
    run = sweep.Run(f"{config} learning_rate=1e-5")
    assert "eval" in sweep.summarise(run)
    sweep.eval_settings = "mc=1"
    assert run.report is None and "eval.json is missing or cannot be read" in sweep.summarise(run)["error"]


def test_of_several_ranks_the_one_that_failed_is_quoted(config, tmp_path):
    configure(vars(sweep), [f"--out_dir={tmp_path}"])
    run = sweep.Run(config)
    Path(run.folder).mkdir()
    gone = "train.py: another process of this run is gone or silent (Connection closed); there is no checkpoint yet\n"
    for text, cause in ((f"step\ntrain.py: the disk is full\n{gone}torchrun\n", "the disk is full"), (gone, "another")):
        Path(run.path("train.txt")).write_text(text)
        assert f"status 1: train.py: {cause}" in run.why("train", 1)


def test_an_interrupted_sweep_goes_on_where_it_was(config, tmp_path):
    out = str(tmp_path / "out")
    argv = [f"--runs=['{config}']", f"--out_dir={out}", "--eval_settings=sequences=2",
            "--train_settings=max_iters=150 eval_interval=1000 log_interval=5"]

    def interrupt():
        deadline = time.monotonic() + 60
        while not any(map(os.path.getsize, glob.glob(f"{out}/*/log.jsonl"))) and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)
    thread = threading.Thread(target=interrupt)
    with signals_put_back():
        signal.signal(signal.SIGTERM, signal.default_int_handler)              # as the script does
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            run(*argv)
        thread.join()
    first = read_log(f"{out}/tiny_mamba_h")
    assert 5 <= first[-1]["step"] < 150 and os.path.exists(f"{out}/tiny_mamba_h/ckpt.pt")
    run(*argv)
    rows = read_log(f"{out}/tiny_mamba_h")
    assert rows[:len(first)] == first and rows[-1]["step"] == 150
    assert json.load(open(f"{out}/sweep.json"))["runs"][0]["eval"]["nelbo"] > 0


def test_a_table_is_drawn_again_from_its_json_and_may_lack_evaluations(swept, tmp_path, capsys):
    record = json.load(open(f"{swept.folder}/sweep.json"))
    path = tmp_path / "again.json"
    path.write_text(json.dumps(record))
    run(f"--draw={path}")
    assert capsys.readouterr().out.splitlines()[:3] == swept.table.splitlines()[:3]
    whole = (tmp_path / "again.png").read_bytes()
    assert whole == open(f"{swept.folder}/sweep.png", "rb").read()
    for row in record["runs"]:
        row.pop("eval", None)
    path.write_text(json.dumps(record))
    run(f"--draw={path}")
    table = capsys.readouterr().out
    assert f"{record['runs'][0]['val_loss']:.4f}" in table and "NELBO" not in table and "*" in table
    assert (tmp_path / "again.png").read_bytes() != whole
    with pytest.raises(UserError, match="not a file that sweep.py wrote"):
        run(f"--draw={path},{swept.folder}/tiny_mamba_h+learning_rate-1e-5/run.json")


def test_repetitions_are_drawn_beside_a_sweep(swept, tmp_path, capsys):
    pictures = []
    for curve, ppl in ((0, 1), (0.5, 1), (0, 1.5)):
        record = json.load(open(f"{swept.folder}/sweep.json"))
        for row in record["runs"]:
            row.get("eval", {"ppl": 0})["ppl"] *= ppl
            for point in row["points"]:
                point["val"] -= curve
        (tmp_path / "again.json").write_text(json.dumps(record))
        run(f"--draw={swept.folder}/sweep.json,{tmp_path}/again.json", f"--figure={tmp_path}/both.png")
        table = capsys.readouterr().out.splitlines()
        assert table[:1] == [line for line in table if line.startswith("run ") and "PPL" in line][1:]     # one each
        pictures.append((tmp_path / "both.png").read_bytes())
    assert len(set(pictures)) == 3
    for row in record["runs"]:                          # a file may hold other models than the first
        row["base"] += "_other"
    (tmp_path / "again.json").write_text(json.dumps(record))
    run(f"--draw={swept.folder}/sweep.json,{tmp_path}/again.json", f"--figure={tmp_path}/both.png")


def test_settings_that_make_another_model_give_it_a_name_and_a_colour_of_its_own(config):
    bases = [sweep.Run(f"{config} {more}").base for more in ("", "learning_rate=1", "attn_every=1", "block_len=32",
                                                            "attn_every=1 block_len=32")]
    models = ["mamba_h", "mamba_h", "bdlm_attention", "diffumamba_h", "attention"]
    assert bases == ["tiny_mamba_h"] * 2 + [f"tiny_mamba_h {model}" for model in models[2:]]
    assert [sweep.model_in(base) for base in bases] == models


def test_of_settings_given_twice_the_later_wins_and_values_may_hold_spaces(config):
    configure(vars(sweep), ["--train_settings=max_iters=9 'data=my texts' learning_rate=1"])
    one = sweep.Run(f"{config} learning_rate=5e-4")
    assert one.settings["max_iters"] == 9 and one.settings["data"] == "my texts"
    assert one.settings["learning_rate"] == 0.0005 and one.name.endswith("learning_rate=5e-4")
    own = sweep.Run(f"{config} learning_rate=2e-3 'out_dir=a b'")
    assert own.settings["learning_rate"] == 2e-3 and "--out_dir=a b" in own.command("train")
    assert own.command("train")[-1] == f"--out_dir={own.folder}" and " " not in own.folder
    with pytest.raises(UserError, match="did you mean seed"):
        sweep.Run(f"{config} sead=1")


@pytest.mark.parametrize("name, n_runs", [("87m", 20), ("laptop", 29), ("web_87m", 30)])
def test_the_sweeps_of_config_name_configs_and_settings_that_exist(name, n_runs, monkeypatch):
    monkeypatch.chdir(ROOT)
    configure(vars(sweep), [f"config/sweep/{name}.py"])
    assert len({sweep.Run(line).folder for line in sweep.runs}) == len(sweep.runs) == n_runs
    import eval as eval_module
    configure(settings_of(vars(eval_module)), [f"--{word}" for word in sweep.eval_settings.split()])


@pytest.fixture
def started(monkeypatch):
    """The list of (run, script) that a sweep starts. Each ends at once, without an error."""
    order = []

    def start(run, script, *rest):
        order.append((run, script))
        return Mock(returncode=0, poll=lambda: 0)
    monkeypatch.setattr(sweep, "places", lambda: [[]])
    monkeypatch.setattr(sweep, "start", start)
    monkeypatch.setattr(sweep.time, "sleep", lambda seconds: None)
    return order


class Stub:
    """A run of a sweep that is in memory alone."""
    error = ""

    def __init__(self):
        self.state = {}

    def remember(self, **news):
        self.state.update(news)


def test_a_run_is_evaluated_before_the_next_one_is_trained(started):
    """So a sweep that is cut off has evaluated all runs that it has trained."""
    a, b = Stub(), Stub()
    sweep.run_all([a, b], Mock(n=0), lambda: 0)
    assert started == [(a, "train"), (a, "eval"), (b, "train"), (b, "eval")]
    assert a.state == dict(trained=True, evaluated=sweep.eval_settings)


@pytest.mark.skipif(sweep.PRCTL is None, reason="only Linux ends a process with the one that started it")
def test_a_killed_sweep_leaves_no_training_behind(tmp_path):
    run_of = types.SimpleNamespace(path=lambda name: str(tmp_path / name),
                                   command=lambda job: [sys.executable, "-c", "import time; time.sleep(99)"])
    child = os.fork()
    if not child:
        try:
            (tmp_path / "pid").write_text(str(sweep.start(run_of, "train", [], 1).pid))
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)                                 # else, after an error, this would be a second pytest
    os.waitpid(child, 0)
    trainer, deadline = int((tmp_path / "pid").read_text()), time.time() + 20
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):           # it may be gone already
        while time.time() < deadline and Path(f"/proc/{trainer}/stat").read_text().split()[2] != "Z":
            time.sleep(0.05)
    assert time.time() < deadline


def test_a_folder_has_one_sweep_at_a_time(swept, config):
    with locked(swept.folder, ""), pytest.raises(UserError, match="another process is writing to"):
        grid(config, swept.folder)


def test_runs_share_gpus_or_spread_over_them(monkeypatch):
    monkeypatch.setattr(sweep.torch.cuda, "device_count", lambda: 5)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4,3")
    assert sweep.places() == [["7"], ["6"], ["5"], ["4"], ["3"]]
    sweep.gpus_per_run, sweep.runs_per_gpu = 2, 2
    assert sweep.places() == 2 * [["7", "6"], ["5", "4"]]
    sweep.gpus_per_run = 6
    with pytest.raises(UserError, match="lower gpus_per_run"):
        sweep.places()


def test_differences_are_paired_by_sequence_and_seeds_are_one_entry(capsys):
    """Sequences differ by nats, the two models by 0.1 on every one: the paired error is small."""
    noise = [0.0, 2.0, -1.0, 5.0]
    def row(name, base, offset):
        return dict(name=name, base=base, nats=[10 * (3 + n + offset) for n in noise], eval=dict(tokens=40))
    rows = sweep.differences([row("b seed=1", "b", 0.12), row("a seed=1", "a", 0.01), row("a seed=2", "a", -0.01),
                              row("b seed=2", "b", 0.08), dict(name="lost", base="c", error="why")])
    (found,) = rows
    assert (found["better"], found["worse"], found["seeds"]) == ("a", "b", 2)
    assert found["difference"] == pytest.approx(0.1) and found["se_text"] == pytest.approx(0, abs=1e-12)
    assert found["se_seeds"] == pytest.approx(((0.02 ** 2 + 0.04 ** 2) / 4) ** 0.5)
    sweep.show_differences(rows)
    assert "+0.1000" in capsys.readouterr().out
    assert not sweep.differences([row("a", "a", 0.0) | dict(text="one"), row("b", "b", 0.1) | dict(text="another")])
