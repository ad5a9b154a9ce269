"""Discrete-event simulation of requests that share one link: what queueing does to completion times.

Each request is prefilled on arrival, encoded, sent and decoded; the encoder, the link and the decoder serve one request
after another, in the order in which they come to each.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from diffkv_repro.kvserve.controller import Controller, ControllerSettings
from diffkv_repro.kvserve.goodput import GoodputEstimator
from diffkv_repro.kvserve.latency import NO_COMPRESSION, MeasuredProfile, ServiceContext


@dataclass(frozen=True)
class OpenLoop:
    """Requests of ``raw_bytes`` each at ``arrivals`` (seconds) over a link of ``bandwidth`` bytes a second.

    ``prefill`` and ``decode`` are model seconds of a request; requests do not wait for one another's.
    """

    arrivals: Sequence[float]
    raw_bytes: float
    bandwidth: float
    prefill: float = 0.0
    decode: float = 0.0

    def __post_init__(self) -> None:
        if not len(self.arrivals) or any(b < a for a, b in zip(self.arrivals[:-1], self.arrivals[1:], strict=True)):
            raise ValueError(f"{len(self.arrivals)} arrivals; at least one is needed, in order")
        for name in ("raw_bytes", "bandwidth"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")

    @property
    def offered(self) -> float:
        """Load of the uncompressed link: how many seconds of sending arrive in a second."""
        count = len(self.arrivals)
        span = self.arrivals[-1] - self.arrivals[0]
        return (count - 1) * self.raw_bytes / self.bandwidth / span if span else float("inf")

    def static(self, profile: MeasuredProfile) -> pd.DataFrame:
        """All requests by one profile."""
        return self._run(lambda *_: (profile, None), lambda *_: None)

    def adaptive(self, profiles: Sequence[MeasuredProfile], settings: ControllerSettings | None = None) -> pd.DataFrame:
        """Each by what the controller chooses, from the goodput of those before it.

        Goodput includes waiting for the link: of one that is shared, the share is what a request may expect.
        """
        controller = Controller(profiles, settings or ControllerSettings(epsilon=0))
        clock = [0.0]
        link = GoodputEstimator(half_life=10.0, stale_after=1e9, least_bytes=1, clock=lambda: clock[0])

        def choose(now: float) -> tuple[MeasuredProfile, object]:
            clock[0] = now
            decision = controller.decide(ServiceContext("any", self.raw_bytes, link.bandwidth or self.bandwidth))
            return decision.profile, decision

        def learn(now: float, row: dict, decision: object) -> None:
            clock[0] = now
            link.acknowledge(row["sent"], row["queue"] + row["send"])

        return self._run(choose, learn)

    def _run(self, choose: Callable, learn: Callable) -> pd.DataFrame:
        """Events in time order: a request is decided when its prefill ends, and learnt from when it is decoded."""
        encoder = link = decoder = 0.0
        events: list[tuple[float, int, str, dict]] = []
        for number, arrival in enumerate(self.arrivals):
            heapq.heappush(events, (arrival + self.prefill, number, "decide", {"arrival": arrival}))
        rows = []
        while events:
            now, number, kind, row = heapq.heappop(events)
            if kind == "decide":
                profile, row["decision"] = choose(now)
                row["profile"], row["sent"] = profile.name, self.raw_bytes / profile.ratio
                row["encode"] = self.raw_bytes / profile.encode
                row["decode"] = self.raw_bytes / profile.decode
                encoder = max(encoder, now) + row["encode"]
                row["waited"] = encoder - row["encode"] - now
                heapq.heappush(events, (encoder, number, "send", row))
            elif kind == "send":
                start = max(link, now)
                row["queue"], row["send"] = start - now, row["sent"] / self.bandwidth
                link = start + row["send"]
                heapq.heappush(events, (link, number, "decode", row))
            elif kind == "decode":
                start = max(decoder, now)
                row["waited"] += start - now
                decoder = start + row["decode"]
                heapq.heappush(events, (decoder, number, "done", row))
            else:
                row["seconds"] = now - row["arrival"] + self.decode
                row["communication"] = row["queue"] + row["send"]
                learn(now, row, row.pop("decision"))
                rows.append(row)
        return pd.DataFrame(rows).sort_values("arrival", ignore_index=True)


def sweep(
    raw_bytes: float, profiles: Sequence[MeasuredProfile], gbps: Sequence[float], *, rate: float, requests: int,
    seeds: int, prefill: float = 0.0, decode: float = 0.0, closed: bool = False,
) -> pd.DataFrame:  # fmt: skip
    """Mean seconds of a request by bandwidth (rows) and arm (columns): each profile, ``none`` and ``adaptive``.

    ``rate`` requests a second arrive in a Poisson process, the same for all arms; ``closed``: one at a time instead.
    """
    found = []
    for value in gbps:
        sums: dict[str, list[float]] = {}
        for seed in range(seeds):
            gaps = np.random.default_rng(seed).exponential(1 / rate, requests)
            arrivals = np.arange(requests) * 1e6 if closed else np.cumsum(gaps) - gaps[0]
            load = OpenLoop(tuple(arrivals), raw_bytes, value * 1e9 / 8, prefill, decode)
            runs = {one.name: load.static(one) for one in (NO_COMPRESSION, *profiles)}
            runs["adaptive"] = load.adaptive(profiles)
            for name, run in runs.items():
                sums.setdefault(name, []).append(float(run["seconds"].mean()))
        found.append({"gbps": value} | {name: float(np.mean(values)) for name, values in sums.items()})
    return pd.DataFrame(found).set_index("gbps")
