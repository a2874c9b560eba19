"""The Triton kernels against their plain twins: values and every gradient. They run on a GPU if there is one, else in
Triton's interpreter, which conftest.py has chosen."""
import copy
import inspect
import sys

import pytest
import torch

from conftest import make_model, need_fast, relative_error as error

need_fast()
GPU = torch.cuda.is_available()
pytest.importorskip("triton", reason="needs Triton: pip install triton==3.6.0")

import decoders  # noqa: E402
import fast  # noqa: E402
import ops  # noqa: E402
from fast import block_ops, cached_attention, conv, cross_entropy, inference, mixer  # noqa: E402
from fast import scan, scan_block, step, two_stream  # noqa: E402
from model import Mamba2, ModelConfig  # noqa: E402
from sample import generate, open_engine  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of -inf and log2(0)
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
DTYPES = pytest.mark.parametrize("dtype", LIMIT, ids=["fp32", "bf16"])


def repair_interpreter():
    """Triton 3.6's interpreter takes int() of one-element arrays, which numpy 2.4 refuses, and
    multiplies the bit patterns of bf16 as integers."""
    import triton.language as tl
    from triton.runtime import interpreter
    patch, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patch_with_index(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def widen(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype("u4") << 16).view("f4"), tl.float32)

    interpreter._patch_lang_tensor = patch_with_index
    interpreter.InterpreterBuilder.create_dot = lambda self, a, b, *rest: dot(self, widen(a), widen(b), *rest)


if not GPU:
    repair_interpreter()
    conv.BACKWARD = 4, 4, 4                             # short pieces: the interpreter is slow


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(DEVICE, dtype)


def scan_inputs(r, s, h, p, n, dtype=torch.float32, start=True):
    """x, B and C are views of one wider projection, as in the model. An odd offset misaligns them on purpose."""
    x, B, C = randn(r, s, 3 + h * p + 2 * n, dtype=dtype)[..., 3:].split([h * p, n, n], -1)
    return dict(x=x.unflatten(-1, (h, p)), dt=torch.nn.functional.softplus(randn(r, s, h) - 2), A=-torch.exp(randn(h)),
                B=B, C=C, D=randn(h), initial_state=randn(r, h, p, n) if start else None)


def turned(u, dims=(1, 2)):
    """The same values in memory that is laid out the other way round."""
    return u.transpose(*dims).contiguous().transpose(*dims)


def both_inputs(r, l, dtype, starts, h=3, p=16, n=32):
    z, x, B, C, dt = randn(r, l, 2, 2 * h * p + 2 * n + h, dtype=dtype).split([h * p, h * p, n, n, h], -1)
    inputs = (x.unflatten(-1, (h, p)), dt, randn(2, h) - 3, -torch.exp(randn(2, h)), B, C,
              randn(2, h), randn(starts, h, p, n), z.unflatten(-1, (h, p)))
    return x, inputs


@DTYPES
@pytest.mark.parametrize("l", [1, 70, 128])
@pytest.mark.parametrize("commit", [False, True])
def test_the_scan_of_a_block_or_of_pairs_with_one_to_commit_equals_its_twin(l, commit, dtype):
    inputs = both_inputs(4, l, dtype, 2 if commit else 4)[1]
    got, want = ([*scan(*inputs, commit=commit), inputs[7]] for scan, inputs in (
        (scan_block.scan_block, inputs), (block_ops.scan_block.plain, [u.double() for u in inputs])))
    assert got[0].dtype == dtype and got[1].dtype == torch.float32
    assert not commit or not (got[0][:2, :, 1].any() or got[1][:2, :, 1].any())
    for a, b in zip(got, want):
        assert a.shape == b.shape and a.is_contiguous() and error(a, b) < LIMIT[dtype]


