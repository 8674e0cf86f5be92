"""`linkcpp model`: get, list, inspect and make models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from orchestrator.cli.app import Terminal
from orchestrator.cli.models import command as list_models
from orchestrator.errors import InputError
from orchestrator.models.catalog import locate, resolve_model
from orchestrator.models.checksums import Checksums
from orchestrator.models.gguf import GgufFile
from orchestrator.models.hyperparameters import Dimensions
from orchestrator.models.inspection import Inspection, size_text
from orchestrator.models.slices import Selection, write_slice
from orchestrator.models.sources import get_model
from orchestrator.models.upcycle import upcycle as write_upcycled
from orchestrator.types import parse_ranges

_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON value.")
_OUTPUT = click.option(
    "-o", "--output", "output", required=True, type=click.Path(path_type=Path), metavar="FILE", help="File to write."
)


@click.group(name="model")
def command() -> None:
    """Get, make and inspect models."""


@command.command(short_help="Fetch or make a model of the catalogue.")
@click.argument("name")
@_JSON
@click.pass_obj
def get(terminal: Terminal, name: str, as_json: bool) -> None:
    """Fetch or make the model NAME of the catalogue; nothing is done where it is there already."""
    with terminal.progress(f"getting {name}") as progress:
        path = get_model(name, progress=progress)
    if as_json:
        terminal.json({"name": name, "path": str(path), "bytes": path.stat().st_size})
        return
    terminal.print(f"{name} is there ({size_text(path.stat().st_size)}): {path}")


command.add_command(list_models, "list")


@command.command(short_help="Say what a GGUF holds.")
@click.argument("model")
@click.option("--tensors", "with_tensors", is_flag=True, help="List every tensor too.")
@_JSON
@click.pass_obj
def inspect(terminal: Terminal, model: str, with_tensors: bool, as_json: bool) -> None:
    """Say what MODEL (a GGUF file or a name of the catalogue) holds, without reading its weights."""
    file = GgufFile.open(resolve_model(model))
    inspection = Inspection.of(file)
    listing = [
        (shape.name, shape.type.name, list(shape.shape), shape.name in file.tensors)
        for shape in file.manifest.values()
    ]
    if as_json:
        facts = inspection.to_json()
        if with_tensors:
            facts["tensor_list"] = [
                {"name": name, "type": kind, "shape": shape, "present": present}
                for name, kind, shape, present in listing
            ]
        terminal.json(facts)
        return
    terminal.table(str(file.path), ("property", "value"), inspection.rows())
    if with_tensors:
        rows = [
            (name, kind, " x ".join(map(str, shape)), "yes" if present else "no")
            for name, kind, shape, present in listing
        ]
        terminal.table("tensors", ("name", "type", "shape", "in the file"), rows)


@command.command(short_help="Turn a dense model into experts without training.")
@click.argument("dense")
@_OUTPUT
@click.option("--shards", type=click.IntRange(1), default=8, show_default=True, help="Experts used per token.")
@click.option("--copies", type=click.IntRange(1), default=2, show_default=True, help="Copies of each shard.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the router.")
@click.pass_obj
def upcycle(terminal: Terminal, dense: str, output: Path, shards: int, copies: int, seed: int) -> None:
    """Turn the llama-like DENSE model (a GGUF file or a name) into a MoE model that computes the same function."""
    with terminal.progress("making experts") as progress:
        size = write_upcycled(resolve_model(dense), output, shards, copies, seed, progress)
    terminal.print(f"wrote {output} ({size_text(size)}): {shards * copies} experts per layer, top-{shards}")


def _selecting(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options that say what a slice keeps."""
    for option in (
        click.option(
            "--without", multiple=True, metavar="PATTERN", help="Leave out these tensors too, as in 'token_embd.*'."
        ),
        click.option("--layers", metavar="LIST", help="Leave out the blocks of other layers than these, as in 3-20."),
        click.option("--experts", metavar="LIST", help="Keep these experts, as in 0-63, and nothing else."),
        click.option("--without-experts", is_flag=True, help="Leave out all routed experts."),
    ):
        function = option(function)
    return function


def _selection(without_experts: bool, experts: str | None, layers: str | None, without: tuple[str, ...]) -> Selection:
    return Selection(
        experts=None if experts is None else parse_ranges(experts, what="--experts"),
        layers=None if layers is None else parse_ranges(layers, what="--layers"),
        without_experts=without_experts,
        without=without,
    )


@command.command("slice", short_help="Write a part of a model.")
@click.argument("model")
@_OUTPUT
@_selecting
@click.pass_obj
def slice_model(
    terminal: Terminal,
    model: str,
    output: Path,
    without_experts: bool,
    experts: str | None,
    layers: str | None,
    without: tuple[str, ...],
) -> None:
    """Write a part of MODEL: what a worker needs (--experts), the first machine (--without-experts) or a stage.

    The file is a GGUF by itself and says what the whole model has. Bytes that it leaves out are not read.
    """
    selection = _selection(without_experts, experts, layers, without)
    if selection.is_everything:
        raise click.UsageError("say what to keep: --experts, --without-experts, --layers or --without")
    file = GgufFile.open(resolve_model(model))
    with terminal.progress("writing") as progress:
        size = write_slice(file, output, selection, progress=progress)
    terminal.print(f"wrote {output} ({size_text(size)} of {size_text(file.n_bytes)})")


