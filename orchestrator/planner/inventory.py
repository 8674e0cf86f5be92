"""What a plan is made from: the layers of a model, where it may be cut, and the machines. PURE.

All sizes are bytes. What a layer costs to compute is the bytes that one token reads of it, because decoding waits
for memory. Where times were measured, they come as the bytes that would have taken as long.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.config import parse_size
from orchestrator.errors import InputError

DEFAULT_SPEED = 10e9
"""Bytes per second that a machine reads while it decodes, where nobody measured it."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: what it holds, what its caches take, and what one token reads of its weights."""

    weights: int
    expert_weights: int  # of the weights, what the routed experts take
    cache_per_token: int
    cache_per_sequence: int
    read: int  # bytes of weights per token, of the routed experts only the chosen ones
    expert_read: int  # of these, what the chosen experts take

    @property
    def has_experts(self) -> bool:
        """Whether the layer routes tokens to experts."""
        return self.expert_weights > 0


@dataclass(frozen=True, slots=True)
class Cut:
    """A cut in front of ``layer``: bytes that cross it per token, or the reason why it is impossible."""

    layer: int
    bytes_per_token: int = 0
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model as a plan sees it.

    ``input_weights`` (embeddings) come with layer 0, ``output_weights`` with the last layer and so does
    ``output_read``. Cuts that ``cuts`` does not name are legal. ``scratch`` is the working memory of one stage,
    ``output_scratch`` what the output layer needs of it besides.
    """

    name: str
    layers: tuple[Layer, ...]
    input_weights: int = 0
    output_weights: int = 0
    output_read: int = 0
    cuts: tuple[Cut, ...] = ()
    scratch: int = 0
    output_scratch: int = 0
    n_expert: int = 0
    measured: bool = False  # the costs come from measured times

    @property
    def n_layer(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def n_expert_layers(self) -> int:
        """Number of layers with routed experts: round trips of a star."""
        return sum(layer.has_experts for layer in self.layers)

    @property
    def places(self) -> tuple[int, ...]:
        """Where stages may begin and end, ascending: 0, the legal cuts, and the number of layers."""
        illegal = {cut.layer for cut in self.cuts if cut.reason is not None}
        return tuple(place for place in range(self.n_layer + 1) if place not in illegal)

    def crossing(self, place: int) -> int:
        """Bytes per token that cross the cut in front of a layer, 0 where nothing is known."""
        return next((cut.bytes_per_token for cut in self.cuts if cut.layer == place), 0)


@dataclass(frozen=True, slots=True)
class Node:
    """A machine: bytes that the plan may fill (None: as many as needed) and bytes per second it reads."""

    name: str
    host: str
    memory: int | None = None
    speed: float | None = None

    @property
    def effective_speed(self) -> float:
        """Bytes per second, measured or assumed."""
        return self.speed or DEFAULT_SPEED


@dataclass(frozen=True, slots=True)
class Load:
    """How much context is wanted: tokens of each sequence (as the engine rounds them), and sequences."""

    cells: int
    sequences: int = 1


def parse_node(text: str) -> Node:
    """Read ``NAME=HOST[:MEMORY]``, with an IPv6 address in brackets; raise :class:`InputError` on anything else."""
    name, equals, place = text.partition("=")
    name = name.strip()
    if not equals or not name or not place.strip():
        raise InputError(f"{text!r} is no machine", hint="write it like box1=192.168.0.11:64GB")
    place = place.strip()
    if place.startswith("["):
        host, bracket, rest = place[1:].partition("]")
        memory = rest.removeprefix(":")
        if not bracket or (rest and not rest.startswith(":")):
            raise InputError(f"{text!r}: the address has no end", hint="write it like box1=[fd00::11]:64GB")
    else:
        host, _, memory = place.partition(":")
        if ":" in memory:
            raise InputError(f"{text!r}: an IPv6 address needs brackets", hint="write it like box1=[fd00::11]:64GB")
    if not host:
        raise InputError(f"{text!r} names no host", hint="write it like box1=192.168.0.11:64GB")
    return Node(name, host, parse_size(memory, what=f"the memory of {name}") if memory else None)
