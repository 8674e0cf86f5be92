"""Fields of control messages: a writer and a reader, each ``push_x`` with its ``pull_x``.

Not for the hot path: Dispatch and Result have their own code in ``codec.py``.
"""

from __future__ import annotations

import struct
from typing import Final

from orchestrator.errors import ProtocolError

_U8: Final = struct.Struct("<B")
_U16: Final = struct.Struct("<H")
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_I32: Final = struct.Struct("<i")
_F64: Final = struct.Struct("<d")


class Writer:
    """Collects fields, little-endian, without padding between them."""

    def __init__(self) -> None:
        self._data = bytearray()

    def push_u8(self, value: int) -> None:
        """Write one byte."""
        self._data += _U8.pack(value)

    def push_u16(self, value: int) -> None:
        """Write two bytes."""
        self._data += _U16.pack(value)

    def push_u32(self, value: int) -> None:
        """Write four bytes."""
        self._data += _U32.pack(value)

    def push_u64(self, value: int) -> None:
        """Write eight bytes."""
        self._data += _U64.pack(value)

    def push_i32(self, value: int) -> None:
        """Write four bytes, signed."""
        self._data += _I32.pack(value)

    def push_f64(self, value: float) -> None:
        """Write an IEEE double: exact for every Python float."""
        self._data += _F64.pack(value)

    def push_text(self, value: str, *, limit: int = 0xFFFF) -> None:
        """Write a UTF-8 string behind its length in bytes (u16); what is over the limit is cut off."""
        data = value.encode("utf-8", errors="replace")
        if len(data) > limit:
            data = data[:limit].decode("utf-8", errors="ignore").encode("utf-8")
        self.push_u16(len(data))
        self._data += data

    def finish(self) -> bytes:
        """Give the payload, padded with zeros to a multiple of four bytes."""
        return bytes(self._data) + bytes(-len(self._data) % 4)


class Reader:
    """Takes fields from the front of a payload; every pull checks that the bytes are there."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._offset = 0

    def _take(self, size: int) -> int:
        offset = self._offset
        if offset + size > len(self._data):
            raise ProtocolError(f"a message of {len(self._data)} bytes ends within a field")
        self._offset = offset + size
        return offset

    def pull_u8(self) -> int:
        """Read one byte."""
        return int(_U8.unpack_from(self._data, self._take(1))[0])

    def pull_u16(self) -> int:
        """Read two bytes."""
        return int(_U16.unpack_from(self._data, self._take(2))[0])

    def pull_u32(self) -> int:
        """Read four bytes."""
        return int(_U32.unpack_from(self._data, self._take(4))[0])

    def pull_u64(self) -> int:
        """Read eight bytes."""
        return int(_U64.unpack_from(self._data, self._take(8))[0])

    def pull_i32(self) -> int:
        """Read four bytes, signed."""
        return int(_I32.unpack_from(self._data, self._take(4))[0])

    def pull_f64(self) -> float:
        """Read an IEEE double."""
        return float(_F64.unpack_from(self._data, self._take(8))[0])

    def pull_text(self) -> str:
        """Read a UTF-8 string behind its length; bytes that are no UTF-8 are a protocol error."""
        length = self.pull_u16()
        offset = self._take(length)
        try:
            return bytes(self._data[offset : offset + length]).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ProtocolError(f"a text field is not UTF-8: {error}") from error

    def finish(self) -> None:
        """Check that nothing but padding is left."""
        left = self._data[self._offset :]
        if len(left) >= 4 or any(left):
            raise ProtocolError(f"a message has {len(left)} bytes behind its last field")
