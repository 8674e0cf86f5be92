"""How many steps a ring has under way: so many that its busiest stage always has one, and no more."""

from __future__ import annotations

import pytest
from fake_engine import FakeModel
from test_gateway_ring import ANSWERS, PROMPTS, ask, read, run

from orchestrator.gateway.backend import Invariance
from orchestrator.gateway.gateway import Gateway
from orchestrator.gateway.occupancy import MOST, Occupancy
from orchestrator.gateway.ring import RingBackend
from orchestrator.ring.hop import Hop
from orchestrator.ring.pipeline import Pipeline
from tests.ring_twin import N_LAYER, TwinStage, facts


@pytest.mark.parametrize(
    ("turn", "computed", "steps"),
    [
        (0.012, (0.006, 0.006), 2),  # no way at all: one for each stage
        (0.092, (0.006, 0.006), 15),
        (0.100, (0.005, 0.015), 7),  # the busiest one counts
        (0.280, (0.100, 0.100), 3),
        (9.0, (0.001, 0.001), MOST),
        (0.080, (0.0, 0.0), 2),  # nothing is known of what a stage takes
    ],
)
def test_the_busiest_stage_always_has_a_step(turn, computed, steps):
    occupancy = Occupancy(2)
    assert occupancy.steps == 2
    occupancy.observe(turn, computed)
    assert occupancy.steps == steps


def test_waiting_is_not_mistaken_for_the_way():
    occupancy = Occupancy(2)
    occupancy.observe(0.280, (0.100, 0.100))
    for queued in range(20):
        occupancy.observe(0.280 + 0.1 * queued, (0.100, 0.100))
    assert occupancy.steps == 3


def test_the_cost_of_a_step_is_that_of_the_last_ones_and_the_way_that_of_this_ring():
    occupancy = Occupancy(2)
    occupancy.observe(0.480, (0.200, 0.200))  # a prompt
    for _ in range(60):
        occupancy.observe(0.100, (0.010, 0.010))
    assert occupancy.steps == 10
    occupancy.forget()
    assert occupancy.steps == 2
    occupancy.observe(0.030, (0.010, 0.010))
    assert occupancy.steps == 3


class Line(Pipeline):
    """A pipeline whose stages take five milliseconds each on a clock of its own, and whose way takes forty."""

    def __init__(self):
        self.time = 0.0
        self.most = self.flying = 0
        ring = facts(n_sequences=7)
        ticks = iter(range(0, 10**12, 5_000_000))
        hops = [Hop(TwinStage(*span, ring), clock=lambda: next(ticks)) for span in ((0, 6), (6, N_LAYER))]
        super().__init__(hops, ring)

    def submit(self, batch):
        self.flying += 1
        self.most = max(self.most, self.flying)
        return super().submit(batch)

    def collect(self):
        self.time += 0.05
        self.flying -= 1
        return super().collect()


@pytest.mark.parametrize(
    ("invariance", "most"), [(Invariance.SEVERAL, 11), (Invariance.ONE, 11), (Invariance.NONE, 1)]
)
def test_steps_fill_a_long_way_and_answers_stay_what_they_are(invariance, most):
    line = Line()
    backend = RingBackend(line, n_stages=2, n_chunk=8, invariance=invariance, now=lambda: line.time)
    gateway = Gateway(FakeModel(), backend)
    generations = [gateway.submit(ask(prompt, 6)) for prompt in PROMPTS]
    run(gateway)
    assert [read(generation) for generation in generations] == ANSWERS
    assert line.most == most
