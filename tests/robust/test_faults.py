"""Nothing is lost and nothing is silently wrong: interrupts, full disks, planted links, damaged files."""
import fcntl
import gc
import itertools
import json
import os
import re
import runpy
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from checkpoint import load_checkpoint, save_checkpoint
from configurator import UserError
from conftest import (EIGHT_STEPS, ROOT, TINY, Child, free_port, make_model, read_log, run_train, script,
                      signals_put_back, start_ranks)
from data import TokenData
from files import misfit, write_file
from parallel import ShardedAdamW
from train import Log

TIMES = {"ms", "tok_per_s", "memory"}
needs_dev_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")


def log_of(folder):
    """The log but for its times, as text."""
    return "\n".join(json.dumps({k: v for k, v in row.items() if k not in TIMES}) for row in read_log(folder))


# ----------------------------------------------------------------------------------------------
# Runs

@pytest.mark.parametrize("called, count, times", [
    ("nelbo_sums", 1, 3), ("nelbo_sums", 2, 1), ("learning_rate_at", 4, 1), ("learning_rate_at", 5, 1)])
def test_a_run_that_was_interrupted_logs_the_bytes_of_one_that_was_not(corpus, trained, tmp_path, called, count, times):
    """All but the times. The signal comes in the count-th call of a function: in the first validation of a run and of
    two resumes; in the last validation; in a step before one, which is then left to the resumed run; in one after."""
    argv = EIGHT_STEPS + [f"--data={corpus}", f"--out_dir={tmp_path}"]

    def patch(module):
        real, calls = getattr(module, called), itertools.count(1)

        def interrupted(*args, **kwargs):
            if next(calls) == count:
                os.kill(os.getpid(), signal.SIGTERM)
            return real(*args, **kwargs)
        setattr(module, called, interrupted)
    for more in [[], ["--resume"], ["--resume"]][:times]:
        with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
            run_train(argv + more, patch=patch)
    for _ in range(2):                                  # the second time it has finished, and logs nothing twice
        run_train(argv + ["--resume"])
        assert log_of(tmp_path) == log_of(trained)


def poison(steps):
    """Makes the gradients of these steps, which count from 1, not finite."""
    def patch(module):
        class Poisoned(ShardedAdamW):
            count = 0

            def reduce_gradients(self):
                self.count += 1
                return super().reduce_gradients() * (float("nan") if self.count in steps else 1)
        module.ShardedAdamW = Poisoned
    return patch


def test_steps_that_are_not_finite_are_skipped_stop_a_run_and_replace_no_good_checkpoint(corpus, tmp_path, capsys):
    argv = TINY + [f"--data={corpus}"]
    run_train(argv + [f"--out_dir={tmp_path}/skipped"], patch=poison({2, 3}))
    printed = capsys.readouterr().out                   # TINY saves at steps 2 and 4
    assert printed.count("step skipped") == 2 and "step 2 is not saved" in printed and "step 4 is" not in printed
    log = (tmp_path / "skipped" / "log.jsonl").read_text()
    assert '"grad_norm": null' in log and "NaN" not in log
    for name, steps, more, message in (
            ("middle", {3, 4, 5}, ["--max_iters=9"], "three steps in a row"),
            ("last", {3, 4}, [], "not finite; lower learning_rate; .*is the last good checkpoint")):
        with pytest.raises(UserError, match=message):
            run_train(argv + [f"--out_dir={tmp_path}/{name}", *more], patch=poison(steps))
        record = load_checkpoint(f"{tmp_path}/{name}/ckpt.pt")
        assert record["step"] == 2 and record["skipped"] == 0
        assert all(p.isfinite().all() for p in record["model"].values())


