"""What the rest of linkcpp knows about building the engine: status, build, verify; with our errors and folders."""

from __future__ import annotations

import enum
import importlib.metadata
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bindings import build as _build
from bindings.errors import BindingsError
from bindings.llama_server import build_server
from bindings.recipe import make_recipe
from bindings.verify import Check, library_checks
from bindings.verify import verify as _verify
from orchestrator.config import cache_dir
from orchestrator.errors import EngineBuildError, EngineMissingError

BUILD_HINT: Final = "run `linkcpp engine build`"


class EngineKind(enum.Enum):
    """What ``import llama_cpp`` finds in this Python."""

    PATCHED = "patched"
    STOCK = "stock"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """The installed engine, found without loading it.

    ``record`` says what a patched engine was built from (version, key, source, flags, compilers, native).
    """

    kind: EngineKind
    version: str = ""
    folder: Path | None = None
    record: Mapping[str, object] = field(default_factory=dict)


def engine_status() -> EngineStatus:
    """Return what engine this Python has."""
    engine = _build.installed()
    if engine is None:
        return EngineStatus(EngineKind.MISSING)
    if engine.record is not None:
        return EngineStatus(EngineKind.PATCHED, str(engine.record.get("version", "")), engine.folder, engine.record)
    try:
        version = importlib.metadata.version("llama-cpp-python")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    return EngineStatus(EngineKind.STOCK, version, engine.folder)


def require_patched_engine() -> EngineStatus:
    """Return the status of a patched engine; raise :class:`EngineMissingError` for a stock or missing one."""
    status = engine_status()
    if status.kind is EngineKind.MISSING:
        raise EngineMissingError("the engine (llama-cpp-python with our patches) is not installed", hint=BUILD_HINT)
    if status.kind is EngineKind.STOCK:
        version = f" {status.version}" if status.version else ""
        raise EngineMissingError(f"llama-cpp-python{version} is installed without our patches", hint=BUILD_HINT)
    return status


def is_current() -> bool:
    """Tell whether the installed engine is the one that a build here and now would give."""
    try:
        return _build.is_installed(make_recipe(os.environ))
    except BindingsError as error:
        raise EngineBuildError(str(error), hint=error.hint) from error


def build_engine(progress: _build.Progress, *, force: bool = False) -> tuple[EngineStatus, bool]:
    """Build and install the engine unless it is there; return its status and whether anything was installed.

    Raises :class:`EngineBuildError` with one line and what to do.
    """
    try:
        recipe = make_recipe(os.environ)
        if not force and _build.is_installed(recipe):
            return engine_status(), False
        wheel = _build.build(recipe, cache_dir(), progress, force=force)
        progress(0, None, "installing")
        _build.install(wheel)
    except BindingsError as error:
        raise EngineBuildError(str(error), hint=error.hint) from error
    return engine_status(), True


def upstream_server(progress: _build.Progress) -> Path:
    """Return upstream's own server, unpatched, building it unless it is there; raises :class:`EngineBuildError`."""
    try:
        return build_server(cache_dir(), progress)
    except BindingsError as error:
        raise EngineBuildError(str(error), hint=error.hint) from error


def verify_engine(model: Path | None, progress: _build.Progress) -> Iterator[Check]:
    """Yield the checks of :mod:`bindings.verify`; the last compares logits of ``model`` with an unpatched build."""
    try:
        yield from _verify(cache_dir(), model, progress)
    except BindingsError as error:
        raise EngineBuildError(str(error), hint=error.hint) from error


def compilers() -> tuple[str, ...]:
    """Return the C and C++ compiler that a build would use; raise :class:`EngineBuildError` if one is missing."""
    try:
        return make_recipe(os.environ).compilers
    except BindingsError as error:
        raise EngineBuildError(str(error), hint=error.hint) from error


def library_check() -> tuple[bool, str]:
    """Load the installed library in a process of its own; return whether it fits the ctypes layer, and words."""
    passed, details = True, []
    for check in library_checks():
        passed = passed and check.passed is True
        details.append(check.detail)
    return passed, "; ".join(details)
