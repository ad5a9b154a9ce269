"""Profiles on a real model's cache: ratios count every byte, throughputs are of raw KV, errors of what was kept."""

import pytest
import torch
from kvserve_helpers import assets_of, kv_of, layout_of

from diffkv_repro.core.processes import ProcessFailed
from diffkv_repro.kvserve import (
    NAMED,
    SPACES,
    AffineMaps,
    Assets,
    KVLayout,
    Profile,
    RotaryKeys,
    measure,
    prefill,
    score_heads,
)
from diffkv_repro.kvserve.in_turn import in_turn
from diffkv_repro.kvserve.layout import KV
from diffkv_repro.kvserve.measure import peak_layers, peaks_apart, repeated
from diffkv_repro.models import load_model
from diffkv_repro.workloads import load_texts, windows


@pytest.fixture(scope="module")
def smollm2():
    loaded = load_model("smollm2-135m", device="cpu")
    found = windows(load_texts("prose"), loaded.tokenizer, count=2, tokens=300, seed=3)
    prompt, other = (prefill(loaded, each.input_ids, dtype=torch.float16, window=32) for each in found)
    text = loaded.tokenizer.decode(found[1].input_ids[0])
    assets = Assets(
        heads=score_heads(loaded, [text], span=256),
        token_scores=prompt.token_scores,
        rotary=RotaryKeys.of(loaded),
        affine=AffineMaps.fit([other.kv], prompt.layout),
    )
    return loaded, found[0].input_ids, prompt, assets


