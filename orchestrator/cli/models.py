"""`linkcpp models`: every model that can be named, how far it has come and what it takes."""

from __future__ import annotations

import click

from orchestrator.cli.app import Terminal
from orchestrator.models.catalog import Catalog
from orchestrator.models.footprint import GIB
from orchestrator.models.inspection import size_text
from orchestrator.models.roadmap import columns, roadmap


@click.command("models", short_help="List the models: status, sizes, wire, context, machines.")
@click.option(
    "--context", "tokens", type=click.IntRange(1), default=8192, show_default=True, help="Tokens of context."
)
@click.option(
    "--memory", type=click.FloatRange(0.5), default=64.0, show_default=True, help="GiB of memory of one machine."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value.")
@click.pass_obj
def command(terminal: Terminal, tokens: int, memory: float, as_json: bool) -> None:
    """List the models of the catalogue. All figures are computed: from a model's file where it is on this machine,
    else from its published shape and the type that its experts are said to have.

    A status is what was run and recorded: `listed`; `architecture passes` (a synthetic model gave the same bytes
    over workers); `onboarded` (the real weights did); `serving`.
    """
    catalog = Catalog.load()
    entries = roadmap(catalog, tokens=tokens, memory=memory * GIB)
    others = [row for row in catalog.rows.values() if row.shape is None]
    if as_json:
        terminal.json(
            {
                "models": [entry.to_json() for entry in entries],
                "without_experts": [
                    {"name": row.name, "title": row.title, "present": row.is_present, "path": str(row.path)}
                    for row in others
                ],
            }
        )
        return
    terminal.table("models", columns(tokens, memory * GIB), [entry.cells() for entry in entries])
    for row in others:
        here = "here" if row.is_present else "not here"
        terminal.print(f"{row.name}: {row.title} ({size_text(row.size)}, {here}), what others are made from")
    for entry in entries:
        if entry.problem:
            terminal.error(f"warning: {entry.problem}")
