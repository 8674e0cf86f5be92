from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import ProtocolError
from orchestrator.types import Contract, EngineIdentity, Ownership, RefusalCode
from orchestrator.wire.codec import push_message
from orchestrator.wire.connection import FIRST_CAPACITY, Connection
from orchestrator.wire.frame import PREFIX
from orchestrator.wire.handshake import agree_version, find_difference
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
from orchestrator.wire.state import TRANSITIONS, Role, State
from tests.ring_examples import RING_EXAMPLES

IDENTITY = EngineIdentity("build-1", "AVX2", False)
HELLO = Hello(VersionRange(0, 0), IDENTITY, client="test")


def welcome(version: int = 0, **changes: object) -> Welcome:
    fields = {
        "version": version,
        "name": "w",
        "pid": 1,
        "identity": IDENTITY,
        "model_sha256": "m",
        "architecture": "llama",
        "ownership": Ownership.product([0], range(4)),
        "n_threads": 1,
    }
    return Welcome(**(fields | changes))


def dispatch(sequence: int, n_rows: int = 1, length: int = 4) -> Dispatch:
    rows = np.arange(n_rows * length, dtype=np.float32).reshape(n_rows, length) + sequence
    ones = np.ones(n_rows, np.uint16)
    return Dispatch(sequence, 1, 0, Contract.EXACT, rows, ones, ones, np.ones(n_rows, np.float32))


def feed(connection: Connection, data: bytes, chunk: int = 1 << 20) -> list[Message]:
    """Feed bytes in pieces; give the messages, arrays copied."""
    found: list[Message] = []
    at = 0
    while at < len(data):
        view = connection.receive_buffer()
        piece = data[at : at + min(chunk, len(view))]
        view[: len(piece)] = piece
        connection.received(len(piece))
        at += len(piece)
        while (message := connection.next_message()) is not None:
            if isinstance(message, Dispatch):
                message = message.detached()
            found.append(message)
    return found


def greeted() -> tuple[Connection, Connection]:
    backbone, worker = Connection(Role.BACKBONE), Connection(Role.WORKER)
    feed(worker, b"".join(backbone.send(HELLO)))
    feed(backbone, b"".join(worker.send(welcome())))
    return backbone, worker


def test_a_greeting_makes_both_sides_serve():
    backbone, worker = greeted()
    assert (backbone.own_state, backbone.peer_state) == (State.SERVING, State.SERVING)
    assert (worker.own_state, worker.peer_state) == (State.SERVING, State.SERVING)
    [ping] = feed(worker, b"".join(backbone.send(Ping(3, 99))))
    assert ping == Ping(3, 99)
    assert feed(backbone, b"".join(worker.send(Pong(3, 99)))) == [Pong(3, 99)]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 700), st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9000)), min_size=1, max_size=6))
def test_any_cut_of_the_stream_gives_the_same_messages(chunk: int, shapes: list[tuple[int, int]]):
    backbone, worker = greeted()
    sent = [dispatch(number + 1, *shape) for number, shape in enumerate(shapes)]
    stream = b"".join(b"".join(backbone.send(message)) for message in sent)
    received = feed(worker, stream, chunk * (1 + len(stream) // 20_000))
    assert [message.sequence for message in received] == [message.sequence for message in sent]
    for one, other in zip(received, sent, strict=True):
        assert one.rows.tobytes() == other.rows.tobytes()
    assert worker.bytes_received - backbone.bytes_sent == 0


def test_arrays_of_a_message_hold_until_the_next_receive_buffer():
    backbone, worker = greeted()
    data = b"".join(backbone.send(dispatch(1))) + b"".join(backbone.send(dispatch(2)))
    worker.receive_buffer()[: len(data)] = data
    worker.received(len(data))
    first, second = worker.next_message(), worker.next_message()
    assert first.rows[0, 0] == 1
    assert second.rows[0, 0] == 2
    assert first.rows.flags.aligned
    assert second.rows.flags.aligned


def announce(kind: MessageType, length: int) -> bytes:
    return PREFIX.pack(b"LKCP", 1, 0, kind, 0, length, 1) + bytes(4)


def test_an_announced_length_costs_no_memory_before_the_bytes_come():
    _, worker = greeted()
    tracemalloc.start()
    try:
        feed(worker, announce(MessageType.DISPATCH, 256 * 1024 * 1024) + bytes(3 * FIRST_CAPACITY), chunk=10_000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 * FIRST_CAPACITY


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=300), max_size=5), st.booleans(), st.integers(0, 12))
def test_arbitrary_bytes_never_crash(chunks: list[bytes], greeting_over: bool, kind: int):
    connection = greeted()[1] if greeting_over else Connection(Role.WORKER)
    try:
        feed(connection, announce(MessageType(kind), 8) if kind else b"")
        for chunk in chunks:
            feed(connection, chunk)
    except ProtocolError:
        return
    assert len(connection.receive_buffer()) > 0


