"""Views of the engine's memory as numpy arrays, and copies of it."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]

_KEPT = 4096


class _Views:
    """Arrays over addresses that come again and again; making one costs more than using it, so they are kept."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._kept: dict[tuple[int | None, tuple[int, ...]], Any] = {}

    def view(self, address: int | None, shape: tuple[int, ...]) -> Any:
        """Return the array; it is valid for as long as the engine leaves the memory alone."""
        found = self._kept.get((address, shape))
        if found is None:
            if len(self._kept) >= _KEPT:
                self._kept.clear()
            count = int(np.prod(shape))
            found = np.ctypeslib.as_array((self._kind * count).from_address(address)).reshape(shape)
            self._kept[address, shape] = found
        return found


class FloatViews(_Views):
    """Views of F32 values."""

    def __init__(self) -> None:
        super().__init__(ctypes.c_float)

    def at(self, address: int | None, shape: tuple[int, ...]) -> FloatArray:
        """View ``shape`` values at an address."""
        array: FloatArray = self.view(address, shape)
        return array


class IntegerViews(_Views):
    """Views of I32 values."""

    def __init__(self) -> None:
        super().__init__(ctypes.c_int32)

    def at(self, address: int | None, shape: tuple[int, ...]) -> npt.NDArray[np.int32]:
        """View ``shape`` values at an address."""
        array: npt.NDArray[np.int32] = self.view(address, shape)
        return array


class ByteViews(_Views):
    """Views of bytes."""

    def __init__(self) -> None:
        super().__init__(ctypes.c_ubyte)

    def at(self, address: int | None, size: int) -> memoryview:
        """View ``size`` bytes at an address."""
        found: memoryview = self.view(address, (size,)).data
        return found


def address_of(array: npt.NDArray[Any] | memoryview) -> int:
    """Return where a C-contiguous array begins; a third of the time of ``array.ctypes.data``, which is 1 us."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]
    except (TypeError, ValueError):  # read-only or empty
        return int(np.asarray(array).ctypes.data)


def copy_bytes(address: int | None, size: int) -> bytes:
    """Copy ``size`` bytes from an address."""
    return ctypes.string_at(address or 0, size)
