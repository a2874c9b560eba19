"""Texts and folders that data.py cannot use: each ends in a sentence that names the place, and nothing is lost."""
import os
import random

import pytest

import data
from configurator import lock
from configurator import UserError
from conftest import script
from test_data import TEXTS, documents, edit_meta, folder_bytes, make_folder, prepared, write_jsonl
from tools import prepare


REFUSED = {
    "truncated": (lambda f: os.truncate(f / "train.bin", 2), "truncated: remove .* and prepare it again"),
    "missing": (lambda f: (f / "train.bin").unlink(), "missing"),
    "an earlier format": (lambda f: edit_meta(f, format=1), "of another format"),
    "another tokenizer": (lambda f: edit_meta(f, tokenizer="gpt2"), "holds gpt2 tokens, not bytes .*--tokenizer=gpt2"),
    "another split": (lambda f: edit_meta(f, splits={}), "no train split: .*python data.py --help"),
    "question sets": (lambda f: (f / "meta.json").write_text('{"format": 2, "tasks": {}}'), "holds no text"),
    "a mask in the data": (lambda f: (f / "train.bin").write_bytes(b"\x01\x01" + (f / "train.bin").read_bytes()[2:]),
                           "token 257, outside its vocabulary"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_damaged_folder_is_refused(tmp_path, case):
    folder = make_folder(tmp_path)
    damage, message = REFUSED[case]
    damage(folder)
    with pytest.raises(UserError, match=message):
        data.TokenData(folder, "train", "bytes").sequences(16)


def test_a_text_shorter_than_a_sequence_is_refused(tmp_path):
    with pytest.raises(UserError, match="fewer than one sequence of 1,000,000"):
        data.TokenData(make_folder(tmp_path), "train").batch(0, 0, [0], 1, 10 ** 6)


def test_gpt2_without_its_files_is_one_sentence(monkeypatch):
    def unreachable(name):
        raise ConnectionError("no route to host")
    monkeypatch.setattr(data.tiktoken, "get_encoding", unreachable)
    with pytest.raises(UserError, match="TIKTOKEN_CACHE_DIR"):
        data.get_tokenizer.__wrapped__("gpt2")


GOOD = dict(text="good")
NOISE = [dict(text=random.Random(i).randbytes(2000).hex()) for i in range(40)]
BAD = {
    "not JSON": ("a.jsonl", [GOOD, b"{", GOOD], 0, "a.jsonl:2: not a JSON object"),
    "an array": ("a.jsonl", [[GOOD, GOOD]], 0, "a.jsonl:1: .* one is expected on each line"),
    "no text": ("a.jsonl.zst", [GOOD, dict(url="x", body="y"), GOOD], 0,
                'a.jsonl.zst:2: no text in "text"; --text_key .*.url., .body..'),
    "empty": ("a.jsonl.gz", [GOOD, GOOD, dict(text="")], 0, "a.jsonl.gz:3: an empty document"),
    "a byte order mark": ("a.jsonl", [GOOD, dict(text="\ufeff")], 0, "a.jsonl:2: an empty document"),
    "not UTF-8": ("a.jsonl", [GOOD, b'{"text": "\xff"}'], 0, "a.jsonl:2: .*utf-8"),
    "latin text": ("a.txt", [b"caf\xe9"], 0, "a.txt:1: .*utf-8"),
    "truncated gz": ("a.jsonl.gz", NOISE, 200, r"a.jsonl.gz:\d+: the rest of the file is damaged .*end-of-stream"),
    "truncated zst": ("a.jsonl.zst", NOISE, 200, r"a.jsonl.zst:\d+: the rest of the file is damaged .Compressed file"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named_by_file_and_line_and_can_be_skipped(tmp_path, case):
    name, rows, cut, message = BAD[case]
    bad = write_jsonl(tmp_path / name, rows)
    os.truncate(bad, bad.stat().st_size - cut)
    paths = [write_jsonl(tmp_path / "0.jsonl", documents(TEXTS)), bad,
             write_jsonl(tmp_path / "z.jsonl", documents(TEXTS))]
    with pytest.raises(UserError, match=message + ".*--skip_bad.* another --out$"):
        prepared(tmp_path / "out", paths)
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


@pytest.mark.parametrize("command", ["stdlib", "jsonl {path} --tokenizer bytes"])
def test_a_folder_that_is_not_ours_is_left_alone(tmp_path, command):
    command = command.format(path=write_jsonl(tmp_path / "a.jsonl", documents(TEXTS))).split()
    theirs = tmp_path / "theirs"
    for name in ("train.bin", "parts/000000.part", "parts/made.json"):         # names that look like ours
        (theirs / name).parent.mkdir(parents=True, exist_ok=True)
        (theirs / name).write_text("kept")
        status, _, error = script("data.py", *command, "--out", theirs)
        assert status == 1 and "not empty" in error and "choose another --out" in error and "remove" not in error
        assert [path for path in theirs.rglob("*") if path.is_file()] == [theirs / name]
        assert (theirs / name).read_text() == "kept"
        (theirs / name).unlink()


def test_files_of_the_user_stay_where_they_are(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "mine" / "a.jsonl", documents(TEXTS))
    (tmp_path / "new").mkdir()
    monkeypatch.chdir(tmp_path / "new")
    arguments = ["jsonl", "../mine/a.jsonl", "--val_fraction", 0.3, "--tokenizer", "bytes", "--out", "."]
    assert script("data.py", *arguments)[0] == 0
    assert path.is_file() and (tmp_path / "new" / "meta.json").is_file()
    before = folder_bytes(".")
    assert "local files" in script("data.py", "stdlib", "--out", ".")[1] and folder_bytes(".") == before


def test_two_preparations_of_one_folder_do_not_run_at_a_time(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", documents(TEXTS))
    (tmp_path / "out" / "parts").mkdir(parents=True)
    with lock(tmp_path / "out" / "parts" / "lock", ""):
        with pytest.raises(UserError, match="another process is writing to .*out; wait for it, or choose another"):
            prepared(tmp_path / "out", [path])
    assert prepared(tmp_path / "out", [path])


def test_a_file_that_may_not_be_read_is_no_bad_document(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", documents(TEXTS))

    def refuse(name, *args):
        if name == path:
            raise PermissionError(13, "Permission denied", str(name))
        return open(name, *args)
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "open", refuse, raising=False)
        with pytest.raises(UserError, match="a.jsonl cannot be read .Permission denied"):
            prepared(tmp_path / "out", [path], skip_bad=True)
    meta = prepared(tmp_path / "out", [path], skip_bad=True)
    assert meta["skipped"] == 0 and meta["splits"]["train"]["documents"] == len(TEXTS)


def test_a_finished_folder_is_left_alone_and_other_settings_are_refused(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "in.jsonl", documents(TEXTS))
    meta = prepared(tmp_path / "out", [path])
    monkeypatch.setattr(prepare, "write_file", None)
    assert prepared(tmp_path / "out", [path]) == meta
    with pytest.raises(UserError, match="size or time.: choose another --out"):
        prepared(tmp_path / "out", [path], val_fraction=0.5)
    with pytest.raises(UserError, match="not empty.*: choose another --out$"):
        prepared(tmp_path, [path])
