"""Links of a chosen speed for experiments: a token bucket in the sender, or the kernel's (tc) where it is permitted."""

import math
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Shaper:
    """An ideal link of ``rate`` bytes per second: a token bucket as deep as one chunk, filled in virtual time.

    A chunk may leave at :meth:`departure`, when a link of that speed would have carried all of it; a sender that wakes
    up late does not lower the rate, and an idle link saves nothing up. ``None`` shapes nothing, 0 is a cut link. Safe
    to share between threads, and between transfers, which then share the link.
    """

    def __init__(self, rate: float | None = None) -> None:
        self._lock = threading.RLock()
        self._free = -math.inf
        self.rate = rate

    @property
    def rate(self) -> float | None:
        """Bytes per second."""
        return self._rate

    @rate.setter
    def rate(self, rate: float | None) -> None:
        if rate is not None and not rate >= 0:
            raise ValueError(f"rate is {rate} bytes/s; it must be at least 0, or None for no shaping")
        self._rate = rate

    def departure(self, size: int, available: float) -> float:
        """When a chunk of ``size`` bytes that was there at ``available`` has gone over the link, inf for never."""
        rate = self._rate
        if rate is None:
            return available
        with self._lock:
            return max(self._free, available) + size / rate if rate else math.inf

    def sent(self, departure: float) -> None:
        """Note that the chunk of that departure was sent."""
        with self._lock:
            self._free = max(self._free, departure)

    def reserve(self, size: int, available: float) -> float:
        """The departure of a chunk that is sure to be sent then: the link is taken until it has gone."""
        with self._lock:
            departure = self.departure(size, available)
            if departure < math.inf:
                self.sent(departure)
            return departure


class NotPermitted(RuntimeError):
    """tc is not there, or this process may not use it."""


@contextmanager
def shaped_by_tc(bytes_per_second: float, *, device: str = "lo") -> Iterator[None]:
    """Shape all that leaves ``device`` with the kernel's token bucket (tc tbf) during the block.

    True up to about 1 Gbps on a loopback. Raises NotPermitted where tc is missing or refuses (it needs
    CAP_NET_ADMIN; a network namespace of one's own, ``unshare -n``, has it).
    """
    if not bytes_per_second > 0:
        raise ValueError(f"bytes_per_second is {bytes_per_second}; it must be above 0")
    tool = shutil.which("tc") or shutil.which("tc", path="/usr/sbin:/sbin")
    if tool is None:
        raise NotPermitted("tc is not installed (package iproute2)")
    # A packet larger than the bucket never passes, and those of a loopback have up to 64 KiB and their headers.
    burst = max(1 << 18, int(bytes_per_second / 500))
    rate = ["rate", f"{int(8 * bytes_per_second)}bit", "burst", str(burst), "latency", "400ms"]
    _tc([tool, "qdisc", "replace", "dev", device, "root", "tbf", *rate])
    try:
        yield
    finally:
        _tc([tool, "qdisc", "del", "dev", device, "root"])


def _tc(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotPermitted(f"{' '.join(command)}: {done.stderr.strip() or 'refused'}")
