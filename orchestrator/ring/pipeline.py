"""A ring inside one process: hops with queues between them, moved by hand or until all is quiet. PURE.

It is what a gateway uses that holds all layers itself, and the twin of a networked ring in tests: which hop moves
next is the caller's choice, so that every order of events can be had on purpose.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from orchestrator.errors import StageError, StageFailedError
from orchestrator.ring.driver import Driver
from orchestrator.ring.hop import Hop
from orchestrator.ring.items import Item
from orchestrator.ring.layout import LayerRange, tile
from orchestrator.ring.state import RingFacts, RingState
from orchestrator.types import Boundary
from orchestrator.wire.ring_messages import Fault, Operate


class Pipeline(Driver):
    """A ring over hops of this process, in any order; together they must hold every layer once."""

    def __init__(self, hops: Sequence[Hop], facts: RingFacts, boundary: Boundary = Boundary.F32) -> None:
        order = tile([(hop.layers, f"hop {index}") for index, hop in enumerate(hops)], facts.n_layer)
        self.hops = tuple(hops[index] for index in order)
        self._queues: tuple[deque[Item], ...] = tuple(deque() for _ in self.hops)
        self._state = RingState(facts, explain, boundary)

    def advance(self, index: int) -> bool:
        """Let one hop run the next item in front of it; False if there is none."""
        if not self._queues[index]:
            return False
        item = self.hops[index].run(self._queues[index].popleft())
        if index + 1 < len(self.hops):
            self._queues[index + 1].append(item)
        else:
            self._follow(self._state.arrived(item))
        return True

    def waiting(self, index: int) -> int:
        """Return how many items wait in front of a hop."""
        return len(self._queues[index])

    def lose(self, index: int, error: StageError) -> None:
        """Lose a hop: all that is in flight ends with the error."""
        for queue in self._queues:
            queue.clear()
        self._state.lost(error)

    def reset(self) -> None:
        """Begin again after a loss, all sequences empty."""
        for hop in self.hops:
            hop.clear()
        self._state.reset()

    def _launch(self, items: Iterable[Item]) -> None:
        self._queues[0].extend(items)

    def _give_up(self, numbers: tuple[int, ...]) -> None:
        for hop in self.hops:
            hop.cancel(numbers)

    def _progress(self) -> None:
        # From the end, so that what is nearest to coming out does.
        for index in reversed(range(len(self.hops))):
            if self.advance(index):
                return


def explain(item: Fault | Operate) -> StageFailedError:
    """Make the error of an item that came to nothing, where a stage has no other name than its layers."""
    if isinstance(item, Fault):
        return StageFailedError(item.text, stage=str(LayerRange(item.first, item.last)))
    where, _, text = item.text.partition(": ")
    return StageFailedError(text or "did not do it", stage=where)
