"""Claim + measurement -> verdict, and the list of them that ``diffkv-repro check`` prints."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from diffkv_repro.study.claims import Claim, Expectation, Figure
from diffkv_repro.study.notebooks import notebook_path
from diffkv_repro.study.records import Record, RecordError, read_record

Verdict = Literal["pass", "refuted", "fail", "not run"]
VERDICTS: tuple[str, ...] = get_args(Verdict)
SMOKE = "smoke"


@dataclass(frozen=True)
class Judgement:
    """The verdict on one claim, with what was measured and why the verdict is what it is."""

    claim: Claim
    verdict: Verdict
    measured: Any = None
    reason: str = ""
    provenance: Mapping[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """One object of ``diffkv-repro check --json``."""
        claim = self.claim
        return {
            "id": claim.id,
            "figure": claim.figure,
            "paper": claim.paper,
            "statement": claim.statement,
            "kind": claim.kind,
            "verdict": self.verdict,
            "measured": self.measured,
            "compare": claim.expectation.compare if claim.expectation else None,
            "expected": claim.expectation.expected if claim.expectation else None,
            "tolerance": claim.expectation.tolerance if claim.expectation else None,
            "unit": claim.unit,
            "published": claim.published,
            "reason": self.reason,
            "provenance": self.provenance,
        }


def judge_all(figures: Iterable[Figure], folder: Path, root: Path, *, run: str | None = None) -> list[Judgement]:
    """Judge every claim of ``figures`` by the records in ``folder``, or by the recorded ones a claim names.

    With ``run``, records of any other run count as absent: a figure left over from last time proves nothing
    about this one. A damaged record makes its claims ``not run``, and says so.
    """
    judged = []
    for figure in figures:
        built = notebook_path(root, figure.notebook).is_file()
        for claim in figure.claims:
            try:
                judged.append(judge(claim, _record_for(claim, folder, root, run), built=built))
            except RecordError as error:
                judged.append(Judgement(claim, "not run", reason=str(error)))
    return judged


def _record_for(claim: Claim, folder: Path, root: Path, run: str | None) -> Record | None:
    """The run's own, or the recorded one: always where the claim names one and no need, else where the run has none."""
    elsewhere = root / "figures" / "recorded" / claim.recorded if claim.recorded else None
    if elsewhere and not claim.needs:
        return read_record(elsewhere, claim.figure)
    record = read_record(folder, claim.figure)
    if record is not None and run not in (None, record.provenance.get("run")):
        record = None
    if elsewhere and (record is None or claim.metric not in record.measurements):
        return read_record(elsewhere, claim.figure)
    return record


def judge(claim: Claim, record: Record | None, *, built: bool = True) -> Judgement:
    """The verdict on ``claim``.

    ``refuted`` needs both: the paper's statement does not hold, and the claim's own correction does.
    """
    missing = f"needs {claim.needs}" if claim.needs else ""
    if record is None:
        absent = "not measured yet" if built else f"notebook {claim.notebook} is not built yet"
        return Judgement(claim, "not run", reason="; ".join(filter(None, (absent, missing))))
    found = record.measurements.get(claim.metric)
    if found is None:
        absent = f"profile {record.profile} does not measure {claim.metric}"
        return Judgement(claim, "not run", reason=missing or absent, provenance=record.provenance)
    seen = {"measured": found.value, "provenance": record.provenance}
    if claim.expectation is None:
        return Judgement(claim, "not run", reason=f"reported, not judged: {claim.why}", **seen)
    other = _measured_otherwise(claim.measured_on, record.provenance.get("config") or {})
    if other:
        return Judgement(claim, "not run", reason="; ".join(filter(None, (other, missing))), **seen)
    if record.profile == SMOKE and not claim.any_size:
        return Judgement(claim, "not run", reason="a smoke run is too small to judge it", **seen)
    if claim.expectation.holds(found.value):
        return Judgement(claim, "pass", reason=found.note, **seen)
    if claim.correction and claim.correction.expectation.holds(found.value):
        corrected = f"{claim.correction.statement} {claim.correction.explanation}"
        return Judgement(claim, "refuted", reason=corrected, **seen)
    wanted = expected_text(claim.expectation, claim.unit)
    return Judgement(claim, "fail", reason=f"measured {number_text(found.value)}, expected {wanted}", **seen)


def _measured_otherwise(wanted: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """In what the run's configuration is not what the claim is about; empty where it is."""
    for name, value in wanted.items():
        found = config.get(name)
        enough = found == value
        if isinstance(value, int | float) and isinstance(found, int | float):
            enough = found >= value
        if not enough:
            return f"stated of {name} {value}, measured with {found}"
    return ""


def tally(judged: Iterable[Judgement]) -> Counter[str]:
    """How many claims have each verdict."""
    return Counter(judgement.verdict for judgement in judged)


def checked(judged: Iterable[Judgement]) -> int:
    """How many claims were decided, either way, by a measurement of the run itself and not by a recorded one."""
    return sum(judgement.verdict != "not run" and not judgement.claim.recorded for judgement in judged)


def expected_text(expectation: Expectation | None, unit: str = "") -> str | None:
    """An expectation in words, as ``>= 4 decades``."""
    if expectation is None:
        return None
    if expectation.compare in ("increasing", "decreasing"):
        text = expectation.compare
    elif expectation.compare == "between":
        text = "between " + " and ".join(number_text(value) for value in expectation.expected)
    else:
        text = f"{expectation.compare} {number_text(expectation.expected)}"
    if expectation.tolerance:
        text += f" ± {number_text(expectation.tolerance)}"
    return f"{text} {unit}".strip()


def number_text(value: Any) -> str:
    """A number, or a list of them, for people: four significant digits."""
    if isinstance(value, list | tuple):
        shown = ", ".join(number_text(item) for item in value[:6])
        return f"[{shown}{', …' if len(value) > 6 else ''}]"
    if isinstance(value, bool) or not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return f"{value:.4g}"
