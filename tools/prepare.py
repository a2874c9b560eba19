"""
Prepares text for training and evaluation, as folders that data.py reads. docs/data.md describes the formats.

  stdlib            the running Python's own source, as bytes: the default corpus, no download
  text PATH...      your own .txt, .jsonl and .json files, also as .gz or .zst
  dclm, c4, paloma  training text from DCLM-baseline; C4-en validation text; that of Paloma (gated). They need the
                    package huggingface_hub, or --local with a copy of the hub's files
  show DIR          prints what a prepared folder holds

    python data.py text my.txt --tokenizer bytes --out data/mine
    python data.py text *.jsonl.zst --val valid.jsonl --out data/mine
    python data.py dclm --tokens 5e9
"""
import argparse
import contextlib
import gzip
import hashlib
import importlib
import json
import os
import re
import shlex
import shutil
import sys
import time
import zlib
from collections import Counter, namedtuple
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np
from tqdm import tqdm

from configurator import UserError, check, lock, script, write_file
from data import VOCABULARY, TokenData, encode, get_tokenizer, prepare_stdlib, read_json, read_meta, write_meta

HUB = {                             # what `python data.py NAME` downloads: repository, revision, files, split
    "dclm": ("mlfoundations/dclm-baseline-1.0", "a3b142c183aebe5af344955ae20836eb34dcf69b",
             r"global-shard.*/local-shard.*/.*\.jsonl\.zst", "train"),
    "c4": ("allenai/c4", "main", r"en/c4-validation\..*\.json\.gz", "val"),
    "paloma": ("allenai/paloma", "main", r"c4_en/val/.*\.jsonl\.gz", "val")}
TAKES = dict(                       # the arguments that each command takes
    stdlib="out", show="paths", text="paths val out tokenizer val_fraction split_on text_key skip_bad",
    **dict.fromkeys(HUB, "tokens out tokenizer val_fraction split_on skip_bad local"))
BATCH = 256                         # documents in memory at a time; threads tokenise them
VAL_BYTES = 10 ** 6                 # of the files, kept for validation without --val and --val_fraction: at most this
SYNC_SECONDS = 1                    # between two records of what is on the disk: syncing takes up to 10 ms
AGAIN, ELSEWHERE = "run the same command again and it continues", "choose another --out"

# One input file. name: its path, or that in a data set of the hub; the ending determines the format. size, changed:
# bytes, and time of the last change in ns; 0 for a data set of the hub.
Source = namedtuple("Source", "split name size changed", defaults=(0, 0))


# ----------------------------------------------------------------------------------------------
# From files to tokens

def is_text(name):
    """Whether a file is one document of plain text, not a document of JSON on each line."""
    return bool(re.search(r"\.txt(\.zst|\.gz)?$", name, re.IGNORECASE))


def zstd():
    """The module that reads .zst files."""
    return importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")


def decompressed(file, name):
    """(an open file of the content, the type of errors of damaged data) of the open file called `name`."""
    if name.lower().endswith(".zst"):
        limit = zstd().DecompressionParameter.window_log_max        # default 27; `zstd --long=31` writes up to 31
        return zstd().open(file, options={limit: limit.bounds()[1]}), zstd().ZstdError
    return gzip.open(file) if name.lower().endswith(".gz") else file, zlib.error


def records(file, name):
    """The records of an open file, bytes: the whole of a .txt, the elements of a single JSON array, else the lines."""
    if is_text(name):
        return iter(file.read, b"")
    if file.peek(100).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] != b"[":
        return file
    whole = file.read()
    try:
        return [json.dumps(element).encode() for element in json.loads(whole)]
    except (ValueError, RecursionError):
        return [whole]                                      # `text_of` says what is wrong


