"""Texts and folders that data.py cannot use: each ends in a sentence that names the place, and nothing is lost."""
import gzip
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

import data
from configurator import UserError, lock
from conftest import script
from test_data import TEXTS, decoded, documents, edit_meta, make_folder, prepared, write_jsonl
from tools import prepare


REFUSED = {
    "truncated": (lambda f: os.truncate(f / "train.bin", 2), "truncated: remove .* and prepare it again"),
    "an earlier format": (lambda f: edit_meta(f, format=1), "of another format"),
    "no JSON": (lambda f: (f / "meta.json").write_text('{"format": 2,}'), "is damaged, or of another"),
    "a misspelt tokenizer": (lambda f: edit_meta(f, tokenizer="gpt-2"), "meta.json is damaged, or of another"),
    "no folders of splits": (lambda f: edit_meta(f, splits=dict(train=1, val=1)), "meta.json is damaged, or of another"),
    "another tokenizer": (lambda f: edit_meta(f, tokenizer="gpt2"), "gpt2 tokens, not bytes .* with --tokenizer bytes"),
    "another split": (lambda f: edit_meta(f, splits={}), "no train split: .*python data.py --help"),
    "a mask in the data": (lambda f: (f / "train.bin").write_bytes(b"\x01\x01" + (f / "train.bin").read_bytes()[2:]),
                           "token 257, outside its vocabulary"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_damaged_folder_is_refused(tmp_path, case):
    folder, (damage, message) = make_folder(tmp_path), REFUSED[case]
    damage(folder)
    with pytest.raises(UserError, match=message):
        data.TokenData(folder, "train", "bytes").sequences(16)


def test_a_folder_whose_record_is_damaged_is_not_prepared_over(tmp_path):
    (tmp_path / "a.txt").write_text("some text\n" * 400)
    argv = ["data.py", "text", f"{tmp_path}/a.txt", "--tokenizer", "bytes", "--out", f"{tmp_path}/out"]
    assert script(*argv)[0] == 0
    before = (tmp_path / "out" / "train.bin").read_bytes()
    for damaged in ("{", "[]"):
        (tmp_path / "out" / "meta.json").write_text(damaged)
        status, _, error = script(*argv)
        assert status == 1 and "was made from other files" in error and "Traceback" not in error
    assert (tmp_path / "out" / "train.bin").read_bytes() == before


def test_gpt2_without_its_files_and_a_tokenizer_without_all_bytes_are_one_sentence(monkeypatch):
    def unreachable(name):
        raise ConnectionError("no route to host")
    monkeypatch.setattr(data.tiktoken, "get_encoding", unreachable)
    with pytest.raises(UserError, match="TIKTOKEN_CACHE_DIR .*--tokenizer bytes"):
        data.get_tokenizer.__wrapped__("gpt2")
    dna = data.tiktoken.Encoding("dna", pat_str=".", mergeable_ranks={b"A": 0}, special_tokens={})
    monkeypatch.setattr(data.tiktoken, "get_encoding", lambda name: dna)
    with pytest.raises(UserError, match="no token for the byte b'.x00'"):
        data.get_tokenizer.__wrapped__("gpt2")


GOOD = dict(text="good")
NOISE = [dict(text=random.Random(i).randbytes(2000).hex()) for i in range(40)]
BAD = {
    "not JSON": ("a.jsonl", [GOOD, b"{", GOOD], 0, "a.jsonl:2: not a JSON object"),
    "an array that is not": ("a.json", [b'[{"text": "a"},', b"]"], 0, "a.json:1: .*line 2 column 1.* or one array of"),
    "in an array": ("a.json", [[GOOD, 7, GOOD]], 0, "a.json:2: not a JSON object .7."),
    "no text": ("a.jsonl.zst", [GOOD, dict(url="x", body="y"), GOOD], 0,
                'a.jsonl.zst:2: no text in "text"; --text_key .*.url., .body..'),
    "empty": ("a.jsonl.gz", [GOOD, GOOD, dict(text="\ufeff")], 0, "a.jsonl.gz:3: an empty document"),
    "not UTF-8": ("a.jsonl", [GOOD, b'{"text": "\xff"}'], 0, "a.jsonl is not UTF-8 .line 2, byte 0xff"),
    "damaged": ("a.txt", ["é\n".encode(), b"\xff"], 0, "a.txt is not UTF-8 .line 3, byte 0xff"),
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
    cure = "-f utf-8 -c -t" if case == "damaged" else "-f cp1252" if case == "not UTF-8" else "another --out$"
    with pytest.raises(UserError, match=f"{message}.*; add --skip_bad and run.*{cure}"):
        prepared(tmp_path / "out", paths)
    meta = prepared(tmp_path / "out", paths, skip_bad=True)
    assert meta["skipped"] == 1 and meta["splits"]["train"]["documents"] >= 2 * len(TEXTS)


@pytest.mark.skipif(not shutil.which("iconv"), reason="needs the program iconv")
@pytest.mark.parametrize("name", ["it's 1.txt", "a b.txt.gz"])
@pytest.mark.parametrize("encoding, byte", [("cp1252", "line 2, byte 0x93"), ("utf-16", "0xff"), ("utf-16-le", "0x00"),
                                            ("utf-16-be", "0x00")])
def test_another_encoding_is_told_with_the_command_that_converts_it(tmp_path, monkeypatch, name, encoding, byte):
    monkeypatch.chdir(tmp_path)
    text = "a book\n" + "\u201ccaf\xe9\u201d\n" * (encoding in ("cp1252", "utf-16"))
    Path(name).write_bytes((gzip.compress if name.endswith("gz") else bytes)(text.encode(encoding)))
    error = script("data.py", "text", name, "--tokenizer=bytes", "--out=out")[2]
    assert f"{name} is not UTF-8 (line" in error and byte in error and "--skip_bad" not in error
    subprocess.run(error.split("new file: ")[1], shell=True, check=True)
    prepared("new", [*Path().glob("utf8-*.txt")])
    assert decoded("new", "train") == [text]


def test_half_a_surrogate_pair_becomes_the_replacement_character():
    tokens, n_bytes = data.encode(data.get_tokenizer("bytes"), "a\ud800b")
    assert bytes(tokens[:-1].tolist()).decode() == "a\ufffdb" and n_bytes == 5


@pytest.mark.parametrize("command", ["stdlib", "jsonl {path} --tokenizer bytes"])
def test_a_folder_that_is_not_ours_is_left_alone(tmp_path, command):
    command = command.format(path=write_jsonl(tmp_path / "a.jsonl", documents(TEXTS))).split()
    theirs = tmp_path / "theirs"
    for name in ("train.bin", "parts/000000.part", "parts/made.json"):         # names that look like ours
        (theirs / name).parent.mkdir(parents=True, exist_ok=True)
        (theirs / name).write_text("kept")
        status, _, error = script("data.py", *command, "--out", theirs)
        assert status == 1 and "not empty" in error and "remove" not in error
        assert [path for path in theirs.rglob("*") if path.is_file()] == [theirs / name]
        assert (theirs / name).read_text() == "kept"
        (theirs / name).unlink()


def test_two_preparations_of_one_folder_do_not_run_at_a_time(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", documents(TEXTS))
    (tmp_path / "out" / "parts").mkdir(parents=True)
    refusal = "another process is writing to .*out; wait for it, or choose another"
    with lock(tmp_path / "out" / "parts" / "lock", ""), pytest.raises(UserError, match=refusal):
        prepared(tmp_path / "out", [path])
    assert prepared(tmp_path / "out", [path])


def test_a_file_that_may_not_be_read_is_no_bad_document(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", documents(TEXTS))
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "open", lambda name, *mode: open("/no" if name == path else name, *mode), raising=False)
        with pytest.raises(UserError, match="a.jsonl cannot be read .No such file"):
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
    os.utime(path, ns=(0, 0))                           # a text that has changed may have the size that it had
    with pytest.raises(UserError, match="or the files have changed"):
        prepared(tmp_path / "out", [path])
