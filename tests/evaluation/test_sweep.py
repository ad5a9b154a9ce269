"""A comparison of methods keeps what it has computed, whatever ends it, and never computes it again."""

import json

import pytest
import torch
from cache_helpers import ids_of
from hypothesis import given
from hypothesis import strategies as st
from pandas.testing import assert_frame_equal
from tiny import save, tiny_llama

from diffkv_repro.baselines.budgets import AtShare, EqualBudget, Threshold
from diffkv_repro.cache import FullPrecision, Uniform
from diffkv_repro.evaluation import sweep, workers
from diffkv_repro.evaluation.sweep import compare, difference, fair_batch, fit_on_items, summarise
from diffkv_repro.evaluation.teacher_forced import prefill
from diffkv_repro.models import load_model
from diffkv_repro.workloads import Window
from diffkv_repro.workloads.tasks import Item

METHODS = [Uniform("K8V4"), Uniform("K2V1")]
PROMPT = 30


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load_model(str(save(tiny_llama(), tmp_path_factory.mktemp("model"))), device="cpu")


def made(name, count, seed, tokens=40):
    ids = ids_of(tokens, count, seed)
    return [Window(name, index, ids[index : index + 1]) for index in range(count)]


TEXTS = {"prose": made("a", 3, 0), "code": made("b", 1, 1)}


def run(loaded, folder, methods=METHODS, texts=TEXTS, **options):
    return compare(loaded, texts, methods, folder, **({"prompt_tokens": PROMPT, "batch": 2} | options))


def refuse(*_arguments, **_options):
    raise AssertionError("computed again")


@pytest.fixture
def counted(monkeypatch):
    """Labels of the methods of every batch that is computed."""
    seen, real = [], sweep.score

    def counting(model, ids, methods, **options):
        seen.append([method.label for method in methods])
        return real(model, ids, methods, **options)

    monkeypatch.setattr(sweep, "score", counting)
    return seen


def test_a_row_for_each_method_on_each_window(loaded, tmp_path):
    table = run(loaded, tmp_path)
    assert len(table) == 4 * 3
    assert table["method"].unique().tolist() == ["FP16", "K8V4", "K2V1"]
    assert table.groupby("text")["window"].nunique().to_dict() == {"prose": 3, "code": 1}
    assert (table["predictions"] == 9).all()
    wide = table.pivot(index="window", columns="method", values="added_nll")
    assert (wide["FP16"] == 0).all()
    assert (wide["K8V4"].abs() < wide["K2V1"].abs()).all()
    nll = table.pivot(index="window", columns="method", values="nll")
    assert (nll["K2V1"] - nll["FP16"]).tolist() == wide["K2V1"].tolist()


def test_full_precision_is_there_once_whether_asked_for_or_not(loaded, tmp_path):
    asked = run(loaded, tmp_path, [METHODS[0], FullPrecision()])
    assert_frame_equal(asked, run(loaded, tmp_path, METHODS[:1]))
    assert (asked["method"] == "FP16").sum() == 4


def test_a_second_run_computes_nothing(loaded, tmp_path, monkeypatch):
    first = run(loaded, tmp_path)
    monkeypatch.setattr(sweep, "score", refuse)
    assert_frame_equal(run(loaded, tmp_path), first)
    fewer = run(loaded, tmp_path, METHODS[1:], {"code": TEXTS["code"]})
    assert fewer["method"].tolist() == ["FP16", "K2V1"]
    with pytest.raises(AssertionError, match="computed again"):
        run(loaded, tmp_path, prompt_tokens=PROMPT - 1)


def test_only_a_new_method_is_computed(loaded, tmp_path, counted):
    run(loaded, tmp_path, METHODS[:1])
    counted.clear()
    run(loaded, tmp_path)
    assert counted == [["K2V1"]] * 3


def test_a_killed_run_keeps_the_methods_it_finished(loaded, tmp_path, monkeypatch):
    real = sweep.score

    def killed(model, ids, methods, **options):
        results = real(model, ids, methods, **options)
        yield next(results)
        yield next(results)
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep, "score", killed)
    with pytest.raises(KeyboardInterrupt):
        run(loaded, tmp_path)
    assert len(list(tmp_path.glob("*.json"))) == 2
    seen = []

    def counting(model, ids, methods, **options):
        seen.append([method.label for method in methods])
        return real(model, ids, methods, **options)

    monkeypatch.setattr(sweep, "score", counting)
    again = run(loaded, tmp_path)
    assert sorted(seen) == [["FP16", "K8V4", "K2V1"], ["FP16", "K8V4", "K2V1"], ["K2V1"]]
    assert_frame_equal(again, run(loaded, tmp_path / "whole"))


@pytest.mark.parametrize("text", ["", '{"method": ', "[]", '{"scored": [{"nll": 1}]}', "\x00", '{"scored": 3}'])
def test_a_damaged_result_is_computed_again(loaded, tmp_path, counted, text):
    texts = {"code": TEXTS["code"]}
    whole = run(loaded, tmp_path, METHODS[:1], texts)
    (path,) = (path for path in tmp_path.glob("*.json") if "Uniform" in path.read_text())
    path.write_text(text)
    counted.clear()
    assert_frame_equal(run(loaded, tmp_path, METHODS[:1], texts), whole)
    assert counted == [["K8V4"]]
    assert len(json.loads(path.read_text())["scored"]) == 1


