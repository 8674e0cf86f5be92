"""The gateway with the real engine."""

from __future__ import annotations

import time

import numpy as np
import pytest

from orchestrator.engine.model import Model
from orchestrator.engine.session import Session
from orchestrator.engine.synth import synth
from orchestrator.errors import InputError, WorkerError
from orchestrator.gateway.backbone import open_backbone
from orchestrator.gateway.sampling import SamplingParameters
from orchestrator.gateway.sequence import GenerationRequest, TextDelta
from orchestrator.workers.local import LocalWorkers

GREEDY = SamplingParameters(temperature=0)


def numbers(count, seed):
    return tuple(int(n) for n in np.random.Generator(np.random.PCG64(seed)).integers(3, 250, count))


def ask(gateway, prompt, count):
    """Return (tokens, their log probabilities, cached tokens)."""
    request = GenerationRequest(prompt, count, GREEDY, top_logprobs=0, ignore_end=True)
    *deltas, end = list(gateway.submit(request))
    records = [record for delta in deltas if isinstance(delta, TextDelta) for record in delta.tokens]
    return [record.token for record in records], [record.logprob for record in records], end.usage.cached_tokens


@pytest.mark.parametrize("architecture", ["llama", "qwen35moe"])
def test_a_reused_prefix_gives_the_same_bytes(synthetic, architecture):
    first, second = numbers(100, 1), (*numbers(100, 1)[:70], *numbers(40, 2))
    with open_backbone(synthetic(architecture), n_ctx=512) as backbone:
        results = []
        for reuse in (True, False):
            backbone.session.clear()
            with backbone.gateway(reuse_prefix=reuse) as gateway:
                tokens, *_ = ask(gateway, first, 8)
                answers = [ask(gateway, prompt, 8) for prompt in ((*first, *tokens, *numbers(9, 3)), second)]
                results.append(answers)
    (longer, shorter), without = results
    assert longer[2] == 107  # the whole conversation so far, but for the answer's last token
    assert shorter[2] == (70 if architecture == "llama" else 0)  # recurrent memory cannot be cut
    assert [answer[2] for answer in without] == [0, 0]
    assert [answer[:2] for answer in (longer, shorter)] == [answer[:2] for answer in without]


def test_chunks_of_the_gateway_give_the_bytes_of_one_call(synthetic):
    prompt = numbers(200, 5)
    with Model.open(synthetic("llama")) as model, Session(model, n_ctx=512) as session:
        logits = session.decode(prompt)[-1].astype(np.float64)
        best = int(logits.argmax())
        expected = logits[best] - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    with open_backbone(synthetic("llama"), n_ctx=512) as backbone, backbone.gateway() as gateway:
        tokens, logprobs, _ = ask(gateway, prompt, 1)
    assert (tokens, logprobs) == ([best], [float(expected)])


# --- a star, compared with one process ----------------------------------------------------------------------------


def decode(session, prompt, steps):
    """Prefill, then greedy single steps; returns all their logits."""
    logits = [session.decode(prompt)]
    for _ in range(steps):
        logits.append(session.decode([int(logits[-1][-1].argmax())]))
    return np.concatenate(logits)


def test_three_workers_a_prompt_of_300_tokens_and_two_of_eight_experts(tmp_path):
    path = tmp_path / "mixtral-like.gguf"
    synth("llama", path, n_expert=8, top_k=2)
    prompt = numbers(300, 7)
    with Model.open(path) as model, Session(model, n_ctx=512) as session:
        oracle = decode(session, prompt, 4)
    with LocalWorkers(path, 3) as workers, open_backbone(path, workers.addresses, n_ctx=512) as backbone:
        assert decode(backbone.session, prompt, 4).tobytes() == oracle.tobytes()


def test_a_prompt_of_one_token_reaches_both_workers(tmp_path):
    path = tmp_path / "many-experts.gguf"
    synth("qwen2moe", path, n_expert=128, top_k=8)
    with Model.open(path) as model, Session(model, n_ctx=64) as session:
        oracle = decode(session, [5], 1)
    with LocalWorkers(path, 2) as workers, open_backbone(path, workers.addresses, n_ctx=64) as backbone:
        assert decode(backbone.session, [5], 1).tobytes() == oracle.tobytes()
        figures = backbone.dispatcher.statistics().workers
        assert [worker.ownership.layers and worker.rows > 0 for worker in figures] == [True, True]
        backbone.session.clear()
        workers.kill(1)
        with pytest.raises(WorkerError, match=r"local-2.*layer \d+|local-2") as caught:
            backbone.session.decode([5])
        assert caught.value.worker.startswith("local-2")
        assert backbone.session.position == 0
        workers.restart(1)
        assert decode(backbone.session, [5], 1).tobytes() == oracle.tobytes()


# --- many at once -------------------------------------------------------------------------------------------------


def alone(path, prompts, count):
    """What each prompt gets when nobody else is there: greedy decoding in one process, token by token."""
    answers = []
    with Model.open(path) as model, Session(model, n_ctx=256) as session:
        for prompt in prompts:
            session.clear()
            logits = decode(session, list(prompt), count - 1)
            answers.append(([int(row.argmax()) for row in logits], [float(row.max()) for row in logits]))
    return answers


