from __future__ import annotations

import contextlib
import random
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from orchestrator.errors import FleetError, ProtocolError
from orchestrator.transport.base import Link, LinkLostError, Listener
from orchestrator.transport.memory import MemoryListener
from orchestrator.transport.tcp import TcpConnector, TcpListener
from orchestrator.types import Contract, Ownership, RefusalCode
from orchestrator.wire.connection import Connection
from orchestrator.wire.messages import (
    SUPPORTED,
    Describe,
    Described,
    Dispatch,
    Goodbye,
    Hello,
    Message,
    Ping,
    Pong,
    Refuse,
    Result,
    VersionRange,
    Welcome,
)
from orchestrator.wire.state import Role
from orchestrator.workers.expert import ExpertService, WorkerProfile
from orchestrator.workers.server import ServerLimits, WorkerServer
from tests.workers_twin import IDENTITY, TwinCompute, descriptor, expert_row

OWNERSHIP = Ownership.product([0, 1], [0, 1, 2, 5])
PATIENCE = 20.0


class Backbone:
    """The other end: one connection, one request at a time."""

    def __init__(self, link: Link, versions: VersionRange = SUPPORTED) -> None:
        self.link = link
        self.connection = Connection(Role.BACKBONE, versions=versions)
        self.sequence = 0

    def send(self, message: Message) -> None:
        self.link.send(self.connection.send(message), time.monotonic() + PATIENCE)

    def receive(self) -> Message:
        deadline = time.monotonic() + PATIENCE
        while (message := self.connection.next_message()) is None:
            self.connection.received(self.link.receive_into(self.connection.receive_buffer(), deadline))
        return message

    def ask(self, message: Message) -> Message:
        self.send(message)
        return self.receive()

    def greet(self) -> Message:
        return self.ask(Hello(self.connection.versions, IDENTITY, "test", sequence=1))

    def open(self) -> Backbone:
        assert isinstance(self.greet(), Welcome)
        assert self.ask(Describe(2, (descriptor(0), descriptor(1)))) == Described(2, 2)
        return self

    def check(self, layer: int = 0) -> None:
        """One dispatch whose answer is right."""
        self.sequence += 1
        rows = np.full((2, 4), self.sequence, np.float32)
        reply = self.ask(dispatch(rows, layer, self.sequence))
        assert isinstance(reply, Result)
        assert reply.sequence == self.sequence
        np.testing.assert_array_equal(
            reply.rows,
            [expert_row(rows[0], 5, layer, 0), expert_row(rows[0], 1, layer, 0), expert_row(rows[1], 0, layer, 0)],
        )


def dispatch(rows: np.ndarray, layer: int = 0, sequence: int = 1) -> Dispatch:
    pairs = np.array([5, 1, 0], np.uint16)
    return Dispatch(
        sequence, layer, 0, Contract.EXACT, rows, np.array([2, 1], np.uint16), pairs, np.ones(3, np.float32)
    )


class Worker:
    """A server over TCP or over memory, in this process."""

    def __init__(self, kind: str, compute: TwinCompute, **limits: float) -> None:
        self.compute = compute
        self.service = ExpertService(compute, WorkerProfile("twin", 1, "a" * 64, 1), queue_limit=4)
        self.listener: Listener = TcpListener("127.0.0.1:0") if kind == "tcp" else MemoryListener()
        self.address = self.listener.address
        self.lines: list[str] = []
        self.server = WorkerServer(
            self.service,
            self.listener,
            limits=ServerLimits(**limits),
            log=self.lines.append,  # type: ignore[arg-type]
        )
        self.server.start()

    def connect(self) -> Backbone:
        if isinstance(self.listener, MemoryListener):
            return Backbone(self.listener.connect())
        return Backbone(TcpConnector(self.address).connect(PATIENCE))

    def raw(self) -> socket.socket:
        host, _, port = self.address.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=PATIENCE)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, self.lines
            time.sleep(0.005)


Make = Callable[..., Worker]


