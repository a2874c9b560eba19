"""
Cached block generation: denoise one block, append it to the cache, go on (eq. bdlm-kv-cache and
eq. partial-reverse). All four models; a full-sequence model is one block as long as the window.

    python sample.py                                            # continue from out/ckpt.pt
    python sample.py --prompt "def " --length 1000 --watch      # see each block being unmasked
    python sample.py --prompt_file=book.txt --save_cache=book   # save the prompt's cache
    python sample.py --load_cache=book --prompt " Then"         # continue from it, this text after it

`generate` is the loop to read and to import; what a step reveals is in decoders.py.
"""
from configurator import STARTED, ConfigError, check, configure, script, tqdm  # first: see quiet_interrupt
import codecs
import dataclasses
import functools
import os
import shutil
import signal
import sys
import time

import torch

import ops
from checkpoint import (copy_rows, find_checkpoint, fingerprint, load_model, load_prefix, need_cache, read_prefix,
                        save_prefix)
from data import VOCABULARY, DataError, batches, get_tokenizer
from decoders import ActiveBlock, Sampler, check_decoder
from files import check_file
from model import BlockDiffusionLM, ModelError, cast_for_inference, config_from_file, take
from parallel import has_fast, pick_device, pick_dtype, select_kernels

# ---------------------------------------------------------------------------------------------
# Settings
out_dir = "out"                         # where train.py wrote ckpt.pt
checkpoint = ""                         # another checkpoint: a file, a folder or hf://owner/name (docs/forking.md)
init = ""                               # "random": untrained weights of model_config
model_config = ""                       # a file of config/ or its name, for --init=random
prompt = ""                             # text to continue; empty: a new document
prompt_file = ""                        # a UTF-8 file with the prompt
suffix = ""                             # text that comes after the generated tokens: they fill the gap before it
save_cache = ""                         # write the prompt's cache to this file
load_cache = ""                         # read such a file; the prompt continues its text
length = 512                            # tokens to generate
num_samples = 1                         # rows generated side by side
order = "random"                        # random, confidence, threshold or first_hitting
tokens_per_step = 0                     # p, tokens revealed per step; 0: a sixteenth of a block
threshold = 0.9                         # with order=threshold: reveal tokens of at least this probability
temperature = 1.0                       # 0: the most likely token
top_k = 0                               # keep the k most likely tokens; 0: all
top_p = 1.0                             # keep the most likely tokens up to this mass
stop_at_eot = False                     # end a row at its first end-of-text
seed = 1337                             # of the first row; row i has seed + i
watch = False                           # show the active block while it is unmasked
device = "auto"                         # auto, cpu, cuda or mps
dtype = "auto"                          # auto: bfloat16 on CUDA, float32 elsewhere
kernels = "auto"                        # auto; torch: the plain operations; mamba_ssm: those of that package
compile = True                          # torch.compile the fast engines' layers; on CUDA only
engine = "auto"                         # auto, simple, fused or graphs: all draw the same tokens, up to rounding
# ---------------------------------------------------------------------------------------------

ENGINES = ("auto", "simple", "fused", "graphs")
READ_TOGETHER = 4096                    # tokens of prompts that are read together


# ---------------------------------------------------------------------------------------------
# The engine

class Decoder:
    """The plain engine: unmasks one block after another against a cache of the finished ones. Every forward pass is
    one call of the model. fast.decoder.FastDecoder has the same methods."""
    engine = "simple"

    def __init__(self, model, cache, sampler, block_len):
        self.model, self.cache, self.passes = model, cache, 0
        self.block = ActiveBlock(len(sampler.seeds), block_len, sampler, cache.lengths.device,
                                 model.config.time_conditioning)

    @property
    def begin(self):
        """(b,) tokens before the active block."""
        return self.cache.lengths

    def decode(self, xt, counts, on_step=None):
        """
        Unmasks one block xt (b, l): known tokens, which never change, or the mask; counts: masked tokens of each row.
        on_step(xt) sees the block after every step. Returns x0 (b, l), a tensor that the next call overwrites.
        """
        self.block.start(xt, self.begin)
        for _ in self.block.steps(counts):
            self.step()
            if on_step:
                on_step(self.block.xt)
        return self.block.xt

    def step(self):
        """One denoising step: hidden states of the block, logits where they are needed, some tokens revealed."""
        hidden = self.model.denoise_hidden(self.block.xt, self.cache, self.block.noise_level())     # (b, l, d)
        self.block.reveal(lambda at: self.model.token_logits(take(hidden, at)))
        self.passes += 1

    def commit(self, x0):
        """Appends the finished block x0 (b, l) to the cache: one more pass, over clean tokens."""
        self.model.commit(x0, self.cache)
        self.passes += 1

    def flush(self):
        """Called before anyone else reads the cache. Here every block is in it already."""


