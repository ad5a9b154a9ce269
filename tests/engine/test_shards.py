"""Workers, each with a share of the heads and pages of its own, give the tokens of one (DiffKV Figure 7)."""

import pytest
from cache_helpers import ids_of
from tiny import save, tiny_qwen2

from diffkv_repro.core.precision import Precision
from diffkv_repro.diffkv import CompressionPolicy
from diffkv_repro.diffkv.layout import PageLayout
from diffkv_repro.engine import SamplingParams, Shards, Weights
from diffkv_repro.engine.launch import generate_sharded
from diffkv_repro.engine.measure.sharded import step_sharded
from diffkv_repro.models.shapes import ModelShape
from diffkv_repro.models.zoo import load_model

POLICY = CompressionPolicy.paper(alpha_high=1.5, alpha_low=0.5, window=5, group_max="each-step")


@pytest.mark.parametrize("cache", ["fp16", POLICY], ids=["fp16", "policy"])
def test_two_workers_give_the_tokens_of_one(cache, tmp_path):
    folder = str(save(tiny_qwen2(heads=4, kv_heads=2), tmp_path))
    prompts = [ids_of(length, seed=length)[0].tolist() for length in (9, 30, 1, 14)]
    options = {"cache": cache, "device": "cpu", "max_requests": 3, "max_tokens": 64}
    params = SamplingParams(max_tokens=12)
    (alone,) = generate_sharded(folder, prompts, params, workers=1, **options)
    two = generate_sharded(folder, prompts, params, workers=2, **options)
    for worker in two:
        assert [output.tokens for output in worker.outputs] == [output.tokens for output in alone.outputs]
        assert worker.heads == 1
        assert worker.page_bytes == alone.page_bytes
    assert [sum(own) for own in zip(*(worker.held for worker in two), strict=True)] == alone.held
    assert max(alone.held) > 0


def test_what_runs_short_of_pages_preempts_the_same_requests_everywhere(tmp_path):
    folder = str(save(tiny_qwen2(heads=4, kv_heads=2), tmp_path))
    prompts = [ids_of(length, seed=length)[0].tolist() for length in (9, 8, 10)]
    page = PageLayout.holding(Precision.parse("FP16"), 16, 32).page_bytes
    options = {"device": "cpu", "max_requests": 3, "max_tokens": 64, "pool_bytes": 14 * page}
    two = generate_sharded(folder, prompts, SamplingParams(max_tokens=40, ignore_eos=True), workers=2, **options)
    assert [output.preemptions > 0 for output in two[0].outputs] == [False, True, False]
    for mine, other in zip(*(worker.outputs for worker in two), strict=True):
        assert (mine.tokens, mine.preemptions) == (other.tokens, other.preemptions)
        assert len(mine.tokens) == 40


def test_a_step_of_random_weights_is_timed_in_every_worker():
    shape = ModelShape("tiny", "", layers=2, hidden=32, intermediate=48, heads=4, kv_heads=2, head_dim=16, vocab=50)
    own = {"workers": 2, "batch": 2, "length": 40, "repeats": 2, "device": "cpu"}
    found = step_sharded(shape, POLICY, replay=[0.3, 0.6], **own)
    assert [timing["rank"] for timing in found] == [0, 1]
    assert all(0 < timing["management"] < timing["total"] for timing in found)


def test_heads_that_cannot_be_split_are_refused(tmp_path):
    loaded = load_model(str(save(tiny_qwen2(heads=6, kv_heads=3), tmp_path)), device="cpu")
    with pytest.raises(ValueError, match="3 KV heads cannot be split over 2 workers"):
        Weights.of_model(loaded, max_positions=8, shards=Shards(0, 2, object(), object()))
    with pytest.raises(ValueError, match="rank is 2; it must be from 0 to 1"):
        Shards(2, 2)
    with pytest.raises(ValueError, match="2 workers need process groups"):
        Shards(0, 2)
