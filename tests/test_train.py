"""Training: exact resume, any number of processes, AdamW, weights of another block length. Tiny models and texts."""
import os
import shutil

import numpy as np
import pytest
import torch

from checkpoint import load_checkpoint
from configurator import UserError, lock
from conftest import EIGHT_STEPS, NOISE, make_model, module_of, run_train as run, start_ranks, state_of
from data import TokenData
from model import BlockDiffusionLM, ModelConfig
from paper import transfer_lr
from parallel import ShardedAdamW
from test_eval import sums_of
from tools.loss import read_log


@pytest.fixture
def draws(monkeypatch):
    """A list that gets (x0, t, is_masked) of every draw of noise in training."""
    found, draw = [], BlockDiffusionLM.draw_noise

    def recorded(model, x0, *rest, **how):
        t, is_masked = draw(model, x0, *rest, **how)
        found.extend([(x0, t, is_masked)] * model.training)
        return t, is_masked
    monkeypatch.setattr(BlockDiffusionLM, "draw_noise", recorded)
    return found


def test_every_row_has_noise_and_data_of_its_own_and_every_step_its_learning_rate_and_clipping(
        tiny, tmp_path, monkeypatch, draws):
    made, step = [], ShardedAdamW.step
    monkeypatch.setattr(ShardedAdamW, "step", lambda self, lr, scale: made.append((lr, scale)) or step(self, lr, scale))
    train = run([*tiny, "--micro_batch_size=2", "--grad_clip=1.5"])
    noise = {(*a.tolist(), *b.tolist()) for _, t, is_masked in draws for a, b in zip(t, is_masked)}
    rows = {tuple(row.tolist()) for x0, *_ in draws for row in x0}
    assert len(noise) == len(rows) == 4 * 4             # four steps of four rows
    rates, scales = zip(*made)
    assert list(rates) == [train.learning_rate_at(i) for i in range(4)]
    norms = [row["grad_norm"] for row in read_log(tmp_path / "log.jsonl") if "loss" in row]
    assert scales == pytest.approx([min(1, 1.5 / norm) for norm in norms], rel=1e-3)
    assert min(scales) < 0.9 and max(scales) == 1, "some steps are clipped"


def test_a_run_by_the_default_settings_logs_and_says_what_is_written_down_here(corpus, tmp_path, capsys):
    run([f"--data={corpus}", f"--out_dir={tmp_path}", "--device=cpu", "--max_iters=3", "--log_interval=3"])
    row, last = read_log(tmp_path / "log.jsonl")
    assert [row["loss"], row["grad_norm"], last["val_loss"]] == pytest.approx([5.24272, 2.2667, 4.86301], abs=1e-4)
    assert row["tok_per_s"] * row["ms"] == pytest.approx(2 * 256 * 1000, rel=1e-3)
    # 768 tokens are 765 bytes.
    assert "perplexity 129.41, 7.043 bits per byte, on 768 tokens\nbaseline, same text: byte bigrams 2.328" in (
        capsys.readouterr().out)


@pytest.mark.parametrize("block_len", [8, 32])
def test_noise_in_strata_of_a_range_and_short_sequences_first(corpus, tmp_path, draws, block_len):
    run([*EIGHT_STEPS, f"--data={corpus}", f"--out_dir={tmp_path}", f"--block_len={block_len}"])
    assert [x0.shape for x0, *_ in draws] == [(8, 16)] * 6 + [(4, 32)] * 2
    for _, t, _ in draws:                               # one level in each of equal parts of 0.3..0.7
        part = (t.flatten() - 0.3) / 0.4 * t.numel()
        assert sorted(part.long().tolist()) == list(range(t.numel()))
    assert len({t.argmin().item() for _, t, _ in draws[:6]}) > 1, "the order of the parts is random"


@pytest.mark.parametrize("noise", [[], NOISE])
def test_accumulation_does_not_change_the_run(tiny, tmp_path, noise):
    losses = []
    for micro in (4, 1):
        run([*tiny, *noise, f"--out_dir={tmp_path}/{micro}", f"--micro_batch_size={micro}"])
        losses.append([r["loss"] for r in read_log(tmp_path / str(micro) / "log.jsonl") if "loss" in r])
    np.testing.assert_allclose(*losses, rtol=2e-5)


