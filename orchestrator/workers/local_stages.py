"""Start stage worker processes on this machine, wait until they are ready, and make sure that they end."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from orchestrator.errors import InputError
from orchestrator.ring.layout import LayerRange
from orchestrator.workers.child import ChildGroup, ChildProcess


class LocalStages(ChildGroup):
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
        self._commands = [
            [
                "stage",
                str(Path(model_path).resolve()),
                *(text for found in ranges for text in ("--layers", f"{found.first}:{found.last}")),
                *("--threads", str(threads)),
                *options,
            ]
            for ranges in stages
        ]
        self._folder = tempfile.TemporaryDirectory(prefix="linkcpp-") if unix else None
        super().__init__([f"stage-{index + 1}" for index in range(len(stages))], pin, timeout)

    def close(self) -> None:
        """End all processes, and remove the folder of their sockets."""
        super().close()
        if self._folder is not None:
            self._folder.cleanup()

    def _arguments(self, index: int) -> Sequence[str]:
        return self._commands[index]

    def _free(self, child: ChildProcess) -> str:
        return super()._free(child) if self._folder is None else f"unix:{self._folder.name}/{child.name}"
