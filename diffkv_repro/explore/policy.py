"""The policy explorer: which tokens a policy keeps and how well, what that takes, and what it changes."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path

import ipywidgets
import numpy as np
import pandas as pd
import plotly.graph_objects as go

from diffkv_repro.cache import FullPrecision, Method
from diffkv_repro.diffkv import CompressionPolicy
from diffkv_repro.evaluation.teacher_forced import continued
from diffkv_repro.explore.effect import PRUNED, Effect, effect_of
from diffkv_repro.explore.models import model_named, remember
from diffkv_repro.explore.panel import Action, Explorer, State, View, as_html
from diffkv_repro.explore.statistics import OBSERVED, TextStatistics, observe
from diffkv_repro.models import LoadedModel
from diffkv_repro.study import drawing
from diffkv_repro.study.plots.policy import PRUNED_COLOUR, TIER_COLOURS, policy_effect

PRECISIONS = ("K16V16", "K8V8", "K8V4", "K4V8", "K4V4", "K8V2", "K4V2", "K2V4", "K4V1", "K2V2")
RULES = ("paper: all later queries, Algorithm 1", "released code: last 64 queries, two minima")
ALL = "all"


def draw_policy(effect: Effect) -> go.Figure:
    """Tiers of all tokens, bytes item by item, and the error of each layer."""
    size, shares = effect.size, effect.shares
    title = (
        f"{size.true_ratio:.1%} of FP16 ({size.nominal_ratio:.1%} nominal), {shares[PRUNED]:.1%} pruned; "
        f"predicted agreement {effect.agreement:.0%}"
    )
    figure = policy_effect(effect.tiers.numpy(), effect.layers, effect.names, size, effect.errors.tolist(), title)
    given = effect.statistics
    foot = (
        f"{given.loaded.name}, a prompt of {len(given.tokens)} tokens; error and agreement over the {given.observed} "
        f"tokens that follow it<br>{effect.method.label}"
    )
    return drawing.finish(figure, foot)


def coloured_text(effect: Effect, layer: int | None = None, head: int | None = None) -> str:
    """The prompt as HTML, each token in the colour of its tier in one head, or of most heads of those meant.

    ``layer`` is one of ``effect.layers``; None means all, as it does for ``head``. A dotted line marks a token that
    some of those heads prune.
    """
    layers = _index("layer", layer, effect.layers)
    heads = _index("head", head, range(effect.tiers.shape[1]))
    chosen = effect.tiers[layers][:, heads].flatten(0, 1).numpy()
    places = range(-1, len(effect.names))
    counts = np.stack([(chosen == place).sum(axis=0) for place in places])
    spans = []
    for token, most, pruned in zip(effect.statistics.tokens, counts.argmax(axis=0) - 1, counts[0], strict=True):
        ground = PRUNED_COLOUR if most < 0 else TIER_COLOURS[most]
        ink = "white" if most == 0 else "#222222"
        line = "border-bottom: 2px dotted #444444;" if pruned and most >= 0 else ""
        name = PRUNED if most < 0 else effect.names[most]
        shown = html.escape(token).replace("\n", "↵<br>") or "&nbsp;"
        spans.append(f'<span title="{name}" style="background: {ground}; color: {ink}; {line}">{shown}</span>')
    keys = zip([*effect.names, PRUNED], [*TIER_COLOURS[: len(effect.names)], PRUNED_COLOUR], strict=True)
    legend = " ".join(
        f'<span style="background: {colour}; color: {"white" if colour == TIER_COLOURS[0] else "#222222"}; '
        f'padding: 0 6px">{name}</span>'
        for name, colour in keys
    )
    body = "".join(spans)
    return f'<div>{legend}</div><div style="white-space: pre-wrap; line-height: 1.7; max-width: 70rem">{body}</div>'


def effect_table(effect: Effect) -> pd.DataFrame:
    """Shares of the tokens in each tier in percent, predicted agreement and mean error, one row."""
    row = {f"{name}, % of tokens": round(100 * share, 2) for name, share in effect.shares.items()}
    row |= {"mean error, %": round(100 * float(effect.errors.mean()), 2), "predicted agreement": effect.agreement}
    return pd.DataFrame([row], index=[effect.method.label])


def measured_agreement(statistics: TextStatistics, methods: Sequence[Method]) -> list[float]:
    """What ``Effect.agreement`` predicts, measured: the observed tokens are decoded through each method's cache."""

    def most_likely(method: Method):
        return continued(statistics.loaded.model, statistics.prefilled, method, "simulated")[0].argmax(dim=-1)

    reference = most_likely(FullPrecision())
    return [float((most_likely(method) == reference).float().mean()) for method in methods]


def policy_of(state: State) -> CompressionPolicy:
    """The policy that the controls say."""
    make = CompressionPolicy.paper if state["rule"] == RULES[0] else CompressionPolicy.released
    return make(
        f"{state['high']}-{state['low']}", alpha_high=state["alpha_high"], alpha_low=state["alpha_low"],
        window=state["window"],
    )  # fmt: skip


