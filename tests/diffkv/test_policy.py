"""A policy refuses what makes no sense, survives a file, and puts prompt tokens where its thresholds say."""

import pytest
from cache_helpers import layout_of, place_of, prompt_of, random_call, rows_of
from hypothesis import given
from hypothesis import strategies as st

from diffkv_repro.attention_stats.significance import Significance
from diffkv_repro.core.precision import BITS, Precision
from diffkv_repro.diffkv import CompressionPolicy

PAPER, RELEASED = CompressionPolicy.paper, CompressionPolicy.released


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"alphas": (0.5, 0.6)}, r"alpha_low is 0.6 and alpha_high 0.5: it must not be larger"),
        (
            {"tiers": ("K8V4", "K4V2", "K2V2"), "alphas": (3, 1, 2)},
            r"alpha 2 is 2.0 and alpha 1 1.0: it must not be larger",
        ),
        ({"alphas": (((1, 1), (1, 1)), ((0, 0), (0, 1.5)))}, "alpha_low is .*1.5.* it must not be larger"),
        ({"alphas": (1.0, -0.1)}, "alpha of tier 1 is -0.1; alphas are finite and not negative"),
        ({"alphas": (float("nan"), 0.0)}, "alpha of tier 0 is nan; alphas are finite and not negative"),
        ({"alphas": (float("inf"), 0.0)}, "alpha of tier 0 is inf"),
        ({"alphas": (1.0,)}, "2 tiers have 1 alphas; each tier needs one"),
        ({"tiers": (), "alphas": ()}, "0 tiers have 0 alphas"),
        ({"tiers": ("K8V4", "K3V2")}, "value_bits|key_bits is 3; allowed are 1, 2, 4, 8, 16"),
        ({"tiers": ("K8V4", "INT4")}, "unknown precision 'INT4'"),
        ({"window": 0}, "window is 0; it must be a whole number of at least 1"),
        ({"window": -1}, "window is -1"),
        ({"prompt_divisor": "i"}, "prompt_divisor is 'i'; allowed are position, length"),
        ({"decode_divisor": "N"}, "decode_divisor is 'N'; allowed are position, length"),
        ({"decode": "algorithm-2"}, "decode is 'algorithm-2'; allowed are algorithm-1, two-minimum"),
        ({"group_max": "mean"}, "group_max is 'mean'; allowed are of-means, each-step"),
        ({"tiers": ("K8V4",), "alphas": (1,), "decode": "two-minimum"}, "two-minimum rule is of two tiers, not 1"),
        ({"tiers": ("K8V4", "K4V2", "K2V2"), "alphas": (2, 1, 0), "decode": "two-minimum"}, "of two tiers, not 3"),
    ],
)
def test_bad_parameters_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        CompressionPolicy(**arguments)


@pytest.mark.parametrize("tiers", ["K8V4", "K8V4-K4V2-K2V2", "", "K8V4/K4V2"])
def test_two_tiers_are_written_high_and_low(tiers):
    with pytest.raises(ValueError, match=r"high and a low precision|unknown precision"):
        PAPER(tiers)


def test_tables_of_alphas_have_one_shape():
    with pytest.raises(ValueError):
        CompressionPolicy(alphas=(((1.0, 1.0),), ((0.5,), (0.5, 0.5))))
    with pytest.raises(ValueError):
        CompressionPolicy(alphas=(((1.0, 1.0, 1.0),), ((0.5, 0.5),)))


@pytest.mark.parametrize(("tiers", "what"), [("K4V2:3/1-K2V2", "3 key"), ("K8V4-K4V2:1/5", "5 value")])
def test_groups_that_do_not_divide_are_refused_for_the_model(tiers, what):
    with pytest.raises(ValueError, match=f"{what} groups do not divide a head_dim of 16"):
        PAPER(tiers).check(layout_of(head_dim=16))


@pytest.mark.parametrize("name", ["K16V4:3/1", "K4V16:1/3", "K16V16:3/5"])
def test_what_passes_the_check_can_be_stored(name):
    policy = CompressionPolicy((name,), (0.0,))
    try:
        policy.check(layout_of(head_dim=8))
    except ValueError:
        return
    place = place_of(head_dim=8)
    policy.layer(place, "packed").prefill(prompt_of(random_call()), rows_of(2, 17))


