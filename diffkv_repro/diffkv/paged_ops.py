"""Operations on a paged cache: Triton kernels on a GPU (or in Triton's interpreter), their torch twins elsewhere."""

from typing import Literal

from torch import Tensor

from diffkv_repro.attention_stats.significance import Significance
from diffkv_repro.core.dispatch import uses_triton
from diffkv_repro.diffkv import reference, reference_attention, reference_step
from diffkv_repro.diffkv.paged_view import KeyBias, PagedRule, PagedView


def partition(tiers: Tensor, n_tiers: int) -> tuple[Tensor, Tensor]:
    """See :func:`diffkv_repro.diffkv.reference.partition`."""
    if uses_triton(tiers):
        from diffkv_repro.kernels.partition import partition_triton

        return partition_triton(tiers, n_tiers)
    return reference.partition(tiers, n_tiers)


def classify(sums: Tensor, lengths: Tensor, rule: PagedRule, *, layer: int) -> Tensor:
    """See :func:`diffkv_repro.diffkv.reference.classify`."""
    if uses_triton(sums):
        return _classify_triton(sums, lengths, rule, layer, partition=False)
    return reference.classify(sums, lengths, rule, layer=layer)


def classify_and_partition(
    sums: Tensor, lengths: Tensor, rule: PagedRule, *, layer: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Tiers, slots and counts: :func:`classify` and :func:`partition` in one pass."""
    if uses_triton(sums):
        return _classify_triton(sums, lengths, rule, layer, partition=True)
    tiers = reference.classify(sums, lengths, rule, layer=layer)
    return tiers, *reference.partition(tiers, rule.alphas.shape[1])


def _classify_triton(sums: Tensor, lengths: Tensor, rule: PagedRule, layer: int, *, partition: bool):
    from diffkv_repro.kernels.partition import classify_triton

    return classify_triton(
        sums, lengths, rule.alphas[layer], window=rule.window, observed=rule.observed, own_score=rule.own_score,
        by_position=rule.prompt_by_position, partition=partition,
    )  # fmt: skip


def pack(
    view: PagedView, keys: Tensor, values: Tensor, tiers: Tensor, slots: Tensor, scores: Tensor,
    requests: Tensor, *, layer: int, positions: Tensor | None = None, bias: KeyBias | None = None,
) -> None:  # fmt: skip
    """See :func:`diffkv_repro.diffkv.reference.pack`; on a GPU values beyond FP16 are not looked for."""
    options = {"layer": layer, "positions": positions, "bias": bias}
    if uses_triton(view.pool):
        from diffkv_repro.kernels.pack import pack_triton

        return pack_triton(view, keys, values, tiers, slots, scores, requests, **options)
    return reference.pack(view, keys, values, tiers, slots, scores, requests, **options)


def significance(query: Tensor, key: Tensor, rule: Significance, *, scale: float, lengths: Tensor) -> Tensor:
    """See :func:`diffkv_repro.diffkv.reference_attention.significance`."""
    if uses_triton(query):
        from diffkv_repro.kernels.significance import significance_triton

        observed = rule.observed if rule.queries == "last" else 0
        return significance_triton(
            query, key, observed=observed, own_score=rule.own_score, scale=scale, lengths=lengths
        )
    return reference_attention.significance(query, key, rule, scale=scale, lengths=lengths)


def decide(
    view: PagedView, requests: Tensor, columns: Tensor, prompts: Tensor, rule: PagedRule, *, layer: int | None = None
) -> Tensor:
    """See :func:`diffkv_repro.diffkv.reference_step.decide`."""
    if uses_triton(view.pool):
        from diffkv_repro.kernels.decide import decide_triton

        return decide_triton(view, requests, columns, prompts, rule, layer=layer)
    return reference_step.decide(view, requests, columns, prompts, rule, layer=layer)


def append(
    view: PagedView, key: Tensor, value: Tensor, plan: Tensor, requests: Tensor, columns: Tensor, *,
    layer: int, bias: KeyBias | None = None,
) -> None:  # fmt: skip
    """See :func:`diffkv_repro.diffkv.reference_step.append`; on a GPU values beyond FP16 are not looked for."""
    if uses_triton(view.pool):
        from diffkv_repro.kernels.append import append_triton

        return append_triton(view, key, value, plan, requests, columns, layer=layer, bias=bias)
    return reference_step.append(view, key, value, plan, requests, columns, layer=layer, bias=bias)


def decode_attention(
    view: PagedView, query: Tensor, *, layer: int, requests: Tensor, scale: float, update_scores: bool = True,
    newest: Tensor | None = None, bias: KeyBias | None = None, max_tokens: int | None = None,
    out: Tensor | None = None, kernel: Literal["cuda", "triton"] | None = None,
) -> Tensor:  # fmt: skip
    """See :func:`diffkv_repro.diffkv.reference_attention.decode_attention`.

    On a GPU ``kernel`` is the CUDA kernel where it covers the case and the Triton kernel elsewhere, unless named.
    Raises ValueError for a named CUDA kernel that does not cover it.
    """
    options = {"layer": layer, "requests": requests, "scale": scale, "update_scores": update_scores, "newest": newest}
    if not uses_triton(view.pool):
        return reference_attention.decode_attention(view, query, bias=bias, max_tokens=max_tokens, out=out, **options)
    if kernel != "triton" and query.is_cuda:
        from diffkv_repro.kernels.decode_cuda import decode_attention_cuda, refusal

        bound = max_tokens or view.max_tokens
        why = "keys without their bias" if bias is not None else refusal(view, query, bound, update_scores, out)
        if not why:
            return decode_attention_cuda(view, query, max_tokens=bound, out=out, **options)
        if kernel == "cuda":
            raise ValueError(f"the CUDA kernel does not cover this: {why}")
    from diffkv_repro.kernels.decode_triton import decode_attention_triton

    return decode_attention_triton(view, query, bias=bias, max_tokens=max_tokens, out=out, **options)
