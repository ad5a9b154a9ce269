"""Experiments with real transfers between two processes: closed loop (one at a time) and open loop (Poisson)."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from diffkv_repro.kvserve.client import KVClient
from diffkv_repro.kvserve.envelope_facts import GBPS
from diffkv_repro.kvserve.frame import Frame
from diffkv_repro.kvserve.header import FrameError
from diffkv_repro.kvserve.latency import NO_COMPRESSION, MeasuredProfile
from diffkv_repro.kvserve.terms import Ask, Fetched

ADAPTIVE = "adaptive"


def row_of(fetched: Fetched, arm: str, gbps: float) -> dict[str, float | str]:
    """One transfer as a row: seconds of its stages, ``seconds`` of all but the prefill, what it was predicted to take.

    ``communication`` is what is left of the whole when the two ends' work is taken out: with stages in turn, the link
    and waiting for it.
    """
    stages = fetched.stages
    seconds = stages.total - stages.prefill
    return {
        "arm": arm, "gbps": gbps, "profile": fetched.profile, "seconds": seconds, "encode": stages.encode,
        "send": stages.send, "decode": stages.decode, "queue": stages.queue, "prefill": stages.prefill,
        "communication": seconds - stages.encode - stages.decode, "sent": fetched.sent_bytes,
        "ratio": fetched.ratio, "goodput": fetched.goodput or float("nan"),
    }  # fmt: skip


def closed_loop(
    client: KVClient, ask: Ask, arms: Sequence[str], gbps: Sequence[float], *, repeats: int,
    step: Callable[[], None] = lambda: None,
) -> pd.DataFrame:  # fmt: skip
    """One request at a time over a link shaped to each of ``gbps``; the arms take turns, ``none`` first.

    An arm is the name of a profile, or ``adaptive``. The first request, which computes the cache, is not counted: what
    the model takes is the same for all arms. The server has to run as an experiment.
    """
    client.fetch(ask)
    order = [NO_COMPRESSION.name, *(arm for arm in arms if arm != NO_COMPRESSION.name)]
    rows = []
    for repeat in range(repeats):
        for rate in gbps:
            for arm in order:
                options = {"rate": rate * GBPS} | ({} if arm == ADAPTIVE else {"profile": arm})
                fetched = client.fetch(replace(ask, options=options))
                # The prefill was not run again: its seconds are those of the first time, and not in the total.
                stages = replace(fetched.stages, prefill=0.0)
                rows.append(row_of(replace(fetched, stages=stages), arm, rate) | {"repeat": repeat})
            step()
    return pd.DataFrame(rows)


def calibrated(frame: pd.DataFrame, raw_bytes: int) -> tuple[list[MeasuredProfile], float]:
    """Profiles as these transfers show them (medians), and the seconds that each takes whatever is sent.

    Codec times are those above no compression's, which are in T_model; so is what the two processes take to speak.
    """
    rows = frame[frame["arm"] == frame["profile"]]
    medians = (
        rows.assign(rest=rows["seconds"] - rows["send"]).groupby("arm")[["encode", "decode", "ratio", "rest"]].median()
    )
    plain = medians.loc[NO_COMPRESSION.name]
    found = []
    for name, own in medians.iterrows():
        if name != NO_COMPRESSION.name:
            encode, decode = (raw_bytes / max(own[way] - plain[way], 1e-9) for way in ("encode", "decode"))
            found.append(MeasuredProfile(str(name), own["ratio"], encode, decode))
    return found, float(plain["rest"])


def predicted(frame: pd.DataFrame, raw_bytes: int) -> pd.Series:
    """Equation 1 for every row, with codec times from the *other* bandwidths alone.

    The link is as fast as uncompressed transfers found it at that rate.
    """
    goodput = frame[frame["arm"] == NO_COMPRESSION.name].groupby("gbps")["goodput"].median()
    values = pd.Series(0.0, index=frame.index)
    for gbps, rows in frame.groupby("gbps"):
        profiles, common = calibrated(frame[frame["gbps"] != gbps], raw_bytes)
        known = {one.name: one for one in (NO_COMPRESSION, *profiles)}
        for row in rows.itertuples():
            values[row.Index] = common + raw_bytes * known[row.profile].seconds_per_byte(goodput[gbps])
    return values


def signs(frame: pd.DataFrame, raw_bytes: int, *, margin: float = 0.1) -> tuple[int, int]:
    """Of the profiles and bandwidths further than ``margin`` from B*, at how many T_p - T_0 has the right sign; of all.

    Seconds are medians; B* is that of all transfers.
    """
    profiles, _ = calibrated(frame, raw_bytes)
    medians = frame.groupby(["gbps", "arm"])["seconds"].median()
    goodput = frame[frame["arm"] == NO_COMPRESSION.name].groupby("gbps")["goodput"].median()
    right = []
    for gbps, bandwidth in goodput.items():
        for one in profiles:
            if abs(bandwidth / one.break_even - 1) > margin if one.break_even else True:
                pays = medians[gbps, one.name] < medians[gbps, NO_COMPRESSION.name]
                right.append(pays == (bandwidth < one.break_even))
    return sum(right), len(right)


def over_best(frame: pd.DataFrame) -> pd.Series:
    """By bandwidth, what the adaptive arm's requests take on average over the best static profile.

    A transfer by a profile is the same whoever chose it, so both are pooled: a request counts as the median of all
    transfers by its profile, and two measurements of one thing are not compared. All requests count, those among them
    by which a controller finds out what is best.
    """
    medians = frame.groupby(["gbps", "profile"])["seconds"].median()
    best = medians.groupby("gbps").min()
    chosen = frame[frame["arm"] == ADAPTIVE]
    taken = pd.Series([medians[row.gbps, row.profile] for row in chosen.itertuples()], index=chosen.index)
    return taken.groupby(chosen["gbps"]).mean() / best


def open_loop(
    clients: Sequence[KVClient], ask: Ask, arm: str, gbps: float, arrivals: Sequence[float]
) -> pd.DataFrame:  # fmt: skip
    """Requests at ``arrivals`` (seconds), whatever has become of the earlier ones, over one shared link.

    A client serves one request at a time; a request without a free one waits for it, which counts.
    """
    options = {"rate": gbps * GBPS} | ({} if arm == ADAPTIVE else {"profile": arm})
    asked = replace(ask, options=options, overlap=False)
    clients[0].fetch(asked)
    free, changed = list(clients), threading.Condition()
    rows: list[dict] = []
    problems: list[Exception] = []
    began = time.monotonic()

    def serve(arrival: float) -> None:
        with changed:
            while not free:
                changed.wait()
            client = free.pop()
        waited = time.monotonic() - began - arrival
        try:
            fetched = client.fetch(asked)
            stages = replace(fetched.stages, prefill=0.0, total=fetched.stages.total + waited)
            rows.append(row_of(replace(fetched, stages=stages), arm, gbps) | {"arrival": arrival})
        except Exception as error:
            problems.append(error)
        finally:
            with changed:
                free.append(client)
                changed.notify()

    threads = [threading.Thread(target=serve, args=(arrival,)) for arrival in arrivals]
    for arrival, thread in zip(arrivals, threads, strict=True):
        time.sleep(max(0.0, arrival - (time.monotonic() - began)))
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]
    return pd.DataFrame(rows).sort_values("arrival", ignore_index=True)


def poisson(rate: float, count: int, seed: int) -> np.ndarray:
    """``count`` arrival times of ``rate`` a second, the first at 0."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, count)
    return np.cumsum(gaps) - gaps[0]


def refused_share(frame: Frame, count: int, seed: int) -> float:
    """Share of ``count`` copies of a frame, each with a byte changed or, every fourth, cut short, that are refused."""
    whole, generator, refused = frame.to_bytes(), np.random.default_rng(seed), 0
    for number in range(count):
        at = int(generator.integers(len(whole)))
        damaged = bytearray(whole)
        damaged[at] ^= int(generator.integers(1, 256))
        try:
            Frame.from_bytes(whole[:at] if number % 4 == 0 else bytes(damaged), frame.header.layout)
        except FrameError:
            refused += 1
    return refused / count
