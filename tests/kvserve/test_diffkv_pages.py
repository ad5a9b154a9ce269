"""DiffKV's pages over the wire: the bytes that the quantizer writes, and the pages that were sent."""

from dataclasses import replace

import pytest
import torch
from cache_helpers import ids_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kvserve_helpers import DTYPES, kv_of, layout_of
from memory_helpers import assert_sound
from pages_wire_helpers import TIERS, made, prompts, received
from tiny import save, tiny_llama

from diffkv_repro.cache import compress
from diffkv_repro.diffkv import CompressionPolicy, reference
from diffkv_repro.diffkv.page_rows import put_rows, take_rows
from diffkv_repro.kvserve import (
    Assets,
    Profile,
    TokenTiers,
    measure_all,
    prefill,
    receive_pages,
    send_pages,
)
from diffkv_repro.kvserve.codecs import BitPack, Zstd
from diffkv_repro.kvserve.diffkv_pages import profile_of, store_prompt, view_of
from diffkv_repro.kvserve.entropy import Ans
from diffkv_repro.kvserve.frame import Frame
from diffkv_repro.kvserve.quality import Judge
from diffkv_repro.kvserve.transforms import KeyBias
from diffkv_repro.models.zoo import load_model


@settings(max_examples=30, deadline=None)
@given(prompts(), st.sampled_from([None, BitPack(), Zstd(shuffle=True), Ans(shuffle=True), Ans(per="channel")]))
def test_pages_arrive_and_both_ways_make_the_same_frame(prompt, codec):
    layout, tokens, quantizer, kind, seed = prompt
    assume(kind != "largest" or layout.dtype != torch.bfloat16)  # where 65504 is 65536
    size = quantizer.layouts(layout.head_dim)[0].page_bytes + 128 * (seed % 5)
    own = made(layout, tokens, quantizer, kind, seed, codec, page_bytes=size)
    encoded = own.profile.encode(own.kv, layout, assets=own.assets)
    sent = own.transfer.send()
    assert sent.to_bytes() == encoded.to_bytes()
    assert (len(sent.to_bytes()), sent.code_bytes) == (sent.nbytes, encoded.code_bytes)
    own.transfer.receive(sent.to_bytes())
    assert_sound(own.transfer.receiver)
    again = send_pages(own.transfer.receiver, 0, tokens, own.profile, layout)
    assert again.to_bytes() == sent.to_bytes()
    assert own.transfer.uncounted_bytes() == 0


@pytest.mark.parametrize("name", TIERS)
def test_attention_over_received_pages_is_the_senders_bit_for_bit(name):
    own = made(layout_of(2, 2, 32), 77, TIERS[name], page_bytes=4096)
    assert own.transfer.share_of_equal_layers(3) == 1
    assert own.transfer.receiver.synchronize_counts() == len(own.transfer.receiver.free)


def test_a_wrong_byte_in_a_page_shows():
    own = made(layout_of(1, 1, 32), 40, TIERS["one"])
    own.transfer.receive(own.transfer.send().to_bytes())
    page = own.transfer.receiver.tables[0, 0, 0, 0, 0]
    own.transfer.receiver.pool[page, 0] ^= 255
    again = send_pages(own.transfer.receiver, 0, 40, own.profile, own.layout)
    assert again.to_bytes() != own.transfer.send().to_bytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_frame_decodes_to_what_the_pages_hold(dtype):
    layout, quantizer = layout_of(2, 2, 32, dtype), TIERS["two"]
    own = made(layout, 50, quantizer)
    got = Frame.from_bytes(own.transfer.send().to_bytes(), layout).decode()
    view = view_of(own.transfer.sender)
    for layer, found in enumerate(got.layers):
        dropped = torch.ones(2, 50, dtype=torch.bool)
        for head in range(2):
            for tier, count in enumerate(view.lengths[0, layer, head].tolist()):
                key, value, _, at = reference.read_rows(view, tier, 0, layer, head, torch.arange(count), dtype)
                assert torch.equal(found.key[head, at.long()], key)
                assert torch.equal(found.value[head, at.long()], value)
                dropped[head, at.long()] = False
        assert torch.equal(found.kept, ~dropped)
        assert 0 < int(dropped.sum()) < dropped.numel()
        assert not bool(found.key[dropped].any())


