"""What compressing a prompt costs, against the prefill it follows: ``diffkv-repro bench compress``."""

import statistics
from dataclasses import dataclass

import torch

from diffkv_repro.cache import Session
from diffkv_repro.core.timing import PairedTimes, time_pairs
from diffkv_repro.diffkv.policy import CompressionPolicy
from diffkv_repro.evaluation.teacher_forced import prefill
from diffkv_repro.models.hf import decoder_of
from diffkv_repro.models.zoo import LoadedModel


@dataclass(frozen=True)
class CompressionCost:
    """Seconds of deciding, quantising and packing a prompt in all layers, and of its plain prefill, pair by pair."""

    model: str
    tokens: int
    policy: str
    times: PairedTimes

    @property
    def share(self) -> float:
        """Compression over prefill, median of the pairs."""
        return statistics.median(self.times.ratios)

    def summary(self) -> str:
        """One line for people."""
        low, high = self.times.spread
        return (
            f"{self.model}, {self.tokens} tokens, {self.policy}: policy, quantisation and packing take "
            f"{self.share:.1%} of a plain prefill (median of {len(self.times.call)}, {low:.1%} to {high:.1%})"
        )


def bench_compression(
    loaded: LoadedModel, *, policy: CompressionPolicy, tokens: int = 2048, repeats: int = 5, seed: int = 0
) -> CompressionCost:
    """Time the prompt phase of ``policy`` with packed storage, all layers, against a plain prefill.

    Scores over all later queries are a by-product of attention computed in blocks and are not in the time (what they
    cost is ``bench stats``); scores over the last queries are computed here, and are.
    """
    limit = loaded.layout.max_positions
    if tokens < 3 or (limit is not None and tokens > limit):
        raise ValueError(f"tokens is {tokens}; allowed are 3 to {limit}")
    vocabulary = loaded.model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocabulary, (1, tokens + 2), generator=generator).to(loaded.device)
    prefilled = prefill(loaded.model, ids, tokens)
    if policy.significance.queries == "later":
        for prompt in prefilled.prompts:
            _ = prompt.received
    session = Session(loaded.model, policy, "packed")
    decoder = decoder_of(loaded.model)

    @torch.inference_mode()
    def compressed() -> None:
        session.new_cache().admit(prefilled.prompts, prefilled.rows)

    @torch.inference_mode()
    def plain() -> None:
        decoder(input_ids=ids[:, :tokens], use_cache=True)

    return CompressionCost(loaded.name, tokens, policy.label, time_pairs(compressed, plain, repeats))
