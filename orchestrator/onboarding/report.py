"""Say in words and tables what the gate found. PURE: findings in, text out."""

from __future__ import annotations

import math

from orchestrator.onboarding.findings import BatchInvariance, GateRecord, WorkerCountResult
from orchestrator.verification.gate import NoiseFloor

COLUMNS = ("contract", "workers", "verdict", "bytes", "argmax", "cosine min", "cosine mean", "KL (nats)", "rows")
"""Column titles of :func:`verdict_rows`."""


def verdict_rows(record: GateRecord) -> list[tuple[str, ...]]:
    """Make one row per contract and number of workers, per boundary and number of stages, and for the noise floor."""
    rows = [
        _result_row(contract.value, str(count), result)
        for contract, results in record.contracts.items()
        for count, result in sorted(results.items())
    ]
    rows += [
        _result_row(f"boundary {boundary.value}", f"{count} stages", result)
        for boundary, results in record.boundaries.items()
        for count, result in sorted(results.items())
    ]
    if record.noise_floor is not None:
        rows.append(_floor_row(record.noise_floor))
    return rows


def failures(record: GateRecord) -> list[str]:
    """Say why each result that did not pass did not."""
    return [
        f"{contract.value} at {count} worker{'s' if count > 1 else ''}: {result.reason}"
        for contract, results in record.contracts.items()
        for count, result in sorted(results.items())
        if not result.passed
    ] + [
        f"boundary {boundary.value} at {count} stages: {result.reason}"
        for boundary, results in record.boundaries.items()
        for count, result in sorted(results.items())
        if not result.passed
    ]


def invariance_sentence(invariance: BatchInvariance) -> str:
    """Say whether the answer depends on the micro-batch."""
    if invariance.one is None:
        return "batch-invariant: not tried"
    sizes = ", ".join(str(size) for size in invariance.micro_batches)
    tried = f"{invariance.tokens} tokens in micro-batches of {sizes} against single steps, one sequence"
    if invariance.one:
        beside = {None: "", True: "; several sequences side by side too", False: "; but not several side by side"}
        return f"batch-invariant: yes ({tried}: every byte equal{beside[invariance.several]})"
    differing = ", ".join(str(size) for size, same in invariance.micro_batches.items() if not same)
    return f"batch-invariant: no ({tried}: bytes differ at {differing})"


def summary(record: GateRecord) -> str:
    """Say in one line whether the model passed."""
    positions = max((cell.positions for cells in record.contracts.values() for cell in cells.values()), default=0)
    words = "PASSED" if record.passed else "FAILED"
    fault = f", with the fault {record.injected} in one worker" if record.injected else ""
    rings = "".join(
        f"; boundary {boundary.value} {'passed' if record.passes(boundary) else 'FAILED'}"
        for boundary in record.boundaries
    )
    return (
        f"{words}: {record.model} ({record.architecture}), {len(record.prompts)} prompts, "
        f"{positions} positions each{fault}{rings}"
    )


def _result_row(asked: str, count: str, result: WorkerCountResult) -> tuple[str, ...]:
    return (
        asked,
        count,
        "passed" if result.passed else "FAILED",
        "identical" if result.byte_identical else "differ",
        f"{result.argmax_agreement:.4f}",
        f"{result.cosine_min:.6f}",
        f"{result.cosine_mean:.6f}",
        _divergence(result.kl),
        " + ".join(str(rows) for rows in result.rows_by_worker.values()),
    )


def _floor_row(floor: NoiseFloor) -> tuple[str, ...]:
    first, second = floor.micro_batches
    return (
        "(noise floor)",
        "-",
        f"stock, {first} vs {second}",
        "-",
        f"{floor.argmax_agreement:.4f}",
        f"{floor.cosine_min:.6f}",
        f"{floor.cosine_mean:.6f}",
        _divergence(floor.kl),
        "-",
    )


def _divergence(value: float) -> str:
    return f"{value:.2e}" if math.isfinite(value) else "not finite"
