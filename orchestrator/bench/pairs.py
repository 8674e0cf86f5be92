"""Two sides that do the same work in turn: what a ratio needs on a machine whose speed changes by the minute.

Each pair is one run of the star and one of the one process, the order changing from pair to pair, with the same
tokens on both sides, and the two cores change places after every second pair. A run's figure is the median of its
steps, and the result is the median of the pairs' ratios: a step that another program disturbed counts as one step,
whatever it took.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from orchestrator.models.gguf_writer import Progress
from orchestrator.types import FloatArray


class Decoder(Protocol):
    """One side (:class:`orchestrator.engine.session.Session`)."""

    def decode(self, tokens: Sequence[int]) -> FloatArray:
        """Append tokens, give the last one's logits."""

    def clear(self) -> None:
        """Forget the sequence."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one run decodes: a prompt at once, which is not timed, and then single steps."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PairedTimes:
    """Median seconds of a step, per pair; ``byte_identical`` tells whether all logits agreed."""

    star: tuple[float, ...]
    local: tuple[float, ...]
    byte_identical: bool

    @property
    def ratios(self) -> list[float]:
        """Time of one process by time of the star, per pair."""
        return [local / star for star, local in zip(self.star, self.local, strict=True)]

    @property
    def star_to_local(self) -> float:
        """Speed of the star, one process being 1."""
        return statistics.median(self.ratios)

    @property
    def spread(self) -> tuple[float, float]:
        """The quartiles of the ratios."""
        return _quartiles(self.ratios)

    @property
    def overheads(self) -> list[float]:
        """How much longer a step of the star takes, as a part of the one process's, per pair."""
        return [star / local - 1.0 for star, local in zip(self.star, self.local, strict=True)]

    @property
    def overhead(self) -> float:
        """The median of :attr:`overheads`."""
        return statistics.median(self.overheads)

    @property
    def overhead_spread(self) -> tuple[float, float]:
        """The quartiles of :attr:`overheads`."""
        return _quartiles(self.overheads)


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def run_pairs(
    star: Decoder,
    local: Decoder,
    works: Sequence[Work],
    *,
    seats: Callable[[int], None] = lambda pair: None,
    progress: Progress | None = None,
    now: Callable[[], float] = time.perf_counter,
) -> PairedTimes:
    """Time one pair per work; the first work goes through both sides once before, untimed.

    ``seats`` is called with each pair's number before it (:meth:`orchestrator.bench.machine.Seats.take`).
    """
    run(star, works[0], now)
    run(local, works[0], now)
    times: tuple[list[float], list[float]] = ([], [])
    identical = True
    for number, work in enumerate(works):
        if progress is not None:
            progress(number, len(works), f"pair {number + 1} of {len(works)}")
        seats(number)
        sides = [(0, star), (1, local)]
        logits: list[list[FloatArray]] = [[], []]
        for side, decoder in sides if number % 2 == 0 else reversed(sides):
            seconds, logits[side] = run(decoder, work, now)
            times[side].append(statistics.median(seconds))
        identical = identical and all(map(np.array_equal, *logits))
    return PairedTimes(tuple(times[0]), tuple(times[1]), identical)


def run(
    decoder: Decoder, work: Work, now: Callable[[], float] = time.perf_counter
) -> tuple[list[float], list[FloatArray]]:
    """Decode a work from an empty sequence; give the seconds and the logits of each step."""
    decoder.clear()
    decoder.decode(work.prompt)
    seconds: list[float] = []
    logits: list[FloatArray] = []
    for token in work.tokens:
        begin = now()
        row = decoder.decode((token,))
        seconds.append(now() - begin)
        logits.append(row)
    return seconds, logits
