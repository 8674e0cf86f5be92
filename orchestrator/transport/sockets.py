"""A link over a connected stream socket, whatever its family.

The socket blocks, and a receive is one system call: its deadline is the socket's own ``SO_RCVTIMEO``, which is
set again only when the time left differs by much from what is set. Python's ``settimeout`` would poll before
every call, and a poll loop with pauses would add its period to every round trip.

Before it sleeps in that call a link looks for bytes without sleep where the waits before promise that some come soon
(:mod:`orchestrator.transport.patience`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Final

from orchestrator.errors import FleetError
from orchestrator.transport.base import Buffer, LinkLostError, LinkTimeoutError
from orchestrator.transport.patience import LONGEST, Patience

_TIMEVAL: Final = struct.Struct("@ll")
_SLACK: Final = 0.1  # a receive may end so much of the time left early or late: saves a system call for each


class SocketLink:
    """A link over a connected stream socket (see :class:`orchestrator.transport.base.Link`)."""

    def __init__(self, sock: socket.socket, address: str) -> None:
        sock.setblocking(True)
        self._socket = sock
        self._address = address
        self._timeout = 0.0  # what SO_RCVTIMEO is set to; 0 waits without end
        self._patience = Patience()
        poller = select.poll()
        poller.register(sock, select.POLLIN)
        self._poll = poller.poll

    @property
    def address(self) -> str:
        """Name the other side."""
        return self._address

    def send(self, buffers: Sequence[Buffer], deadline: float | None = None) -> None:
        """Send all buffers; wait for room until the deadline."""
        rest = self.send_some(buffers)
        while rest:
            wait_for(self, select.POLLOUT, deadline)
            rest = self.send_some(rest)

    def send_some(self, buffers: Sequence[Buffer]) -> Sequence[Buffer]:
        """Send what the socket takes at once, give the rest."""
        try:
            sent = self._socket.sendmsg(buffers, (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return buffers
        except OSError as error:
            raise self._lost(error) from error
        if sent == sum(map(len, buffers)):
            return ()
        return skip_bytes(buffers, sent)

    def receive_into(
        self, view: memoryview, deadline: float | None = None, meanwhile: Callable[[], object] | None = None
    ) -> int:
        """Wait for bytes; 0 is the end of the stream."""
        begin = time.monotonic()
        if deadline is None:
            left = 0.0
        else:
            left = deadline - begin
            if left <= 0:
                raise LinkTimeoutError(f"{self._address} did not answer in time")
        try:
            if deadline is None or left > LONGEST:
                self._patience.look(self._poll, meanwhile)
            if abs(self._timeout - left) > _SLACK * left:
                self._set_timeout(left)
            count = self._socket.recv_into(view)
            self._patience.waited(time.monotonic() - begin)
            return count
        except BlockingIOError as error:
            raise LinkTimeoutError(f"{self._address} did not answer in time") from error
        except OSError as error:
            raise self._lost(error) from error

    def _set_timeout(self, seconds: float) -> None:
        # A value of zero would mean "without end", so the smallest deadline is a microsecond.
        microseconds = 0 if seconds == 0 else max(1, int(seconds * 1e6))
        value = _TIMEVAL.pack(*divmod(microseconds, 1_000_000))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self._timeout = seconds

    def _lost(self, error: OSError) -> LinkLostError:
        if error.errno == errno.EBADF:
            return LinkLostError(f"the connection to {self._address} was closed on this side")
        return LinkLostError(f"the connection to {self._address} broke: {explain(error)}")

    def fileno(self) -> int:
        """Give the socket's descriptor; -1 once closed."""
        return self._socket.fileno()

    def __enter__(self) -> SocketLink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket and wake a thread that waits on it."""
        # Closing alone leaves a thread of this process waiting in recv for ever; shutdown wakes it. A socket
        # whose peer is gone cannot be shut down, which is no error here.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def wait_for(link: SocketLink, event: int, deadline: float | None) -> None:
    """Wait until a descriptor polls this event, or raise :class:`LinkTimeoutError` at the deadline."""
    poller = select.poll()
    try:
        poller.register(link.fileno(), event)
    except ValueError as error:
        raise LinkLostError(f"the connection to {link.address} was closed on this side") from error
    if not poller.poll(poll_timeout(deadline)):
        raise LinkTimeoutError(f"{link.address} took no data until the deadline")


def poll_timeout(deadline: float | None) -> float | None:
    """Turn a deadline into milliseconds for ``poll``, at least one so that a short rest is no busy loop."""
    if deadline is None:
        return None
    left = (deadline - time.monotonic()) * 1e3
    return 0.0 if left <= 0 else max(left, 1.0)


def send_error(code: int) -> FleetError:
    """Say what a send's ``errno`` means; 0 is that no data was taken until the deadline."""
    if code == 0:
        return LinkTimeoutError("it took no data until the deadline")
    return LinkLostError(f"the connection broke: {explain(OSError(code, os.strerror(code)))}")


def skip_bytes(buffers: Sequence[Buffer], count: int) -> list[Buffer]:
    """Drop so many bytes from the front of a list of buffers, without a copy."""
    rest: list[Buffer] = []
    for buffer in buffers:
        if count >= len(buffer):
            count -= len(buffer)
        else:
            rest.append(memoryview(buffer)[count:] if count else buffer)
            count = 0
    return rest


def explain(error: OSError) -> str:
    """Say what an operating system error means, in lower case and without its number."""
    text = os.strerror(error.errno) if error.errno else str(error)
    return text[:1].lower() + text[1:]
