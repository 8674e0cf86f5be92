"""Start the processes of a deployment on this machine, keep them running, and make sure that they end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Final

from orchestrator.engine.facts import file_facts, load_of, ring_rows
from orchestrator.errors import FleetError, InputError, PlanError, WorkerLostError
from orchestrator.models.deployment import Deployment, StageEntry, WorkerEntry, is_loopback
from orchestrator.models.gguf import GgufFile
from orchestrator.planner.cost import Measures
from orchestrator.planner.explain import size_text
from orchestrator.planner.plan import PROCESS_BYTES
from orchestrator.transport.base import parse_address
from orchestrator.transport.tcp import connect
from orchestrator.workers.child import ChildProcess, end_processes
from orchestrator.workers.ownership import choose_ownership, owned_bytes

ANY_PORT: Final = "127.0.0.1:0"

_TRY_SECONDS: Final = 1.0


@dataclass(slots=True)
class _Process:
    entry: StageEntry | WorkerEntry
    kind: str  # stage, spare, worker
    child: ChildProcess


@dataclass(frozen=True, slots=True)
class Running:
    """A process that was started here."""

    name: str
    kind: str
    holds: str
    address: str
    pid: int


class DeployedProcesses:
    """The processes of a deployment that belong to this machine, ready when the ``with`` block begins.

    ``node`` takes those of one machine, at their addresses; None takes all of them, with addresses of other machines
    replaced by ports of this one. ``threads`` holds for entries that say nothing. ``timeout`` in seconds is for the
    start of all expert workers, and of all stages.

    Raises:
        InputError: the deployment has no process here.
        WorkerLostError: one did not become ready; the message ends with what it said.
    """

    def __init__(
        self,
        deployment: Deployment,
        model: str | Path,
        *,
        node: str | None = None,
        threads: int | None = None,
        timeout: float = 600.0,
    ) -> None:
        if node is not None and node not in deployment.nodes:
            known = ", ".join(deployment.nodes) or "none"
            raise InputError(f"the deployment has no machine {node!r}", hint=f"it knows {known}")
        self._deployment = deployment
        self._model = str(model)  # a file, or where the processes download their shares from
        self._node = node
        self._threads = threads
        self._timeout = timeout
        self._processes: list[_Process] = []

    @property
    def deployment(self) -> Deployment:
        """The deployment with the addresses at which its processes are."""
        found = {process.entry.name: process.child.address for process in self._processes}

        def stage(entry: StageEntry) -> StageEntry:
            return replace(entry, address=found.get(entry.name, entry.address))

        def worker(entry: WorkerEntry) -> WorkerEntry:
            return replace(entry, address=found.get(entry.name, entry.address))

        return replace(
            self._deployment,
            model=self._model,
            stages=tuple(map(stage, self._deployment.stages)),
            spares=tuple(map(stage, self._deployment.spares)),
            workers=tuple(map(worker, self._deployment.workers)),
        )

    def check_memory(self, available: int) -> None:
        """Raise :class:`PlanError` if what is to be started here takes more than so many bytes; starts nothing."""
        file = GgufFile.open(self._model)
        load = load_of(self._deployment.context, self._deployment.sequences)
        measures = Measures.of(file_facts(file, load), load, PROCESS_BYTES)
        needs = {entry.name: self._memory(entry, measures, file) for entry, _ in self._entries()}
        total = sum(needs.values())
        if total > available:
            parts = ", ".join(f"{name} {size_text(need)}" for name, need in needs.items())
            raise PlanError(
                f"the processes of this machine need {size_text(total)} ({parts}), and it has "
                f"{size_text(available)}: {size_text(total - available)} are missing",
                hint="plan with the memory that each machine has (--node NAME=HOST:MEMORY), or add --overcommit",
            )

    def _memory(self, entry: StageEntry | WorkerEntry, measures: Measures, file: GgufFile) -> int:
        """Return what a process will take in bytes."""
        if isinstance(entry, WorkerEntry):
            return PROCESS_BYTES + owned_bytes(file, choose_ownership(file, entry.layers, entry.experts))
        spans = [span for span in entry.layers if span[1] <= measures.facts.n_layer]
        return measures.memory_of(spans, experts=not self._deployment.workers_of(entry.name))

    @property
    def running(self) -> tuple[Running, ...]:
        """What was started, with the process ids of the last start."""
        return tuple(
            Running(p.entry.name, p.kind, _holds(p.entry), p.child.address, p.child.pid or 0) for p in self._processes
        )

    def __enter__(self) -> DeployedProcesses:
        try:
            # Workers first: a stage connects to its own before it is ready.
            self._launch([(entry, kind) for entry, kind in self._entries() if kind == "worker"])
            self._launch([(entry, kind) for entry, kind in self._entries() if kind != "worker"])
            if not self._processes:
                raise InputError(f"no process of the deployment belongs to {self._node or 'this machine'}")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def tend(self, say: Callable[[str], None]) -> None:
        """Look after the processes, once: start again what ended, and say so. Never raises for a process."""
        for process in self._processes:
            process.child.tend(say, self._timeout)

    def close(self) -> None:
        """End all processes: in order, and by force those that do not."""
        children = [process.child for process in self._processes]
        end_processes(children)
        for child in children:
            child.close()
        self._processes.clear()

    # --- starting ---------------------------------------------------------------------------------------------

    def _entries(self) -> list[tuple[StageEntry | WorkerEntry, str]]:
        """Return what belongs to this machine, with its kind."""
        plan = self._deployment
        found: list[tuple[StageEntry | WorkerEntry, str]] = [(entry, "worker") for entry in plan.workers]
        found += [(entry, "stage") for entry in plan.stages]
        found += [(entry, "spare") for entry in plan.spares]
        return [(entry, kind) for entry, kind in found if self._node is None or entry.node == self._node]

    def _launch(self, entries: Sequence[tuple[StageEntry | WorkerEntry, str]]) -> None:
        begun = []
        for entry, kind in entries:
            process = _Process(entry, kind, ChildProcess(entry.name))
            self._processes.append(process)
            process.child.start([*self._arguments(entry), "--name", entry.name], self._listen(entry))
            begun.append(process)
        # All load at the same time; the deadline is one for all of them, counted from here.
        deadline = time.monotonic() + self._timeout
        for process in begun:
            process.child.wait_ready(deadline, self._timeout)

    def _listen(self, entry: StageEntry | WorkerEntry) -> str:
        return entry.address if self._node is not None or is_loopback(entry.address) else ANY_PORT

    def _arguments(self, entry: StageEntry | WorkerEntry) -> list[str]:
        threads = entry.threads or self._threads
        common = [self._model, *(["--threads", str(threads)] if threads else [])]
        if isinstance(entry, WorkerEntry):
            arguments = ["worker", *common]
            for option, value in (("--experts", entry.experts), ("--layers", entry.layers)):
                arguments += [option, value] if value else []
            return arguments
        arguments = ["stage", *common]
        for first, last in entry.layers:
            arguments += ["--layers", f"{first}:{last}"]
        arguments += ["--memory", entry.memory] if entry.memory else []
        arguments += ["--ctx", str(self._deployment.context), "--sequences", str(self._deployment.sequences)]
        arguments += ["--ubatch", str(ring_rows(self._deployment))]
        for worker in self._deployment.workers_of(entry.name):
            arguments += ["--worker", self._address_of(worker)]
        return arguments

    def _address_of(self, worker: WorkerEntry) -> str:
        """Return where a worker is, and wait for it where another machine starts it."""
        own = next((process.child.address for process in self._processes if process.entry is worker), None)
        if own is not None:
            return own
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                connect(parse_address(worker.address), _TRY_SECONDS).close()
            except FleetError as error:
                if time.monotonic() > deadline:
                    raise WorkerLostError(
                        f"does not answer at {worker.address} after {self._timeout:g} s",
                        worker=worker.name,
                        hint="start it with `linkcpp deploy` on its machine",
                    ) from error
                time.sleep(_TRY_SECONDS / 2)
            else:
                return worker.address


def _holds(entry: StageEntry | WorkerEntry) -> str:
    if isinstance(entry, WorkerEntry):
        return f"experts {entry.experts or 'all'} of layers {entry.layers or 'all'}"
    return "layers " + (", ".join(f"{first}:{last}" for first, last in entry.layers) or "of whoever is lost")
