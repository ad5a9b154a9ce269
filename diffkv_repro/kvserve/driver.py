"""A search from its first question to its last answer: each evaluation is stored as it ends, and read where it is.

A search asks the same questions again when it gets the same answers, so that one which was killed is resumed by
running it anew on the same store: nothing is evaluated twice, and the result is that of a run without interruption.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from diffkv_repro.core.finished import Finished
from diffkv_repro.kvserve.executor import Executor, failure_of
from diffkv_repro.kvserve.history import AskTell, outcome_from
from diffkv_repro.kvserve.profile import Profile


class SearchError(RuntimeError):
    """A search that cannot go on: nothing can be evaluated."""


@dataclass(frozen=True)
class Progress:
    """Where a search stands: evaluations and their budget, best feasible ratio (0 for none), candidates left; of the
    evaluations ``fresh`` were made now, the others read from the store."""

    iteration: int
    budget: int
    best: float
    remaining: int
    fresh: int


Watch = Callable[[Progress], None]


def measure_ratios(
    profiles: Sequence[Profile],
    executor: Executor,
    store: Finished,
    *,
    watch: Callable[[int, int], None] | None = None,
) -> tuple[list[Profile], np.ndarray]:
    """The candidates that can be encoded, and the ratio of each [candidates]: Algorithm 1 knows all before it begins.

    Raises SearchError with the first reason where none can.
    """
    found = [store.get(("ratio", profile.digest)) for profile in profiles]
    missing = [place for place, known in enumerate(found) if known is None]
    done = len(profiles) - len(missing)
    for place, answer in executor.run("ratio", [profiles[index] for index in missing]):
        found[missing[place]] = answer
        store.put([(("ratio", profiles[missing[place]].digest), answer)])
        done += 1
        if watch is not None:
            watch(done, len(profiles))
    kept = [place for place, answer in enumerate(found) if failure_of(answer) is None]
    if not kept:
        raise SearchError(f"no candidate can be encoded: {failure_of(found[0])}")
    return [profiles[place] for place in kept], np.array([found[place]["ratio"] for place in kept])


def drive(
    search: AskTell,
    profiles: Sequence[Profile],
    executor: Executor,
    store: Finished,
    *,
    batch: int | None = None,
    watch: Watch | None = None,
) -> AskTell:
    """Ask, evaluate and tell until the search ends; ``batch`` candidates at once, one a slot unless given.

    Answers are told in the order of the questions, whichever ends first, so that a search depends on its batch and its
    seed alone. Raises SearchError where the first evaluations, as many as the cold start, all failed.
    """
    count, fresh = batch or executor.slots, 0
    while asked := search.ask(count):
        found: dict[int, Mapping[str, Any] | None] = {
            index: store.get(("quality", profiles[index].digest)) for index in asked
        }
        missing = [index for index, answer in found.items() if answer is None]
        for place, answer in executor.run("evaluate", [profiles[index] for index in missing]) if missing else ():
            store.put([(("quality", profiles[missing[place]].digest), answer)])
            found[missing[place]] = answer
            fresh += 1
        for index in asked:
            search.tell(index, outcome_from(found[index]))
        if watch is not None:
            best = search.best
            ratio = 0.0 if best is None else float(search.pool.ratios[best])
            watch(Progress(search.iterations, search.budget, ratio, int(search.open.sum()), fresh))
        if len(search.failed) == search.iterations >= min(8, search.budget):
            raise SearchError(f"every evaluation failed: {next(iter(search.failed.values()))}")
    return search


def summary(search: AskTell, profiles: Sequence[Profile]) -> dict[str, Any]:
    """What a search found, as plain data: the same for the same answers, whenever and wherever they were measured."""
    best = search.best
    return {
        "ended": search.ended,
        "evaluations": search.iterations,
        "candidates": len(search.pool),
        "best": None if best is None else _row(search, profiles, best),
        "feasible": [_row(search, profiles, index) for index in search.feasible],
        "failed": {str(profiles[index]): reason for index, reason in sorted(search.failed.items())},
        "steps": [asdict(step) for step in search.steps],
    }


def _row(search: AskTell, profiles: Sequence[Profile], index: int) -> dict[str, Any]:
    return {
        "profile": str(profiles[index]),
        "parts": profiles[index].as_dict(),
        "ratio": float(search.pool.ratios[index]),
        "quality": search.quality(index),
    }
