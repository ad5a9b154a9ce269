"""Loads from a prefix store under latency targets, with recomputing as the way out (Figure 14)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pandas as pd

from diffkv_repro.kvserve.disagg import DecodeWorker
from diffkv_repro.kvserve.envelope_facts import GBPS
from diffkv_repro.kvserve.terms import Ask

RECOMPUTE = "recompute"


def with_targets(
    worker: DecodeWorker, ask: Ask, gbps: Sequence[float], targets: Mapping[float, float], recompute: float, *,
    repeats: int,
) -> pd.DataFrame:  # fmt: skip
    """``ask`` at each bandwidth with each target (seconds, by name): a row a request with its ``form`` and ``seconds``.

    At every bandwidth an uncompressed load goes first, so that the server has an idea of the link. ``recompute`` is
    added where the decode side has to compute the cache, which it keeps from its first time.
    """
    rows = []
    for rate in gbps:
        link = {"rate": rate * GBPS}
        worker.client.fetch(replace(ask, options=link | {"profile": "none"}))
        for _ in range(repeats):
            for name, seconds in targets.items():
                done = worker.complete(replace(ask, slo=seconds, options=link))
                if done.fetched is None:
                    row = {"form": RECOMPUTE, "seconds": done.seconds + recompute, "ratio": float("nan")}
                else:
                    row = {"form": done.fetched.profile, "seconds": done.seconds, "ratio": done.fetched.ratio}
                rows.append(row | {"gbps": rate, "target": name, "reason": done.reason})
    return pd.DataFrame(rows)
