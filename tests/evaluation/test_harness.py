"""lm-eval's tasks on a tiny model that is loaded already: scores, intervals, what is kept, and what is refused."""

import json
import os

import lm_eval
import pandas as pd
import pytest
import yaml
from lm_eval.models.huggingface import HFLM
from tiny import save, tiny_llama
from transformers import PreTrainedTokenizerFast

from diffkv_repro.baselines import baseline
from diffkv_repro.baselines.budgets import Threshold
from diffkv_repro.cache import FullPrecision, Uniform
from diffkv_repro.evaluation import harness, harness_tasks, lm_eval_model
from diffkv_repro.evaluation.answers import Answers
from diffkv_repro.evaluation.harness import COLUMNS, harness_scores, task_prompts
from diffkv_repro.evaluation.harness_tasks import HarnessTasks, code_tasks, find_tasks
from diffkv_repro.evaluation.methods import make_method
from diffkv_repro.evaluation.sweep import fit_on_items
from diffkv_repro.evaluation.teacher_forced import NotReadError
from diffkv_repro.models import load_model

TASKS = ["diffkv_recall", "diffkv_recall_choice"]
METHODS = {"FP16": FullPrecision(), "two bits": Uniform("K2V2")}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    target = save(tiny_llama(), tmp_path_factory.mktemp("model") / "tiny")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target)
    tokenizer.eos_token = "w2"
    tokenizer.save_pretrained(target)
    return load_model(str(target), device="cpu")


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="module")
def scores(loaded, kept):
    return harness_scores(loaded, TASKS, METHODS, kept, limit=5)


@pytest.fixture
def batches(monkeypatch):
    """Which batches are run through the model; ``batches.limit`` of them, if it is set, and then the run is stopped."""

    class Batches(list):
        limit = None

    found = Batches()
    for name in ("score", "hold_back"):
        real = getattr(lm_eval_model, name)

        def counted(*arguments, real=real, **options):
            if len(found) == found.limit:
                raise KeyboardInterrupt
            found.append(real.__name__)
            return real(*arguments, **options)

        monkeypatch.setattr(lm_eval_model, name, counted)
    return found


def test_a_row_for_each_task_method_and_metric(scores):
    assert tuple(scores.columns) == COLUMNS
    assert list(zip(scores["task"], scores["method"], scores["metric"], strict=True)) == [
        (task, method, metric)
        for task, metric in zip(TASKS, ("exact_match,first", "acc,none"), strict=True) for method in METHODS
    ]  # fmt: skip
    assert set(scores["n"]) == {5}
    assert (scores["low"] <= scores["value"]).all()
    assert (scores["value"] <= scores["high"]).all()
    assert (scores["reads"] > 0).all()
    exact, two = (scores[scores["method"] == name] for name in METHODS)
    assert (exact["nominal"] == 1).all()
    assert (two["nominal"] == 0.125).all()
    assert (two["true"] > 0.125).all()
    assert two["tokens"].tolist() == [{"K2V2": 1.0, "pruned": 0.0}] * 2


def test_full_precision_scores_as_plain_hflm(loaded, kept, scores):
    plain = HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=1)
    manager = find_tasks(TASKS, kept, documents=5)
    found = lm_eval.simple_evaluate(model=plain, tasks=TASKS, task_manager=manager, limit=5, fewshot_random_seed=0)
    for row in scores[scores["method"] == "FP16"].itertuples():
        assert row.value == pytest.approx(found["results"][row.task][row.metric])


def test_results_are_kept_whole_and_found_again(loaded, kept, scores, batches):
    again = harness_scores(loaded, TASKS, METHODS, kept, limit=5)
    assert not batches
    pd.testing.assert_frame_equal(again, scores)
    files = sorted(kept.glob("diffkv_recall-*.json"))
    assert len(files) == 2
    document = json.loads(files[0].read_text())
    assert document["metrics"]["exact_match,first"]["scores"] == [0.0] * 5
    files[0].write_text(files[0].read_text()[:-20])
    pd.testing.assert_frame_equal(harness_scores(loaded, TASKS, METHODS, kept, limit=5), scores)
    assert not batches, "a damaged result is made again from the answers, without the model"


