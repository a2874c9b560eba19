"""
Trains any of the four models of model.py: attention or a Mamba-2 hybrid, in blocks or full-sequence. One loop for a
laptop, one GPU or several (data parallel, see parallel.py). The loss is BlockDiffusionLM.loss, over all blocks at once.
A token is masked with probability t, the noise level of its block, and each masked token weighs 1/t.

    python train.py                                                     # laptop, minutes, real text
    torchrun --nproc_per_node=8 train.py config/mamba_h_87m.py          # one node
    python train.py --resume --out_dir=out/mamba_h_87m                  # its settings are those of the checkpoint

Data order and noise are functions of (seed, step, row of the global batch). So a run that is resumed, or continues with
another number of GPUs or another micro-batch size, stays the same run up to the order of summation.

SIGTERM, SIGINT (Ctrl-C), SIGHUP, SIGUSR1 and SIGUSR2 save a checkpoint and end the run with status 128 + their number.
"""
import contextlib
import datetime
import functools
import json
import math
import os
import shlex
import signal
import sys
import time

import torch

from checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from configurator import UserError, check, fit, lock, script, settings_of
from data import VOCABULARY, TokenData, bits_per_byte, byte_bigrams, prepare_stdlib
from model import BlockDiffusionLM, ModelConfig
from nelbo import NATS, nelbo_sums, sum_over_ranks, training_noise
from parallel import (Parallel, ShardedAdamW, ampere_or_later, compile_layers, end_if_a_rank_is_lost, micro_batches_of,
                      one_thread_if_small, pick_dtype, select_kernels)

# ----------------------------------------------------------------------------------------------
# Settings: the defaults train a small BDLM Mamba-H on bytes in minutes, on two cores. In brackets: another name, mostly
# nanoGPT's, perhaps in another unit.
out_dir = "out"                         # where the checkpoints and the log go
resume = False                          # continue from out_dir/ckpt.pt, with its settings except those that you give
init_from = ""                          # begin with the weights of this checkpoint; ignored with --resume
# data
data = "data/stdlib"                    # folders of data.py (dataset), a,b for several; data/stdlib is made if missing
tokenizer = "auto"                      # bytes or gpt2; auto: that of the data
# model (see ModelConfig; to make another field of it a setting, such as conv_width, assign it here)
seq_len = 256                           # tokens of a training sequence (block_size)
block_len = 16                          # tokens of a diffusion block; seq_len for a full-sequence model
attn_every = 2                          # attention at layers 0, attn_every, ...; 1: attention only
n_layer = 3                             # layers
n_head = 4                              # attention heads
d_model = 64                            # width (n_embd)
d_state = 32                            # Mamba-2 state size
mamba_head_dim = 64                     # width of a Mamba-2 head
time_conditioning = False               # modulate noisy tokens by their block's noise level
reverse_scan = True                     # an ablation if false: Mamba layers scan forward alone
detach_prefix = False                   # an ablation if true: block losses do not train the prefix
init_std = 0.1                          # of initial weights; the wide models of config/ take 0.02
embed_std = 1.0                         # of the initial embedding
# optimisation
batch_size = 2                          # sequences per step, over all devices; on a CPU a small batch learns faster
micro_batch_size = 0                    # sequences a device holds at a time (gradient_accumulation_steps); 0: its share
max_iters = 3500                        # training steps; the cosine ends there (lr_decay_iters)
learning_rate = 2e-3                    # peak, after the warm-up (lr)
min_lr = 1e-6                           # at the end of the cosine
warmup_iters = -1                       # steps of linear warm-up; -1: 200, but at most max_iters / 10
beta1 = 0.9                             # AdamW
beta2 = 0.95                            # AdamW
weight_decay = 0.1                      # AdamW, only on matrices
grad_clip = 1.0                         # largest norm of the gradient; 0: no clipping
seed = 1337                             # of data order, initialisation and noise
# noise and length of the training sequences
t_min = 1e-3                            # training draws the noise level t from t_min..t_max; evaluation from 1e-3..1
t_max = 1.0                             # see t_min
stratified = False                      # the blocks of a step share out that range evenly
short_len = 512                         # for the first short_iters steps a sequence is cut into ones of this length
short_iters = 0                         # steps with short sequences; 0: none, and short_len is unused
# evaluation, logging, saving
eval_interval = 1000                    # steps between validations, each with a checkpoint
eval_sequences = 64                     # validation sequences (eval_iters), spread evenly over the split; 0: all
eval_samples = 2                        # noise samples per validation sequence
log_interval = 100                      # steps between lines of the log
# system
device = "auto"                         # auto, cpu, cuda or mps
dtype = "auto"                          # auto: bfloat16 if the GPU has it, else float32
kernels = "auto"                        # auto; torch: the plain operations; mamba_ssm: those of that package
compile = True                          # torch.compile the layers; on Ampere GPUs and later only
dist_timeout = 300                      # seconds until a late rank ends the job; more than a checkpoint takes to write
# ----------------------------------------------------------------------------------------------


