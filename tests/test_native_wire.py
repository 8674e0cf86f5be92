"""Native code on the hot path, held to the Python codec: the same bytes out, the same answers to the same bytes."""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from crc32c import crc32c as reference_crc32c
from fake_worker import IDENTITY, MODEL, FakeWorker
from hooked import HookedDispatcher

from bindings.library import DISPATCH, Callback, EventStruct
from bindings.wire import PeerHandle, StarHandle, crc32c, wire
from orchestrator.dispatch.native import MAX_ROWS
from orchestrator.dispatch.routing import assign_owners, route_rows
from orchestrator.engine.experts import ExpertStore
from orchestrator.engine.model import Model
from orchestrator.engine.session import Session
from orchestrator.errors import ComputeError
from orchestrator.gateway.backbone import open_backbone
from orchestrator.transport.tcp import TcpConnector, TcpListener
from orchestrator.types import Contract, ExpertBatch, LayerDescriptor, Ownership, RefusalCode
from orchestrator.wire.codec import EncodedDispatch, frame_dispatch, push_message
from orchestrator.wire.connection import Connection
from orchestrator.wire.frame import HEADER_SIZE
from orchestrator.wire.messages import (
    SUPPORTED,
    Describe,
    Dispatch,
    Goodbye,
    Hello,
    Message,
    Ping,
    Refuse,
    Result,
    Welcome,
)
from orchestrator.wire.state import Role
from orchestrator.workers.expert import ExpertService, ExpertSession, WorkerProfile
from orchestrator.workers.local import LocalWorkers
from orchestrator.workers.server import WorkerServer

pytestmark = pytest.mark.skipif(wire() is None, reason="this engine was built without the native wire")

N_EXPERT, TOP_K = 8, 3
WIDTH = 24
SPLITS = [
    [range(8)],
    [(0,), range(1, 8)],
    [(0, 3, 6), (1, 4, 7), (2, 5)],
]


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 20, 1023, 3071, 3072, 3073, 6151, 98_320])
def test_the_checksum_is_the_packages(size: int):
    data = np.random.default_rng(size).bytes(size + 3)
    for start in range(3):  # unaligned, too
        piece = data[start : start + size]
        assert crc32c(piece) == reference_crc32c(piece)
        assert crc32c(piece, 0xDEADBEEF) == reference_crc32c(piece, 0xDEADBEEF)
    assert crc32c(data[5:], crc32c(data[:5])) == crc32c(data)


# --- backbone ------------------------------------------------------------------------------------------------


def some_batch(n_tokens: int, seed: int) -> ExpertBatch:
    random = np.random.default_rng(seed)
    return ExpertBatch(
        0,
        0,
        random.standard_normal((n_tokens, WIDTH), dtype=np.float32),
        np.stack([random.permutation(N_EXPERT)[:TOP_K] for _ in range(n_tokens)]).astype(np.int32),
        random.random((n_tokens, TOP_K), dtype=np.float32),
    )


def descriptor() -> LayerDescriptor:
    return LayerDescriptor(0, 0, "llama", 0, WIDTH, 8, N_EXPERT, TOP_K, False, 0.0, 0.0, 0.0, 0, ())


@pytest.mark.parametrize("contract", list(Contract))
@pytest.mark.parametrize("split", SPLITS, ids=["one", "two", "three"])
@pytest.mark.parametrize("n_tokens", [1, 2, 5, 16])
def test_the_frames_are_the_python_codecs(contract: Contract, split, n_tokens: int):
    owners = [Ownership.product([0], ids) for ids in split]
    route = assign_owners([descriptor()], owners)[0, 0]
    star = StarHandle(len(split), partial_sums=contract is Contract.SUM)
    event = star.hook(Callback(lambda _event, _data: 99))
    pairs = [socket.socketpair() for _ in split]
    for worker, (ours, _) in enumerate(pairs):
        star.set_link(worker, ours.fileno(), 3)
    star.set_routes([(0, 0, route.owner_list)])
    star.arm(1000, MAX_ROWS)
    batch = some_batch(n_tokens, n_tokens)
    fields = {
        "rows": batch.rows.ctypes.data,
        "experts": batch.experts.ctypes.data,
        "weights": batch.weights.ctypes.data,
    }
    sent = EventStruct(kind=DISPATCH, n_tokens=n_tokens, n_embd=WIDTH, top_k=TOP_K, **fields)
    assert event(sent, star.address) == 0
    expected: dict[int, bytes] = {}
    for share in route_rows(route, batch.experts, batch.weights):
        rows = batch.rows if share.rows is None else batch.rows[share.rows]
        code = int(contract is Contract.SUM)
        encoded = EncodedDispatch(0, 0, code, 0, share.n_rows, share.n_pairs, WIDTH, rows.tobytes(), share.tail)
        expected[share.worker] = b"".join(frame_dispatch(3, 1, encoded))
    for worker, (ours, theirs) in enumerate(pairs):
        theirs.setblocking(False)
        assert (theirs.recv(1 << 20) if worker in expected else b"") == expected.get(worker, b"")
        ours.close()
        theirs.close()


