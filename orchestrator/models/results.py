"""Results of runs by kind and name, in a TOML file: ``[gate.NAME]``, ``[architecture.ARCHITECTURE]`` and so on.

The catalogue that ships holds results behind its rows; those of this machine lie in a file of the user's data folder.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import tomlkit
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import Table

from orchestrator.config import data_dir, load_toml
from orchestrator.errors import ConfigError, InputError

SECTIONS: Final = ("gate", "architecture", "like", "serving")
"""Tables of results: of a model's real weights, of synthetic models by architecture and by shape, of gateways."""

Result = Mapping[str, object]
Results = Mapping[str, Mapping[str, Result]]
"""Section -> name -> result."""


def own_results_path() -> Path:
    """Return the file with the results of this machine, which need not be there yet."""
    return data_dir() / "results.toml"


def read_own_results() -> Results:
    """Read the results of this machine; raise :class:`ConfigError` where their file is damaged."""
    path = own_results_path()
    if not path.exists():
        return MappingProxyType({section: {} for section in SECTIONS})
    return results_in(path, load_toml(path))


def results_in(path: Path, document: Mapping[str, object]) -> Results:
    """Take the results out of a file's tables; raise :class:`ConfigError` naming the one that is no table."""
    return MappingProxyType({section: _section(path, section, document.get(section, {})) for section in SECTIONS})


def later(left: Results, right: Results) -> Results:
    """Join results; of two for one name the later holds (``created``, a date in ISO 8601)."""
    joined: dict[str, Mapping[str, Result]] = {}
    for section in SECTIONS:
        entries = dict(left[section])
        for name, result in right[section].items():
            if name not in entries or str(result.get("created", "")) >= str(entries[name].get("created", "")):
                entries[name] = result
        joined[section] = MappingProxyType(entries)
    return MappingProxyType(joined)


def write_result(path: Path, section: str, name: str, result: Result) -> Path:
    """Write a result as ``[SECTION.NAME]``, keeping comments and order; return the file, made where it is missing.

    ``result`` holds strings, numbers, truth values, lists and mappings of them; ``None`` is left out. Results stand
    behind all else: a table put between two rows would part the second from the comment above it.
    """
    if section not in SECTIONS:
        raise InputError(f"there are no results of the kind {section!r}")
    path = path.resolve()  # a checkout's copy is a link: replace the file and not the link
    try:
        document = tomlkit.parse(path.read_text(encoding="utf-8") if path.exists() else "")
        if section not in document:
            document.append(section, tomlkit.table(is_super_table=True))
        table = document[section]
        if not isinstance(table, Table):
            raise ConfigError(f"{path}: [{section}] is no table")
        table[name] = _toml(result)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            partial.write_text(tomlkit.dumps(document), encoding="utf-8")
            os.replace(partial, path)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
    except TOMLKitError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    return path


def _section(path: Path, section: str, value: object) -> Mapping[str, Result]:
    if not isinstance(value, Mapping) or not all(isinstance(entry, Mapping) for entry in value.values()):
        raise ConfigError(f"{path}: [{section}] is no table of tables")
    return MappingProxyType({str(name): entry for name, entry in value.items()})


def _toml(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _toml(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_toml(item) for item in value]
    return value
