"""Nothing is lost and nothing is silently wrong: interrupts, full disks, planted links, damaged files."""
import itertools
import os
import resource
import shutil
import signal
import time

import numpy as np
import pytest
import torch

from checkpoint import load_checkpoint, load_model, load_prompt, save_checkpoint, save_prompt
from configurator import UserError, write_file
from conftest import EIGHT_STEPS, NOISE, free_port, make_model, run_train, script, start_ranks, state_of
from parallel import Parallel, ShardedAdamW
from tools.export import export
from tools.loss import read_log


# ----------------------------------------------------------------------------------------------
# Runs

def losses_of(folder, *keys):
    return [[row.get(key) for key in ("step", *keys)] for row in read_log(f"{folder}/log.jsonl")
            if {*keys} & row.keys()]


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("called, count, number", [
    ("nelbo_sums", 1, signal.SIGTERM), ("nelbo_sums", 2, signal.SIGUSR1), ("learning_rate_at", 1, signal.SIGINT),
    ("learning_rate_at", 4, signal.SIGHUP), ("learning_rate_at", 5, signal.SIGUSR2)])
def test_a_run_that_was_interrupted_ends_as_one_that_was_not(tiny, trained, tmp_path, called, count, number):
    """The signal comes in the count-th call of a function: in the first validation; in the last one; in the first step;
    in a step before a validation, which is then left to the resumed run; in one after. A batch system sends SIGUSR1 or
    SIGUSR2 before the end of the time. A terminal that is closed sends SIGHUP, and then stdout cannot be written."""
    def unwritable(*words, **how):
        raise OSError

    def patch(module):
        real, calls = getattr(module, called), itertools.count(1)

        def interrupted(*args, **kwargs):
            if next(calls) == count:
                os.kill(os.getpid(), number)
                module.print = unwritable if number == signal.SIGHUP else print
            return real(*args, **kwargs)
        setattr(module, called, interrupted)
    with pytest.raises(SystemExit, match=str(128 + number)):
        run_train([*tiny, *EIGHT_STEPS], patch)
    for _ in range(2):                                  # the second time it has finished
        run_train(["--resume", f"--out_dir={tmp_path}"])
        torch.testing.assert_close(state_of(tmp_path), state_of(trained), rtol=0, atol=0)
        assert losses_of(tmp_path, "val_loss") == losses_of(trained, "val_loss")


def test_two_ranks_that_accumulate_are_interrupted_and_end_as_two_that_were_not(tiny, tmp_path):
    argv = [*tiny, *NOISE, "--micro_batch_size=1", "--max_iters=40", "--eval_interval=8", "--short_iters=20"]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    ranks = start_ranks(tmp_path, 2, "train.py", *argv, f"--out_dir={stopped}")
    wait_for(lambda: (stopped / "log.jsonl").exists() and len(read_log(stopped / "log.jsonl")) > 5)
    assert ranks[1].end(signal.SIGTERM)[0] == 128 + signal.SIGTERM and ranks[0].end()[0] == 0
    assert state_of(stopped)["step"] < 40
    for words in ([*argv, f"--out_dir={whole}"], ["--resume", f"--out_dir={stopped}"]):
        assert [rank.end()[0] for rank in start_ranks(tmp_path, 2, "train.py", *words)] == [0, 0]
    torch.testing.assert_close(state_of(stopped), state_of(whole), rtol=0, atol=0)
    logged = "loss", "grad_norm", "lr", "val_loss"
    assert losses_of(stopped, *logged) == losses_of(whole, *logged)


@pytest.mark.parametrize("last", ["--learning_rate=2e-2", "--d_model=16", "--data=moved"])
def test_processes_with_other_settings_or_another_text_do_not_train_together(tiny, tmp_path, last):
    shutil.copytree(dict(arg.split("=") for arg in tiny if "=" in arg)["--data"], tmp_path / "moved")
    last = last.replace("moved", f"{tmp_path}/moved")
    for rank in start_ranks(tmp_path, 2, "train.py", *tiny, last=[last]):
        status, _, error = rank.end()
        assert status == 1 and "the processes differ in settings, text or checkpoint" in error, error


def test_steps_that_are_not_finite_change_nothing_and_three_in_a_row_stop_a_run(tiny, tmp_path, capsys, monkeypatch):
    reduce, steps = ShardedAdamW.reduce_gradients, itertools.count(1)
    monkeypatch.setattr(ShardedAdamW, "reduce_gradients", lambda optimizer: (
        reduce(optimizer) * (float("nan") if next(steps) in {2, 4, 5, 6} else 1)))
    with pytest.raises(UserError, match="three steps in a row .*; lower learning_rate, and --resume if .*ckpt.pt exists"):
        run_train([*tiny, "--max_iters=9"])             # saves at steps 2 and 4
    assert capsys.readouterr().out.count("step skipped") == 3
    record = state_of(tmp_path)
    assert record["step"] == 4 and record["optimizer"]["step"] == 2             # after steps 1 and 3
    assert [step for step, _ in losses_of(tmp_path, "loss")] == [1, 3]


