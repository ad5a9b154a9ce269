"""Bytes add up item by item, and the two ratios are of the same whole."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffkv_repro.core.accounting import KVBytes

ITEMS = [item.name for item in dataclasses.fields(KVBytes)]
counts = st.builds(KVBytes, **dict.fromkeys(ITEMS, st.integers(0, 2**50)))


@given(counts)
def test_the_total_is_everything_but_the_reference(size):
    assert size.total == sum(getattr(size, name) for name in ITEMS if name != "full")


@given(counts, counts)
def test_sums_are_item_by_item(one, other):
    both = one + other
    assert {name: getattr(both, name) for name in ITEMS} == {
        name: getattr(one, name) + getattr(other, name) for name in ITEMS
    }
    assert both.total == one.total + other.total
    assert both == other + one


@given(counts)
def test_nothing_added_changes_nothing(size):
    assert size + KVBytes() == size
    assert sum([size, size], KVBytes()) == size + size


@given(counts.filter(lambda size: size.full))
def test_ratios_are_over_fp16(size):
    assert size.nominal_ratio == (size.payload + size.window) / size.full
    assert size.true_ratio == size.total / size.full
    assert size.true_ratio >= size.nominal_ratio


@pytest.mark.parametrize("name", ["nominal_ratio", "true_ratio"])
def test_an_empty_cache_has_no_ratio(name):
    with pytest.raises(ValueError, match="an empty cache has no ratio"):
        getattr(KVBytes(payload=3), name)


@pytest.mark.parametrize("name", ITEMS)
@pytest.mark.parametrize("wrong", [-1, 0.5, 2.0, None, "3"])
def test_bytes_are_whole_numbers_from_zero(name, wrong):
    with pytest.raises(ValueError, match=f"{name} is {wrong!r}; bytes are whole numbers from 0"):
        KVBytes(**{name: wrong})


def test_the_text_names_what_is_there():
    size = KVBytes(payload=2048, scales=1, padding=51, full=10_000)
    assert str(size) == (
        "2,100 bytes (payload 2,048, scales 1, padding 51); nominal 20.5%, true 21.0% of FP16"
    )  # fmt: skip


@given(counts)
def test_every_number_has_a_text(size):
    assert str(size).startswith(f"{size.total:,} bytes (")
    assert ("of FP16" in str(size)) == bool(size.full)


def test_paper_table_of_real_bytes():
    """K8V4 of 128 channels takes 208 bytes with its score and its position, 40.6 % of FP16."""
    size = KVBytes(payload=192, scales=8, scores=4, positions=4, full=512)
    assert size.total == 208
    assert (size.nominal_ratio, size.true_ratio) == (0.375, 0.40625)
