"""Stage workers of twins in threads of this process, over memory links that a test may break."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

import pytest

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


class Net:
    """Stage workers by name, and the ways between them. ``faults`` maps an address to the faults of its links."""

    def __init__(self, ring: RingFacts | None = None) -> None:
        self.facts = ring or facts()
        self.listeners: dict[str, MemoryListener] = {}
        self.servers: dict[str, StageServer] = {}
        self.stages: dict[str, list[TwinStage]] = {}
        self.faults: dict[str, list[Faults | None]] = {}
        self.log: list[str] = []
        self._connectors: dict[str, Connector] = {}

    def start(self, name: str, *ranges: tuple[int, int], **changes: object) -> str:
        """Start a stage worker; ``changes`` are fields of its profile."""
        stages = [TwinStage(first, last, self.facts) for first, last in ranges]
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
        listener = MemoryListener(name)
        service = StageService([Hop(stage, clock=lambda: 0) for stage in stages], profile, self.connector)
        server = StageServer(service, listener, limits=ServerLimits(drain=2.0), log=self.log.append)
        server.start()
        self.listeners[name], self.servers[name], self.stages[name] = listener, server, stages
        self._connectors.pop(name, None)
        return name

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
