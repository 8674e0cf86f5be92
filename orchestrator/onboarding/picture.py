"""Draw the cosine per position as text. PURE: numbers in, lines out.

The vertical axis counts nines (0.9, 0.99, 0.999, ...): on a linear axis everything that matters would lie in the
topmost line. Each column shows the *worst* position of its share, because the worst one decides the verdict.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_MOST_NINES = 9.0  # 1e-9: beyond that F32 logits cannot tell
_MARK, _FLOOR_MARK, _BOTH = "●", "░", "◉"


def nines(cosine: float) -> float:
    """Count the nines of a cosine, capped: 0.9 is 1, 0.999 is 3, anything equal or below 0 is 0."""
    distance = min(max(1.0 - cosine, 10.0**-_MOST_NINES), 1.0)
    return -math.log10(distance)


def cosine_picture(
    cosines: Sequence[float] | npt.NDArray[np.float64],
    floor: Sequence[float] | npt.NDArray[np.float64] | None = None,
    *,
    width: int = 80,
    title: str = "cosine per position",
) -> str:
    """Plot cosines, and the noise floor's behind them, in at most ``width`` columns; returns lines of text."""
    label_width = 11
    columns = max(min(width - label_width - 2, len(cosines)), 1)
    curve = _levels(cosines, columns)
    behind = _levels(floor, columns) if floor is not None and len(floor) else [None] * columns
    lowest = int(min([level for level in [*curve, *behind] if level is not None], default=0))
    lines = [
        f"{title} (worst of each column; {_MARK} this run"
        + (f", {_FLOOR_MARK} noise floor)" if floor is not None else ")")
    ]
    for level in range(int(_MOST_NINES), lowest - 1, -1):
        marks = "".join(_mark(here == level, back == level) for here, back in zip(curve, behind, strict=True))
        lines.append(f"{_label(level):>{label_width}} │{marks}".rstrip())
    lines.append(f"{'':>{label_width}} └{'─' * columns}")
    lines.append(f"{'position':>{label_width}}  0{len(cosines) - 1:>{max(columns - 1, 1)}}")
    return "\n".join(lines)


def _levels(cosines: Sequence[float] | npt.NDArray[np.float64], columns: int) -> list[int | None]:
    parts = np.array_split(np.asarray(cosines, np.float64), columns)
    return [int(nines(float(part.min())) + 1e-9) if len(part) else None for part in parts]


def _label(level: int) -> str:
    if level >= _MOST_NINES:
        return "1"
    return f"{1.0 - 10.0**-level:.{max(level, 1)}f}"


def _mark(here: bool, behind: bool) -> str:
    if here and behind:
        return _BOTH
    return _MARK if here else _FLOOR_MARK if behind else " "
