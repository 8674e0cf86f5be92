"""A ring over connections: the gateway's end, with the ranges that the gateway holds itself in their places.

One thread does everything: it computes the gateway's own ranges, writes to the first remote stage of each run of
them and reads what the last one sends back. While it waits for room in a socket it goes on reading, because the
stage that it writes to may be waiting for room in the one behind. No stage is asked anything on the way of a step.

A stage is lost when its connection ends, when another cannot reach it, or when nothing has come round for the
timeout and a probe finds it to be the one that does not go on. Its caches are lost with it, so the ring is broken
as a whole: :meth:`Ring.rearrange` lets other processes compute its layers and begins with empty sequences, which the
client fills again (``replay.py``).
"""

from __future__ import annotations

import os
import select
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Final

from orchestrator.errors import (
    FleetError,
    InputError,
    LinkcppError,
    ProtocolError,
    StageError,
    StageFailedError,
    StageLostError,
    StageTimeoutError,
)
from orchestrator.ring.driver import Driver
from orchestrator.ring.items import Item, detached
from orchestrator.ring.layout import LayerRange
from orchestrator.ring.link import StageLink
from orchestrator.ring.opening import Opener, Place, RingHop
from orchestrator.ring.profile import LocalStage
from orchestrator.ring.state import RingFacts, RingState
from orchestrator.transport.base import Connector
from orchestrator.transport.patience import LONGEST, Patience
from orchestrator.transport.unix import connector_of
from orchestrator.types import Boundary, EngineIdentity
from orchestrator.wire.messages import Goodbye, Message, Ping, Pong
from orchestrator.wire.ring_codec import FramedItem, FramedStep
from orchestrator.wire.ring_messages import (
    Cancel,
    Fault,
    FaultKind,
    Operate,
    Outcome,
    Probe,
    Probed,
)

_TRAVELLERS: Final = (FramedStep, Outcome, Operate)

_PROBE_SECONDS: Final = 5.0
"""Longest wait for the answers to a probe; less where the timeout is less."""


@dataclass(frozen=True, slots=True)
class StageStatistics:
    """One range of layers of a ring, for people and for the planner."""

    layers: LayerRange
    name: str
    address: str  # empty: in the gateway
    pid: int
    connected: bool
    steps: int
    microseconds: int  # of computation, over all steps


