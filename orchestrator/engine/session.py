"""One context of the engine with one sequence: decode tokens, get logits, take steps back.

A step either happens or leaves no trace: when the exchange fails in the middle of a graph, the KV cache is as it
was before the call. Attention caches drop the new positions; recurrent state cannot be cut, so models that have
any keep a copy-on-write backup sequence (engine: ``llama_memory_seq_cp``).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import numpy as np

from bindings.handles import ABORTED, ContextHandle, ContextOptions, NativeError
from bindings.library import last_log_line
from orchestrator.dispatch.exchange import RowExchange
from orchestrator.engine.model import Model
from orchestrator.engine.moe_hook import MoeHook
from orchestrator.errors import ComputeError, InputError, RequestError
from orchestrator.types import Contract, FloatArray, LayerDescriptor

INVARIANT_ROWS = 63
"""Most rows of a micro-batch at which the CPU's kernels treat each row alone (64 switches flash attention's)."""

_NO_SLOT = 1  # llama_decode: the KV cache is full
_MAIN, _BACKUP = 0, 1


class Session:
    """A context of ``model``; closed before the model. ``exchange`` computes the experts, or nobody but us does.

    With ``batch_invariant`` (the default) flash attention is on and a micro-batch has at most 63 rows, so that
    logits do not depend on how tokens are grouped into steps; the model must not be repacked either.
    """

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
        if n_ctx < 1 or n_ubatch < 1 or n_threads < 1:
            raise InputError("context size, micro-batch size and threads must be at least 1")
        if batch_invariant:
            n_ubatch = min(n_ubatch, INVARIANT_ROWS)
        self.model = model
        self.position = 0
        self._exchange = exchange
        self._hook = MoeHook(exchange, contract) if exchange is not None else None
        self._keeps_backup = model.is_hybrid and exchange is not None
        n_sequences = 2 if self._keeps_backup else 1
        # a recurrent memory needs micro-batches that are a multiple of its sequences
        n_ubatch = max(n_ubatch // n_sequences * n_sequences, n_sequences)
        self._n_batch = n_batch or max(n_ubatch, 512 // n_ubatch * n_ubatch)
        options = ContextOptions(
            n_ctx=n_ctx,
            n_batch=self._n_batch,
            n_ubatch=min(n_ubatch, self._n_batch),
            n_threads=n_threads,
            n_sequences=n_sequences,
            flash_attention=True if batch_invariant else None,
        )
        try:
            self._context = ContextHandle(model.handle, options, self._hook.handle if self._hook else None)
        except NativeError as error:
            if self._hook:
                self._hook.close()
            raise ComputeError(f"{model.path}: {error}") from error
        self.n_ctx = min(self._context.n_ctx, n_ctx)
        self.descriptors: tuple[LayerDescriptor, ...] = self._hook.descriptors() if self._hook else ()

    def close(self) -> None:
        """Free the context and its KV cache."""
        self._context.close()
        if self._hook:
            self._hook.close()

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
        start = self.position
        self._check(tokens)
        logits: list[FloatArray] = []
        if self._keeps_backup:
            self._context.remove(_BACKUP, -1, -1)
            self._context.copy(_MAIN, _BACKUP)
        try:
            for first in range(0, len(tokens), self._n_batch):
                chunk = tokens[first : first + self._n_batch]
                self._step(chunk, all_logits)
                if all_logits:
                    logits.append(self._context.logits(len(chunk), self.model.n_vocab))
        except BaseException:
            if self._exchange is not None:
                self._exchange.abort_step()
            self._take_back(start)
            raise
        if all_logits:
            return logits[0] if len(logits) == 1 else np.concatenate(logits)
        return self._context.logits(1, self.model.n_vocab)

    def truncate(self, position: int) -> bool:
        """Forget everything from ``position`` on; False (and unchanged) if this model's memory cannot."""
        if position >= self.position:
            return True
        if not self._context.remove(_MAIN, position, -1):
            return False
        self.position = position
        return True

    def clear(self) -> None:
        """Forget the whole sequence."""
        self._context.clear()
        self.position = 0

    def graph(self) -> list[tuple[str, str]]:
        """Return (op, name) of the nodes of the last graph, in order of computation; only with an exchange."""
        return self._hook.handle.graph() if self._hook else []

    def _check(self, tokens: Sequence[int]) -> None:
        if not tokens:
            raise InputError("there is nothing to decode")
        if not 0 <= min(tokens) <= max(tokens) < self.model.n_vocab:
            raise InputError(f"token ids must be from 0 to {self.model.n_vocab - 1}")
        if self.position + len(tokens) > self.n_ctx:
            raise RequestError(
                f"{self.position + len(tokens)} tokens do not fit into the context of {self.n_ctx}",
                code="exceed_context_size_error",
            )

    def _step(self, chunk: Sequence[int], every: bool) -> None:
        if self._exchange is not None:
            self._exchange.begin_step()
        status = self._context.decode(chunk, self.position, every=every)
        failure = self._hook.take_failure() if self._hook else None
        if failure is not None:
            raise failure
        if status == _NO_SLOT:
            raise ComputeError("the KV cache has no room for these tokens")
        if status != 0:
            cause = "the computation was aborted" if status == ABORTED else f"llama_decode gave {status}"
            raise ComputeError(f"decode failed: {last_log_line(cause)}")
        self.position += len(chunk)

    def _take_back(self, start: int) -> None:
        if self._keeps_backup:
            self._context.remove(_MAIN, -1, -1)
            self._context.copy(_BACKUP, _MAIN)
        elif start == 0:
            self._context.clear()
        else:
            self._context.remove(_MAIN, start, -1)
        self.position = start
