"""Where frames of prompts lie between the instance that made them and those that use them.

A prompt is known by its content: :func:`prompt_keys` names the frame of each of its beginnings by a digest of model and
tokens, so that no router has to tell one instance what another one stored. :class:`FrameStore` is all that an instance
asks of a place; :class:`FolderStore` is a folder that they share, ``LinkStore`` is one behind the link;
:func:`open_store` opens either.
"""

import hashlib
import json
import math
import os
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from diffkv_repro.core.files import atomic_path, write_text
from diffkv_repro.kvserve.header import VERSION, FrameError

GRAIN = 16  # frames end at multiples of so many tokens, whatever the blocks of an engine are
_FRAME, _RECEIPT = ".kvsf", ".receipt.json"
_STALE = 3600.0  # seconds after which nobody waits for a receipt any more


@dataclass(frozen=True)
class PromptKey:
    """The name of the frame that holds the first ``tokens`` tokens of a prompt."""

    tokens: int
    name: str


@dataclass(frozen=True)
class Receipt:
    """What a reader tells the writer of a frame: ``seconds`` of fetching it and of decoding it, ``sent_bytes``."""

    fetch: float
    decode: float
    sent_bytes: int

    def __post_init__(self) -> None:
        for name in ("fetch", "decode", "sent_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ValueError(f"{name} of a receipt is {value!r}; it must be finite and at least 0")


class FrameMissing(OSError):
    """A frame that is not there, or no longer."""


def prompt_keys(tokens: Sequence[int], identity: str) -> list[PromptKey]:
    """Keys of the beginnings of ``tokens``, one every GRAIN tokens, the longest first; none for a shorter prompt.

    ``identity`` says what else must be the same: the model above all.
    """
    whole = len(tokens) // GRAIN * GRAIN
    words = np.asarray(tokens[:whole], dtype="<i8").tobytes()
    digest, step = hashlib.sha256(f"KVSF {VERSION}\0{identity}\0".encode()), 8 * GRAIN
    keys = []
    for at in range(0, len(words), step):
        digest.update(words[at : at + step])
        keys.append(PromptKey(at // 8 + GRAIN, digest.copy().hexdigest()[:40]))
    return keys[::-1]


@runtime_checkable
class FrameStore(Protocol):
    """A place for frames, for one thread. Every method may raise OSError: the caller goes on without the frame."""

    def find(self, names: Sequence[str]) -> int | None:
        """The place in ``names`` of the first that is there, None if none is."""

    def put(self, name: str, pieces: Iterable[bytes]) -> int:
        """Keep a frame under ``name``, whole or not at all; bytes written. What ``pieces`` raises comes through."""

    def get(self, name: str, most: int) -> bytes:
        """The bytes of a frame. Raises FrameMissing, and FrameError where there are more than ``most``."""

    def discard(self, name: str) -> None:
        """Forget a frame that turned out to be damaged, so that it can be put again."""

    def acknowledge(self, name: str, receipt: Receipt) -> None:
        """Tell the writer of ``name`` what reading it took."""

    def receipts(self, names: Iterable[str]) -> dict[str, Receipt]:
        """Receipts that have come for ``names``; each is given once."""


class FolderStore:
    """A folder, on a local disk or a shared one: a file a frame, written under another name and renamed.

    With ``most_bytes`` the frames that were used longest ago go when it is full. Several writers and readers may share
    it. Frames carry checksums but no signature: whoever may write to the folder decides what a reader's model sees.
    """

    def __init__(self, folder: Path | str, *, most_bytes: float = math.inf) -> None:
        if not most_bytes > 0:
            raise ValueError(f"most_bytes is {most_bytes}; it must be above 0")
        self.folder, self.most_bytes = Path(folder).expanduser(), most_bytes
        self.folder.mkdir(parents=True, exist_ok=True)
        self._names: frozenset[str] = frozenset()
        self._listed: tuple[float, bool] = (-1.0, False)

    def find(self, names: Sequence[str]) -> int | None:
        # Most often the very prompt is there, or nothing is: one look for the first name, one listing for the others.
        if not names:
            return None
        if self._path(names[0]).exists():
            return 0
        held = self._listing()
        return next((place for place, name in enumerate(names) if place and name in held), None)

    def put(self, name: str, pieces: Iterable[bytes]) -> int:
        written = 0
        with atomic_path(self._path(name)) as temporary, temporary.open("wb") as out:
            for piece in pieces:
                written += out.write(piece)
        self._make_room(name)
        return written

    def get(self, name: str, most: int) -> bytes:
        path = self._path(name)
        try:
            with path.open("rb") as handle:
                if os.fstat(handle.fileno()).st_size > most:
                    raise FrameError(f"frame {name} has more than {most} bytes")
                data = handle.read()
            with suppress(OSError):
                os.utime(path)
        except FileNotFoundError as error:
            raise FrameMissing(error.errno, f"frame {name} is not in {self.folder}") from error
        return data

    def discard(self, name: str) -> None:
        self._path(name).unlink(missing_ok=True)

    def acknowledge(self, name: str, receipt: Receipt) -> None:
        path = self.folder / "receipts" / f"{name}.{uuid.uuid4().hex}{_RECEIPT}"
        write_text(path, json.dumps(asdict(receipt)))

    def receipts(self, names: Iterable[str]) -> dict[str, Receipt]:
        wanted, found = set(names), {}
        for path in sorted((self.folder / "receipts").glob(f"*{_RECEIPT}")) if wanted else ():
            name = path.name.split(".", 1)[0]
            with suppress(FileNotFoundError, ValueError, TypeError):  # taken by another, or not what acknowledge writes
                if name in wanted:
                    found[name] = Receipt(**json.loads(path.read_text(encoding="utf-8")))
                elif path.stat().st_mtime > time.time() - _STALE:
                    continue
            path.unlink(missing_ok=True)
        return found

    def _path(self, name: str) -> Path:
        if not name.isalnum():
            raise ValueError(f"name of a frame is {name!r}; allowed are letters and digits")
        return self.folder / f"{name}{_FRAME}"

    def _listing(self) -> frozenset[str]:
        """Names of all frames, read again when the folder has changed since, or may have within the clock's grain."""
        changed = self.folder.stat().st_mtime
        if self._listed != (changed, True):
            settled = time.time() - changed > 2
            with os.scandir(self.folder) as entries:
                names = [entry.name for entry in entries if entry.name.endswith(_FRAME) and entry.name[0] != "."]
            self._names = frozenset(name.removesuffix(_FRAME) for name in names)
            self._listed = (changed, settled)
        return self._names

    def _make_room(self, kept: str) -> None:
        if self.most_bytes == math.inf:
            return
        with os.scandir(self.folder) as entries:
            own = [entry for entry in entries if entry.name.endswith(_FRAME) and entry.name[0] != "."]
        ages = sorted((entry.stat().st_mtime, entry.stat().st_size, entry.name) for entry in own)
        total = sum(size for _, size, _ in ages)
        for _, size, name in ages:
            if total <= self.most_bytes:
                return
            if name != f"{kept}{_FRAME}":
                (self.folder / name).unlink(missing_ok=True)
                total -= size


STORES: dict[str, Callable[..., FrameStore]] = {}
"""How to open a store at an address ``scheme://...``, by scheme; each takes it, ``most_bytes`` and own options."""


def open_store(address: str, *, most_bytes: float = math.inf, **options: Any) -> FrameStore:
    """The store at ``address``: a folder, or ``scheme://...`` of one in STORES, which may take ``options``.

    Raises ValueError naming those known, and for options with a folder, which takes none.
    """
    scheme, found, _ = address.partition("://")
    if not found:
        if options:
            raise ValueError(f"{next(iter(options))} is given with a folder; it is for a store at an address")
        return FolderStore(address, most_bytes=most_bytes)
    if scheme not in STORES:
        known = ", ".join(["a folder", *(f"{name}://" for name in STORES)])
        raise ValueError(f"store is {address!r}; allowed are {known}")
    return STORES[scheme](address, most_bytes=most_bytes, **options)
