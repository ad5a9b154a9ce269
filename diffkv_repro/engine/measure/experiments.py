"""Figures 14 to 17 of DiffKV as runs of the engine at a model's shape, DiffKV and FP16 in the same run."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from diffkv_repro.diffkv import CompressionPolicy
from diffkv_repro.engine.kv_cache import PER_QUERY_HEAD, Cache
from diffkv_repro.engine.llm import LLM
from diffkv_repro.engine.measure.cost import CacheTraffic
from diffkv_repro.engine.measure.load import Served, Throughput, serve_poisson, steady_state
from diffkv_repro.engine.measure.steps import StepTiming, generation_step, prompt_step
from diffkv_repro.engine.measure.virtual import StepCosts, virtual_time
from diffkv_repro.engine.replay import TierReplay
from diffkv_repro.engine.weights import Weights
from diffkv_repro.models.shapes import ModelShape

POLICY = CompressionPolicy.released()
"""What DiffKV runs with here: K8V4 and K4V2, the released code's rules."""


@dataclass(frozen=True)
class Setup:
    """A model of random weights at ``shape`` on ``device``.

    ``tiers`` says how many tokens outside the window DiffKV keeps in each tier: shares that are the same for every
    head, or a replay of a real model's, which is spread over the heads of ``shape``. ``source`` and ``shares`` follow
    from it. ValueError for shares that cannot be.
    """

    shape: ModelShape
    device: str
    tiers: tuple[float, ...] | TierReplay = (0.3, 0.6)
    seed: int = 0

    def __post_init__(self) -> None:
        count = self.replay(self.shape.kv_heads, "cpu").shares.shape[-1]
        if count != len(POLICY.tiers):
            raise ValueError(f"{count} shares a head; the engine measures {len(POLICY.tiers)} tiers")

    @property
    def dtype(self) -> torch.dtype:
        return torch.float16 if self.device.startswith("cuda") else torch.float32

    @property
    def source(self) -> str:
        """Where the shares come from, in a line."""
        return self.tiers.source if isinstance(self.tiers, TierReplay) else f"given: {_in_words(self.tiers)}"

    @property
    def shares(self) -> tuple[float, ...]:
        """Of the tokens outside the window in each tier, the mean over the heads of ``shape``."""
        if not isinstance(self.tiers, TierReplay):
            return tuple(self.tiers)
        spread = self.replay(self.shape.kv_heads, "cpu").shares
        return tuple(spread.double().mean(dim=(0, 1)).tolist())

    def replay(self, kv_heads: int, device: torch.device | str) -> TierReplay:
        """What an engine with ``kv_heads`` heads a layer replays."""
        sizes = (self.shape.layers, kv_heads, device)
        if isinstance(self.tiers, TierReplay):
            return self.tiers.spread(*sizes)
        return TierReplay.even(list(self.tiers), *sizes)

    def weights(self, max_positions: int) -> Weights:
        """Random weights, on the device."""
        return Weights.random(
            self.shape, max_positions=max_positions, device=self.device, dtype=self.dtype, seed=self.seed
        )

    def engine(self, weights: Weights, cache: Cache, **options: Any) -> LLM:
        """An engine of these weights; a policy replays the tiers."""
        replay = self.replay(weights.kv_heads, self.device) if isinstance(cache, CompressionPolicy) else None
        return LLM(weights, cache, replay=replay, **options)

    def traffic(self) -> CacheTraffic:
        """DiffKV's, for the cost model: of a mean head, which moves as many bytes as the heads do on average."""
        return CacheTraffic(POLICY.tiers, self.shares)


def _in_words(shares: Sequence[float]) -> str:
    return f"{', '.join(f'{share:g}' for share in shares)} for every head"


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


_GRID = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # of batch sizes at which steps are timed
_NOTHING: Mapping[str, TierReplay] = MappingProxyType({})
_SATURATED = 4  # times the latency of the lowest rate: higher rates only wait longer


