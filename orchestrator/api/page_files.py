"""The files of the page, as they lie beside this module."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Final

from aiohttp import web

from orchestrator.errors import RequestError

KINDS: Final = {
    "index.html": "text/html",
    "app.js": "text/javascript",
    "style.css": "text/css",
    "icon.svg": "image/svg+xml",
}

# Everything comes from this server, and nothing may frame the page.
POLICY: Final = "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'"


async def index(_request: web.Request) -> web.StreamResponse:
    """Return the page."""
    return _response("index.html")


async def page_file(request: web.Request) -> web.StreamResponse:
    """Return a file of the page."""
    name = request.match_info["name"]
    if name not in KINDS:
        raise RequestError(f"there is no {request.path}", status=404, code="not_found")
    return _response(name)


def _response(name: str) -> web.Response:
    headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}
    return web.Response(body=_read(name), content_type=KINDS[name], charset="utf-8", headers=headers)


@cache
def _read(name: str) -> bytes:
    return files("orchestrator.api").joinpath("page", name).read_bytes()
