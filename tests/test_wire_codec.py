from __future__ import annotations

import contextlib
import dataclasses
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import ProtocolError
from orchestrator.types import TENSOR_ROLES, Contract, EngineIdentity, LayerDescriptor, Ownership, RefusalCode
from orchestrator.wire import control, frame
from orchestrator.wire.codec import EncodedDispatch, frame_dispatch, pull_message, push_message, push_tail_of_one
from orchestrator.wire.frame import HEADER_SIZE, MAX_PAYLOAD, PREFIX, pull_header
from orchestrator.wire.messages import (
    Describe,
    Described,
    Dispatch,
    Goodbye,
    Hello,
    Measure,
    Measured,
    Message,
    MessageType,
    Ping,
    Pong,
    Refuse,
    Result,
    VersionRange,
    Welcome,
)

u8, u16, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (8, 16, 32, 64))
words = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
numbers = st.floats(allow_nan=False)
identities = st.builds(EngineIdentity, build=words, isa=words, repack=st.booleans())
holdings = st.builds(
    Ownership,
    st.dictionaries(
        st.integers(0, 200),
        st.sets(st.integers(0, 400), min_size=1, max_size=30).map(lambda ids: tuple(sorted(ids))),
        max_size=6,
    ).map(lambda found: dict(sorted(found.items()))),
)
descriptors = st.builds(
    LayerDescriptor,
    layer=u16,
    call=u8,
    architecture=words,
    activation=st.integers(-(2**31), 2**31 - 1),
    n_embd=u32,
    n_ff=u32,
    n_expert=u32,
    top_k=u32,
    weight_before_ffn=st.booleans(),
    clamp=numbers,
    situ_beta=numbers,
    situ_linear_beta=numbers,
    hyper_connections=u32,
    tensors=st.lists(st.tuples(st.sampled_from(TENSOR_ROLES), words), max_size=11).map(tuple),
    precision=u32,
)


@st.composite
def dispatches(draw: st.DrawFn) -> Dispatch:
    n_rows, length = draw(st.integers(1, 6)), draw(st.integers(1, 9))
    counts = draw(st.lists(st.integers(1, 5), min_size=n_rows, max_size=n_rows))
    n_pairs = sum(counts)
    random = np.random.default_rng(draw(u32))
    return Dispatch(
        sequence=draw(u64),
        layer=draw(u16),
        call=draw(u8),
        contract=draw(st.sampled_from(Contract)),
        rows=random.standard_normal((n_rows, length), dtype=np.float32),
        counts=np.array(counts, dtype=np.uint16),
        experts=random.integers(0, 2**16, n_pairs).astype(np.uint16),
        weights=random.standard_normal(n_pairs, dtype=np.float32),
    )


@st.composite
def results(draw: st.DrawFn) -> Result:
    shape = draw(st.tuples(st.integers(1, 8), st.integers(1, 8)))
    rows = np.random.default_rng(draw(u32)).standard_normal(shape, dtype=np.float32)
    return Result(sequence=draw(u64), compute_us=draw(u32), rows=rows)


messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(Hello, st.builds(VersionRange, u16, u16), identities, client=words, sequence=u64),
    st.builds(
        Welcome,
        version=u16,
        name=words,
        pid=u32,
        identity=identities,
        model_sha256=words,
        architecture=words,
        ownership=holdings,
        n_threads=u32,
        sequence=u64,
    ),
    st.builds(Refuse, u64, st.sampled_from(RefusalCode), words),
    st.builds(Describe, u64, st.lists(descriptors, max_size=4).map(tuple)),
    st.builds(Described, u64, u32),
    dispatches(),
    results(),
    st.builds(Measure, u64, u16, u8),
    st.builds(Measured, u64, numbers, numbers),
    st.builds(Ping, u64, u64),
    st.builds(Pong, u64, u64),
    st.builds(Goodbye, words, u64),
)


def decode(data: bytes) -> Message:
    view = memoryview(bytearray(data))
    header = pull_header(view, 0, MAX_PAYLOAD)
    assert len(data) == HEADER_SIZE + header.length
    frame.check_payload(header, view[: PREFIX.size], view[HEADER_SIZE:])
    return pull_message(header, view[HEADER_SIZE:])


def assert_same(first: Message, second: Message) -> None:
    assert type(first) is type(second)
    for field in dataclasses.fields(first):
        one, other = getattr(first, field.name), getattr(second, field.name)
        if isinstance(one, np.ndarray):
            assert one.dtype == other.dtype
            assert one.shape == other.shape
            assert one.tobytes() == other.tobytes()
        else:
            assert one == other


@given(messages)
def test_every_message_comes_back_as_it_was(message: Message):
    data = b"".join(push_message(0, message))
    assert len(data) % 4 == 0
    assert_same(decode(data), message)


