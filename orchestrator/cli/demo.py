"""`linkcpp demo`: the whole way once, with figures."""

from __future__ import annotations

from pathlib import Path

import click

from orchestrator.cli.app import Terminal
from orchestrator.models.sources import get_model
from orchestrator.onboarding.demo import QUESTION, DemoOptions, DemoResult, run_demo
from orchestrator.onboarding.options import default_threads
from orchestrator.onboarding.star import Fleet
from orchestrator.types import format_ranges

MODEL = "smollm2-moe"


@click.command("demo")
@click.option("--workers", type=click.IntRange(1, 16), default=3, help="Local worker processes.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
@click.pass_context
def command(ctx: click.Context, workers: int, as_json: bool) -> None:
    """Show the whole way once: workers, the gate's verdict, an answer, figures, and whether its bytes are right.

    Gets the default model if it is not here yet. Exit status 1 if the answer is not byte-identical to that of one
    process.
    """
    terminal: Terminal = ctx.obj
    with terminal.progress(f"getting {MODEL}") as progress:
        path = get_model(MODEL, progress=progress)
    options = DemoOptions(workers=workers, threads=default_threads())
    view = _Silent() if as_json else _Screen(terminal, path)
    with terminal.progress("gate") as progress:
        result = run_demo(path, options, view, progress=progress)
    if as_json:
        terminal.json(result.to_json())
    ctx.exit(0 if result.byte_identical else 1)


class _Silent:
    """A view that shows nothing: the result is printed as JSON."""

    def fleet(self, fleet: Fleet) -> None:
        """Show nothing."""

    def verdict(self, sentence: str) -> None:
        """Show nothing."""

    def text(self, piece: str) -> None:
        """Show nothing."""

    def result(self, result: DemoResult) -> None:
        """Show nothing."""


class _Screen:
    """A view that writes each part as it comes."""

    def __init__(self, terminal: Terminal, path: Path) -> None:
        self._terminal = terminal
        self._path = path

    def fleet(self, fleet: Fleet) -> None:
        """Show who holds what."""
        rows = [
            (
                f"local-{number}",
                worker.address,
                str(worker.pid),
                format_ranges(worker.ownership.layers),
                format_ranges({expert for experts in worker.ownership.experts.values() for expert in experts}),
            )
            for number, worker in enumerate(fleet.workers, 1)
        ]
        columns = ("worker", "address", "pid", "layers", "experts")
        # A title in the table would be folded to the table's width.
        self._terminal.print(f"workers for {self._path.name}; this process holds no expert", style="bold")
        self._terminal.table("", columns, rows)

    def verdict(self, sentence: str) -> None:
        """Show what the gate says."""
        self._terminal.print(f"\ngate: {sentence}")
        self._terminal.print(f"\n> {QUESTION}")

    def text(self, piece: str) -> None:
        """Write a piece of the answer as it comes."""
        self._terminal.console.print(piece, end="", soft_wrap=True)
        self._terminal.console.file.flush()

    def result(self, result: DemoResult) -> None:
        """Show the figures."""
        ratio = result.tokens_per_second_star / max(result.tokens_per_second_local, 1e-9)
        self._terminal.print("\n")
        rows = (
            ("bytes per token and layer", f"{result.bytes_per_token_layer:,.0f} (both directions, all workers)"),
            ("round trips per token", f"{result.round_trips_per_token:g} (one per MoE layer)"),
            ("tokens/s, star", f"{result.tokens_per_second_star:.1f}"),
            ("tokens/s, one process", f"{result.tokens_per_second_local:.1f} (the star has {ratio:.2f} of it)"),
            ("rows by worker", ", ".join(f"{name} {rows:,}" for name, rows in result.rows_by_worker.items())),
            ("logits, star", f"SHA-256 {result.logits_sha256}"),
            ("logits, one process", f"SHA-256 {result.oracle_sha256}"),
        )
        self._terminal.table("", ("figure", "value"), rows)
        style = "bold green" if result.byte_identical else "bold red"
        self._terminal.print(f"byte-identical: {'yes' if result.byte_identical else 'no'}", style=style)
