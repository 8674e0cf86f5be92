"""Decide what the engine computes next and for whom. PURE: a step is a value, made here and carried out elsewhere.

*Continuous batching*: a step holds tokens of all live answers, one of each, and beside them chunks of the prompts
that are not computed yet, so that a long prompt delays nobody for longer than a step. Requests wait in a queue that
is fair among clients until a slot is free; a slot is one sequence of the backend. Several steps may be under way:
then an answer's next token is in none of them, but several chunks of one prompt may be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

import numpy as np

from orchestrator.gateway.backend import BackendFacts, Invariance
from orchestrator.gateway.cost import StepCost
from orchestrator.gateway.prefix import Holding, Placement, Saved, least_recent_beyond, place
from orchestrator.gateway.queue import FairQueue
from orchestrator.gateway.sequence import Sequence as Answer
from orchestrator.ring.steps import TokenBatch

STEP_SECONDS: Final = 0.4
"""How long the prompts' part of a step should take at most: a client who leaves frees its slot within a second."""

FEWEST_ROWS: Final = 8
"""Rows of a prompt's chunk that are worth a step on the slowest machine: experts are read for each step anew."""

Owner = TypeVar("Owner")


@dataclass(frozen=True, slots=True)
class Terms:
    """On what terms a request is served.

    ``client`` is whom the queue is fair to, ``session`` a conversation that should stay where it was. ``timeout`` is
    the time from submission to the end of the answer, in seconds.
    """

    client: str = ""
    session: str = ""
    timeout: float | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """How much may wait, and how many bytes of saved beginnings the backend may keep."""

    waiting: int = 256
    waiting_per_client: int = 128
    saved_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens to append to one slot's sequence; the logits of the last ``outputs`` of them are wanted.

    The last ``drafts`` of them are guesses: what follows the newest token of an answer if they turn out right.
    """

    slot: int
    start: int
    tokens: tuple[int, ...]
    outputs: int
    drafts: int = 0

    @property
    def sure(self) -> int:
        """Number of tokens that are no guesses."""
        return len(self.tokens) - self.drafts

    @property
    def draft(self) -> tuple[int, ...]:
        """The guesses."""
        return self.tokens[self.sure :]


@dataclass(frozen=True, slots=True)
class Step:
    """What the engine computes in one call: segments of different slots, ascending."""

    segments: tuple[Segment, ...]

    @property
    def rows(self) -> int:
        """Number of tokens."""
        return sum(len(segment.tokens) for segment in self.segments)

    def batch(self) -> TokenBatch:
        """Return the step as the engine takes it."""
        lengths = [len(segment.tokens) for segment in self.segments]
        outputs = [i >= len(s.tokens) - s.outputs for s in self.segments for i in range(len(s.tokens))]
        return TokenBatch(
            np.array([token for segment in self.segments for token in segment.tokens], np.int32),
            np.concatenate([np.arange(s.start, s.start + len(s.tokens), dtype=np.int32) for s in self.segments]),
            np.repeat(np.array([segment.slot for segment in self.segments], np.int32), lengths),
            np.array(outputs, np.bool_),
        )


class Job(Generic[Owner]):
    """A request on its way: its answer so far, its slot, and how many of its tokens are computed or on their way."""

    def __init__(self, answer: Answer, terms: Terms, owner: Owner, now: float) -> None:
        self.answer = answer
        self.terms = terms
        self.owner = owner
        self.submitted = now
        self.admitted: float | None = None
        self.first_token: float | None = None
        self.deadline = None if terms.timeout is None else now + terms.timeout
        self.slot: int | None = None
        self.sent = 0  # tokens that the cache holds once all steps under way have ended
        self.flying = 0  # steps under way that carry tokens of it
        self.served = 0  # number of the last step that did
        self.partition: list[int] = []  # lengths of the segments that made the cache
        self.stalled = False  # a step came to nothing, and others that rely on it have not ended
        self.ended = False

    @property
    def unsent(self) -> int:
        """Number of tokens that wait for a step."""
        return len(self.answer.tokens) - self.sent

    @property
    def is_prefill(self) -> bool:
        """Tell whether tokens of the prompt are still to be sent."""
        return self.sent < len(self.answer.request.prompt)


@dataclass(slots=True)
class _Slot(Generic[Owner]):
    """One sequence of the backend: whose it is, or what it still holds of the last one."""

    job: Job[Owner] | None = None
    tokens: list[int] = field(default_factory=list)
    used_at: int = 0

    def holding(self) -> Holding:
        if self.job is None:
            return Holding(self.tokens, True, self.used_at)
        return Holding(self.job.answer.tokens[: self.job.sent], False, self.used_at)


@dataclass(frozen=True, slots=True)
class Landing(Generic[Owner]):
    """A step that has ended, with its requests; ``seconds`` is its own time, without the wait for the one before."""

    step: Step
    jobs: tuple[Job[Owner], ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class _Flight(Generic[Owner]):
    """A step under way, and when its turn began."""

    step: Step
    jobs: tuple[Job[Owner], ...]  # of its segments
    begun: float


class Scheduler(Generic[Owner]):
    """Queue, slots and steps of one backend."""

    def __init__(self, facts: BackendFacts, limits: Limits, *, reuse: bool = True) -> None:
        self.facts = facts
        self.limits = limits
        self.cost = StepCost()
        self.saved: dict[int, Saved] = {}
        self._reuse = reuse and facts.invariance is not Invariance.NONE
        self._queue: FairQueue[Job[Owner]] = FairQueue(limits.waiting, limits.waiting_per_client)
        self._slots: list[_Slot[Owner]] = [_Slot() for _ in range(facts.n_sequences)]
        self._flights: dict[int, _Flight[Owner]] = {}
        self._clock = 0  # counts steps and uses of slots
        self._landed_at = 0.0
        self._service: float | None = None  # mean seconds that a request keeps its slot
        self._last_key = 0

    # --- what there is ---------------------------------------------------------------------------------------

    @property
    def live(self) -> list[Job[Owner]]:
        """The requests that have a slot, by slot."""
        return [slot.job for slot in self._slots if slot.job is not None]

    @property
    def waiting(self) -> list[Job[Owner]]:
        """The requests that wait for one."""
        return list(self._queue)

    @property
    def is_flying(self) -> bool:
        """Tell whether a step is under way."""
        return bool(self._flights)

    @property
    def holdings(self) -> list[Holding]:
        """What each slot holds."""
        return [slot.holding() for slot in self._slots]

    def jobs_of(self, ticket: int) -> tuple[Job[Owner], ...]:
        """Return whose tokens a step under way carries."""
        return self._flights[ticket].jobs

    @property
    def tickets(self) -> list[int]:
        """The steps under way, oldest first."""
        return list(self._flights)

    # --- requests come and go --------------------------------------------------------------------------------

    def enqueue(self, job: Job[Owner]) -> None:
        """Let a request wait; raises :class:`orchestrator.errors.BusyError` where too many do."""
        request = job.answer.request
        work = len(request.prompt) + (request.max_tokens or 256)
        self._queue.push(job, job.terms.client, work, self.retry_after())

    def retry_after(self) -> float:
        """Return in how many seconds there is probably room in the queue: when the next answer is complete."""
        return max(1.0, (self._service or 0.0) / len(self._slots))

    def admit(self, now: float) -> tuple[Job[Owner], Placement] | None:
        """Give the next request a free slot; None where nobody waits or no slot is free.

        The slot's cache must then be made to hold the first ``keep`` tokens of the prompt; then call :meth:`placed`.
        """
        if all(slot.job is not None for slot in self._slots):
            return None
        job = self._queue.pop()
        if job is None:
            return None
        placement = place(
            job.answer.tokens,
            self.holdings,
            tuple(self.saved.values()),
            cuttable=self.facts.cuttable,
            reuse=self._reuse,
            can_save=self.limits.saved_bytes > 0,
        )
        slot = self._slots[placement.slot]
        slot.job, slot.used_at = job, self._tick()
        if placement.copy_from is not None:
            self._slots[placement.copy_from].used_at = self._clock
        job.slot, job.admitted = placement.slot, now
        return job, placement

    def placed(self, job: Job[Owner], keep: int) -> None:
        """Note that the slot's cache now holds exactly the first ``keep`` tokens of the request's prompt."""
        job.sent = job.answer.decoded = job.answer.cached = keep
        job.partition = [keep] if keep else []

    def release(self, job: Job[Owner], now: float) -> None:
        """End a request: it leaves the queue, or its slot once no step under way carries its tokens."""
        job.ended = True
        if job.slot is None:
            self._queue.remove(job)
        elif not job.flying:
            self._vacate(job)
        if job.admitted is not None and job.first_token is not None:
            seconds = now - job.admitted
            self._service = seconds if self._service is None else 0.9 * self._service + 0.1 * seconds

    def _vacate(self, job: Job[Owner]) -> None:
        if job.slot is None or self._slots[job.slot].job is not job:
            return
        slot = self._slots[job.slot]
        slot.job, slot.tokens, slot.used_at = None, job.answer.tokens[: job.sent], self._tick()

    # --- steps -----------------------------------------------------------------------------------------------

    def next_step(self) -> Step | None:
        """Return what to send to the engine now; None where all wait for results, or enough is under way."""
        if len(self._flights) >= self.facts.in_flight:
            return None
        live = [job for job in self.live if not job.ended and not job.stalled]
        return plan_step(live, self.facts, self._prompt_rows())

    def jobs_in(self, step: Step) -> tuple[Job[Owner], ...]:
        """Return whose tokens a step carries, by its segments."""
        owners = {job.slot: job for job in self.live}
        return tuple(owners[segment.slot] for segment in step.segments)

    def launched(self, step: Step, jobs: tuple[Job[Owner], ...], ticket: int, now: float) -> None:
        """Note that a step is under way."""
        number = self._tick()
        for segment, job in zip(step.segments, jobs, strict=True):
            job.sent += segment.sure
            job.answer.drafted += segment.drafts
            job.flying += 1
            job.served = number
        self._flights[ticket] = _Flight(step, jobs, now)

    def landed(self, ticket: int, now: float, resume: Mapping[int, int] | None = None) -> Landing[Owner]:
        """Note the end of a step and return it with its requests.

        ``resume`` is None for a good end, else the positions up to which the caches of the slots are good. Guesses
        count for nothing until they are confirmed.
        """
        flight = self._flights.pop(ticket)
        for segment, job in zip(flight.step.segments, flight.jobs, strict=True):
            job.flying -= 1
            if resume is None:
                job.answer.decoded = max(job.answer.decoded, segment.start + segment.sure)
                job.partition.append(segment.sure)
            else:
                good = min(resume.get(segment.slot, segment.start), job.sent)
                job.sent = good
                job.answer.decoded = min(job.answer.decoded, good)
                job.answer.cached = min(job.answer.cached, good)
            job.stalled = job.flying > 0 and (job.stalled or resume is not None)
            if job.ended and not job.flying:
                self._vacate(job)
        # With several under way a step waits behind the one before: its own time begins when that one ends.
        seconds = max(0.0, now - max(flight.begun, self._landed_at))
        if resume is None:
            self.cost.observe(flight.step.rows, seconds)
        self._landed_at = now
        return Landing(flight.step, flight.jobs, seconds)

    def confirm(self, job: Job[Owner]) -> None:
        """Note that the token just chosen is the one that was guessed, so that the cache holds it already."""
        job.sent += 1
        job.answer.decoded += 1
        job.answer.accepted += 1
        job.partition[-1] += 1

    def _prompt_rows(self) -> int:
        """Return how many rows of prompts a step may hold.

        So many that they cost no more than the step costs anyway (round trips, weights that are read for one row as
        for many), or :data:`STEP_SECONDS`.
        """
        cost, facts = self.cost, self.facts
        if facts.invariance is Invariance.NONE or not cost.per_row:
            return facts.n_chunk
        rows = max(FEWEST_ROWS, min(facts.n_step, int(max(STEP_SECONDS, cost.fixed) / cost.per_row)))
        return rows if rows < facts.n_chunk else rows // facts.n_chunk * facts.n_chunk

    # --- saved beginnings ------------------------------------------------------------------------------------

    def new_key(self) -> int:
        """Return a number for a copy that is going to be saved."""
        self._last_key += 1
        return self._last_key

    def note_saved(self, key: int, tokens: Sequence[int], n_bytes: int) -> tuple[int, ...]:
        """Remember a copy; return the keys of those that must be dropped to stay within the memory limit."""
        self.saved[key] = Saved(key, list(tokens), n_bytes, self._tick())
        dropped = least_recent_beyond(tuple(self.saved.values()), self.limits.saved_bytes)
        for old in dropped:
            del self.saved[old]
        return dropped

    def note_recalled(self, key: int) -> None:
        """Note that a copy was of use."""
        copy = self.saved[key]
        self.saved[key] = Saved(key, copy.tokens, copy.n_bytes, self._tick())

    def former_tokens(self, index: int) -> list[int]:
        """Return what a slot held when it was given to the request that has it now."""
        return self._slots[index].tokens

    def free_slot(self, index: int) -> list[int] | None:
        """Return what an idle slot holds; None while a request has it."""
        slot = self._slots[index]
        return None if slot.job is not None else slot.tokens

    def note_held(self, index: int, tokens: Iterable[int]) -> None:
        """Note what an idle slot holds now."""
        slot = self._slots[index]
        slot.tokens, slot.used_at = list(tokens), self._tick()

    def forget_caches(self) -> None:
        """Note that the backend has lost all sequences and copies."""
        self.saved.clear()
        for slot in self._slots:
            slot.tokens = []
            if slot.job is not None:
                slot.job.sent = slot.job.answer.decoded = 0

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


def plan_step(jobs: Sequence[Job[Owner]], facts: BackendFacts, prompt_rows: int) -> Step | None:
    """Return the next step for the requests that have slots; None where none has a token to send.

    The newest token of each answer comes first. What is left of the step, at most ``prompt_rows``, goes to prompts in
    equal parts: a short prompt beside a long one is not held up by it. Those that were served least recently go first
    where not all fit.
    """
    ready = sorted((job for job in jobs if job.unsent), key=lambda job: (job.served, job.slot))
    if facts.invariance is not Invariance.SEVERAL:
        ready = ready[:1]
    elif facts.groups > 1:
        ready = ready[: -(-len(jobs) // facts.groups)]
    if not ready:
        return None
    decoding = [job for job in ready if job.unsent == 1][: facts.n_step]
    shares = {id(job): 1 for job in decoding}
    left = min(facts.n_step - len(decoding), prompt_rows)
    prompts = [job for job in ready if job.unsent > 1][:left]
    chosen = sorted([*decoding, *prompts], key=lambda job: job.slot or 0)
    prompts.sort(key=lambda job: job.unsent)
    for index, job in enumerate(prompts):
        shares[id(job)] = min(job.unsent, left // (len(prompts) - index))
        left -= shares[id(job)]
    return Step(tuple(_segment(job, shares[id(job)]) for job in chosen))


def _segment(job: Job[Owner], rows: int) -> Segment:
    tokens = tuple(job.answer.tokens[job.sent : job.sent + rows])
    complete = job.sent + rows == len(job.answer.tokens)
    return Segment(job.slot or 0, job.sent, tokens, outputs=int(complete))


def split_rows(step: Step) -> Iterable[tuple[Segment, slice]]:
    """Yield each segment with the rows of the step's logits that are its own."""
    start = 0
    for segment in step.segments:
        yield segment, slice(start, start + segment.outputs)
        start += segment.outputs