@pytest.mark.parametrize("table", [((1.0, 1.0),), ((1.0,),) * 3, ((1.0, 1.0, 1.0),) * 3, ((1.0, 1.0), (1.0,), (1.0,))])
def test_a_table_of_another_shape_is_refused_for_the_model(table):
    if len({len(row) for row in table}) > 1:
        with pytest.raises(ValueError):
            CompressionPolicy(("K8V4",), (table,))
        return
    with pytest.raises(ValueError, match=r"alphas are for \d layers of .* KV heads, the model has 3 of 2"):
        CompressionPolicy(("K8V4",), (table,)).check(layout_of(layers=3))


def test_a_policy_that_fits_passes():
    layout = layout_of(layers=3, head_dim=16)
    PAPER().check(layout)
    RELEASED("K8V4:1/2-K4V2:2/4").check(layout)
    CompressionPolicy(alphas=(((1.0, 2.0),) * 3, 0.5)).check(layout)


@st.composite
def policies(draw):
    bits, groups = st.sampled_from(BITS), st.integers(1, 4)
    tiers = tuple(draw(st.lists(st.builds(Precision, bits, bits, groups, groups), min_size=1, max_size=4, unique=True)))
    levels = sorted((draw(st.floats(0, 1e3)) for _ in tiers), reverse=True)
    if draw(st.booleans()):
        levels[-1] = tuple((levels[-1], levels[-1] / 3) for _ in range(draw(st.integers(1, 3))))
    kind = st.builds(Significance, st.just("last"), st.integers(1, 99), st.booleans())
    return CompressionPolicy(
        tiers, tuple(levels), draw(st.integers(1, 999)), draw(st.one_of(st.just(Significance()), kind)),
        draw(st.sampled_from(["position", "length"])),
        draw(st.sampled_from(["algorithm-1", "two-minimum"])) if len(tiers) == 2 else "algorithm-1",
        draw(st.sampled_from(["position", "length"])), draw(st.sampled_from(["of-means", "each-step"])),
        draw(st.booleans()),
    )  # fmt: skip


@given(policies())
def test_a_file_holds_all_of_a_policy(tmp_path_factory, policy):
    path = tmp_path_factory.mktemp("policies") / "policy.json"
    policy.save(path)
    again = CompressionPolicy.load(path)
    assert again == policy
    assert hash(again) == hash(policy)
    assert again.label == policy.label


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ("{", "Expecting"),
        ("null", ""),
        ("[]", ""),
        ("[1]", ""),
        ('"K8V4"', ""),
        ('{"alpha": [1, 0]}', "unknown alpha; a policy has alphas, "),
        ('{"alphas": [0, 1]}', "must not be larger"),
        ('{"alphas": [[[1, 1, 1]], [[0, 0]]]}', ""),
        ('{"alphas": [1, "x"]}', ""),
        ('{"alphas": [1, null]}', ""),
        ('{"alphas": [NaN, 0]}', "finite"),
        ('{"tiers": ["K8V4", "K4"]}', "unknown precision 'K4'"),
        ('{"tiers": null}', ""),
        ('{"window": "64"}', ""),
        ('{"window": 0}', "window is 0"),
        ('{"window": 2.5}', "window is 2.5"),
        ('{"significance": {"queries": "all"}}', "queries is 'all'"),
        ('{"significance": {"question": "all"}}', "question"),
        ('{"significance": "last"}', ""),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path, text, message):
    path = tmp_path / "policy.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"policy\.json") as error:
        CompressionPolicy.load(path)
    assert message in str(error.value)


def test_a_file_that_is_not_there_or_not_text_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"gone\.json cannot be read: No such file"):
        CompressionPolicy.load(tmp_path / "gone.json")
    with pytest.raises(ValueError, match="cannot be read"):
        CompressionPolicy.load(tmp_path)
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"bytes\.json"):
        CompressionPolicy.load(tmp_path / "bytes.json")


def test_presets_are_the_two_versions_of_the_algorithm():
    assert PAPER() == CompressionPolicy()
    released = RELEASED(alpha_high=3, window=32)
    assert (released.decode, released.group_max, released.alphas) == ("two-minimum", "each-step", (3.0, 0.02))
    assert released.significance == Significance("last", 64, own_score=True)
    assert RELEASED(decode="algorithm-1").decode == "algorithm-1"


def test_the_label_says_what_it_is():
    assert "K8V4-K4V2, alpha 1/0.02" in PAPER().label
    assert "bias-free" not in PAPER().label
    mixed = CompressionPolicy(alphas=(((1.0, 2.0),), 0.5), bias_free=True).label
    assert "alpha per head/0.5" in mixed
    assert "bias-free" in mixed
    assert PAPER().label != RELEASED().label