def open_engine(wanted, model, dtype=torch.float32, compile=False):
    """
    The model to generate with, and new_decoder(model, cache, sampler, block_len) for it. wanted: "simple", the class
    above; "fused", fast/ with prepared weights; "graphs", the same in CUDA graphs; "auto", graphs where the kernels of
    fast/ were selected and simple elsewhere. Side effect: "simple" casts the weights of `model` in place; the others
    work on a copy. Raises ConfigError for an engine that cannot run. All engines draw the same tokens, up to rounding.
    """
    check(dict(engine=wanted), choices=dict(engine=ENGINES))
    on_gpu = model.embed.weight.is_cuda
    if wanted == "simple" or (wanted == "auto" and not (on_gpu and "cached_attention" in ops.FAST)):
        return cast_for_inference(model, dtype), Decoder
    if wanted == "graphs" and not on_gpu:
        raise ConfigError("engine=graphs records CUDA graphs, and the model is on the CPU; use --engine=auto")
    if not has_fast():
        raise ConfigError(f"engine={wanted} needs the folder fast/, which is not here; use --engine=simple")
    from fast.decoder import new_decoder
    from fast.inference import inference_model
    return inference_model(model, dtype, compile and on_gpu), functools.partial(new_decoder, wanted)


@dataclasses.dataclass
class Generation:
    """What `generate` returns: per row the tokens (prompt first), and what it took."""
    tokens: list                        # of 1-D int64 tensors, on the CPU
    forward_passes: int                 # denoising steps and commits, prompt excluded
    start_seconds: float                # compiling and recording steps, reading the prompts
    seconds: float                      # from the first step to the last token
    cache_bytes: int


@torch.no_grad()
def generate(model, prompts, length, sampler, new_decoder=Decoder, stop_token=None, on_block=None, on_step=None,
             prefix=None, on_read=None, suffix=()):
    """
    Continues every prompt by `length` tokens, or fills a gap of so many between it and the tokens of `suffix`.

    prompts: list of 1-D int64 tensors, possibly of different lengths; sampler: Sampler with one seed per prompt;
    model and new_decoder as `open_engine` returns them; stop_token: end a row after it. on_block(row, tokens) is
    called with the new tokens of a row after each block, on_step(xt) after each denoising step, on_read(n) whenever
    n more tokens of a prompt, or of several together, have been read. prefix: a Prefix that comes before every prompt,
    which may then be empty; rows begin with its tokens. Raises ModelError when the result would not fit the rotary
    capacity.
    """
    c, device = model.config, model.embed.weight.device
    if prefix is not None:
        prompts = [torch.cat([prefix.tokens, p.cpu()]) for p in prompts]
    totals = [len(p) + length + len(suffix) for p in prompts]
    l, starts, n_blocks = plan(c, prompts, length, len(suffix))
    if len(sampler.seeds) != len(prompts):
        raise ConfigError(f"the sampler has {len(sampler.seeds)} seeds; give it {len(prompts)}, one for each prompt")
    called = time.time()
    # The last block is never committed, so the cache need not hold it.
    cache = model.new_cache(len(prompts), max(starts) + (n_blocks - 1) * l, l)
    decoder = new_decoder(model, cache, sampler, l)
    rows = read_prompts(model, cache, prompts, starts, prefix, on_read)
    # A prompt's last, incomplete block starts out as the known part of the first active block.
    active = torch.full((len(rows), l), c.mask_id, device=device)
    for i, (prompt, start) in enumerate(zip(prompts, starts)):
        active[i, :len(prompt) - start] = prompt[start:]
        # So does a suffix: masked positions see known ones on both sides.
        active[i, totals[i] - len(suffix) - start:totals[i] - start] = torch.as_tensor(suffix, device=device)
    masked = (active == c.mask_id).sum(1).tolist()
    started = now(device)

    for block in range(n_blocks):
        if block:
            decoder.commit(x0)
        x0 = decoder.decode(active, masked, on_step)                           # (b, l), no mask left
        done = x0.cpu()                                 # the one wait for the device in a block
        for i in range(len(rows)):
            # The first block repeats the end of the prompt: only what comes after `known` is new. A row that has ended
            # stays cut at its total while the batch runs on for the others.
            known = max(len(prompts[i]), len(rows[i]))
            rows[i] = torch.cat([rows[i], done[i]])[:totals[i]]
            new = rows[i][known:]
            if stop_token is not None and (new == stop_token).any():
                totals[i] = known + int((new == stop_token).nonzero()[0]) + 1
                rows[i] = rows[i][:totals[i]]
            if on_block:
                on_block(i, rows[i][known:])
        if all(len(row) == total for row, total in zip(rows, totals)):
            break
        active.fill_(c.mask_id)
        masked = [l] * len(rows)
    return Generation(rows, decoder.passes, started - called, now(device) - started, cache.nbytes)


