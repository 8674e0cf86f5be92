from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
from fake_worker import IDENTITY, MODEL, DieError, FakeWorker, compute, honest
from faults import Faults, FaultyConnector
from hooked import HookedDispatcher

from bindings.wire import wire
from orchestrator.dispatch.dispatcher import Dispatcher
from orchestrator.errors import (
    ComputeError,
    InputError,
    OwnershipError,
    WorkerLostError,
    WorkerRefusedError,
    WorkerTimeoutError,
)
from orchestrator.transport.memory import MemoryListener
from orchestrator.transport.tcp import TcpListener
from orchestrator.types import Contract, EngineIdentity, ExpertBatch, LayerDescriptor, Ownership, RefusalCode
from orchestrator.wire.codec import push_message
from orchestrator.wire.messages import SUPPORTED, Dispatch, Goodbye, Ping, Pong, Refuse, Result, VersionRange

N_EMBD, N_EXPERT, TOP_K, N_LAYER = 24, 8, 3, 2

LAYERS = [
    LayerDescriptor(layer, 0, "llama", 0, N_EMBD, 8, N_EXPERT, TOP_K, False, 0.0, 0.0, 0.0, 0, ())
    for layer in range(N_LAYER)
]


@pytest.fixture(params=["python", "native"], autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test of this module runs twice: over Python alone, and with native code in front of it."""
    if request.param == "native":
        if wire() is None:
            pytest.skip("this engine was built without the native wire")
        monkeypatch.setattr(f"{__name__}.Dispatcher", HookedDispatcher)
    return request.param


def owning(*experts: int) -> Ownership:
    return Ownership.product(range(N_LAYER), experts)


def batch(layer: int = 0, n_tokens: int = 1, seed: int = 0, length: int = N_EMBD) -> ExpertBatch:
    random = np.random.default_rng(seed)
    return ExpertBatch(
        layer=layer,
        call=0,
        rows=random.standard_normal((n_tokens, length), dtype=np.float32),
        experts=np.stack([random.permutation(N_EXPERT)[:TOP_K] for _ in range(n_tokens)]).astype(np.int32),
        weights=random.random((n_tokens, TOP_K), dtype=np.float32),
    )


def oracle(request: ExpertBatch) -> np.ndarray:
    n_tokens, top_k = request.experts.shape
    out = np.empty((n_tokens, top_k, request.rows.shape[1]), np.float32)
    for token in range(n_tokens):
        for slot in range(top_k):
            out[token, slot] = compute(request.layer, int(request.experts[token, slot]), request.rows[token])
    return out


def run(dispatcher: Dispatcher, request: ExpertBatch) -> np.ndarray:
    n_tokens, top_k = request.experts.shape
    shape = (n_tokens, request.rows.shape[1])
    out = np.full((n_tokens, top_k, shape[1]) if dispatcher.contract is Contract.EXACT else shape, np.nan, np.float32)
    dispatcher.dispatch(request)
    dispatcher.combine(request.layer, request.call, out)
    return out


def step(dispatcher: Dispatcher, request: ExpertBatch) -> np.ndarray:
    dispatcher.begin_step()
    return run(dispatcher, request)


def eventually(condition: Callable[[], bool]) -> None:
    """Wait for what another thread is about to do."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@contextmanager
def star(
    workers: Sequence[FakeWorker],
    *,
    faults: dict[int, list[Faults | None]] | None = None,
    contract: Contract = Contract.EXACT,
    timeout: float = 20.0,
    describe: bool = True,
    **options: object,
) -> Iterator[Dispatcher]:
    with ExitStack() as stack:
        for worker in workers:
            stack.enter_context(worker)
        places = [
            worker.connector() if isinstance(worker.listener, MemoryListener) else worker.listener.address
            for worker in workers
        ]
        places = [
            FaultyConnector(place, faults[at]) if faults and at in faults else place
            for at, place in enumerate(places)
        ]
        dispatcher = Dispatcher(places, contract, IDENTITY, model_sha256=MODEL, timeout=timeout, **options)
        stack.callback(dispatcher.close)
        dispatcher.connect()
        if describe:
            dispatcher.describe(LAYERS)
        yield dispatcher


SPLITS = {
    "one": [owning(*range(8))],
    "two uneven": [owning(0), owning(*range(1, 8))],
    "two overlapping": [owning(*range(6)), owning(*range(2, 8))],
    "three": [owning(0, 3, 6), owning(1, 4, 7), owning(2, 5)],
    "three, one idle": [owning(*range(4)), Ownership(), owning(*range(4, 8))],
    "five": [owning(0), owning(1), owning(2), owning(3, 4), owning(5, 6, 7)],
    "by layer": [Ownership.product([0], range(8)), Ownership.product([1], range(8))],
}


@pytest.mark.parametrize("transport", ["memory", "tcp"])
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS.keys())
def test_exact_gives_every_row_to_its_place(split: list[Ownership], transport: str):
    workers = [
        FakeWorker(owned, name=f"w{at}", listener=None if transport == "memory" else TcpListener("127.0.0.1:0"))
        for at, owned in enumerate(split)
    ]
    with star(workers) as dispatcher:
        for seed, n_tokens in enumerate((1, 2, 7, 1, 63)):
            dispatcher.begin_step()
            for layer in range(N_LAYER):
                request = batch(layer, n_tokens, seed)
                assert run(dispatcher, request).tobytes() == oracle(request).tobytes()
        figures = dispatcher.statistics()
    assert figures.round_trips == 10
    assert figures.steps == 5
    assert sum(worker.pairs for worker in figures.workers) == 2 * TOP_K * (1 + 2 + 7 + 1 + 63)
    for worker, seen in zip(workers, figures.workers, strict=True):
        assert seen.rows == sum(len(request.rows) for request in worker.requests)
        assert seen.ownership == worker.ownership
        assert (seen.name, seen.pid, seen.connected, seen.errors) == (worker.name, 4711, True, 0)
        for request in worker.requests:
            assert {worker.ownership.holds(request.layer, int(expert)) for expert in request.experts} == {True}
    assert [sample.rows for sample in figures.samples] == [1, 1, 2, 2, 7, 7, 1, 1, 63, 63]
    assert {sample.compute_us for sample in figures.samples} == {7}


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS.keys())
def test_sum_adds_the_workers_partial_sums_in_their_order(split: list[Ownership]):
    workers = [FakeWorker(owned, name=f"w{at}") for at, owned in enumerate(split)]
    with star(workers, contract=Contract.SUM) as dispatcher:
        for n_tokens in (1, 2, 33):
            request = batch(1, n_tokens, seed=n_tokens)
            result = step(dispatcher, request)
            expected = np.einsum("tkn,tk->tn", oracle(request).astype(np.float64), request.weights)
            np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
            # The same floats in the same order: worker after worker, from zero.
            again = np.zeros_like(result)
            for worker in workers:
                for seen in worker.requests[-1:]:
                    if seen.layer == request.layer and worker.ownership.layers:
                        tokens = [np.flatnonzero((request.rows == row).all(axis=1))[0] for row in seen.rows]
                        again[tokens] += honest(seen).rows
            if all(worker.requests for worker in workers) and n_tokens == 33:
                assert result.tobytes() == again.tobytes()


