"""What is no frame of these pages is refused with the reason, before a page is taken."""

import random

import pytest
import torch
from frame_mutations import mutated, signed
from kvserve_helpers import kv_of, layout_of, same
from memory_helpers import assert_sound
from pages_wire_helpers import TIERS, made, received

from diffkv_repro.attention_stats.significance import Significance
from diffkv_repro.diffkv import reference
from diffkv_repro.diffkv.memory import OutOfPages, PagedMemory
from diffkv_repro.evaluation.page_transfer import PageTransfer, share_refused
from diffkv_repro.kvserve import (
    Assets,
    FrameError,
    Profile,
    PromptScores,
    TokenTiers,
    receive_pages,
    send_pages,
)
from diffkv_repro.kvserve.diffkv_pages import view_of
from diffkv_repro.kvserve.frame import Frame
from diffkv_repro.kvserve.layout import KV
from diffkv_repro.kvserve.transforms import Hadamard


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
