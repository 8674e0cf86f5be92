"""The machine under a measurement: which cores it takes, and how busy others keep it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True, slots=True)
class Seats:
    """Two cores for two sides that compute in turn, which change places.

    The cores of a shared machine differ by what else runs on them, by 20 percent over minutes. One process uses only
    one of them, so with fixed places a ratio would tell the cores apart rather than the sides.
    """

    cores: tuple[int, int]  # of this thread and of the processes at first
    pids: Sequence[int]

    def take(self, pair: int) -> None:
        """Take the places of a pair: two pairs (each side first once) and they change."""
        here, there = self.cores if pair // 2 % 2 == 0 else self.cores[::-1]
        os.sched_setaffinity(0, {here})
        for pid in self.pids:
            for thread in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), {there})


def load_average() -> float:
    """Return how many threads wanted to run in the last minute: over two, the figures are noisy."""
    return round(os.getloadavg()[0], 2)
