"""`linkcpp deploy`: start the processes of a deployment that belong to this machine."""

from __future__ import annotations

import json
import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import click

from orchestrator.cli.app import Terminal
from orchestrator.cli.service import end_with_stdin, stop_on_signals
from orchestrator.cli.stage_file import is_remote
from orchestrator.models.catalog import resolve_model
from orchestrator.models.deployment import Deployment, read_deployment, write_deployment
from orchestrator.workers.child import LOOK_SECONDS
from orchestrator.workers.deployment import DeployedProcesses
from orchestrator.workers.machine import usable_memory

COLUMNS: Final = ("process", "kind", "holds", "address", "pid")


@click.command("deploy")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--local", is_flag=True, help="Start all of it here, on ports of this machine only.")
@click.option("--node", default=None, metavar="NAME", help="Start what belongs to this machine, at its addresses.")
@click.option("--threads", type=click.IntRange(1, 1024), default=None, help="Threads where the file says nothing.")
@click.option("--timeout", type=click.FloatRange(1), default=600.0, help="Longest wait for the start, in seconds.")
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    default=None,
    help="Write the deployment with the addresses in use. [default with --local: FILE with .running.toml]",
)
@click.option("--overcommit", is_flag=True, help="Start even what this machine has not the memory for.")
@click.option("--json", "as_json", is_flag=True, help="When ready, print one line of JSON instead of a table.")
@click.option("--until-stdin-ends", is_flag=True, hidden=True)
@click.pass_obj
def command(
    terminal: Terminal,
    file: Path,
    local: bool,
    node: str | None,
    threads: int | None,
    timeout: float,
    output: Path | None,
    overcommit: bool,
    as_json: bool,
    until_stdin_ends: bool,
) -> None:
    """Start the stages, spares and expert workers of a deployment FILE, until SIGTERM or Ctrl-C ends them all.

    A process that ends before is started again. The gateway is not among them: `linkcpp serve --deployment FILE`.
    """
    if local == (node is not None):
        raise click.UsageError("say which processes: --local for all of them, or --node NAME for one machine's")
    signal.signal(signal.SIGTERM, _leave)  # while processes load: what was started ends with the stack below
    if until_stdin_ends:
        end_with_stdin()
    deployment = read_deployment(file)
    remote = is_remote(deployment.model)
    model = deployment.model if remote else resolve_model(deployment.model).resolve()
    if local and threads is None:
        # Processes of one machine share its cores; more threads than cores only wait for one another.
        count = len(deployment.stages) + len(deployment.spares) + len(deployment.workers)
        threads = max(1, len(os.sched_getaffinity(0)) // count)
    processes = DeployedProcesses(deployment, model, node=node, threads=threads, timeout=timeout)
    if not overcommit and not remote:
        processes.check_memory(usable_memory())
    with ExitStack() as stack:
        with terminal.progress("starting") as progress:
            progress(0, None, "processes load")
            stack.enter_context(processes)
        stop = stop_on_signals()
        found = processes.deployment
        if output is None and local:
            output = file.with_name(f"{file.stem}.running.toml")
        if output is not None:
            write_deployment(output, found, [f"the processes that `linkcpp deploy` started from {file.name}"])
        _announce(terminal, processes, found, output, as_json=as_json)
        while not stop.wait(LOOK_SECONDS):
            processes.tend(terminal.error)


def _announce(
    terminal: Terminal, processes: DeployedProcesses, deployment: Deployment, output: Path | None, *, as_json: bool
) -> None:
    running = processes.running
    if as_json:
        ready = {
            "ready": True,
            "address": running[0].address,
            "pid": os.getpid(),
            "deployment": None if output is None else str(output),
            "processes": [
                {"name": p.name, "kind": p.kind, "holds": p.holds, "address": p.address, "pid": p.pid}
                for p in running
            ],
        }
        # One line, not Terminal.json's several: whoever started this process reads a line.
        terminal.console.file.write(json.dumps(ready) + "\n")
        terminal.console.file.flush()
        return
    terminal.table("", COLUMNS, [(p.name, p.kind, p.holds, p.address, str(p.pid)) for p in running])
    if output is not None:
        terminal.print(f"ready; the gateway: linkcpp serve --deployment {output}", style="bold")
    else:
        terminal.print(f"ready: {len(running)} of the processes of {deployment.model}", style="bold")
    terminal.console.file.flush()


def _leave(_number: int, _frame: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)
