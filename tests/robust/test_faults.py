"""Nothing is lost and nothing is silently wrong: interrupts, full disks, planted links, damaged files."""
import gc
import itertools
import os
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from checkpoint import load_checkpoint, load_model, load_prompt, save_checkpoint, save_prompt
from configurator import lock, write_file  # noqa
from configurator import UserError
from conftest import EIGHT_STEPS, ROOT, Child, free_port, make_model, run_train, script, start_ranks, state_of
from parallel import Parallel, ShardedAdamW
from tools.export import export
from tools.loss import read_log


# ----------------------------------------------------------------------------------------------
# Runs

@pytest.mark.parametrize("called, count, times, number", [
    ("nelbo_sums", 1, 3, signal.SIGTERM), ("nelbo_sums", 2, 1, signal.SIGHUP),
    ("learning_rate_at", 4, 1, signal.SIGUSR1), ("learning_rate_at", 5, 1, signal.SIGUSR2)])
def test_a_run_that_was_interrupted_ends_as_one_that_was_not(tiny, trained, tmp_path, capsys, called, count, times,
                                                             number):
    """With the same weights, moments and validations. The signal comes in the count-th call of a function: in the first
    validation of a run and of two resumes; in the last validation; in a step before one, which is then left to the
    resumed run; in one after. A closed terminal sends SIGHUP, a batch system SIGUSR1 or SIGUSR2 before the end of the
    time."""
    argv = [*tiny, *EIGHT_STEPS]

    def patch(module):
        real, calls = getattr(module, called), itertools.count(1)

        def interrupted(*args, **kwargs):
            if next(calls) == count:
                os.kill(os.getpid(), number)
            return real(*args, **kwargs)
        setattr(module, called, interrupted)
    for more in [[], ["--resume"], ["--resume"]][:times]:
        with pytest.raises(SystemExit, match=str(128 + number)):
            run_train(argv + more, patch=patch)
        assert called == "nelbo_sums" or "continue with the same command and --resume" in capsys.readouterr().out
    for _ in range(2):                                  # the second time it has finished
        run_train(argv + ["--resume"])
        torch.testing.assert_close(state_of(tmp_path), state_of(trained), rtol=0, atol=0)
        validations = [[(row["step"], row["val_loss"]) for row in read_log(f"{folder}/log.jsonl") if "val_loss" in row]
                       for folder in (tmp_path, trained)]
        assert validations[0] == validations[1]


def test_steps_that_are_not_finite_change_nothing_and_three_in_a_row_stop_a_run(tiny, tmp_path, capsys, monkeypatch):
    reduce, steps = ShardedAdamW.reduce_gradients, itertools.count(1)
    monkeypatch.setattr(ShardedAdamW, "reduce_gradients", lambda optimizer: (
        reduce(optimizer) * (float("nan") if next(steps) in {2, 4, 5, 6} else 1)))
    with pytest.raises(UserError, match="three steps in a row .*is the last good checkpoint, continue with"):
        run_train([*tiny, "--max_iters=9"])             # saves at steps 2 and 4
    assert capsys.readouterr().out.count("step skipped") == 4
    record = state_of(tmp_path)
    assert record["step"] == 4 and record["optimizer"]["step"] == 2             # after steps 1 and 3
    log = (tmp_path / "log.jsonl").read_text()
    assert '"grad_norm": null' in log and '"loss": null' in log and "NaN" not in log


def test_weights_that_are_not_finite_are_never_saved(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(ShardedAdamW, "step", lambda optimizer, lr, scale: optimizer.flats[0]["flat"].fill_(torch.inf))
    with pytest.raises(UserError, match="a weight is not finite; lower learning_rate; there is no checkpoint yet"):
        run_train([*tiny, "--max_iters=1", "--warmup_iters=0"])
    assert not (tmp_path / "ckpt.pt").exists()


@pytest.mark.parametrize("environment, message", [
    (dict(WORLD_SIZE=""), "the environment variable WORLD_SIZE is missing or empty; start all processes with torchrun"),
    (dict(WORLD_SIZE="4"), "RANK is missing or empty; start all processes with torchrun .* or unset WORLD_SIZE"),
    (dict(WORLD_SIZE="two"), "WORLD_SIZE is two"),
    (dict(WORLD_SIZE="2", RANK="0"), "do not meet at None:None .*MASTER_ADDR expected"),
    (dict(WORLD_SIZE="2", RANK="0", MASTER_ADDR="localhost"), "do not meet at localhost:{port} .*1/2 clients joined")])
def test_processes_that_do_not_find_each_other_end_in_a_sentence(monkeypatch, capsys, environment, message):
    port = str(free_port())
    if "MASTER_ADDR" in environment:
        monkeypatch.setenv("MASTER_PORT", port)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message.format(port=port)) as raised:
        Parallel("cpu", timeout=1)
    assert "\n" not in str(raised.value)
    assert ("waiting for all 2 processes at" in capsys.readouterr().err) == (environment["WORLD_SIZE"] == "2")


