"""Settings: files and flags, types, typos, values that contradict each other. Each mistake ends in one sentence."""
import shutil

import pytest
import torch

import configurator
import ops
from configurator import UserError, check, configure, settings_of
from conftest import ROOT, TINY, make_model, module_of, run_train, script
from files import check_file
from model import BlockDiffusionLM, ModelConfig, config_from_file
from parallel import Parallel, ampere_or_later, pick_dtype, select_kernels


def namespace(**extra):
    """What `configure` gets of a script: settings, and names that are none."""
    return {"learning_rate": 1e-3, "max_iters": 100, "resume": False, "out_dir": "out", "tasks": ["a"],
            "checkpoint": "", "_private": 3, "main": lambda: None, **extra}


@pytest.mark.parametrize("flag", ["--max_iters 65536", "--max-iters=65536", "--max_iters=6.5536e4"])
def test_all_spellings_of_a_flag_work(flag):
    configure(settings := namespace(), flag.split())
    assert settings["max_iters"] == 65536 and type(settings["max_iters"]) is int


def test_a_value_is_read_in_the_type_of_its_setting():
    out = configure(namespace(), ["--tasks=['x', 'y']", "--checkpoint=a=b.pt", "--resume"])
    assert out["tasks"] == ["x", "y"] and out["checkpoint"] == "a=b.pt" and out["resume"] is True
    assert configure(namespace(), ["--tasks=x,y"])["tasks"] == ["x", "y"]
    assert configure(namespace(tasks=[1]), ["--tasks=64"])["tasks"] == [64]
    assert configure(namespace(), ["--resume", "false"])["resume"] is False
    assert type(configure(namespace(), ["--learning_rate=1"])["learning_rate"]) is float
    assert configure(namespace(), ["--checkpoint={[]:1}"])["checkpoint"] == "{[]:1}"
    assert configure(namespace(), ["--out_dir=none"])["out_dir"] == "none"      # a word like any other
    assert configure(namespace(), ["--out_dir=true"])["out_dir"] == "true"
    assert configure(namespace(), ["--out_dir=3"])["out_dir"] == "3"


@pytest.mark.parametrize("argv, message", [
    (["--learning_rat=1"], "did you mean learning_rate"),
    (["--zzz=1"], "--help lists all settings"),
    (["--max_iters=many"], "takes a whole number"),
    (["--max_iters=1.5"], "takes a whole number"),
    (["--learning_rate=1e400"], "takes a finite number"),
    (["--resume=1"], "true or false"),
    (["--max_iters"], "needs a value"),
    (["--checkpoint", "--resume"], "--checkpoint needs a value, as in --checkpoint=VALUE"),
    (["-max_iters", "5"], "-max_iters begins with one dash; a setting takes two: --max_iters"),
    (["--lr=1"], r"did you mean learning_rate\?"),
    (["nowhere.py"], "does not exist"),
    ([str(ROOT / "README.md")], "README.md is no .py file; config/ has .*a setting is written --name=value"),
    (["--_private=1"], "no setting"),
    (["--main=1"], "no setting")])
def test_mistakes_are_one_sentence_with_the_nearest_name(argv, message):
    with pytest.raises(UserError, match=message):
        configure(namespace(), argv)


def test_config_files_compute_and_flags_after_them_win(tmp_path):
    file = tmp_path / "c.py"                            # with a byte order mark
    file.write_text("\ufeffimport math\nfrom math import sqrt\nmax_iters = max_iters * 2\n"
                    "learning_rate = math.exp(0) * sqrt(4)\n_half = 3\nCONSTANT = 4\n")
    out = configure(namespace(), [str(file), "--learning_rate=0.5"])
    assert out["max_iters"] == 200 and out["learning_rate"] == 0.5 and not {"_half", "CONSTANT"} & {*out}


@pytest.mark.parametrize("content, message", [
    (b"max_iter = 5", "did you mean max_iters"), (b"max_iter = None", "did you mean max_iters"),
    (b"max_iters = 'x'", "takes a whole number"),
    (b"resume = 1", "true or false"), (b"1 / 0", "ZeroDivisionError"), (b"max_iters =", "SyntaxError"),
    (b"\xff\xfe\x00", "failed"), (b"import sys; sys.exit(0)", "failed")])
def test_mistakes_in_files_name_the_file(tmp_path, content, message):
    (tmp_path / "c.py").write_bytes(content)
    with pytest.raises(UserError, match=rf"c\.py.*{message}"):
        configure(namespace(), [str(tmp_path / "c.py")])