@pytest.fixture(params=["tcp", "memory"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    yield from _make(request.param)


@pytest.fixture
def make_tcp() -> Iterator[Make]:
    yield from _make("tcp")


def _make(kind: str) -> Iterator[Make]:
    made: list[Worker] = []

    def build(on_compute: Callable[[], None] | None = None, **limits: float) -> Worker:
        made.append(Worker(kind, TwinCompute(OWNERSHIP, on_compute), **limits))
        return made[-1]

    yield build
    for worker in made:
        worker.server.drain()


def test_serves_a_backbone_from_greeting_to_goodbye(make: Make) -> None:
    worker = make()
    backbone = worker.connect()
    welcome = backbone.greet()
    assert isinstance(welcome, Welcome)
    assert (welcome.name, welcome.pid, welcome.sequence) == ("twin", 1, 1)
    assert welcome.ownership == OWNERSHIP
    assert backbone.ask(Describe(2, (descriptor(0), descriptor(1), descriptor(2)))) == Described(2, 2)
    for layer in (0, 1, 0):
        backbone.check(layer)
    assert backbone.ask(Ping(9, 5)) == Pong(9, 5)
    assert isinstance(backbone.ask(Goodbye("done")), Goodbye)
    worker.wait_for(lambda: worker.server.connections == 0)


def test_several_backbones_at_once_get_their_own_answers(make: Make) -> None:
    worker = make()
    failures: list[BaseException] = []

    def work(layer: int) -> None:
        try:
            backbone = worker.connect().open()
            for _ in range(50):
                backbone.check(layer)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number % 2,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert worker.compute.calls == 200
    assert worker.compute.most_inside == 1


def test_a_refused_request_leaves_the_connection_and_the_others_alone(make: Make) -> None:
    worker = make()
    backbone, other = worker.connect().open(), worker.connect().open()
    reply = backbone.ask(dispatch(np.zeros((2, 9), np.float32)))
    assert isinstance(reply, Refuse)
    assert reply.code is RefusalCode.BAD_REQUEST
    other.check()
    backbone.check()


def test_a_backbone_of_another_version_hears_why_in_words(make: Make) -> None:
    worker = make()
    newer = worker.connect()
    newer.connection = Connection(Role.BACKBONE, versions=VersionRange(SUPPORTED.highest + 1, SUPPORTED.highest + 2))
    reply = newer.greet()
    assert isinstance(reply, Refuse)
    assert reply.code is RefusalCode.INCOMPATIBLE
    assert "protocol version" in reply.text
    # One that speaks this version and a later one agrees on this one.
    both = Backbone(worker.connect().link, VersionRange(SUPPORTED.lowest, SUPPORTED.highest + 1))
    welcome = both.greet()
    assert isinstance(welcome, Welcome)
    assert welcome.version == SUPPORTED.highest


def test_another_major_version_is_told_so_in_a_refusal(make_tcp: Make) -> None:
    worker = make_tcp()
    backbone = worker.connect()
    frame = b"".join(bytes(piece) for piece in backbone.connection.send(Hello(SUPPORTED, IDENTITY, "x")))
    backbone.link.send([frame[:4] + b"\x63" + frame[5:]])
    reply = backbone.receive()
    assert isinstance(reply, Refuse)
    assert reply.code is RefusalCode.INCOMPATIBLE
    assert "version 99" in reply.text


def test_a_request_before_the_greeting_is_refused(make: Make) -> None:
    worker = make()
    stranger = worker.connect()
    greeted = worker.connect().open()
    stranger.link.send(greeted.connection.send(Ping(1, 1)))
    reply = stranger.receive()
    assert isinstance(reply, Refuse)
    greeted.check()


# --- bytes that are no protocol ------------------------------------------------------------------------------


def frames() -> list[bytes]:
    """Whole legal frames, as the raw material of damage."""
    connection = Connection(Role.BACKBONE)
    hello = b"".join(map(bytes, connection.send(Hello(SUPPORTED, IDENTITY, "fuzz"))))
    listener = MemoryListener()
    worker = Worker("memory", TwinCompute(OWNERSHIP))
    assert isinstance(worker.listener, MemoryListener)
    listener.close()
    backbone = Backbone(worker.listener.connect()).open()
    rows = np.ones((2, 4), np.float32)
    messages: list[Message] = [Describe(3, (descriptor(0), descriptor(1))), dispatch(rows), Ping(4, 4)]
    made = [hello, *(b"".join(map(bytes, backbone.connection.send(message))) for message in messages)]
    worker.server.drain()
    return made


def damaged(rng: random.Random, good: list[bytes]) -> bytes:
    """A deterministic stream of frames of which something is wrong."""
    stream = bytearray(b"".join(good[: rng.randint(0, len(good))]))
    kind = rng.randrange(6)
    if kind == 0:  # noise
        return bytes(stream) + rng.randbytes(rng.randint(1, 300))
    frame = bytearray(rng.choice(good))
    if kind == 1:  # bad magic
        frame[rng.randrange(4)] ^= 0xFF
    elif kind == 2:  # huge length, for every type there is and some there are not
        frame[6] = rng.randrange(20)
        frame[8:12] = struct.pack("<I", rng.choice([0xFFFFFFFF, 0xFFFFFFFC, 256 << 20, 4 << 20, 1 << 16]))
    elif kind == 3:  # truncated
        del frame[rng.randrange(len(frame)) :]
    elif kind == 4:  # flipped bits
        for _ in range(rng.randint(1, 8)):
            frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
    else:  # wrong numbers behind a right checksum: what the session itself has to notice
        from crc32c import crc32c

        for _ in range(rng.randint(1, 6)):
            if len(frame) > 24:
                frame[rng.randrange(24, len(frame))] = rng.randrange(256)
        frame[20:24] = struct.pack("<I", crc32c(bytes(frame[24:]), crc32c(bytes(frame[:20]))))
    return bytes(stream + frame) + (rng.randbytes(64) if rng.random() < 0.3 else b"")


def test_garbage_from_the_network_never_ends_the_worker(make_tcp: Make) -> None:
    worker = make_tcp(greeting=5.0, frame=5.0, discard=0.05)
    steady = worker.connect().open()
    good = frames()
    rng = random.Random(20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for round_number in range(300):
        with worker.raw() as sock, contextlib.suppress(OSError):
            sock.sendall(damaged(rng, good))
            if rng.random() < 0.5:
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(65536):
                    pass
        if round_number % 50 == 0:
            steady.check()
    steady.check()
    worker.wait_for(lambda: worker.server.connections == 1)
    assert not [line for line in worker.lines if "defect" in line]
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 100, f"{grown:.0f} MiB for garbage of some kilobytes"


def test_an_announced_length_costs_no_memory(make_tcp: Make) -> None:
    worker = make_tcp()
    good = frames()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with contextlib.ExitStack() as stack:
        for _ in range(16):
            backbone = worker.connect().open()
            stack.callback(backbone.link.close)
            header = bytearray(good[2][:24])
            header[8:12] = struct.pack("<I", 255 << 20)
            backbone.link.send([bytes(header)])
        worker.connect().open().check()
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        assert grown < 100, f"{grown:.0f} MiB for 16 headers that announce 4 GiB"


def test_a_peer_that_broke_the_protocol_hears_why(make_tcp: Make) -> None:
    worker = make_tcp()
    backbone = worker.connect().open()
    backbone.link.send([b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(200_000)])
    reply = backbone.receive()
    assert isinstance(reply, Goodbye)
    assert "does not speak this protocol" in reply.text


# --- slow and dead peers -------------------------------------------------------------------------------------


def test_an_idle_backbone_is_kept_and_a_half_frame_has_a_deadline(make: Make) -> None:
    worker = make(frame=0.3, discard=0.05)
    idle, slow = worker.connect().open(), worker.connect().open()
    frame = b"".join(map(bytes, slow.connection.send(dispatch(np.ones((2, 4), np.float32)))))
    slow.link.send([frame[:30]])
    reply = slow.receive()
    assert isinstance(reply, Goodbye)
    assert "waited too long for the rest" in reply.text
    worker.wait_for(lambda: worker.server.connections == 1)
    time.sleep(0.4)
    idle.check()


def test_a_frame_in_small_pieces_is_taken_while_it_moves(make: Make) -> None:
    worker = make(frame=2.0)
    backbone = worker.connect().open()
    rows = np.ones((2, 4), np.float32)
    frame = b"".join(map(bytes, backbone.connection.send(dispatch(rows, sequence=7))))
    for offset in range(0, len(frame), 7):
        backbone.link.send([frame[offset : offset + 7]])
    reply = backbone.receive()
    assert isinstance(reply, Result)
    assert reply.sequence == 7


def test_the_greeting_has_a_deadline_that_trickling_bytes_do_not_move(make: Make) -> None:
    worker = make(greeting=0.4, discard=0.05)
    backbone = worker.connect()
    hello = b"".join(map(bytes, backbone.connection.send(Hello(SUPPORTED, IDENTITY, "x"))))
    begin = time.monotonic()

    def trickle() -> None:
        for index in range(len(hello) - 1):
            backbone.link.send([hello[index : index + 1]])
            time.sleep(0.05)

    with pytest.raises(FleetError):
        trickle()
    assert time.monotonic() - begin < 3.0
    worker.wait_for(lambda: worker.server.connections == 0)


def test_a_peer_that_takes_no_replies_does_not_hold_a_thread_for_ever(make: Make) -> None:
    worker = make(send=0.3, discard=0.05)
    greedy = worker.connect().open()
    pings = b"".join(map(bytes, greedy.connection.send(Ping(1, 1)))) * 1000
    rest: Sequence[bytes | memoryview] = ()
    deadline = time.monotonic() + PATIENCE
    with contextlib.suppress(LinkLostError):  # the worker gave this one up
        while time.monotonic() < deadline:
            rest = greedy.link.send_some(rest or [pings])
            if rest:
                time.sleep(0.002)
    worker.wait_for(lambda: worker.server.connections == 0)
    assert any("took no data" in line for line in worker.lines)
    worker.connect().open().check()


def test_a_backbone_that_vanishes_is_forgotten(make: Make) -> None:
    worker = make()
    backbone = worker.connect().open()
    backbone.link.close()
    worker.wait_for(lambda: worker.server.connections == 0)
    worker.connect().open().check()


def test_connections_are_limited_and_the_one_too_many_is_told(make: Make) -> None:
    worker = make(connections=2)
    first, _second = worker.connect().open(), worker.connect().open()
    third = worker.connect()
    reply = third.receive()
    assert isinstance(reply, Refuse)
    assert reply.code is RefusalCode.OVERLOADED
    assert "2 connections" in reply.text
    first.check()
    first.ask(Goodbye(""))
    worker.wait_for(lambda: worker.server.connections == 1)
    worker.connect().open().check()


# --- draining ------------------------------------------------------------------------------------------------


def test_drain_finishes_the_running_request_refuses_new_ones_and_says_goodbye(make: Make) -> None:
    go, running = threading.Event(), threading.Event()

    def wait() -> None:
        running.set()
        assert go.wait(PATIENCE)

    worker = make(wait, linger=0.3)
    busy, idle = worker.connect().open(), worker.connect().open()
    rows = np.ones((2, 4), np.float32)
    busy.send(dispatch(rows, sequence=7))
    assert running.wait(PATIENCE)
    done: list[bool] = []
    draining = threading.Thread(target=lambda: done.append(worker.server.drain()))
    draining.start()
    worker.wait_for(lambda: worker.service.draining)
    reply = idle.ask(dispatch(rows, sequence=8))
    assert isinstance(reply, Refuse)
    assert (reply.code, reply.sequence) == (RefusalCode.DRAINING, 8)
    go.set()
    result = busy.receive()
    assert isinstance(result, Result)
    np.testing.assert_array_equal(result.rows[2], expert_row(rows[1], 0, 0, 0))
    for backbone in (busy, idle):
        assert isinstance(backbone.receive(), Goodbye)
    draining.join(PATIENCE)
    assert done == [True]
    with pytest.raises(LinkLostError):
        worker.connect()


def test_drain_without_connections_is_quick(make: Make) -> None:
    worker = make()
    begin = time.monotonic()
    assert worker.server.drain()
    assert time.monotonic() - begin < 1.0


def test_drain_does_not_wait_for_ever(make: Make) -> None:
    go, running = threading.Event(), threading.Event()

    def wait() -> None:
        running.set()
        go.wait(PATIENCE)

    worker = make(wait, linger=0.05, drain=0.5)
    busy = worker.connect().open()
    busy.send(dispatch(np.ones((2, 4), np.float32)))
    assert running.wait(PATIENCE)
    begin = time.monotonic()
    assert worker.server.drain() is False
    assert time.monotonic() - begin < 3.0
    go.set()


def test_a_peer_that_is_in_the_middle_of_a_frame_does_not_hold_the_drain(make: Make) -> None:
    worker = make(linger=0.05)
    half = worker.connect().open()
    half.link.send([b"LKCP"])
    assert worker.server.drain()
    assert isinstance(half.receive(), Goodbye)
    with pytest.raises((LinkLostError, ProtocolError)):
        half.receive()


# --- addresses -----------------------------------------------------------------------------------------------


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
@pytest.mark.parametrize("address", ["[::1]:0", "[::]:0"])
def test_listens_on_ipv6(address: str) -> None:
    service = ExpertService(TwinCompute(OWNERSHIP), WorkerProfile("twin", 1, "", 1))
    server = WorkerServer(service, TcpListener(address))
    server.start()
    try:
        port = server.address.rpartition(":")[2]
        Backbone(TcpConnector(f"[::1]:{port}").connect(PATIENCE)).open().check()
    finally:
        assert server.drain()
