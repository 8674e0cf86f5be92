"""Put a backbone together: the model without its experts, its context, and the workers that hold the experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

import psutil

from orchestrator.dispatch.dispatcher import Dispatcher
from orchestrator.dispatch.exchange import DispatchStatistics, Measurement
from orchestrator.engine.context import INVARIANT_ROWS, Context
from orchestrator.engine.identity import engine_identity
from orchestrator.engine.model import Model
from orchestrator.engine.native import native_star
from orchestrator.engine.session import Session
from orchestrator.gateway.backend import Invariance
from orchestrator.gateway.drafters.opening import NO_SPECULATION, SpeculationSettings
from orchestrator.gateway.gateway import DEFAULT_LIMITS, Gateway
from orchestrator.gateway.local import LocalBackend, WatchedExchange
from orchestrator.gateway.scheduler import Limits
from orchestrator.gateway.slots import count_slots, sequence_bytes
from orchestrator.gateway.state import Observer
from orchestrator.models.gguf import GgufFile
from orchestrator.types import Contract, EngineIdentity

DEFAULT_CONTEXT: Final = 4096
"""Tokens of context where nobody says how many, if the model was trained for as many."""

STOCK_ROWS: Final = 512
"""The engine's usual micro-batch, used where batch invariance is given up for prefill speed."""

CLOSE_SECONDS: Final = 5.0
"""How long a step may take to end once the gateway closes; then its connections are closed under it."""


@dataclass(frozen=True, slots=True)
class Backbone:
    """A model ready to decode; a context manager. ``dispatcher`` is None where this process has the experts.

    ``session`` is the first of the context's sequences, for those who need no more; a gateway takes them all.
    ``fingerprint`` names all that a sequence's state depends on.
    """

    model: Model
    context: Context
    session: Session
    dispatcher: Dispatcher | None
    exchange: WatchedExchange | None
    contract: Contract
    identity: EngineIdentity
    batch_invariant: bool
    fingerprint: str

    def gateway(
        self,
        *,
        invariance: Invariance = Invariance.SEVERAL,
        reuse_prefix: bool = True,
        limits: Limits = DEFAULT_LIMITS,
        observer: Observer | None = None,
        speculate: SpeculationSettings = NO_SPECULATION,
    ) -> Gateway:
        """Make the gateway of this backbone; see :class:`Gateway`. Not started.

        ``invariance`` is what is known of the model in the batch-invariant configuration; in the other one answers
        depend on how tokens are grouped in any case, and nothing is reused. ``speculate`` says who guesses tokens;
        raises :class:`InputError` where that is not possible.
        """
        backend = LocalBackend(
            self.context, exchange=self.exchange, dispatcher=self.dispatcher, invariance=invariance
        )
        speculation = speculate.open(backend.facts, self.model, exact=self.batch_invariant)
        backend.keep_hidden(speculation is not None and speculation.reads_hidden)
        return Gateway(
            self.model,
            backend,
            reuse_prefix=reuse_prefix and self.batch_invariant,
            limits=limits,
            identity=self.fingerprint,
            observer=observer,
            speculation=speculation,
        )

    @property
    def statistics(self) -> Callable[[], DispatchStatistics] | None:
        """What to ask for the workers' counters, None where there are none."""
        return None if self.dispatcher is None else self.dispatcher.statistics

    def is_usable(self) -> bool:
        """Tell whether all workers are there; any thread may call this."""
        return self.dispatcher is None or all(worker.connected for worker in self.dispatcher.statistics().workers)

    def measure(self) -> Sequence[Measurement]:
        """Ask each worker how long an expert and a round trip take."""
        return () if self.dispatcher is None else self.dispatcher.measure()

    def close(self, gateway: Gateway | None = None) -> None:
        """End the gateway's requests, say goodbye to the workers, free context and weights.

        A step that waits for a worker which will not answer is woken by closing its connections. Should a step not
        end at all, context and weights stay: freeing them under it would end the process in a crash.
        """
        stopped = gateway is None or gateway.close(CLOSE_SECONDS)
        if self.dispatcher is not None:
            self.dispatcher.close()
        if stopped or gateway is None or gateway.close(CLOSE_SECONDS):
            self.context.close()
            self.model.close()

    def __enter__(self) -> Backbone:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_backbone(
    path: Path,
    workers: Sequence[str] = (),
    *,
    contract: Contract = Contract.EXACT,
    n_ctx: int | None = None,
    n_sequences: int | None = 1,
    n_threads: int = 1,
    batch_invariant: bool = True,
    timeout: float = 60.0,
    progress: Callable[[float], None] | None = None,
) -> Backbone:
    """Open a model over ``workers`` ("host:port" each), or alone in this process where there are none.

    ``n_ctx`` None takes :data:`DEFAULT_CONTEXT` tokens or what the model was trained for, if that is less. Each of
    the ``n_sequences`` has so many; None takes a few, or as many as there is memory for.
    ``timeout`` seconds is the longest wait for one worker's answer. ``progress`` gets the loaded share, 0 to 1.
    Raises an :class:`InputError` for the file, a :class:`FleetError` for the workers, an :class:`EngineError` else.
    """
    file = GgufFile.open(path)
    if workers:
        file.require_moe()
    file.require_backbone(with_experts=not workers)
    # A star never repacks: both sides must hold the weights in the same layout, and batch invariance forbids it too.
    identity = engine_identity(repack=False)
    with ExitStack() as undo:
        dispatcher = None
        if workers:
            dispatcher = Dispatcher(
                workers,
                contract,
                identity,
                model_sha256=file.header_sha256,
                timeout=timeout,
                client="gateway",
                native=native_star(len(workers), contract),
            )
            undo.callback(dispatcher.close)
            dispatcher.connect()  # before the weights are read: an unreachable worker is known at once
        model = Model.open(path, without_experts=bool(workers), progress=progress)
        undo.callback(model.close)
        rows = INVARIANT_ROWS if batch_invariant else STOCK_ROWS
        n_ctx = n_ctx or min(DEFAULT_CONTEXT, model.n_ctx_train or DEFAULT_CONTEXT)
        n_sequences = count_slots(n_sequences, sequence_bytes(file, n_ctx), psutil.virtual_memory().available, rows)
        if model.is_hybrid:
            rows -= rows % 2  # the gate's own size for these models (onboarding/reference.py)
        exchange = None if dispatcher is None else WatchedExchange(dispatcher)
        context = Context(
            model,
            n_ctx=n_ctx,
            n_sequences=n_sequences,
            n_ubatch=rows,
            n_threads=n_threads,
            exchange=exchange,
            contract=contract,
            batch_invariant=batch_invariant,
        )
        undo.callback(context.close)
        if dispatcher is not None:
            dispatcher.describe(context.descriptors)
        undo.pop_all()
    settings = f"{contract.value} repack={identity.repack} batch_invariant={batch_invariant}"
    fingerprint = f"{file.header_sha256} {identity.build} {identity.isa} {settings}"
    session = Session.over(context)
    return Backbone(model, context, session, dispatcher, exchange, contract, identity, batch_invariant, fingerprint)
