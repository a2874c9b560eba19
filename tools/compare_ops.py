"""
The comparisons of `python bench.py ops`: each heavy operation beside the libraries that a user would otherwise pick, at
the sizes of 350M training or of 700M generation. Each generator below makes the tensors of one operation and yields its
comparisons. bench.py times them and computes how close they come to the hardware's limit.

    python bench.py ops                         all operations
    python bench.py ops --only=scan             one operation
"""
import contextlib
import copy
import functools

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

import ops
from configurator import UserError
from model import BlockDiffusionLM, ModelConfig, config_from_file
from parallel import ShardedAdamW, select_kernels


def compared(op, ours, others, flops, nbytes, count=1, graph=True):
    """One comparison. ours: our function. others: {name: a library's function, or a text that says why it is
    missing}. A call runs the operation `count` times, with `flops` and `nbytes` each. graph: time it as a CUDA
    graph, which excludes the host's time."""
    return dict(op=op, ours=ours, others=others, flops=flops, nbytes=nbytes, count=count, graph=graph)


# ----------------------------------------------------------------------------------------------
# Pieces

def tensors(x):
    return [v for v in (x if isinstance(x, (tuple, list)) else [x]) if torch.is_tensor(v)]


def with_backward(f, inputs):
    """A function that runs f and computes the gradients of all its tensor inputs."""
    inputs = [x.detach().clone().requires_grad_() if torch.is_tensor(x) else x for x in inputs]
    d_outputs = []
    def step():
        outputs = tensors(f(*inputs))
        if not d_outputs:
            d_outputs.extend(torch.randn_like(o) for o in outputs)
        torch.autograd.grad(outputs, tensors(inputs), d_outputs)
    return step


def both_passes(name, ours, others, flops):
    """Comparisons of the forward pass, and of forward and backward. ours and others: (function, inputs). The bytes
    counted: forward reads inputs and writes outputs; backward reads inputs and the gradients of outputs, and writes
    the gradients of inputs. Backward counts twice the FLOPs of forward; recomputation is not counted."""
    def forward(f, inputs):
        return torch.no_grad()(lambda: f(*inputs))
    read, written = (sum(v.nbytes for v in tensors(x)) for x in (ours[1], forward(*ours)()))
    for what, wrap, work in (
            ("forward", forward, (flops, read + written)),
            ("forward + backward", with_backward, (3 * flops, 3 * read + 2 * written))):
        rivals = {k: v if isinstance(v, str) else wrap(*v) for k, v in others.items()}
        yield compared(f"{name}, {what}", wrap(*ours), rivals, *work)


def library(load):
    """What load() returns, or a text that says why it failed. A library built for another torch can raise anything."""
    try:
        return load()
    except Exception as error:
        if isinstance(error, UserError):                # says itself what is missing
            return str(error).partition(";")[0]
        return "not installed" if isinstance(error, ImportError) else f"broken: {error!r:.60}"


# ----------------------------------------------------------------------------------------------
# The operations. factory: device and dtype of the tensors. big: full size, on a GPU; else small tensors for a test.
# compiled: apply torch.compile to plain functions that gain from it.

