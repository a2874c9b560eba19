"""tools/sweep.py compares runs, survives failures and interrupts, and draws. Tiny models on a tiny corpus."""
import contextlib
import glob
import io
import json
import os
import signal
import threading
import time
import types
from pathlib import Path

import pytest

from configurator import UserError, configure, settings_of
from conftest import ROOT, TINY, Child, as_config, signals_put_back
from paper import MODELS, RESULTS
from tools import lock, sweep
from tools.loss import read_log


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
    """Such a sweep: its folder, what it printed (table), and how it ended."""
    out, before, table = str(tmp_path_factory.mktemp("sweep") / "out"), settings_of(vars(sweep)), io.StringIO()
    with contextlib.redirect_stdout(table), pytest.raises(UserError) as stopped:
        grid(config, out)
    vars(sweep).update(before)
    return types.SimpleNamespace(folder=out, table=table.getvalue(), end=str(stopped.value))


def test_the_run_with_the_lowest_nelbo_is_best(swept, corpus):
    slow, row, _ = json.load(open(f"{swept.folder}/sweep.json"))["runs"]
    assert (slow["learning_rate"], row["learning_rate"]) == (1e-5, 0.03)
    assert row["texts"][corpus]["nelbo"] < slow["texts"][corpus]["nelbo"]
    assert sweep.best_of([slow, row])["tiny_mamba_h"] is row
    folder, = glob.glob(f"{swept.folder}/tiny_mamba_h+learning_rate-3e-2-*")
    assert row["val_loss"] == row["points"][-1]["val"] == read_log(f"{folder}/log.jsonl")[-1]["val_loss"]
    assert [p["step"] for p in row["points"]] == [2, 4] and row["tokens"] == 4 * 4 * 32 and row["tok_per_s"] > 0
    assert row["texts"][corpus]["samples"] == 2 and len(row["texts"][corpus]["nats"]) == 4 and "error" not in row


def test_a_failing_run_is_a_row_with_its_last_words_and_the_others_are_kept(swept):
    failed = json.load(open(f"{swept.folder}/sweep.json"))["runs"][2]
    assert "status 1: train.py: seq_len" in failed["error"] and failed["error"] in swept.end
    assert "correct the cause and start" in swept.end
    _, kept, lost = [line.split() for line in swept.table.splitlines() if line.startswith("tiny_mamba_h ")][:3]
    assert kept[-1] == "*" and "-" not in kept and lost[1] == "block_len=7" and lost.count("-") == 4
    assert os.path.getsize(f"{swept.folder}/sweep.png") > 5000


def test_what_is_done_is_not_done_again_and_other_settings_are_other_runs(swept, config):
    made = [f for name in ("ckpt.pt", "eval.json") for f in glob.glob(f"{swept.folder}/*/{name}")]
    times = [os.stat(f).st_mtime_ns for f in made]
    assert len(made) == 4                               # two runs and their evaluations
    with pytest.raises(UserError):
        grid(config, swept.folder)
    assert [os.stat(f).st_mtime_ns for f in made] == times
    configure(vars(sweep), [f"--out_dir={swept.folder}", "--eval_settings=mc=2 sequences=4"])
    mine = sweep.Run(f"{config} learning_rate=1e-5")
    assert mine.trained() and mine.report()
    sweep.eval_settings = "mc=1"                        # an evaluation with other settings does not count
    mine = sweep.Run(f"{config} learning_rate=1e-5")
    assert not mine.report() and "was not evaluated" in sweep.summarise(mine)["error"]
    for settings, same in (("seed=2", False), ("micro_batch_size=2", True)):
        sweep.train_settings = settings
        assert sweep.Run(f"{config} learning_rate=1e-5").trained() == same


@pytest.mark.parametrize("argv, message", [
    (["--runs=[]"], "there are no runs"),
    (["--runs_per_gpu=0"], "at least 1"),
    (["--runs=['{config}']", "--eval_settings=mcc=1"], "^eval_settings: there is no setting 'mcc'"),
    (["--runs=laptop sed=1"], "^run 'laptop sed=1': there is no setting 'sed'; did you mean seed"),
    (["--runs=['{config}']", "--eval_settings=data=nowhere"], "nowhere holds no prepared text")])
def test_what_cannot_work_is_refused_before_any_run(config, tmp_path, argv, message):
    with pytest.raises(UserError, match=message):
        run(f"--out_dir={tmp_path}/out", *(word.format(config=config) for word in argv))
    assert not (tmp_path / "out").exists()


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
    folder, = glob.glob(f"{out}/tiny_mamba_h-*")
    assert 5 <= read_log(f"{folder}/log.jsonl")[-1]["step"] < 150 and os.path.exists(f"{folder}/ckpt.pt")
    run(*argv)
    assert read_log(f"{folder}/log.jsonl")[-1]["step"] == 150
    assert json.load(open(f"{out}/sweep.json"))["runs"][0]["texts"]


