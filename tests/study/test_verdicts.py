import json

import pytest

from diffkv_repro.study.claims import Claim, Correction, Expectation, Figure
from diffkv_repro.study.records import Measurement, Record, RecordError, read_record, record_path, record_text
from diffkv_repro.study.verdicts import checked, expected_text, judge, judge_all, number_text, tally


def claim(expectation=None, **fields):
    kind = "trend" if expectation else "reported"
    values = {"kind": kind, "why": "" if expectation else "too far", "metric": "m", "statement": "s"} | fields
    return Claim(
        id="diffkv-fig99-a", figure="diffkv-fig99", paper="DiffKV", notebook="99_x", expectation=expectation, **values
    )


def record(value, profile="cpu", metric="m", **config):
    return Record("diffkv-fig99", {"profile": profile, "config": config}, {metric: Measurement(value, note="warm")})


AT_LEAST_5 = Expectation(">=", 5)
CORRECTED = Correction("It is about 3.", "Because.", Expectation("==", 3, 0.5))


def test_pass_fail_and_refuted():
    assert judge(claim(AT_LEAST_5), record(6.0)).verdict == "pass"
    failed = judge(claim(AT_LEAST_5, unit="x"), record(3.25))
    assert (failed.verdict, failed.reason) == ("fail", "measured 3.25, expected >= 5 x")
    refuted = judge(claim(AT_LEAST_5, correction=CORRECTED), record(3.25))
    assert (refuted.verdict, refuted.reason) == ("refuted", "It is about 3. Because.")
    assert judge(claim(AT_LEAST_5, correction=CORRECTED), record(1.0)).verdict == "fail", "neither holds"
    assert judge(claim(AT_LEAST_5, correction=CORRECTED), record(6.0)).verdict == "pass"


def test_not_run_says_what_is_missing():
    missing = judge(claim(AT_LEAST_5, needs="a GPU"), None, built=False)
    assert (missing.verdict, missing.reason) == ("not run", "notebook 99_x is not built yet; needs a GPU")
    assert judge(claim(AT_LEAST_5), None).reason == "not measured yet"
    other = record(1.0, metric="other")
    assert judge(claim(AT_LEAST_5, needs="a GPU"), other).reason == "needs a GPU"
    assert judge(claim(AT_LEAST_5), other).reason == "profile cpu does not measure m"


def test_a_reported_claim_shows_its_value_and_is_not_judged():
    shown = judge(claim(), record(6.0))
    assert (shown.verdict, shown.measured, shown.reason) == ("not run", 6.0, "reported, not judged: too far")


def test_a_smoke_run_judges_only_what_does_not_depend_on_size():
    assert judge(claim(AT_LEAST_5), record(6.0, "smoke")).verdict == "not run"
    assert judge(claim(AT_LEAST_5), record(1.0, "smoke")).verdict == "not run"
    assert judge(claim(AT_LEAST_5, any_size=True), record(6.0, "smoke")).verdict == "pass"
    assert judge(claim(AT_LEAST_5, any_size=True), record(1.0, "smoke")).verdict == "fail"


def test_a_claim_is_judged_only_on_what_it_is_about():
    about = claim(AT_LEAST_5, measured_on={"model": "m1", "n_texts": 16}, needs="patience")
    assert judge(about, record(6.0, model="m1", n_texts=16)).verdict == "pass"
    assert judge(about, record(6.0, model="m1", n_texts=64)).verdict == "pass", "more is fine"
    other = judge(about, record(6.0, model="m2", n_texts=16))
    assert (other.verdict, other.measured) == ("not run", 6.0)
    assert other.reason == "stated of model m1, measured with m2; needs patience"
    assert judge(about, record(1.0, model="m1", n_texts=2)).reason.startswith("stated of n_texts 16, measured with 2")
    assert judge(about, record(6.0)).verdict == "not run"


