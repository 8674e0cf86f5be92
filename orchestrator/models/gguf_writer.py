"""Write a GGUF file: metadata entries as raw bytes, tensors as streams, the whole file or none of it."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from orchestrator.errors import InputError, ModelFileError
from orchestrator.models.ggml_types import GgmlType
from orchestrator.models.gguf_header import ARRAY, MAGIC, STRING, UINT32, UINT64, TensorInfo, padded

VERSION: Final = 3
_CHUNK: Final = 1 << 22


class Progress(Protocol):
    """Take the state of a long task: ``done`` of ``total`` bytes (``None``: not known) and what it is doing."""

    def __call__(self, done: float, total: float | None, note: str = "") -> None:
        """Show this state."""


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor to write; ``data`` yields exactly the bytes of type and shape when its turn comes."""

    name: str
    type: GgmlType
    shape: tuple[int, ...]
    data: Callable[[], Iterable[bytes | memoryview]]

    @property
    def n_bytes(self) -> int:
        """Bytes of the data, without padding."""
        elements = 1
        for length in self.shape:
            elements *= length
        return self.type.bytes_of(elements)


def entry_string(key: str, value: str) -> bytes:
    """Encode a string entry."""
    return _string(key) + struct.pack("<I", STRING) + _string(value)


def entry_uint32(key: str, value: int) -> bytes:
    """Encode a uint32 entry."""
    return _string(key) + struct.pack("<II", UINT32, value)


def entry_strings(key: str, values: Sequence[str]) -> bytes:
    """Encode an array of strings."""
    head = _string(key) + struct.pack("<IIQ", ARRAY, STRING, len(values))
    return head + b"".join(map(_string, values))


def entry_uint32s(key: str, values: Sequence[int]) -> bytes:
    """Encode an array of uint32."""
    return _string(key) + struct.pack(f"<IIQ{len(values)}I", ARRAY, UINT32, len(values), *values)


def entry_uint64s(key: str, values: Sequence[int]) -> bytes:
    """Encode an array of uint64."""
    return _string(key) + struct.pack(f"<IIQ{len(values)}Q", ARRAY, UINT64, len(values), *values)


def file_bytes(path: Path, info: TensorInfo) -> Iterator[bytes]:
    """Stream a tensor's bytes from its file."""
    return range_bytes(path, info.offset, info.n_bytes, info.name)


def range_bytes(path: Path, offset: int, size: int, what: str) -> Iterator[bytes]:
    """Stream a range of a file; raise :class:`ModelFileError` naming ``what`` where the file ends before."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            left = size
            while left:
                chunk = file.read(min(left, _CHUNK))
                if not chunk:
                    raise ModelFileError(f"{path}: the file became shorter while {what} was read")
                left -= len(chunk)
                yield chunk
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {error.strerror or error}") from error


def write_gguf(
    destination: Path,
    entries: Sequence[bytes],
    tensors: Sequence[PlannedTensor],
    *,
    alignment: int,
    progress: Progress | None = None,
) -> int:
    """Write a file beside ``destination`` and rename it into place; return its bytes.

    Whoever reads ``destination`` sees the old file or the complete new one. Raise :class:`InputError` where the
    file cannot be written; the unfinished one is removed.
    """
    partial = destination.with_name(f".{destination.name}.{os.getpid()}.partial")
    total = sum(padded(tensor.n_bytes, alignment) for tensor in tensors)
    try:
        with partial.open("wb") as file:
            file.write(header_bytes(entries, tensors, alignment))
            done = 0
            for tensor in tensors:
                written = 0
                for chunk in tensor.data():
                    written += file.write(chunk)
                    if progress is not None:
                        progress(done + written, total, tensor.name)
                if written != tensor.n_bytes:
                    raise ModelFileError(f"{tensor.name}: {written} bytes of data instead of {tensor.n_bytes}")
                file.write(bytes(padded(written, alignment) - written))
                done += padded(written, alignment)
            size = file.tell()
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, destination)
    except OSError as error:
        raise InputError(f"cannot write {destination}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    return size


def write_whole(path: Path, data: bytes) -> None:
    """Write a small file beside ``path`` and rename it into place; raise :class:`InputError` where that fails."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        try:
            partial.write_bytes(data)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error


def header_bytes(entries: Sequence[bytes], tensors: Sequence[PlannedTensor], alignment: int) -> bytes:
    """Encode everything before the data, padded to the alignment; the tensors' data follows in this order."""
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(entries)), *entries]
    offset = 0
    for tensor in tensors:
        lengths = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
        parts += [_string(tensor.name), lengths, struct.pack("<IQ", int(tensor.type), offset)]
        offset += padded(tensor.n_bytes, alignment)
    header = b"".join(parts)
    return header + bytes(padded(len(header), alignment) - len(header))


def _string(text: str) -> bytes:
    raw = text.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw
