"""Fetch a part of a model from a server: the header, then only the byte ranges of the tensors and experts wanted.

The result is the slice that `linkcpp model slice` would cut from the whole file, byte by byte. Runs of neighbouring
pieces are one request, several requests run at once, every piece is hashed as it comes and compared with the
manifest where there is one.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from orchestrator.config import data_dir
from orchestrator.errors import DownloadError, InputError
from orchestrator.models.checksums import Checksums, Piece, pieces_of
from orchestrator.models.gguf import GgufFile
from orchestrator.models.gguf_writer import Progress
from orchestrator.models.http_ranges import Patience, RangeClient
from orchestrator.models.hub import HubFile, find_on_hub
from orchestrator.models.locations import HttpLocation, HubLocation
from orchestrator.models.partial_file import PartialFile, Place, same_pieces
from orchestrator.models.piece_cache import PieceCache
from orchestrator.models.remote import RemoteModel, open_remote, read_manifest
from orchestrator.models.slices import Selection, SlicePlan, check_destination, plan_slice

_RUN_BYTES: Final = 1 << 25  # of one request: long enough to fill a fast line, short enough to share the work
_SPARE_BYTES: Final = 1 << 20

Choose = Callable[[GgufFile], Selection]
"""Chooses what to keep when the header of the model is known."""

_Advance = Callable[[int, str], None]


@dataclass(frozen=True, slots=True)
class FetchReport:
    """What fetching a slice took; all sizes in bytes."""

    path: Path
    n_bytes: int
    source_bytes: int  # of the whole model
    downloaded: int  # headers, manifest and repeats included
    resumed: int  # from an interrupted run
    from_cache: int
    requests: int
    retries: int
    checked: bool  # against a manifest
    revision: str | None  # the commit, on Hugging Face


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A piece of the model, its place in the slice and the hash that it must or should have."""

    number: int
    piece: Piece
    place: Place
    required: str | None  # by a manifest
    known: str | None  # from the manifest or from an earlier fetch of the same state


def fetch_slice(
    location: HttpLocation | HubLocation,
    destination: Path,
    selection: Selection | Choose,
    *,
    manifest: str | None = None,
    connections: int = 4,
    patience: Patience | None = None,
    progress: Progress | None = None,
) -> FetchReport:
    """Fetch what ``selection`` keeps of a remote model into ``destination``; it may depend on the model's header.

    ``manifest`` is a file or an address of one; without it the one beside the model is used, if there is any. An
    interrupted fetch is taken up by calling this again. Raise :class:`DownloadError` for the server and for bytes
    that are not what the manifest says, :class:`InputError` for the rest.
    """
    found = find_on_hub(location) if isinstance(location, HubLocation) else location
    return asyncio.run(
        _fetch(found, Path(destination), selection, manifest, RangeClient(patience, connections), progress)
    )


def fetch_share(
    location: HttpLocation | HubLocation,
    choose: Choose,
    *,
    name: str,
    manifest: str | None = None,
    patience: Patience | None = None,
    progress: Progress | None = None,
    warn: Callable[[str], None] | None = None,
) -> Path:
    """Bring a share of a remote model into the data folder, where it stays, and return its file.

    ``name`` tells shares of one address apart. A server that cannot be asked is no obstacle where the file is there
    from an earlier time: ``warn`` gets the reason. Raise like :func:`fetch_slice`.
    """
    address = location.url if isinstance(location, HttpLocation) else str(location)
    digest = hashlib.sha256(f"{address}\n{name}".encode()).hexdigest()[:16]
    folder = data_dir() / "shares"
    destination = folder / f"{digest}.gguf"
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot create {folder}: {error.strerror}") from error
    try:
        fetch_slice(location, destination, choose, manifest=manifest, patience=patience, progress=progress)
    except DownloadError as error:
        if not destination.exists():
            raise
        if warn is not None:
            warn(f"warning: using the share fetched earlier, because {error}")
    return destination


