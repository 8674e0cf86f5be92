"""What the dispatcher asks of native code, which carries the plain calls of a star without Python.

It is injected (``engine/native.py`` has it) and may be missing. While it is armed, the engine's hook calls it for
small batches and Python sees nothing of them. What is not plain comes back as a :class:`Rest`: a refusal, a late or
damaged answer, a worker that is gone or slow. Python then goes on with the bytes that had arrived, and everything
that this package promises of errors is decided in one place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, Protocol

from orchestrator.dispatch.exchange import LayerSample
from orchestrator.types import FloatArray, IntArray

MAX_ROWS: Final = 16
"""Rows of a batch up to which native code is used: larger ones compute for so long that Python does not count."""


class Counts(NamedTuple):
    """What native code sent to a worker and received from it."""

    rows: int
    pairs: int
    bytes_out: int
    bytes_in: int


NO_COUNTS: Final = Counts(0, 0, 0, 0)


class Rest(NamedTuple):
    """A call that native code began and left."""

    layer: int
    call: int
    sequence: int
    worker: int  # where it stopped
    n_done: int  # shares, by worker, that are done: sent, or their answers in the output
    send_error: int | None  # errno where a send failed, 0 where no data was taken in time; None: sending was done
    experts: IntArray  # [n_tokens, top_k]
    weights: FloatArray
    length: int  # of a row
    compute_us: int
    spent: float  # seconds in dispatch
    waited: float  # seconds in combine
    received: bytes  # from that worker


class NativeStar(Protocol):
    """The plain calls of a star."""

    def number(self, *, advance: bool) -> int:
        """Take the next number of a request, or look at the last one."""

    def set_routes(self, routes: Iterable[tuple[int, int, Sequence[int]]]) -> None:
        """Say which worker computes each expert, per (layer, call)."""

    def set_link(self, worker: int, descriptor: int, minor: int) -> None:
        """Give a worker's socket and protocol version."""

    def give_way(self, every_ms: int) -> None:
        """Hand a call to Python at least so often, so that it can end the step."""

    def arm(self, timeout_ms: int, max_rows: int) -> None:
        """Take calls of up to so many rows from now on."""

    def disarm(self) -> None:
        """Take none, and forget the call that is under way."""

    def take_rest(self) -> Rest | None:
        """Give the call that was left unfinished, once."""

    def counts(self, worker: int) -> Counts:
        """Give the counters of a worker."""

    def record(self, sample: LayerSample) -> None:
        """Note a call that Python carried out."""

    def samples(self) -> tuple[int, tuple[LayerSample, ...]]:
        """Give the number of all calls, and the most recent ones, oldest first."""
