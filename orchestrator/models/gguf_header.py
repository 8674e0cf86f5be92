"""Read the header of one GGUF file with every count checked against the file before it is believed.

The layout (all numbers little-endian): magic ``GGUF``, u32 version, u64 tensors, u64 entries; per entry a
string key, u32 type and value; per tensor a string name, u32 dimensions, u64 each, u32 type, u64 offset; then
padding up to the alignment and the data. A string is u64 length and bytes; an array is u32 element type, u64
count and elements. Version 2 differs from 3 in nothing that is read here.

Arrays may be large (a vocabulary has 250,000 strings), so only their place is kept and their elements are
decoded when somebody asks.

The bytes come through a window. On a disk it is large; over a network each window is a round trip and each byte
too many is paid for, so it is small there, and grows by what the counts read so far promise (``outlook``).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from orchestrator.errors import ModelFileError
from orchestrator.models.ggml_types import GgmlType

Scalar = str | int | float | bool
MetadataValue = Scalar | list[str] | list[int] | list[float] | list[bool]

MAGIC: Final = b"GGUF"
DEFAULT_ALIGNMENT: Final = 32
MAX_NAME: Final = 63  # GGML_MAX_NAME less the terminator

UINT32: Final = 4
BOOL: Final = 7
STRING: Final = 8
ARRAY: Final = 9
UINT64: Final = 10

# type number -> struct format and bytes; strings and arrays are read by hand
_FIXED: Final = {
    0: ("B", 1),
    1: ("b", 1),
    2: ("H", 2),
    3: ("h", 2),
    UINT32: ("I", 4),
    5: ("i", 4),
    6: ("f", 4),
    BOOL: ("?", 1),
    UINT64: ("Q", 8),
    11: ("q", 8),
    12: ("d", 8),
}
# Bounds on what a damaged count could make us read or keep. Real files have some 50 entries, 10,000 tensors
# and vocabularies of 300,000 strings.
_MAX_ENTRIES: Final = 1 << 16
_MAX_TENSORS: Final = 1 << 20
_MAX_STRINGS: Final = 1 << 24
_MAX_NUMBERS: Final = 1 << 26
_MAX_KEY: Final = 1 << 16
_MAX_STRING: Final = 1 << 26
_MIN_ENTRY: Final = 8 + 1 + 4 + 1
_MIN_TENSOR: Final = 8 + 1 + 4 + 4 + 8
_CHUNK: Final = 1 << 18
_MOST_AHEAD: Final = 1 << 22
_U64: Final = struct.Struct("<Q")

_OTHER_MAGICS: Final = (
    (b"lmgg", "a GGML file from before GGUF", "convert it again from its original weights"),
    (b"fmgg", "a GGML file from before GGUF", "convert it again from its original weights"),
    (b"tjgg", "a GGML file from before GGUF", "convert it again from its original weights"),
    (b"algg", "a GGML adapter from before GGUF", None),
    (b"PK\x03\x04", "a zip archive (a wheel or a PyTorch checkpoint)", "unpack it or convert it to GGUF"),
    (b"version https://git-lfs", "a Git LFS pointer instead of the file", "fetch the file with `git lfs pull`"),
    (b"<", "an HTML or XML page, probably of a failed download", "download the file again"),
    (b"\x1f\x8b", "a gzip archive", "unpack it first"),
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of the metadata: its value where it is a scalar, its place in the file where it is an array."""

    key: str
    type: int
    value: Scalar | None
    element_type: int
    count: int
    start: int  # of the entry, in bytes from the file's start
    value_at: int  # of the value, or of an array's first element
    end: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: ``shape`` in ggml's order (fastest first), ``offset`` in bytes from its file's start."""

    name: str
    type: GgmlType
    shape: tuple[int, ...]
    offset: int
    n_bytes: int
    file_index: int = 0


@dataclass(frozen=True, slots=True)
class Header:
    """What one GGUF file says before its data."""

    path: Path
    version: int
    alignment: int
    file_size: int
    entries: Mapping[str, Entry]
    tensors: Mapping[str, TensorInfo]
    data_at: int  # where the data section starts
    data_end: int  # where the last tensor ends, without padding


class Metadata(Mapping[str, MetadataValue]):
    """A mapping view of the entries that decodes an array when it is asked for."""

    __slots__ = ("_entries", "_path")

    def __init__(self, path: Path, entries: Mapping[str, Entry]) -> None:
        self._path = path
        self._entries = entries

    def __getitem__(self, key: str) -> MetadataValue:
        entry = self._entries[key]
        return _read_array(self._path, entry) if entry.value is None else entry.value

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def length(self, key: str) -> int | None:
        """Return an array's number of elements without reading them, ``None`` for a scalar."""
        entry = self._entries[key]
        return entry.count if entry.value is None else None


