"""Who may ask what: API keys, and which pages of other sites."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Middleware

from orchestrator.api.logs import notes
from orchestrator.errors import RequestError

MAX_BODY: Final = 16 << 20

OPEN_ROUTES: Final = frozenset({"/", "/page/{name}", "/health", "/v1/health", "/openapi.json"})
"""What anybody may read: that the server lives, what it can do, and the page, which asks for a key itself."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_METHODS: Final = "GET, POST, OPTIONS"
_HEADERS: Final = "Authorization, Content-Type, X-Request-Id, X-Session-Id, X-Request-Timeout"


@dataclass(frozen=True, slots=True)
class Access:
    """The conditions of an endpoint.

    ``keys``: one of them must come as bearer token with every request, none: anybody may ask. ``origins``: sites
    whose pages may ask, ``*`` for all; a page that this server sent itself may always. ``max_body`` in bytes.
    """

    keys: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    max_body: int = MAX_BODY

    def allows_origin(self, origin: str) -> bool:
        """Tell whether pages of a site may ask."""
        return "*" in self.origins or origin in self.origins


def guard(access: Access) -> Middleware:
    """Return the middleware that lets requests in."""
    digests = [hashlib.sha256(key.encode()).digest() for key in access.keys]

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        origin = request.headers.get("Origin")
        if origin is not None and request.method != "GET":
            # Browsers ask first (OPTIONS) only for some requests: what they may not read they may not do either.
            _check_origin(request, origin, access)
        if request.method == "OPTIONS":
            return web.Response(status=204)
        resource = request.match_info.route.resource
        if digests and not (resource is not None and resource.canonical in OPEN_ROUTES):
            notes().client = f"key {_key_number(request, digests)}"
        return await handler(request)

    return middleware


def add_origin_headers(access: Access) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """Return the signal handler that lets pages of the allowed sites read answers."""

    async def add(request: web.Request, response: web.StreamResponse) -> None:
        origin = request.headers.get("Origin")
        if origin is None or not access.allows_origin(origin):
            return
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Vary"] = "Origin"
        response.headers["Access-Control-Expose-Headers"] = "X-Request-Id, Retry-After"
        if request.method == "OPTIONS":
            response.headers["Access-Control-Allow-Methods"] = _METHODS
            response.headers["Access-Control-Allow-Headers"] = _HEADERS
            response.headers["Access-Control-Max-Age"] = "600"

    return add


def _check_origin(request: web.Request, origin: str, access: Access) -> None:
    if urlsplit(origin).netloc != request.host and not access.allows_origin(origin):
        raise RequestError(
            f"pages of {origin} may not use this server",
            status=403,
            code="origin_not_allowed",
            hint="start it with --cors-origin",
        )


def _key_number(request: web.Request, digests: list[bytes]) -> int:
    """Return which key a request brings; compare all of them in constant time."""
    kind, _, token = request.headers.get("Authorization", "").partition(" ")
    brought = token.strip() if kind.lower() == "bearer" else request.headers.get("X-Api-Key", "")
    digest = hashlib.sha256(brought.encode("utf-8", "surrogateescape")).digest()
    found = 0
    for number, known in enumerate(digests, 1):
        found = number if hmac.compare_digest(digest, known) else found
    if not found:
        raise RequestError(
            "the API key is missing" if not brought else "the API key is wrong",
            status=401,
            code="invalid_api_key",
            hint="send it as: Authorization: Bearer KEY",
        )
    return found
