"""Read byte ranges of files on an HTTP server, whatever the network does to the connection.

A dropped or stalled connection is taken up again where it stopped; an answer that is no such range (the whole file,
another place, a changed file) is an error in words. Bytes go to a ``sink`` in the order of the file and are never
held here, so memory stays flat and a reader can hash and store them as they come.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final

import aiohttp
from yarl import URL

from orchestrator.errors import DownloadError, InputError

_CONTENT_RANGE: Final = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_TRY_AGAIN: Final = {408, 425, 429, 500, 502, 503, 504}
_LONGEST_WAIT: Final = 60.0
_CHUNK: Final = 1 << 18

Sink = Callable[[bytes], None]


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to try: ``attempts`` without a single new byte, the first wait between two and the longest silence."""

    attempts: int = 5
    first_wait: float = 0.5  # seconds; doubles
    connect: float = 20.0  # seconds
    silence: float = 30.0  # seconds without a byte


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file on a server; ``validator`` changes with its content (ETag or date; empty where there is none).

    ``is_pinned`` says that the address names a content that cannot change, so that the validators of the machines
    behind it need not agree.
    """

    url: str
    size: int
    validator: str = ""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    is_pinned: bool = False


@dataclass(slots=True)
class Traffic:
    """What was moved so far."""

    requests: int = 0
    bytes: int = 0
    retries: int = 0


class RangeClient:
    """Reads ranges with kept-alive connections; an async context manager. Raises :class:`DownloadError`."""

    def __init__(self, patience: Patience | None = None, connections: int = 4) -> None:
        self.traffic = Traffic()
        self.connections = connections
        self._patience = patience or Patience()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> RangeClient:
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=self._patience.connect, sock_read=self._patience.silence
        )
        # Compression would make another content of it, with other offsets. Proxies come from the environment.
        self._session = aiohttp.ClientSession(
            timeout=timeout,
            trust_env=True,
            auto_decompress=False,
            headers={"Accept-Encoding": "identity", "User-Agent": "linkcpp"},
            connector=aiohttp.TCPConnector(limit=self.connections + 1),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def probe(
        self, url: str, first: int, sink: Sink, *, headers: Mapping[str, str] | None = None, is_pinned: bool = False
    ) -> RemoteFile:
        """Find out the size of a file by reading its first bytes, up to ``first`` of them, into ``sink``."""
        got = bytearray()
        unknown = RemoteFile(url, -1, "", headers or {}, is_pinned)
        file = await self._persist(unknown, 0, first, got.extend, got)
        sink(bytes(got))
        return file

    async def read(self, file: RemoteFile, offset: int, size: int, sink: Sink) -> None:
        """Read exactly ``size`` bytes at ``offset`` into ``sink``."""
        if offset + size > file.size:
            raise DownloadError(f"{file.url} has {file.size} bytes, and bytes up to {offset + size} are wanted")
        taken = _Taken(sink)
        await self._persist(file, offset, size, taken, taken)

    async def whole(self, url: str, limit: int, *, headers: Mapping[str, str] | None = None) -> bytes | None:
        """Return a file of at most ``limit`` bytes, or nothing where the server has none."""
        got = bytearray()
        try:
            file = await self.probe(url, _CHUNK, got.extend, headers=headers)
        except _MissingError:
            return None
        except _NoRangesError:
            return await self._in_one(url, limit, headers or {})
        if file.size > limit:
            raise DownloadError(f"{url} is larger than {limit} bytes")
        if file.size > len(got):
            await self.read(file, len(got), file.size - len(got), got.extend)
        return bytes(got)

    async def _in_one(self, url: str, limit: int, headers: Mapping[str, str]) -> bytes:
        wait = self._patience.first_wait
        for attempt in range(1, self._patience.attempts + 1):
            try:
                return await self._whole(url, limit, headers)
            except _Interrupted as error:
                if attempt == self._patience.attempts:
                    raise DownloadError(f"{url}: {error} ({attempt} attempts)") from error
                await asyncio.sleep(max(wait, min(error.retry_after, _LONGEST_WAIT)))
                wait = min(2 * wait, _LONGEST_WAIT)
        raise DownloadError(f"{url} was not asked for")

    async def _whole(self, url: str, limit: int, headers: Mapping[str, str]) -> bytes:
        async with self._get(url, headers) as response:
            if response.status != 200:
                _refuse(url, response, 0)
            body = bytearray()
            while chunk := await self._chunk(response):
                body += chunk
                self.traffic.bytes += len(chunk)
                if len(body) > limit:
                    raise DownloadError(f"{url} is larger than {limit} bytes")
            return bytes(body)

    async def _persist(
        self, file: RemoteFile, offset: int, size: int, sink: Sink, done: bytearray | _Taken
    ) -> RemoteFile:
        """Ask until all is there; every new byte renews the patience."""
        failures, wait, problem = 0, self._patience.first_wait, ""
        while len(done) < size:
            before = len(done)
            try:
                file = await self._once(file, offset + before, size - before, sink)
                size = min(size, file.size - offset)
                problem = "the answer is empty"
            except _Interrupted as error:
                problem, asked = str(error), error.retry_after
                wait = max(wait, min(asked, _LONGEST_WAIT))
            if len(done) > before:
                failures, wait = 0, self._patience.first_wait
            if len(done) >= size:
                break
            failures += 1
            self.traffic.retries += 1
            if failures >= self._patience.attempts:
                raise DownloadError(
                    f"{file.url}: {problem} ({failures} attempts at byte {offset + len(done)})",
                    hint="run it again later: what was downloaded is kept",
                )
            await asyncio.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT)
        return file

    async def _once(self, file: RemoteFile, offset: int, size: int, sink: Sink) -> RemoteFile:
        headers = {**file.headers, "Range": f"bytes={offset}-{offset + size - 1}"}
        async with self._get(file.url, headers) as response:
            file = _checked(file, offset, response)
            left = size
            while left:
                chunk = (await self._chunk(response))[:left]
                if not chunk:
                    break
                self.traffic.bytes += len(chunk)
                sink(chunk)
                left -= len(chunk)
        return file

    async def _chunk(self, response: aiohttp.ClientResponse) -> bytes:
        """Return what came, empty at the end; apart from the sink, whose errors are none of the network's."""
        try:
            return await response.content.read(_CHUNK)
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise _Interrupted(_in_words(error, self._patience)) from error

    @asynccontextmanager
    async def _get(self, url: str, headers: Mapping[str, str]) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._session is None:
            raise DownloadError("the client is closed")
        self.traffic.requests += 1
        try:
            # encoded=True: a signed address must go out as it came
            response = await self._session.get(URL(url, encoded=True), headers=headers)
        except (aiohttp.ClientSSLError, aiohttp.ClientConnectorCertificateError) as error:
            raise DownloadError(f"{url}: no secure connection: {error}") from error
        except (aiohttp.InvalidURL, ValueError) as error:
            raise InputError(f"{url} is no usable address: {error}") from error
        except aiohttp.TooManyRedirects as error:
            raise DownloadError(f"{url}: the server redirects in a circle") from error
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise _Interrupted(_in_words(error, self._patience)) from error
        try:
            yield response
        finally:
            # Where an answer was not read to its end, closing ends the transfer; else the connection is kept.
            response.close() if not response.content.at_eof() else response.release()


