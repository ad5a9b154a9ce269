"""What callers do wrong, or at an odd moment: nobody waits forever, nothing leaks, and no one else pays for it."""

import asyncio
import random
from itertools import pairwise

import pytest
import torch
from cache_helpers import ids_of
from tiny import save, tiny_llama

from diffkv_repro.engine import LLM, AsyncLLM, SamplingParams, Weights, bench
from diffkv_repro.engine.request import Request, RequestOutput
from diffkv_repro.engine.runner import _drawn
from diffkv_repro.models.zoo import load_model

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load_model(str(save(tiny_llama(heads=4, kv_heads=2), tmp_path_factory.mktemp("tiny"))), device="cpu")


@pytest.fixture
def llm(loaded):
    return LLM(loaded, max_requests=2, max_tokens=64)


def prompt(length):
    return ids_of(length, seed=length)[0].tolist()


def assert_empty(llm):
    assert llm.scheduler.idle
    assert sorted(llm.scheduler._slots) == list(range(2))
    assert llm.cache.memory.synchronize_counts() == len(llm.cache.memory.free)


def within(seconds, work):
    async def timed():
        return await asyncio.wait_for(work, seconds)

    return asyncio.run(timed())


@pytest.mark.parametrize("given", [[10**9], [-1], [3, 2.5], ["a"], None, 7, [None]])
def test_a_prompt_of_no_tokens_of_the_model_is_refused_and_others_go_on(llm, given):
    with pytest.raises(ValueError, match="prompt"):
        llm.add(given, PARAMS)
    assert len(llm.generate([prompt(5)], PARAMS)[0].tokens) == 8
    assert_empty(llm)


def test_token_ids_may_be_of_any_whole_number_type(llm):
    ids = prompt(5)
    answers = [
        llm.generate([own], PARAMS)[0].tokens for own in (ids, torch.tensor(ids), tuple(torch.tensor(ids).numpy()))
    ]
    assert answers[0] == answers[1] == answers[2]


def test_of_prompts_with_a_bad_one_none_stays_behind(llm):
    with pytest.raises(ValueError, match="engine was made for 64"):
        llm.generate([prompt(5), [1] * 100], PARAMS)
    assert_empty(llm)


def test_two_streams_get_their_own_answers(loaded, llm):
    first = llm.stream([prompt(5)], PARAMS)
    seen = [next(first)]
    second = list(llm.stream([prompt(9)], PARAMS))
    for output in first:
        seen.append(output)
        assert len(seen) <= 8, "a stream goes on after its answer"
    expected = LLM(loaded, max_requests=2, max_tokens=64).generate([prompt(5), prompt(9)], PARAMS)
    assert [len(output.tokens) for output in seen] == list(range(1, 9))
    assert [seen[-1].tokens, second[-1].tokens] == [output.tokens for output in expected]
    assert_empty(llm)


def test_a_stream_whose_request_is_cancelled_ends(llm):
    seen = []
    for output in llm.stream([prompt(5)], PARAMS):
        seen.append(output)
        assert len(seen) <= 4, "a stream goes on after its request was cancelled"
        if len(seen) == 2:
            llm.cancel(output.number)
    assert seen[-1].finish_reason == "cancelled"
    assert_empty(llm)


def test_stop_strings_need_a_tokenizer(loaded):
    llm = LLM(Weights.of_model(loaded, max_positions=64), max_requests=2, max_tokens=64)
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        llm.add(prompt(5), SamplingParams(stop="."))


@pytest.mark.parametrize(("options", "message"), [
    ({"max_tokens": 2.5}, "max_tokens is 2.5"), ({"max_tokens": True}, "max_tokens is True"),
    ({"seed": "x"}, "seed is 'x'"), ({"temperature": float("nan")}, "temperature is nan"),
])  # fmt: skip
def test_bad_sampling_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-45, 1e-320])
def test_the_colder_the_surer(temperature):
    logits = torch.tensor([3.0, 7.0, 8.0, -2.0, 7.9])
    request = Request([1, 2], SamplingParams(temperature=temperature), 2)
    assert int(_drawn(logits, request)) == 2
    assert int(_drawn(-logits, request)) == 3


