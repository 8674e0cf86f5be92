"""`linkcpp worker`: hold experts of a model and compute them for backbones."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import click

from orchestrator.cli.app import Terminal
from orchestrator.cli.service import end_with_stdin, listen_on_loopback, stop_on_signals
from orchestrator.engine.experts import ExpertStore
from orchestrator.models.catalog import locate, resolve_model
from orchestrator.models.gguf import GgufFile
from orchestrator.models.slices import Selection
from orchestrator.transport.base import parse_address
from orchestrator.transport.tcp import TcpListener
from orchestrator.workers.expert import ExpertCompute, ExpertService, WorkerProfile
from orchestrator.workers.inject import InjectedCompute, Injection
from orchestrator.workers.machine import require_memory
from orchestrator.workers.ownership import choose_ownership, describe_ownership, owned_bytes
from orchestrator.workers.server import ServerLimits, WorkerServer


@click.command("worker")
@click.argument("model")
@click.option("--experts", default=None, metavar="LIST", help="Experts to hold, like 0-7,12. [default: all]")
@click.option("--layers", default=None, metavar="LIST", help="Layers to hold them of, like 0-29. [default: all]")
@click.option(
    "--own", multiple=True, metavar="LAYERS:EXPERTS", help="Instead of both, for uneven shares; may be repeated."
)
@click.option(
    "--listen",
    default=None,
    metavar="HOST:PORT",
    help="Where backbones connect to; port 0 takes any free one. [default: any free port of this machine only]",
)
@click.option("--threads", type=click.IntRange(1, 1024), default=None, help="Threads that compute. [default: all]")
@click.option("--mmap", is_flag=True, help="Leave the weights in the file and let the system page them in.")
@click.option(
    "--repack", is_flag=True, help="Repack the weights: faster prefill, and only for backbones that do too."
)
@click.option("--name", default=None, help="What backbones call this worker. [default: the machine's name]")
@click.option("--connections", type=click.IntRange(1, 4096), default=64, help="Most backbones at once.")
@click.option("--queue", "queue_limit", type=click.IntRange(0, 4096), default=16, help="Most requests that wait.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line when ready.")
@click.option("--inject", type=click.Choice([kind.value for kind in Injection]), default=None, hidden=True)
@click.option("--until-stdin-ends", is_flag=True, hidden=True)
@click.pass_context
def command(
    ctx: click.Context,
    model: str,
    experts: str | None,
    layers: str | None,
    own: tuple[str, ...],
    listen: str | None,
    threads: int | None,
    mmap: bool,
    repack: bool,
    name: str | None,
    connections: int,
    queue_limit: int,
    as_json: bool,
    inject: str | None,
    until_stdin_ends: bool,
) -> None:
    """Hold experts of MODEL (a name, a GGUF file or an address) and compute them until SIGTERM or Ctrl-C.

    Only the bytes of these experts are read, or downloaded from https:// and hf:// addresses: once, they stay in the
    data folder. A slice of a model is enough. A worker keeps nothing between two requests.
    """
    terminal: Terminal = ctx.obj
    if until_stdin_ends:
        end_with_stdin()
    path = _local_file(terminal, model, layers, experts, own)
    file = GgufFile.open(path)
    file.require_moe()
    ownership = choose_ownership(file, layers, experts, own)
    if not mmap:
        require_memory(
            owned_bytes(file, ownership),
            f"what this worker is to hold of {path.name}",
            hint="own fewer experts, or leave them in the file: --mmap",
        )
    n_threads = threads or len(os.sched_getaffinity(0))
    # Before the experts are read, so that a taken port is known at once.
    listener = listen_on_loopback() if listen is None else TcpListener(parse_address(listen))
    host_port = listener.host_port
    if not host_port.is_loopback:
        terminal.error(
            f"warning: {host_port} is neither encrypted nor authenticated: whoever reaches it can use this worker"
        )
    with (
        terminal.progress(f"loading {path.name}") as progress,
        ExpertStore(path, ownership, n_threads=n_threads, repack=repack, mmap=mmap, progress=progress) as store,
    ):
        compute: ExpertCompute = store if inject is None else InjectedCompute(store, Injection(inject))
        profile = WorkerProfile(
            name=name or socket.gethostname(), pid=os.getpid(), model_sha256=file.header_sha256, n_threads=n_threads
        )
        service = ExpertService(compute, profile, queue_limit=queue_limit)
        server = WorkerServer(service, listener, limits=ServerLimits(connections=connections), log=terminal.error)
        stop = stop_on_signals()
        server.start()
        _announce(terminal, file, service, server.address, inject, mapped=mmap, as_json=as_json)
        # Signals wake this wait; the period only bounds how long one could be missed that hit another thread.
        while not stop.wait(1.0):
            pass
        finished = server.drain()
        terminal.error(f"served {service.requests} requests with {service.rows} rows")
        if not finished:
            # The engine still computes and cannot be interrupted: freeing its memory under it would crash.
            terminal.error("error: a request was still running and was given up")
            sys.stderr.flush()
            os._exit(1)


def _local_file(
    terminal: Terminal, model: str, layers: str | None, experts: str | None, own: tuple[str, ...]
) -> Path:
    """Return the model's file; of a model on a server a file with this worker's share, downloaded where needed."""
    location = locate(model)
    if isinstance(location, Path):
        return resolve_model(location)
    from orchestrator.models.fetch import fetch_share  # loads the HTTP client, which a local file does not need

    def choose(file: GgufFile) -> Selection:
        file.require_moe()
        return Selection(shares=choose_ownership(file, layers, experts, own).experts)

    with terminal.progress("fetching experts") as progress:
        return fetch_share(location, choose, name=f"{layers} {experts} {own}", progress=progress, warn=terminal.error)


def _announce(
    terminal: Terminal,
    file: GgufFile,
    service: ExpertService,
    address: str,
    inject: str | None,
    *,
    mapped: bool,
    as_json: bool,
) -> None:
    compute, profile = service.compute, service.profile
    owned = describe_ownership(compute.ownership)
    total = len(file.moe_layers) * file.n_expert
    if as_json:
        ready: dict[str, object] = {
            "ready": True,
            "address": address,
            "pid": profile.pid,
            "name": profile.name,
            "architecture": compute.architecture,
            "owned": [{"layers": layers, "experts": experts} for layers, experts in owned],
            "pairs": compute.ownership.count,
            "pairs_in_model": total,
            "bytes_read": compute.bytes_read,
            "bytes_in_file": file.n_bytes,
            "mapped": mapped,
            "threads": profile.n_threads,
            "engine": compute.identity.build,
            "isa": compute.identity.isa,
            "repack": compute.identity.repack,
            "inject": inject,
        }
        # One line, not Terminal.json's several: whoever started this process reads a line.
        terminal.console.file.write(json.dumps(ready) + "\n")
        terminal.console.file.flush()
        return
    terminal.print(f"{profile.name}: {file.path.name} ({compute.architecture}), process {profile.pid}")
    for layers, experts in owned:
        terminal.print(f"owns experts {experts} of layers {layers}")
    read, size = compute.bytes_read / 1e6, file.n_bytes / 1e6
    taken = f"mapped from a file of {size:.1f} MB" if mapped else f"read {read:.1f} MB of {size:.1f} MB in the file"
    terminal.print(f"holds {compute.ownership.count} of {total} experts; {taken}")
    terminal.print(f"engine {compute.identity.build}, {profile.n_threads} threads, {compute.identity.isa}")
    if inject is not None:
        terminal.print(f"WRONG ON PURPOSE: {inject}", style="bold red")
    terminal.print(f"ready at {address}; on the first machine: linkcpp serve MODEL --worker {address}", style="bold")
    terminal.console.file.flush()
