"""`linkcpp engine`: build the patched engine, say what is installed, prove that it is what it should be."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from orchestrator import config
from orchestrator.cli.app import Terminal
from orchestrator.engine.build import BUILD_HINT, EngineKind, build_engine, engine_status, is_current, verify_engine
from orchestrator.errors import LinkcppError

DEMO_MODEL = "smollm2-moe"
SYNTHETIC_ARCHITECTURE = "qwen2moe"  # small, and it has shared experts beside the routed ones


@click.group(name="engine")
def command() -> None:
    """Build, inspect and verify the patched engine."""


@command.command(short_help="Build and install the engine; a second run does nothing.")
@click.option("--force", is_flag=True, help="Build from nothing even if a fitting engine is there.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def build(terminal: Terminal, force: bool, as_json: bool) -> None:
    """Build the engine and install it in this Python; a second run does nothing.

    Flags in the environment variable CMAKE_ARGS are passed on, as in `CMAKE_ARGS=-DGGML_CUDA=on`.
    """
    with terminal.progress("engine") as progress:
        status, changed = build_engine(progress, force=force)
    if as_json:
        terminal.json({"version": status.version, "folder": str(status.folder), "installed": changed})
        return
    terminal.print(f"engine {status.version} {'installed' if changed else 'is there already'}: {status.folder}")


@command.command(short_help="Say which engine is installed.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def info(terminal: Terminal, as_json: bool) -> None:
    """Say which engine is installed and what it was built from."""
    status = engine_status()
    current = is_current() if status.kind is EngineKind.PATCHED else False
    if as_json:
        terminal.json(
            {
                "kind": status.kind.value,
                "version": status.version,
                "folder": None if status.folder is None else str(status.folder),
                "current": current,
                "record": dict(status.record),
            }
        )
        return
    rows = [("kind", status.kind.value), ("version", status.version), ("folder", str(status.folder or ""))]
    for key in ("flags", "compilers", "native", "source", "key"):
        value = status.record.get(key)
        if value is not None:
            rows.append((key, ", ".join(map(str, value)) if isinstance(value, list) else str(value)))
    if not current:
        rows.append(("to do", BUILD_HINT))
    terminal.table("Engine", ("what", "value"), rows)


@command.command(short_help="Prove that the engine is upstream's plus our patches.")
@click.option(
    "--model",
    "model_path",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="GGUF to compare with.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def verify(context: click.Context, model_path: Path | None, as_json: bool) -> None:
    """Prove that the installed engine is upstream's plus our patches and nothing else.

    The patches must apply without fuzz, twice; structs and functions must be as Python believes; and with the
    hook off the logits of a model must have the bytes of an unpatched build with the same flags, which is made
    once for the comparison. Without --model the demo model is taken, else a small random one.
    """
    terminal: Terminal = context.obj
    words = {True: "ok", False: "FAILED", None: "skipped"}
    with terminal.progress("verify") as progress, _model(terminal, model_path) as model:
        checks = list(verify_engine(model, progress))
    passed = all(check.passed for check in checks)
    if as_json:
        terminal.json(
            {
                "passed": passed,
                "checks": [{"name": it.name, "passed": it.passed, "detail": it.detail} for it in checks],
            }
        )
    else:
        terminal.table("Engine", ("check", "result", "detail"), [(c.name, words[c.passed], c.detail) for c in checks])
    context.exit(0 if passed else 1)


@contextmanager
def _model(terminal: Terminal, given: Path | None) -> Iterator[Path | None]:
    """Give the model to compare with: the one asked for, the demo's if it is there, else a small random one."""
    demo = config.models_dir() / f"{DEMO_MODEL}.gguf"
    if given is not None or demo.is_file():
        yield given or demo
        return
    with tempfile.TemporaryDirectory(prefix="linkcpp-verify-") as folder:
        path = Path(folder) / "random.gguf"
        try:
            from orchestrator.engine.synth import synth

            synth(SYNTHETIC_ARCHITECTURE, path)
        except (LinkcppError, ImportError) as error:
            terminal.error(f"no model to compare with: {error}")
            yield None
            return
        yield path
