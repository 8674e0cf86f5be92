"""The gate with the real engine and real worker processes, on tiny random models."""

from __future__ import annotations

import datetime
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from orchestrator.cli.app import main
from orchestrator.errors import ConfigError, DenseModelError, GateError, InputError, ModelFileError
from orchestrator.models.catalog import Catalog
from orchestrator.models.deployment import Deployment, StageEntry, write_deployment
from orchestrator.models.hashing import file_sha256
from orchestrator.onboarding.findings import GateKey, GateRecord
from orchestrator.onboarding.options import GateOptions
from orchestrator.onboarding.records import gate_key, load, record_path, require, require_boundary, save, verdict
from orchestrator.onboarding.run import GateReport, run_gate
from orchestrator.types import Boundary, Contract
from orchestrator.wire.boundary import BoundaryCodec, encode
from orchestrator.workers.inject import Injection

Make = Callable[[str], Path]

QUICK = GateOptions(worker_counts=(1, 2), steps=3)
MINIMAL = GateOptions(
    contracts=(Contract.EXACT,),
    worker_counts=(2,),
    steps=2,
    prompts=("short",),
    noise_floor=False,
    invariance=False,
)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINKCPP_DATA", str(tmp_path / "data"))


@pytest.fixture(scope="module")
def report(synthetic: Make) -> GateReport:
    return run_gate(synthetic("llama"), QUICK)


def onboard(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["onboard", *map(str, arguments)])


# --- what the gate finds ---------------------------------------------------------------------------------------


def test_exact_is_byte_identical_and_sum_is_good(report: GateReport) -> None:
    record = report.record
    assert record.passed
    assert record.passes(Contract.SUM)
    for count, cell in record.contracts[Contract.EXACT].items():
        assert cell.byte_identical
        assert cell.logits_sha256 == cell.oracle_sha256
        assert len(cell.worker_pids) == len(cell.rows_by_worker) == count
        assert all(rows > 0 for rows in cell.rows_by_worker.values())
        assert os.getpid() not in cell.worker_pids
        assert cell.positions == sum(record.prompts.values()) + len(record.prompts) * QUICK.steps


def test_the_oracle_is_one_and_the_same_for_all(report: GateReport) -> None:
    cells = [cell for results in report.record.contracts.values() for cell in results.values()]
    assert len({cell.oracle_sha256 for cell in cells}) == 1


def test_sum_over_two_workers_adds_in_another_order(report: GateReport) -> None:
    # Were these bytes equal, the comparison would not have looked at what the workers computed.
    assert not report.record.contracts[Contract.SUM][2].byte_identical


def test_the_stock_engine_has_a_noise_floor_and_ours_has_none(report: GateReport) -> None:
    assert report.floor is not None
    assert report.record.noise_floor is not None
    assert not report.floor.byte_identical
    assert report.record.noise_floor.cosine_min < 1.0
    assert (report.record.invariance.one, report.record.invariance.several) == (True, True)
    assert set(report.record.invariance.micro_batches) == {2, 5, 33, 63}


@pytest.mark.parametrize("architecture", ["qwen35moe", "gpt-oss", "grovemoe"])
def test_hybrid_state_and_biased_experts_pass(synthetic: Make, architecture: str) -> None:
    record = run_gate(synthetic(architecture), replace(QUICK, worker_counts=(3,))).record
    assert record.passed, record.contracts
    assert record.invariance.one is True


def test_progress_ends_where_it_said(synthetic: Make) -> None:
    seen: list[tuple[float, float | None]] = []
    run_gate(synthetic("llama"), QUICK, progress=lambda done, total, note="": seen.append((done, total)))
    totals = {total for _, total in seen if total is not None}
    assert len(totals) == 1
    assert seen[-1][0] == pytest.approx(totals.pop())
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


@pytest.mark.parametrize("kind", list(Injection))
def test_a_wrong_worker_fails_the_gate(synthetic: Make, kind: Injection) -> None:
    record = run_gate(synthetic("llama"), replace(MINIMAL, prompts=("short", "code"), inject=kind.value)).record
    assert not record.passed
    cell = record.contracts[Contract.EXACT][2]
    assert not cell.byte_identical
    assert cell.logits_sha256 != cell.oracle_sha256
    assert "differ" in cell.reason
    with pytest.raises(GateError, match=kind.value):
        save(record)


