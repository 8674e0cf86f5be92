"""Say in words why a plan is as it is, or why there is none. PURE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from orchestrator.errors import PlanError
from orchestrator.planner.cost import Measures
from orchestrator.planner.inventory import ModelFacts, Node

if TYPE_CHECKING:
    from orchestrator.planner.plan import RingPlan, Stage, StarPlan


@dataclass(frozen=True, slots=True)
class Network:
    """Round trips in seconds from the gateway's machine to each machine by name; missing: the same machine."""

    round_trips: Mapping[str, float]

    def round_trip(self, first: Node, second: Node) -> float:
        """Round trip between two machines: the longer of their ways to the gateway, nothing on one host."""
        if first.host == second.host:
            return 0.0
        return max(self.round_trips.get(first.name, 0.0), self.round_trips.get(second.name, 0.0))


@dataclass(frozen=True, slots=True)
class Decision:
    """Seconds per token of both ways, None where one is not possible, and why."""

    ring: float | None
    star: float | None
    reasons: tuple[str, ...]

    @property
    def is_ring(self) -> bool:
        """Whether the ring is to be preferred."""
        return self.star is None or (self.ring is not None and self.ring <= self.star)


def hops(plan: RingPlan, gateway: Node) -> tuple[tuple[Node, Node], ...]:
    """Return the ways between machines of one token: from the gateway's machine through all stages and back."""
    route = [gateway, *(stage.node for stage in plan.route), gateway]
    return tuple((first, second) for first, second in pairwise(route) if first.host != second.host)


def ring_seconds(plan: RingPlan, gateway: Node, network: Network) -> float:
    """Time of one token of one sequence: all stages' computation, and half a round trip for each hop."""
    return plan.seconds + sum(network.round_trip(*hop) / 2 for hop in hops(plan, gateway))


def star_seconds(plan: StarPlan, network: Network) -> float:
    """Time of one token: the computation, and for each MoE layer the round trip to the farthest worker."""
    farthest = max(network.round_trip(plan.gateway.node, share.node) for share in plan.shares)
    return plan.seconds + plan.facts.n_expert_layers * farthest


def decide(
    ring: RingPlan | None, star: StarPlan | None, gateway: Node, network: Network, *, asked: bool = False
) -> Decision:
    """Weigh a ring against a star (of which at least one is there) and say in words what decides.

    ``asked`` says that one of them is missing because the other was asked for.
    """
    reasons: list[str] = []
    ring_time = star_time = None
    if ring is not None:
        ways = hops(ring, gateway)
        ring_time = ring_seconds(ring, gateway, network)
        waits = ring_time - ring.seconds
        reasons.append(
            f"as a ring of {_count(len(ring.stages), 'stage')}: {time_text(ring_time)} per token, of which "
            f"{time_text(ring.seconds)} computation and {time_text(waits)} on the way "
            f"({_count(len(ways), 'hop')} between machines, half a round trip each)"
        )
    if star is not None:
        star_time = star_seconds(star, network)
        waits = star_time - star.seconds
        reasons.append(
            f"as a star of {_count(len(star.shares), 'worker')}: {time_text(star_time)} per token, of which "
            f"{time_text(star.seconds)} computation (experts are read in parallel) and {time_text(waits)} on the way "
            f"({_count(star.facts.n_expert_layers, 'MoE layer')}, a round trip each)"
        )
    decision = Decision(ring_time, star_time, ())
    if ring_time is None or star_time is None:
        kind, other = ("a ring", "a star") if ring is not None else ("a star", "a ring")
        verdict = f"{kind}, as asked" if asked else f"{kind}, because {other} is not possible"
    else:
        better, worse = sorted((ring_time, star_time))
        kind = "a ring" if decision.is_ring else "a star"
        times = f"{worse / better:.1f} times as fast" if better > 0 else "faster"
        verdict = f"{kind}: {times} per token at these round trips"
    return Decision(ring_time, star_time, (*reasons, f"so: {verdict}"))


def notes(plan: RingPlan, gateway: Node) -> tuple[str, ...]:
    """Say what a reader of a ring's table will ask: balance, what crosses between machines, what was assumed."""
    facts, lines = plan.facts, []
    times: dict[str, float] = {}
    for stage in plan.stages:
        times[stage.node.name] = times.get(stage.node.name, 0.0) + stage.seconds
    if len(times) > 1:
        busiest = max(times, key=lambda name: times[name])
        mean = sum(times.values()) / len(times)
        lines.append(
            f"{busiest} is the busiest machine with {times[busiest] / sum(times.values()):.0%} of the time: "
            f"{times[busiest] / mean - 1:.0%} above an even share"
        )
    ways = hops(plan, gateway)
    if ways:
        lines.append(
            f"a token takes {_count(len(ways), 'hop')} between machines ({_round_trips(len(ways))}), "
            f"{size_text(_crossing(plan))} of activations"
        )
    if any(stage.is_gateway for stage in plan.stages):
        lines.append("the gateway holds the first and the last layers and the output: no logits cross the wire")
    elif plan.route[-1].node.host != gateway.host:
        lines.append("the logits come back over the wire; --sandwich keeps the output in the gateway")
    basis = "measured times" if facts.measured else "the bytes that a token reads of each layer"
    assumed = [
        node.name for node in {stage.node.name: stage.node for stage in plan.stages}.values() if not node.speed
    ]
    speed = f", all at an assumed {size_text(int(plan.stages[0].node.effective_speed))}/s" if assumed else ""
    lines.append(f"shares of the computation come from {basis}{speed}")
    return tuple(lines)