@DTYPES
@pytest.mark.parametrize("l, few", [(1, 4096), (70, 0), (128, 4096)])
def test_the_convolution_of_both_directions_equals_two(monkeypatch, l, few, dtype):
    monkeypatch.setattr(conv, "FEW", few)
    x = both_inputs(2, l, dtype, 2)[0]
    inputs = x, randn(2, x.size(-1), 4), randn(2, x.size(-1)), randn(2, 3, x.size(-1), dtype=dtype)
    u, w, bias, start = (u.double() for u in inputs)
    fwd = ops.causal_conv(u[:, :, 0], w[0], bias[0], start)
    rev = ops.causal_conv(u[:, :, 1].flip(1), w[1], bias[1], torch.zeros_like(start)).flip(1)
    got = conv.causal_conv_both(*inputs)
    assert got.dtype == dtype and error(got, torch.stack([fwd, rev], 2)) < LIMIT[dtype]


def test_step_sizes_far_below_one_keep_their_digits():
    dt, ones = torch.linspace(-30, 30, 32, device=DEVICE), randn(1, 1, 2, 32, 16) * 0 + 1
    y = scan_block.scan_block(ones, dt.expand(1, 1, 2, 32), *(v * ones[0, 0, :, :, 0] for v in (0, -1)),
                        ones[:, :, :, 0], ones[:, :, :, 0], 0 * ones[0, 0, :, :, 0],
                        torch.zeros(1, 32, 16, 16, device=DEVICE), 30 * ones)[0] / 16 / 30     # y is softplus(dt)
    want = dt.double().exp().log1p()
    assert ((y[0, 0, :, :, 0] - want) / want).abs().max() < 5e-6


@DTYPES
@pytest.mark.parametrize("b, s, h, p, n, row, every, start", [
    (2, 96, 2, 32, 64, 32, 32, True), (1, 200, 3, 16, 64, 40, 40, False), (1, 128, 1, 64, 128, 128, 128, True),
    (2, 128, 2, 16, 32, 32, 64, False), (2, 64, 2, 16, 32, 32, None, True),
    (2, 96, 2, 16, 32, 32, 48, True)])                  # rows of 24, not of 32
def test_the_scan_equals_the_loop_with_boundary_states(monkeypatch, b, s, h, p, n, row, every, start, dtype):
    """row: the most tokens that are scanned at once."""
    monkeypatch.setitem(ops.FAST, "ssd_scan", scan.ssd_scan)
    monkeypatch.setattr(block_ops, "SCAN_ROW", row)
    inputs = scan_inputs(b, s, h, p, n, dtype, start)
    want = ops.ssd_scan_ref(**{k: v if v is None else v.double() for k, v in inputs.items()}, states_every=every)
    with torch.no_grad():
        got = ops.ssd_scan(**inputs, states_every=every)
    assert all(a.shape == e.shape and error(a, e) < LIMIT[dtype] for a, e in zip(got, want))
    assert got[0].dtype == dtype and got[1].dtype == torch.float32


def test_convolution_refuses_a_row_beyond_its_32_bit_offsets():
    row = torch.empty_strided((1, 2 ** 16, 16), (2 ** 31, 2 ** 15 - 1, 1), device="meta")
    conv.check_row(row)
    with pytest.raises(AssertionError, match="32 bits"):
        conv.check_row(row.as_strided(row.shape, (2 ** 31, 2 ** 15, 1)))


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_masks_of_tiles_show_what_the_masked_attention_shows(monkeypatch):
    """FlexAttention, not compiled. Tiles of 128 tokens lie inside blocks of 128 and hold several blocks of 16."""
    monkeypatch.setattr(two_stream, "flex", two_stream.flex_attention)
    monkeypatch.setattr(two_stream, "TRITON", None)
    for s, l in ((384, 128), (176, 16)):
        streams = [[randn(1, 2, n, 16) for _ in range(3)] for n in (s - l, s)]
        masks = two_stream.two_stream_masks(s, l, torch.device(DEVICE))
        for clean in (streams[0], [None, *streams[0][1:]]):
            want = ops.two_stream_attention(clean, streams[1], ops.two_stream_masks(s, l, DEVICE))
            for got, exact in zip(two_stream.two_stream_attention(clean, streams[1], masks), want):
                assert got is exact is None or error(got, exact.double()) < 1e-5


