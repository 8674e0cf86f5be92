"""Local worker processes that share a model's experts, and backbones over them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from orchestrator.dispatch.dispatcher import Dispatcher
from orchestrator.engine.model import Model
from orchestrator.engine.session import Session
from orchestrator.errors import EngineError, InputError
from orchestrator.gateway.backbone import open_backbone
from orchestrator.models.gguf import GgufFile
from orchestrator.types import Contract, Ownership
from orchestrator.workers.local import LocalWorkers

_TIMEOUT: Final = 60.0  # seconds for one answer of a worker
_TIMEOUT_MAPPED: Final = 3600.0  # from a slow disk, a micro-batch may touch every expert of a layer
_START: Final = 300.0  # seconds until a worker must be ready
_SLOWEST_DISK: Final = 20e6  # bytes per second; a large model gets as long as this disk would take


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals over the workers of a star; bytes as the backbone sees them."""

    round_trips: int
    bytes_in: int
    bytes_out: int

    def __sub__(self, earlier: Counters) -> Counters:
        return Counters(
            self.round_trips - earlier.round_trips,
            self.bytes_in - earlier.bytes_in,
            self.bytes_out - earlier.bytes_out,
        )


class Star:
    """A backbone without experts over the workers of a fleet."""

    def __init__(self, model: Model, session: Session, dispatcher: Dispatcher) -> None:
        self.model = model
        self.session = session
        self._dispatcher = dispatcher

    def rows_by_worker(self) -> dict[str, int]:
        """Count the rows sent to each worker."""
        return {worker.name: worker.rows for worker in self._dispatcher.statistics().workers}

    def counters(self) -> Counters:
        """Return the totals so far."""
        statistics = self._dispatcher.statistics()
        return Counters(
            statistics.round_trips,
            sum(worker.bytes_in for worker in statistics.workers),
            sum(worker.bytes_out for worker in statistics.workers),
        )


@dataclass(frozen=True, slots=True)
class FleetWorker:
    """One running worker process."""

    address: str
    pid: int
    ownership: Ownership


class Fleet:
    """Running local workers that together hold every expert of a model."""

    def __init__(self, file: GgufFile, local: LocalWorkers, *, threads: int, timeout: float) -> None:
        self._file = file
        self._threads = threads
        self._timeout = timeout
        self.workers = tuple(
            FleetWorker(address, pid, ownership)
            for address, pid, ownership in zip(local.addresses, local.pids, local.ownerships, strict=True)
        )

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids, in the order of the shares."""
        return tuple(worker.pid for worker in self.workers)

    @contextmanager
    def connect(self, contract: Contract, *, n_ctx: int) -> Iterator[Star]:
        """Open a backbone over the workers; raises what :func:`open_backbone` raises."""
        addresses = [worker.address for worker in self.workers]
        with open_backbone(
            self._file.path,
            addresses,
            contract=contract,
            n_ctx=n_ctx,
            n_threads=self._threads,
            timeout=self._timeout,
        ) as backbone:
            if backbone.dispatcher is None:
                raise EngineError("the backbone was opened without workers")
            yield Star(backbone.model, backbone.session, backbone.dispatcher)


@contextmanager
def open_fleet(
    file: GgufFile,
    shares: Sequence[Ownership],
    *,
    threads: int = 1,
    mapped: bool = False,
    inject: str | None = None,
) -> Iterator[Fleet]:
    """Start one worker process per share, with one computing thread each; ``inject`` makes the first one wrong.

    ``threads`` are the backbone's. ``mapped`` workers page their experts in from the file as they need them.
    """
    timeout = _TIMEOUT_MAPPED if mapped else _TIMEOUT
    start = max(_START, file.n_bytes / _SLOWEST_DISK)
    with LocalWorkers(file.path, split=shares, inject=inject, mmap=mapped, timeout=start) as local:
        yield Fleet(file, local, threads=threads, timeout=timeout)


def uneven_shares(layers: Sequence[int], n_expert: int, workers: int) -> tuple[Ownership, ...]:
    """Share experts out unevenly, and the other way round in every second layer.

    Equal shares hide mistakes in who owns what, and equal shares in all layers hide mistakes about the layer.
    """
    forward = split_unevenly(n_expert, workers)
    mirrored = [tuple(sorted(n_expert - 1 - expert for expert in share)) for share in forward]
    return tuple(
        Ownership({layer: (forward, mirrored)[index % 2][worker] for index, layer in enumerate(layers)})
        for worker in range(workers)
    )


def split_unevenly(n_expert: int, workers: int) -> list[tuple[int, ...]]:
    """Cut the experts into runs of growing length, each at least one.

    Raises :class:`InputError` for more workers than experts.
    """
    if not 1 <= workers <= n_expert:
        raise InputError(f"{n_expert} experts cannot be split among {workers} workers")
    whole = workers * (workers + 1) // 2  # parts: worker i gets i + 1 of them
    spare = n_expert - workers  # beyond the one expert that each gets
    ends = [index + spare * (index * (index + 1) // 2) // whole for index in range(workers + 1)]
    return [tuple(range(start, end)) for start, end in itertools.pairwise(ends)]
