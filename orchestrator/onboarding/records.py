"""Keep the gate's findings in the user's data folder, and answer whether a model may be served.

One file per model (SHA-256), engine build and instruction set. Running the gate again for some contracts or worker
counts replaces these results and keeps the others.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from datetime import datetime, timezone
from pathlib import Path

from orchestrator.config import data_dir
from orchestrator.engine.identity import engine_identity
from orchestrator.errors import ConfigError, GateError, InputError
from orchestrator.models.catalog import Catalog
from orchestrator.models.catalog import record as record_in_catalogue
from orchestrator.models.hashing import model_sha256
from orchestrator.models.results import own_results_path, write_result
from orchestrator.onboarding.findings import GateKey, GateRecord
from orchestrator.types import Boundary, Contract


def gate_key(model_path: Path) -> GateKey:
    """Make the key of a model file with this process's engine. The hash of the file is cached once computed."""
    identity = engine_identity()
    return GateKey(model_sha256(model_path), identity.build, identity.isa)


def record_path(key: GateKey) -> Path:
    """Return the file in which the findings about a key are kept."""
    features = hashlib.sha256(key.isa.encode()).hexdigest()[:8]  # the list of features is longer than a file name
    name = f"{key.model_sha256[:16]}-{_slug(key.engine)}-{features}.json"
    return data_dir() / "gate" / name


def load(key: GateKey) -> GateRecord | None:
    """Read the record of a key; None where there is none. Raises :class:`ConfigError` on a damaged file."""
    path = record_path(key)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"cannot read the gate record {path}: {error.strerror}") from error
    try:
        record = GateRecord.from_json(json.loads(text))
    except (ValueError, ConfigError) as error:
        raise ConfigError(
            f"the gate record {path} is damaged: {error}", hint="remove it and onboard again"
        ) from error
    # The name holds a shortened hash: the whole key decides.
    return record if record.key == key else None


def save(record: GateRecord) -> Path:
    """Store a record over what is known about its key, atomically; returns the file.

    Raises :class:`GateError` for a record of a run with an injected fault: it says nothing about the model.
    """
    if record.injected is not None:
        raise GateError(f"a run with an injected fault ({record.injected}) is not a finding about the model")
    older = load(record.key)
    merged = record if older is None else record.merged_over(older)
    path = record_path(record.key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(merged.to_json(), file, indent=2, ensure_ascii=False, allow_nan=False)
            file.write("\n")
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(f"cannot write the gate record {path}: {error.strerror}") from error
    return path


def verdict(model_path: Path, contract: Contract) -> GateRecord | None:
    """Return the record of a model on this engine if it says something about a contract, else None.

    The record's ``passes(contract)`` is the answer to whether the contract may be used.
    """
    record = load(gate_key(model_path))
    return record if record is not None and contract in record.contracts else None


def require(model_path: Path, contract: Contract) -> GateRecord:
    """Return the record of a model that passed a contract; raise :class:`GateError` if it did not or never ran."""
    record = verdict(model_path, contract)
    if record is None:
        raise GateError(
            f"{model_path.name} has not passed the verification gate for contract {contract.value} with this engine",
            hint=f"run `linkcpp onboard {model_path}` first, or serve it with --unverified",
        )
    if not record.passes(contract):
        failed = next((n, result) for n, result in sorted(record.contracts[contract].items()) if not result.passed)
        raise GateError(
            f"{model_path.name} failed the verification gate for contract {contract.value} "
            f"at {failed[0]} workers: {failed[1].reason}",
            hint=f"run `linkcpp onboard {model_path}` again, or serve it with --unverified",
        )
    return record


def require_boundary(model_path: Path, boundary: Boundary, stages: int) -> None:
    """Raise :class:`GateError` where a model did not pass the gate for a kind of boundary with so many stages.

    F32 boundaries are exact and need no verdict, and one stage has none.
    """
    if boundary is Boundary.F32 or stages < 2:
        return
    record = load(gate_key(model_path))
    results = {} if record is None else record.results(boundary)
    hint = f"run `linkcpp onboard {model_path} --boundary {boundary.value}"
    hint += f" --stages {stages}`" if stages > max(results, default=3) else "`"
    hint += " first, or serve it with --unverified"
    what = f"the verification gate for boundary {boundary.value}"
    if not results:
        raise GateError(f"{model_path.name} has not passed {what} with this engine", hint=hint)
    failed = next(((n, result) for n, result in sorted(results.items()) if not result.passed), None)
    if failed is not None:
        text = f"{model_path.name} failed {what} at {failed[0]} stages: {failed[1].reason}"
        raise GateError(text, hint=hint.replace(" first", " again"))
    if max(results) < stages:
        text = f"{model_path.name} passed {what} with at most {max(results)} stages, and this ring has {stages}"
        raise GateError(text, hint=hint)


def known_name(model_path: Path) -> str | None:
    """Return the catalogue's name of a file, by its hash, or its place where the row has none; None without a row."""
    digest, place = model_sha256(model_path), model_path.resolve()
    for row in Catalog.load().rows.values():
        if row.sha256 == digest or (not row.sha256 and row.path.resolve() == place):
            return row.name
    return None


def catalogue_name(model_path: Path) -> str:
    """Return the catalogue's name of a file, by its hash; raise :class:`InputError` where it has none."""
    name = known_name(model_path)
    if name is None:
        raise InputError(
            f"the catalogue has no row for {model_path.name} (SHA-256 {model_sha256(model_path)[:12]}...)",
            hint="add a row with this hash first, or leave --record out",
        )
    return name


def remember(name: str, record: GateRecord) -> Path:
    """Note for ``linkcpp models`` on this machine what the gate found about a model of the catalogue."""
    return write_result(own_results_path(), "gate", name, record.condensed())


def remember_served(name: str, engine: str, contract: Contract) -> Path:
    """Note for ``linkcpp models`` on this machine that a gateway answered with a model of the catalogue."""
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    result = {"created": created, "engine": engine, "contract": contract.value}
    return write_result(own_results_path(), "serving", name, result)


def publish(name: str, record: GateRecord) -> Path:
    """Write the condensed record into the catalogue's row of this name; returns the file."""
    if record.injected is not None:
        raise GateError(f"a run with an injected fault ({record.injected}) is not a finding about the model")
    return record_in_catalogue(name, record.condensed())


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.+_]+", "_", text)[:60] or "none"
