"""``CompressionPolicy``: thresholds on significance decide each token's tier, in every head by itself."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor

from diffkv_repro.attention_stats.significance import Significance
from diffkv_repro.cache.layer import LayerCache, Place
from diffkv_repro.cache.method import Method, bias_transform, require_groups
from diffkv_repro.cache.tiered import TieredLayer
from diffkv_repro.core.files import write_text
from diffkv_repro.core.precision import Precision
from diffkv_repro.diffkv.rules import RULES, PolicyRule
from diffkv_repro.models.hf import AttentionLayout

Alpha = float | tuple[tuple[float, ...], ...]

Divisor = Literal["position", "length"]
Decode = Literal["algorithm-1", "two-minimum"]
GroupMax = Literal["of-means", "each-step"]


@dataclass(frozen=True)
class CompressionPolicy(Method):
    """DiffKV's policy (section 4, Algorithm 1), and the variants in which its text and its released code differ.

    ``tiers`` from the most precise on; ``alphas`` one a tier, not increasing: a token whose significance is at or below
    ``alphas[i]`` / N leaves tier i for a later one, and below the last alpha it is pruned. An alpha is a number or
    [layers][kv_heads] numbers.

    - ``window``: so many recent tokens stay in the first tier; a prompt no longer than it is left alone.
    - ``significance``: over which queries (section 4: all later ones; released code: the last 64, own score included).
    - ``prompt_divisor``: alpha over the ``length`` N (section 7.2, Algorithm 1, code) or the token's ``position`` i
      (section 4: it drops the first token, whose threshold would be alpha itself; see notebook 04).
    - ``decode``: ``algorithm-1`` (candidate and victim) or ``two-minimum`` (released code, two tiers).
    - ``decode_divisor``: ``length`` N, the new token included (Algorithm 1), or its ``position`` N - 1 (code).
    - ``group_max``: the maximum over query heads ``of-means`` (section 4; one running sum a query head) or
      ``each-step`` before summing (code; one running sum a KV head).
    - ``bias_free``: quantise keys without the rotated bias of their projection (ours; Qwen2-type models).
    """

    tiers: tuple[Precision, ...] = (Precision(8, 4), Precision(4, 2))
    alphas: tuple[Alpha, ...] = (1.0, 0.02)
    window: int = 64
    significance: Significance = field(default_factory=Significance)
    prompt_divisor: Divisor = "length"
    decode: Decode = "algorithm-1"
    decode_divisor: Divisor = "length"
    group_max: GroupMax = "of-means"
    bias_free: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "tiers", tuple(Precision.parse(tier) for tier in self.tiers))
        object.__setattr__(self, "alphas", tuple(_alpha(alpha) for alpha in self.alphas))
        if not self.tiers or len(self.tiers) != len(self.alphas):
            raise ValueError(f"{len(self.tiers)} tiers have {len(self.alphas)} alphas; each tier needs one")
        _require_order(self.alphas)
        if not isinstance(self.window, int) or self.window < 1:
            raise ValueError(f"window is {self.window}; it must be a whole number of at least 1, the newest token")
        for name, kind in (
            ("prompt_divisor", Divisor), ("decode_divisor", Divisor), ("decode", Decode), ("group_max", GroupMax),
        ):  # fmt: skip
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed are {', '.join(get_args(kind))}")
        if self.decode == "two-minimum" and len(self.tiers) != 2:
            raise ValueError(f"the two-minimum rule is of two tiers, not {len(self.tiers)}")

    @classmethod
    def paper(cls, tiers: str = "K8V4-K4V2", *, alpha_high: float = 1.0, alpha_low: float = 0.02, **options) -> Self:
        """As section 7.2 and Algorithm 1 state it. ``tiers`` is written high-low."""
        return cls(_two_tiers(tiers), (alpha_high, alpha_low), **options)

    @classmethod
    def released(cls, tiers: str = "K8V4-K4V2", *, alpha_high: float = 1.0, alpha_low: float = 0.02, **options) -> Self:
        """As the released code does it: last 64 queries, alpha over the length, two minima, maximum each step."""
        given = {
            "significance": Significance("last", 64, own_score=True), "prompt_divisor": "length",
            "decode": "two-minimum", "decode_divisor": "position", "group_max": "each-step",
        }  # fmt: skip
        return cls(_two_tiers(tiers), (alpha_high, alpha_low), **(given | options))

    @property
    def label(self) -> str:
        tiers = "-".join(map(str, self.tiers))
        alphas = "/".join(f"{alpha:g}" if isinstance(alpha, float) else "per head" for alpha in self.alphas)
        variants = {
            f", last {self.significance.observed} queries": self.significance.queries == "last",
            ", two-minimum": self.decode == "two-minimum",
            f", window {self.window}": self.window != 64,
            ", bias-free keys": self.bias_free,
        }
        divisor = "i" if self.prompt_divisor == "position" else "N"
        return f"DiffKV {tiers}, alpha {alphas} over {divisor}" + "".join(name for name, on in variants.items() if on)

    @property
    def needs_bias(self) -> bool:
        return self.bias_free

    def check(self, layout: AttentionLayout) -> None:
        for tier in self.tiers:
            require_groups(tier, layout.head_dim)
        for alpha in self.alphas:
            if not isinstance(alpha, float):
                shape = (len(alpha), {len(row) for row in alpha})
                if shape != (len(layout.layers), {layout.kv_heads}):
                    raise ValueError(
                        f"alphas are for {len(alpha)} layers of {sorted(shape[1])} KV heads, the model has "
                        f"{len(layout.layers)} of {layout.kv_heads}"
                    )

    def layer(self, place: Place, storage: str) -> LayerCache:
        return TieredLayer(place, self.rule(place), storage=storage, transform=bias_transform(place))

    def rule(self, place: Place) -> PolicyRule:
        """The rule of one layer."""
        return RULES[self.decode](
            precisions=self.tiers,
            alphas=[_of_layer(alpha, place.layer, place.device) for alpha in self.alphas],
            window=self.window,
            significance=self.significance,
            prompt_by_position=self.prompt_divisor == "position",
            decode_by_position=self.decode_divisor == "position",
            score_width=1 if self.group_max == "each-step" else place.layout.group,
        )

    def save(self, path: Path) -> None:
        """Write the policy to a JSON file that :meth:`load` reads."""
        document = dataclasses.asdict(self) | {"tiers": [str(tier) for tier in self.tiers]}
        write_text(path, json.dumps(document, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what :meth:`save` wrote. Raises ValueError naming the file and what is wrong with it."""
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except OSError as error:
            raise ValueError(f"policy file {path} cannot be read: {error.strerror}") from error
        except (TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"policy file {path}: {error}") from error

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Self:
        """A policy from plain values; unknown names raise ValueError."""
        if not isinstance(document, dict):
            raise ValueError(f"a policy is an object with names and values, not {document!r}")
        known = {item.name for item in dataclasses.fields(cls)}
        unknown = sorted(set(document) - known)
        if unknown:
            raise ValueError(f"unknown {', '.join(unknown)}; a policy has {', '.join(sorted(known))}")
        given = dict(document)
        if "significance" in given:
            try:
                given["significance"] = Significance(**given["significance"])
            except TypeError as error:
                raise ValueError(f"significance: {error}") from error
        return cls(**given)


