"""Serve gateways and stages before: one thread that takes connections, one for each of them, an orderly end.

What a connection is for it says itself after the greeting (:class:`orchestrator.wire.ring_messages.Attach`): one for
control reads orders, one that feeds reads items, has them computed and sends them on.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Final

from orchestrator.errors import FleetError, ProtocolError
from orchestrator.transport.base import Link, LinkLostError, LinkTimeoutError, Listener
from orchestrator.types import RefusalCode
from orchestrator.wire.connection import Connection
from orchestrator.wire.handshake import agree_version
from orchestrator.wire.messages import SUPPORTED, Goodbye, Hello, Message, Ping, Pong, Refuse, VersionRange
from orchestrator.wire.ring_codec import FramedItem, FramedStep
from orchestrator.wire.ring_messages import Attach, Fault, Operate, Purpose
from orchestrator.wire.state import Role, State
from orchestrator.workers.server import ServerLimits
from orchestrator.workers.stage import StageService

_ITEMS: Final = (FramedStep, Operate, Fault)

_SLOWEST_RATE: Final = 32 * 1024
"""Bytes per second below which a peer counts as stuck in the middle of a frame."""


class StageServer:
    """Takes connections from a listener for a :class:`StageService`."""

    def __init__(
        self,
        service: StageService,
        listener: Listener,
        *,
        limits: ServerLimits | None = None,
        versions: VersionRange = SUPPORTED,
        log: Callable[[str], None] = lambda _line: None,
    ) -> None:
        self.service = service
        self.limits = limits or ServerLimits()
        self.versions = versions
        self.log = log
        self._listener = listener
        self._address = listener.address  # a closed listener has none any more
        self._peers: set[_Peer] = set()
        self._guard = threading.Lock()
        self._accepting = threading.Thread(target=self._accept, name="accept", daemon=True)

    @property
    def address(self) -> str:
        """Where gateways and other stages connect to."""
        return self._address

    def start(self) -> None:
        """Begin to take connections, in threads of their own."""
        self._accepting.start()

    def drain(self) -> bool:
        """Finish the running step, tell all peers, close; return False where something still computes."""
        self._listener.close()
        deadline = time.monotonic() + self.limits.drain
        done = self.service.drain(self.limits.drain)
        with self._guard:
            peers = list(self._peers)
        for peer in peers:
            peer.part("this stage is shutting down")
        for peer in peers:
            peer.thread.join(max(0.0, deadline - time.monotonic()))
        self._accepting.join(max(0.1, deadline - time.monotonic()))
        return done

    def _accept(self) -> None:
        while not self.service.draining:
            try:
                link = self._listener.accept()
            except LinkLostError:
                return  # closed, by drain
            except FleetError as error:
                self.log(f"cannot take a connection: {error}")  # out of descriptors, for one
                time.sleep(0.2)
                continue
            self._take(link)

    def _take(self, link: Link) -> None:
        peer = _Peer(self, link)
        with self._guard:
            full = len(self._peers) >= self.limits.connections
            if not full:
                self._peers.add(peer)
        if full:
            self.log(f"{link.address}: turned away, {self.limits.connections} connections are open")
            peer.turn_away(f"this stage takes {self.limits.connections} connections, and all are in use")
            return
        peer.thread.start()

    def forget(self, peer: _Peer) -> None:
        """Note that a connection ended."""
        with self._guard:
            self._peers.discard(peer)


class _Peer:
    """One connection and its thread (:class:`orchestrator.workers.stage.Peer`)."""

    def __init__(self, server: StageServer, link: Link) -> None:
        self._server = server
        self._service = server.service
        self._limits = server.limits
        self._link = link
        self._connection = Connection(Role.WORKER, versions=server.versions)
        self._sending = threading.Lock()  # results come from the threads of feeds
        self._parting = False
        self.thread = threading.Thread(target=self._run, name=f"peer {link.address}", daemon=True)

    @property
    def address(self) -> str:
        """Who is there."""
        return self._link.address

    @property
    def minor(self) -> int:
        """The version of the protocol that was agreed."""
        return self._connection.minor

    def send(self, message: Message | FramedItem) -> None:
        """Send from any thread; waits without end, because whoever gives up a ring closes its connections."""
        with self._sending:
            self._link.send(self._connection.send(message))

    def close(self) -> None:
        """Close and wake whoever waits on it."""
        self._parting = True
        self._link.close()

    def part(self, text: str) -> None:
        """Say goodbye between two frames, if that is possible at once, and close."""
        self._parting = True
        if self._sending.acquire(timeout=0.2):
            with contextlib.suppress(FleetError):
                if self._connection.own_state is State.SERVING:
                    self._link.send_some(self._connection.send(Goodbye(text)))
            self._sending.release()
        self._link.close()

    def turn_away(self, text: str) -> None:
        """Refuse a connection without a thread of its own, and without waiting for the peer."""
        with contextlib.suppress(FleetError):
            self._link.send_some(self._connection.send(Refuse(0, RefusalCode.OVERLOADED, text)))
        self._link.close()

    # --- the connection's thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        reason = ""
        try:
            if self._greet():
                self._serve()
        except ProtocolError as error:
            reason = str(error)
            with contextlib.suppress(FleetError):
                greeted = self._connection.own_state is State.SERVING
                text = Goodbye(reason) if greeted else Refuse(0, RefusalCode.INCOMPATIBLE, reason)
                if self._connection.own_state is not State.CLOSED:
                    self.send(text)
                    self._discard()
        except FleetError as error:
            reason = str(error)
        except Exception as error:  # a defect costs this connection, not the stage
            reason = f"defect: {type(error).__name__}: {error}"
        finally:
            self._link.close()
            self._service.detach(self)
            self._server.forget(self)
            # What draining or the end of a ring closed under this thread is no loss to report.
            said = f": {reason}" if reason and not self._parting else ""
            self._server.log(f"{self._link.address}: closed{said}")

    def _discard(self) -> None:
        """Read on for a moment: closing with unread bytes would reset the way before the peer has read why."""
        space = memoryview(bytearray(65536))
        deadline = time.monotonic() + self._limits.discard
        while time.monotonic() < deadline and self._link.receive_into(space, deadline):
            pass

    def _greet(self) -> bool:
        """Answer the greeting; return False where it was refused."""
        hello = self._next(time.monotonic() + self._limits.greeting)
        if not isinstance(hello, Hello):
            raise ProtocolError(f"the first message is {hello.type.name}, not HELLO")
        agreed = agree_version(hello, self._server.versions)
        if isinstance(agreed, str):
            self._server.log(f"{self._link.address}: refused: {agreed}")
            self.send(Refuse(hello.sequence, RefusalCode.INCOMPATIBLE, agreed))
            return False
        self.send(self._service.welcome(agreed, hello.sequence))
        self._server.log(f"{self._link.address}: {hello.client or 'a peer'} connected")
        return True

    def _serve(self) -> None:
        while True:
            message = self._next(None)
            if isinstance(message, Goodbye):
                return
            if isinstance(message, Attach):
                reply = self._service.attach(self, message)
                self.send(reply)
                if not isinstance(reply, Refuse):
                    break
            elif isinstance(message, Ping):
                self.send(Pong(message.sequence, message.nonce))
            else:
                text = f"{message.type.name} before ATTACH: what is this connection for?"
                self.send(Refuse(message.sequence, RefusalCode.BAD_REQUEST, text))
        if message.purpose is Purpose.CONTROL:
            self._control()
        else:
            self._feed(message.layer)

    def _control(self) -> None:
        while not isinstance(message := self._next(None), Goodbye):
            reply = self._service.order(message)
            if reply is not None:
                self.send(reply)

    def _feed(self, layer: int) -> None:
        service = self._service

        def rehearse() -> None:
            step = self._connection.rehearse()
            if step is not None:
                service.rehearse(layer, step)

        while not isinstance(message := self._next(None, rehearse), Goodbye):
            if not isinstance(message, _ITEMS):
                raise ProtocolError(f"a feed sent {message.type.name}")
            service.pass_on(self, layer, message)

    def _next(self, deadline: float | None, meanwhile: Callable[[], None] | None = None) -> Message | FramedStep:
        """Return the next message; ``deadline`` holds until its first byte, then the frame has its own."""
        connection, link = self._connection, self._link
        begun, count, greeted = 0.0, 0, deadline is None
        while (message := connection.next_framed()) is None:
            try:
                size = link.receive_into(connection.receive_buffer(), deadline, meanwhile)
            except LinkTimeoutError as error:
                what = "the rest of a message" if count else "a greeting"
                raise ProtocolError(f"waited too long for {what}") from error
            if size == 0 and count == 0:
                raise LinkLostError("it went away without a goodbye")
            connection.received(size)
            if count == 0:
                begun = time.monotonic()
            count += size
            if greeted:
                deadline = begun + self._limits.frame + count / _SLOWEST_RATE
        return message
