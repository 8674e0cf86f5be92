"""Unix sockets: for processes of one machine, half the time of TCP per message, and only for its own user.

An address is ``unix:/path/of/the/socket``. The file belongs to the user who listens (mode 0600), so nobody else on
the machine can connect. A file that a killed process left behind is replaced; one that somebody listens on is not.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import stat
import time
from typing import Final

from orchestrator.errors import FleetError, InputError
from orchestrator.transport.base import Connector, LinkLostError, LinkTimeoutError, Listener
from orchestrator.transport.sockets import SocketLink, explain, poll_timeout
from orchestrator.transport.tcp import TcpConnector, TcpListener

PREFIX: Final = "unix:"
_LONGEST: Final = 107  # bytes of a path in sockaddr_un


def is_unix(address: str) -> bool:
    """Tell whether an address is that of a Unix socket."""
    return address.startswith(PREFIX)


def connector_of(address: str) -> Connector:
    """Make the connector of ``unix:/path`` or ``host:port``; raise :class:`InputError` for anything else."""
    return UnixConnector(address) if is_unix(address) else TcpConnector(address)


def listener_of(address: str) -> Listener:
    """Listen on ``unix:/path`` or ``host:port``; raise :class:`InputError` where that cannot be."""
    return UnixListener(address) if is_unix(address) else TcpListener(address)


def _path(address: str) -> str:
    path = address.removeprefix(PREFIX)
    if not is_unix(address) or not path.startswith("/"):
        raise InputError(
            f"{address!r} is not the address of a Unix socket", hint="write it like unix:/run/stage.sock"
        )
    if len(os.fsencode(path)) > _LONGEST:
        raise InputError(f"the path of a Unix socket has at most {_LONGEST} bytes: {path}")
    return path


class UnixConnector:
    """Makes links to one Unix socket (see :class:`orchestrator.transport.base.Connector`)."""

    def __init__(self, address: str) -> None:
        self._path = _path(address)

    @property
    def address(self) -> str:
        """Name the place."""
        return PREFIX + self._path

    def connect(self, timeout: float) -> SocketLink:
        """Make a link within so many seconds."""
        deadline = time.monotonic() + timeout
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            while (code := sock.connect_ex(self._path)) == errno.EAGAIN:
                # The listener's queue is full; there is nothing to poll for.
                if time.monotonic() >= deadline:
                    raise LinkTimeoutError(f"no answer from {self.address} within {timeout:g} s")
                time.sleep(0.005)
            if code:
                reason = explain(OSError(code, os.strerror(code)))
                raise LinkLostError(
                    f"cannot connect to {self.address}: {reason}", hint=f"does a stage listen on {self.address}?"
                )
        except BaseException:
            sock.close()
            raise
        return SocketLink(sock, self.address)


class UnixListener:
    """Takes links on a Unix socket (see :class:`orchestrator.transport.base.Listener`).

    Raises:
        InputError: the path cannot be listened on.
    """

    def __init__(self, address: str, *, backlog: int = 64) -> None:
        self._path = _path(address)
        self._closed = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._remove_leftover()
            before = os.umask(0o177)
            try:
                self._socket.bind(self._path)
            finally:
                os.umask(before)
            self._socket.listen(backlog)
        except OSError as error:
            self._socket.close()
            raise InputError(
                f"cannot listen on {self.address}: {explain(error)}", hint="choose another path"
            ) from error

    @property
    def address(self) -> str:
        """Name the place to connect to."""
        return PREFIX + self._path

    def _remove_leftover(self) -> None:
        """Remove a socket that nobody listens on any more."""
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.stat(self._path).st_mode):
                return
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(self._path) == errno.ECONNREFUSED:
                    os.unlink(self._path)

    def accept(self, deadline: float | None = None) -> SocketLink:
        """Wait for the next link.

        Raises:
            LinkLostError: the listener was closed.
            LinkTimeoutError: the deadline passed.
            FleetError: this process has no descriptor or memory left for another link; try again later.
        """
        poller = select.poll()
        while not self._closed:
            try:
                poller.register(self._socket, select.POLLIN)
                if not poller.poll(poll_timeout(deadline)):
                    raise LinkTimeoutError(f"nobody connected to {self.address}")
                accepted, _ = self._socket.accept()
            except (OSError, ValueError) as error:
                if self._closed:
                    break
                if isinstance(error, OSError) and error.errno in (errno.ECONNABORTED, errno.EAGAIN):
                    continue  # it went away again before we took it
                raise FleetError(f"cannot take a connection: {error}") from error
            return SocketLink(accepted, self.address)
        raise LinkLostError("the listener is closed")

    def __enter__(self) -> UnixListener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take no more links, wake a thread that waits in accept, remove the file."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)
