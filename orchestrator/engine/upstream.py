"""The sources that the engine was built from, read out of the pinned source distribution in the cache."""

from __future__ import annotations

import tarfile
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Final

from bindings.errors import BindingsError
from bindings.recipe import PATCHES_FOLDER
from bindings.upstream import file_sha256, read_pin
from orchestrator.config import cache_dir
from orchestrator.errors import EngineError
from orchestrator.models.upstream_sources import SourceInventory, take_inventory, wanted_source

_SOURCE: Final = PurePosixPath("vendor/llama.cpp/src")


def source_inventory() -> SourceInventory | None:
    """Say which architectures of the pinned engine have experts; None where its sources are not in the cache.

    They are there once the engine was built on this machine. Raises :class:`EngineError` where they are damaged.
    """
    sources = _read_sources()
    return None if sources is None else take_inventory(sources)


def _read_sources() -> Mapping[str, str] | None:
    try:
        pin = read_pin(PATCHES_FOLDER / "UPSTREAM")
    except BindingsError as error:
        raise EngineError(str(error), hint=error.hint) from error
    path = cache_dir() / "engine" / pin.file_name
    try:
        if not path.is_file() or file_sha256(path) != pin.sha256:
            return None
        found: dict[str, str] = {}
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                inside = PurePosixPath(*PurePosixPath(member.name).parts[1:])
                if not member.isreg() or not inside.is_relative_to(_SOURCE):
                    continue
                name = str(inside.relative_to(_SOURCE))
                content = archive.extractfile(member) if wanted_source(name) else None
                if content is not None:
                    found[name] = content.read().decode("utf-8", "replace")
    except (OSError, tarfile.TarError, EOFError) as error:
        raise EngineError(f"cannot read the engine's sources in {path}: {error}") from error
    return found
