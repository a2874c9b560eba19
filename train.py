"""
Trains any of the four models: one loop for a laptop, one GPU or several (data parallel, see parallel.py). The loss is
BlockDiffusionLM.loss: all blocks at once, each masked token weighted by 1/t.

    python train.py                                                     # laptop, minutes, real text
    torchrun --nproc_per_node=8 train.py config/mamba_h_87m.py          # one node

Data order and noise are functions of (seed, step, row of the global batch). So a run that is resumed, or continues with
another number of GPUs or another micro-batch size, stays the same run up to the order of summation.
"""
import contextlib
import functools
import glob
import json
import math
import os
import signal
import sys
import time

import torch

from checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from configurator import UserError, check, configure, mute, script, settings_of, tqdm
from data import VOCABULARY, TokenData, bits_per_byte, byte_baselines, noise_generators, prepare_stdlib
from files import lock, misfit, write_file, writing
from model import BlockDiffusionLM, ModelConfig, train_flops
from nelbo import nelbo_sums
from parallel import (Parallel, ShardedAdamW, ampere_or_later, compile_layers, is_lost_rank, matmul_ceiling,
                      micro_batches_of, pick_dtype, select_kernels)

# ----------------------------------------------------------------------------------------------
# Settings: the defaults train a small BDLM Mamba-H on bytes in minutes, on two cores.
out_dir = "out"                         # where the checkpoint, the log and its picture go
resume = False                          # continue from out_dir/ckpt.pt
init_from = ""                          # begin with the weights of this checkpoint; ignored with --resume
# data
data = "data/stdlib"                    # a folder made by data.py; this one is made if it is missing
tokenizer = "bytes"                     # bytes or gpt2
# model (see ModelConfig)
seq_len = 256                           # tokens of a training sequence
block_len = 16                          # tokens of a diffusion block; seq_len for a full-sequence model
attn_every = 2                          # attention at layers 0, attn_every, ...; 1: attention only
n_layer = 3                             # layers
n_head = 4                              # attention heads
d_model = 64                            # width
d_state = 32                            # Mamba-2 state size
mamba_head_dim = 64                     # width of a Mamba-2 head
time_conditioning = False               # modulate noisy tokens by their block's noise level
reverse_scan = True                     # an ablation if false: Mamba layers scan forward alone
detach_prefix = False                   # an ablation if true: block losses do not train the prefix
init_std = 0.1                          # of initial weights; the wide models of config/ take 0.02
embed_std = 1.0                         # of the initial embedding
# optimisation
batch_size = 2                          # sequences per step, over all devices; on a CPU a small batch learns faster
micro_batch_size = 0                    # sequences a device holds at a time; 0: all of its share
max_iters = 3500                        # training steps
learning_rate = 2e-3                    # peak, after the warm-up
min_lr = 1e-6                           # at the end of the cosine
warmup_iters = -1                       # steps of linear warm-up; -1: 200, but at most max_iters / 10
beta1 = 0.9                             # AdamW
beta2 = 0.95                            # AdamW
weight_decay = 0.1                      # AdamW, only on matrices
grad_clip = 1.0                         # largest norm of the gradient; 0: no clipping
seed = 1337                             # of data order, initialisation and noise
# evaluation, logging, saving
eval_only = False                       # validate the model of --resume or --init_from and exit; write nothing
eval_interval = 1000                    # steps between validations, each with a checkpoint
eval_sequences = 64                     # validation sequences, spread evenly over the split; 0: all
eval_samples = 2                        # noise samples per validation sequence
log_interval = 100                      # steps between lines of the log
# system
device = "auto"                         # auto, cpu, cuda or mps
dtype = "auto"                          # auto: bfloat16 if the GPU has it, else float32
kernels = "auto"                        # auto; torch: the plain operations; mamba_ssm: those of that package
compile = True                          # torch.compile the layers; on Ampere GPUs and later only
dist_timeout = 300                      # seconds after which a collective that a rank has not joined ends the job; more
                                        # than it takes to write a checkpoint