@command.command(short_help="Fetch a model, or a part of it, from a server.")
@click.argument("address")
@_OUTPUT
@_selecting
@click.option("--manifest", metavar="FILE", help="Hashes to check against. [default: the one beside it]")
@click.option(
    "--connections", type=click.IntRange(1, 64), default=4, show_default=True, help="Requests under way at once."
)
@click.option(
    "--timeout", type=click.FloatRange(0.1), default=30.0, show_default=True, help="Longest silence, in seconds."
)
@_JSON
@click.pass_obj
def fetch(
    terminal: Terminal,
    address: str,
    output: Path,
    without_experts: bool,
    experts: str | None,
    layers: str | None,
    without: tuple[str, ...],
    manifest: str | None,
    connections: int,
    timeout: float,
    as_json: bool,
) -> None:
    """Fetch a model from ADDRESS: https://..., hf://OWNER/REPOSITORY/FILE[@REVISION] or a name of the catalogue.

    Only the bytes of what is kept are downloaded (see `linkcpp model slice`), and an interrupted download goes on
    when it is run again. A model in parts is named by its first part and becomes one file.
    """
    from orchestrator.models.fetch import fetch_slice  # loads the HTTP client, which the other commands do not need
    from orchestrator.models.http_ranges import Patience

    location = locate(address)
    if isinstance(location, Path):
        raise InputError(f"{address} is no address on a server", hint="cut a local file with `linkcpp model slice`")
    with terminal.progress(f"fetching {output.name}") as progress:
        report = fetch_slice(
            location,
            output,
            _selection(without_experts, experts, layers, without),
            manifest=manifest,
            connections=connections,
            patience=Patience(connect=timeout, silence=timeout),
            progress=progress,
        )
    if as_json:
        terminal.json({**dataclasses.asdict(report), "path": str(report.path)})
        return
    came = [f"downloaded {size_text(report.downloaded)} in {report.requests} requests"]
    came += [f"{size_text(report.resumed)} were there from before"] if report.resumed else []
    came += [f"{size_text(report.from_cache)} came from the cache"] if report.from_cache else []
    terminal.print(f"wrote {output} ({size_text(report.n_bytes)} of {size_text(report.source_bytes)})")
    terminal.print("; ".join(came))
    if report.revision is not None:
        terminal.print(f"revision {report.revision}")
    terminal.print(
        "every piece has the hash of the manifest" if report.checked else "not checked: there is no manifest"
    )


@command.command(short_help="Write the hashes of a model's pieces, or check them.")
@click.argument("model")
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="File to write.")
@click.option("--check", type=click.Path(path_type=Path), metavar="FILE", help="Compare MODEL with this manifest.")
@click.pass_obj
def manifest(terminal: Terminal, model: str, output: Path | None, check: Path | None) -> None:
    """Write the SHA-256 of every expert and tensor of MODEL, so that any part of it can be checked by itself.

    Put it beside the model on a server as NAME.gguf.manifest.json.gz, and `linkcpp model fetch` finds it.
    """
    if (output is None) == (check is None):
        raise click.UsageError("give --output FILE to write a manifest or --check FILE to compare with one")
    file = GgufFile.open(resolve_model(model))
    if check is not None:
        known = Checksums.load(check)
        with terminal.progress("checking") as progress:
            count = known.check(file, progress)
        terminal.print(f"{count} pieces are right")
    if output is not None:
        with terminal.progress("hashing") as progress:
            made = Checksums.compute(file, progress)
        made.save(output)
        terminal.print(f"wrote {output}: {sum(map(len, made.digests.values()))} hashes")


@command.command(short_help="Make a small model with random weights.")
@click.argument("architecture", required=False)
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="File to write.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the weights.")
@click.option("--like", metavar="NAME", help="Take the true shape of a known model.")
@click.option("--set", "sizes", multiple=True, metavar="SIZE=N", help="Another size, as in n_layer=2; repeatable.")
@click.option("--list", "list_only", is_flag=True, help="List the architectures and stop.")
@click.pass_obj
def synth(
    terminal: Terminal,
    architecture: str | None,
    output: Path | None,
    seed: int,
    like: str | None,
    sizes: tuple[str, ...],
    list_only: bool,
) -> None:
    """Make a small model of ARCHITECTURE with random weights, for trying and measuring."""
    from orchestrator.engine import synth as synthetic  # loads the engine, which the other commands do not need

    if list_only:
        for name in synthetic.architectures():
            terminal.print(name)
        return
    if architecture is None or output is None:
        raise click.UsageError("an ARCHITECTURE and --output FILE are needed (or --list)")
    if output.is_dir():
        raise InputError(f"{output} is a folder", hint="name the file to write")
    with terminal.progress(f"making {architecture}") as progress:
        synthetic.synth(architecture, output, seed=seed, progress=progress, like=like, **_sizes(sizes))
    terminal.print(f"wrote {output} ({size_text(output.stat().st_size)})")


def _sizes(pairs: tuple[str, ...]) -> dict[str, Any]:
    """Parse NAME=N pairs; Any because they become keyword arguments beside those of other types."""
    known = [field.name for field in dataclasses.fields(Dimensions)]
    sizes = {}
    for pair in pairs:
        name, _, number = pair.partition("=")
        if name not in known or not number.isdecimal():
            raise InputError(f"--set {pair!r} is not SIZE=N", hint=f"sizes: {', '.join(known)}")
        sizes[name] = int(number)
    return sizes