class Ring(Driver):
    """A ring over stage workers ("host:port" or "unix:/path" each) and over ``local`` ranges of this process.

    ``identity`` is this process's engine and ``model_sha256`` the model's identity where it is known; stages that
    have others are refused. ``timeout`` is in seconds: how long nothing may come round while something is in flight.
    ``boundary`` is how stages hand on what crosses their cuts. A context manager, used by one thread.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        local: Sequence[LocalStage] = (),
        identity: EngineIdentity,
        model_sha256: str | None = None,
        timeout: float = 60.0,
        connect_timeout: float = 10.0,
        client: str = "gateway",
        connector: Callable[[str], Connector] = connector_of,
        saved_limit: int = 1 << 30,
        boundary: Boundary = Boundary.F32,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        if not addresses and not local:
            raise InputError("a ring needs at least one stage")
        self._holders: dict[str, Sequence[LayerRange] | None] = dict.fromkeys(addresses)
        self._opener = Opener(
            local,
            identity,
            model_sha256,
            client=client,
            connect_timeout=connect_timeout,
            connector=connector,
            saved_limit=saved_limit,
            boundary=boundary,
            now=now,
        )
        self._timeout = timeout
        self._boundary = boundary
        self._now = now
        self._used: Mapping[str, tuple[LayerRange, ...]] = {}
        self._index_of: dict[int, int] = {}  # where in the ring the range that begins at a layer is
        self._inbox: deque[Item | FramedStep] = deque()
        self._last_progress = 0.0
        self._patience = Patience()
        self._probes = 0
        self._was_open = False
        self.lost_stage: str | None = None  # what broke the ring, for people
        self._lost_address: str | None = None

    @property
    def _places(self) -> list[Place]:
        return self._opener.places

    @property
    def _hops(self) -> list[RingHop]:
        return self._opener.hops

    # --- opening and closing ---------------------------------------------------------------------------------

    def open(self) -> RingFacts:
        """Connect to all stages, check that they fit and tile the model, and tell each where its items go.

        Raises:
            InputError: layers that nobody holds, or two stages.
            StageLostError: a stage cannot be reached.
            StageRefusedError: it serves another ring, differs from the others, or cannot reach the next one.
        """
        opener = self._opener
        opener.close("the ring is opened anew")
        try:
            facts = opener.open(self._holders)
            if self._was_open and self._state.facts != facts:
                raise InputError("the stages have other sizes than before", hint="start a new ring")
        except BaseException as error:
            opener.close("the ring could not be opened")
            if isinstance(error, StageError) and opener.trying is not None:
                self.lost_stage, self._lost_address = error.stage, opener.trying
            raise
        if not self._was_open:
            self._state, self._was_open = RingState(facts, self._explain, self._boundary), True
        self._index_of = {hop.layers.first: index for index, hop in enumerate(self._hops)}
        self._index_of[facts.n_layer] = len(self._hops)
        self._state.reset()
        self._inbox.clear()
        self.lost_stage = self._lost_address = None
        self._last_progress = self._now()
        self._used = {
            place.address: tuple(hop.layers for hop in self._hops if hop.place is place) for place in self._places
        }
        return facts

    def rearrange(self, holders: Mapping[str, Sequence[LayerRange] | None]) -> RingFacts:
        """Let these stages compute these of their ranges (None: all), and begin with empty sequences.

        What is in flight is lost. Completions that were not collected stay to be collected. On an error the ring
        stays broken with the stages that it had, :attr:`lost_address` is the one at fault, and this may be called
        again.
        """
        if self._places and self._state.broken is None and self._state.oldest is not None:
            self._break(StageLostError("is replaced", stage="of a ring that is rearranged"), None)
        before, self._holders = self._holders, dict(holders)
        try:
            return self.open()
        except LinkcppError as error:
            self._holders = before
            self._state.lost(error)
            raise

    def look(self, address: str) -> tuple[LayerRange, ...] | None:
        """Ask a process beside the ring, or in it, what it holds; None where it does not answer or does not fit."""
        return self._opener.look(address)

    def assign(self, address: str, ranges: Sequence[LayerRange]) -> None:
        """Have a process hold exactly these ranges; the ring must be broken, and its connections are closed.

        Raises:
            StageRefusedError: it has no room for them, in words, or cannot load them.
            StageLostError: it is gone, or was silent for the timeout while it loaded.
        """
        self._opener.close("layers move")
        try:
            self._opener.assign(address, ranges, self._timeout)
        except StageLostError:
            self._lost_address = address
            raise

    @property
    def holders(self) -> Mapping[str, tuple[LayerRange, ...]]:
        """The addresses of the stages and the ranges that the ring lets each compute."""
        return self._used

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where the stages are that the ring uses now."""
        return tuple(self._holders)

    @property
    def lost_address(self) -> str | None:
        """The address of the stage that broke the ring, for :meth:`rearrange`; None while it is whole."""
        return self._lost_address

    def check(self) -> LinkcppError | None:
        """Look, without waiting, whether a stage has gone; return :attr:`broken`. For rings that are idle."""
        places = [place for place in self._places if place.control.is_open]
        poller = select.poll()
        by_descriptor = {place.control.fileno(): place for place in places}
        for descriptor in by_descriptor:
            poller.register(descriptor, select.POLLIN)
        for descriptor, _ in poller.poll(0):
            self._read(by_descriptor[descriptor], self._now() + self._timeout)
        return self._state.broken

    def close(self) -> None:
        """Say goodbye to all stages; they forget all sequences."""
        self._opener.close("the gateway closes the ring")

    def __enter__(self) -> Ring:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def statistics(self) -> tuple[StageStatistics, ...]:
        """Return the ranges in order with their counters; any thread may call this."""
        found = []
        for hop in list(self._hops):
            profile = hop.place.profile if hop.place is not None else None
            found.append(
                StageStatistics(
                    layers=hop.layers,
                    name="gateway" if hop.place is None else hop.place.control.name,
                    address="" if hop.place is None else hop.place.address,
                    pid=os.getpid() if profile is None else profile.pid,
                    connected=hop.place is None or hop.place.control.is_open,
                    steps=hop.steps,
                    microseconds=hop.microseconds,
                )
            )
        return tuple(found)

    # --- moving items ----------------------------------------------------------------------------------------

    def _launch(self, items: Iterable[Item]) -> None:
        for item in items:
            self._pass_on(item)

    def _pass_on(self, item: Item | FramedStep) -> None:
        """Run an item through the gateway's own ranges until it leaves to a stage or has come round."""
        index = self._index_of[item.layer]
        came_from = self._hops[index - 1]
        try:
            if isinstance(item, FramedStep):
                own = self._hops[index].local if index < len(self._hops) else None
                passed = item.decode() if own is None else own.run_frame(item, self._minor(index + 1))
                index += own is not None
                if isinstance(passed, FramedItem):
                    self._feed(self._hops[index], passed)
                    return
                item = passed
        except ProtocolError as error:
            self._break(StageLostError(str(error), stage=came_from.name), came_from.place)
            return
        while index < len(self._hops):
            if self._state.broken is not None:
                return
            local = self._hops[index].local
            if local is None:
                self._feed(self._hops[index], item)
                return
            item = local.run(item)
            index += 1
        self._last_progress = self._now()
        try:
            instructions = self._state.arrived(item)
        except ProtocolError as error:
            last = self._hops[-1]
            self._break(StageLostError(str(error), stage=last.name), last.place)
            return
        if isinstance(item, Outcome):
            for hop, spent in zip(self._hops, item.spent, strict=False):
                hop.steps += 1
                hop.microseconds += spent
        self._follow(instructions)

    def _minor(self, index: int) -> int | None:
        """Return in which version of the protocol a range is fed, None where that is not by connection."""
        feed = self._hops[index].feed if index < len(self._hops) else None
        return None if feed is None else feed.minor

    def _feed(self, hop: RingHop, item: Item | FramedItem) -> None:
        """Send an item to a stage; while it takes none, read what others send."""
        feed = hop.feed
        if feed is None:
            raise StageLostError("has no connection from the gateway", stage=hop.name)
        if self._state.oldest == item.sequence:
            self._last_progress = self._now()  # the clock of an idle ring starts here
        try:
            rest = feed.send_some(item)
            while rest:
                self._wait(feed)
                if self._state.broken is not None:
                    return
                rest = feed.push_rest(rest)
        except StageLostError as error:
            self._break(StageLostError(str(error).partition(": ")[2], stage=hop.name), hop.place)

    def _give_up(self, numbers: tuple[int, ...]) -> None:
        for own in self._opener.local:
            own.cancel(numbers)
        for place in self._places:
            try:
                # A control connection carries so little to the stage that it always has room.
                place.control.send(Cancel(numbers))
            except StageLostError as error:
                self._break(error, place)

    def _progress(self) -> None:
        if not self._inbox:
            self._wait(None)
        # Not more than one: a completion that is ready goes to the client before more is computed here.
        elif self._state.broken is None:
            self._pass_on(self._inbox.popleft())

    def _wait(self, feed: StageLink | None) -> None:
        """Wait for bytes from any stage, or for room in ``feed``; break the ring where neither comes in time."""
        deadline = self._last_progress + self._timeout
        open_places = [place for place in self._places if place.control.is_open]
        if feed is None and len(open_places) == 1:
            if not self._read(open_places[0], deadline, direct=True):
                self._blame()
            return
        poller = select.poll()
        by_descriptor = {place.control.fileno(): place for place in open_places}
        for descriptor in by_descriptor:
            poller.register(descriptor, select.POLLIN)
        if feed is not None:
            poller.register(feed.fileno(), select.POLLOUT)
        ready = self._poll(poller, deadline)
        if not ready:
            self._blame()
        for descriptor, _ in ready:
            place = by_descriptor.get(descriptor)
            if place is not None and self._state.broken is None:
                self._read(place, deadline, direct=feed is None)

    def _poll(self, poller: select.poll, deadline: float) -> list[tuple[int, int]]:
        begin = self._now()
        if deadline - begin > LONGEST:
            self._patience.look(poller.poll)
        ready = poller.poll(max(1.0, 1e3 * (deadline - self._now())))
        self._patience.waited(self._now() - begin)
        return ready

    def _read(self, place: Place, deadline: float, *, direct: bool = False) -> bool:
        """Read from a place once and take the messages that are whole; False where the deadline passed.

        With ``direct`` the first item goes on at once and not by way of the inbox.
        """
        try:
            if not place.control.read(deadline, self._rehearse):
                return False
            while (message := place.control.next()) is not None:
                if (
                    direct
                    and isinstance(message, _TRAVELLERS)
                    and not self._inbox
                    and message.layer in self._index_of
                ):
                    # Used up before the next read, because only the gateway's own ranges or the end can be next.
                    self._pass_on(detached(message) if type(message) is Outcome else message)
                    direct = False
                else:
                    self._take(place, message)
        except StageLostError as error:
            self._break(error, place)
        return True

    def _rehearse(self, step: FramedStep) -> None:
        """Go through what a step of our own layers begins with, while another stage computes."""
        local = next((hop.local for hop in self._hops if hop.layers.first == step.layer), None)
        if local is not None:
            local.rehearse(step)

    def _take(self, place: Place, message: Message | FramedStep) -> None:
        if isinstance(message, _TRAVELLERS) and message.layer in self._index_of:
            self._inbox.append(detached(message))
        elif isinstance(message, Fault):
            if message.kind is FaultKind.UNREACHABLE:
                hop = self._hop_of(message)
                self.check()  # what the stage itself said last explains more than that it is gone
                self._break(StageLostError(message.text, stage=hop.name), hop.place)
            else:
                self._inbox.append(message)
        elif isinstance(message, Probed):
            place.probed = message
        elif isinstance(message, Ping):
            place.control.send(Pong(message.sequence, message.nonce))
        elif isinstance(message, Goodbye):
            self._break(StageLostError(f"says goodbye: {message.text}", stage=place.name), place)
        elif not isinstance(message, Pong):
            self._break(StageLostError(f"sent {message.type.name}", stage=place.name), place)

    # --- what goes wrong -------------------------------------------------------------------------------------

    def _break(self, error: StageError, place: Place | None) -> None:
        """End everything in flight because a stage is gone; the first to be noticed names the ring's trouble."""
        if self._state.broken is not None:
            return
        if place is not None:
            name = place.name
            if error.stage != name:
                text = str(error).removeprefix(f"stage {error.stage}: ")
                error = type(error)(text, stage=name, hint=error.hint)
            self._lost_address = place.address
            place.control.close("")
        self.lost_stage = error.stage
        self._inbox.clear()
        self._state.lost(error)

    def _blame(self) -> None:
        """Find out which stage does not go on, after nothing came round for the timeout, and break the ring."""
        waited = f"nothing came round for {self._timeout:g} s"
        oldest = self._state.oldest
        self._probes += 1
        for place in self._places:
            place.probed = None
            with suppress(FleetError):
                place.control.send_some(Probe(self._probes))
        deadline = self._now() + min(_PROBE_SECONDS, self._timeout)
        while any(place.probed is None for place in self._places) and self._state.broken is None:
            poller = select.poll()
            waiting = {place.control.fileno(): place for place in self._places if place.control.is_open}
            for descriptor in waiting:
                poller.register(descriptor, select.POLLIN)
            ready = poller.poll(max(0.0, 1e3 * (deadline - self._now())))
            if not ready:
                break
            for descriptor, _ in ready:
                self._read(waiting[descriptor], deadline)
            if self._inbox:
                self._last_progress = self._now()  # it was only slow
                return
        if self._state.broken is not None or oldest is None:
            return
        for hop in self._hops:
            if hop.place is None:
                continue
            if hop.place.probed is None:
                text = f"{waited}, and it does not answer"
            else:
                taken, passed = next((t, p) for f, t, p in hop.place.probed.ranges if f == hop.layers.first)
                if passed >= oldest:
                    continue
                text = f"{waited}, and it computes on" if taken >= oldest else f"{waited}, and nothing reaches it"
            self._break(StageTimeoutError(text, stage=hop.name), hop.place)
            return
        last = next(hop for hop in reversed(self._hops) if hop.place is not None)
        self._break(StageTimeoutError(f"{waited}, though it says that it sent", stage=last.name), last.place)

    def _hop_of(self, fault: Fault) -> RingHop:
        last = len(self._hops) - 1
        return self._hops[min(self._index_of.get(fault.first, last), last)]

    def _explain(self, item: Fault | Operate) -> LinkcppError:
        if isinstance(item, Fault):
            return StageFailedError(item.text, stage=self._hop_of(item).name)
        where, _, text = item.text.partition(": ")
        name = next((hop.name for hop in self._hops if str(hop.layers) == where), where)
        return StageFailedError(text or "did not do it", stage=name)
