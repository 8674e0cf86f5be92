"""Random quantised blocks, made directly: valid bytes of a type with a chosen spread, without quantising floats.

A layer of a large model has gigabytes of weights; quantising as many floats takes minutes, random blocks take
seconds. The layouts are those of the block structs in ``ggml-common.h`` of the pinned engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from orchestrator.engine.synth_weights import stream_of
from orchestrator.errors import InputError
from orchestrator.models.ggml_types import GgmlType

_PIECE_BYTES: Final = 1 << 24


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the F16 scales lie in a block, and how many times the scale a random value deviates from its mean.

    ``scales`` holds (offset in bytes, factor): the field is set to factor times the block's scale.
    """

    scales: tuple[tuple[int, float], ...]
    deviation: float


# The deviation is that of random quants under random sub-block scales; the factor 7.5 of Q4_K's minimum brings
# the mean to zero, since its quants run from 0 to 15.
_LAYOUTS: Final = {
    GgmlType.Q4_0: _Layout(((0, 1.0),), 4.64),
    GgmlType.Q8_0: _Layout(((0, 1.0),), 73.9),
    GgmlType.Q4_K: _Layout(((0, 1.0), (2, 7.5)), 258.0),
    GgmlType.Q6_K: _Layout(((208, 1.0),), 1366.0),
}


def random_blocks(seed: int, name: str, kind: GgmlType, shape: tuple[int, ...]) -> Iterator[memoryview]:
    """Yield the bytes of a random matrix of a quantised type with deviation ``1 / sqrt(shape[0])``.

    Raises :class:`InputError` for a type without a layout here and for rows that are not whole blocks.
    """
    layout = _LAYOUTS.get(kind)
    if layout is None:
        known = ", ".join(known.name for known in _LAYOUTS)
        raise InputError(f"no random blocks of type {kind.name}", hint=f"known: {known}")
    if shape[0] % kind.block_size:
        raise InputError(f"{name}: rows of {shape[0]} values are not whole blocks of {kind.block_size}")
    scale = 1.0 / math.sqrt(shape[0]) / layout.deviation
    stream = stream_of(seed, name)
    remaining = math.prod(shape) // kind.block_size
    per_piece = max(8, _PIECE_BYTES // kind.block_bytes // 8 * 8)  # whole 64-bit draws, whatever the block
    while remaining > 0:
        count = min(remaining, per_piece)
        draws = -(-count * kind.block_bytes // 8)
        raw = np.asarray(stream.random_raw(draws), dtype="<u8").view(np.uint8)[: count * kind.block_bytes]
        blocks = raw.reshape(count, kind.block_bytes)
        for offset, factor in layout.scales:
            # each block's own scale within a quarter of the mean, from a byte that the field covers anyway
            wobble = 0.75 + blocks[:, offset].astype(np.float32) / 510.0
            field = (np.float32(scale * factor) * wobble).astype("<f2")
            blocks[:, offset : offset + 2] = field.view(np.uint8).reshape(count, 2)
        yield memoryview(blocks.tobytes())
        remaining -= count
