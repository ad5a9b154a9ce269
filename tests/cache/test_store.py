"""Both storages hold the same numbers bit for bit and report the same bytes, which are the bytes there are."""

import pytest
import torch
from cache_helpers import CPU, naive_codec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from diffkv_repro.cache.packed import PackedStore
from diffkv_repro.cache.simulated import SimulatedStore
from diffkv_repro.cache.storages import make_store
from diffkv_repro.cache.store import CHUNK, DROPPED
from diffkv_repro.core.precision import BITS, Precision

seeds = st.integers(0, 2**31)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def generator_of(seed):
    return torch.Generator().manual_seed(seed)


class Stores(RuleBasedStateMachine):
    """The same operations on a simulated and a packed store, and a plain count of what must be in them."""

    @initialize(
        batch=st.integers(1, 3), kv_heads=st.integers(1, 3), head_dim=st.sampled_from([1, 3, 6, 8]), tiers=st.data(),
        score_width=st.integers(0, 3), dtype=st.sampled_from(DTYPES),
    )  # fmt: skip
    def make(self, batch, kv_heads, head_dim, tiers, score_width, dtype):
        groups = st.sampled_from([count for count in (1, 2, 3) if head_dim % count == 0])
        bits = st.sampled_from(BITS)
        precisions = tiers.draw(st.lists(st.builds(Precision, bits, bits, groups, groups), min_size=1, max_size=4))
        shape = {
            "batch": batch, "kv_heads": kv_heads, "head_dim": head_dim, "precisions": precisions,
            "score_width": score_width, "dtype": dtype, "device": CPU,
        }  # fmt: skip
        self.stores = [SimulatedStore(**shape), PackedStore(**shape)]
        self.tiers, self.width, self.dtype, self.head_dim = len(precisions), score_width, dtype, head_dim
        self.expected = torch.empty(batch, kv_heads, 0, dtype=torch.int8)
        self.padding = torch.zeros(batch, dtype=torch.long)

    def random_tier(self, shape, generator):
        return torch.randint(DROPPED, self.tiers, shape, generator=generator).to(torch.int8)

    @rule(count=st.integers(0, 40), seed=seeds, exponent=st.integers(-6, 3), one=st.booleans())
    def append(self, count, seed, exponent, one):
        generator = generator_of(seed)
        shape = (*self.expected.shape[:2], count)
        key, value = (
            (torch.randn(*shape, self.head_dim, generator=generator) * 10.0**exponent).to(self.dtype) for _ in range(2)
        )
        if one:
            index = int(torch.randint(0, self.tiers, (), generator=generator))
            for store in self.stores:
                store.append(key, value, index)
            tier = torch.full(shape, index, dtype=torch.int8)
        else:
            tier = self.random_tier(shape, generator)
            if self.expected.shape[2] == 0:
                # The first tokens of a sequence may be padding, which no store keeps.
                self.padding = torch.randint(0, count + 1, (shape[0],), generator=generator)
                tier = tier.masked_fill(torch.arange(count) < self.padding[:, None, None], DROPPED)
            for store in self.stores:
                store.append(key, value, tier)
        self.expected = torch.cat([self.expected, tier], dim=2)

    @rule(count=st.integers(1, 5), seed=seeds)
    def append_one_by_one_what_was_encoded_together(self, count, seed):
        generator = generator_of(seed)
        shape = (*self.expected.shape[:2], count)
        key, value = (torch.randn(*shape, self.head_dim, generator=generator).to(self.dtype) for _ in range(2))
        index = int(torch.randint(0, self.tiers, (), generator=generator))
        for store in self.stores:
            parts = store.encode(key, value, index)
            for at in range(count):
                store.append_encoded([part[:, :, at : at + 1] for part in parts], index)
        self.expected = torch.cat([self.expected, torch.full(shape, index, dtype=torch.int8)], dim=2)

    @precondition(lambda self: self.expected.shape[2])
    @rule(seed=seeds, share=st.floats(0, 1), several=st.integers(0, 3))
    def retier(self, seed, share, several):
        generator = generator_of(seed)
        batch, kv_heads, columns = self.expected.shape
        # Different tokens of each head; one of them may also be given without a dimension of its own.
        order = torch.rand(batch, kv_heads, columns, generator=generator).argsort(dim=-1)
        column = order[..., : max(several, 1)]
        old = self.expected.gather(2, column)
        where = (torch.rand(column.shape, generator=generator) < share) & (old != DROPPED)
        tier = self.random_tier(column.shape, generator)
        for store in self.stores:
            store.retier(*(tensor if several else tensor[..., 0] for tensor in (column, tier, where)))
        self.expected.scatter_(2, column, torch.where(where, tier, old))

    @precondition(lambda self: self.expected.shape[2])
    @rule(seed=seeds)
    def add_scores(self, seed):
        batch, kv_heads, columns = self.expected.shape
        scores = torch.rand(batch, kv_heads, self.width, columns, generator=generator_of(seed))
        before = self.stores[0].scores.clone()
        for store in self.stores:
            store.add_scores(scores)
        kept = (self.expected != DROPPED)[:, :, None]
        assert torch.equal(self.stores[1].scores, torch.where(kept, before + scores, 0))

    @rule(seed=seeds, size=st.integers(1, 4))
    def select(self, seed, size):
        rows = torch.randint(0, len(self.expected), (size,), generator=generator_of(seed))
        before = self.stores[0].view()[0][rows]
        for store in self.stores:
            store.select(rows)
        self.expected, self.padding = self.expected[rows].clone(), self.padding[rows]
        assert torch.equal(self.stores[1].view()[0], before)

    @invariant()
    def both_hold_the_same(self):
        simulated, packed = self.stores
        assert simulated.columns == packed.columns == self.expected.shape[2]
        assert packed.tier.dtype == simulated.tier.dtype == torch.int8
        assert torch.equal(packed.tier, simulated.tier)
        assert torch.equal(packed.tier, self.expected)
        assert torch.equal(packed.scores, simulated.scores)
        for one, other in zip(packed.view(), simulated.view(), strict=True):
            assert one.dtype == other.dtype == self.dtype
            assert torch.equal(one, other)
            assert not bool(one[self.expected == DROPPED].any())

    @invariant()
    def tokens_are_conserved(self):
        by_hand = torch.stack([(self.expected == index).sum(dim=(0, 2)) for index in range(self.tiers)])
        assert all(torch.equal(store.counts(), by_hand) for store in self.stores)

    @invariant()
    def bytes_are_what_is_allocated(self):
        simulated, packed = (store.kv_bytes(self.padding) for store in self.stores)
        assert simulated == packed
        assert packed.total == sum(tensor.nbytes for tensor in self.stores[1].tensors())
        assert self.stores[0].tensors() == []

    @invariant()
    def bytes_are_counted_item_by_item(self):
        batch, kv_heads, columns = self.expected.shape
        entries = kv_heads * (batch * columns - int(self.padding.sum()))
        stored = int((self.expected != DROPPED).sum())
        size = self.stores[1].kv_bytes(self.padding)
        assert size.full == 4 * self.head_dim * entries
        assert size.scores == 4 * self.width * stored
        assert size.positions + size.tables == 4 * entries
        assert size.positions == 4 * stored
        bits, scales = 0, 0
        for index, precision in enumerate(self.stores[1].precisions):
            tokens = int((self.expected == index).sum())
            # The bits of a tier are rounded down to whole bytes; what is left over counts as padding.
            bits += tokens * self.head_dim * (precision.key_bits + precision.value_bits) // 8
            scales += tokens * precision.metadata_bytes()
        assert (size.payload, size.scales) == (bits, scales)


