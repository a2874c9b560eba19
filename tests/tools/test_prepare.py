"""data.py's commands over texts of all formats. No network is used: the hub is a folder."""
import contextlib
import itertools
import json
import os
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import data
from configurator import UserError
from conftest import script
from test_data import TEXTS, decoded, documents, folder_bytes, prepared, write_jsonl
from tools import prepare


def test_gpt2_has_its_own_ids_and_the_mask_behind_them_and_counts_the_bytes_of_its_text():
    if not Path(os.environ.get("TIKTOKEN_CACHE_DIR", ""), "6d1cbeee0f20b3d9449abfede4726ed8212e3aee").exists():
        pytest.skip("the environment variable TIKTOKEN_CACHE_DIR names no folder with GPT-2's BPE files")
    gpt2, text = data.get_tokenizer("gpt2"), "Ĵ ångström \u2713 <|endoftext|> \U0001F600" * 3
    assert (gpt2.n_vocab, gpt2.eot_token, gpt2.decode([50257])) == (50258, 50256, "<|mask|>")
    assert gpt2.encode_ordinary("Hello world") == [15496, 995]
    tokens, n_bytes = data.encode(gpt2, text)
    assert tokens.tolist() == gpt2.encode_ordinary(text) + [50256]
    assert data.token_bytes("gpt2")[tokens].sum() == n_bytes == len(text.encode())


@pytest.mark.parametrize("name", ["a.jsonl", "a.json.gz", "a.jsonl.zst", "a.txt", "a.txt.gz", "array.json",
                                  "array.jsonl.gz", "strings.json.zst"])
def test_every_format_gives_the_same_tokens(tmp_path, name):
    text = "\ufeff" + "".join(f"line {i}\r\n" + "\r\n" * (i % 10 == 0) for i in range(5000)) + "\r\n"
    rows = dict(a=[text[:-2].encode()] if ".txt" in name else documents([text]), array=[documents([text])],
                strings=[b"\xef\xbb\xbf\r\n" + json.dumps([text], indent=1).encode()])[name.split(".")[0]]
    prepared(tmp_path / "out", [write_jsonl(tmp_path / name, rows)])
    assert decoded(tmp_path / "out", "train") == [text[1:].replace("\r\n", "\n")]


def text_command(tmp_path, files, *flags):
    """Runs `data.py text` over files {name: content}. Returns the documents of each split, and what it printed."""
    for name, content in files.items():
        (tmp_path / name).write_text(content, newline="")
    out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
    status, printed, error = script("data.py", "text", *(tmp_path / name for name in files), "--tokenizer=bytes",
                                    "--out", out, *flags)
    assert status == 0, error
    return [*(decoded(out, split) for split in data.read_meta(out)["splits"]), printed]


def jsonl(texts):
    return "\n".join(json.dumps(row) for row in documents(texts))


LINES = "".join(f"line {i}\n" for i in range(2000))


@pytest.mark.parametrize("text, most, before", [
    (LINES, None, "\n"), (LINES + "\n" * 5000, None, "\n"), ("word " * 3000, None, " "), ("€" * 3000, None, "€"),
    ("a\n" + "one line of words " * 500, None, " "), ("a" * 11_000_000 + "\n" + "b\n" * 800_000, 10 ** 6, "\n")],
    ids=["lines", "blank lines at the end", "words", "letters", "a long line", "at most 1 MB"])
def test_the_end_of_a_text_is_kept_from_a_line_a_word_or_a_letter(tmp_path, text, most, before):
    train, val, printed = text_command(tmp_path, {"my.TXT": text})
    assert train[0] + val[0] == text and train[0].endswith(before)
    size, most = len(val[0].rstrip()), most or len(text.rstrip()) // 10
    assert 0.9 * most - 1 <= size <= most
    kept, total = len(val[0].encode()), len(text.encode())
    assert f"kept {kept:,} of {total:,} bytes of text for validation, the end of" in printed


@pytest.mark.parametrize("n", [4, 10, 40])
def test_of_many_files_some_are_kept_and_of_a_few_the_ends(tmp_path, n):
    files = {f"{i}.txt": f"story {i} " + "and on it goes\n" * (20 + i % 7) for i in range(n)}
    train, val, printed = text_command(tmp_path, files | {"blank.txt": "\ufeff\r\n"})
    assert ("the end of each .txt" if n < 10 else f"{n // 10} of {n} documents") in printed
    assert sorted([a + b for a, b in zip(train, val)] if n < 10 else train + val) == sorted(files.values())


