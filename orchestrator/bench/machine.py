"""The machine under a measurement: which cores it takes, and how busy others keep it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from orchestrator.errors import InputError


def two_cores() -> tuple[int, int]:
    """Choose the backbone's and the worker's core; raise :class:`InputError` where this process has only one."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise InputError(
            "a star and its backbone need a core each, and this process may use only one",
            hint="run it where `nproc` says 2 or more",
        )
    return cores[0], cores[1]


@contextmanager
def pinned(*cores: int) -> Iterator[None]:
    """Keep the calling thread, and threads that it starts, on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def load_average() -> float:
    """Return how many threads wanted to run in the last minute: over two, the figures are noisy."""
    return round(os.getloadavg()[0], 2)
