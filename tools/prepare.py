"""
Prepares text for training and evaluation, as folders that data.py reads. docs/data.md describes the formats.

  stdlib            the running Python's own source, as bytes: the default corpus, no download
  jsonl PATH...     your own .jsonl and .txt files, also as .gz or .zst
  dclm, c4, paloma  training text from DCLM-baseline; C4-en validation text; that of Paloma (gated). They need the
                    package huggingface_hub, or --local with a copy of the hub's files
  show DIR          prints what a prepared folder holds

    python data.py jsonl my.txt --tokenizer bytes --out data/mine
    python data.py jsonl *.jsonl.zst --val valid.jsonl --out data/mine
    python data.py dclm --tokens 5e9
"""
import argparse
import functools
import gzip
import hashlib
import json
import os
import re
import shutil
import sys
import zlib
from collections import Counter, deque, namedtuple
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path

import numpy as np

from checkpoint import lock, need, write_file
from configurator import UserError, script, tqdm
from data import VOCABULARY, TokenData, encode, get_tokenizer, prepare_stdlib, read_meta, token_bytes, write_meta

HUB = {                             # what `python data.py NAME` downloads: repository, revision, files, split
    "dclm": ("mlfoundations/dclm-baseline-1.0", "a3b142c183aebe5af344955ae20836eb34dcf69b",
             r"global-shard.*/local-shard.*/.*\.jsonl\.zst", "train"),
    "c4": ("allenai/c4", "main", r"en/c4-validation\..*\.json\.gz", "val"),
    "paloma": ("allenai/paloma", "main", r"c4_en/val/.*\.jsonl\.gz", "val"),
}
TAKES = dict(                       # the arguments that each command takes
    stdlib="out", show="paths", jsonl="paths val out tokenizer val_fraction split_on text_key skip_bad",
    **dict.fromkeys(HUB, "tokens out tokenizer val_fraction split_on skip_bad local"))
BATCH = 16                          # documents that a thread tokenises at a time
VAL_BYTES = 10 ** 6                 # kept for validation if neither --val nor --val_fraction is given: at most this
END_OF_TEXT = "<|endoftext|>"
AGAIN, ELSEWHERE = "run the same command again and it continues", "choose another --out"

# One input file. name: its ending determines the format. fetch(): returns the path, after a download if necessary.
# size, changed: bytes, and time of the last change in ns; 0 for a data set of the hub.
Source = namedtuple("Source", "split name fetch size changed", defaults=(0, 0))


# ----------------------------------------------------------------------------------------------
# From files to tokens

def is_text(name):
    """Whether a file is one document of plain text, not a document of JSON on each line."""
    return re.search(r"\.txt(\.zst|\.gz)?$", name, re.IGNORECASE)


def zstd():
    """The module that reads .zst files. Raises UserError if it is missing."""
    own = sys.version_info >= (3, 14)                   # then Python has it
    return need("compression.zstd" if own else "backports.zstd", "a .zst file", "backports.zstd")


def decompressed(file, name):
    """(an open file of the content, the type of errors of damaged data) of the open file called `name`."""
    if name.lower().endswith(".zst"):
        limit = zstd().DecompressionParameter.window_log_max        # default 27; `zstd --long=31` writes up to 31
        return zstd().open(file, options={limit: limit.bounds()[1]}), zstd().ZstdError
    return gzip.open(file) if name.lower().endswith(".gz") else file, zlib.error


def texts_of(raw, name, settings):
    """The texts of one record, bytes: one, none if it is blank, or what `split_on` makes of it. They have no byte order
    mark, and \\n as line ends. Raises ValueError for a bad record."""
    if not raw.strip():
        return []
    text = raw.decode("utf-8-sig")
    if not is_text(name):
        try:
            row = json.loads(text)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise ValueError('not a JSON object; one is expected on each line, {"text": ...}')
        text = row.get(settings.text_key)
        if not isinstance(text, str):
            raise ValueError(f'no text in "{settings.text_key}"; --text_key names another of its fields {[*row]}')
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    if not text:
        raise ValueError("an empty document")
    if settings.split_on:
        return [piece for piece in text.split(settings.split_on) if piece.strip()]
    return [text]


def end_of(raw, size):
    """Where the end of a text begins that is kept for validation: about `size` bytes, from the beginning of a line. In
    a text without line ends there, from the beginning of a character."""
    begin = raw.find(b"\n", max(0, len(raw) - size - 1)) + 1
    if begin in (0, len(raw)):
        begin = len(raw) - size
        while begin < len(raw) and raw[begin] & 0xC0 == 0x80:       # the later bytes of a character in UTF-8
            begin += 1
    return begin


