"""
Generation, one block after another: unmask a block, append it to the cache, continue (eq. bdlm-kv-cache). All four
models generate this way; a full-sequence model takes the whole request as one block.

    python sample.py                                            # out/ckpt.pt or, without it, the model that ships
    python sample.py --prompt "def " --length 1000 --watch      # print the block after each denoising step
    python sample.py --prompt_file=book.txt --save_cache=book.cache     # save the prompt and its cache
    python sample.py --load_cache=book.cache --prompt " Then"           # continue from it and this text

`generate` is the loop to read and to import. What a denoising step reveals is in decoders.py. In shapes, b is the
batch (one row for each sample), l the tokens of a block, m any number of tokens, d the width of the model.
"""
import codecs
import collections
import functools
import gc
import math
import signal
import sys
import time
from pathlib import Path

# Python would search the many objects of torch for garbage, several times during the import and again at the exit, and
# find none: 0.3 seconds of this script. So it waits until all is imported, and `freeze` leaves that out of the search.
if __name__ == "__main__":
    gc.disable()
import torch
from tqdm import tqdm

import ops
from checkpoint import copy_row, fingerprint, load_prompt, open_checkpoint, save_prompt
from configurator import UserError, check, script
from decoders import DRAWN_ORDER, VARIABLE_COUNT, ActiveBlock, Sampler, select
from model import Attention, BiMamba, cast_for_inference
from parallel import has_fast, one_thread_if_small, pick_device, pick_dtype, select_kernels

if __name__ == "__main__":
    gc.freeze()
    gc.enable()

# ----------------------------------------------------------------------------------------------
# Settings. In brackets: the setting of nanoGPT with this job.
checkpoint = "auto"                     # file, folder (out_dir) or hf://owner/name; auto: out, else the one that ships
prompt = ""                             # text to continue (start, in nanoGPT); empty: a new document
prompt_file = ""                        # a UTF-8 file with the prompt
suffix = ""                             # known text after the gap, which `length` tokens fill exactly
save_cache = ""                         # write the prompt and its cache to this file, NAME.cache
load_cache = ""                         # continue from a cache that save_cache wrote; the prompt comes after its text
length = 512                            # tokens to generate (max_new_tokens)
num_samples = 1                         # samples generated side by side, as the rows of one batch
decoder = "strided"                     # at any pace it costs the fewest bits (docs/results.md); others: decoders.py
tokens_per_step = 0                     # p of random, strided, confidence: tokens a step; 0: at most 32 steps a block
threshold = 0.9                         # with decoder=threshold: reveal where a token has at least this probability
entropy_bound = 0.5                     # with decoder=entropy_bound: a step ends when its entropies exceed this (nats)
temperature = 1.0                       # 0: the most probable token
top_k = 0                               # draw from the k most probable tokens; 0: from all
top_p = 1.0                             # draw from the most probable tokens that together reach this probability
stop_at_eot = False                     # end a sample at its first end-of-text
seed = 1337                             # seed of the first sample; sample i has seed + i
watch = False                           # print the active block of the first sample after each step
device = "auto"                         # auto, cpu or cuda; not mps: sampling draws in fp64
dtype = "auto"                          # auto: bfloat16 if the GPU has it, else float32
kernels = "auto"                        # auto; torch: the plain operations; mamba_ssm: those of that package
engine = "auto"                         # auto, simple, fused or graphs, see open_engine; all draw the same numbers
# ----------------------------------------------------------------------------------------------

MASK = "\u2591"


# ----------------------------------------------------------------------------------------------
# The engine

