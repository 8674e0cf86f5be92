"""`linkcpp plan` from a model file to a deployment file."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from orchestrator.cli.app import main
from orchestrator.engine.facts import load_of, model_facts
from orchestrator.engine.measure import measure_pieces
from orchestrator.errors import LinkcppError, PlanError
from orchestrator.models.deployment import StageEntry, read_deployment
from orchestrator.planner.cost import with_times
from orchestrator.transport.base import HostPort
from orchestrator.transport.round_trip import measure_round_trip
from orchestrator.types import Boundary


def plan(*arguments: object) -> Result:
    result = CliRunner().invoke(main, ["plan", *map(str, arguments)], standalone_mode=False)
    if isinstance(result.exception, LinkcppError):
        raise result.exception
    assert result.exception is None, result.output
    return result


def test_sixteen_stages_of_a_shape_faithful_model(synthetic_like: Callable[[str, str], Path], tmp_path: Path) -> None:
    path = synthetic_like("step35", "step-3.7-flash")
    target = tmp_path / "deployment.toml"
    result = plan(
        *(path, "--stages", 16, "--node", "a=10.0.0.1:3GB", "--node", "b=10.0.0.2:3GB"),
        *("--ctx", 512, "--sequences", 8, "--rtt", "b=80", "-o", target, "--json"),
    )
    shown = json.loads(result.stdout)
    assert shown["kind"] == "ring"
    assert len(shown["stages"]) == 16
    spans = [stage["layers"][0] for stage in shown["stages"]]
    assert [span[0] for span in spans] == [0, *(span[1] for span in spans[:-1])]
    assert spans[-1][1] == 45
    lengths = {last - first for first, last in spans}
    assert len(lengths) > 1, "dense lead layers and MoE layers cost differently"
    assert shown["ring_seconds"] == pytest.approx(0.080, rel=0.1), "one round trip, and little to compute"
    assert sum(stage["share"] for stage in shown["stages"]) == pytest.approx(1)
    assert any("1 round trip" in line for line in shown["explanation"])
    deployment = read_deployment(target)
    assert deployment.context == 512
    assert deployment.sequences == 8
    assert [list(span) for stage in deployment.stages for span in stage.layers] == spans
    assert len({stage.address for stage in deployment.stages}) == 16
    assert deployment.nodes in {("a", "b"), ("b", "a")}
    assert target.read_text().startswith("# as a ring of 16 stages: ")


def test_the_table_and_the_words(synthetic: Callable[[str], Path], tmp_path: Path) -> None:
    path, target = synthetic("step35"), tmp_path / "d.toml"
    text = plan(path, "--node", "a=127.0.0.1", "--node", "b=127.0.0.1", "--stages", 4, "-o", target).stdout
    assert "stage-4" in text
    assert "so: a ring, as asked" in text
    assert f"linkcpp deploy --node NAME {target}" in text.replace("\n", " ")
    assert all(stage.address == "127.0.0.1:0" for stage in read_deployment(target).stages)


def test_a_lossy_boundary_is_written_with_what_it_needs(synthetic: Callable[[str], Path], tmp_path: Path) -> None:
    path, target = synthetic("step35"), tmp_path / "d.toml"
    near = [path, "--node", "a=10.0.0.1", "--node", "b=10.0.0.2", "-o", target]
    plan(*near, "--boundary", "f16")
    found = read_deployment(target)
    assert found.boundary is Boundary.F16
    assert found.stages, "whoever speaks of boundaries wants a ring"
    assert f"`linkcpp onboard MODEL --boundary f16 --stages {found.n_ranges}` must have passed" in target.read_text()
    plan(*near, "--kind", "ring")
    assert "boundary" not in target.read_text()
    refused = CliRunner().invoke(main, ["plan", *map(str, near), "--boundary", "f16", "--kind", "star"])
    assert refused.exit_code == 2
    assert "a star has none" in refused.stderr


def test_a_sandwich_and_spares(synthetic: Callable[[str], Path], tmp_path: Path) -> None:
    path, target = synthetic("qwen35moe"), tmp_path / "d.toml"
    plan(
        *(path, "--node", "home=10.0.0.1", "--node", "b=10.0.0.2", "--stages", 3, "--sandwich", "-o", target),
        *("--spare", "c=10.0.0.3", "--spare", "tiny=10.0.0.4:1MB"),
    )
    found = read_deployment(target)
    assert found.gateway.node == "home"
    assert found.gateway.layers[0][0] == 0
    assert found.gateway.layers[1][1] == 8
    assert [stage.node for stage in found.stages] == ["b", "b"]
    assert [spare.layers for spare in found.spares] == [stage.layers for stage in found.stages]
    assert {spare.node for spare in found.spares} == {"c"}
    assert "tiny stands in for no stage: its memory is too small for any" in target.read_text()


def test_a_machine_in_reserve_without_room_for_all_stages_loads_what_is_lost(
    synthetic: Callable[[str], Path], tmp_path: Path
) -> None:
    path, target = synthetic("qwen35moe"), tmp_path / "d.toml"
    options = (path, "--node", "a=10.0.0.1", "--node", "b=10.0.0.2", "--stages", 2, "-o", target, "--json")
    shown = json.loads(plan(*options).stdout)
    room = sum(stage["memory"] for stage in shown["stages"]) - 1_000_000
    plan(*options, "--spare", f"c=10.0.0.3:{room}")
    found = read_deployment(target)
    assert found.spares == (StageEntry("spare-1", (), "10.0.0.3:7101", "c", memory=f"{room // 1_000_000}MB"),)
    assert "c stands in for stage-1 or stage-2, and loads its layers once it is lost" in target.read_text()


def test_near_machines_become_a_star(synthetic: Callable[[str], Path], tmp_path: Path) -> None:
    path, target = synthetic("qwen3moe"), tmp_path / "d.toml"
    result = plan(path, "--node", "a=10.0.0.1", "--node", "b=10.0.0.2", "--kind", "star", "-o", target, "--json")
    assert json.loads(result.stdout)["kind"] == "star"
    found = read_deployment(target)
    assert [worker.experts for worker in found.workers] == ["0-7", "8-15"]
    assert found.gateway.node == "a"
    # with its true round trips the planner weighs both
    shown = json.loads(plan(path, "--node", "a=10.0.0.1", "--node", "b=10.0.0.2", "--rtt", "b=80", "--json").stdout)
    assert shown["kind"] == "ring"
    assert shown["star_seconds"] > 3 * shown["ring_seconds"]


def test_layers_are_timed(synthetic: Callable[[str], Path]) -> None:
    path = synthetic("qwen35moe")
    facts = model_facts(path, load_of(256))
    times = measure_pieces(path, facts)
    assert list(times) == [(layer, layer + 1) for layer in range(8)]
    assert all(0 < seconds < 5 for seconds in times.values())
    measured, speed = with_times(facts, times)
    assert measured.measured
    total = sum(layer.read for layer in measured.layers)
    assert total / speed == pytest.approx(sum(times.values()), rel=0.01)
    for number, layer in enumerate(measured.layers):
        assert layer.read / speed == pytest.approx(times[number, number + 1], rel=0.01)
        assert layer.weights == facts.layers[number].weights
    text = plan(path, "--node", "a=127.0.0.1", "--node", "b=127.0.0.1", "--stages", 2, "--measure").stdout
    assert "shares of the computation come from measured times" in text


def test_a_round_trip_is_measured_whether_somebody_listens_or_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        taken = measure_round_trip(HostPort("127.0.0.1", port))
    refused = measure_round_trip(HostPort("127.0.0.1", port))
    assert taken is not None
    assert refused is not None
    assert max(taken, refused) < 1
    assert measure_round_trip(HostPort("no-such-host.invalid", 1), timeout=0.2, tries=1) is None


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--node", "a"], "'a' is no machine"),
        (["--node", "a=h", "--node", "a=g"], "two machines are called 'a'"),
        (["--node", "a=h", "--gateway", "b"], "no machine is called 'b'"),
        (["--node", "a=h", "--rtt", "b=3"], "no machine is called 'b'"),
        (["--node", "a=h", "--rtt", "a=x"], "is not NAME=NUMBER"),
        (["--node", "a=h", "--speed", "a=0"], "the number must be positive"),
        (["--node", "a=h", "--stages", "9"], "cannot be cut into 9 stages, at most into 8"),
        (["--node", "a=h", "--sandwich"], "need stages on others in between"),
        (["--node", "a=h:1MB"], "are missing"),
        (["--node", "a=h:300MB", "--ctx", "10000000"], "of caches"),
    ],
)
def test_what_cannot_be_planned_is_said(synthetic: Callable[[str], Path], arguments: list[str], problem: str) -> None:
    with pytest.raises(LinkcppError) as caught:
        plan(synthetic("step35"), *arguments)
    assert problem in str(caught.value)


def test_a_model_that_cannot_be_cut_stays_on_one_machine(synthetic: Callable[[str], Path]) -> None:
    path = synthetic("nomic-bert-moe")
    assert len(json.loads(plan(path, "--node", "a=h", "--kind", "ring", "--json").stdout)["stages"]) == 1
    with pytest.raises(PlanError, match="at most into 1"):
        plan(path, "--node", "a=h", "--stages", 2)
