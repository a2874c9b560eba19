"""Nothing is lost and nothing is silently wrong: interrupts, full disks, planted links, damaged files."""
import gc
import itertools
import os
import re
import resource
import select
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from checkpoint import load_checkpoint, load_model, load_prompt, lock, save_checkpoint, save_prompt
from configurator import UserError
from conftest import EIGHT_STEPS, TINY, Child, free_port, make_model, run_train, start_ranks
from parallel import Parallel, ShardedAdamW
from tools.export import export
from tools.loss import read_log


def rows_of(folder):
    return read_log(os.path.join(folder, "log.jsonl"))


def state_of(folder):
    return {key: load_checkpoint(f"{folder}/ckpt.pt")[key] for key in ("step", "model", "optimizer")}


# ----------------------------------------------------------------------------------------------
# Runs

@pytest.mark.parametrize("called, count, times, number", [
    ("nelbo_sums", 1, 3, signal.SIGTERM), ("nelbo_sums", 2, 1, signal.SIGHUP),
    ("learning_rate_at", 4, 1, signal.SIGUSR1), ("learning_rate_at", 5, 1, signal.SIGUSR2)])
def test_a_run_that_was_interrupted_ends_as_one_that_was_not(corpus, trained, tmp_path, capsys, called, count, times,
                                                             number):
    """With the same weights, moments and validations. The signal comes in the count-th call of a function: in the first
    validation of a run and of two resumes; in the last validation; in a step before one, which is then left to the
    resumed run; in one after. A closed terminal sends SIGHUP, a batch system SIGUSR1 or SIGUSR2 before the end of the
    time."""
    argv = EIGHT_STEPS + [f"--data={corpus}", f"--out_dir={tmp_path}"]

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
        validations = [[(row["step"], row["val_loss"]) for row in rows_of(folder) if "val_loss" in row]
                       for folder in (tmp_path, trained)]
        assert validations[0] == validations[1]


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


def test_steps_that_are_not_finite_change_nothing_and_three_in_a_row_stop_a_run(corpus, tmp_path, capsys):
    argv = TINY + [f"--data={corpus}", f"--out_dir={tmp_path}"]
    with pytest.raises(UserError, match="three steps in a row .*is the last good checkpoint, continue with"):
        run_train([*argv, "--max_iters=9"], patch=poison({2, 4, 5, 6}))         # TINY saves at steps 2 and 4
    assert capsys.readouterr().out.count("step skipped") == 4
    record = load_checkpoint(f"{tmp_path}/ckpt.pt")
    assert record["step"] == 4 and record["optimizer"]["step"] == 2             # after steps 1 and 3
    log = (tmp_path / "log.jsonl").read_text()
    assert '"grad_norm": null' in log and '"loss": null' in log and "NaN" not in log


def test_weights_that_are_not_finite_are_never_saved(corpus, tmp_path):
    def patch(module):
        class Poisoned(ShardedAdamW):
            def step(self, lr, scale):
                super().step(lr, scale)
                self.flats[0]["flat"][0] = float("inf")
        module.ShardedAdamW = Poisoned
    with pytest.raises(UserError, match="a weight is not finite; lower learning_rate; there is no checkpoint yet"):
        run_train([*TINY, f"--data={corpus}", f"--out_dir={tmp_path}", "--max_iters=1", "--warmup_iters=0"], patch)
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


@pytest.mark.parametrize("broken", ["stdout", pytest.param("log.jsonl", marks=pytest.mark.skipif(
    not os.path.exists("/dev/full"), reason="no /dev/full on this system"))])
def test_if_stdout_or_the_log_cannot_be_written_training_saves_and_ends_in_a_sentence(corpus, tmp_path, broken):
    """A closed pipe, as in `python train.py | head -3`, and a full disk."""
    out, pipe = tmp_path / "out", str(tmp_path / "pipe")
    out.mkdir()
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)                       # does not wait for a writer
    if broken == "log.jsonl":
        (out / "log.jsonl").symlink_to("/dev/full")
    child = Child(tmp_path, "train.py", *TINY, f"--data={corpus}", f"--out_dir={out}", "--max_iters=100000",
                  stdout=pipe if broken == "stdout" else None)
    assert broken != "stdout" or select.select([reader], [], [], 60)[0], "it prints nothing"
    os.close(reader)
    child.process.join(60)
    assert child.process.exitcode == 128 + signal.SIGPIPE
    assert re.fullmatch(r"train.py: stdout or the log in .*out cannot be written; .* --resume\n",
                        Path(child.paths[1]).read_text())
    assert load_checkpoint(out / "ckpt.pt")["step"] > 0


def test_a_run_is_neither_overwritten_nor_trained_twice_at_once(corpus, tmp_path, request):
    request.addfinalizer(gc.enable)
    gc.disable()                                        # so a run that has ended must have unlocked its folder itself
    argv = TINY + [f"--data={corpus}", f"--out_dir={tmp_path}"]
    run_train(argv)
    before = [(tmp_path / name).read_bytes() for name in ("ckpt.pt", "log.jsonl")]
    with pytest.raises(UserError, match="ckpt.pt holds a run; add --resume"):
        run_train(argv)
    held = lock(tmp_path / "log.jsonl", "")
    with pytest.raises(UserError, match="another process is training in"):
        run_train(argv + ["--resume", "--max_iters=9"])
    held.close()
    assert before == [(tmp_path / name).read_bytes() for name in ("ckpt.pt", "log.jsonl")]
    run_train(argv + ["--resume"])
    os.remove(tmp_path / "ckpt.pt")
    with pytest.raises(UserError, match="best.pt holds a run; .*move it away, or choose another"):
        run_train(argv)


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
    cache = model.new_cache(1, 8)
    cache.clear()                                       # its memory may hold anything
    save_prompt(tmp_path / "prompt", torch.arange(8), cache, "a model")
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
    (lambda r: r.pop("optimizer"), "has no optimizer: it is no whole checkpoint"),
    (lambda r: r["config"].update(n_head=4), "was trained with n_head=4; add its config file or these settings"),
    (lambda r: (r["config"].update(vocab_size=9), r.update(tokenizer="x")), "was trained with tokenizer=x; add"),
    (lambda r: r.update(text="0" * 64), "holds another text than when .* was saved; prepare the former again, or")])
def test_a_checkpoint_of_another_kind_is_not_resumed(corpus, trained, tmp_path, edit, message):
    change_checkpoint(trained, tmp_path, edit)
    before = (tmp_path / "ckpt.pt").read_bytes()
    with pytest.raises(UserError, match=message):
        run_train(TINY + [f"--data={corpus}", f"--out_dir={tmp_path}", "--resume"])
    assert (tmp_path / "ckpt.pt").read_bytes() == before


def test_checkpoints_of_earlier_revisions_are_resumed_and_the_same_text_may_have_moved(
        corpus, trained, tmp_path, capsys):
    change_checkpoint(trained, tmp_path, lambda r: (
        r.update(losses=[3.0], skipped=1, versions={}), r["settings"].update(eval_only=False)))
    shutil.copytree(corpus, tmp_path / "moved")
    argv = EIGHT_STEPS + [f"--data={tmp_path}/moved", f"--out_dir={tmp_path}", "--resume"]
    run_train(argv)
    assert "resuming with another" not in capsys.readouterr().out
    change_checkpoint(tmp_path, tmp_path, lambda r: r.pop("text"))
    run_train([*argv, "--max_iters=9", "--seed=2"])
    assert "resuming with another data, max_iters, seed; the result" in capsys.readouterr().out
    assert load_checkpoint(tmp_path / "ckpt.pt")["step"] == 9
