"""The state of a gateway and of its workers as one frozen snapshot, with rates."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable

from orchestrator.dispatch.exchange import DispatchStatistics, WorkerStatistics
from orchestrator.gateway.state import GatewayState, RunningRequest
from orchestrator.status.rates import TotalSeries
from orchestrator.status.snapshot import (
    FleetSnapshot,
    RequestSnapshot,
    SlotSnapshot,
    SpeculationSnapshot,
    WorkerSnapshot,
    WorkerState,
)


class FleetReport:
    """Looks at the counters now and then, and tells what they mean.

    ``state`` and ``statistics`` are asked at every look and may be called by any thread; ``statistics`` is None
    where the experts are computed in this process. ``now`` is a clock in seconds, ``wall`` Unix time in seconds.
    ``copes`` tells whether requests are answered in spite of lost workers, None: they are not. ``speculation`` says
    in words who guesses tokens.
    """

    def __init__(
        self,
        *,
        model: str,
        contract: str,
        engine: str,
        state: Callable[[], GatewayState],
        statistics: Callable[[], DispatchStatistics] | None,
        now: Callable[[], float],
        wall: Callable[[], float],
        copes: Callable[[], bool] | None = None,
        speculation: str = "off",
    ) -> None:
        self._model = model
        self._contract = contract
        self._engine = engine
        self._state = state
        self._statistics = statistics
        self._now = now
        self._wall = wall
        self._copes = copes
        self._speculation = speculation
        self._started = now()
        self._lock = threading.Lock()
        self._tokens = TotalSeries()
        self._rows: defaultdict[str, TotalSeries] = defaultdict(TotalSeries)

    def observe(self) -> None:
        """Note the counters for the rates; call about once a second."""
        self.snapshot()

    def snapshot(self) -> FleetSnapshot:
        """Return the fleet as it is now."""
        state = self._state()
        statistics = None if self._statistics is None else self._statistics()
        now = self._now()
        with self._lock:
            self._tokens.observe(now, state.generated_tokens)
            workers = [] if statistics is None else [self._worker(worker, now) for worker in statistics.workers]
            history = self._tokens.history(now)
        return FleetSnapshot(
            model=self._model,
            contract=self._contract,
            engine=self._engine,
            taken_at=self._wall(),
            uptime_seconds=now - self._started,
            workers=tuple(workers),
            request=_request(state.running),
            tokens_per_second_history=history,
            tokens_generated=state.generated_tokens,
            requests_finished=state.finished,
            requests_failed=state.failed,
            round_trips=0 if statistics is None else statistics.round_trips,
            slots=tuple(SlotSnapshot(slot.index, slot.held_tokens, _request(slot.request)) for slot in state.slots),
            requests_waiting=state.waiting,
            speculation=SpeculationSnapshot(
                self._speculation,
                state.drafted,
                state.accepted,
                state.generated_tokens / state.turns if state.turns else 0.0,
            ),
        )

    def problem(self) -> str:
        """Return why a request would probably fail now; empty when all is well."""
        if self._copes is not None and self._copes():
            return ""
        lost = [worker for worker in self.snapshot().workers if worker.state is not WorkerState.UP]
        return "; ".join(f"worker {w.name or w.address} is {w.state.value}: {w.problem or 'no answer'}" for w in lost)

    def _worker(self, worker: WorkerStatistics, now: float) -> WorkerSnapshot:
        series = self._rows[worker.address]
        series.observe(now, worker.rows)
        owned = worker.ownership
        lost = WorkerState.LOST if worker.last_error else WorkerState.CONNECTING
        return WorkerSnapshot(
            name=worker.name,
            address=worker.address,
            state=WorkerState.UP if worker.connected else lost,
            pid=worker.pid or None,
            rtt_ms=worker.round_trip_ms,
            layers=owned.layers,
            experts=tuple(sorted({expert for experts in owned.experts.values() for expert in experts})),
            pairs=owned.count,
            rows=worker.rows,
            rows_per_second=series.rate(now),
            bytes_in=worker.bytes_in,
            bytes_out=worker.bytes_out,
            errors=worker.errors,
            late_frames=worker.late_frames,
            problem="" if worker.connected else worker.last_error or "",
        )


def _request(running: RunningRequest | None) -> RequestSnapshot | None:
    if running is None:
        return None
    return RequestSnapshot(
        id=running.identifier,
        phase=running.phase,
        prompt_tokens=running.prompt_tokens,
        generated_tokens=running.generated_tokens,
        tokens_per_second=running.tokens_per_second,
    )
