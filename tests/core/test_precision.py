"""Precisions are written as in the papers, and what is not one is refused by name."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffkv_repro.core.precision import BITS, Precision

BIT_PAIRS = list(itertools.product(BITS, BITS))
groups = st.integers(1, 999)


@given(st.sampled_from(BIT_PAIRS), groups, groups)
def test_what_is_written_is_read_again(bits, key_groups, value_groups):
    precision = Precision(*bits, key_groups, value_groups)
    assert Precision.parse(str(precision)) == precision
    assert Precision.parse(precision) is precision


@pytest.mark.parametrize(
    ("name", "expected", "written"),
    [
        ("K8V4", Precision(8, 4), "K8V4"),
        ("k4v2", Precision(4, 2), "K4V2"),
        ("K4V2:2/4", Precision(4, 2, 2, 4), "K4V2:2/4"),
        ("K4V2:1/1", Precision(4, 2), "K4V2"),
        ("K16V16", Precision(16, 16), "K16V16"),
        ("FP16", Precision(16, 16), "K16V16"),
        ("fp16", Precision(16, 16), "K16V16"),
        ("K1V16:8/1", Precision(1, 16, 8, 1), "K1V16:8/1"),
    ],
)
def test_names(name, expected, written):
    assert Precision.parse(name) == expected
    assert str(expected) == written


@pytest.mark.parametrize(
    "name",
    ["", "K8", "V4", "K8V", "V4K8", "8/4", "K8V4 ", " K8V4", "K8V4\n", "K8V4:2", "K8V4:2/", "K-8V4", "K8.0V4", "INT4"],
)
def test_other_names_are_refused_with_the_name_and_how_to_write_it(name):
    with pytest.raises(ValueError) as error:
        Precision.parse(name)
    assert f"unknown precision {name!r}" in str(error.value)
    assert "as K8V4" in str(error.value)
    assert "1, 2, 4, 8, 16" in str(error.value)


@pytest.mark.parametrize("name", [None, 8, 8.4, ("K8", "V4")])
def test_what_is_no_name_is_refused(name):
    with pytest.raises(ValueError, match="unknown precision"):
        Precision.parse(name)


@pytest.mark.parametrize(("name", "field", "bits"), [("K3V4", "key_bits", 3), ("K8V0", "value_bits", 0)])
def test_other_widths_are_refused_with_the_allowed_ones(name, field, bits):
    with pytest.raises(ValueError, match=f"{field} is {bits}; allowed are 1, 2, 4, 8, 16"):
        Precision.parse(name)


@given(st.integers(-3, 40), st.sampled_from(BITS))
def test_only_the_listed_widths_are_allowed(bits, other):
    if bits in BITS:
        assert Precision(bits, other).key_bits == bits
        return
    for arguments in ((bits, other), (other, bits)):
        with pytest.raises(ValueError, match=f"bits is {bits}; allowed are"):
            Precision(*arguments)


@pytest.mark.parametrize("count", [0, -1, 1.5, "2", None])
def test_groups_are_whole_and_positive(count):
    with pytest.raises(ValueError, match=r"key_groups is .*at least 1"):
        Precision(8, 4, count)
    with pytest.raises(ValueError, match=r"value_groups is .*at least 1"):
        Precision(8, 4, 1, count)


@pytest.mark.parametrize(
    ("name", "ratio"),
    [("K8V4", 0.375), ("K4V2", 0.1875), ("K8V8", 0.5), ("K4V4", 0.25), ("K8V2", 0.3125), ("FP16", 1), ("K1V1", 1 / 16)],
)
def test_the_nominal_ratio_counts_codes_alone(name, ratio):
    assert Precision.parse(name).nominal_ratio == ratio
    assert Precision.parse(f"{name.replace('FP16', 'K16V16')}:4/8").nominal_ratio == ratio


@pytest.mark.parametrize(
    ("name", "size"),
    [("K8V4", 8), ("K4V2:2/4", 24), ("K16V4:9/2", 8), ("K4V16:3/9", 12), ("K16V16:4/4", 0), ("K1V1:1/2", 12)],
)
def test_metadata_is_a_scale_and_a_zero_point_of_two_bytes_a_group(name, size):
    assert Precision.parse(name).metadata_bytes() == size


def test_precisions_are_values():
    assert len({Precision.parse("K8V4"), Precision(8, 4), Precision.parse("k8v4:1/1")}) == 1
