"""``Finished``: answers of requests that are done, on disk as they come, so that a crash loses none of them."""

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from diffkv_repro.cache.method import Method
from diffkv_repro.core.files import WriteError
from diffkv_repro.core.provenance import package_versions
from diffkv_repro.evaluation.digest import code_digest
from diffkv_repro.evaluation.methods import parameters
from diffkv_repro.models import LoadedModel

_CODE = ("evaluation/decoding", "evaluation/generation", "evaluation/lm_eval_model")


class Finished:
    """A table in an SQLite file, from requests to answers, both plain JSON values.

    ``identity`` says what an answer depends on besides its request; answers of another identity are kept and not
    seen, so that runs of many models and methods can share one file. Without a ``path`` nothing is kept. Each
    :meth:`put` is a transaction: it is on disk whole, or not at all.

    Raises ValueError where ``path`` is something else than such a file, WriteError where it cannot be written.
    """

    def __init__(self, path: Path | None, identity: Mapping[str, Any]) -> None:
        self.path = None if path is None else Path(path)
        self._identity = json.dumps(identity, sort_keys=True)
        self._table: sqlite3.Connection | None = None
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._table = sqlite3.connect(self.path, timeout=60)
            with self._table:
                self._table.execute("CREATE TABLE IF NOT EXISTS finished (request TEXT PRIMARY KEY, answer TEXT)")
        except sqlite3.OperationalError as error:
            raise WriteError(None, f"{self.path} cannot be opened: {error}") from error
        except sqlite3.DatabaseError as error:
            raise ValueError(f"{self.path} does not hold finished answers: {error}") from error

    def get(self, request: Any) -> Any | None:
        """The answer to ``request``, or None."""
        if self._table is None:
            return None
        found = self._table.execute("SELECT answer FROM finished WHERE request = ?", (self._key(request),)).fetchone()
        return None if found is None else json.loads(found[0])

    def put(self, answers: Iterable[tuple[Any, Any]]) -> None:
        """Keep pairs of a request and its answer, which must not be None."""
        if self._table is None:
            return
        rows = [(self._key(request), json.dumps(answer)) for request, answer in answers]
        try:
            with self._table:
                self._table.executemany("INSERT OR REPLACE INTO finished VALUES (?, ?)", rows)
        except sqlite3.OperationalError as error:
            raise WriteError(None, f"{self.path} cannot be written: {error}") from error

    def close(self) -> None:
        """Let go of the file; nothing can be asked or kept afterwards."""
        if self._table is not None:
            self._table.close()
            self._table = None

    def _key(self, request: Any) -> str:
        return hashlib.sha256(f"{self._identity}\n{json.dumps(request, sort_keys=True)}".encode()).hexdigest()


def identity_of(loaded: LoadedModel, method: Method, storage: str, *, code: tuple[str, ...] = _CODE) -> dict[str, Any]:
    """What every answer depends on: weights, tokenizer, dtype, device, method, storage, libraries, and this code."""
    versions = {name: version for name, version in package_versions().items() if name in ("torch", "transformers")}
    return {
        "model": loaded.fingerprint,
        "tokenizer": _tokenizer_digest(loaded.tokenizer),
        "dtype": str(loaded.model.dtype),
        "device": loaded.device.type,
        "method": parameters(method),
        "storage": storage,
        "versions": versions,
        "code": code_digest(*code, *method.code)[:16],
    }


def _tokenizer_digest(tokenizer: Any) -> str:
    document: dict[str, Any] = {"vocabulary": tokenizer.get_vocab()}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        parts = json.loads(backend.to_str())
        # Not its padding, truncation and choice of a padding token: they are left by whoever used it last.
        for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder", "model"):
            document[name] = parts.get(name)
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]
