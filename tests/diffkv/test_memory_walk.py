import pytest
import torch

from diffkv_repro.diffkv.memory_walk import _Walker, faulty_pages, random_walk, share_out


@pytest.mark.parametrize("tiers", [1, 2, 3, 4])
def test_a_walk_tries_everything_and_loses_nothing(tiers):
    walk = random_walk(300, seed=tiers, tiers=tiers, pages=30)
    assert walk.operations == 300
    assert {name for name, count in walk.done.items() if count >= 10} == {"admit", "compact", "step", "release"}
    assert walk.laps > 2
    assert walk.exhausted + walk.refused > 0
    assert (walk.lost_or_shared, walk.misplaced) == (0, 0)


def test_a_walk_repeats_itself():
    assert random_walk(60, seed=3) == random_walk(60, seed=3) != random_walk(60, seed=4)


def test_tiers_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="tiers is 5; allowed are 1 to 4"):
        random_walk(1, seed=0, tiers=5)


@pytest.mark.parametrize(
    ("harm", "lost", "misplaced"),
    [
        (lambda memory: memory.tables[0, 0, 0, 0, :1].fill_(-1), 1, 1),  # held by nobody
        (lambda memory: memory.tables[0, 0, 0, 0, :1].copy_(memory.tables[0, 0, 1, 0, :1]), 2, 1),  # one twice, one not
        (lambda memory: memory.tables[0, 0, 0, 0, :2].copy_(memory.tables[0, 0, 0, 0, :2].flip(0)), 0, 2),  # swapped
        (lambda memory: memory.ring[2:].sub_(1), 1, 2),  # the last one dropped from the list, and a wrong count
    ],
)
def test_damage_is_counted(monkeypatch, harm, lost, misplaced):
    kept = []
    monkeypatch.setattr(_Walker, "operate", lambda walker: kept.append(walker) or walker.admit([0]))
    assert random_walk(1, seed=0).lost_or_shared == 0
    (walker,) = kept
    harm(walker.memory)
    assert faulty_pages(walker.memory) == lost
    walker.compare()
    assert walker.lost_or_shared == lost
    assert walker.misplaced >= misplaced


def test_shares_never_exceed_the_prompt():
    lengths = share_out([1, 9, 200], (3, 2), 2, torch.Generator().manual_seed(0))
    assert lengths.shape == (3, 3, 2, 2)
    assert lengths.dtype == torch.int32
    assert bool((lengths >= 0).all())
    assert bool((lengths.sum(dim=-1) <= torch.tensor([1, 9, 200])[:, None, None]).all())
    assert lengths[2].float().std() > 0
