"""Ordinary mistakes in a command: each ends in one sentence that says what to do, and changes no file."""
import sys

import pytest
import torch

from checkpoint import save_checkpoint
from conftest import make_model, script, with_harness
from model import BlockDiffusionLM
from parallel import has_fast

# The commands run in a folder with these files, those of `here` and a checkpoint in out/.
HERE = {"README.md": b"mine", "a.csv": b"x", "a.txt": b"text", "empty.jsonl": b"\n", "a.jsonl": b'{"text": "a"}\n',
        "latin": b"caf\xe9", "empty.json": b'{"bench": "sample", "rows": []}', "list.json": b"[1]"}
without_fast = pytest.mark.skipif(has_fast(), reason="needs a checkout without the folder fast/")
COMMANDS = [
    # with the settings of a tiny training
    ("train.py --data=none", "none holds no prepared text: run python data.py"),
    ("train.py --seq_len=100", "seq_len is 100, but must be a multiple of block_len = 8"),
    ("train.py --mamba_head_dim=48", "mamba_expand * d_model is 64, but must be a multiple of mamba_head_dim = 48"),
    ("train.py --seq_len=0", "seq_len must be at least 1, but is 0"),
    ("train.py --block_len=0", "block_len must be above 0 and finite, but is 0"),
    ("train.py --batch_size=4 --micro_batch_size=3", "must divide the 4 sequences"),
    ("train.py --warmup_iters=4", "warmup_iters must be at most 3, but is 4"), ("train.py --weight_decay=-1", "at least 0"),
    ("train.py --beta1=1", "beta1 must be at most 0.999999, but is 1"), ("train.py --beta2=1", "at most 0.999999"),
    ("train.py --init_std=-1", "at least 0"), ("train.py --embed_std=-1", "at least 0"),
    ("train.py --kernels=triton", "kernels must be one of auto, torch, mamba_ssm, but is 'triton'"),
    ("train.py --min_lr=1", "min_lr must be at most"), ("train.py --learning_rate=0", "above 0"),
    *((f"train.py --device={name}", "device must be one of auto, cpu") for name in ("cuda:99", "gpu")),
    ("train.py --out_dir={trained} --resume --d_state=16",
     "was trained with d_state=8; add its config file or these settings"),
    ("train.py --init_from={trained} --n_head=1 --reverse_scan=false", "with n_head=2, reverse_scan=True; add"),
    # with a prompt
    ("sample.py --checkpoint=none", "no checkpoint can be read from none (FileNotFoundError"),
    ("sample.py --checkpoint=v.pt", "v.pt has 23 token ids, not those of its tokenizer, bytes"),
    ("sample.py --checkpoint=fork.pt", "has the setting mixer, which this revision does not know; use the revision or the fo"),
    *((f"{command}fork.pt", "has the setting mixer") for command in ("eval.py --checkpoint=", "train.py --init_from=")),
    ("checkpoint.py export fork.pt --to=x", "has the setting mixer"),
    ("sample.py --out_dir=out", "did you mean checkpoint?"), ("sample.py --start=a", "did you mean prompt?"),
    ("sample.py --max_new_tokens 9", "did you mean length?"), ("train.py --block_size=8", "did you mean seq_len?"),
    ("sample.py --engine=graphs --save_cache=a.cache", "a GPU"),
    pytest.param("sample.py --engine=fused", "engine=fused needs fast/", marks=without_fast),
    ("sample.py --prompt_file=a.txt", "prompt and prompt_file are both given; leave one out"),
    ("sample.py --length=0", "length must be at least 1"), ("sample.py --seed=1e20", "seed must be at most"),
    ("sample.py --num_samples=0", "num_samples must be at least 1"), ("train.py --seed=1e20", "seed must be at most"),
    ("sample.py --prompt= --prompt_file=nope", "nope"), ("sample.py --prompt=caf\udce9", "surrogates not allowed"),
    ("sample.py --prompt= --prompt_file=latin", "latin is not UTF-8 (byte 3"),
    ("sample.py --save_cache=ckpt.pt", "save_cache must be a .cache file of its own, but is 'ckpt.pt'"),
    *((f"eval.py --out={name}.json", "a .json file of its own") for name in ("config", "a/meta")),
    ("eval.py --checkpoint=", "checkpoints must be at least 1, but is 0"),
    ("sample.py --checkpoint=full.pt --load_cache=a.cache", "no cache to save or load"),
    ("sample.py --load_cache=nope.cache", "no saved prompt can be read from nope.cache"),
    ("eval.py --checkpoint=hf://owner/name", "huggingface_hub halted; None in sys.modules; requirements.txt says"),
    ("eval.py --checkpoint=out --tasks=piqa", "lm_eval halted; None in sys.modules; requirements.txt says"),
    pytest.param("eval.py --checkpoint=out --tasks=piqaa", "the harness has no task 'piqaa'", marks=with_harness),
    ("eval.py --checkpoint=out --data={data} --decoders=random:x", "write name:number, as in random:4"),
    ("eval.py --checkpoint=out --data={data} --decoders=4", "decoder '4': decoder must be one of random, "),
    ("eval.py --checkpoint=out --data={data} --decoders=first_hitting:4", "its only number is 1"),
    ("checkpoint.py", "write python checkpoint.py export out/ --to=folder, not nothing"),
    ("checkpoint.py export out", "to is empty"), ("checkpoint.py export out --to=out/ckpt.pt", "ckpt.pt"),
    ("checkpoint.py export out --to=.", "holds README.md already, which would be lost"),
    ("data.py jsonl missing.jsonl --out new", "missing.jsonl is not a file"),
    ("data.py text a.txt --tokenizer bytes --split_on=--- --out new", "--split_on '---' occurs nowhere"),
    ("data.py jsonl a.csv --out new", "endings"), ("data.py jsonl --out new", "name some"),
    ("data.py text a.txt --val ./a.txt --tokenizer bytes --out new", "a file is named twice, perhaps as text to train"),
    ("data.py jsonl empty.jsonl --tokenizer bytes --out new", "0 documents were found, none for the"),
    ("data.py dclm --local .", "python data.py dclm --tokens 5e9"),
    ("data.py c4 --local . --out new", "no file that matches"), ("data.py jsonl a.jsonl --tokens=9", "takes no"),
    *((f"data.py dclm --tokens={value}", "must be ") for value in ("0", "0.5", "nan", "inf")),
    *((f"data.py jsonl a.jsonl --out=new --val_fraction={value}", "must be ") for value in ("-1", "nan", "1")),
    ("bench.py trian", "subcommand must be one of train, sample, but is 'trian'"),
    ("bench.py train --only=laptop,nope", "config nope cannot be run (FileNotFoundError"),
    ("bench.py train --only=config/sweep/bytes.py", "bytes.py sets nothing of a model; name a config file of train.py"),
    ("bench.py train --out=x.pt", "out must be a .json file"),
    ("bench.py sample --lengths=many", "whole numbers from 1 to 262144, not 'many'"),
    ("tools/compare_ops.py --only=adamw,nope", "only must be one of mixer, "),
    *((f"tools/throughput.py {name}", "the files hold no generation") for name in ("empty.json", "list.json")),
    ("tools/sweep.py --draw=empty.json", "empty.json has no runs"),
    ("tools/unmasking.py --seed=1e20", "seed must be at most"),
    ("tools/quality.py", "nothing to compare"),
    ("tools/profile_step.py --config=laptop", "did you mean configs?"),
    *((f"tools/prices.py --files={name}", f"nothing to draw in --files={name};") for name in ("", "empty.json", "list.json")),
    ("tools/sweep.py --runs=[]", "there are no runs"), ("tools/sweep.py --runs_per_gpu=0", "at least 1"),
    ("tools/sweep.py --runs=laptop --eval_settings=decoders=random:1", "leave decoders out"),
    ("tools/sweep.py --runs=laptop --eval_settings=mcc=1", "eval_settings: there is no setting 'mcc'"),
    ("tools/sweep.py --runs=laptop --train_settings=sed=1", "there is no setting 'sed'; did you mean seed"),
    ("tools/sweep.py --runs=laptop --eval_settings=data=nowhere", "nowhere holds no prepared text")]


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """The files, {name: content}. full.pt: a full-sequence model; v.pt: of another vocabulary; fork.pt: of a fork."""
    folder = tmp_path_factory.mktemp("here")
    save_checkpoint(folder / "full.pt", make_model("attention", torch.float32, vocab_size=258), tokenizer="bytes", step=0)
    save_checkpoint(folder / "v.pt", make_model("attention"), tokenizer="bytes", step=0)
    record = torch.load(folder / "full.pt")
    record["config"]["mixer"] = "retention"
    torch.save(record, folder / "fork.pt")
    return HERE | {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("command, message", COMMANDS)
def test_a_mistake_is_one_sentence_and_changes_no_file(here, saved, corpus, trained, tiny, tmp_path, monkeypatch,
                                                       command, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(BlockDiffusionLM, "prefill", lambda *_, **__: pytest.fail("the prompt was read"))
    if "halted" in message:
        monkeypatch.setitem(sys.modules, message.split()[0], None)             # as if it were not installed
    for name, content in here.items():
        (tmp_path / name).write_bytes(content)

    def files():
        """All but empty ones: a lock may be left."""
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size}
    before, (path, *flags) = files(), command.format(data=corpus, trained=trained).split()
    usual = {"train.py": tiny, "sample.py": ["--device=cpu", "--prompt=some text"]}
    status, printed, error = script(path, *usual.get(path, []), *flags)
    last, name = error.splitlines()[-1], path.removeprefix("tools/")
    assert status in (1, 2) and last.startswith(f"{name}: ") and message in last and "Traceback" not in error
    assert files() == before and (name != "sample.py" or printed == "")
    assert " ms" not in printed and " %" not in printed, "it has measured something"
