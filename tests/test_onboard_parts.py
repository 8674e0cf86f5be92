"""The parts of the gate that need no engine: prompts, traces over a small model in numpy, pictures, records."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from orchestrator.errors import ConfigError, InputError
from orchestrator.onboarding.findings import BatchInvariance, GateKey, GateRecord, WorkerCountResult
from orchestrator.onboarding.picture import cosine_picture, nines
from orchestrator.onboarding.prompts import (
    MICRO_BATCH,
    PROMPT_NAMES,
    Prompt,
    build_prompts,
    has_tokenizer,
    random_tokens,
)
from orchestrator.onboarding.trace import compare_micro_batches, cost_of_prompts, replay, run_prompt, run_prompts
from orchestrator.types import Boundary, Contract
from orchestrator.verification.gate import NoiseFloor, Verdict, compare

VOCABULARY = 64


class Recurrent:
    """A language model of two lines: a state that each token rotates, read out by a fixed matrix.

    ``wrong_from`` spoils every logit from that position on; ``grouped`` makes the answer depend on the micro-batch.
    """

    def __init__(self, *, wrong_from: int | None = None, grouped: bool = False) -> None:
        random = np.random.default_rng(7)
        self._turn = random.normal(0, 0.2, (VOCABULARY, 16, 16))
        self._read = random.normal(0, 1, (16, VOCABULARY))
        self._wrong_from = wrong_from
        self._grouped = grouped
        self.calls: list[int] = []
        self.clear()

    def clear(self) -> None:
        self._state = np.ones(16)
        self._position = 0

    def decode(self, tokens: Sequence[int], *, all_logits: bool = False) -> np.ndarray:
        self.calls.append(len(tokens))
        rows = []
        for token in tokens:
            self._state = np.tanh(self._turn[token] @ self._state + 0.1)
            row = (self._state @ self._read).astype(np.float32)
            if self._wrong_from is not None and self._position >= self._wrong_from:
                row = -row
            if self._grouped and len(tokens) > 4:
                row = np.nextafter(row, np.float32(np.inf))
            rows.append(row)
            self._position += 1
        return np.stack(rows if all_logits else rows[-1:])


def letters(text: str) -> list[int]:
    return [ord(letter) % 97 for letter in text]


PROMPTS = (Prompt("a", (1, 2, 3, 4, 5, 6, 7)), Prompt("b", (9,)))


# --- prompts ---------------------------------------------------------------------------------------------------


def test_prompts_cover_the_lengths_that_matter() -> None:
    prompts = {prompt.name: prompt.tokens for prompt in build_prompts(letters, 128, longest=1000)}
    assert tuple(prompts) == PROMPT_NAMES
    assert len(prompts["one-token"]) == 1
    assert len(prompts["micro-batches"]) > 3 * MICRO_BATCH
    assert len(prompts["micro-batches"]) % MICRO_BATCH != 0
    assert len(prompts["long"]) > MICRO_BATCH
    assert len(set(prompts.values())) == len(prompts)


def test_prompts_respect_the_longest_and_the_selection() -> None:
    prompts = build_prompts(letters, 128, longest=20, names=("long", "one-token"))
    assert [(prompt.name, len(prompt.tokens)) for prompt in prompts] == [("long", 20), ("one-token", 1)]


@pytest.mark.parametrize("tokenize", [None, lambda text: [3] * len(text), lambda text: letters(text + "!")])
def test_without_a_real_tokenizer_tokens_are_random_and_reproducible(tokenize: object) -> None:
    vocabulary = 90  # below some of the ids of `letters`
    prompts = build_prompts(tokenize, vocabulary, longest=1000)  # type: ignore[arg-type]
    assert prompts == build_prompts(tokenize, vocabulary, longest=1000)  # type: ignore[arg-type]
    tokens = [token for prompt in prompts for token in prompt.tokens]
    assert all(0 <= token < vocabulary for token in tokens)
    assert len(set(tokens)) > 80
    assert len(prompts[-1].tokens) > 3 * MICRO_BATCH


def test_unknown_prompt_is_refused() -> None:
    with pytest.raises(InputError, match="sonnet"):
        build_prompts(letters, 128, longest=10, names=("sonnet",))


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [({}, False), ({"tokenizer.ggml.model": "none"}, False), ({"tokenizer.ggml.model": "gpt2"}, True)],
)
def test_a_model_without_a_vocabulary_is_not_asked(metadata: dict[str, str], expected: bool) -> None:
    assert has_tokenizer(metadata) is expected


def test_random_tokens_follow_the_seed() -> None:
    assert random_tokens(50, 20, 1) == random_tokens(50, 20, 1)
    assert random_tokens(50, 20, 1) != random_tokens(50, 20, 2)


# --- traces ----------------------------------------------------------------------------------------------------


def test_the_oracle_feeds_its_own_argmax() -> None:
    trace = run_prompt(Recurrent(), PROMPTS[0], 5)
    assert trace.prefill.shape == (7, VOCABULARY)
    assert trace.steps.shape == (5, VOCABULARY)
    assert trace.fed[0] == trace.prefill[-1].argmax()
    assert list(trace.fed[1:]) == trace.steps[:-1].argmax(axis=1).tolist()
    assert trace.next_token == trace.steps[-1].argmax()


def test_no_steps_leave_the_prefill() -> None:
    trace = run_prompt(Recurrent(), PROMPTS[1], 0)
    assert trace.steps.shape == (0, VOCABULARY)
    assert trace.next_token == trace.prefill[-1].argmax()


def test_forced_tokens_must_be_as_many_as_steps() -> None:
    with pytest.raises(InputError, match="forced"):
        run_prompt(Recurrent(), PROMPTS[0], 3, forced=(1, 2))


def test_the_same_model_replays_byte_identically_and_hashes_alike() -> None:
    oracle = run_prompts(Recurrent(), PROMPTS, 4)
    outcome = replay(Recurrent(), oracle)
    assert outcome.comparison.byte_identical
    assert outcome.comparison.positions == 7 + 4 + 1 + 4
    data = b"".join(part.tobytes() for trace in oracle for part in (trace.prefill, trace.steps))
    assert outcome.logits_sha256 == outcome.oracle_sha256 == hashlib.sha256(data).hexdigest()


def test_a_wrong_model_is_replayed_on_the_oracles_tokens() -> None:
    oracle = run_prompts(Recurrent(), PROMPTS, 4)
    outcome = replay(Recurrent(wrong_from=6), oracle)
    # Teacher-forced: the positions before the fault are right, each one from it on is the exact opposite.
    assert outcome.comparison.identical.tolist() == [True] * 6 + [False] * 5 + [True] * 5
    assert outcome.comparison.cosines[6:11] == pytest.approx([-1.0] * 5)
    assert outcome.logits_sha256 != outcome.oracle_sha256


def test_each_prompt_starts_afresh() -> None:
    together = run_prompts(Recurrent(), PROMPTS, 3)
    alone = run_prompt(Recurrent(), PROMPTS[1], 3)
    assert together[1].prefill.tobytes() == alone.prefill.tobytes()


def test_micro_batches_are_cut_as_asked_and_compared_with_single_steps() -> None:
    tokens = random_tokens(VOCABULARY, 13, 3)
    decoder = Recurrent(grouped=True)
    results = compare_micro_batches(decoder, tokens, (2, 5))
    assert decoder.calls == [1] * 13 + [2] * 6 + [1] + [5, 5, 3]
    assert results[2].byte_identical
    assert results[5].identical.tolist() == [False] * 10 + [True] * 3


def test_progress_counts_every_row() -> None:
    rows: list[int] = []
    oracle = run_prompts(Recurrent(), PROMPTS, 4, rows.append)
    assert sum(rows) == cost_of_prompts(PROMPTS, 4) == 16
    replay(Recurrent(), oracle, rows.append)
    assert sum(rows) == 32


# --- the picture -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cosine", "expected"), [(0.9, 1.0), (0.999, 3.0), (1.0, 9.0), (0.0, 0.0), (-1.0, 0.0)])
def test_nines(cosine: float, expected: float) -> None:
    assert nines(cosine) == pytest.approx(expected)


def test_identical_logits_are_a_line_at_the_top() -> None:
    lines = cosine_picture(np.ones(500), width=60).splitlines()
    assert lines[1].startswith("          1 │●●●")
    assert "●" not in "".join(lines[2:])


def test_one_bad_position_of_many_is_seen() -> None:
    cosines = np.ones(1000)
    cosines[777] = 0.95
    lines = cosine_picture(cosines, width=60).splitlines()
    row = next(line for line in lines if line.lstrip().startswith("0.9 "))
    assert row.count("●") == 1
    assert row.index("●") - row.index("│") - 1 == 777 * 47 // 1000


@pytest.mark.parametrize("width", [20, 60, 80, 200])
def test_the_picture_keeps_its_width(width: int) -> None:
    random = np.random.default_rng(1)
    picture = cosine_picture(random.uniform(0, 1, 300), random.uniform(0.9, 1, 290), width=width)
    assert max(len(line) for line in picture.splitlines()[1:]) <= width


# --- findings --------------------------------------------------------------------------------------------------


def result(passed: bool = True, rows: dict[str, int] | None = None) -> WorkerCountResult:
    oracle = np.random.default_rng(0).normal(size=(9, 30)).astype(np.float32)
    other = oracle if passed else -oracle
    return WorkerCountResult.of(
        Verdict(passed, "because"),
        compare(other, oracle),
        logits_sha256="aa",
        oracle_sha256="bb",
        worker_pids=(11, 12),
        rows_by_worker=rows or {"one": 5, "two": 7},
    )


def record(**changes: object) -> GateRecord:
    base = GateRecord(
        key=GateKey("ab" * 32, "0.3.36+linkcpp.1", "avx2"),
        model="m.gguf",
        architecture="llama",
        contracts={Contract.EXACT: {1: result(), 2: result()}, Contract.SUM: {1: result(False)}},
        noise_floor=NoiseFloor(0.98, 0.986, 0.9995, 1e-3, 16, (512, 1), True),
        invariance=BatchInvariance(True, None, {2: True, 63: True}, 130),
        prompts={"short": 5},
        steps=16,
        created="2030-01-02T03:04:05+00:00",
        seconds=1.5,
        boundaries={Boundary.F16: {2: result(), 3: result()}},
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def test_a_record_survives_json() -> None:
    text = json.dumps(record().to_json(), allow_nan=False)
    assert GateRecord.from_json(json.loads(text)) == record()


def test_json_has_the_promised_shape() -> None:
    value = json.loads(json.dumps(record().to_json()))
    assert value["passed"] is True
    assert value["batch_invariant"] is True
    assert {"argmax_agreement", "cosine_min", "cosine_mean"} <= set(value["noise_floor"])
    cell = value["contracts"]["exact"]["workers"]["2"]
    assert {
        "passed",
        "byte_identical",
        "argmax_agreement",
        "cosine_min",
        "cosine_mean",
        "kl",
        "logits_sha256",
        "oracle_sha256",
        "worker_pids",
        "rows_by_worker",
    } <= set(cell)
    assert value["contracts"]["sum"]["workers"]["1"]["passed"] is False
    assert set(value["boundaries"]["f16"]["stages"]) == {"2", "3"}


def test_a_record_of_an_older_version_knows_no_boundaries() -> None:
    value = json.loads(json.dumps(record().to_json()))
    del value["boundaries"]
    assert GateRecord.from_json(value) == record(boundaries={})
    assert "boundaries" not in record(boundaries={}).condensed()


def test_not_finite_numbers_become_null_and_come_back() -> None:
    poisoned = record(contracts={Contract.EXACT: {1: replace(result(False), kl=np.inf, max_difference=np.inf)}})
    value = json.loads(json.dumps(poisoned.to_json(), allow_nan=False))
    assert value["contracts"]["exact"]["workers"]["1"]["kl"] is None
    assert GateRecord.from_json(value) == poisoned


def test_passed_means_exact_at_every_worker_count() -> None:
    assert record().passed  # although sum failed
    assert not record(contracts={Contract.EXACT: {1: result(), 3: result(False)}}).passed
    assert record(contracts={Contract.SUM: {1: result()}}).passed
    assert not record(contracts={}).passed
    assert not record().passes(Contract.SUM)
    assert not record(contracts={Contract.EXACT: {}}).passes(Contract.EXACT)
    lossy = record(boundaries={Boundary.F16: {2: result(), 3: result(False)}})
    assert lossy.passed
    assert not lossy.passes(Boundary.F16)
    assert not lossy.passes(Boundary.F32)
    assert lossy.condensed()["boundaries"]["f16"]["passed"] is False


def test_a_worker_that_was_never_asked_proves_nothing() -> None:
    idle = result(rows={"one": 5, "two": 0})
    assert not idle.passed
    assert "two" in idle.reason


def test_a_later_run_replaces_what_it_tried_and_keeps_the_rest() -> None:
    later = record(
        contracts={Contract.EXACT: {2: result(False)}, Contract.SUM: {2: result()}},
        noise_floor=None,
        invariance=BatchInvariance(),
        boundaries={Boundary.F16: {3: result(False)}, Boundary.F32: {2: result()}},
    )
    merged = later.merged_over(record())
    assert {count: cell.passed for count, cell in merged.contracts[Contract.EXACT].items()} == {1: True, 2: False}
    assert {count: cell.passed for count, cell in merged.contracts[Contract.SUM].items()} == {1: False, 2: True}
    assert merged.noise_floor == record().noise_floor
    assert merged.invariance == record().invariance
    assert {count: cell.passed for count, cell in merged.boundaries[Boundary.F16].items()} == {2: True, 3: False}
    assert merged.passes(Boundary.F32)
    assert not merged.passed


@pytest.mark.parametrize(
    "damage",
    [
        lambda value: value.update(format=99),
        lambda value: value.pop("contracts"),
        lambda value: value.update(contracts={"telepathy": {"workers": {}}}),
        lambda value: value.update(steps="many"),
        lambda value: value["contracts"]["exact"]["workers"]["1"].update(passed="yes"),
        lambda value: value.update(noise_floor=[1]),
    ],
)
def test_a_damaged_record_is_refused(damage: object) -> None:
    value = json.loads(json.dumps(record().to_json()))
    damage(value)  # type: ignore[operator]
    with pytest.raises(ConfigError, match="no gate record"):
        GateRecord.from_json(value)


def test_text_is_no_record() -> None:
    with pytest.raises(ConfigError):
        GateRecord.from_json("passed")