def shortage(
    measures: Measures, nodes: Sequence[Node], n_stages: int | None, *, gateway: Node | None = None
) -> PlanError:
    """Make the error that says how much is missing where."""
    facts = measures.facts
    n = facts.n_layer
    weights, caches = measures.weights_of(0, n), measures.cache_of(0, n)
    count = n_stages or 1
    overhead = count * (measures.process + facts.scratch) + facts.output_scratch
    need = weights + caches + overhead
    parts = f"{size_text(weights)} of weights, {size_text(caches)} of caches, {size_text(overhead)} for processes"
    room = sum(node.memory or 0 for node in nodes)
    machines = ", ".join(f"{node.name} {size_text(node.memory or 0)}" for node in nodes)
    context = f"a context of {measures.load.cells} tokens for {_count(measures.load.sequences, 'sequence')}"
    smaller = "give more memory, more machines, a smaller --ctx or fewer --sequences"
    if need > room and all(node.memory is not None for node in nodes):
        return PlanError(
            f"{facts.name} with {context} needs {size_text(need)} ({parts}); the machines have {size_text(room)} "
            f"({machines}): {size_text(need - room)} are missing",
            hint=smaller,
        )
    stage = measures.process + facts.scratch
    largest = max(nodes, key=lambda node: float("inf") if node.memory is None else node.memory)
    for first, last in pairwise(facts.places):
        piece = measures.weights_of(first, last) + measures.cache_of(first, last) + stage
        piece += facts.output_scratch if last == n else 0
        if largest.memory is not None and piece > largest.memory:
            cut = f"{_layers(first, last)} {'needs' if last == first + 1 else 'cannot be cut apart and need'}"
            return PlanError(
                f"{cut} {size_text(piece)} in one process; the largest machine, {largest.name}, has "
                f"{size_text(largest.memory)}: {size_text(piece - largest.memory)} are missing there",
                hint=smaller,
            )
    if gateway is not None and gateway.memory is not None:
        first, last = facts.places[1], facts.places[-2]
        own = measures.weights_of(0, first) + measures.weights_of(last, n)
        own += (
            measures.cache_of(0, first) + measures.cache_of(last, n) + measures.overhead_of(((0, first), (last, n)))
        )
        if own > gateway.memory:
            return PlanError(
                f"the gateway's machine {gateway.name} needs {size_text(own)} for the first and last layers and the "
                f"output, and has {size_text(gateway.memory)}: {size_text(own - gateway.memory)} are missing there",
                hint="leave out --sandwich, or give it more memory",
            )
    stages = "" if n_stages is None else f" in {_count(n_stages, 'stage')}"
    return PlanError(
        f"{facts.name}{stages} needs {size_text(need)} ({parts}) and the machines have {size_text(room)} "
        f"({machines}), but whole layers leave gaps: no order of machines holds all of them",
        hint=smaller,
    )


def star_shortage(
    facts: ModelFacts, nodes: Sequence[Node], backbone: int, home: Node, each: int, room: Sequence[int]
) -> PlanError:
    """Make the error for a star: the backbone is too large for its machine, or experts are left over."""
    if home.memory is not None and backbone > home.memory:
        return PlanError(
            f"the backbone needs {size_text(backbone)} and {home.name} has {size_text(home.memory)}: "
            f"{size_text(backbone - home.memory)} are missing there",
            hint="lay it out as a ring, or put the gateway on a larger machine",
        )
    places = ", ".join(f"{node.name} {count}" for node, count in zip(nodes, room, strict=True))
    left = facts.n_expert - sum(room)
    return PlanError(
        f"of {facts.n_expert} experts per layer ({size_text(each)} each, in all layers) {sum(room)} fit ({places}): "
        f"{left} are left over, {size_text(left * each)} are missing",
        hint="give more memory or more machines",
    )


def memory_line(stage: Stage) -> str:
    """Say what a stage takes."""
    return f"{size_text(stage.weights)} weights, {size_text(stage.cache)} caches, {size_text(stage.overhead)} besides"


def size_text(count: int) -> str:
    """Write bytes in decimal units with three digits."""
    if count < 1000:
        return f"{count} B"
    value, unit = float(count), "B"
    for unit in ("kB", "MB", "GB", "TB"):  # noqa: B007 - the unit at which the loop ends is the result
        value /= 1000
        if value < 999.5:
            break
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"


def time_text(seconds: float) -> str:
    """Write a time in the unit that suits it."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.0f} us"


def _crossing(plan: RingPlan) -> int:
    """Bytes of activations per token that go from one machine to another inside the ring."""
    pieces = sorted((first, stage.node.host) for stage in plan.stages for first, _ in stage.ranges)
    return sum(plan.facts.crossing(place) for (_, before), (place, host) in pairwise(pieces) if host != before)


def _round_trips(count: int) -> str:
    whole, half = divmod(count, 2)
    text = f"{whole}{' and a half' if half else ''}" if whole else "half"
    return f"{text} round trip{'s' if whole > 1 or (whole and half) else ''}"


def _layers(first: int, last: int) -> str:
    return f"layer {first}" if last == first + 1 else f"layers {first} to {last - 1}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
