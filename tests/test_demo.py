"""The demo: its arithmetic on a model in numpy, and the whole of it on the default model."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from orchestrator.cli.app import main
from orchestrator.errors import InputError
from orchestrator.models.catalog import Catalog
from orchestrator.models.sources import get_model
from orchestrator.onboarding.answer import TextStream, generate, repeat

END = 3


class Counting:
    """A language model whose next token is the last one plus one, modulo the vocabulary."""

    def __init__(self, *, slip_at: int | None = None) -> None:
        self._slip_at = slip_at
        self.position = 0

    def clear(self) -> None:
        self.position = 0

    def decode(self, tokens: Sequence[int], *, all_logits: bool = False) -> np.ndarray:
        rows = np.zeros((len(tokens), 10), np.float32)
        for row, token in zip(rows, tokens, strict=True):
            row[(token + 1) % 10] = 1.0
            if self.position == self._slip_at:
                row[0] += np.float32(2**-20)
            self.position += 1
        return rows if all_logits else rows[-1:]


def ticks(step: float) -> Iterator[float]:
    time = 0.0
    while True:
        yield time
        time += step


def test_generation_is_greedy_and_ends_at_the_end_token() -> None:
    emitted: list[int] = []
    answer = generate(
        Counting(), [6, 7], limit=50, is_end=lambda token: token == END, emit=emitted.append, now=ticks(0.5).__next__
    )
    assert list(answer.tokens) == emitted == [8, 9, 0, 1, 2]
    assert answer.logits.shape == (2 + 5, 10)
    assert answer.logits.argmax(axis=1).tolist() == [7, 8, 9, 0, 1, 2, 3]
    assert answer.tokens_per_second == pytest.approx(1 / 0.5)


def test_generation_ends_at_the_limit() -> None:
    answer = generate(Counting(), [0], limit=3, is_end=lambda _: False, emit=lambda _: None, now=ticks(1).__next__)
    assert answer.tokens == (1, 2, 3)


def test_an_answer_may_be_empty() -> None:
    answer = generate(Counting(), [2], limit=9, is_end=lambda token: token == END, emit=print, now=ticks(1).__next__)
    assert answer.tokens == ()
    assert answer.tokens_per_second == 0.0


def test_prefilled_comes_between_prompt_and_answer() -> None:
    decoder, seen = Counting(), []
    generate(
        decoder,
        [1, 2, 3, 4],
        limit=2,
        is_end=lambda _: False,
        emit=lambda _: None,
        now=ticks(1).__next__,
        prefilled=lambda: seen.append(decoder.position),
    )
    assert seen == [4]


@pytest.mark.parametrize("slip_at", [None, 0, 1, 2, 4])
def test_a_repeated_answer_has_the_same_hash_unless_one_logit_differs(slip_at: int | None) -> None:
    arguments = {"limit": 3, "is_end": lambda _: False, "emit": lambda _: None, "now": ticks(1).__next__}
    answer = generate(Counting(), [0, 1], **arguments)
    again = repeat(Counting(slip_at=slip_at), [0, 1], answer.tokens, now=ticks(1).__next__)
    assert (again.sha256 == answer.sha256) is (slip_at is None)
    assert answer.sha256 == hashlib.sha256(answer.logits.tobytes()).hexdigest()


def test_no_prompt_is_an_input_error() -> None:
    with pytest.raises(InputError, match="no prompt"):
        repeat(Counting(), [], [1], now=ticks(1).__next__)


def test_text_waits_for_whole_characters() -> None:
    pieces = {0: b"a\xe2", 1: b"\x82", 2: b"\xacb", 3: b""}
    written: list[str] = []
    stream = TextStream(pieces.__getitem__, written.append)
    for token in (0, 1, 2, 3):
        stream(token)
    assert written == ["a", "€b"]
    assert stream.text == "a€b"


# --- the whole demo --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def default_model() -> Path:
    return get_model("smollm2-moe")


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, default_model: Path) -> Path:
    """A data folder with the default model and no gate record."""
    monkeypatch.setenv("LINKCPP_DATA", str(tmp_path))
    place = Catalog.load().row("smollm2-moe").path
    try:
        os.link(default_model, place)
    except OSError:
        shutil.copy(default_model, place)
    return tmp_path


def demo(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["demo", *arguments])


def test_the_demo_prints_one_json_object_with_everything(own_folder: Path) -> None:
    result = demo("--workers", "2", "--json")
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout)
    assert value["byte_identical"] is True
    assert value["logits_sha256"] == value["oracle_sha256"]
    assert value["contract"] == "exact"
    assert value["workers"] == len(value["worker_pids"]) == len(value["rows_by_worker"]) == 2
    assert os.getpid() not in value["worker_pids"]
    assert all(rows > 0 for rows in value["rows_by_worker"].values())
    assert "blue" in value["text"]
    assert value["tokens_per_second_star"] > 0
    assert value["tokens_per_second_local"] > 0
    assert value["round_trips_per_token"] == 30  # one per MoE layer
    # Eight rows of 576 floats come back; the row goes to one or two workers.
    row = 4 * 576
    assert (8 + 1) * row < value["bytes_per_token_layer"] < (8 + 2) * row + 1000
    assert "passed" in value["gate"]
    assert not list(own_folder.glob("gate/*"))  # a shortened run is not a finding


def test_the_demo_shows_table_verdict_answer_and_figures(own_folder: Path) -> None:
    result = demo()
    assert result.exit_code == 0, result.output
    shown = result.stdout
    parts = [
        "local-3",
        "gate: passed",
        "Why is the sky blue?",
        "blue",
        "round trips per token",
        "byte-identical: yes",
    ]
    places = [shown.index(part) for part in parts[:3]]
    assert places == sorted(places)
    assert all(part in shown for part in parts)