def text_of(raw, name, key):
    """The text of one record, bytes, of a file; "" if it is blank. It has no byte order mark, and \\n as line ends.
    Raises ValueError for a bad record, UnicodeDecodeError if it is not UTF-8."""
    if not raw.removeprefix(b"\xef\xbb\xbf").strip():
        return ""
    text = raw.decode("utf-8-sig")
    if is_text(name) and "\0" in text:                      # as in English UTF-16
        raise UnicodeDecodeError("utf-8", raw, raw.index(b"\0"), len(raw), "a zero byte")
    if not is_text(name):
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            row = error
        if not isinstance(row, (dict, str)):
            raise ValueError(f'not a JSON object ({row!s:.90}); one is expected on each line, {{"{key}": ...}}, or one '
                             "array of them in the file")
        text = row if isinstance(row, str) else row.get(key)
        if not isinstance(text, str):
            raise ValueError(f'no text in "{key}"; --text_key names another of its fields {[*row]}')
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    if not text:
        raise ValueError("an empty document")
    return text


def not_utf8(error, line, path, name):
    """(what is wrong, what to do) for a record which begins in this line of a file, and is not UTF-8."""
    raw, at = error.object, error.start
    # UTF-16 has a byte order mark or zero bytes. Other letters than ASCII before the byte: it is UTF-8, but damaged.
    wide = b"\0" in raw or raw[:2] in (b"\xff\xfe", b"\xfe\xff")
    encoding = ("utf-16be" if raw[0] == 0 else "utf-16") if wide else "cp1252" if raw[:at].isascii() else "utf-8 -c"
    bare, ending = re.fullmatch(r"(.*?)(\.gz|\.zst|)", path.name, re.IGNORECASE).groups()
    unpack = {"": "cat", ".gz": "gzip -dc", ".zst": "zstd -dc"}[ending.lower()]
    return (f"{name} is not UTF-8 (line {line + raw.count(bytes([10]), 0, at)}, byte 0x{raw[at]:02x})",
            "convert it, with its encoding after -f (such as cp1251, gb18030, shift_jis), and name the new file: "
            f"{unpack} {shlex.quote(str(path))} | iconv -f {encoding} -t utf-8 > {shlex.quote('utf8-' + bare)}")


