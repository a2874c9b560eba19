"""Text becomes tokens, and tokens become training windows; bits per byte; the default corpus."""
import gzip
import itertools
import json
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import data
from tools import prepare

TEXTS = [f"Document {i}: " + "naïve café \u2713 " * (i % 7 + 1) for i in range(60)]


def write_jsonl(path, rows):
    """Rows (or ready lines, as bytes) into .jsonl, .gz or .zst, by the name's ending."""
    lines = [r if isinstance(r, bytes) else json.dumps(r).encode() for r in rows]
    content = b"".join(line + b"\n" for line in lines)
    if path.suffix == ".gz":
        content = gzip.compress(content)
    if path.suffix == ".zst":                           # of two frames, with the window of `zstd --long=30`
        zstd, half = prepare.zstd(), len(content) // 2
        press = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 30})
        content = zstd.compress(content[:half]) + press.compress(content[half:]) + press.flush()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def documents(texts):
    return [dict(text=text, url="http://example.org") for text in texts]


def prepared(out, train, val=(), **changes):
    """Prepares files as `data.py jsonl` does. Returns the content of meta.json."""
    sources = prepare.local_sources(train, "train") + prepare.local_sources(val, "val")
    settings = dict(tokenizer="bytes", tokens=0, val_fraction=0.0, split_on="", text_key="text", skip_bad=False)
    return prepare.Preparation(out, sources, types.SimpleNamespace(**settings | changes), "a test").run()


def folder_bytes(folder):
    """{name: content} of all files of a folder."""
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def decoded(folder, split):
    """The documents of a split of byte tokens."""
    tokens = np.fromfile(Path(folder, f"{split}.bin"), "<u2")
    documents = np.split(tokens, np.flatnonzero(tokens == 256) + 1)            # each ends in 256; nothing follows
    return [document[:-1].astype(np.uint8).tobytes().decode() for document in documents[:-1]]


def make_folder(tmp_path, texts=TEXTS, **settings):
    path = write_jsonl(tmp_path / "in.jsonl", documents(texts))
    prepared(tmp_path / "out", [path], **settings)
    return tmp_path / "out"


def edit_meta(folder, **changes):
    (folder / "meta.json").write_text(json.dumps(data.read_meta(folder) | changes))


def test_documents_are_packed_with_end_of_text_between_them(tmp_path):
    train = data.TokenData(make_folder(tmp_path), "train", "bytes")
    expected = [list(text.encode()) + [256] for text in TEXTS]
    assert train.sequences(train.n_tokens)[0].tolist() == list(itertools.chain(*expected))
    counts = data.read_meta(tmp_path / "out")["splits"]["train"]
    assert counts["documents"] == len(TEXTS) and counts["utf8_bytes"] == sum(len(text.encode()) for text in TEXTS)
    assert train.n_tokens == counts["utf8_bytes"] + len(TEXTS)