@pytest.mark.parametrize("world", [2, 4])
def test_processes_on_one_or_two_nodes_of_two_train_the_same_model_as_one(tiny, trained, tmp_path, world):
    """From new weights or given ones, which are validated first. And their checkpoint resumes on one process."""
    one, many = str(tmp_path / "one"), str(tmp_path / "many")
    tiny += [*NOISE, "--max_iters=5", "--eval_interval=5", "--short_iters=3", *[f"--init_from={trained}"] * (world == 2)]
    run([*tiny, f"--out_dir={one}"])
    for process in start_ranks(tmp_path, world, "train.py", *tiny, f"--out_dir={many}"):
        status, _, errors = process.end()
        assert status == 0, errors
    a, b = state_of(one), state_of(many)
    torch.testing.assert_close(a["model"], b["model"], rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(a["optimizer"], b["optimizer"], rtol=1e-3, atol=1e-6)
    losses = [[r.get("loss") or r["val_loss"] for r in read_log(f"{d}/log.jsonl")] for d in (one, many)]
    np.testing.assert_allclose(*losses, rtol=1e-4)
    run([*tiny, f"--out_dir={many}", "--max_iters=6", "--resume"])
    assert state_of(many)["step"] == 6


@pytest.mark.parametrize("device", ["cpu", "cuda"][:1 + torch.cuda.is_available()])
def test_our_adamw_is_torchs_with_clipped_gradients_and_weight_decay_of_matrices_alone(device):
    ours, plain = make_model("mamba_h").to(device), make_model("mamba_h").to(device)
    sharded = ShardedAdamW(ours, (0.9, 0.95), 0.1)
    def decay_of(name):
        return 0 if "norm" in name or name.endswith(("bias", "A_log", ".D")) else 0.1
    adamw = torch.optim.AdamW([dict(params=p, weight_decay=decay_of(name)) for name, p in plain.named_parameters()],
                              lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    x0 = torch.randint(0, 22, (2, 32)).to(device)
    for step in range(4):
        for model in (ours, plain):
            model(x0, torch.Generator().manual_seed(step)).backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        found = sharded.reduce_gradients()
        torch.testing.assert_close(found, norm)
        assert norm > 1, "nothing would be clipped"
        sharded.step(1e-2, 1 / (found + 1e-6))
        adamw.step()
        for optimizer in (sharded, adamw):
            optimizer.zero_grad()
    torch.testing.assert_close([*ours.parameters()], [*plain.parameters()])


def test_learning_rate_transfer_gives_the_papers_figures():
    assert f"{transfer_lr(4e-3, 896 / 448, 18 / 12, 64 / 32, 17.65 / 5.000):.2e}" == "1.23e-03"
    assert f"{transfer_lr(8e-3, 832 / 448, 18 / 12, 64 / 32, 17.65 / 5.000):.2e}" == "2.65e-03"


@pytest.mark.parametrize("warmup_iters", [10, -1])
def test_the_schedule_warms_up_then_falls_to_the_floor(warmup_iters):
    train = module_of("train")
    vars(train).update(learning_rate=1.0, min_lr=1e-6, warmup_iters=warmup_iters, max_iters=100)
    rates = [train.learning_rate_at(i) for i in range(101)]
    assert rates[0] == 0.1 and rates[9] == rates[10] == 1.0 and rates[100] == pytest.approx(1e-6)
    assert all(a > b for a, b in zip(rates[10:], rates[11:]))


@pytest.mark.parametrize("block_len", [8, 4, 32])
def test_a_run_begins_with_the_weights_of_another_block_length(corpus, trained, tiny, tmp_path, capsys, block_len):
    """Its first validation, before any step, is the bound of these weights at that block length."""
    weights = load_checkpoint(f"{trained}/ckpt.pt")
    model = BlockDiffusionLM(ModelConfig(**{**weights["config"], "block_len": block_len})).eval()
    model.load_state_dict(weights["model"])
    x0 = TokenData(corpus, "val", "bytes").sequences(32, 4)
    sums = sums_of(model, x0, seed=1337, mc=2)          # (4, 2, 3)
    run([*tiny, f"--init_from={trained}", f"--block_len={block_len}", "--eval_samples=2"])
    assert f" 0/4 validation {sums[..., 0].sum() / (2 * x0.numel()):.4f}\n" in capsys.readouterr().out
    record = load_checkpoint(tmp_path / "ckpt.pt", "optimizer")
    assert record["step"] == record["optimizer"]["step"] == 4 and record["config"]["block_len"] == block_len


def test_a_run_that_was_killed_resumes_exactly_and_keeps_the_weights_of_the_lowest_validation(
        tiny, trained, tmp_path, capsys):
    """It ends as `trained`, which ran the same eight steps at once."""
    argv = [*tiny, *NOISE, "--max_iters=8"]
    losses, seen = iter([3.0, 2.0, 2.5, 2.5, 2.0]), []

    def patch(module):
        def stop_in_step_seven(step, rate=module.learning_rate_at):
            if step == 6 and len(seen) == 3:
                raise KeyboardInterrupt
            return rate(step)

        def scored(model, x, *rest, **more):            # as a model that does not improve after step 4
            seen.append({name: p.clone() for name, p in model.state_dict().items()})
            return np.full((len(x), 2, 3), next(losses) * x.size(1))
        module.nelbo_sums, module.learning_rate_at = scored, stop_in_step_seven
    with pytest.raises(KeyboardInterrupt):
        run(argv, patch)
    assert state_of(tmp_path)["step"] == 6
    run([*argv, "--resume"], patch)                     # it validates step 6 again, then step 8
    torch.testing.assert_close(state_of(tmp_path), state_of(trained), rtol=0, atol=0)
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1].startswith("validation was lowest at step 4 (2.0000 nats per token)")
    best = load_checkpoint(tmp_path / "best.pt")
    torch.testing.assert_close(best["model"], seen[1], rtol=0, atol=0)
    assert best["step"] == 4 and "optimizer" not in best
    run([*tiny, f"--out_dir={tmp_path}/more", f"--init_from={tmp_path}/best.pt"])


@pytest.fixture
def copied(trained, tmp_path):
    """The folder `out` with a copy of `trained`."""
    return shutil.copytree(trained, tmp_path / "out")


def change_checkpoint(path, **settings):
    record = torch.load(path)
    record["settings"].update(settings)
    torch.save(record, path)


def test_resume_takes_its_settings_from_the_checkpoint_and_the_command_line_wins(copied, tmp_path, capsys):
    """The checkpoint is of another revision, folder and machine, one with 8 GPUs."""
    change_checkpoint(copied / "ckpt.pt", eval_only=False, out_dir="elsewhere", init_from="a.pt", device="cuda:99",
                      batch_size=24, micro_batch_size=3)
    (tmp_path / "more.py").write_text("max_iters = 9\nlog_interval = 100\nseed = 1337")     # the last two: the defaults
    before, argv = load_checkpoint(copied / "ckpt.pt")["settings"], ["--resume", f"--out_dir={copied}"]
    with pytest.raises(UserError, match="device must be one of auto, cpu.*, but is 'cuda:99'"):
        run(argv)
    run([*argv, str(tmp_path / "more.py"), "--learning_rate=1e-2", "--device=cpu", "--init_from=b.pt"])
    changes = "from step 8 to 9, max_iters: 8 -> 9, log_interval: 3 -> 100, device: cuda:99 -> cpu"
    assert f"{changes}\n" in capsys.readouterr().out
    record, ours = load_checkpoint(copied / "ckpt.pt"), dict(max_iters=9, log_interval=100, device="cpu", resume=True)
    assert record["step"] == 9 and {**before, **record["settings"]} == {**before, **ours, "out_dir": str(copied)}
    change_checkpoint(copied / "ckpt.pt", n_layer="two")
    with pytest.raises(UserError, match="ckpt.pt: n_layer takes a value such as 3, not 'two'"):
        run(argv)


def test_resume_refuses_another_text_and_keeps_the_checkpoint(copied, corpus, tmp_path):
    moved, argv = shutil.copytree(corpus, tmp_path / "moved"), ["--resume", f"--out_dir={copied}"]
    before, text = (copied / "ckpt.pt").read_bytes(), (moved / "val.bin").read_bytes()
    for place in (0, len(text) // 4 * 2):               # as many tokens; then with the same beginning, too
        (moved / "val.bin").write_bytes(text[:place] + b"\1\0" * 64 + text[place + 128:])
        with pytest.raises(UserError, match=f"of another text than {moved}: give --data of its text, or begin with --init"):
            run([*argv, f"--data={moved}"])
    with lock(copied / ".lock", ""), pytest.raises(UserError, match="another training writes to"):
        run([*argv, "--max_iters=9"])
    assert (copied / "ckpt.pt").read_bytes() == before
    (moved / "val.bin").write_bytes(text)
    run([*argv, f"--data={moved}/", "--max_iters=9"])
    assert state_of(copied)["step"] == 9


def test_checkpoints_of_earlier_revisions_resume(copied, corpus, tmp_path):
    """Their record of the text is the beginning of ours or is missing. Then the folder must have the same name."""
    moved, record = shutil.copytree(corpus, tmp_path / "moved"), torch.load(copied / "ckpt.pt")
    argv, elsewhere = ["--resume", f"--out_dir={copied}", "--max_iters=9"], f"--data={moved}"
    torch.save({**record, "text": record["text"][:18]}, copied / "ckpt.pt")
    run([*argv, elsewhere])
    torch.save({key: value for key, value in record.items() if key != "text"}, copied / "ckpt.pt")
    with pytest.raises(UserError, match="is of another text than"):
        run([*argv, elsewhere])
    run(argv)
    assert state_of(copied)["step"] == 9


@pytest.mark.parametrize("more", [[], ["--eval_sequences=2"], ["--seq_len=16"], ["--seed=2"]])
def test_the_record_of_best_is_of_one_validation(copied, capsys, more):
    """Its losses are compared only if the same sequences were scored with the same noise."""
    losses, best = iter([100, 99]), 9 if more else 8    # at steps 8 and 9, worse than all before

    def patch(module):
        module.nelbo_sums = lambda model, x, *rest, **more: np.full((len(x), 2, 3), next(losses) * x.size(1))
    if more:
        with pytest.raises(UserError, match="best.pt was the best at another .*; rename it, so that"):
            run(["--resume", f"--out_dir={copied}", "--max_iters=9", *more], patch)
        os.rename(copied / "best.pt", copied / "before.pt")
    run(["--resume", f"--out_dir={copied}", "--max_iters=9", *more], patch)
    assert load_checkpoint(copied / "best.pt")["step"] == best
    assert f"validation was lowest at step {best} (" in capsys.readouterr().out.splitlines()[-1]
