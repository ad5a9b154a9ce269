"""The papers' own benchmarks: which lm-eval tasks they are, running them, and the numbers that claims ask for."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch

from diffkv_repro.cache import Method
from diffkv_repro.core.paths import project_root
from diffkv_repro.core.timing import give_back_freed
from diffkv_repro.diffkv import CompressionPolicy
from diffkv_repro.evaluation.harness import COLUMNS, harness_scores
from diffkv_repro.evaluation.harness_tasks import code_execution, code_tasks, find_tasks, load_task
from diffkv_repro.models import LoadedModel, load_model
from diffkv_repro.models.shapes import SHAPES
from diffkv_repro.study.claims import load_claims
from diffkv_repro.study.records import Measurement


class Benchmark(NamedTuple):
    """A benchmark as lm-eval has it: name of the task or group, and which of its metrics is the accuracy."""

    task: str
    metric: str


BENCHMARKS = {
    "mmlu": Benchmark("mmlu", "acc,none"),
    "mmlu_pro": Benchmark("mmlu_pro", "exact_match,custom-extract"),
    "gsm8k": Benchmark("gsm8k", "exact_match,strict-match"),
    "math": Benchmark("minerva_math", "exact_match,none"),
    "humaneval_plus": Benchmark("humaneval_plus", "pass@1,create_test"),
    "mbpp_plus": Benchmark("mbpp_plus", "pass_at_1,none"),
    "aime24": Benchmark("aime24", "exact_match,none"),
    "gpqa": Benchmark("gpqa_diamond_cot_zeroshot", "exact_match,flexible-extract"),
}
# The paper takes one benchmark of each category, and we do not know which: these are the English ones used most.
LONGBENCH = {
    "single document": Benchmark("longbench_qasper", "score,none"),
    "several documents": Benchmark("longbench_hotpotqa", "score,none"),
    "summary": Benchmark("longbench_gov_report", "score,none"),
    "few shots": Benchmark("longbench_triviaqa", "score,none"),
    "synthetic": Benchmark("longbench_passage_retrieval_en", "score,none"),
    "code": Benchmark("longbench_lcc", "score,none"),
}
_MODELS = {shape.hub_id: name.replace("-", "_").replace(".", "_") for name, shape in SHAPES.items()}
# They answer in chats, after thousands of tokens of thought; the throughput runs of the paper allow QwQ 16K as well.
THINKING = ("qwq_32b", "r1_distill_qwen_14b", "r1_distill_llama_8b")
_THOUGHT = {"max_gen_toks": 16_384}


class Ran(NamedTuple):
    """Rows of ``harness_scores``, and what to say of the run."""

    scores: pd.DataFrame
    said: str


MethodsOf = Callable[[LoadedModel, str], Mapping[str, Method]]


def model_key(name: str) -> str:
    """What claims call the model that the hub calls ``name``; the name itself where no paper uses it."""
    return _MODELS.get(name, name)


def paper_policy(name: str, otherwise: CompressionPolicy) -> CompressionPolicy:
    """The thresholds that DiffKV states for the model ``name`` (Figure 10), ``otherwise`` where it states none.

    Thinking models have the scale groups of the paper's accuracy runs.
    """
    chosen = load_claims(project_root() / "claims.yaml")["diffkv-fig10"].published
    model = model_key(name)
    low = chosen["chosen_alpha_low"].get(model)
    if low is None:
        return otherwise
    # The released scripts switch the low tier off by one threshold for both.
    high = low if model in chosen["low_tier_disabled"] else chosen["chosen_alpha_high"][model]
    tiers = "K8V4:1/2-K4V2:2/4" if model in THINKING else "K8V4-K4V2"
    return CompressionPolicy.paper(
        tiers, alpha_high=high, alpha_low=low, prompt_divisor="length", group_max="each-step"
    )


def run_benchmarks(
    study: Any,
    loaded: LoadedModel,
    tasks: Sequence[str] | Mapping[str, Sequence[str]],
    methods_of: MethodsOf,
    *,
    limit: int = 0,
    unsafe_code: bool = False,
) -> Ran:
    """``harness_scores`` of the notebook's model, or of each model that ``tasks`` maps to its tasks, one at a time.

    ``methods_of(loaded, task)`` names the methods. ``limit`` documents a task, 0 for all. Tasks that execute code are
    left out, and that is said, unless ``unsafe_code``. What was run is added to the configuration of ``study``.
    """
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
        raise ValueError(f"harness_limit is {limit!r}; write a whole number of documents, or 0 for all")
    plan = dict(tasks) if isinstance(tasks, Mapping) else {loaded.name: list(tasks)}
    plan = {name: list(own) for name, own in plan.items() if own}
    nothing = pd.DataFrame(columns=list(COLUMNS))
    if not plan:
        return Ran(nothing, "harness_tasks is empty: none of the papers' own benchmarks is run")
    folder = study.cache_folder("harness")
    named = sorted({task for own in plan.values() for task in own})
    manager = find_tasks(named, folder, documents=limit or 100, seed=study.seed)
    left_out = [] if unsafe_code else code_tasks(manager, named)
    with code_execution(unsafe_code):
        for task in named:  # what cannot be loaded is better known now than after days
            if task not in left_out:
                load_task(manager, task, seed=study.seed)
    documents = f"the first {limit}" if limit else "all"
    study.config |= {"benchmarks": {name: ", ".join(own) for name, own in plan.items()}}
    study.config |= {"benchmark_documents": documents}
    found = []
    for name, own in plan.items():
        model = loaded if name == loaded.name else load_model(name, device=study.device)
        for task in own:
            if task not in left_out:
                found.append(_scores(model, task, methods_of(model, task), folder, study, limit, unsafe_code))
        del model  # the next one needs its memory
        give_back_freed()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    said = [f"{documents} documents of {', '.join(own)} on {name}" for name, own in plan.items()]
    if left_out:
        said.append(f"left out: {', '.join(left_out)} execute code that the model wrote, harness_unsafe_code allows it")
    return Ran(pd.concat(found, ignore_index=True) if found else nothing, "\n".join(said))


def table(scores: pd.DataFrame) -> pd.DataFrame:
    """Text: each model and task with each method, its main metric with interval, its nominal and true memory."""
    main = {benchmark.task: benchmark.metric for benchmark in (*BENCHMARKS.values(), *LONGBENCH.values())}
    shown = [
        {
            "model": row.model, "task": row.task, "method": row.method, row.metric.partition(",")[0]:
            f"{row.value:.3f} [{row.low:.3f}, {row.high:.3f}]", "n": row.n, "nominal": f"{row.nominal:.1%}",
            "true": f"{row.true:.1%}",
        }
        for row in scores.itertuples() if row.metric == main.get(row.task, row.metric)
    ]  # fmt: skip
    return pd.DataFrame(shown).fillna("")


def figure_8(scores: pd.DataFrame) -> dict[str, Measurement]:
    """Smallest accuracy over that of FP16 in %, on GSM8K and HumanEval+, where all of it was measured."""
    both = ("gsm8k", "humaneval_plus")
    wanted = {
        "k8v2_smallest_relative_accuracy_percent": ("K8V2", ("llama3_8b", "qwen2_5_7b")),
        "k4v2_llama3_8b_smallest_relative_accuracy_percent": ("K4V2", ("llama3_8b",)),
    }
    measured = {}
    for name, (method, models) in wanted.items():
        pairs = _pairs(scores, models, [BENCHMARKS[each] for each in both], method, "FP16")
        if pairs and all(full.value > 0 for _, full in pairs):
            relative = {f"{own.model} {own.task}": 100 * own.value / full.value for own, full in pairs}
            note = ", ".join(f"{key}: {value:.1f}" for key, value in relative.items())
            measured[name] = Measurement(min(relative.values()), "%", _n(pairs), note)
    return measured


def figure_9(scores: pd.DataFrame) -> dict[str, Measurement]:
    """GSM8K with half of the tokens pruned by thresholds, the method ``dynamic``: loss in points, accuracy in %."""
    measured = {}
    for own, full in _pairs(scores, ["llama3_8b"], [BENCHMARKS["gsm8k"]], "dynamic", "FP16"):
        drop = 100 * (full.value - own.value)
        measured["llama3_8b_gsm8k_accuracy_drop_at_50"] = Measurement(drop, "points", own.n, _note(own, full))
    for own, full in _pairs(scores, ["qwen2_5_7b"], [BENCHMARKS["gsm8k"]], "dynamic", "FP16"):
        measured["qwen2_5_7b_gsm8k_accuracy_at_50"] = Measurement(100 * own.value, "%", own.n, _note(own, full))
    return measured


def table_1(scores: pd.DataFrame, paper: Mapping[str, Any]) -> dict[str, Measurement]:
    """Losses of ``DiffKV``; the mean over all models and benchmarks that ``paper`` lists, where all were measured."""
    listed = [BENCHMARKS[name] for name in paper["benchmarks"]]
    measured = _mean_drop("mean_accuracy_drop_percent", _pairs(scores, paper["models"], listed, "DiffKV", "FP16"))
    for own, full in _pairs(scores, ["llama3_8b"], [BENCHMARKS["gsm8k"]], "DiffKV", "FP16"):
        drop = 100 * (full.value - own.value)
        measured["llama3_8b_gsm8k_drop"] = Measurement(drop, "points", own.n, _note(own, full))
        measured["llama3_8b_gsm8k_nominal_memory_percent"] = Measurement(100 * own.nominal, "%", own.n)
    return measured | _gap(scores, "llama3_8b", "math", "int4", "INT4")


def table_2(scores: pd.DataFrame, paper: Mapping[str, Any]) -> dict[str, Measurement]:
    """LongBench: mean loss of ``DiffKV`` over models and categories, and categories that a baseline wins."""
    categories, models = list(LONGBENCH.values()), list(paper["memory_percent"])
    measured = _mean_drop("mean_longbench_drop_percent", _pairs(scores, models, categories, "DiffKV", "FP16"))
    rivals = [_pairs(scores, models, categories, name, "DiffKV") for name in ("SnapKV 25 %", "Quest 25 %")]
    if all(rivals):
        lost = sorted({(own.model, own.task) for pairs in rivals for own, ours in pairs if own.value > ours.value})
        note = ", ".join(f"{task} on {model}" for model, task in lost)
        measured["categories_won_by_quest_or_snapkv"] = Measurement(len(lost), "categories", _n(rivals[0]), note)
    return measured


def table_3(scores: pd.DataFrame) -> dict[str, Measurement]:
    """Thinking models: ``DiffKV`` minus FP16 on MATH, and minus INT4 on AIME24, in points."""
    measured = _gap(scores, "qwq_32b", "math", "fp16", "FP16")
    return measured | _gap(scores, "r1_distill_llama_8b", "aime24", "int4", "INT4")


def _scores(
    loaded: LoadedModel, task: str, methods: Mapping[str, Method], folder: Path, study: Any, limit: int, unsafe: bool
) -> pd.DataFrame:
    thinks = model_key(loaded.name) in THINKING
    # A prompt of LongBench has some ten thousand tokens, an answer of a thinking model as many.
    on_gpu = 1 if task.startswith("longbench") else 16
    return harness_scores(
        loaded, [task], methods, folder, limit=limit or None, seed=study.seed, confirm_run_unsafe_code=unsafe,
        batch_size=8 if loaded.device.type == "cpu" else on_gpu, apply_chat_template=thinks,
        gen_kwargs=_THOUGHT if thinks else None,
    )  # fmt: skip


def _pairs(
    scores: pd.DataFrame, models: Sequence[str], benchmarks: Sequence[Benchmark], first: str, second: str
) -> list[tuple[Any, Any]]:
    """Rows of two methods for every model and benchmark; none at all where one of them was not measured."""
    pairs = [tuple(_row(scores, model, benchmark, method) for method in (first, second))
             for model in models for benchmark in benchmarks]  # fmt: skip
    return [] if any(None in pair for pair in pairs) else pairs


def _row(scores: pd.DataFrame, model: str, benchmark: Benchmark, method: str) -> Any | None:
    here = (scores["task"] == benchmark.task) & (scores["metric"] == benchmark.metric) & (scores["method"] == method)
    found = [row for row in scores[here].itertuples(index=False) if model_key(row.model) == model]
    return found[0] if found else None


def _mean_drop(metric: str, pairs: Sequence[tuple[Any, Any]]) -> dict[str, Measurement]:
    if not pairs:
        return {}
    drops = {f"{own.model} {own.task}": 100 * (full.value - own.value) for own, full in pairs}
    note = "in points; " + ", ".join(f"{key}: {drop:.2f}" for key, drop in drops.items())
    return {metric: Measurement(statistics.fmean(drops.values()), "%", _n(pairs), note)}


def _gap(scores: pd.DataFrame, model: str, benchmark: str, name: str, other: str) -> dict[str, Measurement]:
    return {
        f"{model}_{benchmark}_diffkv_minus_{name}": Measurement(
            100 * (own.value - rival.value), "points", own.n, _note(own, rival)
        )
        for own, rival in _pairs(scores, [model], [BENCHMARKS[benchmark]], "DiffKV", other)
    }


def _note(*rows: Any) -> str:
    return "; ".join(f"{row.method} {row.value:.3f} [{row.low:.3f}, {row.high:.3f}]" for row in rows)


def _n(pairs: Sequence[tuple[Any, Any]]) -> int:
    return sum(int(own.n) for own, _ in pairs)
