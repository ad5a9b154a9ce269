"""PyramidKV (Cai et al., 2024, arXiv:2406.02069): SnapKV's choice of tokens, with more of them in lower layers.

Attention spreads widely in lower layers and settles on few tokens in higher ones, so budgets fall in equal steps from
the lowest to the highest layer around the same mean. With P the mean number of tokens besides the window, the highest
layer gets P / ``beta`` and the lowest 2 P - P / ``beta``.

Defaults: ``beta`` 20 and a window of 8 queries (the paper's alpha), max pooling over 7 tokens as in the released runs.

Deviations:

- Those of SnapKV (one choice for the query heads of a KV head, ``keep`` as a share of the prompt).
- Budgets are rounded in pairs around the mean, so that they sum up exactly; the released code rounds the step down,
  which leaves its highest layers with more than planned.
- Where the lowest layer would get more tokens than there are, it gets them all and the slope is lessened, as in the
  released code. That code gives up the pyramid for equal budgets where the prompt is shorter than 2 P; here it stays.
- Layers with a sliding window are not compressed and take no part in the pyramid.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from diffkv_repro.baselines.snapkv import SnapKV
from diffkv_repro.cache.layer import Place


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """As SnapKV, keeping ``keep`` of the prompt in the mean over layers. ``beta`` 1 means equal budgets."""

    window: int = 8
    beta: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta < 1:
            raise ValueError(f"beta is {self.beta}; allowed are whole numbers from 1")

    @property
    def label(self) -> str:
        return f"PyramidKV {self.keep * 100:g} %"

    def voted(self, length: Tensor, place: Place) -> Tensor:
        mean = super().voted(length, place)
        most = torch.minimum(2 * mean - mean // self.beta, (length - self.window).clamp_min(0))
        full = [index for index, layer in enumerate(place.layout.layers) if layer.kind == "full"]
        layer, last = full.index(place.layer), len(full) - 1
        if 2 * layer == last:
            return mean
        # The upper half mirrors the lower one about the mean, rounding included.
        above = ((most - mean).double() * (1 - 2 * min(layer, last - layer) / last)).round().long()
        return mean + above if 2 * layer < last else mean - above
