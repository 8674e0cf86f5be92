"""Open a ring: connect to all stages, check that they fit, tell each where its items go, connect to those we feed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from orchestrator.errors import InputError, StageError, StageRefusedError
from orchestrator.ring.hop import Hop
from orchestrator.ring.layout import LayerRange, tile
from orchestrator.ring.link import StageLink
from orchestrator.ring.profile import LocalStage, StageProfile, agree, profile_of
from orchestrator.ring.state import RingFacts
from orchestrator.transport.base import Connector, parse_address
from orchestrator.transport.unix import connector_of, is_unix
from orchestrator.types import Boundary, EngineIdentity
from orchestrator.wire.messages import SUPPORTED, Hello
from orchestrator.wire.ring_messages import Assign, Attach, Probed, Purpose, Route

_REQUEST_SECONDS: Final = 30.0
"""Longest wait for a stage to open the ring, and to reach the one behind it."""

_LOOK_SECONDS: Final = 2.0
"""Longest wait for a process that is only asked what it holds."""


class Place:
    """One stage worker process, and the control connection to it."""

    def __init__(self, address: str, connector: Connector) -> None:
        self.address = address
        self.control = StageLink(connector, address)
        self.profile: StageProfile | None = None
        self.probed: Probed | None = None  # its answer to the last probe

    @property
    def name(self) -> str:
        """Name it for people: layers, name and address."""
        ranges = self.profile.ranges if self.profile is not None else ()
        return f"{', '.join(map(str, ranges))} ({self.control.name})"


class RingHop:
    """One range of layers in the order of the ring: computed here (``local``), or at a place."""

    def __init__(self, layers: LayerRange, place: Place | None, local: Hop | None) -> None:
        self.layers = layers
        self.place = place
        self.local = local
        self.feed: StageLink | None = None  # where the gateway is what comes before
        self.steps = 0
        self.microseconds = 0

    @property
    def name(self) -> str:
        """Name it for people."""
        where = "here" if self.place is None else self.place.control.name
        return f"{self.layers} ({where})"


class Opener:
    """What is needed to open a ring, again after each loss. :attr:`trying` is the address at which it stands."""

    def __init__(
        self,
        local: Sequence[LocalStage],
        identity: EngineIdentity,
        model_sha256: str | None,
        *,
        client: str,
        connect_timeout: float,
        connector: Callable[[str], Connector] = connector_of,
        saved_limit: int = 1 << 30,
        boundary: Boundary = Boundary.F32,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.local = [Hop(stage, clock=time.perf_counter_ns, saved_limit=saved_limit) for stage in local]
        self.trying: str | None = None
        self.places: list[Place] = []
        self.hops: list[RingHop] = []
        self._stages = tuple(local)
        self._identity = identity
        self._model_sha256 = model_sha256
        self._client = client
        self._timeout = connect_timeout
        self._boundary = boundary
        self._connector = connector
        self._now = now
        self._requests = 0
        self._reference: StageProfile | None = None  # one of the ring as it was opened last

    def open(self, holders: Mapping[str, Sequence[LayerRange] | None]) -> RingFacts:
        """Fill :attr:`places` and :attr:`hops` with these ranges of the stages (None: all that one holds).

        See :meth:`orchestrator.ring.client.Ring.open` for what it raises. After an error :meth:`close` gives back
        what was opened.
        """
        self.trying = None
        self.hops = []
        self.places = [Place(address, self._connector(address)) for address in holders]
        hello = self._hello()
        profiles = self._greet(hello)
        self.trying = None
        facts = agree(profiles)
        for profile in profiles:
            self._check(profile)
        self._order(facts, holders)
        secret = os.urandom(16).hex()
        self._attach(secret)
        self._route()
        self._feed(hello, secret)
        for own in self.local:
            own.clear()
        self._reference = profiles[0]
        return facts

    def close(self, text: str) -> None:
        """Say goodbye to all."""
        for hop in self.hops:
            if hop.feed is not None:
                hop.feed.close(text)
                hop.feed = None
        for place in self.places:
            place.control.close(text)

    def look(self, address: str) -> tuple[LayerRange, ...] | None:
        """Ask a process which ranges it holds; None where it does not answer soon, or could not be of this ring."""
        link = StageLink(self._connector(address), address)
        try:
            profile = profile_of(link.open(self._hello(), _LOOK_SECONDS, self._now() + _LOOK_SECONDS), address)
            self._require_boundary(link)
            self._check(profile)
            if self._reference is not None:
                agree([self._reference, profile])
        except StageError:
            return None
        finally:
            link.close("only looked")
        return profile.ranges

    def assign(self, address: str, ranges: Sequence[LayerRange], timeout: float) -> None:
        """Have a process that no ring uses hold exactly these ranges; what it holds outlives the connection.

        The timeout in seconds is for each sign of life while it loads.

        Raises:
            StageRefusedError: it has no room for them, in words, or cannot load them.
            StageLostError: it is gone, or has gone silent.
        """
        self.trying = address
        link = StageLink(self._connector(address), address)
        try:
            link.open(self._hello(), self._timeout, self._now() + self._timeout)
            if not link.can_assign:
                raise StageRefusedError("speaks a version in which layers cannot be assigned", stage=link.name)
            attach = Attach(self._number(), Purpose.CONTROL, 0, os.urandom(16).hex())
            link.request(attach, self._now() + _REQUEST_SECONDS)
            wanted = Assign(self._number(), tuple((found.first, found.last) for found in ranges))
            link.request(wanted, self._now() + timeout, lambda: self._now() + timeout)
        finally:
            link.close("the layers are there")
        self.trying = None

    def _hello(self) -> Hello:
        return Hello(SUPPORTED, self._identity, client=self._client)

    def _number(self) -> int:
        self._requests += 1
        return self._requests

    def _greet(self, hello: Hello) -> list[StageProfile]:
        profiles = [] if not self._stages else [self._own_profile()]
        for place in self.places:
            self.trying = place.address
            welcome = place.control.open(hello, self._timeout, self._now() + self._timeout)
            self._require_boundary(place.control)
            place.profile = profile_of(welcome, place.address)
            profiles.append(place.profile)
        return profiles

    def _own_profile(self) -> StageProfile:
        first = self._stages[0]
        return StageProfile(
            name="the gateway",
            address="",
            pid=os.getpid(),
            n_threads=0,
            identity=self._identity,
            model_sha256=self._model_sha256 or "",
            architecture="",
            facts=first.facts,
            n_ubatch=first.n_ubatch,
            batch_invariant=first.batch_invariant,
            ranges=tuple(stage.layers for stage in self._stages),
        )

    def _check(self, profile: StageProfile) -> None:
        """Hold a stage against what the gateway knows, which may hold no layers to compare with."""
        if self._model_sha256 is not None and profile.model_sha256 != self._model_sha256:
            theirs = profile.model_sha256[:12] or "unknown"
            raise StageRefusedError(
                f"holds another model file ({theirs} instead of {self._model_sha256[:12]})", stage=profile.name
            )
        if profile.identity != self._identity:
            raise StageRefusedError(
                f"has another engine: {profile.identity}, the gateway has {self._identity}",
                stage=profile.name,
                hint="install the same linkcpp on all machines",
            )

    def _require_boundary(self, link: StageLink) -> None:
        if self._boundary is not Boundary.F32 and not link.can_round:
            raise StageRefusedError(
                f"speaks a version in which boundaries cannot travel as {self._boundary.value}",
                stage=link.name,
                hint="install the same linkcpp on all machines, or leave the boundary at f32",
            )

    def _order(self, facts: RingFacts, wanted: Mapping[str, Sequence[LayerRange] | None]) -> None:
        hops = [RingHop(hop.layers, None, hop) for hop in self.local]
        for place in self.places:
            held, used = place.profile.ranges if place.profile else (), wanted[place.address]
            hops += [RingHop(layers, place, None) for layers in held if used is None or layers in used]
        holders = [(hop.layers, hop.place.control.name if hop.place else "the gateway") for hop in hops]
        self.hops = [hops[index] for index in tile(holders, facts.n_layer)]

    def _attach(self, secret: str) -> None:
        for place in self.places:
            self.trying = place.address
            attach = Attach(self._number(), Purpose.CONTROL, 0, secret)
            place.control.request(attach, self._now() + _REQUEST_SECONDS)

    def _route(self) -> None:
        for hop, behind in zip(self.hops, [*self.hops[1:], None], strict=True):
            if hop.place is None:
                continue
            target = ""
            self.trying = hop.place.address
            if behind is not None and behind.place is not None:
                target = self.trying = _address_for(hop.place, behind.place)
            route = Route(self._number(), hop.layers.first, target)
            hop.place.control.request(route, self._now() + _REQUEST_SECONDS)

    def _feed(self, hello: Hello, secret: str) -> None:
        before: RingHop | None = None
        for hop in self.hops:
            if hop.place is not None and (before is None or before.place is None):
                self.trying = hop.place.address
                hop.feed = StageLink(self._connector(hop.place.address), hop.place.control.name)
                hop.feed.open(hello, self._timeout, self._now() + self._timeout)
                attach = Attach(self._number(), Purpose.FEED, hop.layers.first, secret)
                hop.feed.request(attach, self._now() + _REQUEST_SECONDS)
            before = hop


def _address_for(place: Place, behind: Place) -> str:
    """Return where ``place`` reaches ``behind``: as we do, unless that is an address of one machine only."""
    if _is_local(behind.address) is True and _is_local(place.address) is False:
        raise InputError(
            f"the stage at {place.address} cannot reach {behind.address}, an address of this machine only",
            hint="let the stage listen on an address of the network, and name that",
        )
    return behind.address


def _is_local(address: str) -> bool | None:
    """Tell whether only this machine can reach an address; None for a name inside this process."""
    if is_unix(address):
        return True
    try:
        return parse_address(address).is_loopback
    except InputError:
        return None
