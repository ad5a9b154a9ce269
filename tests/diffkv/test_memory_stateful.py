"""Random operations on the live manager and on the oracle must leave the same state (DiffKV section 5.2)."""

import random
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from memory_helpers import assert_matches, assert_same, assert_sound, everything, make, oracle_of, random_plan

from diffkv_repro.diffkv.memory import OutOfPages

LONGEST = 14
SEEDS = st.integers(0, 2**32)
reached = Counter()
"""How often the walks came where they should: a test that never gets there tests nothing."""


class Managers(RuleBasedStateMachine):
    """A pool small enough to run empty and to wrap round many times. Choices within a rule come from its seed."""

    @initialize(
        tiers=st.integers(1, 4), pages=st.integers(16, 200), slots=st.integers(1, 4), kept=st.sampled_from([0, 0.1])
    )
    def start(self, tiers, pages, slots, kept):
        self.memory = make(
            tiers, pages=pages, layers=2, kv_heads=1, max_requests=slots, max_tokens=LONGEST, watermark=kept
        )  # fmt: skip
        self.oracle = oracle_of(self.memory)
        self.prompts, self.sequence = {}, {}

    def _empty(self):
        return [slot for slot in range(self.memory.max_requests) if slot not in self.prompts]

    def _waiting(self):
        return [slot for slot in self.prompts if slot not in self.oracle.compacted]

    @precondition(lambda self: self._empty())
    @rule(seed=SEEDS)
    def admit(self, seed):
        choose, slots = random.Random(seed), self._empty()
        slots = choose.sample(slots, choose.randint(1, len(slots)))
        tokens = [choose.randint(1, LONGEST) for _ in slots]
        needed = 2 * sum(map(self.oracle.prompt_pages, tokens))
        before = everything(self.memory)[0]
        if needed + self.memory.watermark > len(self.oracle.queue):
            reached["admission refused"] += 1
            assert not self.memory.can_admit(tokens)
            with pytest.raises(OutOfPages) as refusal:
                self.memory.admit(slots, tokens)
            assert (refusal.value.needed, refusal.value.free) == (needed, len(self.oracle.queue))
            assert_same(everything(self.memory)[0], before)
            return
        assert self.memory.can_admit(tokens)
        self.memory.admit(slots, tokens)
        for slot, count in zip(slots, tokens, strict=True):
            self.oracle.admit(slot, count)
            self.prompts[slot] = self.sequence[slot] = count

    @precondition(lambda self: self._waiting())
    @rule(seed=SEEDS, all_high=st.booleans())
    def compact(self, seed, all_high):
        choose, slots = random.Random(seed), self._waiting()
        slots = choose.sample(slots, choose.randint(1, len(slots)))
        tokens = [self.prompts[slot] for slot in slots]
        plan = random_plan(self.memory, tokens, torch.Generator().manual_seed(seed))
        if all_high:  # as many pages as can be, so that steps run out of them
            plan[:] = 0
            plan[..., 0] = torch.tensor(tokens)[:, None, None]
        self.memory.compact(slots, plan)
        for k, slot in enumerate(slots):
            self.oracle.compact(slot, {head: plan[k, head[1], head[2]].tolist() for head in self.oracle.heads(slot)})
        reached["compacted"] += 1

    @precondition(lambda self: self.oracle.compacted)
    @rule(seed=SEEDS, steps=st.integers(1, 4), dtype=st.sampled_from([torch.bool, torch.int8, torch.uint8]))
    def step(self, seed, steps, dtype):
        """Steps of some slots, also of empty ones, each followed by at most one token a head."""
        choose = random.Random(seed)
        for _ in range(steps):
            able = [slot for slot in range(self.memory.max_requests) if self.sequence.get(slot, 0) < LONGEST]
            slots = [slot for slot in able if choose.random() < 0.9]
            active = torch.zeros(self.memory.max_requests, dtype=dtype)
            active[slots] = 1
            before, promised, free = everything(self.memory)[0], self.memory.can_step(), len(self.oracle.queue)
            self.memory.reserve_step(active)
            if not self.oracle.step(slots):
                reached["step refused"] += 1
                assert not promised
                self._refused(before)
                return
            reached["step that took pages"] += len(self.oracle.queue) < free
            reached["promised"] += promised
            assert int(self.memory.status) == 0
            for slot in set(slots) & self.oracle.compacted:
                self.sequence[slot] += 1
                for head in self.oracle.heads(slot):
                    tier = choose.randrange(-1, len(self.memory.layouts))
                    if tier >= 0:  # what an attention kernel would do
                        self.oracle.append(head, tier)
                        self.memory.lengths[(*head, tier)] += 1

    def _refused(self, before):
        assert int(self.memory.status) == 1
        after = everything(self.memory)[0]
        before.pop("status"), after.pop("status")
        assert_same(before, after)
        with pytest.raises(RuntimeError, match="pages ran out"):
            self.memory.synchronize_counts()

    @precondition(lambda self: self.prompts)
    @rule(seed=SEEDS)
    def release(self, seed):
        choose, slots = random.Random(seed), list(self.prompts)
        slots = choose.sample(slots, choose.randint(1, len(slots)))
        self.memory.release(slots)
        for slot in slots:
            self.oracle.release(slot)
            del self.prompts[slot], self.sequence[slot]

    @rule()
    def synchronize(self):
        assert self.memory.synchronize_counts() == self.memory.free_bound == len(self.oracle.queue)

    @invariant()
    def same(self):
        if hasattr(self, "memory"):
            assert_matches(self.memory, self.oracle)
            assert_sound(self.memory)
            reached["wrapped"] += self.oracle.recycled >= self.oracle.pages
            reached["nothing free"] += not self.oracle.queue


def test_random_operations_equal_the_oracle():
    run_state_machine_as_test(
        Managers,
        settings=settings(
            max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )  # fmt: skip


def one_of(machine, choose):
    """A rule that can be applied now, with arguments."""
    calls = [machine.synchronize]
    if machine._empty():
        calls.append(lambda: machine.admit(choose.getrandbits(32)))
    if machine._waiting():
        calls += 2 * [lambda: machine.compact(choose.getrandbits(32), choose.random() < 0.8)]
    if machine.oracle.compacted:
        calls += 4 * [lambda: machine.step(choose.getrandbits(32), choose.randint(1, 4), torch.bool)]
    if machine.prompts:
        calls.append(lambda: machine.release(choose.getrandbits(32)))
    return choose.choice(calls)


def test_long_walks_equal_the_oracle():
    """Hypothesis finds the smallest failure, and seldom walks far; these do, with every rule at hand."""
    reached.clear()
    for seed in range(24):
        choose, machine = random.Random(seed), Managers()
        machine.start(1 + seed % 4, choose.randint(20, 60), choose.randint(2, 4), choose.choice([0, 0.1]))
        for _ in range(80):
            one_of(machine, choose)()
            machine.same()
    for name in ("admission refused", "compacted", "step refused", "step that took pages", "promised", "wrapped"):
        assert reached[name] >= 20, (name, reached)