def test_a_run_is_trained_when_its_last_step_was_validated(config, tmp_path):
    """Its checkpoint is saved before. The last line of a step counts, and half a line is skipped."""
    sweep.out_dir = str(tmp_path)
    mine = sweep.Run(config)
    Path(mine.folder).mkdir()
    lines = ['{"step": 2, "val_loss": 4}', '{"step": 4, "lo', '{"step": 2, "val_loss": 2}', '{"step": 4, "loss": 1}']
    for last, trained in (("", False), ('{"step": 4, "val_loss": 1.5}', True)):
        Path(mine.path("log.jsonl")).write_text("\n".join([*lines, last]))
        assert mine.trained() == trained
    row = sweep.summarise(mine)
    assert row["points"] == [dict(step=2, val=2.0), dict(step=4, val=1.5)] and row["train_loss"] == 1.0


def test_a_run_has_left_the_plateau_when_fifty_steps_have_a_lower_mean_loss():
    log = [dict(step=step, loss=loss) for step, loss in zip(range(10, 130, 10), 6 * [8.0] + 3 * [7.1] + 3 * [5.0])]
    sweep.plateau = 7.0
    assert sweep.left_plateau(log) == 100               # (8 + 3 * 7.1 + 5) / 5 is 6.86; ten steps before it is 7.46
    assert sweep.left_plateau(log[:9]) is None and sweep.left_plateau([]) is None


def test_the_tables_and_the_picture_are_drawn_again_from_the_json(swept, tmp_path, capsys):
    record, pictures = json.load(open(f"{swept.folder}/sweep.json")), []
    for base in ("tiny_mamba_h", "mamba_h_87m"):        # the second is in the paper, which adds a marker
        for row in record["runs"]:
            row["base"] = base
        (tmp_path / "again.json").write_text(json.dumps(record))
        run(f"--draw={tmp_path}/again.json")
        printed = capsys.readouterr().out
        assert printed.splitlines()[:-1] == [line for line in swept.table.splitlines() if "py: " not in line][:-1]
        pictures.append((tmp_path / "again.png").read_bytes())
    assert pictures[0] == Path(swept.folder, "sweep.png").read_bytes() != pictures[1]


@pytest.mark.parametrize("name, n_runs", [("87m", 20), ("laptop", 29), ("web_87m", 5)])
def test_the_sweeps_of_config_name_configs_and_settings_that_exist(name, n_runs, monkeypatch):
    monkeypatch.chdir(ROOT)
    configure(vars(sweep), [f"config/sweep/{name}.py"])
    every = [sweep.Run(line) for line in sweep.runs]
    assert len({run.folder for run in every}) == len(every) == n_runs
    if name == "web_87m":                               # the paper's models, each at its best rate there, and one more
        *papers, short = every
        assert [run.base for run in papers] == [f"{model}_87m" for model in MODELS]
        assert all(run.settings["learning_rate"] == RESULTS[run.base]["lr"] for run in papers)
        assert [run.settings["warmup_iters"] for run in every] == [1000, 500, 500, 1000, 250]
        assert (short.base, short.settings["learning_rate"], short.settings["embed_std"]) == ("mamba_h_87m", 2e-3, 1.0)


def test_a_folder_has_one_sweep_at_a_time(swept, config):
    with lock(f"{swept.folder}/.lock", ""), pytest.raises(UserError, match="another sweep is running in"):
        grid(config, swept.folder)


def test_differences_are_paired_by_window_on_each_text():
    """Windows differ by nats, the two models by 0.1 on every one: the paired error is small."""
    noise = [0.0, 2.0, -1.0, 5.0]
    def row(base, offset, sha256="one", texts=("web", "novels")):
        nats = [10 * (3 + n + offset) for n in noise]
        figures = dict(nats=nats, nelbo=sum(nats) / 40, seq_len=10, sha256=sha256)
        return dict(name="a", base=base, nelbo=figures["nelbo"], texts=dict.fromkeys(texts, figures))
    rows = [row("b", 0.1), row("a", 0.0), row("a", 0.7), row("c", 0.3, texts=["web"]), row("d", 0.2, "other")]
    found = sweep.differences([*rows, dict(name="lost", base="e", val_loss=None)])
    assert [(d["text"], d["better"], d["worse"]) for d in found] == [
        ("web", "a", "b"), ("web", "a", "c"), ("web", "b", "c"), ("novels", "a", "b")]
    assert [d["difference"] for d in found] == pytest.approx([0.1, 0.3, 0.2, 0.1])
    assert all(d["se"] == pytest.approx(0, abs=1e-12) for d in found)
