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

from checkpoint import lock
from configurator import UserError, configure, settings_of
from conftest import ROOT, TINY, Child, as_config, read_log, signals_put_back
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
        with pytest.raises(UserError) as stopped:
            grid(config, out)
    vars(sweep).update(before)
    return types.SimpleNamespace(folder=out, errors=errors.getvalue(), table=table.getvalue(), end=str(stopped.value))


def test_the_run_with_the_lowest_nelbo_is_best(swept):
    slow, row, _ = json.load(open(f"{swept.folder}/sweep.json"))["runs"]
    assert (slow["learning_rate"], row["learning_rate"]) == (1e-5, 0.03)
    assert row["eval"]["nelbo"] < slow["eval"]["nelbo"] and sweep.best_of([slow, row])["tiny_mamba_h"] is row
    folder, = glob.glob(f"{swept.folder}/tiny_mamba_h+learning_rate-3e-2-*")
    assert row["val_loss"] == row["points"][-1]["val"] == read_log(folder)[-1]["val_loss"]
    assert [p["step"] for p in row["points"]] == [2, 4] and row["tokens"] == 4 * 4 * 32
    assert row["eval"]["samples"] == 2 and row["eval"]["nelbo"] > 0 and "error" not in row


def test_a_failing_run_is_a_row_with_its_last_words_and_the_others_are_kept(swept):
    failed = json.load(open(f"{swept.folder}/sweep.json"))["runs"][2]
    assert "status 1: train.py: seq_len" in failed["error"] and failed["error"] in swept.errors
    assert "fix the cause and start" in swept.end
    _, kept, lost = [line.split() for line in swept.table.splitlines() if line.startswith("tiny_mamba_h ")][:3]
    assert kept[-1] == "*" and "-" not in kept and lost[1] == "block_len=7" and lost.count("-") == 9
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
    sweep.train_settings = "seed=2"
    assert not sweep.Run(f"{config} learning_rate=1e-5").trained()
    sweep.train_settings = "device=cpu log_interval=9"  # these do not change the run
    assert sweep.Run(f"{config} learning_rate=1e-5").trained()


@pytest.mark.parametrize("argv, message", [
    (["--runs=['a \"b']"], "cannot be split"),
    (["--runs=[]"], "there are no runs"),
    (["--runs_per_gpu=0"], "at least 1"),
    (["--runs=['{config}']", "--eval_settings=mcc=1"], "^eval_settings: there is no setting 'mcc'"),
    (["--runs=laptop sed=1"], "^run 'laptop sed=1': there is no setting 'sed'; did you mean seed"),
    (["--runs=['{config} data=nowhere']"], "nowhere holds no prepared text"),
    (["--figure=/x/y"], "must end in .png")])
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
    assert 5 <= read_log(folder)[-1]["step"] < 150 and os.path.exists(f"{folder}/ckpt.pt")
    run(*argv)
    assert read_log(folder)[-1]["step"] == 150
    assert json.load(open(f"{out}/sweep.json"))["runs"][0]["eval"]["nelbo"] > 0


def test_the_last_line_of_a_step_counts_and_half_a_line_is_skipped(config, tmp_path):
    sweep.out_dir = str(tmp_path)
    mine = sweep.Run(config)
    Path(mine.folder).mkdir()
    lines = ['{"step": 2, "loss": 5.0}', '{"step": 2, "val_loss": 4.0}', '{"step": 4, "lo', '{"step": 2, "loss": 3.0}',
             '{"step": 2, "val_loss": 2.0}', '{"step": 4, "loss": 1.0}']
    Path(mine.path("log.jsonl")).write_text("\n".join(lines))
    assert sweep.summarise(mine)["points"] == [dict(step=2, val=2.0, train=3.0)]
    assert not mine.trained(), "step 4 is the last, but its checkpoint may be missing: it was not validated"
    with open(mine.path("log.jsonl"), "a") as f:
        f.write('\n{"step": 4, "val_loss": 1.5}\n')
    assert mine.trained()


def test_a_table_is_drawn_again_from_its_json_beside_other_files(swept, tmp_path, capsys):
    pictures = []
    for curve, ppl, base in ((0, 1, ""), (0.5, 1, ""), (0, 1.5, ""), (0, 1, "_other")):
        record = json.load(open(f"{swept.folder}/sweep.json"))
        for row in record["runs"]:
            row["base"] += base                         # a file may hold other models than the first
            row.get("eval", {"ppl": 0})["ppl"] *= ppl
            for point in row["points"]:
                point["val"] -= curve
        (tmp_path / "again.json").write_text(json.dumps(record))
        run(f"--draw={swept.folder}/sweep.json,{tmp_path}/again.json", f"--figure={tmp_path}/both.png")
        assert capsys.readouterr().out.splitlines()[:3] == swept.table.splitlines()[:3]
        pictures.append((tmp_path / "both.png").read_bytes())
    assert len(set(pictures)) == 4
    for row in record["runs"]:
        row.pop("eval", None)
    (tmp_path / "again.json").write_text(json.dumps(record))
    run(f"--draw={tmp_path}/again.json", "--figure=")
    table = capsys.readouterr().out
    assert f"{record['runs'][0]['val_loss']:.4f}" in table and "*" in table and (tmp_path / "again.png").exists()


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
    assert own.command("train")[-1] == f"--out_dir={own.folder}" and " " not in own.folder


@pytest.mark.parametrize("name, n_runs", [("87m", 20), ("laptop", 29), ("web_87m", 30)])
def test_the_sweeps_of_config_name_configs_and_settings_that_exist(name, n_runs, monkeypatch):
    monkeypatch.chdir(ROOT)
    configure(vars(sweep), [f"config/sweep/{name}.py"])
    every = [sweep.Run(line) for line in sweep.runs]
    assert len({run.folder for run in every}) == len(every) == n_runs
    assert not every[0].report()                        # eval_settings are settings of eval.py


def test_a_folder_has_one_sweep_at_a_time(swept, config):
    with lock(f"{swept.folder}/.lock", ""), pytest.raises(UserError, match="another sweep is running in"):
        grid(config, swept.folder)


def test_runs_share_the_gpus_that_are_visible(monkeypatch):
    monkeypatch.setattr(sweep.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,3")
    sweep.runs_per_gpu = 2
    assert sweep.places() == ["7", "3", "7", "3"]
    monkeypatch.setattr(sweep.torch.cuda, "device_count", lambda: 0)
    assert sweep.places() == ["", ""]


def test_differences_are_paired_by_sequence_and_seeds_are_one_entry():
    """Sequences differ by nats, the two models by 0.1 on every one: the paired error is small."""
    noise = [0.0, 2.0, -1.0, 5.0]
    def row(name, base, offset):
        return dict(name=name, base=base, nats=[10 * (3 + n + offset) for n in noise], eval=dict(tokens=40))
    (found,) = sweep.differences([row("b seed=1", "b", 0.12), row("a seed=1", "a", 0.01), row("a seed=2", "a", -0.01),
                                  row("b seed=2", "b", 0.08), dict(name="lost", base="c", error="why")])
    assert (found["better"], found["worse"], found["seeds"]) == ("a", "b", 2)
    assert found["difference"] == pytest.approx(0.1) and found["se_text"] == pytest.approx(0, abs=1e-12)
    assert found["se_seeds"] == pytest.approx(((0.02 ** 2 + 0.04 ** 2) / 4) ** 0.5)
    assert not sweep.differences([row("a", "a", 0.0) | dict(text="one"), row("b", "b", 0.1) | dict(text="another")])
