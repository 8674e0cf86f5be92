from __future__ import annotations

import asyncio
import threading
import time

import pytest
from fake_backend import SessionBackend
from fake_engine import EOS, N_VOCAB, FailOnce, FakeModel, FakeSession, answer

from orchestrator.errors import (
    ComputeError,
    ContextLengthError,
    EngineError,
    RequestError,
    WorkerLostError,
    WorkerTimeoutError,
)
from orchestrator.gateway.gateway import Gateway
from orchestrator.gateway.prefix import reusable_prefix
from orchestrator.gateway.sampling import SamplingParameters
from orchestrator.gateway.sequence import Finished, GenerationRequest, TextDelta

GREEDY = SamplingParameters(temperature=0)
CHAT = tuple(FakeModel().tokenize("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", parse_special=True))


def open_gateway(session, *, chunk=16, can_truncate=True, idle=None, **options):
    backend = SessionBackend(session, n_chunk=chunk, cuttable=can_truncate)
    if idle is not None:
        backend.check = idle
    return Gateway(FakeModel(), backend, **options)


def read(generation):
    """Return (text, tokens, the end event)."""
    events = list(generation)
    assert isinstance(events[-1], Finished)
    deltas = [event for event in events if isinstance(event, TextDelta)]
    return "".join(d.text for d in deltas), [t.token for d in deltas for t in d.tokens], events[-1]


def oracle(prompt, count, session=None):
    """Greedy decoding, written out: one call for the prompt, one for each token."""
    session = session or FakeSession()
    tokens, given = [], list(prompt)
    while len(tokens) < count:
        token = int(session.decode(given)[-1].argmax())
        tokens.append(token)
        given = [token]
    return tokens


def test_tokens_equal_those_of_plain_greedy_decoding():
    prompt = tuple(range(1, 50))
    with open_gateway(FakeSession()) as gateway:
        _, tokens, end = read(gateway.submit(GenerationRequest(prompt, 12, GREEDY, ignore_end=True)))
    assert tokens == oracle(prompt, 12)
    assert end.reason == "length"
    assert (end.usage.prompt_tokens, end.usage.completion_tokens, end.usage.cached_tokens) == (49, 12, 0)


def test_the_prompt_goes_in_chunks():
    session = FakeSession()
    with open_gateway(session, chunk=16) as gateway:
        read(gateway.submit(GenerationRequest(tuple(range(40)), 3, GREEDY, ignore_end=True)))
    assert session.calls == [16, 16, 8, 1, 1]


def test_the_end_token_ends_the_answer_and_is_no_text():
    with open_gateway(FakeSession(script=answer([*b"Hi!"]))) as gateway:
        text, tokens, end = read(gateway.submit(GenerationRequest(CHAT, None, GREEDY)))
    assert (text, tokens, end.reason, end.usage.completion_tokens) == ("Hi!", [*b"Hi!"], "stop", 4)


def test_a_stop_string_across_tokens():
    script = answer([*b"One ", 261, 262, *b" more"])  # "STO", "P here"
    with open_gateway(FakeSession(script=script)) as gateway:
        text, tokens, end = read(gateway.submit(GenerationRequest(CHAT, None, GREEDY, stop=("STOP",))))
        assert (text, tokens, end.reason) == ("One ", [*b"One "], "stop")
        text, _, end = read(gateway.submit(GenerationRequest(CHAT, None, GREEDY, stop=("STOPP",))))
        assert text == "One STOP here more"
        text, _, end = read(gateway.submit(GenerationRequest(CHAT, 5, GREEDY, stop=("STOP",))))
        assert (text, end.reason) == ("One STO", "length")  # what was held back belongs to the answer


def test_characters_across_tokens_come_whole():
    with open_gateway(FakeSession(script=answer([263, 264, 265, *"世".encode()]))) as gateway:
        events = list(gateway.submit(GenerationRequest(CHAT, None, GREEDY)))
    texts = [event.text for event in events if isinstance(event, TextDelta)]
    assert "".join(texts) == "äé😀世"
    assert not any("\ufffd" in text for text in texts)