def test_a_checkpoint_that_cannot_be_written_ends_a_run_only_if_it_is_the_last(corpus, tmp_path, capsys):
    def full(steps):
        def patch(module):
            save = module.save_checkpoint

            def saves_or_not(path, model, step, **extra):
                if step in steps:
                    raise UserError("ckpt.pt cannot be written (No space left on device); make room")
                save(path, model, step=step, **extra)
            module.save_checkpoint = saves_or_not
        return patch
    argv = [*TINY, f"--data={corpus}"]
    run_train([*argv, f"--out_dir={tmp_path}/one"], full({2}))
    assert "step 2 is not saved: ckpt.pt cannot be written (No space left on device); there is no checkpoint yet" in \
        capsys.readouterr().out
    assert load_checkpoint(f"{tmp_path}/one/ckpt.pt")["step"] == 4
    with pytest.raises(UserError, match="No space left"):
        run_train([*argv, f"--out_dir={tmp_path}/two"], full({4}))
    assert load_checkpoint(f"{tmp_path}/two/ckpt.pt")["step"] == 2


def test_weights_that_are_not_finite_are_never_saved(corpus, tmp_path):
    def patch(module):
        class Poisoned(ShardedAdamW):
            def step(self, lr, scale):
                super().step(lr, scale)
                self.flats[0]["flat"][0] = float("inf")
        module.ShardedAdamW = Poisoned
    with pytest.raises(UserError, match="there is no checkpoint yet"):
        run_train([*TINY, f"--data={corpus}", f"--out_dir={tmp_path}", "--max_iters=1", "--warmup_iters=0"], patch)
    assert not (tmp_path / "ckpt.pt").exists()


def test_lines_after_the_checkpoint_are_dropped_or_the_log_stays_as_it_was(tmp_path, monkeypatch):
    def full(*paths):
        raise OSError(28, "No space left on device")
    whole, path = "".join(json.dumps(dict(step=i, loss=1.0)) + "\n" for i in range(1, 9)), tmp_path / "log.jsonl"
    path.write_text(whole)
    (tmp_path / "ckpt.pt.0a1b2c3d.tmp").write_text("half a checkpoint")        # of a run that was killed
    with monkeypatch.context() as patch:
        patch.setattr("files.os.replace", full)
        with pytest.raises(UserError, match="make room"):
            Log(str(path), 5, True)
    assert path.read_text() == whole and os.listdir(tmp_path) == ["log.jsonl"]
    Log(str(path), 5, True).write(dict(step=6))
    assert [row["step"] for row in read_log(tmp_path)] == [1, 2, 3, 4, 5, 6]


@needs_dev_full
def test_a_full_stdout_ends_sampling_in_a_sentence(trained):
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, f"{ROOT}/sample.py", f"--out_dir={trained}", "--length=9"], stdout=full,
                              stderr=subprocess.PIPE, text=True, timeout=100)
    assert done.returncode == 1 and not re.search("Traceback|ignored", done.stderr)
    assert done.stderr.splitlines()[-1].startswith("sample.py: an output: No space left on device")


def test_a_run_whose_terminal_closes_saves_and_says_how_to_go_on(corpus, tmp_path):
    process = Child(tmp_path, "train.py", *TINY, f"--data={corpus}", f"--out_dir={tmp_path}/out", "--max_iters=100000",
                    "--eval_interval=100000")
    process.wait_for("loss")
    status, printed, _ = process.end(signal.SIGHUP)
    assert status == 128 + signal.SIGHUP and "continue with the same command and --resume" in printed
    assert load_checkpoint(tmp_path / "out" / "ckpt.pt")["step"] == read_log(tmp_path / "out")[-1]["step"] >= 1


def test_a_lost_process_ends_the_others_with_a_sentence(corpus, tmp_path):
    path = tmp_path / "out" / "ckpt.pt"
    first, second = start_ranks(tmp_path, 2, "train.py", *TINY, f"--data={corpus}", f"--out_dir={path.parent}",
                                "--max_iters=100000", "--dist_timeout=20")
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    second.end(signal.SIGKILL)
    status, _, message = first.end()
    assert status == 1 and "another process of this run is gone or silent" in message and "--resume" in message
    assert load_checkpoint(path)["step"] >= 2


