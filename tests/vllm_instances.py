"""Real vLLM instances in processes of their own, by the Python that DIFFKV_VLLM_PYTHON names (docs/serving-vllm.md)."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from diffkv_repro.models.weights import SMOLLM2, packaged_folder

ROOT = Path(__file__).parents[1]
NEW = 24  # tokens that are generated


def python_with_vllm():
    named = os.environ.get("DIFFKV_VLLM_PYTHON")
    return named or (sys.executable if importlib.util.find_spec("vllm") else None)


needs_vllm = pytest.mark.skipif(
    python_with_vllm() is None, reason="no vLLM here: name a Python that has it in DIFFKV_VLLM_PYTHON"
)


def instance(folder, name, prompts, role=None, batched=1024, **extra):
    """Run one instance to its end: what it generated, and what it logged."""
    transfer = role and {
        "kv_connector": "KVServeConnector",
        "kv_connector_module_path": "diffkv_repro.kvserve.vllm_connector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": str(folder / "store")} | extra,
    }
    job, results = folder / f"{name}.job.json", folder / f"{name}.json"
    job.write_text(
        json.dumps({
            "model": str(packaged_folder(SMOLLM2)), "prompts": prompts, "max_tokens": NEW, "transfer": transfer,
            "max_num_batched_tokens": batched,
        })
    )  # fmt: skip
    command = [python_with_vllm(), str(ROOT / "tests/kvserve/vllm_instance.py"), str(job), str(results)]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=600
    )
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-4000:]
    return json.loads(results.read_text()), log
