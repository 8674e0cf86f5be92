"""The measurement of several answers at once: its arithmetic, and small runs of it over real processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from serve_process import ROOT, run_linkcpp

from orchestrator.bench.serving import Scaling, measure_scaling
from orchestrator.bench.serving_http import OURS, OURS_FREE, UPSTREAM, Comparison, compare_servers
from orchestrator.errors import EngineError


def test_ratios_are_those_of_rounds():
    # The machine slowed down by half in the last round: each still says 7.5, and 0.95.
    scaling = Scaling("m", "ring", 80.0, 8, 32, (10.0, 10.0, 5.0), (75.0, 75.0, 37.5), True, (0.0, 0.0))
    assert scaling.to_json()["ratio"] == 7.5
    rates = {UPSTREAM: (100.0, 50.0), OURS: (95.0, 47.5), OURS_FREE: (110.0, 55.0)}
    comparison = Comparison("m", 4, 2, 64, rates, (0.0, 0.0))
    assert comparison.to_json()["ratio"] == {OURS: 0.95, OURS_FREE: 1.1}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["star", "ring"])
def test_scaling_is_measured_over_real_processes(synthetic, way):
    scaling = measure_scaling(synthetic("qwen2moe"), way, rtt_ms=4.0, streams=3, rounds=2)
    assert scaling.same_texts
    assert (len(scaling.one), len(scaling.many)) == (2, 2)
    assert scaling.ratio > 1  # they wait together


@pytest.fixture
def upstream(tmp_path):
    """A program that takes upstream's options, and answers with our server."""
    program = tmp_path / "llama-server"
    program.write_text(
        f"#!{sys.executable}\n"
        "import os, sys\n"
        "given = dict(zip(sys.argv[1::2], sys.argv[2::2]))\n"
        "assert given['--ctx-size'] == str(1024 * int(given['--parallel']))\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from orchestrator.cli.app import main\n"
        "listen = given['--host'] + ':' + given['--port']\n"
        "main(['serve', given['--model'], '--unverified', '--slots', given['--parallel'], '--ctx', '1024', "
        "'--threads', given['--threads'], '--listen', listen])\n"
    )
    program.chmod(0o755)
    return program


@pytest.mark.slow
def test_servers_are_compared_over_http(synthetic, upstream):
    comparison = compare_servers(synthetic("qwen2moe"), upstream, slots=2, threads=1, tokens=8, rounds=2)
    assert set(comparison.rates) == {UPSTREAM, OURS, OURS_FREE}
    assert all(len(rates) == 2 and min(rates) > 0 for rates in comparison.rates.values())


@pytest.mark.slow
def test_a_server_that_ends_is_said_in_its_own_words(synthetic, tmp_path):
    program = tmp_path / "llama-server"
    program.write_text("#!/bin/sh\necho cannot do that >&2\nexit 1\n")
    program.chmod(0o755)
    with pytest.raises(EngineError, match="cannot do that"):
        compare_servers(synthetic("qwen2moe"), Path(program))


@pytest.mark.slow
def test_the_command_prints_json(synthetic):
    done = run_linkcpp(
        *("bench", "serving", "--model", synthetic("qwen2moe"), "--only", "ring", "--rtt", 2, "--rounds", 1, "--json")
    )
    figures = json.loads(done.stdout)
    assert figures["server"] is None
    assert figures["scaling"][0]["streams"] == 8
    assert done.returncode == (0 if figures["as_wanted"] else 1)
