from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import ProtocolError
from orchestrator.status.snapshot import FleetSnapshot, RequestSnapshot, WorkerSnapshot, WorkerState

counts = st.integers(0, 2**53)
numbers = st.floats(0, 1e12, allow_nan=False)
ids = st.lists(st.integers(0, 300), max_size=20, unique=True).map(lambda found: tuple(sorted(found)))
workers = st.builds(
    WorkerSnapshot,
    name=st.text(),
    address=st.text(),
    state=st.sampled_from(WorkerState),
    pid=st.none() | counts,
    rtt_ms=st.none() | numbers,
    layers=ids,
    experts=ids,
    pairs=counts,
    rows=counts,
    rows_per_second=numbers,
    bytes_in=counts,
    bytes_out=counts,
    errors=counts,
    late_frames=counts,
    problem=st.text(),
)
requests = st.builds(
    RequestSnapshot,
    id=st.text(),
    phase=st.sampled_from(["queued", "prefill", "decode"]),
    prompt_tokens=counts,
    generated_tokens=counts,
    tokens_per_second=numbers,
)
snapshots = st.builds(
    FleetSnapshot,
    model=st.text(),
    contract=st.sampled_from(["exact", "sum"]),
    engine=st.text(),
    taken_at=numbers,
    uptime_seconds=numbers,
    workers=st.lists(workers, max_size=4).map(tuple),
    request=st.none() | requests,
    tokens_per_second_history=st.lists(numbers, max_size=9).map(tuple),
    tokens_generated=counts,
    requests_finished=counts,
    requests_failed=counts,
    round_trips=counts,
)


@given(snapshots)
def test_json_text_gives_the_same_snapshot(snapshot: FleetSnapshot) -> None:
    assert FleetSnapshot.from_json(json.dumps(snapshot.to_json())) == snapshot


def small() -> FleetSnapshot:
    worker = WorkerSnapshot(
        "a", "127.0.0.1:1", WorkerState.UP, layers=(0, 1, 2), experts=(0, 1, 5), pairs=9, rows=3, rtt_ms=0.25
    )
    return FleetSnapshot("m", "exact", "e", 1.0, 2.0, workers=(worker,), tokens_per_second_history=(1.0, 4.5))


def test_unknown_fields_are_ignored_and_absent_ones_filled_in() -> None:
    value = small().to_json()
    value["colour"] = "blue"
    value["workers"][0]["gpu"] = {"name": "x"}
    assert FleetSnapshot.from_json(value) == small()
    sparse = FleetSnapshot.from_json({"version": 1, "model": "m", "workers": [{"address": "h:1"}]})
    assert sparse.model == "m"
    assert sparse.workers[0] == WorkerSnapshot("", "h:1", WorkerState.UNKNOWN)


def test_a_state_of_the_future_reads_as_unknown() -> None:
    value = small().to_json()
    value["workers"][0]["state"] = "hibernating"
    assert FleetSnapshot.from_json(value).workers[0].state is WorkerState.UNKNOWN


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<html>",
        "[]",
        "null",
        '{"model": "m"}',
        '{"version": 2}',
        '{"version": true}',
        '{"version": "1"}',
        '{"version": 1, "workers": {}}',
        '{"version": 1, "workers": [7]}',
        '{"version": 1, "workers": [{"rows": -1}]}',
        '{"version": 1, "workers": [{"rows": 1.5}]}',
        '{"version": 1, "workers": [{"layers": "5-1"}]}',
        '{"version": 1, "workers": [{"layers": [0, 1]}]}',
        '{"version": 1, "uptime_seconds": NaN}',
        '{"version": 1, "uptime_seconds": "soon"}',
        '{"version": 1, "uptime_seconds": 1' + "0" * 400 + "}",
        '{"version": 1, "tokens_per_second_history": [1, "2"]}',
        '{"version": 1, "tokens_per_second_history": [Infinity]}',
        '{"version": 1, "request": "r1"}',
        "[" * 100_000,
    ],
)
def test_what_is_no_status_is_a_protocol_error(text: str) -> None:
    with pytest.raises(ProtocolError):
        FleetSnapshot.from_json(text)


def test_ready_follows_the_workers_states() -> None:
    snapshot = small()
    assert snapshot.ready
    lost = dataclasses.replace(snapshot.workers[0], state=WorkerState.LOST)
    assert not dataclasses.replace(snapshot, workers=(snapshot.workers[0], lost)).ready
    assert dataclasses.replace(snapshot, workers=()).ready


def test_uniform_tells_a_product_from_an_uneven_ownership() -> None:
    worker = small().workers[0]
    assert worker.uniform
    assert not dataclasses.replace(worker, pairs=8).uniform
