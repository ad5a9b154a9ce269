"""Mutated frames: an error or the right tensors, never a crash, a hang or memory that the header did not announce.

DIFFKV_REPRO_FUZZ=100000 runs as many mutations; the default is 3,000.
"""

import os
import random

import pytest
import torch
from frame_mutations import mutated, signed
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
