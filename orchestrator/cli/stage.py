"""`linkcpp stage`: hold some layers of a model, with their caches, as one stage of a ring."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from orchestrator.cli.app import Terminal
from orchestrator.cli.service import end_with_stdin, listen_on_loopback, stop_on_signals
from orchestrator.cli.stage_file import stage_file, tokenizer_file
from orchestrator.config import parse_size
from orchestrator.engine.context import INVARIANT_ROWS
from orchestrator.engine.identity import engine_identity
from orchestrator.engine.stage import StageSizes
from orchestrator.errors import InputError
from orchestrator.models.gguf_writer import Progress
from orchestrator.ring.layout import LayerRange, merge, parse_layers
from orchestrator.ring.profile import StageProfile
from orchestrator.transport.base import parse_address
from orchestrator.transport.unix import connector_of, is_unix, listener_of
from orchestrator.workers.layers import StageLayers, StageOptions
from orchestrator.workers.server import ServerLimits
from orchestrator.workers.stage import StageService
from orchestrator.workers.stage_server import StageServer

_STOCK_ROWS = 512


@click.command("stage")
@click.argument("model")
@click.option(
    "--layers",
    "ranges",
    multiple=True,
    metavar="FIRST:END",
    help="Layers to hold, like 12:24 for the layers 12 to 23; may be repeated."
    " [default: none, until a gateway wants some here]",
)
@click.option(
    "--listen",
    default=None,
    metavar="ADDRESS",
    help="Where the gateway and the stage before connect to: HOST:PORT, or unix:/path for this machine only."
    " [default: any free port of this machine only]",
)
@click.option("--ctx", "n_ctx", type=click.IntRange(1), default=4096, help="Tokens of a sequence.")
@click.option("--sequences", "n_sequences", type=click.IntRange(1, 256), default=1, help="Sequences at once.")
@click.option("--threads", type=click.IntRange(1, 1024), default=None, help="Threads that compute. [default: all]")
@click.option(
    "--ubatch",
    "n_ubatch",
    type=click.IntRange(1),
    default=None,
    help="Tokens of a micro-batch. [default: 63 batch-invariant, 512 else]",
)
@click.option("--batch", "n_batch", type=click.IntRange(1), default=None, help="Most tokens of a step.")
@click.option(
    "--batch-invariant/--no-batch-invariant",
    default=True,
    help="Let no answer depend on how tokens were grouped, for slower prefill.",
)
@click.option(
    "--worker",
    "workers",
    multiple=True,
    metavar="HOST:PORT",
    help="An expert worker for the MoE layers of these ranges; may be repeated.",
)
@click.option("--timeout", type=click.FloatRange(0.1), default=60.0, help="Longest wait for an expert worker, in s.")
@click.option("--repack", is_flag=True, help="Repack the weights: faster prefill, and only where all stages do.")
@click.option("--name", default=None, help="What others call this stage. [default: the machine's name]")
@click.option(
    "--saved-mb", type=click.IntRange(0), default=1024, help="Most megabytes of saved sequences, for each range."
)
@click.option(
    "--memory",
    default=None,
    metavar="SIZE",
    help="What this process may fill for a gateway that wants layers here. [default: what is free]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line when ready.")
@click.option("--until-stdin-ends", is_flag=True, hidden=True)
@click.pass_context
def command(
    ctx: click.Context,
    model: str,
    ranges: tuple[str, ...],
    listen: str | None,
    n_ctx: int,
    n_sequences: int,
    threads: int | None,
    n_ubatch: int | None,
    n_batch: int | None,
    batch_invariant: bool,
    workers: tuple[str, ...],
    timeout: float,
    repack: bool,
    name: str | None,
    saved_mb: int,
    memory: str | None,
    as_json: bool,
    until_stdin_ends: bool,
) -> None:
    """Hold layers of MODEL (a name, a GGUF file or an address) and compute them for a ring until SIGTERM or Ctrl-C.

    Weights are read and caches are made for these layers only, so a file with no others is enough, and of a model on
    a server (https://..., hf://...) only these layers are downloaded. All stages of a
    ring need the same model, --ctx, --sequences, --ubatch and --batch.

    A gateway that has lost a stage may have another one hold its layers too, if there is the memory. Without --layers
    a process waits for that, as a spare for any stage.
    """
    terminal: Terminal = ctx.obj
    if until_stdin_ends:
        end_with_stdin()
    if repack and batch_invariant:
        raise InputError("--repack adds in an order that depends on the batch", hint="add --no-batch-invariant")
    wanted = [parse_layers(text) for text in ranges]

    def find(layers: Sequence[LayerRange], progress: Progress | None = None) -> Path:
        return stage_file(terminal, model, layers, without_experts=bool(workers), progress=progress)

    path = find(wanted) if wanted else tokenizer_file(terminal, model)
    options = StageOptions(
        name=name or socket.gethostname(),
        identity=engine_identity(repack=repack),
        sizes=StageSizes(
            n_ctx,
            n_sequences,
            n_ubatch or (INVARIANT_ROWS if batch_invariant else _STOCK_ROWS),
            n_batch,
            batch_invariant,
        ),
        n_threads=threads or len(os.sched_getaffinity(0)),
        repack=repack,
        workers=workers,
        timeout=timeout,
        saved_limit=saved_mb << 20,
        memory=None if memory is None else parse_size(memory, what="--memory"),
    )
    layers = StageLayers(path, find, options)
    held = merge(wanted, layers.file.n_layer) if wanted else ()
    if workers:
        layers.file.require_moe()
    # Before the weights are read, so that a taken port is known at once.
    listener = listen_on_loopback() if listen is None else listener_of(listen)
    place = listener.address
    if not is_unix(place) and not parse_address(place).is_loopback:
        terminal.error(
            f"warning: {place} is neither encrypted nor authenticated: whoever reaches it can use this stage"
        )
    with layers:
        with terminal.progress(f"loading {path.name}") as progress:
            layers.load(path, held, progress)
        server = StageServer(StageService(layers, connector_of), listener, limits=ServerLimits(), log=terminal.error)
        stop = stop_on_signals()
        server.start()
        _announce(terminal, layers.profile, server.address, path.name, workers, as_json=as_json)
        # Signals wake this wait; the period only bounds how long one could be missed that hit another thread.
        while not stop.wait(1.0):
            pass
        finished = server.drain()
        for hop in layers.hops:
            terminal.error(f"{hop.layers}: {hop.steps} steps with {hop.tokens} tokens")
        if not finished:
            # The engine still computes and cannot be interrupted: freeing its memory under it would crash.
            terminal.error("error: a step was still running and was given up")
            sys.stderr.flush()
            os._exit(1)


def _announce(
    terminal: Terminal,
    profile: StageProfile,
    address: str,
    file_name: str,
    workers: tuple[str, ...],
    *,
    as_json: bool,
) -> None:
    facts = profile.facts
    if as_json:
        ready: dict[str, object] = {
            "ready": True,
            "address": address,
            "pid": profile.pid,
            "name": profile.name,
            "architecture": profile.architecture,
            "layers": [[found.first, found.last] for found in profile.ranges],
            "layers_in_model": facts.n_layer,
            "n_ctx": facts.n_ctx,
            "n_sequences": facts.n_sequences,
            "n_ubatch": profile.n_ubatch,
            "n_batch": facts.n_batch,
            "threads": profile.n_threads,
            "engine": profile.identity.build,
            "isa": profile.identity.isa,
            "repack": profile.identity.repack,
            "workers": list(workers),
        }
        # One line, not Terminal.json's several: whoever started this process reads a line.
        terminal.console.file.write(json.dumps(ready) + "\n")
        terminal.console.file.flush()
        return
    held = ", ".join(map(str, profile.ranges)) or "no layers yet, a spare for any"
    terminal.print(f"{profile.name}: {file_name} ({profile.architecture}), process {profile.pid}")
    terminal.print(f"holds {held} of {facts.n_layer}, for {facts.n_sequences} sequences of {facts.n_ctx} tokens")
    if workers:
        terminal.print(f"their experts are computed by {', '.join(workers)}")
    terminal.print(f"engine {profile.identity.build}, {profile.n_threads} threads, {profile.identity.isa}")
    terminal.print(f"ready at {address}", style="bold")
    terminal.console.file.flush()