def test_everything_that_matters_is_in_the_key(loaded, tmp_path):
    def run(**options):
        given = {"methods": [Uniform("K2V2")], "limit": 2, "tasks": TASKS[:1]} | options
        harness_scores(loaded, given.pop("tasks"), given.pop("methods"), tmp_path, **given)
        return len(list(tmp_path.glob("diffkv_*.json")))

    assert run() == 1
    assert run(batch_size=1) == 1
    assert run(limit=3) == 2
    assert run(seed=1) == 3
    assert run(methods=[Uniform("K4V2")]) == 4
    assert run(storage="packed") == 5
    assert run(gen_kwargs={"max_gen_toks": 2}) == 6


def test_a_run_goes_on_where_it_stopped(loaded, tmp_path, batches):
    method = {"K2V2": Uniform("K2V2")}
    batches.limit = 2
    with pytest.raises(KeyboardInterrupt):
        harness_scores(loaded, TASKS[:1], method, tmp_path, limit=5, batch_size=1)
    assert not list(tmp_path.glob("diffkv_*.json"))
    batches.limit = None
    del batches[:]
    harness_scores(loaded, TASKS[:1], method, tmp_path, limit=5, batch_size=1)
    assert len(batches) == 3
    (path,) = tmp_path.glob("diffkv_*.json")
    assert json.loads(path.read_text())["resumed"] == 2


def test_scores_of_a_cache_that_was_not_read_are_refused(loaded, tmp_path, monkeypatch):
    unread = {"made": {"requests": 1, "nominal": 1.0, "true": 1.0, "reads": 0, "tokens": {}}}
    monkeypatch.setattr(Answers, "summaries", lambda self: unread)
    with pytest.raises(NotReadError, match="diffkv_recall_choice with K2V2: the compressed cache was not read"):
        harness_scores(loaded, TASKS[1:], [Uniform("K2V2")], tmp_path, limit=1)
    assert not list(tmp_path.glob("diffkv_*.json"))


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Tasks of a folder instead of lm-eval's ten thousand: two that group, one that executes code, one that lacks."""
    rows = [{"text": f"w{index} w9 w8", "label": index % 2} for index in range(6)]
    for name, count in (("one", 6), ("two", 2)):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows[:count]))

    def task(name, data, **settings):
        files = {"data_files": {"test": str(tmp_path / f"{data}.jsonl")}, "cache_dir": str(tmp_path / "cache")}
        common = {
            "dataset_path": "json", "test_split": "test", "num_fewshot": 0, "doc_to_text": "{{text}}", "tag": "all",
            "output_type": "multiple_choice", "doc_to_choice": ["w1", "w2"], "doc_to_target": "{{label}}",
            "dataset_kwargs": files,
        }  # fmt: skip
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"task": name} | common | settings))

    task("small", "one")
    task("smaller", "two")
    task("executes", "one", unsafe_code=True)
    task("lacks", "one")
    (tmp_path / "lacking.py").write_text("import a_package_that_is_not_there\n")
    with (tmp_path / "lacks.yaml").open("a") as file:
        file.write("process_docs: !function lacking.process\n")
    for name, weigh, members in (("by_size", True, ["small", "smaller"]), ("evenly", False, ["small", "smaller"])):
        group = {"group": name, "task": members, "aggregate_metric_list": [{"metric": "acc", "weight_by_size": weigh}]}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(group))
    (tmp_path / "mixed.yaml").write_text(yaml.safe_dump({"group": "mixed", "task": ["small", "executes"]}))
    manager = HarnessTasks(include_path=str(tmp_path), include_defaults=False)
    monkeypatch.setattr(harness_tasks, "_index", lambda own, only_own: manager)
    return manager


def test_groups_have_their_own_mean(loaded, made, tmp_path):
    found = harness_scores(loaded, ["by_size", "evenly", "small", "smaller"], METHODS, tmp_path / "kept")
    acc = found[found["metric"] == "acc,none"].set_index(["task", "method"])
    for method in METHODS:
        small, smaller = acc.loc[("small", method), "value"], acc.loc[("smaller", method), "value"]
        assert acc.loc[("by_size", method), "value"] == pytest.approx((6 * small + 2 * smaller) / 8)
        assert acc.loc[("evenly", method), "value"] == pytest.approx((small + smaller) / 2)
        assert acc.loc[("evenly", method), "n"] == acc.loc[("by_size", method), "n"] == 8
        assert acc.loc[("by_size", method), "reads"] > acc.loc[("small", method), "reads"]


