"""
Trains any of the four models of model.py: attention or a Mamba-2 hybrid, in blocks or full-sequence. One loop for a
laptop, one GPU or several (data parallel, see parallel.py). The loss is BlockDiffusionLM.loss, over all blocks at once.
A token is masked with probability t, the noise level of its block, and each masked token weighs 1/t.

    python train.py                                                     # laptop, minutes, real text
    torchrun --nproc_per_node=8 train.py config/mamba_h_87m.py          # one node

Data order and noise are functions of (seed, step, row of the global batch). So a run that is resumed, or continues with
another number of GPUs or another micro-batch size, stays the same run up to the order of summation.

SIGTERM, SIGINT (Ctrl-C), SIGHUP, SIGUSR1 and SIGUSR2 save a checkpoint and end the run with status 128 + their number.
"""
import functools
import json
import math
import os
import signal
import sys
import time

import torch

from checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from configurator import UserError, check, configure, lock, script, settings_of, tqdm
from data import VOCABULARY, TokenData, bits_per_byte, byte_baselines, prepare_stdlib
from model import BlockDiffusionLM, ModelConfig
from nelbo import NATS, nelbo_sums, noise_generators, strata
from parallel import (Parallel, ShardedAdamW, ampere_or_later, compile_layers, is_lost_rank, micro_batches_of,
                      pick_dtype, select_kernels)

# ----------------------------------------------------------------------------------------------
# Settings: the defaults train a small BDLM Mamba-H on bytes in minutes, on two cores.
out_dir = "out"                         # where the checkpoints, the log and its picture go
resume = False                          # continue from out_dir/ckpt.pt
init_from = ""                          # begin with the weights of this checkpoint; ignored with --resume
# data
data = "data/stdlib"                    # folders made by data.py, a,b for several; this one is made if it is missing
tokenizer = "auto"                      # bytes or gpt2; auto: that of the data
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
# noise and length of the training sequences
t_min = 1e-3                            # training draws the noise level t from t_min..t_max; evaluation from 1e-3..1
t_max = 1.0
stratified = False                      # the blocks of a step share out that range evenly
short_len = 512                         # for the first short_iters steps a sequence is cut into ones of this length
short_iters = 0
# evaluation, logging, saving
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


# What saves a checkpoint and ends a run.
SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2
# Settings that do not change the result of a run. --resume names all others that are not as before.
HARMLESS = {"out_dir", "resume", "init_from", "micro_batch_size", "eval_interval", "log_interval", "init_std",
            "embed_std", "tokenizer", "device", "kernels", "compile", "dist_timeout"}


