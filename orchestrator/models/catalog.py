"""The models known by name: rows of ``models.toml``, read strictly and written with comments kept.

Behind the rows stand results: ``[gate.NAME]`` of a model's real weights, ``[architecture.ARCHITECTURE]`` and
``[like.NAME]`` of synthetic models, ``[serving.NAME]`` of a gateway that served it. A model's status is computed
from them, those of this machine (:mod:`orchestrator.models.results`) included, and never written down.

The file is ``$LINKCPP_MODELS`` where that is set, else the one beside this module: in a checkout a link to the
repository's, in an installed package a copy of it.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from orchestrator.config import load_toml, setting
from orchestrator.errors import ConfigError, InputError, ModelFileError
from orchestrator.models.catalog_rows import HubSource, ModelRow, UpcycleSource, read_row
from orchestrator.models.locations import HubLocation, Location, parse_location
from orchestrator.models.results import Result, Results, later, read_own_results, results_in, write_result

STATUSES: Final = ("listed", "architecture passes", "onboarded", "serving")
"""What can be said about a model, each including the ones before."""

_NOTHING: Final[Result] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a model has come: the status, and when and with which engine it was earned."""

    status: str
    since: str = ""
    engine: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Catalog:
    """The rows of one ``models.toml``."""

    path: Path
    rows: Mapping[str, ModelRow]
    results: Results

    @classmethod
    def load(cls, path: Path | None = None) -> Catalog:
        """Read the catalogue, the default one with the results of this machine.

        Raises :class:`ConfigError` naming the row and key that is wrong.
        """
        is_default = path is None
        path = path or catalog_path()
        document = load_toml(path)
        models = document.get("models", {})
        if not isinstance(models, Mapping):
            raise ConfigError(f"{path}: [models] is no table")
        results = results_in(path, document)
        if is_default:
            results = later(results, read_own_results())
        rows = {
            str(name): read_row(path, str(name), table, results["gate"].get(str(name), _NOTHING))
            for name, table in models.items()
        }
        for row in rows.values():
            if isinstance(row.source, UpcycleSource) and row.source.base not in rows:
                raise ConfigError(f"{path}: {row.name} is made from {row.source.base!r}, which has no row")
        return cls(path, MappingProxyType(rows), results)

    def row(self, name: str) -> ModelRow:
        """Return a row; raise :class:`InputError` with the nearest names otherwise."""
        if name not in self.rows:
            near = difflib.get_close_matches(name, self.rows, n=1, cutoff=0.5)
            known = f"known: {', '.join(self.rows) or 'none'}; a file is named by its path"
            hint = f"did you mean {near[0]}?" if near else known
            raise InputError(f"no model {name!r} in {self.path}", hint=hint)
        return self.rows[name]

    def standing(self, name: str) -> Standing:
        """Compute a model's status from the recorded results."""
        row = self.row(name)
        architecture = row.shape.architecture if row.shape is not None else ""
        synthetic, gate = self._result("architecture", architecture), self._result("gate", name)
        serving = self._result("serving", name)
        standing = Standing(STATUSES[0])
        if synthetic.get("passed") is True:
            like = self._result("like", name).get("passed") is True
            note = f"synthetic {architecture}" + (", and one of its true shape" if like else "")
            standing = _standing(STATUSES[1], synthetic, note)
        if synthetic.get("passed") is False:
            standing = _standing(STATUSES[0], synthetic, f"a synthetic {architecture} failed the gate")
        if gate.get("passed") is True:
            standing = _standing(STATUSES[2], gate, "its real weights passed the gate")
            if serving:
                standing = _standing(STATUSES[3], serving, "a gateway served it")
        elif gate:
            standing = _standing(standing.status, gate, "its real weights failed the gate")
        return standing

    def _result(self, section: str, name: str) -> Result:
        return self.results[section].get(name, _NOTHING)

    def record(self, name: str, result: Result, *, section: str = "gate") -> Path:
        """Write a result behind the rows, see :func:`write_result`; return the file.

        What :meth:`standing` reads of it are ``passed``, ``created`` (a date) and ``engine``.
        """
        if section in ("gate", "like", "serving"):
            self.row(name)
        return write_result(self.path, section, name, result)


def catalog_path() -> Path:
    """Return the catalogue's file: ``$LINKCPP_MODELS`` or the one that came with the program."""
    asked = setting("LINKCPP_MODELS")
    return Path(asked) if asked else Path(__file__).with_name("models.toml")


def record(name: str, result: Result, *, section: str = "gate") -> Path:
    """Record a result in the default catalogue; see :meth:`Catalog.record`."""
    return Catalog.load().record(name, result, section=section)


def locate(text: str) -> Location:
    """Turn what a user wrote into where the model lies: a path, an address, or a name of the catalogue.

    A known model that is not on this machine and has a source on Hugging Face is there. Raise like
    :func:`resolve_model` for anything that leads nowhere.
    """
    location = parse_location(text)
    if not isinstance(location, Path) or location.exists() or os.sep in text or text.endswith(".gguf"):
        return location
    row = Catalog.load().row(text)
    if not row.is_present and isinstance(row.source, HubSource):
        return HubLocation(row.source.repository, row.source.file, row.source.revision)
    return resolve_model(text)


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
        hint = f"run `linkcpp model {'fetch' if isinstance(row.source, HubSource) else 'get'} {row.name}`"
        if row.source is None:
            hint = f"no source is known: put a GGUF there as {row.path}, or name the file by its path"
        raise ModelFileError(f"{row.name} is not on this machine yet", hint=hint)
    return row.path


def _standing(status: str, result: Result, note: str) -> Standing:
    return Standing(status, str(result.get("created", "")), str(result.get("engine", "")), note)
