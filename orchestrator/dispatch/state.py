"""The star's bookkeeping: which worker is up, who owns what, which answers are still owed. No I/O, no time.

The dispatcher reports events (a worker greeted us, a worker is lost, the layers were described) and asks what
follows (which workers to bring back, which route a call takes, whether an answer is the one awaited). Replicas
and failover belong here: a route is computed from the holdings of the workers that count.

How an answer is judged, by its sequence number against what was sent to that worker::

    the one awaited                      -> taken, nothing is awaited any more
    lower, or answered already           -> late: dropped and counted
    higher than everything ever sent     -> a protocol error: that worker's connection is closed
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Sequence

from orchestrator.dispatch.routing import CallKey, Route, assign_owners
from orchestrator.errors import ProtocolError
from orchestrator.types import LayerDescriptor, Ownership


class Health(enum.Enum):
    """What is known of a worker."""

    NEW = "new"  # never greeted
    UP = "up"
    LOST = "lost"


class Ledger:
    """The answers that one connection owes."""

    def __init__(self) -> None:
        self._awaited: set[int] = set()
        self._highest = 0

    def asked(self, sequence: int) -> None:
        """Note a request that was sent; numbers rise."""
        self._awaited.add(sequence)
        self._highest = max(self._highest, sequence)

    def answered(self, sequence: int) -> bool:
        """Judge an answer: True when it was awaited, False when it is late; raise where nothing asked for it."""
        if sequence in self._awaited:
            self._awaited.remove(sequence)
            return True
        if sequence > self._highest:
            raise ProtocolError(f"an answer to request {sequence}, but the last one was {self._highest}")
        return False

    def passed(self, sequence: int) -> None:
        """Note that native code used the numbers up to this one: answers to them are late, if they come at all."""
        self._highest = max(self._highest, sequence)

    def abandon(self) -> None:
        """Await nothing any more: what still comes is late."""
        self._awaited.clear()


class StarState:
    """What the dispatcher knows of its workers, by their place in its list."""

    def __init__(self, n_workers: int, numbers: Callable[[], int] | None = None) -> None:
        self._numbers = itertools.count(1).__next__ if numbers is None else numbers
        self._health = [Health.NEW] * n_workers
        self._holdings = [Ownership()] * n_workers
        self._descriptors: tuple[LayerDescriptor, ...] = ()
        self._rerouting = False
        self.routes: dict[CallKey, Route] = {}

    @property
    def descriptors(self) -> tuple[LayerDescriptor, ...]:
        """The layers as they were described, empty before."""
        return self._descriptors

    def next_sequence(self) -> int:
        """Give the next request's number; all workers of one call get the same."""
        return self._numbers()

    def health(self, worker: int) -> Health:
        """Tell what is known of a worker."""
        return self._health[worker]

    def holding(self, worker: int) -> Ownership:
        """Tell what a worker owned when it last greeted."""
        return self._holdings[worker]

    def greeted(self, worker: int, ownership: Ownership) -> None:
        """Note that a worker is up and owns this; routes are computed anew if that has changed."""
        self._health[worker] = Health.UP
        if ownership != self._holdings[worker]:
            self._holdings[worker] = ownership
            self._rerouting = True

    def lost(self, worker: int) -> None:
        """Note that a worker's connection is gone. Its experts stay its own: the next step brings it back."""
        if self._health[worker] is Health.UP:
            self._health[worker] = Health.LOST

    def described(self, descriptors: Sequence[LayerDescriptor]) -> None:
        """Take the layers' descriptors."""
        self._descriptors = tuple(descriptors)
        self._rerouting = True

    def absent(self) -> tuple[int, ...]:
        """Give the workers that must be brought back before a step."""
        return tuple([worker for worker, health in enumerate(self._health) if health is not Health.UP])

    def settle(self) -> None:
        """Compute the routes if something changed; raise :class:`OwnershipError` where experts have no owner."""
        if self._rerouting:
            self.routes = assign_owners(self._descriptors, self._holdings)
            self._rerouting = False