@dataclass(frozen=True)
class SteadyState:
    """Throughput of a cache in a pool, the costs of the steps that it is made of, and bytes: on the device at the most
    (``peak_bytes``), of them by account (``accounted_bytes``: weights, pool and tables). ``source`` says where the
    shares of the tiers come from; empty without tiers."""

    found: Throughput
    costs: StepCosts
    peak_bytes: int
    accounted_bytes: int
    source: str = ""

    @property
    def peak_over_accounted(self) -> float:
        """0 on a CPU, whose memory nobody counts."""
        return self.peak_bytes / self.accounted_bytes

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def throughput(
    setup: Setup, *, pool_bytes: int, prompt: int, generated: int, max_requests: int, lifetimes: float = 0.5,
    caches: Sequence[str] = ("FP16", "DiffKV"), replays: Mapping[str, TierReplay] = _NOTHING,
) -> dict[str, SteadyState]:  # fmt: skip
    """Figure 17: a steady state of each cache with a KV pool of ``pool_bytes``, in virtual time.

    It lasts ``lifetimes`` of a request, after half as long a warm-up; then as many requests enter as leave. ``replays``
    are further arms by their names: DiffKV with the tiers of each, on the same weights.
    """
    arms = {name: (CACHES[name], setup) for name in caches}
    if taken := sorted(set(arms) & set(replays)):
        raise ValueError(f"replays are called {', '.join(taken)}, as caches are")
    arms |= {name: (POLICY, replace(setup, tiers=own)) for name, own in replays.items()}
    weights, found = setup.weights(prompt + generated), {}
    steps = max(int(lifetimes * generated), 4)
    for name, (cache, own) in arms.items():
        _reset_peak(setup.device)
        llm = own.engine(
            weights, cache, max_requests=max_requests, max_tokens=prompt + generated, pool_bytes=pool_bytes
        )
        costs = _costs(llm, max_requests)
        peak, accounted = _peak(setup.device), weights.nbytes + llm.cache.memory.allocated_bytes
        with virtual_time(llm, costs):
            state = steady_state(
                llm, prompt=prompt, generated=generated, steps=steps, warm_up=steps // 2, limit=float("inf")
            )
        found[name] = SteadyState(state, costs, peak, accounted, own.source if cache is POLICY else "")
        del llm
        _collect()  # graphs and pool of this arm are gone before the peak of the next one begins
    return found


@dataclass(frozen=True)
class Arrivals:
    """Latencies of a cache at each rate in virtual time, until it saturates; and the mean latency of a few requests in
    virtual over that in real time."""

    served: list[Served]
    virtual_over_real: float


def arrivals(
    setup: Setup, rates: Sequence[float], *, pool_bytes: int, requests: int, lengths: Callable, max_tokens: int,
    max_requests: int, check: tuple[float, int, Callable], limit: float = 3600.0,
    caches: Sequence[str] = ("FP16", "DiffKV"),
) -> dict[str, Arrivals]:  # fmt: skip
    """Figure 16: latency per token of each cache at each rate, in virtual time.

    ``check`` is a rate, a number of requests and their lengths: they are also served in real time.
    """
    weights, found = setup.weights(max_tokens), {}
    for name in caches:
        llm = setup.engine(
            weights, CACHES[name], max_requests=max_requests, max_tokens=max_tokens, pool_bytes=pool_bytes
        )
        costs = _costs(llm, max_requests)
        rate, few, short = check
        asked = {"rate": rate, "requests": few, "lengths": short, "limit": limit, "seed": setup.seed}
        serve_poisson(llm, **asked)  # compiles, captures
        real = serve_poisson(llm, **asked)
        rows: list[Served] = []
        with virtual_time(llm, costs):
            imagined = serve_poisson(llm, **asked)
            for rate in rates:
                rows.append(
                    serve_poisson(llm, rate=rate, requests=requests, lengths=lengths, limit=limit, seed=setup.seed)
                )
                if rows[-1].answered < rows[-1].offered or rows[-1].mean > _SATURATED * rows[0].mean:
                    break
        found[name] = Arrivals(rows, imagined.mean / real.mean)
        del llm
        _collect()
    return found


def _costs(llm: LLM, max_requests: int) -> StepCosts:
    batches = [size for size in _GRID if size < max_requests]
    return StepCosts.measure(llm, [*batches, max_requests])


def _reset_peak(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: str) -> int:
    return torch.cuda.max_memory_allocated(device) if device.startswith("cuda") else 0


def _collect() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