def test_prefill_is_the_models_own_cache(smollm2):
    loaded, ids, prompt, _ = smollm2
    with torch.inference_mode():
        cache = loaded.model(ids, use_cache=True).past_key_values
    for layer, (key, value) in zip(cache.layers, prompt.kv.pairs, strict=True):
        torch.testing.assert_close(layer.keys[0].half(), key, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(layer.values[0].half(), value, rtol=2e-3, atol=2e-3)
    assert prompt.layout == KVLayout.of(loaded, torch.float16)
    assert (prompt.layout.layers, prompt.layout.kv_heads, prompt.layout.head_dim) == (30, 3, 64)
    assert "rope_theta" in prompt.layout.rope
    assert prompt.layout.half_bytes(1) == 23_040
    assert all(scores.shape == (3, 300) for scores in prompt.token_scores)


@pytest.mark.parametrize("name", [name for name in NAMED if not name.endswith("gpu")])
def test_every_named_profile_works_on_a_real_cache(smollm2, name):
    _, _, prompt, assets = smollm2
    profile = Profile.named(name)
    found = measure(profile, prompt.kv, prompt.layout, assets=assets, repeats=1)
    frame = profile.encode(prompt.kv, prompt.layout, assets=assets)
    assert found.frame_bytes == len(frame.to_bytes())
    assert found.ratio == prompt.layout.half_bytes(300) / found.frame_bytes <= found.code_ratio
    assert min(found.encode, found.decode) > 0
    speed = found.measured().speed
    assert 0.5 * min(found.encode, found.decode) <= speed < min(found.encode, found.decode)
    assert found.key_error < 0.5
    assert found.value_error < 0.8
    if name in ("none", "lossless-zstd", "lossless-ans"):
        assert found.key_error == found.value_error == 0


def test_more_bits_cost_more_and_err_less(smollm2):
    _, _, prompt, assets = smollm2
    for few, many in (("kivi-2bit", "kivi-4bit"), ("cachegen-1", "cachegen-3"), ("kvquant-3bit", "kvquant-4bit")):
        low, high = (measure(NAMED[name], prompt.kv, prompt.layout, assets=assets, repeats=1) for name in (few, many))
        assert low.ratio > high.ratio
        assert low.value_error > high.value_error


def test_kvserve_compresses_more_than_the_methods_it_is_made_of(smollm2):
    _, _, prompt, assets = smollm2
    names = ["kvserve-default", "kivi-2bit", "quarot-4bit", "cachegen-1", "duoattention"]
    ratios = {name: NAMED[name].encode(prompt.kv, prompt.layout, assets=assets).ratio for name in names}
    assert max(ratios, key=ratios.get) == "kvserve-default"
    assert ratios["kvserve-default"] > 6


@pytest.mark.parametrize("name", ["modules", "artifact"])
def test_candidates_of_the_spaces_can_be_encoded(smollm2, name):
    _, _, prompt, assets = smollm2
    few = prompt.kv.layers[:1]
    layout = layout_of(30, 3, 64)
    space = SPACES[name]
    for index in range(0, len(space), 29):
        pieces = space[index].stream(iter(few), prompt.layout, 300, assets=assets)
        assert len(next(pieces)) > 0
        assert 0 < len(next(pieces)) < 2 * layout.raw_bytes(300) / 30


def test_the_latency_model_takes_what_was_measured():
    layout = layout_of(2, 4, 64)
    found = measure(Profile.named("int4"), kv_of(layout, 400), layout, repeats=2)
    own = found.measured({"qa": 0.9})
    assert (own.name, own.quality_of("qa"), own.quality_of("other")) == (str(found.profile), 0.9, 0.0)
    assert own.ratio == found.raw_bytes / found.frame_bytes
    assert own.break_even == pytest.approx(own.speed * (1 - 1 / own.ratio))
    doubled = measure(Profile.named("none"), kv_of(layout, 5), layout, assets=assets_of(layout, 5), repeats=1)
    assert doubled.measured().break_even == 0


def test_bad_requests_are_named(smollm2):
    loaded, _, _, _ = smollm2
    with pytest.raises(ValueError, match=r"input_ids are \(2, 3\)"):
        prefill(loaded, torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="repeats is 0"):
        measure(Profile(), kv_of(layout_of(), 4), layout_of(), repeats=0)


def test_a_cache_said_over_is_long_enough_to_see_its_memory():
    layout = layout_of(3, 2, 16)
    kv = kv_of(layout, 50)
    wide, shape = repeated(kv, layout, 4000)
    assert (wide.tokens, len(wide.layers), shape.layers) == (200_000, 2, 2)
    assert torch.equal(wide.layers[1].key[:, 50:100], kv.layers[1].key)
    sent = Profile.parse("none | uniform K16 V16 | bitpack")
    assert 0 <= peak_layers(sent, wide, shape) <= 2
    lines = ("hadamard | uniform | bitpack", "hadamard | kivi | bitpack")
    assert all(0 < peak <= 2 for peak in peaks_apart(lines, kv, layout, 4000).values())
    with pytest.raises(ProcessFailed, match="nothing"):
        peaks_apart(["nothing | uniform | bitpack"], kv, layout, 1)


@pytest.mark.parametrize("quantizer", ["uniform", "uniform K16 V12 token/channel", "kivi"])
@pytest.mark.parametrize("largest", [1.0, 30000.0, 60000.0])
def test_keys_and_values_in_turn_are_the_bytes_of_both_at_once(quantizer, largest, monkeypatch):
    """Also where a rotated outlier is beyond FP16, and a power of two has to be taken out."""
    layout = layout_of(2, 3, 64)
    kv = kv_of(layout, 70)
    pairs = [[(own.float() / own.float().abs().max() * largest).to(own.dtype) for own in pair] for pair in kv.pairs]
    loud = KV.of(pairs)
    for line in (f"hadamard | {quantizer} | bitpack", f"hadamard + hadamard | {quantizer} | zstd"):
        profile = Profile.parse(line)
        assert in_turn(profile)
        separately = profile.encode(loud, layout).to_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(type(profile.quantizer), "in_turn", False)
            assert not in_turn(profile)
            assert profile.encode(loud, layout).to_bytes() == separately
    broken = KV.of([(key.clone(), value.clone()) for key, value in kv.pairs])
    broken.layers[1].value[0, 3, 5] = float("nan")
    with pytest.raises(ValueError, match="allowed are finite numbers"):
        Profile.parse(f"hadamard | {quantizer} | bitpack").encode(broken, layout)
