"""Our endpoint against upstream's server: tokens per second of four answers at once, over HTTP, on this machine.

Both load the same file with as many threads, and are asked the same prompts in turn; whoever is not asked sleeps.
Ours is measured twice, because upstream's server does not promise that an answer is independent of its neighbours:
as it serves by default, and without batch invariance.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp

from orchestrator.bench.machine import load_average
from orchestrator.errors import EngineError, FleetError
from orchestrator.models.gguf_writer import Progress
from orchestrator.workers.child import ChildProcess, end_processes

WANTED: Final = 0.9
"""What ours must give, upstream's being 1."""

UPSTREAM: Final = "llama-server"
OURS: Final = "linkcpp"
OURS_FREE: Final = "linkcpp --no-batch-invariant"

_CONTEXT: Final = 1024  # tokens of each slot
_START_SECONDS: Final = 300.0
_TOPICS: Final = ("the sea", "an old clock", "winter", "a long road", "bread", "the moon", "a violin", "maps")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Tokens per second of all answers together, per side and round; from sending to the last byte."""

    model: str
    slots: int
    threads: int
    tokens: int
    rates: Mapping[str, tuple[float, ...]]
    load: tuple[float, float]

    def ratio(self, side: str) -> float:
        """Return a side's tokens per second, upstream's being 1: the median of the rounds."""
        pairs = zip(self.rates[side], self.rates[UPSTREAM], strict=True)
        return statistics.median(ours / theirs for ours, theirs in pairs)

    def to_json(self) -> dict[str, object]:
        """Return the JSON object."""
        return {
            "model": self.model,
            "slots": self.slots,
            "threads": self.threads,
            "tokens": self.tokens,
            "tokens_per_second": {side: [round(rate, 2) for rate in rates] for side, rates in self.rates.items()},
            "ratio": {side: round(self.ratio(side), 4) for side in (OURS, OURS_FREE)},
            "load_average": list(self.load),
        }


def compare_servers(
    path: Path,
    upstream: Path,
    *,
    slots: int = 4,
    threads: int | None = None,
    tokens: int = 64,
    rounds: int = 5,
    progress: Progress | None = None,
) -> Comparison:
    """Start both servers, ask each in turn, the order changing from round to round. ``upstream`` is its program."""
    count = threads or len(os.sched_getaffinity(0))
    before = load_average()
    with ExitStack() as stack:
        urls = {
            UPSTREAM: stack.enter_context(_upstream(upstream, path, slots, count)),
            OURS: stack.enter_context(_ours(path, slots, count)),
            OURS_FREE: stack.enter_context(_ours(path, slots, count, "--no-batch-invariant")),
        }
        rates: dict[str, list[float]] = {side: [] for side in urls}
        for side, url in urls.items():  # untimed
            _ask(url, _prompts(slots, 0), tokens, side)
        for number in range(1, rounds + 1):
            prompts = _prompts(slots, number)
            order = list(urls) if number % 2 else list(reversed(urls))
            for position, side in enumerate(order):
                if progress is not None:
                    done = (number - 1) * len(order) + position
                    progress(done, rounds * len(order), f"round {number} of {rounds}: {side}")
                seconds = _ask(urls[side], prompts, tokens, side)
                rates[side].append(slots * tokens / seconds)
    return Comparison(
        path.stem,
        slots,
        count,
        tokens,
        {side: tuple(found) for side, found in rates.items()},
        (before, load_average()),
    )


def _prompts(slots: int, number: int) -> list[str]:
    """Return prompts that share no beginning with each other or with those of other rounds."""
    return [f"{number}.{slot} A story about {_TOPICS[(number + slot) % len(_TOPICS)]}: once" for slot in range(slots)]


def _ask(url: str, prompts: Sequence[str], tokens: int, side: str) -> float:
    """Stream an answer to each prompt at the same time; return the seconds until the last one's end."""

    async def one(session: aiohttp.ClientSession, prompt: str) -> int:
        body = {
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        counted = 0
        async with session.post(f"{url}/v1/completions", json=body) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise FleetError(f"{side} failed: {event['error']}")
                    counted = (event.get("usage") or {}).get("completion_tokens", counted)
        return counted

    async def every() -> float:
        timeout = aiohttp.ClientTimeout(total=600)
        async with aiohttp.ClientSession(timeout=timeout, read_bufsize=1 << 20) as session:
            begin = time.perf_counter()
            counts = await asyncio.gather(*(one(session, prompt) for prompt in prompts))
            seconds = time.perf_counter() - begin
        if set(counts) != {tokens}:
            raise FleetError(f"{side} gave {counts} tokens instead of {tokens} each")
        return seconds

    try:
        return asyncio.run(every())
    except (aiohttp.ClientError, asyncio.TimeoutError) as error:
        raise FleetError(f"{side} does not answer: {error or type(error).__name__}") from error


@contextmanager
def _ours(path: Path, slots: int, threads: int, *options: str) -> Iterator[str]:
    child = ChildProcess("serve")
    sizes = ["--slots", str(slots), "--ctx", str(_CONTEXT), "--threads", str(threads)]
    try:
        child.start(["serve", str(path), "--unverified", *sizes, "--speculate", "off", *options], "127.0.0.1:0")
        child.wait_ready(time.monotonic() + _START_SECONDS, _START_SECONDS)
        yield f"http://{child.address}"
    finally:
        end_processes([child])
        child.close()


@contextmanager
def _upstream(program: Path, path: Path, slots: int, threads: int) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]  # it takes no port 0
    sizes = ["--parallel", str(slots), "--ctx-size", str(slots * _CONTEXT), "--threads", str(threads)]
    address = ["--host", "127.0.0.1", "--port", str(port)]
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(
            [str(program), "--model", str(path), *sizes, *address], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        ) as process,
    ):
        try:
            url = f"http://127.0.0.1:{port}"
            if not asyncio.run(_is_healthy(url, process)):
                log.seek(0)
                said = log.read().decode(errors="replace").strip().splitlines()[-1:] or ["nothing"]
                raise EngineError(f"{UPSTREAM} did not become ready; it said: {said[0]}")
            yield url
        finally:
            process.terminate()


async def _is_healthy(url: str, process: subprocess.Popen[bytes]) -> bool:
    """Wait until a server says that it is ready; False where it ends or takes too long."""
    deadline = time.monotonic() + _START_SECONDS
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        while time.monotonic() < deadline and process.poll() is None:
            try:
                async with session.get(f"{url}/health") as response:
                    if response.status == 200:
                        return True
            except (aiohttp.ClientError, asyncio.TimeoutError):
                pass
            await asyncio.sleep(0.2)
    return False
