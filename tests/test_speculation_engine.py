"""Speculation with the real engine: the greedy and the sampled answer of every drafter is the one without.

The default model is a Mixture of Experts made from a dense one, which is its draft model here.
"""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest
from serve_process import get, post, run_linkcpp, running
from speculation_prompts import COPY, PROMPTS, QUICK

from orchestrator.engine.model import Model
from orchestrator.errors import ComputeError, InputError
from orchestrator.gateway.backbone import open_backbone
from orchestrator.gateway.drafters.model import ModelDrafter, common_vocabulary
from orchestrator.gateway.drafters.opening import SpeculationMode, SpeculationSettings
from orchestrator.gateway.ring_backbone import open_ring
from orchestrator.gateway.sampling import SamplingParameters
from orchestrator.gateway.sequence import GenerationRequest, TextDelta
from orchestrator.gateway.template import ChatMessage, ChatTemplate
from orchestrator.models.deployment import Deployment, StageEntry
from orchestrator.models.sources import get_model
from orchestrator.workers.deployment import DeployedProcesses
from orchestrator.workers.local import LocalWorkers

GREEDY = SamplingParameters(temperature=0)
SAMPLED = SamplingParameters(temperature=0.8, top_p=0.95, repeat_penalty=1.1, seed=11)
N_CTX = 512
COUNT = 24


@pytest.fixture(scope="module")
def path():
    return get_model("smollm2-moe")


@pytest.fixture(scope="module")
def dense():
    return get_model("smollm2")


def tokens_of(model, texts):
    template = ChatTemplate(model.chat_template)
    return [
        tuple(model.tokenize(template.render([ChatMessage("user", text)]), add_special=False, parse_special=True))
        for text in texts
    ]


def settings(mode, dense=None, **options):
    return SpeculationSettings(SpeculationMode(mode), dense if mode in ("draft", "auto") else None, **options)


def ask(gateway, prompts, sampling=GREEDY, count=COUNT):
    """Ask all at once; return the tokens, texts and ends of the answers."""
    generations = [gateway.submit(GenerationRequest(prompt, count, sampling)) for prompt in prompts]
    answers = []
    for generation in generations:
        *deltas, end = list(generation)
        records = [record.token for delta in deltas if isinstance(delta, TextDelta) for record in delta.tokens]
        answers.append((records, "".join(delta.text for delta in deltas), end.reason, end.usage.completion_tokens))
    return answers


@pytest.fixture(scope="module")
def backbone(path):
    with open_backbone(path, n_ctx=N_CTX, n_sequences=2) as opened:
        yield opened


@pytest.fixture(scope="module")
def alone(backbone):
    """Answers without speculation, one at a time, each asked for once."""
    known = {}

    def answer(text, sampling=GREEDY, count=COUNT):
        key = text, sampling, count
        if key not in known:
            with backbone.gateway(reuse_prefix=False) as gateway:
                (known[key],) = ask(gateway, tokens_of(backbone.model, [text]), sampling, count)
        return known[key]

    return answer


def test_there_are_fifty_prompts_of_four_kinds():
    assert len(set(PROMPTS)) == 50
    assert {kind for kind, _ in PROMPTS} == {"chat", "code", "copy", "other"}


def compare(backbone, alone, entries, speculation, sampling=GREEDY):
    texts = [text for _, text in entries]
    with backbone.gateway(reuse_prefix=False, speculate=speculation) as gateway:
        found = ask(gateway, tokens_of(backbone.model, texts), sampling)
        state = gateway.state()
    for text, answer in zip(texts, found, strict=True):
        assert answer == alone(text, sampling), text
    return state


MODES = pytest.mark.parametrize("mode", ["ngram", "draft", "auto"])


@MODES
def test_answers_are_the_same_with_every_drafter(backbone, alone, dense, mode):
    state = compare(backbone, alone, QUICK[::2], settings(mode, dense))
    if mode == "draft":  # its dense twin: the same model but for the numbers' last bits
        assert state.generated_tokens / state.turns >= 3


