"""The scheduler's half of the vLLM connector: blocks that come in parts, preemption, and frames that were lost."""

from types import SimpleNamespace

import pytest
import torch

from diffkv_repro.kvserve.frame_store import FolderStore
from diffkv_repro.kvserve.layout import KVLayout
from diffkv_repro.kvserve.vllm_plans import Plans, Report, Saved
from diffkv_repro.kvserve.vllm_settings import ConnectorSettings

PROMPT = list(range(100))


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def plans(tmp_path):
    clock = Clock()
    settings = ConnectorSettings(str(tmp_path), min_tokens=16)
    made = Plans(
        settings, KVLayout(2, 2, 8, torch.float16), FolderStore(tmp_path), 16, saves=True, loads=True, clock=clock
    )
    made.clock = clock
    return made


def request_of(name="r", tokens=PROMPT, extra=0):
    return SimpleNamespace(
        request_id=name, prompt_token_ids=tokens, num_tokens=len(tokens or ()) + extra, lora_request=None,
        mm_features=[], cache_salt=None, prompt_embeds=None,
    )  # fmt: skip


def output(new=(), cached=(), resumed=(), scheduled=None):
    """``new``: (name, blocks, computed); ``cached``: (name, new blocks or None, computed)."""
    news = [SimpleNamespace(req_id=a, block_ids=(b,), num_computed_tokens=c) for a, b, c in new]
    old = SimpleNamespace(
        req_ids=[name for name, *_ in cached],
        resumed_req_ids=set(resumed),
        new_block_ids=[None if blocks is None else (blocks,) for _, blocks, _ in cached],
        num_computed_tokens=[computed for *_, computed in cached],
    )
    return SimpleNamespace(scheduled_new_reqs=news, scheduled_cached_reqs=old, num_scheduled_tokens=scheduled or {})


def start(plans, request, blocks, chunk, computed=0):
    external = plans.match(request, computed)
    plans.allocated(request, blocks, external)
    name = request.request_id
    return plans.step(output(new=[(name, blocks, computed + external)], scheduled={name: chunk}))


def test_a_prompt_in_chunks_is_saved_when_it_is_whole_with_the_blocks_that_came_meanwhile(plans):
    request = request_of()
    assert start(plans, request, [4, 9], 32) == ((), (), (4, 9))
    assert plans.step(output(cached=[("r", [7], 32)], scheduled={"r": 16})) == ((), (), (7,))
    assert plans.step(output(cached=[("r", None, 48)], scheduled={"r": 0})) == ((), (), ())
    loads, (save,), fresh = plans.step(output(cached=[("r", [1, 2, 3, 5], 48)], scheduled={"r": 52}))
    assert fresh == (1, 2, 3, 5)
    assert loads == ()
    assert (save.key.tokens, save.blocks, save.profile) == (96, (4, 9, 7, 1, 2, 3, 5), "")
    assert plans.step(output(cached=[("r", [8], 100)], scheduled={"r": 1}))[:2] == ((), ()), "once is enough"


def test_a_prompt_is_saved_once_its_whole_grains_are_there(plans):
    start(plans, request_of(), [1] * 7, 95)
    _, saves, _ = plans.step(output(cached=[("r", None, 95)], scheduled={"r": 1}))
    assert [save.key.tokens for save in saves] == [96]


def test_a_request_that_was_preempted_has_other_blocks(plans):
    start(plans, request_of(), [4, 9], 32)
    resumed = output(cached=[("r", [11, 12, 13, 14, 15, 16, 17], 0)], resumed=["r"], scheduled={"r": 100})
    _, (save,), fresh = plans.step(resumed)
    assert save.blocks == fresh == (11, 12, 13, 14, 15, 16, 17)


def test_a_request_that_was_preempted_after_some_answer_loads_its_prompt_whole(plans):
    request = request_of(tokens=PROMPT[:96], extra=5)
    plans.store.put(plans._known(request).keys[0].name, [b"x"])
    assert plans.match(request, 0) == 96
    assert plans.match(request_of("s", PROMPT[:96]), 0) == 95


def test_a_load_covers_what_the_scheduler_took_of_it(plans):
    request = request_of()
    plans.store.put(plans._known(request).keys[1].name, [b"x"])
    assert plans.match(request, 16) == 64
    plans.allocated(request, [5, 6, 7, 8, 9, 10, 11], 48)
    (load,), _, fresh = plans.step(output(new=[("r", [5, 6, 7, 8, 9, 10, 11], 64)], scheduled={"r": 36}))
    assert fresh == (6, 7, 8, 9, 10, 11), "the first was in the engine's own cache"
    assert (load.start, load.stop, load.key.tokens, load.blocks) == (16, 64, 80, (5, 6, 7, 8, 9, 10, 11))
    assert plans.step(output(cached=[("r", None, 100)], scheduled={"r": 1}))[0] == (), "loaded once"


def test_a_match_that_was_not_taken_loads_nothing(plans):
    request = request_of()
    plans.store.put(plans._known(request).keys[0].name, [b"x"])
    assert plans.match(request, 0) == 96
    plans.allocated(request, [1] * 7, 0)
    loads, saves, _ = plans.step(output(new=[("r", [1] * 7, 0)], scheduled={"r": 100}))
    assert (loads, saves) == ((), ()), "and what is stored is not stored again"


def test_a_lost_frame_is_left_alone_for_a_while_and_a_shorter_one_is_taken(plans):
    request = request_of()
    long, short = plans._known(request).keys[:2]
    for key in (long, short):
        plans.store.put(key.name, [b"x"])
    plans.report(Report(lost=(long.name,)))
    assert plans.match(request, 0) == short.tokens
    plans.report(Report(saved=(Saved(long.name, 0.1, 0.1, 1),)))
    assert plans.match(request, 0) == long.tokens
    plans.report(Report(lost=(long.name,)))
    plans.clock.now += 61
    assert plans.match(request, 0) == long.tokens


def test_nothing_is_kept_of_requests_that_are_done_or_unknown(plans):
    start(plans, request_of(), [4, 9], 32)
    plans.finished("r")
    plans.finished("never seen")
    assert not plans._requests
    assert plans.step(output(cached=[("r", [1], 32)], scheduled={"r": 68}))[:2] == ((), ())
    assert plans.match(request_of("e", None), 0) == 0
    assert plans.match(request_of("e", []), 0) == 0
