"""data.py's commands over texts of all formats. No network is used: the hub is a folder."""
import contextlib
import gzip
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
from test_data import TEXTS, documents, folder_bytes, make_folder, prepared, write_jsonl
from tools import prepare


def test_bytes_have_their_own_value_as_token():
    tokenizer = data.get_tokenizer("bytes")
    assert (tokenizer.n_vocab, tokenizer.eot_token) == (258, 256)
    assert tokenizer.encode_ordinary("hé") == list("hé".encode()) and tokenizer.decode([104, 195, 169]) == "hé"
    with pytest.raises(UserError, match="bytes or gpt2"):
        data.get_tokenizer("gpt3")


def test_gpt2_has_its_own_ids_and_the_mask_behind_them_and_counts_the_bytes_of_its_text():
    if not Path(os.environ.get("TIKTOKEN_CACHE_DIR", ""), "6d1cbeee0f20b3d9449abfede4726ed8212e3aee").exists():
        pytest.skip("the environment variable TIKTOKEN_CACHE_DIR names no folder with GPT-2's BPE files")
    gpt2 = data.get_tokenizer("gpt2")
    assert (gpt2.n_vocab, gpt2.eot_token) == (50258, 50256)
    assert gpt2.encode_ordinary("Hello world") == [15496, 995]
    assert gpt2.decode([gpt2.n_vocab - 1]) == "<|mask|>"
    text = "Ĵ ångström \u2713 <|endoftext|> \U0001F600" * 3
    tokens, n_bytes = data.encode(gpt2, text)
    assert tokens.tolist() == gpt2.encode_ordinary(text) + [50256]
    assert data.token_bytes("gpt2")[tokens].sum() == n_bytes == len(text.encode())


def test_a_zst_file_of_many_frames_and_with_a_long_window_is_read_whole(tmp_path):
    options = prepare.zstd().CompressionParameter
    press = prepare.zstd().ZstdCompressor(options={options.window_log: 30})    # as `zstd --long=30` does
    first, *lines = [json.dumps(row).encode() + b"\n" for row in documents(TEXTS)]
    frames = [prepare.zstd().compress(first), *map(press.compress, lines), press.flush()]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(frames))
    assert prepared(tmp_path / "out", [tmp_path / "a.jsonl.zst"])["splits"]["train"]["documents"] == len(TEXTS)


def decoded(folder, split):
    """The documents of a split of byte tokens."""
    tokens = np.fromfile(folder / f"{split}.bin", "<u2")
    documents = np.split(tokens, np.flatnonzero(tokens == 256) + 1)            # each ends in 256; nothing follows
    return [document[:-1].astype(np.uint8).tobytes().decode() for document in documents[:-1]]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json.gz", "a.jsonl.zst", "a.txt", "a.txt.gz"])
