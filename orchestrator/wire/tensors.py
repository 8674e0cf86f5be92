"""How rows of floats travel: the codecs, by the number that stands in a frame.

Only ``f32`` is here. A compact codec is one more class and one more line in :data:`CODECS`; its encoded size
must be a multiple of four bytes, so that what follows in the frame stays aligned.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

import numpy as np

from orchestrator.errors import ProtocolError
from orchestrator.types import FloatArray


class RowCodec(Protocol):
    """Turns [R, n] F32 rows into bytes and back."""

    code: int
    name: str

    def size(self, n_rows: int, length: int) -> int:
        """Give the encoded bytes of [n_rows, length]; a multiple of four."""

    def encode(self, rows: FloatArray) -> memoryview:
        """Encode C-contiguous rows; the view may share their memory."""

    def decode(self, data: memoryview, n_rows: int, length: int) -> FloatArray:
        """Decode ``size(n_rows, length)`` bytes into [n_rows, length]; the array may share their memory."""


class F32Codec:
    """The floats as they are, little-endian, row after row."""

    code = 0
    name = "f32"

    def size(self, n_rows: int, length: int) -> int:
        """Give the encoded bytes of [n_rows, length]."""
        return 4 * n_rows * length

    def encode(self, rows: FloatArray) -> memoryview:
        """Give the rows' own memory."""
        if rows.dtype != _F32 or not rows.flags.c_contiguous:
            rows = np.ascontiguousarray(rows, dtype=_F32)
        return rows.data.cast("B")

    def decode(self, data: memoryview, n_rows: int, length: int) -> FloatArray:
        """Give an array over the bytes, without a copy."""
        return np.frombuffer(data, dtype=_F32).reshape(n_rows, length)


_F32: Final = np.dtype("<f4")

F32: Final = F32Codec()
CODECS: Final[Mapping[int, RowCodec]] = {F32.code: F32}


def codec_of(code: int) -> RowCodec:
    """Find the codec with this number; raise :class:`ProtocolError` where there is none."""
    codec = CODECS.get(code)
    if codec is None:
        raise ProtocolError(f"unknown row codec {code}")
    return codec
