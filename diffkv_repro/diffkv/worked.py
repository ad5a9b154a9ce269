"""Small cases that can be followed by hand, run through the real store and the real rules (Figure 1, Algorithm 1)."""

from collections.abc import Sequence

import torch

from diffkv_repro.attention_stats.prompt import PromptAttention
from diffkv_repro.attention_stats.significance import Significance
from diffkv_repro.cache.layer import Place, Rows
from diffkv_repro.cache.storages import make_store
from diffkv_repro.cache.store import DROPPED
from diffkv_repro.cache.tiered import Step, TieredLayer
from diffkv_repro.core.accounting import KVBytes
from diffkv_repro.core.precision import Precision
from diffkv_repro.diffkv.policy import CompressionPolicy
from diffkv_repro.diffkv.rules import RULES, PolicyRule
from diffkv_repro.models.hf import AttentionCall, AttentionLayout, LayerAttention

_HIGH, _LOW = 0, 1
_WINDOW = 2


def stored_tiers(heads: Sequence[Sequence[int]], tiers: Sequence[str], *, head_dim: int = 128) -> KVBytes:
    """Bytes of a packed store with these tiers for each token of each KV head (``-1`` for a dropped token)."""
    tier = torch.tensor(heads, dtype=torch.int8)[None]
    _, kv_heads, tokens = tier.shape
    store = make_store(
        "packed", batch=1, kv_heads=kv_heads, head_dim=head_dim, precisions=[Precision.parse(name) for name in tiers],
        score_width=1, dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip
    vectors = torch.randn(1, kv_heads, tokens, head_dim, generator=torch.Generator().manual_seed(0))
    store.append(vectors, vectors, tier)
    return store.kv_bytes(None)


def figure_1(high: int, low: int, pruned: int) -> list[int]:
    """Tiers of one head of Figure 1."""
    return [_HIGH] * high + [_LOW] * low + [DROPPED] * pruned


def algorithm_1_outcomes() -> dict[str, bool]:
    """Each outcome of Algorithm 1 on a step worked by hand, and whether the rule reaches it.

    Nine tokens are stored and a tenth enters, so N = 10; with alpha 1 and 0.5 the thresholds are 0.1 and 0.05. Token 7
    leaves the window, token 3 is the least significant of its tier.
    """
    cases = {
        "candidate high, victim kept": (0.2, _HIGH, 0.15, _HIGH, _HIGH),
        "candidate high, victim demoted": (0.2, _HIGH, 0.07, _HIGH, _LOW),
        "candidate high, victim pruned": (0.2, _HIGH, 0.01, _HIGH, DROPPED),
        "candidate low, victim kept": (0.07, _LOW, 0.06, _LOW, _LOW),
        "candidate low, victim pruned": (0.07, _LOW, 0.01, _LOW, DROPPED),
        "candidate pruned": (0.01, DROPPED, 0.01, _LOW, _LOW),
    }
    reached = {}
    for name, (candidate, to, victim, before, after) in cases.items():
        significance, tiers = [0.5] * 9, [_HIGH, _HIGH, _LOW, before, _HIGH, _LOW, _HIGH, _HIGH, _HIGH]
        significance[7], significance[3] = candidate, victim
        expected = list(tiers)
        expected[7], expected[3] = to, after
        reached[name] = _after(_rule("algorithm-1"), significance, tiers) == expected
    return reached


def rules_disagree() -> tuple[list[int], list[int]]:
    """Tiers after the same step under Algorithm 1 and under the released rule.

    The least significant high token (0.04) lies below the pruning threshold of 0.05, a low token (0.03) below both.
    """
    significance, tiers = [0.5] * 9, [_HIGH, _HIGH, _LOW, _HIGH, _HIGH, _LOW, _HIGH, _HIGH, _HIGH]
    significance[3], significance[2] = 0.04, 0.03
    first, second = (_after(_rule(name), significance, tiers) for name in ("algorithm-1", "two-minimum"))
    return first, second


def most_victims(*, steps: int = 200, seed: int = 0) -> int:
    """The most older tokens, besides the candidate, that changed tier in one step of one head, over random streams."""
    generator = torch.Generator().manual_seed(seed)
    layer = TieredLayer(_place(heads=4, kv_heads=2), _policy_rule(), storage="simulated")
    prompt = _random_call(generator, 24)
    layer.prefill(PromptAttention(prompt), Rows(None, torch.arange(24)[None]))
    most = 0
    for count in range(25, 25 + steps):
        before = layer.store.tier.clone()
        layer.decode(_random_call(generator, 1), Rows(None, torch.arange(count)[None]))
        changed = before != layer.store.tier[..., :-1]
        changed[..., count - 1 - _WINDOW] = False
        most = max(most, int(changed.sum(dim=-1).max()))
    return most


def significance_by_phase() -> tuple[float, float]:
    """Running score of one token that two query heads attend to in turns: as a prompt, and as generation, in the
    released code's order (maximum over heads after the sum, and before it)."""
    far, keys = 40.0, torch.zeros(1, 1, 4, 4)
    keys[0, 0, 0, 0] = keys[0, 0, 1, 1] = far
    keys[0, 0, 2:, :2] = -far
    queries = torch.zeros(1, 2, 4, 4)
    first, second = torch.tensor([1.0, 0, 0, 0]), torch.tensor([0, 1.0, 0, 0])
    queries[0, :, 0], queries[0, :, 1] = first, second
    queries[0, 0, 2], queries[0, 1, 2] = first, second
    queries[0, 0, 3], queries[0, 1, 3] = second, first
    call = AttentionCall(0, queries, keys, torch.ones_like(keys), 1.0, None, None)
    rule = CompressionPolicy.released("K16V16-K16V16", alpha_high=0, alpha_low=0, window=4).rule(_place(2, 1, 4))
    rule.significance, rule.own_score = Significance(), False
    as_prompt = float(rule.prompt_scores(PromptAttention(call))[0, 0, 0, 0])
    layer = TieredLayer(_place(2, 1, 4), rule, storage="simulated")
    start = AttentionCall(0, queries[:, :, :2], keys[:, :, :2], keys[:, :, :2], 1.0, None, None)
    layer.prefill(PromptAttention(start), Rows(None, torch.arange(2)[None]))
    rest = AttentionCall(0, queries[:, :, 2:], keys[:, :, 2:], keys[:, :, 2:], 1.0, None, None)
    layer.decode(rest, Rows(None, torch.arange(4)[None]))
    return as_prompt, float(layer.store.scores[0, 0, 0, 0])


def _rule(name: str) -> PolicyRule:
    return RULES[name](
        precisions=(Precision(8, 4), Precision(4, 2)), alphas=[torch.tensor([1.0]), torch.tensor([0.5])],
        window=_WINDOW, significance=Significance(), prompt_by_position=False, decode_by_position=False, score_width=1,
    )  # fmt: skip


def _after(rule: PolicyRule, significance: Sequence[float], tiers: Sequence[int]) -> list[int]:
    """Tiers of one head after a step at which its stored tokens have this significance."""
    columns = len(tiers)
    counts = rule.significance.counts(columns, columns, torch.device("cpu"))
    scores = (torch.tensor(significance) * counts).view(1, 1, 1, columns)
    tier = torch.tensor(tiers, dtype=torch.int8).view(1, 1, columns)
    for move in rule.step(Step(columns, columns, tier.clone(), scores, torch.zeros(1, dtype=torch.long))):
        if bool(move.where):
            tier[0, 0, int(move.column)] = move.tier.item()
    return tier.flatten().tolist()


def _policy_rule() -> PolicyRule:
    policy = CompressionPolicy.paper(alpha_high=1.2, alpha_low=0.8, window=_WINDOW, prompt_divisor="length")
    return policy.rule(_place(heads=4, kv_heads=2))


def _place(heads: int, kv_heads: int, head_dim: int = 16) -> Place:
    layout = AttentionLayout((LayerAttention("full"),), heads, kv_heads, head_dim, None)
    return Place(0, layout, torch.float32, torch.device("cpu"))


def _random_call(generator: torch.Generator, tokens: int) -> AttentionCall:
    shapes = ((1, 4, tokens, 16), (1, 2, tokens, 16), (1, 2, tokens, 16))
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    return AttentionCall(0, query, 2 * key, value, 0.25, None, None)
