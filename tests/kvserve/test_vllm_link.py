"""Real vLLM instances that share no folder: frames go over the encrypted link to a store's process and back."""

import re

import pytest
from vllm_instances import ROOT, instance, needs_vllm

from diffkv_repro.kvserve.keys import make_keys
from diffkv_repro.kvserve.process import ServerProcess
from diffkv_repro.models import load_model

pytestmark = needs_vllm


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm-link")
    make_keys(folder / "keys")
    make_keys(folder / "others")
    ids = load_model("smollm2-135m", device="cpu").tokenizer((ROOT / "README.md").read_text()).input_ids
    prompts = [ids[:400], ids[500:590]]
    with ServerProcess(["frames", str(folder / "kept"), "--gbps", "1"], keys=folder / "keys") as store:
        link = {"store": store.endpoint, "keys": str(folder / "keys")}
        found = {"producer": instance(folder, "producer", prompts, "kv_producer", **link)}
        found["consumer"] = instance(folder, "consumer", prompts, "kv_consumer", **link)
        said = list(store.said)
        strange = link | {"keys": str(folder / "others")}
        found["stranger"] = instance(folder, "stranger", prompts, "kv_both", **strange)
        found["strangers_store"] = store.said[len(said) :]
    found["single"] = instance(folder, "single", prompts)
    return found | {"said": said}


def close(found, single):
    """Whether the tokens are those of a single instance, and log-probabilities but for rounding."""
    pairs = zip(found["logprobs"], single["logprobs"], strict=True)
    return found["tokens"] == single["tokens"] and max(abs(a - b) for a, b in pairs) < 1e-3


@pytest.mark.parametrize(("place", "loaded"), [(0, 399), (1, 80)])
def test_what_one_prefilled_another_decodes_word_for_word(run, place, loaded):
    (consumed, log), (single, _) = run["consumer"], run["single"]
    assert consumed[place]["cached"] == loaded
    assert close(consumed[place], single[place])
    assert "loaded: " in log


def test_the_store_says_what_went_through_it(run):
    lines = "\n".join(run["said"])
    assert len(re.findall(r"frame \w{8} stored", lines)) == len(re.findall(r"frame \w{8} sent", lines)) == 2


def test_an_instance_without_the_key_says_so_and_computes(run):
    (found, log), (single, _) = run["stranger"], run["single"]
    assert all(close(one, other) for one, other in zip(found, single, strict=True))
    assert "the store cannot be searched, prompts are computed here" in log
    assert "the handshake failed: is the server's key the right one?" in log
    assert run["strangers_store"] == []
