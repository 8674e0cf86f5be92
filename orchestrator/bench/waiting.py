"""`linkcpp bench waiting`: what the backbone does while its workers' answers are on the way.

Three questions. Over a long way, does it sleep? Over a short one, does it lose time by falling asleep? And does a
layer's shared expert run during the trip, so that it adds nothing to a step?
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from orchestrator.bench.delay import delayed
from orchestrator.bench.machine import load_average
from orchestrator.config import cache_dir
from orchestrator.engine.model import Model
from orchestrator.engine.session import Session
from orchestrator.engine.synth import synth
from orchestrator.gateway.backbone import open_backbone
from orchestrator.models.gguf_writer import Progress
from orchestrator.types import ExpertBatch, FloatArray
from orchestrator.workers.local import LocalWorkers

LONG_WAY: Final = 0.080
CPU_LIMIT: Final = 0.20
"""Part of one core that a decode thread may use over the long way."""

THREADS: Final = 2
SHORT_WAITS: Final = (0.0, 0.0003, 0.001)
"""Seconds: a local network's trips, with a small and a large layer's computation."""

MIDDLE_WAY: Final = 0.020
_CONTEXT: Final = 256
_LONG_STEPS: Final = 3
_SHARED: Final = {"large": 6144, "small": 32}  # widths of the shared expert


@dataclass(frozen=True, slots=True)
class WaitingReport:
    """What was measured; times in milliseconds unless they say otherwise."""

    trips: int
    step_ms: float  # over the long way
    cpu_per_thread: float  # part of one core
    added_us: tuple[tuple[float, float], ...]  # (wait in us, what a call takes more than that)
    layers: int  # of the models with and without a large shared expert
    shared_local_ms: float  # what the large one adds to a layer in one process
    shared_star_ms: float  # and in a star over the middle way
    star_step_ms: float
    load: tuple[float, float]

    @property
    def sleeps(self) -> bool:
        """Tell whether the decode threads sleep over the long way."""
        return self.cpu_per_thread < CPU_LIMIT

    @property
    def hides(self) -> bool:
        """Tell whether most of the shared expert's time is gone within the trip."""
        return self.shared_star_ms < 0.5 * self.shared_local_ms

    def to_json(self) -> dict[str, object]:
        """Return the JSON object."""
        return {
            "long_way": {
                "delay_ms": 1e3 * LONG_WAY,
                "threads": THREADS,
                "trips_per_step": self.trips,
                "step_ms": round(self.step_ms, 1),
                "cpu_per_thread": round(self.cpu_per_thread, 4),
                "cpu_limit": CPU_LIMIT,
            },
            "short_waits": [
                {"wait_us": round(wait, 1), "added_us_per_call": round(added, 1)} for wait, added in self.added_us
            ],
            "shared_expert": {
                "delay_ms": 1e3 * MIDDLE_WAY,
                "layers": self.layers,
                "ms_per_layer_local": round(self.shared_local_ms, 3),
                "ms_per_layer_star": round(self.shared_star_ms, 3),
                "step_ms_star": round(self.star_step_ms, 2),
            },
            "load_average": list(self.load),
        }


def run_waiting(path: Path, *, progress: Progress | None = None) -> WaitingReport:
    """Measure with a model for the trips and two synthetic ones for the shared expert."""
    before = load_average()

    def say(done: int, note: str) -> None:
        if progress is not None:
            progress(done, 3, note)

    say(0, f"trips of {1e3 * LONG_WAY:g} ms")
    trips, step, share = _long_way(path)
    say(1, "short waits")
    added = _short_waits(path)
    say(2, "the shared expert")
    layers, local, star, star_step = _shared_expert()
    return WaitingReport(
        trips, 1e3 * step, share, added, layers, 1e3 * local, 1e3 * star, 1e3 * star_step, (before, load_average())
    )


