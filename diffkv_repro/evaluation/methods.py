"""``make_method``: one place where names and options, as a command line gives them, become a :class:`Method`."""

import dataclasses
import hashlib
import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from torch import Tensor

from diffkv_repro.baselines import BASELINES, baseline
from diffkv_repro.cache.method import FullPrecision, Method, Uniform
from diffkv_repro.core.precision import Precision
from diffkv_repro.diffkv.policy import CompressionPolicy
from diffkv_repro.evaluation.options import coerce
from diffkv_repro.evaluation.transferred import Transferred

_RULES = {"paper": CompressionPolicy.paper, "released": CompressionPolicy.released}
# Of the two-tier constructors; everything else is a field of CompressionPolicy.
_TWO_TIERS = {"policy": str, "alpha_high": float, "alpha_low": float}


def methods() -> tuple[str, ...]:
    """Names that :func:`make_method` knows."""
    return ("fp16", "uniform", "diffkv", "kvserve", *BASELINES)


def make_method(method: str | Method = "diffkv", model: Any = None, **options: Any) -> Method:
    """The method called ``method`` with ``options``, which may be text: ``make_method("uniform", precision="K8V4")``.

    - ``fp16``: no options.
    - ``uniform``: ``precision``, ``bias_free``.
    - ``diffkv``: ``policy`` (high-low, as ``K8V4-K4V2``), ``alpha_high``, ``alpha_low``, ``rule`` (``paper`` or
      ``released``) and any field of :class:`CompressionPolicy`; or ``policy_file``, a JSON file, beside which fields
      may be given that replace those of the file.
    - ``kvserve``: ``profile``, a name or a line such as ``hadamard | mixhq r=0.8 K12/6 V8/4 | ans``; ``texts`` or a
      file of ``heads`` to rank heads by, a file of ``affine`` maps. Prompts go through frames; needs ``model``.
    - a baseline: the fields of its dataclass, or the arguments of its ``for_model``, which needs ``model``, a
      :class:`~diffkv_repro.models.LoadedModel`.

    A ready-made ``method`` is returned as it is; it takes no options.

    Raises ValueError for an unknown name, an option that the method has not, or a value that does not fit.
    """
    if isinstance(method, Method):
        if options:
            raise ValueError(f"{method.label} is made already; it takes no options, as {', '.join(sorted(options))}")
        return method
    if method == "fp16":
        return FullPrecision(**_typed(method, FullPrecision, options))
    if method == "uniform":
        return Uniform(**_typed(method, Uniform, {"precision": Precision(8, 4)} | options))
    if method == "diffkv":
        return _diffkv(options)
    if method not in BASELINES and method != "kvserve":
        raise ValueError(f"unknown method {method!r}; allowed are {', '.join(methods())}")
    kind = Transferred if method == "kvserve" else baseline(method)
    if not hasattr(kind, "for_model"):
        return kind(**_typed(method, kind, options))
    if model is None:
        raise ValueError(f"method {method} is fitted to a model; it cannot be made before one is loaded")
    return kind.for_model(model, **_typed(method, kind, options, kind.for_model))


def parameters(method: Method) -> dict[str, Any]:
    """The class of a method and all its parameters as plain values; tensors by shape and checksum."""
    fields = {item.name: _plain(getattr(method, item.name)) for item in dataclasses.fields(method)}
    return {"class": type(method).__name__} | fields


def _diffkv(options: Mapping[str, Any]) -> CompressionPolicy:
    hints = _fields(CompressionPolicy)
    allowed = {"policy_file": Path, "rule": str} | _TWO_TIERS | hints
    given = _coerced("diffkv", options, allowed)
    fields = {name: given.pop(name) for name in list(given) if name in hints}
    if "policy_file" in given:
        path = given.pop("policy_file")
        if given:
            raise ValueError(f"{', '.join(sorted(given))} cannot be given beside policy_file, which says it already")
        return dataclasses.replace(CompressionPolicy.load(path), **fields)
    double = sorted(set(given) & set(_TWO_TIERS)) if {"tiers", "alphas"} & set(fields) else []
    if double:
        raise ValueError(f"{', '.join(double)} cannot be given beside tiers and alphas, which say the same")
    rule = given.pop("rule", "paper")
    if rule not in _RULES:
        raise ValueError(f"rule is {rule!r}; allowed are {', '.join(_RULES)}")
    tiers = given.pop("policy", "K8V4-K4V2")
    return dataclasses.replace(_RULES[rule](tiers, **given), **fields)


def _typed(name: str, kind: type[Method], options: Mapping[str, Any], builder: Callable | None = None) -> dict:
    """``options`` of one method with the types its fields, or the arguments of ``builder``, ask for."""
    allowed = _fields(kind)
    if builder is not None:
        arguments = list(inspect.signature(builder).parameters.values())[1:]  # the first is the model
        hints = get_type_hints(builder)
        named = {item.name: hints.get(item.name, Any) for item in arguments if item.kind != item.VAR_KEYWORD}
        passes_on = any(item.kind == item.VAR_KEYWORD for item in arguments)
        allowed = (allowed if passes_on else {}) | named
    return _coerced(name, options, allowed)


def _coerced(name: str, options: Mapping[str, Any], allowed: Mapping[str, Any]) -> dict[str, Any]:
    unknown = sorted(set(options) - set(allowed))
    if unknown:
        known = f"allowed are {', '.join(sorted(allowed))}" if allowed else "it has none"
        raise ValueError(f"unknown option {', '.join(unknown)} of method {name}; {known}")
    return {option: coerce(option, value, allowed[option]) for option, value in options.items()}


def _fields(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {item.name: hints[item.name] for item in dataclasses.fields(kind) if item.init}


def _plain(value: Any) -> Any:
    if hasattr(value, "identity"):
        return _plain(value.identity)
    if isinstance(value, Precision):
        return str(value)
    if dataclasses.is_dataclass(value):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, Tensor):
        digest = hashlib.sha256(value.detach().cpu().contiguous().float().numpy().tobytes()).hexdigest()
        return {"shape": list(value.shape), "sha256": digest[:16]}
    return json.loads(json.dumps(value, default=str))
