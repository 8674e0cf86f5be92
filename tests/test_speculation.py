"""Guessing ahead without an engine: answers stay what they are, and guessing stops where it does not pay."""

from __future__ import annotations

import io
from collections import Counter

import numpy as np
import pytest
from fake_backend import FakeBackend, greedy, logits_of
from fake_engine import END_OF_TURN, N_VOCAB, FailOnce, FakeModel
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from speculation_twin import Clock, KnowingDrafter, TimedBackend

from orchestrator.api.readings import readings
from orchestrator.api.stream import timings_body
from orchestrator.errors import ComputeError, StepDroppedError
from orchestrator.gateway.backend import BackendFacts, Invariance
from orchestrator.gateway.depth import Candidate, Rates, StepTimes, best_choice, micro_batches
from orchestrator.gateway.drafters.ngram import SHORTEST, NgramDrafter, NgramIndex
from orchestrator.gateway.gateway import Gateway
from orchestrator.gateway.report import FleetReport
from orchestrator.gateway.sampling import SamplingParameters
from orchestrator.gateway.scheduler import Limits
from orchestrator.gateway.sequence import GenerationRequest, TextDelta
from orchestrator.gateway.speculation import Speculation, why_not
from orchestrator.monitor.render import View, render
from orchestrator.status.snapshot import FleetSnapshot, SpeculationSnapshot

GREEDY = SamplingParameters(temperature=0)


def numbers(count, seed):
    return tuple(int(n) for n in np.random.Generator(np.random.PCG64(seed)).integers(0, 200, count))


def run(gateway, limit=100_000):
    for _ in range(limit):
        if not gateway.step():
            return
    raise AssertionError("the gateway does not come to rest")


def read(generation):
    """Return (text, records, how it ended)."""
    *deltas, end = list(generation)
    assert all(isinstance(delta, TextDelta) for delta in deltas)
    text = "".join(delta.text for delta in deltas)
    usage = end.usage
    counts = usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens
    return text, [record for delta in deltas for record in delta.tokens], (end.reason, counts)


def answers(requests, drafter=None, *, depth=6, adaptive=False, **options):
    """Return what each request gets, and the gateway."""
    backend = FakeBackend(**options)
    speculation = None if drafter is None else Speculation(drafter, backend.facts, depth=depth, adaptive=adaptive)
    gateway = Gateway(FakeModel(), backend, speculation=speculation, limits=Limits(5000, 5000))
    generations = [gateway.submit(request) for request in requests]
    run(gateway)
    return [read(generation) for generation in generations], gateway, backend


# --- the answer is the same ---------------------------------------------------------------------------------------

SHAPES = [
    pytest.param({"sampling": GREEDY}, id="greedy"),
    pytest.param({"sampling": SamplingParameters(temperature=0.9, seed=7)}, id="sampled"),
    pytest.param(
        {
            "sampling": SamplingParameters(
                temperature=0, repeat_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.7, logit_bias=((9, 2.0),)
            )
        },
        id="penalties",
    ),
    pytest.param({"sampling": GREEDY, "top_logprobs": 3}, id="logprobs"),
    pytest.param({"sampling": GREEDY, "grammar": 'root ::= ("ab" | "c" [0-9])*'}, id="grammar"),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("rate", "in_flight", "adaptive"), [(0.0, 1, False), (0.7, 3, False), (1.0, 1, True), (0.7, 3, True)]
)
def test_every_answer_is_what_it_is_without_guesses(shape, rate, in_flight, adaptive):
    options = {"n_sequences": 3, "n_chunk": 16, "in_flight": in_flight}
    requests = [GenerationRequest(numbers(3 + 9 * n, n), 20, ignore_end=True, **shape) for n in range(5)]
    expected, *_ = answers(requests, **options)
    found, gateway, backend = answers(requests, KnowingDrafter(rate), adaptive=adaptive, **options)
    assert found == expected
    held = [slot.held_tokens for slot in gateway.state().slots]
    assert held == [len(cache) for cache in backend.caches]  # nothing of a wrong guess is left


