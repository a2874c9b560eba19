"""Settings: files and flags, types, typos. Each mistake ends in one sentence. (Of whole commands: test_mistakes.py.)"""
import contextlib
import io
import os
import sys

import pytest
import torch

import configurator
import ops
from configurator import UserError, configure, settings_of
from conftest import ROOT, make_model, module_of
from checkpoint import config_from_file
from parallel import Parallel, ampere_or_later, pick_dtype, select_kernels


def namespace(**extra):
    """What `configure` gets of a script: settings, and names that are none."""
    return {"learning_rate": 1e-3, "max_iters": 100, "resume": False, "out_dir": "out", "tasks": ["a"], "batch": [1],
            "data": [], "prompt": "", "checkpoint": "", "untrained": "", "_private": 3, "main": len, "__doc__": "",
            **extra}


@pytest.mark.parametrize("flags, name, value", [
    ("--max_iters 65536", "max_iters", 65536), ("--max-iters=65536", "max_iters", 65536),
    ("--max_iters=6.5536e4", "max_iters", 65536), ("--learning_rate=1", "learning_rate", 1.0),
    ("--resume", "resume", True), ("--resume false", "resume", False),
    ("--tasks=['x','y']", "tasks", ["x", "y"]), ("--tasks=x,y", "tasks", ["x", "y"]), ("--batch=64", "batch", [64]),
    ("--prompt -h", "prompt", "-h"), ("--prompt --help", "prompt", "--help"), ("--prompt=~/a", "prompt", "~/a"),
    ("--out_dir=~/a", "out_dir", "/home/me/a"), ("--checkpoint ~/a,hf://b/~/c,~/d", "checkpoint",
                                                 "/home/me/a,hf://b/~/c,/home/me/d"),
    ("--data=~/a,b,~/c", "data", ["/home/me/a", "b", "/home/me/c"]),
    ("--checkpoint=a=b.pt", "checkpoint", "a=b.pt"), ("--checkpoint={[]:1}", "checkpoint", "{[]:1}"),
    ("--out_dir=none", "out_dir", "none"), ("--out_dir=true", "out_dir", "true"), ("--out_dir=3", "out_dir", "3")])
def test_a_value_is_read_in_the_type_of_its_setting(monkeypatch, flags, name, value):
    monkeypatch.setenv("HOME", "/home/me")
    configure(settings := namespace(), flags.split())
    assert settings[name] == value and type(settings[name]) is type(value)


@pytest.mark.parametrize("flags, message", [
    ("--learning_rat=1", r"did you mean learning_rate\?"), ("--lr=1", r"did you mean learning_rate\?"),
    ("--start=a", r"did you mean prompt\?"), ("--init=random", r"did you mean untrained\?"),
    ("--model_config=laptop", r"did you mean untrained\?"), ("--mcqa=data/mcqa", r"did you mean tasks\?"),
    ("--eval_only", r"there is no setting 'eval_only'; did you mean python eval.py\?"),
    ("--local_rank=0", "start with torchrun"), ("--local-rank=1", "start with torchrun"),
    ("--zzz=1", "there is no setting 'zzz'; --help lists all settings"),
    ("--_private=1", "no setting"), ("--main=1", "no setting"),
    ("--max_iters=many", "takes a whole number"), ("--max_iters=1.5", "takes a whole number"),
    ("--learning_rate=1e400", "takes a finite number"), ("--resume=1", "true or false"),
    ("--max_iters", "--max_iters needs a value, as in --max_iters=VALUE"),
    ("--checkpoint --resume", "--checkpoint needs a value"), ("--prompt --max_iters 40", "--prompt needs a value"),
    ("-max_iters 5", "config file -max_iters does not exist .* a setting is written --name=value"),
    ("nowhere.py", "config file nowhere.py does not exist .*; config/ has .*laptop, "),
    (str(ROOT / "README.md"), "does not end in .py")])
def test_mistakes_are_one_sentence_with_the_nearest_name(flags, message):
    with pytest.raises(UserError, match=message):
        configure(namespace(), flags.split())


def test_config_files_compute_and_flags_after_them_win_and_what_was_given_is_known(tmp_path):
    file = tmp_path / "c.py"                            # with a byte order mark
    file.write_text("\ufeffimport math\nfrom math import sqrt\nmax_iters = max_iters * 2\n"
                    "learning_rate = math.exp(0) * sqrt(4)\n_half = 3\nCONSTANT = 4\nresume = False\n")
    given = configure(settings := namespace(), [str(file), "--learning_rate=0.5"])
    assert given == dict(max_iters=200, learning_rate=0.5, resume=False) and {**settings, **given} == settings


@pytest.mark.parametrize("content, message", [
    (b"max_iter = None", "did you mean max_iters"), (b"max_iters = 'x'", "takes a whole number"),
    (b"1 / 0", "ZeroDivisionError"), (b"max_iters =", "SyntaxError"), (b"import sys; sys.exit(0)", "failed")])
def test_mistakes_in_files_name_the_file(tmp_path, content, message):
    (tmp_path / "c.py").write_bytes(content)
    with pytest.raises(UserError, match=rf"c\.py.*{message}"):
        configure(namespace(), [str(tmp_path / "c.py")])


def test_a_config_file_of_the_repository_is_found_from_any_folder_and_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    here = config_from_file(str(ROOT / "config" / "laptop.py"))
    assert here == config_from_file("laptop") == config_from_file("config/laptop.py") and here.seq_len == 256
    (tmp_path / "mine.py").write_text("n_layers = 7")
    with pytest.raises(UserError, match="mine.py: there is no setting 'n_layers'; did you mean n_layer"):
        config_from_file("mine.py")


