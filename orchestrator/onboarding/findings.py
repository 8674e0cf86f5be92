"""What the gate found out, as frozen values and as JSON.

A finding holds for one model file (SHA-256 of its bytes), one engine build and one instruction set: change any of
them and the arithmetic may change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from orchestrator.errors import ConfigError
from orchestrator.types import Boundary, Contract
from orchestrator.verification.gate import Comparison, NoiseFloor, Verdict

_Asked = TypeVar("_Asked", Contract, Boundary)

FORMAT: Final = 1
"""Version of the file; it grows when a field changes its meaning."""


@dataclass(frozen=True, slots=True)
class GateKey:
    """What a finding holds for."""

    model_sha256: str
    engine: str  # build id
    isa: str


@dataclass(frozen=True, slots=True)
class WorkerCountResult:
    """One contract at one number of workers, or one kind of boundary at one number of stages, over all prompts."""

    passed: bool
    reason: str
    byte_identical: bool
    argmax_agreement: float
    cosine_min: float
    cosine_mean: float
    kl: float  # mean, nats
    kl_max: float
    max_difference: float
    positions: int
    logits_sha256: str
    oracle_sha256: str
    worker_pids: tuple[int, ...]
    rows_by_worker: Mapping[str, int]

    @classmethod
    def of(
        cls,
        verdict: Verdict,
        comparison: Comparison,
        *,
        logits_sha256: str,
        oracle_sha256: str,
        worker_pids: tuple[int, ...],
        rows_by_worker: Mapping[str, int],
    ) -> WorkerCountResult:
        """Condense a comparison. A worker that was never asked proves nothing: then nothing has passed."""
        idle = [name for name, rows in rows_by_worker.items() if rows == 0]
        if verdict.passed and (idle or not rows_by_worker):
            verdict = Verdict(False, f"worker {idle[0]} got no row" if idle else "no worker took part")
        return cls(
            passed=verdict.passed,
            reason=verdict.reason,
            byte_identical=comparison.byte_identical,
            argmax_agreement=comparison.argmax_agreement,
            cosine_min=comparison.cosine_min,
            cosine_mean=comparison.cosine_mean,
            kl=comparison.kl,
            kl_max=comparison.kl_max,
            max_difference=comparison.max_difference,
            positions=comparison.positions,
            logits_sha256=logits_sha256,
            oracle_sha256=oracle_sha256,
            worker_pids=worker_pids,
            rows_by_worker=dict(rows_by_worker),
        )


@dataclass(frozen=True, slots=True)
class BatchInvariance:
    """Whether the answer depends on how tokens are grouped; None where it was not tried.

    ``micro_batches`` maps rows per micro-batch to "bytes equal those of single steps" for one sequence. ``several``
    is the same question for several sequences in one micro-batch.
    """

    one: bool | None = None
    several: bool | None = None
    micro_batches: Mapping[int, bool] = field(default_factory=dict)
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class GateRecord:
    """All findings about one key. ``contracts`` maps contract -> number of workers -> result.

    ``boundaries`` maps what the stages of a ring hand on -> number of stages -> result.
    """

    key: GateKey
    model: str  # file name, for people
    architecture: str
    contracts: Mapping[Contract, Mapping[int, WorkerCountResult]]
    noise_floor: NoiseFloor | None = None
    invariance: BatchInvariance = BatchInvariance()
    prompts: Mapping[str, int] = field(default_factory=dict)  # name -> tokens
    steps: int = 0  # decode steps per prompt
    created: str = ""  # ISO 8601, UTC
    seconds: float = 0.0
    injected: str | None = None  # the fault that one worker was given; such a record is never stored
    boundaries: Mapping[Boundary, Mapping[int, WorkerCountResult]] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Tell whether ``exact`` passed at every worker count; where it was not tried, whether the others did."""
        tried = [Contract.EXACT] if Contract.EXACT in self.contracts else list(self.contracts)
        return bool(tried) and all(self.passes(contract) for contract in tried)

    def results(self, asked: Contract | Boundary) -> Mapping[int, WorkerCountResult]:
        """Return what was found about a contract or a kind of boundary, by number of workers or stages."""
        return self.contracts.get(asked, {}) if isinstance(asked, Contract) else self.boundaries.get(asked, {})

    def passes(self, asked: Contract | Boundary) -> bool:
        """Tell whether a contract or a kind of boundary was tried and passed at every number of workers or stages."""
        results = self.results(asked)
        return bool(results) and all(result.passed for result in results.values())

    def merged_over(self, older: GateRecord) -> GateRecord:
        """Return this record with the older one's results where this run tried nothing."""
        return replace(
            self,
            contracts=_over(self.contracts, older.contracts),
            boundaries=_over(self.boundaries, older.boundaries),
            noise_floor=self.noise_floor or older.noise_floor,
            invariance=self.invariance if self.invariance.one is not None else older.invariance,
        )

    def to_json(self) -> dict[str, object]:
        """Return the JSON object; a number that is not finite becomes null."""
        return {
            "format": FORMAT,
            "passed": self.passed,
            "batch_invariant": self.invariance.one,
            "batch_invariance": {
                "one": self.invariance.one,
                "several": self.invariance.several,
                "micro_batches": {str(size): same for size, same in self.invariance.micro_batches.items()},
                "tokens": self.invariance.tokens,
            },
            "noise_floor": None if self.noise_floor is None else _floor_to_json(self.noise_floor),
            "contracts": {
                contract.value: {
                    "passed": self.passes(contract),
                    "workers": {str(count): _result_to_json(result) for count, result in sorted(results.items())},
                }
                for contract, results in self.contracts.items()
            },
            "boundaries": {
                boundary.value: {
                    "passed": self.passes(boundary),
                    "stages": {str(count): _result_to_json(result) for count, result in sorted(results.items())},
                }
                for boundary, results in self.boundaries.items()
            },
            "model": {"name": self.model, "sha256": self.key.model_sha256, "architecture": self.architecture},
            "engine": {"build": self.key.engine, "isa": self.key.isa},
            "prompts": dict(self.prompts),
            "steps": self.steps,
            "created": self.created,
            "seconds": self.seconds,
            "injected": self.injected,
        }

    def condensed(self) -> dict[str, object]:
        """Return the part that is worth publishing: no paths, processes or hashes of logits."""
        condensed: dict[str, object] = {
            "passed": self.passed,
            "batch_invariant": self.invariance.one,
            "engine": self.key.engine,
            "isa": self.key.isa,
            "created": self.created,
            "noise_floor": None if self.noise_floor is None else _floor_to_json(self.noise_floor),
            "contracts": {
                contract.value: {"passed": self.passes(contract), "workers": sorted(results), **_condense(results)}
                for contract, results in self.contracts.items()
                if results
            },
        }
        if self.boundaries:
            condensed["boundaries"] = {
                boundary.value: {"passed": self.passes(boundary), "stages": sorted(results), **_condense(results)}
                for boundary, results in self.boundaries.items()
            }
        return condensed

    @classmethod
    def from_json(cls, value: object) -> GateRecord:
        """Read what :meth:`to_json` wrote; raise :class:`ConfigError` on anything else."""
        try:
            return _record_from_json(value)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"this is no gate record of format {FORMAT}: {error!r}") from error


