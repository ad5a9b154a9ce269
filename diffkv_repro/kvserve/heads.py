"""Which KV heads look far back, found without training: what KVServe's MixHQ ranks heads by.

KVServe takes the scorer of NVIDIA's kvpress rather than DuoAttention's optimised gates. The mean query and the mean key
of a head, before RoPE, stand for its content; put at a distance of 0 to ``span`` - 1 they show what RoPE alone makes of
it. A head that still attends to far positions then is a retrieval head.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from diffkv_repro.attention_stats.head_classes import retrieval_scores
from diffkv_repro.attention_stats.prompt import PromptAttention
from diffkv_repro.core.files import write_text
from diffkv_repro.core.paths import project_root
from diffkv_repro.core.provenance import capture
from diffkv_repro.kvserve.layout import KVLayout
from diffkv_repro.kvserve.registry import require_choice, require_whole
from diffkv_repro.models.hf import AttentionCall, decoder_of, intercept_attention
from diffkv_repro.models.rope import Rope
from diffkv_repro.models.zoo import LoadedModel

METHODS = ("mean-attention", "induction", "gates")


@dataclass(frozen=True)
class HeadScores:
    """``scores`` [layers][kv_heads], higher for heads that look further back; how, of which model and by whom."""

    scores: tuple[tuple[float, ...], ...]
    method: str
    model: str
    fingerprint: str
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    provenance: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        rows = tuple(tuple(map(float, row)) for row in self.scores)
        if not rows or not rows[0] or len({len(row) for row in rows}) != 1:
            raise ValueError(f"scores are {self.scores!r}; they must be [layers][kv_heads] numbers")
        if not bool(torch.isfinite(torch.tensor(rows)).all()):
            raise ValueError("a head's score is not finite")
        require_choice("method", self.method, METHODS)
        object.__setattr__(self, "scores", rows)

    @property
    def tensor(self) -> Tensor:
        """Float64 [layers, kv_heads]."""
        return torch.tensor(self.scores, dtype=torch.float64)

    def require(self, layout: KVLayout) -> None:
        """Raise ValueError where the scores are of another shape or model."""
        shape = (len(self.scores), len(self.scores[0]))
        other = layout.model and self.fingerprint and layout.model != self.fingerprint
        if shape != (layout.layers, layout.kv_heads) or other:
            raise ValueError(
                f"head scores are of {shape[0]} layers x {shape[1]} heads of {self.fingerprint!r}; "
                f"needed are {layout.layers} x {layout.kv_heads} of {layout.model!r}"
            )

    def save(self, path: Path) -> Path:
        """Write JSON, whole or not at all."""
        return write_text(path, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what :meth:`save` wrote. Raises ValueError for a file that is none."""
        try:
            return cls(**json.loads(Path(path).read_text(encoding="utf-8")))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} holds no head scores: {error}") from error


def score_heads(
    loaded: LoadedModel, texts: Sequence[str], *, span: int = 1024, longest: int = 2048, method: str = "mean-attention"
) -> HeadScores:
    """Score every KV head of ``loaded`` on ``texts``, of which the first ``longest`` tokens count.

    ``mean-attention``: the query at position ``span`` - 1 attends to ``span`` equal keys; the score is the mean of the
    cumulative attention, oldest first (the area under it), averaged over the query heads of a KV head and the texts.
    ``induction``: attention to an earlier occurrence, on random tokens (:func:`retrieval_scores`); texts are not read.
    ``gates``: DuoAttention's, optimised (:func:`~diffkv_repro.kvserve.gates.optimise_gates`, at its defaults).
    Raises ValueError for no text, UnsupportedAttention for models without a rotary embedding.
    """
    require_choice("method", method, METHODS)
    require_whole("span", span, 2)
    require_whole("longest", longest, 1)
    settings: dict[str, Any] = {"span": span, "longest": longest}
    if method == "gates":
        from diffkv_repro.kvserve.gates import optimise_gates  # which makes scores, as this does

        return optimise_gates(loaded)
    if method == "induction":
        scores, settings = torch.from_numpy(retrieval_scores(loaded)), {}
    else:
        if not texts:
            raise ValueError("no text was given to score heads on")
        scores = torch.stack([_mean_attention(loaded, text, span, longest) for text in texts]).mean(dim=0)
        settings |= {"texts": len(texts), "texts_sha256": hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]}
    return HeadScores(
        scores=tuple(map(tuple, scores.tolist())),
        method=method,
        model=loaded.name,
        fingerprint=loaded.fingerprint,
        settings=settings,
        provenance=capture(root=project_root(), config=settings | {"model": loaded.name}).as_dict(),
    )


def _mean_attention(loaded: LoadedModel, text: str, span: int, longest: int) -> Tensor:
    layout, rope = loaded.layout, Rope(loaded.model)
    ids = loaded.tokenizer(text, return_tensors="pt", truncation=True, max_length=longest).input_ids
    if not ids.numel():
        raise ValueError("a text to score heads on is empty")
    positions = torch.arange(ids.shape[1], device=loaded.device)[None]
    ahead = torch.arange(span, device=loaded.device)[None]
    scores = torch.zeros(len(layout.layers), layout.kv_heads, dtype=torch.float64)

    def watch(call: AttentionCall) -> Tensor:
        query = rope.rotate(call.query, positions, back=True).mean(dim=2, keepdim=True)
        key = rope.rotate(call.key, positions, back=True).mean(dim=2, keepdim=True)
        query = rope.rotate(query, ahead[:, -1:])
        key = rope.rotate(key.expand(-1, -1, span, -1), ahead).repeat_interleave(layout.group, dim=1)
        weights = (torch.matmul(query, key.transpose(-1, -2))[0, :, 0].double() * call.scale).softmax(dim=-1)
        area = weights.cumsum(dim=-1).mean(dim=-1)
        scores[call.layer] = area.view(layout.kv_heads, layout.group).mean(dim=1).cpu()
        return PromptAttention(call).output()

    with torch.inference_mode(), intercept_attention(loaded.model, watch):
        decoder_of(loaded.model)(input_ids=ids.to(loaded.device), use_cache=False)
    return scores
