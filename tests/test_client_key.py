"""`linkcpp chat --url` and `linkcpp top` bring the key that a server asks for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from fake_engine import FakeSession, answer
from serve_process import environment
from test_api_access import KEYS, endpoint_server

from orchestrator.api.access import Access
from orchestrator.errors import FleetError
from orchestrator.monitor.live import StatusPoller, fetch_snapshot, status_url


def linkcpp(*arguments, key=None):
    variables = {**environment(), **({} if key is None else {"LINKCPP_API_KEY": key})}
    command = [sys.executable, "-m", "orchestrator", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=variables, check=False)


@pytest.fixture(scope="module")
def url():
    assert "LINKCPP_API_KEY" not in os.environ
    with endpoint_server(Access(KEYS), FakeSession(script=answer([*b"Hello"]))) as (url, _):
        yield url


@pytest.mark.parametrize(
    ("option", "variable"),
    [(KEYS[0], None), (None, KEYS[1]), (f" {KEYS[1]} ", "wrong")],
    ids=["option", "variable", "the option counts"],
)
@pytest.mark.parametrize("command", [("chat", "--prompt", "Hi"), ("top", "--once", "--json")], ids=["chat", "top"])
def test_a_key_opens(url, command, option, variable):
    given = () if option is None else ("--api-key", option)
    done = linkcpp(*command, "--url", url, *given, key=variable)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("key", "word"), [(None, "API key"), ("wrong", "API key")])
@pytest.mark.parametrize(("command", "code"), [(("chat", "--prompt", "Hi"), 2), (("top", "--once"), 4)])
def test_who_brings_none_is_told_how(url, command, code, key, word):
    done = linkcpp(*command, "--url", url, key=key)
    assert (done.returncode, word in done.stderr) == (code, True), done.stderr
    assert "hint: give it with --api-key or LINKCPP_API_KEY" in done.stderr


def test_a_key_that_would_end_its_header_is_a_usage_error(url):
    done = linkcpp("top", "--url", url, "--api-key", "a\nX-Header: b")
    assert (done.returncode, "control characters" in done.stderr) == (2, True)


def test_the_monitor_says_what_is_wrong_with_the_key(url):
    with pytest.raises(FleetError, match="asks for an API key"):
        fetch_snapshot(status_url(url))
    with pytest.raises(FleetError, match="does not know this API key"):
        fetch_snapshot(status_url(url), api_key="wrong")
    assert "API key" in StatusPoller(url).poll().problem