def tokenise(tokenizer, documents):
    """Encodes [(split, share, text, why)], see `Preparation.read`, as [(split, share, why, tokens, UTF-8 bytes, whether
    the text contains END_OF_TEXT)]. Runs in threads: tiktoken releases the interpreter lock."""
    return [(split, share, why, *encode(tokenizer, text), END_OF_TEXT in text) for split, share, text, why in documents]


def ordered_map(pool, function, items, ahead):
    """Like pool.map, but at most `ahead` items are in progress at a time. Results come in order."""
    items, waiting = iter(items), deque()
    while True:
        waiting.extend(pool.submit(function, item) for item in islice(items, ahead - len(waiting)))
        if not waiting:
            return
        yield waiting.popleft().result()


# ----------------------------------------------------------------------------------------------
# From files to a prepared folder

class Preparation:
    """Turns sources into a prepared folder. The result depends only on the sources and the settings.

    The tokens of an input file are a part, in the folder OUT/parts. A part is done when its counts exist: those of all
    parts so far. A later run keeps the parts that are done and goes on with the next one.

    origin, revision: texts for meta.json, where the sources come from. settings: the arguments of `parse_arguments`.
    tokens: stop when the split of the first source has this many, with the last document whole; 0: no limit.
    val_fraction None: keep the end of each .txt, and a share of other documents, for validation; a tenth of the text,
    but at most VAL_BYTES.
    """

    def __init__(self, out, sources, settings, origin, revision=""):
        self.out, self.parts, self.sources, self.settings = Path(out), Path(out, "parts"), sources, settings
        self.origin, self.revision, self.tokenizer = origin, revision, get_tokenizer(settings.tokenizer)
        self.keeps_end, self.share = False, settings.val_fraction
        if settings.val_fraction is None:                   # no --val and no --val_fraction
            self.keeps_end, self.share = True, min(0.1, VAL_BYTES / max(1, sum(source.size for source in sources)))
        self.counts = Counter()             # train_tokens, train_documents, ..., skipped, marked
        self.limited = f"{sources[0].split}_tokens"         # the count that settings.tokens limits
        inputs = [(s.split, s.name, s.size, s.changed) for s in sources]
        inputs += [text for text in (settings.split_on, settings.text_key) if text not in ("", "text")]
        self.made_from = dict(
            files=len(sources), first=sources[0].name, revision=revision,
            sha256=hashlib.sha256(json.dumps(inputs).encode()).hexdigest(),
            tokenizer=settings.tokenizer, budget=settings.tokens, val_fraction=settings.val_fraction)

    def run(self):
        """Prepares what is missing and returns the content of meta.json. Raises UserError."""
        if not self.is_made():
            self.parts.mkdir(parents=True, exist_ok=True)
            with lock(self.parts / "lock", f"another process is writing to {self.out}; wait for it, or {ELSEWHERE}"):
                if not self.is_made():                  # else that process has just finished
                    self.write_parts()
                    self.finish()
        shutil.rmtree(self.parts, ignore_errors=True)
        return read_meta(self.out)

    def is_made(self):
        """Whether the folder is finished. Raises UserError if it holds anything that this command did not make."""
        held = [path.relative_to(self.out).as_posix() for path in [*self.out.glob("*"), *self.parts.glob("*")]]
        records = sorted(name for name in held if re.fullmatch(r"meta\.json|parts/\d{7}\.json", name))
        if records and json.loads((self.out / records[0]).read_text()).get("made_from") != self.made_from:
            raise UserError(f"{self.out} was made from other files or with other settings, or the files have changed "
                            f"since (their size or time): {ELSEWHERE}")
        begun = r"parts(/lock|/download|/\d{7}\.(json|train\.bin|val\.bin)(\.tmp)?)?"
        if not records and not all(re.fullmatch(begun, name) for name in held):
            raise UserError(f"{self.out} is not empty, and this command did not make it: {ELSEWHERE}")
        return "meta.json" in held

    def is_full(self):
        return 0 < self.settings.tokens <= self.counts[self.limited]

    def write_parts(self):
        """Writes the parts that are missing, and downloads the file of the next one meanwhile."""
        done = sorted(self.parts.glob("*.json"))
        if done:
            self.counts.update(json.loads(done[-1].read_text())["counts"])
        fetch = lambda source: (source, source.fetch())
        self.bar = tqdm(desc=str(self.out), unit="tok", unit_scale=True)
        with self.bar, ThreadPoolExecutor(os.cpu_count()) as self.pool:
            for number, file in enumerate(ordered_map(self.pool, fetch, self.sources[len(done):], 2), len(done)):
                if self.is_full():
                    return
                self.write_part(f"{self.parts}/{number:07d}", *file)

    def write_part(self, part, source, path):
        """Writes the tokens of a file, and then the counts. Removes the file if it was downloaded."""
        documents = self.read(source, path)
        batches = iter(lambda: list(islice(documents, BATCH)), [])
        found = ordered_map(self.pool, functools.partial(tokenise, self.tokenizer), batches, 2 * os.cpu_count() + 1)

        def write_splits(train):
            write_file(f"{part}.val.bin", lambda val: self.write_tokens(dict(train=train, val=val), found))
        write_file(f"{part}.train.bin", write_splits)
        write_file(f"{part}.json", json.dumps(dict(made_from=self.made_from, counts=self.counts)))
        if (self.parts / "download").resolve() in path.resolve().parents:
            path.unlink()

    def read(self, source, path):
        """Yields (split, share, text, why) of every document of a file. Blank lines and blank .txt files are none.

        share: of such documents that goes to validation. For a bad document, and for the rest of a damaged file, text
        is "", and why says where and why; else that is "". Raises UserError if the system cannot read the file.
        """
        line, damaged = 0, zlib.error
        try:
            with open(path, "rb") as file:
                lines, damaged = decompressed(file, source.name)
                if is_text(source.name):
                    lines = iter(lines.read, b"")       # one line
                for line, raw in enumerate(lines, 1):
                    try:
                        yield from self.documents(source, raw)
                    except ValueError as error:
                        yield source.split, 0, "", f"{source.name}:{line}: {error}"
        except (OSError, EOFError, damaged) as error:
            if getattr(error, "errno", None):           # an error of the system; damaged data has no errno
                raise UserError(f"{path} cannot be read ({error.strerror}): mend that, and {AGAIN}") from None
            yield source.split, 0, "", f"{source.name}:{line + 1}: the rest of the file is damaged ({error})"

    def documents(self, source, raw):
        """Yields (split, share, text, ""), see `read`, of each document of a record. Raises ValueError if it is bad."""
        pieces = [(source.split, self.share, raw)]
        if self.keeps_end and is_text(source.name) and not self.settings.split_on:
            begin = end_of(raw, int(min(self.share * len(raw), VAL_BYTES)))
            pieces = [(source.split, 0, raw[:begin]), ("val", 0, raw[begin:])]
        for split, share, piece in pieces:
            for text in texts_of(piece, source.name, self.settings):
                yield split, share, text, ""

    def write_tokens(self, files, found):
        """Writes batches of `tokenise` to the open file of each split, up to the limit of tokens."""
        for split, share, why, tokens, size, marked in chain.from_iterable(found):
            if self.is_full():
                return
            if why:
                self.skip(why)
                continue
            if share and zlib.crc32(tokens) < share * 2**32:
                split = "val"
            if self.keeps_end and self.counts["val_utf8_bytes"] + size > VAL_BYTES:
                split = "train"
            files[split].write(tokens)
            self.count(split, len(tokens), 1, size)
            self.counts["marked"] += marked
            self.bar.update(len(tokens))

    def count(self, split, tokens, documents, utf8_bytes):
        """Adds to the counts of a split."""
        for key, n in dict(tokens=tokens, documents=documents, utf8_bytes=utf8_bytes).items():
            self.counts[f"{split}_{key}"] += n

    def skip(self, why):
        """Reports and counts a bad document. Raises UserError without --skip_bad."""
        if not self.settings.skip_bad:
            raise UserError(f"{why}; add --skip_bad and {AGAIN} without it, or correct it and {ELSEWHERE}")
        print(f"skipped {why}", file=sys.stderr)
        self.counts["skipped"] += 1

    def finish(self):
        """Joins the parts and writes meta.json. Raises UserError, and leaves nothing, if a split has no document."""
        counts = self.counts
        given = {source.split for source in self.sources}
        wanted = {*given, "val"} if self.share else given
        empty = [split for split in wanted if not counts[f"{split}_documents"]]
        n = counts["train_documents"] + counts["val_documents"]
        if empty and (wanted == given or n < 2):
            shutil.rmtree(self.parts)
            advice = "name text with --val, or keep everything for training with --val_fraction 0"
            raise UserError(f"{n} documents were found, none for the {empty[0]} split: " + (advice if n else "give text"))
        for split in wanted:
            write_file(self.out / f"{split}.bin", functools.partial(self.join, split))
        for split in empty:
            self.move_last(split)
        splits = {split: {key: counts[f"{split}_{key}"] for key in ("tokens", "documents", "utf8_bytes")}
                  for split in sorted(wanted)}
        write_meta(self.out, self.origin, self.revision, self.settings.tokenizer, splits, counts["skipped"],
                   self.made_from)
        self.report()

    def join(self, split, whole):
        for part in sorted(self.parts.glob(f"*.{split}.bin")):
            with open(part, "rb") as file:
                shutil.copyfileobj(file, whole)

    def move_last(self, split):
        """Moves the last document to a split that has none, from the other one."""
        other = "val" if split == "train" else "train"
        tokens = np.fromfile(self.out / f"{other}.bin", "<u2")
        begin = np.flatnonzero(tokens == self.tokenizer.eot_token)[-2] + 1
        last = tokens[begin:]
        write_file(self.out / f"{split}.bin", last.tofile)
        write_file(self.out / f"{other}.bin", tokens[:begin].tofile)
        size = int(token_bytes(self.tokenizer.name)[last].sum())
        self.count(split, len(last), 1, size)
        self.count(other, -len(last), -1, -size)

    def report(self):
        """Prints what the user may not expect."""
        train, val, marked = (self.counts[key] for key in ("train_utf8_bytes", "val_utf8_bytes", "marked"))
        if self.keeps_end:
            print(f"kept {val:,} of {train + val:,} bytes of text for validation; --val FILE names other text, "
                  "--val_fraction 0 keeps nothing")
        if marked:
            print(f"{marked:,} documents contain {END_OF_TEXT}, which stays ordinary text; if it ends documents, "
                  f"prepare them again with --split_on '{END_OF_TEXT}' and another --out")


