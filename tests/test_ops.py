"""The heavy operations against their definitions, in fp64."""
import pytest
import torch

import ops


def attend(q, keys, values):
    """The definition of attention. q (..., m, e); keys, values (..., n, e)."""
    return (q @ keys.mT / q.size(-1) ** 0.5).softmax(-1) @ values


def scan_inputs(s):
    b, h, p, n = 2, 3, 4, 5
    raw = dict(x=torch.randn(b, s, h, p), dt=torch.rand(b, s, h) + 0.01, A=-4 * torch.rand(h),
               B=torch.randn(b, s, n), C=torch.randn(b, s, n), D=torch.randn(h),
               initial_state=torch.randn(b, h, p, n))
    return {k: v.double() for k, v in raw.items()}


@pytest.mark.parametrize("s, states_every, chunk_len",
                         [(48, 16, 8), (48, 16, 16), (48, 16, 128), (45, 9, 6), (33, 11, 4), (37, None, 8), (5, 1, 4),
                          (1, 1, 1)])
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


def test_convolution_with_carried_state_equals_one_pass():
    u, weight, bias = torch.randn(2, 24, 6).double(), torch.randn(6, 4).double(), torch.randn(6).double()
    start = torch.randn(2, 3, 6).double()
    whole = ops.causal_conv(u, weight, bias, start)
    states = ops.conv_boundaries(u, start, 8)
    assert states.shape == (2, 4, 3, 6)
    for i in range(3):
        part = ops.causal_conv(u[:, 8 * i:8 * i + 8], weight, bias, states[:, i])
        torch.testing.assert_close(part, whole[:, 8 * i:8 * i + 8])
    reference = torch.nn.functional.conv1d(
        torch.cat([start, u], 1).transpose(1, 2), weight[:, None], bias, groups=6).transpose(1, 2)
    torch.testing.assert_close(whole, torch.nn.functional.silu(reference))


def test_two_stream_attention_equals_attention_block_by_block():
    b, h, l, k, e = 2, 3, 4, 5, 8
    clean = [torch.randn(b, h, (k - 1) * l, e).double() for _ in range(3)]
    noisy = [torch.randn(b, h, k * l, e).double() for _ in range(3)]
    out_clean, out_noisy = ops.two_stream_attention(clean, noisy, ops.two_stream_masks(k * l, l, "cpu"))
    for i in range(k):
        start, stop = i * l, i * l + l
        q, *own = (part[:, :, start:stop] for part in noisy)
        keys, values = (torch.cat([c[:, :, :start], n], 2) for c, n in zip(clean[1:], own))
        torch.testing.assert_close(out_noisy[:, :, start:stop], attend(q, keys, values))
        if i < k - 1:                                   # the last block has no clean tokens
            q, keys, values = clean[0][:, :, start:stop], clean[1][:, :, :stop], clean[2][:, :, :stop]
            torch.testing.assert_close(out_clean[:, :, start:stop], attend(q, keys, values))


def test_cached_attention_ignores_what_lies_beyond_each_rows_length():
    b, h, l, e, lengths = 3, 2, 4, 8, [0, 8, 4]
    q, k, v = (torch.randn(b, h, l, e).double() for _ in range(3))
    keys, values = torch.randn(2, b, h, 16, e).double()
    out = ops.cached_attention(q, k, v, keys, values, torch.tensor(lengths), l)
    for i, n in enumerate(lengths):
        ks, vs = torch.cat([keys[i, :, :n], k[i]], 1), torch.cat([values[i, :, :n], v[i]], 1)
        torch.testing.assert_close(out[i], attend(q[i], ks, vs))
    some = [2, 0, 2, 1, 3]                              # queries may be any positions of a block, in any number
    for held in (torch.tensor(lengths), torch.tensor([8, 8, 8])):
        part, whole = (ops.cached_attention(u, k, v, keys, values, held, l) for u in (q[:, :, some], q))
        torch.testing.assert_close(part, whole[:, :, some])


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
    u = torch.stack([
        ops.uniform(n, -1, first, first, first)[0], ops.uniform(n, -2, first, first, first)[0],
        ops.uniform(1, -1, count, zero, zero)[:, 0], ops.uniform(1, -1, zero, count, zero)[:, 0],
        ops.uniform(1, -1, zero, zero, count)[:, 0], ops.uniform(1, -1, count << 32, zero, zero)[:, 0]])
    assert (u > 0).all() and (u < 1).all() and len(u[:, 1:].unique()) == 6 * (n - 1)
    assert (u.mean(1) - 0.5).abs().max() < 0.06 and (u.var(1) - 1 / 12).abs().max() < 0.01
    assert (torch.corrcoef(u[:, 1:]) - torch.eye(6)).abs().max() < 0.2
    # 7 tokens: random numbers come in pairs, and an odd vocabulary uses half of the last one.
    many = [ops.gumbel_argmax(torch.zeros(1, n, 7), count[None], first + i, first, first) for i in range(50)]
    assert (torch.bincount(torch.cat(many).flatten(), minlength=7) / (50 * n) - 1 / 7).abs().max() < 0.012
    assert len(torch.cat(many).unique(dim=0)) == 50     # other seeds draw other rows


def test_the_table_replaces_an_operation_until_the_plain_functions_are_asked_for(monkeypatch):
    y, z, weight = torch.randn(2, 3, 4), torch.randn(2, 3, 4), torch.ones(4)
    want, calls = ops.gated_norm(y, z, weight), []
    def fast(*inputs):
        calls.append(inputs)
        return ops.gated_norm.plain(*inputs)
    monkeypatch.setitem(ops.FAST, "gated_norm", fast)
    assert torch.equal(ops.gated_norm(y, z, weight), want) and len(calls) == 1
    with ops.plain():
        assert torch.equal(ops.gated_norm(y, z, weight), want) and len(calls) == 1
    assert ops.FAST == {"gated_norm": fast}