def test_right_guesses_save_steps_and_are_counted():
    request = GenerationRequest(numbers(10, 1), 28, GREEDY, ignore_end=True)
    _, plain, _ = answers([request])
    _, gateway, backend = answers([request], KnowingDrafter(1.0), depth=6)
    state = gateway.state()
    assert plain.state().turns == 28
    assert (state.turns, state.drafted, state.accepted, state.generated_tokens) == (5, 23, 23, 28)
    assert [step for ((_, step),) in backend.steps] == [10, 7, 7, 7, 6]


def test_nothing_is_guessed_beyond_the_wanted_length_or_the_context():
    *_, backend = answers([GenerationRequest(numbers(5, 1), 4, GREEDY, ignore_end=True)], KnowingDrafter(1.0))
    assert [rows for ((_, rows),) in backend.steps] == [5, 3]
    request = GenerationRequest(numbers(5, 1), None, GREEDY, ignore_end=True)
    found, _, backend = answers([request], KnowingDrafter(1.0), n_ctx=16)
    assert found == answers([request], n_ctx=16)[0]
    assert [rows for ((_, rows),) in backend.steps] == [5, 7, 4]


@pytest.mark.parametrize(
    ("script", "stop"),
    [
        pytest.param([*b"some text STOP more text than is wanted"], ("STOP",), id="stop string"),
        pytest.param([*b"short", END_OF_TURN, *b"never said"], (), id="end of the turn"),
        pytest.param([263, 264, 263, 264, 265, *b"x"], (), id="half characters"),
    ],
)
def test_an_end_inside_of_right_guesses_is_the_end(script, stop):
    prompt = numbers(12, 3)

    def say(held):
        index = len(held) - len(prompt)
        return script[index] if index < len(script) else None

    request = GenerationRequest(prompt, 60, GREEDY, stop)
    expected, *_ = answers([request], script=say)
    found, gateway, backend = answers([request], KnowingDrafter(1.0, script=say), script=say)
    assert found == expected
    assert gateway.state().slots[0].held_tokens == len(backend.caches[0])
    # The slot serves the next turn of the conversation as before.
    again = GenerationRequest((*prompt, *script[:5], 7, 8), 6, GREEDY, ignore_end=True)
    later = gateway.submit(again)
    run(gateway)
    assert [record.token for record in read(later)[1]] == greedy(again.prompt, 6, say)


@pytest.mark.parametrize("error", [ComputeError("broken"), StepDroppedError("not this one")])
@pytest.mark.parametrize("at", [2, 3, 5])
def test_a_step_that_fails_leaves_no_guess_behind(error, at):
    backend = FakeBackend(n_sequences=2)
    gateway = Gateway(
        FakeModel(), backend, speculation=Speculation(KnowingDrafter(0.6), backend.facts, adaptive=False)
    )
    backend.before_step = FailOnce(error, at)
    prompts = [numbers(6, n) for n in range(4)]
    generations = [gateway.submit(GenerationRequest(p, 20, GREEDY, ignore_end=True)) for p in prompts]
    run(gateway)
    for prompt, generation in zip(prompts, generations, strict=True):
        try:
            tokens = [record.token for record in read(generation)[1]]
        except ComputeError:
            continue
        assert tokens == greedy(prompt, 20)
    assert gateway.state().failed == (2 if isinstance(error, ComputeError) else 0)
    assert [slot.held_tokens for slot in gateway.state().slots] == [len(cache) for cache in backend.caches]


def test_who_leaves_in_the_middle_of_guesses_leaves_none():
    backend = FakeBackend()
    gateway = Gateway(FakeModel(), backend, speculation=Speculation(KnowingDrafter(1.0), backend.facts))
    leaving = gateway.submit(GenerationRequest(numbers(6, 1), 50, GREEDY, ignore_end=True))
    backend.before_step = lambda batch: leaving.cancel() if len(backend.steps) == 3 else None
    run(gateway)
    assert read(leaving)[2][0] == "cancelled"
    assert gateway.state().slots[0].held_tokens == len(backend.caches[0])
    late = gateway.submit(GenerationRequest(numbers(6, 1), 9, GREEDY, ignore_end=True))
    run(gateway)
    assert [record.token for record in read(late)[1]] == greedy(numbers(6, 1), 9)


