"""DiffKV's pages over the wire: the bytes that the quantizer writes, the pages that were sent, or a refusal."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from frame_mutations import mutated, signed
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kvserve_helpers import DTYPES, KINDS, kv_of, layout_of, same
from memory_helpers import assert_sound

from diffkv_repro.attention_stats.significance import Significance
from diffkv_repro.diffkv import CompressionPolicy, reference
from diffkv_repro.diffkv.memory import OutOfPages, PagedMemory
from diffkv_repro.diffkv.page_rows import put_rows, take_rows
from diffkv_repro.evaluation.page_transfer import PageTransfer, share_refused
from diffkv_repro.kvserve import Assets, FrameError, Profile, PromptScores, TokenTiers, receive_pages, send_pages
from diffkv_repro.kvserve.codecs import BitPack, Zstd
from diffkv_repro.kvserve.diffkv_pages import profile_of, store_prompt, view_of
from diffkv_repro.kvserve.entropy import Ans
from diffkv_repro.kvserve.frame import Frame
from diffkv_repro.kvserve.layout import KV
from diffkv_repro.kvserve.transforms import Hadamard, KeyBias

TIERS = {
    "two": TokenTiers(alphas=(1.2, 0.6), window=3),
    "one": TokenTiers(("K4V2",), (0.8,), window=1),
    "half": TokenTiers(("K16V16", "K8V4:2/2"), (1.0, 0.9), window=2),
    "three, last": TokenTiers(("K8V8", "K4V4", "K2V1"), (1.4, 1.0, 0.7), 4, observed=5, own_score=True),
    "by position": TokenTiers(("K8V4", "K4V16"), (0.5, 0.2), 5, by_position=True),
}


def received(layout, tokens, quantizer, seed=0):
    """Scores about 1 / N each, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(layout.layers, layout.kv_heads, tokens, generator=generator)
    counts = quantizer.significance.counts(tokens, tokens, torch.device("cpu"))
    return Assets(
        received=PromptScores(quantizer.significance, list(drawn.mul(2).sub(0.1).clamp_min(0) * counts / tokens))
    )


def made(layout, tokens, quantizer, kind="normal", seed=0, codec=None, page_bytes=None):
    kv, assets = kv_of(layout, tokens, kind, seed), received(layout, tokens, quantizer, seed)
    profile = Profile((), quantizer) if codec is None else Profile((), quantizer, codec)
    transfer = PageTransfer.of(kv, layout, profile, assets, page_bytes=page_bytes, seed=seed)
    return SimpleNamespace(kv=kv, assets=assets, profile=profile, transfer=transfer, layout=layout)


@st.composite
def prompts(draw):
    layout = layout_of(
        draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.sampled_from([16, 48, 80])),
        draw(st.sampled_from(DTYPES)),
    )  # fmt: skip
    tokens = draw(st.sampled_from([1, 2, 63, 65]) | st.integers(1, 90))
    return layout, tokens, draw(st.sampled_from(list(TIERS.values()))), draw(st.sampled_from(KINDS)), draw(
        st.integers(0, 99)
    )  # fmt: skip


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


def test_damage_is_refused_before_a_page_is_taken():
    own = made(layout_of(2, 2, 32), 41, TIERS["two"])
    assert share_refused(own.transfer, 200) == 1


def test_malice_is_refused_or_gives_sound_pages():
    dice = random.Random(3)
    own = made(layout_of(2, 2, 32), 21, TIERS["two"])
    data, receiver = own.transfer.send().to_bytes(), own.transfer.receiver
    taken = refused = 0
    for _ in range(400):
        try:
            receive_pages(Frame.from_bytes(signed(mutated(data, [data], dice)), own.layout, limit=1 << 16), receiver, 0)
        except FrameError:
            refused += 1
            assert receiver.synchronize_counts() == len(receiver.free)
            continue
        taken += 1
        assert_sound(receiver)
        for layer in range(2):
            held = [(head, tier) for head in range(2) for tier in range(2)]
            rows = [torch.arange(int(receiver.lengths[0, layer, head, tier])) for head, tier in held]
            found = [reference.read_rows(view_of(receiver), tier, 0, layer, head, own)
                     for (head, tier), own in zip(held, rows, strict=True)]  # fmt: skip
            assert all(bool(torch.isfinite(part.float()).all()) for row in found for part in row)
            assert all(bool((row[3] >= 0).all()) and bool((row[3] < receiver.max_tokens).all()) for row in found)
        receiver.release([0])
    assert min(taken, refused) > 8


def forged(own, change):
    """A frame with right checksums whose first layer's body ``change`` has altered."""
    data = bytearray(own.transfer.send().to_bytes())
    size = int.from_bytes(data[6:10], "little")
    change(data, size + 24 + 2)
    return Frame.from_bytes(signed(bytes(data)), own.layout)