def scan_rows(factory, big, compiled):
    """The two scans of training: a clean stream, which returns the state of every block, and noisy blocks, each a row
    that starts from its state. mamba-ssm returns only the last state, so it does less work on the clean stream."""
    def load():
        with ops.plain():                               # makes the package importable without its CUDA extension
            select_kernels("mamba_ssm", factory["device"])
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
        return lambda x, dt, A, B, C, D, state, *_: mamba_chunk_scan_combined(
            x, dt, A, B[:, :, None], C[:, :, None], 256, D=D, initial_states=state)
    b, s, h, p, n, l = (8, 8192, 26, 64, 128, 256) if big else (1, 256, 2, 16, 16, 64)
    scan = torch.compile(ops.ssd_scan, dynamic=False) if compiled else ops.ssd_scan
    def plain(*inputs):
        with ops.plain():
            return scan(*inputs)
    mamba_ssm = library(load)
    for form, rows, m in (("clean stream", b, s - l), ("noisy rows", b * s // l, l)):
        x, B, C = (torch.randn(rows, m, *w, **factory) for w in ((h, p), (n,), (n,)))
        dt = 0.1 * torch.rand(rows, m, h, device=factory["device"]) + 0.001
        A, D = -1 - 15 * torch.rand(h, device=factory["device"]), torch.ones(h, device=factory["device"])
        state = None if m > l else torch.randn(rows, h, p, n, device=factory["device"])
        inputs = (x, dt, A, B, C, D, state, l if m > l else None, 128, m > l)
        flops = rows * m * (2 * 64 * n + 2 * 64 * h * p + 4 * n * h * p)       # chunks of 64
        yield from both_passes(f"scan, {form}", (scan, inputs), {
            "mamba-ssm": mamba_ssm if isinstance(mamba_ssm, str) else (mamba_ssm, inputs),
            "torch.compile of plain" if big else "plain torch": (plain, inputs)}, flops)


@contextlib.contextmanager
def as_written(name):
    """Inside, the operation of this name is the plain function; the operations that it calls stay fast."""
    fast = ops.FAST.pop(name, None)
    try:
        yield
    finally:
        if fast is not None:
            ops.FAST[name] = fast


def mixer_rows(factory, big, compiled):
    """A whole Mamba mixer on noisy blocks, with both projections: the fused operator beside the plain
    model.Mamba2.forward under torch.compile, which uses the same fast scan and convolution."""
    rows, l, d, n, p, heads = (256, 256, 832, 128, 64, 16) if big else (2, 64, 32, 16, 16, 2)
    config = ModelConfig(vocab_size=64, seq_len=l, block_len=l, attn_every=2, n_layer=2, n_head=heads, d_model=d,
                         d_state=n, mamba_head_dim=p)
    di, h, c = config.d_inner, config.d_inner // p, config.d_inner + 2 * n
    mixer = BlockDiffusionLM(config).to(factory["device"]).layers[1].mixer.fwd     # with initialised weights
    u, conv = torch.randn(rows, l, d, **factory), torch.randn(rows, config.conv_width - 1, c, **factory)
    ssm, d_y = torch.randn(rows, h, p, n, device=factory["device"]), torch.randn(rows, l, d, **factory)
    for x in (u, conv, ssm):
        x.requires_grad_()
    inputs = (u, conv, ssm, *mixer.parameters())

    def timed_under(context):
        f = torch.compile(mixer.forward, dynamic=False) if compiled else mixer.forward
        def step():
            with context(), torch.autocast(factory["device"].type, torch.bfloat16, enabled=big):
                y, _, _ = f(u, conv, ssm, want_states=False)
                torch.autograd.grad(y, inputs, d_y)
        return step
    flops = 3 * rows * l * (2 * d * (2 * di + 2 * n + h) + 2 * 64 * n + 2 * 64 * di + 4 * n * di + 2 * di * d)
    nbytes = 3 * sum(v.nbytes for v in inputs) + 2 * d_y.nbytes
    yield compared("Mamba mixer, forward + backward", timed_under(contextlib.nullcontext),
                   {"Mamba2.forward, compiled": timed_under(lambda: as_written("Mamba2.forward"))}, flops, nbytes)


def sdpa(big, **options):
    """{name: scaled dot product attention}: the two fast backends on a GPU, any available backend elsewhere."""
    def attend(backend, q, k, v):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, **options)
    kinds = {"SDPA": [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]} if not big else {
        "SDPA flash": SDPBackend.FLASH_ATTENTION, "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION}
    return {name: functools.partial(attend, backend) for name, backend in kinds.items()}


def flash_attention_4(block_mask=None, **options):
    """flash-attn-4 called directly, with a BlockMask or without one; or a text that says why it is missing."""
    def load():
        from flash_attn.cute import flash_attn_func
        from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch as Blocks
        if block_mask is not None:
            m, size = block_mask, block_mask.BLOCK_SIZE
            options["block_sparse_tensors"] = Blocks(
                m.kv_num_blocks, m.kv_indices, m.full_kv_num_blocks, m.full_kv_indices, block_size=size)
            options["block_sparse_tensors_bwd"] = Blocks(
                m.q_num_blocks, m.q_indices, m.full_q_num_blocks, m.full_q_indices, block_size=size)
        return lambda *qkv: flash_attn_func(*(x.transpose(1, 2) for x in qkv), **options)[0].transpose(1, 2)
    return library(load)


def attention_rows(factory, big, compiled):
    """Attention of training. Two-stream attention computes s^2 query-key pairs per sequence. Two causal sequences of s
    tokens have as many pairs: libraries without block masks are timed on those. A full-sequence model, which is one
    block, also has s^2 pairs."""
    def rival(f, inputs):
        return f if isinstance(f, str) else (f, inputs)
    b, h, s, e, l = (8, 14, 8192, 64, 256) if big else (1, 2, 256, 16, 64)
    streams = [torch.randn(b, h, m, e, **factory) for m in 3 * [s - l] + 3 * [s]]
    causal, work = torch.randn(3, 2 * b, h, s, e, **factory).unbind(), 4 * b * h * e * s * s
    joined = [torch.cat(pair, 2) for pair in zip(streams[:3], streams[3:])]
    for name, length, inputs in (("two-stream attention", l, streams), ("dense attention", s, streams[3:])):
        masks = ops.two_stream_masks(s, length, factory["device"])
        def ours(*qkv):
            return ops.two_stream_attention(qkv[:3] if length < s else (qkv[0][:, :, :0],) * 3, qkv[-3:], masks)
        if length == s:
            others = {k: (f, inputs) for k, f in sdpa(big).items()} | {"FA4": rival(flash_attention_4(), inputs)}
        else:
            others = {f"{k}, causal": (f, causal) for k, f in sdpa(big, is_causal=True).items()}
            others["FA4, causal"] = rival(flash_attention_4(causal=True), causal)
            if big:
                others["FA4, sparse"] = rival(flash_attention_4(masks[0]), joined)
                others["FlexAttention, Triton"] = (
                    functools.partial(torch.compile(flex_attention, dynamic=False), block_mask=masks[0]), joined)
        yield from both_passes(name, (ours, inputs), others, work)


def block_attention_rows(factory, big, compiled):
    """One block against a cache. Libraries get the cache and the block's keys already concatenated. If the cache is
    short, a call goes over many of them, as over the layers of a model, so that they do not stay in the GPU's L2."""
    h, e, l = (18, 64, 256) if big else (2, 16, 32)
    q, k, v = torch.randn(3, 1, h, l, e, **factory).unbind()
    for n in [0, 1024, 16384, 65536, 262_144] if big else [0, 256]:
        nbytes = 2 * q.nbytes + 2 * (n + l) * h * e * q.element_size()
        count = max(1, min(32, 2 ** 28 // nbytes)) if big else 2
        held = torch.full((1,), n, device=factory["device"])
        caches = torch.randn(count, 2, 1, h, max(n, l), e, **factory)
        joined = [[torch.cat([c[i, :, :, :n], x], 2) for i, x in enumerate((k, v))] for c in caches]
        def over_all(attend, pairs):
            return torch.no_grad()(lambda: [attend(q, *pair) for pair in pairs])
        def ours(q, keys, values):
            return ops.cached_attention(q, k, v, keys, values, held, l)
        yield compared(f"block attention, {n:,} keys", over_all(ours, caches),
                       {name: over_all(f, joined) for name, f in sdpa(big).items()},
                       4 * l * (n + l) * h * e, nbytes, count)


def cross_entropy_rows(factory, big, compiled):
    """Head and loss. Liger's loss has no token weights, so it does less work."""
    def load():
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
        fused = LigerFusedLinearCrossEntropyLoss(reduction="sum")
        return with_backward(lambda x, w: fused(w[:-1], x, target), (hidden, head))
    m, d, v = (32768, 896, 50258) if big else (128, 32, 500)
    hidden, head = torch.randn(m, d, **factory), 0.02 * torch.randn(v, d, **factory)
    target = torch.randint(0, v - 1, (m,), device=factory["device"])
    weight = torch.rand(m, device=factory["device"]) + 1
    def with_gradients(f):
        return with_backward(lambda x, w: f(x, w, target, weight), (hidden, head))
    yield compared("linear cross-entropy, forward + backward", with_gradients(ops.linear_cross_entropy), {
        "F.cross_entropy on all logits": with_gradients(ops.linear_cross_entropy_ref), "Liger": library(load)},
        6 * m * d * (v - 1), 3 * (hidden.nbytes + head.nbytes), graph=False)


def adamw_rows(factory, big, compiled):
    """One AdamW step in fp32, with the gradient norm and clipping. Bytes counted: gradients are read twice; parameters
    and both moments are read and written."""
    model = BlockDiffusionLM(config_from_file("mamba_h_350m" if big else "laptop")).to(factory["device"])
    other = copy.deepcopy(model)
    ours = ShardedAdamW(model, (0.9, 0.95), 0.1)
    theirs = torch.optim.AdamW(other.param_groups(0.1), lr=1e-4, betas=(0.9, 0.95), fused=True)
    for p, q in zip(model.parameters(), other.parameters()):
        q.grad = p.grad.normal_().clone()
    def our_step():                                     # both with gradients clipped to a norm of 1
        ours.step(1e-4, (1 / (ours.reduce_gradients() + 1e-6)).clamp(max=1))
    def their_step():
        torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        theirs.step()
    others, nbytes = {"torch AdamW(fused=True)": their_step}, 8 * 4 * model.n_params
    yield compared("AdamW step", our_step, others, 0, nbytes, graph=False)


COMPARISONS = dict(scan=scan_rows, mixer=mixer_rows, attention=attention_rows,
                  cross_entropy=cross_entropy_rows, block_attention=block_attention_rows,
                  adamw=adamw_rows)
