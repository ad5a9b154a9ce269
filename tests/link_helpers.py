"""Servers in processes of their own with made-up caches, clients for them, and a cable that can be cut."""

import socket
import threading
from contextlib import contextmanager, suppress

import torch

from diffkv_repro.kvserve.client import KVClient
from diffkv_repro.kvserve.keys import load_keys
from diffkv_repro.kvserve.layout import KVLayout
from diffkv_repro.kvserve.link import LinkSettings
from diffkv_repro.kvserve.process import ServerProcess

SHAPE = "24x2x32"
LAYOUT = KVLayout(24, 2, 32, torch.float16, model="made up")
QUICK = LinkSettings(chunk_bytes=1 << 14, window_bytes=1 << 18, patience=3.0, deadline=30.0, connect=3.0)
ARGUMENTS = ("--made-up", SHAPE, "--profiles", "int4", "--tokens", "64", "--experiment", "--patience", "3")


def server(keys, *more, kind="prefill"):
    return ServerProcess([kind, *more, *ARGUMENTS], keys=keys, within=120)


def client(keys, endpoint, settings=QUICK, layout=LAYOUT):
    return KVClient(layout, keys=load_keys(keys, "client"), endpoint=endpoint, settings=settings)


class Cable:
    """A TCP relay to ``endpoint`` that can be cut and mended: what goes through is not looked at."""

    def __init__(self, endpoint):
        self._target = ("127.0.0.1", int(endpoint.rsplit(":", 1)[1]))
        self._whole = True
        self._open = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.passed = 0
        self.after = None
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if not self._whole:
                    near.close()
                    continue
                try:
                    far = socket.create_connection(self._target)
                except OSError:
                    near.close()
                    continue
                self._open |= {near, far}
                for a, b in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=(a, b, a is far), daemon=True).start()

    def _pump(self, source, target, counted):
        with suppress(OSError):
            while data := source.recv(1 << 14):
                if counted:
                    self.passed += len(data)
                    if self.after is not None and self.passed > self.after:
                        self.cut()
                target.sendall(data)
        for end in (source, target):
            end.close()

    def cut(self):
        self._whole, self.after = False, None
        for end in list(self._open):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def mend(self):
        self._whole, self.passed = True, 0

    def close(self):
        self.cut()
        self._listener.close()


@contextmanager
def cable(endpoint):
    made = Cable(endpoint)
    try:
        yield made
    finally:
        made.close()