# ----------------------------------------------------------------------------------------------
# Where the files are

def local_sources(paths, split):
    """Sources for the user's own files. Raises UserError for a missing file or an unknown ending."""
    sources = []
    for path in map(Path, paths):
        if not path.is_file() or not re.search(r"\.(jsonl|json|txt)(\.zst|\.gz)?$", path.name, re.IGNORECASE):
            raise UserError(f"{path} is not a file with one of the endings .jsonl, .json and .txt, perhaps before .zst "
                            "or .gz: name such files")
        stat = path.stat()
        sources.append(Source(split, path.name, functools.partial(Path, path), stat.st_size, stat.st_mtime_ns))
    return sources


def from_hub(repo, call, *args, **kwargs):
    """Calls a function of huggingface_hub. Raises UserError for the errors of the hub, the network and the disk."""
    try:
        return call(repo, *args, **kwargs)
    except Exception as error:
        raise UserError(
            f"{repo} cannot be read from the hub ({type(error).__name__}: {error}): check the network and the room on "
            f"the disk, and {AGAIN}; or name a copy with --local. A gated data set needs `hf auth login`, and your "
            f"consent at https://huggingface.co/datasets/{repo}") from None


def hub_sources(name, out, local):
    """(sources, repository, revision) of one of the data sets in HUB. local: a folder with the repository's layout,
    read instead of the hub."""
    repo, revision, wanted, split = HUB[name]
    if local:
        held = [path.relative_to(local).as_posix() for path in Path(local).rglob("*") if path.is_file()]
        fetch, revision = functools.partial(Path, local), "a local copy"
    else:
        hub = need("huggingface_hub", repo)
        revision = from_hub(repo, hub.HfApi().dataset_info, revision=revision).sha
        where = dict(repo_type="dataset", revision=revision)
        held = from_hub(repo, hub.HfApi().list_repo_files, **where)
        where["local_dir"] = Path(out, "parts", "download")
        fetch = lambda file: Path(from_hub(repo, hub.hf_hub_download, file, **where))
    names = sorted(file for file in held if re.fullmatch(wanted, file))
    if not names:
        raise UserError(f"{local or repo} holds no file that matches {wanted}; it holds {sorted(held)[:5]}")
    return [Source(split, file, functools.partial(fetch, file)) for file in names], repo, revision


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
        told = [f"{n:,} {key}" for key, n in info.items() if key != "sha256"]
        if "utf8_bytes" in info:
            told.append(f"{info['utf8_bytes'] / info['tokens']:.3f} bytes per token")
        print(f"{split}: {', '.join(told)}")
        tokens = TokenData(path, split).sequences(min(100, info["tokens"]), 1)[0].numpy()
        documents = np.split(tokens, np.flatnonzero(tokens == eot) + 1)
        # The text is in quotation marks; the mark of a real end-of-text token is not.
        print("   ", " [end of text] ".join(repr(tokenizer.decode(d[d != eot].tolist())) for d in documents))


