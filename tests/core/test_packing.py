"""Codes of any width come back from their bytes, and less than a byte a row is left over."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diffkv_repro.core.packing import pack, packed_bytes, unpack

widths = st.integers(1, 8)
shapes = st.lists(st.integers(0, 11), min_size=1, max_size=4)


def bytes_by_hand(codes, bits):
    """Write the codes as one string of bits, lowest first, and cut it into bytes."""
    text = "".join(format(code, f"0{bits}b")[::-1] for code in codes)
    text += "0" * (-len(text) % 8)
    return [int(text[at : at + 8][::-1], 2) for at in range(0, len(text), 8)]


@given(st.data(), widths)
def test_equal_to_a_string_of_bits(data, bits):
    codes = data.draw(st.lists(st.integers(0, 2**bits - 1), max_size=70))
    packed = pack(torch.tensor(codes, dtype=torch.uint8), bits)
    assert packed.dtype == torch.uint8
    assert packed.tolist() == bytes_by_hand(codes, bits)
    assert unpack(packed, bits, len(codes)).tolist() == codes


@given(shapes, widths, st.integers(0, 2**31))
def test_any_shape_comes_back_and_nothing_is_wasted(shape, bits, seed):
    codes = torch.randint(0, 2**bits, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    packed = pack(codes, bits)
    size = packed_bytes(shape[-1], bits)
    assert packed.shape == (*shape[:-1], size)
    assert 0 <= 8 * size - bits * shape[-1] < 8
    back = unpack(packed, bits, shape[-1])
    assert back.dtype == torch.uint8
    assert torch.equal(back, codes)


@given(st.integers(0, 10**6), widths)
def test_bytes_are_those_of_the_bits(count, bits):
    size = packed_bytes(count, bits)
    assert 0 <= 8 * size - count * bits < 8


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("fill", ["zero", "largest"])
def test_extreme_codes(bits, fill):
    codes = torch.full((3, 13), 0 if fill == "zero" else 2**bits - 1, dtype=torch.uint8)
    assert torch.equal(unpack(pack(codes, bits), bits, 13), codes)


@pytest.mark.parametrize("bits", range(1, 9))
def test_the_input_stays_as_it_was_and_may_be_a_view(bits):
    codes = torch.randint(0, 2**bits, (10, 14), dtype=torch.uint8, generator=torch.Generator().manual_seed(bits))
    before = codes.clone()
    columns = codes.t()[1:, ::2]
    assert torch.equal(unpack(pack(columns, bits), bits, 5), columns)
    assert torch.equal(codes, before)


@pytest.mark.parametrize("bits", [-1, 0, 9, 16])
def test_other_widths_are_refused(bits):
    with pytest.raises(ValueError, match=f"bits is {bits}; allowed are 1 to 8"):
        pack(torch.zeros(4, dtype=torch.uint8), bits)
    with pytest.raises(ValueError, match=f"bits is {bits}; allowed are 1 to 8"):
        unpack(torch.zeros(4, dtype=torch.uint8), bits, 4)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.float32])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match=f"dtype {dtype}; it must be torch.uint8"):
        pack(torch.zeros(4, dtype=dtype), 4)


@given(widths, st.integers(0, 40), st.integers(0, 40))
def test_another_number_of_bytes_is_refused(bits, size, count):
    packed = torch.zeros(2, size, dtype=torch.uint8)
    if size == packed_bytes(count, bits):
        assert unpack(packed, bits, count).shape == (2, count)
        return
    with pytest.raises(ValueError, match=f"{size} bytes do not hold {count} codes of {bits} bits"):
        unpack(packed, bits, count)