def test_a_model_larger_than_memory_is_mapped(synthetic: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    # No machine is too small for a tiny model, so any share of its memory counts as too much.
    monkeypatch.setattr("orchestrator.onboarding.run._SHARE_OF_MEMORY", 0.0)
    record = run_gate(synthetic("llama"), replace(MINIMAL, noise_floor=True)).record
    assert record.passed
    assert record.noise_floor is not None
    assert not record.noise_floor.repacked


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"worker_counts": (1, 17)}, "17 workers"),
        ({"worker_counts": (0,)}, "0 workers"),
        ({"worker_counts": ()}, "nothing to try"),
        ({"contracts": ()}, "nothing to try"),
        ({"steps": -1}, "-1 decode steps"),
        ({"prompts": ("sonnet",)}, "sonnet"),
    ],
)
def test_impossible_options_are_input_errors(synthetic: Make, changes: dict[str, object], word: str) -> None:
    with pytest.raises(InputError, match=word):
        run_gate(synthetic("llama"), replace(QUICK, **changes))  # type: ignore[arg-type]


def test_unusable_files_have_their_own_errors(tmp_path: Path, synthetic: Make) -> None:
    with pytest.raises(ModelFileError):
        run_gate(tmp_path / "absent.gguf", MINIMAL)
    text = tmp_path / "text.gguf"
    text.write_text("not a model")
    with pytest.raises(ModelFileError):
        run_gate(text, MINIMAL)
    dense = tmp_path / "dense.gguf"
    dense.write_bytes(
        b"GGUF" + (3).to_bytes(4, "little") + bytes(8) + (1).to_bytes(8, "little") + architecture() + bytes(32)
    )
    with pytest.raises(DenseModelError):
        run_gate(dense, MINIMAL)


def architecture() -> bytes:
    """The metadata entry general.architecture = "llama"."""

    def text(value: str) -> bytes:
        return len(value).to_bytes(8, "little") + value.encode()

    return text("general.architecture") + (8).to_bytes(4, "little") + text("llama")


# --- records ---------------------------------------------------------------------------------------------------


def test_no_record_no_service(synthetic: Make) -> None:
    path = synthetic("llama")
    assert verdict(path, Contract.EXACT) is None
    with pytest.raises(GateError, match="has not passed") as caught:
        require(path, Contract.EXACT)
    assert caught.value.hint is not None
    assert "onboard" in caught.value.hint
    assert "--unverified" in caught.value.hint


def test_a_stored_record_is_found_again(synthetic: Make, report: GateReport) -> None:
    path = synthetic("llama")
    assert save(report.record) == record_path(report.record.key)
    assert verdict(path, Contract.EXACT) == report.record
    assert require(path, Contract.SUM) == report.record


def test_a_copy_of_the_file_has_the_same_record_and_a_changed_one_has_none(
    synthetic: Make, report: GateReport, tmp_path: Path
) -> None:
    save(report.record)
    copy = tmp_path / "copy.gguf"
    shutil.copy(synthetic("llama"), copy)
    assert verdict(copy, Contract.EXACT) == report.record
    with copy.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    assert verdict(copy, Contract.EXACT) is None


def test_a_contract_that_was_not_tried_is_not_passed(synthetic: Make, report: GateReport) -> None:
    only_exact = replace(report.record, contracts={Contract.EXACT: report.record.contracts[Contract.EXACT]})
    save(only_exact)
    assert verdict(synthetic("llama"), Contract.SUM) is None
    with pytest.raises(GateError, match="sum"):
        require(synthetic("llama"), Contract.SUM)


def test_a_failed_record_says_why(synthetic: Make, report: GateReport) -> None:
    bad = replace(report.record.contracts[Contract.EXACT][2], passed=False, reason="3 of 9 positions differ")
    save(replace(report.record, contracts={Contract.EXACT: {2: bad}}))
    with pytest.raises(GateError, match="at 2 workers: 3 of 9 positions differ"):
        require(synthetic("llama"), Contract.EXACT)