def _long_way(path: Path) -> tuple[int, float, float]:
    with (
        LocalWorkers(path, 1) as workers,
        delayed(workers.addresses, LONG_WAY) as addresses,
        open_backbone(path, addresses, n_ctx=_CONTEXT, n_threads=THREADS) as backbone,
    ):
        session = backbone.session
        session.decode([1, 2, 3])
        begin, cpu = time.perf_counter(), time.process_time()
        for token in range(_LONG_STEPS):
            session.decode([token + 1])
        wall, used = time.perf_counter() - begin, time.process_time() - cpu
        return len(session.descriptors), wall / _LONG_STEPS, used / wall / THREADS


class _Late:
    """An exchange that gives zeros after so many seconds, without anybody else: it measures the engine alone."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._begin = 0.0

    def begin_step(self) -> None:
        """Nothing is to be made ready."""

    def abort_step(self) -> None:
        """Nothing is under way."""

    def dispatch(self, batch: ExpertBatch) -> None:
        """Note the time."""
        self._begin = time.perf_counter()

    def combine(self, layer: int, call: int, out: FloatArray) -> None:
        """Wait, as a link looks for an answer: without sleep."""
        while time.perf_counter() - self._begin < self.seconds:
            pass
        out.fill(0.0)


def _short_waits(path: Path, *, rounds: int = 8, steps: int = 6) -> tuple[tuple[float, float], ...]:
    late = _Late()
    times: dict[float, list[float]] = {wait: [] for wait in SHORT_WAITS}
    with (
        Model.open(path, without_experts=True) as model,
        Session(model, n_ctx=_CONTEXT, n_threads=THREADS, exchange=late) as session,
    ):
        calls = len(session.descriptors)
        for _ in range(rounds):
            for wait in SHORT_WAITS:
                late.seconds = wait
                session.clear()
                session.decode([1, 2, 3])
                for token in range(steps):
                    begin = time.perf_counter()
                    session.decode([token + 1])
                    times[wait].append(time.perf_counter() - begin)
    least = statistics.median(times[0.0])
    return tuple(
        (1e6 * wait, 1e6 * ((statistics.median(times[wait]) - least) / calls - wait)) for wait in SHORT_WAITS[1:]
    )


def _shared_expert(*, rounds: int = 12) -> tuple[int, float, float, float]:
    """Give the layers, what a large shared expert adds per layer in one process and in a star, and a star's step."""
    with ExitStack() as stack:
        sides: dict[tuple[str, str], Session] = {}
        for size, width in _SHARED.items():
            path = _shared_model(width)
            star, local = stack.enter_context(_both(path))
            sides[size, "star"], sides[size, "local"] = star, local
        layers = len(sides["large", "star"].descriptors)
        steps = {key: _stepper(session) for key, session in sides.items()}
        times: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
        for _ in range(rounds + 1):
            for key, step in steps.items():
                times[key].append(next(step))
    median = {key: statistics.median(values[1:]) for key, values in times.items()}  # the first is a warm-up

    def added(side: str) -> float:
        return (median["large", side] - median["small", side]) / layers

    return layers, added("local"), added("star"), median["large", "star"]


def _stepper(session: Session) -> Iterator[float]:
    tokens = np.random.default_rng(0).integers(3, 250, _CONTEXT).tolist()
    for token in tokens:
        begin = time.perf_counter()
        session.decode([token])
        yield time.perf_counter() - begin


def _shared_model(width: int) -> Path:
    path = cache_dir() / "bench" / f"shared-expert-{width}.gguf"
    if not path.exists():
        synth("qwen2moe", path, n_embd=512, n_ff_shexp=width)
    return path


@contextmanager
def _both(path: Path) -> Iterator[tuple[Session, Session]]:
    with (
        LocalWorkers(path, 1) as workers,
        delayed(workers.addresses, MIDDLE_WAY) as addresses,
        open_backbone(path, addresses, n_ctx=_CONTEXT) as star,
        open_backbone(path, n_ctx=_CONTEXT) as local,
    ):
        yield star.session, local.session
