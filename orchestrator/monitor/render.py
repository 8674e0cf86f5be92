"""Draw a fleet snapshot. Pure: a view goes in, something that rich can print comes out.

A state is always a word as well as a colour, and what is shown after the gateway went silent says that it is old.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from orchestrator.status.snapshot import FleetSnapshot, RequestSnapshot, WorkerSnapshot, WorkerState
from orchestrator.types import format_ranges

_STYLES: Final = {
    WorkerState.UP: "bold green",
    WorkerState.LOST: "bold red",
    WorkerState.CONNECTING: "bold yellow",
    WorkerState.REFUSED: "bold red",
    WorkerState.UNKNOWN: "bold magenta",
}
_BARS: Final = "▁▂▃▄▅▆▇█"
_ASCII_BARS: Final = "_.-:=+*#"
_WIDE: Final = 110
"""From this width on there is room for the worker's name, its process id and its late frames."""


@dataclass(frozen=True, slots=True)
class View:
    """What the monitor knows: the last snapshot, and since when the gateway has not answered.

    ``silent_for`` is in seconds and None while the gateway answers; ``problem`` then says what went wrong.
    """

    url: str
    snapshot: FleetSnapshot | None = None
    silent_for: float | None = None
    problem: str = ""


def render(view: View, width: int, *, ascii_only: bool = False) -> RenderableType:
    """Return the picture of a view for a terminal of ``width`` columns."""
    parts: list[RenderableType] = [_heading(view)]
    if view.silent_for is not None:
        parts.append(_silence(view))
    if view.snapshot is not None:
        stale = view.silent_for is not None
        parts += [
            Text(),
            _workers(view.snapshot, width, stale=stale),
            *_problems(view.snapshot),
            Text(),
            _request(view.snapshot.request, stale=stale),
            _speed(view.snapshot, width, ascii_only=ascii_only),
            _totals(view.snapshot),
        ]
    return Group(*parts)


def sparkline(values: Sequence[float], length: int, *, ascii_only: bool = False) -> str:
    """Draw the last ``length`` values, scaled from 0 to the largest of them; anything above 0 is visible."""
    bars = _ASCII_BARS if ascii_only else _BARS
    shown = list(values)[-length:] if length > 0 else []
    top = max(shown, default=0.0)
    if top <= 0:
        return bars[0] * len(shown)
    last = len(bars) - 1
    return "".join(bars[0 if value <= 0 else max(1, round(value / top * last))] for value in shown)


def format_bytes(count: int) -> str:
    """Write a byte count in at most six columns, in powers of 1024: ``999 B``, ``1.5 K``, ``12.3 M``, ``140 G``."""
    value, unit = float(count), "B"
    for larger in ("K", "M", "G", "T", "P", "E"):
        if value < 1000:
            break
        value, unit = value / 1024, larger
    digits = 0 if unit == "B" or value >= 99.95 else 1
    return f"{value:.{digits}f} {unit}"


def format_count(count: float) -> str:
    """Write a count or a rate in at most six columns: ``7``, ``12.5``, ``999``, ``1.2k``, ``34.5M``."""
    if count < 999.5:
        return f"{count:.0f}" if float(count).is_integer() or count >= 99.95 else f"{count:.1f}"
    value, unit = count, ""
    for larger in ("k", "M", "G", "T", "P"):
        if unit and value < 999.95:
            break
        value, unit = value / 1000, larger
    return f"{value:.1f}{unit}"


def format_duration(seconds: float) -> str:
    """Write a duration with its two largest units: ``4 s``, ``2 min 5 s``, ``3 h 0 min``, ``2 d 4 h``."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def format_ids(ids: Sequence[int], limit: int) -> str:
    """Write ids as ranges, or where that is longer than ``limit`` their count and span: ``64 of 0-254``."""
    if not ids:
        return "-"
    text = format_ranges(ids)
    return text if len(text) <= limit else f"{len(ids)} of {min(ids)}-{max(ids)}"


def printable(text: str) -> str:
    """Replace what could move the cursor or change colours: names and errors come from other machines."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _heading(view: View) -> Text:
    text = Text()
    if view.snapshot is None:
        text.append("linkcpp", style="bold").append(f"  {printable(view.url)}", style="dim")
        return text
    snapshot = view.snapshot
    text.append(printable(snapshot.model) or "(no model)", style="bold")
    text.append(f"  contract {printable(snapshot.contract)}")
    if view.silent_for is None:
        up = sum(worker.state is WorkerState.UP for worker in snapshot.workers)
        style = "green" if snapshot.ready else "bold red"
        text.append(f"  {up} of {len(snapshot.workers)} workers up", style=style)
    text.append(f"  up {format_duration(snapshot.uptime_seconds)}")
    text.append(f"\n{printable(view.url)}  engine {printable(snapshot.engine)}", style="dim")
    return text


