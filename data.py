"""Text in, shards of tokens out, and windows of those tokens back for training and evaluation.

A prepared folder holds uint16 shards (train_00000.bin, ...), one small table per split with the token and UTF-8
byte count of every document, and meta.json, written last: a folder without it is unfinished. Documents are packed
one after another with end-of-text behind each; bits per byte divide by the bytes of the documents themselves.

    python data.py stdlib                                       # the default corpus, nothing is downloaded
    python data.py jsonl shard_*.jsonl.zst --val valid.jsonl.zst --out data/mine
"""
import argparse
import functools
import gzip
import hashlib
import json
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
import time
import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import tiktoken
import torch

MAGIC, VERSION = 0x42444C4D, 1      # "BDLM"
HEADER_WORDS = 256                  # int32 words: magic, version, number of tokens, zeros
HEADER_BYTES = 4 * HEADER_WORDS
SHARD_TOKENS = 100_000_000
BATCH_BYTES = 1 << 20               # input handed to one tokenising thread at a time
SPLITS = ("train", "val")


class DataError(Exception):
    """A mistake the user can mend; its message is one sentence that says how."""


# -- tokenizers -----------------------------------------------------------------------------------------------------

@functools.lru_cache(maxsize=None)
def get_tokenizer(name):
    """The tokenizer called `name`, "bytes" or "gpt2", as a tiktoken.Encoding; the mask is its last id.

    bytes: 256 byte values, <|endoftext|> 256, <|mask|> 257. gpt2: GPT-2's 50,257 ids, then <|mask|> 50257.
    Raises DataError for another name, and when GPT-2's files are neither cached nor reachable.
    """
    if name == "bytes":
        ranks = {bytes([i]): i for i in range(256)}
        special = {"<|endoftext|>": 256, "<|mask|>": 257}
        return tiktoken.Encoding("bytes", pat_str=r"[\s\S]", mergeable_ranks=ranks, special_tokens=special)
    if name != "gpt2":
        raise DataError(f"there is no tokenizer {name!r}: choose bytes or gpt2")
    try:
        base = tiktoken.get_encoding("gpt2")
    except Exception as error:      # requests' and urllib3's errors, a proxy's, a wrong hash: one way out of all
        raise DataError(
            f"GPT-2's BPE files cannot be fetched ({type(error).__name__}): go online once, or set "
            "TIKTOKEN_CACHE_DIR to a folder where tiktoken has cached them") from None
    special = {**base._special_tokens, "<|mask|>": base.n_vocab}
    return tiktoken.Encoding(
        "gpt2", pat_str=base._pat_str, mergeable_ranks=base._mergeable_ranks, special_tokens=special)


def encode(tokenizer, text):
    """One document as (uint16 tokens with end-of-text behind them, its UTF-8 bytes).

    Special-token names in the text are ordinary text. Halves of surrogate pairs, which JSON can spell but UTF-8
    cannot, become U+FFFD.
    """
    try:
        utf8 = text.encode()
    except UnicodeEncodeError:
        utf8 = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
        text = utf8.decode()
    if tokenizer.name == "bytes":
        tokens = np.frombuffer(utf8, np.uint8)
    else:
        tokens = tokenizer.encode_to_numpy(text, disallowed_special=())
    return np.append(tokens, tokenizer.eot_token).astype(np.uint16), len(utf8)


# -- writing a prepared folder --------------------------------------------------------------------------------------

def shard_header(n_tokens):
    words = np.zeros(HEADER_WORDS, "<i4")
    words[:3] = MAGIC, VERSION, n_tokens
    return words.tobytes()


