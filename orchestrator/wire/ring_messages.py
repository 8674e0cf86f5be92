"""The messages of the ring: a gateway with its stages, and each stage with the next.

A step travels from stage to stage as a :class:`Step` with the same sequence number everywhere: the gateway's number
of that step, ascending. What comes out at the end is an :class:`Outcome`. Operations on the KV caches
(:class:`Operate`) and steps that came to nothing (:class:`Fault`) travel the same way, so that every stage sees one
order, and the gateway gets exactly one frame back for each that it sent.

``layer`` of these four says at which layer the item goes on: it tells a process that holds several ranges, or a
gateway that holds some itself, where the item belongs.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from orchestrator.types import EngineIdentity, FloatArray, IntArray
from orchestrator.wire.boundary import BoundaryCodec
from orchestrator.wire.messages import MessageType


class Purpose(enum.IntEnum):
    """What a connection to a stage is for."""

    CONTROL = 1  # from the gateway: it opens the ring, and gets what leaves the last stage
    FEED = 2  # from whoever comes before: steps for one range of layers


class FaultKind(enum.IntEnum):
    """Why a step came to nothing."""

    CANCELLED = 1  # the gateway gave it up
    REFUSED = 2  # what it asks for contradicts the stage's sizes
    FAILED = 3  # the computation failed; the stage's caches are as before
    UNREACHABLE = 4  # the next stage could not be reached


@dataclass(frozen=True, slots=True)
class StageWelcome:
    """A stage worker accepts: what it is, which layers it holds, and the sizes of its contexts."""

    type: ClassVar[MessageType] = MessageType.STAGE_WELCOME
    version: int  # the agreed minor version
    name: str
    pid: int
    identity: EngineIdentity
    model_sha256: str
    architecture: str
    n_threads: int
    n_layer: int  # of the whole model
    n_vocab: int
    n_ctx: int  # tokens of one sequence
    n_sequences: int
    n_ubatch: int
    n_batch: int  # most tokens of one step
    batch_invariant: bool
    cuttable: bool  # the end of a sequence can be removed; recurrent state cannot be taken back
    shiftable: bool  # positions can be moved
    ranges: tuple[tuple[int, int], ...]  # (first, last): layers first to last - 1, ascending
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class Attach:
    """The first request of a connection: which ring it belongs to, and what it is for.

    For :attr:`Purpose.CONTROL` the stage forgets all sequences, and serves this ring until the connection ends.
    For :attr:`Purpose.FEED` ``layer`` is the first one of the range that will be fed.
    """

    type: ClassVar[MessageType] = MessageType.ATTACH
    sequence: int
    purpose: Purpose
    layer: int
    ring: str  # a secret that the gateway makes up: whoever knows it may feed


@dataclass(frozen=True, slots=True)
class Route:
    """The gateway says where what leaves the range that begins at ``layer`` goes.

    ``address`` is the next stage, which the stage now connects to; empty: back to the gateway, over the control
    connection.
    """

    type: ClassVar[MessageType] = MessageType.ROUTE
    sequence: int
    layer: int
    address: str


@dataclass(frozen=True, slots=True)
class Accepted:
    """The stage has done what the request of this sequence number asked (Attach, Route, Assign)."""

    type: ClassVar[MessageType] = MessageType.ACCEPTED
    sequence: int


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """Tokens on their way, with what crosses the cut that they have reached."""

    type: ClassVar[MessageType] = MessageType.STEP
    sequence: int
    layer: int
    tokens: IntArray  # [n]
    positions: IntArray  # [n]
    sequences: IntArray  # [n]
    outputs: npt.NDArray[np.bool_]  # [n]: whose logits are wanted
    spent: tuple[int, ...]  # microseconds of computation at each range so far
    boundary: bytes | memoryview  # empty in front of layer 0
    codec: BoundaryCodec = BoundaryCodec.F32  # of the boundary; since version 1.2 it may be another


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What left the last layer: logits of the tokens whose outputs were wanted."""

    type: ClassVar[MessageType] = MessageType.OUTCOME
    sequence: int
    layer: int
    spent: tuple[int, ...]
    logits: FloatArray  # [n_outputs, n_vocab]


@dataclass(frozen=True, slots=True)
class Operate:
    """An operation on the caches, in its place among the steps."""

    type: ClassVar[MessageType] = MessageType.OPERATE
    sequence: int
    layer: int
    code: int
    arguments: tuple[int, int, int, int]
    done: bool  # every stage so far did it
    text: str  # what the first one said that did not


@dataclass(frozen=True, slots=True)
class Fault:
    """A step that came to nothing at layers ``first`` to ``last`` - 1; it goes on so that the order stays whole."""

    type: ClassVar[MessageType] = MessageType.FAULT
    sequence: int
    layer: int
    kind: FaultKind
    first: int
    last: int
    text: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """The gateway gives up steps: a stage that has not computed them yet does not."""

    type: ClassVar[MessageType] = MessageType.CANCEL
    steps: tuple[int, ...]
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class Probe:
    """The gateway asks how far a stage has come, because nothing has come back for too long."""

    type: ClassVar[MessageType] = MessageType.PROBE
    sequence: int


@dataclass(frozen=True, slots=True)
class Probed:
    """How far each range has come: (first layer, last number taken, last number passed on)."""

    type: ClassVar[MessageType] = MessageType.PROBED
    sequence: int
    ranges: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Assign:
    """The gateway says which ranges of layers a stage shall hold: it loads what is new and frees what is not named.

    Since version 1.1; on a control connection, before anything is routed.
    """

    type: ClassVar[MessageType] = MessageType.ASSIGN
    sequence: int
    ranges: tuple[tuple[int, int], ...]  # (first, last) as in :class:`StageWelcome`


@dataclass(frozen=True, slots=True)
class Assigning:
    """The stage is still at the Assign of this sequence number; it says so at least every few seconds."""

    type: ClassVar[MessageType] = MessageType.ASSIGNING
    sequence: int
    thousandths: int  # of the work that are done


RingMessage: TypeAlias = (
    StageWelcome
    | Attach
    | Route
    | Accepted
    | Step
    | Outcome
    | Operate
    | Fault
    | Cancel
    | Probe
    | Probed
    | Assign
    | Assigning
)