def test_rows_that_are_views_of_larger_memory_are_sent_right():
    with star([FakeWorker(owning(*range(8)))]) as dispatcher:
        whole = np.random.default_rng(1).standard_normal((6, 2 * N_EMBD), dtype=np.float32)
        ids = np.asfortranarray(batch(n_tokens=3).experts)
        request = ExpertBatch(0, 0, whole[::2, :N_EMBD], ids, np.asfortranarray(np.ones((3, TOP_K), np.float32)))
        assert run(dispatcher, request).tobytes() == oracle(request).tobytes()


def test_all_sends_happen_before_the_first_receive():
    """The first worker answers only when the second has its request: a dispatcher that waited would hang."""
    second_has_it = threading.Event()

    def first(request: Dispatch):
        assert second_has_it.wait(10)
        return honest(request)

    def second(request: Dispatch):
        second_has_it.set()
        return honest(request)

    workers = [FakeWorker(owning(*range(4)), answer=first), FakeWorker(owning(*range(4, 8)), answer=second)]
    with star(workers) as dispatcher:
        request = batch(n_tokens=8)
        assert run(dispatcher, request).tobytes() == oracle(request).tobytes()


# --- greeting ------------------------------------------------------------------------------------------------


def test_gaps_are_refused_and_named():
    with (
        star([FakeWorker(owning(0, 1, 2)), FakeWorker(owning(4, 5, 6, 7))], describe=False) as dispatcher,
        pytest.raises(OwnershipError, match="no worker owns experts 3 of layers 0-1"),
    ):
        dispatcher.describe(LAYERS)


