"""The bandwidth explorer: which profile a request gets at a bandwidth, and why none of the others."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import ipywidgets
import pandas as pd
import plotly.graph_objects as go

from diffkv_repro.core.files import write_text
from diffkv_repro.explore.panel import Explorer, State, View, as_html
from diffkv_repro.kvserve.controller import Controller, ControllerSettings
from diffkv_repro.kvserve.decision import Decision
from diffkv_repro.kvserve.envelope_facts import GBPS
from diffkv_repro.kvserve.latency import ANY_WORKLOAD, NO_COMPRESSION, Envelope, MeasuredProfile, ServiceContext
from diffkv_repro.study import drawing
from diffkv_repro.study.plots.bandwidth import choice, envelope

MEGABYTE = 1e6
_ENDLESS = 10_000.0  # ms: the slider's right end stands for no SLO at all


def slowed(profiles: Sequence[MeasuredProfile], slowdown: float) -> list[MeasuredProfile]:
    """``profiles`` with every codec ``slowdown`` times slower. Raises ValueError for 0 or less."""
    if not slowdown > 0:
        raise ValueError(f"slowdown is {slowdown}; it must be above 0")
    return [
        dataclasses.replace(profile, encode=profile.encode / slowdown, decode=profile.decode / slowdown)
        for profile in profiles
    ]


def draw_envelope(profiles: Sequence[MeasuredProfile], gbps: float, slowdown: float = 1.0) -> go.Figure:
    """The envelope with every codec ``slowdown`` times slower, marked at ``gbps``. Raises ValueError for 0 or less."""
    if not gbps > 0:
        raise ValueError(f"gbps is {gbps}; it must be above 0")
    given = slowed(profiles, slowdown)
    best = Envelope(given).best(gbps * GBPS).name
    title = f"At {gbps:.3g} Gbps, codecs {slowdown:.3g} times slower: {best}"
    figure = envelope({"thick: the candidates": given}, title=title, at=gbps * GBPS)
    return drawing.finish(figure, "grey: the lower envelope; dotted: its breakpoints; rings: break-even bandwidths")


def decide(
    profiles: Sequence[MeasuredProfile], gbps: float, *, megabytes: float = 100.0, slo_ms: float = math.inf,
    min_quality: float = 0.0, slowdown: float = 1.0,
) -> Decision:  # fmt: skip
    """What the controller chooses for a request of so many megabytes of raw KV, with nothing learnt yet.

    ``min_quality``: least quality, that of the uncompressed cache being 1. Raises ValueError for what cannot be.
    """
    context = ServiceContext(ANY_WORKLOAD, megabytes * MEGABYTE, gbps * GBPS, slo_ms / 1e3, min_quality)
    return Controller(slowed(profiles, slowdown), ControllerSettings(epsilon=0.0)).decide(context)


def draw_choice(profiles: Sequence[MeasuredProfile], decision: Decision, slowdown: float = 1.0) -> go.Figure:
    """The lines of all profiles, their envelope, each B*, and the choice of ``decision``."""
    context = decision.context
    given = slowed(profiles, slowdown)
    poor = {one.name for one in given if one.quality_of(context.workload) < context.min_quality}
    late = "" if decision.keeps_slo else ", and no SLO is kept"
    title = f"At {context.bandwidth / GBPS:.3g} Gbps: {decision.profile.name}{late}"
    figure = choice(given, poor, decision.profile.name, context.bandwidth, 1e9 * context.slo / context.raw_bytes, title)
    size = f"{context.raw_bytes / MEGABYTE:.4g} MB of raw KV, codecs {slowdown:.3g} times slower than measured"
    return drawing.finish(figure, f"{size}; dotted: quality below {context.min_quality:.3g}")


def decision_table(profiles: Sequence[MeasuredProfile], decision: Decision, slowdown: float = 1.0) -> pd.DataFrame:
    """A row a profile: ratio, B*, quality, time, and why it is the choice or is not."""
    context, rows = decision.context, []
    for one in (NO_COMPRESSION, *slowed(profiles, slowdown)):
        seconds = context.raw_bytes * one.seconds_per_byte(context.bandwidth)
        why = decision.reason if one.name == decision.profile.name else decision.refused[one.name]
        rows.append((
            one.name, round(one.ratio, 2), "" if one is NO_COMPRESSION else f"{one.break_even / GBPS:.3g}",
            _quality(one, context), f"{1e3 * seconds:.4g}",
            ("chosen: " if one.name == decision.profile.name else "") + why,
        ))  # fmt: skip
    columns = ["profile", "ratio", "B*, Gbps", "quality", "ms", "why"]
    return pd.DataFrame(rows, columns=columns).set_index("profile")


def bandwidth_explorer(profiles: Sequence[MeasuredProfile]) -> Explorer:
    """Pick profiles, drag bandwidth, SLO, least quality and slow-down of the codecs, see the choice and its reasons."""
    by_name = {profile.name: profile for profile in profiles}
    ends = [math.log10(bandwidth / GBPS) for bandwidth in Envelope(profiles).bandwidths] or [0.0]
    slow = {"continuous_update": False}
    log = ipywidgets.FloatLogSlider
    controls = {
        "profiles": ipywidgets.SelectMultiple(
            options=list(by_name), value=list(by_name), description="profiles", rows=min(6, len(by_name))
        ),
        "gbps": log(
            value=10 ** ends[0] / 2, min=ends[-1] - 0.6, max=ends[0] + 0.6, step=0.02, description="Gbps", **slow
        ),
        "slo_ms": log(value=_ENDLESS, min=0, max=math.log10(_ENDLESS), step=0.02, description="SLO, ms", **slow),
        "min_quality": ipywidgets.FloatSlider(
            value=0, min=0, max=1.2, step=0.01, description="quality ≥", **slow
        ),
        "megabytes": log(value=100, min=0, max=4, step=0.1, description="MB", **slow),
        "slowdown": log(value=1, min=-1, max=1, step=0.05, description="slow-down", **slow),
    }  # fmt: skip

    def asked(state: State) -> dict[str, float]:
        names = ("gbps", "megabytes", "min_quality", "slowdown")
        return {name: state[name] for name in names} | {
            "slo_ms": math.inf if state["slo_ms"] >= _ENDLESS else state["slo_ms"]
        }

    def chosen(state: State) -> list[MeasuredProfile]:
        return [by_name[name] for name in by_name if name in state["profiles"]]

    def show(state: State) -> View:
        given = chosen(state)
        if not given:
            raise ValueError("no profile is picked; pick at least one")
        decision = decide(given, **asked(state))
        table = decision_table(given, decision, state["slowdown"])
        return View(draw_choice(given, decision, state["slowdown"]), as_html(table, "why this one, and why no other"))

    def code(state: State) -> str:
        options = asked(state)
        gbps, slowdown = options.pop("gbps"), options["slowdown"]
        wanted = ", ".join(f"{name}={_literal(value)}" for name, value in options.items())
        return "\n".join([
            "from diffkv_repro.explore import decide, decision_table, draw_choice",
            "from diffkv_repro.kvserve import MeasuredProfile",
            "",
            "profiles = [",
            *(f"    MeasuredProfile({one.name!r}, {one.ratio!r}, {_literal(one.encode)}, {_literal(one.decode)}, "
              f"{one.quality!r})," for one in chosen(state)),
            "]",
            f"decision = decide(profiles, {gbps!r}, {wanted})",
            "print(decision.why)",
            f"figure = draw_choice(profiles, decision, {slowdown!r})",
            f"table = decision_table(profiles, decision, {slowdown!r})",
        ])  # fmt: skip

    def write(state: State, path: Path) -> None:
        write_profiles(path, chosen(state))

    return Explorer(controls, show, code=code, write=write, file="measured_profiles.json")


def write_profiles(path: Path, profiles: Sequence[MeasuredProfile]) -> None:
    """Write measured profiles to a JSON file that :func:`read_profiles` reads."""
    rows = [
        {"name": one.name, "ratio": one.ratio, "encode": str(one.encode), "decode": str(one.decode),
         "quality": dict(one.quality)} for one in profiles
    ]  # fmt: skip
    write_text(path, json.dumps({"profiles": rows}, indent=1) + "\n")


def read_profiles(path: Path) -> list[MeasuredProfile]:
    """What :func:`write_profiles` wrote. Raises ValueError naming the file and what is wrong with it."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        return [_profile(row) for row in document["profiles"]]
    except OSError as error:
        raise ValueError(f"profiles file {path} cannot be read: {error.strerror}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"profiles file {path}: {error}") from error


def _quality(profile: MeasuredProfile, context: ServiceContext) -> str:
    """As text; a profile whose quality was never measured counts as 0 for the controller."""
    known = context.workload in profile.quality or ANY_WORKLOAD in profile.quality
    return f"{profile.quality_of(context.workload):.4g}" if known else "not measured"


def _profile(row: Mapping) -> MeasuredProfile:
    speeds = (float(row[name]) for name in ("encode", "decode"))  # as text, for JSON knows no infinity
    return MeasuredProfile(row["name"], float(row["ratio"]), *speeds, row["quality"])


def _literal(value: float) -> str:
    return 'float("inf")' if value == math.inf else repr(value)
