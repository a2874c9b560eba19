"""What the tests share: small models, a small corpus, a small training run, and scripts that run in this process."""
import contextlib
import importlib.util
import io
import json
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

# Idle OpenMP threads sleep: spinning, they take the cores from whatever else the machine runs.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "1")           # these models are too small for more

import pytest
import torch

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))
torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"                # Triton reads it when kernels are defined: before all imports

from checkpoint import load_checkpoint, save_checkpoint  # noqa: E402
from configurator import configure  # noqa: E402
from data import prepare_stdlib  # noqa: E402
from decoders import Sampler, sampler_of  # noqa: E402
from eval import price  # noqa: E402
from model import BlockDiffusionLM, ModelConfig  # noqa: E402
from parallel import ROOT, has_fast  # noqa: E402
from sample import generate, open_engine  # noqa: E402

# The four architectures, small: (attn_every, block_len) for sequences of 32 tokens.
ARCHITECTURES = {"attention": (1, 32), "diffumamba_h": (2, 32), "bdlm_attention": (1, 8), "mamba_h": (2, 8)}
BLOCK_MODELS = [name for name in ARCHITECTURES if ARCHITECTURES[name][1] < 32]
all_models = pytest.mark.parametrize("name", ARCHITECTURES)
block_models = pytest.mark.parametrize("name", BLOCK_MODELS)
both_times = pytest.mark.parametrize("time_conditioning", [False, True])
with_harness = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs lm_eval==0.4.13")
NO_FAST = "needs the folder fast/"
ENGINES = ["simple", pytest.param("fused", marks=pytest.mark.skipif(not has_fast(), reason=NO_FAST))]

# A training that takes a quarter of a second: four steps of a hybrid of two layers.
TINY = ["--seq_len=32", "--block_len=8", "--d_model=32", "--n_head=2", "--n_layer=2", "--attn_every=2",
        "--d_state=8", "--mamba_head_dim=16", "--batch_size=4", "--warmup_iters=1", "--max_iters=4",
        "--log_interval=1", "--eval_interval=2", "--eval_sequences=4", "--device=cpu", "--learning_rate=1e-2"]
NOISE = ["--t_min=0.3", "--t_max=0.7", "--stratified", "--short_len=16", "--short_iters=6"]
EIGHT_STEPS = [*TINY, *NOISE, "--max_iters=8", "--log_interval=3", "--eval_interval=4"]     # the settings of `trained`
SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2


def need_fast():
    """Skips a module whose subject is in fast/, where that folder has been removed."""
    if not has_fast():
        pytest.skip(NO_FAST, allow_module_level=True)


def make_model(name, dtype=torch.float64, seed=0, noise=0.2, **changes):
    """A random model with every parameter perturbed, so that no zero initialisation hides a path."""
    attn_every, block_len = ARCHITECTURES[name]
    settings = dict(vocab_size=23, seq_len=32, block_len=block_len, attn_every=attn_every, n_layer=4,
                    n_head=2, d_model=16, d_state=8, mamba_head_dim=8, chunk_len=4)
    torch.manual_seed(seed)
    model = BlockDiffusionLM(ModelConfig(**{**settings, **changes})).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(noise * torch.randn_like(p))
    return model


def small_model():
    """A model whose texts can be enumerated: two tokens, two blocks of 4."""
    return make_model("mamba_h", torch.float32, seed=16, vocab_size=3, seq_len=8, block_len=4, n_layer=2, n_head=1,
                      d_model=4, d_state=2, mamba_expand=1, mamba_head_dim=4, conv_width=2)


def price_of(model, x0, decoder):
    """eval.price of texts x0 (b, s): nats and passes a block."""
    k, _ = model.config.split_blocks(x0.size(1))
    sampler = sampler_of(decoder, seeds=[0] * (k * len(x0)), mask_id=model.config.mask_id)
    return price(model, x0, sampler, SimpleNamespace(update=id))


def relative_error(got, want):
    """The norm of the difference of two tensors, over that of the second."""
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    return float((got - want).norm() / want.norm())


def make_batch(model, batch=3, seq_len=32, seed=1):
    """Clean tokens, noised tokens and noise levels: (b, s), (b, s), (b, k)."""
    g = torch.Generator().manual_seed(seed)
    x0 = torch.randint(0, model.config.mask_id, (batch, seq_len), generator=g)
    t, is_masked = model.draw_noise(x0, g)
    return x0, x0.masked_fill(is_masked, model.config.mask_id), t.double()


def make_sampler(model, rows=1, seed=5, **changes):
    """A Sampler for rows with the seeds seed, seed + 1, ..."""
    seeds = [seed + i for i in range(rows)]
    return Sampler(seeds, mask_id=model.config.mask_id, **dict(decoder="random", tokens_per_step=3) | changes)


def prompts_of(*lengths, seed=2):
    """Random prompts of these lengths, for models of `make_model`."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 22, (n,), generator=g) for n in lengths]


def generate_by(engine, model, *request, **rest):
    """sample.generate by an engine, in the dtype of the model's weights."""
    model, new_engine = open_engine(engine, model, model.embed.weight.dtype)
    return generate(model, *request, new_engine=new_engine, **rest)