def main(given):
    """given: the settings that were given, on the command line or by its config files."""
    # 1. Settings and processes.
    running = make_folder()                                 # noqa: F841. A file that is locked while it is open
    path, best_path = (os.path.join(out_dir, name) for name in ("ckpt.pt", "best.pt"))
    record = load_checkpoint(path, "optimizer", "settings", "step") if resume else None
    changes = take_settings(path, record["settings"], given) if resume else ""
    check_settings()
    parallel = Parallel(device, dist_timeout)
    dev, say = parallel.device, functools.partial(report, parallel.rank)
    kernels_line = select_kernels(kernels, dev)

    # 2. Data.
    if data == "data/stdlib" and parallel.rank == 0:
        prepare_stdlib(data)                                # on first use
    parallel.agreed({**settings_of(globals()), "device": ""})                  # the others wait for it
    splits = train_data, val_data = [TokenData(data, split, tokenizer) for split in ("train", "val")]
    val = val_data.sequences(seq_len, eval_sequences)       # (n, s): the validation sequences
    # What tells texts apart: the tokens of each split, how many and the first eight; then 64 windows all over it.
    text = sum(([x.n_tokens, *x.sequences(min(8, seq_len), k).ravel().tolist()] for k in (1, 64) for x in splits), [])

    # 3. Model and optimizer.
    config = ModelConfig(vocab_size=VOCABULARY[train_data.tokenizer],
                         **{k: v for k, v in globals().items() if k in ModelConfig.__dataclass_fields__})
    torch.manual_seed(seed)
    model = BlockDiffusionLM(config, init_std, embed_std).to(dev)
    # From here on the parameters are views of the optimizer's buffers. Loading weights copies into them.
    optimizer = ShardedAdamW(model, (beta1, beta2), weight_decay, parallel.rank, parallel.world)
    step, lowest = 0, lowest_validation(best_path)          # steps done; the lowest validation loss and its step
    if init_from and not resume:
        load_weights(init_from, load_checkpoint(find_checkpoint(init_from)), model)
    if resume:
        load_weights(path, record, model, text)
        optimizer.load_state_dict(record["optimizer"])
        step, record = parallel.agreed(record["step"]), None                   # frees the memory
    # In each checkpoint.
    about = dict(tokenizer=train_data.tokenizer, text=parallel.agreed(text), settings=settings_of(globals()))
    micro_batches = micro_batches_of(parallel.rank, parallel.world, batch_size, micro_batch_size)
    one_thread_if_small(6 * model.n_params * len(micro_batches[0]) * seq_len)

    # 4. Precision, compilation.
    use_bf16 = pick_dtype(dtype, dev) == torch.bfloat16
    autocast = functools.partial(torch.autocast, dev.type, torch.bfloat16, enabled=use_bf16)
    if compile and ampere_or_later(dev):
        say(compile_layers(model))
    say(f"{config.n_layer} layers, width {config.d_model}, {model.n_params:,} parameters | {parallel.world} x {dev} "
        f"{'bf16' if use_bf16 else 'fp32'} | {kernels_line}\n{train_data.n_tokens:,} training tokens | {batch_size} x "
        f"{seq_len} tokens a step, micro-batches: {len(micro_batches)} | from step {step} to {max_iters}{changes}")

    # 5. The loop. recent: (loss in nats per token, seconds) of each step since the last row of the log. signals: those
    # that this process has received; n_signals: how many all ranks have. bad_steps: not finite, one after the other.
    recent, signals, started, n_signals, bad_steps = [], [], time.time(), 0, 0
    catch_signals(signals)
    while True:
        # Save before validating, which may take long: a second Ctrl-C then loses nothing. So --resume may repeat a
        # validation. With init_from, step 0 is saved and validated, too.
        due = step >= max_iters or (step % eval_interval == 0 and (step > 0 or init_from))
        if due or n_signals:
            # On every rank: state_dict is a collective.
            save(path, model, parallel, optimizer=optimizer.state_dict(), step=step, **about)
        if due and not n_signals:
            val_loss = validate(model, val, parallel, autocast, len(micro_batches[0]))
            say(f"{step:>6}/{max_iters} validation {val_loss:.4f}", dict(step=step, val_loss=round(val_loss, 5)))
            if val_loss < lowest[0]:
                lowest = val_loss, step
                save(best_path, model, parallel, step=step, val_loss=val_loss, **about)
        if n_signals or step >= max_iters:
            break

        # One step of training.
        step_started = time.time()
        lr = learning_rate_at(step)
        optimizer.zero_grad()                               # never model.zero_grad(), which would drop its buffers
        loss = add_gradients(model, train_data, step, micro_batches, autocast)
        norm = float(optimizer.reduce_gradients())          # of the whole gradient, all ranks together
        loss, n_signals = parallel.sum([float(loss), len(signals)])     # so all ranks stop at the same step
        step += 1
        # loss and norm are those of the whole batch on every rank. A step that is not finite changes no weight.
        bad_steps = 0 if math.isfinite(loss + norm) else bad_steps + 1
        if bad_steps == 3:
            raise UserError(f"three steps in a row were not finite; lower learning_rate, and --resume if {path} exists")
        if bad_steps:
            say(f"{step:>6}/{max_iters} loss {loss:.4f} | grad {norm:.2f} | step skipped")
            continue
        optimizer.step(lr, scale=min(1.0, grad_clip / (norm + 1e-6)) if grad_clip else 1.0)        # clips the gradient
        recent.append((loss, time.time() - step_started))
        if step % log_interval == 0 or step == max_iters:
            say(*describe(step, recent, lr, norm))
            recent = []

    if n_signals:
        say(f"stopped at step {step}; continue with --resume --out_dir={shlex.quote(out_dir)}")
    elif parallel.rank == 0:
        say(f"trained in {(time.time() - started) / 60:.1f} minutes; {result(val_loss, val, val_data, train_data)}")
        say(f"validation was lowest at step {lowest[1]} ({lowest[0]:.4f} nats per token); {best_path} has its weights")
    parallel.close()
    if signals:
        sys.exit(128 + signals[0])


