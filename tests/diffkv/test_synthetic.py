import pytest
import torch

from diffkv_repro.core.precision import Precision
from diffkv_repro.diffkv import reference
from diffkv_repro.diffkv.layout import PageLayout
from diffkv_repro.diffkv.reference_attention import decode_attention
from diffkv_repro.diffkv.synthetic import random_view

LAYOUTS = [PageLayout(Precision.parse(name), 64, 1024) for name in ("K8V4", "K4V2")]


def test_pages_are_distinct_and_as_many_as_the_lengths_ask_for():
    lengths = torch.tensor([[[[9, 30], [1, 0]]], [[[0, 0], [17, 5]]]], dtype=torch.int32)
    view = random_view(LAYOUTS, lengths)
    held = view.tables[view.tables >= 0]
    pages = sum(int((-(-lengths[..., tier] // own.tokens)).sum()) for tier, own in enumerate(LAYOUTS))
    assert sorted(held.tolist()) == list(range(pages)) == list(range(len(view.pool)))


def test_keys_and_values_are_of_unit_size_and_another_seed_gives_others():
    lengths = torch.full((1, 1, 1, 2), 200, dtype=torch.int32)
    view, other = random_view(LAYOUTS, lengths), random_view(LAYOUTS, lengths, seed=1)
    for tier in range(2):
        slots = torch.arange(200)
        key, value, score, _ = reference.read_rows(view, tier, 0, 0, 0, slots)
        for side in (key, value):
            assert torch.isfinite(side).all()
            assert 0.5 < side.std() < 2
        assert (score == 0).all()
    assert not torch.equal(view.pool, other.pool)
    query = torch.randn(1, 4, 64)
    out = decode_attention(view, query, layer=0, requests=torch.tensor([0]), scale=0.125)
    assert torch.isfinite(out).all()


def test_fp16_pages_and_more_than_two_tiers():
    view = random_view([PageLayout(Precision.parse("FP16"), 64, 1024)], torch.full((1, 1, 1, 1), 5, dtype=torch.int32))
    key, value, *_ = reference.read_rows(view, 0, 0, 0, 0, torch.arange(5))
    assert torch.isfinite(key).all()
    assert 0.5 < value.std() < 2
    with pytest.raises(ValueError, match="3 layouts; one or two"):
        random_view([*LAYOUTS, LAYOUTS[0]], torch.zeros(1, 1, 1, 3))
