"""Choose alpha_high, then alpha_low, on texts and on a task (DiffKV section 7.2), by a rule that is written down."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from diffkv_repro.cache import FullPrecision
from diffkv_repro.core.files import write_text
from diffkv_repro.diffkv.policy import CompressionPolicy
from diffkv_repro.evaluation.generation import run_tasks_of
from diffkv_repro.evaluation.intervals import Interval, mean_interval
from diffkv_repro.evaluation.sweep import compare, summarise
from diffkv_repro.models.zoo import LoadedModel
from diffkv_repro.workloads.tasks import Item
from diffkv_repro.workloads.windows import Window

ALPHA_HIGH = (1.0, 2.0, 3.0, 4.0, 5.0)
ALPHA_LOW = (0.0, 0.02, 0.04, 0.06, 0.08, 0.1)

# A difference of two means of many zeros and ones: 0.98 - 0.96 is to be within 0.02.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class TaskRule:
    """A setting's accuracy on ``items`` may be at most ``max_drop`` below that of FP16. Items are kept in ``finished``.

    ``batch_size`` as in :func:`~diffkv_repro.evaluation.generation.run_tasks_of`.
    Text alone is no guard: a policy that adds few nats on prose can forget most of a list that it is asked about.
    """

    items: Sequence[Item]
    max_drop: float = 0.02
    finished: Path | None = None
    batch_size: int | None = None

    def __post_init__(self) -> None:
        if not self.items:
            raise ValueError("a task rule needs at least one item")
        if not 0 <= self.max_drop <= 1:
            raise ValueError(f"max_drop is {self.max_drop}; allowed are 0 to 1, a share of the items")

    def correct(self, loaded: LoadedModel, method: Any) -> list[float]:
        """1 for each item that is answered rightly through the cache of ``method``, else 0."""
        # On CUDA the items of one policy are answered before a second process has started.
        workers = None if loaded.device.type == "cpu" else 1
        answers = run_tasks_of(
            loaded, self.items, {"": method}, batch_size=self.batch_size, finished=self.finished, workers=workers
        )[""]
        return [float(answer.correct) for answer in answers]


@dataclass(frozen=True)
class Calibration:
    """The policy chosen, what every setting tried loses, the rows behind it, and the ``rule`` in words.

    ``added_nll`` in nats a token on texts; ``drop`` in accuracy on the items of a task, below FP16, where there is a
    task rule. ``kept`` is False where no setting was within the rule, and the smallest thresholds were taken.
    """

    policy: CompressionPolicy
    added_nll: dict[CompressionPolicy, Interval]
    table: pd.DataFrame
    rule: str = ""
    drop: dict[CompressionPolicy, Interval] = field(default_factory=dict)
    kept: bool = True

    def summary(self) -> str:
        """The rule, then one line a setting, the chosen one marked."""
        true = self._true()
        lines = [self.rule] if self.drop else []
        for policy, loss in self.added_nll.items():
            line = f"{'->' if policy == self.policy else '  '} {policy.label}: {true[policy]:.1%} of FP16, +{loss} nats"
            lines.append(line + (f", accuracy -{self.drop[policy]}" if policy in self.drop else ""))
        if not self.kept:
            lines.append("no setting is within the rule; the smallest thresholds were taken")
        return "\n".join(lines)

    def save(self, path: Path) -> Path:
        """Write the policy to ``path``, and beside it the rule and what each setting tried gave; returns that path.

        Beside it, because a policy file holds the fields of :class:`CompressionPolicy` and nothing else.
        """
        beside = Path(path).with_suffix(".calibration.json")
        true = self._true()
        tried = [
            {
                "setting": policy.label, "alphas": policy.alphas, "true": float(true[policy]), "added_nll": vars(loss),
                **({"accuracy_drop": vars(self.drop[policy])} if policy in self.drop else {}),
            }
            for policy, loss in self.added_nll.items()
        ]  # fmt: skip
        document = {"rule": self.rule, "within_the_rule": self.kept, "chosen": self.policy.label, "tried": tried}
        self.policy.save(path)
        return write_text(beside, json.dumps(document, indent=1) + "\n")

    def _true(self) -> dict[CompressionPolicy, float]:
        sizes = self.table.groupby("method", sort=False)["true"].mean()
        return {policy: sizes[policy.label] for policy in self.added_nll}


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
    task: TaskRule | None = None,
    **options,
) -> Calibration:
    """Sweep ``alpha_high`` with nothing pruned, then ``alpha_low`` at the one chosen.

    Rule, for each in turn: the largest value (the least memory) whose mean added negative log-likelihood over FP16 is
    at most ``tolerance`` nats a token and, with a ``task``, whose accuracy is at most its ``max_drop`` below FP16; the
    smallest value where none is. ``base`` gives everything else of the policy.
    """
    if len(base.tiers) != 2:
        raise ValueError(f"the base policy has {len(base.tiers)} tiers; alpha_high and alpha_low are of two")
    if not alpha_high or not alpha_low:
        raise ValueError("alpha_high and alpha_low each need at least one value to try")
    drop: dict[CompressionPolicy, Interval] = {}
    exact = task.correct(loaded, FullPrecision()) if task else []

    def largest_within(policies: Sequence[CompressionPolicy], losses: dict[str, Interval]) -> CompressionPolicy | None:
        within = [policy for policy in policies if losses[policy.label].mean <= tolerance]
        for policy in reversed(within if task else []):  # the task is asked only where the texts allow it
            if policy not in drop:
                pairs = zip(exact, task.correct(loaded, policy), strict=True)
                drop[policy] = mean_interval([full - own for full, own in pairs])
            if drop[policy].mean <= task.max_drop + _ROUNDING:
                return policy
        return None if task or not within else within[-1]

    highs = [replace(base, alphas=(high, 0.0)) for high in sorted(alpha_high)]
    first = compare(loaded, windows, highs, folder, prompt_tokens=prompt_tokens, **options)
    high = largest_within(highs, summarise(first, "added_nll"))
    chosen = high or highs[0]
    lows = [replace(base, alphas=(chosen.alphas[0], low)) for low in sorted(alpha_low) if low <= chosen.alphas[0]]
    second = compare(loaded, windows, lows, folder, prompt_tokens=prompt_tokens, **options)
    table = pd.concat([first, second]).drop_duplicates(["text", "window", "method"])
    losses = summarise(table, "added_nll")
    low = largest_within(lows, losses) if lows else high
    policy = low or (lows[0] if lows else chosen)
    tried = list(dict.fromkeys([*highs, *lows]))
    added = {item: losses[item.label] for item in tried}
    return Calibration(policy, added, table, _rule(tolerance, task), drop, kept=low is not None)


def _rule(tolerance: float, task: TaskRule | None) -> str:
    texts = f"at most {tolerance:g} nats a token over FP16"
    asked = "" if task is None else (
        f", and an accuracy at most {task.max_drop:g} below FP16 on {len(task.items)} items of {task.items[0].task}"
    )  # fmt: skip
    return f"the largest alpha_high, then the largest alpha_low, with {texts}{asked}"