@given(messages, st.data())
def test_one_flipped_bit_anywhere_is_noticed(message: Message, data: st.DataObject):
    wire = bytearray(b"".join(push_message(0, message)))
    bit = data.draw(st.integers(0, 8 * len(wire) - 1))
    wire[bit // 8] ^= 1 << bit % 8
    try:
        header = pull_header(memoryview(wire), 0, MAX_PAYLOAD)
    except ProtocolError:
        return
    # A changed length is noticed when the bytes that it announces do not come, or with them by the checksum.
    if header.length == len(wire) - HEADER_SIZE:
        with pytest.raises(ProtocolError, match="checksum"):
            frame.check_payload(header, memoryview(wire)[: PREFIX.size], memoryview(wire)[HEADER_SIZE:])


@settings(max_examples=400)
@given(st.sampled_from(MessageType), st.binary(max_size=200), u64)
def test_any_payload_is_a_message_or_a_protocol_error(kind: MessageType, payload: bytes, sequence: int):
    payload += bytes(-len(payload) % 4)
    header = frame.Header(1, 0, kind, len(payload), sequence, 0)
    try:
        message = pull_message(header, memoryview(bytearray(payload)))
    except ProtocolError:
        return
    assert message.type is kind
    assert message.sequence == sequence


@settings(max_examples=400)
@given(messages, st.data())
def test_a_message_with_changed_bytes_is_a_message_or_a_protocol_error(message: Message, data: st.DataObject):
    wire = bytearray(b"".join(push_message(0, message)))
    header = pull_header(memoryview(wire), 0, MAX_PAYLOAD)
    payload = wire[HEADER_SIZE:]
    for _ in range(data.draw(st.integers(0, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(u8)
    payload = payload[: data.draw(st.integers(0, len(payload)))]
    with contextlib.suppress(ProtocolError):
        pull_message(header._replace(length=len(payload)), memoryview(payload))


@given(st.lists(st.tuples(u16, st.floats(width=32, allow_nan=False)), min_size=1, max_size=9), st.integers(1, 40))
def test_the_path_of_one_row_gives_the_same_bytes(pairs: list[tuple[int, float]], length: int):
    experts, weights = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    row = np.random.default_rng(length).standard_normal((1, length), dtype=np.float32)
    message = Dispatch(
        5,
        3,
        1,
        Contract.SUM,
        row,
        np.array([len(pairs)], np.uint16),
        np.array(experts, np.uint16),
        np.array(weights, np.float32),
    )
    tail = push_tail_of_one(weights, experts)
    encoded = EncodedDispatch(3, 1, 1, 0, 1, len(pairs), length, row.tobytes(), tail)
    assert b"".join(frame_dispatch(0, 5, encoded)) == b"".join(push_message(0, message))


def header_bytes(**changes: object) -> memoryview:
    fields = {"magic": b"LKCP", "major": 1, "minor": 0, "kind": MessageType.PING, "flags": 0, "length": 8}
    fields |= {"sequence": 1} | changes
    return memoryview(bytearray(PREFIX.pack(*fields.values()) + bytes(4)))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"magic": b"GET "}, "does not speak this protocol"),
        ({"major": 2, "minor": 7}, r"version 2\.7, this side speaks version 1"),
        ({"kind": 0}, "unknown message type 0"),
        ({"kind": 13}, "unknown message type 13"),
        ({"kind": 45}, "unknown message type 45"),
        ({"kind": MessageType.ATTACH, "length": 2048}, "over the limit"),
        ({"kind": MessageType.STEP, "length": 2**28 + 4}, "over the limit of 268435456"),
        ({"flags": 1}, "unknown flags"),
        ({"length": 7}, "multiples of four"),
        ({"length": 68}, "PING of 68 bytes is over the limit of 64"),
        ({"kind": MessageType.HELLO, "length": 2**20}, "over the limit"),
        ({"kind": MessageType.WELCOME, "length": 2**23}, "over the limit"),
        ({"kind": MessageType.DISPATCH, "length": 2**32 - 4}, "over the limit of 268435456"),
        ({"kind": MessageType.RESULT, "length": 2**28 + 4}, "over the limit of 268435456"),
    ],
)
def test_a_header_is_refused_before_its_payload_is_read(changes: dict[str, object], text: str):
    with pytest.raises(ProtocolError, match=text):
        pull_header(header_bytes(**changes), 0, MAX_PAYLOAD)


def test_a_refusal_is_understood_from_every_version():
    assert pull_header(header_bytes(kind=MessageType.REFUSE, major=9), 0, MAX_PAYLOAD).type == MessageType.REFUSE


def with_fixed(kind: MessageType, payload: bytes) -> Message:
    return pull_message(frame.Header(1, 0, kind, len(payload), 1, 0), memoryview(bytearray(payload)))


