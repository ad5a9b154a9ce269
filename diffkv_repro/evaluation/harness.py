"""``harness_scores``: lm-eval's tasks, any of them by name, through the compressed caches of a loaded model."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lm_eval
import pandas as pd

from diffkv_repro.cache import Method
from diffkv_repro.core.files import write_text
from diffkv_repro.evaluation.decoding import KVUse
from diffkv_repro.evaluation.finished import identity_of
from diffkv_repro.evaluation.harness_tasks import (
    build_requests,
    code_execution,
    find_tasks,
    load_task,
    require_harmless,
)
from diffkv_repro.evaluation.intervals import mean_interval
from diffkv_repro.evaluation.lm_eval_model import CompressedLM
from diffkv_repro.evaluation.teacher_forced import NotReadError
from diffkv_repro.models import LoadedModel
from diffkv_repro.workloads.tasks import Item

COLUMNS = (
    "model", "task", "method", "metric", "value", "stderr", "low", "high", "n", "nominal", "true", "reads", "tokens",
)  # fmt: skip

_FORMAT = 1  # of a stored result, and part of its key


def harness_scores(
    loaded: LoadedModel,
    tasks: Sequence[str],
    methods: Sequence[Method] | Mapping[str, Method],
    folder: Path,
    *,
    limit: int | None = None,
    seed: int = 0,
    batch_size: int = 8,
    storage: str = "simulated",
    apply_chat_template: bool = False,
    gen_kwargs: Mapping[str, Any] | None = None,
    confirm_run_unsafe_code: bool = False,
) -> pd.DataFrame:
    """Run lm-eval's ``tasks`` with every method: a row for each task, method and metric.

    ``tasks``: names of tasks or groups of lm-eval (their data come from the Hugging Face hub), or of the generated ones
    in ``workloads.lm_eval_tasks``, which need no network. ``methods``: a list, named by their labels, or a mapping.

    Columns: ``value`` with lm-eval's ``stderr`` and the 95 % interval ``low``, ``high`` (bootstrap over ``n``
    documents where the value is the mean of one number a document, else 1.96 standard errors); ``nominal`` and
    ``true`` bytes over FP16, ``reads`` of the cache, and ``tokens``, the share of tokens at each precision or pruned.

    In ``folder``: answers as they come (SQLite, as ``diffkv-repro lm-eval run --use_cache`` keeps them), so that a run
    that was stopped goes on; and each result as JSON, under a key of everything it depends on, requests included.
    ``limit`` documents a task (None: all). ``apply_chat_template`` and ``gen_kwargs`` as in lm-eval.

    Raises ValueError for unknown tasks, and for tasks that execute code unless ``confirm_run_unsafe_code``;
    NotReadError where the answers did not read the compressed cache.
    """
    named = dict(methods) if isinstance(methods, Mapping) else {method.label: method for method in methods}
    if len(named) < len(methods) or not named:
        raise ValueError(f"methods is {methods!r}; at least one is needed, and no two with the same label")
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise ValueError(f"limit is {limit!r}; write a whole number of at least 1, or None for all documents")
    if apply_chat_template and not loaded.tokenizer.chat_template:
        raise ValueError(f"apply_chat_template is asked for, but the tokenizer of {loaded.name} has no chat template")
    manager = find_tasks(tasks, folder, documents=limit or 100, seed=seed)
    require_harmless(manager, tasks, confirm_run_unsafe_code)
    options = {"gen_kwargs": dict(gen_kwargs or {}), "chat": apply_chat_template, "seed": seed, "limit": limit}
    rows = []
    with code_execution(confirm_run_unsafe_code):
        for task in tasks:
            chat = _as_text(loaded.tokenizer) if apply_chat_template else None
            asked, _ = build_requests(load_task(manager, task, seed=seed), limit=limit, seed=seed, template=chat)
            for name, method in named.items():
                path = Path(folder) / f"{task}-{_key(loaded, method, storage, task, asked, options)}.json"
                result = _read(path)
                if result is None:
                    lm = CompressedLM(
                        loaded, method=method, storage=storage, batch_size=batch_size,
                        finished=Path(folder) / "answers.sqlite",
                    )  # fmt: skip
                    result = _evaluate(lm, task, manager, options, confirm_run_unsafe_code)
                    write_text(path, json.dumps(result) + "\n")
                rows += _rows(result, seed, {"model": loaded.name, "task": task, "method": name})
    return pd.DataFrame(rows, columns=list(COLUMNS))


def task_prompts(
    task: str, folder: Path, *, count: int, seed: int = 0, confirm_run_unsafe_code: bool = False
) -> list[Item]:
    """Prompts of ``count`` documents of an lm-eval task, to fit a budget on (``sweep.fit_on_items``); no answers.

    A task that executes code does so when it is loaded, so it needs ``confirm_run_unsafe_code`` here as well.
    """
    manager = find_tasks([task], folder, documents=max(count, 100), seed=seed)
    require_harmless(manager, [task], confirm_run_unsafe_code)
    with code_execution(confirm_run_unsafe_code):
        _, requests = build_requests(load_task(manager, task, seed=seed), limit=count, seed=seed)
    return [Item(task, text, "", "number", 1) for text in dict.fromkeys(asked[0] for _, asked in requests)][:count]


def _evaluate(lm: CompressedLM, task: str, manager: Any, options: Mapping[str, Any], unsafe: bool) -> dict[str, Any]:
    """One task with one method, as plain values."""
    seed = options["seed"]
    found = lm_eval.simple_evaluate(
        model=lm, tasks=[task], task_manager=manager, limit=options["limit"], batch_size=lm.batch_size,
        apply_chat_template=options["chat"], gen_kwargs=options["gen_kwargs"] or None, bootstrap_iters=1000,
        random_seed=seed, numpy_random_seed=seed, torch_random_seed=seed, fewshot_random_seed=seed,
        confirm_run_unsafe_code=unsafe,
    )  # fmt: skip
    uses = lm.answers.summaries()
    if not uses or not all(use["reads"] > 0 for use in uses.values()):
        raise NotReadError(f"{task} with {lm.method.label}: the compressed cache was not read; the scores tell nothing")
    return {
        "format": _FORMAT,
        "task": task,
        "model": lm.loaded.name,
        "method": lm.method.label,
        "metrics": _metrics(found, task),
        "n": sum(count["effective"] for count in found["n-samples"].values()),
        "kv": _joined(uses.values()),
        "resumed": lm.answers.resumed,
    }


def _metrics(found: Mapping[str, Any], task: str) -> dict[str, dict[str, Any]]:
    """Each metric as lm-eval names it: its value, its standard error, and its documents' scores where it is their mean.

    The mean over a group may weigh its tasks otherwise than by their documents: then there are no such scores.
    """
    values = found["results"].get(task) or found["groups"][task]
    samples = [sample for own in found["samples"].values() for sample in own]
    metrics = {}
    for key, value in values.items():
        name, comma, kept = key.partition(",")
        if not comma or name.endswith("_stderr") or not _is_number(value):
            continue
        stderr = values.get(f"{name}_stderr,{kept}")
        metrics[key] = {"value": float(value), "stderr": float(stderr) if _is_number(stderr) else None}
        scores = [sample[name] for sample in samples if sample["filter"] == kept and _is_number(sample.get(name))]
        if scores and math.isclose(math.fsum(scores) / len(scores), value, rel_tol=1e-6, abs_tol=1e-9):
            metrics[key]["scores"] = [float(score) for score in scores]
    if not metrics:
        raise ValueError(f"{task}: lm-eval gives no score for it; name the tasks it is made of")
    return metrics


def _joined(uses: Any) -> dict[str, Any]:
    """Cache use over the tasks of a group, each counted by its requests."""
    uses = list(uses)
    requests = sum(use["requests"] for use in uses)
    names = sorted({name for use in uses for name in use["tokens"]})

    def mean(value: Any) -> float:
        return sum(use["requests"] * value(use) for use in uses) / requests

    tokens = {name: mean(lambda use, name=name: use["tokens"].get(name, 0)) for name in names}
    joined = KVUse(
        mean(lambda use: use["nominal"]), mean(lambda use: use["true"]), sum(use["reads"] for use in uses), tokens
    )
    return {"requests": requests, **vars(joined)}


def _rows(result: Mapping[str, Any], seed: int, place: Mapping[str, str]) -> list[dict[str, Any]]:
    kv = result["kv"]
    total = sum(kv["tokens"].values())
    rows = []
    for metric, found in result["metrics"].items():
        value, stderr = found["value"], found["stderr"]
        low = high = math.nan
        if "scores" in found:
            interval = mean_interval(found["scores"], seed=seed, resamples=1000)
            low, high = interval.low, interval.high
        elif stderr is not None:
            low, high = value - 1.96 * stderr, value + 1.96 * stderr
        rows.append(
            {
                **place, "metric": metric, "value": value, "stderr": math.nan if stderr is None else stderr,
                "low": low, "high": high, "n": result["n"], "nominal": kv["nominal"], "true": kv["true"],
                "reads": kv["reads"], "tokens": {name: count / total for name, count in kv["tokens"].items() if total},
            }
        )  # fmt: skip
    return rows


def _key(loaded: LoadedModel, method: Method, storage: str, task: str, asked: str, options: Mapping[str, Any]) -> str:
    what = {
        "answers": identity_of(loaded, method, storage), "task": task, "asked": asked, "options": dict(options),
        "lm-eval": lm_eval.__version__, "format": _FORMAT,
    }  # fmt: skip
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:24]


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if found["format"] == _FORMAT and found["metrics"] and found["kv"]["reads"] > 0 else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _as_text(tokenizer: Any) -> Any:
    """What lm-eval asks a model for: the text of a chat, as HFLM makes it."""

    def text(chat: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )  # fmt: skip

    return text


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not math.isnan(value)
