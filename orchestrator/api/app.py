"""The HTTP endpoint: the OpenAI API for one model, readiness and status.

This is the skin: parsing is in :mod:`orchestrator.api.schema`, the shape of answers in
:mod:`orchestrator.api.stream`, the shape of errors in :mod:`orchestrator.api.failures`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol

from aiohttp import web

from orchestrator.api.failures import error_body, status_of
from orchestrator.api.schema import GenerationOptions, ModelNames, parse_chat_request, parse_completion_request
from orchestrator.api.stream import DONE, AnswerForm, AnswerHead, ChatForm, CompletionForm, encode_event
from orchestrator.errors import ChatTemplateError, EngineError, LinkcppError, RequestError
from orchestrator.gateway.gateway import Gateway
from orchestrator.gateway.generation import Generation
from orchestrator.gateway.report import FleetReport
from orchestrator.gateway.sequence import Finished, GenerationRequest, TextDelta, TokenRecord
from orchestrator.gateway.template import ChatTemplate

logger = logging.getLogger(__name__)

MAX_BODY: Final = 16 << 20
OBSERVE_SECONDS: Final = 1.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Tokenizer(Protocol):
    """The part of a model that turns text into tokens."""

    @property
    def bos(self) -> int:
        """The token that begins a text, negative where there is none."""

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return the tokens of a text."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that is ready.

    ``template`` may be the reason why there is no chat. ``fingerprint`` names the engine's build.
    """

    gateway: Gateway
    tokenizer: Tokenizer
    template: ChatTemplate | ChatTemplateError
    report: FleetReport
    fingerprint: str


class Endpoint:
    """What the routes share; ``served`` stays None while the model loads, and ``problem`` says why."""

    def __init__(self, names: ModelNames) -> None:
        self.names = names
        self.created = int(time.time())
        self.served: ServedModel | None = None
        self.problem = "the model is still loading"

    def ready(self) -> ServedModel:
        """Return the model; raise :class:`RequestError` (503) with the reason when there is none yet."""
        if self.served is None:
            raise RequestError(self.problem, status=503, code="not_ready", hint="ask /health")
        return self.served


def create_app(endpoint: Endpoint) -> web.Application:
    """Make the aiohttp application of an endpoint."""
    app = web.Application(middlewares=[_answer_errors], client_max_size=MAX_BODY)
    routes = _Routes(endpoint)
    app.router.add_post("/v1/chat/completions", routes.chat)
    app.router.add_post("/v1/completions", routes.complete)
    app.router.add_get("/v1/models", routes.models)
    app.router.add_get("/v1/models/{name:.+}", routes.model)
    app.router.add_get("/health", routes.health)
    app.router.add_get("/status", routes.status)
    app.cleanup_ctx.append(routes.observe)
    return app


