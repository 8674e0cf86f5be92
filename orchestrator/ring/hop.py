"""One range of layers as the ring sees it: items in, items out, in one order. PURE: computing and time are given.

The same code runs in a stage worker and in a gateway that holds layers itself. Every item that comes in goes out:
a step as a step, an outcome or a fault, an operation as an operation, so that nobody behind loses count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import numpy as np

from orchestrator.errors import InputError, LinkcppError, ProtocolError
from orchestrator.ring.items import HiddenOutcome, Item, batch_of, operation_of
from orchestrator.ring.layout import LayerRange
from orchestrator.ring.steps import (
    Clear,
    Copy,
    Forget,
    KvOperation,
    Recall,
    Remove,
    Restore,
    RingOperation,
    Save,
    TokenBatch,
)
from orchestrator.types import FloatArray
from orchestrator.wire.boundary import BoundaryCodec, decode, encode
from orchestrator.wire.ring_codec import FramedItem, FramedStep
from orchestrator.wire.ring_messages import Fault, FaultKind, Operate, Outcome, Step

_MOST_MICROSECONDS = 0xFFFFFFFF

_MOST_LOGITS = 240 << 20
"""Bytes of one step's logits: what a frame can carry, see wire/frame.py."""

_FEW = 16
"""Up to so many tokens Python's min and max are quicker than numpy's fixed cost, by far where caches are cold."""


class StageOutput(Protocol):
    """What a decode gave: logits behind the last layer, the boundary for the next range elsewhere."""

    @property
    def logits(self) -> FloatArray | None:
        """[n_outputs, n_vocab], None where none was wanted or this is not the last range."""

    @property
    def boundary(self) -> bytes:
        """What crosses the cut."""

    @property
    def hidden(self) -> FloatArray | None:
        """[n_tokens, width], None where it is not kept."""


class FramedRun(NamedTuple):
    """What :meth:`StageCompute.run_frame` did."""

    item: FramedItem | Outcome
    n_tokens: int
    microseconds: int


class StageCompute(Protocol):
    """The layers in memory (:class:`orchestrator.engine.stage.StageContext`, or a twin in tests)."""

    @property
    def layers(self) -> LayerRange:
        """Which layers of the model."""

    @property
    def n_layer(self) -> int:
        """Layers of the whole model."""

    @property
    def n_vocab(self) -> int:
        """Tokens of the vocabulary."""

    @property
    def n_sequences(self) -> int:
        """Sequences that there is room for."""

    @property
    def n_batch(self) -> int:
        """Most tokens of one step."""

    def decode(self, batch: TokenBatch, boundary: bytes) -> StageOutput:
        """Compute one step; on any error the caches are as before."""

    def run_frame(self, step: FramedStep, minor: int | None) -> FramedRun | None:
        """Compute a step from frame to frame; None (and nothing done) where :meth:`decode` has to.

        ``minor`` is the version of the frame to be made; None: it is not to be sent, and only an outcome is of use.
        On any error the caches are as before.
        """

    def rehearse(self, step: FramedStep) -> None:
        """Do what :meth:`run_frame` does before it computes, and nothing that lasts."""

    def apply(self, operation: KvOperation) -> bool:
        """Change the caches; False where this model's memory cannot."""

    def save(self, sequence: int) -> bytes:
        """Return a sequence's state."""