def test_a_large_buffer_is_given_back():
    backbone, worker = greeted()
    big = dispatch(1, n_rows=1, length=9 * 1024 * 1024)
    [message] = feed(worker, b"".join(backbone.send(big)))
    assert message.rows.tobytes() == big.rows.tobytes()
    assert len(worker.receive_buffer()) == FIRST_CAPACITY


def test_the_end_of_the_stream_is_told_from_an_end_within_a_message():
    _, worker = greeted()
    with pytest.raises(ProtocolError, match=r"closed the connection$"):
        worker.received(0)
    _, worker = greeted()
    feed(worker, announce(MessageType.PING, 8))
    with pytest.raises(ProtocolError, match="within a message"):
        worker.received(0)


def test_a_damaged_frame_is_noticed():
    backbone, worker = greeted()
    data = bytearray(b"".join(backbone.send(dispatch(1))))
    data[-1] ^= 0x40
    with pytest.raises(ProtocolError, match="damaged"):
        feed(worker, bytes(data))


def test_a_frame_larger_than_this_side_takes_is_neither_sent_nor_received():
    backbone = Connection(Role.BACKBONE, max_payload=100)
    worker = Connection(Role.WORKER)
    feed(worker, b"".join(backbone.send(HELLO)))
    feed(backbone, b"".join(worker.send(welcome())))
    with pytest.raises(ProtocolError, match="over the limit of 100"):
        backbone.send(dispatch(1, n_rows=9))
    with pytest.raises(ProtocolError, match="over the limit of 100"):
        feed(backbone, b"".join(worker.send(Result(1, 0, np.zeros((4, 9), np.float32)))))


# --- the state table -----------------------------------------------------------------------------------------

EXAMPLES: dict[MessageType, Message] = {
    MessageType.HELLO: HELLO,
    MessageType.WELCOME: welcome(),
    MessageType.REFUSE: Refuse(0, RefusalCode.DRAINING, "x"),
    MessageType.DESCRIBE: Describe(1, ()),
    MessageType.DESCRIBED: Described(1, 0),
    MessageType.DISPATCH: dispatch(1),
    MessageType.RESULT: Result(1, 0, np.zeros((1, 1), np.float32)),
    MessageType.MEASURE: Measure(1, 0, 0),
    MessageType.MEASURED: Measured(1, 1.0, 2.0),
    MessageType.PING: Ping(1, 1),
    MessageType.PONG: Pong(1, 1),
    MessageType.GOODBYE: Goodbye("done"),
    **{message.type: message for message in RING_EXAMPLES},
}


def at(role: Role, state: State) -> tuple[Connection, Connection] | None:
    """Bring a pair to where ``role``'s side is in a state; give (that side, the other)."""
    backbone, worker = Connection(Role.BACKBONE), Connection(Role.WORKER)
    mine, other = (backbone, worker) if role is Role.BACKBONE else (worker, backbone)
    if state is State.OPENING:
        return mine, other
    feed(worker, b"".join(backbone.send(HELLO)))
    if state in (State.WAITING, State.ANSWERING):
        return mine, other
    feed(backbone, b"".join(worker.send(welcome())))
    if state is State.CLOSED:
        feed(other, b"".join(mine.send(Goodbye("done"))))
    return mine, other


@pytest.mark.parametrize("kind", MessageType)
@pytest.mark.parametrize(("role", "state"), [(role, state) for role in Role for state in TRANSITIONS[role]])
def test_the_table_decides_what_is_sent_and_what_is_taken(role: Role, state: State, kind: MessageType):
    mine, other = at(role, state)
    message = EXAMPLES[kind]
    after = TRANSITIONS[role][state].get(kind)
    data = b"".join(push_message(0, message))
    if after is None:
        with pytest.raises(ProtocolError, match=kind.name):
            mine.send(message)
        with pytest.raises(ProtocolError, match=kind.name):
            feed(other, data)
    else:
        mine.send(message)
        assert mine.own_state is after
        assert len(feed(other, data)) == 1
        assert other.peer_state is after


def test_a_request_may_cross_a_goodbye():
    backbone, worker = greeted()
    goodbye = b"".join(worker.send(Goodbye("draining")))
    assert len(feed(worker, b"".join(backbone.send(dispatch(1))))) == 1
    with pytest.raises(ProtocolError):
        worker.send(Result(1, 0, np.zeros((1, 1), np.float32)))
    assert feed(backbone, goodbye) == [Goodbye("draining")]


