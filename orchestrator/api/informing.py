"""The routes that tell something: models, readiness, state, tokens."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable
from pathlib import Path

from aiohttp import web

from orchestrator.api.answering import AnswersRequests
from orchestrator.api.endpoint import Endpoint, ServedModel, read_json
from orchestrator.api.fields import Fields, invalid
from orchestrator.api.messages import parse_messages
from orchestrator.api.planning import tokenize
from orchestrator.api.readings import readings
from orchestrator.api.schema import parse_prompts
from orchestrator.errors import ChatTemplateError, InputError, RequestError
from orchestrator.gateway.gateway import Gateway
from orchestrator.gateway.sampling import SamplingParameters
from orchestrator.gateway.state import SlotState
from orchestrator.status.metrics import CONTENT_TYPE, Reading

logger = logging.getLogger(__name__)

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,100}")


class InformingRoutes:
    """One method per route."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        endpoint.metrics.read_from(self._readings)

    async def models(self, _request: web.Request) -> web.StreamResponse:
        """List the one model."""
        return web.json_response({"object": "list", "data": [self._model_body()]})

    async def model(self, request: web.Request) -> web.StreamResponse:
        """Describe the model."""
        self._endpoint.names.check(request.match_info["name"])
        return web.json_response(self._model_body())

    async def health(self, _request: web.Request) -> web.StreamResponse:
        """Tell whether a request can be answered now."""
        served = self._endpoint.served
        problem = self._endpoint.problem if served is None else served.report.problem()
        if problem:
            return web.json_response({"status": "unavailable", "reason": problem}, status=503)
        return web.json_response({"status": "ok"})

    async def status(self, _request: web.Request) -> web.StreamResponse:
        """Return the fleet as it is now."""
        return web.json_response(self._endpoint.ready().report.snapshot().to_json())

    async def metrics(self, _request: web.Request) -> web.StreamResponse:
        """Return what Prometheus reads."""
        return web.Response(body=self._endpoint.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def slots(self, _request: web.Request) -> web.StreamResponse:
        """Return what each sequence of the engine does."""
        gateway = self._endpoint.ready().gateway
        return web.json_response([_slot_body(slot, gateway.n_ctx) for slot in gateway.state().slots])

    async def slot(self, request: web.Request) -> web.StreamResponse:
        """Save, restore or erase what a slot's cache holds."""
        served = self._endpoint.ready()
        action = request.query.get("action", "")
        number = int(request.match_info["slot"])
        gateway = _single(served.gateway)
        if action == "erase":
            return web.json_response(
                {"id_slot": number, "n_erased": await asyncio.to_thread(gateway.erase_slot, number)}
            )
        if action not in ("save", "restore"):
            raise invalid("action", "must be 'save', 'restore' or 'erase'")
        path = _slot_file(served, await read_json(request))
        work = gateway.save_slot if action == "save" else gateway.restore_slot
        try:
            file = await asyncio.to_thread(work, number, path)
        except InputError as error:
            logger.warning("slot %d, %s: %s", number, action, error)
            raise RequestError(f"cannot {action} {path.name!r}: not a file of this model, or none at all") from error
        count = "n_saved" if action == "save" else "n_restored"
        return web.json_response({"id_slot": number, "filename": path.name, count: len(file.tokens)})

    async def props(self, _request: web.Request) -> web.StreamResponse:
        """Describe the server as llama.cpp's does."""
        served = self._endpoint.ready()
        defaults = SamplingParameters()
        template = served.template
        tokenizer = served.tokenizer
        return web.json_response(
            {
                "default_generation_settings": {
                    "n_ctx": served.gateway.n_ctx,
                    "params": {
                        "temperature": defaults.temperature,
                        "top_k": defaults.top_k,
                        "top_p": defaults.top_p,
                        "min_p": defaults.min_p,
                        "repeat_penalty": defaults.repeat_penalty,
                        "repeat_last_n": defaults.repeat_last_n,
                        "presence_penalty": defaults.presence_penalty,
                        "frequency_penalty": defaults.frequency_penalty,
                    },
                },
                "total_slots": len(served.gateway.state().slots),
                "model_alias": self._endpoint.names.name,
                "model_path": self._endpoint.names.name,
                "chat_template": None if isinstance(template, ChatTemplateError) else template.source,
                "bos_token": _name(tokenizer.piece(tokenizer.bos, special=True)) if tokenizer.bos >= 0 else "",
                "modalities": {"vision": False, "audio": False},
                "build_info": served.fingerprint,
            }
        )

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        """Return the tokens of a text (``content`` or ``prompt``) or of a conversation (``messages``)."""
        fields = Fields(await read_json(request))
        served = self._endpoint.ready()
        fields.refuse_unknown(
            {
                "model",
                "content",
                "prompt",
                "messages",
                "add_special",
                "add_special_tokens",
                "parse_special",
                "with_pieces",
            }
        )
        self._endpoint.names.check(fields.text("model"))
        if fields.get("messages") is not None:
            tokens = await asyncio.to_thread(served.chat().tokens, parse_messages(fields))
        else:
            is_plain = fields.get("content") is not None or fields.get("prompt") is None
            text = fields.text("content" if is_plain else "prompt")
            # llama.cpp's server adds no begin token by default, vLLM's does; each is known by its field's name.
            add_special = fields.flag("add_special", default=fields.flag("add_special_tokens", default=not is_plain))
            parse_special = fields.flag("parse_special", default=True)
            tokens = tokenize(served.tokenizer, text, add_special=add_special, parse_special=parse_special)
        body: dict[str, object] = {
            "tokens": list(tokens),
            "count": len(tokens),
            "max_model_len": served.gateway.n_ctx,
        }
        if fields.flag("with_pieces"):
            body["tokens"] = [{"id": token, "piece": _piece(served, token)} for token in tokens]
        return web.json_response(body)

    async def detokenize(self, request: web.Request) -> web.StreamResponse:
        """Return the text of tokens."""
        fields = Fields(await read_json(request))
        served = self._endpoint.ready()
        fields.refuse_unknown({"model", "tokens"})
        self._endpoint.names.check(fields.text("model"))
        tokens = () if fields.get("tokens") in (None, []) else parse_prompts(fields.get("tokens"), "tokens")[0]
        if isinstance(tokens, str) or any(not 0 <= token < served.gateway.n_vocab for token in tokens):
            raise invalid("tokens", f"must be a list of token ids from 0 to {served.gateway.n_vocab - 1}")
        text = _name(b"".join(served.tokenizer.piece(token, special=True) for token in tokens))
        return web.json_response({"content": text, "prompt": text})

    def _model_body(self) -> dict[str, object]:
        body: dict[str, object] = {
            "id": self._endpoint.names.name,
            "object": "model",
            "created": self._endpoint.created,
            "owned_by": "linkcpp",
        }
        if self._endpoint.served is not None:
            body["context_length"] = body["max_model_len"] = self._endpoint.served.gateway.n_ctx
        return body

    def _readings(self) -> Iterable[Reading]:
        served = self._endpoint.served
        yield Reading("ready", "Whether requests can be answered.", served is not None, is_total=False)
        if served is not None:
            yield from readings(served.gateway.state(), served.report.snapshot())


def _slot_body(slot: SlotState, n_ctx: int) -> dict[str, object]:
    body: dict[str, object] = {
        "id": slot.index,
        "n_ctx": n_ctx,
        "is_processing": slot.request is not None,
        "n_held": slot.held_tokens,
    }
    if slot.request is not None:
        body["request"] = {
            "id": slot.request.identifier,
            "phase": slot.request.phase,
            "prompt_tokens": slot.request.prompt_tokens,
            "cached_tokens": slot.request.cached_tokens,
            "generated_tokens": slot.request.generated_tokens,
            "tokens_per_second": slot.request.tokens_per_second,
        }
    return body


def _single(gateway: AnswersRequests) -> Gateway:
    if not isinstance(gateway, Gateway):
        raise RequestError("slots of several replicas cannot be saved", code="unsupported_operation")
    return gateway


def _slot_file(served: ServedModel, body: object) -> Path:
    name = Fields(body).text("filename")
    if served.slot_folder is None:
        raise RequestError(
            "this server saves no slots",
            code="unsupported_operation",
            hint="start it with --slot-save-path",
        )
    if not _FILE_NAME.fullmatch(name):
        raise invalid("filename", "must be a name of letters, digits, '.', '_' and '-', without folders")
    return served.slot_folder / name


def _piece(served: ServedModel, token: int) -> object:
    data = served.tokenizer.piece(token, special=True)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def _name(data: bytes) -> str:
    return data.decode(errors="replace")