def test_eval_only_prints_the_validation_and_writes_nothing(corpus, trained, tmp_path, capsys):
    before, none = {path: path.stat().st_mtime_ns for path in Path(trained).iterdir()}, tmp_path / "none"
    for argv, loss in (([f"--out_dir={trained}", "--resume"], f"{read_log(trained)[-1]['val_loss']:.4f} nats"),
                       ([f"--out_dir={none}", f"--init_from={trained}"], "")):
        run_train([*TINY, f"--data={corpus}", *argv, "--eval_only"])
        assert f"validation {loss}" in capsys.readouterr().out.splitlines()[-1]
    assert before == {path: path.stat().st_mtime_ns for path in Path(trained).iterdir()} and not none.exists()


def test_what_the_last_lines_need_is_missed_before_the_first_step(corpus, tmp_path, monkeypatch):
    """The bytes of GPT-2 tokens need GPT-2's files, which a machine without a network may lack."""
    def missing(*_):
        raise UserError("GPT-2's BPE files cannot be downloaded")
    monkeypatch.setattr(TokenData, "sequence_bytes", missing)
    with pytest.raises(UserError, match="BPE"):
        run_train([*TINY, f"--data={corpus}", f"--out_dir={tmp_path / 'out'}"])
    assert not (tmp_path / "out").exists()


def test_when_nobody_reads_on_training_saves_and_ends(corpus, tmp_path):
    """As in `python train.py | head -3`."""
    pipe, out = str(tmp_path / "pipe"), str(tmp_path / "out")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)                       # does not wait for a writer
    argv = [*TINY, f"--data={corpus}", f"--out_dir={out}", "--max_iters=100000"]
    child = Child(tmp_path, "train.py", *argv, stdout=pipe)
    assert select.select([reader], [], [], 60)[0], "it prints nothing"
    os.close(reader)
    child.process.join(60)
    assert child.process.exitcode == 128 + signal.SIGPIPE and Path(child.paths[1]).read_text() == ""
    assert load_checkpoint(f"{out}/ckpt.pt")["step"] == read_log(out)[-1]["step"] > 0


@pytest.mark.parametrize("stdout", [None, pytest.param("/dev/full", marks=needs_dev_full)])
def test_a_closed_or_full_stdout_ends_no_training(corpus, tmp_path, monkeypatch, stdout):
    """sys.stdout is None in a process whose stdout was closed before it started."""
    monkeypatch.setattr(sys, "argv", ["train.py", *TINY, f"--data={corpus}", f"--out_dir={tmp_path}"])
    monkeypatch.setattr(sys, "stdout", stdout and open(stdout, "w"))
    with signals_put_back():
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    assert load_checkpoint(f"{tmp_path}/ckpt.pt")["step"] == 4


def test_sigterm_ends_sampling_without_a_traceback(trained, tmp_path):
    process = Child(tmp_path, "sample.py", f"--out_dir={trained}", "--length=100000", "--prompt=begin")
    process.wait_for("begin")
    status, out, error = process.end(signal.SIGTERM)
    assert status == 143 and out.startswith("begin") and out.endswith("\n") and "Traceback" not in error


def test_a_run_ends_well_without_matplotlib(corpus, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, printed, error = script("train.py", *TINY, f"--data={corpus}", f"--out_dir={tmp_path}/out")
    assert status == 0, error
    assert "loss.png, which needs matplotlib: pip install matplotlib" in printed


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="needs /proc")
@pytest.mark.parametrize("data_too, advice", [(False, "add --data=FOLDER"), (True, "choose another --out_dir")])
def test_where_nothing_can_be_written_the_error_names_the_flag(corpus, monkeypatch, data_too, advice):
    """/proc takes no new files, not even from root."""
    monkeypatch.chdir("/proc")
    status, _, error = script("train.py", *TINY, *[f"--data={corpus}"] * data_too)
    assert status == 1 and "cannot be written" in error and error.endswith(advice)


