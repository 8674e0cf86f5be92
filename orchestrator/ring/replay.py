"""What to do again when the caches are lost: the tokens of every sequence, as steps and operations. PURE.

A journal follows everything that is submitted and that came to be. :meth:`Journal.plan` says what brings empty
caches to the same bytes:

- In batch-invariant mode logits and caches do not depend on how tokens were grouped, so each sequence is prefilled
  in steps as large as allowed. Only what no prefill can give is done as it was: a sequence whose middle was cut out
  or shifted (the tokens behind were computed while those were there) is fed and cut again in the same order.
- Otherwise the steps' own partition decides the bytes, so the steps that something alive rests on are repeated as
  they were, with the operations between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

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
    one_sequence,
)

Doing: TypeAlias = TokenBatch | RingOperation

_RUN: Final = 512
"""Tokens from which on a new run is begun, so that a long sequence is not copied at every step."""

_FIRST_PRUNE: Final = 256
"""Entries of the log at which what nothing rests on is dropped for the first time."""


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Tokens that a sequence got from ``position`` on."""

    position: int
    tokens: tuple[int, ...]

    @property
    def end(self) -> int:
        """The position behind them."""
        return self.position + len(self.tokens)


@dataclass(frozen=True, slots=True)
class _Cut:
    """Positions [first, last) were removed; ``last`` -1: to the end."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class _Move:
    """Positions [first, last) were moved."""

    first: int
    last: int
    delta: int


_Event: TypeAlias = _Tokens | _Cut | _Move
_History: TypeAlias = tuple[_Event, ...]


class Journal:
    """The history of a ring's sequences; ``batch_invariant`` False keeps every step as it was."""

    def __init__(self, n_sequences: int, *, batch_invariant: bool = True) -> None:
        self._invariant = batch_invariant
        self._histories: list[_History] = [()] * n_sequences
        self._saved: dict[int, _History] = {}
        self._log: list[Doing] = []
        self._next_prune = _FIRST_PRUNE

    def clear(self) -> None:
        """Forget everything."""
        self._histories = [()] * len(self._histories)
        self._saved.clear()
        self._log.clear()

    def record(self, done: Doing) -> None:
        """Note a step that was computed, or an operation that was done, in the order of submission."""
        if isinstance(done, TokenBatch):
            self._record_step(done)
        else:
            self._record_operation(done)
        if not self._invariant:
            self._log.append(done)
            if len(self._log) >= self._next_prune:
                self._prune()
                self._next_prune = max(_FIRST_PRUNE, 2 * len(self._log))

    def tokens(self, sequence: int) -> tuple[int, ...]:
        """Return the tokens of a sequence that was only appended to and cut at its end; else what it was fed."""
        return tuple(
            token for event in self._histories[sequence] if isinstance(event, _Tokens) for token in event.tokens
        )

    def plan(self, n_batch: int) -> tuple[Doing, ...]:
        """Return what to do to empty caches, in order; steps have at most ``n_batch`` tokens and want no logits.

        Saved sequences come first, each by way of sequence 0.
        """
        if not self._invariant:
            self._prune()
            log = [_silent(done) if isinstance(done, TokenBatch) else done for done in self._log]
            # A repeated step may have filled sequences that are empty now, by an operation that was not kept.
            return (*log, *(Remove(i) for i, history in enumerate(self._histories) if not history))
        plan: list[Doing] = []
        for key, history in self._saved.items():
            plan += [*_play(history, 0, n_batch), Save(0, key), Remove(0)]
        for sequence, history in enumerate(self._histories):
            plan += _play(history, sequence, n_batch)
        return tuple(plan)

    # --- how ------------------------------------------------------------------------------------------------

    def _record_step(self, batch: TokenBatch) -> None:
        parts: dict[int, tuple[int, list[int]]] = {}
        rows = zip(batch.sequences.tolist(), batch.positions.tolist(), batch.tokens.tolist(), strict=True)
        for sequence, position, token in rows:
            parts.setdefault(sequence, (position, []))[1].append(token)
        for sequence, (position, tokens) in parts.items():
            history = self._histories[sequence]
            last = history[-1] if history else None
            if isinstance(last, _Tokens) and last.end == position and len(last.tokens) < _RUN:
                joined = _Tokens(last.position, (*last.tokens, *tokens))
                self._histories[sequence] = (*history[:-1], joined)
            else:
                self._histories[sequence] = (*history, _Tokens(position, tuple(tokens)))

    def _record_operation(self, operation: RingOperation) -> None:
        histories = self._histories
        match operation:
            case Remove(sequence, first, last):
                histories[sequence] = _cut(histories[sequence], max(first, 0), last)
            case Copy(source, destination, first, last):
                copied = histories[source]
                if last >= 0:
                    copied = _cut(copied, last, -1)
                histories[destination] = _cut(copied, 0, first) if first > 0 else copied
            case Keep(sequence):
                self._histories = [history if i == sequence else () for i, history in enumerate(histories)]
            case Shift(sequence, first, last, delta):
                if histories[sequence]:
                    histories[sequence] = (*histories[sequence], _Move(first, last, delta))
            case Clear():
                self._histories = [()] * len(histories)
            case Save(sequence, key):
                self._saved[key] = histories[sequence]
            case Recall(sequence, key):
                histories[sequence] = self._saved.get(key, ())
            case Forget(key):
                self._saved.pop(key, None)

    def _prune(self) -> None:
        """Drop what nothing alive rests on, going back from the end."""
        alive: set[int] = {sequence for sequence, history in enumerate(self._histories) if history}
        keys: set[int] = set(self._saved)
        kept: list[Doing] = []
        for done in reversed(self._log):
            needed = True
            match done:
                case TokenBatch():
                    sequences = set(done.sequences.tolist())
                    needed = not alive.isdisjoint(sequences)
                    if needed:
                        alive |= sequences  # the whole step is repeated, so what its other tokens rest on is too
                case Remove(sequence, first, last):
                    needed = sequence in alive
                    if first <= 0 and last < 0:
                        alive.discard(sequence)
                case Shift(sequence):
                    needed = sequence in alive
                case Copy(source, destination):
                    needed = destination in alive
                    if needed:
                        alive.discard(destination)
                        alive.add(source)
                case Keep(sequence):
                    needed = bool(alive or keys)
                    alive &= {sequence}
                case Clear():
                    needed = bool(alive or keys)
                    alive.clear()
                case Save(sequence, key):
                    needed = key in keys
                    if needed:
                        keys.discard(key)
                        alive.add(sequence)
                case Recall(sequence, key):
                    needed = sequence in alive
                    if needed:
                        alive.discard(sequence)
                        keys.add(key)
                case Forget(key):
                    keys.discard(key)
            if needed:
                kept.append(done)
        self._log = kept[::-1]


