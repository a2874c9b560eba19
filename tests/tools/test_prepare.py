"""data.py's commands over texts and question sets of all formats. No network is used: the hub is a folder."""
import contextlib
import errno
import gzip
import itertools
import json
import os
import sys
import types
from pathlib import Path

import pytest

import data
from configurator import UserError
from conftest import script
from test_data import TEXTS, documents, folder_bytes, make_folder, prepared, write_jsonl
from tools import prepare


def test_bytes_and_gpt2_share_one_interface():
    tokenizer = data.get_tokenizer("bytes")
    assert (tokenizer.n_vocab, tokenizer.eot_token) == (258, 256)
    assert tokenizer.encode_ordinary("hé") == list("hé".encode())
    assert tokenizer.decode([104, 195, 169]) == "hé" and tokenizer.decode([257]) == "<|mask|>"
    with pytest.raises(UserError, match="bytes or gpt2"):
        data.get_tokenizer("gpt3")


@pytest.fixture
def gpt2():
    folder = Path(os.environ.get("TIKTOKEN_CACHE_DIR", ""))
    if not list(folder.glob("6d1cbeee0f20b3d9449abfede4726ed8212e3aee")):      # tiktoken's name for vocab.bpe
        pytest.skip("the environment variable TIKTOKEN_CACHE_DIR names no folder with GPT-2's BPE files")
    return data.get_tokenizer("gpt2")


def test_gpt2_has_its_own_ids_and_the_mask_behind_them_and_counts_the_bytes_of_its_text(gpt2):
    assert (gpt2.n_vocab, gpt2.eot_token) == (50258, 50256)
    assert gpt2.encode_ordinary("Hello world") == [15496, 995]
    assert gpt2.decode([gpt2.n_vocab - 1]) == "<|mask|>"
    text = "Ĵ ångström \u2713 <|endoftext|> \U0001F600" * 3
    tokens, n_bytes = data.encode(gpt2, text)
    assert tokens.tolist() == gpt2.encode_ordinary(text) + [50256]
    assert data.token_bytes("gpt2")[tokens].sum() == n_bytes == len(text.encode())


@pytest.mark.parametrize("name", ["a.jsonl", "a.json.gz", "a.jsonl.zst"])
def test_every_format_gives_the_same_tokens(tmp_path, name):
    prepared(tmp_path / "plain", [write_jsonl(tmp_path / "b.jsonl", documents(TEXTS))])
    prepared(tmp_path / "other", [write_jsonl(tmp_path / name, documents(TEXTS))])
    plain, other = folder_bytes(tmp_path / "plain"), folder_bytes(tmp_path / "other")
    del plain["meta.json"], other["meta.json"]
    assert plain == other


def test_a_zst_file_of_many_frames_is_read_whole(tmp_path):
    parts = [prepare.zstd().compress(json.dumps(row).encode() + b"\n") for row in documents(TEXTS)]
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
        assert train.sequences(train.n_tokens)[0].tolist() == [*plain, 256]
        assert train.n_bytes == len(plain)


def test_a_document_goes_to_validation_by_its_own_content(tmp_path):
    texts = [f"text {i}" for i in range(400)]
    found = []
    for name, order in (("a", texts), ("b", texts[::-1])):
        path = write_jsonl(tmp_path / f"{name}.jsonl", documents(order))
        prepared(tmp_path / name, [path], val_fraction=0.1)
        tokens = data.TokenData(tmp_path / name, "val").sequences(1).flatten().tolist()
        found.append(sorted("".join(map(chr, tokens)).split(chr(256))[:-1]))
    assert found[0] == found[1] and 20 < len(found[0]) < 60


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
    budget = ["--tokens", size, "--val_fraction", 0] if name == "dclm" else ["--sequences", 1, "--seq_len", size]
    arguments = [name, "--local", tmp_path / "hub", "--tokenizer", "bytes", "--out", out, *budget]
    assert script("data.py", *arguments)[0] == 0
    split = "train" if name == "dclm" else "val"
    found = data.TokenData(out, split, "bytes")
    assert found.n_tokens == sum(sizes[:71]) and list(found.meta["splits"]) == [split]
    assert found.meta["source"] == data.HUB[name][0]


def test_a_source_that_ends_before_the_budget_is_told(tmp_path):
    write_jsonl(tmp_path / "hub" / LAYOUT["c4"].format(0), documents(["abc"]))
    arguments = ["c4", "--tokenizer", "bytes", "--local", tmp_path / "hub", "--sequences", 1]
    status, _, error = script("data.py", *arguments, "--seq_len", 5, "--out", tmp_path / "a")
    assert status == 0 and "ended at 4 tokens, before the 5 asked for" in error
    status, _, error = script("data.py", *arguments, "--seq_len", 4, "--out", tmp_path / "b")
    assert status == 0 and "asked for" not in error


