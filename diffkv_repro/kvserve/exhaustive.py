"""A space evaluated whole: the truth that searches are judged by (KVServe, Figure 16 left)."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from diffkv_repro.core.files import write_text
from diffkv_repro.core.finished import Finished
from diffkv_repro.core.paths import project_root
from diffkv_repro.core.provenance import capture
from diffkv_repro.kvserve.assets import Assets
from diffkv_repro.kvserve.documents import Documents, score_documents, scores_identity
from diffkv_repro.kvserve.space import Space, space
from diffkv_repro.models.zoo import LoadedModel

FORMAT = 1
_COLUMNS = ("added_nll", "agreement", "ratio")
_DIGITS = 5


@dataclass(frozen=True, eq=False)
class Exhaustive:
    """Every candidate of ``space`` on every document: arrays [candidates, documents], ``sources`` of the documents.

    ``ids`` are the candidates' digests, by which the table notices that a space has changed since.
    """

    space: str
    ids: tuple[str, ...]
    sources: tuple[str, ...]
    added_nll: np.ndarray
    agreement: np.ndarray
    ratio: np.ndarray
    settings: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = (len(self.ids), len(self.sources))
        for name in _COLUMNS:
            own = np.asarray(getattr(self, name), dtype=np.float64)
            if own.shape != shape or not np.isfinite(own).all():
                raise ValueError(f"{name} is {own.shape}; needed are finite numbers {shape}")
            object.__setattr__(self, name, own)
        if not self.ids or not self.sources:
            raise ValueError(f"a table of {shape[0]} candidates and {shape[1]} documents holds nothing")

    @cached_property
    def candidates(self) -> Space:
        """The space, as it is now. Raises ValueError where its candidates are others than those of the table."""
        found = space(self.space)
        if found.ids != self.ids:
            raise ValueError(f"space {self.space} has changed since its {len(self.ids)} candidates were evaluated")
        return found

    @cached_property
    def quality(self) -> np.ndarray:
        """Perplexity of the uncompressed cache over that of each candidate, over all documents [candidates]."""
        return np.exp(-self.added_nll.mean(axis=1))

    @cached_property
    def mean_ratio(self) -> np.ndarray:
        """Compression ratio over all documents, everything counted [candidates]."""
        return self.ratio.mean(axis=1)

    def best(self, min_quality: float) -> int:
        """The candidate of the highest ratio among those of at least ``min_quality``. Raises ValueError for none."""
        feasible = self.quality >= min_quality
        if not feasible.any():
            raise ValueError(f"no candidate has a quality of {min_quality}; the highest is {self.quality.max():.4f}")
        return int(np.where(feasible, self.mean_ratio, -np.inf).argmax())

    def save(self, path: Path) -> Path:
        """Write JSON, a line an array's row, whole or not at all."""
        head = {"format": FORMAT, "space": self.space, "ids": self.ids, "sources": self.sources}
        head |= {"settings": dict(self.settings), "provenance": dict(self.provenance)}
        rows = {name: [json.dumps(row) for row in getattr(self, name).round(_DIGITS).tolist()] for name in _COLUMNS}
        arrays = [f'"{name}": [\n' + ",\n".join(lines) + "\n]" for name, lines in rows.items()]
        text = json.dumps(head, ensure_ascii=False)[:-1] + ",\n" + ",\n".join(arrays) + "}\n"
        return write_text(path, text)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what :meth:`save` wrote. Raises ValueError for a file of something else, FileNotFoundError for none."""
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
            if document.pop("format") != FORMAT:
                raise ValueError(f"its format is not {FORMAT}")
            return cls(**document | {"ids": tuple(document["ids"]), "sources": tuple(document["sources"])})
        except FileNotFoundError:
            raise
        except (OSError, TypeError, KeyError, ValueError, AttributeError) as error:
            raise ValueError(f"{path} holds no evaluated space: {error}") from error


def evaluate_all(
    loaded: LoadedModel,
    candidates: Space,
    documents: Documents,
    assets: Assets,
    *,
    most: int | None = None,
    store: Path | None = None,
    settings: Mapping[str, Any] | None = None,
    watch: Callable[[int, int], None] | None = None,
) -> Exhaustive:
    """Score every candidate on every document, or on the first ``most`` of them; what ``store`` holds already is not
    scored again.

    ``watch`` is told how many documents are done, and of how many.
    """
    finished = Finished(store, scores_identity(loaded, documents, assets) | {"ids": candidates.ids})
    columns: list[np.ndarray] = []
    count = min(most or len(documents), len(documents))
    for index in range(count):
        found = finished.get(index)
        if found is None:
            ((_, scores),) = score_documents(loaded, documents, list(candidates), assets, indices=[index])
            found = [[getattr(score, name) for name in _COLUMNS] for score in scores]
            finished.put([(index, found)])
        columns.append(np.array(found))
        if watch is not None:
            watch(index + 1, count)
    finished.close()
    table = np.stack(columns, axis=1)  # [candidates, documents, columns]
    config = dict(settings or {}) | {"model": loaded.name, "weights": loaded.fingerprint, "texts": documents.digest}
    return Exhaustive(
        candidates.name, candidates.ids, documents.sources[:count], *np.moveaxis(table, 2, 0), settings=config,
        provenance=capture(root=project_root(), config=config).as_dict(),
    )  # fmt: skip
