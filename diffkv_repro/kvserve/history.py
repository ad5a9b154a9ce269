"""What a search has tried: the ask-tell loop over a finite pool that every search arm shares."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np

from diffkv_repro.kvserve.encoding import Pool


@dataclass(frozen=True)
class Evaluation:
    """``quality`` of a profile relative to the uncompressed cache, with its 95 % interval, on ``documents``."""

    quality: float
    low: float = math.nan
    high: float = math.nan
    documents: int = 1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.quality) and self.quality >= 0):
            raise ValueError(f"quality is {self.quality}; it must be finite and at least 0")

    def as_dict(self) -> dict[str, Any]:
        """Plain data without NaN."""
        return {name: value for name, value in asdict(self).items() if value == value}


@dataclass(frozen=True)
class Failure:
    """An evaluation that gave no quality, and why."""

    reason: str


Outcome = Evaluation | Failure


def outcome_from(data: Mapping[str, Any]) -> Outcome:
    """What :func:`outcome_data` wrote. Raises ValueError or TypeError for something else."""
    return Failure(str(data["failure"])) if "failure" in data else Evaluation(**data)


def outcome_data(outcome: Outcome) -> dict[str, Any]:
    """An outcome as plain data for JSON."""
    return {"failure": outcome.reason} if isinstance(outcome, Failure) else outcome.as_dict()


@dataclass(frozen=True)
class Step:
    """One evaluation in the order in which it was told: after it, ``best`` ratio (0 for none) and candidates left."""

    iteration: int
    index: int
    ratio: float
    quality: float | None
    feasible: bool
    best: float
    remaining: int
    phase: str


class AskTell(ABC):
    """A search for the highest ratio of at least ``least`` quality, ``budget`` evaluations long at most.

    The same answers to the same questions give the same questions again: a search that was killed is resumed by
    telling a new one what had been measured. An answer may be told again, as when a noisy evaluation is repeated: the
    mean counts.
    """

    def __init__(self, pool: Pool, least: float, budget: int) -> None:
        if not (math.isfinite(least) and least >= 0):
            raise ValueError(f"min_quality is {least}; it must be finite and at least 0")
        if not isinstance(budget, int) or budget < 1:
            raise ValueError(f"budget is {budget} evaluations; at least 1 is needed")
        self.pool, self.least, self.budget = pool, least, min(budget, len(pool))
        self.steps: list[Step] = []
        self.ended = ""
        self.pending: list[int] = []
        self._told: dict[int, list[Evaluation]] = {}
        self.failed: dict[int, str] = {}

    @abstractmethod
    def _propose(self, count: int) -> list[int]:
        """Up to ``count`` candidates that are open; none to end, with ``ended`` set."""

    def _learn(self, index: int, outcome: Outcome, new: bool) -> None:  # noqa: B027 (random search learns nothing)
        """Called after an answer was taken up."""

    def _phase(self) -> str:
        return "search"

    @property
    def iterations(self) -> int:
        """Candidates evaluated so far, failed ones included."""
        return len(self.steps)

    @property
    def open(self) -> np.ndarray:
        """Candidates that may still be proposed [n]."""
        mask = np.ones(len(self.pool), dtype=bool)
        mask[[*self._told, *self.failed, *self.pending]] = False
        return mask

    def quality(self, index: int) -> float:
        """Mean of what was told. Raises KeyError for a candidate without a quality."""
        return float(np.mean([told.quality for told in self._told[index]]))

    def interval(self, index: int) -> tuple[float | None, float | None]:
        """The 95 % interval that the evaluator gave last, None for what it did not."""
        told = self._told[index][-1]
        return tuple(None if math.isnan(end) else end for end in (told.low, told.high))

    def documents(self, index: int) -> int:
        """On how many documents it was evaluated last."""
        return self._told[index][-1].documents

    @property
    def feasible(self) -> list[int]:
        """Those that keep the quality, the highest ratio first."""
        kept = [index for index in self._told if self.quality(index) >= self.least]
        return sorted(kept, key=lambda index: (-self.pool.ratios[index], index))

    @property
    def best(self) -> int | None:
        """The feasible candidate of the highest ratio."""
        return next(iter(self.feasible), None)

    def ask(self, count: int = 1) -> list[int]:
        """Up to ``count`` candidates to evaluate next; none when the search has ended (``ended`` says why)."""
        if count < 1:
            raise ValueError(f"count is {count}; at least one candidate can be asked for")
        left = self.budget - self.iterations - len(self.pending)
        if not self.ended and left <= 0 and not self.pending:
            self.ended = "the budget is spent"
        if not self.ended and not self.pending and not self.open.any():
            self.ended = "no candidate is left"  # all tried or pruned
        if self.ended or left <= 0 or not self.open.any():
            return []
        chosen = self._propose(min(count, left))
        self.pending += chosen
        return chosen

    def tell(self, index: int, outcome: Outcome) -> Self:
        """What evaluating candidate ``index`` gave. Raises ValueError for one that is not in the pool."""
        if not 0 <= index < len(self.pool):
            raise ValueError(f"candidate {index} is not in the pool; allowed are 0 to {len(self.pool) - 1}")
        new = index not in self._told and index not in self.failed
        if index in self.pending:
            self.pending.remove(index)
        if isinstance(outcome, Failure):
            if index not in self._told:
                self.failed[index] = outcome.reason
        else:
            self.failed.pop(index, None)
            self._told.setdefault(index, []).append(outcome)
        self._learn(index, outcome, new)
        if new:
            self.steps.append(self._step(index))
        return self

    def _step(self, index: int) -> Step:
        quality = self.quality(index) if index in self._told else None
        best = self.best
        return Step(
            iteration=self.iterations + 1,
            index=index,
            ratio=float(self.pool.ratios[index]),
            quality=quality,
            feasible=quality is not None and quality >= self.least,
            best=0.0 if best is None else float(self.pool.ratios[best]),
            remaining=int(self.open.sum()),
            phase=self._phase(),
        )


def evaluations_until(steps: list[Step], ratio: float) -> int | None:
    """After how many evaluations the best ratio reached ``ratio``; None where it never did."""
    return next((step.iteration for step in steps if step.best >= ratio), None)
