"""What Algorithm 1 and the released rule do to hand-made caches, and what holds over any generation."""

import pytest
import torch
from cache_helpers import cut, ids_of, place_of, prompt_of, random_call, rows_of
from tiny import tiny_llama

from diffkv_repro.attention_stats.significance import Significance
from diffkv_repro.cache import compress
from diffkv_repro.cache.store import DROPPED
from diffkv_repro.cache.tiered import Step, TieredLayer
from diffkv_repro.diffkv import CompressionPolicy
from diffkv_repro.models import intercept_attention

ONE_HEAD = {"kv_heads": 1, "group": 1}


def after_step(policy, tiers, means):
    """Tiers of one head after one step, given those before and the mean scores of its tokens.

    ``h`` is a token in the first tier, ``l`` one in the second, ``-`` a dropped one.
    """
    columns = len(tiers)
    rule = policy.rule(place_of(**ONE_HEAD))
    counts = policy.significance.counts(columns, 0, torch.device("cpu"))
    scores = torch.tensor(means, dtype=torch.float32) * counts
    tier = torch.tensor(["hl".find(letter) for letter in tiers], dtype=torch.int8)[None, None]
    step = Step(columns, 0, tier.clone(), scores[None, None, None], torch.zeros(1, dtype=torch.long))
    moved = list(tiers)
    for move in rule.step(step):
        if bool(move.where):
            moved[int(move.column)] = "hl-"[int(move.tier)]
    return "".join(moved)


# With the token that enters there are eight: high above 1/8, low down to 1/32, pruned below. The window is two, so the
# candidate is the sixth one. Thresholds are exact in binary.
HIGH, LOW, LITTLE = 0.5, 0.1, 0.01
ALGORITHM_1 = {
    "candidate high, victim kept": ("hlhlhhh", [0.3, 0, 0.2, 0, 0.4, HIGH, 0], "hlhlhhh"),
    "candidate high, victim demoted": ("hlhlhhh", [0.3, 0, LOW, 0, 0.2, HIGH, 0], "hlllhhh"),
    "candidate high, victim pruned": ("hlhlhhh", [0.3, 0, LITTLE, 0, LOW, HIGH, 0], "hl-lhhh"),
    "candidate low, victim kept": ("hlhlhhh", [0, 0.2, 0, LOW, 0, LOW, 0], "hlhlhlh"),
    "candidate low, victim pruned": ("hlhlhhh", [0, LOW, 0, LITTLE, 0, LOW, 0], "hlh-hlh"),
    "candidate pruned, nothing else": ("hlhlhhh", [0, 0, 0, 0, 0, LITTLE, 0], "hlhlh-h"),
    "candidate high, no older high token": ("ll-llhh", [0, 0, 0, 0, 0, HIGH, 0], "ll-llhh"),
    "candidate low, no older low token": ("hh-hhhh", [0, 0, 0, 0, 0, LOW, 0], "hh-hhlh"),
    "candidate exactly at the high threshold": ("hhhhhhh", [HIGH] * 5 + [1 / 8, 0], "hhhhhlh"),
    "candidate exactly at the low threshold": ("hhhhhhh", [HIGH] * 5 + [1 / 32, 0], "hhhhhlh"),
    "victim exactly at the high threshold": ("hhhhhhh", [HIGH, 1 / 8, 1, 1, 1, HIGH, 0], "hlhhhhh"),
    "victim exactly at the low threshold": ("llhhhhh", [LOW, 1 / 32, 1, 1, 1, LOW, 0], "llhhhlh"),
}


@pytest.mark.parametrize("name", ALGORITHM_1)
def test_outcomes_of_algorithm_1(name):
    before, means, expected = ALGORITHM_1[name]
    policy = CompressionPolicy.paper(alpha_high=1.0, alpha_low=0.25, window=2)
    assert after_step(policy, before, means) == expected


def test_algorithm_1_leaves_a_cache_shorter_than_the_window_alone():
    policy = CompressionPolicy.paper(window=8)
    assert after_step(policy, "h" * 7, [0.0] * 7) == "h" * 7
    assert after_step(policy, "h" * 8, [0.0] * 8) == "-" + "h" * 7


# The released code compares with alpha over the index of the new token: 1/8 and 1/32 with eight tokens there.
TWO_MINIMUM = {
    "high kept, low kept": ("hlhlhhhh", [0.3, 0, 0.2, 0, 0.4, 0.5, 0.6, 0], "hlhlhhhh"),
    "high demoted, low kept": ("hlhlhhhh", [0.3, LOW, LOW, LOW, 0.4, 0.5, 0.6, 0], "hlllhhhh"),
    "high demoted, low pruned": ("hlhlhhhh", [0.3, LOW, LOW, 0, 0.4, 0.5, 0.6, 0], "hll-hhhh"),
    "high pruned, less than any low": ("hlhlhhhh", [0.3, LOW, 0, LOW, 0.4, 0.5, 0.6, 0], "hl-lhhhh"),
    "high demoted though below, a low one is less": ("hlhlhhhh", [0.3, LOW, LITTLE, 0, 0.4, 0.5, 0.6, 0], "hll-hhhh"),
    "high pruned, no low token": ("hhhhhhhh", [0.3, LITTLE, 0, 0.3, 0.4, 0.5, 0.6, 0], "hh-hhhhh"),
    "no high token outside the window": ("lllllllh", [0, 0, 0, 0, 0, 0, 0, 0], "lllllllh"),
    "what leaves the window is eligible": ("hhhhhhhh", [0.3] * 6 + [LOW, 0], "hhhhhhlh"),
    "what stays in the window is not": ("hhhhhhhh", [0.3] * 7 + [0], "hhhhhhhh"),
}