Stores.TestCase.settings = settings(max_examples=60, stateful_step_count=12, deadline=None)
TestStores = Stores.TestCase


def small_store(storage, precisions=("K8V4", "K4V2"), **shape):
    given = {"batch": 2, "kv_heads": 2, "head_dim": 6, "score_width": 1, "dtype": torch.float32, "device": CPU}
    return make_store(storage, precisions=[Precision.parse(name) for name in precisions], **(given | shape))


def random_tokens(count, seed=0):
    generator = generator_of(seed)
    return tuple(torch.randn(2, 2, count, 6, generator=generator) for _ in range(2))


@pytest.mark.parametrize("storage", ["simulated", "packed"])
def test_what_is_read_is_what_a_naive_quantiser_gives(storage):
    store, (key, value) = small_store(storage, ["K8V4:2/3", "K2V1", "K16V16"]), random_tokens(5)
    tier = torch.arange(20).view(2, 2, 5) % 4 - 1
    store.append(key, value, tier.to(torch.int8))
    for tensor, seen, bits, groups in (
        (key, store.view()[0], (8, 2, 16), (2, 1, 1)),
        (value, store.view()[1], (4, 1, 16), (3, 1, 1)),
    ):
        for at in (tier != DROPPED).nonzero().tolist():
            row, head, column = at
            kind = int(tier[row, head, column])
            expected = naive_codec(tensor[row, head, column], bits[kind], groups[kind])
            torch.testing.assert_close(seen[row, head, column], torch.from_numpy(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("storage", ["simulated", "packed"])
def test_a_moved_token_is_quantised_from_what_was_stored(storage):
    store, (key, value) = small_store(storage, ["K4V4", "K2V2"]), random_tokens(1)
    store.append(key, value, 0)
    store.add_scores(torch.ones(2, 2, 1, 1))
    where = torch.tensor([[True, False], [False, True]])
    store.retier(torch.zeros(2, 2, dtype=torch.long), torch.ones(2, 2, dtype=torch.int8), where)
    seen = store.view()[0]
    for row, head in ((0, 0), (1, 1)):
        twice = naive_codec(naive_codec(key[row, head, 0], 4), 2)
        torch.testing.assert_close(seen[row, head, 0], torch.from_numpy(twice), rtol=1e-6, atol=1e-6)
    assert store.tier[..., 0].tolist() == [[1, 0], [0, 1]]
    assert store.scores.flatten().tolist() == [1, 1, 1, 1], "the score of a token moves with it"


@pytest.mark.parametrize("storage", ["simulated", "packed"])
def test_a_dropped_token_leaves_nothing_and_its_record_is_used_again(storage):
    store, (key, value) = small_store(storage), random_tokens(3)
    store.append(key, value, 0)
    store.add_scores(torch.ones(2, 2, 1, 3))
    everywhere = torch.ones(2, 2, dtype=torch.bool)
    store.retier(torch.full((2, 2), 1), torch.full((2, 2), DROPPED, dtype=torch.int8), everywhere)
    before = store.kv_bytes(None)
    assert store.tier[..., 1].unique().tolist() == [DROPPED]
    assert not bool(store.view()[0][:, :, 1].any() or store.scores[..., 1].any())
    store.append(*random_tokens(1, seed=1), 0)
    after = store.kv_bytes(None)
    assert after.total == before.total, "a free record and a free column were there"
    assert store.scores[..., 3].unique().tolist() == [0], "a new token starts without a score"
    assert (before.tables, after.tables) == (16, 16), "one map entry in each of four heads for a dropped token"


@pytest.mark.parametrize("storage", ["simulated", "packed"])
def test_sequences_that_were_one_change_apart(storage):
    store, (key, value) = small_store(storage), random_tokens(4)
    store.append(key, value, 0)
    store.select(torch.tensor([1, 1, 1]))
    column = torch.full((3, 2), 2)
    only_first = torch.tensor([[True, True], [False, False], [False, False]])
    store.retier(column, torch.full((3, 2), DROPPED, dtype=torch.int8), only_first)
    store.add_scores(torch.arange(3.0)[:, None, None, None].expand(3, 2, 1, 4))
    assert (store.tier == 0).sum(dim=(1, 2)).tolist() == [6, 8, 8]
    assert store.scores.sum(dim=(1, 2, 3)).tolist() == [0, 8, 16]
    assert torch.equal(store.view()[0][1], store.view()[0][2])


def test_pools_and_map_grow_by_whole_chunks():
    store = small_store("packed")
    for count in range(1, 2 * CHUNK + 2):
        store.append(*random_tokens(1), 1)
        codes, entries = store.tensors()[-1], store.tensors()[0]
        assert len(codes) == -(-4 * count // CHUNK) * CHUNK
        assert entries.shape[2] == -(-count // CHUNK) * CHUNK


@pytest.mark.parametrize("storage", ["simulated", "packed"])
def test_one_tier_for_all_tokens_may_be_none(storage):
    store, (key, value) = small_store(storage), random_tokens(3)
    store.append(key, value, 0)
    store.append(key, value, DROPPED)
    assert store.tier[:, :, 3:].unique().tolist() == [DROPPED]
    assert store.counts().sum() == 12
    assert not bool(store.view()[0][:, :, 3:].any())


def test_an_unknown_storage_is_refused():
    with pytest.raises(ValueError, match="unknown storage 'ram'; allowed are simulated, packed"):
        small_store("ram")
