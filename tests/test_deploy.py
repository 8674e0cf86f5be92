"""`linkcpp deploy`: all processes of a deployment, together giving the bytes of one, and none left behind."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from ring_models import batches, decode_all, same, tokens_of, whole

from orchestrator.engine.identity import engine_identity
from orchestrator.engine.stage import StageSizes
from orchestrator.errors import InputError, PlanError, WorkerLostError
from orchestrator.models.deployment import (
    Deployment,
    StageEntry,
    WorkerEntry,
    read_deployment,
    write_deployment,
)
from orchestrator.models.gguf import GgufFile
from orchestrator.ring.client import Ring
from orchestrator.workers.deployment import DeployedProcesses
from orchestrator.workers.machine import usable_memory

ROOT = Path(__file__).parent.parent
SIZES = StageSizes(n_ctx=256)
PARTS = (1, 33, 60)


@dataclass
class Deployed:
    """A running `linkcpp deploy` and what it said when it was ready."""

    process: subprocess.Popen[str]
    ready: dict[str, object]

    @property
    def pids(self) -> list[int]:
        return [found["pid"] for found in self.ready["processes"]]  # type: ignore[index, union-attr]


@contextlib.contextmanager
def deploy(*arguments: object) -> Iterator[Deployed]:
    command = [sys.executable, "-m", "orchestrator", "deploy", *map(str, arguments), "--json"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            yield Deployed(process, json.loads(line))
        finally:
            process.kill()


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def is_alive(pid: int) -> bool:
    try:
        # a process can be waited for when its other threads have ended too, not as soon as its first one is a zombie
        is_zombie = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        return not is_zombie or len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False


def entries(cuts: Sequence[int], address: str = "127.0.0.1:0") -> tuple[StageEntry, ...]:
    spans = itertools.pairwise(cuts)
    return tuple(StageEntry(f"stage-{i}", (span,), address, node="box") for i, span in enumerate(spans, 1))


def written(path: Path, deployment: Deployment) -> Path:
    write_deployment(path, deployment)
    return path


def open_ring(path: Path, deployment: Deployment) -> Ring:
    addresses = [stage.address for stage in deployment.stages]
    return Ring(addresses, identity=engine_identity(), model_sha256=GgufFile.open(path).header_sha256)


def oracle(path: Path) -> tuple[list[int], list]:
    with whole(path, SIZES) as context:
        tokens = tokens_of(context.model.n_vocab, sum(PARTS) + 4)
        return tokens, decode_all(context, list(batches(tokens, PARTS, context.n_batch)))


def test_a_deployment_gives_the_bytes_of_one_process(synthetic: Callable[[str], Path], tmp_path: Path) -> None:
    """Three stages and, inside the site of the second, its experts on a worker; then all of it ends on SIGTERM."""
    path = synthetic("step35")
    tokens, expected = oracle(path)
    plan = Deployment(
        model=str(path),
        context=256,
        stages=entries((0, 2, 5, 8), "10.9.8.7:7101")[:1] + entries((0, 2, 5, 8))[1:],
        workers=(WorkerEntry("experts", None, "2-4", "10.9.8.7:7201", stage="stage-2"),),
    )
    file = written(tmp_path / "d.toml", plan)
    with deploy("--local", file) as deployed:
        running = read_deployment(Path(str(deployed.ready["deployment"])))
        assert [stage.layers for stage in running.stages] == [stage.layers for stage in plan.stages]
        assert all(not stage.address.endswith(":0") for stage in running.stages)
        with open_ring(path, running) as ring:
            got = [ring.decode(batch) for batch in batches(tokens, PARTS, ring.facts.n_batch)]
        assert same(got, expected)
        pids = deployed.pids
        assert len(set(pids)) == 4
        assert all(map(is_alive, pids))
        deployed.process.send_signal(signal.SIGTERM)
        assert deployed.process.wait(20) == 0
        assert not any(map(is_alive, pids))


def test_no_process_outlives_a_deploy_that_was_killed(synthetic: Callable[[str], Path], tmp_path: Path) -> None:
    path = synthetic("llama")
    file = written(tmp_path / "d.toml", Deployment(model=str(path), context=256, stages=entries((0, 2, 4))))
    with deploy("--local", file) as deployed:
        pids = deployed.pids
        deployed.process.kill()
        deployed.process.wait()
        assert wait_until(lambda: not any(map(is_alive, pids)))


def test_a_stage_that_dies_is_started_again_at_its_address(
    synthetic: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = synthetic("llama")
    tokens, expected = oracle(path)
    monkeypatch.setattr("orchestrator.workers.child.RESTART_SECONDS", 0.0)
    plan = Deployment(model=str(path), context=256, stages=entries((0, 2, 4)))
    said: list[str] = []
    with DeployedProcesses(plan, path, threads=1) as processes:
        before = processes.running
        os.kill(before[1].pid, signal.SIGKILL)
        assert wait_until(lambda: not is_alive(before[1].pid))
        processes.tend(said.append)
        after = processes.running
        assert after[0] == before[0]
        assert after[1].address == before[1].address
        assert after[1].pid != before[1].pid
        with open_ring(path, processes.deployment) as ring:
            got = [ring.decode(batch) for batch in batches(tokens, PARTS, ring.facts.n_batch)]
        assert same(got, expected)
    assert said[0].startswith("stage-2 ended with signal 9")
    assert "runs again at" in said[1]


@pytest.mark.parametrize(
    ("cuts", "problem"),
    [
        ((0, 2, 9), "the model has 4 layers"),
        ((0, 2, 4, 6), "the model has 4 layers"),
    ],
)
def test_a_map_that_is_not_the_models_ends_in_words(
    synthetic: Callable[[str], Path], cuts: tuple[int, ...], problem: str
) -> None:
    path = synthetic("llama")
    plan = Deployment(model=str(path), context=256, stages=entries(cuts))
    processes = DeployedProcesses(plan, path, threads=1)
    with pytest.raises(WorkerLostError, match="before it was ready") as caught, processes:
        pass
    assert problem in str(caught.value)
    assert processes.running == ()


def test_layers_that_nobody_holds_are_found_when_the_ring_opens(
    synthetic: Callable[[str], Path],
) -> None:
    path = synthetic("llama")
    plan = Deployment(model=str(path), context=256, stages=entries((0, 2, 3)))
    with DeployedProcesses(plan, path, threads=1) as processes:
        ring = open_ring(path, processes.deployment)
        with pytest.raises(InputError, match="no stage holds layer 3 and the output layer"):
            ring.open()


def test_an_illegal_cut_names_the_nearest_legal_ones(synthetic: Callable[[str], Path]) -> None:
    path = synthetic("nomic-bert-moe")
    plan = Deployment(model=str(path), context=256, stages=entries((0, 2, 4)))
    with (
        pytest.raises(WorkerLostError, match="cannot be cut in front of layer 2"),
        DeployedProcesses(plan, path, threads=1),
    ):
        pass


def test_only_the_processes_of_a_machine(synthetic: Callable[[str], Path], tmp_path: Path) -> None:
    path = synthetic("llama")
    stages = (
        StageEntry("here", ((0, 2),), "127.0.0.1:0", node="box"),
        StageEntry("there", ((2, 4),), "10.9.8.7:7101", node="other"),
    )
    plan = Deployment(model=str(path), context=256, stages=stages)
    with DeployedProcesses(plan, path, node="box", threads=1) as processes:
        assert [found.name for found in processes.running] == ["here"]
        assert processes.deployment.stages[1] == stages[1]
    with pytest.raises(InputError, match="has no machine 'attic'") as caught:
        DeployedProcesses(plan, path, node="attic")
    assert caught.value.hint == "it knows box, other"
    command = [sys.executable, "-m", "orchestrator", "deploy", str(written(tmp_path / "d.toml", plan))]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "say which processes" in ended.stderr


def test_a_machine_without_the_memory_starts_nothing(synthetic: Callable[[str], Path], tmp_path: Path) -> None:
    """Under a limit of a gigabyte: refused in words before any process begins, and not by a crash."""
    path = synthetic("step35")
    plan = Deployment(model=str(path), context=1 << 20, stages=entries((0, 4, 8)))
    file = written(tmp_path / "d.toml", plan)
    limited = f"ulimit -v 1000000; exec {sys.executable} -m orchestrator deploy --local {file}"
    ended = subprocess.run(["bash", "-c", limited], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "stage-1" in ended.stderr
    assert "are missing" in ended.stderr
    assert "loading" not in ended.stderr
    processes = DeployedProcesses(plan, path)
    processes.check_memory(10**12)
    with pytest.raises(PlanError, match=r"it has 300 MB"):
        processes.check_memory(300_000_000)


def test_a_stage_whose_experts_workers_hold_needs_no_room_for_them(
    synthetic: Callable[[str], Path], tmp_path: Path
) -> None:
    """The experts count once: at the worker, as `linkcpp stage --worker` counts them itself."""
    path = synthetic("step35")
    stages = entries((0, 4, 8))

    def needed(*workers: WorkerEntry) -> int:
        processes = DeployedProcesses(Deployment(model=str(path), stages=stages, workers=workers), path)
        low, high = 0, 1 << 40
        while low < high:
            middle = (low + high) // 2
            try:
                processes.check_memory(middle)
                high = middle
            except PlanError:
                low = middle + 1
        return low

    def worker(stage: str) -> WorkerEntry:
        return WorkerEntry("experts", experts="0", layers="7", address="127.0.0.1:0", stage=stage)

    file = GgufFile.open(path)
    experts = [
        info.n_bytes
        for name, info in file.manifest.items()
        if re.match(r"blk\.[4-7]\.ffn_.*_exps\.(weight|scale)", name)
    ]
    assert needed(worker("")) - needed(worker(stages[1].name)) == sum(experts) > 0


def test_memory_is_what_the_narrowest_limit_leaves(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    groups = tmp_path / "groups"
    (groups / "a" / "b").mkdir(parents=True)
    (groups / "memory" / "x").mkdir(parents=True)
    free = usable_memory(groups=groups, own=tmp_path / "none")
    own.write_text("0::/a/b\n3:cpu:/\n")
    (groups / "a" / "b" / "memory.max").write_text("max\n")
    assert usable_memory(groups=groups, own=own) == pytest.approx(free, rel=0.2)
    (groups / "a" / "memory.max").write_text("5000\n")
    (groups / "a" / "memory.current").write_text("1000\n")
    assert usable_memory(groups=groups, own=own) == 4000
    (groups / "a" / "memory.stat").write_text("anon 200\nactive_file 300\ninactive_file 500\n")
    assert usable_memory(groups=groups, own=own) == 4800, "cached files give way"
    own.write_text("4:memory:/x\n")
    (groups / "memory" / "memory.limit_in_bytes").write_text(f"{0x7FFFFFFFFFFFF000}\n")
    assert usable_memory(groups=groups, own=own) == pytest.approx(free, rel=0.2)
    (groups / "memory" / "x" / "memory.limit_in_bytes").write_text("700\n")
    assert usable_memory(groups=groups, own=own) == 700
