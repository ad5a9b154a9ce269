"""The Bayesian profiling engine: Algorithm 1 of KVServe over a pool whose ratios are known (section 5)."""

import logging
import warnings
from dataclasses import dataclass

import numpy as np

from diffkv_repro.core.errors import first_line
from diffkv_repro.kvserve.acquisition import LATER, constrained_improvement, equation_4, exploration_weight
from diffkv_repro.kvserve.encoding import Pool
from diffkv_repro.kvserve.history import AskTell, Outcome
from diffkv_repro.kvserve.registry import require_choice, require_flag, require_whole
from diffkv_repro.kvserve.surrogate import SURROGATES, Surrogate

log = logging.getLogger(__name__)

ACQUISITIONS = ("paper", "released", "improvement")
_WIDE = 8.0  # levels: a profile this uneven says little of others of its ratio


@dataclass(frozen=True)
class SearchSettings:
    """How Algorithm 1 searches; defaults are the paper's and, where it is silent, the released code's.

    - ``min_quality`` relative to the uncompressed cache, ``budget`` in evaluations, ``cold_start`` of them spread over
      the ratios before the Gaussian process is asked.
    - ``acquisition``: ``paper`` is equation 4, ``released`` weighs exploration by the pool's mean ratio as well,
      ``improvement`` is constrained expected improvement, which the paper lacks.
    - ``surrogate``: ``botorch`` or ``sklearn``.
    - ``epsilon``, a difference of ratios, and ``tolerance``, of qualities: how far pruning reaches.
    - ``encode``, ``explore``, ``prune``, ``stop``: what the ablations of Figure 16 leave out.
    """

    min_quality: float = 0.97
    budget: int = 200
    cold_start: int = 8
    acquisition: str = "paper"
    surrogate: str = "botorch"
    epsilon: float = 0.2
    tolerance: float = 0.03
    encode: bool = True
    explore: bool = True
    prune: bool = True
    stop: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        require_whole("budget", self.budget, 1)
        require_whole("cold_start", self.cold_start, 1)
        require_whole("seed", self.seed, 0)
        require_choice("acquisition", self.acquisition, ACQUISITIONS)
        require_choice("surrogate", self.surrogate, tuple(SURROGATES))
        for name in ("encode", "explore", "prune", "stop"):
            require_flag(name, getattr(self, name))
        for name in ("min_quality", "epsilon", "tolerance"):
            if not (np.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"{name} is {getattr(self, name)}; it must be finite and at least 0")