@pytest.mark.parametrize("n", [2, 3, 300])
def test_documents_are_kept_for_validation_also_of_two(tmp_path, n):
    texts = [f"document {i} " + "x" * 500 for i in range(n)]
    train, val, _ = text_command(tmp_path, {"a.JSONL": jsonl(texts)})
    assert sorted(train + val) == sorted(texts) and len(val) in (max(1, n // 10), n // 10 + 1)
    train, _ = text_command(tmp_path, {"a.JSONL": jsonl(texts)}, "--val_fraction=0")
    assert train == texts


def test_one_document_that_cannot_be_divided_is_told_and_leaves_the_folder_free(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", documents(["all there is"]))
    arguments = ["text", path, "--tokenizer=bytes", "--out", tmp_path / "out"]
    assert "--val_fraction 0" in script("data.py", *arguments)[2]
    assert "'\\n--' occurs nowhere" in script("data.py", *arguments, "--split_on", r"\n--")[2]
    assert script("data.py", *arguments, "--val_fraction", 0)[0] == 0          # what the first sentence says works


@pytest.mark.parametrize("mark, given", [("\r\n\r\n", r"\n\n"), ("\r\n\t", r"\r\n\t"), ("---", "---"), ("\\n", r"\\n")])
def test_a_separator_may_be_line_breaks_or_look_like_an_option(tmp_path, mark, given):
    texts = [f"poem {i}\nof two lines" for i in range(40)]
    train, val, printed = text_command(tmp_path, {"a.txt": mark.join(texts)}, f"--split_on={given}")
    assert sorted(train + val) == sorted(texts) and len(val) == 4 and "4 of 40 documents" in printed


def test_tokens_of_nanogpt_are_read_with_a_meta_json_of_three_fields(tmp_path):
    np.array([15496, 995, 50256] * 40, np.uint16).tofile(tmp_path / "val.bin")
    (tmp_path / "meta.json").write_text('{"format": 2, "tokenizer": "gpt2", "splits": {"val": {"tokens": 120}}}')
    assert data.TokenData(tmp_path, "val", "gpt2").sequences(3, 1).tolist() == [[15496, 995, 50256]]


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_the_text_of_a_special_token_is_told_and_can_end_documents(tmp_path, name):
    text = "one\n<|endoftext|>\ntwo<|endoftext|> \n <|endoftext|>three"
    files = {name: text + "<|endoftext|>four<|mask|>" if name == "a.txt" else jsonl([text, "four<|mask|>"])}
    train, printed = text_command(tmp_path, files, "--val_fraction=0", "--split_on", "")
    assert "1 documents contain <|endoftext|>" in printed and "--split_on '<|endoftext|>'" in printed
    assert "1 documents contain <|mask|>" in printed and "<|endoftext|>" in train[0]
    assert r"one\n<|endoftext|>\ntwo" in printed and ("three' [end of text] 'four" in printed) == (name == "a.jsonl")
    train, printed = text_command(tmp_path, files, "--val_fraction=0", "--split_on", "<|endoftext|>")
    assert train == ["one\n", "\ntwo", "three", "four<|mask|>"] and "contain <|endoftext|>" not in printed


def test_a_text_may_be_in_another_field_and_paths_may_begin_with_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_jsonl(tmp_path / "a.jsonl", [b"", dict(content="abc"), b"  ", dict(content="de", text="no"), b""])
    arguments = ["jsonl", "~/a.jsonl", "--tokenizer=bytes", "--val_fraction=0", "--out=~/out"]
    assert "another of its fields ['content']" in script("data.py", *arguments)[2]
    assert script("data.py", *arguments, "--text_key", "content")[0] == 0
    assert decoded(tmp_path / "out", "train") == ["abc", "de"]


LAYOUT = dict(dclm="global-shard_{0:02d}_of_10/local-shard_1_of_10/shard_00000000_processed.jsonl.zst",
              c4="en/c4-validation.{0:05d}-of-00008.json.gz", paloma="c4_en/val/val_{0}.jsonl.gz")


@pytest.mark.parametrize("name", LAYOUT)
def test_one_command_prepares_each_data_set_and_stops_at_its_budget(tmp_path, name):
    for i in range(3):
        write_jsonl(tmp_path / "hub" / LAYOUT[name].format(i), documents(TEXTS))
    (tmp_path / "hub" / "README.md").write_text("not data")
    out = tmp_path / "out"
    sizes = [len(text.encode()) + 1 for text in TEXTS] * 3
    size = sum(sizes[:70]) + 1          # the 71st document, in the second file, reaches it
    budget = ["--tokens", size, *["--val_fraction", 0] * (name == "dclm")]
    arguments = [name, "--local", tmp_path / "hub", "--tokenizer", "bytes", "--out", out, *budget]
    status, printed, _ = script("data.py", *arguments)
    split = "train" if name == "dclm" else "val"
    found = data.TokenData(out, split, "bytes")
    assert status == 0 and found.n_tokens == sum(sizes[:71]) and list(data.read_meta(out)["splits"]) == [split]
    assert f"{out}: {prepare.HUB[name][0]} a local copy" in printed and "'Document 0: naïve" in printed
    assert f"{split}: {found.n_tokens:,} tokens, 71 documents" in printed
    assert f"{1 - 71 / found.n_tokens:.3f} bytes per token" in printed
    write_jsonl(tmp_path / "hub" / LAYOUT[name].format(0), documents(["another copy"]))
    assert "was made from" in script("data.py", *arguments)[2]


def files_of(folder):
    return [path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file()]


def fake_hub(monkeypatch, root, log, broken="no file"):
    """A stand-in for huggingface_hub over a local folder."""
    def download(repo, name, local_dir, repo_type, revision):
        assert repo_type == "dataset" and revision == "a" * 40
        if broken in name:
            raise ConnectionError("reset")
        log.append(len(files_of(local_dir)))
        target = Path(local_dir, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((root / name).read_bytes())
        return str(target.resolve())                    # as the library does
    api = types.SimpleNamespace(dataset_info=lambda repo, revision: types.SimpleNamespace(sha="a" * 40),
                                list_repo_files=lambda repo, repo_type, revision: files_of(root))
    module = types.SimpleNamespace(HfApi=lambda: api, hf_hub_download=download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)


def test_a_download_that_breaks_off_goes_on_and_leaves_no_copies(tmp_path, monkeypatch):
    root, log = tmp_path / "hub", []
    for i in range(12):
        write_jsonl(root / LAYOUT["dclm"].format(i), documents(TEXTS[i::12]))
    arguments = ["dclm", "--tokens", "1e9", "--tokenizer", "bytes", "--val_fraction", 0.2, "--out"]
    monkeypatch.chdir(tmp_path)
    fake_hub(monkeypatch, root, log, "shard_08")
    assert "check the network" in script("data.py", *arguments, "out")[2]      # a path relative to this folder
    fake_hub(monkeypatch, root, log)
    assert script("data.py", *arguments, "out")[0] == 0
    assert script("data.py", *arguments, tmp_path / "whole")[0] == 0
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "whole")
    assert json.loads((tmp_path / "out" / "meta.json").read_text())["revision"] == "a" * 40
    assert max(log) < 6, "downloads pile up instead of being removed once they are read"


# ----------------------------------------------------------------------------------------------
# Stopped, and started again

def test_tokens_that_somebody_removed_meanwhile_are_missed(tmp_path, monkeypatch):
    paths = [write_jsonl(tmp_path / f"{i}.jsonl", rows) for i, rows in enumerate((documents(TEXTS), [b"bad"]))]
    monkeypatch.setattr(prepare, "SYNC_SECONDS", 0)
    with pytest.raises(UserError, match="1.jsonl:1: not a JSON object"):
        prepared(tmp_path / "out", paths)
    (tmp_path / "out" / "train.bin").unlink()
    with pytest.raises(UserError, match="train.bin is shorter than when it was written: choose another --out"):
        prepared(tmp_path / "out", paths, skip_bad=True)


@pytest.mark.parametrize("seconds", [0, 1])
@pytest.mark.parametrize("texts, fraction", [(TEXTS, 0.2), (["one", "two", "three"], 1e-9)])
def test_a_preparation_stopped_at_any_write_goes_on_to_identical_files(tmp_path, monkeypatch, texts, fraction, seconds):
    """Killed at the n-th moment, for every n. The moments are before and after each write to disk."""
    monkeypatch.setattr(prepare, "SYNC_SECONDS", seconds)
    train = [write_jsonl(tmp_path / f"{i}.jsonl.gz", documents(texts[i::3])) for i in range(3)]
    settings = dict(train=train, val_fraction=fraction)
    prepared(tmp_path / "whole", **settings)

    def killed_at(n, write, moments):
        def moment():
            if next(moments) == n:
                raise KeyboardInterrupt
        return lambda *args: (moment(), write(*args), moment())
    for n in itertools.count():
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            moments = itertools.count()
            for name in ("fsync", "replace"):
                patch.setattr(os, name, killed_at(n, getattr(os, name), moments))
            prepared(tmp_path / f"{n}", **settings)
            break                                       # it has fewer moments than n
        prepared(tmp_path / f"{n}", **settings)
        assert folder_bytes(tmp_path / f"{n}") == folder_bytes(tmp_path / "whole"), n
    assert n > (20 if seconds == 0 else 10)
