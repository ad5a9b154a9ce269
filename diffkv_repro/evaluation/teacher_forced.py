"""Teacher-forced decoding through a compressed cache: likelihood, divergence from FP16 and agreement with it.

The prompt is attended to exactly and then stored compressed, as DiffKV does; every later token of the text is
decoded through the cache. Methods compared on one text share its prompt, whose attention is computed once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diffkv_repro.attention_stats.prompt import PromptAttention
from diffkv_repro.cache import CompressedCache, FullPrecision, Method, compress
from diffkv_repro.cache.layer import Rows
from diffkv_repro.core.accounting import KVBytes
from diffkv_repro.core.threads import one_thread
from diffkv_repro.models.hf import AttentionCall, decoder_of, intercept_attention


class NotReadError(RuntimeError):
    """A score that never read the compressed cache: it would be that of FP16, whatever the method."""


@dataclass(frozen=True)
class Prefilled:
    """A batch of texts whose first ``tokens`` tokens have been run exactly, layer by layer."""

    input_ids: Tensor
    tokens: int
    prompts: list[PromptAttention]
    rows: Rows


@dataclass(frozen=True)
class Scored:
    """One text under one method.

    ``nll`` mean negative log-likelihood of the continuation, nats a token; ``kl`` mean KL divergence of its
    predictions from those of FP16, nats; ``agreement`` share of positions with the same most likely token;
    ``nominal``, ``true`` bytes at the end over FP16 and ``tokens`` stored at each precision, or pruned, are of the
    batch that the text was scored in.
    """

    nll: float
    kl: float
    agreement: float
    nominal: float
    true: float
    tokens: dict[str, int]
    predictions: int


def prefill(model, input_ids: Tensor, tokens: int) -> Prefilled:
    """Run the first ``tokens`` tokens of ``input_ids`` [texts, all], keeping what every layer's attention saw."""
    if not 1 <= tokens < input_ids.shape[1] - 1:
        raise ValueError(f"a prompt of {tokens} of {input_ids.shape[1]} tokens leaves nothing to decode")
    input_ids = input_ids.to(model.device)
    layers: dict[int, PromptAttention] = {}

    def watch(call: AttentionCall) -> Tensor:
        prompt = layers[call.layer] = PromptAttention(call)
        return prompt.output()

    with torch.inference_mode(), intercept_attention(model, watch):
        decoder_of(model)(input_ids=input_ids[:, :tokens], use_cache=False)
    positions = torch.arange(tokens, device=model.device).expand(len(input_ids), -1)
    return Prefilled(input_ids, tokens, [layers[index] for index in sorted(layers)], Rows(None, positions))


@torch.inference_mode()
def continued(model, prefilled: Prefilled, method: Method, storage: str) -> tuple[Tensor, CompressedCache]:
    """Log-probabilities [texts, n, vocabulary] of decoding the rest of each text through the cache, and the cache.

    Each of the n predictions comes of a token that was decoded, so each has read the cache.
    """
    with one_thread(), compress(model, method, storage=storage) as session:
        cache = session.new_cache()
        cache.admit(prefilled.prompts, prefilled.rows)
        rest = prefilled.input_ids[:, prefilled.tokens :]
        logits = model(input_ids=rest, past_key_values=cache.hf, use_cache=True).logits
    if cache.reads < rest.shape[1] * len(cache.layers):
        raise NotReadError(f"{method.label}: only {cache.reads} reads of the cache for {rest.shape[1]} tokens")
    return logits[:, :-1].float().log_softmax(dim=-1), cache


def score(
    model, input_ids: Tensor, methods: Sequence[Method], *, prompt_tokens: int, storage: str = "simulated"
) -> Iterator[list[Scored]]:
    """Scores of each of ``methods`` in turn on the texts of ``input_ids`` [texts, tokens], one item a text."""
    prefilled = prefill(model, input_ids, prompt_tokens)
    reference, full = continued(model, prefilled, FullPrecision(), storage)
    targets = prefilled.input_ids[:, prompt_tokens + 1 :]
    for method in methods:
        found, cache = (
            (reference, full)
            if isinstance(method, FullPrecision)
            else continued(model, prefilled, method.fitted_to(prefilled.prompts), storage)
        )
        size, tokens = cache.kv_bytes(), dict(cache.tokens())
        yield [_scored(*row, size, tokens) for row in zip(found, reference, targets, strict=True)]


def _scored(found: Tensor, reference: Tensor, targets: Tensor, size: KVBytes, tokens: dict[str, int]) -> Scored:
    """Metrics of one text from log-probabilities [n, vocabulary]."""
    divergence = (reference.exp() * (reference - found)).sum(dim=-1)
    return Scored(
        nll=-found.gather(-1, targets[:, None]).double().mean().item(),
        kl=divergence.double().mean().item(),
        agreement=(found.argmax(dim=-1) == reference.argmax(dim=-1)).double().mean().item(),
        nominal=size.nominal_ratio,
        true=size.true_ratio,
        tokens=tokens,
        predictions=len(targets),
    )
