"""Ordinary mistakes in a command: each ends in one sentence that says what to do, and changes no file."""
import importlib.util
import sys

import pytest

from conftest import script

# Run in a folder with the files of `HERE`, a checkpoint in out/ and the prepared text {data}.
HERE = {"README.md": "mine", "a.csv": "x", "a.txt": "text", "empty.jsonl": "\n", "a.jsonl": '{"text": "a"}\n'}
COMMANDS = [
    ("train.py --device=cpu --out_dir=new --data=none", "none holds no prepared text: run python data.py"),
    ("sample.py --out_dir=none", "make one with python train.py"),
    ("sample.py --untrained=lptop", "config file lptop does not exist"),
    ("eval.py --checkpoint=out --data={data} --seq_len=33", "whole blocks of block_len 8"),
    ("eval.py --checkpoint=nowhere", "no checkpoint can be read from"),
    ("eval.py --checkpoint=out --data=nowhere", "holds no prepared text"),
    ("eval.py --out=ckpt.pt", "out must end in .json, but is"),
    ("eval.py --checkpoint=out --tasks=piqa", "--tasks needs lm_eval: pip install lm_eval==0.4.13"),
    pytest.param("eval.py --checkpoint=out --tasks=piqaa", "the harness has no task 'piqaa'", marks=pytest.mark.skipif(
        importlib.util.find_spec("lm_eval") is None, reason="needs lm_eval==0.4.13")),
    ("checkpoint.py", "write python checkpoint.py export out/ --to=folder, not nothing"),
    ("checkpoint.py import x", "--to=folder, not import x"),
    ("checkpoint.py export out", "to is empty"),
    ("checkpoint.py export out --too=x", "did you mean to"),
    ("checkpoint.py export out --to=x --dtype=int8", "dtype must be one of float32, bfloat16"),
    ("checkpoint.py export out/nowhere --to=x", "no checkpoint can be read from"),
    ("checkpoint.py export out --to=.", "holds README.md already, which would be lost"),
    ("checkpoint.py export out --to=out/ckpt.pt", "ckpt.pt"),
    ("data.py jsonl missing.jsonl --out new", "missing.jsonl is not a file"),
    ("data.py jsonl a.txt --val_fraction 0.1 --out new", "a.txt is one document, which --val_fraction"),
    ("data.py jsonl a.csv --out new", "endings"),
    ("data.py jsonl --out new", "name some"),
    ("data.py jsonl empty.jsonl --tokenizer bytes --out new", "0 documents were found, none for the"),
    ("data.py dclm --local .", "python data.py dclm --tokens 5e9"),
    ("data.py show nowhere", "nowhere holds no prepared text: run python data.py"),
    ("data.py c4 --local . --out new", "no file that matches"),
    ("data.py mcqa --local nowhere", "python eval.py --tasks="),
    *((f"data.py dclm --tokens={value}", "must be ") for value in ("0.5", "nan", "inf")),
    ("data.py dclm --tokens=many", "invalid float value"),
    ("data.py jsonl a.jsonl --tokens=9", "takes no"),
    ("data.py show out --val_fraction=0.5", "takes no"),
    *((f"data.py jsonl a.jsonl --out=new --val_fraction={value}", "must be ") for value in ("-1", "nan", "1")),
    ("data.py jsonl a.jsonl --out=new --val_fraction=x", "invalid float value")]


@pytest.mark.parametrize("command, message", COMMANDS)
def test_a_mistake_in_a_command_is_one_sentence_and_changes_no_file(saved, corpus, tmp_path, monkeypatch, command,
                                                                    message):
    monkeypatch.chdir(tmp_path)
    if "pip install lm_eval" in message:
        monkeypatch.setitem(sys.modules, "lm_eval", None)   # as if it were not installed
    for name, content in HERE.items():
        (tmp_path / name).write_text(content)

    def files():
        """All but empty ones: a lock may be left."""
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size}
    before, (name, *flags) = files(), command.format(data=corpus).split()
    status, _, error = script(name, *flags)
    last = error.splitlines()[-1]
    assert status in (1, 2) and last.startswith(f"{name}: ") and message in last and "Traceback" not in error
    assert files() == before
