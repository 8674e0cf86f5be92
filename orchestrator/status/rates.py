"""Turn a growing total, looked at now and then, into rates. Pure: time is a parameter.

Counters on the hot path only add; whoever looks at them (once a second, or when somebody asks for the status)
notes the total and the time here. Between two looks the total is taken to have grown evenly.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from typing import Final

_KEEP_SECONDS: Final = 180.0


class TotalSeries:
    """The latest observations (time in seconds, total) of one growing total."""

    def __init__(self, keep_seconds: float = _KEEP_SECONDS) -> None:
        self._keep = keep_seconds
        self._samples: deque[tuple[float, float]] = deque()

    def observe(self, now: float, total: float) -> None:
        """Note the total at a time; a total that shrank (a restarted worker) begins the series anew."""
        if self._samples and total < self._samples[-1][1]:
            self._samples.clear()
        if self._samples and now <= self._samples[-1][0]:
            return
        self._samples.append((now, total))
        while len(self._samples) > 2 and self._samples[1][0] < now - self._keep:
            self._samples.popleft()

    def rate(self, now: float, window: float = 2.0) -> float:
        """Return the growth per second over the last ``window`` seconds; 0 where nothing was observed."""
        if window <= 0 or len(self._samples) < 2:
            return 0.0
        begin = max(now - window, self._samples[0][0])
        if now <= begin:
            return 0.0
        return max(0.0, self._total_at(now) - self._total_at(begin)) / (now - begin)

    def history(self, now: float, seconds: int = 60) -> tuple[float, ...]:
        """Return the growth in each of the last ``seconds`` whole seconds, oldest first.

        The seconds begin where the clock's do, not ``now`` minus whole numbers: a second keeps its value from one
        look to the next. The first is the one after the first observation.
        """
        if not self._samples:
            return ()
        end = math.floor(now)
        span = min(seconds, end - math.ceil(self._samples[0][0]))
        totals = [self._total_at(end - back) for back in range(span, -1, -1)]
        return tuple(max(0.0, after - before) for before, after in itertools.pairwise(totals))

    def _total_at(self, moment: float) -> float:
        """Interpolate; before the first and after the last observation the total stands still."""
        samples = self._samples
        if moment >= samples[-1][0]:
            return samples[-1][1]
        # From the newest backwards: the moments asked for are nearly always recent.
        for index in range(len(samples) - 2, -1, -1):
            before, total = samples[index]
            if before <= moment:
                after, later = samples[index + 1]
                return total + (later - total) * (moment - before) / (after - before)
        return samples[0][1]
