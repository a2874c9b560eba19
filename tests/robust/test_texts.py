"""Texts, folders and arguments that data.py cannot use: each ends in a sentence that names the place, and nothing is
lost."""
import errno
import json
import os
import random
import re
import shlex
from pathlib import Path

import pytest

import data
from configurator import UserError
from conftest import script
from files import locked
from test_data import TEXTS, documents, fake_stdlib, folder_bytes, make_folder, prepared, write_jsonl
from tools import prepare


def edit_meta(folder, **changes):
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | changes))


REFUSED = {
    "no such folder": (lambda f: [p.unlink() for p in f.iterdir()], "no prepared data"),
    "truncated": (lambda f: os.truncate(f / "train.bin", 2), "truncated: remove"),
    "missing": (lambda f: (f / "train.bin").unlink(), "missing"),
    "no JSON": (lambda f: (f / "meta.json").write_text("{"), "damaged"),
    "an earlier format": (lambda f: edit_meta(f, format=1), "of another format .record.format is 1"),
    "a split of 0 tokens": (lambda f: edit_meta(f, splits=dict(train=dict(tokens=0, documents=1, utf8_bytes=1))),
                            "record.splits.train.tokens is 0"),
    "a mask in the data": (lambda f: (f / "train.bin").write_bytes(b"\x01\x01" + (f / "train.bin").read_bytes()[2:]),
                           "token 257, outside its vocabulary"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_damaged_folder_is_refused_with_the_command_to_run(tmp_path, case):
    folder = make_folder(tmp_path)
    damage, message = REFUSED[case]
    damage(folder)
    with pytest.raises(UserError, match=f"{message}.*run python data.py jsonl"):
        data.TokenData(folder, "train").sequences(16)


def test_tokens_of_another_tokenizer_another_split_and_a_short_split_are_refused(tmp_path):
    folder = make_folder(tmp_path)
    with pytest.raises(UserError, match="holds bytes tokens, not gpt2.*--tokenizer gpt2"):
        data.TokenData(folder, "train", "gpt2")
    with pytest.raises(UserError, match="no val split: run python data.py.*--val"):
        data.TokenData(folder, "val", "bytes")
    for use in (lambda d: d.sequences(10**6), lambda d: d.batch(0, 0, [0], 1, 10**6)):
        with pytest.raises(UserError, match="fewer than one sequence of 1,000,000"):
            use(data.TokenData(folder, "train"))


def test_gpt2_without_its_files_is_one_sentence(monkeypatch):
    def unreachable(name):
        raise ConnectionError("no route to host")
    monkeypatch.setattr(data.tiktoken, "get_encoding", unreachable)
    with pytest.raises(UserError, match="TIKTOKEN_CACHE_DIR"):
        data.get_tokenizer.__wrapped__("gpt2")


def truncated(path):
    path.write_bytes(path.read_bytes()[:-200])


def flipped(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2:len(content) // 2 + 8] = b"\xff" * 8
    path.write_bytes(content)


GOOD = dict(text="good")
NOISE = [dict(text=random.Random(i).randbytes(2000).hex()) for i in range(40)]
BAD = {
    "not JSON": ("a.jsonl", [GOOD, b"{", GOOD], None, "a.jsonl:2: not a JSON object"),
    "an array": ("a.jsonl", [[GOOD, GOOD]], None, "a.jsonl:1: .* one is expected on each line"),
    "no text": ("a.jsonl.zst", [GOOD, dict(url="x"), GOOD], None, 'a.jsonl.zst:2: no "text"'),
    "empty": ("a.jsonl.gz", [GOOD, GOOD, dict(text="")], None, "a.jsonl.gz:3: an empty document"),
    "a byte order mark": ("a.jsonl", [GOOD, dict(text="\ufeff")], None, "a.jsonl:2: an empty document"),
    "not UTF-8": ("a.jsonl", [GOOD, b'{"text": "\xff"}'], None, "a.jsonl:2: not UTF-8"),
    "latin text": ("a.txt", [b"caf\xe9"], None, "a.txt:1: not UTF-8"),
    "truncated gz": ("a.jsonl.gz", NOISE, truncated, r"a.jsonl.gz:\d+: .*end-of-stream"),
    "corrupt gz": ("a.jsonl.gz", NOISE, flipped, r"a.jsonl.gz:\d+: "),
    "truncated zst": ("a.jsonl.zst", NOISE, truncated, r"a.jsonl.zst:\d+: Compressed file ended"),
    "corrupt zst": ("a.jsonl.zst", NOISE, flipped, r"a.jsonl.zst:\d+: Unable to decompress"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named_by_file_and_line_and_can_be_skipped(tmp_path, case):
    name, rows, damage, message = BAD[case]
    bad = write_jsonl(tmp_path / name, rows)
    if damage:
        damage(bad)
    paths = [write_jsonl(tmp_path / "0.jsonl", documents(TEXTS)), bad,
             write_jsonl(tmp_path / "z.jsonl", documents(TEXTS))]
    with pytest.raises(UserError, match=message + ".*--skip_bad.* another --out$"):
        prepared(tmp_path / "out", paths)
    saved = json.loads((tmp_path / "out" / "progress.json").read_text())
    assert saved["splits"]["train"]["documents"] >= len(TEXTS)
    meta = prepared(tmp_path / "out", paths, skip_bad=True)
    assert meta["skipped"] == 1 and meta["splits"]["train"]["documents"] >= 2 * len(TEXTS)
    prepared(tmp_path / "again", paths, skip_bad=True)
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "again")


def test_half_a_surrogate_pair_becomes_the_replacement_character():
    tokens, n_bytes = data.encode(data.get_tokenizer("bytes"), "a\ud800b")
    assert bytes(tokens[:-1].tolist()).decode() == "a\ufffdb" and n_bytes == 5


def test_a_blank_line_is_no_document(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [GOOD, b"", GOOD, b"  "])
    assert prepared(tmp_path / "out", [path])["splits"]["train"]["documents"] == 2


@pytest.mark.parametrize("arguments, message", [
    (["jsonl", "missing.jsonl", "--out", "out"], "missing.jsonl is not a file"),
    (["jsonl", "a.csv", "--out", "out"], "endings"),
    (["jsonl", "--out", "out"], "name some"),
    (["jsonl", "empty.jsonl", "--tokenizer", "bytes", "--out", "out"], "no document"),
    (["show", "nowhere"], "run python data.py jsonl"),
    (["show", "data/dclm"], "run python data.py dclm --tokens 5e9 --out data/dclm"),
    (["c4", "--local", ".", "--out", "out"], "no file that matches"),
    (["mcqa", "--local", ".", "--out", "out"], "no folder named"),
    (["mcqa", "--local", "nowhere", "--out", "out"], "--local is nowhere, which is no folder; name one"),
])
def test_a_mistake_is_one_sentence_and_status_1(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("a.csv").write_text("x")
    Path("empty.jsonl").write_text("")
    status, _, error = script("data.py", *arguments)
    assert status == 1 and message in error and "Traceback" not in error


@pytest.mark.parametrize("command", [
    "dclm --tokens=0.5", "dclm --tokens=nan", "dclm --tokens=inf", "dclm --tokens=many", "c4 --sequences=-1",
    "c4 --seq_len=0", "jsonl a.jsonl --out=out --workers=-3", *(f"jsonl a.jsonl --out=out --val_fraction={x}" for x in (
        "-1", "nan", "1", "x"))])
def test_a_setting_out_of_its_bounds_is_refused_before_anything_is_read(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", documents(TEXTS))
    status, _, error = script("data.py", *command.split())
    assert status == 2 and re.search("must be .*, but is|invalid .* value", error.splitlines()[-1])
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize("name", ["stdlib", "mcqa", *data.HUB, "mine", "two words"])
def test_the_command_that_a_missing_folder_asks_for_can_be_run(name):
    command = shlex.split(data.command_for(Path("some") / name))
    assert command[:2] == ["python", "data.py"]
    assert prepare.parse_arguments(command[2:]).out == str(Path("some") / name)


def mcqa_input(folder):
    write_jsonl(folder / "piqa" / "validation.jsonl", [dict(goal="Boil", sol1="Heat", sol2="Cool", label=0)])
    return ["mcqa", "--local", folder]


COMMANDS = ("stdlib", "jsonl", "mcqa")


@pytest.fixture
def command(request, tmp_path, monkeypatch):
    """`python data.py` stdlib, jsonl or mcqa over small inputs, all but --out."""
    if request.param == "jsonl":
        path = write_jsonl(tmp_path / "a.jsonl", documents(TEXTS))
        return ["jsonl", path, "--tokenizer", "bytes"]
    if request.param == "mcqa":
        return mcqa_input(tmp_path / "questions")
    fake_stdlib(tmp_path / "lib")
    monkeypatch.setattr(data.sysconfig, "get_path", lambda name: str(tmp_path / "lib"))
    return ["stdlib"]


@pytest.mark.parametrize("command", COMMANDS, indirect=True)
def test_a_folder_that_is_not_ours_is_left_alone(tmp_path, command):
    (tmp_path / "theirs" / "download").mkdir(parents=True)
    (tmp_path / "theirs" / "piqa.jsonl").write_text("kept")
    status, _, error = script("data.py", *command, "--out", tmp_path / "theirs")
    assert status == 1 and "not empty" in error and "choose another --out" in error and "remove" not in error
    assert sorted(p.name for p in (tmp_path / "theirs").iterdir()) == ["download", "piqa.jsonl"]
    assert (tmp_path / "theirs" / "piqa.jsonl").read_text() == "kept"


def test_files_of_the_user_stay_where_they_are(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "mine" / "a.jsonl", documents(TEXTS))
    (tmp_path / "new").mkdir()
    monkeypatch.chdir(tmp_path / "new")
    arguments = ["jsonl", "../mine/a.jsonl", "--val_fraction", 0.3, "--tokenizer", "bytes", "--out", "."]
    assert script("data.py", *arguments)[0] == 0
    assert path.is_file() and (tmp_path / "new" / "meta.json").is_file()
    status, _, error = script("data.py", "stdlib", "--out", ".")
    assert status == 1 and "holds something else: choose another --out" in error


def test_two_preparations_of_one_folder_do_not_run_at_a_time(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", documents(TEXTS))
    with locked(tmp_path / "out", ""):
        with pytest.raises(UserError, match="another process is writing to .*out; wait for it, or choose another"):
            prepared(tmp_path / "out", [path])
    assert prepared(tmp_path / "out", [path])


@pytest.mark.parametrize("number, advice", [
    (errno.EACCES, "choose another --out"), (errno.ENOSPC, "make room and try again")])
@pytest.mark.parametrize("command", COMMANDS, indirect=True)
def test_what_cannot_be_written_comes_with_advice_that_fits(tmp_path, monkeypatch, command, number, advice):
    def refuse(path, *args, **kwargs):
        raise OSError(number, os.strerror(number), str(path))
    (tmp_path / "data").mkdir()
    monkeypatch.setattr(Path, "mkdir", refuse)
    status, _, error = script("data.py", *command, "--out", tmp_path / "data" / "out")
    assert status == 1 and f"out cannot be written ({os.strerror(number)}); {advice}" in error


def test_question_sets_do_not_go_into_a_folder_of_text(tmp_path):
    folder = make_folder(tmp_path)
    before = folder_bytes(folder)
    status, _, error = script("data.py", *mcqa_input(tmp_path / "questions"), "--out", folder)
    assert status == 1 and "holds text, not question sets: choose another --out" in error
    assert folder_bytes(folder) == before


def test_a_file_that_may_not_be_read_is_no_bad_document(tmp_path, monkeypatch):
    paths = [write_jsonl(tmp_path / name, documents(TEXTS)) for name in ("a.jsonl", "b.jsonl")]

    def refuse(path, *args):
        if path == paths[1]:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return open(path, *args)
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "open", refuse, raising=False)
        with pytest.raises(UserError, match="b.jsonl cannot be read .Permission denied"):
            prepared(tmp_path / "out", paths, skip_bad=True)
    meta = prepared(tmp_path / "out", paths, skip_bad=True)
    assert meta["skipped"] == 0 and meta["splits"]["train"]["documents"] == 2 * len(TEXTS)


def test_a_default_corpus_that_another_process_made_meanwhile_is_used(tmp_path, monkeypatch):
    fake_stdlib(tmp_path / "lib")
    write, out = data.write_stdlib, tmp_path / "stdlib"

    def slow(work, root):
        write(work, root)
        if not out.exists():                            # the other process
            work.rename(out)
            work.mkdir()
            write(work, root)
    monkeypatch.setattr(data, "write_stdlib", slow)
    assert data.prepare_stdlib(out, tmp_path / "lib")["splits"]["train"]["documents"] > 0
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("stdlib")] == ["stdlib"]


def test_an_empty_default_corpus_leaves_nothing_behind(tmp_path):
    (tmp_path / "lib").mkdir()
    with pytest.raises(UserError, match="no Python source.*python data.py jsonl"):
        data.prepare_stdlib(tmp_path / "data" / "stdlib", tmp_path / "lib")
    assert list((tmp_path / "data").iterdir()) == []


def test_a_finished_folder_is_left_alone_and_other_settings_are_refused(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "in.jsonl", documents(TEXTS))
    meta = prepared(tmp_path / "out", [path])
    monkeypatch.setattr(data, "append", None)
    assert prepared(tmp_path / "out", [path]) == meta
    with pytest.raises(UserError, match="size or time.: move it away, or choose"):
        prepared(tmp_path / "out", [path], val_fraction=0.5)
    (tmp_path / "out" / "meta.json").write_text("[]")
    with pytest.raises(UserError, match="damaged.*move .*out away"):
        prepared(tmp_path / "out", [path])
    with pytest.raises(UserError, match="not empty.*: choose another --out$"):
        prepared(tmp_path, [path])


def test_ctrl_c_says_how_to_go_on(tmp_path, monkeypatch):
    def stopped(*_):
        raise KeyboardInterrupt
    monkeypatch.setattr(prepare.Preparation, "add", stopped)
    path = write_jsonl(tmp_path / "a.jsonl", documents(TEXTS))
    status, _, error = script("data.py", "jsonl", path, "--tokenizer", "bytes", "--out", tmp_path / "out")
    assert status == 130 and "run the same command again and it continues" in error
