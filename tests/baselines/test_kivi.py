"""KIVI: when tokens leave the residual, and what is left of them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cache_helpers import naive_quantise
from quantiser_checks import (
    CLOSE,
    call_of,
    check_generates,
    check_padding,
    check_runs,
    check_select,
    check_storages,
    constant_call,
    cut,
    go_on,
    place,
    rows_at,
    start,
)

from diffkv_repro.baselines import baseline
from diffkv_repro.baselines.kivi import Kivi

SMALL = Kivi(bits=2, group=4, residual=8)


def naive_step(call, at, bits, group, residual):
    """Output of the query in column ``at`` over what KIVI holds then, in numpy, head by head."""
    query, key, value = (t[0, :, : at + 1].numpy().astype(np.float32) for t in (call.query, call.key, call.value))
    key, value = (t.astype(np.float16).astype(np.float32) for t in (key, value))
    output = np.zeros((query.shape[0], query.shape[2]))
    for head in range(query.shape[0]):
        keys, values = key[head // 3].copy(), value[head // 3].copy()
        # The query's own token is not in yet when the residual is counted.
        for first in range(0, at - at % residual, group):
            for channel in range(keys.shape[1]):
                keys[first : first + group, channel] = naive_quantise(keys[first : first + group, channel], 2**bits)[3]
        for token in range(max(0, at - residual)):
            for first in range(0, values.shape[1], group):
                values[token, first : first + group] = naive_quantise(values[token, first : first + group], 2**bits)[3]
        logits = keys.astype(np.float64) @ query[head, at] * call.scale
        weights = np.exp(logits - logits.max())
        output[head] = weights / weights.sum() @ values
    return torch.from_numpy(output)


@pytest.mark.parametrize("storage", ["simulated", "packed"])
@pytest.mark.parametrize("prompt", [1, 7, 8, 9, 21])
def test_every_step_meets_what_the_scheme_says(storage, prompt):
    call = call_of(prompt + 19)
    layer = start(SMALL, storage, call, prompt)
    output = go_on(layer, call, prompt, [1] * 19)[0]
    for step in range(19):
        expected = naive_step(call, prompt + step, 2, 4, 8)
        assert torch.allclose(output[:, step].double(), expected, **CLOSE)


def test_a_token_count_by_hand():
    # 21 tokens, residual 8: 16 keys and 13 values quantised; a step later still 16 keys, but 14 values.
    call = call_of(23)
    layer = start(SMALL, "packed", call, 21)
    rows = rows_at(call, 21)
    assert layer.tier_counts(rows) == {"K2V2": [13, 13], "K2V16": [3, 3], "K16V16": [5, 5]}
    count = layer.kv_bytes(rows)
    assert count.payload == 2 * (16 + 13) * 16 * 2 // 8
    assert count.window == 2 * (5 + 8) * 16 * 2
    assert count.scales == 2 * (16 // 4 * 16 + 13 * 4) * 4
    assert count.full == 2 * 21 * 16 * 4
    assert (count.tables, count.scores, count.positions, count.padding) == (0, 0, 0, 0)
    go_on(layer, call, 21, [1])
    assert layer.tier_counts(rows_at(call, 22)) == {"K2V2": [14, 14], "K2V16": [2, 2], "K16V16": [6, 6]}


def test_the_residual_is_emptied_when_it_is_full():
    call = call_of(25)
    layer = start(SMALL, "packed", call, 23)
    assert layer.tier_counts(rows_at(call, 23))["K16V16"] == [7, 7]
    go_on(layer, call, 23, [1])
    assert layer.tier_counts(rows_at(call, 24)) == {"K2V2": [16, 16], "K2V16": [8, 8], "K16V16": [0, 0]}


@pytest.mark.parametrize(("prompt", "padding"), [(1, None), (5, None), (16, None), (19, (0, 3, 11)), (19, (8, 0))])
@pytest.mark.parametrize("method", [SMALL, Kivi(bits=4, group=8, residual=8)])
def test_storages_agree(method, prompt, padding):
    check_storages(method, prompt, 18, padding, batch=len(padding or [0]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_storages_agree_in_half_precision(dtype):
    check_storages(SMALL, 13, 9, dtype=dtype)


def test_a_head_that_groups_do_not_divide():
    check_storages(Kivi(bits=2, group=12, residual=12), 14, 14, head_dim=20)


@pytest.mark.parametrize(("prompt", "sizes"), [(3, [30]), (16, [1, 17, 12]), (20, [5, 3, 9])])
@pytest.mark.parametrize("storage", ["simulated", "packed"])
def test_many_tokens_at_once(prompt, sizes, storage):
    check_runs(SMALL, prompt, sizes, storage=storage)
    check_runs(SMALL, prompt + 2, sizes, padding=(2, 0), batch=2, storage=storage)


@pytest.mark.parametrize("storage", ["simulated", "packed"])
def test_padding_changes_nothing(storage):
    check_padding(SMALL, 19, 14, (0, 3, 18), storage)


@pytest.mark.parametrize("storage", ["simulated", "packed"])
def test_beams(storage):
    check_select(SMALL, 19, 10, storage=storage)
    check_generates(SMALL, num_beams=3)
    check_generates(SMALL)


def test_short_prompts_stay_as_they_are():
    call = call_of(40)
    plain, kivi = (start(baseline("kivi")(residual=size, group=4), "simulated", call, 20) for size in (64, 32))
    outputs = [go_on(layer, call, 20, [1] * 11) for layer in (plain, kivi)]
    assert torch.equal(*outputs)
    assert kivi.kv_bytes(rows_at(call, 31)).nominal_ratio == 1


def test_constant_rows_come_back_exactly():
    call = constant_call(30)
    layer = start(SMALL, "packed", call, 20)
    output = go_on(layer, call, 20, [1] * 10)
    assert torch.allclose(output, torch.tensor(-3.7).half().float().expand_as(output), atol=1e-3)


def test_a_prompt_of_another_method_is_left_alone():
    call = call_of(24, dtype=torch.float16)
    before = call.key.clone(), call.value.clone()
    start(SMALL, "simulated", call, 24, where=place(torch.float16))
    assert torch.equal(call.key, before[0])
    assert torch.equal(call.value, before[1])


def test_values_that_fp16_cannot_hold_are_refused():
    call = call_of(10)
    with pytest.raises(ValueError, match="10000"):
        start(SMALL, "simulated", replace(call, key=call.key + 1e6), 9)
    layer = start(SMALL, "simulated", call, 9)
    with pytest.raises(ValueError, match="10000"):
        layer.decode(cut(replace(call, value=call.value * 0 + 1e6), 9, 10), rows_at(call, 10))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bits": 3}, "bits is 3; allowed are 2, 4"),
        ({"group": 0}, "group is 0"),
        ({"residual": 100}, "residual is 100; allowed are multiples of the group of 32 tokens"),
        ({"residual": 0}, "residual is 0"),
    ],
)
def test_settings_that_make_no_sense(given, message):
    with pytest.raises(ValueError, match=message):
        Kivi(**given)
    with pytest.raises(ValueError, match="unknown storage 'disk'"):
        Kivi().layer(place(), "disk")


def test_published_settings_and_label():
    assert Kivi() == Kivi(bits=2, group=32, residual=128)
    assert Kivi().label == "KIVI 2-bit"
    assert Kivi(bits=4).label == "KIVI 4-bit"
