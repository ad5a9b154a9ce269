"""Names and options, as text or as values, become methods; everything else is refused by name."""

import json

import pytest

from diffkv_repro.baselines import BASELINES, baseline
from diffkv_repro.cache import FullPrecision, Uniform
from diffkv_repro.core.precision import Precision
from diffkv_repro.diffkv.policy import CompressionPolicy
from diffkv_repro.evaluation.methods import make_method, methods, parameters
from tests.tiny import tiny_llama


def test_every_baseline_is_made_with_its_defaults():
    assert methods() == ("fp16", "uniform", "diffkv", "kvserve", *BASELINES)
    for name in BASELINES:
        kind = baseline(name)
        made = make_method(name, tiny_llama(max_position_embeddings=1024))
        assert isinstance(made, kind)
        if not hasattr(kind, "for_model"):
            assert made == kind()


def test_text_becomes_the_types_of_the_fields():
    assert make_method("fp16") == FullPrecision()
    assert make_method("uniform") == Uniform("K8V4")
    assert make_method("uniform", precision="K4V2:2/1", bias_free="true") == Uniform(Precision(4, 2, 2, 1), True)
    assert make_method("int4", bits="2", group="16") == make_method("int4", bits=2, group=16)
    assert make_method("quarot", seed="3", clip=1).seed == 3
    assert make_method("quarot", seed="None").seed is None
    assert isinstance(make_method("quest", keep=1).keep, float)


def test_a_policy_by_its_tiers_its_rule_and_its_fields():
    paper = make_method(policy="K8V4-K2V2", alpha_high=1, alpha_low="0.05", window="32")
    assert paper == CompressionPolicy.paper("K8V4-K2V2", alpha_low=0.05, window=32)
    released = make_method("diffkv", rule="released", group_max="of-means")
    assert released == CompressionPolicy.released(group_max="of-means")
    three = make_method(tiers="K8V8-K8V4-K4V2", alphas="[2, 1, 0.02]", significance='{"queries": "last"}')
    assert three.alphas == (2.0, 1.0, 0.02)
    assert [str(tier) for tier in three.tiers] == ["K8V8", "K8V4", "K4V2"]
    assert three.significance.queries == "last"


def test_a_policy_from_a_file_with_some_fields_replaced(tmp_path):
    policy = CompressionPolicy.released("K4V4-K2V2", alpha_high=2)
    policy.save(tmp_path / "policy.json")
    assert make_method(policy_file=str(tmp_path / "policy.json")) == policy
    assert make_method(policy_file=tmp_path / "policy.json", window=8).window == 8
    with pytest.raises(ValueError, match="alpha_low, rule cannot be given beside policy_file"):
        make_method(policy_file=tmp_path / "policy.json", rule="paper", alpha_low=0)


def test_a_method_that_is_fitted_to_a_model_asks_for_one():
    made = make_method("duoattention", tiny_llama(), keep="0.5", length="32")
    assert sum(map(sum, made.retrieval)) == 3
    with pytest.raises(ValueError, match="duoattention is fitted to a model"):
        make_method("duoattention")
    with pytest.raises(ValueError, match="unknown option retrieval of method duoattention; allowed are keep, length"):
        make_method("duoattention", tiny_llama(), retrieval=[[True]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "kiwi"}, "unknown method 'kiwi'; allowed are fp16, uniform, diffkv, kvserve, int4"),
        ({"method": "kivi", "bit": 2, "wide": 1}, "unknown option bit, wide of method kivi; allowed are bits, group"),
        ({"method": "fp16", "bits": 8}, "unknown option bits of method fp16; it has none"),
        ({"method": "int4", "bits": "four"}, "bits is 'four'; it must be a whole number"),
        ({"method": "int4", "bits": 2.5}, "bits is 2.5; it must be a whole number"),
        ({"method": "int4", "bits": True}, "bits is True; it must be a whole number"),
        ({"method": "quarot", "seed": "x"}, "seed is 'x'; it must be a whole number or none"),
        ({"alpha_low": "z"}, "alpha_low is 'z'; it must be a number"),
        ({"bias_free": "maybe"}, "bias_free is 'maybe'; it must be True or False"),
        ({"decode": "x"}, "decode is 'x'; it must be algorithm-1 or two-minimum"),
        ({"rule": "x"}, "rule is 'x'; allowed are paper, released"),
        ({"policy": "K8V4"}, "tiers is 'K8V4'; write a high and a low precision"),
        ({"tiers": "K8V4-K3V2"}, "tiers is 'K8V4-K3V2'"),
        ({"tiers": "K8V4", "alphas": "1", "policy": "K8V4-K4V2"}, "alphas is '1'"),
        ({"tiers": "K8V4", "alphas": [1], "policy": "K8V4-K4V2"}, "policy cannot be given beside tiers and alphas"),
        ({"significance": "last"}, "significance is 'last'; it must be significance"),
        ({"significance": {"query": "last"}}, "unknown query; it has queries, observed, own_score"),
    ],
)
def test_refusals_name_the_option(options, message):
    with pytest.raises(ValueError, match="".join("\\" + c if c in "()[]|.?*+" else c for c in message)):
        make_method(**options)


def test_parameters_are_plain_and_complete():
    policy = make_method(policy="K8V4-K4V2", window=16)
    found = json.loads(json.dumps(parameters(policy)))
    assert found["class"] == "CompressionPolicy"
    assert found["tiers"] == ["K8V4", "K4V2"]
    assert found["significance"] == {"queries": "later", "observed": 64, "own_score": False}
    assert parameters(policy) != parameters(make_method(policy="K8V4-K4V2", window=17))
    assert parameters(make_method("h2o")) != parameters(make_method("snapkv"))
