"""Writes text to disk as tokens, and reads windows of these tokens for training and evaluation.

A prepared folder holds train.bin, val.bin or both: uint16 tokens and nothing else, with end-of-text after each
document; and meta.json, which is written last: a folder without it is unfinished. A folder of question sets holds one
<task>.jsonl for each task instead.

This file prepares the default corpus, Python's own source, and reads all folders. tools/prepare.py
prepares other text and question sets; training does not need it.

    python data.py stdlib                                   # the default corpus: no download
    python data.py jsonl *.jsonl.zst --val valid.jsonl --tokenizer gpt2 --out data/mine
"""
import functools
import hashlib
import json
import math
import os
import platform
import re
import secrets
import shlex
import shutil
import sys
import sysconfig
import zlib
from pathlib import Path

import numpy as np
import tiktoken
import torch

from configurator import UserError
from files import load_json, misfit, read_record, write_file, writing

VERSION = 2                         # of the format of a prepared folder
SPLITS = ("train", "val")
HUB = {                             # what `python data.py NAME` downloads: repository, revision, files, split
    "dclm": ("mlfoundations/dclm-baseline-1.0", "a3b142c183aebe5af344955ae20836eb34dcf69b",
             r"global-shard.*/local-shard.*/.*\.jsonl\.zst", "train"),
    "c4": ("allenai/c4", "main", r"en/c4-validation\..*\.json\.gz", "val"),
    "paloma": ("allenai/paloma", "main", r"c4_en/val/.*\.jsonl\.gz", "val"),
}
TASKS = {                           # `mcqa`: repository, configuration (a pattern), split
    "hellaswag": ("Rowan/hellaswag", ".*", "validation"),
    "piqa": ("baber/piqa", ".*", "validation"),
    "arc_easy": ("allenai/ai2_arc", "ARC-Easy", "test"),
    "arc_challenge": ("allenai/ai2_arc", "ARC-Challenge", "test"),
    "boolq": ("google/boolq", ".*", "validation"),
    "winogrande": ("allenai/winogrande", "winogrande_xl", "validation"),
}
VOCABULARY = {"bytes": 258, "gpt2": 50258}          # token ids of each tokenizer, mask included
COUNT = range(1, 2 ** 48)
META = (                            # the two forms of meta.json, see files.misfit: text; question sets
    {"format": range(VERSION, VERSION + 1), "source": str, "revision": str,
     "tokenizer": re.compile("|".join(VOCABULARY)), "vocab_size": COUNT, "skipped": range(2 ** 48), "splits": {"*": {
         "tokens": COUNT, "documents": COUNT, "utf8_bytes": COUNT}}},
    {"tasks": {"*": {"questions": COUNT, "source": str, "split": str}}},
)


# ----------------------------------------------------------------------------------------------
# Tokenizers

