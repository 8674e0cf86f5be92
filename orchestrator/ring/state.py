"""What is in flight round a ring, and what to do when something goes wrong. PURE: events in, instructions out.

Every step and operation has a number, ascending, and every stage sees them in one order. Each comes out at the end,
as what it became; completions are given in the order of submission.

Several steps are in flight at once, also of one sequence, each relying on those before. So when a step comes to
nothing (a stage failed at it, or it was cancelled), the steps behind it that touch the same sequences must too,
and what the stages already did for them must be undone: some stages have computed a step, others have not. The
rules, in :meth:`RingState._spoil`:

- A sequence is *spoiled* from the position at which the first such step began. A step that touches a spoiled
  sequence is dropped, and spoils its other sequences from where it began in them.
- An operation that empties or replaces a spoiled sequence heals it; a copy of one is spoiled too.
- What is still spoiled in the end is removed, by an operation that goes round like any other, behind all that is
  in flight. A stage that has nothing to remove does nothing.

Memory that cannot be cut (recurrent state) is spoiled as a whole. Either way the completion says from which
position the tokens of a sequence have to be sent again (:attr:`Completion.resume`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from orchestrator.errors import InputError, LinkcppError, ProtocolError, StepDroppedError
from orchestrator.ring.items import HiddenOutcome, Item, operation_item, step_item
from orchestrator.ring.positions import Positions
from orchestrator.ring.steps import (
    Clear,
    Copy,
    Forget,
    Keep,
    Recall,
    Remove,
    RingOperation,
    Save,
    Shift,
    TokenBatch,
)
from orchestrator.types import Boundary, FloatArray
from orchestrator.wire.ring_messages import Fault, Operate, Outcome


@dataclass(frozen=True, slots=True)
class RingFacts:
    """What all stages of a ring agree on."""

    n_layer: int
    n_vocab: int
    n_ctx: int  # tokens of one sequence
    n_sequences: int
    n_batch: int  # most tokens of one step
    cuttable: bool  # the end of a sequence can be removed
    shiftable: bool  # positions can be moved


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """The end of a step, or of an operation that failed.

    ``logits`` is [n_outputs, n_vocab], None where ``error`` says why there are none. Then ``resume`` has, for each
    sequence that suffered, the position from which its tokens must be sent again. ``spent`` is in microseconds, one
    number per range of layers.
    """

    number: int
    logits: FloatArray | None = None
    error: LinkcppError | None = None
    resume: Mapping[int, int] = field(default_factory=dict)
    spent: tuple[int, ...] = ()
    hidden: FloatArray | None = None  # [n_tokens, width], where the gateway has the last layers and keeps these rows
    operation: RingOperation | None = None


@dataclass(frozen=True, slots=True)
class Instructions:
    """What the driver does: send these items into layer 0, in order, and tell every stage to give up these steps."""

    launch: tuple[Item, ...] = ()
    cancel: tuple[int, ...] = ()


NOTHING = Instructions()


@dataclass(slots=True, eq=False)
class _Entry:
    """A step or an operation whose completion was not given yet."""

    number: int
    batch: TokenBatch | None
    operation: RingOperation | None
    before: Mapping[int, int]  # lengths of the step's sequences before it
    flying: bool = True
    completion: Completion | None = None  # decided; None for an operation that went well

    def end(self, completion: Completion | None) -> None:
        self.flying = False
        self.completion = completion


class RingState:
    """The gateway's books of one ring. ``explain`` makes the error of a fault, in words that name the stage.

    ``boundary`` says how the stages hand on what crosses their cuts.
    """

    def __init__(
        self,
        facts: RingFacts,
        explain: Callable[[Fault | Operate], LinkcppError],
        boundary: Boundary = Boundary.F32,
    ) -> None:
        self.facts = facts
        self.broken: LinkcppError | None = None
        self.positions = Positions(facts.n_sequences, facts.n_ctx)
        self._explain = explain
        self._boundary = boundary
        self._last = 0
        self._entries: deque[_Entry] = deque()
        self._outstanding: deque[int] = deque()  # what has not come out at the end

    # --- what the client asks --------------------------------------------------------------------------------

    def submit(self, batch: TokenBatch) -> Item:
        """Take a step and return its item.

        Raises:
            InputError: tokens, sequences or positions that do not fit; nothing was changed.
            LinkcppError: the ring is broken, see :meth:`lost`.
        """
        self._require()
        if len(batch) > self.facts.n_batch:
            raise InputError(f"a step of {len(batch)} tokens; at most {self.facts.n_batch} fit")
        tokens = batch.tokens.tolist()
        if not 0 <= min(tokens) <= max(tokens) < self.facts.n_vocab:
            raise InputError(f"token ids must be from 0 to {self.facts.n_vocab - 1}")
        before = self.positions.append(batch)
        return step_item(self._enter(batch, None, before), batch, self._boundary)

    def operate(self, operation: RingOperation) -> tuple[Item, ...] | None:
        """Take an operation and return its items, None (and nothing changed) where this model's memory cannot do it.

        Raises:
            InputError: it names what does not exist.
            LinkcppError: the ring is broken.
        """
        self._require()
        parts = self._parts(operation)
        if parts is None:
            return None
        return tuple(self._operation(part) for part in parts)

    def cancel(self, number: int) -> Instructions | None:
        """Give up a step; None where its completion was given or it came to nothing already, or it is none."""
        for index, entry in enumerate(self._entries):
            came_to_nothing = entry.completion is not None and entry.completion.error is not None
            if entry.number == number and entry.batch is not None and not came_to_nothing:
                return self._fail(index, StepDroppedError(f"step {number} was cancelled"))
        return None

    def next_completion(self) -> Completion | None:
        """Return the next completion in order, None where its step is still in flight or there is none."""
        while self._entries and not self._entries[0].flying:
            completion = self._entries.popleft().completion
            if completion is not None:
                return completion
        return None

    @property
    def has_steps(self) -> bool:
        """Whether completions of steps are still to be given."""
        return any(entry.batch is not None or entry.completion is not None for entry in self._entries)

    @property
    def oldest(self) -> int | None:
        """The number of what has been outstanding for the longest, None where nothing is."""
        return self._outstanding[0] if self._outstanding else None

    # --- what happens ----------------------------------------------------------------------------------------

    def arrived(self, item: Item) -> Instructions:
        """Take what came out behind the last layer.

        Raises:
            ProtocolError: it is not the next one in order, or not what its step asked for.
        """
        number = item.sequence
        if not self._outstanding or number != self._outstanding[0]:
            raise ProtocolError(f"item {number} came out of the ring, expected was {self.oldest}")
        self._outstanding.popleft()
        index: int | None = 0
        if not self._entries or self._entries[0].number != number:  # most of the time it is the first
            index = next((i for i, entry in enumerate(self._entries) if entry.number == number), None)
        if index is None:
            return NOTHING  # dropped, and its completion was given
        entry = self._entries[index]
        if not entry.flying:
            return NOTHING  # dropped
        if isinstance(item, Fault):
            return self._fail(index, self._explain(item))
        if isinstance(item, Operate):
            if item.done:
                entry.end(None)
                return NOTHING
            return self._fail(index, self._explain(item))
        if not isinstance(item, Outcome) or entry.batch is None:
            raise ProtocolError(f"item {number} came out of the ring unfinished")
        wanted = entry.batch.n_outputs
        if len(item.logits) != wanted:  # as wide as the vocabulary, or as an embedding
            raise ProtocolError(f"step {number} gave {len(item.logits)} rows of logits, wanted are {wanted}")
        hidden = item.hidden if isinstance(item, HiddenOutcome) else None
        entry.end(Completion(number, item.logits, spent=item.spent, hidden=hidden))
        return NOTHING

    def lost(self, error: LinkcppError) -> None:
        """End everything in flight: a stage is gone, and with it all sequences. Then only :meth:`reset` helps."""
        self.broken = error
        self._outstanding.clear()
        for entry in self._entries:
            if entry.flying or (entry.completion is not None and entry.completion.error is not None):
                known = None if entry.completion is None else entry.completion.error
                if entry.batch is None:
                    entry.end(None)
                else:
                    resume = dict.fromkeys(entry.before, 0)
                    entry.end(Completion(entry.number, error=known or error, resume=resume))

    def reset(self) -> None:
        """Begin again with empty sequences; completions that were not given yet stay to be given."""
        self.broken = None
        self._outstanding.clear()
        self.positions.clear()

    # --- how ------------------------------------------------------------------------------------------------

    def _require(self) -> None:
        if self.broken is not None:
            raise self.broken

    def _enter(
        self, batch: TokenBatch | None, operation: RingOperation | None, before: Mapping[int, int] | None = None
    ) -> int:
        self._last += 1
        self._entries.append(_Entry(self._last, batch, operation, before or {}))
        self._outstanding.append(self._last)
        return self._last

    def _operation(self, operation: RingOperation) -> Item:
        self.positions.apply(operation)
        return operation_item(self._enter(None, operation), operation)

    def _parts(self, operation: RingOperation) -> tuple[RingOperation, ...] | None:
        """Break an operation into those that the engine can do; None where it can do none."""
        positions, facts = self.positions, self.facts
        if isinstance(operation, Shift) and not (facts.shiftable and facts.cuttable):
            return None
        if isinstance(operation, Remove) and not facts.cuttable and 0 <= operation.sequence < facts.n_sequences:
            length = positions.length(operation.sequence)
            if operation.first >= length:
                return ()
            whole = operation.first <= 0 and (operation.last < 0 or operation.last >= length)
            return (Remove(operation.sequence),) if whole else None
        if isinstance(operation, Copy) and (operation.first > 0 or operation.last >= 0):
            source, destination, first, last = (
                operation.source,
                operation.destination,
                operation.first,
                operation.last,
            )
            if source == destination:
                return ()
            tail = last >= 0 and (not 0 <= source < facts.n_sequences or last < positions.length(source))
            if (first > 0 or tail) and not facts.cuttable:
                return None
            head = (Remove(destination, 0, first),) if first > 0 else ()
            rest = (Remove(destination, last),) if tail else ()
            return (Copy(source, destination), *rest, *head)
        return (operation,)

    def _fail(self, index: int, error: LinkcppError) -> Instructions:
        """Let the entry at ``index`` come to nothing, and with it all that relies on it."""
        entry = self._entries[index]
        spoiled: dict[int, int] = {}
        keys: set[int] = set()
        if entry.batch is not None:
            spoiled.update((sequence, self._kept(length)) for sequence, length in entry.before.items())
        else:
            self._spoil_by(entry.operation, spoiled, keys)
        entry.end(Completion(entry.number, error=error, resume=dict(spoiled), operation=entry.operation))
        dropped = [entry.number] if entry.batch is not None else []
        for later in list(self._entries)[index + 1 :]:
            if later.batch is None:
                self._follow(later, spoiled, keys)
            elif later.flying or (later.completion is not None and later.completion.error is None):
                if spoiled.keys().isdisjoint(later.before):
                    continue
                for sequence, length in later.before.items():
                    spoiled.setdefault(sequence, self._kept(length))
                resume = {sequence: spoiled[sequence] for sequence in later.before}
                reason = StepDroppedError(f"step {later.number} goes on from step {entry.number}: {error}")
                later.end(Completion(later.number, error=reason, resume=resume))
                dropped.append(later.number)
        undo: list[RingOperation] = [Forget(key) for key in sorted(keys)]
        undo += [Remove(sequence, position) for sequence, position in sorted(spoiled.items())]
        outstanding = set(self._outstanding)
        return Instructions(
            tuple(self._operation(operation) for operation in undo),
            tuple(number for number in dropped if number in outstanding),
        )

    def _kept(self, length: int) -> int:
        return length if self.facts.cuttable else 0

    def _spoil_by(self, operation: RingOperation | None, spoiled: dict[int, int], keys: set[int]) -> None:
        """Note what a failed operation leaves behind: some stages did it, others did not."""
        match operation:
            case Remove(sequence) | Shift(sequence) | Recall(sequence):
                spoiled[sequence] = 0
            case Copy(_, destination):
                spoiled[destination] = 0
            case Keep() | Clear():
                spoiled.update(dict.fromkeys(range(self.facts.n_sequences), 0))
            case Save(_, key):
                keys.add(key)

    def _follow(self, entry: _Entry, spoiled: dict[int, int], keys: set[int]) -> None:
        """Follow an operation behind the trouble: what does it heal, what does it spread to?"""
        match entry.operation:
            case Remove(sequence, first, last) if sequence in spoiled:
                if last < 0 and first <= spoiled[sequence]:
                    del spoiled[sequence]
                elif first < spoiled[sequence] and not 0 <= last <= spoiled[sequence]:
                    spoiled[sequence] = first
            case Copy(source, destination):
                spoiled.pop(destination, None)
                if source in spoiled:
                    spoiled[destination] = spoiled[source]
            case Keep(sequence):
                for other in set(spoiled) - {sequence}:
                    del spoiled[other]
            case Shift(sequence) if sequence in spoiled:
                spoiled[sequence] = 0
            case Clear():
                spoiled.clear()
            case Save(sequence, key):
                keys.discard(key)
                if sequence in spoiled:
                    keys.add(key)
            case Recall(sequence, key):
                spoiled.pop(sequence, None)
                if key in keys:
                    spoiled[sequence] = 0
            case Forget(key):
                keys.discard(key)
