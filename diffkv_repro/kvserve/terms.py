"""What is asked for, offered and reported between the two sides of a transfer."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from diffkv_repro.kvserve.layout import KV
from diffkv_repro.kvserve.messages import MOST_TOKENS


@dataclass(frozen=True)
class Ask:
    """A request: the cache of ``ids``, on what terms; see ``ServiceContext``.

    ``recompute``: seconds that computing it here would take, which a store has to beat. ``options``: for experiments.
    """

    ids: tuple[int, ...]
    workload: str = "*"
    slo: float = float("inf")
    min_quality: float = 0.0
    recompute: float = float("inf")
    overlap: bool = True
    options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", tuple(map(int, self.ids)))
        if not 1 <= len(self.ids) <= MOST_TOKENS:
            raise ValueError(f"ids are {len(self.ids)} tokens; 1 to {MOST_TOKENS} are allowed")
        if not self.slo > 0:
            raise ValueError(f"slo is {self.slo} s; it must be above 0")


@dataclass(frozen=True)
class Stages:
    """Seconds of each stage: ``total`` from asking to the last layer decoded, which with overlap is less than the sum.

    ``send`` is the time during which the link had something to carry.
    """

    prefill: float = 0.0
    encode: float = 0.0
    queue: float = 0.0
    send: float = 0.0
    decode: float = 0.0
    total: float = 0.0


@dataclass(frozen=True)
class Fetched:
    """A cache that came, of the first ``kv.tokens`` of the prompt, by ``profile``, and what the server said of it."""

    kv: KV
    profile: str
    why: str
    predicted: float
    stages: Stages
    sent_bytes: int
    raw_bytes: int

    @property
    def ratio(self) -> float:
        """Raw bytes over bytes sent."""
        return self.raw_bytes / self.sent_bytes

    @property
    def goodput(self) -> float | None:
        """Bytes a second that the link gave, None where no receipt came."""
        return self.sent_bytes / self.stages.send if self.stages.send > 0 else None


def prompt_of(ids: Sequence[int]) -> tuple[int, ...]:
    """What is prefilled of a prompt: all but its last token, which the decode side asks first."""
    if len(ids) < 2:
        raise ValueError(f"a prompt of {len(ids)} tokens; at least 2 are needed, the last of which starts decoding")
    return tuple(int(one) for one in ids[:-1])


class Refusal(Exception):
    """A provider's no, with the reason that the client is told."""


@dataclass(frozen=True)
class Request:
    """What a client asks for: the KV cache of ``ids``, with what the controller has to know."""

    ids: tuple[int, ...]
    model: str
    workload: str
    slo: float
    min_quality: float
    recompute: float
    overlap: bool
    options: Mapping[str, Any]
    waited: float = 0.0


@dataclass
class Offer:
    """A provider's answer: ``pieces`` of a frame, made as they are asked for, whose first ``tokens`` are the prompt's.

    ``whole`` counts all of the frame's tokens; ``subject`` is the provider's own, for when it was served.
    """

    pieces: Iterable[bytes]
    tokens: int
    profile: str
    why: str = ""
    predicted: float = 0.0
    prefill: float = 0.0
    prompt: str = ""
    subject: Any = None
    whole: int = 0

    def __post_init__(self) -> None:
        self.whole = self.whole or self.tokens


@dataclass(frozen=True)
class Served:
    """What a transfer took, in seconds, once the far side has acknowledged: ``observed`` is all of it but waiting for
    a turn, decoding at the far side included."""

    offer: Offer
    prefill: float
    encode: float
    queue: float
    send: float
    decode: float
    observed: float
    sent_bytes: int

    @property
    def goodput(self) -> float | None:
        """Acknowledged bytes a second while the link had something to carry."""
        return self.sent_bytes / self.send if self.send > 0 and self.sent_bytes else None


class Provider(Protocol):
    """Decides what a request gets. ``offer`` raises Refusal; ``served`` learns from what a transfer took."""

    def offer(self, request: Request, bandwidth: float | None) -> Offer: ...

    def served(self, report: Served) -> None: ...
