"""A large file that is being made from pieces, and a journal of those that are in it.

``NAME.partial`` has its final size from the start; ``NAME.partial.journal`` has one line per piece with the hash of
what was written. An interrupted run is taken up by reading the pieces of the journal again and keeping those whose
hashes are still right, so neither a crash nor a lost write can leave a hole. Only the finished file gets the name.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

from orchestrator.errors import InputError
from orchestrator.models.gguf_writer import Progress

_LINE: Final = re.compile(r"(\d+) ([0-9a-f]{64})")
_CHUNK: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """Where a piece goes."""

    offset: int
    size: int


class PartialFile:
    """The unfinished file; a context manager. ``key`` says what is being made: another key starts over.

    Raises :class:`InputError` where the file cannot be written or another process is making it.
    """

    def __init__(self, destination: Path, key: str, size: int, places: Sequence[Place]) -> None:
        self.destination = destination
        self.path = destination.with_name(destination.name + ".partial")
        self.done: dict[int, str] = {}
        self._journal_path = self.path.with_name(self.path.name + ".journal")
        self._key = key
        self._size = size
        self._places = places
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> PartialFile:
        with self._in_words(), contextlib.ExitStack() as stack:
            self._journal = stack.enter_context(open(self._journal_path, "a+b", buffering=0))
            try:
                fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise InputError(f"another process is making {self.destination}") from error
            self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            stack.callback(os.close, self.descriptor)
            self._journal.seek(0)
            lines = self._journal.read().decode("ascii", "replace").splitlines()
            self._claimed = {}
            if lines[:1] == [self._key] and os.fstat(self.descriptor).st_size == self._size:
                matches = [_LINE.fullmatch(line) for line in lines[1:]]
                self._claimed = {int(match[1]): match[2] for match in matches if match}
            else:
                self._journal.truncate(0)
                os.ftruncate(self.descriptor, 0)
                os.ftruncate(self.descriptor, self._size)
                self._journal.write(f"{self._key}\n".encode())
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def resume(self, expected: Sequence[str | None], progress: Progress | None = None) -> int:
        """Read again what an earlier run left, keep what has the right hash; return the bytes kept."""
        claimed = [number for number in sorted(self._claimed) if number < len(self._places)]
        total, seen, kept = sum(self._places[number].size for number in claimed), 0, 0
        for number in claimed:
            place = self._places[number]
            digest = self.hash(place)
            seen += place.size
            if progress is not None:
                progress(seen, total, "checking what is there")
            if digest == self._claimed[number] and expected[number] in {None, digest}:
                self.done[number] = digest
                kept += place.size
        return kept

    def hash(self, place: Place) -> str:
        """Return the SHA-256 of what is at a place."""
        digest = hashlib.sha256()
        for chunk in _chunks(self.descriptor, place):
            digest.update(chunk)
        return digest.hexdigest()

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write bytes at an offset."""
        with self._in_words():
            view = memoryview(data)
            while view:
                written = os.pwrite(self.descriptor, view, offset)
                view, offset = view[written:], offset + written

    def finished(self, number: int, digest: str) -> None:
        """Note that a piece is in the file."""
        self.done[number] = digest
        with self._in_words():
            self._journal.write(f"{number} {digest}\n".encode())

    def complete(self) -> None:
        """Give the file its name; every piece must be in it."""
        with self._in_words():
            os.fsync(self.descriptor)
            os.replace(self.path, self.destination)
            self._journal_path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(f"cannot write {self.path}: {error.strerror or error}") from error


def same_pieces(
    path: Path, header: bytes, size: int, places: Sequence[Place], expected: Iterable[str | None]
) -> bool:
    """Tell whether a file is finished already: this header, this size and the right hash at every place."""
    digests = list(expected)
    if None in digests:
        return False
    try:
        with path.open("rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size != size or os.pread(file.fileno(), len(header), 0) != header:
                return False
            for place, expected_digest in zip(places, digests, strict=True):
                digest = hashlib.sha256()
                for chunk in _chunks(file.fileno(), place):
                    digest.update(chunk)
                if digest.hexdigest() != expected_digest:
                    return False
    except OSError:
        return False
    return True


def _chunks(descriptor: int, place: Place) -> Iterator[bytes]:
    for start in range(0, place.size, _CHUNK):
        yield os.pread(descriptor, min(_CHUNK, place.size - start), place.offset + start)