def test_guesses_take_only_the_rows_that_are_left():
    requests = [GenerationRequest(numbers(3, n), 12, GREEDY, ignore_end=True) for n in range(3)]
    requests.append(GenerationRequest(numbers(200, 9), 3, GREEDY, ignore_end=True))
    plain, _, without = answers(requests, n_sequences=4, n_chunk=16)
    found, _, backend = answers(requests, KnowingDrafter(1.0), n_sequences=4, n_chunk=16)
    assert found == plain
    assert max(sum(rows for _, rows in step) for step in backend.steps) <= 16
    # The long prompt is read as fast as without guesses.
    chunks = [[dict(step).get(3, 0) for step in steps] for steps in (without.steps, backend.steps)]
    assert chunks[0][:10] == chunks[1][:10]


# --- the distribution ---------------------------------------------------------------------------------------------


def test_sampled_answers_keep_their_distribution():
    """A chi-squared test of the second and third token against the model's own probabilities, over many seeds."""
    prompt, count, top_k = numbers(8, 5), 1000, 4
    sampling = [SamplingParameters(temperature=1.3, top_k=top_k, seed=seed) for seed in range(count)]
    requests = [GenerationRequest(prompt, 3, one, ignore_end=True) for one in sampling]
    found, gateway, _ = answers(requests, KnowingDrafter(1.0), depth=2, n_sequences=8, n_chunk=63)
    state = gateway.state()
    assert 0.1 < state.accepted / state.drafted < 0.9  # both ways are tried
    tokens = [tuple(record.token for record in records) for _, records, _ in found]
    for length in (2, 3):
        counts = Counter(answer[:length] for answer in tokens)
        expected = {answer: count * probability for answer, probability in tree(prompt, length, top_k, 1.3).items()}
        assert set(counts) <= set(expected)
        large = {answer for answer, wanted in expected.items() if wanted >= 5}
        chi = sum((counts[answer] - expected[answer]) ** 2 / expected[answer] for answer in large)
        degrees = len(large) - 1
        assert chi < degrees + 4 * np.sqrt(2 * degrees)


def tree(prompt, length, top_k, temperature):
    """Return the probability of each answer of a length."""
    found = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for answer, probability in found.items():
            logits = logits_of([*prompt, *answer]).astype(np.float64) / temperature
            kept = np.argsort(-logits)[:top_k]
            weights = np.exp(logits[kept] - logits[kept].max())
            for token, weight in zip(kept.tolist(), weights / weights.sum(), strict=True):
                longer[(*answer, token)] = probability * weight
        found = longer
    return found


# --- looking a text up in itself ----------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 9))
def test_the_index_finds_what_a_search_finds(tokens, count):
    index = NgramIndex()
    for length in range(1, len(tokens) + 1):
        index.extend(tokens[:length])
    places = [end for end in range(1, len(tokens) - 1) if tokens[end - 1 : end + 1] == tokens[-2:]][-8:]

    def common(end):
        found = 0
        while found <= end and found < len(tokens) - 1 and tokens[end - found] == tokens[-1 - found]:
            found += 1
        return min(found, 32)

    best = max(((common(end), end) for end in places), default=(0, 0))
    length, place = index.longest()
    assert (length, place) == (best if best[0] >= SHORTEST else (0, 0))
    if length:
        whole = list(tokens)
        for step in range(count):
            whole.append(whole[place + 1 + step])
        assert index.guess(place, count) == tuple(whole[len(tokens) :])


def test_a_text_that_repeats_itself_is_guessed():
    script = [*numbers(12, 4)] * 6
    prompt = numbers(5, 1)

    def say(held):
        return script[len(held) - len(prompt)]

    request = GenerationRequest(prompt, 70, GREEDY, ignore_end=True)
    found, gateway, _ = answers([request], NgramDrafter(), depth=8, script=say, n_chunk=32)
    assert [record.token for record in found[0][1]] == script[:70]
    state = gateway.state()
    assert state.generated_tokens / state.turns > 2.5
    assert state.accepted == state.drafted


# --- how deep -----------------------------------------------------------------------------------------------------


