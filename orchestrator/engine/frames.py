"""Steps of a ring from frame to frame in native code, over the context of one range of layers."""

from __future__ import annotations

from bindings.hop import HopFailed, HopHandle, HopSizes
from orchestrator.engine.context import Context
from orchestrator.engine.native import is_available
from orchestrator.ring.hop import FramedRun
from orchestrator.ring.items import batch_of
from orchestrator.ring.layout import LayerRange
from orchestrator.wire.messages import MessageType
from orchestrator.wire.ring_codec import FramedItem, FramedStep, spent_of
from orchestrator.wire.ring_messages import Outcome


class FrameRunner:
    """What runs plain steps of ``layers`` (:meth:`orchestrator.ring.hop.StageCompute.run_frame`)."""

    def __init__(self, context: Context, layers: LayerRange) -> None:
        model = context.model
        self._context = context
        self._layers = layers
        self._is_end = layers.last == model.n_layer
        self._hop = HopHandle(
            *context.handles,
            HopSizes(
                first=layers.first,
                last=layers.last,
                is_end=self._is_end,
                n_vocab=model.n_vocab,
                n_sequences=context.n_sequences,
                n_batch=context.n_batch,
            ),
        )

    @classmethod
    def of(cls, context: Context, layers: LayerRange) -> FrameRunner | None:
        """Make one; None where every step needs Python: for an exchange, or for what the outputs mean."""
        plain = context.is_plain and not context.model.embeds and not context.model.reads_whole_text
        return cls(context, layers) if plain and is_available() else None

    def run(self, step: FramedStep, minor: int | None) -> FramedRun | None:
        """Compute a step; None (and nothing done) where it is not plain. On any error the caches are as before."""
        if not self._context.is_plain or (minor is None and not self._is_end):
            return None
        hop = self._hop
        try:
            result = hop.step(step.frame, minor)
        except HopFailed as failed:
            raise self._context.failed(failed.status, batch_of(step.decode())) from None
        if result is None:
            return None
        item: FramedItem | Outcome
        if minor is None:
            item = Outcome(step.sequence, self._layers.last, spent_of(hop.head(result)), hop.logits(result))
        else:
            kind = MessageType.OUTCOME if self._is_end else MessageType.STEP
            item = FramedItem(kind, step.sequence, hop.buffers(result))
        return FramedRun(item, result.n_tokens, result.spent_us)

    def rehearse(self, step: FramedStep) -> None:
        """Do all of :meth:`run` but compute."""
        self._hop.rehearse(step.frame)
