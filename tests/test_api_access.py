"""Who may ask: keys, sites, sizes, encryption; what is written down; and the routes beside the answers."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import socket
import ssl
import subprocess
import time
import urllib.request

import aiohttp
import pytest
from api_server import fake_server, served, serving
from fake_backend import FakeBackend
from fake_engine import FakeModel, FakeSession, answer
from test_api_app import HI, get, post, wait_until

from orchestrator.api.access import OPEN_ROUTES, Access
from orchestrator.api.app import create_app
from orchestrator.api.client import stream_chat
from orchestrator.api.endpoint import Endpoint, StepObserver
from orchestrator.api.listen import listening
from orchestrator.api.logs import JsonFormatter, access_logger
from orchestrator.api.schema import ModelNames
from orchestrator.errors import RequestError
from orchestrator.gateway.gateway import Gateway
from orchestrator.gateway.template import ChatMessage
from orchestrator.transport.base import HostPort

KEYS = ("first key", "segundo-ключ")


@contextlib.contextmanager
def endpoint_server(access=None, session=None, model=None, slot_folder=None, **backend):
    """Serve the twin under some conditions; gives (URL, gateway)."""
    model = model or FakeModel()
    endpoint = Endpoint(ModelNames("fake"), access)
    twin = FakeBackend(**backend)
    with Gateway(model, twin, observer=StepObserver(endpoint.metrics)) as gateway:
        ready = served(model, session or FakeSession(), gateway)
        endpoint.served = type(ready)(
            **{**{f: getattr(ready, f) for f in ready.__slots__}, "slot_folder": slot_folder}
        )
        with serving(endpoint) as url:
            yield url, gateway


def ask(url, path, *, method="GET", body=None, **headers):
    """Return (status, headers, body)."""
    host, _, port = url.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=20)
    data = None if body is None else json.dumps(body).encode()
    headers = {name.replace("_", "-"): value.encode() for name, value in headers.items()}
    connection.request(method, path, data, headers)
    response = connection.getresponse()
    text = response.read()
    connection.close()
    return response.status, response.headers, text


def routes():
    """Return (method, path) of every route."""
    for route in create_app(Endpoint(ModelNames("m"))).router.routes():
        if route.method != "HEAD":
            path = route.resource.canonical
            yield route.method, path.replace("{name}", "app.js" if "page" in path else "fake").replace("{slot}", "0")


@pytest.mark.parametrize(("method", "path"), sorted(set(routes())))
def test_every_route_but_the_open_ones_asks_for_a_key(method, path):
    is_open = path in OPEN_ROUTES or path.startswith("/page/")
    with endpoint_server(Access(KEYS)) as (url, gateway):
        for token in (
            "",
            "Bearer ",
            "Bearer wrong",
            "Bearer first",
            "Basic Zmlyc3Qga2V5",
            "Bearer first key2",
            "\xff",
        ):
            headers = {"Authorization": token} if token else {}
            status, _, text = ask(url, path, method=method, body={"messages": HI}, **headers)
            if is_open:
                assert status == 200
            else:
                assert status == 401, text
                assert json.loads(text)["error"]["code"] == "invalid_api_key"
        assert gateway.state().prompt_tokens == 0
        for key in KEYS:
            status, _, _ = ask(url, path, method=method, body={}, Authorization=f"Bearer {key}")
            assert status != 401
        assert ask(url, path, method=method, body={}, X_Api_Key=KEYS[0])[0] != 401


def test_nothing_but_reading_is_open():
    assert all(method == "GET" for method, path in routes() if path in OPEN_ROUTES or path.startswith("/page/"))


def test_each_key_is_a_client_of_its_own():
    with endpoint_server(Access(KEYS), step_seconds=0.02) as (url, gateway):
        seen = set()
        for number, key in enumerate(KEYS, 1):
            body = json.dumps({"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}).encode()
            request = urllib.request.Request(
                url + "/v1/completions", body, {"Authorization": f"Bearer {key}".encode().decode("latin-1")}
            )
            with urllib.request.urlopen(request, timeout=20):
                wait_until(lambda: gateway.state().running is not None)
                seen.add((number, gateway.state().running.client))
            wait_until(lambda: gateway.state().running is None)
    assert seen == {(1, "key 1"), (2, "key 2")}


def test_our_own_client_with_and_without_a_key():
    async def ask_all(url, key):
        return "".join([part.text async for part in stream_chat(url, [ChatMessage("user", "Hi")], {}, key)])

    with endpoint_server(Access(KEYS), script=answer([*b"Hello"])) as (url, _):
        assert asyncio.run(ask_all(url, KEYS[0])) == "Hello"
        with pytest.raises(RequestError, match="API key is missing"):
            asyncio.run(ask_all(url, None))


# --- pages of other sites -------------------------------------------------------------------------------------


def test_pages_of_other_sites():
    body = {"prompt": "x", "max_tokens": 1}
    good, bad = "https://chat.example", "https://evil.example"
    with endpoint_server(Access(origins=(good,))) as (url, gateway):
        status, headers, _ = ask(url, "/v1/completions", method="POST", body=body, Origin=good)
        assert (status, headers["Access-Control-Allow-Origin"], headers["Vary"]) == (200, good, "Origin")
        done = gateway.state().finished
        for origin in (bad, "null", f"{good}.evil.example"):
            status, headers, text = ask(url, "/v1/completions", method="POST", body=body, Origin=origin)
            assert (status, json.loads(text)["error"]["code"]) == (403, "origin_not_allowed")
            assert headers["Access-Control-Allow-Origin"] is None
        assert gateway.state().finished == done
        status, headers, text = ask(
            url, "/v1/chat/completions", method="OPTIONS", Origin=good, Access_Control_Request_Method="POST"
        )
        assert (status, headers["Access-Control-Allow-Origin"], text) == (204, good, b"")
        assert "Authorization" in headers["Access-Control-Allow-Headers"]
        assert ask(url, "/v1/models", Origin=bad)[1]["Access-Control-Allow-Origin"] is None
        # The page that this server sent asks from its own origin.
        assert ask(url, "/v1/completions", method="POST", body=body, Origin=url)[0] == 200
    with endpoint_server(Access(origins=("*",))) as (url, _):
        assert ask(url, "/v1/completions", method="POST", body=body, Origin=bad)[0] == 200
        stream = ask(url, "/v1/completions", method="POST", body={**body, "stream": True}, Origin=bad)
        assert stream[1]["Access-Control-Allow-Origin"] == bad


def test_a_body_beyond_the_limit():
    with endpoint_server(Access(max_body=1 << 20)) as (url, _):
        status, text = post(url, b"x" * ((1 << 20) + 1))
        assert (status, json.loads(text)["error"]["code"]) == (413, "request_entity_too_large")
        assert post(url, {"messages": HI, "max_tokens": 1, "user": "x" * 100_000})[0] == 200


# --- encryption -----------------------------------------------------------------------------------------------


def test_encrypted_connections(tmp_path):
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    made = subprocess.run(
        [*command.split(), "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip("openssl cannot make a certificate here")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    async def main():
        async with listening(Endpoint(ModelNames("fake")), HostPort("127.0.0.1", 0), context) as bound:
            trusted = ssl.create_default_context(cafile=certificate)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"https://{bound}/v1/models", ssl=trusted) as response:
                    assert (await response.json())["data"][0]["id"] == "fake"
                with pytest.raises(aiohttp.ClientError):
                    await session.get(f"http://{bound}/v1/models")

    asyncio.run(main())


# --- ids, logs, metrics ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def log_lines():
    """Collect what the log of requests says, as JSON."""
    lines = []

    class Collect(logging.Handler):
        def emit(self, record):
            lines.append(json.loads(self.format(record)))

    handler = Collect()
    handler.setFormatter(JsonFormatter())
    loggers = [access_logger, logging.getLogger("orchestrator")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)


def test_every_request_has_an_id_and_a_line():
    with log_lines() as lines, fake_server(FakeSession(script=answer([*b"Hello"]))) as (url, _):
        _, headers, text = ask(
            url, "/v1/chat/completions", method="POST", body={"messages": HI}, X_Request_Id="mine-1"
        )
        assert headers["X-Request-Id"] == "mine-1"
        first = json.loads(text)
        status, headers, _ = ask(url, "/v1/chat/completions", method="POST", body={}, X_Request_Id="not\tgood {}")
        assert status == 400
        given = headers["X-Request-Id"]
        assert given.startswith("req-")
        ask(url, "/nowhere")
        wait_until(lambda: len(lines) == 3)
    good, bad, nowhere = lines
    assert (good["request_id"], good["status"], good["answer"]) == ("mine-1", 200, first["id"])
    assert (good["prompt_tokens"], good["completion_tokens"]) == (first["usage"]["prompt_tokens"], 6)
    assert {"seconds", "queued", "prefill", "decode", "time", "client"} <= set(good)
    assert (bad["request_id"], bad["status"], nowhere["status"]) == (given, 400, 404)
    assert "messages" in bad["error"]


def test_a_client_that_left_has_a_line_too():
    with log_lines() as lines, fake_server(FakeSession(step_seconds=0.02, n_ctx=4096)) as (url, _):
        host, port = url.removeprefix("http://").split(":")
        data = json.dumps({"prompt": "x" * 2000, "max_tokens": 10}).encode()
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data
            )
            time.sleep(0.2)
        wait_until(lambda: lines)
    assert lines[0]["status"] == 499


def metric(url, name):
    """Return the sum of a metric's values, whatever its labels."""
    with urllib.request.urlopen(url + "/metrics", timeout=20) as response:
        assert response.headers["Content-Type"].startswith("text/plain")
        lines = response.read().decode().splitlines()
    values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.partition("{")[0].partition(" ")[0] == name]
    assert values, f"no metric {name} among {lines}"
    return sum(values)