def end_of(text, share):
    """Where the end of a text begins, a share of its characters. It is up to a tenth shorter if a line begins there, or
    else a word."""
    n = int(share * len(text.rstrip()))
    begin = len(text.rstrip()) - n
    found = [text.find(mark, begin - 1, begin + n // 10) + 1 for mark in "\n "]        # 0 if there is none
    return found[0] or found[1] or begin


# ----------------------------------------------------------------------------------------------
# From files to a prepared folder

class Preparation:
    """Turns sources into a prepared folder. The result depends only on the sources and the settings.

    Tokens are appended to OUT/train.bin and OUT/val.bin. After an input file, but at most once in SYNC_SECONDS,
    OUT/parts/progress.json gets the counts so far. A later run cuts off what comes after them, and goes on with the
    next file. meta.json comes last.

    origin, revision: texts for meta.json, where the sources come from. fetch(name): the path of a source, after a
    download to OUT/parts/download if necessary. settings: the arguments of `parse_arguments`.
    tokens: stop when the split of the first source has this many, with the last document whole; 0: no limit.
    val_fraction: the share of the text that is kept for validation: random documents or, if it is less than one whole
    .txt file, the end of each. None: a tenth, but at most VAL_BYTES.

    counts: files, documents, train_tokens, train_documents, ..., skipped, separators; so far.
    """

    def __init__(self, out, sources, settings, origin, revision="", fetch=Path):
        self.out, self.parts, self.progress = Path(out), Path(out, "parts"), Path(out, "parts", "progress.json")
        self.sources, self.origin, self.revision, self.fetch = sources, origin, revision, fetch
        self.settings, self.tokenizer, self.share = settings, get_tokenizer(settings.tokenizer), settings.val_fraction
        if self.share is None:                              # no --val and no --val_fraction
            self.share = min(0.1, VAL_BYTES / max(1, sum(source.size for source in sources)))
        n_texts = sum(source.split == "train" and is_text(source.name) for source in sources)
        # A share of less than one whole .txt file, such as a tenth of three: then the end of each of them is kept.
        self.keeps_ends = not settings.split_on and 0 < self.share * n_texts < 1
        self.splits = {source.split for source in sources} | ({"val"} if self.share else set())
        chosen = [getattr(settings, name) for name in ("tokenizer", "tokens", "val_fraction", "split_on", "text_key")]
        self.made_from = hashlib.sha256(json.dumps([sources, revision, *chosen]).encode()).hexdigest()

    def run(self):
        """Prepares what is missing and returns the content of meta.json. Raises UserError."""
        if not self.is_made():
            self.parts.mkdir(parents=True, exist_ok=True)
            with lock(self.parts / "lock", f"another process is writing to {self.out}; wait for it, or {ELSEWHERE}"):
                if not self.is_made():                  # else that process has just finished
                    self.write_splits()
                    self.finish()
        shutil.rmtree(self.parts, ignore_errors=True)
        return read_meta(self.out)

    def is_made(self):
        """Whether the folder is finished. If it is not, takes over what an earlier run has counted. Raises UserError if
        the folder holds anything that this command did not make."""
        records = [path for path in (self.out / "meta.json", self.progress) if path.exists()]
        record = read_json(records[0]) if records else {}
        self.counts = Counter(record.get("counts"))
        # A run that has finished no file yet, perhaps because of a wrong setting, may go on with other ones.
        if records and record.get("made_from") != self.made_from and record.get("counts") != {}:
            raise UserError(f"{self.out} was made from other files or with other settings, or the files have changed "
                            f"since (their size or time): {ELSEWHERE}")
        held = {path.name for path in [*self.out.glob("*"), *self.parts.glob("*")]}
        if not records and not all(re.fullmatch(r"parts|lock|progress\.json\..*tmp", name) for name in held):
            raise UserError(f"{self.out} is not empty, and this command did not make it: {ELSEWHERE}")
        return self.out / "meta.json" in records

    def sync(self, files=()):
        """Records the counts, after what they count is on the disk."""
        for file in files:
            file.flush()
            os.fsync(file.fileno())
        write_file(self.progress, json.dumps(dict(made_from=self.made_from, counts=self.counts)))
        self.synced = time.monotonic()

    def is_full(self):
        return 0 < self.settings.tokens <= self.counts[f"{self.sources[0].split}_tokens"]

    def write_splits(self):
        """Writes the tokens of the input files that are not done."""
        self.sync()                                     # from now on the folder is known as ours
        with (ThreadPoolExecutor(os.cpu_count()) as pool, contextlib.ExitStack() as opened,
              tqdm(desc=str(self.out), unit="tok", unit_scale=True) as self.bar):
            files = {split: opened.enter_context(open(self.out / f"{split}.bin", "ab")) for split in self.splits}
            for split, file in files.items():
                size = 2 * self.counts[f"{split}_tokens"]                      # 2 bytes a token
                if file.tell() < size:
                    raise UserError(f"{file.name} is shorter than when it was written: {ELSEWHERE}")
                file.truncate(size)
            for source in self.sources[self.counts["files"]:]:
                if not self.is_full():
                    self.write_source(source, files, pool)
            self.sync(files.values())

    def write_source(self, source, files, pool):
        """Writes the tokens of an input file, and counts it. Removes what was downloaded."""
        documents = self.read(source, self.fetch(source.name))
        while not self.is_full() and (batch := list(islice(documents, BATCH))):
            for document in pool.map(self.tokenise, batch):
                if not self.is_full():
                    self.write(files, *document)
        self.counts["files"] += 1
        if time.monotonic() - self.synced >= SYNC_SECONDS:
            self.sync(files.values())
        shutil.rmtree((self.parts / "download").resolve(), ignore_errors=True)

    def read(self, source, path):
        """Yields (split, text) of every document of a file; split None: that which `write` chooses. Blank lines and
        blank .txt files are none. Raises UserError if the system cannot read the file, and see `reject`."""
        line, damaged = 0, zlib.error
        try:
            with open(path, "rb") as file:
                content, damaged = decompressed(file, source.name)
                for line, raw in enumerate(records(content, source.name), 1):
                    try:
                        yield from self.documents(source, text_of(raw, source.name, self.settings.text_key))
                    except UnicodeDecodeError as error:
                        self.reject(source, *not_utf8(error, line, path, source.name))
                    except ValueError as error:
                        self.reject(source, f"{source.name}:{line}: {error}")
        except (OSError, EOFError, damaged) as error:
            if getattr(error, "errno", None):           # an error of the system; damaged data has no errno
                raise UserError(f"{path} cannot be read ({error.strerror}): mend that, and {AGAIN}") from None
            self.reject(source, f"{source.name}:{line + 1}: the rest of the file is damaged ({error})")

    def reject(self, source, what, cure=f"correct it and {ELSEWHERE}"):
        """Counts a bad document, or the bad rest of a file. Raises UserError without --skip_bad. what: where and what
        is wrong."""
        if not self.settings.skip_bad:
            alone = ".jsonl" not in source.name.lower() and sum(s.split == source.split for s in self.sources) == 1
            raise UserError(f"{what}; {'' if alone else f'add --skip_bad and {AGAIN} without it, or '}{cure}")
        print(f"skipped {what}", file=sys.stderr)
        self.counts["skipped"] += 1

    def documents(self, source, text):
        """The documents of a record, see `read`: one, none if it is blank, or what `split_on` or `end_of` makes of
        it."""
        if self.keeps_ends and source.split == "train" and is_text(source.name):
            begin = end_of(text, self.share)
            found = [("train", text[:begin]), ("val", text[begin:])]
        else:
            split, mark = None if self.share and source.split == "train" else source.split, self.settings.split_on
            found = [(split, piece) for piece in (text.split(mark) if mark else [text])]
            self.counts["separators"] += len(found) - 1
        return [(split, piece) for split, piece in found if piece.strip()]

    def tokenise(self, document):
        """(split, names of special tokens in the text, tokens, UTF-8 bytes) of a document, see `read`. Runs in threads:
        tiktoken releases the interpreter lock."""
        split, text = document
        marked = [name for name in self.tokenizer.special_tokens_set if name in text]
        return split, marked, *encode(self.tokenizer, text)

    def write(self, files, split, marked, tokens, size):
        """Writes and counts a document, see `tokenise`."""
        self.counts["documents"] += 1
        if split is None:
            # Validation gets its share of the documents so far, whatever their sizes; a hash decides when. Of the first
            # two it gets one: so no split is empty.
            due = self.share * self.counts["documents"] - self.counts["val_documents"]
            # Of two documents the second goes where the first did not: a chance of 1 (never to val) or 0.
            chance = self.counts["val_documents"] if self.counts["documents"] == 2 else zlib.crc32(tokens) / 2**32
            split = "val" if due > chance else "train"
        files[split].write(tokens)
        self.counts.update({f"{split}_tokens": len(tokens), f"{split}_documents": 1, f"{split}_utf8_bytes": size})
        self.counts.update(marked)
        self.bar.update(len(tokens))

    def finish(self):
        """Writes meta.json. Raises UserError, and leaves nothing, if a split has no document."""
        n, mark, wrong = self.counts["documents"], self.settings.split_on, ""
        splits = {split: {key: self.counts[f"{split}_{key}"] for key in ("tokens", "documents", "utf8_bytes")}
                  for split in sorted(self.splits)}
        empty = [split for split, counts in splits.items() if not counts["documents"]]
        if mark and n and not self.counts["separators"]:
            wrong = f"--split_on {mark!r} occurs nowhere in the text: correct it, or leave it out"
        elif empty:
            wrong = (f"{n} documents were found, none for the {empty[0]} split: give more text, or keep none for "
                     "validation by --val_fraction 0")
        if wrong:
            shutil.rmtree(self.parts)
            for split in splits:
                (self.out / f"{split}.bin").unlink()
            raise UserError(wrong)
        write_meta(self.out, self.origin, self.revision, self.settings.tokenizer, splits, self.counts["skipped"],
                   self.made_from)
        if self.share:
            ends = "the end of each .txt" + ", and other documents" * any(not is_text(s.name) for s in self.sources)
            how = ends if self.keeps_ends else f"{self.counts['val_documents']:,} of {n:,} documents"
            kept, total = self.counts["val_utf8_bytes"], sum(counts["utf8_bytes"] for counts in splits.values())
            other = "" if self.settings.val_fraction else "; --val FILE names other text, --val_fraction 0 keeps none"
            print(f"kept {kept:,} of {total:,} bytes of text for validation, {how}{other}")
        for name in sorted(self.tokenizer.special_tokens_set & self.counts.keys()):
            print(f"{self.counts[name]:,} documents contain {name}, which stays ordinary text; if it ends them, add "
                  f"--split_on '{name}' and another --out; docs/forking.md says how it becomes a token")


# ----------------------------------------------------------------------------------------------
# Where the files are

def local_sources(paths, split):
    """Sources for the user's own files. Raises UserError for a missing file or an unknown ending."""
    for path in map(Path, paths):
        if not path.is_file() or not re.search(r"\.(jsonl|json|txt)(\.zst|\.gz)?$", path.name, re.IGNORECASE):
            raise UserError(f"{path} is not a file with one of the endings .jsonl, .json and .txt, perhaps before "
                            ".zst or .gz: name such files")
    return [Source(split, str(path), (stat := os.stat(path)).st_size, stat.st_mtime_ns) for path in paths]


def from_hub(repo, call, *args, **kwargs):
    """Calls a function of huggingface_hub. Raises UserError for the errors of the hub, the network and the disk."""
    try:
        return call(repo, *args, **kwargs)
    except Exception as error:
        raise UserError(f"{repo} cannot be read from the hub ({type(error).__name__}: {error}): check the network and "
                        f"the room on the disk, and {AGAIN}; or name a copy with --local. A gated data set needs `hf "
                        f"auth login`, and your consent at https://huggingface.co/datasets/{repo}") from None


def hub_sources(name, out, local):
    """(sources, repository, revision, fetch) of a data set in HUB, see `Preparation`. local: a folder with the
    repository's layout, read instead of the hub."""
    repo, revision, wanted, split = HUB[name]
    if local:
        held = [path.relative_to(local).as_posix() for path in Path(local).rglob("*") if path.is_file()]
        fetch, revision = (lambda file: Path(local, file)), "a local copy"
    else:
        from huggingface_hub import HfApi, hf_hub_download
        revision = from_hub(repo, HfApi().dataset_info, revision=revision).sha
        where = dict(repo_type="dataset", revision=revision)
        held = from_hub(repo, HfApi().list_repo_files, **where)
        where["local_dir"] = Path(out, "parts", "download")
        fetch = lambda file: Path(from_hub(repo, hf_hub_download, file, **where))
    names = sorted(file for file in held if re.fullmatch(wanted, file))
    if not names:
        raise UserError(f"{local or repo} holds no file that matches {wanted}; it holds {sorted(held)[:5]}")
    # The revision tells versions of the hub's files apart, the size those of a local copy.
    sizes = [os.path.getsize(fetch(file)) if local else 0 for file in names]
    return [Source(split, *file) for file in zip(names, sizes)], repo, revision, fetch


# ----------------------------------------------------------------------------------------------
# The script

def show(path):
    """Prints the content of a prepared folder: counts, bytes per token, and the first tokens of each split."""
    meta = read_meta(path)
    tokenizer = get_tokenizer(meta["tokenizer"])
    eot = tokenizer.eot_token
    origin = [meta[key] for key in ("source", "revision") if meta.get(key)]
    print(f"{path}: {' '.join(origin)}, {tokenizer.name} tokens, vocabulary {tokenizer.n_vocab:,}, "
          f"{meta.get('skipped', 0)} bad documents skipped")
    for split, info in meta["splits"].items():
        told = [f"{n:,} {key}" for key, n in info.items() if key != "sha256"]      # of earlier folders
        told += [f"{info['utf8_bytes'] / info['tokens']:.3f} bytes per token"] if "utf8_bytes" in info else []
        print(f"{split}: {', '.join(told)}")
        tokens = TokenData(path, split).sequences(min(100, info["tokens"]), 1)[0].numpy()
        documents = np.split(tokens, np.flatnonzero(tokens == eot) + 1)
        # The text is in quotation marks; the mark of a real end-of-text token is not.
        print("   ", " [end of text] ".join(repr(tokenizer.decode(d[d != eot].tolist())) for d in documents))


def unescaped(text):
    r"""The text of --split_on with \n for a line break, \t for a tab, and so on; all documents have \n as line ends."""
    return re.sub(r"\\[nrtf\\]", lambda found: found[0].encode().decode("unicode_escape"), text).replace("\r\n", "\n")


def parse_arguments(argv):
    path, form = os.path.expanduser, argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("data.py", description=__doc__, formatter_class=form)
    parser.add_argument("command", type=lambda name: "text" if name == "jsonl" else name, choices=TAKES)  # its old name
    parser.add_argument("paths", nargs="*", type=path, default=[], metavar="PATH", help="training text; or a folder")
    parser.add_argument("--val", nargs="+", type=path, default=[], metavar="PATH", help="validation text")
    parser.add_argument("--out", type=path, metavar="DIR", help="the folder to make (default: data/COMMAND)")
    parser.add_argument("--local", type=path, metavar="DIR", help="a copy of the hub's files, read instead")
    parser.add_argument("--tokenizer", choices=[*VOCABULARY], default="gpt2", help="default: gpt2")
    parser.add_argument("--tokens", type=float, help="stop here; c4 and paloma: by default 256 x 8192")
    parser.add_argument("--val_fraction", type=float, help="share of the text for validation")
    parser.add_argument("--split_on", type=unescaped, default="", metavar="TEXT",
                        help="ends a document, for example <|endoftext|>, or \\n\\n for an empty line; --split_on=---")
    parser.add_argument("--text_key", default="text", metavar="NAME", help="the field of the text (default: text)")
    parser.add_argument("--skip_bad", action="store_true", help="report bad documents and go on")
    args = parser.parse_intermixed_args(argv)
    for name, value in vars(args).items():
        if value != parser.get_default(name) and name not in ("command", *TAKES[args.command].split()):
            parser.error(f"{args.command} takes no {name}; it takes {TAKES[args.command]}")
    given = dict(tokens=1 if args.tokens is None else args.tokens, val_fraction=args.val_fraction or 0)
    check(given, least=dict(tokens=1, val_fraction=0), most=dict(tokens=10 ** 15, val_fraction=0.99))
    return args


def prepare_text(args):
    """Runs the commands text, dclm, c4 and paloma."""
    args.tokens, about = int(args.tokens or 0), ["local files"]
    if args.command == "text":
        sources = local_sources(args.paths, "train") + local_sources(args.val, "val")
        if len({os.path.realpath(source.name) for source in sources}) < len(sources):
            raise UserError("a file is named twice, perhaps as text to train on and with --val: name each once")
        if not sources:
            raise UserError("no files: name some, as in python data.py text PATH... --out DIR")
    else:
        if args.command == "dclm" and not args.tokens:
            raise UserError("how many tokens? for example python data.py dclm --tokens 5e9")
        sources, *about = hub_sources(args.command, args.out, args.local)
        args.tokens = args.tokens or 256 * 8192
    if args.val_fraction is None:
        args.val_fraction = dict(dclm=5e-4, c4=0.0, paloma=0.0, text=0.0 if args.val else None)[args.command]
    Preparation(args.out, sources, args, *about).run()


def main(argv):
    """Runs one command. Errors end the process as in configurator.script."""
    with script("data.py"):
        args = parse_arguments(argv)
        args.out = args.out or f"data/{args.command}"
        if args.command == "stdlib":
            prepare_stdlib(args.out)
        elif args.command != "show":
            prepare_text(args)
        for folder in (args.command == "show" and args.paths) or [args.out]:
            show(folder)


if __name__ == "__main__":
    main(sys.argv[1:])
