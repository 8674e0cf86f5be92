"""Lay a model over machines as a ring or as a star: never above a machine's memory, as even as their speeds. PURE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from orchestrator.errors import InputError, PlanError
from orchestrator.planner.cost import Measures
from orchestrator.planner.explain import shortage, star_shortage
from orchestrator.planner.inventory import Load, ModelFacts, Node
from orchestrator.planner.search import Block, Search

PROCESS_BYTES = 150_000_000
"""What a stage process takes before it holds anything: interpreter, engine, thread stacks."""

_WORTH_A_HOP = 1.05
"""How much longer the busiest machine may take for a ring that ends beside the gateway."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One process of a ring: where it runs, its ranges of layers (first, last), and what it takes in bytes."""

    node: Node
    ranges: tuple[tuple[int, int], ...]
    weights: int
    cache: int
    overhead: int
    cost: int  # bytes that one token reads
    is_gateway: bool = False

    @property
    def memory(self) -> int:
        """All of it."""
        return self.weights + self.cache + self.overhead

    @property
    def seconds(self) -> float:
        """Time of one token here."""
        return self.cost / self.node.effective_speed


@dataclass(frozen=True, slots=True)
class RingPlan:
    """Stages in the order of their first layers; the gateway's own ranges, if any, are the stage that says so."""

    facts: ModelFacts
    load: Load
    stages: tuple[Stage, ...]

    @property
    def seconds(self) -> float:
        """Time that one token is computed, all stages together."""
        return sum(stage.seconds for stage in self.stages)

    @property
    def slowest(self) -> float:
        """Time of the busiest machine, which is what many sequences wait for."""
        times: dict[str, float] = {}
        for stage in self.stages:
            times[stage.node.name] = times.get(stage.node.name, 0.0) + stage.seconds
        return max(times.values())

    @property
    def route(self) -> tuple[Stage, ...]:
        """The stages in the order in which a token passes them; one with two ranges comes twice."""
        pieces = [(first, stage) for stage in self.stages for first, _ in stage.ranges]
        return tuple(stage for _, stage in sorted(pieces, key=lambda piece: piece[0]))

    def memory_of(self, node: Node) -> int:
        """What all stages of a machine take."""
        return sum(stage.memory for stage in self.stages if stage.node.name == node.name)


@dataclass(frozen=True, slots=True)
class Share:
    """Experts ``first`` to ``last`` - 1 of every MoE layer on one machine."""

    node: Node
    first: int
    last: int
    weights: int
    overhead: int

    @property
    def memory(self) -> int:
        """All of it."""
        return self.weights + self.overhead


@dataclass(frozen=True, slots=True)
class StarPlan:
    """A backbone on the gateway's machine and experts on all of them."""

    facts: ModelFacts
    load: Load
    gateway: Stage
    shares: tuple[Share, ...]

    @property
    def seconds(self) -> float:
        """Time that one token is computed: the backbone, and of each layer the machine with most to read."""
        read = sum(layer.expert_read for layer in self.facts.layers)
        shares = [
            read * (share.last - share.first) / self.facts.n_expert / share.node.effective_speed
            for share in self.shares
        ]
        return self.gateway.seconds + max(shares)


def plan_ring(
    facts: ModelFacts,
    nodes: Sequence[Node],
    load: Load,
    *,
    n_stages: int | None = None,
    home: str | None = None,
    sandwich: bool = False,
    process: int = PROCESS_BYTES,
) -> RingPlan:
    """Lay the layers over the machines; ``n_stages`` None makes one stage on each machine that is used.

    ``home`` names the machine of the gateway: where it costs little, the last layers are there, which saves a hop and
    the way of the logits. With ``sandwich`` the gateway's own process holds the first and the last layers and the
    output, and counts as one stage. Raises :class:`PlanError` in words where nothing fits.
    """
    _check(nodes)
    units = len(facts.places) - 1
    if n_stages is not None and n_stages < 1:
        raise InputError("a ring has at least one stage")
    if n_stages is not None and n_stages > units:
        why = f": it has {facts.n_layer} layers" + (", and not every cut is possible" * (units < facts.n_layer))
        raise PlanError(f"{facts.name} cannot be cut into {n_stages} stages, at most into {units}{why}")
    measures = Measures.of(facts, load, process)
    search = Search(measures)
    gateway = next((node for node in nodes if node.name == home), None)
    if gateway is None and (home is not None or sandwich):
        raise InputError(f"no machine is called {home!r}", hint="give the gateway's machine as a --node too")
    others = [node for node in nodes if node is not gateway]
    if gateway is None or not sandwich:
        blocks = search.ways(nodes, 0, n_stages).get(units)
        if blocks is None:
            raise shortage(measures, nodes, n_stages)
        if gateway is not None and len(blocks) > 1 and blocks[-1].node is not gateway:
            blocks = _ending_at_home(search, gateway, others, n_stages, blocks) or blocks
        return RingPlan(facts, load, _stages(search, measures, blocks))
    if not others or n_stages == 1:
        raise InputError("first and last layers on the gateway's machine need stages on others in between")
    return RingPlan(facts, load, _around(search, measures, gateway, others, n_stages))


