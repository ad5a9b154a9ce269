"""The papers' own benchmarks: their names in lm-eval, the metrics of claims from made-up scores, and what is run."""

from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import yaml
from lm_eval.tasks import TaskManager

from diffkv_repro.cache import FullPrecision
from diffkv_repro.diffkv import CompressionPolicy
from diffkv_repro.evaluation.harness import COLUMNS
from diffkv_repro.models.shapes import SHAPES
from diffkv_repro.study import benchmarks
from diffkv_repro.study.benchmarks import BENCHMARKS, LONGBENCH, model_key, paper_policy, run_benchmarks
from diffkv_repro.study.claims import load_claims
from diffkv_repro.workloads.lm_eval_tasks import LOCAL_TASKS

ROOT = Path(__file__).resolve().parents[2]
HUB = {model_key(shape.hub_id): shape.hub_id for shape in SHAPES.values()}
PAPERS = ["llama3_8b", "llama3_70b", "qwen2_5_7b", "qwen2_5_32b", "llama3_1_8b", "qwq_32b", "r1_distill_llama_8b"]
METHODS = {
    "FP16": 0.8, "DiffKV": 0.78, "INT4": 0.7, "KIVI 2-bit": 0.5, "K8V2": 0.72, "K4V2": 0.6, "dynamic": 0.79,
    "SnapKV 25 %": 0.4, "Quest 25 %": 0.3,
}  # fmt: skip


@pytest.fixture(scope="module")
def figures():
    return load_claims(ROOT / "claims.yaml")


def scores(models=PAPERS, **changed):
    """Every benchmark on every model with every method; ``changed`` as model__benchmark__method."""
    every = BENCHMARKS | LONGBENCH
    rows = [
        dict.fromkeys(COLUMNS, 0.1) | {
            "model": HUB.get(model, model), "task": every[name].task, "metric": every[name].metric, "method": method,
            "n": 100, "value": changed.get(f"{model}__{name}__{method}", value), "nominal": 0.2,
        }
        for model, name, (method, value) in product(models, every, METHODS.items())
    ]  # fmt: skip
    return pd.DataFrame(rows)


def measured(found, figures):
    return {
        "diffkv-fig08": benchmarks.figure_8(found),
        "diffkv-fig09": benchmarks.figure_9(found),
        "diffkv-tab1": benchmarks.table_1(found, figures["diffkv-tab1"].published),
        "diffkv-tab2": benchmarks.table_2(found, figures["diffkv-tab2"].published),
        "diffkv-tab3": benchmarks.table_3(found),
    }


def test_every_claim_that_needs_the_hub_gets_its_number(figures):
    every = measured(scores(), figures)
    for name in ("diffkv-fig08", "diffkv-fig09", "diffkv-fig10", "diffkv-fig11", "diffkv-tab1", "diffkv-tab2",
                 "diffkv-tab3"):  # fmt: skip
        needed = {claim.metric for claim in figures[name].claims if "Hugging Face hub" in claim.needs}
        assert set(every.get(name, {})) == needed


def test_a_part_of_a_benchmark_decides_no_claim(figures):
    for figure in figures.values():
        if figure.notebook in ("03_key_value_precision", "04_pruning_and_calibration", "05_accuracy_and_memory"):
            for claim in figure.claims:
                if "Hugging Face hub" in claim.needs:
                    assert claim.measured_on == {"benchmark_documents": "all"}, claim.id


