"""Sixteen conversations at once on the default model: each text is the one that it has alone, byte for byte."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from orchestrator.gateway.backbone import open_backbone
from orchestrator.gateway.ring_backbone import open_ring
from orchestrator.gateway.sampling import SamplingParameters
from orchestrator.gateway.scheduler import Limits
from orchestrator.gateway.sequence import GenerationRequest, TextDelta
from orchestrator.gateway.template import ChatMessage, ChatTemplate
from orchestrator.models.deployment import Deployment, StageEntry
from orchestrator.models.sources import get_model
from orchestrator.workers.deployment import DeployedProcesses
from orchestrator.workers.local import LocalWorkers

pytestmark = pytest.mark.slow

GREEDY = SamplingParameters(temperature=0)
N_CTX = 256
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
MARKERS = [f"{first}{last}" for first in ("Zar", "Quib", "Mox", "Fley") for last in ("dun", "wick", "pol", "rast")]
MARKERS += [marker[::-1].capitalize() for marker in MARKERS]


def texts(gateway, prompts, lengths=LENGTHS):
    """Submit all prompts at once and return their texts."""
    generations = [
        gateway.submit(GenerationRequest(tuple(prompt), length, GREEDY, ignore_end=True))
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    return ["".join(e.text for e in generation if isinstance(e, TextDelta)) for generation in generations]


@contextmanager
def sixteen_slots(kind, path):
    """Give a model with sixteen slots: in one process, as a star of two workers, as a ring of two stages."""
    if kind == "one process":
        with open_backbone(path, n_ctx=N_CTX, n_sequences=16) as backbone:
            yield backbone
    elif kind == "star":
        with (
            LocalWorkers(path, 2) as local,
            open_backbone(path, local.addresses, n_ctx=N_CTX, n_sequences=16) as backbone,
        ):
            yield backbone
    else:
        stages = tuple(
            StageEntry(f"stage-{first}", ((first, first + 15),), "127.0.0.1:0")  # 30 layers
            for first in (0, 15)
        )
        plan = Deployment(str(path), N_CTX, 16, stages=stages)
        with DeployedProcesses(plan, path, threads=1) as processes, open_ring(path, processes.deployment) as ring:
            yield ring


KINDS = pytest.mark.parametrize("kind", ["one process", "star", "ring"])


@pytest.fixture(scope="module")
def path():
    return get_model("smollm2-moe")


@pytest.fixture(scope="module")
def render(path):
    """Turn the messages of a conversation, the user's first, into a prompt."""
    with open_backbone(path, n_ctx=N_CTX) as backbone:
        template = ChatTemplate(backbone.model.chat_template)

        def prompt(*messages):
            roles = ["user", "assistant"] * len(messages)
            text = template.render([ChatMessage(*one) for one in zip(roles, messages, strict=False)])
            return backbone.model.tokenize(text, add_special=False, parse_special=True)

        yield prompt


@pytest.fixture(scope="module")
def alone(path):
    """Answer each prompt when it has the engine to itself, one after the other in one slot without reuse."""
    with open_backbone(path, n_ctx=N_CTX) as backbone, backbone.gateway(reuse_prefix=False) as gateway:
        yield lambda prompts, lengths: [
            text
            for prompt, length in zip(prompts, lengths, strict=True)
            for text in texts(gateway, [prompt], [length])
        ]


@pytest.fixture(scope="module")
def prompts(render):
    return [render(question) for question in QUESTIONS]


@pytest.fixture(scope="module")
def answers(alone, prompts):
    return alone(prompts, LENGTHS)


def test_the_conversations_differ(answers):
    assert len(set(answers)) == 16


@KINDS
def test_sixteen_streams_equal_each_alone(path, prompts, answers, kind):
    with sixteen_slots(kind, path) as backbone, backbone.gateway() as gateway:
        assert texts(gateway, prompts) == answers
        state = gateway.state()
        # A ring shares its answers out among its stages, so that each has work.
        assert state.sequences / state.steps > (2 if kind == "ring" else 8)
        order = range(15, -1, -1)  # the other way round, over caches that hold the others
        again = texts(gateway, [prompts[n] for n in order], [LENGTHS[n] for n in order])
        assert again == [answers[n] for n in order]


@pytest.fixture(scope="module")
def secrets(render, alone):
    """Two turns of 32 conversations, each with a secret word: first prompts, answers, second prompts, answers."""
    openings = [
        f"The secret word of this conversation is {marker}. Keep it well, because I am going to ask you for it later "
        f"on, and tell it to nobody else. But first of all: {question} Be brief, please, and say nothing more."
        for marker, question in zip(MARKERS, QUESTIONS * 2, strict=True)
    ]
    first = [render(opening) for opening in openings]
    said = alone(first, [6] * 32)
    second = [render(opening, text, "What is the secret word?") for opening, text in zip(openings, said, strict=True)]
    return first, said, second, alone(second, [10] * 32)


@KINDS
def test_no_conversation_hears_of_another_when_slots_are_taken_away(path, secrets, kind):
    """32 conversations take turns in 16 slots; some of what they lose is saved, the rest is computed again."""
    first, said, second, told = secrets
    assert sum(marker in text for marker, text in zip(MARKERS, told, strict=True)) > 16  # it is worth listening
    # Of about 100 tokens with 23 kB each, eleven conversations fit.
    limits = Limits(saved_bytes=25_000_000)
    with sixteen_slots(kind, path) as backbone, backbone.gateway(limits=limits) as gateway:
        found = []
        for prompts, length in ((first, 6), (second, 10)):
            for half in (slice(16), slice(16, 32)):
                found += texts(gateway, prompts[half], [length] * 16)
        state = gateway.state()
    for marker, text in zip(MARKERS * 2, found, strict=True):
        assert not [other for other in MARKERS if other != marker and other in text]
    assert found == [*said, *told]
    assert 0 < state.saved < 16
    assert 0 < state.cached_tokens < sum(map(len, [*first, *second]))