@contextmanager
def fake_star(split, contract: Contract = Contract.EXACT, **options) -> Iterator[HookedDispatcher]:
    workers = [FakeWorker(Ownership.product([0], ids), name=f"w{at}") for at, ids in enumerate(split)]
    dispatcher = HookedDispatcher(
        [worker.connector() for worker in workers], contract, IDENTITY, model_sha256=MODEL, **options
    )
    try:
        dispatcher.connect()
        dispatcher.describe([descriptor()])
        yield dispatcher
    finally:
        dispatcher.close()
        for worker in workers:
            worker.close()


def run(dispatcher: HookedDispatcher, batch: ExpertBatch) -> np.ndarray:
    n_tokens = len(batch.rows)
    exact = dispatcher.contract is Contract.EXACT
    out = np.full((n_tokens, TOP_K, WIDTH) if exact else (n_tokens, WIDTH), np.nan, np.float32)
    dispatcher.dispatch(batch)
    dispatcher.combine(0, 0, out)
    return out


@pytest.mark.parametrize("contract", list(Contract))
@pytest.mark.parametrize("split", SPLITS, ids=["one", "two", "three"])
def test_small_batches_never_come_to_python_and_give_the_same_bytes(contract: Contract, split):
    with fake_star(split, contract) as dispatcher:
        dispatcher.begin_step()
        native = [run(dispatcher, some_batch(n, seed=n)) for n in (1, 2, 7, 16)]
        assert dispatcher.python_calls == 0
        dispatcher.abort_step()  # disarmed: now everything is Python's
        for values, n in zip(native, (1, 2, 7, 16), strict=True):
            assert run(dispatcher, some_batch(n, seed=n)).tobytes() == values.tobytes()
        assert dispatcher.python_calls == 8
        figures = dispatcher.statistics()
    assert figures.round_trips == 8
    assert [sample.rows for sample in figures.samples] == [1, 2, 7, 16] * 2
    assert sum(worker.pairs for worker in figures.workers) == 2 * TOP_K * (1 + 2 + 7 + 16)


def test_large_batches_are_pythons_and_numbers_stay_in_order():
    with fake_star(SPLITS[1]) as dispatcher:
        for _ in range(2):
            dispatcher.begin_step()
            for n_tokens in (1, MAX_ROWS + 1, 1, 40, 2):
                assert not np.isnan(run(dispatcher, some_batch(n_tokens, 0))).any()
            dispatcher.check()  # pings take numbers of the same series
        assert dispatcher.python_calls == 8
        assert [worker.errors for worker in dispatcher.statistics().workers] == [0, 0]


def test_native_code_gives_way_to_python_now_and_then():
    with fake_star(SPLITS[0]) as dispatcher:
        dispatcher.native.give_way(40)
        dispatcher.begin_step()
        run(dispatcher, some_batch(1, 0))
        assert dispatcher.python_calls == 0
        time.sleep(0.05)
        for seed in range(3):
            run(dispatcher, some_batch(1, seed))
        assert dispatcher.python_calls == 2  # one dispatch and its combine


def test_a_call_given_up_between_send_and_answer_leaves_late_frames_and_no_error():
    with fake_star(SPLITS[1]) as dispatcher:
        dispatcher.begin_step()
        dispatcher.dispatch(some_batch(4, 1))
        deadline = time.monotonic() + 10
        while sum(worker.late_frames for worker in dispatcher.statistics().workers) < 2:
            dispatcher.begin_step()
            assert time.monotonic() < deadline
        assert not np.isnan(run(dispatcher, some_batch(4, 2))).any()
        assert [worker.errors for worker in dispatcher.statistics().workers] == [0, 0]


# --- worker --------------------------------------------------------------------------------------------------


