"""Who may say what, and when.

A connection has two sides, and each side has its own state. That of the backbone, which opens::

    OPENING --Hello--> WAITING --(Welcome came)--> SERVING --Goodbye--> CLOSED
                          |
                          +--(Refuse came)--> CLOSED

and that of the worker, which answers::

    OPENING --(Hello came)--> ANSWERING --Welcome--> SERVING --Goodbye--> CLOSED
                                  |
                                  +--Refuse--> CLOSED

A message moves the state of the side that sends it (:data:`TRANSITIONS`); the three messages of the greeting
also move the other side (:data:`COUPLED`). Both ends run the same two automata, so that each knows what it may
send and what it may receive, and anything else is a :class:`ProtocolError`.

Why two states and not one for the whole connection: once both are SERVING, frames cross on the way. A worker
that is told to stop says Goodbye while the backbone's next request already travels; that request is no error.
With one state it would be. So a side that has said Goodbye sends nothing more, and what still comes in is legal
for as long as the other side is SERVING.

Within SERVING there are no more states: every request has a sequence number of its own, its reply repeats it,
and requests may be outstanding in any number. A worker answers them in the order in which they came. Which
answer is awaited, and which comes too late, is decided where the requests are made (``dispatch/state.py``).

In a ring the same two roles serve: whoever connects to a stage is its backbone, be it the gateway or the stage
before. What travels round (steps, operations, faults) has the gateway's numbers and is answered by nobody: it comes
out at the other end.

A worker's Refuse of a single request leaves the connection as it is. Before the greeting is over it ends it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

from orchestrator.errors import ProtocolError
from orchestrator.wire.messages import MessageType


class Role(enum.Enum):
    """The two sides of a connection."""

    BACKBONE = "backbone"
    WORKER = "worker"


class State(enum.Enum):
    """Where one side stands."""

    OPENING = "opening"
    WAITING = "waiting"  # the backbone has said hello
    ANSWERING = "answering"  # the worker has heard hello
    SERVING = "serving"
    CLOSED = "closed"


def _stay(*kinds: MessageType) -> dict[MessageType, State]:
    return dict.fromkeys(kinds, State.SERVING)


_TRAVELLING: Final = (MessageType.STEP, MessageType.OPERATE, MessageType.FAULT)
"""What goes round the ring: into a stage by whoever feeds it, and out of the last one to the gateway."""

TRANSITIONS: Final[Mapping[Role, Mapping[State, Mapping[MessageType, State]]]] = {
    Role.BACKBONE: {
        State.OPENING: {MessageType.HELLO: State.WAITING},
        State.WAITING: {},
        State.SERVING: {
            **_stay(
                MessageType.DESCRIBE,
                MessageType.DISPATCH,
                MessageType.MEASURE,
                MessageType.PING,
                MessageType.PONG,
                MessageType.ATTACH,
                MessageType.ROUTE,
                MessageType.CANCEL,
                MessageType.PROBE,
                MessageType.ASSIGN,
                *_TRAVELLING,
            ),
            MessageType.GOODBYE: State.CLOSED,
        },
        State.CLOSED: {},
    },
    Role.WORKER: {
        State.OPENING: {MessageType.REFUSE: State.CLOSED},  # what came was no hello at all
        State.ANSWERING: {
            MessageType.WELCOME: State.SERVING,
            MessageType.STAGE_WELCOME: State.SERVING,
            MessageType.REFUSE: State.CLOSED,
        },
        State.SERVING: {
            **_stay(
                MessageType.DESCRIBED,
                MessageType.RESULT,
                MessageType.MEASURED,
                MessageType.REFUSE,
                MessageType.PING,
                MessageType.PONG,
                MessageType.ACCEPTED,
                MessageType.PROBED,
                MessageType.ASSIGNING,
                MessageType.OUTCOME,
                *_TRAVELLING,
            ),
            MessageType.GOODBYE: State.CLOSED,
        },
        State.CLOSED: {},
    },
}
"""Per role and state: the messages it may send, and the state after each."""

COUPLED: Final[Mapping[tuple[Role, MessageType], Mapping[State, State]]] = {
    (Role.BACKBONE, MessageType.HELLO): {State.OPENING: State.ANSWERING},
    (Role.WORKER, MessageType.WELCOME): {State.WAITING: State.SERVING},
    (Role.WORKER, MessageType.STAGE_WELCOME): {State.WAITING: State.SERVING},
    (Role.WORKER, MessageType.REFUSE): {State.WAITING: State.CLOSED, State.OPENING: State.CLOSED},
}
"""A message that also moves the other side, by that side's state."""

_STEP: Final = MessageType.STEP
_SERVING: Final = State.SERVING  # a member of an enum costs a lookup through its class each time


class ConnectionState:
    """The two automata of one connection, as one of its ends sees them."""

    def __init__(self, role: Role) -> None:
        self.own_role = role
        self.peer_role = Role.WORKER if role is Role.BACKBONE else Role.BACKBONE
        self.own = State.OPENING
        self.peer = State.OPENING
        # What nearly every message is: it changes nothing, and enums are slow dictionary keys.
        backbone = role is Role.BACKBONE
        self._usually_received = MessageType.RESULT if backbone else MessageType.DISPATCH
        self._usually_sent = MessageType.DISPATCH if backbone else MessageType.RESULT

    def sent(self, kind: MessageType) -> None:
        """Move for a message that this end sends; raise :class:`ProtocolError` where it may not."""
        if (kind is self._usually_sent or kind is _STEP) and self.own is _SERVING:
            return
        after = TRANSITIONS[self.own_role].get(self.own, {}).get(kind)
        if after is None:
            raise ProtocolError(f"a {self.own_role.value} cannot send {kind.name} while {self.own.value}")
        self.own = after
        moved = COUPLED.get((self.own_role, kind))
        if moved is not None:
            self.peer = moved.get(self.peer, self.peer)

    def received(self, kind: MessageType) -> None:
        """Move for a message that the peer sent; raise :class:`ProtocolError` where it may not."""
        if (kind is self._usually_received or kind is _STEP) and self.peer is _SERVING:
            return
        after = TRANSITIONS[self.peer_role].get(self.peer, {}).get(kind)
        if after is None:
            raise ProtocolError(f"a {self.peer_role.value} sent {kind.name} while {self.peer.value}")
        self.peer = after
        moved = COUPLED.get((self.peer_role, kind))
        if moved is not None:
            self.own = moved.get(self.own, self.own)