def _over(
    new: Mapping[_Asked, Mapping[int, WorkerCountResult]], old: Mapping[_Asked, Mapping[int, WorkerCountResult]]
) -> dict[_Asked, dict[int, WorkerCountResult]]:
    return {asked: {**old.get(asked, {}), **new.get(asked, {})} for asked in {**old, **new}}


def _condense(results: Mapping[int, WorkerCountResult]) -> dict[str, object]:
    return {
        "byte_identical": all(result.byte_identical for result in results.values()),
        "argmax_agreement": min(result.argmax_agreement for result in results.values()),
        "cosine_min": min(result.cosine_min for result in results.values()),
        "cosine_mean": min(result.cosine_mean for result in results.values()),
        "kl": _finite(max(result.kl for result in results.values())),
    }


def _floor_to_json(floor: NoiseFloor) -> dict[str, object]:
    return {
        "argmax_agreement": floor.argmax_agreement,
        "cosine_min": floor.cosine_min,
        "cosine_mean": floor.cosine_mean,
        "kl": _finite(floor.kl),
        "positions": floor.positions,
        "micro_batches": list(floor.micro_batches),
        "repacked": floor.repacked,
    }


def _floor_from_json(value: object) -> NoiseFloor:
    fields = _object(value)
    first, second = _list(fields["micro_batches"])
    return NoiseFloor(
        argmax_agreement=_number(fields["argmax_agreement"]),
        cosine_min=_number(fields["cosine_min"]),
        cosine_mean=_number(fields["cosine_mean"]),
        kl=_number(fields["kl"]),
        positions=_count(fields["positions"]),
        micro_batches=(_count(first), _count(second)),
        repacked=_flag(fields["repacked"]),
    )


