"""The backend of a ring: several steps in flight, and a stage that was lost costs time and not an answer.

The ring's own books (:mod:`orchestrator.ring.state`) know how long every sequence is. Where the gateway believes in
more than is there (a stage was lost, an operation failed), a step that relies on it is not sent but comes back as
dropped, with the position from which its tokens are needed: then they are sent again.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final, Protocol

from orchestrator.errors import InputError, LinkcppError, StepDroppedError
from orchestrator.gateway.backend import BackendFacts, Invariance, StepResult
from orchestrator.gateway.occupancy import Occupancy
from orchestrator.ring.replay import Doing, Journal
from orchestrator.ring.state import Completion, RingFacts
from orchestrator.ring.steps import Copy, Forget, Recall, Remove, RingOperation, Save, TokenBatch

logger = logging.getLogger(__name__)

MORE_IN_FLIGHT: Final = 2
"""Steps in flight for each stage at least: while one is computed another is on its way."""


class RingClient(Protocol):
    """The part of :class:`orchestrator.ring.driver.Driver` that a backend uses."""

    @property
    def facts(self) -> RingFacts:
        """What all stages agree on."""

    @property
    def broken(self) -> LinkcppError | None:
        """Why no more steps are taken, None while they are."""

    def length(self, sequence: int) -> int:
        """Return the position at which a sequence goes on, behind all that was submitted."""

    def submit(self, batch: TokenBatch) -> int:
        """Send a step and return its number."""

    def collect(self) -> Completion:
        """Wait for the next step to end and return how."""

    def apply(self, operation: RingOperation) -> bool:
        """Send an operation in its place among the steps; False if this memory cannot do it."""

    def cancel(self, number: int) -> bool:
        """Give up a step."""

    def replay(self, plan: tuple[Doing, ...]) -> int:
        """Do a journal's plan on empty caches and wait."""


