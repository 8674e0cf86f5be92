"""A star and the same model in one process, side by side: worker processes on one core, all else on another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from orchestrator.bench.machine import Seats, pinned, two_cores
from orchestrator.dispatch.dispatcher import Dispatcher
from orchestrator.dispatch.exchange import LayerSample
from orchestrator.engine.model import Model
from orchestrator.engine.session import Session
from orchestrator.errors import EngineError
from orchestrator.gateway.backbone import open_backbone
from orchestrator.workers.local import LocalWorkers


@dataclass(frozen=True, slots=True)
class Bench:
    """Both sides, ready; one thread each, backbone and one process on one core and the workers on the other."""

    model: Model
    star: Session
    local: Session
    dispatcher: Dispatcher
    seats: Seats

    def samples(self, count: int) -> tuple[LayerSample, ...]:
        """Give the last ``count`` MoE calls."""
        return self.dispatcher.statistics().samples[-count:]

    @property
    def calls_per_step(self) -> int:
        """MoE calls of one micro-batch."""
        return len(self.star.descriptors)


@contextmanager
def open_bench(path: Path, *, workers: int, n_ctx: int, mapped: bool = False) -> Iterator[Bench]:
    """Start the workers and open both sides; ``mapped`` lets all processes share one copy of the weights."""
    cores = two_cores()
    with ExitStack() as stack:
        local_workers = stack.enter_context(LocalWorkers(path, workers, pin=[cores[1]] * workers, mmap=mapped))
        stack.enter_context(pinned(cores[0]))
        backbone = stack.enter_context(open_backbone(path, local_workers.addresses, n_ctx=n_ctx))
        alone = stack.enter_context(open_backbone(path, n_ctx=n_ctx))
        if backbone.dispatcher is None:
            raise EngineError("the backbone was opened without workers")
        yield Bench(
            backbone.model, backbone.session, alone.session, backbone.dispatcher, Seats(cores, local_workers.pids)
        )


@dataclass(frozen=True, slots=True)
class Orchestration:
    """Time in the hook minus the slowest worker's compute time, microseconds per MoE call of so many rows.

    What the backbone computes between dispatch and combine hides a part of it, so this is less than the way of a
    request takes where a model has a shared expert.
    """

    rows: int
    p50: float
    p99: float
    compute_p50: float
    calls: int

    @classmethod
    def of(cls, rows: int, samples: tuple[LayerSample, ...]) -> Orchestration:
        """Work out the percentiles of these calls."""
        spent = np.array([sample.hook_us - sample.compute_us for sample in samples])
        p50, p99 = np.percentile(spent, (50, 99)).tolist()
        compute = float(np.median([sample.compute_us for sample in samples]))
        return cls(rows, p50, p99, compute, len(samples))

    def to_json(self) -> dict[str, object]:
        """Return the JSON object."""
        return {
            "rows": self.rows,
            "p50": round(self.p50, 1),
            "p99": round(self.p99, 1),
            "compute_p50": round(self.compute_p50, 1),
            "calls": self.calls,
        }
