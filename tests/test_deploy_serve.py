"""From a plan to an HTTP answer: plan, deploy, serve, and a stage that is killed while the answer streams."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
from range_server import serving
from serve_process import get, post, run_linkcpp, running
from test_deploy import deploy, written

from orchestrator.models.deployment import Deployment, GatewayEntry, StageEntry, WorkerEntry, read_deployment
from orchestrator.types import Boundary

PROMPTS = ["one", "two and three", "a longer text, to be read in several steps " * 2, "four"]


def body(prompt: str, **more: object) -> dict[str, object]:
    return {"prompt": prompt, "max_tokens": 60, "temperature": 0, "seed": 1, **more}


def answer(url: str, prompt: str) -> str:
    status, text = post(url, body(prompt))
    assert status == 200, text
    return json.loads(text)["choices"][0]["text"]


@pytest.fixture(scope="module")
def model(synthetic: Callable[[str], Path]) -> Path:
    return synthetic("step35")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[str]:
    """The answers of one process."""
    with running(model, "--unverified", "--ctx", 512, "--threads", 1) as server:
        return [answer(server.url, prompt) for prompt in PROMPTS]


def streamed(url: str, prompt: str, strike: Callable[[], None]) -> str:
    """Read a streamed answer; ``strike`` happens when its first text is here."""
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body(prompt, stream=True)).encode())
    text = ""
    with urllib.request.urlopen(request, timeout=120) as response:
        for line in response:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                text += event["choices"][0]["text"]
                if text:
                    strike()
                    strike = lambda: None  # noqa: E731
    return text


def test_a_plan_is_deployed_served_and_survives_the_loss_of_a_stage(
    model: Path, expected: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "deployment.toml"
    ended = run_linkcpp(
        *("plan", model, "--stages", 4, "--sandwich", "--ctx", 512, "--sequences", 4, "-o", file),
        *("--node", "a=127.0.0.1", "--node", "b=127.0.0.1", "--spare", "c=127.0.0.1"),
    )
    assert ended.returncode == 0, ended.stderr
    with deploy("--local", file) as deployed:
        running_file = Path(str(deployed.ready["deployment"]))
        assert len(read_deployment(running_file).spares) == 3
        with running("--deployment", running_file, "--unverified", "--threads", 1) as server:
            stages = server.ready["workers"]
            assert stages[0]["layers"].startswith("0")
            assert len(stages) == 5  # the gateway's two ranges are two lines
            with ThreadPoolExecutor(4) as pool:
                assert list(pool.map(lambda prompt: answer(server.url, prompt), PROMPTS)) == expected
            victim = next(found for found in deployed.ready["processes"] if found["name"] == "stage-2")
            text = streamed(server.url, PROMPTS[2], lambda: os.kill(victim["pid"], signal.SIGKILL))
            assert text == expected[2]
            assert answer(server.url, PROMPTS[0]) == expected[0]
            assert get(server.url, "/health")[0] == 200
            assert server.stop() == 0
            assert "is whole again" in server.stderr()


def test_a_star_is_deployed_and_served(model: Path, expected: list[str], tmp_path: Path) -> None:
    file = tmp_path / "deployment.toml"
    ended = run_linkcpp(
        *("plan", model, "--kind", "star", "--ctx", 512, "--sequences", 2, "-o", file),
        *("--node", "a=127.0.0.1", "--node", "b=127.0.0.1"),
    )
    assert ended.returncode == 0, ended.stderr
    with (
        deploy("--local", file) as deployed,
        running("--deployment", deployed.ready["deployment"], "--unverified", "--threads", 1) as server,
    ):
        assert [worker["experts"] for worker in server.ready["workers"]] == ["0-7", "8-15"]
        assert answer(server.url, PROMPTS[1]) == expected[1]


@pytest.mark.slow
@pytest.mark.parametrize("sandwich", [False, True])
def test_nobody_needs_the_whole_file(
    model: Path, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sandwich: bool
) -> None:
    """Stages and gateway download what they hold from a server; nobody has the model."""
    for name, variable in (("cache", "LINKCPP_CACHE"), ("data", "LINKCPP_DATA")):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(variable, str(tmp_path / name))
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "m.gguf").symlink_to(model)
    ends = GatewayEntry(((0, 2), (7, 8))) if sandwich else GatewayEntry()
    cuts = (2, 4, 7) if sandwich else (0, 4, 8)
    stages = tuple(StageEntry(f"s{i}", (span,), "127.0.0.1:0") for i, span in enumerate(pairwise(cuts)))
    with serving(tmp_path / "served") as server:
        plan = Deployment(server.url("m.gguf"), 512, 2, ends, stages)
        with (
            deploy("--local", written(tmp_path / "d.toml", plan)) as deployed,
            running("--deployment", deployed.ready["deployment"], "--unverified", "--threads", 1) as gateway,
        ):
            assert answer(gateway.url, PROMPTS[2]) == expected[2]
        assert server.total_sent < 1.3 * model.stat().st_size
    for share in (tmp_path / "data" / "shares").glob("*.gguf"):
        assert share.stat().st_size < 0.7 * model.stat().st_size


def test_what_a_deployment_says_cannot_be_said_again(model: Path, tmp_path: Path) -> None:
    entry = StageEntry("s", ((0, 8),), "127.0.0.1:1")
    file = written(tmp_path / "d.toml", Deployment(str(model), 256, stages=(entry,)))
    for option in (
        ["--ctx", 100],
        ["--slots", 2],
        ["--worker", "a:1"],
        ["--contract", "sum"],
        ["--no-batch-invariant"],
    ):
        ended = run_linkcpp("serve", "--deployment", file, "--unverified", *option)
        assert ended.returncode == 2
        assert f"{option[0]} is for the deployment to say" in ended.stderr
    ended = run_linkcpp("serve", "--deployment", file, model)
    assert "name a MODEL, or a --deployment" in ended.stderr
    ended = run_linkcpp("serve", "--deployment", file, "--unverified")
    assert ended.returncode == 4
    assert "127.0.0.1:1" in ended.stderr


def test_a_lossy_boundary_is_served_unverified_only_where_that_is_said(model: Path, tmp_path: Path) -> None:
    entries = tuple(StageEntry(f"s{i}", ((i, i + 4),), f"127.0.0.1:{i + 1}") for i in (0, 4))
    file = written(tmp_path / "d.toml", Deployment(str(model), 256, stages=entries, boundary=Boundary.F16))
    assert run_linkcpp("serve", "--deployment", file).returncode == 1
    ended = run_linkcpp("serve", "--deployment", file, "--unverified")
    assert ended.returncode == 4, "past the gate, to stages that nobody started"
    assert "127.0.0.1:1" in ended.stderr


def test_an_address_that_is_an_expert_worker_is_no_stage(model: Path, tmp_path: Path) -> None:
    workers = (WorkerEntry("w", None, None, "127.0.0.1:0"),)
    file = written(tmp_path / "d.toml", Deployment(str(model), 256, workers=workers))
    with deploy("--local", file) as deployed:
        address = deployed.ready["processes"][0]["address"]
        entry = StageEntry("s", ((0, 8),), address)
        wrong = written(tmp_path / "wrong.toml", Deployment(str(model), 256, stages=(entry,)))
        ended = run_linkcpp("serve", "--deployment", wrong, "--unverified")
        assert ended.returncode == 4
        assert "is an expert worker, not a stage" in ended.stderr