@pytest.mark.parametrize("flash, dtype, e, blocks, backend", [
    (1, torch.bfloat16, 64, 3, "FLASH"), (1, torch.bfloat16, 52, 3, "FLASH"), (1, torch.bfloat16, 56, 1, "FLASH"),
    (1, torch.float32, 64, 3, "TRITON"), (0, torch.bfloat16, 52, 3, "TRITON"), (0, torch.bfloat16, 64, 1, "")])
def test_flash_attention_4_runs_in_16_bits_if_the_masks_say_so(monkeypatch, flash, dtype, e, blocks, backend):
    """Elsewhere FlexAttention's own kernels; for a single block without it, SDPA. It takes head dimensions that 8
    divides."""
    calls = []

    def flex(q, k, v, block_mask, scale, kernel_options):
        calls.append((kernel_options, q.size(-1), block_mask))
        assert scale == e ** -0.5
        return q
    monkeypatch.setattr(two_stream, "flex", flex)
    masks = (None, None, bool(flash)) if blocks == 1 else ("both", "noisy", bool(flash))
    clean, noisy = ([torch.randn(1, 2, 128 * n, e).to(dtype) for _ in range(3)] for n in (blocks - 1, blocks))
    for q_clean, mask in ((clean[0], masks[0]), (None, masks[1])):             # None: the last layer
        y_clean, y = two_stream.two_stream_attention((q_clean, *clean[1:]), noisy, masks)
        assert y.shape == noisy[0].shape and (y_clean is q_clean is None or y_clean.shape == q_clean.shape)
        padded = 56 if e == 52 and backend == "FLASH" else e
        assert calls == ([(getattr(two_stream, backend), padded, mask)] if backend else [])
        calls.clear()


@pytest.mark.parametrize("version, broken, capability, end", [
    ("4.0.0b36", "", (9, 0), "attention flash-attn-4"), ("4.1.0b1", "", (9, 0), "attention flash-attn-4"),
    ("4.0.0b36", "", (8, 0), "attention flex"), ("4.0.0b36", "", (10, 0), "attention flex"),
    (None, "", (9, 0), "attention flex (faster: pip install -r requirements-gpu.txt)"),
    ("4.0.0b9", "", (9, 0), "attention flex (flash-attn-4 4.0.0b9 is too old: pip install -r requirements-gpu.txt)"),
    *(("4.0.0b36", part, (9, 0), f"attention flex (flash-attn-4 cannot be imported, ModuleNotFoundError: import of {part} "
       "halted; None in sys.modules: pip install -r requirements-gpu.txt)") for part in (
           "flash_attn.cute.interface", "cutlass.cute.runtime"))])
