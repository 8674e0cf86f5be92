"""Serve backbones: a thread that takes connections, one thread for each of them, and an orderly end.

A thread may wait for ever for a backbone's next request, because a backbone may be idle for hours. It does not
wait for ever for the greeting, for the rest of a frame, or for a peer to take a reply. Bytes that are not the
protocol end their connection and nothing else.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from orchestrator.errors import FleetError, ProtocolError
from orchestrator.transport.base import Link, LinkLostError, LinkTimeoutError, Listener
from orchestrator.transport.sockets import SocketLink
from orchestrator.types import RefusalCode
from orchestrator.wire.connection import Connection
from orchestrator.wire.handshake import agree_version
from orchestrator.wire.messages import SUPPORTED, Goodbye, Hello, Message, Refuse, VersionRange
from orchestrator.wire.state import Role, State
from orchestrator.workers.expert import ExpertService, ExpertSession
from orchestrator.workers.native import NativeCompute, NativePeer

_SLOWEST_RATE: Final = 32 * 1024
"""Bytes per second below which a peer counts as stuck: the deadline of a large frame grows with its size."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """How much of the worker a peer may take; times in seconds."""

    connections: int = 64
    greeting: float = 10.0  # from the connection to a whole Hello
    frame: float = 30.0  # from a frame's first byte to its last, more for large frames
    send: float = 30.0  # until the peer has taken a reply, more for large ones
    linger: float = 0.3  # of draining, in which requests that were on the way are refused in words
    drain: float = 5.0  # until running requests must be done
    discard: float = 0.5  # of reading on after a refusal, so that the peer can read it before the reset


class WorkerServer:
    """Takes connections from a listener and serves each with its own :class:`ExpertSession`."""

    def __init__(
        self,
        service: ExpertService,
        listener: Listener,
        *,
        limits: ServerLimits | None = None,
        versions: VersionRange = SUPPORTED,
        log: Callable[[str], None] = lambda _line: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._service = service
        self._listener = listener
        self._address = listener.address  # a closed listener has none any more
        self._limits = limits or ServerLimits()
        self._versions = versions
        self._log = log
        self._now = now
        self._peers: set[_Peer] = set()
        self._guard = threading.Lock()
        self._accepting = threading.Thread(target=self._accept, name="accept", daemon=True)

    @property
    def address(self) -> str:
        """Where backbones connect to."""
        return self._address

    @property
    def connections(self) -> int:
        """Connections that are open now."""
        with self._guard:
            return len(self._peers)

    def start(self) -> None:
        """Begin to take connections, in threads of their own."""
        self._accepting.start()

    def drain(self) -> bool:
        """Finish what runs, refuse what comes, close all connections; return False where something still runs."""
        limits = self._limits
        self._service.draining = True
        self._listener.close()
        deadline = self._now() + limits.drain
        # Whoever has a request on the way hears a refusal with a reason instead of a reset connection.
        time.sleep(min(limits.linger, limits.drain) if self.connections else 0.0)
        done = True
        with self._guard:
            peers = list(self._peers)
        for peer in peers:
            done = peer.end(deadline - self._now()) and done
        for peer in peers:
            peer.thread.join(max(0.0, deadline - self._now()))
            done = done and not peer.thread.is_alive()
        self._accepting.join(max(0.1, deadline - self._now()))
        return done

    def _accept(self) -> None:
        while not self._service.draining:
            try:
                link = self._listener.accept()
            except LinkLostError:
                return  # closed, by drain
            except FleetError as error:
                # Out of descriptors, for one: connections that end give some back.
                self._log(f"cannot take a connection: {error}")
                time.sleep(0.2)
                continue
            self._take(link)

    def _take(self, link: Link) -> None:
        peer = _Peer(self, link)
        with self._guard:
            full = len(self._peers) >= self._limits.connections
            if not full:
                self._peers.add(peer)
        if full:
            self._log(f"{link.address}: turned away, {self._limits.connections} connections are open")
            peer.turn_away(f"this worker takes {self._limits.connections} connections, and all are in use")
            return
        try:
            peer.thread.start()
        except RuntimeError as error:  # no more threads
            self._log(f"{link.address}: turned away: {error}")
            self._forget(peer)
            peer.turn_away("this worker has no thread left")

    def _forget(self, peer: _Peer) -> None:
        with self._guard:
            self._peers.discard(peer)


class _Peer:
    """One connection and its thread."""

    def __init__(self, server: WorkerServer, link: Link) -> None:
        self._server = server
        self._service = server._service
        self._limits = server._limits
        self._now = server._now
        self._link = link
        self._connection = Connection(Role.WORKER, versions=server._versions)
        # Held from a request to its reply, so that a goodbye never falls into the middle of a reply.
        self._serving = threading.Lock()
        self.thread = threading.Thread(target=self._run, name=f"peer {link.address}", daemon=True)

    # --- the connection's thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        link = self._link
        reason = ""
        try:
            if self._greet():
                self._serve()
        except ProtocolError as error:
            reason = str(error)
            if self._connection.own_state is not State.CLOSED:
                self._part(reason)
        except FleetError as error:
            # What draining closed under this thread is no loss to report.
            reason = "" if self._service.draining else str(error)
        except Exception as error:  # a defect costs this connection, not the worker
            reason = f"defect: {type(error).__name__}: {error}"
        finally:
            link.close()
            self._server._forget(self)
            self._server._log(f"{link.address}: closed" + (f": {reason}" if reason else ""))

    def _greet(self) -> bool:
        """Answer the greeting; return False where it was refused."""
        hello = self._next(self._now() + self._limits.greeting)
        if not isinstance(hello, Hello):
            raise ProtocolError(f"the first message is {hello.type.name}, not HELLO")
        if self._service.draining:
            self._refuse(hello.sequence, RefusalCode.DRAINING, "this worker is shutting down")
            return False
        agreed = agree_version(hello, self._server._versions)
        if isinstance(agreed, str):
            self._server._log(f"{self._link.address}: refused: {agreed}")
            self._refuse(hello.sequence, RefusalCode.INCOMPATIBLE, agreed)
            return False
        with self._serving:
            self._send(self._service.welcome(agreed, hello.sequence))
        self._server._log(f"{self._link.address}: {hello.client or 'a backbone'} connected")
        return True

    def _serve(self) -> None:
        session = ExpertSession(self._service, self._native())
        serving = self._serving
        while True:
            if session.native is not None and self._serve_native(session, session.native):
                continue
            message = self._next(None)
            with serving:
                if self._connection.own_state is not State.SERVING:
                    return  # goodbye was said while this came
                if isinstance(message, Goodbye):
                    self._send(Goodbye(""))
                    return
                self._send(session.answer(message))

    def _native(self) -> NativePeer | None:
        """Give what answers plain requests without Python, where the compute has it."""
        compute = self._service.compute
        # A link of another kind does something to the bytes.
        if type(self._link) is not SocketLink or not isinstance(compute, NativeCompute):
            return None
        return compute.native_peer(self._link.fileno(), self._connection.minor)

    def _serve_native(self, session: ExpertSession, native: NativePeer) -> bool:
        """Wait for a request and answer it; False leaves what came to Python."""
        connection = self._connection
        if not connection.is_idle:
            return False
        if native.wait():
            with self._serving:
                # Goodbye may have been said while the request came.
                done = connection.own_state is State.SERVING and session.answer_native(native)
            if done is None:
                raise LinkLostError("the backbone is gone, or takes no data")
            if done:
                connection.bytes_received += len(native.received)
                connection.bytes_sent += native.sent
                return True
        connection.insert(native.received)
        return False

    def _next(self, deadline: float | None) -> Message:
        """Return the next message; ``deadline`` holds until its first byte, then the frame has its own."""
        connection, link = self._connection, self._link
        count = 0 if connection.is_idle else 1  # of bytes of the message that are here
        begun = self._now()
        if count:
            deadline = begun + self._limits.frame
        message = connection.next_message()
        while message is None:
            try:
                size = link.receive_into(connection.receive_buffer(), deadline)
            except LinkTimeoutError as error:
                what = "the rest of a message" if count else "a greeting"
                raise ProtocolError(f"waited too long for {what}") from error
            if size == 0 and count == 0 and self._connection.own_state is not State.OPENING:
                raise LinkLostError("the backbone went away without a goodbye")
            connection.received(size)
            message = connection.next_message()
            if message is not None:
                break  # nearly every request comes in one piece: its deadlines need not be worked out
            if count == 0:
                begun = self._now()
            count += size
            allowed = begun + self._limits.frame + count / _SLOWEST_RATE
            deadline = allowed if self._connection.own_state is State.SERVING else min(allowed, deadline or allowed)
        return message

    def _send(self, message: Message) -> None:
        buffers = self._connection.send(message)
        size = sum(map(len, buffers))
        self._link.send(buffers, self._now() + self._limits.send + size / _SLOWEST_RATE)

    # --- partings --------------------------------------------------------------------------------------------

    def _refuse(self, sequence: int, code: RefusalCode, text: str) -> None:
        with self._serving:
            self._send(Refuse(sequence, code, text))

    def _part(self, text: str) -> None:
        """Tell a peer that broke the protocol why this is the end, as well as it can still be told."""
        greeted = self._connection.own_state is State.SERVING
        farewell: Message = Goodbye(text) if greeted else Refuse(0, RefusalCode.INCOMPATIBLE, text)
        with contextlib.suppress(FleetError):  # it may be gone already, which is as good
            with self._serving:
                self._send(farewell)
            self._discard()

    def _discard(self) -> None:
        """Read on for a moment: closing with unread bytes would reset the way before the peer has read why."""
        space = memoryview(bytearray(65536))
        deadline = self._now() + self._limits.discard
        while self._link.receive_into(space, deadline) and self._now() < deadline:
            pass

    def turn_away(self, text: str) -> None:
        """Refuse a connection without a thread of its own, and without waiting for the peer."""
        with contextlib.suppress(FleetError):
            self._link.send_some(self._connection.send(Refuse(0, RefusalCode.OVERLOADED, text)))
        self._link.close()

    def end(self, timeout: float) -> bool:
        """Say goodbye between two requests and close, from another thread; False where a request still runs."""
        if not self._serving.acquire(timeout=max(0.0, timeout)):
            return False
        try:
            with contextlib.suppress(FleetError):
                if self._connection.own_state is State.SERVING:
                    self._send(Goodbye("this worker is shutting down"))
        finally:
            self._serving.release()
            self._link.close()
        return True
