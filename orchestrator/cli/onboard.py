"""`linkcpp onboard`: prove that a model gives the same answers over workers."""

from __future__ import annotations

from pathlib import Path

import click

from orchestrator.cli.app import Terminal
from orchestrator.cli.onboard_all import run_series
from orchestrator.models.catalog import resolve_model
from orchestrator.onboarding.architectures import SeriesOptions
from orchestrator.onboarding.options import GateOptions, default_threads
from orchestrator.onboarding.picture import cosine_picture
from orchestrator.onboarding.records import catalogue_name, known_name, publish, remember, save
from orchestrator.onboarding.report import COLUMNS, failures, invariance_sentence, summary, verdict_rows
from orchestrator.onboarding.run import GateReport, run_gate
from orchestrator.types import Boundary, Contract, parse_ranges
from orchestrator.workers.inject import Injection


@click.command("onboard")
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@click.option(
    "--all-architectures", "series", flag_value="architectures", help="Try a small model of each architecture."
)
@click.option("--all-shapes", "series", flag_value="shapes", help="Try the shapes of known large models.")
@click.option("--all-quants", "series", flag_value="quants", help="Try each quantisation type of experts.")
@click.option("--fresh", is_flag=True, help="With --all-...: try again what passed before.")
@click.option(
    "--table", type=click.Path(path_type=Path), metavar="FILE", help="With --all-...: write the findings as a page."
)
@click.option(
    "--contract",
    "contracts",
    type=click.Choice([contract.value for contract in Contract]),
    multiple=True,
    help="Contract to try; may be repeated. [default: all]",
)
@click.option(
    "--workers", metavar="LIST", help="Numbers of local workers to try. [default: 1,2,3; of --all-...: 1,3]"
)
@click.option(
    "--boundary",
    "boundaries",
    type=click.Choice([boundary.value for boundary in Boundary]),
    multiple=True,
    help="Also try a ring of local stages with this boundary; may be repeated.",
)
@click.option("--stages", metavar="LIST", help="With --boundary: numbers of stages to try. [default: 2,3]")
@click.option(
    "--steps", type=click.IntRange(0, 4096), help="Decode steps after each prompt. [default: 16; of --all-...: 8]"
)
@click.option("--threads", type=click.IntRange(1, 1024), default=None, help="Threads of oracle and backbone.")
@click.option("--record", "to_catalogue", is_flag=True, help="Also write the result into models.toml.")
@click.option(
    "--inject",
    type=click.Choice([kind.value for kind in Injection]),
    default=None,
    help="Make one worker wrong: the gate must fail. Nothing is stored.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
@click.pass_context
def command(
    ctx: click.Context,
    models: tuple[str, ...],
    series: str | None,
    fresh: bool,
    table: Path | None,
    contracts: tuple[str, ...],
    workers: str | None,
    boundaries: tuple[str, ...],
    stages: str | None,
    steps: int | None,
    threads: int | None,
    to_catalogue: bool,
    inject: str | None,
    as_json: bool,
) -> None:
    """Prove that MODEL (a name or a GGUF file) gives the same answers over workers as in one process.

    Starts local workers, runs built-in prompts, compares every logit, and keeps the result. With --all-... the
    models are made for the purpose, MODEL names those to try (all by default), and a run that was broken off goes
    on where it was. Exit status: 0 passed, 1 failed, 2 the model cannot be judged.
    """
    terminal: Terminal = ctx.obj
    if series is not None:
        if contracts or threads or inject or boundaries:
            raise click.UsageError(f"--all-{series} takes no --contract, --boundary, --threads or --inject")
        defaults = SeriesOptions()
        if series == "quants" and (workers or steps is not None or fresh or to_catalogue):
            raise click.UsageError("--all-quants takes no --workers, --steps, --fresh or --record")
        counts = parse_ranges(workers, what="--workers") if workers else defaults.worker_counts
        chosen = SeriesOptions(counts, defaults.steps if steps is None else steps, fresh)
        ctx.exit(run_series(terminal, series, models, chosen, table, to_catalogue=to_catalogue, as_json=as_json))
    if len(models) != 1 or fresh or table:
        raise click.UsageError("give one MODEL, or one of the options --all-...")
    if stages is not None and not boundaries:
        raise click.UsageError("--stages is for a ring: name its --boundary")
    path = resolve_model(models[0])
    options = GateOptions(
        contracts=tuple(Contract(name) for name in dict.fromkeys(contracts)) or tuple(Contract),
        worker_counts=parse_ranges(workers or "1,2,3", what="--workers"),
        steps=16 if steps is None else steps,
        threads=threads or default_threads(),
        inject=inject,
        boundaries=tuple(Boundary(name) for name in dict.fromkeys(boundaries)),
        stage_counts=parse_ranges(stages or "2,3", what="--stages"),
    )
    if to_catalogue and inject is not None:
        raise click.UsageError("--record and --inject: a run with an injected fault is no finding about the model")
    if to_catalogue:
        catalogue_name(path)  # before the long run: it may have no row
    with terminal.progress("gate") as progress:
        report = run_gate(path, options, progress=progress)
    if inject is None:
        stored = str(save(report.record))
        name = known_name(path)  # the run has hashed the file, with progress
        if name is not None:
            remember(name, report.record)
            if to_catalogue:
                stored += f" and {publish(name, report.record)}"
    else:
        stored = "not stored: one worker was made wrong"
    if as_json:
        terminal.json(report.record.to_json())
    else:
        _show(terminal, report, stored)
    record = report.record
    ctx.exit(0 if record.passed and all(map(record.passes, options.boundaries)) else 1)


def _show(terminal: Terminal, report: GateReport, stored: str) -> None:
    record = report.record
    terminal.table("verdicts", COLUMNS, verdict_rows(record))
    width = min(terminal.console.width, 100)
    floor = None if report.floor is None else report.floor.cosines
    curves: list[tuple[Contract | Boundary, str, int]] = []
    for contract, cells in record.contracts.items():
        curves.append((contract, f"{contract.value}, {max(cells)} workers", max(cells)))
    for boundary, cells in record.boundaries.items():
        curves.append((boundary, f"boundary {boundary.value}, {max(cells)} stages", max(cells)))
    for asked, words, count in curves:
        curve = report.comparisons[asked, count]
        title = f"{words}: cosine per position"
        terminal.print()
        terminal.print(cosine_picture(curve.cosines, floor, width=width, title=title))
    terminal.print()
    terminal.print(invariance_sentence(record.invariance))
    for line in failures(record):
        terminal.print(f"failed: {line}", style="red")
    terminal.print(summary(record), style="bold green" if record.passed else "bold red")
    terminal.print(f"record: {stored}")
