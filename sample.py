"""
Cached block generation: denoise one block, append it to the cache, go on (eq. bdlm-kv-cache and
eq. partial-reverse). All four models; a full-sequence model is one block as long as the window.

    python sample.py                                            # continue from out/ckpt.pt
    python sample.py --prompt "def " --length 1000 --watch      # see each block being unmasked

`generate` is the engine to import; `decode_block` is where a new decoder goes.
"""
import codecs
import dataclasses
import math
import os
import sys
import time

import torch
import torch.nn.functional as F

import ops
from configurator import ConfigError, configure
from data import DataError, get_tokenizer
from model import (BiMamba, BlockDiffusionLM, ModelError, config_from_file, gated_norm,
                   load_model)

# ---------------------------------------------------------------------------------------------
# Settings
out_dir = "out"                         # where train.py wrote ckpt.pt
checkpoint = ""                         # another checkpoint file
init = ""                               # "random": untrained weights of model_config
model_config = ""                       # a file of config/, for --init=random
prompt = ""                             # text to continue; empty: a new document
prompt_file = ""                        # or a UTF-8 file that holds it
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


@dataclasses.dataclass
class Sampler:
    """
    How masked tokens become text. `generators`: one torch.Generator per row, so that a row's draws
    do not depend on the rows beside it. Generators on the CPU make draws independent of the device;
    CUDA graphs need generators on the GPU.
    """
    generators: list
    order: str = "random"
    tokens_per_step: int = 16
    threshold: float = 0.9
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    mask_id: int = None

    def __post_init__(self):
        if self.order not in ("random", "confidence", "threshold", "first_hitting"):
            raise ConfigError(f"order '{self.order}' is not one of random, confidence, threshold, "
                              f"first_hitting")
        if self.tokens_per_step < 1 or self.temperature < 0 or not 0 < self.top_p <= 1:
            raise ConfigError("tokens_per_step must be at least 1, temperature at least 0, and top_p "
                              "in (0, 1]")

    def uniform(self, *shape, device, active=None):
        """(b, *shape) fp64 uniforms, row i from generators[i]. fp32 noise would truncate the tail of
        the Gumbel distribution and sharpen samples (arXiv 2409.02908). Rows that are not active get
        0.5 and draw nothing, so that waiting for another row changes nothing."""
        active = [True] * len(self.generators) if active is None else active.tolist()
        rows = [torch.rand(*shape, generator=g, dtype=torch.float64, device=g.device) if on else
                torch.full(shape, 0.5, dtype=torch.float64, device=g.device)
                for g, on in zip(self.generators, active)]
        return torch.stack(rows).to(device)

    def pick(self, logits, active=None):
        """Draws tokens (b, m) from logits (b, m, v) by Gumbel-argmax, after temperature and cuts."""
        if self.temperature == 0:
            return logits.argmax(-1)
        logits = cut(logits.double() / self.temperature, self.top_k, self.top_p)
        u = self.uniform(*logits.shape[1:], device=logits.device, active=active)
        return (logits - torch.log(-torch.log(u))).argmax(-1)


