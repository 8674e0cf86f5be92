"""What a stage worker does with what comes: items for its ranges, and a gateway's orders. Sockets are the server's.

A :class:`StageService` is one process with one or several ranges of layers, or none yet. At most one ring uses it
at a time, because the caches are that ring's: whoever attaches for control owns them until its connection ends. Each
range is fed by one connection, whose thread computes and sends on, so that an item changes threads nowhere; the
control connection has a thread of its own and answers while a range computes.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from orchestrator.errors import FleetError, InputError, LinkcppError, PlanError, ProtocolError
from orchestrator.models.gguf_writer import Progress
from orchestrator.ring.hop import Hop
from orchestrator.ring.items import Item
from orchestrator.ring.layout import LayerRange
from orchestrator.ring.link import StageLink
from orchestrator.ring.profile import StageProfile
from orchestrator.transport.base import Connector
from orchestrator.types import RefusalCode
from orchestrator.wire.messages import SUPPORTED, Hello, Message, Ping, Pong, Refuse
from orchestrator.wire.ring_codec import FramedItem, FramedStep
from orchestrator.wire.ring_messages import (
    Accepted,
    Assign,
    Assigning,
    Attach,
    Cancel,
    Fault,
    FaultKind,
    Probe,
    Probed,
    Purpose,
    Route,
    StageWelcome,
)

CONNECT_SECONDS: Final = 10.0
"""How long a stage tries to reach the next one before it tells the gateway that it cannot."""

HANDOVER_SECONDS: Final = 5.0
"""How long a new ring waits for the last step of the one before, whose connection has ended."""

_SIGN_SECONDS: Final = 1.0
"""How often a stage says that it is still loading."""


class Peer(Protocol):
    """A connection to this process, as the service uses it."""

    @property
    def address(self) -> str:
        """Who is there."""

    @property
    def minor(self) -> int:
        """The version of the protocol that was agreed."""

    def send(self, message: Message | FramedItem) -> None:
        """Send, from any thread; raise a :class:`FleetError` where the connection is gone."""

    def close(self) -> None:
        """Close and wake whoever waits on it."""


class Layers(Protocol):
    """The layers in this process's memory (:class:`orchestrator.workers.layers.StageLayers`, or a twin in tests)."""

    @property
    def hops(self) -> tuple[Hop, ...]:
        """The ranges, ascending."""

    @property
    def profile(self) -> StageProfile:
        """What this process says of itself."""

    def require_room(self, ranges: Sequence[LayerRange]) -> None:
        """Raise :class:`PlanError` in words where there is not the memory to hold exactly these."""

    def hold(self, ranges: Sequence[LayerRange], progress: Progress) -> None:
        """Hold exactly these: free what is not named, load what is new."""


class _Range:
    """One range of layers, who feeds it and where its items go."""

    def __init__(self, hop: Hop) -> None:
        self.hop = hop
        self.layers: LayerRange = hop.layers
        self.feed: Peer | None = None
        self.next: StageLink | None = None  # None: back to the gateway
        self.routed = False

    def unroute(self) -> None:
        """Close the way to the next stage."""
        link, self.next, self.routed = self.next, None, False
        if link is not None:
            link.close("the ring is closed")


class _Ring:
    """The ring that uses this process."""

    def __init__(self, name: str, control: Peer) -> None:
        self.name = name
        self.control = control
        self.ended = False  # nothing may touch the caches for it any more