def test_micro_batches_are_cut_as_the_engine_cuts_them():
    assert micro_batches({0: 1, 1: 1, 2: 1}, 63) == [3]
    assert micro_batches({0: 5, 1: 1}, 63) == [2, 4]
    assert micro_batches({0: 5, 1: 1, 2: 5}, 63) == [3, 4, 4]  # 0 and 2 are no neighbours
    assert micro_batches({0: 1, 2: 1}, 63) == [1, 1]
    assert micro_batches({0: 100}, 63) == [63, 37]
    assert micro_batches({0: 40, 1: 40}, 63) == [62, 18]


def test_the_cuts_of_the_engine_are_these(monkeypatch):
    """The same sizes as an independent reading of ``split_equal``: token by token."""
    rng = np.random.default_rng(3)
    for _ in range(200):
        lengths = {int(s): int(rng.integers(1, 20)) for s in sorted(rng.choice(8, rng.integers(1, 8), replace=False))}
        left, expected = dict(lengths), []
        while left:
            chosen = []
            for slot in left:
                if not chosen or slot == chosen[-1] + 1:
                    chosen.append(slot)
            tokens = 0
            while all(left[slot] > tokens for slot in chosen) and (tokens + 1) * len(chosen) <= 16:
                tokens += 1
            expected.append(tokens * len(chosen))
            left = {slot: n - tokens * (slot in chosen) for slot, n in left.items() if n > tokens * (slot in chosen)}
        assert micro_batches(lengths, 16) == expected


def times(fixed, per_row):
    made = StepTimes()
    for rows in range(1, 33):
        made.observe([rows], fixed + per_row * rows)
    return made


def choose(rates, made, **options):
    candidates = [Candidate(slot, 8, rate) for slot, rate in enumerate(rates)]
    return best_choice(
        candidates, dict.fromkeys(range(len(rates)), 1), made, n_chunk=63, streams=len(rates), **options
    )


def test_depth_follows_cost_and_rate():
    assert choose([0.9], times(1.0, 0.0)).depth == 8  # rows cost nothing: a round trip
    assert choose([0.9], times(0.0, 1.0)).gain < 1  # rows cost all: nothing to win
    middle = choose([0.6], times(0.5, 0.5))
    assert middle.depth == 1
    assert choose([0.6], times(0.5, 0.5), draft_seconds=0.5).gain < 1 < middle.gain
    shallow, deep = choose([0.5], times(1.0, 0.1)), choose([0.95], times(1.0, 0.1))
    assert 1 <= shallow.depth < deep.depth
    assert shallow.gain > 1


def test_only_answers_that_are_guessed_well_get_guesses():
    choice = choose([0.05, 0.95], times(1.0, 0.2))
    assert choice.slots in ((1,), (1, 0))
    assert choose([0.95, 0.95], times(1.0, 0.01)).slots == (0, 1)
    # Another length is another micro-batch, with its fixed cost: then useless guesses cost less.
    assert choose([0.0, 0.4], times(1.0, 0.0)).slots == (1, 0)


def test_one_disturbed_step_changes_no_time():
    made = StepTimes()
    assert made.seconds([3]) is None
    for _ in range(5):
        made.observe([1], 1.0)
    made.observe([1], 50.0)
    for _ in range(3):
        made.observe([5], 3.0)
    made.observe([2, 4], 100.0)  # of different sizes: nobody knows which took how long
    assert made.seconds([1]) == 1.0
    assert made.seconds([3]) == 2.0
    assert made.seconds([9, 1]) == 6.0
    assert (made.age(1), made.age(5), made.age(2)) == (4, 1, None)


def test_a_machine_that_gets_slower_changes_all_times_alike():
    made = StepTimes()
    for _ in range(15):
        made.observe([1], 1.5)
        made.observe([5], 3.5)
    for _ in range(20):
        made.observe([1], 6.0)
    assert made.seconds([1]) == pytest.approx(6.0, rel=0.01)
    assert made.seconds([5]) == pytest.approx(14.0, rel=0.02)
    made.observe([5], 14.0)
    assert made.seconds([1]) == pytest.approx(6.0, rel=0.01)


