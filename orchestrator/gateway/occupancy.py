"""How many steps a ring needs under way so that its busiest stage always has one. PURE.

A step alone needs a turn: the way around the ring and each stage's computation. Meanwhile the busiest stage could do
``turn / its own computation`` steps. With fewer of them under way it waits, and with more they wait for it, where
answers could as well share a step and its weights. The way is what the quickest turn took beside its computation
(as BBR estimates a path, Cardwell et al. 2016): whatever else a turn took was waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_MEMORY: Final = 0.9
"""What a step's computation counts for one step later: about ten of them matter."""

MOST: Final = 64


class Occupancy:
    """Learns from steps that ended; :attr:`steps` is at least ``least``, one for each stage."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._way: float | None = None
        self._computed: list[float] = []  # seconds per stage, a mean over the last steps

    def observe(self, turn: float, computed: Sequence[float]) -> None:
        """Note a step that took ``turn`` seconds from submission to its end, of them ``computed`` in each stage."""
        way = max(0.0, turn - sum(computed))
        self._way = way if self._way is None else min(self._way, way)
        if len(self._computed) != len(computed):
            self._computed = list(computed)
        else:
            self._computed = [
                _MEMORY * mean + (1 - _MEMORY) * new for mean, new in zip(self._computed, computed, strict=True)
            ]

    def forget(self) -> None:
        """Forget the way: the ring has other stages now."""
        self._way = None

    @property
    def steps(self) -> int:
        """How many steps should be under way."""
        busiest = max(self._computed, default=0.0)
        if self._way is None or not busiest:
            return self._least
        return max(self._least, min(MOST, round((self._way + sum(self._computed)) / busiest)))
