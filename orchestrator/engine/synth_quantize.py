"""Quantise the experts of a GGUF with the engine's own quantiser, tensor by tensor.

Made for small models in tests and in the gate over quantisation types. Only stacked expert matrices change, so a
difference between two files comes from the experts alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from orchestrator.engine.synth import EXPERT_WEIGHT
from orchestrator.engine.synth_weights import stream_of
from orchestrator.errors import EngineError, InputError
from orchestrator.models.ggml_types import GgmlType
from orchestrator.models.gguf import GgufFile, raw_entries
from orchestrator.models.gguf_header import TensorInfo
from orchestrator.models.gguf_writer import PlannedTensor, Progress, file_bytes, write_gguf
from orchestrator.types import FloatArray

QUANTISED_TYPES: Final = (
    "F32",
    "F16",
    "BF16",
    "Q8_0",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ1_S",
    "IQ1_M",
    "IQ2_XXS",
    "IQ2_XS",
    "IQ2_S",
    "IQ3_XXS",
    "IQ3_S",
    "IQ4_NL",
    "IQ4_XS",
    "MXFP4",
)
"""Types that :func:`quantize` makes; besides them the mix ``Q4_K_M``."""

_MIX: Final = "Q4_K_M"
_LAYER: Final = re.compile(r"^blk\.(\d+)\.")
_VALUES_AT_ONCE: Final = 1 << 20


def quantize(
    source: Path,
    destination: Path,
    type_name: str,
    *,
    tensors: Mapping[str, str] | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> None:
    """Write ``source`` (experts in F32) with its expert matrices in another type.

    ``type_name`` is one of :data:`QUANTISED_TYPES` or ``Q4_K_M``: Q4_K, with Q6_K in the down projections of the
    layers that the engine's tool chooses. ``tensors`` maps patterns of names to types that win over it, for any
    matrix. Types that need an importance matrix get a random positive one from ``seed``. Metadata is copied byte
    by byte. Raises :class:`InputError` for an unknown type and for rows that are not whole blocks of it.
    """
    model = GgufFile.open(source)
    chosen = {info.name: _type_of(info, type_name, tensors or {}, model.n_layer) for info in model.tensors.values()}
    planned = []
    for info in model.tensors.values():
        kind = chosen[info.name]
        path = model.files[info.file_index]
        if kind is info.type:
            planned.append(PlannedTensor(info.name, kind, info.shape, partial(file_bytes, path, info)))
        elif info.type is not GgmlType.F32:
            raise InputError(f"{info.name} is {info.type.name} already; quantise from F32")
        else:
            planned.append(PlannedTensor(info.name, kind, info.shape, partial(_quantized, path, info, kind, seed)))
    entries = list(raw_entries(model.headers[0], without=("general.file_type",)))
    write_gguf(destination, entries, planned, alignment=model.headers[0].alignment, progress=progress)


def _type_of(info: TensorInfo, type_name: str, tensors: Mapping[str, str], n_layer: int) -> GgmlType:
    if len(info.shape) < 2 or not info.name.endswith(".weight"):
        return info.type
    name = next((name for pattern, name in tensors.items() if re.search(pattern, info.name)), None)
    if name is None:
        if not EXPERT_WEIGHT.search(info.name):
            return info.type
        name = _mixed(info.name, n_layer) if type_name == _MIX else type_name
    if name not in QUANTISED_TYPES:
        raise InputError(f"unknown type {name!r}", hint=f"known: {', '.join(QUANTISED_TYPES)} and {_MIX}")
    kind = GgmlType[name]
    if info.shape[0] % kind.block_size:
        raise InputError(
            f"{info.name}: rows of {info.shape[0]} values are not whole blocks of {name} ({kind.block_size})",
            hint=f"make the model with n_embd and n_ff_exp that are multiples of {kind.block_size}",
        )
    return kind


def _mixed(name: str, n_layer: int) -> str:
    """Follow the rule of the engine's tool (``llama-quant.cpp``): down projections of half of the layers."""
    layer = _LAYER.match(name)
    if layer is None or "ffn_down" not in name:
        return "Q4_K"
    index, eighth = int(layer[1]), n_layer // 8
    more = index < eighth or index >= 7 * n_layer // 8 or (index - eighth) % 3 == 2
    return "Q6_K" if more else "Q4_K"


def _quantized(path: Path, info: TensorInfo, kind: GgmlType, seed: int) -> Iterator[memoryview]:
    from bindings.synth import SynthBindingError, quantize_rows  # loads the engine, which reading does not need

    width = info.shape[0]
    n_rows = info.n_bytes // 4 // width
    values = np.memmap(path, dtype="<f4", mode="r", offset=info.offset, shape=(n_rows, width))
    step = max(1, _VALUES_AT_ONCE // width)
    importance = _importance(seed, info.name, width)
    for first in range(0, n_rows, step):
        rows = np.asarray(values[first : first + step], dtype=np.float32)
        try:
            yield memoryview(quantize_rows(rows, int(kind), importance).tobytes())
        except SynthBindingError as error:
            raise EngineError(f"{info.name}: {error}") from error


def _importance(seed: int, name: str, width: int) -> FloatArray:
    """Give each column a weight between a half and one and a half."""
    raw = np.asarray(stream_of(seed, f"importance of {name}").random_raw(width), dtype=np.uint64)
    return (np.float32(0.5) + (raw >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24)).astype(np.float32)
