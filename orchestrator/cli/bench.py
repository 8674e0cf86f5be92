"""`linkcpp bench`: what the distribution costs, as ratios measured in one run."""

from __future__ import annotations

import os
from collections.abc import Sequence

import click

from orchestrator.bench.dispatch import BUDGET_US, DispatchReport, run_dispatch
from orchestrator.bench.invariance import Cost, Finding, measure_cost, run_invariance, what_is_tried
from orchestrator.bench.layer import LayerReport, layer_model, run_layer, shapes
from orchestrator.bench.ring import measure_ring
from orchestrator.bench.waiting import CPU_LIMIT, WaitingReport, run_waiting
from orchestrator.cli import bench_serving, bench_speculation
from orchestrator.cli.app import Terminal
from orchestrator.cli.bench_model import DEFAULT_MODEL, bench_model

_json = click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
_pairs = click.option("--pairs", type=click.IntRange(1, 1000), default=20, help="Alternating runs of both sides.")


@click.group("bench")
def command() -> None:
    """Measure what the distribution costs.

    Figures are medians of alternating runs. On a machine that others use too they are noisy: the load average is
    part of each result.
    """


command.add_command(bench_serving.command)
command.add_command(bench_speculation.command)


@command.command("dispatch")
@click.option("--model", default=DEFAULT_MODEL, help="A model of the catalogue or a file.")
@click.option("--workers", type=click.IntRange(1, 16), default=1, help="Worker processes, all on one core.")
@_pairs
@click.option("--steps", type=click.IntRange(1, 256), default=24, help="Tokens of each run.")
@click.option(
    "--budget-us", type=float, default=BUDGET_US, help="Orchestration p50 at one row over which this fails."
)
@_json
@click.pass_context
def dispatch(
    ctx: click.Context, model: str, workers: int, pairs: int, steps: int, budget_us: float, as_json: bool
) -> None:
    """Measure orchestration per MoE layer, and tokens/s of a star against one process.

    One thread on each side, each on a core of its own. Exit status 1 if orchestration at one row is over its
    budget, or if a logit differs between the two sides.
    """
    terminal: Terminal = ctx.obj
    with terminal.progress("bench dispatch") as progress:
        # The default model is fetched, as the demo does; any other must be there.
        path = bench_model(model, progress)
        report = run_dispatch(path, workers=workers, pairs=pairs, steps=steps, progress=progress)
    if as_json:
        terminal.json(report.to_json() | {"budget_us": budget_us, "within_budget": report.is_within(budget_us)})
    else:
        _show_dispatch(terminal, report, budget_us)
    ctx.exit(0 if report.is_within(budget_us) and report.times.byte_identical else 1)


def _show_dispatch(terminal: Terminal, report: DispatchReport, budget_us: float) -> None:
    # A title in the table would be folded to the table's width.
    terminal.print("time in the hook minus the worker's compute, us per MoE layer", style="bold")
    terminal.table(
        "",
        ("rows", "p50", "p99", "worker's compute p50", "calls"),
        [
            (str(entry.rows), f"{entry.p50:.1f}", f"{entry.p99:.1f}", f"{entry.compute_p50:.0f}", f"{entry.calls:,}")
            for entry in report.orchestration
        ],
    )
    figures = report.to_json()
    low, high = report.times.spread
    terminal.print(
        f"\n{report.model}, {report.workers} worker(s): star {figures['tokens_per_second_star']} tokens/s, "
        f"one process {figures['tokens_per_second_local']}"
    )
    terminal.print(
        f"star to local: {report.times.star_to_local:.3f} (quartiles {low:.3f} to {high:.3f})", style="bold"
    )
    _show_common(terminal, report.times.byte_identical, report.load)
    if not report.is_within(budget_us):
        terminal.error(f"error: {report.at_one_row.p50:.0f} us per layer is over the budget of {budget_us:g} us")


