"""What Algorithm 1 is compared with, beside its ablations: random order and Optuna's TPE; the paper has neither."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from diffkv_repro.kvserve.encoding import Pool, describe
from diffkv_repro.kvserve.history import AskTell, Evaluation, Outcome
from diffkv_repro.kvserve.profile import Profile
from diffkv_repro.kvserve.search import Search, SearchSettings


class RandomSearch(AskTell):
    """Candidates in an order drawn by seed, none twice, until the budget is spent."""

    def __init__(self, pool: Pool, settings: SearchSettings) -> None:
        super().__init__(pool, settings.min_quality, settings.budget)
        self._order = [int(index) for index in np.random.default_rng(settings.seed).permutation(len(pool))]

    def _propose(self, count: int) -> list[int]:
        mask = self.open
        return [index for index in self._order if mask[index]][:count]


class TpeSearch(AskTell):
    """Optuna's tree-structured Parzen estimator with the quality as its constraint.

    It knows a candidate by its choices alone. What it proposes and the pool lacks, or has tried, is moved to the
    nearest open candidate, and it is told the choices of that one.
    """

    def __init__(self, pool: Pool, settings: SearchSettings, profiles: Sequence[Profile]) -> None:
        import optuna

        if len(profiles) != len(pool):
            raise ValueError(f"{len(profiles)} profiles for a pool of {len(pool)}; one each is needed")
        super().__init__(pool, settings.min_quality, settings.budget)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        rows = [describe(profile) for profile in profiles]
        values = {name: sorted({row[name] for row in rows if name in row}, key=str) for name in rows[0]}
        shared = [name for name in values if len(values[name]) > 1 and all(name in row for row in rows)]
        self._spaces = {name: optuna.distributions.CategoricalDistribution(values[name]) for name in shared}
        self._rows = [{name: row[name] for name in shared} for row in rows]
        self._columns = {name: np.array([str(row[name]) for row in rows]) for name in shared}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that constraints are experimental
            sampler = optuna.samplers.TPESampler(
                seed=settings.seed, n_startup_trials=settings.cold_start, multivariate=True, constraints_func=_excess
            )
        self._study = optuna.create_study(direction="maximize", sampler=sampler)
        self._trials: dict[int, Any] = {}
        self._failed = optuna.trial.TrialState.FAIL

    def _propose(self, count: int) -> list[int]:
        chosen = []
        for _ in range(min(count, int(self.open.sum()))):
            trial = self._study.ask(self._spaces)
            mask = self.open
            mask[chosen] = False
            apart = sum((column != str(trial.params[name])).astype(int) for name, column in self._columns.items())
            index = int(np.where(mask, apart, np.iinfo(int).max).argmin()) if self._columns else int(mask.argmax())
            if trial.params != self._rows[index]:
                self._study.tell(trial, state=self._failed)
                self._study.enqueue_trial(self._rows[index])
                trial = self._study.ask(self._spaces)
            self._trials[index] = trial
            chosen.append(index)
        return chosen

    def _learn(self, index: int, outcome: Outcome, new: bool) -> None:
        trial = self._trials.pop(index, None)
        if trial is None:
            return
        if isinstance(outcome, Evaluation):
            trial.set_user_attr("excess", self.least - outcome.quality)
            self._study.tell(trial, float(self.pool.ratios[index]))
        else:
            self._study.tell(trial, state=self._failed)


def _excess(trial: Any) -> tuple[float]:
    """Above 0 where the quality is too low."""
    return (trial.user_attrs.get("excess", 1.0),)


ABLATIONS = {
    "full": {},
    "no exploration": {"explore": False},
    "no encoding": {"encode": False},
    "no pruning": {"prune": False},
    "no stop": {"stop": False},
}
VARIANTS = {"released acquisition": {"acquisition": "released"}, "scikit-learn": {"surrogate": "sklearn"}}
OTHERS = ("constrained EI", "TPE", "random")


def arm(name: str, pool: Pool, settings: SearchSettings, profiles: Sequence[Profile]) -> AskTell:
    """A search by its name in the figures. Raises ValueError with the known names."""
    changes = ABLATIONS | VARIANTS
    if name in changes:
        return Search(pool, replace(settings, **changes[name]))
    others: dict[str, Callable[[], AskTell]] = {
        "constrained EI": lambda: Search(pool, replace(settings, acquisition="improvement", prune=False, stop=False)),
        "TPE": lambda: TpeSearch(pool, settings, profiles),
        "random": lambda: RandomSearch(pool, settings),
    }
    if name not in others:
        raise ValueError(f"unknown search {name!r}; allowed are {', '.join([*changes, *others])}")
    return others[name]()
