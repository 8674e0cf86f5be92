"""docs/api.md names what the endpoint has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from orchestrator.api.app import create_app
from orchestrator.api.constraints.schema_values import FORMATS
from orchestrator.api.endpoint import Endpoint
from orchestrator.api.schema import CHAT_FIELDS, COMPLETION_FIELDS, IGNORED_FIELDS, REFUSED_FIELDS, ModelNames
from orchestrator.gateway.gateway import MAX_WAITING
from orchestrator.gateway.sampling import SamplingParameters

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "api.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(CHAT_FIELDS | COMPLETION_FIELDS | IGNORED_FIELDS | REFUSED_FIELDS))
def test_every_field_is_named(name):
    assert f"`{name}`" in PAGE


def test_every_route_is_named():
    routes = {route.resource.canonical for route in create_app(Endpoint(ModelNames("m"))).router.routes()}
    named = set(re.findall(r"`(?:GET|POST) (/[\w/{}.]*)`", PAGE))
    assert routes - {"/v1/models/{name}", "/page/{name}"} == named


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_every_format_is_named(name):
    assert f"`{name}`" in PAGE


def test_the_defaults_are_the_real_ones():
    rows = dict(re.findall(r"^\| `(\w+)` \| (\d+)(?: \(off\))? \|", PAGE, re.MULTILINE))
    assert len(rows) == 8
    assert {name: float(value) for name, value in rows.items()} == {
        name: getattr(SamplingParameters(), name) for name in rows
    }
    assert f"{MAX_WAITING} may wait" in PAGE
