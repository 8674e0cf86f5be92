"""``linkcpp_experts``: the bytes of a worker's experts and the computation on them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bindings.handles import Handle, NativeError
from bindings.library import LayerStruct, load
from bindings.memory import address_of

_POLL = 1  # as for a context: brief polling, then park


class ExpertsHandle(Handle):
    """A store of expert tensors; thread-safe (the C side locks). Raises :class:`NativeError` with its words."""

    def __init__(self, *, n_threads: int, repack: bool) -> None:
        super().__init__(None)
        _, self._shim = load()
        self._address = self._shim.linkcpp_experts_new(n_threads, _POLL, repack)
        if not self._address:
            raise NativeError("the CPU backend cannot be started")

    def _free(self, address: int) -> None:
        self._shim.linkcpp_experts_free(address)

    def _fail(self) -> NativeError:
        return NativeError(self._shim.linkcpp_experts_error(self.address).decode("utf-8", "replace"))

    def load(
        self, name: str, kind: int, shape: Sequence[int], ids: Sequence[int], path: str, offset: int, *, mapped: bool
    ) -> int:
        """Hold the experts ``ids`` of a tensor at ``offset`` of a file; return the bytes that were read.

        ``shape`` is in ggml's order; its last dimension counts the experts.
        """
        read = self._shim.linkcpp_experts_load(
            self.address,
            name.encode(),
            kind,
            (ctypes.c_int64 * len(shape))(*shape),
            len(shape),
            (ctypes.c_int32 * len(ids))(*ids),
            len(ids),
            path.encode(),
            offset,
            mapped,
        )
        if read < 0:
            raise self._fail()
        return int(read)

    def layer(self, descriptor: LayerStruct) -> int:
        """Prepare a layer and return its handle."""
        handle = self._shim.linkcpp_experts_layer(self.address, ctypes.byref(descriptor))
        if handle < 0:
            raise self._fail()
        return int(handle)

    def compute(
        self,
        handle: int,
        rows: npt.NDArray[np.float32],
        counts: npt.NDArray[np.uint16],
        experts: npt.NDArray[np.uint16],
        weights: npt.NDArray[np.float32],
        out: npt.NDArray[np.float32],
        *,
        partial_sums: bool,
    ) -> None:
        """Compute routed rows; arrays are C-contiguous and of matching sizes (the caller has checked)."""
        status = self._shim.linkcpp_experts_compute(
            self.address,
            handle,
            partial_sums,
            len(rows),
            address_of(rows),
            address_of(counts),
            address_of(experts),
            address_of(weights),
            address_of(out),
        )
        if status != 0:
            raise self._fail()
