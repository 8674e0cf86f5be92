"""What a model takes: bytes per expert, bytes on the wire, memory of its context, machines.

Everything here is computed from a model's published shape and the types of its weights; nothing is typed in. Sizes
are bytes; a GiB is 2^30 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from orchestrator.errors import InputError
from orchestrator.models.ggml_types import GgmlType
from orchestrator.models.gguf import GgufFile

GIB: Final = 1 << 30

ROWS_PER_STEP: Final = 63
"""Most rows of a micro-batch that keeps answers independent of their grouping (design: batch invariance)."""

USABLE: Final = 0.9
"""Share of a machine's memory that weights and context may take; the rest is the system's and the buffers'."""

_PADDING: Final = 256  # cells; the engine rounds the cache of a sliding window up to it
_INT8: Final = GgmlType.Q8_0  # blocks of 32 values with an F16 scale, as the q8 codec of the wire


@dataclass(frozen=True, slots=True)
class Attention:
    """Layers that keep alike keys and values: either heads, or one latent row per token (MLA).

    ``window`` is the number of positions kept where attention slides.
    """

    layers: int
    kv_heads: int = 0
    head: int = 0
    latent: int = 0
    window: int = 0

    def context_bytes(self, tokens: int) -> int:
        """Return the F16 keys and values of so many tokens, as the engine keeps them."""
        cells = tokens
        if self.window:
            cells = min(tokens, -(-(self.window + ROWS_PER_STEP) // _PADDING) * _PADDING)
        values = self.latent or 2 * self.kv_heads * self.head  # a latent row serves as key and value
        return self.layers * cells * values * 2


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The public configuration of a model, as far as it decides what it takes.

    ``n_latent`` is the routed experts' row length where that is not ``n_embd``. ``attention`` is empty where not
    enough is public, and ``has_more_state`` tells that the context has parts that it does not list.
    """

    architecture: str
    n_embd: int
    n_layer: int
    n_expert: int
    top_k: int
    n_ff_exp: int
    n_vocab: int
    n_ctx_train: int
    n_lead: int = 0  # dense layers before the first with experts
    moe_every: int = 1  # one of so many layers has experts
    n_shared: int = 0
    n_ff_shared: int = 0
    n_ff_dense: int = 0
    n_mtp: int = 0  # prediction layers in the checkpoint
    n_latent: int = 0
    expert_bias: bool = False
    attention: tuple[Attention, ...] = ()
    has_more_state: bool = False

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Numbers of the layers with experts: of every so many the last."""
        behind = range(self.n_lead, self.n_layer)
        return tuple(layer for layer in behind if (layer - self.n_lead) % self.moe_every == self.moe_every - 1)

    @property
    def row_length(self) -> int:
        """Values of a row that goes to an expert and comes back."""
        return self.n_latent or self.n_embd

    @property
    def parameters_per_expert(self) -> int:
        """Weights of one expert's three matrices."""
        return 3 * self.row_length * self.n_ff_exp

    @property
    def routed_parameters(self) -> int:
        """Weights of all routed experts."""
        return self.parameters_per_expert * self.n_expert * len(self.moe_layers)

    def context_bytes(self, tokens: int) -> int | None:
        """Return the memory of so many tokens of context, ``None`` where the attention's sizes are not public."""
        if not self.attention:
            return None
        return sum(attention.context_bytes(tokens) for attention in self.attention)


def expert_types(quant: str, layer: int, n_layer: int) -> tuple[GgmlType, GgmlType, GgmlType]:
    """Return the types of an expert's gate, up and down matrix under a declared quantisation.

    ``quant`` is a type, or one of the mixes ``Q4_K_M`` and ``Q4_K_S``, which follow ``llama-quant.cpp``.
    Raise :class:`InputError` for any other name.
    """
    eighth = n_layer // 8
    if quant == "Q4_K_M":
        more = layer < eighth or layer >= 7 * n_layer // 8 or (layer - eighth) % 3 == 2
        return GgmlType.Q4_K, GgmlType.Q4_K, GgmlType.Q6_K if more else GgmlType.Q4_K
    if quant == "Q4_K_S":
        return GgmlType.Q4_K, GgmlType.Q4_K, GgmlType.Q5_K if layer < eighth else GgmlType.Q4_K
    if quant not in GgmlType.__members__:
        raise InputError(f"unknown quantisation {quant!r}", hint="name a type of ggml, Q4_K_M or Q4_K_S")
    kind = GgmlType[quant]
    return kind, kind, kind


def declared_expert_bytes(shape: ModelShape, quant: str) -> Mapping[int, int]:
    """Return layer -> bytes of one of its experts under a declared quantisation.

    Raise :class:`InputError` where rows are no whole blocks of a type.
    """
    sizes = {}
    bias = 4 * (2 * shape.n_ff_exp + shape.row_length) if shape.expert_bias else 0
    for layer in shape.moe_layers:
        total = bias
        for kind, row in zip(
            expert_types(quant, layer, shape.n_layer),
            (shape.row_length, shape.row_length, shape.n_ff_exp),
            strict=True,
        ):
            if row % kind.block_size:
                raise InputError(f"rows of {row} values are no whole blocks of {kind.name}")
            total += kind.bytes_of(shape.row_length * shape.n_ff_exp)
        sizes[layer] = total
    return sizes


def wire_bytes(row_length: int, top_k: int) -> Mapping[str, int]:
    """Return what one token and layer moves, out and back, per contract of a star with one worker.

    ``exact`` brings one F32 row per expert back, ``sum`` one F32 row; the two others send and bring back one row in
    F16 or in blocks of INT8. With more workers a token's row goes to each that holds one of its experts.
    """
    return {
        "exact": 4 * row_length * (1 + top_k),
        "sum": 2 * 4 * row_length,
        "sum-f16": 2 * 2 * row_length,
        "sum-q8": 2 * _INT8.bytes_of(row_length),
    }


@dataclass(frozen=True, slots=True)
class Footprint:
    """The derived figures of a model."""

    expert_bytes: Mapping[int, int]  # of one expert, per MoE layer
    n_expert: int
    other_bytes: int  # all that is no routed expert
    context_bytes: int | None
    wire: Mapping[str, int]

    @property
    def mean_expert_bytes(self) -> int:
        """Bytes of an expert, the mean over the layers."""
        return round(sum(self.expert_bytes.values()) / len(self.expert_bytes)) if self.expert_bytes else 0

    @property
    def routed_bytes(self) -> int:
        """Bytes of all routed experts."""
        return self.n_expert * sum(self.expert_bytes.values())

    def machines(self, memory: float) -> int | None:
        """Return how many machines of ``memory`` bytes a star needs, ``None`` where the first cannot do its part.

        The first holds everything but the experts, the context, and what fits besides; experts are not cut.
        """
        usable = USABLE * memory
        spare = usable - self.other_bytes - (self.context_bytes or 0)
        if spare < 0:
            return None
        largest = max(self.expert_bytes.values(), default=0)
        if largest == 0:
            return 1
        experts = self.n_expert * len(self.expert_bytes)
        # Experts are small beside a machine, so that their mean decides; one must fit at all.
        mean = self.routed_bytes / experts
        left, each = experts - math.floor(spare / mean), math.floor(usable / mean)
        if left <= 0:
            return 1
        return None if each == 0 or largest > usable else 1 + -(-left // each)


def declared_footprint(shape: ModelShape, quant: str, parameters: float, tokens: int) -> Footprint:
    """Derive the figures of a model without its file; ``parameters`` is its published total.

    The total is a rounded number, so ``other_bytes`` is an estimate, at 8.5 bits each: files keep those weights in
    more bits than the experts.
    """
    others = max(0.0, parameters - shape.routed_parameters)
    return Footprint(
        declared_expert_bytes(shape, quant),
        shape.n_expert,
        math.ceil(others * GgmlType.Q8_0.block_bytes / GgmlType.Q8_0.block_size),
        shape.context_bytes(tokens),
        wire_bytes(shape.row_length, shape.top_k),
    )


def file_footprint(shape: ModelShape, model: GgufFile, tokens: int) -> Footprint:
    """Derive the figures from a model's file, or from a slice of it, which knows the whole."""
    expert_bytes = {layer: model.bytes_per_expert(layer) for layer in model.moe_layers}
    everything = sum(entry.n_bytes for entry in model.manifest.values())
    return Footprint(
        expert_bytes,
        model.n_expert,
        everything - model.n_expert * sum(expert_bytes.values()),
        shape.context_bytes(tokens),
        wire_bytes(shape.row_length, shape.top_k),
    )


def differences(shape: ModelShape, model: GgufFile) -> Sequence[str]:
    """Say where a file is not what the catalogue claims about its shape."""
    claims = (
        ("architecture", shape.architecture, model.architecture),
        ("embedding_length", shape.n_embd, model.number("embedding_length", 0)),
        ("block_count", shape.n_layer + shape.n_mtp, model.n_layer),
        ("expert_count", shape.n_expert, model.n_expert),
        ("expert_used_count", shape.top_k, model.top_k),
        ("layers with experts", len(shape.moe_layers) + shape.n_mtp, len(model.moe_layers)),
    )
    found = [f"{name} is {actual} and not {claimed}" for name, claimed, actual in claims if claimed != actual]
    # Converters may leave the prediction layers out.
    return [text for text in found if shape.n_mtp == 0 or not text.startswith(("block_count", "layers"))]
