"""Put a ring together: the stages of a deployment, the gateway's own layers, and what to do when one is lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol

from orchestrator.dispatch.dispatcher import Dispatcher
from orchestrator.dispatch.exchange import DispatchStatistics, Measurement, WorkerStatistics
from orchestrator.engine.facts import ring_rows
from orchestrator.engine.identity import engine_identity
from orchestrator.engine.model import Model
from orchestrator.engine.stage import StageContext, StageSizes
from orchestrator.errors import LinkcppError, StageError
from orchestrator.gateway.backend import Invariance
from orchestrator.gateway.drafters.opening import NO_SPECULATION, SpeculationSettings
from orchestrator.gateway.gateway import DEFAULT_LIMITS, Gateway
from orchestrator.gateway.ring import RingBackend
from orchestrator.gateway.scheduler import Limits
from orchestrator.gateway.state import Observer
from orchestrator.models.caches import layer_caches
from orchestrator.models.deployment import Deployment
from orchestrator.models.gguf import GgufFile
from orchestrator.ring.client import Ring
from orchestrator.ring.layout import LayerRange
from orchestrator.transport.base import parse_address
from orchestrator.transport.tcp import connect
from orchestrator.types import Contract, EngineIdentity, Ownership

logger = logging.getLogger(__name__)

CLOSE_SECONDS: Final = 5.0
"""How long a step may take to end once the gateway closes; then its connections are closed under it."""

PATIENCE_SECONDS: Final = 60.0
"""How long requests wait for a lost stage, or a spare in its place, before they fail."""

_TRY_SECONDS: Final = 2.0
_PAUSE_SECONDS: Final = 0.2


class ReplaceableRing(Protocol):
    """The part of :class:`orchestrator.ring.client.Ring` that a standby uses."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where the stages are that the ring uses now."""

    @property
    def broken(self) -> LinkcppError | None:
        """Why no more steps are taken, None while they are."""

    @property
    def lost_address(self) -> str | None:
        """The address of the stage that broke the ring."""

    def replace_all(self, spares: Mapping[str, str]) -> object:
        """Put processes in the places of others, and begin with empty sequences."""


