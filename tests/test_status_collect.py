from __future__ import annotations

import dataclasses

import pytest

from orchestrator.dispatch.exchange import DispatchStatistics, WorkerStatistics
from orchestrator.status.collect import GatewayCounters, StatusCollector
from orchestrator.status.snapshot import RequestSnapshot, WorkerState
from orchestrator.types import Contract, Ownership

WORKER = WorkerStatistics(
    name="left",
    address="127.0.0.1:50051",
    pid=4711,
    connected=True,
    round_trip_ms=0.2,
    rows=0,
    pairs=0,
    bytes_out=10,
    bytes_in=20,
    errors=0,
    late_frames=0,
    ownership=Ownership({0: (0, 1), 1: (1, 2), 2: ()}),
    last_error=None,
)


def statistics(*workers: WorkerStatistics, round_trips: int = 0) -> DispatchStatistics:
    return DispatchStatistics(workers, steps=0, round_trips=round_trips, samples=())


def collector() -> StatusCollector:
    return StatusCollector(model="m", contract=Contract.EXACT, engine="e", now=100.0)


def test_each_field_comes_from_its_counter() -> None:
    request = RequestSnapshot("r1", "prefill", 33)
    counters = GatewayCounters(tokens_generated=5, requests_finished=2, requests_failed=1, request=request)
    snapshot = collector().collect(107.5, 1e9, statistics(WORKER, round_trips=77), counters)
    assert (snapshot.model, snapshot.contract, snapshot.engine) == ("m", "exact", "e")
    assert (snapshot.uptime_seconds, snapshot.taken_at, snapshot.round_trips) == (7.5, 1e9, 77)
    assert (snapshot.requests_finished, snapshot.requests_failed, snapshot.tokens_generated) == (2, 1, 5)
    assert snapshot.request == request
    (worker,) = snapshot.workers
    assert (worker.name, worker.address, worker.pid, worker.rtt_ms) == ("left", "127.0.0.1:50051", 4711, 0.2)
    assert (worker.layers, worker.experts, worker.pairs, worker.uniform) == ((0, 1), (0, 1, 2), 4, False)
    assert (worker.bytes_in, worker.bytes_out) == (20, 10)


@pytest.mark.parametrize(
    ("connected", "error", "state"),
    [
        (True, None, WorkerState.UP),
        (True, "an old error", WorkerState.UP),
        (False, "connection refused", WorkerState.LOST),
        (False, None, WorkerState.CONNECTING),
    ],
)
def test_state(connected: bool, error: str | None, state: WorkerState) -> None:
    worker = dataclasses.replace(WORKER, connected=connected, last_error=error)
    snapshot = collector().collect(101.0, 0.0, statistics(worker), GatewayCounters())
    assert snapshot.workers[0].state is state
    assert snapshot.workers[0].problem == (error or "")


def test_rates_are_of_the_last_seconds_and_per_worker() -> None:
    made = collector()
    for second in range(1, 5):
        left = dataclasses.replace(WORKER, rows=100 * second)
        right = dataclasses.replace(WORKER, address="127.0.0.1:50052", rows=7 * second)
        snapshot = made.collect(
            100.0 + second, 0.0, statistics(left, right), GatewayCounters(tokens_generated=10 * second)
        )
    assert snapshot.workers[0].rows_per_second == pytest.approx(100.0)
    assert snapshot.workers[1].rows_per_second == pytest.approx(7.0)
    assert snapshot.tokens_per_second_history == pytest.approx((10.0, 10.0, 10.0, 10.0))
    made.observe(105.0, statistics(left, right), GatewayCounters(tokens_generated=40))
    idle = made.collect(106.0, 0.0, statistics(left, right), GatewayCounters(tokens_generated=40))
    assert idle.workers[0].rows_per_second == 0.0
    assert idle.tokens_per_second == 0.0


def test_without_workers_there_is_a_snapshot_too() -> None:
    snapshot = collector().collect(100.0, 0.0, None, GatewayCounters())
    assert snapshot.workers == ()
    assert snapshot.ready
    assert snapshot.tokens_per_second_history == ()
