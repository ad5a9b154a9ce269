"""Measure the engine: a step and its parts, throughput in a steady state, latency under Poisson arrivals.

Runs at a paper's shape fast-forward to where requests have their lengths: pages are allocated as after a real prompt,
their codes stay zero, which costs the same to read.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from diffkv_repro.engine.llm import LLM
from diffkv_repro.engine.request import Request, SamplingParams
from diffkv_repro.engine.scheduler import Batch

_FOREVER = SamplingParams(max_tokens=1 << 30, ignore_eos=True)


@dataclass(frozen=True)
class StepTiming:
    """Seconds of a step (medians of ``repeats``) at one batch and length, and of its parts.

    ``total`` is a whole step of the engine by the clock of the host; ``management`` pages and decisions alone,
    ``scheduling`` what the host does before and after; the model's execution is the rest.
    """

    phase: str
    batch: int
    length: int
    total: float
    management: float
    scheduling: float
    repeats: int

    @property
    def execution(self) -> float:
        """Seconds of the model, its attention included."""
        return max(self.total - self.management - self.scheduling, 0.0)

    def shares(self) -> dict[str, float]:
        """Percent of the step: management, execution, scheduling."""
        parts = {"management": self.management, "execution": self.execution, "scheduling": self.scheduling}
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
        management = _management(llm, requests, repeats)
        return StepTiming(
            "generation", batch, length, statistics.median(totals), management, statistics.median(scheduling), repeats
        )
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
            llm.cancel(*[own.number for own in (*llm.scheduler.waiting, *llm.scheduler.running)])
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


@dataclass(frozen=True)
class Throughput:
    """A steady state: ``tokens`` generated in ``seconds``, with ``mean_batch`` requests running, ``preemptions``."""

    tokens: int
    seconds: float
    mean_batch: float
    steps: int
    preemptions: int
    peak_bytes: int

    @property
    def per_second(self) -> float:
        return self.tokens / self.seconds

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def steady_state(
    llm: LLM, *, prompt: int, generated: int, steps: int = 200, limit: float = 120.0, seed: int = 0
) -> Throughput:
    """Throughput with more requests waiting than fit, each of ``prompt`` tokens and ``generated`` forced ones.

    It begins where a long run would be: as many requests as find pages, at random points of their answers. Then
    ``steps`` steps, or as many as ``limit`` seconds allow, are timed after a warm-up of a tenth.
    """
    if llm.runner.device.type == "cuda":  # else the peak would be that of whatever ran before
        torch.cuda.reset_peak_memory_stats(llm.runner.device)
    draw = random.Random(seed)
    params = SamplingParams(max_tokens=generated, ignore_eos=True)
    lengths: list[int] = []
    while len(lengths) < llm.runner.max_requests:
        length = prompt + draw.randrange(generated)
        if not llm.cache.can_admit(length, len(lengths)):
            break
        lengths += [length]
        fast_forward(llm, [length], params=params, prompt=prompt)
    if not lengths:
        raise ValueError(f"the pool holds no request of {prompt} to {prompt + generated} tokens")

    tokens, batches, spent, before = 0, [], 0.0, 0
    for index in range(steps + steps // 10):
        while len(llm.scheduler.waiting) < 4:
            llm.add([1] * prompt, params)
        if index == steps // 10:
            before = llm.scheduler.preemptions
        started = time.perf_counter()
        outputs = llm.step()
        if index >= steps // 10:
            spent += time.perf_counter() - started
            tokens += len(outputs)
            batches.append(len(llm.scheduler.running))
        if spent > limit:
            break
    llm.cancel(*[own.number for own in (*llm.scheduler.waiting, *llm.scheduler.running)])
    preemptions = llm.scheduler.preemptions - before
    return Throughput(tokens, spent, statistics.mean(batches), len(batches), preemptions, _peak(llm))


@dataclass(frozen=True)
class Served:
    """Requests under Poisson arrivals at ``rate`` a second: seconds from arrival to the last token, over the tokens
    generated, of each; and whether all were answered before the time was up."""

    rate: float
    per_token: tuple[float, ...]
    answered: int
    offered: int
    seconds: float
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def mean(self) -> float:
        """Mean latency per token, seconds."""
        return statistics.fmean(self.per_token) if self.per_token else float("inf")

    def tail(self, share: float = 0.95) -> float:
        """Latency per token that this share of the requests does not exceed."""
        ranked = sorted(self.per_token)
        return ranked[max(math.ceil(share * len(ranked)) - 1, 0)] if ranked else float("inf")


def serve_poisson(
    llm: LLM, *, rate: float, requests: int, lengths: Callable[[random.Random], tuple[int, int]], limit: float = 120.0,
    seed: int = 0,
) -> Served:  # fmt: skip
    """Offer ``requests`` with exponential gaps of mean 1 / ``rate`` and answer them; ``lengths`` draws (prompt tokens,
    forced tokens). Stops after ``limit`` seconds; who is not answered by then counts in ``offered`` only."""
    if rate <= 0 or requests < 1:
        raise ValueError(f"rate is {rate} and requests {requests}; both must be positive")
    draw = random.Random(seed)
    arrivals, at = [], 0.0
    for _ in range(requests):
        at += draw.expovariate(rate)
        arrivals.append((at, *lengths(draw)))
    per_token: list[float] = []
    started, due = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - started) < limit:
        while due < requests and arrivals[due][0] <= elapsed:
            at, prompt, generated = arrivals[due]
            params = SamplingParams(max_tokens=generated, ignore_eos=True)
            # Who comes while a step runs waits for its end, and that counts.
            llm.add([1 + due % 7] * prompt, params, arrival=started + at)
            due += 1
        if llm.scheduler.idle:
            if due == requests:
                break
            time.sleep(max(arrivals[due][0] - elapsed, 0.0))
            continue
        per_token += [output.latency_per_token for output in llm.step() if output.finish_reason]
    llm.cancel(*[own.number for own in (*llm.scheduler.waiting, *llm.scheduler.running)])
    return Served(rate, tuple(per_token), len(per_token), requests, time.perf_counter() - started)


def fast_forward(
    llm: LLM, lengths: Sequence[int], *, params: SamplingParams = _FOREVER, prompt: int | None = None
) -> list[Request]:
    """Running requests that have ``lengths`` tokens, as after their prompts, without computing anything.

    Tokens beyond ``prompt`` count as generated. Tiers are the replay's; without one all tokens are in the first.
    """
    cache, scheduler, made = llm.cache, llm.scheduler, []
    try:
        for length in lengths:
            request = Request([1] * (length + 1), params, length if prompt is None else prompt, entered=length)
            slot = scheduler.take_slot()
            try:
                cache.admit([slot], [length])
            except Exception:
                scheduler.give_slot(slot)
                raise
            request.slot = slot
            scheduler.running.append(request)
            made.append(request)
            cache.memory.compact([slot], _counts(llm, length)[None], validate=False)
    except Exception:
        llm.cancel(*[own.number for own in made])
        raise
    return made


def _counts(llm: LLM, length: int) -> torch.Tensor:
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


def _management(llm: LLM, requests: Sequence[Request], repeats: int) -> float:
    """Seconds of pages and decisions alone, in the form in which a step has them: captured, where steps are."""
    call = llm.runner.management(requests)
    seconds = []
    for _ in range(repeats + 1):
        _synchronise(llm)
        started = time.perf_counter()
        call()
        _synchronise(llm)
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


def _peak(llm: LLM) -> int:
    return torch.cuda.max_memory_allocated(llm.runner.device) if llm.runner.device.type == "cuda" else 0
