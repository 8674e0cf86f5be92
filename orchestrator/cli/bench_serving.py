"""`linkcpp bench serving`: what several answers at once are worth, over a long way and against upstream's server."""

from __future__ import annotations

import click

from orchestrator.bench import serving_http
from orchestrator.bench.serving import WANTED, Scaling, Way, measure_scaling
from orchestrator.bench.serving_http import OURS, UPSTREAM, Comparison, compare_servers
from orchestrator.cli.app import Terminal
from orchestrator.cli.bench_model import DEFAULT_MODEL, bench_model
from orchestrator.engine.build import upstream_server

PARTS = ("star", "ring", "server")


@click.command("serving")
@click.option("--model", default=DEFAULT_MODEL, help="A model of the catalogue or a file.")
@click.option("--only", "parts", multiple=True, type=click.Choice(PARTS), help="Only this part; may be repeated.")
@click.option("--rtt", "rtt_ms", type=click.FloatRange(0), default=80.0, help="Round trip of star and ring, in ms.")
@click.option("--streams", type=click.IntRange(2, 32), default=8, help="Answers at once over the long way.")
@click.option("--slots", type=click.IntRange(1, 32), default=4, help="Answers at once beside upstream's server.")
@click.option("--threads", type=click.IntRange(1, 1024), default=None, help="Of both servers. [default: the cores]")
@click.option("--tokens", type=click.IntRange(2, 512), default=64, help="Of each answer of the servers.")
@click.option("--rounds", type=click.IntRange(1, 100), default=5, help="Alternating runs of all sides.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
@click.pass_context
def command(
    ctx: click.Context,
    model: str,
    parts: tuple[str, ...],
    rtt_ms: float,
    streams: int,
    slots: int,
    threads: int | None,
    tokens: int,
    rounds: int,
    as_json: bool,
) -> None:
    """Measure tokens/s of several answers at once.

    Over a star and a ring with a long way to the workers: all streams together against one stream. On this machine:
    our endpoint against upstream's own server, over HTTP, which is built for this once (some minutes). Exit status 1
    if eight streams give less than 7 times the tokens of one, our endpoint less than 0.9 of upstream's, or if a text
    depends on what runs beside it.
    """
    terminal: Terminal = ctx.obj
    chosen = parts or PARTS
    comparison = None
    server = None
    if "server" in chosen:
        with terminal.progress("upstream's server") as progress:
            server = upstream_server(progress)
    with terminal.progress("bench serving") as progress:
        path = bench_model(model, progress)
        ways: tuple[Way, ...] = ("star", "ring")
        scalings = [
            measure_scaling(path, way, rtt_ms=rtt_ms, streams=streams, rounds=rounds, progress=progress)
            for way in ways
            if way in chosen
        ]
        if server is not None:
            comparison = compare_servers(
                path, server, slots=slots, threads=threads, tokens=tokens, rounds=rounds, progress=progress
            )
    good = all(one.same_texts and one.ratio >= WANTED * streams / 8 for one in scalings)
    good = good and (comparison is None or comparison.ratio(OURS) >= serving_http.WANTED)
    if as_json:
        terminal.json(
            {
                "scaling": [one.to_json() for one in scalings],
                "server": None if comparison is None else comparison.to_json(),
                "as_wanted": good,
            }
        )
    else:
        _show(terminal, scalings, comparison)
    ctx.exit(0 if good else 1)


def _show(terminal: Terminal, scalings: list[Scaling], comparison: Comparison | None) -> None:
    for one in scalings:
        rates = [f"{min(found):.2f} to {max(found):.2f}" for found in (one.one, one.many)]
        terminal.print(
            f"{one.model}, {one.way} at {one.rtt_ms:g} ms: one stream {rates[0]} tokens/s, {one.streams} streams "
            f"{rates[1]}"
        )
        terminal.print(f"{one.streams} streams to one: {one.ratio:.2f}", style="bold")
        same = "yes" if one.same_texts else "no"
        terminal.print(f"same texts: {same}; load average {one.load[0]} to {one.load[1]}\n")
    if comparison is None:
        return
    terminal.print(
        f"{comparison.model}, {comparison.slots} answers of {comparison.tokens} tokens at once over HTTP, "
        f"{comparison.threads} thread(s)"
    )
    rows = [
        (side, f"{min(rates):.1f} to {max(rates):.1f}", "1" if side == UPSTREAM else f"{comparison.ratio(side):.3f}")
        for side, rates in comparison.rates.items()
    ]
    terminal.table("", ("server", "tokens/s", "to upstream's"), rows)
    terminal.print(f"load average {comparison.load[0]} to {comparison.load[1]}")
