"""QAQ: bits from range and attention, quantisation to the middles of segments."""

import math

import numpy as np
import pytest
import torch
from cache_helpers import naive_quantise, naive_weights
from quantiser_checks import (
    call_of,
    check_generates,
    check_padding,
    check_runs,
    check_select,
    check_storages,
    constant_call,
    go_on,
    place,
    rows_at,
    start,
)

from diffkv_repro.baselines import baseline
from diffkv_repro.baselines.qaq import Qaq, bits_of, shift_for


def naive_bits(needs, mean, least, most):
    """The same bits by trying one shift after the other, from the smallest on; the shift is where it stops."""
    best, last = [least] * len(needs), None
    for shift in sorted(k - need for need in needs for k in range(least, most) if need > -math.inf):
        # Just above the shift, this token gets one bit more.
        bits = [
            min(max(math.ceil(round(need + shift + 1e-7, 9)), least), most) if need > -math.inf else least
            for need in needs
        ]
        last = shift
        if np.mean(bits) > mean + 1e-9:
            return best, last
        best = bits
    return best, math.inf


@pytest.mark.parametrize("mean", [1, 2.3, 3, 5, 8])
def test_bits_have_the_wanted_mean(mean):
    needs = torch.randn(60, generator=torch.Generator().manual_seed(3), dtype=torch.float64).mul(2).float()
    shift = shift_for(needs, mean, 1, 8)
    bits = bits_of(needs, torch.tensor(shift), mean, 1, 8)
    expected, at = naive_bits(needs.double().tolist(), mean, 1, 8)
    assert bits.tolist() == expected
    assert shift == pytest.approx(at, abs=1e-5)
    assert mean - 1 / 60 < bits.float().mean() <= mean


def test_bits_follow_the_formula():
    """B = ceil(log2(range / (2 sqrt(3) sigma))), the constant and sigma being one shift."""
    ranges, sigma = torch.tensor([0.5, 1.0, 3.0, 9.0, 100.0]), 0.1
    shift = torch.tensor(-math.log2(2 * math.sqrt(3) * sigma))
    expected = [min(max(math.ceil(math.log2(r / (2 * math.sqrt(3) * sigma))), 1), 8) for r in ranges.tolist()]
    assert bits_of(ranges.log2(), shift, 3, 1, 8).tolist() == expected == [1, 2, 4, 5, 8]


def test_nothing_to_set_a_sigma_from():
    assert math.isnan(shift_for(torch.empty(0), 3, 1, 8))
    assert bits_of(torch.tensor([-5.0, 9.0]), torch.tensor(math.nan), 3.7, 1, 8).tolist() == [3, 3]
    assert shift_for(torch.tensor([1.0, 2.0]), 8, 1, 8) == math.inf
    constant = torch.full((4,), -math.inf)
    assert bits_of(constant, torch.tensor(shift_for(constant, 3, 1, 8)), 3, 1, 8).tolist() == [1] * 4


def segments(vector, bits, side):
    """A vector in 2**bits equal segments between its inner values, each as its middle; its outliers as they are."""
    vector = vector.astype(np.float16).astype(np.float32)
    order = np.argsort(vector)
    low, high = vector[order[side]], vector[order[len(vector) - 1 - side]]
    half = (high - low) / np.float32(2 ** (bits + 1))
    result = naive_quantise(np.clip(vector, low + half, high - half), 2**bits)[3]
    step = (high - low) / 2**bits
    middles = low + (np.arange(2**bits) + 0.5) * step
    assert max(np.abs(middles - value).min() for value in result) < 1e-2 * max(step, 1e-6) + 2e-3
    result[order[:side]], result[order[len(vector) - side :]] = (
        vector[order[:side]],
        vector[order[len(vector) - side :]],
    )
    return result


