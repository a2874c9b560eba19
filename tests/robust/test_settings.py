"""Settings: files and flags, types, typos. Each mistake ends in one sentence. (Of whole commands: test_mistakes.py.)"""
import os
import sys

import pytest
import torch

import ops
import train
from checkpoint import config_from_file
from configurator import UserError, configure, script, settings_of
from conftest import ROOT, make_model
from parallel import Parallel, ampere_or_later, pick_dtype, select_kernels

SOURCE = """\
learning_rate = 1e-3        # peak (lr)
prompt = ""                 # text to continue (start, in nanoGPT)
max_iters = 100             # how long
batch = [1]
# a heading, of no setting
"""


@pytest.fixture
def namespace(tmp_path):
    """What `configure` gets of a script: settings, and names that are none."""
    (tmp_path / "s.py").write_text(SOURCE)
    return {"learning_rate": 1e-3, "max_iters": 100, "resume": False, "out_dir": "out", "tasks": ["a"], "batch": [1],
            "prompt": "", "rates": [0.6, 1.0], "only": [], "_private": 3, "LR": 3, "main": len,
            "__doc__": "What it does.", "__file__": str(tmp_path / "s.py")}


@pytest.mark.parametrize("flags, name, value", [
    ("--max_iters 65536", "max_iters", 65536), ("--max_iters=6.5536e4", "max_iters", 65536),
    ("--learning_rate=1", "learning_rate", 1.0), ("--resume", "resume", True), ("--resume=false", "resume", False),
    ("--tasks=['x','y']", "tasks", ["x", "y"]), ("--tasks=3,x", "tasks", ["3", "x"]), ("--tasks=", "tasks", []),
    ("--batch=8,16", "batch", [8, 16]), ("--rates=2,0.5", "rates", [2.0, 0.5]), ("--only=8,x", "only", [8, "x"]),
    ("--prompt ~/a", "prompt", "~/a"), ("--prompt=~/a", "prompt", "~/a"),
    ("--out_dir=~/a", "out_dir", "/home/me/a"), ("--out_dir=3", "out_dir", "3"), ("--out_dir=a=b", "out_dir", "a=b"),
    ("--out_dir={[]}", "out_dir", "{[]}"), ("--out_dir=true", "out_dir", "true")])
def test_a_value_is_read_in_the_type_of_its_setting(monkeypatch, namespace, flags, name, value):
    monkeypatch.setenv("HOME", "/home/me")
    assert configure(namespace, flags.split()) == {name: value}
    assert repr(namespace[name]) == repr(value)         # the types too, also in a list


@pytest.mark.parametrize("flags, message", [
    ("--learning_rat=1", r"did you mean learning_rate\?"), ("--lr=1", r"did you mean learning_rate\?"),
    ("--start=a", r"did you mean prompt\?"), ("--zzz=1", r"there is no setting 'zzz'; did you mean --help\?"),
    ("--_private=1", "no setting"), ("--main=1", "no setting"), ("--LR=1", "no setting"),
    ("--max_iters=many", "command line: max_iters takes a value such as 100, not 'many'"),
    ("--max_iters=1.5", "such as 100, not 1.5"), ("--learning_rate=nan", "such as 0.001, not 'nan'"),
    ("--rates=0.5,x", r"such as \[0.6, 1.0\], not \['0.5', 'x'\]"), ("--batch=1.5", r"such as \[1\], not \['1.5'\]"),
    ("--resume=2", "such as False, not 2"), ("--max_iters", "100, not None"), ("--out_dir --resume", "'out', not None"),
    ("-max_iters 5", r"config -max_iters cannot be run \(FileNotFound.*; write --name=value"),
    (str(ROOT / "README.md"), "README.md cannot be run")])
def test_mistakes_are_one_sentence_with_the_nearest_name(namespace, flags, message):
    before = dict(namespace)
    with pytest.raises(UserError, match=message):
        configure(namespace, flags.split())
    assert namespace == before


def test_config_files_compute_and_flags_after_them_win_and_what_was_given_is_known(namespace, tmp_path):
    file = tmp_path / "c.py"                            # with a byte order mark
    file.write_text("\ufeffimport math\nfrom math import sqrt\nmax_iters = max_iters * 2\n"
                    "learning_rate = math.exp(0) * sqrt(4)\n_half = 3\nCONSTANT = 4\nresume = False\n")
    given = configure(namespace, [str(file), "--learning_rate=0.5"])
    assert given == dict(max_iters=200, learning_rate=0.5, resume=False) and {**namespace, **given} == namespace


