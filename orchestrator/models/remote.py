"""Open a model on a server by reading its headers only.

The headers are kept in the cache folder as files that look like the model's own: of the right size and with holes
where the weights are. Everything that reads a header reads these, so that damage, missing parts and counts out of
bounds are found by the same checks and in the same words as on a disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from orchestrator.config import cache_dir
from orchestrator.errors import DownloadError, InputError, ModelFileError
from orchestrator.models.checksums import LARGEST, SUFFIX, Checksums
from orchestrator.models.gguf import GgufFile
from orchestrator.models.gguf_header import Header, parse_header
from orchestrator.models.gguf_writer import write_whole
from orchestrator.models.http_ranges import RangeClient, RemoteFile
from orchestrator.models.hub import HubFile
from orchestrator.models.locations import HttpLocation, part_names

_WINDOW: Final = 8192
_LARGEST_HEADER: Final = 1 << 28  # a vocabulary of 300,000 strings takes 10 MB
_FOLDERS: Final = 64  # of headers, kept


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A model whose header is known and whose weights lie on a server; ``files`` are its parts in order."""

    name: str
    model: GgufFile
    files: tuple[RemoteFile, ...]
    revision: str | None
    manifest_url: str | None

    @property
    def identity(self) -> str:
        """Hash of what says whether the weights are still the same: sizes and validators of all parts."""
        parts = [[file.size, file.url if file.is_pinned else file.validator] for file in self.files]
        return hashlib.sha256(json.dumps([self.model.header_sha256, parts]).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class _Origin:
    """How to address the parts of one model."""

    name: str
    url: str
    headers: Mapping[str, str]
    is_pinned: bool
    address: Callable[[str], str | None]  # of a file in the same folder, or nothing where there is none


async def open_remote(client: RangeClient, location: HttpLocation | HubFile) -> RemoteModel:
    """Read the headers of a model's file or parts from a server.

    Raise :class:`DownloadError` for the server and the way to it, :class:`ModelFileError` for the file.
    """
    origin = _origin(location)
    mirror = _Mirror(client, origin)
    try:
        first, first_file = await mirror.part(origin.name, origin.url)
        count = first.entries.get("split.count")
        number = first.entries.get("split.no")
        files = [first_file]
        if count is not None and isinstance(count.value, int) and (number is None or number.value == 0):
            for name in (part_names(origin.name, count.value) or ())[1:]:
                url = origin.address(name)
                if url is None:
                    break
                try:
                    files.append((await mirror.part(name, url))[1])
                except DownloadError as error:
                    raise DownloadError(
                        f"part {len(files) + 1} of {count.value}: {error}", hint=error.hint
                    ) from error
        model = GgufFile.open(mirror.folder / origin.name)
    except ModelFileError as error:
        raise ModelFileError(_by_address(str(error), mirror, origin), hint=error.hint) from error
    revision = location.commit if isinstance(location, HubFile) else None
    return RemoteModel(origin.name, model, tuple(files), revision, origin.address(origin.name + SUFFIX))


async def read_manifest(client: RangeClient, remote: RemoteModel, asked: str | None) -> Checksums | None:
    """Return the manifest that was asked for (a file or an address), or the one beside the model, or nothing."""
    if asked is not None and "://" not in asked:
        return Checksums.load(Path(asked))
    url = asked or remote.manifest_url
    if url is None:
        return None
    headers = remote.files[0].headers if asked is None else {}
    data = await client.whole(url, LARGEST, headers=headers)
    if data is None:
        if asked is not None:
            raise DownloadError(f"{url}: the server has no such file")
        return None
    return Checksums.from_json(data, url)


def _origin(location: HttpLocation | HubFile) -> _Origin:
    if isinstance(location, HttpLocation):
        return _Origin(location.name, location.url, {}, False, location.sibling)
    name = location.file.rpartition("/")[2]
    return _Origin(name, location.url, location.headers, True, location.siblings.get)


def _by_address(message: str, mirror: _Mirror, origin: _Origin) -> str:
    """Write addresses where the message names our mirror of them."""
    return message.replace(str(mirror.folder / origin.name), origin.url).replace(
        f"{mirror.folder}{os.sep}", origin.url.partition("?")[0].rpartition("/")[0] + "/"
    )


class _Mirror:
    """The folder with one model's headers."""

    def __init__(self, client: RangeClient, origin: _Origin) -> None:
        self._client = client
        self._origin = origin
        parent = cache_dir() / "headers"
        try:
            parent.mkdir(exist_ok=True)
            self.folder = parent / hashlib.sha256(origin.url.encode()).hexdigest()[:32]
            self.folder.mkdir(exist_ok=True)
            os.utime(self.folder)
            _forget_old(parent)
        except OSError as error:
            raise InputError(f"cannot write into {parent}: {error.strerror or error}") from error

    async def part(self, name: str, url: str) -> tuple[Header, RemoteFile]:
        """Return the header of one file, from the mirror where the file on the server is still the same."""
        start = bytearray()
        file = await self._client.probe(
            url, _WINDOW, start.extend, headers=self._origin.headers, is_pinned=self._origin.is_pinned
        )
        path = self.folder / name
        stamp = [file.url, file.size, file.validator, hashlib.sha256(start).hexdigest()]
        if file.validator and _read_stamp(path) == stamp and path.exists() and path.stat().st_size == file.size:
            with contextlib.suppress(ModelFileError, OSError), path.open("rb", buffering=0) as kept:
                return parse_header(kept, path, file.size), file
        hollow = self.folder / f".{name}.{os.getpid()}"
        try:
            with hollow.open("w+b", buffering=0) as target:
                target.truncate(file.size)
                target.write(start)
                header = await self._read_header(file, target.fileno(), len(start), path)
            _stamp_path(path).unlink(missing_ok=True)
            os.replace(hollow, path)
            write_whole(_stamp_path(path), json.dumps(stamp).encode())
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror or error}") from error
        finally:
            with contextlib.suppress(OSError):
                hollow.unlink(missing_ok=True)
        return header, file

    async def _read_header(self, file: RemoteFile, target: int, have: int, path: Path) -> Header:
        reader = _HeaderReader(self._client, file, target, have, asyncio.get_running_loop())
        # The parser asks for bytes as if it read a file, so it runs beside the loop that gets them.
        header = await asyncio.to_thread(parse_header, reader, path, file.size, window=_WINDOW)
        await reader.complete(header.data_at)
        # Other GGUF files joined to the end show themselves by their first bytes.
        if file.size > header.data_end:
            end = min(file.size, header.data_end + header.alignment + 4)
            await reader.fetch(header.data_end, end - header.data_end)
        return header