async def _fetch(
    location: HttpLocation | HubFile,
    destination: Path,
    selection: Selection | Choose,
    manifest_name: str | None,
    client: RangeClient,
    progress: Progress | None,
) -> FetchReport:
    async with client:
        remote = await open_remote(client, location)
        check_destination(remote.model, destination)
        manifest = await read_manifest(client, remote, manifest_name)
        if manifest is not None:
            manifest.require_identity(remote.model)
        cache = PieceCache()
        plan = plan_slice(remote.model, selection if isinstance(selection, Selection) else selection(remote.model))
        header, offsets = plan.header()
        wanted = _wanted(plan, offsets, manifest, cache.known(remote.identity))
        places = [item.place for item in wanted]
        size = max((place.offset + place.size for place in places), default=len(header))
        size += -size % plan.model.headers[0].alignment
        resumed = from_cache = 0
        if not same_pieces(destination, header, size, places, (item.known for item in wanted)):
            key = _key(remote, manifest, header, wanted)
            with PartialFile(destination, key, size, places) as target:
                _check_space(destination, size, target)
                target.write(0, header)
                resumed = target.resume([item.required for item in wanted], progress)
                download = _Download(client, remote, wanted, target, cache, progress)
                from_cache = download.take_cached()
                await download.run()
                GgufFile.open(target.path)
                target.complete()
                cache.remember(remote.identity, {_name(item.piece): target.done[item.number] for item in wanted})
            cache.shrink()
        traffic = client.traffic
        return FetchReport(
            destination,
            size,
            remote.model.n_bytes,
            traffic.bytes,
            resumed,
            from_cache,
            traffic.requests,
            traffic.retries,
            all(item.required for item in wanted),
            remote.revision,
        )


class _Download:
    """The pieces still missing, shared among a few tasks that each have a connection."""

    def __init__(
        self,
        client: RangeClient,
        remote: RemoteModel,
        wanted: Sequence[_Wanted],
        target: PartialFile,
        cache: PieceCache,
        progress: Progress | None,
    ) -> None:
        self._client = client
        self._remote = remote
        self._wanted = wanted
        self._target = target
        self._cache = cache
        self._progress = progress
        self._total = sum(item.place.size for item in wanted)
        self._done = sum(wanted[number].place.size for number in target.done)
        self._fills_cache = self._total <= cache.limit  # what would push itself out again is not worth writing

    def take_cached(self) -> int:
        """Copy the pieces that an earlier fetch left in the cache; return their bytes."""
        taken = 0
        for item in self._missing():
            place = item.place
            write = partial(self._write_at, place.offset)
            if item.known and self._cache.copy(item.known, place.size, write):
                self._target.finished(item.number, item.known)
                taken += place.size
                self._advance(place.size, "from the cache")
        return taken

    async def run(self) -> None:
        """Download what is missing."""
        self._runs = deque(_runs(list(self._missing())))
        tasks = [asyncio.ensure_future(self._work()) for _ in range(min(self._client.connections, len(self._runs)))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self) -> None:
        while self._runs:
            run = self._runs.popleft()
            wrong = await self._read(run)
            for item in wrong:  # once more: the line may have been at fault
                if await self._read([item]):
                    url = self._remote.files[item.piece.file_index].url
                    raise DownloadError(
                        f"{url}: {item.piece} is not what the manifest says (SHA-256 {item.required})",
                        hint="the file on the server is damaged or another one; try another source",
                    )

    async def _read(self, run: Sequence[_Wanted]) -> list[_Wanted]:
        """Read neighbouring pieces in one request; return those with a wrong hash."""
        first, last = run[0].piece, run[-1].piece
        pieces = _Pieces(run, self._target, self._cache if self._fills_cache else None, self._advance)
        file = self._remote.files[first.file_index]
        await self._client.read(file, first.offset, last.offset + last.size - first.offset, pieces)
        return pieces.wrong

    def _write_at(self, start: int, offset: int, data: bytes) -> None:
        self._target.write(start + offset, data)

    def _missing(self) -> Iterator[_Wanted]:
        return (item for item in self._wanted if item.number not in self._target.done)

    def _advance(self, count: int, note: str) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self._total, note)


