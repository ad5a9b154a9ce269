"""The engine's sense of time: the machine's, unless a measurement puts its own in place."""

import time


class Clock:
    """Seconds that pass by themselves."""

    def now(self) -> float:
        """Seconds from some fixed point."""
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        """Come back so many seconds later."""
        time.sleep(max(seconds, 0.0))
