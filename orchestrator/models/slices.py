"""Write a slice of a model: fewer tensors, the same identity, a manifest of what the whole model has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from orchestrator.errors import InputError
from orchestrator.models.gguf import MANIFEST_PREFIX, SPLIT_PREFIX, GgufFile, is_expert_tensor, raw_entries
from orchestrator.models.gguf_writer import (
    PlannedTensor,
    Progress,
    entry_strings,
    entry_uint32s,
    entry_uint64s,
    file_bytes,
    write_gguf,
)


def write_backbone_slice(
    source: str | Path | GgufFile,
    destination: str | Path,
    drop: Callable[[str], bool] = is_expert_tensor,
    *,
    progress: Progress | None = None,
) -> int:
    """Copy a model without the tensors whose name ``drop`` accepts (all routed experts); return the file's bytes.

    Metadata is copied byte by byte, because rewriting loses what a writer does not know (an empty array, a
    string that is no UTF-8); only ``split.*`` goes, since the parts of a split model become one file. Experts of
    the source are never read. A slice of a slice keeps the first manifest.
    """
    model = source if isinstance(source, GgufFile) else GgufFile.open(source)
    destination = Path(destination)
    if destination.is_dir():
        raise InputError(f"{destination} is a folder", hint="name the file to write")
    if destination.exists() and any(destination.samefile(path) for path in model.files):
        raise InputError(f"{destination} is the model itself: a slice needs another name")
    kept = [info for info in model.tensors.values() if not drop(info.name)]
    tensors = [
        PlannedTensor(info.name, info.type, info.shape, partial(file_bytes, model.files[info.file_index], info))
        for info in kept
    ]
    shapes = list(model.manifest.values())
    entries = [
        *raw_entries(model.headers[0], without=(SPLIT_PREFIX, MANIFEST_PREFIX)),
        entry_strings(MANIFEST_PREFIX + "names", [shape.name for shape in shapes]),
        entry_uint32s(MANIFEST_PREFIX + "types", [int(shape.type) for shape in shapes]),
        entry_uint64s(MANIFEST_PREFIX + "shapes", [length for shape in shapes for length in shape.shape]),
    ]
    return write_gguf(destination, entries, tensors, alignment=model.headers[0].alignment, progress=progress)
