"""Say how far a long run is and how long it will still take.

The unit is a row, plus a constant per micro-batch: a single step reads all weights that it uses just like a full
micro-batch does, so counting rows alone would make the single steps look four times as fast as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from orchestrator.onboarding.trace import Advance

_ROWS_PER_MICRO_BATCH = 3  # measured on a 135M model: a single step costs about as much as four rows of a prefill
_ESTIMATE_AFTER = 5.0  # seconds; before that an estimate is noise


class Progress(Protocol):
    """Where progress is shown; ``total`` is None until it is known."""

    def __call__(self, done: float, total: float | None, note: str = "") -> None:
        """Show this state."""


class Meter:
    """Counts work of several phases against one total."""

    def __init__(self, show: Progress | None, now: Callable[[], float]) -> None:
        self._show = show
        self._now = now
        self._started = now()
        self._work_started = self._started
        self._done = 0.0
        self._total: float | None = None

    @property
    def seconds(self) -> float:
        """Time since the meter was made."""
        return self._now() - self._started

    def expect(self, total: float) -> None:
        """State the whole work, once it is known; the estimate counts from here."""
        self._total = total
        self._work_started = self._now()

    def say(self, note: str) -> None:
        """Show what is being done now, without progress."""
        if self._show is not None:
            self._show(self._done, self._total, note)

    def phase(self, note: str, micro_batch: int) -> Advance:
        """Begin a phase; returns the callback that counts its rows."""
        self.say(note)

        def advance(rows: int) -> None:
            self._done += work([rows], micro_batch)
            remaining = self._remaining()
            self.say(note if remaining is None else f"{note}, about {duration(remaining)} left")

        return advance

    def _remaining(self) -> float | None:
        elapsed = self._now() - self._work_started
        if self._total is None or self._done <= 0 or elapsed < _ESTIMATE_AFTER:
            return None
        return elapsed * max(self._total - self._done, 0.0) / self._done


def work(calls: Sequence[int], micro_batch: int) -> float:
    """Count the work of decode calls of so many rows each."""
    return float(sum(rows + _ROWS_PER_MICRO_BATCH * -(-rows // micro_batch) for rows in calls))


def duration(seconds: float) -> str:
    """Write a duration for people: ``40 s``, ``3 min``, ``2 h 5 min``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
