"""Makes a broken ring whole again: who computes which layers from now on, and who has to load some for that.

The ranges into which the model is cut stay as they were when the ring was opened. Each goes to a live process that
holds it: the one that had it, started again, a spare with the same layers, or a stage that took it over once.
A range that nobody holds any more is loaded: by a process in reserve that holds nothing, or else by the live stage
with the fewest layers that has room for it, which each decides for itself.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from orchestrator.errors import LinkcppError, StageError, StageLostError, StageRefusedError
from orchestrator.ring.layout import LayerRange

logger = logging.getLogger(__name__)

PATIENCE_SECONDS: Final = 60.0
"""How long requests wait for a lost stage, or one in its place, before they fail. Loading does not count."""

_PAUSE_SECONDS: Final = 0.2


class MovableRing(Protocol):
    """The part of :class:`orchestrator.ring.client.Ring` that a standby uses."""

    @property
    def holders(self) -> Mapping[str, Sequence[LayerRange]]:
        """The addresses of the stages and the ranges that each computes."""

    @property
    def broken(self) -> LinkcppError | None:
        """Why no more steps are taken, None while they are."""

    @property
    def lost_address(self) -> str | None:
        """The address of the stage that broke the ring, or that kept it from being opened again."""

    def look(self, address: str) -> Sequence[LayerRange] | None:
        """Ask a process which ranges it holds; None where it does not answer or does not fit."""

    def assign(self, address: str, ranges: Sequence[LayerRange]) -> None:
        """Have a process hold exactly these ranges; raise :class:`StageRefusedError` where it cannot."""

    def rearrange(self, holders: Mapping[str, Sequence[LayerRange]]) -> object:
        """Let these processes compute these of their ranges, and begin with empty sequences."""


class Standby:
    """Makes a ring whole again; ``others`` are the addresses of processes beside the ring that may stand in.

    ``patience`` in seconds is how long :meth:`reopen` waits for somebody.
    """

    def __init__(
        self,
        ring: MovableRing,
        others: Sequence[str] = (),
        *,
        patience: float = PATIENCE_SECONDS,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._ring = ring
        self._home = self._holders()  # where each range was in the beginning
        self._needed = sorted(self._home)
        self._known = [*ring.holders, *others]
        self._patience = patience
        self._deadline = 0.0
        self._now = now
        self._sleep = sleep
        self.recoveries = 0

    def reopen(self) -> None:
        """Let live processes compute what is lost, with empty sequences; waits for a stage that is started again.

        Raises:
            LinkcppError: what stood in the way last, once the patience is over.
        """
        begin = self._now()
        self._deadline = begin + self._patience
        if self._ring.broken is not None:
            logger.warning("%s", self._ring.broken)
        suspect = self._ring.lost_address
        before = self._holders()
        failed: set[str] = set()
        while True:
            try:
                self._ring.rearrange(self._arrange(suspect, failed))
            except StageError as error:
                if self._now() > self._deadline:
                    raise
                logger.info("not yet: %s", error)
                if self._ring.lost_address is not None:
                    failed.add(self._ring.lost_address)
                self._sleep(_PAUSE_SECONDS)
                continue
            self.recoveries += 1
            moved = "".join(
                f", {found} at {address}" for found, address in self._holders().items() if address != before[found]
            )
            logger.warning("the ring is whole again after %.1f s%s", self._now() - begin, moved)
            return

    def _holders(self) -> dict[LayerRange, str]:
        return {found: address for address, ranges in self._ring.holders.items() for found in ranges}

    def _arrange(self, suspect: str | None, failed: set[str]) -> Mapping[str, Sequence[LayerRange]]:
        """Choose who computes each range, and have those loaded that nobody holds.

        The ``suspect`` broke the ring: a process that hangs still takes connections. Those that ``failed`` since are
        used where nobody else is left.
        """
        alive = {address: held for address in self._known if (held := self._ring.look(address)) is not None}
        now = self._holders()
        chosen: dict[str, list[LayerRange]] = {}
        missing: list[tuple[LayerRange, str | None]] = []
        for needed in self._needed:

            def rank(address: str, needed: LayerRange = needed) -> tuple[bool, bool, int, bool]:
                held = alive[address]
                return address in failed, address == suspect, len(held), now[needed] != address

            best = min((address for address in alive if needed in alive[address]), key=rank, default=None)
            if best is None or best in failed:
                missing.append((needed, best))
            else:
                chosen.setdefault(best, []).append(needed)
        for needed, last_resort in missing:
            refusals: list[str] = []
            taker = self._load(needed, alive, chosen, suspect, failed, refusals) or last_resort
            if taker is None:
                raise self._nobody(needed, refusals)
            chosen.setdefault(taker, []).append(needed)
        return chosen

    def _load(
        self,
        needed: LayerRange,
        alive: dict[str, Sequence[LayerRange]],
        chosen: Mapping[str, Sequence[LayerRange]],
        suspect: str | None,
        failed: set[str],
        refusals: list[str],
    ) -> str | None:
        """Have a range loaded by whoever has room, the one with the fewest layers first; None where nobody has."""

        def rank(address: str) -> tuple[bool, int]:
            return address == suspect, sum(map(len, alive[address]))

        for address in sorted((address for address in alive if address not in failed), key=rank):
            # What it holds and is not used for makes room where it must.
            for kept in dict.fromkeys((tuple(alive[address]), tuple(chosen.get(address, ())))):
                wanted = sorted({*kept, needed})
                try:
                    self._ring.assign(address, wanted)
                except StageRefusedError as error:
                    refusals.append(str(error))
                    continue
                except StageError:
                    failed.add(address)
                    raise
                alive[address] = wanted
                self._deadline = self._now() + self._patience
                return address
        return None

    def _nobody(self, needed: LayerRange, refusals: Sequence[str]) -> StageLostError:
        who = "; ".join(dict.fromkeys(refusals)) or "no process is left that could"
        return StageLostError(
            f"lost, and nobody can take them over: {who}",
            stage=str(needed),
            hint=f"start it again: linkcpp stage MODEL --layers {needed.first}:{needed.last} --listen "
            f"{self._home[needed]}",
        )
