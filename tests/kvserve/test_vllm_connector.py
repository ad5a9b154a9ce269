"""The vLLM connector against stand-ins: a prompt is loaded or computed, and each slot holds what it must."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from vllm_standins import MODULE, Engine, install, store_cpu, store_gpu

from diffkv_repro.kvserve import HeadScores, Profile
from diffkv_repro.kvserve.frame_store import FolderStore, PromptKey
from diffkv_repro.kvserve.latency import MeasuredProfile
from diffkv_repro.kvserve.library import LibraryEntry, ProfileLibrary
from diffkv_repro.kvserve.vllm_plans import Load, Save
from diffkv_repro.kvserve.vllm_settings import ConnectorSettings

PROMPT = [7 * i % 101 + 1 for i in range(150)]


@pytest.fixture
def module(monkeypatch):
    return install(monkeypatch)


@pytest.fixture
def engine(module, tmp_path):
    def make(role="kv_both", extra=(), **how):
        return Engine(module, {"store": str(tmp_path / "store"), "min_tokens": 16} | dict(extra), role, **how)

    return make


def frames(tmp_path):
    return sorted((tmp_path / "store").glob("*.kvsf"))


def holds(engine, blocks, tokens):
    for layer, found in enumerate(engine.read(blocks, len(tokens))):
        key, value = engine.kv(tokens, layer)
        if not (torch.equal(found.key, key) and torch.equal(found.value, value)):
            return False
    return True


@pytest.mark.parametrize(("store", "block"), [(store_cpu, 16), (store_gpu, 16), (store_gpu, 48), (store_cpu, 32)])
@pytest.mark.parametrize("chunk", [10_000, 37])
def test_a_consumer_loads_what_a_producer_stored(engine, tmp_path, store, block, chunk):
    producer = engine("kv_producer")
    producer.serve(PROMPT, chunk=chunk)
    assert len(frames(tmp_path)) == 1
    consumer = engine("kv_consumer", store=store, block=block)
    blocks, loaded = consumer.serve(PROMPT, chunk=chunk)
    assert loaded == 144  # whole grains of 150
    assert consumer.computed == len(PROMPT) - 144
    assert holds(consumer, blocks, PROMPT)
    assert len(frames(tmp_path)) == 1, "a consumer stores nothing"


def test_the_last_token_is_always_computed(engine):
    engine().serve(PROMPT[:64])
    consumer = engine("kv_consumer")
    blocks, loaded = consumer.serve(PROMPT[:64])
    assert loaded == 63
    assert holds(consumer, blocks, PROMPT[:64])


def test_the_longest_stored_beginning_is_loaded(engine):
    producer = engine("kv_producer")
    for tokens in (32, 96, 64):
        producer.serve(PROMPT[:tokens])
    other = PROMPT[:100] + [9] * 50
    consumer = engine("kv_consumer")
    blocks, loaded = consumer.serve(other)
    assert loaded == 96
    assert holds(consumer, blocks, other)
    assert consumer.serve([3, *PROMPT[1:]])[1] == 0


def test_what_is_there_already_is_not_loaded_again(engine):
    engine("kv_producer").serve(PROMPT)
    consumer = engine("kv_consumer")
    blocks, loaded = consumer.serve(PROMPT, local=96)
    assert loaded == 144 - 96
    assert holds(consumer, blocks, PROMPT)
    assert consumer.serve(PROMPT, local=144)[1] == 0


def test_a_prompt_is_stored_once(engine, tmp_path):
    both = engine()
    both.serve(PROMPT)
    (path,) = frames(tmp_path)
    before = path.stat().st_ino
    assert both.serve(PROMPT)[1] == 144
    assert [one.stat().st_ino for one in frames(tmp_path)] == [before]


def test_short_prompts_and_those_of_more_than_tokens_are_left_alone(engine, tmp_path):
    both = engine(extra={"min_tokens": 64})
    both.serve(PROMPT[:63])
    both.serve(PROMPT, lora_request=object())
    both.serve(PROMPT, mm_features=[object()])
    both.serve(PROMPT, prompt_embeds=object())
    assert frames(tmp_path) == []
    both.serve(PROMPT)
    assert both.serve(PROMPT, lora_request=object())[1] == 0
    assert both.serve(PROMPT, local=96)[1] == 0, "48 tokens are fewer than min_tokens"


@pytest.mark.parametrize(
    "how",
    [{"extra": {"namespace": "b"}}, {"extra": {"model_id": "other"}}, {"dtype": torch.bfloat16},
     {"spec__num_kv_heads": 3, "model_config__quantization": "fp8"}],
)  # fmt: skip
def test_frames_of_another_model_or_namespace_are_not_found(engine, how):
    engine("kv_producer").serve(PROMPT)
    assert engine("kv_consumer", **how).serve(PROMPT)[1] == 0


def test_a_salt_keeps_prompts_apart(engine):
    both = engine()
    both.serve(PROMPT, cache_salt="mine")
    assert both.serve(PROMPT)[1] == 0
    assert both.serve(PROMPT, cache_salt="yours")[1] == 0
    assert both.serve(PROMPT, cache_salt="mine")[1] == 144


def truncated(data):
    return data[: len(data) // 2]


def empty(data):
    return b""


def longer(data):
    return data + b"x"


def huge(data):
    return data + bytes(1 << 22)


def flipped(data):
    return data[:-20] + bytes([data[-20] ^ 1]) + data[-19:]


@pytest.mark.parametrize("harm", [truncated, empty, longer, huge, flipped])
def test_a_damaged_frame_costs_a_prefill_and_is_thrown_away(engine, tmp_path, harm):
    engine("kv_producer").serve(PROMPT)
    (path,) = frames(tmp_path)
    path.write_bytes(harm(path.read_bytes()))
    consumer = engine("kv_consumer")
    blocks, loaded = consumer.serve(PROMPT)
    assert loaded == 144
    assert consumer.recomputed == len(PROMPT)
    assert holds(consumer, blocks, PROMPT)
    assert frames(tmp_path) == []
    engine("kv_producer").serve(PROMPT)
    fresh = engine("kv_consumer")
    assert fresh.serve(PROMPT)[1] == 144
    assert fresh.recomputed == 0


def test_every_flipped_bit_costs_a_prefill_at_most(engine, tmp_path):
    engine("kv_producer").serve(PROMPT[:32])
    (path,) = frames(tmp_path)
    data = path.read_bytes()
    for place in range(0, len(data), max(1, len(data) // 97)):
        path.write_bytes(data[:place] + bytes([data[place] ^ (1 << place % 8)]) + data[place + 1 :])
        consumer = engine("kv_consumer")
        blocks, _ = consumer.serve(PROMPT[:32])
        assert holds(consumer, blocks, PROMPT[:32]), place


def test_a_frame_under_another_name_is_refused(engine, tmp_path):
    producer = engine("kv_producer")
    producer.serve(PROMPT)
    (first,) = frames(tmp_path)
    producer.serve(PROMPT[::-1])
    other = next(path for path in frames(tmp_path) if path != first)
    other.write_bytes(first.read_bytes())
    consumer = engine("kv_consumer")
    blocks, _ = consumer.serve(PROMPT[::-1])
    assert holds(consumer, blocks, PROMPT[::-1])
    assert consumer.recomputed


def test_a_frame_that_goes_between_look_and_load_costs_a_prefill(engine, tmp_path, monkeypatch):
    engine("kv_producer").serve(PROMPT)
    consumer = engine("kv_consumer")
    real = FolderStore.get

    def gone(self, name, most):
        self.discard(name)
        return real(self, name, most)

    monkeypatch.setattr(FolderStore, "get", gone)
    blocks, loaded = consumer.serve(PROMPT)
    assert loaded == 144
    assert holds(consumer, blocks, PROMPT)


@pytest.mark.parametrize("error", [OSError("the disk is gone"), RuntimeError("a mistake of ours"), MemoryError()])
@pytest.mark.parametrize("verb", ["find", "get", "put", "discard", "receipts", "acknowledge"])
def test_no_failure_of_a_store_reaches_the_engine(engine, tmp_path, monkeypatch, verb, error):
    library = tmp_path / "library.yaml"
    ProfileLibrary((entry("quick", "lossless-zstd"),)).save(library)
    adaptive = {"profiles": str(library)}
    engine("kv_producer", adaptive).serve(PROMPT)
    if verb == "discard":
        (path,) = frames(tmp_path)
        path.write_bytes(b"damaged")

    def fail(*given):
        raise error

    both = engine(extra=adaptive)
    monkeypatch.setattr(FolderStore, verb, fail)
    blocks, _ = both.serve(PROMPT)
    assert holds(both, blocks, PROMPT)
    blocks, _ = both.serve(PROMPT[::-1])
    assert holds(both, blocks, PROMPT[::-1])


def entry(name, profile, ratio=2.0, speed=1e9, quality=1.0):
    return LibraryEntry(Profile.named(profile), MeasuredProfile(name, ratio, speed, speed, {"*": quality}))


def test_a_lossy_frame_comes_back_as_its_profile_gives_it_and_is_not_stored_again(engine, tmp_path):
    engine("kv_producer", {"profile": "int4"}).serve(PROMPT[:96])
    both = engine(extra={"profile": "lossless-zstd"})
    blocks, loaded = both.serve(PROMPT)
    assert loaded == 96
    assert not holds(both, blocks, PROMPT)
    found = both.read(blocks, len(PROMPT))[0]
    key, _ = both.kv(PROMPT, 0)
    assert torch.equal(found.key[:, 96:], key[:, 96:])
    # Keys lie within 1, an int4 step of them is at most 2 / 15.
    assert 0 < (found.key - key).abs().max() <= 1 / 15 + 1e-3
    assert len(frames(tmp_path)) == 1, "a longer frame would carry the loss on as if it were the model's"


@pytest.mark.parametrize("profile", ["int4", "damaged"])
def test_what_shares_the_blocks_of_a_bad_load_is_not_stored_until_they_are_given_out_anew(engine, tmp_path, profile):
    engine("kv_producer", {"profile": "int4"}).serve(PROMPT[:96])
    (path,) = frames(tmp_path)
    both = engine()
    transfer, blocks = both.worker._transfer, tuple(range(10))
    both.compute(PROMPT, blocks, 0, len(PROMPT))
    if profile == "damaged":
        path.write_bytes(path.read_bytes()[:-1])
    key = PromptKey(96, path.stem)
    transfer.load([Load("a", key, 32, 96, blocks)])
    assert transfer.take_failed() == (set(blocks[2:6]) if profile == "damaged" else set())
    others = [PromptKey(tokens, f"shared{tokens}") for tokens in (32, 48, 144)]
    transfer.save([Save("b", other, blocks) for other in others])
    assert {path.stem for path in frames(tmp_path)} - {key.name} == {"shared32"}, "its blocks are before the load's"
    transfer.load([], fresh=blocks[2:6])
    transfer.save([Save("c", others[2], blocks)])
    assert "shared144" in {path.stem for path in frames(tmp_path)}


def test_a_lossless_load_may_be_stored_with_what_follows(engine, tmp_path):
    engine("kv_producer").serve(PROMPT[:96])
    both = engine()
    both.serve(PROMPT)
    assert len(frames(tmp_path)) == 2
    again = engine("kv_consumer")
    blocks, loaded = again.serve(PROMPT)
    assert (loaded, holds(again, blocks, PROMPT)) == (144, True)


def test_the_controller_chooses_by_bandwidth_and_learns_from_receipts(engine, tmp_path):
    library = tmp_path / "library.yaml"
    ProfileLibrary((entry("quick", "lossless-zstd"), entry("small", "int4", 8.0, 1e6))).save(library)
    for bandwidth, exact in ((1e3, False), (1e12, True)):
        about = {"profiles": str(library), "bandwidth": bandwidth, "namespace": str(bandwidth)}
        producer, consumer = engine("kv_producer", about), engine("kv_consumer", about)
        producer.serve(PROMPT)
        blocks, loaded = consumer.serve(PROMPT)
        assert loaded == 144
        assert holds(consumer, blocks, PROMPT) is exact
        producer.scheduler._plans._polled = -1e9
        assert producer.scheduler._plans.goodput.bandwidth is None
        producer.serve(PROMPT[::-1])  # any step looks for receipts
        assert producer.scheduler._plans.goodput.bandwidth > 0
        assert list((tmp_path / "store" / "receipts").iterdir()) == []
    strict = engine("kv_producer", about | {"bandwidth": 1e3, "min_quality": 1.5, "namespace": "strict"})
    strict.serve(PROMPT)
    reader = engine("kv_consumer", {"namespace": "strict"})
    assert holds(reader, reader.serve(PROMPT)[0], PROMPT), "no profile is good enough, so nothing is compressed"


def test_a_profile_that_ranks_heads_takes_their_scores_from_a_file(engine, tmp_path):
    with pytest.raises(ValueError, match=r"cannot be used in an engine: quantizer .* ranks heads"):
        engine("kv_producer", {"profile": "kvserve-default"})
    scores = HeadScores(((1.0, 2.0, 3.0), (3.0, 2.0, 1.0)), "mean-attention", "m", "")
    scores.save(tmp_path / "heads.json")
    engine("kv_producer", {"profile": "kvserve-default", "head_scores": str(tmp_path / "heads.json")}).serve(PROMPT)
    assert engine("kv_consumer").serve(PROMPT)[1] == 144, "frames carry what came of the scores"


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
        ({"profil": "int4"}, "no 'profil'; allowed are store, profile, profiles, workload, min_quality, slo"),
        ({"store": ""}, "store is ''"),
        ({"store": "tcp://127.0.0.1:1"}, "allowed are a folder"),
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
