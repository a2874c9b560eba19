"""
Prepares text for training and evaluation, as folders that data.py reads, and converts six zero-shot question sets to
one format. docs/data.md describes the input layouts and the formats.

`python data.py` and `python -m tools.prepare` are the same command. Only this module reads .zst and .parquet files and
data sets of the hub; the last two need the packages pyarrow and huggingface_hub.

    python data.py jsonl *.jsonl.zst --val valid.jsonl --tokenizer gpt2 --out data/mine
    python data.py dclm --tokens 5e9
"""
import argparse
import contextlib
import functools
import gzip
import hashlib
import json
import os
import re
import shlex
import shutil
import sys
import zlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from configurator import UserError, check_words, script, tqdm
from data import (ELSEWHERE, HUB, META, SPLITS, TASKS, VERSION, VOCABULARY, SplitWriter, check_out, encode,
                  get_tokenizer, prepare_stdlib, read_json, read_meta, sha256, show, write_json, write_meta)
from files import NO_ROOM, locked, misfit, need, write_file, writing

SAVE_TOKENS = 4_000_000             # tokens held in memory before they are saved; a kill loses at most these
BATCH_BYTES = 1 << 20               # bytes of text that a thread tokenises at a time
DOWNLOAD = "download.tmp"           # folder for downloads, inside the prepared folder; check_out ignores .tmp


def unreadable(path, error):
    """The UserError for an input file that cannot be read."""
    why = getattr(error, "strerror", None) or error
    return UserError(f"{path} cannot be read ({why}): fix that and run the same command again")


# ----------------------------------------------------------------------------------------------
# Preparing text: resumable, on all cores, in little memory

@dataclass
class Source:
    """One input file. A resumed preparation must have the same sources: same splits, names, sizes and times."""
    split: str
    name: str                       # its ending determines the format
    fetch: Callable[[], Path]       # returns the path; downloads the file first if necessary
    size: int = 0                   # in bytes; 0 for a file on the hub
    changed: int = 0                # when the user's own file was changed, in ns; 0 for a data set of the hub


@dataclass
class Batch:
    """About BATCH_BYTES of one source. `tokenise` turns its records into documents."""
    source: Source
    index: int                      # number of the source
    path: Path
    records: list = field(default_factory=list)     # (line, bytes), or (line, error) where the file is damaged
    documents: list = field(default_factory=list)   # (line, tokens, UTF-8 bytes), or (line, None, error) of a bad one
    read: int = 0                   # bytes of the (compressed) file read so far
    last: bool = False              # whether this is the last batch of the file


def is_text(name):
    """Whether a file is one document of plain text, not a document of JSON on each line."""
    return re.search(r"\.txt(\.zst|\.gz)?$", name)


def zstd():
    """The module that reads .zst files. Raises UserError if it is missing."""
    own = sys.version_info >= (3, 14)                   # then Python has it
    return need("compression.zstd" if own else "backports.zstd", "a .zst file", "backports.zstd")


def read_records(file, name, done):
    """(line, bytes) of every document after line `done`. A document is a line of JSON, or a whole .txt file."""
    if name.endswith(".zst"):
        lines = zstd().open(file)
    else:
        lines = gzip.open(file) if name.endswith(".gz") else file
    for number, line in enumerate([b"".join(lines)] if is_text(name) else lines, 1):
        if number > done and line.strip():
            yield number, line


def read_batches(source, index, path, done):
    """The batches of one source after line `done`. If the file is damaged, its last document is a bad one. Raises
    UserError if the system cannot read the file."""
    batch, size, line = Batch(source, index, path), 0, done
    damaged = (zstd().ZstdError,) if source.name.endswith(".zst") else ()
    try:
        with open(path, "rb") as file:
            for line, raw in read_records(file, source.name, done):
                batch.records.append((line, raw))
                size += len(raw)
                if size >= BATCH_BYTES:
                    batch.read = file.tell()
                    yield batch
                    batch, size = Batch(source, index, path), 0
    except (OSError, EOFError, zlib.error, *damaged) as error:
        if getattr(error, "errno", None):       # an error of the system; damaged data has no errno
            raise unreadable(path, error) from None
        batch.records.append((line + 1, error))
    batch.last, batch.read = True, path.stat().st_size
    yield batch


