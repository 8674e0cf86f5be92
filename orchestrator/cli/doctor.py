"""`linkcpp doctor`: what this machine has and lacks, each with its remedy."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import click
import psutil

from orchestrator import config
from orchestrator.cli.app import Terminal
from orchestrator.engine.build import (
    BUILD_HINT,
    EngineKind,
    compilers,
    engine_status,
    is_current,
    library_check,
)
from orchestrator.errors import ConfigError, EngineError

OK: Final = "ok"
WARN: Final = "warn"
FAIL: Final = "fail"

GIB: Final = 1 << 30
GATEWAY_PORT: Final = 8080


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; ``fix`` is empty where nothing is to be done."""

    name: str
    state: str
    detail: str
    fix: str = ""


@click.command(name="doctor")
@click.option(
    "--port",
    "ports",
    multiple=True,
    type=click.IntRange(1, 65535),
    default=(GATEWAY_PORT,),
    help="Port that must be free; may be given several times.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def command(context: click.Context, ports: tuple[int, ...], as_json: bool) -> None:
    """Check compiler, engine, cores, memory, disk and ports; exit with 3 if something is missing."""
    terminal: Terminal = context.obj
    findings = [finding for check in CHECKS for finding in check()]
    findings += [check_port(port) for port in ports]
    failed = any(finding.state == FAIL for finding in findings)
    if as_json:
        terminal.json({"passed": not failed, "findings": [asdict(finding) for finding in findings]})
    else:
        rows = [(it.state, it.name, it.detail, it.fix) for it in findings]
        terminal.table("This machine", ("", "what", "found", "to do"), rows)
    context.exit(EngineError.exit_code if failed else 0)


def check_python() -> Iterator[Finding]:
    """Python and whether packages go into an environment of their own."""
    version = platform.python_version()
    state = OK if sys.version_info >= (3, 10) else FAIL
    yield Finding(
        "python", state, f"{version}, {sys.executable}", "" if state == OK else "install Python 3.10 or newer"
    )


def check_tools() -> Iterator[Finding]:
    """What a build of the engine needs; a machine with a finished engine can do without."""
    severity = WARN if engine_status().kind is EngineKind.PATCHED else FAIL
    try:
        yield Finding("compiler", OK, compilers()[-1])
    except EngineError as error:
        yield Finding("compiler", severity, str(error), error.hint or "")
    for tool in ("git", "make"):
        path = shutil.which(tool)
        if path:
            yield Finding(tool, OK, path)
        else:
            yield Finding(tool, severity if tool == "git" else WARN, "not on the PATH", f"apt-get install {tool}")


def check_engine() -> Iterator[Finding]:
    """The engine: there, ours, up to date, and fitting the ctypes layer."""
    status = engine_status()
    if status.kind is EngineKind.MISSING:
        yield Finding("engine", FAIL, "not installed", BUILD_HINT)
        return
    if status.kind is EngineKind.STOCK:
        yield Finding("engine", FAIL, f"stock llama-cpp-python {status.version}".rstrip(), BUILD_HINT)
        return
    try:
        current = is_current()
    except EngineError:
        current = True  # without a compiler nothing newer could be built; the tools' own line says so
    detail = f"patched, {status.version}"
    yield (
        Finding("engine", OK, detail)
        if current
        else Finding("engine", WARN, f"{detail}, of other inputs", BUILD_HINT)
    )
    fits, words = library_check()
    yield Finding("library", OK if fits else FAIL, words, "" if fits else "run `linkcpp engine build --force`")


def check_processor() -> Iterator[Finding]:
    """Cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    note = "" if cores > 1 else "workers on this machine will share one core"
    yield Finding("cores", OK if cores > 1 else WARN, f"{cores} of {os.cpu_count()}, {platform.machine()}", note)


def check_memory() -> Iterator[Finding]:
    """Memory that is free for weights."""
    memory = psutil.virtual_memory()
    enough = memory.available >= GIB
    detail = f"{memory.available / GIB:.1f} GiB available of {memory.total / GIB:.1f}"
    yield Finding("memory", OK if enough else WARN, detail, "" if enough else "close programs; the demo needs 1 GiB")


def check_folders() -> Iterator[Finding]:
    """The folders for models and builds: writable, with space."""
    for name, find in (("data", config.data_dir), ("cache", config.cache_dir)):
        yield _check_folder(name, find)


def _check_folder(name: str, find: Callable[[], Path]) -> Finding:
    variable = f"LINKCPP_{name.upper()}"
    try:
        folder = find()
        free = shutil.disk_usage(folder).free
    except (ConfigError, OSError) as error:
        return Finding(name, FAIL, str(error), f"set {variable} to a folder that can be written")
    if free < 2 * GIB:
        return Finding(name, WARN, f"{folder}, {free / GIB:.1f} GiB free", f"free 2 GiB or set {variable}")
    return Finding(name, OK, f"{folder}, {free / GIB:.0f} GiB free")


def check_loopback() -> Iterator[Finding]:
    """The network inside this machine, which workers here use."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()[:2], 2):
            yield Finding("loopback", OK, "127.0.0.1 connects")
    except OSError as error:
        yield Finding("loopback", FAIL, f"127.0.0.1: {error}", "bring the loopback interface up")


def check_port(port: int) -> Finding:
    """Whether a port can be listened on."""
    try:
        with socket.create_server(("127.0.0.1", port)):
            return Finding(f"port {port}", OK, "free")
    except OSError as error:
        return Finding(f"port {port}", WARN, error.strerror or str(error), "stop what uses it, or give --port")


CHECKS: Final = (
    check_python,
    check_tools,
    check_engine,
    check_processor,
    check_memory,
    check_folders,
    check_loopback,
)