class Standby:
    """Makes a ring whole again: by the lost stage started anew, or by a spare that holds the same layers.

    ``spares`` has the other processes for each address of the ring; a stage that was replaced becomes one of them.
    ``patience`` in seconds is how long :meth:`reopen` tries.
    """

    def __init__(
        self,
        ring: ReplaceableRing,
        spares: Mapping[str, Sequence[str]],
        *,
        patience: float = PATIENCE_SECONDS,
        reachable: Callable[[str], bool] | None = None,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._ring = ring
        # Who can take each place, the preferred one first.
        self._places = [[address, *spares.get(address, ())] for address in ring.addresses]
        self._patience = patience
        self._reachable = reachable or _is_reachable
        self._now = now
        self._sleep = sleep
        self.recoveries = 0

    def reopen(self) -> None:
        """Replace what is lost, with empty sequences; waits for a stage that is started again.

        Raises:
            LinkcppError: what stood in the way last, once the patience is over.
        """
        begin = self._now()
        suspect = self._ring.lost_address
        if self._ring.broken is not None:
            logger.warning("%s", self._ring.broken)
        if suspect is not None:  # not again at once: a process that hangs still takes connections
            self._put_behind(suspect)
        while True:
            changes: dict[str, str] = {}
            for address, place in zip(self._ring.addresses, self._places, strict=True):
                chosen = next((other for other in place if self._reachable(other)), place[0])
                if chosen != address:
                    changes[address] = chosen
            try:
                self._ring.replace_all(changes)
            except StageError as error:
                if self._now() - begin > self._patience:
                    raise
                logger.info("not yet: %s", error)
                culprit = next((a for place in self._places for a in place if f"({a})" in error.stage), None)
                culprit = culprit or next((a for place in self._places for a in place if a == error.stage), suspect)
                if culprit is not None:
                    self._put_behind(culprit)
                self._sleep(_PAUSE_SECONDS)
                continue
            for address, place in zip(self._ring.addresses, self._places, strict=True):
                place.remove(address)
                place.insert(0, address)
            self.recoveries += 1
            moved = "".join(f", {new} in place of {old}" for old, new in changes.items())
            logger.warning("the ring is whole again after %.1f s%s", self._now() - begin, moved)
            return

    def _put_behind(self, address: str) -> None:
        """Prefer all others for the place of this address."""
        for place in self._places:
            if address in place:
                place.remove(address)
                place.append(address)


@dataclass(frozen=True, slots=True)
class RingBackbone:
    """A ring ready to decode; a context manager. ``model`` has the tokenizer, ``local`` the gateway's own layers."""

    model: Model
    ring: Ring
    standby: Standby
    local: tuple[StageContext, ...]
    dispatchers: tuple[Dispatcher, ...]
    identity: EngineIdentity
    token_bytes: int
    n_expert: int
    n_ubatch: int
    fingerprint: str
    contract: Contract = Contract.EXACT
    batch_invariant: bool = True

    def gateway(
        self,
        *,
        invariance: Invariance = Invariance.SEVERAL,
        reuse_prefix: bool = True,
        limits: Limits = DEFAULT_LIMITS,
        observer: Observer | None = None,
        speculate: SpeculationSettings = NO_SPECULATION,
    ) -> Gateway:
        """Make the gateway of this ring; see :class:`Gateway`. Not started."""
        backend = RingBackend(
            self.ring,
            n_stages=len(self.ring.statistics()),
            n_chunk=self.n_ubatch,
            invariance=invariance,
            reopen=self.standby.reopen,
            look=self.ring.check,
            token_bytes=self.token_bytes,
        )
        return Gateway(
            self.model,
            backend,
            reuse_prefix=reuse_prefix,
            limits=limits,
            identity=self.fingerprint,
            observer=observer,
            speculation=speculate.open(backend.facts, self.model, exact=self.batch_invariant),
        )

    def statistics(self) -> DispatchStatistics:
        """Return the stages as workers that own all experts of their layers; any thread may call this."""
        stages = self.ring.statistics()
        workers = tuple(
            WorkerStatistics(
                name=stage.name,
                address=stage.address,
                pid=stage.pid,
                connected=stage.connected,
                round_trip_ms=None,
                rows=stage.steps,
                pairs=0,
                bytes_out=0,
                bytes_in=0,
                errors=0,
                late_frames=0,
                ownership=Ownership.product(
                    range(stage.layers.first, stage.layers.last), range(max(1, self.n_expert))
                ),
                last_error=None if stage.connected else str(self.ring.broken or "the connection is gone"),
            )
            for stage in stages
        )
        steps = max((stage.steps for stage in stages), default=0)
        return DispatchStatistics(workers, steps, steps, ())

    def is_usable(self) -> bool:
        """Tell whether the ring is whole; any thread may call this."""
        return self.ring.broken is None

    def measure(self) -> Sequence[Measurement]:
        """Return nothing: stages are timed by the steps that pass them."""
        return ()

    def close(self, gateway: Gateway | None = None) -> None:
        """End the gateway's requests, say goodbye to the stages, free the gateway's own layers."""
        stopped = gateway is None or gateway.close(CLOSE_SECONDS)
        self.ring.close()
        for dispatcher in self.dispatchers:
            dispatcher.close()
        if stopped or gateway is None or gateway.close(CLOSE_SECONDS):
            for stage in self.local:
                stage.close()
            if not self.local:
                self.model.close()

    def __enter__(self) -> RingBackbone:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_ring(
    path: Path,
    deployment: Deployment,
    *,
    n_threads: int = 1,
    timeout: float = 60.0,
    patience: float = PATIENCE_SECONDS,
    progress: Callable[[float], None] | None = None,
) -> RingBackbone:
    """Open the ring of a deployment over its stages, with the layers that the gateway holds itself.

    ``timeout`` seconds is how long nothing may come round, ``patience`` how long requests wait for a lost stage.

    Raises:
        InputError: the file, or layers that nobody holds or two do.
        FleetError: a stage or an expert worker cannot be reached or does not fit.
        EngineError: the engine, for another reason.
    """
    file = GgufFile.open(path)
    identity = engine_identity(repack=False)
    rows = ring_rows(deployment)
    sizes = StageSizes(deployment.context, deployment.sequences, rows)
    workers = [worker.address for worker in deployment.workers_of("")]
    with ExitStack() as undo:
        local: list[StageContext] = []
        dispatchers: list[Dispatcher] = []
        for first, last in deployment.gateway.layers:
            exchange = None
            if workers:
                exchange = Dispatcher(
                    workers,
                    Contract.EXACT,
                    identity,
                    model_sha256=file.header_sha256,
                    timeout=timeout,
                    client="gateway",
                )
                undo.callback(exchange.close)
                exchange.connect()
                dispatchers.append(exchange)
            stage = StageContext.open(
                path, LayerRange(first, last), sizes, n_threads=n_threads, exchange=exchange, progress=progress
            )
            undo.callback(stage.close)
            if exchange is not None:
                exchange.describe(stage.descriptors)
            local.append(stage)
        if local:
            model = local[0].model
        else:
            model = Model.open(path, stage=(0, 1), without_experts=True, progress=progress)  # for its tokenizer
            undo.callback(model.close)
        ring = Ring(
            [stage.address for stage in deployment.stages],
            local=local,
            identity=identity,
            model_sha256=file.header_sha256,
            timeout=timeout,
        )
        undo.callback(ring.close)
        ring.open()
        undo.pop_all()
    spares = {
        stage.address: [spare.address for spare in deployment.spares if spare.layers == stage.layers]
        for stage in deployment.stages
    }
    return RingBackbone(
        model=model,
        ring=ring,
        standby=Standby(ring, spares, patience=patience),
        local=tuple(local),
        dispatchers=tuple(dispatchers),
        identity=identity,
        token_bytes=sum(cache.per_token for cache in layer_caches(file)) or 1,
        n_expert=file.n_expert,
        n_ubatch=max(rows // deployment.sequences * deployment.sequences, deployment.sequences),
        fingerprint=f"{file.header_sha256} {identity.build} {identity.isa} ring",
    )


def _is_reachable(address: str) -> bool:
    try:
        connect(parse_address(address), _TRY_SECONDS).close()
    except LinkcppError:
        return False
    return True