def test_later_results_join_earlier_ones(synthetic: Make, report: GateReport) -> None:
    cells = report.record.contracts[Contract.EXACT]
    save(replace(report.record, contracts={Contract.EXACT: {1: cells[1]}}))
    save(replace(report.record, contracts={Contract.EXACT: {2: cells[2]}}, noise_floor=None))
    stored = load(report.record.key)
    assert stored is not None
    assert set(stored.contracts[Contract.EXACT]) == {1, 2}
    assert stored.noise_floor == report.record.noise_floor


def test_another_engine_or_instruction_set_is_another_record(report: GateReport) -> None:
    save(report.record)
    key = report.record.key
    assert load(GateKey(key.model_sha256, key.engine + "x", key.isa)) is None
    assert load(GateKey(key.model_sha256, key.engine, key.isa + " AMX")) is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 1}', '{"format": 2}'])
def test_a_damaged_record_is_said_and_not_ignored(report: GateReport, content: str) -> None:
    save(report.record)
    record_path(report.record.key).write_text(content)
    with pytest.raises(ConfigError, match="damaged"):
        load(report.record.key)


def test_records_leave_no_temporary_files(report: GateReport) -> None:
    path = save(report.record)
    assert list(path.parent.iterdir()) == [path]


# --- boundaries ------------------------------------------------------------------------------------------------

BOUNDARIES = replace(MINIMAL, worker_counts=(1,), boundaries=tuple(Boundary))


def rough(boundary: bytes) -> tuple[BoundaryCodec, bytes]:
    """Round as F16 does, with two bits of mantissa instead of ten."""
    return encode((np.frombuffer(boundary, np.uint32) & 0xFFE00000).tobytes())


def serve_deployment(path: Path, folder: Path, *spans: tuple[int, int]) -> Result:
    stages = tuple(StageEntry(f"s{first}", ((first, last),), f"127.0.0.1:{first + 1}") for first, last in spans)
    write_deployment(folder / "d.toml", Deployment(str(path), 256, stages=stages, boundary=Boundary.F16))
    return CliRunner().invoke(main, ["serve", "--deployment", str(folder / "d.toml")])


def test_boundaries_are_judged_over_two_and_three_stages(synthetic: Make, tmp_path: Path) -> None:
    path = synthetic("llama")
    report = run_gate(path, replace(BOUNDARIES, noise_floor=True))
    record = report.record
    for boundary in Boundary:
        assert record.passes(boundary)
        assert set(record.boundaries[boundary]) == {2, 3}
        for count, cell in record.boundaries[boundary].items():
            assert cell.byte_identical is (boundary is Boundary.F32)
            assert cell.argmax_agreement == 1.0
            assert cell.oracle_sha256 == record.contracts[Contract.EXACT][1].oracle_sha256
            assert list(cell.rows_by_worker.values()) == [cell.positions] * count
            assert report.comparisons[boundary, count].positions == cell.positions
    refused = serve_deployment(path, tmp_path, (0, 2), (2, 4))
    save(replace(record, boundaries={}))
    unknown = serve_deployment(path, tmp_path, (0, 2), (2, 4))
    assert unknown.exit_code == refused.exit_code == 1
    assert "has not passed the verification gate for contract exact" in refused.stderr
    assert "has not passed the verification gate for boundary f16" in unknown.stderr
    assert "--boundary f16` first, or serve it with --unverified" in unknown.stderr.replace("\n", " ")
    save(record)
    require_boundary(path, Boundary.F16, 3)
    longer = serve_deployment(path, tmp_path, (0, 1), (1, 2), (2, 3), (3, 4))
    assert longer.exit_code == 1
    assert "with at most 3 stages, and this ring has 4" in longer.stderr
    assert "--stages 4`" in longer.stderr