@pytest.mark.parametrize("name", TWO_MINIMUM)
def test_outcomes_of_the_released_rule(name):
    before, means, expected = TWO_MINIMUM[name]
    policy = CompressionPolicy.released(alpha_high=1.0, alpha_low=0.25, window=2)
    assert after_step(policy, before, means) == expected


def stream(policy, prompt, tokens, seed=0):
    """Tiers before each step and at the end."""
    call = random_call(tokens=tokens, seed=seed)
    layer = TieredLayer(place_of(), policy.rule(place_of()), storage="packed")
    layer.prefill(prompt_of(cut(call, 0, prompt)), rows_of(2, prompt))
    for at in range(prompt, tokens):
        before = layer.store.tier.clone()
        layer.decode(cut(call, at, at + 1), rows_of(2, at + 1))
        yield before, layer.store.tier.clone()


@pytest.mark.parametrize("seed", range(3))
def test_at_most_one_victim_beside_the_candidate_in_each_head_and_step(seed):
    policy = CompressionPolicy.paper(alpha_high=1.5, alpha_low=0.5, window=5)
    for before, after in stream(policy, 20, 60, seed):
        changed = before != after[..., :-1]
        candidate = before.shape[2] - 5
        assert int(changed[..., :candidate].sum(dim=-1).max()) <= 1
        assert not bool(changed[..., candidate + 1 :].any())
        assert bool((after[..., -5:] == 0).all())


@pytest.mark.parametrize("seed", range(3))
def test_the_released_rule_changes_one_high_token_and_at_most_one_low_one(seed):
    policy = CompressionPolicy.released(alpha_high=1.5, alpha_low=0.8, window=5)
    for before, after in stream(policy, 20, 60, seed):
        changed = before != after[..., :-1]
        assert int((changed & (before == 0)).sum(dim=-1).max()) <= 1
        assert int((changed & (before == 1)).sum(dim=-1).max()) <= 1
        assert not bool((changed & (before == DROPPED)).any()), "a dropped token does not come back"
        assert bool((after[..., -5:] == 0).all())


@pytest.mark.parametrize("make", [CompressionPolicy.paper, CompressionPolicy.released])
@pytest.mark.parametrize("seed", range(3))
def test_no_token_is_ever_promoted(make, seed):
    for before, after in stream(make(alpha_high=1.5, alpha_low=0.5, window=5), 20, 50, seed):
        rank_before, rank_after = (torch.where(tier == DROPPED, 9, tier) for tier in (before, after[..., :-1]))
        assert bool((rank_after >= rank_before).all())


@pytest.mark.parametrize("prompt", [1, 7, 30])
def test_streamed_significance_equals_that_of_one_prompt(prompt):
    """With nothing pruned or rounded, scores that come in token by token are those of a prefill of all."""
    tokens, call = 40, random_call(tokens=40)
    for tensor in (call.key, call.value):
        tensor.copy_(tensor.half().float())
    policy = CompressionPolicy(("K16V16",), (0.0,), window=4)
    layer = TieredLayer(place_of(), policy.rule(place_of()), storage="simulated")
    layer.prefill(prompt_of(cut(call, 0, prompt)), rows_of(2, prompt))
    layer.decode(cut(call, prompt, tokens), rows_of(2, tokens))
    store, whole = layer.store, prompt_of(call)
    step = Step(tokens, prompt, store.tier, store.scores, torch.zeros(2, dtype=torch.long))
    torch.testing.assert_close(layer.rule.current(step), Significance().of_prompt(whole), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(store.scores, Significance().sums(whole), rtol=1e-4, atol=1e-6)


def test_pruned_tokens_leave_the_positions_of_the_others_alone():
    """The next logits are those of attention over what each head has kept, at its old positions."""
    model, ids = tiny_llama(), ids_of(41)
    policy = CompressionPolicy(("K16V16",), (1.0,), window=3, prompt_divisor="position")
    with torch.inference_mode():
        with compress(model, policy, storage="packed") as session:
            model(ids[:, :40])
            before = session.cache.tokens()
            # The step first decides on the token that leaves the window; what is kept after that is attended to.
            seen = model(ids[:, 40:], past_key_values=session.cache.hf).logits
            kept = [layer.store.tier != DROPPED for layer in session.cache.layers]
        assert before["pruned"] > 100
        past = model(ids[:, :40], use_cache=True).past_key_values

        def attend(call):
            key, value = (
                torch.cat([getattr(past.layers[call.layer], name).half().float(), new.half().float()], dim=2)[0]
                for name, new in (("keys", call.key), ("values", call.value))
            )
            output = torch.empty_like(call.query)
            for head in range(6):
                chosen = kept[call.layer][0, head // 3]
                logits = key[head // 3, chosen] @ call.query[0, head, 0] * call.scale
                output[0, head, 0] = logits.softmax(dim=0) @ value[head // 3, chosen]
            return output

        with intercept_attention(model, attend):
            expected = model(ids[:, 40:], position_ids=torch.tensor([[40]]), use_cache=False).logits
    torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-4)


def test_equal_tiers_are_counted_apart_or_refused():
    model = tiny_llama()
    try:
        policy = CompressionPolicy(("K16V16", "K16V16"), (1.0, 0.0), window=4)
    except ValueError:
        return
    with torch.inference_mode(), compress(model, policy) as session:
        model(ids_of(30))
    assert session.cache.tokens()["pruned"] == 0
