"""A deployment: which process holds what of a model, and where it is. Read from and written to one TOML file.

::

    model = "step-3.7-flash.gguf"     # a catalogue name, or a path (relative: to this file)
    context = 4096                    # tokens of one sequence
    sequences = 8                     # sequences at once
    boundary = "f16"                  # what stages hand on (default: f32, exact)

    [gateway]                         # optional: layers that the gateway's own process holds
    layers = "0:2,43:45"
    node = "box1"

    [[stage]]
    name = "stage-1"
    layers = "2:24"                   # the layers 2 to 23; a process may hold several ranges
    address = "192.168.0.11:7101"
    node = "box1"
    threads = 8                       # default: all cores

    [[spare]]                         # takes the place of a stage with the same layers
    layers = "2:24"                   # default: none, it loads those of a stage that is lost
    memory = "64GB"                   # what it, or a stage, may fill with layers of others (default: what is free)
    address = "192.168.0.13:7101"

    [[worker]]                        # experts, for the stage named, or for the gateway where none is
    experts = "0-127"
    layers = "2-23"                   # default: all
    address = "192.168.0.12:7201"
    stage = "stage-1"
"""

from __future__ import annotations

import difflib
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import tomlkit

from orchestrator.config import load_toml, parse_size
from orchestrator.errors import ConfigError
from orchestrator.types import Boundary, parse_ranges

Range = tuple[int, int]
"""The layers ``first`` to ``last`` - 1."""

DEFAULT_CONTEXT: Final = 4096

_RANGE: Final = re.compile(r"\s*(\d{1,5}):(\d{1,5})\s*")
_TOP: Final = ("model", "context", "sequences", "boundary", "gateway", "stage", "spare", "worker")
_KEYS: Final = {
    "gateway": ("layers", "node", "threads"),
    "stage": ("name", "layers", "address", "node", "threads", "memory"),
    "spare": ("name", "layers", "address", "node", "threads", "memory"),
    "worker": ("name", "experts", "layers", "address", "node", "threads", "stage"),
}


@dataclass(frozen=True, slots=True)
class GatewayEntry:
    """What the gateway's own process holds: ranges of layers, if any."""

    layers: tuple[Range, ...] = ()
    node: str = ""
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class StageEntry:
    """A stage process, or a spare one: its ranges of layers and where it listens.

    A spare without layers loads what is lost. ``memory`` is a size, and bounds what either takes over.
    """

    name: str
    layers: tuple[Range, ...]
    address: str
    node: str = ""
    threads: int | None = None
    memory: str | None = None


@dataclass(frozen=True, slots=True)
class WorkerEntry:
    """An expert worker: ``experts`` and ``layers`` as lists of ranges like 0-63 (None: all)."""

    name: str
    experts: str | None
    layers: str | None
    address: str
    node: str = ""
    threads: int | None = None
    stage: str = ""  # for whom; empty: for the gateway


