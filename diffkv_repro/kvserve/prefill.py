"""A model's own KV cache of a prompt: what profiles are measured on, and what token ladders rank by."""

from dataclasses import dataclass

import torch
from torch import Tensor

from diffkv_repro.attention_stats.prompt import PromptAttention
from diffkv_repro.attention_stats.significance import Significance
from diffkv_repro.kvserve.assets import PromptScores
from diffkv_repro.kvserve.layout import KV, KVLayout
from diffkv_repro.models.hf import AttentionCall, decoder_of, intercept_attention
from diffkv_repro.models.zoo import LoadedModel

_KERNEL = 7  # tokens that are pooled, as in SnapKV's LongBench runs


@dataclass(frozen=True)
class Prefilled:
    """``kv`` of a prompt, its ``layout``, and where asked for ``token_scores`` [kv_heads, tokens] of every layer and
    ``received``, what DiffKV ranks tokens by."""

    kv: KV
    layout: KVLayout
    token_scores: tuple[Tensor, ...] | None = None
    received: PromptScores | None = None


def pooled_votes(prompt: PromptAttention, window: int) -> Tensor:
    """SnapKV's score of every token, [batch, kv_heads, tokens]: the attention of the last ``window`` queries, pooled
    along the text by its maximum over 7 tokens, mean of the query heads of a KV head."""
    votes = prompt.rows(window).sum(dim=2)
    pooled = torch.nn.functional.max_pool1d(votes, _KERNEL, stride=1, padding=_KERNEL // 2)
    return pooled.unflatten(1, (prompt.call.key.shape[1], -1)).mean(dim=2)


def prefill(
    loaded: LoadedModel, input_ids: Tensor, *, dtype: torch.dtype | None = None, window: int | None = None,
    significance: Significance | None = None,
) -> Prefilled:  # fmt: skip
    """Run ``input_ids`` [1, tokens] through the model and keep every layer's keys (after RoPE) and values.

    ``dtype`` is that of the cache, the model's own unless given: a model that computes in float32 on a CPU would be
    served from 16 bits. With ``window`` tokens are scored as SnapKV does (:func:`pooled_votes`). With ``significance``
    they are scored as DiffKV does: scores received from those queries, the maximum over the query heads of a KV head.
    """
    if input_ids.ndim != 2 or input_ids.shape[0] != 1 or not input_ids.shape[1]:
        raise ValueError(
            f"input_ids are {tuple(input_ids.shape)}; one prompt of at least one token is needed, [1, tokens]"
        )
    kept = dtype or loaded.model.dtype
    pairs: list[tuple[Tensor, Tensor]] = []
    scores: list[Tensor] = []
    sums: list[Tensor] = []

    def watch(call: AttentionCall) -> Tensor:
        prompt = PromptAttention(call)
        pairs.append((call.key.to(kept).cpu(), call.value.to(kept).cpu()))
        if window is not None:
            scores.append(pooled_votes(prompt, window)[0].cpu())
        if significance is not None:
            sums.append(significance.sums(prompt)[0].amax(dim=1).cpu())
        return prompt.output()

    with torch.inference_mode(), intercept_attention(loaded.model, watch):
        decoder_of(loaded.model)(input_ids=input_ids.to(loaded.device), use_cache=False)
    received = None if significance is None else PromptScores(significance, tuple(sums))
    return Prefilled(KV.of(pairs), KVLayout.of(loaded, kept), tuple(scores) if window is not None else None, received)
