"""What a generation step costs by arithmetic: bytes over bandwidth, and what launching costs (Figures 14 to 17)."""

from collections.abc import Sequence
from dataclasses import dataclass

from diffkv_repro.core.precision import Precision
from diffkv_repro.models.shapes import ModelShape

_SCORE_BYTES = 8  # a float32 read and written


@dataclass(frozen=True)
class CacheTraffic:
    """Bytes that a step moves per token of the sequence and KV head: ``tiers`` and the share of the tokens in each.

    ``scores`` adds the read and the write of each kept token's score. ``readers`` is how often a page is read: once, or
    once for each query head of its KV head, as kernels without grouped queries do.
    """

    tiers: tuple[Precision, ...]
    shares: tuple[float, ...]
    scores: bool = True
    readers: int = 1

    def __post_init__(self) -> None:
        if len(self.tiers) != len(self.shares):
            raise ValueError(f"{len(self.tiers)} tiers and {len(self.shares)} shares")
        if min(self.shares) < 0 or sum(self.shares) > 1 + 1e-9:
            raise ValueError(f"shares are {self.shares}; they are not negative and add up to at most 1")
        if self.readers < 1:
            raise ValueError(f"readers is {self.readers}; a page is read at least once")

    @classmethod
    def fp16(cls, readers: int = 1) -> "CacheTraffic":
        """All tokens in 16 bits."""
        return cls((Precision.parse("FP16"),), (1.0,), scores=False, readers=readers)

    def token_bytes(self, head_dim: int) -> float:
        """Bytes per token and KV head."""
        codes = sum(
            share * (head_dim * (own.key_bits + own.value_bits) / 8 + own.metadata_bytes())
            for own, share in zip(self.tiers, self.shares, strict=True)
        )
        return self.readers * codes + (_SCORE_BYTES * sum(self.shares) if self.scores else 0.0)


@dataclass(frozen=True)
class Machine:
    """``bandwidth`` of reading memory in bytes/s, ``overhead`` in seconds a step beside reading weights and KV."""

    bandwidth: float
    overhead: float = 0.0

    def __post_init__(self) -> None:
        if self.bandwidth <= 0 or self.overhead < 0:
            raise ValueError(
                f"bandwidth is {self.bandwidth} and overhead {self.overhead}; one positive, one not negative"
            )


def weight_bytes(shape: ModelShape, bytes_per_weight: int = 2) -> int:
    """Bytes of weights that a step reads: all but the rows of the embedding that no token of the batch needs."""
    looked_up = 0 if shape.tied_embeddings else shape.vocab * shape.hidden
    return (shape.parameters - looked_up) * bytes_per_weight


def step_bytes(shape: ModelShape, traffic: CacheTraffic, lengths: Sequence[int], *, workers: int = 1) -> float:
    """Bytes that one worker reads in a generation step of requests of these lengths."""
    kv = shape.layers * shape.kv_heads * traffic.token_bytes(shape.head_dim) * sum(lengths)
    return (weight_bytes(shape) + kv) / workers


def step_seconds(
    shape: ModelShape, traffic: CacheTraffic, lengths: Sequence[int], machine: Machine, *, workers: int = 1
) -> float:
    """Seconds of that step, each byte read once and nothing else in the way."""
    return step_bytes(shape, traffic, lengths, workers=workers) / machine.bandwidth + machine.overhead


def end_to_end_speedup(shape: ModelShape, traffic: CacheTraffic, batch: int, length: int, *, readers: int = 1) -> float:
    """How much faster a step can be than FP16's by bytes alone (Figure 15b); ``readers`` of the baseline's pages."""
    lengths = [length] * batch
    return step_bytes(shape, CacheTraffic.fp16(readers), lengths) / step_bytes(shape, traffic, lengths)


def requests_in(pool_bytes: float, shape: ModelShape, token_bytes: float, length: int) -> float:
    """How many requests of ``length`` tokens fit into a pool, ``token_bytes`` stored per token and KV head."""
    return pool_bytes / (shape.layers * shape.kv_heads * token_bytes * length)