@pytest.fixture(autouse=True)
def _seeded(monkeypatch):
    """Each test starts from the same seed, and leaves a GPU's memory to other processes. Nothing waits for the disk:
    small files would take most of the time."""
    torch.manual_seed(0)
    monkeypatch.setattr(os, "fsync", lambda file: None)
    yield
    torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A prepared text of 60 small source files."""
    source = tmp_path_factory.mktemp("source")
    for i in range(60):
        (source / f"module_{i}.py").write_text(f"def f{i}(x):\n    return x + {i}\n" * (5 + i % 7))
    out = tmp_path_factory.mktemp("data") / "c4"
    prepare_stdlib(str(out), root=str(source))
    return str(out)


@pytest.fixture
def tiny(corpus, tmp_path):
    """The flags of a tiny training, in the folder tmp_path."""
    return [*TINY, f"--data={corpus}", f"--out_dir={tmp_path}"]


@pytest.fixture(scope="session")
def trained(corpus, tmp_path_factory):
    """The folder of a finished run of eight steps."""
    out = str(tmp_path_factory.mktemp("trained"))
    run_train(EIGHT_STEPS + [f"--data={corpus}", f"--out_dir={out}"])
    return out


@pytest.fixture
def saved(tmp_path):
    """A folder with a checkpoint of a model of bytes, and the model."""
    model = make_model("mamba_h", torch.float32, vocab_size=258)
    save_checkpoint(str(tmp_path / "out" / "ckpt.pt"), model, step=7, tokenizer="bytes",
                    settings=dict(data="data/x", learning_rate=1e-3, out_dir="/home/somebody"))
    return str(tmp_path / "out"), model


@pytest.fixture
def checkpoints(tmp_path, corpus):
    """Checkpoints of a block model and a full-sequence model of bytes."""
    paths = []
    for name in ("mamba_h", "attention"):
        model = make_model(name, torch.float32, vocab_size=258)
        paths.append(str(tmp_path / name / "ckpt.pt"))
        save_checkpoint(paths[-1], model, step=0, tokenizer="bytes", settings=dict(learning_rate=4e-3, data=corpus))
    return paths


# ----------------------------------------------------------------------------------------------
# Scripts

def module_of(name):
    """The script train, eval, ... as a module with globals of its own."""
    spec = importlib.util.spec_from_file_location(f"{name}_under_test", ROOT / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def signals_put_back():
    handlers = [signal.getsignal(s) for s in SIGNALS]
    signal.signal(signal.SIGINT, signal.default_int_handler)        # a background shell ignores it, and nohup the next
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        yield
    finally:
        for s, handler in zip(SIGNALS, handlers):
            signal.signal(s, handler)


def run_train(argv, patch=lambda module: None):
    """train.py's main in this process, after `patch` has changed the module."""
    module = module_of("train")
    given = configure(vars(module), argv)
    patch(module)
    with signals_put_back():
        module.main(given)
    return module


def state_of(folder):
    """What a run comes to: its step, weights and moments."""
    record = load_checkpoint(os.path.join(folder, "ckpt.pt"))
    return {key: record[key] for key in ("step", "model", "optimizer")}


def script(name, *argv):
    """`python name argv` in this process and with new globals, like `%run` in a notebook. Returns (exit status, what
    it printed to stdout, to stderr)."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    sys.modules.pop("bench", None)                      # compare_ops.py takes its settings from this module
    with (mock.patch.object(sys, "argv", [name, *map(str, argv)]), signals_put_back(),
          contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)):
        try:
            runpy.run_path(str(ROOT / name), run_name="__main__")
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
            err.write(stop.code if isinstance(stop.code, str) else "")
    return status, out.getvalue(), err.getvalue()


def eval_record(*argv):
    """What eval.py prints in its last line."""
    status, printed, error = script("eval.py", "--device=cpu", *argv)
    assert status == 0, error
    return json.loads(printed.splitlines()[-1])


# Processes are forked from a server that has already imported what takes seconds: AdamW imports torch._dynamo.
FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(["torch._dynamo", "matplotlib.figure", "tiktoken"])


def child_main(argv, environment, paths):
    os.environ.update(environment)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)        # nohup ignores it, and children inherit that
    for path, descriptor in zip(paths, (1, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    sys.stdout, sys.stderr = open(1, "w", buffering=1, closefd=False), open(2, "w", buffering=1, closefd=False)
    sys.argv = [str(arg) for arg in argv]
    runpy.run_path(str(ROOT / argv[0]), run_name="__main__")


class Child:
    """`python argv...`, a script in a process of its own. It prints to two files in `folder`."""

    def __init__(self, folder, *argv, **environment):
        name = os.path.join(folder, str(time.monotonic_ns()))
        self.start(argv, environment, [f"{name}.out", f"{name}.err"])

    def start(self, argv, environment, paths):
        self.paths = paths
        for path in paths:
            Path(path).touch()
        self.process = FORKING.Process(target=child_main, args=(argv, environment, paths))
        self.process.start()

    def printed(self):
        """What it has printed so far, to stdout and to stderr."""
        return [Path(path).read_text() for path in self.paths]

    def end(self, signal_number=None):
        """Sends a signal, if one is given, and waits. Returns the exit status, and what it printed to the two files."""
        if signal_number is not None:
            os.kill(self.process.pid, signal_number)
        self.process.join(100)
        ended = self.process.exitcode is not None
        self.process.kill()                             # otherwise pytest would wait for it
        assert ended, "it does not end"
        return self.process.exitcode, *self.printed()


def free_port():
    with socket.create_server(("localhost", 0)) as free:
        return free.getsockname()[1]


def start_ranks(folder, world, *argv, last=()):
    """The processes of one run, two on each node, with the variables that torchrun gives them. last: more arguments of
    the last one."""
    port = free_port()
    return [Child(folder, *argv, *(last if rank == world - 1 else ()), RANK=str(rank), WORLD_SIZE=str(world),
                  LOCAL_RANK=str(rank % 2), MASTER_ADDR="localhost", MASTER_PORT=str(port)) for rank in range(world)]
