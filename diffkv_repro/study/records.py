"""Measurements on disk: one JSON file a figure, beside the figure itself."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import plotly.graph_objects as go

FORMAT = 1


class RecordError(ValueError):
    """A record that is damaged or of another format; the message names the file."""


@dataclass(frozen=True)
class Measurement:
    """A measured value: a finite number, a list of them, or a truth value.

    ``n`` counts what it was taken over (sequences, repetitions); ``note`` says what a reader must know to
    trust it: simulated or packed, cold or warm, spread.
    """

    value: float | int | bool | list[float | int]
    unit: str = ""
    n: int | None = None
    note: str = ""

    def __post_init__(self) -> None:
        values = self.value if isinstance(self.value, list) else [self.value]
        if not values or not all(isinstance(v, int | float) and math.isfinite(v) for v in values):
            raise RecordError(f"a measured value must be a finite number or a list of them, not {self.value!r}")


def measurements(values: Mapping[str, float]) -> dict[str, Measurement]:
    """Plain numbers (arithmetic, say) as measurements without a unit or a count."""
    return {name: Measurement(value) for name, value in values.items()}


@dataclass(frozen=True)
class Record:
    """What one notebook measured for one figure. ``plot`` is the plotly figure as plain data."""

    figure: str
    provenance: Mapping[str, Any]
    measurements: Mapping[str, Measurement]
    plot: Mapping[str, Any] = field(default_factory=dict)

    @property
    def profile(self) -> str | None:
        """Profile of the run, as ``cpu``."""
        return self.provenance.get("profile")

    def as_figure(self) -> "go.Figure":
        """The figure that was drawn, to take traces from."""
        import plotly.graph_objects as go  # slow to import, and only notebooks draw

        return go.Figure({"data": [], **self.plot})


def record_path(folder: Path, figure: str) -> Path:
    """Where the record of ``figure`` lies in an output folder."""
    return Path(folder) / f"{figure}.json"


def record_text(record: Record) -> str:
    """``record`` as the JSON text of its file."""
    document = {
        "format": FORMAT,
        "figure": record.figure,
        "provenance": record.provenance,
        "measurements": {name: vars(measured) for name, measured in record.measurements.items()},
        "plot": record.plot,
    }
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def read_record(folder: Path, figure: str) -> Record | None:
    """The record of ``figure`` in ``folder``, or None where there is none. Raises RecordError if damaged."""
    path = record_path(folder, figure)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RecordError(f"{path} cannot be read: {error}") from error
    try:
        if document["format"] != FORMAT or document["figure"] != figure:
            raise RecordError(
                f"{path} is a record of {document['figure']} in format {document['format']}, not of {figure} "
                f"in format {FORMAT}"
            )
        measurements = {name: Measurement(**fields) for name, fields in document["measurements"].items()}
        if not isinstance(document["provenance"], dict) or not isinstance(document["plot"], dict):
            raise TypeError("provenance and plot must be objects")
        return Record(figure, document["provenance"], measurements, document["plot"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, RecordError) and str(error).startswith(str(path)):
            raise
        raise RecordError(f"{path} is damaged: {error!r}") from error
