"""Start stage worker processes on this machine, wait until they are ready, and make sure that they end."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from orchestrator.errors import InputError
from orchestrator.ring.layout import LayerRange
from orchestrator.workers.child import ChildProcess, end_processes


class LocalStages:
    """Stage processes of this machine, ready when the ``with`` block begins and gone when it ends.

    ``stages`` has the ranges of each process; ``options`` are more arguments of ``linkcpp stage``, the same for all.
    ``pin`` gives a core per process. ``unix`` lets them listen on Unix sockets in a folder of this object.
    ``timeout`` in seconds holds for each start.

    Raises:
        InputError: the arguments contradict each other.
        WorkerLostError: a stage did not become ready; the message ends with what it said.
    """

    def __init__(
        self,
        model_path: str | Path,
        stages: Sequence[Sequence[LayerRange]],
        *,
        threads: int = 1,
        options: Sequence[str] = (),
        pin: Sequence[int] | None = None,
        unix: bool = False,
        timeout: float = 300.0,
    ) -> None:
        if pin is not None and len(pin) != len(stages):
            raise InputError(f"{len(stages)} stages, but cores for {len(pin)}")
        self._arguments = [
            [
                "stage",
                str(Path(model_path).resolve()),
                *(text for found in ranges for text in ("--layers", f"{found.first}:{found.last}")),
                *("--threads", str(threads)),
                *options,
            ]
            for ranges in stages
        ]
        cores: Sequence[int | None] = [None] * len(stages) if pin is None else pin
        self._timeout = timeout
        self._folder = tempfile.TemporaryDirectory(prefix="linkcpp-") if unix else None
        self._stages = [ChildProcess(f"stage-{index + 1}", core=core) for index, core in enumerate(cores)]

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of the processes, in the order of ``stages``; a restart keeps them."""
        return tuple(stage.address for stage in self._stages)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids as of the last start of each."""
        return tuple(stage.pid for stage in self._stages if stage.pid is not None)

    def __enter__(self) -> LocalStages:
        try:
            for index in range(len(self._stages)):
                self._start(index)
            # All load at the same time; the deadline is one for each, counted from here.
            deadline = time.monotonic() + self._timeout
            for stage in self._stages:
                stage.wait_ready(deadline, self._timeout)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def kill(self, index: int) -> None:
        """Kill one process at once (SIGKILL), as a failing machine would."""
        self._stages[index].kill()

    def restart(self, index: int) -> None:
        """Start a process again on its port, ending it first where it still runs, and wait until it is ready."""
        stage = self._stages[index]
        end_processes([stage])
        self._start(index)
        stage.wait_ready(time.monotonic() + self._timeout, self._timeout)

    def close(self) -> None:
        """End all processes: in order, and by force those that do not."""
        end_processes(self._stages)
        for stage in self._stages:
            stage.close()
        if self._folder is not None:
            self._folder.cleanup()

    def _start(self, index: int) -> None:
        stage = self._stages[index]
        free = "127.0.0.1:0" if self._folder is None else f"unix:{self._folder.name}/{stage.name}"
        stage.start([*self._arguments[index], "--name", stage.name, "--listen", stage.address or free])
