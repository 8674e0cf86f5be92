"""The models known by name: rows of ``models.toml``, read strictly and written with comments kept.

The file is ``$LINKCPP_MODELS`` where that is set, else the one beside this module: in a checkout a link to the
repository's, in an installed package a copy of it.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import tomlkit
from tomlkit.items import Table

from orchestrator.config import load_toml, models_dir, setting
from orchestrator.errors import ConfigError, InputError, ModelFileError

_HASH: Final = re.compile(r"[0-9a-f]{64}")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class PackageSource:
    """A GGUF that a wheel on the Python package index carries; ``size`` and ``sha256`` are the wheel's."""

    package: str
    version: str
    sha256: str
    size: int
    member: str


@dataclass(frozen=True, slots=True)
class UpcycleSource:
    """A MoE model made from another row's dense one."""

    base: str
    shards: int
    copies: int
    seed: int


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One model of the catalogue; ``file`` is its name in the data folder, ``size`` its bytes."""

    name: str
    title: str
    license: str
    file: str
    size: int
    sha256: str
    source: PackageSource | UpcycleSource
    gate: Mapping[str, object]

    @property
    def path(self) -> Path:
        """Where the file is, or will be once it was got."""
        return models_dir() / self.file

    @property
    def is_present(self) -> bool:
        """Tell whether the file is there with the right size; its hash was checked when it was got."""
        try:
            return self.path.stat().st_size == self.size
        except OSError:
            return False


@dataclass(frozen=True, slots=True)
class Catalog:
    """The rows of one ``models.toml``."""

    path: Path
    rows: Mapping[str, ModelRow]

    @classmethod
    def load(cls, path: Path | None = None) -> Catalog:
        """Read the catalogue; raise :class:`ConfigError` naming the row and key that is wrong."""
        path = catalog_path() if path is None else path
        document = load_toml(path)
        models, gate = document.get("models", {}), document.get("gate", {})
        if not isinstance(models, Mapping) or not isinstance(gate, Mapping):
            raise ConfigError(f"{path}: [models] or [gate] is no table")
        rows = {str(name): _row(path, str(name), table, gate.get(name)) for name, table in models.items()}
        for row in rows.values():
            if isinstance(row.source, UpcycleSource) and row.source.base not in rows:
                raise ConfigError(f"{path}: {row.name} is made from {row.source.base!r}, which has no row")
        return cls(path, MappingProxyType(rows))

    def row(self, name: str) -> ModelRow:
        """Return a row; raise :class:`InputError` with the nearest names otherwise."""
        if name not in self.rows:
            near = difflib.get_close_matches(name, self.rows, n=1, cutoff=0.5)
            known = f"known: {', '.join(self.rows) or 'none'}; a file is named by its path"
            hint = f"did you mean {near[0]}?" if near else known
            raise InputError(f"no model {name!r} in {self.path}", hint=hint)
        return self.rows[name]

    def record(self, name: str, result: Mapping[str, object]) -> Path:
        """Write a gate result as ``[gate.NAME]``, keeping comments and order; return the file.

        ``result`` holds strings, numbers, truth values, lists and mappings of them; ``None`` is left out. Results
        stand behind all rows: a table put between them would part the next row from the comment above it.
        """
        self.row(name)
        path = self.path.resolve()  # a checkout's copy is a link: replace the file and not the link
        try:
            document = tomlkit.parse(path.read_text(encoding="utf-8"))
            if "gate" not in document:
                document.append("gate", tomlkit.table(is_super_table=True))
            gate = document["gate"]
            if not isinstance(gate, Table):
                raise ConfigError(f"{path}: [gate] is no table")
            gate[name] = _toml(result)
            partial = path.with_name(f".{path.name}.{os.getpid()}")
            try:
                partial.write_text(tomlkit.dumps(document), encoding="utf-8")
                os.replace(partial, path)
            finally:
                with contextlib.suppress(OSError):
                    partial.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
        return path


def catalog_path() -> Path:
    """Return the catalogue's file: ``$LINKCPP_MODELS`` or the one that came with the program."""
    asked = setting("LINKCPP_MODELS")
    return Path(asked) if asked else Path(__file__).with_name("models.toml")


def record(name: str, result: Mapping[str, object]) -> Path:
    """Record a gate result of a model in the default catalogue; see :meth:`Catalog.record`."""
    return Catalog.load().record(name, result)


def resolve_model(name_or_path: str | Path) -> Path:
    """Turn what a user wrote, a catalogue name or a path, into a model's file.

    Raise :class:`ModelFileError` for a known model that was not got yet and for a path where there is nothing.
    """
    text = str(name_or_path)
    path = Path(text)
    try:
        exists = path.exists()
    except OSError as error:  # a name too long, a folder that may not be entered
        raise ModelFileError(f"cannot read {path}: {error.strerror or error}") from error
    if exists:
        return path
    if os.sep in text or text.endswith(".gguf"):
        raise ModelFileError(f"no such file: {path}")
    row = Catalog.load().row(text)
    if not row.is_present:
        raise ModelFileError(f"{row.name} is not on this machine yet", hint=f"run `linkcpp model get {row.name}`")
    return row.path


def _row(path: Path, name: str, table: object, gate: object) -> ModelRow:
    reader = _Reader(f"{path}: models.{name}", table)
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{path}: {name!r} cannot be a model's name")
    file = reader.text("file")
    if not _NAME.fullmatch(file):
        raise ConfigError(f"{reader.place}.file: {file!r} is not a plain file name")
    source = _Reader(f"{reader.place}.source", reader.table.get("source"))
    kind = source.text("kind")
    parsed: PackageSource | UpcycleSource
    if kind == "pypi":
        parsed = PackageSource(
            source.text("package"),
            source.text("version"),
            source.hash(),
            source.number("size"),
            source.text("member"),
        )
    elif kind == "upcycle":
        parsed = UpcycleSource(
            source.text("base"), source.number("shards"), source.number("copies"), source.number("seed")
        )
    else:
        raise ConfigError(f"{source.place}.kind: {kind!r} is none of pypi, upcycle")
    return ModelRow(
        name,
        reader.text("title"),
        reader.text("license"),
        file,
        reader.number("size"),
        reader.hash(),
        parsed,
        gate if isinstance(gate, Mapping) else {},
    )


class _Reader:
    """A table whose values must have the right type; errors name the place."""

    __slots__ = ("place", "table")

    def __init__(self, place: str, table: object) -> None:
        if not isinstance(table, Mapping):
            raise ConfigError(f"{place} is no table")
        self.place = place
        self.table = table

    def text(self, key: str) -> str:
        value = self.table.get(key)
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{self.place}.{key} must be a text")
        return value

    def number(self, key: str) -> int:
        value = self.table.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ConfigError(f"{self.place}.{key} must be a whole number")
        return value

    def hash(self) -> str:
        value = self.text("sha256")
        if not _HASH.fullmatch(value):
            raise ConfigError(f"{self.place}.sha256 must be 64 hex digits")
        return value


def _toml(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _toml(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_toml(item) for item in value]
    return value
