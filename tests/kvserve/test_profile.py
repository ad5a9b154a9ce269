"""A profile is one line, one YAML document, one hash; names are the papers' methods."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from diffkv_repro import kvserve
from diffkv_repro.kvserve.codecs import Zstd
from diffkv_repro.kvserve.entropy import Ans, RangeCoding
from diffkv_repro.kvserve.grids import KEPT
from diffkv_repro.kvserve.ladders import HeadLadder, MixHQ
from diffkv_repro.kvserve.named import NAMED
from diffkv_repro.kvserve.profile import Profile
from diffkv_repro.kvserve.quantizers import Kivi, Uniform
from diffkv_repro.kvserve.space import SPACES, Space, level_pairs, space
from diffkv_repro.kvserve.transforms import Hadamard, KeyBias


@pytest.mark.parametrize(
    ("profile", "line"),
    [
        (Profile.named("kvserve-hadamard"), "hadamard | mixhq r=0.8 K12/6 V8/4 | ans"),
        (Profile(), "none | none | none"),
        (Profile.named("kivi-2bit"), "none | kivi 2-bit g=32 R=128 | bitpack"),
        (Profile.named("cachegen-1"), "none | cachegen level 1 | range per=channel"),
        (Profile.named("quarot-4bit"), "hadamard | uniform K16 V16 token/token per head | bitpack"),
        (
            Profile((KeyBias(), Hadamard(5)), Uniform(), Zstd(level=3)),
            "keybias + hadamard seed=5 | uniform K16 V16 channel/token | zstd level=3",
        ),
        (Profile.named("duoattention"), "none | heads 0.2:16bit 0.8:0 sink=128 recent=256 | none"),
    ],
)  # fmt: skip
def test_a_profile_is_one_readable_line(profile, line):
    assert str(profile) == line


profiles = st.sampled_from(list(NAMED.values())) | st.builds(
    lambda space, index: space[index % len(space)], st.sampled_from(list(SPACES.values())), st.integers(0, 10_000)
)


@given(profiles)
def test_yaml_and_back(profile):
    again = Profile.from_yaml(profile.to_yaml())
    assert again == profile
    assert hash(again) == hash(profile)
    assert again.digest == profile.digest
    assert {profile: 1}[again] == 1


def test_yaml_may_be_short():
    text = "transforms: hadamard\nquantizer: {name: mixhq, ratio: 0.5}\ncodec: ans\n"
    assert Profile.from_yaml(text) == Profile((Hadamard(),), MixHQ(0.5), Ans())
    assert Profile.from_yaml("{}") == Profile()
    assert Profile(Hadamard(), Kivi(), Ans()).transforms == (Hadamard(),)
    steps = yaml.safe_load(Profile((), HeadLadder(((KEPT, KEPT), (0, 0)), (0.2, 0.8)), Ans()).to_yaml())
    assert steps["quantizer"]["steps"] == [[KEPT, KEPT], [0, 0]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("transforms: rotate", "unknown transform 'rotate'; allowed are hadamard, delta, affine, keybias, unrope"),
        ("quantizer: int3", "unknown quantizer 'int3'; allowed are none, uniform, kivi, mixhq, heads, layers, tokens"),
        ("codec: {name: ans, level: 3}", "ans has no parameter 'level'; allowed are shuffle, per"),
        ("codec: {level: 3}", "needed is a name, or a mapping with a name"),
        ("speed: 3", "a profile has no 'speed'"),
        ("- 1", "needed is a mapping"),
        ("a: [", "a profile is not YAML"),
        ("transforms: [hadamard, hadamard, hadamard, delta, delta, delta, delta, delta, delta]", "at most 8"),
        ("quantizer: {name: kivi, bits: two}", "bits is 'two'; allowed are whole numbers from 1 to 8"),
    ],
)
def test_bad_profiles_are_named(text, message):
    with pytest.raises(ValueError, match=message):
        Profile.from_yaml(text)


def test_parts_have_their_places():
    with pytest.raises(ValueError, match="is no codec"):
        Profile((), Kivi(), Kivi())
    with pytest.raises(ValueError, match="is no transform"):
        Profile((Ans(),), Kivi(), Ans())
    with pytest.raises(ValueError, match=r"unknown profile 'kivi'; allowed are none, .*kivi-2bit, kivi-4bit"):
        Profile.named("kivi")


def test_imports_run_downwards_only():
    found = {}
    for path in Path(kvserve.__file__).parent.glob("*.py"):
        nodes = [
            node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ImportFrom)
        ]
        found[path.stem] = {
            node.module.split(".")[1] for node in nodes if (node.module or "").startswith("diffkv_repro.")
        }
    assert set().union(*found.values()) == {"core", "kernels", "models", "attention_stats", "diffkv", "kvserve"}
    assert [module for module, ours in found.items() if "diffkv" in ours] == ["diffkv_pages"]  # the one bridge


def test_the_grids_have_the_papers_sizes():
    assert len(level_pairs((16, 12, 10, 8, 6, 4))) == 21
    assert {name: len(grid) for name, grid in SPACES.items()} == {
        "none": 1, "modules": 6 * 8 * 6, "coarse": 576, "headwise": 3969, "fine": 7938, "reduced": 216, "handful": 18,
        "artifact": 144, "tiers": 90,
    }  # fmt: skip


@pytest.mark.parametrize("name", SPACES)
def test_a_space_has_an_order_and_ids_that_stay(name):
    grid = space(name)
    listed = list(grid)
    assert len(listed) == len(grid) == len(set(listed)) == len(set(grid.ids))
    for index in {0, len(grid) // 3, len(grid) - 1}:
        assert grid[index] == listed[index]
        assert grid.index_of(listed[index]) == index
        assert grid.ids[index] == listed[index].digest


def test_ids_are_the_same_in_another_process():
    script = "from diffkv_repro.kvserve.space import space; print(space('artifact').ids[7], space('artifact')[7])"
    seen = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert seen.strip() == f"{space('artifact').ids[7]} {space('artifact')[7]}"


def test_spaces_refuse_what_they_do_not_hold():
    with pytest.raises(ValueError, match="unknown space 'huge'; allowed are none, modules, coarse, headwise, fine, ar"):
        space("huge")
    with pytest.raises(ValueError, match=r"kivi.* is not in space artifact"):
        space("artifact").index_of(Profile.named("kivi-2bit"))
    with pytest.raises(IndexError, match="candidate 144"):
        space("artifact")[144]
    with pytest.raises(ValueError, match="they must differ"):
        Space("twice", ((),), (Kivi(), Kivi()), (RangeCoding(),))
