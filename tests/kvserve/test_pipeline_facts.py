"""The checks of notebook 10 notice what they are for."""

from pathlib import Path

import pytest
import torch
from kvserve_helpers import assets_of, kv_of, layout_of

from diffkv_repro.kvserve import SPACES, Profile, published
from diffkv_repro.kvserve import pipeline_facts as facts
from diffkv_repro.study.claims import load_claims

FIGURES = load_claims(Path(__file__).resolve().parents[2] / "claims.yaml")


def test_every_codec_of_the_space_is_exact_and_every_byte_counted():
    layout = layout_of(2, 2, 32)
    kv, assets = kv_of(layout, 37), assets_of(layout, 37)
    assert facts.share_bit_exact(SPACES["modules"].codecs, kv, layout) == 1
    profiles = [Profile.named("int4"), Profile.named("kvserve-default"), Profile.named("cachegen-1")]
    assert facts.share_with_equal_codes(profiles, kv, layout, assets) == 1
    assert facts.largest_uncounted_bytes(profiles, kv, layout, assets) == 0


def test_a_codec_that_loses_something_is_noticed(monkeypatch):
    layout = layout_of(2, 2, 32)
    kv = kv_of(layout, 9)
    monkeypatch.setattr(facts, "_same", lambda one, other: False)
    assert facts.share_bit_exact(SPACES["modules"].codecs, kv, layout) == 0


def test_hadamard_of_any_head_size():
    assert 0 < facts.hadamard_error([64, 80, 96]) < 1e-5


@pytest.mark.parametrize(
    ("figure", "function"),
    [("kvserve-fig05", published.figure_5), ("kvserve-fig07", published.figure_7), ("kvserve-tab1", published.table_1)],
)
def test_published_arithmetic_is_what_claims_expect(figure, function):
    found = function(FIGURES[figure].published)
    claims = {claim.metric: claim for claim in FIGURES[figure].claims}
    assert set(found) <= set(claims)
    for metric, value in found.items():
        assert claims[metric].expectation.holds(value), (metric, value)


def test_same_means_every_bit():
    layout = layout_of(1, 1, 8)
    kv = kv_of(layout, 3)
    assert facts._same(kv, kv)
    other = kv.layers[0].key.clone()
    other[0, 0, 0] += torch.finfo(other.dtype).eps * 4 * other[0, 0, 0].abs().clamp_min(1)
    assert not facts._same(kv, type(kv).of([(other, kv.layers[0].value)]))
