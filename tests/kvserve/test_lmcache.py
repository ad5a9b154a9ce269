"""The serde in LMCache itself: an environment of its own (docs/serving-vllm.md), named in DIFFKV_LMCACHE_PYTHON."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONTRACT = Path(__file__).with_name("lmcache_contract.py")


def python_with_lmcache():
    named = os.environ.get("DIFFKV_LMCACHE_PYTHON")
    return named or (sys.executable if importlib.util.find_spec("lmcache") else None)


@pytest.mark.skipif(
    python_with_lmcache() is None, reason="no LMCache here: name a Python that has it in DIFFKV_LMCACHE_PYTHON"
)
def test_the_contract_holds():
    command = [python_with_lmcache(), "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CONTRACT)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 20
