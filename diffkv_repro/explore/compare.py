"""Compare: two ways to keep or send one prompt's cache, side by side, with the texts that come of them."""

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import ipywidgets
import pandas as pd
import plotly.graph_objects as go
import torch

from diffkv_repro.baselines import baseline
from diffkv_repro.cache import FullPrecision, Method, Session, Uniform, compress
from diffkv_repro.cache.layer import Rows
from diffkv_repro.core.accounting import KVBytes
from diffkv_repro.core.files import write_text
from diffkv_repro.core.threads import one_thread
from diffkv_repro.diffkv import CompressionPolicy
from diffkv_repro.explore.effect import attend_to, change_of, effect_of
from diffkv_repro.explore.models import model_named, remember
from diffkv_repro.explore.panel import Action, Explorer, State, View, as_html
from diffkv_repro.explore.statistics import OBSERVED, TextStatistics, observe
from diffkv_repro.kvserve import NAMED, Assets, Prefilled, Profile, prefill, score_heads
from diffkv_repro.kvserve.codecs import CodecUnavailable
from diffkv_repro.kvserve.quality import continue_from
from diffkv_repro.kvserve.transform_state import RotaryKeys
from diffkv_repro.models import LoadedModel
from diffkv_repro.study import drawing
from diffkv_repro.study.plots.policy import side_by_side

How = Method | Profile

_METHODS: dict[str, Callable[[], Method]] = {
    "FP16": FullPrecision,
    "K8V4": lambda: Uniform("K8V4"),
    "K4V8": lambda: Uniform("K4V8"),
    "DiffKV, paper": lambda: CompressionPolicy.paper(),
    "DiffKV, paper, more pruned": lambda: CompressionPolicy.paper(alpha_high=3, alpha_low=0.2),
    "DiffKV, released code": lambda: CompressionPolicy.released(),
    "KIVI 2 bit": lambda: baseline("kivi")(bits=2),
    "SnapKV 50 %": lambda: baseline("snapkv")(keep=0.5),
}
_CELL = "vertical-align: top; white-space: pre-wrap; width: 50%"
CHOICES = (*_METHODS, *(f"wire: {name}" for name in NAMED if not name.endswith("-gpu")))


def choice_named(name: str) -> How:
    """One of ``CHOICES``, or what a file holds that an explorer wrote: ``.json`` a policy, ``.yaml`` a profile."""
    if name in _METHODS:
        return _METHODS[name]()
    if name.startswith("wire: "):
        return Profile.named(name.removeprefix("wire: "))
    path = Path(name).expanduser()
    if path.suffix == ".json":
        return CompressionPolicy.load(path)
    if path.suffix in (".yaml", ".yml"):
        return Profile.from_yaml(path.read_text(encoding="utf-8"))
    raise ValueError(f"unknown choice {name!r}; allowed are {', '.join(CHOICES)}, or a .json or .yaml file")


@dataclass(frozen=True, eq=False)
class Outcome:
    """One of two: ``label``, ``size`` of the prompt's cache, ``errors`` [layers] of the attention output of the
    observed tokens over its length, predicted ``agreement``."""

    label: str
    size: KVBytes
    errors: Sequence[float]
    agreement: float


def outcome_of(statistics: TextStatistics, how: How) -> Outcome:
    """What ``how`` does to the prompt of ``statistics``: a method a model computes with, or a profile for the wire.

    Of a profile the bytes are those of its frame. Raises ValueError for a profile that cannot run here.
    """
    if isinstance(how, CompressionPolicy | Uniform):
        effect = effect_of(statistics, how)
        return Outcome(how.label, effect.size, effect.errors.tolist(), effect.agreement)
    with one_thread(), torch.no_grad():
        size, outputs = _stored(statistics, how) if isinstance(how, Method) else _sent(statistics, how)
    found = [change_of(statistics, layer, output) for layer, output in enumerate(outputs)]
    changes = torch.stack([change for _, change in found]).sum(dim=0)
    label = how.label if isinstance(how, Method) else str(how)
    return Outcome(label, size, [float(error) for error, _ in found], statistics.agreement(changes))


def _stored(statistics: TextStatistics, method: Method) -> tuple[KVBytes, list[torch.Tensor]]:
    prompts = statistics.prompts
    cache = Session(statistics.loaded.model, method, "simulated").new_cache()
    cache.admit(prompts, statistics.rows)
    size = cache.kv_bytes()
    rows = Rows(None, torch.cat([statistics.rows.positions, statistics.positions], dim=1))
    return size, [layer.decode(call, rows) for layer, call in zip(cache.layers, statistics.calls, strict=True)]


