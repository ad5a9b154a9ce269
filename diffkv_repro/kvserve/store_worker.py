"""Provider of a prefix store: sends the longest stored prefix in the form that arrives first, or has it recomputed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from diffkv_repro.kvserve.controller import Controller, ControllerSettings
from diffkv_repro.kvserve.decision import Decision
from diffkv_repro.kvserve.latency import NO_COMPRESSION, MeasuredProfile, ServiceContext
from diffkv_repro.kvserve.profile import Profile
from diffkv_repro.kvserve.sources import Source
from diffkv_repro.kvserve.store import PrefixStore
from diffkv_repro.kvserve.terms import Offer, Refusal, Request, Served


class StoreWorker:
    """Serves from ``store``. ``measured`` are its forms: what is stored is encoded already, so decoding alone counts.

    A request is refused where nothing is stored, and where neither the SLO nor the time that recomputing would take is
    expected to be kept: the decode side then recomputes.
    """

    def __init__(
        self, store: PrefixStore, measured: Sequence[MeasuredProfile], settings: ControllerSettings | None = None
    ) -> None:
        self.store = store
        self.controller = Controller([replace(one, encode=math.inf) for one in measured], settings)

    def offer(self, request: Request, bandwidth: float | None) -> Offer:
        """Look up, decide, and the pieces of the stored frame."""
        layout = self.store.layout
        if request.model != layout.fingerprint.hex():
            raise Refusal(f"another model, dtype or rotary embedding: this store holds {layout}")
        match = self.store.find(request.ids)
        if match is None or match.whole > 2 * len(request.ids):
            raise Refusal("no prefix of this prompt is stored")
        recompute = request.recompute * match.tokens / len(request.ids)
        context = ServiceContext(
            request.workload, layout.raw_bytes(match.whole), bandwidth, min(request.slo, recompute), request.min_quality
        )
        forced = request.options.get("profile")
        if forced is not None:
            decision: Decision | None = None
            name = str(forced)
        else:
            decision = self.controller.decide(context)
            if math.isfinite(context.slo) and decision.predicted is not None and not decision.keeps_slo:
                what = (
                    "recomputing is faster" if recompute < request.slo else f"the SLO of {request.slo:g} s is not kept"
                )
                raise Refusal(f"{what}: {decision.predicted:.3g} s expected")
            name = self._stored(decision, match.forms)
        if name not in match.forms:
            raise Refusal(f"not stored as {name!r}; there are {', '.join(match.forms)}")
        entry = match.forms[name]
        why = decision.why[:4000] if decision is not None else "asked for"
        predicted = (decision.predicted if decision is not None else None) or 0.0
        return Offer(
            self.store.pieces(entry), match.tokens, name, why, predicted, 0.0, match.prompt, decision, whole=match.whole
        )

    def _stored(self, decision: Decision, forms: Mapping[str, object]) -> str:
        """The form chosen or, where this prompt is not kept in it, the fastest that there is."""
        if decision.profile.name in forms or decision.context is None or decision.context.bandwidth is None:
            return decision.profile.name if decision.profile.name in forms else next(iter(forms))
        known = [NO_COMPRESSION, *next(iter(self.controller.profiles.values()))]
        bandwidth = decision.context.bandwidth
        return min((one for one in known if one.name in forms), key=lambda one: one.seconds_per_byte(bandwidth)).name

    def served(self, report: Served) -> None:
        """Learn from what a load took, where it was of the form that was decided."""
        decision = report.offer.subject
        if isinstance(decision, Decision) and decision.profile.name == report.offer.profile:
            self.controller.observe(decision, report.observed, bandwidth=report.goodput)


def fill(store: PrefixStore, source: Source, ids: Sequence[int], profiles: Mapping[str, Profile]) -> int:
    """Compute the cache of ``ids`` and keep it uncompressed and in every form; the bytes of all."""
    computed = source.compute(ids)
    forms = {NO_COMPRESSION.name: Profile()} | dict(profiles)
    return sum(store.put(ids, name, profile, computed).nbytes for name, profile in forms.items())