def naive_qaq(call, prompt, method):
    """Outputs in generation, in numpy, step by step and head by head."""
    heads, tokens, dim = call.query[0].shape
    kv_heads = call.key.shape[1]
    group, window = heads // kv_heads, method.window
    side = math.ceil(method.outliers / 2 * dim)
    query = call.query[0].double().numpy()
    exact = [t[0].numpy().astype(np.float16).astype(np.float32) for t in (call.key, call.value)]
    kept = [t.copy() for t in exact]
    scores = naive_weights(call)[0].reshape(kv_heads, group, tokens, tokens)

    def need(which, head, token, score, seen):
        vector = np.sort(exact[which][head, token])
        spread = math.log2(vector[dim - 1 - side] - vector[side])
        return spread if which == 0 else spread + math.log2(score * math.sqrt(seen))

    ready = max(0, prompt - window + 1)
    best = scores[:, :, prompt - window if prompt > window else 0 : prompt].max(axis=(1, 2))
    shifts = []
    for which in (0, 1):
        needs = [
            need(which, head, token, best[head, token], prompt) for head in range(kv_heads) for token in range(ready)
        ]
        bits, shift = naive_bits(needs, method.means[which], method.least, method.most)
        shifts.append(shift)
        for index, width in enumerate(bits):
            head, token = divmod(index, ready)
            kept[which][head, token] = segments(exact[which][head, token], width, side)
    # Values of generation: by what the newest tokens of the prompt got from their first queries.
    newest = range(max(0, ready - 64), ready)
    needs = [
        need(1, head, token, scores[head, :, token : token + window, token].max(), token + window)
        for head in range(kv_heads)
        for token in newest
    ]
    shifts[1] = naive_bits(needs, method.means[1], method.least, method.most)[1]
    outputs = np.zeros((heads, tokens - prompt, dim))
    for at in range(prompt, tokens):
        for head in range(heads):
            logits = kept[0][head // group, : at + 1].astype(np.float64) @ query[head, at] * call.scale
            weights = np.exp(logits - logits.max())
            weights /= weights.sum()
            outputs[head, at - prompt] = weights @ kept[1][head // group, : at + 1]
            scores[head // group, head % group, at, : at + 1] = weights
        token = at - window + 1
        for head in range(kv_heads):
            best = scores[head, :, token : at + 1, token].max()
            for which in (0, 1):
                wanted = math.ceil(round(need(which, head, token, best, at + 1) + shifts[which], 9))
                width = min(max(wanted, method.least), method.most)
                kept[which][head, token] = segments(exact[which][head, token], width, side)
    return outputs


@pytest.mark.parametrize("storage", ["simulated", "packed"])
@pytest.mark.parametrize(
    ("method", "prompt"),
    [(Qaq(), 22), (Qaq(bits=4, value_bits=2, window=3, outliers=0.2), 22), (Qaq(window=1), 22), (Qaq(bits=2), 75)],
)
def test_every_step_is_that_of_a_plain_twin(storage, method, prompt):
    call = call_of(prompt + 8)
    layer = start(method, storage, call, prompt)
    output = go_on(layer, call, prompt, [1] * 8)[0]
    assert torch.allclose(output.double(), torch.from_numpy(naive_qaq(call, prompt, method)), atol=2e-3)


def test_generation_has_about_the_same_mean():
    call = call_of(180)
    layer = start(Qaq(bits=2.5, value_bits=3.5), "simulated", call, 120)
    go_on(layer, call, 120, [60])
    means = [float(half[116:].float().mean()) for half in layer._bits[:, 0].split(2, dim=-1)]
    # Attention to random keys thins out as 1 / T and the formula makes up for sqrt(T) of it: a third of a bit here.
    assert means == pytest.approx([2.5, 3.5 - 0.33], abs=0.15)


def test_bytes_by_hand():
    call = call_of(24)
    layer = start(Qaq(), "packed", call, 24)
    count = layer.kv_bytes(rows_at(call, 24))
    # 20 tokens of 2 heads are quantised, 4 are not; two outliers a vector, in one byte each.
    assert 2 * 20 * 16 * 6 / 8 - 16 * 2 / 8 <= count.payload <= 2 * 20 * 16 * 6 / 8
    assert count.window == 4 * 2 * 2 * 16 * 2
    assert count.scales == 20 * 2 * 2 * (4 + 2 * 2)
    assert count.tables == 20 * 2 * 2 * (2 + 1) + 3 * 4
    assert count.scores == 4 * 2 * 4
    assert count.full == 24 * 2 * 2 * 16 * 2
    tiers = layer.tier_counts(rows_at(call, 24))
    assert tiers["K16V16"] == [4, 4]
    assert sum(sum(counts) for counts in tiers.values()) == 48


def test_values_with_more_attention_get_more_bits():
    call = call_of(60)
    layer = start(Qaq(), "simulated", call, 60)
    received = torch.from_numpy(naive_weights(call)[0]).view(2, 3, 60, 60)[:, :, 55:].amax(dim=(1, 2))[:, :56]
    bits = layer._bits[:, 0, 2:].T.float()
    high, low = bits[received > received.median()], bits[received <= received.median()]
    assert high.mean() > low.mean() + 1
    assert abs(float(bits.mean()) - 3) < 0.05


@pytest.mark.parametrize(("prompt", "padding"), [(1, None), (4, None), (5, None), (30, None), (20, (0, 5, 18))])
@pytest.mark.parametrize("method", [Qaq(), Qaq(bits=6, value_bits=1.5, window=2, outliers=0)])
def test_storages_agree(prompt, padding, method):
    check_storages(method, prompt, 7, padding, batch=len(padding or [0]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_storages_agree_in_half_precision(dtype):
    check_storages(Qaq(), 20, 7, dtype=dtype)


def test_runs_padding_and_beams():
    check_runs(Qaq(), 20, [1, 7, 3])
    check_padding(Qaq(), 24, 7, (0, 4, 22))
    check_select(Qaq(), 20, 7)
    check_select(Qaq(), 20, 7, storage="simulated")
    check_generates(Qaq(), num_beams=2)


def test_constant_rows_survive():
    call = constant_call(20)
    output = go_on(start(Qaq(), "packed", call, 15), call, 15, [5])
    assert torch.allclose(output, torch.full_like(output, -3.7), atol=2e-3)


def test_a_short_prompt_is_exact_until_the_window_has_passed():
    call = call_of(9)
    layer = start(Qaq(), "simulated", call, 2)
    output = go_on(layer, call, 2, [1, 1])
    expected = naive_weights(call) @ np.repeat(call.value.double().numpy(), 3, axis=1)
    assert torch.allclose(output.double(), torch.from_numpy(expected[:, :, 2:4]), atol=3e-3)
    assert layer.kv_bytes(rows_at(call, 4)).nominal_ratio == 1
    go_on(layer, call, 4, [1, 1])
    assert layer.tier_counts(rows_at(call, 6)) == {"K3V3": [2, 2], "K16V16": [4, 4]}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bits": 0.5}, "bits is 0.5; a mean of 1 to 8"),
        ({"value_bits": 9}, "value_bits is 9"),
        ({"least": 0}, "least and most are 0 and 8"),
        ({"window": 0}, "window is 0"),
        ({"outliers": 0.9}, "outliers is 0.9"),
    ],
)
def test_settings_that_make_no_sense(given, message):
    with pytest.raises(ValueError, match=message):
        Qaq(**given)
    with pytest.raises(ValueError, match="unknown storage 'disk'"):
        Qaq().layer(place(), "disk")


def test_label_and_ratio():
    assert baseline("qaq")().label == "QAQ 3-bit"
    assert Qaq(bits=4, value_bits=3).label == "QAQ 3.5-bit"
    call = call_of(200)
    layer = start(Qaq(window=1), "simulated", call, 200)
    assert layer.kv_bytes(rows_at(call, 200)).nominal_ratio == pytest.approx(0.1875, abs=1e-3)