class SimpleEngine:
    """
    The plain engine. Each forward pass is one call of the model. On a GPU fast.engine.FastEngine takes its place. It
    has a step of its own: a change here belongs there, too. `generate` calls decode and commit and reads passes;
    bench.py also uses step, name, model, cache and block.
    """
    name = "simple"

    def __init__(self, model, cache, sampler, block_len):
        self.model, self.cache, self.passes = model, cache, 0
        self.block = ActiveBlock(len(sampler.seeds), block_len, sampler, cache.lengths.device)

    def decode(self, xt, n_masked, on_step=None):
        """
        Unmasks one block. xt (b, l): known tokens, which never change, or the mask. n_masked: the most masks of a row,
        an int. on_step(xt) is called after every step. Returns x0 (b, l); the next call overwrites it.
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
        model, block = self.model, self.block
        t = block.noise_level() if model.config.time_conditioning else None    # (b,)
        hidden = model.denoise_hidden(block.xt, self.cache, t)                 # (b, l, d)
        positions = block.positions(model, hidden)                             # (b, m), where this step reveals
        block.reveal(positions, model.token_logits(select(hidden, positions)))
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
      auto     simple, unless select_kernels selected the kernels of fast/ and these know the model's mixers. Then
               graphs, or fused if no graph can be recorded

    All engines use the same random numbers. Their tokens differ only where rounding of the logits changes a draw or a
    choice by certainty. Raises UserError for an engine that cannot run.
    """
    check(dict(engine=wanted), choices=dict(engine=("auto", "simple", "fused", "graphs")))
    device_type = model.embed.weight.device.type
    if device_type == "mps":
        raise UserError("device=mps cannot sample, because draws need fp64; use --device=cpu")
    known = has_fast() and all(type(layer.mixer) in (Attention, BiMamba) for layer in model.layers)
    # ops.FAST has an attention to a cache if parallel.select_kernels selected the kernels of fast/.
    fast = known and device_type != "cpu" and "cached_attention" in ops.FAST
    if wanted == "simple" or (wanted == "auto" and not fast):
        return cast_for_inference(model, dtype), SimpleEngine
    if not known or (wanted == "graphs" and device_type == "cpu"):
        raise UserError(f"engine={wanted} needs fast/ and a mixer of it, engine=graphs a GPU; use --engine=auto")
    from fast.engine import new_engine
    from fast.inference import inference_model
    return inference_model(model, dtype), functools.partial(new_engine, wanted)


# What `generate` returns:
#   tokens            for each row a 1-D int64 tensor on the CPU: prompt, generated tokens, suffix
#   forward_passes    denoising steps and commits (a fast engine does a commit and a step in one); no prompts
#   seconds           from the first step to the last token
#   cache_bytes       the memory of the cache
Generation = collections.namedtuple("Generation", "tokens forward_passes seconds cache_bytes")


@torch.no_grad()
def generate(model, prompts, length, sampler, new_engine=SimpleEngine, stop_token=None, on_block=None, on_step=None,
             prompt_cache=None, suffix=()):
    """
    Continues every prompt by `length` tokens. With a suffix, these tokens fill the gap between prompt and suffix: the
    model has no way to make a gap longer or shorter.

    model, new_engine: as `open_engine` returns them. prompts: list of 1-D int64 tensors, which may differ in length
    and be empty. sampler: Sampler with one seed for each prompt. stop_token: a row ends after its first new one, and
    then its suffix is left out. on_block(row, tokens) is called after each block with the new tokens of a row, a list;
    on_step(xt) after each denoising step. prompt_cache: of one row, as `read` fills it to its max_len, with the first
    tokens of every prompt, which are then not read again; it is copied. Raises UserError for a request that cannot be
    served, before any work.
    """
    device, mask = model.embed.weight.device, sampler.mask_id
    suffix = torch.as_tensor(suffix).tolist()
    l, starts, n_blocks = plan(model.config, prompts, length, len(suffix))
    assert len(sampler.seeds) == len(prompts), "the sampler needs one seed for each prompt"
    assert prompt_cache is None or int(prompt_cache.lengths) <= min(starts), "a prompt is shorter than its cache"

    # A block is committed so that the blocks after it can see it. No block comes after the last one, so it is never
    # committed, and the rows need no room for it.
    cache = model.new_cache(len(prompts), max(starts) + (n_blocks - 1) * l, l)
    # Before `read`: an engine may record its steps as CUDA graphs, which needs an empty cache and leaves it empty.
    engine = new_engine(model, cache, sampler, l)
    read(model, [prompt[:start] for prompt, start in zip(prompts, starts)], cache, prompt_cache)

    # The first active block of a row begins with what the prompt has after its last whole block. The suffix is known,
    # too: a masked position sees both sides. So a block is known | masks | suffix | masks to the block's end.
    rows = [prompt.tolist() for prompt in prompts]      # the tokens of each row so far
    blocks = [(row[start:] + [mask] * length + suffix + [mask] * l)[:l] for row, start in zip(rows, starts)]
    n_masked = max(block.count(mask) for block in blocks)
    active = torch.tensor(blocks, device=device)        # (b, l)
    left = [length + len(suffix)] * len(rows)           # how many tokens each row still gets; 0: it has ended
    started = now(device)

    # While block k is unmasked, the cache holds keys, values and states of the first starts[i] + k l tokens of row i,
    # which are all final. (A fast engine commits block k - 1 together with the first step of block k.) Rows may start
    # at different tokens; their blocks are unmasked side by side.
    for k in range(n_blocks):
        x0 = engine.decode(active, n_masked, on_step)                          # (b, l), no mask left
        # tolist waits for the device. With CUDA graphs it waits elsewhere only in ActiveBlock.steps.
        for i, block in enumerate(x0.tolist()):
            known = len(prompts[i]) % l if k == 0 else 0        # how many tokens of the block are of the prompt
            new = block[known:][:left[i]]               # [] for a row that has ended
            left[i] -= len(new)
            if stop_token in new[:length]:              # not one of the suffix
                new, left[i] = new[:new.index(stop_token) + 1], 0
            rows[i] += new
            if on_block:
                on_block(i, new)
        if not any(left):                               # after the last block at the latest
            break

        engine.commit(x0)
        active.fill_(mask)
        n_masked = l

    return Generation([torch.tensor(row) for row in rows], engine.passes, now(device) - started, cache.nbytes)


