"""`linkcpp bench speculation`: what guessing ahead gains, and that it never costs much."""

from __future__ import annotations

import click

from orchestrator.bench.speculation import DELAYS_MS, LAYOUTS, MOST_LOST, SpeculationReport, measure_speculation
from orchestrator.cli.app import Terminal
from orchestrator.cli.bench_model import DEFAULT_MODEL, bench_model
from orchestrator.gateway.drafters.opening import SpeculationMode, SpeculationSettings
from orchestrator.models.catalog import resolve_model
from orchestrator.models.sources import get_model

DEFAULT_DRAFT = "smollm2"


@click.command("speculation")
@click.option("--model", default=DEFAULT_MODEL, show_default=True, help="A model of the catalogue or a file.")
@click.option(
    "--draft-model",
    default=None,
    metavar="NAME|FILE",
    help="Also with this. [default: the default model's dense twin]",
)
@click.option("--layout", type=click.Choice(LAYOUTS), default=LAYOUTS[0], show_default=True, help="What is measured.")
@click.option(
    "--delay",
    "delays",
    type=click.FloatRange(0, 1000),
    multiple=True,
    metavar="MS",
    help="Added to each round trip; may be repeated. [default: 0, 5, 25, 80]",
)
@click.option("--pairs", type=click.IntRange(1, 100), default=5, show_default=True, help="Answers of each side.")
@click.option("--tokens", type=click.IntRange(8, 400), default=80, show_default=True, help="Length of an answer.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
@click.pass_context
def command(
    ctx: click.Context,
    model: str,
    draft_model: str | None,
    layout: str,
    delays: tuple[float, ...],
    pairs: int,
    tokens: int,
    as_json: bool,
) -> None:
    """Measure answers with as many guesses as pay against the same answers without, over short and long ways.

    A ring of two stages (one round trip for each token), a star of one worker (one for each MoE layer), or one
    process. Exit status 1 if an answer differs, or if one loses more than 5 % of its speed.
    """
    terminal: Terminal = ctx.obj
    with terminal.progress("bench speculation") as progress:
        path = bench_model(model, progress)
        drafters = [("ngram", SpeculationSettings(SpeculationMode.AUTO))]
        if draft_model is not None or model == DEFAULT_MODEL:
            draft = resolve_model(draft_model) if draft_model else get_model(DEFAULT_DRAFT, progress=progress)
            drafters.append(("draft", SpeculationSettings(SpeculationMode.AUTO, draft)))
        report = measure_speculation(
            path,
            drafters,
            layout=layout,
            delays_ms=delays or DELAYS_MS,
            pairs=pairs,
            tokens=tokens,
            progress=progress,
        )
    if as_json:
        terminal.json(report.to_json())
    else:
        _show(terminal, report)
    ctx.exit(0 if report.is_good else 1)


def _show(terminal: Terminal, report: SpeculationReport) -> None:
    terminal.print(f"{report.model}, {report.layout}: speed with guesses, without them being 1", style="bold")
    terminal.table(
        "",
        ("delay", "task", "drafter", "gain", "pairs", "tokens per step", "right", "same tokens"),
        [
            (
                f"{case.delay_ms:g} ms",
                case.task,
                case.drafter,
                f"{case.gain:.2f}",
                f"{min(case.gains):.2f} to {max(case.gains):.2f}",
                f"{case.tokens_per_step:.2f}",
                f"{100 * case.acceptance:.0f} %",
                "yes" if case.same else "NO",
            )
            for case in report.cases
        ],
    )
    terminal.print(f"load average {report.load[0]} to {report.load[1]}")
    if not report.is_good:
        terminal.error(f"error: an answer differs, or lost more than {100 * MOST_LOST:g} %")
