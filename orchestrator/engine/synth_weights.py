"""Deterministic random weights: what a tensor holds follows from the seed and its name alone.

Values come from raw 64-bit draws of SFC64, whose stream numpy keeps stable, so files are the same bytes on
every machine and numpy version. The spread is chosen such that signals neither die nor explode: matrices keep
the variance of their input, norms and scales lie around one, state decays are negative.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from orchestrator.models.ggml_types import GgmlType
from orchestrator.types import FloatArray

WEIGHTS_VERSION: Final = 1
"""Grows when the same seed and name give other values."""

_PIECE: Final = 1 << 20  # values per piece; even, so that the stream does not depend on it


@dataclass(frozen=True, slots=True)
class Spread:
    """Uniform values of this mean and standard deviation; ``sign`` -1 or +1 forces all to one side."""

    mean: float
    deviation: float
    sign: int = 0


_RULES: Final[tuple[tuple[str, Spread], ...]] = (
    (r"ssm_dt\.bias$", Spread(-2.0, 0.7)),  # softplus of it is the time step: small, so that the state remembers
    (r"exp_probs_b", Spread(0.0, 0.05)),  # must not outweigh the router
    (r"\.bias$", Spread(0.0, 0.1)),
    (r"ssm_a$", Spread(-1.0, 0.4, sign=-1)),
    (r"ssm_d$", Spread(1.0, 0.1)),
    (r"(\.scale|_scale(\.weight)?)$", Spread(1.0, 0.05)),
    (r"rope_(freqs|factors)", Spread(1.2, 0.1, sign=1)),
    (r"norm", Spread(1.0, 0.1)),
    (r"^token_types\.", Spread(0.0, 0.05)),  # the same row for all tokens: must not drown what tells them apart
    (r"^(token_embd|position_embd)\.", Spread(0.0, 1.0)),
)

# Matrices that write to the residual stream. In a deep stack of random layers the attention's averages would
# otherwise drown the tokens: behind 60 layers all positions looked alike and chose the same experts.
_RESIDUAL_WRITER: Final = re.compile(
    r"\.(attn_output(_b)?|ffn_down\w*|ssm_out|ffn_(routed|latent)_up|shortconv\.out_proj)\.weight$"
)
_SHALLOW: Final = 4  # layers up to which no damping is needed


def spread_of(name: str, shape: tuple[int, ...], n_layer: int) -> Spread:
    """Choose the spread for a tensor of a model of ``n_layer`` layers.

    ``shape`` is in ggml's order, so its first entry is the fan-in of a matrix.
    """
    for pattern, spread in _RULES:
        if re.search(pattern, name):
            return spread
    if len(shape) == 1:
        return Spread(0.0, 0.3)
    damping = max(1.0, n_layer / _SHALLOW) if _RESIDUAL_WRITER.search(name) else 1.0
    return Spread(0.0, 1.0 / math.sqrt(shape[0] * damping))


def stream_of(seed: int, name: str) -> np.random.SFC64:
    """Make the bit stream of one tensor; independent of all others and of their order."""
    digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    return np.random.SFC64(int.from_bytes(digest[:16], "little"))


def float_pieces(seed: int, name: str, shape: tuple[int, ...], spread: Spread) -> Iterator[FloatArray]:
    """Yield the tensor's values as flat F32 arrays of bounded size."""
    stream = stream_of(seed, name)
    remaining = math.prod(shape)
    factor = np.float32(spread.deviation * math.sqrt(3.0) / 2.0**31)
    while remaining > 0:
        count = min(remaining, _PIECE)
        raw = np.asarray(stream.random_raw((count + 1) // 2), dtype=np.uint64).view(np.int32)[:count]
        values = raw.astype(np.float32) * factor + np.float32(spread.mean)
        if spread.sign:
            values = np.abs(values) * np.float32(spread.sign)
        yield values
        remaining -= count


def byte_pieces(
    seed: int, name: str, shape: tuple[int, ...], spread: Spread, kind: GgmlType = GgmlType.F32
) -> Iterator[memoryview]:
    """Yield the same values as little-endian bytes of F32 or F16."""
    number = "<f2" if kind is GgmlType.F16 else "<f4"
    for values in float_pieces(seed, name, shape, spread):
        yield memoryview(values.astype(number).tobytes())
