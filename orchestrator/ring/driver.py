"""What a client of a ring calls, whatever carries the items: submit, collect, operations, cancel.

A driver is used by one thread. Subclasses move items: :class:`orchestrator.ring.pipeline.Pipeline` between hops of
this process, :class:`orchestrator.ring.client.Ring` over connections.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from orchestrator.errors import InputError, LinkcppError
from orchestrator.ring.items import Item
from orchestrator.ring.state import Completion, Instructions, RingFacts, RingState
from orchestrator.ring.steps import Forget, Recall, RingOperation, Save, TokenBatch
from orchestrator.types import FloatArray


class Driver:
    """A ring with several steps in flight; see the module for its two kinds."""

    _state: RingState

    # --- what subclasses do ----------------------------------------------------------------------------------

    def _launch(self, items: Iterable[Item]) -> None:
        """Send items into layer 0, in order; may call :meth:`_follow` for what comes out meanwhile."""
        raise NotImplementedError

    def _give_up(self, numbers: tuple[int, ...]) -> None:
        """Tell all stages that these steps are not wanted any more."""
        raise NotImplementedError

    def _progress(self) -> None:
        """Wait until something comes out, or until the ring is found broken (then call ``self._state.lost``)."""
        raise NotImplementedError

    def _follow(self, instructions: Instructions) -> None:
        if instructions.cancel:
            self._give_up(instructions.cancel)
        if instructions.launch:
            self._launch(instructions.launch)

    # --- what clients call -----------------------------------------------------------------------------------

    @property
    def facts(self) -> RingFacts:
        """What all stages agree on."""
        return self._state.facts

    @property
    def broken(self) -> LinkcppError | None:
        """Why no more steps are taken, None while they are."""
        return self._state.broken

    @property
    def busy(self) -> bool:
        """Whether :meth:`collect` has something to give."""
        return self._state.has_steps

    def length(self, sequence: int) -> int:
        """Return the position at which a sequence goes on, behind all that was submitted."""
        return self._state.positions.length(sequence)

    def submit(self, batch: TokenBatch) -> int:
        """Send a step and return its number, at once; its end comes from :meth:`collect`.

        Raises:
            InputError: the batch does not fit; nothing was changed.
            LinkcppError: the ring is broken.
        """
        item = self._state.submit(batch)
        self._launch((item,))
        return item.sequence

    def collect(self) -> Completion:
        """Wait for the next step to end and return how, in the order of submission.

        Raises:
            InputError: no step is in flight.
        """
        while (completion := self._state.next_completion()) is None:
            if not self._state.has_steps:
                raise InputError("no step is in flight")
            self._progress()
        return completion

    def decode(self, batch: TokenBatch) -> FloatArray:
        """Send tokens in steps of at most ``n_batch`` and wait: the logits [n_outputs, n_vocab] of all wanted.

        Nothing else may be in flight. On an error the caches hold what came before the failed step.
        """
        if self.busy:
            raise InputError("other steps are in flight")
        for part in batch.split(self.facts.n_batch):
            self.submit(part)
        rows: list[FloatArray] = []
        failure: LinkcppError | None = None
        while self.busy:
            completion = self.collect()
            failure = failure or completion.error
            if completion.logits is not None:
                rows.append(completion.logits)
        if failure is not None:
            raise failure
        return np.concatenate(rows) if len(rows) > 1 else rows[0]

    def apply(self, operation: RingOperation) -> bool:
        """Send an operation in its place among the steps; False (nothing changed) if this memory cannot do it.

        Should a stage fail at it all the same, :meth:`collect` gives a completion that names it.

        Raises:
            InputError: it names a sequence or saved state that does not exist.
            LinkcppError: the ring is broken.
        """
        items = self._state.operate(operation)
        if items is None:
            return False
        self._launch(items)
        return True

    def cancel(self, number: int) -> bool:
        """Give up a step: each stage that has not begun it drops it, and what it left behind is removed.

        Its completion still comes, with an error and the positions to go on from; so do those of the steps in
        flight that rely on it. False if its completion was given or it came to nothing already.
        """
        instructions = self._state.cancel(number)
        if instructions is None:
            return False
        self._follow(instructions)
        return True

    def replay(self, plan: Iterable[TokenBatch | RingOperation]) -> int:
        """Do a journal's plan (``replay.py``) on empty caches and wait; return how many tokens were fed.

        Raises:
            LinkcppError: a stage failed again; what was done until then stays.
        """
        fed = 0
        failure: LinkcppError | None = None
        for doing in plan:
            if isinstance(doing, TokenBatch):
                self.submit(doing)
                fed += len(doing)
            else:
                self.apply(doing)
        self.settle()
        while self.busy:
            failure = failure or self.collect().error
        if failure is not None:
            raise failure
        return fed

    def settle(self) -> None:
        """Wait until nothing is in flight; completions stay to be collected."""
        while self._state.oldest is not None:
            self._progress()

    def save(self, sequence: int, key: int) -> None:
        """Store a sequence in all stages under a number, and wait for it.

        Raises:
            StageFailedError: a stage has no room for it.
            InputError: no such sequence, or steps whose completions were not collected.
        """
        if self.busy:
            raise InputError("collect all steps before a sequence is saved")
        self.apply(Save(sequence, key))
        self.settle()
        while self.busy:
            completion = self.collect()
            if completion.error is not None:
                raise completion.error
        if self.broken is not None:
            raise self.broken

    def restore(self, sequence: int, key: int) -> None:
        """Put a saved sequence back, in place of what ``sequence`` holds; does not wait."""
        self.apply(Recall(sequence, key))

    def forget(self, key: int) -> None:
        """Drop a saved sequence; does not wait."""
        self.apply(Forget(key))