def together(gateway, prompts, count):
    """Submit all at once and read them to their ends; (tokens, log probabilities) of each."""
    generations = [
        gateway.submit(GenerationRequest(prompt, count, GREEDY, top_logprobs=0, ignore_end=True))
        for prompt in prompts
    ]
    answers = []
    for generation in generations:
        records = [r for event in generation if isinstance(event, TextDelta) for r in event.tokens]
        answers.append(([r.token for r in records], [r.logprob for r in records]))
    return answers


PROMPTS = [numbers(3 + 7 * n, n) for n in range(10)]


@pytest.mark.parametrize("architecture", ["llama", "deepseek2", "gpt-oss", "qwen35moe"])
def test_ten_streams_over_four_slots_equal_each_alone(synthetic, architecture):
    path = synthetic(architecture)
    expected = [tokens for tokens, _ in alone(path, PROMPTS, 9)]
    with open_backbone(path, n_ctx=256, n_sequences=4) as backbone, backbone.gateway() as gateway:
        first = together(gateway, PROMPTS, 9)
        state = gateway.state()
        again = together(gateway, PROMPTS[::-1], 9)[::-1]  # now with what the caches still hold
        one_by_one = [together(gateway, [prompt], 9)[0] for prompt in PROMPTS]
    assert [tokens for tokens, _ in first] == expected
    assert first == again == one_by_one  # to the last bit of every probability
    assert state.sequences > 2 * state.steps  # they did run together


@pytest.mark.parametrize("architecture", ["qwen2moe", "qwen35moe"])
def test_streams_over_a_star_equal_one_process(synthetic, architecture):
    path = synthetic(architecture)
    with open_backbone(path, n_ctx=256, n_sequences=4) as backbone, backbone.gateway() as gateway:
        expected = together(gateway, PROMPTS, 9)
    with (
        LocalWorkers(path, 2) as workers,
        open_backbone(path, workers.addresses, n_ctx=256, n_sequences=4) as backbone,
        backbone.gateway() as gateway,
    ):
        assert together(gateway, PROMPTS, 9) == expected
        assert [tokens for tokens, _ in expected] == [tokens for tokens, _ in alone(path, PROMPTS, 9)]


@pytest.mark.parametrize("architecture", ["llama", "qwen35moe"])
def test_a_prefix_of_a_thousand_tokens_is_computed_once(synthetic, architecture):
    """Copied from a slot that keeps its conversation; recurrent memory has no middle to be copied at."""
    shared = numbers(1000, 3)
    prompts = [(*shared, *numbers(5, 4)), (*shared, *numbers(6, 5))]
    with open_backbone(synthetic(architecture), n_ctx=1280, n_sequences=2) as backbone:
        with backbone.gateway(reuse_prefix=False) as gateway:
            expected = [together(gateway, [prompt], 4)[0] for prompt in prompts]
        with backbone.gateway() as gateway:
            together(gateway, prompts[:1], 100)
            before = gateway.state()
            second = together(gateway, prompts[1:], 4)[0]
            after = gateway.state()
    computed = after.prompt_tokens - before.prompt_tokens
    assert (computed, after.cached_tokens) == ((6, 1000) if architecture == "llama" else (1006, 0))
    assert second == expected[1]


def test_a_state_on_disk_continues_with_the_same_bytes(synthetic, tmp_path):
    path, prompt = synthetic("qwen35moe"), numbers(80, 6)
    with open_backbone(path, n_ctx=256, n_sequences=2) as backbone, backbone.gateway() as gateway:
        tokens, _ = together(gateway, [prompt], 5)[0]
        index = next(slot.index for slot in gateway.state().slots if slot.held_tokens)
        saved = gateway.save_slot(index, tmp_path / "talk")
        longer = (*prompt, *tokens, 9, 8)
        expected = together(gateway, [longer], 6)
    with open_backbone(path, n_ctx=256, n_sequences=2) as backbone, backbone.gateway() as gateway:
        gateway.restore_slot(1, tmp_path / "talk")
        assert together(gateway, [longer], 6) == expected
        assert gateway.state().cached_tokens == len(saved.tokens) == 84
    with (
        open_backbone(synthetic("llama"), n_ctx=256) as backbone,
        backbone.gateway() as gateway,
        pytest.raises(InputError, match="another model"),
    ):
        gateway.restore_slot(0, tmp_path / "talk")


def test_a_client_that_leaves_stops_the_workers_within_a_second(synthetic):
    path = synthetic("qwen2moe")
    with (
        LocalWorkers(path, 1) as workers,
        open_backbone(path, workers.addresses, n_ctx=8192) as backbone,
        backbone.gateway() as gateway,
    ):
        for length, events in ((8000, 0), (10, 3)):  # in the middle of the prompt, and at the third token
            generation = gateway.submit(GenerationRequest(numbers(length, 1), 8000, GREEDY, ignore_end=True))
            answer = iter(generation)
            for _ in range(events):
                next(answer)
            while backbone.dispatcher.statistics().steps == 0:
                time.sleep(0.01)
            generation.cancel()
            begin = time.monotonic()
            while gateway.state().slots[0].request is not None:
                time.sleep(0.005)
            assert time.monotonic() - begin < 1.0
            quiet = backbone.dispatcher.statistics().round_trips
            time.sleep(0.2)
            assert backbone.dispatcher.statistics().round_trips <= quiet
            *_, end = answer
            assert end.reason == "cancelled"
