"""The controller learns from observed times, forgets, and keeps its state in a file."""

import json
import math
import threading

import pytest
from controller_helpers import GREEDY, PROFILES, request, serve

from diffkv_repro.kvserve.controller import Controller, ControllerSettings
from diffkv_repro.kvserve.latency import MeasuredProfile, transfer_seconds


def test_it_leaves_a_profile_that_slows_down_and_comes_back():
    controller = Controller(PROFILES, GREEDY)
    context = request(5e7)
    for _ in range(20):
        assert serve(controller, context).profile.name == "8x"
    slowed = [serve(controller, context, lambda name: 4.0 if name == "8x" else 1.0).profile.name for _ in range(60)]
    assert slowed.index("4x") <= 4
    assert 1 <= slowed[5:].count("8x") <= 4, "tried again now and then"
    healed = [serve(controller, context).profile.name for _ in range(100)]
    assert healed[-1] == "8x"


def test_a_slow_down_of_all_codecs_is_learnt_from_one():
    context, slow = request(1.2e9), 20.0
    shared, apart = (Controller(PROFILES, ControllerSettings(epsilon=0, shared=share)) for share in (0.8, 0.0))
    uncompressed = {}
    for name, controller in (("shared", shared), ("apart", apart)):
        names = []
        for _ in range(12):
            decision = controller.decide(context)
            codec = slow * decision.profile.codec_seconds
            seconds = context.raw_bytes * (codec + 1 / (context.bandwidth * decision.profile.ratio))
            controller.observe(decision, seconds)
            names.append(decision.profile.name)
        uncompressed[name] = names.count("none")
    assert uncompressed["shared"] > uncompressed["apart"]


def test_residuals_are_per_byte_so_sizes_do_not_matter():
    controller = Controller(PROFILES[2:], GREEDY)
    for _ in range(30):
        serve(controller, request(5e7, raw_bytes=1e6), lambda name: 1.5)
    large = request(5e7, raw_bytes=1e9)
    assert controller.decide(large).predicted == pytest.approx(1.5 * transfer_seconds(PROFILES[2], large), rel=0.02)


@pytest.mark.parametrize("had", [2e7, 1e9])
def test_a_wrong_bandwidth_teaches_nothing_about_the_profile(had):
    controller = Controller(PROFILES, GREEDY)
    decision = controller.decide(request(5e7))
    seconds = transfer_seconds(decision.profile, request(had))
    controller.observe(decision, seconds, bandwidth=had)
    assert all(abs(one.residual) < 1e-9 for one in controller.decide(request(5e7)).candidates)
    controller.observe(decision, seconds)
    assert any(abs(one.residual) > 1e-3 for one in controller.decide(request(5e7)).candidates)


@pytest.mark.parametrize("had", [0, -1, math.nan, math.inf, "fast"])
def test_a_bandwidth_that_cannot_be_teaches_nothing(had):
    controller = Controller(PROFILES, GREEDY)
    first = controller.decide(request())
    controller.observe(first, 1.0, bandwidth=had)
    assert controller.decide(request()).predicted == first.predicted


def test_one_stall_is_soon_forgotten():
    controller = Controller(PROFILES, GREEDY)
    context = request(5e7)
    for _ in range(10):
        serve(controller, context)
    serve(controller, context, lambda name: 1e12)
    names = [serve(controller, context).profile.name for _ in range(200)]
    assert names[-1] == "8x"


@pytest.mark.parametrize("seconds", [0, -1, math.nan, math.inf, None, "soon"])
def test_times_that_cannot_be_teach_nothing(seconds):
    controller = Controller(PROFILES, GREEDY)
    first = controller.decide(request())
    controller.observe(first, seconds)
    assert controller.decide(request()).predicted == first.predicted


def learnt():
    controller = Controller(PROFILES, ControllerSettings(seed=3))
    for step in range(50):
        serve(controller, request(5e7 * (1 + step % 7), slo=5), lambda name: 1.7 if name == "8x" else 1.1)
    return controller


def test_saved_and_loaded_it_goes_on_as_if_nothing_had_been(tmp_path):
    before, after = learnt(), Controller(PROFILES, ControllerSettings(seed=3))
    before.save(tmp_path / "state.json")
    after.load(tmp_path / "state.json")
    for step in range(80):
        context = request(3e7 * (1 + step % 9))
        a, b = serve(before, context), serve(after, context)
        assert (a.profile, a.predicted, a.explored, a.number) == (b.profile, b.predicted, b.explored, b.number)


def test_what_was_learnt_of_another_measurement_is_left_out(tmp_path):
    learnt().save(tmp_path / "state.json")
    anew = MeasuredProfile.from_speed("8x", 8, 6e8, {"qa": 0.98})
    controller = Controller([*PROFILES[:2], anew], GREEDY)
    controller.load(tmp_path / "state.json")
    assert [entry["key"] for entry in controller._residuals.as_dict()["own"]].count([0, "8x"]) == 0


def test_reset_forgets():
    controller = learnt()
    controller.reset()
    context = request(5e7)
    decision = controller.decide(context)
    assert decision.number == 1
    assert decision.predicted == pytest.approx(transfer_seconds(decision.profile, context))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "{", '{"format": 2}', "null"], ids=["empty", "list", "bare", "cut", "format", "null"]
)
def test_a_damaged_state_is_refused_and_changes_nothing(tmp_path, text):
    path = tmp_path / "state.json"
    path.write_text(text)
    controller = learnt()
    controller.save(tmp_path / "before.json")
    with pytest.raises(ValueError, match=r"state\.json"):
        controller.load(path)
    controller.save(tmp_path / "after.json")
    assert (tmp_path / "after.json").read_bytes() == (tmp_path / "before.json").read_bytes()
    with pytest.raises(ValueError, match="cannot be read"):
        controller.load(tmp_path / "absent.json")


def test_a_state_of_other_residuals_is_refused(tmp_path):
    learnt().save(tmp_path / "state.json")
    assert json.loads((tmp_path / "state.json").read_text())["format"] == 1
    with pytest.raises(ValueError, match="of each profile, not interval"):
        Controller(PROFILES, ControllerSettings(residual_of="interval")).load(tmp_path / "state.json")


def test_residuals_of_intervals_are_learnt_apart():
    controller = Controller(PROFILES, ControllerSettings(epsilon=0, residual_of="interval", shared=0, memory=math.inf))
    slow, fast = request(5e7), request(1e12)
    for _ in range(5):
        serve(controller, slow, lambda name: 1.2)
    name = controller.decide(slow).profile.name
    assert next(one for one in controller.decide(slow).candidates if one.profile.name == name).residual > 0
    assert all(one.residual == 0 for one in controller.decide(fast).candidates)


def test_threads_share_one_controller():
    controller = Controller(PROFILES)
    numbers, failures = [], []

    def work():
        try:
            for _ in range(200):
                numbers.append(serve(controller, request(5e7), lambda name: 1.3).number)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert sorted(numbers) == list(range(1, 1201))
