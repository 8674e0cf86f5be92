"""One worker as the dispatcher sees it: a link, a connection, the answers it owes and its counters.

Here the errors of transport and protocol become errors that name the worker and the layer. A worker that broke
the protocol, closed, or took no data in time is closed; one that only answered late stays connected, because
its late answer can be told by its number.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NoReturn

from orchestrator.dispatch.exchange import WorkerStatistics
from orchestrator.dispatch.native import NO_COUNTS, Counts
from orchestrator.dispatch.state import Ledger
from orchestrator.errors import (
    FleetError,
    ProtocolError,
    WorkerError,
    WorkerLostError,
    WorkerRefusedError,
    WorkerTimeoutError,
)
from orchestrator.transport.base import Buffer, Connector, Link, LinkTimeoutError
from orchestrator.transport.sockets import SocketLink
from orchestrator.types import Ownership, RefusalCode
from orchestrator.wire.codec import EncodedDispatch
from orchestrator.wire.connection import Connection
from orchestrator.wire.messages import Goodbye, Hello, Message, Ping, Pong, Refuse, Result, Welcome
from orchestrator.wire.state import Role


class WorkerLink:
    """The way to one worker; used by the thread that decodes, its statistics by any."""

    def __init__(self, connector: Connector) -> None:
        self._connector = connector
        self._link: Link | None = None
        self._connection = Connection(Role.BACKBONE)
        self._ledger = Ledger()
        # The connection with the bytes out and in of those before it: one value, because any thread may read it.
        self._meter = (self._connection, 0, 0)
        self.welcome: Welcome | None = None  # the last one; kept after a loss, for the worker's name
        self.round_trip_ms: float | None = None
        self.rows = 0
        self.pairs = 0
        self.errors = 0
        self.late_frames = 0
        self.last_error: str | None = None

    @property
    def name(self) -> str:
        """Name the worker for people: its own name and address, or the address before it greeted."""
        address = self._connector.address
        return address if self.welcome is None else f"{self.welcome.name} ({address})"

    @property
    def is_open(self) -> bool:
        """Tell whether there is a connection."""
        return self._link is not None

    def fileno(self) -> int:
        """Give the open link's descriptor."""
        return self._open_link(None).fileno()

    def native_socket(self) -> tuple[int, int] | None:
        """Give descriptor and protocol version, where native code may read and write between Python's calls."""
        # A link of another kind does something to the bytes, and bytes in the buffer are for Python.
        if type(self._link) is not SocketLink or not self._connection.is_idle:
            return None
        return self._link.fileno(), self._connection.minor

    # --- the connection --------------------------------------------------------------------------------------

    def open(self, hello: Hello, connect_timeout: float, deadline: float, layer: int | None = None) -> Welcome:
        """Connect and greet; the timeout is for the connection, the deadline for the whole, ``layer`` for errors.

        Raises:
            WorkerLostError: no connection, or no greeting.
            WorkerRefusedError: the worker refuses, for example because of the protocol's version.
        """
        self._connection = Connection(Role.BACKBONE, versions=hello.versions)
        self._meter = (self._connection, *self._bytes())
        self._ledger = Ledger()
        try:
            self._link = self._connector.connect(connect_timeout)
            self._link.send(self._connection.send(hello), deadline)
            reply = self._receive(self._link, deadline)
        except FleetError as error:
            self.lose(error, layer, to_connect=True)
        if isinstance(reply, Refuse):
            self.refuse(reply, layer)
        if not isinstance(reply, Welcome):
            self.lose(ProtocolError(f"it greeted with {reply.type.name}"), layer)
        self.welcome = reply
        return reply

    def close(self, text: str) -> None:
        """Say goodbye where that is possible at once, and close."""
        link, self._link = self._link, None
        if link is None:
            return
        # A goodbye is a courtesy: a worker that is gone, or whose buffers are full, does not hear it.
        with contextlib.suppress(FleetError):
            link.send_some(self._connection.send(Goodbye(text)))
        link.close()

    def reject(self, text: str) -> None:
        """Close the connection to a worker that cannot serve, and tell it why."""
        self._note(text)
        self.close(text)

    def lose(self, error: FleetError, layer: int | None, *, to_connect: bool = False) -> NoReturn:
        """Close the connection and raise the error that names worker and layer.

        A failed attempt to connect is not counted: while a worker is away there is one for every step.
        """
        self.drop(str(error), counted=not to_connect)
        kind: type[WorkerError] = WorkerLostError
        if isinstance(error, LinkTimeoutError) and not to_connect:
            kind = WorkerTimeoutError
        raise kind(str(error), worker=self.name, layer=layer, hint=error.hint) from error

    def drop(self, reason: str, *, counted: bool = True) -> None:
        """Close the connection, and count the error unless it was counted before or is another worker's."""
        self._note(reason, counted=counted)
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def refuse(self, reply: Refuse, layer: int | None) -> NoReturn:
        """Raise what a refusal means; one that ends the connection closes it."""
        text = f"refused ({reply.code.name.lower()}): {reply.text}"
        if reply.sequence == 0 or reply.code is RefusalCode.INCOMPATIBLE:
            self.drop(text)
        else:
            self._note(text)
        raise WorkerRefusedError(text, worker=self.name, layer=layer)

    def _note(self, error: str, *, counted: bool = True) -> None:
        self.errors += counted
        self.last_error = error

    # --- requests --------------------------------------------------------------------------------------------

    def post(self, sequence: int, encoded: EncodedDispatch) -> Sequence[Buffer]:
        """Send a dispatch as far as it goes without waiting; give what is left (see ``sending.py``)."""
        link = self._open_link(encoded.layer)
        try:
            rest = link.send_some(self._connection.send_dispatch(sequence, encoded))
        except FleetError as error:
            self.lose(error, encoded.layer)
        self._ledger.asked(sequence)
        self.rows += encoded.n_rows
        self.pairs += encoded.n_pairs
        return rest

    def push_rest(self, rest: Sequence[Buffer], layer: int | None) -> Sequence[Buffer]:
        """Go on with what :meth:`post` left."""
        try:
            return self._open_link(layer).send_some(rest)
        except FleetError as error:
            self.lose(error, layer)

    def collect(self, sequence: int, deadline: float, layer: int | None) -> Message:
        """Wait for the answer to a request; late answers to earlier ones are dropped on the way.

        Raises:
            WorkerLostError, WorkerTimeoutError, WorkerRefusedError: naming this worker and the layer.
        """
        link = self._open_link(layer)
        try:
            while True:
                message = self._receive(link, deadline)
                if self._is_answer(message) and message.sequence == sequence:
                    break
        except LinkTimeoutError as error:
            self._ledger.abandon()
            self._note(str(error))
            raise WorkerTimeoutError(str(error), worker=self.name, layer=layer, hint=error.hint) from error
        except FleetError as error:
            self.lose(error, layer)
        if isinstance(message, Refuse):
            self.refuse(message, layer)
        return message

    def request(self, message: Message, deadline: float, layer: int | None = None) -> Message:
        """Send a control message and wait for its answer."""
        link = self._open_link(layer)
        try:
            link.send(self._connection.send(message), deadline)
        except FleetError as error:
            self.lose(error, layer)
        self._ledger.asked(message.sequence)
        return self.collect(message.sequence, deadline, layer)

    def absorb(self, deadline: float) -> None:
        """Take one piece of what has arrived unasked: late answers are dropped, an end closes the connection.

        Raises:
            FleetError: the connection ended or broke; nothing was closed yet.
        """
        link = self._open_link(None)
        self._connection.received(link.receive_into(self._connection.receive_buffer(), deadline))
        while (message := self._connection.next_message()) is not None:
            if self._is_answer(message):
                raise ProtocolError(f"it answered with {message.type.name} before the request was complete")

    def abandon(self, passed: int = 0) -> None:
        """Await nothing any more; ``passed`` is the last number that native code used."""
        self._ledger.abandon()
        self._ledger.passed(passed)

    def adopt(self, sequence: int, received: bytes = b"") -> None:
        """Await the answer to a request that native code sent; ``received`` came after it."""
        self._ledger.asked(sequence)
        self._connection.insert(received)

    def fail_protocol(self, text: str, layer: int | None) -> NoReturn:
        """Close the connection because an answer does not fit its request."""
        self.lose(ProtocolError(f"broke the protocol: {text}"), layer)

    def _receive(self, link: Link, deadline: float) -> Message:
        connection = self._connection
        while (message := connection.next_message()) is None:
            connection.received(link.receive_into(connection.receive_buffer(), deadline))
        return message

    def _is_answer(self, message: Message) -> bool:
        """Tell whether a message answers an awaited request; deal with the others."""
        if isinstance(message, Result):  # first: it is nearly every message
            pass
        elif isinstance(message, Goodbye):
            raise FleetError(f"the worker said goodbye: {message.text}")
        elif isinstance(message, Ping):
            if self._open_link(None).send_some(self._connection.send(Pong(message.sequence, message.nonce))):
                raise FleetError("the worker takes no data")
            return False
        elif isinstance(message, Refuse) and message.sequence == 0:
            raise FleetError(f"the worker closed: {message.code.name.lower()}: {message.text}")
        if self._ledger.answered(message.sequence):
            return True
        self.late_frames += 1
        return False

    def _open_link(self, layer: int | None) -> Link:
        if self._link is None:
            raise WorkerLostError(self.last_error or "not connected", worker=self.name, layer=layer)
        return self._link

    # --- figures ---------------------------------------------------------------------------------------------

    def _bytes(self) -> tuple[int, int]:
        connection, bytes_out, bytes_in = self._meter
        return bytes_out + connection.bytes_sent, bytes_in + connection.bytes_received

    def statistics(self, ownership: Ownership, native: Counts = NO_COUNTS) -> WorkerStatistics:
        """Give the counters, with those of native code."""
        welcome = self.welcome
        bytes_out, bytes_in = self._bytes()
        return WorkerStatistics(
            name=self._connector.address if welcome is None else welcome.name,
            address=self._connector.address,
            pid=0 if welcome is None else welcome.pid,
            connected=self.is_open,
            round_trip_ms=self.round_trip_ms,
            rows=self.rows + native.rows,
            pairs=self.pairs + native.pairs,
            bytes_out=bytes_out + native.bytes_out,
            bytes_in=bytes_in + native.bytes_in,
            errors=self.errors,
            late_frames=self.late_frames,
            ownership=ownership,
            last_error=self.last_error,
        )
