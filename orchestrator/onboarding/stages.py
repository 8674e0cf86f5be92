"""A ring of local stages as the gate asks it: the model in several ranges of layers, all in this process."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from orchestrator.engine.model import Model
from orchestrator.engine.stage import StageContext, StageSizes
from orchestrator.engine.survey import survey
from orchestrator.errors import InputError
from orchestrator.onboarding.findings import WorkerCountResult
from orchestrator.onboarding.meter import Meter
from orchestrator.onboarding.options import GateOptions
from orchestrator.onboarding.prompts import MICRO_BATCH
from orchestrator.onboarding.reference import Oracle
from orchestrator.onboarding.trace import replay
from orchestrator.ring.hop import Hop
from orchestrator.ring.layout import LayerRange
from orchestrator.ring.pipeline import Pipeline
from orchestrator.ring.steps import Clear, one_sequence
from orchestrator.types import Boundary, FloatArray
from orchestrator.verification.gate import Comparison, NoiseFloor, judge


class RingDecoder:
    """A :class:`orchestrator.onboarding.trace.Decoder` over the first sequence of a ring."""

    def __init__(self, ring: Pipeline) -> None:
        self._ring = ring

    def decode(self, tokens: Sequence[int], *, all_logits: bool = False) -> FloatArray:
        """Append tokens; return logits [1 or n, n_vocab]."""
        return self._ring.decode(one_sequence(tokens, self._ring.length(0), every=all_logits))

    def clear(self) -> None:
        """Forget the sequence."""
        self._ring.apply(Clear())
        self._ring.settle()


def plan_stages(path: Path, counts: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Return for each number of stages where their ranges begin and end, 0 and the number of layers included.

    Raises :class:`InputError` for a model that cannot be cut into so many stages.
    """
    with Model.open(path, without_experts=True) as model:
        if model.reads_whole_text:
            raise InputError(f"{model.architecture} reads a whole text at once, and no ring runs it")
        legal = [cut.layer for cut in survey(model) if cut.is_legal]
        return {count: (0, *spread_cuts(legal, count), model.n_layer) for count in counts}


def try_boundaries(
    path: Path,
    plans: Mapping[int, Sequence[int]],
    options: GateOptions,
    oracle: Oracle,
    floor: NoiseFloor | None,
    meter: Meter,
) -> Iterator[tuple[Boundary, int, WorkerCountResult, Comparison]]:
    """Run the oracle's prompts over the rings of :func:`plan_stages`, with each kind of boundary."""
    sizes = StageSizes(oracle.n_ctx, n_ubatch=oracle.n_ubatch)
    for (count, bounds), boundary in itertools.product(plans.items(), options.boundaries):
        note = f"boundary {boundary.value} over {count} stages"
        meter.say(note)
        with open_stages(path, bounds, sizes, boundary, threads=options.threads) as ring:
            outcome = replay(RingDecoder(ring), oracle.traces, meter.phase(note, MICRO_BATCH))
        result = WorkerCountResult.of(
            judge(boundary, outcome.comparison, floor),
            outcome.comparison,
            logits_sha256=outcome.logits_sha256,
            oracle_sha256=outcome.oracle_sha256,
            worker_pids=(os.getpid(),),
            rows_by_worker={str(hop.layers): hop.tokens for hop in ring.hops},
        )
        yield boundary, count, result, outcome.comparison


@contextmanager
def open_stages(
    path: Path, bounds: Sequence[int], sizes: StageSizes, boundary: Boundary = Boundary.F32, *, threads: int = 1
) -> Iterator[Pipeline]:
    """Load the ranges between the bounds and make a ring of them."""
    with ExitStack() as stack:
        stages = [
            stack.enter_context(StageContext.open(path, LayerRange(first, last), sizes, n_threads=threads))
            for first, last in itertools.pairwise(bounds)
        ]
        yield Pipeline([Hop(stage, clock=time.perf_counter_ns) for stage in stages], stages[0].facts, boundary)


def spread_cuts(legal: Sequence[int], stages: int) -> tuple[int, ...]:
    """Choose cuts for so many stages evenly among the legal ones (ascending).

    Raises :class:`InputError` where there are too few.
    """
    if stages - 1 > len(legal):
        raise InputError(f"this model cannot be cut into {stages} stages: at most {len(legal) + 1} are possible")
    return tuple(legal[index * len(legal) // stages] for index in range(1, stages))
