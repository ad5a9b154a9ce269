"""The managers on the host hand out the pages of the oracle and of the manager on the device."""

import numpy as np
import pytest
import torch
from memory_helpers import TIERS, make, oracle_of, random_plan

from diffkv_repro.core.precision import Precision
from diffkv_repro.diffkv.cpu_manager import PythonManager
from diffkv_repro.diffkv.layout import PageLayout
from diffkv_repro.diffkv.memory import OutOfPages

numba = pytest.importorskip("numba", reason="the compiled manager needs numba")


def manager(kind, tiers, **sizes):
    layouts = [PageLayout(Precision.parse(name), 32, 256) for name in TIERS[:tiers]]
    if kind == "python":
        return PythonManager(layouts, **sizes)
    from diffkv_repro.diffkv.cpu_manager_numba import NumbaManager

    return NumbaManager(layouts, chunks=3, **sizes)


def queue_of(host):
    if isinstance(host, PythonManager):
        return list(host.queue)
    return host.free[(host.head + np.arange(host.free_pages)) % host.pages].tolist()


@pytest.mark.parametrize("kind", ["python", "numba"])
@pytest.mark.parametrize("tiers", [1, 2, 3, 4])
def test_same_pages_as_the_oracle_and_the_device(kind, tiers):
    sizes = {"pages": 190, "layers": 2, "kv_heads": 3, "max_requests": 4, "max_tokens": 18}
    host, memory = manager(kind, tiers, **sizes), make(tiers, watermark=0, **sizes)
    oracle = oracle_of(memory)
    generator, prompts, steps = torch.Generator().manual_seed(tiers), {}, 0

    def compare():
        assert queue_of(host) == oracle.queue
        assert np.array_equal(host.page_counts, memory.page_counts.numpy())
        assert np.array_equal(host.tables, memory.tables.numpy())
        for slot in prompts:
            for table in range(len(host.tables)):
                rows = [oracle.row(head, table) for head in oracle.heads(slot)]
                assert host.tables[table, slot].reshape(6, -1).tolist() == rows
                if slot in oracle.compacted:
                    assert host.device_tables[table, slot].flatten(0, 1).tolist() == rows

    for _ in range(12):
        new = [slot for slot in (2, 0, 3, 1) if slot not in prompts][:2]
        tokens = torch.randint(1, 15, (len(new),), generator=generator).tolist()
        while not memory.can_admit(tokens):
            new, tokens = new[1:], tokens[1:]
        host.admit(new, tokens), memory.admit(new, tokens)
        for slot, count in zip(new, tokens, strict=True):
            oracle.admit(slot, count)
        planned = random_plan(memory, tokens, generator)
        host.compact(new, planned), memory.compact(new, planned)
        for k, slot in enumerate(new):
            oracle.compact(slot, {head: planned[k, head[1], head[2]].tolist() for head in oracle.heads(slot)})
            prompts[slot] = tokens[k]
        compare()
        active = np.array([prompts.get(slot, 18) < 18 for slot in range(4)]) & (np.arange(4) != 1)
        if oracle.step(np.flatnonzero(active).tolist()):
            free, taken = host.free_pages, host.reserve_step(active)
            assert taken == free - host.free_pages
            steps += taken > 0
            memory.reserve_step(torch.from_numpy(active))
            for slot in np.flatnonzero(active).tolist():
                prompts[slot] += 1
                for head in oracle.heads(slot):
                    tier = int(torch.randint(0, tiers, (), generator=generator))
                    oracle.append(head, tier)
                    memory.lengths[(*head, tier)] += 1
                    host.device_lengths[(*head, tier)] += 1
            compare()
        else:
            before = queue_of(host), host.tables.copy()
            with pytest.raises(OutOfPages):
                host.reserve_step(active)
            assert queue_of(host) == before[0]
            assert np.array_equal(host.tables, before[1])
        gone = [slot for slot in prompts if prompts[slot] > 15 or torch.rand((), generator=generator) < 0.4]
        host.release(gone), memory.release(gone)
        for slot in gone:
            oracle.release(slot)
            del prompts[slot]
        compare()
    assert steps >= 4


@pytest.mark.parametrize("kind", ["python", "numba"])
def test_a_prompt_that_does_not_fit_is_refused_untouched(kind):
    host = manager(kind, 2, pages=9, layers=1, kv_heads=2, max_requests=2, max_tokens=16)
    with pytest.raises(OutOfPages, match="10 pages are needed and 9 are free"):
        host.admit([0], [8])
    assert queue_of(host) == list(range(9))
    assert (host.tables == -1).all()
    host.admit([0], [5])
    assert host.free_pages == 1


def test_threads_are_told():
    sizes = {"pages": 9, "layers": 1, "kv_heads": 2, "max_requests": 2, "max_tokens": 16}
    assert manager("python", 2, **sizes).threads == 1
    assert manager("numba", 2, **sizes).threads == numba.get_num_threads()


def test_torch_keeps_its_threads():
    before = torch.get_num_threads()
    host = manager("numba", 2, pages=99, layers=1, kv_heads=2, max_requests=2, max_tokens=16)
    host.admit([0], [5])
    assert torch.get_num_threads() == before