class Readable(Protocol):
    """A place that bytes can be read from, like a file."""

    def seek(self, offset: int, /) -> int:
        """Go to an offset from the start."""

    def read(self, size: int, /) -> bytes:
        """Read up to ``size`` bytes; fewer only at the end."""


class _Cursor:
    """A place in a file that moves forward and never beyond the end; reads through a window.

    ``outlook`` is a low estimate of the bytes that will be wanted in order from here: a reading may take so many.
    """

    __slots__ = ("_at", "_base", "_file", "_least", "_window", "outlook", "path", "size")

    def __init__(self, file: Readable, path: Path, size: int, least: int = _CHUNK) -> None:
        self._file = file
        self._least = least
        self.outlook = 0
        self.path = path
        self.size = size
        self._window = b""
        self._base = 0
        self._at = 0

    def place(self) -> int:
        return self._base + self._at

    def remaining(self) -> int:
        return self.size - self.place()

    def fail(self, problem: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: damaged GGUF header at byte {self.place()}: {problem}")

    def _need(self, count: int) -> int:
        """Make ``count`` bytes available and return their index in the window."""
        if self._at + count > len(self._window):
            place = self.place()
            if place + count > self.size:
                raise ModelFileError(
                    f"{self.path}: truncated within the header: {count} bytes are needed at byte {place} "
                    f"and the file has only {self.size}",
                    hint="download or copy the file again",
                )
            self._file.seek(place)
            wanted = max(count, self._least, min(self.outlook, _MOST_AHEAD))
            self._window = self._file.read(min(wanted, self.size - place))
            self._base, self._at = place, 0
            if len(self._window) < count:
                raise ModelFileError(f"{self.path}: the file became shorter while it was read")
        return self._at

    def peek(self, count: int) -> bytes:
        at = self._need(count)
        return self._window[at : at + count]

    def take(self, count: int) -> bytes:
        at = self._need(count)
        self._at += count
        return self._window[at : at + count]

    def skip(self, count: int, what: str) -> None:
        if count > self.remaining():
            raise self.fail(f"{what} takes {count} bytes and only {self.remaining()} follow")
        self._at += count

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def string(self, limit: int, what: str) -> bytes:
        length = self.u64()
        if length > limit or length > self.remaining():
            raise self.fail(f"{what} of {length} bytes (limit {limit}, {self.remaining()} follow)")
        return self.take(length)

    def expect(self, count: int, done: int, took: int, *, least: int) -> None:
        """Set the outlook from how much ``done`` of ``count`` like elements took; some are shorter than the mean."""
        mean = took / done if done else least
        self.outlook = int((count - done) * max(mean * 0.9, least))

    def skip_strings(self, count: int, what: str) -> None:
        start = self.place()
        for done in range(count):
            at = self._at
            if at + 8 > len(self._window):  # also where the last string reached beyond the window
                if self.place() + 8 > self.size:
                    break
                self.expect(count, done, self.place() - start, least=8)
                at = self._need(8)
            self._at = at + 8 + _U64.unpack_from(self._window, at)[0]
        else:
            self.outlook = 0
            if self.place() <= self.size:
                return
        raise ModelFileError(
            f"{self.path}: damaged or truncated GGUF header: the strings of {what} reach beyond the end"
        )


def read_header(path: Path) -> Header:
    """Parse and check the header of one file; reads no tensor data.

    Raise :class:`ModelFileError` in words for everything that is not a complete little-endian GGUF of version 2
    or 3 with tensors packed one after the other, which is what the engine requires too.
    """
    try:
        if path.is_dir():
            raise ModelFileError(f"{path} is a folder, not a GGUF file", hint="name a .gguf file in it")
        if not path.exists():
            raise ModelFileError(f"no such file: {path}")
        if not path.is_file():
            raise ModelFileError(f"{path} is not a regular file")
        size = path.stat().st_size
        with path.open("rb", buffering=0) as file:
            return _parse(_Cursor(file, path, size))
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:  # a path with a zero byte
        raise ModelFileError(f"unusable path {str(path)!r}: {error}") from error


def parse_header(file: Readable, path: Path, size: int, *, window: int = _CHUNK) -> Header:
    """Parse and check a header from ``file`` of ``size`` bytes, read in order through windows of that many bytes.

    ``path`` names it in messages. Raise :class:`ModelFileError` like :func:`read_header`.
    """
    return _parse(_Cursor(file, path, size, window))


def _parse(cursor: _Cursor) -> Header:
    version = _read_magic(cursor)
    n_tensors, n_entries = cursor.u64(), cursor.u64()
    for count, limit, least, what in (
        (n_entries, _MAX_ENTRIES, _MIN_ENTRY, "metadata entries"),
        (n_tensors, _MAX_TENSORS, _MIN_TENSOR, "tensors"),
    ):
        if count > limit or count * least > cursor.remaining():
            raise cursor.fail(
                f"it claims {count} {what}, more than the file of {cursor.size} bytes can hold: damaged or truncated"
            )
    entries: dict[str, Entry] = {}
    for _ in range(n_entries):
        entry = _read_entry(cursor)
        if entry.key in entries:
            raise cursor.fail(f"the key {entry.key!r} occurs twice")
        entries[entry.key] = entry
    alignment = _alignment(cursor, entries)
    infos, start = [], cursor.place()
    for done in range(n_tensors):
        cursor.expect(n_tensors, done, cursor.place() - start, least=_MIN_TENSOR)
        infos.append(_read_tensor(cursor))
    data_at = padded(cursor.place(), alignment)
    tensors, data_end = _place_tensors(cursor, infos, data_at, alignment)
    if data_end > cursor.size:
        raise ModelFileError(
            f"{cursor.path}: truncated: {data_end - cursor.size} of {data_end} bytes are missing at the end",
            hint="download or copy the file again",
        )
    return Header(cursor.path, version, alignment, cursor.size, entries, tensors, data_at, data_end)


def _read_magic(cursor: _Cursor) -> int:
    path = cursor.path
    if cursor.size == 0:
        raise ModelFileError(f"{path} is empty")
    start = cursor.peek(min(32, cursor.size))
    if start[:4] != MAGIC:
        for magic, kind, hint in _OTHER_MAGICS:
            if start.startswith(magic):
                raise ModelFileError(f"{path} is not a GGUF file: it is {kind}", hint=hint)
        raise ModelFileError(f"{path} is not a GGUF file (it starts with {start[:4]!r})")
    cursor.take(4)
    version = cursor.u32()
    if version & 0xFFFF == 0 and version:
        raise ModelFileError(f"{path} is a big-endian GGUF", hint="convert it to little-endian")
    if version not in (2, 3):
        raise ModelFileError(f"{path} has GGUF version {version}; versions 2 and 3 can be read")
    return version


def _read_entry(cursor: _Cursor) -> Entry:
    start = cursor.place()
    raw = cursor.string(_MAX_KEY, "a key")
    try:
        key = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise cursor.fail(f"the key {raw[:40]!r} is no UTF-8") from error
    if not key.isprintable() or not key:
        raise cursor.fail(f"the key {key[:40]!r} is empty or not printable")
    kind = cursor.u32()
    if kind == ARRAY:
        element, count = cursor.u32(), cursor.u64()
        place = cursor.place()
        if element == STRING:
            if count > _MAX_STRINGS or count * 8 > cursor.remaining():
                raise cursor.fail(f"{key} claims {count} strings, more than the file can hold")
            cursor.skip_strings(count, key)
        elif element in _FIXED:
            if count > _MAX_NUMBERS:
                raise cursor.fail(f"{key} claims {count} numbers")
            cursor.skip(count * _FIXED[element][1], f"{key} with {count} elements")
        else:
            raise cursor.fail(f"{key} is an array of the unknown type {element}")
        return Entry(key, kind, None, element, count, start, place, cursor.place())
    place = cursor.place()
    value: Scalar
    if kind == STRING:
        value = cursor.string(_MAX_STRING, key).decode("utf-8", errors="replace")
    elif kind in _FIXED:
        form, width = _FIXED[kind]
        (value,) = struct.unpack("<" + form, cursor.take(width))
    else:
        raise cursor.fail(f"{key} has the unknown type {kind}")
    return Entry(key, kind, value, kind, 1, start, place, cursor.place())


def _alignment(cursor: _Cursor, entries: Mapping[str, Entry]) -> int:
    entry = entries.get("general.alignment")
    if entry is None:
        return DEFAULT_ALIGNMENT
    value = entry.value
    if entry.type != UINT32 or not isinstance(value, int) or value == 0 or value & (value - 1):
        raise cursor.fail(f"general.alignment must be a power of two as uint32, not {value!r}")
    return value


def _read_tensor(cursor: _Cursor) -> tuple[str, GgmlType, tuple[int, ...], int, int]:
    """Read name, type, shape, bytes and offset within the data section."""
    raw = cursor.string(_MAX_KEY, "a tensor's name")
    if not 0 < len(raw) <= MAX_NAME:
        raise cursor.fail(f"a tensor's name has {len(raw)} bytes (1 to {MAX_NAME} are allowed)")
    name = raw.decode("utf-8", errors="backslashreplace")
    if not name.isprintable():  # it would end up in messages, on terminals
        raise cursor.fail(f"the tensor name {name!r} is not printable")
    n_dimensions = cursor.u32()
    if n_dimensions > 4:
        raise cursor.fail(f"tensor {name} has {n_dimensions} dimensions (at most 4)")
    shape = struct.unpack(f"<{n_dimensions}Q", cursor.take(8 * n_dimensions)) or (1,)
    number = cursor.u32()
    offset = cursor.u64()
    try:
        kind = GgmlType(number)
    except ValueError as error:
        raise cursor.fail(f"tensor {name} has the unknown type {number}") from error
    elements = 1
    for length in shape:
        elements *= length
    if elements >= 1 << 62:
        raise cursor.fail(f"tensor {name} has an absurd shape {list(shape)}")
    if shape[0] % kind.block_size:
        raise cursor.fail(f"tensor {name}: rows of {shape[0]} are no multiple of {kind.name}'s {kind.block_size}")
    return name, kind, shape, kind.bytes_of(elements), offset


def _place_tensors(
    cursor: _Cursor, infos: list[tuple[str, GgmlType, tuple[int, ...], int, int]], data_at: int, alignment: int
) -> tuple[dict[str, TensorInfo], int]:
    tensors: dict[str, TensorInfo] = {}
    expected, end, previous = 0, data_at, ""
    for name, kind, shape, n_bytes, offset in infos:
        if name in tensors:
            raise cursor.fail(f"the tensor {name} occurs twice")
        if offset < expected:
            raise cursor.fail(f"tensor {name} overlaps {previous} by {expected - offset} bytes")
        if offset > expected:
            raise cursor.fail(
                f"tensor {name} starts at {offset} of the data, not right behind {previous or 'the header'}"
            )
        tensors[name] = TensorInfo(name, kind, shape, data_at + offset, n_bytes)
        end = data_at + offset + n_bytes
        expected = padded(offset + n_bytes, alignment)
        previous = name
    return tensors, end


def padded(value: int, alignment: int) -> int:
    """Round up to a multiple of the alignment, which is a power of two."""
    return (value + alignment - 1) & -alignment


def _read_array(path: Path, entry: Entry) -> MetadataValue:
    try:
        with path.open("rb") as file:
            file.seek(entry.value_at)
            data = file.read(entry.end - entry.value_at)
    except OSError as error:
        raise ModelFileError(f"cannot read {entry.key} of {path}: {error.strerror or error}") from error
    if len(data) < entry.end - entry.value_at:
        raise ModelFileError(f"{path}: the file became shorter after it was opened")
    if entry.element_type != STRING:
        return list(struct.unpack(f"<{entry.count}{_FIXED[entry.element_type][0]}", data))
    strings, at = [], 0
    for _ in range(entry.count):
        begin = at + 8
        at = begin + _U64.unpack_from(data, at)[0]
        strings.append(data[begin:at].decode("utf-8", errors="replace"))
    return strings
