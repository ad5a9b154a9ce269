"""The engine against transformers, and against itself with requests one by one."""

import dataclasses

import pytest
import torch
from cache_helpers import ids_of
from tiny import save, tiny_llama, tiny_qwen2

from diffkv_repro.core.precision import Precision
from diffkv_repro.diffkv import CompressionPolicy
from diffkv_repro.engine import LLM, SamplingParams, Weights
from diffkv_repro.models.hf import UnsupportedAttention
from diffkv_repro.models.zoo import load_model

POLICY = CompressionPolicy.paper(alpha_high=1.5, alpha_low=0.5, window=5, group_max="each-step")
RELEASED = CompressionPolicy.released(alpha_high=1.5, alpha_low=0.5, window=5)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Small random models, loaded as a user's would be."""
    made = {"llama": tiny_llama(heads=4, kv_heads=2), "qwen2": tiny_qwen2(heads=4, kv_heads=2)}
    folders = {name: save(model, tmp_path_factory.mktemp(name)) for name, model in made.items()}
    return {name: load_model(str(folder), device="cpu") for name, folder in folders.items()}


def prompts_of(*lengths):
    return [ids_of(length, seed=length)[0].tolist() for length in lengths]


def engine(model, cache="fp16", **options):
    return LLM(model, cache, **({"max_requests": 4, "max_tokens": 64} | options))


@pytest.mark.parametrize("cache", ["fp16", "fp16-per-query-head"])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_fp16_gives_the_tokens_of_transformers(models, name, cache):
    loaded, params = models[name], SamplingParams(max_tokens=12, ignore_eos=True)
    prompts = prompts_of(9, 1, 23)
    outputs = engine(loaded, cache).generate(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = loaded.model.generate(
            torch.tensor([prompt]), max_new_tokens=12, min_new_tokens=12, do_sample=False, pad_token_id=0
        )[0, len(prompt) :]
        assert list(output.tokens) == expected.tolist()
        assert output.finish_reason == "length"
        assert output.prompt_tokens == len(prompt)


@pytest.mark.parametrize(
    "cache", ["fp16", Precision(8, 4), POLICY, RELEASED, dataclasses.replace(POLICY, bias_free=True)], ids=str
)
def test_continuous_batching_gives_the_tokens_of_one_by_one(models, cache):
    loaded = models["qwen2"]
    prompts = prompts_of(9, 30, 1, 17, 6, 12)
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (12, 5, 9, 14, 3, 8)]
    llm = engine(loaded, cache)
    together = llm.generate(prompts, params)
    assert len(llm.cache.memory._prompts) == 0
    for prompt, given, output in zip(prompts, params, together, strict=True):
        alone = engine(loaded, cache, max_requests=1).generate([prompt], given)[0]
        assert output.tokens == alone.tokens
        assert len(output.tokens) == given.max_tokens


def test_pages_that_run_out_preempt_the_latest_and_lose_nothing(models):
    loaded, prompts = models["llama"], prompts_of(9, 8, 7, 10, 6)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    roomy = engine(loaded).generate(prompts, params)
    page = engine(loaded).cache.layouts[0].page_bytes
    tight = engine(loaded, pool_bytes=page * 6 * 6)
    outputs = tight.generate(prompts, params)
    assert sum(output.preemptions for output in outputs) > 0
    assert [output.tokens for output in outputs] == [output.tokens for output in roomy]
    assert tight.cache.memory.synchronize_counts() == len(tight.cache.memory.free)
    assert outputs[0].preemptions == 0, "first come, first served"


def test_a_seeded_draw_does_not_depend_on_the_batch(models):
    loaded, prompts = models["llama"], prompts_of(9, 8)
    hot = [SamplingParams(max_tokens=10, temperature=2.0, seed=seed, ignore_eos=True) for seed in (1, 2)]
    together = engine(loaded).generate(prompts, hot)
    alone = engine(loaded).generate(prompts[1:], hot[1:])
    assert together[1].tokens == alone[0].tokens
    other = engine(loaded).generate(prompts[:1], dataclasses.replace(hot[0], seed=5))
    assert other[0].tokens != together[0].tokens


