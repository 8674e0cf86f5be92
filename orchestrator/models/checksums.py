"""SHA-256 of every piece of a model, so that whoever holds a part of it can check that part.

A *piece* is one expert of a stacked tensor, or at most 64 MiB of another tensor: what a machine fetches as a whole
and can throw away as a whole. Pieces are counted in the whole model, so a slice's pieces have the same hashes. The
header is covered by the model's identity (:attr:`.GgufFile.header_sha256`).
"""

from __future__ import annotations

import base64
import binascii
import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from orchestrator.errors import InputError, ModelFileError
from orchestrator.models.gguf import GgufFile
from orchestrator.models.gguf_header import TensorInfo
from orchestrator.models.gguf_manifest import expert_count, is_expert_tensor
from orchestrator.models.gguf_writer import Progress, range_bytes, write_whole

FORMAT: Final = 1
SUFFIX: Final = ".manifest.json.gz"
"""What is put behind a model's name to find its manifest beside it."""

LARGEST: Final = 1 << 28
"""Most bytes of a manifest, unpacked: a model of 250,000 experts has 32 MB."""

PIECE_BYTES: Final = 1 << 26
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_UNKNOWN: Final = "0" * 64


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of bytes with a hash: ``index`` is the expert, or the number of the cut; ``offset`` is in the file."""

    tensor: str
    index: int
    file_index: int
    offset: int
    size: int

    def __str__(self) -> str:
        return f"expert {self.index} of {self.tensor}" if is_expert_tensor(self.tensor) else self.tensor


def pieces_of(model: GgufFile, info: TensorInfo) -> Iterator[Piece]:
    """Yield the pieces of a tensor that are in this file, ascending."""
    if is_expert_tensor(info.name):
        for expert in model.stacked(info):
            _, offset, size = model.expert_range(info, expert)
            yield Piece(info.name, expert, info.file_index, offset, size)
        return
    for index, start in enumerate(range(0, info.n_bytes, PIECE_BYTES)):
        size = min(PIECE_BYTES, info.n_bytes - start)
        yield Piece(info.name, index, info.file_index, info.offset + start, size)


@dataclass(frozen=True, slots=True)
class Checksums:
    """The hashes of a model's pieces; ``None`` where they are not known (a slice's manifest lacks the others)."""

    model: str  # name, for people
    header_sha256: str
    digests: Mapping[str, tuple[str | None, ...]]

    def digest(self, tensor: str, index: int) -> str | None:
        """Return the hash that a piece must have, or nothing where it is not known."""
        known = self.digests.get(tensor, ())
        return known[index] if index < len(known) else None

    def require_identity(self, model: GgufFile) -> None:
        """Raise :class:`ModelFileError` unless the manifest is about this model."""
        if self.header_sha256 != model.header_sha256:
            raise ModelFileError(
                f"the manifest is about {self.model} ({self.header_sha256[:12]}...) and not about "
                f"{model.path.name} ({model.header_sha256[:12]}...)",
                hint="metadata or tensors differ: take the manifest of this very file",
            )

    @classmethod
    def compute(cls, model: GgufFile, progress: Progress | None = None) -> Checksums:
        """Hash everything that a local model or slice holds; reads the whole file."""
        digests: dict[str, tuple[str | None, ...]] = {}
        for info, found in _hashed(model, progress):
            total = _piece_count(model, info)
            digests[info.name] = tuple(found.get(index) for index in range(total))
        return cls(model.name, model.header_sha256, digests)

    def check(self, model: GgufFile, progress: Progress | None = None) -> int:
        """Compare a local model or slice with the manifest; return the pieces checked.

        Raise :class:`ModelFileError` naming the first piece that differs, or where the manifest knows none.
        """
        self.require_identity(model)
        checked = 0
        for info, found in _hashed(model, progress):
            for index, digest in found.items():
                expected = self.digest(info.name, index)
                if expected is not None and expected != digest:
                    what = f"expert {index} of {info.name}" if is_expert_tensor(info.name) else info.name
                    raise ModelFileError(
                        f"{model.files[info.file_index]}: {what} is damaged: "
                        f"its SHA-256 is {digest[:12]}... and not {expected[:12]}...",
                        hint="fetch or copy the file again",
                    )
                checked += expected is not None
        if not checked:
            raise ModelFileError(f"the manifest knows nothing of what {model.path} holds")
        return checked

    def to_json(self) -> dict[str, object]:
        """Return the manifest as a JSON object."""
        return {
            "format": FORMAT,
            "algorithm": "sha256",
            "model": self.model,
            "header_sha256": self.header_sha256,
            "piece_bytes": PIECE_BYTES,
            "pieces": {name: _pack(digests) for name, digests in self.digests.items()},
        }

    @classmethod
    def from_json(cls, data: bytes | str, place: str) -> Checksums:
        """Read a manifest, compressed or not; raise :class:`InputError` naming ``place`` for anything else."""
        try:
            value = json.loads(_plain(data) if isinstance(data, bytes) else data)
        except ValueError as error:
            raise InputError(f"{place} is no manifest: it is not JSON, or not whole") from error
        if not isinstance(value, dict) or not isinstance(value.get("pieces"), dict):
            raise InputError(f"{place} is no manifest", hint="make one with `linkcpp model manifest`")
        if (value.get("format"), value.get("algorithm"), value.get("piece_bytes")) != (FORMAT, "sha256", PIECE_BYTES):
            raise InputError(f"{place} is a manifest of another format ({value.get('format')!r})")
        identity = str(value.get("header_sha256"))
        digests: dict[str, tuple[str | None, ...]] = {}
        for name, packed in value["pieces"].items():
            unpacked = _unpack(packed)
            if unpacked is None:
                raise InputError(f"{place}: the hashes of {name} are damaged")
            digests[name] = unpacked
        if not _DIGEST.fullmatch(identity):
            raise InputError(f"{place} names no model")
        return cls(str(value.get("model", "?")), identity, digests)

    @classmethod
    def load(cls, path: Path) -> Checksums:
        """Read a manifest file."""
        try:
            data = path.read_bytes()
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror or error}") from error
        return cls.from_json(data, str(path))

    def save(self, path: Path) -> None:
        """Write the manifest, whole or not at all; compressed where the name ends in ``.gz``."""
        data = (json.dumps(self.to_json(), separators=(",", ":")) + "\n").encode()
        write_whole(path, gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def _plain(data: bytes) -> bytes:
    """Unpack gzip, never to more than :data:`LARGEST` bytes; raise :class:`ValueError` where that is not enough."""
    if data[:2] != b"\x1f\x8b":
        return data
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        plain = unpacker.decompress(data, LARGEST)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not unpacker.eof:
        raise ValueError("too large or cut off")
    return plain


def _pack(digests: tuple[str | None, ...]) -> str:
    """Write hashes one behind the other in base64: a worker that fetches little should not fetch much of these."""
    return base64.b64encode(b"".join(bytes.fromhex(digest or _UNKNOWN) for digest in digests)).decode("ascii")


def _unpack(packed: object) -> tuple[str | None, ...] | None:
    """Read what :func:`_pack` wrote; nothing for anything else."""
    try:
        raw = base64.b64decode(str(packed), validate=True)
    except (binascii.Error, ValueError):
        return None
    if len(raw) % 32:
        return None
    digests = [raw[start : start + 32].hex() for start in range(0, len(raw), 32)]
    return tuple(None if digest == _UNKNOWN else digest for digest in digests)


def _piece_count(model: GgufFile, info: TensorInfo) -> int:
    if is_expert_tensor(info.name):
        return expert_count(info.name, model.manifest[info.name].shape)
    return -(-info.n_bytes // PIECE_BYTES)


def _hashed(model: GgufFile, progress: Progress | None) -> Iterator[tuple[TensorInfo, dict[int, str]]]:
    total, done = sum(info.n_bytes for info in model.tensors.values()), 0
    for info in model.tensors.values():
        found = {}
        for piece in pieces_of(model, info):
            digest = hashlib.sha256()
            for chunk in range_bytes(model.files[piece.file_index], piece.offset, piece.size, info.name):
                digest.update(chunk)
                done += len(chunk)
                if progress is not None:
                    progress(done, total, info.name)
            found[piece.index] = digest.hexdigest()
        yield info, found
