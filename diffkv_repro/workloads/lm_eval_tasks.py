"""``write_lm_eval_tasks``: generated tasks as files that lm-eval runs with no network."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from diffkv_repro.core.files import write_text
from diffkv_repro.workloads.tasks import PATTERNS, Item, passkey, recall

TAG = "diffkv_local"
LOCAL_TASKS = ("diffkv_recall", "diffkv_recall_choice", "diffkv_passkey")


def write_lm_eval_tasks(
    folder: Path, *, documents: int = 100, pairs: int = 20, words: int = 400, seed: int = 0
) -> list[str]:
    """Write tasks for ``lm-eval run --include_path FOLDER --tasks diffkv_local``; returns their names.

    ``diffkv_recall`` and ``diffkv_recall_choice`` (``pairs`` words and numbers; to be written, and as the likeliest of
    four) and ``diffkv_passkey`` (``words`` words of filler), of ``documents`` documents each. lm-eval gives each
    accuracy with its standard error. The files name each other by absolute paths: write them anew elsewhere instead of
    moving them. Raises ValueError for sizes a task cannot have, before anything is written.
    """
    folder = Path(folder).expanduser().resolve()
    recalled = recall(documents, pairs=pairs, seed=seed)
    made = ((recalled, _generation), (recalled, _choice), (passkey(documents, words=words, seed=seed), _generation))
    for name, (items, settings) in zip(LOCAL_TASKS, made, strict=True):
        data = write_text(folder / f"{name}.jsonl", "".join(f"{json.dumps(_row(item))}\n" for item in items))
        document = _common(name, data) | settings(items)
        write_text(folder / f"{name}.yaml", yaml.safe_dump(document, sort_keys=False, allow_unicode=True))
    return list(LOCAL_TASKS)


def _row(item: Item) -> dict[str, Any]:
    row: dict[str, Any] = {"prompt": item.prompt, "answer": item.answer}
    if item.choices:
        row |= {"choices": list(item.choices), "label": item.choices.index(item.answer)}
    return row


def _common(name: str, data: Path) -> dict[str, Any]:
    return {
        "task": name,
        "tag": TAG,
        "dataset_path": "json",
        # The converted data stay beside the tasks instead of in the user's cache.
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(data.parent / ".datasets")},
        "test_split": "test",
        "num_fewshot": 0,
        "doc_to_text": "{{prompt}}",
        "target_delimiter": " ",
        "metadata": {"version": 1.0},
    }


def _generation(items: Sequence[Item]) -> dict[str, Any]:
    return {
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {
            "until": ["\n\n"],
            "max_gen_toks": max(item.max_new_tokens for item in items),
            "do_sample": False,
        },
        "filter_list": [
            {
                "name": "first",
                "filter": [
                    {"function": "regex", "regex_pattern": f"({PATTERNS[items[0].kind]})"},
                    {"function": "take_first"},
                ],
            }
        ],
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }


def _choice(items: Sequence[Item]) -> dict[str, Any]:
    return {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