class RingBackend:
    """A :class:`orchestrator.gateway.backend.Backend` over a ring of ``n_stages`` ranges of layers.

    ``n_chunk`` is the stages' micro-batch. ``reopen`` makes a broken ring whole, with empty sequences, or raises
    a :class:`LinkcppError`; ``look`` finds out whether an idle ring is whole. ``token_bytes`` is what a saved token
    takes in all stages together. ``hidden`` tells that the gateway has the last layers and could keep their hidden
    rows. ``now`` is a clock in seconds. The ring belongs to the caller.
    """

    def __init__(
        self,
        ring: RingClient,
        *,
        n_stages: int,
        n_chunk: int,
        invariance: Invariance = Invariance.SEVERAL,
        reopen: Callable[[], object] | None = None,
        look: Callable[[], object] | None = None,
        token_bytes: int = 1,
        hidden: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ring = ring
        self._reopen = reopen
        self._look = look
        self._token_bytes = token_bytes
        self._now = now
        self._n_stages = n_stages
        self._occupancy = Occupancy(n_stages)
        self._begun: dict[int, float] = {}
        self._ended: dict[int, StepResult] = {}  # steps that were not sent
        self._tickets: deque[int] = deque()
        self._batches: dict[int, TokenBatch] = {}  # those under way
        self._lost: dict[int, LinkcppError | None] = {}  # those that went with a stage; None: the ring is whole again
        self._unsent = 0
        facts = ring.facts
        # Where the partition decides the bytes, it is kept and repeated; its record has no room for overlaps.
        self._journal = Journal(facts.n_sequences, batch_invariant=False) if invariance is Invariance.NONE else None
        self.facts = BackendFacts(
            n_vocab=facts.n_vocab,
            n_ctx=facts.n_ctx,
            n_sequences=facts.n_sequences,
            n_chunk=min(n_chunk, facts.n_batch),
            n_step=facts.n_batch,
            in_flight=1 if self._journal is not None else MORE_IN_FLIGHT * n_stages,
            groups=n_stages,
            cuttable=facts.cuttable,
            invariance=invariance,
            hidden=hidden,
        )

    def submit(self, batch: TokenBatch, wanted: Callable[[], bool]) -> int:
        """Send a step; ``wanted`` is not asked, :meth:`cancel` is quicker."""
        if self._ring.broken is not None:
            self._recover(self._ring.broken)
        resume = {sequence: min(self._ring.length(sequence), start) for sequence, start in batch.starts().items()}
        if resume != batch.starts():
            self._unsent -= 1  # below all numbers of the ring
            error = StepDroppedError("the caches do not hold what this step goes on from")
            self._ended[self._unsent] = StepResult(self._unsent, error=error, resume=resume)
            self._tickets.append(self._unsent)
            return self._unsent
        ticket = self._ring.submit(batch)
        self._batches[ticket] = batch
        self._begun[ticket] = self._now()
        self._tickets.append(ticket)
        return ticket

    def collect(self) -> StepResult:
        """Wait for the oldest step; one that a lost stage took away is dropped if the ring can be made whole."""
        ticket = self._tickets.popleft()
        if ticket in self._ended:
            return self._ended.pop(ticket)
        batch, begun = self._batches.pop(ticket), self._begun.pop(ticket)
        starts = batch.starts()
        completion = self._ring.collect()
        while completion.number != ticket:  # an operation that failed: the steps that rely on it say so themselves
            logger.warning("an operation on the caches failed: %s", completion.error)
            completion = self._ring.collect()
        if completion.error is None:
            if self._journal is not None:
                self._journal.record(batch)
            else:
                self._learn(self._now() - begun, completion.spent)
            return StepResult(ticket, completion.logits, hidden=completion.hidden)
        if self._ring.broken is not None and ticket not in self._lost:
            self._lose([ticket, *self._batches], completion.error)
        if ticket not in self._lost:
            return StepResult(ticket, error=completion.error, resume=completion.resume)
        failure = self._lost.pop(ticket)
        if failure is None:
            failure = StepDroppedError(f"a stage was lost and is back: {completion.error}")
        return StepResult(
            ticket, error=failure, resume={sequence: self._ring.length(sequence) for sequence in starts}
        )

    def _learn(self, turn: float, spent: Sequence[int]) -> None:
        """Have so many steps under way, and answers shared out among so many, that no stage need wait."""
        self._occupancy.observe(turn, [microseconds / 1e6 for microseconds in spent])
        groups = self._occupancy.steps
        if groups != self.facts.groups:
            least = MORE_IN_FLIGHT * self._n_stages
            self.facts = replace(self.facts, groups=groups, in_flight=max(least, groups + 1))

    def _lose(self, tickets: Iterable[int], error: LinkcppError) -> None:
        """All that was under way is lost; bring the ring back, so that it can be sent again."""
        failure: LinkcppError | None = None
        try:
            self._recover(error)
        except LinkcppError as reason:
            logger.warning("the ring cannot be made whole: %s", reason)
            failure = reason
        self._lost.update(dict.fromkeys(tickets, failure))

    def _recover(self, error: LinkcppError) -> None:
        if self._reopen is None:
            raise error
        self._reopen()
        self._occupancy.forget()
        if self._journal is not None:
            self._ring.replay(self._journal.plan(self.facts.n_step))

    def _do(self, operation: RingOperation) -> bool:
        if self._ring.broken is not None:
            self._recover(self._ring.broken)
        done = self._ring.apply(operation)
        if done and self._journal is not None:
            self._journal.record(operation)
        return done

    def cancel(self, ticket: int) -> None:
        """Give up a step."""
        if ticket in self._batches:
            self._ring.cancel(ticket)

    def apply(self, operation: Remove | Copy) -> bool:
        """Send an operation in its place among the steps."""
        return self._do(operation)

    def save(self, sequence: int, key: int) -> int | None:
        """Keep a copy of a sequence in the stages' memory; the size is an estimate."""
        return self._token_bytes * self._ring.length(sequence) if self._do(Save(sequence, key)) else None

    def recall(self, sequence: int, key: int) -> bool:
        """Put a copy into a sequence."""
        try:
            return self._do(Recall(sequence, key))
        except InputError:  # a stage had no room for it, or was lost with it
            return False

    def forget(self, key: int) -> None:
        """Drop a copy."""
        self._do(Forget(key))

    def dump(self, sequence: int) -> bytes | None:
        """Return None: the state is in the stages."""
        return None

    def load(self, sequence: int, state: bytes) -> bool:
        """Return False: the state would have to be in the stages."""
        return False

    def check(self) -> None:
        """Find out whether a stage has gone, and try to bring the ring back."""
        if self._look is not None:
            self._look()
        if self._ring.broken is not None:
            self._recover(self._ring.broken)

    def close(self) -> None:
        """Do nothing: the ring belongs to the caller."""
