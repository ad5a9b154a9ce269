"""INT4: scales for every token and head, which is DiffKV's K4V4."""

import numpy as np
import pytest
import torch
from cache_helpers import naive_codec, naive_output, naive_weights
from quantiser_checks import (
    CLOSE,
    call_of,
    check_generates,
    check_padding,
    check_runs,
    check_select,
    check_storages,
    constant_call,
    go_on,
    place,
    rows_at,
    start,
)

from diffkv_repro.baselines import baseline
from diffkv_repro.baselines.int4 import Int4
from diffkv_repro.cache import Uniform


def quantised(call, bits, groups):
    """The call with every key and value as it comes back, by plain numpy."""
    key, value = (
        torch.from_numpy(np.apply_along_axis(naive_codec, -1, tensor.numpy(), bits, groups))
        for tensor in (call.key, call.value)
    )
    return call.__class__(call.layer, call.query, key, value, call.scale, call.window, call.softcap)


@pytest.mark.parametrize("storage", ["simulated", "packed"])
@pytest.mark.parametrize(("bits", "group", "groups"), [(4, None, 1), (4, 128, 1), (8, 8, 2), (2, 4, 4)])
def test_attention_is_that_over_plainly_quantised_vectors(storage, bits, group, groups):
    call = call_of(12)
    layer = start(Int4(bits=bits, group=group), storage, call, 7)
    output = go_on(layer, call, 7, [1] * 5)
    twin = quantised(call, bits, groups)
    expected = naive_output(twin, naive_weights(twin))
    assert torch.allclose(output.double(), torch.from_numpy(expected[:, :, 7:]), **CLOSE)


def test_it_is_the_uniform_k4v4_of_the_official_evaluation():
    call = call_of(20)
    int4, uniform = (start(method, "simulated", call, 12) for method in (Int4(), Uniform("K4V4")))
    assert torch.equal(go_on(int4, call, 12, [8]), go_on(uniform, call, 12, [8]))
    assert int4.kv_bytes(rows_at(call, 20)).nominal_ratio == 0.25


def test_bytes_by_hand():
    call = call_of(9)
    layer = start(Int4(group=8), "packed", call, 9)
    count = layer.kv_bytes(rows_at(call, 9))
    assert count.payload == 2 * 9 * (16 + 16) * 4 // 8
    assert count.scales == 2 * 9 * (2 + 2) * 4
    assert count.window == 0


@pytest.mark.parametrize(("prompt", "padding"), [(1, None), (13, None), (13, (0, 4, 12))])
def test_storages_agree(prompt, padding):
    check_storages(Int4(), prompt, 5, padding, batch=len(padding or [0]))
    check_storages(Int4(group=8), prompt, 5, padding, batch=len(padding or [0]), dtype=torch.bfloat16)


def test_runs_padding_and_beams():
    check_runs(Int4(), 6, [1, 5, 3])
    check_padding(Int4(), 9, 4, (0, 3, 8))
    check_select(Int4(), 9, 4)
    check_generates(Int4(), num_beams=2)


def test_constant_rows_come_back_exactly():
    call = constant_call(8, value=0.375)
    output = go_on(start(Int4(), "packed", call, 6), call, 6, [2])
    assert torch.allclose(output, torch.full_like(output, -0.375), atol=1e-6)


@pytest.mark.parametrize(
    ("given", "message"),
    [({"bits": 3}, "bits is 3; allowed are 2, 4, 8"), ({"group": 0}, "group is 0"), ({"group": 2.5}, "group is 2.5")],
)
def test_settings_that_make_no_sense(given, message):
    with pytest.raises(ValueError, match=message):
        Int4(**given)


def test_a_group_has_to_divide_the_head():
    with pytest.raises(ValueError, match="group is 12; it must divide the model's head_dim of 16"):
        Int4(group=12).check(place().layout)
    Int4(group=128).check(place().layout)


def test_label():
    assert baseline("int4")().label == "INT4"
    assert Int4(bits=8, group=32).label == "INT8, groups of 32"