def test_metrics_count_what_happened():
    with endpoint_server(n_sequences=2) as (url, _):
        body = {"prompt": "0123456789" * 4, "max_tokens": 5, "ignore_eos": True}
        for stream in (False, True, False):
            assert post(url, {**body, "stream": stream}, "/v1/completions")[0] == 200
        post(url, {"prompt": "x", "max_tokens": 0}, "/v1/completions")
        assert metric(url, "linkcpp_generated_tokens_total") == 15
        assert (
            metric(url, "linkcpp_prompt_tokens_computed_total") + metric(url, "linkcpp_prompt_tokens_cached_total")
            == 123
        )
        assert metric(url, "linkcpp_prompt_tokens_cached_total") > 0
        assert metric(url, "linkcpp_time_to_first_token_seconds_count") == 3
        assert metric(url, "linkcpp_inter_token_seconds_count") > 0
        assert metric(url, "linkcpp_queue_seconds_count") == 3
        assert metric(url, "linkcpp_completion_tokens_sum") == 15
        assert metric(url, "linkcpp_step_rows_sum") == metric(url, "linkcpp_prompt_tokens_computed_total") + 12
        assert metric(url, "linkcpp_slots") == 2
        assert metric(url, "linkcpp_waiting_requests") == 0
        assert metric(url, "linkcpp_ready") == 1
        assert metric(url, "linkcpp_http_requests_total") >= 4