@torch.no_grad()
def generate_naive(model, prompt, length, sampler):
    """Generation without a cache: every denoising step runs all blocks through the training path. `generate` must give
    the same tokens, and the tests check that it does. prompt (b, m) -> (b, m + length)."""
    c, tokens, total = model.config, prompt, prompt.size(1) + length
    l = total if c.full_sequence else c.block_len
    while tokens.size(1) < total:
        start = tokens.size(1) // l * l
        finished, known = tokens[:, :start], tokens[:, start:]
        xt = tokens.new_full((len(tokens), l), c.mask_id)
        xt[:, :known.size(1)] = known
        block = ActiveBlock(len(tokens), l, sampler, tokens.device, timed=True)
        block.start(xt, torch.tensor(start))
        for _ in block.steps([l - known.size(1)]):
            # Finished blocks are clean in both streams. The last one, which holds masks, has no place in the clean one.
            x, t = torch.cat([finished, block.xt], 1), block.noise_level()
            hidden = model.all_block_hidden(x, x, t[:, None].expand(-1, x.size(1) // l))[:, start:]
            block.reveal(lambda at: model.token_logits(take(hidden, at)))
        tokens = torch.cat([finished, block.xt], 1)
    return tokens[:, :total]


def now(device):
    """Seconds, when all work given to the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.time()


def plan(config, prompts, length, after=0):
    """(block length, where each row's first active block starts, number of blocks); after: tokens of a suffix. Raises
    ModelError before any work for a request that cannot be served."""
    totals = [len(p) + length + after for p in prompts]
    if length < 1:
        raise ModelError(f"length is {length}; ask for at least 1 token")
    if config.full_sequence and min(totals) != max(totals):
        raise ModelError("a full-sequence model takes prompts of one length at a time")
    l = max(totals) if config.full_sequence else config.block_len
    starts = [len(p) // l * l for p in prompts]
    n_blocks = max(-(-(total - start) // l) for total, start in zip(totals, starts))
    if after and n_blocks > 1:
        raise ModelError(f"a suffix must end in the block of {l} tokens in which the prompt ends, which has room for "
                         f"{l - max(len(p) % l for p in prompts)}; length and suffix are {length + after} tokens")
    end = max(max(starts) + n_blocks * l, *totals)
    if end > config.rope_capacity:
        raise ModelError(f"prompt and length make {end} tokens in whole blocks, beyond the rotary "
                         f"capacity of {config.rope_capacity}; ask for a shorter length or prompt")
    return l, starts, n_blocks


def read_prompts(model, cache, prompts, starts, prefix, on_read=None):
    """Prefills every row up to its start, rows of one length together and equal prompts once; what `prefix` holds is
    copied. Returns the tokens that the rows hold."""
    rows, device = {}, cache.lengths.device             # rows: start -> prompt -> the rows that have it
    for i, (prompt, start) in enumerate(zip(prompts, starts)):
        rows.setdefault(start, {}).setdefault(prompt.cpu().numpy().tobytes(), []).append(i)
    for start, equal in rows.items():
        for group in batches(list(equal.values()), READ_TOGETHER // max(start, 1)):
            # One prompt, which may be long, is read in its place; several short ones are read beside it and copied.
            mine = cache.rows(group[0][0], group[0][0] + 1) if len(group) == 1 else model.new_cache(len(group), start)
            if prefix:
                copy_rows(prefix.cache, mine, range(len(group)))
            tokens = torch.stack([prompts[same[0]][int(mine.lengths[0]):start] for same in group]).to(device)
            model.prefill(tokens, mine, on_chunk=on_read)
            for k, same in enumerate(group):
                copy_rows(mine.rows(k, k + 1), cache, same[len(group) == 1:])
    return [prompt[:start].cpu() for prompt, start in zip(prompts, starts)]


# ---------------------------------------------------------------------------------------------
# The script

BAR_DELAY = 2                           # seconds for which no bar is shown


def check_settings():
    """Raises for whatever can be seen to be wrong before a model is loaded and a prompt is read."""
    check(globals(), least=dict(length=1, num_samples=1, seed=0), most=dict(num_samples=2 ** 20),
          below=dict(seed=2 ** 63),
          choices=dict(init=("", "random"), dtype=("auto", "float32", "bfloat16"), engine=ENGINES))
    check_decoder(dict(globals(), tokens_per_step=tokens_per_step or 1))
    check_file("save_cache", save_cache, rb"PK.*nanobdlm-prefix", (prompt_file, load_cache))


def tokenizer_of(model, name, path):
    """The tokenizer of that name. Raises ModelError if its ids are not the model's."""
    if VOCABULARY.get(name) != model.config.vocab_size:
        raise ModelError(f"{path} has {model.config.vocab_size} token ids, not those of its tokenizer, {name}; "
                         f"vocab_size must be 258 for bytes and 50258 for gpt2")
    return get_tokenizer(name)


def open_checkpoint(path, device):
    """(model, its tokenizer, path of the file, record) of what checkpoint.find_checkpoint takes."""
    path = find_checkpoint(path)
    model, record = load_model(path, device)
    return model, tokenizer_of(model, record.get("tokenizer"), path), path, record


def open_model(device):
    """The model that the settings name, and its tokenizer."""
    if init == "random":
        if not model_config:
            raise ConfigError("--init=random needs --model_config=FILE, a file of config/")
        torch.manual_seed(seed)
        c = config_from_file(model_config)
        with torch.device(device):
            model = BlockDiffusionLM(c).eval()
        torch.nn.init.normal_(model.head.weight, std=0.02)
        return model, tokenizer_of(model, "bytes" if c.vocab_size == 258 else "gpt2", model_config)
    return open_checkpoint(checkpoint or os.path.join(out_dir, "ckpt.pt"), device)[:2]


def read_text():
    """The text of --prompt or --prompt_file, empty where there is none."""
    if prompt and prompt_file:
        raise ConfigError("prompt and prompt_file are both given; leave one out")
    if not prompt_file:
        return prompt
    try:
        with open(prompt_file, encoding="utf-8-sig") as f:
            return f.read()
    except UnicodeError as error:
        raise DataError(f"{prompt_file} is not UTF-8 (byte {error.start}); convert it, for example with iconv") from None


class Printer:
    """
    Prints the prompt to stdout, then text as it is generated. On a terminal, stderr shows a bar while a long prompt
    is read, then a line of progress below the text and, with --watch, the active block.
    """

    def __init__(self, tokenizer, prompt, unread, known, total, mask_id):
        """prompt: its text; unread: how many of its tokens will be read into the cache; known: how many
        tokens of the first active blocks are the prompt's; total: tokens to be generated."""
        self.tokenizer, self.prompt, self.mask_id = tokenizer, prompt, mask_id
        self.unread, self.known, self.total, self.made = unread, known, total, 0
        self.started = self.shown = time.time()
        self.live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.bar = tqdm(desc="reading the prompt", total=unread, unit=" tokens", unit_scale=True, leave=False,
                        file=sys.stderr, delay=BAR_DELAY, mininterval=0.2 if self.live else 10, miniters=1)

    def read(self, count):
        """`count` more tokens of the prompt have been read. When all are, shows the prompt."""
        self.bar.update(count)
        self.unread -= count
        if not self.unread:
            self.bar.close()
            print(self.prompt, end="", flush=True)
            self.started = time.time()

    def text(self, tokens):
        return self.tokenizer.decode_bytes(tokens.tolist())

    def block(self, row, tokens):
        self.made, self.known = self.made + len(tokens), 0
        if row == 0:
            self.clear()
            print(self.utf8.decode(self.text(tokens)), end="", flush=True)
        self.below(self.progress(self.made))

    def step(self, xt):
        """After a denoising step: how far it is, and with --watch the block with its masks."""
        if not watch and time.time() - self.shown < 0.2:        # counting waits for the device
            return
        self.shown = time.time()
        done = min(self.made + int((xt != self.mask_id).sum()) - self.known, self.total)
        if not watch:
            return self.below(self.progress(done))
        cells = ["\u2591" if token == self.mask_id else
                 self.text(torch.tensor([token])).decode("utf-8", "replace") for token in xt[0].tolist()]
        line = "".join(cells).replace("\n", "\u23ce").replace("\t", " ")
        if not self.live:
            return print(line, file=sys.stderr, flush=True)
        self.below(line, self.progress(done))
        time.sleep(0.02)

    def progress(self, done):
        seconds = max(time.time() - self.started, 1e-6)
        return (f"[{done}/{self.total} tokens, {done / seconds:.1f} tokens/s, "
                f"ETA {seconds * (self.total / max(done, 1) - 1):.0f} s]")

    def below(self, *lines):
        """Writes under the text on a terminal, which scrolls where there is no room, and puts the cursor
        back behind the text."""
        if not self.live:
            return
        width, height = shutil.get_terminal_size()
        text = "".join(line.ljust(-(-len(line) // width) * width) for line in lines)
        text = text[:width * max(height - 2, 1)]
        rows = -(-len(text) // width)
        print("\x1bD" * rows + f"\x1b[{rows}A\x1b7\x1b[B\r\x1b[J{text.rstrip()}\x1b8", end="",
              file=sys.stderr, flush=True)

    def clear(self):
        """Leaves nothing but the text."""
        self.bar.close()
        if self.live:
            print("\x1b[J", end="", file=sys.stderr, flush=True)


def main():
    check_settings()
    imported = time.time()
    text, dev = read_text(), pick_device(device)
    chosen = select_kernels(kernels, dev, training=False)
    model, tokenizer = open_model(dev)
    c, n_params = model.config, model.n_params
    weights = pick_dtype(dtype, dev)
    mark = fingerprint(model, weights) if save_cache or load_cache else None
    prefix = load_prefix(load_cache, c, mark) if load_cache else None
    first = [] if prefix else [tokenizer.eot_token]     # of a new document
    tokens = torch.tensor(tokenizer.encode_ordinary(text) or first, dtype=torch.long)
    whole = torch.cat([prefix.tokens, tokens]) if prefix else tokens
    after = torch.tensor(tokenizer.encode_ordinary(suffix), dtype=torch.long)
    l, (start, *_), _ = plan(c, [whole] * num_samples, length, len(after))
    seeds = [(seed + i) % 2 ** 63 for i in range(num_samples)]
    sampler = Sampler(seeds, order, tokens_per_step or max(l // 16, 1), threshold, temperature,
                      top_k, top_p, c.mask_id)
    if save_cache:
        need_cache(c)
    model, new_decoder = open_engine(engine, model, weights, compile)
    pace = f"threshold {threshold}" if order == "threshold" else f"{sampler.tokens_per_step} tokens a step"
    print(f"{n_params:,} parameters on {dev}, {chosen}, order {order}, {pace}, seed {seed}", file=sys.stderr)
    shown = tokenizer.decode(whole[whole != tokenizer.eot_token].tolist())
    printer = Printer(tokenizer, shown, start - (prefix.cache.max_len if prefix else 0),
                      (len(whole) - start) * num_samples, (length + len(after)) * num_samples, c.mask_id)
    opened = time.time()
    try:
        printer.read(0)
        if save_cache:
            prefix, tokens = read_prefix(model, tokens, prefix, printer.read), tokens[:0]
            save_prefix(save_cache, prefix, mark)
        out = generate(model, [tokens] * num_samples, length, sampler, new_decoder,
                       tokenizer.eot_token if stop_at_eot else None, printer.block,
                       printer.step if watch or (printer.live and c.full_sequence) else None, prefix,
                       printer.read, after)
    except KeyboardInterrupt:
        printer.clear()
        print(f"\nstopped after {printer.made} tokens", file=sys.stderr)
        sys.exit(130)
    printer.clear()
    print()
    for i, row in enumerate(out.tokens[1:], 2):
        print(f"\n--- sample {i} ---\n{shown}{tokenizer.decode(row[len(whole):].tolist())}")
    made = sum(len(row) for row in out.tokens) - (len(whole) + len(after)) * num_samples
    print(f"{made} tokens in {out.seconds:.2f} s: {made / out.seconds:.1f} tokens/s, "
          f"{out.forward_passes} forward passes, cache {out.cache_bytes / 2**20:.2f} MiB\n"
          f"before that: imports {imported - STARTED:.1f} s, opening the model {opened - imported:.1f} s, "
          f"preparing steps and reading the prompt {out.start_seconds:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    with script("sample.py"):
        sys.stdout.reconfigure(errors="replace")        # of what a terminal's encoding lacks
        signal.signal(signal.SIGTERM, signal.default_int_handler)   # ends like Ctrl-C
        configure(globals())
        main()
