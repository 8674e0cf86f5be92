"""Payloads of the ring's messages, each ``push_x`` with its ``pull_x``; order is the wire's order.

Step and Outcome carry the boundary or the logits: they are written as lists of buffers and read as views, like
the rows of the star. The others are control messages.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from orchestrator.errors import ProtocolError
from orchestrator.wire.boundary import BoundaryCodec
from orchestrator.wire.control import TEXT_LIMIT, pull_identity, push_identity
from orchestrator.wire.fields import Reader, Writer
from orchestrator.wire.frame import HEADER_SIZE
from orchestrator.wire.messages import MessageType
from orchestrator.wire.ring_messages import (
    Accepted,
    Assign,
    Assigning,
    Attach,
    Cancel,
    Fault,
    FaultKind,
    Operate,
    Outcome,
    Probe,
    Probed,
    Purpose,
    RingMessage,
    Route,
    StageWelcome,
    Step,
)

STEP: Final = struct.Struct("<IIHBB")  # tokens n, boundary bytes, layer, boundary codec, ranges passed
OUTCOME: Final = struct.Struct("<IIHBB")  # rows, row length, layer, codec, ranges passed

_LAYER_AT: Final = 8  # in STEP
_LAYER: Final = struct.Struct("<H")

RAW: Final = 0
"""The only codec of logits: the engine's own bytes."""

MAX_RANGES: Final = 4096

_BOUNDARY_CODECS: Final = {int(codec): codec for codec in BoundaryCodec}

_FLAG: Final = (np.zeros(1, np.bool_), np.ones(1, np.bool_))
for _array in _FLAG:
    _array.flags.writeable = False

_I32: Final = np.dtype("<i4")
_F32: Final = np.dtype("<f4")


def push_step(message: Step) -> list[bytes | memoryview]:
    """Write a step as the pieces of its payload; the last may share the message's memory."""
    n, boundary, spent = len(message.tokens), message.boundary, message.spent
    size = len(boundary)
    if n == 1 and not size % 4:
        # Single tokens are most of all steps. Behind a computation no code is in the processor's caches any more,
        # and then each numpy call takes 5 to 10 us.
        values = message.tokens.item(), message.positions.item(), message.sequences.item(), message.outputs.item()
        one = _step_of_one(len(spent)).pack(1, size, message.layer, message.codec, len(spent), *values, *spent)
        return [one, boundary] if size else [one]
    head = b"".join(
        (
            STEP.pack(n, size, message.layer, message.codec, len(spent)),
            message.tokens.astype(_I32, copy=False).tobytes(),
            message.positions.astype(_I32, copy=False).tobytes(),
            message.sequences.astype(_I32, copy=False).tobytes(),
            message.outputs.astype(np.uint8).tobytes(),
            bytes(-n % 4),
            _spent(len(spent)).pack(*spent),
        )
    )
    pieces: list[bytes | memoryview] = [head]
    if size:
        pieces.append(boundary)
    if size % 4:
        pieces.append(bytes(-size % 4))
    return pieces


@functools.cache
def _spent(n_spent: int) -> struct.Struct:
    return struct.Struct(f"<{n_spent}I")


@functools.cache
def _step_of_one(n_spent: int) -> struct.Struct:
    return struct.Struct(f"{STEP.format}3i?3x{n_spent}I")


def pull_step(sequence: int, payload: memoryview) -> Step:
    """Read a step; arrays and boundary are views into the payload.

    Raises:
        ProtocolError: sizes that contradict each other. Tokens, positions and sequences are not judged here.
    """
    size = len(payload)
    if size < STEP.size:
        raise ProtocolError(f"a STEP of {size} bytes is too short")
    n, n_bytes, layer, code, n_spent = STEP.unpack_from(payload)
    codec = _BOUNDARY_CODECS.get(code)
    flags_at = STEP.size + 12 * n
    spent_at = flags_at + n + -n % 4
    boundary_at = spent_at + 4 * n_spent
    is_odd = codec is BoundaryCodec.F16 and n_bytes % 2
    if not n or codec is None or is_odd or size != boundary_at + n_bytes + -n_bytes % 4:
        raise ProtocolError(f"a STEP of {size} bytes says {n} tokens, {n_bytes} bytes of boundary, codec {code}")
    numbers = np.frombuffer(payload, _I32, 3 * n, STEP.size)
    outputs = _FLAG[payload[flags_at] != 0] if n == 1 else np.frombuffer(payload, np.uint8, n, flags_at) != 0
    return Step(
        sequence,
        layer,
        numbers[:n],
        numbers[n : 2 * n],
        numbers[2 * n :],
        outputs,
        _spent(n_spent).unpack_from(payload, spent_at),
        payload[boundary_at : boundary_at + n_bytes],
        codec,
    )


