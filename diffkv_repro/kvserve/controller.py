"""The online controller: quality bucket, envelope look-up, residual bandit, guardrails (sections 6.1 and 6.2)."""

import json
import logging
import math
import random
import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

from diffkv_repro.core.errors import first_line
from diffkv_repro.core.files import write_text
from diffkv_repro.kvserve.decision import Bucket, Buckets, Candidate, Decision, milliseconds
from diffkv_repro.kvserve.latency import NO_COMPRESSION, MeasuredProfile, ServiceContext
from diffkv_repro.kvserve.learning import Cooldown, Key, Residuals

log = logging.getLogger(__name__)

FORMAT = 1
Fallback = Literal["fastest", "default"]
ResidualOf = Literal["profile", "interval"]


@dataclass(frozen=True)
class ControllerSettings:
    """How the controller learns and guards; numbers that the released code has are its own.

    - ``alpha``: weight of a new surprise; 0 switches learning off. ``shared`` of it is put down to all codecs alike,
      and a profile's own residual halves over ``memory`` decisions without it (see ``Residuals``). Both are ours: the
      paper has a ``shared`` of 0 and an endless ``memory``.
    - ``epsilon``: share of decisions that explore, among what is expected within ``explore_within`` of the best.
    - ``outlier``: a time counts as at most so many times the expected one, so that one stall is soon forgotten.
    - ``reach``: so many neighbours on either side of the envelope's best are candidates.
    - ``residual_of``: own residuals for each ``profile``, which serve at every bandwidth, or as in the paper for each
      bucket, ``interval`` and profile, to be learnt anew in each.
    - ``violations`` of the last ``uses`` send a profile to rest for ``rest`` decisions.
    - ``slo_fallback``: where no candidate is expected to keep the SLO, the ``fastest`` of them, or the ``default``
      (as the paper has it: the wrong way on a slow link, if the default is no compression).
    - ``default``: chosen where nothing can be predicted, for want of a bandwidth say.
    """

    alpha: float = 0.3
    shared: float = 0.8
    memory: float = 20.0
    epsilon: float = 0.1
    explore_within: float = 1.1
    outlier: float = 10.0
    reach: int = 1
    residual_of: ResidualOf = "profile"
    violations: int = 3
    uses: int = 10
    rest: int = 8
    slo_fallback: Fallback = "fastest"
    default: str = NO_COMPRESSION.name
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("alpha", "shared", "epsilon"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must lie between 0 and 1")
        if not self.memory > 0:
            raise ValueError(f"memory is {self.memory} decisions; it must be above 0")
        for name in ("explore_within", "outlier"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be a factor of at least 1")
        for name, least in (("reach", 0), ("violations", 1), ("uses", 1), ("rest", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value}; it must be a whole number of at least {least}")
        if self.violations > self.uses:
            raise ValueError(f"violations is {self.violations}, more than the {self.uses} uses they are counted in")
        for name, kind in (("slo_fallback", Fallback), ("residual_of", ResidualOf)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed are {', '.join(get_args(kind))}")


Library = Iterable[MeasuredProfile] | Mapping[float, Iterable[MeasuredProfile]]


class Controller:
    """Chooses a profile for each request and learns from the times that come back; safe to share between threads.

    ``profiles`` are those of one measurement, or of several by the raw bytes that each was made on: short prompts
    mostly launch kernels, so that speeds, and with them thresholds, grow with the size. A request then meets those of
    the size nearest to its own (in proportion).

    ``decide`` and ``observe`` never raise: whatever goes wrong, a request gets the default profile and a reason.
    Raises ValueError for profiles of one name, sizes that are not above 0, and a default that is none of them.
    """

    def __init__(self, profiles: Library, settings: ControllerSettings | None = None) -> None:
        self.settings = settings or ControllerSettings()
        given = profiles if isinstance(profiles, Mapping) else {1.0: profiles}
        if not given or not all(math.isfinite(size) and size > 0 for size in given):
            raise ValueError(f"sizes of profiles are {list(given)}; at least one is needed, finite and above 0 bytes")
        self.profiles = {size: tuple(given[size]) for size in sorted(given)}
        self._sizes = tuple(self.profiles)
        # Where one size gives way to the next: half way, in proportion.
        self._borders = [math.sqrt(small) * math.sqrt(large) for small, large in pairwise(self._sizes)]
        for those in self.profiles.values():
            names = [NO_COMPRESSION.name, *(profile.name for profile in those)]
            if len(set(names)) < len(names):
                raise ValueError(f"names of profiles must differ, from {NO_COMPRESSION.name!r} too: {', '.join(names)}")
            if self.settings.default not in names:
                raise ValueError(f"default is {self.settings.default!r}; allowed are {', '.join(names)}")
        self._buckets = [Buckets(those) for those in self.profiles.values()]
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Forget all that was learnt."""
        with self._lock:
            given = self.settings
            self._decisions = 0
            self._residuals = Residuals(given.alpha, given.shared, given.memory)
            self._cooldown = Cooldown(given.violations, given.uses, given.rest)
            self._random = random.Random(given.seed)

    def decide(self, context: ServiceContext) -> Decision:
        """The profile for a request."""
        with self._lock:
            self._decisions += 1
            try:
                return self._decide(context)
            except Exception as error:  # a request must be served whatever is wrong here
                log.exception("decision %d failed; no compression instead", self._decisions)
                return Decision(self._decisions, NO_COMPRESSION, f"the controller failed: {first_line(error)}")

    def observe(self, decision: Decision, seconds: float, *, bandwidth: float | None = None) -> None:
        """Learn from the time a decision's request took: model, encode, queue, send and decode at the far side.

        ``bandwidth``: what this transfer itself got, where known. What was wrong about the bandwidth then teaches
        nothing about the profile. Times and bandwidths that cannot be (zero, negative, not finite) are ignored, as is
        a decision without a prediction.
        """
        with self._lock:
            try:
                self._observe(decision, float(seconds), bandwidth)
            except Exception:
                log.exception("an observation of %r was not understood", seconds)

    def _decide(self, context: ServiceContext) -> Decision:
        number, given = self._decisions, self.settings
        bucket = self._buckets[self._size(context)].find(context.workload, context.min_quality)
        if context.bandwidth is None:
            return Decision(number, self._default(bucket), "the default: bandwidth is not known", context, bucket)
        candidates = self._candidates(bucket, context)
        usable = [one for one in candidates if not one.refused]
        explores = self._random.random() < given.epsilon
        if not usable:
            if given.slo_fallback == "default":
                return Decision(number, self._default(bucket), "the default: no SLO kept", context, bucket, candidates)
            awake = [one for one in candidates if not self._resting(one.profile)]
            best = min(awake, key=lambda one: one.predicted)
            return Decision(number, best.profile, "the fastest, though no SLO is kept", context, bucket, candidates)
        best = min(usable, key=lambda one: one.predicted)
        bound = given.explore_within * best.predicted
        others = [one for one in usable if one is not best and one.predicted <= bound] if explores else []
        if others:
            tried = self._random.choice(others).profile
            return Decision(number, tried, f"tried instead of {best.profile.name}", context, bucket, candidates, True)
        return Decision(number, best.profile, "the fastest of the candidates", context, bucket, candidates)

    def _candidates(self, bucket: Bucket, context: ServiceContext) -> tuple[Candidate, ...]:
        # No compression is always among them: a codec may slow down so much that it alone is left.
        near = bucket.envelope.candidates(context.bandwidth, self.settings.reach)
        if NO_COMPRESSION not in near:
            near = (NO_COMPRESSION, *near)
        return tuple(self._candidate(profile, bucket, context) for profile in near)

    def _candidate(self, profile: MeasuredProfile, bucket: Bucket, context: ServiceContext) -> Candidate:
        model = context.model_seconds + context.raw_bytes * profile.seconds_per_byte(context.bandwidth)
        learnt = self._residuals.get(self._key(profile, bucket, context), profile.codec_seconds, self._decisions)
        residual = context.raw_bytes * learnt
        refused = ""
        if self._resting(profile):
            refused = f"rests for {self._cooldown.left(profile.name, self._decisions)} decisions, having broken SLOs"
        elif model + residual > context.slo:
            refused = f"{milliseconds(model + residual)} expected, above the SLO of {milliseconds(context.slo)}"
        return Candidate(profile, model, residual, refused)

    def _observe(self, decision: Decision, seconds: float, bandwidth: float | None) -> None:
        chosen, context, bucket = decision.chosen, decision.context, decision.bucket
        if chosen is None or context is None or bucket is None or not (math.isfinite(seconds) and seconds > 0):
            return
        had = context.bandwidth if bandwidth is None else bandwidth
        if self.settings.alpha and math.isfinite(had) and had > 0:
            profile, codec = chosen.profile, chosen.profile.codec_seconds
            expected = profile.seconds_per_byte(had)
            key, now = self._key(profile, bucket, context), self._decisions
            predicted = expected + self._residuals.get(key, codec, now)
            taken = (seconds - context.model_seconds) / context.raw_bytes
            surprise = min(taken, self.settings.outlier * max(predicted, expected)) - predicted
            self._residuals.add(key, codec, surprise, now, codec_share=codec / expected)
        # Only a promise can be broken: where no profile could keep the SLO, the fastest is not to blame.
        if math.isfinite(context.slo) and decision.keeps_slo and chosen.profile is not NO_COMPRESSION:
            self._cooldown.add(chosen.profile.name, seconds > context.slo, self._decisions)

    def _key(self, profile: MeasuredProfile, bucket: Bucket, context: ServiceContext) -> Key:
        if self.settings.residual_of == "profile":
            return (self._size(context), profile.name)
        interval = bucket.envelope.interval(context.bandwidth)
        return (self._size(context), bucket.workload, str(bucket.least_quality), interval, profile.name)

    def _size(self, context: ServiceContext) -> int:
        return bisect_left(self._borders, context.raw_bytes)

    def _resting(self, profile: MeasuredProfile) -> bool:
        return self._cooldown.left(profile.name, self._decisions) > 0

    def _default(self, bucket: Bucket) -> MeasuredProfile:
        return next((one for one in bucket.profiles if one.name == self.settings.default), NO_COMPRESSION)

    def _measures(self) -> dict[str, list[str]]:
        """What residuals are relative to, by profile; as text, for JSON knows no infinity."""
        lines: dict[str, list[str]] = {NO_COMPRESSION.name: []}
        for size, profiles in self.profiles.items():
            for one in profiles:
                values = map(repr, map(float, (size, one.ratio, one.encode, one.decode)))
                lines.setdefault(one.name, []).append(" ".join(values))
        return lines

    def save(self, path: Path) -> None:
        """Write what was learnt to a JSON file that :meth:`load` reads. Raises WriteError where the disk refuses."""
        with self._lock:
            document = {
                "format": FORMAT,
                "profiles": self._measures(),
                "decisions": self._decisions,
                "residual_of": self.settings.residual_of,
                "residuals": self._residuals.as_dict(),
                "cooldown": self._cooldown.as_dict(),
                "random": self._random.getstate(),
            }
        write_text(path, json.dumps(document, indent=1) + "\n")

    def load(self, path: Path) -> None:
        """Go on from what :meth:`save` wrote.

        What was learnt of a profile that is gone, or has been measured anew, is left out. Raises ValueError naming the
        file where it cannot be read; the controller is then as it was.
        """
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
            fresh = Controller(self.profiles, self.settings)
            fresh._take(document)
        except OSError as error:
            raise ValueError(f"controller state {path} cannot be read: {error.strerror}") from error
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"controller state {path} is not what save writes: {first_line(error)}") from error
        with self._lock:
            self._decisions, self._random = fresh._decisions, fresh._random
            self._residuals, self._cooldown = fresh._residuals, fresh._cooldown

    def _take(self, document: dict[str, Any]) -> None:
        if document["format"] != FORMAT:
            raise ValueError(f"format is {document['format']}; allowed is {FORMAT}")
        if document["residual_of"] != self.settings.residual_of:
            raise ValueError(f"residuals are of each {document['residual_of']}, not {self.settings.residual_of}")
        then, now = document["profiles"], self._measures()

        def known(name: str) -> bool:
            return name in now and then.get(name) == now[name]

        self._decisions = int(document["decisions"])
        self._residuals.take(document["residuals"], known)
        self._cooldown.take(document["cooldown"], known)
        version, words, carried = document["random"]
        self._random.setstate((version, tuple(words), carried))
