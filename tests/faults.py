"""Links that fail on purpose, at a place that the test chooses and never by chance.

``FaultyConnector(inner, [faults of the first connection, of the second, ...])`` wraps the links of another
connector. Sends are counted from 0 per connection (the greeting is send 0); received bytes by their offset in the
stream.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from orchestrator.transport.base import Buffer, Connector, Link, LinkLostError, LinkTimeoutError


@dataclass(frozen=True)
class Faults:
    """What goes wrong on one connection."""

    delay: float = 0.0  # seconds between a send and the first byte that can be received after it
    drop_sends: frozenset[int] = frozenset()  # swallowed: the peer never sees them
    duplicate_sends: frozenset[int] = frozenset()  # sent twice
    truncate_sends: Mapping[int, int] = field(default_factory=dict)  # send -> bytes that go before the link dies
    kill_at_send: int | None = None  # the link dies instead of this send
    flip_received: Mapping[int, int] = field(default_factory=dict)  # stream offset -> bits to flip
    end_received_at: int | None = None  # the stream ends after so many bytes
    hold: threading.Event | None = None  # nothing is received until it is set


class FaultyLink:
    """A link that fails as its faults say."""

    def __init__(self, inner: Link, faults: Faults) -> None:
        self.inner = inner
        self.faults = faults
        self.sends = 0
        self.received = 0
        self._last_send = time.monotonic()

    @property
    def address(self) -> str:
        return self.inner.address

    def send(self, buffers: Sequence[Buffer], deadline: float | None = None) -> None:
        for frame in self._frames(buffers):
            self.inner.send(frame, deadline)

    def send_some(self, buffers: Sequence[Buffer]) -> Sequence[Buffer]:
        rest: list[Buffer] = []
        for frame in self._frames(buffers):
            rest.extend(self.inner.send_some(frame) if not rest else frame)
        return rest

    def _frames(self, buffers: Sequence[Buffer]) -> list[Sequence[Buffer]]:
        number, self.sends = self.sends, self.sends + 1
        self._last_send = time.monotonic()
        faults = self.faults
        if number == faults.kill_at_send:
            self.inner.close()
            raise LinkLostError(f"{self.address}: killed at send {number}")
        if number in faults.truncate_sends:
            whole = b"".join(buffers)
            self.inner.send([whole[: faults.truncate_sends[number]]])
            self.inner.close()
            raise LinkLostError(f"{self.address}: cut off within send {number}")
        if number in faults.drop_sends:
            return []
        return [buffers, buffers] if number in faults.duplicate_sends else [buffers]

    def receive_into(
        self, view: memoryview, deadline: float | None = None, meanwhile: Callable[[], object] | None = None
    ) -> int:
        faults = self.faults
        if faults.hold is not None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not faults.hold.wait(left):
                raise LinkTimeoutError(f"{self.address} did not answer in time")
        if faults.delay:
            ready = self._last_send + faults.delay
            if deadline is not None and ready > deadline:
                time.sleep(max(0.0, deadline - time.monotonic()))
                raise LinkTimeoutError(f"{self.address} did not answer in time")
            time.sleep(max(0.0, ready - time.monotonic()))
        if faults.end_received_at is not None:
            view = view[: faults.end_received_at - self.received]
            if not len(view):
                return 0
        count = self.inner.receive_into(view, deadline, meanwhile)
        for offset, bits in faults.flip_received.items():
            if self.received <= offset < self.received + count:
                view[offset - self.received] ^= bits
        self.received += count
        return count

    def fileno(self) -> int:
        return self.inner.fileno()

    def close(self) -> None:
        self.inner.close()


class FaultyConnector:
    """Makes faulty links: the first connection gets the first faults, and so on; after the list there are none."""

    def __init__(self, inner: Connector, plan: Sequence[Faults | None]) -> None:
        self.inner = inner
        self.plan = list(plan)
        self.connections = 0

    @property
    def address(self) -> str:
        return self.inner.address

    def connect(self, timeout: float) -> Link:
        number, self.connections = self.connections, self.connections + 1
        link = self.inner.connect(timeout)
        faults = self.plan[number] if number < len(self.plan) else None
        return link if faults is None else FaultyLink(link, faults)