class Client:
    """A backbone that says what a test wants, over a link of this process."""

    def __init__(self, link) -> None:
        self.link = link
        self.connection = Connection(Role.BACKBONE)
        self.link.send(self.connection.send(Hello(SUPPORTED, IDENTITY, "test")))
        assert isinstance(self.read(), Welcome)

    def read(self) -> Message:
        deadline = time.monotonic() + 20
        while (message := self.connection.next_message()) is None:
            self.connection.received(self.link.receive_into(self.connection.receive_buffer(), deadline))
        return dataclasses.replace(message, rows=message.rows.copy()) if isinstance(message, Result) else message

    def ask(self, *messages: Message) -> list[Message]:
        for message in messages:
            self.link.send(self.connection.send(message))
        return [self.read() for _ in messages]


def plain(message: Message) -> tuple[object, ...]:
    """What of an answer must not depend on who gave it."""
    if isinstance(message, Result):
        return ("result", message.sequence, message.rows.shape, message.rows.tobytes())
    return (message,)


@pytest.fixture(scope="module")
def model(synthetic: Callable[[str], Path]) -> tuple[Path, tuple[LayerDescriptor, ...]]:
    path = synthetic("qwen3moe")

    class Nobody:
        def begin_step(self) -> None: ...

    with Model.open(path, without_experts=True) as opened, Session(opened, n_ctx=64, exchange=Nobody()) as session:
        return path, session.descriptors


@contextmanager
def serving(model, monkeypatch: pytest.MonkeyPatch, kind: str, owned: range) -> Iterator[Client]:
    monkeypatch.setenv("LINKCPP_WIRE", kind)
    path, descriptors = model
    layers = [descriptor.layer for descriptor in descriptors]
    with ExpertStore(path, Ownership.product(layers, owned)) as store, TcpListener("127.0.0.1:0") as listener:
        service = ExpertService(store, WorkerProfile("w", 1, "", 1))
        server = WorkerServer(service, listener)
        server.start()
        link = TcpConnector(listener.address).connect(5)
        try:
            client = Client(link)
            client.ask(Describe(1, descriptors))
            client.service = service
            yield client
        finally:
            link.close()
            server.drain()


