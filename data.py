"""Writes text to disk as tokens, and reads windows of these tokens for training and evaluation.

A prepared folder holds train.bin, val.bin or both: uint16 tokens and nothing else, with end-of-text after each
document; and meta.json, which is written last: a folder without it is unfinished.

This file prepares the default corpus, Python's own source, and reads all folders. `python data.py` starts
tools/prepare.py, which prepares other text, too; training does not import that.

    python data.py stdlib                                   # the default corpus: no download
    python data.py text *.jsonl.zst --val valid.jsonl --tokenizer gpt2 --out data/mine
"""
import functools
import json
import math
import platform
import re
import sys
import sysconfig
import tempfile
import zlib
from pathlib import Path

import numpy as np
import tiktoken
import torch

from configurator import UserError, write_file

VERSION = 2                         # of the format of a prepared folder
VOCABULARY = {"bytes": 258, "gpt2": 50258}          # number of token ids of each tokenizer, mask included


# ----------------------------------------------------------------------------------------------
# Tokenizers

@functools.lru_cache(maxsize=None)
def get_tokenizer(name):
    """The tokenizer "bytes" or "gpt2" as a tiktoken.Encoding; its last id is the mask.

    bytes: 256 byte values, <|endoftext|> 256, <|mask|> 257. gpt2: GPT-2's ids, <|mask|> 50257.
    Raises UserError for another name, for a tokenizer without all bytes, and if GPT-2's files are neither cached nor
    reachable.
    """
    if name not in VOCABULARY:
        raise UserError(f"there is no tokenizer {name!r}: choose {' or '.join(VOCABULARY)}")
    if name == "bytes":
        # ranks: {the bytes of a token: its id}. The pattern cuts a text into pieces, in which tokens are merged.
        pattern, ranks, special = r"[\s\S]", {bytes([i]): i for i in range(256)}, {"<|endoftext|>": 256}
    else:
        try:
            base = tiktoken.get_encoding("gpt2")
        except Exception as error:      # network, proxy and disk raise many types of errors
            raise UserError(f"GPT-2's BPE files cannot be downloaded ({type(error).__name__}): go online once, or set "
                            "TIKTOKEN_CACHE_DIR to a folder in which tiktoken has cached them, or prepare text with "
                            "--tokenizer bytes, which needs none") from None
        pattern, ranks, special = base._pat_str, base._mergeable_ranks, base._special_tokens
    if lacking := {bytes([i]) for i in range(256)} - ranks.keys():          # tiktoken would panic at such a byte
        raise UserError(f"tokenizer {name} has no token for the byte {min(lacking)}: give it one for each of the 256")
    special = {**special, "<|mask|>": VOCABULARY[name] - 1}
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special,
                             explicit_n_vocab=VOCABULARY[name])             # asserts that this is their number


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
    text = re.sub("[\ud800-\udfff]", "\ufffd", text)
    utf8, is_bytes = text.encode(), tokenizer.name == "bytes"
    ids = np.frombuffer(utf8, np.uint8) if is_bytes else tokenizer.encode_to_numpy(text, disallowed_special=())
    # Unsafe: from wider ints to 16 bits, which hold every id.
    return np.concatenate([ids, [tokenizer.eot_token]], dtype="<u2", casting="unsafe"), len(utf8)


# ----------------------------------------------------------------------------------------------
# The default corpus

# Tests repeat themselves; the folders encodings, pydoc_data and config-* and the files _sysconfigdata* are generated
# tables rather than written code.
STDLIB_EXCLUDED = re.compile(r"(^|/)((site-packages|dist-packages|__pycache__|tests?|idle_test|encodings|pydoc_data"
                             r"|config-[^/]*)/|_sysconfigdata[^/]*$)")