class FramedStep(NamedTuple):
    """A step that is still a frame, header included, whose checksum was right."""

    sequence: int
    frame: memoryview

    @property
    def type(self) -> MessageType:
        """What kind of message it is."""
        return MessageType.STEP

    @property
    def layer(self) -> int:
        """At which layer it goes on."""
        return int(_LAYER.unpack_from(self.frame, HEADER_SIZE + _LAYER_AT)[0])

    def decode(self) -> Step:
        """Read it; raises what :func:`pull_step` does."""
        return pull_step(self.sequence, self.frame[HEADER_SIZE:])


class FramedItem(NamedTuple):
    """A step or an outcome that is a frame already, in two parts; valid until the next step."""

    type: MessageType
    sequence: int
    buffers: list[bytes | memoryview]


def push_outcome(message: Outcome) -> list[bytes | memoryview]:
    """Write an outcome as the pieces of its payload; the logits are sent from where they lie."""
    n_rows, length = message.logits.shape
    spent = message.spent
    head = OUTCOME.pack(n_rows, length, message.layer, RAW, len(spent)) + _spent(len(spent)).pack(*spent)
    if not n_rows or not length:
        return [head]
    return [head, np.ascontiguousarray(message.logits, dtype=_F32).data.cast("B")]


def spent_of(head: memoryview) -> tuple[int, ...]:
    """Read the times from the beginning of an outcome's frame."""
    n_spent = OUTCOME.unpack_from(head, HEADER_SIZE)[4]
    found: tuple[int, ...] = _spent(n_spent).unpack_from(head, HEADER_SIZE + OUTCOME.size)
    return found


def pull_outcome(sequence: int, payload: memoryview) -> Outcome:
    """Read an outcome; the logits are a view into the payload. Raises :class:`ProtocolError` on wrong sizes."""
    size = len(payload)
    if size < OUTCOME.size:
        raise ProtocolError(f"an OUTCOME of {size} bytes is too short")
    n_rows, length, layer, codec, n_spent = OUTCOME.unpack_from(payload)
    rows_at = OUTCOME.size + 4 * n_spent
    if codec != RAW or size != rows_at + 4 * n_rows * length:
        raise ProtocolError(f"an OUTCOME of {size} bytes says {n_rows} rows of {length} values, codec {codec}")
    logits = np.frombuffer(payload, _F32, n_rows * length, rows_at).reshape(n_rows, length)
    return Outcome(sequence, layer, _spent(n_spent).unpack_from(payload, OUTCOME.size), logits)


def push_stage_welcome(writer: Writer, message: StageWelcome) -> None:
    """Write a stage's welcome. Its first field, the version, stands where Welcome has it."""
    writer.push_u16(message.version)
    writer.push_u32(message.pid)
    writer.push_u32(message.n_threads)
    push_identity(writer, message.identity)
    writer.push_text(message.name)
    writer.push_text(message.model_sha256)
    writer.push_text(message.architecture)
    writer.push_u16(message.n_layer)
    writer.push_u32(message.n_vocab)
    writer.push_u32(message.n_ctx)
    writer.push_u16(message.n_sequences)
    writer.push_u32(message.n_ubatch)
    writer.push_u32(message.n_batch)
    writer.push_u8(message.batch_invariant)
    writer.push_u8(message.cuttable)
    writer.push_u8(message.shiftable)
    _push_ranges(writer, message.ranges)


