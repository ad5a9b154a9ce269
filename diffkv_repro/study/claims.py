"""Every figure and table of both papers as checked claims: the schema of ``claims.yaml`` and its loader."""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

Paper = Literal["DiffKV", "KVServe", "ours"]
Kind = Literal["exact", "trend", "value", "reported"]
Comparator = Literal["==", ">=", "<=", ">", "<", "between", "increasing", "decreasing"]
Number = int | float | bool

_ID = re.compile(r"(diffkv|kvserve|ours)-[a-z0-9][a-z0-9.-]*")
_NOTEBOOK = re.compile(r"\d\d_[a-z0-9_]+")
_PREFIX = {"DiffKV": "diffkv-", "KVServe": "kvserve-", "ours": "ours-"}


class ClaimError(ValueError):
    """A file of claims that cannot be trusted: unknown key, duplicate id, missing notebook, ..."""


@dataclass(frozen=True)
class Expectation:
    """A comparison a measured value must pass.

    ``==`` and the ordering comparators take one number, ``between`` takes ``[low, high]`` (both included),
    ``increasing`` and ``decreasing`` take no expected value and judge a list, strictly unless there is a
    tolerance. ``tolerance`` is absolute, in the unit of the metric, and always widens what passes.
    """

    compare: Comparator
    expected: Number | tuple[Number, ...] | None = None
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        _one_of("compare", self.compare, get_args(Comparator))
        if not isinstance(self.tolerance, int | float) or not 0 <= self.tolerance < float("inf"):
            raise ClaimError(f"tolerance is {self.tolerance!r}; it must be a finite number >= 0")
        if isinstance(self.expected, list):
            object.__setattr__(self, "expected", tuple(self.expected))
        shape = {"between": "two numbers [low, high]", "increasing": "absent", "decreasing": "absent"}
        if not self._well_formed():
            raise ClaimError(
                f"expected is {self.expected!r}; for {self.compare!r} it must be "
                f"{shape.get(self.compare, 'one number')}"
            )

    def _well_formed(self) -> bool:
        if self.compare == "between":
            pair = self.expected
            return isinstance(pair, tuple) and len(pair) == 2 and all(map(_is_number, pair)) and pair[0] <= pair[1]
        if self.compare in ("increasing", "decreasing"):
            return self.expected is None
        return _is_number(self.expected)

    def holds(self, measured: Number | list[Number]) -> bool:
        """Whether ``measured`` passes, or each of several; NaN and an empty list never do."""
        slack = self.tolerance
        if self.compare in ("increasing", "decreasing"):
            if not isinstance(measured, list) or len(measured) < 2 or not all(map(_is_number, measured)):
                return False
            sign = 1 if self.compare == "increasing" else -1
            steps = [sign * (after - before) for before, after in itertools.pairwise(measured)]
            return all(step >= -slack if slack else step > 0 for step in steps)
        if isinstance(measured, list):
            return bool(measured) and all(_is_number(one) and self.holds(one) for one in measured)
        if not _is_number(measured):
            return False
        if self.compare == "between":
            low, high = self.expected
            return low - slack <= measured <= high + slack
        match self.compare:
            case "==":
                return abs(measured - self.expected) <= slack
            case ">=":
                return measured >= self.expected - slack
            case "<=":
                return measured <= self.expected + slack
            case ">":
                return measured > self.expected - slack
            case _:
                return measured < self.expected + slack


@dataclass(frozen=True)
class Correction:
    """What holds instead, where a proper measurement refutes the paper's statement."""

    statement: str
    explanation: str
    expectation: Expectation


@dataclass(frozen=True)
class Claim:
    """One statement of one figure, with the metric that decides it.

    ``kind``: ``exact`` (arithmetic), ``trend`` (monotone, ranking, ratio in a band), ``value`` (a number with
    a tolerance) or ``reported`` (shown, not judged; ``why`` says the reason). ``any_size`` claims do not
    depend on the size of the run, so a smoke run judges them too. ``needs`` names what a plain machine lacks.
    ``published`` is the paper's own number where it differs from what is expected here. ``measured_on`` says
    what the statement is about: a text must equal, a number at least reach, what the run's configuration holds
    under that name; measured otherwise it is shown and not judged. ``recorded`` names a folder of
    ``figures/recorded/`` whose measurement decides: whatever this run measures, or, for a claim that also ``needs``
    something, where this run does not measure it.
    """

    id: str
    figure: str
    paper: Paper
    notebook: str
    statement: str
    kind: Kind
    metric: str
    expectation: Expectation | None = None
    unit: str = ""
    published: Any = None
    any_size: bool = False
    measured_on: Mapping[str, Any] = field(default_factory=dict)
    recorded: str = ""
    needs: str = ""
    why: str = ""
    correction: Correction | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not _ID.fullmatch(self.id):
            raise ClaimError(f"claim id {self.id!r} is not of the form {_ID.pattern}")
        if not self.id.startswith(_PREFIX[self.paper]):
            raise ClaimError(f"claim {self.id}: ids of paper {self.paper} begin with {_PREFIX[self.paper]!r}")
        _one_of(f"claim {self.id}: kind", self.kind, get_args(Kind))
        if not isinstance(self.measured_on, Mapping):
            raise ClaimError(f"claim {self.id}: measured_on is {self.measured_on!r}; it must be a mapping")
        for name in ("statement", "metric"):
            if not getattr(self, name) or not isinstance(getattr(self, name), str):
                raise ClaimError(f"claim {self.id}: {name} is missing")
        if self.kind == "reported":
            if self.expectation is not None or not self.why:
                raise ClaimError(f"claim {self.id}: a reported claim has a why and no comparison")
        elif self.expectation is None:
            raise ClaimError(f"claim {self.id}: a claim of kind {self.kind} needs compare and expected")


