"""Who is next: a queue that is fair among clients, with limits. PURE.

Start-time fair queueing: a client's requests are served in order, and of the clients the one whose next request
begins at the lowest virtual time. A client's virtual time advances by the work that it was granted (tokens), and one
that was away begins at the present: nobody saves up turns, and nobody's long prompts take the turns of others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

from orchestrator.errors import BusyError

Waiting = TypeVar("Waiting")


class FairQueue(Generic[Waiting]):
    """Requests by client; at most ``limit`` of all together and ``client_limit`` of one client."""

    def __init__(self, limit: int, client_limit: int) -> None:
        self.limit = limit
        self.client_limit = client_limit
        self._lines: dict[str, deque[tuple[Waiting, float]]] = {}  # with the work that each asks for
        self._starts: dict[str, float] = {}  # virtual time at which a client's next request begins
        self._now = 0.0

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[Waiting]:
        for line in self._lines.values():
            for item, _ in line:
                yield item

    def push(self, item: Waiting, client: str, work: float, retry_after: float) -> None:
        """Put a request at the end of its client's line; raise :class:`BusyError` where there is no room.

        ``work`` is what it will probably take, in any unit; ``retry_after`` seconds is what a refused client is told.
        """
        line = self._lines.get(client)
        if len(self) >= self.limit:
            raise BusyError(f"{self.limit} requests are waiting already", retry_after=retry_after)
        if line is not None and len(line) >= self.client_limit:
            raise BusyError(f"{len(line)} requests of this client are waiting already", retry_after=retry_after)
        if line is None:
            line = self._lines[client] = deque()
            self._starts[client] = max(self._starts.get(client, 0.0), self._now)
        line.append((item, work))

    def pop(self) -> Waiting | None:
        """Take the next request; None where nobody waits."""
        if not self._lines:
            return None
        client = min(self._lines, key=lambda name: self._starts[name])
        line = self._lines[client]
        item, work = line.popleft()
        self._now = self._starts[client]
        self._starts[client] += work
        if not line:
            del self._lines[client]
            # Whoever is behind the present when he comes back begins at the present: no need to remember him.
            self._starts = {
                name: start for name, start in self._starts.items() if name in self._lines or start > self._now
            }
        return item

    def remove(self, item: Waiting) -> bool:
        """Take a request out of the queue; False where it does not wait."""
        for client, line in self._lines.items():
            for entry in line:
                if entry[0] is item:
                    line.remove(entry)
                    if not line:
                        del self._lines[client]
                    return True
        return False