@functools.lru_cache(maxsize=None)
def get_tokenizer(name):
    """The tokenizer "bytes" or "gpt2" as a tiktoken.Encoding; its last id is the mask.

    bytes: 256 byte values, <|endoftext|> 256, <|mask|> 257. gpt2: GPT-2's ids, <|mask|> 50257.
    Raises UserError for another name, and if GPT-2's files are neither cached nor reachable.
    """
    if name == "bytes":
        return tiktoken.Encoding(
            "bytes", pat_str=r"[\s\S]", mergeable_ranks={bytes([i]): i for i in range(256)},
            special_tokens={"<|endoftext|>": 256, "<|mask|>": 257})
    if name != "gpt2":
        raise UserError(f"there is no tokenizer {name!r}: choose {' or '.join(VOCABULARY)}")
    try:
        base = tiktoken.get_encoding("gpt2")
    except Exception as error:      # network, proxy and disk raise many types of errors
        raise UserError(
            f"GPT-2's BPE files cannot be downloaded ({type(error).__name__}): go online once, or set "
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
    """Encodes one document. Returns (uint16 tokens with end-of-text at the end, number of UTF-8 bytes).

    The text "<|endoftext|>" in a document is ordinary text, not the special token. Lone surrogates,
    which JSON can express but UTF-8 cannot, become U+FFFD.
    """
    try:
        utf8 = text.encode()
    except UnicodeEncodeError:
        utf8 = re.sub("[\ud800-\udfff]", "\ufffd", text).encode()
        text = utf8.decode()
    if tokenizer.name == "bytes":
        tokens = np.frombuffer(utf8, np.uint8)
    else:
        tokens = tokenizer.encode_to_numpy(text, disallowed_special=())
    return np.append(tokens, tokenizer.eot_token).astype("<u2"), len(utf8)


# ----------------------------------------------------------------------------------------------
# Writing a prepared folder

ELSEWHERE = "choose another --out"


def check_out(out, *ours):
    """Raises UserError if the folder `out` holds files and none of them is named in `ours`: then another program made
    it."""
    names = {p.name for p in out.iterdir() if p.suffix != ".tmp"} if out.exists() else set()
    if names and names.isdisjoint(ours):
        raise UserError(f"{out} is not empty, and this command did not make it: {ELSEWHERE}")


def write_json(path, value):
    """Writes a JSON file, whole or not at all."""
    write_file(path, json.dumps(value, indent=1) + "\n", ELSEWHERE)


def append(path, size, data):
    """Cuts a file to `size` bytes, which drops what an interrupted run wrote after them, then appends `data` and syncs.
    size 0: makes a new file."""
    with open(path, "r+b" if size else "wb") as file:
        if file.seek(0, os.SEEK_END) < size:
            raise UserError(f"{path} is shorter than it was: remove {path.parent} and start again")
        file.truncate(size)
        file.seek(size)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


class SplitWriter:
    """Appends documents to the file of one split.

    Its whole state is three counts: tokens, documents and UTF-8 bytes. The file has two bytes for each token, so a
    writer that starts from the counts of an earlier save() continues there and overwrites anything later. The same
    documents always give the same file.
    """

    def __init__(self, out, split, tokens=0, documents=0, utf8_bytes=0):
        self.path = Path(out, f"{split}.bin")
        self.tokens, self.documents, self.utf8_bytes = tokens, documents, utf8_bytes
        self.pending, self.sizes, self.n_pending = [], [], 0

    def add(self, tokens, utf8_bytes):
        """Adds one document, end-of-text included, to those that the next save() writes."""
        self.pending.append(tokens)
        self.sizes.append(utf8_bytes)
        self.n_pending += len(tokens)

    def save(self):
        """Writes the added documents to disk and returns the counts. Raises OSError, for example on a full disk."""
        if self.pending:
            append(self.path, 2 * self.tokens, np.concatenate(self.pending))
        self.tokens += self.n_pending
        self.documents += len(self.sizes)
        self.utf8_bytes += sum(self.sizes)
        self.pending, self.sizes, self.n_pending = [], [], 0
        return self.counts()

    def counts(self):
        """The counts of what is on disk. As arguments of a new SplitWriter they continue from here."""
        return dict(tokens=self.tokens, documents=self.documents, utf8_bytes=self.utf8_bytes)

    def describe(self):
        """This split's part of meta.json. Call save() first."""
        return dict(**self.counts(), sha256=sha256(self.path))


def sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_meta(out, source, revision, tokenizer, writers, skipped=0, made_from=None):
    """Writes meta.json, which marks the folder as finished, and returns its content. Save all writers first."""
    meta = dict(
        format=VERSION, source=source, revision=revision, tokenizer=tokenizer,
        vocab_size=get_tokenizer(tokenizer).n_vocab, skipped=skipped, made_from=made_from,
        splits={split: writer.describe() for split, writer in writers.items() if writer.documents})
    write_json(out / "meta.json", meta)
    return meta


# ----------------------------------------------------------------------------------------------
# The default corpus

# Tests repeat themselves; encodings and pydoc_data are generated tables rather than written code, and so are the
# folders config-* and the files _sysconfigdata*.py.
STDLIB_EXCLUDED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test",
                   "encodings", "pydoc_data"}


def stdlib_texts(root):
    """Yields (relative path, text) of each .py file below root, in sorted order. text is None if unreadable."""
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in STDLIB_EXCLUDED and not f.startswith("config-")]
        paths += [Path(folder, n) for n in names if n.endswith(".py") and not n.startswith("_sysconfigdata")]
    for name, path in sorted((path.relative_to(root).as_posix(), path) for path in paths):
        try:
            yield name, path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
        except (UnicodeDecodeError, OSError):       # OSError: for example a broken link
            yield name, None


