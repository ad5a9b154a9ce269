"""Goodput of a link, from what the far side has acknowledged and when."""

import math
import threading
import time
from collections.abc import Callable


class GoodputEstimator:
    """Bytes per second that a transfer may expect, from acknowledged bytes and the time they took.

    Bytes over seconds, both summed with a weight that halves every ``half_life`` seconds: a long transfer counts more
    than a short one, and an old one less than a new one. Where transfers share the link, it is the share that one of
    them gets. Acknowledgements of fewer than ``least_bytes`` say more about latency than about bandwidth and are left
    out, as are those whose bytes or seconds cannot be. Safe to share between threads.
    """

    def __init__(
        self, *, half_life: float = 2.0, stale_after: float = 60.0, least_bytes: int = 4096,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        for name, value in (("half_life", half_life), ("stale_after", stale_after)):
            if not value > 0:
                raise ValueError(f"{name} is {value} s; it must be above 0")
        if least_bytes < 1:
            raise ValueError(f"least_bytes is {least_bytes}; it must be at least 1")
        self.half_life, self.stale_after, self.least_bytes = half_life, stale_after, least_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._bytes = self._seconds = 0.0
        self._last: float | None = None
        self.left_out = 0

    def acknowledge(self, sent_bytes: float, seconds: float) -> None:
        """Note that ``sent_bytes``, as they went over the wire, arrived within ``seconds`` of the first being sent."""
        usable = math.isfinite(sent_bytes) and math.isfinite(seconds) and seconds > 0
        with self._lock:
            if not usable or sent_bytes < self.least_bytes:
                self.left_out += 1
                return
            now = self._clock()
            # A clock that steps back ages nothing.
            kept = 1.0 if self._last is None else 0.5 ** (max(0.0, now - self._last) / self.half_life)
            self._bytes = self._bytes * kept + sent_bytes
            self._seconds = self._seconds * kept + seconds
            self._last = now

    @property
    def age(self) -> float | None:
        """Seconds since the last acknowledgement that counted, None before the first."""
        with self._lock:
            return None if self._last is None else max(0.0, self._clock() - self._last)

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second; None before the first acknowledgement, and when the last is older than ``stale_after``."""
        age = self.age
        if age is None or age > self.stale_after:
            return None
        with self._lock:
            return self._bytes / self._seconds