def test_every_format_gives_the_same_tokens(tmp_path, name):
    text = "\ufeff" + "".join(f"line {i}\r\n" + "\r\n" * (i % 10 == 0) for i in range(5000))
    if ".txt" in name:
        (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    else:
        write_jsonl(tmp_path / name, documents([text]))
    prepared(tmp_path / "out", [tmp_path / name])
    assert decoded(tmp_path / "out", "train") == [text[1:].replace("\r\n", "\n")]


@pytest.mark.parametrize("text, kept", [
    pytest.param("".join(f"line {i}\n" for i in range(2000)), None, id="a tenth, from the beginning of a line"),
    pytest.param("a" * 11_000_000 + "\n" + "b\n" * 800_000, 10 ** 6, id="at most 1 MB"),
    pytest.param("€" * 3000, 900, id="one line")])
def test_the_end_of_one_text_file_is_kept_for_validation(tmp_path, text, kept):
    (tmp_path / "my.TXT").write_text(text)
    out = tmp_path / "out"
    status, printed, error = script("data.py", "jsonl", tmp_path / "my.TXT", "--tokenizer=bytes", "--out", out)
    assert status == 0, error
    train, val = decoded(out, "train"), decoded(out, "val")
    assert len(train) == len(val) == 1 and train[0] + val[0] == text
    size = len(val[0].encode())
    assert size == kept or kept is None and 0 <= len(text) // 10 - size < 20 and train[0].endswith("\n")
    assert f"kept {size:,} of {len(text.encode()):,} bytes of text for validation" in printed


@pytest.mark.parametrize("n", [2, 3, 300])
def test_documents_are_kept_for_validation_and_the_last_one_where_chance_leaves_none(tmp_path, n):
    texts = [f"document {i} " + "x" * 500 for i in range(n)]
    path, out = write_jsonl(tmp_path / "a.JSONL", documents(texts)), tmp_path / "out"
    assert script("data.py", "jsonl", path, "--tokenizer=bytes", "--out", out)[0] == 0
    train, val = decoded(out, "train"), decoded(out, "val")
    assert sorted(train + val) == sorted(texts) and (len(val) == 1 if n < 4 else 10 < len(val) < 60)
    assert val == texts[-1:] or n > 3
    counts = data.read_meta(out)["splits"]
    assert counts["val"]["utf8_bytes"] == len("".join(val)) and counts["train"]["documents"] == len(train)
    assert script("data.py", "jsonl", path, "--tokenizer=bytes", "--val_fraction=0", "--out", tmp_path / "all")[0] == 0
    assert decoded(tmp_path / "all", "train") == texts and list(data.read_meta(tmp_path / "all")["splits"]) == ["train"]


def test_one_document_that_cannot_be_divided_is_told_and_leaves_the_folder_free(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", documents(["all there is"]))
    arguments = ["jsonl", path, "--tokenizer=bytes", "--out", tmp_path / "out"]
    status, _, error = script("data.py", *arguments)
    assert status == 1 and "--val_fraction 0" in error
    assert script("data.py", *arguments, "--val_fraction", 0)[0] == 0          # what the sentence says works


def test_tokens_of_nanogpt_are_read_with_a_meta_json_of_three_fields(tmp_path):
    np.array([15496, 995, 50256] * 40, np.uint16).tofile(tmp_path / "val.bin")
    (tmp_path / "meta.json").write_text('{"format": 2, "tokenizer": "gpt2", "splits": {"val": {"tokens": 120}}}')
    assert data.TokenData(tmp_path, "val", "gpt2").sequences(3, 1).tolist() == [[15496, 995, 50256]]


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_the_text_of_a_special_token_is_told_and_can_end_documents(tmp_path, name):
    text = "one\n<|endoftext|>\ntwo<|endoftext|> \n <|endoftext|>three"
    path = write_jsonl(tmp_path / "a.jsonl", documents([text, "four"]))
    if name == "a.txt":
        path = tmp_path / name
        path.write_text(text + "<|endoftext|>four")
    arguments = ["jsonl", path, "--tokenizer=bytes", "--val_fraction=0", "--out"]
    status, printed, _ = script("data.py", *arguments, tmp_path / "plain", "--split_on", "")
    assert "1 documents contain <|endoftext|>" in printed and "--split_on '<|endoftext|>'" in printed
    assert "<|endoftext|>" in decoded(tmp_path / "plain", "train")[0]
    status, printed, _ = script("data.py", *arguments, tmp_path / "split", "--split_on", "<|endoftext|>")
    assert status == 0 and "documents contain" not in printed
    assert decoded(tmp_path / "split", "train") == ["one\n", "\ntwo", "three", "four"]
    shown = script("data.py", "show", tmp_path / "plain")[1]
    assert r"one\n<|endoftext|>\ntwo" in shown and ("three' [end of text] 'four'" in shown) == (name == "a.jsonl")


def test_a_text_may_be_in_another_field_and_paths_may_begin_with_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_jsonl(tmp_path / "a.jsonl", [dict(content="abc"), dict(content="de", text="no")])
    arguments = ["jsonl", "~/a.jsonl", "--tokenizer=bytes", "--val_fraction=0", "--out=~/out"]
    assert "another of its fields ['content']" in script("data.py", *arguments)[2]
    assert script("data.py", *arguments, "--text_key", "content")[0] == 0
    assert decoded(tmp_path / "out", "train") == ["abc", "de"]


LAYOUT = {
    "dclm": "global-shard_{0:02d}_of_10/local-shard_1_of_10/shard_00000000_processed.jsonl.zst",
    "c4": "en/c4-validation.{0:05d}-of-00008.json.gz",
    "paloma": "c4_en/val/val_{0}.jsonl.gz",
}


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
    assert script("data.py", *arguments)[0] == 0
    split = "train" if name == "dclm" else "val"
    found = data.TokenData(out, split, "bytes")
    assert found.n_tokens == sum(sizes[:71]) and list(data.read_meta(out)["splits"]) == [split]
    assert data.read_meta(out)["source"] == prepare.HUB[name][0]


def fake_hub(monkeypatch, root, log, fail=None):
    """A stand-in for huggingface_hub over a local folder."""
    def download(repo, name, local_dir, repo_type, revision):
        assert repo_type == "dataset" and revision == "a" * 40
        if fail and fail(name):
            raise fail(name)
        log.append(len([path for path in Path(local_dir).rglob("*") if path.is_file()]))
        target = Path(local_dir, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((root / name).read_bytes())
        return str(target.resolve())                    # as the library does

    class HfApi:
        def dataset_info(self, repo, revision):
            return types.SimpleNamespace(sha="a" * 40)

        def list_repo_files(self, repo, repo_type, revision):
            return [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]

    module = types.SimpleNamespace(HfApi=HfApi, hf_hub_download=download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)


def test_a_download_that_breaks_off_goes_on_and_leaves_no_copies(tmp_path, monkeypatch):
    root, log = tmp_path / "hub", []
    for i in range(12):
        write_jsonl(root / LAYOUT["dclm"].format(i), documents(TEXTS[i::12]))
    arguments = ["dclm", "--tokens", "1e9", "--tokenizer", "bytes", "--val_fraction", 0.2, "--out"]
    broken = lambda name: ConnectionError("reset") if "shard_08" in name else None
    monkeypatch.chdir(tmp_path)
    fake_hub(monkeypatch, root, log, broken)
    status, _, error = script("data.py", *arguments, "out")                    # a path relative to this folder
    assert status == 1 and "check the network" in error
    fake_hub(monkeypatch, root, log)
    assert script("data.py", *arguments, "out")[0] == 0
    assert script("data.py", *arguments, tmp_path / "whole")[0] == 0
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "whole")
    assert json.loads((tmp_path / "out" / "meta.json").read_text())["revision"] == "a" * 40
    assert max(log) < 6, "downloads pile up instead of being removed once they are read"


def test_show_prints_counts_bytes_per_token_and_text(tmp_path):
    folder = make_folder(tmp_path)
    status, printed, _ = script("data.py", "show", folder)
    assert status == 0
    n_bytes = sum(len(text.encode()) for text in TEXTS)
    assert f"{n_bytes + 60:,} tokens" in printed and "60 documents" in printed
    assert f"{n_bytes / (n_bytes + 60):.3f} bytes per token" in printed and "Document 0" in printed


# ----------------------------------------------------------------------------------------------
# Stopped, and started again

def test_a_changed_text_is_not_taken_for_the_old_one(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [dict(text="I am teh king")])
    prepared(tmp_path / "out", [path])
    write_jsonl(path, [dict(text="I am the king")])                            # of the same name and size
    os.utime(path, ns=(0, 0))
    with pytest.raises(UserError, match="made from other files"):
        prepared(tmp_path / "out", [path])


def test_tokens_that_somebody_removed_meanwhile_are_missed(tmp_path):
    paths = [write_jsonl(tmp_path / f"{i}.jsonl", rows) for i, rows in enumerate((documents(TEXTS), [b"bad"]))]
    with pytest.raises(UserError, match="1.jsonl:1: not a JSON object"):
        prepared(tmp_path / "out", paths)
    (tmp_path / "out" / "train.bin").unlink()
    with pytest.raises(UserError, match="train.bin is shorter than when it was written: choose another --out"):
        prepared(tmp_path / "out", paths, skip_bad=True)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("texts, fraction", [(TEXTS, 0.2), (["one", "two", "three"], 1e-9)])   # 1e-9: the last is moved
def test_a_preparation_stopped_at_any_write_goes_on_to_identical_files(tmp_path, monkeypatch, texts, fraction):
    """Killed at the n-th moment, for every n. The moments are before and after each write to disk."""
    train = [write_jsonl(tmp_path / f"{i}.jsonl.gz", documents(texts[i::3])) for i in range(3)]
    settings = dict(train=train, val_fraction=fraction)
    prepared(tmp_path / "whole", **settings)

    def killed_at(n, write, moments):
        def moment():
            if next(moments) == n:
                raise Killed
        return lambda *args: (moment(), write(*args), moment())
    for n in itertools.count():
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            moments = itertools.count()
            for name in ("fsync", "replace"):
                patch.setattr(os, name, killed_at(n, getattr(os, name), moments))
            prepared(tmp_path / f"{n}", **settings)
            break                                       # it has fewer moments than n
        prepared(tmp_path / f"{n}", **settings)
        assert folder_bytes(tmp_path / f"{n}") == folder_bytes(tmp_path / "whole"), n
    assert n > 20
