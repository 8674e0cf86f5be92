"""The gate over every architecture that the engine has, and over the shapes of known large models.

Each one is a job in a process of its own: it makes the synthetic model, runs the same gate as ``linkcpp onboard
MODEL`` over real worker processes, and reads the layer descriptors. A series can be broken off and goes on where it
was: what passed with this engine, instruction set and recipe is not run again.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from orchestrator.config import cache_dir
from orchestrator.engine.identity import engine_identity
from orchestrator.engine.synth import recipe_sha256
from orchestrator.errors import InputError
from orchestrator.models.architectures import RECIPES, WITHOUT_EXPERTS
from orchestrator.models.catalog import Catalog
from orchestrator.models.faithful import FAITHFUL
from orchestrator.models.upstream_sources import SourceInventory
from orchestrator.onboarding.architecture_results import ArchitectureResult, ResultStore
from orchestrator.onboarding.children import JobFailedError, run_job
from orchestrator.onboarding.cuts import CutFindings
from orchestrator.onboarding.descriptors import DescriptorSummary
from orchestrator.onboarding.findings import GateRecord
from orchestrator.onboarding.meter import Progress
from orchestrator.onboarding.report import failures
from orchestrator.onboarding.traffic import Traffic
from orchestrator.types import Contract

SHAPES: Final = tuple(name for name in FAITHFUL if not name.endswith("-layer"))
"""Known models whose whole shape can be made."""

_JOB: Final = "orchestrator.onboarding.one_architecture"
_LARGEST_SECONDS: Final = 3600.0  # a shape of 80,000 experts on a busy machine


@dataclass(frozen=True, slots=True)
class SeriesOptions:
    """What is tried for each: numbers of workers, decode steps after each prompt; ``fresh`` forgets what is known."""

    worker_counts: tuple[int, ...] = (1, 3)
    steps: int = 8
    fresh: bool = False


def run_architectures(
    names: Sequence[str], options: SeriesOptions, *, progress: Progress | None = None
) -> list[ArchitectureResult]:
    """Judge architectures (all of the table where ``names`` is empty), in the table's order.

    Those that no file can have experts of are in the result with the reason. Raises :class:`InputError` for an
    unknown name.
    """
    known = (*RECIPES, *WITHOUT_EXPERTS)
    chosen = _choose(names, known, "architecture")
    return _run([(name, None) for name in chosen], options, progress)


def run_shapes(
    names: Sequence[str], options: SeriesOptions, *, progress: Progress | None = None
) -> list[ArchitectureResult]:
    """Judge models with the true shape of known large ones (all of :data:`SHAPES` where ``names`` is empty)."""
    chosen = _choose(names, SHAPES, "shape")
    return _run([(FAITHFUL[name].architecture, name) for name in chosen], options, progress)


def known_architectures() -> dict[str, ArchitectureResult]:
    """Return what is on record for this engine about architectures, by name."""
    return ResultStore(engine_identity()).load_all(RECIPES)


def known_shapes() -> dict[str, ArchitectureResult]:
    """Return what is on record for this engine about shapes of known models, by the models' names."""
    return ResultStore(engine_identity()).load_all(SHAPES, shape=True)


def publish(results: Sequence[ArchitectureResult]) -> list[str]:
    """Write findings into the catalogue where one of its models is concerned; return the names written.

    That of an architecture as ``[architecture.NAME]``, that of a shape as ``[like.NAME]``.
    """
    catalog = Catalog.load()
    used = {row.shape.architecture for row in catalog.rows.values() if row.shape is not None}
    written = []
    for result in results:
        concerned = result.architecture in used if result.like is None else result.like in catalog.rows
        if result.record is not None and concerned:
            section = "architecture" if result.like is None else "like"
            catalog.record(result.name, _condensed(result, result.record), section=section)
            written.append(result.name)
    return written


def _condensed(result: ArchitectureResult, record: GateRecord) -> dict[str, object]:
    return {
        "passed": result.passed,
        "workers": sorted(record.contracts[Contract.EXACT]),
        "engine": record.key.engine,
        "isa": record.key.isa,
        "created": record.created,
    }


