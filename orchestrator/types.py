"""Frozen values that more than one package speaks of."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from orchestrator.errors import InputError

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int32]

TENSOR_ROLES: Final = (
    "up",
    "gate",
    "down",
    "gate_up",
    "up_bias",
    "gate_bias",
    "down_bias",
    "gate_up_bias",
    "up_scale",
    "gate_scale",
    "down_scale",
)
"""What an expert tensor is for, in the order of the shim's descriptor (``build_moe_ffn``'s arguments)."""


class Contract(enum.Enum):
    """What a worker returns (design: the numbers contract)."""

    EXACT = "exact"  # one F32 row per (token, expert), unweighted; the backbone adds in router order
    SUM = "sum"  # one F32 row per token: the weighted partial sum of this worker's experts


class Boundary(enum.Enum):
    """How the stages of a ring hand on what crosses the cut between them."""

    F32 = "f32"  # the engine's own bytes
    F16 = "f16"  # floats rounded to F16, see wire/boundary.py


class RefusalCode(enum.IntEnum):
    """Why a worker refuses a request; the connection stays open unless stated otherwise."""

    BAD_REQUEST = 1  # sizes or ids that contradict the descriptor
    NOT_OWNED = 2  # an expert or layer that this worker does not hold
    UNKNOWN_LAYER = 3  # no descriptor was sent for this layer and call
    OVERLOADED = 4  # the bounded queue is full
    COMPUTE_FAILED = 5  # the engine failed on this request; others are served
    DRAINING = 6  # the worker is shutting down
    INCOMPATIBLE = 7  # protocol, engine, instruction set or file differ; the connection is closed
    NO_ROOM = 8  # not enough memory for layers that were asked for


@dataclass(frozen=True, slots=True)
class LayerDescriptor:
    """All that a worker must know of one MoE call of one layer; captured in the graph, never guessed.

    ``n_embd`` is the routed experts' row length (the latent width where an architecture has one), ``call``
    counts the ``build_moe_ffn`` calls of a layer from 0. ``tensors`` holds only the tensors that the
    architecture passes, as (role, tensor name) with roles of :data:`TENSOR_ROLES`.
    """

    layer: int
    call: int
    architecture: str
    activation: int  # llm_ffn_op_type of the pinned engine
    n_embd: int
    n_ff: int
    n_expert: int
    top_k: int
    weight_before_ffn: bool
    clamp: float
    situ_beta: float
    situ_linear_beta: float
    hyper_connections: int
    tensors: tuple[tuple[str, str], ...]
    precision: int = 0  # bit per role: the activation of this product is kept in F32


@dataclass(frozen=True, slots=True)
class ExpertBatch:
    """The routed rows of one MoE call of one micro-batch.

    ``rows`` is [n_tokens, n_embd] F32, ``experts`` [n_tokens, top_k] I32, ``weights`` [n_tokens, top_k] F32.
    The arrays may be views of engine memory: they are valid until the hook returns.
    """

    layer: int
    call: int
    rows: FloatArray
    experts: IntArray
    weights: FloatArray


@dataclass(frozen=True, slots=True)
class Ownership:
    """Which experts of which layers somebody holds: layer -> sorted expert ids."""

    experts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def product(cls, layers: Iterable[int], experts: Iterable[int]) -> Ownership:
        """Own the same experts in each of the layers."""
        ids = tuple(sorted(set(experts)))
        return cls(dict.fromkeys(sorted(set(layers)), ids))

    def holds(self, layer: int, expert: int) -> bool:
        """Tell whether this (layer, expert) is owned."""
        return expert in self.experts.get(layer, ())

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers with at least one expert, ascending."""
        return tuple(sorted(layer for layer, ids in self.experts.items() if ids))

    @property
    def count(self) -> int:
        """Number of (layer, expert) pairs."""
        return sum(len(ids) for ids in self.experts.values())


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """What decides whether two engines give the same bytes: build, instruction set and weight repacking."""

    build: str  # hash over pin, patches, shim and flags
    isa: str  # instruction set in use, for example "AVX2 FMA F16C"
    repack: bool  # extra buffer types on (they add in another order)


def parse_ranges(text: str, *, what: str = "range") -> tuple[int, ...]:
    """Parse ``0-3,8,10-11`` into sorted distinct numbers; raise :class:`InputError` on anything else."""
    numbers: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise InputError(f"{what} {text!r} is not a list of numbers and ranges", hint="write it like 0-3,8,10-11")
        low, high = int(first), int(last) if dash else int(first)
        if high < low or high - low > 1_000_000:
            raise InputError(f"{what} {part.strip()!r} runs backwards or is too long")
        numbers.update(range(low, high + 1))
    return tuple(sorted(numbers))


def format_ranges(numbers: Iterable[int]) -> str:
    """Write numbers as ``0-3,8``: the inverse of :func:`parse_ranges`."""
    parts: list[str] = []
    start = previous = None
    for number in [*sorted(set(numbers)), None]:
        if previous is not None and number != previous + 1:
            parts.append(f"{start}" if start == previous else f"{start}-{previous}")
            start = None
        if start is None:
            start = number
        previous = number
    return ",".join(parts)
