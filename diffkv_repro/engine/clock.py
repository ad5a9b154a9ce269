"""The engine's sense of time: the machine's, or one that a measurement moves on."""

import time


class Clock:
    """Seconds that pass by themselves."""

    def now(self) -> float:
        """Seconds from some fixed point."""
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        """Come back so many seconds later."""
        time.sleep(max(seconds, 0.0))


class VirtualClock(Clock):
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self._at = 0.0

    def now(self) -> float:
        return self._at

    def sleep(self, seconds: float) -> None:
        self._at += max(seconds, 0.0)