def test_weights_that_are_not_finite_are_never_saved(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(ShardedAdamW, "step", lambda optimizer, lr, scale: optimizer.flats[0]["flat"].fill_(torch.inf))
    with pytest.raises(UserError, match="a weight is not finite; lower learning_rate"):
        run_train([*tiny, "--max_iters=1", "--warmup_iters=0"])
    assert not (tmp_path / "ckpt.pt").exists()


def test_a_validation_that_is_not_finite_ends_the_run(tiny, tmp_path):
    def patch(module):
        module.nelbo_sums = lambda model, x, *rest, **more: np.full((len(x), 2, 3), np.nan)
    with pytest.raises(UserError, match="not finite: training failed; use an earlier checkpoint, or train again"):
        run_train([*tiny, "--max_iters=1", "--warmup_iters=0"], patch)
    assert not (tmp_path / "best.pt").exists()


def test_processes_that_do_not_find_each_other_end_in_a_sentence(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="RANK expected, but not set.; start all of them with torchrun"):
        Parallel("cpu")
    for name, value in dict(RANK="0", MASTER_ADDR="localhost", MASTER_PORT=str(free_port())).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="do not meet at localhost:.* .*1/2 clients joined.*start all of them with"):
        Parallel("cpu", timeout=1)


def test_a_lost_process_ends_the_others_with_a_sentence(tiny, tmp_path):
    path = tmp_path / "ckpt.pt"
    first, second = start_ranks(tmp_path, 2, "train.py", *tiny, "--max_iters=100000", "--dist_timeout=20")
    wait_for(path.exists)
    second.end(signal.SIGKILL)
    status, _, message = first.end()
    assert status == 1 and "another process of this run is gone or silent" in message and "--resume" in message
    assert load_checkpoint(path)["step"] >= 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
def test_a_full_disk_ends_a_run_in_a_sentence_and_keeps_its_checkpoint(trained, tmp_path):
    out = shutil.copytree(trained, tmp_path / "out")
    (out / "log.jsonl").unlink()
    (out / "log.jsonl").symlink_to("/dev/full")
    status, _, error = script("train.py", "--resume", f"--out_dir={out}", "--max_iters=9")
    assert status == 1 and "No space left on device; make room" in error.splitlines()[-1] and "Traceback" not in error
    torch.testing.assert_close(state_of(out), state_of(trained), rtol=0, atol=0)


def test_the_picture_of_a_log_takes_the_last_line_of_a_step_and_skips_one_that_was_cut_off(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1, "loss": 3}\n{"step": 2, "lo{"step": 2, "val_loss": 5}\n{"step": 2, "val_loss": 4}\n'
                    '{"step": 1, "loss": 2}\n{"step": 2')
    assert read_log(path) == [{"step": 1, "loss": 2}, {"step": 2, "val_loss": 4}]
    assert script("tools/loss.py", tmp_path)[0] == 0 and (tmp_path / "loss.png").stat().st_size > 0


def test_a_run_is_not_overwritten(tiny, tmp_path):
    run_train(tiny)
    for name, message in (("ckpt.pt", "add --resume to continue it, move"), ("best.pt", "move it"),
                          ("log.jsonl", "move it away, or choose another --out_dir")):
        before = (tmp_path / name).read_bytes()
        with pytest.raises(UserError, match=f" holds a run; {message}"):
            run_train(tiny)
        assert (tmp_path / name).read_bytes() == before
        (tmp_path / name).unlink()
    run_train(tiny)


# ----------------------------------------------------------------------------------------------
# Files that are written

def test_a_failed_save_leaves_the_checkpoint_before_it(tmp_path):
    """The limit of a file's size stands for a full disk: torch.save meets it inside its own writer."""
    model, path = make_model("mamba_h"), str(tmp_path / "ckpt.pt")
    save_checkpoint(path, model, step=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(UserError, match=r"ckpt.pt cannot be written \(.*File too large\); make room there, or"):
            save_checkpoint(path, model, step=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert load_checkpoint(path)["step"] == 1 and os.listdir(tmp_path) == ["ckpt.pt"]


def test_of_two_writers_the_last_one_counts_and_a_link_is_not_followed(tmp_path):
    (tmp_path / "victim").write_text("kept")
    (tmp_path / "a").symlink_to(tmp_path / "victim")

    def write(file):
        file.write(b"half of the first")
        write_file(tmp_path / "a", "second")            # while the first one writes
        assert (tmp_path / "a").read_text() == "second" and not (tmp_path / "a").is_symlink()
        file.write(b" and its end")
    write_file(tmp_path / "a", write)
    assert (tmp_path / "a").read_text() == "half of the first and its end"
    assert (tmp_path / "victim").read_text() == "kept" and sorted(os.listdir(tmp_path)) == ["a", "victim"]


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
    lambda path, content: torch.save({"a": 1}, path),
    lambda path, content: torch.save({"model": Planted(f"{path}.ran")}, path)],
    ids=["cut", "changed", "foreign", "code"])
def test_a_damaged_or_foreign_file_is_refused_and_reading_never_runs_code(tmp_path, damage):
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


def test_a_checkpoint_of_another_kind_is_not_resumed(trained, tmp_path):
    path = tmp_path / "ckpt.pt"
    for edit, message in ((lambda r: r["model"]["head.weight"].fill_(torch.nan), "weights that are not finite"),
                          (lambda r: r.pop("optimizer"), "has no optimizer: it is no whole checkpoint"),
                          (lambda r: r.update(tokenizer="syllables"), "reads syllables tokens, but .* holds others")):
        edit(record := torch.load(f"{trained}/ckpt.pt"))
        torch.save(record, path)
        with pytest.raises(UserError, match=message):
            run_train(["--resume", f"--out_dir={tmp_path}"])
