"""Guessing ahead over a ring: cuts travel in order with the steps, and a stage that is lost takes no answer along."""

from __future__ import annotations

import pytest
from fake_engine import FakeModel
from speculation_twin import KnowingDrafter

from orchestrator.gateway.gateway import Gateway
from orchestrator.gateway.ring import RingBackend
from orchestrator.gateway.speculation import Speculation
from tests.ring_net import Net
from tests.ring_twin import N_VOCAB, facts, twin_pipeline
from tests.test_gateway_ring import alone, ask, numbers, open_ring, read, run

PROMPTS = [numbers(3 + 5 * n, n) for n in range(5)]
COUNT = 18
ANSWERS = [alone(prompt, COUNT + 8) for prompt in PROMPTS]


def continuation(tokens, count):
    """What follows a text, for it is one of ours."""
    for prompt, answer in zip(PROMPTS, ANSWERS, strict=True):
        if list(tokens[: len(prompt)]) == prompt:
            at = len(tokens) - len(prompt)
            return answer[at : at + count]
    raise AssertionError("a text of nobody")


def speculating(backend, rate, *, adaptive=False):
    drafter = KnowingDrafter(rate, continuation=continuation, n_vocab=N_VOCAB)
    return Gateway(FakeModel(), backend, speculation=Speculation(drafter, backend.facts, depth=4, adaptive=adaptive))


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("rate", [0.0, 0.7, 1.0])
def test_streams_over_several_stages_give_the_answers_of_one_process(rate, adaptive):
    pipeline = twin_pipeline([4, 9])
    gateway = speculating(RingBackend(pipeline, n_stages=3, n_chunk=16), rate, adaptive=adaptive)
    generations = [gateway.submit(ask(prompt, COUNT)) for prompt in PROMPTS]
    run(gateway)
    assert [read(generation) for generation in generations] == [answer[:COUNT] for answer in ANSWERS]
    held = [slot.held_tokens for slot in gateway.state().slots]
    assert held == [pipeline.length(slot) for slot in range(len(held))]
    state = gateway.state()
    if not adaptive:
        assert state.drafted > 0
        assert (state.accepted == state.drafted) == (rate == 1.0)


@pytest.mark.parametrize("steps", [2, 5, 9])
def test_a_stage_that_is_lost_under_guesses_costs_no_answer(steps):
    places = Net(facts())
    try:
        ring = open_ring(places, [places.start("a", (0, 5)), places.start("b", (5, 12))])

        def reopen():
            places.start("b", (5, 12))
            ring.open()

        gateway = speculating(RingBackend(ring, n_stages=2, n_chunk=16, reopen=reopen), 0.7)
        generations = [gateway.submit(ask(prompt, COUNT)) for prompt in PROMPTS]
        for _ in range(steps):
            gateway.step()
        places.kill("b")
        run(gateway)
        assert [read(generation) for generation in generations] == [answer[:COUNT] for answer in ANSWERS]
        ring.close()
    finally:
        places.close()
