"""A ring of two stages on this machine against one process: tokens/s, one thread and one core for each stage.

This process holds the second half of the layers, as a gateway that keeps the head does, and a stage process the
first. So a token makes one turn, and no logits cross the wire.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from orchestrator.bench.delay import delayed
from orchestrator.bench.machine import Seats, load_average, pinned, two_cores
from orchestrator.bench.pairs import PairedTimes, Work, run_pairs
from orchestrator.engine.context import Context
from orchestrator.engine.identity import engine_identity
from orchestrator.engine.model import Model
from orchestrator.engine.stage import StageContext, StageSizes
from orchestrator.models.gguf import GgufFile
from orchestrator.models.gguf_writer import Progress
from orchestrator.ring.client import Ring
from orchestrator.ring.driver import Driver
from orchestrator.ring.layout import LayerRange
from orchestrator.ring.steps import Clear, one_sequence
from orchestrator.types import FloatArray
from orchestrator.workers.local_stages import LocalStages

_PROMPT: Final = 16


@dataclass(frozen=True, slots=True)
class RingReport:
    """Figures of a ring against one process; ``stages_us`` are medians of a step's computation in each stage."""

    model: str
    layers: tuple[int, ...]  # where it was cut, with both ends
    transport: str  # "unix" or "tcp"
    times: PairedTimes  # its "star" is the ring
    stages_us: tuple[float, ...]
    load: tuple[float, float]
    delay: float = 0.0  # seconds added to a turn

    @property
    def to_possible(self) -> float:
        """The ring's speed by what it can be at most: a turn on the way and one process's computation for a token."""
        return statistics.median(
            (self.delay + local) / ring for ring, local in zip(self.times.star, self.times.local, strict=True)
        )

    def to_json(self) -> dict[str, object]:
        """Return the JSON object."""
        low, high = self.times.spread
        return {
            "model": self.model,
            "layers": list(self.layers),
            "transport": self.transport,
            "tokens_per_second_ring": round(1 / statistics.median(self.times.star), 2),
            "tokens_per_second_local": round(1 / statistics.median(self.times.local), 2),
            "ring_to_local": round(self.times.star_to_local, 4),
            "quartiles": [round(low, 4), round(high, 4)],
            "delay_ms": 1e3 * self.delay,
            "ring_to_possible": round(self.to_possible, 4),
            "stage_compute_us": [round(value, 1) for value in self.stages_us],
            "pairs": len(self.times.star),
            "byte_identical": self.times.byte_identical,
            "load_average": list(self.load),
        }


class _One:
    """The whole model in this process."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def decode(self, tokens: Sequence[int]) -> FloatArray:
        logits = self._context.decode(one_sequence(tokens, self._context.length(0))).logits
        return np.empty(0, np.float32) if logits is None else logits

    def clear(self) -> None:
        self._context.apply(Clear())


class _Ring:
    """The ring, and the stages' own times."""

    def __init__(self, ring: Driver) -> None:
        self._ring = ring
        self.spent: list[tuple[int, ...]] = []

    def decode(self, tokens: Sequence[int]) -> FloatArray:
        ring = self._ring
        ring.submit(one_sequence(tokens, ring.length(0)))
        completion = ring.collect()
        if completion.error is not None:
            raise completion.error
        if len(tokens) == 1:
            self.spent.append(completion.spent)
        return np.empty(0, np.float32) if completion.logits is None else completion.logits

    def clear(self) -> None:
        self._ring.apply(Clear())
        self._ring.settle()


def measure_ring(
    path: Path,
    *,
    pairs: int = 20,
    steps: int = 24,
    unix: bool = True,
    delay: float = 0.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> RingReport:
    """Time both sides in turn; raise :class:`InputError` where this process may use only one core.

    ``delay`` seconds are added to each turn, on TCP.
    """
    unix = unix and not delay
    file = GgufFile.open(path)
    cores = two_cores()
    sizes = StageSizes(n_ctx=_PROMPT + steps)
    options = ("--ctx", str(sizes.n_ctx))
    bounds = (0, file.n_layer // 2, file.n_layer)
    before = load_average()
    with ExitStack() as stack:
        first, second = LayerRange(*bounds[:2]), LayerRange(*bounds[1:])
        stages = stack.enter_context(LocalStages(path, [[first]], options=options, pin=[cores[1]], unix=unix))
        addresses = stack.enter_context(delayed(stages.addresses, delay)) if delay else stages.addresses
        stack.enter_context(pinned(cores[0]))
        model = stack.enter_context(Model.open(path))
        context = stack.enter_context(Context(model, n_ctx=sizes.n_ctx))
        own = stack.enter_context(StageContext.open(path, second, sizes))
        client = stack.enter_context(
            Ring(addresses, local=[own], identity=engine_identity(), model_sha256=file.header_sha256)
        )
        ring = _Ring(client)
        works = _works(model.n_vocab, pairs, steps, seed)
        seats = Seats(cores, stages.pids)
        times = run_pairs(ring, _One(context), works, seats=seats.take, progress=progress)
    return RingReport(
        model=path.stem,
        layers=bounds,
        transport="unix" if unix else "tcp",
        times=times,
        stages_us=tuple(statistics.median(column) for column in zip(*ring.spent, strict=True)),
        load=(before, load_average()),
        delay=delay,
    )


def _works(n_vocab: int, pairs: int, steps: int, seed: int) -> list[Work]:
    # Any tokens do: the time of a step does not depend on them, and equal ones on both sides are what matters.
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, n_vocab, (pairs, _PROMPT + steps)).tolist()
    return [Work(tuple(row[:_PROMPT]), tuple(row[_PROMPT:])) for row in rows]
