"""The OpenAPI document is true: every route and field is in it, and requests made from it meet no defect."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import jsonschema_rs
import pytest
from api_server import fake_server
from fake_engine import FakeSession, answer
from test_api_app import HI, get, post
from test_api_tools import CALLS, NATIVE, WEATHER, FakeModel

from orchestrator.api.access import OPEN_ROUTES
from orchestrator.api.app import create_app
from orchestrator.api.endpoint import Endpoint
from orchestrator.api.openapi import openapi_document
from orchestrator.api.openapi_schemas import COMPONENTS
from orchestrator.api.responses import IGNORED_FIELDS as RESPONSE_IGNORED
from orchestrator.api.responses import RESPONSE_FIELDS
from orchestrator.api.schema import CHAT_FIELDS, COMPLETION_FIELDS, IGNORED_FIELDS, ModelNames

DOCUMENT = openapi_document("1", with_keys=True)


def operations():
    return {(method, path) for path, entry in DOCUMENT["paths"].items() for method in entry}


def test_every_route_is_in_it_and_nothing_else():
    routes = {
        (route.method.lower(), route.resource.canonical)
        for route in create_app(Endpoint(ModelNames("m"))).router.routes()
        if route.method != "HEAD"
    }
    assert operations() == routes


def test_the_open_routes_are_those_without_a_key():
    is_open = {path for path, entry in DOCUMENT["paths"].items() if next(iter(entry.values())).get("security") == []}
    assert is_open == OPEN_ROUTES
    assert "security" not in openapi_document("1", with_keys=False)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("ChatRequest", CHAT_FIELDS | IGNORED_FIELDS),
        ("CompletionRequest", COMPLETION_FIELDS | IGNORED_FIELDS),
        ("ResponseRequest", RESPONSE_FIELDS - RESPONSE_IGNORED),
    ],
)
def test_every_field_is_in_it(name, fields):
    assert set(COMPONENTS[name]["properties"]) == fields


def test_every_reference_leads_somewhere_and_every_schema_is_used():
    used = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(DOCUMENT)))
    assert used == set(COMPONENTS)
    for schema in COMPONENTS.values():
        jsonschema_rs.meta.validate({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema})


def holds(name, value):
    schema = {"components": {"schemas": COMPONENTS}, "$ref": f"#/components/schemas/{name}"}
    jsonschema_rs.validate(schema, value)


def test_real_bodies_hold_their_schemas():
    session = FakeSession(script=answer([*CALLS.encode()]), n_ctx=4096)
    with fake_server(session, FakeModel(NATIVE)) as (url, _):
        body = {"messages": HI, "tools": [WEATHER], "logprobs": True, "seed": 3, "stop": ["x"], "n": 2, "user": "me"}
        holds("ChatRequest", body)
        holds("ChatAnswer", json.loads(post(url, body)[1]))
        for line in post(url, {**body, "stream": True, "stream_options": {"include_usage": True}})[1].splitlines():
            if line.startswith("data: {"):
                holds("ChatChunk", json.loads(line[6:]))
        holds(
            "CompletionAnswer",
            json.loads(post(url, {"prompt": "x", "max_tokens": 2, "logprobs": 1}, "/v1/completions")[1]),
        )
        holds("Response", json.loads(post(url, {"input": "x"}, "/v1/responses")[1]))
        for path, name in (
            ("/v1/models", "ModelList"),
            ("/v1/models/fake", "Model"),
            ("/health", "Health"),
            ("/slots", "Slots"),
            ("/props", "Properties"),
            ("/openapi.json", "Document"),
        ):
            holds(name, get(url, path)[1])
        holds("Tokens", json.loads(post(url, {"content": "x"}, "/tokenize")[1]))
        holds("Text", json.loads(post(url, {"tokens": [1]}, "/detokenize")[1]))
        for path, wrong in (("/v1/chat/completions", {}), ("/v1/completions", {"prompt": 5}), ("/tokenize", [])):
            holds("Error", json.loads(post(url, wrong, path)[1]))
        holds("Error", get(url, "/nowhere")[1])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_requests_made_from_the_document_meet_no_defect():
    session = FakeSession(n_ctx=4096, script=answer([*b"Hello"]))
    with fake_server(session) as (url, gateway):
        checks = "not_a_server_error,content_type_conformance,response_schema_conformance,status_code_conformance"
        options = (
            "--max-examples=20 --phases=examples,coverage,fuzzing --request-timeout=30 --generation-deterministic"
        )
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", f"--checks={checks}"]
        done = subprocess.run(
            [*command, *options.split(), "--no-color"],
            capture_output=True,
            text=True,
            timeout=560,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        assert gateway.state().running is None
        assert post(url, {"messages": HI})[0] == 200
