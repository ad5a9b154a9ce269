"""``Method``: a way to compress the KV cache, independent of any model."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from diffkv_repro.attention_stats.prompt import PromptAttention
from diffkv_repro.cache.layer import FullLayer, LayerCache, Place
from diffkv_repro.cache.tiered import KeepAll, TieredLayer
from diffkv_repro.cache.transforms import BiasFree
from diffkv_repro.core.precision import Precision
from diffkv_repro.models.hf import AttentionLayout, UnsupportedAttention


class Method(ABC):
    """A frozen dataclass of parameters with one verb, :meth:`layer`.

    ``needs_rope`` and ``needs_bias`` say what a layer must be told of the model.
    """

    needs_rope: ClassVar[bool] = False
    code: ClassVar[tuple[str, ...]] = ()  # modules that results depend on, beyond those of the compressed cache

    @property
    def needs_bias(self) -> bool:
        """Whether the bias of the key projection is wanted."""
        return False

    @property
    @abstractmethod
    def label(self) -> str:
        """Short name for a legend."""

    @abstractmethod
    def layer(self, place: Place, storage: str) -> LayerCache:
        """The cache of one layer with full attention."""

    def check(self, layout: AttentionLayout) -> None:
        """Raise ValueError where the parameters do not fit a model; by default all do."""
        del layout

    def fitted_to(self, prompts: Sequence[PromptAttention]) -> "Method":
        """The method to use on ``prompts`` (one a layer): itself, unless its parameters depend on them."""
        del prompts
        return self

    def plan(self, layout: AttentionLayout) -> list[str]:
        """What happens to each layer, in words."""
        return [
            self.label if layer.kind == "full" else f"sliding window of {layer.window}, kept in FP16"
            for layer in layout.layers
        ]


@dataclass(frozen=True)
class FullPrecision(Method):
    """Nothing compressed: the reference of every comparison."""

    @property
    def label(self) -> str:
        return "FP16"

    def layer(self, place: Place, storage: str) -> LayerCache:
        return FullLayer(place)


@dataclass(frozen=True)
class Uniform(Method):
    """Every token at one precision, per token and KV head (DiffKV Figure 8). ``bias_free`` as in the policy."""

    precision: Precision | str
    bias_free: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "precision", Precision.parse(self.precision))

    @property
    def needs_bias(self) -> bool:
        return self.bias_free

    @property
    def label(self) -> str:
        return f"{self.precision}{', bias-free keys' if self.bias_free else ''}"

    def check(self, layout: AttentionLayout) -> None:
        require_groups(self.precision, layout.head_dim)

    def layer(self, place: Place, storage: str) -> LayerCache:
        return TieredLayer(place, KeepAll(self.precision), storage=storage, transform=bias_transform(place))


def bias_transform(place: Place) -> BiasFree | None:
    """The transform for a layer whose method asked for bias-free keys; None where the layer has no bias."""
    if place.key_bias is None:
        return None
    if place.rope is None:
        raise UnsupportedAttention(f"layer {place.layer}: a key bias cannot be turned without the rotary embedding")
    return BiasFree(place.key_bias.to(place.device), place.rope)


def require_groups(precision: Precision, head_dim: int) -> None:
    """Raise ValueError where scale groups do not divide head_dim."""
    for what, bits, groups in (
        ("key", precision.key_bits, precision.key_groups),
        ("value", precision.value_bits, precision.value_groups),
    ):
        if bits < 16 and head_dim % groups:
            raise ValueError(f"{precision}: {groups} {what} groups do not divide a head_dim of {head_dim}")


def model_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype a model computes in, if it is one that KV caches come in."""
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise UnsupportedAttention(f"a model in {dtype} is not supported; float32, float16 and bfloat16 are")
    return dtype
