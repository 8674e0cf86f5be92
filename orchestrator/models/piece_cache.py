"""Pieces of models by their SHA-256: what was downloaded once need not be downloaded for another share of it.

A piece's file bears its hash as its name and is believed only when its content has that hash. The folder has a size
limit; what was used longest ago goes first. Beside it lies what is known of remote models: the hashes of pieces that
were read from one exact state of a file on a server, so that the cache helps where nobody published a manifest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO, Final

from orchestrator.config import cache_dir, cache_limit
from orchestrator.models.gguf_writer import write_whole

_CHUNK: Final = 1 << 20
_MODELS: Final = 64  # whose hashes are remembered


class PieceCache:
    """The folder of pieces; losing any of it costs a download and no more, so its own errors are no errors."""

    def __init__(self, folder: Path | None = None, limit: int | None = None) -> None:
        self._folder = cache_dir() / "pieces" if folder is None else folder
        self._known = self._folder.with_name(self._folder.name + "-known")
        self.limit = cache_limit() if limit is None else limit

    def copy(self, digest: str, size: int, write: Callable[[int, bytes], None]) -> bool:
        """Give a piece to ``write(offset, data)``; return whether it was there and whole."""
        path = self._path(digest)
        found, at = hashlib.sha256(), 0
        try:
            file = path.open("rb", buffering=0)
        except OSError:
            return False
        with file:
            while chunk := _read(file):
                found.update(chunk)
                at += len(chunk)
                if at > size:
                    break
                write(at - len(chunk), chunk)
        whole = at == size and found.hexdigest() == digest
        with contextlib.suppress(OSError):
            os.utime(path) if whole else path.unlink()
        return whole

    def keep(self, digest: str, source: int, place: int, size: int) -> None:
        """Keep ``size`` bytes at ``place`` of the open file ``source``, which have this hash."""
        path = self._path(digest)
        partial = path.with_name(f".{digest}.{os.getpid()}")
        with contextlib.suppress(OSError):
            if path.exists():
                os.utime(path)
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with partial.open("wb") as file:
                    for start in range(0, size, _CHUNK):
                        file.write(os.pread(source, min(_CHUNK, size - start), place + start))
                os.replace(partial, path)
            finally:
                partial.unlink(missing_ok=True)

    def shrink(self) -> None:
        """Remove what was used longest ago until the limit holds, and what broken writes left behind."""
        files = []
        for parent, _, names in os.walk(self._folder):
            for name in names:
                with contextlib.suppress(OSError):
                    status = os.stat(os.path.join(parent, name))
                    files.append((status.st_mtime, status.st_size, os.path.join(parent, name)))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= self.limit:
                break
            with contextlib.suppress(OSError):
                os.unlink(path)
            total -= size

    def known(self, identity: str) -> dict[str, str]:
        """Return the hashes seen in a remote model: ``tensor/index`` -> digest."""
        try:
            stored = json.loads((self._known / f"{identity}.json").read_bytes())
        except (OSError, ValueError):
            return {}
        return {str(key): str(value) for key, value in stored.items()} if isinstance(stored, dict) else {}

    def remember(self, identity: str, digests: Mapping[str, str]) -> None:
        """Add hashes seen in a remote model."""
        with contextlib.suppress(OSError):
            self._known.mkdir(parents=True, exist_ok=True)
            merged = {**self.known(identity), **digests}
            write_whole(self._known / f"{identity}.json", json.dumps(merged).encode())
            oldest = sorted(self._known.iterdir(), key=lambda path: path.stat().st_mtime)[:-_MODELS]
            for path in oldest:
                path.unlink()

    def _path(self, digest: str) -> Path:
        return self._folder / digest[:2] / digest


def _read(file: BinaryIO) -> bytes:
    try:
        return file.read(_CHUNK)
    except OSError:  # a bad disk: as good as the end
        return b""
