"""Figures 14 to 17 of DiffKV as runs of the engine at a model's shape, DiffKV and FP16 in the same run."""

import gc
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from diffkv_repro.diffkv import CompressionPolicy
from diffkv_repro.engine.bench import Served, StepTiming, Throughput, generation_step, prompt_step, serve_poisson
from diffkv_repro.engine.bench import steady_state as measure_steady_state
from diffkv_repro.engine.cost import CacheTraffic
from diffkv_repro.engine.kv_cache import PER_QUERY_HEAD, Cache
from diffkv_repro.engine.llm import LLM
from diffkv_repro.engine.replay import TierReplay
from diffkv_repro.engine.weights import Weights
from diffkv_repro.models.shapes import ModelShape

POLICY = CompressionPolicy.released()
"""What DiffKV runs with here: K8V4 and K4V2, the released code's rules."""


@dataclass(frozen=True)
class Setup:
    """A model of random weights at ``shape`` on ``device``.

    ``shares`` are those of the tokens outside the window that DiffKV keeps in each tier (``source`` says where they
    come from), the same for every head unless a ``replay`` is given.
    """

    shape: ModelShape
    device: str
    shares: tuple[float, ...] = (0.3, 0.6)
    source: str = "given"
    replay: TierReplay | None = None
    seed: int = 0

    @property
    def dtype(self) -> torch.dtype:
        return torch.float16 if self.device.startswith("cuda") else torch.float32

    def weights(self, max_positions: int) -> Weights:
        """Random weights, on the device."""
        return Weights.random(
            self.shape, max_positions=max_positions, device=self.device, dtype=self.dtype, seed=self.seed
        )

    def engine(self, weights: Weights, cache: Cache, **options: Any) -> LLM:
        """An engine of these weights; a policy replays the tiers."""
        replay = None
        if isinstance(cache, CompressionPolicy):
            sizes = (self.shape.layers, weights.kv_heads, self.device)
            replay = self.replay.spread(*sizes) if self.replay else TierReplay.even(list(self.shares), *sizes)
        return LLM(weights, cache, replay=replay, **options)

    def traffic(self) -> CacheTraffic:
        """DiffKV's, for the cost model."""
        return CacheTraffic(POLICY.tiers, self.shares)


def breakdown(setup: Setup, batches: Sequence[int], length: int, *, repeats: int = 10) -> list[StepTiming]:
    """Figure 14: the parts of a prompt step and of a generation step with DiffKV, a row a phase and batch size."""
    longest = length + 8 * repeats + 64
    weights, rows = setup.weights(longest), []
    for batch in batches:
        llm = setup.engine(
            weights, POLICY, max_requests=batch, max_tokens=longest, max_batch_tokens=batch * length,
        )  # fmt: skip
        rows.append(prompt_step(llm, batch, length, repeats=max(2, repeats // 3)))
        rows.append(generation_step(llm, batch, length, repeats=repeats))
        del llm
        _collect()
    return rows


CACHES: Mapping[str, Cache] = {
    "FP16": "fp16", "FP16, read per query head": PER_QUERY_HEAD, "DiffKV": POLICY,
}  # fmt: skip
"""What Figure 15b compares: two baselines and DiffKV."""


def end_to_end(
    setup: Setup, sizes: Sequence[tuple[int, int]], *, caches: Mapping[str, Cache] = CACHES, repeats: int = 10
) -> Iterator[dict[str, Any]]:
    """Figure 15b: seconds of a generation step for each (batch, length) and cache."""
    longest = max(length for _, length in sizes) + 8 * repeats + 64
    weights = setup.weights(longest)
    for name, cache in caches.items():
        for batch, length in sizes:
            llm = setup.engine(weights, cache, max_requests=batch, max_tokens=length + 8 * repeats + 64)
            timing = generation_step(llm, batch, length, repeats=repeats)
            yield {"cache": name, "batch": batch, "length": length, "seconds": timing.total, "repeats": repeats}
            del llm
            _collect()


def throughput(
    setup: Setup, *, pool_bytes: int, prompt: int, generated: int, max_requests: int, steps: int = 200,
    limit: float = 60.0, caches: Sequence[str] = ("FP16", "DiffKV"),
) -> dict[str, Throughput]:  # fmt: skip
    """Figure 17: a steady state of each cache with a KV pool of ``pool_bytes``."""
    weights, found = setup.weights(prompt + generated), {}
    for name in caches:
        llm = setup.engine(
            weights, CACHES[name], max_requests=max_requests, max_tokens=prompt + generated, pool_bytes=pool_bytes
        )
        found[name] = measure_steady_state(llm, prompt=prompt, generated=generated, steps=steps, limit=limit)
        del llm
        _collect()
    return found


def arrivals(
    setup: Setup, rates: Sequence[float], *, pool_bytes: int, requests: int, lengths: Callable, max_tokens: int,
    max_requests: int, limit: float = 60.0, caches: Sequence[str] = ("FP16", "DiffKV"),
) -> dict[str, list[Served]]:  # fmt: skip
    """Figure 16: latency per token of each cache at each rate, until one rate could not be served in time."""
    weights, found = setup.weights(max_tokens), {}
    for name in caches:
        llm = setup.engine(
            weights, CACHES[name], max_requests=max_requests, max_tokens=max_tokens, pool_bytes=pool_bytes
        )
        generation_step(llm, 1, 64, repeats=1)  # compiles
        found[name] = []
        for rate in rates:
            served = serve_poisson(llm, rate=rate, requests=requests, lengths=lengths, limit=limit, seed=setup.seed)
            found[name].append(served)
            if served.answered < served.offered:
                break
        del llm
        _collect()
    return found


def uniform_lengths(prompt: tuple[int, int], generated: tuple[int, int]) -> Callable[[random.Random], tuple[int, int]]:
    """Prompt and answer lengths, each evenly from its least to its most."""
    return lambda draw: (draw.randint(*prompt), draw.randint(*generated))


def knee(served: Sequence[Served]) -> float:
    """The highest rate whose mean latency per token is at most twice that of the lowest, and where all are answered."""
    quickest = served[0].mean
    good = [own.rate for own in served if own.answered == own.offered and own.mean <= 2 * quickest]
    return max(good, default=0.0)


def _collect() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