def test_every_worker_gets_the_descriptors_of_its_layers():
    workers = [FakeWorker(Ownership.product([0], range(8))), FakeWorker(Ownership.product([1], range(8)))]
    with star(workers):
        assert [worker.described for worker in workers] == [[(0, 0)], [(1, 0)]]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"identity": EngineIdentity("build-2", IDENTITY.isa, False)}, "build-2"),
        ({"identity": EngineIdentity(IDENTITY.build, "AVX512", False)}, "AVX512"),
        ({"identity": EngineIdentity(IDENTITY.build, IDENTITY.isa, True)}, "repacking on"),
        ({"model_sha256": "cd" * 32}, "another model file"),
    ],
)
def test_a_worker_that_differs_is_refused_for_exact_in_words(changes: dict[str, object], word: str):
    with FakeWorker(owning(*range(8)), name="odd", **changes) as worker:
        dispatcher = Dispatcher([worker.connector()], Contract.EXACT, IDENTITY, model_sha256=MODEL)
        with pytest.raises(WorkerRefusedError, match="worker odd .*cannot serve exact.*" + word):
            dispatcher.connect()
        eventually(lambda: len(worker.goodbyes) == 1)  # it is told why
        assert word in worker.goodbyes[0]


def test_another_engine_may_serve_sum_and_another_model_may_not():
    other = EngineIdentity("build-2", "NEON", True)
    with star([FakeWorker(owning(*range(8)), identity=other)], contract=Contract.SUM) as dispatcher:
        assert step(dispatcher, batch()).shape == (1, N_EMBD)
    worker = FakeWorker(owning(*range(8)), model_sha256="cd" * 32)
    with pytest.raises(WorkerRefusedError, match="another model"), star([worker], contract=Contract.SUM):
        pass


@pytest.mark.parametrize(("backbone", "worker"), [((0, 4), (0, 3)), ((0, 4), (0, 5)), ((3, 4), (4, 5))])
def test_a_worker_one_version_behind_or_ahead_serves(backbone: tuple[int, int], worker: tuple[int, int]):
    fake = FakeWorker(owning(*range(8)), versions=VersionRange(*worker))
    with star([fake], versions=VersionRange(*backbone)) as dispatcher:
        assert step(dispatcher, batch()).tobytes() == oracle(batch()).tobytes()


def test_a_worker_without_a_common_version_is_refused_naming_both():
    fake = FakeWorker(owning(*range(8)), versions=VersionRange(3, 3))
    refused = pytest.raises(WorkerRefusedError, match=r"incompatible.*1\.4 to 1\.5.*1\.3")
    with refused, star([fake], versions=VersionRange(4, 5)):
        pass


def test_a_worker_that_is_not_there_is_a_loss_that_names_its_address():
    with TcpListener("127.0.0.1:0") as listener:
        address = listener.address
    dispatcher = Dispatcher([address], Contract.EXACT, IDENTITY)
    with pytest.raises(WorkerLostError, match=f"worker {address}: cannot connect to {address}: connection refused"):
        dispatcher.connect()
    assert dispatcher.statistics().workers[0].connected is False
    with pytest.raises(InputError):
        Dispatcher([], Contract.EXACT, IDENTITY)


def test_a_stranger_on_the_port_is_a_loss_in_words():
    with FakeWorker(owning(), greet=lambda _: [b"HTTP/1.1 400 Bad Request\r\n\r\n"]) as stranger:
        dispatcher = Dispatcher([stranger.connector()], Contract.EXACT, IDENTITY)
        with pytest.raises(WorkerLostError, match="does not speak this protocol"):
            dispatcher.connect()


