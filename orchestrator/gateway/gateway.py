"""Answer requests with one backend: the loop that carries out what the scheduler decides.

One thread of its own runs the loop, because the engine's calls block; whoever submits a request gets a
:class:`Generation` and reads its events from another thread or from an event loop. An error ends the requests whose
tokens were in the step that met it, and nothing else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, TypeAlias

from orchestrator.errors import (
    ContextLengthError,
    DeadlineError,
    EngineError,
    LinkcppError,
    RequestError,
    StepDroppedError,
)
from orchestrator.gateway import sessions
from orchestrator.gateway.backend import Backend
from orchestrator.gateway.generation import Generation
from orchestrator.gateway.prefix import Placement
from orchestrator.gateway.scheduler import Job, Limits, Scheduler, Segment, Terms, split_rows
from orchestrator.gateway.sequence import Failed, Finished, FinishReason, GenerationRequest, Sequence, Vocabulary
from orchestrator.gateway.speculation import Speculation
from orchestrator.gateway.state import (
    GatewayState,
    Observer,
    StepFigures,
    Totals,
    describe_request,
    describe_slots,
    timings,
)
from orchestrator.ring.steps import Copy, Remove
from orchestrator.types import FloatArray

logger = logging.getLogger(__name__)

IDLE_SECONDS: Final = 1.0
"""How often the workers are looked at while no request runs."""

MAX_WAITING: Final = 256
"""Requests that may wait; one more is refused with HTTP 429, because each holds a connection and a prompt."""

DEFAULT_LIMITS: Final = Limits(waiting=MAX_WAITING)
DEFAULT_TERMS: Final = Terms()

_Job: TypeAlias = Job[Generation]


class Gateway:
    """A model that answers requests, as many at a time as its backend has sequences.

    ``reuse_prefix``: do not compute again what a prompt has in common with what the caches hold; leave it off where
    a token's logits depend on how tokens were grouped. ``limits`` bounds the queue, and the memory of what was saved
    when slots were given to others. ``identity`` names model and engine: a state on disk is restored only where it is
    the same. ``speculation`` guesses tokens, for a backend that can check them; it is closed with the loop. ``now``
    is a clock in seconds.

    Use it as a context manager, or call :meth:`start` and :meth:`close`; :meth:`step` may also be called by hand.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        backend: Backend,
        *,
        reuse_prefix: bool = True,
        limits: Limits = DEFAULT_LIMITS,
        identity: str = "",
        observer: Observer | None = None,
        speculation: Speculation | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.facts = backend.facts
        self.n_ctx = backend.facts.n_ctx
        self.n_vocab = backend.facts.n_vocab
        self.cuttable = backend.facts.cuttable
        self.speculation = speculation
        self.identity = identity
        self._vocabulary = vocabulary
        self._backend = backend
        self._scheduler: Scheduler[Generation] = Scheduler(backend.facts, limits, reuse=reuse_prefix)
        self._observer = observer
        self._now = now
        self._wake = threading.Condition(threading.RLock())  # guards the scheduler and the totals
        self._calls: deque[Callable[[], None]] = deque()  # what other threads want done in this one
        self._closing = False
        self._thread: threading.Thread | None = None
        self._totals = Totals()

    # --- from any thread ---------------------------------------------------------------------------------------

    def submit(
        self, request: GenerationRequest, terms: Terms = DEFAULT_TERMS, generation: Generation | None = None
    ) -> Generation:
        """Queue a request and return its generation at once: the one given, which was made for it, or a new one.

        Raises :class:`ContextLengthError` for a prompt longer than the context, :class:`RequestError` for one that
        cannot be decoded and while closing (503), :class:`BusyError` (429) where too many requests wait.
        """
        self._check(request)
        answer = Sequence(request, self._vocabulary, self.n_ctx)
        generation = generation or Generation(request, self._now())
        with self._wake:
            if self._closing:
                raise _closing_error()
            self._scheduler.enqueue(Job(answer, terms, generation, generation.submitted))
            self._wake.notify_all()
        return generation

    def state(self) -> GatewayState:
        """Return what the gateway does at this moment."""
        now = self._now()
        with self._wake:
            live = sorted((job for job in self._scheduler.live if not job.ended), key=lambda job: job.admitted or 0.0)
            return GatewayState(
                running=describe_request(live[0], now) if live else None,
                slots=describe_slots(self._scheduler, now),
                waiting=sum(not job.owner.cancelled for job in self._scheduler.waiting),
                saved=len(self._scheduler.saved),
                saved_bytes=sum(copy.n_bytes for copy in self._scheduler.saved.values()),
                **asdict(self._totals),
            )

    def holdings(self) -> list[list[int]]:
        """Return the tokens that each slot's cache holds: what a router needs for affinity."""
        with self._wake:
            return [list(holding.tokens) for holding in self._scheduler.holdings]

    def load(self) -> tuple[int, int]:
        """Return how many requests are live or waiting, and how many slots there are."""
        with self._wake:
            return len(self._scheduler.live) + len(self._scheduler.waiting), self._backend.facts.n_sequences

    def save_slot(self, slot: int, path: Path) -> sessions.SessionFile:
        """Write what an idle slot holds to a file; raises :class:`RequestError` where that is not possible."""
        return self._in_loop(lambda: self._save_slot(slot, path))

    def restore_slot(self, slot: int, path: Path) -> sessions.SessionFile:
        """Put a saved file's tokens and state into an idle slot, for the next prompt that begins with them.

        Raises :class:`InputError` for a file that is damaged or from another model or engine.
        """
        return self._in_loop(lambda: self._restore_slot(slot, path))

    def erase_slot(self, slot: int) -> int:
        """Forget what an idle slot holds; return how many tokens that were."""
        return self._in_loop(lambda: self._erase_slot(slot))

    def between_steps(self, call: Callable[[], sessions.Result]) -> sessions.Result:
        """Run a call in the thread of the loop, where nothing else uses the backend, and return what it returns."""
        return self._in_loop(call)

    def start(self) -> None:
        """Start the thread of the loop."""
        self._thread = threading.Thread(target=self._loop, name="decode", daemon=True)
        self._thread.start()

    def close(self, timeout: float = 10.0) -> bool:
        """End all requests with an error and the loop; return False if a step outlasts ``timeout`` seconds.

        The backend belongs to the caller. It must not be closed while a step still runs in it.
        """
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join(timeout)
        stopped = self._thread is None or not self._thread.is_alive()
        if stopped and self.speculation is not None:
            self.speculation.close()
        with self._wake:
            for job in [*self._scheduler.live, *self._scheduler.waiting]:  # whatever the thread does: nobody waits
                self._fail(job, _closing_error())
        return stopped

    def __enter__(self) -> Gateway:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- the loop ----------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Advance every answer by one step of the engine; return False when there is nothing to do.

        Requests whose client has left or whose time is over end, and their slots are free. Waiting requests, fairly
        among clients, take the free slots; what the caches have in common with their prompts is kept. Steps are
        sent, as many as may be under way: each holds the newest token of every answer, and chunks of the prompts.
        The oldest one's logits choose the next tokens, whose text goes to the clients.
        """
        ended = self._end_unwanted()
        self._fill_slots()
        self._send_steps()
        return self._take_result() or ended

    def _loop(self) -> None:
        while not self._closing:
            while self._calls:
                self._calls.popleft()()
            if not self.step():
                self._rest()

    def _rest(self) -> None:
        """Wait for a request; look at the workers when none comes."""
        with self._wake:
            if not self._has_work():
                self._wake.wait(IDLE_SECONDS)
            if self._has_work():
                return
        try:
            self._backend.check()
        except LinkcppError as error:
            logger.warning("%s", error)

    def _has_work(self) -> bool:
        return bool(self._closing or self._calls or self._scheduler.waiting or self._scheduler.live)

    def _end_unwanted(self) -> bool:
        now = self._now()
        ended = False
        for job in [*self._scheduler.live, *self._scheduler.waiting]:
            if job.ended:
                continue
            if job.owner.cancelled:
                self._finish(job, "cancelled")
                ended = True
            elif job.deadline is not None and now >= job.deadline:
                self._fail(job, DeadlineError(job.terms.timeout or 0.0))
                ended = True
        if ended:
            for ticket in self._scheduler.tickets:
                if all(job.ended for job in self._scheduler.jobs_of(ticket)):
                    self._backend.cancel(ticket)
        return ended

    def _fill_slots(self) -> None:
        while True:
            with self._wake:
                admitted = self._scheduler.admit(self._now())
            if admitted is None:
                return
            job, placement = admitted
            try:
                keep = self._prepare_cache(placement)
            except LinkcppError as error:
                self._fail(job, error)
                continue
            with self._wake:
                self._scheduler.placed(job, keep)
                self._totals.cached_tokens += keep

    def _send_steps(self) -> None:
        while True:
            with self._wake:
                step = self._scheduler.next_step()
                if step is None:
                    return
                jobs = self._scheduler.jobs_in(step)
            if self.speculation is not None:
                step = self.speculation.extend(step, jobs)
            begun = self._now()
            try:
                ticket = self._backend.submit(step.batch(), partial(self._is_wanted, jobs))
            except LinkcppError as error:
                for job in jobs:
                    self._fail(job, error)
                continue
            with self._wake:
                self._scheduler.launched(step, jobs, ticket, begun)

    def _take_result(self) -> bool:
        """Wait for the oldest step and give every answer its token; False where none is under way."""
        if not self._scheduler.is_flying:
            return False
        try:
            result = self._backend.collect()
        except LinkcppError as error:
            self._lose_all(error)
            return True
        now = self._now()
        with self._wake:
            landing = self._scheduler.landed(result.ticket, now, None if result.error is None else result.resume)
            self._scheduler.facts = self._backend.facts  # how many steps pay may have changed
        step, jobs = landing.step, landing.jobs
        if result.error is not None:
            if self.speculation is not None:
                self.speculation.dropped(step)
            # A step that was dropped is no fault of those who still want it: their tokens are sent again.
            if not isinstance(result.error, StepDroppedError):
                for job in jobs:
                    self._fail(job, result.error)
            return True
        self._note_step(step.rows, len(jobs))
        for (segment, rows), job in zip(split_rows(step), jobs, strict=True):
            prompt = min(segment.start + segment.sure, len(job.answer.request.prompt)) - segment.start
            self._totals.prompt_tokens += max(0, prompt)
            if segment.outputs and result.logits is not None:
                self._follow(job, segment, result.logits[rows])
        if self.speculation is not None:
            self.speculation.learn(step, jobs, landing.seconds, result.hidden)
        return True

    def _follow(self, job: _Job, segment: Segment, logits: FloatArray) -> None:
        """Choose tokens as long as the logits [1 + guesses, n_vocab] are of use; cut wrong guesses off the cache."""
        right = 0
        self._totals.turns += not job.ended
        for row, guess in zip(logits, (*segment.draft, None), strict=True):
            if job.ended or not self._sample(job, row, guess):
                break
            right += 1
        self._totals.drafted += segment.drafts
        self._totals.accepted += right
        if right < segment.drafts:
            try:
                self._backend.apply(Remove(segment.slot, segment.start + segment.sure + right))
            except LinkcppError as error:
                self._fail(job, error)

    def _sample(self, job: _Job, logits: FloatArray, guess: int | None) -> bool:
        """Choose the next token, deliver its text, and end the request if it was the last one.

        Return whether it is the guessed one, so that the logits behind it are those of this answer.
        """
        try:
            with self._wake:
                delta = job.answer.accept(logits)
                self._totals.generated_tokens += 1
                if job.first_token is None:
                    job.first_token = self._now()
                is_guessed = job.answer.tokens[-1] == guess
                if is_guessed:
                    self._scheduler.confirm(job)
        except LinkcppError as error:
            self._fail(job, error)
            return False
        # A defect of ours must not end the loop: the other requests are not at fault.
        except Exception as error:
            logger.exception("request %s met a defect", job.answer.request.identifier)
            self._fail(job, EngineError(f"the gateway failed unexpectedly: {type(error).__name__}: {error}"))
            return False
        if delta.text or delta.tokens:
            job.owner.deliver(delta)
        if job.answer.finish_reason is not None:
            self._finish(job, job.answer.finish_reason)
        return is_guessed

    # --- caches ------------------------------------------------------------------------------------------------

    def _prepare_cache(self, placement: Placement) -> int:
        """Make a slot hold the beginning of its prompt; return how many tokens of it, 0 where the backend refused."""
        backend, slot, keep = self._backend, placement.slot, placement.keep
        if placement.recall is not None:  # first, so that it is not what the rescued one takes the room of
            with self._wake:
                self._scheduler.note_recalled(placement.recall)
        if placement.rescue:
            self._rescue(slot)
        if placement.recall is not None:
            good = backend.recall(slot, placement.recall)
        elif placement.copy_from is not None:
            good = backend.apply(Copy(placement.copy_from, slot))
        else:
            good = True
        if good and keep and backend.apply(Remove(slot, keep)):
            return keep
        backend.apply(Remove(slot))
        return 0

    def _rescue(self, slot: int) -> None:
        """Save what a slot is about to lose, and drop the oldest copies beyond the memory limit."""
        with self._wake:
            tokens, key = self._scheduler.former_tokens(slot), self._scheduler.new_key()
        n_bytes = self._backend.save(slot, key)
        if n_bytes is None:
            return
        with self._wake:
            dropped = self._scheduler.note_saved(key, tokens, n_bytes)
        for old in dropped:
            self._backend.forget(old)

    # --- ends --------------------------------------------------------------------------------------------------

    def _finish(self, job: _Job, reason: FinishReason) -> None:
        now = self._now()
        with self._wake:
            if job.ended:
                return
            self._scheduler.release(job, now)
            if reason == "cancelled":
                self._totals.cancelled += 1
            else:
                self._totals.finished += 1
                self._totals.problem = ""
        self._end(job, Finished(reason, job.answer.usage, timings(job, now)))

    def _fail(self, job: _Job, error: LinkcppError) -> None:
        with self._wake:
            if job.ended:
                return
            self._scheduler.release(job, self._now())
            self._totals.failed += 1
            self._totals.problem = str(error)
        self._end(job, Failed(error))

    def _end(self, job: _Job, event: Finished | Failed) -> None:
        job.owner.deliver(event)
        if self._observer is not None:
            self._observer.request_ended(job.answer.request, event)

    def _lose_all(self, error: LinkcppError) -> None:
        """End everything that is under way: the backend is lost, and with it its caches."""
        with self._wake:
            for ticket in self._scheduler.tickets:
                for job in self._scheduler.landed(ticket, self._now(), {}).jobs:
                    self._fail(job, error)
            self._scheduler.forget_caches()

    # --- slots by hand -----------------------------------------------------------------------------------------

    def _in_loop(self, call: Callable[[], sessions.Result]) -> sessions.Result:
        """Run a call in the thread of the loop, between two steps, and return what it returns."""
        future: Future[sessions.Result] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

        if self._thread is None:
            run()
        else:
            with self._wake:
                if self._closing:
                    raise _closing_error()
                self._calls.append(run)
                self._wake.notify_all()
        return future.result()

    def _idle_tokens(self, slot: int) -> list[int]:
        if not 0 <= slot < self._backend.facts.n_sequences:
            raise RequestError(f"there is no slot {slot}", status=404, code="slot_not_found")
        tokens = self._scheduler.free_slot(slot)
        if tokens is None:
            raise RequestError(f"slot {slot} is answering a request", status=409, code="slot_busy")
        return tokens

    def _save_slot(self, slot: int, path: Path) -> sessions.SessionFile:
        tokens = self._idle_tokens(slot)
        state = self._backend.dump(slot) if tokens else None
        if state is None:
            raise RequestError(f"slot {slot} holds nothing that could be saved", code="slot_empty")
        return sessions.write(path, self.identity, tokens, state)

    def _restore_slot(self, slot: int, path: Path) -> sessions.SessionFile:
        self._idle_tokens(slot)
        file, state = sessions.read(path, self.identity)
        good = len(file.tokens) <= self.n_ctx and self._backend.load(slot, state)
        with self._wake:
            self._scheduler.note_held(slot, file.tokens if good else ())
        if not good:
            raise RequestError(f"{path.name} does not fit into a slot", code="slot_too_small")
        return file

    def _erase_slot(self, slot: int) -> int:
        count = len(self._idle_tokens(slot))
        self._backend.apply(Remove(slot))
        with self._wake:
            self._scheduler.note_held(slot, ())
        return count

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

    def _is_wanted(self, jobs: tuple[_Job, ...]) -> bool:
        """Tell whether anybody still waits for a step; asked while it is computed, in any thread."""
        now = self._now()
        return any(not job.owner.cancelled and (job.deadline is None or now < job.deadline) for job in jobs)

    def _note_step(self, rows: int, sequences: int) -> None:
        with self._wake:
            self._totals.steps += 1
            self._totals.rows += rows
            self._totals.sequences += sequences
        if self._observer is not None:
            self._observer.step_ended(StepFigures(rows, sequences))


def _closing_error() -> RequestError:
    return RequestError("the server is shutting down", status=503, code="shutting_down")
