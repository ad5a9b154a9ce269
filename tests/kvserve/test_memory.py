"""Encoding takes little memory beside the cache: working copies are of pieces, and layers go one by one."""

import subprocess
import sys

import pytest
import torch

from diffkv_repro.kvserve import Profile, codecs, entropy, grids
from tests.kvserve_helpers import assets_of, kv_of, layout_of

# In a process of its own: what other tests have freed would hide what is taken.
SCRIPT = """
import sys, torch
from diffkv_repro.core.timing import peak_memory
from diffkv_repro.kvserve import KV, Assets, HeadScores, KVLayout, Profile
torch.set_num_threads(1)
layout, tokens = KVLayout(3, 8, 128, torch.float16), 4096
generator = torch.Generator().manual_seed(0)
pairs = [[torch.randn(8, tokens, 128, generator=generator).half() for _ in range(2)] for _ in range(3)]
kv, assets = KV.of(pairs), Assets(heads=HeadScores(((.1, .2, .3, .4, .5, .6, .7, .8),) * 3, "induction", "", ""))
for line in sys.argv[1:]:
    profile = Profile.parse(line)
    sum(map(len, profile.stream(kv.layers, layout, tokens, assets=assets)))
    with peak_memory() as seen:
        sum(map(len, profile.stream(kv.layers, layout, tokens, assets=assets)))
    print(3 * seen.growth / layout.raw_bytes(tokens))
"""
LINES = ["none | uniform | bitpack", "none | uniform | ans", "kvserve-default", "kivi-2bit", "int4"]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a peak is sampled, and may be missed")
def test_encoding_takes_at_most_two_layers_beside_the_cache():
    done = subprocess.run([sys.executable, "-c", SCRIPT, *LINES], capture_output=True, text=True, check=True)
    found = dict(zip(LINES, map(float, done.stdout.split()), strict=True))
    assert all(0 < layers <= 2 for layers in found.values()), found


@pytest.mark.parametrize("line", ["none | uniform K12 V5 | ans", "hadamard | mixhq | ans per=channel", "cachegen-2",
                                  "none | uniform K12 V5 | range", "none | uniform K3 V256 | bitpack", "kivi-2bit",
                                  "none | none | ans shuffle=true"])  # fmt: skip
def test_pieces_change_no_byte(line, monkeypatch):
    """Frames are the same whatever the size of a piece, and each reads the other's."""
    profile, layout = Profile.parse(line), layout_of(2, 3, 16)
    kv = kv_of(layout, 333)
    assets = assets_of(layout, 333)
    whole = profile.encode(kv, layout, assets=assets)
    for module, name, size in ((codecs, "PIECE", 64), (entropy, "PIECE", 40), (grids, "_PIECE", 100)):
        monkeypatch.setattr(module, name, size)
    small = profile.encode(kv, layout, assets=assets)
    assert small.to_bytes() == whole.to_bytes()
    got = small.decode()
    monkeypatch.undo()
    again = whole.decode()
    assert all(torch.equal(a.key, b.key) and torch.equal(a.value, b.value)
               for a, b in zip(got.layers, again.layers, strict=True))  # fmt: skip
