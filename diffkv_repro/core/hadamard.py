"""Hadamard matrices, and the rotations made of them that spread an outlier channel over all channels.

A Hadamard matrix has entries of 1 and -1 and orthogonal rows. Orders that are a power of two come from Sylvester's
doubling; head dimensions such as 80 = 4 x 20 and 96 = 8 x 12 are doublings of a matrix by Paley, who built them from
the squares modulo a prime.
"""

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=16)
def _known(order: int) -> Tensor | None:
    """A Hadamard matrix float32 [order, order] as a doubling of the smallest Paley matrix; None where none fits."""
    if order < 1:
        return None
    core = order
    powers = 1
    while core % 2 == 0:
        core, powers = core // 2, powers * 2
    # The odd part alone is rarely an order; give it back factors of two until it is one.
    while powers >= 1:
        seed = torch.ones(1, 1) if core == 1 else _paley(core)
        if seed is not None:
            return torch.kron(_sylvester(powers), seed)
        core, powers = core * 2, powers // 2
    return None


def hadamard(order: int) -> Tensor:
    """Hadamard matrix of ``order`` with entries +-1, float32 [order, order]; symmetric for powers of two.

    Raises ValueError for orders that neither Sylvester nor Paley (over a prime) give, such as odd ones or 92.
    """
    matrix = _known(order)
    if matrix is None:
        raise ValueError(
            f"no Hadamard matrix of order {order} is known here; allowed are 1, 2 and 2**k * m where m - 1 is a prime "
            "that leaves 3 when divided by 4, or m / 2 - 1 one that leaves 1"
        )
    return matrix.clone()


def rotation(order: int, *, seed: int | None = None, device: torch.device | str = "cpu") -> Tensor:
    """Orthonormal matrix float32 [order, order] for ``x @ rotation``; its transpose undoes it.

    The normalised Hadamard matrix where there is one. For any other order its odd part is turned by a discrete cosine
    transform, whose entries differ in size, but by a factor of at most the root of two from even. With ``seed`` the
    channels get random signs first, so that different seeds give different rotations.
    """
    if order < 1:
        raise ValueError(f"order is {order}; it must be at least 1")
    matrix = _known(order)
    if matrix is None:
        odd = order
        while odd % 2 == 0:
            odd //= 2
        matrix = torch.kron(_sylvester(order // odd), _cosines(odd) * odd**0.5)
    matrix = matrix / order**0.5
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        signs = 2.0 * torch.randint(0, 2, (order, 1), generator=generator) - 1
        matrix = signs * matrix
    return matrix.to(device)


def _sylvester(order: int) -> Tensor:
    """Order a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < order:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix


def _paley(order: int) -> Tensor | None:
    """Paley's first or second construction over a prime field; None where ``order`` has neither."""
    if order % 4:
        return None
    if _is_prime(order - 1):  # leaves 3 when divided by 4, as order is a multiple of 4
        return _jacobsthal(order - 1, -1.0) + torch.eye(order)
    prime = order // 2 - 1
    if prime % 4 == 1 and _is_prime(prime):
        symmetric = _jacobsthal(prime, 1.0)
        return torch.kron(symmetric, torch.tensor([[1.0, 1.0], [1.0, -1.0]])) + torch.kron(
            torch.eye(prime + 1), torch.tensor([[1.0, -1.0], [-1.0, -1.0]])
        )
    return None


def _jacobsthal(prime: int, corner: float) -> Tensor:
    """Conference matrix [prime + 1, prime + 1]: which differences are squares, bordered by 1 and ``corner``."""
    residue = -torch.ones(prime)
    residue[torch.arange(1, prime) ** 2 % prime] = 1.0
    residue[0] = 0.0
    index = torch.arange(prime)
    matrix = torch.zeros(prime + 1, prime + 1)
    matrix[0, 1:], matrix[1:, 0] = 1.0, corner
    matrix[1:, 1:] = residue[(index[:, None] - index) % prime]
    return matrix


def _cosines(order: int) -> Tensor:
    """Orthonormal discrete cosine transform."""
    index = torch.arange(order, dtype=torch.float64)
    matrix = torch.cos(torch.pi / order * (index + 0.5) * index[:, None]) * (2 / order) ** 0.5
    matrix[0] = order**-0.5
    return matrix.float()


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))
