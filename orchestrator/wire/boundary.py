"""How what crosses a cut travels: as it is, or its floats rounded to F16. PURE.

A boundary is a run of 32-bit words: nearly all are the F32 values of residual streams, some may be integers (the
experts or cells that one layer chose and others use again). Each word is judged by itself, so what arrives does not
depend on which tokens shared a step: a word goes as F16 where that is what it can be, and all others stay as they
are. Those are values beyond F16's range, infinities, and words that as floats would be below 2^-64 and yet not zero.
No activation is so small, and every integer from -8,388,608 to 528,482,303 is such a word, a NaN, or zero.
"""

from __future__ import annotations

import enum
from typing import Final

import numpy as np

from orchestrator.errors import ProtocolError


class BoundaryCodec(enum.IntEnum):
    """What the bytes of a step's boundary are; all but F32 also ask whoever computes the step to send F16 on."""

    F32 = 0  # the engine's own bytes
    F16 = 1  # every word as F16
    MIXED = 2  # u32 n, a bit per word (1: kept, lowest bit first), the others as F16, the kept words


_F16: Final = np.dtype("<f2")
_F32: Final = np.dtype("<f4")
_U32: Final = np.dtype("<u4")

_LEAST: Final = 2.0**-64
_MOST: Final = 65520.0  # the least value that F16 would round to infinity


def encode(boundary: bytes) -> tuple[BoundaryCodec, bytes]:
    """Round the engine's bytes to F16 where that can be."""
    values = np.frombuffer(boundary, _F32)
    size = np.abs(values)
    fits = ((size >= _LEAST) & (size < _MOST)) | (values == 0)
    if fits.all():
        return BoundaryCodec.F16, values.astype(_F16).tobytes()
    parts = (
        np.array([len(values)], _U32),
        np.packbits(~fits, bitorder="little"),
        values[fits].astype(_F16),
        values.view(_U32)[~fits],
    )
    return BoundaryCodec.MIXED, b"".join(part.tobytes() for part in parts)


def decode(codec: BoundaryCodec, data: bytes | memoryview) -> bytes:
    """Return what the engine takes; raise :class:`ProtocolError` on sizes that contradict each other."""
    if codec is BoundaryCodec.F32:
        return bytes(data)
    if codec is BoundaryCodec.F16:
        return np.frombuffer(data, _F16).astype(_F32).tobytes()
    n_words = int.from_bytes(data[:4], "little")
    halves_at = 4 + (n_words + 7) // 8
    if len(data) < halves_at:
        raise ProtocolError(f"a boundary of {len(data)} bytes says {n_words} words")
    bits = np.frombuffer(data, np.uint8, halves_at - 4, 4)
    kept = np.unpackbits(bits, count=n_words, bitorder="little").view(np.bool_)
    n_kept = int(np.count_nonzero(kept))
    words_at = halves_at + 2 * (n_words - n_kept)
    if len(data) != words_at + 4 * n_kept:
        raise ProtocolError(f"a boundary of {len(data)} bytes says {n_words} words, {n_kept} of them kept")
    words = np.empty(n_words, _U32)
    words[~kept] = np.frombuffer(data, _F16, n_words - n_kept, halves_at).astype(_F32).view(_U32)
    words[kept] = np.frombuffer(data, _U32, n_kept, words_at)
    return words.tobytes()