def policy_lines(state: State) -> str:
    """A line of Python that makes :func:`policy_of` again."""
    make = "paper" if state["rule"] == RULES[0] else "released"
    return (
        f'policy = CompressionPolicy.{make}("{state["high"]}-{state["low"]}", alpha_high={state["alpha_high"]!r}, '
        f"alpha_low={state['alpha_low']!r}, window={state['window']!r})"
    )


def policy_controls() -> dict[str, ipywidgets.Widget]:
    """Sliders for the thresholds and the window, choices of precisions and rule."""
    slow = {"continuous_update": False}
    return {
        "alpha_high": ipywidgets.FloatSlider(value=1.0, min=0, max=10, step=0.1, description="α high", **slow),
        "alpha_low": ipywidgets.FloatSlider(
            value=0.02, min=0, max=2, step=0.01, readout_format=".2f", description="α low", **slow
        ),
        "window": ipywidgets.IntSlider(value=64, min=1, max=256, description="window", **slow),
        "high": ipywidgets.Dropdown(options=PRECISIONS, value="K8V4", description="high"),
        "low": ipywidgets.Dropdown(options=PRECISIONS, value="K4V2", description="low"),
        "rule": ipywidgets.Dropdown(options=RULES, description="rule", layout={"width": "26rem"}),
    }


def policy_explorer(loaded: LoadedModel, text: str, *, limit: int = 256, observed: int = OBSERVED) -> Explorer:
    """Choose model, text and policy, see the tiers, the bytes and the errors.

    A new text or model is run once (seconds); after that a control costs tens of milliseconds.
    """
    remember(loaded)
    name = loaded.source or loaded.name
    controls = {
        "text": ipywidgets.Textarea(value=text, description="text", rows=4, continuous_update=False,
                                    layout={"width": "60rem", "max_width": "98%"}),
        "model": ipywidgets.Text(value=name, description="model", continuous_update=False),
        **policy_controls(),
        "layer": ipywidgets.Dropdown(options=[ALL], description="layer"),
        "head": ipywidgets.Dropdown(options=[ALL], description="head"),
    }  # fmt: skip

    def statistics(state: State) -> TextStatistics:
        return observe(model_named(state["model"]), state["text"], limit=limit, observed=observed)

    def settle(given: Mapping[str, ipywidgets.Widget]) -> None:
        given["alpha_low"].value = min(given["alpha_low"].value, given["alpha_high"].value)
        layout = model_named(given["model"].value).layout
        full = [index for index, layer in enumerate(layout.layers) if layer.kind == "full"]
        for key, options in (("layer", [ALL, *full]), ("head", [ALL, *range(layout.kv_heads)])):
            before = given[key].value
            if list(given[key].options) != options:
                given[key].options = options
                given[key].value = before if before in options else ALL

    def show(state: State) -> View:
        effect = effect_of(statistics(state), policy_of(state))
        layer, head = (None if state[key] == ALL else state[key] for key in ("layer", "head"))
        tables = as_html(effect.bytes_table(), "bytes, all layers") + as_html(effect_table(effect))
        return View(draw_policy(effect), coloured_text(effect, layer, head) + tables)

    def code(state: State) -> str:
        layer, head = (None if state[key] == ALL else state[key] for key in ("layer", "head"))
        return "\n".join([
            "from diffkv_repro.diffkv import CompressionPolicy",
            "from diffkv_repro.explore import coloured_text, draw_policy, effect_of, observe",
            "from diffkv_repro.models import load_model",
            "",
            f"loaded = load_model({state['model']!r})",
            f"statistics = observe(loaded, {state['text']!r}, limit={limit}, observed={observed})",
            policy_lines(state),
            "effect = effect_of(statistics, policy)",
            "figure = draw_policy(effect)",
            f"text = coloured_text(effect, layer={layer!r}, head={head!r})",
            "sizes = effect.bytes_table()",
            "# with compress(loaded.model, policy): loaded.model.generate(...)  # from diffkv_repro.cache",
        ])  # fmt: skip

    def measure(state: State) -> str:
        (found,) = measured_agreement(statistics(state), [policy_of(state)])
        return f"Measured through the cache: the same next token after {found:.0%} of the observed tokens."

    def write(state: State, path: Path) -> None:
        policy_of(state).save(path)

    return Explorer(
        controls, show, code=code, write=write, file="policy.json", settle=settle,
        actions=[Action("measure agreement", measure)],
    )  # fmt: skip


def _index(name: str, wanted: int | None, allowed: Sequence[int]) -> slice | list[int]:
    if wanted is None:
        return slice(None)
    if wanted not in allowed:
        raise ValueError(f"{name} is {wanted}; allowed are {', '.join(map(str, allowed))}, or None for all")
    return [list(allowed).index(wanted)]
