"""What travels round a ring, and how it is written on the wire. PURE.

Four kinds of items with the gateway's number: a :class:`Step`, which becomes an :class:`Outcome` behind the last
layer or a :class:`Fault` where it comes to nothing, and an :class:`Operate`. They are the wire's own messages; here
are their meanings: token batches and KV operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from orchestrator.errors import InputError
from orchestrator.ring.steps import (
    Clear,
    Copy,
    Forget,
    Keep,
    Recall,
    Remove,
    RingOperation,
    Save,
    Shift,
    TokenBatch,
)
from orchestrator.types import Boundary, FloatArray
from orchestrator.wire.boundary import BoundaryCodec
from orchestrator.wire.ring_codec import FramedStep
from orchestrator.wire.ring_messages import Fault, Operate, Outcome, Step


@dataclass(frozen=True, slots=True, eq=False)
class HiddenOutcome(Outcome):
    """An outcome of the gateway's own layers, with what is not sent: the hidden rows, [n_tokens, width]."""

    hidden: FloatArray


Item: TypeAlias = Step | Outcome | Operate | Fault

_CODES: dict[int, type[RingOperation]] = {
    1: Remove,
    2: Copy,
    3: Keep,
    4: Shift,
    5: Clear,
    6: Save,
    7: Recall,
    8: Forget,
}
_CODE_OF = {kind: code for code, kind in _CODES.items()}


_CODEC_OF = {Boundary.F32: BoundaryCodec.F32, Boundary.F16: BoundaryCodec.F16}


def step_item(number: int, batch: TokenBatch, boundary: Boundary = Boundary.F32) -> Step:
    """Make the item that carries a batch into layer 0; every stage sends its boundary on as the item says."""
    arrays = batch.tokens, batch.positions, batch.sequences, batch.outputs
    return Step(number, 0, *arrays, (), b"", _CODEC_OF[boundary])


def detached(item: Item | FramedStep) -> Item | FramedStep:
    """Copy what of an item is a view of a connection's buffer, so that it outlives the next read."""
    if isinstance(item, FramedStep):
        return FramedStep(item.sequence, memoryview(bytearray(item.frame)))
    if isinstance(item, Outcome):
        return Outcome(item.sequence, item.layer, item.spent, item.logits.copy())
    return item


def batch_of(step: Step) -> TokenBatch:
    """Return the batch that a step carries; raise :class:`InputError` where it has no tokens."""
    return TokenBatch(step.tokens, step.positions, step.sequences, step.outputs)


def operation_item(number: int, operation: RingOperation) -> Operate:
    """Make the item that carries an operation to all stages."""
    match operation:
        case Remove(sequence, first, last):
            numbers = (sequence, first, last, 0)
        case Copy(source, destination, first, last):
            numbers = (source, destination, first, last)
        case Keep(sequence):
            numbers = (sequence, 0, 0, 0)
        case Shift(sequence, first, last, delta):
            numbers = (sequence, first, last, delta)
        case Clear():
            numbers = (0, 0, 0, 0)
        case Save(sequence, key) | Recall(sequence, key):
            numbers = (sequence, key, 0, 0)
        case Forget(key):
            numbers = (key, 0, 0, 0)
    return Operate(number, 0, _CODE_OF[type(operation)], numbers, True, "")


def operation_of(item: Operate) -> RingOperation:
    """Return the operation that an item carries; raise :class:`InputError` for a code that is none."""
    one, two, three, four = item.arguments
    kind = _CODES.get(item.code)
    if kind is Remove:
        return Remove(one, two, three)
    if kind is Copy:
        return Copy(one, two, three, four)
    if kind is Keep:
        return Keep(one)
    if kind is Shift:
        return Shift(one, two, three, four)
    if kind is Clear:
        return Clear()
    if kind is Save:
        return Save(one, two)
    if kind is Recall:
        return Recall(one, two)
    if kind is Forget:
        return Forget(one)
    raise InputError(f"unknown operation {item.code} on the caches")