def test_sampled_answers_are_the_same(backbone, alone, dense):
    compare(backbone, alone, QUICK[4:6], settings("draft", dense, depth=4), SAMPLED)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("mode", "sampling"),
    [
        pytest.param("ngram", GREEDY, id="ngram"),
        pytest.param("draft", GREEDY, id="draft"),
        pytest.param("auto", GREEDY, id="auto"),
        pytest.param("draft", SAMPLED, id="draft, sampled"),
    ],
)
def test_answers_to_all_prompts_are_the_same_with_every_drafter(backbone, alone, dense, mode, sampling):
    compare(backbone, alone, PROMPTS, settings(mode, dense), sampling)


def test_the_text_itself_gives_many_tokens_of_a_step_where_it_is_copied(backbone):
    with backbone.gateway(reuse_prefix=False, speculate=settings("ngram")) as gateway:
        ask(gateway, tokens_of(backbone.model, [COPY[3], COPY[10]]), count=60)
        state = gateway.state()
    assert state.generated_tokens / state.turns >= 2.5


@contextmanager
def ring_of_two(path):
    stages = tuple(StageEntry(f"stage-{first}", ((first, first + 15),), "127.0.0.1:0") for first in (0, 15))
    plan = Deployment(str(path), N_CTX, 2, stages=stages)
    with DeployedProcesses(plan, path, threads=1) as processes, open_ring(path, processes.deployment) as ring:
        yield ring


@contextmanager
def star_of_two(path):
    with (
        LocalWorkers(path, 2) as workers,
        open_backbone(path, workers.addresses, n_ctx=N_CTX, n_sequences=2) as star,
    ):
        yield star


@pytest.mark.slow
@pytest.mark.parametrize("opened", [star_of_two, ring_of_two])
def test_answers_over_other_machines_are_the_same_with_every_drafter(opened, path, alone, dense):
    with opened(path) as backbone:
        for mode in ("ngram", "draft", "auto"):
            compare(backbone, alone, QUICK, settings(mode, dense))


# --- synthetic models ---------------------------------------------------------------------------------------------


def repeated(seed, count=60):
    """A prompt that repeats itself, so that there is something to guess."""
    part = [5 + (seed * 31 + n * 17) % 200 for n in range(7)]
    return tuple((part * 10)[:count])


def run_all(backbone, speculation, prompts, count=40):
    with backbone.gateway(reuse_prefix=False, speculate=speculation) as gateway:
        generations = [
            gateway.submit(GenerationRequest(p, count, GREEDY, top_logprobs=0, ignore_end=True)) for p in prompts
        ]
        found = []
        for generation in generations:
            records = [r for event in generation if isinstance(event, TextDelta) for r in event.tokens]
            found.append([(record.token, record.logprob) for record in records])
        return found, gateway.state()


@pytest.mark.parametrize("architecture", ["llama", "deepseek2", "gpt-oss", "llama4", "step35"])
def test_log_probabilities_have_the_same_bytes(synthetic, architecture):
    prompts = [repeated(seed) for seed in range(3)]
    with open_backbone(synthetic(architecture), n_ctx=256, n_sequences=3) as backbone:
        expected, _ = run_all(backbone, settings("off"), prompts)
        found, state = run_all(backbone, settings("ngram"), prompts)
        own, by_itself = run_all(backbone, settings("draft", backbone.model.path, depth=5), prompts)
    assert found == own == expected
    assert state.drafted or architecture == "step35"  # which says nothing twice
    assert by_itself.generated_tokens / by_itself.turns > 4  # a model guesses itself


