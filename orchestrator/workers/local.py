"""Start worker processes on this machine, wait until they are ready, and make sure that they end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal

from orchestrator.errors import InputError
from orchestrator.models.gguf import GgufFile
from orchestrator.types import Ownership
from orchestrator.workers.child import ChildProcess, end_processes
from orchestrator.workers.inject import Injection
from orchestrator.workers.ownership import ownership_arguments, split_evenly


class LocalWorkers:
    """Worker processes of this machine, ready when the ``with`` block begins and gone when it ends.

    ``split`` is ``"even"`` or one :class:`Ownership` per worker (``count`` may then be left out). ``pin`` gives a
    core per worker. ``inject`` makes the first worker wrong. ``timeout`` in seconds holds for each start.

    Raises:
        InputError: the model or the split is unusable.
        WorkerLostError: a worker did not become ready; the message ends with what it said.
    """

    def __init__(
        self,
        model_path: str | Path,
        count: int | None = None,
        *,
        threads: int = 1,
        split: Literal["even"] | Sequence[Ownership] = "even",
        inject: Injection | str | None = None,
        pin: Sequence[int] | None = None,
        repack: bool = False,
        mmap: bool = False,
        timeout: float = 300.0,
    ) -> None:
        if isinstance(split, str):
            model = GgufFile.open(model_path)
            model.require_moe()
            ownerships = split_evenly(model, 1 if count is None else count)
        else:
            ownerships = tuple(split)
        if not ownerships or (count is not None and count != len(ownerships)):
            raise InputError(f"{count} workers, but shares for {len(ownerships)}")
        if pin is not None and len(pin) != len(ownerships):
            raise InputError(f"{len(ownerships)} workers, but cores for {len(pin)}")
        self._timeout = timeout
        self._pin = pin
        self._command = [str(Path(model_path).resolve()), "--threads", str(threads)]
        self._command += ["--repack"] * repack + ["--mmap"] * mmap
        self._injected = [] if inject is None else ["--inject", Injection(inject).value]
        self._ownerships = ownerships
        self._workers: list[ChildProcess] = []

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of the workers, in the order of the shares; a restart keeps them."""
        return tuple(worker.address for worker in self._workers)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids as of the last start of each worker."""
        return tuple(worker.pid for worker in self._workers if worker.pid is not None)

    @property
    def ownerships(self) -> tuple[Ownership, ...]:
        """What each worker owns."""
        return self._ownerships

    def __enter__(self) -> LocalWorkers:
        try:
            for index in range(len(self._ownerships)):
                core = None if self._pin is None else self._pin[index]
                self._workers.append(ChildProcess(f"local-{index + 1}", core=core))
                self._start(index)
            # All load at the same time; the deadline is one for each, counted from here.
            deadline = time.monotonic() + self._timeout
            for worker in self._workers:
                worker.wait_ready(deadline, self._timeout)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def kill(self, index: int) -> None:
        """Kill one worker at once (SIGKILL), as a failing machine would."""
        self._workers[index].kill()

    def restart(self, index: int) -> None:
        """Start a worker again on its port, ending it first where it still runs, and wait until it is ready."""
        worker = self._workers[index]
        end_processes([worker])
        self._start(index)
        worker.wait_ready(time.monotonic() + self._timeout, self._timeout)

    def close(self) -> None:
        """End all workers: in order, and by force those that do not."""
        end_processes(self._workers)
        for worker in self._workers:
            worker.close()
        self._workers.clear()

    def _start(self, index: int) -> None:
        worker = self._workers[index]
        injected = self._injected if index == 0 else []
        arguments = ["worker", *self._command, *ownership_arguments(self._ownerships[index]), *injected]
        worker.start([*arguments, "--name", worker.name, "--listen", worker.address or "127.0.0.1:0"])