def test_lies_of_a_sender_are_named():
    own = made(layout_of(1, 2, 16), 9, TokenTiers(("K8V8",), (0.0,), window=1))
    rows = 8 + (4 + 18 * 16) * 2  # counts; key and value codes of 18 tokens

    def put(at, raw):
        def change(data, body):
            data[body + at : body + at + len(raw)] = raw

        return change

    scales, scores, positions = rows + 4, rows + 2 * (4 + 72) + 4, rows + 3 * (4 + 72) + 4
    lies = {
        "each has at most 9": put(0, (10).to_bytes(4, "little")),
        r"hold \[\[-1\]": put(0, (2**32 - 1).to_bytes(4, "little")),
        "a number of tier 0 is not finite": put(scales, b"\x00\x7c"),
        "score of tier 0 is negative": put(scores, b"\x00\x00\x80\xbf"),
        "not finite": put(scores, b"\x00\x00\xc0\x7f"),
        "is not one of the 9": put(positions, (9).to_bytes(4, "little")),
        "two tokens of one position": put(positions, (1).to_bytes(4, "little")),
        "scaled to fit FP16": put(-1, b"\x01"),
    }
    for message, change in lies.items():
        with pytest.raises(FrameError, match=message):
            receive_pages(forged(own, change), own.transfer.receiver, 0)
        assert own.transfer.receiver.synchronize_counts() == len(own.transfer.receiver.free)
    receive_pages(forged(own, put(scales, b"\x00\x3c")), own.transfer.receiver, 0)  # any other scale is a scale


def test_other_models_pages_and_slots_are_refused():
    own = made(layout_of(2, 2, 32, model="this"), 30, TIERS["two"])
    frame, receiver = own.transfer.send(), own.transfer.receiver
    with pytest.raises(FrameError, match="other weights"):
        Frame.from_bytes(frame.to_bytes(), layout_of(2, 2, 32, model="that"))
    plain = Profile.named("int4").encode(own.kv, own.layout)
    with pytest.raises(FrameError, match=r"uniform.* has no pages"):
        receive_pages(plain, receiver, 0)
    turned = Profile((Hadamard(),), TIERS["two"]).encode(own.kv, own.layout, assets=own.assets)
    with pytest.raises(FrameError, match=r"hadamard.* has no pages"):
        receive_pages(turned, receiver, 0)
    other = made(layout_of(2, 2, 32), 30, TIERS["one"]).transfer.receiver
    with pytest.raises(FrameError, match="the pages are of K4V2, the profile of K8V4-K4V2"):
        receive_pages(frame, other, 0)
    late = own.profile.encode(KV(own.kv.layers, 7), own.layout, assets=own.assets)
    with pytest.raises(FrameError, match="from position 7 on"):
        receive_pages(late, receiver, 0)
    assert late.decode().start == 7
    assert same(KV(late.decode().layers), frame.decode())
    small = PagedMemory(receiver.layouts, pages=900, layers=2, kv_heads=2, max_requests=1, max_tokens=29)
    with pytest.raises(FrameError, match="at most 29"):
        receive_pages(frame, small, 0)
    few = PagedMemory(receiver.layouts, pages=5, layers=2, kv_heads=2, max_requests=1, max_tokens=40)
    with pytest.raises(OutOfPages):
        receive_pages(frame, few, 0)
    assert few.synchronize_counts() == 5
    receive_pages(frame, receiver, 0)
    with pytest.raises(ValueError, match="slot 0 holds a request"):
        receive_pages(frame, receiver, 0)
    with pytest.raises(ValueError, match="slot 1 holds no request"):
        send_pages(receiver, 1, 30, own.profile, own.layout)
    own.transfer.sender.release([0])
    own.transfer.sender.admit([0], [30])
    with pytest.raises(ValueError, match="is not compacted yet"):
        own.transfer.send()


def test_what_cannot_be_ranked_is_refused():
    layout, quantizer = layout_of(1, 1, 16), TIERS["two"]
    kv = kv_of(layout, 8)
    with pytest.raises(ValueError, match=r"decides by scores of .* and was given none"):
        Profile((), quantizer).encode(kv, layout)
    others = Assets(received=PromptScores(Significance("last", 8), [torch.zeros(1, 8)]))
    with pytest.raises(ValueError, match="was given those of Significance"):
        Profile((), quantizer).encode(kv, layout, assets=others)
    with pytest.raises(ValueError, match=r"received scores are \(1, 9\)"):
        Profile((), quantizer).encode(kv, layout, assets=received(layout, 9, quantizer))
    wide, large = layout_of(1, 1, 16, torch.bfloat16), kv_of(layout_of(1, 1, 16, torch.bfloat16), 8, "largest")
    with pytest.raises(ValueError, match=r"beyond .* the range of FP16"):
        PageTransfer.of(large, wide, Profile((), quantizer), received(wide, 8, quantizer))
    with pytest.raises(ValueError, match="do not fill units of 16 bits"):
        Profile((), quantizer).encode(
            kv_of(layout_of(1, 1, 5), 8), layout_of(1, 1, 5), assets=received(layout, 8, quantizer)
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alphas": (1.0,)}, "each tier needs one"),
        ({"alphas": (1.0, 2.0)}, "must not be larger"),
        ({"alphas": [1.0, 0.0]}, "each is a tuple"),
        ({"tiers": ("K3V4", "K2V2")}, "key_bits is 3"),
        ({"window": 0}, "window is 0"),
        ({"observed": -1}, "observed is -1"),
        ({"own_score": True}, "own_score goes with queries='last'"),
        ({"by_position": 1}, "by_position is 1"),
    ],
)
def test_bad_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        TokenTiers(**options)


def test_a_profile_of_tiers_is_one_line_and_yaml():
    profile = Profile((), TokenTiers(alphas=(3.0, 0.0), window=32), Zstd(shuffle=True))
    assert str(profile) == "none | diffkv alphas=3.0/0.0 window=32 | zstd shuffle=True"
    table = Profile((), TokenTiers(alphas=(((2.0, 1.0),), 0.5)))
    for one in (profile, table):
        assert Profile.from_yaml(one.to_yaml()) == one
        assert hash(Profile.from_yaml(one.to_yaml())) == hash(one)
