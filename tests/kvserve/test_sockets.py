"""What nobody closes is closed with its owner, and nothing waits for it."""

import gc
import threading

import pytest

from diffkv_repro.kvserve.connection import Connection
from diffkv_repro.kvserve.frame_server import FrameServer
from diffkv_repro.kvserve.frame_store import FolderStore
from diffkv_repro.kvserve.keys import CLIENT, SERVER, load_keys, make_keys


def abandoned(make):
    """The sockets of what ``make`` makes, which nothing but a cycle holds afterwards, as a traceback's would."""
    owner = make()
    owner.cycle = owner
    return owner._sockets


def collected():
    """Whether garbage is collected in time."""
    done = threading.Event()
    threading.Thread(target=lambda: (gc.collect(), done.set()), daemon=True).start()
    return done.wait(30)


@pytest.fixture(params=["open", "encrypted"])
def sides(request, tmp_path):
    make_keys(tmp_path / "keys")
    return [load_keys(tmp_path / "keys", role) if request.param == "encrypted" else None for role in (SERVER, CLIENT)]


def test_a_connection_that_nobody_closes_ends_with_messages_under_way(tmp_path, sides):
    server, client = sides
    with FrameServer(FolderStore(tmp_path), keys=server, endpoint="tcp://127.0.0.1:*") as running:

        def asked():
            connection = Connection(keys=client, endpoint=running.endpoint)
            connection.connect()
            connection.say("find", "an-id", b"a\nb")
            return connection

        sockets = abandoned(asked)
        assert not sockets.context.closed
        assert collected()
        assert sockets.context.closed


def test_a_server_that_never_ran_ends_with_a_client_waiting(tmp_path, sides):
    server, client = sides
    sockets = abandoned(lambda: FrameServer(FolderStore(tmp_path), keys=server, endpoint="tcp://127.0.0.1:*"))
    endpoint = sockets._opened[0].last_endpoint.decode()
    with Connection(keys=client, endpoint=endpoint):
        assert collected()
        assert sockets.context.closed
