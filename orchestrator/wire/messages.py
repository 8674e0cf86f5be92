"""The messages of the protocol, as frozen values; ``docs/protocol.md`` has their bytes.

A request carries the sequence number that its sender chose, and the reply repeats it. Arrays of a received
message are views into the connection's buffer: they hold until the connection is asked for its receive buffer
again (:meth:`orchestrator.wire.connection.Connection.receive_buffer`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from orchestrator.types import Contract, EngineIdentity, FloatArray, LayerDescriptor, Ownership, RefusalCode

if TYPE_CHECKING:
    from orchestrator.wire.ring_messages import RingMessage

IdArray = npt.NDArray[np.uint16]

MAJOR: Final = 1
"""Version of the frame itself. Another major is refused: only the header and Refuse are the same in all."""


@dataclass(frozen=True, slots=True)
class VersionRange:
    """The minor protocol versions that one side speaks, both ends included."""

    lowest: int
    highest: int

    def __str__(self) -> str:
        low = f"{MAJOR}.{self.lowest}"
        return low if self.lowest == self.highest else f"{low} to {MAJOR}.{self.highest}"


SUPPORTED: Final = VersionRange(lowest=0, highest=2)


class MessageType(enum.IntEnum):
    """The type byte of a frame's header."""

    HELLO = 1
    WELCOME = 2
    REFUSE = 3
    DESCRIBE = 4
    DESCRIBED = 5
    DISPATCH = 6
    RESULT = 7
    MEASURE = 8
    MEASURED = 9
    PING = 10
    PONG = 11
    GOODBYE = 12
    # of the ring, see ring_messages.py
    STAGE_WELCOME = 32
    ATTACH = 33
    ROUTE = 34
    ACCEPTED = 35
    STEP = 36
    OUTCOME = 37
    OPERATE = 38
    FAULT = 39
    CANCEL = 40
    PROBE = 41
    PROBED = 42
    ASSIGN = 43
    ASSIGNING = 44


@dataclass(frozen=True, slots=True)
class Hello:
    """The backbone opens: the versions it speaks, its engine, and who it is."""

    type: ClassVar[MessageType] = MessageType.HELLO
    versions: VersionRange
    identity: EngineIdentity
    client: str
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class Welcome:
    """The worker accepts: the version both will speak, and what it is and owns."""

    type: ClassVar[MessageType] = MessageType.WELCOME
    version: int  # the agreed minor version
    name: str
    pid: int  # the worker's process id on its machine
    identity: EngineIdentity
    model_sha256: str  # identity of the expert tensors' file, 64 hex digits; empty where the worker has none
    architecture: str
    ownership: Ownership
    n_threads: int
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class Refuse:
    """The worker does not do what the request of this sequence number asks, and says why."""

    type: ClassVar[MessageType] = MessageType.REFUSE
    sequence: int
    code: RefusalCode
    text: str


@dataclass(frozen=True, slots=True)
class Describe:
    """The backbone tells how the experts of each layer and call compute."""

    type: ClassVar[MessageType] = MessageType.DESCRIBE
    sequence: int
    descriptors: tuple[LayerDescriptor, ...]


@dataclass(frozen=True, slots=True)
class Described:
    """The worker took this many descriptors."""

    type: ClassVar[MessageType] = MessageType.DESCRIBED
    sequence: int
    accepted: int


@dataclass(frozen=True, slots=True, eq=False)
class Dispatch:
    """Rows for the worker's experts: R rows, each with its own run of (expert, weight) pairs, P in all.

    The pairs of row 0 come first, then those of row 1, each in router order; ``counts`` has the run lengths.
    """

    type: ClassVar[MessageType] = MessageType.DISPATCH
    sequence: int
    layer: int
    call: int
    contract: Contract
    rows: FloatArray  # [R, n]
    counts: IdArray  # [R], each at least 1, sum P
    experts: IdArray  # [P]
    weights: FloatArray  # [P]
    codec: int = 0  # of the rows, see tensors.py

    @property
    def n_replies(self) -> int:
        """Rows that the result has: one per pair for ``exact``, one per row for ``sum``."""
        return len(self.experts) if self.contract is Contract.EXACT else len(self.rows)

    def detached(self) -> Dispatch:
        """Copy the arrays, so that the message outlives the connection's buffer."""
        return replace(
            self,
            rows=self.rows.copy(),
            counts=self.counts.copy(),
            experts=self.experts.copy(),
            weights=self.weights.copy(),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """The experts' rows: [P, n] in the order of the pairs (``exact``) or [R, n] weighted sums (``sum``)."""

    type: ClassVar[MessageType] = MessageType.RESULT
    sequence: int
    compute_us: int  # the worker's compute time in microseconds, without queue and wire
    rows: FloatArray
    codec: int = 0


@dataclass(frozen=True, slots=True)
class Measure:
    """The backbone asks for the compute time of one expert of this layer and call."""

    type: ClassVar[MessageType] = MessageType.MEASURE
    sequence: int
    layer: int
    call: int


@dataclass(frozen=True, slots=True)
class Measured:
    """Milliseconds that one expert takes for 1 row and for 32 rows."""

    type: ClassVar[MessageType] = MessageType.MEASURED
    sequence: int
    ms_at_1: float
    ms_at_32: float


@dataclass(frozen=True, slots=True)
class Ping:
    """Either side asks for an echo."""

    type: ClassVar[MessageType] = MessageType.PING
    sequence: int
    nonce: int  # u64


@dataclass(frozen=True, slots=True)
class Pong:
    """The echo of a ping, with its sequence number and nonce."""

    type: ClassVar[MessageType] = MessageType.PONG
    sequence: int
    nonce: int


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The sender closes the connection in order and sends nothing more."""

    type: ClassVar[MessageType] = MessageType.GOODBYE
    text: str
    sequence: int = 0


# As text, because the ring's messages are made of this module's.
Message: TypeAlias = (
    "Hello | Welcome | Refuse | Describe | Described | Dispatch | Result | Measure | Measured | Ping | Pong | Goodbye"
    " | RingMessage"
)