def test_log_probabilities_are_those_of_the_model():
    with open_gateway(FakeSession()) as gateway:
        request = GenerationRequest((1, 2, 3), 4, GREEDY, top_logprobs=3, ignore_end=True)
        records = [
            token for event in gateway.submit(request) if isinstance(event, TextDelta) for token in event.tokens
        ]
    session = FakeSession()
    logits = session.decode([1, 2, 3])[-1].astype(float)
    scores = logits - logits.max() - __import__("math").log(sum(__import__("numpy").exp(logits - logits.max())))
    assert records[0].token == int(logits.argmax())
    assert records[0].logprob == pytest.approx(scores.max())
    assert [choice.token for choice in records[0].alternatives] == list((-logits).argsort(kind="stable")[:3])


def test_a_seed_gives_the_same_text_whatever_ran_before():
    request = GenerationRequest((5, 6), 20, SamplingParameters(seed=99), ignore_end=True)
    with open_gateway(FakeSession()) as gateway:
        first = read(gateway.submit(request))[1]
        read(gateway.submit(GenerationRequest((9,), 7, SamplingParameters(seed=1))))
        assert read(gateway.submit(request))[1] == first
        other = GenerationRequest((5, 6), 20, SamplingParameters(seed=100), ignore_end=True)
        assert read(gateway.submit(other))[1] != first


# --- prefix reuse ---------------------------------------------------------------------------------------------


def test_reusable_prefix():
    assert reusable_prefix([1, 2, 3], [1, 2, 9, 9], cuttable=True) == 2
    assert reusable_prefix([1, 2, 3], [1, 2, 9, 9], cuttable=False) == 0
    assert reusable_prefix([1, 2], [1, 2, 9], cuttable=False) == 2
    assert reusable_prefix([1, 2, 3], [1, 2, 3], cuttable=True) == 2  # the last token's logits are needed
    assert reusable_prefix([], [1], cuttable=True) == 0


@pytest.mark.parametrize("can_truncate", [True, False])
def test_a_reused_prefix_changes_nothing_but_the_work(can_truncate):
    session = FakeSession(can_truncate=can_truncate)
    first, second = tuple(range(1, 40)), (*range(1, 30), 7, 7, 7)
    with open_gateway(session, can_truncate=can_truncate) as gateway:
        assert read(gateway.submit(GenerationRequest(first, 8, GREEDY, ignore_end=True)))[1] == oracle(first, 8)
        _, tokens, end = read(gateway.submit(GenerationRequest(second, 8, GREEDY, ignore_end=True)))
        assert tokens == oracle(second, 8)
        assert end.usage.cached_tokens == (29 if can_truncate else 0)
        again = (*second, *tokens, 3)
        _, tokens, end = read(gateway.submit(GenerationRequest(again, 8, GREEDY, ignore_end=True)))
        assert tokens == oracle(again, 8)
        assert (
            end.usage.cached_tokens == len(again) - 2
        )  # all but the last two: the last answer token was not decoded
        state = gateway.state()
        assert state.prompt_tokens == len(first) + len(second) - (29 if can_truncate else 0) + 2


def test_a_cache_that_refuses_the_cut_is_cleared():
    with open_gateway(FakeSession(can_truncate=False), can_truncate=True) as gateway:
        read(gateway.submit(GenerationRequest((1, 2, 3, 4), 3, GREEDY)))
        _, tokens, end = read(gateway.submit(GenerationRequest((1, 2, 9), 5, GREEDY, ignore_end=True)))
    assert tokens == oracle((1, 2, 9), 5)
    assert end.usage.cached_tokens == 0


