"""What notebook 10 checks of the pipeline itself: which part loses what, and that all bytes are counted (Figure 7)."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from diffkv_repro.kvserve.assets import Assets, Place
from diffkv_repro.kvserve.codecs import Codec, NoCodec
from diffkv_repro.kvserve.layout import KV, KVLayout, LayerKV
from diffkv_repro.kvserve.profile import Profile
from diffkv_repro.kvserve.quantizers import Exact
from diffkv_repro.kvserve.streams import StreamReader, StreamWriter
from diffkv_repro.kvserve.transforms import Hadamard


def share_bit_exact(codecs: Sequence[Codec], kv: KV, layout: KVLayout) -> float:
    """Share of the codecs that, without transform and quantizer, give every bit of the cache back."""
    exact = [_same(Profile((), Exact(), codec).encode(kv, layout).decode(), kv) for codec in codecs]
    return sum(exact) / len(exact)


def share_with_equal_codes(profiles: Iterable[Profile], kv: KV, layout: KVLayout, assets: Assets) -> float:
    """Share of the profiles that decode to what the same transform and quantizer give without a codec."""
    plain: dict[Profile, KV] = {}
    equal = []
    for profile in profiles:
        without = replace(profile, codec=NoCodec())
        if without not in plain:
            plain[without] = without.encode(kv, layout, assets=assets).decode()
        equal.append(_same(profile.encode(kv, layout, assets=assets).decode(), plain[without]))
    return sum(equal) / len(equal)


def largest_uncounted_bytes(profiles: Iterable[Profile], kv: KV, layout: KVLayout, assets: Assets) -> int:
    """Largest difference between the bytes that a frame counts and those that it is."""
    frames = (profile.encode(kv, layout, assets=assets) for profile in profiles)
    return max(abs(frame.nbytes - len(frame.to_bytes())) for frame in frames)


def hadamard_error(head_dims: Sequence[int], *, seed: int = 0) -> float:
    """Largest error of the transform and its inverse, over the largest number, for these head sizes."""
    worst = 0.0
    generator = torch.Generator().manual_seed(seed)
    for head_dim in head_dims:
        layout = KVLayout(1, 2, head_dim, torch.float32)
        layer = LayerKV(*(torch.randn(2, 33, head_dim, generator=generator) for _ in range(2)))
        place, streams = Place(layout, 0, 33), StreamWriter(NoCodec())
        turned = Hadamard().forward(layer, place, streams)
        side = Hadamard().read(place, StreamReader(memoryview(b"".join(streams.parts)), NoCodec()))
        back = Hadamard().inverse(turned, place, side)
        for before, after in ((layer.key, back.key), (layer.value, back.value)):
            worst = max(worst, float((after - before).abs().max() / before.abs().max()))
    return worst


def _same(one: KV, other: KV) -> bool:
    return all(
        torch.equal(mine, its)
        for pair, its_pair in zip(one.pairs, other.pairs, strict=True)
        for mine, its in zip(pair, its_pair, strict=True)
    )
