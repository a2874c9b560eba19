"""
Generation, one block after another: unmask a block, append it to the cache, continue (eq. bdlm-kv-cache and
eq. partial-reverse). All four models generate this way; a full-sequence model takes the whole request as one block.

    python sample.py                                            # continue from out/ckpt.pt
    python sample.py --prompt "def " --length 1000 --watch      # see each block being unmasked
    python sample.py --prompt_file=book.txt --save_cache=book   # save the prompt's cache
    python sample.py --load_cache=book --prompt " Then"         # continue from it and this text

`generate` is the loop to read and to import. What a denoising step reveals is in decoders.py. In shapes, b is the
batch (one row for each sample), l the tokens of a block, m any number of tokens, d the width of the model.
"""
import codecs
import dataclasses
import functools
import os
import shutil
import signal
import sys
import time

STARTED = time.time()                   # torch, which comes next, takes seconds to import

import torch

import ops
from checkpoint import copy_row, find_checkpoint, fingerprint, load_model, load_prefix, read_prefix, save_prefix
from configurator import UserError, check, configure, script, tqdm
from data import VOCABULARY, get_tokenizer
from decoders import ActiveBlock, Sampler, check_decoder, usual_tokens_per_step
from files import check_file
from model import BlockDiffusionLM, cast_for_inference, config_from_file, take
from parallel import has_fast, pick_device, pick_dtype, select_kernels

# ----------------------------------------------------------------------------------------------
# Settings
out_dir = "out"                         # a folder with the ckpt.pt of train.py, or an export
checkpoint = ""                         # another checkpoint: a file, a folder or hf://owner/name (docs/forking.md)
init = ""                               # "random": untrained weights of model_config
model_config = ""                       # a file of config/ or its name, for --init=random
prompt = ""                             # text to continue; empty: a new document
prompt_file = ""                        # a UTF-8 file with the prompt
suffix = ""                             # known text; the generated tokens fill the gap between prompt and suffix
save_cache = ""                         # write the prompt's cache to this file
load_cache = ""                         # continue from a cache that save_cache wrote; the prompt comes after its text
length = 512                            # tokens to generate
num_samples = 1                         # samples generated side by side, as the rows of one batch
decoder = "random"                      # random, confidence, threshold or first_hitting
tokens_per_step = 0                     # p, tokens revealed per step; 0: at most 16 steps a block
threshold = 0.9                         # with decoder=threshold: reveal tokens of at least this probability
temperature = 1.0                       # 0: the most probable token
top_k = 0                               # draw from the k most probable tokens; 0: from all
top_p = 1.0                             # draw from the most probable tokens that together reach this probability
stop_at_eot = False                     # end a sample at its first end-of-text
seed = 1337                             # seed of the first sample; sample i has seed + i
watch = False                           # show the active block while it is unmasked
device = "auto"                         # auto, cpu or cuda; not mps: sampling draws in fp64
dtype = "auto"                          # auto: bfloat16 if the GPU has it, else float32
kernels = "auto"                        # auto; torch: the plain operations; mamba_ssm: those of that package
engine = "auto"                         # auto, simple, fused or graphs, see open_engine; all draw the same numbers
# ----------------------------------------------------------------------------------------------

ENGINES = ("auto", "simple", "fused", "graphs")


# ----------------------------------------------------------------------------------------------
# The engine

