"""tools/sweep.py compares runs, survives failures and interrupts, and draws. Tiny models on a tiny corpus."""
import contextlib
import glob
import io
import json
import os
import time
import types
from pathlib import Path

import pytest

from configurator import UserError, configure, lock
from conftest import ROOT, TINY, Child, module_of
from paper import MODELS
from tools import sweep
from tools.loss import read_log


class Process(Child):
    """Stands for subprocess.Popen in sweep.py. It forks a process that has imported torch, which is faster."""

    def __init__(self, command, stdout, **how):
        self.start((os.path.relpath(command[1], ROOT), *command[2:]), {}, [stdout.name] * 2)
        self.terminate, self.wait = self.process.terminate, self.process.join

    poll = lambda self: self.process.exitcode
    returncode = property(poll)


@pytest.fixture(scope="module")
def config(corpus, tmp_path_factory):
    """TINY as a config file."""
    path = tmp_path_factory.mktemp("config") / "tiny_mamba_h.py"
    pairs = [flag[2:].split("=") for flag in [*TINY, f"--data={corpus}"]]
    path.write_text("".join(f"{key} = {value if value[0].isdigit() else repr(value)}\n" for key, value in pairs))
    return str(path)


def sweep_with(*argv):
    """tools/sweep.py as a module of its own, with these settings."""
    module = module_of("tools/sweep")
    module.subprocess = types.SimpleNamespace(Popen=Process)
    configure(vars(module), list(argv))
    return module


def grid(config, out):
    """A sweep of three runs: two learning rates, and one that fails."""
    runs = [f"{config} learning_rate=1e-5", f"{config} learning_rate=3e-2", f"{config} block_len=7"]
    return sweep_with(f"--runs={runs}", "--runs_per_gpu=2", f"--out_dir={out}", "--eval_settings=mc=2 sequences=4")


@pytest.fixture(scope="module")
def swept(config, tmp_path_factory):
    """Such a sweep: its folder, what it printed (table), and how it ended."""
    out, table = str(tmp_path_factory.mktemp("sweep") / "out"), io.StringIO()
    with contextlib.redirect_stdout(table), pytest.raises(UserError) as stopped:
        grid(config, out).main()
    return types.SimpleNamespace(folder=out, table=table.getvalue(), end=str(stopped.value))


def test_the_run_with_the_lowest_nelbo_is_best(swept, corpus):
    slow, row, _ = json.load(open(f"{swept.folder}/sweep.json"))["runs"]
    assert (slow["learning_rate"], row["learning_rate"]) == (1e-5, 0.03)
    assert row["texts"][corpus]["nelbo"] < slow["texts"][corpus]["nelbo"]
    assert sweep.best_of([slow, row])["tiny_mamba_h"] is row
    folder, = glob.glob(f"{swept.folder}/tiny_mamba_h+learning_rate-3e-2-*")
    *_, trained, validated = read_log(f"{folder}/log.jsonl")
    assert row["val_loss"] == row["points"][-1]["val"] == validated["val_loss"] and row["train_loss"] == trained["loss"]
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
    module = grid(config, swept.folder)
    with pytest.raises(UserError):
        module.main()
    assert [os.stat(f).st_mtime_ns for f in made] == times
    module.eval_settings = "mc=1"                       # an evaluation with other settings does not count
    mine = module.Run(module.runs[0])
    assert not mine.report() and "was not evaluated" in module.summarise(mine)["error"]
    for settings, same in (("seed=2", False), ("micro_batch_size=2", True)):
        module.train_settings = settings
        assert module.Run(module.runs[0]).trained() == same


def test_an_interrupted_sweep_goes_on_where_it_was(config, tmp_path):
    out = str(tmp_path / "out")
    module = sweep_with(f"--runs=['{config}']", f"--out_dir={out}", "--eval_settings=sequences=2",
                        "--train_settings=max_iters=150 eval_interval=1000 log_interval=5")

    def interrupted(seconds):
        time.sleep(0.02)
        if any(map(os.path.getsize, glob.glob(f"{out}/*/log.jsonl"))):
            raise KeyboardInterrupt
    module.time = types.SimpleNamespace(sleep=interrupted)
    with pytest.raises(KeyboardInterrupt):
        module.main()
    folder, = glob.glob(f"{out}/tiny_mamba_h-*")
    assert 5 <= read_log(f"{folder}/log.jsonl")[-1]["step"] < 150 and os.path.exists(f"{folder}/ckpt.pt")
    module.time = time
    module.main()
    assert read_log(f"{folder}/log.jsonl")[-1]["step"] == 150
    assert json.load(open(f"{out}/sweep.json"))["runs"][0]["texts"]


def test_a_run_has_left_the_plateau_when_fifty_steps_have_a_lower_mean_loss():
    log = [dict(step=step, loss=loss) for step, loss in zip(range(10, 130, 10), 6 * [8.0] + 3 * [7.1] + 3 * [5.0])]
    left = sweep_with("--plateau=7").left_plateau
    assert left(log) == 100                             # (8 + 3 * 7.1 + 5) / 5 is 6.86; ten steps before it is 7.46
    assert left(log[:9]) is None and left([]) is None


def test_the_tables_and_the_picture_are_drawn_again_from_the_json(swept, tmp_path, capsys):
    record, pictures = json.load(open(f"{swept.folder}/sweep.json")), []
    for base in ("tiny_mamba_h", "mamba_h_87m"):        # the second is in the paper, which adds a marker
        for row in record["runs"]:
            row["base"] = base
        (tmp_path / "again.json").write_text(json.dumps(record))
        sweep_with(f"--draw={tmp_path}/again.json").main()
        printed = capsys.readouterr().out
        assert printed.splitlines()[:-1] == [line for line in swept.table.splitlines() if "py: " not in line][:-1]
        pictures.append((tmp_path / "again.png").read_bytes())
    assert pictures[0] == Path(swept.folder, "sweep.png").read_bytes() != pictures[1]


@pytest.mark.parametrize("name, n_runs", [("87m", 20), ("laptop", 15), ("select_87m", 12), ("web_87m", 8)])
def test_the_sweeps_of_config_name_configs_and_settings_that_exist(name, n_runs, monkeypatch):
    monkeypatch.chdir(ROOT)
    module = sweep_with(f"config/sweep/{name}.py")
    every = [module.Run(line) for line in module.runs]
    assert len({run.folder for run in every}) == len(every) == n_runs
    if name == "web_87m":                               # at the rates that select_87m.py chose
        best = sweep.best_of(json.loads((ROOT / "assets/select_87m.json").read_text())["runs"])
        assert {run.base: run.settings["learning_rate"] for run in every} == {b: r["learning_rate"] for b, r in best.items()}


def test_a_folder_has_one_sweep_at_a_time(swept, config):
    with lock(f"{swept.folder}/.lock", ""), pytest.raises(UserError, match="another sweep is running in"):
        grid(config, swept.folder).main()


def test_differences_are_paired_by_window_on_each_text(capsys):
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
    sweep.show(rows)
    assert capsys.readouterr().out.count("do not compare their figures") == 2
