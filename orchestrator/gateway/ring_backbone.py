"""Put a ring together: the stages of a deployment, the gateway's own layers, and what to do when one is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

from orchestrator.dispatch.dispatcher import Dispatcher
from orchestrator.dispatch.exchange import DispatchStatistics, Measurement, WorkerStatistics
from orchestrator.engine.facts import ring_rows
from orchestrator.engine.identity import engine_identity
from orchestrator.engine.model import Model
from orchestrator.engine.stage import StageContext, StageSizes
from orchestrator.gateway.backend import Invariance
from orchestrator.gateway.drafters.opening import NO_SPECULATION, SpeculationSettings
from orchestrator.gateway.gateway import DEFAULT_LIMITS, Gateway
from orchestrator.gateway.ring import RingBackend
from orchestrator.gateway.scheduler import Limits
from orchestrator.gateway.standby import PATIENCE_SECONDS, Standby
from orchestrator.gateway.state import Observer
from orchestrator.models.caches import layer_caches
from orchestrator.models.deployment import Deployment
from orchestrator.models.gguf import GgufFile
from orchestrator.ring.client import Ring
from orchestrator.ring.layout import LayerRange
from orchestrator.types import Boundary, Contract, EngineIdentity, Ownership

CLOSE_SECONDS: Final = 5.0
"""How long a step may take to end once the gateway closes; then its connections are closed under it."""


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
        last = next((stage for stage in self.local if stage.gives_hidden), None)
        backend = RingBackend(
            self.ring,
            n_stages=len(self.ring.statistics()),
            n_chunk=self.n_ubatch,
            invariance=invariance,
            reopen=self.standby.reopen,
            look=self.ring.check,
            token_bytes=self.token_bytes,
            hidden=last is not None,
        )
        speculation = speculate.open(backend.facts, self.model, exact=self.batch_invariant)
        if last is not None:
            last.context.keep_hidden(speculation is not None and speculation.reads_hidden)
        return Gateway(
            self.model,
            backend,
            reuse_prefix=reuse_prefix,
            limits=limits,
            identity=self.fingerprint,
            observer=observer,
            speculation=speculation,
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
            boundary=deployment.boundary,
        )
        undo.callback(ring.close)
        ring.open()
        undo.pop_all()
    return RingBackbone(
        model=model,
        ring=ring,
        standby=Standby(ring, [spare.address for spare in deployment.spares], patience=patience),
        local=tuple(local),
        dispatchers=tuple(dispatchers),
        identity=identity,
        token_bytes=sum(cache.per_token for cache in layer_caches(file)) or 1,
        n_expert=file.n_expert,
        n_ubatch=max(rows // deployment.sequences * deployment.sequences, deployment.sequences),
        fingerprint=f"{file.header_sha256} {identity.build} {identity.isa} {_ring_name(deployment.boundary)}",
    )


def _ring_name(boundary: Boundary) -> str:
    """Name what else the numbers in the caches depend on."""
    return "ring" if boundary is Boundary.F32 else f"ring {boundary.value}"
