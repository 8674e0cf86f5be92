"""Make the fleet's snapshot out of the dispatcher's counters and the gateway's, which come as plain values."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.dispatch.exchange import DispatchStatistics, WorkerStatistics
from orchestrator.status.rates import TotalSeries
from orchestrator.status.snapshot import FleetSnapshot, RequestSnapshot, WorkerSnapshot, WorkerState
from orchestrator.types import Contract, Ownership


@dataclass(frozen=True, slots=True)
class GatewayCounters:
    """What the gateway has counted since its start, and the request that it answers now."""

    tokens_generated: int = 0
    requests_finished: int = 0
    requests_failed: int = 0
    request: RequestSnapshot | None = None


class StatusCollector:
    """Remembers earlier counters, so that a snapshot has rates and a history. For one thread.

    Call :meth:`observe` about once a second: between two calls the totals are taken to have grown evenly.
    ``now`` is any steady clock in seconds, the same in all calls.
    """

    def __init__(self, *, model: str, contract: Contract | str, engine: str, now: float) -> None:
        self._model = model
        self._contract = contract.value if isinstance(contract, Contract) else contract
        self._engine = engine
        self._started = now
        self._tokens = TotalSeries()
        self._tokens.observe(now, 0)
        self._rows: dict[str, TotalSeries] = {}

    def observe(self, now: float, statistics: DispatchStatistics | None, counters: GatewayCounters) -> None:
        """Note the counters of this moment."""
        self._tokens.observe(now, counters.tokens_generated)
        for worker in () if statistics is None else statistics.workers:
            self._series(worker).observe(now, worker.rows)

    def collect(
        self, now: float, taken_at: float, statistics: DispatchStatistics | None, counters: GatewayCounters
    ) -> FleetSnapshot:
        """Note the counters and return the fleet of this moment; ``taken_at`` is Unix time."""
        self.observe(now, statistics, counters)
        workers = () if statistics is None else statistics.workers
        return FleetSnapshot(
            model=self._model,
            contract=self._contract,
            engine=self._engine,
            taken_at=taken_at,
            uptime_seconds=max(0.0, now - self._started),
            workers=tuple(self._worker(now, worker) for worker in workers),
            request=counters.request,
            tokens_per_second_history=self._tokens.history(now),
            tokens_generated=counters.tokens_generated,
            requests_finished=counters.requests_finished,
            requests_failed=counters.requests_failed,
            round_trips=0 if statistics is None else statistics.round_trips,
        )

    def _series(self, worker: WorkerStatistics) -> TotalSeries:
        return self._rows.setdefault(worker.address, TotalSeries())

    def _worker(self, now: float, worker: WorkerStatistics) -> WorkerSnapshot:
        return WorkerSnapshot(
            name=worker.name,
            address=worker.address,
            state=_state(worker),
            pid=worker.pid or None,  # 0 until it was greeted
            rtt_ms=worker.round_trip_ms,
            layers=worker.ownership.layers,
            experts=_experts(worker.ownership),
            pairs=worker.ownership.count,
            rows=worker.rows,
            rows_per_second=self._series(worker).rate(now),
            bytes_in=worker.bytes_in,
            bytes_out=worker.bytes_out,
            errors=worker.errors,
            late_frames=worker.late_frames,
            problem=worker.last_error or "",
        )


def _state(worker: WorkerStatistics) -> WorkerState:
    if worker.connected:
        return WorkerState.UP
    return WorkerState.LOST if worker.last_error else WorkerState.CONNECTING


def _experts(ownership: Ownership) -> tuple[int, ...]:
    """Return the distinct expert ids over all layers, ascending."""
    return tuple(sorted({expert for ids in ownership.experts.values() for expert in ids}))
