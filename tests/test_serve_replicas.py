"""`linkcpp serve` with several replicas: sessions stay where their prefix is, and leave a replica that dies."""

from __future__ import annotations

import json
import urllib.request
from itertools import pairwise

import pytest
from serve_process import get, post, run_linkcpp, running
from test_deploy import deploy, written

from orchestrator.models.deployment import Deployment, StageEntry
from orchestrator.workers.local import LocalWorkers

TALKS = [f"{name} was a long story, told by the fire, about all that {name} ever did. " * 3 for name in ("Ada", "Bo")]
TURNS = [["", "And then?", "And then? Go on.", "And then? Go on. Is there more?"][: n + 1] for n in range(4)]


@pytest.fixture(scope="module")
def model(synthetic):
    return synthetic("qwen2moe")


def ask(url, talk, turn, session=None):
    """Return (text, tokens found in a cache) of a turn of a conversation."""
    body = {"prompt": TALKS[talk] + TURNS[turn][-1], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    headers = {} if session is None else {"X-Session-Id": session}
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = json.loads(response.read())
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def rows(url):
    """Return how many rows each worker or stage was sent."""
    return {worker["address"]: worker["rows"] for worker in get(url, "/status")[1]["workers"]}


def worked(url, call):
    """Return what a call returns, and the addresses that had work by it."""
    before = rows(url)
    found = call()
    return found, {address for address, count in rows(url).items() if count > before[address]}


@pytest.fixture(scope="module")
def expected(model):
    """The answers of one process without replicas."""
    with running(model, "--unverified", "--threads", 1) as server:
        return [[ask(server.url, talk, turn)[0] for turn in range(4)] for talk in range(2)]


@pytest.mark.parametrize("session", [None, "mine"])
def test_a_session_stays_with_its_replica_until_that_dies(model, expected, session):
    with LocalWorkers(model, 1) as left, LocalWorkers(model, 1) as right:
        groups = {left.addresses[0]: left, right.addresses[0]: right}
        arguments = [text for address in groups for text in ("--replica", address)]
        with running(model, *arguments, "--unverified", "--slots", 2) as server:
            assert [worker["name"] for worker in server.ready["workers"]] == ["1/local-1", "2/local-1"]
            assert len(server.ready["slots"]) == 4
            (text, cached), homes = worked(server.url, lambda: ask(server.url, 0, 0, session))
            assert (text, cached, len(homes)) == (expected[0][0], 0, 1)
            hits = 0
            for turn in (1, 2):
                (text, cached), where = worked(server.url, lambda turn=turn: ask(server.url, 0, turn, session))
                assert (text, where) == (expected[0][turn], homes)
                hits += cached > 150
            assert hits == 2
            home = homes.pop()
            groups.pop(home).kill(0)
            # At once, and the request finds out by itself; its prompt is computed once more, elsewhere.
            (text, cached), where = worked(server.url, lambda: ask(server.url, 0, 3, session))
            assert (text, cached, where) == (expected[0][3], 0, set(groups))
            assert get(server.url, "/health") == (200, {"status": "ok"})
            assert ask(server.url, 0, 3, session)[1] > 150
            states = {worker["address"]: worker["state"] for worker in get(server.url, "/status")[1]["workers"]}
            assert (states[home], states[next(iter(groups))]) == ("lost", "up")
            status, text = post(server.url, {"filename": "x"}, "/slots/0?action=save")
            assert (status, "several replicas" in text) == (400, True)
            assert server.stop() == 0
            assert "Traceback" not in server.stderr()


@pytest.mark.slow
def test_two_rings_share_the_work_of_two_sessions(model, expected, tmp_path):
    files = []
    stages = [
        [StageEntry(f"stage-{index}", (span,), "127.0.0.1:0") for index, span in enumerate(pairwise((0, 2, 4)), 1)]
        for _ in range(2)
    ]
    files = [
        written(tmp_path / f"{name}.toml", Deployment(str(model), 512, 2, stages=tuple(entries)))
        for name, entries in zip("ab", stages, strict=True)
    ]
    with deploy("--local", files[0]) as first, deploy("--local", files[1]) as second:
        deployments = [one.ready["deployment"] for one in (first, second)]
        arguments = [text for file in deployments for text in ("--deployment", file)]
        with running(*arguments, "--unverified", "--threads", 1) as server:
            names = [worker["name"].partition(" ")[0] for worker in server.ready["workers"]]
            assert names == ["1/stage-1", "1/stage-2", "2/stage-1", "2/stage-2"]
            homes = []
            for talk in range(2):
                (text, _), where = worked(server.url, lambda talk=talk: ask(server.url, talk, 0, f"talk {talk}"))
                assert (text, len(where)) == (expected[talk][0], 2)
                homes.append(where)
            for talk in range(2):
                (text, cached), where = worked(server.url, lambda talk=talk: ask(server.url, talk, 1, f"talk {talk}"))
                assert (text, where, cached > 150) == (expected[talk][1], homes[talk], True)


def test_replicas_that_cannot_be_are_refused_in_words(model, synthetic, tmp_path):
    def refused(*arguments):
        ended = run_linkcpp("serve", *arguments, "--unverified")
        assert ended.returncode == 2
        return ended.stderr

    assert "leave --worker" in refused(model, "--replica", "a:1", "--worker", "b:1")
    assert "two replicas are at a:1" in refused(model, "--replica", "a:1", "--replica", "a:1")
    assert "name a MODEL" in refused("--replica", "a:1")

    def file(name, architecture):
        entry = StageEntry("s", ((0, 4),), f"127.0.0.1:{len(name)}")
        return written(tmp_path / name, Deployment(str(synthetic(architecture)), 256, stages=(entry,)))

    one, other = file("a.toml", "qwen2moe"), file("bb.toml", "llama")
    assert "has another model" in refused("--deployment", one, "--deployment", other)
