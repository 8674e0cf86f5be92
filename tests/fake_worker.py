"""A worker in a thread, without an engine: expert e of layer l makes ``row * (e + 1) + l`` of a row.

It speaks the real protocol over a real link. What it answers to a request can be replaced by a test, so that it
lies, refuses, stays silent, dies or answers late.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from orchestrator.errors import FleetError
from orchestrator.transport.base import Buffer, Link, Listener
from orchestrator.transport.memory import MemoryListener
from orchestrator.types import Contract, EngineIdentity, Ownership, RefusalCode
from orchestrator.wire.connection import Connection
from orchestrator.wire.handshake import agree_version
from orchestrator.wire.messages import (
    SUPPORTED,
    Describe,
    Described,
    Dispatch,
    Goodbye,
    Hello,
    Measure,
    Measured,
    Message,
    Ping,
    Pong,
    Refuse,
    Result,
    Welcome,
)
from orchestrator.wire.state import Role

IDENTITY = EngineIdentity(build="build-1", isa="AVX2 FMA", repack=False)
MODEL = "ab" * 32

Answer: TypeAlias = "Message | Sequence[Buffer] | None"


class DieError(Exception):
    """Raised by a replaced answer: the worker closes the connection without a word."""


def compute(layer: int, expert: int, row: np.ndarray) -> np.ndarray:
    return (row * np.float32(expert + 1) + np.float32(layer)).astype(np.float32)


def honest(request: Dispatch) -> Result:
    """Do what an honest worker does."""
    factors = (request.experts.astype(np.float32) + 1)[:, None]
    repeated = np.repeat(request.rows, request.counts, axis=0)
    values = repeated * factors + np.float32(request.layer)
    if request.contract is Contract.SUM:
        sums = np.zeros_like(request.rows)
        np.add.at(sums, np.repeat(np.arange(len(request.rows)), request.counts), values * request.weights[:, None])
        values = sums
    return Result(request.sequence, compute_us=7, rows=np.ascontiguousarray(values, dtype=np.float32))


class FakeWorker:
    """Serves on a listener until it is closed."""

    def __init__(
        self,
        ownership: Ownership,
        *,
        name: str = "fake",
        listener: Listener | None = None,
        identity: EngineIdentity = IDENTITY,
        model_sha256: str = MODEL,
        versions=SUPPORTED,
        answer: Callable[[Dispatch], Answer] = honest,
        greet: Callable[[Hello], Answer] | None = None,
    ) -> None:
        self.ownership = ownership
        self.name = name
        self.listener = MemoryListener(f"memory:{name}") if listener is None else listener
        self.identity = identity
        self.model_sha256 = model_sha256
        self.versions = versions
        self.answer = answer
        self.greet = greet
        self.described: list[tuple[int, int]] = []
        self.requests: list[Dispatch] = []
        self.goodbyes: list[str] = []
        self.pongs: list[Pong] = []
        self.errors: list[str] = []
        self.links: list[Link] = []
        self.connections = 0
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def connector(self):
        assert isinstance(self.listener, MemoryListener)
        return self.listener.connector()

    def _accept(self) -> None:
        with contextlib.suppress(FleetError):
            while True:
                link = self.listener.accept()
                self.connections += 1
                self.links.append(link)
                self._start(self._serve, link)

    def _serve(self, link: Link) -> None:
        connection = Connection(Role.WORKER, versions=self.versions)
        try:
            while True:
                message = connection.next_message()
                if message is None:
                    connection.received(link.receive_into(connection.receive_buffer()))
                    continue
                if isinstance(message, Goodbye):
                    self.goodbyes.append(message.text)
                    break
                reply = self._reply(message)
                if reply is None:
                    continue
                link.send(reply if isinstance(reply, (list, tuple)) else connection.send(reply))
                if isinstance(reply, Refuse) and isinstance(message, Hello):
                    break
        except FleetError as error:
            self.errors.append(str(error))
        except DieError:
            pass
        finally:
            link.close()

    def _reply(self, message: Message) -> Answer:
        if isinstance(message, Dispatch):
            self.requests.append(message.detached())
            return self.answer(message)
        if isinstance(message, Hello):
            return self.welcome(message) if self.greet is None else self.greet(message)
        if isinstance(message, Describe):
            self.described = [(descriptor.layer, descriptor.call) for descriptor in message.descriptors]
            return Described(message.sequence, len(message.descriptors))
        if isinstance(message, Measure):
            return Measured(message.sequence, ms_at_1=0.5, ms_at_32=2.0)
        if isinstance(message, Ping):
            return Pong(message.sequence, message.nonce)
        if isinstance(message, Pong):
            self.pongs.append(message)
            return None
        raise AssertionError(f"unexpected {message}")

    def welcome(self, hello: Hello) -> Welcome | Refuse:
        version = agree_version(hello, self.versions)
        if isinstance(version, str):
            return Refuse(0, RefusalCode.INCOMPATIBLE, version)
        return Welcome(
            version=version,
            name=self.name,
            pid=4711,
            identity=self.identity,
            model_sha256=self.model_sha256,
            architecture="llama",
            ownership=self.ownership,
            n_threads=1,
        )

    def kill_links(self) -> None:
        """Close every connection, as the death of the process would."""
        links, self.links = self.links, []
        for link in links:
            link.close()

    def close(self) -> None:
        self.listener.close()
        self.kill_links()
        for thread in self._threads:
            thread.join(5)
            assert not thread.is_alive()

    def __enter__(self) -> FakeWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