def test_help_prints_the_settings_and_what_they_mean(capsys, tmp_path):
    (tmp_path / "s.py").write_text("max_iters = 100   # how long\n")
    with pytest.raises(SystemExit) as caught:
        configure(namespace(__file__=str(tmp_path / "s.py"), LR=3), ["--help"])
    shown = capsys.readouterr().out
    assert caught.value.code == 0 and "--max_iters = 100" in shown and "how long" in shown and "LR" not in shown


def test_bounds_and_choices_name_the_setting_and_what_it_may_be():
    bounds = dict(least=dict(max_iters=1), above=dict(learning_rate=0), below=dict(learning_rate=1),
                  choices=dict(out_dir=("out", "in")))
    check(namespace(), **bounds)
    for wrong, message in ((dict(max_iters=0), "max_iters must be at least 1, but is 0"),
                           (dict(learning_rate=-1.0), "must be above 0"),
                           (dict(learning_rate=float("nan")), "must be above 0, but is nan"),
                           (dict(learning_rate=1.0), "must be below 1, but is 1.0"),
                           (dict(out_dir="on"), "must be one of out, in, but is 'on'")):
        with pytest.raises(UserError, match=message):
            check(namespace(**wrong), **bounds)


def test_a_script_ends_in_one_sentence(capsys, tmp_path):
    for error, status in ((UserError("a"), "x.py: a"), (KeyboardInterrupt(), 130),
                          (ConnectionError("no hub"), "x.py: ConnectionError: no hub")):        # not of stdout
        with pytest.raises(SystemExit) as ended, configurator.script("x.py"):
            raise error
        assert ended.value.code == status
    assert capsys.readouterr().err.endswith("x.py: stopped\n")                  # Ctrl-C
    with pytest.raises(SystemExit, match="x.py: .*missing: No such file"), configurator.script("x.py"):
        open(tmp_path / "missing")
    with pytest.raises(ZeroDivisionError), configurator.script("x.py"):     # a bug in the code keeps its traceback
        1 / 0


def test_whether_a_file_can_be_written_is_known_beforehand(tmp_path, monkeypatch):
    (tmp_path / "file").write_text('{"as": "it was"}')
    (tmp_path / "empty").touch()
    for path in ("", *(str(tmp_path / name) for name in ("file", "empty", "new/file"))):
        check_file("out", path)
    assert (tmp_path / "file").read_text() == '{"as": "it was"}' and not (tmp_path / "new" / "file").exists()
    for path in (tmp_path, tmp_path / "file" / "x"):
        with pytest.raises(UserError, match="out is .*, which cannot be written; name another file"):
            check_file("out", str(path))
    monkeypatch.setattr("files.os.access", lambda *_: False)         # a folder of another user
    with pytest.raises(UserError, match="which cannot be written"):
        check_file("out", str(tmp_path / "x"))


def test_a_config_file_of_the_repository_is_found_from_any_folder_and_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    here = config_from_file(str(ROOT / "config" / "laptop.py"))
    assert here == config_from_file("laptop") == config_from_file("config/laptop.py") and here.seq_len == 256
    for name in ("laptops.py", "lptop"):
        with pytest.raises(UserError, match=f"config file {name} does not exist; config/ has .*laptop, "):
            config_from_file(name)
    for text, message in (("d_model = 'wide'", "d_model takes a whole number"),
                          ("n_layers = 7", "there is no setting 'n_layers'; did you mean n_layer")):
        (tmp_path / "mine.py").write_text(text)
        with pytest.raises(UserError, match=f"mine.py: {message}"):
            config_from_file("mine.py")


def test_names_of_nanogpt_lead_to_ours():
    for name, settings, ours in (("start", dict(prompt="", seed=1), "prompt"), ("n_embd", dict(d_model=1), "d_model"),
                                 ("max_new_tokens", dict(length=1, max_iters=2), "length"),
                                 ("order", dict(decoder="random"), "decoder")):
        with pytest.raises(UserError, match=f"there is no setting '{name}'; did you mean {ours}\\?"):
            configure(dict(settings), [f"--{name}=1"])


# ----------------------------------------------------------------------------------------------
# Of a model and of a training