class StageService:
    """One stage worker process, shared by all its connections. ``connector`` makes the way to an address."""

    def __init__(self, layers: Layers, connector: Callable[[str], Connector]) -> None:
        self.draining = False
        self._layers = layers
        self._ranges: dict[int, _Range] = {}
        self._adopt()
        self._connector = connector
        self._ring: _Ring | None = None
        self._guard = threading.Condition()
        self._computing = threading.Lock()  # ranges of one process share its cores: one computes at a time

    def _adopt(self) -> None:
        """Take over what is in memory now."""
        self.profile = self._layers.profile
        self._ranges = {hop.layers.first: _Range(hop) for hop in self._layers.hops}

    def welcome(self, version: int, sequence: int = 0) -> StageWelcome:
        """Return the greeting for a peer with which this minor version was agreed."""
        profile, facts = self.profile, self.profile.facts
        return StageWelcome(
            version=version,
            name=profile.name,
            pid=profile.pid,
            identity=profile.identity,
            model_sha256=profile.model_sha256,
            architecture=profile.architecture,
            n_threads=profile.n_threads,
            n_layer=facts.n_layer,
            n_vocab=facts.n_vocab,
            n_ctx=facts.n_ctx,
            n_sequences=facts.n_sequences,
            n_ubatch=profile.n_ubatch,
            n_batch=facts.n_batch,
            batch_invariant=profile.batch_invariant,
            cuttable=facts.cuttable,
            shiftable=facts.shiftable,
            ranges=tuple((found.first, found.last) for found in profile.ranges),
            sequence=sequence,
        )

    # --- who uses it -----------------------------------------------------------------------------------------

    def attach(self, peer: Peer, message: Attach) -> Accepted | Refuse:
        """Let a connection open a ring, or feed a range of the one that is open."""
        if self.draining:
            return Refuse(message.sequence, RefusalCode.DRAINING, "this stage is shutting down")
        if message.purpose is Purpose.CONTROL:
            return self._open(peer, message)
        with self._guard:
            found = self._ranges.get(message.layer)
            if self._ring is None or self._ring.name != message.ring:
                return Refuse(message.sequence, RefusalCode.BAD_REQUEST, "this stage is not part of that ring")
            if found is None:
                text = f"no range of this stage begins at layer {message.layer}"
                return Refuse(message.sequence, RefusalCode.NOT_OWNED, text)
            if found.feed is not None:
                text = f"{found.layers} are fed by {found.feed.address} already"
                return Refuse(message.sequence, RefusalCode.BAD_REQUEST, text)
            found.feed = peer
        return Accepted(message.sequence)

    def _open(self, peer: Peer, message: Attach) -> Accepted | Refuse:
        deadline = time.monotonic() + HANDOVER_SECONDS
        with self._guard:
            while self._ring is not None:
                if not self._guard.wait(max(0.0, deadline - time.monotonic())):
                    text = f"this stage serves the ring of {self._ring.control.address}"
                    return Refuse(message.sequence, RefusalCode.OVERLOADED, text)
            self._ring = _Ring(message.ring, peer)
        return Accepted(message.sequence)

    def detach(self, peer: Peer) -> None:
        """Note that a connection ended. With a ring's control connection the ring ends, and all that it kept."""
        with self._guard:
            for found in self._ranges.values():
                if found.feed is peer:
                    found.feed = None
            ring = self._ring
            if ring is None or ring.control is not peer:
                return
            ring.ended = True
            feeds = [found.feed for found in self._ranges.values() if found.feed is not None]
            for found in self._ranges.values():
                found.feed = None
        # Outside the lock: threads that compute or wait for room in a socket need it to end.
        for feed in feeds:
            feed.close()
        for found in self._ranges.values():
            found.unroute()
        with self._computing:
            for found in self._ranges.values():
                found.hop.clear()
        with self._guard:
            self._ring = None
            self._guard.notify_all()

    # --- what it does ----------------------------------------------------------------------------------------

    def order(self, message: Message | FramedStep) -> Message | None:
        """Do what a gateway orders on its control connection and return the answer, if there is one."""
        if isinstance(message, Cancel):
            for found in self._ranges.values():
                found.hop.cancel(message.steps)
            return None
        if isinstance(message, Ping):
            return Pong(message.sequence, message.nonce)
        if isinstance(message, Pong):
            return None
        if isinstance(message, Probe):
            states = ((first, found.hop.taken, found.hop.passed) for first, found in sorted(self._ranges.items()))
            return Probed(message.sequence, tuple(states))
        if isinstance(message, Route):
            return self._route(message)
        if isinstance(message, Assign):
            return self._assign(message)
        return Refuse(message.sequence, RefusalCode.BAD_REQUEST, f"a stage does not answer {message.type.name}")

    def _route(self, message: Route) -> Accepted | Refuse:
        found, ring = self._ranges.get(message.layer), self._ring
        if found is None or ring is None:
            text = f"no range of this stage begins at layer {message.layer}"
            return Refuse(message.sequence, RefusalCode.NOT_OWNED, text)
        found.unroute()
        if message.address:
            deadline = time.monotonic() + CONNECT_SECONDS
            try:
                link = StageLink(self._connector(message.address))
                link.open(
                    Hello(SUPPORTED, self.profile.identity, client=self.profile.name), CONNECT_SECONDS, deadline
                )
                link.request(Attach(1, Purpose.FEED, found.layers.last, ring.name), deadline)
            except LinkcppError as error:
                text = f"it cannot reach the next stage, {message.address}: {error}"
                return Refuse(message.sequence, RefusalCode.BAD_REQUEST, text)
            found.next = link
        found.routed = True
        return Accepted(message.sequence)

    def _assign(self, message: Assign) -> Accepted | Refuse:
        ring = self._ring
        if ring is None or any(found.routed for found in self._ranges.values()):
            return Refuse(message.sequence, RefusalCode.BAD_REQUEST, "layers move before anything is routed")
        wanted = [LayerRange(*found) for found in message.ranges]
        said = time.monotonic()

        def progress(done: float, total: float | None, note: str = "") -> None:
            nonlocal said
            if time.monotonic() - said > _SIGN_SECONDS:
                said = time.monotonic()
                with contextlib.suppress(FleetError):  # the engine calls this; the next read finds the loss
                    ring.control.send(Assigning(message.sequence, int(1000 * min(done / total, 1)) if total else 0))

        with self._computing:
            try:
                self._layers.require_room(wanted)
                self._layers.hold(wanted, progress)
            except PlanError as error:
                return Refuse(message.sequence, RefusalCode.NO_ROOM, str(error))
            except (LinkcppError, MemoryError) as error:
                return Refuse(message.sequence, RefusalCode.COMPUTE_FAILED, str(error) or "out of memory")
            finally:
                self._adopt()
        return Accepted(message.sequence)

    def rehearse(self, layer: int, step: FramedStep) -> None:
        """Go through what a step begins with, where nothing computes."""
        if self._computing.acquire(blocking=False):
            try:
                found = self._ranges.get(layer)
                if found is not None:
                    found.hop.rehearse(step)
            finally:
                self._computing.release()

    def pass_on(self, peer: Peer, layer: int, item: Item | FramedStep) -> None:
        """Run an item of a feed and send on what it became.

        Raises:
            ProtocolError: the item is not for this range, or not the next one.
            FleetError: the gateway is gone too.
        """
        found, ring = self._ranges.get(layer), self._ring
        if ring is None or found is None or found.feed is not peer or not found.routed:
            raise ProtocolError("this ring is closed")
        if item.layer != layer:
            raise ProtocolError(f"an item for layer {item.layer} came to {found.layers}")
        with self._computing:
            if ring.ended:
                raise ProtocolError("this ring is closed")
            passed: Item | FramedItem
            try:
                if isinstance(item, FramedStep):
                    passed = found.hop.run_frame(item, (found.next or ring.control).minor)
                else:
                    passed = found.hop.run(item)
            except InputError as error:
                raise ProtocolError(str(error)) from error
        if found.next is None:
            ring.control.send(passed)
            return
        try:
            found.next.send(passed)
        except FleetError as error:
            behind = found.layers.last
            ring.control.send(
                Fault(
                    item.sequence, behind, FaultKind.UNREACHABLE, behind, behind + 1, f"from {found.layers}: {error}"
                )
            )

    def drain(self, timeout: float) -> bool:
        """Take nothing new and wait for what computes; False where it still does."""
        self.draining = True
        done = self._computing.acquire(timeout=max(0.0, timeout))
        if done:
            self._computing.release()
        return done


def report_defect(error: Exception) -> None:
    """Write an error that is nobody's but ours to standard error, with its traceback."""
    sys.stderr.write("".join(traceback.format_exception(error)))