def document_text(raw, name):
    """The text of one record, without a byte order mark, its line ends as \\n. Raises ValueError for a bad record."""
    if isinstance(raw, Exception):
        raise ValueError(raw)
    try:
        text = raw.decode("utf-8-sig")
        row = dict(text=text) if is_text(name) else json.loads(text)
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise ValueError('not a JSON object; one is expected on each line, {"text": ...}')
    text = row.get("text")
    if not isinstance(text, str):
        raise ValueError('no "text"')
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    if not text:
        raise ValueError("an empty document")
    return text


def tokenise(tokenizer, batch):
    """Fills batch.documents. Runs in threads: tiktoken releases the interpreter lock."""
    for line, raw in batch.records:
        try:
            document = encode(tokenizer, document_text(raw, batch.source.name))
        except ValueError as error:
            document = None, str(error)
        batch.documents.append((line, *document))
    batch.records = []
    return batch


def ordered_map(pool, function, items, ahead):
    """Like pool.map, but at most `ahead` items are in progress at a time. Results come in order."""
    waiting = deque()
    for item in items:
        waiting.append(pool.submit(function, item))
        if len(waiting) >= ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


COUNTS = {key: range(2 ** 48) for key in ("tokens", "documents", "utf8_bytes")}
PROGRESS = {"command": str, "made_from": dict, "skipped": range(2 ** 48), "splits": {split: COUNTS for split in SPLITS},
            "position": lambda at: not misfit(at, [range(2 ** 48)]) and len(at) == 2}


