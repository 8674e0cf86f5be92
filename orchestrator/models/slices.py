"""Write a slice of a model: fewer tensors or fewer experts, the same identity, a manifest of what the whole has.

A slice is a valid GGUF. Metadata is copied byte by byte, because rewriting loses what a writer does not know (an
empty array, a string that is no UTF-8); only ``split.*`` goes, since the parts of a split model become one file.
Experts lie one after the other in a stacked tensor, so any subset of them is a set of byte ranges: what is left
out is never read. A slice of a slice keeps the first manifest.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from orchestrator.errors import InputError
from orchestrator.models.gguf import FILE_PREFIXES, GgufFile, raw_entries
from orchestrator.models.gguf_header import TensorInfo, padded
from orchestrator.models.gguf_manifest import (
    MANIFEST_PREFIX,
    SLICE_EXPERTS,
    Shares,
    expert_count,
    format_shares,
    is_expert_tensor,
    with_experts,
)
from orchestrator.models.gguf_writer import (
    PlannedTensor,
    Progress,
    entry_strings,
    entry_uint32s,
    entry_uint64s,
    header_bytes,
    range_bytes,
    write_gguf,
)
from orchestrator.types import format_ranges

_BLOCK: Final = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Selection:
    """What a slice keeps of a model; with nothing given, everything.

    ``experts`` keeps these routed experts and no other tensor (a worker's slice), ``without_experts`` everything but
    the routed experts (the first machine's). ``layers`` leaves out the blocks of other layers and keeps what
    belongs to none (embeddings, output). ``without`` are patterns of tensor names to leave out besides. ``shares``
    is like ``experts``, with other experts in each layer.
    """

    experts: Sequence[int] | None = None
    layers: Sequence[int] | None = None
    without_experts: bool = False
    without: tuple[str, ...] = ()
    shares: Shares | None = None

    @property
    def of_experts(self) -> bool:
        """Tell whether it keeps experts and no other tensor."""
        return self.experts is not None or self.shares is not None

    @property
    def is_everything(self) -> bool:
        """Tell whether nothing is left out."""
        return not self.of_experts and self.layers is None and not self.without_experts and not self.without


@dataclass(frozen=True, slots=True)
class SlicedTensor:
    """A tensor of the source that a slice keeps; ``experts`` are those kept of a stacked one, else ``None``."""

    info: TensorInfo
    shape: tuple[int, ...]
    experts: tuple[int, ...] | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes in the slice."""
        elements = 1
        for length in self.shape:
            elements *= length
        return self.info.type.bytes_of(elements)


@dataclass(frozen=True, slots=True)
class SlicePlan:
    """The tensors of a slice in the order of the source, and where their bytes come from."""

    model: GgufFile
    tensors: tuple[SlicedTensor, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors, without header and padding."""
        return sum(tensor.n_bytes for tensor in self.tensors)

    def ranges(self, tensor: SlicedTensor) -> Iterator[tuple[Path, int, int]]:
        """Yield file, offset and size of a tensor's bytes; experts that lie side by side are one range."""
        info = tensor.info
        if tensor.experts is None:
            yield self.model.files[info.file_index], info.offset, info.n_bytes
            return
        path, start, end = self.model.files[info.file_index], -1, -1
        for expert in tensor.experts:
            _, offset, size = self.model.expert_range(info, expert)
            if offset != end:
                if start >= 0:
                    yield path, start, end - start
                start = offset
            end = offset + size
        yield path, start, end - start

    def header(self) -> tuple[bytes, tuple[int, ...]]:
        """Return the slice's bytes before the data, and where each tensor's data starts in the file."""
        planned = [PlannedTensor(tensor.info.name, tensor.info.type, tensor.shape, tuple) for tensor in self.tensors]
        alignment = self.model.headers[0].alignment
        header = header_bytes(list(self.entries()), planned, alignment)
        offsets, at = [], len(header)
        for tensor in self.tensors:
            offsets.append(at)
            at += padded(tensor.n_bytes, alignment)
        return header, tuple(offsets)

    def entries(self) -> Iterator[bytes]:
        """Yield the slice's metadata: the model's, the manifest, and the experts kept where some are missing."""
        yield from raw_entries(self.model.headers[0], without=FILE_PREFIXES)
        shapes = list(self.model.manifest.values())
        yield entry_strings(MANIFEST_PREFIX + "names", [shape.name for shape in shapes])
        yield entry_uint32s(MANIFEST_PREFIX + "types", [int(shape.type) for shape in shapes])
        yield entry_uint64s(MANIFEST_PREFIX + "shapes", [length for shape in shapes for length in shape.shape])
        shares = self._partial_shares()
        if shares:
            yield entry_strings(SLICE_EXPERTS, format_shares(shares))

    def _partial_shares(self) -> Shares:
        shares: dict[int, tuple[int, ...]] = {}
        for tensor in self.tensors:
            if tensor.experts is None:
                continue
            layer = _layer_of(tensor.info.name)
            whole = expert_count(tensor.info.name, self.model.manifest[tensor.info.name].shape)
            # Tensors of one layer may differ in their number of experts (grovemoe): the longest list says it all.
            if layer is not None and len(tensor.experts) < whole and len(tensor.experts) > len(shares.get(layer, ())):
                shares[layer] = tensor.experts
        return shares


def plan_slice(model: GgufFile, selection: Selection) -> SlicePlan:
    """Choose the tensors of a slice; raise :class:`InputError` for what the model or its file does not have."""
    if selection.of_experts and selection.without_experts:
        raise InputError("a slice is made of experts or without them, not both")
    layers = None if selection.layers is None else frozenset(selection.layers)
    if layers is not None and max(layers, default=0) >= model.n_layer:
        raise InputError(
            f"{model.path.name} has no layer {max(layers)}", hint=f"its layers are 0 to {model.n_layer - 1}"
        )
    if selection.of_experts or selection.without_experts:
        model.require_moe()
    wanted = _owned(model, selection, layers) if selection.of_experts else None
    kept = []
    for info in model.tensors.values():
        layer = _layer_of(info.name)
        if any(fnmatch.fnmatchcase(info.name, pattern) for pattern in selection.without):
            continue
        if layers is not None and layer is not None and layer not in layers:
            continue
        if not is_expert_tensor(info.name):
            if wanted is None:
                kept.append(SlicedTensor(info, info.shape))
        elif wanted is not None and layer is not None and layer in wanted:
            kept += _some_experts(model, info, wanted[layer])
        elif wanted is None and not selection.without_experts:
            kept += _some_experts(model, info, model.stacked(info))
    if not kept:
        raise InputError("the slice would hold no tensor at all", hint="choose other layers or experts")
    return SlicePlan(model, tuple(kept))


def write_slice(
    source: str | Path | GgufFile, destination: str | Path, selection: Selection, *, progress: Progress | None = None
) -> int:
    """Copy what ``selection`` keeps of a local model; return the file's bytes. Whole or not at all."""
    model = source if isinstance(source, GgufFile) else GgufFile.open(source)
    return _write(plan_slice(model, selection), Path(destination), progress)


def write_backbone_slice(
    source: str | Path | GgufFile,
    destination: str | Path,
    drop: Callable[[str], bool] = is_expert_tensor,
    *,
    progress: Progress | None = None,
) -> int:
    """Copy a model without the tensors whose name ``drop`` accepts (all routed experts); return the file's bytes."""
    model = source if isinstance(source, GgufFile) else GgufFile.open(source)
    kept: list[SlicedTensor] = []
    for info in model.tensors.values():
        if drop(info.name):
            continue
        stacked = is_expert_tensor(info.name)
        kept += _some_experts(model, info, model.stacked(info)) if stacked else [SlicedTensor(info, info.shape)]
    return _write(SlicePlan(model, tuple(kept)), Path(destination), progress)


def check_destination(model: GgufFile, destination: Path) -> None:
    """Raise :class:`InputError` where a slice must not be written: over the model or over a folder."""
    if destination.is_dir():
        raise InputError(f"{destination} is a folder", hint="name the file to write")
    if destination.exists() and any(path.exists() and destination.samefile(path) for path in model.files):
        raise InputError(f"{destination} is the model itself: a slice needs another name")


def _write(plan: SlicePlan, destination: Path, progress: Progress | None) -> int:
    check_destination(plan.model, destination)
    tensors = [
        PlannedTensor(tensor.info.name, tensor.info.type, tensor.shape, partial(_bytes_of, plan, tensor))
        for tensor in plan.tensors
    ]
    alignment = plan.model.headers[0].alignment
    return write_gguf(destination, list(plan.entries()), tensors, alignment=alignment, progress=progress)


def _bytes_of(plan: SlicePlan, tensor: SlicedTensor) -> Iterator[bytes]:
    for path, offset, size in plan.ranges(tensor):
        yield from range_bytes(path, offset, size, tensor.info.name)


def _owned(model: GgufFile, selection: Selection, layers: frozenset[int] | None) -> Shares:
    """Return the experts to keep per layer; refuse those that the model, or this slice of it, does not have."""
    if selection.shares is not None:
        shares = {layer: tuple(sorted(set(ids))) for layer, ids in selection.shares.items() if ids}
        strange = shares.keys() - set(model.moe_layers)
    else:
        ids = tuple(sorted(set(selection.experts or ())))
        shares = dict.fromkeys((layer for layer in model.moe_layers if layers is None or layer in layers), ids)
        strange = set() if shares else set(layers or ())
    if strange:
        raise InputError(
            f"{model.path.name} has no experts in layers {format_ranges(strange)}",
            hint=f"its MoE layers are {format_ranges(model.moe_layers)}",
        )
    highest = max((max(ids, default=-1) for ids in shares.values()), default=-1)
    if highest < 0:
        raise InputError("no expert was chosen")
    if highest >= model.n_expert:
        raise InputError(f"{model.path.name} has no expert {highest}", hint=f"experts are 0 to {model.n_expert - 1}")
    for layer, ids in shares.items():
        missing = set(ids).difference(model.held_experts(layer))
        if missing:
            raise InputError(
                f"{model.path.name} lacks experts {format_ranges(missing)} of layer {layer}",
                hint="it is a slice itself: cut from the whole model",
            )
    return shares


def _some_experts(model: GgufFile, info: TensorInfo, ids: Iterable[int]) -> list[SlicedTensor]:
    """Keep experts of a stacked tensor; a tensor with fewer experts than others may keep none and falls away."""
    held = set(model.stacked(info))
    kept = tuple(expert for expert in ids if expert in held)
    return [SlicedTensor(info, with_experts(info.name, info.shape, len(kept)), kept)] if kept else []


def _layer_of(name: str) -> int | None:
    match = _BLOCK.match(name)
    return None if match is None else int(match[1])