def requests(descriptors: tuple[LayerDescriptor, ...], owned: range) -> list[Dispatch]:
    """Plain requests of all shapes, and every kind that must be refused."""
    random = np.random.default_rng(5)
    first = descriptors[0]
    made: list[Dispatch] = []

    def add(counts, experts=None, *, contract=Contract.EXACT, layer=first.layer, call=0, width=first.n_embd):
        counts = np.array(counts, np.uint16)
        n_pairs = int(counts.sum())
        if experts is None:
            experts = np.concatenate([random.permutation(owned)[:count] for count in counts])
        made.append(
            Dispatch(
                10 + len(made),
                layer,
                call,
                contract,
                random.standard_normal((len(counts), width), dtype=np.float32),
                counts,
                np.array(experts, np.uint16),
                random.random(n_pairs, dtype=np.float32),
            )
        )

    for contract in Contract:
        add([first.top_k], contract=contract)
        add([1], contract=contract)
        add([2, 1, 2], contract=contract)
        add([first.top_k] * 16, contract=contract, layer=descriptors[-1].layer)
    add([2] * 6000)  # larger than native code's buffer
    add([1], layer=999)
    add([1], call=3)
    add([1], experts=[first.n_expert - 1])  # not held
    add([1], experts=[first.n_expert])  # does not exist
    add([1], width=first.n_embd // 2)
    add([first.top_k + 1])
    add([2])
    return made


def test_a_worker_gives_the_same_answers_with_and_without_native_code(model, monkeypatch: pytest.MonkeyPatch):
    _, descriptors = model
    owned = range(descriptors[0].n_expert - 2)
    made = requests(descriptors, owned)
    answers, by_python = {}, {}
    ask_python = ExpertSession._dispatch
    for kind in ("python", "native"):
        seen: list[int] = []

        def noted(self, message, seen=seen):
            seen.append(message.sequence)
            return ask_python(self, message)

        monkeypatch.setattr(ExpertSession, "_dispatch", noted)
        with serving(model, monkeypatch, kind, owned) as client:
            answers[kind] = [plain(client.ask(request)[0]) for request in made]
            client.ask(Ping(9999, 1))  # counted after the answer, hence before the next
            assert client.service.requests == sum(answer[0] == "result" for answer in answers[kind])
        by_python[kind] = seen
    assert answers["native"] == answers["python"]
    is_result = [answer[0] == "result" for answer in answers["native"]]
    assert is_result == [True] * 9 + [False] * 6 + [True]
    assert by_python["python"] == [request.sequence for request in made]
    # Native code took all that is plain and not larger than its buffer.
    assert by_python["native"] == [request.sequence for request in made[8:15]]


def test_a_worker_takes_requests_in_pieces_in_one_piece_and_between_pings(model, monkeypatch: pytest.MonkeyPatch):
    _, descriptors = model
    owned = range(descriptors[0].n_expert)
    one, two = requests(descriptors, owned)[:2]
    with serving(model, monkeypatch, "native", owned) as client:
        [expected, also] = map(plain, client.ask(one, two))
        frames = [b"".join(push_message(SUPPORTED.highest, message)) for message in (one, Ping(9, 1), two)]
        client.link.send([b"".join(frames)])
        first, pong, second = client.read(), client.read(), client.read()
        assert (plain(first), plain(second)) == (expected, also)
        assert pong.nonce == 1
        for cut in (1, HEADER_SIZE - 1, HEADER_SIZE, HEADER_SIZE + 30, len(frames[0]) - 1):
            client.link.send([frames[0][:cut]])
            time.sleep(0.05)  # longer than native code waits for the rest
            client.link.send([frames[0][cut:]])
            assert plain(client.read()) == expected
        assert isinstance(client.ask(Goodbye(""))[0], Goodbye)


@pytest.mark.parametrize("at", [3, 5, 21, 30, -1])
def test_a_damaged_request_ends_the_connection_in_words(model, monkeypatch: pytest.MonkeyPatch, at: int):
    _, descriptors = model
    owned = range(descriptors[0].n_expert)
    with serving(model, monkeypatch, "native", owned) as client:
        frame = bytearray(b"".join(push_message(SUPPORTED.highest, requests(descriptors, owned)[0])))
        frame[at] ^= 0x20
        client.link.send([bytes(frame)])
        assert isinstance(client.read(), (Goodbye, Refuse))


def test_a_full_queue_is_refused_in_words_and_the_next_request_is_right(model, monkeypatch: pytest.MonkeyPatch):
    _, descriptors = model
    owned = range(descriptors[0].n_expert)
    request = requests(descriptors, owned)[0]
    with serving(model, monkeypatch, "native", owned) as client:
        good = plain(client.ask(request, Ping(9999, 1))[0])
        client.service.queue.limit = 0
        assert client.service.queue.enter()
        refused = client.ask(request)[0]
        client.service.queue.leave()
        assert isinstance(refused, Refuse)
        assert "try again later" in refused.text
        assert plain(client.ask(request)[0]) == good


def test_what_native_code_cannot_compute_python_answers(model, monkeypatch: pytest.MonkeyPatch):
    _, descriptors = model
    owned = range(descriptors[0].n_expert)
    request = requests(descriptors, owned)[0]
    with serving(model, monkeypatch, "native", owned) as client:
        good = plain(client.ask(request)[0])
        monkeypatch.setattr(PeerHandle, "answer", lambda _: False)
        assert plain(client.ask(request)[0]) == good

        def fails(*_: object, **__: object) -> None:
            raise ComputeError("the engine ended the computation")

        monkeypatch.setattr(ExpertStore, "compute", fails)
        refused = client.ask(request)[0]
        assert (refused.code, refused.text) == (
            RefusalCode.COMPUTE_FAILED,
            f"layer {request.layer}: the engine ended the computation",
        )


# --- both ends, with the engine ------------------------------------------------------------------------------


def test_logits_are_the_same_over_native_code_python_and_one_process(model, monkeypatch: pytest.MonkeyPatch):
    path, _ = model
    tokens = np.random.default_rng(2).integers(0, 300, 40).tolist()

    def decode(workers) -> bytes:
        with open_backbone(path, workers, n_ctx=64) as backbone:
            rows = [backbone.session.decode(tokens[:20], all_logits=True)]
            rows += [backbone.session.decode([token]) for token in tokens[20:]]
            if backbone.dispatcher is not None:
                assert all(worker.errors == 0 for worker in backbone.dispatcher.statistics().workers)
            return np.concatenate(rows).tobytes()

    expected = decode(())
    for kind in ("native", "python"):
        monkeypatch.setenv("LINKCPP_WIRE", kind)
        with LocalWorkers(path, 2) as workers:
            assert decode(workers.addresses) == expected
