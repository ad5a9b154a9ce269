"""Virtual time: the real scheduler and the real pages, while the model's steps take what they were measured to take.

Hours of serving pass in seconds, so that steady states and queues can be seen at the lengths of the papers. What a step
takes is measured on the same engine beforehand, at a grid of batch sizes and lengths (:class:`StepCosts`).
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from diffkv_repro.diffkv import paged_ops
from diffkv_repro.engine.clock import Clock
from diffkv_repro.engine.kv_cache import EngineCache
from diffkv_repro.engine.llm import LLM
from diffkv_repro.engine.measure.steps import generation_step, most_pages_after, prompt_step
from diffkv_repro.engine.model import Decoder
from diffkv_repro.engine.runner import Runner
from diffkv_repro.engine.scheduler import Batch
from diffkv_repro.engine.weights import Weights

_FEW_TOKENS = 64
_PROMPT_TOKENS = (64, 512)  # of the two prompts that a prompt's cost is measured with


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a generation step: at each of ``batches``, ``fixed`` + ``per_token`` x tokens of all requests, linear
    between batch sizes. Seconds of a prompt step: ``prompt_fixed`` + ``prompt_per_token`` x its padded tokens.

    ``worst_error`` is the largest relative difference to the steps of the grid that the lines were not drawn through.
    """

    batches: tuple[int, ...]
    fixed: tuple[float, ...]
    per_token: tuple[float, ...]
    prompt_fixed: float
    prompt_per_token: float
    worst_error: float = 0.0

    def __post_init__(self) -> None:
        if not len(self.batches) == len(self.fixed) == len(self.per_token) > 0:
            raise ValueError(
                f"{len(self.batches)} batches, {len(self.fixed)} fixed costs and {len(self.per_token)} costs per token"
            )
        if any(small >= large for small, large in itertools.pairwise(self.batches)):
            raise ValueError(f"batches are {self.batches}; they must grow")

    def generation(self, batch: int, tokens: int) -> float:
        """Seconds of a step of ``batch`` requests that have ``tokens`` tokens together."""
        fixed, per_token = (float(np.interp(batch, self.batches, own)) for own in (self.fixed, self.per_token))
        return fixed + per_token * tokens

    def seconds(self, batch: Batch) -> float:
        """Of a batch of the scheduler."""
        lengths = [len(request.tokens) for request in batch.requests]
        if batch.prompts:
            return self.prompt_fixed + self.prompt_per_token * max(lengths) * len(lengths)
        return self.generation(len(lengths), sum(lengths))

    @classmethod
    def measure(cls, llm: LLM, batches: Sequence[int], *, repeats: int = 5) -> "StepCosts":
        """On an idle engine, at few tokens and at the most that fit, checked half way between."""
        llm_tokens, steps = llm.cache.max_tokens - 4 * repeats - 16, {}
        if llm_tokens < 8:
            raise ValueError(
                f"max_tokens is {llm.cache.max_tokens}; steps are measured with at least {4 * repeats + 24}"
            )
        shortest = min(_FEW_TOKENS, llm_tokens // 4)
        for batch in batches:
            longest = llm_tokens
            while longest > 2 * shortest and not _fits(llm, batch, longest + 2 * repeats + 8):
                longest = longest * 7 // 8
            lengths = (shortest, (shortest + longest) // 2, longest)
            if not _fits(llm, batch, lengths[-1] + 2 * repeats + 8):
                break
            steps[batch] = [(n, generation_step(llm, batch, n, repeats=repeats).total) for n in lengths]
        if not steps:
            raise ValueError(f"the pool holds no {min(batches)} requests of {shortest} tokens")
        fixed, per_token, errors = [], [], []
        for batch, ((few, quick), (middle, between), (many, slow)) in steps.items():
            slope = max(slow - quick, 0.0) / (batch * (many - few))
            per_token.append(slope)
            fixed.append(quick - slope * batch * few)
            errors.append(abs((fixed[-1] + slope * batch * middle) / between - 1))
        few, many = (min(n, own) for n, own in zip(_PROMPT_TOKENS, (llm_tokens // 2, llm_tokens), strict=True))
        quick, slow = (prompt_step(llm, 1, n, repeats=repeats).total for n in (few, many))
        rise = max(slow - quick, 0.0) / max(many - few, 1)
        return cls(tuple(steps), tuple(fixed), tuple(per_token), max(quick - rise * few, 0.0), rise, max(errors))


def _fits(llm: LLM, batch: int, length: int) -> bool:
    """Whether ``batch`` requests of ``length`` tokens are sure to find pages, one after the other, and to grow."""
    cache = llm.cache
    spare = cache.layers * cache.kv_heads * cache.memory.prompt_pages(length)
    free = len(cache.memory.free) - cache.memory.watermark
    return batch <= llm.runner.max_requests and batch * most_pages_after(llm, length) + spare <= free


class VirtualClock(Clock):
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self._at = 0.0

    def now(self) -> float:
        return self._at

    def sleep(self, seconds: float) -> None:
        self._at += max(seconds, 0.0)


class PagesOnly(Decoder):
    """A decoder that asks for pages, fills and frees them as ``weights`` would, and computes nothing."""

    def __init__(self, weights: Weights, cache: EngineCache) -> None:
        super().__init__(weights, cache)
        size = (1, weights.kv_heads, weights.head_dim)
        self._nothing = torch.zeros(size, dtype=weights.dtype, device=weights.device)

    def prompt(self, slots: Sequence[int], rows: Tensor, tokens: Tensor, lengths: Tensor) -> Tensor:
        """As :meth:`Decoder.prompt`; the same token for everybody."""
        cache = self.cache
        if cache.replay is None:
            counts = lengths[:, None, None, None].expand(-1, cache.layers, cache.kv_heads, 1)
        else:
            own = [
                cache.replay.prompt(layer, lengths, tokens.shape[1], cache.rule.window)[2]
                for layer in range(cache.layers)
            ]
            counts = torch.stack(own, dim=1)
        cache.memory.compact(slots, counts.to(torch.int32).contiguous(), validate=False)
        return self._logits_of(len(slots))

    def step(
        self, tokens: Tensor, active: Tensor, rows: Tensor, columns: Tensor, prompts: Tensor, bound: int
    ) -> Tensor:
        """As :meth:`Decoder.step`; the same token for everybody."""
        self.cache.memory.reserve_step(active)
        plan = self.cache.given_plan(rows, columns)
        nothing = self._nothing.expand(len(tokens), -1, -1)
        for layer in range(self.cache.layers):
            paged_ops.append(self.cache.view, nothing, nothing, plan[layer], rows, columns, layer=layer)
        return self._logits_of(len(tokens))

    def _logits_of(self, requests: int) -> Tensor:
        return torch.zeros(requests, 2, device=self.weights.device)


class _TimedRunner(Runner):
    def __init__(self, llm: LLM, costs: StepCosts, clock: VirtualClock) -> None:
        real = llm.runner
        pages = PagesOnly(real.decoder.weights, real.decoder.cache)
        super().__init__(pages, max_requests=real.max_requests, graphs=real.graphs)
        self._costs, self._clock = costs, clock

    def run(self, batch: Batch) -> list[int]:
        self._clock.sleep(self._costs.seconds(batch))
        return super().run(batch)


@contextmanager
def virtual_time(llm: LLM, costs: StepCosts) -> Iterator[LLM]:
    """``llm`` with a clock on which each step takes what ``costs`` say; idle before and after.

    A policy needs a replay of tiers, for no scores are computed; ValueError otherwise.
    """
    if llm.cache.policy is not None and llm.cache.replay is None:
        raise ValueError("without its model a policy cannot decide: virtual time needs a replay of tiers")
    if not llm.scheduler.idle:
        raise ValueError("requests are under way; time can only change when none is")
    llm.cache.memory.pool.zero_()  # what requests before left would be read as the codes of other tiers
    real = llm.runner, llm.clock
    llm.clock = VirtualClock()
    llm.runner = _TimedRunner(llm, costs, llm.clock)
    try:
        yield llm
    finally:
        llm.cancel(*[own.number for own in (*llm.scheduler.waiting, *llm.scheduler.running)])
        llm.runner, llm.clock = real
