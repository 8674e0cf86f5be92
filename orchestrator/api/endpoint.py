"""What the routes of an endpoint share: the served model, its names, and the conditions of access."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from orchestrator.api.access import Access
from orchestrator.api.answering import AnswersRequests
from orchestrator.api.logs import notes
from orchestrator.api.planning import ChatPlanner, Tokenizer
from orchestrator.api.schema import ModelNames
from orchestrator.api.stream import AnswerHead
from orchestrator.errors import ChatTemplateError, RequestError
from orchestrator.gateway.embedding import Embedder
from orchestrator.gateway.report import FleetReport
from orchestrator.gateway.scheduler import Terms
from orchestrator.gateway.sequence import Failed, Finished, GenerationRequest
from orchestrator.gateway.state import StepFigures
from orchestrator.gateway.template import ChatTemplate
from orchestrator.status.metrics import Metrics

MAX_TIMEOUT = 86400.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that is ready.

    ``template`` and ``planner`` may be the reason why there is no chat. ``fingerprint`` names the engine's build.
    ``slot_folder`` is where slots may be saved, None: nowhere. A model with an ``embedder`` embeds and does no more.
    """

    gateway: AnswersRequests
    tokenizer: Tokenizer
    template: ChatTemplate | ChatTemplateError
    planner: ChatPlanner | ChatTemplateError
    report: FleetReport
    fingerprint: str
    slot_folder: Path | None = None
    embedder: Embedder | None = None

    @classmethod
    def of(
        cls,
        gateway: AnswersRequests,
        tokenizer: Tokenizer,
        template: ChatTemplate | ChatTemplateError,
        report: FleetReport,
        fingerprint: str,
        slot_folder: Path | None = None,
        embedder: Embedder | None = None,
    ) -> ServedModel:
        """Make one, and find out what its chat template makes possible."""
        planner = template if isinstance(template, ChatTemplateError) else ChatPlanner(template, tokenizer)
        return cls(gateway, tokenizer, template, planner, report, fingerprint, slot_folder, embedder)

    def chat(self) -> ChatPlanner:
        """Return the planner of chats; raise :class:`ChatTemplateError` where there is no chat."""
        if isinstance(self.planner, ChatTemplateError):
            raise self.planner
        return self.planner


class StepObserver:
    """Passes the gateway's steps on to the metrics; answers are noted where they are sent."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def step_ended(self, figures: StepFigures) -> None:
        """Note a step that went well."""
        self._metrics.note_step(figures.rows, figures.sequences)

    def request_ended(self, request: GenerationRequest, event: Finished | Failed) -> None:
        """Do nothing."""


class Endpoint:
    """What the routes share; ``served`` stays None while the model loads, and ``problem`` says why."""

    def __init__(
        self,
        names: ModelNames,
        access: Access | None = None,
        metrics: Metrics | None = None,
        request_timeout: float | None = None,
    ) -> None:
        self.names = names
        self.access = access or Access()
        self.metrics = metrics or Metrics()
        self.created = int(time.time())
        self.served: ServedModel | None = None
        self.problem = "the model is still loading"
        self._request_timeout = request_timeout

    def ready(self) -> ServedModel:
        """Return the model; raise :class:`RequestError` (503) with the reason when there is none yet."""
        if self.served is None:
            raise RequestError(self.problem, status=503, code="not_ready", hint="ask /health")
        return self.served

    def ready_to_continue(self) -> ServedModel:
        """Return the model; raise :class:`RequestError` for one that does not continue texts, or is not there yet."""
        served = self.ready()
        if served.embedder is not None:
            raise RequestError(
                f"{self.names.name!r} makes embeddings and continues no text",
                code="unsupported_operation",
                hint="use /v1/embeddings",
            )
        return served

    def head(self, prefix: str, served: ServedModel) -> AnswerHead:
        """Return a new answer's head, and note its id for the log."""
        head = AnswerHead(prefix + secrets.token_hex(12), int(time.time()), self.names.name, served.fingerprint)
        notes().answer = head.identifier
        return head

    def terms(self, request: web.Request, session: str) -> Terms:
        """Return on what terms a request is served.

        A conversation stays where its cache is by the header ``X-Session-Id`` or ``session``, its
        ``prompt_cache_key``. ``X-Request-Timeout`` (seconds) can shorten the server's own limit.
        """
        timeout = self._request_timeout
        wanted = request.headers.get("X-Request-Timeout")
        if wanted is not None:
            seconds = _seconds(wanted)
            timeout = seconds if timeout is None else min(timeout, seconds)
        return Terms(notes().client, request.headers.get("X-Session-Id", session), timeout)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= MAX_TIMEOUT:
        raise RequestError(
            f"the header X-Request-Timeout must be a number of seconds up to {MAX_TIMEOUT:g}", code="invalid_value"
        )
    return seconds


async def read_json(request: web.Request) -> object:
    """Return a request's body; raise :class:`RequestError` where it is not JSON."""
    try:
        value: object = json.loads(await request.read(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError("the request body is not JSON", code="invalid_json") from error
    return value


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")
