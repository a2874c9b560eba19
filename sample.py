"""
Cached block generation: denoise one block, append it to the cache, go on (eq. bdlm-kv-cache and
eq. partial-reverse). All four models; a full-sequence model is one block as long as the window.

    python sample.py                                            # continue from out/ckpt.pt
    python sample.py --prompt "def " --length 1000 --watch      # see each block being unmasked
    python sample.py --prompt_file=book.txt --save_cache=book   # read it once, go on with
    python sample.py --load_cache=book --prompt " Then"         # this text after it, or with none

`generate` is the engine to import; `ActiveBlock.reveal` is where a new decoder goes.
"""
import codecs
import dataclasses
import functools
import os
import shutil
import sys
import time

import torch
from tqdm import tqdm

import ops
from block_graph import BlockGraph, record
from checkpoint import load_model
from configurator import ConfigError, check, check_file, configure, script
from data import DataError, get_tokenizer
from fold import prepare_for_inference
from model import BlockDiffusionLM, ModelError, config_from_file, take
from prefix import copy_row, load_prefix, need_cache, read_prefix, save_prefix

# ---------------------------------------------------------------------------------------------
# Settings
out_dir = "out"                         # where train.py wrote ckpt.pt
checkpoint = ""                         # another checkpoint file, or a folder with a ckpt.pt
init = ""                               # "random": untrained weights of model_config
model_config = ""                       # a file of config/ or its name, for --init=random
prompt = ""                             # text to continue; empty: a new document
prompt_file = ""                        # or a UTF-8 file that holds it
save_cache = ""                         # keep the prompt here as the model has read it
load_cache = ""                         # such a file: it comes before the prompt
length = 512                            # tokens to generate
num_samples = 1                         # rows generated side by side
order = "random"                        # random, confidence, threshold or first_hitting
tokens_per_step = 0                     # p, tokens revealed per step; 0: a sixteenth of a block
threshold = 0.9                         # of order=threshold: reveal every token at least this sure
temperature = 1.0                       # 0: the most likely token
top_k = 0                               # keep the k most likely tokens; 0: all
top_p = 1.0                             # keep the most likely tokens up to this mass
stop_at_eot = False                     # end a row at its first end-of-text
seed = 1337
watch = False                           # show the active block while it is unmasked
device = "auto"
dtype = "auto"                          # auto: bfloat16 on CUDA, float32 elsewhere
kernels = "auto"                        # auto, or torch to force the plain twins
compile = True                          # torch.compile the layers; on CUDA only
engine = "auto"                         # auto, simple, fused or graphs: see generate
# ---------------------------------------------------------------------------------------------

ORDERS = ("random", "confidence", "threshold", "first_hitting")
ENGINES = ("auto", "simple", "fused", "graphs")


def check_decoder(settings):
    """Raises ConfigError for the first of a Sampler's settings, a dict, that makes no sense."""
    check(settings, least=dict(tokens_per_step=1, threshold=0, temperature=0, top_k=0), above=dict(top_p=0),
          choices=dict(order=ORDERS))
    for name in ("threshold", "top_p"):
        if settings[name] > 1:
            raise ConfigError(f"{name} is {settings[name]}; it is at most 1")


@dataclasses.dataclass
class Sampler:
    """
    How masked tokens become text. `seeds`: an int64 for each row. Draws are a function of a row's seed, the
    position and the step, see ops.uniform: rows, or calls, with the same seed and prompt come out alike.
    """
    seeds: list
    order: str = "random"
    tokens_per_step: int = 16
    threshold: float = 0.9
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    mask_id: int = None

    def __post_init__(self):
        check_decoder(vars(self))
        if not self.seeds:
            raise ConfigError("there are no seeds; give one for each row")
        for seed in self.seeds:
            if not isinstance(seed, int) or not -2 ** 63 <= seed < 2 ** 63:
                raise ConfigError(f"a seed is {seed}; it is a whole number of at most 63 bits")
        if self.order == "first_hitting":
            self.tokens_per_step = 1

    def pick(self, logits, at, *key):
        """Draws tokens (b, m) from logits (b, m, v) of positions at (b, m) after temperature and cuts; key:
        what ops.gumbel_argmax wants to know."""
        if self.temperature == 0:
            return logits.argmax(-1)
        if self.temperature != 1:
            logits = logits.double() / self.temperature
        return ops.gumbel_argmax(cut(logits, self.top_k, self.top_p), at, *key)