def test_recorded_measurements_decide_the_claims_that_name_them(tmp_path):
    own, elsewhere = claim(AT_LEAST_5), claim(AT_LEAST_5, recorded="h200")
    figure = Figure("diffkv-fig99", "DiffKV", "t", "99_x", "s", claims=(own, elsewhere))
    folder = tmp_path / "figures" / "recorded" / "h200"
    for place, value in ((tmp_path / "out", 1.0), (folder, 6.0)):
        place.mkdir(parents=True)
        record_path(place, "diffkv-fig99").write_text(record_text(record(value)))
    judged = judge_all([figure], tmp_path / "out", tmp_path)
    assert [judgement.verdict for judgement in judged] == ["fail", "pass"]
    assert checked(judged) == 1, "a recorded measurement is not one of this run"
    assert [j.verdict for j in judge_all([figure], tmp_path / "out", tmp_path, run="r")] == ["not run", "pass"]
    record_path(tmp_path / "out", "diffkv-fig99").write_text("{")
    damaged = judge_all([figure], tmp_path / "out", tmp_path)[0]
    assert damaged.verdict == "not run"
    assert "cannot be read" in damaged.reason


def test_counts():
    judged = [judge(claim(AT_LEAST_5), record(value)) for value in (6.0, 7.0, 1.0)] + [judge(claim(AT_LEAST_5), None)]
    assert tally(judged) == {"pass": 2, "fail": 1, "not run": 1}
    assert checked(judged) == 3


def test_json_object_has_the_promised_keys():
    found = judge(claim(Expectation("between", [1, 2], 0.5), unit="x"), record(1.5)).as_dict()
    promised = "id paper figure statement kind verdict measured expected tolerance reason provenance"
    assert set(promised.split()) <= set(found)
    assert json.loads(json.dumps(found))["expected"] == [1, 2]


def test_words():
    assert expected_text(Expectation("between", [1, 2.5], 0.5), "x") == "between 1 and 2.5 ± 0.5 x"
    assert expected_text(Expectation("increasing")) == "increasing"
    assert number_text(131072) == "131,072"
    assert number_text([1.23456, 2]) == "[1.235, 2]"
    assert number_text(list(range(8))) == "[0, 1, 2, 3, 4, 5, …]"
    assert number_text(True) == "True"


def test_records_round_trip(tmp_path):
    written = Record(
        "diffkv-fig02", {"seed": 1}, {"a": Measurement(1.5, "x", 3, "cold"), "b": Measurement([1, 2])}, {"data": []}
    )
    record_path(tmp_path, "diffkv-fig02").write_text(record_text(written))
    assert read_record(tmp_path, "diffkv-fig02") == written
    assert read_record(tmp_path, "diffkv-fig03") is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "3", None, [], [1.0, float("nan")]])
def test_what_is_no_measurement_is_refused(value):
    with pytest.raises(RecordError, match="a measured value must be"):
        Measurement(value)


WRONG_SHAPE = '{"format": 1, "figure": "diffkv-fig02", "measurements": {}, "plot": {}, "provenance": null}'


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 1, "figure": "diffkv-fig02"}', WRONG_SHAPE])
def test_a_damaged_record_is_named(tmp_path, text):
    record_path(tmp_path, "diffkv-fig02").write_text(text)
    with pytest.raises(RecordError, match=r"diffkv-fig02\.json"):
        read_record(tmp_path, "diffkv-fig02")


def test_a_record_of_another_figure_is_refused(tmp_path):
    record_path(tmp_path, "diffkv-fig02").write_text(record_text(Record("diffkv-fig03", {}, {"a": Measurement(1)})))
    with pytest.raises(RecordError, match="is a record of diffkv-fig03"):
        read_record(tmp_path, "diffkv-fig02")


def test_a_claim_that_needs_something_is_judged_by_the_run_that_has_it_else_by_the_recorded_one(tmp_path):
    needy = claim(AT_LEAST_5, needs="a GPU", recorded="gpu1")
    figure = Figure("diffkv-fig99", "DiffKV", "t", "99_x", "s", claims=(needy,))
    own, elsewhere = tmp_path / "own", tmp_path / "figures" / "recorded" / "gpu1"
    for folder, made in ((own, record(9.0, metric="other")), (elsewhere, record(6.0))):
        path = record_path(folder, "diffkv-fig99")
        path.parent.mkdir(parents=True)
        path.write_text(record_text(made))
    assert judge_all([figure], own, tmp_path)[0].measured == 6.0
    record_path(own, "diffkv-fig99").write_text(record_text(record(3.0)))
    assert (judged := judge_all([figure], own, tmp_path)[0]).measured == 3.0
    assert judged.verdict == "fail"
    record_path(own, "diffkv-fig99").unlink()
    assert judge_all([figure], own, tmp_path)[0].verdict == "pass"
