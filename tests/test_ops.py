"""The heavy operations against their definitions, in fp64."""
import pytest
import torch

import ops
from decoders import Sampler


def attend(q, keys, values):
    """The definition of attention. q (..., m, e); keys, values (..., n, e)."""
    return (q @ keys.mT / q.size(-1) ** 0.5).softmax(-1) @ values


def scan_inputs(s):
    b, h, p, n = 2, 3, 4, 5
    raw = dict(x=torch.randn(b, s, h, p), dt=torch.rand(b, s, h) + 0.01, A=-4 * torch.rand(h), B=torch.randn(b, s, n),
               C=torch.randn(b, s, n), D=torch.randn(h), initial_state=torch.randn(b, h, p, n))
    return {k: v.double() for k, v in raw.items()}


@pytest.mark.parametrize("s, states_every, chunk_len", [
    (48, 16, 8), (48, 16, 16), (48, 16, 128), (45, 9, 6), (33, 11, 4), (37, None, 8), (5, 1, 4), (1, 1, 1)])
def test_chunked_scan_equals_the_loop_with_all_gradients(s, states_every, chunk_len):
    inputs, results = {k: v.requires_grad_() for k, v in scan_inputs(s).items()}, []
    for scan, extra in ((ops.ssd_scan_ref, {}), (ops.ssd_scan, dict(chunk_len=chunk_len))):
        y, states = scan(**inputs, states_every=states_every, **extra)
        weights = torch.linspace(-1, 1, states.numel()).view_as(states)
        grads = torch.autograd.grad((y * torch.cos(y)).sum() + (weights * states).sum(), list(inputs.values()))
        results.append((y, states, *grads))
    for name, a, b in zip(("y", "states", *inputs), *results):
        assert a.shape == b.shape, name
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=lambda m: f"{name}: {m}")


def test_long_decays_neither_overflow_nor_cancel():
    inputs = {k: v.float() for k, v in scan_inputs(512).items()}
    inputs["dt"], inputs["A"] = inputs["dt"] * 10, inputs["A"] * 5
    y, _ = ops.ssd_scan(**inputs, chunk_len=128)
    exact, _ = ops.ssd_scan_ref(**{k: v.double() for k, v in inputs.items()})
    assert (y - exact).norm() / exact.norm() < 1e-6


def test_convolution_is_that_of_torch_after_the_carried_state():
    start, u = torch.randn(2, 27, 6).double().split([3, 24], 1)
    weight, bias = torch.randn(6, 4).double(), torch.randn(6).double()
    reference = torch.nn.functional.conv1d(torch.cat([start, u], 1).mT, weight[:, None], bias, groups=6).mT
    torch.testing.assert_close(ops.causal_conv(u, weight, bias, start), torch.nn.functional.silu(reference))


def test_statistics_are_fp32_in_a_model_of_bf16():
    y, ones = torch.tensor([[2.0 ** -13, 3 * 2.0 ** -13]]).bfloat16(), torch.ones(3, 2).bfloat16()
    exact = 32 * y.double() / (32 ** 2 * 5 * 2.0 ** -26 + 1e-5) ** 0.5         # SiLU(32) is 32
    assert torch.equal(ops.gated_norm(y, 32 * ones[:1], ones[0]), exact.bfloat16())
    assert ops.linear_cross_entropy(y, ones, torch.tensor([1]), ones[0, :1]).dtype == torch.float32
    assert Sampler([0], "confidence", mask_id=9).certainty(y).dtype == torch.float32


def test_cached_attention_ignores_what_lies_beyond_each_rows_length():
    """And what lies in later blocks: here are two new ones."""
    h, l, e, lengths = 2, 4, 8, torch.tensor([0, 8, 4])
    q, k, v = torch.randn(3, 3, h, 2 * l, e).double()
    keys, values = torch.randn(2, 3, h, 16, e).double()
    out = ops.cached_attention(q, k, v, keys, values, lengths, l)
    for i, n in enumerate(lengths):
        for new in (slice(l), slice(l, 2 * l)):
            seen = [torch.cat([old[i, :, :n], x[i, :, :new.stop]], 1) for old, x in ((keys, k), (values, v))]
            torch.testing.assert_close(out[i, :, new], attend(q[i, :, new], *seen))
    some = [2, 0, 2, 1, 3]                              # of a single block, queries may be any, in any number
    part = ops.cached_attention(q[:, :, some], k[:, :, :l], v[:, :, :l], keys, values, lengths, l)
    torch.testing.assert_close(part, out[:, :, some])


def test_philox_gives_the_words_that_its_authors_publish():
    """Known answers of Random123's philox4x32-10."""
    def words(text):
        return [int(word, 16) for word in text.split()]
    for counters, key, want in (
            ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
            ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
            ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1")):
        low, high = words(key)
        seed = low | (high - (high >> 31 << 32)) << 32  # as a signed number
        assert [int(w) for w in ops.philox(*map(torch.tensor, (seed, *words(counters))))] == words(want)


def test_draws_of_all_streams_positions_steps_blocks_and_seeds_are_independent_and_uniform():
    n = 400
    zero, count, first = torch.zeros(n, dtype=torch.long), torch.arange(n), torch.zeros(1, dtype=torch.long)
    keys = (count, zero, zero), (zero, count, zero), (zero, zero, count), (count << 32, zero, zero)
    u = torch.stack([*(ops.uniform(n, stream, first, first, first)[0] for stream in (-1, -2)),
                     *(ops.uniform(1, -1, *key)[:, 0] for key in keys)])
    assert (u > 0).all() and (u < 1).all() and len(u[:, 1:].unique()) == 6 * (n - 1)
    assert len((u * 2.0 ** 52 % 2 ** 20).unique()) > 2300, "the lowest of 52 bits are random, too"
    assert (u.mean(1) - 0.5).abs().max() < 0.06 and (u.var(1) - 1 / 12).abs().max() < 0.01
    assert (torch.corrcoef(u[:, 1:]) - torch.eye(6)).abs().max() < 0.2
    # 7 tokens: random numbers come in pairs, and an odd vocabulary uses half of the last one.
    many = [ops.gumbel_argmax(torch.zeros(1, n, 7), count[None], first + i, first, first) for i in range(50)]
    assert (torch.bincount(torch.cat(many).flatten(), minlength=7) / (50 * n) - 1 / 7).abs().max() < 0.012
    assert len(torch.cat(many).unique(dim=0)) == 50     # other seeds draw other rows


def test_the_table_replaces_an_operation_until_the_plain_functions_are_asked_for(monkeypatch):
    inputs = torch.randn(3, 2, 3, 4)
    want = ops.gated_norm(*inputs)
    monkeypatch.setitem(ops.FAST, "gated_norm", lambda *inputs: -ops.gated_norm.plain(*inputs))
    assert torch.equal(ops.gated_norm(*inputs), -want)
    with ops.plain():
        assert torch.equal(ops.gated_norm(*inputs), want)
    assert torch.equal(ops.gated_norm(*inputs), -want)
