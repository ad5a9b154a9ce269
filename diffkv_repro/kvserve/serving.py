"""What the commands of ``diffkv-repro serve`` do: open a source, measure profiles on it, describe what went over."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from diffkv_repro.core.threads import one_thread
from diffkv_repro.kvserve.client import KVClient
from diffkv_repro.kvserve.controller import ControllerSettings
from diffkv_repro.kvserve.decision import Decision
from diffkv_repro.kvserve.disagg import DecodeWorker, PrefillWorker, Prompted, greedy, measure_streams
from diffkv_repro.kvserve.keys import Keys
from diffkv_repro.kvserve.latency import MeasuredProfile
from diffkv_repro.kvserve.layout import KVLayout
from diffkv_repro.kvserve.link import LinkSettings
from diffkv_repro.kvserve.profile import Profile
from diffkv_repro.kvserve.quality import Judge
from diffkv_repro.kvserve.server import Served
from diffkv_repro.kvserve.sources import MadeUpSource, ModelSource, Source
from diffkv_repro.models import load_model
from diffkv_repro.workloads import load_texts

GBPS = 1e9 / 8
_JUDGED, _CONTINUED = 256, 48
_SHORT = (8, 64)


def open_source(model: str, made_up: str | None) -> Source:
    """A model's prefill, or random numbers of a shape as ``30x3x64``."""
    if made_up is None:
        return ModelSource(load_model(model), head_text=_text())
    try:
        layers, heads, dim = map(int, made_up.split("x"))
    except ValueError:
        raise ValueError(f"--made-up is {made_up!r}; it must be LAYERSxHEADSxDIM, as 30x3x64") from None
    return MadeUpSource(KVLayout(layers, heads, dim, torch.float16, model="made up"))


def measured_profiles(
    source: Source, names: Sequence[str], tokens: int
) -> tuple[dict[str, Profile], dict[float, list[MeasuredProfile]]]:
    """The named profiles with their costs on this machine, by raw bytes, and, for a model, what they do to its text.

    Short prompts have costs of their own: what a layer takes whatever its size is then most of it.
    """
    profiles = {name: Profile.named(name) for name in names}
    for profile in profiles.values():
        profile.codec.require()
    ids, quality = list(range(1, tokens + 1)), {}
    if isinstance(source, ModelSource):
        all_ids = source.loaded.tokenizer(_text(), return_tensors="pt").input_ids[:, :tokens]
        ids = all_ids[0].tolist()
        assets = source.compute(ids[:8]).assets
        with one_thread():
            judge = Judge(source.loaded, [all_ids[:, :_JUDGED]], continuation=min(_CONTINUED, len(ids) // 2))
            quality = {name: {"*": judge.judge(profile, assets).relative} for name, profile in profiles.items()}
    counts = sorted({count for count in (*_SHORT, len(ids)) if count <= len(ids)})
    return profiles, {
        float(source.layout.raw_bytes(count)): measure_streams(profiles, source, ids[:count], quality=quality)
        for count in counts
    }


def prefill_worker(
    source: Source, names: Sequence[str], tokens: int, say: Callable[[str], Any],
    settings: ControllerSettings | None = None,
) -> PrefillWorker:  # fmt: skip
    """A prefill worker with the named profiles, measured here and now."""
    profiles, measured = measured_profiles(source, names, tokens)
    for size, those in measured.items():
        say(f"measured on {size / 1e6:.2f} MB of cache:")
        for one in those:
            say(f"    {one.name}: {one.ratio:.2f} times smaller, encodes {one.encode / 1e6:.0f} and decodes "
                f"{one.decode / 1e6:.0f} MB/s, pays below {one.break_even / GBPS:.3f} Gbps, "
                f"quality {one.quality_of('*'):.3f}")  # fmt: skip
    return PrefillWorker(source, profiles, measured, settings)


def describe(report: Served) -> str:
    """A finished transfer in words, with the decision that led to it."""
    offer = report.offer
    rate = "" if report.goodput is None else f" at {report.goodput / GBPS:.3f} Gbps"
    times = {
        "prefill": report.prefill, "encode": report.encode, "send": report.send, "decode": report.decode,
        "observed": report.observed,
    }  # fmt: skip
    spent = ", ".join(f"{name} {1e3 * seconds:.0f} ms" for name, seconds in times.items())
    why = offer.subject.why if isinstance(offer.subject, Decision) else offer.why
    lines = [f"{offer.tokens} tokens by {offer.profile}: {report.sent_bytes / 1e6:.2f} MB{rate}; {spent}"]
    return "\n".join(lines + [f"    {line}" for line in why.splitlines()])


def how_it_came(done: Prompted) -> str:
    """Where a decode worker had a cache from, in words."""
    if done.fetched is None:
        return f"prefilled here, in {1e3 * done.seconds:.0f} ms: {done.reason}"
    fetched = done.fetched
    return (
        f"{fetched.kv.tokens} tokens arrived by {fetched.profile} in {1e3 * done.seconds:.0f} ms, "
        f"{fetched.sent_bytes / 1e6:.2f} MB, {fetched.ratio:.2f} times smaller"
    )


def decode_texts(
    model: str, texts: Sequence[str], tokens: int, say: Callable[[str], Any], *, endpoint: str | None,
    keys: Keys | None, patience: float, terms: Mapping[str, Any],
) -> None:  # fmt: skip
    """Complete each text, with caches from ``endpoint``, or computed here where that is None or fails."""
    loaded = load_model(model)
    source = ModelSource(loaded, head_text=None)
    settings = LinkSettings(patience=patience)
    client = None if endpoint is None else KVClient(source.layout, keys=keys, endpoint=endpoint, settings=settings)
    worker = DecodeWorker(source, client)
    try:
        for text in texts:
            ids = loaded.tokenizer(text).input_ids
            done, said = greedy(loaded, worker, ids, tokens, **terms)
            say(how_it_came(done))
            say(f"    {loaded.tokenizer.decode(said)!r}")
    finally:
        if client is not None:
            client.close()


def _text() -> str:
    return next(iter(load_texts("prose"))).text
