"""Text in, shards of tokens out, and windows of those tokens back for training and evaluation.

A prepared folder holds uint16 shards (train_00000.bin, ...), for each split a table of every
document's tokens and UTF-8 bytes, and meta.json, written last: a folder without it is unfinished.
Documents lie one behind another, end-of-text after each; bits per byte divide by the bytes of the
documents. `mcqa` makes the six question sets of the paper's zero-shot table into one small form.

    python data.py stdlib                                   # the default corpus: no download
    python data.py jsonl *.jsonl.zst --val valid.jsonl --tokenizer gpt2 --out data/mine
"""
import argparse
import functools
import gzip
import hashlib
import importlib
import json
import os
import platform
import re
import shlex
import shutil
import sys
import sysconfig
import tempfile
import zlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tiktoken
import torch

MAGIC, VERSION = 0x42444C4D, 1      # a shard's first two words; the third is its number of tokens
HEADER_WORDS, HEADER_BYTES = 256, 1024
SHARD_TOKENS = 100_000_000
SAVE_TOKENS = 4_000_000             # at most this much is held in memory, or lost with a kill
BATCH_BYTES = 1 << 20               # text that one thread tokenises at a time
SPLITS = ("train", "val")


class DataError(Exception):
    """A mistake that the user can mend; its message is one sentence that says how."""


def need(package):
    """Imports an optional package, or says how to get it."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise DataError(f"{package} is missing: pip install {package.split('.')[0]}") from None


# -- tokenizers -----------------------------------------------------------------------------------

@functools.lru_cache(maxsize=None)
def get_tokenizer(name):
    """The tokenizer "bytes" or "gpt2" as a tiktoken.Encoding; its last id is the mask.

    bytes: 256 byte values, <|endoftext|> 256, <|mask|> 257. gpt2: GPT-2's ids, <|mask|> 50257.
    Raises DataError for another name, and when GPT-2's files are neither cached nor reachable.
    """
    if name == "bytes":
        return tiktoken.Encoding(
            "bytes", pat_str=r"[\s\S]", mergeable_ranks={bytes([i]): i for i in range(256)},
            special_tokens={"<|endoftext|>": 256, "<|mask|>": 257})
    if name != "gpt2":
        raise DataError(f"there is no tokenizer {name!r}: choose bytes or gpt2")
    try:
        base = tiktoken.get_encoding("gpt2")
    except Exception as error:      # a network's, a proxy's or a file's: they all end the same way
        raise DataError(
            f"GPT-2's BPE files cannot be had ({type(error).__name__}): go online once, or set "
            "TIKTOKEN_CACHE_DIR to a folder in which tiktoken has cached them") from None
    return tiktoken.Encoding(
        "gpt2", pat_str=base._pat_str, mergeable_ranks=base._mergeable_ranks,
        special_tokens={**base._special_tokens, "<|mask|>": base.n_vocab})


@functools.lru_cache(maxsize=None)
def token_bytes(name):
    """The number of bytes that each token decodes to, int64 (v,); 0 for end-of-text and mask."""
    tokenizer = get_tokenizer(name)
    sizes = [len(tokenizer.decode_single_token_bytes(i)) for i in range(tokenizer.eot_token)]
    return np.array(sizes + [0] * (tokenizer.n_vocab - len(sizes)), np.int64)


def encode(tokenizer, text):
    """One document as (uint16 tokens with end-of-text behind them, its UTF-8 bytes).

    The names of special tokens are ordinary text here. Halves of surrogate pairs, which JSON can
    spell but UTF-8 cannot hold, become U+FFFD.
    """
    try:
        utf8 = text.encode()
    except UnicodeEncodeError:
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        utf8 = text.encode()
    if tokenizer.name == "bytes":
        tokens = np.frombuffer(utf8, np.uint8)
    else:
        tokens = tokenizer.encode_to_numpy(text, disallowed_special=())
    return np.append(tokens, tokenizer.eot_token).astype("<u2"), len(utf8)


# -- writing a prepared folder --------------------------------------------------------------------

def write_json(path, value):
    """Writes a JSON file whole or not at all: nobody ever reads half of it."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(temporary, path)


def append(path, size, data, header=b""):
    """Writes data at byte `size` of a file, over what an interrupted run left there, and syncs."""
    with open(path, "r+b" if size else "wb", buffering=0) as file:
        if file.seek(0, os.SEEK_END) < size:
            raise DataError(f"{path} is shorter than it was: remove {path.parent} and start again")
        file.truncate(size)
        for start, part in ((size, data), (0, header)):
            file.seek(start)
            view = memoryview(part).cast("B")
            while view:             # an unbuffered write may take less than it is given
                view = view[file.write(view):]
        os.fsync(file.fileno())


