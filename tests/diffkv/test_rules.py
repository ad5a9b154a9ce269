"""Vectorised rules equal a plain one that looks at one head at a time, token by token, over whole generations."""

import math

import numpy as np
import pytest
from cache_helpers import cut, naive_codec, place_of, prompt_of, random_call, rows_of

from diffkv_repro.attention_stats.significance import Significance
from diffkv_repro.cache.store import DROPPED
from diffkv_repro.cache.tiered import TieredLayer
from diffkv_repro.diffkv import CompressionPolicy

PAPER, RELEASED = CompressionPolicy.paper, CompressionPolicy.released
POLICIES = {
    "paper": PAPER(alpha_low=0.3, window=6),
    "paper, nothing pruned": PAPER(alpha_high=2.0, alpha_low=0.0, window=6),
    "paper, all but the window pruned": PAPER(alpha_high=40.0, alpha_low=40.0, window=6),
    "paper, window of one": PAPER(alpha_high=1.5, alpha_low=0.1, window=1),
    "paper over the length": PAPER(alpha_low=0.3, window=6, prompt_divisor="length", decode_divisor="position"),
    "paper, maximum each step": PAPER(alpha_low=0.4, window=5, group_max="each-step"),
    "paper, last 8 queries": PAPER(alpha_low=0.2, window=6, significance=Significance("last", 8)),
    "paper, groups": PAPER("K4V2:2/4-K2V1:4/2", alpha_low=0.3, window=6),
    "released": RELEASED(alpha_low=0.5, window=6),
    "released, nothing pruned": RELEASED(alpha_high=1.5, alpha_low=0.0, window=6),
    "released, last 8 queries": RELEASED(alpha_low=0.5, window=6, significance=Significance("last", 8, own_score=True)),
    "released, later queries": RELEASED(alpha_low=0.5, window=4, significance=Significance(), group_max="of-means"),
    "released, mostly pruned": RELEASED(alpha_high=6.0, alpha_low=5.0, window=6),
    "released, window of one": RELEASED(alpha_low=0.5, window=1),
    "three tiers": CompressionPolicy(("K16V8", "K8V4", "K2V2"), (1.2, 0.8, 0.3), window=6),
    "one tier": CompressionPolicy(("K8V8",), (0.6,), window=6),
    "alphas per head": PAPER(alpha_high=((1.0, 3.0),), alpha_low=((0.0, 1.0),), window=6),
}


class OneHead:
    """One KV head of one sequence, as the paper words it. Positions count from 0, padding does not exist."""

    def __init__(self, policy, head):
        self.policy, self.head = policy, head
        self.tier, self.key, self.value, self.sums = {}, {}, {}, {}
        self.seen = self.prompt_length = 0

    def alpha(self, index):
        alpha = self.policy.alphas[index]
        return alpha if isinstance(alpha, float) else alpha[0][self.head]

    def put(self, token, tier, key, value):
        precision = self.policy.tiers[tier]
        self.tier[token] = tier
        self.key[token] = naive_codec(key, precision.key_bits, precision.key_groups).tolist()
        self.value[token] = naive_codec(value, precision.value_bits, precision.value_groups).tolist()

    def move(self, token, tier):
        if tier == DROPPED:
            for kept in (self.tier, self.key, self.value, self.sums):
                kept.pop(token)
        else:
            self.put(token, tier, self.key[token], self.value[token])

    def classify(self, significance, divisor):
        last = len(self.policy.tiers) - 1
        for tier in range(last):
            if significance > self.alpha(tier) / divisor:
                return tier
        return last if significance >= self.alpha(last) / divisor else DROPPED

    def counts(self, query, token):
        """Whether the score that this query gives this token counts."""
        kind = self.policy.significance
        if kind.queries == "last" and query < self.prompt_length - kind.observed:
            return False
        return query > token or (kind.own_score and query == token)

    def significance(self, token):
        queries = sum(self.counts(query, token) for query in range(self.seen))
        return max(self.sums[token]) / max(queries, 1)

    def prefill(self, queries, keys, values):
        length = self.seen = self.prompt_length = len(keys)
        sums = [[0.0] * len(queries) for _ in range(length)]
        for at in range(length):
            for index, query in enumerate(queries):
                for token, score in enumerate(attention(query[at], keys[: at + 1])):
                    if self.counts(at, token):
                        sums[token][index] += score
        for token in range(length):
            self.sums[token] = sums[token]
            divisor = token + 1 if self.policy.prompt_divisor == "position" else length
            recent = token >= length - self.policy.window
            tier = 0 if recent else self.classify(self.significance(token), divisor)
            self.put(token, max(tier, 0), keys[token], values[token])
            if tier == DROPPED:
                self.move(token, DROPPED)
            elif self.policy.group_max == "each-step":
                self.sums[token] = [max(sums[token])]

    def step(self, queries, key, value):
        """Decide, store, attend, add up; the output of each query head."""
        new = self.seen
        if self.policy.decode == "algorithm-1":
            self.algorithm_1(new)
        else:
            self.two_minimum(new)
        self.put(new, 0, key, value)
        self.sums[new] = [0.0] * (1 if self.policy.group_max == "each-step" else len(queries))
        self.seen += 1
        kept = sorted(self.tier)
        scores = [attention(query, [self.key[token] for token in kept]) for query in queries]
        for place, token in enumerate(kept):
            if self.counts(new, token):
                received = [own[place] for own in scores]
                received = [max(received)] if self.policy.group_max == "each-step" else received
                self.sums[token] = [old + more for old, more in zip(self.sums[token], received, strict=True)]
        columns = list(zip(*(self.value[token] for token in kept), strict=True))
        return [[sum(a * b for a, b in zip(own, column, strict=True)) for column in columns] for own in scores]

    def divisor(self, new):
        return new + 1 if self.policy.decode_divisor == "length" else max(new, 1)

    def algorithm_1(self, new):
        candidate = new - self.policy.window
        if candidate < 0:
            return
        tier = self.classify(self.significance(candidate), self.divisor(new))
        peers = [token for token in self.tier if token < candidate and self.tier[token] == tier]
        victim = min(peers, key=self.significance, default=None)
        if tier != self.tier[candidate]:
            self.move(candidate, tier)
        if victim is None:
            return
        fate = self.classify(self.significance(victim), self.divisor(new))
        if fate == DROPPED or fate > tier:
            self.move(victim, fate)

    def two_minimum(self, new):
        old = [token for token in self.tier if token <= new - self.policy.window]
        high = min((token for token in old if self.tier[token] == 0), key=self.significance, default=None)
        low = min((token for token in old if self.tier[token] == 1), key=self.significance, default=None)
        if high is None:
            return
        quantise_below, prune_below = (self.alpha(index) / self.divisor(new) for index in (0, 1))
        m_high = self.significance(high)
        m_low = math.inf if low is None else self.significance(low)
        if m_high < prune_below and m_high < m_low:
            self.move(high, DROPPED)
        elif m_high < quantise_below:
            if m_low < prune_below:
                self.move(low, DROPPED)
            self.move(high, 1)


