"""TCP: connect to every address of a name until one answers, and listen."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from itertools import chain, zip_longest
from typing import Any, Final, TypeAlias

from orchestrator.errors import FleetError, InputError
from orchestrator.transport.base import HostPort, LinkLostError, LinkTimeoutError, parse_address
from orchestrator.transport.sockets import SocketLink, explain, poll_timeout

STAGGER: Final = 0.25
"""Seconds before the next address is tried beside the one that has not answered (RFC 8305 section 5)."""

_KEEPALIVE: Final = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))

_SocketAddress: TypeAlias = Any  # a tuple whose shape depends on the family; only passed through
_Found: TypeAlias = tuple[socket.AddressFamily, _SocketAddress]
Resolver: TypeAlias = Callable[[HostPort], Sequence[_Found]]


class TcpConnector:
    """Makes TCP links to one address (see :class:`orchestrator.transport.base.Connector`)."""

    def __init__(self, address: str | HostPort) -> None:
        self._target = parse_address(address) if isinstance(address, str) else address

    @property
    def address(self) -> str:
        """Name the place."""
        return str(self._target)

    def connect(self, timeout: float) -> SocketLink:
        """Make a link within so many seconds."""
        return connect(self._target, timeout)


def connect(address: HostPort, timeout: float, *, resolve: Resolver | None = None) -> SocketLink:
    """Connect to the first address of a name that answers, IPv6 and IPv4 in turn.

    An address that swallows packets delays the next one by :data:`STAGGER` only. Looking up the name is the
    system's business and not under the timeout.

    Raises:
        LinkLostError: the name is unknown, or every address refused.
        LinkTimeoutError: no address answered in time.
    """
    deadline = time.monotonic() + timeout
    waiting = _interleave((resolve or _resolve)(address))
    race = _Race(address)
    try:
        while race.won is None:
            pause = deadline
            if waiting:
                if not race.start(*waiting.pop(0)):
                    continue
                pause = min(deadline, time.monotonic() + STAGGER)
            elif not race.running:
                raise LinkLostError(f"cannot connect to {address}: {race.reason}", hint=race.hint)
            race.wait(pause)
            if race.won is None and time.monotonic() >= deadline:
                raise LinkTimeoutError(f"no answer from {address} within {timeout:g} s", hint=race.hint)
        return SocketLink(_tune(race.won), str(address))
    finally:
        race.stop()


class _Race:
    """Several connection attempts at once; the first that is through wins."""

    def __init__(self, address: HostPort) -> None:
        self._address = address
        self._poller = select.poll()
        self.running: dict[int, socket.socket] = {}
        self.won: socket.socket | None = None
        self.reason = "the name has no address"
        self.hint = f"is a worker listening on {address}?"

    def start(self, family: socket.AddressFamily, target: _SocketAddress) -> bool:
        """Begin an attempt; False when it failed or won at once."""
        try:
            attempt = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            self.reason = explain(error)
            return False
        attempt.setblocking(False)
        code = attempt.connect_ex(target)
        if code == errno.EINPROGRESS:
            self.running[attempt.fileno()] = attempt
            self._poller.register(attempt, select.POLLOUT)
            return True
        self._finish(attempt, code)
        return False

    def wait(self, deadline: float) -> None:
        """Wait until an attempt ends, or until the deadline."""
        for descriptor, _ in self._poller.poll(poll_timeout(deadline)):
            attempt = self.running.pop(descriptor)
            self._poller.unregister(descriptor)
            self._finish(attempt, attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))

    def _finish(self, attempt: socket.socket, code: int) -> None:
        # A port of this machine that nobody listens on can be handed to the attempt itself, which then connects
        # to itself (TCP's simultaneous open). That is no worker.
        try:
            if code == 0 and attempt.getsockname() == attempt.getpeername():
                code = errno.ECONNREFUSED
        except OSError as error:  # it was reset between the two calls
            code = error.errno or errno.ECONNRESET
        if code == 0 and self.won is None:
            self.won = attempt
            return
        if code:
            self.reason = explain(OSError(code, os.strerror(code)))
        attempt.close()

    def stop(self) -> None:
        """Close the attempts that did not win."""
        for attempt in self.running.values():
            attempt.close()
        self.running.clear()


def _interleave(found: Sequence[_Found]) -> list[_Found]:
    first = [entry for entry in found if entry[0] == found[0][0]]
    second = [entry for entry in found if entry[0] != found[0][0]]
    return [entry for entry in chain.from_iterable(zip_longest(first, second)) if entry is not None]


def _resolve(address: HostPort, *, flags: int = 0) -> list[_Found]:
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=flags)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a host name"
        raise LinkLostError(f"cannot look up {address.host!r}: {reason}") from error
    return [(family, target) for family, _, _, _, target in found]


def _tune(sock: socket.socket) -> socket.socket:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    return sock


class TcpListener:
    """Takes TCP links (see :class:`orchestrator.transport.base.Listener`); port 0 lets the system choose.

    Raises:
        InputError: the address cannot be listened on.
    """

    def __init__(self, address: str | HostPort, *, backlog: int = 64) -> None:
        target = parse_address(address) if isinstance(address, str) else address
        self._socket = _listen(target, backlog)
        self._closed = False

    @property
    def host_port(self) -> HostPort:
        """Give host and port, with the port that the system chose."""
        return _name(self._socket.getsockname())

    @property
    def address(self) -> str:
        """Name the place to connect to."""
        return str(self.host_port)

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
                ready = poller.poll(poll_timeout(deadline))
                if not ready:
                    raise LinkTimeoutError(f"nobody connected to {self.address}")
                accepted, peer = self._socket.accept()
            except (OSError, ValueError) as error:
                if self._closed:
                    break
                code = error.errno if isinstance(error, OSError) else None
                if code in (errno.ECONNABORTED, errno.EPROTO, errno.EAGAIN):
                    continue  # it went away again before we took it
                raise FleetError(f"cannot take a connection: {error}") from error
            return SocketLink(_tune(accepted), str(_name(peer)))
        raise LinkLostError("the listener is closed")

    def __enter__(self) -> TcpListener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take no more links and wake a thread that waits in accept."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _listen(address: HostPort, backlog: int) -> socket.socket:
    reason = "the name has no address"
    for family, target in _resolve(address, flags=socket.AI_PASSIVE):
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            reason = explain(error)
            continue
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(target)
            sock.listen(backlog)
        except OSError as error:
            sock.close()
            reason = explain(error)
            continue
        return sock
    raise InputError(f"cannot listen on {address}: {reason}", hint="choose another address or port")


def _name(target: _SocketAddress) -> HostPort:
    return HostPort(str(target[0]), int(target[1]))
