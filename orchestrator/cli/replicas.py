"""What `serve` opens: one complete backend of a model, or several that answer behind one endpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from orchestrator.cli.app import Terminal
from orchestrator.cli.backbone_options import (
    BackboneOptions,
    deployed_file,
    deployed_options,
    open_model,
    open_stages,
    start_workers,
)
from orchestrator.errors import InputError
from orchestrator.gateway.replicas import Replicas, merged_statistics
from orchestrator.models.catalog import resolve_model
from orchestrator.models.deployment import Deployment, read_deployment
from orchestrator.models.gguf import GgufFile
from orchestrator.transport.base import parse_address

if TYPE_CHECKING:
    from orchestrator.dispatch.exchange import DispatchStatistics
    from orchestrator.gateway.backbone import Backbone
    from orchestrator.gateway.gateway import Gateway
    from orchestrator.gateway.ring_backbone import RingBackbone


@dataclass(frozen=True, slots=True)
class Planned:
    """A backend to open; ``slots`` None takes as many as there is memory for."""

    path: Path
    options: BackboneOptions
    slots: int | None
    deployment: Deployment | None = None

    @property
    def name(self) -> str:
        """Its addresses: gateways in front of the same replicas call them by the same names."""
        stages = () if self.deployment is None else self.deployment.stages
        return ",".join([*(stage.address for stage in stages), *self.options.addresses]) or "this process"

    def open(self, terminal: Terminal, workers: ExitStack) -> Backbone | RingBackbone:
        """Start its local workers for as long as the stack is open, and load the model."""
        if self.deployment is not None and self.deployment.stages:
            return open_stages(terminal, self.path, self.deployment, self.options)
        addresses = start_workers(terminal, workers, self.path, self.options)
        return open_model(terminal, self.path, addresses, self.options, slots=self.slots)


def plan_replicas(
    terminal: Terminal,
    model: str | None,
    files: Sequence[Path],
    stars: Sequence[str],
    options: BackboneOptions,
    slots: int | None,
) -> tuple[str, list[Planned]]:
    """Return the model's name and what to open of it: the deployments, or MODEL over each group of workers.

    Raises:
        click.UsageError: options that contradict each other.
        InputError: the deployments are of different models, or two share a process.
    """
    if (model is None) == (not files):
        raise click.UsageError("name a MODEL, or a --deployment that names it")
    if stars and (files or options.has_workers):
        raise click.UsageError("--replica names all workers of a MODEL: leave --worker, --workers, --deployment out")
    if model is not None:
        path = resolve_model(model)
        groups = [tuple(str(parse_address(part.strip())) for part in star.split(",")) for star in stars]
        several = [replace(options, addresses=group) for group in groups] or [options]
        planned = [Planned(path, chosen, slots) for chosen in several]
    else:
        deployments = [read_deployment(file) for file in files]
        model = deployments[0].model
        planned = [
            Planned(deployed_file(terminal, found), deployed_options(found, options, slots), found.sequences, found)
            for found in deployments
        ]
        _require_one_model(planned, files)
    names = [one.name for one in planned]
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise InputError(f"two replicas are at {double}")
    return model, [_with_threads(one, len(planned)) for one in planned]


def _with_threads(one: Planned, count: int) -> Planned:
    """Give one of several backends its part of the cores, unless somebody said how many threads."""
    if count == 1 or one.options.threads is not None:
        return one
    return replace(one, options=replace(one.options, threads=max(1, (os.cpu_count() or 1) // count)))


def _require_one_model(planned: Sequence[Planned], files: Sequence[Path]) -> None:
    headers = [GgufFile.open(one.path).header_sha256 for one in planned]
    other = next((file for file, header in zip(files, headers, strict=True) if header != headers[0]), None)
    if other is not None:
        raise InputError(f"{other} has another model than {files[0]}", hint="replicas are of one model")


class OpenReplicas:
    """Backends that are open, and ``door``, which takes the requests of all of them."""

    def __init__(self, backbones: Sequence[Backbone | RingBackbone], names: Sequence[str]) -> None:
        self.backbones = tuple(backbones)
        self._names = names
        self._gateways: tuple[Gateway, ...] = ()

    @classmethod
    def open(cls, terminal: Terminal, planned: Sequence[Planned], workers: ExitStack) -> OpenReplicas:
        """Open all of them, or none."""
        with ExitStack() as undo:
            backbones = []
            for one in planned:
                backbones.append(one.open(terminal, workers))
                undo.callback(backbones[-1].close)
            undo.pop_all()
        return cls(backbones, [one.name for one in planned])

    def make_door(self, make: Callable[[Backbone | RingBackbone], Gateway]) -> Gateway | Replicas:
        """Make the gateway of each, and what stands in front of them; not started."""
        self._gateways = tuple(make(backbone) for backbone in self.backbones)
        if len(self._gateways) == 1:
            return self._gateways[0]
        usable = {name: one.is_usable for name, one in zip(self._names, self.backbones, strict=True)}
        return Replicas(dict(zip(self._names, self._gateways, strict=True)), usable)

    @property
    def first(self) -> tuple[Backbone | RingBackbone, Gateway]:
        """The first one: what holds for one of them holds for all."""
        return self.backbones[0], self._gateways[0]

    @property
    def statistics(self) -> Callable[[], DispatchStatistics] | None:
        """What to ask for the workers' counters, None where there are none."""
        found = [one.statistics for one in self.backbones if one.statistics is not None]
        return (
            found[0] if len(found) == 1 else (lambda: merged_statistics([ask() for ask in found])) if found else None
        )

    def close(self) -> None:
        """End all requests, and close everything."""
        for backbone, gateway in zip(self.backbones, self._gateways or [None] * len(self.backbones), strict=True):
            backbone.close(gateway)
