"""One line of JSON for each request and each warning, with the id of the request that it belongs to."""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Final

from aiohttp import web

from orchestrator.gateway.sequence import Timings, Usage

access_logger = logging.getLogger("linkcpp.access")


@dataclass(slots=True)
class RequestNotes:
    """What is known of the request at hand; ``client`` is whom it comes from, ``answer`` the id of its answer."""

    identifier: str = ""
    client: str = ""
    answer: str = ""
    usage: Usage | None = None
    timings: Timings | None = None
    failure: str = ""


_NOTES: ContextVar[RequestNotes | None] = ContextVar("request_notes", default=None)

_GOOD_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,80}")


def notes() -> RequestNotes:
    """Return the notes on the request that this code works for; empty ones outside of requests."""
    return _NOTES.get() or RequestNotes()


@contextmanager
def taking_notes(identifier: str) -> Iterator[RequestNotes]:
    """Begin the notes on a request."""
    fresh = RequestNotes(identifier)
    token = _NOTES.set(fresh)
    try:
        yield fresh
    finally:
        _NOTES.reset(token)


def request_id_of(request: web.Request) -> str:
    """Return the id that a client gave its request, or a new one."""
    given = request.headers.get("X-Request-Id", "")
    return given if _GOOD_ID.fullmatch(given) else "req-" + secrets.token_hex(8)


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON; fields beyond the message stand in ``record.fields``."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if notes().identifier:
            fields["request_id"] = notes().identifier
        fields.update(getattr(record, "fields", {}))
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False, default=str)


def log_request(request: web.Request, status: int, seconds: float) -> None:
    """Write the line of a request that has ended."""
    known = notes()
    fields: dict[str, object] = {
        "method": request.method,
        "path": request.path,
        "status": status,
        "seconds": round(seconds, 4),
        "client": known.client,
    }
    if known.answer:
        fields["answer"] = known.answer
    if known.usage is not None:
        fields["prompt_tokens"] = known.usage.prompt_tokens
        fields["cached_tokens"] = known.usage.cached_tokens
        fields["completion_tokens"] = known.usage.completion_tokens
    if known.timings is not None:
        fields["queued"] = round(known.timings.queued, 4)
        fields["prefill"] = round(known.timings.prefill, 4)
        fields["decode"] = round(known.timings.decode, 4)
    if known.failure:
        fields["error"] = known.failure
    access_logger.info("%s %s %d", request.method, request.path, status, extra={"fields": fields})
