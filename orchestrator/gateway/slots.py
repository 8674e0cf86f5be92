"""How many sequences a gateway offers: what its caches take, and what memory there is. PURE."""

from __future__ import annotations

from typing import Final

from orchestrator.errors import InputError
from orchestrator.models.caches import context_cells, layer_caches
from orchestrator.models.gguf import GgufFile

DEFAULT_SLOTS: Final = 4
"""Sequences where nobody says how many; llama.cpp's server has as many."""

SHARE_OF_MEMORY: Final = 0.5
"""The part of the free memory that slots take where nobody says how many."""

_GIB: Final = 1 << 30


def sequence_bytes(file: GgufFile, n_ctx: int) -> int:
    """Return what the caches of one sequence of ``n_ctx`` tokens take, in bytes."""
    cells = context_cells(n_ctx)
    return sum(cache.per_token * cells + cache.per_sequence for cache in layer_caches(file))


def count_slots(wanted: int | None, bytes_each: int, available: int, most: int) -> int:
    """Return the number of slots: ``wanted``, or :data:`DEFAULT_SLOTS` and fewer where memory is short.

    Raises :class:`InputError` for more than ``most`` (the rows of a micro-batch) or more than fit into ``available``
    bytes: the engine would end the process, or the system would swap.
    """
    if wanted is None:
        return max(1, min(DEFAULT_SLOTS, most, int(SHARE_OF_MEMORY * available) // max(1, bytes_each)))
    if not 1 <= wanted <= most:
        raise InputError(f"{wanted} slots are not possible: a micro-batch has room for 1 to {most} sequences")
    if wanted * bytes_each > available:
        raise InputError(
            f"the caches of {wanted} slots take {wanted * bytes_each / _GIB:.1f} GiB, "
            f"and {available / _GIB:.1f} GiB are free",
            hint="use fewer --slots or a smaller --ctx",
        )
    return wanted
