"""What the vLLM connector refuses at start: settings, engines, profiles, and versions of vLLM it was not made for."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from vllm_standins import MODULE, install

from diffkv_repro.kvserve.vllm_settings import ConnectorSettings


@pytest.mark.parametrize("profile", ["duoattention", "snapkv", "kvquant-3bit", "cachegen-1-keybias"])
def test_profiles_that_drop_tokens_or_need_the_model_are_refused_at_start(engine, profile):
    with pytest.raises(ValueError, match=r"cannot be used in an engine|drops tokens"):
        engine("kv_producer", {"profile": profile})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel_config__world_size": 2}, "2 workers; supported is 1"),
        ({"parallel_config__decode_context_parallel_size": 2}, "context parallelism"),
        ({"spec__head_size_v": 4}, "keys and values of one size"),
        ({"spec__dtype": torch.uint8}, "dtype is torch.uint8"),
        ({"spec__num_kv_heads": 5}, "expected are 2 layers x 5"),
        ({"group__layer_names": ["a"]}, "expected are 1 layers"),
    ],
)
def test_engines_that_are_not_supported_are_refused_by_name(engine, changes, words):
    with pytest.raises(ValueError, match=words):
        engine(**changes)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (
            {"profil": "int4"},
            "no 'profil'; allowed are store, keys, insecure, profile, profiles, workload",
        ),
        ({"store": ""}, "store is ''"),
        ({"store": "ftp://127.0.0.1:1"}, "allowed are a folder, tcp://"),
        ({"store": "tcp://127.0.0.1:1", "keys": "/nowhere"}, "no key /nowhere"),
        ({"store": "tcp://127.0.0.1:1", "insecure": True, "store_gib": 1}, "bounds itself"),
        ({"keys": 3}, "keys is 3"),
        ({"keys": "x"}, "keys is given with a folder"),
        ({"insecure": 1}, "insecure is 1; allowed are true, false"),
        ({"profile": "zip"}, "unknown profile 'zip'"),
        ({"profile": {"quantizer": "uniform", "codec": "zip"}}, "unknown codec 'zip'"),
        ({"profiles": "missing.yaml"}, "missing.yaml cannot be read"),
        ({"profile": "int4", "profiles": "x"}, "both given"),
        ({"slo": 1.0}, "slo is given without profiles"),
        ({"min_quality": 0.9}, "min_quality is given without profiles"),
        ({"profiles": "x", "slo": -1}, "slo is -1"),
        ({"profiles": "x", "bandwidth": "fast"}, "bandwidth is 'fast'"),
        ({"profiles": "x", "min_quality": float("nan")}, "min_quality is nan"),
        ({"min_tokens": 0}, "min_tokens is 0"),
        ({"model_id": ""}, "model_id is ''"),
        ({"namespace": 3}, "namespace is 3"),
        ({"store_gib": 0}, "store_gib is 0"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(engine, extra, words):
    with pytest.raises(ValueError, match=words):
        engine(extra=extra)


def test_a_store_is_needed():
    with pytest.raises(ValueError, match="lacks 'store'"):
        ConnectorSettings.from_extra({"profile": "int4"})


def test_an_unknown_revision_needs_a_model_id(engine, module):
    def without(**extra):
        made = engine(extra=extra, model_config__model="some/model")
        made.config.model_config.hf_config._commit_hash = None
        return module.layout_of(made.config, made.cache_config, extra.get("model_id"))

    with pytest.raises(ValueError, match="name them, as model_id"):
        without()
    assert without(model_id="mine").model == "mine"


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0.0", "0.10.1", "dev"])
def test_other_versions_of_vllm_are_refused(monkeypatch, version):
    with pytest.raises(
        ImportError, match=rf"vLLM here is {version}; KVServeConnector follows the interface of 0\.32 and 0\.33"
    ):
        install(monkeypatch, version)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.33.0"])
def test_supported_versions_are_taken(monkeypatch, version):
    assert install(monkeypatch, version).KVServeConnector


def test_without_vllm_the_package_imports_and_the_connector_says_what_it_needs():
    lines = [
        "import sys",
        "sys.modules['vllm'] = None",
        "sys.modules['lmcache'] = None",
        "import diffkv_repro.kvserve.vllm_plans, diffkv_repro.kvserve.vllm_transfer, diffkv_repro.kvserve.library",
        "import importlib, json",
        "said = []",
        f"for name in ({MODULE!r}, 'diffkv_repro.kvserve.lmcache_serde'):",
        "    try: importlib.import_module(name)",
        "    except ImportError as error: said.append(str(error))",
        "print(json.dumps(said))",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    first, second = json.loads(done.stdout.splitlines()[-1])
    assert "is loaded by vLLM, which is not installed here; docs/serving-vllm.md" in first
    assert "beside LMCache, which is not installed here; docs/serving-vllm.md" in second
    assert (Path(__file__).parents[2] / "docs" / "serving-vllm.md").is_file()
