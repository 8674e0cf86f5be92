"""One range of layers in memory: a model that holds only these, and a context for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from orchestrator.dispatch.exchange import RowExchange
from orchestrator.engine.context import INVARIANT_ROWS, Context, Outcome
from orchestrator.engine.frames import FrameRunner
from orchestrator.engine.model import Model
from orchestrator.engine.survey import survey
from orchestrator.errors import ComputeError, InputError, LinkcppError
from orchestrator.ring.hop import FramedRun
from orchestrator.ring.layout import LayerRange, check_cuts
from orchestrator.ring.state import RingFacts
from orchestrator.ring.steps import KvOperation, TokenBatch
from orchestrator.types import Contract, LayerDescriptor
from orchestrator.wire.ring_codec import FramedStep


@dataclass(frozen=True, slots=True)
class StageSizes:
    """What all stages of a ring must be made with alike; see :class:`orchestrator.engine.context.Context`."""

    n_ctx: int
    n_sequences: int = 1
    n_ubatch: int = INVARIANT_ROWS
    n_batch: int | None = None
    batch_invariant: bool = True


class StageContext:
    """The layers of one range (:class:`orchestrator.ring.hop.StageCompute`); a context manager."""

    def __init__(self, model: Model, context: Context, sizes: StageSizes) -> None:
        self.model = model
        self.context = context
        self.sizes = sizes
        self.layers = LayerRange(*model.stage)
        self.n_layer = model.n_layer
        self.n_vocab = model.n_vocab
        self.n_ctx = context.n_ctx
        self.n_sequences = context.n_sequences
        self.n_ubatch = context.n_ubatch
        self.n_batch = context.n_batch
        self._frames = FrameRunner.of(context, self.layers)

    @classmethod
    def open(
        cls,
        path: str | Path,
        layers: LayerRange,
        sizes: StageSizes,
        *,
        n_threads: int = 1,
        repack: bool = False,
        exchange: RowExchange | None = None,
        contract: Contract = Contract.EXACT,
        progress: Callable[[float], None] | None = None,
    ) -> StageContext:
        """Load the layers and make their context; with an ``exchange`` their experts are computed elsewhere.

        Raises:
            InputError: the model has no such layers, or cannot be cut there (with the nearest legal cuts), or the
                file is unusable.
            EngineError: the engine cannot, for another reason.
        """
        without_experts = exchange is not None
        model = Model.open(
            path,
            stage=(layers.first, layers.last),
            without_experts=without_experts,
            repack=repack,
            progress=progress,
        )
        try:
            context = Context(
                model,
                n_ctx=sizes.n_ctx,
                n_sequences=sizes.n_sequences,
                n_ubatch=sizes.n_ubatch,
                n_batch=sizes.n_batch,
                n_threads=n_threads,
                exchange=exchange,
                contract=contract,
                batch_invariant=sizes.batch_invariant,
            )
        except ComputeError as error:
            model.close()
            explain_cut(path, layers, error)
            raise
        except BaseException:
            model.close()
            raise
        return cls(model, context, sizes)

    @property
    def descriptors(self) -> tuple[LayerDescriptor, ...]:
        """The MoE calls of these layers, which the exchange computes, in graph order."""
        return tuple(
            found for found in self.context.descriptors if self.layers.first <= found.layer < self.layers.last
        )

    @property
    def cuttable(self) -> bool:
        """Whether the end of a sequence can be removed."""
        return not self.model.is_hybrid

    @property
    def gives_hidden(self) -> bool:
        """Whether :meth:`Context.keep_hidden` can be asked: these are the last layers before prediction layers."""
        return self.model.has_output and self.model.prediction_layers > 0

    @property
    def shiftable(self) -> bool:
        """Whether positions can be moved."""
        return self.context.can_shift

    @property
    def batch_invariant(self) -> bool:
        """Whether logits do not depend on how tokens are grouped."""
        return self.sizes.batch_invariant

    @property
    def facts(self) -> RingFacts:
        """What the other stages of the ring must have too."""
        return RingFacts(
            n_layer=self.n_layer,
            n_vocab=self.n_vocab,
            n_ctx=self.n_ctx,
            n_sequences=self.n_sequences,
            n_batch=self.n_batch,
            cuttable=self.cuttable,
            shiftable=self.shiftable,
        )

    def decode(self, batch: TokenBatch, boundary: bytes) -> Outcome:
        """Compute one step; on any error the caches are as before."""
        return self.context.decode(batch, boundary)

    def run_frame(self, step: FramedStep, minor: int | None) -> FramedRun | None:
        """Compute a step from frame to frame; None (and nothing done) where :meth:`decode` has to."""
        return None if self._frames is None else self._frames.run(step, minor)

    def rehearse(self, step: FramedStep) -> None:
        """Do what :meth:`run_frame` does before it computes, for the sake of the processor's caches alone."""
        if self._frames is not None:
            self._frames.rehearse(step)

    def apply(self, operation: KvOperation) -> bool:
        """Change the caches; False where this model's memory cannot."""
        return self.context.apply(operation)

    def save(self, sequence: int) -> bytes:
        """Return a sequence's state, of these layers."""
        return self.context.save(sequence)

    def close(self) -> None:
        """Free caches and weights."""
        self.context.close()
        self.model.close()

    def __enter__(self) -> StageContext:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def explain_cut(path: str | Path, layers: LayerRange, error: LinkcppError) -> None:
    """Raise :class:`InputError` with the nearest legal cuts if an illegal cut is why a stage cannot be made.

    It needs the whole model without its experts; where even that cannot be loaded, the engine's words must do.
    """
    try:
        with Model.open(path, without_experts=True) as model:
            cuts = survey(model)
            n_layer = model.n_layer
    except LinkcppError:
        return
    try:
        check_cuts((layers,), cuts, n_layer)
    except InputError as better:
        raise better from error