def _silence(view: View) -> Text:
    since = format_duration(view.silent_for or 0.0)
    text = Text()
    text.append(f"GATEWAY UNREACHABLE for {since}", style="bold white on red")
    if view.problem:
        text.append(f"  {printable(view.problem)}", style="red")
    if view.snapshot is not None:
        text.append("\nbelow is the last that was known", style="dim")
    return text


def _workers(snapshot: FleetSnapshot, width: int, *, stale: bool) -> RenderableType:
    if not snapshot.workers:
        return Text("no workers: the experts run in the gateway's own process", style="dim")
    wide = width >= _WIDE
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("worker", overflow="fold", min_width=12)
    if wide:
        table.add_column("name", overflow="ellipsis", no_wrap=True, max_width=24)
        table.add_column("pid", justify="right", no_wrap=True)
    table.add_column("state", overflow="fold", min_width=4)
    table.add_column("RTT ms", justify="right", no_wrap=True)
    table.add_column("layers", overflow="fold", max_width=None if wide else 9)
    table.add_column("experts", overflow="fold", max_width=None if wide else 10)
    if wide:
        table.add_column("rows", justify="right", no_wrap=True)
    for title in ("rows/s", "in", "out", "err"):
        table.add_column(title, justify="right", no_wrap=True)
    if wide:
        table.add_column("late", justify="right", no_wrap=True)
    for worker in snapshot.workers:
        table.add_row(*_worker_cells(worker, wide=wide, stale=stale))
    return table


def _worker_cells(worker: WorkerSnapshot, *, wide: bool, stale: bool) -> list[Text]:
    state = Text(f"was {worker.state.value}", style="dim") if stale else Text(worker.state.value)
    if not stale:
        state.stylize(_STYLES[worker.state])
    limit = 30 if wide else 10
    experts = format_ids(worker.experts, limit)
    if not worker.uniform:
        # The layers' lists differ: the span alone would claim more than is owned.
        experts = f"{experts} ({worker.pairs} pairs)" if wide else f"{worker.pairs} pairs"
    cells = [Text(printable(worker.address))]
    if wide:
        cells += [Text(printable(worker.name)), Text("-" if worker.pid is None else str(worker.pid))]
    cells += [
        state,
        Text("-" if worker.rtt_ms is None else _milliseconds(worker.rtt_ms)),
        Text(format_ids(worker.layers, limit)),
        Text(experts),
    ]
    if wide:
        cells.append(Text(format_count(worker.rows)))
    errors = Text(format_count(worker.errors), style="bold red" if worker.errors else "")
    cells += [
        Text(format_count(worker.rows_per_second)),
        Text(format_bytes(worker.bytes_in)),
        Text(format_bytes(worker.bytes_out)),
        errors,
    ]
    if wide:
        cells.append(Text(format_count(worker.late_frames)))
    return cells


def _milliseconds(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def _problems(snapshot: FleetSnapshot) -> list[Text]:
    found = [worker for worker in snapshot.workers if worker.problem and worker.state is not WorkerState.UP]
    return [Text(printable(f"{worker.address}: {worker.problem}"), style="red") for worker in found]


def _request(request: RequestSnapshot | None, *, stale: bool) -> Text:
    if request is None:
        return Text("request   none was running" if stale else "request   idle", style="dim")
    text = Text("request   ", no_wrap=True, overflow="ellipsis")  # the id comes last and may be cut
    text.append(printable(request.phase), style="dim" if stale else "bold cyan")
    text.append(f"  {request.prompt_tokens} prompt + {request.generated_tokens} generated tokens")
    text.append(f"  {request.tokens_per_second:.1f} tokens/s")
    text.append(f"  {printable(request.id)}", style="dim")
    return text


def _speed(snapshot: FleetSnapshot, width: int, *, ascii_only: bool) -> Text:
    label = f"tokens/s  {snapshot.tokens_per_second:>6.1f} "
    history = snapshot.tokens_per_second_history
    peak = f" peak {max(history):.1f}" if history else ""
    text = Text(label, no_wrap=True)
    text.append(sparkline(history, width - len(label) - len(peak), ascii_only=ascii_only), style="cyan")
    text.append(peak, style="dim")
    return text


def _totals(snapshot: FleetSnapshot) -> Text:
    failed = Text(f"{snapshot.requests_failed} failed", style="bold red" if snapshot.requests_failed else "dim")
    text = Text("total     ", style="dim")
    text.append(f"{format_count(snapshot.tokens_generated)} tokens  ", style="dim")
    text.append(f"{format_count(snapshot.requests_finished)} requests finished, ", style="dim").append_text(failed)
    if snapshot.round_trips:
        text.append(f"  {format_count(snapshot.round_trips)} round trips", style="dim")
    guesses = snapshot.speculation
    if guesses is not None and guesses.drafted:
        right = 100 * guesses.accepted / guesses.drafted
        text.append(f"  {guesses.tokens_per_step:.2f} tokens/step, {right:.0f} % of guesses right", style="dim")
    return text