def untried(architecture: str) -> ArchitectureResult:
    """Return the row of an architecture of which no model was made, with the reason."""
    if architecture in WITHOUT_EXPERTS:
        reason = f"no experts: {WITHOUT_EXPERTS[architecture]}"
        return ArchitectureResult(architecture, None, "", "", built=False, reason=reason)
    return ArchitectureResult(architecture, None, RECIPES[architecture].source, "", built=True, reason="not tried")


def denominator(inventory: SourceInventory | None) -> str:
    """Say of how many architectures a table speaks, and whether the sources were asked."""
    lacking = f"{len(WITHOUT_EXPERTS)} cannot have experts in any file, {len(RECIPES)} can"
    if inventory is None:
        return (
            f"{len(RECIPES) + len(WITHOUT_EXPERTS)} architectures are known to have a graph with experts: {lacking} "
            "(the engine's sources are not in the cache, so this is not counted anew)"
        )
    return (
        f"{len(inventory.files)} files of the engine's sources call build_moe_ffn, at {inventory.calls} places; "
        f"they define {len(inventory.architectures)} architectures: {lacking}"
    )


def _choose(names: Sequence[str], known: Sequence[str], what: str) -> tuple[str, ...]:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InputError(f"no {what} is called {unknown[0]!r}", hint=f"known: {', '.join(known)}")
    return tuple(name for name in known if not names or name in names)


def _run(
    orders: Sequence[tuple[str, str | None]], options: SeriesOptions, progress: Progress | None
) -> list[ArchitectureResult]:
    store = ResultStore(engine_identity())
    results = []
    for done, (architecture, like) in enumerate(orders):
        if progress is not None:
            progress(done, len(orders), like or architecture)
        results.append(_one(architecture, like, options, store))
    if progress is not None:
        progress(len(orders), len(orders), "done")
    return results


def _one(architecture: str, like: str | None, options: SeriesOptions, store: ResultStore) -> ArchitectureResult:
    if architecture in WITHOUT_EXPERTS:
        return untried(architecture)
    recipe = recipe_sha256(architecture, like=like)
    known = None if options.fresh else store.load(like or architecture, shape=like is not None)
    if known is not None and known.covers(recipe, options.worker_counts):
        return known
    result = _judge(architecture, like, recipe, options, time.monotonic)
    store.save(result)
    return result


def _judge(
    architecture: str, like: str | None, recipe: str, options: SeriesOptions, now: Callable[[], float]
) -> ArchitectureResult:
    source = RECIPES[architecture].source
    order = {
        "architecture": architecture,
        "like": like,
        "workers": list(options.worker_counts),
        "steps": options.steps,
    }
    begin = now()
    # A cache of its own: hashes of files that are gone in a minute do not belong into the user's.
    with tempfile.TemporaryDirectory(prefix="gate-", dir=cache_dir()) as folder:
        try:
            answer = run_job(_JOB, order, timeout=_LARGEST_SECONDS, environment={"LINKCPP_CACHE": folder})
        except JobFailedError as error:
            return ArchitectureResult(
                architecture, like, source, recipe, built=True, reason=str(error), seconds=round(now() - begin, 1)
            )
    record = GateRecord.from_json(answer["record"])
    descriptors, traffic, found = answer["descriptors"], answer["traffic"], answer["cuts"]
    if not isinstance(descriptors, dict) or not isinstance(traffic, list):
        raise TypeError("the job's descriptors are no object, or its traffic is no list")
    cuts = CutFindings.from_json(found) if isinstance(found, dict) else None
    return ArchitectureResult(
        architecture,
        like,
        source,
        recipe,
        built=True,
        reason=_reason(record, cuts),
        seconds=round(now() - begin, 1),
        record=record,
        descriptors=DescriptorSummary.from_json(descriptors),
        hybrid=bool(answer["hybrid"]),
        whole_text=bool(answer["whole_text"]),
        embeds=bool(answer["embeds"]),
        traffic=tuple(Traffic.from_json(each) for each in traffic),
        cuts=cuts,
    )


def _reason(record: GateRecord, cuts: CutFindings | None) -> str:
    if cuts is not None and not cuts.passed:
        return f"cuts into stages: {cuts.words()}"
    if not record.passes(Contract.EXACT):
        return "; ".join(line for line in failures(record) if line.startswith(Contract.EXACT.value))
    cells = record.contracts[Contract.EXACT]
    counts = " and ".join(str(count) for count in sorted(cells))
    return f"all {min(cell.positions for cell in cells.values())} positions byte-identical over {counts} workers"