def parse_arguments(argv):
    """The arguments; those that are not given are None or empty."""
    path = os.path.expanduser
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("data.py", description=__doc__, formatter_class=form)
    parser.add_argument("command", choices=TAKES)
    parser.add_argument("paths", nargs="*", type=path, metavar="PATH", help="training text; for show, a folder")
    parser.add_argument("--val", nargs="+", type=path, default=[], metavar="PATH", help="validation text")
    parser.add_argument("--out", type=path, metavar="DIR", help="the folder to make (default: data/COMMAND)")
    parser.add_argument("--local", type=path, metavar="DIR", help="a copy of the hub's files, read instead")
    parser.add_argument("--tokenizer", choices=[*VOCABULARY], help="default: gpt2")
    parser.add_argument("--tokens", type=float, help="stop here; c4 and paloma: by default 256 x 8192")
    parser.add_argument("--val_fraction", type=float, help="share of the documents for validation")
    parser.add_argument("--split_on", default="", metavar="TEXT", help=f"ends a document, for example {END_OF_TEXT}")
    parser.add_argument("--text_key", default="", metavar="NAME", help="the field that holds the text (default: text)")
    parser.add_argument("--skip_bad", action="store_true", help="report bad documents and go on")
    args = parser.parse_intermixed_args(argv)
    for name, value in vars(args).items():
        if value and name not in ("command", *TAKES[args.command].split()):
            parser.error(f"{args.command} takes no {name}; it takes {TAKES[args.command]}")
    for name, least, below in (("tokens", 1, 1e15), ("val_fraction", 0, 1)):
        value = getattr(args, name)
        if value is not None and not least <= value < below:
            parser.error(f"{name} must be at least {least} and below {below:g}, but is {value}")
    return args


