"""What the gate is asked to try."""

from __future__ import annotations

import os
from dataclasses import dataclass

from orchestrator.errors import InputError
from orchestrator.models.gguf import GgufFile
from orchestrator.onboarding.prompts import PROMPT_NAMES
from orchestrator.types import Boundary, Contract


@dataclass(frozen=True, slots=True)
class GateOptions:
    """The combinations to try; ``inject`` names the fault that one worker is given (the gate must then fail).

    ``threads`` is for the oracle and for the backbone alike: both must split their work in the same way.
    """

    contracts: tuple[Contract, ...] = (Contract.EXACT, Contract.SUM)
    worker_counts: tuple[int, ...] = (1, 2, 3)
    steps: int = 16
    prompts: tuple[str, ...] = PROMPT_NAMES
    threads: int = 1
    inject: str | None = None
    noise_floor: bool = True
    invariance: bool = True
    boundaries: tuple[Boundary, ...] = ()  # to try over local stages, besides the contracts
    stage_counts: tuple[int, ...] = (2, 3)

    def check(self, file: GgufFile) -> None:
        """Raise :class:`InputError` if this cannot be tried with a model."""
        if not self.contracts or not self.worker_counts or not self.prompts:
            raise InputError("nothing to try: name at least one contract, number of workers and prompt")
        impossible = [count for count in self.worker_counts if not 1 <= count <= file.n_expert]
        if impossible:
            raise InputError(
                f"{file.path.name} cannot be spread over {impossible[0]} workers",
                hint=f"it has {file.n_expert} experts per layer, so 1 to {file.n_expert} workers",
            )
        if self.boundaries and (not self.stage_counts or min(self.stage_counts) < 2):
            raise InputError("a boundary is between two stages at least")
        if self.steps < 0 or self.threads < 1:
            raise InputError(f"{self.steps} decode steps with {self.threads} threads are not possible")


def default_threads() -> int:
    """Choose the threads of oracle and backbone: half the cores, since the workers need the others."""
    return max((os.cpu_count() or 2) // 2, 1)
