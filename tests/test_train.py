"""Training: resume, ranks, baselines, failures. Tiny models on a tiny invented corpus."""
import contextlib
import glob
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from io import BytesIO

import numpy as np
import pytest
import torch

import ops
from checkpoint import load_checkpoint, save_checkpoint
from configurator import ConfigError, UserError, configure, settings_of
from conftest import make_model
from data import prepare_stdlib
from model import BlockDiffusionLM, ModelConfig, ModelError
from paper import transfer_lr
from parallel import ShardedAdamW, ampere, pick_dtype, select_kernels
from train import Log, learning_rate_at

SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), ".."))
TINY = ["--seq_len=32", "--block_len=8", "--d_model=32", "--n_head=2", "--n_layer=2", "--attn_every=2",
        "--d_state=8", "--mamba_head_dim=16", "--batch_size=4", "--warmup_iters=1", "--max_iters=4",
        "--log_interval=1", "--eval_interval=2", "--eval_sequences=4", "--device=cpu", "--learning_rate=1e-2"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    root = tmp_path_factory.mktemp("source")
    for i in range(60):
        (root / f"module_{i}.py").write_text(f"def f{i}(x):\n    return x + {i}\n" * (5 + i % 7))
    out = tmp_path_factory.mktemp("data") / "corpus"
    prepare_stdlib(str(out), root=str(root))
    return str(out)


def load(script, argv):
    """train.py or eval.py as a module with globals of its own, configured."""
    spec = importlib.util.spec_from_file_location(f"{script}_under_test", os.path.join(ROOT, f"{script}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    configure(vars(module), argv)
    return module


def run(argv, monkeypatch=None, patch=None):
    """train.py's main in this process, with its own globals."""
    module = load("train", argv)
    if patch:
        patch(module)
    handlers = [signal.getsignal(s) for s in SIGNALS]
    try:
        module.main()
    finally:
        for s, handler in zip(SIGNALS, handlers):
            signal.signal(s, handler)
    return module


def read_log(out_dir):
    with open(os.path.join(out_dir, "log.jsonl")) as f:
        return [json.loads(line) for line in f]


def test_four_steps_equal_two_then_resume_then_two_bit_for_bit(corpus, tmp_path):
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    run(TINY + [f"--data={corpus}", f"--out_dir={a}"])
    def stop_after_two(module):                         # the same run, interrupted at step 2
        learning_rate_at = module.learning_rate_at
        def interrupted(step, *rest):
            if step == 2:
                raise KeyboardInterrupt
            return learning_rate_at(step, *rest)
        module.learning_rate_at = interrupted
    with pytest.raises(KeyboardInterrupt):
        run(TINY + [f"--data={corpus}", f"--out_dir={b}"], patch=stop_after_two)
    assert load_checkpoint(f"{b}/ckpt.pt")["step"] == 2
    run(TINY + [f"--data={corpus}", f"--out_dir={b}", "--resume"])
    x, y = load_checkpoint(f"{a}/ckpt.pt"), load_checkpoint(f"{b}/ckpt.pt")
    assert x["step"] == y["step"] == 4
    for name in x["model"]:
        assert torch.equal(x["model"][name], y["model"][name]), name
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(x["optimizer"][name][moment], y["optimizer"][name][moment])
    losses = [[(r["step"], r.get("loss"), r.get("val_loss")) for r in read_log(d)] for d in (a, b)]
    assert losses[0] == losses[1] and len(losses[0]) == 6


def test_accumulation_does_not_change_the_run(corpus, tmp_path):
    losses = []
    for micro in (4, 1):
        out = str(tmp_path / str(micro))
        run(TINY + [f"--data={corpus}", f"--out_dir={out}", f"--micro_batch_size={micro}"])
        losses.append([r["loss"] for r in read_log(out) if "loss" in r])
    np.testing.assert_allclose(*losses, rtol=2e-5)


def torchrun(processes, argv, nodes=1):
    """The train.py of each node's agent, all on this machine."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    agents = [subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc_per_node={processes}",
         f"--node_rank={node}", "--master_addr=localhost", f"--master_port={port}", "train.py", *argv],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True) for node in range(nodes)]
    return [(*agent.communicate(timeout=150), agent.returncode) for agent in agents]


@pytest.mark.parametrize("nodes", [1, 2])
def test_processes_on_one_or_two_nodes_train_the_same_model_as_one(corpus, tmp_path, nodes):
    """Two processes on each node. What they trained resumes on one."""
    one, many = str(tmp_path / "one"), str(tmp_path / "many")
    tiny = TINY + [f"--data={corpus}", "--max_iters=5", "--eval_interval=5"]
    run(tiny + [f"--out_dir={one}"])
    for _, errors, code in torchrun(2, tiny + [f"--out_dir={many}"], nodes):
        assert code == 0, errors
    a, b = load_checkpoint(f"{one}/ckpt.pt"), load_checkpoint(f"{many}/ckpt.pt")
    for name in a["model"]:
        torch.testing.assert_close(a["model"][name], b["model"][name], rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(a["optimizer"][name]["exp_avg"], b["optimizer"][name]["exp_avg"],
                                   rtol=1e-3, atol=1e-6)
    losses = [[r.get("loss") or r["val_loss"] for r in read_log(d)] for d in (one, many)]
    np.testing.assert_allclose(*losses, rtol=1e-4)
    module = run(tiny + [f"--out_dir={many}", "--max_iters=6", "--resume"])
    assert load_checkpoint(f"{many}/ckpt.pt")["step"] == 6 and module is not None


def test_sharded_adamw_is_adamw(corpus):
    ours, plain = make_model("mamba_h"), make_model("mamba_h")
    sharded = ShardedAdamW(ours, 1e-2, (0.9, 0.95), 0.1)
    adamw = torch.optim.AdamW(plain.param_groups(0.1), lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    x0 = torch.randint(0, 22, (2, 32))
    for step in range(4):
        for model in (ours, plain):
            model(x0, torch.Generator().manual_seed(step)).backward()
        norm = sharded.reduce()
        sharded.step(1e-2, min(1.0, 1.0 / (float(norm) + 1e-6)))
        sharded.zero_grad()
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad()
        torch.testing.assert_close(norm, expected)
    for a, b in zip(ours.parameters(), plain.parameters()):
        torch.testing.assert_close(a, b)


def test_clip_and_step_is_reduce_and_a_clipped_step():
    both = make_model("mamba_h"), make_model("mamba_h")
    one, other = (ShardedAdamW(model, 1e-2, (0.9, 0.95), 0.1) for model in both)
    x0 = torch.randint(0, 22, (2, 32))
    for model in both:
        model(x0, torch.Generator().manual_seed(0)).backward()
    one.clip_and_step(1e-2)
    other.step(1e-2, min(1.0, 1.0 / (float(other.reduce()) + 1e-6)))
    for a, b in zip(*(model.parameters() for model in both)):
        torch.testing.assert_close(a, b)


def test_a_cpu_and_kernels_torch_run_the_plain_operations():
    for setting in ("auto", "torch"):
        ops.FAST["ssd_scan"] = None                     # of an earlier choice
        assert select_kernels(setting, "cpu") == "kernels: plain" and ops.FAST == {}
    with pytest.raises(ConfigError, match="kernels must be one of auto, torch, mamba_ssm, but is 'triton'"):
        select_kernels("triton", "cpu")


def test_a_gpu_before_ampere_runs_the_plain_operations_in_fp32(monkeypatch):
    """Colab's T4, by a mocked capability. Kernels and generation's engine follow from the table, which stays empty."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    for capability, modern in (((7, 5), False), ((7, 0), False), ((8, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        assert ampere("cuda") == modern and not ampere("cpu")
        assert pick_dtype("auto", "cuda") == (torch.bfloat16 if modern else torch.float32)
    assert pick_dtype("auto", "cpu") == pick_dtype("float32", "cuda") == torch.float32
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert select_kernels("auto", "cuda") == (
        "kernels: plain (Tesla T4 has compute capability 7.5; bf16 and fast/ need 8.0)")
    assert ops.FAST == {}
    with pytest.raises(ConfigError, match="kernels=mamba_ssm needs a GPU of compute capability 8.0"):
        select_kernels("mamba_ssm", "cuda")


def test_a_step_that_is_not_finite_is_skipped_and_three_in_a_row_stop_the_run(corpus, tmp_path, capsys):
    def poison(steps):
        def patch(module):
            class Poisoned(ShardedAdamW):
                count = 0

                def reduce(self):
                    self.count += 1
                    return super().reduce() * (float("nan") if self.count in steps else 1)
            module.ShardedAdamW = Poisoned
        return patch
    out = str(tmp_path / "a")
    run(TINY + [f"--data={corpus}", f"--out_dir={out}"], patch=poison({2, 3}))
    assert capsys.readouterr().out.count("step skipped") == 2
    out = str(tmp_path / "b")
    with pytest.raises(ModelError, match="three steps in a row"):
        run(TINY + [f"--data={corpus}", f"--out_dir={out}", "--max_iters=9"], patch=poison({3, 4, 5}))
    record = load_checkpoint(f"{out}/ckpt.pt")
    assert record["step"] == 2 and all(p.isfinite().all() for p in record["model"].values())


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP, "nobody reads on"], ids=str)
def test_told_to_end_it_saves_and_resume_goes_on(corpus, tmp_path, how):
    out = str(tmp_path / "out")
    argv = TINY + [f"--data={corpus}", f"--out_dir={out}", "--max_iters=100000", "--eval_interval=100000"]
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)      # under nohup it would be ignored
    process = subprocess.Popen([sys.executable, "train.py", *argv], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    signal.signal(signal.SIGHUP, before)
    for line in process.stdout:
        if "loss" in line:
            break
    if isinstance(how, str):
        process.stdout.close()
        assert process.wait(60) == 128 + signal.SIGPIPE
    else:
        process.send_signal(how)
        rest = process.stdout.read()
        assert process.wait(60) == 128 + how and "go on with --resume" in rest
    step = load_checkpoint(f"{out}/ckpt.pt")["step"]
    assert step >= 1 and read_log(out)[-1]["step"] == step


def test_a_lost_process_ends_the_others_with_a_sentence(corpus, tmp_path):
    out = str(tmp_path / "lost")
    argv = TINY + [f"--data={corpus}", f"--out_dir={out}", "--max_iters=100000", "--dist_timeout=20"]
    environment = dict(os.environ, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29571",
                       PYTHONUNBUFFERED="1")
    ranks = [subprocess.Popen([sys.executable, "train.py", *argv], cwd=ROOT, text=True,
                              env=dict(environment, RANK=str(rank)), stdout=subprocess.DEVNULL,
                              stderr=subprocess.PIPE) for rank in range(2)]
    deadline = time.time() + 60
    while not os.path.exists(os.path.join(out, "ckpt.pt")) and time.time() < deadline:
        time.sleep(0.1)
    ranks[1].kill()
    message = ranks[0].communicate(timeout=60)[1]
    ranks[1].communicate()
    assert ranks[0].returncode not in (0, None)
    assert "another process of this run is gone or silent" in message and "--resume" in message
    assert load_checkpoint(os.path.join(out, "ckpt.pt"))["step"] >= 2


def test_another_configuration_is_not_resumed(corpus, tmp_path):
    out = str(tmp_path)
    run(TINY + [f"--data={corpus}", f"--out_dir={out}"])
    with pytest.raises(ModelError, match="another d_state"):
        run(TINY + [f"--data={corpus}", f"--out_dir={out}", "--resume", "--d_state=16"])


@pytest.mark.parametrize("argv, message", [
    (["--batch_size=4", "--micro_batch_size=3"], "does not divide"), (["--vocab_size=300"], "--vocab_size=258"),
    (["--warmup_iters=4"], r"warmup_iters must be below max_iters \(4\), but is 4; add --warmup_iters=0"),
    (["--dtype=bf16"], "one of auto, float32, bfloat16"),
    (["--batch_size=0"], "batch_size must be at least 1, but is 0"), (["--grad_clip=-1"], "at least 0"),
    (["--learning_rate=0"], "above 0"), (["--beta1=1"], "below 1"), (["--seed=-1"], "at least 0"),
    (["--log_interval=0"], "at least 1"), (["--out_dir="], "name a folder")])
def test_settings_that_contradict_each_other_are_refused(corpus, tmp_path, argv, message):
    with pytest.raises(ConfigError, match=message):
        run(TINY + [f"--data={corpus}", f"--out_dir={tmp_path}", *argv])


def test_a_refused_setting_leaves_the_log_as_it_was_and_a_torn_line_is_dropped(corpus, tmp_path):
    out = str(tmp_path / "out")
    argv = TINY + [f"--data={corpus}", f"--out_dir={out}"]
    run(argv + ["--max_iters=5", "--log_interval=3"])
    before = read_log(out)
    ms = [r["ms"] for r in before if "ms" in r]
    assert [r["step"] for r in before if "ms" in r] == [3, 5] and ms[1] > ms[0] / 20
    with pytest.raises(ConfigError, match=r"warmup_iters must be below max_iters \(5\), but is 9"):
        run(argv + ["--max_iters=5", "--warmup_iters=9"])
    assert read_log(out) == before
    with open(os.path.join(out, "log.jsonl"), "a") as f:
        f.write('[1]\n{"step": 5, "lo')                 # no line of ours, and killed while writing
    run(argv + ["--max_iters=6", "--log_interval=3", "--resume"])
    assert read_log(out)[:len(before)] == before and read_log(out)[-1]["step"] == 6


def test_resuming_with_other_settings_says_so_and_an_absent_device_is_a_sentence(corpus, tmp_path, capsys):
    argv = TINY + [f"--data={corpus}", f"--out_dir={tmp_path}/out"]
    run(argv)
    run(argv + ["--resume", "--seed=2", "--max_iters=5"])
    assert "resuming with another seed, max_iters" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="no device 'cuda'"):
        if torch.cuda.is_available():
            pytest.skip("this machine has CUDA")
        run(argv + ["--device=cuda", "--resume"])


