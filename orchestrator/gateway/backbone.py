"""Put a backbone together: the model without its experts, its session, and the workers that hold the experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

from orchestrator.dispatch.dispatcher import Dispatcher
from orchestrator.engine.context import INVARIANT_ROWS
from orchestrator.engine.identity import engine_identity
from orchestrator.engine.model import Model
from orchestrator.engine.session import Session
from orchestrator.gateway.gateway import Gateway
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

    ``chunk`` is the size of the micro-batches.
    """

    model: Model
    session: Session
    dispatcher: Dispatcher | None
    contract: Contract
    identity: EngineIdentity
    chunk: int
    batch_invariant: bool

    def gateway(self, *, reuse_prefix: bool = True) -> Gateway:
        """Make the gateway of this backbone; see :class:`Gateway`. Not started."""
        return Gateway(
            self.model,
            self.session,
            n_vocab=self.model.n_vocab,
            chunk=self.chunk,
            can_truncate=not self.model.is_hybrid,
            reuse_prefix=reuse_prefix and self.batch_invariant,
            idle=None if self.dispatcher is None else self.dispatcher.check,
        )

    def close(self, gateway: Gateway | None = None) -> None:
        """End the gateway's requests, say goodbye to the workers, free context and weights.

        A step that waits for a worker which will not answer is woken by closing its connections. Should a step not
        end at all, context and weights stay: freeing them under it would end the process in a crash.
        """
        stopped = gateway is None or gateway.close(CLOSE_SECONDS)
        if self.dispatcher is not None:
            self.dispatcher.close()
        if stopped or gateway is None or gateway.close(CLOSE_SECONDS):
            self.session.close()
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
    n_threads: int = 1,
    batch_invariant: bool = True,
    timeout: float = 60.0,
    progress: Callable[[float], None] | None = None,
) -> Backbone:
    """Open a model over ``workers`` ("host:port" each), or alone in this process where there are none.

    ``n_ctx`` None takes :data:`DEFAULT_CONTEXT` tokens or what the model was trained for, if that is less.
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
                workers, contract, identity, model_sha256=file.header_sha256, timeout=timeout, client="gateway"
            )
            undo.callback(dispatcher.close)
            dispatcher.connect()  # before the weights are read: an unreachable worker is known at once
        model = Model.open(path, without_experts=bool(workers), progress=progress)
        undo.callback(model.close)
        rows = INVARIANT_ROWS if batch_invariant else STOCK_ROWS
        if model.is_hybrid:
            rows -= rows % 2  # the session keeps a backup sequence of recurrent state: a multiple of two sequences
        session = Session(
            model,
            n_ctx=n_ctx or min(DEFAULT_CONTEXT, model.n_ctx_train or DEFAULT_CONTEXT),
            n_ubatch=rows,
            n_threads=n_threads,
            exchange=dispatcher,
            contract=contract,
            batch_invariant=batch_invariant,
        )
        undo.callback(session.close)
        if dispatcher is not None:
            dispatcher.describe(session.descriptors)
        undo.pop_all()
    return Backbone(model, session, dispatcher, contract, identity, rows, batch_invariant)
