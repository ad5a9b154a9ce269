"""A generation step measured on several workers, each with its share of heads (DiffKV Figure 7)."""

from collections.abc import Sequence
from typing import Any

import torch

from diffkv_repro.engine.kv_cache import Cache
from diffkv_repro.engine.launch import spread
from diffkv_repro.engine.llm import LLM
from diffkv_repro.engine.measure.steps import generation_step
from diffkv_repro.engine.replay import TierReplay
from diffkv_repro.engine.shards import Shards
from diffkv_repro.engine.weights import Weights
from diffkv_repro.models.shapes import ModelShape


def step_sharded(
    shape: ModelShape, cache: Cache, *, workers: int, batch: int, length: int, repeats: int = 10,
    replay: Sequence[float] | None = None, device: str | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """What each worker measures of a generation step (see :func:`generation_step`) with random weights at ``shape``,
    ``batch`` requests of ``length`` tokens; a policy keeps the shares ``replay`` of the tokens."""
    return spread(_timed, workers, device, shape, cache, batch, length, repeats, replay)


def _timed(
    shards: Shards, device: str, shape: ModelShape, cache: Cache, batch: int, length: int, repeats: int,
    replay: Sequence[float] | None,
) -> dict[str, Any]:  # fmt: skip
    most = length + 2 * repeats + 8
    dtype = torch.float16 if device.startswith("cuda") else torch.float32
    weights = Weights.random(shape, max_positions=most, device=device, dtype=dtype, shards=shards)
    tiers = None if replay is None else TierReplay.even(list(replay), shape.layers, weights.kv_heads, device)
    llm = LLM(weights, cache, max_requests=batch, max_tokens=most, replay=tiers)
    return generation_step(llm, batch, length, repeats=repeats).as_dict() | {"rank": shards.rank}
