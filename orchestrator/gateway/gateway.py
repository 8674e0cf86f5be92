"""Answer requests, one at a time, with one model: the queue, the decode loop and its state for people to see.

One thread of its own runs the decode loop, because the engine's calls block; whoever submits a request gets a
:class:`Generation` and reads its events from another thread or from an event loop. Requests are served in the order
in which they came. An error ends the request that met it and nothing else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Listed
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Protocol

from orchestrator.errors import ContextLengthError, EngineError, LinkcppError, RequestError
from orchestrator.gateway.generation import Generation
from orchestrator.gateway.scheduler import Step, next_step, reusable_prefix
from orchestrator.gateway.sequence import (
    Failed,
    Finished,
    FinishReason,
    GenerationRequest,
    Sequence,
    Timings,
    Vocabulary,
)
from orchestrator.types import FloatArray

logger = logging.getLogger(__name__)

IDLE_SECONDS: Final = 1.0
"""How often the workers are looked at while no request runs."""

MAX_WAITING: Final = 256
"""Requests that may wait; one more is refused with HTTP 429, because each holds a connection and a prompt."""


class DecodeSession(Protocol):
    """The part of an engine session that the decode loop uses."""

    @property
    def position(self) -> int:
        """Number of tokens in the KV cache."""

    @property
    def n_ctx(self) -> int:
        """Number of tokens that the KV cache can hold."""

    def decode(self, tokens: Listed[int], *, all_logits: bool = False) -> FloatArray:
        """Append tokens and return the logits of the last one as [1, n_vocab]."""

    def truncate(self, position: int) -> bool:
        """Forget all tokens from ``position`` on; False, and nothing forgotten, where the memory cannot be cut."""

    def clear(self) -> None:
        """Forget all tokens."""


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """The request that is being answered; ``tokens_per_second`` counts generated tokens after the first."""

    identifier: str
    phase: str  # prefill, decode
    prompt_tokens: int
    generated_tokens: int
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class GatewayState:
    """What a gateway did and does; the totals count since its start."""

    running: RunningRequest | None
    waiting: int
    finished: int
    failed: int
    cancelled: int
    prompt_tokens: int  # computed, so without those that were still in the cache
    generated_tokens: int
    problem: str  # the last request's error; empty after a request that went well


class _Running:
    """A request that has been admitted, with the moments that its timings are made of."""

    def __init__(self, generation: Generation, sequence: Sequence, admitted: float) -> None:
        self.generation = generation
        self.sequence = sequence
        self.admitted = admitted
        self.first_token: float | None = None


class Gateway:
    """A model that answers requests.

    ``chunk`` is the number of prompt tokens per step (the micro-batch size). ``can_truncate``: the KV cache can be
    cut at any position (not so for hybrid models). ``reuse_prefix``: keep what a new prompt has in common with the
    last request; leave it off where a token's logits depend on how tokens were grouped. ``idle`` is called by the
    decode thread about once a second while no request runs. ``now`` is a clock in seconds.

    Use it as a context manager, or call :meth:`start` and :meth:`close`; :meth:`step` may also be called by hand.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        session: DecodeSession,
        *,
        n_vocab: int,
        chunk: int,
        can_truncate: bool = True,
        reuse_prefix: bool = True,
        idle: Callable[[], None] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.n_ctx = session.n_ctx
        self.n_vocab = n_vocab
        self._vocabulary = vocabulary
        self._session = session
        self._chunk = chunk
        self._can_truncate = can_truncate
        self._reuse_prefix = reuse_prefix
        self._idle = idle
        self._now = now
        self._held: list[int] = []  # the tokens in the KV cache
        self._running: _Running | None = None
        self._waiting: deque[Generation] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._finished = self._failed = self._cancelled = 0
        self._prompt_tokens = self._generated_tokens = 0
        self._problem = ""

    # --- from any thread ---------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> Generation:
        """Queue a request and return its generation at once.

        Raises :class:`ContextLengthError` for a prompt longer than the context and :class:`RequestError` for one
        that cannot be decoded, for a full queue (status 429) and while closing (503).
        """
        self._check(request)
        generation = Generation(request, self._now())
        with self._wake:
            if self._closing:
                raise _closing_error()
            if len(self._waiting) >= MAX_WAITING:
                raise RequestError(
                    f"{MAX_WAITING} requests are waiting already",
                    status=429,
                    code="queue_full",
                    hint="try again later",
                )
            self._waiting.append(generation)
            self._wake.notify_all()
        return generation

    def state(self) -> GatewayState:
        """Return what the gateway does at this moment."""
        with self._wake:
            running = self._running
            return GatewayState(
                running=None if running is None else self._describe(running),
                waiting=sum(not generation.cancelled for generation in self._waiting),
                finished=self._finished,
                failed=self._failed,
                cancelled=self._cancelled,
                prompt_tokens=self._prompt_tokens,
                generated_tokens=self._generated_tokens,
                problem=self._problem,
            )

    def start(self) -> None:
        """Start the decode thread."""
        self._thread = threading.Thread(target=self._loop, name="decode", daemon=True)
        self._thread.start()

    def close(self, timeout: float = 10.0) -> bool:
        """End all requests with an error and the decode thread; return False if a step outlasts ``timeout`` seconds.

        The session belongs to the caller. It must not be closed while a step still runs in it.
        """
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join(timeout)
        stopped = self._thread is None or not self._thread.is_alive()
        self._fail_all(_closing_error())  # whatever the thread does: no reader waits for ever
        return stopped

    def __enter__(self) -> Gateway:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- the decode thread -------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Advance the oldest request by one step of the engine; return False when there is no request.

        A step is a chunk of the prompt, or the newest token. The engine appends it to the KV cache; the logits of a
        prompt's last token, and of each later one, choose the next token, whose text goes to the client. A client
        that has left is noticed between two steps. An error ends the request, and the KV cache is as before the step.
        """
        running = self._running or self._admit()
        if running is None:
            return False
        try:
            if running.generation.cancelled:
                self._finish(running, "cancelled")
                return True
            if running.sequence.decoded == 0:
                self._reuse_cache(running.sequence)
            step = next_step(running.sequence, self._chunk)
            logits = self._session.decode(step.tokens)
            self._note_decoded(running.sequence, step)
            if step.samples:
                self._sample(running, logits[-1])
        except LinkcppError as error:
            self._fail(running, error)
        # A defect of ours must not end the loop: the requests behind this one are not at fault.
        except Exception as error:
            logger.exception("request %s met a defect", running.generation.request.identifier)
            self._fail(running, EngineError(f"the gateway failed unexpectedly: {type(error).__name__}: {error}"))
        return True

    def _loop(self) -> None:
        while not self._closing:
            if not self.step():
                self._rest()

    def _rest(self) -> None:
        """Wait for a request; look at the workers when none comes."""
        with self._wake:
            if not self._waiting and not self._closing:
                self._wake.wait(IDLE_SECONDS)
            if self._waiting or self._closing or self._idle is None:
                return
        try:
            self._idle()
        except LinkcppError as error:
            logger.warning("%s", error)

    def _admit(self) -> _Running | None:
        """Take the request that has waited longest and is still wanted."""
        with self._wake:
            while self._waiting:
                generation = self._waiting.popleft()
                if generation.cancelled:
                    self._cancelled += 1
                    continue
                sequence = Sequence(generation.request, self._vocabulary, self.n_ctx)
                self._running = _Running(generation, sequence, self._now())
                return self._running
        return None

    def _reuse_cache(self, sequence: Sequence) -> None:
        """Cut the KV cache down to what the new prompt begins with."""
        keep = 0
        if self._reuse_prefix and self._session.position == len(self._held):
            keep = reusable_prefix(self._held, sequence.tokens, can_truncate=self._can_truncate)
        if keep == 0:
            self._session.clear()
        elif keep < len(self._held) and not self._session.truncate(keep):
            self._session.clear()
            keep = 0
        del self._held[keep:]
        sequence.decoded = sequence.cached = keep

    def _note_decoded(self, sequence: Sequence, step: Step) -> None:
        self._held.extend(step.tokens)
        sequence.decoded += len(step.tokens)
        with self._wake:
            self._prompt_tokens += max(0, min(sequence.decoded, len(sequence.request.prompt)) - step.start)

    def _sample(self, running: _Running, logits: FloatArray) -> None:
        """Choose the next token, deliver its text, and end the request if it was the last one."""
        delta = running.sequence.accept(logits)
        with self._wake:
            self._generated_tokens += 1
            if running.first_token is None:
                running.first_token = self._now()
        if delta.text or delta.tokens:
            running.generation.deliver(delta)
        if running.sequence.finish_reason is not None:
            self._finish(running, running.sequence.finish_reason)

    def _finish(self, running: _Running, reason: FinishReason) -> None:
        with self._wake:
            self._running = None
            if reason == "cancelled":
                self._cancelled += 1
            else:
                self._finished += 1
                self._problem = ""
        running.generation.deliver(Finished(reason, running.sequence.usage, self._timings(running)))

    def _fail(self, running: _Running, error: LinkcppError) -> None:
        with self._wake:
            self._running = None
            self._failed += 1
            self._problem = str(error)
        running.generation.deliver(Failed(error))

    def _fail_all(self, error: LinkcppError) -> None:
        if self._running is not None:
            self._fail(self._running, error)
        with self._wake:
            waiting = list(self._waiting)
            self._waiting.clear()
        for generation in waiting:
            generation.deliver(Failed(error))

    # --- values ------------------------------------------------------------------------------------------------

    def _check(self, request: GenerationRequest) -> None:
        if not request.prompt:
            raise RequestError("the prompt is empty", param="prompt")
        if len(request.prompt) > self.n_ctx:
            raise ContextLengthError(len(request.prompt), self.n_ctx)
        biased = tuple(token for token, _ in request.sampling.logit_bias)
        for what, tokens in (("prompt", request.prompt), ("logit_bias", biased)):
            if tokens and not (min(tokens) >= 0 and max(tokens) < self.n_vocab):
                raise RequestError(f"{what} holds a token id outside 0 to {self.n_vocab - 1}", param=what)

    def _describe(self, running: _Running) -> RunningRequest:
        sequence = running.sequence
        return RunningRequest(
            identifier=running.generation.request.identifier,
            phase="prefill" if running.first_token is None else "decode",
            prompt_tokens=len(sequence.request.prompt),
            generated_tokens=sequence.generated,
            tokens_per_second=_rate(sequence.generated - 1, self._timings(running).decode),
        )

    def _timings(self, running: _Running) -> Timings:
        now = self._now()
        first = running.first_token if running.first_token is not None else now
        return Timings(
            queued=running.admitted - running.generation.submitted,
            prefill=first - running.admitted,
            decode=now - first,
        )


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 and count > 0 else 0.0


def _closing_error() -> RequestError:
    return RequestError("the server is shutting down", status=503, code="shutting_down")
