"""Bytes of a vector and its round trip without bytes are the same numbers."""

import pytest
import torch
from cache_helpers import naive_codec
from hypothesis import given
from hypothesis import strategies as st

from diffkv_repro.core.precision import BITS
from diffkv_repro.core.vectors import VectorCodec

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@st.composite
def codecs(draw, bits=BITS):
    groups = draw(st.sampled_from([1, 2, 3, 5]))
    head_dim = groups * draw(st.integers(1, 9))
    return VectorCodec(head_dim, draw(st.sampled_from(bits)), groups, draw(st.sampled_from(DTYPES[1:])))


def rows_for(codec, count, seed, exponent=0, offset=0.0):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, codec.head_dim, generator=generator) * 10.0**exponent + offset
    return rows.clamp(-65280, 65280)


@given(
    codecs(), st.integers(0, 9), st.integers(0, 2**31), st.integers(-8, 4), st.floats(-3e4, 3e4),
    st.sampled_from(DTYPES), st.sampled_from(DTYPES),
)  # fmt: skip
def test_decoded_bytes_equal_the_round_trip_bit_for_bit(codec, count, seed, exponent, offset, given_as, wanted):
    rows = rows_for(codec, count, seed, exponent, offset).to(given_as)
    codes, params = codec.encode(rows)
    assert codes.shape == (count, codec.code_bytes)
    assert params.shape == (count, codec.params)
    assert codes.dtype == torch.uint8
    assert params.dtype == torch.float16
    decoded = codec.decode(codes, params, wanted)
    assert decoded.dtype == wanted
    assert decoded.shape == rows.shape
    assert torch.equal(decoded, codec.round_trip(rows, wanted))
    assert bool(torch.isfinite(decoded).all())


@given(codecs(), st.integers(0, 2**31), st.integers(0, 9))
def test_a_row_does_not_depend_on_its_neighbours(codec, seed, count):
    rows = rows_for(codec, count + 1, seed)
    codes, params = codec.encode(rows)
    own_codes, own_params = codec.encode(rows[-1:])
    assert torch.equal(codes[-1:], own_codes)
    assert torch.equal(params[-1:], own_params)


@given(codecs(bits=[1, 2, 4, 8]), st.integers(0, 2**31), st.integers(-6, 4))
def test_equal_to_a_naive_quantiser(codec, seed, exponent):
    rows = rows_for(codec, 3, seed, exponent)
    expected = torch.stack([torch.from_numpy(naive_codec(row, codec.bits, codec.groups)) for row in rows])
    torch.testing.assert_close(
        codec.round_trip(rows, torch.float32), expected, rtol=2**-22, atol=2**-22 * 10.0**exponent
    )


@pytest.mark.parametrize("half", DTYPES[1:])
def test_sixteen_bits_are_the_half_precision_number_itself(half):
    codec = VectorCodec(6, 16, half=half)
    rows = rows_for(codec, 5, 0)
    codes, params = codec.encode(rows)
    assert (codes.shape, params.shape) == ((5, 12), (5, 0))
    assert torch.equal(codes.view(half), rows.to(half))
    assert torch.equal(codec.decode(codes, params, torch.float32), rows.to(half).float())
    exact = rows.to(half)
    assert torch.equal(codec.round_trip(exact, half), exact)


@pytest.mark.parametrize(
    ("head_dim", "bits", "groups", "code_bytes", "params"),
    [
        (128, 4, 1, 64, 2),
        (128, 2, 4, 32, 8),
        (80, 1, 2, 10, 4),
        (10, 2, 1, 3, 2),
        (3, 1, 1, 1, 2),
        (7, 8, 7, 7, 14),
        (10, 16, 1, 20, 0),
    ],
)
def test_bytes_of_a_vector(head_dim, bits, groups, code_bytes, params):
    codec = VectorCodec(head_dim, bits, groups)
    assert (codec.code_bytes, codec.params) == (code_bytes, params)


@pytest.mark.parametrize(("head_dim", "groups"), [(10, 3), (10, 0), (10, -1), (10, 11), (64, 5)])
@pytest.mark.parametrize("bits", [1, 8])
def test_groups_that_do_not_divide_are_refused(head_dim, groups, bits):
    with pytest.raises(ValueError, match=f"{groups} scale groups do not divide a head_dim of {head_dim}"):
        VectorCodec(head_dim, bits, groups)


@pytest.mark.parametrize("bits", [0, 3, 7, 9, 32])
def test_other_widths_are_refused(bits):
    with pytest.raises(ValueError, match=f"bits is {bits}; allowed are 1, 2, 4, 8, 16"):
        VectorCodec(8, bits)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("value", "named"), [(float("nan"), "nan"), (float("-inf"), "-inf"), (1e5, "100000")])
def test_what_half_precision_cannot_hold_is_refused(bits, value, named):
    codec = VectorCodec(6, bits, 2)
    rows = rows_for(codec, 4, 0)
    rows[2, 5] = value
    for action in (codec.encode, lambda given: codec.round_trip(given, torch.float32)):
        with pytest.raises(ValueError, match=f"a value to quantise is {named}"):
            action(rows)
