"""What parts of a profile need beside keys and values: scores to rank by, and what transforms have learnt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from diffkv_repro.attention_stats.significance import Significance
from diffkv_repro.kvserve.layout import KVLayout

if TYPE_CHECKING:
    from diffkv_repro.kvserve.heads import HeadScores
    from diffkv_repro.kvserve.transform_state import AffineMaps, RotaryKeys


@dataclass(frozen=True, eq=False)
class PromptScores:
    """Scores that the tokens of a prompt received, ``sums`` [kv_heads, tokens] a layer, over the queries of ``rule``:
    what DiffKV's policy decides by."""

    rule: Significance
    sums: Sequence[Tensor]


@dataclass(frozen=True, eq=False)
class Assets:
    """Rankings are for the encoder alone: frames carry what came of them. The rest both sides need, and a frame carries
    its digest.

    ``heads`` scores of KV heads; ``layer_scores`` [layers]; ``token_scores`` a tensor [kv_heads, tokens] a layer (a
    sequence, or by layer); higher is more important. ``received`` is what DiffKV ranks tokens by. ``affine`` learnt
    maps; ``rotary`` the model's rotary embedding and key biases.
    """

    heads: "HeadScores | None" = None
    layer_scores: Sequence[float] | None = None
    token_scores: Sequence[Tensor] | Mapping[int, Tensor] | None = None
    received: PromptScores | None = None
    affine: "AffineMaps | None" = None
    rotary: "RotaryKeys | None" = None

    @property
    def identity(self) -> dict[str, Any]:
        """What a result depends on, as plain data: scores of heads and layers, digests of what both sides share."""
        shared = {name: getattr(self, name) for name in ("affine", "rotary")}
        return {
            "heads": None if self.heads is None else self.heads.scores,
            "layers": None if self.layer_scores is None else [float(score) for score in self.layer_scores],
        } | {name: None if part is None else part.digest.hex() for name, part in shared.items()}


@dataclass(frozen=True)
class Place:
    """Where a layer's keys and values belong: layer ``layer``, tokens ``start`` to ``start`` + ``tokens``.

    ``dtype`` is what a quantizer gives back: the layout's where no transform follows, else float32.
    """

    layout: KVLayout
    layer: int
    tokens: int
    start: int = 0
    dtype: torch.dtype = torch.float32
    assets: Assets = field(default_factory=Assets)

    @property
    def shape(self) -> tuple[int, int, int]:
        """[kv_heads, tokens, head_dim]."""
        return self.layout.kv_heads, self.tokens, self.layout.head_dim

    @property
    def half(self) -> torch.dtype:
        """The 16-bit format of what is not quantised: bfloat16 for a model that computes in it, else float16."""
        return torch.bfloat16 if self.layout.dtype == torch.bfloat16 else torch.float16
