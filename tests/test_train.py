"""Training: resume, ranks, weights of another run, steps that are not finite. Tiny models on a tiny text."""
import contextlib
import glob
import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import ops
from checkpoint import load_checkpoint, save_checkpoint
from configurator import ConfigError, configure, settings_of
from conftest import (ROOT, TINY, Child, free_port, make_model, module_of, read_log, run_train as run, script,
                      start_ranks)
from data import TokenData
from model import BlockDiffusionLM, ModelConfig, ModelError
from paper import transfer_lr
from parallel import Parallel, ShardedAdamW, ampere, pick_dtype, select_kernels
from train import learning_rate_at


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


def test_every_row_of_every_step_has_noise_of_its_own(corpus, tmp_path):
    keys = []
    def patch(module):
        make = module.noise_generators
        module.noise_generators = lambda seed, ids: keys.extend(ids) or make(seed, ids)
    run(TINY + [f"--data={corpus}", f"--out_dir={tmp_path}", "--micro_batch_size=2"], patch=patch)
    assert keys == list(range(4 * 4))                   # four steps of four rows


def test_accumulation_does_not_change_the_run(corpus, tmp_path):
    losses = []
    for micro in (4, 1):
        out = str(tmp_path / str(micro))
        run(TINY + [f"--data={corpus}", f"--out_dir={out}", f"--micro_batch_size={micro}"])
        losses.append([r["loss"] for r in read_log(out) if "loss" in r])
    np.testing.assert_allclose(*losses, rtol=2e-5)


def torchrun(folder, *argv):
    """Two processes, as by the README's command."""
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2",
                           "--master_addr=localhost", f"--master_port={free_port()}", *argv], cwd=ROOT, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, timeout=150)
    assert done.returncode == 0, done.stderr


def two_nodes_of_two(folder, *argv):
    """Four processes, with the variables that torchrun gives them on two nodes."""
    for process in start_ranks(folder, 4, *argv, per_node=2):
        status, _, errors = process.end()
        assert status == 0, errors


@pytest.mark.parametrize("start", [torchrun, two_nodes_of_two])
def test_processes_on_one_or_two_nodes_train_the_same_model_as_one(corpus, tmp_path, start):
    """What they trained resumes on one."""
    one, many = str(tmp_path / "one"), str(tmp_path / "many")
    tiny = TINY + [f"--data={corpus}", "--max_iters=5", "--eval_interval=5"]
    run(tiny + [f"--out_dir={one}"])
    start(tmp_path, "train.py", *tiny, f"--out_dir={many}")
    a, b = load_checkpoint(f"{one}/ckpt.pt"), load_checkpoint(f"{many}/ckpt.pt")
    for name in a["model"]:
        torch.testing.assert_close(a["model"][name], b["model"][name], rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(a["optimizer"][name]["exp_avg"], b["optimizer"][name]["exp_avg"],
                                   rtol=1e-3, atol=1e-6)
    losses = [[r.get("loss") or r["val_loss"] for r in read_log(d)] for d in (one, many)]
    np.testing.assert_allclose(*losses, rtol=1e-4)
    run(tiny + [f"--out_dir={many}", "--max_iters=6", "--resume"])
    assert load_checkpoint(f"{many}/ckpt.pt")["step"] == 6


def test_sharded_adamw_is_adamw_with_clipped_gradients():
    ours, plain = make_model("mamba_h"), make_model("mamba_h")
    sharded = ShardedAdamW(ours, 1e-2, (0.9, 0.95), 0.1)
    adamw = torch.optim.AdamW(plain.param_groups(0.1), lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    x0 = torch.randint(0, 22, (2, 32))
    for step in range(4):
        for model in (ours, plain):
            model(x0, torch.Generator().manual_seed(step)).backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        torch.testing.assert_close(sharded.reduce(), norm)
        assert norm > 1, "or nothing is clipped"
        sharded.clip_and_step(1e-2)
        adamw.step()
        for optimizer in (sharded, adamw):
            optimizer.zero_grad()
    for a, b in zip(ours.parameters(), plain.parameters()):
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=str)
def test_told_to_end_it_saves_and_says_how_to_go_on(corpus, tmp_path, number):
    out = str(tmp_path / "out")
    process = Child(tmp_path, "train.py", *TINY, f"--data={corpus}", f"--out_dir={out}", "--max_iters=100000",
                    "--eval_interval=100000")
    process.wait_for("loss")
    status, printed, _ = process.end(number)
    assert status == 128 + number and "go on with --resume" in printed
    step = load_checkpoint(f"{out}/ckpt.pt")["step"]
    assert step >= 1 and read_log(out)[-1]["step"] == step


def test_a_lost_process_ends_the_others_with_a_sentence(corpus, tmp_path):
    out = str(tmp_path / "lost")
    first, second = start_ranks(tmp_path, 2, "train.py", *TINY, f"--data={corpus}", f"--out_dir={out}",
                                "--max_iters=100000", "--dist_timeout=20")
    deadline = time.monotonic() + 60
    while not os.path.exists(os.path.join(out, "ckpt.pt")) and time.monotonic() < deadline:
        time.sleep(0.05)
    second.end(signal.SIGKILL)
    status, _, message = first.end()
    assert status == 1
    assert "another process of this run is gone or silent" in message and "--resume" in message
    assert load_checkpoint(os.path.join(out, "ckpt.pt"))["step"] >= 2


def test_learning_rate_transfer_gives_the_papers_figures():
    assert f"{transfer_lr(4e-3, 896 / 448, 18 / 12, 64 / 32, 17.65 / 5.000):.2e}" == "1.23e-03"
    assert f"{transfer_lr(8e-3, 832 / 448, 18 / 12, 64 / 32, 17.65 / 5.000):.2e}" == "2.65e-03"


def test_the_schedule_warms_up_then_falls_to_the_floor():
    rates = [learning_rate_at(i, 1.0, 1e-6, 10, 100) for i in range(101)]
    assert rates[0] == 0.1 and rates[9] == rates[10] == 1.0 and rates[100] == pytest.approx(1e-6)
    assert all(a > b for a, b in zip(rates[10:], rates[11:]))


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


def test_the_laptop_config_is_the_default_and_the_others_start_from_smaller_weights():
    def settings_with(*argv):
        module = module_of("train")
        configure(vars(module), argv)
        return settings_of(vars(module))
    default = settings_with()
    assert settings_with("config/laptop.py") == default
    for path in glob.glob(os.path.join(ROOT, "config", "*.py")):
        settings = settings_with(path)
        assert path.endswith("laptop.py") or settings["init_std"] == settings["embed_std"] == 0.02
    config = ModelConfig(**{name: default[name] for name in ModelConfig.__dataclass_fields__ if name in default})
    model = BlockDiffusionLM(config, default["init_std"], default["embed_std"])
    assert [round(float(x.weight.detach().std()), 2) for x in (model.embed, model.layers[0].mixer.qkv)] == [1.0, 0.1]


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
    script("eval.py", f"--checkpoint={tmp_path}", f"--data={corpus}", "--sequences=4", "--mc=2", "--device=cpu",
           f"--out={tmp_path}/eval.json")
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
