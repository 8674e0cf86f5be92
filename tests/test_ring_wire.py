"""The ring's messages on the wire: back as they were, and refused where they contradict themselves."""

from __future__ import annotations

import itertools
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_wire_codec import assert_same, decode, with_fixed

from orchestrator.errors import ProtocolError
from orchestrator.ring.items import detached
from orchestrator.types import EngineIdentity
from orchestrator.wire.boundary import BoundaryCodec
from orchestrator.wire.codec import push_message
from orchestrator.wire.fields import Writer
from orchestrator.wire.messages import MessageType
from orchestrator.wire.ring_codec import OUTCOME, STEP, FramedStep, push_stage_welcome
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

u16, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))
i32 = st.integers(-(2**31), 2**31 - 1)
words = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
spent = st.lists(u32, max_size=5).map(tuple)

ranges = st.lists(st.integers(0, 100), unique=True, max_size=8).map(
    lambda found: tuple(itertools.pairwise(sorted(found)))[::2]
)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    n = draw(st.integers(1, 9))
    arrays = [np.array(draw(st.lists(i32, min_size=n, max_size=n)), np.int32) for _ in range(3)]
    outputs = np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    codec = draw(st.sampled_from(BoundaryCodec))
    boundary = draw(st.binary(max_size=70).filter(lambda data: codec is not BoundaryCodec.F16 or not len(data) % 2))
    return Step(draw(u64), draw(u16), *arrays, outputs, draw(spent), boundary, codec)


@st.composite
def outcomes(draw: st.DrawFn) -> Outcome:
    shape = draw(st.tuples(st.integers(0, 5), st.integers(1, 9)))
    return Outcome(draw(u64), draw(u16), draw(spent), np.random.default_rng(1).standard_normal(shape, np.float32))


@st.composite
def welcomes(draw: st.DrawFn) -> StageWelcome:
    texts = {name: draw(words) for name in ("name", "model_sha256", "architecture")}
    numbers = {name: draw(u32) for name in ("pid", "n_threads", "n_vocab", "n_ctx", "n_ubatch", "n_batch")}
    flags = {name: draw(st.booleans()) for name in ("batch_invariant", "cuttable", "shiftable")}
    identity = EngineIdentity(draw(words), draw(words), draw(st.booleans()))
    return StageWelcome(
        version=draw(u16),
        identity=identity,
        n_layer=100,
        n_sequences=draw(u16),
        ranges=draw(ranges),
        sequence=draw(u64),
        **texts,
        **numbers,
        **flags,
    )


messages: st.SearchStrategy[RingMessage] = st.one_of(
    steps(),
    outcomes(),
    welcomes(),
    st.builds(Attach, u64, st.sampled_from(Purpose), u16, words),
    st.builds(Route, u64, u16, words),
    st.builds(Accepted, u64),
    st.builds(Operate, u64, u16, st.integers(0, 255), st.tuples(i32, i32, i32, i32), st.booleans(), words),
    st.builds(Fault, u64, u16, st.sampled_from(FaultKind), u16, u16, words),
    st.builds(Cancel, st.lists(u64, max_size=9).map(tuple), u64),
    st.builds(Probe, u64),
    st.builds(Assign, u64, ranges),
    st.builds(Assigning, u64, u16),
    st.builds(Probed, u64, st.lists(st.tuples(u16, u64, u64), max_size=5).map(tuple)),
)


@given(messages)
def test_every_message_comes_back_as_it_was(message: RingMessage) -> None:
    data = b"".join(push_message(0, message))
    assert len(data) % 4 == 0
    assert_same(decode(data), message)


@given(messages, st.data())
def test_changed_bytes_are_a_message_or_a_protocol_error(message: RingMessage, data: st.DataObject) -> None:
    payload = bytearray(b"".join(push_message(0, message))[24:])
    for _ in range(data.draw(st.integers(0, 3)) if payload else 0):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    payload = payload[: data.draw(st.integers(0, len(payload)))]
    try:
        with_fixed(message.type, bytes(payload))
    except ProtocolError:
        return