def test_a_worker_that_never_greets_is_a_loss_and_not_a_hang(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("orchestrator.dispatch.dispatcher.GREETING_TIMEOUT", 0.05)
    with FakeWorker(owning(), greet=lambda _: None) as silent:
        dispatcher = Dispatcher([silent.connector()], Contract.EXACT, IDENTITY, connect_timeout=0.05)
        with pytest.raises(WorkerLostError, match="did not answer in time"):
            dispatcher.connect()


def test_measure_asks_every_worker_that_has_experts():
    workers = [FakeWorker(owning(*range(8)), name="a"), FakeWorker(owning(), name="idle")]
    with star(workers) as dispatcher:
        [measured] = dispatcher.measure()
        assert (measured.worker, measured.ms_at_1, measured.ms_at_32) == ("a", 0.5, 2.0)
        assert 0 < measured.round_trip_ms < 10_000
        assert dispatcher.statistics().workers[0].round_trip_ms is not None


def test_close_says_goodbye():
    worker = FakeWorker(owning(*range(8)))
    with star([worker]) as dispatcher:
        dispatcher.close()
        dispatcher.close()
        eventually(lambda: worker.goodbyes == ["the backbone is done"])


# --- what goes wrong within a step ---------------------------------------------------------------------------


class Script:
    """Answers honestly except for the requests that the script names, counted from 0."""

    def __init__(self, **odd) -> None:
        self.odd = {int(number.removeprefix("at_")): answer for number, answer in odd.items()}
        self.count = 0

    def __call__(self, request: Dispatch):
        number, self.count = self.count, self.count + 1
        return self.odd.get(number, honest)(request)


def pair_of_workers(answer) -> list[FakeWorker]:
    return [
        FakeWorker(owning(*range(4)), name="good"),
        FakeWorker(owning(*range(4, 8)), name="odd", answer=answer),
    ]


def die(_: Dispatch):
    raise DieError


def one_row_less(request: Dispatch) -> Result:
    return Result(request.sequence, 1, honest(request).rows[:-1] if request.n_replies > 1 else np.ones((2, 3), "f4"))


def one_value_less(request: Dispatch) -> Result:
    return Result(request.sequence, 1, np.ascontiguousarray(honest(request).rows[:, :-1]))


def one_bit_flipped(request: Dispatch):
    frame = bytearray(b"".join(push_message(SUPPORTED.highest, honest(request))))
    frame[-3] ^= 0x10
    return [bytes(frame)]


def size_field_wrong(request: Dispatch):
    return [b"".join(push_message(SUPPORTED.highest, honest(request)))[:-4], bytes(4096)]


def from_the_future(request: Dispatch) -> Result:
    return Result(request.sequence + 1000, 1, honest(request).rows)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (die, "closed the connection"),
        (lambda _: [os.urandom(64)], "does not speak this protocol"),
        (lambda _: [b"LKCP\x01\x00\x07\x00\xff\xff\xff\xff" + bytes(12)], "over the limit"),
        (one_row_less, "broke the protocol"),
        (one_value_less, "broke the protocol"),
        (one_bit_flipped, "damaged"),
        (size_field_wrong, "damaged"),
        (from_the_future, "an answer to request"),
        (lambda request: Goodbye("draining"), "said goodbye: draining"),
        (lambda request: Refuse(0, RefusalCode.BAD_REQUEST, "what?"), r"bad_request: what\?"),
    ],
    ids=["dies", "garbage", "huge", "rows", "values", "bit", "size", "future", "goodbye", "refuses all"],
)
def test_a_worker_that_breaks_the_rules_costs_one_step_and_the_next_is_right(answer, text: str):
    script = Script(at_1=answer)
    with star(pair_of_workers(script)) as dispatcher:
        request = batch(1, n_tokens=16)
        assert step(dispatcher, request).tobytes() == oracle(request).tobytes()
        dispatcher.begin_step()
        dispatcher.dispatch(request)
        with pytest.raises(WorkerLostError, match=rf"worker odd \(memory:odd\), layer 1: .*{text}") as caught:
            dispatcher.combine(1, 0, np.empty((16, TOP_K, N_EMBD), np.float32))
        assert caught.value.layer == 1
        dispatcher.abort_step()
        figures = dispatcher.statistics().workers
        assert [worker.connected for worker in figures] == [True, False]
        assert figures[1].errors == 1
        assert figures[1].last_error is not None
        for seed in range(3):
            request = batch(0, n_tokens=3, seed=seed)
            assert step(dispatcher, request).tobytes() == oracle(request).tobytes()
        assert dispatcher.statistics().workers[1].connected is True
        # Its experts are described again on the new connection, and the good worker's stale answer is dropped.
        assert dispatcher.statistics().workers[0].late_frames in (0, 1)