def attention(query, keys):
    """Softmax of query . key / sqrt(d), over a list of keys."""
    logits = [sum(a * b for a, b in zip(query, key, strict=True)) / math.sqrt(len(query)) for key in keys]
    exponents = [math.exp(logit - max(logits)) for logit in logits]
    return [exponent / sum(exponents) for exponent in exponents]


def heads_of(policy, call, padding):
    """One plain head for each sequence and KV head, with its own queries, keys and values as lists."""
    for row in range(2):
        for head in range(2):
            start = padding[row]
            queries = call.query[row, 3 * head : 3 * head + 3, start:].tolist()
            keys, values = (tensor[row, head, start:].tolist() for tensor in (call.key, call.value))
            yield row, head, OneHead(policy, head), queries, keys, values


@pytest.mark.parametrize("prompt", [1, 6, 23])
@pytest.mark.parametrize("name", POLICIES)
def test_equal_to_a_plain_rule_token_by_token(name, prompt):
    policy, tokens = POLICIES[name], prompt + 26
    padding = (0, prompt // 3)
    call = random_call(tokens=tokens, seed=prompt)
    layer = TieredLayer(place_of(), policy.rule(place_of()), storage="simulated")
    layer.prefill(prompt_of(cut(call, 0, prompt), padding), rows_of(2, prompt, padding))
    plain = list(heads_of(policy, call, padding))
    for row, _, head, queries, keys, values in plain:
        until = prompt - padding[row]
        head.prefill([query[:until] for query in queries], keys[:until], values[:until])
    for at in range(prompt, tokens + 1):
        tier, scores = layer.store.tier, layer.store.scores
        for row, index, head, *_ in plain:
            expected = [head.tier.get(column - padding[row], DROPPED) for column in range(at)]
            assert tier[row, index].tolist() == expected, f"token {at}, sequence {row}, head {index}"
            sums = np.zeros((scores.shape[2], at))
            for token, own in head.sums.items():
                sums[:, token + padding[row]] = own
            np.testing.assert_allclose(scores[row, index].numpy(), sums, rtol=1e-3, atol=1e-5)
        if at == tokens:
            return
        output = layer.decode(cut(call, at, at + 1), rows_of(2, at + 1, padding))
        for row, index, head, queries, keys, values in plain:
            own = at - padding[row]
            by_hand = head.step([query[own] for query in queries], keys[own], values[own])
            seen = output[row, 3 * index : 3 * index + 3, 0].numpy()
            np.testing.assert_allclose(seen, np.array(by_hand), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", POLICIES)
def test_these_policies_do_something(name):
    """A comparison over streams in which nothing moves would show nothing."""
    policy = POLICIES[name]
    call = random_call(tokens=49, seed=23)
    layer = TieredLayer(place_of(), policy.rule(place_of()), storage="simulated")
    layer.prefill(prompt_of(cut(call, 0, 23)), rows_of(2, 23))
    before = layer.store.tier.clone()
    layer.decode(cut(call, 23, 49), rows_of(2, 49))
    after = layer.store.tier[:, :, :23]
    assert bool((before != 0).any()), "the prompt"
    assert bool((after != before).any()), "the generation"
