"""What transforms know beside keys and values: learnt affine maps; a model's rotary embedding and key biases."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from diffkv_repro.core.files import atomic_path
from diffkv_repro.kvserve.layout import KV, KVLayout
from diffkv_repro.kvserve.registry import require_choice
from diffkv_repro.models.rope import Rope, key_biases
from diffkv_repro.models.zoo import LoadedModel

KINDS = ("diag", "full")
_LIMIT = 5.0  # of the logarithm of a channel's scale, as in KVServe's code


@dataclass(frozen=True, eq=False)
class AffineMaps:
    """x -> (x - shift) matrix of every head: ``shift`` [2, layers, kv_heads, head_dim], keys first; ``matrix``
    [2, layers, kv_heads, head_dim] of kind ``diag`` (a scale for each channel), else [..., head_dim, head_dim]."""

    kind: str
    shift: Tensor
    matrix: Tensor
    model: str = ""

    def __post_init__(self) -> None:
        require_choice("kind of affine map", self.kind, KINDS)
        shape = tuple(self.shift.shape)
        wanted = shape if self.kind == "diag" else (*shape, shape[-1])
        if len(shape) != 4 or shape[0] != 2 or tuple(self.matrix.shape) != wanted:
            raise ValueError(f"shift {shape} and matrix {tuple(self.matrix.shape)} are not those of {self.kind} maps")
        if not all(bool(torch.isfinite(tensor).all()) for tensor in (self.shift, self.matrix)):
            raise ValueError("an affine map holds numbers that are not finite")

    @classmethod
    def fit(cls, samples: Sequence[KV], layout: KVLayout, kind: str = "diag") -> Self:
        """Calibrate on the caches of some texts.

        ``diag`` brings all channels of a head to the same spread, exp(log scale) with the logarithm within +-5, so
        that those that share a step waste none of it. ``full`` turns a head to its principal axes, where channels are
        uncorrelated (the Karhunen-Loeve transform: what one step for all channels and an entropy coder are best at).
        """
        require_choice("kind of affine map", kind, KINDS)
        if not samples:
            raise ValueError("no sample was given to calibrate on")
        shifts, matrices = [], []
        for part in range(2):
            for layer in range(layout.layers):
                tokens = torch.cat([sample.pairs[layer][part].double() for sample in samples], dim=1)
                mean = tokens.mean(dim=1)
                centred = tokens - mean[:, None]
                shifts.append(mean)
                matrices.append(_even(centred) if kind == "diag" else _axes(centred))
        shape = (2, layout.layers, layout.kv_heads)
        shift, matrix = (torch.stack(parts).float() for parts in (shifts, matrices))
        return cls(kind, shift.view(*shape, -1), matrix.view(*shape, *matrix.shape[2:]), layout.model)

    @cached_property
    def inverse(self) -> Tensor:
        """Of every matrix, found in double precision."""
        if self.kind == "diag":
            return (1 / self.matrix.double()).float()
        return torch.linalg.inv(self.matrix.double()).float()

    @cached_property
    def digest(self) -> bytes:
        """Changes with every number."""
        parts = [tensor.contiguous().numpy().tobytes() for tensor in (self.shift, self.matrix)]
        return hashlib.sha256(self.kind.encode() + b"".join(parts)).digest()

    def save(self, path: Path) -> Path:
        """Write a safetensors file."""
        with atomic_path(path) as temporary:
            tensors = {"shift": self.shift.contiguous(), "matrix": self.matrix.contiguous()}
            save_file(tensors, temporary, metadata={"kind": self.kind, "model": self.model})
        return Path(path)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what :meth:`save` wrote. Raises ValueError for a file that is none."""
        try:
            with safe_open(path, framework="pt") as file:
                about = file.metadata() or {}
                return cls(about.get("kind", ""), file.get_tensor("shift"), file.get_tensor("matrix"), about["model"])
        except (SafetensorError, KeyError) as error:
            raise ValueError(f"{path} holds no affine maps: {error}") from error

    def require(self, layout: KVLayout) -> None:
        """Raise ValueError where the maps are of another shape or model."""
        shape = (layout.layers, layout.kv_heads, layout.head_dim)
        if tuple(self.shift.shape[1:]) != shape or (self.model and layout.model and self.model != layout.model):
            raise ValueError(
                f"affine maps are of {tuple(self.shift.shape[1:])} {self.model!r}; needed are {shape} {layout.model!r}"
            )


class RotaryKeys:
    """A model's rotary embedding and the bias of its key projections, both known without data."""

    def __init__(self, rope: Rope, biases: list[Tensor | None], description: dict) -> None:
        self.rope = rope
        self._biases = biases
        known = [b"" if bias is None else bias.float().cpu().numpy().tobytes() for bias in biases]
        words = json.dumps(description, sort_keys=True, default=str).encode()
        self.digest = hashlib.sha256(words + b"\0".join(known)).digest()

    @classmethod
    def of(cls, loaded: LoadedModel) -> Self:
        """Of a loaded model. Raises UnsupportedAttention where keys have no rotary embedding or fused projections."""
        config = loaded.model.config.get_text_config()
        described = {"rope": getattr(config, "rope_parameters", None), "model": loaded.fingerprint}
        return cls(Rope(loaded.model), key_biases(loaded.model), described)

    def bias(self, layer: int, start: int, tokens: int) -> Tensor | None:
        """RoPE(bias, position) [kv_heads, tokens, head_dim] of tokens from ``start`` on; None where there is none."""
        bias = self._biases[layer]
        if bias is None:
            return None
        # No table of positions: how far a frame's ``start`` lies must not decide how much memory it takes.
        positions = torch.arange(start, start + tokens, device=bias.device)[None]
        return self.rope.rotate(bias[None, :, None].expand(1, -1, tokens, -1), positions)[0].cpu()

    def require(self, layout: KVLayout) -> None:
        """Raise ValueError where the model has another number of layers."""
        if len(self._biases) != layout.layers:
            raise ValueError(f"the rotary keys are of {len(self._biases)} layers, the layout has {layout.layers}")


def _even(centred: Tensor) -> Tensor:
    spread = centred.std(dim=1, correction=0)
    typical = spread.mean(dim=-1, keepdim=True)
    ratio = torch.where((spread > 0) & (typical > 0), typical / spread, 1.0)
    return ratio.log().clamp(-_LIMIT, _LIMIT).exp()


def _axes(centred: Tensor) -> Tensor:
    return torch.linalg.eigh(centred.transpose(1, 2) @ centred / centred.shape[1]).eigenvectors