def _result_to_json(result: WorkerCountResult) -> dict[str, object]:
    return {
        "passed": result.passed,
        "reason": result.reason,
        "byte_identical": result.byte_identical,
        "argmax_agreement": result.argmax_agreement,
        "cosine_min": result.cosine_min,
        "cosine_mean": result.cosine_mean,
        "kl": _finite(result.kl),
        "kl_max": _finite(result.kl_max),
        "max_difference": _finite(result.max_difference),
        "positions": result.positions,
        "logits_sha256": result.logits_sha256,
        "oracle_sha256": result.oracle_sha256,
        "worker_pids": list(result.worker_pids),
        "rows_by_worker": dict(result.rows_by_worker),
    }


def _result_from_json(value: object) -> WorkerCountResult:
    fields = _object(value)
    return WorkerCountResult(
        passed=_flag(fields["passed"]),
        reason=_text(fields["reason"]),
        byte_identical=_flag(fields["byte_identical"]),
        argmax_agreement=_number(fields["argmax_agreement"]),
        cosine_min=_number(fields["cosine_min"]),
        cosine_mean=_number(fields["cosine_mean"]),
        kl=_number(fields["kl"]),
        kl_max=_number(fields["kl_max"]),
        max_difference=_number(fields["max_difference"]),
        positions=_count(fields["positions"]),
        logits_sha256=_text(fields["logits_sha256"]),
        oracle_sha256=_text(fields["oracle_sha256"]),
        worker_pids=tuple(_count(pid) for pid in _list(fields["worker_pids"])),
        rows_by_worker={name: _count(rows) for name, rows in _object(fields["rows_by_worker"]).items()},
    )


def _results_from_json(value: object) -> dict[int, WorkerCountResult]:
    return {int(count): _result_from_json(result) for count, result in _object(value).items()}


def _record_from_json(value: object) -> GateRecord:
    fields = _object(value)
    if fields["format"] != FORMAT:
        raise ValueError(f"format {fields['format']!r}")
    model, engine = _object(fields["model"]), _object(fields["engine"])
    invariance = _object(fields["batch_invariance"])
    floor = fields["noise_floor"]
    return GateRecord(
        key=GateKey(_text(model["sha256"]), _text(engine["build"]), _text(engine["isa"])),
        model=_text(model["name"]),
        architecture=_text(model["architecture"]),
        contracts={
            Contract(name): _results_from_json(_object(entry)["workers"])
            for name, entry in _object(fields["contracts"]).items()
        },
        boundaries={
            Boundary(name): _results_from_json(_object(entry)["stages"])
            for name, entry in _object(fields.get("boundaries", {})).items()  # records of older versions have none
        },
        noise_floor=None if floor is None else _floor_from_json(floor),
        invariance=BatchInvariance(
            one=None if invariance["one"] is None else _flag(invariance["one"]),
            several=None if invariance["several"] is None else _flag(invariance["several"]),
            micro_batches={int(size): _flag(same) for size, same in _object(invariance["micro_batches"]).items()},
            tokens=_count(invariance["tokens"]),
        ),
        prompts={name: _count(tokens) for name, tokens in _object(fields["prompts"]).items()},
        steps=_count(fields["steps"]),
        created=_text(fields["created"]),
        seconds=_number(fields["seconds"]),
        injected=None if fields["injected"] is None else _text(fields["injected"]),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _object(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} is no object")
    return value


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is no list")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is neither true nor false")
    return value


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TypeError(f"{value!r} is no count")
    return value


def _number(value: object) -> float:
    if value is None:  # what a number that is not finite is written as
        return math.inf
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    return float(value)
