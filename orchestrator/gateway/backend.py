"""What the gateway needs of an engine, be it one process, a star or a ring: steps in, logits out, in one order."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from orchestrator.errors import LinkcppError
from orchestrator.ring.steps import Copy, Remove, TokenBatch
from orchestrator.types import FloatArray


class Invariance(enum.Enum):
    """How tokens may be grouped into steps without changing an answer; the gate finds it out per model."""

    SEVERAL = "several"  # any tokens of any sequences together
    ONE = "one"  # any tokens of one sequence
    NONE = "none"  # an answer depends on where its tokens were cut: the cuts are always the same, nothing is reused


NOT_INVARIANT: Final = frozenset({"deepseek4", "llada-moe", "minimax-01", "minimax-m3", "rnd1"})
"""Architectures whose answers depend on how tokens are grouped (`linkcpp bench invariance`): their attention looks at
chunks or chosen parts of the text, or at all of it at once."""


def known_invariance(architecture: str, *, one: bool | None = None, several: bool | None = None) -> Invariance:
    """Return how tokens of a model may be grouped.

    ``one`` and ``several`` are what the gate found for one sequence and for several in one micro-batch; where it did
    not try, what is known of the architecture decides.
    """
    if one is False or (one is None and architecture in NOT_INVARIANT):
        return Invariance.NONE
    return Invariance.ONE if several is False else Invariance.SEVERAL


@dataclass(frozen=True, slots=True)
class BackendFacts:
    """The sizes of a backend; only ``in_flight`` and ``groups`` may change, from step to step.

    ``n_chunk`` is the micro-batch, ``n_step`` the most tokens of a step; both at least ``n_sequences``.
    ``cuttable``: the end of a sequence can be removed (recurrent state cannot be taken back).
    """

    n_vocab: int
    n_ctx: int  # tokens of one sequence
    n_sequences: int
    n_chunk: int
    n_step: int
    in_flight: int = 1  # steps that may be under way at the same time
    groups: int = 1  # among how many steps the answers are shared out, so that every stage has work
    cuttable: bool = True
    invariance: Invariance = Invariance.SEVERAL
    hidden: bool = False  # hidden rows can be had beside the logits


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """The end of a step: ``logits`` [n_outputs, n_vocab], or the error.

    After an error ``resume`` names, for each sequence that suffered, the position up to which its cache is good.
    ``hidden`` [n_tokens, width] are the hidden rows of all its tokens, of a backend that was told to keep them.
    """

    ticket: int
    logits: FloatArray | None = None
    error: LinkcppError | None = None
    resume: Mapping[int, int] = field(default_factory=dict)
    hidden: FloatArray | None = None


class Backend(Protocol):
    """An engine with a number of sequences, used by one thread.

    Steps and operations take effect in the order in which they were given, whatever is still under way.
    """

    @property
    def facts(self) -> BackendFacts:
        """The sizes."""

    def submit(self, batch: TokenBatch, wanted: Callable[[], bool]) -> int:
        """Begin a step and return its ticket; at most ``in_flight`` may be under way.

        ``wanted`` may be asked at any moment, in any thread: once it says False, the step may come to nothing.
        Raises a :class:`LinkcppError` where no step can begin at all.
        """

    def collect(self) -> StepResult:
        """Wait for the oldest step and return how it ended. Raises only where the backend itself is lost."""

    def cancel(self, ticket: int) -> None:
        """Give up a step that is under way; :meth:`collect` still gives its end."""

    def apply(self, operation: Remove | Copy) -> bool:
        """Change the caches; False (and nothing changed) where this model's memory cannot do it."""

    def save(self, sequence: int, key: int) -> int | None:
        """Keep a copy of a sequence under a number and return its bytes; None where there is no room for it."""

    def recall(self, sequence: int, key: int) -> bool:
        """Put a copy into a sequence, in place of what it holds; False (and the sequence empty) if that failed."""

    def forget(self, key: int) -> None:
        """Drop a copy."""

    def dump(self, sequence: int) -> bytes | None:
        """Return a sequence's state for :meth:`load`, None where the state is not in this process."""

    def load(self, sequence: int, state: bytes) -> bool:
        """Put a dumped state into a sequence; False (and the sequence empty) where it does not fit."""

    def check(self) -> None:
        """Look after connections; called about once a second while nothing is under way."""

    def close(self) -> None:
        """Give everything back."""