@pytest.mark.parametrize(
    ("n", "n_bytes", "codec", "n_spent"),
    [(0, 0, 0, 0), (2, 0, 0, 0), (1, 4, 0, 0), (1, 0, 3, 0), (1, 0, 0, 1), (2**32 - 1, 2**32 - 1, 0, 255)],
)
def test_a_step_that_contradicts_itself_is_refused(n: int, n_bytes: int, codec: int, n_spent: int) -> None:
    good = STEP.pack(1, 0, 0, 0, 0) + bytes(16)
    with_fixed(MessageType.STEP, good)
    with pytest.raises(ProtocolError, match="a STEP of 28 bytes"):
        with_fixed(MessageType.STEP, STEP.pack(n, n_bytes, 0, codec, n_spent) + bytes(16))


def test_halves_of_an_odd_number_of_bytes_are_refused() -> None:
    with_fixed(MessageType.STEP, STEP.pack(1, 3, 0, BoundaryCodec.MIXED, 0) + bytes(20))
    with pytest.raises(ProtocolError, match="3 bytes of boundary, codec 1"):
        with_fixed(MessageType.STEP, STEP.pack(1, 3, 0, BoundaryCodec.F16, 0) + bytes(20))


@pytest.mark.parametrize(("rows", "length", "codec"), [(1, 2, 0), (2, 1, 0), (1, 1, 7), (2**31, 2**31, 0)])
def test_an_outcome_that_contradicts_itself_is_refused(rows: int, length: int, codec: int) -> None:
    with pytest.raises(ProtocolError, match="an OUTCOME of"):
        with_fixed(MessageType.OUTCOME, OUTCOME.pack(rows, length, 0, codec, 0) + bytes(4))


def test_ranges_that_overlap_or_leave_the_model_are_refused() -> None:
    fields = {"version": 0, "name": "s", "pid": 1, "identity": EngineIdentity("b", "i", False), "model_sha256": ""}
    fields |= {"architecture": "a", "n_threads": 1, "n_layer": 8, "n_vocab": 9, "n_ctx": 1, "n_sequences": 1}
    fields |= {"n_ubatch": 1, "n_batch": 1, "batch_invariant": True, "cuttable": True, "shiftable": True}
    for ranges in ([(0, 9)], [(3, 3)], [(4, 2)], [(0, 4), (3, 8)], [(4, 8), (0, 2)]):
        writer = Writer()
        push_stage_welcome(writer, StageWelcome(ranges=tuple(ranges), **fields))
        with pytest.raises(ProtocolError, match=r"out of order|up to 9 of 8"):
            with_fixed(MessageType.STAGE_WELCOME, writer.finish())


@pytest.mark.parametrize(
    ("kind", "payload", "text"),
    [
        (MessageType.ATTACH, struct.pack("<BHH", 3, 0, 0) + bytes(3), "unknown purpose 3"),
        (MessageType.FAULT, struct.pack("<HBHHH", 0, 9, 0, 0, 0) + bytes(3), "unknown kind 9"),
        (MessageType.PROBE, bytes(4), "behind its last field"),
        (MessageType.CANCEL, struct.pack("<HH", 2, 0), "ends within a field"),
    ],
)
def test_what_is_no_message_is_refused_in_words(kind: MessageType, payload: bytes, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        with_fixed(kind, payload)


def test_a_step_and_its_copies_share_no_memory_with_the_buffer() -> None:
    ints = np.array([1, 2], np.int32)
    step = Step(1, 0, ints, ints, ints, np.array([True, False]), (3,), b"abcd")
    wire = bytearray(b"".join(push_message(0, step)))
    kept = detached(FramedStep(1, memoryview(wire)))
    wire[:] = bytes(len(wire))
    assert isinstance(kept, FramedStep)
    assert_same(kept.decode(), step)
