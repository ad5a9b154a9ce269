"""The interface that the connector was written for, read from vLLM's sources where they are to be had.

Sources: those that DIFFKV_VLLM_SOURCES names (folders that hold ``vllm``, separated as in PATH), and those of the
Python that DIFFKV_VLLM_PYTHON names. Nothing of vLLM is imported or run.
"""

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_standins import install

FIND = "import importlib.util as u; s = u.find_spec('vllm'); print(s.origin if s else '')"


def sources():
    found = [Path(folder) for folder in os.environ.get("DIFFKV_VLLM_SOURCES", "").split(os.pathsep) if folder]
    python = os.environ.get("DIFFKV_VLLM_PYTHON") or (sys.executable if importlib.util.find_spec("vllm") else None)
    if python:
        origin = subprocess.run([python, "-c", FIND], capture_output=True, text=True, check=True).stdout.strip()
        found += [Path(origin).parents[1]] if origin else []
    return found


SOURCES = sources()
pytestmark = pytest.mark.skipif(
    not SOURCES, reason="no sources of vLLM here: name them in DIFFKV_VLLM_SOURCES, or a Python in DIFFKV_VLLM_PYTHON"
)


@pytest.fixture(params=SOURCES or ["none"], ids=lambda path: Path(path).name)
def root(request):
    return Path(request.param) / "vllm"


def class_of(path, name):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)


def methods(node):
    return {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}


def arguments(function):
    return [argument.arg for argument in function.args.args]


def decorators(function):
    return {ast.unparse(one) for one in function.decorator_list}


def names(node):
    """Fields of a dataclass, properties, and attributes that the constructor sets."""
    fields = {item.target.id for item in node.body if isinstance(item, ast.AnnAssign)}
    assigned = {
        target.attr
        for item in ast.walk(node)
        if isinstance(item, ast.Assign | ast.AnnAssign)
        for target in (item.targets if isinstance(item, ast.Assign) else [item.target])
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
    }
    return fields | assigned | set(methods(node))


BASE = "distributed/kv_transfer/kv_connector/v1/base.py"
OURS = Path(__file__).parents[2] / "diffkv_repro/kvserve/vllm_connector.py"


def test_every_abstract_method_is_there_and_takes_the_same(root):
    base, ours = methods(class_of(root / BASE, "KVConnectorBase_V1")), methods(class_of(OURS, "KVServeConnector"))
    abstract = {name for name, function in base.items() if "abstractmethod" in decorators(function)}
    assert len(abstract) == 7
    assert abstract <= set(ours)
    for name, function in ours.items():
        if name.startswith("_") and name != "__init__":
            assert name not in base, f"{name} of the base would be replaced"
            continue
        assert arguments(function) == arguments(base[name]), name
        assert ("property" in decorators(function)) == ("property" in decorators(base[name])), name


def test_no_attribute_of_the_base_is_overwritten(root):
    theirs = names(class_of(root / BASE, "KVConnectorBase_V1"))
    assert not {"_plans", "_transfer"} & theirs
    assert {"_connector_metadata", "_kv_transfer_config", "_vllm_config"} <= theirs


@pytest.mark.parametrize(
    ("path", "name", "used"),
    [
        ("config/kv_transfer.py", "KVTransferConfig",
         "kv_connector_extra_config kv_load_failure_policy is_kv_producer is_kv_consumer kv_connector_module_path"),
        ("v1/core/sched/output.py", "SchedulerOutput", "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens"),
        ("v1/core/sched/output.py", "NewRequestData", "req_id block_ids num_computed_tokens"),
        ("v1/core/sched/output.py", "CachedRequestData", "req_ids resumed_req_ids new_block_ids num_computed_tokens"),
        ("v1/request.py", "Request",
         "request_id prompt_token_ids num_tokens lora_request mm_features cache_salt prompt_embeds"),
        ("v1/outputs.py", "KVConnectorOutput", "kv_connector_worker_meta invalid_block_ids"),
        ("v1/core/kv_cache_manager.py", "KVCacheBlocks", "get_block_ids"),
        ("v1/kv_cache_interface.py", "KVCacheConfig", "kv_cache_groups"),
        ("v1/kv_cache_interface.py", "KVCacheGroupSpec", "layer_names kv_cache_spec"),
        ("v1/kv_cache_interface.py", "AttentionSpec", "num_kv_heads head_size dtype"),
        ("v1/kv_cache_interface.py", "KVCacheSpec", "block_size"),
        ("config/compilation.py", "CompilationConfig", "static_forward_context"),
        ("config/parallel.py", "ParallelConfig", "world_size decode_context_parallel_size"),
        ("config/model.py", "ModelConfig", "model quantization dtype"),
    ],
)  # fmt: skip
def test_what_is_read_of_vllm_has_these_names(root, path, name, used):
    assert set(used.split()) <= names(class_of(root / path, name))


def test_the_kernel_that_is_asked_takes_what_it_is_given(root):
    function = methods(class_of(root / "v1/attention/backends/cpu_attn.py", "CPUAttentionBackendImpl"))
    assert arguments(function["do_kv_cache_update"]) == ["self", "layer", "key", "value", "kv_cache", "slot_mapping"]


def test_failed_loads_are_computed_again_where_the_policy_says_so(root):
    field = next(
        item for item in class_of(root / "config/kv_transfer.py", "KVTransferConfig").body
        if isinstance(item, ast.AnnAssign) and item.target.id == "kv_load_failure_policy"
    )  # fmt: skip
    assert "'recompute'" in ast.unparse(field.annotation)
    assert "invalid_block_ids" in (root / "v1/core/sched/scheduler.py").read_text(encoding="utf-8")


def test_the_version_is_one_that_the_connector_takes(root, monkeypatch):
    text = (root / "_version.py").read_text(encoding="utf-8")
    version = next(line.split("'")[1] for line in text.splitlines() if line.startswith("__version__ = "))
    assert install(monkeypatch, version).KVServeConnector