class SimpleEngine:
    """The plain engine. Each forward pass is one call of the model. fast.engine.FastEngine can take its place."""
    name = "simple"

    def __init__(self, model, cache, sampler, block_len):
        self.model, self.cache, self.passes = model, cache, 0
        self.block = ActiveBlock(len(sampler.seeds), block_len, sampler, cache.lengths.device,
                                 model.config.time_conditioning)

    def decode(self, xt, n_masked, on_step=None):
        """
        Unmasks one block. xt (b, l): known tokens, which never change, or the mask. n_masked: how many masks each row
        has, a list of ints. on_step(xt) is called after every step. Returns x0 (b, l); the next call overwrites it.
        """
        # The block begins where the cached prefix ends.
        self.block.start(xt, begin=self.cache.lengths)
        for _ in self.block.steps(n_masked):
            self.step()
            if on_step:
                on_step(self.block.xt)
        return self.block.xt

    def step(self):
        """One denoising step. It reads the cache and does not write to it: the block's tokens are not final yet."""
        t = self.block.next_noise_level()                                      # (b,) or None
        hidden = self.model.denoise_hidden(self.block.xt, self.cache, t)       # (b, l, d)
        # `reveal` says at which positions it needs logits. Logits are v wide, so they are made only there.
        self.block.reveal(lambda positions: self.model.token_logits(take(hidden, positions)))
        self.passes += 1

    def commit(self, x0):
        """Appends the finished block x0 (b, l) to the cache. This takes one more forward pass, over the clean tokens:
        keys, values and states of the last denoising step are those of a block that still had masks."""
        self.model.commit(x0, self.cache)
        self.passes += 1


def open_engine(wanted, model, dtype=torch.float32):
    """
    Prepares a model for generation. Returns the model and a function new_engine(model, cache, sampler, block_len).

      simple   `SimpleEngine` above, plain PyTorch. Casts the weights of `model` in place; the other engines copy them.
      fused    fast/, with prepared weights
      graphs   the same, each step a CUDA graph
      auto     graphs if select_kernels selected the kernels of fast/ (fused if no graph can be recorded), else simple

    All engines use the same random numbers. Their tokens differ only where rounding of the logits changes a draw or,
    with the decoders confidence and threshold, the choice of a position. Raises UserError for an engine that cannot
    run.
    """
    check(dict(engine=wanted), choices=dict(engine=ENGINES))
    device_type = model.embed.weight.device.type
    if device_type == "mps":
        raise UserError("device=mps cannot sample, because draws need fp64; use --device=cpu")
    if wanted == "simple" or (wanted == "auto" and (device_type == "cpu" or "cached_attention" not in ops.FAST)):
        return cast_for_inference(model, dtype), SimpleEngine
    if wanted == "graphs" and device_type == "cpu":
        raise UserError("engine=graphs records CUDA graphs, but the model is on the CPU; use --engine=auto")
    if not has_fast():
        raise UserError(f"engine={wanted} needs the folder fast/, which is not here; use --engine=simple")
    from fast.engine import new_engine
    from fast.inference import inference_model
    return inference_model(model, dtype), functools.partial(new_engine, wanted)


@dataclasses.dataclass
class Generation:
    """What `generate` returns."""
    tokens: list                        # for each row a 1-D int64 tensor on the CPU: prompt, generated tokens, suffix
    forward_passes: int                 # denoising steps and commits; reading the prompts is not counted
    start_seconds: float                # compiling and recording steps, reading the prompts
    seconds: float                      # from the first step to the last token
    cache_bytes: int


