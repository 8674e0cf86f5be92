"""The star's dispatcher: one connection per worker, every row to its owners, every answer to its place."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from orchestrator.dispatch.exchange import DispatchStatistics, Measurement
from orchestrator.transport.base import Connector
from orchestrator.types import Contract, EngineIdentity, ExpertBatch, FloatArray, LayerDescriptor


class Dispatcher:
    """Sends the rows of each MoE call to the workers that own the experts and gathers their answers."""

    def __init__(
        self,
        workers: Sequence[str | Connector],
        contract: Contract,
        identity: EngineIdentity,
        *,
        model_sha256: str | None = None,
        timeout: float = 60.0,
        connect_timeout: float = 2.0,
        client: str = "linkcpp",
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        raise NotImplementedError

    def connect(self) -> None:
        """Greet all workers; raise one of the worker errors for the first that cannot serve."""
        raise NotImplementedError

    def describe(self, descriptors: Sequence[LayerDescriptor]) -> None:
        """Tell all workers how the experts compute, and settle who computes which; gaps are an OwnershipError."""
        raise NotImplementedError

    def measure(self) -> tuple[Measurement, ...]:
        """Ask every worker for its time per expert and round trip."""
        raise NotImplementedError

    def check(self) -> None:
        """Ping every worker between steps; a lost one is marked, nothing is raised."""
        raise NotImplementedError

    def begin_step(self) -> None:
        """Make ready for a step (see RowExchange)."""
        raise NotImplementedError

    def dispatch(self, batch: ExpertBatch) -> None:
        """Send the rows of a call (see RowExchange)."""
        raise NotImplementedError

    def combine(self, layer: int, call: int, out: FloatArray) -> None:
        """Gather the answers of a call (see RowExchange)."""
        raise NotImplementedError

    def abort_step(self) -> None:
        """Forget what is under way (see RowExchange)."""
        raise NotImplementedError

    def statistics(self) -> DispatchStatistics:
        """Give the counters; may be called by any thread."""
        raise NotImplementedError

    def close(self) -> None:
        """Say goodbye to all workers."""
        raise NotImplementedError
