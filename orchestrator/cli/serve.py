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
from orchestrator.cli.backbone_options import (
    BackboneOptions,
    backbone_options,
    deployed_file,
    deployed_options,
    open_model,
    open_stages,
    start_workers,
)
from orchestrator.errors import ChatTemplateError
from orchestrator.gateway.backend import known_invariance
from orchestrator.gateway.embedding import Embedder, pooling_of
from orchestrator.gateway.gateway import MAX_WAITING
from orchestrator.gateway.report import FleetReport
from orchestrator.gateway.scheduler import Limits
from orchestrator.models.catalog import resolve_model
from orchestrator.models.deployment import Deployment, read_deployment
from orchestrator.onboarding.findings import BatchInvariance
from orchestrator.onboarding.records import require
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
    "file",
    type=click.Path(path_type=Path),
    default=None,
    metavar="FILE",
    help="In place of MODEL: serve over the stages and workers of a deployment.",
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
@access_options
@backbone_options
@click.pass_obj
def command(
    terminal: Terminal,
    model: str | None,
    file: Path | None,
    listen: str,
    slots: int | None,
    queue: int,
    prefix_memory: int,
    unverified: bool,
    as_json: bool,
    options: BackboneOptions,
    serving: ServingOptions,
) -> None:
    """Answer OpenAI-style requests with MODEL (a name or a GGUF file), over workers, stages or in this process.

    Serves a page to chat at /, and the API: /v1/chat/completions, /v1/completions, /v1/responses, /v1/models, and
    more; docs/api.md describes it. Ends on Ctrl-C or SIGTERM.
    """
    serving.begin_log()
    address = parse_address(listen)
    if (model is None) == (file is None):
        raise click.UsageError("name a MODEL, or a --deployment that names it")
    deployment = None if file is None else read_deployment(file)
    if deployment is not None:
        model, options = deployment.model, deployed_options(deployment, options, slots)
        slots = deployment.sequences
    path = resolve_model(str(model)) if deployment is None else deployed_file(terminal, deployment)
    verified = None if unverified else require(path, options.contract)
    found = BatchInvariance() if verified is None else verified.invariance
    service = _Service(slots, Limits(queue, max(1, queue // 2), prefix_memory << 20), found, deployment)
    warning = None if address.is_loopback else serving.warn_of(address)
    if warning is not None:
        terminal.error(f"warning: {warning}")
    server = _Server(terminal, path, _names(str(model), path), options, service, serving, as_json=as_json)
    asyncio.run(server.run(address))


@dataclass(frozen=True, slots=True)
class _Service:
    """How many requests are answered at once and may wait, and how their tokens may be grouped."""

    slots: int | None
    limits: Limits
    invariance: BatchInvariance
    deployment: Deployment | None = None


class _Server:
    """One run of the server, from binding the address to the last goodbye."""

    def __init__(
        self,
        terminal: Terminal,
        path: Path,
        names: ModelNames,
        options: BackboneOptions,
        service: _Service,
        serving: ServingOptions,
        *,
        as_json: bool,
    ) -> None:
        self._terminal = terminal
        self._path = path
        self._options = options
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
                backbone = await self._load(workers)
                found = self._service.invariance
                invariance = known_invariance(backbone.model.architecture, one=found.one, several=found.several)
                observer = StepObserver(self._endpoint.metrics)
                gateway = backbone.gateway(invariance=invariance, limits=self._service.limits, observer=observer)
                try:
                    await asyncio.to_thread(self._open, backbone, gateway, bound)
                    await self._stop.wait()
                finally:
                    self._endpoint.served = None
                    self._endpoint.problem = "the server is shutting down"
                    await asyncio.to_thread(backbone.close, gateway)

    async def _load(self, workers: ExitStack) -> Backbone | RingBackbone:
        """Start the workers and load the model; a signal ends the process at once."""
        loading = asyncio.ensure_future(asyncio.to_thread(self._start_and_open, workers))
        stopping = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            # The engine cannot be interrupted while it reads weights, and nothing needs saving yet.
            workers.close()
            sys.stdout.flush()
            os._exit(0)
        stopping.cancel()
        return loading.result()

    def _start_and_open(self, workers: ExitStack) -> Backbone | RingBackbone:
        deployment = self._service.deployment
        if deployment is not None and deployment.stages:
            return open_stages(self._terminal, self._path, deployment, self._options)
        addresses = start_workers(self._terminal, workers, self._path, self._options)
        return open_model(self._terminal, self._path, addresses, self._options, slots=self._service.slots)

    def _open(self, backbone: Backbone | RingBackbone, gateway: Gateway, bound: HostPort) -> None:
        """Begin to answer, and say so."""
        template = self._options.template(backbone.model)
        if isinstance(template, ChatTemplateError):
            self._terminal.error(f"warning: {template}")
            self._terminal.error(f"hint: {template.hint}")
        measurements = backbone.measure()
        gateway.start()
        report = FleetReport(
            model=self._endpoint.names.name,
            contract=backbone.contract.value,
            engine=backbone.identity.build,
            state=gateway.state,
            statistics=backbone.statistics,
            now=time.monotonic,
            wall=time.time,
        )
        self._endpoint.served = ServedModel.of(
            gateway,
            backbone.model,
            template,
            report,
            backbone.identity.build,
            self._serving.slot_folder,
            _embedder(backbone, gateway),
        )
        self._say_ready(report, measurements, bound, gateway.n_ctx)

    def _say_ready(
        self, report: FleetReport, measurements: Sequence[Measurement], bound: HostPort, n_ctx: int
    ) -> None:
        url = f"http{'' if self._serving.tls is None else 's'}://{bound}"
        snapshot = report.snapshot()
        if self._as_json:
            ready = {"url": url, "pid": os.getpid(), **snapshot.to_json()}
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
            deployment = self._service.deployment
            title = "stages" if deployment is not None and deployment.stages else "workers"
            self._terminal.table(title, COLUMNS, rows)
        else:
            self._terminal.print("no workers: this process computes the experts itself")
        name = self._endpoint.names.name
        question = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello"}]})
        self._terminal.print(f"serving {name} at {url}/v1 (contract {snapshot.contract})")
        self._terminal.print(f"slots: {len(snapshot.slots)}, each of {n_ctx} tokens; a page to chat: {url}/")
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
