"""`linkcpp serve`: answer OpenAI-style requests with a model over workers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from orchestrator.api.endpoint import Endpoint, ServedModel, StepObserver
from orchestrator.api.listen import listening
from orchestrator.api.schema import ModelNames
from orchestrator.cli.access_options import ServingOptions, access_options
from orchestrator.cli.app import Terminal
from orchestrator.cli.backbone_options import BackboneOptions, backbone_options
from orchestrator.cli.replicas import OpenReplicas, Planned, plan_replicas
from orchestrator.cli.service import end_with_stdin
from orchestrator.errors import ChatTemplateError, LinkcppError
from orchestrator.gateway.backend import known_invariance
from orchestrator.gateway.embedding import Embedder, pooling_of
from orchestrator.gateway.gateway import MAX_WAITING
from orchestrator.gateway.replicas import Replicas
from orchestrator.gateway.report import FleetReport
from orchestrator.gateway.scheduler import Limits
from orchestrator.onboarding.findings import BatchInvariance
from orchestrator.onboarding.records import known_name, remember_served, require, require_boundary
from orchestrator.transport.base import HostPort, parse_address
from orchestrator.types import format_ranges

if TYPE_CHECKING:
    from orchestrator.dispatch.exchange import Measurement
    from orchestrator.gateway.backbone import Backbone
    from orchestrator.gateway.gateway import Gateway
    from orchestrator.gateway.ring_backbone import RingBackbone

COLUMNS: Final = ("worker", "address", "pid", "layers", "experts", "ms per expert", "round trip")


@click.command("serve")
@click.argument("model", required=False)
@click.option(
    "--deployment",
    "files",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FILE",
    help="In place of MODEL: serve over the stages and workers of a deployment. Several are replicas.",
)
@click.option(
    "--replica",
    "stars",
    multiple=True,
    metavar="HOST:PORT,...",
    help="Running workers that have all experts together; several are replicas, each with conversations of its own.",
)
@click.option("--listen", default="127.0.0.1:8080", metavar="HOST:PORT", help="Where to answer; port 0 takes any.")
@click.option("--slots", type=click.IntRange(1, 63), default=None, help="Requests answered at once. [default: 4]")
@click.option("--queue", type=click.IntRange(0), default=MAX_WAITING, show_default=True, help="Requests that wait.")
@click.option(
    "--prefix-memory",
    type=click.IntRange(0),
    default=512,
    show_default=True,
    metavar="MIB",
    help="Keep so much of what slots held before.",
)
@click.option("--unverified", is_flag=True, help="Serve a model that has not passed the gate.")
@click.option("--json", "as_json", is_flag=True, help="When ready, print one line of JSON instead of a table.")
@click.option("--until-stdin-ends", is_flag=True, hidden=True)
@access_options
@backbone_options
@click.pass_obj
def command(
    terminal: Terminal,
    model: str | None,
    files: tuple[Path, ...],
    stars: tuple[str, ...],
    listen: str,
    slots: int | None,
    queue: int,
    prefix_memory: int,
    unverified: bool,
    as_json: bool,
    until_stdin_ends: bool,
    options: BackboneOptions,
    serving: ServingOptions,
) -> None:
    """Answer OpenAI-style requests with MODEL (a name or a GGUF file), over workers, stages or in this process.

    Serves a page to chat at /, and the API: /v1/chat/completions, /v1/completions, /v1/responses, /v1/models, and
    more; docs/api.md describes it. Ends on Ctrl-C or SIGTERM.
    """
    if until_stdin_ends:
        end_with_stdin()
    serving.begin_log()
    address = parse_address(listen)
    name, planned = plan_replicas(terminal, model, files, stars, options, slots)
    found = BatchInvariance()
    if not unverified:
        # The gate's verdict is about a file and a contract, and they are the same for all.
        found = require(planned[0].path, planned[0].options.contract).invariance
        for one in planned:
            if one.deployment is not None:
                require_boundary(one.path, one.deployment.boundary, one.deployment.n_ranges)
    service = _Service(planned, Limits(queue, max(1, queue // 2), prefix_memory << 20), found, not unverified)
    warning = None if address.is_loopback else serving.warn_of(address)
    if warning is not None:
        terminal.error(f"warning: {warning}")
    server = _Server(terminal, _names(name, planned[0].path), service, serving, as_json=as_json)
    asyncio.run(server.run(address))


@dataclass(frozen=True, slots=True)
class _Service:
    """What is opened, how many requests may wait, how tokens may be grouped, and whether the gate says so."""

    replicas: Sequence[Planned]
    limits: Limits
    invariance: BatchInvariance
    verified: bool


class _Server:
    """One run of the server, from binding the address to the last goodbye."""

    def __init__(
        self,
        terminal: Terminal,
        names: ModelNames,
        service: _Service,
        serving: ServingOptions,
        *,
        as_json: bool,
    ) -> None:
        self._terminal = terminal
        self._service = service
        self._serving = serving
        self._as_json = as_json
        self._endpoint = Endpoint(names, serving.access, request_timeout=serving.request_timeout)
        self._stop = asyncio.Event()

    async def run(self, address: HostPort) -> None:
        """Bind, load, answer until a signal comes, and end in order."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        # Bound before the model is loaded: a port in use is known at once, and clients are told to wait.
        async with listening(self._endpoint, address, self._serving.tls) as bound:
            with ExitStack() as workers:
                opened = await self._load(workers)
                gateway = opened.make_door(self._gateway)
                try:
                    await asyncio.to_thread(self._open, opened, gateway, bound)
                    await self._stop.wait()
                finally:
                    self._endpoint.served = None
                    self._endpoint.problem = "the server is shutting down"
                    finished = gateway.state().finished
                    await asyncio.to_thread(opened.close)
                if finished and self._service.verified:
                    await asyncio.to_thread(self._remember, opened.first[0])

    def _gateway(self, backbone: Backbone | RingBackbone) -> Gateway:
        found = self._service.invariance
        invariance = known_invariance(backbone.model.architecture, one=found.one, several=found.several)
        observer = StepObserver(self._endpoint.metrics)
        return backbone.gateway(
            invariance=invariance,
            limits=self._service.limits,
            observer=observer,
            speculate=self._service.replicas[0].options.speculation,
        )

    async def _load(self, workers: ExitStack) -> OpenReplicas:
        """Start the workers and load the model; a signal ends the process at once."""
        load = asyncio.to_thread(OpenReplicas.open, self._terminal, self._service.replicas, workers)
        loading = asyncio.ensure_future(load)
        stopping = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            # The engine cannot be interrupted while it reads weights, and nothing needs saving yet.
            workers.close()
            sys.stdout.flush()
            os._exit(0)
        stopping.cancel()
        return loading.result()

    def _open(self, opened: OpenReplicas, gateway: Gateway | Replicas, bound: HostPort) -> None:
        """Begin to answer, and say so."""
        backbone, first = opened.first
        template = self._service.replicas[0].options.template(backbone.model)
        if isinstance(template, ChatTemplateError):
            self._terminal.error(f"warning: {template}")
            self._terminal.error(f"hint: {template.hint}")
        measurements = [figures for one in opened.backbones for figures in one.measure()]
        gateway.start()
        speculation = self._service.replicas[0].options.speculation.describe(
            first.speculation, first.facts, exact=backbone.batch_invariant
        )
        report = FleetReport(
            model=self._endpoint.names.name,
            contract=backbone.contract.value,
            engine=backbone.identity.build,
            state=gateway.state,
            statistics=opened.statistics,
            now=time.monotonic,
            wall=time.time,
            copes=gateway.is_usable if isinstance(gateway, Replicas) else None,
            speculation=speculation,
        )
        self._endpoint.served = ServedModel.of(
            gateway,
            backbone.model,
            template,
            report,
            backbone.identity.build,
            self._serving.slot_folder,
            _embedder(backbone, first),
        )
        self._say_ready(report, measurements, bound, gateway.n_ctx)

    def _remember(self, backbone: Backbone | RingBackbone) -> None:
        """Note for `linkcpp models` that this model was served, if it is one of the catalogue."""
        try:
            name = known_name(self._service.replicas[0].path)
            if name is not None:
                remember_served(name, backbone.identity.build, backbone.contract)
        except LinkcppError as error:
            self._terminal.error(f"warning: {error}")

    def _say_ready(
        self, report: FleetReport, measurements: Sequence[Measurement], bound: HostPort, n_ctx: int
    ) -> None:
        url = f"http{'' if self._serving.tls is None else 's'}://{bound}"
        snapshot = report.snapshot()
        if self._as_json:
            ready = {"url": url, "address": str(bound), "pid": os.getpid(), **snapshot.to_json()}
            self._terminal.print(json.dumps(ready))
            return
        if snapshot.workers:
            measured = {measurement.address: measurement for measurement in measurements}
            rows = []
            for worker in snapshot.workers:
                figures = measured.get(worker.address)
                rows.append(
                    (
                        worker.name,
                        worker.address,
                        str(worker.pid or ""),
                        format_ranges(worker.layers),
                        format_ranges(worker.experts),
                        "" if figures is None else f"{figures.ms_at_1:.3f}",
                        "" if figures is None else f"{figures.round_trip_ms:.2f} ms",
                    )
                )
            deployments = [one.deployment for one in self._service.replicas]
            title = "stages" if any(found is not None and found.stages for found in deployments) else "workers"
            self._terminal.table(title, COLUMNS, rows)
        else:
            self._terminal.print("no workers: this process computes the experts itself")
        name = self._endpoint.names.name
        question = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello"}]})
        self._terminal.print(f"serving {name} at {url}/v1 (contract {snapshot.contract})")
        self._terminal.print(f"slots: {len(snapshot.slots)}, each of {n_ctx} tokens; a page to chat: {url}/")
        if snapshot.speculation is not None:
            self._terminal.print(f"speculation: {snapshot.speculation.words}")
        self._terminal.print(f"try: curl {url}/v1/chat/completions -d '{question}'")


def _embedder(backbone: Backbone | RingBackbone, gateway: Gateway) -> Embedder | None:
    """Return what embeds texts, for a model that does nothing else; None for all others."""
    from orchestrator.gateway.backbone import Backbone

    model = backbone.model
    if not model.embeds or not isinstance(backbone, Backbone):
        return None
    return Embedder(backbone.context, pooling_of(model.metadata, model.architecture), gateway.between_steps)


def _names(model: str, path: Path) -> ModelNames:
    """Name the served model: as the user wrote it if that is a name, else by its file; both are understood."""
    is_path = os.sep in model or model.endswith(".gguf")
    return ModelNames(Path(model).stem if is_path else model, model, path.name, path.stem)