def _two_tiers(tiers: str) -> tuple[Precision, ...]:
    parts = tuple(Precision.parse(part) for part in tiers.split("-"))
    if len(parts) != 2:
        raise ValueError(f"tiers is {tiers!r}; write a high and a low precision, as K8V4-K4V2")
    return parts


def _alpha(alpha: Any) -> Alpha:
    if isinstance(alpha, int | float):
        return float(alpha)
    return tuple(tuple(float(value) for value in row) for row in alpha)


def _require_order(alphas: Sequence[Alpha]) -> None:
    try:
        tables = [torch.tensor(alpha, dtype=torch.float64) for alpha in alphas]
    except (TypeError, ValueError) as error:
        raise ValueError(f"alphas is {alphas}; an alpha is a number or [layers][kv_heads] numbers") from error
    shapes = {tuple(table.shape) for table in tables if table.ndim}
    if len(shapes) > 1:
        raise ValueError(f"the tables of alphas have different shapes: {', '.join(map(str, sorted(shapes)))}")
    for index, table in enumerate(tables):
        if not bool(torch.isfinite(table).all()) or bool((table < 0).any()):
            raise ValueError(f"alpha of tier {index} is {alphas[index]}; alphas are finite and not negative")
        if index and bool((table > tables[index - 1]).any()):
            names = ("alpha_low", "alpha_high") if len(alphas) == 2 else (f"alpha {index}", f"alpha {index - 1}")
            raise ValueError(f"{names[0]} is {alphas[index]} and {names[1]} {alphas[index - 1]}: it must not be larger")


def _of_layer(alpha: Alpha, layer: int, device: torch.device) -> Tensor:
    values = [alpha] if isinstance(alpha, float) else list(alpha[layer])
    return torch.tensor(values, dtype=torch.float32, device=device)
