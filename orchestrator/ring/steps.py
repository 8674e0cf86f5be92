"""What travels through a ring: steps of tokens and operations on the KV cache, in one order. PURE.

A step carries the real tokens to every stage (some architectures look at them in inner layers) and, between
stages, the boundary: the values that cross the cut, as one blob per micro-batch in graph order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from orchestrator.errors import InputError
from orchestrator.types import IntArray

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Tokens of one or several sequences for one decode: four arrays of length n.

    ``positions`` count from 0 in each sequence and ascend; ``outputs`` marks the tokens whose logits are wanted.
    """

    tokens: IntArray
    positions: IntArray
    sequences: IntArray
    outputs: BoolArray

    def __post_init__(self) -> None:
        n = len(self.tokens)
        if not n or len(self.positions) != n or len(self.sequences) != n or len(self.outputs) != n:
            raise InputError("a batch needs at least one token, and as many positions, sequences and outputs")

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def n_outputs(self) -> int:
        """Rows of logits that this batch asks for."""
        if len(self.tokens) == 1:
            return int(bool(self.outputs[0]))
        return int(np.count_nonzero(self.outputs))

    def starts(self) -> dict[int, int]:
        """First new position of each sequence in the batch."""
        order = range(len(self) - 1, -1, -1)
        return {int(self.sequences[i]): int(self.positions[i]) for i in order}

    def split(self, size: int) -> tuple[TokenBatch, ...]:
        """Cut into batches of at most ``size`` tokens, in order."""
        if len(self) <= size:
            return (self,)
        return tuple(
            TokenBatch(
                self.tokens[i : i + size],
                self.positions[i : i + size],
                self.sequences[i : i + size],
                self.outputs[i : i + size],
            )
            for i in range(0, len(self), size)
        )


def one_sequence(tokens: Sequence[int], position: int, *, sequence: int = 0, every: bool = False) -> TokenBatch:
    """Make the batch that appends ``tokens`` to a sequence; logits of all of them, or of the last."""
    n = len(tokens)
    outputs = np.full(n, every, np.bool_)
    if n:
        outputs[-1] = True
    return TokenBatch(
        np.asarray(tokens, np.int32),
        np.arange(position, position + n, dtype=np.int32),
        np.full(n, sequence, np.int32),
        outputs,
    )


@dataclass(frozen=True, slots=True)
class Remove:
    """Forget positions [first, last) of a sequence; ``last`` -1: to its end."""

    sequence: int
    first: int = 0
    last: int = -1


@dataclass(frozen=True, slots=True)
class Copy:
    """Let ``destination`` hold the positions [first, last) of ``source``, in place of what it held."""

    source: int
    destination: int
    first: int = 0
    last: int = -1


@dataclass(frozen=True, slots=True)
class Keep:
    """Forget every sequence but this one."""

    sequence: int


@dataclass(frozen=True, slots=True)
class Shift:
    """Add ``delta`` to the positions [first, last) of a sequence (RoPE is applied anew: K-shift)."""

    sequence: int
    first: int
    last: int
    delta: int


@dataclass(frozen=True, slots=True)
class Clear:
    """Forget everything."""


@dataclass(frozen=True, slots=True)
class Restore:
    """Put a saved state (bytes of :class:`Save` from the same stage) into a sequence."""

    sequence: int
    state: bytes


KvOperation = Remove | Copy | Keep | Shift | Clear | Restore


@dataclass(frozen=True, slots=True)
class Save:
    """Store a sequence's state under a number, in each stage its own layers'."""

    sequence: int
    key: int


@dataclass(frozen=True, slots=True)
class Recall:
    """Put what :class:`Save` stored under this number into a sequence, in place of what it holds."""

    sequence: int
    key: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop what is stored under this number."""

    key: int


RingOperation = Remove | Copy | Keep | Shift | Clear | Save | Recall | Forget
"""What can travel round a ring: everything that names state and carries none."""