@pytest.mark.parametrize("content, message", [
    (b"max_iter = None", "did you mean max_iters"), (b"max_iters = 'x'", "max_iters takes a value such as 100"),
    (b"1 / 0", "ZeroDivisionError"), (b"max_iters =", "SyntaxError"), (b"import sys; sys.exit(0)", "cannot be run")])
def test_mistakes_in_files_name_the_file(namespace, tmp_path, content, message):
    (tmp_path / "c.py").write_bytes(content)
    with pytest.raises(UserError, match=rf"c\.py.*{message}"):
        configure(namespace, [str(tmp_path / "c.py")])


def test_a_config_file_of_the_repository_is_found_from_any_folder_and_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    here = config_from_file(str(ROOT / "config" / "laptop.py"))
    assert here == config_from_file("laptop") == config_from_file("config/laptop.py") and here.seq_len == 256
    (tmp_path / "mine.py").write_text("n_layers = 7")
    with pytest.raises(UserError, match="mine.py: there is no setting 'n_layers'; did you mean n_layer"):
        config_from_file("mine.py")


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help_prints_the_settings_and_what_they_mean(capsys, namespace, word):
    with pytest.raises(SystemExit, match="^0$"):
        configure(namespace, ["--max_iters=200", word, "--nonsense"])
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "What it does." and "  --max_iters = 200".ljust(40) + "how long" in shown and len(shown) == 12
    assert "  --batch = [1]" in shown


@pytest.mark.parametrize("error, status", [
    (UserError("a"), "x.py: a"), (KeyboardInterrupt(), "130"), (BrokenPipeError(), "141"),
    (MemoryError(), "x.py: out of memory; lower "), (RuntimeError("CUDA out of memory"), "x.py: out of memory; lower "),
    (FileNotFoundError(2, "No such file", "data/x"), r"x.py: \[Errno 2\] No such file: 'data/x'"),
    (ModuleNotFoundError("No module named 'a'"), "x.py: No module named 'a'; requirements.txt says what to install"),
    (UnicodeEncodeError("utf-8", "caf\udce9", 3, 4, "surrogates"), "x.py: 'utf-8' codec can't encode")])
def test_a_script_ends_in_one_sentence_and_a_bug_keeps_its_traceback(monkeypatch, error, status):
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit, match=status), script("x.py"):
        raise error
    with pytest.raises(ZeroDivisionError), script("x.py"):
        1 / 0


# ----------------------------------------------------------------------------------------------
# Of a model and of a training

def test_a_cache_refuses_half_blocks_and_what_is_beyond_its_length_in_a_sentence():
    model = make_model("mamba_h")
    cache = model.new_cache(1, 16)
    for tokens, message in ((12, "12 tokens are not whole blocks of block_len 8; choose a multiple of it$"),
                            (24, "cannot take 24 more; make it with a larger max_len")):
        with pytest.raises(UserError, match=message):
            model.prefill(torch.zeros(1, tokens, dtype=torch.long), cache)


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match="this machine has 2 GPUs.*--nproc_per_node=2"):
        Parallel("cuda", 5)


def test_the_laptop_config_is_the_default_and_the_others_start_from_smaller_weights():
    def settings_with(*argv):
        configure(settings := dict(vars(train)), argv)
        return settings_of(settings)
    assert settings_with("config/laptop.py") == {**settings_with(), "tokenizer": "bytes"}
    assert (train.init_std, train.embed_std, train.max_iters) == (0.1, 1, 3500)
    for path in ROOT.glob("config/*_*.py"):             # the wide models; laptop and novelist are narrow
        settings = settings_with(str(path))
        assert settings["init_std"] == settings["embed_std"] == 0.02 and settings["weight_decay"] == 0.1


def test_a_gpu_before_ampere_runs_the_plain_operations_in_fp32(monkeypatch):
    """ops.FAST stays empty, so neither the kernels nor the engines of fast/ are chosen."""
    for capability, modern in (((8, 0), True), ((7, 5), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        assert ampere_or_later("cuda") == modern and not ampere_or_later("cpu")
        assert pick_dtype("auto", "cuda") == (torch.bfloat16 if modern else torch.float32)
    ops.FAST["ssd_scan"] = None                         # left by an earlier choice
    assert select_kernels("auto", "cuda").startswith("kernels: plain (the Triton kernels need a GPU of compute")
    assert ops.FAST == {}
    with pytest.raises(UserError, match="kernels=mamba_ssm needs a GPU of compute capability 8.0"):
        select_kernels("mamba_ssm", "cuda")