@dataclass(frozen=True)
class Figure:
    """A figure, table or theorem of a paper (or a bar of our own), the notebook that makes it, its claims."""

    id: str
    paper: Paper
    title: str
    notebook: str
    paper_says: str
    published: Mapping[str, Any] = field(default_factory=dict)
    claims: tuple[Claim, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not _ID.fullmatch(self.id):
            raise ClaimError(f"figure id {self.id!r} is not of the form {_ID.pattern}")
        _one_of(f"figure {self.id}: paper", self.paper, get_args(Paper))
        if not self.id.startswith(_PREFIX[self.paper]):
            raise ClaimError(f"figure {self.id}: ids of paper {self.paper} begin with {_PREFIX[self.paper]!r}")
        if not isinstance(self.notebook, str) or not _NOTEBOOK.fullmatch(self.notebook):
            raise ClaimError(f"figure {self.id}: notebook is {self.notebook!r}; it must name one, as 01_title")
        if not self.title or not self.paper_says:
            raise ClaimError(f"figure {self.id}: title and paper_says are required")


def load_claims(path: Path) -> dict[str, Figure]:
    """Read a file of claims into figures by id, in file order.

    Raises ClaimError, naming the place, for unknown or repeated keys, duplicate ids, a figure without a
    notebook, an ill-formed expectation, or a file that is not YAML.
    """
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise ClaimError(f"{path.name}: {error}") from error
    if not isinstance(document, dict) or set(document) != {"figures"} or not isinstance(document["figures"], dict):
        raise ClaimError(f"{path.name}: the only top-level key must be 'figures', a mapping of figure ids")
    figures = {str(name): _figure(str(name), entry) for name, entry in document["figures"].items()}
    seen: set[str] = set()
    for claim in (claim for figure in figures.values() for claim in figure.claims):
        if claim.id in seen:
            raise ClaimError(f"duplicate claim id {claim.id}")
        seen.add(claim.id)
    return figures


def _figure(name: str, entry: Any) -> Figure:
    values = _keys(
        f"figure {name}", entry, {"paper", "title", "notebook", "paper_says", "published", "measured_on", "claims"}
    )
    if not values.get("notebook"):
        raise ClaimError(f"figure {name} has no notebook")
    _one_of(f"figure {name}: paper", values.get("paper"), get_args(Paper))
    claims = values.pop("claims", None) or []
    if not isinstance(claims, list) or not claims:
        raise ClaimError(f"figure {name}: claims must be a list with at least one entry")
    common = {"figure": name, "paper": values["paper"], "notebook": values["notebook"]}
    measured_on = values.pop("measured_on", None) or {}
    return _build(
        Figure, f"figure {name}", id=name, claims=tuple(_claim(c, common, measured_on) for c in claims), **values
    )


def _claim(entry: Any, common: dict[str, str], measured_on: Mapping[str, Any]) -> Claim:
    """A claim; ``measured_on`` of its figure holds for it too unless its size does not matter or it has its own."""
    label = f"claim {entry.get('id', '?') if isinstance(entry, dict) else entry} of {common['figure']}"
    allowed = {
        "id", "statement", "kind", "metric", "compare", "expected", "tolerance", "unit", "published",
        "any_size", "measured_on", "recorded", "needs", "why", "corrected",
    }  # fmt: skip
    values = _keys(label, entry, allowed)
    corrected = values.pop("corrected", None)
    correction = None
    if corrected is not None:
        fixed = _keys(
            f"{label}: corrected", corrected, {"statement", "explanation", "compare", "expected", "tolerance"}
        )
        correction = _build(
            Correction, f"{label}: corrected", expectation=_expectation(label, fixed, required=True), **fixed
        )
    expectation = _expectation(label, values, required=False)
    if not values.get("any_size") and not values.get("recorded"):
        values.setdefault("measured_on", measured_on)
    return _build(Claim, label, expectation=expectation, correction=correction, **values, **common)


def _expectation(label: str, values: dict[str, Any], *, required: bool) -> Expectation | None:
    """Take the comparison out of ``values``."""
    given = {key: values.pop(key) for key in ("compare", "expected", "tolerance") if key in values}
    if "compare" not in given:
        if given or required:
            raise ClaimError(f"{label}: compare is missing")
        return None
    return _build(Expectation, label, **given)


def _build(kind: type, label: str, /, **values: Any) -> Any:
    try:
        return kind(**values)
    except TypeError as error:
        raise ClaimError(f"{label}: {error}") from error
    except ClaimError as error:
        text = str(error)
        raise error if text.startswith(("claim", "figure")) else ClaimError(f"{label}: {text}") from error


def _keys(label: str, entry: Any, allowed: set[str]) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise ClaimError(f"{label}: must be a mapping, is {entry!r}")
    unknown = [str(key) for key in entry if key not in allowed]
    if unknown:
        raise ClaimError(f"{label}: unknown key {', '.join(unknown)}; allowed are {', '.join(sorted(allowed))}")
    return dict(entry)


def _one_of(label: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ClaimError(f"{label} is {value!r}; allowed are {', '.join(allowed)}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and value == value


class _StrictLoader(yaml.SafeLoader):
    """A safe loader that refuses a repeated key, which YAML would let silently replace the first one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise ClaimError(f"duplicate key {key!r} at line {key_node.start_mark.line + 1}")
            seen.add(key)
        return super().construct_mapping(node, deep)