def test_tiers_are_the_policys_and_recent_tokens_are_in_the_first():
    policy = CompressionPolicy.released(alpha_high=1.2, alpha_low=0.6, window=9)
    quantizer = TokenTiers.of(policy)
    layout = layout_of(1, 2, 32)
    own = made(layout, 60, quantizer)
    rule = policy.significance
    sums = own.assets.received.sums[0]
    means = sums / rule.counts(60, 60, sums.device)
    expected = torch.where(means > 1.2 / 60, 0, torch.where(means >= 0.6 / 60, 1, -1))
    expected[:, -9:] = 0
    counts = torch.stack([(expected == tier).sum(dim=1) for tier in (0, 1)], dim=1)
    assert torch.equal(own.transfer.sender.lengths[0, 0].long(), counts)
    assert (quantizer.observed, quantizer.own_score, quantizer.significance) == (64, True, rule)
    assert profile_of(replace(policy, bias_free=True)).transforms == (KeyBias(),)


def test_alphas_may_differ_between_heads():
    layout = layout_of(2, 2, 32)
    quantizer = TokenTiers(alphas=(((9.0, 0.0), (9.0, 9.0)), 0.0), window=1)
    own = made(layout, 30, quantizer)
    high, low = own.transfer.sender.lengths[0, ..., 0], own.transfer.sender.lengths[0, ..., 1]
    assert high[0].tolist() == [1, int(high[0, 1])]
    assert int(high[0, 1]) > 20
    assert high[1].tolist() == [1, 1]
    assert low[1].tolist() == [29, 29]
    with pytest.raises(ValueError, match="alphas of layer 0 are"):
        Profile((), quantizer).encode(kv_of(layout_of(2, 3, 32), 5), layout_of(2, 3, 32), assets=received(
            layout_of(2, 3, 32), 5, quantizer))  # fmt: skip
    with pytest.raises(ValueError, match=r"alphas of layer 2 are \(\)"):
        Profile((), quantizer).encode(kv_of(layout_of(3, 2, 32), 5), layout_of(3, 2, 32), assets=received(
            layout_of(3, 2, 32), 5, quantizer))  # fmt: skip


def test_a_request_in_generation_can_move():
    own = made(layout_of(1, 1, 32), 20, TIERS["one"])
    memory, view = own.transfer.sender, view_of(own.transfer.sender)
    before = take_rows(view, 0, [0], 0)
    active = torch.zeros(memory.max_requests, dtype=torch.uint8)
    active[0] = 1
    memory.reserve_step(active)
    memory.lengths[0, 0, 0, 0] += 1
    new = [torch.cat([part, part[:1]]) for part in before]
    new[5][-1:] = torch.tensor([[20]], dtype=torch.int32).view(torch.uint8)
    put_rows(view, 0, [0], 0, new)
    with pytest.raises(ValueError, match=r"holds 1\d tokens of a head; tokens is 3"):
        send_pages(memory, 0, 3, own.profile, own.layout)
    frame = send_pages(memory, 0, 21, own.profile, own.layout)
    receive_pages(Frame.from_bytes(frame.to_bytes(), own.layout), own.transfer.receiver, 0)
    for mine, its in zip(take_rows(view, 0, [0], 0), take_rows(view_of(own.transfer.receiver), 0, [0], 0), strict=True):
        assert torch.equal(mine, its)