def test_code_is_executed_only_where_that_is_asked_for(loaded, made, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_ALLOW_CODE_EVAL", raising=False)
    assert code_tasks(made, ["small", "executes", "mixed", "by_size"]) == ["executes", "mixed"]
    for name in ("executes", "mixed"):
        with pytest.raises(ValueError, match=f"{name}: to score it, .*Set confirm_run_unsafe_code=True"):
            harness_scores(loaded, ["small", name], METHODS, tmp_path / "kept", limit=1)
    with pytest.raises(ValueError, match="confirm_run_unsafe_code"):
        task_prompts("executes", tmp_path / "kept", count=1)
    assert not list((tmp_path / "kept").glob("small-*.json")), "refused before anything is run"
    seen = []
    real = harness_tasks.load_task
    monkeypatch.setattr(
        harness, "load_task",
        lambda *given, **options: seen.append(os.environ["HF_ALLOW_CODE_EVAL"]) or real(*given, **options),
    )  # fmt: skip
    done = harness_scores(loaded, ["executes"], METHODS, tmp_path / "kept", limit=1, confirm_run_unsafe_code=True)
    assert len(done) > 0
    assert seen == ["1"]
    assert "HF_ALLOW_CODE_EVAL" not in os.environ


@pytest.mark.parametrize(
    ("tasks", "error", "message"),
    [
        ([], ValueError, r"tasks is \[\]; give a list of lm-eval's names"),
        ("small", ValueError, "tasks is 'small'; give a list"),
        (["smal"], ValueError, "unknown task 'smal'; lm-eval has .*, nearest small"),
        (["all"], ValueError, "'all' is a tag and has no score; name its tasks: executes, lacks, small, smaller"),
        (
            ["lacks"],
            RuntimeError,
            r"task lacks: .*_that_is_not_there.*pip install 'diffkv-repro\[benchmarks\]",
        ),
    ],
)
def test_tasks_that_cannot_be_run_are_named(loaded, made, tmp_path, tasks, error, message):
    with pytest.raises(error, match=message):
        harness_scores(loaded, tasks, METHODS, tmp_path / "kept")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": 0}, "limit is 0; write a whole number of at least 1"),
        ({"limit": 0.5}, "limit is 0.5"),
        ({"methods": []}, "at least one is needed"),
        ({"methods": [Uniform("K2V2")] * 2}, "no two with the same label"),
        ({"apply_chat_template": True}, "the tokenizer of tiny has no chat template"),
    ],
)
def test_refusals_come_before_the_first_request(loaded, tmp_path, options, message):
    given = {"methods": METHODS} | options
    with pytest.raises(ValueError, match=message):
        harness_scores(loaded, TASKS, given.pop("methods"), tmp_path, **given)


def test_a_ready_made_method_takes_no_options():
    method = baseline("kivi")(bits=2)
    assert make_method(method) is method
    with pytest.raises(ValueError, match="KIVI 2-bit is made already; it takes no options, as bits"):
        make_method(method, bits=4)


def test_a_budget_is_fitted_on_prompts_of_the_task(loaded, tmp_path):
    items = task_prompts("diffkv_recall_choice", tmp_path, count=3)
    assert len(items) == len({item.prompt for item in items}) == 3
    fitted = fit_on_items(loaded, Threshold(divisor="length", window=4), items, 0.5)
    found = harness_scores(loaded, ["diffkv_recall"], {"dynamic": fitted}, tmp_path, limit=3)
    assert 0.4 < found["tokens"][0]["pruned"] < 0.6


def test_chats_are_templated(loaded, tmp_path, batches, monkeypatch):
    template = "{% for m in messages %}w7 {{ m['content'] }} {% endfor %}"
    monkeypatch.setattr(loaded.tokenizer, "chat_template", template)
    method = {"K2V2": Uniform("K2V2")}
    plain = harness_scores(loaded, TASKS[:1], method, tmp_path, limit=2)
    asked = len(batches)
    chats = harness_scores(loaded, TASKS[:1], method, tmp_path, limit=2, apply_chat_template=True)
    assert len(batches) == 2 * asked, "other requests, other answers"
    assert chats["reads"][0] > 0
    assert plain["n"][0] == chats["n"][0]