def prepare_stdlib(out="data/stdlib", root=None):
    """Prepares the running Python's own source as byte tokens, 1 file in 20 for validation.

    A file's split depends on its relative path alone. Tests, installed packages and generated
    tables are left out. Empty and unreadable files are skipped; meta.json counts the unreadable ones.
    The folder is complete when it appears. An existing one is kept. Returns the content of meta.json.
    Raises OSError if `out` holds something else, and UserError if a split gets no file.
    """
    out, root = Path(out), Path(root or sysconfig.get_path("stdlib"))
    if (out / "meta.json").exists():
        return read_meta(out)

    print(f"preparing {out} from the source of this Python's standard library", flush=True)
    documents, splits, skipped = {"train": [], "val": []}, {}, 0
    for name in sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py")):
        if not STDLIB_EXCLUDED.search(name):
            try:
                text = Path(root, name).read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
            except (UnicodeDecodeError, OSError):           # OSError: for example a broken link
                text, skipped = "", skipped + 1
            if text:
                split = "val" if zlib.crc32(name.encode()) % 20 == 0 else "train"
                documents[split].append(encode(get_tokenizer("bytes"), text))
    if not all(documents.values()):
        raise UserError(f"{root} holds too little Python source: prepare a text of your own, python data.py --help")

    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{out.name}.", suffix=".tmp", dir=out.parent) as work:
        made = Path(work, out.name)
        for split, found in documents.items():
            tokens = np.concatenate([tokens for tokens, _ in found])
            write_file(made / f"{split}.bin", tokens.tofile)
            splits[split] = dict(tokens=len(tokens), documents=len(found), utf8_bytes=sum(n for _, n in found))
        write_meta(made, "Python's standard library", platform.python_version(), "bytes", splits, skipped)
        if not (out / "meta.json").exists():                # else another process has made it meanwhile
            made.rename(out)                                # fails, and changes nothing, if `out` is not empty
    return read_meta(out)


# ----------------------------------------------------------------------------------------------
# A prepared folder

def write_meta(out, source, revision, tokenizer, splits, skipped=0, made_from=None):
    """Writes meta.json, which marks the folder as finished. The tokens must be on disk.

    splits: {split: dict(tokens=, documents=, utf8_bytes=)}.
    source, revision: where the text comes from. made_from: a digest of sources and options, by which
    tools/prepare.py knows its own unfinished folder.
    skipped: the number of bad documents.
    """
    meta = dict(format=VERSION, source=source, revision=revision, tokenizer=tokenizer,
                vocab_size=VOCABULARY[tokenizer], skipped=skipped, made_from=made_from, splits=splits)
    write_file(Path(out, "meta.json"), json.dumps(meta, indent=1) + "\n")


def read_json(path):
    """The object in a JSON file, a dict; an empty one if it holds none. Raises OSError if there is no file."""
    try:
        return dict(json.loads(Path(path).read_text(encoding="utf-8")))
    except (ValueError, TypeError):                     # no JSON; a list or a number
        return {}


def read_meta(path):
    """meta.json of a prepared folder. Raises UserError if it is missing, unfinished, damaged or of another format."""
    if not Path(path, "meta.json").exists():
        raise UserError(f"{path} holds no prepared text: run python data.py, see python data.py --help; "
                        "if that was interrupted, run the same command again and it continues")
    meta = read_json(Path(path, "meta.json"))
    splits = meta.get("splits")
    if (meta.get("format") != VERSION or str(meta.get("tokenizer")) not in VOCABULARY or type(splits) is not dict
            or not all(type(x) is dict and type(x.get("tokens")) is int for x in splits.values())):
        raise UserError(f"{path}/meta.json is damaged, or of another format: remove {path} and prepare it again")
    return meta


@functools.lru_cache(maxsize=4)
def permutation(seed, number, n):
    """The random permutation of 0..n-1 with this number, such as that of an epoch: (n,) ints. It is drawn by
    RandomState, whose numbers NumPy guarantees never to change between versions."""
    return np.random.RandomState([seed % 2**32, number]).permutation(n)


def batches(items, size):
    """Slices of `size` items, the last of which may be shorter. A size below 1 counts as 1."""
    size = max(1, size)
    return (items[i:i + size] for i in range(0, len(items), size))


