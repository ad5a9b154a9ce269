"""What is asked of the engine, and what it answers."""

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

FinishReason = Literal["stop", "length", "cancelled"]
_numbers = itertools.count()


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    ``temperature`` 0 is greedy; otherwise tokens are drawn by ``seed`` and position, so that the same request gives the
    same answer whatever it is batched with. ``stop`` are strings at which the text ends, themselves left out.
    ``ignore_eos`` goes on to ``max_tokens``, as the papers' throughput runs do.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("max_tokens", "seed"):
            if isinstance(getattr(self, name), bool) or not isinstance(getattr(self, name), int):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be a whole number")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; it must be 0 (greedy) or above")
        if any(not text for text in self.stop):
            raise ValueError("a stop string is empty")


@dataclass
class Request:
    """One prompt on its way. ``tokens`` are the prompt's and those generated; ``slot`` its row of the page tables.

    A request that had to give up its pages starts again with all its tokens as its prompt (``prompt_tokens`` stays).
    """

    tokens: list[int]
    params: SamplingParams
    prompt_tokens: int
    arrival: float = 0.0  # by the engine's clock
    number: int = field(default_factory=lambda: next(_numbers))
    slot: int | None = None
    entered: int = 0  # tokens that were its prompt when its pages were filled
    preemptions: int = 0
    token_times: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None

    @property
    def generated(self) -> list[int]:
        """Tokens that the model has added."""
        return self.tokens[self.prompt_tokens :]

    @property
    def is_full(self) -> bool:
        """Whether no more tokens were asked for."""
        return len(self.tokens) - self.prompt_tokens >= self.params.max_tokens

    @property
    def cached(self) -> int:
        """Tokens whose keys and values were computed: all but the newest."""
        return len(self.tokens) - 1


_Item = TypeVar("_Item")


class Part(Sequence[_Item]):
    """What a list that only ever grows holds now from its item ``first`` on, without a copy."""

    def __init__(self, items: list[_Item], first: int = 0) -> None:
        self._items, self._first, self._length = items, first, len(items) - first

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index):
        if isinstance(index, slice):
            return tuple(self._items[self._first + place] for place in range(*index.indices(self._length)))
        return self._items[self._first + range(self._length)[index]]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(other) == len(self) and all(map(operator.eq, self, other))

    __hash__ = None

    def __repr__(self) -> str:
        return repr(self[:])


@dataclass(frozen=True)
class RequestOutput:
    """A finished or growing answer: ``text`` (empty without a tokenizer) and ``tokens`` so far."""

    number: int
    text: str
    tokens: Sequence[int]
    prompt_tokens: int
    finish_reason: FinishReason | None
    preemptions: int
    arrival: float
    token_times: Sequence[float]

    @classmethod
    def of(cls, request: Request) -> "RequestOutput":
        return cls(
            request.number, request.text, Part(request.tokens, request.prompt_tokens), request.prompt_tokens,
            request.finish_reason, request.preemptions, request.arrival, Part(request.token_times),
        )  # fmt: skip

    @property
    def latency_per_token(self) -> float:
        """Seconds from arrival to the last token, over the tokens generated (the usual normalised latency); infinite
        without any token."""
        if not self.tokens:
            return float("inf")
        return (self.token_times[-1] - self.arrival) / len(self.tokens)