def test_speed_and_eta_count_neither_the_first_step_nor_validations(corpus, tmp_path, capsys):
    """On a clock on which the first step takes 1,000 s, every other 10 s and a validation 100 s."""
    def patch(module):
        now, rate, real = [0], module.learning_rate_at, module.nelbo_sums

        def step(i, *rest):
            now[0] += 10 if i else 1000
            return rate(i, *rest)

        def validation(*args, **kwargs):
            now[0] += 100
            return real(*args, **kwargs)
        module.time = SimpleNamespace(time=lambda: now[0])
        module.learning_rate_at, module.nelbo_sums = step, validation
    run_train([*TINY, f"--data={corpus}", f"--out_dir={tmp_path}", "--max_iters=12", "--log_interval=3",
               "--eval_interval=6"], patch=patch)
    assert {r["ms"] for r in read_log(tmp_path) if "ms" in r} == {10_000}
    assert re.findall(r"ETA (.*)\n", capsys.readouterr().out) == ["01:30", "01:00", "00:30", "00:00"]


def test_a_line_of_the_log_that_was_cut_off_is_dropped(corpus, tmp_path):
    argv = TINY + [f"--data={corpus}", f"--out_dir={tmp_path}", "--log_interval=3"]
    run_train(argv + ["--max_iters=5"])
    before = read_log(tmp_path)
    with open(tmp_path / "log.jsonl", "a") as f:
        f.write('[1]\n{"step": 5, "lo')                 # a line of another form, and one that was cut off
    run_train(argv + ["--max_iters=6", "--resume"])
    assert read_log(tmp_path)[:len(before)] == before and read_log(tmp_path)[-1]["step"] == 6


def test_a_run_is_neither_overwritten_nor_trained_twice_at_once(corpus, tmp_path, capsys, request):
    request.addfinalizer(gc.enable)
    gc.disable()                                        # so only a close can unlock the log
    out = str(tmp_path / "out")
    argv = TINY + [f"--data={corpus}", f"--out_dir={out}"]
    run_train(argv)
    before = [open(f"{out}/{name}", "rb").read() for name in ("ckpt.pt", "log.jsonl")]
    with pytest.raises(UserError, match="ckpt.pt holds a run; add --resume"):
        run_train(argv)
    with open(f"{out}/log.jsonl") as held:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(UserError, match="another process is training in"):
            run_train(argv + ["--resume", "--max_iters=9"])
    assert before == [open(f"{out}/{name}", "rb").read() for name in ("ckpt.pt", "log.jsonl")]
    log = read_log(out)
    run_train(argv + ["--resume"])
    assert read_log(out) == log
    assert "ckpt.pt is at step 4 of 4 already; raise --max_iters" in capsys.readouterr().out
    os.remove(f"{out}/ckpt.pt")
    with pytest.raises(UserError, match="log.jsonl holds a run; move it away, or choose another --out_dir"):
        run_train(argv)
    assert read_log(out) == log


def test_a_failed_save_leaves_the_checkpoint_before_it(tmp_path, monkeypatch):
    model, path = make_model("mamba_h"), str(tmp_path / "ckpt.pt")
    save_checkpoint(path, model, step=1)

    def half_written(record, f):
        f.write(b"half a checkpoint")
        raise failure
    monkeypatch.setattr(torch, "save", half_written)
    for failure in (OSError(28, "No space left on device"), KeyboardInterrupt()):
        with pytest.raises((UserError, KeyboardInterrupt)):
            save_checkpoint(path, model, step=2)
        assert load_checkpoint(path)["step"] == 1 and os.listdir(tmp_path) == ["ckpt.pt"]


@needs_dev_full
def test_a_disk_that_is_full_inside_torch_save_is_called_full(tmp_path, monkeypatch):
    monkeypatch.setattr("files.open", lambda *_: open("/dev/full", "wb"), raising=False)
    with pytest.raises(UserError, match=r"cannot be written \(No space left on device\); make room and try again, or"):
        save_checkpoint(str(tmp_path / "ckpt.pt"), make_model("mamba_h"), step=1)


