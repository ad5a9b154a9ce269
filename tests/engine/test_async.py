import asyncio

import pytest
from cache_helpers import ids_of
from tiny import save, tiny_llama

from diffkv_repro.engine import LLM, AsyncLLM, SamplingParams
from diffkv_repro.models.zoo import load_model

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load_model(str(save(tiny_llama(heads=4, kv_heads=2), tmp_path_factory.mktemp("tiny"))), device="cpu")


def llm_of(loaded):
    return LLM(loaded, max_requests=2, max_tokens=64)


def prompt(length):
    return ids_of(length, seed=length)[0].tolist()


async def collected(engine, given, most=None):
    seen = []
    answer = engine.generate(given, PARAMS)
    async for output in answer:
        seen.append(output)
        if len(seen) == most:
            await answer.aclose()
            break
    return seen


def test_answers_stream_while_others_ask_and_are_those_of_generate(loaded):
    prompts = [prompt(length) for length in (5, 9, 3)]

    async def asked():
        async with AsyncLLM(llm_of(loaded)) as engine:
            return await asyncio.gather(*(collected(engine, given) for given in prompts))

    answers = asyncio.run(asked())
    expected = llm_of(loaded).generate(prompts, PARAMS)
    for seen, right in zip(answers, expected, strict=True):
        assert [len(output.tokens) for output in seen] == list(range(1, 9))
        assert seen[-1].tokens == right.tokens
        assert seen[-1].finish_reason == "length"


def test_who_leaves_early_frees_the_pages(loaded):
    llm = llm_of(loaded)

    async def asked():
        async with AsyncLLM(llm) as engine:
            left = await collected(engine, prompt(5), most=2)
            stayed = await collected(engine, prompt(9))
            return left, stayed

    left, stayed = asyncio.run(asked())
    assert len(left) == 2
    assert stayed[-1].finish_reason == "length"
    assert llm.scheduler.idle
    assert llm.cache.memory.synchronize_counts() == len(llm.cache.memory.free)


def test_errors_reach_who_asked(loaded):
    llm = llm_of(loaded)

    async def refused():
        async with AsyncLLM(llm) as engine:
            await collected(engine, [1] * 100)

    with pytest.raises(ValueError, match="the engine was made for 64"):
        asyncio.run(refused())

    async def broken():
        async with AsyncLLM(llm) as engine:
            llm.runner.run = lambda batch: 1 / 0
            await collected(engine, [1] * 5)

    with pytest.raises(ZeroDivisionError):
        asyncio.run(broken())
    assert llm.scheduler.idle
    assert llm.cache.memory.synchronize_counts() == len(llm.cache.memory.free)
