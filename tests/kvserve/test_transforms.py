"""Transforms are undone within their stated error, and leave the quantiser less to do."""

import pytest
import torch
from cache_helpers import ids_of
from hypothesis import given, settings
from hypothesis import strategies as st
from kvserve_helpers import assets_of, caches, error_of, kv_of, layout_of, sent
from tiny import tiny_llama, tiny_qwen2

from diffkv_repro.attention_stats.prompt import PromptAttention
from diffkv_repro.kvserve.assets import Assets, Place
from diffkv_repro.kvserve.codecs import BitPack
from diffkv_repro.kvserve.entropy import Ans
from diffkv_repro.kvserve.frame import Frame, FrameError
from diffkv_repro.kvserve.layout import KV, KVLayout, LayerKV
from diffkv_repro.kvserve.profile import Profile
from diffkv_repro.kvserve.quantizers import Exact, Uniform
from diffkv_repro.kvserve.streams import StreamReader, StreamWriter
from diffkv_repro.kvserve.transform_state import AffineMaps, RotaryKeys
from diffkv_repro.kvserve.transforms import Affine, Delta, Hadamard, KeyBias, Unrope
from diffkv_repro.models.hf import intercept_attention
from diffkv_repro.models.rope import Rope, key_biases


def there_and_back(transform, layer, place):
    """Through the transform alone, in float32."""
    writer = StreamWriter(BitPack())
    moved = transform.forward(layer, place, writer)
    reader = StreamReader(b"".join(writer.parts), BitPack())
    side = transform.read(place, reader)
    reader.finish()
    return moved, transform.inverse(moved, place, side)


@settings(max_examples=150, deadline=None)
@given(caches(), st.sampled_from(["hadamard", "delta", "diag", "full", "delta of 3"]))
def test_inverses_are_exact_but_for_float32(cache, name):
    layout, kv = cache
    transform = {"hadamard": Hadamard(), "delta": Delta(), "delta of 3": Delta(3)}.get(name) or Affine(name)
    assets = Assets(affine=AffineMaps.fit([kv], layout, name)) if name in ("diag", "full") else Assets()
    for index, part in enumerate(kv.layers):
        layer = LayerKV(part.key.float(), part.value.float())
        place = Place(layout, index, kv.tokens, kv.start, assets=assets)
        _, again = there_and_back(transform, layer, place)
        for a, b in ((again.key, layer.key), (again.value, layer.value)):
            size = max(float(b.norm(dim=-1).max()), 1e-30)
            condition = 200 if name == "diag" else 1
            assert float((a - b).abs().max()) <= 1e-5 * condition * size


@settings(max_examples=60, deadline=None)
@given(caches(), st.sampled_from([(Hadamard(),), (Delta(),), (Delta(), Hadamard()), (Hadamard(7), Delta(4))]))
def test_any_cache_goes_through_transforms_and_a_quantizer(cache, transforms):
    layout, kv = cache
    got = sent(Profile(transforms, Uniform(256, 256, "token"), Ans()), kv, layout)
    largest = max(float(part.float().norm(dim=-1).max()) for pair in kv.pairs for part in pair)
    assert error_of(got, kv) <= 0.03 * largest + 1e-6


def test_hadamard_has_signs_of_its_own_for_every_layer_and_head_and_the_same_every_time():
    layout = layout_of(2, 3, 64)
    ones = LayerKV(torch.ones(3, 1, 64), torch.ones(3, 1, 64))
    moved = [Hadamard().forward(ones, Place(layout, layer, 1), StreamWriter(BitPack())).key for layer in (0, 1, 0)]
    rows = torch.cat([part[:, 0] for part in moved[:2]])
    assert len({tuple(row.tolist()) for row in rows}) == 6
    assert torch.equal(moved[0], moved[2])
    assert not torch.equal(moved[0], Hadamard(1).forward(ones, Place(layout, 0, 1), StreamWriter(BitPack())).key)


def test_hadamard_spreads_an_outlier_channel():
    layout = layout_of(1, 2, 80)
    kv = kv_of(layout, 100, "outlier channel")
    coarse = Uniform(16, 16, "token", "token", joint=False)
    plain, turned = (error_of(sent(Profile(parts, coarse, BitPack()), kv, layout), kv) for parts in ((), (Hadamard(),)))
    assert turned < 0.5 * plain


def test_delta_saves_where_tokens_resemble_their_neighbours():
    layout = layout_of(1, 2, 32)
    generator = torch.Generator().manual_seed(0)
    walk = (0.1 * torch.randn(2, 400, 32, generator=generator)).cumsum(dim=1).half()
    kv = KV.of([(walk, walk)])
    plain, delta = (
        error_of(sent(Profile(parts, Uniform(16, 16, "tensor", "tensor"), Ans()), kv, layout), kv)
        for parts in ((), (Delta(),))
    )
    assert delta < 0.5 * plain


def test_principal_axes_save_bytes_at_the_same_step():
    layout = layout_of(1, 2, 16)
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(16, 16, generator=generator) * torch.logspace(0, -2, 16)[:, None]
    tokens = (torch.randn(2, 500, 16, generator=generator) @ mix).half()
    kv = KV.of([(tokens, tokens)])
    assets = Assets(affine=AffineMaps.fit([kv], layout, "full"))
    quantizer = Uniform(64, 64, "tensor", "tensor")
    plain = Profile((), quantizer, Ans(per="channel")).encode(kv, layout)
    turned = Profile((Affine("full"),), quantizer, Ans(per="channel")).encode(kv, layout, assets=assets)
    assert turned.code_bytes < 0.8 * plain.code_bytes


