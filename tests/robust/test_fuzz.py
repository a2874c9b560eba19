"""
Every file that a script reads is truncated, bit-flipped and given values of wrong types, at seeded places. The script
then ends in one sentence and a status that is not 0, or it gives a result. sample.py and eval.py give no other result
than from the whole checkpoint or cache, because both have checksums. There is never a traceback, nor a write outside
the output folder. The cases run in one process. The first 80 have every pair of a command and a kind of damage; for
more: FUZZ=5000 pytest tests/robust/test_fuzz.py
"""
import copy
import gzip
import json
import os
import random
import re
import shutil
import sys
import traceback
from pathlib import Path

import pytest
import torch

from conftest import TINY, as_config, script
from tools import sweep

CASES = int(os.environ.get("FUZZ", 80))
JUNK = [None, True, -1, 0, 1.5, 10 ** 30, float("nan"), "x", "", "../x", [], [1], {}, {"x": 1}]
TRAIN = [*TINY, "--max_iters=2", "--eval_sequences=1", "--data={here}/data"]
QUICK = ["--device=cpu", "--checkpoint={here}/run"]
EVAL = ["eval.py", *QUICK, "--sequences=1", "--data={here}/data"]
SAMPLE = ["sample.py", *QUICK, "--length=8", "--tokens_per_step=8"]
PREPARE = ["data.py", "jsonl", "{here}/in/a.jsonl", "{here}/in/b.txt", "{here}/in/c.jsonl.gz", "--tokenizer", "bytes",
           "--workers", "1", "--out"]
QUESTIONS = [dict(context="abc" * i, choices=[" a", " bc"], gold=i % 2) for i in range(6)]
READERS = {                             # a file, and the commands that read it; what they write is in {here}/out
    "run/ckpt.pt": [SAMPLE, EVAL, ["train.py", *TRAIN, "--max_iters=3", "--out_dir={here}/run", "--resume"]],
    "cache": [[*SAMPLE, "--load_cache={here}/cache", "--prompt=more"]],
    "run/log.jsonl": [["train.py", *TRAIN, "--max_iters=3", "--out_dir={here}/run", "--resume"]],
    "data/meta.json": [["train.py", *TRAIN, "--out_dir={here}/out"], EVAL, ["data.py", "show", "{here}/data"]],
    "data/train.bin": [["train.py", *TRAIN, "--out_dir={here}/out"], ["data.py", "show", "{here}/data"]],
    "data/val.bin": [EVAL],
    "questions/piqa.jsonl": [["eval.py", *QUICK, "--mcqa={here}/questions"]],
    "questions/meta.json": [["data.py", "show", "{here}/questions"]],
    "local/piqa/validation.jsonl": [["data.py", "mcqa", "--local", "{here}/local", "--out", "{here}/out"]],
    **{f"in/{name}": [[*PREPARE, "{here}/out"]] for name in ("a.jsonl", "b.txt", "c.jsonl.gz")},
    "half/progress.json": [[*PREPARE, "{here}/half"]],
    "config.py": [["train.py", "{here}/config.py", *TRAIN, "--out_dir={here}/out"]],
    "prompt": [[*SAMPLE, "--prompt_file={here}/prompt"]],
    "table.json": [["tools/sweep.py", "--draw={here}/table.json", "--figure={here}/out/f.png"]],
    **{f"sweep/{name}": [["a run of a sweep"]] for name in ("run.json", "eval.json", "log.jsonl")},
}
CHECKSUMS = ("run/ckpt.pt", "cache")    # a damaged one never gives another result
OURS = {"run", "half"}                  # folders that a command may write besides out


def execute(argv, here):
    """Runs a command of READERS in the folder `here`. Returns (exit status, stdout, stderr)."""
    argv = [word.format(here=here) for word in argv]
    if argv[0] != "a run of a sweep":
        return script(*argv)
    sweep.out_dir = str(here)
    run = sweep.Run(str(here / "config.py"))
    run.folder = str(here / "sweep")
    return 0, json.dumps([sweep.summarise(run), run.steps], default=str), ""