class SplitWriter:
    """Appends documents to one split's shards and document table.

    Three counts are its whole state, since they give every file's length. A writer that starts
    from earlier counts overwrites what came after; the same documents give the same bytes.
    """

    def __init__(self, out, split, shard_tokens=SHARD_TOKENS, tokens=0, documents=0, utf8_bytes=0):
        self.out, self.split, self.shard_tokens = Path(out), split, shard_tokens
        self.tokens, self.documents, self.utf8_bytes = tokens, documents, utf8_bytes
        self.pending, self.rows, self.n_pending = [], [], 0

    def add(self, tokens, utf8_bytes):
        """Takes one document, end-of-text included; save() writes it."""
        self.pending.append(tokens)
        self.rows.append((len(tokens), utf8_bytes))
        self.n_pending += len(tokens)

    def save(self):
        """Puts on disk what was added and returns the counts. Raises OSError: a full disk, say."""
        tokens = np.concatenate([np.empty(0, "<u2"), *self.pending])
        at = self.tokens
        while len(tokens):
            shard, filled = divmod(at, self.shard_tokens)
            part, tokens = np.split(tokens, [self.shard_tokens - filled])
            header = np.zeros(HEADER_WORDS, "<i4")
            header[:3] = MAGIC, VERSION, filled + len(part)
            size = HEADER_BYTES + 2 * filled if filled else 0
            body = part if filled else header.tobytes() + part.tobytes()
            append(self.out / f"{self.split}_{shard:05d}.bin", size, body, header)
            at += len(part)
        if self.rows:
            rows = np.array(self.rows, "<u4")
            append(self.out / f"{self.split}_docs.bin", 8 * self.documents, rows)
            self.documents += len(rows)
            self.utf8_bytes += int(rows[:, 1].sum())
        self.tokens, self.pending, self.rows, self.n_pending = at, [], [], 0
        return dict(tokens=at, documents=self.documents, utf8_bytes=self.utf8_bytes)

    def describe(self):
        """This split's part of meta.json."""
        shards = []
        for start in range(0, self.tokens, self.shard_tokens):
            path = self.out / f"{self.split}_{start // self.shard_tokens:05d}.bin"
            n = min(self.shard_tokens, self.tokens - start)
            shards.append(dict(file=path.name, tokens=n, sha256=sha256(path)))
        return dict(**self.save(), shards=shards)


def sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_meta(out, source, revision, tokenizer, writers, skipped=0, made_from=None):
    """Describes a folder whose writers have saved, and so finishes it."""
    meta = dict(
        format=VERSION, source=source, revision=revision, tokenizer=tokenizer,
        vocab_size=get_tokenizer(tokenizer).n_vocab, skipped=skipped, made_from=made_from,
        splits={split: writer.describe() for split, writer in writers.items() if writer.documents})
    write_json(out / "meta.json", meta)
    return meta


# -- the default corpus ---------------------------------------------------------------------------

# Tests repeat themselves; encodings and pydoc_data are generated tables rather than written code.
STDLIB_EXCLUDED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test",
                   "encodings", "pydoc_data"}


def stdlib_texts(root):
    """(relative path, text or None) of the .py files below root, sorted; None if not UTF-8."""
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in STDLIB_EXCLUDED and f[:7] != "config-"]
        paths += [Path(folder, n) for n in names if n.endswith(".py") and n[:12] != "_sysconfigda"]
    for name, path in sorted((path.relative_to(root).as_posix(), path) for path in paths):
        try:
            yield name, path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
        except UnicodeDecodeError:
            yield name, None


