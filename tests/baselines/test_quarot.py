"""QuaRot: turned, clipped, quantised, and the same attention again when nothing is rounded."""

import numpy as np
import pytest
import torch
from cache_helpers import naive_output, naive_quantise, naive_weights
from quantiser_checks import (
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
from tiny import tiny_llama

from diffkv_repro.baselines import baseline
from diffkv_repro.baselines.int4 import Int4
from diffkv_repro.baselines.quarot import QuaRot
from diffkv_repro.core.hadamard import rotation


def turned_and_quantised(call, bits, clip, group, seed=None):
    """The call with every key and value turned, quantised with a clipped range, and turned back, in numpy."""
    turn = rotation(call.key.shape[-1], seed=seed).numpy()

    def one(vector):
        turned = (vector @ turn).astype(np.float32)
        parts = []
        for part in np.split(turned, len(turned) // group):
            low, high = part.min(), part.max()
            if low < 0 < high:
                part = np.clip(part, np.float32(low * np.float32(clip)), np.float32(high * np.float32(clip)))
            parts.append(naive_quantise(part, 2**bits)[3])
        return np.concatenate(parts) @ turn.T

    key, value = (torch.from_numpy(np.apply_along_axis(one, -1, t.numpy())) for t in (call.key, call.value))
    return call.__class__(call.layer, call.query, key, value, call.scale, call.window, call.softcap)


@pytest.mark.parametrize("storage", ["simulated", "packed"])
@pytest.mark.parametrize(
    ("method", "group"), [(QuaRot(), 16), (QuaRot(bits=8, clip=1.0, group=8), 8), (QuaRot(bits=2, seed=3), 16)]
)
def test_attention_is_that_over_plainly_turned_vectors(storage, method, group):
    call = call_of(12)
    output = go_on(start(method, storage, call, 7), call, 7, [1] * 5)
    twin = turned_and_quantised(call, method.bits, method.clip, group, method.seed)
    expected = naive_output(twin, naive_weights(twin))
    # A code that lies on the edge of two may fall either way, so a few outputs may differ by a step.
    wrong = (output.double() - torch.from_numpy(expected[:, :, 7:])).abs() > 1e-4
    assert wrong.float().mean() < 0.02


@pytest.mark.parametrize("head_dim", [12, 16, 20, 24, 40])
def test_eight_bits_unclipped_are_nearly_exact_at_any_head_dim(head_dim):
    call, where = call_of(14, head_dim=head_dim), place(head_dim=head_dim)
    layer = start(QuaRot(bits=8, clip=1.0), "simulated", call, 9, where=where)
    output = go_on(layer, call, 9, [1] * 5)
    expected = naive_output(call, naive_weights(call))[:, :, 9:]
    assert torch.allclose(output.double(), torch.from_numpy(expected), atol=0.05)


def test_an_outlier_channel_hurts_less_than_without_turning():
    call = call_of(40)
    key, value = call.key.clone(), call.value.clone()
    key[..., 5] += 30
    value[..., 9] -= 30
    call = call.__class__(0, call.query, key, value, call.scale, None, None)
    expected = torch.from_numpy(naive_output(call, naive_weights(call))[:, :, 30:])
    errors = []
    for method in (Int4(), QuaRot()):
        output = go_on(start(method, "simulated", call, 30), call, 30, [10]).double()
        errors.append(float((output - expected).pow(2).mean()))
    assert errors[1] < errors[0] / 2


def test_bytes_are_those_of_plain_four_bits():
    call = call_of(9)
    counts = [start(method, "packed", call, 9).kv_bytes(rows_at(call, 9)) for method in (QuaRot(), Int4())]
    assert counts[0] == counts[1]
    assert counts[0].nominal_ratio == 0.25


@pytest.mark.parametrize(("prompt", "padding"), [(1, None), (13, None), (13, (0, 4, 12))])
def test_storages_agree(prompt, padding):
    check_storages(QuaRot(), prompt, 5, padding, batch=len(padding or [0]))
    check_storages(QuaRot(group=8), prompt, 5, padding, batch=len(padding or [0]), dtype=torch.bfloat16)


def test_runs_padding_and_beams():
    check_runs(QuaRot(), 6, [1, 5, 3])
    check_padding(QuaRot(), 9, 4, (0, 3, 8))
    check_select(QuaRot(), 9, 4)
    check_generates(QuaRot(), num_beams=2)
    check_generates(QuaRot(), model=tiny_llama(heads=4, kv_heads=2, head_dim=12))


def test_constant_rows_survive():
    call = constant_call(8)
    output = go_on(start(QuaRot(), "packed", call, 6), call, 6, [2])
    # Turned, it is 15 zeros and one large value, all on one side of zero: not clipped, exact but for the scale.
    assert torch.allclose(output, torch.full_like(output, -3.7), atol=0.02)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bits": 5}, "bits is 5; allowed are 2, 4, 8"),
        ({"clip": 0}, "clip is 0"),
        ({"clip": 1.2}, "clip is 1.2"),
        ({"group": -1}, "group is -1"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_settings_that_make_no_sense(given, message):
    with pytest.raises(ValueError, match=message):
        QuaRot(**given)


def test_a_group_has_to_divide_the_head():
    with pytest.raises(ValueError, match="group is 12; it must divide the model's head_dim of 16"):
        QuaRot(group=12).check(place().layout)


def test_label():
    assert baseline("quarot")().label == "QuaRot 4-bit"
