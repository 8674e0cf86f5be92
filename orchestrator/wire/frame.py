"""The frame: a fixed header of 24 bytes in front of every payload, and the limits that are checked on it.

The header's layout is frozen: it is the same in every version, so that two sides that cannot understand each
other can still say so.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from crc32c import crc32c

from orchestrator.errors import ProtocolError
from orchestrator.wire.messages import MAJOR, MessageType

MAGIC: Final = b"LKCP"
PREFIX: Final = struct.Struct("<4sBBBBIQ")  # magic, major, minor, type, flags, payload length, sequence
CHECKSUM: Final = struct.Struct("<I")  # CRC-32C of the prefix and the payload
HEADER_SIZE: Final = PREFIX.size + CHECKSUM.size
_WHOLE: Final = struct.Struct(PREFIX.format + CHECKSUM.format.removeprefix("<"))

MAX_PAYLOAD: Final = 256 * 1024 * 1024
"""Default limit of the messages that carry rows: 4,000 rows of 8 pairs of 2,048 floats."""

_KIB: Final = 1024
CONTROL_LIMITS: Final[Mapping[int, int]] = {
    MessageType.HELLO: 64 * _KIB,
    MessageType.WELCOME: 4096 * _KIB,
    MessageType.REFUSE: 8 * _KIB,
    MessageType.DESCRIBE: 4096 * _KIB,
    MessageType.DESCRIBED: 64,
    MessageType.MEASURE: 64,
    MessageType.MEASURED: 64,
    MessageType.PING: 64,
    MessageType.PONG: 64,
    MessageType.GOODBYE: 8 * _KIB,
    MessageType.STAGE_WELCOME: 64 * _KIB,
    MessageType.ATTACH: 1 * _KIB,
    MessageType.ROUTE: 1 * _KIB,
    MessageType.ACCEPTED: 64,
    MessageType.OPERATE: 8 * _KIB,
    MessageType.FAULT: 8 * _KIB,
    MessageType.CANCEL: 64 * _KIB,
    MessageType.PROBE: 64,
    MessageType.PROBED: 64 * _KIB,
    MessageType.ASSIGN: 64 * _KIB,
    MessageType.ASSIGNING: 64,
}
"""Largest payload of each message that carries no rows, in bytes."""

BULK_TYPES: Final = frozenset((MessageType.DISPATCH, MessageType.RESULT, MessageType.STEP, MessageType.OUTCOME))
"""The messages that carry rows; their limit is the connection's."""


class Header(NamedTuple):
    """What a header says; the magic is checked and gone."""

    major: int
    minor: int
    type: int
    length: int  # of the payload in bytes
    sequence: int
    checksum: int


def pull_header(data: memoryview, offset: int, max_payload: int) -> Header:
    """Read the header at an offset and check all that can be checked before a byte of payload is stored.

    Raises:
        ProtocolError: no magic, an unknown type, unknown flags, a length that is no multiple of four or over
            the type's limit, or another major version (Refuse excepted, which all versions understand).
    """
    magic, major, minor, kind, flags, length, sequence, checksum = _WHOLE.unpack_from(data, offset)
    if magic != MAGIC:
        raise ProtocolError(f"the peer does not speak this protocol: a frame begins with {bytes(magic)!r}")
    if major != MAJOR and kind != MessageType.REFUSE:
        raise ProtocolError(
            f"the peer speaks protocol version {major}.{minor}, this side speaks version {MAJOR}",
            hint="install the same version of linkcpp on both machines",
        )
    limit = CONTROL_LIMITS.get(kind)
    if limit is None:
        if kind not in BULK_TYPES:
            raise ProtocolError(f"unknown message type {kind}")
        limit = max_payload
    if length > limit:
        raise ProtocolError(f"a {MessageType(kind).name} of {length} bytes is over the limit of {limit}")
    if length % 4:
        raise ProtocolError(f"a {MessageType(kind).name} of {length} bytes: lengths are multiples of four")
    if flags:
        raise ProtocolError(f"a {MessageType(kind).name} with unknown flags {flags:#04x}")
    return Header(major, minor, kind, length, sequence, checksum)


def push_header(minor: int, kind: int, sequence: int, payload: Sequence[bytes | memoryview]) -> bytes:
    """Write the header of a payload that consists of these pieces, whose lengths add up to a multiple of four."""
    length = 0
    for piece in payload:
        length += len(piece)
    prefix = PREFIX.pack(MAGIC, MAJOR, minor, kind, 0, length, sequence)
    checksum = crc32c(prefix)
    for piece in payload:
        checksum = crc32c(piece, checksum)
    return prefix + CHECKSUM.pack(checksum)


def check_payload(header: Header, prefix: memoryview, payload: memoryview) -> None:
    """Compare the checksum; raise :class:`ProtocolError` where header or payload changed on the way."""
    if crc32c(payload, crc32c(prefix)) != header.checksum:
        raise ProtocolError(f"checksum of a {MessageType(header.type).name} is wrong: it was damaged on the way")
