"""Put a model through the gate: run it in one process, run it over local workers, compare every logit.

The runs, in order, each closed before the next one opens so that a large model is in memory once:

1. the *oracle*: the whole file, hook off, batch-invariant configuration; it also chooses the tokens of the decode
   steps. The same session answers the batch-invariance question.
2. the *noise floor*: the stock configuration at two micro-batch sizes, fed with the oracle's tokens.
3. the *star*, for each number of workers and each contract: real worker processes with uneven shares and a backbone
   that holds no expert.
4. where asked for, the *ring*: local stages in this process, for each number of stages and each kind of boundary.

A model larger than the free memory is mapped instead of read, by the oracle and by the workers: slow, but it runs,
and the meter says how long it will take. Its noise floor is measured without repacking, which needs a copy in memory.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from orchestrator.errors import EngineError, FleetError, GateError
from orchestrator.models.gguf import GgufFile
from orchestrator.onboarding.findings import GateRecord, WorkerCountResult
from orchestrator.onboarding.meter import Meter, Progress
from orchestrator.onboarding.options import GateOptions
from orchestrator.onboarding.prompts import MICRO_BATCH
from orchestrator.onboarding.records import gate_key
from orchestrator.onboarding.reference import FLOOR_MICRO_BATCHES, Oracle, run_floor, run_oracle
from orchestrator.onboarding.stages import plan_stages, try_boundaries
from orchestrator.onboarding.star import open_fleet, uneven_shares
from orchestrator.onboarding.trace import replay
from orchestrator.onboarding.whole_text import decoder_of
from orchestrator.types import Boundary, Contract
from orchestrator.verification.gate import Comparison, NoiseFloor, judge

_SHARE_OF_MEMORY = 0.8
"""A model that takes more of the free memory than this is mapped: the rest is for KV cache, logits and the system."""


@dataclass(frozen=True, slots=True, eq=False)
class GateReport:
    """A record, and the curves behind it, which are shown but not stored."""

    record: GateRecord
    comparisons: dict[tuple[Contract | Boundary, int], Comparison] = field(repr=False)
    floor: Comparison | None = field(repr=False)


def utc_now() -> datetime.datetime:
    """Return the time of day that records carry."""
    return datetime.datetime.now(datetime.timezone.utc)


def run_gate(
    path: Path,
    options: GateOptions,
    *,
    progress: Progress | None = None,
    now: Callable[[], float] = time.monotonic,
    today: Callable[[], datetime.datetime] = utc_now,
) -> GateReport:
    """Put one MoE GGUF through the gate and return what was found; nothing is stored.

    Raises :class:`InputError` (and its kinds) for a file that cannot be judged, :class:`GateError` where the star
    failed instead of answering.
    """
    file = GgufFile.open(path)
    file.require_moe()
    options.check(file)
    meter = Meter(progress, now)
    meter.say("hashing the model")
    key = gate_key(path)
    mapped = file.n_bytes > _SHARE_OF_MEMORY * psutil.virtual_memory().available
    rings = plan_stages(path, options.stage_counts) if options.boundaries else {}
    oracle = run_oracle(path, options, meter)
    floor_curve, floor = None, None
    if options.noise_floor:
        floor_curve = run_floor(path, oracle, options.threads, meter, repack=not mapped)
        floor = NoiseFloor.of(floor_curve, micro_batches=FLOOR_MICRO_BATCHES, repacked=not mapped)
    results: dict[Contract, dict[int, WorkerCountResult]] = {contract: {} for contract in options.contracts}
    curves: dict[tuple[Contract | Boundary, int], Comparison] = {}
    for count in options.worker_counts:
        meter.say(f"starting {_workers(count)}")
        try:
            for contract, result, curve in _run_stars(file, count, options, oracle, floor, meter, mapped=mapped):
                results[contract][count], curves[contract, count] = result, curve
        except (FleetError, EngineError) as error:
            # A worker that does not start, dies or refuses has not given the same answer: a failed gate, in words.
            raise GateError(f"over {_workers(count)}: {error}", hint=error.hint) from error
    boundaries: dict[Boundary, dict[int, WorkerCountResult]] = {boundary: {} for boundary in options.boundaries}
    for boundary, count, result, curve in try_boundaries(path, rings, options, oracle, floor, meter):
        boundaries[boundary][count], curves[boundary, count] = result, curve
    record = GateRecord(
        key=key,
        model=path.name,
        architecture=file.architecture,
        contracts=results,
        noise_floor=floor,
        invariance=oracle.invariance,
        prompts={prompt.name: len(prompt.tokens) for prompt in oracle.prompts},
        steps=options.steps,
        created=today().isoformat(timespec="seconds"),
        seconds=round(meter.seconds, 3),
        injected=options.inject,
        boundaries=boundaries,
    )
    return GateReport(record, curves, floor_curve)


def _run_stars(
    file: GgufFile,
    count: int,
    options: GateOptions,
    oracle: Oracle,
    floor: NoiseFloor | None,
    meter: Meter,
    *,
    mapped: bool,
) -> Iterator[tuple[Contract, WorkerCountResult, Comparison]]:
    """Try every contract over the same worker processes."""
    shares = uneven_shares(file.moe_layers, file.n_expert, count)
    with open_fleet(file, shares, threads=options.threads, mapped=mapped, inject=options.inject) as fleet:
        for contract in options.contracts:
            note = f"{contract.value} over {_workers(count)}"
            meter.say(note)
            with fleet.connect(contract, n_ctx=oracle.n_ctx) as star:
                outcome = replay(decoder_of(star.session), oracle.traces, meter.phase(note, MICRO_BATCH))
                rows_by_worker = star.rows_by_worker()
            result = WorkerCountResult.of(
                judge(contract, outcome.comparison, floor),
                outcome.comparison,
                logits_sha256=outcome.logits_sha256,
                oracle_sha256=outcome.oracle_sha256,
                worker_pids=fleet.pids,
                rows_by_worker=rows_by_worker,
            )
            yield contract, result, outcome.comparison


def _workers(count: int) -> str:
    return f"{count} worker{'s' if count > 1 else ''}"
