"""A connection to a stage worker: greeting, requests, items out, messages in.

The gateway has one to each stage for control and one to each that it feeds; a stage has one to the next. Errors
name the stage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Final

from orchestrator.errors import FleetError, ProtocolError, StageLostError, StageRefusedError
from orchestrator.ring.items import Item
from orchestrator.transport.base import Buffer, Connector, Link, LinkTimeoutError
from orchestrator.wire.connection import Connection
from orchestrator.wire.messages import Goodbye, Hello, Message, Ping, Pong, Refuse, Welcome
from orchestrator.wire.ring_codec import FramedItem, FramedStep
from orchestrator.wire.ring_messages import (
    Accepted,
    Assign,
    Assigning,
    Attach,
    Cancel,
    Probe,
    Route,
    StageWelcome,
)
from orchestrator.wire.state import Role

_ASSIGN_MINOR: Final = 1  # the protocol's version that brought it
_CODEC_MINOR: Final = 2


class StageLink:
    """One greeted connection; used by one thread at a time. Every :class:`FleetError` that it raises ends it."""

    def __init__(self, connector: Connector, name: str | None = None) -> None:
        self._connector = connector
        self.name = name or connector.address
        self._link: Link | None = None
        self._connection = Connection(Role.BACKBONE)

    def open(self, hello: Hello, timeout: float, deadline: float) -> StageWelcome:
        """Connect and greet; the timeout in seconds is for the connection, the deadline for the whole.

        Raises:
            StageLostError: no connection, or no greeting.
            StageRefusedError: the other side refuses, or is no stage worker.
        """
        self._connection = Connection(Role.BACKBONE, versions=hello.versions)
        try:
            self._link = self._connector.connect(timeout)
            self._link.send(self._connection.send(hello), deadline)
            reply = self.receive(deadline)
        except StageLostError:
            raise
        except FleetError as error:
            raise self.lost(error) from error
        if isinstance(reply, StageWelcome):
            self.name = f"{reply.name} ({self._connector.address})"
            return reply
        self.close("a stage was looked for")
        if isinstance(reply, Refuse):
            raise StageRefusedError(f"refused ({reply.code.name.lower()}): {reply.text}", stage=self.name)
        what = "is an expert worker" if isinstance(reply, Welcome) else f"greeted with {reply.type.name}"
        raise StageRefusedError(f"{what}, not a stage", stage=self.name, hint="start one with `linkcpp stage`")

    @property
    def is_open(self) -> bool:
        """Tell whether there is a connection."""
        return self._link is not None

    def fileno(self) -> int:
        """Give the open link's descriptor."""
        return self._need().fileno()

    @property
    def can_assign(self) -> bool:
        """Tell whether both sides know :class:`Assign`."""
        return self._connection.minor >= _ASSIGN_MINOR

    @property
    def can_round(self) -> bool:
        """Tell whether both sides know boundaries in other codecs than F32."""
        return self._connection.minor >= _CODEC_MINOR

    def request(
        self, message: Attach | Route | Assign, deadline: float, extend: Callable[[], float] | None = None
    ) -> None:
        """Ask and wait until it is accepted; nothing else may be on the way.

        ``extend`` gives a new deadline each time the stage says that it is still at it.

        Raises:
            StageRefusedError: the stage refuses, in words.
            StageLostError: it is gone, late, or answers something else.
        """
        try:
            self._need().send(self._connection.send(message), deadline)
        except FleetError as error:
            raise self.lost(error) from error
        while isinstance(reply := self.receive(deadline), Assigning) and extend is not None:
            deadline = extend()
        if isinstance(reply, Refuse):
            raise StageRefusedError(f"refused ({reply.code.name.lower()}): {reply.text}", stage=self.name)
        if not isinstance(reply, Accepted) or reply.sequence != message.sequence:
            raise self.lost(ProtocolError(f"it answered {message.type.name} with {reply.type.name}"))

    @property
    def minor(self) -> int:
        """The version of the protocol that was agreed."""
        return self._connection.minor

    def send(self, item: Item | FramedItem | Ping | Pong | Cancel | Probe) -> None:
        """Send and wait without end until the transport took it: whoever gives up closes the link."""
        try:
            self._need().send(self._connection.send(item))
        except FleetError as error:
            raise self.lost(error) from error

    def send_some(self, item: Item | FramedItem | Cancel | Probe | Pong) -> Sequence[Buffer]:
        """Send what goes without waiting; the rest, to be given to :meth:`push_rest` before the next send."""
        try:
            return self._need().send_some(self._connection.send(item))
        except FleetError as error:
            raise self.lost(error) from error

    def push_rest(self, rest: Sequence[Buffer]) -> Sequence[Buffer]:
        """Go on with what :meth:`send_some` left."""
        try:
            return self._need().send_some(rest)
        except FleetError as error:
            raise self.lost(error) from error

    def read(self, deadline: float | None, rehearse: Callable[[FramedStep], object] | None = None) -> bool:
        """Wait for bytes, once; :meth:`next` has what they complete. False where the deadline passed.

        ``rehearse`` may be called before they are due, with the step that came last.

        Raises:
            StageLostError: the stage is gone.
        """
        connection = self._connection
        try:
            meanwhile = None if rehearse is None else lambda: self._rehearse(rehearse)
            size = self._need().receive_into(connection.receive_buffer(), deadline, meanwhile)
            connection.received(size)
        except LinkTimeoutError:
            return False
        except FleetError as error:
            raise self.lost(error) from error
        return True

    def _rehearse(self, rehearse: Callable[[FramedStep], object]) -> None:
        step = self._connection.rehearse()
        if step is not None:
            rehearse(step)

    def next(self) -> Message | FramedStep | None:
        """Return the next whole message, None while more bytes are needed; arrays hold until the next read."""
        try:
            return self._connection.next_framed()
        except FleetError as error:
            raise self.lost(error) from error

    def receive(self, deadline: float) -> Message | FramedStep:
        """Wait for the next message; a deadline that passes ends the connection."""
        while (message := self.next()) is None:
            if not self.read(deadline):
                raise self.lost(LinkTimeoutError("it did not answer in time"))
        if isinstance(message, Goodbye):
            raise self.lost(ProtocolError(f"it said goodbye: {message.text}" if message.text else "it said goodbye"))
        return message

    def lost(self, error: FleetError) -> StageLostError:
        """Close the connection and make the error that names the stage."""
        link, self._link = self._link, None
        if link is not None:
            link.close()
        if isinstance(error, StageLostError):
            return error
        return StageLostError(str(error), stage=self.name, hint=error.hint)

    def close(self, text: str) -> None:
        """Say goodbye where that is possible at once, and close; any thread may call this."""
        link, self._link = self._link, None
        if link is None:
            return
        with contextlib.suppress(FleetError):  # a courtesy: whoever is gone or full does not hear it
            link.send_some(self._connection.send(Goodbye(text)))
        link.close()

    def _need(self) -> Link:
        if self._link is None:
            raise StageLostError("there is no connection", stage=self.name)
        return self._link
