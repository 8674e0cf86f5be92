"""Start worker processes on this machine, wait until they are ready, and make sure that they end.

A worker that is started here watches its standard input: the other end of that pipe is held by this process
alone, so that the worker sees its end and stops even where this process is killed without a chance to clean up.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Literal

from orchestrator.errors import InputError, WorkerLostError
from orchestrator.models.gguf import GgufFile
from orchestrator.types import Ownership
from orchestrator.workers.inject import Injection
from orchestrator.workers.ownership import ownership_arguments, split_evenly

_PACKAGE_PARENT: Final = Path(__file__).resolve().parents[2]
_TAIL_LINES: Final = 12
_STOP_SECONDS: Final = 8.0  # a little more than a worker gives itself to drain


@dataclass(slots=True)
class _Worker:
    """One child: what it was started with, and what runs now."""

    name: str
    ownership: Ownership
    arguments: list[str]
    errors: IO[bytes]
    process: subprocess.Popen[bytes] | None = None
    address: str = ""

    def tail(self) -> str:
        """Return the last lines that the child wrote to its standard error."""
        # Without moving the offset: the child writes through the same open file.
        size = os.fstat(self.errors.fileno()).st_size
        lines = os.pread(self.errors.fileno(), size, 0).decode("utf-8", "replace").strip().splitlines()
        return "\n".join(lines[-_TAIL_LINES:])


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
        self._workers: list[_Worker] = []

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of the workers, in the order of the shares; a restart keeps them."""
        return tuple(worker.address for worker in self._workers)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids as of the last start of each worker."""
        return tuple(worker.process.pid for worker in self._workers if worker.process is not None)

    @property
    def ownerships(self) -> tuple[Ownership, ...]:
        """What each worker owns."""
        return self._ownerships

    def __enter__(self) -> LocalWorkers:
        try:
            for index, ownership in enumerate(self._ownerships):
                arguments = [*ownership_arguments(ownership), *(self._injected if index == 0 else [])]
                name = f"local-{index + 1}"
                self._workers.append(_Worker(name, ownership, arguments, tempfile.TemporaryFile()))
                self._start(index)
            # All load at the same time; the deadline is one for each, counted from here.
            deadline = time.monotonic() + self._timeout
            for worker in self._workers:
                self._wait(worker, deadline)
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
        process = self._process(index)
        process.kill()
        process.wait()

    def restart(self, index: int) -> None:
        """Start a worker again on its port, ending it first where it still runs, and wait until it is ready."""
        worker = self._workers[index]
        if worker.process is not None:
            _end([worker.process])
        self._start(index)
        self._wait(worker, time.monotonic() + self._timeout)

    def close(self) -> None:
        """End all workers: in order, and by force those that do not."""
        _end([worker.process for worker in self._workers if worker.process is not None])
        for worker in self._workers:
            worker.errors.close()
        self._workers.clear()

    def _process(self, index: int) -> subprocess.Popen[bytes]:
        process = self._workers[index].process
        if process is None:
            raise InputError(f"worker {index} was not started")
        return process

    def _start(self, index: int) -> None:
        worker = self._workers[index]
        listen = worker.address or "127.0.0.1:0"
        worker.errors.seek(0)
        worker.errors.truncate()
        command = [sys.executable, "-m", "orchestrator", "worker", *self._command, *worker.arguments]
        command += ["--name", worker.name, "--listen", listen, "--json", "--until-stdin-ends"]
        # The child imports this very package, wherever the parent was started and whether or not it is installed.
        paths = [str(_PACKAGE_PARENT), *filter(None, [os.environ.get("PYTHONPATH")])]
        try:
            worker.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=worker.errors,
                start_new_session=True,  # Ctrl-C is for the parent, which then ends its workers in order
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )
        except OSError as error:
            raise WorkerLostError(f"cannot be started: {error}", worker=worker.name) from error
        if self._pin is not None:
            # Before its threads exist, hence for all of them: Python itself takes longer to start than this call.
            with contextlib.suppress(ProcessLookupError):  # ended already: the wait for it says why
                os.sched_setaffinity(worker.process.pid, {self._pin[index]})

    def _wait(self, worker: _Worker, deadline: float) -> None:
        """Read the line that says ready."""
        process = worker.process
        if process is None or process.stdout is None:
            raise WorkerLostError("was not started", worker=worker.name)
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise WorkerLostError(
                        f"was not ready within {self._timeout:g} s{_quote(worker.tail())}",
                        worker=worker.name,
                        hint="a large model on a slow disk needs longer",
                    )
                piece = os.read(process.stdout.fileno(), 65536)
                if not piece:
                    code = process.wait()
                    raise WorkerLostError(
                        f"ended with {_ending(code)} before it was ready{_quote(worker.tail())}", worker=worker.name
                    )
                line += piece
        try:
            ready = json.loads(line)
            worker.address = str(ready["address"])
        except (ValueError, KeyError, TypeError) as error:
            raise WorkerLostError(f"said {line[:200]!r} instead of being ready", worker=worker.name) from error


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.stdin is not None:
            with contextlib.suppress(OSError):  # a dead child has closed its end
                process.stdin.close()
        process.terminate()
    deadline = time.monotonic() + _STOP_SECONDS
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _ending(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


def _quote(tail: str) -> str:
    return f"; it said:\n{tail}" if tail else " and said nothing"
