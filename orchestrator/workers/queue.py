"""One computation at a time, with a bounded number of requests waiting for their turn."""

from __future__ import annotations

import threading


class ComputeQueue:
    """Serialises the computations of all connections; turns away what is over the limit instead of piling up.

    ``limit`` is the number of requests that may wait while one computes. Each backbone has at most one request
    in flight, so a queue that is full means more backbones than the operator allowed.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._turn = threading.Lock()
        self._counting = threading.Lock()
        self._waiting = 0

    @property
    def waiting(self) -> int:
        """Requests that wait now."""
        return self._waiting

    def enter(self) -> bool:
        """Wait for the turn and take it; return False at once where too many wait already."""
        if self._turn.acquire(blocking=False):
            return True
        with self._counting:
            if self._waiting >= self.limit:
                return False
            self._waiting += 1
        self._turn.acquire()
        with self._counting:
            self._waiting -= 1
        return True

    def leave(self) -> None:
        """Give the turn to the next."""
        self._turn.release()
