"""What notebook 11 checks of searches, subsets and ranks (KVServe, Figures 8, 9 and 16 left)."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

from diffkv_repro.core.finished import Finished
from diffkv_repro.kvserve.arms import arm
from diffkv_repro.kvserve.driver import Progress, drive
from diffkv_repro.kvserve.encoding import Pool, describe, one_hot_min_max
from diffkv_repro.kvserve.executor import Serial
from diffkv_repro.kvserve.exhaustive import Exhaustive
from diffkv_repro.kvserve.history import AskTell, Evaluation, evaluations_until
from diffkv_repro.kvserve.profile import Profile
from diffkv_repro.kvserve.search import Search, SearchSettings
from diffkv_repro.kvserve.space import Space
from diffkv_repro.kvserve.subset import stratified
from diffkv_repro.kvserve.surrogate import BotorchGP

WITHIN = 0.99  # of the true best ratio
_FOLDS = 6
_WORTH_WORKERS = 500  # evaluations at most in all trials together; a worker takes some seconds to start


@dataclass(frozen=True)
class Trial:
    """A search on known qualities: ``found`` over the true best ratio (0 for nothing), ``evaluations`` to its end, and
    ``until`` it was within 1 %, all of the pool where it never was. ``curve``: found after each evaluation."""

    arm: str
    seed: int
    found: float
    evaluations: int
    until: int
    curve: tuple[float, ...]


def answer_from(search: AskTell, quality: np.ndarray, *, most: int | None = None) -> AskTell:
    """Run ``search`` on known qualities [candidates], to its end or for ``most`` evaluations."""
    while (most is None or search.iterations < most) and (asked := search.ask()):
        for index in asked:
            search.tell(index, Evaluation(float(quality[index])))
    return search


def trial(name: str, profiles: Sequence[Profile], pool: Pool, quality: np.ndarray, settings: SearchSettings) -> Trial:
    """One seeded search of an arm, judged by the true optimum."""
    best = float(pool.ratios[quality >= settings.min_quality].max())
    done = answer_from(arm(name, pool, settings, profiles), quality)
    until = evaluations_until(done.steps, WITHIN * best)
    curve = tuple(step.best / best for step in done.steps)
    return Trial(name, settings.seed, curve[-1], done.iterations, until or len(pool), curve)


def compare(
    names: Sequence[str],
    profiles: Sequence[Profile],
    ratios: np.ndarray,
    quality: np.ndarray,
    settings: SearchSettings,
    *,
    seeds: int,
    workers: int | None = None,
) -> list[Trial]:
    """``seeds`` trials of each arm, in ``workers`` processes (a core each unless given).

    Raises ValueError where no candidate keeps the quality: there is then no optimum to judge by.
    """
    if not (quality >= settings.min_quality).any():
        raise ValueError(f"no candidate has a quality of {settings.min_quality}; the highest is {quality.max():.4f}")
    pool = Pool.of(profiles, ratios)
    jobs = [(name, replace(settings, seed=seed)) for name in names for seed in range(seeds)]
    count = min(workers or len(os.sched_getaffinity(0)), len(jobs))
    if count == 1 or len(jobs) * settings.budget < _WORTH_WORKERS:
        return [trial(name, profiles, pool, quality, own) for name, own in jobs]
    # Spawned, not forked: a fork of a process with running threads can hang in any lock that one of them held.
    with ProcessPoolExecutor(count, get_context("spawn"), _start, (profiles, pool, quality)) as workers_:
        return list(workers_.map(_trial, *zip(*jobs, strict=True), chunksize=1))


_shared: dict[str, tuple[Sequence[Profile], Pool, np.ndarray]] = {}


def _start(profiles: Sequence[Profile], pool: Pool, quality: np.ndarray) -> None:
    torch.set_num_threads(1)
    _shared["of"] = (profiles, pool, quality)


def _trial(name: str, settings: SearchSettings) -> Trial:
    profiles, pool, quality = _shared["of"]
    return trial(name, profiles, pool, quality, settings)


def steps_that_differ(
    profiles: Sequence[Profile], pool: Pool, quality: np.ndarray, settings: SearchSettings, folder: Path
) -> int:
    """Steps in which a search that is stopped halfway and gone on with from its store differs from one that is not."""
    path = Path(folder) / f"resumption-{os.getpid()}.sqlite"
    known = dict(zip((profile.digest for profile in profiles), map(float, quality), strict=True))
    evaluator, store = Serial(_Known(known)), Finished(path, {})
    whole = drive(Search(pool, settings), profiles, evaluator, Finished(None, {}))
    try:
        with suppress(_Enough):
            stop = _stop_after(whole.iterations // 2)
            drive(Search(pool, settings), profiles, evaluator, store, watch=stop)
        again = drive(Search(pool, settings), profiles, evaluator, store)
    finally:
        store.close()
        path.unlink(missing_ok=True)
    same = sum(one == other for one, other in zip(again.steps, whole.steps, strict=False))
    return max(again.iterations, whole.iterations) - same


class _Enough(Exception):
    """A search that is stopped."""


def _stop_after(iterations: int) -> Callable[[Progress], None]:
    def watch(at: Progress) -> None:
        if at.iteration >= iterations:
            raise _Enough

    return watch


@dataclass(frozen=True)
class _Known:
    """Makes itself: an evaluator of known qualities."""

    quality: Mapping[str, float]

    def __call__(self) -> "_Known":
        return self

    def evaluate(self, profile: Profile) -> Evaluation:
        return Evaluation(self.quality[profile.digest])

    def ratio(self, profile: Profile) -> float:
        raise NotImplementedError("ratios are those of the pool")


def within(trials: Mapping[str, Sequence[Trial]]) -> dict[str, int]:
    """How many searches of each arm were within 1 % of the best ratio when they ended."""
    return {name: sum(own.found >= WITHIN for own in many) for name, many in trials.items()}


def dominate_full(trials: Mapping[str, Sequence[Trial]], names: Sequence[str]) -> list[str]:
    """Those of ``names`` with a higher median ratio than the full search that are not later within 1 % of the best."""
    ratio, until = _medians(trials["full"])
    return [name for name in names if _medians(trials[name])[0] > ratio and _medians(trials[name])[1] <= until]


def _medians(trials: Sequence[Trial]) -> tuple[float, float]:
    return float(np.median([own.found for own in trials])), float(np.median([own.until for own in trials]))


@dataclass(frozen=True)
class Extrapolation:
    """A larger space with ratios and qualities as models of an evaluated one have them, and what those models miss:
    relative error of the ratio and error of the quality in cross-validation, standard deviations."""

    profiles: list[Profile]
    ratios: np.ndarray
    quality: np.ndarray
    ratio_error: float
    quality_error: float


def extrapolate(table: Exhaustive, target: Space, *, seed: int = 0) -> Extrapolation:
    """Ratios and qualities of ``target`` by Gaussian processes on an evaluated part of it.

    Every candidate's quality gets a deviation of its own, drawn by ``seed`` with the spread that cross-validation
    finds: the surface to search is as rough as the one that was measured.
    """
    profiles = list(target)
    places = [target.index_of(profile) for profile in table.candidates]
    points = one_hot_min_max([describe(profile) for profile in profiles])
    known = points[places]
    found, errors = [], []
    for values in (np.log(table.mean_ratio), table.quality):
        errors.append(_cross_validated(known, values, seed))
        model = BotorchGP(seed)
        model.fit(known, values)
        found.append(model.predict(points)[0])
    rough = np.random.default_rng(seed).normal(0, errors[1], len(profiles))
    return Extrapolation(profiles, np.exp(found[0]), np.maximum(found[1] + rough, 0), errors[0], errors[1])


def _cross_validated(points: np.ndarray, values: np.ndarray, seed: int) -> float:
    order = np.random.default_rng(seed).permutation(len(values))
    missed = []
    for fold in np.array_split(order, min(_FOLDS, len(values))):
        model = BotorchGP(seed)
        rest = np.setdiff1d(order, fold)
        model.fit(points[rest], values[rest])
        missed += list(model.predict(points[fold])[0] - values[fold])
    return float(np.std(missed))


def sampling_errors(values: np.ndarray, sources: Sequence[str], sizes: Sequence[int], *, seeds: int) -> np.ndarray:
    """Differences of sample means and the full mean [2, sizes, seeds]: plain random, then stratified samples."""
    full, errors = values.mean(), np.zeros((2, len(sizes), seeds))
    for place, size in enumerate(sizes):
        for seed in range(seeds):
            plain = np.random.default_rng([seed, size]).choice(len(values), size, replace=False)
            errors[0, place, seed] = values[plain].mean() - full
            errors[1, place, seed] = values[stratified(sources, size, seed=seed)].mean() - full
    return errors


def log_slope(sizes: Sequence[int], spreads: Sequence[float]) -> float:
    """Slope of the logarithm of ``spreads`` over that of ``sizes``: -0.5 for an error that falls as 1/sqrt(n)."""
    return float(np.polyfit(np.log(sizes), np.log(spreads), 1)[0])


def rank_stability(ratios: np.ndarray) -> tuple[float, int]:
    """Mean Kendall tau of each document's order of ``ratios`` [profiles, documents] with the order of the means, and at
    how many documents any two profiles change places."""
    from scipy.stats import kendalltau

    means = ratios.mean(axis=1)
    taus = [kendalltau(means, column).statistic for column in ratios.T]
    crossed = np.zeros(ratios.shape[1], dtype=bool)
    for one, other in combinations(range(len(ratios)), 2):
        crossed |= (ratios[one] > ratios[other]) != (means[one] > means[other])
    return float(np.mean(taus)), int(crossed.sum())


def slow_proposals(
    candidates: int, known: int, count: int, *, seconds: float = 1.0, columns: int = 7
) -> tuple[int, float]:
    """How many of ``count`` proposals over ``candidates`` take longer than ``seconds``, and the largest share of them
    that one takes; fits included, with ``known`` evaluations and more."""
    random = np.random.default_rng(0)
    points = random.random((candidates, columns))
    names, zeros = tuple(map(str, range(candidates))), np.zeros(candidates)
    pool = Pool(names, 3 + 3 * points.mean(axis=1), points, points, zeros, zeros)
    settings = SearchSettings(min_quality=0.6, budget=known + count + 1, cold_start=known, prune=False, stop=False)
    search = Search(pool, settings)
    quality = 1.1 - points.mean(axis=1) + random.normal(0, 0.01, candidates)
    answer_from(search, quality, most=known + 1)
    taken = [_timed(lambda: answer_from(search, quality, most=search.iterations + 1)) for _ in range(count)]
    return sum(own > seconds for own in taken), max(taken) / seconds


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
