"""Scores of profiles, document by document: what a quality with an interval is made of."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from torch import Tensor

from diffkv_repro.core.code import modules_digest
from diffkv_repro.core.provenance import package_versions
from diffkv_repro.kvserve.assets import Assets
from diffkv_repro.kvserve.layout import KV, KVLayout
from diffkv_repro.kvserve.profile import Profile
from diffkv_repro.kvserve.quality import Judge
from diffkv_repro.models.zoo import LoadedModel


@dataclass(frozen=True, eq=False)
class Documents:
    """Prompts with known continuations: ``ids`` [1, tokens] each, and the ``source`` that each was drawn from.

    The last ``continuation`` tokens are those that a model is asked to say.
    """

    ids: tuple[Tensor, ...]
    sources: tuple[str, ...]
    continuation: int

    def __post_init__(self) -> None:
        if not self.ids or len(self.ids) != len(self.sources):
            raise ValueError(f"{len(self.ids)} documents of {len(self.sources)} sources; at least one document each")
        shortest = min(own.shape[1] for own in self.ids)
        if not 1 <= self.continuation < shortest:
            raise ValueError(f"continuation is {self.continuation}; allowed are 1 to {shortest - 1}")

    @classmethod
    def of(cls, found: Mapping[str, Sequence[Tensor]], continuation: int) -> Self:
        """Documents of several sources, source after source."""
        pairs = [(source, own) for source, many in found.items() for own in many]
        return cls(tuple(own for _, own in pairs), tuple(source for source, _ in pairs), continuation)

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def digest(self) -> str:
        """Sixteen hexadecimal digits of the tokens and of what is asked of them."""
        tokens = b"".join(own.cpu().numpy().tobytes() for own in self.ids)
        return hashlib.sha256(tokens + f"|{self.sources}|{self.continuation}".encode()).hexdigest()[:16]


@dataclass(frozen=True)
class DocumentScore:
    """A profile on one document: ``added_nll`` nats a token, ``agreement`` of the tokens chosen, true ``ratio``."""

    added_nll: float
    agreement: float
    ratio: float


class DocumentJudge:
    """One document's uncompressed cache and what follows from it, against which profiles are scored."""

    def __init__(self, loaded: LoadedModel, documents: Documents, index: int) -> None:
        self._judge = Judge(loaded, [documents.ids[index]], continuation=documents.continuation)

    def score(self, profile: Profile, assets: Assets | None = None) -> DocumentScore:
        """What ``profile`` does on this document."""
        found = self._judge.judge(profile, assets)
        return DocumentScore(found.added_nll, found.agreement, found.ratio)

    def ratio(self, profile: Profile, assets: Assets | None = None) -> float:
        """The compression ratio alone, which takes no model."""
        return profile.encode(self.kv, self._judge.layout, assets=assets).ratio

    @property
    def kv(self) -> KV:
        """The uncompressed cache of the prompt."""
        return self._judge._kv[0]

    @property
    def layout(self) -> KVLayout:
        """Of that cache."""
        return self._judge.layout


def score_documents(
    loaded: LoadedModel, documents: Documents, profiles: Sequence[Profile], assets: Assets, *, indices: Iterable[int]
) -> Iterator[tuple[int, list[DocumentScore]]]:
    """Scores of all ``profiles`` on each document of ``indices``, one document after another.

    In this order only one uncompressed cache is in memory at a time.
    """
    for index in indices:
        judge = DocumentJudge(loaded, documents, index)
        yield index, [judge.score(profile, assets) for profile in profiles]


def scores_identity(loaded: LoadedModel, documents: Documents, assets: Assets) -> dict[str, object]:
    """What every score depends on: weights, documents, ranking of heads, libraries and this code."""
    versions = {name: version for name, version in package_versions().items() if name in ("torch", "transformers")}
    heads = "" if assets.heads is None else hashlib.sha256(repr(assets.heads.scores).encode()).hexdigest()[:16]
    return {
        "model": loaded.fingerprint,
        "dtype": str(loaded.model.dtype),
        "device": loaded.device.type,
        "documents": documents.digest,
        "heads": heads,
        "versions": versions,
        "code": scoring_code(),
    }


def scoring_code() -> str:
    """Digest of the modules between a profile and its score."""
    parts = "assets cachegen codecs documents entropy frame grids header heads kvquant ladders layout nvcomp prefill"
    parts += " profile quality quantizers registry streams token_ladder transform_state transforms"
    return modules_digest("core/*", "models/*", *(f"kvserve/{name}" for name in parts.split()))[:16]
