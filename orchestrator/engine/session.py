"""One sequence on a context: decode tokens, get logits, take steps back."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from orchestrator.dispatch.exchange import RowExchange
from orchestrator.engine.context import INVARIANT_ROWS, Context
from orchestrator.engine.model import Model
from orchestrator.errors import ComputeError, InputError, RequestError
from orchestrator.ring.steps import Clear, Remove, one_sequence
from orchestrator.types import Contract, FloatArray, LayerDescriptor


class Session:
    """A :class:`Context` with one sequence and a position; closed before the model."""

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int,
        n_ubatch: int = INVARIANT_ROWS,
        n_batch: int | None = None,
        n_threads: int = 1,
        exchange: RowExchange | None = None,
        contract: Contract = Contract.EXACT,
        batch_invariant: bool = True,
    ) -> None:
        self.model = model
        self.position = 0
        self._context = Context(
            model,
            n_ctx=n_ctx,
            n_ubatch=n_ubatch,
            n_batch=n_batch,
            n_threads=n_threads,
            exchange=exchange,
            contract=contract,
            batch_invariant=batch_invariant,
        )
        self.n_ctx = self._context.n_ctx

    @classmethod
    def over(cls, context: Context) -> Session:
        """Return the first sequence of a context, which it closes with itself."""
        session = cls.__new__(cls)
        session.model, session.n_ctx, session.position = context.model, context.n_ctx, context.length(0)
        session._context = context
        return session

    @property
    def descriptors(self) -> tuple[LayerDescriptor, ...]:
        """The MoE calls that the exchange computes, in graph order."""
        return self._context.descriptors

    def close(self) -> None:
        """Free the context and its KV cache."""
        self._context.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def decode(self, tokens: Sequence[int], *, all_logits: bool = False) -> FloatArray:
        """Append tokens at :attr:`position`; return logits [n, n_vocab] of all of them or [1, n_vocab] of the last.

        On any error (the exchange's own, :class:`ComputeError`, :class:`RequestError` when the context is full)
        the KV cache and :attr:`position` are as before the call.
        """
        if not tokens:
            raise InputError("there is nothing to decode")
        start = self.position
        if start + len(tokens) > self.n_ctx:
            raise RequestError(
                f"{start + len(tokens)} tokens do not fit into the context of {self.n_ctx}",
                code="exceed_context_size_error",
            )
        logits = self._context.decode(one_sequence(tokens, start, every=all_logits)).logits
        if logits is None:
            raise ComputeError("this model holds no output layer, so there are no logits")
        self.position += len(tokens)
        return logits

    def truncate(self, position: int) -> bool:
        """Forget everything from ``position`` on; False (and unchanged) if this model's memory cannot."""
        if position >= self.position:
            return True
        if not self._context.apply(Remove(0, position)):
            return False
        self.position = position
        return True

    def clear(self) -> None:
        """Forget the whole sequence."""
        self._context.apply(Clear())
        self.position = 0

    def graph(self) -> list[tuple[str, str]]:
        """Return (op, name) of the nodes of the last graph, in order of computation; only with an exchange."""
        return self._context.graph()