def result_of(argv, printed):
    """The text of sample.py, or the loss of each sequence in eval.py: neither has times or paths in it."""
    if argv[0] != "eval.py":
        return printed
    text, = json.loads(printed.splitlines()[-1])["results"][0]["text"].values()
    return text["nats"]


@pytest.fixture(scope="module")
def sound(corpus, tmp_path_factory):
    """A folder with every file that a script reads."""
    here = tmp_path_factory.mktemp("sound")
    shutil.copytree(corpus, here / "data")
    (here / "config.py").write_text(as_config([*TINY, "--max_iters=2", "--eval_sequences=1"]))
    assert execute(["train.py", *TRAIN, "--out_dir={here}/run"], here)[0] == 0
    assert execute([*SAMPLE, "--save_cache={here}/cache", "--prompt=a prompt of some length"], here)[0] == 0
    for name in ("questions", "local/piqa", "in", "sweep"):
        (here / name).mkdir(parents=True)
    (here / "questions" / "piqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    (here / "local" / "piqa" / "validation.jsonl").write_text("".join(
        json.dumps(dict(goal=f"do {i}", sol1="a", sol2="b", label=i % 2)) + "\n" for i in range(4)))
    (here / "questions" / "meta.json").write_text(json.dumps(dict(tasks=dict(piqa=dict(
        questions=6, source="here", split="validation")))))
    texts = "".join(json.dumps(dict(text=f"text number {i}")) + "\n" for i in range(9)).encode()
    (here / "in" / "a.jsonl").write_bytes(texts)
    (here / "in" / "b.txt").write_bytes(b"A book.\r\n")
    (here / "in" / "c.jsonl.gz").write_bytes(gzip.compress(texts))
    (here / "prompt").write_text("na\u00efve prompt")
    assert execute([*PREPARE, "{here}/half"], here)[0] == 0
    made = json.loads((here / "half" / "meta.json").read_text())["made_from"]
    (here / "half" / "meta.json").unlink()
    nothing = dict(tokens=0, documents=0, utf8_bytes=0)
    (here / "half" / "progress.json").write_text(json.dumps(dict(
        command="python data.py jsonl", made_from=made, position=[0, 0], skipped=0,
        splits=dict(train=nothing, val=nothing))))
    shutil.copy(here / "run" / "log.jsonl", here / "sweep")
    figures = {key: 1.5 for key in "nelbo nelbo_se nelbo_se_noise ppl ppl_se bpb acc acc_se tokens samples".split()}
    (here / "sweep" / "eval.json").write_text(json.dumps(dict(results=[dict(parameters=9, text=dict(c4=figures))])))
    (here / "sweep" / "run.json").write_text(json.dumps(dict(trained=True, evaluated=sweep.eval_settings, settings={})))
    row = dict(name="mamba_h", base="mamba_h", learning_rate=0.01, tokens=9, parameters=9, val_loss=2.5,
               points=[dict(step=2, val=3.5, train=None), dict(step=4, val=2.5, train=2.75)], eval=figures)
    (here / "table.json").write_text(json.dumps(dict(runs=[row])))
    return here


