"""Series told apart without their colour: a symbol, a dash or a hatching for each, so that figures read in grey."""

from collections.abc import Sequence

import plotly.graph_objects as go

SYMBOLS = ("circle", "diamond", "square", "triangle-up", "x", "cross", "triangle-down")
DASHES = ("solid", "dot", "dashdot", "longdash", "longdashdot", "2px,5px", "dash")
_HATCHINGS = ("", "/", "\\", "x", "-", ".", "+")
_FEW = 20  # points: plotly marks those of a line of fewer, unless it is told otherwise


def tell_apart(figure: go.Figure, palette: Sequence[str]) -> None:
    """Give the series of ``figure`` that share its panels a symbol, a dash or a hatching by their place in ``palette``.

    Only where more than one colour of the palette stands for a series of one kind, and only what the figure left open:
    a symbol or a dash that means something stays. Changes ``figure``.
    """
    places = {colour: place for place, colour in enumerate(palette)}
    marked: list[tuple[go.Scatter, int]] = []
    drawn: list[tuple[go.Scatter, int]] = []
    filled: list[tuple[go.Bar, int]] = []
    for trace in figure.data:
        colour = _colour(trace)
        if colour not in places:
            continue
        if isinstance(trace, go.Bar):
            filled.append((trace, places[colour]))
        elif "markers" in _mode(trace):
            marked.append((trace, places[colour]))
        elif "lines" in _mode(trace):
            drawn.append((trace, places[colour]))
    if _several(marked):
        for trace, place in marked:
            if trace.marker.symbol is None:
                trace.marker.symbol = SYMBOLS[place % len(SYMBOLS)]
                trace.marker.size = trace.marker.size or 7
    if _several(drawn):
        for trace, place in drawn:
            if trace.line.dash is None:
                trace.line.dash = DASHES[place % len(DASHES)]
    if _several(filled):
        for trace, place in filled:
            if trace.marker.pattern.shape is None:
                trace.marker.pattern = {
                    "shape": _HATCHINGS[place % len(_HATCHINGS)], "fillmode": "overlay", "fgcolor": "white",
                    "fgopacity": 0.5, "size": 8, "solidity": 0.15,
                }  # fmt: skip


def _several(series: Sequence[tuple[object, int]]) -> bool:
    return len({place for _, place in series}) > 1


def _colour(trace: object) -> str | None:
    """The one colour of a bar or of a scatter's marks or line; None for other kinds and for a colour a point."""
    if isinstance(trace, go.Bar):
        found = trace.marker.color
    elif isinstance(trace, go.Scatter):
        found = trace.marker.color or trace.line.color
    else:
        return None
    return found if isinstance(found, str) else None


def _mode(trace: go.Scatter) -> str:
    if trace.mode is not None:
        return trace.mode
    x = trace.x if trace.x is not None else ()
    return "lines+markers" if len(x) < _FEW else "lines"
