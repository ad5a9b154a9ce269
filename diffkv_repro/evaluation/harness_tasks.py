"""lm-eval's tasks by name, and our generated ones beside them: found, checked and loaded before anything is asked."""

import copy
import hashlib
import json
import os
import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from lm_eval.tasks import TaskManager
from lm_eval.tasks._index import Kind

from diffkv_repro.workloads.lm_eval_tasks import LOCAL_TASKS, write_lm_eval_tasks

# Read by Hugging Face's `evaluate` when a task that executes code is loaded.
_ALLOW_CODE = "HF_ALLOW_CODE_EVAL"
# A function that is not shown as source, in the configuration of a task: where it lies differs from run to run.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class HarnessTasks(TaskManager):
    """lm-eval's task manager that loads a task once, whatever the number of methods that are asked.

    Two calls with the same names give the same objects; lm-eval builds their requests anew for every evaluation.
    """

    _loaded: dict[str, Any]

    def fresh(self) -> "HarnessTasks":
        """The same index of tasks, with nothing loaded: settings of one model's run never reach another's."""
        other = copy.copy(self)
        other._loaded = {}
        return other

    def load(self, task_list: Any) -> Any:
        key = json.dumps(task_list)
        if key not in self._loaded:
            self._loaded[key] = super().load(task_list)
        return self._loaded[key]


def find_tasks(names: Sequence[str], folder: Path, *, documents: int = 100, seed: int = 0) -> HarnessTasks:
    """A manager that knows ``names``: tasks or groups of lm-eval, or of :data:`LOCAL_TASKS`, written into ``folder``.

    Raises ValueError for a name that is unknown, or that is a mere tag of several tasks.
    """
    if isinstance(names, str) or not names:
        raise ValueError(f"tasks is {names!r}; give a list of lm-eval's names, as ['gsm8k'], with at least one")
    own = None
    if set(names) & set(LOCAL_TASKS):
        # The files of other sizes and seeds stay what they are: a run of those may be going on.
        own = Path(folder).absolute() / f"tasks-{documents}-{seed}"
        write_lm_eval_tasks(own, documents=documents, seed=seed)
    manager = _index(own, set(names) <= set(LOCAL_TASKS)).fresh()
    for name in names:
        entry = manager.task_index.get(name)
        if entry is None:
            near = get_close_matches(name, manager.all_tasks, n=3) or LOCAL_TASKS
            raise ValueError(f"unknown task {name!r}; lm-eval has {len(manager.all_tasks)}, nearest {', '.join(near)}")
        if entry.kind is Kind.TAG:
            raise ValueError(f"{name!r} is a tag and has no score; name its tasks: {', '.join(sorted(entry.tags))}")
    return manager


def code_tasks(manager: TaskManager, names: Sequence[str]) -> list[str]:
    """Those of ``names`` that execute what the model writes; known without loading them."""
    return [name for name in names if _executes(manager, name)]


def require_harmless(manager: TaskManager, names: Sequence[str], allowed: bool) -> None:
    """Raise ValueError where a task executes what the model writes and ``allowed`` is not set."""
    found = [] if allowed else code_tasks(manager, names)
    if found:
        raise ValueError(
            f"{', '.join(found)}: to score it, Python code that the model wrote is executed on this machine with your "
            "rights. Set confirm_run_unsafe_code=True (harness_unsafe_code = True in a notebook) to allow that; do so "
            "in a container or another account only"
        )


@contextmanager
def code_execution(allowed: bool) -> Iterator[None]:
    """Let `evaluate` execute code within, where ``allowed``; it asks an environment variable."""
    before = os.environ.get(_ALLOW_CODE)
    if allowed:
        os.environ[_ALLOW_CODE] = "1"
    try:
        yield
    finally:
        if allowed and before is None:
            os.environ.pop(_ALLOW_CODE, None)
        elif allowed:
            os.environ[_ALLOW_CODE] = before


def load_task(manager: HarnessTasks, name: str, *, seed: int = 0) -> dict[str, Any]:
    """The tasks that ``name`` is made of. Raises RuntimeError for packages or data that are not to be had."""
    random.seed(seed)  # GPQA shuffles its choices with it while it is loaded
    try:
        return manager.load([name])["tasks"]
    except ImportError as error:
        raise RuntimeError(f"task {name}: {error}; pip install 'diffkv-repro[benchmarks]' has what it needs") from error
    except (OSError, ValueError) as error:
        raise RuntimeError(f"task {name} cannot be loaded, offline or for want of access to it: {error}") from error


def build_requests(
    tasks: dict[str, Any], *, limit: int | None, seed: int, template: Any = None
) -> tuple[str, list[tuple[str, list[Any]]]]:
    """A digest of everything ``tasks`` ask and expect, and their requests: kind and arguments.

    As lm-eval's ``simple_evaluate`` builds them. ``template`` turns a chat into text, for chat models.
    """
    random.seed(seed)
    found, digest = [], hashlib.sha256()
    for name, task in tasks.items():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=seed)
        task.build_all_requests(
            limit=limit, rank=0, world_size=1, apply_chat_template=template is not None, fewshot_as_multiturn=True,
            chat_template=template,
        )  # fmt: skip
        requests = [(instance.request_type, list(instance.args)) for instance in task.instances]
        documents = [document for _, document in task.doc_iterator(rank=0, limit=limit, world_size=1)]
        asked = json.dumps([name, requests, documents, task.dump_config()], default=str)
        digest.update(_ADDRESS.sub("", asked).encode())
        found += requests
    return digest.hexdigest(), found


@cache
def _index(own: Path | None, only_own: bool) -> HarnessTasks:
    # To find lm-eval's own ten thousand tasks takes seconds, so it is done where they are wanted, and once.
    return HarnessTasks(include_path=None if own is None else str(own), include_defaults=not only_own)


def _executes(manager: TaskManager, name: str) -> bool:
    entry = manager.task_index.get(name)
    config = (entry.cfg if entry is not None else None) or {}
    members = config.get("task") if "group" in config else None
    inner = [item.get("task", item.get("group")) if isinstance(item, dict) else item for item in members or []]
    return bool(config.get("unsafe_code")) or any(_executes(manager, item) for item in inner if item != name)
