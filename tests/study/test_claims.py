"""The loader trusts nothing, and the project's own claims cover both papers."""

import math
from pathlib import Path

import nbformat
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from diffkv_repro.study.claims import ClaimError, Expectation, load_claims
from diffkv_repro.study.notebooks import find_notebooks

ROOT = Path(__file__).resolve().parents[2]
DIFFKV = [f"diffkv-fig{n:02d}" for n in range(1, 18)] + [f"diffkv-tab{n}" for n in (1, 2, 3)]
DIFFKV.insert(15, "diffkv-fig15b")  # measured by another notebook than 15a
KVSERVE = [f"kvserve-fig{n:02d}" for n in range(1, 17)]
KVSERVE += ["kvserve-fig16-right", "kvserve-tab1", "kvserve-thm61", "kvserve-thm62"]
SERIES = [
    "00_start_here", "01_attention_scores", "02_dynamic_sparsity", "03_key_value_precision",
    "04_pruning_and_calibration", "05_accuracy_and_memory", "06_memory_manager", "07_attention_kernel",
    "08_serving_engine", "09_why_adapt", "10_strategy_space", "11_bayesian_profiling", "12_bandwidth_thresholds",
    "13_disaggregated_serving", "14_prefix_cache", "15_policy_explorer", "16_diffkv_over_the_wire",
]  # fmt: skip


@pytest.fixture(scope="module")
def claims():
    return load_claims(ROOT / "claims.yaml")


def test_every_figure_and_table_of_both_papers_is_there(claims):
    assert [name for name in claims if not name.startswith("ours-")] == DIFFKV + KVSERVE


def test_every_figure_has_a_notebook_of_the_series(claims):
    assert {figure.notebook for figure in claims.values()} <= set(SERIES)
    assert {notebook.name for notebook in find_notebooks(ROOT)} <= set(SERIES)


def test_contradictions_of_both_papers_are_claims(claims):
    ids = [claim.id for figure in claims.values() for claim in figure.claims if "contradiction" in claim.id]
    assert len([name for name in ids if name.startswith("diffkv")]) >= 5
    assert len([name for name in ids if name.startswith("kvserve")]) >= 12


def test_metrics_are_unique_in_their_figure(claims):
    for figure in claims.values():
        metrics = [(claim.metric, claim.recorded) for claim in figure.claims]
        assert len(set(metrics)) == len(metrics), figure.id


def test_every_built_notebook_publishes_its_figures(claims):
    for notebook in find_notebooks(ROOT):
        code = "\n".join(cell.source for cell in nbformat.read(notebook.path, as_version=4).cells)
        for figure in claims.values():
            if figure.notebook == notebook.name:
                assert f'publish("{figure.id}"' in code


GOOD = {
    "paper": "DiffKV", "title": "t", "notebook": "01_x", "paper_says": "s",
    "claims": [
        {"id": "diffkv-fig99-a", "statement": "s", "kind": "exact", "metric": "m", "compare": "==", "expected": 1}
    ],
}  # fmt: skip


def loaded(tmp_path, document):
    path = tmp_path / "claims.yaml"
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    return load_claims(path)


def changed(claim=None, **figure):
    entry = {**GOOD, **figure}
    if claim is not None:
        entry["claims"] = [{key: v for key, v in {**GOOD["claims"][0], **claim}.items() if v is not ...}]
    return {"figures": {"diffkv-fig99": {key: v for key, v in entry.items() if v is not ...}}}


def test_the_good_one_loads(tmp_path):
    figure = loaded(tmp_path, changed())["diffkv-fig99"]
    assert figure.claims[0].expectation == Expectation("==", 1)
    assert figure.claims[0].notebook == "01_x"