@torch.no_grad()
def generate(model, prompts, length, sampler, new_engine=SimpleEngine, stop_token=None, on_block=None, on_step=None,
             prefix=None, on_read=None, suffix=()):
    """
    Continues every prompt by `length` tokens. With a suffix, these tokens fill the gap between prompt and suffix.

    model, new_engine: as `open_engine` returns them. prompts: list of 1-D int64 tensors, which may differ in length
    and be empty. sampler: Sampler with one seed for each prompt. stop_token: a row ends after its first new one, and
    then its suffix is left out. prefix: a Prefix that comes before every prompt; its tokens are part of the returned
    rows. on_block(row, tokens) is called after each block with the new tokens of a row, a list; on_step(xt) after each
    denoising step; on_read(n) when n more tokens of the prompts have been read. Raises UserError for a request that
    `plan` refuses.
    """
    device = model.embed.weight.device
    if prefix is not None:
        prompts = [torch.cat([prefix.tokens, p.cpu()]) for p in prompts]
    totals = [len(p) + length + len(suffix) for p in prompts]
    l, starts, n_blocks = plan(model.config, prompts, length, len(suffix))
    if len(sampler.seeds) != len(prompts):
        raise UserError(f"the sampler has {len(sampler.seeds)} seeds; give it {len(prompts)}, one for each prompt")
    called = time.perf_counter()
    # A block is committed so that the blocks after it can see it. No block comes after the last one, so it is never
    # committed, and the cache needs no room for it.
    cache = model.new_cache(len(prompts), max(starts) + (n_blocks - 1) * l, l)
    block_engine = new_engine(model, cache, sampler, l)
    read_prompts(model, cache, prompts, starts, prefix, on_read)
    active = first_block(prompts, starts, totals, suffix, l, sampler.mask_id).to(device)   # (b, l)
    n_masked = (active == sampler.mask_id).sum(1).tolist()
    rows = [prompt.tolist() for prompt in prompts]      # the tokens of each row so far
    started = now(device)

    # While block k is unmasked, the cache holds keys, values and states of the first starts[i] + k l tokens of row i,
    # which are all final. (A fast engine commits block k - 1 together with the first step of block k.) Rows may start
    # at different tokens; their blocks are unmasked side by side.
    for k in range(n_blocks):
        x0 = block_engine.decode(active, n_masked, on_step)                    # (b, l), no mask left
        # tolist waits for the device. With CUDA graphs only decoder=threshold waits elsewhere (ActiveBlock.steps).
        for i, block in enumerate(x0.tolist()):
            # The new tokens are those after all that the row has, up to its last one. A row that has ended gets none
            # (an empty slice), while the batch runs on for the others.
            begin = starts[i] + k * l
            new = block[len(rows[i]) - begin:totals[i] - begin]
            if stop_token in new:
                new = new[:new.index(stop_token) + 1]
                totals[i] = len(rows[i]) + len(new)
            rows[i] += new
            if on_block:
                on_block(i, new)
        if [len(row) for row in rows] == totals:        # at the last block at the latest
            break
        block_engine.commit(x0)
        active.fill_(sampler.mask_id)
        n_masked = [l] * len(rows)
    rows = [torch.tensor(row, dtype=torch.long) for row in rows]
    return Generation(rows, block_engine.passes, started - called, now(device) - started, cache.nbytes)


