"""KVQuant: ranges, codebooks and outliers against plain numpy; keys before RoPE."""

import numpy as np
import pytest
import torch
from cache_helpers import naive_output, naive_weights, place_of
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
from tiny import tiny_gemma3, tiny_qwen2

from diffkv_repro.baselines import baseline
from diffkv_repro.baselines.kvquant import KVQuant
from diffkv_repro.baselines.kvquant_codec import outliers_a_side
from diffkv_repro.cache import compress
from diffkv_repro.core.codebook import BINS, fit, look_up, nearest
from diffkv_repro.models import UnsupportedAttention


def naive_lloyd(values, weights, levels, rounds=200):
    """Weighted k-means in one dimension from weighted quantiles, one value after the other."""
    order = np.argsort(values)
    mass = np.cumsum(weights[order])
    centres = [values[order][np.searchsorted(mass, (i + 0.5) / levels * mass[-1])] for i in range(levels)]
    for _ in range(rounds):
        near = [min(range(levels), key=lambda level: abs(value - centres[level])) for value in values]
        for level in range(levels):
            own = [index for index, found in enumerate(near) if found == level and weights[index] > 0]
            if own:
                centres[level] = np.average(values[own], weights=weights[own])
    return np.array(centres)


@pytest.mark.parametrize("levels", [2, 4, 8])
def test_a_codebook_is_what_plain_k_means_finds(levels):
    generator = np.random.default_rng(levels)
    # Clusters far apart, of odd sizes: k-means has one answer, and bins of 1/2048 cannot change it.
    middles = np.linspace(-0.9, 0.9, levels)
    values = np.concatenate([m + 0.05 * generator.standard_normal(8 + 5 * i) for i, m in enumerate(middles)]).clip(
        -1, 1
    )
    weights = generator.random(len(values)) + 0.1
    found = fit(torch.from_numpy(values), torch.from_numpy(weights), levels)
    expected = naive_lloyd(values, weights, levels)
    assert np.abs(found.double().numpy() - expected).max() < 2 / BINS


def test_a_codebook_does_better_than_a_grid():
    values = torch.randn(5000, generator=torch.Generator().manual_seed(1)).mul(0.2).clamp(-1, 1)
    grid = torch.linspace(-1, 1, 8)[None]
    errors = [
        (look_up(nearest(values[None], book), book)[0] - values).pow(2).mean()
        for book in (fit(values, torch.ones_like(values), 8)[None], grid)
    ]
    assert errors[0] < errors[1] / 4


def test_weights_draw_levels_and_nothing_gives_a_grid():
    values = torch.tensor([-0.5] * 10 + [0.5, 0.6])
    assert fit(values, torch.tensor([0.0] * 10 + [1.0, 1.0]), 2).tolist() == pytest.approx([0.5, 0.6], abs=1e-3)
    assert fit(values, torch.zeros(12), 4).tolist() == torch.linspace(-1, 1, 4).half().tolist()
    assert fit(values[:0], values[:0], 2).tolist() == [-1, 1]


def test_codes_are_the_nearest_level():
    book = torch.tensor([[-1.0, -0.25, 0.5, 1.0], [-1.0, 0.0, 0.1, 0.2]]).half()
    values = torch.tensor([[-2.0, -0.5, 0.2, 0.8], [0.04, 0.06, 0.14, 9.0]])
    codes = nearest(values, book)
    assert codes.tolist() == [[0, 1, 2, 3], [1, 2, 2, 3]]
    assert torch.equal(look_up(codes, book)[0], torch.tensor([-1.0, -0.25, 0.5, 1.0]))


def half_range(low, high):
    """Centre and half width as FP16 holds them, nothing left out."""
    centre = np.float16((np.float32(low) + np.float32(high)) / 2)
    width = max(high - np.float32(centre), np.float32(centre) - low, np.float32(0))
    return np.float32(centre), np.float32(np.float16(width * (1 + 2**-10) + 2**-24)) if width > 0 else np.float32(0)


