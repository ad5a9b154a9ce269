"""Hadamard matrices are what they are defined to be, and rotations undo themselves."""

import pytest
import torch

from diffkv_repro.core.hadamard import hadamard, rotation


@pytest.mark.parametrize(
    "order", [1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 64, 72, 80, 96, 112, 128, 160, 256]
)
def test_entries_are_signs_and_rows_are_orthogonal(order):
    matrix = hadamard(order)
    assert matrix.shape == (order, order)
    assert bool((matrix.abs() == 1).all())
    assert torch.equal(matrix @ matrix.T, order * torch.eye(order))


def test_powers_of_two_are_sylvesters():
    expected = [[(-1) ** bin(row & column).count("1") for column in range(16)] for row in range(16)]
    assert hadamard(16).tolist() == expected


@pytest.mark.parametrize("order", [0, -4, 3, 6, 18, 92])
def test_an_order_without_a_construction_is_refused_by_name(order):
    with pytest.raises(ValueError, match=f"order {order} "):
        hadamard(order)


def test_the_caller_may_change_what_it_gets():
    hadamard(8).zero_()
    assert hadamard(8).abs().sum() == 64


@pytest.mark.parametrize("order", [1, 2, 6, 7, 16, 36, 64, 80, 92, 96, 128])
@pytest.mark.parametrize("seed", [None, 3])
def test_rotations_of_any_order_are_orthonormal(order, seed):
    turn = rotation(order, seed=seed)
    assert torch.allclose(turn @ turn.T, torch.eye(order), atol=1e-5)
    # No channel keeps more of itself than a cosine transform of its odd part would leave it.
    assert turn.abs().max() <= (2 / order) ** 0.5 + 1e-6


def test_an_outlier_is_spread_evenly():
    vector = torch.zeros(96)
    vector[17] = 96**0.5
    assert torch.allclose((vector @ rotation(96)).abs(), torch.ones(96), atol=1e-5)


def test_signs_are_repeatable_and_differ_between_seeds():
    assert torch.equal(rotation(64, seed=5), rotation(64, seed=5))
    assert not torch.equal(rotation(64, seed=5), rotation(64, seed=6))
    assert torch.equal(rotation(64, seed=5).abs(), rotation(64).abs())


def test_a_rotation_needs_an_order():
    with pytest.raises(ValueError, match="order is 0"):
        rotation(0)
