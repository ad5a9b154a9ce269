"""Statistics of windows, kept on disk so that a second run, or a widget, never computes them again."""

import hashlib
import json
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import xarray as xr

from diffkv_repro.attention_stats.collect import AttentionStats, collect
from diffkv_repro.core.files import atomic_path
from diffkv_repro.core.provenance import package_versions
from diffkv_repro.models.zoo import LoadedModel
from diffkv_repro.workloads.windows import Window

_CODE = ("attention_stats/blocks.py", "attention_stats/collect.py", "attention_stats/store.py", "models/hf.py")
# What numpy and zipfile raise for a file that is absent, cut off or has flipped bits.
_DAMAGE = (OSError, ValueError, KeyError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error)
_ARRAYS = ("received", "later", "key_norm", "value_norm", "rows")


def survey(
    loaded: LoadedModel, windows: Sequence[Window], folder: Path, *, rows: Sequence[int] = ()
) -> Iterator[AttentionStats]:
    """Statistics of each window in turn, from ``folder`` where they are there already.

    The key holds everything they depend on: weights, dtype, tokens, rows, library versions and the code that
    computes them. A damaged file is computed again.
    """
    for window in windows:
        path = Path(folder) / f"{_key(loaded, window, rows)}.npz"
        stats = _read(path, loaded.layout.group)
        if stats is None:
            _write(path, collect(loaded.model, window.input_ids, rows=rows))
            stats = _read(path, loaded.layout.group)  # float32, as any later run gets them
        yield stats


def _key(loaded: LoadedModel, window: Window, rows: Sequence[int]) -> str:
    versions = {name: version for name, version in package_versions().items() if name in ("torch", "transformers")}
    what = [loaded.fingerprint, str(loaded.model.dtype), loaded.device.type, list(rows), versions, _code_digest()]
    tokens = window.input_ids.numpy().astype(np.int64).tobytes()
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode() + tokens).hexdigest()[:24]


def _code_digest() -> str:
    package = Path(__file__).resolve().parents[1]
    return hashlib.sha256(b"".join((package / name).read_bytes() for name in _CODE)).hexdigest()


def _write(path: Path, stats: AttentionStats) -> None:
    arrays = {name: getattr(stats, name) for name in _ARRAYS}
    with atomic_path(path) as temporary, temporary.open("wb") as handle:
        np.savez_compressed(
            handle,
            **{name: array.to_numpy().astype(np.float32) for name, array in arrays.items()},
            queries=stats.rows["query"].to_numpy(),
        )


def _read(path: Path, group: int) -> AttentionStats | None:
    try:
        with np.load(path, allow_pickle=False) as stored:
            head, kv_head = ("sequence", "layer", "head", "token"), ("sequence", "layer", "kv_head", "token")
            return AttentionStats(
                received=xr.DataArray(stored["received"], dims=head, name="received"),
                later=xr.DataArray(stored["later"], dims=("sequence", "token"), name="later"),
                key_norm=xr.DataArray(stored["key_norm"], dims=kv_head, name="key_norm"),
                value_norm=xr.DataArray(stored["value_norm"], dims=kv_head, name="value_norm"),
                rows=xr.DataArray(
                    stored["rows"],
                    dims=("sequence", "layer", "head", "query", "token"),
                    coords={"query": stored["queries"]},
                    name="rows",
                ),
                group=group,
            )
    except _DAMAGE:
        return None