def test_a_batch_is_not_taken_for_one_longer_text(loaded, tmp_path):
    """The bytes of two windows of 40 tokens are those of one of 80."""
    pair = made("a", 2, 3)
    run(loaded, tmp_path, texts={"prose": pair})
    one = Window("long", 0, torch.cat([window.input_ids for window in pair], dim=1))
    table = run(loaded, tmp_path, texts={"prose": [one]})
    assert table["predictions"].tolist() == [80 - PROMPT - 1] * 3


def test_windows_of_one_name_in_two_kinds_of_text_stay_apart(loaded, tmp_path):
    texts = {"first": made("notes.txt", 1, 0), "second": made("notes.txt", 1, 1)}
    table = run(loaded, tmp_path, METHODS[1:], texts)
    for _, own in table.groupby("text"):
        nll = own.set_index("method")["nll"]
        assert own.set_index("method")["added_nll"].tolist() == [0, nll["K2V1"] - nll["FP16"]]
    assert summarise(table, "nll")["K2V1"].n == difference(table, "nll", "K2V1", "FP16").n == 2


def test_two_methods_of_one_label_are_refused(loaded, tmp_path):
    with pytest.raises(ValueError, match="two methods have the same label: FP16, K8V4, K8V4"):
        run(loaded, tmp_path, [Uniform("K8V4"), Uniform("K8V4")])
    assert not list(tmp_path.iterdir())


def test_processes_give_the_table_of_one(loaded, tmp_path, monkeypatch):
    alone = run(loaded, tmp_path / "one", workers=1)
    monkeypatch.setattr(workers, "_WORTH_WORKERS", 0)
    monkeypatch.setattr(sweep, "score", refuse)  # in this process; the others import their own
    together = run(loaded, tmp_path / "two", workers=2)
    assert_frame_equal(together, alone, check_exact=False, atol=1e-6)
    assert len(list((tmp_path / "two").glob("*.json"))) == 3 * 3


@given(st.lists(st.integers(0, 40), max_size=5), st.integers(1, 9), st.integers(1, 48))
def test_batches_are_as_large_as_lets_all_workers_have_equally_many(counts, workers, most):
    def jobs(size):
        return sum(-(-count // size) for count in counts)

    size = fair_batch(counts, workers, most)
    assert 1 <= size <= most
    fair = [own for own in range(1, most + 1) if jobs(own) % workers == 0]
    assert size == max(fair, default=most)


def test_batches_of_one_kind_are_of_nearly_the_same_size(loaded, tmp_path, monkeypatch):
    seen, real = [], sweep.score

    def counting(model, ids, methods, **options):
        seen.append(len(ids))
        return real(model, ids, methods, **options)

    monkeypatch.setattr(sweep, "score", counting)
    run(loaded, tmp_path, METHODS[:1], {"prose": made("a", 7, 0), "code": made("b", 2, 1)}, batch=3)
    assert seen == [3, 2, 2, 2]


def test_a_share_is_fitted_to_each_batch(loaded, tmp_path):
    method = AtShare(Threshold(window=4), 0.25, "threshold")
    table = run(loaded, tmp_path, [method])
    own = table[table["method"] == method.label]
    assert own["method"].tolist() == ["threshold, 25 % pruned"] * 4
    heads = 3 * 2  # layers, KV heads
    for batch, tokens in zip((2, 2, 1, 1), own["tokens"], strict=True):
        assert tokens["pruned"] == pytest.approx(0.25 * PROMPT * heads * batch, abs=1)
        assert sum(tokens.values()) == 40 * heads * batch


def test_means_and_paired_differences_by_method(loaded, tmp_path):
    table = run(loaded, tmp_path)
    means = summarise(table, "kl")
    assert list(means) == ["FP16", "K8V4", "K2V1"]
    assert means["K2V1"].mean == pytest.approx(table[table["method"] == "K2V1"]["kl"].mean())
    assert means["K2V1"].n == 4
    gap = difference(table, "kl", "K2V1", "K8V4")
    assert gap.mean == pytest.approx(means["K2V1"].mean - means["K8V4"].mean)
    assert gap.low <= gap.mean <= gap.high
    assert difference(table, "kl", "K2V1", "K2V1").high == 0
    assert summarise(table, "kl", seed=1)["K2V1"].mean == means["K2V1"].mean


@pytest.mark.parametrize("method", [Threshold(window=4), EqualBudget(window=4)])
def test_a_budget_is_fitted_to_items(loaded, method):
    texts = [loaded.tokenizer.decode(ids) for ids in ids_of(42, 2)]
    items = [Item("made", text, "w5", "line", 4) for text in texts]
    fitted = fit_on_items(loaded, method, items, 0.3)
    pruned = 0
    for text in texts:
        ids = loaded.tokenizer(text, return_tensors="pt")["input_ids"]
        for prompt in prefill(loaded.model, ids, 40).prompts:
            significance = fitted.significance.of_prompt(prompt)
            eligible = fitted.outside_window(prompt, torch.zeros(1)).expand_as(significance)
            pruned += int((eligible & ~fitted.kept(significance, eligible)).sum())
    assert pruned == pytest.approx(0.3 * 2 * 40 * 6, abs=1)