def test_metrics_while_loading():
    with serving(Endpoint(ModelNames("fake"))) as url:
        assert metric(url, "linkcpp_ready") == 0


# --- tokens, slots, properties --------------------------------------------------------------------------------


def test_tokens_and_back():
    with fake_server() as (url, _):
        text = "Hi <|im_start|> ä😀"
        status, body = post(url, {"content": text, "add_special": True}, "/tokenize")
        tokens = json.loads(body)["tokens"]
        assert (status, tokens[0], 258 in tokens) == (200, 256, True)
        assert json.loads(post(url, {"content": text}, "/tokenize")[1])["tokens"] == tokens[1:]
        plain = json.loads(post(url, {"content": text, "parse_special": False}, "/tokenize")[1])["tokens"]
        assert plain == [*text.encode()]
        pieces = json.loads(post(url, {"content": "ä", "with_pieces": True}, "/tokenize")[1])["tokens"]
        assert pieces == [{"id": 0xC3, "piece": [0xC3]}, {"id": 0xA4, "piece": [0xA4]}]
        other = json.loads(post(url, {"prompt": "Hi", "model": "fake"}, "/tokenize")[1])
        assert (other["count"], other["max_model_len"]) == (3, 512)
        chat = json.loads(post(url, {"messages": HI}, "/tokenize")[1])["tokens"]
        assert json.loads(post(url, {"tokens": chat}, "/detokenize")[1])["content"].endswith("assistant\n")
        assert json.loads(post(url, {"tokens": tokens}, "/detokenize")[1])["content"] == "<s>" + text
        assert json.loads(post(url, {"tokens": []}, "/detokenize")[1])["content"] == ""
        for wrong in ([300], [-1], ["a"], "x", [1.5]):
            assert post(url, {"tokens": wrong}, "/detokenize")[0] == 400
        assert post(url, {"content": "\ud800"}, "/tokenize")[0] == 400
        assert post(url, {"contend": "x"}, "/tokenize")[0] == 400


