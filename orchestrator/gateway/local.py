"""The backend of an engine in this process, with its experts here or on the workers of a star."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Final

from orchestrator.dispatch.dispatcher import Dispatcher
from orchestrator.dispatch.exchange import RowExchange
from orchestrator.dispatch.native import NativeStar
from orchestrator.engine.context import Context
from orchestrator.errors import EngineError, LinkcppError, StepDroppedError
from orchestrator.gateway.backend import BackendFacts, Invariance, StepResult
from orchestrator.ring.steps import Copy, Remove, Restore, TokenBatch
from orchestrator.types import ExpertBatch, FloatArray

logger = logging.getLogger(__name__)


WATCH_MS: Final = 50
"""How long an unwanted step goes on at most before somebody looks, where native code carries the rows."""


class WatchedExchange:
    """Carries rows as another exchange does, and ends a step that nobody wants any more at a MoE layer soon after.

    ``native`` is the other exchange's native code, which gives way to this class now and then.
    """

    def __init__(self, exchange: RowExchange) -> None:
        self._exchange = exchange
        self.native: NativeStar | None = getattr(exchange, "native", None)
        if self.native is not None:
            self.native.give_way(WATCH_MS)
        self.wanted: Callable[[], bool] = lambda: True

    def begin_step(self) -> None:
        """Make ready before each ``llama_decode``."""
        self._exchange.begin_step()

    def dispatch(self, batch: ExpertBatch) -> None:
        """Send the rows of a call, if the step is still wanted; else raise :class:`StepDroppedError`."""
        if not self.wanted():
            raise StepDroppedError("the step was cancelled")
        self._exchange.dispatch(batch)

    def combine(self, layer: int, call: int, out: FloatArray) -> None:
        """Wait for the results of the call."""
        self._exchange.combine(layer, call, out)

    def abort_step(self) -> None:
        """Forget what is under way after an error."""
        self._exchange.abort_step()


class LocalBackend:
    """A :class:`orchestrator.gateway.backend.Backend` over one context; computes a step when it is submitted.

    ``exchange`` is what the context computes its experts with, None where it has them; ``dispatcher`` is looked after
    while nothing is under way. The context belongs to the caller.
    """

    def __init__(
        self,
        context: Context,
        *,
        exchange: WatchedExchange | None = None,
        dispatcher: Dispatcher | None = None,
        invariance: Invariance = Invariance.SEVERAL,
    ) -> None:
        self._context = context
        self._exchange = exchange
        self._dispatcher = dispatcher
        self._results: deque[StepResult] = deque()
        self._tickets = 0
        self._saved: dict[int, bytes] = {}
        self.facts = BackendFacts(
            n_vocab=context.model.n_vocab,
            n_ctx=context.n_ctx,
            n_sequences=context.n_sequences,
            n_chunk=context.n_ubatch,
            n_step=context.n_ubatch,  # more would only make a step longer
            cuttable=not context.model.is_hybrid,
            invariance=invariance,
            hidden=context.model.prediction_layers > 0,
        )

    def keep_hidden(self, keep: bool) -> None:
        """Give the hidden rows with each step from now on, or no longer; only where ``facts.hidden`` says so."""
        self._context.keep_hidden(keep)

    def submit(self, batch: TokenBatch, wanted: Callable[[], bool]) -> int:
        """Compute a step; see :class:`Backend`."""
        self._tickets += 1
        if self._exchange is not None:
            self._exchange.wanted = wanted
        try:
            outcome = self._context.decode(batch)
            result = StepResult(self._tickets, outcome.logits, hidden=outcome.hidden)
        except LinkcppError as error:
            result = StepResult(self._tickets, error=error, resume=batch.starts())
        # A defect of ours: what it left in the caches is not known.
        except Exception as error:
            logger.exception("a step met a defect")
            failure = EngineError(f"the engine failed unexpectedly: {type(error).__name__}: {error}")
            for sequence in batch.starts():
                self._context.apply(Remove(sequence))
            result = StepResult(self._tickets, error=failure, resume=dict.fromkeys(batch.starts(), 0))
        self._results.append(result)
        return self._tickets

    def collect(self) -> StepResult:
        """Return the end of the oldest step."""
        return self._results.popleft()

    def cancel(self, ticket: int) -> None:
        """Do nothing: a step is over when it was submitted, or ended because ``wanted`` said so."""

    def apply(self, operation: Remove | Copy) -> bool:
        """Change the caches."""
        return self._context.apply(operation)

    def save(self, sequence: int, key: int) -> int | None:
        """Keep a copy of a sequence in this process's memory."""
        state = self.dump(sequence)
        if state is None:
            return None
        self._saved[key] = state
        return len(state)

    def recall(self, sequence: int, key: int) -> bool:
        """Put a copy into a sequence."""
        state = self._saved.get(key)
        return state is not None and self.load(sequence, state)

    def forget(self, key: int) -> None:
        """Drop a copy."""
        self._saved.pop(key, None)

    def dump(self, sequence: int) -> bytes | None:
        """Return a sequence's state."""
        try:
            return self._context.save(sequence)
        except LinkcppError as error:
            logger.warning("a sequence could not be saved: %s", error)
            return None

    def load(self, sequence: int, state: bytes) -> bool:
        """Put a dumped state into a sequence."""
        self._context.apply(Remove(sequence))
        try:
            return self._context.apply(Restore(sequence, state))
        except LinkcppError as error:
            logger.warning("a saved sequence could not be restored: %s", error)
            self._context.apply(Remove(sequence))
            return False

    def check(self) -> None:
        """Ping the workers and bring lost ones back."""
        if self._dispatcher is not None:
            self._dispatcher.check()

    def close(self) -> None:
        """Drop the copies."""
        self._saved.clear()
