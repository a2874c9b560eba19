"""
The fast engines: denoising steps with prepared weights (inference.py), on a GPU recorded as CUDA graphs.

`FastDecoder` has the methods of sample.Decoder and draws the same tokens. A step reads the prefix length on the device,
so the same graph serves every block, and the host only replays it.

    python -m pytest tests/test_sample.py -k fused              on a CPU, without graphs
    python -m pytest tests/kernels/test_gpu.py -k graphs        on a GPU
"""
import functools
import sys

import torch

import ops
from configurator import ConfigError
from decoders import ActiveBlock
from model import take


class FastDecoder:
    """
    Unmasks one block after another. `commit` only remembers the finished block: it is committed in one pass with the
    first step of the next, so cache.lengths is one block behind until then. Hence `begin`, and `flush` before anyone
    else reads the cache.
    """

    def __init__(self, model, cache, sampler, block_len, graphs):
        """model: what inference_model returns; cache: empty; graphs: whether to record the steps."""
        self.model, self.cache, self.passes, self.block_len = model, cache, 0, block_len
        self.block = ActiveBlock(len(sampler.seeds), block_len, sampler, cache.lengths.device,
                                 model.config.time_conditioning)
        self.finished, self.pending = self.block.xt.clone(), False
        self.graphs = {}                                # {whether it commits first: CUDA graph of a step}
        if graphs:
            self.capture()

    @property
    def engine(self):
        return "graphs" if self.graphs else "fused"

    @property
    def begin(self):
        """(b,) tokens before the active block."""
        return self.cache.lengths + self.block_len if self.pending else self.cache.lengths

    def decode(self, xt, n_masked, on_step=None):
        """As sample.Decoder.decode."""
        self.block.start(xt, self.begin)
        for _ in self.block.steps(n_masked):
            self.step()
            if on_step:
                on_step(self.block.xt)
        return self.block.xt

    def step(self):
        """One denoising step, and with it the commit that is pending."""
        if self.graphs:
            self.graphs[self.pending].replay()
        else:
            self.denoise(self.pending)
        self.pending = False
        self.passes += 1

    def commit(self, x0):
        """Takes the finished block x0 (b, l), to be committed with the next step."""
        self.flush()
        self.finished.copy_(x0)
        self.pending = True

    def flush(self):
        """Commits the finished block now, in a pass of its own."""
        if self.pending:
            self.model.commit(self.finished, self.cache)
            self.pending = False
            self.passes += 1

    def denoise(self, commit):
        """What a step launches. The last layer and the head work on the positions alone that may be revealed."""
        block, at = self.block, self.block.positions()
        t = block.noise_level()
        if commit:
            hidden = self.model.commit_and_denoise_hidden(self.finished, block.xt, self.cache, t, at)
        else:
            hidden = self.model.denoise_hidden(block.xt, self.cache, t, at)
        # If positions are known beforehand, hidden holds just these; else all, of which `reveal` asks for some at a time.
        held = hidden.size(1)
        block.reveal(lambda at: self.model.token_logits(hidden if at.size(1) == held else take(hidden, at)))

    def capture(self):
        """Records both kinds of step. The cache must be empty, and is afterwards. Whatever a first call compiles, tunes
        or loads happens here, so the first block takes as long as any other."""
        self.block.start(self.block.xt.clone(), self.begin)
        for commit in (False, True) if self.cache.max_len else (False,):
            graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    self.clear()
                    self.denoise(commit)
            torch.cuda.current_stream().wait_stream(side)
            self.clear()
            # A recording that fails leaves its own stream as the current one; the outer context restores ours.
            with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
                self.denoise(commit)
            self.graphs[commit] = graph
            self.clear()
            graph.replay()                              # the first replay uploads the graph
        self.clear()

    def clear(self):
        self.block.rewind()
        self.cache.clear()


def new_decoder(wanted, model, cache, sampler, block_len):
    """
    Builds the FastDecoder of an engine. "graphs": its steps are CUDA graphs; ConfigError where they cannot be recorded.
    "auto": graphs too, but where they cannot be recorded it prints why, once, and runs without. "fused": no graphs.
    """
    if wanted == "graphs" and cache.max_len and "cached_attention" not in ops.FAST:
        raise ConfigError("no CUDA graphs: they need the Triton kernels (--kernels=auto, pip install triton)")
    if wanted != "fused":
        try:
            return FastDecoder(model, cache, sampler, block_len, graphs=True)
        except RuntimeError as error:
            why = f"no CUDA graphs: one could not be recorded: {str(error).splitlines()[0]}"
            if wanted == "graphs":
                raise ConfigError(why) from None
            say_once(why)
            cache.clear()
    return FastDecoder(model, cache, sampler, block_len, graphs=False)


@functools.lru_cache(maxsize=None)
def say_once(text):
    print(text, file=sys.stderr)
