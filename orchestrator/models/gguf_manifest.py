"""What a slice says about the model that it was cut from: all tensors with their whole shapes, and the experts kept.

Keys in the metadata of a slice (a model that lacks none of its tensors has none of them):

- ``linkcpp.manifest.names`` (strings), ``.types`` (uint32) and ``.shapes`` (uint64, four lengths per tensor in
  ggml's order, padded with 1) list every tensor of the whole model;
- ``linkcpp.slice.experts`` (strings like ``3-20:0-63``, layers first) tells which experts the stacked tensors of
  these layers still hold, ascending. Such a tensor keeps its name and is shorter in the dimension of the experts;
  stacked tensors of other layers hold all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from orchestrator.errors import ModelFileError
from orchestrator.models.ggml_types import GgmlType
from orchestrator.types import format_ranges

EXPERT_TENSOR: Final = re.compile(r"blk\.(\d+)\.ffn_(up|gate|down|gate_up)_(?:ch)?exps\.(weight|bias|scale)")
"""Names of the routed experts' tensors (groups: layer, role, kind); not arctic's norm ``ffn_norm_exps``."""

MANIFEST_PREFIX: Final = "linkcpp.manifest."
SLICE_PREFIX: Final = "linkcpp.slice."
SLICE_EXPERTS: Final = SLICE_PREFIX + "experts"

# The engine aborts the whole process beyond these, so files that claim more are refused (llama-hparams.h of the pin).
MAX_LAYERS: Final = 512
MAX_EXPERTS: Final = 1024

Shape4 = tuple[int, int, int, int]
Shares = Mapping[int, tuple[int, ...]]
"""Layer -> the ids of its experts, ascending."""

_EXPERT_DIMENSION: Final = {"weight": 2, "bias": 1, "scale": 0}


@dataclass(frozen=True, slots=True)
class TensorShape:
    """A tensor of the whole model, present in this file or not; ``shape`` has four lengths."""

    name: str
    type: GgmlType
    shape: Shape4

    @property
    def n_bytes(self) -> int:
        """Bytes of the whole tensor."""
        first, second, third, fourth = self.shape
        return self.type.bytes_of(first * second * third * fourth)


def is_expert_tensor(name: str) -> bool:
    """Tell whether a tensor holds routed experts, stacked along its last dimension."""
    return EXPERT_TENSOR.fullmatch(name) is not None


def expert_dimension(name: str) -> int:
    """Return which dimension counts the experts: 2 of a weight, 1 of a bias, 0 of a scale."""
    match = EXPERT_TENSOR.fullmatch(name)
    if match is None:
        raise ModelFileError(f"{name} is not a tensor of routed experts")
    return _EXPERT_DIMENSION[match[3]]


def expert_count(name: str, shape: Iterable[int]) -> int:
    """Return how many experts a stacked tensor of this shape holds."""
    return (*shape, 1, 1, 1)[expert_dimension(name)]


def with_experts(name: str, shape: Sequence[int], count: int) -> tuple[int, ...]:
    """Return the shape of a stacked tensor with another number of experts."""
    dimension = expert_dimension(name)
    lengths = [*shape, *([1] * (dimension + 1 - len(shape)))]
    lengths[dimension] = count
    return tuple(lengths)


def four(shape: Sequence[int]) -> Shape4:
    """Pad a shape with 1 to four lengths."""
    first, second, third, fourth = (*shape, 1, 1, 1, 1)[:4]
    return first, second, third, fourth


def parse_manifest(names: object, types: object, shapes: object) -> list[TensorShape] | None:
    """Make the list of a slice's tensors from the three arrays; return nothing where they are damaged."""
    if not isinstance(names, list) or not isinstance(types, list) or not isinstance(shapes, list):
        return None
    known = {int(kind) for kind in GgmlType}
    kinds = [GgmlType(item) for item in types if isinstance(item, int) and item in known]
    numbers = [item for item in shapes if isinstance(item, int) and 0 <= item < 1 << 48]
    if not len({*map(str, names)}) == len(names) == len(types) == len(kinds):
        return None
    if not 4 * len(names) == len(shapes) == len(numbers) or not all(str(name).isprintable() for name in names):
        return None
    return [
        TensorShape(str(name), kind, four(numbers[4 * index : 4 * index + 4]))
        for index, (name, kind) in enumerate(zip(names, kinds, strict=True))
    ]


def parse_shares(value: object) -> dict[int, tuple[int, ...]] | None:
    """Read the value of ``linkcpp.slice.experts``; return nothing where it is damaged."""
    if not isinstance(value, list):
        return None
    shares: dict[int, tuple[int, ...]] = {}
    for text in value:
        layers, colon, experts = str(text).partition(":")
        places, ids = _ascending(layers, MAX_LAYERS), _ascending(experts, MAX_EXPERTS)
        if not colon or not places or not ids or not shares.keys().isdisjoint(places):
            return None
        shares.update(dict.fromkeys(places, ids))
    return shares


def format_shares(shares: Shares) -> list[str]:
    """Write shares as ``3-20:0-63``, one text per distinct set of experts; the inverse of :func:`parse_shares`."""
    layers_of: dict[tuple[int, ...], list[int]] = {}
    for layer, ids in sorted(shares.items()):
        layers_of.setdefault(tuple(ids), []).append(layer)
    return [f"{format_ranges(layers)}:{format_ranges(ids)}" for ids, layers in layers_of.items()]


def _ascending(text: str, limit: int) -> tuple[int, ...]:
    """Read ``0-3,8``; empty for anything else. Strictly ascending, so that no text makes more than ``limit``."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not all(number.isascii() and number.isdecimal() and len(number) < 6 for number in (first, last or first)):
            return ()
        low, high = int(first), int(last or first)
        if (dash and not last) or high < low or high >= limit or (numbers and low <= numbers[-1]):
            return ()
        numbers.extend(range(low, high + 1))
    return tuple(numbers)