def test_no_reuse_where_it_is_switched_off():
    with open_gateway(FakeSession(), reuse_prefix=False) as gateway:
        read(gateway.submit(GenerationRequest((1, 2, 3, 4), 3, GREEDY)))
        assert read(gateway.submit(GenerationRequest((1, 2, 3, 4), 3, GREEDY)))[2].usage.cached_tokens == 0


# --- limits ---------------------------------------------------------------------------------------------------


def test_a_prompt_longer_than_the_context_is_refused_with_both_counts():
    with open_gateway(FakeSession(n_ctx=32)) as gateway:
        with pytest.raises(ContextLengthError) as caught:
            gateway.submit(GenerationRequest(tuple(range(33)), 5))
        assert (caught.value.prompt_tokens, caught.value.n_ctx, caught.value.status) == (33, 32, 400)


def test_a_full_context_ends_the_answer():
    prompt = tuple(range(30))
    with open_gateway(FakeSession(n_ctx=32)) as gateway:
        _, tokens, end = read(gateway.submit(GenerationRequest(prompt, None, GREEDY, ignore_end=True)))
        assert (len(tokens), end.reason) == (3, "length")  # 32 places and one token that needs none
        _, tokens, end = read(gateway.submit(GenerationRequest(tuple(range(32)), None, GREEDY, ignore_end=True)))
        assert (len(tokens), end.reason) == (1, "length")


@pytest.mark.parametrize(
    "request_",
    [
        GenerationRequest(()),
        GenerationRequest((N_VOCAB,)),
        GenerationRequest((-1,)),
        GenerationRequest((1,), sampling=SamplingParameters(logit_bias=((N_VOCAB, 1.0),))),
    ],
)
def test_what_the_engine_cannot_take_is_refused_at_the_door(request_):
    with open_gateway(FakeSession()) as gateway, pytest.raises(RequestError):
        gateway.submit(request_)


# --- errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 2, 3, 6])
@pytest.mark.parametrize(
    "error",
    [
        WorkerLostError("the connection was reset", worker="w1", layer=3),
        WorkerTimeoutError("no answer within 5 s", worker="w1", layer=3),
        ComputeError("out of luck"),
    ],
)
def test_an_error_ends_its_request_and_the_next_is_right(at, error):
    session = FakeSession()
    prompt = tuple(range(1, 40))  # three chunks, then tokens
    with open_gateway(session) as gateway:
        session.before_decode = FailOnce(error, at)
        with pytest.raises(type(error)) as caught:
            read(gateway.submit(GenerationRequest(prompt, 10, GREEDY, ignore_end=True)))
        assert caught.value is error
        assert gateway.state().problem == str(error)
        assert read(gateway.submit(GenerationRequest(prompt, 10, GREEDY, ignore_end=True)))[1] == oracle(prompt, 10)
        state = gateway.state()
        assert (state.finished, state.failed, state.problem) == (1, 1, "")


def test_a_defect_ends_its_request_and_the_next_is_right():
    session = FakeSession()
    with open_gateway(session) as gateway:
        session.before_decode = FailOnce(ZeroDivisionError("oops"), 2)
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            read(gateway.submit(GenerationRequest((1, 2), 10, GREEDY)))
        session.held.append(77)  # and even if the defect left something behind
        assert read(gateway.submit(GenerationRequest((1, 2), 5, GREEDY, ignore_end=True)))[1] == oracle((1, 2), 5)


# --- queue, cancellation, closing -----------------------------------------------------------------------------


def test_requests_are_served_one_after_the_other_in_order():
    session = FakeSession(step_seconds=0.002)
    order = []
    gateway = open_gateway(session)
    generations = [gateway.submit(GenerationRequest((n + 1, 2, 3), 5, GREEDY, ignore_end=True)) for n in range(4)]
    assert gateway.state().waiting == 4

    def follow(number):
        read(generations[number])
        order.append(number)

    threads = [threading.Thread(target=follow, args=(number,)) for number in (2, 0, 3, 1)]
    for thread in threads:
        thread.start()
    with gateway:
        for thread in threads:
            thread.join()
    assert order == [0, 1, 2, 3]


