from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import ComputeError
from orchestrator.gateway.sampling import (
    SamplingParameters,
    TokenHistory,
    adjust,
    choose_token,
    draw_uniform,
    filter_candidates,
    log_probabilities,
    most_likely,
)

LOGITS = np.array([0.5, 2.0, -1.0, 2.0, 1.0], dtype=np.float32)


def softmax(scores):
    weights = np.exp(scores - np.max(scores))
    return weights / weights.sum()


def test_greedy_takes_the_highest_and_the_lower_id_of_equals():
    assert choose_token(LOGITS, SamplingParameters(temperature=0), TokenHistory([]), 0) == 1


def test_draws_follow_the_distribution():
    parameters = SamplingParameters(seed=7)
    drawn = [choose_token(LOGITS, parameters, TokenHistory([]), index) for index in range(8000)]
    shares = np.bincount(drawn, minlength=5) / len(drawn)
    np.testing.assert_allclose(shares, softmax(LOGITS), atol=0.02)


def test_a_temperature_sharpens():
    parameters = SamplingParameters(seed=7, temperature=0.5)
    drawn = [choose_token(LOGITS, parameters, TokenHistory([]), index) for index in range(8000)]
    np.testing.assert_allclose(np.bincount(drawn, minlength=5) / 8000, softmax(LOGITS / 0.5), atol=0.02)


def test_the_draw_depends_on_seed_and_index_only():
    first = [draw_uniform(3, index) for index in range(20)]
    assert [draw_uniform(3, index) for index in reversed(range(20))] == first[::-1]
    assert len(set(first)) == 20
    assert draw_uniform(4, 0) != first[0]
    assert draw_uniform(-1, 0) == draw_uniform(2**64 - 1, 0)  # any 64-bit seed of a client is accepted


def test_draws_of_neighbouring_indices_are_independent():
    numbers = np.array([draw_uniform(11, index) for index in range(4000)])
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.05
    assert abs(numbers.mean() - 0.5) < 0.02


def reference_filter(scores, parameters):
    """The definition, step by step over a full sort."""
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    if parameters.top_k:
        order = order[: parameters.top_k]
    probabilities = softmax(scores[order])
    if parameters.top_p < 1:
        kept, total = [], 0.0
        for token, probability in zip(order, probabilities, strict=True):
            kept.append(token)
            total += probability
            if total >= parameters.top_p - 1e-12:
                break
        order = kept
    best = scores[order[0]]
    if parameters.min_p:
        order = [token for token in order if np.exp(scores[token] - best) >= parameters.min_p]
    return sorted(order)


@settings(max_examples=300, deadline=None)
@given(
    scores=st.lists(st.integers(-80, 80).map(lambda n: n / 8), min_size=1, max_size=60),
    top_k=st.integers(0, 70),
    top_p=st.sampled_from([1.0, 0.97, 0.9, 0.513, 0.1, 0.0]),
    min_p=st.sampled_from([0.0, 0.011, 0.33, 1.0]),
)
def test_the_filters_equal_their_definition(scores, top_k, top_p, min_p):
    parameters = SamplingParameters(top_k=top_k, top_p=top_p, min_p=min_p)
    tokens, weights = filter_candidates(np.array(scores), parameters)
    assert sorted(tokens.tolist()) == reference_filter(np.array(scores), parameters)
    assert (weights > 0).all()


def test_top_k_of_equals_keeps_the_lower_ids():
    tokens, _ = filter_candidates(np.zeros(10), SamplingParameters(top_k=3))
    assert tokens.tolist() == [0, 1, 2]


def test_repeat_penalty_divides_positive_and_multiplies_negative_logits_of_recent_tokens():
    history = TokenHistory([4, 0, 2, 1])
    scores = adjust(LOGITS, SamplingParameters(repeat_penalty=2.0, repeat_last_n=3), history)
    assert scores.tolist() == [0.25, 1.0, -2.0, 2.0, 1.0]
    unlimited = adjust(LOGITS, SamplingParameters(repeat_penalty=2.0, repeat_last_n=0), history)
    assert unlimited.tolist() == LOGITS.tolist()


def test_presence_and_frequency_penalties_look_at_the_answer_only():
    history = TokenHistory([0, 0])
    for token in (1, 1, 4):
        history.append(token)
    scores = adjust(LOGITS, SamplingParameters(presence_penalty=0.5, frequency_penalty=0.25), history)
    assert scores.tolist() == [0.5, 2.0 - 0.5 - 0.5, -1.0, 2.0, 1.0 - 0.5 - 0.25]


def test_logit_bias_is_added_and_can_forbid_a_token():
    parameters = SamplingParameters(temperature=0, logit_bias=((1, -100.0), (3, -100.0)))
    assert choose_token(LOGITS, parameters, TokenHistory([]), 0) == 4


def test_logits_that_are_no_numbers_are_an_error():
    with pytest.raises(ComputeError):
        choose_token(np.array([0.0, np.nan], dtype=np.float32), SamplingParameters(), TokenHistory([]), 0)


def test_minus_infinity_is_never_drawn():
    logits = np.array([-np.inf, 0.0, -np.inf], dtype=np.float32)
    drawn = {choose_token(logits, SamplingParameters(top_p=0.9), TokenHistory([]), index) for index in range(50)}
    assert drawn == {1}


def test_log_probabilities_and_the_most_likely():
    scores = log_probabilities(LOGITS)
    np.testing.assert_allclose(np.exp(scores), softmax(LOGITS.astype(float)))
    assert [token for token, _ in most_likely(scores, 3)] == [1, 3, 4]
    assert most_likely(scores, 0) == []
    assert len(most_likely(scores, 20)) == 5