@needs_dev_full
def test_a_line_of_the_log_that_cannot_be_written_does_not_end_training(tmp_path, capsys):
    log = Log(str(tmp_path / "log.jsonl"), 0, True)
    log.write(dict(step=1))
    log.files.append(open("/dev/full", "w"))
    log.write(dict(step=2))
    assert "a line of" in capsys.readouterr().err and (tmp_path / "log.jsonl").read_text() == '{"step": 1}\n'


# ----------------------------------------------------------------------------------------------
# Files that are written

@pytest.mark.parametrize("name, argv, message", [
    ("sample.py", ["--prompt_file={tmp}/book", "--save_cache={tmp}/book"], "is read as well"),
    ("sample.py", ["--out_dir={tmp}", "--save_cache={tmp}/ckpt.pt"], "holds something else"),
    ("sample.py", ["--out_dir={tmp}", "--save_cache={tmp}/link"], "holds something else"),
    ("eval.py", ["--checkpoint={tmp}", "--out={tmp}/ckpt.pt"], "holds something else"),
    ("eval.py", ["--checkpoint={tmp}", "--out={tmp}/book"], "holds something else"),
    ("eval.py", ["--checkpoint={tmp}", "--out=/dev/null"], "cannot be written")])
def test_an_output_that_is_an_input_or_of_another_kind_is_refused(trained, tmp_path, name, argv, message):
    (tmp_path / "ckpt.pt").write_bytes(Path(trained, "ckpt.pt").read_bytes())
    (tmp_path / "book").write_text("a book")
    (tmp_path / "link").symlink_to("ckpt.pt")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    status, _, error = script(name, *(word.format(tmp=tmp_path) for word in argv), "--device=cpu")
    assert status == 1 and message in error and "name another file" in error
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_an_output_of_its_own_kind_is_replaced(trained, tmp_path):
    for _ in range(2):
        assert script("eval.py", f"--checkpoint={trained}", f"--out={tmp_path}/e.json", "--sequences=1",
                      "--device=cpu")[0] == 0
        assert script("sample.py", f"--out_dir={trained}", f"--save_cache={tmp_path}/c", "--prompt=abcdefghijkl",
                      "--length=1", "--device=cpu")[0] == 0
    assert sorted(os.listdir(tmp_path)) == ["c", "e.json"]


def test_a_written_file_follows_no_planted_link(tmp_path, monkeypatch):
    """Neither in place of its temporary file nor in its own place."""
    victim = tmp_path / "victim"
    victim.write_text("kept")
    for name in ("a.guessed.tmp", "b"):
        (tmp_path / name).symlink_to(victim)
    write_file(str(tmp_path / "b"), "new")
    assert not (tmp_path / "b").is_symlink() and (tmp_path / "b").read_text() == "new"
    monkeypatch.setattr("files.secrets.token_hex", lambda n: "guessed")
    with pytest.raises(UserError, match="cannot be written .File exists"):
        write_file(str(tmp_path / "a"), "new")
    assert victim.read_text() == "kept" and not (tmp_path / "a").exists()


# ----------------------------------------------------------------------------------------------
# Files that are read

def test_the_form_of_a_record_is_checked_in_every_part():
    form = {"a": int, "?b": [range(3)], "c": ({"d": str}, type(None)), "*": float}
    right = dict(a=1, b=[0, 2], c=dict(d="x"), e=1.5)
    assert misfit(right, form) == "" and misfit(dict(a=1, c=None), form) == ""
    for change, why in ((dict(a="1"), "record.a is '1'"), (dict(b=[0, 3]), "record.b[1] is 3"),
                        (dict(e=1), "record.e is 1"), (dict(b=[True]), "record.b[0] is True"),
                        (dict(c=dict(d=1)), "record.c.d is 1")):
        assert misfit({**right, **change}, form) == why
    assert misfit(dict(a=1), form) == "record has no c" and misfit([1], form) == "record is [1]"


def change_checkpoint(folder, target, edit):
    record = torch.load(f"{folder}/ckpt.pt")
    edit(record)
    torch.save(record, target / "ckpt.pt")