def test_sequences_and_blocks_of_the_wrong_length_are_refused_in_a_sentence():
    with pytest.raises(UserError, match="whole blocks"):
        ModelConfig(seq_len=100, block_len=16)
    with pytest.raises(UserError, match="rotary capacity"):
        ModelConfig(seq_len=2 ** 19, block_len=256)
    for name in ("vocab_size", "seq_len", "block_len", "attn_every", "n_layer", "n_head", "d_model", "d_state",
                 "mamba_head_dim", "mamba_expand", "conv_width", "chunk_len", "rope_theta", "rope_capacity"):
        for value in (0, -96):
            with pytest.raises(UserError, match=f"^{name} must be above 0, but is {value}$"):
                ModelConfig(**{name: value})
    model = make_model("mamba_h")
    cache = model.new_cache(1, 16)
    with pytest.raises(UserError, match="must have block_len = 8 tokens"):
        model.denoise(torch.zeros(1, 4, dtype=torch.long), cache, torch.ones(1))
    with pytest.raises(UserError, match="12 tokens are not whole blocks of block_len 8; choose a .*, such as 16$"):
        model.prefill(torch.zeros(1, 12, dtype=torch.long), cache)
    with pytest.raises(UserError, match="cannot take"):
        model.prefill(torch.zeros(1, 24, dtype=torch.long), cache)
    with pytest.raises(UserError, match="rotary capacity"):
        model.new_cache(1, 262_145)


def test_attention_only_models_need_no_geometry_of_mamba():
    shape = dict(vocab_size=23, seq_len=16, block_len=8, n_layer=2, n_head=2, d_model=20)
    model = BlockDiffusionLM(ModelConfig(attn_every=1, **shape))
    assert model(torch.zeros(2, 16, dtype=torch.long)).isfinite() and model.new_cache(1, 8).nbytes > 0
    with pytest.raises(UserError, match="must be a multiple of mamba_head_dim"):
        ModelConfig(attn_every=2, **shape)


@pytest.mark.parametrize("argv, message", [
    (["--batch_size=4", "--micro_batch_size=3"], "must divide the 4 sequences"),
    (["--tokenizer=gpt4"], "tokenizer must be one of bytes, gpt2"),
    (["--eval_only"], "add --resume or --init_from"),
    (["--warmup_iters=4"], r"warmup_iters must be below max_iters \(4\), but is 4; add --warmup_iters=0"),
    (["--dtype=bf16"], "one of auto, float32, bfloat16"),
    (["--kernels=triton"], "kernels must be one of auto, torch, mamba_ssm, but is 'triton'"),
    (["--batch_size=0"], "batch_size must be at least 1, but is 0"), (["--grad_clip=-1"], "at least 0"),
    (["--learning_rate=0"], "above 0"), (["--min_lr=1"], "min_lr must be at most"), (["--beta1=1"], "below 1"),
    (["--seed=-1"], "at least 0"), (["--log_interval=0"], "at least 1"), (["--out_dir="], "name a folder")])
def test_settings_that_contradict_each_other_are_refused(corpus, tmp_path, argv, message):
    with pytest.raises(UserError, match=message):
        run_train(TINY + [f"--data={corpus}", f"--out_dir={tmp_path}", *argv])


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match="this machine has 2 GPUs.*--nproc_per_node=2"):
        Parallel("cuda", 5)


@pytest.mark.parametrize("argv, message", [
    (["--out_dir={trained}", "--resume", "--d_state=16"], "was trained with d_state=8; add"),
    (["--init_from={trained}", "--time_conditioning"], "add --time_conditioning=False"),
    (["--init_from={trained}", "--reverse_scan=false"], "add --reverse_scan=True"),
    (["--eval_only", "--init_from={trained}", "--block_len=4"], "block_len is 8 in that checkpoint and 4 in this run"),
    (["--init_from={trained}", "--n_head=1"], "n_head is 2 in that checkpoint and 1 in this run; add --n_head=2"),
    (["--init_from={trained}", "--d_model=64"], "adaln.bias is 64 in that checkpoint and 128 in this run"),
    (["--init_from={trained}", "--n_layer=3"], "is missing in that checkpoint"),
    (["--init_from={trained}", "--n_layer=1"], "missing in this run")])
def test_weights_of_another_model_are_refused_by_name(corpus, trained, tmp_path, argv, message):
    argv = [word.format(trained=trained) for word in argv]
    with pytest.raises(UserError, match=message):
        run_train(TINY + [f"--data={corpus}", f"--out_dir={tmp_path}", *argv])


