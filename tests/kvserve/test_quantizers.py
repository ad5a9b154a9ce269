"""Errors stay within their bounds, bytes are those of the published arithmetic, hostile numbers go through."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvserve_helpers import LARGEST, assets_of, caches, error_of, kv_of, layout_of, same, sent

from diffkv_repro.kvserve import grids
from diffkv_repro.kvserve.cachegen import CacheGen
from diffkv_repro.kvserve.codecs import BitPack
from diffkv_repro.kvserve.entropy import Ans
from diffkv_repro.kvserve.grids import KEPT, Grid
from diffkv_repro.kvserve.kvquant import KVQuant
from diffkv_repro.kvserve.ladders import HeadLadder, LayerLadder, MixHQ
from diffkv_repro.kvserve.layout import KV
from diffkv_repro.kvserve.profile import Profile
from diffkv_repro.kvserve.quantizers import Exact, Kivi, Uniform
from diffkv_repro.kvserve.token_ladder import TokenLadder

levels_of = st.sampled_from([2, 3, 4, 12, 16, 255, 256]) | st.integers(2, 256)
uniform = st.builds(
    Uniform, levels_of, levels_of, st.sampled_from(["token", "channel"]), st.sampled_from(["token", "channel"]),
    st.none() | st.integers(1, 40), st.none() | st.integers(1, 40), st.booleans(),
) | st.builds(Uniform, levels_of, levels_of, st.just("tensor"), st.just("tensor"), joint=st.booleans())  # fmt: skip
EVERY = [
    Exact(), Uniform(), Uniform(KEPT, 2), Kivi(2, 32, 32), Kivi(4, 5, 20), MixHQ(),
    MixHQ(0.5, 16, 4, 16, 3), CacheGen(1), CacheGen(3), KVQuant(), KVQuant(4, 0.1, 0), LayerLadder(),
    HeadLadder(((KEPT, KEPT), (12, 8), (0, 0)), (0.3, 0.3, 0.4), sink=2, recent=9),
    TokenLadder(((256, 16), (4, 4), (0, 0)), (0.2, 0.5, 0.3), recent=3),
]  # fmt: skip


def half_step(tensor, grid):
    """What rounding may be off by: half the widest step of the grid over anything that shares a scale."""
    spread = (tensor.float().max() - tensor.float().min()).item()
    largest = tensor.float().abs().max().item()
    # The stored minimum and step are rounded outwards in FP16, and the result once more in the model's dtype.
    step = spread / (grid.levels - 1) * (1 + 2**-10) + 2**-9 * largest / (grid.levels - 1) + 2**-23
    return step / 2 + largest * torch.finfo(tensor.dtype).eps + 2**-24


@settings(max_examples=200, deadline=None)
@given(caches(), uniform)
def test_uniform_is_within_half_a_step(cache, quantizer):
    layout, kv = cache
    got = sent(Profile((), quantizer, BitPack()), kv, layout)
    for mine, theirs in zip(got.layers, kv.layers, strict=True):
        for a, b, grid in zip((mine.key, mine.value), (theirs.key, theirs.value), quantizer.grids, strict=True):
            assert a.dtype == b.dtype
            assert (a.float() - b.float()).abs().max().item() <= half_step(b, grid)


@pytest.mark.parametrize("quantizer", EVERY, ids=str)
@settings(max_examples=25, deadline=None)
@given(caches())
def test_any_cache_goes_through_every_quantizer(quantizer, cache):
    layout, kv = cache
    got = sent(Profile((), quantizer, Ans()), kv, layout, assets_of(layout, kv.tokens))
    largest = max(float(part.float().abs().max()) for pair in kv.pairs for part in pair)
    for mine, theirs in zip(got.layers, kv.layers, strict=True):
        assert mine.key.shape == theirs.key.shape
        assert mine.key.dtype == mine.value.dtype == layout.dtype
        assert bool(torch.isfinite(mine.key).all())
    # Two levels are the coarsest of all: nothing is off by more than the range.
    assert error_of(got, kv) <= 2.02 * largest + 1e-6


@settings(max_examples=60, deadline=None)
@given(caches())
def test_exact_is_exact(cache):
    layout, kv = cache
    for codec in (Ans(shuffle=True), BitPack()):
        assert same(sent(Profile((), Exact(), codec), kv, layout), kv)


def test_exact_keeps_what_is_not_a_number():
    layout = layout_of(1, 1, 4)
    odd = torch.tensor([[[float("nan"), float("inf"), -float("inf"), -0.0]]]).half()
    got = sent(Profile(), KV.of([(odd, odd)]), layout).layers[0].key
    assert torch.equal(got.view(torch.int16), odd.view(torch.int16))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_quantizer_refuses_what_is_not_a_number(bad):
    kv = kv_of(layout_of(), 5)
    kv.layers[1].key[0, 0, 0] = bad
    with pytest.raises(ValueError, match=f"{bad}.*allowed are finite"):
        Profile.named("kivi-2bit").encode(kv, layout_of())


@pytest.mark.parametrize("size", [1e6, 1e30])
def test_numbers_beyond_fp16_come_down_by_a_power_of_two(size):
    layout = layout_of(dtype=torch.float32)
    plain = kv_of(layout, 40)
    kv = KV.of([(key * size, value * size) for key, value in plain.pairs])
    got = sent(Profile((), Uniform(256, 256), BitPack()), kv, layout)
    assert error_of(got, kv) < 0.03 * size


def test_kivi_takes_three_bits_and_five():
    layout = layout_of(2, 4, 64)
    kv = kv_of(layout, 32 * 64)
    for bits, ratio in ((2, 16 / 3), (4, 16 / 5)):
        # Without the recent tokens, as KVServe quotes it: 5.33 and 3.2.
        frame = Profile((), Kivi(bits, 32, 32), BitPack()).encode(kv, layout)
        residual = 2 * layout.kv_heads * layout.head_dim * 32 * layout.layers  # of the values; keys leave none here
        quantised = layout.half_bytes(kv.tokens) - residual
        assert quantised / (frame.nbytes - residual) == pytest.approx(ratio, rel=2e-3)


def test_kivi_keeps_its_recent_tokens_as_they_are():
    layout = layout_of()
    kv = kv_of(layout, 77)
    got = sent(Profile((), Kivi(2, 8, 16), BitPack()), kv, layout)
    for mine, theirs in zip(got.layers, kv.layers, strict=True):
        torch.testing.assert_close(mine.key[:, 64:], theirs.key[:, 64:], rtol=0, atol=0)
        torch.testing.assert_close(mine.value[:, 61:], theirs.value[:, 61:], rtol=0, atol=0)
        assert not torch.equal(mine.value[:, :61], theirs.value[:, :61])


@pytest.mark.parametrize(("head_dim", "ratio"), [(128, 3.76), (64, 3.56)])
def test_quarot_takes_the_published_bits(head_dim, ratio):
    layout = layout_of(1, 8, head_dim)
    frame = Profile.named("quarot-4bit").encode(kv_of(layout, 2048), layout)
    assert frame.ratio == pytest.approx(ratio, abs=0.01)


def test_cachegen_has_the_published_levels():
    assert [CacheGen(2).levels(layer, 32) for layer in (0, 1, 2, 9, 10, 31)] == [
        (32, 32), (32, 32), (32, 16), (32, 16), (16, 16), (16, 16)
    ]  # fmt: skip
    assert [CacheGen(1).levels(layer, 28) for layer in (0, 3, 4, 17, 18, 27)] == [
        (16, 16), (16, 16), (16, 12), (16, 12), (12, 12), (12, 12)
    ]  # fmt: skip
    assert CacheGen(3).levels(0, 1) == CacheGen(3).levels(79, 80) == (32, 32)


@settings(max_examples=60, deadline=None)
@given(caches(), st.integers(1, 3))
def test_cachegen_is_within_half_a_step_of_its_token(cache, level):
    layout, kv = cache
    got = sent(Profile((), CacheGen(level), BitPack()), kv, layout)
    for index, (mine, theirs) in enumerate(zip(got.layers, kv.layers, strict=True)):
        levels = CacheGen(level).levels(index, layout.layers)
        for a, b, bins in zip((mine.key, mine.value), (theirs.key, theirs.value), levels, strict=True):
            largest = b.float().abs().amax(dim=(0, 2))
            error = (a.float() - b.float()).abs().amax(dim=(0, 2))
            step = largest / (bins // 2 - 1)
            slack = largest * (torch.finfo(layout.dtype).eps + 2**-11) + 2**-23
            assert bool((error <= step / 2 + slack).all())


def test_kvquant_keeps_outliers_and_sinks():
    layout = layout_of(1, 2, 16)
    kv = kv_of(layout, 300)
    kv.layers[0].key[1, 100, 3] = 500.0
    kv.layers[0].value[0, 200, 5] = -700.0
    got = sent(Profile((), KVQuant(8), BitPack()), kv, layout).layers[0]
    assert got.key[1, 100, 3] == 500
    assert got.value[0, 200, 5] == -700
    assert torch.equal(got.key[:, 0], kv.layers[0].key[:, 0])
    few, many = (Profile((), KVQuant(8, share), BitPack()).encode(kv, layout) for share in (0.0, 0.2))
    assert few.nbytes < many.nbytes
    assert error_of(sent(Profile((), KVQuant(16, 0.01), BitPack()), kv, layout), kv) < 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Uniform(1), "levels is 1; allowed are 2 to 256 levels"),
        (lambda: Uniform(0, 0), "levels is 0; a ladder can drop"),
        (lambda: Uniform(16, 300), "levels is 300"),
        (lambda: Uniform(key_axis="head"), "unknown axis 'head'; allowed are token, channel, tensor"),
        (lambda: Uniform(key_group=0), "group is 0"),
        (lambda: Uniform(key_axis="tensor", key_group=4), "group is 4; with axis tensor there is none"),
        (lambda: Grid(8, "channel", symmetric=True), "symmetric grid"),
        (lambda: Kivi(9), "bits is 9"),
        (lambda: Kivi(2, 32, 100), "residual is 100; allowed are multiples of the group of 32"),
        (lambda: MixHQ(1.5), "ratio is 1.5"),
        (lambda: MixHQ(key_high=4, key_low=8), "key_high is 4 and key_low 8"),
        (lambda: CacheGen(4), "level is 4"),
        (lambda: KVQuant(outliers=0.7), "outliers is 0.7"),
        (lambda: Uniform.from_params({"bits": 4}), "uniform has no parameter 'bits'; allowed are key_levels"),
    ],
)
def test_bad_parameters_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("quantizer", EVERY, ids=str)
def test_pieces_change_nothing(quantizer, monkeypatch):
    layout = layout_of(2, 3, 20)
    kv, assets = kv_of(layout, 61), assets_of(layout, 61)
    whole = Profile((), quantizer, Ans()).encode(kv, layout, assets=assets)
    monkeypatch.setattr(grids, "_PIECE", 130)
    pieces = Profile((), quantizer, Ans()).encode(kv, layout, assets=assets)
    assert pieces.to_bytes() == whole.to_bytes()
    got = pieces.decode()
    monkeypatch.undo()
    assert same(got, whole.decode())


def test_half_range_ends_are_kept():
    layout = layout_of(1, 1, 8)
    kv = kv_of(layout, 9, "largest")
    for quantizer in (Uniform(2, 2), Uniform(256, 256), Kivi(2, 2, 2)):
        got = sent(Profile((), quantizer, BitPack()), kv, layout)
        assert float(got.layers[0].key.abs().max()) <= LARGEST
        assert error_of(got, kv) <= 2 * LARGEST / 2 + 40