def test_a_size_that_was_not_seen_for_long_is_forgotten():
    made = times(1.0, 0.5)
    for _ in range(600):
        made.observe([1], 1.5)
        made.observe([2], 1.6)
    assert made.age(5) is None
    assert made.seconds([5]) == pytest.approx(1.9, rel=0.01)


def test_rates_are_an_answers_own_with_what_is_known_of_others():
    everybody = Rates(0.5)
    one = Rates(everybody)
    for _ in range(200):
        one.observe(1, right=True)
    other = Rates(everybody)
    assert one.rate(1) > 0.9
    assert other.rate(1) > 0.85
    assert other.rate(2) == 0.5
    for _ in range(20):
        other.observe(1, right=False)
    assert other.rate(1) < 0.2


def test_what_cannot_check_guesses_says_why():
    facts = BackendFacts(N_VOCAB, 64, 1, 16, 16)
    assert why_not(facts) == ""
    assert "recurrent" in why_not(BackendFacts(N_VOCAB, 64, 1, 16, 16, cuttable=False))
    assert "grouped" in why_not(BackendFacts(N_VOCAB, 64, 1, 16, 16, invariance=Invariance.NONE))


def timed(rate, fixed, per_row, *, adaptive=True, count=400, streams=1, noise=0.0, **drafter):
    """Return (seconds, tokens per turn) of answers on a clock that steps move."""
    clock = Clock()
    backend = TimedBackend(clock, fixed, per_row, noise=noise, n_sequences=streams)
    speculation = None
    if rate is not None:
        made = KnowingDrafter(rate, clock=clock, **drafter)
        speculation = Speculation(made, backend.facts, adaptive=adaptive)
    gateway = Gateway(FakeModel(), backend, speculation=speculation, now=clock)
    generations = [
        gateway.submit(GenerationRequest(numbers(20 + n, n), count, GREEDY, ignore_end=True)) for n in range(streams)
    ]
    run(gateway)
    for generation in generations:
        read(generation)
    state = gateway.state()
    return clock.now, state.generated_tokens / state.turns


@pytest.mark.parametrize("rtt", [0.0, 0.005, 0.025, 0.08])
@pytest.mark.parametrize("per_row", [0.001, 0.008])
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6, 0.95])
def test_adapting_never_loses(rate, per_row, rtt):
    fixed = 0.004 + rtt
    without, _ = timed(None, fixed, per_row)
    with_guesses, _ = timed(rate, fixed, per_row)
    assert with_guesses <= 1.05 * without


@pytest.mark.parametrize("seconds_each", [0.001, 0.015])
@pytest.mark.parametrize("rtt", [0.0, 0.08])
@pytest.mark.parametrize("rate", [0.0, 0.5, 0.95])
def test_adapting_never_loses_with_a_drafter_that_takes_time(rate, rtt, seconds_each):
    options = {"is_free": False, "seconds_each": seconds_each, "prior": 0.7}
    without, _ = timed(None, 0.004 + rtt, 0.008)
    with_guesses, _ = timed(rate, 0.004 + rtt, 0.008, **options)
    assert with_guesses <= 1.05 * without


@pytest.mark.parametrize("streams", [2, 4])
@pytest.mark.parametrize("rate", [0.2, 0.9])
def test_adapting_never_loses_with_several_answers_and_noise(rate, streams):
    without, _ = timed(None, 0.010, 0.006, streams=streams, noise=0.2, count=200)
    with_guesses, _ = timed(rate, 0.010, 0.006, streams=streams, noise=0.2, count=200)
    assert with_guesses <= 1.05 * without


def test_depth_falls_to_zero_where_it_does_not_pay_and_rises_where_it_does():
    assert timed(0.2, 0.004, 0.008)[1] < 1.1
    assert timed(0.95, 0.084, 0.008)[1] > 4