@dataclass(frozen=True, slots=True)
class Deployment:
    """All processes of one model."""

    model: str
    context: int = DEFAULT_CONTEXT
    sequences: int = 1
    gateway: GatewayEntry = GatewayEntry()
    stages: tuple[StageEntry, ...] = ()
    spares: tuple[StageEntry, ...] = ()
    workers: tuple[WorkerEntry, ...] = ()
    boundary: Boundary = Boundary.F32

    @property
    def n_ranges(self) -> int:
        """How many ranges of layers the model is cut into; none where there are no stages."""
        outer = sum(len(stage.layers) for stage in self.stages)
        return outer + len(self.gateway.layers) if outer else 0

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the machines, in order of appearance."""
        found = [self.gateway.node, *(entry.node for entry in (*self.stages, *self.spares))]
        found += [worker.node for worker in self.workers]
        return tuple(dict.fromkeys(node for node in found if node))

    def workers_of(self, stage: str) -> tuple[WorkerEntry, ...]:
        """The expert workers of a stage; of the gateway for the empty name."""
        return tuple(worker for worker in self.workers if worker.stage == stage)


def read_deployment(path: Path) -> Deployment:
    """Read a file and check all that can be checked without the model; raise :class:`ConfigError` in words."""
    place = _Place(path)
    document = load_toml(path)
    place.known(document, _TOP, "the file")
    gateway = document.get("gateway", {})
    if not isinstance(gateway, Mapping):
        raise place.wrong("[gateway] is not a table")
    place.known(gateway, _KEYS["gateway"], "[gateway]")
    model = place.text(document, "model", "the file")
    deployment = Deployment(
        model=str(path.parent / model) if _is_path(model) and not Path(model).is_absolute() else model,
        context=place.number(document, "context", "the file") or DEFAULT_CONTEXT,
        sequences=place.number(document, "sequences", "the file") or 1,
        gateway=GatewayEntry(
            place.ranges(gateway, "[gateway]") if "layers" in gateway else (),
            place.text(gateway, "node", "[gateway]", default=""),
            place.number(gateway, "threads", "[gateway]"),
        ),
        stages=tuple(_stages(place, document, "stage")),
        spares=tuple(_stages(place, document, "spare")),
        workers=tuple(_workers(place, document)),
        boundary=place.boundary(document),
    )
    _check(place, deployment)
    return deployment


def write_deployment(path: Path, deployment: Deployment, comments: Sequence[str] = ()) -> None:
    """Write a file that :func:`read_deployment` reads, in one step; ``comments`` come first, a line each."""
    document = tomlkit.document()
    for line in comments:
        document.add(tomlkit.comment(line))
    if comments:
        document.add(tomlkit.nl())
    document["model"] = deployment.model
    document["context"] = deployment.context
    document["sequences"] = deployment.sequences
    if deployment.boundary is not Boundary.F32:
        document["boundary"] = deployment.boundary.value
    gateway = deployment.gateway
    if gateway != GatewayEntry():
        document["gateway"] = _table({"layers": format_layers(gateway.layers)}, gateway.node, gateway.threads)
    for key, entries in (("stage", deployment.stages), ("spare", deployment.spares)):
        tables = tomlkit.aot()
        for entry in entries:
            tables.append(
                _table(
                    {
                        "name": entry.name,
                        "layers": format_layers(entry.layers),
                        "memory": entry.memory,
                        "address": entry.address,
                    },
                    entry.node,
                    entry.threads,
                )
            )
        if entries:
            document[key] = tables
    if deployment.workers:
        workers = tomlkit.aot()
        for worker in deployment.workers:
            own = {
                "name": worker.name,
                "experts": worker.experts,
                "layers": worker.layers,
                "address": worker.address,
                "stage": worker.stage,
            }
            workers.append(_table(own, worker.node, worker.threads))
        document["worker"] = workers
    _write(path, tomlkit.dumps(document))


def format_layers(ranges: Sequence[Range]) -> str:
    """Write ranges of layers as ``0:2,43:45``."""
    return ",".join(f"{first}:{last}" for first, last in ranges)


def is_loopback(address: str) -> bool:
    """Tell whether an address is of this machine only."""
    host = address.rpartition(":")[0].strip("[]")
    return host in {"localhost", "::1"} or host.startswith("127.")


class _Place:
    """Where in which file something stands, for errors that can be mended."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def wrong(self, problem: str, hint: str | None = None) -> ConfigError:
        return ConfigError(f"{self._path}: {problem}", hint=hint)

    def known(self, table: Mapping[str, object], keys: Sequence[str], where: str) -> None:
        for key in table:
            if key not in keys:
                near = difflib.get_close_matches(key, keys, 1)
                raise self.wrong(
                    f"{where} has an unknown key {key!r}",
                    hint=f"did you mean {near[0]!r}?" if near else f"known are {', '.join(keys)}",
                )

    def text(self, table: Mapping[str, object], key: str, where: str, default: str | None = None) -> str:
        value = table.get(key, default)
        if not isinstance(value, str) or not (value or default == ""):
            raise self.wrong(f"{where} {'needs' if value is None else 'has no text as'} {key!r}")
        return str(value)

    def number(self, table: Mapping[str, object], key: str, where: str) -> int | None:
        value = table.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(f"{where}: {key} must be a whole number from 1 on")
        return int(value)

    def size(self, table: Mapping[str, object], key: str, where: str) -> str | None:
        text = self.text(table, key, where, default="")
        if not text:
            return None
        try:
            parse_size(text, what=key)
        except ConfigError as error:
            raise self.wrong(f"{where}: {error}", hint=error.hint) from error
        return text

    def boundary(self, document: Mapping[str, object]) -> Boundary:
        name = self.text(document, "boundary", "the file", default=Boundary.F32.value)
        try:
            return Boundary(name)
        except ValueError:
            known = ", ".join(boundary.value for boundary in Boundary)
            raise self.wrong(f"unknown boundary {name!r}", hint=f"known are {known}") from None

    def ranges(self, table: Mapping[str, object], where: str) -> tuple[Range, ...]:
        found: list[Range] = []
        for part in self.text(table, "layers", where).split(","):
            match = _RANGE.fullmatch(part)
            if match is None or int(match[1]) >= int(match[2]):
                raise self.wrong(
                    f"{where}: {part.strip()!r} is no range of layers",
                    hint="write it like 12:24 for the layers 12 to 23",
                )
            found.append((int(match[1]), int(match[2])))
        return tuple(found)

    def address(self, table: Mapping[str, object], where: str) -> str:
        value = self.text(table, "address", where)
        host, _, port = value.rpartition(":")
        if not host or not port.isascii() or not port.isdecimal() or int(port) > 65535:
            raise self.wrong(f"{where}: the address {value!r} is not HOST:PORT")
        return value

    def tables(self, document: Mapping[str, object], key: str) -> list[tuple[str, Mapping[str, object]]]:
        value = document.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
            raise self.wrong(f"write each {key} as a table of its own: [[{key}]]")
        found = []
        for index, item in enumerate(value, 1):
            where = f"[[{key}]] number {index}"
            self.known(item, _KEYS[key], where)
            found.append((where, item))
        return found


