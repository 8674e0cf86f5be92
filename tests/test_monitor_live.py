from __future__ import annotations

import contextlib
import dataclasses
import http.server
import json
import os
import pty
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.errors import FleetError, InputError, ProtocolError
from orchestrator.monitor.live import StatusPoller, fetch_snapshot, status_url
from orchestrator.status.snapshot import FleetSnapshot, WorkerState
from tests.test_monitor_render import SNAPSHOT

ROOT = Path(__file__).resolve().parent.parent


class Gateway:
    """A status route on loopback whose snapshot the test changes."""

    def __init__(self) -> None:
        self.snapshot = SNAPSHOT
        self.status = 200
        self.body: bytes | None = None
        gateway = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = self.path == "/status"
                self.send_response(gateway.status if found else 404)
                self.end_headers()
                if found:
                    self.wfile.write(gateway.body or json.dumps(gateway.snapshot.to_json()).encode())

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    made = Gateway()
    yield made
    with contextlib.suppress(OSError):
        made.stop()


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080/status"),
        ("127.0.0.1:8080", "http://127.0.0.1:8080/status"),
        ("https://box.example/llm/", "https://box.example/llm/status"),
        ("[::1]:8080", "http://[::1]:8080/status"),
    ],
)
def test_status_url(address: str, url: str) -> None:
    assert status_url(address) == url


@pytest.mark.parametrize(
    "address", ["", "ftp://x", "http://", "http://h:0", "http://h:port", "http://h:99999", "http://[::1"]
)
def test_an_unusable_address_is_an_input_error(address: str) -> None:
    with pytest.raises(InputError, match="not the address"):
        status_url(address)


def test_fetches_what_the_gateway_serves(gateway: Gateway) -> None:
    assert fetch_snapshot(status_url(gateway.url)) == SNAPSHOT


def test_a_proxy_in_the_environment_is_not_asked(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    assert fetch_snapshot(status_url(gateway.url)) == SNAPSHOT


def test_what_answers_but_is_no_gateway_is_said_so(gateway: Gateway) -> None:
    gateway.status = 503
    with pytest.raises(FleetError, match="HTTP 503"):
        fetch_snapshot(status_url(gateway.url))
    gateway.status, gateway.body = 200, b"<html>hello</html>"
    with pytest.raises(ProtocolError, match="not JSON"):
        fetch_snapshot(status_url(gateway.url))


def test_a_peer_that_speaks_no_http_is_a_fleet_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            peer, _ = server.accept()
            with peer:
                peer.sendall(b"SSH-2.0-x\r\n")

        threading.Thread(target=greet, daemon=True).start()
        with pytest.raises(FleetError):
            fetch_snapshot(f"http://127.0.0.1:{server.getsockname()[1]}/status")


def test_a_gateway_that_accepts_and_says_nothing_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(FleetError, match="no answer in time"):
        fetch_snapshot(f"http://127.0.0.1:{server.getsockname()[1]}/status", timeout=0.2)


def test_poller_tells_since_when_the_gateway_is_silent(gateway: Gateway) -> None:
    clock = [100.0]
    poller = StatusPoller(gateway.url, now=lambda: clock[0])
    assert poller.poll().silent_for is None
    gateway.stop()
    clock[0] = 107.0
    view = poller.poll()
    assert view.silent_for == pytest.approx(7.0)
    assert view.snapshot == SNAPSHOT
    assert "refused" in view.problem


def test_poller_recovers_when_the_gateway_does(gateway: Gateway) -> None:
    poller = StatusPoller(gateway.url)
    gateway.status = 500
    assert poller.poll().silent_for is not None
    gateway.status = 200
    assert poller.poll().silent_for is None


def run_top(*arguments: str, columns: int = 80) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "orchestrator", "top", *arguments],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": str(columns)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("columns", [80, 160])
def test_top_once_prints_one_picture(gateway: Gateway, columns: int) -> None:
    done = run_top("--url", gateway.url, "--once", columns=columns)
    assert done.returncode == 0, done.stderr
    assert "1 of 2 workers up" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= columns


def test_top_json_once_is_the_snapshot(gateway: Gateway) -> None:
    done = run_top("--url", gateway.url, "--once", "--json")
    assert FleetSnapshot.from_json(done.stdout) == SNAPSHOT


def test_top_once_without_a_gateway_ends_with_code_4() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    done = run_top("--url", f"http://127.0.0.1:{port}", "--once")
    assert done.returncode == 4
    assert done.stderr.startswith("error: ")
    assert f"http://127.0.0.1:{port}: connection refused" in done.stderr
    assert done.stdout == ""


def test_top_with_a_bad_url_ends_with_code_2() -> None:
    assert run_top("--url", "ftp://x", "--once").returncode == 2


class Screen:
    """`linkcpp top` on a pseudo terminal."""

    def __init__(self, *arguments: str) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "orchestrator", "top", *arguments],
            cwd=ROOT,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
            stdin=slave,
            stdout=slave,
            stderr=slave,
        )
        os.close(slave)
        self.text = ""

    def wait_for(self, wanted: str, seconds: float) -> bool:
        begin, deadline = len(self.text), time.monotonic() + seconds
        while wanted not in self.text[begin:] and time.monotonic() < deadline:
            if select.select([self.master], [], [], 0.05)[0]:
                try:
                    self.text += os.read(self.master, 65536).decode("utf-8", "replace")
                except OSError:
                    break
        return wanted in self.text[begin:]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)


def test_top_follows_changes_and_q_quits(gateway: Gateway) -> None:
    screen = Screen("--url", gateway.url, "--interval", "0.3")
    try:
        assert screen.wait_for("1 of 2 workers up", 30.0)
        revived = tuple(dataclasses.replace(worker, state=WorkerState.UP) for worker in SNAPSHOT.workers)
        gateway.snapshot = dataclasses.replace(SNAPSHOT, workers=revived)
        assert screen.wait_for("2 of 2 workers up", 2.0)
        gateway.stop()
        assert screen.wait_for("GATEWAY UNREACHABLE", 2.5)
        os.write(screen.master, b"q")
        assert screen.process.wait(30.0) == 0
    finally:
        screen.close()


def test_ctrl_c_quits_cleanly(gateway: Gateway) -> None:
    screen = Screen("--url", gateway.url)
    try:
        assert screen.wait_for("1 of 2 workers up", 30.0)
        screen.process.send_signal(2)
        assert screen.process.wait(30.0) == 0
        assert "Traceback" not in screen.text
    finally:
        screen.close()