class Preparation:
    """Turns sources into a prepared folder. The result depends only on the sources and the settings.

    progress.json records the positions of the reader and the writers after a document, and a later run continues
    from there. budget: stop when the split of the first source has this many tokens; the last document is kept
    whole. val_fraction: the share of documents that go to validation, chosen by checksum. origin, revision: texts for
    meta.json, where the sources come from.
    """

    def __init__(self, out, sources, tokenizer, origin, revision="", budget=0, val_fraction=0.0,
                 skip_bad=False, command=""):
        self.out, self.sources, self.tokenizer = Path(out), sources, get_tokenizer(tokenizer)
        self.origin, self.revision, self.command = origin, revision, command
        self.budget, self.val_fraction, self.skip_bad = int(budget), val_fraction, skip_bad
        inputs = json.dumps([(s.split, s.name, s.size, s.changed) for s in sources]).encode()
        self.made_from = dict(
            files=len(sources), first=sources[0].name, sha256=hashlib.sha256(inputs).hexdigest(),
            revision=revision, tokenizer=tokenizer, budget=self.budget, val_fraction=val_fraction)

    def run(self, workers=None):
        """Prepares what is missing and returns the content of meta.json. Raises UserError."""
        workers = workers or os.cpu_count()
        with writing(self.out, ELSEWHERE), locked(self.out, ELSEWHERE):
            if self.open_folder():
                self.clean()
                return read_meta(self.out)
            with ThreadPoolExecutor(workers) as pool, tqdm(
                    desc=str(self.out), total=self.budget or None, initial=self.budgeted_tokens(),
                    unit="tok", unit_scale=True, mininterval=0.5) as bar:
                one = functools.partial(tokenise, self.tokenizer)
                for batch in ordered_map(pool, one, self.batches(pool), 2 * workers + 1):
                    self.add(batch)
                    self.show_progress(batch, bar)
                    if self.full():
                        break
            self.save()
            return self.finish()

    def open_folder(self):
        """Makes the folder, or reads how far an earlier run came. Returns whether it is complete. Raises UserError if
        it was made from other files or with other settings."""
        check_out(self.out, "meta.json", "progress.json")
        self.out.mkdir(parents=True, exist_ok=True)
        names = [name for name in ("meta.json", "progress.json") if (self.out / name).is_file()]
        saved = read_json(self.out / names[0], META if names[0] == "meta.json" else PROGRESS) if names else {}
        if names and saved.get("made_from") != self.made_from:
            raise UserError(f"{self.out} was made from other files or with other settings, or the files have changed "
                            "since (their size or time): move it away, or choose another --out")
        if "meta.json" in names:
            return True
        self.position, self.skipped = saved.get("position", [0, 0]), saved.get("skipped", 0)
        self.writers = {s: SplitWriter(self.out, s, **saved.get("splits", {}).get(s, {})) for s in SPLITS}
        self.save()
        return False

    def budgeted_tokens(self):
        """Tokens so far in the split of the first source: that which `budget` limits."""
        writer = self.writers[self.sources[0].split]
        return writer.tokens + writer.n_pending

    def full(self):
        return 0 < self.budget <= self.budgeted_tokens()

    def batches(self, pool):
        """All batches from the saved position on. While one source is read, the next one is fetched."""
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

    def add(self, batch):
        """Adds the documents of a batch in order. Stops at the budget, or at a bad document without skip_bad."""
        for line, tokens, size_or_error in batch.documents:
            if tokens is None:
                self.skip_or_stop(f"{batch.source.name}:{line}: {size_or_error}")
            else:
                chosen = zlib.crc32(tokens) < self.val_fraction * 2**32
                self.writers["val" if chosen else batch.source.split].add(tokens, size_or_error)
            self.position = [batch.index, line]
            if self.full():
                break
        if batch.last and not self.full():
            self.position = [batch.index + 1, 0]
        # A download that has been read. The hub's library makes absolute paths; the user's own files stay.
        used_up = batch.last and (self.out / DOWNLOAD).resolve() in batch.path.parents
        if used_up or sum(writer.n_pending for writer in self.writers.values()) > SAVE_TOKENS:
            self.save()
        if used_up:
            batch.path.unlink(missing_ok=True)

    def show_progress(self, batch, bar):
        """Moves the progress bar. Without a budget, its total is estimated from the share of bytes read."""
        size = sum(source.size for source in self.sources)
        if size and not self.budget:
            read = sum(source.size for source in self.sources[:batch.index]) + batch.read
            bar.total = int(self.budgeted_tokens() * size / max(1, read))
        bar.update(self.budgeted_tokens() - bar.n)

    def skip_or_stop(self, error):
        """Counts a bad document. Without skip_bad, saves all earlier documents and raises UserError."""
        if not self.skip_bad:
            self.save()
            raise UserError(f"{error}; add --skip_bad and run the same command again to continue without it, or fix "
                            "the document and choose another --out")
        self.skipped += 1
        print(f"skipped {error}", file=sys.stderr)

    def save(self):
        """Saves the documents first and then progress.json, which must never be ahead of them."""
        write_json(self.out / "progress.json", dict(
            command=self.command, made_from=self.made_from, position=self.position,
            skipped=self.skipped, splits={s: w.save() for s, w in self.writers.items()}))

    def finish(self):
        """Writes meta.json and returns its content. Prints a line if the source ended before the budget."""
        wanted = [source.split for source in self.sources] + ["val"] * (self.val_fraction > 0)
        for split in wanted:
            if not self.writers[split].documents:
                raise UserError(f"no document went to the {split} split: remove {self.out} and give more text, "
                                "another --val_fraction, or files with --val; a .txt file is one document")
        meta = write_meta(self.out, self.origin, self.revision, self.tokenizer.name, self.writers,
                          self.skipped, self.made_from)
        if self.budget and not self.full():
            print(f"{self.out}: the source ended at {self.budgeted_tokens():,} tokens, before the "
                  f"{self.budget:,} asked for", file=sys.stderr)
        self.clean()
        return meta

    def clean(self):
        """Removes progress.json, downloads and temporary files."""
        (self.out / "progress.json").unlink(missing_ok=True)
        shutil.rmtree(self.out / DOWNLOAD, ignore_errors=True)
        for left in self.out.glob("*.json.*.tmp"):      # left by a kill during a write
            left.unlink()


