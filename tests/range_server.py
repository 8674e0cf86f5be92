"""A real HTTP server on loopback that serves ranges of files and, where a test asks for it, does so badly."""

from __future__ import annotations

import contextlib
import http.server
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass(frozen=True)
class Asked:
    """A request as a fault sees it: its number (from 0), name of the file and the range."""

    number: int
    name: str
    start: int
    end: int  # exclusive


@dataclass(frozen=True)
class Fault:
    """What goes wrong with one answer; nothing by default."""

    status: int | None = None  # this status and no body
    headers: dict[str, str] = field(default_factory=dict)
    whole: bool = False  # no ranges: 200 and the whole file
    drop_after: int | None = None  # bytes, then the connection breaks
    stall_after: int | None = None  # bytes, then silence
    shorter_by: int = 0  # an honest answer with less than was asked for
    etag: str | None = None
    flip: int | None = None  # this byte of the file has one bit wrong
    content_range: str | None = None  # instead of the right one
    redirect: str | None = None
    wait: float = 0.0  # seconds between the kilobytes


Fail = Callable[[Asked], Fault | None]


class RangeServer:
    """Serves a folder; ``sent`` counts body bytes by file, ``asked`` has every request."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fail: Fail = lambda asked: None
        self.pages: dict[str, tuple[int, dict[str, str], bytes]] = {}  # path -> status, headers, body
        self.asked: list[Asked] = []
        self.sent: dict[str, int] = {}
        self.authorization: list[tuple[str, str | None]] = []  # by path
        self.open_now = 0
        self.most_open = 0
        self.lock = threading.Lock()
        self.stopping = threading.Event()
        owner = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                with owner.lock:
                    owner.open_now += 1
                    owner.most_open = max(owner.most_open, owner.open_now)
                try:
                    owner.answer(self)
                except OSError:  # the client went away, as it may
                    self.close_connection = True
                finally:
                    with owner.lock:
                        owner.open_now -= 1

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True)
        self.thread.start()

    def url(self, name: str) -> str:
        return f"{self.address}/models/{name}"

    def close(self) -> None:
        self.stopping.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(5)

    @property
    def total_sent(self) -> int:
        return sum(self.sent.values())

    def answer(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        place = unquote(urlsplit(handler.path).path)
        name = place.rpartition("/")[2]
        path = self.folder / name
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers.get("Range", ""))
        size = path.stat().st_size if path.exists() else 0
        start = int(match[1]) if match else 0
        end = min(int(match[2]) + 1, size) if match else size
        with self.lock:
            asked = Asked(len(self.asked), name, start, end)
            self.asked.append(asked)
            self.authorization.append((place, handler.headers.get("Authorization")))
        if place in self.pages:
            status, headers, body = self.pages[place]
            self.head(handler, status, len(body), headers)
            handler.wfile.write(body)
            return
        fault = self.fail(asked) or Fault()
        if fault.redirect is not None:
            self.head(handler, 302, 0, {"Location": fault.redirect})
        elif fault.status is not None:
            self.head(handler, fault.status, 0, fault.headers)
        elif not path.exists():
            self.head(handler, 404, 0, {})
        elif match and start >= size:
            self.head(handler, 416, 0, {"Content-Range": f"bytes */{size}"})
        else:
            self.body(handler, path, asked, fault, size, partial=match is not None and not fault.whole)

    def body(
        self,
        handler: http.server.BaseHTTPRequestHandler,
        path: Path,
        asked: Asked,
        fault: Fault,
        size: int,
        *,
        partial: bool,
    ) -> None:
        start, end = (asked.start, asked.end - fault.shorter_by) if partial else (0, size)
        status = path.stat()
        headers = {"ETag": fault.etag or f'"{status.st_mtime_ns:x}-{size:x}"', "Accept-Ranges": "bytes"}
        if partial:
            headers["Content-Range"] = fault.content_range or f"bytes {start}-{end - 1}/{size}"
        self.head(handler, 206 if partial else 200, end - start, headers)
        with path.open("rb") as file:
            file.seek(start)
            data = bytearray(file.read(end - start))
        if fault.flip is not None and start <= fault.flip < end:
            data[fault.flip - start] ^= 1
        limits = [limit for limit in (fault.drop_after, fault.stall_after) if limit is not None]
        for at in range(0, min([len(data), *limits]), 1 << 10 if fault.wait else 1 << 16):
            chunk = data[at : min([at + (1 << 10 if fault.wait else 1 << 16), len(data), *limits])]
            time.sleep(fault.wait)
            handler.wfile.write(chunk)
            with self.lock:
                self.sent[path.name] = self.sent.get(path.name, 0) + len(chunk)
        if fault.drop_after is not None and fault.drop_after < len(data):
            handler.wfile.flush()
            with contextlib.suppress(OSError):
                handler.connection.shutdown(socket.SHUT_RDWR)
            handler.close_connection = True
        if fault.stall_after is not None and fault.stall_after < len(data):
            self.stopping.wait(30)
            handler.close_connection = True

    def head(
        self, handler: http.server.BaseHTTPRequestHandler, status: int, length: int, headers: dict[str, str]
    ) -> None:
        handler.send_response(status)
        for name, value in {"Content-Length": str(length), **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[RangeServer]:
    server = RangeServer(folder)
    try:
        yield server
    finally:
        server.close()
