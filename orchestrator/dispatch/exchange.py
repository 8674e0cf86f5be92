"""What the rest of the program sees of dispatch: the exchange that the hook calls, and its figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from orchestrator.types import EngineIdentity, ExpertBatch, FloatArray, Ownership

__all__ = ["DispatchStatistics", "EngineIdentity", "LayerSample", "Measurement", "RowExchange", "WorkerStatistics"]


class RowExchange(Protocol):
    """Carries the rows of one MoE call to the experts and back; called from the one thread that decodes."""

    def begin_step(self) -> None:
        """Make ready before each ``llama_decode``: bring lost workers back, or fail fast."""

    def dispatch(self, batch: ExpertBatch) -> None:
        """Send the rows of a call to all owners; the batch's arrays are free again on return."""

    def combine(self, layer: int, call: int, out: FloatArray) -> None:
        """Wait for the results of the call dispatched last and fill ``out``.

        ``out`` is [n_tokens, top_k, n] for ``exact`` (row of each pair, unweighted) and [n_tokens, n] for ``sum``.
        """

    def abort_step(self) -> None:
        """Forget what is under way after an error; late answers are dropped."""


class LayerSample(NamedTuple):
    """One MoE call: time spent in dispatch and combine, and the slowest worker's share of it."""

    hook_us: float
    compute_us: int  # the longest compute time that a worker reported for this call
    rows: int  # tokens of the batch


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one worker needs: milliseconds per expert at 1 and at 32 rows, and the round trip."""

    worker: str
    address: str
    ms_at_1: float
    ms_at_32: float
    round_trip_ms: float


@dataclass(frozen=True, slots=True)
class WorkerStatistics:
    """The counters of one worker since the dispatcher was made."""

    name: str
    address: str
    pid: int
    connected: bool
    round_trip_ms: float | None  # median of the last pings
    rows: int  # sent to it; a row that needs several of its experts counts once
    pairs: int  # (row, expert) pairs computed by it
    bytes_out: int
    bytes_in: int
    errors: int
    late_frames: int  # answers that came after their deadline and were dropped
    ownership: Ownership
    last_error: str | None


@dataclass(frozen=True, slots=True)
class DispatchStatistics:
    """The counters of a dispatcher."""

    workers: tuple[WorkerStatistics, ...]
    steps: int
    round_trips: int  # MoE calls answered by all their workers
    samples: tuple[LayerSample, ...]  # the most recent calls, oldest first
