"""Measure how long one token takes in each piece of a model that a stage could hold alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Final

from orchestrator.engine.stage import StageContext, StageSizes
from orchestrator.planner.inventory import ModelFacts
from orchestrator.ring.layout import LayerRange
from orchestrator.ring.steps import one_sequence

_TOKENS: Final = 6
"""Decoded one by one; the shortest time counts, because the first ones read the weights from the disk."""

Times = dict[tuple[int, int], float]
"""(first layer, last) -> seconds of one token."""


def measure_pieces(
    path: str | Path,
    facts: ModelFacts,
    *,
    n_threads: int = 1,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Times:
    """Load the layers between each two neighbouring cuts by themselves and time them; the last with the output.

    Raises what :meth:`StageContext.open` raises.
    """
    pieces = list(pairwise(facts.places))
    times: Times = {}
    for done, (first, last) in enumerate(pieces):
        progress(done, len(pieces))
        boundary = bytes(facts.crossing(first)) if first else b""
        with StageContext.open(path, LayerRange(first, last), StageSizes(n_ctx=256), n_threads=n_threads) as stage:
            best = float("inf")
            for position in range(_TOKENS):
                begin = time.perf_counter()
                stage.decode(one_sequence([0], position), boundary)
                best = min(best, time.perf_counter() - begin)
        times[first, last] = best
    progress(len(pieces), len(pieces))
    return times
