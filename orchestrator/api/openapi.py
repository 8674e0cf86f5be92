"""The OpenAPI document of the endpoint, served at ``/openapi.json``. Pure.

A test holds it to the routes and to the fields that the parsers know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from orchestrator.api.openapi_schemas import COMPONENTS, reference

Document = dict[str, object]

_ERRORS: Final = {
    "400": "The request cannot be served as it is.",
    "401": "The API key is missing or wrong.",
    "403": "Pages of this site may not use the server.",
    "404": "There is no such model.",
    "413": "The body is too large.",
    "429": "Too many requests wait; the header Retry-After says when to come again.",
    "500": "The engine failed.",
    "503": "The model is loading, a worker is lost, or the server is shutting down.",
    "504": "The answer took longer than it may.",
}


def openapi_document(version: str, *, with_keys: bool) -> Document:
    """Return the document; ``with_keys``: the server asks for API keys."""
    document: Document = {
        "openapi": "3.1.0",
        "info": {
            "title": "linkcpp",
            "version": version,
            "description": "The OpenAI API for one model, over one process or many machines.",
        },
        "paths": _paths(),
        "components": {"schemas": COMPONENTS},
    }
    if with_keys:
        document["components"] = {
            "schemas": COMPONENTS,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        }
        document["security"] = [{"key": []}]
    return document


def _paths() -> Document:
    return {
        "/v1/chat/completions": {
            "post": _generating("Continue a conversation.", "ChatRequest", "ChatAnswer", "ChatChunk")
        },
        "/v1/completions": {
            "post": _generating("Continue texts.", "CompletionRequest", "CompletionAnswer", "CompletionAnswer")
        },
        "/v1/responses": {
            "post": _generating("Continue a conversation, as text.", "ResponseRequest", "Response", "ResponseEvent")
        },
        "/v1/embeddings": {"post": _operation("Embed texts.", "Embeddings", "EmbeddingRequest", ("404",))},
        "/v1/models": {"get": _operation("List the one model.", "ModelList")},
        "/v1/models/{name}": {
            "get": _operation("Describe the model.", "Model", parameters=[_path_parameter("name")], more=("404",))
        },
        "/tokenize": {"post": _operation("Turn text into tokens.", "Tokens", "TokenizeRequest", ("404",))},
        "/detokenize": {"post": _operation("Turn tokens into text.", "Text", "DetokenizeRequest", ("404",))},
        "/health": {"get": _operation("Tell whether requests can be answered.", "Health", open_to_all=True)},
        "/v1/health": {"get": _operation("Tell whether requests can be answered.", "Health", open_to_all=True)},
        "/status": {"get": _operation("The fleet as it is now.", "Status")},
        "/props": {"get": _operation("Describe the server.", "Properties")},
        "/slots": {"get": _operation("What each sequence of the engine does.", "Slots")},
        "/slots/{slot}": {
            "post": _operation(
                "Save, restore or erase what an idle slot holds.",
                "SlotResult",
                "SlotRequest",
                ("404", "409"),
                parameters=[
                    {**_path_parameter("slot"), "schema": {"type": "integer", "minimum": 0, "maximum": 999999}},
                    {
                        "name": "action",
                        "in": "query",
                        "required": True,
                        "schema": {"enum": ["save", "restore", "erase"]},
                    },
                ],
            )
        },
        "/metrics": {"get": _plain("What Prometheus reads.", "text/plain")},
        "/openapi.json": {"get": _operation("This document.", "Document", open_to_all=True)},
        "/": {"get": _plain("A page to chat and to see the fleet.", "text/html", open_to_all=True)},
        "/page/{name}": {
            "get": {
                **_plain("A file of the page.", "text/css", open_to_all=True),
                "parameters": [_path_parameter("name")],
            }
        },
    }


def _generating(summary: str, body: str, answer: str, event: str) -> Document:
    operation = _operation(summary, answer, body, ("401", "403", "404", "413", "429", "504"))
    responses = operation["responses"]
    if isinstance(responses, dict):
        # Each event's data is the JSON text of one body; an error ends the stream.
        body_schema = {"anyOf": [reference(event), reference("Error")]}
        text = {"type": "string", "contentMediaType": "application/json", "contentSchema": body_schema}
        data = {"anyOf": [text, {"const": "[DONE]"}]}
        responses["200"]["content"]["text/event-stream"] = {
            "schema": {"type": "object", "properties": {"event": {"type": "string"}, "data": data}}
        }
    return operation


def _operation(
    summary: str,
    answer: str | None,
    body: str | None = None,
    more: tuple[str, ...] = (),
    *,
    parameters: list[Document] | None = None,
    open_to_all: bool = False,
) -> Document:
    codes = {"500", "503", *more} if open_to_all else {"400", "401", "403", "413", "500", "503", *more}
    responses: Document = {code: _error(code) for code in sorted(codes)}
    if answer is not None:
        responses["200"] = {"description": "Done.", "content": _json(answer)}
    operation: Document = {"summary": summary, "responses": responses}
    if body is not None:
        operation["requestBody"] = {"required": True, "content": _json(body)}
    if parameters:
        operation["parameters"] = parameters
    if open_to_all:
        operation["security"] = []
    return operation


def _plain(summary: str, kind: str, *, open_to_all: bool = False) -> Document:
    operation: Document = {
        "summary": summary,
        "responses": {
            "200": {"description": "Done.", "content": {kind: {"schema": {"type": "string"}}}},
            "401": _error("401"),
            "404": _error("404"),
        },
    }
    if open_to_all:
        operation["security"] = []
    return operation


def _error(code: str) -> Document:
    description = _ERRORS.get(code, "This server does not do that, or not now.")
    return {"description": description, "content": _json("Error" if code != "503" else "Unavailable")}


def _json(schema: str) -> Mapping[str, object]:
    return {"application/json": {"schema": reference(schema)}}


def _path_parameter(name: str) -> Document:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