@pytest.mark.parametrize("kind", ["diag", "full"])
def test_affine_maps_are_saved_and_known_by_their_digest(tmp_path, kind):
    layout = layout_of(2, 2, 8, model="one")
    kv = kv_of(layout, 40)
    maps = AffineMaps.fit([kv, kv_of(layout, 9, seed=1)], layout, kind)
    again = AffineMaps.load(maps.save(tmp_path / "maps.safetensors"))
    assert torch.equal(again.matrix, maps.matrix)
    assert again.digest == maps.digest
    assert again.model == "one"
    frame = Profile((Affine(kind),), Uniform(), Ans()).encode(kv, layout, assets=Assets(affine=maps))
    arrived = Frame.from_bytes(frame.to_bytes(), layout)
    assert error_of(arrived.decode(Assets(affine=again)), kv) < 0.6
    with pytest.raises(FrameError, match="affine needs"):
        arrived.decode()
    other = AffineMaps.fit([kv_of(layout, 30, seed=5)], layout, kind)
    with pytest.raises(FrameError, match="other ones"):
        arrived.decode(Assets(affine=other))


def test_files_that_are_no_maps_are_refused(tmp_path):
    (tmp_path / "maps.safetensors").write_bytes(b"not at all")
    with pytest.raises(ValueError, match="holds no affine maps"):
        AffineMaps.load(tmp_path / "maps.safetensors")
    with pytest.raises(ValueError, match="unknown kind of affine map 'block'"):
        AffineMaps.fit([kv_of(layout_of(), 5)], layout_of(), "block")
    maps = AffineMaps.fit([kv_of(layout_of(), 5)], layout_of())
    with pytest.raises(ValueError, match="affine maps are of"):
        Profile((Affine(),), Exact(), Ans()).encode(kv_of(layout_of(1), 5), layout_of(1), assets=Assets(affine=maps))


def biased_qwen2(size=30.0):
    model = tiny_qwen2()
    generator = torch.Generator().manual_seed(1)
    for layer in model.model.layers:
        bias = layer.self_attn.k_proj.bias
        with torch.no_grad():
            bias.copy_(size * torch.randn(bias.shape, generator=generator))
    return model


def cache_of(model, tokens=60):
    """What the model's own attention is given, and the layout."""
    pairs = []

    def watch(call):
        pairs.append((call.key.clone(), call.value.clone()))
        return PromptAttention(call).output()

    with torch.no_grad(), intercept_attention(model, watch):
        model(input_ids=ids_of(tokens, 1), use_cache=False)
    kv = KV.of(pairs)
    heads, _, dim = kv.layers[0].key.shape
    return kv, KVLayout(len(pairs), heads, dim, torch.float32)


def test_key_biases_cost_nothing_to_send_and_much_to_quantise():
    model = biased_qwen2()
    kv, layout = cache_of(model)
    assets = Assets(rotary=RotaryKeys(Rope(model), key_biases(model), {}))
    coarse = Uniform(16, 16, "token", "token")
    plain = sent(Profile((), coarse, Ans()), kv, layout)
    free = sent(Profile((KeyBias(),), coarse, Ans()), kv, layout, assets)
    keys = [
        max(float((a.key - b.key).abs().max()) for a, b in zip(got.layers, kv.layers, strict=True))
        for got in (plain, free)
    ]
    assert keys[1] < 0.25 * keys[0]
    named = sent(Profile.named("cachegen-1-keybias"), kv, layout, assets)
    assert error_of(named, kv) < 0.5 * error_of(sent(Profile.named("cachegen-1"), kv, layout), kv)


@pytest.mark.parametrize("transform", [KeyBias(), Unrope()])
@pytest.mark.parametrize("start", [0, 1000])
def test_rotary_transforms_are_undone_at_any_position(transform, start):
    model = biased_qwen2()
    kv, layout = cache_of(model)
    assets = Assets(rotary=RotaryKeys(Rope(model), key_biases(model), {}))
    got = sent(Profile((transform,), Exact(), Ans()), KV(kv.layers, start), layout, assets)
    assert got.start == start
    assert error_of(got, kv) < 1e-4 * max(float(layer.key.abs().max()) for layer in kv.layers)


def test_a_model_without_key_biases_is_left_alone():
    model = tiny_llama()
    kv, layout = cache_of(model)
    assets = Assets(rotary=RotaryKeys(Rope(model), key_biases(model), {}))
    assert error_of(sent(Profile((KeyBias(),), Exact(), Ans()), kv, layout, assets), kv) == 0


def test_kvquant_goes_before_rope():
    model = tiny_llama()
    kv, layout = cache_of(model, 100)
    assets = Assets(rotary=RotaryKeys(Rope(model), key_biases(model), {}))
    got = sent(Profile.named("kvquant-4bit"), kv, layout, assets)
    largest = max(float(layer.key.abs().max()) for layer in kv.layers)
    assert error_of(got, kv) < 0.15 * largest


def test_missing_models_and_bad_parameters_are_named():
    kv = kv_of(layout_of(), 5)
    with pytest.raises(ValueError, match="keybias needs the model: pass assets"):
        Profile((KeyBias(),), Exact(), Ans()).encode(kv, layout_of())
    with pytest.raises(ValueError, match="seed is -1"):
        Hadamard(-1)
    with pytest.raises(ValueError, match="group is 0"):
        Delta(0)
    with pytest.raises(ValueError, match="unknown kind 'block'"):
        Affine("block")
    assert assets_of(layout_of(), 5, kv=kv).affine.kind == "diag"
