"""INT4: the 4-bit KV cache of Atom and QServe, without the rest of those systems.

Atom (Zhao et al., MLSys 2024) and QServe (Lin et al., MLSys 2025) keep keys and values in asymmetric 4 bits, with a
scale and a zero point for every token and KV head. Atom's weights and activations have groups of 128 channels, which
is one head vector of the models of both papers. DiffKV's released evaluation runs this baseline as K4V4 with one group
a vector, which is the default here.

Deviations:

- QServe's SmoothAttention, which moves outlier channels of the keys into the query projection, is left out: it
  needs calibration data and changes the weights.
- Weights and activations stay in full precision; Atom has 4 bits for both, QServe 4 and 8. Atom's reordering of
  outlier channels belongs to them.
- Zero points are FP16 minima, rounded so that nothing is clipped (see ``core.quantize``), not integers.
"""

from dataclasses import dataclass

from diffkv_repro.cache.layer import LayerCache, Place
from diffkv_repro.cache.method import Method
from diffkv_repro.cache.tiered import KeepAll, TieredLayer
from diffkv_repro.core.precision import Precision
from diffkv_repro.models.hf import AttentionLayout

_BITS = (2, 4, 8)


@dataclass(frozen=True)
class Int4(Method):
    """``bits`` for keys and values alike, with scales over ``group`` channels (None: the whole head vector)."""

    bits: int = 4
    group: int | None = None

    def __post_init__(self) -> None:
        if self.bits not in _BITS:
            raise ValueError(f"bits is {self.bits!r}; allowed are {', '.join(map(str, _BITS))}")
        require_group(self.group)

    @property
    def label(self) -> str:
        return f"INT{self.bits}{'' if self.group is None else f', groups of {self.group}'}"

    def check(self, layout: AttentionLayout) -> None:
        uniform(self.bits, self.group, layout.head_dim)

    def layer(self, place: Place, storage: str) -> LayerCache:
        return TieredLayer(place, KeepAll(uniform(self.bits, self.group, place.layout.head_dim)), storage=storage)


def require_group(group: int | None) -> None:
    """Raise ValueError where ``group`` is no number of channels."""
    if group is not None and (not isinstance(group, int) or group < 1):
        raise ValueError(f"group is {group!r}; it must be a whole number of channels of at least 1, or None")


def uniform(bits: int, group: int | None, head_dim: int) -> Precision:
    """Precision of keys and values in groups of ``group`` channels, or of a head vector where that is shorter.

    Raises ValueError where groups do not divide head_dim.
    """
    size = head_dim if group is None else min(group, head_dim)
    if head_dim % size:
        raise ValueError(f"group is {group}; it must divide the model's head_dim of {head_dim}")
    return Precision(bits, bits, head_dim // size, head_dim // size)
