"""Surveys are computed once, equal what is computed afresh, and summaries mean what they say."""

import numpy as np
import pytest
import torch
import xarray as xr
from tiny import tiny_llama

from diffkv_repro.attention_stats import (
    collect,
    critical_table,
    critical_tokens,
    decades,
    spread,
    survey,
    top_share,
    uniform_received,
)
from diffkv_repro.attention_stats import store as store_module
from diffkv_repro.models import LoadedModel, attention_layout
from diffkv_repro.workloads import Window


@pytest.fixture
def loaded():
    model = tiny_llama()
    return LoadedModel("tiny", model, None, attention_layout(model), "random", "fingerprint-1")


@pytest.fixture
def chosen():
    generator = torch.Generator().manual_seed(0)
    return [Window(f"d{i}", 0, torch.randint(3, 97, (1, 33), generator=generator)) for i in range(3)]


def count_collections(monkeypatch):
    calls = []

    def counting(model, ids, **options):
        calls.append(ids)
        return collect(model, ids, **options)

    monkeypatch.setattr(store_module, "collect", counting)
    return calls


def test_a_second_survey_computes_nothing_and_equals_the_first(loaded, chosen, tmp_path, monkeypatch):
    calls = count_collections(monkeypatch)
    first = list(survey(loaded, chosen, tmp_path, rows=(5,)))
    again = list(survey(loaded, chosen, tmp_path, rows=(5,)))
    assert len(calls) == 3
    for one, two, window in zip(first, again, chosen, strict=True):
        fresh = collect(loaded.model, window.input_ids, rows=(5,))
        for name in ("received", "later", "key_norm", "value_norm", "rows"):
            xr.testing.assert_identical(getattr(two, name), getattr(one, name))
            xr.testing.assert_allclose(getattr(two, name), getattr(fresh, name))
        assert two.group == fresh.group


def test_whatever_the_result_depends_on_is_in_the_key(loaded, chosen, tmp_path, monkeypatch):
    calls = count_collections(monkeypatch)
    list(survey(loaded, chosen[:1], tmp_path))
    list(survey(loaded, chosen[:1], tmp_path, rows=(1,)))
    list(survey(loaded, chosen[1:2], tmp_path))
    other = LoadedModel("tiny", loaded.model, None, loaded.layout, "random", "fingerprint-2")
    list(survey(other, chosen[:1], tmp_path))
    assert len(calls) == 4
    monkeypatch.setattr(store_module, "_code_digest", lambda: "changed")
    list(survey(loaded, chosen[:1], tmp_path))
    assert len(calls) == 5


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04 not a zip", None])
def test_a_damaged_file_is_computed_again(loaded, chosen, tmp_path, monkeypatch, damage):
    calls = count_collections(monkeypatch)
    list(survey(loaded, chosen[:1], tmp_path))
    (path,) = tmp_path.glob("*.npz")
    path.write_bytes(path.read_bytes()[:-200] if damage is None else damage)
    list(survey(loaded, chosen[:1], tmp_path))
    list(survey(loaded, chosen[:1], tmp_path))
    assert len(calls) == 2


def test_flipped_bits_never_raise(loaded, chosen, tmp_path):
    (first,) = survey(loaded, chosen[:1], tmp_path)
    (path,) = tmp_path.glob("*.npz")
    good = path.read_bytes()
    for position in np.random.default_rng(0).integers(0, len(good), 60):
        path.write_bytes(good[:position] + bytes([good[position] ^ 4]) + good[position + 1 :])
        (again,) = survey(loaded, chosen[:1], tmp_path)
        assert again.received.shape == first.received.shape
        path.write_bytes(good)


def test_decades():
    assert decades(np.array([1e-4, 1.0, 10.0])) == pytest.approx(5)
    assert decades(np.array([0.0, np.nan, 1.0, 100.0])) == pytest.approx(2), "zeros and gaps have no logarithm"
    assert decades(10.0 ** np.linspace(0, 10, 1001), keep=50) == pytest.approx(5)
    with pytest.raises(ValueError, match="1 positive values have no span"):
        decades(np.array([3.0, 0.0]))


def test_top_share():
    scores = xr.DataArray([[1.0] * 100, [96.0] + [4 / 99] * 99], dims=("head", "token"))
    np.testing.assert_allclose(top_share(scores, 5), [0.05, 0.96 + 4 * 4 / 9900])


@pytest.mark.parametrize("tokens", [2, 3, 64])
def test_uniform_attention_is_what_zero_queries_give(tokens):
    model = tiny_llama()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.zero_()
    stats = collect(model, torch.arange(3, 3 + tokens)[None])
    expected = uniform_received(tokens)
    np.testing.assert_allclose(stats.received.isel(sequence=0, layer=0, head=0), expected, rtol=1e-5)
    assert float(expected.sum()) == pytest.approx(tokens - sum(1 / n for n in range(1, tokens + 1)))


def test_critical_table_and_spread(loaded, chosen, tmp_path):
    surveyed = list(survey(loaded, chosen, tmp_path))
    table = critical_table(surveyed, 90)
    assert len(table) == 3 * 3 * 2
    row = table[(table.window == 2) & (table.layer == 1) & (table.kv_head == 0)].iloc[0]
    by_hand = critical_tokens(surveyed[2].received.isel(sequence=0, layer=1, head=slice(0, 3)).max("head"), 90)
    assert row["by_sum"] == by_hand
    layers = spread(table, "by_sum", ["layer"])
    means = table[table.layer == 0].groupby("window")["by_sum"].mean()
    assert layers.loc[0, "mean"] == pytest.approx(means.mean())
    assert layers.loc[0, "std"] == pytest.approx(means.std())
    with pytest.raises(ValueError, match="one window has no deviation"):
        spread(table[table.window == 0], "by_sum", ["layer"])
    with pytest.raises(ValueError, match="window 0 holds 2 sequences"):
        critical_table([collect(loaded.model, torch.cat([w.input_ids for w in chosen[:2]]))])
