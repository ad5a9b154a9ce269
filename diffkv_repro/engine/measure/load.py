"""The engine under load: throughput in a steady state, latency under Poisson arrivals, by the engine's own clock.

With an engine in virtual time (see ``virtual``) the same functions cover hours in seconds.
"""

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from diffkv_repro.engine.llm import LLM
from diffkv_repro.engine.measure.steps import fast_forward, most_pages_after
from diffkv_repro.engine.request import SamplingParams

_SAMPLED = 16  # steps between two looks at the pages in use, each of which waits for the device
_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class Throughput:
    """A steady state: ``tokens`` generated in ``seconds``, with ``mean_batch`` requests running, ``preemptions``.

    ``bytes_per_token``: pages in use over tokens under way, of all layers and heads; window and unfilled pages count.
    """

    tokens: int
    seconds: float
    mean_batch: float
    steps: int
    preemptions: int
    bytes_per_token: float

    @property
    def per_second(self) -> float:
        return self.tokens / self.seconds

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def steady_state(
    llm: LLM, *, prompt: int, generated: int, steps: int = 200, warm_up: int | None = None, limit: float = 120.0,
) -> Throughput:  # fmt: skip
    """Throughput with more requests waiting than fit, each of ``prompt`` tokens and ``generated`` forced ones.

    It begins where a long run would be: as many requests as find pages, spread evenly over their answers. Then
    ``steps`` steps, or as many as ``limit`` seconds of the engine's clock allow, are timed after ``warm_up`` others
    (default: a tenth).
    """
    params = SamplingParams(max_tokens=generated, ignore_eos=True)
    memory, lengths = llm.cache.memory, []
    free = len(memory.free) - memory.watermark
    while len(lengths) < llm.runner.max_requests:
        # Multiples of the golden ratio spread evenly however many there are: ten random draws may all be short.
        length = prompt + int((len(lengths) + 0.5) * _GOLDEN % 1 * generated)
        free -= most_pages_after(llm, length)
        if free < 0:
            break
        lengths.append(length)
    # The longest first: a prompt enters with more pages than it keeps, which the last ones would not find.
    for entered, length in enumerate(sorted(lengths, reverse=True)):
        if llm.cache.can_admit(length, entered):
            fast_forward(llm, [length], params=params, prompt=prompt)
    if not llm.scheduler.running:
        raise ValueError(f"the pool holds no request of {prompt} to {prompt + generated} tokens")

    tokens, batches, sizes, spent, before = 0, [], [], 0.0, 0
    warm_up = steps // 10 if warm_up is None else warm_up
    for index in range(warm_up + steps):
        while len(llm.scheduler.waiting) < 4:
            llm.add([1] * prompt, params)
        if index == warm_up:
            before = llm.scheduler.preemptions
        started = llm.clock.now()
        outputs = llm.step()
        if index >= warm_up:
            spent += llm.clock.now() - started
            tokens += len(outputs)
            batches.append(len(llm.scheduler.running))
            if (index - warm_up) % _SAMPLED == 0:
                sizes.append(_bytes_per_token(llm))
        if spent > limit:
            break
    llm.cancel(*[own.number for own in (*llm.scheduler.waiting, *llm.scheduler.running)])
    preemptions = llm.scheduler.preemptions - before
    return Throughput(tokens, spent, statistics.mean(batches), len(batches), preemptions, statistics.mean(sizes))


def _bytes_per_token(llm: LLM) -> float:
    memory, running = llm.cache.memory, llm.scheduler.running
    return memory.pages_in_use() * memory.layouts[0].page_bytes / max(sum(len(own.tokens) for own in running), 1)


@dataclass(frozen=True)
class Served:
    """Requests under Poisson arrivals at ``rate`` a second: seconds from arrival to the last token, over the tokens
    generated, of each; and whether all were answered before the time was up."""

    rate: float
    per_token: tuple[float, ...]
    answered: int
    offered: int
    seconds: float

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
    forced tokens). Stops after ``limit`` seconds of the engine's clock; who is not answered by then counts in
    ``offered`` only."""
    if rate <= 0 or requests < 1:
        raise ValueError(f"rate is {rate} and requests {requests}; both must be positive")
    draw = random.Random(seed)
    arrivals, at = [], 0.0
    for _ in range(requests):
        at += draw.expovariate(rate)
        arrivals.append((at, *lengths(draw)))
    per_token: list[float] = []
    started, due = llm.clock.now(), 0
    while (elapsed := llm.clock.now() - started) < limit:
        while due < requests and arrivals[due][0] <= elapsed:
            at, prompt, generated = arrivals[due]
            params = SamplingParams(max_tokens=generated, ignore_eos=True)
            # It came while a step ran: its wait counts from then.
            llm.add([1 + due % 7] * prompt, params, arrival=started + at)
            due += 1
        if llm.scheduler.idle:
            if due == requests:
                break
            # A little more, lest rounding leave it just short of the arrival for ever.
            llm.clock.sleep(arrivals[due][0] - elapsed + 1e-6)
            continue
        per_token += [output.latency_per_token for output in llm.step() if output.finish_reason]
    llm.cancel(*[own.number for own in (*llm.scheduler.waiting, *llm.scheduler.running)])
    return Served(rate, tuple(per_token), len(per_token), requests, llm.clock.now() - started)


def uniform_lengths(prompt: tuple[int, int], generated: tuple[int, int]) -> Callable[[random.Random], tuple[int, int]]:
    """Prompt and answer lengths, each evenly from its least to its most."""
    return lambda draw: (draw.randint(*prompt), draw.randint(*generated))


def knee(served: Sequence[Served]) -> float:
    """The highest rate whose mean latency per token is at most twice that of the lowest, and where all are answered."""
    quickest = served[0].mean
    good = [own.rate for own in served if own.answered == own.offered and own.mean <= 2 * quickest]
    return max(good, default=0.0)
