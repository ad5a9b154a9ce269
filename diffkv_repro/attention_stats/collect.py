"""Attention statistics of any supported model in one prefill."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from diffkv_repro.attention_stats.blocks import blocked_attention
from diffkv_repro.models.hf import AttentionCall, attention_layout, decoder_of, intercept_attention

_BLOCK = {False: 128, True: 1024}


@dataclass(frozen=True)
class AttentionStats:
    """Labelled statistics of a batch of sequences.

    ``received`` (sequence, layer, head, token): sum of the scores a token gets from strictly later queries.
    ``later`` (sequence, token): how many later queries there are; 0 for the last token, NaN at padding.
    ``key_norm``, ``value_norm`` (sequence, layer, kv_head, token): L2 norms, keys after RoPE.
    ``rows`` (sequence, layer, head, query, token): the scores of the queries asked for.
    Padding is NaN throughout.
    """

    received: xr.DataArray
    later: xr.DataArray
    key_norm: xr.DataArray
    value_norm: xr.DataArray
    rows: xr.DataArray
    group: int

    @property
    def average(self) -> xr.DataArray:
        """Average score from later queries (DiffKV section 4), per query head; NaN for the last token."""
        return (self.received / self.later.where(self.later > 0)).rename("average_score")

    @property
    def significance(self) -> xr.DataArray:
        """Average score per KV head: the maximum over the query heads that share it (DiffKV section 4)."""
        return self.per_kv_head(self.average).rename("significance")

    def per_kv_head(self, scores: xr.DataArray) -> xr.DataArray:
        """Reduce dimension ``head`` to ``kv_head`` by the maximum over the query heads of each KV head."""
        kv_heads = scores.sizes["head"] // self.group
        owner = xr.DataArray(np.repeat(np.arange(kv_heads), self.group), dims="head", name="kv_head")
        reduced = scores.groupby(owner).max()
        return reduced.transpose("sequence", "layer", "kv_head", ..., "token")


def collect(
    model,
    input_ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    block: int | None = None,
    rows: Sequence[int] = (),
) -> AttentionStats:
    """Run one prefill of ``input_ids`` [sequences, tokens] and watch every layer's own attention.

    The model's attention is computed by the watcher itself (equal to it within rounding), so no scores are
    computed twice and the full tokens x tokens matrix never exists. The model is left as it was found.
    ``attention_mask`` [sequences, tokens] is 0 at left padding. ``rows`` are query positions whose whole
    score row is kept; negative ones count from the end. ``block`` queries are looked at together: 128 on a CPU
    and 1024 on CUDA by default, where launches cost more than memory.

    Raises ValueError for fewer than two tokens, more than the model's context, or a bad mask, block or row;
    UnsupportedAttention (with the reason) for a layout that cannot be watched.
    """
    layout = attention_layout(model)
    if block is None:
        block = _BLOCK[model.device.type == "cuda"]
    valid, rows = _checked_inputs(layout.max_positions, input_ids, attention_mask, block, rows)
    input_ids = input_ids.to(model.device)
    padded = None if bool(valid.all()) else valid.to(model.device)
    layers: dict[int, dict[str, Tensor]] = {}

    def watch(call: AttentionCall) -> Tensor:
        seen = blocked_attention(call, block=block, valid=padded, rows=rows)
        layers[call.layer] = {
            "received": seen.received,
            "key_norm": call.key.float().norm(dim=-1),
            "value_norm": call.value.float().norm(dim=-1),
            "rows": seen.rows,
        }
        return seen.output

    positions = (valid.cumsum(dim=1) - 1).clamp_min(0).to(model.device)
    with torch.inference_mode(), intercept_attention(model, watch):
        decoder_of(model)(
            input_ids=input_ids,
            attention_mask=valid.long().to(model.device),
            position_ids=positions,
            use_cache=False,
        )
    if sorted(layers) != list(range(len(layout.layers))):
        raise RuntimeError(f"the model ran the attention of layers {sorted(layers)}, not of {len(layout.layers)}")
    return _labelled(layers, valid, rows, layout.group)


def _labelled(layers: dict[int, dict[str, Tensor]], valid: Tensor, rows: tuple[int, ...], group: int) -> AttentionStats:
    present = None if bool(valid.all()) else xr.DataArray(valid.numpy(), dims=("sequence", "token"))

    def stacked(name: str, *dims: str) -> xr.DataArray:
        values = torch.stack([layers[index][name] for index in sorted(layers)], dim=1).cpu().numpy()
        return shown_where(xr.DataArray(values, dims=("sequence", "layer", *dims), name=name))

    def shown_where(array: xr.DataArray) -> xr.DataArray:
        return array if present is None else array.where(present)

    shown = stacked("rows", "head", "query", "token").assign_coords(query=list(rows))
    asked = xr.DataArray(valid.numpy()[:, list(rows)], dims=("sequence", "query"), coords={"query": list(rows)})
    remaining = valid.flip(1).cumsum(dim=1).flip(1) - 1
    return AttentionStats(
        received=stacked("received", "head", "token"),
        later=shown_where(xr.DataArray(remaining.numpy(), dims=("sequence", "token"), name="later")),
        key_norm=stacked("key_norm", "kv_head", "token"),
        value_norm=stacked("value_norm", "kv_head", "token"),
        rows=shown if present is None else shown.where(asked),
        group=group,
    )


def _checked_inputs(
    max_positions: int | None, input_ids: Tensor, attention_mask: Tensor | None, block: int, rows: Sequence[int]
) -> tuple[Tensor, tuple[int, ...]]:
    """The padding mask as booleans on the CPU, and rows as positions from the start."""
    if input_ids.ndim != 2 or input_ids.shape[0] == 0:
        raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}; it must be [sequences, tokens]")
    tokens = input_ids.shape[1]
    if block < 1:
        raise ValueError(f"block is {block}; it must be at least 1")
    if attention_mask is None:
        valid = torch.ones(input_ids.shape, dtype=torch.bool)
    else:
        if attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)}, input_ids {tuple(input_ids.shape)}"
            )
        valid = attention_mask.bool().cpu()
        if bool((valid[:, :-1] & ~valid[:, 1:]).any()):
            raise ValueError("attention_mask has padding after tokens; only padding on the left is supported")
    shortest, longest = int(valid.sum(dim=1).min()), int(valid.sum(dim=1).max())
    if shortest < 2:
        raise ValueError(f"a sequence of {shortest} tokens has no later query; at least 2 are needed")
    if max_positions is not None and longest > max_positions:
        raise ValueError(f"a sequence of {longest} tokens is longer than the model's context of {max_positions}")
    outside = [row for row in rows if not -tokens <= row < tokens]
    if outside:
        raise ValueError(f"rows {outside} are outside a sequence of {tokens} tokens")
    return valid, tuple(row % tokens for row in rows)
