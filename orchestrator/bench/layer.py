"""`linkcpp bench layer`: what a star costs at the true shape of a large model's layer."""

from __future__ import annotations

import hashlib
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from orchestrator.bench.machine import load_average
from orchestrator.bench.pairs import PairedTimes, Work, run_pairs
from orchestrator.bench.star import Orchestration, open_bench
from orchestrator.config import cache_dir
from orchestrator.engine.synth import synth
from orchestrator.errors import InputError
from orchestrator.models.faithful import FAITHFUL
from orchestrator.models.gguf_writer import Progress

_SUFFIX: Final = "-layer"
_PROMPT: Final = 8
_CONTEXT: Final = 1024
_WARM_UP: Final = 512  # tokens: at top-8 of 256 experts, every expert is used with near certainty


def shapes() -> tuple[str, ...]:
    """Name the models whose layer can be measured."""
    return tuple(name.removesuffix(_SUFFIX) for name in FAITHFUL if name.endswith(_SUFFIX))


def layer_model(like: str, *, progress: Progress | None = None) -> Path:
    """Return the synthetic model with this layer's shape from the cache folder, made where it is missing."""
    shape = FAITHFUL.get(like + _SUFFIX)
    if shape is None:
        raise InputError(f"no layer of a model {like!r}", hint=f"known: {', '.join(shapes())}")
    described = f"{shape.name} {shape.dimensions} {shape.expert_type} {shape.matrix_type}"
    mark = hashlib.sha256(described.encode()).hexdigest()[:8]
    path = cache_dir() / "bench" / f"{shape.name}-{mark}.gguf"
    if not path.exists():
        synth(shape.architecture, path, like=shape.name, progress=progress)
    return path


@dataclass(frozen=True, slots=True)
class LayerReport:
    """What was measured."""

    like: str
    model: str
    layers: int
    cores: tuple[int, int]
    times: PairedTimes
    steps: int
    orchestration: Orchestration
    load: tuple[float, float]  # before and after

    def to_json(self) -> dict[str, object]:
        """Return the JSON object; ``overhead`` is a fraction: 0.012 is 1.2 %."""
        low, high = self.times.overhead_spread
        return {
            "like": self.like,
            "model": self.model,
            "moe_layers": self.layers,
            "threads": 1,
            "cores": list(self.cores),  # which change places
            "pairs": len(self.times.star),
            "steps_per_run": self.steps,
            "step_ms_star": round(1e3 * statistics.median(self.times.star), 3),
            "step_ms_local": round(1e3 * statistics.median(self.times.local), 3),
            "overhead": round(self.times.overhead, 5),
            "overhead_quartiles": [round(low, 5), round(high, 5)],
            "orchestration_us": [self.orchestration.to_json()],
            "byte_identical": self.times.byte_identical,
            "load_average": list(self.load),
        }


def run_layer(
    like: str, path: Path, *, pairs: int = 20, steps: int = 16, progress: Progress | None = None
) -> LayerReport:
    """Measure the model that :func:`layer_model` gave: one worker with all experts, one thread on each side."""
    before = load_average()
    rng = np.random.default_rng(0)
    with open_bench(path, workers=1, n_ctx=_CONTEXT, mapped=True) as bench:
        n_vocab = bench.model.n_vocab
        for name, side in (("the star", bench.star), ("one process", bench.local)):
            if progress is not None:
                progress(0, None, f"warming up {name}")
            side.decode(rng.integers(0, n_vocab, _WARM_UP).tolist())
        draws = [rng.integers(0, n_vocab, _PROMPT + steps).tolist() for _ in range(pairs)]
        works = [Work(tuple(draw[:_PROMPT]), tuple(draw[_PROMPT:])) for draw in draws]
        times = run_pairs(bench.star, bench.local, works, seats=bench.seats.take, progress=progress)
        samples = bench.samples(pairs * (steps + 1) * bench.calls_per_step)
        singles = tuple(sample for sample in samples if sample.rows == 1)
        return LayerReport(
            like,
            path.name,
            bench.calls_per_step,
            bench.seats.cores,
            times,
            steps,
            Orchestration.of(1, singles),
            (before, load_average()),
        )
