"""What the memory manager refuses, before anything is written."""

import re

import pytest
import torch
from memory_helpers import assert_same, assert_sound, everything, make

from diffkv_repro.core.precision import Precision
from diffkv_repro.diffkv.layout import PageLayout
from diffkv_repro.diffkv.memory import OutOfPages, PagedMemory


def plan(memory, *heads):
    """Lengths of one request, head by head."""
    return torch.tensor(heads, dtype=torch.int32).view(1, *memory.lengths.shape[1:])


def test_refusal_names_the_numbers_and_changes_nothing():
    memory = make(2, pages=100, watermark=0.05)
    memory.admit([1], [16])  # 4 heads x 9 pages
    before = everything(memory)
    assert not memory.can_admit([16, 11])
    with pytest.raises(OutOfPages, match="64 pages are needed and 64 are free, of which 5 are kept back") as refusal:
        memory.admit([0, 2], [16, 11])
    assert (refusal.value.needed, refusal.value.free, refusal.value.watermark) == (64, 64, 5)
    assert_same(before[0], everything(memory)[0])
    assert memory._prompts == {1: 16}
    assert memory.can_admit([16, 7])
    assert not memory.can_admit([1, 1, 1])  # slots


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.admit([3], [4]), "slot 3 does not exist; slots are 0 to 2"),
        (lambda m: m.admit([-1], [4]), "slot -1 does not exist"),
        (lambda m: m.admit([0], [0]), "tokens is 0; allowed are whole numbers from 1 to 16"),
        (lambda m: m.admit([0], [-5]), "tokens is -5; allowed"),
        (lambda m: m.admit([0], [17]), "tokens is 17; allowed are whole numbers from 1 to 16"),
        (lambda m: m.admit([0], [2.5]), "tokens hold 2.5; they must be whole numbers"),
        (lambda m: m.admit([True], [2]), "slots hold True; they must be whole numbers"),
        (lambda m: m.admit([0, 0], [4, 4]), "slot 0 is named twice"),
        (lambda m: m.admit([1], [4]), "slot 1 holds a request; it must be released before"),
        (lambda m: m.admit([0], [4, 4]), "1 slots and 2 prompt lengths"),
        (lambda m: m.admit(torch.tensor([True, False, True]), [4, 4]), "slots are torch.bool"),
        (lambda m: m.can_admit([17]), "tokens is 17; allowed"),
        (lambda m: m.release([0]), r"slot 0 holds no request; those in use are \[1, 2\]"),
        (lambda m: m.release([1, 1]), "slot 1 is named twice"),
        (lambda m: m.compact([0], m.lengths[:1]), "slot 0 holds no request"),
        (lambda m: m.compact([2], m.lengths[:1]), "slot 2 is compacted already"),
        (lambda m: m.compact([1], m.lengths[:2]), r"must be int32 \[1, 2, 2, 2\]"),
        (lambda m: m.compact([1], m.lengths[:1].long()), "lengths are torch.int64"),
        (lambda m: m.compact([1], plan(m, (1, 1), (1, 1), (-2, 1), (1, 1))), r"head 0 has lengths \[-2, 1\]"),
        (lambda m: m.compact([1], plan(m, (1, 1), (4, 3), (2, 1), (1, 1))), "head 1 has 7 tokens in its tiers; .* 6"),
        (lambda m: m.compact([1], plan(m, *[(2**31 - 1, 2**31 - 1)] * 4)), "4294967294 tokens in its tiers"),
        (lambda m: m.reserve_step(torch.ones(3)), r"active is torch.float32 \[3\]; it must be bool"),
        (lambda m: m.reserve_step(torch.ones(4, dtype=torch.bool)), r"active is torch.bool \[4\]"),
        (lambda m: m.can_step(-1), "n_steps is -1; allowed"),
        (lambda m: m.count_steps(1.5), "n_steps is 1.5; allowed"),
        (lambda m: m.kv_bytes([0]), "slot 0 holds no request"),
        (lambda m: m.kv_bytes([1], tokens=[1, 2]), "1 slots and 2 sequence lengths"),
    ],
)  # fmt: skip
def test_hostile_calls_are_refused_and_change_nothing(call, message):
    memory = make(2, pages=100)
    memory.admit([1, 2], [6, 3])
    memory.compact([2], plan(memory, *[(1, 1)] * 4))
    before = everything(memory)
    with pytest.raises(ValueError, match=message):
        call(memory)
    assert_same(before[0], everything(memory)[0])
    assert before[1] == everything(memory)[1]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"pages": 0}, "pages is 0; allowed are whole numbers from 1"),
        ({"layers": -1}, "layers is -1"),
        ({"kv_heads": 1.0}, "kv_heads is 1.0"),
        ({"max_requests": 0}, "max_requests is 0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"watermark": 1.0}, "watermark is 1.0; it is a share of the pages"),
        ({"watermark": -0.1}, "watermark is -0.1"),
        ({"spare": 2}, "spare is 2; allowed are whole numbers from 0 to 1"),
        ({"kernels": "cuda"}, "kernels is 'cuda'; allowed are auto, triton and torch"),
        ({"layers": 2**15, "kv_heads": 2**15, "max_requests": 4}, "exceed int32"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        make(2, **sizes)


def test_layouts_must_be_alike_and_at_least_one():
    with pytest.raises(ValueError, match="at least one tier"):
        PagedMemory([], pages=1, layers=1, kv_heads=1, max_requests=1, max_tokens=1)
    layouts = [PageLayout(Precision.parse("K8V4"), 32, size) for size in (256, 384)]
    with pytest.raises(ValueError, match=re.escape("of [(32, 256), (32, 384)]; pages of one pool are all alike")):
        PagedMemory(layouts, pages=1, layers=1, kv_heads=1, max_requests=1, max_tokens=1)


def test_lengths_that_were_not_validated_are_refused_on_the_device():
    for lengths in ((-1, 0), (2**31 - 1, 0), (6, 12), (2**31 - 1, 2**31 - 1)):
        memory = make(2, pages=100)
        memory.admit([1], [6])
        before = everything(memory)[0]
        memory.compact([1], plan(memory, (1, 1), lengths, (6, 0), (0, 0)), validate=False)
        after = everything(memory)[0]
        assert int(before.pop("status")) == 0
        assert int(after.pop("status")) == 4
        assert_same(before, after)
        with pytest.raises(RuntimeError, match="lengths did not fit the pages of their prompt"):
            memory.synchronize_counts()
        memory.release([1])
        assert_sound(memory)


def test_slots_that_hold_no_compacted_request_take_nothing_in_a_step():
    memory = make(2)
    memory.admit([1], [4])
    before = everything(memory)[0]
    memory.reserve_step(torch.ones(3, dtype=torch.int8))
    assert_same(before, everything(memory)[0])
