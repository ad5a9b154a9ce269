import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from diffkv_repro.attention_stats import critical_tokens


def of(values, **arguments):
    return critical_tokens(xr.DataArray(np.asarray(values, dtype=float), dims="token"), **arguments).item()


def test_counts_by_hand():
    assert of([0.9, 0.05, 0.03, 0.02], percent=90) == 1
    assert of([0.9, 0.05, 0.03, 0.02], percent=95) == 2
    assert of([0.02, 0.03, 0.9, 0.05], percent=95) == 2, "the order of the tokens does not matter"
    assert of([1, 1, 1, 1], percent=95) == 4
    assert of([1, 1, 1, 1], percent=50) == 2
    assert of([np.nan, 3, np.nan, 1], percent=75) == 1, "missing tokens hold nothing"
    assert of([0, 0, 0]) == 0
    assert of([5]) == 1


@given(
    arrays(np.float64, st.integers(1, 40), elements=st.floats(0, 1e6)),
    st.floats(0.5, 100),
)
def test_is_the_smallest_set(values, percent):
    count = of(values, percent=percent)
    ordered, total = np.sort(values)[::-1], values.sum()
    if total == 0:
        assert count == 0
        return
    slack = 1e-9 * total
    assert ordered[:count].sum() >= total * percent / 100 - slack
    assert ordered[: count - 1].sum() <= total * percent / 100 + slack


def test_keeps_the_other_dimensions_and_their_labels():
    scores = xr.DataArray(np.ones((2, 3, 5)), dims=("layer", "kv_head", "token"), coords={"layer": [4, 8]})
    counts = critical_tokens(scores, percent=100)
    assert counts.dims == ("layer", "kv_head")
    assert counts.layer.values.tolist() == [4, 8]
    assert (counts == 5).all()


@pytest.mark.parametrize("percent", [0, -1, 100.1, float("nan")])
def test_refuses_a_percentage_out_of_range(percent):
    with pytest.raises(ValueError, match="percent is"):
        of([1, 2], percent=percent)


def test_refuses_negative_scores_and_missing_tokens():
    with pytest.raises(ValueError, match="negative"):
        of([1, -1])
    with pytest.raises(ValueError, match="no dimension 'token'"):
        critical_tokens(xr.DataArray([1.0], dims="layer"))
