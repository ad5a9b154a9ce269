"""Files that are either whole or absent."""

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


# Read once, at import: there is no way to ask for it without setting it for all threads.
_MODE = 0o666 & ~_umask()


class WriteError(OSError):
    """A file could not be written; whatever stood there before still does."""


@contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``target`` that replaces it when the block ends without an exception.

    The folder is created. On any failure the temporary file is removed and ``target`` is left as it was;
    an OSError (full disk, no permission) becomes a WriteError that names the target.
    """
    target = Path(target)
    temporary: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
        os.close(handle)
        temporary = Path(name)
        yield temporary
        with temporary.open("rb+") as written:
            os.fsync(written.fileno())
        temporary.chmod(_MODE)
        temporary.replace(target)
    except OSError as error:
        if isinstance(error, WriteError):
            raise
        raise WriteError(error.errno, f"cannot write {target}: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def write_text(target: Path, text: str) -> Path:
    """Write ``text`` (UTF-8) to ``target`` atomically."""
    with atomic_path(target) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")
    return Path(target)


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file's contents."""
    with Path(path).open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
