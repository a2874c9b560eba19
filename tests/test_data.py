"""What the README says about data.py and tools/prepare.py, one sentence a test. No network is used."""
import errno
import gzip
import itertools
import json
import multiprocessing
import os
import random
import runpy
import shlex
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))
import data  # noqa: E402
from configurator import UserError  # noqa: E402
from tools import prepare  # noqa: E402

zstandard = pytest.importorskip("zstandard")
SHARED = REPOSITORY.parent / "shared" / "data"


@pytest.fixture(autouse=True)
def no_power_failures(monkeypatch):
    """Waiting for the disk is most of the time that these tests would take."""
    monkeypatch.setattr(data.os, "fsync", lambda file: None)


TEXTS = [f"Document {i}: " + "naïve café \u2713 " * (i % 7 + 1) for i in range(60)]


def write_jsonl(path, rows):
    """Rows (or ready lines, as bytes) into .jsonl, .gz or .zst, by the name's ending."""
    lines = [r if isinstance(r, bytes) else json.dumps(r).encode() for r in rows]
    content = b"".join(line + b"\n" for line in lines)
    if path.suffix == ".gz":
        content = gzip.compress(content)
    if path.suffix == ".zst":
        content = zstandard.ZstdCompressor(write_checksum=True).compress(content)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def documents(texts):
    return [dict(text=text, url="http://example.org") for text in texts]


def prepared(out, train, val=(), **settings):
    sources = prepare.local_sources(train, "train") + prepare.local_sources(val, "val")
    settings = dict(dict(shard_tokens=1000), **settings)
    return prepare.Preparation(out, sources, "bytes", "a test", **settings).run(2)


def main(*arguments):
    """The exit status of `python data.py ...` in this process; its sentence goes to stderr."""
    try:
        prepare.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        return stop.code if isinstance(stop.code, int) else 1
    return 0


def folder_bytes(folder):
    """Everything in a folder but the command that made it."""
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def make_folder(tmp_path, texts=TEXTS, **settings):
    path = write_jsonl(tmp_path / "in.jsonl", documents(texts))
    prepared(tmp_path / "out", [path], **settings)
    return tmp_path / "out"


# -- tokenizers and packing -----------------------------------------------------------------------

def test_bytes_and_gpt2_share_one_interface():
    tokenizer = data.get_tokenizer("bytes")
    assert (tokenizer.n_vocab, tokenizer.eot_token) == (258, 256)
    assert tokenizer.encode_ordinary("hé") == list("hé".encode())
    assert tokenizer.decode([104, 195, 169]) == "hé" and tokenizer.decode([257]) == "<|mask|>"
    with pytest.raises(data.DataError, match="bytes or gpt2"):
        data.get_tokenizer("gpt3")


@pytest.fixture
def gpt2(monkeypatch):
    if not (SHARED / "gpt2_bpe").is_dir():
        pytest.skip("GPT-2's BPE files are not beside the repository")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(SHARED / "gpt2_bpe"))
    return data.get_tokenizer("gpt2")


def test_gpt2_has_its_own_ids_and_the_mask_behind_them(gpt2):
    assert (gpt2.n_vocab, gpt2.eot_token) == (50258, 50256)
    assert gpt2.encode_ordinary("Hello world") == [15496, 995]
    assert gpt2.decode([gpt2.n_vocab - 1]) == "<|mask|>"


def test_gpt2_tokens_count_exactly_the_bytes_of_their_text(gpt2):
    text = "Ĵ ångström \u2713 <|endoftext|> \U0001F600" * 3
    tokens, n_bytes = data.encode(gpt2, text)
    assert tokens.tolist() == gpt2.encode_ordinary(text) + [50256]
    assert data.token_bytes("gpt2")[tokens].sum() == n_bytes == len(text.encode())


def test_gpt2_without_its_files_is_one_sentence(monkeypatch):
    def unreachable(name):
        raise ConnectionError("no route to host")
    monkeypatch.setattr(data.tiktoken, "get_encoding", unreachable)
    with pytest.raises(data.DataError, match="TIKTOKEN_CACHE_DIR"):
        data.get_tokenizer.__wrapped__("gpt2")


def test_special_names_in_a_text_are_ordinary_text():
    tokens, n_bytes = data.encode(data.get_tokenizer("bytes"), "<|endoftext|>")
    assert tokens.tolist() == list(b"<|endoftext|>") + [256] and n_bytes == 13


def test_half_a_surrogate_pair_becomes_the_replacement_character():
    tokens, n_bytes = data.encode(data.get_tokenizer("bytes"), "a\ud800b")
    assert bytes(tokens[:-1].tolist()).decode() == "a\ufffdb" and n_bytes == 5


def test_documents_are_packed_with_end_of_text_between_them(tmp_path):
    folder = make_folder(tmp_path)
    train = data.TokenData(folder, "train", "bytes")
    expected = [list(text.encode()) + [256] for text in TEXTS]
    assert train.sequences(1).flatten().tolist() == list(itertools.chain(*expected))
    assert train.documents().tolist() == [[len(x), len(x) - 1] for x in expected]
    assert train.n_bytes == sum(len(text.encode()) for text in TEXTS)
    assert train.n_tokens == train.n_bytes + len(TEXTS) and len(train.shards) > 1
    assert train.bytes_per_token == train.n_bytes / train.n_tokens


@pytest.mark.parametrize("name", ["a.jsonl", "a.json.gz", "a.jsonl.zst"])
def test_every_format_gives_the_same_shards(tmp_path, name):
    prepared(tmp_path / "plain", [write_jsonl(tmp_path / "b.jsonl", documents(TEXTS))])
    prepared(tmp_path / "other", [write_jsonl(tmp_path / name, documents(TEXTS))])
    plain, other = folder_bytes(tmp_path / "plain"), folder_bytes(tmp_path / "other")
    del plain["meta.json"], other["meta.json"]
    assert plain == other


