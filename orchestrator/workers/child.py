"""Processes of this machine that say in one line of JSON that they are ready, and that end with whoever started them.

A child watches its standard input (``--until-stdin-ends``): the other end of that pipe is held by this process
alone, so that the child sees its end and stops even where this process is killed without a chance to clean up.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final

from orchestrator.errors import LinkcppError, WorkerLostError

if TYPE_CHECKING:
    from typing_extensions import Self

_PACKAGE_PARENT: Final = Path(__file__).resolve().parents[2]
_TAIL_LINES: Final = 12
RESTART_SECONDS: Final = 5.0
"""A process that ended is started again, but not sooner than so long after its last start."""

LOOK_SECONDS: Final = 0.5
"""How often processes are looked after."""

_STOP_SECONDS: Final = 8.0  # a little more than a worker gives itself to drain


class ChildProcess:
    """One child, which may be started again after its end: the linkcpp command ``arguments`` of this package.

    ``core`` pins it. ``name`` is what errors call it.
    """

    def __init__(self, name: str, *, core: int | None = None) -> None:
        self.name = name
        self.address = ""
        self._core = core
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as this object
        self._process: subprocess.Popen[bytes] | None = None
        self._arguments: list[str] = []
        self._started = 0.0
        self._is_missed = False  # it ended, and that was said

    @property
    def pid(self) -> int | None:
        """Process id as of the last start, None before the first."""
        return None if self._process is None else self._process.pid

    @property
    def exit_code(self) -> int | None:
        """How it ended (negative: the signal), None while it runs or before it was started."""
        return None if self._process is None else self._process.poll()

    def start(self, arguments: Sequence[str], listen: str) -> None:
        """Start ``linkcpp ARGUMENTS`` at an address; raise :class:`WorkerLostError` if that cannot be."""
        self._errors.seek(0)
        self._errors.truncate()
        self._arguments, self._started = list(arguments), time.monotonic()
        own = ["--listen", listen, "--json", "--until-stdin-ends"]
        command = [sys.executable, "-m", "orchestrator", *arguments, *own]
        # The child imports this very package, wherever the parent was started and whether or not it is installed.
        paths = [str(_PACKAGE_PARENT), *filter(None, [os.environ.get("PYTHONPATH")])]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,  # Ctrl-C is for the parent, which then ends its children in order
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )
        except OSError as error:
            raise WorkerLostError(f"cannot be started: {error}", worker=self.name) from error
        if self._core is not None:
            # Before its threads exist, hence for all of them: Python itself takes longer to start than this call.
            with contextlib.suppress(ProcessLookupError):  # ended already: the wait for it says why
                os.sched_setaffinity(self._process.pid, {self._core})

    def wait_ready(self, deadline: float, timeout: float) -> None:
        """Read the line that says ready, and from it the address; ``timeout`` is only for the message.

        Raises:
            WorkerLostError: the child ended, said something else or nothing; the message ends with its last lines.
        """
        process = self._process
        if process is None or process.stdout is None:
            raise WorkerLostError("was not started", worker=self.name)
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise WorkerLostError(
                        f"was not ready within {timeout:g} s{self._quote()}",
                        worker=self.name,
                        hint="a large model on a slow disk needs longer",
                    )
                piece = os.read(process.stdout.fileno(), 65536)
                if not piece:
                    code = process.wait()
                    raise WorkerLostError(
                        f"ended with {_ending(code)} before it was ready{self._quote()}", worker=self.name
                    )
                line += piece
        try:
            self.address = str(json.loads(line)["address"])
        except (ValueError, KeyError, TypeError) as error:
            raise WorkerLostError(f"said {line[:200]!r} instead of being ready", worker=self.name) from error

    def tend(self, say: Callable[[str], None], timeout: float) -> None:
        """Where it has ended, say so and start it again at its address. Never raises for what the process does."""
        code = self.exit_code
        if code is None:
            return
        if not self._is_missed:
            say(f"{self.name} ended with {_ending(code)}{self._quote()}")
            self._is_missed = True
        if time.monotonic() - self._started < RESTART_SECONDS:
            return
        try:
            self.start(self._arguments, self.address)
            self.wait_ready(time.monotonic() + timeout, timeout)
        except LinkcppError as error:
            say(f"{self.name} could not be started again: {error}")
        else:
            self._is_missed = False
            say(f"{self.name} runs again at {self.address}, process {self.pid}")

    def interrupt(self) -> None:
        """Ask it to end, and do not wait."""
        if self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        """Kill it at once (SIGKILL), as a failing machine would."""
        if self._process is None:
            raise WorkerLostError("was not started", worker=self.name)
        self._process.kill()
        self._process.wait()

    def tail(self) -> str:
        """Return the last lines that the child wrote to its standard error."""
        # Without moving the offset: the child writes through the same open file.
        size = os.fstat(self._errors.fileno()).st_size
        lines = os.pread(self._errors.fileno(), size, 0).decode("utf-8", "replace").strip().splitlines()
        return "\n".join(lines[-_TAIL_LINES:])

    def _quote(self) -> str:
        tail = self.tail()
        return f"; it said:\n{tail}" if tail else " and said nothing"

    def close(self) -> None:
        """Release what was kept of it; the process must have ended."""
        self._errors.close()


class ChildGroup(ABC):
    """Several children, ready when the ``with`` block begins and gone when it ends."""

    def __init__(self, names: Sequence[str], pin: Sequence[int] | None, timeout: float) -> None:
        cores: Sequence[int | None] = [None] * len(names) if pin is None else pin
        self._timeout = timeout
        self._children = [ChildProcess(name, core=core) for name, core in zip(names, cores, strict=True)]
        self._closing = threading.Event()
        self._keeper: threading.Thread | None = None

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of the processes, in order; a restart keeps them."""
        return tuple(child.address for child in self._children)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids as of the last start of each."""
        return tuple(child.pid for child in self._children if child.pid is not None)

    def __enter__(self) -> Self:
        try:
            for index in range(len(self._children)):
                self._start(index)
            # All load at the same time; the deadline is one for each, counted from here.
            deadline = time.monotonic() + self._timeout
            for child in self._children:
                child.wait_ready(deadline, self._timeout)
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
        self._children[index].kill()

    def restart(self, index: int) -> None:
        """Start a process again on its port, ending it first where it still runs, and wait until it is ready."""
        child = self._children[index]
        end_processes([child])
        self._start(index)
        child.wait_ready(time.monotonic() + self._timeout, self._timeout)

    def keep(self, say: Callable[[str], None]) -> None:
        """Start processes that end again from now on, in a thread of its own that tells ``say``."""

        def look() -> None:
            while not self._closing.wait(LOOK_SECONDS):
                for child in self._children:
                    if not self._closing.is_set():
                        child.tend(say, self._timeout)

        self._keeper = threading.Thread(target=look, name="keeper", daemon=True)
        self._keeper.start()

    def close(self) -> None:
        """End all processes: in order, and by force those that do not."""
        self._closing.set()
        if self._keeper is not None:
            for child in self._children:
                child.interrupt()  # the keeper may wait for one of them
            self._keeper.join()
        end_processes(self._children)
        for child in self._children:
            child.close()

    def _start(self, index: int) -> None:
        child = self._children[index]
        child.start([*self._arguments(index), "--name", child.name], child.address or self._free(child))

    @abstractmethod
    def _arguments(self, index: int) -> Sequence[str]:
        """Return the command of one child, without its name and address."""

    def _free(self, child: ChildProcess) -> str:
        """Return where a child listens at its first start."""
        return "127.0.0.1:0"


def end_processes(children: Sequence[ChildProcess]) -> None:
    """End children, all at the same time: in order, and by force those that do not."""
    processes = [child._process for child in children if child._process is not None]
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