@lru_cache(maxsize=4)
def to_send(statistics: TextStatistics) -> tuple[Prefilled, Assets]:
    """The prompt's cache in 16 bits and what profiles rank by: found once a text."""
    ids = statistics.prefilled.input_ids[:, : statistics.prefilled.tokens]
    given = prefill(statistics.loaded, ids, dtype=torch.float16, window=32)
    text = statistics.loaded.tokenizer.decode(ids[0])
    assets = Assets(
        heads=score_heads(statistics.loaded, [text]), token_scores=given.token_scores,
        rotary=RotaryKeys.of(statistics.loaded),
    )  # fmt: skip
    return given, assets


def _arrived(statistics: TextStatistics, profile: Profile) -> tuple[KVBytes, Any]:
    given, assets = to_send(statistics)
    try:
        frame = profile.encode(given.kv, given.layout, assets=assets)
        data = frame.to_bytes()
    except CodecUnavailable as error:
        raise ValueError(f"{profile} cannot run here: {error}") from error
    size = KVBytes(payload=frame.code_bytes, tables=len(data) - frame.code_bytes,
                   full=given.layout.half_bytes(given.kv.tokens))  # fmt: skip
    return size, frame.decode(assets)


def _sent(statistics: TextStatistics, profile: Profile) -> tuple[KVBytes, list[torch.Tensor]]:
    size, kv = _arrived(statistics, profile)
    dtype, device = statistics.loaded.model.dtype, statistics.loaded.device
    outputs = []
    for index, layer in enumerate(kv.layers):
        key, value = (part[None].to(device, dtype) for part in (layer.key, layer.value))
        kept = None if layer.kept is None else layer.kept[None].to(device)
        outputs.append(attend_to(statistics, index, key, value, kept))
    return size, outputs


@torch.inference_mode()
def generate(statistics: TextStatistics, how: How, new_tokens: int = 24) -> list[int]:
    """Tokens that the model writes, greedily, after the prompt and the first token observed.

    The prompt comes through the cache; of a profile, what is written is kept in full precision. Stops at the end mark.
    """
    loaded, prefilled = statistics.loaded, statistics.prefilled
    first = prefilled.input_ids[:, prefilled.tokens : prefilled.tokens + 1]
    if not isinstance(how, Method):
        _, kv = _arrived(statistics, how)
        return _greedily(loaded, first, new_tokens, lambda ids: continue_from(loaded, kv, ids)[-1], whole=True)
    with one_thread(), compress(loaded.model, how.fitted_to(prefilled.prompts), storage="simulated") as session:
        cache = session.new_cache()
        cache.admit(prefilled.prompts, prefilled.rows)

        def step(ids: torch.Tensor) -> torch.Tensor:
            return loaded.model(input_ids=ids, past_key_values=cache.hf, use_cache=True).logits[0, -1]

        return _greedily(loaded, first, new_tokens, step, whole=False)


def _greedily(loaded: LoadedModel, first: torch.Tensor, count: int, step: Callable, *, whole: bool) -> list[int]:
    """Most likely tokens one by one; ``step`` takes all tokens since the prompt where ``whole``, else the newest."""
    ids, ends = first, loaded.tokenizer.eos_token_id
    while ids.shape[1] <= count:
        newest = step(ids if whole else ids[:, -1:]).argmax().view(1, 1)
        ids = torch.cat([ids, newest.to(ids.device)], dim=1)
        if int(newest) == ends:
            break
    return ids[0, 1:].tolist()


