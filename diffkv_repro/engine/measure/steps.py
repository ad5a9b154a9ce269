"""Time a step of the engine and its parts.

Runs at a paper's shape fast-forward to where requests have their lengths: pages are allocated as after a real prompt,
their codes stay zero, which costs the same to read.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from diffkv_repro.engine.llm import LLM
from diffkv_repro.engine.request import Request, SamplingParams
from diffkv_repro.engine.scheduler import Batch

_FOREVER = SamplingParams(max_tokens=1 << 30, ignore_eos=True)


@dataclass(frozen=True)
class StepTiming:
    """Seconds of a step (medians of ``repeats``) at one batch and length, and of its parts.

    ``total`` is a whole step of the engine by the clock of the host; ``management`` pages alone, ``decisions`` which
    tokens to move or prune (in a prompt step, part of the execution), ``scheduling`` what the host does before and
    after; the model's execution is the rest.
    """

    phase: str
    batch: int
    length: int
    total: float
    management: float
    scheduling: float
    repeats: int
    decisions: float = 0.0

    @property
    def execution(self) -> float:
        """Seconds of the model, its attention included."""
        return max(self.total - self.management - self.decisions - self.scheduling, 0.0)

    def shares(self) -> dict[str, float]:
        """Percent of the step: management, decisions, execution, scheduling."""
        parts = {
            "management": self.management, "decisions": self.decisions, "execution": self.execution,
            "scheduling": self.scheduling,
        }  # fmt: skip
        return {name: 100 * value / self.total for name, value in parts.items()}

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def generation_step(llm: LLM, batch: int, length: int, *, repeats: int = 20) -> StepTiming:
    """A step of ``batch`` requests after ``length`` tokens each; the engine must be idle, and is again afterwards."""
    requests = fast_forward(llm, [length] * batch)
    try:
        step = Batch(tuple(requests), prompts=False)
        for _ in range(3):  # compiles, captures
            llm.runner.run(step)
            _grow(requests)
        totals, scheduling = [], []
        for _ in range(repeats):
            _synchronise(llm)
            started = time.perf_counter()
            found = llm.scheduler.next_batch()
            planned = time.perf_counter()
            llm.runner.run(found)  # hands the tokens over, so the device is done
            ended = time.perf_counter()
            _grow(requests)
            scheduling.append(planned - started + time.perf_counter() - ended)
            totals.append(time.perf_counter() - started)
        management, decisions = (_timed(llm, call, repeats) for call in llm.runner.management(requests))
        return StepTiming(
            "generation", batch, length, statistics.median(totals), management, statistics.median(scheduling), repeats,
            decisions,
        )  # fmt: skip
    finally:
        for request in requests:
            llm.scheduler.finish(request, "cancelled")


def prompt_step(llm: LLM, batch: int, length: int, *, repeats: int = 5, seed: int = 0) -> StepTiming:
    """A step in which ``batch`` prompts of ``length`` tokens enter, whole; their pages are given back each time."""
    draw = random.Random(seed)
    vocab, rows = llm.runner.decoder.weights.embedding.shape[0], []
    for _ in range(repeats + 1):
        for _ in range(batch):
            llm.add([draw.randrange(vocab) for _ in range(length)], SamplingParams(max_tokens=1, ignore_eos=True))
        _synchronise(llm)
        started = time.perf_counter()
        planned = llm.scheduler.next_batch()
        scheduled = time.perf_counter()
        if len(planned.requests) != batch:
            raise ValueError(
                f"{len(planned.requests)} of {batch} prompts enter at a time: max_batch_tokens is too small"
            )
        llm.runner.run(planned)
        ended = time.perf_counter()
        managed = _managed_prompt(llm, planned.requests)
        for request in planned.requests:
            llm.scheduler.finish(request, "cancelled")
        rows.append((ended - started, managed, scheduled - started))
    total, management, scheduling = (statistics.median(column) for column in zip(*rows[1:], strict=True))
    return StepTiming("prompt", batch, length, total, management, max(scheduling - management, 0.0), repeats)


def fast_forward(
    llm: LLM, lengths: Sequence[int], *, params: SamplingParams = _FOREVER, prompt: int | None = None
) -> list[Request]:
    """Running requests that have ``lengths`` tokens, as after their prompts, without computing anything.

    Tokens beyond ``prompt`` count as generated. Tiers are the replay's; without one all tokens are in the first.
    """
    cache, scheduler, made = llm.cache, llm.scheduler, []
    if scheduler.idle:
        cache.memory.pool.zero_()  # what requests before left would be read as the codes of other tiers
    for length in lengths:
        request = Request([1] * (length + 1), params, length if prompt is None else prompt, entered=length)
        request.slot = scheduler.take_slot()
        cache.admit([request.slot], [length])
        cache.memory.compact([request.slot], tier_counts(llm, length)[None], validate=False)
        scheduler.running.append(request)
        made.append(request)
    return made


def tier_counts(llm: LLM, length: int) -> torch.Tensor:
    """Tokens of a request in each tier, int32 [layers, kv_heads, tiers]."""
    cache = llm.cache
    counts = torch.zeros(cache.layers, cache.kv_heads, len(cache.layouts), dtype=torch.int32, device=llm.runner.device)
    if cache.replay is None:
        counts[..., 0] = length
    else:
        outside = max(length - cache.rule.window, 0)
        counts.copy_((cache.replay.shares * outside).to(torch.int32))
        counts[..., 0] += length - outside
    return counts


def _grow(requests: Sequence[Request]) -> None:
    for request in requests:
        request.tokens.append(1)


def _timed(llm: LLM, call: Callable[[], object], repeats: int) -> float:
    """Seconds of ``call``, by the device's own clock where there is one: launching a graph is the step's cost."""
    seconds = []
    for _ in range(repeats + 1):
        _synchronise(llm)
        if llm.runner.device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            _synchronise(llm)
            seconds.append(start.elapsed_time(end) / 1000)
        else:
            started = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def _managed_prompt(llm: LLM, requests: Sequence[Request]) -> float:
    """Seconds to admit and compact these prompts once more, in free slots of the same lengths."""
    cache = llm.cache
    slots, lengths = [own.slot for own in requests], [own.entered for own in requests]
    counts = cache.view.lengths[slots].contiguous()
    cache.release(slots)
    _synchronise(llm)
    started = time.perf_counter()
    cache.admit(slots, lengths)
    cache.memory.compact(slots, counts, validate=False)
    _synchronise(llm)
    return time.perf_counter() - started


def _synchronise(llm: LLM) -> None:
    if llm.runner.device.type == "cuda":
        torch.cuda.synchronize(llm.runner.device)