class _Pieces:
    """A sink that cuts a run of bytes into its pieces, writes each to its place and hashes it."""

    def __init__(
        self, run: Sequence[_Wanted], target: PartialFile, cache: PieceCache | None, advance: _Advance
    ) -> None:
        self.wrong: list[_Wanted] = []
        self._run = deque(run)
        self._target = target
        self._cache = cache
        self._advance = advance
        self._digest = hashlib.sha256()
        self._filled = 0

    def __call__(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            item = self._run[0]
            part = view[: item.place.size - self._filled]
            self._target.write(item.place.offset + self._filled, part)
            self._digest.update(part)
            self._filled += len(part)
            self._advance(len(part), "downloading")
            view = view[len(part) :]
            if self._filled == item.place.size:
                self._close(item)

    def _close(self, item: _Wanted) -> None:
        digest = self._digest.hexdigest()
        self._run.popleft()
        self._digest, self._filled = hashlib.sha256(), 0
        if item.required not in {None, digest}:
            self.wrong.append(item)
            self._advance(-item.place.size, "downloading")
            return
        self._target.finished(item.number, digest)
        if self._cache is not None:
            self._cache.keep(digest, self._target.descriptor, item.place.offset, item.place.size)


def _wanted(
    plan: SlicePlan, offsets: Sequence[int], manifest: Checksums | None, known: dict[str, str]
) -> list[_Wanted]:
    wanted: list[_Wanted] = []
    for tensor, start in zip(plan.tensors, offsets, strict=True):
        at = start
        experts = None if tensor.experts is None else frozenset(tensor.experts)
        for piece in pieces_of(plan.model, tensor.info):
            if experts is not None and piece.index not in experts:
                continue
            required = None if manifest is None else manifest.digest(piece.tensor, piece.index)
            place = Place(at, piece.size)
            wanted.append(_Wanted(len(wanted), piece, place, required, required or known.get(_name(piece))))
            at += piece.size
    return wanted


def _runs(missing: list[_Wanted]) -> Iterable[list[_Wanted]]:
    """Join pieces that lie side by side on the server, up to the size of one request."""
    run: list[_Wanted] = []
    for item in sorted(missing, key=lambda item: (item.piece.file_index, item.piece.offset)):
        if run:
            last = run[-1].piece
            follows = (last.file_index, last.offset + last.size) == (item.piece.file_index, item.piece.offset)
            if not follows or item.piece.offset - run[0].piece.offset >= _RUN_BYTES:
                yield run
                run = []
        run.append(item)
    if run:
        yield run


def _key(remote: RemoteModel, manifest: Checksums | None, header: bytes, wanted: Sequence[_Wanted]) -> str:
    """Name what is being made. With a manifest the bytes are known, so another server may go on where one stopped."""
    whole = manifest is not None and all(item.required for item in wanted)
    digest = hashlib.sha256(header)
    if whole:
        digest.update("".join(item.required or "" for item in wanted).encode())
    else:
        digest.update(remote.identity.encode())
    return digest.hexdigest()


def _name(piece: Piece) -> str:
    return f"{piece.tensor}/{piece.index}"


def _check_space(destination: Path, size: int, target: PartialFile) -> None:
    try:
        there = target.path.stat().st_blocks * 512
        free = shutil.disk_usage(destination.absolute().parent).free
    except OSError as error:
        raise InputError(f"cannot write {destination}: {error.strerror or error}") from error
    if free + there < size + _SPARE_BYTES:
        raise InputError(
            f"{destination} needs {size / 1e6:.0f} MB and {(free + there) / 1e6:.0f} MB are free",
            hint="make room, or choose another disk",
        )
