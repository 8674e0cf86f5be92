"""A model's own prediction layers as a drafter: the same answers, over one process and a star, whatever they guess."""

from __future__ import annotations

import numpy as np
import pytest
from predicting import CASES, make_predicting
from serve_process import run_linkcpp

from orchestrator.errors import ComputeError, InputError
from orchestrator.gateway.backbone import open_backbone
from orchestrator.gateway.drafters.mtp import MOST_WAITING, MtpDrafter
from orchestrator.gateway.drafters.opening import SpeculationMode, SpeculationSettings
from orchestrator.gateway.sampling import SamplingParameters
from orchestrator.gateway.sequence import GenerationRequest, TextDelta
from orchestrator.gateway.speculation import Seen, Wanted
from orchestrator.workers.local import LocalWorkers

GREEDY = SamplingParameters(temperature=0)
SAMPLED = SamplingParameters(temperature=0.8, top_p=0.95, repeat_penalty=1.1, seed=11)
OFF = SpeculationSettings(SpeculationMode.OFF)
MTP = SpeculationSettings(SpeculationMode.MTP, depth=4)
PROMPTS = [
    tuple(int(token) for token in np.random.Generator(np.random.PCG64(seed)).integers(3, 250, length))
    for seed, length in enumerate((5, 90, 1))
]


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    folder = tmp_path_factory.mktemp("predicting")

    def made(architecture, count=1, sure=False):
        path = folder / f"{architecture}-{count}-{sure}.gguf"
        return path if path.exists() else make_predicting(architecture, count, path, sure=sure)

    return made


def ask(gateway, prompts, sampling=GREEDY, count=40):
    """Ask all at once; return tokens and log probabilities of the answers."""
    request = [GenerationRequest(p, count, sampling, top_logprobs=0, ignore_end=True) for p in prompts]
    generations = [gateway.submit(one) for one in request]
    return [
        [(r.token, r.logprob) for event in one if isinstance(event, TextDelta) for r in event.tokens]
        for one in generations
    ]


def run_all(backbone, speculation, sampling=GREEDY):
    with backbone.gateway(reuse_prefix=False, speculate=speculation) as gateway:
        return ask(gateway, PROMPTS, sampling), gateway.state()


@pytest.mark.parametrize("sure", [False, True], ids=["random", "sure"])
@pytest.mark.parametrize(("architecture", "count"), CASES)
def test_answers_have_the_same_bytes(make, architecture, count, sure):
    with open_backbone(make(architecture, count, sure), n_ctx=256, n_sequences=3) as backbone:
        for sampling in (GREEDY, SAMPLED):
            expected, _ = run_all(backbone, OFF, sampling)
            found, state = run_all(backbone, MTP, sampling)
            assert found == expected
            assert state.drafted > 0
            if sure and sampling is GREEDY:
                assert 0 < state.accepted < state.drafted
                assert state.generated_tokens / state.turns > 1.5


@pytest.mark.parametrize(("architecture", "count"), CASES)
def test_answers_over_a_star_have_the_same_bytes(make, architecture, count):
    path = make(architecture, count, True)
    with open_backbone(path, n_ctx=256, n_sequences=3) as backbone:
        expected, _ = run_all(backbone, OFF)
        _, alone = run_all(backbone, MTP)
    with LocalWorkers(path, 2) as workers, open_backbone(path, workers.addresses, n_ctx=256, n_sequences=3) as star:
        found, state = run_all(star, MTP)
    assert found == expected
    assert (state.drafted, state.accepted) == (alone.drafted, alone.accepted)