@pytest.mark.parametrize("code", [RefusalCode.COMPUTE_FAILED, RefusalCode.OVERLOADED, RefusalCode.NOT_OWNED])
def test_a_refused_request_leaves_the_connection(code: RefusalCode):
    script = Script(at_0=lambda request: Refuse(request.sequence, code, "no luck"))
    workers = pair_of_workers(script)
    with star(workers) as dispatcher:
        request = batch(1, n_tokens=16)
        with pytest.raises(WorkerRefusedError, match=f"worker odd .*layer 1: refused .{code.name.lower()}.: no luck"):
            step(dispatcher, request)
        assert step(dispatcher, request).tobytes() == oracle(request).tobytes()
        assert [worker.connections for worker in workers] == [1, 1]
        assert dispatcher.statistics().workers[1].errors == 1


def test_a_late_frame_is_dropped_and_the_next_step_is_right():
    release = threading.Event()

    def late(request: Dispatch):
        assert release.wait(10)
        return honest(request)

    workers = pair_of_workers(Script(at_0=late))
    with star(workers, timeout=0.1) as dispatcher:
        first = batch(0, n_tokens=16, seed=1)
        with pytest.raises(WorkerTimeoutError, match=r"worker odd .*layer 0: .*did not answer in time"):
            step(dispatcher, first)
        dispatcher.abort_step()
        release.set()
        for seed in range(2, 5):
            request = batch(1, n_tokens=16, seed=seed)
            deadline = time.monotonic() + 10
            while True:  # the answer's thread needs its turn; a slow machine may run into the timeout again
                try:
                    assert step(dispatcher, request).tobytes() == oracle(request).tobytes()
                    break
                except WorkerTimeoutError:
                    assert time.monotonic() < deadline
        figures = dispatcher.statistics().workers
        assert [worker.connections for worker in workers] == [1, 1]
        assert figures[1].late_frames >= 1
        assert figures[1].errors >= 1


def test_a_duplicate_answer_is_dropped():
    def twice(request: Dispatch):
        frame = b"".join(push_message(SUPPORTED.highest, honest(request)))
        return [frame, frame]

    with star([FakeWorker(owning(*range(8)), answer=Script(at_0=twice))]) as dispatcher:
        for seed in range(3):
            request = batch(seed % 2, n_tokens=2, seed=seed)
            assert step(dispatcher, request).tobytes() == oracle(request).tobytes()
        assert dispatcher.statistics().workers[0].late_frames == 1


def test_a_ping_from_the_worker_is_answered_between_its_results():
    def ping_first(request: Dispatch):
        return [*push_message(SUPPORTED.highest, Ping(77, 88)), *push_message(SUPPORTED.highest, honest(request))]

    worker = FakeWorker(owning(*range(8)), answer=Script(at_0=ping_first))
    with star([worker]) as dispatcher:
        assert step(dispatcher, batch()).tobytes() == oracle(batch()).tobytes()
        eventually(lambda: worker.pongs == [Pong(77, 88)])


def test_a_worker_killed_between_steps_is_brought_back_before_the_next():
    workers = pair_of_workers(honest)
    with star(workers) as dispatcher:
        request = batch(n_tokens=9)
        step(dispatcher, request)
        workers[1].kill_links()
        assert step(dispatcher, request).tobytes() == oracle(request).tobytes()
        assert [worker.connections for worker in workers] == [1, 2]


def test_a_worker_that_stays_away_fails_every_step_quickly_and_then_returns():
    with TcpListener("127.0.0.1:0") as first:
        address = first.address
        worker = FakeWorker(owning(*range(8)), name="away", listener=first)
        dispatcher = Dispatcher([address], Contract.EXACT, IDENTITY)
        dispatcher.connect()
        dispatcher.describe(LAYERS)
        assert step(dispatcher, batch()).tobytes() == oracle(batch()).tobytes()
        worker.close()
    for _ in range(2):
        begin = time.monotonic()
        with pytest.raises(WorkerLostError, match=rf"worker away \({address}\), layer 0: cannot connect"):
            dispatcher.begin_step()
        assert time.monotonic() - begin < 2
        dispatcher.check()
    assert dispatcher.statistics().workers[0].errors == 1  # the loss, not every attempt
    with FakeWorker(owning(*range(8)), name="back", listener=TcpListener(address)):
        assert step(dispatcher, batch()).tobytes() == oracle(batch()).tobytes()
        assert dispatcher.statistics().workers[0].name == "back"
        dispatcher.close()


