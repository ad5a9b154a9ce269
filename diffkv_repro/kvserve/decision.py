"""What the controller decides over, and what it says about it: buckets of profiles, candidates, decisions."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from diffkv_repro.kvserve.latency import ANY_WORKLOAD, NO_COMPRESSION, Envelope, MeasuredProfile, ServiceContext


def milliseconds(seconds: float) -> str:
    """Such as "0.125 ms" or "3,260 ms"."""
    found = 1e3 * seconds
    return f"{found:,.0f} ms" if found >= 100 else f"{found:.3g} ms"


class Bucket:
    """The profiles that are good enough for requests of a workload, and their envelope.

    ``least_quality`` is the least quality among them: every request that asks for no more, and for more than the next
    worse profile has, meets this same bucket.
    """

    def __init__(self, workload: str, least_quality: float, profiles: Sequence[MeasuredProfile]) -> None:
        self.workload = workload
        self.least_quality = least_quality
        self.refused = tuple(profile for profile in profiles if profile.quality_of(workload) < least_quality)
        self.profiles = tuple(profile for profile in profiles if profile.quality_of(workload) >= least_quality)
        self.envelope = Envelope(self.profiles)


class Buckets:
    """All buckets of a library of profiles, made once, so that a request waits for a look-up alone.

    The paper's buckets have fixed edges (0, 0.96, 0.99, 1.20). Here an edge lies at each quality that a profile has,
    so that none is lost to rounding a request's least quality up, and none let in by rounding it down.
    """

    def __init__(self, profiles: Sequence[MeasuredProfile]) -> None:
        named = {workload for profile in profiles for workload in profile.quality}
        self._of = {workload: self._make(workload, profiles) for workload in named | {ANY_WORKLOAD}}

    @staticmethod
    def _make(workload: str, profiles: Sequence[MeasuredProfile]) -> tuple[Bucket, ...]:
        # Above all edges no compression alone is left.
        qualities = sorted({profile.quality_of(workload) for profile in profiles})
        return tuple(Bucket(workload, quality, profiles) for quality in [*qualities, float("inf")])

    def find(self, workload: str, min_quality: float) -> Bucket:
        """The bucket of a request. A workload that no profile names has the qualities of ``"*"``."""
        buckets = self._of.get(workload) or self._of[ANY_WORKLOAD]
        return buckets[bisect_left(buckets, min_quality, key=lambda bucket: bucket.least_quality)]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A profile that was considered: seconds of equation 1, the learnt residual, and what speaks against it."""

    profile: MeasuredProfile
    model: float
    residual: float
    refused: str = ""

    @property
    def predicted(self) -> float:
        """Seconds expected: model and residual, never less than nothing."""
        return max(self.model + self.residual, 0.0)


@dataclass(frozen=True)
class Decision:
    """The profile chosen for a request, with the reasons. Give it back to ``Controller.observe`` with the time taken.

    ``candidates`` are those that were timed by the model: the envelope's best, its neighbours and no compression.
    ``bucket`` and ``context`` are None where the controller could not use what it was given.
    """

    number: int
    profile: MeasuredProfile
    reason: str
    context: ServiceContext | None = None
    bucket: Bucket | None = None
    candidates: tuple[Candidate, ...] = ()
    explored: bool = False

    @cached_property
    def chosen(self) -> Candidate | None:
        """The candidate that was chosen, None where no prediction was made."""
        return next((one for one in self.candidates if one.profile is self.profile), None)

    @property
    def predicted(self) -> float | None:
        """Seconds expected of the chosen profile, None where no prediction was made."""
        return self.chosen.predicted if self.chosen else None

    @property
    def keeps_slo(self) -> bool:
        """Whether the chosen profile is expected to keep the SLO; where not, recomputing may be the better way."""
        return self.context is not None and self.predicted is not None and self.predicted <= self.context.slo

    @cached_property
    def refused(self) -> dict[str, str]:
        """Why each other profile was not chosen, by name. Worded when asked for, not while a request waits."""
        if self.bucket is None or self.context is None:
            return {}
        found = {one.profile.name: one.refused or self._slower(one) for one in self.candidates}
        for profile in self.bucket.refused:
            quality = profile.quality_of(self.context.workload)
            found[profile.name] = f"quality {quality:.4g} is below {self.context.min_quality:.4g}"
        on_envelope = {profile.name for profile in self.bucket.envelope.profiles}
        for profile in (NO_COMPRESSION, *self.bucket.profiles):
            away = "the best at other bandwidths" if profile.name in on_envelope else "the best at no bandwidth"
            found.setdefault(profile.name, away if self.candidates else "nothing was predicted")
        found.pop(self.profile.name, None)
        return found

    @cached_property
    def why(self) -> str:
        """The decision in words, a line a profile."""
        expected = "" if self.predicted is None else f", {milliseconds(self.predicted)} expected"
        lines = [f"{self.profile.name}: {self.reason}{expected}"]
        return "\n".join(lines + [f"not {name}: {reason}" for name, reason in self.refused.items()])

    def _slower(self, one: Candidate) -> str:
        text = f"{milliseconds(one.predicted)} expected"
        return f"{text}, faster, but exploring" if one.predicted < (self.predicted or 0.0) else text
