"""``TierTable``: shares of the tokens that a policy keeps in each tier, per layer and KV head, of a real model.

Recording counts what the compressed cache holds; a table on disk says where its numbers come from. The replay of one
(:class:`~diffkv_repro.engine.replay.TierReplay`) makes measurements with random weights keep what real heads keep.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch

from diffkv_repro.cache import CompressedCache, compress
from diffkv_repro.core.files import write_text
from diffkv_repro.core.paths import project_root
from diffkv_repro.core.precision import Precision
from diffkv_repro.core.provenance import capture
from diffkv_repro.core.threads import one_thread
from diffkv_repro.diffkv import CompressionPolicy
from diffkv_repro.engine.replay import TierReplay
from diffkv_repro.models.hf import decoder_of
from diffkv_repro.models.zoo import LoadedModel
from diffkv_repro.workloads.windows import Window, digest

FORMAT = 1
_FIELDS = {"format", "name", "source", "tiers", "tokens", "shares", "provenance"}
_LARGEST_FILE = 16 << 20
_ROUNDING = 1e-6  # of a sum of shares written with a few digits


@dataclass(frozen=True)
class TierTable:
    """``shares`` [layers][kv_heads][tiers] of the tokens outside the window; what is left to 1 was pruned.

    ``tokens`` outside the window that the shares were counted over, in each head. ``name`` is for legends, ``source``
    says in a line what was recorded, ``provenance`` the rest. Raises ValueError for what cannot be shares.
    """

    name: str
    source: str
    tiers: tuple[Precision, ...]
    tokens: int
    shares: tuple[tuple[tuple[float, ...], ...], ...]
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("name", "source"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name).strip():
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be a text that is not empty")
        if not isinstance(self.tokens, int) or isinstance(self.tokens, bool) or self.tokens < 1:
            raise ValueError(f"tokens is {self.tokens!r}; it must be a whole number of at least 1")
        if not isinstance(self.provenance, Mapping):
            raise ValueError(f"provenance is {self.provenance!r}; it must be an object")
        if not self.tiers or len(set(self.tiers)) < len(self.tiers):
            raise ValueError(f"tiers are {', '.join(map(str, self.tiers))}; they are different and at least one")
        object.__setattr__(self, "shares", _checked(self.shares, len(self.tiers)))

    @property
    def layers(self) -> int:
        return len(self.shares)

    @property
    def kv_heads(self) -> int:
        return len(self.shares[0])

    def replay(self, *, seed: int = 0) -> TierReplay:
        """For an engine; to be spread over the heads of another shape (:meth:`TierReplay.spread`)."""
        return TierReplay(torch.tensor(self.shares), self.source, seed)

    def require_tiers(self, policy: CompressionPolicy) -> Self:
        """Itself. ValueError unless it was recorded with the tiers of ``policy``."""
        if self.tiers != policy.tiers:
            theirs, ours = ("-".join(map(str, own)) for own in (self.tiers, policy.tiers))
            raise ValueError(f"{self.name}: shares are of {theirs}; the engine measures {ours}")
        return self

    def save(self, path: Path) -> Path:
        """Write it to a JSON file that :meth:`load` reads, and return the path."""
        head = {
            "format": FORMAT, "name": self.name, "source": self.source, "tiers": [str(tier) for tier in self.tiers],
            "tokens": self.tokens, "provenance": dict(self.provenance),
        }  # fmt: skip
        text = json.dumps(head, indent=1, ensure_ascii=False, allow_nan=False)
        # A line a layer: the table is to be read, and to be compared with the next one.
        rows = ",\n".join(f"  {json.dumps(layer)}" for layer in self.shares)
        return write_text(path, f'{text[:-2]},\n "shares": [\n{rows}\n ]\n}}\n')

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what :meth:`save` wrote. Raises ValueError naming the file and what is wrong with it."""
        path = Path(path)
        try:
            if path.stat().st_size > _LARGEST_FILE:
                raise ValueError(f"{path.stat().st_size} bytes; tables of shares have at most {_LARGEST_FILE}")
            return cls._from(json.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise ValueError(f"table of shares {path} cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"table of shares {path}: {error}") from error

    @classmethod
    def _from(cls, document: Any) -> Self:
        if not isinstance(document, dict):
            raise ValueError(f"it is an object with names and values, not a {type(document).__name__}")
        if document.get("format") != FORMAT:
            raise ValueError(f"format is {document.get('format')!r}; this version reads {FORMAT}")
        for kind, names in (("lacks", _FIELDS - set(document)), ("does not know", set(document) - _FIELDS)):
            if names:
                raise ValueError(f"it {kind} {', '.join(sorted(names))}; a table has {', '.join(sorted(_FIELDS))}")
        if not isinstance(document["tiers"], list):
            raise ValueError(f"tiers is {document['tiers']!r}; it must be a list, as [K8V4, K4V2]")
        tiers = tuple(Precision.parse(tier) for tier in document["tiers"])
        return cls(**{name: document[name] for name in _FIELDS - {"format", "tiers"}}, tiers=tiers)


def _checked(shares: Any, tiers: int) -> tuple[tuple[tuple[float, ...], ...], ...]:
    """``shares`` as tuples of numbers; ValueError naming the layer and head that cannot be."""
    if not isinstance(shares, list | tuple) or not shares:
        raise ValueError(f"shares must be [layers][kv_heads][tiers], not {str(shares)[:40]}")
    heads = len(shares[0]) if isinstance(shares[0], list | tuple) else 0
    for place, layer in enumerate(shares):
        if not isinstance(layer, list | tuple) or not layer or len(layer) != heads:
            raise ValueError(f"shares of layer {place} are not [kv_heads][tiers] with the heads of layer 0")
        for head, own in enumerate(layer):
            where = f"shares of layer {place}, head {head}, are {str(own)[:60]}"
            if not isinstance(own, list | tuple) or len(own) != tiers:
                raise ValueError(f"{where}; there must be {tiers}, one a tier")
            if not all(type(share) in (int, float) and math.isfinite(share) and share >= 0 for share in own):
                raise ValueError(f"{where}; shares are finite numbers and not negative")
            if sum(own) > 1 + _ROUNDING:
                raise ValueError(f"{where}; they add up to {sum(own):g}, allowed is at most 1")
    return tuple(tuple(tuple(map(float, own)) for own in layer) for layer in shares)


def record_tiers(
    loaded: LoadedModel, policy: CompressionPolicy, texts: Mapping[str, Sequence[Window]], *,
    prompt_tokens: int | None = None, name: str = "", seed: int | None = None,
) -> TierTable:  # fmt: skip
    """Run ``texts`` (windows by source, as ``load_windows`` gives them) through ``policy`` and count what is kept.

    ``prompt_tokens`` of each enter as the prompt (default: half), the rest token by token, as a generated answer would.
    ``seed`` is that of the windows, for the provenance. Layers with a sliding window are not compressed, so not in the
    table. ValueError for texts no longer than the policy's window, and for two tiers of one precision.
    """
    windows = [window for own in texts.values() for window in own]
    lengths = [window.input_ids.shape[1] for window in windows]
    if not windows or min(lengths) <= policy.window:
        raise ValueError(f"texts have {min(lengths, default=0)} tokens; more than the window of {policy.window} count")
    if len(set(policy.tiers)) < len(policy.tiers):
        raise ValueError(f"{policy.label}: tiers of one precision cannot be told apart")
    prompt = min(lengths) // 2 if prompt_tokens is None else prompt_tokens
    if not 1 <= prompt <= min(lengths):
        raise ValueError(f"prompt_tokens is {prompt}; the shortest text has {min(lengths)}")
    counts = sum(tokens_outside(_run(loaded, policy, window, prompt), policy) for window in windows)
    outside = sum(length - policy.window for length in lengths)
    span = f"{min(lengths):,}" if min(lengths) == max(lengths) else f"{min(lengths):,} to {max(lengths):,}"
    config = {
        "model": loaded.name, "precision": loaded.precision, "weights": loaded.fingerprint, "policy": policy.label,
        "window": policy.window, "texts": list(texts), "n_texts": len(windows), "n_tokens": max(lengths),
        "prompt_tokens": prompt, "tokens_digest": digest(windows),
    }  # fmt: skip
    return TierTable(
        name=name or loaded.name,
        source=f"{loaded.name}, {policy.label}, {len(windows)} text{'s' * (len(windows) > 1)} ({', '.join(texts)}) of "
        f"{span} tokens, the first {prompt:,} as the prompt",
        tiers=policy.tiers,
        tokens=outside,
        shares=(counts.double() / outside).tolist(),
        provenance=capture(root=project_root(), seed=seed, config=config).as_dict(),
    )


def tokens_outside(cache: CompressedCache, policy: CompressionPolicy) -> torch.Tensor:
    """Tokens outside the window, int64 [full-attention layers, kv_heads, tiers], by the counters of one request's cache
    of more tokens than the window."""
    kinds = [layer.kind for layer in cache.layers[0].place.layout.layers]
    counts = torch.tensor([
        [layer[str(tier)] for tier in policy.tiers]
        for kind, layer in zip(kinds, cache.tier_counts(), strict=True) if kind == "full"
    ]).transpose(1, 2).contiguous()  # fmt: skip
    counts[..., 0] -= policy.window  # which is always in the first tier
    return counts


@torch.inference_mode()
def _run(loaded: LoadedModel, policy: CompressionPolicy, window: Window, prompt: int) -> CompressedCache:
    ids, decoder = window.input_ids.to(loaded.device), decoder_of(loaded.model)
    with one_thread(), compress(loaded.model, policy, storage="simulated") as session:
        cache = session.new_cache()
        for part in (ids[:, :prompt], ids[:, prompt:]):
            if part.shape[1]:
                decoder(input_ids=part, past_key_values=cache.hf, use_cache=True)
    return cache


def recorded_tables() -> dict[str, Path]:
    """The tables that this repository has recorded, by name."""
    return {path.stem: path for path in sorted((project_root() / "figures" / "recorded" / "tiers").glob("*.json"))}


def tier_table(name: str) -> TierTable:
    """A recorded table by its name, or one from the file ``name``. ValueError for neither, naming the recorded ones."""
    known = recorded_tables()
    if name in known:
        return TierTable.load(known[name])
    if not Path(name).is_file():
        raise ValueError(f"no table of shares {name!r}: neither a file nor recorded ({', '.join(known) or 'none is'})")
    return TierTable.load(Path(name))