def test_a_worker_that_returns_with_other_experts_is_checked_for_gaps():
    workers = pair_of_workers(honest)
    with star(workers) as dispatcher:
        request = batch(n_tokens=9)
        step(dispatcher, request)
        workers[1].ownership = owning(5, 6, 7)
        workers[1].kill_links()
        for _ in range(2):
            with pytest.raises(OwnershipError, match="no worker owns experts 4 of layers 0-1"):
                dispatcher.begin_step()
        workers[0].ownership = owning(*range(5))
        workers[0].kill_links()
        assert step(dispatcher, request).tobytes() == oracle(request).tobytes()


def test_a_worker_that_returns_with_another_engine_is_refused():
    worker = FakeWorker(owning(*range(8)))
    with star([worker]) as dispatcher:
        step(dispatcher, batch())
        worker.identity = EngineIdentity("build-9", IDENTITY.isa, False)
        worker.kill_links()
        for _ in range(2):
            with pytest.raises(WorkerRefusedError, match="build-9"):
                dispatcher.begin_step()
        worker.identity = IDENTITY
        assert step(dispatcher, batch()).tobytes() == oracle(batch()).tobytes()


def test_check_finds_a_dead_worker_and_brings_it_back_without_a_step():
    worker = FakeWorker(owning(*range(8)))
    with star([worker]) as dispatcher:
        worker.kill_links()
        greet, worker.greet = worker.greet, lambda _: Refuse(0, RefusalCode.DRAINING, "later")
        dispatcher.check()
        figures = dispatcher.statistics().workers[0]
        assert figures.connected is False
        assert figures.last_error is not None
        assert "later" in figures.last_error
        worker.greet = greet
        dispatcher.check()
        assert dispatcher.statistics().workers[0].connected is True
        assert step(dispatcher, batch()).tobytes() == oracle(batch()).tobytes()


# --- faults of the way ---------------------------------------------------------------------------------------

# Sends of a connection: hello 0, describe 1 (or pings first, on the first connection: five of them, then describe).
FIRST_DISPATCH = 1 + 5 + 1


@pytest.mark.parametrize(
    ("faults", "text"),
    [
        (Faults(kill_at_send=FIRST_DISPATCH), "killed at send"),
        (Faults(truncate_sends={FIRST_DISPATCH: 30}), "cut off"),
        (Faults(truncate_sends={FIRST_DISPATCH: 0}), "cut off"),
    ],
)
def test_a_way_that_breaks_while_sending_names_worker_and_layer(faults: Faults, text: str):
    with star(pair_of_workers(honest), faults={1: [faults]}) as dispatcher:
        request = batch(1, n_tokens=16)
        with pytest.raises(WorkerLostError, match=f"worker odd .*layer 1: .*{text}"):
            step(dispatcher, request)
        dispatcher.abort_step()
        assert step(dispatcher, request).tobytes() == oracle(request).tobytes()


def test_a_request_that_is_swallowed_is_a_timeout_and_the_next_step_is_right():
    faults = Faults(drop_sends=frozenset({FIRST_DISPATCH}))
    with star(pair_of_workers(honest), faults={1: [faults]}, timeout=0.5) as dispatcher:
        request = batch(1, n_tokens=16)
        with pytest.raises(WorkerTimeoutError, match="worker odd"):
            step(dispatcher, request)
        assert step(dispatcher, request).tobytes() == oracle(request).tobytes()


def test_a_request_that_arrives_twice_is_answered_once():
    faults = Faults(duplicate_sends=frozenset({FIRST_DISPATCH}))
    with star([FakeWorker(owning(*range(8)))], faults={0: [faults]}) as dispatcher:
        for seed in range(3):
            request = batch(seed % 2, n_tokens=4, seed=seed)
            assert step(dispatcher, request).tobytes() == oracle(request).tobytes()
        assert dispatcher.statistics().workers[0].late_frames == 1


