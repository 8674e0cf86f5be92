"""The gate's measures against closed forms, and its verdicts against cases whose right answer is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import InputError
from orchestrator.types import Contract
from orchestrator.verification.gate import (
    COSINE_GOOD,
    Comparison,
    Margins,
    NoiseFloor,
    batch_invariant,
    compare,
    judge,
    merge,
)


def logits(positions: int = 40, vocabulary: int = 50, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, (positions, vocabulary)).astype(np.float32)


def with_angle(oracle: np.ndarray, cosine: float, seed: int = 1) -> np.ndarray:
    """Rows at exactly this cosine from the oracle's: an orthogonal part of the right length is added."""
    reference = oracle.astype(np.float64)
    noise = np.random.default_rng(seed).normal(size=reference.shape)
    noise -= reference * ((noise * reference).sum(1) / (reference**2).sum(1))[:, None]
    noise *= (np.linalg.norm(reference, axis=1) / np.linalg.norm(noise, axis=1))[:, None]
    return (reference + noise * math.tan(math.acos(cosine))).astype(np.float32)


def comparison(cosines: list[float], agreement: float = 1.0) -> Comparison:
    count = len(cosines)
    agreeing = np.arange(count) < round(agreement * count)
    return Comparison(np.array(cosines), np.full(count, 1e-3), np.zeros(count, bool), agreeing, 0.1)


def floor(argmax: float = 0.98, cosine_min: float = 0.986, cosine_mean: float = 0.9995) -> NoiseFloor:
    return NoiseFloor(argmax, cosine_min, cosine_mean, 1e-3, 446, (512, 1), True)


def test_equal_logits_are_identical_in_every_measure() -> None:
    result = compare(logits(), logits().copy())
    assert result.byte_identical
    assert (result.argmax_agreement, result.cosine_min, result.cosine_mean) == (1.0, 1.0, 1.0)
    assert (result.kl, result.kl_max, result.max_difference) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("bit", [0, 22, 31])
def test_one_bit_of_one_value_is_seen(bit: int) -> None:
    oracle = logits()
    other = oracle.copy()
    other.view(np.uint32)[17, 3] ^= np.uint32(1 << bit)
    result = compare(other, oracle)
    assert not result.byte_identical
    assert np.flatnonzero(~result.identical).tolist() == [17]
    assert not judge(Contract.EXACT, result, floor()).passed
    assert "number 17" in judge(Contract.EXACT, result, floor()).reason


def test_negative_zero_is_another_answer() -> None:
    oracle = np.zeros((1, 4), np.float32)
    assert not compare(-oracle, oracle).byte_identical


def test_cosine_is_the_angle() -> None:
    oracle = logits()
    result = compare(with_angle(oracle, 0.9), oracle)
    assert result.cosine_min == pytest.approx(0.9, abs=1e-6)
    assert result.cosine_mean == pytest.approx(0.9, abs=1e-6)


def test_a_common_factor_shows_in_the_divergence_only() -> None:
    oracle = logits()
    result = compare(oracle * np.float32(2), oracle)
    assert result.cosine_min == pytest.approx(1.0, abs=1e-12)
    assert result.argmax_agreement == 1.0
    assert result.kl > 0.01


def test_divergence_of_two_words_is_the_closed_form() -> None:
    oracle = np.log(np.array([[0.75, 0.25]], np.float32))
    other = np.log(np.array([[0.5, 0.5]], np.float32))
    expected = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    assert compare(other, oracle).kl == pytest.approx(expected, rel=1e-6)


def test_divergence_ignores_a_constant() -> None:
    oracle = logits()
    assert compare(oracle + np.float32(16), oracle).kl == pytest.approx(0.0, abs=1e-9)


def test_argmax_agreement_counts_positions() -> None:
    oracle = logits(10)
    other = oracle.copy()
    for row in (2, 7, 9):
        other[row, (oracle[row].argmax() + 1) % oracle.shape[1]] = 100.0
    assert compare(other, oracle).argmax_agreement == pytest.approx(0.7)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_never_good(poison: float) -> None:
    oracle = logits()
    other = oracle.copy()
    other[5, 5] = poison
    result = compare(other, oracle)
    assert result.cosine_min == 0.0
    assert result.kl == math.inf
    assert result.max_difference == math.inf
    assert not result.agreeing[5]
    assert not judge(Contract.SUM, result, floor()).passed


def test_zeros_have_no_direction() -> None:
    result = compare(np.zeros_like(logits()), logits())
    assert result.cosine_min == 0.0
    assert not judge(Contract.SUM, result, floor()).passed


@pytest.mark.parametrize(
    "other",
    [logits(39), logits(40, 51), logits().astype(np.float64), logits()[0]],
    ids=["positions", "vocabulary", "type", "dimensions"],
)
def test_different_shapes_are_refused(other: np.ndarray) -> None:
    with pytest.raises(InputError, match="cannot be compared"):
        compare(other, logits())


def test_strided_views_are_compared_by_value() -> None:
    wide = logits(20, 100)
    assert compare(wide[::2, ::2], wide[::2, ::2].copy()).byte_identical


