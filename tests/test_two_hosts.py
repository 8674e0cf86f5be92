"""Sixteen stages of a shape-faithful model, on loopback and on two hosts of the WAN lab: the bytes of one process."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from two_hosts import ALONE, FLYING, LENGTHS, TOGETHER, digest, phases

from orchestrator.cli.app import main
from orchestrator.engine.context import Context
from orchestrator.engine.model import Model
from orchestrator.gateway.ring_backbone import open_ring
from orchestrator.models.deployment import read_deployment
from orchestrator.types import FloatArray
from orchestrator.workers.deployment import DeployedProcesses

ROOT = Path(__file__).parent.parent
TESTS = Path(__file__).parent

Expected = dict[str, list[str]]


@pytest.fixture(scope="session")
def step(synthetic_like: Callable[[str, str], Path]) -> Path:
    return synthetic_like("step35", "step-3.7-flash")


class Whole:
    """The unsplit engine in one process."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def decode(self, batch) -> FloatArray:
        logits = self.context.decode(batch).logits
        assert logits is not None
        return logits


@pytest.fixture(scope="session")
def expected(step: Path) -> Expected:
    with Model.open(step) as model, Context(model, n_ctx=256, n_sequences=len(LENGTHS)) as context:
        return {name: digest(rows) for name, rows in phases(Whole(context), model.n_vocab, fly=False)}


def plan(target: Path, step: Path, *arguments: object) -> None:
    command = ["plan", step, "--stages", 16, "--ctx", 256, "--sequences", len(LENGTHS), "-o", target, *arguments]
    result = CliRunner().invoke(main, list(map(str, command)), standalone_mode=False)
    assert result.exception is None, result.output


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sixteen_stages_on_loopback(step: Path, expected: Expected, tmp_path: Path) -> None:
    file = tmp_path / "deployment.toml"
    plan(file, step, "--node", "a=127.0.0.1", "--node", "b=127.0.0.1")
    with (
        DeployedProcesses(read_deployment(file), step, threads=1) as processes,
        open_ring(step, processes.deployment) as backbone,
    ):
        ring = backbone.ring
        assert len(ring.statistics()) == 16
        assert len({stage.pid for stage in ring.statistics()}) == 16
        found = {name: digest(rows) for name, rows in phases(ring, ring.facts.n_vocab, fly=True)}
    assert found == expected


def lab_is_possible() -> str:
    """Say why there can be no lab here, nothing where there can."""
    if os.geteuid() != 0:
        return "needs root"
    if not Path("/dev/net/tun").exists():
        return "needs /dev/net/tun"
    command = ["ip", "netns", "add", f"probe{os.getpid()}"]
    try:
        made = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return "needs iproute2"
    if made.returncode:
        return f"cannot make a network namespace: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", f"probe{os.getpid()}"], check=False)
    return ""


def turns(trace: Path, begin: float, end: float) -> int:
    """Count how often the direction of the data between two hosts changed, the first packet included."""
    senders = []
    for line in trace.read_text().splitlines():
        time, source, _, _ = line.split()
        if begin <= float(time) <= end:
            senders.append(source)
    return sum(1 for _ in itertools.groupby(senders))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("sandwich", [False, True], ids=["logits on the wire", "sandwich"])
def test_sixteen_stages_on_two_hosts(step: Path, expected: Expected, tmp_path: Path, sandwich: bool) -> None:
    reason = lab_is_possible()
    if reason:
        pytest.skip(f"no two hosts: {reason}")
    a, b = f"lka{os.getpid()}", f"lkb{os.getpid()}"
    file, result, trace = (tmp_path / name for name in ("deployment.toml", "result.json", "trace.txt"))
    plan(file, step, "--node", f"{a}=10.9.0.1", "--node", f"{b}=10.9.0.2", *(["--sandwich"] if sandwich else []))
    deployment = read_deployment(file)
    assert {stage.node for stage in deployment.stages} == ({b} if sandwich else {a, b})
    command = [sys.executable, str(TESTS / "wanlab.py"), "--host", f"{a}:0", "--host", f"{b}:5", "--trace", trace]
    command += ["--", sys.executable, TESTS / "two_hosts.py", "run", a, b, file, result]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        list(map(str, command)), cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    said = json.loads(result.read_text())
    assert {name: said[name]["rows"] for name in expected} == expected
    assert len(said["stages"]) == 16 + sandwich  # the gateway's process holds two ranges
    rounds = {name: turns(trace, said[name]["begin"], said[name]["end"]) / 2 for name in expected}
    print(f"round trips between the hosts: {rounds}")
    assert rounds["alone"] == ALONE, "one for each token"
    assert rounds["together"] == TOGETHER, "one for eight tokens of eight sequences"
    assert FLYING <= rounds["flying"] <= FLYING * len(LENGTHS), "eight steps are on their way at once"
    seconds = said["alone"]["end"] - said["alone"]["begin"]
    print(f"{ALONE / seconds:.1f} tokens/s of one sequence at 10 ms")
