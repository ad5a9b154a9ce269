"""Series that only their colour tells apart get another mark; what a figure chose itself stays."""

import plotly.graph_objects as go
import pytest

from diffkv_repro.study.drawing import PALETTE, finish
from diffkv_repro.study.grey import tell_apart


def looks(figure):
    """What is left of each series in grey."""
    return [look(trace) for trace in figure.data]


def look(trace):
    if isinstance(trace, go.Bar):
        return (trace.marker.pattern.shape,)
    return (trace.marker.symbol if "markers" in (trace.mode or "") else None, trace.line.dash)


@pytest.mark.parametrize(
    "series",
    [
        lambda colour: go.Bar(x=["a", "b"], y=[1, 2], marker_color=colour),
        lambda colour: go.Scatter(x=[1, 2], y=[1, 2], mode="markers", marker_color=colour),
        lambda colour: go.Scatter(x=[1, 2], y=[1, 2], mode="lines+markers", line_color=colour),
        lambda colour: go.Scatter(x=list(range(90)), y=list(range(90)), line_color=colour),
    ],
    ids=["bars", "points", "joined points", "lines"],
)
def test_every_colour_of_the_palette_has_a_look_of_its_own(series):
    figure = finish(go.Figure([series(colour) for colour in PALETTE]), "foot")
    assert len(set(looks(figure))) == len(PALETTE)


def test_a_colour_looks_alike_in_every_panel():
    figure = go.Figure([go.Bar(x=[1], y=[1], marker_color=PALETTE[place]) for place in (2, 0, 2)])
    tell_apart(figure, PALETTE)
    assert looks(figure)[0] == looks(figure)[2] != looks(figure)[1]


def test_what_a_figure_chose_stays_and_one_series_needs_nothing():
    chosen = go.Scatter(x=[1], y=[1], mode="markers", marker={"color": PALETTE[1], "symbol": "star"})
    dashed = go.Scatter(x=list(range(30)), y=[1] * 30, line={"color": PALETTE[1], "dash": "longdash"})
    figure = go.Figure([chosen, go.Scatter(x=[2], y=[1], mode="markers", marker_color=PALETTE[0]), dashed])
    tell_apart(figure, PALETTE)
    assert figure.data[0].marker.symbol == "star"
    assert figure.data[2].line.dash == "longdash"
    alone = go.Figure([go.Bar(x=[1], y=[1], marker_color=PALETTE[3]), go.Bar(x=[1], y=[1], marker_color=PALETTE[3])])
    tell_apart(alone, PALETTE)
    assert looks(alone) == [(None,), (None,)]


def test_a_colour_a_point_and_other_kinds_of_traces_are_left_alone():
    figure = go.Figure(
        [
            go.Bar(x=[1, 2], y=[1, 2], marker_color=[PALETTE[0], PALETTE[1]]),
            go.Bar(x=[1], y=[1], marker_color="#123456"),
            go.Heatmap(z=[[1, 2]]),
            go.Scatter(x=None, y=None),
        ]
    )
    before = figure.to_dict()
    tell_apart(figure, PALETTE)
    assert figure.to_dict() == before


def test_a_foot_is_not_said_twice():
    figure = finish(finish(go.Figure(), "same model<br>GPU"), "same model<br>CPU")
    (foot,) = (note.text for note in figure.layout.annotations if note.name == "foot")
    assert foot.split("<br>") == ["same model", "GPU", "CPU"]
