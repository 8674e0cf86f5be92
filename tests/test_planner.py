"""Plans: never above a machine's memory, found whenever one exists, even, and refused in words."""

from __future__ import annotations

from itertools import pairwise, permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import InputError, PlanError
from orchestrator.planner.cost import Measures
from orchestrator.planner.explain import Network, decide, hops, notes, ring_seconds
from orchestrator.planner.inventory import Cut, Layer, Load, ModelFacts, Node, parse_node
from orchestrator.planner.plan import RingPlan, plan_ring, plan_star

PROCESS = 3
LOAD = Load(cells=1)
GB = 10**9


def layer(weights: int, cache: int = 0, *, experts: int = 0, read: int | None = None) -> Layer:
    return Layer(weights + experts, experts, cache, 0, weights if read is None else read, experts // 10)


def model(layers: list[Layer], *, illegal: tuple[int, ...] = (), **others: int) -> ModelFacts:
    cuts = tuple(
        Cut(place, 0 if place in illegal else 16, "shared" if place in illegal else None)
        for place in range(1, len(layers))
    )
    return ModelFacts("a model", tuple(layers), cuts=cuts, **others)


def machines(*memories: int | None, speeds: tuple[float, ...] = ()) -> list[Node]:
    rates = speeds or (1.0,) * len(memories)
    return [Node(f"n{i}", f"h{i}", memory, rates[i]) for i, memory in enumerate(memories)]


def check(plan: RingPlan, nodes: list[Node], n_stages: int | None) -> None:
    """A plan holds every layer once, cuts only where that is legal, and stays within every machine's memory."""
    facts = plan.facts
    ranges = sorted(span for stage in plan.stages for span in stage.ranges)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == facts.n_layer
    assert all(before[1] == after[0] for before, after in pairwise(ranges))
    assert {place for span in ranges for place in span} <= set(facts.places)
    for node in nodes:
        assert node.memory is None or plan.memory_of(node) <= node.memory
    if n_stages is not None:
        assert len(plan.stages) == n_stages
    measures = Measures.of(facts, plan.load, PROCESS)
    assert sum(stage.weights for stage in plan.stages) == measures.weights_of(0, facts.n_layer)


def exhaustive(facts: ModelFacts, nodes: list[Node], n_stages: int | None) -> float | None:
    """The least time of the busiest machine over all orders, cuts and numbers of stages; None: none fits."""
    measures, places = Measures.of(facts, LOAD, PROCESS), facts.places
    best: float | None = None
    for count in range(1, len(nodes) + 1):
        for order in permutations(nodes, count):
            for inner in product(range(1, len(places) - 1), repeat=count - 1):
                edges = (0, *inner, len(places) - 1)
                if any(first >= last for first, last in pairwise(edges)):
                    continue
                time, spare, least = 0.0, [], 0
                for node, (first, last) in zip(order, pairwise(edges), strict=True):
                    span = places[first], places[last]
                    need = measures.weights_of(*span) + measures.cache_of(*span)
                    need += facts.output_scratch if span[1] == facts.n_layer else 0
                    each = PROCESS + facts.scratch
                    most = last - first if node.memory is None else min(last - first, (node.memory - need) // each)
                    spare.append(most)
                    least += 1
                    time = max(time, measures.cost_of(*span) / node.effective_speed)
                possible = min(spare) >= 1 and (n_stages is None or least <= n_stages <= sum(spare))
                if possible and (best is None or time < best):
                    best = time
    return best


sizes = st.integers(1, 40)
layers = st.lists(st.builds(layer, sizes, st.integers(0, 8), read=st.integers(1, 20)), min_size=2, max_size=6)


@settings(max_examples=150, deadline=None)
@given(
    layers=layers,
    memories=st.lists(st.integers(1, 150), min_size=1, max_size=3),
    speeds=st.lists(st.sampled_from((1.0, 2.0, 5.0)), min_size=3, max_size=3),
    illegal=st.sets(st.integers(1, 5), max_size=2),
    extra=st.tuples(*[st.integers(0, 10)] * 4),
    wanted=st.one_of(st.none(), st.integers(1, 6)),
    home=st.sampled_from((None, "n0")),
)
def test_a_plan_fits_and_is_the_best_of_all(layers, memories, speeds, illegal, extra, wanted, home) -> None:
    given_cuts = tuple(place for place in illegal if place < len(layers))
    facts = model(
        layers,
        illegal=given_cuts,
        input_weights=extra[0],
        output_weights=extra[1],
        scratch=extra[2],
        output_scratch=extra[3],
    )
    nodes = machines(*memories, speeds=tuple(speeds))
    expected = exhaustive(facts, nodes, wanted)
    if expected is None:
        with pytest.raises(PlanError):
            plan_ring(facts, nodes, LOAD, n_stages=wanted, home=home, process=PROCESS)
        return
    plan = plan_ring(facts, nodes, LOAD, n_stages=wanted, home=home, process=PROCESS)
    check(plan, nodes, wanted)
    if home is not None:
        assert plan.slowest >= expected * (1 - 1e-9)
    elif wanted is None:
        assert plan.slowest == pytest.approx(expected)
    else:
        assert plan.slowest >= expected * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(
    layers=st.lists(st.builds(layer, sizes, st.integers(0, 8)), min_size=3, max_size=7),
    memories=st.lists(st.integers(20, 200), min_size=2, max_size=3),
    wanted=st.one_of(st.none(), st.integers(2, 6)),
)
def test_a_sandwich_fits_too(layers, memories, wanted) -> None:
    facts = model(layers, input_weights=5, output_weights=5, scratch=1)
    nodes = machines(*memories)
    try:
        plan = plan_ring(facts, nodes, LOAD, n_stages=wanted, home="n0", sandwich=True, process=PROCESS)
    except PlanError:
        measures = Measures.of(facts, LOAD, PROCESS)
        least = (
            measures.weights_of(0, 1) + measures.cache_of(0, 1) + measures.weights_of(len(layers) - 1, len(layers))
        )
        least += measures.cache_of(len(layers) - 1, len(layers)) + PROCESS + 2
        inner = model(layers[1:-1], scratch=1)
        stages = None if wanted is None else wanted - 1
        rest = exhaustive(inner, nodes[1:], stages)
        assert least > memories[0] or rest is None, "the least share of the gateway fits and so does the rest"
        return
    check(plan, nodes, wanted)
    outer = plan.stages[0]
    assert outer.is_gateway
    assert outer.node.name == "n0"
    assert outer.ranges[0][0] == 0
    assert outer.ranges[-1][1] == facts.n_layer
    assert len(outer.ranges) == 2
    assert all(stage.node.name != "n0" for stage in plan.stages[1:])


def test_layers_are_balanced_by_what_they_cost_and_not_counted() -> None:
    """Three dense lead layers read much, MoE layers little of what they hold."""
    facts = model([layer(100, read=100) for _ in range(3)] + [layer(10, experts=290, read=10) for _ in range(30)])
    plan = plan_ring(facts, machines(None, None), LOAD, n_stages=2, process=PROCESS)
    assert [stage.ranges for stage in plan.stages] == [((0, 3),), ((3, 33),)]
    assert plan.stages[0].cost == plan.stages[1].cost


def test_sixteen_stages_on_two_machines() -> None:
    facts = model([layer(60) for _ in range(3)] + [layer(20, experts=100) for _ in range(42)])
    plan = plan_ring(facts, machines(10_000, 10_000), LOAD, n_stages=16, process=PROCESS)
    check(plan, machines(10_000, 10_000), 16)
    assert [stage.node.name for stage in plan.stages] == sorted(stage.node.name for stage in plan.stages)
    assert len(hops(plan, plan.stages[0].node)) == 2, "one way there and one back"
    costs = [stage.cost for stage in plan.stages]
    assert max(costs) <= 2 * min(costs)


def test_a_ring_ends_beside_the_gateway_where_that_costs_little() -> None:
    facts = model([layer(10) for _ in range(30)])
    nodes = machines(None, None, None)
    for home in ("n0", "n1", "n2"):
        gateway = next(node for node in nodes if node.name == home)
        plan = plan_ring(facts, nodes, LOAD, n_stages=6, home=home)
        check(plan, nodes, 6)
        assert plan.route[-1].node is gateway
        assert len(hops(plan, gateway)) == 3, "each way between two machines once"
    uneven = model([*(layer(10) for _ in range(4)), layer(100)])
    slow = machines(None, None, speeds=(1.0, 10.0))
    assert plan_ring(uneven, slow, LOAD, home="n0").route[-1].node.name == "n1", "not at the price of a slow ring"


def test_a_faster_machine_gets_more_layers() -> None:
    facts = model([layer(10) for _ in range(40)])
    plan = plan_ring(facts, machines(None, None, speeds=(3.0, 1.0)), LOAD, process=PROCESS)
    assert {stage.node.name: stage.ranges[0][1] - stage.ranges[0][0] for stage in plan.stages} == {"n0": 30, "n1": 10}


def test_a_small_machine_gets_what_fits_and_the_others_the_rest() -> None:
    """Machines of 192, 128 and 64 GB: memory decides, and no machine is asked for more than it has."""
    facts = model([layer(3 * GB, read=GB) for _ in range(120)])
    nodes = machines(192 * GB, 128 * GB, 64 * GB)
    plan = plan_ring(facts, nodes, LOAD)
    check(plan, nodes, None)
    assert len(plan.stages) == 3
    by_name = {stage.node.name: stage.memory for stage in plan.stages}
    assert by_name["n2"] <= 64 * GB < by_name["n0"]


def test_a_small_card_is_never_asked_for_more() -> None:
    """A worker of 12 GB beside a large one, in a star: its share of the experts stays below 12 GB."""
    facts = model([layer(10**8, experts=15 * 10**8) for _ in range(36)], n_expert=128)
    plan = plan_star(facts, machines(100 * GB, 12 * GB), LOAD, gateway="n0")
    shares = {share.node.name: share for share in plan.shares}
    assert shares["n1"].memory <= 12 * GB
    assert shares["n0"].memory + plan.gateway.memory <= 100 * GB
    assert sum(share.last - share.first for share in plan.shares) == 128


@settings(max_examples=100, deadline=None)
@given(
    experts=st.integers(1, 64),
    bytes_each=st.integers(1, 50),
    memories=st.lists(st.integers(0, 3000), min_size=1, max_size=4),
)
def test_a_star_fits_whenever_it_can(experts, bytes_each, memories) -> None:
    facts = model([layer(5, experts=experts * bytes_each) for _ in range(3)], n_expert=experts)
    nodes = machines(*memories)
    backbone = 15 + PROCESS
    each = 3 * bytes_each
    room = [max(0, (m - PROCESS - (backbone if i == 0 else 0)) // each) for i, m in enumerate(memories)]
    try:
        plan = plan_star(facts, nodes, LOAD, gateway="n0", process=PROCESS)
    except PlanError:
        assert memories[0] < backbone or sum(room) < experts
        return
    for node in nodes:
        taken = sum(share.memory for share in plan.shares if share.node is node)
        assert taken + (plan.gateway.memory if node.name == "n0" else 0) <= (node.memory or 0)
    assert plan.shares[0].first == 0
    assert plan.shares[-1].last == experts


def test_refusals_say_what_is_missing_where() -> None:
    facts = model([layer(10 * GB) for _ in range(10)])
    with pytest.raises(PlanError, match=r"needs 100 GB .*n0 40.0 GB, n1 40.0 GB.*: 20.1 GB are missing") as caught:
        plan_ring(facts, machines(40 * GB, 40 * GB), LOAD)
    assert "smaller --ctx" in str(caught.value.hint)
    large = model([layer(GB), layer(30 * GB), layer(GB)], illegal=(1,))
    with pytest.raises(PlanError, match=r"layers 0 to 1 cannot be cut apart and need 31.1 GB.*n0, has 20.0 GB"):
        plan_ring(large, machines(20 * GB, 20 * GB), LOAD)
    gaps = model([layer(6 * GB) for _ in range(5)])
    with pytest.raises(PlanError, match="whole layers leave gaps"):
        plan_ring(gaps, machines(11 * GB, 11 * GB, 11 * GB), LOAD)
    with pytest.raises(PlanError, match="cannot be cut into 6 stages, at most into 5"):
        plan_ring(gaps, machines(None), LOAD, n_stages=6)
    with pytest.raises(PlanError, match=r"gateway's machine n0 needs 12.2 GB .* has 10.0 GB"):
        plan_ring(gaps, machines(10 * GB, 90 * GB), LOAD, home="n0", sandwich=True)
    with pytest.raises(InputError, match="no machine is called 'x'"):
        plan_ring(gaps, machines(None, None), LOAD, home="x")


def test_a_cache_that_does_not_fit_is_refused() -> None:
    facts = model([layer(GB, cache=100_000) for _ in range(10)])
    plan_ring(facts, machines(8 * GB, 8 * GB), Load(cells=4096))
    with pytest.raises(PlanError, match=r"a context of 65536 tokens for 8 sequences .* of caches"):
        plan_ring(facts, machines(8 * GB, 8 * GB), Load(cells=65536, sequences=8))


def test_round_trips_decide_between_star_and_ring() -> None:
    """The design's figures: at 80 ms a 48-layer star takes seconds per token, at 0.1 ms it wins."""
    facts = model([layer(10**7, experts=10**9, read=10**8) for _ in range(48)], n_expert=64)
    nodes = machines(None, None, speeds=(10e9, 10e9))
    ring = plan_ring(facts, nodes, LOAD)
    star = plan_star(facts, nodes, LOAD, gateway="n0")
    far = decide(ring, star, nodes[0], Network({"n1": 0.080}))
    assert far.is_ring
    assert far.star is not None
    assert far.ring is not None
    assert far.star > 48 * 0.080
    assert far.ring == pytest.approx(ring.seconds + 0.080)
    assert "48 MoE layers, a round trip each" in far.reasons[1]
    assert far.reasons[-1].startswith("so: a ring: ")
    near = decide(ring, star, nodes[0], Network({"n1": 0.0001}))
    assert not near.is_ring
    assert near.reasons[-1].startswith("so: a star: ")
    assert decide(ring, None, nodes[0], Network({})).is_ring


def test_hops_on_one_host_cost_nothing() -> None:
    facts = model([layer(10) for _ in range(8)])
    nodes = [Node("a", "h", None, 1.0), Node("b", "h", None, 1.0)]
    plan = plan_ring(facts, nodes, LOAD, n_stages=8)
    assert hops(plan, nodes[0]) == ()
    assert ring_seconds(plan, nodes[0], Network({"b": 5.0})) == plan.seconds


def test_notes_name_hops_and_balance() -> None:
    facts = model([layer(10) for _ in range(8)], output_weights=4, input_weights=4)
    nodes = machines(None, None)
    text = "\n".join(notes(plan_ring(facts, nodes, LOAD), nodes[0]))
    assert "2 hops between machines (1 round trip), 16 B of activations" in text
    assert "logits come back over the wire" in text
    text = "\n".join(notes(plan_ring(facts, nodes, LOAD, home="n0", sandwich=True), nodes[0]))
    assert "no logits cross the wire" in text
    assert "2 hops between machines (1 round trip), 32 B of activations" in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=box", Node("a", "box")),
        ("a=10.0.0.1:64GB", Node("a", "10.0.0.1", 64 * GB)),
        ("a=[fd00::1]:2GiB", Node("a", "fd00::1", 2 * 2**30)),
        ("a=[fd00::1]", Node("a", "fd00::1")),
    ],
)
def test_machines_are_read(text: str, expected: Node) -> None:
    assert parse_node(text) == expected


@pytest.mark.parametrize("text", ["", "a", "=h", "a=", "a=h:lots", "a=fd00::1", "a=[fd00::1", "a=[::1]x", "a=:1GB"])
def test_what_is_no_machine_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        parse_node(text)