def write_stdlib(out, root):
    """Writes the .py files below root into the empty folder `out`. Raises UserError if a split gets none."""
    writers, skipped = {split: SplitWriter(out, split) for split in SPLITS}, 0
    for name, text in stdlib_texts(root):
        skipped += text is None
        if text:
            split = "val" if zlib.crc32(name.encode()) % 20 == 0 else "train"
            writers[split].add(*encode(get_tokenizer("bytes"), text))
    for split, writer in writers.items():
        if not writer.save()["documents"]:
            raise UserError(
                f"{root} holds no Python source for the {split} split: use text of your own, "
                f"python data.py jsonl PATH... --out DIR --tokenizer bytes --val_fraction 0.05")
    write_meta(out, "Python's standard library", platform.python_version(), "bytes", writers,
               skipped)


def prepare_stdlib(out="data/stdlib", root=None, advice=ELSEWHERE):
    """Prepares the running Python's own source as byte tokens, 1 file in 20 for validation.

    A file's split depends on its relative path alone. Tests, installed packages and generated
    tables are left out. Empty and unreadable files are skipped; meta.json counts the unreadable ones.
    The folder is complete when it appears. An existing one is kept. Returns the content of meta.json.
    Raises UserError; it ends in `advice` if the folder cannot be written.
    """
    out, root = Path(out), Path(root or sysconfig.get_path("stdlib"))
    if (out / "meta.json").is_file():
        return read_meta(out)
    with writing(out, advice):
        check_out(out, "meta.json")
        work = out.with_name(f"{out.name}.{secrets.token_hex(4)}.tmp")
        work.mkdir(parents=True)
        try:
            write_stdlib(work, root)
            os.rename(work, out)
        except OSError:             # another process may have written the same folder first: then use that
            if not (out / "meta.json").is_file():
                raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return read_meta(out)


# ----------------------------------------------------------------------------------------------
# Reading a prepared folder

def command_for(path):
    """The command that prepares the folder `path`."""
    name = Path(path).name
    what = name if name in ("stdlib", "mcqa", *HUB) else "jsonl PATH... --val PATH..."
    what += " --tokens 5e9" * (name == "dclm")
    return f"python data.py {what} --out {shlex.quote(str(path))}"


def read_json(path, form):
    """Reads a JSON file of a prepared folder. Raises UserError if it does not have this form (see files.misfit)."""
    return read_record(path, load_json, form, "a file of data.py",
                       f"move {path.parent} away and run {command_for(path.parent)}")


def read_meta(path):
    """meta.json of a prepared folder. Raises UserError if the folder is missing or unfinished."""
    path = Path(path)
    if (path / "meta.json").is_file():
        return read_json(path / "meta.json", META)
    if (path / "progress.json").is_file():
        command = read_json(path / "progress.json", {"command": str})["command"]
        raise UserError(f"{path} is unfinished: run this again and it continues: {command}")
    raise UserError(f"{path} holds no prepared data: run {command_for(path)}")


@functools.lru_cache(maxsize=4)
def permutation(seed, epoch, n):
    """A random permutation of n windows for one epoch: (n,) ints. It is drawn by RandomState, whose numbers NumPy
    guarantees never to change between versions."""
    return np.random.RandomState([seed % 2**32, epoch]).permutation(n)


# Each sequence has its own noise seed, a function of (seed, number of the sequence). So its noise does not depend on
# the batch that it is in, on the number of processes, or on where a run was resumed.

def noise_seeds(seed, samples):
    """The noise seed of each sequence: a list of 63-bit ints. samples: the numbers of the sequences."""
    seeds = (np.random.SeedSequence([seed, int(i)]).generate_state(1, np.uint64)[0] for i in samples)
    return [int(s) & (2 ** 63 - 1) for s in seeds]


def noise_generators(seed, samples):
    """A list with one CPU generator for each sequence, seeded by noise_seeds."""
    return [torch.Generator().manual_seed(s) for s in noise_seeds(seed, samples)]


def batches(items, size):
    """Slices of `size` items, the last of which may be shorter. A size below 1 counts as 1."""
    size = max(1, size)
    return (items[i:i + size] for i in range(0, len(items), size))


