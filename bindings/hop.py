"""``linkcpp-hop.h``: a stage's part of a step from frame to frame without Python."""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass
from typing import Final

import numpy as np

from bindings.handles import ContextHandle, HookHandle
from bindings.library import HopResultStruct, HopSizesStruct, load
from bindings.memory import ByteViews, FloatArray, FloatViews, address_of

_DONE, _YOURS, _FAILED = range(3)  # linkcpp_hop_status
_NOTHING: Final = memoryview(b"")


@dataclass(frozen=True, slots=True)
class HopSizes:
    """What a range of layers takes; ``is_end``: behind it come logits and no boundary."""

    first: int
    last: int
    is_end: bool
    n_vocab: int
    n_sequences: int
    n_batch: int


class HopFailed(Exception):  # noqa: N818 - an answer, whose words are the caller's
    """The engine failed with this status; 0: the boundary is not the one that the layers need."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class HopHandle:
    """One range of layers; used by one thread at a time. Freed with the last reference to it."""

    def __init__(self, context: ContextHandle, hook: HookHandle | None, sizes: HopSizes) -> None:
        _, self._shim = load()
        self._owners = context, hook  # are to outlive this
        self._n_vocab = sizes.n_vocab
        self._views, self._bytes = FloatViews(), ByteViews()
        self._result = HopResultStruct()
        self._where = ctypes.addressof(self._result)
        struct = HopSizesStruct(
            sizes.first, sizes.last, sizes.is_end, sizes.n_vocab, sizes.n_sequences, sizes.n_batch
        )
        self._address = self._shim.linkcpp_hop_new(
            context.address, None if hook is None else hook.address, ctypes.byref(struct)
        )
        weakref.finalize(self, self._shim.linkcpp_hop_free, self._address)

    def step(self, frame: memoryview, minor: int | None) -> HopResultStruct | None:
        """Run the step of a whole frame; None where it is not plain, and nothing was done.

        ``minor`` is the protocol's version of the frame to be made, None where none is to be sent. The result's
        memory is valid until the next step.

        Raises:
            HopFailed: the engine failed; what the step left in the caches is the caller's to remove.
        """
        status = self._call(frame, -1 if minor is None else minor, rehearse=False)
        if status == _FAILED:
            raise HopFailed(self._result.status)
        return self._result if status == _DONE else None

    def rehearse(self, frame: memoryview) -> None:
        """Do all of :meth:`step` but compute, for the sake of the processor's caches."""
        self._call(frame, 0, rehearse=True)

    def head(self, result: HopResultStruct) -> memoryview:
        """Give the frame that a step became, without boundary or logits."""
        return self._view(result.head, result.n_head)

    def buffers(self, result: HopResultStruct) -> list[bytes | memoryview]:
        """Give the frame that a step became, in two parts."""
        return [self.head(result), self._view(result.body, result.n_body)]

    def logits(self, result: HopResultStruct) -> FloatArray:
        """Copy the logits of a step, [n_outputs, n_vocab]."""
        if not result.n_outputs:
            return np.empty((0, self._n_vocab), np.float32)
        return self._views.at(result.body, (result.n_outputs, self._n_vocab)).copy()

    def _view(self, address: int | None, size: int) -> memoryview:
        if not size:
            return _NOTHING
        return self._bytes.at(address, size)

    def _call(self, frame: memoryview, minor: int, *, rehearse: bool) -> int:
        address = address_of(frame)
        return int(self._shim.linkcpp_hop_step(self._address, address, len(frame), minor, rehearse, self._where))
