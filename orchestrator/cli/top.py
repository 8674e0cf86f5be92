"""`linkcpp top`: watch the fleet behind a gateway."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial

import click

from orchestrator.cli.app import Terminal
from orchestrator.cli.client_options import api_key_option
from orchestrator.errors import FleetError
from orchestrator.monitor.live import StatusPoller, fetch_snapshot, status_url, watch
from orchestrator.monitor.render import View, render
from orchestrator.status.snapshot import FleetSnapshot


@click.command("top")
@click.option("--url", default="http://127.0.0.1:8080", metavar="URL", help="Address of the gateway.")
@api_key_option
@click.option("--once", is_flag=True, help="Print one picture and end; an unreachable gateway is an error then.")
@click.option("--json", "as_json", is_flag=True, help="Print the status as JSON, one line per look.")
@click.option("--interval", type=click.FloatRange(0.1, 60.0), default=0.5, help="Seconds between two looks.")
@click.pass_obj
def command(terminal: Terminal, url: str, api_key: str | None, once: bool, as_json: bool, interval: float) -> None:
    """Watch the fleet behind a gateway: workers, the running request, tokens/s. q or Ctrl-C quits.

    Into a file or a pipe it prints one picture, as with --once.
    """
    fetch = partial(fetch_snapshot, api_key=api_key)
    if as_json and not once:
        _follow(terminal, StatusPoller(url, fetch=fetch), interval)
    elif as_json:
        terminal.json(_look(url, fetch).to_json())
    elif once or not terminal.console.is_terminal:
        console = terminal.console
        view = View(url, _look(url, fetch))
        console.print(render(view, console.width, ascii_only=console.options.ascii_only))
    else:
        watch(StatusPoller(url, fetch=fetch), terminal.console, interval)


def _look(url: str, fetch: Callable[[str], FleetSnapshot]) -> FleetSnapshot:
    try:
        return fetch(status_url(url))
    except FleetError as error:
        hint = error.hint or f"is `linkcpp serve` running at {url}?"
        raise FleetError(f"no status from {url}: {error}", hint=hint) from error


def _follow(terminal: Terminal, poller: StatusPoller, interval: float) -> None:
    """Write one JSON line per look; an unreachable gateway is a line too, so that a reader sees the gap."""
    while True:
        view = poller.poll()
        if view.silent_for is None and view.snapshot is not None:
            line: dict[str, object] = view.snapshot.to_json()
        else:
            line = {"unreachable_seconds": view.silent_for, "problem": view.problem}
        terminal.console.file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
        terminal.console.file.flush()
        time.sleep(interval)