def local_sources(paths, split):
    """Sources for the user's own files. Raises UserError for a missing file or an unknown ending."""
    sources = []
    for path in map(Path, paths):
        if not path.is_file():
            raise UserError(f"{path} is not a file: name .jsonl or .txt files, also as .zst or .gz")
        if not re.search(r"\.(jsonl|json|txt)(\.zst|\.gz)?$", path.name):
            raise UserError(f"{path} must have one of the endings .jsonl, .json and .txt, perhaps before .zst or .gz")
        sources.append(Source(split, path.name, functools.partial(Path, path), path.stat().st_size,
                              path.stat().st_mtime_ns))
    return sources


# ----------------------------------------------------------------------------------------------
# Data sets on the hub

def on_hub(repo, call, *args, **kwargs):
    """Calls a function of huggingface_hub and turns its errors into a UserError."""
    try:
        return call(repo, *args, **kwargs)
    except Exception as error:      # the hub's, the network's and the disk's errors
        if getattr(error, "errno", None) in NO_ROOM:
            raise
        what = (f"cannot be read from the hub ({type(error).__name__}): run the same command again when the network is "
                f"back, or name a copy with --local DIR")
        if type(error).__name__ == "GatedRepoError":
            what = (f"is gated: accept its licence at https://huggingface.co/datasets/{repo} in a browser, log in here "
                    f"with `hf auth login`, and run this again")
        raise UserError(f"{repo} {what}") from None


def hub_files(repo, revision, wanted, out, local=None, what=""):
    """The files of a data set that match `wanted`: (sorted names, fetch(name) -> path, revision).

    local: a folder with the repository's layout, read instead of the hub. what: names the files in the error message.
    """
    if local:
        held = [p.relative_to(local).as_posix() for p in Path(local).rglob("*") if p.is_file()]
        fetch, revision = functools.partial(Path, local), "a local copy"
    else:
        hub = need("huggingface_hub", repo)
        revision = on_hub(repo, hub.HfApi().dataset_info, revision=revision).sha
        where = dict(repo_type="dataset", revision=revision)
        held = on_hub(repo, hub.HfApi().list_repo_files, **where)
        fetch = lambda name: Path(on_hub(
            repo, hub.hf_hub_download, name, local_dir=Path(out, DOWNLOAD), **where))
    names = sorted(name for name in held if re.fullmatch(wanted, name))
    if not names:
        raise UserError(f"{local or repo} holds no {what or f'file that matches {wanted}'}"
                        f" (it holds {', '.join(sorted(held)[:5]) or 'nothing'})")
    return names, fetch, revision


def hub_sources(name, out, local=None):
    """(sources, repository, revision) of one of the data sets in HUB."""
    repo, revision, wanted, split = HUB[name]
    names, fetch, revision = hub_files(repo, revision, wanted, out, local)
    size = lambda file: fetch(file).stat().st_size if local else 0
    return [Source(split, n, functools.partial(fetch, n), size(n)) for n in names], repo, revision


# ----------------------------------------------------------------------------------------------
# Question sets

