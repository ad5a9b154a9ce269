"""Choose alpha_high, then alpha_low, on calibration texts (DiffKV section 7.2), by a rule that is written down."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from diffkv_repro.diffkv.policy import CompressionPolicy
from diffkv_repro.evaluation.intervals import Interval
from diffkv_repro.evaluation.sweep import compare, summarise
from diffkv_repro.models.zoo import LoadedModel
from diffkv_repro.workloads.windows import Window

ALPHA_HIGH = (1.0, 2.0, 3.0, 4.0, 5.0)
ALPHA_LOW = (0.0, 0.02, 0.04, 0.06, 0.08, 0.1)


@dataclass(frozen=True)
class Calibration:
    """The policy chosen, the loss of every setting tried, and the rows behind it."""

    policy: CompressionPolicy
    added_nll: dict[CompressionPolicy, Interval]
    table: pd.DataFrame

    def summary(self) -> str:
        """One line a setting, the chosen one marked."""
        true = self.table.groupby("method", sort=False)["true"].mean()
        return "\n".join(
            f"{'->' if policy == self.policy else '  '} {policy.label}: {true[policy.label]:.1%} of FP16, +{loss} nats"
            for policy, loss in self.added_nll.items()
        )


def calibrate(
    loaded: LoadedModel,
    windows: Mapping[str, Sequence[Window]],
    folder: Path,
    *,
    base: CompressionPolicy,
    prompt_tokens: int,
    tolerance: float = 0.05,
    alpha_high: Sequence[float] = ALPHA_HIGH,
    alpha_low: Sequence[float] = ALPHA_LOW,
    **options,
) -> Calibration:
    """Sweep ``alpha_high`` with nothing pruned, then ``alpha_low`` at the one chosen.

    Rule, for each in turn: the largest value (the least memory) whose mean added negative log-likelihood over FP16 is
    at most ``tolerance`` nats a token; the smallest value where none is. ``base`` gives everything else of the policy.
    """
    if len(base.tiers) != 2:
        raise ValueError(f"the base policy has {len(base.tiers)} tiers; alpha_high and alpha_low are of two")
    if not alpha_high or not alpha_low:
        raise ValueError("alpha_high and alpha_low each need at least one value to try")
    highs = [replace(base, alphas=(high, 0.0)) for high in sorted(alpha_high)]
    first = compare(loaded, windows, highs, folder, prompt_tokens=prompt_tokens, **options)
    chosen = _largest_within(highs, summarise(first, "added_nll"), tolerance)
    lows = [replace(base, alphas=(chosen.alphas[0], low)) for low in sorted(alpha_low) if low <= chosen.alphas[0]]
    second = compare(loaded, windows, lows, folder, prompt_tokens=prompt_tokens, **options)
    table = pd.concat([first, second]).drop_duplicates(["text", "window", "method"])
    losses = summarise(table, "added_nll")
    policy = _largest_within(lows, losses, tolerance) if lows else chosen
    tried = list(dict.fromkeys([*highs, *lows]))
    return Calibration(policy, {item: losses[item.label] for item in tried}, table)


def _largest_within(
    policies: Sequence[CompressionPolicy], losses: dict[str, Interval], tolerance: float
) -> CompressionPolicy:
    within = [policy for policy in policies if losses[policy.label].mean <= tolerance]
    return within[-1] if within else policies[0]
