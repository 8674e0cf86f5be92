"""The HTTP endpoint: its routes, and what happens around every request.

This is the skin: parsing is in :mod:`orchestrator.api.schema`, the shape of answers in
:mod:`orchestrator.api.stream`, the shape of errors in :mod:`orchestrator.api.failures`.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Middleware

from orchestrator.api.access import Handler, add_origin_headers, guard
from orchestrator.api.endpoint import Endpoint
from orchestrator.api.failures import error_body, retry_after, status_of
from orchestrator.api.generating import GeneratingRoutes
from orchestrator.api.informing import InformingRoutes
from orchestrator.api.logs import log_request, notes, request_id_of, taking_notes
from orchestrator.api.openapi import openapi_document
from orchestrator.api.page_files import index, page_file
from orchestrator.errors import LinkcppError, RequestError

logger = logging.getLogger(__name__)

OBSERVE_SECONDS: Final = 1.0


def create_app(endpoint: Endpoint) -> web.Application:
    """Make the aiohttp application of an endpoint."""
    access = endpoint.access
    app = web.Application(
        middlewares=[_log(endpoint), _answer_errors, guard(access)], client_max_size=access.max_body
    )
    generating, informing = GeneratingRoutes(endpoint), InformingRoutes(endpoint)
    app.router.add_post("/v1/chat/completions", generating.chat)
    app.router.add_post("/v1/completions", generating.complete)
    app.router.add_post("/v1/responses", generating.respond)
    app.router.add_post("/v1/embeddings", generating.embed)
    app.router.add_get("/v1/models", informing.models)
    app.router.add_get("/v1/models/{name:.+}", informing.model)
    app.router.add_post("/tokenize", informing.tokenize)
    app.router.add_post("/detokenize", informing.detokenize)
    app.router.add_get("/health", informing.health)
    app.router.add_get("/v1/health", informing.health)
    app.router.add_get("/status", informing.status)
    app.router.add_get("/metrics", informing.metrics)
    app.router.add_get("/props", informing.props)
    app.router.add_get("/slots", informing.slots)
    app.router.add_post(r"/slots/{slot:\d{1,6}}", informing.slot)
    app.router.add_get("/openapi.json", _document_route(endpoint))
    app.router.add_get("/", index)
    app.router.add_get("/page/{name}", page_file)
    app.on_response_prepare.append(_add_request_id)
    app.on_response_prepare.append(add_origin_headers(access))
    app.cleanup_ctx.append(_Observation(endpoint).run)
    return app


def _document_route(endpoint: Endpoint) -> Handler:
    document = openapi_document(_version(), with_keys=bool(endpoint.access.keys))

    async def tell(_request: web.Request) -> web.StreamResponse:
        return web.json_response(document)

    return tell


def _version() -> str:
    try:
        return importlib.metadata.version("linkcpp")
    except importlib.metadata.PackageNotFoundError:  # run from a folder
        return "0"


class _Observation:
    """Looks at the counters each second while the application runs, so that rates have a past."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def run(self, _app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(self._look())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    async def _look(self) -> None:
        while True:
            if self._endpoint.served is not None:
                self._endpoint.served.report.observe()
            await asyncio.sleep(OBSERVE_SECONDS)


def _log(endpoint: Endpoint) -> Middleware:
    """Return the middleware that gives every request an id, and writes and counts its end."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        begun = time.monotonic()
        status = 499  # as web servers log a client that has left
        with taking_notes(request_id_of(request)) as known:
            known.client = request.remote or ""
            try:
                response = await handler(request)
                status = response.status
                if not response.prepared:  # a stream's head has left long ago, with the id in it
                    response.headers["X-Request-Id"] = known.identifier
                return response
            finally:
                resource = request.match_info.route.resource
                endpoint.metrics.note_http("" if resource is None else resource.canonical, status)
                log_request(request, status, time.monotonic() - begun)

    return middleware


async def _add_request_id(_request: web.Request, response: web.StreamResponse) -> None:
    if notes().identifier:
        response.headers["X-Request-Id"] = notes().identifier


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every error into the form that clients of the API read."""
    try:
        return await handler(request)
    except LinkcppError as error:
        status = status_of(error)
        if status >= 500:
            logger.warning("%s %s: %s", request.method, request.path, error)
        notes().failure = str(error)
        seconds = retry_after(error)
        headers = None if seconds is None else {"Retry-After": str(seconds)}
        return web.json_response(error_body(error), status=status, headers=headers)
    except web.HTTPException as error:
        reason = f"{request.method} {request.path}: {error.reason}"
        failure = RequestError(reason, status=error.status, code=error.reason.lower().replace(" ", "_"))
        notes().failure = reason
        allowed = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
        return web.json_response(error_body(failure), status=error.status, headers=allowed)
    # A defect of ours: say so in the API's form and keep serving.
    except Exception as error:
        logger.exception("%s %s met a defect", request.method, request.path)
        failure = RequestError(f"the server failed unexpectedly: {type(error).__name__}", status=500, code="defect")
        notes().failure = str(failure)
        return web.json_response(error_body(failure), status=500)
