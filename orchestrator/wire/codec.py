"""Whole frames: every message to the buffers of one frame, and a checked frame back to its message.

Dispatch and Result are the hot path (one pair per MoE layer and token). They are written as a list of buffers
for a gathering send: nothing is concatenated, and the rows are sent from the memory where they lie.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from orchestrator.errors import ProtocolError
from orchestrator.types import Contract, FloatArray
from orchestrator.wire.control import PULL, PUSH
from orchestrator.wire.fields import Reader, Writer
from orchestrator.wire.frame import CONTROL_LIMITS, Header, push_header
from orchestrator.wire.messages import Dispatch, Message, MessageType, Result
from orchestrator.wire.ring_codec import (
    RING_PULL,
    RING_PUSH,
    pull_outcome,
    pull_step,
    push_outcome,
    push_step,
)
from orchestrator.wire.ring_messages import Outcome, Step
from orchestrator.wire.tensors import CODECS, codec_of

Buffers: TypeAlias = list[bytes | memoryview]
"""The pieces of one frame in order; ``len`` of each is its size in bytes."""

DISPATCH: Final = struct.Struct("<HBBB3xIII4x")  # layer, call, contract, codec, rows R, pairs P, row length n
RESULT: Final = struct.Struct("<IIIB3x")  # compute microseconds, rows, row length n, codec

CONTRACT_CODES: Final = {Contract.EXACT: 0, Contract.SUM: 1}
_CONTRACTS: Final = (Contract.EXACT, Contract.SUM)

_DISPATCH_TYPE: Final = int(MessageType.DISPATCH)
_RESULT_TYPE: Final = int(MessageType.RESULT)

_PUSH: Final = {**PUSH, **RING_PUSH}
_PULL: Final = {**PULL, **RING_PULL}

_F32: Final = np.dtype("<f4")
_U16: Final = np.dtype("<u2")


def push_message(minor: int, message: Message) -> Buffers:
    """Encode a message as one frame of this minor version; the buffers may share the message's arrays.

    Raises:
        ProtocolError: a control message is longer than its limit, which its receiver would refuse.
    """
    if isinstance(message, Step):
        return _frame(minor, message, push_step(message))
    if isinstance(message, Dispatch):
        return push_dispatch(minor, message)
    if isinstance(message, Result):
        return push_result(minor, message)
    if isinstance(message, Outcome):
        return _frame(minor, message, push_outcome(message))
    writer = Writer()
    try:
        _PUSH[message.type](writer, message)
    except struct.error as error:
        raise ProtocolError(f"a value does not fit into a {message.type.name}: {error}") from error
    payload = writer.finish()
    if len(payload) > CONTROL_LIMITS[message.type]:
        raise ProtocolError(f"a {message.type.name} of {len(payload)} bytes cannot be sent: over its limit")
    return [push_header(minor, message.type, message.sequence, (payload,)), payload]


def pull_message(header: Header, payload: memoryview) -> Message:
    """Decode the payload of a checked frame; raise :class:`ProtocolError` on anything that is not the message."""
    if header.type == _RESULT_TYPE:
        return pull_result(header.sequence, payload)
    if header.type == _DISPATCH_TYPE:
        return pull_dispatch(header.sequence, payload)
    if header.type == MessageType.STEP:
        return pull_step(header.sequence, payload)
    if header.type == MessageType.OUTCOME:
        return pull_outcome(header.sequence, payload)
    message: Message = _PULL[header.type](Reader(payload), header.sequence)
    return message


def _frame(minor: int, message: Step | Outcome, payload: Buffers) -> Buffers:
    head = push_header(minor, message.type, message.sequence, payload)
    return [head + payload[0], *payload[1:]]


class EncodedDispatch(NamedTuple):
    """A dispatch whose arrays are bytes already: what the hot path hands over instead of a message."""

    layer: int
    call: int
    contract: int  # of CONTRACT_CODES
    codec: int
    n_rows: int
    n_pairs: int
    length: int  # of a row, in values
    rows: bytes | memoryview  # encoded by the codec
    tail: bytes | memoryview  # weights F32[P], counts U16[R], experts U16[P], padding to four bytes


def frame_dispatch(minor: int, sequence: int, encoded: EncodedDispatch) -> Buffers:
    """Frame an encoded dispatch, header and fixed part in one buffer."""
    rows, tail = encoded.rows, encoded.tail
    fixed = DISPATCH.pack(*encoded[:7])
    head = push_header(minor, _DISPATCH_TYPE, sequence, (fixed, rows, tail))
    return [head + fixed, rows, tail]


def push_tail(weights: FloatArray, counts: npt.NDArray[Any], experts: npt.NDArray[Any]) -> bytes:
    """Encode what stands behind the rows of a dispatch, from arrays [P], [R] and [P] of any integer type."""
    return b"".join(
        (
            np.ascontiguousarray(weights, dtype=_F32).tobytes(),
            counts.astype(_U16).tobytes(),
            experts.astype(_U16).tobytes(),
            bytes(2 * (len(counts) + len(experts)) % 4),
        )
    )


def push_tail_of_one(weights: Sequence[float], experts: Sequence[int]) -> bytes:
    """Do the same for a single row, from lists: a third of the time that numpy takes for so few values."""
    n_pairs = len(experts)
    return _tail_of_one(n_pairs).pack(*weights, n_pairs, *experts)


@functools.cache
def _tail_of_one(n_pairs: int) -> struct.Struct:
    return struct.Struct(f"<{n_pairs}fH{n_pairs}H" + "2x" * (n_pairs % 2 == 0))


def push_dispatch(minor: int, message: Dispatch) -> Buffers:
    """Encode a dispatch."""
    n_rows, length = message.rows.shape
    encoded = EncodedDispatch(
        message.layer,
        message.call,
        CONTRACT_CODES[message.contract],
        message.codec,
        n_rows,
        len(message.experts),
        length,
        codec_of(message.codec).encode(message.rows),
        push_tail(message.weights, message.counts, message.experts),
    )
    return frame_dispatch(minor, message.sequence, encoded)


def pull_dispatch(sequence: int, payload: memoryview) -> Dispatch:
    """Decode a dispatch; its arrays are views into the payload.

    Raises:
        ProtocolError: sizes that contradict each other. Whether layer and experts exist is not checked here.
    """
    size = len(payload)
    if size < DISPATCH.size:
        raise ProtocolError(f"a DISPATCH of {size} bytes is too short")
    layer, call, contract, code, n_rows, n_pairs, length = DISPATCH.unpack_from(payload)
    codec = codec_of(code)
    if contract >= len(_CONTRACTS):
        raise ProtocolError(f"unknown contract {contract}")
    if not n_rows or not length or n_pairs < n_rows:
        raise ProtocolError(f"a DISPATCH of {n_rows} rows of {length} values with {n_pairs} pairs")
    weights_at = DISPATCH.size + codec.size(n_rows, length)
    counts_at = weights_at + 4 * n_pairs
    experts_at = counts_at + 2 * n_rows
    end = experts_at + 2 * n_pairs
    if size != end + end % 4:
        raise ProtocolError(
            f"a DISPATCH of {size} bytes says {n_rows} rows of {length} values with {n_pairs} pairs: wrong size"
        )
    counts = np.frombuffer(payload, _U16, n_rows, counts_at)
    total = int(counts[0]) if n_rows == 1 else int(counts.sum())
    if total != n_pairs or (n_rows > 1 and not counts.all()):
        raise ProtocolError(f"a DISPATCH with {n_pairs} pairs, but its rows count {total} and each needs one")
    return Dispatch(
        sequence,
        layer,
        call,
        _CONTRACTS[contract],
        codec.decode(payload[DISPATCH.size : weights_at], n_rows, length),
        counts,
        np.frombuffer(payload, _U16, n_pairs, experts_at),
        np.frombuffer(payload, _F32, n_pairs, weights_at),
        code,
    )


def push_result(minor: int, message: Result) -> Buffers:
    """Encode a result."""
    n_rows, length = message.rows.shape
    fixed = RESULT.pack(min(message.compute_us, 0xFFFFFFFF), n_rows, length, message.codec)
    rows = codec_of(message.codec).encode(message.rows)
    return [push_header(minor, _RESULT_TYPE, message.sequence, (fixed, rows)) + fixed, rows]


def pull_result(sequence: int, payload: memoryview) -> Result:
    """Decode a result; its rows are a view into the payload.

    Raises:
        ProtocolError: sizes that contradict each other. Whether they answer the request is not checked here.
    """
    size = len(payload)
    if size < RESULT.size:
        raise ProtocolError(f"a RESULT of {size} bytes is too short")
    compute_us, n_rows, length, code = RESULT.unpack_from(payload)
    codec = CODECS.get(code) or codec_of(code)
    if not n_rows or not length or size != RESULT.size + codec.size(n_rows, length):
        raise ProtocolError(f"a RESULT of {size} bytes says {n_rows} rows of {length} values: wrong size")
    return Result(sequence, compute_us, codec.decode(payload[RESULT.size :], n_rows, length), code)
