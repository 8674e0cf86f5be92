"""One context of the engine: batches of several sequences through the layers that its model holds.

A step either happens or leaves no trace: when the exchange fails in the middle of a graph, every sequence is as it
was before the call. Attention caches drop the new positions; recurrent state cannot be cut, so models that have
any keep copies of it while an exchange computes (:mod:`orchestrator.engine.rollback`).

Each sequence has a buffer of its own, filled in order of its positions: attention adds up in that order, so a
sequence's bytes cannot depend on what else lived in the cache. In a shared buffer a sequence would go on in cells
that an earlier one left free in front of it, out of order.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

import numpy as np

from bindings.handles import ABORTED, ContextHandle, ContextOptions, HookHandle, NativeError
from bindings.library import last_log_line
from bindings.nextn import HiddenRows
from orchestrator.dispatch.exchange import RowExchange
from orchestrator.engine.hook import GraphHook
from orchestrator.engine.model import Model
from orchestrator.engine.rollback import Rollback
from orchestrator.errors import ComputeError, InputError
from orchestrator.ring.steps import Clear, Copy, Keep, KvOperation, Remove, Restore, Shift, TokenBatch
from orchestrator.types import Contract, FloatArray, LayerDescriptor

INVARIANT_ROWS = 63
"""Most rows of a micro-batch at which the CPU's kernels treat each row alone (64 switches flash attention's)."""

_BATCH_TOKENS = 512
_NO_SLOT = 1  # llama_decode: the KV cache is full


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step gave: [n_outputs, n_vocab] logits from the last stage, or the boundary for the next one.

    Of a model that embeds, ``logits`` holds the embeddings of the tokens, [n_outputs, n_embd]. ``hidden`` is there
    where :meth:`Context.keep_hidden` asked for it: a row for each token, [n_tokens, n_embd].
    """

    logits: FloatArray | None
    boundary: bytes
    hidden: FloatArray | None = None


