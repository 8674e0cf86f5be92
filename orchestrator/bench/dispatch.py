"""`linkcpp bench dispatch`: what a star costs per MoE layer, and its speed against one process."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from orchestrator.bench.machine import load_average
from orchestrator.bench.pairs import PairedTimes, Work, run_pairs
from orchestrator.bench.star import Bench, Orchestration, open_bench
from orchestrator.models.gguf_writer import Progress

BUDGET_US: Final = 300.0
"""Microseconds of orchestration per MoE layer at one row that are too many: somebody waits for a timer."""

ROWS: Final = (1, 8, 32)
_PROMPT: Final = 16
_CONTEXT: Final = 1024
_STEPS_OF_ROWS: Final = 16  # steps at each of the larger row counts


@dataclass(frozen=True, slots=True)
class DispatchReport:
    """What was measured."""

    model: str
    workers: int
    cores: tuple[int, int]
    times: PairedTimes
    steps: int
    orchestration: tuple[Orchestration, ...]
    load: tuple[float, float]  # before and after

    @property
    def at_one_row(self) -> Orchestration:
        """The figures of decoding."""
        return self.orchestration[0]

    def is_within(self, budget_us: float) -> bool:
        """Tell whether orchestration at one row keeps to a budget."""
        return self.at_one_row.p50 <= budget_us

    def to_json(self) -> dict[str, object]:
        """Return the JSON object."""
        low, high = self.times.spread
        return {
            "model": self.model,
            "workers": self.workers,
            "threads": 1,
            "cores": list(self.cores),  # which change places
            "pairs": len(self.times.star),
            "steps_per_run": self.steps,
            "orchestration_us": [entry.to_json() for entry in self.orchestration],
            "tokens_per_second_star": round(1 / statistics.median(self.times.star), 2),
            "tokens_per_second_local": round(1 / statistics.median(self.times.local), 2),
            "star_to_local": round(self.times.star_to_local, 4),
            "star_to_local_quartiles": [round(low, 4), round(high, 4)],
            "byte_identical": self.times.byte_identical,
            "load_average": list(self.load),
        }


def run_dispatch(
    path: Path, *, workers: int = 1, pairs: int = 20, steps: int = 24, progress: Progress | None = None
) -> DispatchReport:
    """Measure a model over local workers, all of them on one core, one thread on each side."""
    before = load_average()
    rng = np.random.default_rng(0)
    with open_bench(path, workers=workers, n_ctx=_CONTEXT) as bench:
        works = [_work(bench, rng, steps) for _ in range(pairs)]
        times = run_pairs(bench.star, bench.local, works, seats=bench.seats.take, progress=progress)
        # Before other row counts: the dispatcher remembers only so many calls. Prompts are among them.
        singles = tuple(
            sample for sample in bench.samples(pairs * (steps + 1) * bench.calls_per_step) if sample.rows == 1
        )
        entries = [Orchestration.of(1, singles)]
        for rows in ROWS[1:]:
            if progress is not None:
                progress(pairs, pairs, f"{rows} rows at once")
            entries.append(_at(bench, rng, rows))
        return DispatchReport(
            path.name, workers, bench.seats.cores, times, steps, tuple(entries), (before, load_average())
        )


def _work(bench: Bench, rng: np.random.Generator, steps: int) -> Work:
    tokens = rng.integers(0, bench.model.n_vocab, _PROMPT + steps).tolist()
    return Work(tuple(tokens[:_PROMPT]), tuple(tokens[_PROMPT:]))


def _at(bench: Bench, rng: np.random.Generator, rows: int) -> Orchestration:
    bench.star.clear()
    for _ in range(_STEPS_OF_ROWS + 1):
        bench.star.decode(rng.integers(0, bench.model.n_vocab, rows).tolist())
    return Orchestration.of(rows, bench.samples(_STEPS_OF_ROWS * bench.calls_per_step))