def learning_rate_at(step, peak, floor, warmup, total):
    """Linear warm-up to `peak`, then cosine to `floor` at step `total`."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(total - warmup, 1)
    return floor + 0.5 * (peak - floor) * (1 + math.cos(math.pi * min(done, 1)))


def finite(x, digits):
    """x, rounded; None, as JSON knows no NaN, if it is not finite."""
    return round(x, digits) if math.isfinite(x) else None


def describe(step, losses, times, lr, norm):
    """The line on the screen and the row of the log after `step` steps. losses (nats per token), times (seconds): of
    the steps since the last row. A step that was skipped has no loss."""
    ms = 1000 * sum(times) / len(times)
    mean = sum(losses) / len(losses) if losses else math.nan
    row = dict(step=step, loss=finite(mean, 5), lr=lr, grad_norm=finite(norm, 4), ms=round(ms, 2),
               tok_per_s=round(1000 * batch_size * seq_len / ms), memory=torch.cuda.max_memory_allocated())
    memory = f"{row['memory'] / 2**30:.1f} GiB | " if row["memory"] else ""    # it is 0 without a GPU
    return (f"{step:>6}/{max_iters} {'#' * int(20 * step / max_iters):<20} loss {mean:.4f} | lr {lr:.2e} | "
            f"grad {norm:.2f} | {ms:.0f} ms | {row['tok_per_s']:,} tok/s | {memory}"
            f"ETA {tqdm.format_interval(ms / 1000 * (max_iters - step))}"), row


# ----------------------------------------------------------------------------------------------
# Pieces of a run

def check_settings():
    """Raises UserError, before any file is opened, for settings that cannot work. Derives warmup_iters."""
    global warmup_iters
    check(globals(), least=dict(batch_size=1, micro_batch_size=0, max_iters=1, min_lr=0, grad_clip=0, seed=0,
                                eval_interval=1, eval_sequences=0, eval_samples=1, log_interval=1, dist_timeout=1,
                                short_len=1, short_iters=0),
          most=dict(min_lr=learning_rate, t_min=t_max, t_max=1), above=dict(learning_rate=0, t_min=0),
          choices=dict(dtype=("auto", "float32", "bfloat16"), tokenizer=("auto", *VOCABULARY)))
    if warmup_iters < 0:
        warmup_iters = min(200, max_iters // 10)
    if short_iters and (seq_len % short_len or block_len < seq_len and short_len % block_len):
        raise UserError(f"short_len must divide seq_len ({seq_len}) into whole blocks, but is {short_len}; add "
                        f"--short_len={block_len}, or --short_iters=0 for none")
    if warmup_iters >= max_iters:
        raise UserError(f"warmup_iters must be below max_iters ({max_iters}), but is {warmup_iters}; "
                        f"add --warmup_iters=0")


def open_folder(parallel):
    """Makes out_dir, except with --resume. Rank 0 locks it. Returns the file that keeps the lock. Raises UserError if
    the folder holds a run that a new one would overwrite, or another process trains in it."""
    if not resume:
        os.makedirs(out_dir, exist_ok=True)
    refusal = f"another process is training in {out_dir}; wait for it, or choose another --out_dir"
    held = lock(os.path.join(out_dir, "log.jsonl"), refusal) if parallel.rank == 0 else open(os.devnull)
    for name in ("ckpt.pt", "best.pt", "log.jsonl"):
        path = os.path.join(out_dir, name)
        if not resume and os.path.exists(path) and os.path.getsize(path):
            raise UserError(f"{path} holds a run; add --resume to continue it, move it away, or choose another out_dir")
    return held


def open_data(parallel, say):
    """The TokenData of both splits. The default corpus, the standard library of this Python, is prepared on first use.
    A collective."""
    if data == "data/stdlib" and not os.path.exists(os.path.join(data, "meta.json")) and parallel.rank == 0:
        say("preparing data/stdlib from this Python's own source files")
        prepare_stdlib(data)
    parallel.barrier()                                      # the others wait while rank 0 prepares data
    return [TokenData(data, split, tokenizer) for split in ("train", "val")]


def load_weights(path, record, model, may_differ=()):
    """Copies the weights of a checkpoint into the model. may_differ: settings of the model that may have other values
    there, because no weight depends on them. Raises UserError, which names the others, if another model was trained."""
    theirs, ours = vars(ModelConfig(**record["config"])), vars(model.config)   # a newer setting has its default there
    changed = [f"tokenizer={record.get('tokenizer')}" if k == "vocab_size" else f"{k}={v}"
               for k, v in theirs.items() if v != ours[k] and k not in may_differ]
    if changed:
        raise UserError(f"{path} was trained with {', '.join(changed)}; add its config file or these settings")
    model.load_state_dict(record["model"])


def continue_run(path, model, optimizer, settings, text, say):
    """Loads the checkpoint of an earlier run of the same model. text: the sha256 of each folder's training text.
    Returns (step, due, lowest): the steps done; whether a validation is due at this step, which may not have been made;
    and (the lowest validation loss up to the save, its step). Raises UserError for another model, or another text in
    the same folder."""
    record = load_checkpoint(path, "optimizer", "settings", "step")
    load_weights(path, record, model)
    optimizer.load_state_dict(record["optimizer"])
    # Earlier checkpoints hold the checksum of one folder (a str), later ones a list like `text`. None is unknown.
    saved, step, saved_text = record["settings"], record["step"], record.get("text")
    same_text = None not in text and text in (saved_text, [saved_text])        # then its folder may have moved
    if saved_text and None not in (*text, *saved_text) and not same_text and saved.get("data") == data:
        raise UserError(f"{data} holds another text than when {path} was saved; prepare the former again, or begin "
                        f"another run with its weights by --init_from={path} --out_dir=FOLDER")
    harmless = HARMLESS | {"data"} if same_text else HARMLESS
    if changed := [k for k, v in settings.items() if saved.get(k, v) != v and k not in harmless]:
        say(f"resuming with another {', '.join(changed)}; the result will not be that of an uninterrupted run")
    due = step % saved.get("eval_interval", 1) == 0 or step == saved.get("max_iters")
    return step, due, record.get("lowest", (math.inf, 0))


def last_checkpoint():
    """What a message says about the checkpoint in out_dir."""
    path = os.path.join(out_dir, "ckpt.pt")
    advice = f"{path} is the last good checkpoint, continue with the same command and --resume"
    return advice if os.path.exists(path) else "there is no checkpoint yet"


def catch_signals(received):
    """From now on these signals are appended to the list `received` and no longer end the process. Ctrl-C ends it at
    once if the list is not empty: after another of these signals, or after `say` could not write."""
    def on_signal(number, frame):
        if received and number == signal.SIGINT:            # at once, without saving
            raise KeyboardInterrupt
        received.append(number)
    for sig in SIGNALS:
        if signal.getsignal(sig) != signal.SIG_IGN:         # nohup ignores SIGHUP
            signal.signal(sig, on_signal)


def end(signals, held):
    """Unlocks out_dir. Ends a process that has received a signal with status 128 + the number of the first one. SIGPIPE
    stands for a stdout or a log that cannot be written."""
    held.close()
    if signal.SIGPIPE in signals:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())         # else Python complains at its exit
        print(f"train.py: stdout or the log in {out_dir} cannot be written; {last_checkpoint()}", file=sys.stderr)
    if signals:
        sys.exit(128 + signals[0])


def add_gradients(model, train_data, step, micro_batches, autocast):
    """Adds the gradients of this rank's rows of a step's batch to p.grad. Returns their share of the batch's loss, a
    tensor on the device: reading it here would wait for the device."""
    loss, s, noise = 0.0, short_len if step < short_iters else seq_len, dict(t_range=(t_min, t_max))
    k, _ = model.config.blocks_of(s)                    # blocks of a sequence
    for rows in micro_batches:
        # Data and noise are functions of (seed, step, row of the global batch), whichever rank runs the row.
        x0 = train_data.batch(seed, step, rows, batch_size, seq_len).view(-1, s)       # a row is seq_len / s sequences
        x0 = x0.to(model.embed.weight.device, non_blocking=True)
        generators = noise_generators(seed, [step * batch_size + row for row in rows])
        generators = [g for g in generators for _ in range(seq_len // s)]
        if stratified:
            stratum, n = strata(seed, step, rows, batch_size, seq_len // s * k)
            noise["stratum"] = stratum.view(-1, k).to(x0.device), n
        # The loss is weighted by the rows' share of the batch: so micro-batches and ranks add up to its mean.
        with autocast():
            part = model(x0, generators, **noise) * (len(rows) / batch_size)
        part.backward()
        loss = loss + part.detach()
    return loss


def say_result(say, seconds, val_loss, val, n_bytes, train_data):
    """Prints the validation loss, and bits per byte beside what simple statistics of the text reach."""
    say(f"trained in {tqdm.format_interval(seconds)}; validation NELBO {val_loss:.4f} nats per token, perplexity "
        f"{math.exp(min(val_loss, 700)):.2f}, {bits_per_byte(val_loss, val.numel(), n_bytes):.3f} bits per byte")
    if train_data.tokenizer == "bytes":
        # Counts from at most 20M bytes, which takes 0.5 GB of memory.
        base = byte_baselines(train_data.sequences(seq_len, 2 * 10 ** 7 // seq_len), val)
        say(f"baselines on the same text: byte bigram {base['bigram']:.3f}, "
            f"byte unigram {base['unigram']:.3f} bits per byte")


def main():
    check_settings()
    settings = settings_of(globals())
    parallel = Parallel(device, dist_timeout)
    master, dev = parallel.rank == 0, parallel.device
    signals = []                                            # that this process has received
    kernels_line = select_kernels(kernels, dev)
    path, best, log_path = (os.path.join(out_dir, name) for name in ("ckpt.pt", "best.pt", "log.jsonl"))
    held = open_folder(parallel)                            # keeps the folder locked

    def say(text, row=None):
        """On rank 0, appends a row to the log if there is one, and prints a line. If one of the two cannot be written,
        because the disk is full or the pipe is closed, the run ends as after a signal: it saves first."""
        if master:
            try:
                if row:
                    with open(log_path, "a") as f:
                        f.write(json.dumps(row) + "\n")
                print(text, flush=True)
            except OSError:
                signals.append(signal.SIGPIPE)

    # 1. Data.
    model_settings = {k: v for k, v in settings.items() if k in ModelConfig.__dataclass_fields__}
    train_data, val_data = open_data(parallel, say)
    config = ModelConfig(vocab_size=VOCABULARY[train_data.tokenizer], **model_settings)
    val = val_data.sequences(seq_len, eval_sequences)       # (n, s)
    n_bytes = int(val_data.sequence_bytes(seq_len, eval_sequences).sum())     # fails here if GPT-2's files are missing

    # 2. Model and optimizer.
    torch.manual_seed(seed)
    model = BlockDiffusionLM(config, init_std, embed_std).to(dev)
    if init_from and not resume:                            # before ShardedAdamW, which copies the weights
        load_weights(init_from, load_checkpoint(find_checkpoint(init_from)), model,
                     may_differ=("seq_len", "block_len", "detach_prefix"))
    about = dict(tokenizer=train_data.tokenizer, settings=settings, text=train_data.sha256)    # in each checkpoint
    micro_batches = micro_batches_of(parallel.rank, parallel.world, batch_size, micro_batch_size)
    optimizer = ShardedAdamW(model, (beta1, beta2), weight_decay, parallel.rank, parallel.world)
    # due: whether to validate before the next step. lowest: the lowest validation loss so far, and its step.
    step, due, lowest = 0, bool(init_from), (math.inf, 0)
    if resume:
        step, due, lowest = continue_run(path, model, optimizer, settings, train_data.sha256, say)

    # 3. Precision, compilation.
    use_bf16 = pick_dtype(dtype, dev) == torch.bfloat16
    autocast = functools.partial(torch.autocast, dev.type, torch.bfloat16, enabled=use_bf16)
    if compile and ampere_or_later(dev):
        compile_layers(model)
    say(f"{config.n_layer} layers, width {config.d_model}, {model.n_params:,} parameters | "
        f"{parallel.world} x {dev} {'bf16' if use_bf16 else 'fp32'} | {kernels_line}")
    say(f"{train_data.n_tokens:,} training tokens | {batch_size} x {seq_len} tokens a step, "
        f"micro-batches: {len(micro_batches)} | {max_iters * batch_size * seq_len:,} tokens in all")

    def validate():
        """The validation loss in nats per token after `step` steps."""
        sums = nelbo_sums(model.eval(), val, parallel, autocast, seed, eval_samples,
                          batch_size=len(micro_batches[0]), terse=True)
        model.train()
        loss = parallel.sum([sums[..., NATS].sum()])[0] / (eval_samples * val.numel())
        say(f"{step:>6}/{max_iters} validation {loss:.4f} nats per token", dict(step=step, val_loss=finite(loss, 5)))
        return loss

    def save():
        """Writes ckpt.pt. Raises UserError, and keeps the file before, if that is not possible."""
        if not all(p.isfinite().all() for p in model.parameters()):            # the same on all ranks
            raise UserError(f"step {step}: a weight is not finite; lower learning_rate; {last_checkpoint()}")
        state = optimizer.state_dict()                      # a collective
        if master:
            save_checkpoint(path, model, optimizer=state, lowest=lowest, **about, step=step)

    # 4. The loop.
    catch_signals(signals)
    started, first_step, stopping = time.time(), step, False
    losses, times = [], []              # of the steps since the last line of the log: nats per token; seconds
    bad_steps = 0                       # how many steps in a row, up to now, were not finite
    while True:
        # Also before the first step: a run may begin with other weights (init_from), or have ended after it saved and
        # before it validated.
        if due or step >= max_iters:
            val_loss = validate()
            if val_loss < lowest[0]:
                lowest = val_loss, step
                if master:
                    save_checkpoint(best, model, **about, step=step)
        if step >= max_iters:
            break
        step_started = time.time()
        lr = learning_rate_at(step, learning_rate, min_lr, warmup_iters, max_iters)
        optimizer.zero_grad()
        loss = add_gradients(model, train_data, step, micro_batches, autocast)
        norm = float(optimizer.reduce_gradients())          # of the whole gradient, all ranks together
        loss, stopping = parallel.sum([float(loss), len(signals)])      # of all ranks: the loss, and how many signals
        if math.isfinite(loss) and math.isfinite(norm):     # the same on all ranks: both are sums over ranks
            optimizer.step(lr, min(1.0, grad_clip / (norm + 1e-6)) if grad_clip else 1.0)
            bad_steps = 0
            losses.append(loss)
        else:
            bad_steps += 1
            say(f"step {step}: loss {loss}, gradient norm {norm}: step skipped ({bad_steps} in a row)")
            if bad_steps == 3:
                raise UserError(f"three steps in a row were not finite; lower learning_rate; {last_checkpoint()}")
        step += 1
        times.append(time.time() - step_started)
        if step % log_interval == 0 or step == max_iters:
            say(*describe(step, losses, times, lr, norm))
            losses, times = [], []
        if step == first_step + 1:                          # its time is left out of the next row of the log
            if dev.type == "cuda":
                say(f"the first step, in which kernels are compiled, took {time.time() - step_started:.0f} s")
            times = []
        # Save before validating: a validation may take long, and a second Ctrl-C during it then loses nothing.
        due = step % eval_interval == 0 or step == max_iters
        if due or stopping:
            save()
        if stopping:
            say(f"stopped at step {step}; {last_checkpoint()}")
            break

    # 5. The result.
    if master and not stopping:
        say_result(say, time.time() - started, val_loss, val, n_bytes, train_data)
    if lowest[0] < math.inf:
        say(f"validation was lowest at step {lowest[1]} ({lowest[0]:.4f} nats per token); {best} holds its weights")
    parallel.close()
    end(signals, held)


if __name__ == "__main__":
    try:
        with script("train.py"):
            configure(globals())
            main()
            if os.environ.get("RANK", "0") == "0":
                from tools.loss import draw
                draw(out_dir)
    except RuntimeError as error:
        if not is_lost_rank(error):
            raise
        print(f"train.py: another process of this run is gone or silent, or the network between them fails "
              f"({' '.join(str(error).split())}); {last_checkpoint()}", file=sys.stderr, flush=True)
        os._exit(1)                     # a normal exit would wait for collectives that never end