def test_an_answer_without_a_token_has_no_latency():
    output = RequestOutput.of(Request([1], PARAMS, 1))
    assert output.latency_per_token == float("inf")


def test_a_failure_while_prompts_enter_leaks_nothing(llm):
    numbers = [llm.add(prompt(length), PARAMS) for length in (5, 6)]
    admits, calls = llm.cache.can_admit, []

    def fails_once(tokens, running):
        calls.append(tokens)
        if len(calls) == 2:
            raise RuntimeError("an operation on the device was left undone")
        return admits(tokens, running)

    llm.cache.can_admit = fails_once
    with pytest.raises(RuntimeError, match="left undone"):
        llm.step()
    llm.cancel(*numbers)
    assert_empty(llm)


async def collected(engine, given):
    return [output async for output in engine.generate(given, PARAMS)]


def test_a_prompt_that_is_none_does_not_stop_the_engine(llm):
    async def asked():
        async with AsyncLLM(llm) as engine:
            bad, good = await asyncio.gather(
                collected(engine, None), collected(engine, prompt(5)), return_exceptions=True
            )
        return bad, good

    bad, good = within(30, asked())
    assert isinstance(bad, ValueError)
    assert len(good) == 8
    assert_empty(llm)


def test_whoever_waits_when_the_engine_closes_is_told(llm):
    forever = SamplingParams(max_tokens=50, ignore_eos=True)

    async def asked():
        engine = AsyncLLM(llm)
        async with engine:
            answer = engine.generate(prompt(5), forever)
            await answer.__anext__()
            waiting = asyncio.create_task(_rest(answer))
            await asyncio.sleep(0)
        return await asyncio.gather(waiting, return_exceptions=True)

    (found,) = within(30, asked())
    assert isinstance(found, RuntimeError)
    assert "closed" in str(found)
    assert_empty(llm)


async def _rest(answer):
    return [output async for output in answer]


def test_who_asks_a_closed_engine_is_told(llm):
    async def asked():
        engine = AsyncLLM(llm)
        with pytest.raises(RuntimeError, match="not open"):
            await collected(engine, prompt(5))
        async with engine:
            pass
        with pytest.raises(RuntimeError, match="not open"):
            await collected(engine, prompt(5))
        async with engine:
            assert len(await collected(engine, prompt(5))) == 8
            with pytest.raises(RuntimeError, match="open already"):
                await engine.__aenter__()

    within(30, asked())


def test_an_engine_that_cannot_even_cancel_tells_who_waits(llm):
    def broken(*_):
        raise MemoryError("no more")

    async def asked():
        async with AsyncLLM(llm) as engine:
            llm.runner.run = llm.cancel = broken
            with pytest.raises(MemoryError):
                await collected(engine, prompt(5))
            with pytest.raises((RuntimeError, MemoryError)):  # closed by then, or about to be
                await collected(engine, prompt(5))

    within(30, asked())


def test_latency_counts_from_the_arrival_and_not_from_the_step_after_it(llm):
    entered = []
    add = llm.add

    def noted(*given, **options):
        number = add(*given, **options)
        entered.append(llm.scheduler.waiting[-1].arrival)
        return number

    llm.add = noted
    bench.serve_poisson(llm, rate=200.0, requests=6, lengths=lambda draw: (draw.randrange(1, 9), 3), limit=60, seed=5)
    draw, gaps = random.Random(5), []
    for _ in range(6):
        gaps.append(draw.expovariate(200.0))
        draw.randrange(1, 9)
    found = [later - earlier for earlier, later in pairwise(entered)]
    assert found == pytest.approx(gaps[1:], abs=1e-6)


def test_preemptions_of_unfinished_requests_count(loaded):
    page = LLM(loaded, max_requests=4, max_tokens=64).cache.layouts[0].page_bytes
    tight = LLM(loaded, max_requests=4, max_tokens=64, pool_bytes=page * 6 * 6)
    seen = []
    preempt = tight.scheduler._preempt
    tight.scheduler._preempt = lambda request: (seen.append(request.number), preempt(request))
    found = bench.steady_state(tight, prompt=8, generated=40, steps=30, seed=3)
    assert 0 < found.preemptions <= len(seen)