# ----------------------------------------------------------------------------------------------


# ----------------------------------------------------------------------------------------------
# Small pieces

def learning_rate_at(step, peak, floor, warmup, total):
    """Linear warm-up to `peak`, then cosine to `floor` at step `total`."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(total - warmup, 1)
    return floor + 0.5 * (peak - floor) * (1 + math.cos(math.pi * min(done, 1)))


def plot_log(path, png):
    """Draws training and validation loss (nats per token) from log.jsonl."""
    from matplotlib.figure import Figure
    rows = log_rows(path).values()                          # a loss that was not finite is None
    train = [(r["step"], r["loss"]) for r in rows if r.get("loss")]
    val = [(r["step"], r["val_loss"]) for r in rows if r.get("val_loss")]
    fig = Figure(figsize=(7, 4), layout="constrained")
    ax = fig.subplots()
    ax.plot(*zip(*train), color="0.6", lw=1, label="training, mean since the last point")
    if val:
        ax.plot(*zip(*val), color="tab:blue", marker="o", ms=4, label="validation")
    ax.set(xlabel="step", ylabel="NELBO, nats per token", title=os.path.dirname(path))
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False)
    fig.savefig(png, dpi=120)


def log_rows(path):
    """{line: row} of a log.jsonl, in order. Lines that are no rows of a log, or were cut off, are left out."""
    number = (float, type(None))
    rows, form = {}, {"step": range(1, 2 ** 62), "?loss": number, "?val_loss": number, "?tok_per_s": int}
    with open(path, errors="replace") as f:
        for line in f:
            with contextlib.suppress(ValueError, RecursionError):
                row = json.loads(line)
                if line.endswith("\n") and not misfit(row, form):
                    rows[line] = row
    return rows


def finite(x, digits):
    """x, rounded; None, as JSON knows no NaN, if it is not finite."""
    return round(x, digits) if math.isfinite(x) else None


def load_weights(model, record):
    """Copies the weights of another run's checkpoint into the model. No parameter depends on the block length, so a
    full-sequence model can become a block model, and long blocks short ones. Raises UserError for the first
    parameter that is missing on one side or has another shape, and for settings that change what the model computes but
    no shape; with eval_only, block_len is one of them."""
    weights, mine = record["model"], model.state_dict()
    for name in sorted({*mine, *weights}):
        here, there = ("missing" if name not in table else "x".join(map(str, table[name].shape))
                       for table in (mine, weights))
        if here != there:
            raise UserError(f"init_from: {name} is {there} in that checkpoint and {here} in this run; use the "
                            f"attn_every, n_layer, d_model and other shapes of that checkpoint")
    there, here = vars(ModelConfig(**record["config"])), vars(model.config)
    for name in ("n_head", "time_conditioning", "reverse_scan", *(["block_len"] if eval_only else [])):
        if there[name] != here[name]:
            raise UserError(f"init_from: {name} is {there[name]} in that checkpoint and {here[name]} in this run; "
                            f"add --{name}={there[name]}")
    model.load_state_dict(weights)


class Log:
    """out_dir/log.jsonl, one object per line. A resumed run drops the lines after its checkpoint. The file is locked
    while the run lasts: a second run in the same folder is refused (UserError). `validated` holds the steps whose
    validation is logged. enabled: False on ranks that write nothing."""

    def __init__(self, path, step, enabled):
        self.path, self.validated = path, set()
        self.files = []                                     # all locked; the last one is written
        if not enabled:
            return
        self.open_locked()
        for left in glob.glob(os.path.join(glob.escape(os.path.dirname(path)), "ckpt.pt.*.tmp")):
            os.remove(left)                                 # a run was killed while it saved
        rows = {line: row for line, row in log_rows(path).items() if row["step"] <= step}
        if sum(map(len, rows)) != os.path.getsize(path):
            write_file(path, "".join(rows), "choose another out_dir")
            self.open_locked()
        self.validated = {row["step"] for row in rows.values() if "val_loss" in row}

    def open_locked(self):
        """Opens and locks the file. write_file puts a new file in its place, which is locked as well. The old one stays
        locked, because another process may have opened it."""
        self.files.append(open(self.path, "a"))
        lock(self.files[-1], f"another process is training in {os.path.dirname(self.path)}; wait for it, or choose "
                             f"another out_dir")

    def close(self):
        """Closes and unlocks the file."""
        while self.files:
            with contextlib.suppress(OSError):              # closing writes once more what did not fit on the disk
                self.files.pop().close()

    def write(self, row):
        if self.files:
            try:
                self.files[-1].write(json.dumps(row) + "\n")
                self.files[-1].flush()
            except OSError as error:
                print(f"train.py: a line of {self.path} cannot be written: {error.strerror}", file=sys.stderr)


# ----------------------------------------------------------------------------------------------
# The script

def check_settings():
    """Raises UserError, before any file is opened, for settings that cannot work. Derives warmup_iters."""
    global warmup_iters
    check(globals(), least=dict(
        batch_size=1, micro_batch_size=0, seq_len=1, max_iters=1, warmup_iters=-1, min_lr=0, weight_decay=0,
        grad_clip=0, beta1=0, beta2=0, seed=0, eval_interval=1, eval_sequences=0, eval_samples=1,
        log_interval=1, dist_timeout=1, init_std=0, embed_std=0),
        most=dict(batch_size=2 ** 20), above=dict(learning_rate=0), below=dict(beta1=1, beta2=1, seed=2 ** 32),
        choices=dict(dtype=("auto", "float32", "bfloat16"), tokenizer=VOCABULARY))
    check(globals(), most=dict(min_lr=learning_rate))
    if warmup_iters < 0:
        warmup_iters = min(200, max_iters // 10)
    if warmup_iters >= max_iters:
        raise UserError(f"warmup_iters must be below max_iters ({max_iters}), but is {warmup_iters}; "
                        f"add --warmup_iters=0")
    if eval_only and not (resume or init_from):
        raise UserError("eval_only validates a trained model; add --resume or --init_from=CHECKPOINT")
    if not out_dir:
        raise UserError("out_dir is empty; name a folder for checkpoints and the log")
    for name, what in (("ckpt.pt", "add --resume to continue it"), ("log.jsonl", "move it away")):
        path = os.path.join(out_dir, name)
        if not (resume or eval_only) and os.path.exists(path) and os.path.getsize(path):
            raise UserError(f"{path} holds a run; {what}, or choose another --out_dir")


def open_data(parallel, say):
    """The TokenData of both splits. The default corpus, the standard library of this Python, is prepared on first use.
    A collective."""
    if data == "data/stdlib" and not os.path.exists(os.path.join(data, "meta.json")) and parallel.rank == 0:
        say("preparing data/stdlib from this Python's own source files")
        prepare_stdlib(data, advice="run python data.py stdlib --out=FOLDER, and add --data=FOLDER")
    parallel.barrier()                                      # the others wait while rank 0 prepares data
    return [TokenData(data, split, tokenizer) for split in ("train", "val")]


def continue_run(path, model, optimizer, settings, text_sha256, say):
    """Loads the checkpoint of an earlier run of the same model. text_sha256: of the training text. Returns its
    number of steps, the losses since the last line of the log (part of the mean in the next line), and the number of
    skipped steps."""
    record = load_checkpoint(path, "optimizer", "settings", "step")
    config, saved = vars(model.config), vars(ModelConfig(**record["config"]))  # a newer field has its default there
    if saved != config:
        changed = [f"tokenizer={record.get('tokenizer')}" if k == "vocab_size" else f"{k}={v}"
                   for k, v in saved.items() if v != config[k]]
        raise UserError(f"{path} was trained with {', '.join(changed)}; add its config file or these settings, or "
                        f"begin another run with its weights by --init_from={path} --out_dir=FOLDER")
    if record["settings"].get("data") == data and record.get("text") not in (None, text_sha256) and not eval_only:
        raise UserError(f"{data} holds another training text than when {path} was saved; prepare the former again, or "
                        f"begin another run with its weights by --init_from={path} --out_dir=FOLDER")
    watched = ("seed batch_size max_iters learning_rate warmup_iters min_lr weight_decay beta1 beta2 grad_clip "
               "eval_sequences eval_samples dtype")
    if text_sha256 is None or record.get("text") != text_sha256:               # else the same text, wherever it is
        watched += " data"
    changed = [k for k in watched.split() if record["settings"].get(k) != settings[k]]
    if changed and not eval_only:
        say(f"resuming with another {', '.join(changed)}; the result will not be that of an uninterrupted run")
    model.load_state_dict(record["model"])
    optimizer.load_state_dict(record["optimizer"])
    if record["step"] >= max_iters and not eval_only:
        say(f"{path} is at step {record['step']} of {max_iters} already; raise --max_iters to train on")
    return record["step"], record.get("losses", []), record.get("skipped", 0)


def last_checkpoint():
    """What a message says about the checkpoint in out_dir."""
    path = os.path.join(out_dir, "ckpt.pt")
    if os.path.exists(path):
        return f"{path} is the last good checkpoint, continue with the same command and --resume"
    return "there is no checkpoint yet"


def catch_signals(received):
    """From now on SIGTERM, SIGINT and SIGHUP no longer end the process: they are appended to the list `received`. A
    second Ctrl-C ends it."""
    def on_signal(number, frame):
        if received and number == signal.SIGINT:            # at once, without saving
            raise KeyboardInterrupt
        received.append(number)
    for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(sig) != signal.SIG_IGN:         # nohup ignores SIGHUP
            signal.signal(sig, on_signal)


def add_gradients(model, train_data, step, micro_batches, autocast):
    """Adds the gradients of this rank's rows of a step's batch to p.grad. Returns their share of the batch's loss, a
    tensor on the device: reading it here would wait for the device."""
    loss = 0.0
    for rows in micro_batches:
        # Data and noise are functions of (seed, step, row of the global batch), whichever rank runs the row.
        x0 = train_data.batch(seed, step, rows, batch_size, seq_len)           # (rows, s)
        x0 = x0.to(model.embed.weight.device, non_blocking=True)
        generators = noise_generators(seed, [step * batch_size + row for row in rows])
        # The loss is weighted by the rows' share of the batch: so micro-batches and ranks add up to its mean.
        with autocast():
            part = model(x0, generators) * (len(rows) / batch_size)
        part.backward()
        loss = loss + part.detach()
    return loss


def main():
    check_settings()
    settings = settings_of(globals())
    parallel = Parallel(device, dist_timeout)
    master, dev = parallel.rank == 0, parallel.device
    signals = []                                            # that this process has received
    kernels_line = select_kernels(kernels, dev)

    def say(*words):
        """Prints on rank 0."""
        try:
            if master:
                print(*words, flush=True)
        except OSError as error:                            # a full disk does not end a training
            mute()
            if isinstance(error, BrokenPipeError):          # a closed pipe does, after saving
                signals.append(signal.SIGPIPE)

    # 1. Data.
    shape = {f: settings[f] for f in ModelConfig.__dataclass_fields__ if f in settings}
    config = ModelConfig(vocab_size=VOCABULARY[tokenizer], **shape)
    train_data, val_data = open_data(parallel, say)
    text_sha256 = train_data.meta["splits"]["train"].get("sha256")
    val = val_data.sequences(seq_len, eval_sequences)       # (n, s)
    n_bytes = int(val_data.sequence_bytes(seq_len, eval_sequences).sum())     # fails here if GPT-2's files are missing

    # 2. Model and optimizer.
    torch.manual_seed(seed)
    model = BlockDiffusionLM(config, init_std, embed_std).to(dev)
    if init_from and not resume:                            # before ShardedAdamW, which copies the weights
        load_weights(model, load_checkpoint(find_checkpoint(init_from)))
    micro_batches = micro_batches_of(parallel.rank, parallel.world, batch_size, micro_batch_size)
    optimizer = ShardedAdamW(model, (beta1, beta2), weight_decay, parallel.rank, parallel.world)
    path, step, losses, skipped = os.path.join(out_dir, "ckpt.pt"), 0, [], 0
    bad_steps = 0                                           # how many steps in a row, up to now, were not finite
    if resume:
        step, losses, skipped = continue_run(path, model, optimizer, settings, text_sha256, say)
    elif master and not eval_only:
        with writing(out_dir, "choose another --out_dir"):
            os.makedirs(out_dir, exist_ok=True)
    log = Log(os.path.join(out_dir, "log.jsonl"), step, master and not eval_only)

    # 3. Precision, compilation, kernels.
    use_bf16 = pick_dtype(dtype, dev) == torch.bfloat16
    autocast = functools.partial(torch.autocast, dev.type, torch.bfloat16, enabled=use_bf16)
    if compile and ampere_or_later(dev):
        compile_layers(model)
    say(f"{config.n_layer} layers, width {config.d_model}, {model.n_params:,} parameters | "
        f"{parallel.world} x {dev} {'bf16' if use_bf16 else 'fp32'} | {kernels_line}")
    say(f"{train_data.n_tokens:,} training tokens | {batch_size} x {seq_len} tokens a step, "
        f"micro-batches: {len(micro_batches)} | {max_iters * batch_size * seq_len:,} tokens in all")

    def validate():
        """The validation loss in nats per token after `step` steps. Logs it once for each step."""
        sums = nelbo_sums(model.eval(), val, parallel, autocast, seed, eval_samples,
                          batch_size=len(micro_batches[0]), terse=True)
        model.train()
        loss = parallel.sum([sums[..., 0].sum()])[0] / (eval_samples * val.numel())
        if step not in log.validated:
            if step:
                log.write(dict(step=step, val_loss=finite(loss, 5)))
            say(f"{step:>6}/{max_iters} validation {loss:.4f} nats per token")
        return loss

    def save():
        """Writes ckpt.pt and returns "", or keeps the file before and returns why."""
        if bad_steps or not all(p.isfinite().all() for p in model.parameters()):       # the same on all ranks
            return "it or a weight is not finite; lower learning_rate"
        state = optimizer.state_dict()                      # a collective
        try:
            if master:
                save_checkpoint(path, model, step=step, optimizer=state, tokenizer=tokenizer, settings=settings,
                                losses=losses, skipped=skipped, text=text_sha256)
        except UserError as error:                          # a full disk; the next checkpoint may find room
            return str(error).partition(";")[0]
        return ""

    def end():
        """Closes what is open. If a signal stopped the run, it ends the process with status 128 + its number."""
        log.close()
        parallel.close()
        if signals:
            sys.exit(128 + signals[0])

    if eval_only:
        validate()
        return end()

    # 4. The loop.
    flops = train_flops(config, seq_len) * batch_size / parallel.world          # of a step, for each GPU
    ceiling = matmul_ceiling(dev) if ampere_or_later(dev) else None
    if ceiling:
        torch.cuda.reset_peak_memory_stats()                # of the measurement: the log reports the training's
        say(f"{flops / 1e12:.1f} TFLOP a step and GPU; MFU is relative to a measured {ceiling / 1e12:.0f} TFLOP/s")
    catch_signals(signals)
    started, train_s = time.time(), 0.0                     # train_s: seconds in steps since the last line of the log
    first_step = logged_step = step
    while True:
        # Also before the first step: a run may start from other weights (init_from), or have ended after it saved and
        # before it validated. If it had validated, it does so again, and the log keeps one line.
        if (step or init_from) and (step % eval_interval == 0 or step >= max_iters):
            val_loss = validate()
        if step >= max_iters:
            break
        step_started = time.time()
        lr = learning_rate_at(step, learning_rate, min_lr, warmup_iters, max_iters)
        optimizer.zero_grad()
        loss = add_gradients(model, train_data, step, micro_batches, autocast)
        norm = optimizer.reduce_gradients()                 # of the gradients, summed over ranks
        loss, stopping = parallel.sum([float(loss), len(signals)])      # a signal may reach one rank only
        norm = float(norm)
        if math.isfinite(loss) and math.isfinite(norm):     # the same on all ranks: both are sums over ranks
            optimizer.step(lr, min(1.0, grad_clip / (norm + 1e-6)) if grad_clip else 1.0)
            bad_steps = 0
            losses.append(loss)
        else:
            bad_steps, skipped = bad_steps + 1, skipped + 1
            say(f"step {step}: loss {loss}, gradient norm {norm}: step skipped ({bad_steps} in a row)")
            if bad_steps == 3:
                raise UserError(f"three steps in a row were not finite; lower learning_rate; {last_checkpoint()}")
        step += 1
        train_s += time.time() - step_started

        if step % log_interval == 0 or step == max_iters:
            ms = 1000 * train_s / (step - logged_step)
            mean = sum(losses) / len(losses) if losses else math.nan
            row = dict(step=step, loss=finite(mean, 5), lr=lr, grad_norm=finite(norm, 4), ms=round(ms, 2),
                       tok_per_s=round(1000 * batch_size * seq_len / ms), skipped=skipped,
                       memory=torch.cuda.max_memory_allocated())               # 0 without a GPU
            eta = ms / 1000 * (max_iters - step)
            speed = f"{row['tok_per_s']:,} tok/s"
            if ceiling:
                row["mfu"] = round(1000 * flops / ms / ceiling, 4)
                speed += f" | MFU {100 * row['mfu']:.1f} % | {row['memory'] / 2**30:.1f} GiB"
            say(f"{step:>6}/{max_iters} {'#' * int(20 * step / max_iters):<20} loss {mean:.4f} | "
                f"lr {lr:.2e} | grad {norm:.2f} | {ms:.0f} ms | {speed} | ETA {tqdm.format_interval(eta)}")
            log.write(row)
            train_s, logged_step, losses = 0.0, step, []
        if step == first_step + 1:                          # the speed in the log leaves out the first step
            if ceiling:
                say(f"the first step, in which kernels are compiled, took {time.time() - started:.0f} s")
            train_s, logged_step = 0.0, step
        # Save before validating: a validation may take long, and a second Ctrl-C during it then loses nothing.
        if (stopping or step % eval_interval == 0 or step == max_iters) and (why := save()):
            message = f"step {step} is not saved: {why}; {last_checkpoint()}"
            if step == max_iters:
                raise UserError(message)
            say(message)
        if stopping:
            say(f"stopped at step {step}; {last_checkpoint()}")
            return end()

    # 5. The result: bits per byte beside what simple statistics of the text reach, and the picture.
    bpb = bits_per_byte(val_loss, val.numel(), n_bytes)
    say(f"trained in {tqdm.format_interval(time.time() - started)}; validation NELBO {val_loss:.4f} nats per token, "
        f"perplexity {math.exp(min(val_loss, 700)):.2f}, {bpb:.3f} bits per byte")
    if master and tokenizer == "bytes":
        # Counts from at most the first 20M bytes, which takes 0.5 GB of memory.
        base = byte_baselines(train_data.sequences(min(train_data.n_tokens, 2 * 10 ** 7), 1), val)
        say(f"baselines on the same text: byte bigram {base['bigram']:.3f}, "
            f"byte unigram {base['unigram']:.3f} bits per byte")
    if master and os.path.exists(log.path):
        png = os.path.join(out_dir, "loss.png")
        try:
            plot_log(log.path, png)
        except ImportError:
            png = "no loss.png, which needs matplotlib: pip install matplotlib"
        say(f"wrote {path}, {log.path}, {png}")
    end()


if __name__ == "__main__":
    try:
        with script("train.py"):
            configure(globals())
            main()
    except RuntimeError as error:
        if not is_lost_rank(error):
            raise
        print(f"train.py: another process of this run is gone or silent, or the network between them fails "
              f"({' '.join(str(error).split())}); {last_checkpoint()}", file=sys.stderr, flush=True)
        os._exit(1)                     # a normal exit would wait for collectives that never end
