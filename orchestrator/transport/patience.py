"""When to look for bytes without sleep: what the waits before say about the next one.

A thread that the kernel has put to sleep wakes late: 50 us per round trip in a virtual machine, where sending and
receiving take 30 us. So a brief wait looks for bytes without pause. A longer one, as between two stages of a ring
that compute in turn, sleeps until it is due, by the length of the wait before, and looks from then on. Looking
offers the core to others at each look; where one takes it, the next waits sleep, twice as many each time in a row.

What runs behind a computation runs on cold caches, for six times as long. So there is time in a wait for a rehearsal
of what will follow it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final

BRIEF: Final = 0.005
"""Most seconds of one wait that pass without sleep."""

_NEAR: Final = 0.03
"""Seconds: of a longer wait a late wake is less than 0.2 percent, and its length says little about the next one's."""

LONGEST: Final = _NEAR + BRIEF
"""Most seconds that :meth:`Patience.look` takes."""

_EARLY: Final = 0.002  # seconds: so much before it is due a wait goes over from sleeping to looking
_REHEARSAL: Final = 0.001  # seconds that must be left for one
_TAKEN: Final = 100e-6  # seconds for one look: longer, and somebody else has used the core meanwhile
_MOST_SLEEPS: Final = 64


class Patience:
    """How one thread waits for one thing, again and again. ``now`` is a clock in seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._expected = 0.0  # seconds of the wait before
        self._sleeps = 0  # waits that sleep before the next that looks
        self._penalty = 0  # what that was set to when another thread took the core, 0 after an undisturbed look

    def look(self, poll: Callable[[float], object], meanwhile: Callable[[], object] | None = None) -> None:
        """Spend the part of a wait that has no sleep at its end.

        ``poll`` waits for so many milliseconds and returns what is there. ``meanwhile`` is called before the bytes
        are due, in waits of which at least a millisecond is left. Returns where something is there, and where the
        caller should sleep until it is.
        """
        if self._sleeps:
            self._sleeps -= 1
            return
        if self._expected > _NEAR:
            return
        if self._expected > BRIEF and poll(int(1e3 * (self._expected - _EARLY))):
            return
        if meanwhile is not None and self._expected > _REHEARSAL:
            meanwhile()
        now = self._now()
        end = now + BRIEF
        while not poll(0):
            os.sched_yield()
            before, now = now, self._now()
            if now - before > _TAKEN:
                self._penalty = min(max(2 * self._penalty, 1), _MOST_SLEEPS)
                self._sleeps = self._penalty
                return
            if now > end:
                return
        self._penalty = 0

    def waited(self, seconds: float) -> None:
        """Learn how long a wait took."""
        self._expected = seconds