def places(value, path=()):
    """The paths of all parts of a nested record."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, part in items:
        yield from places(part, (*path, key))


def with_junk(record, numbers):
    """A copy of a record with one part replaced by junk, or missing. numbers: a random.Random."""
    *path, last = numbers.choice([path for path in places(record) if path] or [(None,)])
    if last is None:
        return numbers.choice(JUNK)
    record = inside = copy.deepcopy(record)
    for i, key in enumerate(path):
        if isinstance(inside[key], tuple):
            inside[key] = list(inside[key])
        inside = inside[key]
    if numbers.random() < 0.2 and isinstance(inside, dict):
        del inside[last]
    else:
        inside[last] = numbers.choice(JUNK)
    return record


def retyped(path, numbers):
    """Replaces one value in a file, by its format; a file of no such format gets random bytes."""
    if path.suffix == ".pt" or path.name == "cache":
        torch.save(with_junk(torch.load(path), numbers), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(with_junk(json.loads(path.read_text()), numbers)))
    elif path.suffix == ".jsonl":
        lines = path.read_text().splitlines()
        i = numbers.randrange(len(lines))
        lines[i] = json.dumps(with_junk(json.loads(lines[i]), numbers))
        path.write_text("\n".join(lines) + "\n")
    elif path.suffix == ".py":
        lines = path.read_text().splitlines()
        i = numbers.randrange(len(lines))
        junk = numbers.choice([junk for junk in JUNK if junk != 10 ** 30])      # a config may ask for 10^30 steps
        lines[i] = f"{lines[i].partition('=')[0]} = {junk!r}".replace("nan", "float('nan')")
        path.write_text("\n".join(lines))
    else:
        path.write_bytes(numbers.randbytes(numbers.choice([0, 1, 100, 5000])))


def truncated(path, numbers):
    path.write_bytes(path.read_bytes()[:numbers.randrange(path.stat().st_size)])


def flipped(path, numbers):
    content = bytearray(path.read_bytes())
    for _ in range(numbers.choice([1, 1, 1, 50])):
        content[numbers.randrange(len(content))] ^= 1 << numbers.randrange(8)
    path.write_bytes(content)


WRITES = []                             # where something was written while `watching`
watching = False


def watch(event, args):
    """An audit hook: records the paths of files that are opened for writing, made, moved or removed."""
    if not watching:
        return
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT
    if event == "open" and isinstance(args[0], (str, bytes)) and (args[2] or 0) & writing:
        WRITES.append(os.fsdecode(args[0]))
    if event in ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.link", "os.truncate"):
        WRITES.extend(os.fsdecode(arg) for arg in args[:2] if isinstance(arg, (str, bytes)))


def test_damaged_files_end_in_a_sentence_or_in_the_right_result(sound, tmp_path, monkeypatch):
    import matplotlib.figure
    global watching
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig",
                        lambda figure, path, **how: Path(path).write_bytes(b"\x89PNG"))
    sys.addaudithook(watch)
    before, statuses, right, failures = dict(vars(sweep)), [], {}, []
    commands = [(file, damage, i) for damage in (truncated, flipped, retyped)
                for file, readers in READERS.items() for i in range(len(readers))]
    for case in range(CASES):
        numbers = random.Random(case)
        file, damage, i = commands[case % len(commands)]
        here = tmp_path / str(case)
        shutil.copytree(sound, here)
        damage(here / file, numbers)
        argv = READERS[file][i]
        WRITES.clear()
        watching, status = True, 1
        try:
            status, printed, error = execute(argv, here)
            last = error.strip().splitlines()[-1:] or [""]
            if status and not re.match(r"[a-z_]+\.py: \S", last[0].rpartition("\r")[2]):
                failures.append((case, file, damage.__name__, argv[0], f"no sentence: {last[0]!r}"))
            if not status and not printed:
                failures.append((case, file, damage.__name__, argv[0], "neither a sentence nor a result"))
            if not status and file in CHECKSUMS and damage is not retyped:
                key = file, i
                if key not in right:
                    shutil.copytree(sound, tmp_path / "right", dirs_exist_ok=True)
                    right[key] = execute(argv, tmp_path / "right")[1]
                if argv[0] != "train.py" and result_of(argv, printed) != result_of(argv, right[key]):
                    failures.append((case, file, damage.__name__, argv[0], "another result"))
        except Exception:
            failures.append((case, file, damage.__name__, argv[0], traceback.format_exc()[-1500:]))
        finally:
            watching = False
        allowed = [*(here / name for name in ("out", *OURS)), tmp_path / "right", Path("/dev")]
        outside = [path for path in WRITES if "matplotlib" not in path
                   and not any(Path(os.path.abspath(path)).is_relative_to(folder) for folder in allowed)]
        if outside:
            failures.append((case, file, damage.__name__, argv[0], f"wrote {outside}"))
        statuses.append(status)
        shutil.rmtree(here)
    vars(sweep).update(before)
    assert not failures, f"{len(failures)} of {CASES}: " + "\n".join(map(str, failures[:20]))
    assert 0.3 < sum(map(bool, statuses)) / CASES       # much of the damage is found