@pytest.mark.parametrize("architecture", ["llama", "deepseek2"])
def test_a_ring_and_a_star_of_a_synthetic_model(synthetic, architecture):
    path = synthetic(architecture)
    prompts = [repeated(seed) for seed in range(2)]
    with open_backbone(path, n_ctx=256, n_sequences=2) as backbone:
        expected, _ = run_all(backbone, settings("off"), prompts)
        layers = backbone.model.n_layer
    stages = tuple(
        StageEntry(f"stage-{i}", (span,), "127.0.0.1:0")
        for i, span in enumerate(((0, layers // 2), (layers // 2, layers)))
    )
    plan = Deployment(str(path), 256, 2, stages=stages)
    with DeployedProcesses(plan, path, threads=1) as processes, open_ring(path, processes.deployment) as ring:
        for mode in ("ngram", "draft"):
            found, state = run_all(ring, settings(mode, path), prompts)
            assert found == expected
            assert state.drafted > 0
    with LocalWorkers(path, 2) as workers, open_backbone(path, workers.addresses, n_ctx=256, n_sequences=2) as star:
        for mode in ("ngram", "draft"):
            assert run_all(star, settings(mode, path), prompts)[0] == expected


def test_where_guesses_cannot_be_checked_there_are_none(synthetic):
    with open_backbone(synthetic("qwen35moe"), n_ctx=128) as backbone:
        with pytest.raises(InputError, match="recurrent state"):
            backbone.gateway(speculate=settings("ngram"))
        gateway = backbone.gateway(speculate=settings("auto"))
        assert gateway.speculation is None
        words = settings("auto").describe(gateway.speculation, gateway.facts, exact=True)
        assert words.startswith("off: this model keeps recurrent state")
    with open_backbone(synthetic("llama"), n_ctx=128, batch_invariant=False) as backbone:
        with pytest.raises(InputError, match="batch invariance"):
            backbone.gateway(speculate=settings("ngram"))
        assert backbone.gateway(speculate=settings("auto")).speculation is None


def test_a_draft_model_of_another_vocabulary_is_refused_in_words(synthetic, path, dense):
    with Model.open(path) as target, Model.open(dense) as draft:
        assert common_vocabulary(draft, target) == target.n_vocab
        monkeyed = draft.piece(300, special=True)
        draft._pieces[300, True] = b"another"
        with pytest.raises(InputError, match=f"token 300 is 'another' .* and {monkeyed.decode()!r}"):
            common_vocabulary(draft, target)
        with Model.open(synthetic("llama")) as small, pytest.raises(InputError, match="tokens and"):
            common_vocabulary(small, target)
    with (
        Model.open(synthetic("qwen35moe")) as draft,
        Model.open(synthetic("llama")) as target,
        pytest.raises(InputError, match="attention"),
    ):
        common_vocabulary(draft, target)


def test_a_draft_model_that_fails_costs_no_answer(synthetic, monkeypatch):
    path = synthetic("llama")
    prompts = [repeated(seed) for seed in range(2)]
    with open_backbone(path, n_ctx=256, n_sequences=2) as backbone:
        expected, _ = run_all(backbone, settings("off"), prompts)
        decode, calls = ModelDrafter._decode, []

        def fail_sometimes(self, news):
            calls.append(news)
            if len(calls) > 20 and len(calls) % 7 == 0:  # the first ones are its trial at the beginning
                raise ComputeError("out of luck")
            return decode(self, news)

        monkeypatch.setattr(ModelDrafter, "_decode", fail_sometimes)
        assert run_all(backbone, settings("draft", path), prompts)[0] == expected
    assert len(calls) > 20


# --- the command line ---------------------------------------------------------------------------------------------


def test_options_that_contradict_each_other_are_refused():
    done = run_linkcpp("chat", "m.gguf", "--speculate", "draft", "--prompt", "Hi")
    assert done.returncode == 2
    assert "needs a --draft-model" in done.stderr
    done = run_linkcpp("chat", "m.gguf", "--speculate", "ngram", "--draft-model", "d.gguf", "--prompt", "Hi")
    assert done.returncode == 2
    assert "uses no --draft-model" in done.stderr


@pytest.mark.slow
def test_chat_says_the_same_with_each_drafter(path, dense):
    question = ("chat", str(path), "--prompt", COPY[3], "--temperature", "0", "--max-tokens", "60", "--threads", "1")
    plain = run_linkcpp(*question, "--speculate", "off")
    assert plain.returncode == 0
    assert "class Store" in plain.stdout
    for options in ((), ("--speculate", "ngram"), ("--speculate", "draft", "--draft-model", str(dense))):
        assert run_linkcpp(*question, *options).stdout == plain.stdout


@pytest.mark.slow
def test_serve_says_who_guesses_and_counts(path, dense):
    with running(path, "--draft-model", dense, "--threads", 1, "--unverified") as server:
        assert server.ready["speculation"]["words"] == "auto: the draft model smollm2.gguf, at most 8 tokens at once"
        body = {"messages": [{"role": "user", "content": COPY[3]}], "max_tokens": 40}
        status, text = post(server.url, body, "/v1/chat/completions")
        assert (status, json.loads(text)["timings"]["predicted_n"]) == (200, 40)
        _, fleet = get(server.url, "/status")
        assert fleet["speculation"]["tokens_per_step"] >= 1
        assert server.stop() == 0