def test_bytes_of_other_requests_never_leave():
    """Pages are full of rubbish before; two caches that differ in it alone make one frame, and it stays behind."""
    one, other = (made(layout_of(2, 2, 48), 33, TIERS["half"]) for _ in range(2))
    other.transfer.sender.pool.bitwise_not_()
    store = _stored(other)
    assert store.to_bytes() == one.transfer.send().to_bytes()
    other.transfer.receive(store.to_bytes())
    receiver = other.transfer.receiver
    view = view_of(receiver)
    used = view.tables[view.tables >= 0].unique()
    held = sum(int(part.numel()) for tier in range(2) for part in take_rows(view, 0, [0, 1], tier))
    assert int((receiver.pool[used.long()] != 0).sum()) <= held


def _stored(own):
    own.transfer.sender.release([0])
    store_prompt(own.transfer.sender, 0, own.kv, own.profile, own.layout, own.assets)
    return own.transfer.send()


def test_a_profile_of_tiers_is_one_line_and_yaml():
    profile = Profile((), TokenTiers(alphas=(3.0, 0.0), window=32), Zstd(shuffle=True))
    assert str(profile) == "none | diffkv alphas=3.0/0.0 window=32 | zstd shuffle=True"
    table = Profile((), TokenTiers(alphas=(((2.0, 1.0),), 0.5)))
    for one in (profile, table):
        assert Profile.from_yaml(one.to_yaml()) == one
        assert hash(Profile.from_yaml(one.to_yaml())) == hash(one)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return load_model(str(save(tiny_llama(heads=6, kv_heads=2), tmp_path_factory.mktemp("tiny"))), device="cpu")


@pytest.mark.parametrize("name", ["paper", "released"])
def test_frames_hold_what_the_compressed_cache_of_the_model_holds(tiny, name):
    alphas = {"paper": (1.3, 0.8), "released": (1.8, 1.2)}[name]
    policy = getattr(CompressionPolicy, name)(alpha_high=alphas[0], alpha_low=alphas[1], window=5)
    ids, profile = ids_of(41, seed=6), profile_of(policy)
    prompt = prefill(tiny, ids, significance=profile.quantizer.significance)
    got = profile.encode(prompt.kv, prompt.layout, assets=Assets(received=prompt.received)).decode()
    with compress(tiny.model, policy) as session, torch.inference_mode():
        tiny.model(ids, use_cache=True)
    stores = [layer.store for layer in session.cache.layers]
    for found, store in zip(got.layers, stores, strict=True):
        assert torch.equal(found.kept, store.tier[0] >= 0)
        assert {0, 1} <= set(store.tier.unique().tolist())
        for mine, its in zip((found.key, found.value), store.view(), strict=True):
            torch.testing.assert_close(mine, its[0], rtol=0, atol=0)
    assert not all(bool(found.kept.all()) for found in got.layers)


def test_a_judge_ranks_each_prompt_by_its_own_scores(tiny):
    profile = Profile((), TokenTiers(("K8V8",), (1.0,), window=1))
    ids = [ids_of(40, seed=seed) for seed in (1, 2)]
    judge = Judge(tiny, ids, continuation=8, significance=profile.quantizer.significance)
    both = judge.judge(profile)
    each = [
        Judge(tiny, [own], continuation=8, significance=profile.quantizer.significance).judge(profile) for own in ids
    ]
    assert both.added_nll == pytest.approx(sum(own.added_nll for own in each) / 2, abs=1e-6)
    assert both.ratio == pytest.approx(sum(own.ratio for own in each) / 2)
    assert abs(each[0].added_nll) > 1e-5
    with pytest.raises(ValueError, match="was given none"):
        Judge(tiny, ids, continuation=8).judge(profile)


def test_a_transfer_is_an_arm_of_the_measurements():
    own = made(layout_of(2, 2, 32), 60, TIERS["two"], codec=Zstd())
    tiers, pages = measure_all([own.profile, own.transfer], own.kv, own.layout, assets=own.assets, repeats=1)
    assert (tiers.frame_bytes, tiers.ratio, tiers.kept) == (pages.frame_bytes, pages.ratio, pages.kept)
    assert tiers.key_error == pages.key_error > 0
    assert min(pages.encode, pages.decode) > 0
    assert own.transfer.receiver.synchronize_counts() == len(own.transfer.receiver.free)
