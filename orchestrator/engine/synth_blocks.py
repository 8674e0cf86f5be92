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
import numpy.typing as npt

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


# The deviation is that of random quants under random sub-block scales. Each sub-block's mean must be close to
# zero: activations have a mean, and offsets would add it up into a row that is the same for all tokens (seen:
# 512 tokens then choose 66 of 256 experts). Q4_K's quants run from 0 to 15, so its minimum is 7.5 times the
# scale. Q4_0 has no way to be without offset and is left out.
_LAYOUTS: Final = {
    GgmlType.Q8_0: _Layout(((0, 1.0),), 73.9),
    GgmlType.Q4_K: _Layout(((0, 1.0), (2, 7.5)), 168.0),
    GgmlType.Q6_K: _Layout(((208, 1.0),), 1366.0),
}


def random_blocks(
    seed: int, name: str, kind: GgmlType, shape: tuple[int, ...], deviation: float
) -> Iterator[memoryview]:
    """Yield the bytes of a random matrix of a quantised type whose values have this standard deviation.

    Raises :class:`InputError` for a type without a layout here and for rows that are not whole blocks.
    """
    layout = _LAYOUTS.get(kind)
    if layout is None:
        known = ", ".join(known.name for known in _LAYOUTS)
        raise InputError(f"no random blocks of type {kind.name}", hint=f"known: {known}")
    if shape[0] % kind.block_size:
        raise InputError(f"{name}: rows of {shape[0]} values are not whole blocks of {kind.block_size}")
    scale = deviation / layout.deviation
    stream = stream_of(seed, name)
    remaining = math.prod(shape) // kind.block_size
    per_piece = max(8, _PIECE_BYTES // kind.block_bytes // 8 * 8)  # whole 64-bit draws, whatever the block
    while remaining > 0:
        count = min(remaining, per_piece)
        draws = -(-count * kind.block_bytes // 8)
        raw = np.asarray(stream.random_raw(draws), dtype="<u8").view(np.uint8)[: count * kind.block_bytes]
        blocks = raw.reshape(count, kind.block_bytes)
        # each block's own scale within a quarter of the mean, from a byte that the field covers anyway
        wobble = 0.75 + blocks[:, layout.scales[0][0]].astype(np.float32) / 510.0
        if kind is GgmlType.Q4_K:
            _equal_minima(blocks)
        for offset, factor in layout.scales:
            field = (np.float32(scale * factor) * wobble).astype("<f2")
            blocks[:, offset : offset + 2] = field.view(np.uint8).reshape(count, 2)
        yield memoryview(blocks.tobytes())
        remaining -= count


def _equal_minima(blocks: npt.NDArray[np.uint8]) -> None:
    """Give each sub-block of Q4_K the same 6-bit number as scale and as minimum (packed as ``get_scale_min_k4``)."""
    blocks[:, 8:12] = blocks[:, 4:8]
    low = blocks[:, 12:16] & 15
    blocks[:, 12:16] = low | (low << 4)
