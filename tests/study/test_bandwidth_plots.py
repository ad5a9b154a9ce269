"""What the figures of notebook 12 show, without a browser."""

import pandas as pd
import pytest

from diffkv_repro.kvserve.envelope_facts import GBPS
from diffkv_repro.kvserve.latency import Envelope, MeasuredProfile
from diffkv_repro.kvserve.simulator import Contention, Load, replay
from diffkv_repro.kvserve.traces import Trace
from diffkv_repro.study.drawing import as_data, finish
from diffkv_repro.study.plots import bandwidth as plots

PROFILES = [
    MeasuredProfile.from_speed(name, ratio, speed)
    for name, ratio, speed in [("2x", 2, 8e9), ("4x", 4, 3e9), ("8x", 8, 1e9), ("never", 2, 1e7)]
]


def named(figure, name):
    return [trace for trace in figure.data if trace.name == name]


def test_every_gain_crosses_one_at_the_threshold():
    figure = plots.gains({"a": PROFILES[:2], "b": PROFILES[2:]})
    for trace in figure.data:
        above = [y > 1 for y in trace.y]
        assert above == [x < 1 for x in trace.x]
    assert [trace.showlegend for trace in figure.data] == [True, False, True, False]
    assert as_data(finish(figure, "foot"))


def test_the_envelope_lies_under_every_line_and_rings_lie_on_the_plain_cache():
    figure = plots.envelope({"one": PROFILES, "two": PROFILES[:1]}, title="t")
    (band, _), lines = named(figure, "lower envelope"), [named(figure, profile.name)[0] for profile in PROFILES]
    for line in [*lines, named(figure, "none")[0]]:
        assert all(low <= y * (1 + 1e-9) for low, y in zip(band.y, line.y, strict=True))
    ring = named(figure, "break-even")[0]
    assert list(ring.x) == pytest.approx([profile.break_even / GBPS for profile in PROFILES])
    assert [x * y for x, y in zip(ring.x, ring.y, strict=True)] == pytest.approx([8] * len(PROFILES))
    assert min(named(figure, "released table")[0].y) >= 1 - 1e-9
    widths = {line.name: line.line.width for line in lines}
    assert widths["never"] < widths["2x"], "only what is on the envelope is thick"


def test_candidates_are_thick_at_a_bandwidth():
    lowest = Envelope(PROFILES).bandwidths[-1] / 10
    figure = plots.envelope({"one": PROFILES}, title="t", at=lowest)
    thick = {trace.name for trace in figure.data if trace.line.width == 2.5}
    assert thick == {"4x", "8x"}


def test_figure_11_marks_both_boundaries():
    lines = [MeasuredProfile.from_speed(name, 1 / slope, 1 / height)
             for name, slope, height in [("p1", 2.5, 0.3), ("p2", 1.3, 0.7), ("p3", 0.75, 0.98)]]  # fmt: skip
    shares = pd.DataFrame({"alone": {0.1: 90.0, 0.5: 60.0}, "more": {0.1: 99.0, 0.5: 80.0}})
    figure = plots.candidates(lines, {"p2": -0.06}, 0.683, shares, 0.1)
    texts = " ".join(note.text for note in figure.layout.annotations)
    assert all(text in texts for text in ("0.333", "0.509", "drawn at 0.683"))
    drifted, plain = named(figure, "p2, drifted")[0], named(figure, "p2")[0]
    assert drifted.y[0] - plain.y[0] == pytest.approx(-0.06)
    assert list(named(figure, "more")[0].y) == [99.0, 80.0]


def test_figure_16_draws_every_arm_and_relates_the_paper_to_full():
    trace = Trace((0, 6), (1e9, 4e9))
    spells = [Contention(1, 2, 3)]
    runs = replay(PROFILES, trace, Load(1e8), contention=spells)
    rows = {arm: {"mean": run.mean, "low": 0.9 * run.mean, "high": 1.1 * run.mean, "tail": 1.0}
            for arm, run in runs.items()}  # fmt: skip
    paper = {"full": 1, "no bandit": 1.2}
    figure = plots.online(trace, [2e9, 9e9], runs, spells, pd.DataFrame(rows).T, paper, "t")
    assert {trace.name for trace in figure.data} >= set(runs)
    marks = named(figure, "paper, relative to full")[0]
    assert list(marks.y) == pytest.approx([runs["full"].mean, 1.2 * runs["full"].mean])
    assert as_data(finish(figure, "foot"))