class Search(AskTell):
    """Algorithm 1: propose, evaluate, prune in both directions, stop early.

    Numeric failure of the Gaussian process never ends a search: the other library's is asked, and where that fails too
    the candidate halfway between the highest feasible and the lowest infeasible ratio is taken. Both come with a
    warning.
    """

    def __init__(self, pool: Pool, settings: SearchSettings | None = None) -> None:
        self.settings = settings or SearchSettings()
        super().__init__(pool, self.settings.min_quality, self.settings.budget)
        given = self.settings
        self._points = pool.points if given.encode else pool.raw
        self._random = np.random.default_rng(given.seed)
        self._cold = _spread_over_ratios(pool, min(given.cold_start, self.budget), self._random)
        self._models: dict[str, Surrogate] = {}
        self.pruned = np.zeros(len(pool), dtype=bool)
        self._misses = 0

    @property
    def open(self) -> np.ndarray:
        """Neither tried, nor being tried, nor pruned [n]."""
        return super().open & ~self.pruned

    def _phase(self) -> str:
        if self.iterations < len(self._cold):
            return "cold start"
        return "exploration" if self.iterations < self.budget / LATER else "exploitation"

    def _propose(self, count: int) -> list[int]:
        done = self.iterations + len(self.pending)
        mask = self.open
        cold = [index for index in self._cold if mask[index]]  # pruning may have begun before its end
        if cold and done < len(self._cold):
            return cold[: min(count, len(self._cold) - done)]
        if self._stops():
            return []
        chosen: list[int] = []
        model = self._fitted()
        for _ in range(min(count, int(self.open.sum()))):
            mask = self.open
            mask[chosen] = False
            scores = self._scores(model, done + len(chosen)) if model is not None else self._halfway()
            if scores is None:  # the prediction failed, though the fit did not
                model, scores = None, self._halfway()
            index = int(np.where(mask, scores, -np.inf).argmax())
            chosen.append(index)
            if model is not None and len(chosen) < count:
                model.imagine(self._points[[index]], model.predict(self._points[[index]])[0])
        return chosen

    def _fitted(self) -> Surrogate | None:
        """A Gaussian process that knows all answers, and imagines those that are being waited for."""
        known = sorted(self._told)
        if len(known) < 2:
            return None
        names = [self.settings.surrogate, *(name for name in SURROGATES if name != self.settings.surrogate)]
        for name in names:
            model = self._models.setdefault(name, SURROGATES[name](self.settings.seed))
            try:
                model.fit(self._points[known], np.array([self.quality(index) for index in known]))
                if self.pending:
                    waiting = self._points[self.pending]
                    model.imagine(waiting, model.predict(waiting)[0])
                return model
            except Exception as error:  # gpytorch, botorch, scipy and LAPACK each raise their own
                warnings.warn(f"the Gaussian process of {name} failed: {first_line(error)}", stacklevel=4)
                self._models.pop(name, None)
        return None

    def _scores(self, model: Surrogate, iteration: int) -> np.ndarray | None:
        given, ratios = self.settings, self.pool.ratios
        try:
            mean, deviation = model.predict(self._points)
        except Exception as error:
            warnings.warn(f"the Gaussian process cannot predict: {first_line(error)}", stacklevel=4)
            return None
        if given.acquisition == "improvement":
            best = self.best
            return constrained_improvement(
                ratios, mean, deviation, self.least, None if best is None else float(ratios[best])
            )
        weight = exploration_weight(iteration, self.budget) if given.explore else 0.0
        return equation_4(
            ratios, mean, deviation, self.least, weight,
            released=given.acquisition == "released", mean_ratio=float(ratios.mean()),
        )  # fmt: skip

    def _halfway(self) -> np.ndarray:
        """Scores without a model: nearness to the middle of the highest feasible and the lowest infeasible ratio."""
        ratios = self.pool.ratios
        kept, lost = self.feasible, [index for index in self._told if self.quality(index) < self.least]
        low = ratios[kept[0]] if kept else ratios.min()
        above = [ratios[index] for index in lost if ratios[index] > low]
        return -np.abs(ratios - (low + (min(above) if above else ratios.max())) / 2)

    def _learn(self, index: int, outcome: Outcome, new: bool) -> None:
        if index not in self._told:
            return  # a failure says nothing about the quality
        quality, ratio, given = self.quality(index), self.pool.ratios[index], self.settings
        done = self.iterations + 1
        late = done > self.budget / 2
        if late and new:
            self._misses = 0 if quality >= self.least else self._misses + 1
        if not given.prune or done <= self.budget / LATER:
            return
        alike = self.pool.groups == self.pool.groups[index]
        if quality >= self.least:
            self.pruned |= alike & (self.pool.ratios <= ratio - given.epsilon / 2)
        elif quality <= self.least - given.tolerance and (late or self.pool.spread[index] < _WIDE):
            self.pruned |= alike & (self.pool.ratios >= ratio + 2 * given.epsilon)

    def _stops(self) -> bool:
        left = self.pool.ratios[self.open]
        near = left.max() - left.min() <= 2.5 * self.settings.epsilon
        if self.settings.stop and near and self._misses > self.budget / 10:
            self.ended = f"{self._misses} misses in a row, and the ratios that are left differ by {np.ptp(left):.2f}"
        return bool(self.ended)


def _spread_over_ratios(pool: Pool, count: int, random: np.random.Generator) -> list[int]:
    """One candidate, drawn by seed, of each of ``count`` equal parts of the pool by ratio, the highest first."""
    order = np.lexsort((np.arange(len(pool)), -pool.ratios))
    return [int(random.choice(part)) for part in np.array_split(order, count) if len(part)]
