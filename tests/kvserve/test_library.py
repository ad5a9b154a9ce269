"""Measured profiles in a file: what is saved is what is loaded, and a mistake is named."""

import pytest
from kvserve_helpers import kv_of, layout_of

from diffkv_repro.kvserve import Profile, measure_all
from diffkv_repro.kvserve.latency import MeasuredProfile, ServiceContext
from diffkv_repro.kvserve.library import LibraryEntry, ProfileLibrary, entries_of

SLOW = LibraryEntry(Profile.named("cachegen-1"), MeasuredProfile("small", 9.0, 1e8, 1e8, {"*": 0.98}), 1e6)
FAST = LibraryEntry(Profile.named("int4"), MeasuredProfile("quick", 3.5, 1e10, 1e10, {"*": 0.95, "qa": 0.99}), 1e6)


def test_a_library_goes_to_a_file_and_back(tmp_path):
    library = ProfileLibrary((SLOW, FAST))
    library.save(tmp_path / "library.yaml")
    again = ProfileLibrary.load(tmp_path / "library.yaml")
    assert again == library
    assert again.names == ["small", "quick"]
    assert (again.profile("quick"), again.profile("none")) == (Profile.named("int4"), Profile())
    assert [dict(entry.measured.quality) for entry in again.entries] == [{"*": 0.98}, {"*": 0.95, "qa": 0.99}]


def test_what_was_measured_can_be_saved(tmp_path):
    layout = layout_of()
    profiles = [Profile.named("int4"), Profile.named("lossless-zstd")]
    runs = measure_all(profiles, kv_of(layout, 40), layout, repeats=1)
    library = ProfileLibrary(entries_of(runs, {str(profiles[0]): {"*": 0.9}}))
    library.save(tmp_path / "library.yaml")
    again = ProfileLibrary.load(tmp_path / "library.yaml")
    assert again == library
    assert [again.profile(name) for name in again.names] == profiles


def test_its_controller_chooses_among_them():
    controller = ProfileLibrary((SLOW, FAST)).controller()
    slow, fast = (controller.decide(ServiceContext("*", 1e6, bandwidth)) for bandwidth in (1e6, 1e9))
    assert (slow.profile.name, fast.profile.name) == ("small", "quick")


def test_names_and_sizes_must_be_possible():
    with pytest.raises(ValueError, match="no profile at all"):
        ProfileLibrary(())
    with pytest.raises(ValueError, match="stands for no compression"):
        ProfileLibrary((LibraryEntry(Profile.named("int4"), MeasuredProfile("none", 2, 1, 1)),))
    with pytest.raises(ValueError, match="'quick' is both"):
        ProfileLibrary((FAST, LibraryEntry(Profile(), FAST.measured, 2e6)))
    with pytest.raises(ValueError, match="raw_bytes of quick is 0"):
        LibraryEntry(Profile(), FAST.measured, 0)
    with pytest.raises(ValueError, match="unknown profile 'x'; the library has small, quick"):
        ProfileLibrary((SLOW, FAST)).profile("x")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- 1", "needs one key, profiles"),
        ("profiles: []", "no profile at all"),
        ("profiles: 3", "not iterable"),
        ("profiles: [{name: a}]", "needed are decode, encode"),
        ("profiles: [{name: a, profile: int4, ratio: 2, encode: 1, decode: 1, speed: 3}]", "no 'speed'"),
        ("profiles: [{name: a, profile: int5, ratio: 2, encode: 1, decode: 1}]", "unknown profile 'int5'"),
        ("profiles: [{name: a, profile: int4, ratio: -2, encode: 1, decode: 1}]", "ratio of a is -2"),
        ("profiles: [{name: a, profile: int4, ratio: x, encode: 1, decode: 1}]", "could not convert"),
        ("profiles: {", "while parsing"),
    ],
)
def test_a_file_that_holds_none_is_named(tmp_path, text, words):
    path = tmp_path / "library.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"library\.yaml.*{words}"):
        ProfileLibrary.load(path)
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        ProfileLibrary.load(tmp_path / "other.yaml")