def _cut(history: _History, first: int, last: int) -> _History:
    """Follow a removal; at the end of a sequence that was only appended to, the tokens are as if never fed."""
    if first <= 0 and last < 0:
        return ()
    kept = history
    while kept and isinstance(event := kept[-1], _Tokens):
        if first >= event.end:
            return kept  # with nothing behind the cut that was removed, nothing is
        if 0 <= last < event.end:
            break
        kept = kept[:-1]
        if first > event.position:
            return (*kept, _Tokens(event.position, event.tokens[: first - event.position]))
    return (*kept, _Cut(first, last)) if kept else ()


def _play(history: _History, sequence: int, n_batch: int) -> Iterator[Doing]:
    run: _Tokens | None = None
    for event in (*history, None):
        if isinstance(event, _Tokens) and run is not None and run.end == event.position:
            run = _Tokens(run.position, run.tokens + event.tokens)
            continue
        if run is not None:
            batch = one_sequence(run.tokens, run.position, sequence=sequence)
            yield from (_silent(part) for part in batch.split(n_batch))
        run = event if isinstance(event, _Tokens) else None
        if isinstance(event, _Cut):
            yield Remove(sequence, event.first, event.last)
        elif isinstance(event, _Move):
            yield Shift(sequence, event.first, event.last, event.delta)


def _silent(batch: TokenBatch) -> TokenBatch:
    """Want no logits: they were given once."""
    return TokenBatch(batch.tokens, batch.positions, batch.sequences, np.zeros(len(batch), np.bool_))
