"""A conversation's state as a file: its tokens and what the engine computed of them.

The file is a header of fixed size, the identity of model and engine, the tokens and the engine's state, each with its
length, and a CRC-32C over all of it. It is written beside its place and moved there, readable by its owner only: the
tokens are the conversation.
"""

from __future__ import annotations

import os
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import crc32c
import numpy as np

from orchestrator.errors import InputError

Result = TypeVar("Result")

_MAGIC: Final = b"LKCPSESS"
_VERSION: Final = 1
_HEADER: Final = struct.Struct("<8sIIQQ")  # magic, version, bytes of the identity, tokens, bytes of the state
_CHECKSUM: Final = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class SessionFile:
    """A saved conversation: its tokens, and the size of its file in bytes."""

    path: Path
    tokens: tuple[int, ...]
    n_bytes: int


def write(path: Path, identity: str, tokens: list[int], state: bytes) -> SessionFile:
    """Write a session atomically; raise :class:`InputError` where the file cannot be written."""
    name = identity.encode()
    parts = [_HEADER.pack(_MAGIC, _VERSION, len(name), len(tokens), len(state)), name]
    parts += [np.array(tokens, "<i4").tobytes(), state]
    checksum = 0
    for part in parts:
        checksum = crc32c.crc32c(part, checksum)
    parts.append(_CHECKSUM.pack(checksum))
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
        with open(descriptor, "wb") as file:
            file.writelines(parts)
        os.replace(temporary, path)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise InputError(f"cannot write the session {path}: {error.strerror}") from error
    return SessionFile(path, tuple(tokens), sum(map(len, parts)))


def read(path: Path, identity: str) -> tuple[SessionFile, bytes]:
    """Read a session and its state.

    Raises :class:`InputError` for a file that is missing, damaged, or from another model or engine.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read the session {path}: {error.strerror}") from error
    if len(data) < _HEADER.size + _CHECKSUM.size or not data.startswith(_MAGIC):
        raise InputError(f"{path} is no saved session")
    _, version, n_name, n_tokens, n_state = _HEADER.unpack_from(data)
    if version != _VERSION:
        raise InputError(f"{path} is a session of format {version}, this linkcpp reads format {_VERSION}")
    end = _HEADER.size + n_name + 4 * n_tokens + n_state
    (checksum,) = _CHECKSUM.unpack_from(data, len(data) - _CHECKSUM.size)
    if end + _CHECKSUM.size != len(data) or crc32c.crc32c(memoryview(data)[:end]) != checksum:
        raise InputError(f"the session {path} is damaged")
    start = _HEADER.size + n_name
    theirs = data[_HEADER.size : start].decode(errors="replace")
    if theirs != identity:
        raise InputError(
            f"the session {path} is from another model or engine",
            hint="a state is good only for the model file, the engine and the settings that made it",
        )
    tokens = np.frombuffer(data, "<i4", n_tokens, start)
    return SessionFile(path, tuple(tokens.tolist()), len(data)), data[start + 4 * n_tokens : end]
