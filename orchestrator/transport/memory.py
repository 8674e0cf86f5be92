"""The in-process twin of TCP: the same links between threads of one process, without a network.

A link is one end of a socket pair, so deadlines, full buffers and a dead peer are the kernel's and behave as
over TCP.
"""

from __future__ import annotations

import itertools
import queue
import socket
import time
from typing import Final

from orchestrator.transport.base import LinkLostError, LinkTimeoutError
from orchestrator.transport.sockets import SocketLink

_names: Final = itertools.count()


def link_pair(first: str = "memory:first", second: str = "memory:second") -> tuple[SocketLink, SocketLink]:
    """Make both ends of a way; each end's address names the other."""
    one, other = socket.socketpair()
    return SocketLink(one, second), SocketLink(other, first)


class MemoryListener:
    """Takes links of this process (see :class:`orchestrator.transport.base.Listener`)."""

    def __init__(self, name: str | None = None) -> None:
        self._name = f"memory:{next(_names)}" if name is None else name
        self._arrived: queue.SimpleQueue[SocketLink | None] = queue.SimpleQueue()
        self._closed = False

    @property
    def address(self) -> str:
        """Name the place to connect to."""
        return self._name

    def connector(self) -> MemoryConnector:
        """Give what connects to this listener."""
        return MemoryConnector(self)

    def accept(self, deadline: float | None = None) -> SocketLink:
        """Wait for the next link."""
        try:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            link = self._arrived.get(timeout=left)
        except queue.Empty as error:
            raise LinkTimeoutError(f"nobody connected to {self._name}") from error
        if link is None:
            self._arrived.put(None)  # for every other thread that waits
            raise LinkLostError("the listener is closed")
        return link

    def connect(self) -> SocketLink:
        """Make a link to this listener and give the caller's end."""
        if self._closed:
            raise LinkLostError(f"cannot connect to {self._name}: it is closed")
        caller, taken = link_pair("memory:caller", self._name)
        self._arrived.put(taken)
        return caller

    def __enter__(self) -> MemoryListener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take no more links."""
        self._closed = True
        self._arrived.put(None)


class MemoryConnector:
    """Makes links to a memory listener (see :class:`orchestrator.transport.base.Connector`)."""

    def __init__(self, listener: MemoryListener) -> None:
        self._listener = listener

    @property
    def address(self) -> str:
        """Name the place."""
        return self._listener.address

    def connect(self, timeout: float) -> SocketLink:
        """Make a link; nothing to wait for."""
        return self._listener.connect()
