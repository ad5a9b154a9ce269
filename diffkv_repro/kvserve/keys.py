"""Keys of the transfer: CURVE certificates in a folder of their own, readable by their owner alone."""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.auth

SERVER, CLIENT = "server", "client"
_PUBLIC, _SECRET = ".key", ".key_secret"


class KeyFileError(ValueError):
    """A key that is missing, that is none, or that others than its owner could read."""


@dataclass(frozen=True)
class KeyPair:
    """A CURVE key pair in Z85, 40 characters each. The secret half is not printed."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"KeyPair({self.public.decode()})"


@dataclass(frozen=True)
class Keys:
    """What a process needs: its ``own`` pair and the public key of the ``server``; ``clients`` is the folder of the
    public keys that a server lets in."""

    own: KeyPair
    server: bytes
    clients: Path


def make_keys(folder: Path, *, replace: bool = False) -> list[Path]:
    """Make a key pair for servers and one for clients in ``folder`` and return the files, those of secrets last.

    Give a client machine ``clients/client.key``, ``client.key_secret`` and ``server.key``; the server's secret stays
    where it is. Files of secrets have permissions 0600, the folder 0700. Raises KeyFileError where keys are already.
    """
    folder = Path(folder)
    targets = _files(folder)
    if not replace and any(path.exists() for path in targets):
        raise KeyFileError(f"{folder} has keys already; new ones would lock out those who use them")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    (folder / "clients").mkdir(exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".new.") as made:  # of mode 0700, whatever the umask
        for name, (public, secret) in {SERVER: targets[0::2], CLIENT: targets[1::2]}.items():
            sources = zmq.auth.create_certificates(made, name)
            for source, target, mode in zip(map(Path, sources), (public, secret), (0o644, 0o600), strict=True):
                source.chmod(mode)
                source.replace(target)
    return targets


def load_keys(folder: Path, role: str) -> Keys:
    """The keys that a ``server`` or ``client`` uses.

    Raises KeyFileError for a missing or damaged file, and for a secret that others may read: permissions have to be
    0600 or stricter.
    """
    if role not in (SERVER, CLIENT):
        raise KeyFileError(f"role is {role!r}; allowed are {SERVER}, {CLIENT}")
    server_public, client_public, server_secret, client_secret = _files(Path(folder))
    secret = server_secret if role == SERVER else client_secret
    public, private = _certificate(secret)
    if private is None:
        raise KeyFileError(f"{secret} holds no secret key")
    server = public if role == SERVER else _certificate(server_public)[0]
    return Keys(KeyPair(public, private), server, client_public.parent)


def secure_server(socket: zmq.Socket, keys: Keys) -> None:
    """Let only those in whose public key lies in ``keys.clients`` (an authenticator has to run in the context)."""
    socket.curve_secretkey, socket.curve_publickey = keys.own.secret, keys.own.public
    socket.curve_server = True


def secure_client(socket: zmq.Socket, keys: Keys) -> None:
    """Talk only to the server whose public key this is, encrypted."""
    socket.curve_secretkey, socket.curve_publickey = keys.own.secret, keys.own.public
    socket.curve_serverkey = keys.server


def _files(folder: Path) -> list[Path]:
    return [
        folder / f"{SERVER}{_PUBLIC}",
        folder / "clients" / f"{CLIENT}{_PUBLIC}",
        folder / f"{SERVER}{_SECRET}",
        folder / f"{CLIENT}{_SECRET}",
    ]


def _certificate(path: Path) -> tuple[bytes, bytes | None]:
    try:
        mode = path.stat().st_mode & 0o777
        if path.suffix == _SECRET and os.name == "posix" and mode & 0o077:
            raise KeyFileError(f"{path} has permissions {mode:04o}, so others can read it; chmod 600 it")
        public, secret = zmq.auth.load_certificate(path)
    except KeyFileError:
        raise
    except OSError as error:
        raise KeyFileError(f"no key {path}: make keys with `diffkv-repro serve keys`") from error
    except (ValueError, UnicodeDecodeError) as error:
        raise KeyFileError(f"{path} is no key file: {error}") from error
    for key in (public, secret):
        if key is not None and len(key) != 40:
            raise KeyFileError(f"{path} holds a key of {len(key)} characters; CURVE keys have 40")
    return public, secret
