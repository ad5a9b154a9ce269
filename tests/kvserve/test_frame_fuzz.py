"""Mutated frames: an error or the right tensors, never a crash, a hang or memory that the header did not announce.

DIFFKV_REPRO_FUZZ=100000 runs as many mutations; the default is 3,000.
"""

import os
import random
import zlib

import pytest
import torch
from kvserve_helpers import assets_of, kv_of, layout_of, same

from diffkv_repro.kvserve.codecs import CODECS
from diffkv_repro.kvserve.entropy import Ans, RangeCoding
from diffkv_repro.kvserve.frame import Frame
from diffkv_repro.kvserve.grids import KEPT
from diffkv_repro.kvserve.header import FrameError
from diffkv_repro.kvserve.kvquant import KVQuant
from diffkv_repro.kvserve.ladders import HeadLadder, MixHQ
from diffkv_repro.kvserve.profile import Profile
from diffkv_repro.kvserve.quantizers import Exact, Kivi, Uniform
from diffkv_repro.kvserve.token_ladder import TokenLadder
from diffkv_repro.kvserve.transforms import Delta, Hadamard

MUTATIONS = int(os.environ.get("DIFFKV_REPRO_FUZZ", "3000"))
LAYOUT = layout_of(2, 2, 8)
TOKENS = 19
PROFILES = [
    Profile((), Exact(), CODECS.make("zstd", {"shuffle": True})),
    Profile((Hadamard(),), MixHQ(), Ans()),
    Profile((Delta(),), Uniform(12, 5), RangeCoding(per="channel")),
    Profile((), Kivi(2, 4, 8), CODECS.make("bitpack")),
    Profile((), KVQuant(8, 0.1), CODECS.make("lz4")),
    Profile((), Uniform(12, 5), CODECS.make("deflate")),
    Profile((), HeadLadder(((KEPT, KEPT), (0, 0)), (0.5, 0.5), 2, 3), CODECS.make("none")),
    Profile((), TokenLadder(((256, 256), (4, 4), (0, 0)), (0.3, 0.3, 0.4)), Ans(per="channel")),
]  # fmt: skip


@pytest.fixture(scope="module")
def frames():
    kv, assets = kv_of(LAYOUT, TOKENS), assets_of(LAYOUT, TOKENS)
    made = [profile.encode(kv, LAYOUT, assets=assets) for profile in PROFILES]
    return [(frame.to_bytes(), frame.decode()) for frame in made]


def mutated(data, others, dice):
    """``data`` with one to four things wrong with it."""
    data = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(data)) if data else 0
        kind = dice.randrange(7)
        if kind == 0 and data:
            data[at] ^= 1 << dice.randrange(8)
        elif kind == 1 and data:
            data[at] = dice.choice([0, 1, 0x7F, 0x80, 0xFF])
        elif kind == 2:
            del data[at : at + dice.randint(1, 40)]
        elif kind == 3:
            data[at:at] = dice.randbytes(dice.randint(1, 40))
        elif kind == 4:
            data[at : at + 8] = dice.choice([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]).to_bytes(8, "little")
        elif kind == 5:
            other = dice.choice(others)
            data[at:] = other[min(at, len(other)) :]
        else:
            del data[at:]
    return bytes(data)


def signed(data):
    """With all checksums made right, as far as the frame can still be walked: what a malicious sender could do."""
    data = bytearray(data)
    size = int.from_bytes(data[6:10], "little")
    if not 14 <= size <= len(data):
        return bytes(data)
    head = zlib.crc32(data[: size - 4])
    data[size - 4 : size] = head.to_bytes(4, "little")
    at = size
    while at + 24 <= len(data):
        length = int.from_bytes(data[at + 8 : at + 16], "little")
        body = data[at + 24 : at + 24 + length]
        crc = zlib.crc32(body, zlib.crc32(data[at : at + 4] + data[at + 8 : at + 24], head))
        data[at + 4 : at + 8] = crc.to_bytes(4, "little")
        at += 24 + length
    return bytes(data)


def test_accidents_are_refused_or_harmless(frames):
    dice = random.Random(0)
    refused = 0
    for _ in range(MUTATIONS // 2):
        data, _ = dice.choice(frames)
        changed = mutated(data, [other for other, _ in frames], dice)
        try:
            got = Frame.from_bytes(changed, LAYOUT).decode()
        except FrameError:
            refused += 1
            continue
        # A piece of another frame may have replaced everything: then it is that frame, whole.
        assert any(changed == other and same(got, known) for other, known in frames)
    assert refused > 0.9 * (MUTATIONS // 2)


def test_malice_is_refused_or_gives_tensors_of_the_right_shape(frames):
    dice = random.Random(1)
    decoded = refused = 0
    for _ in range(MUTATIONS - MUTATIONS // 2):
        data, _ = dice.choice(frames)
        changed = signed(mutated(data, [other for other, _ in frames], dice))
        try:
            got = Frame.from_bytes(changed, LAYOUT, limit=1 << 20).decode()
        except FrameError:
            refused += 1
            continue
        decoded += 1
        for layer in got.layers:
            assert layer.key.shape == layer.value.shape
            assert layer.key.shape[::2] == (LAYOUT.kv_heads, LAYOUT.head_dim)
            assert LAYOUT.raw_bytes(layer.key.shape[1]) <= 1 << 20
            assert layer.key.dtype == torch.float16
    assert min(decoded, refused) > 0.02 * (MUTATIONS // 2)