@pytest.mark.parametrize("at", range(0, 1000, 97))
def test_a_stream_that_ends_or_is_damaged_anywhere_never_gives_a_wrong_answer(at: int):
    for faults in (Faults(end_received_at=400 + at), Faults(flip_received={400 + at: 1 << at % 8})):
        with star(pair_of_workers(honest), faults={1: [faults]}, timeout=0.3) as dispatcher:
            request = batch(0, n_tokens=8)
            failed: list[str] = []
            for _ in range(4):
                try:
                    assert step(dispatcher, request).tobytes() == oracle(request).tobytes()
                except (WorkerLostError, WorkerTimeoutError) as error:
                    failed.append(error.worker)
                    dispatcher.abort_step()
            assert len(failed) <= 2
            assert all(name.startswith("odd") for name in failed)


def test_a_delay_of_the_way_is_waited_for():
    workers = [FakeWorker(owning(*range(4))), FakeWorker(owning(*range(4, 8)))]
    slow = Faults(delay=0.08)
    with star(workers, faults={0: [slow], 1: [slow]}) as dispatcher:
        request = batch(n_tokens=4)
        dispatcher.begin_step()
        begin = time.monotonic()
        assert run(dispatcher, request).tobytes() == oracle(request).tobytes()
        assert time.monotonic() - begin > 0.07


def test_waiting_costs_no_cpu_time():
    release = threading.Event()

    def late(request: Dispatch):
        release.wait(10)
        return honest(request)

    with star([FakeWorker(owning(*range(8)), answer=late)]) as dispatcher:
        dispatcher.begin_step()
        threading.Timer(0.5, release.set).start()
        begin = time.thread_time()
        run(dispatcher, batch())
        assert time.thread_time() - begin < 0.1  # 20 % of the half second


# --- large requests ------------------------------------------------------------------------------------------

BIG = 64 * 1024  # values of a row: 16 rows are 4 MiB, more than the sockets buffer


def big_batch(seed: int) -> ExpertBatch:
    return batch(0, n_tokens=16, seed=seed, length=BIG)


@pytest.mark.parametrize("transport", ["memory", "tcp"])
def test_requests_and_answers_larger_than_the_buffers_pass(transport: str):
    workers = [
        FakeWorker(owned, name=f"w{at}", listener=None if transport == "memory" else TcpListener("127.0.0.1:0"))
        for at, owned in enumerate(SPLITS["three"])
    ]
    with star(workers) as dispatcher:
        request = big_batch(3)
        assert step(dispatcher, request).tobytes() == oracle(request).tobytes()


def test_a_worker_that_still_writes_an_abandoned_answer_does_not_stop_the_next_request():
    """Both sides' buffers are full: it goes on only because the backbone reads while it writes."""
    workers = [FakeWorker(owning(*range(8)))]
    with star(workers, timeout=30) as dispatcher:
        dispatcher.begin_step()
        dispatcher.dispatch(big_batch(1))  # its answer of 12 MiB is never read
        dispatcher.abort_step()
        request = big_batch(2)
        assert run(dispatcher, request).tobytes() == oracle(request).tobytes()
        assert dispatcher.statistics().workers[0].late_frames == 1
        assert workers[0].connections == 1


def test_a_slow_reader_does_not_keep_the_others_from_their_rows():
    second_has_it = threading.Event()
    gate = threading.Event()

    def second(request: Dispatch):
        second_has_it.set()
        return honest(request)

    workers = [
        FakeWorker(owning(*range(4)), name="slow"),
        FakeWorker(owning(*range(4, 8)), name="quick", answer=second),
    ]
    with star(workers, timeout=30) as dispatcher:
        dispatcher.begin_step()
        # Keep the first worker's thread busy with a first request, so that it reads nothing of the next one.
        workers[0].answer = lambda request: (gate.wait(20), honest(request))[1]
        small = batch(0, n_tokens=4)
        dispatcher.dispatch(small)
        dispatcher.abort_step()
        request = big_batch(5)
        sender = threading.Thread(target=dispatcher.dispatch, args=(request,))
        second_has_it.clear()
        sender.start()
        assert second_has_it.wait(10)  # although the first worker takes nothing
        assert sender.is_alive()
        gate.set()
        sender.join(20)
        out = np.empty((16, TOP_K, BIG), np.float32)
        dispatcher.combine(0, 0, out)
        assert out.tobytes() == oracle(request).tobytes()


