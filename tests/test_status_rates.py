from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.status.rates import TotalSeries


def series(*samples: tuple[float, float]) -> TotalSeries:
    made = TotalSeries()
    for now, total in samples:
        made.observe(now, total)
    return made


def test_nothing_observed_is_no_rate() -> None:
    assert TotalSeries().rate(5.0) == 0.0
    assert TotalSeries().history(5.0) == ()
    assert series((1.0, 100)).rate(5.0) == 0.0


def test_rate_is_the_growth_of_the_window_only() -> None:
    made = series((0, 0), (10, 1000), (11, 1010), (12, 1030))
    assert made.rate(12.0, window=2.0) == pytest.approx(15.0)
    assert made.rate(12.0, window=1.0) == pytest.approx(20.0)
    # Half of the window lies before the jump's end: 500 of the 1000 came in the last 5 of these 10 seconds.
    assert made.rate(10.0, window=5.0) == pytest.approx(100.0)


def test_rate_falls_to_zero_when_the_total_stands_still() -> None:
    made = series((0, 0), (1, 50), (2, 50), (3, 50))
    assert made.rate(3.0, window=2.0) == 0.0
    assert series((0, 0), (1, 50)).rate(60.0, window=2.0) == 0.0


def test_history_has_one_value_per_second_oldest_first() -> None:
    made = series((0, 0), (1, 4), (2, 4), (3, 10))
    assert made.history(3.0) == pytest.approx((4.0, 0.0, 6.0))
    assert made.history(3.0, seconds=2) == pytest.approx((0.0, 6.0))


def test_a_gap_between_looks_is_spread_evenly() -> None:
    assert series((0, 0), (4, 20)).history(4.0) == pytest.approx((5.0, 5.0, 5.0, 5.0))


def test_a_restarted_counter_begins_anew() -> None:
    made = series((0, 0), (1, 500), (2, 3), (3, 8))
    assert made.rate(3.0, window=10.0) == pytest.approx(5.0)


@given(st.lists(st.tuples(st.floats(0.01, 5.0), st.integers(0, 100)), min_size=1, max_size=60))
def test_history_adds_up_to_what_was_counted(steps: list[tuple[float, int]]) -> None:
    made = TotalSeries()
    now, total = 0.0, 0.0
    made.observe(now, total)
    for wait, count in steps:
        now, total = now + wait, total + count
        made.observe(now, total)
    counted = sum(made.history(now, seconds=10_000))
    # The fraction of a second at the end is not part of a whole one.
    assert counted == pytest.approx(made._total_at(math.floor(now)), abs=1e-6)


def test_a_second_keeps_its_value_from_one_look_to_the_next() -> None:
    made = series((0, 0), (0.9, 9), (1.9, 12), (2.4, 40))
    early = made.history(2.4)
    made.observe(3.3, 70)
    late = made.history(3.3)
    assert len(early) == 2
    assert late[:2] == early


def test_old_observations_are_dropped() -> None:
    made = TotalSeries(keep_seconds=10)
    for second in range(1000):
        made.observe(second, second)
    assert len(made._samples) <= 13
    assert made.rate(999.0, window=5.0) == pytest.approx(1.0)
