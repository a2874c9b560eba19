"""Nothing is lost and nothing is silently wrong: interrupts, full disks, planted links, damaged files, hostile values."""
import contextlib
import io
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_model, prompts_of
from test_train import ROOT, TINY, corpus, run  # noqa: F401  (a fixture)

import data
import train
from checkpoint import fingerprint, load_checkpoint, load_model, load_prefix, read_prefix, save_checkpoint, save_prefix
from configurator import ConfigError, UserError, configure
from files import misfit, write_file
from model import BlockDiffusionLM, ModelConfig, ModelError, config_from_file
from parallel import ShardedAdamW
from tools import prepare, sweep

TIMES = {"ms", "tok_per_s", "memory"}


def log_of(folder):
    """The log but for its times, as text."""
    rows = [json.loads(line) for line in Path(folder, "log.jsonl").read_text().splitlines()]
    return "\n".join(json.dumps({k: v for k, v in row.items() if k not in TIMES}) for row in rows)


def script(name, *argv):
    """A script in this process, its globals new: (exit status, what it printed to stdout, to stderr)."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    out.reconfigure = lambda **how: None
    before, argv_before = signal.getsignal(signal.SIGTERM), sys.argv
    sys.argv = [name, *map(str, argv)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            runpy.run_path(os.path.join(ROOT, name), run_name="__main__")
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 1
        err.write(stop.code if isinstance(stop.code, str) else "")
    finally:
        sys.argv = argv_before
        signal.signal(signal.SIGTERM, before)
    return status, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):  # noqa: F811
    """The folder of a finished run."""
    out = str(tmp_path_factory.mktemp("trained"))
    run(TINY + [f"--data={corpus}", f"--out_dir={out}", "--log_interval=3", "--max_iters=8", "--eval_interval=4"])
    return out


# -- runs -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("when", ["validation 1", "validation 2", "step 5", "step 4"])
def test_a_run_that_was_interrupted_logs_the_bytes_of_one_that_was_not(corpus, trained, tmp_path, when):  # noqa: F811
    """But for times: means over the same steps, and no validation lost, wherever the signal comes."""
    out, (place, count), seen = str(tmp_path), when.split(), []
    argv = TINY + [f"--data={corpus}", f"--out_dir={out}", "--log_interval=3", "--max_iters=8", "--eval_interval=4"]

    def patch(module):
        name = {"validation": "nelbo_counts", "step": "learning_rate_at"}[place]
        real = getattr(module, name)

        def interrupted(*args, **kwargs):
            seen.append(1)
            if len(seen) == int(count):
                os.kill(os.getpid(), signal.SIGTERM)
            return real(*args, **kwargs)
        setattr(module, name, interrupted)
    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
        run(argv, patch=patch)
    run(argv + ["--resume"])
    assert log_of(out) == log_of(trained)
    run(argv + ["--resume"])                            # finished: nothing is logged twice
    assert log_of(out) == log_of(trained)


def test_an_interrupt_of_the_validation_that_is_made_up_for_loses_it_neither(corpus, trained, tmp_path):  # noqa: F811
    argv = TINY + [f"--data={corpus}", f"--out_dir={tmp_path}", "--log_interval=3", "--max_iters=8", "--eval_interval=4"]

    def patch(module):
        module.nelbo_counts = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGTERM)
    for more in ([], ["--resume"], ["--resume"]):
        with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
            run(argv + more, patch=patch)
    run(argv + ["--resume"])
    assert log_of(tmp_path) == log_of(trained)


def test_last_steps_that_are_not_finite_never_replace_a_good_checkpoint(corpus, tmp_path):  # noqa: F811
    out = str(tmp_path)

    def patch(module):
        class Poisoned(ShardedAdamW):
            count = 0

            def reduce(self):
                self.count += 1
                return super().reduce() * (float("nan") if self.count >= 3 else 1)
        module.ShardedAdamW = Poisoned
    with pytest.raises(ModelError, match="not finite; lower learning_rate; .*is the last good checkpoint"):
        run(TINY + [f"--data={corpus}", f"--out_dir={out}"], patch=patch)
    record = load_checkpoint(f"{out}/ckpt.pt")
    assert record["step"] == 2 and record["skipped"] == 0


def test_weights_that_are_not_finite_are_never_saved_and_never_used(corpus, trained, tmp_path):  # noqa: F811
    out = str(tmp_path / "out")

    def patch(module):
        class Poisoned(ShardedAdamW):
            def step(self, lr, scale):
                super().step(lr, scale)
                self.flats[0]["flat"][0] = float("inf")
        module.ShardedAdamW = Poisoned
    with pytest.raises(ModelError, match="there is no checkpoint yet"):
        run(TINY + [f"--data={corpus}", f"--out_dir={out}", "--max_iters=1", "--warmup_iters=0"], patch=patch)
    assert not os.path.exists(f"{out}/ckpt.pt")
    record = torch.load(f"{trained}/ckpt.pt")
    record["model"]["head.weight"][3, 3] = float("nan")
    torch.save(record, tmp_path / "nan.pt")
    for name in ("sample.py", "eval.py"):
        status, printed, error = script(name, f"--checkpoint={tmp_path}/nan.pt", "--device=cpu")
        assert status == 1 and "weights that are not finite" in error and printed.count("\n") < 2


def test_a_log_whose_checkpoint_was_moved_is_not_overwritten(corpus, tmp_path):  # noqa: F811
    argv = TINY + [f"--data={corpus}", f"--out_dir={tmp_path}"]
    run(argv)
    before = log_of(tmp_path)
    os.rename(tmp_path / "ckpt.pt", tmp_path / "moved.pt")
    with pytest.raises(ConfigError, match="log.jsonl holds a run; move it away, or choose another --out_dir"):
        run(argv)
    assert log_of(tmp_path) == before


def test_a_log_that_cannot_be_rewritten_stays_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "log.jsonl"
    whole = "".join(json.dumps(dict(step=i, loss=1.0)) + "\n" for i in range(1, 9))
    path.write_text(whole)
    (tmp_path / "ckpt.pt.0a1b2c3d.tmp").write_text("half a checkpoint")
    with monkeypatch.context() as patch:
        patch.setattr("files.os.replace", lambda *paths: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            train.Log(str(path), 5, True)
    assert path.read_text() == whole and os.listdir(tmp_path) == ["log.jsonl"]
    train.Log(str(path), 5, True).write(dict(step=6))
    assert [row["step"] for row in train.log_rows(path).values()] == [1, 2, 3, 4, 5, 6]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
def test_a_full_or_closed_stdout_ends_no_training_and_sampling_in_a_sentence(corpus, trained, tmp_path):  # noqa: F811
    argv = [f"{ROOT}/train.py", *TINY, f"--data={corpus}"]
    with open("/dev/full", "w") as full:
        start = lambda argv, **how: subprocess.Popen([sys.executable, *argv], stderr=subprocess.PIPE, text=True, **how)
        running = [start([*argv, f"--out_dir={tmp_path}/full"], stdout=full),
                   start([*argv, f"--out_dir={tmp_path}/closed"], preexec_fn=lambda: os.close(1)),
                   start([f"{ROOT}/sample.py", f"--out_dir={trained}", "--length=9"], stdout=full)]
        errors = [process.communicate(timeout=100)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0, 1], errors
    assert not any("Traceback" in error or "ignored" in error for error in errors)
    assert errors[2].splitlines()[-1].startswith("sample.py: an output: No space left on device")
    assert [load_checkpoint(f"{tmp_path}/{name}/ckpt.pt")["step"] for name in ("full", "closed")] == [4, 4]


def test_ctrl_c_during_imports_and_sigterm_while_sampling_are_a_line(trained):
    stop = "import builtins, sys\nsys.path.insert(0, {!r})\nreal = builtins.__import__\n" \
        "def importing(name, *rest):\n    if name == 'torch': raise KeyboardInterrupt\n    return real(name, *rest)\n" \
        "builtins.__import__ = importing\nimport {}\n"
    running = [subprocess.Popen([sys.executable, "-c", stop.format(ROOT, name)], stderr=subprocess.PIPE, text=True)
               for name in ("train", "sample", "eval", "data", "bench", "tools.sweep", "tools.quality")]
    assert {process.communicate(timeout=60)[1] for process in running} == {"stopped\n"}
    process = subprocess.Popen(
        [sys.executable, "-u", f"{ROOT}/sample.py", f"--out_dir={trained}", "--length=100000", "--prompt=begin"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.read(5) == "begin"
    process.terminate()
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and "stopped after" in error and "Traceback" not in error


def test_a_dumb_terminal_gets_no_escape_codes(monkeypatch):
    import sample
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    for term, live in (("dumb", False), ("xterm", True)):
        monkeypatch.setenv("TERM", term)
        printer = sample.Printer(data.get_tokenizer("bytes"), "", 0, 0, 8, 257)
        printer.block(0, torch.tensor([97, 98]))
        assert printer.live == live and ("\x1b" in terminal.getvalue()) == live


# -- sweeps ---------------------------------------------------------------------------------------

class Stub:
    """A run of a sweep that trains at once and never logs what it is to log."""
    trained, error, name, folder = False, "", "stub", "folder"

    def __init__(self, folder):
        self.folder, self.news = folder, []

    def path(self, name):
        return os.path.join(self.folder, name)

    def remember(self, **news):
        self.news.append(news)


@pytest.mark.parametrize("evaluate", [True, False])
def test_a_sweep_whose_run_makes_no_progress_twice_stops_with_a_sentence(tmp_path, monkeypatch, evaluate):
    monkeypatch.setattr(sweep, "places", lambda: [[]])
    monkeypatch.setattr(sweep, "start", lambda *_: subprocess.Popen([sys.executable, "-c", ""]))
    stub = Stub(str(tmp_path))
    sweep.run_all([stub], evaluate, types.SimpleNamespace(n=0), lambda: 0)
    assert stub.news == [{"trained": True}] * 2 and "twice without the last validation" in stub.error


def test_a_run_is_compared_by_its_last_validation_alone(tmp_path, monkeypatch):
    config = tmp_path / "tiny.py"
    config.write_text("max_iters, warmup_iters = 8, 0\n")
    monkeypatch.setattr(sweep, "out_dir", str(tmp_path))
    one = sweep.Run(str(config))
    one.remember(trained=True)
    rows = [dict(step=4, loss=1.0), dict(step=4, val_loss=2.0), dict(step=8, loss=1.0)]
    for more, done in (([], False), ([dict(step=8, val_loss=1.5)], True)):
        Path(one.path("log.jsonl")).write_text("".join(json.dumps(row) + "\n" for row in rows + more) + '{"ste')
        assert one.trained == done


@pytest.mark.skipif(sweep.DIE_WITH is None, reason="only Linux ends a process with the one that started it")
def test_a_killed_sweep_leaves_no_training_behind(tmp_path):
    run_of = types.SimpleNamespace(
        path=lambda name: str(tmp_path / name), command=lambda script: [sys.executable, "-c", "import time; time.sleep(99)"])
    child = os.fork()
    if not child:
        (tmp_path / "pid").write_text(str(sweep.start(run_of, "train", [], 1).pid))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    trainer, deadline = int((tmp_path / "pid").read_text()), time.time() + 20
    with contextlib.suppress(ProcessLookupError):
        while time.time() < deadline and Path(f"/proc/{trainer}/stat").read_text().split()[2] != "Z":
            time.sleep(0.05)
    assert time.time() < deadline


# -- files that are written -----------------------------------------------------------------------

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
        assert script("eval.py", f"--checkpoint={trained}", f"--out={tmp_path}/e.json", "--sequences=1", "--device=cpu")[0] == 0
        assert script("sample.py", f"--out_dir={trained}", f"--save_cache={tmp_path}/c", "--prompt=abcdefghijkl",
                      "--length=1", "--device=cpu")[0] == 0
    assert sorted(os.listdir(tmp_path)) == ["c", "e.json"]


def test_temporary_files_follow_no_planted_link_and_new_files_heed_the_umask(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_text("kept")
    monkeypatch.setattr("files.secrets.token_hex", lambda n: "guessed")
    for name in ("ckpt.pt.tmp", "ckpt.pt.guessed.tmp"):
        (tmp_path / name).symlink_to(victim)
    with pytest.raises(UserError, match="cannot be written .File exists"):
        save_checkpoint(str(tmp_path / "ckpt.pt"), make_model("mamba_h"))
    assert victim.read_text() == "kept" and not (tmp_path / "ckpt.pt").exists()
    (tmp_path / "result").symlink_to(victim)            # a target that is a link is replaced, not followed
    umask = os.umask(0o027)
    try:
        write_file(str(tmp_path / "result"), "new")
        (tmp_path / "lib").mkdir()
        for i in range(60):
            (tmp_path / "lib" / f"{i}.py").write_text("x = 1")
        data.prepare_stdlib(tmp_path / "data" / "stdlib", tmp_path / "lib")
    finally:
        os.umask(umask)
    assert victim.read_text() == "kept" and (tmp_path / "result").read_text() == "new"
    modes = [path.stat().st_mode & 0o777 for path in (tmp_path / "result", tmp_path / "data" / "stdlib",
                                                      tmp_path / "data" / "stdlib" / "meta.json")]
    assert modes == [0o640, 0o750, 0o640]


# -- files that are read --------------------------------------------------------------------------

def test_the_form_of_a_record_is_checked_in_every_part():
    form = {"a": int, "?b": [range(3)], "c": ({"d": str}, type(None)), "*": float}
    right = dict(a=1, b=[0, 2], c=dict(d="x"), e=1.5)
    assert misfit(right, form) == "" and misfit(dict(a=1, c=None), form) == ""
    for change, why in ((dict(a="1"), "record.a is '1'"), (dict(b=[0, 3]), "record.b[1] is 3"), (dict(e=1), "record.e is 1"),
                        (dict(b=[True]), "record.b[0] is True"), (dict(c=dict(d=1)), "record.c.d is 1")):
        assert misfit({**right, **change}, form) == why
    assert misfit(dict(a=1), form) == "record has no c" and misfit([1], form) == "record is [1]"


def change_checkpoint(folder, target, edit):
    record = torch.load(f"{folder}/ckpt.pt")
    edit(record)
    torch.save(record, target / "ckpt.pt")


@pytest.mark.parametrize("edit, message", [
    (lambda r: r.update(config=[]), "record.config is"), (lambda r: r.update(model=3), "record.model is 3"),
    (lambda r: r["model"].popitem(), "weights of another configuration"),
    (lambda r: r["model"].update({"head.weight": torch.zeros(2, 2)}), "weights of another configuration"),
    (lambda r: r["config"].update(n_layer=10 ** 9), "weights of another configuration"),
    (lambda r: r["config"].update(d_model="32"), "record.config is"),
    (lambda r: r["config"].update(new=1), "record.config is"),
    (lambda r: r.update(optimizer={}), "record.optimizer has no step"),
    (lambda r: r["optimizer"].popitem(), "record.optimizer has no step|weights of another configuration"),
    (lambda r: r.update(settings=None), "record.settings is None"),
    (lambda r: r.update(step="8"), "record.step is '8'"), (lambda r: r.update(step=-1), "record.step is -1"),
    (lambda r: r.update(losses="none"), "record.losses is 'none'")])
def test_a_checkpoint_of_another_form_is_not_resumed(corpus, trained, tmp_path, edit, message):  # noqa: F811
    change_checkpoint(trained, tmp_path, edit)
    with pytest.raises(UserError, match=message):
        run(TINY + [f"--data={corpus}", f"--out_dir={tmp_path}", "--resume"])


def test_checkpoints_of_earlier_versions_are_resumed(corpus, trained, tmp_path):  # noqa: F811
    change_checkpoint(trained, tmp_path, lambda r: [r.pop(key) for key in ("losses", "skipped")])
    run(TINY + [f"--data={corpus}", f"--out_dir={tmp_path}", "--resume", "--max_iters=9"])
    assert load_checkpoint(str(tmp_path / "ckpt.pt"))["step"] == 9


@pytest.mark.parametrize("tokenizer", [None, "gpt2", "gpt3", 5])
def test_a_checkpoint_without_its_tokenizer_is_refused(trained, tmp_path, tokenizer):
    change_checkpoint(trained, tmp_path, lambda r: r.update(tokenizer=tokenizer) if tokenizer else r.pop("tokenizer"))
    for name in ("sample.py", "eval.py"):
        status, _, error = script(name, f"--checkpoint={tmp_path}", "--device=cpu")
        assert status == 1 and ("token ids, not those of its tokenizer" in error or "record.tokenizer is 5" in error)


@pytest.mark.parametrize("edit", [
    lambda r: r.update(layers=[]), lambda r: r.pop("layers"), lambda r: r.pop("fingerprint"),
    lambda r: r.update(tokens=torch.cat([r["tokens"]] * 9)), lambda r: r["tokens"].fill_(22),
    lambda r: r["tokens"].neg_(), lambda r: r.update(layers=r["layers"][::-1]),
    lambda r: r["layers"][1][1].fill_(float("nan")), lambda r: r.update(layers=[(x, 3) for x, _ in r["layers"]])])
def test_a_damaged_prompt_cache_is_refused(tmp_path, edit):
    model, path = make_model("mamba_h", torch.float32), str(tmp_path / "cache")
    mark = fingerprint(model, torch.float32)
    save_prefix(path, read_prefix(model, prompts_of(19)[0]), mark)
    record = torch.load(path)
    edit(record)
    torch.save(record, path)
    with pytest.raises(UserError, match="make it again with --save_cache"):
        load_prefix(path, model.config, mark)


def test_a_flipped_bit_of_a_prompt_cache_is_found(tmp_path):
    model, path = make_model("mamba_h", torch.float32), tmp_path / "cache"
    mark = fingerprint(model, torch.float32)
    save_prefix(str(path), read_prefix(model, prompts_of(19)[0]), mark)
    whole = bytearray(path.read_bytes())
    whole[whole.index(b"data/0") + 200] ^= 1            # in the tensors' part of the file
    path.write_bytes(whole)
    with pytest.raises(UserError, match="not a whole saved cache"):
        load_prefix(str(path), model.config, mark)


@pytest.mark.parametrize("edit, message", [
    (lambda m: m["splits"]["train"].update(tokens=0), "record.splits.train.tokens is 0"),
    (lambda m: m["splits"]["train"].update(tokens=10 ** 9), "contradicts itself"),
    (lambda m: m.update(vocab_size=10 ** 6), "contradicts itself"),
    (lambda m: m["splits"]["train"]["shards"][0].update(file="../elsewhere.bin"), "elsewhere.bin"),
    (lambda m: m["splits"]["train"].update(utf8_bytes="many"), "utf8_bytes is 'many'")])
def test_a_meta_json_that_cannot_be_right_is_refused(corpus, tmp_path, edit, message):  # noqa: F811
    folder = tmp_path / "data"
    folder.mkdir()
    for path in Path(corpus).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    meta = json.loads((folder / "meta.json").read_text())
    edit(meta)
    (folder / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(UserError, match=message):
        data.TokenData(folder, "train")


def test_questions_nested_without_end_are_refused_with_their_line(tmp_path):
    (tmp_path / "piqa").mkdir()
    for path in (tmp_path / "piqa.jsonl", tmp_path / "piqa" / "validation.jsonl"):
        path.write_text("[" * 100_000)
    with pytest.raises(data.DataError, match="piqa.jsonl:1: "):
        data.load_questions(tmp_path / "piqa.jsonl", data.get_tokenizer("bytes"), 99)
    with pytest.raises(data.DataError, match="validation.jsonl:1: not JSON"):
        prepare.prepare_mcqa(tmp_path / "out", local=tmp_path)


@pytest.mark.parametrize("runs", [
    [], 3, [{"name": 1, "base": "a", "points": []}], [{"name": "a", "base": "a", "points": [{"step": 1}]}],
    [{"name": "a", "base": "a", "points": [], "eval": {"nelbo": "x"}}],
    [{"name": "a", "base": "a", "points": [], "learning_rate": "x"}]])
def test_a_table_of_wrong_types_is_not_drawn(tmp_path, monkeypatch, runs):
    (tmp_path / "t.json").write_text(json.dumps(dict(runs=runs)))
    monkeypatch.setattr(sweep, "draw", str(tmp_path / "t.json"))
    with pytest.raises(UserError, match="not a file that sweep.py wrote.*name another"):
        sweep.main()


# -- settings -------------------------------------------------------------------------------------

@pytest.mark.parametrize("name, argv, message", [
    ("train.py", ["--batch_size=1e13"], "batch_size must be at most"),
    ("train.py", ["--out_dir=caf\udce9"], "is not UTF-8"),
    ("sample.py", ["--num_samples=1e12"], "num_samples must be at most"),
    ("eval.py", ["--checkpoint={trained}", "--mc=10000000000", "--device=cpu"], "eval.py: out of memory"),
    ("data.py", ["show", "caf\udce9"], "is not UTF-8")])
def test_values_beyond_all_bounds_are_a_sentence(trained, name, argv, message):
    status, _, error = script(name, *(word.format(trained=trained) for word in argv))
    assert status == 1 and message in error


def test_attention_only_models_need_no_geometry_of_mamba():
    shape = dict(vocab_size=23, seq_len=16, block_len=8, n_layer=2, n_head=2, d_model=20)
    model = BlockDiffusionLM(ModelConfig(attn_every=1, **shape))
    assert model(torch.zeros(2, 16, dtype=torch.long)).isfinite() and model.new_cache(1, 8).nbytes > 0
    with pytest.raises(ModelError, match="must be a multiple of mamba_head_dim"):
        ModelConfig(attn_every=2, **shape)


def test_timesteps_have_the_precision_of_the_model():
    embedding = make_model("mamba_h", time_conditioning=True).time
    inside, t = [], torch.tensor([0.123456789012345], dtype=torch.float64)
    embedding.mlp.register_forward_hook(lambda module, inputs, output: inside.append(inputs[0]))
    embedding(t)
    freq = 10_000.0 ** (-np.arange(128) / 128)
    np.testing.assert_allclose(inside[0][0, :128].numpy(), np.cos(1000 * float(t) * freq), atol=1e-12)


# -- question sets --------------------------------------------------------------------------------

def test_all_question_sets_that_can_be_made_are_made_from_the_split_that_is_asked_for(tmp_path):
    rows = dict(piqa=dict(goal="g", sol1="a", sol2="b", label=0), boolq=dict(passage="p", question="q", answer=True),
                arc_challenge=dict(id="1", question="q", answerKey="A", choices=dict(text=["a", "b"], label=["A", "B"])))
    for task, row in rows.items():
        (tmp_path / "in" / task).mkdir(parents=True)
        (tmp_path / "in" / task / "validation.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match="no test split of arc_challenge: name another with --split "
                                        r"\(it holds validation.jsonl\); the other tasks are made"):
        prepare.prepare_mcqa(tmp_path / "out", local=tmp_path / "in")
    assert sorted(os.listdir(tmp_path / "out")) == ["boolq.jsonl", "meta.json", "piqa.jsonl"]
    status, printed, _ = script("data.py", "mcqa", "--local", tmp_path / "in", "--out", tmp_path / "out", "--split",
                                "validation")
    assert status == 0 and "arc_challenge: 1 questions from allenai/ai2_arc (validation)" in printed
    with pytest.raises(UserError, match="no train split of arc_challenge"):
        prepare.prepare_mcqa(tmp_path / "none", tasks=["arc_challenge"], local=tmp_path / "in", split="train")
    assert not (tmp_path / "none").exists()
    hub = tmp_path / "hub" / "allenai" / "ai2_arc" / "ARC-Challenge" / "test-00000.jsonl"       # the layout of the hub
    hub.parent.mkdir(parents=True)
    hub.write_text(json.dumps(rows["arc_challenge"]) + "\n")
    assert list(prepare.prepare_mcqa(tmp_path / "b", ["arc_challenge"], tmp_path / "hub")["tasks"]) == ["arc_challenge"]


def test_a_limit_draws_questions_by_seed_from_the_whole_task(tmp_path):
    rows = [dict(context=str(i), choices=[" a", " b"], gold=0) for i in range(100)]
    (tmp_path / "piqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    def drawn(seed, limit=10):
        questions = data.load_questions(tmp_path / "piqa.jsonl", data.get_tokenizer("bytes"), 99, limit, seed)
        return [int(bytes(q["pairs"][0][0])) for q in questions]
    assert drawn(1) == drawn(1) != drawn(2) and len(set(drawn(1))) == 10 and max(drawn(1)) > 50
    assert drawn(1, 0) == drawn(1, 1000) == list(range(100))


def test_a_bar_of_eval_py_does_not_fill_a_file(monkeypatch):
    import eval as evaluation
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with evaluation.progress(types.SimpleNamespace(rank=0), "answers", 1000, "question") as bar:
        for _ in range(1000):
            time.sleep(0.001)
            bar.update(1)
    assert len(sys.stderr.getvalue()) < 500