def test_merge_keeps_order_and_extremes() -> None:
    oracle = logits(6)
    other = oracle.copy()
    other[4, 0] += 1
    whole = compare(other, oracle)
    joined = merge([compare(other[:2], oracle[:2]), compare(other[2:], oracle[2:])])
    assert joined.positions == 6
    assert joined.identical.tolist() == whole.identical.tolist()
    assert joined.cosines.tolist() == whole.cosines.tolist()
    assert joined.max_difference == whole.max_difference


def test_nothing_compared_passes_nothing() -> None:
    empty = merge([])
    assert not empty.byte_identical
    assert not judge(Contract.EXACT, empty, floor()).passed
    assert not judge(Contract.SUM, empty, floor()).passed
    assert not batch_invariant([])


def test_identical_logits_pass_every_contract_without_a_floor() -> None:
    result = compare(logits(), logits())
    assert judge(Contract.EXACT, result, None).passed
    assert judge(Contract.SUM, result, None).passed


def test_exact_has_no_tolerance_however_noisy_the_model() -> None:
    oracle = logits()
    other = np.nextafter(oracle, np.float32(np.inf))
    assert judge(Contract.SUM, compare(other, oracle), None).passed
    assert not judge(Contract.EXACT, compare(other, oracle), floor(0.5, 0.1, 0.2)).passed


def test_absolutely_good_needs_no_floor() -> None:
    good = comparison([COSINE_GOOD + 1e-6] * 100)
    assert judge(Contract.SUM, good, None).passed
    assert judge(Contract.SUM, good, floor(1.0, 1.0, 1.0)).passed


@pytest.mark.parametrize(
    ("cosines", "agreement", "passed", "word"),
    [
        ([0.9998] * 99 + [0.987], 0.98, True, "not worse"),
        ([0.9998] * 99 + [0.980], 0.98, True, "not worse"),  # distance 0.020 <= 1.5 x 0.014
        ([0.9998] * 99 + [0.978], 0.98, False, "smallest cosine"),
        ([0.9993] * 100, 0.98, False, "mean cosine"),  # distance 0.0007 > 1.25 x 0.0005
        ([0.9998] * 100, 0.97, True, "not worse"),
        ([0.9998] * 100, 0.96, False, "argmax"),
    ],
)
def test_lossy_contract_against_the_floor(cosines: list[float], agreement: float, passed: bool, word: str) -> None:
    verdict = judge(Contract.SUM, comparison(cosines, agreement), floor())
    assert verdict.passed is passed
    assert word in verdict.reason


def test_without_a_floor_a_middling_result_fails() -> None:
    assert not judge(Contract.SUM, comparison([0.9998] * 100, 0.98), None).passed


def test_an_absurd_floor_excuses_nothing() -> None:
    absurd = floor(0.1, -0.5, 0.3)
    assert not judge(Contract.SUM, comparison([0.9] * 100, 0.5), absurd).passed
    assert not judge(Contract.SUM, comparison([0.995] * 100, 0.5), absurd).passed
    assert not judge(Contract.SUM, comparison([0.98] * 100, 1.0), absurd).passed


def test_one_flip_is_always_within_the_margin_of_a_short_run() -> None:
    assert judge(Contract.SUM, comparison([0.99995] * 20, 0.95), floor(1.0, 0.9998, 0.9999)).passed
    assert not judge(Contract.SUM, comparison([0.99995] * 20, 0.90), floor(1.0, 0.9998, 0.9999)).passed


def test_margins_are_a_parameter() -> None:
    strict = Margins(argmax=0.0, cosine_min_factor=1.0, cosine_mean_factor=1.0)
    result = comparison([0.9998] * 99 + [0.985], 1.0)
    assert judge(Contract.SUM, result, floor()).passed
    assert not judge(Contract.SUM, result, floor(), strict).passed


def test_noise_floor_of_a_comparison() -> None:
    oracle = logits()
    measured = compare(with_angle(oracle, 0.999), oracle)
    condensed = NoiseFloor.of(measured, micro_batches=(512, 1), repacked=True)
    assert condensed.cosine_min == measured.cosine_min
    assert condensed.positions == 40
    assert judge(Contract.SUM, measured, condensed).passed


def test_batch_invariance_needs_every_size() -> None:
    oracle = logits()
    other = oracle.copy()
    other[3, 3] += 1
    same, different = compare(oracle, oracle), compare(other, oracle)
    assert batch_invariant([same, same])
    assert not batch_invariant([same, different])


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.0, 2.0))
def test_measures_stay_in_their_ranges(seed: int, scale: float) -> None:
    oracle = logits(5, 20, seed)
    noise = np.random.default_rng(seed + 1).normal(0, scale, oracle.shape).astype(np.float32)
    result = compare(oracle + noise, oracle)
    assert -1.0 <= result.cosine_min <= result.cosine_mean <= 1.0
    assert 0.0 <= result.argmax_agreement <= 1.0
    assert 0.0 <= result.kl <= result.kl_max
    assert result.byte_identical == ((oracle + noise).tobytes() == oracle.tobytes())
