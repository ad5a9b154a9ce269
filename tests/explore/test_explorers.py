"""Every explorer: a hundred random moves without an error or a stale figure, and code that makes the same figure."""

import dataclasses
import statistics
import time

import ipywidgets
import pytest
from explore_helpers import OTHER_WORDS, PROFILES, WORDS, plain, recreated, wander

from diffkv_repro import explore
from diffkv_repro.core.threads import one_thread
from diffkv_repro.diffkv import CompressionPolicy
from diffkv_repro.explore import (
    Story,
    bandwidth_explorer,
    choice_named,
    compare_explorer,
    draw_policy,
    effect_of,
    observe,
    page_inspector,
    policy_explorer,
    read_profiles,
    write_profiles,
)
from diffkv_repro.explore.policy import policy_of
from diffkv_repro.kvserve import Profile
from diffkv_repro.models import load_model

SIZE = {"limit": 60, "observed": 5}
COMPARED = (
    "FP16",
    "K8V4",
    "DiffKV, paper",
    "DiffKV, released code",
    "KIVI 2 bit",
    "wire: int4",
    "wire: kvserve-default",
)


def policy(loaded):
    return policy_explorer(loaded, WORDS, **SIZE)


def pages(loaded):
    return page_inspector(Story((20, 33), layers=2, kv_heads=2, generated=5, seed=1))


def bandwidth(loaded):
    return bandwidth_explorer(PROFILES)


def compare(loaded):
    return compare_explorer(loaded, WORDS, **SIZE, new_tokens=4)


EXPLORERS = [policy, pages, bandwidth, compare]


@pytest.fixture(params=EXPLORERS, ids=lambda make: make.__name__)
def explorer(request, loaded):
    return request.param(loaded)


def test_every_explorer_is_here():
    """One that is added to the package is tested like the others."""
    made = {name for name in explore.__all__ if name.endswith(("_explorer", "_inspector"))}
    assert made == {"policy_explorer", "page_inspector", "bandwidth_explorer", "compare_explorer"}
    assert len(EXPLORERS) == len(made)


def test_a_stale_figure_is_noticed(loaded):
    """The check of the test below: an explorer that keeps its figure, or draws that of another state, fails it."""
    explorer = bandwidth(loaded)
    explorer._draw = lambda: None
    with pytest.raises(AssertionError, match="a stale figure"):
        wander(explorer, 20)
    explorer = bandwidth(loaded)
    first, show = dict(explorer.state), explorer._show
    explorer._show = lambda state: show(first)
    with pytest.raises(AssertionError, match="other than the copied code"):
        wander(explorer, 60)


@pytest.mark.parametrize("make", EXPLORERS)
def test_a_hundred_random_moves(make, loaded):
    explorer = make(loaded)
    texts = {"text": (WORDS, OTHER_WORDS), "model": (explorer.controls.get("model") and loaded.source,),
             "left": COMPARED, "right": COMPARED}  # fmt: skip
    wander(explorer, 100, texts=texts)


def test_the_copied_code_makes_the_same_figure(explorer):
    assert plain(recreated(explorer)["figure"]) == plain(explorer.figure)


def test_the_copied_code_follows_the_controls(loaded):
    explorer = policy(loaded)
    for name, value in {"alpha_high": 2.5, "alpha_low": 0.4, "window": 3, "high": "K4V4", "low": "K2V4"}.items():
        explorer.controls[name].value = value
    explorer.controls["rule"].index = 1
    explorer.controls["text"].value = '\' \\ """ ' + OTHER_WORDS
    names = recreated(explorer)
    assert names["policy"] == CompressionPolicy.released("K4V4-K2V4", alpha_high=2.5, alpha_low=0.4, window=3)
    assert plain(names["figure"]) == plain(explorer.figure)
    assert names["text"] in explorer.below.value


def test_the_low_threshold_follows_the_high_one(loaded):
    explorer = policy(loaded)
    explorer.controls["alpha_low"].value = 0.5
    explorer.controls["alpha_high"].value = 0.3
    assert explorer.controls["alpha_low"].value == 0.3
    assert policy_of(explorer.state).alphas == (0.3, 0.3)


def test_layers_and_heads_are_those_of_the_model(loaded, sliding):
    explorer = policy(loaded)
    assert list(explorer.controls["layer"].options) == ["all", 0, 1, 2]
    explorer.controls["layer"].value = 2
    explorer.controls["model"].value = sliding.source
    assert list(explorer.controls["layer"].options) == ["all", 1]
    assert explorer.controls["layer"].value == "all"
    assert explorer.error is None


def test_a_mistake_takes_the_figure_away_and_says_what_is_wrong(loaded):
    explorer = policy(loaded)
    explorer.controls["text"].value = "w1 <b>w2</b>"
    assert "at least 10 are needed" in explorer.said.value
    assert isinstance(explorer.error, ValueError)
    assert explorer.figure not in explorer.children
    assert explorer.below.value == explorer.code.value == ""
    explorer.controls["model"].value = "/no/such <model>"
    assert "there is no file or folder" in explorer.said.value
    assert "<model>" not in explorer.said.value
    explorer.controls["model"].value = loaded.source
    explorer.controls["text"].value = WORDS
    assert explorer.error is None
    assert explorer.said.value == ""
    assert explorer.figure in explorer.children


