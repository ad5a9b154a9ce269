"""No value is further than half a stored step from its code, whatever its scale, its offset and its group."""

import numpy as np
import pytest
import torch
from cache_helpers import naive_quantise
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from diffkv_repro.core.quantize import dequantize, quantize

LARGEST = 65504.0
half_range = st.floats(-LARGEST, LARGEST, width=32)
levels_of = st.one_of(st.sampled_from([2, 3, 4, 15, 16, 255, 256]), st.integers(2, 256))
ways = st.one_of(
    st.tuples(st.sampled_from(["token", "channel"]), st.none() | st.integers(1, 9)), st.just(("tensor", None))
)
blocks = st.tuples(st.integers(1, 3), st.integers(1, 7), st.integers(1, 7))


@st.composite
def hostile(draw, shape=None):
    """Values of any scale from subnormal to the largest, narrow ranges far from zero, constant rows, lone outliers."""
    shape = draw(blocks) if shape is None else shape
    kind = draw(st.sampled_from(["any", "scaled", "far", "constant", "outlier", "extremes"]))
    if kind == "any":
        return torch.from_numpy(draw(arrays(np.float32, shape, elements=half_range)))
    if kind == "extremes":
        return torch.from_numpy(draw(arrays(np.float32, shape, elements=st.sampled_from([-LARGEST, 0.0, LARGEST]))))
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 2**31))))
    if kind == "constant":
        return torch.full(shape, draw(half_range))
    if kind == "far":
        return draw(st.floats(-60_000, 60_000, width=32)) + noise * 10.0 ** draw(st.integers(-8, 2))
    values = noise * 10.0 ** draw(st.integers(-9, 4))
    if kind == "outlier":
        values.view(-1)[draw(st.integers(0, values.numel() - 1))] = draw(half_range)
    return values.clamp(-LARGEST, LARGEST)


def scale_of_each(stored, shape):
    """The stored step of every value, in float64."""
    scale = stored.scale.double()
    if stored.axis == "tensor":
        return scale.reshape(*shape[:-2], 1, 1).expand(shape)
    along = -1 if stored.axis == "token" else -2
    owner = torch.arange(shape[along]) // stored.group
    return scale.index_select(along, owner)


def assert_within_half_a_step(x, stored):
    step = scale_of_each(stored, x.shape)
    error = (dequantize(stored).double() - x.double()).abs()
    # Differences, quotient and result are rounded to float32, each by at most 2**-24 of what it is.
    span = x.double().abs().max() + step * (stored.levels - 1)
    allowed = step / 2 + 2**-21 * span + 1e-44
    assert bool((error <= allowed).all()), f"error {float((error - allowed).max()):g} beyond half a step"


@given(hostile(), levels_of, ways)
def test_the_error_is_at_most_half_a_stored_step(x, levels, way):
    axis, group = way
    before = x.clone()
    stored = quantize(x, levels, axis=axis, group=group)
    assert torch.equal(x, before)
    assert stored.codes.shape == x.shape
    assert stored.codes.dtype == torch.uint8
    assert stored.scale.dtype == stored.zero.dtype == torch.float16
    assert int(stored.codes.max()) < levels
    assert bool((torch.isfinite(stored.scale) & torch.isfinite(stored.zero) & (stored.scale >= 0)).all())
    assert_within_half_a_step(x, stored)