def test_a_worker_that_takes_no_data_is_a_timeout_and_no_half_request_stays_behind():
    gate = threading.Event()
    workers = [FakeWorker(owning(*range(4)), name="good"), FakeWorker(owning(*range(4, 8)), name="stuck")]
    with star(workers, timeout=0.3) as dispatcher:
        dispatcher.begin_step()
        workers[1].answer = lambda request: (gate.wait(20), honest(request))[1]
        dispatcher.dispatch(batch(0, n_tokens=8))
        dispatcher.abort_step()
        with pytest.raises(WorkerTimeoutError, match=r"worker stuck .*layer 0: it took no data"):
            dispatcher.dispatch(big_batch(1))
        dispatcher.abort_step()
        assert dispatcher.statistics().workers[1].connected is False
        gate.set()
        request = batch(1, n_tokens=8)
        assert step(dispatcher, request).tobytes() == oracle(request).tobytes()
        assert [worker.connections for worker in workers] == [1, 2]


def test_a_request_cut_off_by_the_loss_of_another_worker_does_not_stay_behind():
    gate = threading.Event()
    workers = [FakeWorker(owning(*range(4)), name="busy"), FakeWorker(owning(*range(4, 8)), name="odd")]
    kill = Faults(kill_at_send=FIRST_DISPATCH + 1)
    with star(workers, faults={1: [kill]}, timeout=30) as dispatcher:
        dispatcher.begin_step()
        workers[0].answer = lambda request: (gate.wait(20), honest(request))[1]
        dispatcher.dispatch(batch(0, n_tokens=8))
        dispatcher.abort_step()
        with pytest.raises(WorkerLostError, match=r"worker odd .*killed"):
            dispatcher.dispatch(big_batch(1))  # of which the busy worker has taken only a part
        gate.set()
        request = batch(1, n_tokens=8)
        assert step(dispatcher, request).tobytes() == oracle(request).tobytes()
        assert [worker.connections for worker in workers] == [2, 2]


# --- misuse --------------------------------------------------------------------------------------------------


def test_calls_out_of_order_are_errors_in_words():
    with star([FakeWorker(owning(*range(8)))]) as dispatcher:
        out = np.empty((1, TOP_K, N_EMBD), np.float32)
        with pytest.raises(ComputeError, match="not dispatched"):
            dispatcher.combine(0, 0, out)
        with pytest.raises(OwnershipError, match="layer 5, call 0 was not described"):
            dispatcher.dispatch(batch(5))
        dispatcher.dispatch(batch(0))
        with pytest.raises(ComputeError, match="do not fit into"):
            dispatcher.combine(0, 0, out[:, :-1])
        dispatcher.dispatch(batch(0))
        with pytest.raises(ComputeError, match="layer 1, call 0"):
            dispatcher.combine(1, 0, out)
        request = batch(1)
        assert step(dispatcher, request).tobytes() == oracle(request).tobytes()


def test_a_batch_that_no_frame_holds_is_refused_before_anything_is_sent():
    with star([FakeWorker(owning(*range(8)))]) as dispatcher:
        rows = np.broadcast_to(np.float32(1), (5000, 1 << 13))
        huge = ExpertBatch(0, 0, rows, np.zeros((5000, 8), np.int32), np.zeros((5000, 8), np.float32))
        with pytest.raises(InputError, match="too many for one exchange"):
            dispatcher.dispatch(huge)
        assert step(dispatcher, batch()).tobytes() == oracle(batch()).tobytes()


def test_statistics_may_be_read_while_a_step_runs():
    with star([FakeWorker(owning(*range(8)))]) as dispatcher:
        stop = threading.Event()
        seen: list[int] = []

        def read():
            while not stop.is_set():
                seen.append(dispatcher.statistics().round_trips)
                time.sleep(0.001)

        reader = threading.Thread(target=read)
        reader.start()
        for seed in range(200):
            run(dispatcher, batch(seed % 2, seed=seed))
        stop.set()
        reader.join()
        assert seen == sorted(seen)
        assert dispatcher.statistics().round_trips == 200
