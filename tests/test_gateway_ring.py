"""The gateway over a ring: the answers of one process, with stages that are lost and come back."""

from __future__ import annotations

import numpy as np
import pytest
from fake_engine import FakeModel

from orchestrator.errors import LinkcppError, StageLostError
from orchestrator.gateway.backend import Invariance
from orchestrator.gateway.gateway import Gateway
from orchestrator.gateway.ring import RingBackend
from orchestrator.gateway.sampling import SamplingParameters
from orchestrator.gateway.scheduler import Limits
from orchestrator.gateway.sequence import GenerationRequest, TextDelta
from orchestrator.ring.client import Ring
from orchestrator.ring.steps import one_sequence
from tests.ring_net import IDENTITY, Net, net
from tests.ring_twin import N_VOCAB, facts, twin_pipeline

__all__ = ["net"]

GREEDY = SamplingParameters(temperature=0)
CUTTABLE = [pytest.param(True, id="attention"), pytest.param(False, id="recurrent")]


def ask(prompt, count=8):
    return GenerationRequest(tuple(prompt), count, GREEDY, ignore_end=True)


def numbers(count, seed):
    return [int(n) for n in np.random.Generator(np.random.PCG64(seed)).integers(0, N_VOCAB, count)]


def read(generation):
    return [t.token for event in generation if isinstance(event, TextDelta) for t in event.tokens]


def alone(prompt, count):
    """Greedy decoding in one process, written out."""
    pipeline = twin_pipeline([])
    tokens = list(prompt)
    logits = pipeline.decode(one_sequence(tokens, 0))
    while True:
        tokens.append(int(logits[-1].argmax()))
        if len(tokens) == len(prompt) + count:
            return tokens[len(prompt) :]
        logits = pipeline.decode(one_sequence(tokens[-1:], len(tokens) - 1))


def run(gateway):
    while gateway.step():
        pass


PROMPTS = [numbers(3 + 5 * n, n) for n in range(7)]
ANSWERS = [alone(prompt, 6) for prompt in PROMPTS]


@pytest.mark.parametrize("invariance", list(Invariance))
@pytest.mark.parametrize("cuttable", CUTTABLE)
def test_streams_over_several_stages_give_the_answers_of_one_process(cuttable, invariance):
    pipeline = twin_pipeline([4, 9], facts(cuttable=cuttable))
    backend = RingBackend(pipeline, n_stages=3, n_chunk=8, invariance=invariance)
    gateway = Gateway(FakeModel(), backend, limits=Limits(saved_bytes=1000))
    generations = [gateway.submit(ask(prompt, 6)) for prompt in PROMPTS]
    run(gateway)
    assert [read(generation) for generation in generations] == ANSWERS
    again = [
        gateway.submit(ask([*prompt, *answer, 1, 2], 3)) for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)
    ]
    run(gateway)
    assert [read(g) for g in again] == [alone([*p, *a, 1, 2], 3) for p, a in zip(PROMPTS, ANSWERS, strict=True)]


def test_a_shared_prefix_is_copied_in_all_stages():
    pipeline = twin_pipeline([4, 9])
    gateway = Gateway(FakeModel(), RingBackend(pipeline, n_stages=3, n_chunk=8))
    shared = numbers(45, 1)
    first = gateway.submit(ask([*shared, 1], 4))
    run(gateway)
    fed = [hop.tokens for hop in pipeline.hops]
    second = gateway.submit(ask([*shared, 2, 3], 4))
    run(gateway)
    assert [hop.tokens - before for hop, before in zip(pipeline.hops, fed, strict=True)] == [2 + 3] * 3
    assert [read(first), read(second)] == [alone([*shared, 1], 4), alone([*shared, 2, 3], 4)]


def test_who_leaves_during_a_prompt_stops_the_stages():
    pipeline = twin_pipeline([4, 9])
    gateway = Gateway(FakeModel(), RingBackend(pipeline, n_stages=3, n_chunk=8))
    leaving = gateway.submit(ask(numbers(60, 1), 4))
    gateway.step()
    leaving.cancel()
    run(gateway)
    assert pipeline.hops[-1].tokens <= 24
    assert gateway.state().slots[0].request is None
    late = gateway.submit(ask(PROMPTS[3], 6))
    run(gateway)
    assert read(late) == ANSWERS[3]


def open_ring(net, addresses):
    ring = Ring(addresses, identity=IDENTITY, model_sha256="m", timeout=5.0, connector=net.connector)
    ring.open()
    return ring


@pytest.mark.parametrize("invariance", list(Invariance))
@pytest.mark.parametrize("cuttable", CUTTABLE)
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_a_lost_stage_that_comes_back_costs_no_answer(steps, cuttable, invariance):
    ring_facts = facts(cuttable=cuttable)
    places = Net(ring_facts)
    try:
        addresses = [places.start("a", (0, 5)), places.start("b", (5, 12))]
        ring = open_ring(places, addresses)
        lost = []

        def reopen():
            lost.append(ring.broken)
            places.start("b", (5, 12))
            ring.open()

        backend = RingBackend(ring, n_stages=2, n_chunk=8, invariance=invariance, reopen=reopen)
        gateway = Gateway(FakeModel(), backend)
        generations = [gateway.submit(ask(prompt, 6)) for prompt in PROMPTS]
        for _ in range(steps):
            gateway.step()
        places.kill("b")
        run(gateway)
        assert [type(error) for error in lost] == [StageLostError]
        assert [read(generation) for generation in generations] == ANSWERS
        late = gateway.submit(ask([*PROMPTS[2], *ANSWERS[2], 5], 4))
        run(gateway)
        assert read(late) == alone([*PROMPTS[2], *ANSWERS[2], 5], 4)
        ring.close()
    finally:
        places.close()


def test_a_stage_that_stays_lost_ends_requests_with_its_name_and_nothing_hangs(net):
    addresses = [net.start("a", (0, 5)), net.start("b", (5, 12))]
    ring = open_ring(net, addresses)
    gateway = Gateway(FakeModel(), RingBackend(ring, n_stages=2, n_chunk=8, reopen=ring.open))
    running, waiting = gateway.submit(ask(PROMPTS[4], 20)), gateway.submit(ask(PROMPTS[5], 20))
    for _ in range(4):
        gateway.step()
    net.kill("b")
    run(gateway)
    for generation in (running, waiting):
        with pytest.raises(LinkcppError, match="b"):
            read(generation)
    late = gateway.submit(ask([1, 2], 2))
    run(gateway)
    with pytest.raises(LinkcppError, match="b"):
        read(late)
    assert gateway.state().problem
    ring.close()