def test_the_start_line_names_the_attention_and_what_is_missing(monkeypatch, version, broken, capability, end):
    """With stand-ins of flash-attn-4 and cutlass, of which one may lack a part."""
    def version_of(name):
        if version is None:
            raise two_stream.importlib.metadata.PackageNotFoundError
        return version
    for name in ("flash_attn.cute.interface", "cutlass.cute.runtime", "cutlass._mlir.dialects.math"):
        monkeypatch.setitem(sys.modules, name, None if name == broken else sys)
    monkeypatch.setattr(ops, "FAST", {})
    monkeypatch.setattr(two_stream.importlib.metadata, "version", version_of)
    monkeypatch.setattr(two_stream, "no_flash", two_stream.no_flash.__wrapped__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert fast.select("cuda") == "kernels: Triton; " + end
    assert two_stream.two_stream_masks(256, 256, "cuda")[2] == end.endswith("flash-attn-4")
    assert not two_stream.two_stream_masks(192, 192, "cuda")[2], "a block is no whole number of tiles"
    assert not two_stream.two_stream_masks(256, 256, "cpu")[2]


def attention_inputs(lengths, l, d, dtype=torch.float32, h=2, m=None, cap=None, pad=0, caches=None, sharp=1):
    """m queries, or l. q, k, v are views of one projection; the caches hold NaN from each row's length on. Row i reads
    cache i mod `caches`. Scores are `sharp` times as large."""
    b, cap, caches = len(lengths), cap or max(lengths) + 16, caches or len(lengths)
    q, k, v = randn(b, l, 3, h, d, dtype=dtype).unbind(2)
    keys, values = randn(2, caches, h, cap, d + pad, dtype=dtype).fill_(float("nan"))[..., :d]
    for i, n in enumerate(lengths[-caches:]):
        keys[i, :, :n], values[i, :, :n] = (1 + i) * randn(h, n, d), randn(h, n, d)
    q = sharp * (q if m is None else randn(b, m, h, d, dtype=dtype))
    return q, keys, values, torch.tensor(lengths, device=DEVICE), k, v


@pytest.mark.parametrize("lengths, l, d, splits, how", [
    *(([0, 150, 77, 256], l, d, splits, dict(h=1, dtype=dtype)) for dtype in LIMIT
      for l, d, splits in ((16, 64, 1), (40, 56, 3), (24, 52, 8), (70, 64, 0))),
    ([100, 65], 32, 52, 0, dict(pad=4, dtype=torch.bfloat16)), ([128, 128], 32, 64, 2, dict(cap=128, sharp=100)),
    ([0], 32, 64, 0, {}), ([60, 0, 100, 40], 32, 64, 3, dict(caches=2)),
    *(([60, 0, 100], 24, 64, splits, dict(m=m)) for m, splits in ((3, 3), (16, 1), (40, 0)))])
def test_block_attention_equals_its_definition(monkeypatch, lengths, l, d, splits, how):
    """Row by row: queries of one block see what its cache holds, and the whole block."""
    monkeypatch.setattr(cached_attention, "FEW_KEYS", 0 if splits else 1024)
    q, keys, values, held, k, v = inputs = attention_inputs(lengths, l, d, **how)
    out = cached_attention.block_attention(*inputs, splits)
    for i, n in enumerate(lengths):
        seen = [torch.cat([cache[i % len(keys), :, :n], own[i].transpose(0, 1)], 1).double()
                for cache, own in ((keys, k), (values, v))]                    # (h, n + l, d) each
        want = torch.nn.functional.scaled_dot_product_attention(q[i].transpose(0, 1).double(), *seen)
        assert error(out[i], want.transpose(0, 1)) < LIMIT[q.dtype]            # NaN fails too
    assert out.shape == q.shape and out.dtype == q.dtype and out.is_contiguous()


def test_dispatched_attention_takes_several_blocks(monkeypatch):
    q, keys, values, lengths, k, v = attention_inputs([20, 3], 48, 32, torch.float32, cap=96)
    args = [u.transpose(1, 2) for u in (q, k, v)]
    want = ops.cached_attention(*(u.nan_to_num().double() for u in (*args, keys, values)), lengths, 16)
    monkeypatch.setitem(ops.FAST, "cached_attention", cached_attention.cached_attention)
    assert error(ops.cached_attention(*args, keys, values, lengths, 16), want) < 1e-5


def test_every_replacement_has_the_name_and_the_arguments_of_what_it_replaces(monkeypatch):
    monkeypatch.setattr(ops, "FAST", {})
    assert "Triton" in fast.select(DEVICE)
    originals = {f.plain.__qualname__: f for module in (ops, block_ops, Mamba2) for f in vars(module).values()
                 if inspect.isfunction(f) and hasattr(f, "plain")}
    assert ops.FAST.keys() == originals.keys()
    for name, f in ops.FAST.items():
        got, want = ([a.name for a in g._schema.arguments] if isinstance(g, torch._ops.OpOverload) else
                     list(inspect.signature(g).parameters) for g in (f, originals[name]))
        assert got == want or name.startswith("Mamba2.") and got[1:] == want[1:], name


@pytest.mark.parametrize("max_logits", [1, 100, 10 ** 6])
def test_cross_entropy_in_tiles_equals_the_plain_one_with_gradients(monkeypatch, max_logits):
    monkeypatch.setattr(cross_entropy, "MAX_LOGITS", max_logits)
    monkeypatch.setattr(cross_entropy, "tile_loss", cross_entropy.cross_entropy_tile)      # not compiled
    hidden, head = (randn(n, 6, dtype=torch.float64).requires_grad_() for n in (13, 9))
    target, weight = torch.randint(0, 8, (13,), device=DEVICE), torch.rand(13, device=DEVICE).double()
    a, b = (f(hidden, head, target, weight) for f in (cross_entropy.linear_cross_entropy, ops.linear_cross_entropy))
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(*(torch.autograd.grad(2 * loss, (hidden, head)) for loss in (a, b)))


@pytest.mark.parametrize("states_every", [16, 2], ids=["by_kernels", "plain"])
@pytest.mark.parametrize("training", [True, False])
def test_a_mixer_compiles_without_graph_breaks(monkeypatch, training, states_every):
    monkeypatch.setattr(ops, "FAST", {})
    fast.select(DEVICE)
    module = make_mixer(torch.float32)
    inputs = mixer_inputs(module, 1, 32)
    compiled = torch.compile(module, fullgraph=True, backend="inductor" if GPU else "aot_eager")
    with torch.set_grad_enabled(training):
        for a, b in zip(compiled(*inputs, states_every=states_every), module(*inputs, states_every=states_every)):
            assert error(a, b) < 1e-5


@pytest.mark.parametrize("attn_every, time", [(1, False), (2, False), (2, True)])
def test_generation_by_all_kernels_gives_the_tokens_of_the_plain_model(monkeypatch, attn_every, time):
    """Prepared weights, prompts of two lengths, the commit of a block with the first step of the next."""
    model = make_model("mamba_h", torch.float32, noise=0.05, vocab_size=50, block_len=16, attn_every=attn_every,
                       n_layer=2, d_model=32, d_state=16, mamba_head_dim=16, time_conditioning=time).to(DEVICE)

    def tokens(engine):
        sampler = decoders.Sampler([0, 1], "random", 8, mask_id=49)
        opened, new_engine = open_engine(engine, model)
        return generate(opened, [torch.arange(20), torch.arange(7)], 16, sampler, new_engine=new_engine).tokens
    want = tokens("simple")
    monkeypatch.setattr(inference, "CUT_ON", (torch.device(DEVICE).type,))
    monkeypatch.setattr(ops, "FAST", {})
    fast.select(DEVICE)
    assert all(torch.equal(a, b) for a, b in zip(tokens("fused"), want))


def test_operators_declare_the_shapes_that_they_return():
    whole = make_mixer(torch.float32)
    u, columns, start = (v.contiguous() for v in mixer_inputs(whole, 2, 48))
    projected = torch.nn.functional.linear(u, mixer.padded_projection(whole))
    mixed = (projected, whole.conv_weight, whole.conv_bias, whole.dt_bias, -whole.A_log.exp(), whole.D,
             whole.norm_weight, whole.out_proj.weight, columns, start, 48, 0)
    mixed = tuple(v.detach() if isinstance(v, torch.Tensor) else v for v in mixed)
    y, empty = randn(2, 48, 48), randn(0)
    scanned = tuple(v.contiguous() for v in scan_inputs(1, 20, 2, 16, 32).values())
    u, w, bias = randn(2, 9, 32), randn(32, 4), randn(32)
    for op, args in (
            (scan.ssd_scan_forward, (*scanned, 10, True)), (scan.ssd_scan_forward, (*scanned, 20, False)),
            (conv.causal_conv_forward, (u, w, bias, u[:, :3])), (mixer.gated_norm_forward, (u, u, bias)),
            (mixer.mixer_forward, mixed), (mixer.mixer_backward, (mixed[0][..., :24], None, None, y, empty, *mixed))):
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))


