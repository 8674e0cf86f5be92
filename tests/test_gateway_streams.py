"""Sixteen conversations at once on the default model: each text is the one that it has alone, byte for byte."""

from __future__ import annotations

import pytest

from orchestrator.gateway.backbone import open_backbone
from orchestrator.gateway.sampling import SamplingParameters
from orchestrator.gateway.sequence import GenerationRequest, TextDelta
from orchestrator.gateway.template import ChatMessage, ChatTemplate
from orchestrator.models.sources import get_model
from orchestrator.workers.local import LocalWorkers

pytestmark = pytest.mark.slow

GREEDY = SamplingParameters(temperature=0)
QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about rain.",
    "Name three prime numbers.",
    "Translate 'good morning' into Spanish.",
    "Why is the sky blue?",
    "List the planets of the solar system.",
    "What does HTTP stand for?",
    "Give me a recipe for pancakes.",
    "Who wrote Hamlet?",
    "Explain recursion in one sentence.",
    "What is 17 plus 25?",
    "Suggest a name for a cat.",
    "How many legs does a spider have?",
    "Write a Python function that adds two numbers.",
    "What is the opposite of 'cold'?",
    "Tell me a short joke.",
]
LENGTHS = [12 + 3 * n for n in range(16)]


def texts(gateway, prompts, lengths=LENGTHS):
    """Submit all prompts at once and return their texts."""
    generations = [
        gateway.submit(GenerationRequest(tuple(prompt), length, GREEDY, ignore_end=True))
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    return ["".join(e.text for e in generation if isinstance(e, TextDelta)) for generation in generations]


@pytest.fixture(scope="module")
def path():
    return get_model("smollm2-moe")


@pytest.fixture(scope="module")
def prompts(path):
    with open_backbone(path, n_ctx=256) as backbone:
        template = ChatTemplate(backbone.model.chat_template)
        rendered = [template.render([ChatMessage("user", question)]) for question in QUESTIONS]
        return [backbone.model.tokenize(text, add_special=False, parse_special=True) for text in rendered]


@pytest.fixture(scope="module")
def alone(path, prompts):
    """The text of each conversation when it has the engine to itself, one after the other in one slot."""
    with open_backbone(path, n_ctx=256) as backbone, backbone.gateway(reuse_prefix=False) as gateway:
        found = []
        for prompt, length in zip(prompts, LENGTHS, strict=True):
            request = GenerationRequest(tuple(prompt), length, GREEDY, ignore_end=True)
            found.append("".join(e.text for e in gateway.submit(request) if isinstance(e, TextDelta)))
        return found


def test_the_conversations_differ(alone):
    assert len(set(alone)) == 16


@pytest.mark.parametrize("workers", [0, 2])
def test_sixteen_streams_equal_each_alone(path, prompts, alone, workers):
    if not workers:
        with open_backbone(path, n_ctx=256, n_sequences=16) as backbone, backbone.gateway() as gateway:
            assert texts(gateway, prompts) == alone
            state = gateway.state()
            assert state.sequences / state.steps > 8
        return
    with (
        LocalWorkers(path, workers) as local,
        open_backbone(path, local.addresses, n_ctx=256, n_sequences=16) as backbone,
        backbone.gateway() as gateway,
    ):
        assert texts(gateway, prompts) == alone
        order = range(15, -1, -1)  # the other way round, over caches that hold the others
        again = texts(gateway, [prompts[n] for n in order], [LENGTHS[n] for n in order])
        assert again == [alone[n] for n in order]
