"""The rule that chooses thresholds, on made losses and accuracies; and once on a tiny model."""

import json

import pandas as pd
import pytest
from cache_helpers import ids_of
from tiny import save, tiny_llama

from diffkv_repro.diffkv import CompressionPolicy
from diffkv_repro.evaluation import calibration
from diffkv_repro.evaluation.calibration import ALPHA_HIGH, ALPHA_LOW, TaskRule, calibrate
from diffkv_repro.models import load_model
from diffkv_repro.workloads import Window
from diffkv_repro.workloads.tasks import Item, recall

BASE = CompressionPolicy.paper(prompt_divisor="length", window=8)


@pytest.fixture
def chosen(monkeypatch):
    """Calibrate where the loss of a setting is ``loss(alpha_high, alpha_low)``, on two windows around it."""

    def calibrated(loss, **options):
        def compared(loaded, windows, methods, folder, *, prompt_tokens):
            rows = [
                {"text": "t", "window": name, "method": method.label, "added_nll": loss(*method.alphas) + shift,
                 "true": 0.4 / (1 + sum(method.alphas))}
                for method in methods for name, shift in (("a @0", -0.01), ("b @0", 0.01))
            ]  # fmt: skip
            full = [{"text": "t", "window": name, "method": "FP16", "added_nll": 0, "true": 1} for name in "ab"]
            return pd.DataFrame([*full, *rows])

        monkeypatch.setattr(calibration, "compare", compared)
        return calibrate(None, {}, None, **({"base": BASE, "prompt_tokens": 20, "tolerance": 0.055} | options))

    return calibrated


def test_the_largest_alphas_within_tolerance_are_chosen(chosen):
    found = chosen(lambda high, low: 0.01 * high + 0.5 * low)
    assert found.policy.alphas == (5.0, 0.0)
    found = chosen(lambda high, low: 0.01 * high + 0.5 * low, alpha_high=[3, 1, 2])
    assert found.policy.alphas == (3.0, 0.04)


def test_exactly_the_tolerance_is_within_it(chosen):
    assert chosen(lambda high, low: 0.25 * high, tolerance=0.5).policy.alphas[0] == 2


def test_the_largest_counts_even_where_a_smaller_one_loses_more(chosen):
    losses = {1.0: 0.0, 2.0: 0.9, 3.0: 0.05, 4.0: 0.2, 5.0: 0.3}
    found = chosen(lambda high, low: losses[high])
    assert found.policy.alphas == (3.0, max(ALPHA_LOW))


def test_where_none_is_within_tolerance_the_smallest_is_chosen(chosen):
    found = chosen(lambda high, low: 1 - 0.1 * high)
    assert found.policy.alphas == (min(ALPHA_HIGH), min(ALPHA_LOW))


def test_alpha_low_is_never_above_alpha_high(chosen):
    found = chosen(lambda high, low: 0, alpha_high=[0.05], alpha_low=[0.02, 0.05, 0.08])
    assert found.policy.alphas == (0.05, 0.05)
    assert all(policy.alphas[1] <= policy.alphas[0] for policy in found.added_nll)
    found = chosen(lambda high, low: 0, alpha_high=[0.01], alpha_low=[0.02, 0.03])
    assert found.policy.alphas == (0.01, 0.0)


class Made(TaskRule):
    """A task rule of 100 items of which a setting gets ``right(alpha_high, alpha_low)`` right, FP16 ninety."""

    def correct(self, loaded, method):
        self.asked.append(method.label)
        right = 90 if method.label == "FP16" else self.right(*method.alphas)
        return [1.0] * right + [0.0] * (100 - right)


def made(right, max_drop=0.02):
    rule = Made(recall(100), max_drop)
    object.__setattr__(rule, "right", right)
    object.__setattr__(rule, "asked", [])
    return rule


def test_a_task_narrows_what_the_texts_allow(chosen):
    within = chosen(lambda high, low: 0, task=made(lambda high, low: 90 - int(high) + 1 - int(100 * low)))
    assert within.policy.alphas == (3.0, 0.0), "exactly the drop that is allowed is within it"
    assert within.kept
    free = chosen(lambda high, low: 0, task=made(lambda high, low: 0, max_drop=1))
    assert free.policy.alphas == (max(ALPHA_HIGH), max(ALPHA_LOW))
    better = chosen(lambda high, low: 0, task=made(lambda high, low: 95, max_drop=0))
    assert better.policy.alphas == (max(ALPHA_HIGH), max(ALPHA_LOW))
    assert better.drop[better.policy].mean == pytest.approx(-0.05)


def test_the_texts_narrow_what_the_task_allows(chosen):
    rule = made(lambda high, low: 90)
    found = chosen(lambda high, low: 0.01 * high + 0.5 * low, alpha_high=[1, 2, 9], task=rule)
    assert found.policy.alphas == (2.0, 0.06)
    assert not any("alpha 9/" in label for label in rule.asked), "the task is not asked where the texts say no"
    assert len(rule.asked) == len(set(rule.asked))


def test_where_the_task_allows_none_that_is_said(chosen):
    found = chosen(lambda high, low: 0, task=made(lambda high, low: 10))
    assert found.policy.alphas == (min(ALPHA_HIGH), min(ALPHA_LOW))
    assert not found.kept
    assert found.summary().endswith("no setting is within the rule; the smallest thresholds were taken")
    assert not chosen(lambda high, low: 1).kept
    assert chosen(lambda high, low: 0).kept


