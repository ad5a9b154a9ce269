"""What the commands of ``diffkv-repro serve`` do: open a source, measure profiles on it, describe what went over."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from diffkv_repro.core.threads import one_thread
from diffkv_repro.kvserve.client import KVClient
from diffkv_repro.kvserve.decision import Decision
from diffkv_repro.kvserve.disagg import DecodeWorker, Prompted, greedy, measure_streams
from diffkv_repro.kvserve.keys import Keys
from diffkv_repro.kvserve.latency import ANY_WORKLOAD, MeasuredProfile
from diffkv_repro.kvserve.layout import KVLayout
from diffkv_repro.kvserve.link import LinkSettings
from diffkv_repro.kvserve.profile import Profile
from diffkv_repro.kvserve.quality import Judge
from diffkv_repro.kvserve.sources import MadeUpSource, ModelSource, Source
from diffkv_repro.kvserve.store import PrefixStore
from diffkv_repro.kvserve.store_worker import fill
from diffkv_repro.kvserve.terms import Served, prompt_of
from diffkv_repro.models import load_model

GBPS = 1e9 / 8
_JUDGED, _CONTINUED = 256, 48
_SHORT = (8, 64)
_RANKED, _PER_TOKEN = 4000, 8  # characters


def open_source(model: str, made_up: str | None, text: str) -> Source:
    """A model's prefill, its heads ranked on ``text``, or random numbers of a shape as ``30x3x64``.

    ``30x3x64@0.01``: each token's prefill takes 10 ms.
    """
    if made_up is None:
        return ModelSource(load_model(model), head_text=text[:_RANKED])
    shape, _, seconds = made_up.partition("@")
    try:
        layers, heads, dim = map(int, shape.split("x"))
        each = float(seconds or 0)
    except ValueError:
        raise ValueError(f"--made-up is {made_up!r}; it must be LAYERSxHEADSxDIM, as 30x3x64") from None
    return MadeUpSource(KVLayout(layers, heads, dim, torch.float16, model="made up"), seconds=each)


def measured_profiles(
    source: Source, names: Sequence[str], tokens: int, *, text: str = "", judge: bool = True
) -> tuple[dict[str, Profile], dict[float, list[MeasuredProfile]]]:
    """The named profiles with their costs on this machine, by raw bytes, and what they do to a model on ``text``.

    Short prompts have costs of their own: what a layer takes whatever its size is then most of it. Without ``judge``
    every profile counts as good as no compression.
    """
    profiles = {name: Profile.named(name) for name in names}
    for profile in profiles.values():
        profile.codec.require()
    ids, quality = list(range(1, tokens + 1)), {}
    if isinstance(source, ModelSource):
        all_ids = source.loaded.tokenizer(text[: _PER_TOKEN * tokens], return_tensors="pt").input_ids[:, :tokens]
        ids = all_ids[0].tolist()
        if judge:
            quality = _judged(source, profiles, all_ids[:, :_JUDGED])
    counts = sorted({count for count in (*_SHORT, len(ids)) if count <= len(ids)})
    return profiles, {
        float(source.layout.raw_bytes(count)): measure_streams(profiles, source, ids[:count], quality=quality)
        for count in counts
    }


def _judged(source: ModelSource, profiles: Mapping[str, Profile], ids: torch.Tensor) -> dict[str, dict[str, float]]:
    assets = source.compute(ids[0, :8].tolist()).assets
    with one_thread():
        judge = Judge(source.loaded, [ids], continuation=min(_CONTINUED, ids.shape[1] // 2))
        return {name: {"*": judge.judge(profile, assets).relative} for name, profile in profiles.items()}


def words_of(measured: Mapping[float, Sequence[MeasuredProfile]], *, judged: bool) -> str:
    """What was measured, a line a profile; quality only where it was ``judged``."""
    lines = []
    for size, those in measured.items():
        lines.append(f"measured on {size / 1e6:.2f} MB of cache:")
        lines += [
            f"    {one.name}: {one.ratio:.2f} times smaller, encodes {one.encode / 1e6:.0f} and decodes "
            f"{one.decode / 1e6:.0f} MB/s, pays below {one.break_even / GBPS:.3f} Gbps"
            + (f", quality {one.quality_of(ANY_WORKLOAD):.3f}" if judged else "")
            for one in those
        ]
    return "\n".join(lines)


def fill_store(
    store: PrefixStore, source: Source, profiles: Mapping[str, Profile], texts: Mapping[str, str],
    say: Callable[[str], Any],
) -> None:  # fmt: skip
    """Keep the cache of each text, by name, in every form."""
    for name, text in texts.items():
        if isinstance(source, ModelSource):
            ids = prompt_of(source.loaded.tokenizer(text).input_ids)
        else:
            ids = tuple(int(word) for word in text.split())
        say(
            f"{name}: {len(ids)} tokens in {1 + len(profiles)} forms, {fill(store, source, ids, profiles) / 1e6:.1f} MB"
        )


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