def rotated(vectors, sign):
    """RoPE of the llama family on [tokens, head_dim] at positions 0, 1, ..., or back."""
    tokens, dim = vectors.shape
    angle = np.arange(tokens)[:, None] * 10000.0 ** (-np.arange(0, dim, 2) / dim)
    cos, sin = np.cos(angle), sign * np.sin(angle)
    first, second = vectors[:, : dim // 2], vectors[:, dim // 2 :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1)


def naive_kvquant(call, prompt, method, codec):
    """Keys and values [kv_heads, tokens, head_dim] that the method keeps, and how many keys are outliers."""
    kv_heads, tokens, _ = call.key[0].shape
    key = np.concatenate([rotated(head.double().numpy(), -1) for head in call.key[0]], axis=1).astype(np.float32)
    value = np.concatenate(list(call.value[0].numpy()), axis=1)
    books = [book[0].float().numpy() for book in (codec.key_book, codec.value_book)]

    def level(x, centre, width, book):
        return centre + width * book[np.abs(book - (x - centre) / width).argmin()]

    kept_key, kept_value, outliers = key.copy(), value.copy(), 0
    for channel in range(key.shape[1]):
        seen = key[method.sink : prompt, channel]
        span = half_range(*np.quantile(seen, [method.outliers / 2, 1 - method.outliers / 2]).astype(np.float32))
        for token in range(method.sink, tokens):
            if abs(key[token, channel] - span[0]) > span[1]:
                outliers += 1
            else:
                kept_key[token, channel] = level(key[token, channel], *span, books[0])
    side = int(method.outliers / 2 * (key.shape[1] - 1)) + 1
    for token in range(method.sink, tokens):
        order = np.argsort(value[token])
        span = half_range(value[token, order[side]], value[token, order[-side - 1]])
        for channel in order[side:-side]:
            kept_value[token, channel] = level(value[token, channel], *span, books[1])
    keys = np.stack([rotated(head, 1) for head in np.split(kept_key, kv_heads, axis=1)])
    return keys, np.stack(np.split(kept_value, kv_heads, axis=1)), outliers


@pytest.mark.parametrize("storage", ["simulated", "packed"])
@pytest.mark.parametrize("method", [KVQuant(), KVQuant(bits=2, outliers=0.1, sink=3), KVQuant(bits=4, sink=0)])
def test_attention_is_that_over_what_plain_numpy_keeps(storage, method):
    call = call_of(46)
    layer = start(method, storage, call, 40)
    output = go_on(layer, call, 40, [1, 5])
    key, value, outliers = naive_kvquant(call, 40, method, layer._store.codec)
    twin = call.__class__(0, call.query, *(torch.from_numpy(t)[None] for t in (key, value)), call.scale, None, None)
    expected = naive_output(twin, naive_weights(twin))[:, :, 40:]
    # FP16 holds outliers and sinks, which the twin keeps as they are.
    assert torch.allclose(output.double(), torch.from_numpy(expected), atol=3e-3)
    assert int(layer._outliers.sum()) == outliers


def test_bytes_by_hand():
    call = call_of(40)
    layer = start(KVQuant(), "packed", call, 40)
    count, keys = layer.kv_bytes(rows_at(call, 40)), int(layer._outliers)
    assert count.payload == 39 * 2 * 32 * 3 // 8
    assert count.window == 2 * 32 * 2
    # Centre and half width of 32 channels and 39 values; two outliers a value; the outliers of keys.
    assert count.scales == 32 * 4 + 39 * 4 + 39 * 2 * 2 + keys * 2
    assert count.tables == 2 * 8 * 2 + 39 * 2 * 2 + keys * 4
    assert count.full == 40 * 64 * 2
    # The quantiles lie between the outermost two of 39 tokens, unless FP16 rounds the range up to take one in.
    assert 2 * 32 - 3 <= keys <= 2 * 32


def test_outliers_a_side_are_those_of_inclusive_quantiles():
    for width in (6, 32, 192, 1000, 4096):
        values = np.random.default_rng(width).standard_normal(width)
        assert outliers_a_side(width, 0.01) == int((values >= np.quantile(values, 0.995)).sum())
    assert outliers_a_side(64, 0) == 0


def test_a_large_outlier_is_exact():
    call = call_of(30)
    value = call.value.clone()
    value[0, 1, 20, 7] = 500.0
    call = call.__class__(0, call.query, call.key, value, call.scale, None, None)
    layer = start(KVQuant(), "simulated", call, 29)
    assert layer._store.view([0], None, None)[1][0, 1, 20, 7] == 500


@pytest.mark.parametrize(("prompt", "padding"), [(1, None), (2, None), (33, None), (20, (0, 5, 18))])
@pytest.mark.parametrize("method", [KVQuant(), KVQuant(bits=4, outliers=0, sink=4), KVQuant(bits=2, sink=0)])
def test_storages_agree(prompt, padding, method):
    check_storages(method, prompt, 6, padding, batch=len(padding or [0]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_storages_agree_in_half_precision(dtype):
    check_storages(KVQuant(), 20, 4, dtype=dtype)


def test_runs_padding_and_beams():
    check_runs(KVQuant(), 20, [1, 7, 3])
    check_runs(KVQuant(sink=4), 2, [3, 6], storage="packed")
    # Each sequence has ranges and codebooks of its own.
    check_padding(KVQuant(), 24, 5, (0, 4, 22))
    check_select(KVQuant(), 20, 5)
    check_select(KVQuant(sink=9), 10, 3)
    check_generates(KVQuant(), num_beams=2)
    check_generates(KVQuant(bits=2), model=tiny_qwen2())


def test_keys_without_a_range_are_exact():
    """A prompt of a single token says nothing about later ones: their keys are stored as outliers."""
    call = call_of(9)
    layer = start(KVQuant(outliers=0.01), "packed", call, 1)
    go_on(layer, call, 1, [1] * 8)
    kept = layer._store.view([0], rows_at(call, 9).positions, layer._transform)[0]
    assert torch.allclose(kept, call.key, atol=5e-3)
    assert layer.kv_bytes(rows_at(call, 9)).true_ratio > 1


def test_constant_rows_survive():
    call = constant_call(20)
    output = go_on(start(KVQuant(), "packed", call, 15), call, 15, [5])
    assert torch.allclose(output, torch.full_like(output, -3.7), atol=2e-3)


def test_fp16_cannot_hold_everything():
    call = call_of(10)
    wild = call.__class__(0, call.query, call.key * 1e6, call.value, call.scale, None, None)
    with pytest.raises(ValueError, match="allowed are finite values within"):
        start(KVQuant(), "simulated", wild, 8)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bits": 8}, "bits is 8; allowed are 2, 3, 4"),
        ({"outliers": 1}, "outliers is 1"),
        ({"outliers": -0.1}, "outliers is -0.1"),
        ({"sink": -1}, "sink is -1"),
    ],
)
def test_settings_that_make_no_sense(given, message):
    with pytest.raises(ValueError, match=message):
        KVQuant(**given)


def test_a_model_needs_a_rotary_embedding_it_can_be_undone_with():
    with pytest.raises(UnsupportedAttention, match="layer 0: keys before RoPE"):
        KVQuant().layer(place_of(), "packed")
    with pytest.raises(UnsupportedAttention), compress(tiny_gemma3(), KVQuant()):
        pass
    with pytest.raises(ValueError, match="unknown storage 'disk'"):
        KVQuant().layer(place(), "disk")


def test_label():
    assert baseline("kvquant")().label == "KVQuant 3-bit"
