"""The strategy space: every profile of a grid, in a fixed order (KVServe, Figures 5 and 9).

A space is a product of transforms, quantizers and codecs, and its size follows from their number. The finest one has
as many candidates as the paper's search starts from.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from diffkv_repro.kvserve.cachegen import CacheGen
from diffkv_repro.kvserve.codecs import BitPack, Codec, Lz4, NoCodec, Zstd
from diffkv_repro.kvserve.diffkv_pages import TokenTiers
from diffkv_repro.kvserve.entropy import Ans, RangeCoding
from diffkv_repro.kvserve.kvquant import KVQuant
from diffkv_repro.kvserve.ladders import HeadLadder, LayerLadder, MixHQ
from diffkv_repro.kvserve.profile import Profile
from diffkv_repro.kvserve.quantizers import Exact, Kivi, Quantizer, Uniform
from diffkv_repro.kvserve.token_ladder import TokenLadder
from diffkv_repro.kvserve.transforms import Affine, Delta, Hadamard, KeyBias, Transform, Unrope

Transforms = tuple[Transform, ...]
_PLAIN: Transforms = ()


@dataclass(frozen=True)
class Space:
    """All of ``transforms`` x ``quantizers`` x ``codecs``; the codec changes fastest, the transform slowest.

    A candidate's id is its profile's digest: the same in every space and every process.
    """

    name: str
    transforms: tuple[Transforms, ...]
    quantizers: tuple[Quantizer, ...]
    codecs: tuple[Codec, ...]

    def __post_init__(self) -> None:
        for name in ("transforms", "quantizers", "codecs"):
            given = getattr(self, name)
            if not given or len(set(given)) != len(given):
                raise ValueError(f"{name} of space {self.name} are {len(given)}; they must differ, and be at least one")

    def __len__(self) -> int:
        return len(self.transforms) * len(self.quantizers) * len(self.codecs)

    def __iter__(self) -> Iterator[Profile]:
        for transforms, quantizer, codec in product(self.transforms, self.quantizers, self.codecs):
            yield Profile(transforms, quantizer, codec)

    def __getitem__(self, index: int) -> Profile:
        """The candidate at ``index``, from 0. Raises IndexError beyond the last."""
        if not 0 <= index < len(self):
            raise IndexError(f"candidate {index} of space {self.name}; allowed are 0 to {len(self) - 1}")
        rest, codec = divmod(index, len(self.codecs))
        transforms, quantizer = divmod(rest, len(self.quantizers))
        return Profile(self.transforms[transforms], self.quantizers[quantizer], self.codecs[codec])

    @cached_property
    def ids(self) -> tuple[str, ...]:
        """Of all candidates, in order."""
        return tuple(profile.digest for profile in self)

    def index_of(self, profile: Profile) -> int:
        """Where ``profile`` stands. Raises ValueError where it is none of the candidates."""
        try:
            found = self.transforms.index(profile.transforms), self.quantizers.index(profile.quantizer)
            return (found[0] * len(self.quantizers) + found[1]) * len(self.codecs) + self.codecs.index(profile.codec)
        except ValueError as error:
            raise ValueError(f"{profile} is not in space {self.name}") from error


def level_pairs(levels: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """(high, low) with high >= low, both of ``levels``: n (n + 1) / 2 of n."""
    ordered = sorted(set(levels), reverse=True)
    return tuple((high, low) for index, high in enumerate(ordered) for low in ordered[index:])


def mixhq_grid(
    ratios: tuple[float, ...], keys: tuple[tuple[int, int], ...], values: tuple[tuple[int, int], ...]
) -> tuple[MixHQ, ...]:
    """MixHQ with every ratio and every pair of levels (high, low) for keys and values."""
    return tuple(MixHQ(ratio, *key, *value) for ratio, key, value in product(ratios, keys, values))


def _split(highs: tuple[int, ...], lows: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(product(highs, lows))


# Nine ratios and 21 pairs of six levels for keys and for values: 3,969; Figure 9 starts from 3 fewer.
_FINE = mixhq_grid(tuple(index / 10 for index in range(1, 10)), *2 * (level_pairs((16, 12, 10, 8, 6, 4)),))
_COARSE = mixhq_grid((0.3, 0.5, 0.7, 0.9), *2 * (level_pairs((16, 8, 4)),))
# Small enough to evaluate whole, and a part of the fine grid.
_REDUCED = mixhq_grid((0.3, 0.6, 0.9), *2 * (level_pairs((16, 10, 6)),))
_HANDFUL = mixhq_grid((0.3, 0.9), *2 * (level_pairs((16, 6)),))
_AE = mixhq_grid((0.3, 0.5, 0.7, 0.9), *2 * (_split((12, 10, 8), (6, 4)),))
_CPU_CODECS = (NoCodec(), BitPack(), Lz4(), Zstd(), Ans(), RangeCoding())
_TRANSFORMS = (_PLAIN, (Hadamard(),), (Delta(),), (Affine(),), (KeyBias(),), (Unrope(),))
_QUANTIZERS = (Uniform(), Kivi(), MixHQ(), HeadLadder(), LayerLadder(), TokenLadder(), CacheGen(), KVQuant())

# Ours: DiffKV's thresholds, with pages as they are or a codec over them.
_TIERS = tuple(
    TokenTiers(alphas=pair) for pair in product((0.5, 1.0, 2.0, 3.0, 5.0, 10.0), (0.0, 0.02, 0.05, 0.1, 0.2))
)

SPACES = {
    space.name: space
    for space in (
        Space("none", (_PLAIN,), (Exact(),), (NoCodec(),)),
        # Figure 5 from coarse to fine. Which modules: each at its defaults.
        Space("modules", _TRANSFORMS, _QUANTIZERS, _CPU_CODECS),
        Space("coarse", (_PLAIN, (Hadamard(),)), _COARSE, (BitPack(), Ans())),
        Space("headwise", (_PLAIN,), _FINE, (Ans(),)),
        Space("fine", (_PLAIN, (Hadamard(),)), _FINE, (Ans(),)),
        # The grid of the artifact evaluation.
        Space("artifact", ((Hadamard(),),), _AE, (Ans(),)),
        Space("tiers", (_PLAIN,), _TIERS, (NoCodec(), Zstd(shuffle=True), Ans(shuffle=True))),
        # Every fine candidate of some ratios and levels, to judge searches by the true optimum (Figure 16, left).
        Space("reduced", (_PLAIN, (Hadamard(),)), _REDUCED, (Ans(),)),
        Space("handful", (_PLAIN,), _HANDFUL, (Ans(),)),
    )
}


def space(name: str) -> Space:
    """A space by name. Raises ValueError with the known names."""
    if name not in SPACES:
        raise ValueError(f"unknown space {name!r}; allowed are {', '.join(SPACES)}")
    return SPACES[name]