def now(device):
    """The time in seconds, after the device has finished all work that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def plan(config, prompts, length, n_suffix=0):
    """
    Divides a request into blocks. n_suffix: tokens of the suffix. Returns
      l           the length of a block
      starts      for each row the token at which its first active block starts. The tokens before it are whole blocks,
                  which are read into the cache.
      n_blocks    how many blocks are unmasked
    For example, 21 prompt tokens, length 20 and l = 16 give starts = [16] and n_blocks = 2: the first block has 5 known
    tokens and 11 masks, the second has 16 masks, of which 9 are needed. Raises UserError for a request that cannot be
    served, before any work.
    """
    if not prompts:
        raise UserError("there are no prompts; give at least one, which may be empty")
    totals = [len(p) + length + n_suffix for p in prompts]
    if length < 1:
        raise UserError(f"length must be at least 1, but is {length}")
    if config.full_sequence and min(totals) != max(totals):
        raise UserError("a full-sequence model takes prompts of one length at a time; give it others in another call")
    l = max(totals) if config.full_sequence else config.block_len
    starts = [len(p) // l * l for p in prompts]
    n_blocks = max(-(-(total - start) // l) for total, start in zip(totals, starts))
    if n_suffix and n_blocks > 1:
        # A block sees only itself and what comes before it. It would not see a suffix that lies in a later block.
        raise UserError(f"a suffix must end in the block of {l} tokens in which the prompt ends, which has room for "
                        f"{l - max(len(p) % l for p in prompts)}; length and suffix are {length + n_suffix} tokens; "
                        f"shorten one")
    end = max(starts) + n_blocks * l
    if end > config.rope_capacity:
        raise UserError(f"prompt and length make {end} tokens in whole blocks, which is beyond the rotary "
                        f"capacity of {config.rope_capacity}; ask for a shorter length or prompt")
    return l, starts, n_blocks


def first_block(prompts, starts, totals, suffix, l, mask_id):
    """The first active block of every row, (b, l) on the CPU. The cache holds whole blocks only: what a prompt has
    after its last whole block is known here. The suffix is known, too: a masked position sees both sides."""
    blocks = torch.full((len(prompts), l), mask_id)
    for block, prompt, start, total in zip(blocks, prompts, starts, totals):
        block[:len(prompt) - start] = prompt[start:]
        block[total - start - len(suffix):total - start] = torch.as_tensor(suffix)
    return blocks


def read_prompts(model, cache, prompts, starts, prefix, on_read=None):
    """
    Fills the cache with the first starts[i] tokens of prompt i. The tokens of `prefix` are copied from its cache. A
    prompt that several rows have is read once, and its cache is copied to the other rows.
    """
    first_rows = {}                                     # for each prompt the first row that has it
    for i, (prompt, start) in enumerate(zip(prompts, starts)):
        if start == 0:                                  # no whole block
            continue
        tokens, row = prompt[:start].to(cache.lengths.device), cache.rows(i, i + 1)        # row: the cache's own memory
        first = first_rows.setdefault(tuple(tokens.tolist()), i)
        if first < i:
            copy_row(cache.rows(first, first + 1), row)
            continue
        if prefix:
            copy_row(prefix.cache, row)
        model.prefill(tokens[None, int(row.lengths):], row, on_chunk=on_read)  # what the prefix has not filled


# ----------------------------------------------------------------------------------------------
# The script

BAR_DELAY = 2                           # seconds before a progress bar appears


def check_settings():
    """Checks all that can be checked before a model is loaded and a prompt is read. Raises UserError."""
    check(globals(), least=dict(length=1, num_samples=1, seed=0, tokens_per_step=0), most=dict(num_samples=2 ** 20),
          below=dict(seed=2 ** 63),
          choices=dict(init=("", "random"), dtype=("auto", "float32", "bfloat16"), engine=ENGINES))
    check_decoder(dict(globals(), tokens_per_step=tokens_per_step or 1))
    if bool(init) != bool(model_config):
        raise UserError("--init=random and --model_config=FILE, a file of config/, go together; give both or none")
    check_file("save_cache", save_cache, rb"PK.*nanobdlm-prefix", (prompt_file, load_cache))


def tokenizer_of(model, name, path):
    """The tokenizer of that name. Raises UserError if its token ids are not the model's. path: for the message."""
    if VOCABULARY.get(name) != model.config.vocab_size:
        known = " and ".join(f"{size} for {each}" for each, size in VOCABULARY.items())
        raise UserError(f"{path} has {model.config.vocab_size} token ids, not those of its tokenizer, {name}; "
                        f"vocab_size must be {known}")
    return get_tokenizer(name)


def open_checkpoint(path, device):
    """Loads a checkpoint. path: see checkpoint.find_checkpoint. Returns the model, its tokenizer, the path of the file
    and the checkpoint's record."""
    path = find_checkpoint(path)
    model, record = load_model(path, device)
    return model, tokenizer_of(model, record.get("tokenizer"), path), path, record


def open_model(device):
    """The model that the settings name, and its tokenizer."""
    if init == "random":
        torch.manual_seed(seed)
        c = config_from_file(model_config)
        with torch.device(device):
            model = BlockDiffusionLM(c).eval()
        # An untrained head is zero, and all tokens would be equally probable, whatever the model computes.
        torch.nn.init.normal_(model.head.weight, std=0.02)
        return model, tokenizer_of(model, "bytes" if c.vocab_size == 258 else "gpt2", model_config)
    return open_checkpoint(checkpoint or out_dir, device)[:2]


def read_text(prompt, prompt_file):
    """The text of --prompt or --prompt_file, or "" if neither is given."""
    if prompt and prompt_file:
        raise UserError("prompt and prompt_file are both given; leave one out")
    if not prompt_file:
        return prompt
    try:
        with open(prompt_file, encoding="utf-8-sig") as f:
            return f.read()
    except UnicodeError as error:
        raise UserError(f"{prompt_file} is not UTF-8 (byte {error.start}); convert it, for example with "
                        f"iconv") from None


