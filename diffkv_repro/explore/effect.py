"""``effect_of``: what a policy does to a text whose statistics are kept; tens of milliseconds, no model is run."""

from dataclasses import dataclass, fields

import pandas as pd
import torch
from torch import Tensor

from diffkv_repro.cache import CompressedCache, Method, Session
from diffkv_repro.cache.attention import attend
from diffkv_repro.cache.tiered import TieredLayer
from diffkv_repro.core.accounting import KVBytes
from diffkv_repro.core.threads import one_thread
from diffkv_repro.explore.statistics import TextStatistics

PRUNED = "pruned"


@dataclass(frozen=True)
class Effect:
    """What ``method`` does to the prompt of ``statistics``.

    ``layers`` are those with full attention, the ones that are compressed. ``tiers`` int8 [layers, kv_heads, tokens]:
    index into ``names``, -1 for pruned. ``size`` of the whole cache. ``errors`` [layers]: error of the attention output
    of the observed tokens, over its length (L2 over all heads). ``changes`` [observed]: change of each margin, to
    first order.
    """

    statistics: TextStatistics
    method: Method
    layers: tuple[int, ...]
    names: tuple[str, ...]
    tiers: Tensor
    size: KVBytes
    errors: Tensor
    changes: Tensor

    @property
    def agreement(self) -> float:
        """Predicted share of the observed tokens after which the same next token stays the most likely one."""
        return self.statistics.agreement(self.changes)

    @property
    def shares(self) -> dict[str, float]:
        """Share of the tokens in each tier, and pruned, over layers and heads."""
        total = self.tiers.numel()
        counts = {name: int((self.tiers == index).sum()) / total for index, name in enumerate(self.names)}
        return counts | {PRUNED: int((self.tiers < 0).sum()) / total}

    def bytes_table(self) -> pd.DataFrame:
        """Bytes item by item and their share of FP16 in percent; then the nominal and the true total."""
        items = [(item.name, getattr(self.size, item.name)) for item in fields(self.size) if item.name != "full"]
        nominal = self.size.payload + self.size.window
        rows = [*items, ("nominal: codes alone", nominal), ("true: everything", self.size.total)]
        rows.append(("FP16", self.size.full))
        table = pd.DataFrame(rows, columns=["item", "bytes"]).set_index("item")
        return table.assign(**{"% of FP16": (100 * table["bytes"] / self.size.full).round(2)})


def effect_of(statistics: TextStatistics, method: Method) -> Effect:
    """The prompt as ``method`` stores it, through the very cache that a model would use, and what that changes.

    The observed tokens attend to it with the queries that they have when nothing is compressed, and their own keys and
    values enter at the precision of new tokens. Raises ValueError for a method that does not put tokens into tiers.
    """
    session = Session(statistics.loaded.model, method, "simulated")
    cache = session.new_cache()
    with one_thread(), torch.no_grad():
        cache.admit(statistics.prompts, statistics.rows)
        full = [layer for layer, own in enumerate(session.layout.layers) if own.kind == "full"]
        kinds = {type(cache.layers[layer]).__name__ for layer in full}
        if not all(isinstance(cache.layers[layer], TieredLayer) for layer in full):
            raise ValueError(f"{method.label} keeps its tokens in {', '.join(sorted(kinds))}, not in tiers")
        found = [_of_layer(statistics, cache, layer) for layer in full]
    store = cache.layers[full[0]].store
    return Effect(
        statistics=statistics,
        method=method,
        layers=tuple(full),
        names=tuple(map(str, store.precisions)),
        tiers=torch.cat([cache.layers[layer].store.tier for layer in full]).cpu(),
        size=cache.kv_bytes(),
        errors=torch.stack([error for error, _ in found]).cpu(),
        changes=torch.stack([change for _, change in found]).sum(dim=0),
    )


def _of_layer(statistics: TextStatistics, cache: CompressedCache, index: int) -> tuple[Tensor, Tensor]:
    layer, call = cache.layers[index], statistics.calls[index]
    key, value, present = layer.dense(statistics.rows)
    own = layer.round_trip(call.key, call.value, statistics.positions)
    return change_of(statistics, index, attend_to(statistics, index, key, value, present, own))


def attend_to(
    statistics: TextStatistics, index: int, key: Tensor, value: Tensor, present: Tensor | None,
    own: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Attention output of the observed tokens in layer ``index`` over a prompt's ``key`` and ``value`` [1, kv_heads,
    tokens, head_dim], there where ``present`` [1, kv_heads, tokens]; ``own`` keys and values are exact unless given.
    """
    call = statistics.calls[index]
    keys, values = ((key, call.key), (value, call.value)) if own is None else ((key, own[0]), (value, own[1]))
    if present is not None:
        present = torch.nn.functional.pad(present, (0, call.query.shape[2]), value=True)
    return attend(call, torch.cat(keys, dim=2), torch.cat(values, dim=2), present)[0]


def change_of(statistics: TextStatistics, index: int, output: Tensor) -> tuple[Tensor, Tensor]:
    """Error of ``output`` of layer ``index`` over the exact one's length, and the change [observed] of each margin."""
    exact = statistics.outputs[index]
    difference = (output - exact).float()
    change = (statistics.slopes[index].float() * difference).flatten(1).sum(dim=1)
    return difference.norm() / exact.float().norm(), change
