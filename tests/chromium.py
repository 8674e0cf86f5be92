"""A headless Chromium, spoken to in its DevTools protocol."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page:
    """One tab. Its methods are for one event loop."""

    def __init__(self, connection: aiohttp.ClientWebSocketResponse) -> None:
        self._connection = connection
        self._number = 0
        self.problems: list[str] = []  # what the console and the network said is wrong

    async def command(self, method: str, **parameters: object) -> dict:
        self._number += 1
        await self._connection.send_json({"id": self._number, "method": method, "params": parameters})
        while True:
            message = json.loads((await self._connection.receive(timeout=30)).data)
            if message.get("id") == self._number:
                assert "error" not in message, message["error"]
                return message["result"]
            self._note(message)

    def _note(self, message: dict) -> None:
        method, parameters = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(str(parameters["exceptionDetails"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.problems.append(parameters["entry"]["text"] + " " + parameters["entry"].get("url", ""))

    async def open(self, url: str, width: int, height: int, *, dark: bool = False) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.command(f"{domain}.enable")
        await self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.command("Emulation.setEmulatedMedia", features=[scheme])
        await self.command("Page.navigate", url=url)
        await self.wait("document.readyState === 'complete'")

    async def evaluate(self, script: str) -> object:
        """Return the value of an expression."""
        found = await self.command("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def wait(self, script: str, seconds: float = 20.0) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + seconds
        while not await self.evaluate(f"Boolean({script})"):
            assert time.monotonic() < deadline, f"never: {script}\n{await self.evaluate('document.body.innerText')}"

    async def text(self, selector: str) -> str:
        return str(await self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    async def click(self, selector: str) -> None:
        """Click in the middle of an element, as a person would: what covers it gets the click."""
        place = await self.evaluate(
            f"(() => {{ const b = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
            " return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        assert isinstance(place, list)
        for kind in ("mousePressed", "mouseReleased"):
            await self.command(
                "Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1
            )

    async def type(self, text: str) -> None:
        await self.command("Input.insertText", text=text)

    async def press_enter(self) -> None:
        for kind in ("keyDown", "keyUp"):
            await self.command(
                "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r"
            )

    async def screenshot(self, path: Path) -> None:
        found = await self.command("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def chromium():
    """Start the browser; gives the port of its protocol. Skips where there is none."""
    if PROGRAM is None:
        pytest.skip("there is no chromium here (apt-get install chromium)")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"]
        process = subprocess.Popen(
            [PROGRAM, *options, f"--remote-debugging-port={port}", f"--user-data-dir={folder}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            _wait_for(port, process)
            yield port
        finally:
            process.terminate()
            process.wait(20)
            shutil.rmtree(folder, ignore_errors=True)
            Path(folder).mkdir(exist_ok=True)


def _wait_for(port: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/version", timeout=5):
                return
        except OSError:
            assert process.poll() is None, "chromium ended"
            assert time.monotonic() < deadline, "chromium does not start"
            time.sleep(0.1)


async def new_page(session: aiohttp.ClientSession, port: int) -> Page:
    """Open a tab."""
    async with session.put(f"http://127.0.0.1:{port}/json/new?about:blank") as response:
        target = json.loads(await response.text())
    return Page(await session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0))
