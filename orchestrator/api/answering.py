"""Run the generations of one request and send their answers, whole or as a stream."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from typing import Protocol

from aiohttp import web

from orchestrator.api.failures import error_body
from orchestrator.api.logs import notes
from orchestrator.api.stream import AnswerForm, encode_event
from orchestrator.errors import EngineError, LinkcppError
from orchestrator.gateway.generation import Generation
from orchestrator.gateway.scheduler import Terms
from orchestrator.gateway.sequence import Finished, GenerationRequest, TextDelta, Usage
from orchestrator.gateway.state import GatewayState
from orchestrator.status.metrics import Metrics

logger = logging.getLogger(__name__)

Event = TextDelta | Finished


class AnswersRequests(Protocol):
    """A gateway, or several replicas behind one door."""

    n_ctx: int
    n_vocab: int

    def submit(self, request: GenerationRequest, terms: Terms = ...) -> Generation:
        """Queue a request and return its generation at once."""

    def state(self) -> GatewayState:
        """Return what it does at this moment."""


async def answer(
    request: web.Request,
    gateway: AnswersRequests,
    wanted: Sequence[GenerationRequest],
    terms: Terms,
    form: AnswerForm,
    metrics: Metrics,
    *,
    stream: bool,
) -> web.StreamResponse:
    """Generate and send; a client that leaves ends all of its generations, and so does an error of one of them."""
    generations: list[Generation] = []
    try:
        for one in wanted:
            generations.append(gateway.submit(one, terms))
        async with aclosing(_timed(merged(generations), metrics)) as events:
            if stream:
                return await _send_stream(request, generations, events, form)
            return await _send_whole(generations, events, form)
    finally:
        for generation in generations:
            generation.cancel()


async def merged(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, Event], None]:
    """Yield (number of the generation, event) in the order in which events come; raise the first error."""
    if len(generations) == 1:
        async for event in generations[0]:
            yield 0, event
        return
    queue: asyncio.Queue[tuple[int, Event] | BaseException | None] = asyncio.Queue()

    async def pump(number: int) -> None:
        try:
            async for event in generations[number]:
                queue.put_nowait((number, event))
            queue.put_nowait(None)
        except LinkcppError as error:
            queue.put_nowait(error)

    async with AsyncExitStack() as stack:
        for number in range(len(generations)):
            stack.push_async_callback(_end, asyncio.create_task(pump(number)))
        left = len(generations)
        while left:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield item


async def _timed(
    events: AsyncGenerator[tuple[int, Event], None], metrics: Metrics
) -> AsyncGenerator[tuple[int, Event], None]:
    """Pass events on, and note how long each answer's text took."""
    last: dict[int, float] = {}
    begun = time.monotonic()
    async with aclosing(events):
        async for number, event in events:
            now = time.monotonic()
            if isinstance(event, TextDelta):
                note = metrics.note_next_token if number in last else metrics.note_first_token
                note(now - last.get(number, begun))
                last[number] = now
            else:
                times, usage = event.timings, event.usage
                metrics.note_answer(
                    queued=times.queued,
                    total=times.queued + times.prefill + times.decode,
                    prompt_tokens=usage.prompt_tokens,
                    completion_tokens=usage.completion_tokens,
                )
            yield number, event


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def _send_whole(
    generations: Sequence[Generation],
    events: AsyncGenerator[tuple[int, Event], None],
    form: AnswerForm,
) -> web.StreamResponse:
    ends: list[Finished] = []
    async for number, event in events:
        if isinstance(event, Finished):
            form.ending(number, event)
            ends.append(event)
        else:
            form.delta(number, event)
    if len(ends) < len(generations):
        raise EngineError("the answer ended without an end")
    return web.json_response(form.whole(_note(generations, ends)))


async def _send_stream(
    request: web.Request,
    generations: Sequence[Generation],
    events: AsyncGenerator[tuple[int, Event], None],
    form: AnswerForm,
) -> web.StreamResponse:
    item: tuple[int, Event] | None = await anext(events)  # an error here still has a status of its own
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    )
    await response.prepare(request)
    ends: list[Finished] = []
    # A client may leave at any write; there is nobody left to tell then, and the caller cancels the generations.
    with suppress(ConnectionResetError):
        for body in form.opening():
            await response.write(encode_event(body))
        try:
            while item is not None:
                number, event = item
                if isinstance(event, Finished):
                    ends.append(event)
                    bodies = form.ending(number, event)
                else:
                    bodies = form.delta(number, event)
                for body in bodies:
                    await response.write(encode_event(body))
                item = await anext(events, None)
            for body in form.closing(_note(generations, ends)):
                await response.write(encode_event(body))
            await response.write(form.final)
        except LinkcppError as error:
            logger.warning("the request failed while its answer was streaming: %s", error)
            notes().failure = str(error)
            await response.write(encode_event(error_body(error)))
        await response.write_eof()
    return response


def _note(generations: Sequence[Generation], ends: Sequence[Finished]) -> Usage:
    """Return the counts of all answers, and leave them with the request for its line in the log.

    Answers to one prompt count it once.
    """
    prompts = {generation.request.prompt for generation in generations}
    usage = Usage(
        sum(map(len, prompts)),
        sum(end.usage.completion_tokens for end in ends),
        max((end.usage.cached_tokens for end in ends), default=0) if len(prompts) == 1 else 0,
    )
    notes().usage = usage
    if ends:
        notes().timings = ends[0].timings
    return usage
