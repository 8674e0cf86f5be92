from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from api_server import fake_server, serving
from fake_engine import FailOnce, FakeModel, FakeSession, answer

from orchestrator.api.endpoint import Endpoint
from orchestrator.api.listen import listening
from orchestrator.api.schema import ModelNames
from orchestrator.dispatch.exchange import DispatchStatistics, WorkerStatistics
from orchestrator.errors import InputError, WorkerLostError
from orchestrator.status.snapshot import FleetSnapshot, WorkerState
from orchestrator.transport.base import HostPort
from orchestrator.types import Ownership

HI = [{"role": "user", "content": "Hi"}]
TEXT = "Grüße, 世界 😀 — three\nlines\n"


def post(url, body, path="/v1/chat/completions"):
    """Return (status, body as text)."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, data), timeout=20) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def get(url, path):
    try:
        with urllib.request.urlopen(url + path, timeout=20) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def client(url):
    return openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=20)


def events(text):
    assert text.endswith("\n\n")
    return [line.removeprefix("data: ") for line in text.strip().split("\n\n")]


# --- the official client --------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 5}, {"seed": 6, "top_p": 0.9, "max_tokens": 40}])
def test_the_streamed_text_equals_the_whole_text(options):
    with fake_server() as (url, _):  # random logits: any bytes, also broken UTF-8
        api = client(url)
        options = {"model": "fake", "messages": HI, "max_tokens": 60, **options}
        whole = api.chat.completions.create(**options)
        stream = list(api.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    joined = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert joined == whole.choices[0].message.content
    assert stream[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in stream if c.choices][-1] == whole.choices[0].finish_reason
    assert stream[-1].choices == []
    assert stream[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in stream}) == 1


def test_a_real_text_streams_in_whole_characters():
    with fake_server(FakeSession(script=answer([*TEXT.encode()]))) as (url, _):
        api = client(url)
        stream = list(api.chat.completions.create(model="fake", messages=HI, stream=True))
        whole = api.chat.completions.create(model="fake", messages=HI)
    parts = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(parts) == TEXT == whole.choices[0].message.content
    assert len([part for part in parts if part]) == len(TEXT)  # one character each, none broken
    assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("stop", len(TEXT.encode()) + 1)


def test_stop_strings_across_tokens_by_the_client():
    script = answer([*b"One ", 261, 262, *b" more"])
    with fake_server(FakeSession(script=script)) as (url, _):
        api = client(url)
        whole = api.chat.completions.create(model="fake", messages=HI, stop=["STOP here"])
        stream = list(api.chat.completions.create(model="fake", messages=HI, stop="STOP", stream=True))
    assert whole.choices[0].message.content == "One "
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "One "
    assert stream[-1].choices[0].finish_reason == "stop"


def test_log_probabilities_by_the_client():
    with fake_server() as (url, _):
        api = client(url)
        options = {"model": "fake", "messages": HI, "max_tokens": 20, "logprobs": True, "top_logprobs": 2}
        whole = api.chat.completions.create(**options, temperature=0)
        stream = list(api.chat.completions.create(**options, temperature=0, stream=True))
    content = whole.choices[0].logprobs.content
    assert len(content) == whole.usage.completion_tokens
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in content)  # greedy
    streamed = [entry for c in stream if c.choices[0].logprobs for entry in c.choices[0].logprobs.content]
    assert streamed == content


def test_completions_by_the_client():
    with fake_server() as (url, _):
        api = client(url)
        options = {"model": "fake", "prompt": "Once", "max_tokens": 12, "seed": 3}
        whole = api.completions.create(**options, logprobs=2)
        stream = list(api.completions.create(**options, stream=True))
        tokens = api.completions.create(**{**options, "prompt": [256, *b"Once"]})
        empty = api.completions.create(**{**options, "prompt": ""})
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text == tokens.choices[0].text
    assert len(whole.choices[0].logprobs.token_logprobs) == 12
    assert empty.usage.prompt_tokens == 1


def test_models_by_the_client():
    with fake_server() as (url, _):
        api = client(url)
        assert [model.id for model in api.models.list()] == ["fake"]
        assert api.models.retrieve("fake").id == "fake"
        with pytest.raises(openai.NotFoundError):
            api.models.retrieve("other")
        with pytest.raises(openai.NotFoundError):
            api.chat.completions.create(model="other", messages=HI)


def test_a_conversation_reuses_the_cache():
    with fake_server(FakeSession(script=answer([*b"Hello"]))) as (url, _):
        api = client(url)
        first = api.chat.completions.create(model="fake", messages=HI)
        messages = [*HI, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "More"}]
        second = api.chat.completions.create(model="fake", messages=messages)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens == first.usage.prompt_tokens + len("Hello")


# --- refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_longer_than_the_context(stream):
    with fake_server(FakeSession(n_ctx=64)) as (url, _):
        status, text = post(url, {"messages": [{"role": "user", "content": "x" * 100}], "stream": stream})
        error = json.loads(text)["error"]
        assert (status, error["type"], error["code"]) == (400, "exceed_context_size_error", "context_length_exceeded")
        assert error["n_ctx"] == 64
        assert error["n_prompt_tokens"] > 100
        assert str(error["n_prompt_tokens"]) in error["message"]
        with pytest.raises(openai.BadRequestError):
            client(url).chat.completions.create(model="fake", messages=[{"role": "user", "content": "x" * 100}])


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b"\xff\xfe", 400),
        (b"[" * 100000, 400),
        ({"messages": HI, "tools": [{"type": "function"}]}, 400),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, 400),
        ({"messages": HI, "logit_bias": {"999": 1}}, 400),
        ({"messages": HI, "model": "other"}, 404),
        (b"x" * (17 << 20), 413),
    ],
)
def test_bodies_that_are_refused(body, status):
    with fake_server() as (url, _):
        got, text = post(url, body)
        assert got == status, text
        assert json.loads(text)["error"]["message"]
        assert post(url, {"messages": HI, "max_tokens": 1})[0] == 200


def test_other_paths_and_methods():
    with fake_server() as (url, _):
        assert get(url, "/nowhere")[0] == 404
        status, body = get(url, "/v1/chat/completions")
        assert (status, body["error"]["type"]) == (405, "invalid_request_error")


def test_without_a_chat_template_completions_work():
    with fake_server(model=FakeModel(chat_template=None)) as (url, _):
        status, text = post(url, {"messages": HI})
        assert status == 400
        assert "no chat template" in json.loads(text)["error"]["message"]
        assert post(url, {"prompt": "x", "max_tokens": 2}, "/v1/completions")[0] == 200


def test_a_conversation_that_the_template_refuses():
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('No system role') }}{% endif %}"
    with fake_server(model=FakeModel(source + "{{ messages[0].content }}")) as (url, _):
        status, text = post(url, {"messages": [{"role": "system", "content": "x"}]})
        assert status == 400
        assert "No system role" in json.loads(text)["error"]["message"]
        assert post(url, {"messages": HI, "max_tokens": 2})[0] == 200


# --- errors of workers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_worker_lost_before_the_first_byte(stream):
    session = FakeSession(script=answer([*b"Hello"]))
    session.before_decode = FailOnce(WorkerLostError("connection reset", worker="w1", layer=3), 1)
    with fake_server(session) as (url, _):
        status, text = post(url, {"messages": HI, "stream": stream})
        error = json.loads(text)["error"]
        assert (status, error["worker"], error["layer"], error["code"]) == (503, "w1", 3, "worker_unavailable")
        status, text = post(url, {"messages": HI})
        assert json.loads(text)["choices"][0]["message"]["content"] == "Hello"


def test_a_worker_lost_in_the_middle_of_a_stream():
    session = FakeSession(script=answer([*b"Hello"]))
    with fake_server(session) as (url, _):
        session.before_decode = FailOnce(WorkerLostError("connection reset", worker="w1", layer=3), 5)
        status, text = post(url, {"messages": HI, "stream": True})
        assert status == 200
        parts = events(text)
        assert json.loads(parts[-1])["error"]["worker"] == "w1"
        assert "[DONE]" not in parts
        session.before_decode = FailOnce(WorkerLostError("connection reset", worker="w1", layer=3), 3)
        with pytest.raises(openai.APIError, match="w1, layer 3"):
            list(client(url).chat.completions.create(model="fake", messages=HI, stream=True))
        stream = client(url).chat.completions.create(model="fake", messages=HI, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "Hello"


# --- queue and disconnect -------------------------------------------------------------------------------------


def test_concurrent_requests_are_queued_and_each_is_right():
    session = FakeSession(step_seconds=0.001)
    bodies = [{"prompt": f"prompt {n}", "max_tokens": 10, "seed": n} for n in range(8)]
    with fake_server(session) as (url, _):
        alone = [json.loads(post(url, body, "/v1/completions")[1])["choices"][0]["text"] for body in bodies]
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda body: post(url, body, "/v1/completions"), bodies))
    assert [status for status, _ in answers] == [200] * 8
    assert [json.loads(text)["choices"][0]["text"] for _, text in answers] == alone


def leave(url, body, *, after: bytes):
    """Send a request, wait until the answer holds some bytes, and close the connection."""
    host, port = url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head + data)
        received = b""
        while received.count(b"data: ") < 3 if after else False:
            received += connection.recv(4096)
        time.sleep(0.1)


def wait_until(condition, seconds=3.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("case", ["decode", "prefill", "whole"])
def test_a_client_that_leaves_frees_the_engine(case):
    session = FakeSession(step_seconds=0.02, n_ctx=4096)
    prompt = "x" * 3000 if case == "prefill" else "x"  # 188 chunks of 16
    with fake_server(session) as (url, gateway):
        body = {"prompt": prompt, "max_tokens": 3000, "stream": case != "whole", "ignore_eos": True}
        leave(url, body, after=b"data: " if case == "decode" else b"")
        wait_until(lambda: gateway.state().running is None and gateway.state().cancelled == 1, 5.0)
        calls = len(session.calls)
        time.sleep(0.1)
        assert len(session.calls) == calls
        assert post(url, {"prompt": "y", "max_tokens": 1}, "/v1/completions")[0] == 200


# --- readiness and status -------------------------------------------------------------------------------------


def test_while_loading_requests_get_503_with_the_reason():
    endpoint = Endpoint(ModelNames("fake"))
    with serving(endpoint) as url:
        status, body = get(url, "/health")
        assert (status, body["reason"]) == (503, "the model is still loading")
        status, text = post(url, {"messages": HI})
        assert status == 503
        assert "still loading" in json.loads(text)["error"]["message"]
        assert get(url, "/status")[0] == 503
        assert get(url, "/v1/models")[0] == 200


def worker(connected):
    owned = Ownership.product(range(2, 4), range(8))
    error = None if connected else "connection refused"
    return WorkerStatistics("w1", "127.0.0.1:9", 77, connected, 0.25, 10, 20, 300, 400, 1, 2, owned, error)


def test_health_and_status_follow_the_workers():
    connected = True
    statistics = lambda: DispatchStatistics((worker(connected),), 5, 150, ())  # noqa: E731
    with fake_server(statistics=statistics) as (url, _):
        assert get(url, "/health") == (200, {"status": "ok"})
        post(url, {"prompt": "x", "max_tokens": 3, "ignore_eos": True}, "/v1/completions")
        snapshot = FleetSnapshot.from_json(get(url, "/status")[1])
        assert (snapshot.model, snapshot.requests_finished, snapshot.tokens_generated) == ("fake", 1, 3)
        (seen,) = snapshot.workers
        assert (seen.name, seen.pid, seen.state, seen.rtt_ms, seen.rows) == ("w1", 77, WorkerState.UP, 0.25, 10)
        assert (seen.layers, seen.experts, seen.pairs) == ((2, 3), tuple(range(8)), 16)
        assert snapshot.round_trips == 150
        connected = False
        status, body = get(url, "/health")
        assert status == 503
        assert body["reason"] == "worker w1 is lost: connection refused"
        assert FleetSnapshot.from_json(get(url, "/status")[1]).workers[0].state is WorkerState.LOST


def test_status_shows_the_running_request():
    release = threading.Event()
    session = FakeSession()
    with fake_server(session) as (url, _):
        session.before_decode = lambda tokens: release.wait(10)
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(post, url, {"prompt": "abc", "max_tokens": 3}, "/v1/completions")
            wait_until(lambda: get(url, "/status")[1]["request"] is not None)
            request = get(url, "/status")[1]["request"]
            release.set()
            assert json.loads(future.result()[1])["id"] == request["id"]
    assert (request["phase"], request["prompt_tokens"], request["generated_tokens"]) == ("prefill", 4, 0)


async def bind(host, port):
    async with listening(Endpoint(ModelNames("fake")), HostPort(host, port)):
        pass


def test_a_port_in_use_is_a_clear_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InputError, match="in use") as caught:
            asyncio.run(bind("127.0.0.1", taken.getsockname()[1]))
    assert caught.value.hint


def test_an_address_of_another_machine_is_a_clear_error():
    with pytest.raises(InputError, match=r"cannot listen on 192\.0\.2\.1"):
        asyncio.run(bind("192.0.2.1", 0))  # an address for documentation