class _Routes:
    """One method per route."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await _json(request)
        served = self._endpoint.ready()
        parsed = parse_chat_request(body, self._endpoint.names, secrets.randbits(63))
        template = served.template
        if isinstance(template, ChatTemplateError):
            raise template
        prompt = template.render(parsed.messages, parsed.variables)
        # A template that writes the begin token itself must not get a second one from the tokenizer.
        add_special = not (template.bos and prompt.startswith(template.bos))
        tokens = _tokenize(served.tokenizer, prompt, add_special=add_special, parse_special=True)
        head = self._head("chatcmpl-", served)
        options = parsed.options
        form = ChatForm(head, logprobs=options.top_logprobs is not None, include_usage=options.include_usage)
        return await _answer(request, served, _generation_request(tokens, options, head), form, options.stream)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await _json(request)
        served = self._endpoint.ready()
        parsed = parse_completion_request(body, self._endpoint.names, secrets.randbits(63))
        tokens = parsed.prompt
        if isinstance(tokens, str):
            tokens = _tokenize(served.tokenizer, tokens, add_special=True, parse_special=True)
        if not tokens and served.tokenizer.bos >= 0:
            tokens = (served.tokenizer.bos,)  # an empty prompt: any text
        head = self._head("cmpl-", served)
        options = parsed.options
        form = CompletionForm(head, logprobs=options.top_logprobs is not None, include_usage=options.include_usage)
        return await _answer(request, served, _generation_request(tokens, options, head), form, options.stream)

    async def models(self, _request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [self._model_body()]})

    async def model(self, request: web.Request) -> web.StreamResponse:
        self._endpoint.names.check(request.match_info["name"])
        return web.json_response(self._model_body())

    async def health(self, _request: web.Request) -> web.StreamResponse:
        served = self._endpoint.served
        problem = self._endpoint.problem if served is None else served.report.problem()
        if problem:
            return web.json_response({"status": "unavailable", "reason": problem}, status=503)
        return web.json_response({"status": "ok"})

    async def status(self, _request: web.Request) -> web.StreamResponse:
        return web.json_response(self._endpoint.ready().report.snapshot().to_json())

    async def observe(self, _app: web.Application) -> AsyncIterator[None]:
        """Look at the counters each second while the application runs, so that rates have a past."""

        async def look() -> None:
            while True:
                if self._endpoint.served is not None:
                    self._endpoint.served.report.observe()
                await asyncio.sleep(OBSERVE_SECONDS)

        task = asyncio.create_task(look())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    def _model_body(self) -> dict[str, object]:
        body: dict[str, object] = {
            "id": self._endpoint.names.name,
            "object": "model",
            "created": self._endpoint.created,
            "owned_by": "linkcpp",
        }
        if self._endpoint.served is not None:
            body["context_length"] = self._endpoint.served.gateway.n_ctx
        return body

    def _head(self, prefix: str, served: ServedModel) -> AnswerHead:
        return AnswerHead(
            prefix + secrets.token_hex(12), int(time.time()), self._endpoint.names.name, served.fingerprint
        )


async def _answer(
    request: web.Request, served: ServedModel, wanted: GenerationRequest, form: AnswerForm, stream: bool
) -> web.StreamResponse:
    """Run a request and send its answer, whole or as a stream; a client that leaves ends it."""
    generation = served.gateway.submit(wanted)
    try:
        if stream:
            return await _send_stream(request, generation, form)
        return await _send_whole(generation, form)
    finally:
        generation.cancel()


async def _send_whole(generation: Generation, form: AnswerForm) -> web.StreamResponse:
    texts: list[str] = []
    tokens: list[TokenRecord] = []
    async for event in generation:
        if isinstance(event, Finished):
            return web.json_response(form.whole("".join(texts), tokens, event.reason, event.usage))
        texts.append(event.text)
        tokens.extend(event.tokens)
    raise EngineError("the answer ended without an end")


async def _send_stream(request: web.Request, generation: Generation, form: AnswerForm) -> web.StreamResponse:
    events = aiter(generation)
    event: TextDelta | Finished | None = await anext(events)  # an error here still has a status of its own
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    )
    await response.prepare(request)
    # A client may leave at any write; there is nobody left to tell then, and the caller cancels the generation.
    with suppress(ConnectionResetError):
        for body in form.opening():
            await response.write(encode_event(body))
        try:
            while event is not None:
                if isinstance(event, Finished):
                    for body in form.closing(event.reason, event.usage):
                        await response.write(encode_event(body))
                    await response.write(DONE)
                else:
                    await response.write(encode_event(form.delta(event)))
                event = await anext(events, None)
        except LinkcppError as error:
            logger.warning("the request failed while its answer was streaming: %s", error)
            await response.write(encode_event(error_body(error)))
        await response.write_eof()
    return response


def _generation_request(tokens: tuple[int, ...], options: GenerationOptions, head: AnswerHead) -> GenerationRequest:
    return GenerationRequest(
        prompt=tokens,
        max_tokens=options.max_tokens,
        sampling=options.sampling,
        stop=options.stop,
        top_logprobs=options.top_logprobs,
        ignore_end=options.ignore_end,
        identifier=head.identifier,
    )


def _tokenize(tokenizer: Tokenizer, text: str, *, add_special: bool, parse_special: bool) -> tuple[int, ...]:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can carry half of a surrogate pair
        raise RequestError("the prompt is not valid Unicode text", code="invalid_value") from error
    return tuple(tokenizer.tokenize(text, add_special=add_special, parse_special=parse_special))


async def _json(request: web.Request) -> object:
    try:
        value: object = json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise RequestError("the request body is not JSON", code="invalid_json") from error
    return value


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every error into the form that clients of the API read."""
    try:
        return await handler(request)
    except LinkcppError as error:
        status = status_of(error)
        if status >= 500:
            logger.warning("%s %s: %s", request.method, request.path, error)
        headers = {"Retry-After": "1"} if status in (429, 503) else None
        return web.json_response(error_body(error), status=status, headers=headers)
    except web.HTTPException as error:
        reason = f"{request.method} {request.path}: {error.reason}"
        failure = RequestError(reason, status=error.status, code=error.reason.lower().replace(" ", "_"))
        return web.json_response(error_body(failure), status=error.status)
    # A defect of ours: say so in the API's form and keep serving.
    except Exception as error:
        logger.exception("%s %s met a defect", request.method, request.path)
        failure = RequestError(f"the server failed unexpectedly: {type(error).__name__}", status=500, code="defect")
        return web.json_response(error_body(failure), status=500)