class _HeaderReader:
    """A file whose bytes come from a server when they are wanted, in order; what came stays in ``target``."""

    def __init__(
        self, client: RangeClient, file: RemoteFile, target: int, have: int, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._client = client
        self._file = file
        self._target = target
        self._have = have
        self._loop = loop
        self._at = 0

    def seek(self, offset: int, /) -> int:
        self._at = offset
        return offset

    def read(self, size: int, /) -> bytes:
        """Read from the mirror, after getting what is missing up to here; called outside the loop's thread."""
        end = min(self._at + size, self._file.size)
        if end > self._have:
            asyncio.run_coroutine_threadsafe(self.complete(end), self._loop).result()
        data = os.pread(self._target, end - self._at, self._at)
        self._at += len(data)
        return data

    async def complete(self, end: int) -> None:
        """Get everything before ``end``: nothing in between is left out, because arrays are decoded later."""
        if end > _LARGEST_HEADER:
            raise DownloadError(f"{self._file.url}: its header is larger than {_LARGEST_HEADER} bytes")
        if end > self._have:
            await self.fetch(self._have, end - self._have)
            self._have = end

    async def fetch(self, offset: int, size: int) -> None:
        """Get a range into the mirror."""
        at = offset

        def store(data: bytes) -> None:
            nonlocal at
            os.pwrite(self._target, data, at)
            at += len(data)

        await self._client.read(self._file, offset, size, store)


def _stamp_path(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _read_stamp(path: Path) -> object:
    try:
        return json.loads(_stamp_path(path).read_bytes())
    except (OSError, ValueError):
        return None


def _forget_old(parent: Path) -> None:
    folders = sorted((entry.stat().st_mtime, entry.path) for entry in os.scandir(parent) if entry.is_dir())
    for _, path in folders[:-_FOLDERS]:
        shutil.rmtree(path, ignore_errors=True)
