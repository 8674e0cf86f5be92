"""`linkcpp plan`: lay a model over machines and write that down as a deployment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import click

from orchestrator.cli.app import Terminal
from orchestrator.cli.plan_report import as_json as report
from orchestrator.cli.plan_report import ring_deployment, show, star_deployment
from orchestrator.engine.facts import load_of, model_facts
from orchestrator.engine.measure import measure_pieces
from orchestrator.errors import InputError, PlanError
from orchestrator.models.catalog import resolve_model
from orchestrator.models.deployment import is_loopback, write_deployment
from orchestrator.planner.cost import with_times
from orchestrator.planner.explain import Network, decide, notes
from orchestrator.planner.inventory import DEFAULT_SPEED, Load, ModelFacts, Node, parse_node
from orchestrator.planner.plan import PROCESS_BYTES, RingPlan, StarPlan, plan_ring, plan_star
from orchestrator.transport.base import HostPort
from orchestrator.transport.round_trip import measure_round_trip
from orchestrator.types import Boundary
from orchestrator.workers.machine import usable_memory


@click.command("plan")
@click.argument("model")
@click.option(
    "--node", "nodes", multiple=True, required=True, metavar="NAME=HOST[:MEMORY]", help="A machine; may be repeated."
)
@click.option("--stages", type=click.IntRange(1), default=None, help="Stages in all. [default: one per machine]")
@click.option("--ctx", "n_ctx", type=click.IntRange(1), default=4096, help="Tokens of a sequence.")
@click.option("--sequences", type=click.IntRange(1, 256), default=1, help="Sequences at once.")
@click.option("--gateway", "home", default=None, metavar="NAME", help="The gateway's machine. [default: the first]")
@click.option("--sandwich", is_flag=True, help="The gateway holds the first and last layers: no logits on the wire.")
@click.option(
    "--kind", type=click.Choice(["auto", "ring", "star"]), default="auto", help="Auto weighs both by round trips."
)
@click.option(
    "--boundary",
    type=click.Choice([boundary.value for boundary in Boundary]),
    default=Boundary.F32.value,
    show_default=True,
    help="What the stages of a ring hand on; f16 must pass the gate.",
)
@click.option("--rtt", "rtts", multiple=True, metavar="NAME=MS", help="Round trip to a machine; may be repeated.")
@click.option("--speed", "speeds", multiple=True, metavar="NAME=GB/S", help="What a machine reads; may be repeated.")
@click.option("--spare", "spares", multiple=True, metavar="NAME=HOST[:MEMORY]", help="A machine in reserve.")
@click.option("--measure", is_flag=True, help="Time the layers here, and the way to each machine.")
@click.option("--threads", type=click.IntRange(1, 1024), default=None, help="Threads of each process. [default: all]")
@click.option("--port", type=click.IntRange(1, 65535), default=7101, help="First port on each machine.")
@click.option("--output", "-o", type=click.Path(path_type=Path), default=None, help="Write the deployment here.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
@click.pass_obj
def command(
    terminal: Terminal,
    model: str,
    nodes: tuple[str, ...],
    stages: int | None,
    n_ctx: int,
    sequences: int,
    home: str | None,
    sandwich: bool,
    kind: str,
    boundary: str,
    rtts: tuple[str, ...],
    speeds: tuple[str, ...],
    spares: tuple[str, ...],
    measure: bool,
    threads: int | None,
    port: int,
    output: Path | None,
    as_json: bool,
) -> None:
    """Lay MODEL (a name or a GGUF file) over machines: no machine above its memory, all as busy as they are fast.

    The model is cut only where its architecture allows it, and no weights are read. MEMORY is what the plan may fill
    of a machine, like 48GB; without it a machine takes whatever it gets, and this one (localhost) what it has.
    """
    rounds = Boundary(boundary) is not Boundary.F32
    if rounds and kind == "star":
        raise click.UsageError("--boundary is for what stages hand on, and a star has none")
    path = resolve_model(model).resolve()
    load = load_of(n_ctx, sequences)
    facts = model_facts(path, load)
    machines = [parse_node(text) for text in nodes]
    reserve = [parse_node(text) for text in spares]
    rates = {name: 1e9 * value for name, value in _named(speeds, "--speed", [*machines, *reserve]).items()}
    own = DEFAULT_SPEED
    if measure:
        with terminal.progress("timing the layers") as progress:
            times = measure_pieces(path, facts, n_threads=threads or 1, progress=progress)
        facts, own = with_times(facts, times)
    machines = _with_own_memory(machines)
    # A machine that nobody measured counts as fast as this one.
    machines = [replace(node, speed=rates.get(node.name, own if measure or rates else None)) for node in machines]
    gateway = next((node for node in machines if node.name == (home or machines[0].name)), None)
    if gateway is None:
        raise InputError(f"no machine is called {home!r}", hint="give the gateway's machine as a --node too")
    network = Network(_round_trips(terminal, machines, gateway, rtts, port, measure=measure))
    if kind == "auto" and (stages is not None or sandwich or rounds):
        kind = "ring"  # whoever speaks of stages wants a ring
    ring, star = _plans(facts, machines, load, gateway, stages=stages, sandwich=sandwich, kind=kind)
    decision = decide(ring, star, gateway, network, asked=kind != "auto")
    chosen: RingPlan | StarPlan | None = ring if decision.is_ring else star
    if chosen is None:
        raise InputError("there is no plan")
    lines = [*decision.reasons]
    if isinstance(chosen, RingPlan):
        lines += notes(chosen, gateway)
        deployment, more = ring_deployment(path, chosen, reserve, n_ctx, port, threads)
        deployment = replace(deployment, boundary=Boundary(boundary))
        if rounds and deployment.n_ranges > 1:
            more.append(
                f"boundaries travel as {boundary}: `linkcpp onboard MODEL --boundary {boundary} "
                f"--stages {deployment.n_ranges}` must have passed on the gateway's machine"
            )
        lines += more
    else:
        deployment = star_deployment(path, chosen, n_ctx, port, threads)
    if output is not None:
        write_deployment(output, deployment, lines)
    if as_json:
        terminal.json(report(chosen, decision, lines, network))
        return
    show(terminal, chosen)
    for line in lines:
        terminal.print(line)
    if output is not None:
        terminal.print(f"written to {output}; on each machine: linkcpp deploy --node NAME {output}", style="bold")


def _with_own_memory(machines: Sequence[Node]) -> list[Node]:
    """Give machines that are this one, and for which no memory was named, equal parts of what it has."""
    own = [node for node in machines if node.memory is None and is_loopback(f"{node.host}:0")]
    part = usable_memory() // len(own) if own else 0
    return [replace(node, memory=part) if node in own else node for node in machines]


def _plans(
    facts: ModelFacts,
    machines: Sequence[Node],
    load: Load,
    gateway: Node,
    *,
    stages: int | None,
    sandwich: bool,
    kind: str,
) -> tuple[RingPlan | None, StarPlan | None]:
    """Make the plans to choose from; raise what stands in the way where there is none."""
    ring = star = None
    trouble: InputError | None = None
    if kind != "star":
        try:
            ring = plan_ring(
                facts,
                machines,
                load,
                n_stages=stages,
                home=gateway.name,
                sandwich=sandwich,
                process=PROCESS_BYTES,
            )
        except PlanError as error:
            trouble = error
    if kind != "ring":
        try:
            star = plan_star(facts, machines, load, gateway=gateway.name)
        except InputError as error:
            trouble = trouble or error
    if ring is None and star is None and trouble is not None:
        raise trouble
    return ring, star


def _round_trips(
    terminal: Terminal, machines: Sequence[Node], gateway: Node, given: Sequence[str], port: int, *, measure: bool
) -> Mapping[str, float]:
    """Return seconds to each machine, given or measured; zero where neither."""
    found = {name: value / 1e3 for name, value in _named(given, "--rtt", machines).items()}
    for node in machines if measure else ():
        if node.name in found or node.host == gateway.host:
            continue
        seconds = measure_round_trip(HostPort(node.host, port))
        if seconds is None:
            terminal.error(f"warning: {node.name} ({node.host}) does not answer: its round trip counts as none")
        else:
            found[node.name] = seconds
    return found


def _named(texts: Sequence[str], option: str, machines: Sequence[Node]) -> dict[str, float]:
    """Read NAME=NUMBER options."""
    names = {node.name for node in machines}
    found: dict[str, float] = {}
    for text in texts:
        name, _, number = text.partition("=")
        try:
            found[name] = float(number)
        except ValueError:
            raise InputError(f"{option} {text!r} is not NAME=NUMBER") from None
        if name not in names:
            raise InputError(f"{option} {text!r}: no machine is called {name!r}")
        if not 0 <= found[name] < float("inf") or (option == "--speed" and found[name] == 0):
            raise InputError(f"{option} {text!r}: the number must be positive")
    return found