def _stages(place: _Place, document: Mapping[str, object], key: str) -> list[StageEntry]:
    return [
        StageEntry(
            place.text(table, "name", where, default=f"{key}-{index}"),
            () if key == "spare" and "layers" not in table else place.ranges(table, where),
            place.address(table, where),
            place.text(table, "node", where, default=""),
            place.number(table, "threads", where),
            place.size(table, "memory", where),
        )
        for index, (where, table) in enumerate(place.tables(document, key), 1)
    ]


def _workers(place: _Place, document: Mapping[str, object]) -> list[WorkerEntry]:
    found = []
    for index, (where, table) in enumerate(place.tables(document, "worker"), 1):
        lists = {key: place.text(table, key, where, default="") or None for key in ("experts", "layers")}
        for key, text in lists.items():
            if text is not None:
                parse_ranges(text, what=f"{key} of {where}")
        found.append(
            WorkerEntry(
                place.text(table, "name", where, default=f"worker-{index}"),
                lists["experts"],
                lists["layers"],
                place.address(table, where),
                place.text(table, "node", where, default=""),
                place.number(table, "threads", where),
                place.text(table, "stage", where, default=""),
            )
        )
    return found


def _check(place: _Place, deployment: Deployment) -> None:
    stages = deployment.stages
    if not stages and not deployment.workers:
        raise place.wrong("it names no process", hint="`linkcpp plan MODEL --node NAME=HOST` writes one that does")
    listening = [(entry.name, entry.address) for entry in (*stages, *deployment.spares)]
    listening += [(worker.name, worker.address) for worker in deployment.workers]
    names, addresses = [name for name, _ in listening], [address for _, address in listening]
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise place.wrong(f"two processes are called {double!r}")
    taken = next((a for a in addresses if addresses.count(a) > 1 and not a.endswith(":0")), None)
    if taken is not None:
        raise place.wrong(f"two processes listen on {taken}")
    known = {stage.name for stage in stages}
    lost = next((worker for worker in deployment.workers if worker.stage and worker.stage not in known), None)
    if lost is not None:
        raise place.wrong(f"{lost.name} works for {lost.stage!r}, and no stage is called so")
    if not stages:
        if deployment.boundary is not Boundary.F32:
            raise place.wrong("boundary is for what stages hand on, and there is no [[stage]]")
        if deployment.gateway.layers:
            raise place.wrong("without stages the gateway holds all layers", hint="leave out [gateway] layers")
        return
    held = sorted((span, entry.name) for entry in stages for span in entry.layers)
    held += [(span, "the gateway") for span in deployment.gateway.layers]
    reached, before = 0, ""
    for (first, last), name in sorted(held):
        if first < reached:
            raise place.wrong(f"layer {first} is held by {before} and by {name}")
        if first > reached:
            raise place.wrong(f"nobody holds the layers {reached}:{first}")
        reached, before = last, name
    ranges = {(), *(entry.layers for entry in stages)}
    idle = next((spare for spare in deployment.spares if spare.layers not in ranges), None)
    if idle is not None:
        raise place.wrong(
            f"{idle.name} could take no stage's place: none holds exactly the layers {format_layers(idle.layers)}"
        )


def _is_path(model: str) -> bool:
    return "://" not in model and (os.sep in model or model.endswith(".gguf"))


def _table(own: Mapping[str, str | None], node: str, threads: int | None) -> tomlkit.items.Table:
    table = tomlkit.table()
    for key, value in own.items():
        if value:
            table[key] = value
    if node:
        table["node"] = node
    if threads is not None:
        table["threads"] = threads
    return table


def _write(path: Path, text: str) -> None:
    """Write beside the file and move it there, so that a reader never sees half of it."""
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=path.name, dir=path.parent)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
