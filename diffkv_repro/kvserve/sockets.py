"""Sockets that are let go with whoever opened them."""

import weakref
from contextlib import suppress

import zmq
from zmq.auth.thread import ThreadAuthenticator


class Sockets:
    """A context of ZeroMQ for ``owner`` and what it opens there. :meth:`close` ends all of it, and so does the end of
    ``owner``.

    The collector of garbage is not left to it: that may end a context before its sockets, and then waits for ever.
    """

    def __init__(self, owner: object) -> None:
        self.context = zmq.Context()
        self._opened: list[zmq.Socket | ThreadAuthenticator] = []
        self.close = weakref.finalize(owner, _let_go, self._opened, self.context)

    def open(self, kind: int) -> zmq.Socket:
        """A socket that keeps nothing back when it is closed."""
        socket = self.context.socket(kind)
        socket.linger = 0
        self._opened.append(socket)
        return socket

    def keep(self, opened: zmq.Socket | ThreadAuthenticator) -> None:
        """Something that was opened in the context by other means; it ends before what is here already."""
        self._opened.append(opened)


def _let_go(opened: list[zmq.Socket | ThreadAuthenticator], context: zmq.Context) -> None:
    while opened:
        own = opened.pop()
        if isinstance(own, zmq.Socket):
            with suppress(zmq.ZMQError):
                own.disable_monitor()
            own.close(linger=0)
        else:
            own.stop()
    context.term()
