"""Records give back the figure that was drawn; plain numbers become measurements."""

import plotly.graph_objects as go
import pytest

from diffkv_repro.study import Measurement, measurements
from diffkv_repro.study.records import Record, RecordError, read_record, record_path, record_text


def drawn():
    figure = go.Figure([
        go.Scatter(x=[1, 2, 3], y=[0.5, 0.25, 0.125], name="line", mode="lines"),
        go.Bar(x=["a", "b"], y=[3, 4], name="bars"),
    ])  # fmt: skip
    return figure.update_layout(title="two traces", xaxis_title="memory (%)")


def test_the_traces_come_back_from_disk(tmp_path):
    figure = drawn()
    record = Record("diffkv-fig90", {"profile": "cpu"}, {"nine": Measurement(9)}, figure.to_plotly_json())
    record_path(tmp_path, "diffkv-fig90").write_text(record_text(record))
    again = read_record(tmp_path, "diffkv-fig90").as_figure()
    assert [(trace.type, trace.name) for trace in again.data] == [("scatter", "line"), ("bar", "bars")]
    assert list(again.data[0].y) == [0.5, 0.25, 0.125]
    assert again.layout.title.text == "two traces"
    assert again.layout.xaxis.title.text == "memory (%)"


def test_changing_the_figure_leaves_the_record_alone():
    record = Record("diffkv-fig90", {}, {}, drawn().to_plotly_json())
    record.as_figure().update_layout(title="another").data[0].name = "another"
    assert record.as_figure().layout.title.text == "two traces"
    assert record.as_figure().data[0].name == "line"


def test_a_record_without_a_figure_gives_an_empty_one():
    assert record_of_nothing().as_figure().data == ()


def record_of_nothing():
    return Record("diffkv-fig90", {}, {})


def test_plain_numbers_become_measurements():
    assert measurements({"a": 1, "b": 2.5}) == {"a": Measurement(1), "b": Measurement(2.5)}
    assert measurements({}) == {}
    (found,) = measurements({"a": 7.25}).values()
    assert (found.unit, found.n, found.note) == ("", None, "")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "5", []])
def test_what_is_no_finite_number_is_refused(value):
    with pytest.raises(RecordError, match="a measured value must be a finite number"):
        measurements({"a": value})
