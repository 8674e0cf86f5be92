"""The long series of `linkcpp onboard`: every architecture, every shape, every quantisation type."""

from __future__ import annotations

from pathlib import Path

from orchestrator.cli.app import Terminal
from orchestrator.engine.identity import engine_identity
from orchestrator.engine.upstream import source_inventory
from orchestrator.errors import ConfigError
from orchestrator.models.architectures import RECIPES, WITHOUT_EXPERTS
from orchestrator.onboarding import quants
from orchestrator.onboarding.architecture_results import ArchitectureResult
from orchestrator.onboarding.architecture_table import COLUMNS, Provenance, count_line, document, rows
from orchestrator.onboarding.architectures import (
    SeriesOptions,
    denominator,
    known_architectures,
    known_shapes,
    publish,
    run_architectures,
    run_shapes,
    untried,
)
from orchestrator.onboarding.run import utc_now


def run_series(
    terminal: Terminal,
    series: str,
    names: tuple[str, ...],
    options: SeriesOptions,
    table: Path | None,
    *,
    to_catalogue: bool,
    as_json: bool,
) -> int:
    """Run one series and return the exit status."""
    if series == "quants":
        return _all_quants(terminal, names, table, as_json=as_json)
    if series == "architectures":
        results = _all_architectures(terminal, names, options, as_json=as_json)
    else:
        results = _all_shapes(terminal, names, options, as_json=as_json)
    if table is not None:
        _write_page(table)
    if to_catalogue:
        written = publish(results)
        if not as_json:
            terminal.print(
                f"recorded in the catalogue: {', '.join(written) or 'nothing, no model of it is concerned'}"
            )
    return int(any(result.failed for result in results))


def _all_architectures(
    terminal: Terminal, names: tuple[str, ...], options: SeriesOptions, *, as_json: bool
) -> list[ArchitectureResult]:
    """Run the gate over architectures and show what was found."""
    with terminal.progress("architectures") as progress:
        results = run_architectures(names, options, progress=progress)
    inventory = source_inventory()
    if as_json:
        terminal.json(
            {
                "architectures": [result.to_json() for result in results],
                "denominator": None
                if inventory is None
                else {
                    "files": list(inventory.files),
                    "calls": inventory.calls,
                    "architectures": sorted(inventory.architectures),
                },
                **_summary(results),
            }
        )
    else:
        terminal.table("architectures", COLUMNS, rows(results))
        terminal.print(denominator(inventory))
        _conclude(terminal, results)
    return results


def _all_shapes(
    terminal: Terminal, names: tuple[str, ...], options: SeriesOptions, *, as_json: bool
) -> list[ArchitectureResult]:
    """Run the gate over the shapes of known models and show what was found."""
    with terminal.progress("shapes") as progress:
        results = run_shapes(names, options, progress=progress)
    if as_json:
        terminal.json({"shapes": [result.to_json() for result in results], **_summary(results)})
    else:
        terminal.table("shapes", ("model", *COLUMNS), [(result.name, *rows([result])[0]) for result in results])
        _conclude(terminal, results)
    return results


def _all_quants(terminal: Terminal, names: tuple[str, ...], table: Path | None, *, as_json: bool) -> int:
    with terminal.progress("quantisation types") as progress:
        results = quants.run_quants(names, progress=progress)
    identity = engine_identity()
    failed = [result for result in results if not result.passed]
    if as_json:
        terminal.json(
            {
                "quants": [result.to_json() for result in results],
                "passed": len(results) - len(failed),
                "failed": [result.type_name for result in failed],
                "engine": {"build": identity.build, "isa": identity.isa},
            }
        )
    else:
        terminal.table("quantisation types", quants.COLUMNS, quants.rows(results))
        for result in failed:
            terminal.print(f"failed: {result.type_name}: {result.reason}", style="red")
        style = "bold red" if failed else "bold green"
        terminal.print(f"{len(results) - len(failed)} of {len(results)} are byte-identical", style=style)
    if table is not None:
        text = quants.section(results, engine=identity.build, isa=identity.isa, date=utc_now().isoformat())
        quants.write_section(table, text)
    return int(bool(failed))


def _summary(results: list[ArchitectureResult]) -> dict[str, object]:
    identity = engine_identity()
    return {
        "built": sum(result.built for result in results),
        "passed": sum(result.passed for result in results),
        "failed": [result.name for result in results if result.failed],
        "engine": {"build": identity.build, "isa": identity.isa},
    }


def _conclude(terminal: Terminal, results: list[ArchitectureResult]) -> None:
    for result in results:
        if not result.built:
            terminal.print(f"not made: {result.name}: {result.reason}")
    for result in results:
        if result.failed:
            terminal.print(f"failed: {result.name}: {result.reason}", style="red")
    failed = any(result.failed for result in results)
    terminal.print(count_line(results).replace("`", ""), style="bold red" if failed else "bold green")


def _write_page(path: Path) -> None:
    """Write all that is on record for this engine, whatever this run tried."""
    known = known_architectures()
    named = [known.get(name) or untried(name) for name in (*RECIPES, *WITHOUT_EXPERTS)]
    _write(path, document(named, list(known_shapes().values()), _provenance()))


def _provenance() -> Provenance:
    identity = engine_identity()
    return Provenance(
        command="linkcpp onboard --all-architectures --table FILE",
        engine=identity.build,
        isa=identity.isa,
        date=utc_now().isoformat(),
        denominator=denominator(source_inventory()),
    )


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