def test_depth_adapts_when_the_cost_changes():
    """A fast network becomes a slow one in the middle of an answer, and guessing begins to pay."""
    clock = Clock()
    backend = TimedBackend(clock, 0.0, 0.01)
    gateway = Gateway(FakeModel(), backend, speculation=Speculation(KnowingDrafter(0.9), backend.facts), now=clock)
    generation = gateway.submit(GenerationRequest(numbers(9, 1), 2500, GREEDY, ignore_end=True))
    while gateway.state().generated_tokens < 400:
        gateway.step()
    before = gateway.state()
    backend.fixed = 0.1
    while gateway.state().generated_tokens < 1500:  # what is known of the fast network is forgotten
        gateway.step()
    between = gateway.state()
    run(gateway)
    after = gateway.state()
    assert before.generated_tokens / before.turns < 1.1
    assert (between.generated_tokens - before.generated_tokens) / (between.turns - before.turns) > 1.5
    assert (after.generated_tokens - between.generated_tokens) / (after.turns - between.turns) > 3
    assert [record.token for record in read(generation)[1]] == greedy(numbers(9, 1), 2500)


def test_settings_of_a_later_request_begin_with_a_new_text():
    backend = FakeBackend()
    drafter = KnowingDrafter(1.0)
    gateway = Gateway(FakeModel(), backend, speculation=Speculation(drafter, backend.facts))
    for seed in range(3):
        gateway.submit(GenerationRequest(numbers(5, seed), 8, GREEDY, ignore_end=True))
    run(gateway)
    assert drafter.begun == [0, 0, 0]


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_mixture_of_requests_gets_its_answers(data):
    in_flight = data.draw(st.integers(1, 3))
    invariance = data.draw(st.sampled_from([Invariance.SEVERAL, Invariance.ONE]))
    options = {"n_sequences": 3, "n_chunk": 12, "in_flight": in_flight, "invariance": invariance, "n_ctx": 64}
    requests = [
        GenerationRequest(
            numbers(data.draw(st.integers(1, 40)), n),
            data.draw(st.one_of(st.none(), st.integers(1, 30))),
            SamplingParameters(temperature=data.draw(st.sampled_from([0.0, 1.0])), seed=n),
            data.draw(st.sampled_from([(), ("a",)])),
        )
        for n in range(data.draw(st.integers(1, 6)))
    ]
    rate = data.draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))
    adaptive = data.draw(st.booleans())
    expected, *_ = answers(requests, **options)
    found, gateway, backend = answers(requests, KnowingDrafter(rate), adaptive=adaptive, **options)
    assert [answer[:2] for answer in found] == [answer[:2] for answer in expected]
    assert [slot.held_tokens for slot in gateway.state().slots] == [len(cache) for cache in backend.caches]


# --- how it is told -----------------------------------------------------------------------------------------------


def test_status_metrics_and_monitor_say_how_guessing_goes():
    request = GenerationRequest(numbers(10, 1), 28, GREEDY, ignore_end=True)
    ((_, _, end),), gateway, _ = answers([request], KnowingDrafter(1.0), depth=6)
    report = FleetReport(
        model="fake",
        contract="exact",
        engine="none",
        state=gateway.state,
        statistics=None,
        now=lambda: 1.0,
        wall=lambda: 2.0,
        speculation="auto: the text itself",
    )
    snapshot = report.snapshot()
    assert snapshot.speculation == SpeculationSnapshot("auto: the text itself", 23, 23, 28 / 5)
    assert FleetSnapshot.from_json(snapshot.to_json()).speculation == snapshot.speculation
    console = Console(width=120, file=io.StringIO())
    console.print(render(View("http://here", snapshot), 120))
    assert "5.60 tokens/step, 100 % of guesses right" in console.file.getvalue()
    found = {reading.name: reading.value for reading in readings(gateway.state(), snapshot)}
    assert (found["drafted_tokens"], found["accepted_tokens"], found["tokens_per_step"]) == (23, 23, 5.6)
    assert end[0] == "length"


def test_an_answer_says_how_many_of_its_tokens_were_guessed():
    backend = FakeBackend()
    gateway = Gateway(
        FakeModel(), backend, speculation=Speculation(KnowingDrafter(1.0), backend.facts, adaptive=False, depth=6)
    )
    generation = gateway.submit(GenerationRequest(numbers(10, 1), 28, GREEDY, ignore_end=True))
    run(gateway)
    *_, end = list(generation)
    times = timings_body(end)
    assert (times["draft_n"], times["draft_n_accepted"], times["predicted_n"], times["prompt_n"]) == (23, 23, 28, 10)
