"""Take a failed step back where the state cannot be cut: recurrent layers hold one state per sequence, no history.

A copy of that state before every step would do, and costs 7 to 10 % of a step (measured at the shape of a large
hybrid model: each step moves the state to another place, so that the graph is built anew and megabytes are copied).
So a copy serves for many steps, and the batches since then are remembered. After a failure the sequences go back
to their copies, and what was decoded since is *owed*: it is decoded again before anything else happens, batch by
batch as it was the first time, which gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from bindings.handles import ContextHandle, NativeError
from orchestrator.errors import ComputeError
from orchestrator.ring.steps import TokenBatch

TWIN: Final = 1
"""The sequence that is the copy of sequence 0, where there is only one: copy on write, within one buffer."""

MAX_STEPS: Final = 32
MAX_ROWS: Final = 128
"""How much is decoded at most on one copy, hence again after a failure."""

Owed = tuple[TokenBatch, bytes]
"""A batch and the boundary that came with it."""


class Rollback:
    """The copies of one context's sequences, and what was decoded since they were made.

    Without ``spans_steps`` every step gets a copy of its own: where an attention window forgets old positions,
    nothing can go back over several steps.
    """

    def __init__(self, context: ContextHandle, *, has_twin: bool, spans_steps: bool) -> None:
        self._context = context
        self._has_twin = has_twin
        self._max_steps = MAX_STEPS if spans_steps else 1
        self._copies: dict[int, tuple[int, bytes]] = {}  # sequence -> its length then, its state (a twin has none)
        self._done: list[Owed] = []  # since the copies
        self.owed: list[Owed] = []

    def protect(self, starts: Mapping[int, int]) -> None:
        """Make sure that there are copies of sequences that a step is about to change, from these positions on."""
        if len(self._done) >= self._max_steps or sum(len(batch) for batch, _ in self._done) >= MAX_ROWS:
            self.forget()
        for sequence, start in starts.items():
            if sequence in self._copies:
                continue
            state = b""
            if self._has_twin:
                self._context.remove(TWIN, -1, -1)
                self._context.copy(sequence, TWIN)
            elif start:
                try:
                    state = self._context.save(sequence, recurrent_only=True)
                except NativeError as error:
                    raise ComputeError(f"no copy of sequence {sequence} before the step: {error}") from error
            self._copies[sequence] = start, state

    def done(self, batch: TokenBatch, boundary: bytes) -> None:
        """Remember a step that succeeded."""
        self._done.append((batch, boundary))

    def paid(self) -> None:
        """Strike out the first of what is owed, which was decoded again."""
        del self.owed[0]

    def forget(self) -> None:
        """Make new copies from the next step on: the present is right, or the sequences were changed otherwise."""
        self._copies.clear()
        self._done.clear()

    def undo(self) -> None:
        """Bring all sequences back to their copies; what was decoded since is owed."""
        for sequence, (start, state) in self._copies.items():
            if self._has_twin:
                self._context.remove(sequence, -1, -1)
                self._context.copy(TWIN, sequence)
            elif start == 0:
                self._context.remove(sequence, -1, -1)
            else:  # first the state, because a memory with recurrent state behind a cut refuses to be cut
                self._context.restore(sequence, state, recurrent_only=True)
                self._context.remove(sequence, start, -1)
        self.owed = [*self._done, *self.owed]
        self._done.clear()

    def length(self, sequence: int) -> int:
        """Return how long a sequence is with what is owed; 0 if it is owed nothing."""
        lengths = [int(batch.positions[batch.sequences == sequence].max(initial=-1)) + 1 for batch, _ in self.owed]
        return max(lengths, default=0)

    def drop(self, sequence: int) -> bool:
        """Owe a sequence nothing any more, for it is to be forgotten; False where that cannot be told apart."""
        if any(boundary for _, boundary in self.owed):
            return False
        self._copies.pop(sequence, None)
        kept = [(_without(batch, sequence), boundary) for batch, boundary in self.owed]
        self.owed = [(batch, boundary) for batch, boundary in kept if batch is not None]
        return True

    def clear(self) -> None:
        """Owe nothing: all sequences are forgotten."""
        self.owed.clear()
        self.forget()


def _without(batch: TokenBatch, sequence: int) -> TokenBatch | None:
    keep = np.asarray(batch.sequences) != sequence
    if not keep.any():
        return None
    return TokenBatch(batch.tokens[keep], batch.positions[keep], batch.sequences[keep], batch.outputs[keep])
