"""The vLLM connector against stand-ins: a prompt is loaded or computed, and each slot holds what it must."""

import pytest
import torch
from vllm_standins import PROMPT, entry, frames, holds, store_cpu, store_gpu

from diffkv_repro.kvserve import HeadScores
from diffkv_repro.kvserve.library import ProfileLibrary


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