def parting(left: Sequence[int], right: Sequence[int]) -> int | None:
    """The index of the first token in which two texts differ, None where one is the other or goes on from it."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), None)


def draw_comparison(statistics: TextStatistics, outcomes: Sequence[Outcome]) -> go.Figure:
    """Bytes item by item and the error of each layer, of two outcomes."""
    sides = dict(zip(("left", "right"), outcomes, strict=True))
    title = " · ".join(
        f"{side}: {one.size.true_ratio:.1%} of FP16, predicted agreement {one.agreement:.0%}"
        for side, one in sides.items()
    )
    full = [index for index, layer in enumerate(statistics.loaded.layout.layers) if layer.kind == "full"]
    errors = {side: one.errors for side, one in sides.items()}
    figure = side_by_side({side: one.size for side, one in sides.items()}, _layers_of(errors, full), errors, title)
    foot = [f"{statistics.loaded.name}, a prompt of {len(statistics.tokens)} tokens"]
    return drawing.finish(figure, "<br>".join(foot + [f"{side}: {one.label}" for side, one in sides.items()]))


def _layers_of(errors: dict[str, Sequence[float]], full: Sequence[int]) -> dict[str, Sequence[int]]:
    """Policies speak of the layers with full attention only, everything else of all."""
    return {side: full if len(own) == len(full) else range(len(own)) for side, own in errors.items()}


def comparison_table(outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """Nominal and true share of FP16, mean error and predicted agreement, a row a side."""
    rows = [
        {"what": one.label, "nominal, %": round(100 * one.size.nominal_ratio, 2),
         "true, %": round(100 * one.size.true_ratio, 2),
         "mean error, %": round(100 * sum(one.errors) / len(one.errors), 2), "predicted agreement": one.agreement}
        for one in outcomes
    ]  # fmt: skip
    return pd.DataFrame(rows, index=["left", "right"])


def texts_side_by_side(statistics: TextStatistics, left: Sequence[int], right: Sequence[int]) -> str:
    """Both texts as HTML, with what comes after their first difference underlined."""
    decode, at = statistics.loaded.tokenizer.decode, parting(left, right)
    where = "The texts do not part" if at is None else f"The texts part at token {at + 1}"
    cells = []
    for ids in (left, right):
        same, other = (ids, []) if at is None else (ids[:at], ids[at:])
        parts = [html.escape(decode(part)) for part in (same, other)]
        cells.append(f"<td style='{_CELL}'>{parts[0]}<u>{parts[1]}</u></td>")
    rows = f"<tr><th>left</th><th>right</th></tr><tr>{''.join(cells)}</tr>"
    return f"<p>{where}.</p><table style='width: 100%'>{rows}</table>"


def compare_explorer(
    loaded: LoadedModel, text: str, *, left: str = CHOICES[0], right: str = "DiffKV, paper", limit: int = 256,
    observed: int = OBSERVED, new_tokens: int = 24,
) -> Explorer:  # fmt: skip
    """Choose two of ``CHOICES``, or files that explorers wrote; see bytes and errors, and let both write on."""
    remember(loaded)
    wide = {"width": "26rem"}
    controls = {
        "text": ipywidgets.Textarea(value=text, description="text", rows=4, continuous_update=False,
                                    layout={"width": "60rem", "max_width": "98%"}),
        "model": ipywidgets.Text(value=loaded.source or loaded.name, description="model", continuous_update=False),
        "left": ipywidgets.Combobox(
            value=left, options=CHOICES, description="left", continuous_update=False, layout=wide
        ),
        "right": ipywidgets.Combobox(
            value=right, options=CHOICES, description="right", continuous_update=False, layout=wide
        ),
    }  # fmt: skip

    def chosen(state: State) -> tuple[TextStatistics, How, How]:
        given = observe(model_named(state["model"]), state["text"], limit=limit, observed=observed)
        return given, choice_named(state["left"]), choice_named(state["right"])

    def show(state: State) -> View:
        given, *both = chosen(state)
        outcomes = [outcome_of(given, how) for how in both]
        return View(draw_comparison(given, outcomes), as_html(comparison_table(outcomes)))

    def write_on(state: State) -> str:
        given, *both = chosen(state)
        return texts_side_by_side(given, *(generate(given, how, new_tokens) for how in both))

    def code(state: State) -> str:
        return "\n".join([
            "from diffkv_repro.explore import choice_named, comparison_table, draw_comparison, generate, observe",
            "from diffkv_repro.explore import outcome_of, parting",
            "from diffkv_repro.models import load_model",
            "",
            f"loaded = load_model({state['model']!r})",
            f"statistics = observe(loaded, {state['text']!r}, limit={limit}, observed={observed})",
            f"left, right = choice_named({state['left']!r}), choice_named({state['right']!r})",
            "outcomes = [outcome_of(statistics, how) for how in (left, right)]",
            "figure = draw_comparison(statistics, outcomes)",
            "table = comparison_table(outcomes)",
            f"texts = [generate(statistics, how, {new_tokens}) for how in (left, right)]",
            "print([loaded.tokenizer.decode(text) for text in texts], parting(*texts))",
        ])  # fmt: skip

    def write(state: State, path: Path) -> None:
        for side in ("left", "right"):
            write_choice(path.with_name(f"{path.stem}-{side}"), choice_named(state[side]))

    return Explorer(
        controls, show, code=code, write=write, file="compared", actions=[Action("let both write on", write_on)]
    )  # fmt: skip


def write_choice(path: Path, how: How) -> Path:
    """Write a policy as ``path``.json or a profile as ``path``.yaml, which :func:`choice_named` reads."""
    if isinstance(how, CompressionPolicy):
        target = path.with_suffix(".json")
        how.save(target)
    elif isinstance(how, Profile):
        target = write_text(path.with_suffix(".yaml"), how.to_yaml())
    else:
        raise ValueError(f"{how.label} has no file; policies and profiles have")
    return target