def test_properties_and_embeddings():
    with fake_server() as (url, _):
        status, body = get(url, "/props")
        assert (status, body["total_slots"], body["default_generation_settings"]["n_ctx"]) == (200, 1, 512)
        assert (body["bos_token"], body["model_alias"]) == ("<s>", "fake")
        status, text = post(url, {"input": "x"}, "/v1/embeddings")
        assert (status, json.loads(text)["error"]["code"]) == (400, "unsupported_operation")
        assert get(url, "/v1/health") == (200, {"status": "ok"})


def test_slots_are_shown_saved_and_restored(tmp_path):
    with endpoint_server(n_sequences=2, slot_folder=tmp_path) as (url, gateway):
        prompt = "0123456789" * 3
        assert post(url, {"prompt": prompt, "max_tokens": 2}, "/v1/completions")[0] == 200
        slots = get(url, "/slots")[1]
        assert [slot["is_processing"] for slot in slots] == [False, False]
        (held,) = [slot["id"] for slot in slots if slot["n_held"]]
        count = slots[held]["n_held"]
        status, text = post(url, {"filename": "talk.bin"}, f"/slots/{held}?action=save")
        assert (status, json.loads(text)) == (200, {"id_slot": held, "filename": "talk.bin", "n_saved": count})
        assert json.loads(post(url, {}, f"/slots/{held}?action=erase")[1]) == {"id_slot": held, "n_erased": count}
        assert get(url, "/slots")[1][held]["n_held"] == 0
        other = 1 - held
        status, text = post(url, {"filename": "talk.bin"}, f"/slots/{other}?action=restore")
        assert (status, json.loads(text)["n_restored"]) == (200, count)
        again = json.loads(post(url, {"prompt": prompt, "max_tokens": 2}, "/v1/completions")[1])
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 30
        for name in ("../x", "", "/etc/passwd", ".hidden", "a/b", "x" * 200):
            assert post(url, {"filename": name}, f"/slots/{held}?action=save")[0] == 400
        assert post(url, {"filename": "nothing.bin"}, f"/slots/{held}?action=restore")[0] == 400
        assert post(url, {"filename": "x"}, "/slots/9?action=save")[0] == 404
        assert post(url, {"filename": "x"}, f"/slots/{held}?action=eat")[0] == 400
        assert gateway.state().waiting == 0
    with endpoint_server() as (url, _):
        assert post(url, {"filename": "x"}, "/slots/0?action=save")[0] == 400


def test_a_time_limit_by_header():
    with endpoint_server(step_seconds=0.02) as (url, gateway):
        body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True}
        status, _, text = ask(url, "/v1/completions", method="POST", body=body, X_Request_Timeout="0.3")
        assert (status, json.loads(text)["error"]["code"]) == (504, "deadline_exceeded")
        wait_until(lambda: gateway.state().running is None)
        for wrong in ("soon", "-1", "nan", "1e9"):
            assert ask(url, "/v1/completions", method="POST", body=body, X_Request_Timeout=wrong)[0] == 400


def test_a_queue_that_is_full_says_when_to_come_again():
    from concurrent.futures import ThreadPoolExecutor

    from orchestrator.gateway.scheduler import Limits

    endpoint = Endpoint(ModelNames("fake"))
    model = FakeModel()
    backend = FakeBackend(step_seconds=0.05)
    with Gateway(model, backend, limits=Limits(waiting=1, waiting_per_client=1)) as gateway:
        endpoint.served = served(model, FakeSession(), gateway)
        with serving(endpoint) as url, ThreadPoolExecutor(2) as pool:
            body = {"prompt": "x", "max_tokens": 30, "ignore_eos": True}
            running = pool.submit(post, url, body, "/v1/completions")
            wait_until(lambda: gateway.state().running is not None)
            waiting = pool.submit(post, url, body, "/v1/completions")
            wait_until(lambda: gateway.state().waiting == 1)
            status, headers, text = ask(url, "/v1/completions", method="POST", body=body)
            assert (status, json.loads(text)["error"]["code"]) == (429, "queue_full")
            assert int(headers["Retry-After"]) >= 1
            assert running.result()[0] == waiting.result()[0] == 200