class TokenData:
    """One split of a prepared folder: one long sequence of tokens on disk, read in windows.

    path: the folder. split: "train" or "val". tokenizer: the name that the folder must have been
    prepared with; None accepts any. Raises UserError if the folder is unfinished or damaged, has
    no such split, or holds tokens of another tokenizer.
    """

    def __init__(self, path, split, tokenizer=None):
        self.path, self.split, self.meta = Path(path), split, read_meta(path)
        if "tokenizer" not in self.meta:
            raise UserError(f"{path} holds question sets, not text: choose another folder")
        found = self.meta["tokenizer"]
        if tokenizer not in (None, found):
            raise UserError(
                f"{path} holds {found} tokens, not {tokenizer} tokens: choose another "
                f"folder, or run {command_for('DIR')} --tokenizer {tokenizer}")
        if split not in self.meta["splits"]:
            raise UserError(f"{path} has no {split} split: run {command_for('DIR')}")
        info = self.meta["splits"][split]
        self.n_tokens, self.n_bytes = info["tokens"], info["utf8_bytes"]
        self.bytes_per_token = self.n_bytes / self.n_tokens
        self.file = self.path / f"{split}.bin"
        if not self.file.is_file() or self.file.stat().st_size != 2 * self.n_tokens:
            raise self._damaged(f"{self.file} is missing or truncated")

    def _damaged(self, what):
        return UserError(f"{what}: remove {self.path} and run {command_for(self.path)}")

    def _read(self, start, length):
        """Tokens start..start + length - 1 of the split: int64 (length,).

        Plain reads are faster here than a memory map, which has a page fault for every 4 KiB.
        """
        out = np.fromfile(self.file, "<u2", length, offset=2 * start).astype(np.int64)
        if out.max() >= VOCABULARY[self.meta["tokenizer"]] - 1:     # the last id is the mask: no text contains it
            raise self._damaged(f"{self.path} holds token {out.max()}, outside its vocabulary")
        return out

    def n_windows(self, seq_len):
        """The number of whole windows of seq_len tokens in the split. Raises UserError if it is 0."""
        if self.n_tokens < seq_len:
            raise UserError(
                f"{self.path}'s {self.split} split has {self.n_tokens:,} tokens, fewer than one "
                f"sequence of {seq_len:,}: lower seq_len, or prepare more: {command_for('DIR')}")
        return self.n_tokens // seq_len

    def batch(self, seed, step, rows, batch_size, seq_len):
        """The sequences `rows` (a range of ints) of the global batch of `step`: int64 (len(rows), seq_len).

        Training reads one epoch after another. Each epoch visits every window once, in its own random
        order. Row r of step s is number s * batch_size + r in this series of windows. So a batch is
        a pure function of the arguments: it does not depend on the number of ranks, on the size of
        micro-batches, or on where a run was resumed.
        """
        n = self.n_windows(seq_len)
        out = np.empty((len(rows), seq_len), np.int64)
        for i, row in enumerate(rows):
            epoch, place = divmod(step * batch_size + int(row), n)
            out[i] = self._read(int(permutation(seed, epoch, n)[place]) * seq_len, seq_len)
        return torch.from_numpy(out)

    def sequences(self, seq_len, count=None):
        """`count` windows, spread evenly over the split and in order: int64 (n, seq_len). All of them if count is None,
        0 or too large."""
        windows = self.n_windows(seq_len)
        n = min(windows, count or windows)
        return torch.from_numpy(np.stack([self._read(i * windows // n * seq_len, seq_len) for i in range(n)]))

    def sequence_bytes(self, seq_len, count=None):
        """UTF-8 bytes of source text in each window of `sequences`: int64 (n,).

        This is the sum of the bytes of its tokens. It is exact, because both tokenizers are lossless.
        End-of-text has no bytes, as it is not part of a document.
        """
        sizes = torch.from_numpy(token_bytes(self.meta["tokenizer"]))
        return sizes[self.sequences(seq_len, count)].sum(1)


def bits_per_byte(nats_per_token, n_tokens, n_bytes):
    """Bits per UTF-8 byte of the source text, from the mean nats per token."""
    return nats_per_token * n_tokens / math.log(2) / n_bytes


def byte_baselines(train_tokens, val_tokens):
    """Bits per byte of a unigram and a bigram model of byte tokens: dict(unigram=, bigram=).

    Both estimate probabilities from counts in train_tokens, with one added to each count, over 257
    symbols (256 bytes and end-of-text). Both score all val_tokens, end-of-text included, and divide
    by the bytes without end-of-text, as for the model. The first token of the bigram follows an
    end-of-text. Tokens: tensors or arrays of any shape.
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


# ----------------------------------------------------------------------------------------------
# Reading question sets

def task_paths(folder, wanted):
    """{task: path} of the tasks `wanted` in a folder of question sets; of all tasks if `wanted` is empty. Raises
    UserError for a missing or unknown task."""
    found = {path.stem: path for path in Path(folder).glob("*.jsonl")}
    for name in [*wanted, *found]:
        if name not in TASKS:
            raise UserError(f"{name} is no task: the files of {folder} and --tasks must have names of "
                            f"{', '.join(TASKS)}")
    missing = [name for name in wanted or found or ["question set"] if name not in found]
    if missing:
        raise UserError(f"{folder} holds no {missing[0]}: run python data.py mcqa --out {folder}")
    return {name: found[name] for name in TASKS if name in (wanted or found)}


def check_question(row):
    """One question of a prepared question set -> (contexts, choices, gold): a context for each choice, and the
    index of the right choice. Raises ValueError if it is not well-formed."""
    contexts = []
    if not misfit(row, {"choices": [str], "contexts": [str]}):
        contexts = row["contexts"]
    elif not misfit(row, {"choices": [str], "context": str}):
        contexts = [row["context"]] * len(row["choices"])
    if len(contexts) < 2 or len(contexts) != len(row["choices"]):
        raise ValueError("not a prepared question with two answers or more: run python data.py mcqa")
    if type(row.get("gold")) is not int or not 0 <= row["gold"] < len(contexts):
        raise ValueError(f"no gold answer: give it as \"gold\", 0 to {len(contexts) - 1}")
    return contexts, row["choices"], row["gold"]


def encode_choices(tokenizer, contexts, choices, max_len):
    """
    Encodes a question. Returns a list with one (context tokens, answer tokens) for each choice, and the number of
    tokens that were cut.

    Context and choice are encoded as one string, because BPE may merge across the boundary. The tokens are split
    where the context would end if it was encoded alone, without trailing spaces: these belong to the answer. The
    same number of tokens is cut from the left of each context, so that the longest context and answer fit max_len.
    """
    pairs = []
    for context, choice in zip(contexts, choices):
        n = len(tokenizer.encode_ordinary(context.rstrip(" ")))
        whole = tokenizer.encode_ordinary(context + choice)
        if not choice.strip() or len(whole) <= n:
            raise ValueError(f"the answer {choice!r} has no tokens: correct or remove the row")
        pairs.append((whole[:n], whole[n:]))
    room = max(0, max_len - max(len(answer) for _, answer in pairs))
    cut = max(0, max(len(context) for context, _ in pairs) - room)
    return [(context[cut:], answer) for context, answer in pairs], cut


def load_questions(path, tokenizer, max_len, limit=0, seed=0):
    """Reads the questions of a prepared <task>.jsonl: [dict(pairs, cut, gold)], see encode_choices. limit: take only
    this many, chosen at random by `seed`, because neighbouring questions may be variants of each other. Raises
    UserError with the line number of a malformed question."""
    lines = [(n, line) for n, line in enumerate(path.read_bytes().split(b"\n"), 1) if line.strip()]
    if 0 < limit < len(lines):
        lines = [lines[i] for i in sorted(permutation(seed, 0, len(lines))[:limit])]
    questions = []
    for number, line in lines:
        try:
            contexts, choices, gold = check_question(json.loads(line))
            pairs, cut = encode_choices(tokenizer, contexts, choices, max_len)
        except (ValueError, RecursionError) as error:   # errors of JSON and UTF-8 are ValueErrors as well
            raise UserError(f"{path}:{number}: {error}") from None
        questions.append(dict(pairs=pairs, cut=cut, gold=gold))
    if not questions:
        raise UserError(f"{path} holds no questions: run python data.py mcqa again")
    return questions


def show(path):
    """Prints the content of a prepared folder: counts, bytes per token, and the first tokens of each split."""
    meta = read_meta(path)
    for task, info in meta.get("tasks", {}).items():
        print(f"{task}: {info['questions']:,} questions from {info['source']} ({info['split']})")
        print("   ", (Path(path) / f"{task}.jsonl").open().readline().strip()[:300])
    if "splits" not in meta:
        print(f"{path}: {len(meta['tasks'])} question sets")
        return
    tokenizer = get_tokenizer(meta["tokenizer"])
    print(f"{path}: {' '.join([meta['source'], meta['revision']]).strip()}, {meta['tokenizer']} tokens, vocabulary "
          f"{meta['vocab_size']:,}, {meta['skipped']} bad documents skipped")
    for split, info in meta["splits"].items():
        data = TokenData(path, split)
        print(f"{split}: {data.n_tokens:,} tokens, {info['documents']:,} documents, {data.n_bytes:,} bytes, "
              f"{data.bytes_per_token:.3f} bytes per token")
        print("   ", repr(tokenizer.decode(data.sequences(min(100, data.n_tokens), 1)[0].tolist())))


if __name__ == "__main__":
    from tools.prepare import main
    main(sys.argv[1:])