def prepare_text(args):
    """Runs the commands jsonl, dclm, c4 and paloma."""
    args.tokenizer, args.text_key = args.tokenizer or "gpt2", args.text_key or "text"
    if args.command == "jsonl":
        sources, origin, revision, args.tokens = own_files(args), "local files", "", 0
    else:
        if args.command == "dclm" and not args.tokens:
            raise UserError("how many tokens? for example python data.py dclm --tokens 5e9")
        sources, origin, revision = hub_sources(args.command, args.out, args.local)
        args.tokens = int(args.tokens or 256 * 8192)
        if args.val_fraction is None:
            args.val_fraction = 5e-4 if args.command == "dclm" else 0.0
    Preparation(args.out, sources, args, origin, revision).run()


def own_files(args):
    """The sources of jsonl. With --val, val_fraction is 0 if it was not given. Raises UserError."""
    sources = local_sources(args.paths, "train") + local_sources(args.val, "val")
    if not sources:
        raise UserError("no files: name some, as in python data.py jsonl PATH... --out DIR")
    if not args.paths:
        print("data.py: no training text, only validation text: training files come before --val", file=sys.stderr)
    if args.val:
        args.val_fraction = args.val_fraction or 0.0
    elif args.val_fraction and len(sources) == 1 and is_text(sources[0].name) and not args.split_on:
        raise UserError(f"{sources[0].name} is one document, which --val_fraction does not divide: leave it out, and "
                        "the end of the text is kept for validation, or add --split_on")
    return sources


def main(argv):
    """Runs one command. Errors end the process as in configurator.script."""
    with script("data.py"):
        if argv[:1] == ["mcqa"]:
            raise UserError("question sets are read by lm-evaluation-harness: python eval.py --tasks=hellaswag,piqa")
        args = parse_arguments(argv)
        args.out = args.out or f"data/{args.command}"
        if args.command == "stdlib":
            prepare_stdlib(args.out)
        elif args.command != "show":
            prepare_text(args)
        shown = args.paths if args.command == "show" else []
        for folder in shown or [args.out]:
            show(folder)


if __name__ == "__main__":
    main(sys.argv[1:])
