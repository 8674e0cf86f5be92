"""How the gate shares experts out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import InputError
from orchestrator.onboarding.star import Counters, split_unevenly, uneven_shares


@given(st.integers(1, 300), st.integers(1, 20))
def test_every_expert_has_one_owner_and_every_worker_an_expert(n_expert: int, workers: int) -> None:
    if workers > n_expert:
        with pytest.raises(InputError):
            split_unevenly(n_expert, workers)
        return
    shares = split_unevenly(n_expert, workers)
    assert [expert for share in shares for expert in share] == list(range(n_expert))
    assert len(shares) == workers
    assert all(shares)


def test_shares_are_uneven() -> None:
    assert [len(share) for share in split_unevenly(16, 3)] == [3, 5, 8]


def test_counters_are_differences() -> None:
    assert Counters(30, 900, 500) - Counters(10, 100, 200) == Counters(20, 800, 300)


def test_ownership_differs_from_layer_to_layer_and_leaves_no_gap() -> None:
    shares = uneven_shares((1, 2, 5), 16, 3)
    assert [len(share.experts[1]) for share in shares] == [3, 5, 8]
    assert shares[0].experts[1] == (0, 1, 2)
    assert shares[0].experts[2] == (13, 14, 15)
    for layer in (1, 2, 5):
        assert sorted(expert for share in shares for expert in share.experts[layer]) == list(range(16))