def test_a_cancelled_request_stops_before_the_next_step():
    session = FakeSession()
    gateway = open_gateway(session)
    generation = gateway.submit(GenerationRequest(tuple(range(100)), 50, GREEDY))
    assert gateway.step()
    assert gateway.step()
    assert session.calls == [16, 16]
    generation.cancel()
    assert gateway.step()
    assert not gateway.step()
    assert session.calls == [16, 16]
    assert read(generation)[2].reason == "cancelled"
    assert gateway.state().cancelled == 1


def test_a_request_cancelled_while_waiting_is_never_started():
    session = FakeSession()
    gateway = open_gateway(session)
    generation = gateway.submit(GenerationRequest((1,), 5))
    generation.cancel()
    assert gateway.step()
    assert not gateway.step()
    assert session.calls == []
    assert read(generation)[2].reason == "cancelled"


def test_closing_ends_the_running_and_the_waiting_requests_with_an_error():
    session = FakeSession(step_seconds=0.01)
    gateway = open_gateway(session)
    gateway.start()
    generations = [gateway.submit(GenerationRequest((1,), 400, GREEDY, ignore_end=True)) for _ in range(2)]
    next(iter(generations[0]))
    assert gateway.close()
    for generation in generations:
        with pytest.raises(RequestError, match="shutting down") as caught:
            list(generation)
        assert caught.value.status == 503
    with pytest.raises(RequestError):
        gateway.submit(GenerationRequest((1,), 5))


def test_closing_does_not_wait_for_a_step_that_hangs():
    session = FakeSession()
    hang = threading.Event()
    session.before_decode = lambda tokens: hang.wait()
    gateway = open_gateway(session)
    gateway.start()
    generation = gateway.submit(GenerationRequest((1,), 5))
    time.sleep(0.05)
    assert not gateway.close(timeout=0.05)
    with pytest.raises(RequestError):
        list(generation)
    hang.set()


def test_events_in_an_event_loop():
    async def follow(gateway):
        events = [event async for event in gateway.submit(GenerationRequest(CHAT, None, GREEDY))]
        session.before_decode = FailOnce(WorkerLostError("gone", worker="w"), 1)
        with pytest.raises(WorkerLostError):
            [event async for event in gateway.submit(GenerationRequest(CHAT, None, GREEDY))]
        return "".join(event.text for event in events if isinstance(event, TextDelta))

    session = FakeSession(script=answer([*b"Hello"]))
    with open_gateway(session) as gateway:
        assert asyncio.run(follow(gateway)) == "Hello"


def test_state_shows_the_running_request():
    now = [0.0]
    gateway = open_gateway(FakeSession(), now=lambda: now[0])
    gateway.submit(GenerationRequest(tuple(range(20)), 50, GREEDY, identifier="chat-1", ignore_end=True))
    gateway.step()
    running = gateway.state().running
    assert (running.identifier, running.phase, running.prompt_tokens, running.generated_tokens) == (
        "chat-1",
        "prefill",
        20,
        0,
    )
    for _ in range(2):
        now[0] += 1.0
        gateway.step()
    running = gateway.state().running
    assert (running.phase, running.generated_tokens) == ("decode", 2)
    assert running.tokens_per_second == 1.0  # one token since the first, one second ago


def test_the_idle_call_comes_while_nothing_runs(monkeypatch):
    monkeypatch.setattr("orchestrator.gateway.gateway.IDLE_SECONDS", 0.01)
    looked = threading.Event()
    with open_gateway(FakeSession(), idle=looked.set):
        assert looked.wait(5)


def test_end_token_can_be_ignored():
    script = answer([*b"ab", EOS, *b"cd"])
    with open_gateway(FakeSession(script=script)) as gateway:
        text, _, _ = read(gateway.submit(GenerationRequest(CHAT, 5, GREEDY, ignore_end=True)))
    assert text == "abcd"