def test_a_run_is_neither_overwritten_nor_trained_twice_at_once(corpus, tmp_path, capsys):
    import fcntl
    out = str(tmp_path / "out")
    argv = TINY + [f"--data={corpus}", f"--out_dir={out}"]
    run(argv)
    before = [open(f"{out}/{name}", "rb").read() for name in ("ckpt.pt", "log.jsonl")]
    with pytest.raises(ConfigError, match="ckpt.pt holds a run; add --resume"):
        run(argv)
    with open(f"{out}/log.jsonl") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process is training in"):
            run(argv + ["--resume", "--max_iters=9"])
    assert before == [open(f"{out}/{name}", "rb").read() for name in ("ckpt.pt", "log.jsonl")]
    log = read_log(out)
    run(argv + ["--resume"])
    assert read_log(out) == log
    assert "ckpt.pt is at step 4 of 4 already; raise --max_iters" in capsys.readouterr().out


def test_damage_to_a_checkpoint_is_found(corpus, tmp_path):
    argv = TINY + [f"--data={corpus}", f"--out_dir={tmp_path}"]
    run(argv)
    path = tmp_path / "ckpt.pt"
    whole = path.read_bytes()
    middle = len(whole) // 2
    path.write_bytes(whole[:middle] + bytes(255 - b for b in whole[middle:middle + 50]) + whole[middle + 50:])
    with pytest.raises(UserError, match="damaged"):
        run(argv + ["--resume", "--max_iters=5"])
    record = torch.load(BytesIO(whole), weights_only=True)
    del record["optimizer"]
    torch.save(record, path)
    with pytest.raises(UserError, match="record has no optimizer"):
        run(argv + ["--resume", "--max_iters=5"])