def test_what_is_not_the_users_fault_is_raised_and_shown(loaded, monkeypatch):
    explorer = policy(loaded)
    monkeypatch.setattr("diffkv_repro.explore.policy.draw_policy", lambda effect: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        explorer.controls["window"].value = 3
    assert "ZeroDivisionError" in explorer.said.value
    assert "Traceback" in explorer.said.value
    assert explorer.figure not in explorer.children


def test_there_is_no_output_widget(explorer):
    def walk(widget):
        yield widget
        for child in getattr(widget, "children", ()):
            yield from walk(child)

    assert not [one for one in walk(explorer) if isinstance(one, ipywidgets.Output)]


def press(explorer, text, widget=None):
    (button,) = [one for one in _buttons(explorer) if one.description == text]
    button.click()


def _buttons(widget):
    if isinstance(widget, ipywidgets.Button):
        yield widget
    for child in getattr(widget, "children", ()):
        yield from _buttons(child)


def test_a_policy_file(loaded, tmp_path):
    explorer = policy(loaded)
    explorer.controls["alpha_high"].value = 4
    explorer.path.value = str(tmp_path / "policy.json")
    press(explorer, "write file")
    assert CompressionPolicy.load(tmp_path / "policy.json") == policy_of(explorer.state)
    assert choice_named(str(tmp_path / "policy.json")) == policy_of(explorer.state)
    assert "written" in explorer.saved.value


def test_a_file_that_cannot_be_written_is_said(loaded, tmp_path):
    explorer = policy(loaded)
    (tmp_path / "file").write_text("")
    explorer.path.value = str(tmp_path / "file" / "policy.json")
    press(explorer, "write file")
    assert "cannot write" in explorer.said.value
    assert explorer.saved.value == ""


def test_profiles_on_file(tmp_path, loaded):
    explorer = bandwidth(loaded)
    explorer.controls["profiles"].value = ("4x", "not judged")
    explorer.path.value = str(tmp_path / "profiles.json")
    press(explorer, "write file")
    assert read_profiles(tmp_path / "profiles.json") == [PROFILES[1], PROFILES[3]]
    endless = dataclasses.replace(PROFILES[0], decode=float("inf"))
    write_profiles(tmp_path / "p.json", [endless])
    assert read_profiles(tmp_path / "p.json") == [endless]


@pytest.mark.parametrize("text", ["", "{}", '{"profiles": [{"name": "a"}]}', '{"profiles": 3}', "[1]"])
def test_a_file_that_holds_no_profiles_is_refused(tmp_path, text):
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"profiles file .*p\.json"):
        read_profiles(path)
    with pytest.raises(ValueError, match="cannot be read"):
        read_profiles(tmp_path / "none.json")


def test_compared_files(loaded, tmp_path):
    explorer = compare(loaded)
    explorer.controls["left"].value, explorer.controls["right"].value = "DiffKV, released code", "wire: kivi-2bit"
    explorer.path.value = str(tmp_path / "mine")
    press(explorer, "write file")
    assert choice_named(str(tmp_path / "mine-left.json")) == CompressionPolicy.released()
    assert choice_named(str(tmp_path / "mine-right.yaml")) == Profile.named("kivi-2bit")
    explorer.controls["left"].value = str(tmp_path / "mine-right.yaml")
    assert explorer.error is None
    explorer.controls["left"].value = "nonsense"
    assert "unknown choice &#x27;nonsense&#x27;; allowed are FP16" in explorer.said.value


def test_measuring_runs_the_model_and_lasts_until_a_control_moves(loaded):
    explorer = policy(loaded)
    press(explorer, "measure agreement")
    assert "Measured through the cache" in explorer.said.value
    explorer.controls["window"].value = 5
    assert explorer.said.value == ""


def test_an_effect_is_what_the_figure_says(loaded):
    explorer = policy(loaded)
    effect = effect_of(observe(loaded, WORDS, **SIZE), policy_of(explorer.state))
    assert plain(draw_policy(effect)) == plain(explorer.figure)
    assert f"{effect.size.true_ratio:.1%} of FP16" in explorer.figure.layout.title.text


def test_a_control_of_the_real_model_answers_within_three_tenths_of_a_second():
    """Processor time on one thread, statistics kept: from the move to the new figure, its text and its tables."""
    with one_thread():
        real = load_model("smollm2-135m")
        explorer = policy_explorer(real, "Keys decide where attention looks; values are averaged. " * 30, limit=256)
        assert len(explorer.figure.data[0].y) == 90
        times = []
        for value in (0.5, 1.5, 2.5, 3.5, 4.5):
            started = time.process_time()
            explorer.controls["alpha_high"].value = value
            times.append(time.process_time() - started)
    assert explorer.error is None
    assert statistics.median(times) <= 0.3
