"""`linkcpp bench invariance`: mixtures that cover everything, findings in words, and the real engine for a few."""

from __future__ import annotations

import json
import math

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.bench.invariance import Finding, finding_of, run_invariance
from orchestrator.cli.app import main
from orchestrator.errors import InputError
from orchestrator.onboarding.side_by_side import mixture


@given(
    st.lists(st.integers(1, 80), min_size=1, max_size=8), st.integers(1, 5), st.integers(1, 63), st.integers(0, 1000)
)
def test_a_mixture_gives_every_token_once_in_order_and_fits_its_steps(lengths, slots, rows, seed):
    given_so_far = [0] * len(lengths)
    owner = {}
    for parts in mixture(lengths, slots, rows, seed):
        assert sum(part.stop - part.start for part in parts) <= rows
        assert [part.slot for part in parts] == sorted({part.slot for part in parts})
        for part in parts:
            assert 0 <= part.slot < slots
            assert part.start == given_so_far[part.text] < part.stop
            assert owner.setdefault(part.text, part.slot) == part.slot
            given_so_far[part.text] = part.stop
    assert given_so_far == lengths


def test_a_mixture_mixes():
    steps = list(mixture([300, 70, 45, 33, 64, 20], 4, 60, 0))
    sizes = [len(parts) for parts in steps]
    assert max(sizes) == 4
    chunks = {part.stop - part.start for parts in steps for part in parts}
    assert {1, 2} < chunks
    assert max(chunks) >= 20
    beside = [parts for parts in steps if len(parts) > 1 and len({p.stop - p.start for p in parts}) > 1]
    assert len(beside) > 5  # prompts beside single tokens


def figures(differing, rows=100):
    first = 3 if differing else None
    return {"identical": not differing, "rows": rows, "differing": differing, "first": first}


def test_findings_in_words():
    same = finding_of("llama", {"whole_text": False, "one": {"2": figures(0)}, "several": figures(0)})
    assert (same.one, same.several, same.detail, same.expected) == (True, True, "every byte equal", True)
    alone = finding_of("llama", {"whole_text": False, "one": {"2": figures(0)}, "several": figures(5)})
    assert (alone.one, alone.several, alone.expected) == (True, False, False)
    assert alone.detail == "side by side: 5 of 100 differ, the first is 3"
    known = finding_of("minimax-01", {"whole_text": False, "one": {"2": figures(9)}, "several": figures(9)})
    assert (known.one, known.expected) == (False, True)
    encoder = finding_of("nomic-bert-moe", {"whole_text": True})
    assert (encoder.one, encoder.several, encoder.expected) == (None, None, True)
    assert not Finding("llama", None, None, "failed: it was killed").expected


def test_an_unknown_architecture_is_named():
    with pytest.raises(InputError, match="llamma"):
        run_invariance(["llamma"], 1)


@pytest.mark.parametrize("architecture", ["qwen2moe", "qwen35moe"])
def test_the_real_engine_is_invariant(architecture):
    result = CliRunner().invoke(
        main, ["bench", "invariance", "--architecture", architecture, "--threads", "1", "--no-cost", "--json"]
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert [(row["one_sequence"], row["several_sequences"]) for row in report["architectures"]] == [(True, True)]


def test_an_architecture_that_is_not_invariant_is_found_out():
    """The proof can fail: this architecture's attention depends on where chunks begin."""
    (found,) = run_invariance(["minimax-01"], 1)
    assert (found.one, found.several) == (False, False)
    assert "2 rows: 299 of 300 differ" in found.detail


def test_the_cost_is_measured_as_ratios(synthetic):
    options = ["--architecture", "llama", "--threads", "1", "--pairs", "1", "--model", str(synthetic("llama"))]
    result = CliRunner().invoke(main, ["bench", "invariance", *options, "--json"])
    assert result.exit_code == 0, result.output
    cost = json.loads(result.stdout)["cost"]
    ratios = [
        cost[name] for name in ("prefill_ratio", "decode_ratio", "four_sequences_ratio", "four_sequences_to_one")
    ]
    assert all(math.isfinite(ratio) and ratio > 0 for ratio in ratios)
