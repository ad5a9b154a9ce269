"""Sums and counts of received scores equal plain loops over queries, in the prompt and after it."""

import numpy as np
import pytest
import torch
from cache_helpers import CPU, naive_weights, prompt_of, random_call
from hypothesis import given
from hypothesis import strategies as st

from diffkv_repro.attention_stats.significance import Significance

KINDS = {
    "all later queries": Significance(),
    "last 64": Significance("last", 64),
    "last 64, own score": Significance("last", 64, own_score=True),
    "last 5": Significance("last", 5),
    "last 5, own score": Significance("last", 5, own_score=True),
    "last 1": Significance("last", 1),
    "last 1, own score": Significance("last", 1, own_score=True),
}
kinds = st.one_of(st.builds(Significance, st.just("last"), st.integers(1, 40), st.booleans()), st.just(Significance()))


def counted_queries(kind, column, columns, prompt_columns):
    """The queries whose score for ``column`` counts; each has a column of its own."""
    observed = range(columns) if kind.queries == "later" else range(max(0, prompt_columns - kind.observed), columns)
    return [query for query in observed if query > column or (query == column and kind.own_score)]


@pytest.mark.parametrize("padding", [None, (0, 6), (3, 16)])
@pytest.mark.parametrize("name", KINDS)
def test_sums_and_means_of_a_prompt_equal_a_loop_over_queries(name, padding):
    kind, tokens = KINDS[name], 17
    call = random_call(tokens=tokens)
    weights = naive_weights(call, padding)
    sums = np.zeros((2, 6, tokens))
    means = np.zeros((2, 2, tokens))
    for column in range(tokens):
        queries = counted_queries(kind, column, tokens, tokens)
        for query in queries:
            sums[:, :, column] += weights[:, :, query, column]
        for kv_head in range(2):
            heads = sums[:, 3 * kv_head : 3 * kv_head + 3, column]
            means[:, kv_head, column] = heads.max(axis=1) / max(len(queries), 1)
    prompt = prompt_of(call, padding)
    seen = kind.sums(prompt)
    assert seen.shape == (2, 2, 3, tokens)
    assert seen.dtype == torch.float32
    np.testing.assert_allclose(seen.numpy(), sums.reshape(2, 2, 3, tokens), rtol=1e-4, atol=2e-6)
    np.testing.assert_allclose(kind.of_prompt(prompt).numpy(), means, rtol=1e-4, atol=2e-6)


@given(kinds, st.integers(1, 50), st.integers(0, 30))
def test_counts_are_the_queries_that_were_summed(kind, prompt_columns, later):
    columns = prompt_columns + later
    expected = [
        max(1, len(counted_queries(kind, column, columns, prompt_columns))) for column in range(columns)
    ]  # fmt: skip
    assert kind.counts(columns, prompt_columns, CPU).tolist() == expected


@given(kinds, st.integers(1, 50), st.integers(0, 30))
def test_each_new_token_counts_once_for_every_earlier_one(kind, prompt_columns, later):
    columns = prompt_columns + later
    before = kind.counts(columns, prompt_columns, CPU)
    after = kind.counts(columns + 1, prompt_columns, CPU)[:columns]
    # A count of none is shown as 1, so the first query does not change it.
    empty = torch.tensor([not counted_queries(kind, column, columns, prompt_columns) for column in range(columns)])
    assert torch.equal(after - before, (~empty).long())


def test_a_prompt_shorter_than_what_is_observed_uses_every_query():
    call = random_call(tokens=9)
    short, exact = Significance("last", 64), Significance("last", 9)
    assert torch.equal(short.sums(prompt_of(call)), exact.sums(prompt_of(call)))
    torch.testing.assert_close(short.of_prompt(prompt_of(call)), Significance().of_prompt(prompt_of(call)))


def test_padding_does_not_change_what_a_sequence_gets():
    call = random_call(batch=1, tokens=12)
    padded = random_call(batch=1, tokens=17, seed=1)
    for name in ("query", "key", "value"):
        getattr(padded, name)[:, :, 5:] = getattr(call, name)
    for kind in KINDS.values():
        alone, beside = kind.of_prompt(prompt_of(call)), kind.of_prompt(prompt_of(padded, (5,)))
        torch.testing.assert_close(beside[..., 5:], alone, rtol=1e-5, atol=1e-7)
        assert not bool(beside[..., :5].any())


def test_asking_for_significance_changes_nothing_in_the_prompt():
    prompt = prompt_of(random_call(), (0, 2))
    before = prompt.rows(17)
    for kind in KINDS.values():
        first = kind.of_prompt(prompt)
        assert torch.equal(kind.of_prompt(prompt), first)
    assert torch.equal(prompt.rows(17), before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"queries": "first"}, "queries is 'first'; allowed are later, last"),
        ({"queries": "last", "observed": 0}, "observed is 0; it must be at least 1"),
        ({"observed": -3}, "observed is -3"),
        ({"own_score": True}, "own_score goes with queries='last'"),
    ],
)
def test_bad_options_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        Significance(**arguments)