@pytest.mark.parametrize("argv", [["--help"], ["--resume", "-h"], ["--max_iters=100", "--help", "--nonsense"]])
def test_help_prints_the_settings_and_what_they_mean(capsys, tmp_path, argv):
    (tmp_path / "s.py").write_text("max_iters = 100   # how long\n")
    with pytest.raises(SystemExit) as caught:
        configure(namespace(__file__=str(tmp_path / "s.py"), LR=3), argv)
    shown = capsys.readouterr().out
    assert caught.value.code == 0 and "--max_iters = 100" in shown and "how long" in shown and "LR" not in shown


@pytest.mark.parametrize("error, status", [
    (UserError("a"), "x.py: a"), (KeyboardInterrupt(), "130"), (BrokenPipeError(32, "a closed pipe"), "141"),
    (ConnectionError("no hub"), "x.py: ConnectionError: no hub; "),
    (FileNotFoundError(2, "No such file", "data/x"), "x.py: data/x: No such file; choose another path, or check this"),
    (MemoryError(), "x.py: out of memory; lower "), (RuntimeError("CUDA out of memory"), "x.py: out of memory; ")])
def test_a_script_ends_in_one_sentence_and_a_bug_keeps_its_traceback(error, status):
    with pytest.raises(SystemExit) as ended, contextlib.redirect_stdout(io.StringIO()), configurator.script("x.py"):
        raise error
    assert str(ended.value.code).startswith(status)
    with pytest.raises(ZeroDivisionError), configurator.script("x.py"):
        1 / 0


def test_a_stdout_that_cannot_be_written_ends_a_script_in_a_sentence_or_in_silence(monkeypatch):
    """A full disk, a pipe that nobody reads, `>&-`."""
    reader, writer = os.pipe()
    os.close(reader)
    for file, status in (("/dev/full", "x.py: OSError: .* No space left on device"), (writer, "141")):
        with open(file, "w") as out, contextlib.redirect_stdout(out):
            with pytest.raises(SystemExit, match=status), configurator.script("x.py"):
                print("a")
    monkeypatch.setattr(sys, "stdout", None)
    with configurator.script("x.py"):
        print("a")


@pytest.mark.parametrize("encoding, shown", [
    ("ascii", "caf? ?"), ("latin-1", "caf\xe9 ?"), ("cp1252", "caf\xe9 ?"), ("utf-8", "caf\xe9 \u3042")])
def test_a_character_that_the_output_lacks_is_a_question_mark(encoding, shown):
    out = io.TextIOWrapper(io.BytesIO(), encoding)
    with contextlib.redirect_stdout(out), configurator.script("x.py"):
        print("caf\xe9 \u3042")
    assert out.buffer.getvalue().decode(encoding) == shown + "\n"
    with pytest.raises(SystemExit, match="x.py: .*surrogates"), configurator.script("x.py"):
        "caf\udce9".encode()                            # a word of the command line that is not UTF-8


# ----------------------------------------------------------------------------------------------
# Of a model and of a training

def test_a_cache_refuses_half_blocks_and_what_is_beyond_its_length_in_a_sentence():
    model = make_model("mamba_h")
    cache = model.new_cache(1, 16)
    for tokens, message in ((12, "12 tokens are not whole blocks of block_len 8; choose a multiple of it$"),
                            (24, "cannot take 24 more; make it with a larger max_len")):
        with pytest.raises(UserError, match=message):
            model.prefill(torch.zeros(1, tokens, dtype=torch.long), cache)


def test_a_model_of_attention_alone_needs_no_geometry_of_mamba():
    assert make_model("attention", mamba_head_dim=48)(torch.zeros(2, 32, dtype=torch.long)).isfinite()


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match="this machine has 2 GPUs.*--nproc_per_node=2"):
        Parallel("cuda", 5)


def test_the_laptop_config_is_the_default_and_the_others_start_from_smaller_weights():
    def settings_with(*argv):
        module = module_of("train")
        configure(vars(module), argv)
        return settings_of(vars(module))
    default = settings_with()
    assert settings_with("config/laptop.py") == {**default, "tokenizer": "bytes"}
    assert default["init_std"] == 0.1 and default["embed_std"] == 1
    for path in {*ROOT.glob("config/*_*.py")}:          # the wide models; laptop and novelist are narrow
        settings = settings_with(str(path))
        assert settings["init_std"] == settings["embed_std"] == 0.02


def test_a_gpu_before_ampere_runs_the_plain_operations_in_fp32(monkeypatch):
    """A mocked T4. ops.FAST stays empty, so neither the kernels nor the engines of fast/ are chosen."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    for capability, modern in (((8, 0), True), ((7, 5), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        assert ampere_or_later("cuda") == modern and not ampere_or_later("cpu")
        assert pick_dtype("auto", "cuda") == (torch.bfloat16 if modern else torch.float32)
    ops.FAST["ssd_scan"] = None                         # left by an earlier choice
    assert select_kernels("auto", "cuda") == (
        "kernels: plain (Tesla T4 has compute capability 7.5; bf16 and fast/ need 8.0)")
    assert ops.FAST == {}
    with pytest.raises(UserError, match="kernels=mamba_ssm needs a GPU of compute capability 8.0"):
        select_kernels("mamba_ssm", "cuda")