def test_a_line_of_the_log_that_cannot_be_written_does_not_end_training(tmp_path, capsys, monkeypatch):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full on this system")
    log = Log(str(tmp_path / "log.jsonl"), 0, True)
    log.write(dict(step=1))
    log.files.append(open("/dev/full", "w"))
    log.write(dict(step=2))
    assert "a line of" in capsys.readouterr().err and (tmp_path / "log.jsonl").read_text() == '{"step": 1}\n'


def test_learning_rate_transfer_gives_the_papers_figures():
    assert f"{transfer_lr(4e-3, 896 / 448, 18 / 12, 64 / 32, 17.65 / 5.000):.2e}" == "1.23e-03"
    assert f"{transfer_lr(8e-3, 832 / 448, 18 / 12, 64 / 32, 17.65 / 5.000):.2e}" == "2.65e-03"


def test_the_schedule_warms_up_then_falls_to_the_floor():
    rates = [learning_rate_at(i, 1.0, 1e-6, 10, 100) for i in range(101)]
    assert rates[0] == 0.1 and rates[9] == rates[10] == 1.0 and rates[100] == pytest.approx(1e-6)
    assert all(a > b for a, b in zip(rates[10:], rates[11:]))


def test_scripts_answer_bad_input_with_one_sentence_and_a_non_zero_exit(corpus, tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    run(TINY + [f"--data={corpus}", f"--out_dir={tmp_path}/out"])
    cases = [("train.py", ["--learning_rat=1"], "did you mean learning_rate"),
             ("train.py", [f"--out_dir={tmp_path}/new", "--seq_len=100"], "whole blocks"),
             ("train.py", [f"--out_dir={tmp_path}/new", f"--data={tmp_path}/none"], "none"),
             ("sample.py", [f"--out_dir={tmp_path}/none"], "make one with python train.py"),
             ("sample.py", [f"--out_dir={tmp_path}/out", f"--prompt_file={tmp_path}/latin.txt"], "not UTF-8"),
             ("sample.py", [f"--out_dir={tmp_path}/out", "--length=262144", "--prompt=a"], "rotary capacity")]
    running = [(subprocess.Popen([sys.executable, script, *argv], cwd=ROOT, stdout=subprocess.PIPE,
                                 stderr=subprocess.PIPE, text=True), message) for script, argv, message in cases]
    for process, message in running:
        out, err = process.communicate(timeout=120)
        assert process.returncode not in (0, None) and "Traceback" not in err, err
        assert message in err.splitlines()[-1], err


def test_a_short_run_needs_no_other_setting_and_a_warm_up_that_was_set_is_kept(corpus, tmp_path):
    tiny = [word for word in TINY if not word.startswith("--warmup")] + [f"--data={corpus}"]
    for steps, warmup in ((4, 0), (20, 2)):
        run(tiny + [f"--max_iters={steps}", f"--out_dir={tmp_path / str(steps)}"])
        assert load_checkpoint(f"{tmp_path}/{steps}/ckpt.pt")["settings"]["warmup_iters"] == warmup
    with pytest.raises(ConfigError, match=r"warmup_iters must be below max_iters \(4\), but is 30"):
        run(tiny + ["--max_iters=4", "--warmup_iters=30", f"--out_dir={tmp_path / 'x'}"])


def test_eval_only_prints_the_validation_and_writes_nothing(corpus, tmp_path, capsys):
    out, tiny = tmp_path / "out", TINY + [f"--data={corpus}"]
    run(tiny + [f"--out_dir={out}"])
    logged = read_log(out)[-1]["val_loss"]
    before = {name: os.stat(out / name).st_mtime_ns for name in os.listdir(out)}
    for more, loss in (([f"--out_dir={out}", "--resume"], logged), ([f"--out_dir={tmp_path / 'none'}"], None)):
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            run(tiny + [*more, "--eval_only"])
        printed = capsys.readouterr().out
        assert ended.value.code == 0 and "step" not in printed.splitlines()[-1] and "validation" in printed
        assert loss is None or f"validation {loss:.4f} nats" in printed
    assert before == {name: os.stat(out / name).st_mtime_ns for name in os.listdir(out)}
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("missing", ["matplotlib", "tqdm"])
def test_a_run_ends_well_without_matplotlib_and_without_tqdm(corpus, tmp_path, missing):
    code = f"import sys, runpy; sys.modules['{missing}'] = None; sys.argv[0] = 'train.py'; runpy.run_path('train.py', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code, *TINY, f"--data={corpus}", f"--out_dir={tmp_path}/out"],
                          cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ("loss.png, which needs matplotlib: pip install matplotlib" in done.stdout) == (missing == "matplotlib")


def test_the_laptop_config_is_the_default_and_the_others_start_from_smaller_weights():
    default = settings_of(vars(load("train", [])))
    assert settings_of(vars(load("train", ["config/laptop.py"]))) == default
    for path in glob.glob(os.path.join(ROOT, "config", "*.py")):
        settings = vars(load("train", [path]))
        assert path.endswith("laptop.py") or settings["init_std"] == settings["embed_std"] == 0.02
    config = ModelConfig(**{name: default[name] for name in ModelConfig.__dataclass_fields__ if name in default})
    model = BlockDiffusionLM(config, default["init_std"], default["embed_std"])
    assert [round(float(x.weight.detach().std()), 2) for x in (model.embed, model.layers[0].mixer.qkv)] == [1.0, 0.1]


def test_from_elsewhere_a_config_is_found_in_the_repository(corpus, tmp_path):
    done = subprocess.run([sys.executable, os.path.join(ROOT, "train.py"), "config/laptop.py", *TINY,
                           f"--data={corpus}", "--out_dir=here"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "here" / "ckpt.pt").is_file()


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="needs /proc")
def test_where_nothing_can_be_written_the_error_names_the_flag(corpus):
    """In a folder that takes no files, not even of root."""
    for argv, advice in (([], "add --data=FOLDER"), ([f"--data={corpus}"], "choose another --out_dir")):
        done = subprocess.run([sys.executable, os.path.join(ROOT, "train.py"), *TINY, *argv], cwd="/proc",
                              capture_output=True, text=True)
        assert done.returncode == 1 and "cannot be written" in done.stderr and done.stderr.endswith(f"{advice}\n")


@pytest.mark.parametrize("block_len", [8, 4, 32])
def test_a_run_begins_with_the_weights_of_another_block_length(corpus, tmp_path, capsys, block_len):
    """And its first validation is what eval.py finds for these weights at that block length."""
    first, second, tiny = tmp_path / "a", tmp_path / "b", TINY + [f"--data={corpus}"]
    run(tiny + [f"--out_dir={first}"])
    weights, found = load_checkpoint(first / "ckpt.pt"), []
    config = ModelConfig(**{**weights["config"], "block_len": block_len})
    model = BlockDiffusionLM(config)
    model.load_state_dict(weights["model"])
    save_checkpoint(tmp_path / "ckpt.pt", model, tokenizer="bytes")
    load("eval", [f"--checkpoint={tmp_path}", f"--data={corpus}", "--sequences=4", "--mc=2", "--device=cpu",
                  f"--out={tmp_path}/eval.json"]).main()
    nelbo = json.loads((tmp_path / "eval.json").read_text())["results"][0]["text"][corpus]["nelbo"]

    def patch(module):                                  # more digits of the validation than are printed
        counting = module.nelbo_counts
        module.nelbo_counts = lambda *args, **kwargs: found.append(counting(*args, **kwargs)) or found[-1]
    begun = [f"--out_dir={second}", f"--init_from={first}", f"--block_len={block_len}", "--eval_samples=2"]
    for more in (["--eval_only"], []):
        capsys.readouterr()
        with pytest.raises(SystemExit) if more else contextlib.nullcontext():
            run(tiny + begun + more, patch=patch)
        assert f" 0/4 validation {nelbo:.4f} nats" in capsys.readouterr().out
    assert found[0][..., 0].sum() / (4 * 2 * 32) == pytest.approx(nelbo, abs=1e-5)
    assert found[1].tolist() == found[0].tolist()
    record = load_checkpoint(second / "ckpt.pt", "optimizer")
    assert record["step"] == record["optimizer"]["step"] == 4 and record["config"]["block_len"] == block_len


def test_weights_of_another_shape_are_refused_by_name(corpus, tmp_path):
    run(TINY + [f"--data={corpus}", f"--out_dir={tmp_path}/a"])
    for change, message in (("--d_model=64", "adaln.bias is 64 there and 128 here"),
                            ("--n_layer=3", "is missing there"), ("--n_layer=1", "missing here")):
        with pytest.raises(ModelError, match=message):
            run(TINY + [f"--data={corpus}", f"--out_dir={tmp_path}/b", f"--init_from={tmp_path}/a", change])