def test_answers_end_where_they_should(models):
    loaded, prompt = models["llama"], prompts_of(9)[0]
    free = engine(loaded).generate([prompt], SamplingParams(max_tokens=20, ignore_eos=True))[0]
    words = free.text.split()
    assert len(words) == len(free.tokens)
    assert free.tokens == tuple(int(word[1:]) for word in words)
    stopped = engine(loaded).generate([prompt], SamplingParams(max_tokens=20, stop=words[4], ignore_eos=True))[0]
    first = words.index(words[4])
    assert stopped.finish_reason == "stop"
    assert stopped.text.split() == words[:first]
    llm = engine(loaded)
    llm._eos = frozenset([free.tokens[6]])
    ended = llm.generate([prompt], SamplingParams(max_tokens=20))[0]
    at = free.tokens.index(free.tokens[6])
    assert (ended.finish_reason, ended.tokens) == ("stop", free.tokens[: at + 1])
    assert ended.text.split() == words[:at]


def test_a_text_goes_through_the_tokenizer(models):
    llm = engine(models["llama"])
    said = llm.generate(["w3 w4 w5 w6"], SamplingParams(max_tokens=4, ignore_eos=True))[0]
    assert said == dataclasses.replace(
        llm.generate([[3, 4, 5, 6]], SamplingParams(max_tokens=4, ignore_eos=True))[0],
        number=said.number, arrival=said.arrival, token_times=said.token_times,
    )  # fmt: skip


def test_cancelled_requests_leave_and_others_go_on(models):
    llm = engine(models["llama"], max_requests=2)
    numbers = [llm.add(prompt, SamplingParams(max_tokens=9, ignore_eos=True)) for prompt in prompts_of(9, 8, 7)]
    llm.step()
    gone = llm.cancel(numbers[0], numbers[2], 10**9)
    assert [output.number for output in gone] == [numbers[2], numbers[0]]
    assert {output.finish_reason for output in gone} == {"cancelled"}
    assert llm.cancel(numbers[0]) == []
    seen = {}
    while not llm.scheduler.idle:
        seen |= {output.number: output for output in llm.step()}
    assert list(seen) == [numbers[1]]
    assert len(seen[numbers[1]].tokens) == 9
    assert llm.step() == []


def test_what_cannot_run_is_refused(models):
    loaded = models["llama"]
    llm = engine(loaded)
    with pytest.raises(ValueError, match="no tokens"):
        llm.add([])
    with pytest.raises(ValueError, match="60 tokens of a prompt and max_tokens 5 make 65; the engine was made for 64"):
        llm.add([1] * 60, SamplingParams(max_tokens=5))
    page = llm.cache.layouts[0].page_bytes
    with pytest.raises(ValueError, match="the pool has 7"):
        engine(loaded, pool_bytes=7 * page).add([1] * 40, SamplingParams(max_tokens=20))
    with pytest.raises(ValueError, match="a page takes"):
        engine(loaded, pool_bytes=10)
    with pytest.raises(ValueError, match="cache is 'int3'"):
        engine(loaded, "int3")
    with pytest.raises(ValueError, match="group_max"):
        engine(loaded, CompressionPolicy.paper())
    with pytest.raises(ValueError, match="max_tokens is 0"):
        SamplingParams(max_tokens=0)
    with pytest.raises(ValueError, match="temperature is -1"):
        SamplingParams(temperature=-1)
    with pytest.raises(ValueError, match="a stop string is empty"):
        SamplingParams(stop="")
    with pytest.raises(ValueError, match="2 prompts and 1 sampling parameters"):
        llm.generate([[1], [2]], [SamplingParams()])
    with pytest.raises(ValueError, match="CUDA graphs need a CUDA device"):
        engine(loaded, graphs=True)


def test_a_model_with_other_attention_is_refused(tmp_path):
    from tiny import tiny_gemma3

    loaded = load_model(str(save(tiny_gemma3(), tmp_path)), device="cpu")
    with pytest.raises(UnsupportedAttention, match="gemma3_text; the engine runs llama"):
        Weights.of_model(loaded, max_positions=32)


def test_bytes_of_running_requests_are_those_of_their_pages(models):
    llm = engine(models["llama"], POLICY)
    for prompt in prompts_of(40, 21):
        llm.add(prompt, SamplingParams(max_tokens=9, ignore_eos=True))
    for _ in range(4):
        llm.step()
    running = llm.scheduler.running
    found = llm.cache.kv_bytes([own.slot for own in running], [own.cached for own in running])
    memory = llm.cache.memory
    held = len(memory.free) - memory.synchronize_counts()
    assert found.total - found.tables == held * memory.layouts[0].page_bytes