def _push_ranges(writer: Writer, ranges: Sequence[tuple[int, int]]) -> None:
    writer.push_u16(len(ranges))
    for first, last in ranges:
        writer.push_u16(first)
        writer.push_u16(last)


def _pull_ranges(reader: Reader) -> tuple[tuple[int, int], ...]:
    ranges: list[tuple[int, int]] = []
    for _ in range(reader.pull_u16()):
        first, last = reader.pull_u16(), reader.pull_u16()
        if not (ranges[-1][1] if ranges else 0) <= first < last:
            raise ProtocolError(f"layers {first} to {last}: ranges of layers out of order")
        ranges.append((first, last))
    return tuple(ranges)


def pull_stage_welcome(reader: Reader, sequence: int) -> StageWelcome:
    """Read a stage's welcome; what a later version wrote behind it is passed over."""
    version, pid, n_threads = reader.pull_u16(), reader.pull_u32(), reader.pull_u32()
    identity = pull_identity(reader)
    name, model_sha256, architecture = reader.pull_text(), reader.pull_text(), reader.pull_text()
    n_layer, n_vocab = reader.pull_u16(), reader.pull_u32()
    n_ctx, n_sequences = reader.pull_u32(), reader.pull_u16()
    n_ubatch, n_batch = reader.pull_u32(), reader.pull_u32()
    flags = [bool(reader.pull_u8()) for _ in range(3)]
    ranges = _pull_ranges(reader)
    if ranges and ranges[-1][1] > n_layer:
        raise ProtocolError(f"a stage claims layers up to {ranges[-1][1]} of {n_layer}")
    return StageWelcome(
        version=version,
        name=name,
        pid=pid,
        identity=identity,
        model_sha256=model_sha256,
        architecture=architecture,
        n_threads=n_threads,
        n_layer=n_layer,
        n_vocab=n_vocab,
        n_ctx=n_ctx,
        n_sequences=n_sequences,
        n_ubatch=n_ubatch,
        n_batch=n_batch,
        batch_invariant=flags[0],
        cuttable=flags[1],
        shiftable=flags[2],
        ranges=ranges,
        sequence=sequence,
    )


def push_attach(writer: Writer, message: Attach) -> None:
    """Write to which ring a connection belongs."""
    writer.push_u8(message.purpose)
    writer.push_u16(message.layer)
    writer.push_text(message.ring)


def pull_attach(reader: Reader, sequence: int) -> Attach:
    """Read to which ring a connection belongs."""
    number, layer, ring = reader.pull_u8(), reader.pull_u16(), reader.pull_text()
    reader.finish()
    try:
        purpose = Purpose(number)
    except ValueError as error:
        raise ProtocolError(f"unknown purpose {number} of a connection") from error
    return Attach(sequence, purpose, layer, ring)


def push_route(writer: Writer, message: Route) -> None:
    """Write where a range's results go."""
    writer.push_u16(message.layer)
    writer.push_text(message.address)


def pull_route(reader: Reader, sequence: int) -> Route:
    """Read where a range's results go."""
    message = Route(sequence, reader.pull_u16(), reader.pull_text())
    reader.finish()
    return message


def push_nothing(writer: Writer, message: Accepted | Probe) -> None:
    """Write a message that has no fields."""


def pull_accepted(reader: Reader, sequence: int) -> Accepted:
    """Read an acceptance."""
    reader.finish()
    return Accepted(sequence)


def pull_probe(reader: Reader, sequence: int) -> Probe:
    """Read a probe."""
    reader.finish()
    return Probe(sequence)


def push_operate(writer: Writer, message: Operate) -> None:
    """Write an operation on the caches."""
    writer.push_u16(message.layer)
    writer.push_u8(message.code)
    writer.push_u8(message.done)
    for argument in message.arguments:
        writer.push_i32(argument)
    writer.push_text(message.text, limit=TEXT_LIMIT)


def pull_operate(reader: Reader, sequence: int) -> Operate:
    """Read an operation on the caches; whether it exists and makes sense is not judged here."""
    layer, code, done = reader.pull_u16(), reader.pull_u8(), bool(reader.pull_u8())
    arguments = (reader.pull_i32(), reader.pull_i32(), reader.pull_i32(), reader.pull_i32())
    message = Operate(sequence, layer, code, arguments, done, reader.pull_text())
    reader.finish()
    return message


