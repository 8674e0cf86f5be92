"""Many requests at once: each answer is the one that it gets alone, whatever happens to the others."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from fake_backend import FakeBackend, greedy
from fake_engine import FailOnce, FakeModel
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import BusyError, DeadlineError, InputError, RequestError, StepDroppedError, WorkerLostError
from orchestrator.gateway.backend import Invariance
from orchestrator.gateway.gateway import Gateway
from orchestrator.gateway.replicas import Replicas
from orchestrator.gateway.routing import Candidate, affinity_key, choose, rank
from orchestrator.gateway.sampling import SamplingParameters
from orchestrator.gateway.scheduler import Limits, Terms
from orchestrator.gateway.sequence import Finished, GenerationRequest, TextDelta

GREEDY = SamplingParameters(temperature=0)


def ask(prompt, count=8, **options):
    return GenerationRequest(tuple(prompt), count, GREEDY, ignore_end=True, **options)


def numbers(count, seed):
    return [int(n) for n in np.random.Generator(np.random.PCG64(seed)).integers(0, 200, count)]


def read(generation):
    """Return (tokens, end event)."""
    events = list(generation)
    return [t.token for event in events if isinstance(event, TextDelta) for t in event.tokens], events[-1]


def run(gateway, limit=10_000):
    """Step by hand until there is nothing to do."""
    for count in range(limit):
        if not gateway.step():
            return count
    raise AssertionError("the gateway does not come to rest")


@pytest.mark.parametrize("invariance", list(Invariance))
@pytest.mark.parametrize("in_flight", [1, 3])
def test_sixteen_streams_give_the_answers_of_each_alone(in_flight, invariance):
    backend = FakeBackend(n_sequences=16, n_chunk=32, in_flight=in_flight, invariance=invariance)
    gateway = Gateway(FakeModel(), backend)
    prompts = [numbers(5 + 7 * n, n) for n in range(16)]
    generations = [gateway.submit(ask(prompt, 10 + n)) for n, prompt in enumerate(prompts)]
    run(gateway)
    for n, (prompt, generation) in enumerate(zip(prompts, generations, strict=True)):
        assert read(generation)[0] == greedy(prompt, 10 + n)
    together = max(len(step) for step in backend.steps)
    expected = 16 if in_flight == 1 else 6  # a third of them in each of three steps
    assert together == (expected if invariance is Invariance.SEVERAL else 1)
    assert backend.most_under_way == in_flight


def test_a_long_prompt_stalls_nobody():
    backend = FakeBackend(n_ctx=1024, n_sequences=3, n_chunk=16)
    gateway = Gateway(FakeModel(), backend)
    talking = [gateway.submit(ask(numbers(5, n), 60)) for n in range(2)]
    gateway.step()
    late = gateway.submit(ask(numbers(500, 9), 3))
    run(gateway)
    with_prompt = [dict(step) for step in backend.steps if dict(step).get(2, 0) > 1]
    assert len(with_prompt) == 36  # 14 rows a step
    assert all(step[0] == step[1] == 1 for step in with_prompt)
    assert [len(read(generation)[0]) for generation in (*talking, late)] == [60, 60, 3]


def test_requests_that_fit_no_slot_wait_for_one():
    backend = FakeBackend(n_sequences=2)
    gateway = Gateway(FakeModel(), backend)
    generations = [gateway.submit(ask(numbers(4, n), 5 + n)) for n in range(5)]
    gateway.step()
    state = gateway.state()
    assert (state.waiting, [slot.request is not None for slot in state.slots]) == (3, [True, True])
    run(gateway)
    assert [read(g)[0] for g in generations] == [greedy(numbers(4, n), 5 + n) for n in range(5)]
    assert max(len(step) for step in backend.steps) == 2


# --- clients that leave, deadlines, limits ------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 3, 12])  # in the middle of the prompt, twice, and of the answer
@pytest.mark.parametrize("in_flight", [1, 2])
def test_who_leaves_frees_the_slot_and_the_backend_is_quiet(steps, in_flight):
    backend = FakeBackend(n_sequences=1, n_chunk=16, in_flight=in_flight)
    gateway = Gateway(FakeModel(), backend)
    leaving, waiting = gateway.submit(ask(range(100), 50)), gateway.submit(ask([1, 2, 3], 4))
    for _ in range(steps):
        gateway.step()
    leaving.cancel()
    computed = len(backend.steps)
    gateway.step()
    state = gateway.state()
    assert state.cancelled == 1
    assert read(leaving)[1].reason == "cancelled"
    if in_flight == 1:  # what is under way still ends
        assert state.slots[0].request is not None  # the next one has it already
    run(gateway)
    assert read(waiting)[0] == greedy([1, 2, 3], 4)
    assert sum(n for step in backend.steps[computed:] for _, n in step) == 3 + 3


def test_a_step_that_nobody_wants_is_given_up():
    backend = FakeBackend(n_sequences=2, in_flight=2)
    gateway = Gateway(FakeModel(), backend)
    generations = [gateway.submit(ask(range(60), 50)), gateway.submit(ask(range(40), 50))]
    gateway.step()
    generations[0].cancel()
    gateway.step()
    assert backend.cancelled == []  # both requests have tokens in what is under way
    generations[1].cancel()
    gateway.step()
    assert len(backend.cancelled) == 1
    run(gateway)
    assert gateway.state().cancelled == 2
    assert [slot.request for slot in gateway.state().slots] == [None, None]


def test_a_step_that_is_computed_ends_when_its_last_client_leaves():
    entered, left = threading.Event(), threading.Event()

    def wait(batch):
        entered.set()
        assert left.wait(10)

    backend = FakeBackend()
    backend.before_step = wait
    with Gateway(FakeModel(), backend) as gateway:
        generation = gateway.submit(ask(range(10), 50))
        assert entered.wait(10)
        generation.cancel()
        left.set()
        assert read(generation)[1].reason == "cancelled"
        assert backend.steps == []


def test_deadlines_end_who_waits_and_who_runs():
    now = [0.0]
    backend = FakeBackend()
    gateway = Gateway(FakeModel(), backend, now=lambda: now[0])
    running = gateway.submit(ask([1, 2], 100), Terms(timeout=5.0))
    waiting = gateway.submit(ask([3, 4], 100), Terms(timeout=3.0))
    patient = gateway.submit(ask([5, 6], 3), Terms(timeout=60.0))
    for _ in range(6):
        gateway.step()
        now[0] += 1.0
    with pytest.raises(DeadlineError, match="3 s") as caught:
        read(waiting)
    assert caught.value.status == 504
    with pytest.raises(DeadlineError, match="5 s"):
        read(running)
    run(gateway)
    assert read(patient)[0] == greedy([5, 6], 3)
    assert gateway.state().failed == 2


def test_a_full_queue_says_when_to_come_again():
    now = [0.0]
    gateway = Gateway(FakeModel(), FakeBackend(), limits=Limits(waiting=3, waiting_per_client=2), now=lambda: now[0])
    first = gateway.submit(ask([1], 4), Terms(client="a"))
    gateway.step()
    for _ in range(2):
        gateway.submit(ask([1], 4), Terms(client="a"))
    with pytest.raises(BusyError, match="of this client") as caught:
        gateway.submit(ask([1], 4), Terms(client="a"))
    assert caught.value.retry_after == 1.0
    gateway.submit(ask([1], 4), Terms(client="b"))
    with pytest.raises(BusyError, match="3 requests are waiting"):
        gateway.submit(ask([1], 4), Terms(client="c"))
    while not first.ended:
        now[0] += 5.0
        gateway.step()
    gateway.step()  # the next one enters
    gateway.submit(ask([1], 4), Terms(client="c"))
    with pytest.raises(BusyError) as caught:
        gateway.submit(ask([1], 4), Terms(client="c"))
    assert caught.value.retry_after == 15.0  # an answer took that long
    run(gateway)
    assert gateway.state().finished == 5


def test_a_client_with_many_requests_does_not_keep_others_waiting():
    gateway = Gateway(FakeModel(), FakeBackend())
    order = []
    many = [gateway.submit(ask([n], 4), Terms(client="many")) for n in range(6)]
    few = gateway.submit(ask([99], 4), Terms(client="few"))
    while gateway.step():
        order += [name for name, g in [*enumerate(many), ("few", few)] if g.ended and name not in order]
    assert order.index("few") <= 1


# --- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("at", [1, 2, 5, 9])
def test_an_error_ends_the_requests_of_its_step_and_no_others(at, in_flight):
    backend = FakeBackend(n_sequences=4, n_chunk=16, in_flight=in_flight)
    gateway = Gateway(FakeModel(), backend)
    backend.before_step = FailOnce(WorkerLostError("gone", worker="w", layer=3), at)
    prompts = [numbers(20, n) for n in range(12)]
    generations = [gateway.submit(ask(prompt, 6)) for prompt in prompts]
    run(gateway)
    failed = 0
    for prompt, generation in zip(prompts, generations, strict=True):
        try:
            assert read(generation)[0] == greedy(prompt, 6)
        except WorkerLostError:
            failed += 1
    assert 1 <= failed <= 4
    state = gateway.state()
    assert (state.failed, state.finished) == (failed, 12 - failed)


@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("at", [1, 2, 3, 8])
def test_a_step_that_was_dropped_is_made_again(at, in_flight):
    backend = FakeBackend(n_sequences=3, n_chunk=16, in_flight=in_flight)
    gateway = Gateway(FakeModel(), backend)
    backend.before_step = FailOnce(StepDroppedError("another one failed"), at)
    prompts = [numbers(30, n) for n in range(3)]
    generations = [gateway.submit(ask(prompt, 6)) for prompt in prompts]
    run(gateway)
    assert [read(generation)[0] for generation in generations] == [greedy(prompt, 6) for prompt in prompts]


# --- what the caches hold -----------------------------------------------------------------------------------------

SHARED = numbers(1000, 77)


@pytest.mark.parametrize("second_while_first_runs", [False, True])
def test_a_shared_prefix_of_a_thousand_tokens_is_computed_once(second_while_first_runs):
    backend = FakeBackend(n_ctx=2048, n_sequences=2, n_chunk=64)
    gateway = Gateway(FakeModel(), backend)
    first = gateway.submit(ask([*SHARED, 1, 2, 3], 200 if second_while_first_runs else 5))
    while gateway.state().generated_tokens < 5:
        gateway.step()
    before = gateway.state().prompt_tokens
    second = gateway.submit(ask([*SHARED, 7, 8, 9, 10], 5))
    run(gateway)
    assert before == 1003
    assert gateway.state().prompt_tokens - before == 4
    tokens, end = read(second)
    assert tokens == greedy([*SHARED, 7, 8, 9, 10], 5)
    assert (end.usage.prompt_tokens, end.usage.cached_tokens) == (1004, 1000)
    assert read(first)[0][:20] == greedy([*SHARED, 1, 2, 3], 20 if second_while_first_runs else 5)


def test_a_conversation_that_lost_its_slot_is_recalled():
    backend = FakeBackend(n_sequences=1, n_chunk=64)
    gateway = Gateway(FakeModel(), backend, limits=Limits(saved_bytes=100 * 1000))
    mine = numbers(150, 1)
    first = gateway.submit(ask(mine, 4))
    run(gateway)
    answer = read(first)[0]
    gateway.submit(ask(numbers(200, 2), 4))
    run(gateway)
    assert (gateway.state().saved, gateway.state().saved_bytes) == (1, 15_300)
    again = [*mine, *answer, 5, 6]
    second = gateway.submit(ask(again, 4))
    run(gateway)
    tokens, end = read(second)
    assert (tokens, end.usage.cached_tokens) == (greedy(again, 4), 153)


def test_saved_beginnings_stay_within_the_memory_limit():
    backend = FakeBackend(n_sequences=1, n_chunk=64)
    gateway = Gateway(FakeModel(), backend, limits=Limits(saved_bytes=100 * 350))
    for seed in range(6):
        gateway.submit(ask(numbers(100, seed), 2))
        run(gateway)
    state = gateway.state()
    assert (state.saved, state.saved_bytes) == (3, 30_300)
    assert sorted(map(len, backend.kept.values())) == [101, 101, 101]
    gateway.submit(ask([*numbers(100, 4), 9], 2))
    run(gateway)
    assert gateway.state().cached_tokens == 100


def test_an_idle_slot_is_saved_restored_and_erased(tmp_path):
    gateway = Gateway(FakeModel(), FakeBackend(n_sequences=2), identity="model and engine")
    prompt = numbers(100, 3)
    first = gateway.submit(ask(prompt, 5))
    run(gateway)
    tokens = read(first)[0]
    path = tmp_path / "sessions" / "one.state"
    saved = gateway.save_slot(0, path)
    assert saved.tokens == (*prompt, *tokens[:-1])
    assert gateway.erase_slot(0) == 104
    assert gateway.state().slots[0].held_tokens == 0

    other = Gateway(FakeModel(), FakeBackend(n_sequences=2), identity="model and engine")
    assert other.restore_slot(1, path).tokens == saved.tokens
    second = other.submit(ask([*prompt, *tokens, 1], 5))
    run(other)
    answer, end = read(second)
    assert (answer, end.usage.cached_tokens) == (greedy([*prompt, *tokens, 1], 5), 104)

    with pytest.raises(RequestError, match="nothing"):
        gateway.save_slot(1, path)
    with pytest.raises(RequestError, match="no slot 2"):
        gateway.save_slot(2, path)
    stranger = Gateway(FakeModel(), FakeBackend(), identity="another model")
    with pytest.raises(InputError, match="another model or engine"):
        stranger.restore_slot(0, path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError, match="damaged"):
        other.restore_slot(0, path)
    for cut in (0, 10, len(data) - 1):
        path.write_bytes(data[:cut])
        with pytest.raises(InputError):
            other.restore_slot(0, path)


def test_a_busy_slot_cannot_be_touched(tmp_path):
    gateway = Gateway(FakeModel(), FakeBackend())
    gateway.submit(ask([1, 2, 3], 50))
    gateway.step()
    for touch in (gateway.erase_slot, lambda slot: gateway.save_slot(slot, tmp_path / "x")):
        with pytest.raises(RequestError, match="is answering a request") as caught:
            touch(0)
        assert caught.value.status == 409


def test_slots_are_touched_in_the_thread_of_the_loop(tmp_path):
    with Gateway(FakeModel(), FakeBackend()) as gateway:
        read(gateway.submit(ask([1, 2, 3], 5)))
        assert gateway.erase_slot(0) == 7


# --- whatever happens ---------------------------------------------------------------------------------------------

MARKERS = range(200, 256)


def tell_marker(held):
    """Answer with the last marker that the cache holds: whoever sees a stranger's cache tells the stranger's."""
    return next((token for token in reversed(held) if token in MARKERS), None)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_no_conversation_ever_sees_another(data):
    """Conversations of several turns over few slots: every turn evicts somebody, some leave, some steps fail."""
    n_sequences = data.draw(st.integers(1, 4), "slots")
    backend = FakeBackend(
        n_ctx=400,
        n_sequences=n_sequences,
        n_chunk=16,
        in_flight=data.draw(st.integers(1, 3), "in flight"),
        cuttable=data.draw(st.booleans(), "cuttable"),
        invariance=data.draw(st.sampled_from(list(Invariance)), "invariance"),
        script=tell_marker,
    )
    saved_bytes = data.draw(st.sampled_from([0, 5_000, 100_000]), "memory for saved beginnings")
    gateway = Gateway(FakeModel(), backend, limits=Limits(saved_bytes=saved_bytes))
    shared = numbers(data.draw(st.integers(0, 60), "shared"), 5)
    talks = [[*shared, MARKERS[n]] for n in range(data.draw(st.integers(1, 7), "conversations"))]
    running = {}
    for turn in range(data.draw(st.integers(1, 14), "turns")):
        n = data.draw(st.integers(0, len(talks) - 1), f"who {turn}")
        if n in running or len(talks[n]) > 300:
            continue
        talks[n] += numbers(data.draw(st.integers(1, 40), f"says {turn}"), 100 + turn)
        running[n] = gateway.submit(ask(talks[n], data.draw(st.integers(1, 6), f"answers {turn}")))
        if data.draw(st.integers(0, 9), f"fate {turn}") == 0:
            backend.before_step = FailOnce(WorkerLostError("gone", worker="w"), data.draw(st.integers(1, 4), "at"))
        for _ in range(data.draw(st.integers(0, 6), f"steps {turn}")):
            gateway.step()
        if data.draw(st.integers(0, 5), f"leaves {turn}") == 0:
            running[n].cancel()
        for other, generation in list(running.items()):
            if generation.ended:
                talks[other] += settle(generation, talks[other], other)
                del running[other]
    run(gateway)
    for n, generation in running.items():
        settle(generation, talks[n], n)
    state = gateway.state()
    assert [slot.request for slot in state.slots] == [None] * n_sequences
    assert [slot.held_tokens for slot in state.slots] == [len(cache) for cache in backend.caches]
    assert state.saved_bytes == sum(100 * len(kept) for kept in backend.kept.values()) <= saved_bytes


def settle(generation, prompt, n):
    """Check an answer that has ended against the one that the prompt gets alone; return its tokens."""
    tokens = []
    try:
        for event in generation:
            if isinstance(event, TextDelta):
                tokens += [record.token for record in event.tokens]
    except WorkerLostError:
        pass
    assert tokens == greedy(prompt, len(tokens), tell_marker)
    assert set(tokens) <= {MARKERS[n]}
    return tokens


# --- replicas -----------------------------------------------------------------------------------------------------


def test_a_key_moves_only_if_its_replica_goes():
    names = [f"replica {n}" for n in range(5)]
    keys = [affinity_key(numbers(100, n), "") for n in range(200)]
    first = [names[rank(key, names)[0]] for key in keys]
    assert min(first.count(name) for name in names) >= 20
    without = [name for name in names if name != "replica 2"]
    for key, before in zip(keys, first, strict=True):
        if before != "replica 2":
            assert without[rank(key, without)[0]] == before


def test_a_session_decides_before_the_prompt_and_a_growing_prompt_keeps_its_key():
    assert affinity_key([1, 2], "mine") == affinity_key([3, 4], "mine") != affinity_key([1, 2], "yours")
    assert affinity_key(SHARED, "") == affinity_key([*SHARED, 1, 2], "")


def test_load_comes_before_affinity_and_a_long_prefix_before_the_hash():
    key = b"any"
    names = ["a", "b"]
    preferred = rank(key, names)[0]
    other = 1 - preferred

    def candidates(**changes):
        made = [Candidate(name, 0, 2) for name in names]
        for which, values in changes.items():
            index = preferred if which == "preferred" else other
            made[index] = Candidate(names[index], *values)
        return made

    assert choose(key, candidates()) == preferred
    assert choose(key, candidates(preferred=(2, 2))) == other
    assert choose(key, candidates(other=(1, 2, 500))) == other
    assert choose(key, candidates(other=(1, 2, 20))) == preferred
    assert choose(key, candidates(preferred=(2, 2), other=(3, 2))) == preferred
    assert choose(key, candidates(preferred=(0, 2, 0, False))) == other


@pytest.mark.parametrize("session", ["", "mine"])
def test_affinity_keeps_a_prefix_with_its_replica(session):
    gateways = {
        name: Gateway(FakeModel(), FakeBackend(n_ctx=2048, n_sequences=2, n_chunk=64)) for name in ("one", "two")
    }
    with Replicas(gateways) as replicas:
        terms = Terms(session=session)
        read(replicas.submit(ask([*SHARED, 1], 3), terms))
        home = next(name for name, gateway in gateways.items() if gateway.state().prompt_tokens)
        for n in range(4):
            tokens, end = read(replicas.submit(ask([*SHARED, 2, n], 3), terms))
            assert end.usage.cached_tokens >= 1000
            assert tokens == greedy([*SHARED, 2, n], 3)
        assert gateways[home].state().finished == 5
        state = replicas.state()
        assert (state.finished, len(state.slots), state.generated_tokens) == (5, 4, 15)


def test_replicas_share_a_load_that_one_cannot_carry():
    gateways = {
        name: Gateway(FakeModel(), FakeBackend(n_sequences=1), limits=Limits(waiting=1)) for name in ("one", "two")
    }
    replicas = Replicas(gateways)
    generations = [replicas.submit(ask([5, 6], 3)) for _ in range(2)]
    assert sorted(gateway.state().waiting for gateway in gateways.values()) == [1, 1]
    with pytest.raises(BusyError):
        replicas.submit(ask([5, 6], 3))
    with replicas:
        assert [read(generation)[0] for generation in generations] == [greedy([5, 6], 3)] * 2


def test_cancelled_within_a_second_in_a_running_gateway():
    backend = FakeBackend(n_ctx=4096, n_sequences=1, step_seconds=0.02)
    with Gateway(FakeModel(), backend) as gateway:
        generation = gateway.submit(ask(numbers(4000, 1), 90))
        while not backend.steps:
            time.sleep(0.005)
        generation.cancel()
        begin = time.monotonic()
        while gateway.state().slots[0].request is not None:
            time.sleep(0.005)
        assert time.monotonic() - begin < 1.0
        steps = len(backend.steps)
        time.sleep(0.1)
        assert len(backend.steps) <= steps + 1
        assert isinstance(list(generation)[-1], Finished)
