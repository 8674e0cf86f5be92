"""Stage workers of twins in threads of this process, over memory links that a test may break."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest

from orchestrator.errors import PlanError
from orchestrator.models.gguf_writer import Progress
from orchestrator.ring.client import Ring
from orchestrator.ring.hop import Hop
from orchestrator.ring.layout import LayerRange
from orchestrator.ring.profile import StageProfile
from orchestrator.ring.state import RingFacts
from orchestrator.transport.base import Connector
from orchestrator.transport.memory import MemoryListener
from orchestrator.types import EngineIdentity
from orchestrator.workers.server import ServerLimits
from orchestrator.workers.stage import StageService
from orchestrator.workers.stage_server import StageServer
from tests.faults import Faults, FaultyConnector
from tests.ring_twin import TwinStage, facts

IDENTITY = EngineIdentity("build-1", "AVX2", False)


class LocalTwin(TwinStage):
    """A twin in the gateway."""

    n_ubatch = 8
    batch_invariant = True


class TwinLayers:
    """Layers of twins in memory; ``room`` is how many fit, and ``loading`` happens before any come."""

    def __init__(self, ranges: Sequence[tuple[int, int]], ring: RingFacts, profile: StageProfile) -> None:
        self._ring = ring
        self._profile = profile
        self.room = ring.n_layer
        self.loading: Callable[[Progress], None] = lambda _progress: None
        self.stages = {LayerRange(*found): TwinStage(*found, ring) for found in ranges}
        self._hops = {found: Hop(stage, clock=lambda: 0) for found, stage in self.stages.items()}

    @property
    def hops(self) -> tuple[Hop, ...]:
        return tuple(self._hops[found] for found in sorted(self._hops))

    @property
    def profile(self) -> StageProfile:
        return dataclasses.replace(self._profile, ranges=tuple(sorted(self._hops)))

    def require_room(self, ranges: Sequence[LayerRange]) -> None:
        if sum(map(len, ranges)) > self.room:
            raise PlanError(f"room for {self.room} layers")

    def hold(self, ranges: Sequence[LayerRange], progress: Progress) -> None:
        self.loading(progress)
        for gone in set(self._hops) - set(ranges):
            del self._hops[gone], self.stages[gone]
        for new in set(ranges) - set(self._hops):
            self.stages[new] = TwinStage(new.first, new.last, self._ring)
            self._hops[new] = Hop(self.stages[new], clock=lambda: 0)


def replace(ring: Ring, changes: Mapping[str, str]) -> None:
    """Put other stages, with the same layers, in the places of some."""
    ring.rearrange({changes.get(address, address): ranges for address, ranges in ring.holders.items()})


class Net:
    """Stage workers by name, and the ways between them. ``faults`` maps an address to the faults of its links."""

    def __init__(self, ring: RingFacts | None = None) -> None:
        self.facts = ring or facts()
        self.listeners: dict[str, MemoryListener] = {}
        self.servers: dict[str, StageServer] = {}
        self.layers: dict[str, TwinLayers] = {}
        self.faults: dict[str, list[Faults | None]] = {}
        self.log: list[str] = []
        self._connectors: dict[str, Connector] = {}

    def start(self, name: str, *ranges: tuple[int, int], **changes: object) -> str:
        """Start a stage worker; ``changes`` are fields of its profile."""
        fields = {
            "name": name,
            "address": "",
            "pid": os.getpid(),
            "n_threads": 1,
            "identity": IDENTITY,
            "model_sha256": "m",
            "architecture": "twin",
            "facts": self.facts,
            "n_ubatch": 8,
            "batch_invariant": True,
            "ranges": tuple(LayerRange(*found) for found in ranges),
        }
        profile = StageProfile(**(fields | changes))
        layers = TwinLayers(ranges, self.facts, profile)
        listener = MemoryListener(name)
        service = StageService(layers, self.connector)
        server = StageServer(service, listener, limits=ServerLimits(drain=2.0), log=self.log.append)
        server.start()
        self.listeners[name], self.servers[name], self.layers[name] = listener, server, layers
        self._connectors.pop(name, None)
        return name

    @property
    def stages(self) -> dict[str, list[TwinStage]]:
        """What each stage worker holds, in the order of the layers."""
        return {
            name: [layers.stages[found] for found in sorted(layers.stages)] for name, layers in self.layers.items()
        }

    def connector(self, address: str) -> Connector:
        if address not in self._connectors:
            inner = self.listeners[address].connector()
            plan = self.faults.get(address)
            self._connectors[address] = FaultyConnector(inner, plan) if plan is not None else inner
        return self._connectors[address]

    def kill(self, name: str) -> None:
        """End a stage worker without a word, as a killed process does."""
        server = self.servers[name]
        self.listeners[name].close()
        server.service.draining = True
        with server._guard:
            peers = list(server._peers)
        for peer in peers:
            peer.close()
        for peer in peers:
            peer.thread.join(5)

    def ring(self, addresses: Sequence[str], *local: tuple[int, int], **options: object) -> Ring:
        settings = {"identity": IDENTITY, "model_sha256": "m", "connector": self.connector, "timeout": 5.0} | options
        return Ring(addresses, local=[LocalTwin(*found, self.facts) for found in local], **settings)

    def close(self) -> None:
        for name in list(self.servers):
            self.servers[name].drain()


@pytest.fixture
def net() -> Iterator[Net]:
    made = Net()
    with contextlib.closing(made):
        yield made
