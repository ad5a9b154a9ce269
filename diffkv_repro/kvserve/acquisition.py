"""What a candidate is worth trying: equation 4 of KVServe, the released code's variant, constrained improvement."""

import numpy as np
import torch

_SMALLEST_WEIGHT = 0.1
_DECAY = 0.99
LATER = 5  # exploration ends, and pruning begins, after this fraction of the budget


def exploration_weight(iteration: int, budget: int) -> float:
    """Weight lambda of exploration: 0.99 to the iteration, at least 0.1; halved after a fifth of the budget."""
    weight = max(_SMALLEST_WEIGHT, _DECAY**iteration)
    return weight / 2 if iteration > budget / LATER else weight


def log_feasible(mean: np.ndarray, deviation: np.ndarray, least: float) -> np.ndarray:
    """Logarithm of the probability that a quality of ``mean`` and ``deviation`` is at least ``least``."""
    from botorch.utils.probability.utils import log_ndtr

    return log_ndtr(torch.as_tensor((mean - least) / deviation, dtype=torch.float64)).numpy()


def equation_4(
    ratios: np.ndarray,
    mean: np.ndarray,
    deviation: np.ndarray,
    least: float,
    weight: float,
    *,
    released: bool = False,
    mean_ratio: float = 1.0,
) -> np.ndarray:
    """CR P(feasible) + weight sigma / sigma_max; the ``released`` code's second term is ``mean_ratio`` times larger."""
    exploration = weight * deviation / deviation.max()
    return ratios * np.exp(log_feasible(mean, deviation, least)) + exploration * (mean_ratio if released else 1.0)


def constrained_improvement(
    ratios: np.ndarray, mean: np.ndarray, deviation: np.ndarray, least: float, best: float | None
) -> np.ndarray:
    """Logarithm of the expected improvement of the ratio over ``best`` times P(feasible), P(feasible) without a best.

    BoTorch's ``LogConstrainedExpectedImprovement`` for an objective without uncertainty: ratios are known. Candidates
    that would not improve rank below all that would, by P(feasible).
    """
    feasible = log_feasible(mean, deviation, least)
    if best is None:
        return feasible
    gain = ratios - best
    return np.where(gain > 0, np.log(np.maximum(gain, 1e-300)) + feasible, feasible - 1e6)