def test_a_run_with_other_tokens_is_refused_by_the_setting_that_helps(corpus, trained):
    """A checkpoint holds vocab_size, which is no setting."""
    def patch(module):
        real = module.load_checkpoint
        module.load_checkpoint = lambda *args: (record := real(*args)) | dict(
            tokenizer="gpt2", config=dict(record["config"], vocab_size=50_258))
    with pytest.raises(UserError, match="was trained with tokenizer=gpt2; add"):
        run_train(TINY + [f"--data={corpus}", f"--out_dir={trained}", "--resume"], patch=patch)


def test_the_laptop_config_is_the_default_and_the_others_start_from_smaller_weights():
    def settings_with(*argv):
        module = module_of("train")
        configure(vars(module), argv)
        return settings_of(vars(module))
    default = settings_with()
    assert settings_with("config/laptop.py") == default
    for path in ROOT.glob("config/*.py"):
        settings = settings_with(str(path))
        assert path.stem == "laptop" or settings["init_std"] == settings["embed_std"] == 0.02
    assert default["init_std"] == 0.1 and default["embed_std"] == 1


def test_a_gpu_before_ampere_runs_the_plain_operations_in_fp32(monkeypatch):
    """A mocked T4. ops.FAST stays empty, so neither the kernels nor the engines of fast/ are chosen."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    for capability, modern in (((7, 5), False), ((7, 0), False), ((8, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        assert ampere_or_later("cuda") == modern and not ampere_or_later("cpu")
        assert pick_dtype("auto", "cuda") == (torch.bfloat16 if modern else torch.float32)
    assert pick_dtype("auto", "cpu") == pick_dtype("float32", "cuda") == torch.float32
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    ops.FAST["ssd_scan"] = None                         # left by an earlier choice
    assert select_kernels("auto", "cuda") == (
        "kernels: plain (Tesla T4 has compute capability 7.5; bf16 and fast/ need 8.0)")
    assert ops.FAST == {}
    with pytest.raises(UserError, match="kernels=mamba_ssm needs a GPU of compute capability 8.0"):
        select_kernels("mamba_ssm", "cuda")


@pytest.mark.parametrize("steps, warmup", [(4, 0), (20, 2), (4000, 200)])
def test_a_run_warms_up_for_a_tenth_of_its_steps_but_at_most_200_if_no_warm_up_is_set(steps, warmup):
    train = module_of("train")
    configure(vars(train), [f"--max_iters={steps}", "--out_dir=nowhere"])
    train.check_settings()
    assert train.warmup_iters == warmup


def test_resuming_with_other_settings_says_so(corpus, tmp_path, capsys):
    argv = TINY + [f"--data={corpus}", f"--out_dir={tmp_path}/out"]
    run_train(argv)
    run_train(argv + ["--resume", "--seed=2", "--max_iters=5", "--eval_samples=1"])
    assert "resuming with another seed, max_iters, eval_samples;" in capsys.readouterr().out
    shutil.copytree(corpus, tmp_path / "moved")
    run_train(TINY + [f"--data={tmp_path}/moved", f"--out_dir={tmp_path}/out", "--resume", "--seed=2", "--max_iters=6"])
    assert "resuming with another max_iters, eval_samples;" in capsys.readouterr().out, "the text is the same"


@pytest.mark.parametrize("name", ["cuda:99", "cpu:1", "cpu:x", "cpu:", "gpu"])
def test_an_absent_device_is_a_sentence(name):
    with pytest.raises(UserError, match=f"no device '{name}'"):
        Parallel(name)


@pytest.mark.parametrize("name, argv, message", [
    ("model.py", ["nope"], "config file nope does not exist"),
    ("train.py", ["--out_dir={tmp}/new", "--data={tmp}/none"], "none"),
    ("train.py", ["--batch_size=1e13"], "batch_size must be at most"),
    ("train.py", ["--out_dir=caf\udce9"], "is not UTF-8"),
    ("sample.py", ["--out_dir={tmp}/none"], "make one with python train.py"),
    ("sample.py", ["--num_samples=1e12"], "num_samples must be at most"),
    ("eval.py", ["--checkpoint={trained}", "--mc=10000000000", "--device=cpu"], "eval.py: out of memory"),
    ("data.py", ["show", "caf\udce9"], "is not UTF-8")])
def test_scripts_answer_bad_input_with_one_sentence_and_a_non_zero_exit(trained, tmp_path, name, argv, message):
    status, _, error = script(name, *(word.format(trained=trained, tmp=tmp_path) for word in argv))
    assert status == 1 and message in error.splitlines()[-1]
