"""What a gateway did and does, as frozen values for people, metrics and the monitor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from orchestrator.gateway.generation import Generation
from orchestrator.gateway.scheduler import Job, Scheduler
from orchestrator.gateway.sequence import Failed, Finished, GenerationRequest, Timings


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """A request that is being answered; ``tokens_per_second`` counts generated tokens after the first."""

    identifier: str
    phase: str  # prefill, decode
    prompt_tokens: int
    generated_tokens: int
    tokens_per_second: float
    cached_tokens: int = 0
    client: str = ""
    session: str = ""


@dataclass(frozen=True, slots=True)
class SlotState:
    """One sequence of the backend: how many tokens its cache holds, and whose request it answers."""

    index: int
    held_tokens: int
    request: RunningRequest | None


@dataclass(frozen=True, slots=True)
class GatewayState:
    """What a gateway did and does; the totals count since its start.

    ``running`` is the request that has been live for the longest. The mean step has ``rows / steps`` tokens of
    ``sequences / steps`` requests. ``drafted`` tokens were guessed and computed, ``accepted`` of them were right; an
    answer got ``generated_tokens / turns`` tokens of a step.
    """

    running: RunningRequest | None
    waiting: int
    finished: int
    failed: int
    cancelled: int
    prompt_tokens: int  # computed, so without those that were still in the cache
    generated_tokens: int
    problem: str  # the last request's error; empty after a request that went well
    slots: tuple[SlotState, ...] = ()
    cached_tokens: int = 0  # of prompts, that were not computed again
    steps: int = 0
    rows: int = 0
    sequences: int = 0
    turns: int = 0
    drafted: int = 0
    accepted: int = 0
    saved: int = 0  # beginnings kept outside the slots, and their bytes
    saved_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StepFigures:
    """One step of the engine: its tokens, and the requests that they belong to."""

    rows: int
    sequences: int


class Observer(Protocol):
    """Whoever counts: called in the thread of the loop, so it must be quick."""

    def step_ended(self, figures: StepFigures) -> None:
        """Note a step that went well."""

    def request_ended(self, request: GenerationRequest, event: Finished | Failed) -> None:
        """Note the end of a request."""


@dataclass(slots=True)
class Totals:
    """The counters behind :class:`GatewayState`."""

    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    steps: int = 0
    rows: int = 0
    sequences: int = 0
    turns: int = 0
    drafted: int = 0
    accepted: int = 0
    problem: str = ""


def describe_request(job: Job[Generation], now: float) -> RunningRequest:
    """Return what there is to say about a live request."""
    generated = job.answer.generated
    seconds = timings(job, now).decode
    return RunningRequest(
        identifier=job.answer.request.identifier,
        phase="prefill" if job.first_token is None else "decode",
        prompt_tokens=len(job.answer.request.prompt),
        generated_tokens=generated,
        tokens_per_second=(generated - 1) / seconds if seconds > 0 and generated > 1 else 0.0,
        cached_tokens=job.answer.cached,
        client=job.terms.client,
        session=job.terms.session,
    )


def describe_slots(scheduler: Scheduler[Generation], now: float) -> tuple[SlotState, ...]:
    """Return the state of every slot; one whose request has ended is free, even while a step of it is under way."""
    requests = {job.slot: describe_request(job, now) for job in scheduler.live if not job.ended}
    return tuple(
        SlotState(index, len(holding.tokens), requests.get(index)) for index, holding in enumerate(scheduler.holdings)
    )


def timings(job: Job[Generation], now: float) -> Timings:
    """Return how long a request has taken so far."""
    admitted = job.admitted if job.admitted is not None else now
    first = job.first_token if job.first_token is not None else now
    return Timings(queued=admitted - job.submitted, prefill=first - admitted, decode=now - first)
