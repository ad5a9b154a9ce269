"""What the controller learns at run time: residuals of the model, and which profiles rest (section 6.2)."""

import math
from collections import deque
from collections.abc import Callable
from typing import Any

Key = tuple[str | float, ...]


class Residuals:
    """Observed minus predicted seconds per raw byte, learnt with exponential weights (EWMA).

    Per byte, because a codec that slows down by some factor then has the same residual for requests of every size and
    on links of every speed. Of each surprise, ``shared`` goes into one slow-down of all codecs (whatever else runs on
    a GPU slows all of them) and the rest into the profile's own residual; with 0 there are the paper's residuals alone.
    The first surprises of a key count in full, as in a plain mean. What was learnt of a profile halves with every
    ``memory`` decisions that do not use it, so that one that was slow for a while is tried again. The common slow-down
    always fades like that: else it could stay for good, with the opposite in the own residual of the profile in use.
    """

    def __init__(self, alpha: float, shared: float, memory: float) -> None:
        self.alpha, self.shared, self.memory = alpha, shared, memory
        self._slowdown, self._slowed = 0.0, 0
        self._seen: dict[Key, tuple[int, float, int]] = {}

    def get(self, key: Key, codec_seconds: float, now: int) -> float:
        """Seconds per byte to add to the model's at decision ``now``, for a profile of that codec time per byte."""
        return self._own(key, now) + self.slowdown(now) * codec_seconds

    def slowdown(self, now: int) -> float:
        """By how much all codecs are slower than measured, as a share of their time: 1 is twice the time."""
        return self._slowdown * 0.5 ** (max(0, now - self._slowed) / self.memory)

    def _own(self, key: Key, now: int) -> float:
        _, own, last = self._seen.get(key, (0, 0.0, now))
        return own * 0.5 ** (max(0, now - last - 1) / self.memory)

    def add(self, key: Key, codec_seconds: float, surprise: float, now: int, *, codec_share: float) -> None:
        """Take a surprise into account, in seconds per byte over model and residual.

        ``codec_share``: how much of the predicted time was the codec's; a surprise is put down to it in proportion.
        """
        count = self._seen.get(key, (0,))[0] + 1
        step = max(self.alpha, 1 / count) * surprise
        common = self.shared * codec_share * step if codec_seconds else 0.0
        if codec_seconds:
            slowdown = self.slowdown(now) + common / codec_seconds
            self._slowdown, self._slowed = max(slowdown, -1.0), now  # no codec takes less than no time
        self._seen[key] = (count, self._own(key, now) + step - common, now)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a file."""
        entries = [
            {"key": list(key), "n": n, "seconds_per_byte": own, "last": last}
            for key, (n, own, last) in self._seen.items()
        ]
        return {"slowdown": self._slowdown, "slowed": self._slowed, "own": entries}

    def take(self, document: dict[str, Any], known: Callable[[str], bool]) -> None:
        """Replace all by what :meth:`as_dict` gave, without the profiles (last in a key) that are not ``known``."""
        self._slowdown, self._slowed = _finite(document["slowdown"]), int(document["slowed"])
        self._seen = {
            tuple(entry["key"]): (max(1, int(entry["n"])), _finite(entry["seconds_per_byte"]), int(entry["last"]))
            for entry in document["own"]
            if known(entry["key"][-1])
        }


def _finite(value: Any) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{value} was learnt; it must be finite")
    return float(value)


class Cooldown:
    """A profile that broke the SLO in ``violations`` of its last ``uses`` rests for ``rest`` decisions.

    The last uses, as the paper says; the released code counts over the lifetime.
    """

    def __init__(self, violations: int, uses: int, rest: int) -> None:
        self.violations, self.uses, self.rest = violations, uses, rest
        self._recent: dict[str, deque[bool]] = {}
        self._until: dict[str, int] = {}

    def left(self, name: str, now: int) -> int:
        """Decisions that ``name`` still sits out at decision ``now``."""
        return max(0, self._until.get(name, 0) - now)

    def add(self, name: str, violated: bool, now: int) -> None:
        """Note a use; with the last violation that it takes, the profile rests and its record starts anew."""
        recent = self._recent.setdefault(name, deque(maxlen=self.uses))
        recent.append(violated)
        if sum(recent) >= self.violations:
            self._until[name] = now + self.rest
            recent.clear()

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a file."""
        return {"recent": {name: list(seen) for name, seen in self._recent.items()}, "until": dict(self._until)}

    def take(self, document: dict[str, Any], known: Callable[[str], bool]) -> None:
        """Replace all by what :meth:`as_dict` gave, without the profiles that are not ``known``."""
        self._recent = {
            name: deque(map(bool, seen), maxlen=self.uses) for name, seen in document["recent"].items() if known(name)
        }
        self._until = {name: int(until) for name, until in document["until"].items() if known(name)}