@command.command("layer")
@click.option("--like", type=click.Choice(shapes()), default=shapes()[0], help="The model whose layer it is.")
@_pairs
@click.option("--steps", type=click.IntRange(1, 256), default=16, help="Tokens of each run.")
@_json
@click.pass_obj
def layer(terminal: Terminal, like: str, pairs: int, steps: int, as_json: bool) -> None:
    """Measure the overhead of a star at the true shape of a large model's layer.

    Two MoE layers with random weights, kept in the cache folder (about 3 GB). Overhead is the step time of the
    star less that of one process, divided by the latter.
    """
    with terminal.progress("making the model") as progress:
        path = layer_model(like, progress=progress)
    with terminal.progress("bench layer") as progress:
        report = run_layer(like, path, pairs=pairs, steps=steps, progress=progress)
    if as_json:
        terminal.json(report.to_json())
    else:
        _show_layer(terminal, report)


def _show_layer(terminal: Terminal, report: LayerReport) -> None:
    figures = report.to_json()
    low, high = report.times.overhead_spread
    terminal.print(f"two MoE layers like those of {report.like}, one token", style="bold")
    terminal.table(
        "",
        ("side", "step"),
        [("star", f"{figures['step_ms_star']} ms"), ("one process", f"{figures['step_ms_local']} ms")],
    )
    terminal.print(
        f"\norchestration {report.orchestration.p50:.0f} us per layer beside the worker's "
        f"{report.orchestration.compute_p50:.0f} us, less what the shared expert hides"
    )
    terminal.print(
        f"overhead: {100 * report.times.overhead:.2f} % (quartiles {100 * low:.2f} to {100 * high:.2f} %)",
        style="bold",
    )
    _show_common(terminal, report.times.byte_identical, report.load)


@command.command("ring")
@click.option("--model", default=DEFAULT_MODEL, help="A model of the catalogue or a file.")
@_pairs
@click.option("--steps", type=click.IntRange(1, 256), default=24, help="Tokens of each run.")
@click.option("--tcp", is_flag=True, help="Loopback TCP between the stages instead of a Unix socket.")
@click.option(
    "--delay", type=click.FloatRange(0, 10_000), default=0.0, help="Milliseconds added to each turn, over TCP."
)
@_json
@click.pass_context
def ring(ctx: click.Context, model: str, pairs: int, steps: int, tcp: bool, delay: float, as_json: bool) -> None:
    """Measure tokens/s of a ring of two stages against one process, and against what a long way leaves possible.

    One thread for each stage and for the one process, each stage on a core of its own. Exit status 1 if a logit
    differs between the two sides.
    """
    terminal: Terminal = ctx.obj
    with terminal.progress("bench ring") as progress:
        path = bench_model(model, progress)
        report = measure_ring(path, pairs=pairs, steps=steps, unix=not tcp, delay=delay / 1e3, progress=progress)
    figures = report.to_json()
    if as_json:
        terminal.json(figures)
    else:
        low, high = report.times.spread
        computed = " + ".join(f"{value / 1000:.2f}" for value in report.stages_us)
        terminal.print(
            f"{report.model}, two stages over {report.transport}: ring {figures['tokens_per_second_ring']} tokens/s "
            f"({computed} ms of computation), one process {figures['tokens_per_second_local']}"
        )
        terminal.print(
            f"ring to local: {report.times.star_to_local:.3f} (quartiles {low:.3f} to {high:.3f})", style="bold"
        )
        if delay:
            terminal.print(
                f"ring to 1 / ({delay:g} ms + the one process's step): {report.to_possible:.3f}", style="bold"
            )
        _show_common(terminal, report.times.byte_identical, report.load)
    ctx.exit(0 if report.times.byte_identical else 1)