# ----------------------------------------------------------------------------------------------
# The mixer as one operator

def make_mixer(dtype, h=3, p=16, n=16, w=4, strong=False):
    """h heads of p, a state of n, a convolution of width w; projections of this dtype."""
    torch.manual_seed(0)
    module = Mamba2(ModelConfig(d_model=h * p // 2, n_head=1, d_state=n, mamba_head_dim=p, conv_width=w)).to(DEVICE)
    with torch.no_grad():
        for q in module.parameters():
            q.copy_(torch.randn(q.shape))
        module.out_proj.weight.mul_(0.2)
        module.dt_bias.add_(4 if strong else -2)
        module.norm_weight.mul_(0.1).add_(1)
    for linear in (module.in_proj, module.out_proj):
        linear.to(dtype)
    return module


def mixer_inputs(module, r, s, given=True):
    """u, and the boundary states or None. A token of u has one channel, so that its projection is exact in 16 bits."""
    torch.manual_seed(1)
    (c, w), d, dtype = module.conv_weight.shape, module.in_proj.in_features, module.in_proj.weight.dtype
    u = (torch.nn.functional.one_hot(torch.randint(d, (r, s)), d) * torch.randn(r, s, 1).sign()).to(DEVICE, dtype)
    start = randn(r, module.heads, module.d_inner // module.heads, module.d_state)
    return (u, turned(randn(r, w - 1, c, dtype=dtype)), turned(start, (2, 3))) if given else (u, None, None)


def outcome(module, inputs, every, want=True):
    """The output and all gradients, by name; with `want` the boundary states too."""
    inputs = [None if v is None else v.detach().requires_grad_() for v in inputs]
    y, convs, ssms = module(*inputs, states_every=every, want_states=want)
    found = dict(y=y) | (dict(convs=convs, ssms=ssms) if want else {})
    wave = {"y": torch.sin}                             # the gradient of an output
    sum((v.double() * wave.get(k, torch.cos)(torch.arange(v.numel(), device=DEVICE).view_as(v))).sum()
        for k, v in found.items()).backward()
    found |= {name: v.grad for name, v in zip(("u", "conv", "ssm"), inputs) if v is not None}
    found |= {name: p.grad for name, p in module.named_parameters()}
    widths = [module.d_inner] * 2 + [module.d_state] * 2 + [module.heads]
    return found | dict(zip(("dz", "dx", "dB", "dC", "ddt"), found.pop("in_proj.weight").split(widths)))


# On a GPU every size is a compilation of its own. In the interpreter one partial chunk is enough.
MANY = (200, 512, None, 32, True, False) if GPU else (40, 512, None, 1, True, False)


@DTYPES
@pytest.mark.parametrize("s, row, every, r, given, want, sizes", [
    (48, 48, None, 3, True, False, {}),                 # noisy blocks, each from its own states
    (64, 32, 32, 2, False, True, {}),                   # the clean stream: a state for every block
    (64, 32, None, 2, False, False, {}),                # a full sequence: many rows, no states
    (64, 16, 32, 1, True, True, {}),                    # blocks of two rows, from given states
    (64, 16, 16, 2, True, True, {}),                    # blocks of one row, shorter than other tiles
    (96, 32, 48, 1, False, True, {}),                   # blocks that are not whole rows of 32
    (200, 100, 100, 1, True, True, {}),                 # rows of several chunks, the last one ragged
    (7, 512, None, 1, True, False, dict(h=2, p=64, n=128)), (16, 512, None, 3, True, False, dict(h=2, p=64, n=32)),
    *((*MANY, dict(h=2, p=p, n=n)) for p, n in ((64, 64), (64, 128), (64, 256), (32, 128))),
    (64, 32, 32, 1, True, True, dict(w=3)), (64, 32, 32, 1, True, True, dict(w=1)),
    (128, 512, None, 1, True, False, dict(n=32, strong=True))])                # decays that underflow
def test_mixer_and_its_gradients_are_the_plain_lines(monkeypatch, s, row, every, r, given, want, sizes, dtype):
    monkeypatch.setattr(block_ops, "SCAN_ROW", row)
    monkeypatch.setitem(ops.FAST, "Mamba2.forward", mixer.mamba2_forward)
    module = make_mixer(dtype, **sizes)
    inputs = mixer_inputs(module, r, s, given)
    with ops.plain():                                   # the reference in fp64
        wide = [v if v is None else v.double() for v in inputs]
        exact = outcome(copy.deepcopy(module).double(), wide, every, want)
    got = outcome(module, inputs, every, want)
    assert "mixer_forward" in type(got["y"].grad_fn).__name__                  # the fused operator made it
    assert list(got) == list(exact)
    for name, value in got.items():
        limit = 1e-5 if dtype == torch.float32 else 2e-2
        if name in ("A_log", "dt_bias", "D") or "strong" in sizes:             # sums that cancel
            limit *= 5
        assert value.numel() == 0 or error(value, exact[name]) < limit, name


def test_sizes_that_the_kernels_do_not_take_are_computed_plainly(monkeypatch):
    """A head of 24, and blocks of 2 tokens, shorter than the convolution, with gradients."""
    inputs = both_inputs(2, 5, torch.float32, 2, p=24)[1]
    assert all(map(torch.equal, scan_block.scan_block(*inputs), block_ops.scan_block(*inputs)))
    monkeypatch.setattr(ops, "FAST", {})
    for sizes, every in ((dict(h=2, p=24), 8), ({}, 2)):
        module = make_mixer(torch.float32, **sizes)
        u = mixer_inputs(module, 2, 8)
        want = outcome(copy.deepcopy(module), u, every)
        fast.select(DEVICE)
        for name, value in outcome(module, u, every).items():
            # On a GPU the padded product of in_proj may round in another way.
            assert torch.equal(value, want[name]) if DEVICE == "cpu" else error(value, want[name]) < 1e-6, name
        with torch.no_grad():                           # as in evaluation, where kernels may run
            for a, b in zip(module(*u, states_every=every), (want["y"], want["convs"], want["ssms"])):
                assert error(a, b) < 1e-5
        ops.FAST.clear()


@DTYPES
@pytest.mark.parametrize("parts, ways, bias, shift", [
    (0, 0, False, True), (1, 0, True, True), (4, 0, True, False), (2, 2, False, True), (4, 2, True, True)])
def test_residual_addition_and_norm_equal_their_twin(parts, ways, bias, shift, dtype):
    h, weight = randn(2, 5, 24, dtype=dtype), randn(24)
    parts = randn(parts, 2, 5, 24, dtype=dtype) if parts else None
    power = randn(2, 5, ways, 3).square() if ways else None
    inputs = (h, parts, power, randn(24) if bias else None, weight, randn(24) if shift else None)
    want = block_ops.add_norm(*(u if u is None else u.double() for u in inputs))
    for got, exact in zip(step.add_norm(*inputs), want):
        assert got.dtype == dtype and error(got, exact) < (1e-6 if dtype == torch.float32 else 1e-2)


@DTYPES
@pytest.mark.parametrize("e", [16, 52])
@pytest.mark.parametrize("commit", [False, True])
def test_a_kernel_rotates_a_block_and_appends_it_as_the_plain_lines_do(commit, e, dtype):
    qkv, table, held = randn(4, 7, 3, 3, e, dtype=dtype), randn(2, 60, e // 2), torch.tensor([3, 20, 10, 27])
    got, want, caches = [], [], randn(2, 2, 3, 40, e, dtype=dtype)
    for rotate_block, results, inputs in ((step.rotate_block, got, (qkv, table)),
                                          (block_ops.rotate_block.plain, want, (qkv.double(), table.double()))):
        state = caches.to(inputs[0].dtype, copy=True)
        results += [*rotate_block(*inputs, held.to(DEVICE), *(state if commit else ())), state]
    for a, b in zip(got, want):
        assert a.dtype == dtype and a.shape == b.shape and error(a, b) < LIMIT[dtype]
    assert torch.equal(got[2], caches) != commit


def test_a_norm_of_numbers_far_from_zero_keeps_their_differences():
    h, weight = 50 + randn(2, 5, 600), randn(600)
    want = block_ops.add_norm(h.double(), None, None, None, weight.double(), None)[1]
    assert error(step.add_norm(h, None, None, None, weight, None)[1], want) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("v", [7, 5000])
def test_gumbel_argmax_equals_its_twin(v, dtype):
    logits = (3 * randn(2, 3, v + 9)).to(dtype)[..., :v]       # as of a head with padding
    logits[0, 1, v // 2:] = float("-inf")
    at = torch.tensor([[5, 0, 7], [2, 2, 300_000]], device=DEVICE)
    key = at, *(torch.tensor(x, device=DEVICE) for x in ([3, 2 ** 62 + 5], [0, 16], [256, 0]))
    want = ops.gumbel_argmax(logits, *key)
    assert torch.equal(step.gumbel_argmax(logits, *key), want) and want.shape == (2, 3)
    logits[1, 2, :] = float("-inf")
    logits[1, 2, v - 1] = -80.0
    assert step.gumbel_argmax(logits, *key)[1, 2] == v - 1


def test_uniform_equals_its_twin():
    key = [torch.tensor(x, device=DEVICE) for x in ([0, 2 ** 63 - 1], [0, 7], [2 ** 31, 5])]    # seed, step, begin
    for n, stream in ((1, -2), (300, -1)):
        got, want = step.uniform(n, stream, *key), ops.uniform(n, stream, *key)
        assert want.shape == (2, n) and torch.equal(got, want)


@pytest.mark.parametrize("l, p", [(8, 1), (8, 3), (8, 8), (600, 250)])
def test_unmask_equals_its_twin(l, p):
    """The second row is near the end of its permutation, and begins it again."""
    mask, order, revealed = 5000, randn(2, l).argsort(1), torch.tensor([0, l - 2], device=DEVICE)
    xt = torch.where(torch.arange(2 * l, device=DEVICE).view(2, l) % 2 > 0, 7, mask)
    at, drawn, results = order[:, :p].contiguous(), torch.arange(2 * p, device=DEVICE).view(2, p), []
    for unmask in (block_ops.unmask_and_advance.plain, step.unmask_and_advance):
        results.append([xt.clone(), at.clone(), revealed.clone()])
        unmask(*results[-1][:2], drawn, mask, order, results[-1][2])
    assert all(map(torch.equal, *results)) and (p == 1 or not torch.equal(results[0][0], xt))


@DTYPES
def test_gated_norm_equals_its_twin_on_columns_of_a_wider_tensor(dtype):
    y, wide = randn(2, 5, 24).to(dtype), randn(2, 5, 40).to(dtype)
    z, weight = wide[..., 3:27], randn(24)
    want = ops.gated_norm(y.double(), z.double(), weight.double())
    with torch.no_grad():
        got = mixer.gated_norm(turned(y), z, weight)
        with pytest.raises(AssertionError, match="contiguous"):
            mixer.gated_norm(y[:, :4], z[:, :4], weight)
    assert (got.double() - want).norm() < (1e-6 if dtype == torch.float32 else 1e-2) * want.norm()
    assert mixer.gated_norm(y.requires_grad_(), z, weight).requires_grad       # the plain twin, which has gradients


def test_the_attention_kernel_reads_a_cache_of_more_than_2_to_the_31_values():
    """Rows 0 and 7 and heads 0 and 17 of 8 x 18 x 262,144 x 64 values, the keys in one half of the positions and the
    values in the other. On a CPU only the pages that are touched take memory."""
    lengths, device = torch.tensor([40, 130]), DEVICE
    try:
        keys, values = torch.empty(8, 18, 262_144, 64, dtype=torch.bfloat16, device=device)[::7, ::17].chunk(2, 2)
    except RuntimeError as refusal:
        pytest.skip(f"no memory for 4.5 GiB: {refusal}")
    assert sum(keys.stride()[:2]) > 2 ** 31
    for i, n in enumerate(lengths):
        keys[i, :, :n], values[i, :, :n] = randn(2, 2, n, 64, dtype=torch.bfloat16)
    q, k, v = randn(2, 16, 3, 2, 64, dtype=torch.bfloat16).unbind(2)
    out = cached_attention.block_attention(q, keys, values, lengths.to(device), k, v, 2)
    own = [u.transpose(1, 2).double() for u in (q, k, v)]
    want = ops.cached_attention(*own, keys[:, :, :130].double(), values[:, :, :130].double(), lengths.to(device), 16)
    assert error(out, want.transpose(1, 2)) < 1e-2