def dispatch_payload(
    *,
    contract: int = 0,
    codec: int = 0,
    n_rows: int = 1,
    n_pairs: int = 2,
    length: int = 3,
    tail: bytes | None = None,
) -> bytes:
    rows = bytes(4 * 3)
    if tail is None:
        tail = push_tail_of_one([1.0, 2.0], [4, 5])
    return struct.pack("<HBBB3xIII4x", 1, 0, contract, codec, n_rows, n_pairs, length) + rows + tail


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"contract": 2}, "unknown contract"),
        ({"codec": 1}, "unknown row codec"),
        ({"n_rows": 0}, "0 rows"),
        ({"length": 0}, "of 0 values"),
        ({"n_pairs": 0}, "with 0 pairs"),
        ({"n_rows": 2}, "wrong size"),
        ({"n_pairs": 3}, "wrong size"),
        ({"n_rows": 2**32 - 1, "n_pairs": 2**32 - 1, "length": 2**32 - 1}, "wrong size"),
        ({"tail": struct.pack("<2fH2H2x", 1, 2, 1, 4, 5)}, "rows count 1"),
        ({"tail": struct.pack("<2fH2H2x", 1, 2, 3, 4, 5)}, "rows count 3"),
    ],
)
def test_a_dispatch_that_contradicts_itself_is_refused(changes: dict[str, object], text: str):
    with_fixed(MessageType.DISPATCH, dispatch_payload())
    with pytest.raises(ProtocolError, match=text):
        with_fixed(MessageType.DISPATCH, dispatch_payload(**changes))


def test_a_row_without_a_pair_is_refused():
    tail = np.array([1.0, 2.0], np.float32).tobytes() + np.array([2, 0, 4, 5], np.uint16).tobytes()
    payload = struct.pack("<HBBB3xIII4x", 1, 0, 0, 0, 2, 2, 1) + bytes(8) + tail
    with pytest.raises(ProtocolError, match="each needs one"):
        with_fixed(MessageType.DISPATCH, payload)


@pytest.mark.parametrize(("n_rows", "length"), [(0, 2), (1, 0), (2, 2), (1, 3), (2**31, 2**31)])
def test_a_result_that_contradicts_itself_is_refused(n_rows: int, length: int):
    with pytest.raises(ProtocolError, match="wrong size"):
        with_fixed(MessageType.RESULT, struct.pack("<IIIB3x", 1, n_rows, length, 0) + bytes(8))


def test_a_greeting_cannot_claim_more_experts_than_memory_holds():
    ranges = struct.pack("<HH", 0, 65535)
    layers = b"".join(struct.pack("<HH", layer, 1) + ranges for layer in range(65535))
    reader = control.Reader(memoryview(struct.pack("<H", 65535) + layers))
    with pytest.raises(ProtocolError, match="claims more than"):
        control.pull_ownership(reader)


@pytest.mark.parametrize(
    "layers",
    [
        [(0, [(3, 2)])],
        [(0, [(0, 3), (3, 4)])],
        [(0, [(4, 5), (0, 1)])],
        [(0, [(0, 1)]), (0, [(2, 3)])],
        [(0, [])],
    ],
)
def test_ownership_that_is_not_ascending_is_refused(layers: list[tuple[int, list[tuple[int, int]]]]):
    data = struct.pack("<H", len(layers))
    for layer, ranges in layers:
        data += struct.pack("<HH", layer, len(ranges)) + b"".join(struct.pack("<HH", *pair) for pair in ranges)
    with pytest.raises(ProtocolError):
        control.pull_ownership(control.Reader(memoryview(data)))


def test_a_greeting_of_a_later_version_may_say_more():
    hello = Hello(VersionRange(0, 9), EngineIdentity("b", "i", True), client="later", sequence=1)
    payload = push_message(0, hello)[1] + bytes(range(1, 9))
    assert_same(with_fixed(MessageType.HELLO, payload), hello)
    with pytest.raises(ProtocolError, match="behind its last field"):
        with_fixed(MessageType.PING, bytes(12))


def test_a_long_text_is_cut_between_two_characters():
    refuse = Refuse(1, RefusalCode.COMPUTE_FAILED, "ä" * 5000)
    decoded = decode(b"".join(push_message(0, refuse)))
    assert isinstance(decoded, Refuse)
    assert decoded.text == "ä" * (control.TEXT_LIMIT // 2)


def test_an_unknown_refusal_code_keeps_its_text():
    payload = struct.pack("<HH", 99, 4) + b"why?"
    with pytest.raises(ProtocolError, match=r"99: why\?"):
        with_fixed(MessageType.REFUSE, payload)


def test_a_message_over_its_limit_is_not_sent():
    names = tuple(("up", "x" * 60_000) for _ in range(200))
    descriptor = LayerDescriptor(0, 0, "a", 0, 1, 1, 1, 1, False, 0.0, 0.0, 0.0, 0, names)
    with pytest.raises(ProtocolError, match="cannot be sent"):
        push_message(0, Describe(1, (descriptor,)))
    with pytest.raises(ProtocolError, match="does not fit"):
        push_message(0, Measure(1, 70_000, 0))
