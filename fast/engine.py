"""
The fast engines: denoising steps with prepared weights (inference.py), recorded as CUDA graphs on a GPU.

`FastEngine` has the methods of sample.SimpleEngine and uses the same random numbers. A step reads the prefix length on
the device, so the host replays the same graph for every block.

    python -m pytest tests/kernels/test_engines.py              on a CPU, without graphs
    python -m pytest tests/kernels/test_gpu.py -k graphs        on a GPU
"""
import functools
import sys

import torch

import ops
from configurator import UserError
from decoders import ActiveBlock, select
from fast import block_ops


class FastBlock(ActiveBlock):
    """An ActiveBlock in which the positions of the next step, where their order is known, lie ready in a tensor. One
    kernel writes the tokens of a step and looks these positions up."""

    def __init__(self, *args):
        super().__init__(*args)
        self.next_positions = super().next_in_order()   # (b, p) or None

    def start(self, xt, begin):
        super().start(xt, begin)
        if self.next_positions is not None:
            self.next_positions.copy_(self.permutation[:, :self.tokens_per_step])

    def next_in_order(self):
        return self.next_positions

    def write(self, positions, tokens):
        if self.next_positions is None:
            super().write(positions, tokens)
        else:                                           # `positions` are next_positions
            block_ops.unmask_and_advance(self.xt, self.next_positions, tokens, self.sampler.mask_id, self.permutation,
                                         self.step)


class FastEngine:
    """
    Unmasks one block after another. `commit` only keeps the finished block as pending; the first step of the next block
    commits it in the same forward pass. Until then cache.lengths is one block behind: `begin` counts the pending block,
    and `flush` must be called before other code reads the cache.
    """

    def __init__(self, model, cache, sampler, block_len, record):
        """model: from inference_model; cache: an empty one, to be filled later, since the recording clears it; record:
        whether to record steps as CUDA graphs."""
        assert not int(cache.lengths.max()), "the cache holds tokens already: make the engine before it is filled"
        self.model, self.cache, self.passes, self.block_len = model, cache, 0, block_len
        self.block = FastBlock(len(sampler.seeds), block_len, sampler, cache.lengths.device)
        self.pending_block, self.has_pending = self.block.xt.clone(), False
        self.graphs = {}                                # whether the step also commits -> its CUDA graph
        if record:
            self.capture()
        self.name = "graphs" if self.graphs else "fused"

    @property
    def begin(self):
        """Number of tokens before the active block (b,)."""
        return self.cache.lengths + self.block_len if self.has_pending else self.cache.lengths

    def decode(self, xt, n_masked, on_step=None):
        """As sample.SimpleEngine.decode."""
        self.block.start(xt, self.begin)
        for _ in self.block.steps(n_masked):
            self.step()
            if on_step:
                on_step(self.block.xt)
        return self.block.xt

    def step(self):
        """One denoising step. It also commits the pending block, if there is one."""
        if self.graphs:
            self.graphs[self.has_pending].replay()
        else:
            self.work(self.has_pending)
        self.has_pending = False
        self.passes += 1

    def commit(self, x0):
        """Keeps the finished block x0 (b, l) as pending. The next step commits it."""
        self.flush()
        self.pending_block.copy_(x0)
        self.has_pending = True

    def flush(self):
        """Commits the pending block now, in its own forward pass."""
        if self.has_pending:
            self.model.commit(self.pending_block, self.cache)
            self.has_pending = False
            self.passes += 1

    def work(self, commit):
        """What one step launches, at once or while a graph records it. The last layer computes only the positions `at`
        that the step reveals; at is None when they are not known beforehand."""
        model, block, at = self.model, self.block, self.block.next_in_order()
        t = block.noise_level() if model.config.time_conditioning else None
        if commit:
            hidden = model.commit_and_denoise_hidden(self.pending_block, block.xt, self.cache, t, at)
        else:
            hidden = model.denoise_hidden(block.xt, self.cache, t, at)
        if at is None:                                  # hidden has the whole block
            at = block.positions(model, hidden)
            hidden = select(hidden, at)
        block.reveal(at, model.token_logits(hidden))

    def capture(self):
        """Records a step without and a step with a commit. The cache must be empty, and is empty afterwards. All lazy
        compilation, tuning and loading happens here, so the first block is as fast as the others."""
        kinds = (False, True) if self.cache.max_len else (False,)      # without a cache nothing is committed
        # compile_first compiles all Triton kernels at once and runs none of them, so drawn tokens are garbage. Where
        # positions are known beforehand, a kernel writes tokens, so none are written. Elsewhere torch would write them,
        # and the embedding would fail on them: then the kernels are compiled below, one after another.
        if "cached_attention" in ops.FAST and self.block.next_in_order() is not None:
            from fast.triton_tools import compile_first
            compile_first(lambda: [self.work(commit) for commit in kinds])
        self.block.start(self.block.xt.clone(), self.begin)
        for commit in kinds:
            graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):                      # the first run compiles and tunes
                    self.cache.clear()
                    self.work(commit)
            torch.cuda.current_stream().wait_stream(side)
            self.cache.clear()
            # If the recording fails, its stream stays the current one; the outer context restores ours.
            with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
                self.work(commit)
            self.graphs[commit] = graph
            self.cache.clear()
            graph.replay()                              # the first replay uploads the graph
        self.cache.clear()


def new_engine(wanted, model, cache, sampler, block_len):
    """
    Builds a FastEngine. wanted is the setting `engine`. "graphs": with CUDA graphs, or a UserError if they cannot be
    recorded. "auto": with CUDA graphs, or else it prints the reason once and runs without. "fused": without.
    """
    # Plain attention to a cache waits for the device, which a graph cannot record.
    if wanted == "graphs" and cache.max_len and "cached_attention" not in ops.FAST:
        raise UserError("engine=graphs needs the Triton kernels: use --kernels=auto (pip install triton)")
    if wanted != "fused":
        try:
            return FastEngine(model, cache, sampler, block_len, record=True)
        except RuntimeError as error:
            why = f"no CUDA graphs: one could not be recorded: {str(error).splitlines()[0]}"
            if wanted == "graphs":
                raise UserError(why) from None
            say_once(why)
            cache.clear()
    return FastEngine(model, cache, sampler, block_len, record=False)


@functools.lru_cache(maxsize=None)
def say_once(text):
    print(text, file=sys.stderr)
