from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import InputError
from orchestrator.models.gguf import GgufFile
from orchestrator.types import Ownership
from orchestrator.workers.ownership import (
    choose_ownership,
    describe_ownership,
    ownership_arguments,
    parse_ownership,
    split_evenly,
)

ids = st.lists(st.integers(0, 40), min_size=1, max_size=8, unique=True).map(lambda found: tuple(sorted(found)))


@given(st.dictionaries(st.integers(0, 40), ids, max_size=8))
def test_any_ownership_survives_the_command_line(experts: dict[int, tuple[int, ...]]) -> None:
    arguments = ownership_arguments(Ownership(experts))
    assert arguments[::2] == ["--own"] * (len(arguments) // 2)
    assert parse_ownership(arguments[1::2]).experts == experts


def test_describe_joins_layers_with_equal_experts() -> None:
    assert describe_ownership(Ownership({0: (0, 1), 1: (2,), 2: (0, 1), 3: ()})) == [("0,2", "0-1"), ("1", "2")]


@pytest.fixture
def model(synthetic: Callable[[str], Path]) -> GgufFile:
    return GgufFile.open(synthetic("qwen2moe"))


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_an_even_split_covers_each_expert_once(model: GgufFile, count: int) -> None:
    shares = split_evenly(model, count)
    assert len(shares) == count
    for layer in model.moe_layers:
        held = [expert for share in shares for expert in share.experts[layer]]
        assert sorted(held) == list(range(model.n_expert))
        sizes = {len(share.experts[layer]) for share in shares}
        assert max(sizes) - min(sizes) <= 1


def test_more_workers_than_experts_is_an_input_error(model: GgufFile) -> None:
    with pytest.raises(InputError, match="cannot be split"):
        split_evenly(model, model.n_expert + 1)
    with pytest.raises(InputError, match="cannot be split"):
        split_evenly(model, 0)


def test_choose_takes_all_by_default(model: GgufFile) -> None:
    chosen = choose_ownership(model)
    assert chosen.layers == model.moe_layers
    assert chosen.count == len(model.moe_layers) * model.n_expert


def test_choose_follows_the_options(model: GgufFile) -> None:
    first, second = model.moe_layers[:2]
    assert choose_ownership(model, f"{first}", "0-1,3").experts == {first: (0, 1, 3)}
    assert choose_ownership(model, own=[f"{first}:0", f"{first}-{second}:2"]).experts == {first: (0, 2), second: (2,)}


@pytest.mark.parametrize(
    ("layers", "experts", "own", "words"),
    [
        ("99", None, (), "no experts in layer 99"),
        (None, "0-999", (), "has no expert"),
        ("x", None, (), "--layers"),
        (None, "3-1", (), "--experts"),
        (None, None, ("0",), "who owns what"),
        (None, None, ("99:0",), "no experts in layer 99"),
        ("0", None, ("0:0",), "--own"),
    ],
)
def test_what_the_model_does_not_have_is_an_input_error(
    model: GgufFile, layers: str | None, experts: str | None, own: tuple[str, ...], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        choose_ownership(model, layers, experts, own)
