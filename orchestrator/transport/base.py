"""What a transport is: a link moves bytes both ways, a connector makes links, a listener takes them.

Deadlines are values of ``time.monotonic()``; None waits without end. A way that is gone is a
:class:`LinkLostError`, a deadline that passed is a :class:`LinkTimeoutError`, never an ``OSError``.

An encrypted or relayed way is one more module with these three classes; nothing above knows which one it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from orchestrator.errors import FleetError, InputError

Buffer: TypeAlias = bytes | memoryview
"""A piece to send; ``len`` is its size in bytes."""


class LinkLostError(FleetError):
    """The other side is gone, refuses to be reached, or the way broke."""


class LinkTimeoutError(FleetError):
    """The deadline passed; after a send the link is of no more use, after a receive it is."""


class Link(Protocol):
    """One way between two processes, in order and without loss, used by one thread at a time.

    ``close`` may be called by any thread, and wakes one that waits.
    """

    @property
    def address(self) -> str:
        """Name the other side, as a person would type it."""

    def send(self, buffers: Sequence[Buffer], deadline: float | None = None) -> None:
        """Send all buffers in order; return when the transport has taken them all."""

    def send_some(self, buffers: Sequence[Buffer]) -> Sequence[Buffer]:
        """Send what goes without waiting and give what is left (nothing, most of the time)."""

    def receive_into(
        self, view: memoryview, deadline: float | None = None, meanwhile: Callable[[], object] | None = None
    ) -> int:
        """Wait for bytes and put them at the front of a view; give their number, 0 at the end of the stream.

        A link may call ``meanwhile`` once where it expects to wait longer than that takes.
        """

    def fileno(self) -> int:
        """Give a descriptor that polls readable and writable as this link does, for waiting on several."""

    def close(self) -> None:
        """Close both directions; harmless when repeated."""


class Connector(Protocol):
    """Makes links to one place, again after each loss."""

    @property
    def address(self) -> str:
        """Name the place, as a person would type it."""

    def connect(self, timeout: float) -> Link:
        """Make a link within so many seconds, or raise one of the two link errors."""


class Listener(Protocol):
    """Takes links that others make."""

    @property
    def address(self) -> str:
        """Name the place to connect to."""

    def accept(self, deadline: float | None = None) -> Link:
        """Wait for the next link; raise :class:`LinkLostError` once the listener is closed."""

    def close(self) -> None:
        """Take no more links and wake the thread that waits; links taken before live on."""


@dataclass(frozen=True, slots=True)
class HostPort:
    """An address of the internet, ``host:port`` or ``[2001:db8::1]:port``."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Tell whether only this machine can reach it."""
        return self.host in {"localhost", "::1"} or self.host.startswith("127.")


def parse_address(text: str) -> HostPort:
    """Read ``host:port`` or ``[ipv6]:port``; raise :class:`InputError` on anything else."""
    host, colon, port = text.strip().rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    malformed = (":" in host) != bracketed or "[" in host or "]" in host
    if not colon or not host or malformed or not (port.isascii() and port.isdecimal()):
        raise InputError(f"{text!r} is not an address", hint="write it like 192.168.1.7:9337 or [::1]:9337")
    if int(port) > 0xFFFF:
        raise InputError(f"{text!r}: a port is at most 65535")
    return HostPort(host, int(port))
