"""`linkcpp serve` with the real engine and real workers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import ssl
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from serve_process import CHATML, add_template, get, post, run_linkcpp, running

from orchestrator.api.access import Access
from orchestrator.cli.access_options import ServingOptions
from orchestrator.models.catalog import Catalog
from orchestrator.workers.local import LocalWorkers

GREEDY = {"temperature": 0, "ignore_eos": True}
BODY = {"prompt": "Once upon a time there was", "max_tokens": 24, "logprobs": 3, **GREEDY}


@pytest.fixture(scope="module")
def model(synthetic, tmp_path_factory):
    return add_template(synthetic("llama"), tmp_path_factory.mktemp("serve") / "tiny.gguf", CHATML)


@pytest.fixture(scope="module")
def alone(model):
    """The answer of one process: the oracle of the stars below."""
    with running(model, "--unverified") as server:
        status, text = post(server.url, BODY)
        assert status == 200
        return json.loads(text)["choices"][0]


def wait_until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def choice(server):
    status, text = post(server.url, BODY)
    assert status == 200, text
    return json.loads(text)["choices"][0]


def test_a_star_answers_as_one_process_and_the_official_client_streams_it(model, alone):
    with running(model, "--workers", "2", "--unverified") as server:
        assert choice(server) == alone  # log probabilities included: they are a function of the logits' bytes
        assert [worker["experts"] for worker in server.ready["workers"]] == ["0-7", "8-15"]
        api = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        question = {"model": "tiny", "messages": [{"role": "user", "content": "Grüße?"}], "max_tokens": 30, "seed": 4}
        whole = api.chat.completions.create(**question)
        stream = api.chat.completions.create(**question, stream=True)
        joined = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        assert joined == whole.choices[0].message.content
        status = get(server.url, "/status")[1]
        assert all(worker["state"] == "up" and worker["rows"] > 0 for worker in status["workers"])
        assert status["tokens_generated"] == 24 + 2 * whole.usage.completion_tokens
        assert server.stop() == 0
        assert "Traceback" not in server.stderr()


def test_a_worker_killed_in_the_middle_of_an_answer(model, alone):
    with (
        LocalWorkers(model, 2) as workers,
        running(model, *(f"--worker={address}" for address in workers.addresses), "--unverified") as server,
    ):
        assert choice(server) == alone
        body = {**BODY, "max_tokens": 2000, "stream": True, "logprobs": None}
        request = urllib.request.Request(server.url + "/v1/completions", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as response:
            events = []
            for line in response:
                if line.startswith(b"data: "):
                    events.append(line.removeprefix(b"data: ").strip())
                    if len(events) == 5:
                        workers.kill(1)
        error = json.loads(events[-1])["error"]
        assert error["worker"].startswith("local-2 ")
        assert error["layer"] in range(16)
        assert error["message"].startswith(f"worker {error['worker']}, layer {error['layer']}: ")
        # Nothing is left of that request; the next one is refused quickly and says why, and so does the readiness.
        begin = time.monotonic()
        status, text = post(server.url, BODY)
        assert status == 503
        assert json.loads(text)["error"]["worker"].startswith("local-2 ")
        assert time.monotonic() - begin < 20
        status, health = get(server.url, "/health")
        assert status == 503
        assert "local-2" in health["reason"]
        assert server.process.poll() is None
        workers.restart(1)
        wait_until(lambda: get(server.url, "/health")[0] == 200)
        assert choice(server) == alone
        assert server.stop() == 0


def test_a_local_worker_of_the_server_that_ends_is_started_again(model, alone):
    """`serve --workers`: the address stays, the next answer is right, and the end leaves no process behind."""
    with running(model, "--workers", 2, "--unverified") as server:
        assert choice(server) == alone
        before = {worker["name"]: worker["pid"] for worker in get(server.url, "/status")[1]["workers"]}
        os.kill(before["local-1"], signal.SIGKILL)
        wait_until(lambda: "local-1 runs again" in server.stderr(), 60)  # not before its start is 5 s ago
        wait_until(lambda: get(server.url, "/health")[0] == 200, 60)
        assert choice(server) == alone
        after = {worker["name"]: worker["pid"] for worker in get(server.url, "/status")[1]["workers"]}
        assert after["local-2"] == before["local-2"]
        assert after["local-1"] != before["local-1"]
        assert "local-1 ended with signal 9" in server.stderr()
        assert server.stop() == 0
    for pid in after.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_worker_killed_while_nothing_runs_shows_in_the_readiness(model, alone):
    with (
        LocalWorkers(model, 2) as workers,
        running(model, *(f"--worker={address}" for address in workers.addresses), "--unverified") as server,
    ):
        workers.kill(0)
        wait_until(lambda: get(server.url, "/health")[0] == 503, 10.0)
        workers.restart(0)
        assert choice(server) == alone  # without waiting for the readiness: the step itself reconnects


def test_stopping_after_the_workers_have_gone(model):
    with (
        LocalWorkers(model, 2) as workers,
        running(model, *(f"--worker={address}" for address in workers.addresses), "--unverified") as server,
    ):
        assert post(server.url, {**BODY, "max_tokens": 2})[0] == 200
        workers.kill(0)
        workers.kill(1)
        assert server.stop() == 0
        assert "Traceback" not in server.stderr()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopping_ends_a_running_answer_in_words(model, number):
    with running(model, "--workers", "1", "--unverified") as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, server.url, {**BODY, "max_tokens": 3000, "stream": True, "logprobs": None})
        wait_until(lambda: (get(server.url, "/status")[1]["request"] or {}).get("generated_tokens", 0) > 3)
        assert server.stop(number) == 0
        _, text = answer.result()
        assert "shutting down" in text.splitlines()[-2]


def test_stopping_while_a_worker_hangs(model):
    with (
        LocalWorkers(model, 1) as workers,
        running(model, f"--worker={workers.addresses[0]}", "--unverified") as server,
        ThreadPoolExecutor(1) as pool,
    ):
        os.kill(workers.pids[0], signal.SIGSTOP)
        try:
            answer = pool.submit(post, server.url, BODY)
            wait_until(lambda: get(server.url, "/status")[1]["request"] is not None)
            assert server.stop() == 0
            assert answer.result()[0] == 503
        finally:
            os.kill(workers.pids[0], signal.SIGCONT)


def test_a_slow_worker_fails_its_request_in_words(model, alone):
    with (
        LocalWorkers(model, 1) as workers,
        running(model, f"--worker={workers.addresses[0]}", "--unverified", "--timeout", "0.5") as server,
    ):
        assert choice(server) == alone
        os.kill(workers.pids[0], signal.SIGSTOP)
        try:
            status, text = post(server.url, {**BODY, "prompt": "another"})
        finally:
            os.kill(workers.pids[0], signal.SIGCONT)
        assert status == 503
        error = json.loads(text)["error"]
        assert error["worker"].startswith("local-1 ")
        assert error["layer"] is not None
        assert "in time" in error["message"]
        assert choice(server) == alone


# --- what cannot be served --------------------------------------------------------------------------------------


def test_inputs_that_cannot_be_served_each_say_why(synthetic, model, tmp_path):
    text = tmp_path / "text.gguf"
    text.write_text("this is not a model, it is a longer piece of text")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(model.read_bytes()[:200_000])
    broken = add_template(synthetic("llama"), tmp_path / "broken.gguf", "{% for message in messages %}{{ message }}")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        tries = {
            (2, "nothing.gguf"): [tmp_path / "nothing.gguf", "--unverified"],
            (2, "GGUF"): [text, "--unverified"],
            (2, "cut.gguf"): [cut, "--unverified"],
            (2, "template is broken"): [broken, "--unverified"],
            (2, "fills in a whole text at once"): [synthetic("rnd1"), "--unverified"],
            (2, "in use"): [model, "--unverified", "--listen", f"127.0.0.1:{port}"],
            (4, "127.0.0.1:9"): [model, "--unverified", "--worker", "127.0.0.1:9"],
            (2, "cannot be split"): [model, "--unverified", "--workers", "64"],
            (1, "verification gate"): [model],
        }
        for (code, words), arguments in tries.items():
            listen = [] if "--listen" in arguments else ["--listen", "127.0.0.1:0"]
            done = run_linkcpp("serve", *arguments, *listen)
            errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
            assert done.returncode == code, (arguments, done.stderr)
            assert len(errors) == 1, done.stderr
            assert words in errors[0]


def test_without_a_template_there_is_a_warning_and_completions_work(synthetic):
    with running(synthetic("llama"), "--unverified") as server:
        assert "warning: this model's GGUF has no chat template" in server.stderr()
        assert post(server.url, {**BODY, "max_tokens": 1})[0] == 200
        status, text = post(server.url, {"messages": [{"role": "user", "content": "Hi"}]}, "/v1/chat/completions")
        assert status == 400
        assert "no chat template" in text


def test_a_template_of_ones_own(synthetic, tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text(CHATML)
    with running(synthetic("llama"), "--unverified", "--chat-template", file) as server:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        assert post(server.url, body, "/v1/chat/completions")[0] == 200


def test_keys_encryption_and_the_log_of_a_server(model, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# ours\nfirst-key\n\nsecond-key\n")
    saved = tmp_path / "slots"
    saved.mkdir()
    with running(model, "--unverified", "--api-key-file", keys, "--log-json", "--slot-save-path", saved) as server:
        assert get(server.url, "/health")[0] == 200
        assert post(server.url, {**BODY, "max_tokens": 1})[0] == 401
        api = openai.OpenAI(base_url=server.url + "/v1", api_key="second-key", max_retries=0)
        raw = api.completions.with_raw_response.create(model="tiny", prompt="Once", max_tokens=2, extra_body=GREEDY)
        identifier = raw.headers["X-Request-Id"]
        assert server.stop() == 0
        lines = [json.loads(line) for line in server.stderr().splitlines() if line.startswith("{")]
    answered = next(line for line in lines if line.get("request_id") == identifier)
    assert (answered["status"], answered["completion_tokens"], answered["client"]) == (200, 2, "key 2")
    assert [line["status"] for line in lines if "status" in line] == [200, 401, 200]
    for arguments, words in {
        ("--api-key-file", tmp_path / "none"): "API keys",
        ("--tls-cert", keys): "certificate",
        ("--slot-save-path", tmp_path / "none"): "no folder",
    }.items():
        done = run_linkcpp("serve", model, "--unverified", "--listen", "127.0.0.1:0", *arguments)
        assert done.returncode == 2
        assert words in done.stderr


@pytest.mark.parametrize(
    ("keys", "tls", "warning"),
    [
        ((), None, "x answers anyone who can reach it, without encryption"),
        (("k",), None, "x answers those who have a key, without encryption"),
        ((), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), "x answers anyone who can reach it"),
        (("k",), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), None),
    ],
)
def test_what_is_said_of_addresses_that_others_can_reach(keys, tls, warning):
    assert ServingOptions(Access(keys), tls, False, None, None).warn_of("x") == warning


def test_a_model_comes_from_listed_to_serving(model, tmp_path, monkeypatch):
    catalogue = tmp_path / "models.toml"
    catalogue.write_text(
        f'[models.tiny]\ntitle = "Tiny"\nlicense = "MIT"\nfile = "tiny.gguf"\nsize = {model.stat().st_size}\n'
    )
    monkeypatch.setenv("LINKCPP_MODELS", str(catalogue))
    monkeypatch.setenv("LINKCPP_DATA", str(tmp_path / "data"))
    file = tmp_path / "data" / "models" / "tiny.gguf"
    file.parent.mkdir(parents=True)
    shutil.copy(model, file)

    def status():
        return Catalog.load().standing("tiny").status

    assert status() == "listed"
    onboarded = run_linkcpp("onboard", "tiny", "--workers", "1", "--contract", "exact", "--steps", "2", "--json")
    assert onboarded.returncode == 0, onboarded.stderr
    assert status() == "onboarded"
    with running("tiny") as server:
        assert server.stop() == 0
    assert status() == "onboarded", "nobody asked it anything"
    with running("tiny") as server:
        assert choice(server)["text"]
        assert server.stop() == 0
    assert status() == "serving"