def test_a_lost_process_ends_the_others_with_a_sentence(tiny, tmp_path):
    path = tmp_path / "ckpt.pt"
    first, second = start_ranks(tmp_path, 2, "train.py", *tiny, "--max_iters=100000", "--dist_timeout=20")
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    second.end(signal.SIGKILL)
    status, _, message = first.end()
    assert status == 1 and "another process of this run is gone or silent" in message and "--resume" in message
    assert load_checkpoint(path)["step"] >= 2


@pytest.mark.parametrize("broken", ["stdout", pytest.param("log.jsonl", marks=pytest.mark.skipif(
    not os.path.exists("/dev/full"), reason="no /dev/full on this system"))])
def test_if_stdout_or_the_log_cannot_be_written_training_saves_and_ends_in_a_sentence(tiny, tmp_path, broken):
    """A closed pipe, as in `python train.py | head -3`, and a full disk."""
    out, pipe = tmp_path / "out", str(tmp_path / "pipe")
    out.mkdir()
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)                       # does not wait for a writer
    if broken == "log.jsonl":
        (out / "log.jsonl").symlink_to("/dev/full")
    child = Child(tmp_path, "train.py", *tiny, f"--out_dir={out}", "--max_iters=100000",
                  stdout=pipe if broken == "stdout" else None)
    assert broken != "stdout" or select.select([reader], [], [], 60)[0], "it prints nothing"
    os.close(reader)
    child.process.join(60)
    assert child.process.exitcode == 128 + signal.SIGPIPE
    assert re.fullmatch(r"train.py: stdout or the log in .*out cannot be written; .* --resume\n",
                        Path(child.paths[1]).read_text())
    assert load_checkpoint(out / "ckpt.pt")["step"] > 0


