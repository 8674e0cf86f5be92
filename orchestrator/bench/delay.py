"""A way that takes longer: a process that passes a worker's TCP stream on, each byte half a round trip later.

``python -m orchestrator.bench.delay HOST:PORT SECONDS`` prints the address to connect to instead, and ends with its
standard input. It is a process of its own so that its work is nobody else's CPU time.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from orchestrator.errors import EngineError
from orchestrator.transport.base import parse_address

_ROOT = Path(__file__).resolve().parents[2]


class _LateWriter(asyncio.Protocol):
    """One direction: what comes in goes out of the other side after so many seconds."""

    def __init__(self, seconds: float, out: asyncio.Transport | None = None) -> None:
        self._seconds = seconds
        self.out = out
        self.early: list[bytes] = []

    def data_received(self, data: bytes) -> None:
        """Send it on later; timers of the same delay keep their order."""
        asyncio.get_running_loop().call_later(self._seconds, self._write, data)

    def connection_lost(self, _error: Exception | None) -> None:
        """Close the other side, after all that is still under way."""
        asyncio.get_running_loop().call_later(self._seconds, self._close)

    def _write(self, data: bytes) -> None:
        if self.out is None:
            self.early.append(data)
        else:
            self.out.write(data)

    def _close(self) -> None:
        if self.out is not None:
            self.out.close()


class _Entrance(_LateWriter):
    """A connection that was taken: the way to the worker is opened for it."""

    def __init__(self, seconds: float, host: str, port: int) -> None:
        super().__init__(seconds)
        self._target = host, port
        self._opening: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connect to the worker."""
        self._opening = asyncio.ensure_future(self._open(transport))

    async def _open(self, back: asyncio.BaseTransport) -> None:
        loop = asyncio.get_running_loop()
        answer = _LateWriter(self._seconds, back)  # type: ignore[arg-type]
        try:
            transport, _ = await loop.create_connection(lambda: answer, *self._target)
        except OSError:
            back.close()
            return
        self.out = transport
        for data in self.early:
            transport.write(data)
        self.early.clear()


async def _pass_on(target: str, seconds: float) -> None:
    loop = asyncio.get_running_loop()
    address = parse_address(target)
    server = await loop.create_server(lambda: _Entrance(seconds / 2, address.host, address.port), "127.0.0.1", 0)
    sys.stdout.write(f"127.0.0.1:{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


@contextmanager
def delayed(addresses: Sequence[str], seconds: float) -> Iterator[list[str]]:
    """Give addresses that lead to these, with so many seconds added to each round trip."""
    with ExitStack() as stack:
        yield [stack.enter_context(_process(address, seconds)) for address in addresses]


@contextmanager
def _process(address: str, seconds: float) -> Iterator[str]:
    command = [sys.executable, "-m", "orchestrator.bench.delay", address, str(seconds)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT) as process:
        try:
            line = process.stdout.readline().strip() if process.stdout else ""
            if not line:
                raise EngineError("the delaying process did not start")
            yield line
        finally:
            with contextlib.suppress(OSError):
                if process.stdin:
                    process.stdin.close()
            process.terminate()


if __name__ == "__main__":
    asyncio.run(_pass_on(sys.argv[1], float(sys.argv[2])))