@given(hostile(), levels_of, ways, st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
def test_every_dtype_comes_back_finite(x, levels, way, dtype):
    axis, group = way
    limit = 65280 if dtype == torch.bfloat16 else LARGEST
    x = x.clamp(-limit, limit).to(dtype)
    stored = quantize(x, levels, axis=axis, group=group)
    assert_within_half_a_step(x, stored)
    for wanted in (torch.float16, torch.bfloat16, torch.float32):
        back = dequantize(stored, wanted)
        assert back.dtype == wanted
        assert back.shape == x.shape
        assert bool(torch.isfinite(back).all())


def groups_by_hand(x, axis, group):
    """Index tuples of what shares a scale, and where its scale is found."""
    lead, tokens, channels = x.shape
    for first in range(lead):
        if axis == "tensor":
            yield (first,), (first, ...)
            continue
        length, others = (channels, tokens) if axis == "token" else (tokens, channels)
        size = group or length
        for other in range(others):
            for number, start in enumerate(range(0, length, size)):
                part = slice(start, start + size)
                if axis == "token":
                    yield (first, other, part), (first, other, number)
                else:
                    yield (first, part, other), (first, number, other)


@given(hostile(), levels_of, ways)
def test_equal_to_a_naive_quantiser_group_by_group(x, levels, way):
    axis, group = way
    stored = quantize(x, levels, axis=axis, group=group)
    back = dequantize(stored)
    for values, params in groups_by_hand(x, axis, group):
        codes, scale, zero, expected = naive_quantise(x[values].flatten(), levels)
        assert float(stored.scale[params]) == scale
        assert float(stored.zero[params]) == zero
        np.testing.assert_array_equal(stored.codes[values].flatten(), codes)
        np.testing.assert_allclose(back[values].flatten(), expected, rtol=2**-22, atol=2**-22 * abs(float(zero)))


@pytest.mark.parametrize("levels", [2, 3, 16, 255, 256])
@given(value=st.floats(-LARGEST, LARGEST, width=16))
def test_constant_rows_of_half_precision_numbers_are_exact(levels, value):
    x = torch.full((3, 5), value)
    stored = quantize(x, levels)
    assert torch.equal(dequantize(stored), x)
    assert torch.equal(dequantize(stored, torch.float16).float(), x)
    assert not bool(stored.codes.any())


@pytest.mark.parametrize("levels", [2, 3, 16, 255, 256])
@given(value=half_range)
def test_other_constant_rows_are_within_half_a_unit_of_half_precision(levels, value):
    x = torch.full((2, 5), value)
    # The unit of the interval between two numbers of half precision that the value lies in.
    lower = np.float16(value) if np.float16(value) <= value else np.nextafter(np.float16(value), np.float16(-np.inf))
    with np.errstate(over="ignore"):
        unit = float(np.nextafter(lower, np.float16(np.inf))) - float(lower)
    error = (dequantize(quantize(x, levels)).double() - x.double()).abs().max()
    assert float(error) <= unit / 2 * (1 + 2**-20)


@pytest.mark.parametrize("levels", [2, 3, 4, 16, 255, 256])
def test_a_narrow_range_far_from_zero_is_not_clipped(levels):
    x = 1000.3 + torch.linspace(0, 1e-2, 64)[None]
    stored = quantize(x, levels)
    assert_within_half_a_step(x, stored)
    assert float((dequantize(stored) - x).abs().max()) < 0.55 / (levels - 1) + 1e-3


@pytest.mark.parametrize("ends", [(-LARGEST, LARGEST), (-60_000.0, 10_000.0), (-LARGEST, 1.0), (0.5, LARGEST)])
def test_two_levels_over_the_whole_range(ends):
    x = torch.linspace(*ends, 9)[None]
    stored = quantize(x, 2)
    assert_within_half_a_step(x, stored)
    assert bool(torch.isfinite(dequantize(stored, torch.float16)).all())


def test_subnormal_ranges_have_a_step():
    x = torch.tensor([[0.0, 3e-8, 6e-8, 1e-7, 2e-7]])
    stored = quantize(x, 256)
    assert float(stored.scale) == 2**-24
    assert float((dequantize(stored) - x).abs().max()) <= 2**-25


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0), (2, 0, 5), (2, 3, 0), (0, 3, 5)])
@pytest.mark.parametrize(
    ("axis", "group"), [("token", None), ("token", 2), ("channel", None), ("channel", 2), ("tensor", None)]
)
def test_empty_tensors_stay_empty(shape, axis, group):
    back = dequantize(quantize(torch.zeros(shape), 16, axis=axis, group=group))
    assert back.shape == shape


@pytest.mark.parametrize(("axis", "shape"), [("token", (2, 5, 3)), ("channel", (2, 2, 7)), ("tensor", (2, 1))])
def test_parameters_have_the_documented_shape(axis, shape):
    stored = quantize(torch.randn(2, 5, 7), 16, axis=axis, group=None if axis == "tensor" else 3)
    assert stored.scale.shape == stored.zero.shape == shape


@pytest.mark.parametrize(
    ("value", "named"),
    [(float("nan"), "nan"), (float("inf"), "inf"), (float("-inf"), "-inf"), (1e5, "100000"), (-65520.0, "-65520")],
)
@pytest.mark.parametrize("axis", ["token", "channel", "tensor"])
def test_what_half_precision_cannot_hold_is_refused_by_value(axis, value, named):
    x = torch.randn(2, 4, 6)
    x[1, 2, 3] = value
    with pytest.raises(ValueError, match=f"a value to quantise is {named}; allowed are finite values within .*65504"):
        quantize(x, 16, axis=axis)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"levels": 1}, "levels is 1; allowed are 2 to 256"),
        ({"levels": 257}, "levels is 257; allowed are 2 to 256"),
        ({"levels": 0}, "levels is 0;"),
        ({"levels": 4, "axis": "row"}, "unknown axis 'row'; allowed are token, channel, tensor"),
        ({"levels": 4, "group": 0}, "group is 0; it must be at least 1"),
        ({"levels": 4, "axis": "channel", "group": -2}, "group is -2; it must be at least 1"),
        ({"levels": 4, "axis": "tensor", "group": 2}, "a group belongs to axis token or channel"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        quantize(torch.zeros(3, 4), **arguments)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("levels", [2, 3, 7, 16, 255, 256])
def test_a_gpu_gives_the_codes_of_the_cpu(levels):
    x = torch.randn(64, 333, 128, generator=torch.Generator().manual_seed(levels)).half()
    here, there = quantize(x, levels), quantize(x.cuda(), levels)
    for name in ("codes", "scale", "zero"):
        assert torch.equal(getattr(here, name), getattr(there, name).cpu()), name