def test_a_run_ends_well_without_matplotlib(tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, printed, error = script("train.py", *tiny)
    assert status == 0 and "no loss.png, which needs matplotlib: pip install matplotlib" in printed, error


def test_a_reader_of_the_log_takes_the_last_line_of_a_step_and_skips_one_that_was_cut_off(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1, "loss": 3}\n{"step": 2, "lo{"step": 2, "val_loss": 5}\n{"step": 2, "val_loss": 4}\n'
                    '{"step": 1, "loss": 2}\n{"step": 2')
    assert read_log(path) == [{"step": 1, "loss": 2}, {"step": 2, "val_loss": 4}]


def test_a_run_is_neither_overwritten_nor_trained_twice_at_once(tiny, tmp_path, request):
    request.addfinalizer(gc.enable)
    gc.disable()                                        # so a run that has ended must have unlocked its folder itself
    run_train(tiny)
    before = [(tmp_path / name).read_bytes() for name in ("ckpt.pt", "log.jsonl")]
    with pytest.raises(UserError, match="ckpt.pt holds a run; add --resume"):
        run_train(tiny)
    held = lock(tmp_path / "log.jsonl", "")
    with pytest.raises(UserError, match="another process is training in"):
        run_train([*tiny, "--resume", "--max_iters=9"])
    held.close()
    assert before == [(tmp_path / name).read_bytes() for name in ("ckpt.pt", "log.jsonl")]
    run_train([*tiny, "--resume"])
    os.remove(tmp_path / "ckpt.pt")
    with pytest.raises(UserError, match="best.pt holds a run; .*move it away, or choose another"):
        run_train(tiny)


# ----------------------------------------------------------------------------------------------
# Files that are written

def test_a_failed_save_leaves_the_checkpoint_before_it(tmp_path, monkeypatch):
    """The limit of a file's size stands for a full disk: torch.save meets it inside its own writer."""
    model, path = make_model("mamba_h"), str(tmp_path / "ckpt.pt")
    save_checkpoint(path, model, step=1)
    (tmp_path / "ckpt.pt.tmp").write_text("half a checkpoint")                 # of a run that was killed
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(UserError, match=r"ckpt.pt cannot be written \(.*File too large\); make room there, or"):
            save_checkpoint(path, model, step=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    def interrupted(file):
        raise KeyboardInterrupt
    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(path, model, step=2)
    assert load_checkpoint(path)["step"] == 1 and os.listdir(tmp_path) == ["ckpt.pt"]


def test_a_written_file_follows_no_planted_link(tmp_path):
    """Neither in place of its temporary file nor in its own place."""
    victim = tmp_path / "victim"
    victim.write_text("kept")
    for name in ("a.tmp", "b"):
        (tmp_path / name).symlink_to(victim)
    for name in ("a", "b"):
        write_file(tmp_path / name, "new")
        assert not (tmp_path / name).is_symlink() and (tmp_path / name).read_text() == "new"
    assert victim.read_text() == "kept" and sorted(os.listdir(tmp_path)) == ["a", "b", "victim"]


# ----------------------------------------------------------------------------------------------
# Files that are read

class Planted:
    """What runs when an object is read from a pickle without care."""
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def turn(content):
    """content with 50 of its bytes inverted."""
    middle = len(content) // 2
    return content[:middle] + bytes(255 - byte for byte in content[middle:middle + 50]) + content[middle + 50:]


@pytest.mark.parametrize("damage", [
    lambda path, content: path.write_bytes(content[:len(content) // 2]),
    lambda path, content: path.write_bytes(turn(content)),
    lambda path, content: path.write_bytes(b""),
    lambda path, content: path.write_bytes(b"not a checkpoint"),
    lambda path, content: torch.save({"a": 1}, path),
    lambda path, content: torch.save({"model": Planted(f"{path}.ran")}, path)],
    ids=["cut", "changed", "empty", "text", "foreign", "code"])
def test_a_damaged_or_foreign_file_is_refused_and_reading_never_runs_code(tmp_path, damage):
    pytest.importorskip("safetensors", reason="needs safetensors, see requirements.txt")
    model = make_model("mamba_h", torch.float32, vocab_size=258)
    save_checkpoint(tmp_path / "ckpt.pt", model, step=1, tokenizer="bytes")
    save_prompt(tmp_path / "prompt", torch.arange(8), model.new_cache(1, 8), "a model")
    export(str(tmp_path / "ckpt.pt"), str(tmp_path))
    for name, read in (("ckpt.pt", load_model), ("model.safetensors", load_model),
                       ("prompt", lambda path: load_prompt(path, model.config, "a model"))):
        read(tmp_path / name)
        damage(tmp_path / name, (tmp_path / name).read_bytes())
        with pytest.raises(UserError, match=name) as raised:
            read(tmp_path / name)
        assert "\n" not in str(raised.value)
    assert not list(tmp_path.glob("*.ran"))


def change_checkpoint(folder, target, edit):
    record = torch.load(f"{folder}/ckpt.pt")
    edit(record)
    torch.save(record, target / "ckpt.pt")


@pytest.mark.parametrize("edit, message", [
    (lambda r: r["model"]["head.weight"].fill_(float("nan")), "weights that are not finite"),
    (lambda r: r.update(format="nanobdlm-2"), "has the format nanobdlm-2, which this revision does not read"),
    (lambda r: r["config"].update(rope_theta=float("nan")), "rope_theta must be above 0 and finite, but is nan"),
    (lambda r: r.pop("optimizer"), "has no optimizer: it is no whole checkpoint"),
    (lambda r: (r["config"].update(vocab_size=9), r.update(tokenizer="x")), "was trained with tokenizer=x; add"),
    (lambda r: r.update(text="0" * 64), "holds another text than when .* was saved; prepare the former again, or")])
def test_a_checkpoint_of_another_kind_is_not_resumed(trained, tiny, tmp_path, edit, message):
    change_checkpoint(trained, tmp_path, edit)
    before = (tmp_path / "ckpt.pt").read_bytes()
    with pytest.raises(UserError, match=message):
        run_train([*tiny, "--resume"])
    assert (tmp_path / "ckpt.pt").read_bytes() == before


def test_checkpoints_of_earlier_revisions_are_resumed_and_the_same_text_may_have_moved(
        corpus, trained, tiny, tmp_path, capsys):
    change_checkpoint(trained, tmp_path, lambda r: (
        r.update(losses=[3.0], skipped=1, versions={}), r["settings"].update(eval_only=False)))
    shutil.copytree(corpus, tmp_path / "moved")
    argv = [*tiny, *EIGHT_STEPS, f"--data={tmp_path}/moved", "--resume"]
    run_train(argv)
    assert "resuming with another" not in capsys.readouterr().out
    change_checkpoint(tmp_path, tmp_path, lambda r: r.pop("text"))
    run_train([*argv, "--max_iters=9", "--seed=2"])
    assert "resuming with another data, max_iters, seed; the result" in capsys.readouterr().out
    assert state_of(tmp_path)["step"] == 9


CLOSED = """
import os, torch
from parallel import Parallel
parallel = Parallel("cpu")
parallel.meet(0, 60)                            # a group of this process alone
parallel.world = 2                              # so that it communicates as in a larger one
torch.optim.AdamW([torch.zeros(1)])             # imports modules that keep the process group, if they are not there yet
parallel.sum([1.0])
parallel.close()
threads = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
raise SystemExit(any("gloo" in name for name in threads))
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="reads the threads of a process from Linux's /proc")
def test_no_thread_of_the_process_group_is_left_at_the_exit():
    """Such a thread may need the interpreter while that shuts down, which aborts the process. This one is new: in a
    fork, see `Child`, all modules have been imported already."""
    group = dict(os.environ, WORLD_SIZE="1", RANK="0", MASTER_ADDR="localhost", MASTER_PORT=str(free_port()))
    assert subprocess.run([sys.executable, "-c", CLOSED], cwd=ROOT, env=group).returncode == 0