def test_the_order_of_windows_does_not_depend_on_ranks_micro_batches_or_resuming(tmp_path):
    """An epoch shows every window once, in an order of its own."""
    train = data.TokenData(make_folder(tmp_path), "train")
    n, windows = train.n_windows(16), train.sequences(16).tolist()
    first, second = (train.batch(7, step, range(n), n, 16).tolist() for step in range(2))
    assert sorted(first) == sorted(second) == sorted(windows)
    assert first != second and first != windows and train.batch(8, 0, range(n), n, 16).tolist() != first
    data.permutation.cache_clear()                      # as in a run that was resumed, at any step
    for step in reversed(range(2 * n // 8)):
        last, *others = (train.batch(7, step, rows, 8, 16).tolist() for rows in ([6, 7], [0, 1, 2], [3], [4, 5]))
        assert sum([*others, last], []) == (first + second)[8 * step:8 * step + 8]


def test_several_folders_are_one_series_of_windows_in_their_order(tmp_path):
    folders = [make_folder(tmp_path / name, [f"{name}{i}" * (i % 5 + 1) for i in range(ord(name))]) for name in "abc"]
    alone = [data.TokenData(folder, "train") for folder in folders]
    windows = torch.cat([each.sequences(16) for each in alone])                # the ends of the folders are left out
    paths = ",".join(map(str, folders))
    together = data.TokenData(paths, "train", "bytes")
    assert together.sequences(16).tolist() == windows.tolist()
    assert together.sequences(16, 7).tolist() == windows[[i * len(windows) // 7 for i in range(7)]].tolist()
    n, order = len(windows), data.permutation(3, 1, len(windows))
    assert data.TokenData(paths, "train").batch(3, 1, range(n), n, 16).tolist() == windows[order].tolist()
    assert together.n_tokens == sum(each.n_tokens for each in alone)
    with pytest.raises(data.UserError, match="short/out/train.bin has 2 tokens, fewer than one sequence"):
        data.TokenData(f"{paths},{make_folder(tmp_path / 'short', ['x'])}", "train").sequences(16)
    edit_meta(tmp_path / "b" / "out", tokenizer="gpt2")
    with pytest.raises(data.UserError, match="b/out holds gpt2 tokens, not bytes tokens"):
        data.TokenData(paths, "train")


def test_bits_per_byte_divide_by_the_bytes_of_the_source_documents(tmp_path):
    train = data.TokenData(make_folder(tmp_path, texts=["aé", "b\u2713c", "xyz"]), "train")   # 3 + 5 + 3 bytes
    assert train.sequence_bytes(14).tolist() == [11]
    assert data.bits_per_byte(np.log(2), 14, 11) == pytest.approx(14 / 11)     # a bit a token
    assert train.sequence_bytes(5).tolist() == [4, 4]   # a C3 A9 eot b | E2 9C 93 c eot | x y z eot
    assert train.sequence_bytes(2).tolist() == [2, 1, 2, 2, 1, 2, 1]
    assert train.sequence_bytes(2, 3).tolist() == [2, 2, 1]         # spread: windows 0, 2 and 4 of 7
    assert train.sequences(2, 3).tolist() == train.sequences(2)[[0, 2, 4]].tolist()
    assert train.sequences(5, 1).shape == (1, 5) and train.sequences(5, 99).shape == (2, 5)


def test_byte_bigrams_are_add_one_counts():
    train, val = torch.tensor([0, 1, 0, 256]), torch.tensor([[0, 1], [1, 256]])
    bigram = np.array([2 / 258, 2 / 259, 1 / 258, 1 / 258])         # eot-0, 0-1, 1-1, 1-eot
    assert data.byte_bigrams(train, val) == pytest.approx(-np.log2(bigram).sum() / 3)


def test_the_default_corpus_is_the_standard_library_split_by_file(tmp_path):
    files = {f"package{i % 3}/module{i}.py": f"x = {i}\r\n" for i in range(60)} | {"latin.py": "\xe9", "empty.py": ""}
    excluded = "test/a.py", "site-packages/b.py", "encodings/c.py", "package0/tests/d.py", "e.c"
    for name, content in (files | dict.fromkeys(excluded, "excluded")).items():
        (tmp_path / "lib" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lib" / name).write_bytes(content.encode("latin-1"))
    meta = data.prepare_stdlib(tmp_path / "data" / "stdlib", tmp_path / "lib")
    train, val = (data.TokenData(tmp_path / "data" / "stdlib", s, "bytes") for s in ("train", "val"))
    texts = [bytes(t for t in d.sequences(1).flatten().tolist() if t < 256).decode() for d in (train, val)]
    assert meta["splits"]["train"]["documents"] + meta["splits"]["val"]["documents"] == 60
    assert set(texts[0].split("\n")) - {""} == {f"x = {i}" for i in range(60)} - set(texts[1].split("\n"))
    assert meta["skipped"] == 1 and [p.name for p in (tmp_path / "data").iterdir()] == ["stdlib"]
    first = folder_bytes(tmp_path / "data" / "stdlib")
    data.prepare_stdlib(tmp_path / "again", tmp_path / "lib")
    assert folder_bytes(tmp_path / "again") == first