BROKEN = {
    "unknown key of a figure": (changed(colour="red"), "unknown key colour; allowed are claims, measured_on, notebook"),
    "unknown key of a claim": (changed({"colour": "red"}), "claim diffkv-fig99-a of diffkv-fig99: unknown key colour"),
    "no notebook": (changed(notebook=...), "figure diffkv-fig99 has no notebook"),
    "empty notebook": (changed(notebook=None), "has no notebook"),
    "notebook without number": (changed(notebook="intro"), "notebook is 'intro'"),
    "unknown paper": (changed(paper="vLLM"), "paper is 'vLLM'; allowed are DiffKV, KVServe, ours"),
    "id of another paper": (changed({"id": "kvserve-fig01-a"}), "ids of paper DiffKV begin with 'diffkv-'"),
    "ill-formed id": (changed({"id": "Fig 1"}), "is not of the form"),
    "unknown kind": (changed({"kind": "guess"}), "kind is 'guess'; allowed are exact"),
    "unknown comparator": (changed({"compare": "~"}), "compare is '~'"),
    "no comparator": (changed({"compare": ...}), "compare is missing"),
    "text for a number": (changed({"expected": "one"}), "expected is 'one'; for '==' it must be one number"),
    "half a range": (changed({"compare": "between", "expected": [1]}), r"two numbers \[low, high\]"),
    "a range upside down": (changed({"compare": "between", "expected": [2, 1]}), "two numbers"),
    "a value for a monotone list": (changed({"compare": "increasing"}), "must be absent"),
    "negative tolerance": (changed({"tolerance": -1}), "tolerance is -1"),
    "judged without comparison": (changed({"compare": ..., "expected": ...}), "needs compare and expected"),
    "reported and judged": (changed({"kind": "reported", "why": "w"}), "a reported claim has a why and no comparison"),
    "reported without why": (
        changed({"kind": "reported", "compare": ..., "expected": ...}),
        "a reported claim has a why",
    ),
    "no statement": (changed({"statement": ""}), "statement is missing"),
    "no metric": (changed({"metric": ...}), "metric"),
    "measured on a word": (changed({"measured_on": "m"}), "measured_on is 'm'; it must be a mapping"),
    "no claims": (changed(claims=[]), "at least one entry"),
    "half a correction": (changed({"corrected": {"statement": "s", "explanation": "e"}}), "compare is missing"),
    "wrong top level": ({"claims": []}, "only top-level key must be 'figures'"),
    "not YAML": ("figures: [", "claims.yaml:"),
    "a repeated figure": ("figures:\n  diffkv-fig01: {}\n  diffkv-fig01: {}\n", "'diffkv-fig01' at line 3"),
    "a repeated field": ("figures:\n  diffkv-fig01:\n    title: a\n    title: b\n", "duplicate key 'title' at line 4"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_cannot_be_trusted_is_refused(tmp_path, name):
    document, message = BROKEN[name]
    with pytest.raises(ClaimError, match=message):
        loaded(tmp_path, document)


def test_measured_on_of_a_figure_holds_for_claims_whose_size_matters(tmp_path):
    document = changed(measured_on={"model": "m"})
    plain = document["figures"]["diffkv-fig99"]["claims"][0]
    document["figures"]["diffkv-fig99"]["claims"] = [
        plain,
        plain | {"id": "diffkv-fig99-b", "any_size": True},
        plain | {"id": "diffkv-fig99-c", "measured_on": {"model": "n"}},
        plain | {"id": "diffkv-fig99-d", "recorded": "elsewhere"},
    ]
    claims = loaded(tmp_path, document)["diffkv-fig99"].claims
    assert [claim.measured_on for claim in claims] == [{"model": "m"}, {}, {"model": "n"}, {}]


def test_duplicate_ids_across_figures_are_refused(tmp_path):
    document = changed()
    document["figures"]["diffkv-fig98"] = document["figures"]["diffkv-fig99"]
    with pytest.raises(ClaimError, match="duplicate claim id diffkv-fig99-a"):
        loaded(tmp_path, document)


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6), st.floats(0, 10))
def test_comparators_agree_with_arithmetic(measured, expected, slack):
    def holds(compare):
        return Expectation(compare, expected, slack).holds(measured)

    assert holds("==") == (abs(measured - expected) <= slack)
    assert holds(">=") == (measured >= expected - slack)
    assert holds("<=") == (measured <= expected + slack)
    assert holds(">") == (measured > expected - slack)
    assert holds("<") == (measured < expected + slack)
    assert Expectation("between", [expected, expected], slack).holds(measured) == (
        expected - slack <= measured <= expected + slack
    )


def test_monotone_lists():
    assert Expectation("increasing").holds([1, 2, 3])
    assert not Expectation("increasing").holds([1, 2, 2]), "strictly, without a tolerance"
    assert Expectation("increasing", tolerance=0.1).holds([1, 2, 1.95])
    assert not Expectation("increasing", tolerance=0.1).holds([1, 2, 1.8])
    assert Expectation("decreasing").holds([3, 2.5, -1])
    assert not Expectation("decreasing").holds([3])


def test_several_numbers_hold_where_each_does():
    assert Expectation("between", [1, 2]).holds([1, 1.5, 2])
    assert not Expectation("between", [1, 2]).holds([1, 1.5, 2.1])
    assert Expectation(">=", 3, 0.1).holds([2.95, 8])


@pytest.mark.parametrize("value", [math.nan, [], [9, math.nan], ["9"], "9", None])
def test_nan_and_the_wrong_shape_never_hold(value):
    for compare in ("==", ">=", "<=", ">", "<"):
        assert not Expectation(compare, 9, 1e9).holds(value)
    assert not Expectation("increasing").holds([1, math.nan])