def test_a_folder_without_training_text_is_told(tmp_path):
    texts = write_jsonl(tmp_path / "a.jsonl", documents(TEXTS))
    status, _, error = script("data.py", "jsonl", "--tokenizer=bytes", "--out", tmp_path / "out", "--val", texts)
    assert status == 0 and "no training text, only validation text: training files come before --val" in error


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
    arguments = ["dclm", "--tokens", "1e9", "--tokenizer", "bytes", "--workers", 1, "--val_fraction", 0.2, "--out"]
    broken = lambda name: ConnectionError("reset") if "shard_08" in name else None
    monkeypatch.chdir(tmp_path)
    fake_hub(monkeypatch, root, log, broken)
    status, _, error = script("data.py", *arguments, "out")                    # a path relative to this folder
    assert status == 1 and "when the network is back" in error
    fake_hub(monkeypatch, root, log)
    assert script("data.py", *arguments, "out")[0] == 0
    assert script("data.py", *arguments, tmp_path / "whole")[0] == 0
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "whole")
    assert json.loads((tmp_path / "out" / "meta.json").read_text())["revision"] == "a" * 40
    assert max(log) < 6, "downloads pile up instead of being removed once they are read"


def test_a_disk_that_fills_during_a_download_is_not_blamed_on_the_network(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "hub" / LAYOUT["c4"].format(0), documents(TEXTS))
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    fake_hub(monkeypatch, tmp_path / "hub", [], lambda name: full)
    status, _, error = script("data.py", "c4", "--tokenizer", "bytes", "--out", tmp_path / "out")
    assert status == 1 and "make room" in error


def test_a_gated_data_set_says_how_to_log_in(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "hub" / LAYOUT["paloma"].format(0), documents(TEXTS))
    fake_hub(monkeypatch, tmp_path / "hub", [], lambda name: GatedRepoError("403"))
    status, _, error = script("data.py", "paloma", "--tokenizer", "bytes", "--out", tmp_path / "out")
    assert status == 1 and "hf auth login" in error and "huggingface.co/datasets/allenai/paloma" in error


def test_show_prints_counts_bytes_per_token_and_text(tmp_path):
    folder = make_folder(tmp_path)
    status, printed, _ = script("data.py", "show", folder)
    assert status == 0
    train = data.TokenData(folder, "train")
    assert f"{train.n_tokens:,} tokens" in printed and "60 documents" in printed
    assert f"{train.bytes_per_token:.3f} bytes per token" in printed and "Document 0" in printed


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
    assert script("data.py", *arguments)[0] == 0
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
    *(("piqa", dict(label=label), "no gold answer") for label in (-1, 2, None)),
    ("arc_easy", dict(answerKey="9"), "no gold answer"),
    ("boolq", dict(answer="maybe"), "no gold answer"),
    ("winogrande", dict(answer=""), "no gold answer"),
    ("winogrande", dict(sentence="no gap"), "not a row of winogrande"),
    ("winogrande", dict(sentence="the end is _"), "an answer with no characters"),
])
def test_a_bad_question_is_named_by_file_and_line(tmp_path, task, change, message):
    good = ROWS[task][0]
    name = f"{prepare.TASKS[task][2]}.jsonl"
    write_jsonl(tmp_path / "in" / task / name, [good, dict(good, **change)])
    arguments = ["mcqa", "--local", str(tmp_path / "in"), "--out", str(tmp_path / "out")]
    status, _, error = script("data.py", *arguments)
    assert status == 1 and f"{name}:2: {message}" in error
    assert not (tmp_path / "out" / f"{task}.jsonl").exists()


def test_question_sets_come_from_the_hub_as_parquet(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet
    path = tmp_path / "hub" / "ARC-Easy" / "test" / "0000.parquet"
    path.parent.mkdir(parents=True)
    row, expected = ROWS["arc_easy"]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    fake_hub(monkeypatch, tmp_path / "hub", [])
    assert script("data.py", "mcqa", "--tasks", "arc_easy", "--out", tmp_path / "out")[0] == 0
    found = json.loads((tmp_path / "out" / "arc_easy.jsonl").read_text())
    assert found == dict(expected, task="arc_easy")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["arc_easy.jsonl", "meta.json"]


# ----------------------------------------------------------------------------------------------
# Stopped, and started again

def test_a_changed_text_is_not_taken_for_the_old_one(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [dict(text="I am teh king")])
    prepared(tmp_path / "out", [path])
    write_jsonl(path, [dict(text="I am the king")])                            # of the same name and size
    os.utime(path, ns=(0, 0))
    with pytest.raises(UserError, match="made from other files"):
        prepared(tmp_path / "out", [path])


class Killed(BaseException):
    pass


def test_a_preparation_stopped_at_any_write_goes_on_to_identical_files(tmp_path, monkeypatch):
    """Killed at the n-th moment, for every n. The moments are before and after each write to disk."""
    settings = dict(train=[write_jsonl(tmp_path / "in.jsonl.gz", documents(TEXTS[:40]))], val_fraction=0.2)
    monkeypatch.setattr(prepare, "BATCH_BYTES", 500)
    monkeypatch.setattr(prepare, "SAVE_TOKENS", 400)
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
