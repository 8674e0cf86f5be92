"""What a step costs: a fixed part and a part per row, learned from the steps that were made. PURE."""

from __future__ import annotations

from typing import Final

_MEMORY: Final = 0.97
"""What an observation counts for one observation later: about 30 of them matter."""


class StepCost:
    """Fits ``seconds = fixed + per_row * rows`` to recent steps, by weighted least squares."""

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._rows_rows = self._rows_seconds = 0.0

    def observe(self, rows: int, seconds: float) -> None:
        """Note a step of so many rows."""
        self._weight = _MEMORY * self._weight + 1.0
        self._rows = _MEMORY * self._rows + rows
        self._seconds = _MEMORY * self._seconds + seconds
        self._rows_rows = _MEMORY * self._rows_rows + rows * rows
        self._rows_seconds = _MEMORY * self._rows_seconds + rows * seconds

    @property
    def is_known(self) -> bool:
        """Tell whether steps of different sizes were seen, so that the two parts can be told apart."""
        return self._spread() > 1.0

    @property
    def per_row(self) -> float:
        """Seconds that one more row costs; 0 where it is not known."""
        if not self.is_known:
            return 0.0
        covariance = self._rows_seconds / self._weight - (self._rows / self._weight) * (self._seconds / self._weight)
        return min(max(0.0, covariance / self._spread()), self._seconds / self._rows)

    @property
    def fixed(self) -> float:
        """Seconds that a step costs before its first row."""
        if not self._weight:
            return 0.0
        return max(0.0, (self._seconds - self.per_row * self._rows) / self._weight)

    def seconds(self, rows: int) -> float:
        """Return what a step of so many rows probably costs."""
        return self.fixed + self.per_row * rows

    def _spread(self) -> float:
        if not self._weight:
            return 0.0
        mean = self._rows / self._weight
        return self._rows_rows / self._weight - mean * mean