def write_json(path, value):
    """Writes a JSON file whole or not at all: a reader never sees half of it."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(temporary, path)


class SplitWriter:
    """Appends documents to the shards and the document table of one split.

    Three counts are its whole state, because every file's length follows from them; a writer started from earlier
    counts cuts the files back to those lengths, and so rewrites the same bytes.
    """

    def __init__(self, out, split, shard_tokens=SHARD_TOKENS, tokens=0, documents=0, utf8_bytes=0):
        self.out, self.split, self.shard_tokens = Path(out), split, shard_tokens
        self.tokens, self.documents, self.utf8_bytes = tokens, documents, utf8_bytes
        self.pending, self.rows, self.shard = [], [], None
        shard = tokens // shard_tokens
        for path in self.out.glob(f"{split}_*.bin"):
            if path.stem[len(split) + 1:] > f"{shard:05d}" and not path.stem.endswith("docs"):
                path.unlink()
        self.table = self._open(f"{split}_docs.bin", 8 * documents)
        if tokens % shard_tokens:
            self.shard = self._open(self._name(shard), HEADER_BYTES + 2 * (tokens % shard_tokens))

    def _name(self, shard):
        return f"{self.split}_{shard:05d}.bin"

    def _open(self, name, size):
        """The file `name`, cut back to `size` bytes and ready for appending."""
        path = self.out / name
        if not size:
            return open(path, "wb", buffering=0)
        if not path.is_file() or path.stat().st_size < size:
            raise DataError(f"{path} is shorter than progress.json says: remove {self.out} and start again")
        file = open(path, "r+b", buffering=0)
        file.truncate(size)
        file.seek(size)
        return file

    def add(self, tokens, utf8_bytes):
        """Takes one document, end-of-text included; flush() writes it."""
        self.pending.append(tokens)
        self.rows.append((len(tokens), utf8_bytes))
        self.tokens, self.documents = self.tokens + len(tokens), self.documents + 1
        self.utf8_bytes += utf8_bytes

    def flush(self):
        """Hands everything taken so far to the operating system. Raises OSError, on a full disk for one."""
        if not self.rows:
            return
        tokens = np.concatenate(self.pending).astype("<u2", copy=False)
        at = self.tokens - len(tokens)
        while len(tokens):
            shard, filled = divmod(at, self.shard_tokens)
            if not filled:
                self._close(self.shard)
                self.shard = open(self.out / self._name(shard), "wb", buffering=0)
                write_all(self.shard, shard_header(self.shard_tokens))
            part, tokens = np.split(tokens, [self.shard_tokens - filled])
            write_all(self.shard, part)
            at += len(part)
        write_all(self.table, np.array(self.rows, "<u4"))
        self.pending, self.rows = [], []

    def _close(self, file):
        if file:
            os.fsync(file.fileno())
            file.close()

    def sync(self):
        """Makes everything flushed survive a power failure."""
        for file in (self.shard, self.table):
            if file:
                os.fsync(file.fileno())

    def state(self):
        return dict(tokens=self.tokens, documents=self.documents, utf8_bytes=self.utf8_bytes)

    def finish(self):
        """Closes the files, gives the last shard its true length, and returns this split's part of meta.json."""
        last = self.tokens % self.shard_tokens
        if last:
            self.shard.seek(0)
            write_all(self.shard, shard_header(last))
        self._close(self.shard)
        self._close(self.table)
        names = [self._name(i) for i in range(-(-self.tokens // self.shard_tokens))]
        shards = [dict(file=name, tokens=self.shard_tokens, sha256=file_sha256(self.out / name)) for name in names]
        if last:
            shards[-1]["tokens"] = last
        return dict(**self.state(), shards=shards)


def write_all(file, data):
    """Writes all of `data` to an unbuffered file, which alone may write less than it was given."""
    view = memoryview(data).cast("B")
    while view:
        view = view[file.write(view):]


def file_sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# -- the default corpus ---------------------------------------------------------------------------------------------

# Tests repeat themselves, and the last three are generated tables rather than written code.
STDLIB_EXCLUDED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test",
                   "encodings", "pydoc_data"}


def stdlib_files(root):
    """The standard library's .py files below `root`, sorted by relative path."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in STDLIB_EXCLUDED and not f.startswith("config-")]
        found += [Path(folder, n) for n in names if n.endswith(".py") and not n.startswith("_sysconfigdata")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def prepare_stdlib(out="data/stdlib", root=None):
    """Prepares the running Python's own source files as byte tokens, about 1 file in 20 for validation.

    A file's split depends on its relative path alone. Tests, installed packages and the generated tables of
    `encodings` and `pydoc_data` stay out; empty files and files that are not UTF-8 are skipped, the latter counted.
    The folder appears whole or not at all. Returns meta.json's content; raises DataError if no source is found.
    """
    out, root = Path(out), Path(root or sysconfig.get_path("stdlib"))
    if (out / "meta.json").is_file():
        return read_meta(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} exists and is not a prepared folder: remove it, or choose another --out")
    tokenizer, skipped = get_tokenizer("bytes"), 0
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=out.name + ".", dir=out.parent))
    try:
        writers = {split: SplitWriter(work, split) for split in SPLITS}
        for path in stdlib_files(root):
            name = path.relative_to(root).as_posix()
            try:
                text = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
            except UnicodeDecodeError:
                skipped += 1
                continue
            if text:
                split = "val" if zlib.crc32(name.encode()) % 20 == 0 else "train"
                writers[split].add(*encode(tokenizer, text))
        for split, writer in writers.items():
            if not writer.documents:
                raise DataError(f"{root} holds no Python source for the {split} split: prepare your own text with "
                                "python data.py jsonl PATH... --tokenizer bytes --val_fraction 0.05 --out DIR")
            writer.flush()
        meta = new_meta("Python standard library", platform.python_version(), "bytes", writers, skipped, None)
        write_json(work / "meta.json", meta)
        work.chmod(0o755)
        try:
            os.rename(work, out)
        except OSError:             # another process was first, with the same bytes
            if not (out / "meta.json").is_file():
                raise
    except OSError as error:
        raise DataError(f"{out} cannot be written: {error.strerror}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return read_meta(out)


def new_meta(source, revision, tokenizer, writers, skipped, made_from):
    """Finishes the writers and describes the folder they filled."""
    return dict(format=VERSION, source=source, revision=revision, tokenizer=tokenizer,
                vocab_size=get_tokenizer(tokenizer).n_vocab, skipped=skipped, made_from=made_from,
                splits={split: writer.finish() for split, writer in writers.items() if writer.documents})


# -- reading a prepared folder --------------------------------------------------------------------------------------

def command_for(path):
    """The command that would prepare the folder `path`."""
    name = Path(path).name
    return f"python data.py {name if name in ('stdlib', 'dclm', 'c4', 'paloma') else 'jsonl PATH...'} --out {path}"


def read_meta(path):
    """meta.json of the prepared folder `path`. Raises DataError when the folder is missing or unfinished."""
    path = Path(path)
    if (path / "meta.json").is_file():
        return json.loads((path / "meta.json").read_text())
    if (path / "progress.json").is_file():
        command = json.loads((path / "progress.json").read_text())["command"]
        raise DataError(f"{path} is unfinished: run this again and it goes on from where it was: {command}")
    raise DataError(f"{path} holds no prepared data: run {command_for(path)}")


@functools.lru_cache(maxsize=4)
def permutation(seed, epoch, n):
    """The order of the `n` windows in one epoch; RandomState, because NumPy has promised never to change it."""
    return np.random.RandomState([seed % 2**32, epoch]).permutation(n)


class TokenData:
    """One split of a prepared folder, memory-mapped: one long run of tokens, cut into windows of any length."""

    def __init__(self, path, split, tokenizer=None):
        """tokenizer, "bytes" or "gpt2" or None for any, is what the reader expects. Raises DataError, see README."""
        self.path, self.split, self.meta = Path(path), split, read_meta(path)
        if tokenizer is not None and tokenizer != self.meta["tokenizer"]:
            raise DataError(
                f"{path} holds {self.meta['tokenizer']} tokens but {tokenizer} tokens are wanted: choose another "
                f"folder, or run python data.py jsonl PATH... --tokenizer {tokenizer} --out DIR")
        if split not in self.meta["splits"]:
            raise DataError(f"{path} has no {split} split: prepare it with python data.py jsonl PATH... "
                            f"{'--val PATH... ' if split == 'val' else ''}--out DIR")
        info = self.meta["splits"][split]
        self.n_tokens, self.n_bytes = info["tokens"], info["utf8_bytes"]
        self.bytes_per_token = self.n_bytes / self.n_tokens
        self.shards = [self._map(shard) for shard in info["shards"]]
        self.starts = np.cumsum([0] + [len(shard) for shard in self.shards])

    def _map(self, info):
        """One shard as a uint16 memory map, its header and length checked."""
        path = self.path / info["file"]
        if not path.is_file() or path.stat().st_size != HEADER_BYTES + 2 * info["tokens"]:
            raise DataError(f"{path} is missing or truncated: remove {self.path} and prepare it again with "
                            f"{command_for(self.path)}")
        magic, version, tokens = np.fromfile(path, "<i4", 3)
        if (magic, version, tokens) != (MAGIC, VERSION, info["tokens"]):
            raise DataError(f"{path} is not a shard of this format: remove {self.path} and prepare it again with "
                            f"{command_for(self.path)}")
        return np.memmap(path, "<u2", "r", HEADER_BYTES)

    def _read(self, start, length):
        """Tokens start .. start + length of the split, across shard boundaries: int64 (length,)."""
        out, done = np.empty(length, np.int64), 0
        shard = int(np.searchsorted(self.starts, start, "right")) - 1
        while done < length:
            offset = start + done - self.starts[shard]
            part = self.shards[shard][offset:offset + length - done]
            out[done:done + len(part)] = part
            done, shard = done + len(part), shard + 1
        if out.max() >= self.meta["vocab_size"] - 1:    # the mask, the last id, is never data
            raise DataError(f"{self.path} holds token {out.max()}, beyond the {self.meta['tokenizer']} vocabulary: "
                            f"remove it and prepare it again with {command_for(self.path)}")
        return out

    def n_windows(self, seq_len):
        """Whole windows of `seq_len` tokens in the split. Raises DataError when there is none."""
        if self.n_tokens < seq_len:
            raise DataError(f"the {self.split} split of {self.path} has {self.n_tokens:,} tokens, fewer than one "
                            f"sequence of {seq_len:,}: choose a smaller seq_len, or prepare more text with "
                            f"{command_for(self.path)}")
        return self.n_tokens // seq_len

    def batch(self, seed, step, rows, batch_size, seq_len):
        """Sequences `rows` of the global batch of `step`, int64 (len(rows), seq_len).

        Sample step * batch_size + row is a place in the endless row of epochs; each epoch visits every window once,
        in its own order over all shards. A pure function of its arguments, whoever asks for which rows.
        """
        n = self.n_windows(seq_len)
        out = np.empty((len(rows), seq_len), np.int64)
        for i, row in enumerate(rows):
            epoch, position = divmod(step * batch_size + int(row), n)
            out[i] = self._read(int(permutation(seed, epoch, n)[position]) * seq_len, seq_len)
        return torch.from_numpy(out)

    def sequences(self, seq_len, count=None):
        """The first `count` windows in order, or all there are if fewer: int64 (n, seq_len)."""
        n = self.n_windows(seq_len)
        n = n if count is None else min(n, count)
        return torch.from_numpy(self._read(0, n * seq_len)).view(n, seq_len)

    def sequence_bytes(self, seq_len, count=None):
        """UTF-8 bytes of source text under each of those windows, int64 (n,).

        Both tokenizers are lossless, so a token stands for the bytes it decodes to, and these counts add up to the
        documents' own; end-of-text stands for none. A document cut by a window's edge is counted by its tokens.
        """
        return torch.from_numpy(token_bytes(self.meta["tokenizer"]))[self.sequences(seq_len, count)].sum(1)

    def documents(self):
        """Tokens (with end-of-text) and source bytes of every document, in order: uint32 (documents, 2)."""
        return np.fromfile(self.path / f"{self.split}_docs.bin", "<u4").reshape(-1, 2)


@functools.lru_cache(maxsize=None)
def token_bytes(name):
    """Bytes each token of the tokenizer decodes to, int64 (v,); 0 for end-of-text and mask."""
    tokenizer = get_tokenizer(name)
    lengths = [len(tokenizer.decode_single_token_bytes(i)) for i in range(tokenizer.eot_token)]
    return np.array(lengths + [0] * (tokenizer.n_vocab - len(lengths)), np.int64)


def byte_baselines(train_tokens, val_tokens):
    """Bits per byte of a unigram and a bigram model of byte tokens, dict(unigram=, bigram=).

    Both count the training tokens, add one to every count over the 257 symbols (256 bytes and end-of-text), and
    are scored on all of `val_tokens`, end-of-text included; the divisor is the number of bytes, as for the model.
    The bigram's first token follows an end-of-text. Tokens: integer tensors or arrays of any shape, read in order.
    """
    v = 257
    train, val = (np.asarray(tokens).reshape(-1).astype(np.int64) for tokens in (train_tokens, val_tokens))
    n_bytes = np.count_nonzero(val != 256)
    unigram = np.bincount(train, minlength=v) + 1.0
    before = np.append(256, train[:-1])
    bigram = np.bincount(before * v + train, minlength=v * v).reshape(v, v) + 1.0
    log_unigram = np.log2(unigram / unigram.sum())
    log_bigram = np.log2(bigram / bigram.sum(1, keepdims=True))
    before = np.append(256, val[:-1])
    return dict(unigram=float(-log_unigram[val].sum() / n_bytes),
                bigram=float(-log_bigram[before, val].sum() / n_bytes))


# @@REST@@
