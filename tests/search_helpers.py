"""A workload that costs nothing: ratios and qualities of MixHQ profiles by a rule, with a little noise of their own."""

import math
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from diffkv_repro.kvserve.encoding import Pool
from diffkv_repro.kvserve.history import AskTell, Evaluation
from diffkv_repro.kvserve.profile import Profile
from diffkv_repro.kvserve.search import SearchSettings
from diffkv_repro.kvserve.space import SPACES

REDUCED = list(SPACES["reduced"])


def _bits(share: float, high: int, low: int) -> float:
    return (1 - share) * math.log2(high) + share * math.log2(low)


def ratio_of(profile: Profile) -> float:
    own = profile.quantizer
    bits = _bits(own.ratio, own.key_high, own.key_low) + _bits(own.ratio, own.value_high, own.value_low)
    return 32 / (bits + 0.6) * (0.995 if profile.transforms else 1.0)


def quality_of(profile: Profile) -> float:
    own = profile.quantizer

    def error(high: int, low: int) -> float:
        return 1.6 * (1 - own.ratio) / high**1.5 + 0.8 * own.ratio / low**1.5

    noise = np.random.default_rng(int(profile.digest, 16) % 2**32).normal(0, 0.003)
    lost = 0.6 * error(own.key_high, own.key_low) + 0.4 * error(own.value_high, own.value_low)
    return 1.0 - lost * (1.3 if profile.transforms else 1.0) + noise


def reduced_pool() -> Pool:
    return Pool.of(REDUCED, [ratio_of(profile) for profile in REDUCED])


def answer_all(search: AskTell, qualities: np.ndarray, batch: int = 1) -> AskTell:
    """Run a search to its end on known qualities."""
    while asked := search.ask(batch):
        for index in asked:
            search.tell(index, Evaluation(float(qualities[index])))
    return search


@dataclass
class Ruled:
    """An evaluator by rule. It writes what it begins to ``log``, takes ``seconds``, and for profiles that ``deadly``
    names kills its own process: once, if ``deadly`` is a folder to remember it in, else always."""

    log: str = ""
    seconds: float = 0.0
    deadly: str = ""
    remember: str = ""

    def evaluate(self, profile: Profile) -> Evaluation:
        if self.log:
            with Path(self.log).open("a") as lines:
                lines.write(profile.digest + "\n")
        if self.deadly == profile.digest:
            seen = Path(self.remember) / profile.digest if self.remember else None
            if seen is None or not seen.exists():
                if seen is not None:
                    seen.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self.seconds)
        return Evaluation(quality_of(profile), documents=3)

    def ratio(self, profile: Profile) -> float:
        return ratio_of(profile)


@dataclass
class Broken:
    """An evaluator that raises for every profile, or for those with a Hadamard transform alone."""

    everything: bool = False

    def evaluate(self, profile: Profile) -> Evaluation:
        if self.everything or profile.transforms:
            raise RuntimeError("no such kernel")
        return Evaluation(quality_of(profile))

    def ratio(self, profile: Profile) -> float:
        return ratio_of(profile)


POOL = reduced_pool()
QUALITY = np.array([quality_of(profile) for profile in REDUCED])
LEAST = float(np.quantile(QUALITY, 0.8))
BEST = float(POOL.ratios[QUALITY >= LEAST].max())
SETTINGS = SearchSettings(min_quality=LEAST, budget=32, cold_start=6)


def some(number: int, columns: int = 4, seed: int = 0) -> Pool:
    random = np.random.default_rng(seed)
    points = random.random((number, columns))
    names = tuple(map(str, range(number)))
    return Pool(names, 2 + random.random(number), points, points, np.zeros(number), np.zeros(number))
