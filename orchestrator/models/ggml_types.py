"""The tensor types a GGUF may hold: how many values one block has and how many bytes it takes.

Values follow ``ggml_type`` and the block structs of ``ggml-common.h`` at the pinned engine; types that upstream
removed have no entry, so a file that uses one is refused by name.
"""

from __future__ import annotations

import enum
from typing import Final


class GgmlType(enum.IntEnum):
    """Number of a tensor type, as written in a GGUF."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41
    Q2_0 = 42

    @property
    def block_size(self) -> int:
        """Values per block; a row's length is a multiple of it."""
        return _BLOCKS[self][0]

    @property
    def block_bytes(self) -> int:
        """Bytes per block."""
        return _BLOCKS[self][1]

    @property
    def multiplies(self) -> bool:
        """Whether the engine multiplies matrices of this type (``vec_dot`` of ``type_traits_cpu``, ggml-cpu.c)."""
        return self not in _WITHOUT_PRODUCT

    def bytes_of(self, values: int) -> int:
        """Return the bytes that this many values take (a multiple of the block size)."""
        size, width = _BLOCKS[self]
        return values // size * width


_BLOCKS: Final = {
    GgmlType.F32: (1, 4),
    GgmlType.F16: (1, 2),
    GgmlType.Q4_0: (32, 18),
    GgmlType.Q4_1: (32, 20),
    GgmlType.Q5_0: (32, 22),
    GgmlType.Q5_1: (32, 24),
    GgmlType.Q8_0: (32, 34),
    # An intermediate type that no file holds. The engine counts two F16 (36); gguf-py counts two F32 (40).
    GgmlType.Q8_1: (32, 36),
    GgmlType.Q2_K: (256, 84),
    GgmlType.Q3_K: (256, 110),
    GgmlType.Q4_K: (256, 144),
    GgmlType.Q5_K: (256, 176),
    GgmlType.Q6_K: (256, 210),
    GgmlType.Q8_K: (256, 292),
    GgmlType.IQ2_XXS: (256, 66),
    GgmlType.IQ2_XS: (256, 74),
    GgmlType.IQ3_XXS: (256, 98),
    GgmlType.IQ1_S: (256, 50),
    GgmlType.IQ4_NL: (32, 18),
    GgmlType.IQ3_S: (256, 110),
    GgmlType.IQ2_S: (256, 82),
    GgmlType.IQ4_XS: (256, 136),
    GgmlType.I8: (1, 1),
    GgmlType.I16: (1, 2),
    GgmlType.I32: (1, 4),
    GgmlType.I64: (1, 8),
    GgmlType.F64: (1, 8),
    GgmlType.IQ1_M: (256, 56),
    GgmlType.BF16: (1, 2),
    GgmlType.TQ1_0: (256, 54),
    GgmlType.TQ2_0: (256, 66),
    GgmlType.MXFP4: (32, 17),
    GgmlType.NVFP4: (64, 36),
    GgmlType.Q1_0: (128, 18),
    GgmlType.Q2_0: (64, 18),
}

_WITHOUT_PRODUCT: Final = frozenset(
    {
        GgmlType.I8,
        GgmlType.I16,
        GgmlType.I32,
        GgmlType.I64,
        GgmlType.F64,
        GgmlType.Q8_1,  # it and the next hold activations only
        GgmlType.Q8_K,
    }
)
