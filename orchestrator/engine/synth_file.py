"""Write a GGUF file, tensor by tensor, with deterministic contents.

Only what synthetic and requantised models need: a typed metadata section, tensor infos, and data streamed in
order, so that a file larger than memory can be written. Format: GGUF version 3, little-endian.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import numpy.typing as npt

from orchestrator.models.architectures import Unsigned64, Value

_ALIGNMENT: Final = 32
_U32, _I32, _F32, _BOOL, _STRING, _ARRAY, _U64 = 4, 5, 6, 7, 8, 9, 10  # gguf_type
_MAGIC: Final = b"GGUF"
_VERSION: Final = 3


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor to write: ``produce`` yields its data in pieces of whole rows, ``size`` bytes in sum."""

    name: str
    kind: int
    shape: tuple[int, ...]
    size: int
    produce: Callable[[], Iterator[npt.NDArray[np.uint8]]]


def encode_metadata(metadata: Mapping[str, Value]) -> bytes:
    """Encode key-value pairs: numbers as u32 and f32 (negative ones are not needed here), text as UTF-8."""
    return b"".join(_string(key) + _value(value) for key, value in metadata.items())


def write_gguf(
    destination: Path,
    metadata: bytes,
    n_metadata: int,
    tensors: Sequence[PlannedTensor],
    progress: Callable[[float, float | None, str], None] | None = None,
) -> None:
    """Write the file next to ``destination`` and rename it, so that no half file carries the name.

    ``metadata`` is an encoded key-value section of ``n_metadata`` pairs. ``progress`` gets bytes done, bytes in
    sum and the tensor's name. Raises ``OSError`` as it comes.
    """
    total = sum(tensor.size for tensor in tensors)
    part = destination.with_name(f"{destination.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(struct.pack("<4sIQQ", _MAGIC, _VERSION, len(tensors), n_metadata))
            file.write(metadata)
            offset = 0
            for tensor in tensors:
                file.write(_string(tensor.name) + struct.pack("<I", len(tensor.shape)))
                file.write(struct.pack(f"<{len(tensor.shape)}QIQ", *tensor.shape, tensor.kind, offset))
                offset += _padded(tensor.size)
            _pad(file)
            done = 0
            for tensor in tensors:
                for piece in tensor.produce():
                    file.write(piece.data)
                    done += piece.nbytes
                    if progress is not None:
                        progress(done, total, tensor.name)
                _pad(file)
        part.replace(destination)
    finally:
        part.unlink(missing_ok=True)


def _value(value: Value) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _U32, value)
    if isinstance(value, float):
        return struct.pack("<If", _F32, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, Unsigned64):
        return _array(_U64, value.values, "Q")
    if all(isinstance(item, str) for item in value):
        items = b"".join(_string(str(item)) for item in value)
        return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + items
    if any(isinstance(item, float) for item in value):
        return _array(_F32, value, "f")
    return _array(_I32, value, "i")  # real files hold signed arrays, and the vocabulary must


def _array(kind: int, values: Sequence[object], code: str) -> bytes:
    return struct.pack(f"<IIQ{len(values)}{code}", _ARRAY, kind, len(values), *values)


def _string(text: str) -> bytes:
    data = text.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _pad(file: BinaryIO) -> None:
    position = file.tell()
    file.write(b"\0" * (_padded(position) - position))
