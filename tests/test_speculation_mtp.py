"""A model's own prediction layers as a drafter: the same answers in one process and over a star."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace

import numpy as np
import pytest
from predicting import CASES, MORE, make_predicting
from serve_process import post, run_linkcpp, running

from orchestrator.engine.context import Context
from orchestrator.engine.model import Model
from orchestrator.engine.prediction import PredictionContext
from orchestrator.errors import ComputeError, InputError
from orchestrator.gateway.backbone import open_backbone
from orchestrator.gateway.backend import BackendFacts
from orchestrator.gateway.drafters.mtp import MOST_WAITING, MtpDrafter
from orchestrator.gateway.drafters.opening import SpeculationMode, SpeculationSettings
from orchestrator.gateway.ring_backbone import open_ring
from orchestrator.gateway.sampling import SamplingParameters
from orchestrator.gateway.sequence import GenerationRequest, TextDelta
from orchestrator.gateway.speculation import Seen, Wanted
from orchestrator.models.deployment import Deployment, GatewayEntry, StageEntry
from orchestrator.ring.steps import Clear, one_sequence
from orchestrator.workers.deployment import DeployedProcesses
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


def ask(gateway, prompts, sampling=GREEDY, count=30):
    """Ask all at once; return tokens and log probabilities of the answers."""
    request = [GenerationRequest(p, count, sampling, top_logprobs=0, ignore_end=True) for p in prompts]
    generations = [gateway.submit(one) for one in request]
    return [tokens_of(one) for one in generations]


def tokens_of(generation):
    return [(r.token, r.logprob) for event in generation if isinstance(event, TextDelta) for r in event.tokens]


def run_all(backbone, speculation, sampling=GREEDY):
    with backbone.gateway(reuse_prefix=False, speculate=speculation) as gateway:
        return ask(gateway, PROMPTS, sampling), gateway.state()


@pytest.mark.parametrize("sure", [False, True], ids=["random", "sure"])
@pytest.mark.parametrize(
    ("architecture", "count"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]
)
def test_answers_have_the_same_bytes(make, architecture, count, sure):
    with open_backbone(make(architecture, count, sure), n_ctx=256, n_sequences=3) as backbone:
        for sampling in (GREEDY, SAMPLED) if sure else (GREEDY,):
            expected, _ = run_all(backbone, OFF, sampling)
            found, state = run_all(backbone, MTP, sampling)
            assert found == expected
            assert state.drafted > 0
            if sure and sampling is GREEDY:
                assert 0 < state.accepted < state.drafted
                assert state.generated_tokens / state.turns > 1.5


@pytest.mark.parametrize(
    ("architecture", "count"), [*(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[:3]), CASES[3]]
)
def test_answers_over_a_star_have_the_same_bytes(make, architecture, count):
    path = make(architecture, count, True)
    with open_backbone(path, n_ctx=256, n_sequences=3) as backbone:
        expected, _ = run_all(backbone, OFF)
        _, alone = run_all(backbone, MTP)
    with LocalWorkers(path, 2) as workers, open_backbone(path, workers.addresses, n_ctx=256, n_sequences=3) as star:
        found, state = run_all(star, MTP)
    assert found == expected
    assert (state.drafted, state.accepted) == (alone.drafted, alone.accepted)


# --- what the drafter sees ----------------------------------------------------------------------------------------


def rows_of(path, text):
    with Model.open(path) as model, Context(model, n_ctx=256) as context:
        context.keep_hidden(True)
        return context.decode(one_sequence(text, 0)).hidden


@pytest.mark.parametrize(("architecture", "count"), CASES)
def test_it_sees_the_rows_of_the_text_and_none_of_wrong_guesses(make, architecture, count, monkeypatch):
    path = make(architecture, count, True)
    seen, read = [], MtpDrafter.read

    def watch(self, news):
        seen.extend((one.slot, list(one.tokens), one.start, one.rows.copy()) for one in news)
        read(self, news)

    with open_backbone(path, n_ctx=256, n_sequences=3) as backbone, backbone.gateway(speculate=MTP) as gateway:
        seen.clear()
        monkeypatch.setattr(MtpDrafter, "read", watch)
        answers = ask(gateway, PROMPTS)
        state = gateway.state()
    assert 0 < state.accepted < state.drafted
    texts = [[*prompt, *(token for token, _ in answer)] for prompt, answer in zip(PROMPTS, answers, strict=True)]
    found = {}
    for _, tokens, start, rows in seen:
        index = next(i for i, text in enumerate(texts) if text[:1] == tokens[:1])
        assert texts[index][: len(tokens)] == tokens
        parts = found.setdefault(index, [])
        assert start == sum(map(len, parts))  # no position is left out or told twice
        parts.append(rows)
    for index, parts in found.items():
        together = np.concatenate(parts)
        assert together.tobytes() == rows_of(path, texts[index])[: len(together)].tobytes()
        assert len(together) == len(texts[index]) - 1 or len(together) == len(texts[index])


@pytest.fixture
def drafter(make, request):
    path = make(*getattr(request, "param", ("step35", 2)))
    drafter = MtpDrafter.open(path, n_ctx=256, n_sequences=2, n_threads=1)
    yield drafter, path
    drafter.close()


TEXT = list(PROMPTS[1]) + [int(token) for token in np.random.Generator(np.random.PCG64(9)).integers(3, 250, 80)]


def guesses(drafter, slot, text, count=4):
    draft = drafter.propose([Wanted(slot, text, count, 100)]).get(slot)
    return None if draft is None else draft.tokens


@pytest.mark.parametrize("drafter", CASES, ids=str, indirect=True)
def test_guesses_after_wrong_ones_are_those_of_who_read_the_text_at_once(drafter):
    drafter, path = drafter
    rows = rows_of(path, TEXT)
    drafter.read([Seen(0, TEXT, 0, rows[:30])])
    for end in range(30, len(TEXT) - 1, 3):  # its guesses are wrong, and steps are of three tokens
        assert guesses(drafter, 0, TEXT[: end + 1]) is not None
        drafter.read([Seen(0, TEXT, end, rows[end : end + 3])])
    end = min(end + 3, len(TEXT) - 1)
    drafter.read([Seen(0, TEXT, end, rows[end:])])
    found = guesses(drafter, 0, [*TEXT, 5])
    drafter.read([Seen(1, TEXT, 0, rows)])
    assert found == guesses(drafter, 1, [*TEXT, 5])
    assert len(found) == (drafter.most or 4)
    both = drafter.propose([Wanted(1, [*TEXT, 5], 1, 9), Wanted(0, [*TEXT, 5], 4, 9)])
    assert (both[0].tokens, both[1].tokens) == (found, found[:1])


def test_it_reads_before_too_many_rows_wait(drafter):
    drafter, path = drafter
    rows = rows_of(path, TEXT)
    for start in range(0, len(TEXT), 10):
        drafter.read([Seen(0, TEXT, start, rows[start : start + 10])])
        assert len(drafter._texts[0].rows) < MOST_WAITING
    assert drafter.debt(0, TEXT) >= 0.0
    drafter.read([Seen(1, TEXT, 0, rows)])
    assert guesses(drafter, 0, [*TEXT, 5]) == guesses(drafter, 1, [*TEXT, 5])


def test_texts_that_it_does_not_know_get_no_guess_and_broken_ones_get_some(drafter):
    drafter, path = drafter
    rows = rows_of(path, TEXT)
    assert guesses(drafter, 0, TEXT) is None  # nothing was seen
    drafter.read([Seen(0, TEXT, 0, rows[:50])])
    assert guesses(drafter, 0, TEXT[:52]) is None  # a row is missing
    assert guesses(drafter, 0, [*TEXT[:49], 1, 2]) is None  # another text
    assert guesses(drafter, 0, TEXT[:51]) is not None
    drafter.read([Seen(0, TEXT, 20, rows[20:40])])  # the text was cut and goes on
    assert guesses(drafter, 0, TEXT[:51]) is None
    assert guesses(drafter, 0, TEXT[:41]) is not None
    other = TEXT[::-1]
    drafter.read([Seen(0, other, 30, rows[30:60])])  # another one, whose beginning came from elsewhere
    assert guesses(drafter, 0, other[:61]) is not None
    drafter.read([Seen(0, other, 10, rows[10:11])])
    assert guesses(drafter, 0, other[:12]) is not None


def test_what_came_from_elsewhere_costs_guesses_and_no_answer(make, tmp_path):
    path = make("glm4moe", 1, True)
    first = PROMPTS[1]
    with open_backbone(path, n_ctx=256, n_sequences=3) as backbone:
        with backbone.gateway(reuse_prefix=False) as gateway:
            expected = [ask(gateway, [one])[0] for one in (first, first[:60], (*first[:70], 9, 8), first)]
        with backbone.gateway(speculate=MTP) as gateway:
            found = ask(gateway, [first])
            found += ask(gateway, [first[:60], (*first[:70], 9, 8)])  # one goes on in place, one from a copy
            slot = max(range(3), key=lambda index: len(gateway.holdings()[index]))
            gateway.save_slot(slot, tmp_path / "slot")
            for index in range(3):
                gateway.erase_slot(index)
            gateway.restore_slot(2, tmp_path / "slot")
            found += ask(gateway, [first])
            state = gateway.state()
    assert found == expected
    assert state.cached_tokens > 100
    assert state.accepted > 0


@pytest.mark.parametrize("every", [1, 3])
def test_layers_that_fail_cost_no_answer(make, monkeypatch, every):
    decode, calls = PredictionContext._decode, []

    def fail_sometimes(self, batch, *rest, **options):
        calls.append(batch)
        if len(calls) % every == 0:
            for sequence in batch.starts():
                self.cut(sequence, 0)
            raise ComputeError("out of luck")
        decode(self, batch, *rest, **options)

    with open_backbone(make("deepseek2", 1, True), n_ctx=256, n_sequences=3) as backbone:
        expected, _ = run_all(backbone, OFF)
        gateway = backbone.gateway(reuse_prefix=False, speculate=MTP)
        monkeypatch.setattr(PredictionContext, "_decode", fail_sometimes)
        with gateway:
            assert ask(gateway, PROMPTS) == expected
            assert (gateway.state().accepted > 0) == (every > 1)
    assert len(calls) > 10


# --- who may use it -----------------------------------------------------------------------------------------------


def test_auto_takes_the_prediction_layers_where_they_can_be_used(make, synthetic):
    auto = SpeculationSettings(SpeculationMode.AUTO)
    with open_backbone(make("step35", 2), n_ctx=256, n_sequences=3) as backbone:
        expected, _ = run_all(backbone, OFF)
        assert run_all(backbone, auto)[0] == expected
        gateway = backbone.gateway(speculate=auto)
        words = auto.describe(gateway.speculation, gateway.facts, exact=True)
        assert words == "auto: the model's own prediction layers, at most 2 tokens at once"
        gateway.close()
        plain = backbone.gateway(speculate=OFF)  # and the rows are kept no longer
        backbone.context.apply(Clear())
        assert backbone.context.decode(one_sequence([1], 0)).hidden is None
        plain.close()
    with open_backbone(synthetic("step35"), n_ctx=64) as backbone:
        assert backbone.gateway(speculate=auto).speculation.drafter.name == "ngram"


def test_layers_that_cannot_be_loaded_are_no_reason_not_to_serve(make, monkeypatch):
    def refuse(*_, **__):
        raise ComputeError("no memory")

    monkeypatch.setattr(PredictionContext, "__init__", refuse)
    with open_backbone(make("glm4moe"), n_ctx=64) as backbone:
        gateway = backbone.gateway(speculate=SpeculationSettings(SpeculationMode.AUTO))
        assert gateway.speculation.drafter.name == "ngram"
        with pytest.raises(ComputeError, match="no memory"):
            backbone.gateway(speculate=MTP)


def test_why_there_are_no_guesses_is_said_in_words(make, synthetic):
    with (
        open_backbone(synthetic("step35"), n_ctx=64) as backbone,
        pytest.raises(InputError, match=r"no speculation: step35\.gguf has no prediction layers"),
    ):
        backbone.gateway(speculate=MTP)
    with open_backbone(make("qwen35moe"), n_ctx=64) as backbone:
        with pytest.raises(InputError, match="no speculation: this model keeps recurrent state"):
            backbone.gateway(speculate=MTP)
        assert backbone.gateway(speculate=SpeculationSettings(SpeculationMode.AUTO)).speculation is None


def ring_of(path, layers, own=()):
    """Deploy stages that hold these ranges beside those of the gateway."""
    stages = tuple(StageEntry(f"stage-{first}", ((first, last),), "127.0.0.1:0") for first, last in layers)
    return Deployment(str(path), 256, 3, stages=stages, gateway=GatewayEntry(tuple(own)))


def test_a_ring_whose_stages_have_the_last_layer_has_no_hidden_rows(make):
    facts = BackendFacts(320, 64, 1, 63, 63)
    settings = SpeculationSettings(SpeculationMode.MTP)
    with Model.open(make("glm4moe"), without_experts=True) as model:
        with pytest.raises(InputError, match="hidden rows, and a stage of the ring has that layer"):
            settings.open(facts, model, exact=True)
        auto = replace(settings, mode=SpeculationMode.AUTO).open(facts, model, exact=True)
        assert auto.drafter.name == "ngram"


@pytest.mark.parametrize(
    ("architecture", "count"), [("step35", 2), pytest.param("deepseek2", 1, marks=pytest.mark.slow)]
)
def test_answers_over_a_ring_whose_gateway_has_the_last_layers(make, architecture, count):
    path = make(architecture, count, True)
    with open_backbone(path, n_ctx=256, n_sequences=3) as backbone:
        expected, _ = run_all(backbone, OFF)
        n = backbone.model.n_layer
    plan = ring_of(path, [(1, n - 1)], own=((0, 1), (n - 1, n)))
    with (
        DeployedProcesses(plan, path, threads=1) as processes,
        open_ring(path, processes.deployment) as ring,
    ):
        found, state = run_all(ring, MTP)
        assert found == expected
        assert state.accepted > 0
        assert run_all(ring, OFF)[0] == expected


@pytest.mark.slow
def test_a_stage_that_is_lost_costs_no_answer(make):
    path = make("step35", 2, True)
    prompts = PROMPTS[:2]
    with open_backbone(path, n_ctx=256, n_sequences=3) as backbone, backbone.gateway(speculate=OFF) as gateway:
        expected = ask(gateway, prompts, count=120)
    plan = replace(
        ring_of(path, [(1, 7)], own=((0, 1), (7, 8))), spares=(StageEntry("spare", ((1, 7),), "127.0.0.1:0"),)
    )
    with (
        DeployedProcesses(plan, path, threads=1) as processes,
        open_ring(path, processes.deployment, patience=30) as ring,
    ):
        victim = next(found for found in processes.running if found.name == "stage-1")
        with ring.gateway(speculate=MTP) as gateway:
            generations = [
                gateway.submit(GenerationRequest(p, 120, GREEDY, top_logprobs=0, ignore_end=True)) for p in prompts
            ]
            while gateway.state().accepted < 10:
                time.sleep(0.005)
            os.kill(victim.pid, signal.SIGKILL)
            found = [tokens_of(one) for one in generations]
            state = gateway.state()
        assert ring.standby.recoveries == 1
    assert found == expected
    assert state.accepted > 40


def test_the_command_line_refuses_what_cannot_work(synthetic):
    path = str(synthetic("glm4moe"))
    done = run_linkcpp("chat", path, "--speculate", "mtp", "--prompt", "Hi", "--threads", "1")
    assert done.returncode == 2
    assert "no speculation: glm4moe.gguf has no prediction layers" in done.stderr


@pytest.mark.slow
def test_serve_says_that_the_prediction_layers_guess_and_counts(make):
    with running(make("step35", 1, True), "--speculate", "mtp", "--threads", 1, "--unverified") as server:
        words = "mtp: the model's own prediction layers, at most 8 tokens at once"
        assert server.ready["speculation"]["words"] == words
        status, text = post(server.url, {"prompt": "the", "max_tokens": 40, "temperature": 0}, "/v1/completions")
        assert status == 200
        assert json.loads(text)["timings"]["draft_n_accepted"] > 0
        assert server.stop() == 0