def push_fault(writer: Writer, message: Fault) -> None:
    """Write why a step came to nothing."""
    writer.push_u16(message.layer)
    writer.push_u8(message.kind)
    writer.push_u16(message.first)
    writer.push_u16(message.last)
    writer.push_text(message.text, limit=TEXT_LIMIT)


def pull_fault(reader: Reader, sequence: int) -> Fault:
    """Read why a step came to nothing."""
    layer, number = reader.pull_u16(), reader.pull_u8()
    first, last, text = reader.pull_u16(), reader.pull_u16(), reader.pull_text()
    reader.finish()
    try:
        kind = FaultKind(number)
    except ValueError as error:
        raise ProtocolError(f"unknown kind {number} of a fault: {text}") from error
    return Fault(sequence, layer, kind, first, last, text)


def push_cancel(writer: Writer, message: Cancel) -> None:
    """Write which steps are given up."""
    writer.push_u16(len(message.steps))
    for step in message.steps:
        writer.push_u64(step)


def pull_cancel(reader: Reader, sequence: int) -> Cancel:
    """Read which steps are given up."""
    steps = tuple([reader.pull_u64() for _ in range(reader.pull_u16())])
    reader.finish()
    return Cancel(steps, sequence)


def push_probed(writer: Writer, message: Probed) -> None:
    """Write how far each range has come."""
    writer.push_u16(len(message.ranges))
    for layer, taken, passed in message.ranges:
        writer.push_u16(layer)
        writer.push_u64(taken)
        writer.push_u64(passed)


def pull_probed(reader: Reader, sequence: int) -> Probed:
    """Read how far each range has come."""
    ranges = tuple([(reader.pull_u16(), reader.pull_u64(), reader.pull_u64()) for _ in range(reader.pull_u16())])
    reader.finish()
    return Probed(sequence, ranges)


def push_assign(writer: Writer, message: Assign) -> None:
    """Write which layers a stage shall hold."""
    _push_ranges(writer, message.ranges)


def pull_assign(reader: Reader, sequence: int) -> Assign:
    """Read which layers a stage shall hold."""
    message = Assign(sequence, _pull_ranges(reader))
    reader.finish()
    return message


def push_assigning(writer: Writer, message: Assigning) -> None:
    """Write how far the loading of layers is."""
    writer.push_u16(message.thousandths)


def pull_assigning(reader: Reader, sequence: int) -> Assigning:
    """Read how far the loading of layers is."""
    message = Assigning(sequence, reader.pull_u16())
    reader.finish()
    return message


# As in control.py, the value types are those of each pair above.
RING_PUSH: Final[Mapping[int, Callable[[Writer, Any], None]]] = {
    MessageType.STAGE_WELCOME: push_stage_welcome,
    MessageType.ATTACH: push_attach,
    MessageType.ROUTE: push_route,
    MessageType.ACCEPTED: push_nothing,
    MessageType.OPERATE: push_operate,
    MessageType.FAULT: push_fault,
    MessageType.CANCEL: push_cancel,
    MessageType.PROBE: push_nothing,
    MessageType.PROBED: push_probed,
    MessageType.ASSIGN: push_assign,
    MessageType.ASSIGNING: push_assigning,
}

RING_PULL: Final[Mapping[int, Callable[[Reader, int], RingMessage]]] = {
    MessageType.STAGE_WELCOME: pull_stage_welcome,
    MessageType.ATTACH: pull_attach,
    MessageType.ROUTE: pull_route,
    MessageType.ACCEPTED: pull_accepted,
    MessageType.OPERATE: pull_operate,
    MessageType.FAULT: pull_fault,
    MessageType.CANCEL: pull_cancel,
    MessageType.PROBE: pull_probe,
    MessageType.PROBED: pull_probed,
    MessageType.ASSIGN: pull_assign,
    MessageType.ASSIGNING: pull_assigning,
}
