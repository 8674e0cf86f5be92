"""What is tried for each quantisation type of the experts: kinds of models, and the ways to run them. PURE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from orchestrator.models.ggml_types import GgmlType

MIX: Final = "Q4_K_M"
"""Q4_K with Q6_K in the down projections of half of the layers: what real files of that name hold."""


@dataclass(frozen=True, slots=True)
class Body:
    """A small model whose experts are quantised; ``sizes`` are :class:`Dimensions` that differ from the recipe's."""

    name: str
    architecture: str
    title: str
    sizes: Mapping[str, int]


_WIDE: Final = {"n_layer": 2, "n_embd": 256, "n_ff": 256, "n_ff_exp": 256, "n_expert": 12, "n_lead": 0}

BODIES: Final = (
    Body("plain", "qwen2moe", "gate, up, down", _WIDE),
    Body("fused", "deepseek2", "fused gate_up", _WIDE | {"n_lead": 1, "n_layer": 3}),
    Body("scaled", "llama", "scale tensors", _WIDE),
    Body("biased", "gpt-oss", "biases", _WIDE),
    # 2880 = 11 * 256 + 64: whole blocks of 32 and no whole super-blocks
    Body("odd", "gpt-oss", "biases, rows of 288 and 352", _WIDE | {"n_embd": 288, "n_ff": 352, "n_ff_exp": 352}),
)
"""Every way in which expert tensors lie in a file."""

LAYERS_OF_MIX: Final = 8
"""Layers of a mixed file: fewer would not hold both types."""


@dataclass(frozen=True, slots=True)
class Setting:
    """How both sides run: with repacked weights or not, and in which micro-batches."""

    name: str
    repack: bool
    batch_invariant: bool
    n_ubatch: int


SETTINGS: Final = (
    Setting("as it serves", repack=False, batch_invariant=True, n_ubatch=63),
    Setting("repacked", repack=True, batch_invariant=True, n_ubatch=63),
    Setting("stock", repack=True, batch_invariant=False, n_ubatch=512),
)
"""The configuration that `linkcpp serve` uses; the same with repacked weights; and the stock engine's, which repacks
and takes large micro-batches."""


def bodies_for(type_name: str) -> tuple[Body, ...]:
    """Return the bodies whose rows are whole blocks of a type; a mixed file is made of deep ones."""
    if type_name == MIX:
        return tuple(
            Body(body.name, body.architecture, body.title, {**body.sizes, "n_layer": LAYERS_OF_MIX})
            for body in BODIES
            if body.name != "odd"
        )
    block = GgmlType[type_name].block_size
    return tuple(body for body in BODIES if all(body.sizes[key] % block == 0 for key in ("n_embd", "n_ff_exp")))