class Printer:
    """
    Prints the prompt and then the generated text of the first row to stdout, and the other rows at the end. If stderr
    is a terminal, it shows a bar there while a long prompt is read, then a line of progress below the text and, with
    --watch, the active block.
    """

    def __init__(self, tokenizer, prompt, n_unread, n_known, n_new, mask_id, n_rows=1, stop_token=None, watch=False):
        """prompt: its text. n_unread: tokens of it that will be read into the cache. n_known: known tokens of the first
        active block of a row. n_new: tokens that a row gets after them. watch: whether to show the active block."""
        self.tokenizer, self.prompt, self.mask_id = tokenizer, prompt, mask_id
        self.stop_token, self.watch = stop_token, watch
        self.n_unread, self.n_known, self.n_rows = n_unread, n_known, n_rows
        self.total, self.n_generated = n_new * n_rows, 0        # over all rows
        self.n_left = n_new                             # of the first row, not printed yet
        self.started = self.last_shown = time.time()
        self.live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        # A character may end in a later block than it begins in: the bytes are kept until then.
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.others = {}                                # for each row but the first its generated tokens
        self.bar = tqdm(desc="reading the prompt", total=n_unread, unit=" tokens", unit_scale=True, leave=False,
                        file=sys.stderr, delay=BAR_DELAY, mininterval=0.2 if self.live else 10, miniters=1)

    def read(self, n):
        """Call it when n more tokens of the prompt have been read. Prints the prompt when all have been."""
        self.bar.update(n)
        self.n_unread -= n
        if not self.n_unread:
            self.bar.close()
            print(self.prompt, end="", flush=True)
            self.started = time.time()

    def block(self, row, tokens):
        """Call it when a block of a row is finished. tokens: the list of those that it adds after the prompt."""
        if row == 0:
            self.clear()
            print(self.utf8.decode(self.tokenizer.decode_bytes(tokens)), end="", flush=True)
            self.n_left = 0 if self.stop_token in tokens else self.n_left - len(tokens)
        else:
            self.others.setdefault(row, []).extend(tokens)
        self.n_generated, self.n_known = self.n_generated + len(tokens), 0
        self.below(self.n_generated)

    def step(self, xt):
        """Call it after a denoising step. Shows the progress and, with --watch, the block xt (b, l) with its masks."""
        # To count the known tokens is to wait for the device, so it is done only now and then.
        watching = self.watch and self.n_left > 0
        if not watching and time.time() - self.last_shown < 0.2:
            return
        self.last_shown = time.time()
        known = int((xt != self.mask_id).sum()) - self.n_known * self.n_rows
        done = min(self.n_generated + known, self.total)
        if not watching:
            return self.below(done)
        shown = xt[0, :self.n_known + self.n_left].tolist()                    # the last block may reach further
        cells = ["\u2591" if token == self.mask_id else self.tokenizer.decode([token]) for token in shown]
        line = "".join(cells).replace("\n", "\u23ce").replace("\t", " ")
        if not self.live:
            return print(line, file=sys.stderr, flush=True)
        self.below(done, line)
        time.sleep(0.02)                                # so that the eye can follow

    def below(self, done, line=""):
        """Writes a line and the progress below the text, and moves the cursor back to the end of the text."""
        if not self.live:
            return
        width, height = shutil.get_terminal_size()
        progress = tqdm.format_meter(done, self.total, time.time() - self.started, unit=" tokens")
        text = (line.ljust(-(-len(line) // width) * width) + progress)[:width * max(height - 2, 1)]
        n_rows = -(-len(text) // width)
        # ESC D moves down a line and scrolls at the bottom, which makes room; ESC [nA goes back up. ESC 7 saves the
        # cursor, ESC [B moves it down, ESC [J erases everything after it, and ESC 8 restores it.
        print("\x1bD" * n_rows + f"\x1b[{n_rows}A\x1b7\x1b[B\r\x1b[J{text.rstrip()}\x1b8", end="",
              file=sys.stderr, flush=True)

    def clear(self):
        """Erases everything but the text."""
        self.bar.close()
        if self.live:
            print("\x1b[J", end="", file=sys.stderr, flush=True)

    def end(self):
        """Call it at the end or after an interrupt. Ends the first row and prints what the others have."""
        self.clear()
        print(self.utf8.decode(b"", final=True))
        for row, tokens in self.others.items():
            print(f"\n--- sample {row + 1} ---\n{self.prompt}{self.tokenizer.decode(tokens)}")


def main():
    check_settings()
    imported = time.time()
    text, dev = read_text(prompt, prompt_file), pick_device(device)
    kernels_line = select_kernels(kernels, dev, training=False)
    model, tokenizer = open_model(dev)
    c, n_params, weight_dtype = model.config, model.n_params, pick_dtype(dtype, dev)
    # Before open_engine, which changes the weights.
    model_fingerprint = fingerprint(model, weight_dtype) if save_cache or load_cache else None
    prefix = load_prefix(load_cache, c, model_fingerprint) if load_cache else None

    # An empty prompt is an end-of-text, after which a new document begins.
    tokens = tokenizer.encode_ordinary(text) or ([] if prefix else [tokenizer.eot_token])
    tokens = torch.tensor(tokens, dtype=torch.long)
    known = torch.cat([prefix.tokens, tokens]) if prefix else tokens           # all tokens before the generated ones
    suffix_tokens = torch.tensor(tokenizer.encode_ordinary(suffix), dtype=torch.long)
    l, (start,), _ = plan(c, [known], length, len(suffix_tokens))
    per_step = tokens_per_step or usual_tokens_per_step(c, length)
    sampler = Sampler([(seed + i) % 2 ** 63 for i in range(num_samples)], decoder, per_step, threshold, temperature,
                      top_k, top_p, mask_id=c.mask_id)
    model, new_engine = open_engine(engine, model, weight_dtype)
    pace = f"threshold {threshold}" if decoder == "threshold" else f"{min(sampler.tokens_per_step, l)} tokens a step"
    print(f"{n_params:,} parameters on {dev}, {kernels_line}, decoder {decoder}, {pace}, seed {seed}", file=sys.stderr)

    shown = tokenizer.decode(known[known != tokenizer.eot_token].tolist())
    stop_token = tokenizer.eot_token if stop_at_eot else None
    printer = Printer(tokenizer, shown, start - (prefix.cache.max_len if prefix else 0), len(known) - start,
                      length + len(suffix_tokens), c.mask_id, num_samples, stop_token, watch)
    opened = time.time()
    try:
        printer.read(0)                                 # prints a prompt of which nothing has to be read
        if save_cache:
            prefix = read_prefix(model, tokens, prefix, printer.read)
            tokens = tokens[:0]                         # the prefix holds them now
            save_prefix(save_cache, prefix, model_fingerprint)
        # A full-sequence model has one long block, so its progress is shown after steps.
        on_step = printer.step if watch or (printer.live and c.full_sequence) else None
        called = time.time()
        out = generate(model, [tokens] * num_samples, length, sampler, new_engine, stop_token, printer.block, on_step,
                       prefix, printer.read, suffix_tokens)
    finally:                                            # an interrupt or an error loses nothing of any row
        printer.end()
    n_generated = sum(min(len(row) - len(known), length) for row in out.tokens)
    print(f"{n_generated} tokens in {out.seconds:.2f} s: {n_generated / out.seconds:.1f} tokens/s, "
          f"{out.forward_passes} forward passes, cache {out.cache_bytes / 2**20:.2f} MiB\n"
          f"before that: imports {imported - STARTED:.1f} s, opening the model {opened - imported:.1f} s, "
          f"preparing steps and reading the prompt {called - opened + out.start_seconds:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    with script("sample.py"):
        sys.stdout.reconfigure(errors="replace")        # prints "?" where the terminal's encoding lacks a character
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))     # main prints what it has, as on Ctrl-C
        configure(globals())
        main()