def hellaswag_clean(text):
    """Removes the markup that HellaSwag's WikiHow texts contain."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def template(task, row):
    """(context or a list of contexts, choices, gold or None), by the templates of lm-evaluation-harness at commit
    4e7e0d47. HellaSwag rows may be preprocessed already: query, choices, label."""
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
    if task == "winogrande":        # the contexts differ in the option; the same text after it is scored
        before, after = row["sentence"].split("_", 1)
        contexts = [before + row["option1"], before + row["option2"]]
        return contexts, [after.strip()] * 2, {"1": 0, "2": 1}.get(str(row["answer"]))
    labels, key = row["choices"]["label"], row["answerKey"]
    gold = labels.index(key) if key in labels else None
    return f"Question: {row['question']}\nAnswer:", row["choices"]["text"], gold


def question(task, row, number):
    """One row as {task, id, context or contexts, choices, gold}. Each choice begins with a space. Raises ValueError
    for a bad row."""
    try:
        context, choices, gold = template(task, row)
        choices = [" " + choice for choice in choices]
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"no field {error}" if isinstance(error, KeyError) else f"not a row of {task}") from None
    if len(choices) < 2:
        raise ValueError("fewer than two answers")
    if not all(choice.strip() for choice in choices):
        raise ValueError("an answer with no characters")
    gold = int(gold) if isinstance(gold, bool) else gold            # boolq: false is "no", choice 0
    if not re.fullmatch(r"\d+", str(gold)) or int(gold) >= len(choices):
        raise ValueError("no gold answer")
    name = next((row[key] for key in ("id", "ind", "idx") if key in row), number)
    key = "contexts" if isinstance(context, list) else "context"
    return {"task": task, "id": str(name), key: context, "choices": choices, "gold": int(gold)}


def read_rows(path):
    """(number, row) of a .jsonl or .parquet file. Raises UserError for a line that is not JSON."""
    parquet = need("pyarrow.parquet", path) if path.suffix == ".parquet" else None
    try:
        rows = parquet.read_table(path).to_pylist() if parquet else path.read_bytes().splitlines()
    except (OSError, ValueError) as error:      # pyarrow raises ValueError
        raise unreadable(path, error) from None
    for number, row in enumerate(rows, 1):
        if parquet:
            yield number, row
        elif row.strip():
            try:
                yield number, json.loads(row)
            except (ValueError, RecursionError):
                raise UserError(f"{path}:{number}: not JSON") from None


def task_files(task, out, local, split):
    """hub_files for one task and split. With `local`, the files are in a subfolder named after the task or after the
    repository, and the split is part of their names."""
    repo, config, _ = TASKS[task]
    what = f"{split} split of {task}: name another with --split"
    if not local:
        return hub_files(repo, "refs/convert/parquet", f"{config}/{re.escape(split)}/.*parquet", out, what=what)
    ours = Path(local, task).is_dir()
    wanted = rf".*{'' if ours else config}.*{re.escape(split)}.*\.(jsonl|parquet)"
    return hub_files(repo, "", wanted, out, Path(local, task if ours else repo), what)


def prepare_task(task, out, local, split):
    """Writes out/<task>.jsonl and returns its entry in meta.json. Raises UserError with the file and line of a bad
    row."""
    names, fetch, revision = task_files(task, out, local, split)
    rows = []
    for name in names:
        for number, row in read_rows(fetch(name)):
            try:
                rows.append(question(task, row, number))
            except ValueError as error:
                raise UserError(f"{fetch(name)}:{number}: {error}") from None
    if not rows:
        raise UserError(f"{fetch(names[0])} holds no questions")
    write_file(out / f"{task}.jsonl", "".join(json.dumps(row) + "\n" for row in rows), ELSEWHERE)
    return dict(questions=len(rows), source=TASKS[task][0], split=split, revision=revision,
                files=names, sha256=sha256(out / f"{task}.jsonl"))


def prepare_mcqa(out="data/mcqa", tasks=None, local=None, split=None):
    """Writes out/<task>.jsonl for each task, and meta.json. Returns the content of meta.json. tasks: None for all, or
    for all that `local` holds. split: None for the default in TASKS. If tasks fail, raises UserError after making the
    others."""
    out, failed = Path(out), []
    if tasks is None:
        tasks = [task for task, (repo, *_) in TASKS.items()
                 if not local or Path(local, task).is_dir() or Path(local, repo).is_dir()]
    if not tasks:
        raise UserError(f"{local} has no folder named after one of {', '.join(TASKS)}")
    with writing(out, ELSEWHERE):
        check_out(out, "meta.json")
        earlier = read_meta(out) if (out / "meta.json").is_file() else {"tasks": {}}
        if "tasks" not in earlier:
            raise UserError(f"{out} holds text, not question sets: choose another --out")
        meta = dict(earlier, format=VERSION, template="lm-evaluation-harness 4e7e0d47")
        out.mkdir(parents=True, exist_ok=True)
        for task in tasks:
            try:
                meta["tasks"][task] = prepare_task(task, out, local, split or TASKS[task][2])
                write_json(out / "meta.json", meta)     # after each task: check_out accepts only a folder with it
            except UserError as error:
                failed.append(str(error))
        shutil.rmtree(out / DOWNLOAD, ignore_errors=True)
        if failed:
            with contextlib.suppress(OSError):
                out.rmdir()                             # removes the folder only if it is empty
            raise UserError("; ".join(failed) + "; the other tasks are made" * (len(failed) < len(tasks)))
    return meta


# ----------------------------------------------------------------------------------------------
# The script

def count(text):
    """A type for argparse: a whole number above 0, such as 5e9."""
    if not 1 <= float(text) <= 1e15:
        raise argparse.ArgumentTypeError(f"must be from 1 to 1e15, but is {text}")
    return int(float(text))


def fraction(text):
    """A type for argparse: a number from 0 to below 1."""
    if not 0 <= float(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 0 and below 1, but is {text}")
    return float(text)


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
            command.add_argument("--tokenizer", default="gpt2", choices=[*VOCABULARY])
            command.add_argument("--skip_bad", action="store_true",
                                 help="count bad documents and go on")
            command.add_argument("--workers", type=count, help="threads (default: cores)")
        if name in (*HUB, "mcqa"):
            command.add_argument("--local", help="a folder with the hub's layout")
        if name in ("jsonl", "dclm"):
            command.add_argument("--val_fraction", type=fraction, help="share of "
                                 "the documents for validation", default=5e-4 * (name == "dclm"))
        if name == "dclm":
            command.add_argument("--tokens", type=count, required=True,
                                 help="stop here, e.g. 5e9")
        if name in ("c4", "paloma"):
            command.add_argument("--sequences", type=count, default=256)
            command.add_argument("--seq_len", type=count, default=8192)
        if name == "mcqa":
            command.add_argument("--tasks", nargs="+", choices=list(TASKS))
            command.add_argument("--split", help="of every task, such as validation (default: test for ARC, "
                                                 "else validation)")
    return parser.parse_args(argv)


def prepare_text(args, argv):
    """Runs the commands jsonl, dclm, c4 and paloma."""
    budget, val_fraction = 0, getattr(args, "val_fraction", 0.0)
    if args.command == "jsonl":
        sources = local_sources(args.paths, "train") + local_sources(args.val, "val")
        origin, revision = "local files", ""
        if not sources:
            raise UserError("no files: name some, as in python data.py jsonl PATH... --out DIR")
        if not args.paths:
            print("data.py: no training text, only validation text: training files come before --val", file=sys.stderr)
    else:
        sources, origin, revision = hub_sources(args.command, args.out, args.local)
        budget = args.tokens if args.command == "dclm" else args.sequences * args.seq_len
    try:
        Preparation(
            args.out, sources, args.tokenizer, origin, revision, budget, val_fraction,
            args.skip_bad, shlex.join(["python", "data.py", *argv])).run(args.workers)
    except KeyboardInterrupt:
        print("\nstopped; run the same command again and it continues", file=sys.stderr)
        raise


def main(argv):
    """Runs one command. Errors end the process as in configurator.script."""
    with script("data.py"):
        check_words(argv)
        args = parse_arguments(argv)
        if (local := getattr(args, "local", None)) and not Path(local).is_dir():
            raise UserError(f"--local is {local}, which is no folder; name one that holds a copy of the hub's files")
        if args.command == "stdlib":
            meta = prepare_stdlib(args.out)             # an existing folder is kept, whatever it holds
            if meta.get("source") != "Python's standard library":
                raise UserError(f"{args.out} holds something else: {ELSEWHERE}")
        elif args.command == "mcqa":
            prepare_mcqa(args.out, args.tasks, args.local, args.split)
        elif args.command != "show":
            prepare_text(args, argv)
        show(args.dir if args.command == "show" else args.out)


if __name__ == "__main__":
    main(sys.argv[1:])
