"""Which positions the caches hold, sequence by sequence, under steps and operations. PURE.

The stages hold the same positions of every sequence, so the gateway can follow them without asking. The engine
takes a step only where it goes on behind the highest position, which :meth:`Positions.append` checks beforehand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from orchestrator.errors import InputError
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

_Spans: TypeAlias = tuple[tuple[int, int], ...]
"""Positions as runs [first, last), ascending, none empty and none touching the next."""

_END = 1 << 62


class Positions:
    """The positions of ``n_sequences`` sequences of up to ``n_ctx`` tokens, and of the saved ones."""

    def __init__(self, n_sequences: int, n_ctx: int) -> None:
        self.n_sequences = n_sequences
        self.n_ctx = n_ctx
        self._held: list[_Spans] = [()] * n_sequences
        self._saved: dict[int, _Spans] = {}

    def length(self, sequence: int) -> int:
        """Return a sequence's highest position plus one."""
        held = self._held[sequence]
        return held[-1][1] if held else 0

    def has_gaps(self, sequence: int) -> bool:
        """Tell whether positions below the highest one are missing."""
        return self._held[sequence] not in ((), ((0, self.length(sequence)),))

    def clear(self) -> None:
        """Empty all sequences and forget the saved ones."""
        self._held = [()] * self.n_sequences
        self._saved.clear()

    def append(self, batch: TokenBatch) -> Mapping[int, int]:
        """Add a batch's tokens; return the lengths of its sequences before.

        Raises:
            InputError: a sequence that does not exist, positions that do not go on from its end one by one, or
                more than the context has room for. Nothing was changed.
        """
        ends: dict[int, int] = {}
        before: dict[int, int] = {}
        for sequence, position in zip(batch.sequences.tolist(), batch.positions.tolist(), strict=True):
            if sequence not in ends:
                self._check(sequence)
                before[sequence] = ends[sequence] = self.length(sequence)
            if position != ends[sequence]:
                raise InputError(f"sequence {sequence} goes on at position {ends[sequence]}, not at {position}")
            ends[sequence] += 1
        for sequence, end in ends.items():
            if end > self.n_ctx:
                raise InputError(f"sequence {sequence}: {end} tokens do not fit into the context of {self.n_ctx}")
        for sequence, end in ends.items():
            held, start = self._held[sequence], before[sequence]
            self._held[sequence] = (*held[:-1], (held[-1][0], end)) if held else ((start, end),)
        return before

    def apply(self, operation: RingOperation) -> None:
        """Follow an operation.

        Raises:
            InputError: it names what does not exist, or would move positions onto others. Nothing was changed.
        """
        held = self._held
        match operation:
            case Remove(sequence, first, last):
                self._check(sequence)
                held[sequence] = _without(held[sequence], first, last)
            case Copy(source, destination, first, last):
                self._check(source)
                self._check(destination)
                held[destination] = _within(held[source], first, last)
            case Keep(sequence):
                self._check(sequence)
                self._held = [spans if i == sequence else () for i, spans in enumerate(held)]
            case Shift(sequence, first, last, delta):
                self._check(sequence)
                held[sequence] = _shifted(held[sequence], first, last, delta, sequence)
            case Clear():
                self._held = [()] * self.n_sequences
            case Save(sequence, key):
                self._check(sequence)
                self._saved[key] = held[sequence]
            case Recall(sequence, key):
                self._check(sequence)
                if key not in self._saved:
                    raise InputError(f"nothing is saved under {key}")
                held[sequence] = self._saved[key]
            case Forget(key):
                self._saved.pop(key, None)

    def _check(self, sequence: int) -> None:
        if not 0 <= sequence < self.n_sequences:
            raise InputError(f"sequence {sequence}: there are {self.n_sequences}")


def _within(spans: _Spans, first: int, last: int) -> _Spans:
    end = _END if last < 0 else last
    return tuple((max(a, first), min(b, end)) for a, b in spans if max(a, first) < min(b, end))


def _without(spans: _Spans, first: int, last: int) -> _Spans:
    return _joined(_within(spans, 0, max(first, 0)) + (() if last < 0 else _within(spans, max(first, last), -1)))


def _shifted(spans: _Spans, first: int, last: int, delta: int, sequence: int) -> _Spans:
    moved = tuple((a + delta, b + delta) for a, b in _within(spans, first, last))
    if moved and moved[0][0] < 0:
        raise InputError(f"sequence {sequence}: positions cannot be moved below 0")
    kept = _without(spans, first, last)
    if any(_within(kept, a, b) for a, b in moved):
        raise InputError(f"sequence {sequence}: positions cannot be moved onto others")
    return _joined(kept + moved)


def _joined(spans: _Spans) -> _Spans:
    joined: list[tuple[int, int]] = []
    for a, b in sorted(spans):
        if joined and a == joined[-1][1]:
            joined[-1] = (joined[-1][0], b)
        else:
            joined.append((a, b))
    return tuple(joined)
