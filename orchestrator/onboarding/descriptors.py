"""Sum up the layer descriptors of a model in one row of a table. PURE."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from orchestrator.types import LayerDescriptor

ACTIVATIONS: Final = (
    "none",
    "SILU",
    "GELU",
    "RELU",
    "RELU²",
    "SWIGLU",
    "GEGLU",
    "REGLU",
    "SWIGLU-OAI",
    "SITU",
)
"""Names of ``llm_ffn_op_type`` of the pinned engine, by value."""


@dataclass(frozen=True, slots=True)
class DescriptorSummary:
    """What the MoE calls of a model have in common, and what some of them have.

    ``row`` is the length of a routed row, ``calls`` the most calls of one layer, ``clamp`` the largest limit (0:
    none). ``gate`` says that gate and up matrices are two tensors, ``fused`` that they are one; neither, that there
    is no gate. ``biases`` and ``scales`` say that some call passes such tensors.
    """

    layers: int
    calls: int
    row: int
    n_expert: int
    top_k: int
    activation: str
    clamp: float
    weight_before_ffn: bool
    gate: bool
    fused: bool
    biases: bool
    scales: bool
    hyper_connections: int
    precision: bool

    @classmethod
    def of(cls, descriptors: Sequence[LayerDescriptor]) -> DescriptorSummary:
        """Sum up at least one descriptor."""
        roles = {role for descriptor in descriptors for role, _ in descriptor.tensors}
        calls = Counter(descriptor.layer for descriptor in descriptors)
        names = dict.fromkeys(activation_name(descriptor.activation) for descriptor in descriptors)
        return cls(
            layers=len(calls),
            calls=max(calls.values()),
            row=max(descriptor.n_embd for descriptor in descriptors),
            n_expert=max(descriptor.n_expert for descriptor in descriptors),
            top_k=max(descriptor.top_k for descriptor in descriptors),
            activation=" and ".join(names),
            clamp=max(descriptor.clamp for descriptor in descriptors),
            weight_before_ffn=any(descriptor.weight_before_ffn for descriptor in descriptors),
            gate="gate" in roles,
            fused="gate_up" in roles,
            biases=any(role.endswith("_bias") for role in roles),
            scales=any(role.endswith("_scale") for role in roles),
            hyper_connections=max(descriptor.hyper_connections for descriptor in descriptors),
            precision=any(descriptor.precision for descriptor in descriptors),
        )

    def words(self) -> str:
        """Say it in words: the activation first, then whatever is out of the ordinary."""
        gate = "fused gate_up" if self.fused else "" if self.gate else "no gate"
        parts = [
            self.activation,
            gate,
            f"clamp {self.clamp:g}" if self.clamp else "",
            "weight before the FFN" if self.weight_before_ffn else "",
            "biases" if self.biases else "",
            "scales" if self.scales else "",
            f"{self.hyper_connections} residual streams" if self.hyper_connections > 1 else "",
            "F32 activations kept" if self.precision else "",
        ]
        return ", ".join(part for part in parts if part)

    def to_json(self) -> dict[str, object]:
        """Return the JSON object."""
        return {name: getattr(self, name) for name in _FIELDS}

    @classmethod
    def from_json(cls, value: Mapping[str, object]) -> DescriptorSummary:
        """Read what :meth:`to_json` wrote; raise ``KeyError`` or ``TypeError`` on anything else."""
        return cls(**{name: value[name] for name in _FIELDS})  # type: ignore[arg-type]


def activation_name(number: int) -> str:
    """Name an activation; an unknown one by its number."""
    return ACTIVATIONS[number] if 0 <= number < len(ACTIVATIONS) else f"activation {number}"


_FIELDS: Final = tuple(DescriptorSummary.__dataclass_fields__)
