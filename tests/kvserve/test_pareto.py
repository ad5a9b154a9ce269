"""The front against a naive twin, and the library on disk that the controller loads."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffkv_repro.kvserve import NAMED
from diffkv_repro.kvserve.controller import Controller
from diffkv_repro.kvserve.latency import ServiceContext
from diffkv_repro.kvserve.pareto import Entry, ProfileLibrary, non_dominated

NAMES = list(NAMED)
numbers = st.integers(0, 4).map(float)
points = st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=12)


def entry(name: str, workload: str = "prose", **changes) -> Entry:
    values = {
        "model": "m", "weights": "w", "device": "d", "quality": 0.98, "ratio": 4.0, "encode": 2e8, "decode": 4e8,
        "raw_bytes": 1000,
    } | changes  # fmt: skip
    return Entry(workload=workload, profile=NAMED[name], **values)


@given(points)
def test_front_is_the_naive_one(rows):
    def beats(a, b):
        return a[0] >= b[0] and a[1] >= b[1] and a[2] <= b[2] and a != b

    naive = [not any(beats(other, own) for other in rows) for own in rows]
    assert non_dominated(*zip(*rows, strict=True)).tolist() == naive


@given(points)
def test_every_point_is_on_the_front_or_beaten_by_one_that_is(rows):
    front = non_dominated(*zip(*rows, strict=True))
    assert front.any()
    for own, stays in zip(rows, front, strict=True):
        beaten = any(
            kept and a[0] >= own[0] and a[1] >= own[1] and a[2] <= own[2] for a, kept in zip(rows, front, strict=True)
        )
        assert stays or beaten


@given(points)
def test_latency_only_adds_points_among_different_ones(rows):
    distinct = list({row[:2]: row for row in rows}.values())
    quality, ratio, seconds = zip(*distinct, strict=True)
    assert (non_dominated(quality, ratio) <= non_dominated(quality, ratio, seconds)).all()


def test_a_latency_within_the_margin_saves_nothing():
    quality, ratio = [0.99, 0.98], [4.0, 3.9]
    assert non_dominated(quality, ratio, [1.0, 0.95]).tolist() == [True, True]
    assert non_dominated(quality, ratio, [1.0, 0.95], margin=0.1).tolist() == [True, False]
    assert non_dominated([], [], []).tolist() == []


@pytest.mark.parametrize(
    "rows", [([1.0], [1.0, 2.0], [1.0]), ([np.nan], [1.0], [1.0]), ([1.0], [1.0], [-1.0]), ([[1.0]], [[1.0]], [[1.0]])]
)
def test_points_are_refused(rows):
    with pytest.raises(ValueError, match=r"needed are finite|negative"):
        non_dominated(*rows)


def test_library_goes_to_disk_and_back(tmp_path):
    library = ProfileLibrary((entry(NAMES[0], low=0.97, high=0.99), entry(NAMES[1], "code", provenance={"seed": 1})))
    again = ProfileLibrary.load(library.save(tmp_path / "library.json"))
    assert again == library
    assert [own.provenance for own in again.entries] == [{}, {"seed": 1}]


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", '{"format": 2, "entries": []}', '{"format": 1, "entries": [{}]}', '{"format": 1}',
        '{"format": 1, "entries": [{"profile": {"quantizer": "nothing"}}]}',
    ],
)  # fmt: skip
def test_damaged_libraries_are_refused(tmp_path, text):
    path = tmp_path / "library.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"library\.json is damaged"):
        ProfileLibrary.load(path)
    with pytest.raises(ValueError, match="cannot be read"):
        ProfileLibrary.load(tmp_path / "none.json")


def test_entries_that_cannot_be_are_refused(tmp_path):
    library = ProfileLibrary((entry(NAMES[0]),))
    document = json.loads(library.save(tmp_path / "l.json").read_text())
    document["entries"][0]["ratio"] = -1
    (tmp_path / "l.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match="ratio"):
        ProfileLibrary.load(tmp_path / "l.json")


def test_a_new_search_replaces_what_was_found_before():
    old = ProfileLibrary((entry(NAMES[0]), entry(NAMES[1], "code")))
    new = old.merged([entry(NAMES[2])])
    assert [(own.workload, own.profile) for own in new.entries] == [
        ("code", NAMED[NAMES[1]]),
        ("prose", NAMED[NAMES[2]]),
    ]
    assert old.merged([]) == old


def test_front_is_of_each_workload():
    worse = entry(NAMES[1], quality=0.97, ratio=3.0, encode=1e8)
    library = ProfileLibrary((entry(NAMES[0]), worse, entry(NAMES[1], "code", quality=0.97, ratio=3.0, encode=1e8)))
    assert [own.workload for own in library.front().entries] == ["prose", "code"]


def test_controller_loads_it(tmp_path):
    library = ProfileLibrary(
        (
            entry(NAMES[0]), entry(NAMES[0], "code", quality=0.9, ratio=5.0), entry(NAMES[1], ratio=8.0, quality=0.5),
            entry(NAMES[0], device="other", ratio=99.0),
        )
    )  # fmt: skip
    path = library.save(tmp_path / "library.json")
    profiles = ProfileLibrary.load(path).for_controller("m", "d")
    (found,) = (own for own in profiles[1000.0] if own.name == str(NAMED[NAMES[0]]))
    assert found.quality == {"prose": 0.98, "code": 0.9}
    assert found.ratio == pytest.approx(2 / (1 / 4 + 1 / 5))
    assert found.encode == pytest.approx(2e8)
    controller = Controller(profiles)
    slow = ServiceContext("prose", 1000, 1e6, min_quality=0.97)
    assert controller.decide(slow).chosen.profile.name == found.name
    with pytest.raises(ValueError, match="it has m on d, m on other"):
        library.for_controller("m", "gpu")
