"""KVQuant's numbers: ranges and codebooks of a prompt, tokens into codes and back.

Tokens are flat here: [batch, tokens, width], the channels of all KV heads in one vector.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from diffkv_repro.baselines.columns import to_half
from diffkv_repro.core.codebook import fit, look_up, nearest
from diffkv_repro.core.quantize import LARGEST


@dataclass
class Coded:
    """Some tokens. ``key``, ``value`` as 16 bits hold them; ``key_outlier`` bool, where codes do not count;
    ``value_range`` FP16 [batch, tokens, 2], centre and half width; ``value_outlier`` int16 [batch, tokens, 2 m]."""

    key: Tensor
    value: Tensor
    key_codes: Tensor
    key_outlier: Tensor
    value_codes: Tensor
    value_range: Tensor
    value_outlier: Tensor


@dataclass
class Codec:
    """Of each sequence: ``key_range`` FP16 [batch, 2, width], centre and half width of every channel; codebooks FP16
    [batch, levels]. ``share`` of the values of a vector are outliers."""

    key_range: Tensor
    key_book: Tensor
    value_book: Tensor
    share: float
    half: torch.dtype

    @classmethod
    def of_prompt(
        cls, key: Tensor, value: Tensor, spans: list[slice], levels: int, share: float, half: torch.dtype
    ) -> "Codec":
        """From keys before RoPE, and values; ``spans`` are the tokens of each sequence that are to be quantised."""
        found = [_calibrated(key[row, span], value[row, span], levels, share) for row, span in enumerate(spans)]
        return cls(*(torch.stack(parts) for parts in zip(*found, strict=True)), share, half)

    def code(self, key: Tensor, value: Tensor) -> Coded:
        """Codes and outliers of new tokens. Raises ValueError for what FP16 cannot hold."""
        exact_key, exact_value = to_half(key, self.half), to_half(value, self.half)
        normal = _normal(key.float(), *self.key_range[:, None].unbind(2))
        outlier = normal.abs() > 1 if self.share else torch.zeros_like(normal, dtype=torch.bool)
        span, index = _own_range(value.float(), self.share)
        own = _normal(value.float(), *span[..., None].unbind(-2))
        return Coded(
            key=exact_key,
            value=exact_value,
            key_codes=nearest(normal, self.key_book),
            key_outlier=outlier,
            value_codes=nearest(own, self.value_book),
            value_range=span,
            value_outlier=index,
        )

    def keys(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """Keys of codes uint8 [batch, tokens, width], outliers apart."""
        return _restored(look_up(codes, self.key_book), *self.key_range[:, None].unbind(2), dtype)

    def values(self, codes: Tensor, span: Tensor, index: Tensor, exact: Tensor, dtype: torch.dtype) -> Tensor:
        """Values of codes, with ``exact`` in 16 bits put in place at ``index``."""
        dense = _restored(look_up(codes, self.value_book), *span[..., None].unbind(-2), dtype)
        return dense.scatter_(-1, index.long(), exact.to(dtype))

    def select(self, rows: Tensor) -> None:
        """Keep the sequences ``rows``, in that order."""
        for name in ("key_range", "key_book", "value_book"):
            setattr(self, name, getattr(self, name).index_select(0, rows))

    def tensors(self) -> list[Tensor]:
        """Ranges and codebooks."""
        return [self.key_range, self.key_book, self.value_book]


def outliers_a_side(width: int, share: float) -> int:
    """Values of a token of ``width`` channels that lie at or beyond the quantile ``share`` / 2 of it."""
    if not share:
        return 0
    return min(int(share / 2 * (width - 1)) + 1, (width - 1) // 2)


def _calibrated(key: Tensor, value: Tensor, levels: int, share: float) -> tuple[Tensor, Tensor, Tensor]:
    """Ranges [2, width] and codebooks of one sequence, ``key`` and ``value`` [tokens, width]."""
    key, value = key.float(), value.float()
    if len(key):
        span = _range(_quantile(key, share / 2), -_quantile(-key, share / 2))
    else:
        span = torch.zeros(2, key.shape[1], dtype=torch.float16, device=key.device)
    # An error counts in the units of keys and values themselves, so a value weighs as the square of its range.
    normal = _normal(key, *span)
    weight = torch.where(normal.abs() <= 1, span[1].float() ** 2, 0.0)
    key_book = fit(normal.clamp(-1, 1).flatten(), weight.flatten(), levels)
    own, index = _own_range(value, share)
    normal = _normal(value, *own[..., None].unbind(-2))
    weight = (own[..., 1:].float() ** 2).expand_as(normal).scatter(-1, index.long(), 0.0)
    return span, key_book, fit(normal.clamp(-1, 1).flatten(), weight.flatten(), levels)


def _quantile(tokens: Tensor, share: float) -> Tensor:
    """Lower quantile [width] over tokens [tokens, width], linear between two of them."""
    place = share * (len(tokens) - 1)
    below = int(place)
    least = tokens.topk(min(below + 2, len(tokens)), dim=0, largest=False).values
    return torch.lerp(least[below], least[-1], place - below)


def _own_range(value: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Ranges FP16 [..., 2] of tokens [..., width] without their outliers, and where those are, int16 [..., 2 m]."""
    count = outliers_a_side(value.shape[-1], share)
    low, at_low = value.topk(count + 1, dim=-1, largest=False)
    high, at_high = value.topk(count + 1, dim=-1)
    index = torch.cat([at_low[..., :count], at_high[..., :count]], dim=-1).to(torch.int16)
    return _range(low[..., count], high[..., count]).movedim(0, -1), index


def _range(low: Tensor, high: Tensor) -> Tensor:
    """Centre and half width in FP16 [2, ...], rounded so that nothing between the two is left out."""
    centre = ((low + high) / 2).half()
    width = torch.maximum(high - centre.float(), centre.float() - low).clamp_min(0)
    wider = (width * (1 + 2**-10) + 2**-24).clamp(max=LARGEST).half()
    return torch.stack([centre, torch.where(width > 0, wider, 0.0).half()])


def _normal(tokens: Tensor, centre: Tensor, width: Tensor) -> Tensor:
    """Within -1 to 1 where a token is in its range."""
    width = width.float()
    # A channel without a width: what differs from its centre is far out, what does not is 0.
    return (tokens - centre.float()) / torch.where(width > 0, width, 2.0**-24)


def _restored(levels: Tensor, centre: Tensor, width: Tensor, dtype: torch.dtype) -> Tensor:
    values = torch.addcmul(centre.float(), levels, width.float())
    return (values.clamp_(-LARGEST, LARGEST) if dtype == torch.float16 else values).to(dtype)
