from __future__ import annotations

import asyncio

import pytest
from api_server import fake_server
from fake_engine import FailOnce, FakeSession, answer

from orchestrator.api.client import AnswerPart, chat_url, parse_event, stream_chat
from orchestrator.errors import FleetError, InputError, ProtocolError, RequestError, WorkerLostError
from orchestrator.gateway.template import ChatMessage

HI = [ChatMessage("user", "Hi")]


def ask(url, messages=HI, **parameters):
    async def gather():
        return [part async for part in stream_chat(url, messages, parameters)]

    return asyncio.run(gather())


def test_the_parts_of_an_answer():
    with fake_server(FakeSession(script=answer([*"Grüße".encode()]))) as (url, _):
        parts = ask(url, temperature=0)
    assert "".join(part.text for part in parts) == "Grüße"
    assert [part.finish_reason for part in parts if part.finish_reason] == ["stop"]
    assert parts[-1].completion_tokens == 8
    assert parts[-1].prompt_tokens > 0


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/", "h:1"])
def test_the_url_may_be_written_in_many_ways(url):
    assert chat_url(url) == "http://h:1/v1/chat/completions"


def test_errors_carry_the_words_of_the_server():
    session = FakeSession(n_ctx=64, script=answer([*b"Hello"]))
    with fake_server(session) as (url, _):
        with pytest.raises(RequestError, match="context of 64"):
            ask(url, [ChatMessage("user", "x" * 100)])
        with pytest.raises(RequestError, match="temperature"):
            ask(url, temperature=9)
        session.before_decode = FailOnce(WorkerLostError("gone", worker="w1", layer=2), 1)
        with pytest.raises(FleetError, match="worker w1, layer 2: gone"):
            ask(url)
        session.before_decode = FailOnce(WorkerLostError("gone", worker="w1", layer=2), 6)
        with pytest.raises(FleetError, match="worker w1, layer 2: gone"):
            ask(url)
        assert "".join(part.text for part in ask(url)) == "Hello"


def test_no_server_and_no_url():
    with pytest.raises(FleetError, match="no server at http"):
        ask("http://127.0.0.1:9")
    with pytest.raises(InputError):
        ask("http://[")


@pytest.mark.parametrize("data", [b"{", b"[]", b"{}", b'{"choices": 3}', b'"x"'])
def test_events_that_are_not_of_the_api(data):
    with pytest.raises(ProtocolError):
        parse_event(data)


def test_events():
    assert parse_event(b"[DONE]") is None
    assert parse_event(b'{"choices": [{"delta": {"content": "a"}}]}') == AnswerPart("a")
    with pytest.raises(FleetError, match="oh no"):
        parse_event(b'{"error": {"message": "oh no"}}')
