"""The torch twins of the kernels against the code that the simulated and packed caches run."""

import dataclasses

import pytest
import torch
from cache_helpers import cut, naive_output, naive_weights, place_of, prompt_of, random_call, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_helpers import assert_close, empty_view, filled_view, mixed_tiers, random_rows
from paged_states import POLICIES, TWINS, check_decision, generate, random_state, stored
from tiny import tiny_qwen2

from diffkv_repro.cache.store import DROPPED
from diffkv_repro.cache.tiered import TieredLayer
from diffkv_repro.cache.transforms import BiasFree
from diffkv_repro.core.vectors import VectorCodec
from diffkv_repro.diffkv import CompressionPolicy, paged_ops, reference, reference_attention, reference_step
from diffkv_repro.diffkv.paged_view import KeyBias, PagedRule, PagedView
from diffkv_repro.models.rope import Rope, key_biases

CPU = torch.device("cpu")
MIRRORS = ["K8V4 K4V2", "K4V8 K2V4", "K4V2:2/4 K2V1", "K16V16 K8V8", "K16V2 K1V16", "K8V4 K4V2 K2V2", "K4V4"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tiers", MIRRORS)
def test_pages_decode_to_what_the_codec_stores(tiers, dtype):
    key, value = (random_rows(2, 2, 33, 64, seed=seed, dtype=dtype, device=CPU) for seed in (1, 2))
    if dtype == torch.bfloat16:  # 65504 rounds up there, beyond FP16
        key, value = key.clamp(-65280, 65280), value.clamp(-65280, 65280)
    tier = mixed_tiers(2, 2, 33, len(tiers.split()), device=CPU)
    view, rows, scores = filled_view(key, value, tier, tiers)
    for (row, head, token), index in zip(
        torch.ones_like(tier).nonzero().tolist(), tier.flatten().tolist(), strict=True
    ):
        if index == DROPPED:
            continue
        slot = (tier[row, head, :token] == index).sum()[None]
        precision = view.layouts[index].precision
        found = reference.read_rows(view, index, int(rows[row]), 1, head, slot)
        for own, bits, groups, seen in (
            (key, precision.key_bits, precision.key_groups, found[0]),
            (value, precision.value_bits, precision.value_groups, found[1]),
        ):
            codec = VectorCodec(64, bits, groups)
            assert torch.equal(seen, codec.round_trip(own[row, head, token][None], torch.float32))
        assert float(found[2]) == float(scores[row, head, token])
        assert int(found[3]) == token


def test_packing_touches_nothing_else():
    key, value = (torch.randn(1, 2, 20, 64, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    tier = mixed_tiers(1, 2, 20, 2, device=CPU)
    view, _, _ = filled_view(key, value, tier, "K8V4 K4V2", layer=0)
    stored_bytes = sum(
        int((tier == index).sum()) * layout.token_bytes for index, layout in enumerate(view.layouts)
    )  # fmt: skip
    again, _, _ = filled_view(key, value, tier, "K8V4 K4V2", layer=0)
    again.pool.zero_()
    slots, _ = reference.partition(tier, 2)
    scores = torch.rand(tier.shape, generator=torch.Generator().manual_seed(0))
    reference.pack(again, key, value, tier, slots, scores, torch.tensor([0], dtype=torch.int32), layer=0)
    # A byte that is the same over 0xFF and over 0 has been written.
    assert int((view.pool == again.pool).sum()) == stored_bytes


def test_values_beyond_half_precision_are_refused():
    key = torch.ones(1, 1, 2, 64)
    key[0, 0, 1, 3] = 7e4
    with pytest.raises(ValueError, match="a value to quantise is 70000"):
        filled_view(key, torch.ones_like(key), torch.zeros(1, 1, 2, dtype=torch.int8), "K8V4")


def test_parts_that_do_not_fit_are_refused():
    view = empty_view(device=CPU)
    for change, message in (
        ({"layouts": ()}, "a paged cache has no layout"),
        ({"pool": view.pool.float()}, r"pool is float32 .*; it must be uint8 \[pages, "),
        ({"pool": view.pool[:, ::2]}, "pool is uint8"),
        ({"tables": view.tables.long()}, "tables is int64"),
        ({"tables": view.tables[:0]}, "0 tables hold 2 tiers"),
        ({"lengths": view.lengths[..., :1]}, "lengths is int32 .*; it must be int32"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(view, **change)


@settings(deadline=None, max_examples=30)
@given(
    name=st.sampled_from(sorted(POLICIES)), tokens=st.integers(1, 40), short=st.integers(1, 40),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_prompt_tiers_are_those_of_the_policy(name, tokens, short, seed):
    """Also with prompts of unequal lengths, which the dense cache pads on the left."""
    policy, lengths = POLICIES[name], (tokens, min(short, tokens))
    call = random_call(tokens=tokens, seed=seed)
    place = place_of()
    rule = policy.rule(place)
    paged = PagedRule.of([rule], 2)
    lengths_tensor = torch.tensor(lengths, dtype=torch.int32)
    sums = reference_attention.significance(call.query, call.key, policy.significance, scale=call.scale,
                                            lengths=lengths_tensor)  # fmt: skip
    tiers = reference.classify(sums, lengths_tensor, paged, layer=0)
    for row, length in enumerate(lengths):
        alone = cut(call, 0, length)
        alone = dataclasses.replace(
            alone, query=alone.query[row : row + 1], key=alone.key[row : row + 1], value=alone.value[row : row + 1]
        )
        expected = rule.prompt(prompt_of(alone), torch.zeros(1, dtype=torch.long))
        assert torch.equal(tiers[row, :, :length], expected[0])
        assert bool((tiers[row, :, length:] == DROPPED).all())


@given(st.lists(st.integers(-1, 2), min_size=1, max_size=50))
def test_slots_count_the_tokens_before(row):
    slots, counts = reference.partition(torch.tensor(row, dtype=torch.int8)[None, None], 3)
    expected = [-1 if tier < 0 else row[:at].count(tier) for at, tier in enumerate(row)]
    assert slots[0, 0].tolist() == expected
    assert counts[0, 0].tolist() == [row.count(tier) for tier in range(3)]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(2))
def test_a_generation_is_that_of_the_packed_cache(name, seed):
    """Same tiers, same kept positions, same scores, same output, step by step."""
    policy, prompt, tokens = POLICIES[name], (3, 30)[seed], 60
    place = place_of(head_dim=16)
    call = random_call(tokens=tokens, seed=seed, head_dim=16)
    layer = TieredLayer(place, policy.rule(place), storage="packed")
    layer.prefill(prompt_of(cut(call, 0, prompt)), rows_of(2, prompt))
    steps = generate(TWINS, policy, call, prompt, place=place)
    for at, (view, rows, output) in enumerate(steps, start=prompt):
        if output is not None:
            expected = layer.decode(cut(call, at - 1, at), rows_of(2, at))
            assert_close(f"output {at}", output, expected[:, :, 0], 1e-4)
        tier, score = stored(view, rows, at)
        assert torch.equal(tier, layer.store.tier), f"tiers differ with {at} tokens"
        torch.testing.assert_close(score, layer.store.scores[:, :, 0], rtol=1e-3, atol=1e-5)
    assert len({int(value) for value in tier.unique()}) >= 2, "nothing happened"


@pytest.mark.parametrize("name", POLICIES)
def test_decisions_are_those_of_the_rules(name):
    for seed in range(8):  # of eight heads each, for each policy: 384 states
        check_decision(TWINS, name, (1, 4, 5, 6, 12, 25, 40, 60)[seed], seed)


def test_a_plan_of_all_layers_is_that_of_each():
    policy = POLICIES["paper"]
    view, rows, *_, prompt = random_state(policy, 25, 3)
    view.lengths[:, 0] = view.lengths[:, 1]
    view.tables[:, :, 0] = view.tables[:, :, 1]
    rule = PagedRule.of([policy.rule(place_of())] * 2, 2)
    rows[1] = -1
    columns, prompts = (torch.full((4,), number, dtype=torch.int32) for number in (25, prompt))
    plan = reference_step.decide(view, rows, columns, prompts, rule)
    for layer in range(2):
        assert torch.equal(plan[layer], reference_step.decide(view, rows, columns, prompts, rule, layer=layer))
    assert bool((plan[:, 1] == -1).all())


def test_only_one_score_a_token_fits():
    with pytest.raises(ValueError, match="pages hold one score a token"):
        PagedRule.of([CompressionPolicy.paper().rule(place_of())], 2)


def test_attention_is_that_over_what_is_stored():
    call = random_call(tokens=30, head_dim=64)
    for tensor in (call.key, call.value):
        tensor.copy_(tensor.half().float())
    tier = torch.zeros(2, 2, 30, dtype=torch.int8)
    view, rows, scores = filled_view(call.key, call.value, tier, "K16V16 K8V4")
    weights = naive_weights(call)
    output = reference_attention.decode_attention(view, call.query[:, :, -1], layer=1, requests=rows, scale=call.scale)
    assert_close("output", output, torch.from_numpy(naive_output(call, weights))[:, :, -1], 1e-5)
    given = torch.from_numpy(weights)[:, :, -1].unflatten(1, (2, 3)).amax(dim=2)
    assert_close("scores", stored(view, rows, 30)[1], scores + given, 1e-5)


def test_keys_stored_without_their_bias_are_those_of_the_transform():
    model = tiny_qwen2(heads=4, kv_heads=2)
    rope, bias = Rope(model), key_biases(model)[1]
    positions = torch.arange(50)
    cos, sin = rope._embed(torch.zeros(1, 1, 50, 16), positions[None])
    own = KeyBias.of([bias] * 2, cos[0], sin[0])
    transform = BiasFree(bias, rope)
    key = torch.randn(1, 2, 50, 16)
    torch.testing.assert_close(
        key - own.rotated(1, positions), transform.forward(key, positions[None]), rtol=1e-6, atol=1e-6
    )
    call = random_call(batch=1, tokens=40, head_dim=16, group=2)
    policy = POLICIES["paper"]
    place = place_of(head_dim=16, group=2)
    layer = TieredLayer(place, policy.rule(place), storage="packed", transform=transform)
    layer.prefill(prompt_of(cut(call, 0, 20)), rows_of(1, 20))
    for at, (_, _, output) in enumerate(generate(TWINS, policy, call, 20, place=place, bias=own), start=20):
        if output is not None:
            assert_close(f"output {at}", output, layer.decode(cut(call, at - 1, at), rows_of(1, at))[:, :, 0], 1e-3)
    with pytest.raises(ValueError, match="not a rotate_half embedding"):
        KeyBias.of([bias], torch.randn(5, 16), torch.randn(5, 16))


def test_a_view_finds_pages_from_both_ends():
    view = empty_view("K8V4 K4V2 K2V2", entries=5, device=CPU)
    assert isinstance(view, PagedView)
    page = torch.arange(2)
    assert torch.equal(view.pages(0, 1, 0, 1, page), view.tables[0, 1, 0, 1, :2].long())
    assert torch.equal(view.pages(1, 1, 0, 1, page), view.tables[0, 1, 0, 1, [4, 3]].long())
    assert torch.equal(view.pages(2, 1, 0, 1, page), view.tables[1, 1, 0, 1, :2].long())


def test_without_a_gpu_the_operations_are_the_twins(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    call, place = random_call(tokens=12, head_dim=16), place_of(head_dim=16)
    both = (generate(operations, POLICIES["released"], call, 8, place=place) for operations in (paged_ops, TWINS))
    for (view, _, output), (twin, _, expected) in zip(*both, strict=True):
        assert torch.equal(view.pool, twin.pool)
        assert torch.equal(view.lengths, twin.lengths)
        assert expected is None or torch.equal(output, expected)
    tier = mixed_tiers(1, 2, 9, 2, device=CPU)
    assert torch.equal(paged_ops.partition(tier, 2)[0], reference.partition(tier, 2)[0])
