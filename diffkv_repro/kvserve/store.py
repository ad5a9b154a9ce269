"""``PrefixStore``: KV caches of prompts on disk, found again by the longest stored prefix of another prompt.

An entry is a frame in a file named by the tokens and the form (the profile) it is kept in; the frame's metadata name
the tokens block by block. Files appear whole or not at all, one writer at a time, whatever process it is in.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from diffkv_repro.core.files import atomic_path
from diffkv_repro.kvserve.frame import Frame, frame_length
from diffkv_repro.kvserve.header import FrameError, Header
from diffkv_repro.kvserve.layout import KVLayout
from diffkv_repro.kvserve.profile import Profile
from diffkv_repro.kvserve.registry import require_whole
from diffkv_repro.kvserve.sources import Computed
from diffkv_repro.kvserve.store_keys import block_digests, prompt_digest

_ENDING = ".kvsf"
_READ = 1 << 20


class StoreError(RuntimeError):
    """The store cannot do what was asked: too little room, or another process holds it for too long."""


@dataclass(frozen=True)
class Entry:
    """A cache of ``tokens`` tokens in one form, ``nbytes`` on disk; ``blocks`` are digests of its prefixes."""

    path: Path
    prompt: str
    form: str
    tokens: int
    nbytes: int
    blocks: tuple[str, ...]


@dataclass(frozen=True)
class Match:
    """The longest stored prefix of a prompt: its first ``tokens``, in ``forms`` of one cache of ``whole`` tokens."""

    tokens: int
    whole: int
    prompt: str
    forms: Mapping[str, Entry]


class PrefixStore:
    """Caches of one ``layout`` in ``folder``, of at most ``limit_bytes``: the least recently used go first.

    Prefixes count in blocks of ``block`` tokens; an entry also counts as a whole. On opening, what a crash left behind
    is removed, and so is every file that is not a whole frame of this model.
    """

    def __init__(
        self, folder: Path, layout: KVLayout, *, limit_bytes: int = 1 << 32, block: int = 64, patience: float = 30.0
    ) -> None:
        require_whole("limit_bytes", limit_bytes, 1)
        require_whole("block", block, 1, 1 << 16)
        self.folder, self.layout, self.limit_bytes, self.block = Path(folder), layout, limit_bytes, block
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = FileLock(self.folder / ".lock", timeout=patience)
        self._entries: dict[Path, Entry] = {}
        self._seen: tuple[int, int] | None = None
        with self._held():  # so no writer is at work: what is temporary is left over
            for path in self.folder.glob("*.tmp"):
                path.unlink(missing_ok=True)
            for path in self.folder.glob(".*.tmp"):
                path.unlink(missing_ok=True)
            self._scan(remove=True)

    def put(self, ids: Sequence[int], form: str, profile: Profile, computed: Computed) -> Entry:
        """Keep the cache of ``ids`` in a form, unless it is there already.

        Raises StoreError for a cache that is larger than the limit or none of this model's, WriteError where the disk
        refuses.
        """
        if computed.kv.tokens != len(ids) or computed.kv.start:
            raise StoreError(f"a cache of {computed.kv.tokens} tokens from {computed.kv.start}; ids are {len(ids)}")
        if not form or not all(letter.isalnum() or letter in "-_" for letter in form):
            raise StoreError(f"form is {form!r}; letters, digits, - and _ are allowed")
        prompt, blocks = prompt_digest(ids), block_digests(ids, self.block)
        path = self.folder / f"{prompt}.{form}{_ENDING}"
        metadata = {"prompt": prompt, "form": form, "block": self.block, "blocks": blocks}
        with self._held():
            self._scan()
            if path in self._entries:
                self._touch(path)
                return self._entries[path]
            size = 0
            with atomic_path(path) as temporary:
                with temporary.open("wb") as file:
                    pieces = profile.stream(
                        computed.kv.layers, self.layout, len(ids), assets=computed.assets, metadata=metadata
                    )
                    for piece in pieces:
                        size += len(piece)
                        if size > self.limit_bytes:
                            raise StoreError(f"the cache takes more than the {self.limit_bytes} bytes of this store")
                        file.write(piece)
                self._make_room(size)
            self._entries[path] = Entry(path, prompt, form, len(ids), size, tuple(blocks))
            return self._entries[path]

    def find(self, ids: Sequence[int]) -> Match | None:
        """The longest stored prefix of ``ids`` and the forms that hold it, of the smallest cache that does."""
        self._refresh()
        prompt = prompt_digest(ids)
        whole = [entry for entry in self._entries.values() if entry.prompt == prompt]
        if whole:
            return Match(len(ids), len(ids), prompt, {entry.form: entry for entry in whole})
        place = {digest: count for count, digest in enumerate(block_digests(ids, self.block), start=1)}
        best: tuple[int, int, str] | None = None
        for entry in self._entries.values():
            shared = max((place.get(digest, 0) for digest in entry.blocks), default=0)
            if shared and (best is None or (shared, -entry.tokens) > (best[0], -best[1])):
                best = (shared, entry.tokens, entry.prompt)
        if best is None:
            return None
        tokens, whole_tokens, prompt = best[0] * self.block, best[1], best[2]
        forms = {entry.form: entry for entry in self._entries.values() if entry.prompt == prompt}
        return Match(tokens, whole_tokens, prompt, forms)

    def pieces(self, entry: Entry) -> Iterator[bytes]:
        """The bytes of an entry, part by part. Raises StoreError where it is gone."""
        try:
            with entry.path.open("rb") as file:
                self._touch(entry.path)
                while piece := file.read(_READ):
                    yield piece
        except OSError as error:
            self._entries.pop(entry.path, None)
            raise StoreError(f"{entry.path.name} is gone: {error.strerror}") from error

    def read(self, entry: Entry, **options) -> Frame:
        """An entry as a frame, every checksum verified. Raises FrameError for a damaged one, which is then removed."""
        try:
            with entry.path.open("rb") as file:
                return Frame.read(_exactly(file.read), self.layout, **options)
        except FrameError:
            self.drop(entry)
            raise

    def drop(self, entry: Entry) -> None:
        """Remove an entry."""
        self._entries.pop(entry.path, None)
        entry.path.unlink(missing_ok=True)

    @property
    def entries(self) -> list[Entry]:
        """All that is there, in no order."""
        self._refresh()
        return list(self._entries.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return sum(entry.nbytes for entry in self.entries)

    def _make_room(self, size: int) -> None:
        """Remove the least recently used until ``size`` more bytes fit."""
        aged = sorted((path for path in self._entries if path.exists()), key=lambda path: path.stat().st_mtime_ns)
        total = sum(self._entries[path].nbytes for path in aged)
        for path in aged:
            if total + size <= self.limit_bytes:
                break
            total -= self._entries[path].nbytes
            self.drop(self._entries[path])

    def _touch(self, path: Path) -> None:
        with suppress(OSError):
            os.utime(path, ns=(time.time_ns(), time.time_ns()))

    def _refresh(self) -> None:
        state = self.folder.stat()
        if (state.st_mtime_ns, state.st_ino) != self._seen:
            self._scan()

    def _scan(self, *, remove: bool = False) -> None:
        """Take in what other processes added and removed; with ``remove`` delete what is no whole frame of ours."""
        state = self.folder.stat()
        paths = set(self.folder.glob(f"*{_ENDING}"))
        for path in set(self._entries) - paths:
            del self._entries[path]
        for path in paths - set(self._entries):
            entry = self._entry(path)
            if entry is not None:
                self._entries[path] = entry
            elif remove:
                path.unlink(missing_ok=True)
        self._seen = (state.st_mtime_ns, state.st_ino)

    def _entry(self, path: Path) -> Entry | None:
        try:
            with path.open("rb") as file:
                header, size = frame_length(_exactly(file.read), file.seek, self.layout)
                fields = self._fields(header)
                if size != path.stat().st_size or path.name != f"{fields[0]}.{fields[1]}{_ENDING}":
                    return None
        except (OSError, FrameError):
            return None
        return Entry(path, fields[0], fields[1], header.tokens, size, fields[2])

    def _fields(self, header: Header) -> tuple[str, str, tuple[str, ...]]:
        given = header.metadata
        blocks, own = given.get("blocks"), (given.get("prompt"), given.get("form"))
        listed = isinstance(blocks, list) and len(blocks) == header.tokens // self.block
        if given.get("block") != self.block or not listed or not all(isinstance(one, str) for one in (*own, *blocks)):
            raise FrameError("a frame of another store")
        return own[0], own[1], tuple(blocks)

    def _held(self) -> FileLock:
        try:
            return self._lock.acquire()
        except Timeout as error:
            raise StoreError(f"another process has held {self.folder} for too long") from error


def _exactly(read: Callable[[int], bytes]) -> Callable[[int], bytes]:
    def exact(count: int) -> bytes:
        found = read(count)
        if len(found) != count:
            raise FrameError(f"truncated: {count} bytes are needed, and {len(found)} are left")
        return found

    return exact
