"""What native code does for a worker's connection: plain requests, from the first byte to the answer's last.

It is an ability of the compute (``orchestrator/engine/experts.py``) and may be missing. What is no plain request (an
unknown layer, an expert that is not held, a damaged frame, a ping) it leaves to Python with the bytes that came.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt


class NativePeer(Protocol):
    """One connection; used by its thread alone."""

    def set_layers(self, layers: Iterable[tuple[int, int, int, int, int, npt.NDArray[np.bool_]]]) -> None:
        """Take the described calls: layer, call, handle, row length, top-k, and a mask over the experts."""

    def wait(self) -> bool:
        """Wait for a request; False where what came is for Python, which finds it in :attr:`received`."""

    def answer(self) -> bool | None:
        """Compute and send; False where the computation failed (nothing was sent), None where the peer is lost."""

    @property
    def received(self) -> memoryview:
        """The bytes of the request, or what came instead; valid until the next wait."""

    @property
    def rows(self) -> int:
        """Rows of the request."""

    @property
    def sent(self) -> int:
        """Bytes of the answer."""


@runtime_checkable
class NativeCompute(Protocol):
    """An :class:`orchestrator.workers.expert.ExpertCompute` that can serve connections without Python."""

    def native_peer(self, descriptor: int, minor: int) -> NativePeer | None:
        """Take a connected socket that speaks this version; None where the engine was built without it."""