def cut(logits, top_k, top_p):
    """Sets all but the top_k tokens, and all past the one that crosses mass top_p, to -inf."""
    if top_k:
        kth = logits.topk(min(top_k, logits.size(-1)), -1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if top_p < 1:
        ordered, index = logits.sort(-1, descending=True)
        p = ordered.softmax(-1)
        before = p.cumsum(-1) - p                       # mass ahead of a token: 0 for the first
        drop = torch.zeros_like(before, dtype=torch.bool).scatter(-1, index, before >= top_p)
        logits = logits.masked_fill(drop, float("-inf"))
    return logits


def decode_block(xt, logits_fn, sampler, on_step=None):
    """
    Unmasks one block. xt (b, l): known tokens, or the mask. logits_fn(xt, t) -> (b, l, v), t (b,)
    the masked fraction of each row. Returns x0 (b, l) without masks. Known tokens never change.

    random         the next p positions of a random order; p = 1 is exact ancestral sampling
    confidence     the p positions whose drawn token is most probable
    threshold      every position whose drawn token is at least so probable, and the most probable
    first_hitting  one random position at the time at which the reverse process first unmasks one
    """
    b, l = xt.shape
    xt, device = xt.clone(), xt.device
    hitting = sampler.order == "first_hitting"
    p = 1 if hitting else min(sampler.tokens_per_step, l)
    if sampler.order in ("random", "first_hitting"):
        ranks = sampler.uniform(l, device=device)
        order = ranks.masked_fill(xt != sampler.mask_id, 2).argsort(1)         # known tokens last
    t = (xt == sampler.mask_id).double().mean(1)
    done = 0
    while (masked := xt == sampler.mask_id).any():
        active = masked.any(1)
        if hitting:                                     # the largest of m uniforms on (0, t)
            u = sampler.uniform(1, device=device, active=active)[:, 0]
            t = t * u ** (1 / masked.sum(1).clamp(min=1))
        else:
            t = masked.double().mean(1)
        logits = logits_fn(xt, t.float())
        if sampler.order in ("random", "first_hitting"):
            at = order[:, done:done + p]                                       # (b, p)
            seen = logits.gather(1, at[..., None].expand(-1, -1, logits.size(-1)))
            drawn = sampler.pick(seen, active)
            reveal = torch.zeros_like(masked).scatter(1, at, True) & masked
            x0 = xt.scatter(1, at, drawn)
            done += p
        else:
            x0 = sampler.pick(logits, active)                                  # (b, l)
            sure = logits.softmax(-1).gather(2, x0[..., None])[..., 0].masked_fill(~masked, -1)
            best = sure.topk(1 if sampler.order == "threshold" else p, 1).indices
            reveal = torch.zeros_like(masked).scatter(1, best, True)
            if sampler.order == "threshold":
                reveal |= sure >= sampler.threshold
            reveal &= masked
        xt = torch.where(reveal, x0, xt)
        if on_step:
            on_step(xt)
    return xt


# ---------------------------------------------------------------------------------------------
# Weights for generation: exact savings that training cannot have

class MergedMamba:
    """
    Both directions of a BiMamba as one mixer of double width: one projection in, one convolution, one
    scan, one projection out, whose product does the sum. Direction is a leading axis of two.
    """

    @torch.no_grad()
    def __init__(self, mixer, dtype):
        pair, f = (mixer.fwd, mixer.rev), mixer.fwd
        self.heads, self.d_inner, self.d_state, self.chunk_len = f.heads, f.d_inner, f.d_state, f.chunk_len
        self.inner = f.in_proj.out_features             # widths of z, x, B and C
        rows = [m.in_proj.weight for m in pair] + [m.dt_proj.weight for m in pair]
        rows.append(rows[0].new_zeros(-2 * (self.inner + f.heads) % 64, rows[0].size(1)))
        self.w_in = torch.cat(rows).to(dtype)
        self.w_out = torch.cat([m.out_proj.weight for m in pair], 1).to(dtype)
        self.conv_weight = torch.cat([m.conv_weight for m in pair]).to(dtype)  # (2 c, w)
        self.conv_bias = torch.cat([m.conv_bias for m in pair]).to(dtype)
        self.norm = torch.stack([m.norm_weight for m in pair])[:, None, None].to(dtype)
        exact = ops.at_least_fp32(dtype)
        self.dt_bias = torch.stack([m.dt_bias for m in pair])[:, None, None].to(exact)
        self.A = torch.stack([-torch.exp(m.A_log.to(exact)) for m in pair])    # (2, h)
        self.D = torch.stack([m.D for m in pair]).to(exact)

    def __call__(self, u, conv, ssm):
        """BiMamba.scan_both(u, conv, ssm); u (b, l, d)."""
        (b, l, _), h, di, n, inner = u.shape, self.heads, self.d_inner, self.d_state, self.inner
        proj = F.linear(u, self.w_in)
        fwd, rev, dt = proj[..., :inner], proj[..., inner:2 * inner], proj[..., 2 * inner:]
        rev = rev.flip(1)
        z = torch.stack([fwd[..., :di], rev[..., :di]])                        # (2, b, l, di)
        dt = torch.stack([dt[..., :h], dt[..., h:2 * h].flip(1)])              # (2, b, l, h)
        start = torch.cat([conv, torch.zeros_like(conv)], -1).to(u.dtype)
        xBC = torch.cat([fwd[..., di:], rev[..., di:]], -1)                    # (b, l, 2 c)
        xBC = ops.causal_conv(xBC, self.conv_weight, self.conv_bias, start)
        xBC = xBC.unflatten(-1, (2, -1)).permute(2, 0, 1, 3).flatten(0, 1)     # (2 b, l, c)
        x, B, C = xBC.split([di, n, n], -1)
        dt = F.softplus(dt.to(self.dt_bias.dtype) + self.dt_bias).flatten(0, 1)
        ssm = torch.cat([ssm, torch.zeros_like(ssm)])
        A, D = (v[:, None].expand(2, b, h).reshape(2 * b, h) for v in (self.A, self.D))
        y, _ = ops.ssd_scan(x.unflatten(-1, (h, -1)), dt, A, B, C, D, ssm, want_states=False,
                            chunk_len=self.chunk_len)
        y = gated_norm(y.reshape(2, b, l, di), z, self.norm)
        return F.linear(torch.cat([y[0], y[1].flip(1)], -1), self.w_out)


@torch.no_grad()
def fold_norm(norm, shift, scale):
    """Makes a LayerNorm include the modulation x * (1 + scale) + shift of what it returns."""
    if shift is not None:
        bias = shift if norm.bias is None else norm.bias * (1 + scale) + shift
        norm.weight.mul_(1 + scale)
        norm.bias = torch.nn.Parameter(bias.clone())


@torch.no_grad()
def fold_layer(layer, c):
    """Folds the modulation by a constant c into a layer's norms and the projections that are gated."""
    shift, scale, gate, shift2, scale2, gate2 = (
        None if p is None else p.flatten() for p in layer.modulation(c))
    fold_norm(layer.norm1, shift, scale)
    fold_norm(layer.norm2, shift2, scale2)
    if gate is not None:
        layer.mixer.out_proj.weight.mul_(gate[:, None])
        layer.mlp[2].weight.mul_(gate2[:, None])
        layer.mlp[2].bias.mul_(gate2)


@torch.no_grad()
def prepare_for_inference(model, dtype):
    """
    After this a model can be neither trained nor saved. Without timestep conditioning, the constant
    modulation goes into norms and projections; the two Mamba directions become one mixer; projections
    and head get aligned widths; weights become dtype, but for A, dt and D. Returns the model.
    """
    if not model.config.time_conditioning:
        c = model.condition(None)
        for layer in model.layers:
            fold_layer(layer, c)
        fold_norm(model.norm, *(p.flatten() for p in model.adaln(c).chunk(2, -1)))
        model.folded = True
    for layer in model.layers:
        if isinstance(layer.mixer, BiMamba):
            layer.mixer.merged = MergedMamba(layer.mixer, dtype)
            layer.mixer.fwd.joined = layer.mixer.fwd.join_projections().to(dtype)
    pad = (0, 0, 0, -model.config.vocab_size % 64)
    model.head.weight = torch.nn.Parameter(F.pad(model.head.weight, pad))
    for name, p in model.named_parameters():
        if not name.endswith(("A_log", "dt_bias", ".D")):
            p.data = p.data.to(dtype)
    return model.eval()


# ---------------------------------------------------------------------------------------------
# The engine

class BlockDecoder:
    """
    The fast engine for order=random: every step has fixed shapes, reads the prefix length on the
    device and never waits for the host, so on a GPU a step is one CUDA graph. Three exact savings:
    the commit of a finished block is one pass with the first step of the next; the head sees only
    the p positions that may be revealed; weights are those of `prepare_for_inference`.
    Draws are those of `decode_block`, in the same order.
    """

    def __init__(self, model, cache, sampler, block_len, graphs):
        b, device = len(sampler.generators), model.embed.weight.device
        self.model, self.cache, self.sampler = model, cache, sampler
        self.xt = torch.full((b, block_len), sampler.mask_id, device=device)
        self.finished = self.xt.clone()                 # the block before, to be committed
        self.order = torch.arange(block_len, device=device).repeat(b, 1)      # positions as revealed
        self.done = torch.zeros(b, 1, dtype=torch.long, device=device)
        self.graphs = {}
        if graphs:
            self.capture()

    def step(self, commit):
        """One denoising step, after committing the finished block if `commit`."""
        sampler, p = self.sampler, self.sampler.tokens_per_step
        t = (self.xt == sampler.mask_id).double().mean(1).float()
        if commit:
            hidden = self.model.commit_and_denoise_hidden(self.finished, self.xt, self.cache, t)
        else:
            hidden = self.model.denoise_hidden(self.xt, self.cache, t)
        at = self.order.gather(1, self.done + torch.arange(p, device=self.xt.device))
        hidden = hidden.gather(1, at[..., None].expand(-1, -1, hidden.size(-1)))
        drawn, known = sampler.pick(self.model.logits(hidden)), self.xt.gather(1, at)
        self.xt.scatter_(1, at, torch.where(known == sampler.mask_id, drawn, known))
        self.done += p

    def capture(self):
        """Records both kinds of step as CUDA graphs. The cache must be empty, and is afterwards."""
        states = [g.get_state() for g in self.sampler.generators]
        for commit in (False, True) if self.cache.max_len else (False,):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):               # compiles, tunes, fills lazy tables
                for _ in range(2):
                    self.clear()
                    self.step(commit)
            torch.cuda.current_stream().wait_stream(side)
            self.clear()
            graph = torch.cuda.CUDAGraph()
            for g in self.sampler.generators:
                graph.register_generator_state(g)
            with torch.cuda.graph(graph):
                self.step(commit)
            self.graphs[commit] = graph
        self.clear()
        for g, state in zip(self.sampler.generators, states):
            g.set_state(state)

    def clear(self):
        self.done.zero_()
        self.cache.clear()

    def decode(self, xt, commit, count):
        """Unmasks xt (b, l), `count` masked tokens in its fullest row. `commit` appends the block
        decoded before it first. Returns x0 (b, l), a tensor that the next call overwrites."""
        self.finished.copy_(self.xt)
        self.xt.copy_(xt)
        ranks = self.sampler.uniform(xt.size(1), device=xt.device)
        self.order.copy_(ranks.masked_fill(xt != self.sampler.mask_id, 2).argsort(1))
        self.done.zero_()
        steps = -(-count // self.sampler.tokens_per_step)
        for i in range(steps):
            now = commit and i == 0
            self.graphs[now].replay() if self.graphs else self.step(now)
        return self.xt


@dataclasses.dataclass
class Generation:
    """What `generate` returns: per row the tokens (prompt first), and what it took."""
    tokens: list                        # of 1-D int64 tensors
    forward_passes: int                 # denoising steps and commits, prompt excluded
    seconds: float
    cache_bytes: int


@torch.no_grad()
def generate(model, prompts, length, sampler, stop_token=None, on_block=None, on_step=None, engine="auto"):
    """
    Continues every prompt by `length` tokens.

    prompts: list of 1-D int64 tensors, possibly of different lengths; sampler: Sampler with one
    generator per prompt; stop_token: end a row after it. on_block(row, tokens) is called with the
    new tokens of a row after each block, on_step(xt) after each denoising step. engine: "simple",
    "fused" (BlockDecoder), "graphs" (the same in CUDA graphs), or "auto": graphs on CUDA and simple
    elsewhere, and simple where the order or ragged rows ask for it. A prompt's last, incomplete block
    starts out as the known part of the active block. Raises ModelError when the result would not fit
    the rotary capacity.
    """
    c, device = model.config, model.embed.weight.device
    totals = [len(p) + length for p in prompts]
    l = max(totals) if c.full_sequence else c.block_len
    check_request(c, prompts, length)
    rows, starts = [p.to(device) for p in prompts], [len(p) // l * l for p in prompts]
    n_blocks = max(-(-(total - start) // l) for total, start in zip(totals, starts))
    cache = model.new_cache(len(rows), min(max(starts) + (n_blocks - 1) * l, c.rope_capacity), l)
    unknown = [l - len(row) + start for row, start in zip(rows, starts)]
    engine = choose_engine(engine, sampler, l, unknown, device, on_step)
    decoder = BlockDecoder(model, cache, sampler, l, engine == "graphs") if engine != "simple" else None
    active = torch.full((len(rows), l), c.mask_id, device=device)
    for i, start in enumerate(starts):
        model.prefill(rows[i][None, :start], cache.rows(i, i + 1))
        active[i, :len(rows[i]) - start] = rows[i][start:]
    rows = [row[:start] for row, start in zip(rows, starts)]
    if device.type == "cuda":
        torch.cuda.synchronize()
    started, passes, ended = time.time(), 0, [False] * len(rows)

    def logits_fn(xt, t):
        nonlocal passes
        passes += 1
        return model.denoise(xt, cache, t)

    for block in range(n_blocks):
        if decoder:
            count = max(unknown) if block == 0 else l
            x0 = decoder.decode(active, block > 0, count)
            passes += -(-count // sampler.tokens_per_step)
        else:
            if block:
                model.commit(x0, cache)
                passes += 1
            x0 = decode_block(active, logits_fn, sampler, on_step)
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
    if device.type == "cuda":
        torch.cuda.synchronize()
    return Generation(rows, passes, time.time() - started, cache.nbytes)


def check_request(config, prompts, length):
    """Raises ModelError before any work for a request that cannot be served."""
    totals = [len(p) + length for p in prompts]
    if length < 1:
        raise ModelError(f"length is {length}; ask for at least 1 token")
    if config.full_sequence and min(totals) != max(totals):
        raise ModelError("a full-sequence model takes prompts of one length at a time")
    if max(totals) > config.rope_capacity:
        raise ModelError(f"prompt and length make {max(totals)} tokens, beyond the rotary capacity of "
                         f"{config.rope_capacity}; ask for a shorter length")


def choose_engine(wanted, sampler, block_len, unknown, device, on_step):
    """"auto" -> the fastest engine that serves the request: see `generate`."""
    fits = (sampler.order == "random" and block_len % sampler.tokens_per_step == 0
            and min(unknown) == max(unknown) and on_step is None)
    if wanted in ("fused", "graphs") and not fits:
        raise ConfigError(f"the {wanted} engine needs order=random, tokens_per_step that divides the block, "
                          f"prompts of one length, and no watching")
    if wanted == "auto":
        on_device = all(g.device.type == "cuda" for g in sampler.generators)
        return "graphs" if fits and device.type == "cuda" and on_device else "simple"
    return wanted


# ---------------------------------------------------------------------------------------------
# The script

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
    if not os.path.exists(path):
        raise ModelError(f"there is no checkpoint at {path}; make one with python train.py, or run "
                         f"--init=random --model_config=config/laptop.py")
    model, record = load_model(path, device)
    return model, get_tokenizer(record["tokenizer"])


def read_prompt(tokenizer):
    """The prompt's tokens: the text of --prompt or --prompt_file, or a document's start."""
    text = prompt
    if prompt_file:
        try:
            with open(prompt_file, encoding="utf-8") as f:
                text = f.read()
        except OSError as error:
            raise DataError(f"cannot read the prompt file {prompt_file}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise DataError(f"{prompt_file} is not UTF-8 (byte {error.start}); convert it, for example "
                            f"with iconv") from error
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError("the prompt is not UTF-8; pass it with --prompt_file") from error
    tokens = tokenizer.encode_ordinary(text) or [tokenizer.eot_token]
    return torch.tensor(tokens)


class Printer:
    """Shows generated text as it comes, with a progress line on a terminal's stderr."""

    def __init__(self, tokenizer, total, mask_id):
        self.tokenizer, self.total, self.mask_id = tokenizer, total, mask_id
        self.started, self.made = time.time(), 0
        self.live = sys.stderr.isatty()
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def text(self, tokens):
        return self.tokenizer.decode_bytes(tokens.tolist())

    def block(self, row, tokens):
        self.made += len(tokens)
        if row == 0:
            self.clear()
            print(self.utf8.decode(self.text(tokens)), end="", flush=True)
        seconds = time.time() - self.started
        if self.live:
            eta = seconds * (self.total / max(self.made, 1) - 1)
            print(f"\n[{self.made}/{self.total} tokens, {self.made / seconds:.1f} tokens/s, "
                  f"ETA {eta:.0f} s]\x1b[A\r", end="", file=sys.stderr, flush=True)

    def step(self, xt):
        """--watch: the active block with its masks, redrawn in place."""
        cells = ["\u2591" if token == self.mask_id else
                 self.text(torch.tensor([token])).decode("utf-8", "replace") for token in xt[0].tolist()]
        line = "".join(cells).replace("\n", "\u23ce").replace("\t", " ")
        end = "\r" if self.live else "\n"
        print(f"\x1b[2K{line}" if self.live else line, end=end, file=sys.stderr, flush=True)
        time.sleep(0.02 if self.live else 0)

    def clear(self):
        if self.live:
            print("\x1b[J", end="", file=sys.stderr, flush=True)


def main():
    from train import pick_device
    dev = pick_device(device)
    model, tokenizer = open_model(dev)
    low = dtype == "bfloat16" or (dtype == "auto" and dev == "cuda")
    chosen, n_params = ops.select_kernels(kernels, dev), model.n_params
    prepare_for_inference(model, torch.bfloat16 if low else torch.float32)
    if compile and dev == "cuda":
        model.compile_layers("denoise", "commit_and_denoise")
    c = model.config
    tokens = read_prompt(tokenizer)
    block = len(tokens) + length if c.full_sequence else c.block_len
    p = tokens_per_step or max(block // 16, 1)
    generators = [torch.Generator(dev).manual_seed(seed + i) for i in range(num_samples)]
    sampler = Sampler(generators, order, p, threshold, temperature, top_k, top_p, c.mask_id)
    print(f"{n_params:,} parameters on {dev}, {chosen}, order {order}, "
          f"{p} tokens a step, seed {seed}", file=sys.stderr)
    printer = Printer(tokenizer, length * num_samples, c.mask_id)
    print(tokenizer.decode(tokens[tokens != tokenizer.eot_token].tolist()), end="", flush=True)
    try:
        out = generate(model, [tokens] * num_samples, length, sampler,
                       tokenizer.eot_token if stop_at_eot else None,
                       printer.block, printer.step if watch else None, engine)
    except KeyboardInterrupt:
        printer.clear()
        print(f"\nstopped after {printer.made} tokens", file=sys.stderr)
        sys.exit(130)
    printer.clear()
    print()
    for i, row in enumerate(out.tokens[1:], 2):
        print(f"\n--- sample {i} ---\n{tokenizer.decode(row.tolist())}")
    made = sum(len(row) for row in out.tokens) - len(tokens) * num_samples
    print(f"{made} tokens in {out.seconds:.2f} s: {made / out.seconds:.1f} tokens/s, "
          f"{out.forward_passes} forward passes, cache {out.cache_bytes / 2**20:.2f} MiB",
          file=sys.stderr)


if __name__ == "__main__":
    try:
        configure(globals())
        main()
    except (ConfigError, DataError, ModelError, ops.KernelError) as error:
        sys.exit(f"sample.py: {error}")
