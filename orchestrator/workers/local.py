"""Start worker processes on this machine, wait until they are ready, and make sure that they end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from orchestrator.errors import InputError
from orchestrator.models.gguf import GgufFile
from orchestrator.types import Ownership
from orchestrator.workers.child import ChildGroup
from orchestrator.workers.inject import Injection
from orchestrator.workers.ownership import ownership_arguments, split_evenly


class LocalWorkers(ChildGroup):
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
        self._command = [str(Path(model_path).resolve()), "--threads", str(threads)]
        self._command += ["--repack"] * repack + ["--mmap"] * mmap
        self._injected = [] if inject is None else ["--inject", Injection(inject).value]
        self._ownerships = ownerships
        super().__init__([f"local-{index + 1}" for index in range(len(ownerships))], pin, timeout)

    @property
    def ownerships(self) -> tuple[Ownership, ...]:
        """What each worker owns."""
        return self._ownerships

    def _arguments(self, index: int) -> Sequence[str]:
        injected = self._injected if index == 0 else []
        return ["worker", *self._command, *ownership_arguments(self._ownerships[index]), *injected]