def test_a_damaged_or_foreign_checkpoint_is_refused_and_reading_never_runs_code(trained, tmp_path):
    class Planted:
        def __reduce__(self):                           # what a pickle would run when it is read
            return os.mkdir, (str(tmp_path / "ran"),)
    whole = Path(trained, "ckpt.pt").read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes(255 - b for b in whole[middle:middle + 50]) + whole[middle + 50:]
    for content in (whole[:middle], flipped, b"", b"not a checkpoint", {"a": 1}, {"model": Planted()}):
        if isinstance(content, bytes):
            (tmp_path / "ckpt.pt").write_bytes(content)
        else:
            torch.save(content, tmp_path / "ckpt.pt")
        with pytest.raises(UserError, match="not a whole nanoBDLM checkpoint"):
            load_checkpoint(tmp_path / "ckpt.pt")
    assert os.listdir(tmp_path) == ["ckpt.pt"]


@pytest.mark.parametrize("edit, message", [
    (lambda r: r.update(config=[]), "record.config is"), (lambda r: r.update(model=3), "record.model is 3"),
    (lambda r: r["model"]["head.weight"].fill_(float("nan")), "weights that are not finite"),
    (lambda r: r["config"].update(new=1), "record.config is"),
    (lambda r: r.pop("optimizer"), "record has no optimizer"),
    (lambda r: r.update(optimizer={}), "record.optimizer has no step"),
    (lambda r: r.update(step=-1), "record.step is -1"),
    (lambda r: r.update(losses="none"), "record.losses is 'none'"),
    (lambda r: r.update(text="0" * 64), "another training text than when .* was saved; prepare the former again, or")])
def test_a_checkpoint_of_another_form_is_not_resumed(corpus, trained, tmp_path, edit, message):
    change_checkpoint(trained, tmp_path, edit)
    with pytest.raises(UserError, match=message):
        run_train(TINY + [f"--data={corpus}", f"--out_dir={tmp_path}", "--resume"])


def test_checkpoints_of_earlier_versions_are_resumed(corpus, trained, tmp_path):
    change_checkpoint(trained, tmp_path, lambda r: [r.pop(key) for key in ("losses", "skipped", "text")])
    run_train(TINY + [f"--data={corpus}", f"--out_dir={tmp_path}", "--resume", "--max_iters=9"])
    assert load_checkpoint(str(tmp_path / "ckpt.pt"))["step"] == 9


@pytest.mark.parametrize("tokenizer", [None, "gpt2", "gpt3", 5])
def test_a_checkpoint_without_its_tokenizer_is_refused(trained, tmp_path, tokenizer):
    change_checkpoint(trained, tmp_path, lambda r: r.update(tokenizer=tokenizer) if tokenizer else r.pop("tokenizer"))
    for name in ("sample.py", "eval.py"):
        status, _, error = script(name, f"--checkpoint={tmp_path}", "--device=cpu")
        assert status == 1 and ("token ids, not those of its tokenizer" in error or "record.tokenizer is 5" in error)


CLOSED = """
import os, sys
sys.path.insert(0, sys.argv[1])
import torch
from parallel import Parallel
parallel = Parallel("cpu", 60)
torch.optim.AdamW([torch.zeros(1)])             # imports modules that keep the process group, if they are not there yet
parallel.sum([1.0])
parallel.close()
threads = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
sys.exit(any("gloo" in name for name in threads))
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="reads the threads of a process from Linux's /proc")
def test_no_thread_of_the_process_group_is_left_at_the_exit(tmp_path):
    """Such a thread may need the interpreter while that shuts down, which aborts the process. The two processes are new
    ones: in a fork of this one, all modules have been imported already."""
    (tmp_path / "closed.py").write_text(CLOSED)
    shared = dict(os.environ, WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=str(free_port()))
    ranks = [subprocess.Popen([sys.executable, tmp_path / "closed.py", ROOT], env=dict(shared, RANK=rank))
             for rank in "01"]
    assert [rank.wait(60) for rank in ranks] == [0, 0]
