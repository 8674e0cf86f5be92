"""What `linkcpp plan` writes and shows: deployments, tables, JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from orchestrator.cli.app import Terminal
from orchestrator.models.deployment import Deployment, GatewayEntry, StageEntry, WorkerEntry, format_layers
from orchestrator.planner.explain import Decision, Network, size_text, time_text
from orchestrator.planner.inventory import Node
from orchestrator.planner.plan import RingPlan, StarPlan
from orchestrator.transport.base import HostPort

RING_COLUMNS: Final = ("stage", "machine", "layers", "weights", "caches", "memory", "share", "time")
STAR_COLUMNS: Final = ("process", "machine", "experts", "weights", "memory", "share")


def ring_deployment(
    path: Path, plan: RingPlan, reserve: Sequence[Node], n_ctx: int, port: int, threads: int | None
) -> tuple[Deployment, list[str]]:
    """Give every stage an address, and the machines in reserve what they have room for; and say so.

    That is a copy of every stage where all fit, which can take a place at once, and else a process without layers
    that loads those of a stage that is lost.
    """
    ports: dict[str, int] = {}
    stages: list[StageEntry] = []
    gateway = GatewayEntry()
    for stage in plan.stages:
        if stage.is_gateway:
            gateway = GatewayEntry(stage.ranges, stage.node.name, threads)
            continue
        address = _address(stage.node, ports, port)
        stages.append(StageEntry(f"stage-{len(stages) + 1}", stage.ranges, address, stage.node.name, threads))
    spares: list[StageEntry] = []
    lines = []
    outer = [stage for stage in plan.stages if not stage.is_gateway]

    def reserved(node: Node, layers: tuple[tuple[int, int], ...], memory: str | None = None) -> StageEntry:
        name = f"spare-{len(spares) + 1}"
        return StageEntry(name, layers, _address(node, ports, port), node.name, threads, memory)

    for node in reserve:
        if node.memory is None or sum(stage.memory for stage in outer) <= node.memory:
            for stage in outer:
                spares.append(reserved(node, stage.ranges))
            lines.append(f"{node.name} stands in for {', '.join(entry.name for entry in stages)}")
            continue
        fitting = [entry.name for entry, stage in zip(stages, outer, strict=True) if stage.memory <= node.memory]
        if fitting:
            spares.append(reserved(node, (), f"{node.memory // 1_000_000}MB"))
            lines.append(f"{node.name} stands in for {' or '.join(fitting)}, and loads its layers once it is lost")
        else:
            lines.append(f"{node.name} stands in for no stage: its memory is too small for any")
    deployment = Deployment(str(path), n_ctx, plan.load.sequences, gateway, tuple(stages), tuple(spares))
    return deployment, lines


def star_deployment(path: Path, plan: StarPlan, n_ctx: int, port: int, threads: int | None) -> Deployment:
    """Give every worker an address."""
    ports: dict[str, int] = {}
    workers = tuple(
        WorkerEntry(
            f"worker-{index}",
            f"{share.first}-{share.last - 1}",
            None,
            _address(share.node, ports, port),
            share.node.name,
            threads,
        )
        for index, share in enumerate(plan.shares, 1)
    )
    entry = GatewayEntry((), plan.gateway.node.name, threads)
    return Deployment(str(path), n_ctx, plan.load.sequences, entry, (), (), workers)


def _address(node: Node, ports: dict[str, int], first: int) -> str:
    """Give the next port of a machine; any free one where it is this machine alone."""
    loopback = node.host in {"localhost", "::1"} or node.host.startswith("127.")
    port = 0 if loopback else ports.get(node.host, first)
    ports[node.host] = port + 1
    return str(HostPort(node.host, port))


def show(terminal: Terminal, plan: RingPlan | StarPlan) -> None:
    """Print who holds what."""
    if isinstance(plan, StarPlan):
        backbone = plan.gateway
        rows = [("backbone", backbone.node.name, "", size_text(backbone.weights), size_text(backbone.memory), "")]
        rows += [
            (
                f"worker-{index}",
                share.node.name,
                f"{share.first}-{share.last - 1}",
                size_text(share.weights),
                size_text(share.memory),
                f"{(share.last - share.first) / plan.facts.n_expert:.1%}",
            )
            for index, share in enumerate(plan.shares, 1)
        ]
        terminal.table(f"{plan.facts.name} as a star", STAR_COLUMNS, rows)
        return
    total = sum(stage.cost for stage in plan.stages) or 1
    names = _stage_names(plan)
    ring_rows = [
        (
            name,
            stage.node.name,
            format_layers(stage.ranges),
            size_text(stage.weights),
            size_text(stage.cache),
            size_text(stage.memory),
            f"{stage.cost / total:.1%}",
            time_text(stage.seconds),
        )
        for name, stage in zip(names, plan.stages, strict=True)
    ]
    terminal.table(f"{plan.facts.name} as a ring", RING_COLUMNS, ring_rows)


def _stage_names(plan: RingPlan) -> list[str]:
    number, names = 0, []
    for stage in plan.stages:
        number += not stage.is_gateway
        names.append("gateway" if stage.is_gateway else f"stage-{number}")
    return names


def as_json(
    plan: RingPlan | StarPlan, decision: Decision, lines: Sequence[str], network: Network
) -> dict[str, object]:
    """Return all of a plan; sizes in bytes, times in seconds."""
    shown: dict[str, object] = {
        "model": plan.facts.name,
        "kind": "ring" if isinstance(plan, RingPlan) else "star",
        "context": plan.load.cells,
        "sequences": plan.load.sequences,
        "seconds_per_token": decision.ring if isinstance(plan, RingPlan) else decision.star,
        "ring_seconds": decision.ring,
        "star_seconds": decision.star,
        "round_trips": dict(network.round_trips),
        "explanation": list(lines),
    }
    if isinstance(plan, StarPlan):
        shown["backbone"] = {"machine": plan.gateway.node.name, "memory": plan.gateway.memory}
        shown["workers"] = [
            {"machine": s.node.name, "experts": [s.first, s.last], "weights": s.weights, "memory": s.memory}
            for s in plan.shares
        ]
        return shown
    total = sum(stage.cost for stage in plan.stages) or 1
    shown["stages"] = [
        {
            "name": name,
            "machine": stage.node.name,
            "layers": [list(span) for span in stage.ranges],
            "weights": stage.weights,
            "caches": stage.cache,
            "overhead": stage.overhead,
            "memory": stage.memory,
            "share": stage.cost / total,
            "seconds": stage.seconds,
        }
        for name, stage in zip(_stage_names(plan), plan.stages, strict=True)
    ]
    shown["cuts"] = [
        {"layer": cut.layer, "bytes_per_token": cut.bytes_per_token, "reason": cut.reason} for cut in plan.facts.cuts
    ]
    return shown