def test_the_numbers_are_what_their_claims_say(figures):
    found = scores(
        qwen2_5_7b__humaneval_plus__K8V2=0.4, llama3_8b__gsm8k__K4V2=0.56, llama3_8b__math__INT4=0.5,
        qwen2_5_7b__code__DiffKV=0.35, qwen2_5_32b__math__DiffKV=0.9,
    )  # fmt: skip
    values = {name: item.value for own in measured(found, figures).values() for name, item in own.items()}
    assert values == pytest.approx(
        {
            "k8v2_smallest_relative_accuracy_percent": 50,
            "k4v2_llama3_8b_smallest_relative_accuracy_percent": 70,
            "llama3_8b_gsm8k_accuracy_drop_at_50": 1,
            "qwen2_5_7b_gsm8k_accuracy_at_50": 79,
            "mean_accuracy_drop_percent": (23 * 2 - 10) / 24,
            "llama3_8b_gsm8k_drop": 2,
            "llama3_8b_gsm8k_nominal_memory_percent": 20,
            "llama3_8b_math_diffkv_minus_int4": 28,
            "mean_longbench_drop_percent": (11 * 2 + 45) / 12,
            "categories_won_by_quest_or_snapkv": 1,
            "qwq_32b_math_diffkv_minus_fp16": -2,
            "r1_distill_llama_8b_aime24_diffkv_minus_int4": 8,
        }
    )
    note = benchmarks.table_2(found, figures["diffkv-tab2"].published)["categories_won_by_quest_or_snapkv"].note
    assert note == "longbench_lcc on Qwen/Qwen2.5-7B-Instruct"


def test_a_number_over_several_models_needs_all_of_them(figures):
    every = measured(scores(["llama3_8b"]), figures)
    assert set(every["diffkv-fig08"]) == {"k4v2_llama3_8b_smallest_relative_accuracy_percent"}
    assert set(every["diffkv-fig09"]) == {"llama3_8b_gsm8k_accuracy_drop_at_50"}
    assert "mean_accuracy_drop_percent" not in every["diffkv-tab1"]
    assert every["diffkv-tab2"] == every["diffkv-tab3"] == {}
    nothing = pd.DataFrame(columns=list(COLUMNS))
    for found in (nothing, scores(["smollm2-135m"])):
        assert not any(measured(found, figures).values())
    nowhere = scores(**{f"llama3_8b__{name}__FP16": 0 for name in BENCHMARKS})
    assert benchmarks.figure_8(nowhere) == {}, "nothing can be relative to an accuracy of nothing"


def test_the_thresholds_are_those_that_the_paper_states():
    own = CompressionPolicy.paper("K8V8-K4V4", alpha_high=2, alpha_low=0)
    assert paper_policy("smollm2-135m", own) is own
    assert paper_policy(HUB["r1_distill_llama_8b"], own) is own
    llama, qwen, qwq = (paper_policy(HUB[name], own) for name in ("llama3_8b", "qwen2_5_7b", "qwq_32b"))
    assert llama.alphas == (1.0, 0.02)
    assert qwen.alphas == (0.04, 0.04), "no low tier"
    assert (qwq.alphas, [str(tier) for tier in qwq.tiers]) == ((3.0, 0.0), ["K8V4:1/2", "K4V2:2/4"])


class MadeStudy(SimpleNamespace):
    def cache_folder(self, name):
        return self.folder / name


@pytest.fixture
def study(tmp_path, monkeypatch):
    """What is asked, instead of a model that is: (model, task, options) of each call."""
    asked = []

    def made(loaded, tasks, methods, folder, **options):
        asked.append((loaded.name, *tasks, options))
        return scores(["x"]).head(1).assign(model=loaded.name, task=tasks[0])

    def some(name, device):
        return SimpleNamespace(name=name, device=SimpleNamespace(type=device))

    monkeypatch.setattr(benchmarks, "harness_scores", made)
    monkeypatch.setattr(benchmarks, "load_model", some)
    index = {"runs_code": SimpleNamespace(cfg={"task": "runs_code", "unsafe_code": True})}
    monkeypatch.setattr(benchmarks, "find_tasks", lambda names, folder, **_: SimpleNamespace(task_index=index))

    def tried(manager, name, seed):
        if name == "gone":
            raise RuntimeError("task gone cannot be loaded")

    monkeypatch.setattr(benchmarks, "load_task", tried)
    return MadeStudy(folder=tmp_path, config={}, seed=3, device="cpu", asked=asked, loaded=some("mine", "cpu"))


def methods_of(model, task):
    return {"FP16": FullPrecision()}