# ----------------------------------------------------------------------------------------------
# A step

def learning_rate_at(step):
    """Linear warm-up to learning_rate, then a cosine to min_lr at step max_iters."""
    warmup = warmup_iters if warmup_iters >= 0 else min(200, max_iters // 10)
    if step < warmup:
        return learning_rate * (step + 1) / warmup
    done = (step - warmup) / (max_iters - warmup)
    return min_lr + 0.5 * (learning_rate - min_lr) * (1 + math.cos(math.pi * done))


def add_gradients(model, train_data, step, micro_batches, autocast):
    """Adds the gradients of this rank's rows of a step's batch to p.grad. Returns their share of the batch's loss, a
    tensor on the device: reading it here would wait for the device."""
    loss = 0.0
    s = short_len if step < short_iters else seq_len    # tokens of a sequence
    n_blocks, _ = model.config.split_blocks(s)          # of a sequence
    for rows in micro_batches:
        # Data and noise are functions of (seed, step, row of the global batch), whichever rank runs the row.
        # (m, s): a row is seq_len / s sequences.
        x0 = train_data.batch(seed, step, rows, batch_size, seq_len).view(-1, s).to(model.head.weight.device)
        noise = training_noise(x0, n_blocks, seed, step, rows, batch_size, stratified)
        # The loss is weighted by the rows' share of the batch: so micro-batches and ranks add up to its mean.
        with autocast():
            part = model(x0, t_range=(t_min, t_max), **noise) * (len(rows) / batch_size)
        part.backward()
        loss = loss + part.detach()
    return loss


def describe(step, recent, lr, norm):
    """The line on the screen and the row of the log after `step` steps. recent: [(loss, seconds)] of the steps since
    the row before; the new row has their means."""
    loss, seconds = (sum(values) / len(recent) for values in zip(*recent))
    row = dict(step=step, loss=round(loss, 5), lr=lr, grad_norm=round(norm, 4), ms=round(1000 * seconds, 2),
               tok_per_s=round(batch_size * seq_len / seconds), memory=torch.cuda.max_memory_allocated())
    return (f"{step:>6}/{max_iters} loss {loss:.4f} | lr {lr:.2e} | grad {norm:.2f} | {1000 * seconds:.0f} ms | "
            f"{row['tok_per_s']:,} tok/s | ETA {datetime.timedelta(seconds=round(seconds * (max_iters - step)))}"), row


def report(rank, line, row=None):
    """Prints a line (on other ranks than 0 to nowhere, see Parallel) and, on rank 0, appends a row to the log if there
    is one. Where the line goes may be gone, such as the terminal after SIGHUP: that ends no run."""
    if rank == 0 and row:
        with open(os.path.join(out_dir, "log.jsonl"), "a") as log:
            log.write(json.dumps(row) + "\n")
    with contextlib.suppress(OSError):
        print(line, flush=True)


def catch_signals(received):
    """From now on these signals no longer end the process, but are appended to the list `received`. After one of them
    Ctrl-C ends it at once, without a checkpoint."""
    def on_signal(number, frame):
        received.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(sig) != signal.SIG_IGN:         # nohup ignores SIGHUP
            signal.signal(sig, on_signal)


# ----------------------------------------------------------------------------------------------
# Validation and checkpoints

def validate(model, val, parallel, autocast, at_a_time):
    """The validation loss in nats per token, the same on all ranks. at_a_time: sequences of a forward pass. A
    collective: every rank must call it. Raises UserError unless it is finite."""
    # (n, samples, 3): sums of each sequence, zero where another rank works.
    sums = nelbo_sums(model.eval(), val, parallel, autocast, seed, eval_samples, batch_size=at_a_time, terse=True)
    model.train()
    return float(sum_over_ranks(parallel, sums[..., NATS]).sum()) / (eval_samples * val.numel())


def save(path, model, parallel, **about):
    """Writes a checkpoint. Raises UserError, and keeps the file before, if a weight is not finite or the file cannot be
    written."""
    if not all(p.isfinite().all() for p in model.parameters()):                # the same on all ranks
        raise UserError(f"a weight is not finite; lower learning_rate and --resume if {path} exists")
    if parallel.rank == 0:
        save_checkpoint(path, model, **about)


def load_weights(path, record, model, text=None):
    """Copies the weights of a checkpoint into the model. Raises UserError if it is of another model, or if a text is
    given and the checkpoint is of another one."""
    # A setting that is newer than the checkpoint has its default.
    theirs, ours = vars(ModelConfig(**record["config"])), vars(model.config)
    if VOCABULARY.get(record.get("tokenizer")) != ours["vocab_size"]:
        raise UserError(f"{path} reads {record.get('tokenizer')} tokens, but {data} holds others; prepare that text "
                        f"again with --tokenizer {record.get('tokenizer')} and another --out")
    free = "seq_len", "block_len", "detach_prefix"                             # a run may go on with others
    if other := [f"{k}={v}" for k, v in theirs.items() if v != ours[k] and k not in free]:
        raise UserError(f"{path} was trained with {', '.join(other)}; add its config file or these settings")
    if record["model"].keys() != model.state_dict().keys():
        raise UserError(f"{path} holds other weights than this model: use the revision or the fork that made it")
    # One of an earlier revision has the beginning of `text`, or does not say its text: then its folder's name must do.
    if text and (old := record.get("text", text if record["settings"]["data"] == data else [0])) != text[:len(old)]:
        raise UserError(f"{path} is of another text than {data}: give --data of its text, or begin with --init_from={path}")
    model.load_state_dict(record["model"])


def lowest_validation(path):
    """The validation loss of the weights in best.pt, and their step. (infinity, 0) if there is no such file. Raises
    UserError if that validation cannot be compared with this run's: it took other sequences or other noise."""
    record = (load_checkpoint(path, "settings", "val_loss") if os.path.exists(path) else
              dict(settings=globals(), val_loss=math.inf, step=0))
    for name in ("seq_len", "block_len", "eval_sequences", "eval_samples", "seed"):
        if record["settings"].get(name) != globals()[name]:
            raise UserError(f"{path} was the best at another {name}; rename it, so that this run does not replace it")
    return record["val_loss"], record["step"]


def result(val_loss, val, val_data, train_data):
    """The last validation in words, with what simple statistics of the bytes reach on the same text."""
    n_bytes = int(val_data.sequence_bytes(seq_len, eval_sequences).sum())
    text = (f"validation NELBO {val_loss:.4f} nats per token, perplexity {math.exp(min(val_loss, 700)):.2f}, "
            f"{bits_per_byte(val_loss, val.numel(), n_bytes):.3f} bits per byte, on {val.numel():,} tokens")
    if train_data.tokenizer == "bytes":
        # Counts from at most 20M bytes, which takes 0.5 GB of memory.
        bigrams = byte_bigrams(train_data.sequences(seq_len, 2 * 10 ** 7 // seq_len), val)
        text += f"\nbaseline, same text: byte bigrams {bigrams:.3f} bits per byte"
    return text


# ----------------------------------------------------------------------------------------------
# The start

def take_settings(path, saved, given):
    """
    Gives this run the settings of the checkpoint that it continues. saved: those in the checkpoint. given: the names of
    those given to this run. Returns what changes, for a message. What counts:

      out_dir, resume    this run's own: the checkpoint may have been moved
      init_from          the saved one, also if one is given: what the run began with
      all others         the given one, else the saved one, else (a setting that is new in this revision) the default
    """
    ours = settings_of(globals())
    # `fit` gives each value the type of this revision's default, or refuses it.
    saved = {k: fit(k, v, ours[k], path) for k, v in saved.items() if k in ours.keys() - {"out_dir", "resume"}}
    changed = [k for k, v in saved.items() if k in given and k != "init_from" and v != ours[k]]
    globals().update({k: v for k, v in saved.items() if k not in changed})
    return "".join(f", {k}: {saved[k]} -> {ours[k]}" for k in changed)


def check_settings():
    """Raises UserError, before any work, for settings that cannot work. Some are bounds of others: min_lr is at most
    learning_rate, warmup_iters below max_iters, t_min at most t_max."""
    check(globals(), least=dict(seq_len=1, batch_size=1, micro_batch_size=0, max_iters=1, min_lr=0, beta1=0, beta2=0,
                                weight_decay=0, grad_clip=0, init_std=0, embed_std=0, seed=0, eval_interval=1,
                                eval_sequences=0, eval_samples=1, log_interval=1, short_len=1),
          above=dict(learning_rate=0, t_min=0), most=dict(min_lr=learning_rate, warmup_iters=max_iters - 1, t_max=1,
                                                          t_min=t_max, beta1=1 - 1e-6, beta2=1 - 1e-6, seed=2 ** 62))
    # A full-sequence model takes short_len as its one block.
    if short_iters and (seq_len % short_len or (block_len < seq_len and short_len % block_len)):
        raise UserError(f"short_len must divide seq_len ({seq_len}) into whole blocks, but is {short_len}")


def make_folder():
    """Makes out_dir. Raises UserError if it holds a run, which would be overwritten without --resume, or if another
    process trains there. Call it before a checkpoint is read, which that process may replace. Keep what this returns,
    see `lock`."""
    os.makedirs(out_dir, exist_ok=True)
    if not resume and (found := {"ckpt.pt", "best.pt", "log.jsonl"} & {*os.listdir(out_dir)}):
        how = "add --resume to continue it, " if "ckpt.pt" in found else ""
        raise UserError(f"{out_dir} holds a run; {how}move it away, or choose another --out_dir")
    if os.environ.get("RANK", "0") == "0":
        return lock(os.path.join(out_dir, ".lock"), f"another training writes to {out_dir}; choose another --out_dir")


if __name__ == "__main__":
    with end_if_a_rank_is_lost("train.py"), script("train.py", globals()) as given:
        main(given)