def prepare_stdlib(out="data/stdlib", root=None):
    """Prepares the running Python's own source as byte tokens, 1 file in 20 for validation.

    A file's split depends on its relative path alone. Tests, installed packages and generated
    tables stay out; empty files and those that are not UTF-8 are skipped, the latter counted. The
    folder appears whole or not at all. Returns meta.json's content. Raises DataError.
    """
    out, root = Path(out), Path(root or sysconfig.get_path("stdlib"))
    if (out / "meta.json").is_file():
        return read_meta(out)
    if out.exists():
        raise DataError(f"{out} is there but not prepared: remove it, or choose another --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=out.name + ".", dir=out.parent))
    try:
        writers, skipped = {split: SplitWriter(work, split) for split in SPLITS}, 0
        for name, text in stdlib_texts(root):
            skipped += text is None
            if text:
                split = "val" if zlib.crc32(name.encode()) % 20 == 0 else "train"
                writers[split].add(*encode(get_tokenizer("bytes"), text))
        for split, writer in writers.items():
            if not writer.save()["documents"]:
                raise DataError(
                    f"{root} holds no Python source for the {split} split: use text of your own, "
                    f"{command_for('DIR')} --tokenizer bytes --val_fraction 0.05")
        write_meta(work, "Python's standard library", platform.python_version(), "bytes", writers,
                   skipped)
        work.chmod(0o755)
        os.rename(work, out)
    except OSError as error:        # or another process was first, with the same bytes
        if not (out / "meta.json").is_file():
            raise DataError(f"{out} cannot be written: {error.strerror}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return read_meta(out)


# -- reading a prepared folder --------------------------------------------------------------------

def command_for(path):
    """The command that prepares the folder `path`."""
    known = Path(path).name in ("stdlib", *HUB)
    return f"python data.py {Path(path).name if known else 'jsonl PATH...'} --out {path}"


def read_meta(path):
    """meta.json of a prepared folder. Raises DataError if the folder is missing or unfinished."""
    path = Path(path)
    try:
        if (path / "meta.json").is_file():
            return json.loads((path / "meta.json").read_text())
        if (path / "progress.json").is_file():
            command = json.loads((path / "progress.json").read_text())["command"]
            raise DataError(f"{path} is unfinished: run this again and it goes on: {command}")
    except (ValueError, KeyError):
        raise DataError(f"{path}: damaged JSON: remove it, run {command_for(path)}") from None
    raise DataError(f"{path} holds no prepared data: run {command_for(path)}")


@functools.lru_cache(maxsize=4)
def permutation(seed, epoch, n):
    """The order of n windows in one epoch. RandomState: NumPy has promised never to change it."""
    return np.random.RandomState([seed % 2**32, epoch]).permutation(n)


class TokenData:
    """One split of a prepared folder: a run of tokens on disk, cut into windows.

    path, split: the folder, and "train" or "val". tokenizer: what the reader expects, None for
    any. Raises DataError when the folder is unfinished or damaged, or lacks such tokens or split.
    """

    def __init__(self, path, split, tokenizer=None):
        self.path, self.split, self.meta = Path(path), split, read_meta(path)
        holds = self.meta.get("tokenizer", "no")
        if holds == "no" or tokenizer not in (None, holds):
            raise DataError(
                f"{path} holds {holds} tokens, not {tokenizer or 'text'} tokens: choose another "
                f"folder, or run {command_for('DIR')} --tokenizer {tokenizer or 'gpt2'}")
        if split not in self.meta["splits"]:
            more = "--val PATH... " * (split == "val")
            raise DataError(f"{path} has no {split} split: run {command_for('DIR')} {more}")
        info = self.meta["splits"][split]
        self.n_tokens, self.n_bytes = info["tokens"], info["utf8_bytes"]
        self.bytes_per_token = self.n_bytes / self.n_tokens
        self.shards = [self._check(**shard) for shard in info["shards"]]
        self.starts = np.cumsum([0] + [shard["tokens"] for shard in info["shards"]])

    def _damaged(self, what):
        return DataError(f"{what}: remove {self.path} and run {command_for(self.path)}")

    def _check(self, file, tokens, sha256):
        """The path of one shard, its header and length checked."""
        path = self.path / file
        if not path.is_file() or path.stat().st_size != HEADER_BYTES + 2 * tokens:
            raise self._damaged(f"{path} is missing or truncated")
        if np.fromfile(path, "<i4", 3).tolist() != [MAGIC, VERSION, tokens]:
            raise self._damaged(f"{path} is not a shard of this format")
        return path

    def _read(self, start, length):
        """Tokens start .. start + length of the split, across shard boundaries: int64 (length,).

        One read a window rather than a memory map, which would fault once for every 4 KiB of it.
        """
        out, done = np.empty(length, np.int64), 0
        shard = int(np.searchsorted(self.starts, start, "right")) - 1
        while done < length:
            offset = start + done - self.starts[shard]
            n = min(length - done, self.starts[shard + 1] - start - done)
            part = np.fromfile(self.shards[shard], "<u2", n, offset=HEADER_BYTES + 2 * offset)
            out[done:done + len(part)] = part
            done, shard = done + len(part), shard + 1
        if out.max() >= self.meta["vocab_size"] - 1:    # the last id, the mask, is never data
            raise self._damaged(f"{self.path} holds token {out.max()}, outside its vocabulary")
        return out

    def n_windows(self, seq_len):
        """Whole windows of seq_len tokens in the split. Raises DataError if there is none."""
        if self.n_tokens < seq_len:
            raise DataError(
                f"{self.path}'s {self.split} split has {self.n_tokens:,} tokens, less than one "
                f"sequence of {seq_len:,}: lower seq_len, or prepare more: {command_for('DIR')}")
        return self.n_tokens // seq_len

    def batch(self, seed, step, rows, batch_size, seq_len):
        """Sequences `rows` of the global batch of `step`: int64 (len(rows), seq_len).

        Sample step * batch_size + row is a place in the endless row of epochs; every epoch visits
        each window once, in an order of its own over all shards. A pure function of its arguments:
        neither ranks nor micro-batches nor an interruption change what a step sees.
        """
        n = self.n_windows(seq_len)
        out = np.empty((len(rows), seq_len), np.int64)
        for i, row in enumerate(rows):
            epoch, place = divmod(step * batch_size + int(row), n)
            out[i] = self._read(int(permutation(seed, epoch, n)[place]) * seq_len, seq_len)
        return torch.from_numpy(out)

    def sequences(self, seq_len, count=None):
        """The first `count` windows in order, or all there are if fewer: int64 (n, seq_len)."""
        n = min(self.n_windows(seq_len), count or sys.maxsize)
        return torch.from_numpy(self._read(0, n * seq_len)).view(n, seq_len)

    def sequence_bytes(self, seq_len, count=None):
        """UTF-8 bytes of source text that those windows cover: int64 (n,).

        Both tokenizers are lossless, so the bytes of a document's tokens are the document's, and
        one cut by a window's edge counts by its tokens on this side. End-of-text counts nothing.
        """
        sizes = torch.from_numpy(token_bytes(self.meta["tokenizer"]))
        return sizes[self.sequences(seq_len, count)].sum(1)

    def documents(self):
        """Every document's tokens (end-of-text included) and UTF-8 bytes: uint32 (documents, 2)."""
        return np.fromfile(self.path / f"{self.split}_docs.bin", "<u4").reshape(-1, 2)


def byte_baselines(train_tokens, val_tokens):
    """Bits per byte of a unigram and a bigram model of byte tokens: dict(unigram=, bigram=).

    Both count the training tokens, add one to every count over 257 symbols (the bytes and
    end-of-text), and score all of val_tokens, end-of-text included, divided by the bytes alone, as
    for the model. The bigram begins behind an end-of-text. Tokens: tensors or arrays of any shape.
    """
    v = 257
    train, val = (np.asarray(x).reshape(-1).astype(np.int64) for x in (train_tokens, val_tokens))
    unigram = np.bincount(train, minlength=v) + 1.0
    bigram = np.bincount(np.append(256, train[:-1]) * v + train, minlength=v * v) + 1.0
    bigram = bigram.reshape(v, v)
    n_bytes = np.count_nonzero(val != 256)
    unigram_bits = -np.log2(unigram / unigram.sum())[val].sum()
    bigram = bigram / bigram.sum(1, keepdims=True)
    bigram_bits = -np.log2(bigram)[np.append(256, val[:-1]), val].sum()
    return dict(unigram=float(unigram_bits / n_bytes), bigram=float(bigram_bits / n_bytes))


# -- preparing text: resumable, on all cores, in constant memory ----------------------------------

@dataclass
class Source:
    """One input file. Two preparations are the same if split, name and size agree."""
    split: str
    name: str                       # the ending tells the format
    fetch: Callable[[], Path]       # its path, downloaded first where need be
    size: int = 0                   # bytes; 0 if it is on the hub


@dataclass
class Batch:
    """About BATCH_BYTES of one source: raw records in, documents out."""
    source: Source
    index: int                      # of the source
    path: Path
    records: list = field(default_factory=list)     # (line, bytes)
    documents: list = field(default_factory=list)   # (line, tokens, bytes) or (line, None, why)
    read: int = 0                   # bytes of the file read so far, as stored
    last: bool = False              # the file ends here


def zstd_lines(file):
    """The lines of a .zst file. Raises OSError if it is damaged, EOFError if its end is missing."""
    zstandard, rest = need("zstandard"), b""
    decoder = zstandard.ZstdDecompressor().decompressobj()
    while piece := file.read(1 << 16):
        while piece:
            if decoder.eof:         # another frame follows
                decoder = zstandard.ZstdDecompressor().decompressobj()
            try:
                *lines, rest = (rest + decoder.decompress(piece)).split(b"\n")
            except zstandard.ZstdError as error:
                raise OSError(f"damaged zstd data: {error}") from None
            yield from (line + b"\n" for line in lines)
            piece = decoder.unused_data if decoder.eof else b""
    if not decoder.eof:
        raise EOFError("truncated zstd data")
    if rest:
        yield rest


def read_records(file, name, done):
    """(line, bytes) of every document behind line `done`: a JSON line, or a stretch of plain text.

    Plain text is cut at a blank line after 10,000 bytes, or at any line's end after 100,000, so
    that memory stays flat and there is something to split; `line` is then the last line.
    """
    lines = zstd_lines(file) if name.endswith(".zst") else \
        gzip.open(file) if name.endswith(".gz") else file
    text, size = [], 0
    for number, line in enumerate(lines, 1):
        if number <= done:
            continue
        if ".txt" not in name:
            if line.strip():
                yield number, line
            continue
        text.append(line.replace(b"\r\n", b"\n"))
        size += len(text[-1])
        if size > 100_000 or size > 10_000 and not line.strip():
            yield number, b"".join(text)
            text, size = [], 0
    if text:
        yield number, b"".join(text)


def read_batches(source, index, path, line):
    """The batches of one source from behind `line` on. A damaged file ends in a bad document."""
    batch, size = Batch(source, index, path), 0
    try:
        with open(path, "rb") as file:
            for line, raw in read_records(file, source.name, line):
                batch.records.append((line, raw))
                size += len(raw)
                if size >= BATCH_BYTES:
                    batch.read = file.tell()
                    yield batch
                    batch, size = Batch(source, index, path), 0
    except (OSError, EOFError, zlib.error) as error:
        batch.records.append((line + 1, error))
    batch.last, batch.read = True, path.stat().st_size if path.is_file() else 0
    yield batch


def document_text(raw, name):
    """The text of one record. Raises ValueError with what is wrong with it."""
    if isinstance(raw, Exception):
        raise ValueError(raw)
    try:
        text = raw.removeprefix(b"\xef\xbb\xbf").decode()
        row = dict(text=text) if ".txt" in name else json.loads(text)
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except (ValueError, RecursionError):
        raise ValueError("not JSON") from None
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise ValueError('no "text"')
    if not row["text"]:
        raise ValueError("an empty document")
    return row["text"]


def tokenise(tokenizer, batch):
    """Fills batch.documents. For threads: tiktoken works outside the interpreter's lock."""
    for line, raw in batch.records:
        try:
            document = encode(tokenizer, document_text(raw, batch.source.name))
        except ValueError as error:
            document = None, str(error)
        batch.documents.append((line, *document))
    batch.records = []
    return batch


def ordered_map(pool, function, items, ahead):
    """pool.map that keeps the order, and never has more than `ahead` items under way."""
    waiting = deque()
    for item in items:
        waiting.append(pool.submit(function, item))
        if len(waiting) >= ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


class Preparation:
    """Makes sources into a prepared folder; what it writes is a function of its settings alone.

    progress.json notes, at a document's end, how far reading and the writers are; whoever comes
    back goes on from there. budget: stop behind the document with which the first source's split
    has this many tokens. val_fraction: the share of documents, picked by checksum, for validation.
    """

    def __init__(self, out, sources, tokenizer, source, revision="", budget=0, val_fraction=0.0,
                 skip_bad=False, command="", shard_tokens=None):
        self.out, self.sources, self.tokenizer = Path(out), sources, get_tokenizer(tokenizer)
        self.source, self.revision, self.command = source, revision, command
        self.budget, self.val_fraction, self.skip_bad = int(budget), val_fraction, skip_bad
        inputs = json.dumps([(s.split, s.name, s.size) for s in sources]).encode()
        self.made_from = dict(
            files=len(sources), first=sources[0].name, sha256=hashlib.sha256(inputs).hexdigest(),
            revision=revision, tokenizer=tokenizer, budget=self.budget, val_fraction=val_fraction,
            shard_tokens=shard_tokens or SHARD_TOKENS)

    def run(self, workers=None):
        """Prepares what is not there yet and returns meta.json's content. Raises DataError."""
        tqdm, workers = need("tqdm").tqdm, workers or os.cpu_count()
        try:
            if self.resume():
                return read_meta(self.out)
            with ThreadPoolExecutor(workers) as pool, tqdm(
                    desc=str(self.out), total=self.budget or None, initial=self.n_first(),
                    unit="tok", unit_scale=True, mininterval=0.5) as bar:
                one = functools.partial(tokenise, self.tokenizer)
                for batch in ordered_map(pool, one, self.batches(pool), 2 * workers + 1):
                    self.take(batch, bar)
                    if self.full():
                        break
            self.save()
            return self.finish()
        except OSError as error:
            raise DataError(
                f"{error.filename or self.out} cannot be written ({error.strerror}): make room, "
                "run the same command again, and it goes on from where it was") from None

    def resume(self):
        """Takes up where progress.json is, or begins; true if there is nothing left to do."""
        self.out.mkdir(parents=True, exist_ok=True)
        names = [name for name in ("meta.json", "progress.json") if (self.out / name).is_file()]
        if not names and any(path.suffix != ".tmp" for path in self.out.iterdir()):
            raise DataError(f"{self.out} is not empty: remove it, or choose another --out")
        saved = json.loads((self.out / names[0]).read_text()) if names else {}
        if names and saved.get("made_from") != self.made_from:
            raise DataError(f"{self.out} was made from other files or with other settings: remove "
                            "it, or choose another --out")
        self.position, self.skipped = saved.get("position", [0, 0]), saved.get("skipped", 0)
        if "meta.json" in names:
            return self.clean()
        size, counts = self.made_from["shard_tokens"], saved.get("splits", {})
        self.writers = {s: SplitWriter(self.out, s, size, **counts.get(s, {})) for s in SPLITS}
        self.save()

    def n_first(self):
        writer = self.writers[self.sources[0].split]
        return writer.tokens + writer.n_pending

    def full(self):
        return 0 < self.budget <= self.n_first()

    def batches(self, pool):
        """All batches from the saved position on; the next source is fetched while one is read."""
        start, line = self.position
        if self.full() or start == len(self.sources):
            return
        coming = pool.submit(self.sources[start].fetch)
        for index, source in enumerate(self.sources[start:], start):
            path = coming.result()
            if index + 1 < len(self.sources):
                coming = pool.submit(self.sources[index + 1].fetch)
            yield from read_batches(source, index, path, line)
            line = 0

    def take(self, batch, bar):
        """Adds one batch's documents in order, up to the budget or to one that is bad."""
        before = sum(writer.n_pending for writer in self.writers.values())
        for line, tokens, what in batch.documents:
            if tokens is None:
                self.bad(f"{batch.source.name}:{line}: {what}")
            else:
                chosen = zlib.crc32(tokens) < self.val_fraction * 2**32
                self.writers["val" if chosen else batch.source.split].add(tokens, what)
            self.position = [batch.index, line]
            if self.full():
                break
        if batch.last and not self.full():
            self.position = [batch.index + 1, 0]
        size = sum(source.size for source in self.sources)
        if size and not self.budget:        # judge the total by the share of the files that is read
            read = sum(source.size for source in self.sources[:batch.index]) + batch.read
            bar.total = int(self.n_first() * size / max(1, read))
        bar.update(sum(writer.n_pending for writer in self.writers.values()) - before)
        downloaded = self.out in batch.path.parents
        if self.writers["train"].n_pending + self.writers["val"].n_pending > SAVE_TOKENS or \
                batch.last and downloaded:
            self.save()
        if batch.last and downloaded:
            batch.path.unlink(missing_ok=True)

    def bad(self, what):
        """Counts a bad document; without skip_bad, stops before it with all earlier ones saved."""
        if not self.skip_bad:
            self.save()
            raise DataError(f"{what}; mend it or add --skip_bad, run the same command again, and "
                            "it goes on from there")
        self.skipped += 1
        print(f"skipped {what}", file=sys.stderr)

    def save(self):
        """First the documents, then the note of how far they go."""
        write_json(self.out / "progress.json", dict(
            command=self.command, made_from=self.made_from, position=self.position,
            skipped=self.skipped, splits={s: w.save() for s, w in self.writers.items()}))

    def finish(self):
        """Writes meta.json and returns it."""
        wanted = [source.split for source in self.sources] + ["val"] * (self.val_fraction > 0)
        for split in wanted:
            if not self.writers[split].documents:
                raise DataError(f"no document went to the {split} split: remove {self.out} and "
                                "give more text, or another --val_fraction")
        meta = write_meta(self.out, self.source, self.revision, self.tokenizer.name, self.writers,
                          self.skipped, self.made_from)
        self.clean()
        return meta

    def clean(self):
        """Removes what only the preparation needed."""
        (self.out / "progress.json").unlink(missing_ok=True)
        shutil.rmtree(self.out / "download", ignore_errors=True)
        return True


def local_sources(paths, split):
    """Sources for the user's own files. Raises DataError for a missing or unknown one."""
    sources = []
    for path in map(Path, paths):
        if not path.is_file():
            raise DataError(f"{path} is not a file: name .jsonl or .txt files, also as .zst or .gz")
        if not re.search(r"\.(jsonl|json|txt)(\.zst|\.gz)?$", path.name):
            raise DataError(f"{path} has none of the endings .jsonl, .json, .txt, with .zst or .gz")
        fetch = functools.partial(Path, path)
        sources.append(Source(split, path.name, fetch, path.stat().st_size))
    return sources


# -- data sets on the hub -------------------------------------------------------------------------

HUB = {                             # repository, revision, files, split
    "dclm": ("mlfoundations/dclm-baseline-1.0", "a3b142c183aebe5af344955ae20836eb34dcf69b",
             r"global-shard.*/local-shard.*/.*\.jsonl\.zst", "train"),
    "c4": ("allenai/c4", "main", r"en/c4-validation\..*\.json\.gz", "val"),
    "paloma": ("allenai/paloma", "main", r"c4_en/val/.*\.jsonl\.gz", "val"),
}


def on_hub(repo, call, *args, **kwargs):
    """Calls one of huggingface_hub's functions; its errors become a DataError."""
    try:
        return call(repo, *args, **kwargs)
    except Exception as error:      # the hub's, the network's and the disk's errors
        if type(error).__name__ == "GatedRepoError":
            raise DataError(
                f"{repo} is gated: accept its licence at https://huggingface.co/datasets/{repo} in "
                "a browser, log in here with `hf auth login`, and run this again") from None
        raise DataError(
            f"{repo} cannot be read from the hub ({type(error).__name__}): run the same command "
            "again when the network is back, or name a copy with --local DIR") from None


def hub_files(repo, revision, wanted, out, local=None):
    """The files of a data set that match `wanted`, sorted: (names, fetch(name) -> path, revision).

    local: a folder with the repository's layout, to use in place of the hub.
    """
    if local:
        names = [p.relative_to(local).as_posix() for p in Path(local).rglob("*") if p.is_file()]
        fetch, revision = functools.partial(Path, local), "a local copy"
    else:
        hub = need("huggingface_hub")
        revision = on_hub(repo, hub.HfApi().dataset_info, revision=revision).sha
        where = dict(repo_type="dataset", revision=revision)
        names = on_hub(repo, hub.HfApi().list_repo_files, **where)
        fetch = lambda name: Path(on_hub(
            repo, hub.hf_hub_download, name, local_dir=Path(out, "download"), **where))
    names = sorted(name for name in names if re.fullmatch(wanted, name))
    if not names:
        raise DataError(f"{local or repo} holds no file that matches {wanted}")
    return names, fetch, revision


def hub_sources(name, out, local=None):
    """(sources, repository, revision) of one of the data sets in HUB."""
    repo, revision, wanted, split = HUB[name]
    names, fetch, revision = hub_files(repo, revision, wanted, out, local)
    size = lambda file: fetch(file).stat().st_size if local else 0
    return [Source(split, n, functools.partial(fetch, n), size(n)) for n in names], repo, revision


# -- question sets --------------------------------------------------------------------------------

TASKS = {                           # repository, configuration (a pattern), split
    "hellaswag": ("Rowan/hellaswag", ".*", "validation"),
    "piqa": ("baber/piqa", ".*", "validation"),
    "arc_easy": ("allenai/ai2_arc", "ARC-Easy", "test"),
    "arc_challenge": ("allenai/ai2_arc", "ARC-Challenge", "test"),
    "boolq": ("google/boolq", ".*", "validation"),
    "winogrande": ("allenai/winogrande", "winogrande_xl", "validation"),
}


def hellaswag_clean(text):
    """HellaSwag's WikiHow part carries traces of the web page."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def template(task, row):
    """(context or one context per choice, choices, gold or None) as lm-evaluation-harness has them.

    Templates of its commit 4e7e0d47. HellaSwag rows may be preprocessed: query, choices, label.
    """
    if task == "hellaswag" and "query" in row:
        return row["query"], row["choices"], row["label"]
    if task == "hellaswag":
        context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
        return hellaswag_clean(context), [hellaswag_clean(e) for e in row["endings"]], row["label"]
    if task == "piqa":
        return f"Question: {row['goal']}\nAnswer:", [row["sol1"], row["sol2"]], row["label"]
    if task == "boolq":
        context = f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:"
        return context, ["no", "yes"], row["answer"] if "answer" in row else row["label"]
    if task == "winogrande":        # the options differ, the text behind them is what is scored
        before, after = row["sentence"].split("_", 1)
        contexts = [before + row["option1"], before + row["option2"]]
        return contexts, [after.strip()] * 2, {"1": 0, "2": 1}.get(str(row["answer"]))
    labels, key = row["choices"]["label"], row["answerKey"]
    gold = labels.index(key) if key in labels else None
    return f"Question: {row['question']}\nAnswer:", row["choices"]["text"], gold


def question(task, row, number):
    """One row as {task, id, context or contexts, choices, gold}; choices begin with their space.

    Raises ValueError with what is wrong with the row.
    """
    try:
        context, choices, gold = template(task, row)
        choices = [" " + choice for choice in choices]
    except KeyError as error:
        raise ValueError(f"no field {error}") from None
    except (TypeError, AttributeError, ValueError):
        raise ValueError(f"not a row of {task}") from None
    if not all(choice.strip() for choice in choices):
        raise ValueError("an answer with no characters")
    if not re.fullmatch(r"\d+", str(int(gold) if isinstance(gold, bool) else gold)) \
            or int(gold) >= len(choices):
        raise ValueError("no gold answer")
    name = next((row[key] for key in ("id", "ind", "idx") if key in row), number)
    key = "contexts" if isinstance(context, list) else "context"
    return {"task": task, "id": str(name), key: context, "choices": choices, "gold": int(gold)}


def read_rows(path):
    """(number, row) of a .jsonl or .parquet file. Raises DataError for a line that is not JSON."""
    if path.suffix == ".parquet":
        yield from enumerate(need("pyarrow.parquet").read_table(path).to_pylist(), 1)
        return
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            if line.strip():
                yield number, json.loads(line)
        except ValueError:
            raise DataError(f"{path}:{number}: not JSON") from None


def task_files(task, out, local):
    """hub_files for one task. A local folder has a folder for the task, or the hub's layout."""
    repo, config, split = TASKS[task]
    if not local:
        return hub_files(repo, "refs/convert/parquet", f"{config}/{split}/.*parquet", out)
    if Path(local, task).is_dir():
        return hub_files(repo, "", rf".*{split}.*\.(jsonl|parquet)", out, Path(local, task))
    return hub_files(repo, "", rf".*{config}.*{split}.*\.(jsonl|parquet)", out, Path(local, repo))


def prepare_mcqa(out="data/mcqa", tasks=None, local=None):
    """Writes out/<task>.jsonl for the tasks (None: all, or all that `local` holds) and meta.json.

    Returns meta.json's content. Raises DataError that names the file and line of a bad row.
    """
    out, found = Path(out), {}
    if tasks is None:
        tasks = [task for task, (repo, *_) in TASKS.items()
                 if not local or Path(local, task).is_dir() or Path(local, repo).is_dir()]
    if not tasks:
        raise DataError(f"{local} has no folder named after one of {', '.join(TASKS)}")
    out.mkdir(parents=True, exist_ok=True)
    for task in tasks:
        names, fetch, revision = task_files(task, out, local)
        rows = []
        for name in names:
            for number, row in read_rows(fetch(name)):
                try:
                    rows.append(question(task, row, number))
                except ValueError as error:
                    raise DataError(f"{fetch(name)}:{number}: {error}") from None
        if not rows:
            raise DataError(f"{fetch(names[0])} holds no questions")
        temporary = out / f"{task}.jsonl.tmp"
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.replace(temporary, out / f"{task}.jsonl")
        found[task] = dict(
            questions=len(rows), source=TASKS[task][0], split=TASKS[task][2], revision=revision,
            files=names, sha256=sha256(out / f"{task}.jsonl"))
    old = read_meta(out)["tasks"] if (out / "meta.json").is_file() else {}
    meta = dict(format=VERSION, template="lm-evaluation-harness 4e7e0d47", tasks={**old, **found})
    write_json(out / "meta.json", meta)
    shutil.rmtree(out / "download", ignore_errors=True)
    return meta


# -- the script -----------------------------------------------------------------------------------

def show(path):
    """Prints what a prepared folder holds: counts, bytes per token, and how its text begins."""
    meta = read_meta(path)
    for task, info in meta.get("tasks", {}).items():
        print(f"{task}: {info['questions']:,} questions from {info['source']} ({info['split']})")
        print("   ", (Path(path) / f"{task}.jsonl").open().readline().strip()[:300])
    if "splits" not in meta:
        return
    tokenizer = get_tokenizer(meta["tokenizer"])
    print(f"{path}: {meta['source']} {meta['revision']}, {meta['tokenizer']} tokens, vocabulary "
          f"{meta['vocab_size']:,}, {meta['skipped']} bad documents skipped")
    for split, info in meta["splits"].items():
        data = TokenData(path, split)
        print(f"{split}: {data.n_tokens:,} tokens in {len(data.shards)} shards, "
              f"{info['documents']:,} documents, {data.n_bytes:,} bytes, "
              f"{data.bytes_per_token:.3f} bytes per token")
        print("   ", repr(tokenizer.decode(data.sequences(min(100, data.n_tokens), 1)[0].tolist())))


def parse_arguments(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    helps = dict(
        stdlib="the running Python's own source as bytes", jsonl="your own .jsonl and .txt files",
        dclm="training text from DCLM-baseline", c4="C4-en validation text",
        paloma="Paloma's C4 validation text (gated)", mcqa="six question sets",
        show="what a folder holds")
    for name, text in helps.items():
        command = commands.add_parser(name, help=text, description=text)
        if name == "show":
            command.add_argument("dir")
            continue
        command.add_argument("--out", default=f"data/{name}", required=name == "jsonl")
        if name == "jsonl":
            command.add_argument("paths", nargs="*", metavar="PATH", help="training text")
            command.add_argument("--val", nargs="+", default=[], metavar="PATH",
                                 help="validation text")
        if name in ("jsonl", *HUB):
            command.add_argument("--tokenizer", default="gpt2", choices=["gpt2", "bytes"])
            command.add_argument("--skip_bad", action="store_true",
                                 help="count bad documents and go on")
            command.add_argument("--workers", type=int, help="threads (default: one for each core)")
        if name in (*HUB, "mcqa"):
            command.add_argument("--local", metavar="DIR", help="a folder with the hub's layout")
        if name in ("jsonl", "dclm"):
            command.add_argument("--val_fraction", type=float, default=5e-4 * (name == "dclm"),
                                 help="share of the documents kept for validation")
        if name == "dclm":
            command.add_argument("--tokens", type=float, required=True, help="stop here, e.g. 5e9")
        if name in ("c4", "paloma"):
            command.add_argument("--sequences", type=int, default=256)
            command.add_argument("--seq_len", type=int, default=8192)
        if name == "mcqa":
            command.add_argument("--tasks", nargs="+", choices=list(TASKS))
    return parser.parse_args(argv)


def prepare_text(args, argv):
    """The commands jsonl, dclm, c4 and paloma."""
    budget, val_fraction = 0, getattr(args, "val_fraction", 0.0)
    if args.command == "jsonl":
        sources = local_sources(args.paths, "train") + local_sources(args.val, "val")
        source, revision = "local files", ""
        if not sources:
            raise DataError("no files: name some, python data.py jsonl PATH... --out DIR")
    else:
        sources, source, revision = hub_sources(args.command, args.out, args.local)
        budget = args.tokens if args.command == "dclm" else args.sequences * args.seq_len
    return Preparation(
        args.out, sources, args.tokenizer, source, revision, budget, val_fraction, args.skip_bad,
        shlex.join(["python", "data.py", *argv])).run(args.workers)


def main(argv):
    """Runs one command; returns the exit status."""
    args = parse_arguments(argv)
    try:
        if args.command == "stdlib":
            prepare_stdlib(args.out)
        elif args.command == "mcqa":
            prepare_mcqa(args.out, args.tasks, args.local)
        elif args.command != "show":
            prepare_text(args, argv)
        show(args.dir if args.command == "show" else args.out)
    except DataError as error:
        print(f"data.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped: run the same command again and it goes on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