@pytest.mark.parametrize("empty", [[], {}, {"mine": []}])
def test_nothing_is_asked_where_no_task_is_named(study, empty):
    found, said = run_benchmarks(study, study.loaded, empty, methods_of)
    assert said == "harness_tasks is empty: none of the papers' own benchmarks is run"
    assert list(found.columns) == list(COLUMNS)
    assert not study.asked
    assert not study.config
    assert benchmarks.table(found).empty


def test_a_list_is_for_the_model_at_hand(study):
    found, said = run_benchmarks(study, study.loaded, ["one", "two"], methods_of, limit=4)
    assert [call[:2] for call in study.asked] == [("mine", "one"), ("mine", "two")]
    assert [call[2]["limit"] for call in study.asked] == [4, 4]
    assert study.asked[0][2]["seed"] == 3
    assert study.config == {"benchmarks": {"mine": "one, two"}, "benchmark_documents": "the first 4"}
    assert said == "the first 4 documents of one, two on mine"
    assert benchmarks.table(found)["task"].tolist() == ["one", "two"]


def test_a_mapping_names_models_and_code_is_left_out(study):
    thinks = HUB["r1_distill_llama_8b"]
    plan = {"other": ["one", "runs_code"], thinks: ["two"]}
    _, said = run_benchmarks(study, study.loaded, plan, methods_of)
    assert [call[:2] for call in study.asked] == [("other", "one"), (thinks, "two")]
    assert "left out: runs_code execute code that the model wrote, harness_unsafe_code allows it" in said
    assert [call[2]["apply_chat_template"] for call in study.asked] == [False, True]
    assert study.asked[1][2]["gen_kwargs"]["max_gen_toks"] > 10_000
    assert study.asked[0][2]["limit"] is None
    assert study.config["benchmark_documents"] == "all"
    _, said = run_benchmarks(study, study.loaded, plan, methods_of, unsafe_code=True)
    assert ("other", "runs_code") in [call[:2] for call in study.asked]
    assert "left out" not in said


def test_a_task_that_cannot_be_loaded_is_known_before_any_is_run(study):
    with pytest.raises(RuntimeError, match="task gone cannot be loaded"):
        run_benchmarks(study, study.loaded, {"other": ["one"], "mine": ["gone"]}, methods_of)
    assert not study.asked


@pytest.mark.parametrize("limit", [-1, 0.5, None, True])
def test_a_limit_is_a_number_of_documents(study, limit):
    with pytest.raises(ValueError, match=f"harness_limit is {limit!r}; write a whole number"):
        run_benchmarks(study, study.loaded, ["one"], methods_of, limit=limit)


@pytest.fixture(scope="module")
def index():
    return TaskManager().task_index


def test_lm_eval_has_the_benchmarks_and_their_metrics(index):
    for name, benchmark in (BENCHMARKS | LONGBENCH).items():
        config = index[benchmark.task].cfg
        metric, kept = benchmark.metric.split(",")
        listed = config.get("aggregate_metric_list") or config.get("metric_list")
        names = [entry["metric"].split(".")[-1] if isinstance(entry["metric"], str) else "" for entry in listed]
        if name == "humaneval_plus":
            assert (names, listed[0]["k"]) == (["pass_at_k"], [1])  # it reports pass@1
        elif name != "math":  # a group that adds nothing to the metric of its tasks
            assert metric in names, f"{benchmark} of {names}"
        filters = {entry["name"] for entry in config.get("filter_list", [])}
        filters |= {entry.get("filter_list") for entry in listed} - {None}
        assert kept in (filters or {"none"}), f"{benchmark} of {filters}"


def test_profiles_name_models_and_tasks_that_there_are(index):
    document = yaml.safe_load((ROOT / "notebooks" / "profiles.yaml").read_text())
    known = {benchmark.task for benchmark in (BENCHMARKS | LONGBENCH).values()}
    for notebook in ("03_key_value_precision", "04_pruning_and_calibration", "05_accuracy_and_memory"):
        plan = document["full"][notebook]["harness_tasks"]
        assert set(plan) <= set(HUB.values())
        assert {task for own in plan.values() for task in own} <= known & set(index)
        assert set(document["smoke"][notebook]["harness_tasks"]) <= set(LOCAL_TASKS)
        assert document["smoke"][notebook]["harness_limit"] == 2