def test_a_rounding_that_is_too_rough_fails(synthetic: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = synthetic("llama")
    monkeypatch.setattr("orchestrator.ring.hop.encode", rough)
    words = ("--contract", "exact", "--workers", "1", "--steps", "1", "--boundary", "f16", "--stages", "2")
    result = onboard(path, *words)
    assert result.exit_code == 1, result.output
    assert "boundary f16 at 2 stages: " in result.stdout
    assert "boundary f16 FAILED" in result.stdout.replace("\n", " ")
    require(path, Contract.EXACT)
    with pytest.raises(GateError, match="failed the verification gate for boundary f16 at 2 stages"):
        require_boundary(path, Boundary.F16, 2)
    refused = serve_deployment(path, tmp_path, (0, 2), (2, 4))
    assert refused.exit_code == 1


def test_exact_boundaries_and_a_single_stage_need_no_verdict(synthetic: Make) -> None:
    require_boundary(synthetic("llama"), Boundary.F32, 9)
    require_boundary(synthetic("llama"), Boundary.F16, 1)


@pytest.mark.parametrize(
    ("architecture", "stages", "word"),
    [("llama", (2, 9), "into 9 stages: at most 4"), ("llama", (1,), "two stages"), ("llada-moe", (2,), "whole text")],
)
def test_rings_that_cannot_be_are_input_errors(
    synthetic: Make, architecture: str, stages: tuple[int, ...], word: str
) -> None:
    with pytest.raises(InputError, match=word):
        run_gate(synthetic(architecture), replace(BOUNDARIES, stage_counts=stages))


# --- the command -----------------------------------------------------------------------------------------------


def test_the_command_passes_stores_and_prints_json(synthetic: Make) -> None:
    path = synthetic("llama")
    result = onboard(path, "--workers", "1,2", "--steps", "2", "--json")
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout)
    assert value["passed"] is True
    assert value["batch_invariant"] is True
    assert set(value["contracts"]) == {"exact", "sum"}
    assert set(value["contracts"]["exact"]["workers"]) == {"1", "2"}
    stored = require(path, Contract.EXACT)
    assert stored == GateRecord.from_json(value)
    assert datetime.datetime.fromisoformat(stored.created).tzinfo is not None


def test_the_command_shows_a_table_and_a_picture(synthetic: Make) -> None:
    result = onboard(synthetic("llama"), "--workers", "2", "--steps", "1")
    assert result.exit_code == 0, result.output
    assert "identical" in result.stdout
    assert "cosine per position" in result.stdout
    assert "batch-invariant: yes" in result.stdout
    assert "PASSED" in result.stdout


def test_the_command_fails_on_a_wrong_worker_and_stores_nothing(synthetic: Make) -> None:
    path = synthetic("llama")
    result = onboard(path, "--contract", "exact", "--workers", "2", "--steps", "1", "--inject", "zeros")
    assert result.exit_code == 1, result.output
    assert "FAILED" in result.stdout
    assert "zeros" in result.stdout
    assert verdict(path, Contract.EXACT) is None


@pytest.mark.parametrize(
    "arguments",
    [
        ("absent.gguf",),
        ("no-such-model",),
        ("MODEL", "--workers", "99"),
        ("MODEL", "--workers", "two"),
        ("MODEL", "--contract", "telepathy"),
        ("MODEL", "--record", "--inject", "zeros"),
        ("MODEL", "--record"),
        ("MODEL", "--boundary", "f8"),
        ("MODEL", "--stages", "2"),
        ("--all-shapes", "--boundary", "f16"),
    ],
)
def test_unusable_input_is_exit_status_2(synthetic: Make, arguments: tuple[str, ...]) -> None:
    words = [str(synthetic("llama")) if word == "MODEL" else word for word in arguments]
    result = onboard(*words)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")


def test_record_writes_the_catalogue_and_keeps_its_comments(
    synthetic: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = synthetic("llama")
    catalogue = tmp_path / "models.toml"
    catalogue.write_text(
        f"""# a comment that must stay
[models.tiny]
title = "tiny"
license = "none"
file = "tiny.gguf"
size = {path.stat().st_size}
sha256 = "{file_sha256(path)}"

[models.tiny.source]
kind = "upcycle"
base = "tiny"
shards = 2
copies = 2
seed = 0
"""
    )
    monkeypatch.setenv("LINKCPP_MODELS", str(catalogue))
    result = onboard(path, "--workers", "1,2", "--steps", "1", "--record")
    assert result.exit_code == 0, result.output
    assert catalogue.read_text().startswith("# a comment that must stay")
    gate = Catalog.load().row("tiny").gate
    assert gate["passed"] is True
    assert gate["engine"] == gate_key(path).engine
    contracts = gate["contracts"]
    assert isinstance(contracts, dict)
    assert contracts["exact"]["workers"] == [1, 2]
    assert contracts["exact"]["byte_identical"] is True