class Hop:
    """A range of layers and what it keeps between two items. Items are run by one thread at a time.

    ``clock`` gives nanoseconds; ``saved_limit`` bounds the bytes of saved states; ``on_defect`` hears of errors that
    are nobody's but ours.
    """

    def __init__(
        self,
        compute: StageCompute,
        *,
        clock: Callable[[], int],
        saved_limit: int = 1 << 30,
        on_defect: Callable[[Exception], None] = lambda _error: None,
    ) -> None:
        self.compute = compute
        self.layers = compute.layers
        self.taken = 0  # number of the last item that came
        self.passed = 0  # number of the last item that was done with
        self.steps = 0
        self.tokens = 0
        self.microseconds = 0
        self._clock = clock
        self._saved_limit = saved_limit
        self._saved: dict[int, bytes] = {}
        self._cancelled: set[int] = set()
        self._on_defect = on_defect

    @property
    def saved_bytes(self) -> int:
        """Bytes of saved states."""
        return sum(map(len, self._saved.values()))

    def cancel(self, numbers: Iterable[int]) -> None:
        """Give up steps that have not come yet; any thread may call this."""
        self._cancelled.update(number for number in numbers if number > self.taken)

    def clear(self) -> None:
        """Forget all sequences and all that is saved, for a new ring."""
        self._cancelled.clear()
        self._saved.clear()
        self.taken = self.passed = 0
        self.compute.apply(Clear())

    def rehearse(self, step: FramedStep) -> None:
        """Do what :meth:`run_frame` does before it computes, for the sake of the processor's caches alone."""
        self.compute.rehearse(step)

    def run(self, item: Item) -> Item:
        """Do what an item asks and return what goes on to the next layers. Raises nothing that the item causes."""
        self._take(item.sequence)
        if type(item) is Step:
            passed = self._step(item)
        elif isinstance(item, Operate):
            passed = self._operate(item)
        elif isinstance(item, Fault):
            passed = Fault(item.sequence, self.layers.last, item.kind, item.first, item.last, item.text)
        else:
            raise InputError(f"an outcome came to {self.layers}, before the last layer")
        self.passed = item.sequence
        return passed

    def run_frame(self, step: FramedStep, minor: int | None) -> Item | FramedItem:
        """Do what :meth:`run` does, without Python where that is possible.

        ``minor`` is the version of the protocol in which the result is sent, None where it is not. Raises
        :class:`ProtocolError` where the frame cannot be read.
        """
        self._take(step.sequence)
        passed = self._frame(step, minor) or self._step(step.decode())
        self.passed = step.sequence
        return passed

    def _take(self, number: int) -> None:
        if number <= self.taken:
            raise InputError(f"item {number} came behind item {self.taken}")
        self.taken = number

    def _frame(self, step: FramedStep, minor: int | None) -> Item | FramedItem | None:
        number = step.sequence
        if number in self._cancelled:
            return None
        try:
            done = self.compute.run_frame(step, minor)
        except Exception as error:
            return self._failed(number, error)
        if done is None:
            return None
        self._count(done.n_tokens, done.microseconds)
        return done.item

    def _count(self, tokens: int, microseconds: int) -> None:
        self.steps += 1
        self.tokens += tokens
        self.microseconds += microseconds

    def _step(self, step: Step) -> Item:
        number = step.sequence
        if number in self._cancelled:
            self._cancelled.discard(number)
            return self._fault(number, FaultKind.CANCELLED, "cancelled")
        try:
            batch = batch_of(step)
            self._check(batch)
            boundary = decode(step.codec, step.boundary)
            begin = self._clock()
            output = self.compute.decode(batch, boundary)
            spent = min((self._clock() - begin) // 1000, _MOST_MICROSECONDS)
        except Exception as error:
            return self._failed(number, error)
        self._count(len(batch), spent)
        layer, times = self.layers.last, (*step.spent, spent)
        if layer == self.compute.n_layer:
            logits = output.logits
            if logits is None:
                logits = np.empty((0, self.compute.n_vocab), np.float32)
            if output.hidden is not None:
                return HiddenOutcome(number, layer, times, logits, output.hidden)
            return Outcome(number, layer, times, logits)
        codec, boundary = step.codec, output.boundary
        if codec is not BoundaryCodec.F32:
            codec, boundary = encode(boundary)
        return Step(number, layer, step.tokens, step.positions, step.sequences, step.outputs, times, boundary, codec)

    def _failed(self, number: int, error: Exception) -> Fault:
        """Make the fault of a step; a defect must not take the stage from its other steps."""
        if isinstance(error, (InputError, ProtocolError)):
            return self._fault(number, FaultKind.REFUSED, str(error))
        if isinstance(error, (LinkcppError, MemoryError)):
            return self._fault(number, FaultKind.FAILED, str(error) or "out of memory")
        self._on_defect(error)
        return self._fault(number, FaultKind.FAILED, f"defect: {type(error).__name__}: {error}")

    def _fault(self, number: int, kind: FaultKind, text: str) -> Fault:
        return Fault(number, self.layers.last, kind, self.layers.first, self.layers.last, text)

    def _check(self, batch: TokenBatch) -> None:
        """Hold what a peer sent against our sizes: the engine ends the process over some of these."""
        n = len(batch)
        if n > self.compute.n_batch:
            raise InputError(f"a step of {n} tokens; at most {self.compute.n_batch} fit")
        if n <= _FEW:
            sequences, positions = batch.sequences.tolist(), batch.positions.tolist()
            lowest, highest, first = min(sequences), max(sequences), min(positions)
        else:
            lowest, highest = int(batch.sequences.min()), int(batch.sequences.max())
            first = int(batch.positions.min())
        self._check_sequence(lowest)
        self._check_sequence(highest)
        if first < 0:
            raise InputError("positions count from 0")
        if self.layers.last == self.compute.n_layer and n > 1:
            size = 4 * batch.n_outputs * self.compute.n_vocab
            if size > _MOST_LOGITS:
                raise InputError(
                    f"{size >> 20} MiB of logits, more than one answer carries: want those of fewer tokens"
                )

    def _check_sequence(self, sequence: int) -> None:
        if not 0 <= sequence < self.compute.n_sequences:
            raise InputError(f"sequence {sequence}: there are {self.compute.n_sequences}")

    def _operate(self, item: Operate) -> Operate:
        done, text = item.done, item.text
        try:
            if not self._apply(operation_of(item)):
                done, text = False, text or f"{self.layers}: this model's memory cannot do it"
        except (LinkcppError, MemoryError) as error:
            done, text = False, text or f"{self.layers}: {error}"
        except Exception as error:
            self._on_defect(error)
            done, text = False, text or f"{self.layers}: defect: {type(error).__name__}: {error}"
        return Operate(item.sequence, self.layers.last, item.code, item.arguments, done, text)

    def _apply(self, operation: RingOperation) -> bool:
        compute = self.compute
        if isinstance(operation, Forget):
            self._saved.pop(operation.key, None)
            return True
        if isinstance(operation, Copy):
            self._check_sequence(operation.destination)
            self._check_sequence(operation.source)
            if (operation.first, operation.last) != (0, -1):
                # Sequences have buffers of their own, between which the engine copies all or nothing.
                raise InputError("only whole sequences can be copied; remove what is too much afterwards")
        elif not isinstance(operation, Clear):
            self._check_sequence(operation.sequence)
        if isinstance(operation, Save):
            state = compute.save(operation.sequence)
            held = self.saved_bytes - len(self._saved.get(operation.key, b""))
            if held + len(state) > self._saved_limit:
                raise InputError(f"{len(state)} more bytes of saved states: over the limit of {self._saved_limit}")
            self._saved[operation.key] = state
            return True
        if isinstance(operation, Recall):
            saved = self._saved.get(operation.key)
            if saved is None:
                raise InputError(f"nothing is saved under {operation.key}")
            compute.apply(Remove(operation.sequence))
            return compute.apply(Restore(operation.sequence, saved))
        return compute.apply(operation)