@command.command("invariance")
@click.option("--architecture", "names", multiple=True, metavar="NAME", help="Only this one; may be repeated.")
@click.option("--threads", type=click.IntRange(1, 1024), default=None, help="Of the engine. [default: the cores]")
@click.option("--model", default=DEFAULT_MODEL, help="Measure the cost with this model of the catalogue or file.")
@click.option("--no-cost", is_flag=True, help="Do not measure the cost.")
@_pairs
@_json
@click.pass_context
def invariance(
    ctx: click.Context,
    names: tuple[str, ...],
    threads: int | None,
    model: str,
    no_cost: bool,
    pairs: int,
    as_json: bool,
) -> None:
    """Prove that answers do not depend on how tokens are grouped, per architecture, and measure what that costs.

    A synthetic model of each is fed the same tokens in micro-batches of many sizes, and several texts side by side
    whose mixture changes with every step: each logit must have the bytes of single steps. Exit status 1 if an
    architecture does not do what the gateway takes for granted.
    """
    terminal: Terminal = ctx.obj
    count = threads or os.cpu_count() or 1
    with terminal.progress("bench invariance") as progress:
        findings = run_invariance(names, count, progress=progress)
    cost = None
    if not no_cost:
        with terminal.progress("cost") as progress:
            path = bench_model(model, progress)
            cost = measure_cost(path, count, pairs, progress=progress)
    good = all(finding.expected for finding in findings)
    if as_json:
        terminal.json(
            {
                "tried": what_is_tried(),
                "threads": count,
                "architectures": [finding.to_json() for finding in findings],
                "cost": None if cost is None else cost.to_json(),
                "as_expected": good,
            }
        )
    else:
        _show_invariance(terminal, findings, cost, count)
    ctx.exit(0 if good else 1)


def _show_invariance(terminal: Terminal, findings: Sequence[Finding], cost: Cost | None, threads: int) -> None:
    words = {True: "identical", False: "differs", None: "not tried"}
    terminal.print(f"{what_is_tried()}; {threads} thread(s)", style="bold")
    terminal.table(
        "",
        ("architecture", "one sequence", "several", "what was found", "as expected"),
        [(f.architecture, words[f.one], words[f.several], f.detail, "yes" if f.expected else "NO") for f in findings],
    )
    tried = [finding for finding in findings if finding.one is not None]
    one = sum(finding.one is True for finding in tried)
    several = sum(finding.several is True for finding in tried)
    terminal.print(
        f"\nbatch-invariant: {one} of {len(tried)} with one sequence, {several} with several", style="bold"
    )
    if cost is None:
        return
    for what, ratio, (low, high) in (
        ("prompt", cost.prefill, cost.prefill_quartiles),
        ("single steps", cost.decode, cost.decode_quartiles),
        ("steps of four sequences", cost.several, cost.several_quartiles),
    ):
        terminal.print(f"{what}: {ratio:.2f} of the stock configuration's speed (quartiles {low:.2f} to {high:.2f})")
    terminal.print(
        f"four sequences at once: {cost.several_to_one:.2f} times the tokens/s of one; {cost.model}, "
        f"load average {cost.load[0]} to {cost.load[1]}"
    )


def _show_common(terminal: Terminal, byte_identical: bool, load: tuple[float, float]) -> None:
    terminal.print(f"logits byte-identical: {'yes' if byte_identical else 'no'}; load average {load[0]} to {load[1]}")


@command.command("waiting")
@_json
@click.pass_context
def waiting(ctx: click.Context, as_json: bool) -> None:
    """Measure what the backbone does while answers are on the way.

    CPU use over trips of 80 ms, time lost to falling asleep over short ones, and whether a shared expert runs during
    the trip. Exit status 1 if a decode thread uses 20 % of a core or more, or if the shared expert does not.
    """
    terminal: Terminal = ctx.obj
    with terminal.progress("bench waiting") as progress:
        path = bench_model(DEFAULT_MODEL, progress)
        report = run_waiting(path, progress=progress)
    if as_json:
        terminal.json(report.to_json())
    else:
        _show_waiting(terminal, report)
    ctx.exit(0 if report.sleeps and report.hides else 1)


def _show_waiting(terminal: Terminal, report: WaitingReport) -> None:
    rows = [
        (
            "CPU per decode thread, trips of 80 ms",
            f"{100 * report.cpu_per_thread:.1f} % (limit {100 * CPU_LIMIT:g} %)",
        ),
        *((f"added to a wait of {wait:.0f} us", f"{added:.0f} us") for wait, added in report.added_us),
        ("shared expert, one process", f"{report.shared_local_ms:.2f} ms per layer"),
        ("shared expert, star at 20 ms", f"{report.shared_star_ms:.2f} ms per layer"),
    ]
    terminal.table("", ("figure", "value"), rows)
    terminal.print(f"load average {report.load[0]} to {report.load[1]}")