def plan_star(
    facts: ModelFacts, nodes: Sequence[Node], load: Load, *, gateway: str, process: int = PROCESS_BYTES
) -> StarPlan:
    """Put the backbone on the gateway's machine and shares of the experts on all machines, by speed and memory.

    Raises :class:`PlanError` where the backbone or the experts do not fit, :class:`InputError` for a dense model.
    """
    _check(nodes)
    home = next((node for node in nodes if node.name == gateway), None)
    if home is None:
        raise InputError(f"no machine is called {gateway!r}", hint="give the gateway's machine as a --node too")
    if not facts.n_expert or not facts.n_expert_layers:
        raise InputError(f"{facts.name} has no experts to share out: only a ring is possible")
    measures = Measures.of(facts, load, process)
    experts = sum(layer.expert_weights for layer in facts.layers)
    span = 0, facts.n_layer
    backbone = Stage(
        home,
        (span,),
        weights=measures.weights_of(*span) - experts,
        cache=measures.cache_of(*span),
        overhead=measures.overhead_of((span,)),
        cost=measures.cost_of(*span) - sum(layer.expert_read for layer in facts.layers),
        is_gateway=True,
    )
    each = -(-experts // facts.n_expert)  # bytes of one expert number, in all layers
    room = [
        facts.n_expert
        if node.memory is None
        else max(0, (node.memory - process - (backbone.memory if node is home else 0)) // max(each, 1))
        for node in nodes
    ]
    if (home.memory is not None and backbone.memory > home.memory) or sum(room) < facts.n_expert:
        raise star_shortage(facts, nodes, backbone.memory, home, each, room)
    counts = _proportional(facts.n_expert, [node.effective_speed for node in nodes], room)
    shares, first = [], 0
    for node, count in zip(nodes, counts, strict=True):
        if count:
            shares.append(Share(node, first, first + count, count * each, process))
            first += count
    return StarPlan(facts, load, backbone, tuple(shares))


def _check(nodes: Sequence[Node]) -> None:
    if not nodes:
        raise InputError("a plan needs at least one machine", hint="--node NAME=HOST[:MEMORY]")
    names = [node.name for node in nodes]
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise InputError(f"two machines are called {double!r}")


def _ending_at_home(
    search: Search, gateway: Node, others: Sequence[Node], n_stages: int | None, blocks: Sequence[Block]
) -> tuple[Block, ...] | None:
    """Find a way as good as ``blocks``, or nearly, that ends on the gateway's machine."""
    last = len(search.places) - 1
    bound = max(map(search.seconds, blocks)) * _WORTH_A_HOP
    best: tuple[float, tuple[Block, ...]] | None = None
    for end, before in search.ways(others, 0, None).items():
        if end == last or search.need[end, last] > search.limit(gateway, 1):
            continue
        found = (*before, Block(gateway, end, last, 1))
        spread = found if n_stages is None else search.spread(found, n_stages)
        times = list(map(search.seconds, found))
        square = sum(time * time for time in times)
        if spread is not None and max(times) <= bound and (best is None or square < best[0]):
            best = square, spread
    return None if best is None else best[1]


def _around(
    search: Search, measures: Measures, gateway: Node, others: Sequence[Node], n_stages: int | None
) -> tuple[Stage, ...]:
    """Find which first and last layers the gateway's process takes, and lay those between over the others."""
    best = _sandwich(search, measures, gateway, others, n_stages, thoroughly=False)
    best = best or _sandwich(search, measures, gateway, others, n_stages, thoroughly=True)
    if best is None:
        raise shortage(measures, [gateway, *others], n_stages, gateway=gateway)
    begin, end, blocks = best
    ranges = (0, search.places[begin]), (search.places[end], measures.facts.n_layer)
    outer = _stage(measures, gateway, ranges, is_gateway=True)
    return (outer, *_stages(search, measures, blocks))


def _sandwich(
    search: Search,
    measures: Measures,
    gateway: Node,
    others: Sequence[Node],
    n_stages: int | None,
    *,
    thoroughly: bool,
) -> tuple[int, int, tuple[Block, ...]] | None:
    last = len(search.places) - 1
    inner = None if n_stages is None else n_stages - 1
    best: tuple[tuple[float, float], int, int, tuple[Block, ...]] | None = None
    for begin in range(1, last - 1):
        room = search.limit(gateway, 1) - measures.facts.scratch - search.need[0, begin]
        if room < search.need[last - 1, last]:
            break
        for end, blocks in search.ways(others, begin, inner, thoroughly=thoroughly).items():
            if end < last and search.need[end, last] <= room:
                own = float(search.cost[0, begin] + search.cost[end, last]) / gateway.effective_speed
                times = [own, *map(search.seconds, blocks)]
                key = max(times), sum(time * time for time in times)
                if best is None or key < best[0]:
                    best = key, begin, end, blocks
    return None if best is None else best[1:]


def _stages(search: Search, measures: Measures, blocks: Sequence[Block]) -> tuple[Stage, ...]:
    stages = []
    for block in blocks:
        edges = search.edges(block)
        stages += [_stage(measures, block.node, (span,)) for span in pairwise(edges)]
    return tuple(stages)


def _stage(measures: Measures, node: Node, ranges: tuple[tuple[int, int], ...], *, is_gateway: bool = False) -> Stage:
    return Stage(
        node,
        ranges,
        weights=sum(measures.weights_of(*span) for span in ranges),
        cache=sum(measures.cache_of(*span) for span in ranges),
        overhead=measures.overhead_of(ranges),
        cost=sum(measures.cost_of(*span) for span in ranges),
        is_gateway=is_gateway,
    )


def _proportional(total: int, speeds: Sequence[float], room: Sequence[int]) -> list[int]:
    """Share out ``total`` by speed, nobody above its room: one by one to whoever is done first."""
    counts = [0] * len(speeds)
    for _ in range(total):
        free = [index for index, count in enumerate(counts) if count < room[index]]
        counts[min(free, key=lambda index: (counts[index] + 1) / speeds[index])] += 1
    return counts