class TokenData:
    """One split of prepared folders: sequences of tokens on disk, read in windows of seq_len tokens.

    paths: a folder, or several ones separated by commas. The windows of all folders are numbered in the order of the
    folders; no window crosses from one folder to the next. split: "train" or "val". tokenizer: the name that the
    folders must have been prepared with; "auto" accepts any, but all folders must have the same. Raises UserError if a
    folder is unfinished or damaged, has no such split, or holds tokens of another tokenizer.

    files: [(path, number of tokens)] of the split in each folder. n_tokens: in all of them.
    """

    def __init__(self, paths, split, tokenizer="auto"):
        self.files, self.tokenizer = [], tokenizer
        for path in str(paths).split(","):
            meta = read_meta(path)
            if self.tokenizer not in ("auto", meta["tokenizer"]):
                raise UserError(f"{path} holds {meta['tokenizer']} tokens, not {self.tokenizer} tokens: prepare its "
                                f"text again with --tokenizer {self.tokenizer} and another --out, or train a new model "
                                f"(no --init_from) with --tokenizer={meta['tokenizer']}")
            if split not in meta["splits"]:
                raise UserError(f"{path} has no {split} split: prepare one with it, see python data.py --help")
            file, info = Path(path, f"{split}.bin"), meta["splits"][split]
            if not file.exists() or file.stat().st_size != 2 * info["tokens"]:
                raise UserError(f"{file} is missing or truncated: remove {path} and prepare it again")
            self.tokenizer = meta["tokenizer"]
            self.files.append((file, info["tokens"]))
        self.n_tokens = sum(size for _, size in self.files)

    def n_windows(self, seq_len):
        """The number of whole windows of seq_len tokens in all folders. Raises UserError if a folder has none."""
        for file, size in self.files:
            if size < seq_len:
                raise UserError(f"{file} has {size:,} tokens, fewer than one sequence of {seq_len:,}; lower seq_len")
        return sum(size // seq_len for _, size in self.files)

    def window(self, number, seq_len):
        """The tokens of one window: int64 (seq_len,). Raises UserError if they cannot be tokens of the tokenizer.

        Plain reads are faster here than a memory map, which has a page fault for every 4 KiB.
        """
        for file, size in self.files:
            if number < size // seq_len:                    # this file holds the window; 2 bytes a token
                out = np.fromfile(file, "<u2", seq_len, offset=2 * number * seq_len).astype(np.int64)
                if out.max() >= VOCABULARY[self.tokenizer] - 1:                # the last id is the mask, in no text
                    raise UserError(f"{file} holds token {out.max()}, outside its vocabulary: prepare its folder again")
                return out
            number -= size // seq_len                       # now counted from the start of the next file

    def batch(self, seed, step, rows, batch_size, seq_len):
        """The sequences `rows` (a range of ints) of the global batch of `step`: int64 (len(rows), seq_len).

        nanoGPT's get_batch cuts windows at random places. Here training reads one epoch after another. Each epoch
        visits every window once, in its own random order. Row r of step s is number s * batch_size + r in this series
        of windows. So a batch is a function of the arguments alone: it does not depend on the number of ranks, on the
        size of micro-batches, or on where a run was resumed.
        """
        n = self.n_windows(seq_len)
        places = [divmod(step * batch_size + row, n) for row in rows]          # (epoch, place in its order) of each row
        numbers = [int(permutation(seed, epoch, n)[place]) for epoch, place in places]
        return torch.from_numpy(np.stack([self.window(number, seq_len) for number in numbers]))

    def sequences(self, seq_len, count=None):
        """`count` windows, spread evenly over the split and in order: int64 (n, seq_len). All of them if count is None,
        0 or too large."""
        windows = self.n_windows(seq_len)
        n = min(windows, count or windows)
        return torch.from_numpy(np.stack([self.window(i * windows // n, seq_len) for i in range(n)]))

    def sequence_bytes(self, seq_len, count=None):
        """UTF-8 bytes of source text in each window of `sequences`: int64 (n,).

        This is the sum of the bytes of its tokens. It is exact, because both tokenizers are lossless.
        End-of-text has no bytes, as it is not part of a document.
        """
        return torch.from_numpy(token_bytes(self.tokenizer))[self.sequences(seq_len, count)].sum(1)


def bits_per_byte(nats_per_token, n_tokens, n_bytes):
    """Bits per UTF-8 byte of the source text, from the mean nats per token."""
    return nats_per_token * n_tokens / math.log(2) / n_bytes


def byte_bigrams(train_tokens, val_tokens):
    """
    Bits per byte of val_tokens by a bigram model of byte tokens: counts in train_tokens, with one added to each, over
    257 symbols (256 bytes and end-of-text). All val_tokens are scored, end-of-text included, and the sum is divided by
    the bytes without end-of-text, as for the model. The first token of all follows an end-of-text; that of a later
    window, the last token of the window before it. Tokens: tensors or arrays of any shape.
    """
    v = 257
    train, val = (np.append(256, x) for x in (train_tokens, val_tokens))         # int64, flat, after an end-of-text
    counts = np.bincount(train[:-1] * v + train[1:], minlength=v * v).reshape(v, v) + 1.0
    bits = -np.log2(counts / counts.sum(1, keepdims=True))[val[:-1], val[1:]].sum()
    return float(bits / np.count_nonzero(val != 256))


if __name__ == "__main__":
    from tools.prepare import main
    main(sys.argv[1:])