class Context:
    """A context of ``model`` for ``n_sequences`` sequences of up to ``n_ctx`` tokens; closed before the model.

    ``exchange`` computes the experts, or nobody but us does. With ``batch_invariant`` (the default) flash attention
    is on and a micro-batch has at most 63 rows, so that logits do not depend on how tokens are grouped into steps;
    the model must not be repacked either. A model that reads the whole text at once gets it as one micro-batch.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int,
        n_sequences: int = 1,
        n_ubatch: int = INVARIANT_ROWS,
        n_batch: int | None = None,
        n_threads: int = 1,
        exchange: RowExchange | None = None,
        contract: Contract = Contract.EXACT,
        batch_invariant: bool = True,
    ) -> None:
        if min(n_ctx, n_ubatch, n_threads, n_sequences) < 1:
            raise InputError("context size, micro-batch size, sequences and threads must be at least 1")
        if batch_invariant:
            n_ubatch = min(n_ubatch, INVARIANT_ROWS)
        if model.reads_whole_text:
            n_ubatch = n_ctx
        self.model = model
        self.n_sequences = n_sequences
        self._exchange = exchange
        needs_hook = exchange is not None or not model.is_whole
        self._hook = GraphHook(exchange, contract) if needs_hook else None
        keeps_copies = model.is_hybrid and exchange is not None
        has_twin = keeps_copies and n_sequences == 1
        slots = 2 if has_twin else n_sequences
        # a recurrent memory needs micro-batches that are a multiple of its sequences
        n_ubatch = max(n_ubatch // slots * slots, slots)
        self.n_batch = n_batch or max(n_ubatch, _BATCH_TOKENS // n_ubatch * n_ubatch)
        self.n_ubatch = min(n_ubatch, self.n_batch)
        options = ContextOptions(
            n_ctx=n_ctx * n_sequences,
            n_batch=self.n_batch,
            n_ubatch=self.n_ubatch,
            n_threads=n_threads,
            n_sequences=slots,
            unified=has_twin,
            flash_attention=True if batch_invariant else None,
            embeddings=model.embeds,
        )
        try:
            self._context = ContextHandle(model.handle, options, self._hook.handle if self._hook else None)
        except NativeError as error:
            if self._hook:
                self._hook.close()
            raise ComputeError(f"{model.path}: {error}") from error
        self._hidden: HiddenRows | None = None
        self._rollback: Rollback | None = None
        if keeps_copies:
            self._rollback = Rollback(self._context, has_twin=has_twin, spans_steps=not model.has_window)
        self.n_ctx = min(self._context.n_ctx_sequence, n_ctx)
        self.can_shift = self._context.has_memory and self._context.can_shift()
        self.descriptors: tuple[LayerDescriptor, ...] = self._hook.descriptors() if self._hook else ()

    def close(self) -> None:
        """Free the context and its caches."""
        self._context.close()
        if self._hook:
            self._hook.close()

    def __enter__(self) -> Context:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def decode(self, batch: TokenBatch, boundary: bytes = b"") -> Outcome:
        """Run one batch; ``boundary`` comes from the stage before (then at most :attr:`n_batch` tokens at once).

        On any error (the exchange's own, or :class:`ComputeError`) all sequences are as before the call.
        """
        self._check(batch)
        self._settle()
        outcomes = self._step(batch, boundary)
        if len(outcomes) == 1:
            return outcomes[0]
        rows = [outcome.logits for outcome in outcomes if outcome.logits is not None]
        hidden = [outcome.hidden for outcome in outcomes if outcome.hidden is not None]
        return Outcome(np.concatenate(rows) if rows else None, b"", np.concatenate(hidden) if hidden else None)

    def keep_hidden(self, keep: bool) -> None:
        """Give out the hidden rows of all tokens with each step from now on, or no longer; logits stay the same.

        They are what the model's prediction layers go on from (:mod:`orchestrator.engine.prediction`). Raises
        :class:`InputError` for a model without any and for layers that do not hold the output.
        """
        if keep and (not self.model.prediction_layers or not self.model.has_output):
            raise InputError(f"{self.model.path} has no prediction layers, or not here")
        if keep and self._hidden is None:
            self._hidden = HiddenRows(self._context)
        elif not keep and self._hidden is not None:
            self._hidden.drop()
            self._hidden = None

    @property
    def is_plain(self) -> bool:
        """Whether a step is one call of the engine and gives logits or a boundary alone."""
        return self._exchange is None and self._hidden is None

    @property
    def handles(self) -> tuple[ContextHandle, HookHandle | None]:
        """The engine's own context, and its hook where layers are missing."""
        return self._context, self._hook.handle if self._hook else None

    def failed(self, status: int, batch: TokenBatch) -> ComputeError:
        """Remove what a step left that ended with this status of ``llama_decode``; return the error to raise."""
        error = _explain(status)
        self._remove(batch)
        return error

    def apply(self, operation: KvOperation) -> bool:
        """Change the caches; False (and nothing changed) where this model's memory cannot do it.

        After a failed step this may have to decode again what the step took along, and raise as :meth:`decode`.
        """
        if self._rollback is not None:
            self._make_way(operation, self._rollback)
        context = self._context
        match operation:
            case Remove(sequence, first, last):
                return context.remove(sequence, -1 if first == 0 and last == -1 else first, last)
            case Copy(source, destination, first, last):
                return self._copy(source, destination, first, last)
            case Keep(sequence):  # the engine's own seq_keep looks into that sequence's buffer only
                for other in range(self.n_sequences):
                    if other != sequence:
                        context.remove(other, -1, -1)
            case Shift(sequence, first, last, delta):
                if not self.can_shift:
                    return False
                context.shift(sequence, first, last, delta)
            case Clear():
                context.clear()
            case Restore(sequence, state):
                try:
                    context.restore(sequence, state)
                except NativeError as error:
                    raise InputError(str(error)) from error
        return True

    def save(self, sequence: int) -> bytes:
        """Return a sequence's state for :class:`Restore` in a context made alike; may raise as :meth:`decode`."""
        self._settle()
        try:
            return self._context.save(sequence)
        except NativeError as error:
            raise ComputeError(str(error)) from error

    def length(self, sequence: int) -> int:
        """Return how many positions a sequence has (its highest plus one)."""
        length = self._context.last_position(sequence) + 1
        return length if self._rollback is None else max(length, self._rollback.length(sequence))

    def graph(self) -> list[tuple[str, str]]:
        """Return (op, name) of the nodes of the last graph, in order of computation; only of a hooked context."""
        return self._hook.handle.graph() if self._hook else []

    def _check(self, batch: TokenBatch) -> None:
        if len(batch) > self.n_batch and not self.model.is_whole:
            raise InputError(f"a batch of {len(batch)} tokens; at most {self.n_batch} fit")
        if not self._context.has_memory and len(batch) > self.n_ubatch:
            raise InputError(f"{self.model.architecture} takes a text at once, at most {self.n_ubatch} tokens")
        tokens, sequences = batch.tokens.tolist(), batch.sequences.tolist()  # of one token a tenth of numpy's time
        if not 0 <= min(tokens) <= max(tokens) < self.model.n_vocab:
            raise InputError(f"token ids must be from 0 to {self.model.n_vocab - 1}")
        if not 0 <= min(sequences) <= max(sequences) < self.n_sequences:
            raise InputError(f"sequence ids must be from 0 to {self.n_sequences - 1}")

    def _step(self, batch: TokenBatch, boundary: bytes) -> list[Outcome]:
        """Run a batch, or leave no trace of it."""
        if self._rollback is not None:
            self._rollback.protect(batch.starts())
        try:
            outcomes = [self._run(part, boundary) for part in batch.split(self.n_batch)]
        except BaseException:
            if self._exchange is not None:
                self._exchange.abort_step()
            if self._rollback is not None:
                self._rollback.undo()
            else:
                self._remove(batch)
            raise
        if self._rollback is not None:
            self._rollback.done(batch, boundary)
        return outcomes

    def _remove(self, batch: TokenBatch) -> None:
        for sequence, start in batch.starts().items():
            self._context.remove(sequence, start if start else -1, -1)

    def _settle(self) -> None:
        """Decode again what a failed step took along with it."""
        while self._rollback is not None and self._rollback.owed:
            batch, boundary = self._rollback.owed[0]
            self._step(batch, boundary)
            self._rollback.paid()

    def _make_way(self, operation: KvOperation, rollback: Rollback) -> None:
        """Have the sequences as they should be before an operation, and copies of them made anew after it."""
        match operation:
            case Clear():
                rollback.clear()
            case Remove(sequence, 0, -1) if rollback.drop(sequence):
                pass
            case _:
                self._settle()
        if rollback.owed:
            return  # the copies are still needed
        rollback.forget()

    def _run(self, batch: TokenBatch, boundary: bytes) -> Outcome:
        if self._exchange is not None:
            self._exchange.begin_step()
        self._hand_over(batch, boundary)
        status = self._context.decode()
        failure = self._hook.take_failure() if self._hook else None
        if failure is not None:
            raise failure
        if status != 0 or (self._hook is not None and not self._hook.handle.was_fed()):
            raise _explain(status)
        if not self.model.has_output:
            return Outcome(None, self._hook.handle.left() if self._hook else b"")
        hidden = None if self._hidden is None else self._hidden.take(len(batch))
        if not batch.n_outputs:
            return Outcome(None, b"", hidden)
        # without a memory, and of embeddings, the engine gives every row, whatever was wanted
        n = batch.n_outputs if self._context.has_memory and not self.model.embeds else len(batch)
        rows = (
            self._context.embeddings(n, self.model.n_embd)
            if self.model.embeds
            else self._context.logits(n, self.model.n_vocab)
        )
        return Outcome(rows if n == batch.n_outputs else rows[batch.outputs != 0], b"", hidden)

    def _hand_over(self, batch: TokenBatch, boundary: bytes) -> None:
        if self._hook is not None:
            self._hook.handle.feed(boundary)
        outputs = batch.outputs if self.model.has_output else 0
        self._context.fill(batch.tokens, batch.positions, batch.sequences, outputs)  # type: ignore[arg-type]

    def _copy(self, source: int, destination: int, first: int, last: int) -> bool:
        """Copy as a whole and then cut: between buffers the engine can do no less, and would end the process."""
        length = self.length(source)
        cuts = [(last, -1)] * (0 <= last < length) + [(0, first)] * (first > 0)
        if source == destination:
            return True
        if cuts and self.model.is_hybrid:
            return False
        self._context.remove(destination, -1, -1)
        self._context.copy(source, destination)
        for cut in cuts:
            self._context.remove(destination, *cut)
        return True


def _explain(status: int) -> ComputeError:
    """Make the error of a step that came to nothing: with status 0 the engine did what it could."""
    if status == 0:
        return ComputeError("the boundary from the stage before is not the one that these tokens need")
    if status == _NO_SLOT:
        return ComputeError("the KV cache has no room for these tokens")
    cause = "the computation was aborted" if status == ABORTED else f"llama_decode gave {status}"
    return ComputeError(f"decode failed: {last_log_line(cause)}")