def cut(logits, top_k, top_p):
    """Sets all but the top_k tokens, and all past the one that crosses mass top_p, to -inf."""
    if top_k:
        kth = logits.topk(min(top_k, logits.size(-1)), -1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if top_p < 1:
        ordered, index = logits.double().sort(-1, descending=True)
        p = ordered.softmax(-1)
        before = p.cumsum(-1) - p                       # mass ahead of a token: 0 for the first
        drop = torch.zeros_like(before, dtype=torch.bool).scatter(-1, index, before >= top_p)
        logits = logits.masked_fill(drop, float("-inf"))
    return logits


LOGITS = 2 ** 24                        # of one row at a time, where all positions need them
ORDER, TIME = -1, -2                    # what ops.uniform is asked for
MANY_STEPS = 64                         # so many after the first are not joined to one CUDA graph


class ActiveBlock:
    """
    The block being unmasked and how far its decoder has come. A step has fixed shapes, changes these
    tensors in place and never waits for the device, so that it can be a CUDA graph. What one reveals:

    random         the next p positions of a random order; p = 1 is exact ancestral sampling
    confidence     the p positions whose drawn token is most probable
    threshold      every position whose drawn token is at least so probable, and the most probable
    first_hitting  one random position at the time at which the reverse process first unmasks one
    """

    def __init__(self, b, l, sampler, device, timed=True):
        """timed: whether anybody wants to know t"""
        self.sampler, self.p, self.timed = sampler, min(sampler.tokens_per_step, l), timed
        self.xt = torch.full((b, l), sampler.mask_id, device=device)           # known, or the mask
        self.t = torch.ones(b, dtype=torch.float64, device=device)
        self.order = torch.arange(l + -l % self.p + self.p, device=device).repeat(b, 1) % l    # a step more
        self.at = self.order[:, :self.p].clone()        # what the next step reveals
        # p more with each step; and the number of tokens before the block. Draws depend on both.
        self.step, self.begin = torch.zeros(2, b, dtype=torch.long, device=device)
        self.key = torch.tensor(sampler.seeds, device=device), self.step, self.begin

    def start(self, xt, begin):
        """Takes on xt (b, l), which `begin` (b,) tokens precede, and draws the order of its positions."""
        sampler, l = self.sampler, xt.size(1)
        self.xt.copy_(xt)
        self.begin.copy_(begin)
        self.step.zero_()
        masked = self.xt == sampler.mask_id
        if self.timed:
            self.t.copy_(masked.double().mean(1))
        if sampler.order in ("random", "first_hitting"):
            ranks = ops.uniform(l, ORDER, *self.key)
            self.order[:, :l] = ranks.masked_fill(~masked, 2).argsort(1)       # known tokens last
            self.order[:, l:] = self.order[:, :1]       # fills the last step up: known by then
            self.at.copy_(self.order[:, :self.p])

    def rewind(self):
        """Back to the first step of the order."""
        self.step.zero_()
        self.at.copy_(self.order[:, :self.p])

    def reveal(self, score):
        """One step. score(xt, t, at) -> a function that makes logits (b, m, v - 1), without the mask's, of a
        slice of the positions at (b, n), None for all of them; t (b,) is the masked fraction of each row, or
        None."""
        sampler, xt = self.sampler, self.xt
        if self.timed and sampler.order == "first_hitting":     # the largest of m uniforms on (0, t)
            u = ops.uniform(1, TIME, *self.key)[:, 0]
            self.t *= u ** (1 / (xt == sampler.mask_id).sum(1).clamp(min=1))
        elif self.timed:
            self.t.copy_((xt == sampler.mask_id).double().mean(1))
        at = self.at if sampler.order in ("random", "first_hitting") else None
        logits_of = score(xt, self.t.float() if self.timed else None, at)
        if at is not None:
            drawn = sampler.pick(logits_of(slice(None)), at, *self.key)
            ops.unmask(xt, at, drawn, sampler.mask_id, self.order, self.step)
        else:
            masked = xt == sampler.mask_id
            drawn, chosen = self.surest(logits_of, masked)
            torch.where(chosen & masked, drawn, xt, out=xt)
            self.step += self.p

    def surest(self, logits_of, masked):
        """Draws a token for every position, and says which are revealed for their probability: both
        (b, l). Logits are made for a few positions at a time: a window may have 65,536."""
        sampler, drawn, sure = self.sampler, [], []
        positions = torch.arange(masked.size(1), device=masked.device).expand_as(masked)
        few = max(1, LOGITS // (sampler.mask_id + 1))
        for i in range(0, masked.size(1), few):
            some = slice(i, i + few)
            logits = logits_of(some)                                           # (b, m, v - 1)
            drawn.append(sampler.pick(logits, positions[:, some], *self.key))
            p = logits.softmax(-1, dtype=ops.at_least_fp32(logits.dtype))
            sure.append(p.gather(2, drawn[-1][..., None])[..., 0])
        drawn, sure = (x[0] if len(x) == 1 else torch.cat(x, 1) for x in (drawn, sure))
        sure = torch.where(masked, sure, -1)
        if sampler.order == "threshold":
            return drawn, (sure >= sampler.threshold) | (positions == sure.argmax(1, keepdim=True))
        return drawn, torch.zeros_like(masked).scatter_(1, sure.topk(self.p, 1).indices, True)

    def finish(self, step, counts, on_step=None):
        """Calls step() until nothing is masked; counts: masked tokens of each row. Only order=threshold has
        to ask the device, once a step, how many tokens are left; a BlockGraph need not."""
        while any(n > 0 for n in counts):
            step()
            if self.sampler.order == "threshold":
                counts = (self.xt == self.sampler.mask_id).sum(1).tolist()
            else:
                counts = [n - self.p for n in counts]
            if on_step:
                on_step(self.xt)
        return self.xt


def decode_block(xt, logits_fn, sampler, on_step=None, begin=0):
    """
    Unmasks one block, the plain way. xt (b, l): known tokens, or the mask. logits_fn(xt, t) ->
    (b, l, v), t (b,) the masked fraction of each row. begin, or (b,): how many tokens precede it, for
    draws. Returns x0 (b, l) without masks. Known tokens never change. on_step(xt) sees the block after
    every step, in a tensor that the next one changes.
    """
    block = ActiveBlock(*xt.shape, sampler, xt.device)
    block.start(xt, torch.as_tensor(begin))

    def score(xt, t, at):
        logits = take(logits_fn(xt, t)[..., :sampler.mask_id], at)
        return lambda some: logits[:, some]

    counts = (xt == sampler.mask_id).sum(1).tolist()
    return block.finish(lambda: block.reveal(score), counts, on_step)


# ---------------------------------------------------------------------------------------------
# The engine

class BlockDecoder(ActiveBlock):
    """
    The fast engine: a step reads the prefix length on the device, so on a GPU it is one CUDA graph, and all
    steps of a block are, too. Three exact savings: the commit of a finished block is one pass with the first
    step of the next; in a random order the last layer's outputs and the head are made for the p positions
    alone that may be revealed; weights are those of `prepare_for_inference`. Draws are those of
    `decode_block`.
    """

    def __init__(self, model, cache, sampler, block_len, graphs):
        super().__init__(len(sampler.seeds), block_len, sampler, model.embed.weight.device,
                         model.config.time_conditioning)
        self.model, self.cache = model, cache
        self.finished = self.xt.clone()                 # the block before, to be committed
        self.total = torch.zeros((), dtype=torch.long, device=self.xt.device)       # p for every step so far
        self.graphs, self.blocks = {}, {}               # {commit: CUDA graph} of a step, of all steps
        if graphs:
            self.capture()

    @property
    def passes(self):
        """Forward passes so far; asks the device."""
        return int(self.total) // self.p

    def denoise(self, commit):
        """One denoising step, after committing the finished block if `commit`."""
        def score(xt, t, at):
            if commit:
                hidden = self.model.commit_and_denoise_hidden(self.finished, xt, self.cache, t, at)
            else:
                hidden = self.model.denoise_hidden(xt, self.cache, t, at)
            return lambda some: self.model.token_logits(hidden[:, some])
        self.reveal(score)

    def capture(self):
        """Records both kinds of step as CUDA graphs. The cache must be empty, and is afterwards."""
        for commit in (False, True) if self.cache.max_len else (False,):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):               # compiles, tunes, fills lazy tables
                for _ in range(2):
                    self.clear()
                    self.denoise(commit)
            torch.cuda.current_stream().wait_stream(side)
            self.clear()
            self.graphs[commit] = record(self.denoise, commit)
        self.clear()
        try:
            self.join()
        except (RuntimeError, ImportError) as error:
            say_once(f"steps are launched one by one: {error}")

    def join(self):
        """Makes a graph of all steps of a block that is masked throughout, unless they are many."""
        steps, check = -(-self.xt.size(1) // self.p) - 1, None
        if self.sampler.order == "threshold":
            import kernels_draw
            steps, check = None, lambda handle: kernels_draw.go_on(handle, self.xt, self.sampler.mask_id)
            check(torch.zeros((), dtype=torch.long, device=self.xt.device))    # compiles
        elif steps >= MANY_STEPS:
            return
        self.blocks = {commit: BlockGraph(first, self.graphs[False], steps, check)
                       for commit, first in self.graphs.items()}

    def clear(self):
        self.rewind()
        self.cache.clear()

    def decode(self, xt, commit, counts, on_step=None):
        """Unmasks xt (b, l), which has `counts` masked tokens: a number, or one for each row.
        `commit` appends the block decoded before it first. Returns x0 (b, l), a tensor that the next
        call overwrites; on_step as in `decode_block`."""
        def step():
            nonlocal commit
            self.graphs[commit].replay() if self.graphs else self.denoise(commit)
            commit = False

        self.finished.copy_(self.xt)
        self.start(xt, self.cache.lengths + xt.size(1) if commit else self.cache.lengths)
        counts = torch.as_tensor(counts).expand(len(xt)).tolist()
        if self.blocks and not on_step and (min(counts) == xt.size(1) or self.sampler.order == "threshold"):
            self.blocks[commit].launch()
        else:
            self.finish(step, counts, on_step)
        self.total += self.step[0]
        return self.xt


@dataclasses.dataclass
class Generation:
    """What `generate` returns: per row the tokens (prompt first), and what it took."""
    tokens: list                        # of 1-D int64 tensors
    forward_passes: int                 # denoising steps and commits, prompt excluded
    seconds: float
    cache_bytes: int


@torch.no_grad()
def generate(model, prompts, length, sampler, stop_token=None, on_block=None, on_step=None,
             engine="auto", prefix=None, on_read=None):
    """
    Continues every prompt by `length` tokens.

    prompts: list of 1-D int64 tensors, possibly of different lengths; sampler: Sampler with one seed
    per prompt; stop_token: end a row after it. on_block(row, tokens) is called with the
    new tokens of a row after each block, on_step(xt) after each denoising step, on_read(n) whenever
    n more tokens of a prompt have been read. engine: "simple", "fused" (BlockDecoder), "graphs"
    (the same in CUDA graphs), or "auto": see `make_decoder`. prefix: a Prefix that comes before
    every prompt, which may then be empty; rows begin with its tokens. A prompt's last, incomplete
    block starts out as the known part of the active block. Raises ModelError when the result would
    not fit the rotary capacity, ConfigError for an engine that cannot run.
    """
    c, device = model.config, model.embed.weight.device
    if prefix is not None:
        prompts = [torch.cat([prefix.tokens, p.cpu()]) for p in prompts]
    totals = [len(p) + length for p in prompts]
    l, starts, n_blocks = plan(c, prompts, length)
    if len(sampler.seeds) != len(prompts):
        raise ConfigError(f"the sampler has {len(sampler.seeds)} seeds; give it {len(prompts)}, one for each prompt")
    cache = model.new_cache(len(prompts), max(starts) + (n_blocks - 1) * l, l)
    decoder = make_decoder(engine, model, cache, sampler, l)
    rows = read_prompts(model, cache, prompts, starts, prefix, on_read)
    active = torch.full((len(rows), l), c.mask_id, device=device)
    for i, (prompt, start) in enumerate(zip(prompts, starts)):
        active[i, :len(prompt) - start] = prompt[start:]
    unknown = (active == c.mask_id).sum(1).tolist()
    started, passes, ended = now(device), 0, [False] * len(rows)

    def logits_fn(xt, t):
        nonlocal passes
        passes += 1
        return model.denoise(xt, cache, t)

    for block in range(n_blocks):
        if decoder:
            x0 = decoder.decode(active, block > 0, l if block else unknown, on_step)
        else:
            if block:
                model.commit(x0, cache)
                passes += 1
            x0 = decode_block(active, logits_fn, sampler, on_step, cache.lengths)
        for i in range(len(rows)):
            known = max(len(prompts[i]), len(rows[i]))
            rows[i] = torch.cat([rows[i], x0[i]])[:totals[i]]
            new = rows[i][known:]
            if stop_token is not None and not ended[i] and (new == stop_token).any():
                totals[i] = known + int((new == stop_token).nonzero()[0]) + 1
                rows[i], ended[i] = rows[i][:totals[i]], True
            if on_block:
                on_block(i, rows[i][known:])
        if all(len(row) == total for row, total in zip(rows, totals)):
            break
        active.fill_(c.mask_id)
    passes = decoder.passes if decoder else passes
    return Generation(rows, passes, now(device) - started, cache.nbytes)


def now(device):
    """Seconds, when all work given to the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.time()


def plan(config, prompts, length):
    """(block length, where each row's first active block starts, number of blocks). Raises ModelError
    before any work for a request that cannot be served."""
    totals = [len(p) + length for p in prompts]
    if length < 1:
        raise ModelError(f"length is {length}; ask for at least 1 token")
    if config.full_sequence and min(totals) != max(totals):
        raise ModelError("a full-sequence model takes prompts of one length at a time")
    l = max(totals) if config.full_sequence else config.block_len
    starts = [len(p) // l * l for p in prompts]
    n_blocks = max(-(-(total - start) // l) for total, start in zip(totals, starts))
    end = max(max(starts) + n_blocks * l, *totals)
    if end > config.rope_capacity:
        raise ModelError(f"prompt and length make {end} tokens in whole blocks, beyond the rotary "
                         f"capacity of {config.rope_capacity}; ask for a shorter length or prompt")
    return l, starts, n_blocks


def read_prompts(model, cache, prompts, starts, prefix, on_read=None):
    """Prefills every row up to its start, what `prefix` or an equal prompt has been read for by
    copying. Returns the tokens that the rows hold."""
    rows = []
    for i, (prompt, start) in enumerate(zip(prompts, starts)):
        mine, known = cache.rows(i, i + 1), prefix.cache if prefix else None
        for j in range(i):
            if torch.equal(prompts[j], prompt):
                known = cache.rows(j, j + 1)
        if known is not None:
            copy_row(known, mine)
        rows.append(prompt[:start].to(cache.lengths.device))
        model.prefill(rows[i][None, int(mine.lengths):], mine, on_chunk=on_read)
    return rows


def make_decoder(wanted, model, cache, sampler, block_len):
    """
    The BlockDecoder of an engine, None for "simple". "auto" is graphs on a GPU and simple elsewhere;
    on a GPU without what graphs need, the same steps run without them and the reason is printed once.
    A demand for graphs is then a ConfigError. Every engine serves every decoder and every request.
    """
    check(dict(engine=wanted), choices=dict(engine=ENGINES))
    if wanted == "simple" or (wanted == "auto" and not model.embed.weight.is_cuda):
        return None
    why = why_no_graphs(model)
    if wanted != "fused" and not why:
        try:
            return BlockDecoder(model, cache, sampler, block_len, True)
        except RuntimeError as error:
            why = f"one could not be recorded: {str(error).splitlines()[0]}"
            cache.clear()
    if wanted == "graphs":
        raise ConfigError(f"no CUDA graphs: {why}")
    if wanted == "auto":
        say_once(f"no CUDA graphs: {why}")
    return BlockDecoder(model, cache, sampler, block_len, False)


def why_no_graphs(model):
    """What stands in the way of CUDA graphs; empty if nothing does."""
    if not model.embed.weight.is_cuda:
        return "the model is on the CPU; choose another engine"
    if ops.KERNELS["cached"] != "triton" and not model.config.full_sequence:
        return "they need the Triton kernels (--kernels=auto, pip install triton)"
    return ""


@functools.lru_cache(maxsize=None)
def say_once(text):
    print(text, file=sys.stderr)


# ---------------------------------------------------------------------------------------------
# The script

BAR_DELAY = 2                           # seconds for which no bar is shown

def check_settings():
    """Raises for whatever can be seen to be wrong before a model is loaded and a prompt is read."""
    check(globals(), least=dict(length=1, num_samples=1, seed=0), below=dict(seed=2 ** 63),
          choices=dict(dtype=("auto", "float32", "bfloat16"), engine=ENGINES))
    check_decoder(dict(globals(), tokens_per_step=tokens_per_step or 1))
    check_file("save_cache", save_cache)


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
        return model, get_tokenizer("bytes" if c.vocab_size == 258 else "gpt2")
    if init:
        raise ConfigError(f"init is '{init}'; it is empty or 'random'")
    path = checkpoint or os.path.join(out_dir, "ckpt.pt")
    path = os.path.join(path, "ckpt.pt") if os.path.isdir(path) else path
    if not os.path.exists(path):
        raise ModelError(f"there is no checkpoint at {path}; make one with python train.py, or run "
                         f"--init=random --model_config=config/laptop.py")
    model, record = load_model(path, device)
    return model, get_tokenizer(record["tokenizer"])


def read_text():
    """The text of --prompt or --prompt_file, empty where there is none."""
    if prompt and prompt_file:
        raise ConfigError("prompt and prompt_file are both given; leave one out")
    try:
        if not prompt_file:
            return prompt.encode().decode()
        with open(prompt_file, encoding="utf-8") as f:
            return f.read()
    except UnicodeError as error:
        raise DataError(f"{prompt_file or 'the prompt'} is not UTF-8 (byte {error.start}); convert it, for "
                        f"example with iconv") from error


class Printer:
    """
    Shows the prompt, after a bar while a long one is read, and the generated text as it comes. Under the
    text, on a terminal's stderr, stand its progress and with --watch the active block.
    """

    def __init__(self, tokenizer, prompt, unread, known, total, mask_id):
        """prompt: its text; unread: how many of its tokens will be read into the cache; known: how many
        tokens of the first active blocks are the prompt's; total: tokens to be generated."""
        self.tokenizer, self.prompt, self.mask_id = tokenizer, prompt, mask_id
        self.unread, self.known, self.total, self.made = unread, known, total, 0
        self.started = self.shown = time.time()
        self.live = sys.stderr.isatty()
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
    from train import pick_device
    check_settings()
    text, dev = read_text(), pick_device(device)
    chosen = ops.select_kernels(kernels, dev)
    model, tokenizer = open_model(dev)
    n_params, c = model.n_params, model.config
    low = dtype == "bfloat16" or (dtype == "auto" and dev == "cuda")
    prepare_for_inference(model, torch.bfloat16 if low else torch.float32)
    if compile and dev == "cuda":
        model.compile_layers("denoise", "commit_and_denoise")
    prefix = load_prefix(load_cache, model) if load_cache else None
    start = [] if prefix else [tokenizer.eot_token]     # of a new document
    tokens = torch.tensor(tokenizer.encode_ordinary(text) or start, dtype=torch.long)
    whole = torch.cat([prefix.tokens, tokens]) if prefix else tokens
    _, (start, *_), _ = plan(c, [whole] * num_samples, length)
    block = len(whole) + length if c.full_sequence else c.block_len
    seeds = [(seed + i) % 2 ** 63 for i in range(num_samples)]
    sampler = Sampler(seeds, order, tokens_per_step or max(block // 16, 1), threshold, temperature,
                      top_k, top_p, c.mask_id)
    if save_cache:
        need_cache(model)
    if engine == "graphs" and (why := why_no_graphs(model)):
        raise ConfigError(f"no CUDA graphs: {why}")
    print(f"{n_params:,} parameters on {dev}, {chosen}, order {order}, "
          f"{sampler.tokens_per_step} tokens a step, seed {seed}", file=sys.stderr)
    shown = tokenizer.decode(whole[whole != tokenizer.eot_token].tolist())
    printer = Printer(tokenizer, shown, start - (prefix.cache.max_len if prefix else 0),
                      (len(whole) - start) * num_samples, length * num_samples, c.mask_id)
    try:
        printer.read(0)
        if save_cache:
            prefix, tokens = read_prefix(model, tokens, prefix, printer.read), tokens[:0]
            save_prefix(save_cache, model, prefix)
        out = generate(model, [tokens] * num_samples, length, sampler,
                       tokenizer.eot_token if stop_at_eot else None, printer.block,
                       printer.step if watch or (printer.live and c.full_sequence) else None, engine, prefix,
                       printer.read)
    except KeyboardInterrupt:
        printer.clear()
        print(f"\nstopped after {printer.made} tokens", file=sys.stderr)
        sys.exit(130)
    printer.clear()
    print()
    for i, row in enumerate(out.tokens[1:], 2):
        print(f"\n--- sample {i} ---\n{shown}{tokenizer.decode(row[len(whole):].tolist())}")
    made = sum(len(row) for row in out.tokens) - len(whole) * num_samples
    print(f"{made} tokens in {out.seconds:.2f} s: {made / out.seconds:.1f} tokens/s, "
          f"{out.forward_passes} forward passes, cache {out.cache_bytes / 2**20:.2f} MiB",
          file=sys.stderr)


if __name__ == "__main__":
    with script("sample.py", DataError, ModelError, ops.KernelError):
        sys.stdout.reconfigure(errors="replace")        # of what a terminal's encoding lacks
        configure(globals())
        main()