def test_the_rule_is_written_beside_the_policy(chosen, tmp_path):
    found = chosen(lambda high, low: 0.01 * high, task=made(lambda high, low: 91 - int(high)))
    beside = found.save(tmp_path / "policy.json")
    assert CompressionPolicy.load(tmp_path / "policy.json") == found.policy
    assert beside == tmp_path / "policy.calibration.json"
    document = json.loads(beside.read_text())
    assert document["rule"] == (
        "the largest alpha_high, then the largest alpha_low, with at most 0.055 nats a token over FP16, and an "
        "accuracy at most 0.02 below FP16 on 100 items of recall"
    )
    assert (document["chosen"], document["within_the_rule"]) == (found.policy.label, True)
    tried = {entry["setting"]: entry for entry in document["tried"]}
    assert tried[found.policy.label]["accuracy_drop"]["mean"] == pytest.approx(0.02)
    assert len(tried) == len(found.added_nll)
    assert found.summary().startswith(document["rule"])
    assert "accuracy -0.02 [" in found.summary()
    plain = chosen(lambda high, low: 0)
    assert json.loads(plain.save(tmp_path / "other.json").read_text())["rule"].endswith("0.055 nats a token over FP16")


def test_task_rules_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="at least one item"):
        TaskRule([])
    with pytest.raises(ValueError, match="max_drop is 2; allowed are 0 to 1"):
        TaskRule(recall(1), 2)


def test_every_setting_tried_is_kept_once(chosen):
    found = chosen(lambda high, low: 0.01 * high)
    assert [policy.alphas for policy in found.added_nll] == [
        *((high, 0.0) for high in ALPHA_HIGH), *((5.0, low) for low in ALPHA_LOW[1:])
    ]  # fmt: skip
    assert all(loss.n == 2 for loss in found.added_nll.values())
    assert not found.table.duplicated(["window", "method"]).any()


def test_everything_else_is_that_of_the_base(chosen):
    base = CompressionPolicy.released("K8V8-K2V2", window=16)
    found = chosen(lambda high, low: 0, base=base).policy
    assert (found.tiers, found.window, found.significance) == (base.tiers, 16, base.significance)
    assert found.decode == "two-minimum"


def test_the_summary_marks_the_choice(chosen):
    found = chosen(lambda high, low: 0.04 * high, alpha_high=[1, 2], alpha_low=[0.0, 0.5])
    lines = found.summary().splitlines()
    assert len(lines) == 3
    assert [line.startswith("-> ") for line in lines] == [False, False, True]
    assert found.policy.label in lines[2]
    assert "16.0% of FP16, +0.04 [" in lines[2]


def test_other_than_two_tiers_are_refused(chosen):
    three = CompressionPolicy(("K8V8", "K8V4", "K4V2"), (2, 1, 0))
    with pytest.raises(ValueError, match="the base policy has 3 tiers; alpha_high and alpha_low are of two"):
        chosen(lambda high, low: 0, base=three)
    with pytest.raises(ValueError, match="the base policy has 1 tiers"):
        chosen(lambda high, low: 0, base=CompressionPolicy(("K8V4",), (0,)))


@pytest.mark.parametrize("empty", ["alpha_high", "alpha_low"])
def test_nothing_to_try_is_refused(chosen, empty):
    with pytest.raises(ValueError, match="alpha_high and alpha_low each need at least one value"):
        chosen(lambda high, low: 0, **{empty: []})


def test_a_tiny_model_is_calibrated(tmp_path):
    loaded = load_model(str(save(tiny_llama(), tmp_path / "model")), device="cpu")
    windows = {"made": [Window("made", index, ids_of(40, seed=index)) for index in range(2)]}
    options = {"base": BASE, "prompt_tokens": 30, "alpha_high": [1, 8], "alpha_low": [0, 0.5]}
    loose = calibrate(loaded, windows, tmp_path / "kept", tolerance=100, **options)
    assert loose.policy.alphas == (8.0, 0.5)
    strict = calibrate(loaded, windows, tmp_path / "kept", tolerance=-100, **options)
    assert strict.policy.alphas == (1.0, 0.0)
    size = loose.table.groupby("method")["true"].mean()
    assert size[loose.policy.label] < size[strict.policy.label] < 1


def test_a_tiny_model_is_asked_through_its_cache(tmp_path):
    loaded = load_model(str(save(tiny_llama(), tmp_path / "model")), device="cpu")
    windows = {"made": [Window("made", 0, ids_of(40))]}
    items = [Item("made", " ".join(f"w{3 + (7 * i + j) % 90}" for j in range(30)), "5", "number", 3) for i in range(3)]
    rule = TaskRule(items, 1, tmp_path / "kept.sqlite")
    options = {"base": BASE, "prompt_tokens": 30, "alpha_high": [1, 8], "alpha_low": [0, 0.5], "tolerance": 100}
    found = calibrate(loaded, windows, tmp_path / "kept", task=rule, **options)
    assert found.policy.alphas == (8.0, 0.5)
    assert {item.alphas for item in found.drop} == {(8.0, 0.0), (8.0, 0.5)}
    assert all(drop.n == 3 for drop in found.drop.values())
    again = calibrate(loaded, windows, tmp_path / "kept", task=rule, **options)
    assert again.drop == found.drop