def test_a_zst_file_of_many_frames_is_read_whole(tmp_path):
    parts = [zstandard.ZstdCompressor().compress(json.dumps(row).encode() + b"\n")
             for row in documents(TEXTS)]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(parts))
    meta = prepared(tmp_path / "out", [tmp_path / "a.jsonl.zst"])
    assert meta["splits"]["train"]["documents"] == len(TEXTS)


def test_a_text_file_and_its_text_as_json_are_the_same_document(tmp_path):
    text = "\ufeff" + "".join(f"line {i}\r\n" + "\r\n" * (i % 10 == 0) for i in range(5000))
    (tmp_path / "a.txt").write_bytes(text.encode())
    write_jsonl(tmp_path / "b.jsonl", documents([text]))
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(text.encode()))
    for name in ("a.txt", "b.jsonl", "c.txt.gz"):
        prepared(tmp_path / name[0], [tmp_path / name])
        train = data.TokenData(tmp_path / name[0], "train")
        plain = text[1:].replace("\r\n", "\n").encode()
        assert train.sequences(1).flatten().tolist() == [*plain, 256]
        assert train.documents().tolist() == [[len(plain) + 1, len(plain)]]


# -- windows --------------------------------------------------------------------------------------

def test_an_epoch_shows_every_window_once_in_an_order_of_its_own(tmp_path):
    folder = make_folder(tmp_path)
    train = data.TokenData(folder, "train")
    n = train.n_windows(16)
    windows = train.sequences(16).tolist()
    epochs = [train.batch(7, step, range(n), n, 16).tolist() for step in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(windows)
    assert epochs[0] != epochs[1] and epochs[0] != windows
    steps = [train.batch(7, step, range(4), 4, 16).tolist() for step in range(n // 4)]
    assert sum(steps, []) == epochs[0][:n // 4 * 4], "small steps do not walk through the epoch"
    assert train.batch(8, 0, range(n), n, 16).tolist() != epochs[0]
    shard = np.searchsorted(train.starts, 16 * data.permutation(7, 0, n), "right")
    assert len(set(shard[:20].tolist())) > 3, "the first windows come from a few shards only"


def test_the_sampler_does_not_depend_on_ranks_micro_batches_or_resuming(tmp_path):
    folder = make_folder(tmp_path)
    train = data.TokenData(folder, "train")
    steps = range(2 * train.n_windows(16) // 8)
    whole = [train.batch(1, step, range(8), 8, 16) for step in steps]
    data.permutation.cache_clear()
    again = data.TokenData(folder, "train")
    for step in reversed(steps):
        ranks = [again.batch(1, step, rows, 8, 16) for rows in ([6, 7], [0, 1, 2], [3], [4, 5])]
        assert torch.equal(torch.cat(ranks)[[2, 3, 4, 5, 6, 7, 0, 1]], whole[step])


def test_windows_run_across_shard_boundaries(tmp_path):
    folder = make_folder(tmp_path, shard_tokens=10)
    train = data.TokenData(folder, "train")
    assert len(train.shards) == -(-train.n_tokens // 10)
    whole = np.concatenate([np.fromfile(p, "<u2", offset=1024) for p in train.shards])
    window = train.sequences(77)[1]
    assert window.dtype == torch.int64 and window.tolist() == whole[77:154].tolist()


def test_a_folder_of_5_billion_tokens_opens_in_under_a_second(tmp_path):
    n, shards = data.SHARD_TOKENS, []
    for i in range(50):                             # sparse files: they take no room
        header = np.array([data.MAGIC, data.VERSION, n] + [0] * 253, "<i4").tobytes()
        (tmp_path / f"train_{i:05d}.bin").write_bytes(header)
        os.truncate(tmp_path / f"train_{i:05d}.bin", len(header) + 2 * n)
        shards.append(dict(file=f"train_{i:05d}.bin", tokens=n, sha256=""))
    splits = dict(train=dict(tokens=50 * n, documents=1, utf8_bytes=n, shards=shards))
    data.write_json(tmp_path / "meta.json", dict(
        source="", revision="", tokenizer="gpt2", vocab_size=50258, skipped=0, splits=splits))
    start = time.monotonic()
    train = data.TokenData(tmp_path, "train", "gpt2")
    assert train.batch(0, 10**6, [0], 1, 8192).shape == (1, 8192)
    assert time.monotonic() - start < 1


def test_bits_per_byte_divide_by_the_bytes_of_the_source_documents(tmp_path):
    folder = make_folder(tmp_path, texts=["aé", "b\u2713c", "xyz"])      # 3 + 5 + 3 bytes
    train = data.TokenData(folder, "train")
    assert train.sequence_bytes(14).tolist() == [11] and train.n_bytes == 11
    assert data.bits_per_byte(np.log(2), 14, 11) == pytest.approx(14 / 11)     # a bit a token
    assert train.sequence_bytes(5).tolist() == [4, 4]   # a C3 A9 eot b | E2 9C 93 c eot | x y z eot
    assert train.sequence_bytes(2).tolist() == [2, 1, 2, 2, 1, 2, 1]
    assert train.sequence_bytes(2, 3).tolist() == [2, 1, 2]
    assert train.sequences(5, 1).shape == (1, 5) and train.sequences(5, 99).shape == (2, 5)


def test_the_byte_baselines_are_add_one_counts():
    train, val = torch.tensor([0, 1, 0, 256]), torch.tensor([[0, 1], [1, 256]])
    found = data.byte_baselines(train, val)
    unigram = np.array([3, 2, 2, 2]) / (4 + 257)                    # 0, 1, 1, end-of-text
    bigram = np.array([2 / 258, 2 / 259, 1 / 258, 1 / 258])         # eot-0, 0-1, 1-1, 1-eot
    assert found["unigram"] == pytest.approx(-np.log2(unigram).sum() / 3)
    assert found["bigram"] == pytest.approx(-np.log2(bigram).sum() / 3)


# -- stopped, and started again -------------------------------------------------------------------

def test_a_preparation_stopped_at_any_write_goes_on_to_identical_files(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "in.jsonl.gz", documents(TEXTS))
    monkeypatch.setattr(prepare, "BATCH_BYTES", 500)
    monkeypatch.setattr(prepare, "SAVE_TOKENS", 400)
    settings = dict(train=[path], val_fraction=0.2)
    prepared(tmp_path / "whole", **settings)
    real = {name: getattr(data.os, name) for name in ("fsync", "replace")}

    class Killed(BaseException):
        pass

    def dies_at(count):
        calls = itertools.count()

        def dying(real):
            def call(*args):
                if next(calls) == count:
                    raise Killed
                real(*args)
                if next(calls) == count:
                    raise Killed
            return call
        for name in real:
            monkeypatch.setattr(data.os, name, dying(real[name]))

    for count in range(10_000):
        out = tmp_path / f"out{count}"
        dies_at(count)
        try:
            prepared(out, **settings)
            finished = True
        except Killed:
            finished = False
        for name in real:
            monkeypatch.setattr(data.os, name, real[name])
        if finished:
            break
        prepared(out, **settings)
        assert folder_bytes(out) == folder_bytes(tmp_path / "whole"), count
    assert count > 20


@pytest.fixture
def child(monkeypatch):
    """Starts `python data.py ...` in its own process: forked, to save importing torch again."""
    if "fork" not in multiprocessing.get_all_start_methods():
        pytest.skip("no fork on this system")
    monkeypatch.setattr(prepare, "SAVE_TOKENS", 20_000)
    monkeypatch.setattr(prepare, "BATCH_BYTES", 20_000)
    monkeypatch.setattr(prepare, "SHARD_TOKENS", 100_000)

    def start(*arguments, before=lambda: None):
        def run():
            before()
            prepare.main([str(argument) for argument in arguments])
        process = multiprocessing.get_context("fork").Process(target=run)
        process.start()
        return process
    return start


def status(process):
    process.join(60)
    return process.exitcode


def test_a_killed_preparation_goes_on_to_identical_files(tmp_path, child):
    numbers = random.Random(0)
    words = ["block", "naïve", "noise", "\u2713", "state"]
    texts = [" ".join(numbers.choices(words, k=300)) for _ in range(1500)]
    paths = [write_jsonl(tmp_path / f"{i}.jsonl.zst", documents(texts[i::2])) for i in range(2)]
    command = ["jsonl", paths[0], "--val", paths[1], "--tokenizer", "bytes", "--out"]
    assert status(child(*command, tmp_path / "whole")) == 0
    progress, kills = tmp_path / "out" / "progress.json", 0
    for attempt in range(8):
        before = progress.read_bytes() if progress.is_file() else b""
        process = child(*command, tmp_path / "out")
        while process.is_alive() and (not progress.is_file() or progress.read_bytes() == before):
            time.sleep(0.001)
        time.sleep(numbers.uniform(0, 0.02))
        process.kill()
        kills += status(process) == -signal.SIGKILL
    assert kills >= 2
    assert status(child(*command, tmp_path / "out")) == 0
    whole, out = folder_bytes(tmp_path / "whole"), folder_bytes(tmp_path / "out")
    assert whole == out and len(whole) > 10


def test_a_full_disk_is_one_sentence_and_loses_nothing(tmp_path, child, capfd):
    resource = pytest.importorskip("resource")
    path = write_jsonl(tmp_path / "in.jsonl", documents("x" * 5000 for _ in range(100)))
    command = ["jsonl", path, "--tokenizer", "bytes", "--out"]
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))
    assert status(child(*command, tmp_path / "out", before=limit)) == 1
    error = capfd.readouterr().err
    assert "make room and try again" in error and "Traceback" not in error
    with pytest.raises(data.DataError, match="unfinished: run this again.*jsonl"):
        data.TokenData(tmp_path / "out", "train")
    saved = json.loads((tmp_path / "out" / "progress.json").read_text())
    assert saved["splits"]["train"]["tokens"] > 40_000
    assert status(child(*command, tmp_path / "out")) == 0
    assert status(child(*command, tmp_path / "whole")) == 0
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "whole")


def test_a_disk_without_room_at_all_is_one_sentence(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    path = write_jsonl(tmp_path / "in.jsonl", documents(TEXTS))
    monkeypatch.setattr(data, "append", full)
    with pytest.raises(UserError, match="No space left.*make room"):
        prepared(tmp_path / "out", [path])


def test_what_an_interrupted_run_left_is_cut_off(tmp_path):
    (tmp_path / "file").write_bytes(b"12345678")
    data.append(tmp_path / "file", 4, b"ab", header=b"0")
    assert (tmp_path / "file").read_bytes() == b"0234ab"
    with pytest.raises(data.DataError, match="shorter than it was"):
        data.append(tmp_path / "file", 7, b"ab")


def test_a_finished_folder_is_left_alone_and_other_settings_are_refused(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "in.jsonl", documents(TEXTS))
    meta = prepared(tmp_path / "out", [path])
    monkeypatch.setattr(data, "append", None)
    assert prepared(tmp_path / "out", [path]) == meta
    with pytest.raises(data.DataError, match="other settings: move it away, or choose"):
        prepared(tmp_path / "out", [path], val_fraction=0.5)
    (tmp_path / "out" / "meta.json").write_text("[]")
    with pytest.raises(UserError, match="damaged.*move .*out away"):
        prepared(tmp_path / "out", [path])
    with pytest.raises(data.DataError, match="not empty.*: choose another --out$"):
        prepared(tmp_path, [path])


def test_memory_stays_flat_because_reading_never_runs_far_ahead():
    from concurrent.futures import ThreadPoolExecutor
    read = []
    items = (read.append(i) or i for i in range(1000))
    with ThreadPoolExecutor(2) as pool:
        for done, result in enumerate(prepare.ordered_map(pool, lambda i: i, items, 5)):
            assert result == done and len(read) <= done + 5
    assert len(read) == 1000


# -- bad input ------------------------------------------------------------------------------------

def truncated(path):
    path.write_bytes(path.read_bytes()[:-200])


def flipped(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2:len(content) // 2 + 8] = b"\xff" * 8
    path.write_bytes(content)


GOOD = dict(text="good")
NOISE = [dict(text=random.Random(i).randbytes(2000).hex()) for i in range(40)]
BAD = {
    "not JSON": ("a.jsonl", [GOOD, b"{", GOOD], None, "a.jsonl:2: not a JSON object"),
    "an array": ("a.jsonl", [[GOOD, GOOD]], None, "a.jsonl:1: .* one is expected on each line"),
    "no text": ("a.jsonl.zst", [GOOD, dict(url="x"), GOOD], None, 'a.jsonl.zst:2: no "text"'),
    "text is a number": ("a.jsonl", [GOOD, dict(text=1), GOOD], None, 'a.jsonl:2: no "text"'),
    "empty": ("a.jsonl.gz", [GOOD, GOOD, dict(text="")], None, "a.jsonl.gz:3: an empty document"),
    "not UTF-8": ("a.jsonl", [GOOD, b'{"text": "\xff"}'], None, "a.jsonl:2: not UTF-8"),
    "latin text": ("a.txt", [b"caf\xe9"], None, "a.txt:1: not UTF-8"),
    "truncated gz": ("a.jsonl.gz", NOISE, truncated, r"a.jsonl.gz:\d+: .*end-of-stream"),
    "corrupt gz": ("a.jsonl.gz", NOISE, flipped, r"a.jsonl.gz:\d+: "),
    "truncated zst": ("a.jsonl.zst", NOISE, truncated, r"a.jsonl.zst:\d+: truncated zstd"),
    "corrupt zst": ("a.jsonl.zst", NOISE, flipped, r"a.jsonl.zst:\d+: damaged zstd"),
    "not zst": ("a.jsonl.zst", [], lambda path: path.write_bytes(b"hello"), "a.jsonl.zst:1: "),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named_by_file_and_line_and_can_be_skipped(tmp_path, case):
    name, rows, damage, message = BAD[case]
    bad = write_jsonl(tmp_path / name, rows)
    if damage:
        damage(bad)
    paths = [write_jsonl(tmp_path / "0.jsonl", documents(TEXTS)), bad,
             write_jsonl(tmp_path / "z.jsonl", documents(TEXTS))]
    with pytest.raises(data.DataError, match=message + ".*--skip_bad.* another --out$"):
        prepared(tmp_path / "out", paths)
    saved = json.loads((tmp_path / "out" / "progress.json").read_text())
    assert saved["splits"]["train"]["documents"] >= len(TEXTS)
    meta = prepared(tmp_path / "out", paths, skip_bad=True)
    assert meta["skipped"] == 1 and meta["splits"]["train"]["documents"] >= 2 * len(TEXTS)
    prepared(tmp_path / "again", paths, skip_bad=True)
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "again")


def test_a_blank_line_is_no_document(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [GOOD, b"", GOOD, b"  "])
    assert prepared(tmp_path / "out", [path])["splits"]["train"]["documents"] == 2


@pytest.mark.parametrize("arguments, message", [
    (["jsonl", "missing.jsonl", "--out", "out"], "missing.jsonl is not a file"),
    (["jsonl", "a.csv", "--out", "out"], "endings"),
    (["jsonl", "--out", "out"], "name some"),
    (["jsonl", "empty.jsonl", "--tokenizer", "bytes", "--out", "out"], "no document"),
    (["show", "nowhere"], "run python data.py jsonl"),
    (["show", "data/dclm"], "run python data.py dclm --tokens 5e9 --out data/dclm"),
    (["c4", "--local", ".", "--out", "out"], "no file that matches"),
    (["mcqa", "--local", ".", "--out", "out"], "no folder named"),
])
def test_a_mistake_is_one_sentence_and_status_1(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("a.csv").write_text("x")
    Path("empty.jsonl").write_text("")
    assert main(*arguments) == 1
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


@pytest.mark.parametrize("command", [
    *(f"dclm --tokens={n}" for n in ("-5", "0", "0.5", "inf", "nan", "many")),
    *(f"dclm --tokens 9 --val_fraction={f}" for f in ("-1", "nan", "1", "2")),
    "c4 --sequences -1", "c4 --seq_len 0", "jsonl a.jsonl --out out --workers -3",
    "jsonl a.jsonl --out=", "stdlib --out=", "mcqa --local=", "show ''",
])
def test_a_setting_out_of_its_bounds_is_refused_before_anything_is_read(
        tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", documents(TEXTS))
    arguments = shlex.split(command)
    if arguments[0] in data.HUB:
        arguments += ["--local", "."]
    assert main(*arguments) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "at least" in error and "below" in error or "the name is empty" in error
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_source_that_ends_before_the_budget_is_told(tmp_path, capsys):
    write_jsonl(tmp_path / "hub" / LAYOUT["c4"].format(0), documents(["abc"]))
    arguments = ["c4", "--tokenizer", "bytes", "--local", tmp_path / "hub", "--sequences", 1]
    assert main(*arguments, "--seq_len", 5, "--out", tmp_path / "a") == 0
    assert "ended at 4 tokens, before the 5 asked for" in capsys.readouterr().err
    assert main(*arguments, "--seq_len", 4, "--out", tmp_path / "b") == 0
    assert "asked for" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["stdlib", "mcqa", *data.HUB, "mine", "two words"])
def test_the_command_that_a_missing_folder_asks_for_can_be_run(name):
    command = shlex.split(data.command_for(Path("some") / name))
    assert command[:2] == ["python", "data.py"]
    assert prepare.parse_arguments(command[2:]).out == str(Path("some") / name)


def mcqa_input(folder):
    write_jsonl(folder / "piqa" / "validation.jsonl", [ROWS["piqa"][0]])
    return ["mcqa", "--local", folder]


COMMANDS = ("stdlib", "jsonl", "mcqa")


@pytest.fixture
def command(request, tmp_path, monkeypatch):
    """`python data.py` stdlib, jsonl or mcqa over small inputs, all but --out."""
    if request.param == "jsonl":
        path = write_jsonl(tmp_path / "a.jsonl", documents(TEXTS))
        return ["jsonl", path, "--tokenizer", "bytes"]
    if request.param == "mcqa":
        return mcqa_input(tmp_path / "questions")
    fake_stdlib(tmp_path / "lib")
    monkeypatch.setattr(data.sysconfig, "get_path", lambda name: str(tmp_path / "lib"))
    return ["stdlib"]


@pytest.mark.parametrize("command", COMMANDS, indirect=True)
def test_a_folder_that_is_not_ours_is_left_alone(tmp_path, command, capsys):
    (tmp_path / "theirs" / "download").mkdir(parents=True)
    (tmp_path / "theirs" / "piqa.jsonl").write_text("kept")
    assert main(*command, "--out", tmp_path / "theirs") == 1
    error = capsys.readouterr().err
    assert "not empty" in error and "choose another --out" in error and "remove" not in error
    assert sorted(p.name for p in (tmp_path / "theirs").iterdir()) == ["download", "piqa.jsonl"]
    assert (tmp_path / "theirs" / "piqa.jsonl").read_text() == "kept"


@pytest.mark.parametrize("command", COMMANDS, indirect=True)
def test_an_empty_folder_can_be_prepared(tmp_path, command):
    (tmp_path / "out").mkdir()
    assert main(*command, "--out", tmp_path / "out") == 0


@pytest.mark.parametrize("where", ["file", "file/below"])
@pytest.mark.parametrize("command", COMMANDS, indirect=True)
def test_a_place_where_no_folder_can_be_is_one_sentence(tmp_path, command, where, capsys):
    (tmp_path / "file").write_text("kept")
    assert main(*command, "--out", tmp_path / where) == 1
    error = capsys.readouterr().err
    assert "cannot be written (" in error and error.endswith("); choose another --out\n")
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("number, advice", [
    (errno.EACCES, "choose another --out"), (errno.EROFS, "choose another --out"),
    (errno.ENOSPC, "make room and try again")])
@pytest.mark.parametrize("command", COMMANDS, indirect=True)
def test_what_cannot_be_written_comes_with_advice_that_fits(
        tmp_path, monkeypatch, command, capsys, number, advice):
    def refuse(path, *args, **kwargs):
        raise OSError(number, os.strerror(number), str(path))
    (tmp_path / "data").mkdir()
    monkeypatch.setattr(Path, "mkdir", refuse)
    assert main(*command, "--out", tmp_path / "data" / "out") == 1
    assert f"out cannot be written ({os.strerror(number)}); {advice}" in capsys.readouterr().err


def test_question_sets_do_not_go_into_a_folder_of_text(tmp_path, capsys):
    folder = make_folder(tmp_path)
    before = folder_bytes(folder)
    assert main(*mcqa_input(tmp_path / "questions"), "--out", folder) == 1
    assert "holds text, not question sets: choose another --out" in capsys.readouterr().err
    assert folder_bytes(folder) == before


def test_a_file_that_may_not_be_read_is_no_bad_document(tmp_path, monkeypatch):
    paths = [write_jsonl(tmp_path / name, documents(TEXTS)) for name in ("a.jsonl", "b.jsonl")]

    def refuse(path, *args):
        if path == paths[1]:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return open(path, *args)
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "open", refuse, raising=False)
        with pytest.raises(data.DataError, match="b.jsonl cannot be read .Permission denied"):
            prepared(tmp_path / "out", paths, skip_bad=True)
    meta = prepared(tmp_path / "out", paths, skip_bad=True)
    assert meta["skipped"] == 0 and meta["splits"]["train"]["documents"] == 2 * len(TEXTS)


@pytest.mark.parametrize("error", [
    ValueError("no magic bytes"), PermissionError(errno.EACCES, os.strerror(errno.EACCES))])
def test_questions_that_cannot_be_read_are_named(tmp_path, monkeypatch, capsys, error):
    def read_table(path):
        raise error
    monkeypatch.setitem(sys.modules, "pyarrow", types.ModuleType("pyarrow"))
    parquet = types.SimpleNamespace(read_table=read_table)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", parquet)
    path = write_jsonl(tmp_path / "in" / "piqa" / "validation.parquet", [b"damaged"])
    assert main("mcqa", "--local", tmp_path / "in", "--out", tmp_path / "out") == 1
    assert f"{path} cannot be read (" in capsys.readouterr().err


def test_a_default_corpus_with_a_link_to_nowhere_is_prepared(tmp_path):
    fake_stdlib(tmp_path / "lib")
    (tmp_path / "lib" / "lost.py").symlink_to("nowhere")
    assert data.prepare_stdlib(tmp_path / "out", tmp_path / "lib")["skipped"] == 2


def test_tools_prepare_takes_the_command_line_of_data_py(tmp_path, monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "tools.prepare")   # run_module wants to load it itself
    monkeypatch.setattr(sys, "argv", ["prepare.py", "show", str(make_folder(tmp_path))])
    runpy.run_module("tools.prepare", run_name="__main__")
    assert f"{len(TEXTS)} documents" in capsys.readouterr().out


def test_ctrl_c_says_how_to_go_on_and_loses_nothing(tmp_path, monkeypatch, capsys):
    paths = [write_jsonl(tmp_path / f"{i}.jsonl", documents(TEXTS)) for i in range(2)]
    command = ["jsonl", *paths, "--tokenizer", "bytes", "--out"]
    real = prepare.Preparation.take

    def stopped(self, batch):
        if batch.index == 1:
            raise KeyboardInterrupt
        real(self, batch)
        self.save()
    monkeypatch.setattr(prepare.Preparation, "take", stopped)
    assert main(*command, tmp_path / "out") == 130
    assert "run the same command again and it goes on" in capsys.readouterr().err
    monkeypatch.setattr(prepare.Preparation, "take", real)
    assert main(*command, tmp_path / "out") == main(*command, tmp_path / "whole") == 0
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "whole")


def test_a_closed_pipe_ends_it_silently(tmp_path, child, capfd):
    def close_pipe():
        reader, writer = os.pipe()
        os.close(reader)
        sys.stdout = os.fdopen(writer, "w")
    folder = make_folder(tmp_path)
    capfd.readouterr()
    assert status(child("show", folder, before=close_pipe)) == 141
    assert capfd.readouterr().err == ""


def test_the_script_data_py_is_the_command_line(tmp_path):
    command = [sys.executable, REPOSITORY / "data.py", "show", "nowhere"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("data.py: nowhere holds no prepared data: run python data.py")


def test_a_missing_package_names_the_pip_command(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl.zst", documents(TEXTS))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(data.DataError, match="pip install zstandard"):
        prepared(tmp_path / "out", [path])


def damage_shard(folder, edit):
    path = next(folder.glob("train_00000.bin"))
    content = bytearray(path.read_bytes())
    path.write_bytes(edit(content) or content)


REFUSED = {
    "no such folder": (lambda f: [p.unlink() for p in f.iterdir()], "run python data.py jsonl"),
    "truncated": (lambda f: damage_shard(f, lambda c: c[:-2]), "truncated: remove"),
    "another format": (lambda f: damage_shard(f, lambda c: c.__setitem__(0, 0)), "not a shard"),
    **{f"meta.json is {text}": (
        lambda f, text=text: (f / "meta.json").write_text(text), "damaged")
       for text in ("{", "[]", '{"tokenizer": "bytes"}', '{"tasks": {"piqa": 1}}')},
    "a mask in the data": (
        lambda f: damage_shard(f, lambda c: c.__setitem__(slice(1024, 1026), b"\x01\x01")),
        "token 257, outside its vocabulary"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_damaged_folder_is_refused_with_the_command_to_run(tmp_path, case):
    folder = make_folder(tmp_path)
    damage, message = REFUSED[case]
    damage(folder)
    with pytest.raises(UserError, match=message + ".*run python data.py|" + message):
        data.TokenData(folder, "train").sequences(16)


def test_tokens_of_another_tokenizer_another_split_and_a_short_split_are_refused(tmp_path):
    folder = make_folder(tmp_path)
    with pytest.raises(data.DataError, match="holds bytes tokens, not gpt2.*--tokenizer gpt2"):
        data.TokenData(folder, "train", "gpt2")
    with pytest.raises(data.DataError, match="no val split: run python data.py.*--val"):
        data.TokenData(folder, "val", "bytes")
    for use in (lambda d: d.sequences(10**6), lambda d: d.batch(0, 0, [0], 1, 10**6)):
        with pytest.raises(data.DataError, match="less than one sequence of 1,000,000"):
            use(data.TokenData(folder, "train"))


@pytest.mark.parametrize("use, message", [
    (lambda d: d.sequences(16, -3), "no -3 sequences"),
    (lambda d: d.sequence_bytes(16, -3), "no -3 sequences"),
    (lambda d: d.sequences(0), "seq_len must be at least 1, but is 0"),
    (lambda d: d.batch(0, 0, [0], 1, -8), "seq_len must be at least 1, but is -8"),
])
def test_windows_of_no_size_and_negative_counts_are_refused(tmp_path, use, message):
    train = data.TokenData(make_folder(tmp_path), "train")
    with pytest.raises(data.DataError, match=message):
        use(train)


# -- where the text comes from --------------------------------------------------------------------

def test_a_document_goes_to_validation_by_its_own_content(tmp_path):
    texts = [f"text {i}" for i in range(400)]
    found = []
    for name, order in (("a", texts), ("b", texts[::-1])):
        path = write_jsonl(tmp_path / f"{name}.jsonl", documents(order))
        prepared(tmp_path / name, [path], val_fraction=0.1)
        tokens = data.TokenData(tmp_path / name, "val").sequences(1).flatten().tolist()
        found.append(sorted("".join(map(chr, tokens)).split(chr(256))[:-1]))
    assert found[0] == found[1] and 20 < len(found[0]) < 60


def fake_stdlib(root):
    for i in range(60):
        path = root / f"package{i % 3}" / f"module{i}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"x = {i}\r\n".encode())
    for name in ("test/a.py", "site-packages/b.py", "encodings/c.py", "package0/tests/d.py", "e.c"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("excluded")
    (root / "latin.py").write_bytes(b"# caf\xe9")
    (root / "empty.py").write_bytes(b"")


def test_the_default_corpus_is_the_standard_library_split_by_file(tmp_path):
    fake_stdlib(tmp_path / "lib")
    meta = data.prepare_stdlib(tmp_path / "data" / "stdlib", tmp_path / "lib")
    train, val = (data.TokenData(tmp_path / "data" / "stdlib", s, "bytes") for s in data.SPLITS)
    texts = [bytes(t for t in d.sequences(1).flatten().tolist() if t < 256).decode()
             for d in (train, val)]
    assert len(train.documents()) + len(val.documents()) == 60 and len(val.documents()) > 0
    assert set(texts[0].split("\n")) - {""} == {f"x = {i}" for i in range(60)} \
        - set(texts[1].split("\n"))
    assert meta["skipped"] == 1 and [p.name for p in (tmp_path / "data").iterdir()] == ["stdlib"]
    first = folder_bytes(tmp_path / "data" / "stdlib")
    data.prepare_stdlib(tmp_path / "again", tmp_path / "lib")
    assert folder_bytes(tmp_path / "again") == first


def test_an_empty_default_corpus_leaves_nothing_behind(tmp_path):
    (tmp_path / "lib").mkdir()
    with pytest.raises(data.DataError, match="no Python source.*python data.py jsonl"):
        data.prepare_stdlib(tmp_path / "data" / "stdlib", tmp_path / "lib")
    assert list((tmp_path / "data").iterdir()) == []


def test_the_default_corpus_of_this_python_is_ready_in_seconds(tmp_path):
    start = time.monotonic()
    data.prepare_stdlib(tmp_path / "stdlib")
    assert time.monotonic() - start < 20
    train, val = (data.TokenData(tmp_path / "stdlib", split) for split in data.SPLITS)
    assert train.n_tokens > 5_000_000 and 0.01 < val.n_tokens / train.n_tokens < 0.15
    scores = data.byte_baselines(train.sequences(256), val.sequences(256))
    assert 2.5 < scores["bigram"] < scores["unigram"] < 8


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
    out, count = tmp_path / "out", data.encode(data.get_tokenizer("bytes"), TEXTS[0])[0].size
    sizes = [len(text.encode()) + 1 for text in TEXTS] * 3
    size = sum(sizes[:70]) + 1          # the 71st document, in the second file, reaches it
    assert count == sizes[0]
    budget = ["--tokens", size, "--val_fraction", 0] if name == "dclm" else \
        ["--sequences", 1, "--seq_len", size]
    arguments = [name, "--local", tmp_path / "hub", "--tokenizer", "bytes", "--out", out, *budget]
    assert main(*arguments) == 0
    split = "train" if name == "dclm" else "val"
    found = data.TokenData(out, split, "bytes")
    assert found.n_tokens == sum(sizes[:71]) and list(found.meta["splits"]) == [split]
    assert found.meta["source"] == data.HUB[name][0]


class GatedRepoError(Exception):
    pass


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
        return str(target)

    class HfApi:
        def dataset_info(self, repo, revision):
            return types.SimpleNamespace(sha="a" * 40)

        def list_repo_files(self, repo, repo_type, revision):
            return [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]

    module = types.SimpleNamespace(HfApi=HfApi, hf_hub_download=download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)


def test_a_download_that_breaks_off_goes_on_and_leaves_no_copies(tmp_path, monkeypatch, capsys):
    root, log = tmp_path / "hub", []
    for i in range(12):
        write_jsonl(root / LAYOUT["dclm"].format(i), documents(TEXTS[i::12]))
    arguments = [str(a) for a in (
        "dclm", "--tokens", "1e9", "--tokenizer", "bytes", "--workers", 1, "--val_fraction", 0.2,
        "--out")]
    broken = lambda name: ConnectionError("reset") if "shard_08" in name else None
    fake_hub(monkeypatch, root, log, broken)
    assert main(*arguments, tmp_path / "out") == 1
    assert "when the network is back" in capsys.readouterr().err
    fake_hub(monkeypatch, root, log)
    assert main(*arguments, tmp_path / "out") == 0
    assert main(*arguments, tmp_path / "whole") == 0
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "whole")
    assert json.loads((tmp_path / "out" / "meta.json").read_text())["revision"] == "a" * 40
    assert max(log) < 6, "downloads pile up instead of being removed once they are read"


def test_a_disk_that_fills_during_a_download_is_not_blamed_on_the_network(
        tmp_path, monkeypatch, capsys):
    write_jsonl(tmp_path / "hub" / LAYOUT["c4"].format(0), documents(TEXTS))
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    fake_hub(monkeypatch, tmp_path / "hub", [], lambda name: full)
    assert main("c4", "--tokenizer", "bytes", "--out", tmp_path / "out") == 1
    assert "make room" in capsys.readouterr().err


def test_a_gated_data_set_says_how_to_log_in(tmp_path, monkeypatch, capsys):
    write_jsonl(tmp_path / "hub" / LAYOUT["paloma"].format(0), documents(TEXTS))
    fake_hub(monkeypatch, tmp_path / "hub", [], lambda name: GatedRepoError("403"))
    assert main("paloma", "--tokenizer", "bytes", "--out", tmp_path / "out") == 1
    error = capsys.readouterr().err
    assert "hf auth login" in error and "huggingface.co/datasets/allenai/paloma" in error


def test_show_prints_counts_bytes_per_token_and_text(tmp_path, capsys):
    folder = make_folder(tmp_path)
    assert main("show", folder) == 0
    printed = capsys.readouterr().out
    train = data.TokenData(folder, "train")
    assert f"{train.n_tokens:,} tokens" in printed and "60 documents" in printed
    assert f"{train.bytes_per_token:.3f} bytes per token" in printed and "Document 0" in printed


# -- question sets --------------------------------------------------------------------------------

HELLASWAG = dict(ind=4, activity_label="Roof", ctx_a="A man sits [x] on a roof.", ctx_b="he",
                 label="3", endings=["is  wrapping.", "is [title] ripping", "holds", " starts. "])
ROWS = {
    "hellaswag": (HELLASWAG, dict(
        id="4", context="Roof: A man sits on a roof. He", gold=3,
        choices=[" is wrapping.", " is. ripping", " holds", " starts."])),
    "piqa": (dict(goal="Boil", sol1="Heat", sol2="Cool", label=0), dict(
        id="1", context="Question: Boil\nAnswer:", choices=[" Heat", " Cool"], gold=0)),
    "arc_easy": (dict(id="M1", question="Why?", answerKey="2",
                      choices=dict(text=["a", "b", "c"], label=["1", "2", "3"])), dict(
        id="M1", context="Question: Why?\nAnswer:", choices=[" a", " b", " c"], gold=1)),
    "arc_challenge": (dict(id="M2", question="Why?", answerKey="C",
                           choices=dict(text=["a", "b", "c"], label=["A", "B", "C"])), dict(
        id="M2", context="Question: Why?\nAnswer:", choices=[" a", " b", " c"], gold=2)),
    "boolq": (dict(question="is it", answer=True, passage="It is."), dict(
        id="1", context="It is.\nQuestion: is it?\nAnswer:", choices=[" no", " yes"], gold=1)),
    "winogrande": (dict(sentence="Ann beat Bob so _ won the cup.", option1="Ann", option2="Bob",
                        answer="1"), dict(
        id="1", contexts=["Ann beat Bob so Ann", "Ann beat Bob so Bob"],
        choices=[" won the cup."] * 2, gold=0)),
}


@pytest.mark.parametrize("task", ROWS)
def test_six_question_sets_become_one_form(tmp_path, task):
    row, expected = ROWS[task]
    split = prepare.TASKS[task][2]
    write_jsonl(tmp_path / "in" / task / f"{split}.jsonl", [row])
    arguments = ["mcqa", "--local", str(tmp_path / "in"), "--out", str(tmp_path / "out")]
    assert main(*arguments) == 0
    found = json.loads((tmp_path / "out" / f"{task}.jsonl").read_text())
    assert found == dict(expected, task=task)
    assert json.loads((tmp_path / "out" / "meta.json").read_text())["tasks"][task]["questions"] == 1


def test_both_forms_of_hellaswag_give_the_same_question():
    row, expected = ROWS["hellaswag"]
    choices = [choice[1:] for choice in expected["choices"]]
    done = dict(ind=4, query=expected["context"], choices=choices, label=3)
    assert prepare.question("hellaswag", done, 1) == prepare.question("hellaswag", row, 1)


def test_boolq_rows_of_super_glue_are_read_as_well():
    row = dict(question="is it", passage="It is.", idx=0, label=1)
    assert prepare.question("boolq", row, 9) == dict(ROWS["boolq"][1], task="boolq", id="0")


@pytest.mark.parametrize("task, change, message", [
    ("hellaswag", dict(label=""), "no gold answer"),
    ("hellaswag", dict(endings=["a", "b", "", "d"]), "an answer with no characters"),
    ("hellaswag", dict(endings=None), "not a row of hellaswag"),
    ("piqa", dict(label=-1), "no gold answer"),
    ("piqa", dict(label=2), "no gold answer"),
    ("piqa", dict(label=None), "no gold answer"),
    ("arc_easy", dict(answerKey="9"), "no gold answer"),
    ("boolq", dict(answer="maybe"), "no gold answer"),
    ("winogrande", dict(answer=""), "no gold answer"),
    ("winogrande", dict(sentence="no gap"), "not a row of winogrande"),
    ("winogrande", dict(sentence="the end is _"), "an answer with no characters"),
])
def test_a_bad_question_is_named_by_file_and_line(tmp_path, capsys, task, change, message):
    good = ROWS[task][0]
    name = f"{prepare.TASKS[task][2]}.jsonl"
    write_jsonl(tmp_path / "in" / task / name, [good, dict(good, **change)])
    arguments = ["mcqa", "--local", str(tmp_path / "in"), "--out", str(tmp_path / "out")]
    assert main(*arguments) == 1
    assert f"{name}:2: {message}" in capsys.readouterr().err
    assert not (tmp_path / "out" / f"{task}.jsonl").exists()


def test_a_question_without_its_field_names_the_field():
    with pytest.raises(ValueError, match="no field 'goal'"):
        prepare.question("piqa", dict(sol1="a", sol2="b", label=0), 1)


def test_question_sets_come_from_the_hub_as_parquet(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet
    path = tmp_path / "hub" / "ARC-Easy" / "test" / "0000.parquet"
    path.parent.mkdir(parents=True)
    row, expected = ROWS["arc_easy"]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    fake_hub(monkeypatch, tmp_path / "hub", [])
    assert main("mcqa", "--tasks", "arc_easy", "--out", tmp_path / "out") == 0
    found = json.loads((tmp_path / "out" / "arc_easy.jsonl").read_text())
    assert found == dict(expected, task="arc_easy")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["arc_easy.jsonl", "meta.json"]