def now(device):
    """The time in seconds, after a CUDA device has finished all work that it was given."""
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
    assert prompts and length > 0, "nothing is asked for: length and the number of prompts must be at least 1"
    totals = [len(p) + length + n_suffix for p in prompts]
    if config.full_sequence and min(totals) != max(totals):
        raise UserError("a full-sequence model takes prompts of one length at a time; give it others in another call")
    l = config.block_of(max(totals))
    starts = [len(p) // l * l for p in prompts]
    n_blocks = max(-(-(total - start) // l) for total, start in zip(totals, starts))
    if n_suffix and n_blocks > 1:
        # A block sees only itself and what comes before it. It would not see a suffix that lies in a later block.
        raise UserError(f"a gap must fit one block: length and suffix are {length + n_suffix} tokens, but the block of "
                        f"{l} in which the prompt ends has room for {l - max(len(p) % l for p in prompts)}; shorten "
                        f"one, or take a model of longer blocks")
    if (end := max(starts) + n_blocks * l) > config.rope_capacity:
        raise UserError(f"prompt and length make {end} tokens in whole blocks, but the model has positions for "
                        f"{config.rope_capacity}, its rotary capacity; shorten one")
    return l, starts, n_blocks


def read(model, prefixes, cache, prompt_cache=None):
    """Fills row i of an empty cache with prefixes[i] (m,), which are whole blocks, and returns the cache. Rows with the
    same prefix are read once. prompt_cache: None, or a cache of one row with the first tokens of every prefix, which is
    copied. On a terminal, a bar appears after two seconds."""
    bar = functools.partial(tqdm, desc="reading the prompt", unit=" chunks", disable=None, delay=2, leave=False)
    first = {}                                          # prefix -> a row that has read it
    for i, prefix in enumerate(prefixes):
        # row is a view: prefill writes into `cache`, lengths too.
        row, text = cache[i:i + 1], tuple(prefix.tolist())
        if (source := first.get(text, prompt_cache)) is not None:
            copy_row(source, row)
        rest = prefix[None, int(row.lengths):].to(row.lengths.device)          # (1, those that the row lacks)
        model.prefill(rest, row, progress=bar)
        first[text] = row
    return cache


# ----------------------------------------------------------------------------------------------
# The script

def read_text():
    """The text to continue: --prompt, or that of --prompt_file."""
    if prompt and prompt_file:
        raise UserError("prompt and prompt_file are both given; leave one out")
    try:
        return Path(prompt_file).read_text("utf-8-sig") if prompt_file else prompt
    except UnicodeError as error:
        raise UserError(f"{prompt_file} is not UTF-8 (byte {error.start}); convert it with iconv") from None


def line_of(tokenizer, tokens, mask_id):
    """A block, a list of tokens and masks, as a line of text. A character may take several tokens: where some of its
    bytes are missing, it looks like a mask."""
    parts = [MASK.encode() if token == mask_id else tokenizer.decode_single_token_bytes(token) for token in tokens]
    return b"".join(parts).decode(errors="replace").replace("\ufffd", MASK).replace("\n", "\u23ce").replace("\t", " ")


class Printer:
    """Prints the text of the first row to stdout, block by block if it is `live`, and that of the others at the end.
    prompt: the text that each begins with."""

    def __init__(self, tokenizer, prompt, live):
        self.tokenizer, self.prompt, self.live = tokenizer, prompt, live
        # A character may end in a later block than it begins in: its bytes are kept until then. The prompt of row 0 is
        # printed first; `end` prints that of the others.
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.kept = collections.defaultdict(bytes, {0: prompt.encode()})       # what each row has yet to print

    def block(self, row, tokens):
        """Call it when a block of a row is finished. tokens: the list of those that it adds after the prompt."""
        self.kept[row] += self.tokenizer.decode_bytes(tokens)
        if row == 0 and self.live:
            self.print_row_0()

    def print_row_0(self, final=False):
        print(self.utf8.decode(self.kept.pop(0, b""), final), end="\n" if final else "", flush=True)

    def end(self):
        """Call it at the end or after an interrupt. Ends the first row and prints what the others have."""
        self.print_row_0(final=True)                    # and takes it out of `kept`
        for row, text in self.kept.items():
            print(f"\n--- sample {row + 1} ---\n{self.prompt}{text.decode(errors='replace')}")


def main():
    check(globals(), least=dict(length=1, num_samples=1, seed=0), most=dict(seed=2 ** 62),
          endings=dict(save_cache=".cache"))
    text, dev = read_text(), pick_device(device)
    # `encode` refuses a word of the command line that is not UTF-8. The tokenizer would change it in silence.
    (text + suffix).encode()
    kernels_line = select_kernels(kernels, dev, training=False)
    model, tokenizer, path, _ = open_checkpoint(checkpoint, dev)
    for name in sorted(name for name in tokenizer.special_tokens_set if name in text + suffix):
        print(f"{name} in the prompt or suffix is read as text, not as a special token", file=sys.stderr)

    c, n_params, weight_dtype = model.config, model.n_params, pick_dtype(dtype, dev)
    # Before open_engine, which changes the weights.
    made_by = fingerprint(model, weight_dtype) if save_cache or load_cache else None
    tokens, cache = load_prompt(load_cache, c, made_by) if load_cache else (torch.zeros(0, dtype=torch.long), None)
    # Without any text a new document begins, after an end-of-text. A loaded cache has text.
    new = tokenizer.encode_ordinary(text) or ([] if load_cache else [tokenizer.eot_token])
    tokens = torch.cat([tokens, torch.tensor(new, dtype=torch.long)])          # (m,)
    suffix_tokens = tokenizer.encode_ordinary(suffix)

    l, (start,), _ = plan(c, [tokens], length, len(suffix_tokens))
    # At most 32 steps a block. In the window of a full-sequence model `length` tokens are masked, and not the prompt.
    per_step = min(tokens_per_step or math.ceil(c.block_of(length) / 32), l)
    sampler = Sampler([seed + i for i in range(num_samples)], decoder, per_step, threshold=threshold, top_k=top_k,
                      entropy_bound=entropy_bound, temperature=temperature, top_p=top_p, mask_id=c.mask_id)
    one_thread_if_small(2 * n_params * l * num_samples)
    model, new_engine = open_engine(engine, model, weight_dtype)
    # threshold and entropy_bound are decoders and also the fields of their numbers.
    how = getattr(sampler, decoder) if decoder in VARIABLE_COUNT else f"with {sampler.tokens_per_step} tokens a step"
    print(f"{path}: {n_params:,} parameters on {dev}, {kernels_line}, decoder {decoder} {how}, seed {seed}",
          file=sys.stderr)
    if temperature == 0 and num_samples > 1 and decoder not in DRAWN_ORDER:
        print(f"all samples are equal: with temperature=0, decoder={decoder} draws nothing", file=sys.stderr)

    def show(xt):
        print(line_of(tokenizer, xt[0].tolist(), c.mask_id), file=sys.stderr, flush=True)

    shown = tokenizer.decode(tokens[tokens != tokenizer.eot_token].tolist())
    printer = Printer(tokenizer, shown, live=not watch)
    if save_cache:
        cache = read(model, [tokens[:start]], model.new_cache(1, start), cache)
        save_prompt(save_cache, tokens, cache, made_by)

    try:
        out = generate(model, [tokens] * num_samples, length, sampler, new_engine=new_engine,
                       stop_token=tokenizer.eot_token if stop_at_eot else None, on_block=printer.block,
                       on_step=show if watch else None, prompt_cache=cache, suffix=suffix_tokens)
    finally:                                            # an interrupt or an error loses nothing of any row
        printer.end()
    n_generated = sum(min(len(row) - len(tokens), length) for row in out.tokens)
    print(f"{n_generated} tokens in {out.seconds:.2f} s: {n_generated / out.seconds:.1f} tokens/s, "
          f"{out.forward_passes} forward passes, cache {out.cache_bytes / 2**20:.2f} MiB", file=sys.stderr)


if __name__ == "__main__":
    with script("sample.py", globals()):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))     # main prints what it has, as on Ctrl-C
        main()