class _Taken:
    """A sink that counts."""

    __slots__ = ("_count", "_sink")

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._count = 0

    def __call__(self, data: bytes) -> None:
        self._sink(data)
        self._count += len(data)

    def __len__(self) -> int:
        return self._count


class _MissingError(DownloadError):
    """The server has no such file."""


class _NoRangesError(DownloadError):
    """The server sends files whole only."""


class _Interrupted(Exception):  # noqa: N818 - no error yet: the reading goes on
    """The transfer stopped before its end, in words; ``retry_after`` seconds is what the server asked for."""

    def __init__(self, problem: str, retry_after: float = 0.0) -> None:
        super().__init__(problem)
        self.retry_after = retry_after


def _refuse(url: str, response: aiohttp.ClientResponse, offset: int) -> None:
    """Raise the error that an answer without the wanted bytes is."""
    status = response.status
    if status in _TRY_AGAIN:
        seconds = response.headers.get("Retry-After", "")
        raise _Interrupted(
            f"the server answers {status} {response.reason}", float(seconds) if seconds.isdecimal() else 0.0
        )
    if status in {401, 403}:
        raise DownloadError(
            f"{url}: the server answers {status}: it wants to know who asks",
            hint="for Hugging Face set HF_TOKEN, or accept the model's terms on its page",
        )
    if status in {404, 410}:
        raise _MissingError(f"{url}: the server has no such file ({status})")
    if status == 416:
        raise DownloadError(
            f"{url}: the server has nothing at byte {offset} ({status}): the file is shorter than it should be",
            hint="it was replaced or is damaged; run it again",
        )
    if status == 200:
        raise _NoRangesError(
            f"{url}: the server ignores ranges and sends the whole file",
            hint="use another server, or download the file whole and cut it with `linkcpp model slice`",
        )
    raise DownloadError(f"{url}: the server answers {status} {response.reason}")


def _checked(file: RemoteFile, offset: int, response: aiohttp.ClientResponse) -> RemoteFile:
    """Make sure that an answer is the wanted range of the same file; return what is now known about it."""
    url = file.url
    if response.status != 206:
        _refuse(url, response, offset)
    match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    if match is None or match[3] == "*" or int(match[1]) != offset or int(match[2]) < offset:
        said = response.headers.get("Content-Range", "nothing")
        raise DownloadError(f"{url}: the server sends another range ({said}) than the one at byte {offset}")
    size = int(match[3])
    validator = response.headers.get("ETag") or response.headers.get("Last-Modified") or ""
    if file.size < 0:
        return RemoteFile(url, size, validator, file.headers, file.is_pinned)
    changed = validator != file.validator and not file.is_pinned
    if size != file.size or changed:
        what = f"from {file.validator} to {validator}" if size == file.size else f"from {file.size} to {size} bytes"
        raise DownloadError(
            f"{url}: the file changed on the server while it was read ({what})", hint="run it again: it starts over"
        )
    return file


def _in_words(error: BaseException, patience: Patience) -> str:
    if isinstance(error, asyncio.TimeoutError):  # aiohttp's timeouts derive from it
        connecting = isinstance(error, aiohttp.ConnectionTimeoutError)
        seconds = patience.connect if connecting else patience.silence
        return f"no {'connection' if connecting else 'byte came'} within {seconds:g} seconds"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return f"the name {error.host} is not known"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect to {error.host}:{error.port} ({error.os_error.strerror or error.os_error})"
    if isinstance(error, aiohttp.ClientPayloadError | aiohttp.ServerDisconnectedError):
        return "the connection ended before the answer did"
    return str(error) or type(error).__name__
