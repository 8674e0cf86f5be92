"""The layers that a stage process holds: loading them, freeing them, and whether there is memory for them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

from orchestrator.dispatch.dispatcher import Dispatcher
from orchestrator.engine.facts import file_facts, load_of
from orchestrator.engine.stage import StageContext, StageSizes
from orchestrator.errors import InputError, PlanError
from orchestrator.models.gguf import GgufFile
from orchestrator.models.gguf_writer import Progress
from orchestrator.planner.cost import Measures
from orchestrator.planner.explain import size_text
from orchestrator.planner.plan import PROCESS_BYTES
from orchestrator.ring.hop import Hop
from orchestrator.ring.layout import LayerRange
from orchestrator.ring.profile import StageProfile
from orchestrator.ring.state import RingFacts
from orchestrator.types import Contract, EngineIdentity
from orchestrator.workers.machine import usable_memory
from orchestrator.workers.stage import report_defect

Find: TypeAlias = Callable[[Sequence[LayerRange], Progress], Path]
"""Gives a file of the model that has these layers, downloading it where needed."""


@dataclass(frozen=True, slots=True)
class StageOptions:
    """How a stage process computes, whatever it holds.

    ``memory`` is what it may fill, in bytes; None: what the machine has free. ``timeout`` in seconds is the longest
    wait for one of the expert ``workers``.
    """

    name: str
    identity: EngineIdentity
    sizes: StageSizes
    n_threads: int
    repack: bool = False
    workers: tuple[str, ...] = ()
    timeout: float = 60.0
    saved_limit: int = 1 << 30
    memory: int | None = None


@dataclass(frozen=True, slots=True)
class _Held:
    context: StageContext
    hop: Hop
    resources: ExitStack


class StageLayers:
    """Ranges of layers of one model (:class:`orchestrator.workers.stage.Layers`); a context manager.

    ``path`` is a file with at least the model's metadata. Used by one thread at a time.
    """

    def __init__(self, path: Path, find: Find, options: StageOptions) -> None:
        self.file = GgufFile.open(path)
        self._find = find
        self._options = options
        self._held: dict[LayerRange, _Held] = {}

    @property
    def hops(self) -> tuple[Hop, ...]:
        """The ranges, ascending."""
        return tuple(self._held[found].hop for found in sorted(self._held))

    @property
    def profile(self) -> StageProfile:
        """What this process says of itself; its sizes are final once it holds something."""
        options = self._options
        context = next((held.context for held in self._held.values()), None)
        return StageProfile(
            name=options.name,
            address="",
            pid=os.getpid(),
            n_threads=options.n_threads,
            identity=options.identity,
            model_sha256=self.file.header_sha256,
            architecture=self.file.architecture,
            facts=self._facts() if context is None else context.facts,
            n_ubatch=options.sizes.n_ubatch if context is None else context.n_ubatch,
            batch_invariant=options.sizes.batch_invariant,
            ranges=tuple(sorted(self._held)),
        )

    def require_room(self, ranges: Sequence[LayerRange]) -> None:
        """Raise :class:`PlanError` in words where there is not the memory to hold exactly these ranges."""
        n_layer = self._facts().n_layer
        beyond = next((found for found in ranges if found.last > n_layer), None)
        if beyond is not None:
            raise InputError(f"{beyond}: the model has {n_layer} layers")
        sizes, limit = self._options.sizes, self._options.memory
        load = load_of(sizes.n_ctx, sizes.n_sequences)
        measures = Measures.of(file_facts(self.file, load, n_layer=n_layer, rows=sizes.n_ubatch), load, PROCESS_BYTES)
        needed = self._bytes(measures, ranges) - self._bytes(measures, sorted(self._held))
        free = usable_memory() if limit is None else limit - self._bytes(measures, sorted(self._held))
        if needed > free:
            new = ", ".join(str(found) for found in ranges if found not in self._held)
            raise PlanError(f"{new} need {size_text(needed)} more memory, and {size_text(max(free, 0))} are left")

    def hold(self, ranges: Sequence[LayerRange], progress: Progress) -> None:
        """Hold exactly these ranges: free what is not named, load what is new.

        Raises:
            InputError: there are no such layers, or the model cannot be cut there.
            LinkcppError: they cannot be had or loaded, for another reason. Those that could are held.
        """
        for found in [found for found in self._held if found not in ranges]:
            self._held.pop(found).resources.close()
        new = [found for found in ranges if found not in self._held]
        if new:
            self.load(self._find(new, progress), new, progress)

    def load(self, path: Path, ranges: Sequence[LayerRange], progress: Progress) -> None:
        """Hold these ranges of a file too; raises what :meth:`hold` does."""
        for index, found in enumerate(ranges):

            def report(done: float, index: int = index) -> None:
                progress(index + done, float(len(ranges)))

            self._load(path, found, report)

    def close(self) -> None:
        """Free all layers."""
        while self._held:
            self._held.popitem()[1].resources.close()

    def __enter__(self) -> StageLayers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _load(self, path: Path, layers: LayerRange, report: Callable[[float], None]) -> None:
        options = self._options
        with ExitStack() as stack:
            exchange = None
            if options.workers:
                exchange = Dispatcher(
                    options.workers,
                    Contract.EXACT,
                    options.identity,
                    model_sha256=self.file.header_sha256,
                    timeout=options.timeout,
                    client=f"stage {layers}",
                )
                stack.callback(exchange.close)
                exchange.connect()
            context = StageContext.open(
                path,
                layers,
                options.sizes,
                n_threads=options.n_threads,
                repack=options.repack,
                exchange=exchange,
                progress=report,
            )
            stack.enter_context(context)
            if exchange is not None:
                exchange.describe(context.descriptors)
            hop = Hop(context, clock=time.perf_counter_ns, saved_limit=options.saved_limit, on_defect=report_defect)
            self._held[layers] = _Held(context, hop, stack.pop_all())

    def _facts(self) -> RingFacts:
        """Return what the file says of the model; layers that predict (MTP) are not computed."""
        file, sizes = self.file, self._options.sizes
        table = file.manifest.get("token_embd.weight")
        return RingFacts(
            n_layer=file.n_layer - file.number("nextn_predict_layers", 0),
            n_vocab=table.shape[1] if table is not None else 0,
            n_ctx=sizes.n_ctx,
            n_sequences=sizes.n_sequences,
            n_batch=sizes.n_batch or sizes.n_ubatch,
            cuttable=False,
            shiftable=False,
        )

    def _bytes(self, measures: Measures, ranges: Sequence[LayerRange]) -> int:
        """Return what a process with these ranges takes, itself included; experts only where it computes them."""
        spans = [(found.first, found.last) for found in ranges]
        return measures.memory_of(spans, experts=not self._options.workers)