def test_a_refused_greeting_closes_both_sides():
    backbone, worker = Connection(Role.BACKBONE), Connection(Role.WORKER)
    feed(worker, b"".join(backbone.send(HELLO)))
    feed(backbone, b"".join(worker.send(Refuse(0, RefusalCode.INCOMPATIBLE, "no"))))
    assert {backbone.own_state, backbone.peer_state, worker.own_state} == {State.CLOSED}


# --- versions and identities ---------------------------------------------------------------------------------


def negotiate(backbone_versions: VersionRange, worker_versions: VersionRange) -> Message:
    """Run a greeting between two builds and give what the backbone received."""
    backbone = Connection(Role.BACKBONE, versions=backbone_versions)
    worker = Connection(Role.WORKER, versions=worker_versions)
    [hello] = feed(worker, b"".join(backbone.send(Hello(backbone_versions, IDENTITY, client="test"))))
    version = agree_version(hello, worker_versions)
    answer = Refuse(0, RefusalCode.INCOMPATIBLE, version) if isinstance(version, str) else welcome(version)
    [reply] = feed(backbone, b"".join(worker.send(answer)))
    if isinstance(reply, Welcome):
        assert feed(worker, b"".join(backbone.send(Ping(1, 7)))) == [Ping(1, 7)]
        assert feed(backbone, b"".join(worker.send(Pong(1, 7)))) == [Pong(1, 7)]
        assert backbone.minor == worker.minor == reply.version
    return reply


@pytest.mark.parametrize(
    ("theirs", "ours", "agreed"),
    [
        (VersionRange(0, 4), VersionRange(0, 4), 4),
        (VersionRange(0, 4), VersionRange(0, 3), 3),  # the worker is one behind
        (VersionRange(0, 4), VersionRange(0, 5), 4),  # the worker is one ahead
        (VersionRange(3, 4), VersionRange(4, 5), 4),
        (VersionRange(4, 4), VersionRange(4, 4), 4),
    ],
)
def test_neighbouring_versions_work(theirs: VersionRange, ours: VersionRange, agreed: int):
    reply = negotiate(theirs, ours)
    assert isinstance(reply, Welcome)
    assert reply.version == agreed


@pytest.mark.parametrize(
    ("theirs", "ours"), [(VersionRange(4, 4), VersionRange(3, 3)), (VersionRange(2, 4), VersionRange(5, 6))]
)
def test_versions_without_overlap_are_refused_in_words_that_name_both(theirs: VersionRange, ours: VersionRange):
    reply = negotiate(theirs, ours)
    assert isinstance(reply, Refuse)
    assert reply.code is RefusalCode.INCOMPATIBLE
    assert str(theirs) in reply.text
    assert str(ours) in reply.text


def test_a_worker_may_not_choose_what_was_not_offered():
    backbone = Connection(Role.BACKBONE, versions=VersionRange(1, 2))
    backbone.send(Hello(VersionRange(1, 2), IDENTITY, client="test"))
    with pytest.raises(ProtocolError, match=r"chose version 3, offered was 1\.1 to 1\.2"):
        feed(backbone, b"".join(push_message(3, welcome(3))))


def test_a_frame_of_another_minor_than_agreed_is_refused():
    _, worker = greeted()
    with pytest.raises(ProtocolError, match=r"version 1\.1, agreed was 0"):
        feed(worker, b"".join(push_message(1, Ping(1, 1))))


def test_another_major_is_refused_in_words_that_the_other_side_reads():
    worker = Connection(Role.WORKER)
    foreign = bytearray(b"".join(push_message(0, HELLO)))
    foreign[4] = 2
    with pytest.raises(ProtocolError, match=r"speaks protocol version 2\.0, this side speaks version 1") as caught:
        feed(worker, bytes(foreign))
    backbone = Connection(Role.BACKBONE)
    backbone.send(HELLO)
    refusal = Refuse(0, RefusalCode.INCOMPATIBLE, str(caught.value))
    assert feed(backbone, b"".join(worker.send(refusal))) == [refusal]


def test_an_equal_worker_serves_and_a_different_one_is_refused_in_words():
    same = welcome()
    assert find_difference(same, IDENTITY, Contract.EXACT, "m") is None
    assert find_difference(same, IDENTITY, Contract.EXACT, None) is None
    for changed, word in (
        (EngineIdentity("build-2", "AVX2", False), "build-2"),
        (EngineIdentity("build-1", "AVX512", False), "AVX512"),
        (EngineIdentity("build-1", "AVX2", True), "repacking on"),
    ):
        text = find_difference(welcome(identity=changed), IDENTITY, Contract.EXACT, "m")
        assert text is not None
        assert word in text
        assert find_difference(welcome(identity=changed), IDENTITY, Contract.SUM, "m") is None
    for contract in Contract:
        text = find_difference(welcome(model_sha256="other"), IDENTITY, contract, "m")
        assert text is not None
        assert "another model file" in text
