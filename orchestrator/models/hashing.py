"""SHA-256 of model files, done once: a 70 GB file takes minutes, so the result is kept.

A kept hash counts as long as the file's size, modification time (ns), inode and device are the same. Losing the
cache costs time only; a damaged one is as good as none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Final

from orchestrator.config import cache_dir
from orchestrator.errors import ModelFileError
from orchestrator.models.gguf import GgufFile
from orchestrator.models.gguf_writer import Progress

_CHUNK: Final = 1 << 22
_ENTRIES: Final = 4096  # the oldest go beyond this


def model_sha256(path: str | Path, *, progress: Progress | None = None) -> str:
    """Return the hash of a model: of its file, or of its parts' hashes in order where it is split."""
    files = GgufFile.open(path).files
    hashes = [file_sha256(part, progress=progress) for part in files]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def file_sha256(path: str | Path, *, progress: Progress | None = None) -> str:
    """Return a file's SHA-256 as 64 hex digits, from the cache where the file has not changed."""
    path = Path(path)
    cache = cache_dir() / "hashes.json"
    try:
        stamp = _stamp(path)
        known = _load(cache).get(str(path.resolve()))
        if known is not None and known[:-1] == stamp:
            return str(known[-1])
        digest = hash_stream(path, progress)
        unchanged = _stamp(path) == stamp
        resolved = str(path.resolve())
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {error.strerror or error}") from error
    if unchanged:
        _store(cache, resolved, [*stamp, digest])
    return digest


def hash_stream(path: Path, progress: Progress | None = None) -> str:
    """Hash a file without looking at the cache."""
    digest = hashlib.sha256()
    total, done = path.stat().st_size, 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            if progress is not None:
                progress(done, total, path.name)
    return digest.hexdigest()


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev]


def _load(cache: Path) -> dict[str, list[object]]:
    try:
        stored = json.loads(cache.read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(stored, dict):
        return {}
    return {name: entry for name, entry in stored.items() if isinstance(entry, list) and len(entry) == 5}


def _store(cache: Path, name: str, entry: list[object]) -> None:
    """Add an entry; two processes at once may lose one of theirs, which costs a hash and no more."""
    entries = _load(cache)
    entries.pop(name, None)
    entries[name] = entry
    partial = cache.with_name(f".hashes.{os.getpid()}")
    with contextlib.suppress(OSError):  # a full disk must not fail what only wanted a hash
        partial.write_text(json.dumps(dict(list(entries.items())[-_ENTRIES:])), encoding="utf-8")
        os.replace(partial, cache)
